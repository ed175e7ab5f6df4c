"""Why two outputs diverge, or why an output is not the target's own: tie, fault, or another draw.

Two correct programs differ only by rounding. Let each logit differ by at most n between them. Then
a token x can have been drawn in one of them only if it may have survived the filters (top-k, top-p,
min-p), and no token that certainly survived them lies more than 2 n above it. The smallest 2 n for
which that holds is the *margin* of x: 0 for the token that wins by the fp32 logits, the gap to the
winner for any other token where no filter is set. For a sampled request the logits are perturbed by
the keyed noise of the position, the same in every program.

The margin is compared with a *bound* on 2 n: how far rounding moves the gap between two tokens, as
`jaxspec.audit.noise` measures it, and at least the rounding of the two logits themselves.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.audit.evidence import ALPHA, Bets, bets_of
from jaxspec.audit.evidence import log_evidence as of_bets
from jaxspec.audit.noise import OTHERS_FACTOR, GapNoise, measure_noise
from jaxspec.audit.scoring import Scorer
from jaxspec.audit.segment import Segment
from jaxspec.models.base import Model
from jaxspec.requests.completions import Completion
from jaxspec.requests.sampling_params import SamplingParams


class Finding(enum.StrEnum):
    """Why an output differs from what was expected.

    TIE: rounding explains it. FAULT: nothing legitimate explains it. SAMPLING: it is not the keyed
    draw, but the output may well follow the target's distribution, with another seed, verifier or
    engine.
    """

    TIE = "tie"
    FAULT = "fault"
    SAMPLING = "sampling"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """One place where an output is not what was expected. Logits are fp32, after biases and
    penalties. The defaults are for an output that ends where its reference does not, or for an id
    outside the vocabulary.

    Attributes:
      index: index of the token in the output.
      token: the output's token; -1 where the output ends too early.
      expected: the reference's token (-1 where it ended), or the target's own.
      gap: logit of `expected` minus that of `token`, both with the position's noise if sampled;
        -inf or inf if one of them does not exist.
      margin: how far logits must move apart for both tokens to be drawn; see the module.
      scale: of the changes that rounding makes to the gap; see `noise.GapNoise`.
      bound: what rounding explains; a margin up to that is a tie.
      chance: probability that rounding moves the gap by so much and in that direction, in an engine
        whose changes are `noise.OTHERS_FACTOR` times ours.
      filter_distance: how far logits must move apart for the filters to decide differently about
        `token`; None if no filter is set.
      log_probs: log-probability of `token` under the distribution of a sampled request; None for a
        greedy one.
      log_evidence: log of the evidence against the distribution in the output from here on; see
        `jaxspec.audit.evidence`. None for a greedy request.
      finding: the verdict.
    """

    index: int
    token: int
    expected: int
    gap: float = math.inf
    margin: float = math.inf
    scale: float = 0.0
    bound: float = 0.0
    chance: float = 0.0
    filter_distance: float | None = None
    log_probs: float | None = None
    log_evidence: float | None = None
    finding: Finding = Finding.FAULT

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values; infinite numbers as text."""
        fields = {name: json_number(x) for name, x in dataclasses.asdict(self).items()}
        return fields | {"finding": self.finding.value}


