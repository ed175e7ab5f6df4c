"""The decode state: making an empty one, admitting requests, and taking the rows of a batch out of
it.

One integer per row, `num_committed`, is the truth about its length. Arrays have the rows as their
first axis, so a batch is taken out of the resident rows, and put back, by row number. The KV is not
copied: only the page table has a row axis.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import sampling
from jaxspec.cache import layouts
from jaxspec.cache.pages import KVCache, copy_row, put_table
from jaxspec.errors import ModelError
from jaxspec.telemetry.trace import TraceConfig, empty_trace
from jaxspec.types import (
    MAX_BIASED_TOKENS,
    AcceptanceCounts,
    BatchView,
    DecodeState,
    EngineShape,
    Finish,
    Logprobs,
    Origin,
    PyTree,
    RowSampling,
    ScheduleCounts,
    Shared,
    TokenBias,
)


class Admission(struct.PyTreeNode, kw_only=True):
    """A request as it enters the batch.

    Attributes:
      tokens: `[S]` int32, the prompt, padded.
      length: int32 scalar, that of the prompt.
      limit: int32 scalar, `num_committed` at which the row ends.
      limit_finish: int32 scalar, the `Finish` to report there.
      draft_limit: int32 scalar, draft length; 0 decodes plainly.
      stop_tokens: `[num_stop]` int32, padded with -1.
      sampling: this row's values, without the axis of rows.
      wants_logprobs: bool scalar, whether log-probabilities of the output are asked for.
      arrival: int32 scalar, order among requests.
    """

    tokens: jax.typing.ArrayLike
    length: jax.typing.ArrayLike
    limit: jax.typing.ArrayLike
    limit_finish: jax.typing.ArrayLike
    draft_limit: jax.typing.ArrayLike
    stop_tokens: jax.typing.ArrayLike
    sampling: RowSampling
    wants_logprobs: jax.typing.ArrayLike
    arrival: jax.typing.ArrayLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobsConfig:
    """Which log-probabilities the loop keeps.

    Attributes:
      num_top: likeliest alternatives kept per token.
      is_processed: whether they are those of the distribution that is sampled from, rather than of
        the model's own logits.
    """

    num_top: int
    is_processed: bool


def empty_state(
    shape: EngineShape,
    *,
    num_stop_tokens: int,
    cache: PyTree,
    drafter: PyTree,
    draft_depth: int | None = None,
    logprobs: LogprobsConfig | None = None,
    trace: TraceConfig | None = None,
) -> DecodeState:
    """A state of `shape.batch_size` rows, all empty; `draft_depth` is by default a chain's."""
    num_rows, nodes = shape.batch_size, shape.num_nodes

    def zeros(*size: int, dtype=jnp.int32) -> jax.Array:
        return jnp.zeros((num_rows, *size), dtype)

    def floats(*size: int) -> jax.Array:
        return zeros(*size, dtype=jnp.float32)

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
        least_live=zeros(),
        stop_tokens=zeros(num_stop_tokens) - 1,
        sampling=sampling.neutral_sampling(num_rows).replace(
            bias=TokenBias(
                tokens=zeros(MAX_BIASED_TOKENS) - 1,
                values=floats(MAX_BIASED_TOKENS),
                is_exclusive=zeros(dtype=jnp.bool_),
            ),
            loops_run_on_host=shape.loops_run_on_host,
        ),
        tokens=zeros(shape.max_length),
        origin=zeros(shape.max_length, dtype=jnp.int8),
        stop_token=zeros() - 1,
        wants_logprobs=zeros(dtype=jnp.bool_),
        logprobs=empty_logprobs(logprobs, num_rows, shape.max_length),
        counts=empty_counts(num_rows, nodes, nodes if draft_depth is None else draft_depth),
        trace=empty_trace(trace, num_rows, shape.max_length, nodes),
    )


