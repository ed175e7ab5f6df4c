"""The speculative round and the loop around it, readable as the algorithm.

    propose -> score -> verify -> commit

One `lax.while_loop` runs rounds until every row has ended; nothing leaves the device in between.
Rows accept different numbers of tokens, so each stands at an offset of its own,
`num_committed`: two rows, window of four (`r` the newest committed token, `d` drafts), before a
  round and after it:

    row 0   a b r|d d d .        accepts 2    a b r d d n|. .
    row 1   a b c d e r|d d d    accepts 0    a b c d e r n|. .

Plain decoding is the same program with `draft_limit` 0: every node invalid. The scores of the
newest committed token do not depend on what follows it in the window, so speculative output equals
plain output bit for bit, with the verifiers that draw the target's own tokens (`coupled`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec import sampling
from jaxspec.cache import layouts
from jaxspec.cache.layouts import Layout
from jaxspec.cache.pages import KVCache, commit_path, put_table
from jaxspec.drafters.base import Drafter, EngineShape, RoundInfo
from jaxspec.models.base import Model
from jaxspec.models.prefill import prefill_chunk
from jaxspec.schedulers.base import Scheduler
from jaxspec.telemetry import trace as telemetry
from jaxspec.types import (
    AcceptanceCounts,
    BatchView,
    DecodeState,
    Draft,
    DraftContext,
    Finish,
    Logprobs,
    Origin,
    PyTree,
    RowSampling,
    ScheduleCounts,
    Verdict,
    Window,
)
from jaxspec.verifiers.base import Verifier


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeculativeLoop:
    """The functions of one engine; see `PlainLoop` for its window-1 counterpart.

    `params` is everywhere `{"target": ..., "drafter": ...}`. The `layout` is that of the target's
    cache; a drafter that keeps a cache lays it out as it likes.
    """

    target: Model
    drafter: Drafter
    verifier: Verifier
    scheduler: Scheduler
    shape: EngineShape
    num_stop_tokens: int
    logprobs: LogprobsConfig | None = None
    layout: Layout = "ragged"
    trace: telemetry.TraceConfig | None = None

    @property
    def params(self) -> PyTree:
        """Parameters of both models."""
        return {"target": self.target.params, "drafter": self.drafter.params}

    @property
    def held(self) -> EngineShape:
        """The shape of the state: a row for every resident, not only for those in the batch."""
        num_rows = self.scheduler.num_residents(self.shape.batch_size)
        return dataclasses.replace(self.shape, batch_size=num_rows)

    def init(self) -> DecodeState:
        """State with every row empty."""
        return self.empty(self.held)

    def empty(self, held: EngineShape) -> DecodeState:
        """State of `held.batch_size` empty rows."""
        return empty_state(
            held,
            num_stop_tokens=self.num_stop_tokens,
            logprobs=self.logprobs,
            trace=self.trace,
            cache=layouts.to_layout(
                self.target.init_cache(held.batch_size, held.max_length), layout=self.layout
            ),
            drafter=self.drafter.init(held),
        )

    def admit(
        self, params: PyTree, state: DecodeState, row: jax.Array, admission: Admission
    ) -> DecodeState:
        """State with a request in row `row`; its prompt has still to be read."""
        state = admit_row(state, row, admission)
        drafter = self.drafter.admit(
            self.held, params["drafter"], state.drafter, batch_view(state), row
        )
        return state.replace(drafter=drafter)

    def prefill(
        self, params: PyTree, state: DecodeState, row: jax.Array, start: jax.Array
    ) -> DecodeState:
        """State after one chunk of a row's prompt, read by the target and by the drafter."""
        return self.catch_up(params, self.prefill_target(params, state, row, start), row)

    def prefill_target(
        self, params: PyTree, state: DecodeState, row: jax.Array, start: jax.Array
    ) -> DecodeState:
        """State after one chunk of a row's prompt, read by the target only: the drafter lags."""
        stop = jnp.minimum(start + self.shape.prefill_chunk, state.num_committed[row] - 1)
        cache = prefill_chunk(
            self.target,
            params["target"],
            state.cache,
            state.tokens,
            row=row,
            start=start,
            stop=stop,
            chunk=self.shape.prefill_chunk,
        )
        return mark_prefilled(state.replace(cache=cache), row, stop)

    def catch_up(self, params: PyTree, state: DecodeState, row: jax.Array) -> DecodeState:
        """State after the drafter has read a chunk of what it has not seen of a row."""
        drafter = self.drafter.catch_up(
            self.held, params["drafter"], state.drafter, batch_view(state), row
        )
        return state.replace(drafter=drafter)

    def lag(self, state: DecodeState) -> jax.Array:
        """`[B]` int32, committed tokens before the newest that the drafter has not seen."""
        lag = self.drafter.lag(state.drafter, batch_view(state))
        return jnp.zeros_like(state.num_committed) if lag is None else lag

    def run(
        self, params: PyTree, state: DecodeState, num_rounds: jax.Array, min_running: jax.Array
    ) -> DecodeState:
        """State after `num_rounds` rounds, or fewer if less than `min_running` rows are left."""
        return run_rounds(
            lambda view: self.round(params, view),
            self.scheduler,
            self.empty,
            self.shape,
            state,
            num_rounds=num_rounds,
            min_running=min_running,
        )

    def round(self, params: PyTree, state: DecodeState) -> DecodeState:
        """One round: propose, score, verify, commit."""
        rows = batch_view(state)
        draft, drafter_state = self.drafter.propose(
            self.shape, params["drafter"], state.drafter, rows
        )
        window = make_window(state, draft, is_chain=self.drafter.is_chain)
        hidden, cache = self.target.forward(
            params["target"], window_tokens(state, draft), window, state.cache
        )
        logits = self.target.logits(params["target"], hidden)
        prefix = draft_context(draft, window)
        verdict = self.verifier.verify(logits, draft, rows, prefix)
        if not self.drafter.is_chain:
            cache = commit_path(cache, window.start, verdict.path)
        outcome = RoundInfo(
            draft=draft,
            verdict=verdict,
            hidden=hidden,
            num_committed_before=state.num_committed,
        )
        if self.logprobs is not None:
            state = record_logprobs(self.logprobs, state, logits, draft, verdict, rows, prefix)
        before, state = state, commit(state, draft, verdict).replace(cache=cache)
        if self.trace is not None:
            trace = telemetry.record_round(
                self.trace,
                before,
                num_emitted=state.num_committed - before.num_committed,
                logits=logits,
                draft=draft,
                verdict=verdict,
                rows=rows,
                prefix=prefix,
                depth=window.positions[:, 1:] - window.start[:, None],
                is_chain=self.drafter.is_chain,
            )
            state = state.replace(trace=trace)
        drafter_state = self.drafter.commit(
            self.shape, params["drafter"], drafter_state, batch_view(state), outcome
        )
        return state.replace(drafter=drafter_state)


