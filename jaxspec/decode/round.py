"""The speculative round: propose, score, verify, commit.

Rows accept different numbers of tokens, so each has its own offset, `num_committed`. Two rows with
a window of four (`r` is the newest committed token, `d` drafts), before and after a round:

    row 0   a b r|d d d .        accepts 2    a b r d d n|. .
    row 1   a b c d e r|d d d    accepts 0    a b c d e r n|. .

Plain decoding is the same program with `draft_limit` 0: every node is invalid. The logits after the
newest committed token do not depend on what follows it in the window, so speculative output equals
plain output bit for bit, with the verifiers that draw the target's own tokens (`coupled`). If the
target's bits do not depend on the width of the window either, plain decoding runs in windows of one
token (`plain`), with the same bits; see `buckets`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache import layouts
from jaxspec.cache.pages import commit_path
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.recorders import record
from jaxspec.decode.state import batch_view, newest_token, scatter_rows
from jaxspec.drafters.base import NoDrafter, draft_with, function_params
from jaxspec.models.base import forward_features, kernels_of, logits_of
from jaxspec.types import (
    BatchView,
    DecodeState,
    Draft,
    DraftContext,
    Emission,
    Finish,
    Origin,
    PyTree,
    RoundInfo,
    Scores,
    Verdict,
    Window,
)


def speculative_round(parts: RoundParts, params: PyTree, state: DecodeState) -> DecodeState:
    """The state after one round of the rows in it."""
    drafter = parts.drafter
    info, cache, drafter_state = draft_and_verify(parts, params, state)
    recorded = record(state, info, logprobs=parts.logprobs, trace=parts.trace)
    state = commit(state, info, cache).replace(**recorded)
    if parts.is_resting and not drafter.taps:  # as in `plain_round`
        return state
    after = batch_view(state, is_chain=drafter.is_chain)
    own = function_params(drafter, params)
    drafter_state = drafter.commit(parts.round_shape, own, drafter_state, after, info)
    return state.replace(drafter=drafter_state)


def draft_and_verify(
    parts: RoundParts, params: PyTree, state: DecodeState
) -> tuple[RoundInfo, PyTree, PyTree]:
    """The result of a round before it is committed, the target's cache with the accepted path in
    place, and the drafter's state."""
    rows = batch_view(state, is_chain=parts.drafter.is_chain)
    draft, drafter_state, cache = propose(parts, params, state, rows)
    window = make_window(state, draft, tree_depth=parts.shape.tree_depth)
    if parts.skips_padding:  # a tree's nodes come first too
        num_live = jnp.maximum(1 + draft.num_valid, state.least_live)
        num_live = jnp.where(state.is_running, num_live, 0)
        window = window.replace(num_live=num_live)
    tokens, context = window_tokens(state, draft), draft_context(draft, window)
    scores, cache, drafter_state = score(
        parts, params, drafter_state, rows, draft, tokens, window, cache
    )
    verdict = parts.verifier.verify(scores.logits, draft, rows, context)
    if not draft.is_chain:
        move = kernels_of(parts.target).move_within
        cache = commit_path(cache, window.start, verdict.path, move=move)
    info = RoundInfo(
        rows=rows,
        draft=draft,
        tokens=tokens,
        window=window,
        context=context,
        scores=scores,
        verdict=verdict,
        emission=emit(state, draft, verdict),
    )
    return info, cache, drafter_state


def propose(
    parts: RoundParts, params: PyTree, state: DecodeState, rows: BatchView
) -> tuple[Draft, PyTree, PyTree]:
    """Drafts, and clips each row's draft to its limit. Returns draft, drafter state and target's
    cache (a drafter may write to its uncommitted slots)."""
    drafter = parts.drafter
    if parts.is_resting:
        draft, drafter_state = NoDrafter().propose(parts.round_shape, (), state.drafter, rows)
        draft = draft.replace(max_depth=drafter.max_depth, is_chain=drafter.is_chain)
        return draft, drafter_state, state.cache
    if drafter.drafts_last_token and rows.remaining is not None:
        is_near_end = rows.draft_limit == rows.remaining - 1  # limited by the end of the row
        rows = rows.replace(draft_limit=jnp.where(is_near_end, rows.remaining, rows.draft_limit))
    draft, drafter_state, cache = draft_with(
        drafter, parts.round_shape, params, state.drafter, rows, state.cache
    )
    wanted = jnp.minimum(rows.draft_limit, draft.tokens.shape[1])
    num_valid = jnp.clip(draft.num_valid, 0, wanted)
    draft = draft.replace(
        num_valid=num_valid, max_depth=drafter.max_depth, is_chain=drafter.is_chain
    )
    return draft, drafter_state, cache


