"""Adaptive draft length: how many tokens to draft in the next rounds, 0 being plain decoding.

A round that drafts n tokens emits `E(n) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_n` tokens per row,
where `a_j` is the probability that draft j is accepted if those before it are (2211.17192, section
3.3, without its assumption that it is the same at every position), and takes `t(n)` seconds,
including the round's share of the drafter's prompt prefill. The controller picks the n with the
highest `E(n) / t(n)`. Variants of a drafter draft the same, so E is the same for all of them, and t
is each one's own; the controller picks one together with n. It estimates `a_j` from the running
rows, and forgets old rounds slowly. The time of a round is measured before the first request, with
the engine's own programs, at a short and at a long context; shapes are static, so a round costs the
same however many rows are running.

On a shared machine that measurement may fall into a bad moment. So the rounds that requests run are
timed too, and correct it; now and then a few rounds of another draft length or variant are run to
learn what those cost by now. Given all these times, the same acceptance leads to the same choices.

Of a tree n is a number of nodes. They are in the order of their worth, so what n of them would have
emitted is known from rounds that drafted more: `E(n) = 1 + sum of the first n nodes' chances` to be
on the accepted path. Trees are large, and only as many nodes are tried as fill a window bucket.

Three rules limit the cost of a wrong choice. The controller drafts, and changes its draft length,
only for a clear gain. It ends drafting only when the acceptance seen makes it unlikely that drafts
are worth their while: at batch 1 eight rounds of one request say little. And another kind of round
than the chosen one is tried only when the whole trial costs a small share of the time spent since
the last one. That share is larger at first after drafting was ended, which may have been bad luck.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decode.buckets import window_buckets
from jaxspec.engine.executor import Executor
from jaxspec.engine.queue import Ticket
from jaxspec.requests.requests import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.telemetry.counters import Acceptance

CLEAR_GAIN = 0.02  # drafting must beat plain decoding by this, and a new length the current one
DOUBT = 2.0  # standard errors by which acceptance may be better than it looks, before drafts end
TRIAL_SHARE = 0.01  # of the time spent since the last trial: what a trial may cost
EARLY_TRIAL_SHARES = (0.04, 0.02)  # instead, for the first trials since drafting was ended
TRIAL_ROUNDS = 8  # of a trial, and between decisions while there is little evidence
RETIMED_AFTER = 256  # rounds since a kind of round was run: what it costs may have changed
FORGOTTEN_AFTER = 1024  # rounds of rows: older ones weigh less than 1/e
LITTLE_KNOWN = 64  # rounds of rows
PRIOR_ACCEPTANCE, PRIOR_ROUNDS = 0.7, 8  # assumed before any evidence, and its weight in rounds
MEASURED_ROUNDS = 9  # of every draft length, in each measurement
MEASUREMENTS, MOST_MEASUREMENTS = 3, 8  # more than the first only while a noisy machine needs them
CLEARLY_FASTER = 0.03  # a measurement that finds a round faster by this is followed by another
# Calls whose rounds are remembered, by draft length; the fastest of them counts. The first few do
# not yet outweigh what was measured, and calls of few rounds say little.
REMEMBERED_CALLS, FEW_CALLS, FEWEST_TIMED_ROUNDS = 64, 4, 4
UNTIMED_CALLS = 8  # in a row; the next is timed, although the device has to be waited for
SHORTEST_S = 1e-6  # a clock may measure nothing at all
WORTH_MEASURING = 512  # committed tokens: a context that costs visibly more than a short one


class RoundKind(NamedTuple):
    """What tells rounds of one engine apart: tokens drafted (0 is plain decoding) and the variant
    of the drafter (0 where there is one only, and of plain decoding)."""

    draft_length: int
    variant: int = 0


PLAIN = RoundKind(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Seconds per round for each draft length, measured at two contexts, linear in between.

    Attributes:
      short_context: committed tokens of the longest row, of the first measurement.
      long_context: of the second.
      short_s: seconds per round by draft length, from 0 to the longest, at the first.
      long_s: at the second.
      chunk_s: seconds in which the drafter reads a chunk of one row that it has not seen.
      call_s: seconds that a call takes besides its rounds.
      others: of the drafter's other variants, which draft the same.
    """

    short_context: int
    long_context: int
    short_s: Mapping[int, float]
    long_s: Mapping[int, float]
    chunk_s: float
    call_s: float = 0.0
    others: tuple[RoundTimes, ...] = ()

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Those that were measured, 0 among them, ascending."""
        return tuple(self.short_s)

    @property
    def kinds(self) -> tuple[RoundKind, ...]:
        """Plain decoding, then every draft length of each variant."""
        variants = range(1 + len(self.others))
        return (PLAIN, *(RoundKind(n, v) for v in variants for n in self.draft_lengths if n))

    def of(self, draft_length: int, context: int, variant: int = 0) -> float:
        """Seconds per round where the longest row has `context` committed tokens."""
        if variant > 0:
            return self.others[variant - 1].of(draft_length, context)
        span = max(self.long_context - self.short_context, 1)
        share = min(max((context - self.short_context) / span, 0.0), 1.0)
        short_s, long_s = self.short_s[draft_length], self.long_s[draft_length]
        return short_s + share * (long_s - short_s)


def draft_lengths_to_try(longest: int, *, drafts_one_by_one: bool) -> tuple[int, ...]:
    """Draft lengths between which the controller chooses, ascending from 0: every one where each
    draft costs something, and otherwise those that fill a window bucket."""
    if drafts_one_by_one:
        return tuple(range(longest + 1))
    return tuple(window - 1 for window in window_buckets(longest + 1))


def measure_round_times(
    rounds: MadeUpRequests, *, draft_lengths: Sequence[int], room: int
) -> RoundTimes:
    """Seconds per round of some draft lengths, at a short context and at a long one.

    Each is the minimum of a few measurements, taken in turns, of many rounds less one round; the
    difference leaves out the overhead of a call. There are more of them as long as they still find
    a round that is clearly faster than it seemed.

    The second context is as long as there is room for. It is skipped if that is short, because a
    row of a few blocks costs little more than one of a single block. Only one row is that long,
    which is enough for our own attention: it reads as many blocks as the longest row has. A kernel
    that reads only each row's own blocks is faster than these times suggest.

    Args:
      rounds: runs them.
      draft_lengths: to measure, ascending from 0.
      room: tokens of the longest prompt.
    """
    lengths = sorted(draft_lengths, reverse=True)  # plain decoding last: the drafter lags after it
    sizes = (1, MEASURED_ROUNDS)
    num_tokens = {length: sum(sizes) * (length + 1) for length in lengths}
    chunk_s: list[float] = []

    def timed(draft_length: int, num_rounds: int) -> float:
        started_s = time.perf_counter()
        rounds.run(draft_length, num_rounds)
        return time.perf_counter() - started_s

    def measure(prompt_length: int) -> dict[tuple[int, int], float]:
        """The least seconds found of each draft length and number of rounds."""
        least: dict[tuple[int, int], float] = {}
        for index in range(MOST_MEASUREMENTS if prompt_length == 1 else MEASUREMENTS):
            is_settled = index >= MEASUREMENTS - 1
            for length in lengths:
                if prompt_length == 1:
                    rounds.fill(prompt_length)
                for size in sizes:
                    seconds, key = timed(length, size), (length, size)
                    is_settled &= seconds > least.get(key, math.inf) * (1 - CLEARLY_FASTER)
                    least[key] = min(seconds, least.get(key, math.inf))
            started_s = time.perf_counter()
            num_chunks = rounds.catch_up()
            if num_chunks:
                chunk_s.append((time.perf_counter() - started_s) / num_chunks)
            if is_settled:
                break
        return least

    def per_round(least: Mapping[tuple[int, int], float]) -> dict[int, float]:
        more = MEASURED_ROUNDS - 1
        return {
            n: max(least[n, MEASURED_ROUNDS] - least[n, 1], SHORTEST_S) / more
            for n in reversed(lengths)
        }

    rounds.fill(1)
    for length in lengths:  # compiles the programs
        rounds.run(length, 1)
    rounds.catch_up()
    least = measure(1)
    short_s = long_s = per_round(least)
    short_context = max(num_tokens.values()) // 2
    long_context = room - MEASUREMENTS * sum(num_tokens.values())
    if long_context >= WORTH_MEASURING:
        rounds.fill(long_context)
        long_s = per_round(measure(long_context))
    return RoundTimes(
        short_context=short_context,
        long_context=max(long_context, short_context),
        short_s=short_s,
        long_s=long_s,
        chunk_s=min(chunk_s, default=0.0),
        call_s=max(min(least[n, 1] - short_s[n] for n in lengths), 0.0),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What to do next.

    Attributes:
      kind: of the rounds.
      num_rounds: after how many rounds to choose again.
    """

    kind: RoundKind
    num_rounds: int

    @property
    def draft_length(self) -> int:
        """Tokens to draft per round; 0 decodes plainly."""
        return self.kind.draft_length

    @property
    def variant(self) -> int:
        """Of the drafter, for `Executor.run`."""
        return self.kind.variant


