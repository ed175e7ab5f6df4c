"""Acceptance: buffers on the device, counters and pandas frames on the host.

A row's history is written where its round stands in its own count, so it stays right when rows
change seats, join late or end early. Nothing is written, or even allocated, unless it is asked for:
a state without a trace has no such arrays, and its program no such instruction.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import sampling
from jaxspec.errors import SettingError
from jaxspec.types import (
    AcceptanceCounts,
    DecodeState,
    Draft,
    LawTrace,
    Prefix,
    RoundTrace,
    Rows,
    TokenTrace,
    Trace,
    Verdict,
)

if TYPE_CHECKING:
    import pandas

TraceLevel: TypeAlias = Literal["rounds", "tokens", "laws"]
LEVELS: tuple[TraceLevel, ...] = ("rounds", "tokens", "laws")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What the loop records.

    Each level holds those before it; with S slots and N draft nodes a row takes, in bytes,
    `24 S` (rounds), `19 S N` more (tokens) and `12 S N` more (laws).

    Attributes:
      level: `rounds`; `tokens`, one record per drafted token; or `laws`, with entropies and overlap
        of p and q.
    """

    level: TraceLevel

    def __post_init__(self):
        if self.level not in LEVELS:
            raise SettingError(
                f"trace {self.level!r} was given; it must be 'rounds', 'tokens' or 'laws', or None "
                "to record nothing."
            )

    @property
    def has_tokens(self) -> bool:
        """Whether drafted tokens are recorded, so that drafters are asked for q."""
        return self.level != "rounds"

    @property
    def has_laws(self) -> bool:
        """Whether entropies and overlap are recorded."""
        return self.level == "laws"


def empty_trace(
    config: TraceConfig | None, num_rows: int, num_rounds: int, num_nodes: int
) -> Trace | None:
    """Buffers of `num_rows` rows with room for `num_rounds` rounds each; None without a config."""
    if config is None:
        return None

    def of_rounds(dtype=jnp.int32) -> jax.Array:
        return jnp.zeros((num_rows, num_rounds), dtype)

    def of_nodes(dtype=jnp.float32) -> jax.Array:
        return jnp.zeros((num_rows, num_rounds, num_nodes), dtype)

    tokens = laws = None
    if config.has_tokens:
        tokens = TokenTrace(
            token_id=of_nodes(jnp.int32),
            parent=of_nodes(jnp.int16),
            is_accepted=of_nodes(jnp.bool_),
            logprob_p=of_nodes(),
            logprob_q=of_nodes(),
            rank=of_nodes(jnp.int32),
        )
    if config.has_laws:
        laws = LawTrace(entropy_p=of_nodes(), entropy_q=of_nodes(), overlap=of_nodes())
    rounds = RoundTrace(
        engine_round=of_rounds(),
        context_length=of_rounds(),
        drafted=of_rounds(),
        draft_depth=of_rounds(),
        accepted=of_rounds(),
        emitted=of_rounds(),
    )
    return Trace(rounds=rounds, tokens=tokens, laws=laws)


