"""What rounds take: measured on empty rows, then learnt from rounds that requests run.

A machine that is shared with others changes its speed from moment to moment, and what matters is
how rounds compare with each other. So each kind of round is measured beside the others in the same
turn, and what is learnt later separates the speed of the machine, which all kinds share, from what
each kind costs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

MEASURED_ROUNDS = 4  # of a call, beside calls of a single round: kinds must follow each other soon
FEWEST_TURNS, MOST_TURNS = 6, 48  # of a measurement
SETTLED_ERROR = 0.01  # relative standard error that ends a measurement
MEASURING_S = 3.0  # after which a measurement that has not settled ends all the same
SHORTEST_S = 1e-6  # a clock may measure nothing at all
WORTH_MEASURING = 512  # committed tokens: a context that costs visibly more than a short one

LEAST_RESIDUAL = 0.01  # of a round time beside the plane, relative: at least

LEAST_NOISE = 0.03  # of the logarithm of what a call takes, however steady the turns were
NOISE_MEMORY = 16  # calls from which the noise is estimated
LEAST_ERROR = 0.05  # of a measured round time, relative, however many turns there were
SPEED_MEMORY = 0.85  # share of a change of the machine's speed that is still there at the next call
# Per round, the relative cost of a kind may change by `DRIFT` (a standard deviation). The variance
# is twice that where the machine's speed is off by `UNLIKE`, for not all kinds slow down alike.
DRIFT, UNLIKE = 0.001, 0.1
FARTHEST = 2.0  # standard deviations; a call that is further off counts as if it were not


class RoundKind(NamedTuple):
    """What tells rounds of one engine apart: tokens drafted (0 is plain decoding) and the variant
    of the drafter (0 where there is one only, and of plain decoding)."""

    draft_length: int
    variant: int = 0


PLAIN = RoundKind(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Seconds per round of each kind, measured at two contexts, linear in between.

    Attributes:
      short_context: committed tokens of the longest row, of the first measurement.
      long_context: of the second.
      short_s: seconds per round by kind, plain decoding first, at the first.
      long_s: at the second.
      chunk_s: seconds in which the drafter reads a chunk of one row that it has not seen.
      call_s: seconds that a call takes besides its rounds.
      noise: standard deviation of the logarithm of a call's seconds, from turn to turn.
      error: standard error of the logarithm of a round's seconds, relative to other kinds.
      covariance: of these errors over `error**2`, `[K, K]` in the order of `kinds`; None if they
        are independent.
    """

    short_context: int
    long_context: int
    short_s: Mapping[RoundKind, float]
    long_s: Mapping[RoundKind, float]
    chunk_s: float
    call_s: float = 0.0
    noise: float = 0.0
    error: float = 0.0
    covariance: np.ndarray | None = None

    @property
    def kinds(self) -> tuple[RoundKind, ...]:
        """The kinds of rounds that were measured."""
        return tuple(self.short_s)

    @property
    def longest(self) -> int:
        """The longest draft of any kind."""
        return max(kind.draft_length for kind in self.kinds)

    def of(self, kind: RoundKind, context: int, live: float = 1.0) -> float:
        """Seconds per round where the longest row has `context` committed tokens, and this share of
        the drafts exists: linear between plain decoding and a round with all of them."""
        if live < 1.0:
            plain_s = self.of(PLAIN, context)
            return plain_s + live * (self.of(kind, context) - plain_s)
        span = max(self.long_context - self.short_context, 1)
        share = min(max((context - self.short_context) / span, 0.0), 1.0)
        short_s, long_s = self.short_s[kind], self.long_s[kind]
        return short_s + share * (long_s - short_s)


class Rounds(Protocol):
    """Runs the rounds that are measured; every call waits for the device."""

    def fill(self, prompt_length: int) -> None:
        """Fills the batch, its first row with a prompt of so many tokens, the others with one."""
        ...

    def run(self, kind: RoundKind, num_rounds: int) -> None:
        """Runs rounds of a kind."""
        ...

    def catch_up(self) -> int:
        """Lets the drafter read what it has not seen; returns the number of chunks."""
        ...


def measure_round_times(
    rounds: Rounds, *, windows: Mapping[RoundKind, int], room: int
) -> RoundTimes:
    """Seconds per round of some kinds, at a short context and at a long one.

    In every turn each kind runs one round and then many; turns go on until the ratios between the
    kinds have settled, or `MEASURING_S` have passed.

    The second context is as long as there is room for. It is skipped if that is short, because a
    row of a few blocks costs little more than one of a single block. Only one row is that long,
    which is enough for our own attention: it reads as many blocks as the longest row has. A kernel
    that reads only each row's own blocks is faster than these times suggest.

    Args:
      rounds: runs them.
      windows: tokens that the target scores per row, by the kinds to measure, plain decoding among
        them.
      room: tokens of the longest prompt.
    """
    order = sorted(windows, reverse=True)  # plain decoding last: the drafter lags after it
    num_tokens = [(2 + MEASURED_ROUNDS) * (kind.draft_length + 1) for kind in order]
    rounds.fill(1)
    for kind in order:  # compiles the programs
        rounds.run(kind, 1)
    rounds.catch_up()
    short = _measure(rounds, order, windows, prompt_length=1)
    long, short_context = short, max(num_tokens) // 2
    long_context = room - FEWEST_TURNS * sum(num_tokens)
    if long_context >= WORTH_MEASURING:
        rounds.fill(long_context)
        long = _measure(rounds, order, windows, prompt_length=long_context)
    return RoundTimes(
        short_context=short_context,
        long_context=max(long_context, short_context),
        short_s=short.round_s,
        long_s=long.round_s,
        chunk_s=min(short.chunk_s, long.chunk_s),
        call_s=short.call_s,
        noise=short.noise,
        error=short.error,
        covariance=short.covariance,
    )