def score(
    parts: RoundParts,
    params: PyTree,
    drafter_state: PyTree,
    rows: BatchView,
    draft: Draft,
    tokens: jax.Array,
    window: Window,
    cache: PyTree,
) -> tuple[Scores, PyTree, PyTree]:
    """The target's scores of the window, its cache with the window's KV, and the drafter's state,
    because the drafter's own `score` may have drafted in the same pass."""
    target, drafter = parts.target, parts.drafter
    if drafter.score is None:
        hidden, features, cache = forward_features(
            target, params["target"], tokens, window, cache, drafter.taps
        )
    else:
        own = function_params(drafter, params)
        hidden, features, cache, drafter_state = drafter.score(
            parts.round_shape, own, drafter_state, rows, draft, tokens, window, cache
        )
    logits = logits_of(target, params["target"], hidden, window)
    return Scores(logits=logits, hidden=hidden, features=features), cache, drafter_state


def window_tokens(state: DecodeState, draft: Draft) -> jax.Array:
    """`[B, T]` int32: the newest token, then the nodes. Padding and holes repeat the newest token,
    which any model can embed; they are scored, but nothing reads their logits."""
    root = newest_token(state)
    return jnp.concatenate([root, jnp.where(draft.is_node, draft.tokens, root)], axis=1)


def make_window(state: DecodeState, draft: Draft, *, tree_depth: int) -> Window:
    """The positions and slots of the newest token and the draft's nodes; `tree_depth` as in
    `EngineShape`.

    Entry i is stored at slot `start + i` and has position `start + depth`. All T entries of a
    running row get a slot, valid or not, so that no live block holds a slot with unknown content
    (kernels that skip padding can cope with that). Rows that have ended write nothing.
    """
    start = layouts.window_start(state)
    entry = jnp.arange(draft.tokens.shape[1] + 1, dtype=jnp.int32)[None]
    slots = jnp.where(state.is_running[:, None], start[:, None] + entry, -1)
    if tree_depth == 0:
        return Window(start=start, positions=start[:, None] + entry, slots=slots)
    # Padding and holes become children of the root, because their parents may be garbage.
    parents = jnp.where(draft.is_node, draft.parents, -1)
    depth, paths = lay_out(parents, tree_depth)
    return Window(start=start, positions=start[:, None] + depth, slots=slots, paths=paths)


def lay_out(parents: jax.Array, tree_depth: int) -> tuple[jax.Array, jax.Array]:
    """The depth `[B, T]` of the root and of each node, and `Window.paths` `[B, T, tree_depth + 1]`.

    Args:
      parents: `[B, N]`; no node is deeper than `tree_depth`.
      tree_depth: static.
    """
    # Window entries: 0 is the root, node n is entry n + 1.
    parent = jnp.pad(parents + 1, ((0, 0), (1, 0)))
    entry = jnp.arange(parent.shape[1], dtype=jnp.int32)[None]
    above = [jnp.broadcast_to(entry, parent.shape)]  # for each entry: itself, its parent, ...
    for _ in range(min(tree_depth, parents.shape[1])):
        above.append(jnp.take_along_axis(parent, above[-1], axis=1))
    above = jnp.stack(above, axis=2)  # 0 from the root on
    depth = jnp.sum(above > 0, axis=2, dtype=jnp.int32)
    steps_up = depth[..., None] - jnp.arange(tree_depth + 1, dtype=jnp.int32)[None, None]
    paths = jnp.take_along_axis(above, jnp.maximum(steps_up, 0), axis=2)
    return depth, jnp.where(steps_up >= 0, paths, 0)


