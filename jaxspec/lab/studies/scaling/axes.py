"""One axis of a study: what a drafter gains from more tokens, layers or parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.lab.studies.scaling.estimators import (
    OPTIONAL,
    cumulative_acceptance,
    estimates_at,
    groups,
    select,
)
from jaxspec.lab.studies.scaling.fits import (
    Form,
    LogPolynomial,
    RejectionPower,
    Resampled,
    Saturating,
    aicc,
    hc3_errors,
    json_params,
    least_squares,
    resample,
    weights_of,
)
from jaxspec.lab.studies.scaling.gates import MOST_ALL_ACCEPTED, check_gates, word_for

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
LINE, CURVE = LogPolynomial(1), LogPolynomial(2)


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
    resamples_all: bool,
    with_band: bool = True,
) -> dict[str, Any]:
    """Points, fits, held-out errors and gates of an axis, as JSON values.

    Args:
      axis: of at least `FEWEST_POINTS` points.
      num_draws: of the bootstrap.
      random: of its draws.
      decades_beyond: the largest point, where the fits are extrapolated to.
      response: `tau`, `logit`, or `auto`: tau unless the chain is saturated.
      resamples_all: whether the other curves than the log-linear one get intervals too.
      with_band: whether the log-linear curve gets its intervals between the points.
    """
    rows, column = axis.rows, axis.column
    longest = int(rows.draft_length.iloc[0])
    all_accepted = _at_largest(rows, column)
    if response == "auto":
        response = "logit" if all_accepted >= MOST_ALL_ACCEPTED else "tau"
    values, x, seeds, notes = estimates_at(rows, column, "tau" if response == "tau" else "rate")
    draws = resample(values, num_draws=num_draws, random=random)
    weights = weights_of(values)
    if response == "logit":
        weights = weights * (draws.means * (1.0 - draws.means)) ** 2
        weights, draws = weights / weights.mean(), draws.map(_logit)
    forms: list[Form] = [LINE]
    if len(x) >= 4:
        forms += [Saturating(), RejectionPower(longest, is_logit=response == "logit")]
    beyond = np.array([x[-1] * 10.0**decades_beyond])
    fits = [
        _fit(form, x, draws, weights, beyond, with_intervals=form is LINE or resamples_all)
        for form in forms
    ]
    curvature = None
    if len(x) >= 4:
        curvature = draws.interval(lambda means: CURVE.fit(x, means, weights)[..., 2])
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
    slope = draws.interval(lambda means: LINE.fit(x, means, weights)[..., 1])
    if len(seeds) == 1:
        notes.append(
            f"There is one seed ({seeds[0]}), so the intervals cover differences between prompts, "
            "but not between training runs; train at least 3."
        )
    word = word_for(gates)
    residuals = draws.means - LINE.predict(LINE.fit(x, draws.means, weights), x)
    return {
        "axis": axis.name,
        "fixed": axis.fixed,
        "title": axis.title,
        "response": response,
        "num_prompts": draws.num_prompts,
        "seeds": [int(seed) for seed in seeds],
        "points": _points(rows, column, x, draws),
        "slope_per_decade": slope.to_json(),
        "direction": "flat" if slope.holds_zero else "grows" if slope.value > 0 else "falls",
        "curvature": curvature and curvature.to_json(),
        "fits": fits,
        "weights": weights.tolist(),
        "residuals": residuals.tolist(),
        "band": _band(draws, x, weights, beyond) if with_band else None,
        "tv_acceptance": _tv_acceptance(rows, column),
        "gates": [gate.to_json() for gate in gates],
        "word": word,
        "sentence": _sentence(axis, slope, word, gates, response),
        "notes": notes,
    }


def _logit(share: np.ndarray) -> np.ndarray:
    share = np.clip(share, 1e-6, 1.0 - 1e-6)
    return np.log(share) - np.log1p(-share)


def _at_largest(rows: pandas.DataFrame, column: str) -> float:
    """The chance that a whole draft is accepted, at the largest point."""
    largest = select(rows, rows[column] == rows[column].max())
    return float(cumulative_acceptance(largest)[-1])


def _fit(
    form: Form,
    x: np.ndarray,
    draws: Resampled,
    weights: np.ndarray,
    beyond: np.ndarray,
    *,
    with_intervals: bool,
) -> dict[str, Any]:
    """A form fitted to all points and to all but the largest."""
    params = form.fit(x, draws.means, weights)
    residuals = draws.means - form.predict(params, x)
    found = {
        "form": form.name,
        "formula": form.formula,
        "params": json_params(form, params),
        "aicc": aicc(residuals, weights, len(params)),
        "rms_residual": float(np.sqrt(np.mean(residuals**2))),
        "r_squared": _r_squared(draws.means, residuals, weights),
    }
    if isinstance(form, LogPolynomial):
        errors = hc3_errors(form.design(x), draws.means, weights)
        found["hc3_errors"] = json_params(form, errors)
    all_points = draws.map(lambda means: form.predict(form.fit(x, means, weights), beyond))
    found["extrapolated"] = {"x": float(beyond[0]), "value": float(all_points.means[0])}
    if with_intervals:
        fitted = draws.map(lambda means: form.fit(x, means, weights))
        found["intervals"] = {
            name: fitted.interval(lambda of, index=index: of[..., index]).to_json()
            for index, name in enumerate(form.param_names)
        }
        found["extrapolated"] |= all_points.interval(lambda of: of[..., 0]).to_json()
    found["held_out"] = None
    if len(x) > len(params):
        found["held_out"] = _held_out(form, x, draws, weights, with_intervals=with_intervals)
    return found


def _held_out(
    form: Form, x: np.ndarray, draws: Resampled, weights: np.ndarray, *, with_intervals: bool
) -> dict[str, Any]:
    """The largest point, predicted from the others. Prompts and seeds that are easy are so at all
    points, so it is the error that is resampled."""

    def error(means: np.ndarray) -> np.ndarray:
        params = form.fit(x[:-1], means[..., :-1], weights[:-1])
        return form.predict(params, x[-1:])[..., 0] - means[..., -1]

    observed = float(draws.means[-1])
    value = float(error(draws.means[None])[0])
    found = {"x": float(x[-1]), "observed": observed, "predicted": observed + value, "error": value}
    if with_intervals:
        interval = draws.interval(error)
        # The measured point is inside exactly if the error's interval holds 0.
        found |= {
            "low": observed + interval.low,
            "high": observed + interval.high,
        }
        found["is_inside"] = interval.holds_zero
    return found


def _r_squared(means: np.ndarray, residuals: np.ndarray, weights: np.ndarray) -> float | None:
    whole = np.sum(weights * (means - np.average(means, weights=weights)) ** 2)
    return float(1.0 - np.sum(weights * residuals**2) / whole) if whole > 0 else None


def _points(
    rows: pandas.DataFrame, column: str, x: np.ndarray, draws: Resampled
) -> list[dict[str, Any]]:
    names = ["tau", "emitted_per_round", "rate", *OPTIONAL]
    means: Any = rows.groupby(column)[[name for name in names if name in rows]].mean()
    found = []
    for index, at in enumerate(x):
        interval = draws.interval(lambda of, index=index: of[..., index])
        own = select(rows, rows[column] == at)
        found.append(
            {
                "x": float(at),
                "response": interval.to_json(),
                **{name: float(value) for name, value in means.loc[at].items() if value == value},
                "all_accepted": float(cumulative_acceptance(own)[-1]),
            }
        )
    return found


def _band(
    draws: Resampled, x: np.ndarray, weights: np.ndarray, beyond: np.ndarray
) -> dict[str, list[float]]:
    """The log-linear curve and its 95 % interval, from the smallest point on and beyond."""
    at = np.unique(np.concatenate([np.geomspace(x[0], beyond[0], 40), x]))
    curve = draws.map(lambda means: LINE.predict(LINE.fit(x, means, weights), at))
    found = [curve.interval(lambda of, index=index: of[..., index]) for index in range(len(at))]
    return {
        "x": at.tolist(),
        "value": [each.value for each in found],
        "low": [each.low for each in found],
        "high": [each.high for each in found],
    }


def _tv_acceptance(rows: pandas.DataFrame, column: str) -> dict[str, Any] | None:
    """The overlap sum(min(p, q)) on held-out text: its log-linear fit, and the power law of 1 - it.
    It has no prompts to resample, so HC3 errors are all there is."""
    if "overlap" not in rows or rows.overlap.isna().any():
        return None
    means = rows.groupby([column, "seed"]).overlap.mean().groupby(level=0).mean()
    x, shares = means.index.to_numpy(np.float64), means.to_numpy()
    if not ((shares > 0) & (shares < 1)).all():
        return None
    ones, design = np.ones(len(x)), LINE.design(x)
    rejected = np.log10(1.0 - shares)
    return {
        "x": x.tolist(),
        "overlap": shares.tolist(),
        "slope_per_decade": float((least_squares(design, ones) @ shares)[1]),
        "slope_hc3_error": float(hc3_errors(design, shares, ones)[1]),
        "rejected_exponent": float(-(least_squares(design, ones) @ rejected)[1]),
        "rejected_exponent_hc3_error": float(hc3_errors(design, rejected, ones)[1]),
    }


def _sentence(axis: Axis, slope: Any, word: str, gates: Sequence[Any], response: str) -> str:
    unit = "tokens per round" if response == "tau" else "logits of the rate"
    of = "training tokens" if axis.name == "tokens" else axis.name
    failing = [gate.name for gate in gates if not gate.passes]
    why = f" The gates that fail: {', '.join(failing)}." if failing else " All gates pass."
    return (
        f"{axis.fixed}: {slope.value:+.3f} {unit} for ten times the {of} "
        f"({slope.low:+.3f} to {slope.high:+.3f}): a {word}.{why}"
    )


def fit_joint(
    rows: pandas.DataFrame, *, num_draws: int, random: np.random.Generator
) -> dict[str, Any] | None:
    """tau = a + b log D + c log N + e log D log N over all drafters and token counts of one way of
    decoding, D in training tokens and N in parameters without the embedding, logarithms to base 10
    and centred; None of fewer than 3 of either."""
    if rows.training_tokens.nunique() < 3 or rows.num_params_without_embedding.nunique() < 3:
        return None
    columns = ["training_tokens", "num_params_without_embedding"]
    values, at, seeds, notes = estimates_at(rows, columns, "tau")
    logs = np.log10(at)
    centres = logs.mean(axis=0)
    d, n = (logs - centres).T
    design, weights = np.stack([np.ones(len(d)), d, n, d * n], axis=-1), weights_of(values)
    if len(d) < 6 or np.linalg.matrix_rank(design) < 4:
        return None
    solve = least_squares(design, weights)
    draws = resample(values, num_draws=num_draws, random=random).map(lambda means: means @ solve.T)
    means = values.mean(axis=(1, 2))
    errors = hc3_errors(design, means, weights)
    names = ("a", "b", "c", "e")
    # The largest token count of every drafter, predicted from the smaller ones.
    is_largest = d == d.max()
    smaller = least_squares(design[~is_largest], weights[~is_largest])
    held_out = design[is_largest] @ (smaller @ means[~is_largest]) - means[is_largest]
    return {
        "formula": "a + b log10(D / D0) + c log10(N / N0) + e log10(D / D0) log10(N / N0)",
        "D0": float(10.0 ** centres[0]),
        "N0": float(10.0 ** centres[1]),
        "num_points": len(d),
        "seeds": [int(seed) for seed in seeds],
        "params": {
            name: draws.interval(lambda of, index=index: of[..., index]).to_json()
            | {"hc3_error": float(errors[index])}
            for index, name in enumerate(names)
        },
        "rms_residual": float(np.sqrt(np.mean((means - design @ (solve @ means)) ** 2))),
        "held_out_rms_error": float(np.sqrt(np.mean(held_out**2))),
        "notes": notes,
    }
