"""Failure modes of published systems, as faults that the auditor has to catch: `FAULTS`.

`jaxspec.audit.controls.instrument` says how they are switched on, and names the invariants.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxspec import sampling
from jaxspec.audit.controls.instrument import (
    Edit,
    Fault,
    Kind,
    KvSource,
    OpenState,
    OpenWindow,
    Place,
)
from jaxspec.decode import round as decode_round
from jaxspec.drafters import draft_model
from jaxspec.engine.engine import Engine
from jaxspec.models import decoder
from jaxspec.types import BatchView, Draft, Emission, Finish, Origin, Verdict, Window

FAULTS: dict[str, Fault] = {}

# The production functions, whatever is patched later.
_emit = decode_round.emit
_filtered_logits = sampling.filtered_logits


def _enters(
    place: str | tuple[Any, str],
    source: str,
    invariant: str,
    *,
    kind: Kind = "tokens",
    **also: Edit,
):
    """Enters a function into `FAULTS` under its own name: as the edit at a place of the round, with
    `also` at other places, or as a wrapper of `(owner, attribute)`."""

    def enter(function):
        name = function.__name__.removeprefix("_")
        FAULTS[name] = Fault(
            name=name,
            source=source,
            invariant=invariant,
            kind=kind,
            edits={place: function, **also} if isinstance(place, str) else {},
            patches=() if isinstance(place, str) else [(*place, function)],
        )
        return function

    return enter


# Parts of the edits.


def prompt_padding(state: OpenState) -> jax.Array:
    """`[B]`, padding of each row when the batch's prompts are brought to one length."""
    length = jnp.asarray(state.sampling.prompt_length)
    return jnp.max(length) - length


def aligned_padding(state: OpenState) -> jax.Array:
    """`[B]`, left padding of each row when the batch is brought to one length now."""
    return jnp.max(state.num_committed) - state.num_committed


def num_rejected(state: OpenState) -> jax.Array:
    """`[B]`, drafts of the row that were rejected so far."""
    return state.counts.num_draft_tokens - state.counts.num_accepted_tokens


def num_emitted(at: Place) -> jax.Array:
    """`[B]`, number of tokens of the round, by its counts."""
    new = jax.tree.map(jnp.subtract, at.after.counts, at.state.counts)
    return new.num_accepted_tokens + new.num_rounds


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """`[B]`, the entry `index` `[B]` of each row of `values` `[B, n]`; the last one beyond it."""
    index = jnp.minimum(index, values.shape[1] - 1)
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def slots_of(state: OpenState) -> jax.Array:
    """`[S]`, every slot of a row."""
    return jnp.arange(state.tokens.shape[1], dtype=jnp.int32)


def cut(verdict: Verdict, draft: Draft, num_accepted: jax.Array) -> Verdict:
    """The verdict with fewer accepted drafts; the first one that it loses becomes the next token,
    as the target's own."""
    depth = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
    is_cut = num_accepted < verdict.num_accepted
    return verdict.replace(
        num_accepted=jnp.minimum(num_accepted, verdict.num_accepted),
        path=jnp.where(depth < num_accepted[:, None], verdict.path, -1),
        next_token=jnp.where(is_cut, pick(draft.tokens, num_accepted), verdict.next_token),
    )


def is_any_of(tokens: jax.Array, stop_tokens: jax.Array) -> jax.Array:
    """`[B, n]` bool, which `tokens` `[B, n]` are among the row's `stop_tokens` `[B, num_stop]`."""
    return jnp.any(tokens[..., None] == stop_tokens[:, None, :], axis=-1)


# Positions and padding.


@_enters(
    "window",
    "BSP, where its model takes positions from the buffer",
    "I2: a token's position is the number of the row's tokens before it",
)
def _positions_by_buffer_index(window: OpenWindow, at: Place) -> OpenWindow:
    ahead = prompt_padding(at.state) + num_rejected(at.state)
    return window.replace(rotary=window.rotary + ahead[:, None])


