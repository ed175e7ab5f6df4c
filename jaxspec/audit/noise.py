"""How far rounding moves the gap between two tokens, and how many ties it explains in a file.

Two correct programs differ by rounding only. Whether rounding can exchange two tokens depends on
the *change of the gap* between their logits, not on the largest change of any logit. The changes
are measured: outputs are scored again in their dtype by several programs (other kernels, other
widths, logits kept in fp32 or rounded to the dtype; `jaxspec.audit.scoring`), and the changes of
the gap between the two best tokens are pooled over contexts. Their median gives the scale s, which
a few large changes do not move.

*One token*: a margin of at most `BOUND_SCALES` s is a tie; by the changes that we measured, a
healthy file of 2,304 tokens has 0.04 to 0.07 beyond. *All tokens together*: a position whose two
best tokens are g apart exchanges them with probability P(|change| >= g) / 2, so the number of ties
that rounding explains is known, and `tie_tests` compares it with the number that was found: for
ties of any size, and for the larger ones alone.

Another engine sums in another order. Its changes are taken to be up to `OTHERS_FACTOR` times ours.
The factor is stated here, before any output is read, and is never fitted to one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import scipy.stats

from jaxspec.audit.scoring import Scorer
from jaxspec.requests.sampling_params import SamplingParams

BOUND_SCALES = 5.0  # a margin of so many s is a tie
OTHERS_FACTOR = 1.5  # by which the changes in another engine may exceed ours
TIE_ALPHA = 1e-3  # probability that a healthy file is said to have too many ties
TIE_SIZES = (0.0, 1.0, 2.0, 4.0)  # ties of at least so many s are counted, each size for itself
NUM_POSITIONS = 1024  # contexts whose changes are measured, if there are so many
TAIL_COUNT = 20  # changes beyond which the tail is fitted instead of counted
# Of the absolute value of a standard normal variable.
NORMAL_MEDIAN, NORMAL_90 = scipy.stats.norm.ppf((0.75, 0.95))


@dataclasses.dataclass(frozen=True)
class GapNoise:
    """The distribution of the changes that rounding makes to the gap between two tokens.

    Attributes:
      changes: `[n]` fp64, absolute changes in ascending order, at least one.
      dispersion: variance of the number of exchanged positions in an output, over the variance if
        positions were independent; at least 1.
    """

    changes: np.ndarray
    dispersion: float = 1.0

    @classmethod
    def of(cls, changes: Sequence[float] | np.ndarray) -> GapNoise:
        """From changes of either sign; of none, no change is possible."""
        absolute = np.abs(np.asarray(changes, np.float64))
        return cls(np.sort(absolute if len(absolute) else np.zeros(1)))

    @property
    def scale(self) -> float:
        """s: the median change, over that of a standard normal variable. If most changes are 0, the
        same of the 90 % quantile."""
        median, high = np.quantile(self.changes, (0.5, 0.9))
        return float(median / NORMAL_MEDIAN if median > 0 else high / NORMAL_90)

    @property
    def bound(self) -> float:
        """The largest margin of a tie."""
        return BOUND_SCALES * self.scale

    def exceeds(self, gaps: np.ndarray) -> np.ndarray:
        """P(|change| >= gap) for gaps `[...]`: counted where at least `TAIL_COUNT` changes are
        larger, and beyond that an exponential tail with the mean of those excesses."""
        n = len(self.changes)
        first = max(n - TAIL_COUNT, 0)
        start = self.changes[first - 1] if first > 0 else 0.0
        counted = (n - np.searchsorted(self.changes, gaps, side="left") + 1) / (n + 1)
        excess = np.mean(self.changes[first:] - start)
        if excess <= 0:
            return np.where(gaps > start, 0.0, counted)
        tail = (n - first + 1) / (n + 1) * np.exp(-np.maximum(gaps - start, 0) / excess)
        return np.where(gaps > start, tail, counted)

    def flips(self, gaps: np.ndarray, *, factor: float = 1.0) -> np.ndarray:
        """The probability that rounding exchanges the two best tokens, for gaps `[...]`, in an
        engine whose changes are `factor` times these."""
        return self.exceeds(np.asarray(gaps, np.float64) / factor) / 2

    def to_json(self) -> dict[str, Any]:
        """Its figures."""
        quantiles = (0.5, 0.9, 0.99)
        return {
            "num_changes": len(self.changes),
            "scale": self.scale,
            "bound": self.bound,
            "quantiles": {f"{q:g}": float(np.quantile(self.changes, q)) for q in quantiles},
            "largest": float(self.changes[-1]),
            "dispersion": self.dispersion,
        }


def measure_noise(
    scorer: Scorer, outputs: Iterable[tuple[Sequence[int], Sequence[int], SamplingParams]]
) -> GapNoise:
    """The noise of outputs, measured on about `NUM_POSITIONS` of their contexts.

    Args:
      scorer: of the target, in the dtype of the outputs.
      outputs: prompt, output and sampling parameters of each; ids are of the vocabulary. Which of
        them are measured does not depend on what is found in them.
    """
    distinct = list({(tuple(p), tuple(o)): (p, o, params) for p, o, params in outputs}.values())
    known: set[int] = set()
    gaps, changes = [], []
    for index in np.random.default_rng(0).permutation(len(distinct)):
        prompt, output, params = distinct[index]
        is_new = np.array([context not in known for context in contexts(prompt, output)], bool)
        if not np.any(is_new):
            continue
        known.update(contexts(prompt, output))
        segments = list(scorer.segments(prompt, output, params, measures_noise=True))
        gap = np.concatenate([one.gap for one in segments])
        change = np.concatenate([one.gap_changes for one in segments], axis=1)
        is_pair = is_new & np.isfinite(gap)
        gaps.append(gap[is_pair])
        changes.append(change[:, is_pair])
        if len(known) >= NUM_POSITIONS:
            break
    pooled = GapNoise.of(np.concatenate([np.zeros(0), *(change.ravel() for change in changes)]))
    expected = [pooled.flips(gap) for gap in gaps]
    counts = [np.sum(-change >= gap, axis=1) for gap, change in zip(gaps, changes, strict=True)]
    excess = sum(np.sum((n - p.sum()) ** 2) for n, p in zip(counts, expected, strict=True))
    variance = sum(len(n) * np.sum(p * (1 - p)) for n, p in zip(counts, expected, strict=True))
    dispersion = float(excess / variance) if variance > 0 else 1.0
    return dataclasses.replace(pooled, dispersion=max(dispersion, 1.0))


def contexts(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[int]:
    """A number for the context of each token of an output, the same for equal contexts."""
    context, found = hash(tuple(prompt_ids)), []
    for token in output_ids:
        found.append(context)
        context = hash((context, token))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TieTest:
    """The number of ties of some size, against the number that rounding explains.

    Attributes:
      at_least: gap of these ties, in logits.
      expected: their mean number in a healthy file, by the distribution of changes.
      observed: their number.
      p_value: probability of so many or more in a healthy file.
    """

    at_least: float
    expected: float
    observed: int
    p_value: float


def tie_tests(
    noise: GapNoise, gaps: np.ndarray, is_tie: np.ndarray, *, factor: float = OTHERS_FACTOR
) -> tuple[TieTest, ...]:
    """Tests whether a file has more ties than rounding explains, by their size.

    If positions were independent, the number of exchanged ones would be a sum of independent events
    of different probabilities (a Poisson binomial variable). They are not quite: errors in the KV
    are shared along an output. So the variance is taken to be `noise.dispersion` times as large,
    and the number to be negative binomial.

    Args:
      noise: of contexts like these.
      gaps: `[n]`, the gap between the two best tokens by the fp32 reference, for distinct contexts.
      is_tie: `[n]` bool, whether the output's token is not the best one there.
      factor: by which the changes of the file's engine may exceed those of `noise`.
    """
    probabilities = noise.flips(gaps, factor=factor)
    tests = []
    for size in TIE_SIZES:
        is_large = gaps >= size * noise.scale
        expected, observed = float(probabilities[is_large].sum()), int(is_tie[is_large].sum())
        tests.append(
            TieTest(
                at_least=size * noise.scale,
                expected=expected,
                observed=observed,
                p_value=_at_least(observed, expected, noise.dispersion),
            )
        )
    return tuple(tests)


def tie_p_value(tests: Sequence[TieTest]) -> float:
    """Of all sizes together (Bonferroni); NaN without tests."""
    return min(1.0, len(tests) * min(test.p_value for test in tests)) if tests else math.nan


def _at_least(observed: int, mean: float, dispersion: float) -> float:
    """The probability of so many or more."""
    if observed == 0:
        return 1.0
    if mean <= 0:
        return 0.0
    if dispersion <= 1 + 1e-9:
        return float(scipy.stats.poisson.sf(observed - 1, mean))
    # A negative binomial variable of parameters n and p has mean n (1 - p) / p, and variance
    # mean / p.
    p = 1 / dispersion
    return float(scipy.stats.nbinom.sf(observed - 1, mean * p / (1 - p), p))


def num_tokens_needed(
    noise: GapNoise, gaps: np.ndarray, share: float, *, power: float = 0.99
) -> int:
    """How many tokens it takes to find, with probability `power`, that this share of them is the
    second-best one, in contexts like these; by a normal approximation."""
    flips = noise.flips(gaps, factor=OTHERS_FACTOR)
    z, y = scipy.stats.norm.ppf((1 - TIE_ALPHA / len(TIE_SIZES), power))
    best = math.inf
    for size in TIE_SIZES:
        is_large = gaps >= size * noise.scale
        mean = noise.dispersion * float(np.sum(flips[is_large])) / len(gaps)
        planted = share * float(np.mean(is_large))
        if planted > 0:
            root = (z * math.sqrt(mean) + y * math.sqrt(mean + planted)) / planted
            best = min(best, max(root**2, 1 / planted))
    return math.ceil(best)
