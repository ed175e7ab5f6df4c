"""Failure modes of published systems, as faults that the auditor has to catch: `FAULTS`.

`jaxspec.audit.controls.instrument` says how they are switched on, and names the invariants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from unittest import mock

import jax
import jax.numpy as jnp

from jaxspec import sampling
from jaxspec.audit.controls.instrument import Fault, KvSource, OpenState, OpenWindow, Place
from jaxspec.decode import round as decode_round
from jaxspec.drafters import draft_model
from jaxspec.engine.engine import Engine
from jaxspec.models import decoder
from jaxspec.types import BatchView, Draft, Emission, Finish, Origin, Verdict, Window

_emit = decode_round.emit  # as it is in production, whatever is patched later


# What the edits are made of.


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


def num_emitted(before: OpenState, after: OpenState) -> jax.Array:
    """`[B]`, tokens of the round, by its counts."""
    return (after.counts.num_accepted_tokens - before.counts.num_accepted_tokens) + (
        after.counts.num_rounds - before.counts.num_rounds
    )


def cut(verdict: Verdict, draft: Draft, num_accepted: jax.Array) -> Verdict:
    """The verdict with fewer accepted drafts; the first that it loses is the next token, as the
    target's own."""
    depth = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
    lost = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)[:, None]
    next_token = jnp.take_along_axis(draft.tokens, lost, axis=1)[:, 0]
    return verdict.replace(
        num_accepted=jnp.minimum(num_accepted, verdict.num_accepted),
        path=jnp.where(depth < num_accepted[:, None], verdict.path, -1),
        next_token=jnp.where(num_accepted < verdict.num_accepted, next_token, verdict.next_token),
    )


def is_any_of(tokens: jax.Array, stop_tokens: jax.Array) -> jax.Array:
    """`[B, n]` bool, which `tokens` `[B, n]` are among the row's `stop_tokens` `[B, num_stop]`."""
    return jnp.any(tokens[..., None] == stop_tokens[:, None, :], axis=-1)


# Positions.


def _positions_by_buffer_index(window: OpenWindow, at: Place) -> OpenWindow:
    ahead = prompt_padding(at.state) + num_rejected(at.state)
    return window.replace(rotary=window.rotary + ahead[:, None])


def _positions_not_recomputed(window: OpenWindow, at: Place) -> OpenWindow:
    shift = aligned_padding(at.state) - prompt_padding(at.state)
    return window.replace(rotary=window.rotary + shift[:, None])


# Masks.


def _pads_masked_by_value(window: OpenWindow, at: Place) -> OpenWindow:
    slot = jnp.arange(at.state.tokens.shape[1], dtype=jnp.int32)
    is_context = slot < at.state.num_committed[:, None] - 1
    is_pad = is_context & (at.state.tokens == at.pad_token)
    num_pads = jnp.sum(is_pad, axis=1, dtype=jnp.int32)
    return window.replace(
        is_hidden=window.is_hidden | is_pad, rotary=window.rotary - num_pads[:, None]
    )


def _draft_mask_by_value(window: OpenWindow, at: Place) -> OpenWindow:
    slot = jnp.arange(at.state.tokens.shape[1], dtype=jnp.int32)
    is_pad = at.draft.tokens == at.pad_token
    is_hidden = jnp.any((slot[:, None] == window.slots[:, None, 1:]) & is_pad[:, None], axis=2)
    return window.replace(is_hidden=window.is_hidden | is_hidden)


def _rejected_tail_visible(window: OpenWindow, at: Place) -> OpenWindow:
    tail = num_rejected(at.state)[:, None]
    return window.replace(
        slots=jnp.where(window.slots >= 0, window.slots + tail, -1), limit=window.limit + tail
    )


# KV.


def _one_cursor(window: OpenWindow, at: Place) -> OpenWindow:
    foremost = jnp.max(window.start) - window.start
    slots = jnp.where(window.slots >= 0, window.slots + foremost[:, None], -1)
    return window.replace(slots=slots)


def _bonus_without_kv(window: OpenWindow, at: Place) -> OpenWindow:
    return window.replace(slots=window.slots.at[:, 0].set(-1))


def _kv_cut_to_minimum(source: KvSource, at: Place) -> KvSource:
    ran = at.state.is_running
    emitted = num_emitted(at.state, at.after)
    fewest = jnp.min(jnp.where(ran, emitted, source.slot.shape[1]))
    first_lost = (at.state.num_committed - 1 + fewest)[:, None]
    is_lost = ran[:, None] & (source.slot >= first_lost)
    return source.replace(is_kept=source.is_kept & ~is_lost)


