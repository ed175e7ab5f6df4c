"""Audit of another system's outputs under the target."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.audit import chi_square as distributions
from jaxspec.audit.judge import (
    ALPHA,
    Finding,
    OwnOutput,
    evidence_limit,
    json_number,
    judge_alone,
    mean,
)
from jaxspec.audit.outputs import Output, OutputsFile
from jaxspec.audit.scoring import Scorer
from jaxspec.models.base import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputsAudit:
    """An audit of a file of outputs.

    Attributes:
      engine: what made the outputs, and its version.
      target: the model they are judged under.
      dtype: in which they were computed.
      is_text: whether their ids were made from text, so that other ids may have been emitted.
      outputs: greedy and sampled.
      judged: of each output, token by token.
      distribution_tests: of prompts with several samples, by the line of the first.
      alpha: level of the distribution tests of the file, together.
    """

    engine: str
    target: str
    dtype: str
    is_text: bool
    outputs: tuple[Output, ...]
    judged: tuple[OwnOutput, ...]
    distribution_tests: dict[int, distributions.DistributionTest]
    alpha: float

    @property
    def greedy(self) -> list[tuple[Output, OwnOutput]]:
        """Greedy outputs and what was found of each."""
        return [pair for pair in self._pairs() if pair[0].params.temperature == 0]

    @property
    def sampled(self) -> list[tuple[Output, OwnOutput]]:
        """Sampled outputs and what was found of each."""
        return [pair for pair in self._pairs() if pair[0].params.temperature > 0]

    def _pairs(self) -> list[tuple[Output, OwnOutput]]:
        return list(zip(self.outputs, self.judged, strict=True))

    @property
    def exact(self) -> float:
        """Share of greedy outputs whose every token is the target's own by its fp32 logits."""
        return mean([not own.divergences for _, own in self.greedy])

    @property
    def exact_up_to_ties(self) -> float:
        """Share of greedy outputs that differ from the target at ties only."""
        return mean([own.first is None for _, own in self.greedy])

    @property
    def prefix_match(self) -> float:
        """Mean share of a greedy output's tokens before the first that no tie explains."""
        judged = [own for _, own in self.greedy]
        return mean([own.first.index / own.num_tokens if own.first else 1.0 for own in judged])

    @property
    def distribution_p_value(self) -> float:
        """Of all distribution tests together; NaN without any."""
        return distributions.combined_p_value(list(self.distribution_tests.values()))

    @property
    def num_excluded(self) -> int:
        """Sampled outputs that speak against the distribution by themselves."""
        most = evidence_limit(len(self.sampled))
        return sum(
            own.first is not None or (own.log_evidence or 0.0) > most for _, own in self.sampled
        )

    @property
    def holds(self) -> bool:
        """Whether nothing was found that neither a tie nor chance explains."""
        possible = self.num_excluded == 0 and not self.distribution_p_value < self.alpha
        return possible and all(own.first is None for _, own in self.greedy)

    @property
    def promise(self) -> str:
        """What the outputs are judged by, in words."""
        greedy = "greedy output is the target's own, equal up to proven ties"
        sampled = "sampled output follows the target's distribution (distribution only)"
        return "; ".join([greedy] * bool(self.greedy) + [sampled] * bool(self.sampled))

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        num_own, num_excluded = sum(own.first is None for _, own in self.greedy), self.num_excluded
        greedy = (
            f"{num_own} of {len(self.greedy)} greedy outputs of {self.engine} are the target's own "
            "up to proven ties"
        )
        sampled = f"{num_excluded} of {len(self.sampled)} sampled outputs break its distribution"
        if self.distribution_tests:
            sampled += f" (chi-square: p = {self.distribution_p_value:.2g}, alpha {self.alpha:g})"
        return "; ".join([greedy] * bool(self.greedy) + [sampled] * bool(self.sampled)) + "."

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        divergences = [
            {"line": output.number, **divergence.to_json()}
            for output, own in self._pairs()
            for divergence in own.divergences
        ]
        count = collections.Counter(divergence["finding"] for divergence in divergences)
        return {
            "promise": self.promise,
            "holds": self.holds,
            "sentence": self.sentence,
            "engine": self.engine,
            "target": self.target,
            "dtype": self.dtype,
            "ids_from_text": self.is_text,
            "num_outputs": len(self.outputs),
            "num_after_stop": sum(output.num_after_stop > 0 for output in self.outputs),
            "greedy": {
                "num_outputs": len(self.greedy),
                "exact": json_number(self.exact),
                "exact_up_to_ties": json_number(self.exact_up_to_ties),
                "prefix_match": json_number(self.prefix_match),
            },
            "sampled": {
                "num_outputs": len(self.sampled),
                "num_excluded": self.num_excluded,
                "alpha_per_output": ALPHA,
                "distribution_p_value": json_number(self.distribution_p_value),
                "distribution_alpha": self.alpha,
                "distribution_tests": [
                    {"line": line, **dataclasses.asdict(test)}
                    for line, test in self.distribution_tests.items()
                ],
            },
            "num_ties": count[Finding.TIE],
            "num_faults": count[Finding.FAULT],
            "num_sampling": count[Finding.SAMPLING],
            "divergences": divergences,
        }


def audit_outputs(
    target: Model,
    file: OutputsFile,
    *,
    dtype: str | None = None,
    alpha: float = distributions.ALPHA,
    on_output: Callable[[int], None] | None = None,
) -> OutputsAudit:
    """Audits another system's outputs under `target`, every token of them.

    Args:
      target: the model that they are claimed to be of.
      file: from `outputs.read_outputs`.
      dtype: in which they were computed; default what the header says, else the target's.
      alpha: level of the chi-square tests of samples of the same prompt, together.
      on_output: called with the number of outputs judged so far.
    """
    longest = max(len(o.prompt_token_ids) + len(o.token_ids) for o in file.outputs)
    scorer = Scorer(target, max_length=longest, dtype=dtype or file.dtype)
    is_keyed = file.engine == "jaxspec"
    judged = []
    for output in file.outputs:
        params = output.params
        judged.append(
            judge_alone(
                scorer,
                prompt_ids=output.prompt_token_ids,
                output_ids=output.token_ids,
                # Other engines draw with other noise: their seed repeats nothing here.
                params=params if is_keyed else dataclasses.replace(params, seed=None),
            )
        )
        if on_output is not None:
            on_output(len(judged))
    same: dict[Any, list[Output]] = collections.defaultdict(list)
    for output in file.outputs:
        if output.params.temperature > 0:
            distribution = dataclasses.replace(output.params, seed=None)
            same[output.prompt_token_ids, distribution].append(output)
    tests = {}
    for (prompt, distribution), outputs in same.items():
        test = distributions.test_distribution(
            scorer, prompt_ids=prompt, samples=[o.token_ids for o in outputs], params=distribution
        )
        if test is not None:
            tests[outputs[0].number] = test
    return OutputsAudit(
        engine=f"{file.engine} {file.version}".strip(),
        target=target.name,
        dtype=scorer.dtype.name,
        is_text=file.is_text,
        outputs=file.outputs,
        judged=tuple(judged),
        distribution_tests=tests,
        alpha=alpha,
    )
