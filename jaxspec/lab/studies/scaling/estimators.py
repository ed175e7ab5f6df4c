"""Per-prompt estimators of acceptance: tau, and acceptance by position.

The last round of an output is biased: it is truncated where the output ends, it has no rejection,
and long rounds are more likely to be last. Counting it shifts `emitted / rounds` by some per cent,
more the more a round emits, and so bends a curve over training. Tau and the acceptance by position
therefore exclude the last round of every prompt; `emitted_per_round` is the usual ratio. The rate
of single tokens needs no such care: nearly every token of an output was judged once, wherever the
output ends.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.lab.intervals import FEWEST
from jaxspec.runtime.extras import import_extra

if TYPE_CHECKING:
    import pandas

COUNTS = ("rounds", "emitted", "num_limited_rounds")
BY_POSITION = ("offered_at", "accepted_at")
DECODING = ("prompt_set", "verifier", "temperature", "draft_length")
DRAFTER = ("drafter", "num_params_without_embedding", "num_layers", "width", "training_tokens",
           "seed")  # fmt: skip
NEEDED = ("target", *DRAFTER, *DECODING, "prompt", *COUNTS, *BY_POSITION)
POSITIVE = ("training_tokens", "num_layers", "width", "num_params_without_embedding",
            "draft_length", "rounds")  # fmt: skip
NAMES = ("target", "drafter", "prompt_set", "prompt", "verifier")
ONE_ROW_PER = ("drafter", "training_tokens", "seed", *DECODING, "prompt")
OPTIONAL = ("held_out_loss", "overlap", "greedy_agreement")


def groups(rows: pandas.DataFrame, by: str | list[str]) -> Iterator[tuple[Any, pandas.DataFrame]]:
    """Values of the column or columns `by`, ascending, and the rows that have them."""
    yield from rows.groupby(by)


def select(rows: pandas.DataFrame, is_selected: Any) -> pandas.DataFrame:
    """The rows for which `is_selected` `[R]` is true."""
    selected: Any = rows[is_selected]
    return selected


def check_rows(rows: pandas.DataFrame) -> pandas.DataFrame:
    """The rows, numbered from 0, when their counts are possible.

    Raises:
      SettingError: a column is missing, there are no rows or rows of several targets, or a row
        holds NaN or counts that no decoding can have, or is there twice; the first such row is
        named.
    """
    missing = [name for name in NEEDED if name not in rows]
    if missing:
        raise SettingError(
            f"The rows lack the column {missing[0]!r}; a study needs {', '.join(NEEDED)}."
        )
    if not len(rows):
        raise SettingError("A table without rows was given; decode with at least one drafter.")
    rows = rows.reset_index(drop=True)
    for name in NAMES:
        _refuse(rows, rows[name].isna(), f"no {name}", "one")
    targets = sorted(map(str, rows.target.unique()))
    if len(targets) > 1:
        raise SettingError(
            f"The rows are of {len(targets)} targets ({', '.join(targets)}); acceptance under one "
            "says nothing of another, so analyse each by itself."
        )
    for name in (*POSITIVE, *COUNTS, "temperature", "seed"):
        values, given = as_numbers(rows, name), f"{name} {{{name}}}"
        least = 1 if name in POSITIVE else 0
        if name != "seed":
            _refuse(rows, ~(values >= least), given, f"at least {least}")
        _refuse(rows, ~np.isfinite(values), given, "a finite number")
        if name != "temperature":
            _refuse(rows, values % 1 != 0, given, "a whole number")
    for name in OPTIONAL:
        if name in rows:
            is_text = rows[name].notna() & np.isnan(as_numbers(rows, name))
            _refuse(rows, is_text, f"{name} {{{name}}}", "a number")
    given = "{num_limited_rounds} limited rounds"
    _refuse(rows, rows.num_limited_rounds > rows.rounds, given, "at most its {rounds} rounds")
    for name in BY_POSITION:
        is_other = rows[name].map(_length) != rows.draft_length
        _refuse(rows, is_other, f"{name} {{{name}}}", "a list of {draft_length} numbers")
    for length, own in groups(rows, "draft_length"):
        offered, accepted = (_by_position(own, name) for name in BY_POSITION)
        rounds, emitted = own.rounds.to_numpy(), own.emitted.to_numpy()
        shown, most = "accepted_at {accepted_at}", rounds + accepted.sum(axis=1)
        for name, counts in zip(BY_POSITION, (offered, accepted), strict=True):
            _refuse(own, ~(counts >= 0).all(axis=1), f"{name} {{{name}}}", "counts from 0 up")
        is_too_many = (accepted > offered).any(axis=1)
        _refuse(own, is_too_many, shown, "at most offered_at {offered_at}")
        does_grow = (np.diff(accepted, axis=1) > 0).any(axis=1)
        _refuse(own, does_grow, shown, "no more at a position than at the one before it")
        is_too_many = (offered > rounds[:, None]).any(axis=1)
        _refuse(own, is_too_many, "offered_at {offered_at}", "at most its {rounds} rounds")
        expected = "at most a token for each of {rounds} rounds and each accepted draft"
        _refuse(own, emitted > most, "{emitted} emitted tokens", expected)
        _refuse(own, emitted < 1, "{emitted} emitted tokens", "at least 1")
        if "last_emitted" in own:
            last = as_numbers(own, "last_emitted")
            is_possible = (last >= 1) & (last <= np.minimum(emitted, length + 1))
            expected = "from 1 up to its {emitted} emitted tokens and draft length + 1"
            _refuse(own, ~is_possible, "last_emitted {last_emitted}", expected)
        else:
            given = "an output that a stop token cut"
            _refuse(own, emitted < most, given, "a column last_emitted")
    expected = "one row per drafter, training tokens, seed, way of decoding and prompt"
    is_there_twice = rows.duplicated(list(ONE_ROW_PER))
    _refuse(rows, is_there_twice, "the same prompt as an earlier row", expected)
    return rows


def as_numbers(rows: pandas.DataFrame, name: str) -> np.ndarray:
    """`[R]` float64, a column; NaN where it holds something else than a number."""
    column = rows[name].map(lambda each: each if isinstance(each, numbers.Real) else np.nan)
    return column.to_numpy(np.float64)


def _refuse(rows: pandas.DataFrame, is_bad: Any, given: str, expected: str) -> None:
    is_bad = np.asarray(is_bad)
    if not is_bad.any():
        return
    at = int(np.argmax(is_bad))
    fields = {name: _shown(value) for name, value in rows.iloc[at].items()}
    where = f"drafter {fields['drafter']}, {fields['training_tokens']} tokens, seed "
    where += f"{fields['seed']}, prompt {fields['prompt']}"
    raise SettingError(
        f"Row {rows.index[at]} ({where}) has {given.format_map(fields)}, expected "
        f"{expected.format_map(fields)}; correct or drop it."
    )


def _length(value: Any) -> int:
    """Of a list of numbers, of which some may be missing; -1 of anything else."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return -1
    is_list = all(each is None or isinstance(each, numbers.Real) for each in value)
    return len(value) if is_list else -1