def empty_counts(num_rows: int, num_nodes: int, depth: int) -> AcceptanceCounts:
    """Counts of rows that have not taken part in any round."""
    none = jnp.zeros((num_rows,), jnp.int32)
    none_at = jnp.zeros((num_rows, depth), jnp.int32)
    return AcceptanceCounts(
        num_rounds=none,
        num_drafts=none,
        num_draft_tokens=none,
        num_accepted_tokens=none,
        drafted_at=none_at,
        accepted_at=none_at,
        accepted_node=jnp.zeros((num_rows, num_nodes), jnp.int32),
    )


def empty_logprobs(
    config: LogprobsConfig | None, num_rows: int, max_length: int
) -> Logprobs | None:
    """Buffers for `num_rows` rows; None without a config."""
    if config is None:
        return None
    shape = (num_rows, max_length, config.num_top)
    return Logprobs(
        of_token=jnp.zeros(shape[:2], jnp.float32),
        top=jnp.zeros(shape, jnp.float32),
        top_tokens=jnp.zeros(shape, jnp.int32),
    )


def admit_row(state: DecodeState, row: jax.Array, admission: Admission) -> DecodeState:
    """State with a request in row `row`; its prompt is still to be prefilled. The KV of the row's
    previous request stays where it is, as garbage."""
    given = admission.sampling.replace(loops_run_on_host=state.sampling.loops_run_on_host)
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
            lambda values, value: values.at[row].set(value), state.sampling, given
        ),
        tokens=state.tokens.at[row].set(admission.tokens),
        origin=state.origin.at[row].set(jnp.int8(Origin.PROMPT)),
        stop_token=state.stop_token.at[row].set(-1),
        wants_logprobs=state.wants_logprobs.at[row].set(admission.wants_logprobs),
        counts=jax.tree.map(lambda count: count.at[row].set(0), state.counts),
    )


def _first_finish(admission: Admission) -> jax.Array:
    """A prompt of one token needs no prefill: it is the root of the first round. A row that asks
    for no tokens ends with its prefill."""
    wants_tokens = jnp.less(admission.length, admission.limit)
    at_once = jnp.where(wants_tokens, Finish.RUNNING, admission.limit_finish)
    return jnp.where(jnp.greater(admission.length, 1), Finish.PREFILLING, at_once)


def mark_prefilled(state: DecodeState, rows: jax.Array, stops: jax.Array) -> DecodeState:
    """State after rows were prefilled up to these slots; a row starts running if that was its whole
    prompt. Both are `[R]` int32, where a row may be repeated and -1 is none, or scalars."""
    num_rows = state.finish.shape[0]
    rows = jnp.where(rows < 0, num_rows, rows)
    reached = jnp.full((num_rows,), -1, jnp.int32).at[rows].max(stops, mode="drop")
    is_prefilled = (reached >= 0) & (reached >= state.num_committed - 1)
    is_next = is_prefilled & (state.finish == Finish.PREFILLING)
    return state.replace(finish=jnp.where(is_next, Finish.RUNNING, state.finish))


def batch_view(state: DecodeState, *, is_chain: bool = True) -> BatchView:
    """What drafters and verifiers see. A round emits one token beyond the drafts it accepts, so the
    last token that a row may still emit is never drafted."""
    room = state.limit - state.num_committed
    depth_limit = jnp.where(state.is_running, room - 1, 0)
    if is_chain:
        draft_limit = jnp.where(state.is_running, jnp.minimum(state.draft_limit, room - 1), 0)
    else:  # any node of a tree may be emitted, if it is not too deep
        draft_limit = jnp.where(depth_limit > 0, state.draft_limit, 0)
    return BatchView(
        tokens=state.tokens,
        num_committed=state.num_committed,
        draft_limit=draft_limit,
        stop_tokens=state.stop_tokens,
        sampling=sampling.as_greedy(state.sampling, ~state.is_running),
        remaining=jnp.where(state.is_running, room, 0),
        depth_limit=depth_limit,
    )


def newest_token(state: DecodeState) -> jax.Array:
    """`[B, 1]` int32, the root of every draft."""
    return jnp.take_along_axis(state.tokens, state.num_committed[:, None] - 1, axis=1)