def _kv_shifted_by_one(source: KvSource, at: Place) -> KvSource:
    emitted = num_emitted(at.state, at.after)
    is_realigned = at.state.is_running & (emitted < jnp.max(emitted))
    shifted = jnp.maximum(source.slot - 1, 0)
    return source.replace(slot=jnp.where(is_realigned[:, None], shifted, source.slot))


def _stale_kv(after: OpenState, at: Place) -> OpenState:
    is_taken_as_cached = at.state.is_reused[at.row] & (at.start == 0)
    cache = jax.tree.map(
        lambda new, old: jnp.where(is_taken_as_cached, old, new), after.cache, at.state.cache
    )
    return after.replace(cache=cache)


def _stale_length(after: OpenState, at: Place) -> OpenState:
    old = jnp.minimum(at.state.num_committed[at.row], jnp.asarray(at.admission.limit) - 1)
    kept = jnp.where(after.is_reused[at.row], old, 0)
    # A row that seems longer than its prompt would wait forever for the rest of the prompt.
    is_longer = kept > after.num_committed[at.row]
    finish = jnp.where(is_longer, Finish.RUNNING, after.finish[at.row])
    return after.replace(
        num_committed=after.num_committed.at[at.row].max(kept),
        finish=after.finish.at[at.row].set(finish),
    )


# Padding that is never taken off.


def _gathered_padding(after: OpenState, at: Place) -> jax.Array:
    emitted = at.info.emission.num_emitted
    room = jnp.maximum(after.limit - after.num_committed, 0)
    return jnp.where(at.state.is_running, jnp.minimum(jnp.max(emitted) - emitted, room), 0)


def _padding_accumulates(after: OpenState, at: Place) -> OpenState:
    new = _gathered_padding(after, at)[:, None]
    slot = jnp.arange(after.tokens.shape[1], dtype=jnp.int32)
    moved = jnp.take_along_axis(after.tokens, jnp.maximum(slot - new, 0), axis=1)
    return after.replace(
        tokens=jnp.where(slot < new, at.pad_token, moved),
        num_committed=after.num_committed + new[:, 0],
        padding=after.padding + new[:, 0],
    )


def _padding_in_kv(source: KvSource, at: Place) -> KvSource:
    new = (at.after.padding - at.state.padding)[:, None]
    return KvSource(
        slot=jnp.maximum(source.slot - new, 0), is_kept=source.is_kept & (source.slot >= new)
    )


def _padding_in_positions(window: OpenWindow, at: Place) -> OpenWindow:
    return window.replace(rotary=window.rotary - at.state.padding[:, None])


# Acceptance.


def _bonus_from_draft(verdict: Verdict, at: Place) -> Verdict:
    node = jnp.minimum(verdict.num_accepted, at.draft.tokens.shape[1] - 1)[:, None]
    drafted = jnp.take_along_axis(at.draft.tokens, node, axis=1)[:, 0]
    is_rejected = verdict.num_accepted < at.draft.num_valid
    return verdict.replace(next_token=jnp.where(is_rejected, drafted, verdict.next_token))


def _bonus_after_mismatch(verdict: Verdict, at: Place) -> Verdict:
    after = jnp.minimum(verdict.num_accepted + 1, at.chosen.shape[1] - 1)[:, None]
    return verdict.replace(next_token=jnp.take_along_axis(at.chosen, after, axis=1)[:, 0])


def _pad_drafts_match(verdict: Verdict, at: Place) -> Verdict:
    num_nodes = at.draft.tokens.shape[1]
    has_pads = (verdict.num_accepted == at.draft.num_valid) & (at.draft.num_valid < num_nodes)
    every = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), verdict.path.shape)
    return verdict.replace(
        num_accepted=jnp.where(has_pads, num_nodes, verdict.num_accepted),
        path=jnp.where(has_pads[:, None], every, verdict.path),
    )


def _pad_drafts_emitted(emitted: jax.Array, at: Place) -> jax.Array:
    index = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    is_pad = (index >= at.draft.num_valid[:, None]) & (index < at.verdict.num_accepted[:, None])
    return jnp.where(is_pad, at.pad_token, emitted)


def _rollback_one_short(after: OpenState, at: Place) -> OpenState:
    is_rejected = at.info.verdict.num_accepted < at.info.draft.num_valid
    is_kept = is_rejected & after.is_running & (after.num_committed < after.limit - 1)
    return after.replace(num_committed=after.num_committed + is_kept.astype(jnp.int32))


# Ends.