def run_rounds(
    round_: Callable[[DecodeState], DecodeState],
    scheduler: Scheduler,
    empty: Callable[[EngineShape], DecodeState],
    shape: EngineShape,
    state: DecodeState,
    *,
    num_rounds: jax.Array,
    min_running: jax.Array,
) -> DecodeState:
    """State after `num_rounds` rounds, or fewer if less than `min_running` rows are left.

    Where more rows are held than there are rows, the rows in the batch are decoded until the
    scheduler would seat others; only then are they put back and others taken, so a round costs the
    same.

    Rows of an aligned cache are aligned as they are seated. A scheduler that keeps them in the
    batch has them aligned after every round too, as EQSPEC does; one that regroups has not, and
    those it rows together again may need nothing (EXSPEC). A ragged cache has nothing to
    align.

    Args:
      round_: from a state of the rows in the batch to the state after a round.
      empty: makes an empty state of so many rows, by which arrays with a row axis are told.
    """

    def count(state: DecodeState) -> jax.Array:
        return jnp.sum(state.is_running, dtype=jnp.int32)

    def align(state: DecodeState, was_active: jax.Array) -> DecodeState:
        state = count_lengths(state, was_active)
        return layouts.align(state, max_length=shape.max_length, verify_length=shape.verify_length)

    def decode(index, state, should_continue):
        def body(carry):
            index, state = carry
            was_active = state.is_running
            if scheduler.regroups:
                state = align(state, was_active)
            state = count_round(round_(state), was_active)
            if not scheduler.regroups:
                state = align(state, was_active)
            return index + 1, state

        if not scheduler.regroups:
            state = layouts.align(
                state, max_length=shape.max_length, verify_length=shape.verify_length
            )
        return lax.while_loop(should_continue, body, (index, state))

    def is_unfinished(carry):
        index, state = carry
        return (index < num_rounds) & (count(state) >= min_running)

    num_rows, batch_size = state.num_committed.shape[0], shape.batch_size
    if num_rows == batch_size:
        return decode(jnp.int32(0), state, is_unfinished)[1]
    is_per_row = rows_axis(empty, shape, num_rows)

    def regroup_and_decode(carry):
        first, state = carry
        rows = scheduler.choose(state, batch_size)
        view = take_rows(state, rows, is_per_row)
        num_waiting = count(state) - count(view)

        def should_continue(carry):
            index, view = carry
            num_running = count(view)
            is_right = (index < num_rounds) & (num_running + num_waiting >= min_running)
            if scheduler.regroups:
                return is_right & (index == first)
            return is_right & ((num_running == batch_size) | (num_waiting == 0))

        index, view = decode(first, view, should_continue)
        return index, put_rows(state, rows, view, is_per_row)

    return lax.while_loop(is_unfinished, regroup_and_decode, (jnp.int32(0), state))[1]


