"""The decode loop: rounds until every row has ended, in one `lax.while_loop`.

Nothing leaves the device in between. The same loop runs speculative rounds (`round`) if the window
has more than one token, and plain steps (`plain`) if it has one.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache import layouts
from jaxspec.decode.parts import RoundParts, params_of
from jaxspec.decode.plain import plain_round
from jaxspec.decode.recorders import record_prompt_logprobs
from jaxspec.decode.round import speculative_round
from jaxspec.decode.state import (
    Admission,
    admit_row,
    batch_view,
    empty_state,
    mark_prefilled,
    put_rows,
    take_rows,
)
from jaxspec.drafters.base import function_params
from jaxspec.models.prefill import prefill_chunks
from jaxspec.types import DecodeState, EngineShape, PyTree


def init(parts: RoundParts) -> DecodeState:
    """State with every row empty."""
    return empty(parts, parts.resident_shape)


def empty(parts: RoundParts, shape: EngineShape) -> DecodeState:
    """State of `shape.batch_size` empty rows."""
    num_slots = shape.max_length + parts.drafter.num_scratch_slots(shape)
    cache = parts.target.init_cache(shape.batch_size, num_slots)
    return empty_state(
        shape,
        num_stop_tokens=parts.num_stop_tokens,
        cache=layouts.to_layout(cache, layout=parts.layout),
        drafter=parts.drafter.init(shape),
        draft_depth=parts.draft_depth,
        logprobs=parts.logprobs,
        trace=parts.trace,
    )


def admit(
    parts: RoundParts, params: PyTree, state: DecodeState, row: jax.Array, admission: Admission
) -> DecodeState:
    """State with a request in row `row`; its prompt is still to be prefilled."""
    state = admit_row(state, row, admission)
    return _tell_drafter(parts, parts.drafter.admit, params, state, row)


def prefill(
    parts: RoundParts, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
) -> DecodeState:
    """State after some chunks of prompts, read by the target and by the drafter.

    Args:
      rows: `[R]` int32, the row of each chunk. A row may have several, one after the other without
        a gap. -1 where there are fewer chunks; these come last.
      starts: `[R]` int32, each chunk's first token.
    """
    return catch_up(parts, params, prefill_target(parts, params, state, rows, starts), rows)


def prefill_target(
    parts: RoundParts, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
) -> DecodeState:
    """`prefill` by the target only. The drafter lags, but a drafter with taps sees the target's
    features."""
    return _prefill_target(parts, params, state, rows, starts)[0]


def score(
    parts: RoundParts, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
) -> DecodeState:
    """`prefill_target` that also records the log-probabilities of the prompts' tokens. A row that
    asks for no tokens ends with its prompt."""
    assert parts.logprobs is not None, "a request for them is refused otherwise"
    state, hidden, starts, stops = _prefill_target(parts, params, state, rows, starts)
    logprobs = record_prompt_logprobs(
        parts.logprobs,
        parts.target,
        params["target"],
        state,
        hidden,
        rows=rows,
        starts=starts,
        stops=stops,
    )
    is_done = state.is_running & (state.num_committed >= state.limit)
    finish = jnp.where(is_done, state.limit_finish, state.finish)
    return state.replace(logprobs=logprobs, finish=finish)


def _prefill_target(
    parts: RoundParts, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
) -> tuple[DecodeState, jax.Array, jax.Array, jax.Array]:
    """The state of `prefill_target`, the target's last hidden states `[R, chunk, E]`, and where the
    chunks begin and stop, `[R]` int32."""
    is_here, own = rows >= 0, jnp.maximum(rows, 0)
    stops = jnp.minimum(starts + parts.shape.prefill_chunk, state.num_committed[own] - 1)
    starts, stops = jnp.where(is_here, starts, 0), jnp.where(is_here, stops, 0)
    cache, features, hidden = prefill_chunks(
        parts.target,
        params["target"],
        state.cache,
        state.tokens,
        rows=own,
        starts=starts,
        stops=stops,
        chunk=parts.shape.prefill_chunk,
        taps=parts.drafter.taps,
    )
    state = mark_prefilled(state.replace(cache=cache), rows, stops)
    if features is not None:
        seen = jnp.where(is_here, rows, state.num_committed.shape[0])
        for place in range(rows.shape[0]):
            chunk = seen[place], starts[place], stops[place], features[place]
            state = _tell_drafter(parts, parts.drafter.observe, params, state, *chunk)
    return state, hidden, starts, stops


def catch_up(parts: RoundParts, params: PyTree, state: DecodeState, rows: jax.Array) -> DecodeState:
    """State after the drafter has read, for each of `rows` `[R]` (as in `prefill`), one chunk of
    the row's tokens that it had not seen."""
    return _tell_drafter(parts, parts.drafter.catch_up, params, state, rows)


