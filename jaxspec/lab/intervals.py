"""Confidence intervals of means over prompts, and over training seeds where there are several.

Prompts differ far more than what is compared on them, and all points of a curve share their prompts
and seeds. So whole prompts are drawn with replacement, the same ones for every point (a cluster
bootstrap); so are whole seeds; and what both draws change is added up. The ends of an interval are
percentiles of the draws.

Of n prompts or seeds, n - 1 are drawn: the mean of n - 1 varies as much as the mean of n truly
does, whereas draws of n have (n - 1) / n of that variance (Rao and Wu 1988). The intervals of three
seeds that differ more than the prompts are still too short: they end at the lowest and the highest.
"""

from __future__ import annotations

import dataclasses

import numpy as np

CONFIDENCE = 0.95
NUM_DRAWS = 2000
ENDS = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over prompts and its confidence interval.

    Attributes:
      mean: over the prompts.
      low: lower end of the `CONFIDENCE` interval; NaN for a single prompt.
      high: upper end.
      num_prompts: number of prompts that the mean is taken over.
    """

    mean: float
    low: float
    high: float
    num_prompts: int

    def to_json(self) -> dict[str, float | int | None]:
        """Fields as JSON values; an unknown end is null."""
        fields = dataclasses.asdict(self)
        return {name: None if np.isnan(value) else value for name, value in fields.items()}


def mean_interval(values: np.ndarray, *, seed: int = 0) -> Interval:
    """The mean of `values` and its bootstrap interval.

    Args:
      values: `[num_prompts]` float64, at least one.
      seed: seed of the draws.
    """
    mean, low, high = float(np.mean(values)), float("nan"), float("nan")
    if len(values) > 1:
        drawn = resample(
            np.reshape(values, (1, 1, -1)), num_draws=NUM_DRAWS, random=np.random.default_rng(seed)
        )
        low, high = np.quantile(drawn[1:, 0], ENDS).tolist()
    return Interval(mean=mean, low=low, high=high, num_prompts=len(values))


def resample(values: np.ndarray, *, num_draws: int, random: np.random.Generator) -> np.ndarray:
    """Means over prompts and seeds: those of the study itself, and those of its draws.

    Args:
      values: `[n, S, P]` float64, of n points by seed and prompt; at least 2 prompts. A single seed
        is kept in every draw.
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
