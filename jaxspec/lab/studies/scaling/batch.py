"""The batch axis: which draft length pays, from acceptance measured once and times per batch size.

A request's tau does not depend on the batch here; the time of a round does. The best draft length
is the one of the most tokens per second, `argmax_n E(n) / t(B, n)`, with E(n) measured, and t(B, n)
measured and predicted by the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.lab.cost.devices import Device, Fit, fit_device
from jaxspec.lab.cost.model import Pair
from jaxspec.lab.cost.passes import Pass
from jaxspec.lab.intervals import ENDS, resample
from jaxspec.lab.studies.scaling.estimators import as_numbers, cumulative_by_prompt
from jaxspec.lab.studies.scaling.fits import least_squares

if TYPE_CHECKING:
    import pandas

    from jaxspec.models.config import ModelConfig

NEEDED = ("drafter", "batch", "draft_length", "plain_s", "round_s")
PREDICTED = ("predicted_plain_s", "predicted_round_s")
LOAD = ("load_average", "cpu_count")  # where they are known
CONTEXT = 128.0  # live slots per row, of times without a column `context`


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
    for name in (*NEEDED[1:], *(name for name in PREDICTED if name in times)):
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
    """Best draft length by batch size of one drafter, measured and predicted, as JSON values.

    Args:
      rows: of `estimate`, of that drafter at one token count and of one way of decoding.
      times: of `check_times`, of that drafter; with the columns of `predict_times` the cost model's
        draft lengths too.
      num_draws: of the bootstrap over prompts and seeds.
      random: of its draws.
    """
    emitted, num_prompts = _emitted(rows, num_draws, random)
    has_predictions = all(name in times for name in PREDICTED)
    names = ["plain_s", "round_s", *(PREDICTED if has_predictions else ())]
    cells: Any = times.groupby(["batch", "draft_length"])[names].median()
    found, best, drawn_best = [], [], []
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
            "is_clipped": width in (0, max(own)),
            "choices": [
                {"draft_length": int(n), "emitted": float(e), "round_s": float(s),
                 "tokens_per_s": float(rate)}
                for n, e, s, rate in zip(own, emitted[0, own], seconds, rates, strict=True)
            ],
        }  # fmt: skip
        if has_predictions:
            cell |= _predicted(cell, of_batch)
        if all(name in times and times[name].notna().all() for name in LOAD):
            busiest = times[times.batch == batch][list(LOAD)].max()
            cell |= {
                "load_average": float(busiest.load_average),
                "cpu_count": int(busiest.cpu_count),
            }
        found.append(cell)
        best.append(width)
        drawn_best.append(draws[1:])
    return {
        "drafter": str(rows.drafter.iloc[0]),
        "training_tokens": int(rows.training_tokens.iloc[0]),
        "num_prompts": num_prompts,
        "batches": found,
        "falls": _direction(best),
        "fit": _fit_width(found, np.array(drawn_best)),
        "prediction": _errors(found) if has_predictions else None,
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


def _predicted(cell: dict[str, Any], of_batch: Any) -> dict[str, Any]:
    """Adds the cost model's times to the choices of a cell; the draft length that it would take."""
    plain, of_rounds = of_batch.predicted_plain_s.median(), of_batch.predicted_round_s
    for choice in cell["choices"]:
        seconds = float(of_rounds[choice["draft_length"]] if choice["draft_length"] else plain)
        choice["predicted_round_s"] = seconds
        choice["predicted_tokens_per_s"] = cell["batch"] * choice["emitted"] / seconds
    predicted = np.array([choice["predicted_tokens_per_s"] for choice in cell["choices"]])
    taken = cell["choices"][int(np.argmax(predicted))]
    highest = max(choice["tokens_per_s"] for choice in cell["choices"])
    return {
        "predicted_best": taken["draft_length"],
        "lost_by_prediction": 1.0 - taken["tokens_per_s"] / highest,
    }


def _errors(cells: Sequence[dict[str, Any]]) -> dict[str, float | int]:
    choices = [choice for cell in cells for choice in cell["choices"]]
    errors = [abs(each["predicted_round_s"] / each["round_s"] - 1.0) for each in choices]
    return {
        "round_error_median": float(np.median(errors)),
        "round_error_worst": float(max(errors)),
        "num_same_best": sum(cell["predicted_best"] == cell["best"] for cell in cells),
        "num_batches": len(cells),
        "worst_loss": max(cell["lost_by_prediction"] for cell in cells),
    }