@_enters(
    (Engine, "run"),
    "DSD: the target is called without mask and positions",
    "I2, I3: a query sees only its own row's tokens",
)
def _padding_attended(real, pad_token):
    """Prompts of a batch brought to one length on the left, with neither mask nor positions."""

    def run(self, requests, **options):
        padded = []
        for first in range(0, len(requests), self.shape.batch_size):
            batch = requests[first : first + self.shape.batch_size]
            longest = max(len(request.prompt_token_ids) for request in batch)
            for request in batch:
                ids = request.prompt_token_ids
                ids = (pad_token,) * (longest - len(ids)) + tuple(ids)
                padded.append(dataclasses.replace(request, prompt_token_ids=ids))
        return real(self, padded, **options)

    return run


def _gathered_padding(after: OpenState, at: Place) -> jax.Array:
    emitted = at.info.emission.num_emitted
    room = jnp.maximum(after.limit - after.num_committed, 0)
    return jnp.where(at.state.is_running, jnp.minimum(jnp.max(emitted) - emitted, room), 0)


def _padding_in_kv(source: KvSource, at: Place) -> KvSource:
    new = (at.after.padding - at.state.padding)[:, None]
    return KvSource(
        slot=jnp.maximum(source.slot - new, 0), is_kept=source.is_kept & (source.slot >= new)
    )


def _padding_in_positions(window: OpenWindow, at: Place) -> OpenWindow:
    return window.replace(rotary=window.rotary - at.state.padding[:, None])


@_enters(
    "commit",
    "DSD: pads again without removing the old padding",
    "I1: a row's length is that of its tokens",
    kv=_padding_in_kv,
    window=_padding_in_positions,
)
def _padding_accumulates(after: OpenState, at: Place) -> OpenState:
    new = _gathered_padding(after, at)[:, None]
    slot = slots_of(after)
    moved = jnp.take_along_axis(after.tokens, jnp.maximum(slot - new, 0), axis=1)
    return after.replace(
        tokens=jnp.where(slot < new, at.pad_token, moved),
        num_committed=after.num_committed + new[:, 0],
        padding=after.padding + new[:, 0],
    )


def _pad_drafts_emitted(emitted: jax.Array, at: Place) -> jax.Array:
    index = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    is_pad = (index >= at.draft.num_valid[:, None]) & (index < at.verdict.num_accepted[:, None])
    return jnp.where(is_pad, at.pad_token, emitted)


@_enters(
    "verdict",
    "DSD: padding of short drafts is compared with padding",
    "C5: only the first num_valid nodes of a draft are proposals",
    emitted=_pad_drafts_emitted,
)
def _pad_drafts_accepted(verdict: Verdict, at: Place) -> Verdict:
    num_nodes = at.draft.tokens.shape[1]
    has_pads = (verdict.num_accepted == at.draft.num_valid) & (at.draft.num_valid < num_nodes)
    every = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), verdict.path.shape)
    return verdict.replace(
        num_accepted=jnp.where(has_pads, num_nodes, verdict.num_accepted),
        path=jnp.where(has_pads[:, None], every, verdict.path),
    )


# The bonus token.


@_enters(
    "verdict",
    "DSD; Meta (Tang et al. 2025)",
    "E1: a round's last token is the target's own",
)
def _bonus_from_draft(verdict: Verdict, at: Place) -> Verdict:
    drafted = pick(at.draft.tokens, verdict.num_accepted)
    is_rejected = verdict.num_accepted < at.draft.num_valid
    return verdict.replace(next_token=jnp.where(is_rejected, drafted, verdict.next_token))


@_enters(
    "verdict",
    "the bonus read one entry too far (J + 1)",
    "E1: a round's last token is the target's after the accepted ones",
)
def _bonus_after_mismatch(verdict: Verdict, at: Place) -> Verdict:
    return verdict.replace(next_token=pick(at.chosen, verdict.num_accepted + 1))


# KV, and the position of a row in it.


@_enters(
    "kv",
    "DSD: KV cropped to the batch's least acceptance, tokens kept per row",
    "I3: KV holds every token before the newest one",
)
def _kv_cut_to_batch_minimum(source: KvSource, at: Place) -> KvSource:
    ran = at.state.is_running
    emitted = num_emitted(at)
    fewest = jnp.min(jnp.where(ran, emitted, source.slot.shape[1]))
    first_lost = (at.state.num_committed - 1 + fewest)[:, None]
    is_lost = ran[:, None] & (source.slot >= first_lost)
    return source.replace(is_kept=source.is_kept & ~is_lost)


