"""Adaptive draft length: how many tokens to draft in the next rounds, 0 being plain decoding.

A round that drafts n tokens emits `E(n) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_n` tokens per row,
where `a_j` is the probability that draft j is accepted if those before it are (2211.17192, section
3.3, without its assumption that it is the same at every position), and takes `t(n)` seconds,
including the round's share of the drafter's prompt prefill. The controller picks the n with the
highest `E(n) / t(n)`. Each variant of a drafter has a t of its own, and the controller picks the
variant together with n; those that draft the same tokens share E. It estimates `a_j` from the
running rows, and forgets old rounds slowly. Round times are measured on empty rows, with the
engine's own programs, and corrected by the rounds that requests run (`engine.round_times`). A
measured round scores every token that its kind may draft, whether or not the drafter found any.
With kernels that skip padding a later round may score fewer: its time is taken to lie between plain
decoding and the full round, by the share of drafts that is expected. (Where an n-gram drafter in
front of heads finds something on empty rows, the heads do not run; what they cost is learnt from
the rounds of requests.)

For a tree, n is the number of nodes. Nodes are ordered best first, so rounds that drafted more also
tell what the first n nodes would have emitted: E(n) is 1 plus the sum, over the first n nodes, of
the probability that a node is on the accepted path. Trees are large, and only the numbers of nodes
that fill a window bucket are considered.

Three rules limit the cost of a wrong choice. The controller drafts, and changes its draft length,
only for a clear gain. It stops drafting only when the acceptance seen makes it unlikely that drafts
pay: at batch 1, eight rounds of one request say little. And it tries another kind of round only
when the whole trial costs a small share of the time spent since the last one. While it rests, that
share starts high, because the end of drafting may have been bad luck, and halves with each trial
that does not pay. While it drafts, it tries only those kinds that may be faster, given how
uncertain their times are.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxspec.cache.pages import BLOCK
from jaxspec.decode.buckets import window_buckets
from jaxspec.decode.settings import default_draft_length
from jaxspec.engine.executor import Executor
from jaxspec.engine.queue import Ticket
from jaxspec.engine.round_times import (
    PLAIN,
    LearnedTimes,
    RoundKind,
    RoundTimes,
    measure_round_times,
)
from jaxspec.errors import warn_once
from jaxspec.requests.requests import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import DecodeState

CLEAR_GAIN = 0.02  # drafting must beat plain decoding by this, and a new length the current one
UNLIKE_GAIN = 0.1  # a variant that drafts other tokens must beat the drafter itself by this
DOUBT = 2.0  # standard errors by which acceptance may be better than it looks, before drafts end
# The share of the time since the last trial that the next trial may cost. While nothing is drafted
# it starts at the first share and halves with each trial that does not pay, down to the least one;
# while something is drafted it is `RETIMING_SHARE`.
FIRST_TRIAL_SHARE, LEAST_TRIAL_SHARE = 0.04, 0.005
RETIMING_SHARE = 0.01
# The kind that would be the fastest if it were `OPTIMISM` standard errors faster than it seems is
# tried if it would then beat the current one, `RETIMED_AFTER` rounds or more after the last trial.
OPTIMISM, RETIMED_AFTER = 2.5, 128
TRIAL_ROUNDS = 8  # of a trial, and between decisions while there is little evidence
FORGOTTEN_AFTER = 1024  # rounds of rows: older ones weigh less than 1/e
OTHERS_FORGOTTEN_AFTER = 16 * FORGOTTEN_AFTER  # of another variant: what was seen of this one
LITTLE_KNOWN = 64  # rounds of rows
PRIOR_ACCEPTANCE, PRIOR_ROUNDS = 0.7, 8  # assumed before any evidence, and its weight in rounds
FEW_CALLS, FEWEST_TIMED_ROUNDS = 4, 4  # calls of few rounds say little
UNTIMED_CALLS = 16  # in a row; the next is timed, although the device has to be waited for
RUNS_PER_CHOICE = 4  # calls that follow one choice, where rounds start ahead of the host
LOOK_AGAIN = 0.05  # of the time since the last trial: while no trial is affordable, when to look


def draft_lengths_to_try(longest: int, *, drafts_one_by_one: bool) -> tuple[int, ...]:
    """Draft lengths between which the controller chooses, ascending from 0: every one where each
    draft costs something, and otherwise those that fill a window bucket."""
    if drafts_one_by_one:
        return tuple(range(longest + 1))
    return tuple(window - 1 for window in window_buckets(longest + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What to do next.

    Attributes:
      kind: the kind of the next rounds.
      num_rounds: the number of rounds after which to choose again.
    """

    kind: RoundKind
    num_rounds: int

    @property
    def draft_length(self) -> int:
        """Tokens to draft per round; 0 decodes plainly."""
        return self.kind.draft_length

    @property
    def variant(self) -> int:
        """The drafter's variant; see `Executor.run`."""
        return self.kind.variant


