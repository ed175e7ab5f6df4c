"""Audit of jaxspec's own runs: the four levels of equality, on token ids cut after the stop token.

E1  speculative output equals the same compiled program with every draft marked invalid: tokens, the
    log-probability of each (if the engine keeps them) and committed KV, bit for bit.
E2  a request's output does not depend on what else is decoded: another order, and requests alone.
E3  a sampled speculative output is the sampled plain output of the same seed.
E4  against the window-1 plain loop, another program: equal except at ties, each proven.
distribution sampled outputs follow the target's distribution: for verifiers that draw other tokens
than plain
    decoding, the only promise there is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import numpy as np

from jaxspec.audit.judge import (
    ALPHA,
    Divergence,
    Finding,
    first_difference,
    judge,
    judge_alone,
)
from jaxspec.audit.probe import ProbeReport, live_kv, probe
from jaxspec.audit.scoring import Scorer
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.models.base import Model
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import Prompt, Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.telemetry.counters import Acceptance
from jaxspec.verifiers import Verifier

NUM_ALONE = 4  # requests that are also decoded alone, for E2

CLAIMS = {
    "E1": "the same program with drafts marked invalid gives the same tokens and bits",
    "E2": "alone and in another order, a request gives the same tokens and bits",
    "E3": "sampled plain decoding with the same seeds gives the same tokens",
    "E4": "the window-1 plain loop gives the same tokens, except at proven ties",
    "distribution": "sampled tokens follow the target's distribution",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output beside what it is compared with.

    Attributes:
      request_id: of the output.
      num_tokens: of the reference.
      num_equal: tokens before the first difference.
      are_bits_equal: whether log-probabilities and KV are equal too; None if not compared.
      divergence: the first one, judged; None where tokens are equal.
    """

    request_id: str
    num_tokens: int
    num_equal: int
    are_bits_equal: bool | None
    divergence: Divergence | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """What one level's comparisons found.

    Attributes:
      name: a key of `CLAIMS`.
      comparisons: of this level; empty where it does not apply.
      reason: why it does not apply, or None.
      allows_ties: whether a proven tie is within the promise.
    """

    name: str
    comparisons: tuple[Comparison, ...] = ()
    reason: str | None = None
    allows_ties: bool = False

    @property
    def num_compared(self) -> int:
        """Outputs compared."""
        return len(self.comparisons)

    @property
    def exact(self) -> float:
        """Share of outputs whose tokens are all equal."""
        return _mean([c.divergence is None for c in self.comparisons])

    @property
    def prefix_match(self) -> float:
        """Mean over outputs of the share of tokens before the first difference."""
        return _mean([c.num_equal / c.num_tokens for c in self.comparisons])

    def count(self, finding: Finding) -> int:
        """Outputs whose first divergence was found to be this."""
        return sum(c.divergence is not None and c.divergence.finding == finding for c in self)

    def __iter__(self):
        return iter(self.comparisons)

    @property
    def num_other_bits(self) -> int:
        """Outputs with equal tokens, but other log-probabilities or KV."""
        return sum(c.divergence is None and c.are_bits_equal is False for c in self)

    @property
    def holds(self) -> bool | None:
        """Whether the claim held for every output; None where it does not apply."""
        if self.reason is not None:
            return None
        if self.allows_ties:
            return self.count(Finding.TIE) == sum(c.divergence is not None for c in self)
        return self.exact == 1 and self.num_other_bits == 0

    def to_json(self) -> dict[str, Any]:
        """Figures, and every divergence."""
        return {
            "claim": CLAIMS[self.name],
            "holds": self.holds,
            "reason": self.reason,
            "num_compared": self.num_compared,
            "exact": self.exact if self.comparisons else None,
            "prefix_match": self.prefix_match if self.comparisons else None,
            "num_other_bits": self.num_other_bits,
            "num_ties": self.count(Finding.TIE),
            "num_faults": self.count(Finding.FAULT),
            "num_sampling": self.count(Finding.SAMPLING),
            "divergences": [
                {"request_id": c.request_id, **divergence_json(c.divergence)}
                for c in self
                if c.divergence is not None
            ],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionLevel:
    """Evidence of sampled outputs against the target's distribution.

    Attributes:
      log_evidence: of each output; see `scoring.Segment.log_bets`.
      num_excluded: outputs with a token that the distribution excludes, by more than rounding.
      reason: why it does not apply, or None.
    """

    log_evidence: tuple[float, ...] = ()
    num_excluded: int = 0
    reason: str | None = None

    @property
    def holds(self) -> bool | None:
        """Whether no output speaks against the distribution; None where none was sampled."""
        if self.reason is not None:
            return None
        threshold = math.log(max(len(self.log_evidence), 1) / ALPHA)
        return self.num_excluded == 0 and max(self.log_evidence, default=0) <= threshold

    def to_json(self) -> dict[str, Any]:
        """Figures."""
        return {
            "claim": CLAIMS["distribution"],
            "holds": self.holds,
            "reason": self.reason,
            "num_compared": len(self.log_evidence),
            "alpha": ALPHA,
            "num_excluded": self.num_excluded,
            "largest_log_evidence": _finite(max(self.log_evidence, default=None)),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyMetrics:
    """The published study's metrics, on decoded text (eBay/spec_dec, `compare_outputs`).

    They judge text, special tokens included: text that follows the reference's end is not seen by
    `partial`, and tokens that decode alike count as equal.

    Attributes:
      exact: share of outputs whose text equals the reference's.
      partial: mean share of the reference's tokens, of the text encoded again, before the first
        difference.
    """

    exact: float
    partial: float

    @classmethod
    def of(
        cls, model: Model, outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
    ) -> StudyMetrics | None:
        """Of outputs beside their references; None without a tokenizer."""
        if model.tokenizer is None or not outputs:
            return None
        hf = model.tokenizer.hf
        exact, partial = [], []
        for ours, theirs in zip(outputs, references, strict=True):
            texts = [hf.decode(list(ids)) for ids in (ours, theirs)]
            a, b = (hf.encode(text, add_special_tokens=False) for text in texts)
            at = first_difference(a, b)
            exact.append(texts[0] == texts[1])
            partial.append(1.0 if at is None or not b else at / len(b))
        return cls(exact=_mean(exact), partial=_mean(partial))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineAudit:
    """An audit of an engine.

    Attributes:
      engine: `Engine.describe()`.
      dtype: of the target.
      promise: what the verifier promises, in words.
      num_requests: audited.
      num_sampled: of these, with a temperature.
      levels: E1 to E4 by name.
      distribution: of the sampled outputs.
      study: the published study's metrics against the window-1 loop; None without a tokenizer.
      probe: the start-up probe.
      acceptance: of the speculative run.
    """

    engine: dict[str, Any]
    dtype: str
    promise: str
    num_requests: int
    num_sampled: int
    levels: dict[str, Level]
    distribution: DistributionLevel
    study: StudyMetrics | None
    probe: ProbeReport
    acceptance: Acceptance

    @property
    def holds(self) -> bool:
        """Whether every level that applies holds. A lossy verifier promises no distribution."""
        found = [level.holds for level in self.levels.values()]
        return False not in (*found, self.distribution.holds)

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        broken = [name for name, level in self.levels.items() if level.holds is False]
        broken += ["distribution"] if self.distribution.holds is False else []
        if broken:
            return f"The promise is broken: {', '.join(broken)} does not hold."
        held = [name for name, level in self.levels.items() if level.holds]
        held += ["distribution"] if self.distribution.holds else []
        num_ties = self.levels["E4"].count(Finding.TIE)
        ties = f"; {num_ties} outputs part from the window-1 loop, at proven ties" * bool(num_ties)
        names = ", ".join(held) or "nothing"
        return f"The promise holds: {names} of {self.num_requests} requests{ties}."

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        return {
            "promise": self.promise,
            "holds": self.holds,
            "sentence": self.sentence,
            "dtype": self.dtype,
            "num_requests": self.num_requests,
            "num_sampled": self.num_sampled,
            "levels": {
                **{name: level.to_json() for name, level in self.levels.items()},
                "distribution": self.distribution.to_json(),
            },
            "study_metrics": (
                dataclasses.asdict(self.study)
                | {"source": "eBay/spec_dec: decoded text, special tokens kept"}
                if self.study
                else None
            ),
            "probe": self.probe.to_json(),
            "acceptance": self.acceptance.to_json(),
            "engine": self.engine,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """Completions of a run, in the order of the requests, and a digest of each one's KV (or
    none)."""

    completions: list[Completion]
    kv: list[str]


def audit_engine(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    seed: int = 0,
    on_stage: Callable[[str], None] | None = None,
) -> EngineAudit:
    """Audits an engine on a workload.

    The workload is decoded speculatively, plainly in the same program, in another order, in part
    alone, and by the window-1 loop. Give the engine `max_logprobs=0`, and E1 and E2 compare the
    bits of the tokens' log-probabilities too.

    Args:
      engine: with a drafter, idle.
      prompts: as for `Engine.generate`.
      params: one for all, or one each.
      seed: of the other order.
      on_stage: told in words what is being done.

    Raises:
      PromptError, SettingError: as `Engine.generate`; or the engine has the aligned layout or a
        mesh, which the levels do not speak of.
    """
    if engine.layout != "ragged" or engine.mesh is not None:
        raise SettingError(
            f"An engine with the {engine.layout} layout"
            f"{' on a mesh' if engine.mesh is not None else ''} was given to the audit, whose "
            "levels are those of the ragged layout on one device; audit that one, or hand it this "
            "engine's outputs as another system's (audit_outputs)."
        )
    tell = on_stage or (lambda _: None)
    if engine.max_logprobs is not None:
        each = params if params is not None else SamplingParams()
        each = [each] * len(prompts) if isinstance(each, SamplingParams) else list(each)
        params = [dataclasses.replace(one, logprobs=0) for one in each]
    requests = make_requests(
        prompts,
        params if params is not None else SamplingParams(),
        engine.target,
        longest=engine.longest_prompt,
    )
    verifier = engine.verifier
    tell("the start-up probe")
    seen = probe(engine)
    # Plain decoding draws as coupled verification does; other verifiers equal it where greedy.
    is_own = [verifier.is_coupled or request.params.temperature == 0 for request in requests]
    is_sampled = [request.params.temperature > 0 for request in requests]

    tell("speculative run")
    drafted = _run(engine, requests)
    tell("E1: the same program, drafts marked invalid")
    plain = _run(engine, requests, speculate=False)
    tell("E2: another order, and alone")
    order = np.random.default_rng(seed).permutation(len(requests)).tolist()
    shuffled = _run(engine, [requests[i] for i in order])
    few = list(range(0, len(requests), max(1, len(requests) // NUM_ALONE)))[:NUM_ALONE]
    alone = [_run(engine, [requests[i]]) for i in few]
    tell("E4: the window-1 plain loop")
    shape = engine.shape
    witness_engine = Engine(
        engine.target,
        batch_size=shape.batch_size,
        max_length=shape.max_length,
        prefill_chunk=shape.prefill_chunk,
    )
    unmarked = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=None))
        for r in requests
    ]
    witness = _Run(completions=list(witness_engine.run(unmarked)), kv=[])

    tell("judging divergences")
    longest = max(
        len(c.prompt_token_ids + c.token_ids) for c in (*drafted.completions, *witness.completions)
    )
    scorer = Scorer(engine.target, max_length=longest)

    def compare(i: int, run: _Run, place: int, reference: _Run, other: int) -> Comparison:
        """Request i, at `place` of a run, beside a reference."""
        return _compare(
            scorer,
            requests[i],
            run.completions[place],
            reference.completions[other],
            _bits_equal(run, place, reference, other) if reference.kv else None,
        )

    def level(name: str, chosen: Sequence[bool], reference: _Run) -> Level:
        """The speculative output of every chosen request beside the reference."""
        found = [compare(i, drafted, i, reference, i) for i, ok in enumerate(chosen) if ok]
        if found:
            # A machine on which bits depend on places can keep no more than the promise of E4.
            is_loose = name == "E4" or not seen.holds
            return Level(name=name, comparisons=tuple(found), allows_ties=is_loose)
        if name == "E3" and not any(is_sampled):
            return Level(name=name, reason="no request is sampled")
        return Level(name=name, reason=f"{verifier.name} draws other tokens than plain decoding")

    independence = [compare(i, shuffled, place, drafted, i) for place, i in enumerate(order)]
    independence += [compare(i, run, 0, drafted, i) for i, run in zip(few, alone, strict=True)]
    both = [own and sampled for own, sampled in zip(is_own, is_sampled, strict=True)]
    levels = {
        "E1": level("E1", is_own, plain),
        "E2": Level(name="E2", comparisons=tuple(independence), allows_ties=not seen.holds),
        "E3": level("E3", both, dataclasses.replace(plain, kv=[])),
        "E4": level("E4", is_own, witness),
    }
    tell("the distribution of sampled outputs")
    if verifier.is_lossless:
        pairs = zip(requests, drafted.completions, strict=True)
        distribution = _distribution(scorer, list(compress(pairs, is_sampled)))
    else:
        distribution = DistributionLevel(
            reason=f"{verifier.name} does not promise the distribution"
        )
    return EngineAudit(
        engine=engine.describe(),
        dtype=scorer.dtype.name,
        promise=promise_of(verifier, is_bit_exact=seen.holds),
        num_requests=len(requests),
        num_sampled=sum(is_sampled),
        levels=levels,
        distribution=distribution,
        study=StudyMetrics.of(
            engine.target,
            [c.token_ids for c in drafted.completions],
            [c.token_ids for c in witness.completions],
        ),
        probe=seen,
        acceptance=Acceptance.total([c.acceptance for c in drafted.completions]),
    )


def promise_of(verifier: Verifier, *, is_bit_exact: bool = True) -> str:
    """What an engine with this verifier promises, in words.

    Args:
      verifier: of the engine.
      is_bit_exact: whether the start-up probe holds.
    """
    if not is_bit_exact and verifier.is_lossless:
        whose = (
            "the tokens of plain decoding" if verifier.is_coupled else "the target's distribution"
        )
        return f"equal up to proven ties: {whose}, as far as rounding on this machine allows"
    if verifier.is_coupled:
        return (
            "bit-exact: the tokens of plain decoding in the same program, at any temperature; "
            "against other programs, equal up to proven ties"
        )
    if verifier.is_lossless:
        return (
            "distribution only: sampled tokens follow the target's distribution; greedy output is "
            "plain decoding's, bit-exact"
        )
    return f"lossy: {verifier.promise.removeprefix('lossy: ')}; greedy output is plain decoding's"


def divergence_json(divergence: Divergence) -> dict[str, Any]:
    """A divergence as JSON values; infinite numbers as text."""
    return {name: _finite(x) for name, x in dataclasses.asdict(divergence).items()} | {
        "finding": divergence.finding.value
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _run(engine: Engine, requests: Sequence[Request], *, speculate: bool = True) -> _Run:
    completions, bits = [], []
    for first in range(0, len(requests), engine.shape.batch_size):
        batch = requests[first : first + engine.shape.batch_size]
        completions.extend(engine.run(batch, speculate=speculate))
        # The rows keep their KV until the next batch takes them.
        for row in range(len(batch)):
            digest = hashlib.sha256()
            for values in live_kv(engine.state, row):
                digest.update(values.tobytes())
            bits.append(digest.hexdigest())
    return _Run(completions=completions, kv=bits)


def _bits_equal(a: _Run, i: int, b: _Run, j: int) -> bool:
    """Whether two outputs have the same log-probabilities and KV, to the bit."""
    return a.completions[i].logprobs == b.completions[j].logprobs and a.kv[i] == b.kv[j]


def _compare(
    scorer: Scorer, request: Request, ours: Completion, theirs: Completion, bits: bool | None
) -> Comparison:
    divergence = judge(
        scorer,
        prompt_ids=request.prompt_token_ids,
        output_ids=ours.token_ids,
        reference_ids=theirs.token_ids,
        params=request.params,
    )
    num_tokens = len(theirs.token_ids)
    return Comparison(
        request_id=request.request_id,
        num_tokens=num_tokens,
        num_equal=num_tokens if divergence is None else min(divergence.index, num_tokens),
        are_bits_equal=bits,
        divergence=divergence,
    )


def _distribution(
    scorer: Scorer, sampled: Sequence[tuple[Request, Completion]]
) -> DistributionLevel:
    if not sampled:
        return DistributionLevel(reason="no request is sampled")
    judged = [
        judge_alone(
            scorer,
            prompt_ids=request.prompt_token_ids,
            output_ids=completion.token_ids,
            params=dataclasses.replace(request.params, seed=None),
        )
        for request, completion in sampled
    ]
    return DistributionLevel(
        log_evidence=tuple(own.log_evidence or 0.0 for own in judged),
        num_excluded=sum(own.first is not None for own in judged),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