def _is_cache(node: PyTree) -> bool:
    return isinstance(node, KVCache)


def _num_rows(leaf: PyTree) -> int:
    """Length of what would be the row axis; -1 for a scalar."""
    leaf = leaf.table if _is_cache(leaf) else leaf
    return leaf.shape[0] if leaf.shape else -1


def rows_axis(
    empty: Callable[[EngineShape], DecodeState], shape: EngineShape, num_rows: int
) -> PyTree:
    """For each array of a state, and for each cache as a whole, whether it has a row axis.

    Found by the difference that one more row makes, so a drafter's state needs no declaration.
    """

    def sizes(num_rows: int):
        shapes = jax.eval_shape(lambda: empty(dataclasses.replace(shape, batch_size=num_rows)))
        return jax.tree.map(_num_rows, shapes, is_leaf=_is_cache)

    return jax.tree.map(operator.ne, sizes(num_rows), sizes(num_rows + 1))


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
    """State with the rows `was_active` `[B]` of a round compared by length; see
    `ScheduleCounts`."""
    # Rows that took no part get lengths below zero, each its own. Sorted, equals are
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


def take_rows(state: DecodeState, rows: jax.Array, is_per_row: PyTree) -> DecodeState:
    """The state of some `rows` `[n]`, distinct. Their KV stays where it is: of a cache only the
    table of pages (and of paddings) is taken."""

    def take(has_rows: bool, leaf):
        if _is_cache(leaf):
            return leaf.replace(table=leaf.table[rows])
        return leaf[rows] if has_rows else leaf

    return jax.tree.map(take, is_per_row, state)


def put_rows(
    state: DecodeState, rows: jax.Array, view: DecodeState, is_per_row: PyTree
) -> DecodeState:
    """The state with the rows that `take_rows` took put back, as rounds have left them."""

    def put_back(has_rows: bool, leaf, new):
        if _is_cache(leaf):
            return new.replace(table=put_table(leaf.table, rows, new.table))
        return leaf.at[rows].set(new, unique_indices=True) if has_rows else new

    return jax.tree.map(put_back, is_per_row, state, view)