def _without_stops(at: Place) -> Emission:
    """The emission as if nothing stopped a row."""
    stops = jnp.full_like(at.state.stop_tokens, -1)
    return _emit(at.state.replace(stop_tokens=stops), at.draft, at.verdict)


def _stop_unseen_in_run(emission: Emission, at: Place) -> Emission:
    unstopped = _without_stops(at)
    last = jnp.maximum(unstopped.num_emitted - 1, 0)[:, None]
    token = jnp.take_along_axis(unstopped.tokens, last, axis=1)
    origin = jnp.take_along_axis(unstopped.origin, last, axis=1)[:, 0]
    ends = is_any_of(token, at.state.stop_tokens)[:, 0] & (origin != Origin.ACCEPTED)
    ends &= at.state.is_running
    return unstopped.replace(
        finish=jnp.where(ends, jnp.int32(Finish.STOP_TOKEN), unstopped.finish),
        stop_token=jnp.where(ends, token[:, 0], unstopped.stop_token),
    )


def _tokens_after_stop(emission: Emission, at: Place) -> Emission:
    return _without_stops(at).replace(finish=emission.finish, stop_token=emission.stop_token)


def _stop_in_prompt(after: OpenState, at: Place) -> OpenState:
    slot = jnp.arange(after.tokens.shape[1], dtype=jnp.int32)
    is_prompt = slot < after.num_committed[at.row]
    is_stop = is_any_of(after.tokens[at.row][None], after.stop_tokens[at.row][None])[0]
    is_live = (after.finish[at.row] == Finish.RUNNING) | (after.finish[at.row] == Finish.PREFILLING)
    ends = jnp.any(is_prompt & is_stop) & is_live
    finish = jnp.where(ends, jnp.int32(Finish.STOP_TOKEN), after.finish[at.row])
    return after.replace(finish=after.finish.at[at.row].set(finish))


def _pad_is_stop(after: OpenState, at: Place) -> OpenState:
    ends = at.state.is_running & (prompt_padding(at.state) > 0)
    return after.replace(finish=jnp.where(ends, jnp.int32(Finish.STOP_TOKEN), after.finish))


# Sampling.


def _seedless(after: OpenState, at: Place) -> OpenState:
    key = jnp.asarray(after.sampling.key).at[at.row].set(jnp.uint32(0))
    return after.replace(sampling=after.sampling.replace(key=key))


def _filters_of_neighbour(rows: BatchView, at: Place) -> BatchView:
    theirs = {
        name: jnp.roll(getattr(rows.sampling, name), 1, axis=0)
        for name in ("top_k", "top_p", "min_p")
    }
    return rows.replace(sampling=rows.sampling.replace(**theirs))


def _position_only_keys(real, pad_token):
    """Keys that forget in which round a position is drawn."""

    def round_keys(rows: BatchView, node: jax.Array, stream):
        position = rows.num_committed[:, None] + node
        start = rows.replace(num_committed=jnp.zeros_like(rows.num_committed))
        return real(start, position, stream)

    return round_keys


def _one_stream(real, pad_token):
    """The same noise for draft, test and residual of a node."""
    return lambda rows, node, stream: real(rows, node, sampling.Stream.DRAFT)


def _draft_in_another_order(real, pad_token):
    """Drafts drawn with top-p before temperature, handed over with the distribution of the right
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


_filtered_logits = sampling.filtered_logits


# Cost.


def _roll_back_to_minimum(verdict: Verdict, at: Place) -> Verdict:
    fewest = jnp.min(jnp.where(at.state.is_running, verdict.num_accepted, verdict.path.shape[1]))
    return cut(verdict, at.draft, jnp.minimum(verdict.num_accepted, fewest))


def _lose_bonus(verdict: Verdict, at: Place) -> Verdict:
    is_full = (verdict.num_accepted == at.draft.num_valid) & (at.draft.num_valid > 0)
    return cut(verdict, at.draft, verdict.num_accepted - is_full.astype(jnp.int32))


def _expand_batch(real, pad_token):
    """Every token of a round's window as a row of its own over the same pages."""

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


# Around the engine.


def _sort_outputs(real, pad_token):
    """Requests decoded by ascending length, and returned in that order."""

    def run(self, requests, **options):
        ordered = sorted(requests, key=lambda request: len(request.prompt_token_ids))
        return real(self, ordered, **options)

    return run


def _pad_prompts(real, pad_token):
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