def _tell_drafter(parts: RoundParts, function, params: PyTree, state: DecodeState, *arguments):
    """State after one of the drafter's functions on the resident rows."""
    own = function_params(parts.drafter, params)
    rows = batch_view(state, is_chain=parts.drafter.is_chain)
    drafter = function(parts.resident_shape, own, state.drafter, rows, *arguments)
    return state.replace(drafter=drafter)


def lag(parts: RoundParts, state: DecodeState) -> jax.Array:
    """`[B]` int32, how many committed tokens before the newest one the drafter has not seen."""
    found = parts.drafter.lag(state.drafter, batch_view(state))
    return jnp.zeros_like(state.num_committed) if found is None else found


def one_round(parts: RoundParts, params: PyTree, state: DecodeState) -> DecodeState:
    """One round of the rows of a batch."""
    decode = plain_round if parts.is_plain else speculative_round
    return decode(parts, params, state)


def run(
    parts: RoundParts,
    params: PyTree,
    state: DecodeState,
    num_rounds: jax.Array,
    min_running: jax.Array,
) -> DecodeState:
    """State after `num_rounds` rounds, or after fewer if less than `min_running` rows are left.

    If more rows are resident than a batch has, a batch is decoded until the scheduler would
    choose other rows. Only then is it put back and another one taken, so the cost of a round is
    the same.
    """
    num_rows, batch_size = state.num_committed.shape[0], parts.shape.batch_size

    def is_unfinished(carry):
        index, state = carry
        return (index < num_rounds) & (_num_running(state) >= min_running)

    if num_rows == batch_size:
        return _decode(parts, params, state, jnp.int32(0), is_unfinished)[1]

    def regroup_and_decode(carry):
        first, state = carry
        rows = parts.scheduler.choose(state, batch_size)
        batch = take_rows(state, rows)
        num_waiting = _num_running(state) - _num_running(batch)

        def should_continue(carry):
            index, batch = carry
            num_running = _num_running(batch)
            is_wanted = (index < num_rounds) & (num_running + num_waiting >= min_running)
            if parts.scheduler.regroups:
                return is_wanted & (index == first)
            return is_wanted & ((num_running == batch_size) | (num_waiting == 0))

        index, batch = _decode(parts, params, batch, first, should_continue)
        return index, put_rows(state, rows, batch)

    return lax.while_loop(is_unfinished, regroup_and_decode, (jnp.int32(0), state))[1]


def _decode(
    parts: RoundParts, params: PyTree, state: DecodeState, index: jax.Array, should_continue
):
    """Rounds of one batch, counted from `index`, while `should_continue((index, state))`.

    Rows of an aligned cache are aligned when they enter the batch. If the scheduler keeps them
    there, they are also aligned after every round, as in EQSPEC. If it regroups, they are not,
    because the rows that it groups next may already be aligned (EXSPEC). A ragged cache needs
    no alignment.
    """
    regroups = parts.scheduler.regroups

    def body(carry):
        index, state = carry
        was_active = state.is_running
        if regroups:
            state = _align(parts, count_lengths(state, was_active))
        state = count_round(one_round(parts, params, state), was_active)
        if not regroups:
            state = _align(parts, count_lengths(state, was_active))
        return index + 1, state

    if not regroups:
        state = _align(parts, state)
    return lax.while_loop(should_continue, body, (index, state))