@dataclasses.dataclass
class Evidence:
    """What rounds of rows have shown of the drafts at each position, old rounds weighing less.

    Attributes:
      reached: rounds whose drafts before the position were all accepted (of a tree: that drafted
        the node).
      accepted: how many of these accepted the draft at the position, too.
      asked: rounds of rows that asked for a draft at the position.
      drafted: how many of these got one.
      num_known: rounds of rows.
    """

    reached: list[float]
    accepted: list[float]
    asked: list[float]
    drafted: list[float]
    num_known: float = 0.0

    @classmethod
    def none(cls, longest: int) -> Evidence:
        """No evidence yet, of drafts of up to `longest` tokens."""
        reached, accepted, asked, drafted = ([0.0] * longest for _ in range(4))
        return cls(reached, accepted, asked, drafted)

    def forget(self, share_kept: float) -> None:
        """Reduces the weight of what was seen so far."""
        self.num_known *= share_kept
        for counts in (self.reached, self.accepted, self.asked, self.drafted):
            counts[:] = [share_kept * count for count in counts]


class DraftLengthController:
    """Chooses among the kinds of rounds that `times` knows of.

    Args:
      times: seconds per round of each kind, as measured before any request.
      is_chain: whether a drafted token can be accepted only after the one before it. The nodes of a
        tree are ordered best first, and the probability of each is that it is on the accepted path,
        whether or not the node before it is.
      num_rows: B, rows of the batch.
      skips_padding: whether a round costs what was drafted, rather than what could have been.
      variants_draft_alike: see `Drafter.variants_draft_alike`.
    """

    def __init__(
        self,
        times: RoundTimes,
        *,
        is_chain: bool = True,
        num_rows: int = 1,
        skips_padding: bool = False,
        variants_draft_alike: bool = True,
    ):
        self.times = LearnedTimes(times)
        self.is_chain, self.num_rows = is_chain, num_rows
        self.skips_padding = skips_padding and is_chain
        self.variants_draft_alike = variants_draft_alike
        self.num_rounds: dict[RoundKind, int] = {}  # run so far
        self._longest = times.longest
        self._spent_s = 0.0  # by all rounds so far
        self.forget_acceptance()

    def forget_acceptance(self) -> None:
        """Starts again without evidence, as new weights ask for. What rounds take is kept."""
        # By variant, if they draft different tokens.
        variants = {0 if self.variants_draft_alike else kind.variant for kind in self.times.kinds}
        self._evidence = {variant: Evidence.none(self._longest) for variant in sorted(variants)}
        self._current: RoundKind | None = None
        self._is_trial = False
        self._num_trials = 0  # since drafting was last ended
        self._ended_with = 0.0  # `chunks_per_token` when drafting was last found not to pay
        # Values of `_spent_s`: at the last trial, and from which on to look for another one.
        self._tried_at_s = self._look_at_s = self._spent_s
        self._rounds_since_trial = 0

    @property
    def draft_length(self) -> int | None:
        """The current choice, ignoring trials; None before the first."""
        return None if self._current is None else self._current.draft_length

    def _evidence_of(self, variant: int) -> Evidence:
        return self._evidence[0 if self.variants_draft_alike else variant]

    def acceptance(
        self, doubt: float = 0.0, *, variant: int = 0, is_cautious: bool = False
    ) -> tuple[float, ...]:
        """Probability that the draft at each position is accepted; in a chain, together with all
        before it. A position that was rarely reached is assumed to be like the one before it, and
        that of a variant which drafts other tokens to be like the drafter's own.

        Args:
          doubt: number of standard errors by which to raise the result. They are errors of the sum
            up to a position, on which the choice depends, and smaller than the sum of the
            positions' own errors.
          variant: of the drafter.
          is_cautious: for a tree, assume (n - 1) / n of the previous node's probability as the
            prior of the n-th node, instead of all of it.
        """
        found, chances, variances = [], [], []
        slopes: list[float] = []  # by how much the sum so far grows with each of the chances
        chance, all_before, error_before = PRIOR_ACCEPTANCE, 1.0, 0.0
        seen = [self._evidence[0]]
        if variant and not self.variants_draft_alike:
            seen.append(self._evidence[variant])
        for index in range(self._longest):
            falls = is_cautious and not self.is_chain and index > 0
            chance = chance * index / (index + 1) if falls else chance
            weight = 0.0
            for evidence in seen:
                weight = evidence.reached[index] + PRIOR_ROUNDS
                chance = (evidence.accepted[index] + PRIOR_ROUNDS * chance) / weight
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

    def live_share(self, kind: RoundKind) -> float:
        """Share of this kind's drafts that the drafter is expected to make."""
        found, share = [], 1.0
        evidence = self._evidence_of(kind.variant)
        for asked, drafted in zip(evidence.asked, evidence.drafted, strict=True):
            share = (drafted + PRIOR_ROUNDS * share) / (asked + PRIOR_ROUNDS)
            found.append(share)
        return sum(found[: kind.draft_length]) / max(kind.draft_length, 1)

    def _round_s(self, kind: RoundKind, context: int) -> float:
        """Seconds expected of a round."""
        return self.times.round_s(kind, context, self.live_share(kind))

    def must_time(self, kind: RoundKind) -> bool:
        """Whether little is known of what rounds of this kind take by now."""
        return self._is_trial or self.times.num_timed(kind) < FEW_CALLS

    def tokens_per_s(
        self, context: int, chunks_per_token: float = 0.0, **assumed: Any
    ) -> dict[RoundKind, float]:
        """Expected of each kind of round, of one row; `chunks_per_token` as in `choose`, `assumed`
        as in `acceptance`."""
        acceptance, rates = {v: self.acceptance(variant=v, **assumed) for v in self._evidence}, {}
        for kind in self.times.kinds:
            chances = acceptance.get(kind.variant, acceptance[0])
            emitted = 1.0 + sum(chances[: kind.draft_length])
            seconds = self._round_s(kind, context)
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
        # Drafting may have been ended for requests whose prompts cost the drafter more than these.
        is_lighter = self._current == PLAIN and chunks_per_token < self._ended_with / 2
        if self._current is not None and not self._is_trial and not is_lighter:
            if self._current == PLAIN and self._spent_s < self._look_at_s:
                return Choice(kind=PLAIN, num_rounds=num_rounds)
            # Nodes that were never drafted would look best forever, and a trial of so many of
            # them may never be affordable.
            likely = rates_if(is_cautious=self._current == PLAIN)
            other = self._affordable_trial(likely, context, count_unprefilled)
            if other is not None:
                self._is_trial = True
                return Choice(kind=other, num_rounds=min(num_rounds, TRIAL_ROUNDS))
            if self._current == PLAIN:
                self._look_at_s = self._spent_s + LOOK_AGAIN * (self._spent_s - self._tried_at_s)
                return Choice(kind=PLAIN, num_rounds=num_rounds)
        compared = self._comparable(rates_if(is_cautious=is_lighter))
        if self._current != PLAIN and compared[PLAIN] == max(compared.values()):
            # Drafts that look too slow after a few rounds may have had bad luck, and a wrong end
            # of drafting is found out late.
            compared = self._comparable(rates_if(doubt=DOUBT))
        was_resting = self._current == PLAIN
        best = max(compared, key=compared.__getitem__)
        needed = 1.0 if best == PLAIN else 1 + CLEAR_GAIN
        if self._current is None or compared[best] > needed * compared[self._current]:
            self._current = best
        if self._is_trial or self._current == PLAIN:
            self._num_trials = self._num_trials + 1 if was_resting else 0
            self._is_trial, self._tried_at_s, self._rounds_since_trial = False, self._spent_s, 0
        if self._current == PLAIN:
            self._ended_with = chunks_per_token
            # Let a later trial outweigh the evidence by which drafting lost.
            for evidence in self._evidence.values():
                evidence.forget(min(LITTLE_KNOWN / max(evidence.num_known, 1.0), 1.0))
        elif self._evidence_of(self._current.variant).num_known < LITTLE_KNOWN:
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

        While nothing is drafted, what seems the best way to draft is tried for the sake of its
        acceptance. The kind that may be the fastest, given how uncertain its time is, is tried for
        the sake of its time.
        """
        current = self._current
        assert current is not None, "what is current comes before what may be tried"
        others = [kind for kind in rates if kind != current]
        tried: list[RoundKind] = []
        hopes = {k: rates[k] * math.exp(OPTIMISM * self.times.error(k, current)) for k in others}
        fastest = max(others, key=hopes.__getitem__)
        is_due = self.times.num_timed(current) and self._rounds_since_trial >= RETIMED_AFTER
        if is_due and hopes[fastest] > rates[current]:
            tried.append(fastest)
        share = RETIMING_SHARE
        if current == PLAIN:
            tried.append(max(others, key=rates.__getitem__))
            share = max(FIRST_TRIAL_SHARE * 0.5**self._num_trials, LEAST_TRIAL_SHARE)
        for kind in tried:
            lost_s = self._round_s(kind, context)
            if current == PLAIN:
                lost_s -= self._round_s(PLAIN, context)
            else:
                lost_s *= 1 - rates[kind] / rates[current]
            left_s = share * (self._spent_s - self._tried_at_s) - TRIAL_ROUNDS * max(lost_s, 0.0)
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
        num_drafted_at: Sequence[int] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Records the result of a choice.

        Args:
          draft_length: the `Choice.draft_length` that was run.
          variant: its `Choice.variant`.
          context: committed tokens of the longest row.
          num_rounds: rounds that were run.
          num_row_rounds: rounds summed over the rows that drafted this many tokens.
          num_accepted_at: for each position j, how many of these row rounds accepted it (in a
            chain: and all positions before it).
          num_drafted_at: for each position j, how many of them had a draft there; None for all.
          seconds: how long the call that ran the rounds took; None if it was not timed.
        """
        kind = RoundKind(draft_length, variant)
        self.num_rounds[kind] = self.num_rounds.get(kind, 0) + num_rounds
        self._rounds_since_trial += num_rounds
        self.times.pass_rounds(num_rounds)
        asked = [num_row_rounds] * draft_length
        drafted = asked if num_drafted_at is None or not self.skips_padding else num_drafted_at
        live = sum(drafted) / sum(asked) if sum(asked) else 1.0
        if seconds is not None and num_rounds >= FEWEST_TIMED_ROUNDS:
            self.times.note(kind, context, num_rounds, seconds, live)
        self._spent_s += num_rounds * self.times.round_s(kind, context, live)
        if kind == PLAIN:
            return
        evidence = self._evidence_of(variant)
        for each in self._evidence.values():
            after = FORGOTTEN_AFTER if each is evidence else OTHERS_FORGOTTEN_AFTER
            each.forget(max(1 - num_row_rounds / after, 0.0))
        evidence.num_known += num_row_rounds
        reached = list(asked)
        if self.is_chain:
            reached[1:] = num_accepted_at[:-1]
        for j in range(draft_length):
            evidence.asked[j] += asked[j]
            evidence.drafted[j] += drafted[j]
            evidence.reached[j] += reached[j]
            evidence.accepted[j] += num_accepted_at[j]

    def _comparable(self, rates: Mapping[RoundKind, float]) -> dict[RoundKind, float]:
        """Rates as they are compared: plain decoding is certain, drafting must beat it clearly, and
        a variant that drafts other tokens must beat the drafter itself by more."""
        found = {}
        for kind, rate in rates.items():
            is_unlike = kind.variant > 0 and not self.variants_draft_alike
            found[kind] = rate / (1 + CLEAR_GAIN * (kind != PLAIN)) / (1 + UNLIKE_GAIN * is_unlike)
        return found