_BY_TOKENS = "greedy tokens differ from the reference loop's beyond a tie"

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="positions_by_buffer_index",
            source="BSP, where its model takes positions from the buffer",
            invariant="I2: a token's position is the number of the row's tokens before it",
            detection=_BY_TOKENS + ", after the first padding or rejection",
            edits={"window": _positions_by_buffer_index},
        ),
        Fault(
            name="padding_attended",
            source="DSD: the target is called without mask and positions",
            invariant="I2, I3: a query sees its row's own tokens only",
            detection=_BY_TOKENS + ", in rows shorter than the longest",
            patches=((Engine, "run", _pad_prompts),),
        ),
        Fault(
            name="padding_accumulates",
            source="DSD: padded again without being unpadded",
            invariant="I1: a row's length is that of its tokens",
            detection=_BY_TOKENS + "; outputs hold pads and end early",
            edits={
                "commit": _padding_accumulates,
                "kv": _padding_in_kv,
                "window": _padding_in_positions,
            },
        ),
        Fault(
            name="pad_drafts_accepted",
            source="DSD: pads that fill up short drafts are compared with pads",
            invariant="C5: only the first num_valid nodes of a draft are proposals",
            detection=_BY_TOKENS + ", at pads after a fully accepted draft",
            edits={"verdict": _pad_drafts_match, "emitted": _pad_drafts_emitted},
        ),
        Fault(
            name="bonus_from_draft",
            source="DSD; Meta (Tang et al. 2025)",
            invariant="E1: a round's last token is the target's own",
            detection=_BY_TOKENS + ", at the first rejection",
            edits={"verdict": _bonus_from_draft},
        ),
        Fault(
            name="bonus_after_mismatch",
            source="the bonus read one entry too far (J + 1)",
            invariant="E1: a round's last token is the target's after the accepted ones",
            detection=_BY_TOKENS + ", at the first rejection",
            edits={"verdict": _bonus_after_mismatch},
        ),
        Fault(
            name="kv_cut_to_batch_minimum",
            source="DSD: KV cropped to the batch's least acceptance, tokens kept per row",
            invariant="I3: KV holds every token before the newest one",
            detection=_BY_TOKENS + ", in rows that accepted more than the least",
            edits={"kv": _kv_cut_to_minimum},
        ),
        Fault(
            name="kv_shifted_by_one",
            source="a realignment by delta + 1",
            invariant="I3: slot i holds the KV of token i",
            detection=_BY_TOKENS + ", in rows that were realigned",
            edits={"kv": _kv_shifted_by_one},
        ),
        Fault(
            name="bonus_without_kv",
            source="EQSPEC's Algorithm 3 as printed: only the drafts are fed, not the last token",
            invariant="I3: the newest token has no KV yet and has to be written",
            detection=_BY_TOKENS + ", from the first rounds on",
            edits={"window": _bonus_without_kv},
        ),
        Fault(
            name="positions_not_recomputed",
            source="a realignment that keeps the old padding's positions",
            invariant="I2: a token's position is the number of the row's tokens before it",
            detection=_BY_TOKENS + ", after rows accepted different numbers",
            edits={"window": _positions_not_recomputed},
        ),
        Fault(
            name="rejected_tail_visible",
            source="BSP without its masked holes: rejected drafts stay in the cache",
            invariant="C1: what lies beyond the committed length is overwritten, never seen",
            detection=_BY_TOKENS + ", after the first rejection",
            edits={"window": _rejected_tail_visible},
        ),
        Fault(
            name="rollback_one_short",
            source="a rejected draft's slot counted as committed",
            invariant="I1: a row's length is that of its tokens",
            detection=_BY_TOKENS + ", at the first rejection",
            edits={"commit": _rollback_one_short},
        ),
        Fault(
            name="one_cursor_for_all_rows",
            source="one scalar cursor for the batch (Transformers' static cache, Flax's cache)",
            invariant="I1: every row stands at an offset of its own",
            detection=_BY_TOKENS + ", in rows after the foremost",
            edits={"window": _one_cursor},
        ),
        Fault(
            name="draft_mask_by_value",
            source="draft columns masked where draft == pad",
            invariant="I3: a query sees every token before it, whatever its id",
            detection=_BY_TOKENS + ", after an accepted draft whose id is the pad's",
            edits={"window": _draft_mask_by_value},
        ),
        Fault(
            name="pad_in_prompt_masked",
            source="EQSPEC, EXSPEC: mask = (id != pad)",
            invariant="I2, I3: a query sees every token before it, whatever its id",
            detection=_BY_TOKENS + ", where a prompt holds the pad's id",
            edits={"window": _pads_masked_by_value},
        ),
        Fault(
            name="stale_kv_after_reuse",
            source="a row's KV taken for the new request's prefix",
            invariant="C1: a row's predecessor leaves nothing that is seen",
            detection=_BY_TOKENS + ", in requests that take a used row",
            edits={"prefill": _stale_kv},
        ),
        Fault(
            name="stale_length_after_reuse",
            source="a row's counters that are never reset",
            invariant="I1, C1: a row's predecessor leaves nothing that is seen",
            detection=_BY_TOKENS + ", in requests shorter than their row's predecessor",
            edits={"admit_row": _stale_length},
        ),
        Fault(
            name="stop_unseen_in_accepted_run",
            source="EOS looked for in the bonus only",
            invariant="E1: an output ends at its first stop token",
            detection="the output runs on after the reference has ended",
            edits={"emission": _stop_unseen_in_run},
        ),
        Fault(
            name="tokens_kept_after_stop",
            source="EQSPEC, EXSPEC: accepted EOS, and the round's tokens after it",
            invariant="E1: an output ends at its first stop token",
            detection="the output holds tokens after the reference has ended",
            edits={"emission": _tokens_after_stop},
        ),
        Fault(
            name="stop_in_prompt_ends_row",
            source="EQSPEC, EXSPEC: EOS looked for in the whole row",
            invariant="E2: only emitted tokens end an output",
            detection="the output ends before the reference",
            edits={"admit_row": _stop_in_prompt},
        ),
        Fault(
            name="pad_is_stop",
            source="EQSPEC, EXSPEC where pad == eos: left padding ends a row",
            invariant="E2: an output does not depend on the neighbours' lengths",
            detection="outputs of rows shorter than the longest end before the reference",
            edits={"commit": _pad_is_stop},
        ),
        Fault(
            name="sorted_outputs",
            source="EXSPEC with --sort_by_length: never sorted back",
            invariant="outputs stand in the order of their prompts",
            detection="the outputs are the reference's as a set, but not in order",
            kind="order",
            patches=((Engine, "run", _sort_outputs),),
        ),
        Fault(
            name="noise_ignores_seed",
            source="one generator for the batch instead of one per request",
            invariant="E3: a sampled token is drawn with its request's key and position",
            detection="sampled rows differ from the reference of the same seed; greedy rows do not",
            kind="sampling",
            edits={"admit_row": _seedless},
        ),
        Fault(
            name="filters_of_neighbour",
            source="top-k, top-p and min-p broadcast along the wrong rows",
            invariant="E2: a row's distribution does not depend on what a neighbour asked for",
            detection="sampled rows differ from the reference of the same seed; greedy rows do not",
            kind="sampling",
            edits={"rows": _filters_of_neighbour},
        ),
        Fault(
            name="position_only_keys",
            source="keys folded from the position alone, under block verification",
            invariant="E3: no round reuses noise that has decided an earlier one",
            detection="chi-square of the outputs against the target's distribution",
            kind="distribution",
            patches=((sampling, "round_keys", _position_only_keys),),
        ),
        Fault(
            name="one_stream",
            source="one key for a node's draft, test and residual",
            invariant="E3: purposes never share noise within a round",
            detection="chi-square of the outputs against the target's distribution",
            kind="distribution",
            patches=((sampling, "round_keys", _one_stream),),
        ),
        Fault(
            name="draft_filtered_in_another_order",
            source="top-p before temperature in the draft, after it in the target",
            invariant="E3: q is exactly the distribution that the draft was drawn from",
            detection="chi-square of the outputs against the target's distribution",
            kind="distribution",
            patches=((draft_model, "draw_draft", _draft_in_another_order),),
        ),
        Fault(
            name="batch_expansion",
            source="vLLM v0: a row per drafted token (vllm issue 17984)",
            invariant="none: the output is right",
            detection="more rows pass through the target than in the control run",
            kind="efficiency",
            patches=((decoder, "forward", _expand_batch),),
        ),
        Fault(
            name="rollback_to_batch_minimum",
            source="all rows truncated to the batch's least acceptance",
            invariant="none: the output is right",
            detection="more rounds than the control run",
            kind="efficiency",
            edits={"verdict": _roll_back_to_minimum},
        ),
        Fault(
            name="bonus_lost_on_full_acceptance",
            source="EQSPEC, EXSPEC: at most k tokens of k drafts, never k + 1",
            invariant="none: the output is right",
            detection="more rounds than the control run",
            kind="efficiency",
            edits={"verdict": _lose_bonus},
        ),
        Fault(
            name="another_order_of_sums",
            source="SGLang with EAGLE, vLLM, any other kernel: rounding, not synchronisation",
            invariant="none: the output is right, or differs at ties (E4)",
            detection="the committed KV differs in its bits, and no output beyond a tie",
            kind="numerics",
        ),
    )
}