def json_number(value: Any) -> Any:
    """The value; as text if it is infinite, and None for NaN, because JSON has neither."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of no values."""
    return float(np.mean(values)) if len(values) else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergences:
    """Outputs compared with their references: which of them differ, and why.

    Attributes:
      num_outputs: outputs compared.
      differing: indices of the outputs whose tokens differ.
      judged: the first divergence of each of these, by index; only up to the first one that is not
        a tie if `judge_all` was asked to stop there.
    """

    num_outputs: int
    differing: tuple[int, ...]
    judged: Mapping[int, Divergence]

    @property
    def num_equal(self) -> int:
        """Outputs that are equal in every token."""
        return self.num_outputs - len(self.differing)

    def count(self, finding: Finding) -> int:
        """Number of outputs whose first divergence has this finding."""
        return sum(divergence.finding == finding for divergence in self.judged.values())

    @property
    def first_wrong(self) -> int | None:
        """Index of the first output whose divergence is not a tie."""
        return next((i for i, d in self.judged.items() if d.finding != Finding.TIE), None)

    @property
    def are_ties(self) -> bool:
        """Whether every difference is a tie; True if there is none."""
        return self.first_wrong is None

    def describe(self) -> str:
        """What was found, in words."""
        if not self.differing:
            return f"all {self.num_outputs} outputs equal the reference"
        differ = f"{len(self.differing)} of {self.num_outputs} outputs differ"
        if self.first_wrong is None:
            return f"{differ}, all at ties"
        d = self.judged[self.first_wrong]
        if d.token < 0:
            what = f"ends at token {d.index}, where the reference goes on"
        elif d.expected < 0:
            what = f"goes on at token {d.index}, where the reference has ended"
        else:
            what = (
                f"token {d.index} is {d.token}, not {d.expected} "
                f"(margin {d.margin:.2g}, a tie up to {d.bound:.1g})"
            )
        return f"{differ}; request {self.first_wrong} {what}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnOutput:
    """How far an output is the target's own, with each token judged given the tokens before it.

    Attributes:
      num_tokens: number of tokens judged.
      gaps: `[n]` fp32, the lead of the best token at each position of the vocabulary's tokens; see
        `Segment.gap`.
      divergences: every token that the target would not have emitted there by its fp32 logits; for
        a sampled output without a seed, only those that its distribution excludes.
      bets: the bets against the distribution, over a whole sampled output; None for a greedy one.
    """

    num_tokens: int
    gaps: np.ndarray
    divergences: tuple[Divergence, ...]
    bets: Bets | None

    @property
    def log_evidence(self) -> float | None:
        """The log of the bets' evidence."""
        return None if self.bets is None else self.bets.log_evidence

    @property
    def first(self) -> Divergence | None:
        """The first divergence that rounding does not explain."""
        return next((d for d in self.divergences if d.finding != Finding.TIE), None)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length if one continues the other, or
    None if they are equal."""
    pairs = enumerate(itertools.zip_longest(a, b))
    return next((index for index, (x, y) in pairs if x != y), None)


def judge(
    scorer: Scorer,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    reference_ids: Sequence[int],
    params: SamplingParams,
    noise: GapNoise | None = None,
) -> Divergence | None:
    """Where an output differs from a reference, and why; None if it does not.

    Both follow `prompt_ids`, are cut after the stop token, and were drawn with `params` (which
    include the seed if sampled). The scorer is one of the target, in the dtype of the output; the
    noise is measured on this output if None is given.
    """
    index = first_difference(output_ids, reference_ids)
    if index is None:
        return None
    token = output_ids[index] if index < len(output_ids) else -1
    expected = reference_ids[index] if index < len(reference_ids) else -1
    size = scorer.target.vocab_size
    if not (0 <= token < size and 0 <= expected < size):
        return Divergence(index=index, token=token, expected=expected)
    noise = noise or measure_noise(scorer, [(prompt_ids, _inside(output_ids, size), params)])
    # The rest of a sampled output distinguishes another seed's draw from a fault.
    is_sampled = params.temperature > 0
    scored = _inside(output_ids, size) if is_sampled else output_ids[: index + 1]
    here, bets = None, 0.0
    for segment in scorer.segments(prompt_ids, scored, params, measures_noise=is_sampled):
        if segment.end > index:
            here = here or segment
            if is_sampled:
                own = bets_of(segment, params.temperature)
                bets += own[max(index - segment.first, 0) :].sum(axis=0)
    assert here is not None
    evidence = of_bets(np.asarray(bets)) if is_sampled else None
    return _examine(scorer, here, index, expected, params, noise, log_evidence=evidence)


def judge_all(
    scorer: Scorer | Model,
    completions: Sequence[Completion],
    references: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    among: Sequence[int] | None = None,
    stops_at_fault: bool = False,
) -> Divergences:
    """Compares outputs with references, and judges every one that differs.

    Args:
      scorer: a scorer of the target in the dtype of the outputs; or the target itself, for which a
        scorer is made if anything differs.
      completions: the outputs.
      references: token ids of each one's reference, cut after the stop token.
      params: how they were drawn, including the seed if sampled; one for all, or one each.
      among: indices of the outputs to compare; default all.
      stops_at_fault: whether to end at the first divergence that is not a tie.
    """
    each = [params] * len(completions) if isinstance(params, SamplingParams) else params
    pairs = list(zip(completions, references, each, strict=True))
    among = range(len(pairs)) if among is None else among
    differing = [i for i in among if tuple(pairs[i][0].token_ids) != tuple(pairs[i][1])]
    if differing and not isinstance(scorer, Scorer):
        longest = max(len(c.prompt_token_ids) + len(c.token_ids) for c in completions)
        scorer = Scorer(scorer, max_length=longest)
    noise = None
    if differing:
        assert isinstance(scorer, Scorer)
        size = scorer.target.vocab_size
        noise = measure_noise(
            scorer,
            [
                (pairs[i][0].prompt_token_ids, _inside(pairs[i][0].token_ids, size), pairs[i][2])
                for i in differing
            ],
        )
    judged: dict[int, Divergence] = {}
    for index in differing:
        completion, reference, own = pairs[index]
        assert isinstance(scorer, Scorer)
        divergence = judge(
            scorer,
            prompt_ids=completion.prompt_token_ids,
            output_ids=completion.token_ids,
            reference_ids=reference,
            params=own,
            noise=noise,
        )
        assert divergence is not None
        judged[index] = divergence
        if stops_at_fault and divergence.finding != Finding.TIE:
            break
    return Divergences(num_outputs=len(among), differing=tuple(differing), judged=judged)


def judge_alone(
    scorer: Scorer,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
    noise: GapNoise | None = None,
    allows_noise: bool = False,
) -> OwnOutput:
    """Where an output stops being the target's own, token by token under teacher forcing.

    Every token is judged given the output's own tokens before it, so one fault does not make all
    later tokens look wrong.

    Args:
      scorer: a scorer of the target, in the dtype of the output.
      prompt_ids: at least one.
      output_ids: cut after the stop token.
      params: how it was drawn. If it was sampled and the seed is None, only its distribution is
        judged.
      noise: of outputs like this one; if None is given it is measured on this one, once a token is
        unexpected.
      allows_noise: whether the bets on a sampled output allow for rounding, which is then measured
        at each position.
    """
    inside = _inside(output_ids, scorer.target.vocab_size)
    is_sampled = params.temperature > 0
    is_keyed = not is_sampled or params.seed is not None
    found: list[Divergence] = []
    gaps, total = [], Bets.none()
    for segment in scorer.segments(prompt_ids, inside, params, measures_noise=allows_noise):
        gaps.append(segment.gap)
        bets = bets_of(segment, params.temperature) if is_sampled else segment.log_bets
        unexpected = segment.chosen != segment.tokens
        if not is_keyed:
            unexpected = np.isneginf(segment.log_probs)
        for row in np.flatnonzero(unexpected):
            noise = noise or measure_noise(scorer, [(prompt_ids, inside, params)])
            divergence = _examine(
                scorer,
                segment,
                segment.first + int(row),
                int(segment.chosen[row]),
                params,
                noise,
                log_evidence=of_bets(bets[row]) if is_sampled else None,
                is_keyed=is_keyed,
            )
            if divergence.finding == Finding.TIE and is_sampled:
                # A token that rounding may have let through a filter is not evidence.
                bets[row] = np.minimum(bets[row], 0)
            found.append(divergence)
        total = total.plus(bets, segment)
    if len(inside) < len(output_ids):
        found.append(Divergence(index=len(inside), token=output_ids[len(inside)], expected=-1))
    return OwnOutput(
        num_tokens=len(output_ids),
        gaps=np.concatenate(gaps) if gaps else np.zeros((0,), np.float32),
        divergences=tuple(found),
        bets=total if is_sampled else None,
    )


def _inside(ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids before the first one that the vocabulary lacks."""
    end = next((i for i, token in enumerate(ids) if not 0 <= token < vocab_size), len(ids))
    return list(ids[:end])