class Admission(struct.PyTreeNode, kw_only=True):
    """A request as it enters the batch.

    Attributes:
      tokens: `[S]` int32, the prompt, padded.
      length: int32 scalar, of the prompt.
      limit: int32 scalar, `num_committed` at which the row ends.
      limit_finish: int32 scalar, the `Finish` to report there.
      draft_limit: int32 scalar, draft length; 0 decodes plainly.
      stop_tokens: `[num_stop]` int32, padded with -1.
      sampling: this row's values, scalars (the key `[2]`).
      arrival: int32 scalar, order among requests.
    """

    tokens: jax.typing.ArrayLike
    length: jax.typing.ArrayLike
    limit: jax.typing.ArrayLike
    limit_finish: jax.typing.ArrayLike
    draft_limit: jax.typing.ArrayLike
    stop_tokens: jax.typing.ArrayLike
    sampling: RowSampling
    arrival: jax.typing.ArrayLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobsConfig:
    """Which log-probabilities the loop keeps.

    Attributes:
      num_top: likeliest alternatives kept per token.
      is_processed: of the distribution that is sampled from; otherwise of the model's own logits.
    """

    num_top: int
    is_processed: bool


def empty_state(
    shape: EngineShape,
    *,
    num_stop_tokens: int,
    cache: PyTree,
    drafter: PyTree,
    logprobs: LogprobsConfig | None = None,
    trace: telemetry.TraceConfig | None = None,
) -> DecodeState:
    """A state of `shape.batch_size` rows, all empty."""
    num_rows, nodes = shape.batch_size, shape.num_nodes

    def zeros(*size: int, dtype=jnp.int32) -> jax.Array:
        return jnp.zeros((num_rows, *size), dtype)

    def floats(*size: int) -> jax.Array:
        return zeros(*size, dtype=jnp.float32)

    buffers = None
    if logprobs is not None:
        num_top = logprobs.num_top
        buffers = Logprobs(
            of_token=floats(shape.max_length),
            top=floats(shape.max_length, num_top),
            top_tokens=zeros(shape.max_length, num_top),
        )
    return DecodeState(
        cache=cache,
        drafter=drafter,
        num_committed=zeros() + 1,
        finish=zeros() + Finish.EMPTY_ROW,
        arrival=zeros(),
        schedule=ScheduleCounts(
            num_rounds=jnp.int32(0),
            num_rows=jnp.int32(0),
            num_grouped_rounds=jnp.int32(0),
            num_grouped_rows=jnp.int32(0),
            num_realignments=jnp.int32(0),
            num_slots_moved=jnp.int32(0),
        ),
        limit=zeros(),
        limit_finish=zeros(),
        draft_limit=zeros(),
        stop_tokens=zeros(num_stop_tokens) - 1,
        sampling=RowSampling(
            temperature=floats(),
            top_k=zeros(),
            top_p=floats() + 1,
            min_p=floats(),
            repetition_penalty=floats() + 1,
            presence_penalty=floats(),
            frequency_penalty=floats(),
            key=zeros(2, dtype=jnp.uint32),
            prompt_length=zeros(),
            min_length=zeros(),
        ),
        tokens=zeros(shape.max_length),
        origin=zeros(shape.max_length, dtype=jnp.int8),
        stop_token=zeros() - 1,
        logprobs=buffers,
        counts=AcceptanceCounts(
            num_rounds=zeros(),
            num_drafts=zeros(),
            num_draft_tokens=zeros(),
            num_accepted_tokens=zeros(),
            drafted_at=zeros(nodes),
            accepted_at=zeros(nodes),
        ),
        trace=telemetry.empty_trace(trace, num_rows, shape.max_length, nodes),
    )


