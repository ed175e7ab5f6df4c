"""The batch axis: which draft length pays, from acceptance measured once and times per batch size.

A request's tau does not depend on the batch here; the time of a round does. The best draft length
is the one of the most tokens per second, `argmax_n E(n) / t(B, n)`, both measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.lab.intervals import ENDS, resample
from jaxspec.lab.studies.scaling.estimators import as_numbers, cumulative_by_prompt

if TYPE_CHECKING:
    import pandas

NEEDED = ("drafter", "batch", "draft_length", "plain_s", "round_s")
LOAD = ("load_average", "cpu_count")  # where they are known


def check_times(times: pandas.DataFrame, drafters: Sequence[str]) -> None:
    """Refuses times that cannot be used.

    Raises:
      SettingError: a column is missing, a time is not positive, or the drafter is not in the rows.
    """
    missing = [name for name in NEEDED if name not in times]
    if missing:
        raise SettingError(
            f"The times lack the column {missing[0]!r}; they need {', '.join(NEEDED)}."
        )
    for name in NEEDED[1:]:
        values = as_numbers(times, name)
        if (bad := ~((values > 0) & np.isfinite(values))).any():
            at = int(np.argmax(bad))
            raise SettingError(
                f"Row {times.index[at]} of the times has {name} {values[at]:g}, expected a finite "
                "number above 0; measure it again or drop it."
            )
    unknown = sorted(set(map(str, times.drafter)) - set(drafters))
    if unknown:
        raise SettingError(
            f"The times are of drafter {unknown[0]!r}, which the rows do not have (they have "
            f"{', '.join(drafters)}); give times of one of these."
        )


def best_widths(
    rows: pandas.DataFrame,
    times: pandas.DataFrame,
    *,
    num_draws: int,
    random: np.random.Generator,
) -> dict[str, Any]:
    """Best draft length by batch size of one drafter, as JSON values.

    Args:
      rows: of `estimate`, of that drafter at one token count and of one way of decoding.
      times: of `check_times`, of that drafter.
      num_draws: of the bootstrap over prompts and seeds.
      random: of its draws.
    """
    emitted, num_prompts = _emitted(rows, num_draws, random)
    cells: Any = times.groupby(["batch", "draft_length"])[["plain_s", "round_s"]].median()
    found, best = [], []
    for batch in sorted(int(size) for size in times.batch.unique()):
        of_batch = cells.loc[batch]
        own = np.array([0, *(int(n) for n in of_batch.index if n < emitted.shape[1])])
        plain, of_rounds = of_batch.plain_s.median(), of_batch.round_s
        seconds = np.array([plain if n == 0 else of_rounds[n] for n in own])
        drawn = batch * emitted[:, own] / seconds  # tokens per second
        draws, rates = own[np.argmax(drawn, axis=1)], drawn[0]
        width, (low, high) = int(draws[0]), np.quantile(draws[1:], ENDS, method="inverted_cdf")
        cell = {
            "batch": batch,
            "best": width,
            "low": int(low),
            "high": int(high),
            "speedup": float(rates.max() / rates[0]),
            "choices": [
                {"draft_length": int(n), "emitted": float(e), "round_s": float(s),
                 "tokens_per_s": float(rate)}
                for n, e, s, rate in zip(own, emitted[0, own], seconds, rates, strict=True)
            ],
        }  # fmt: skip
        if all(name in times and times[name].notna().all() for name in LOAD):
            busiest = times[times.batch == batch][list(LOAD)].max()
            cell |= {
                "load_average": float(busiest.load_average),
                "cpu_count": int(busiest.cpu_count),
            }
        found.append(cell)
        best.append(width)
    return {
        "drafter": str(rows.drafter.iloc[0]),
        "training_tokens": int(rows.training_tokens.iloc[0]),
        "num_prompts": num_prompts,
        "batches": found,
        # It never grows with the batch, and shrinks somewhere.
        "falls": bool(np.all(np.diff(best) <= 0) and best[-1] < best[0]),
    }


def _emitted(
    rows: pandas.DataFrame, num_draws: int, random: np.random.Generator
) -> tuple[np.ndarray, int]:
    """E(n), the tokens that a round with a draft of n = 0 to N emits, of the study and of its draws
    `[1 + num_draws, N + 1]`; and the number of prompts."""
    shares = cumulative_by_prompt(rows)
    frame = rows[["seed", "prompt"]].assign(row=np.arange(len(rows)))
    place = frame.pivot_table(index="seed", columns="prompt", values="row").dropna(axis=1)
    values = np.moveaxis(shares[place.to_numpy(int)], -1, 0)  # [N, S, P]
    drawn = resample(values, num_draws=num_draws, random=random)
    emitted = np.cumsum(np.pad(drawn, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    return emitted, values.shape[2]