class _Measured(NamedTuple):
    """At one context; see `RoundTimes`."""

    round_s: dict[RoundKind, float]
    chunk_s: float
    call_s: float
    noise: float
    error: float
    covariance: np.ndarray


def _measure(
    rounds: Rounds,
    order: Sequence[RoundKind],
    windows: Mapping[RoundKind, int],
    *,
    prompt_length: int,
) -> _Measured:
    """Measures in turns. The rows of a long prompt are filled by the caller, and have room for the
    fewest turns only."""
    one_s: list[list[float]] = []  # by turn and kind, of a single round
    many_s: list[list[float]] = []
    chunk_s: list[float] = []
    started_s = time.perf_counter()

    def timed(kind: RoundKind, num_rounds: int) -> float:
        before_s = time.perf_counter()
        rounds.run(kind, num_rounds)
        return max(time.perf_counter() - before_s, SHORTEST_S)

    while True:
        one_s.append([])
        many_s.append([])
        for kind in order:
            if prompt_length == 1:
                rounds.fill(1)
            rounds.run(kind, 1)  # the first call after others finds little in the caches
            one_s[-1].append(timed(kind, 1))
            many_s[-1].append(timed(kind, MEASURED_ROUNDS))
        before_s = time.perf_counter()
        if num_chunks := rounds.catch_up():
            chunk_s.append((time.perf_counter() - before_s) / num_chunks)
        # One call has a round and what calls take besides, the other one more rounds.
        one, many = np.array(one_s), np.array(many_s)
        more = MEASURED_ROUNDS - 1
        call_s = max(float(np.median(MEASURED_ROUNDS * one - many)) / more, 0.0)
        logs = np.log(np.maximum(many - call_s, SHORTEST_S) / MEASURED_ROUNDS)
        of_turns = logs.mean(axis=1, keepdims=True)
        beside = logs - of_turns
        num_turns = len(logs)
        noise = float(np.sqrt(np.mean(np.var(beside, axis=0, ddof=1)))) if num_turns > 1 else 0.0
        # The standard error of a median of normal draws.
        error = noise * math.sqrt(math.pi / 2 / num_turns)
        is_settled = error < SETTLED_ERROR or time.perf_counter() - started_s > MEASURING_S
        is_full = num_turns >= (MOST_TURNS if prompt_length == 1 else FEWEST_TURNS)
        if num_turns >= FEWEST_TURNS and (is_settled or is_full):
            break
    found = np.exp(np.median(beside, axis=0) + np.median(of_turns))
    measured_s = dict(sorted(zip(order, found.tolist(), strict=True)))
    round_s, covariance = shrink_to_planes(measured_s, windows, error)
    return _Measured(
        round_s=round_s,
        chunk_s=statistics.median(chunk_s) if chunk_s else 0.0,
        call_s=call_s,
        noise=noise,
        error=error,
        covariance=covariance,
    )


def shrink_to_planes(
    round_s: Mapping[RoundKind, float], windows: Mapping[RoundKind, int], error: float
) -> tuple[dict[RoundKind, float], np.ndarray]:
    """Shrinks measured round times towards what neighbouring kinds suggest.

    Of many kinds that are about equally fast, the one that seems the fastest was mostly measured in
    a good moment. But every token drafted costs about as much as the one before it, and so does
    every token scored: the times of one variant lie near a plane over tokens drafted and window.
    The plane is fitted by least squares of relative errors, and the residuals are kept in part:
    the larger they are beside the errors of measurement, the more (empirical Bayes). Nothing
    changes for plain decoding, and for variants with no more kinds than a plane has terms.

    Args:
      round_s: measured seconds, by kind.
      windows: tokens that the target scores per row, by kind.
      error: standard error of each time, relative.

    Returns:
      The seconds, and the covariance of their relative errors over `error**2`, `[K, K]`.
    """
    kinds, shrunk = list(round_s), dict(round_s)
    covariance = np.eye(len(kinds))
    for variant in {kind.variant for kind in kinds if kind != PLAIN}:
        own = [i for i, kind in enumerate(kinds) if kind != PLAIN and kind.variant == variant]
        terms = np.array(  # over the time measured, so that a perfect fit is 1 everywhere
            [
                np.array([1.0, kinds[i].draft_length, windows[kinds[i]]]) / round_s[kinds[i]]
                for i in own
            ]
        )
        fit = terms @ np.linalg.pinv(terms)
        rest = np.eye(len(own)) - fit
        num_free = round(np.trace(rest))
        if num_free == 0:
            continue
        residuals = rest.sum(axis=1)
        variance = max(float(residuals @ residuals) / num_free - error**2, LEAST_RESIDUAL**2)
        kept = variance / (variance + error**2)
        for i, residual in zip(own, residuals.tolist(), strict=True):
            shrunk[kinds[i]] *= 1.0 - (1.0 - kept) * residual
        covariance[np.ix_(own, own)] = fit + kept * rest
    return shrunk, covariance