def admit_row(state: DecodeState, row: jax.Array, admission: Admission) -> DecodeState:
    """State with a request in row `row`. KV of the row's predecessor stays where it is:
    garbage.
    """
    return state.replace(
        cache=layouts.reset_padding(state.cache, row),
        num_committed=state.num_committed.at[row].set(admission.length),
        finish=state.finish.at[row].set(_first_finish(admission)),
        arrival=state.arrival.at[row].set(admission.arrival),
        limit=state.limit.at[row].set(admission.limit),
        limit_finish=state.limit_finish.at[row].set(admission.limit_finish),
        draft_limit=state.draft_limit.at[row].set(admission.draft_limit),
        stop_tokens=state.stop_tokens.at[row].set(admission.stop_tokens),
        sampling=jax.tree.map(
            lambda values, value: values.at[row].set(value), state.sampling, admission.sampling
        ),
        tokens=state.tokens.at[row].set(admission.tokens),
        origin=state.origin.at[row].set(jnp.int8(Origin.PROMPT)),
        stop_token=state.stop_token.at[row].set(-1),
        counts=jax.tree.map(lambda count: count.at[row].set(0), state.counts),
    )


def _first_finish(admission: Admission) -> jax.Array:
    """A prompt of one token needs no reading: it is the root of the first round."""
    begins = jnp.where(jnp.greater(admission.length, 1), Finish.PREFILLING, Finish.RUNNING)
    return jnp.where(jnp.less(admission.length, admission.limit), begins, admission.limit_finish)


def mark_prefilled(state: DecodeState, row: jax.Array, stop: jax.Array) -> DecodeState:
    """State after row `row` was prefilled up to slot `stop`; it runs if that was all."""
    is_read = stop >= state.num_committed[row] - 1
    finish = state.finish[row]
    finish = jnp.where(is_read & (finish == Finish.PREFILLING), Finish.RUNNING, finish)
    return state.replace(finish=state.finish.at[row].set(finish))


def batch_view(state: DecodeState) -> BatchView:
    """What drafters see. A round emits one token beyond its draft, so the last token a row may
    still emit is never drafted."""
    room = state.limit - state.num_committed
    wanted = jnp.where(state.is_running, jnp.minimum(state.draft_limit, room - 1), 0)
    return BatchView(
        tokens=state.tokens,
        num_committed=state.num_committed,
        draft_limit=wanted,
        stop_tokens=state.stop_tokens,
        sampling=sampling.as_greedy(state.sampling, ~state.is_running),
        remaining=jnp.where(state.is_running, room, 0),
    )


def newest_token(state: DecodeState) -> jax.Array:
    """`[B, 1]` int32, the root of every draft."""
    return jnp.take_along_axis(state.tokens, state.num_committed[:, None] - 1, axis=1)