class FixedDrafting:
    """Leaves the draft lengths of an engine's rounds as the requests ask.

    `EngineCore` calls `before_rounds` and `after_rounds` around the rounds of a step.

    Attributes:
      state_fields: fields of `DecodeState` that `after_rounds` reads, beside those of acceptance.
    """

    state_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_measuring(self) -> bool:
        """Whether `prepare` has rounds to measure."""
        return False

    @property
    def is_resting(self) -> bool:
        """Whether nothing is drafted, so that the drafter reads no prompts either."""
        return False

    def prepare(self, *, on_answer: Callable[[], None] | None = None) -> None:
        """Measures rounds, if that is needed. Every row must be empty, and is afterwards.

        Args:
          on_answer: called whenever the device has done what it was given.
        """

    def first_limit(self, ticket: Ticket) -> int:
        """The draft length with which a ticket's row begins."""
        return ticket.draft_length

    @property
    def runs_ahead(self) -> bool:
        """Whether the next rounds may start before the result of the last ones is known."""
        return True

    def before_rounds(
        self, tickets: Mapping[int, Ticket], num_rounds: int, *, is_ahead: bool = False
    ) -> Choice:
        """The kind and number of the next rounds.

        Args:
          tickets: by row.
          num_rounds: at most.
          is_ahead: whether `after_rounds` is still to be called for the last ones; only if
            `runs_ahead`.
        """
        return Choice(kind=RoundKind(_longest_draft(tickets)), num_rounds=num_rounds)

    def after_rounds(
        self, tickets: Mapping[int, Ticket], state: DecodeState, *, answered_s: float
    ) -> None:
        """Learns from rounds; it is called once for each call that ran rounds, in order.

        Args:
          tickets: by row, with what they had emitted after the rounds.
          state: with `state_fields`, on the host, after the rounds.
          answered_s: when the device had run the rounds, by `time.perf_counter`.
        """


