"""Audits another system's outputs under the target."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.audit import chi_square as distributions
from jaxspec.audit.endings import judge_end
from jaxspec.audit.judge import Divergence, Finding, OwnOutput, json_number, judge_alone, mean
from jaxspec.audit.outputs import Output, OutputsFile, read_outputs
from jaxspec.audit.samples import Sample, SampleEvidence, judge_samples
from jaxspec.audit.scoring import Scorer
from jaxspec.checkpoint.format import parse_dtype
from jaxspec.models.base import Model
from jaxspec.runtime.values import check_callable, check_kind, number


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputsAudit:
    """An audit of a file of outputs.

    Attributes:
      engine: the system that made the outputs, and its version.
      target: the model under which they are judged.
      dtype: in which they were computed.
      is_text: whether their ids were made from text, so that other ids may have been emitted;
        their ends are not judged.
      outputs: greedy and sampled ones.
      judged: the findings for each output, token by token.
      ends: where an output ends too early or too late, by its line.
      samples: the evidence of the sampled outputs against the distribution.
      distribution_tests: those of prompts with several samples, by the line of the first.
      alpha: level of the distribution tests of the file, together.
    """

    engine: str
    target: str
    dtype: str
    is_text: bool
    outputs: tuple[Output, ...]
    judged: tuple[OwnOutput, ...]
    ends: dict[int, Divergence]
    samples: SampleEvidence
    distribution_tests: dict[int, distributions.DistributionTest]
    alpha: float

    @property
    def greedy(self) -> list[tuple[Output, OwnOutput]]:
        """Greedy outputs with the findings for each."""
        return [pair for pair in self._pairs() if pair[0].params.temperature == 0]

    @property
    def sampled(self) -> list[tuple[Output, OwnOutput]]:
        """Sampled outputs with the findings for each."""
        return [pair for pair in self._pairs() if pair[0].params.temperature > 0]

    def _pairs(self) -> list[tuple[Output, OwnOutput]]:
        return list(zip(self.outputs, self.judged, strict=True))

    @property
    def exact(self) -> float:
        """Fraction of greedy outputs that end where they must and whose every token is the target's
        own by its fp32 logits."""
        return mean([not own.divergences and o.number not in self.ends for o, own in self.greedy])

    @property
    def exact_up_to_ties(self) -> float:
        """Share of greedy outputs that differ from the target at ties only."""
        return mean(self._are_own)

    @property
    def _are_own(self) -> list[bool]:
        """For each greedy output, whether it differs from the target at ties only."""
        return [own.first is None and o.number not in self.ends for o, own in self.greedy]

    @property
    def prefix_match(self) -> float:
        """Mean fraction of a greedy output's tokens before the first difference that no tie
        explains."""
        judged = [own for _, own in self.greedy]
        return mean([own.first.index / own.num_tokens if own.first else 1.0 for own in judged])

    @property
    def num_too_short(self) -> int:
        """Number of outputs that end without a stop token before their limit."""
        return sum(end.token < 0 for end in self.ends.values())

    @property
    def divergences(self) -> list[tuple[int, Divergence]]:
        """Every divergence with its line: tokens, and ends."""
        tokens = [(o.number, d) for o, own in self._pairs() for d in own.divergences]
        return sorted([*tokens, *self.ends.items()], key=lambda pair: (pair[0], pair[1].index))

    @property
    def distribution_p_value(self) -> float:
        """The p-value of all distribution tests together; NaN if there are none."""
        return distributions.combined_p_value(list(self.distribution_tests.values()))

    @property
    def holds(self) -> bool:
        """Whether nothing was found that neither a tie nor chance explains."""
        follows = self.samples.holds and not self.distribution_p_value < self.alpha
        return follows and not self.ends and all(self._are_own)

    @property
    def promise(self) -> str:
        """The criteria that the outputs are judged by, in words."""
        greedy = "greedy output is the target's own, equal up to proven ties"
        sampled = "sampled output follows the target's distribution (distribution only)"
        ends = "each ends at its first stop token or at max_tokens"
        return "; ".join(
            [greedy] * bool(self.greedy)
            + [sampled] * bool(self.sampled)
            + [ends] * (not self.is_text)
        )

    @property
    def sentence(self) -> str:
        """The findings, in words."""
        greedy = (
            f"{sum(self._are_own)} of {len(self.greedy)} greedy outputs of {self.engine} are the "
            "target's own up to proven ties"
        )
        num_wrong = self.samples.num_excluded + self.samples.num_unlikely
        sampled = f"{num_wrong} of {len(self.sampled)} sampled outputs break its distribution"
        if self.samples.is_unlikely_together:
            sampled += ", and so do all of them together"
        if self.distribution_tests:
            sampled += f" (chi-square: p = {self.distribution_p_value:.2g}, alpha {self.alpha:g})"
        return (
            "; ".join(
                [greedy] * bool(self.greedy)
                + [sampled] * bool(self.sampled)
                + [self._ends_sentence] * bool(self.ends)
            )
            + "."
        )

    @property
    def _ends_sentence(self) -> str:
        num_short = self.num_too_short
        num_long = len(self.ends) - num_short
        wrong = [f"{num_short} without a stop token before max_tokens"] * (num_short > 0)
        wrong += [f"{num_long} after a stop token or max_tokens"] * (num_long > 0)
        sentence = f"{len(self.ends)} outputs end where they must not: {', '.join(wrong)}"
        by_line = {output.number: output for output in self.outputs}
        is_stop_next = [
            end.expected in by_line[line].stop_tokens
            for line, end in self.ends.items()
            if end.token < 0
        ]
        if is_stop_next and all(is_stop_next):
            sentence += (
                " (the target goes on with a stop token there; if the engine emitted it, write it "
                "into the file)"
            )
        return sentence

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        divergences = [{"line": line, **found.to_json()} for line, found in self.divergences]
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
            "num_after_stop": sum(bool(output.after_stop) for output in self.outputs),
            "are_ends_judged": not self.is_text,
            "num_too_short": self.num_too_short,
            "num_too_long": len(self.ends) - self.num_too_short,
            "greedy": {
                "num_outputs": len(self.greedy),
                "exact": json_number(self.exact),
                "exact_up_to_ties": json_number(self.exact_up_to_ties),
                "prefix_match": json_number(self.prefix_match),
            },
            "sampled": {
                "num_outputs": len(self.sampled),
                **self.samples.to_json(),
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
    file: OutputsFile | str | os.PathLike,
    *,
    dtype: str | None = None,
    alpha: float = distributions.ALPHA,
    scorer: Scorer | None = None,
    on_output: Callable[[int], None] | None = None,
) -> OutputsAudit:
    """Audits another system's outputs under `target`, every token of them.

    Args:
      target: the model whose outputs they are claimed to be.
      file: a file of outputs (see `jaxspec.audit.outputs`), or what `read_outputs` returned.
      dtype: the dtype in which they were computed; default what the header says, otherwise the
        target's.
      alpha: level of the chi-square tests of samples of the same prompt, together.
      scorer: an existing scorer of this target and dtype, with room for one token more than prompt
        and output.
      on_output: called with the number of outputs judged so far; greedy ones come first.

    Raises:
      SettingError: an argument of the wrong type, or an `alpha` out of range.
      ModelError: a dtype that is not supported.
      PromptError: a file that cannot be read or understood.
    """
    check_kind("target", target, Model, "a model")
    if isinstance(file, str | os.PathLike):
        file = read_outputs(file, target)
    check_kind("file", file, OutputsFile, "the path of a file, or what read_outputs returned")
    alpha = number("alpha", alpha, above=0, most=1, expected="above 0 and at most 1")
    dtype = None if dtype is None else parse_dtype(dtype).name
    if scorer is not None:
        check_kind("scorer", scorer, Scorer, "a Scorer, or None")
    check_callable(on_output=on_output)
    longest = max(len(o.prompt_token_ids) + len(o.token_ids) for o in file.outputs)
    if scorer is None:
        scorer = Scorer(target, max_length=longest + 1, dtype=dtype or file.dtype)
    num_judged = 0

    def note() -> None:
        nonlocal num_judged
        num_judged += 1
        if on_output is not None:
            on_output(min(num_judged, len(file.outputs)))

    # Other engines draw with other noise, so their seeds cannot be used here.
    is_keyed = file.engine == "jaxspec"
    params = {
        o.number: o.params if is_keyed else dataclasses.replace(o.params, seed=None)
        for o in file.outputs
    }
    judged = {}
    for output in file.outputs:
        if output.params.temperature == 0:
            judged[output.number] = judge_alone(
                scorer,
                prompt_ids=output.prompt_token_ids,
                output_ids=output.token_ids,
                params=output.params,
            )
            note()
    sampled = [output for output in file.outputs if output.params.temperature > 0]
    found, evidence = judge_samples(
        scorer,
        [
            Sample(
                prompt_ids=output.prompt_token_ids,
                output_ids=output.token_ids,
                params=params[output.number],
                seed=output.params.seed,
            )
            for output in sampled
        ],
        on_output=note,
    )
    judged |= {output.number: own for output, own in zip(sampled, found, strict=True)}
    ends = {}
    for output in () if file.is_text else file.outputs:
        end = judge_end(
            scorer,
            prompt_ids=output.prompt_token_ids,
            output_ids=output.token_ids,
            params=params[output.number],
            after_stop=output.after_stop,
        )
        if end is not None:
            ends[output.number] = end
    return OutputsAudit(
        engine=f"{file.engine} {file.version}".strip(),
        target=target.name,
        dtype=scorer.dtype.name,
        is_text=file.is_text,
        outputs=file.outputs,
        judged=tuple(judged[output.number] for output in file.outputs),
        ends=ends,
        samples=evidence,
        distribution_tests=_distribution_tests(scorer, sampled),
        alpha=alpha,
    )


def _distribution_tests(
    scorer: Scorer, sampled: Sequence[Output]
) -> dict[int, distributions.DistributionTest]:
    """The tests of prompts with several samples, by the line of the first."""
    same: dict[Any, list[Output]] = collections.defaultdict(list)
    for output in sampled:
        distribution = dataclasses.replace(output.params, seed=None)
        # Samples with one seed share their noise, so only the first of them is counted.
        others = same[output.prompt_token_ids, distribution]
        if output.params.seed is None or all(o.params.seed != output.params.seed for o in others):
            others.append(output)
    tests = {}
    for (prompt, distribution), outputs in same.items():
        test = distributions.test_distribution(
            scorer, prompt_ids=prompt, samples=[o.token_ids for o in outputs], params=distribution
        )
        if test is not None:
            tests[outputs[0].number] = test
    return tests