def window_tokens(state: DecodeState, draft: Draft) -> jax.Array:
    """`[B, T]` int32: the newest token, then the nodes. Invalid nodes repeat the newest token,
    which any model can embed; they are scored, and nothing reads the scores."""
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
    """What stands before the token that each window entry's scores decide: its ancestors and
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


def record_logprobs(
    config: LogprobsConfig,
    state: DecodeState,
    logits: jax.Array,
    draft: Draft,
    verdict: Verdict,
    rows: BatchView,
    prefix: DraftContext,
) -> DecodeState:
    """State with the log-probabilities of the tokens that this round may emit.

    Written for all `N + 1` of them, kept or not: what lies beyond `num_committed` is garbage.
    """
    emitted = emitted_tokens(draft, verdict)
    # The j-th token was drawn from the scores of the window entry before it on the path.
    entry = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    if config.is_processed:
        logits = sampling.adjust(logits, rows, prefix)
        logits = sampling.filtered_logits(logits, rows.sampling)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    logprobs = jnp.take_along_axis(logprobs, entry[..., None], axis=1)
    of_token = jnp.take_along_axis(logprobs, jnp.maximum(emitted, 0)[..., None], axis=2)[..., 0]
    top, top_tokens = lax.top_k(logprobs, config.num_top)
    kept = jnp.where(state.is_running, emitted.shape[1], 0)
    new = Logprobs(of_token=of_token, top=top, top_tokens=top_tokens.astype(jnp.int32))
    buffers = jax.tree.map(
        lambda buffer, values: put(buffer, state.num_committed, values, kept), state.logprobs, new
    )
    return state.replace(logprobs=buffers)


def commit(state: DecodeState, draft: Draft, verdict: Verdict) -> DecodeState:
    """State with the accepted tokens and the target's next one, cut at a stop token or at the
    limit. Where the target's scores are not finite there is no next token, and the row ends."""
    num_nodes = draft.tokens.shape[1]
    index = jnp.arange(num_nodes + 1, dtype=jnp.int32)
    num_accepted = verdict.num_accepted[:, None]
    emitted = emitted_tokens(draft, verdict)
    is_finite = verdict.next_token >= 0

    is_stop = jnp.any(emitted[:, :, None] == state.stop_tokens[:, None, :], axis=2)
    num_chosen = verdict.num_accepted + is_finite.astype(jnp.int32)
    is_stop &= index < num_chosen[:, None]
    first_stop = jnp.min(jnp.where(is_stop, index, num_nodes + 1), axis=1)
    room = state.limit - state.num_committed
    num_emitted = jnp.minimum(jnp.minimum(num_chosen, first_stop + 1), room)
    num_emitted = jnp.where(state.is_running, num_emitted, 0)
    num_committed = state.num_committed + num_emitted

    at_limit = jnp.where(num_committed >= state.limit, state.limit_finish, Finish.RUNNING)
    runs_on = jnp.where(is_finite | (num_emitted < num_chosen), at_limit, Finish.NON_FINITE)
    finish = jnp.where(first_stop < num_emitted, Finish.STOP_TOKEN, runs_on)
    stopped_by = jnp.take_along_axis(emitted, jnp.minimum(first_stop, num_nodes)[:, None], axis=1)[
        :, 0
    ]

    drafted_all = jnp.where(verdict.num_accepted < draft.num_valid, Origin.CORRECTED, Origin.BONUS)
    last_origin = jnp.where(draft.num_valid > 0, drafted_all, Origin.PLAIN)[:, None]
    origin = jnp.where(index < num_accepted, Origin.ACCEPTED, last_origin).astype(jnp.int8)
    return state.replace(
        num_committed=num_committed,
        finish=jnp.where(state.is_running, finish, state.finish).astype(jnp.int32),
        tokens=put(state.tokens, state.num_committed, emitted, num_emitted),
        origin=put(state.origin, state.num_committed, origin, num_emitted),
        stop_token=jnp.where(first_stop < num_emitted, stopped_by, state.stop_token),
        counts=count(state, draft, verdict, num_emitted),
    )


def put(buffer: jax.Array, start: jax.Array, values: jax.Array, num_kept: jax.Array) -> jax.Array:
    """`buffer` `[B, S, ...]` with the first `num_kept[b]` of `values` `[B, n, ...]` at `start[b]`
    onwards."""
    num_slots = buffer.shape[1]
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    target = jnp.where(index < num_kept[:, None], start[:, None] + index, num_slots + index)

    def put_row(row, target, values):
        return row.at[target].set(values, mode="drop", unique_indices=True)

    return jax.vmap(put_row)(buffer, target, values)


def count(
    state: DecodeState, draft: Draft, verdict: Verdict, num_emitted: jax.Array
) -> AcceptanceCounts:
    """Totals after the round. Only tokens that were kept count as accepted: what lies after a stop
    token was never emitted."""
    is_counted = num_emitted > 0
    num_drafted = jnp.where(is_counted, draft.num_valid, 0)
    num_accepted = jnp.minimum(verdict.num_accepted, num_emitted)
    depth = jnp.arange(state.counts.drafted_at.shape[1], dtype=jnp.int32)
    of_round = AcceptanceCounts(
        num_rounds=is_counted,
        num_drafts=num_drafted > 0,
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        drafted_at=depth < num_drafted[:, None],
        accepted_at=depth < num_accepted[:, None],
    )
    return jax.tree.map(lambda total, new: total + new.astype(jnp.int32), state.counts, of_round)