def _examine(
    scorer: Scorer,
    segment: Segment,
    index: int,
    expected: int,
    params: SamplingParams,
    noise: GapNoise,
    *,
    log_evidence: float | None,
    is_keyed: bool = True,
) -> Divergence:
    """A divergence with its margin, bound and verdict; `log_evidence` is None for a greedy
    request."""
    row = index - segment.first
    token = int(segment.tokens[row])
    logits, gumbel = segment.logits_at(index)
    perturbed = logits + params.temperature * gumbel
    filters = Filters(logits, params)
    if is_keyed:
        margin = max(margin_of(token, perturbed, filters), margin_of(expected, perturbed, filters))
    else:  # no draw is expected, only that the filters let the token through
        margin = filters.distance(token) if not filters.keeps(token) else 0.0
    pair = np.array([token, expected])
    largest = float(np.max(np.abs(logits[pair][np.isfinite(logits[pair])]), initial=0.0))
    bound = max(noise.bound, 2 * scorer.rounding * largest)
    distance = filters.distance(token) if filters.any else None
    finding = Finding.TIE if margin <= bound else Finding.FAULT
    if finding == Finding.FAULT and log_evidence is not None:
        if segment.log_probs[row] != -math.inf:
            is_possible = log_evidence <= -math.log(ALPHA)
        else:  # within rounding of a filter, it may have been in the distribution after all
            is_possible = distance is not None and distance <= bound
        finding = Finding.SAMPLING if is_possible else Finding.FAULT
    return Divergence(
        index=index,
        token=token,
        expected=expected,
        gap=float(perturbed[expected] - perturbed[token]),
        margin=margin,
        scale=noise.scale,
        bound=bound,
        chance=float(noise.flips(np.array(margin), factor=OTHERS_FACTOR)),
        filter_distance=distance,
        log_probs=None if log_evidence is None else float(segment.log_probs[row]),
        log_evidence=log_evidence,
        finding=finding,
    )