@_enters(
    "kv",
    "a realignment by delta + 1",
    "I3: slot i holds the KV of token i",
)
def _kv_shifted_by_one(source: KvSource, at: Place) -> KvSource:
    emitted = num_emitted(at)
    is_realigned = at.state.is_running & (emitted < jnp.max(emitted))
    shifted = jnp.maximum(source.slot - 1, 0)
    return source.replace(slot=jnp.where(is_realigned[:, None], shifted, source.slot))


@_enters(
    "window",
    "EQSPEC's Algorithm 3 as printed: only the drafts are fed, not the last token",
    "I3: the newest token has no KV yet and has to be written",
)
def _bonus_without_kv(window: OpenWindow, at: Place) -> OpenWindow:
    return window.replace(slots=window.slots.at[:, 0].set(-1))


@_enters(
    "window",
    "a realignment that keeps the old padding's positions",
    "I2: a token's position is the number of the row's tokens before it",
)
def _positions_not_recomputed(window: OpenWindow, at: Place) -> OpenWindow:
    shift = aligned_padding(at.state) - prompt_padding(at.state)
    return window.replace(rotary=window.rotary + shift[:, None])


@_enters(
    "window",
    "BSP without its masked holes: rejected drafts stay in the cache",
    "C1: what lies beyond the committed length is never visible",
)
def _rejected_tail_visible(window: OpenWindow, at: Place) -> OpenWindow:
    tail = num_rejected(at.state)[:, None]
    return window.replace(
        slots=jnp.where(window.slots >= 0, window.slots + tail, -1), limit=window.limit + tail
    )


@_enters(
    "commit",
    "a rejected draft's slot counted as committed",
    "I1: a row's length is that of its tokens",
)
def _rollback_one_short(after: OpenState, at: Place) -> OpenState:
    is_rejected = at.info.verdict.num_accepted < at.info.draft.num_valid
    is_kept = is_rejected & after.is_running & (after.num_committed < after.limit - 1)
    return after.replace(num_committed=after.num_committed + is_kept.astype(jnp.int32))


@_enters(
    "window",
    "one scalar cursor for the batch (Transformers' static cache, Flax's cache)",
    "I1: every row has its own offset",
)
def _one_cursor_for_all_rows(window: OpenWindow, at: Place) -> OpenWindow:
    foremost = jnp.max(window.start) - window.start
    slots = jnp.where(window.slots >= 0, window.slots + foremost[:, None], -1)
    return window.replace(slots=slots)


# Masks by value.


@_enters(
    "window",
    "draft columns masked where draft == pad",
    "I3: a query sees every token before it, whatever its id",
)
def _draft_mask_by_value(window: OpenWindow, at: Place) -> OpenWindow:
    slot = slots_of(at.state)
    is_pad = at.draft.tokens == at.pad_token
    is_hidden = jnp.any((slot[:, None] == window.slots[:, None, 1:]) & is_pad[:, None], axis=2)
    return window.replace(is_hidden=window.is_hidden | is_hidden)


@_enters(
    "window",
    "EQSPEC, EXSPEC: mask = (id != pad)",
    "I2, I3: a query sees every token before it, whatever its id",
)
def _pad_in_prompt_masked(window: OpenWindow, at: Place) -> OpenWindow:
    is_context = slots_of(at.state) < at.state.num_committed[:, None] - 1
    is_pad = is_context & (at.state.tokens == at.pad_token)
    num_pads = jnp.sum(is_pad, axis=1, dtype=jnp.int32)
    return window.replace(
        is_hidden=window.is_hidden | is_pad, rotary=window.rotary - num_pads[:, None]
    )


# What a row keeps of its previous request.