class AdaptiveDrafting(FixedDrafting):
    """Chooses the draft lengths of an engine's rounds, and lets the drafter rest while 0 is chosen.

    Args:
      executor: whose rounds they are.
      draft_length: the longest.

    Attributes:
      controller: makes the choices; None until `prepare` has measured the rounds. Until then the
        default draft length is used.
      rests: whether rounds that draft nothing leave the draft steps out at the same width: False if
        they gave other bits, None where there are narrower windows, or before it was tried.
    """

    state_fields: ClassVar[tuple[str, ...]] = ("schedule",)

    def __init__(self, executor: Executor, *, draft_length: int):
        self.controller: DraftLengthController | None = None
        self.rests: bool | None = None
        self._executor = executor
        self._draft_length = draft_length
        drafter = executor.parts.drafter
        self._unmeasured = RoundKind(
            min(default_draft_length(drafter), draft_length),
            drafter.choose_variant(executor.shape) if len(executor.variants) > 1 else 0,
        )
        # Of the rounds that `after_rounds` is called for next, and what tickets had emitted before.
        self._choice: Choice | None = None
        self._ahead: Choice | None = None  # for the rounds after these, unless chosen anew
        self._before: dict[Ticket, Acceptance] = {}
        self._num_rounds: Any = 0  # run before these, by shard
        self._started_s: float | None = None  # when they were started; None if they are not timed
        self._num_untimed = 0  # calls since the last that was timed
        self._was_plain = False  # whether the last ones were plain steps
        self._verify_length = 0  # of the last ones

    def prepare(self, *, on_answer: Callable[[], None] | None = None) -> None:
        """Measures rounds, unless that was done; see `FixedDrafting`."""
        if self.controller is None:
            requests = MadeUpRequests(
                self._executor, draft_length=self._draft_length, on_answer=on_answer
            )
            self._try_to_rest(requests)
            self._try_variants(requests)
            drafter = self._executor.parts.drafter
            lengths = draft_lengths_to_try(
                self._draft_length,
                drafts_one_by_one=drafter.is_chain and not drafter.drafts_at_once,
            )
            kinds = (
                PLAIN,
                *(RoundKind(n, v) for v in self._executor.variants for n in lengths if n),
            )
            windows = {kind: self._executor.verify_length_for(kind.draft_length) for kind in kinds}
            try:
                times = measure_round_times(
                    requests, windows=windows, room=self._executor.longest_prompt
                )
            finally:  # also after a Ctrl-C
                self._executor.reset()
            self.controller = DraftLengthController(
                times,
                is_chain=drafter.is_chain,
                num_rows=self._executor.shape.batch_size,
                skips_padding=self._executor.parts.skips_padding,
                variants_draft_alike=drafter.variants_draft_alike,
            )

    def _try_to_rest(self, requests: MadeUpRequests) -> None:
        """Lets rounds that draft nothing leave the draft steps out, if that changes no bit."""
        executor = self._executor
        if "rest" not in executor.programs or self.rests is not None:
            return
        with_draft_steps = requests.bits_of_resting_rounds()
        executor.is_resting_program_used = True
        try:
            self.rests = requests.bits_of_resting_rounds() == with_draft_steps
        finally:
            executor.is_resting_program_used = bool(self.rests)
        if not self.rests:
            warn_once(
                f"Rounds of {executor.parts.target.name} without draft steps gave other bits than "
                'rounds with them, so draft_length="auto" keeps the draft steps even where drafts '
                'do not pay; choose exactness="ties" to have it decode plainly there.'
            )

    def _try_variants(self, requests: MadeUpRequests) -> None:
        """Leaves out variants of the drafter whose rounds change bits, where that is not known."""
        executor = self._executor
        if executor.are_variants_exact or len(executor.variants) == 1:
            return
        executor.is_resting_program_used = False
        try:
            found = {each: requests.bits_of_resting_rounds(each) for each in executor.variants}
        finally:
            executor.is_resting_program_used = bool(self.rests)
        executor.variants = tuple(each for each, bits in found.items() if bits == found[0])

    @property
    def needs_measuring(self) -> bool:
        """Until `prepare` has measured the rounds."""
        return self.controller is None

    @property
    def is_resting(self) -> bool:
        """While the choice is to draft nothing."""
        return self.controller is not None and self.controller.draft_length == 0

    @property
    def rounds_by_draft_length(self) -> dict[int, int]:
        """Rounds run so far at each draft length that was chosen."""
        return self._num_rounds_by("draft_length")

    @property
    def rounds_by_variant(self) -> dict[int, int]:
        """Rounds run so far with each of the drafter's variants, plain decoding with the first."""
        return self._num_rounds_by("variant")

    def _num_rounds_by(self, field: str) -> dict[int, int]:
        found: collections.Counter[int] = collections.Counter()
        for kind, count in ({} if self.controller is None else self.controller.num_rounds).items():
            found[getattr(kind, field)] += count
        return dict(sorted(found.items()))

    def first_limit(self, ticket: Ticket) -> int:
        """The draft length with which a ticket's row begins: that of the current choice, so that it
        need seldom be set before the next rounds."""
        if self.controller is None:
            chosen = self._unmeasured.draft_length
        else:
            chosen = self.controller.draft_length
        return ticket.draft_length if chosen is None else min(ticket.draft_length, chosen)

    @property
    def runs_ahead(self) -> bool:
        """As long as the last choice holds, unless its rounds are timed; see `FixedDrafting`."""
        return self._ahead is not None

    def before_rounds(
        self, tickets: Mapping[int, Ticket], num_rounds: int, *, is_ahead: bool = False
    ) -> Choice:
        """Sets the draft length of all rows for the next rounds; see `FixedDrafting`."""
        longest = _longest_draft(tickets)
        if is_ahead:
            assert self._ahead is not None, "only if `runs_ahead`"
            choice = self._ahead
            self._num_untimed += 1
        else:
            self._choice = self._started_s = None
            most = num_rounds * (RUNS_PER_CHOICE if self._executor.runs_ahead else 1)
            choice = Choice(kind=PLAIN, num_rounds=most)
            if longest > 0:
                choice = self._choose(tickets, most)
        num_rounds = min(num_rounds, choice.num_rounds)
        num_left, self._ahead = choice.num_rounds - num_rounds, None
        if num_left and self._started_s is None:
            self._ahead = dataclasses.replace(choice, num_rounds=num_left)
        kind = choice.kind._replace(draft_length=min(longest, choice.draft_length))
        return Choice(kind=kind, num_rounds=num_rounds)

    def _choose(self, tickets: Mapping[int, Ticket], num_rounds: int) -> Choice:
        executor, controller = self._executor, self.controller
        if controller is None:  # rows were admitted with this draft length
            return Choice(kind=self._unmeasured, num_rounds=num_rounds)
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
        # A drafter that neither rested nor was left out of plain steps has seen everything, but for
        # tokens that n-grams drafted for it in wider windows.
        verify_length = executor.verify_length_for(choice.draft_length)
        is_narrower = verify_length < self._verify_length
        self._verify_length = verify_length
        must_read = choice.draft_length > 0 and (was_resting or self._was_plain or is_narrower)
        if must_read:
            executor.catch_up(lags())
        self._was_plain = choice.draft_length == 0
        if verify_length > 1:  # else nothing can be drafted
            self._set_draft_limits(tickets, choice.draft_length)
        self._choice = choice
        self._before = {ticket: ticket.acceptance for ticket in tickets.values()}
        # Only rounds that begin on an idle device can be timed. Others do not wait for it, so that
        # the host works ahead of the device; and plain steps need not all be timed.
        must_time = self._num_untimed >= UNTIMED_CALLS or controller.must_time(choice.kind)
        if must_time:
            executor.wait()
        is_free = choice.draft_length > 0 and not executor.runs_ahead and executor.is_idle
        is_timed = must_time or is_free
        self._started_s = time.perf_counter() if is_timed else None
        self._num_untimed = 0 if is_timed else self._num_untimed + 1
        return choice

    def after_rounds(
        self, tickets: Mapping[int, Ticket], state: DecodeState, *, answered_s: float
    ) -> None:
        """Tells the controller the result of the last choice, if there was one; see
        `FixedDrafting`."""
        num_rounds = np.asarray(state.num_rounds)  # by shard if there is a mesh
        seconds = None if self._started_s is None else answered_s - self._started_s
        # An engine that lost its state counts from 0 again.
        before_these = np.where(num_rounds < self._num_rounds, 0, self._num_rounds)
        self._num_rounds = num_rounds
        choice = self._choice
        if choice is None or self.controller is None or not tickets:
            return
        new = [
            (self._before[ticket], ticket.acceptance)
            for ticket in tickets.values()
            if ticket in self._before  # if the rounds failed, others may have the rows by now
            and ticket.draft_length >= choice.draft_length
            and not ticket.is_prefilling
        ]
        self._before = {ticket: ticket.acceptance for ticket in tickets.values()}
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
            num_drafted_at=[
                sum(now.num_drafted_at(j) - then.num_drafted_at(j) for then, now in new)
                for j in range(choice.draft_length)
            ],
            seconds=seconds,
        )

    def _set_draft_limits(self, tickets: Mapping[int, Ticket], draft_length: int) -> None:
        """Lets the rows of these tickets draft as many tokens, if they do not already."""
        limits = np.zeros((self._executor.num_rows,), np.int32)
        is_set = True
        for row, ticket in tickets.items():
            limits[row] = min(ticket.draft_length, draft_length)
            is_set = is_set and ticket.draft_limit == limits[row]
            ticket.draft_limit = int(limits[row])
        if not is_set:
            self._executor.set_draft_limits(limits)

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


