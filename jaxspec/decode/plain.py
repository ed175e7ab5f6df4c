"""Plain decoding, one token per step: the baseline of every speed-up, and an independent witness.

It shares the model, prefill, the distribution of a row's tokens (`sampling`), the state record and
the filling of batch_size with `decoding`, but no code of the round: nothing here knows of drafts,
windows or verdicts. Its bits differ from a wider window's (another matrix shape sums in another
order), so its output equals theirs except at ties within rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import sampling
from jaxspec.cache import layouts
from jaxspec.cache.layouts import Layout
from jaxspec.decode.loop import (
    Admission,
    LogprobsConfig,
    admit_row,
    batch_view,
    empty_state,
    mark_prefilled,
    run_rounds,
)
from jaxspec.drafters.base import EngineShape
from jaxspec.models.base import Model
from jaxspec.models.prefill import prefill_chunk
from jaxspec.schedulers.base import Scheduler
from jaxspec.telemetry import trace as telemetry
from jaxspec.types import DecodeState, DraftContext, Finish, Logprobs, Origin, PyTree, Window


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlainLoop:
    """The window-1 loop, with the interface of `decoding.SpeculativeLoop`."""

    target: Model
    scheduler: Scheduler
    shape: EngineShape
    num_stop_tokens: int
    logprobs: LogprobsConfig | None = None
    layout: Layout = "ragged"
    trace: telemetry.TraceConfig | None = None

    @property
    def params(self) -> PyTree:
        """The target's parameters."""
        return self.target.params

    @property
    def held(self) -> EngineShape:
        """The shape of the state: a row for every resident."""
        num_rows = self.scheduler.num_residents(self.shape.batch_size)
        return dataclasses.replace(self.shape, batch_size=num_rows)

    def init(self) -> DecodeState:
        """State with every row empty."""
        return self.empty(self.held)

    def empty(self, held: EngineShape) -> DecodeState:
        """State of `held.batch_size` empty rows."""
        cache = self.target.init_cache(held.batch_size, held.max_length)
        return empty_state(
            held,
            num_stop_tokens=self.num_stop_tokens,
            logprobs=self.logprobs,
            trace=self.trace,
            cache=layouts.to_layout(cache, layout=self.layout),
            drafter=(),
        )

    def admit(
        self, params: PyTree, state: DecodeState, row: jax.Array, admission: Admission
    ) -> DecodeState:
        """State with a request in row `row`; its prompt has still to be read."""
        return admit_row(state, row, admission)

    def prefill(
        self, params: PyTree, state: DecodeState, row: jax.Array, start: jax.Array
    ) -> DecodeState:
        """State after one chunk of a row's prompt."""
        chunk = self.shape.prefill_chunk
        stop = jnp.minimum(start + chunk, state.num_committed[row] - 1)
        cache = prefill_chunk(
            self.target,
            params,
            state.cache,
            state.tokens,
            row=row,
            start=start,
            stop=stop,
            chunk=chunk,
        )
        return mark_prefilled(state.replace(cache=cache), row, stop)

    def run(
        self, params: PyTree, state: DecodeState, num_rounds: jax.Array, min_running: jax.Array
    ) -> DecodeState:
        """State after `num_rounds` steps, or fewer if less than `min_running` rows are left."""
        return run_rounds(
            lambda view: self.step(params, view),
            self.scheduler,
            self.empty,
            self.shape,
            state,
            num_rounds=num_rounds,
            min_running=min_running,
        )

    def step(self, params: PyTree, state: DecodeState) -> DecodeState:
        """One token for every running row."""
        row = jnp.arange(self.shape.batch_size, dtype=jnp.int32)
        running = state.finish == Finish.RUNNING
        here = state.num_committed - 1
        token = state.tokens[row, here]
        start = layouts.window_start(state)
        window = Window(
            start=start,
            positions=start[:, None],
            slots=jnp.where(running, here, -1)[:, None],
        )
        hidden, cache = self.target.forward(params, token[:, None], window, state.cache)
        logits = self.target.logits(params, hidden)
        rows = batch_view(state)
        prefix = DraftContext(
            tokens=jnp.zeros_like(token)[:, None],
            is_before=jnp.zeros((1, 1, 1), bool),
            position=(here + 1)[:, None],
        )
        token = sampling.choose(logits, rows, prefix)[:, 0]

        finite = token >= 0
        emits = running & finite
        length = state.num_committed + emits.astype(jnp.int32)
        stops = emits & jnp.any(token[:, None] == state.stop_tokens, axis=1)
        finish = jnp.where(length >= state.limit, state.limit_finish, Finish.RUNNING)
        finish = jnp.where(stops, Finish.STOP_TOKEN, finish)
        finish = jnp.where(finite, finish, Finish.NON_FINITE)
        slot = jnp.where(emits, here + 1, self.shape.max_length + row)
        logprobs = state.logprobs
        if self.logprobs is not None:
            if self.logprobs.is_processed:
                adjusted = sampling.adjust(logits, rows, prefix)
                logits = sampling.filtered_logits(adjusted, rows.sampling)
            scores = jax.nn.log_softmax(logits[:, 0], axis=-1)
            top, top_tokens = lax.top_k(scores, self.logprobs.num_top)
            new = Logprobs(
                of_token=scores[row, jnp.maximum(token, 0)],
                top=top,
                top_tokens=top_tokens.astype(jnp.int32),
            )
            logprobs = jax.tree.map(
                lambda buffer, value: buffer.at[row, slot].set(
                    value, mode="drop", unique_indices=True
                ),
                logprobs,
                new,
            )
        trace = state.trace
        if self.trace is not None:
            trace = telemetry.record_step(state, emits)
        return state.replace(
            cache=cache,
            logprobs=logprobs,
            trace=trace,
            num_committed=length,
            finish=jnp.where(running, finish, state.finish).astype(jnp.int32),
            tokens=state.tokens.at[row, slot].set(token, mode="drop", unique_indices=True),
            origin=state.origin.at[row, slot].set(
                jnp.int8(Origin.PLAIN), mode="drop", unique_indices=True
            ),
            stop_token=jnp.where(stops, token, state.stop_token),
            counts=state.counts.replace(
                num_rounds=state.counts.num_rounds + emits.astype(jnp.int32)
            ),
        )