def _direction(best: Sequence[int]) -> bool:
    """Whether the best length never grows with the batch, and shrinks somewhere."""
    return bool(np.all(np.diff(best) <= 0) and best[-1] < best[0])


def _fit_width(cells: Sequence[dict[str, Any]], drawn: np.ndarray) -> dict[str, Any] | None:
    """log2 of the best length over log2 of the batch, where it is neither 0 nor the longest."""
    is_free = np.array([not cell["is_clipped"] for cell in cells])
    if is_free.sum() < 3:
        return None
    batches = np.array([cell["batch"] for cell in cells], np.float64)[is_free]
    best = np.array([cell["best"] for cell in cells], np.float64)[is_free]
    design = np.stack([np.ones(len(batches)), np.log2(batches)], axis=-1)
    solve = least_squares(design, np.ones(len(batches)))
    intercept, slope = solve @ np.log2(best)
    slopes = np.log2(np.maximum(drawn[is_free].T, 1)) @ solve[1]
    low, high = np.quantile(slopes, (0.025, 0.975))
    return {
        "formula": "log2 n* = a + b log2 B",
        "a": float(intercept),
        "b": float(slope),
        "b_low": float(low),
        "b_high": float(high),
        "num_batches": int(is_free.sum()),
    }


def predict_times(times: pandas.DataFrame, pair: Pair) -> pandas.DataFrame:
    """The times with columns `predicted_plain_s` and `predicted_round_s` by the cost model.

    Args:
      times: of the drafter of `pair`; a column `context` has the live slots per row.
      pair: target and drafter on a device.
    """
    plain, rounds = [], []
    for row in times.to_dict("records"):
        where = {"batch": int(row["batch"]), "context": row.get("context", CONTEXT)}
        plain.append(pair.plain_s(**where))
        rounds.append(pair.round_s(draft_length=int(row["draft_length"]), **where))
    return times.assign(predicted_plain_s=plain, predicted_round_s=rounds)


def fit_pair(
    times: pandas.DataFrame,
    target: ModelConfig,
    draft: ModelConfig,
    *,
    most_bytes_per_s: float,
    most_flops_per_s: float,
    itemsize: int = 4,
    block: int | None = None,
) -> tuple[Pair, dict[str, Fit]]:
    """The cost model fitted to the stages of a study's rounds, a third of them held out.

    A draft step is taken to last the draft stage over its steps.

    Args:
      times: with columns `target_s` and `draft_s`, seconds of the two stages of a round, and
        perhaps `context`, the live slots per row.
      target: architecture of the target.
      draft: architecture of the draft model.
      most_bytes_per_s: measured ceiling of the bandwidth (`bench.roofline.measure_ceilings`).
      most_flops_per_s: measured ceiling of the rate of products.
      itemsize: bytes of a parameter.
      block: see `Pass`.

    Returns:
      the pair, and the fits of `target` and `draft`.

    Raises:
      SettingError: fewer than 6 cells, or a column is missing.
    """
    missing = [name for name in ("target_s", "draft_s") if name not in times]
    if missing:
        raise SettingError(
            f"The times lack the column {missing[0]!r}; measure the stages of a round to fit a "
            "cost model."
        )
    passes: dict[str, list[tuple[Pass, float]]] = {"target": [], "draft": []}
    for row in times.to_dict("records"):
        live, length = row.get("context", CONTEXT), int(row["draft_length"])
        of = {"batch": int(row["batch"]), "itemsize": itemsize, "block": block}
        scored = Pass(config=target, window=length + 1, context=live + length + 1, **of)
        step = Pass(config=draft, window=1, context=live + 1, **of)
        passes["target"].append((scored, row["target_s"]))
        passes["draft"].append((step, row["draft_s"] / length))
    rest = times.round_s - times.target_s - times.draft_s
    fits = {
        name: fit_device(
            measured,
            name=f"the {name} of this study",
            source="fitted to the stages of its rounds",
            most_bytes_per_s=most_bytes_per_s,
            most_flops_per_s=most_flops_per_s,
            round_s=max(float(rest.median()), 0.0) if name == "target" else 0.0,
        )
        for name, measured in passes.items()
    }
    devices: dict[str, Device] = {name: fit.device for name, fit in fits.items()}
    pair = Pair(
        target=target,
        target_device=devices["target"],
        draft=draft,
        draft_device=devices["draft"],
        itemsize=itemsize,
        block=block,
    )
    return pair, fits