def _align(parts: RoundParts, state: DecodeState) -> DecodeState:
    return layouts.align(
        state, max_length=parts.shape.max_length, verify_length=parts.shape.verify_length
    )


def _num_running(state: DecodeState) -> jax.Array:
    return jnp.sum(state.is_running, dtype=jnp.int32)


def count_round(state: DecodeState, was_active: jax.Array) -> DecodeState:
    """State after a round in which the rows `was_active` `[B]` were decoded."""
    schedule = state.schedule
    return state.replace(
        schedule=schedule.replace(
            num_rounds=schedule.num_rounds + 1,
            num_rows=schedule.num_rows + jnp.sum(was_active, dtype=jnp.int32),
        )
    )


def count_lengths(state: DecodeState, was_active: jax.Array) -> DecodeState:
    """State after counting which of the rows `was_active` `[B]` of a round have equal lengths; see
    `ScheduleCounts`."""
    # Rows that took no part get distinct lengths below zero. After sorting, equal lengths are
    # neighbours.
    absent = -1 - jnp.arange(was_active.shape[0], dtype=jnp.int32)
    length = jnp.sort(jnp.where(was_active, layouts.lengths(state), absent))
    is_same = jnp.pad(length[1:] == length[:-1], 1)
    is_grouped = jnp.all(was_active) & (length[0] == length[-1])
    num_alike = jnp.sum(is_same[1:] | is_same[:-1], dtype=jnp.int32)
    schedule = state.schedule
    return state.replace(
        schedule=schedule.replace(
            num_grouped_rounds=schedule.num_grouped_rounds + is_grouped.astype(jnp.int32),
            num_grouped_rows=schedule.num_grouped_rows + num_alike,
        )
    )


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeLoop:
    """The functions above for some parts on one device, for `jax.jit` with the state donated;
    `sharded.ShardedLoop` has them for all shards of a mesh."""

    parts: RoundParts

    @property
    def params(self) -> PyTree:
        """The parameters of target and drafter."""
        return params_of(self.parts)

    @property
    def resident_shape(self) -> EngineShape:
        """The shape of the state."""
        return self.parts.resident_shape

    def init(self) -> DecodeState:
        """State with every row empty."""
        return init(self.parts)

    def admit(
        self, params: PyTree, state: DecodeState, row: jax.Array, admission: Admission
    ) -> DecodeState:
        """State with a request in row `row`; its prompt is still to be prefilled."""
        return admit(self.parts, params, state, row, admission)

    def prefill(
        self, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
    ) -> DecodeState:
        """State after some chunks of prompts."""
        return prefill(self.parts, params, state, rows, starts)

    def prefill_target(
        self, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
    ) -> DecodeState:
        """`prefill` for the target only."""
        return prefill_target(self.parts, params, state, rows, starts)

    def score(
        self, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
    ) -> DecodeState:
        """`prefill_target` with log-probabilities of the prompts' tokens."""
        return score(self.parts, params, state, rows, starts)

    def catch_up(self, params: PyTree, state: DecodeState, rows: jax.Array) -> DecodeState:
        """State after the drafter has read one chunk for each of `rows`."""
        return catch_up(self.parts, params, state, rows)

    def lag(self, state: DecodeState) -> jax.Array:
        """`[B]` int32, how many committed tokens before the newest one the drafter has not seen."""
        return lag(self.parts, state)

    def run(
        self, params: PyTree, state: DecodeState, num_rounds: jax.Array, min_running: jax.Array
    ) -> DecodeState:
        """State after `num_rounds` rounds, or fewer."""
        return run(self.parts, params, state, num_rounds, min_running)

    def on_row(
        self, function, params: PyTree, state: DecodeState, row: jax.Array, *arguments: PyTree
    ) -> DecodeState:
        """`function(params, state, row, *arguments)`; on one device the row is always here."""
        return function(params, state, row, *arguments)

    def of_row(self, function, state: DecodeState, row: jax.Array, *arguments: jax.Array) -> PyTree:
        """What `function(state, row, *arguments)` returns; on one device the row is always here."""
        return function(state, row, *arguments)
