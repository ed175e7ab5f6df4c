"""The speculative round: propose, score, verify, commit.

Rows accept different numbers of tokens, so each stands at an offset of its own, `num_committed`.
Two rows, window of four (`r` the newest committed token, `d` drafts), before a round and after it:

    row 0   a b r|d d d .        accepts 2    a b r d d n|. .
    row 1   a b c d e r|d d d    accepts 0    a b c d e r n|. .

Plain decoding is the same program with `draft_limit` 0: every node invalid. The logits after the
newest committed token do not depend on what follows it in the window, so speculative output equals
plain output bit for bit, with the verifiers that draw the target's own tokens (`coupled`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxspec.cache import layouts
from jaxspec.cache.pages import commit_path
from jaxspec.decode.recorders import record
from jaxspec.decode.state import batch_view, newest_token, scatter_rows
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

if TYPE_CHECKING:
    from jaxspec.decode.loop import DecodeLoop


def speculative_round(parts: DecodeLoop, params: PyTree, state: DecodeState) -> DecodeState:
    """The state after one round of the rows in it."""
    target, drafter, shape = parts.target, parts.drafter, parts.round_shape
    rows = batch_view(state)
    draft, drafter_state = drafter.propose(shape, params["drafter"], state.drafter, rows)
    draft = clip_draft(draft, rows)

    window = make_window(state, draft, is_chain=drafter.is_chain)
    tokens, context = window_tokens(state, draft), draft_context(draft, window)
    hidden, cache = target.forward(params["target"], tokens, window, state.cache)
    scores = Scores(logits=target.logits(params["target"], hidden), hidden=hidden)

    verdict = parts.verifier.verify(scores.logits, draft, rows, context)
    if not drafter.is_chain:
        cache = commit_path(cache, window.start, verdict.path)
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
    recorded = record(state, info, logprobs=parts.logprobs, trace=parts.trace)
    state = commit(state, info, cache).replace(**recorded)
    drafter_state = drafter.commit(shape, params["drafter"], drafter_state, batch_view(state), info)
    return state.replace(drafter=drafter_state)


def clip_draft(draft: Draft, rows: BatchView) -> Draft:
    """The draft without the nodes that a row did not want, whatever the drafter proposed."""
    wanted = jnp.minimum(rows.draft_limit, draft.tokens.shape[1])
    return draft.replace(num_valid=jnp.clip(draft.num_valid, 0, wanted))


def window_tokens(state: DecodeState, draft: Draft) -> jax.Array:
    """`[B, T]` int32: the newest token, then the nodes. Invalid nodes repeat the newest token,
    which any model can embed; they are scored, and nothing reads their logits."""
    root = newest_token(state)
    is_valid = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32) < draft.num_valid[:, None]
    return jnp.concatenate([root, jnp.where(is_valid, draft.tokens, root)], axis=1)


def make_window(state: DecodeState, draft: Draft, *, is_chain: bool) -> Window:
    """Where the newest token and the draft's nodes stand.

    Entry i is stored at slot `start + i` and stands at position `start + depth`. All T entries of a
    running row are written, valid or not, so no live block holds a slot of unknown content.
    Rows that have ended write nothing.
    """
    num_rows, num_nodes = draft.tokens.shape
    is_running = state.is_running
    start = layouts.window_start(state)
    entry = jnp.arange(num_nodes + 1, dtype=jnp.int32)
    slots = jnp.where(is_running[:, None], start[:, None] + entry, -1)
    if is_chain:
        return Window(start=start, positions=start[:, None] + entry, slots=slots)

    # Parents come before children, so one pass in node order completes depths and ancestor paths.
    # Invalid nodes hang from the root: their parents may be garbage.
    depth = jnp.zeros((num_rows, num_nodes + 1), jnp.int32)
    paths = jnp.zeros((num_rows, num_nodes + 1, num_nodes + 1), jnp.int32)
    for node in range(num_nodes):
        parent = jnp.where(node < draft.num_valid, draft.parents[:, node] + 1, 0)[:, None]
        node_depth = jnp.take_along_axis(depth, parent, axis=1) + 1
        path = jnp.take_along_axis(paths, parent[:, :, None], axis=1)[:, 0]
        depth = depth.at[:, node + 1].set(node_depth[:, 0])
        paths = paths.at[:, node + 1].set(jnp.where(entry == node_depth, node + 1, path))
    return Window(start=start, positions=start[:, None] + depth, slots=slots, paths=paths)


def draft_context(draft: Draft, window: Window) -> DraftContext:
    """What stands before the token that is drawn after each window entry: the entry's ancestors and
    itself. The root is committed already."""
    num_nodes = draft.tokens.shape[1]
    entry = jnp.arange(num_nodes + 1, dtype=jnp.int32)
    if window.paths is None:
        is_before = (entry[1:] <= entry[:, None])[None]
    else:
        depth = window.positions - window.start[:, None]
        on_path = (window.paths[..., None] == entry[1:]) & (entry <= depth[..., None])[..., None]
        is_before = jnp.any(on_path, axis=2)
    return DraftContext(tokens=draft.tokens, is_before=is_before, position=window.positions + 1)


def emitted_tokens(draft: Draft, verdict: Verdict) -> jax.Array:
    """`[B, N + 1]` int32: the accepted path, then the target's next token, repeated to the end."""
    along_path = jnp.take_along_axis(draft.tokens, jnp.maximum(verdict.path, 0), axis=1)
    along_path = jnp.pad(along_path, ((0, 0), (0, 1)))
    index = jnp.arange(along_path.shape[1], dtype=jnp.int32)
    return jnp.where(index < verdict.num_accepted[:, None], along_path, verdict.next_token[:, None])


def emit(state: DecodeState, draft: Draft, verdict: Verdict) -> Emission:
    """What a verdict adds to each row: the accepted tokens and the target's next one, cut after a
    stop token or at the row's limit. Where the target's logits are not finite there is no next
    token, and the row ends."""
    tokens = emitted_tokens(draft, verdict)
    length = tokens.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
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