class Filters:
    """Which tokens a request's top-k, top-p and min-p keep at one position, and how certainly,
    given `logits` `[V]` float64 after biases and penalties. A token with logit -inf, which is not
    allowed or barred by `min_tokens`, is never kept."""

    def __init__(self, logits: np.ndarray, params: SamplingParams):
        own = params if params.temperature > 0 else SamplingParams(temperature=1.0)
        self.temperature, self.top_k = own.temperature, max(own.top_k, 0)
        self.top_p, self.min_p = own.top_p, own.min_p
        self.logits = logits
        self.highest = float(np.max(logits))
        self._ascending = np.sort(logits)
        weights = np.exp((self._ascending - self.highest) / self.temperature)
        if self.top_k:
            kth = self._ascending[-min(self.top_k, len(logits))]
            weights = np.where(self._ascending >= kth, weights, 0)  # top-p sees what top-k left
        self._mass_from = np.append(np.cumsum(weights[::-1])[::-1], 0.0)

    @property
    def any(self) -> bool:
        """Whether a filter is set."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def kept(self, change: float) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens may be kept, and which certainly are, `[V]` bool, if every logit moves by at
        most `change`."""
        may = self.logits > -math.inf
        must = may.copy()
        if not self.any:
            return may, must
        num = len(self.logits)
        # Tokens that stay above each one for certain, and those that might rise above it.
        certain = np.searchsorted(self._ascending, self.logits + 2 * change, side="right")
        possible = np.searchsorted(self._ascending, self.logits - 2 * change, side="right")
        if self.top_k:
            may &= num - certain < self.top_k
            # With change 0 equal logits stay together; otherwise they, and the token itself, count
            # as above.
            itself = 1 if change > 0 else 0
            must &= num - possible - itself < self.top_k
        if self.top_p < 1:
            total = self._mass_from[0]
            factor = math.exp(min(2 * change / self.temperature, 700))
            above = self._mass_from[certain] / total
            may &= above / (above + (1 - above) * factor) < self.top_p
            own = np.exp((self.logits - self.highest) / self.temperature) if change > 0 else 0.0
            above = np.clip((self._mass_from[possible] - own) / total, 0, 1)
            must &= above / (above + (1 - above) / factor) < self.top_p
        if self.min_p > 0:
            floor = self.highest + self.temperature * math.log(self.min_p)
            may &= self.logits + 2 * change >= floor
            must &= (self.logits - 2 * change >= floor) | (self.logits == self.highest)
        return may, must

    def keeps(self, token: int) -> bool:
        """Whether the filters keep a token by these logits."""
        return bool(self.kept(0.0)[0][token])

    def distance(self, token: int) -> float:
        """How far logits must move apart for the filters to decide differently about a token."""
        if not self.any:
            return math.inf

        def may_flip(change: float) -> bool:
            may, must = self.kept(change)
            return bool(may[token] and not must[token])

        # Beyond this change everything is possible.
        reach = float(np.ptp(self.logits[np.isfinite(self.logits)])) + 100 * self.temperature
        return 2 * _smallest(may_flip, reach)


def margin_of(token: int, perturbed: np.ndarray, filters: Filters) -> float:
    """How far logits must move apart for `token` to be drawn, by the filters of its position and
    `perturbed` `[V]` float64, the logits with the noise of the draw."""
    if np.isneginf(perturbed[token]):  # barred, and no rounding brings it back
        return math.inf
    after = perturbed - perturbed[token]
    if not filters.any:
        return float(np.max(after))

    def may_be_drawn(change: float) -> bool:
        may, must = filters.kept(change)
        return bool(may[token]) and float(np.max(after[must], initial=0)) <= 2 * change

    return 2 * _smallest(may_be_drawn, float(np.ptp(perturbed[np.isfinite(perturbed)])) + 100)


def _smallest(is_enough: Callable[[float], bool], most: float) -> float:
    """The smallest change that is enough, by bisection; inf if `most` is not."""
    if is_enough(0.0):
        return 0.0
    if not is_enough(most):
        return math.inf
    least = 0.0
    for _ in range(50):
        middle = (least + most) / 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return most
