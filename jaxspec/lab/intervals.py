"""Confidence intervals over prompts or requests, by one method everywhere.

Prompts differ far more than what is compared on them, and the rounds of one are alike. So a prompt
is one observation of several rounds, a *cluster*, and whole clusters are drawn with replacement.

Interval: a studentised bootstrap (Hall 1988). In every draw the estimate's distance from that of
the data is divided by its own standard error, that of a linearised ratio (Cochran 1977, section
6.5); the quantiles of these, times the standard error of the data, are the distances of the two
ends. Percentiles of the draws themselves would be too short where there are few clusters.
They are taken for what is fitted to the means of many prompts and a few seeds only (`resample`).

Estimators of a ratio, such as tokens per round: *pooled*, all tokens over all rounds, and *per
prompt*, the mean over prompts of each one's own ratio.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

CONFIDENCE = 0.95
FEWEST = 5  # clusters that have an interval
NUM_DRAWS = 2000  # at least
ENDS = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its confidence interval.

    Attributes:
      value: the estimate.
      low: lower end of the `CONFIDENCE` interval; NaN where there is none, for fewer than `FEWEST`
        clusters, and where all of them, or all but a few, are equal.
      high: upper end, likewise.
      num_clusters: number of prompts or requests.
      points: where there is no interval for want of clusters, each one's own value.
    """

    value: float
    low: float = float("nan")
    high: float = float("nan")
    num_clusters: int
    points: tuple[float, ...] = ()

    def __format__(self, spec: str) -> str:
        """E.g. `1.41 (1.32, 1.52)`; without an interval `1.41 [1.20 1.62]`, the points, or
        `1.00 (=)` where they are equal."""
        if self.points:
            return f"{self.value:{spec}} [{' '.join(f'{own:{spec}}' for own in self.points)}]"
        if np.isnan(self.low):
            return f"{self.value:{spec}}" + " (=)" * bool(self.num_clusters)
        return f"{self.value:{spec}} ({self.low:{spec}}, {self.high:{spec}})"

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values; an unknown end is null."""
        fields = dataclasses.asdict(self) | {"points": list(self.points)}
        return {name: None if value != value else value for name, value in fields.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Interval:
        """The interval of a document."""
        unknown: Any = float("nan")
        return cls(**{name: unknown if each is None else each for name, each in fields.items()})


def ratio_interval(
    totals: Any,
    counts: Any = None,
    *,
    minus: tuple[Any, Any] | None = None,
    within: tuple[float, float] = (-np.inf, np.inf),
) -> Interval:
    """The interval of a ratio of two sums over clusters, or of the difference of two such ratios.

    Args:
      totals: `[C]` numbers, e.g. the tokens of each prompt.
      counts: `[C]` numbers above 0, e.g. its rounds. Default 1, for the mean of `totals`.
      minus: totals and counts, of the same clusters, of a ratio that is subtracted.
      within: the possible range, which the interval does not leave.
    """
    totals = np.asarray(totals, np.float64)
    num = len(totals)
    given = [(totals, np.ones(num) if counts is None else counts), *([minus] if minus else [])]
    ratios = [tuple(np.asarray(one, np.float64) for one in pair) for pair in given]
    own = functools.reduce(np.subtract, [total / count for total, count in ratios])
    if num == 0:
        return Interval(value=float("nan"), num_clusters=0)
    value, error = _estimate(np.ones(num), ratios)
    found = Interval(value=float(value), num_clusters=num)
    if num < FEWEST:
        return dataclasses.replace(found, points=tuple(own.tolist()))
    nothing = 1e-9 * max(np.max(np.abs(total / count)) for total, count in ratios)
    if error <= nothing:
        return found
    drawn, errors = _estimate(_draws(num), ratios)
    change = np.where(np.abs(drawn - value) <= nothing, 0.0, drawn - value)
    # A draw of equal clusters has no error of its own, so its distance has no bound.
    distances = np.where(change == 0, 0.0, np.copysign(np.inf, change))
    np.divide(change, errors, out=distances, where=errors > nothing)
    low, high = np.quantile(distances, ENDS, method="inverted_cdf")
    if not np.isfinite([low, high]).all():
        return found
    low, high = max(value - high * error, within[0]), min(value - low * error, within[1])
    return dataclasses.replace(found, low=float(low), high=float(high))


def clustered_interval(
    values: Any, clusters: Any, *, within: tuple[float, float] = (-np.inf, np.inf)
) -> Interval:
    """The mean of `values` `[n]`, numbers or bools, and its interval if those of one cluster are
    alike; `clusters` `[n]` are labels, e.g. request ids."""
    values = np.asarray(values, np.float64)
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    return ratio_interval(np.bincount(cluster, weights=values), np.bincount(cluster), within=within)


def _estimate(weights: np.ndarray, ratios: Any) -> tuple[Any, Any]:
    """The estimate and its standard error if clusters are counted as often as `weights`
    `[..., C]` say."""
    num, value, residuals = weights.shape[-1], 0.0, 0.0
    for sign, (totals, counts) in zip((1, -1), ratios, strict=False):
        size = weights @ counts
        ratio = weights @ totals / size
        value = value + sign * ratio
        residuals = residuals + sign * (totals - ratio[..., None] * counts) / size[..., None]
    return value, np.sqrt(num / max(num - 1, 1) * np.sum(weights * residuals**2, axis=-1))


@functools.lru_cache(maxsize=4)
def _draws(num: int) -> np.ndarray:
    """`[draws, num]`: how often each cluster is drawn; the same at every call, so that of few
    clusters there are more draws, whose own error would stay."""
    random, num_draws = np.random.default_rng(0), max(NUM_DRAWS, 100_000 // num)
    return random.multinomial(num, np.full(num, 1.0 / num), num_draws).astype(np.float64)


def resample(values: np.ndarray, *, num_draws: int, random: np.random.Generator) -> np.ndarray:
    """Means over prompts and seeds: those of the study itself, and those of its draws, which all
    points of a curve share.

    The intervals of scaling studies are percentiles of what is fitted to these draws (a percentile
    bootstrap). They are not studentised: prompts and seeds are crossed, so no draw has a standard
    error of its own that one set of clusters would give, and the variance of three seeds is no
    scale; nor has the exponent of a saturating curve a linearised error. With tens of prompts and
    seeds that differ less than they do, the intervals hold what they say (tests simulate it).

    Whole prompts are drawn, and whole seeds; what both draws change is added up. Of n prompts or
    seeds n - 1 are drawn: the mean of n - 1 varies as much as the mean of n truly does, whereas
    draws of n have (n - 1) / n of that variance (Rao and Wu 1988). The intervals of three seeds
    that differ more than the prompts are still too short: they end at the lowest and the highest.

    Args:
      values: `[n, S, P]` float64, of n points by seed and prompt; at least `FEWEST` prompts. One
        seed alone is kept in every draw.
      num_draws: number of draws.
      random: where they come from.

    Returns:
      `[1 + num_draws, n]` float64; the first row has the means of all prompts and seeds.
    """
    _, num_seeds, num_prompts = values.shape

    def shares(num: int) -> np.ndarray:
        return random.multinomial(num - 1, np.full(num, 1.0 / num), num_draws) / (num - 1)

    means = values.mean(axis=(1, 2))
    drawn = shares(num_prompts) @ values.mean(axis=1).T
    if num_seeds > 1:
        drawn += shares(num_seeds) @ values.mean(axis=2).T - means
    return np.concatenate([means[None], drawn])