class DraftLengthController:
    """Chooses among the kinds of rounds that `times` knows of.

    Args:
      times: of the engine's rounds, as far as they are known before any is run.
      is_chain: whether a drafted token can be accepted only after the one before it. The nodes of a
        tree are in the order of their worth, and the probability of each is that it is on the
        accepted path, whether the node before it is or not.
      corrects_times: whether `note` says how long rounds took; then kinds that were not run for
        long are tried, in case they cost less than they did.
      num_rows: of the batch.
    """

    def __init__(
        self,
        times: RoundTimes,
        *,
        is_chain: bool = True,
        corrects_times: bool = False,
        num_rows: int = 1,
    ):
        self.times, self.is_chain = times, is_chain
        self.corrects_times, self.num_rows = corrects_times, num_rows
        self.num_rounds: dict[int, int] = {}  # rounds run so far, by draft length
        self.forget_acceptance()
        # What rounds took lately, over what `times` says.
        self._time_ratios = {
            kind: collections.deque[float](maxlen=REMEMBERED_CALLS) for kind in times.kinds
        }
        # Rounds and seconds since each was last run; what was never run is to be tried soon.
        self._rounds_since = dict.fromkeys(times.kinds, RETIMED_AFTER)
        self._since_run_s = dict.fromkeys(times.kinds, 0.0)

    def forget_acceptance(self) -> None:
        """Starts again without evidence, as new weights ask for. What rounds take is kept."""
        longest = max(self.times.draft_lengths)
        # Of rounds whose drafts before position j were all accepted (of a tree: that drafted node
        # j): how many, and how many of them accepted position j too. All variants count, for they
        # draft the same.
        self._reached, self._accepted = [0.0] * longest, [0.0] * longest
        self._num_known = 0.0
        self._current: RoundKind | None = None
        self._is_trial = False
        self._since_trial_s = 0.0
        self._num_trials = 0  # that did not pay, since drafting was ended

    @property
    def draft_length(self) -> int | None:
        """The current choice, ignoring trials; None before the first."""
        return None if self._current is None else self._current.draft_length

    def acceptance(self, doubt: float = 0.0, *, is_cautious: bool = False) -> tuple[float, ...]:
        """Probability that the draft at each position is accepted, of a chain with all before it. A
        position that was seldom reached is assumed to be like the one before it.

        Args:
          doubt: standard errors to be added to what was found. The error meant is that of the sum
            up to a position, which is what the choice depends on; errors of the positions add up to
            more than that.
          is_cautious: assume of the n-th node of a tree that it has (n - 1) / n of the chance of
            the one before it.
        """
        found, chances, variances = [], [], []
        slopes: list[float] = []  # by how much the sum so far grows with each of the chances
        chance, all_before, error_before = PRIOR_ACCEPTANCE, 1.0, 0.0
        for index, (reached, accepted) in enumerate(
            zip(self._reached, self._accepted, strict=True)
        ):
            weight = reached + PRIOR_ROUNDS
            falls = is_cautious and not self.is_chain and index > 0
            prior = chance * index / (index + 1) if falls else chance
            chance = (accepted + PRIOR_ROUNDS * prior) / weight
            own = all_before * chance
            if doubt > 0:
                chances.append(chance)
                variances.append(chance * (1 - chance) / weight)
                slopes.append(0.0 if self.is_chain else 1.0)
                if self.is_chain:
                    slopes = [s + own / each for s, each in zip(slopes, chances, strict=True)]
                error = math.sqrt(
                    sum(s**2 * each for s, each in zip(slopes, variances, strict=True))
                )
                found.append(min(own + doubt * (error - error_before), 1.0))
                error_before = error
            else:
                found.append(own)
            if self.is_chain:
                all_before = own
        return tuple(found)

    def round_s(self, kind: RoundKind, context: int) -> float:
        """Seconds per round where the longest row has `context` committed tokens, as the rounds run
        lately say."""
        ratios = self._time_ratios[kind]
        measured = () if len(ratios) >= FEW_CALLS else (1.0,)
        return self._measured_s(kind, context) * min((*ratios, *measured))

    def _measured_s(self, kind: RoundKind, context: int) -> float:
        return self.times.of(kind.draft_length, context, kind.variant)

    def must_time(self, kind: RoundKind) -> bool:
        """Whether little is known of what rounds of this kind take by now."""
        return self._is_trial or len(self._time_ratios[kind]) < FEW_CALLS

    def tokens_per_s(
        self, context: int, chunks_per_token: float = 0.0, **assumed: Any
    ) -> dict[RoundKind, float]:
        """Expected of each kind of round, of one row; `chunks_per_token` as in `choose`, `assumed`
        as in `acceptance`."""
        acceptance, rates = self.acceptance(**assumed), {}
        for kind in self.times.kinds:
            emitted = 1.0 + sum(acceptance[: kind.draft_length])
            seconds = self.round_s(kind, context)
            if kind != PLAIN:
                seconds += emitted * chunks_per_token * self.times.chunk_s
            rates[kind] = emitted / seconds
        return rates

    def choose(
        self,
        *,
        context: int,
        num_rounds: int,
        count_unprefilled: Callable[[], int],
        chunks_per_token: float = 0.0,
    ) -> Choice:
        """The kind of the next rounds.

        Args:
          context: committed tokens of the longest running row.
          num_rounds: most rounds to the next decision.
          count_unprefilled: returns the chunks that the drafter would have to read first, of all
            rows; called only where they decide whether a trial is affordable.
          chunks_per_token: prompt chunks that the drafter reads per token that a row emits, summed
            over the rows.
        """
        rates_if = functools.partial(self.tokens_per_s, context, chunks_per_token)
        if self._current is not None and not self._is_trial:
            # Nodes that were never drafted would look best for ever, and a trial of so many of
            # them may never be affordable.
            likely = rates_if(is_cautious=self._current == PLAIN)
            other = self._affordable_trial(likely, context, count_unprefilled)
            if other is not None:
                self._is_trial = True
                return Choice(kind=other, num_rounds=min(num_rounds, TRIAL_ROUNDS))
            if self._current == PLAIN:
                return Choice(kind=PLAIN, num_rounds=num_rounds)
        worth = _worth(rates_if())
        if self._current != PLAIN and worth[PLAIN] == max(worth.values()):
            # Drafts that look too slow after a few rounds may have had bad luck, and a wrong end
            # of drafting is found out late.
            worth = _worth(rates_if(doubt=DOUBT))
        was_resting = self._current == PLAIN
        best = max(worth, key=worth.__getitem__)
        needed = 1.0 if best == PLAIN else 1 + CLEAR_GAIN
        if self._current is None or worth[best] > needed * worth[self._current]:
            self._current = best
        if self._is_trial or self._current == PLAIN:
            self._num_trials = self._num_trials + 1 if was_resting else 0
            self._is_trial, self._since_trial_s = False, 0.0
        if self._current == PLAIN:
            # Let a later trial outweigh the evidence by which drafting lost.
            self._forget(min(LITTLE_KNOWN / max(self._num_known, 1.0), 1.0))
        elif self._num_known < LITTLE_KNOWN:
            num_rounds = min(num_rounds, TRIAL_ROUNDS)
        return Choice(kind=self._current, num_rounds=num_rounds)

    def _affordable_trial(
        self,
        rates: Mapping[RoundKind, float],
        context: int,
        count_unprefilled: Callable[[], int],
    ) -> RoundKind | None:
        """Another kind than the current one that a few rounds should be spent on, if what they lose
        is a small share of the time that went by; arguments as in `choose`.

        From rest, what seems the best way to draft is tried for the sake of its acceptance. Others
        are tried for the sake of their times, each as often as its own part of that share allows,
        so that an expensive one does not keep the cheap ones waiting.
        """
        current = self._current
        assert current is not None, "what is current comes before what may be tried"
        budgets: dict[RoundKind, float] = {}
        others = [kind for kind in rates if kind != current]
        if current == PLAIN:
            best = max(others, key=rates.__getitem__)
            early = EARLY_TRIAL_SHARES[self._num_trials :]
            budgets[best] = (early[0] if early else TRIAL_SHARE) * self._since_trial_s
            others = [kind for kind in others if kind.variant != best.variant]
        if self.corrects_times:
            others.sort(key=lambda kind: (self._rounds_since[kind], rates[kind]), reverse=True)
            for kind in others:
                if self._rounds_since[kind] >= RETIMED_AFTER:
                    budgets[kind] = TRIAL_SHARE * self._since_run_s[kind] / len(rates)
        for kind, budget_s in budgets.items():
            lost_s = self.round_s(kind, context)
            if current == PLAIN:
                lost_s -= self.round_s(PLAIN, context)
            else:
                lost_s *= 1 - rates[kind] / rates[current]
            left_s = budget_s - TRIAL_ROUNDS * max(lost_s, 0.0)
            if left_s < 0:
                continue
            # What the drafter has to read when it drafts again.
            num_chunks = 0
            if current == PLAIN:
                num_chunks = count_unprefilled()
            elif kind == PLAIN:
                num_chunks = self.num_rows
            if num_chunks * self.times.chunk_s <= left_s:
                return kind
        return None

    def note(
        self,
        *,
        draft_length: int,
        variant: int = 0,
        context: int,
        num_rounds: int,
        num_row_rounds: int,
        num_accepted_at: Sequence[int],
        seconds: float | None = None,
    ) -> None:
        """Records the result of a choice.

        Args:
          draft_length: as chosen.
          variant: likewise.
          context: committed tokens of the longest row.
          num_rounds: rounds that were run.
          num_row_rounds: rounds summed over the rows that drafted this many tokens.
          num_accepted_at: of these, those that accepted position j (of a chain: and all before).
          seconds: that the rounds took, with one call; None if that is not known.
        """
        kind = RoundKind(draft_length, variant)
        self.num_rounds[draft_length] = self.num_rounds.get(draft_length, 0) + num_rounds
        if self.corrects_times and seconds is not None and num_rounds >= FEWEST_TIMED_ROUNDS:
            per_round_s = max(seconds - self.times.call_s, SHORTEST_S) / num_rounds
            self._time_ratios[kind].append(per_round_s / self._measured_s(kind, context))
        spent_s = num_rounds * self.round_s(kind, context)
        self._since_trial_s += spent_s
        for each in self.times.kinds:
            self._rounds_since[each] += num_rounds
            self._since_run_s[each] += spent_s
        self._rounds_since[kind], self._since_run_s[kind] = 0, 0.0
        if kind == PLAIN:
            return
        self._forget(max(1 - num_row_rounds / FORGOTTEN_AFTER, 0.0))
        self._num_known += num_row_rounds
        reached = [num_row_rounds] * draft_length
        if self.is_chain:
            reached[1:] = num_accepted_at[:-1]
        for j in range(draft_length):
            self._reached[j] += reached[j]
            self._accepted[j] += num_accepted_at[j]

    def _forget(self, share_kept: float) -> None:
        """Reduces the weight of the evidence."""
        self._num_known *= share_kept
        self._reached = [share_kept * reached for reached in self._reached]
        self._accepted = [share_kept * accepted for accepted in self._accepted]