class LearnedTimes:
    """What rounds take by now: as measured, corrected by the rounds that requests run.

    The logarithm of a call's seconds per round is taken to be the sum of what was measured, the
    speed of the machine, the error of the kind's measurement, and noise. The speed wanders from
    call to call and tends to return, the errors change slowly; a Kalman filter estimates both. So a
    machine that becomes slower for a while makes no kind look worse than another, and a change
    between two kinds tells them apart.

    Args:
      times: as measured.
    """

    def __init__(self, times: RoundTimes):
        self.times = times
        self._index = {kind: 1 + index for index, kind in enumerate(times.kinds)}
        self._noise = max(times.noise, LEAST_NOISE)
        self._last: tuple[RoundKind, float] | None = None  # the last call, beside what was measured
        error = max(times.error, LEAST_ERROR)
        # What is found out of one kind tells something of those like it.
        self._shape = np.eye(len(times.kinds)) if times.covariance is None else times.covariance
        # Of the speed, then of each kind.
        self._mean = np.zeros(1 + len(self._index))
        self._covariance = np.zeros((len(self._mean),) * 2)
        self._covariance[0, 0] = self._noise**2
        self._covariance[1:, 1:] = error**2 * self._shape
        self._num_timed = dict.fromkeys(times.kinds, 0)

    @property
    def kinds(self) -> tuple[RoundKind, ...]:
        """The kinds of rounds that were measured."""
        return self.times.kinds

    def round_s(self, kind: RoundKind, context: int, live: float = 1.0) -> float:
        """Seconds per round; see `RoundTimes.of`."""
        return self.times.of(kind, context, live) * self._factor(self._index[kind])

    @property
    def chunk_s(self) -> float:
        """See `RoundTimes`."""
        return self.times.chunk_s * self._factor()

    def num_timed(self, kind: RoundKind) -> int:
        """Calls of rounds of this kind that were timed."""
        return self._num_timed[kind]

    def error(self, kind: RoundKind, other: RoundKind) -> float:
        """Standard error of the logarithm of the ratio of two kinds' seconds."""
        one, two, of = self._index[kind], self._index[other], self._covariance
        return math.sqrt(max(of[one, one] + of[two, two] - 2 * of[one, two], 0.0))

    def pass_rounds(self, num_rounds: int) -> None:
        """Notes that rounds were run: what kinds cost beside each other may have changed."""
        drift = DRIFT**2 * (1.0 + (self._mean[0] / UNLIKE) ** 2)
        self._covariance[1:, 1:] += num_rounds * drift * self._shape

    def note(
        self, kind: RoundKind, context: int, num_rounds: int, seconds: float, live: float = 1.0
    ) -> None:
        """Learns from the seconds of a call of some rounds; `live` as in `RoundTimes.of`."""
        self._num_timed[kind] += 1
        call_s = self.times.call_s * self._factor()
        per_round_s = max(seconds - call_s, SHORTEST_S) / num_rounds
        ratio = math.log(per_round_s / self.times.of(kind, context, live))
        if self._last is not None and self._last[0] == kind:
            # Two calls in a row differ by the noise of both and a step of the speed.
            noise = abs(ratio - self._last[1]) / math.sqrt(3.0 * 2.0 / math.pi)
            self._noise += (max(noise, LEAST_NOISE) - self._noise) / NOISE_MEMORY
        self._last = kind, ratio
        seen = np.zeros_like(self._mean)
        seen[[0, self._index[kind]]] = 1.0
        self._mean[0] *= SPEED_MEMORY
        self._covariance[0] *= SPEED_MEMORY
        self._covariance[:, 0] *= SPEED_MEMORY
        self._covariance[0, 0] += self._noise**2
        gain = self._covariance @ seen
        variance = float(seen @ gain) + self._noise**2
        error = ratio - float(seen @ self._mean)
        farthest = FARTHEST * math.sqrt(variance)  # a call may be held up for any time
        self._mean += gain / variance * min(max(error, -farthest), farthest)
        self._covariance -= np.outer(gain, gain) / variance

    def _factor(self, *indices: int) -> float:
        return math.exp(self._mean[0] + sum(float(self._mean[index]) for index in indices))