def record_round(
    config: TraceConfig,
    state: DecodeState,
    *,
    num_emitted: jax.Array,
    logits: jax.Array,
    draft: Draft,
    verdict: Verdict,
    rows: Rows,
    prefix: Prefix,
    depth: jax.Array,
    is_chain: bool,
) -> Trace:
    """The trace with this round written to the rows that emitted something.

    Args:
      state: before the round.
      num_emitted: `[B]` int32, tokens kept of the round; 0 for rows that took no part.
      logits: `[B, N + 1, V]`, the target's.
      draft: as it was scored.
      verdict: the verifier's.
      rows: before the round.
      prefix: of the `N + 1` tokens to be drawn.
      depth: `[B, N]` int32, of each node, 1 below the newest committed token.
      is_chain: whether every draft is a chain.
    """
    num_nodes = draft.tokens.shape[1]
    node = jnp.arange(num_nodes, dtype=jnp.int32)
    num_kept = jnp.minimum(verdict.num_accepted, num_emitted)
    rounds = RoundTrace(
        engine_round=jnp.broadcast_to(state.num_rounds, num_emitted.shape),
        context_length=state.num_committed,
        drafted=draft.num_valid,
        draft_depth=jnp.max(jnp.where(node < draft.num_valid[:, None], depth, 0), axis=1),
        accepted=num_kept,
        emitted=num_emitted,
    )
    tokens = laws = None
    if config.has_tokens:
        is_kept = node < num_kept[:, None]  # by depth along the path
        is_accepted = jnp.any((verdict.path[..., None] == node) & is_kept[..., None], axis=1)

        def before_nodes(values: jax.Array) -> jax.Array:
            """Of `[B, N + 1, V]`, what stands at each node's parent, `[B, N, V]`."""
            if is_chain:
                return values[:, :-1]
            is_valid = node < draft.num_valid[:, None]
            entry = jnp.where(is_valid, draft.parents + 1, 0)
            return jnp.take_along_axis(values, entry[..., None], axis=1)

        scores = before_nodes(sampling.adjust(logits, rows, prefix))
        p = jax.nn.log_softmax(sampling.law_logits(scores, rows.sampling), axis=-1)
        score = _of_tokens(scores, draft.tokens)[..., None]
        has_law = None
        logprob_q = jnp.full(draft.tokens.shape, jnp.nan, jnp.float32)
        if draft.q is not None:
            # A drafter may leave the law of a greedy row zero: that draft is deterministic too.
            has_law = jnp.sum(draft.q, axis=-1) > 0
            logprob_q = jnp.where(has_law, jnp.log(_of_tokens(draft.q, draft.tokens)), jnp.nan)
        tokens = TokenTrace(
            token_id=draft.tokens,
            parent=draft.parents.astype(jnp.int16),
            is_accepted=is_accepted,
            logprob_p=_of_tokens(p, draft.tokens),
            logprob_q=logprob_q,
            rank=1 + jnp.sum(scores > score, axis=-1, dtype=jnp.int32),
        )
        if config.has_laws:
            laws = _compare_laws(p, draft, has_law)
    return _write(state, Trace(rounds=rounds, tokens=tokens, laws=laws), num_emitted)


def _of_tokens(values: jax.Array, tokens: jax.Array) -> jax.Array:
    """`values` `[B, N, V]` at `tokens` `[B, N]`."""
    return jnp.take_along_axis(values, tokens[..., None], axis=2)[..., 0]


def _compare_laws(log_p: jax.Array, draft: Draft, has_law: jax.Array | None) -> LawTrace:
    """Entropies and overlap of p, given by its logarithm `[B, N, V]`, and the draft's q."""
    p = jnp.exp(log_p)
    of_point_mass = LawTrace(
        entropy_p=-jnp.sum(jnp.where(p > 0, p * log_p, 0), axis=-1),
        entropy_q=jnp.zeros(draft.tokens.shape, jnp.float32),
        overlap=_of_tokens(p, draft.tokens),
    )
    if draft.q is None or has_law is None:
        return of_point_mass
    q = draft.q
    log_q = jnp.log(jnp.where(q > 0, q, 1))
    return of_point_mass.replace(
        entropy_q=-jnp.sum(q * log_q, axis=-1),
        overlap=jnp.where(has_law, jnp.sum(jnp.minimum(p, q), axis=-1), of_point_mass.overlap),
    )


def record_step(state: DecodeState, emits: jax.Array) -> Trace:
    """The trace with a step of plain decoding written to the rows that it `emits` a token for,
    `[B]` bool."""
    emitted = emits.astype(jnp.int32)
    nothing = jnp.zeros_like(emitted)
    rounds = RoundTrace(
        engine_round=jnp.broadcast_to(state.num_rounds, emitted.shape),
        context_length=state.num_committed,
        drafted=nothing,
        draft_depth=nothing,
        accepted=nothing,
        emitted=emitted,
    )
    return _write(state, Trace(rounds=rounds), emitted)


