"""Evidence that sampled tokens were not drawn from the distribution that they are claimed to
follow.

Each of `ALTERNATIVES` is a way in which sampling goes wrong in practice. For each of them we keep a
likelihood ratio (a test martingale, the "bet" below): it is multiplied at every token by q / p,
where p is the probability that the token should have and q the one that it has under the
alternative (with `HONEST_SHARE` of p mixed in, so that no single token loses the whole bet). If
tokens are drawn from p, the bet always has mean 1, so the probability that it ever exceeds
1 / alpha is at most alpha (Ville's inequality). The mean of the bets on all alternatives is such a
bet as well, so trying several alternatives costs no more than the logarithm of their number.

Bets on outputs that were drawn independently are multiplied. Outputs that share a seed share their
noise; their bets are averaged, which gives a bet of mean 1 however they depend on each other.

The distribution is fp32's, and the tokens were drawn in another dtype, whose logits differ by up to
the measured noise n. Then q / p has a mean of at most exp(2 n / T), and at most 1 + s n / T, where
s is its standard deviation under p. Bets are divided by the smaller of these.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from jaxspec.audit.segment import Segment

ALPHA = 1e-6  # probability that outputs that follow the distribution are reported as not doing so
HONEST_SHARE = 0.1  # weight of the distribution itself in every alternative
STRAY_SHARE = 0.05  # fraction of arbitrary tokens in that alternative
POWER = 0.99  # probability for which the number of tokens is stated


def _tempered(factor: float) -> Callable[[jax.Array], jax.Array]:
    return lambda log_p: jax.nn.log_softmax(log_p / factor, axis=-1)


def _greedy(log_p: jax.Array) -> jax.Array:
    is_first = log_p == jnp.max(log_p, axis=-1, keepdims=True)
    return jax.nn.log_softmax(jnp.where(is_first, 0.0, -jnp.inf), axis=-1)


def _nucleus(mass: float) -> Callable[[jax.Array], jax.Array]:
    def cut(log_p: jax.Array) -> jax.Array:
        descending = -jnp.sort(-log_p, axis=-1)
        p = jnp.exp(descending)
        is_kept = jnp.cumsum(p, axis=-1) - p < mass
        least = jnp.min(jnp.where(is_kept, descending, jnp.inf), axis=-1, keepdims=True)
        return jax.nn.log_softmax(jnp.where(log_p >= least, log_p, -jnp.inf), axis=-1)

    return cut


def _strays(log_p: jax.Array) -> jax.Array:
    support = jnp.sum(jnp.isfinite(log_p), axis=-1, keepdims=True)
    stray = math.log(STRAY_SHARE) - jnp.log(support.astype(jnp.float32))
    mixed = jnp.logaddexp(log_p + math.log1p(-STRAY_SHARE), stray)
    return jnp.where(jnp.isfinite(log_p), mixed, -jnp.inf)


# By name: the alternative's log-probabilities `[..., V]`, given those of the distribution.
ALTERNATIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "greedy": _greedy,
    "temperature x 0.5": _tempered(0.5),
    "temperature x 0.8": _tempered(0.8),
    "temperature x 1.25": _tempered(1.25),
    "temperature x 2": _tempered(2.0),
    "top-p 0.5": _nucleus(0.5),
    "top-p 0.9": _nucleus(0.9),
    "5 % of tokens from anywhere": _strays,
}


def bets(log_p: jax.Array, tokens: jax.Array) -> dict[str, jax.Array]:
    """The bets of each alternative on tokens `[n]`, given log-probabilities `[n, V]`: fp32 `[n,
    A]`.

    Returns:
      log_bets: log of `q / p`; inf for a token with probability 0.
      expected, variance: mean and variance of the former if the alternative is true.
      spread: standard deviation of `q / p` if the distribution itself is.
    """
    is_possible = jnp.isfinite(log_p)
    columns = []
    for alternative in ALTERNATIVES.values():
        log_alternative = alternative(log_p)
        log_q = jnp.logaddexp(
            log_alternative + math.log1p(-HONEST_SHARE), log_p + math.log(HONEST_SHARE)
        )
        log_ratio = jnp.where(is_possible, log_q - jnp.where(is_possible, log_p, 0.0), 0.0)
        drawn = jnp.exp(log_alternative)
        expected = jnp.sum(drawn * log_ratio, axis=-1)
        variance = jnp.sum(drawn * jnp.square(log_ratio - expected[:, None]), axis=-1)
        # In logs, because the ratio may overflow fp32 where p underflows.
        log_excess = jnp.where(
            log_ratio > 20, log_ratio, jnp.log(jnp.abs(jnp.expm1(jnp.minimum(log_ratio, 20))))
        )
        spread = jnp.exp(jax.nn.logsumexp(log_p + 2 * log_excess, axis=-1) / 2)
        own = jnp.where(is_possible, log_ratio, jnp.inf)
        of_token = jnp.take_along_axis(own, tokens[:, None], axis=1)[:, 0]
        columns.append((of_token, expected, variance, spread))
    names = ("log_bets", "expected", "variance", "spread")
    stacked = [jnp.stack(column, axis=1) for column in zip(*columns, strict=True)]
    return dict(zip(names, stacked, strict=True))


def bets_of(segment: Segment, temperature: float) -> np.ndarray:
    """The segment's bets `[n, A]` on a log scale, minus what rounding may explain."""
    noise = segment.noise[:, None].astype(np.float64) / temperature
    spread = np.where(noise > 0, segment.spread, 0.0)  # it may be inf, and inf * 0 is NaN
    allowance = np.minimum(2 * noise, np.log1p(spread * noise))
    return segment.log_bets - allowance