def _worth(rates: Mapping[RoundKind, float]) -> dict[RoundKind, float]:
    """Rates as they are compared: plain decoding is certain, and drafting must beat it clearly."""
    return {kind: rate / (1 + CLEAR_GAIN * (kind != PLAIN)) for kind, rate in rates.items()}


class AdaptiveDrafting:
    """Chooses the draft lengths of an engine's rounds, and lets the drafter rest while 0 is chosen.

    Args:
      executor: whose rounds they are.
      draft_length: the longest.

    Attributes:
      controller: makes the choices; None until `prepare` has measured the rounds.
    """

    def __init__(self, executor: Executor, *, draft_length: int):
        self.controller: DraftLengthController | None = None
        self._executor = executor
        self._draft_length = draft_length
        self._choice: Choice | None = None  # of the rounds that `note` is called for next
        self._num_rounds: Any = 0  # run before these, by shard
        self._started_s: float | None = None  # when they were started; None if they are not timed
        self._num_untimed = 0  # calls since the last that was timed
        self._was_plain = False  # whether the last ones were plain steps

    def prepare(self, *, on_answer: Callable[[], None] | None = None) -> None:
        """Measures rounds, unless that was done. Every row must be empty, and is afterwards.

        Args:
          on_answer: called whenever the device has done what it was given.
        """
        if self.controller is None:
            requests = MadeUpRequests(
                self._executor, draft_length=self._draft_length, on_answer=on_answer
            )
            drafter = self._executor.loop.drafter
            lengths = draft_lengths_to_try(
                self._draft_length,
                drafts_one_by_one=drafter.is_chain and not drafter.drafts_at_once,
            )
            times, *others = (
                measure_round_times(
                    dataclasses.replace(requests, variant=variant),
                    draft_lengths=lengths if variant == 0 else lengths[1:],
                    room=self._executor.longest_prompt,
                )
                for variant in self._executor.variants
            )
            times = dataclasses.replace(times, others=tuple(others))
            self._executor.reset()
            self.controller = DraftLengthController(
                times,
                is_chain=drafter.is_chain,
                corrects_times=True,
                num_rows=self._executor.shape.batch_size,
            )

    @property
    def is_resting(self) -> bool:
        """Whether nothing is drafted, so that the drafter reads no prompts either."""
        return self.controller is not None and self.controller.draft_length == 0

    @property
    def rounds_by_draft_length(self) -> dict[int, int]:
        """Rounds run so far at each draft length that was chosen."""
        return {} if self.controller is None else dict(sorted(self.controller.num_rounds.items()))

    def choose(self, tickets: Mapping[int, Ticket], num_rounds: int) -> Choice:
        """Sets the draft length of all rows for the next rounds.

        Args:
          tickets: by row.
          num_rounds: at most.
        """
        executor, controller = self._executor, self.controller
        assert controller is not None, "prepare comes first"
        was_resting = self.is_resting
        lags = functools.cache(lambda: self._lags(tickets))
        drafting = [one for one in tickets.values() if not one.is_prefilling and one.draft_length]
        context = _longest_context(tickets)
        choice = controller.choose(
            context=context,
            num_rounds=num_rounds,
            count_unprefilled=lambda: sum(map(self._num_chunks, lags().values())),
            chunks_per_token=sum(
                self._num_chunks(one.prompt_length) / one.request.params.max_tokens
                for one in drafting
            ),
        )
        # A drafter that neither rested nor was left out of plain steps has seen everything.
        must_read = choice.draft_length > 0 and (was_resting or self._was_plain)
        if must_read:
            executor.catch_up(lags())
        self._was_plain = choice.draft_length == 0
        if executor.verify_length_for(choice.draft_length) > 1:  # else nothing can be drafted
            limits = np.zeros((executor.num_rows,), np.int32)
            for row, ticket in tickets.items():
                limits[row] = min(ticket.draft_length, choice.draft_length)
            executor.set_draft_limits(limits)
        self._choice = choice
        # Only rounds that begin on an idle device can be timed. Others do not wait for it, so that
        # the host works ahead of the device.
        if self._num_untimed >= UNTIMED_CALLS or controller.must_time(choice.kind):
            executor.wait()
        is_timed = executor.is_idle
        self._started_s = time.perf_counter() if is_timed else None
        self._num_untimed = 0 if is_timed else self._num_untimed + 1
        return choice

    def note(
        self,
        tickets: Mapping[int, Ticket],
        before: Mapping[int, Acceptance],
        num_rounds: np.ndarray,
        *,
        answered_s: float,
    ) -> None:
        """Tells the controller the result of the last choice, if there was one since the last call.

        Args:
          tickets: by row.
          before: their acceptance when the choice was made.
          num_rounds: run so far, by shard if there is a mesh.
          answered_s: when the device had run them, by `time.perf_counter`.
        """
        seconds = None if self._started_s is None else answered_s - self._started_s
        # An engine that lost its state counts from 0 again.
        before_these = np.where(num_rounds < self._num_rounds, 0, self._num_rounds)
        self._num_rounds = num_rounds
        choice, self._choice = self._choice, None
        if choice is None or self.controller is None:
            return
        new = [
            (before[row], ticket.acceptance)
            for row, ticket in tickets.items()
            if ticket.draft_length >= choice.draft_length and not ticket.is_prefilling
        ]
        self.controller.note(
            draft_length=choice.draft_length,
            variant=choice.variant,
            context=_longest_context(tickets),
            num_rounds=int(np.max(num_rounds - before_these)),
            num_row_rounds=sum(now.num_rounds - then.num_rounds for then, now in new),
            num_accepted_at=[
                sum(now.num_accepted_node(j) - then.num_accepted_node(j) for then, now in new)
                for j in range(choice.draft_length)
            ],
            seconds=seconds,
        )

    def _num_chunks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._executor.shape.prefill_chunk)

    def _lags(self, tickets: Mapping[int, Ticket]) -> dict[int, int]:
        """Tokens that the drafter has not seen, by row, of running rows that would draft. A lag of
        one is left out: the next round makes up for it."""
        lags = self._executor.lags()
        return {
            row: int(lags[row])
            for row, ticket in tickets.items()
            if not ticket.is_prefilling and ticket.draft_length > 0 and lags[row] > 1
        }