def _write(state: DecodeState, new: Trace, num_emitted: jax.Array) -> Trace:
    """The state's trace with `new` at each row's own round; what `new` leaves out stays as it
    is."""
    trace = state.trace
    assert trace is not None, "a loop with a trace has a state with one"
    num_rounds = trace.rounds.emitted.shape[1]
    row = jnp.arange(len(num_emitted), dtype=jnp.int32)
    # The same rounds that `AcceptanceCounts` counts; the others are written nowhere.
    place = jnp.where(num_emitted > 0, state.counts.num_rounds, num_rounds)

    def put(buffer: jax.Array, values: jax.Array) -> jax.Array:
        # A round narrower than the engine's window drafts fewer nodes than there is room for.
        missing = [
            (0, size - num) for size, num in zip(buffer.shape[2:], values.shape[1:], strict=True)
        ]
        values = jnp.pad(values, [(0, 0), *missing])
        return buffer.at[row, place].set(values, mode="drop", unique_indices=True)

    written = {
        name: jax.tree.map(put, getattr(trace, name), part)
        for name, part in (("rounds", new.rounds), ("tokens", new.tokens), ("laws", new.laws))
        if part is not None
    }
    return trace.replace(**written)


def row_trace(trace: Trace | None, row: int, num_rounds: int) -> Trace | None:
    """One row's history out of buffers that were fetched to the host: NumPy arrays
    `[num_rounds, ...]` of its own, so that the buffers need not be kept."""
    return jax.tree.map(lambda buffer: np.array(buffer[row, :num_rounds]), trace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What became of a request's drafts.

    Attributes:
      num_rounds: rounds the request took.
      num_drafts: rounds in which something was drafted.
      num_draft_tokens: drafted tokens.
      num_accepted_tokens: drafted tokens that were emitted.
      num_emitted_tokens: tokens of the output.
      num_drafts_per_pos: rounds whose draft reached position i.
      num_accepted_tokens_per_pos: rounds that accepted position i and all before it.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_drafts_per_pos: tuple[int, ...] = ()
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @property
    def emitted_per_round(self) -> float:
        """tau: emitted tokens per round (vLLM's mean acceptance length); 1 for plain decoding."""
        return self.num_emitted_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Cumulative acceptance by draft position: accepted at i / rounds that drafted (vLLM's)."""
        return tuple(n / self.num_drafts for n in self.num_accepted_tokens_per_pos[: self.depth])

    def num_accepted_at(self, position: int) -> int:
        """Rounds that accepted this position (from 0) and all before it."""
        counts = self.num_accepted_tokens_per_pos
        return counts[position] if position < len(counts) else 0

    @property
    def depth(self) -> int:
        """Positions that were drafted at all."""
        return sum(n > 0 for n in self.num_drafts_per_pos)

    def __add__(self, other: Acceptance) -> Acceptance:
        """Totals of both."""

        def pad(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            size = max(len(a), len(b))
            a, b = a + (0,) * (size - len(a)), b + (0,) * (size - len(b))
            return tuple(x + y for x, y in zip(a, b, strict=True))

        sums = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            sums[field.name] = pad(mine, theirs) if isinstance(mine, tuple) else mine + theirs
        return Acceptance(**sums)

    @classmethod
    def total(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """Totals of many."""
        return sum(parts, start=cls())

    @classmethod
    def of_row(cls, counts: AcceptanceCounts, row: int, *, num_emitted: int) -> Acceptance:
        """Totals of one row of device counts that have been fetched to the host."""
        return cls(
            num_rounds=int(counts.num_rounds[row]),
            num_drafts=int(counts.num_drafts[row]),
            num_draft_tokens=int(counts.num_draft_tokens[row]),
            num_accepted_tokens=int(counts.num_accepted_tokens[row]),
            num_emitted_tokens=num_emitted,
            num_drafts_per_pos=tuple(np.asarray(counts.drafted_at[row]).tolist()),
            num_accepted_tokens_per_pos=tuple(np.asarray(counts.accepted_at[row]).tolist()),
        )

    def to_json(self) -> dict:
        """Counts, and the figures derived from them."""
        counts = dataclasses.asdict(self)
        per_position = ("num_drafts_per_pos", "num_accepted_tokens_per_pos")
        return counts | {
            **{name: list(counts[name]) for name in per_position},
            "emitted_per_round": self.emitted_per_round,
            "per_position_acceptance": list(self.per_position),
        }


class Metrics:
    """Counters of an engine's life, in vLLM's names; they only ever grow.

    One thread updates them, any thread may take a snapshot.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._num_requests = 0
        self._ended = Acceptance()
        self._running = Acceptance()

    def update(self, ended: Sequence[Acceptance], running: Sequence[Acceptance]) -> None:
        """Adds rows that have `ended` since the last update, and replaces what was known of those
        that are still `running`."""
        with self._lock:
            self._num_requests += len(ended)
            self._ended = Acceptance.total([self._ended, *ended])
            self._running = Acceptance.total(running)

    def abandon(self) -> None:
        """Keeps what running rows have done, which nobody will finish."""
        with self._lock:
            self._ended += self._running
            self._running = Acceptance()

    def snapshot(self) -> dict[str, Any]:
        """The counters: `num_requests` that have ended, and of all rows `num_rounds` (a round
        counts for every row that took part), `num_emitted_tokens`, `num_drafts`,
        `num_draft_tokens`, `num_accepted_tokens` and the list `num_accepted_tokens_per_pos`
        (rounds that accepted at least so many)."""
        with self._lock:
            total, num_requests = self._ended + self._running, self._num_requests
        return {
            "num_requests": num_requests,
            "num_rounds": total.num_rounds,
            "num_emitted_tokens": total.num_emitted_tokens,
            "num_drafts": total.num_drafts,
            "num_draft_tokens": total.num_draft_tokens,
            "num_accepted_tokens": total.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(total.num_accepted_tokens_per_pos),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """A row of frames: whose history it is.

    Attributes:
      request_id: of the request.
      index: which of the prompt's `n` completions it is.
      trace: its history.
    """

    request_id: str
    index: int
    trace: Trace | None


def rounds_frame(
    requests: Sequence[TracedRequest], columns: Mapping[str, Iterable[Any]]
) -> pandas.DataFrame:
    """One row per request and round, in order; see `Completions.rounds`."""
    traces = _traces(requests)
    lengths = [len(trace.rounds.emitted) for trace in traces]
    names = ("engine_round", "context_length", "drafted", "draft_depth", "accepted", "emitted")
    fields = {
        "round": _joined([np.arange(n, dtype=np.int32) for n in lengths], np.int32),
        **{
            name: _joined([getattr(trace.rounds, name) for trace in traces], np.int32)
            for name in names
        },
    }
    return _frame(requests, lengths, fields, columns)


def tokens_frame(
    requests: Sequence[TracedRequest], columns: Mapping[str, Iterable[Any]]
) -> pandas.DataFrame:
    """One row per drafted token, in order; see `Completions.tokens`."""
    parts = [_tokens_of(trace) for trace in _traces(requests)]
    lengths = [len(part["node"]) for part in parts]
    fields = {}
    for name, dtype in _TOKEN_COLUMNS.items():
        if name not in _LAW_COLUMNS or (parts and all(name in part for part in parts)):
            fields[name] = _joined([part[name] for part in parts], dtype)
    return _frame(requests, lengths, fields, columns)


_LAW_COLUMNS = ("entropy_p", "entropy_q", "overlap")
_TOKEN_COLUMNS = {
    "round": np.int32,
    "node": np.int32,
    "parent": np.int32,
    "depth": np.int32,
    "position": np.int32,
    "token_id": np.int32,
    "logprob_p": np.float32,
    "logprob_q": np.float32,
    "rank": np.int32,
    "accepted": np.bool_,
    "reached": np.bool_,
    **dict.fromkeys(_LAW_COLUMNS, np.float32),
}


def _tokens_of(trace: Trace) -> dict[str, np.ndarray]:
    """Columns of one request's drafted tokens."""
    rounds, tokens = trace.rounds, trace.tokens
    if tokens is None:
        if not np.any(rounds.drafted):  # plain decoding drafts nothing, whatever is recorded
            return {name: np.zeros((0,), dtype) for name, dtype in _TOKEN_COLUMNS.items()}
        raise SettingError(
            "Drafted tokens were asked for, and the trace holds rounds only; make the engine with "
            "trace='tokens'."
        )
    num_rounds, num_nodes = np.shape(tokens.token_id)
    node = np.broadcast_to(np.arange(num_nodes, dtype=np.int32), (num_rounds, num_nodes))
    is_drafted = node < np.asarray(rounds.drafted)[:, None]
    parent = np.where(is_drafted, np.asarray(tokens.parent, np.int32), -1)
    is_accepted = np.asarray(tokens.is_accepted)
    depth = np.ones((num_rounds, num_nodes), np.int32)
    is_after_kept = np.ones((num_rounds, num_nodes), bool)
    each = np.arange(num_rounds)
    for n in range(num_nodes):  # parents come before children
        above = np.maximum(parent[:, n], 0)
        is_root = parent[:, n] < 0
        depth[:, n] = np.where(is_root, 1, depth[each, above] + 1)
        is_after_kept[:, n] = is_root | is_accepted[each, above]
    # What stands behind a token that ended the output was never judged.
    is_reached = is_after_kept & (depth <= np.asarray(rounds.emitted)[:, None])
    columns = {
        "round": np.broadcast_to(np.arange(num_rounds, dtype=np.int32)[:, None], node.shape),
        "node": node,
        "parent": parent,
        "depth": depth,
        "position": np.asarray(rounds.context_length)[:, None] + depth - 1,
        "token_id": tokens.token_id,
        "logprob_p": tokens.logprob_p,
        "logprob_q": tokens.logprob_q,
        "rank": tokens.rank,
        "accepted": is_accepted,
        "reached": is_reached,
    }
    if trace.laws is not None:
        columns |= {name: getattr(trace.laws, name) for name in _LAW_COLUMNS}
    return {name: np.asarray(values)[is_drafted] for name, values in columns.items()}


def _traces(requests: Sequence[TracedRequest]) -> list[Trace]:
    traces = [request.trace for request in requests if request.trace is not None]
    if len(traces) < len(requests):
        raise SettingError(
            f"{len(requests) - len(traces)} of {len(requests)} completions have no trace; make the "
            "engine with trace='rounds', 'tokens' or 'laws'."
        )
    return traces


def _joined(parts: Sequence[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros((0,), dtype), *parts]).astype(dtype, copy=False)


def _frame(
    requests: Sequence[TracedRequest],
    lengths: Sequence[int],
    fields: Mapping[str, np.ndarray],
    columns: Mapping[str, Iterable[Any]],
) -> pandas.DataFrame:
    """A frame of `lengths` rows for each request: who it is, its own `columns`, then `fields`."""
    pd = import_extra("pandas", "frames")
    of_request = {
        "request_id": np.array([request.request_id for request in requests], object),
        "index": np.array([request.index for request in requests], np.int32),
    }
    for name, values in columns.items():
        if name in of_request or name in fields:
            raise SettingError(
                f"The column {name!r} was given, and the frame has one of its own; rename it."
            )
        of_request[name] = _per_request(name, list(values), requests)
    repeated = {name: np.repeat(values, lengths) for name, values in of_request.items()}
    return pd.DataFrame(repeated | dict(fields))


def _per_request(name: str, values: list[Any], requests: Sequence[TracedRequest]) -> np.ndarray:
    """Values of a column, one per request; one per prompt is enough."""
    prompt = np.cumsum([request.index == 0 for request in requests], dtype=np.int64) - 1
    num_prompts = int(prompt[-1]) + 1 if len(prompt) else 0
    if len(values) not in (len(requests), num_prompts):
        expected = f"{len(requests)}, one per completion"
        if num_prompts != len(requests):
            expected += f", or {num_prompts}, one per prompt"
        raise SettingError(
            f"The column {name!r} was given {len(values)} values; it must have {expected}."
        )
    column = np.empty((len(values),), object)
    column[:] = values
    column = column if len(values) == len(requests) else column[np.maximum(prompt, 0)]
    kinds = {type(value) for value in values}
    # Numbers and truth values keep a dtype of their own; anything else stays an object.
    return np.array(column.tolist()) if kinds in ({bool}, {int}, {float}) else column


def import_extra(module: str, purpose: str) -> Any:
    """A module of the `analysis` extra.

    Raises:
      SettingError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise SettingError(
            f"{package} is needed for {purpose}, and is not installed; install it with pip install "
            "'jaxspec-decoding[analysis]'."
        ) from error
