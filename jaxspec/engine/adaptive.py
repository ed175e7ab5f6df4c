"""Adaptive draft length: how many tokens to draft in the next rounds, 0 being plain decoding.

A round that drafts n tokens emits `E(n) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_n` tokens per row,
where `a_j` is the probability that draft j is accepted if those before it are (2211.17192, section
3.3, without its assumption that it is the same at every position), and takes `t(n)` seconds, among
them the round's share of what the drafter reads of prompts. The controller takes the n with the
highest `E(n) / t(n)`. It measures `a_j` on the rows that are running, forgetting slowly. What a
round takes is measured once, with the engine's own programs, at a short and at a long context;
shapes are static, so a round costs the same however many rows are taken. Given those times,
the same acceptance leads to the same choices.

Two things keep it from harm. It drafts, and changes its mind, only for a clear gain. And once plain
decoding has won, drafts are tried again only when the trial, whatever comes of it, costs a small
share of the time that was spent without.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

CLEAR_GAIN = 0.05  # by which drafts must be faster than none, and another draft length than this
TRIAL_SHARE = 0.01  # of the time spent in plain decoding, that a trial of drafts may cost
TRIAL_ROUNDS = 8  # of a trial, and between decisions while little is known
FORGOTTEN_AFTER = 1024  # rounds of rows: older ones weigh less than 1/e
LITTLE_KNOWN = 64  # rounds of rows
PRIOR_ACCEPTANCE, PRIOR_ROUNDS = 0.7, 8  # what is believed at first, and with what weight
MEASURED_ROUNDS, MEASUREMENTS = 9, 3  # of every draft length
SHORTEST_S = 1e-6  # what a clock may take for nothing
WORTH_MEASURING = 512  # committed tokens: a context that costs visibly more than a short one


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Seconds per round for each draft length, measured at two contexts, linear in between.

    Attributes:
      short_context: committed tokens of the longest row, of the first measurement.
      long_context: of the second.
      short_s: seconds per round by draft length, 0 to the longest, at the first.
      long_s: at the second.
      chunk_s: seconds for which the drafter reads a chunk of one row that it has not seen.
    """

    short_context: int
    long_context: int
    short_s: Sequence[float]
    long_s: Sequence[float]
    chunk_s: float

    def of(self, draft_length: int, context: int) -> float:
        """Seconds per round where the longest row has `context` committed tokens."""
        span = max(self.long_context - self.short_context, 1)
        share = min(max((context - self.short_context) / span, 0.0), 1.0)
        short_s, long_s = self.short_s[draft_length], self.long_s[draft_length]
        return short_s + share * (long_s - short_s)


class Rounds(Protocol):
    """What `measure_round_times` runs: an engine that decodes requests made up for the purpose."""

    def fill(self, prompt_length: int) -> None:
        """Fills the rows of the batch with requests of one token, the first one with so many, and
        waits."""
        ...

    def run(self, draft_length: int, num_rounds: int) -> None:
        """Runs rounds that draft so many tokens, and waits for them."""
        ...

    def catch_up(self) -> int:
        """Lets the drafter read what it has not seen, and waits for it; returns chunks read."""
        ...


