"""Whether samples of one prompt follow the target's distribution: Pearson's chi-square by position.

Samples with the same prefix are draws from one known distribution, so their next tokens are
compared with it: the first token of all samples, the second token of those that share the first,
and so on. Given the group sizes, these statistics are independent, so they and their degrees of
freedom are added up.

The distribution that is tested is fp32's, but the samples were drawn in another dtype, whose logits
differ by up to the measured noise n. Probabilities then differ by a factor of at most exp(2 n / T),
and the statistic is at most non-central chi-square, of non-centrality (samples) (n / T)^2. That is
the distribution used, so rounding is not taken for a bias however many samples there are.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.special
import scipy.stats

from jaxspec.audit.judge import Filters
from jaxspec.audit.scoring import Scorer
from jaxspec.requests.sampling_params import SamplingParams

ALPHA = 1e-3  # level of all chi-square tests of a file together
MIN_SAMPLES = 20  # smallest group worth testing
MIN_EXPECTED = 5.0  # in a cell; rarer tokens are pooled
NUM_POSITIONS = 3  # tested after the prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionTest:
    """The test of one prompt's samples.

    Attributes:
      num_samples: number of samples of the prompt.
      num_groups: number of tested groups of samples that share a prefix.
      statistic: sum of Pearson's statistics.
      degrees_of_freedom: those of all groups together.
      noncentrality: allowed for rounding.
      p_value: probability of a statistic at least this large if the samples follow the
        distribution; 0 if a token was drawn that the filters exclude by more than rounding.
    """

    num_samples: int
    num_groups: int
    statistic: float
    degrees_of_freedom: int
    noncentrality: float
    p_value: float


def test_distribution(
    scorer: Scorer,
    *,
    prompt_ids: Sequence[int],
    samples: Sequence[Sequence[int]],
    params: SamplingParams,
) -> DistributionTest | None:
    """Tests samples of one prompt, cut after the stop token and all drawn with `params`, against
    the target's distribution; None if there are too few. The scorer has the samples' dtype."""
    num_groups = degrees = 0
    statistic = noncentrality = 0.0
    is_excluded = False
    groups = collections.defaultdict(collections.Counter)  # how often each token followed a prefix
    for sample in samples:
        for position, token in enumerate(sample[:NUM_POSITIONS]):
            groups[tuple(sample[:position])][token] += 1
    for prefix, drawn in groups.items():
        num = drawn.total()
        if num < MIN_SAMPLES:
            continue
        distribution, noise, excluded = _distribution_after(
            scorer, prompt_ids, prefix, drawn, params
        )
        is_excluded |= excluded
        counts = np.bincount(list(drawn), list(drawn.values()), len(distribution))
        observed, expected = pooled(counts, distribution * num)
        if len(expected) > 1:
            num_groups += 1
            statistic += float(np.sum((observed - expected) ** 2 / expected))
            degrees += len(expected) - 1
            noncentrality += num * (noise / params.temperature) ** 2
    if num_groups == 0 and not is_excluded:
        return None
    p_value = float(scipy.stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    if noncentrality > 0 and degrees:
        p_value = max(p_value, float(scipy.stats.ncx2.sf(statistic, degrees, noncentrality)))
    return DistributionTest(
        num_samples=len(samples),
        num_groups=num_groups,
        statistic=statistic,
        degrees_of_freedom=degrees,
        noncentrality=noncentrality,
        p_value=0.0 if is_excluded else p_value,
    )


def _distribution_after(
    scorer: Scorer,
    prompt_ids: Sequence[int],
    prefix: tuple[int, ...],
    drawn: collections.Counter[int],
    params: SamplingParams,
) -> tuple[np.ndarray, float, bool]:
    """The distribution `[V]` after a prefix, the noise of its logits, and whether the filters
    exclude a drawn token by more than rounding."""
    output = [*prefix, next(iter(drawn))]
    *_, segment = scorer.segments(prompt_ids, output, params)
    logits, _ = segment.logits_at(len(prefix))
    noise = float(segment.noise[len(prefix) - segment.first])
    filters = Filters(logits, params)
    may, _ = filters.kept(0.0)
    distribution = scipy.special.softmax(np.where(may, logits / params.temperature, -np.inf))
    bound = 2 * (noise + scorer.rounding * float(np.max(np.abs(logits[np.isfinite(logits)]))))
    excluded = any(not may[token] and filters.distance(token) > bound for token in drawn)
    return distribution, noise, excluded


def pooled(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Observed and expected counts per cell, from those per token `[V]`; tokens expected less than
    `MIN_EXPECTED` times share one cell, which joins the rarest other one if it is too small."""
    is_common = expected >= MIN_EXPECTED
    rare = expected[~is_common].sum(), observed[~is_common].sum()
    expected, observed = expected[is_common], observed[is_common]
    if rare[0] >= MIN_EXPECTED or not len(expected):
        return np.append(observed, rare[1]), np.append(expected, rare[0])
    rarest = int(np.argmin(expected))
    expected[rarest] += rare[0]
    observed[rarest] += rare[1]
    return observed, expected


def combined_p_value(tests: Sequence[DistributionTest]) -> float:
    """The probability that the smallest p-value of these tests is as small as it is (Šidák)."""
    if not tests:
        return math.nan
    least = min(test.p_value for test in tests)
    return float(-np.expm1(len(tests) * np.log1p(-least))) if least < 1 else 1.0
