"""pandas frames of the rounds and drafted tokens that completions recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.runtime.extras import import_extra
from jaxspec.types import Trace

if TYPE_CHECKING:
    import pandas


def rounds_frame(
    completions: Sequence[Any], columns: Mapping[str, Iterable[Any]]
) -> pandas.DataFrame:
    """One row per request and round, in order; see `Completions.rounds`."""
    traces = _traces(completions)
    lengths = [len(trace.rounds.emitted) for trace in traces]
    names = ("engine_round", "context_length", "drafted", "draft_depth", "accepted", "emitted")
    fields = {
        "round": _joined([np.arange(n, dtype=np.int32) for n in lengths], np.int32),
        **{
            name: _joined([getattr(trace.rounds, name) for trace in traces], np.int32)
            for name in names
        },
    }
    return _frame(completions, lengths, fields, columns)


def tokens_frame(
    completions: Sequence[Any], columns: Mapping[str, Iterable[Any]]
) -> pandas.DataFrame:
    """One row per drafted token, in order; see `Completions.tokens`."""
    parts = [_tokens_of(trace) for trace in _traces(completions)]
    lengths = [len(part["node"]) for part in parts]
    fields = {}
    for name, dtype in _TOKEN_COLUMNS.items():
        if name not in _DISTRIBUTION_COLUMNS or (parts and all(name in part for part in parts)):
            fields[name] = _joined([part[name] for part in parts], dtype)
    return _frame(completions, lengths, fields, columns)


_DISTRIBUTION_COLUMNS = ("entropy_p", "entropy_q", "overlap")
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
    **dict.fromkeys(_DISTRIBUTION_COLUMNS, np.float32),
}


def _tokens_of(trace: Trace) -> dict[str, np.ndarray]:
    """Columns of one request's drafted tokens."""
    rounds, tokens = trace.rounds, trace.tokens
    if tokens is None:
        if not np.any(rounds.drafted):  # plain decoding drafts nothing, whatever the trace level
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
    # Tokens after the one that ended the output were never judged.
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
    if trace.distributions is not None:
        columns |= {name: getattr(trace.distributions, name) for name in _DISTRIBUTION_COLUMNS}
    return {name: np.asarray(values)[is_drafted] for name, values in columns.items()}


def _traces(completions: Sequence[Any]) -> list[Trace]:
    traces = [one.trace for one in completions if one.trace is not None]
    if len(traces) < len(completions):
        raise SettingError(
            f"{len(completions) - len(traces)} of {len(completions)} completions have no trace; "
            "make the engine with trace='rounds', 'tokens' or 'distributions'."
        )
    return traces


def _joined(parts: Sequence[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros((0,), dtype), *parts]).astype(dtype, copy=False)


def _frame(
    completions: Sequence[Any],
    lengths: Sequence[int],
    fields: Mapping[str, np.ndarray],
    columns: Mapping[str, Iterable[Any]],
) -> pandas.DataFrame:
    """A frame with `lengths` rows for each request: its identity, the given `columns`, then
    `fields`."""
    pd = import_extra("pandas", "frames")
    of_request = {
        "request_id": np.array([one.request_id for one in completions], object),
        "index": np.array([one.index for one in completions], np.int32),
    }
    for name, values in columns.items():
        if name in of_request or name in fields:
            raise SettingError(
                f"The column {name!r} was given, and the frame has one of its own; rename it."
            )
        of_request[name] = _per_request(name, list(values), completions)
    repeated = {name: np.repeat(values, lengths) for name, values in of_request.items()}
    return pd.DataFrame(repeated | dict(fields))


def _per_request(name: str, values: list[Any], completions: Sequence[Any]) -> np.ndarray:
    """Values of a column, one per request; one per prompt is enough."""
    prompt = np.cumsum([one.index == 0 for one in completions], dtype=np.int64) - 1
    num_prompts = int(prompt[-1]) + 1 if len(prompt) else 0
    if len(values) not in (len(completions), num_prompts):
        expected = f"{len(completions)}, one per completion"
        if num_prompts != len(completions):
            expected += f", or {num_prompts}, one per prompt"
        raise SettingError(
            f"The column {name!r} was given {len(values)} values; it must have {expected}."
        )
    column = np.empty((len(values),), object)
    column[:] = values
    column = column if len(values) == len(completions) else column[np.maximum(prompt, 0)]
    kinds = {type(value) for value in values}
    # Numbers and booleans keep their dtype; everything else is an object.
    return np.array(column.tolist()) if kinds in ({bool}, {int}, {float}) else column