def measure_round_times(rounds: Rounds, *, longest: int, room: int) -> RoundTimes:
    """Seconds per round of every draft length, at a short context and at a long one.

    Of each the least of a few measurements, taken in turns, and the difference between many rounds
    and one, for what a call costs besides its rounds is shared by more of them in use.

    The second context is as long as there is room for, and left out where that is short: a row of
    a few blocks costs little more than one of a single block. One row has it and the others are
    short, which costs the same where attention runs over the blocks of the longest row, as our own
    does; a kernel that pays for each row's own blocks does better than these times say.

    Args:
      rounds: runs them.
      longest: draft length.
      room: tokens of the longest prompt.
    """
    lengths = range(longest, -1, -1)  # plain decoding last: it leaves the drafter after
    sizes = (1, MEASURED_ROUNDS)
    num_tokens = {length: sum(sizes) * (length + 1) for length in lengths}
    chunk_s: list[float] = []

    def timed(draft_length: int, num_rounds: int) -> float:
        started_s = time.perf_counter()
        rounds.run(draft_length, num_rounds)
        return time.perf_counter() - started_s

    def measure(prompt_length: int) -> tuple[float, ...]:
        found: dict[tuple[int, int], list[float]] = {}
        for _ in range(MEASUREMENTS):
            for length in lengths:
                if prompt_length == 1:
                    rounds.fill(prompt_length)
                for size in sizes:
                    found.setdefault((length, size), []).append(timed(length, size))
            started_s = time.perf_counter()
            num_chunks = rounds.catch_up()
            if num_chunks:
                chunk_s.append((time.perf_counter() - started_s) / num_chunks)
        least = {key: min(seconds) for key, seconds in found.items()}
        more = MEASURED_ROUNDS - 1
        return tuple(
            max(least[n, MEASURED_ROUNDS] - least[n, 1], SHORTEST_S) / more
            for n in range(longest + 1)
        )

    rounds.fill(1)
    for length in lengths:  # compiles
        rounds.run(length, 1)
    rounds.catch_up()
    short_s = long_s = measure(1)
    short_context = max(num_tokens.values()) // 2
    long_context = room - MEASUREMENTS * sum(num_tokens.values())
    if long_context >= WORTH_MEASURING:
        rounds.fill(long_context)
        long_s = measure(long_context)
    return RoundTimes(
        short_context=short_context,
        long_context=max(long_context, short_context),
        short_s=short_s,
        long_s=long_s,
        chunk_s=min(chunk_s, default=0.0),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What to do next.

    Attributes:
      draft_length: for how many drafted tokens per round; 0 decodes plainly.
      num_rounds: after which to ask again.
    """

    draft_length: int
    num_rounds: int


class DraftLengthController:
    """Chooses draft lengths from 0 to the longest that `times` knows of.

    Args:
      times: of the engine's rounds.
    """

    def __init__(self, times: RoundTimes):
        self.times = times
        self.num_rounds: dict[int, int] = {}  # rounds run so far, by draft length
        longest = len(times.short_s) - 1
        # Of rounds whose drafts before position j were all accepted: how many, and how many of them
        # accepted position j too.
        self._reached, self._accepted = [0.0] * longest, [0.0] * longest
        self._num_known = 0.0
        self._current: int | None = None
        self._plain_s = 0.0  # since drafts were last tried
        self._is_trial = False

    @property
    def draft_length(self) -> int | None:
        """What it has settled on, trials apart; None before the first choice."""
        return self._current

    def acceptance(self) -> tuple[float, ...]:
        """Probability that drafts up to each position are all accepted. Of a position that was
        seldom reached it is believed that drafts fare there as at the one before."""
        cumulative, all_before, conditional = [], 1.0, PRIOR_ACCEPTANCE
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            conditional = (accepted + PRIOR_ROUNDS * conditional) / (reached + PRIOR_ROUNDS)
            all_before *= conditional
            cumulative.append(all_before)
        return tuple(cumulative)

    def tokens_per_s(self, draft_length: int, context: int, chunks_per_token: float = 0.0) -> float:
        """Expected, of one row; `chunks_per_token` as in `choose`."""
        emitted = 1.0 + sum(self.acceptance()[:draft_length])
        seconds = self.times.of(draft_length, context)
        if draft_length > 0:
            seconds += emitted * chunks_per_token * self.times.chunk_s
        return emitted / seconds

    def choose(
        self,
        *,
        context: int,
        num_rounds: int,
        count_unprefilled: Callable[[], int],
        chunks_per_token: float = 0.0,
    ) -> Choice:
        """The draft length of the next rounds.

        Args:
          context: committed tokens of the longest running row.
          num_rounds: most rounds to the next decision.
          count_unprefilled: chunks that the drafter would have to read first, of all rows; asked
            only where a trial could be afforded but for them.
          chunks_per_token: of prompts, that a drafter in use reads for each token that a row emits,
            summed over the rows.
        """
        rates = [
            self.tokens_per_s(n, context, chunks_per_token) for n in range(len(self.times.short_s))
        ]
        if self._current == 0 and not self._is_trial:
            drafting = max(range(1, len(rates)), key=rates.__getitem__)
            more_s = self.times.of(drafting, context) - self.times.of(0, context)
            left_s = TRIAL_SHARE * self._plain_s - TRIAL_ROUNDS * max(more_s, 0.0)
            self._is_trial = left_s >= 0 and count_unprefilled() * self.times.chunk_s <= left_s
            if not self._is_trial:
                return Choice(draft_length=0, num_rounds=num_rounds)
            return Choice(draft_length=drafting, num_rounds=min(num_rounds, TRIAL_ROUNDS))
        # Drafts must earn their place: what is gained for certain is plain decoding's rate.
        worth = [rates[0], *(rate / (1 + CLEAR_GAIN) for rate in rates[1:])]
        best = max(range(len(worth)), key=worth.__getitem__)
        needed = 1.0 if best == 0 else 1 + CLEAR_GAIN
        if self._current is None or worth[best] > needed * worth[self._current]:
            self._current = best
        self._is_trial = False
        if self._current == 0:
            self._plain_s = 0.0
            # A later trial must be able to outweigh what has made drafts lose.
            self._forget(min(LITTLE_KNOWN / max(self._num_known, 1.0), 1.0))
        elif self._num_known < LITTLE_KNOWN:
            num_rounds = min(num_rounds, TRIAL_ROUNDS)
        return Choice(draft_length=self._current, num_rounds=num_rounds)

    def note(
        self,
        *,
        draft_length: int,
        context: int,
        num_rounds: int,
        num_row_rounds: int,
        num_accepted_at: Sequence[int],
    ) -> None:
        """What came of a choice.

        Args:
          draft_length: that was chosen.
          context: committed tokens of the longest row.
          num_rounds: that were run.
          num_row_rounds: the same, summed over the rows that drafted so far.
          num_accepted_at: of these, those that accepted position j and all before it.
        """
        self.num_rounds[draft_length] = self.num_rounds.get(draft_length, 0) + num_rounds
        if draft_length == 0:
            self._plain_s += num_rounds * self.times.of(0, context)
            return
        self._forget(max(1 - num_row_rounds / FORGOTTEN_AFTER, 0.0))
        self._num_known += num_row_rounds
        reached = (num_row_rounds, *num_accepted_at)
        for j in range(draft_length):
            self._reached[j] += reached[j]
            self._accepted[j] += num_accepted_at[j]

    def _forget(self, share_kept: float) -> None:
        """Lets the evidence weigh less."""
        self._num_known *= share_kept
        self._reached = [share_kept * reached for reached in self._reached]
        self._accepted = [share_kept * accepted for accepted in self._accepted]
