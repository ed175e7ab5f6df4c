"""Curves through the means of a study's points, and how far they can be trusted.

A curve is fitted to means over prompts by weighted least squares, weights 1 / variance. The prompts
are the same at every point, and so are a seed's branches, so the errors of the points are alike:
what is resampled are whole prompts and whole seeds (a cluster bootstrap; for two crossed factors
Owen 2007, "The pigeonhole bootstrap").

Percentiles are those of Efron's BCa interval (1987), because tau is skewed over prompts; and with
three seeds a bootstrap alone is too sure of itself. Its variance is split into what prompts, seeds
and both together contribute, each part is made unbiased, and the interval is widened to Student's
(an expanded interval: Hesterberg 2015), with degrees of freedom after Satterthwaite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jaxspec.lab.studies.scaling.simulate import chain_rate

Statistic = Callable[[np.ndarray], np.ndarray]

EXPONENTS = np.geomspace(0.02, 4.0, 121)  # searched for the saturating curve


class Form(Protocol):
    """A curve y(x)."""

    @property
    def name(self) -> str:
        """Of the form."""
        ...

    @property
    def formula(self) -> str:
        """As a reader would write it."""
        ...

    @property
    def param_names(self) -> tuple[str, ...]:
        """Of the last axis of `fit`."""
        ...

    def fit(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Parameters `[..., k]` of curves through `x` `[n]` and `y` `[..., n]`."""
        ...

    def predict(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """`[..., m]` values at `x` `[m]`."""
        ...


@dataclasses.dataclass(frozen=True)
class LogPolynomial:
    """A polynomial in log10 x: of degree 1 the log-linear curve, of degree 2 the test of it."""

    degree: int = 1

    @property
    def name(self) -> str:
        """Of the form."""
        return "log-linear" if self.degree == 1 else "log-quadratic"

    @property
    def formula(self) -> str:
        """As a reader would write it."""
        return "a + b log10 x" if self.degree == 1 else "a + b log10 x + c (log10 x)^2"

    @property
    def param_names(self) -> tuple[str, ...]:
        """a, b and so on."""
        return tuple("abc"[: self.degree + 1])

    def design(self, x: np.ndarray) -> np.ndarray:
        """`[n, k]`, powers of log10 x."""
        return np.log10(x)[:, None] ** np.arange(self.degree + 1)

    def fit(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """See `Form`."""
        return y @ least_squares(self.design(x), weights).T

    def predict(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """See `Form`."""
        return params @ self.design(x).T


@dataclasses.dataclass(frozen=True)
class Saturating:
    """top - c x^-p. For each p the rest is linear; p is searched on a grid and refined."""

    name: str = "saturating"
    formula: str = "top - c x^-p"
    param_names: tuple[str, ...] = ("top", "c", "p")

    def fit(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """See `Form`. `c` is in units of y at x = 1."""
        unit, root = np.exp(np.mean(np.log(x))), np.sqrt(weights)
        designs = np.stack([np.ones((len(EXPONENTS), len(x))), self._power(x / unit)], axis=-1)
        # The part of y that no curve of an exponent explains.
        projectors = np.stack([_leftover(design, weights) for design in designs])
        left = np.einsum("gmn,...n->...gm", projectors, y * root)
        squares = np.sum(left**2, axis=-1)
        best = np.clip(np.argmin(squares, axis=-1), 1, len(EXPONENTS) - 2)
        low, middle, high = (
            np.take_along_axis(squares, best[..., None] + step, axis=-1)[..., 0]
            for step in (-1, 0, 1)
        )
        bend = low - 2 * middle + high
        shift = np.where(bend > 0, 0.5 * (low - high) / np.where(bend > 0, bend, 1.0), 0.0)
        step = np.log(EXPONENTS[1] / EXPONENTS[0])
        p = EXPONENTS[best] * np.exp(step * np.clip(shift, -1.0, 1.0))
        z = (x / unit) ** -p[..., None]
        z_mean = np.average(z, axis=-1, weights=weights)
        y_mean = np.average(y, axis=-1, weights=weights)
        z_off, y_off = z - z_mean[..., None], y - y_mean[..., None]
        slope = np.sum(weights * z_off * y_off, axis=-1) / np.sum(weights * z_off**2, axis=-1)
        return np.stack([y_mean - slope * z_mean, -slope * unit**p, p], axis=-1)

    def predict(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """See `Form`."""
        top, c, p = (params[..., index, None] for index in range(3))
        return top - c * x**-p

    @staticmethod
    def _power(x: np.ndarray) -> np.ndarray:
        return x ** -EXPONENTS[:, None]


@dataclasses.dataclass(frozen=True)
class RejectionPower:
    """1 - alpha = c x^-p: what is rejected falls as a power. Linear in logarithms.

    The rate alpha is the one at which a chain of independent tokens would emit tau; of a response
    that is a logit of the rate it is the rate itself.
    """

    draft_length: int
    is_logit: bool = False
    name: str = "power law of 1 - alpha"
    formula: str = "1 - alpha = c x^-p"
    param_names: tuple[str, ...] = ("c", "p")

    def fit(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """See `Form`."""
        middle = np.average(y.reshape(-1, len(x)), axis=0)
        step = 1e-3
        slope = (self._log_rejected(middle + step) - self._log_rejected(middle - step)) / (2 * step)
        of_log = weights / np.maximum(slope**2, 1e-12)
        design = np.stack([np.ones(len(x)), -np.log(x)], axis=-1)
        found = self._log_rejected(y) @ least_squares(design, of_log).T
        return np.stack([np.exp(found[..., 0]), found[..., 1]], axis=-1)

    def predict(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """See `Form`."""
        rejected = np.clip(params[..., :1] * x ** -params[..., 1:], 1e-12, 1.0 - 1e-12)
        if self.is_logit:
            return np.log1p(-rejected) - np.log(rejected)
        powers = np.arange(self.draft_length + 1)
        return np.sum((1.0 - rejected)[..., None] ** powers, axis=-1)

    def _log_rejected(self, y: np.ndarray) -> np.ndarray:
        if self.is_logit:
            return -np.logaddexp(0.0, y)
        return np.log(np.maximum(1.0 - chain_rate(y, self.draft_length), 1e-12))


def least_squares(design: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`[k, n]`: times y `[n]` the coefficients of weighted least squares."""
    root = np.sqrt(weights)
    return np.linalg.pinv(design * root[:, None]) * root


def _leftover(design: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`[n, n]`: times sqrt(weights) y its weighted residuals."""
    scaled = design * np.sqrt(weights)[:, None]
    return np.eye(len(weights)) - scaled @ np.linalg.pinv(scaled)


def hc3_errors(design: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`[k]` standard errors of weighted least squares that take no variance for granted: residuals
    are divided by 1 - leverage (HC3; MacKinnon and White 1985)."""
    root = np.sqrt(weights)
    scaled = design * root[:, None]
    inverse = np.linalg.pinv(scaled)  # [k, n]
    leverage = np.einsum("nk,kn->n", scaled, inverse)
    residuals = root * y - scaled @ (inverse @ (root * y))
    of_points = inverse * (residuals / np.maximum(1.0 - leverage, 1e-9))
    return np.sqrt(np.einsum("kn,kn->k", of_points, of_points))


def aicc(residuals: np.ndarray, weights: np.ndarray, num_params: int) -> float | None:
    """Akaike's criterion for least squares, corrected for few points (Hurvich and Tsai 1989); None
    where there are too few for it. The variance counts as a parameter."""
    n, k = len(residuals), num_params + 1
    if n - k - 1 <= 0:
        return None
    squares = max(float(np.sum(weights * residuals**2)), 1e-300)
    return n * np.log(squares / n) + 2 * k + 2 * k * (k + 1) / (n - k - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure and the ends of its 95 % interval; NaN where nothing could be resampled."""

    value: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether its sign is open."""
        return self.low <= 0.0 <= self.high

    def to_json(self) -> dict[str, float | None]:
        """Fields; what is not finite is null."""
        fields = dataclasses.asdict(self)
        return {name: value if np.isfinite(value) else None for name, value in fields.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resampled:
    """Means of a study's points in many draws of its prompts and seeds.

    Attributes:
      means: `[n]`, of all prompts and seeds.
      both: `[draws, n]`, prompts and seeds resampled.
      of_prompts: prompts resampled.
      of_seeds: seeds resampled; None where there is one.
      left_out: `[P, n]`, means without each prompt.
      num_prompts: P.
      num_seeds: S.
    """

    means: np.ndarray
    both: np.ndarray
    of_prompts: np.ndarray
    of_seeds: np.ndarray | None
    left_out: np.ndarray
    num_prompts: int
    num_seeds: int

    def map(self, function: Statistic) -> Resampled:
        """The same draws of a function of the means `[..., n]`."""
        return dataclasses.replace(
            self,
            means=function(self.means),
            both=function(self.both),
            of_prompts=function(self.of_prompts),
            of_seeds=None if self.of_seeds is None else function(self.of_seeds),
            left_out=function(self.left_out),
        )

    def interval(self, statistic: Statistic) -> Interval:
        """A scalar of the means `[..., n]`, with its 95 % interval."""
        # Importing scipy.stats takes a second, and importing jaxspec imports this module.
        from scipy.special import stdtrit

        value = float(statistic(self.means[None])[0])
        both = statistic(self.both)
        of_prompts = float(np.var(statistic(self.of_prompts)))
        of_seeds = 0.0 if self.of_seeds is None else float(np.var(statistic(self.of_seeds)))
        spread, freedom = expected_spread(
            float(np.var(both)), of_prompts, of_seeds, self.num_prompts, self.num_seeds
        )
        if not np.isfinite(spread):
            return Interval(value=value, low=np.nan, high=np.nan)
        widening = spread * stdtrit(freedom, 0.975) / NORMAL_975
        shares = bca_shares(both, value, statistic(self.left_out))
        low, high = value + widening * (np.quantile(both, shares) - value)
        return Interval(value=value, low=float(low), high=float(high))


NORMAL_975 = 1.959964


def bca_shares(draws: np.ndarray, value: float, left_out: np.ndarray) -> np.ndarray:
    """The shares of draws below the two ends of a 95 % interval, corrected for bias and skewness
    (BCa: Efron 1987); 0.025 and 0.975 without either.

    Args:
      draws: `[draws]`.
      value: of all prompts.
      left_out: `[P]`, without each prompt.
    """
    from scipy.special import ndtr, ndtri

    # Draws of few prompts tie with the value, and which side of it rounding puts them on is up to
    # the processor.
    ties = np.isclose(draws, value, rtol=1e-9, atol=1e-12)
    below = np.mean((draws < value) & ~ties) + 0.5 * np.mean(ties)
    bias = ndtri(np.clip(below, 0.1, 0.9))  # beyond that the value is at the end of its range
    moved = np.mean(left_out) - left_out
    squares = np.sum(moved**2)
    skew = np.clip(np.sum(moved**3) / (6.0 * squares**1.5), -0.1, 0.1) if squares > 0 else 0.0
    ends = bias + np.array([-NORMAL_975, NORMAL_975])
    return ndtr(bias + ends / (1.0 - skew * ends))


def expected_spread(
    both: float, of_prompts: float, of_seeds: float, num_prompts: int, num_seeds: int
) -> tuple[float, float]:
    """By how much the bootstrap of both factors must be widened, and Student's degrees of freedom.

    Resampling P prompts understates their variance by (P - 1) / P, and S seeds theirs by
    (S - 1) / S. The variance that resampling both adds to the sum of the two is that of prompts and
    seeds together, which each of the two holds already, so it is taken off once.

    Args:
      both: variance of the draws of both.
      of_prompts: of the draws of prompts.
      of_seeds: of the draws of seeds.
      num_prompts: P, at least 2.
      num_seeds: S.
    """
    prompts = of_prompts * num_prompts / (num_prompts - 1)
    if num_seeds < 2:
        return np.sqrt(prompts / both) if both > 0 else 1.0, num_prompts - 1.0
    seeds = of_seeds * num_seeds / (num_seeds - 1)
    extra = max(both - of_prompts - of_seeds, 0.0)
    extra *= num_prompts / (num_prompts - 1) * num_seeds / (num_seeds - 1)
    more = max(seeds - extra, 0.0)  # what seeds add to prompts
    if not both > 0:
        return 1.0, num_prompts - 1.0
    parts = prompts**2 / (num_prompts - 1) + more * seeds / (num_seeds - 1)
    variance = prompts + more
    return np.sqrt(variance / both), variance**2 / parts if parts > 0 else num_prompts - 1.0


def resample(values: np.ndarray, *, num_draws: int, random: np.random.Generator) -> Resampled:
    """Draws of prompts and of seeds, with replacement.

    Args:
      values: `[n, S, P]`, a point's values by seed and prompt.
      num_draws: of each kind.
      random: of the draws.
    """
    _, num_seeds, num_prompts = values.shape

    def shares(count: int) -> np.ndarray:
        return random.multinomial(count, np.full(count, 1.0 / count), num_draws) / count

    prompts, seeds = shares(num_prompts), shares(num_seeds)
    of_prompts = values.mean(axis=1)
    left_out = (of_prompts.sum(axis=1, keepdims=True) - of_prompts) / (num_prompts - 1)
    by_seed = np.einsum("dp,nsp->dns", prompts, values, optimize=True)
    by_prompt = values.mean(axis=2)
    return Resampled(
        means=values.mean(axis=(1, 2)),
        both=np.einsum("ds,dns->dn", seeds, by_seed),
        of_prompts=by_seed.mean(axis=2),
        of_seeds=seeds @ by_prompt.T if num_seeds > 1 else None,
        left_out=left_out.T,
        num_prompts=num_prompts,
        num_seeds=num_seeds,
    )


def weights_of(values: np.ndarray) -> np.ndarray:
    """`[n]`: 1 / variance of each point's mean over prompts, up to a factor; none above 25 times
    another's, or a point whose prompts happen to agree would decide alone."""
    variance = np.var(values.mean(axis=1), axis=-1, ddof=1)
    if not (variance > 0).any():
        return np.ones(len(values))
    variance = np.maximum(variance, variance.max() / 25.0)
    return variance.mean() / variance


def json_params(form: Any, params: np.ndarray) -> dict[str, float]:
    """Parameters by name."""
    return {name: float(value) for name, value in zip(form.param_names, params, strict=True)}