def draft_context(draft: Draft, window: Window) -> DraftContext:
    """The uncommitted tokens before the one that is drawn after each window entry: the entry's
    ancestors and itself. The root is committed already."""
    num_nodes = draft.tokens.shape[1]
    entry = jnp.arange(num_nodes + 1, dtype=jnp.int32)
    if window.paths is None:
        is_before = (entry[None, 1:] <= entry[:, None])[None]
    else:
        # Beyond an entry's own depth its path holds the root, which is not a node.
        on_path = window.paths[..., None] == entry[None, None, None, 1:]
        is_before = jnp.any(on_path, axis=2)
    return DraftContext(
        tokens=draft.tokens,
        is_before=is_before,
        position=window.positions + 1,
        max_depth=draft.depth,
    )


def emitted_tokens(draft: Draft, verdict: Verdict) -> jax.Array:
    """`[B, D + 1]` int32: the accepted path, then the target's next token, repeated to the end."""
    along_path = jnp.take_along_axis(draft.tokens, jnp.maximum(verdict.path, 0), axis=1)
    along_path = jnp.pad(along_path, ((0, 0), (0, 1)))
    index = jnp.arange(along_path.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index < verdict.num_accepted[:, None], along_path, verdict.next_token[:, None])


def emit(state: DecodeState, draft: Draft, verdict: Verdict) -> Emission:
    """What a verdict adds to each row: the accepted tokens and the target's next one, cut after a
    stop token or at the row's limit. If the target's logits are not finite there is no next token,
    and the row ends."""
    tokens = emitted_tokens(draft, verdict)
    length = tokens.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    is_finite = verdict.next_token >= 0
    num_chosen = verdict.num_accepted + is_finite.astype(jnp.int32)

    is_stop = jnp.any(tokens[:, :, None] == state.stop_tokens[:, None, :], axis=2)
    is_stop &= index < num_chosen[:, None]
    first_stop = jnp.min(jnp.where(is_stop, index, length), axis=1)
    room = state.limit - state.num_committed
    num_emitted = jnp.minimum(jnp.minimum(num_chosen, first_stop + 1), room)
    num_emitted = jnp.where(state.is_running, num_emitted, 0)

    is_full = state.num_committed + num_emitted >= state.limit
    at_limit = jnp.where(is_full, state.limit_finish, Finish.RUNNING)
    unstopped = jnp.where(is_finite | (num_emitted < num_chosen), at_limit, Finish.NON_FINITE)
    is_stopped = first_stop < num_emitted
    finish = jnp.where(is_stopped, Finish.STOP_TOKEN, unstopped)
    stopped_by = jnp.take_along_axis(tokens, jnp.minimum(first_stop, length - 1)[:, None], axis=1)

    after_drafts = jnp.where(verdict.num_accepted < draft.num_valid, Origin.CORRECTED, Origin.BONUS)
    last_origin = jnp.where(draft.num_valid > 0, after_drafts, Origin.PLAIN)[:, None]
    origin = jnp.where(index < verdict.num_accepted[:, None], Origin.ACCEPTED, last_origin)
    return Emission(
        tokens=tokens,
        origin=origin.astype(jnp.int8),
        num_emitted=num_emitted,
        finish=jnp.where(state.is_running, finish, state.finish).astype(jnp.int32),
        stop_token=jnp.where(is_stopped, stopped_by[:, 0], state.stop_token),
    )


def commit(state: DecodeState, info: RoundInfo, cache: PyTree) -> DecodeState:
    """The state with what the round emitted."""
    new, start = info.emission, state.num_committed
    return state.replace(
        cache=cache,
        num_committed=start + new.num_emitted,
        finish=new.finish,
        tokens=scatter_rows(state.tokens, start, new.tokens, new.num_emitted),
        origin=scatter_rows(state.origin, start, new.origin, new.num_emitted),
        stop_token=new.stop_token,
    )
