"""One axis of a study: what a drafter gains from more tokens, layers or parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.lab.intervals import ENDS, resample
from jaxspec.lab.studies.scaling.estimators import (
    OPTIONAL,
    cumulative_acceptance,
    estimates_at,
    groups,
    select,
)
from jaxspec.lab.studies.scaling.fits import (
    Form,
    LogLinear,
    RejectionPower,
    Saturating,
    quadratic_term,
    weights_of,
)
from jaxspec.lab.studies.scaling.gates import MOST_ALL_ACCEPTED, check_gates, holds_zero

if TYPE_CHECKING:
    import pandas

# By the name of an axis, the column that its points differ in.
COLUMNS = {
    "tokens": "training_tokens",
    "layers": "num_layers",
    "width": "width",
    "parameters": "num_params_without_embedding",
}
FEWEST_POINTS = 3
LEAST_SHARE = 1e-6  # nearer to 0 or 1 a rate has no logit
LINE = LogLinear()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """Which rows make up an axis.

    Attributes:
      name: of `COLUMNS`.
      fixed: what is the same at all its points, in words.
      rows: of `estimate`, of one way of decoding.
    """

    name: str
    fixed: str
    rows: pandas.DataFrame

    @property
    def column(self) -> str:
        """That the points differ in."""
        return COLUMNS[self.name]

    @property
    def title(self) -> str:
        """E.g. `tokens, 2x128`."""
        return f"{self.name}, {self.fixed}"


def axes_of(rows: pandas.DataFrame) -> tuple[list[Axis], list[str]]:
    """The axes that rows of one way of decoding have, and sentences on those left out.

    Tokens: every drafter by itself; where some seeds were trained on fewer tokens, once with all
    points and the seeds that have them, and once with all seeds and the points they have. Layers:
    drafters of one width, at the most tokens that all of them were trained on. Width: drafters of
    as many layers. Parameters: all drafters.
    """
    found, notes = [], []
    for drafter in rows.drafter.unique():
        own = select(rows, rows.drafter == drafter)
        found.append(Axis(name="tokens", fixed=str(drafter), rows=own))
        seeds = own.groupby("training_tokens").seed.nunique()
        if seeds.min() < seeds.max():
            everywhere = own.training_tokens.isin(seeds.index[seeds == seeds.max()])
            fixed = f"{drafter}, where all seeds were trained"
            found.append(Axis(name="tokens", fixed=fixed, rows=select(own, everywhere)))
    for width, own in groups(rows, "width"):
        if own.num_layers.nunique() > 1:
            at, tokens = _at_most_tokens(own)
            fixed = f"width {int(width)}, {tokens:,} tokens"
            found.append(Axis(name="layers", fixed=fixed, rows=at))
    for layers, own in groups(rows, "num_layers"):
        if own.width.nunique() > 1:
            at, tokens = _at_most_tokens(own)
            fixed = f"{int(layers)} layers, {tokens:,} tokens"
            found.append(Axis(name="width", fixed=fixed, rows=at))
    if rows.width.nunique() > 1 and rows.num_params_without_embedding.nunique() > 1:
        at, tokens = _at_most_tokens(rows)
        found.append(Axis(name="parameters", fixed=f"{tokens:,} tokens", rows=at))
    kept = []
    for axis in found:
        num_points = axis.rows[axis.column].nunique()
        if num_points >= FEWEST_POINTS:
            kept.append(axis)
        elif num_points > 1:
            notes.append(
                f"{axis.title}: {num_points} points are too few for a fit, which takes "
                f"{FEWEST_POINTS}; 5 or more can pass the gates."
            )
    return kept, notes


def _at_most_tokens(rows: pandas.DataFrame) -> tuple[pandas.DataFrame, int]:
    counts = rows.groupby("training_tokens").drafter.nunique()
    tokens = int(counts.index[counts == counts.max()].max())
    return select(rows, rows.training_tokens == tokens), tokens


def fit_axis(
    axis: Axis,
    *,
    num_draws: int,
    random: np.random.Generator,
    decades_beyond: float,
    response: str,
    is_main: bool,
) -> dict[str, Any]:
    """Points, fits, held-out errors and gates of an axis, as JSON values.

    Args:
      axis: of at least `FEWEST_POINTS` points.
      num_draws: of the bootstrap.
      random: of its draws.
      decades_beyond: the largest point, where the fits are extrapolated to.
      response: `tau`, `logit`, or `auto`: tau unless the chain is saturated.
      is_main: whether other curves than the log-linear one are fitted too.
    """
    rows, column = axis.rows, axis.column
    highest: Any = rows[column].max()
    all_accepted = float(_cumulative_at(rows, column, highest)[-1])
    if response == "auto":
        response = "logit" if all_accepted >= MOST_ALL_ACCEPTED else "tau"
    values, x, seeds, notes = estimates_at(rows, column, "tau" if response == "tau" else "rate")
    drawn, weights = resample(values, num_draws=num_draws, random=random), weights_of(values)
    if response == "logit":
        shares = np.clip(drawn, LEAST_SHARE, 1.0 - LEAST_SHARE)
        weights = weights * (shares[0] * (1.0 - shares[0])) ** 2
        weights, drawn = weights / weights.mean(), np.log(shares) - np.log1p(-shares)
    forms: list[Form] = [LINE]
    if is_main and len(x) >= 4:
        longest = int(rows.draft_length.iloc[0])
        forms += [Saturating(), RejectionPower(longest, is_logit=response == "logit")]
    beyond = float(x[-1] * 10.0**decades_beyond)
    fits = [_fit(form, x, drawn, weights, beyond) for form in forms]
    slope = interval(LINE.fit(x, drawn, weights)[:, 1])
    curvature = interval(quadratic_term(x, drawn, weights)) if len(x) >= 4 else None
    gates = check_gates(
        num_points=len(x),
        decades=float(np.log10(x[-1] / x[0])),
        held_out=fits[0]["held_out"],
        curvature=curvature,
        all_accepted=all_accepted,
        response=response,
        num_seeds=len(seeds),
        decades_beyond=decades_beyond,
    )
    if len(seeds) == 1:
        notes.append(
            f"There is one seed ({seeds[0]}), so the intervals cover differences between prompts, "
            "but not between training runs; train at least 3."
        )
    failing = [gate["name"] for gate in gates if not gate["passes"]]
    word = "trend" if failing else "law"
    residuals = drawn[0] - LINE.predict(LINE.fit(x, drawn[0], weights), x)
    return {
        "axis": axis.name,
        "fixed": axis.fixed,
        "title": axis.title,
        "response": response,
        "num_prompts": values.shape[2],
        "seeds": [int(seed) for seed in seeds],
        "points": _points(rows, column, x, drawn),
        "slope_per_decade": slope,
        "curvature": curvature,
        "fits": fits,
        "weights": weights.tolist(),
        "residuals": residuals.tolist(),
        "band": _band(x, drawn, weights, beyond),
        "gates": gates,
        "word": word,
        "sentence": _sentence(axis, slope, word, failing, response),
        "notes": notes,
    }


def interval(drawn: np.ndarray) -> dict[str, float]:
    """A figure of a study and the percentiles of its draws `[1 + draws]`, as JSON values."""
    low, high = np.quantile(drawn[1:], ENDS).tolist()
    return {"value": float(drawn[0]), "low": low, "high": high}


def _cumulative_at(rows: pandas.DataFrame, column: str, x: Any) -> np.ndarray:
    """`[N]`: the chances at a point that each draft position and all before it are accepted."""
    return cumulative_acceptance(select(rows, rows[column] == x))


def _fit(
    form: Form, x: np.ndarray, drawn: np.ndarray, weights: np.ndarray, beyond: float
) -> dict[str, Any]:
    """A form fitted to all points and to all but the largest."""
    params = form.fit(x, drawn, weights)
    means, fitted = drawn[0], form.predict(params[0], x)
    residuals, off = means - fitted, means - np.average(means, weights=weights)
    whole = np.sum(weights * off**2)
    intervals = {name: interval(of) for name, of in zip(form.param_names, params.T, strict=True)}
    return {
        "form": form.name,
        "formula": form.formula,
        "params": {name: of["value"] for name, of in intervals.items()},
        "intervals": intervals,
        "rms_residual": float(np.sqrt(np.mean(residuals**2))),
        "r_squared": float(1.0 - np.sum(weights * residuals**2) / whole) if whole > 0 else None,
        "extrapolated": {"x": beyond, **interval(form.predict(params, np.array([beyond]))[:, 0])},
        "held_out": _held_out(form, x, drawn, weights) if len(x) > params.shape[1] else None,
    }


def _held_out(form: Form, x: np.ndarray, drawn: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    """The largest point, predicted from the others. Prompts and seeds that are easy are so at all
    points, so it is the error that is resampled."""
    params = form.fit(x[:-1], drawn[:, :-1], weights[:-1])
    error = interval(form.predict(params, x[-1:])[:, 0] - drawn[:, -1])
    observed = float(drawn[0, -1])
    return {
        "x": float(x[-1]),
        "observed": observed,
        "predicted": observed + error["value"],
        "error": error["value"],
        "low": observed + error["low"],
        "high": observed + error["high"],
        # The measured point is inside exactly if the error's interval holds 0.
        "is_inside": holds_zero(error),
    }


def _points(
    rows: pandas.DataFrame, column: str, x: np.ndarray, drawn: np.ndarray
) -> list[dict[str, Any]]:
    names = ["tau", "emitted_per_round", "rate", *OPTIONAL]
    means: Any = rows.groupby(column)[[name for name in names if name in rows]].mean()
    return [
        {
            "x": float(at),
            "response": interval(own),
            **{name: float(value) for name, value in means.loc[at].items() if value == value},
            "all_accepted": float(_cumulative_at(rows, column, at)[-1]),
        }
        for at, own in zip(x, drawn.T, strict=True)
    ]


def _band(
    x: np.ndarray, drawn: np.ndarray, weights: np.ndarray, beyond: float
) -> dict[str, list[float]]:
    """The log-linear curve and its interval, from the smallest point on and beyond."""
    at = np.unique(np.concatenate([np.geomspace(x[0], beyond, 40), x]))
    curves = LINE.predict(LINE.fit(x, drawn, weights), at)
    low, high = np.quantile(curves[1:], ENDS, axis=0).tolist()
    return {"x": at.tolist(), "value": curves[0].tolist(), "low": low, "high": high}


def _sentence(
    axis: Axis, slope: dict[str, float], word: str, failing: Sequence[str], response: str
) -> str:
    unit = "tokens per round" if response == "tau" else "logits of the rate"
    of = "training tokens" if axis.name == "tokens" else axis.name
    why = f" The gates that fail: {', '.join(failing)}." if failing else " All gates pass."
    return (
        f"{axis.fixed}: {slope['value']:+.3f} {unit} for ten times the {of} "
        f"({slope['low']:+.3f} to {slope['high']:+.3f}): a {word}.{why}"
    )