def _shown(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _by_position(rows: pandas.DataFrame, name: str) -> np.ndarray:
    """`[R, N]` float64, a list column of rows of one draft length."""
    return np.array([np.asarray(each, np.float64) for each in rows[name]])


def last_rounds(rows: pandas.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that the last round of each row emitted, and drafts that it accepted, `[R]` each, of
    rows of one draft length.

    Emitted tokens are the column `last_emitted` if there is one. Else outputs end by length, and
    drafts are as long as that allows: what every round was offered is what the last one was, and it
    accepted all of it, or the output would have gone on.
    """
    offered, accepted = (_by_position(rows, name) for name in BY_POSITION)
    rounds = rows.rounds.to_numpy()
    if "last_emitted" not in rows:
        num_accepted = (offered >= rounds[:, None]).sum(axis=1)
        return num_accepted + 1, num_accepted
    # A round emits a token of the target's own after the accepted ones, unless it is cut before.
    is_cut = rounds + accepted.sum(axis=1) - rows.emitted.to_numpy()
    emitted = rows.last_emitted.to_numpy()
    return emitted, emitted - 1 + is_cut


def estimate(rows: pandas.DataFrame) -> pandas.DataFrame:
    """The rows with what each says of its drafter.

    Columns added, where "without the last" means without the last round, unless it is the only one:
      emitted_per_round: emitted / rounds.
      tau: emitted / rounds without the last.
      rate: accepted / (accepted + rejected), the chance of a judged token to be accepted; rounds
        that the output's end cut short reject nothing. NaN if no token was judged.
      judged: `[N]` list, rounds without the last that judged each position.
      kept: `[N]` list, those that accepted it and all before it.

    Args:
      rows: of `check_rows`.
    """
    pd = import_extra("pandas", "a scaling study")
    parts = []
    for length, own in groups(rows, "draft_length"):
        offered, accepted = (_by_position(own, name) for name in BY_POSITION)
        rounds, emitted = own.rounds.to_numpy(), own.emitted.to_numpy()
        last_emitted, last_accepted = last_rounds(own)
        is_left_out = (rounds > 1).astype(int)
        depth = np.arange(length)
        is_kept_by_last = is_left_out[:, None] * (depth < last_accepted[:, None])
        kept = np.maximum(accepted - is_kept_by_last, 0)
        was_offered = is_left_out * (offered[:, 0] >= rounds)
        first = np.maximum(offered[:, 0] - was_offered, kept[:, 0])
        judged = np.concatenate([first[:, None], kept[:, :-1]], axis=1)
        num_accepted = accepted.sum(axis=1)
        num_rejected = rounds - own.num_limited_rounds.to_numpy() - accepted[:, -1]
        parts.append(
            own.assign(
                emitted_per_round=emitted / rounds,
                tau=(emitted - is_left_out * last_emitted) / (rounds - is_left_out),
                rate=_ratio(num_accepted, num_accepted + num_rejected),
                judged=list(judged),
                kept=list(kept),
            )
        )
    return pd.concat(parts).sort_index()


def cumulative_by_prompt(rows: pandas.DataFrame) -> np.ndarray:
    """`[R, N]`: shares of rounds that accepted each position and all before it, without the last
    rounds; 1 + their sum is tau.

    Args:
      rows: of `estimate`, of one draft length.
    """
    rounds = rows.rounds.to_numpy()
    return _by_position(rows, "kept") / (rounds - (rounds > 1))[:, None]


def cumulative_acceptance(rows: pandas.DataFrame) -> np.ndarray:
    """`[N]`, the mean over prompts of `cumulative_by_prompt`."""
    return cumulative_by_prompt(rows).mean(axis=0)


def acceptance_by_position(rows: pandas.DataFrame) -> list[dict[str, float | int | None]]:
    """Acceptance at each position: cumulative, the mean over prompts; conditional, over all judged
    tokens.

    Args:
      rows: of `estimate`, of one draft length.
    """
    judged, kept = (_by_position(rows, name).sum(axis=0) for name in ("judged", "kept"))
    return [
        {
            "position": index + 1,
            "judged": int(judged[index]),
            "accepted": int(kept[index]),
            "conditional": kept[index] / judged[index] if judged[index] else None,
            "cumulative": float(share),
        }
        for index, share in enumerate(cumulative_acceptance(rows))
    ]


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Part over whole; NaN of nothing."""
    return np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=np.asarray(whole) > 0)


def estimates_at(
    rows: pandas.DataFrame, points: str, column: str
) -> tuple[np.ndarray, np.ndarray, list[Any], list[str]]:
    """A column as an array over points, seeds and prompts, of those that are everywhere.

    Args:
      rows: of `estimate`, of one way of decoding.
      points: the column that tells the points apart.
      column: e.g. `tau`.

    Returns:
      `[n, S, P]` float64; values of the points, ascending, `[n]`; the seeds; and sentences about
      what was left out.

    Raises:
      SettingError: no seed, or fewer than five prompts, are at every point.
    """
    table = rows.pivot_table(
        index=points, columns=["seed", "prompt"], values=column, aggfunc="mean"
    )
    seeds = list(table.columns.unique(level="seed"))
    by_seed: dict[Any, Any] = {seed: table[seed] for seed in seeds}
    kept = [seed for seed in seeds if by_seed[seed].notna().any(axis=1).all()]
    notes = []
    if not kept:
        raise SettingError(
            f"No seed was trained at every {points}; train one at all of them, or leave out the "
            "points that lack it."
        )
    if len(kept) < len(seeds):
        left = ", ".join(str(seed) for seed in seeds if seed not in kept)
        notes.append(f"Left out, because not trained at every point: seeds {left}.")
    has_all: Any = sum(by_seed[seed].notna().all(axis=0) for seed in kept) == len(kept)
    prompts = list(has_all.index[has_all])
    if len(prompts) < FEWEST:
        raise SettingError(
            f"{len(prompts)} prompts were decoded at every {points}; use the same prompts "
            f"everywhere, at least {FEWEST}, because fewer have no interval."
        )
    if len(prompts) < len(has_all):
        notes.append(
            f"Left out, because not decoded at every point: {len(has_all) - len(prompts)} of "
            f"{len(has_all)} prompts."
        )
    values = [by_seed[seed][prompts].to_numpy(np.float64) for seed in kept]
    return np.stack(values, axis=1), table.index.to_numpy(np.float64), kept, notes
