"""pandas frames of the rounds and tokens that completions recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
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
        name: _joined([getattr(trace.rounds, name) for trace in traces], np.int32) for name in names
    }
    prompt = np.array([len(one.prompt_token_ids) for one in completions], np.int32)
    prompt = np.repeat(prompt, lengths)
    fields = {
        "round": _joined([np.arange(n, dtype=np.int32) for n in lengths], np.int32),
        "prompt_length": prompt,
        "output_position": fields["context_length"] - prompt,
        **fields,
    }
    return _frame(completions, lengths, fields, columns)


def tokens_frame(
    completions: Sequence[Any],
    columns: Mapping[str, Iterable[Any]],
    texts_of: Callable[[Sequence[int]], Sequence[str]] | None = None,
) -> pandas.DataFrame:
    """One row per drafted token and per token of the target's own, in order; see
    `Completions.tokens`. `texts_of` returns the text of each token."""
    parts = [
        _tokens_of(trace, len(one.prompt_token_ids))
        for one, trace in zip(completions, _traces(completions), strict=True)
    ]
    lengths = [len(part["node"]) for part in parts]
    fields = {
        name: _joined([part[name] for part in parts], dtype)
        for name, dtype in _TOKEN_COLUMNS.items()
        if name not in _DISTRIBUTION_COLUMNS or (parts and all(name in part for part in parts))
    }
    if texts_of is not None:
        fields |= token_texts(fields, texts_of)
    return _frame(completions, lengths, fields, columns)


def token_texts(
    frame: Any, texts_of: Callable[[Sequence[int]], Sequence[str]]
) -> dict[str, np.ndarray]:
    """The columns `token` and `target`: the texts of `token_id` and `target_token_id`."""
    names = {"token": "token_id", "target": "target_token_id"}
    ids = np.unique([np.asarray(frame[name]) for name in names.values()])
    texts = np.array(texts_of(ids.tolist()), object)
    return {name: texts[np.searchsorted(ids, frame[of])] for name, of in names.items()}


_DISTRIBUTION_COLUMNS = ("entropy_p", "entropy_q", "overlap")
_TOKEN_COLUMNS = {
    "round": np.int32,
    "kind": object,
    "node": np.int32,
    "parent": np.int32,
    "depth": np.int32,
    "position": np.int32,
    "output_position": np.int32,
    "token_id": np.int32,
    "target_token_id": np.int32,
    "logprob_p": np.float32,
    "logprob_q": np.float32,
    "rank": np.int32,
    "accepted": np.bool_,
    "emitted": np.bool_,
    "reached": np.bool_,
    **dict.fromkeys(_DISTRIBUTION_COLUMNS, np.float32),
}


def _tokens_of(trace: Trace, prompt_length: int) -> dict[str, np.ndarray]:
    """Columns of one request's tokens: of each round the drafted ones, then the target's own."""
    if trace.tokens is None:
        raise SettingError(
            "Tokens were asked for, and the trace holds rounds only; make the engine with "
            "trace='tokens'."
        )
    rounds = trace.rounds
    tokens, distributions = jax.tree.map(  # with the target's own token after the nodes
        lambda values: np.roll(values, -1, axis=1), (trace.tokens, trace.distributions)
    )
    drafted, kept, emitted, context_length = (
        np.asarray(values)[:, None]
        for values in (rounds.drafted, rounds.accepted, rounds.emitted, rounds.context_length)
    )
    num_rounds, num_nodes = np.shape(tokens.token_id[:, 1:])
    node = np.arange(num_nodes + 1, dtype=np.int32)[None]
    is_own = node == num_nodes
    is_there = np.where(is_own, emitted > kept, node < drafted)
    parent = np.where(is_there, tokens.parent, -1).astype(np.int32)
    depth, is_after_kept = np.ones_like(parent), np.ones_like(is_there)
    each = np.arange(num_rounds)
    for n in range(num_nodes + 1):  # parents come before children
        above = np.maximum(parent[:, n], 0)
        is_root = parent[:, n] < 0
        depth[:, n] = np.where(is_root, 1, depth[each, above] + 1)
        is_after_kept[:, n] = is_root | tokens.is_accepted[each, above]
    own_kind = np.where(drafted == 0, "plain", np.where(kept < drafted, "corrected", "bonus"))
    columns = {
        "round": each[:, None],
        "kind": np.where(is_own, own_kind, "drafted").astype(object),
        "node": np.where(is_own, -1, node),
        "parent": parent,
        "depth": depth,
        "position": context_length + depth - 1,
        "output_position": context_length + depth - 1 - prompt_length,
        "accepted": tokens.is_accepted,
        "emitted": tokens.is_accepted | is_own,
        # Tokens after the one that ended the output were never judged.
        "reached": is_after_kept & (depth <= emitted) & ~is_own,
    }
    for record in (tokens, distributions):
        columns = ({} if record is None else vars(record)) | columns
    return {
        name: np.broadcast_to(columns[name], is_there.shape)[is_there]
        for name in _TOKEN_COLUMNS
        if name in columns
    }


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
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise SettingError(
                f"The column {name!r} was given {values!r}; it is a list of values, one per prompt "
                "or per completion."
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
