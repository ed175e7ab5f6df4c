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
from jaxspec.cache.layouts import Layout
from jaxspec.decode.plain import plain_round
from jaxspec.decode.round import speculative_round
from jaxspec.decode.state import (
    Admission,
    LogprobsConfig,
    admit_row,
    batch_view,
    empty_state,
    mark_prefilled,
    put_rows,
    take_rows,
)
from jaxspec.drafters.base import Drafter, NoDrafter, function_params
from jaxspec.models.base import Model
from jaxspec.models.prefill import prefill_chunk
from jaxspec.schedulers.base import Scheduler
from jaxspec.telemetry.trace import TraceConfig
from jaxspec.types import DecodeState, EngineShape, PyTree
from jaxspec.verifiers.base import Verifier
from jaxspec.verifiers.coupled import Coupled


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodeLoop:
    """The pure functions of one engine, for `jax.jit` with the state donated.

    `params` is everywhere `{"target": ..., "drafter": ...}`. Without a drafter the window has one
    token and every round is a plain step.

    Attributes:
      target: the model whose output is decoded.
      drafter: what proposes tokens.
      verifier: what decides how much of a draft is kept.
      scheduler: which rows take part in a round.
      shape: that of the batch, with the widest window that the state is used with.
      num_stop_tokens: room for stop tokens per row.
      layout: that of the target's cache; a drafter with a cache of its own chooses that one's
        layout.
      logprobs: which log-probabilities are kept, if any.
      trace: what is recorded of each round, if anything.
      verify_length: tokens scored per round by this loop, at most `shape.verify_length`, which is
        the default; see `at`.
    """

    target: Model
    drafter: Drafter = dataclasses.field(default_factory=NoDrafter)
    verifier: Verifier = dataclasses.field(default_factory=Coupled)
    scheduler: Scheduler
    shape: EngineShape
    num_stop_tokens: int
    layout: Layout = "ragged"
    logprobs: LogprobsConfig | None = None
    trace: TraceConfig | None = None
    verify_length: int | None = None

    @property
    def params(self) -> PyTree:
        """The parameters of target and drafter."""
        return {"target": self.target.params, "drafter": self.drafter.params}

    @property
    def resident_shape(self) -> EngineShape:
        """The shape of the state, whose rows are all resident ones and not only those of the
        batch."""
        num_rows = self.scheduler.num_residents(self.shape.batch_size)
        return dataclasses.replace(self.shape, batch_size=num_rows)

    @property
    def round_shape(self) -> EngineShape:
        """The shape of a round of this loop."""
        verify_length = self.verify_length or self.shape.verify_length
        return dataclasses.replace(self.shape, verify_length=verify_length)

    @property
    def draft_depth(self) -> int:
        """D, the greatest depth of a draft."""
        num_nodes, max_depth = self.shape.num_nodes, self.drafter.max_depth
        return num_nodes if max_depth is None else min(max_depth, num_nodes)

    @property
    def is_plain(self) -> bool:
        """Whether rounds are plain steps."""
        return self.round_shape.verify_length == 1

    @property
    def longest_prompt(self) -> int:
        """The most prompt tokens that leave room for one round."""
        return layouts.longest_prompt(
            self.layout,
            max_length=self.shape.max_length,
            verify_length=self.shape.verify_length,
        )

    def with_variant(self, variant: int) -> DecodeLoop:
        """The same loop over the same state, with rounds of one of the drafter's `variants`; 0 is
        the drafter itself."""
        if variant == 0:
            return self
        return dataclasses.replace(self, drafter=self.drafter.variants[variant - 1])

    def at(self, verify_length: int) -> DecodeLoop:
        """The same loop over the same state, with rounds of `verify_length` tokens.

        A narrower window is laid out for what the drafter drafts in it: if these are chains, for no
        trees.
        """
        if verify_length == self.shape.verify_length:
            return self
        drafter, shape = self.drafter, self.shape
        if verify_length > 1:
            drafter = drafter.within(verify_length - 1)
        if drafter.is_chain and not self.drafter.is_chain:
            shape = dataclasses.replace(shape, tree_depth=0)
        return dataclasses.replace(self, drafter=drafter, shape=shape, verify_length=verify_length)

    def init(self) -> DecodeState:
        """State with every row empty."""
        return self.empty(self.resident_shape)

    def empty(self, shape: EngineShape) -> DecodeState:
        """State of `shape.batch_size` empty rows."""
        num_slots = shape.max_length + self.drafter.num_scratch_slots(shape)
        cache = self.target.init_cache(shape.batch_size, num_slots)
        return empty_state(
            shape,
            num_stop_tokens=self.num_stop_tokens,
            cache=layouts.to_layout(cache, layout=self.layout),
            drafter=self.drafter.init(shape),
            draft_depth=self.draft_depth,
            logprobs=self.logprobs,
            trace=self.trace,
        )

    def admit(
        self, params: PyTree, state: DecodeState, row: jax.Array, admission: Admission
    ) -> DecodeState:
        """State with a request in row `row`; its prompt is still to be prefilled."""
        state = admit_row(state, row, admission)
        return self._tell_drafter(self.drafter.admit, params, state, row)

    def prefill(
        self, params: PyTree, state: DecodeState, row: jax.Array, start: jax.Array
    ) -> DecodeState:
        """State after one chunk of a row's prompt, read by the target and by the drafter."""
        return self.catch_up(params, self.prefill_target(params, state, row, start), row)

    def prefill_target(
        self, params: PyTree, state: DecodeState, row: jax.Array, start: jax.Array
    ) -> DecodeState:
        """State after one chunk of a row's prompt was prefilled by the target only. The drafter
        lags, but a drafter with taps sees the target's features."""
        stop = jnp.minimum(start + self.shape.prefill_chunk, state.num_committed[row] - 1)
        cache, features = prefill_chunk(
            self.target,
            params["target"],
            state.cache,
            state.tokens,
            row=row,
            start=start,
            stop=stop,
            chunk=self.shape.prefill_chunk,
            taps=self.drafter.taps,
        )
        state = mark_prefilled(state.replace(cache=cache), row, stop)
        if features is None:
            return state
        return self._tell_drafter(self.drafter.observe, params, state, row, start, stop, features)

    def catch_up(self, params: PyTree, state: DecodeState, row: jax.Array) -> DecodeState:
        """State after the drafter has read one chunk of a row's tokens that it had not seen."""
        return self._tell_drafter(self.drafter.catch_up, params, state, row)

    def _tell_drafter(self, function, params: PyTree, state: DecodeState, *arguments):
        """State after one of the drafter's functions on the resident rows."""
        own = function_params(self.drafter, params)
        rows = batch_view(state, is_chain=self.drafter.is_chain)
        drafter = function(self.resident_shape, own, state.drafter, rows, *arguments)
        return state.replace(drafter=drafter)

    def lag(self, state: DecodeState) -> jax.Array:
        """`[B]` int32, how many committed tokens before the newest one the drafter has not seen."""
        lag = self.drafter.lag(state.drafter, batch_view(state))
        return jnp.zeros_like(state.num_committed) if lag is None else lag

    def round(self, params: PyTree, state: DecodeState) -> DecodeState:
        """One round of the rows of a batch."""
        one_round = plain_round if self.is_plain else speculative_round
        return one_round(self, params, state)

    def run(
        self, params: PyTree, state: DecodeState, num_rounds: jax.Array, min_running: jax.Array
    ) -> DecodeState:
        """State after `num_rounds` rounds, or after fewer if less than `min_running` rows are left.

        If more rows are resident than a batch has, a batch is decoded until the scheduler would
        choose other rows. Only then is it put back and another one taken, so the cost of a round is
        the same.
        """
        num_rows, batch_size = state.num_committed.shape[0], self.shape.batch_size

        def is_unfinished(carry):
            index, state = carry
            return (index < num_rounds) & (_num_running(state) >= min_running)

        if num_rows == batch_size:
            return self._decode(params, state, jnp.int32(0), is_unfinished)[1]

        def regroup_and_decode(carry):
            first, state = carry
            rows = self.scheduler.choose(state, batch_size)
            batch = take_rows(state, rows)
            num_waiting = _num_running(state) - _num_running(batch)

            def should_continue(carry):
                index, batch = carry
                num_running = _num_running(batch)
                is_wanted = (index < num_rounds) & (num_running + num_waiting >= min_running)
                if self.scheduler.regroups:
                    return is_wanted & (index == first)
                return is_wanted & ((num_running == batch_size) | (num_waiting == 0))

            index, batch = self._decode(params, batch, first, should_continue)
            return index, put_rows(state, rows, batch)

        return lax.while_loop(is_unfinished, regroup_and_decode, (jnp.int32(0), state))[1]

    def _decode(self, params: PyTree, state: DecodeState, index: jax.Array, should_continue):
        """Rounds of one batch, counted from `index`, while `should_continue((index, state))`.

        Rows of an aligned cache are aligned when they enter the batch. If the scheduler keeps them
        there, they are also aligned after every round, as in EQSPEC. If it regroups, they are not,
        because the rows that it groups next may already be aligned (EXSPEC). A ragged cache needs
        no alignment.
        """
        regroups = self.scheduler.regroups

        def body(carry):
            index, state = carry
            was_active = state.is_running
            if regroups:
                state = self._align(count_lengths(state, was_active))
            state = count_round(self.round(params, state), was_active)
            if not regroups:
                state = self._align(count_lengths(state, was_active))
            return index + 1, state

        if not regroups:
            state = self._align(state)
        return lax.while_loop(should_continue, body, (index, state))

    def _align(self, state: DecodeState) -> DecodeState:
        return layouts.align(
            state, max_length=self.shape.max_length, verify_length=self.shape.verify_length
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