def _longest_context(tickets: Mapping[int, Ticket]) -> int:
    """Committed tokens of the longest running row."""
    return max(one.num_committed for one in tickets.values() if not one.is_prefilling)


@dataclasses.dataclass(frozen=True)
class MadeUpRequests:
    """Requests that fill an executor's rows, to measure its rounds. All calls wait for the device.

    Attributes:
      executor: the rows.
      draft_length: of the requests, the longest that is measured.
      on_answer: called after every wait.
      variant: of the drafter.
    """

    executor: Executor
    draft_length: int
    on_answer: Callable[[], None] | None = None
    variant: int = 0

    def fill(self, prompt_length: int) -> None:
        """Fills the batch with prompts of one token, the first one of `prompt_length`."""
        executor = self.executor
        executor.reset()
        params = SamplingParams(max_tokens=executor.shape.max_length, ignore_eos=True)
        for index, row in enumerate(executor.free_rows(())[: executor.shape.batch_size]):
            prompt = (0,) * (prompt_length if index == 0 else 1)
            request = Request(request_id=str(index), prompt_token_ids=prompt, params=params)
            executor.admit_and_prefill(row, request, draft_length=self.draft_length, arrival=index)
        self._wait()

    def run(self, draft_length: int, num_rounds: int) -> None:
        """Runs rounds that draft `draft_length` tokens."""
        executor = self.executor
        executor.set_draft_limits([draft_length] * executor.num_rows)
        executor.run(num_rounds, draft_length=draft_length, variant=self.variant)
        self._wait()

    def catch_up(self) -> int:
        """Lets the drafter read what it has not seen; returns the number of chunks."""
        lags = enumerate(self.executor.lags())
        num_chunks = self.executor.catch_up({row: int(lag) for row, lag in lags if lag > 1})
        self._wait()
        return num_chunks

    def _wait(self) -> None:
        jax.block_until_ready(self.executor.state)
        if self.on_answer is not None:
            self.on_answer()