@_enters(
    "prefill",
    "a row's KV taken for the new request's prefix",
    "C1: nothing of a row's previous request is visible",
)
def _stale_kv_after_reuse(after: OpenState, at: Place) -> OpenState:
    is_taken_as_cached = (at.rows >= 0) & (at.starts == 0) & at.state.is_reused[at.rows]
    num_pages = after.cache.layers[0].k.shape[0]
    pages = jnp.where(is_taken_as_cached[:, None], after.cache.table[at.rows], num_pages)
    is_stale = jnp.zeros((num_pages,), bool).at[pages].set(True, mode="drop")

    def kept(new, old):
        return jnp.where(is_stale.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    layers = jax.tree.map(kept, after.cache.layers, at.state.cache.layers)
    return after.replace(cache=after.cache.replace(layers=layers))


@_enters(
    "admit_row",
    "a row's counters are not reset",
    "I1, C1: nothing of a row's previous request is visible",
)
def _stale_length_after_reuse(after: OpenState, at: Place) -> OpenState:
    old = jnp.minimum(at.state.num_committed[at.row], jnp.asarray(at.admission.limit) - 1)
    kept = jnp.where(after.is_reused[at.row], old, 0)
    # A row that seems longer than its prompt would wait forever for the rest of the prompt.
    is_longer = kept > after.num_committed[at.row]
    finish = jnp.where(is_longer, Finish.RUNNING, after.finish[at.row])
    return after.replace(
        num_committed=after.num_committed.at[at.row].max(kept),
        finish=after.finish.at[at.row].set(finish),
    )


# Ends.


def _without_stops(at: Place) -> Emission:
    """The emission as if nothing stopped a row."""
    stops = jnp.full_like(at.state.stop_tokens, -1)
    return _emit(at.state.replace(stop_tokens=stops), at.draft, at.verdict)


@_enters(
    "emission",
    "EOS looked for in the bonus only",
    "E1: an output ends at its first stop token",
)
def _stop_unseen_in_accepted_run(emission: Emission, at: Place) -> Emission:
    unstopped = _without_stops(at)
    last = jnp.maximum(unstopped.num_emitted - 1, 0)
    token, origin = pick(unstopped.tokens, last), pick(unstopped.origin, last)
    is_stop = is_any_of(token[:, None], at.state.stop_tokens)[:, 0]
    ends = is_stop & (origin != Origin.ACCEPTED) & at.state.is_running
    return unstopped.replace(
        finish=jnp.where(ends, jnp.int32(Finish.STOP_TOKEN), unstopped.finish),
        stop_token=jnp.where(ends, token, unstopped.stop_token),
    )


@_enters(
    "emission",
    "EQSPEC, EXSPEC: the round's tokens after an accepted EOS are kept",
    "E1: an output ends at its first stop token",
)
def _tokens_kept_after_stop(emission: Emission, at: Place) -> Emission:
    return _without_stops(at).replace(finish=emission.finish, stop_token=emission.stop_token)


@_enters(
    "admit_row",
    "EQSPEC, EXSPEC: EOS looked for in the whole row",
    "E2: only emitted tokens end an output",
)
def _stop_in_prompt_ends_row(after: OpenState, at: Place) -> OpenState:
    is_prompt = slots_of(after) < after.num_committed[at.row]
    is_stop = is_any_of(after.tokens[at.row][None], after.stop_tokens[at.row][None])[0]
    is_live = (after.finish[at.row] == Finish.RUNNING) | (after.finish[at.row] == Finish.PREFILLING)
    ends = jnp.any(is_prompt & is_stop) & is_live
    finish = jnp.where(ends, jnp.int32(Finish.STOP_TOKEN), after.finish[at.row])
    return after.replace(finish=after.finish.at[at.row].set(finish))


@_enters(
    "commit",
    "EQSPEC, EXSPEC where pad == eos: left padding ends a row",
    "E2: an output does not depend on the neighbours' lengths",
)
def _pad_is_stop(after: OpenState, at: Place) -> OpenState:
    ends = at.state.is_running & (prompt_padding(at.state) > 0)
    return after.replace(finish=jnp.where(ends, jnp.int32(Finish.STOP_TOKEN), after.finish))


# Order.


@_enters(
    (Engine, "run"),
    "EXSPEC with --sort_by_length: never sorted back",
    "outputs come in the order of their prompts",
    kind="order",
)
def _sorted_outputs(real, pad_token):
    """Requests decoded by ascending length, and returned in that order."""

    def run(self, requests, **options):
        ordered = sorted(requests, key=lambda request: len(request.prompt_token_ids))
        return real(self, ordered, **options)

    return run


# Sampling.


@_enters(
    "admit_row",
    "one generator for the batch instead of one per request",
    "E3: a sampled token is drawn with its request's key and position",
    kind="sampling",
)
def _noise_ignores_seed(after: OpenState, at: Place) -> OpenState:
    key = jnp.asarray(after.sampling.key).at[at.row].set(jnp.uint32(0))
    return after.replace(sampling=after.sampling.replace(key=key))


@_enters(
    "rows",
    "top-k, top-p and min-p broadcast along the wrong rows",
    "E2: a row's distribution does not depend on its neighbours' settings",
    kind="sampling",
)
def _filters_of_neighbour(rows: BatchView, at: Place) -> BatchView:
    theirs = {
        name: jnp.roll(getattr(rows.sampling, name), 1, axis=0)
        for name in ("top_k", "top_p", "min_p")
    }
    return rows.replace(sampling=rows.sampling.replace(**theirs))


# The distribution.


@_enters(
    (sampling, "round_keys"),
    "keys folded from the position alone, under block verification",
    "E3: no round reuses noise that decided an earlier one",
    kind="distribution",
)
def _position_only_keys(real, pad_token):
    """Keys that forget in which round a position is drawn."""

    def round_keys(rows: BatchView, node: jax.Array, stream):
        position = rows.num_committed[:, None] + node
        start = rows.replace(num_committed=jnp.zeros_like(rows.num_committed))
        return real(start, position, stream)

    return round_keys


@_enters(
    (sampling, "round_keys"),
    "one key for a node's draft, test and residual",
    "E3: purposes never share noise within a round",
    kind="distribution",
)
def _one_stream(real, pad_token):
    """The same noise for draft, test and residual of a node."""
    return lambda rows, node, stream: real(rows, node, sampling.Stream.DRAFT)


@_enters(
    (draft_model, "draw_draft"),
    "top-p before temperature in the draft, after it in the target",
    "E3: q is exactly the distribution that the draft was drawn from",
    kind="distribution",
)
def _draft_filtered_in_another_order(real, pad_token):
    """Drafts drawn with top-p before temperature, but passed on with the distribution of the right
    order."""

    def filtered_logits(logits, values):
        unheated = values.replace(temperature=jnp.ones_like(values.temperature))
        filtered = _filtered_logits(logits, unheated)
        return filtered / jnp.where(values.temperature > 0, values.temperature, 1)[:, None, None]

    def draw_draft(logits, rows, drafted, node, **options):
        drawn = real(logits, rows, drafted, node, **options)
        with mock.patch.object(sampling, "filtered_logits", filtered_logits):
            other = real(logits, rows, drafted, node, **options)
        return drawn._replace(token=other.token)

    return draw_draft


# Cost.


@_enters(
    (decoder, "forward"),
    "vLLM v0: a row per drafted token (vllm issue 17984)",
    "none: the output is right",
    kind="efficiency",
)
def _batch_expansion(real, pad_token):
    """Every token of a round's window as a separate row over the same pages."""

    def forward(config, params, tokens, window: Window, cache, **options):
        num_rows, num_entries = tokens.shape
        if window.rows is not None or window.paths is not None or num_entries == 1:
            return real(config, params, tokens, window, cache, **options)
        rows = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), num_entries)
        expanded = Window(
            start=window.positions.reshape(-1),
            positions=window.positions.reshape(-1, 1),
            slots=window.slots.reshape(-1, 1),
            rows=rows,
        )
        hidden, cache = real(config, params, tokens.reshape(-1, 1), expanded, cache, **options)
        return hidden.reshape(num_rows, num_entries, -1), cache

    return forward


@_enters(
    "verdict",
    "all rows truncated to the batch's least acceptance",
    "none: the output is right",
    kind="efficiency",
)
def _rollback_to_batch_minimum(verdict: Verdict, at: Place) -> Verdict:
    fewest = jnp.min(jnp.where(at.state.is_running, verdict.num_accepted, verdict.path.shape[1]))
    return cut(verdict, at.draft, jnp.minimum(verdict.num_accepted, fewest))


@_enters(
    "verdict",
    "EQSPEC, EXSPEC: at most k tokens of k drafts, never k + 1",
    "none: the output is right",
    kind="efficiency",
)
def _bonus_lost_on_full_acceptance(verdict: Verdict, at: Place) -> Verdict:
    is_full = (verdict.num_accepted == at.draft.num_valid) & (at.draft.num_valid > 0)
    return cut(verdict, at.draft, verdict.num_accepted - is_full.astype(jnp.int32))


FAULTS["another_order_of_sums"] = Fault(
    name="another_order_of_sums",
    source="SGLang with EAGLE, vLLM, any other kernel: rounding, not synchronisation",
    invariant="none: the output is right, or differs at ties (E4)",
    kind="numerics",
)