def scatter_rows(
    buffer: jax.Array, start: jax.Array, values: jax.Array, num_kept: jax.Array
) -> jax.Array:
    """`buffer` `[B, S, ...]` with the first `num_kept[b]` of `values` `[B, n, ...]` written from
    slot `start[b]` on."""
    num_slots = buffer.shape[1]
    index = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    target = jnp.where(index < num_kept[:, None], start[:, None] + index, num_slots + index)

    def write_row(row, target, values):
        return row.at[target].set(values, mode="drop", unique_indices=True)

    return jax.vmap(write_row)(buffer, target, values)


def is_cache(node: PyTree) -> bool:
    """Whether a node of a state is a cache, which some functions take as a whole."""
    return isinstance(node, KVCache)


def has_rows(state: PyTree) -> PyTree:
    """For each array of a state, whether it has a row axis; a cache as a whole has one.

    The rule is `DecodeState`'s: every array has the rows as its first axis, except scalars and what
    is wrapped in `Shared`.
    """

    def of(node: PyTree) -> PyTree:
        if isinstance(node, Shared):
            return jax.tree.map(lambda _: False, node)
        return isinstance(node, KVCache) or node.ndim > 0

    return jax.tree.map(of, state, is_leaf=lambda node: isinstance(node, KVCache | Shared))


def take_over_row(
    state: DecodeState,
    row: jax.Array,
    cache: PyTree,
    drafter: PyTree,
    *,
    source: jax.Array,
    length: jax.Array,
) -> DecodeState:
    """State with the KV and the drafter's state of another state's row in `row`. Drafter state that
    all rows share stays as it is.

    Args:
      row: int32 scalar.
      cache: that of the other state.
      drafter: that of the other state.
      source: int32 scalar, the row in the other state.
      length: int32 scalar, slots of it that are copied.
    """

    def take(is_per_row: bool, leaf, other):
        if isinstance(leaf, KVCache):
            return copy_row(leaf, row, other, source, length)
        return leaf.at[row].set(other[source]) if is_per_row else leaf

    per_row = has_rows(state)
    cache = jax.tree.map(take, per_row.cache, state.cache, cache)
    drafter = jax.tree.map(take, per_row.drafter, state.drafter, drafter)
    return state.replace(cache=cache, drafter=drafter)


def form_of(tree: PyTree) -> tuple[PyTree, list[tuple]]:
    """Structure, shapes and dtypes of a pytree: equal for states that one program takes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def check_rows(name: str, state: PyTree, num_rows: int) -> None:
    """Raises `ModelError` unless a drafter's state (or its shapes) follows the rule of
    `has_rows`."""

    def check(path, is_per_row: bool, node: PyTree) -> None:
        size = (node.table if isinstance(node, KVCache) else node).shape[:1]
        if is_per_row and size != (num_rows,):
            raise ModelError(
                f"The drafter {name} was given {num_rows} rows, and its `init` made "
                f"state{jax.tree_util.keystr(path)} with a first axis of {size[0]}; put the rows "
                "first, or wrap what all rows share in jaxspec.types.Shared."
            )

    jax.tree_util.tree_map_with_path(check, has_rows(state), state)


def take_rows(state: DecodeState, rows: jax.Array) -> DecodeState:
    """The state of some `rows` `[n]`, distinct. Their KV stays where it is: only the rows of a
    cache's page table are taken."""

    def take(is_per_row: bool, node: PyTree) -> PyTree:
        if isinstance(node, KVCache):
            return node.replace(table=node.table[rows])
        return node[rows] if is_per_row else node

    return jax.tree.map(take, has_rows(state), state)


def put_rows(state: DecodeState, rows: jax.Array, batch: DecodeState) -> DecodeState:
    """The state with the rows of `batch`, which `take_rows` took and rounds have changed, put back
    in place."""

    def put(is_per_row: bool, node: PyTree, new: PyTree) -> PyTree:
        if isinstance(node, KVCache):
            return new.replace(table=put_table(node.table, rows, new.table))
        return node.at[rows].set(new, unique_indices=True) if is_per_row else new

    return jax.tree.map(put, has_rows(state), state, batch)
