"""Tests sampled outputs against the target's distribution, individually and together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jaxspec.audit.evidence import ALPHA, Bets, Power, evidence_limit
from jaxspec.audit.judge import OwnOutput, json_number, judge_alone
from jaxspec.audit.noise import GapNoise
from jaxspec.audit.scoring import Scorer
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import NONE, TextTable, percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A sampled output.

    Attributes:
      prompt_ids: at least one.
      output_ids: ids of the vocabulary, cut after the stop token.
      params: how it was drawn; without a seed only its distribution is judged.
      seed: what it shares with other outputs of the same seed: their noise.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    params: SamplingParams
    seed: Hashable | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleEvidence:
    """The evidence of sampled outputs against the distribution.

    Attributes:
      log_evidence: that of each output; see `jaxspec.audit.evidence`.
      together: that of all outputs except those with an excluded token.
      num_excluded: number of outputs with a token that the distribution (or the seed) excludes by
        more than rounding.
    """

    log_evidence: tuple[float, ...] = ()
    together: Bets = dataclasses.field(default_factory=Bets.none)
    num_excluded: int = 0

    @classmethod
    def of(cls, judged: Sequence[OwnOutput], seeds: Sequence[Hashable | None]) -> SampleEvidence:
        """The evidence of judged sampled outputs."""
        possible = [
            (own.bets, seed)
            for own, seed in zip(judged, seeds, strict=True)
            if own.bets is not None and own.first is None
        ]
        return cls(
            log_evidence=tuple(own.log_evidence or 0.0 for own in judged),
            together=Bets.together([bets for bets, _ in possible], [seed for _, seed in possible]),
            num_excluded=sum(own.first is not None for own in judged),
        )

    @property
    def num_unlikely(self) -> int:
        """Number of outputs that individually are evidence against the distribution."""
        return sum(log > evidence_limit(len(self.log_evidence)) for log in self.log_evidence)

    @property
    def is_unlikely_together(self) -> bool:
        """Whether all outputs together are evidence against the distribution."""
        return self.together.log_evidence > evidence_limit()

    @property
    def holds(self) -> bool:
        """Whether there is no evidence against the distribution."""
        return not (self.num_excluded or self.num_unlikely or self.is_unlikely_together)

    @property
    def powers(self) -> tuple[Power, ...]:
        """The probability of finding each alternative."""
        return self.together.powers()

    def power_table(self) -> TextTable:
        """What these outputs could have shown, by alternative."""
        return TextTable.of_columns(
            f"What {self.together.num_tokens} sampled tokens can show",
            {
                "if tokens had been drawn by": "{alternative}",
                "found with probability": lambda power: percent(power.chance),
                "tokens needed for 99 %": lambda power: power.tokens_needed or NONE,
            },
            self.powers,
        )

    def to_json(self) -> dict[str, Any]:
        """Figures."""
        return {
            "num_excluded": self.num_excluded,
            "num_unlikely": self.num_unlikely,
            "alpha": ALPHA,
            "largest_log_evidence": json_number(max(self.log_evidence, default=None)),
            "log_evidence_together": json_number(self.together.log_evidence),
            "log_evidence_limit": evidence_limit(),
            "power": [dataclasses.asdict(power) for power in self.powers],
        }


def judge_samples(
    scorer: Scorer,
    samples: Sequence[Sample],
    *,
    noise: GapNoise | None = None,
    on_output: Callable[[], None] = lambda: None,
) -> tuple[list[OwnOutput], SampleEvidence]:
    """Judges every sampled output token by token; returns the findings, and the evidence of all of
    them against the distribution.

    The evidence allows for rounding at each position (which takes several times as long) only if
    something seems wrong. `noise` is measured on each output if None is given; `on_output` is
    called after each output.
    """
    seeds = [sample.seed for sample in samples]

    def judge(sample: Sample, *, allows_noise: bool) -> OwnOutput:
        own = judge_alone(
            scorer,
            prompt_ids=sample.prompt_ids,
            output_ids=sample.output_ids,
            params=sample.params,
            noise=noise,
            allows_noise=allows_noise,
        )
        on_output()
        return own

    judged = [judge(sample, allows_noise=False) for sample in samples]
    evidence = SampleEvidence.of(judged, seeds)
    if evidence.num_unlikely or evidence.is_unlikely_together:
        judged = [judge(sample, allows_noise=True) for sample in samples]
        evidence = SampleEvidence.of(judged, seeds)
    return judged, evidence