def _longest_draft(tickets: Mapping[int, Ticket]) -> int:
    """Tokens that running rows draft at most."""
    return max(ticket.draft_length for ticket in tickets.values() if not ticket.is_prefilling)


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
    """

    executor: Executor
    draft_length: int
    on_answer: Callable[[], None] | None = None

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

    def run(self, kind: RoundKind, num_rounds: int) -> None:
        """Runs rounds of a kind."""
        executor = self.executor
        executor.set_draft_limits([kind.draft_length] * executor.num_rows)
        executor.set_least_live(1 + kind.draft_length)
        executor.run(num_rounds, draft_length=kind.draft_length, variant=kind.variant)
        self._wait()

    def bits_of_resting_rounds(self, variant: int = 0, num_rounds: int = 8) -> list[bytes]:
        """Tokens, log-probabilities and KV after rounds that draft nothing: of prompts on both
        sides of a block's end, every other row sampled. Every row is empty afterwards.

        Args:
          variant: of the drafter, whose program runs unless that of resting rounds is used.
          num_rounds: to run.
        """
        executor = self.executor
        longest = min(executor.longest_prompt, executor.shape.max_length - num_rounds, BLOCK + 1)
        executor.reset()
        try:
            rows = executor.free_rows(())[: executor.shape.batch_size]
            for index, row in enumerate(rows):
                length = 1 + (longest - 1) * (len(rows) - index - 1) // max(len(rows) - 1, 1)
                prompt = np.random.default_rng(index).integers(
                    executor.shape.vocab_size, size=length
                )
                request = Request(
                    request_id=str(index),
                    prompt_token_ids=tuple(map(int, prompt)),
                    params=SamplingParams(
                        max_tokens=num_rounds,
                        temperature=float(index % 2),
                        top_p=0.9,
                        seed=index,
                        ignore_eos=True,
                        logprobs=None if executor.parts.logprobs is None else 0,
                    ),
                )
                executor.admit_and_prefill(row, request, draft_length=0, arrival=index)
            executor.run(num_rounds, draft_length=0, variant=variant)
            self._wait()
            bits = [executor.committed_kv(row) for row in rows]
            bits.append(executor.fetch("tokens", "num_committed", "logprobs"))
            return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(bits)]
        finally:
            executor.reset()

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
