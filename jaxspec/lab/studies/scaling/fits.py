"""Curves through the means of a study's points.

A curve is fitted by weighted least squares, weights 1 / variance. `fit` takes the means of one
study `[n]`, or those of many draws of its prompts and seeds at once `[draws, n]`, as
`jaxspec.lab.intervals.resample` returns them: all intervals are percentiles of such draws.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np

EXPONENTS = np.geomspace(0.02, 4.0, 121)  # searched for the saturating curve


@dataclasses.dataclass(frozen=True)
class LogLinear:
    """a + b log10 x."""

    name: str = "log-linear"
    formula: str = "a + b log10 x"
    param_names: tuple[str, ...] = ("a", "b")

    def fit(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Parameters `[..., k]` of curves through `x` `[n]` and `y` `[..., n]`."""
        return y @ least_squares(_powers_of_log(x, 1), weights).T

    def predict(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """`[..., m]` values of curves `[..., k]` at `x` `[m]`."""
        return params @ _powers_of_log(x, 1).T


@dataclasses.dataclass(frozen=True)
class Saturating:
    """top - c x^-p. For each p the rest is linear; p is searched on a grid and refined."""

    name: str = "saturating"
    formula: str = "top - c x^-p"
    param_names: tuple[str, ...] = ("top", "c", "p")

    def fit(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """See `LogLinear.fit`. `c` is in units of y at x = 1."""
        unit, root = np.exp(np.mean(np.log(x))), np.sqrt(weights)
        powers = (x / unit) ** -EXPONENTS[:, None]
        scaled = np.stack([np.ones_like(powers), powers], axis=-1) * root[:, None]  # [121, n, 2]
        # The part of y that no curve of an exponent explains.
        projectors = np.eye(len(x)) - scaled @ np.linalg.pinv(scaled)
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
        """See `LogLinear.predict`."""
        top, c, p = (params[..., index, None] for index in range(3))
        return top - c * x**-p


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
        """See `LogLinear.fit`. Of several studies, all have the weights of the first."""
        first, step = y.reshape(-1, len(x))[0], 1e-3
        slope = (self._log_rejected(first + step) - self._log_rejected(first - step)) / (2 * step)
        of_log = weights / np.maximum(slope**2, 1e-12)
        design = np.stack([np.ones(len(x)), -np.log(x)], axis=-1)
        found = self._log_rejected(y) @ least_squares(design, of_log).T
        return np.stack([np.exp(found[..., 0]), found[..., 1]], axis=-1)

    def predict(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """See `LogLinear.predict`."""
        rejected = np.clip(params[..., :1] * x ** -params[..., 1:], 1e-12, 1.0 - 1e-12)
        if self.is_logit:
            return np.log1p(-rejected) - np.log(rejected)
        powers = np.arange(self.draft_length + 1)
        return np.sum((1.0 - rejected)[..., None] ** powers, axis=-1)

    def _log_rejected(self, y: np.ndarray) -> np.ndarray:
        if self.is_logit:
            return -np.logaddexp(0.0, y)
        return np.log(np.maximum(1.0 - chain_rate(y, self.draft_length), 1e-12))


Form: TypeAlias = LogLinear | Saturating | RejectionPower


def quadratic_term(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`[...]`: c of the parabolas a + b log10 x + c (log10 x)^2 through `x` `[n]`, `y` `[..., n]`:
    0 where the points lie on a log-linear curve."""
    return y @ least_squares(_powers_of_log(x, 2), weights)[2]


def chain_rate(tau: np.ndarray, draft_length: int) -> np.ndarray:
    """The acceptance rate, the same at every position, at which a chain emits `tau` per round; tau
    from 1 to N + 1."""
    rates = np.linspace(0.0, 1.0, 4097)
    emitted = np.sum(rates[:, None] ** np.arange(draft_length + 1), axis=1)
    return np.interp(tau, emitted, rates)


def least_squares(design: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`[k, n]`: times y `[n]` the coefficients of weighted least squares, of a design `[n, k]`."""
    root = np.sqrt(weights)
    return np.linalg.pinv(design * root[:, None]) * root


def weights_of(values: np.ndarray) -> np.ndarray:
    """`[n]`: 1 / variance of each point's mean over prompts, up to a factor; none above 25 times
    another's, or a point whose prompts happen to agree would decide alone.

    Args:
      values: `[n, S, P]`, a point's values by seed and prompt.
    """
    variance = np.var(values.mean(axis=1), axis=-1, ddof=1)
    if not (variance > 0).any():
        return np.ones(len(values))
    variance = np.maximum(variance, variance.max() / 25.0)
    return variance.mean() / variance


def _powers_of_log(x: np.ndarray, degree: int) -> np.ndarray:
    """`[n, degree + 1]`: powers of log10 x from 0 on."""
    return np.log10(x)[:, None] ** np.arange(degree + 1)