def log_evidence(log_bets: np.ndarray) -> float:
    """The log of the mean of the bets `[A]` on the alternatives."""
    return float(np.logaddexp.reduce(log_bets)) - math.log(len(ALTERNATIVES))


def evidence_limit(num_outputs: int = 1) -> float:
    """Log of the evidence that any of this many outputs exceeds with probability at most `ALPHA`,
    if all of them follow the distribution."""
    return math.log(max(num_outputs, 1) / ALPHA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bets:
    """The bets on one sampled output, or on several together.

    Attributes:
      log_bets: `[A]` fp64.
      expected: `[A]`, their means if the alternative is true and the context is the same.
      variance: `[A]`, their variances, likewise.
      num_tokens: that were bet on.
    """

    log_bets: np.ndarray
    expected: np.ndarray
    variance: np.ndarray
    num_tokens: int

    @classmethod
    def none(cls) -> Bets:
        """The bets before the first token."""
        zero = np.zeros(len(ALTERNATIVES))
        return cls(log_bets=zero, expected=zero, variance=zero, num_tokens=0)

    def plus(self, log_bets: np.ndarray, segment: Segment) -> Bets:
        """These bets together with those on a segment, `[n, A]`."""
        return Bets(
            log_bets=self.log_bets + log_bets.sum(axis=0),
            expected=self.expected + segment.expected.sum(axis=0),
            variance=self.variance + segment.variance.sum(axis=0),
            num_tokens=self.num_tokens + len(log_bets),
        )

    @classmethod
    def together(cls, each: Sequence[Bets], seeds: Sequence[Hashable | None]) -> Bets:
        """The bets on several outputs with these seeds. Outputs without a seed count as
        independent."""
        by_seed: dict[Hashable, list[Bets]] = collections.defaultdict(list)
        for place, (own, seed) in enumerate(zip(each, seeds, strict=True)):
            by_seed[("alone", place) if seed is None else ("seed", seed)].append(own)
        total = cls.none()
        for group in by_seed.values():
            total_bets = np.logaddexp.reduce([own.log_bets for own in group], axis=0)
            total = cls(
                log_bets=total.log_bets + total_bets - math.log(len(group)),
                expected=total.expected + np.mean([own.expected for own in group], axis=0),
                variance=total.variance + np.mean([own.variance for own in group], axis=0),
                num_tokens=total.num_tokens + round(np.mean([own.num_tokens for own in group])),
            )
        return total

    @property
    def log_evidence(self) -> float:
        """Log of the averaged likelihood ratio."""
        return log_evidence(self.log_bets)

    def powers(self) -> tuple[Power, ...]:
        """How likely each alternative would have been found, had it been true; empty without
        tokens."""
        if self.num_tokens == 0:
            return ()
        needed = evidence_limit() + math.log(len(ALTERNATIVES))
        return tuple(
            Power.of(name, float(mean), float(variance), self.num_tokens, needed)
            for name, mean, variance in zip(ALTERNATIVES, self.expected, self.variance, strict=True)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Power:
    """The probability of finding an alternative, by a normal approximation to its bet.

    Attributes:
      alternative: a key of `ALTERNATIVES`.
      num_tokens: that were bet on.
      chance: probability of finding it with this many tokens.
      tokens_needed: number of tokens that finds it with probability `POWER`, in contexts like
        these; None if no number suffices (an alternative that is the distribution itself).
    """

    alternative: str
    num_tokens: int
    chance: float
    tokens_needed: int | None

    @classmethod
    def of(cls, name: str, mean: float, variance: float, num_tokens: int, needed: float) -> Power:
        """For a bet with this mean and variance, whose log has to exceed `needed`."""
        deviation = math.sqrt(variance)
        chance = 1.0 if mean > needed else 0.0
        if deviation > 0:
            chance = float(scipy.stats.norm.cdf((mean - needed) / deviation))
        tokens_needed = None
        if mean > 0:
            # n m - z sqrt(n) s = needed, for the mean m and deviation s of one token.
            m, s = mean / num_tokens, deviation / math.sqrt(num_tokens)
            z = float(scipy.stats.norm.ppf(POWER))
            root = (z * s + math.sqrt((z * s) ** 2 + 4 * m * needed)) / (2 * m)
            tokens_needed = math.ceil(root**2)
        return cls(
            alternative=name, num_tokens=num_tokens, chance=chance, tokens_needed=tokens_needed
        )
