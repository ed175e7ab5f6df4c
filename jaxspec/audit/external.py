"""Audits another system's outputs under the target."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.audit import chi_square as distributions
from jaxspec.audit.endings import judge_end
from jaxspec.audit.evidence import evidence_limit
from jaxspec.audit.judge import Divergence, Finding, OwnOutput, json_number, judge_alone, mean
from jaxspec.audit.noise import (
    TIE_ALPHA,
    GapNoise,
    TieTest,
    contexts,
    measure_noise,
    num_tokens_needed,
    tie_p_value,
    tie_tests,
)
from jaxspec.audit.outputs import Output, OutputsFile, read_outputs
from jaxspec.audit.report import Audit, prefix_shares
from jaxspec.audit.samples import Sample, SampleEvidence, judge_samples
from jaxspec.audit.scoring import Scorer
from jaxspec.checkpoint.format import parse_dtype
from jaxspec.models.base import Model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import NONE, TextTable, percent
from jaxspec.runtime.values import check_callable, check_kind, number

SHARES = (0.01, 0.03, 0.1)  # of second-best tokens, for which the number of tokens is stated


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OutputsAudit(Audit):
    """An audit of a file of outputs. It prints as tables.

    Attributes:
      file: the outputs, and how they were computed.
      target: the model under which they are judged.
      reference: what they are judged by; see `Scorer.reference`.
      noise: how far rounding moves the gap between two tokens here.
      judged: the findings for each output, token by token.
      tie_tests: whether the greedy outputs have more ties than rounding explains; empty if there
        are none.
      num_beyond: expected number of tokens beyond the bound of a tie in healthy greedy outputs like
        these, by the changes that were measured: those would be false alarms.
      ends: where an output ends too early or too late, by its line.
      samples: the evidence of the sampled outputs against the distribution.
      distribution_tests: those of prompts with several samples, by the line of the first.
      alpha: level of the distribution tests of the file, together.
      hint: what may explain the findings, as a sentence; None if nothing is known.
    """

    file: OutputsFile
    target: str
    reference: str
    noise: GapNoise
    judged: tuple[OwnOutput, ...]
    tie_tests: tuple[TieTest, ...]
    num_beyond: float
    ends: dict[int, Divergence]
    samples: SampleEvidence
    distribution_tests: dict[int, distributions.DistributionTest]
    alpha: float
    hint: str | None = None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The outputs, in the order of their lines."""
        return self.file.outputs

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
    def tie_p_value(self) -> float:
        """The p-value of the tests of the number of ties, together; NaN without greedy outputs."""
        return tie_p_value(self.tie_tests)

    @property
    def has_too_many_ties(self) -> bool:
        """Whether rounding does not explain the number or the sizes of the ties."""
        return self.tie_p_value < TIE_ALPHA

    @property
    def tokens_needed(self) -> dict[str, int]:
        """How many greedy tokens it takes to find that some share of them is the second best."""
        gaps = np.concatenate([np.zeros(0), *(own.gaps for _, own in self.greedy)])
        if len(gaps) == 0:
            return {}
        return {f"{share:.0%}": num_tokens_needed(self.noise, gaps, share) for share in SHARES}

    @property
    def holds(self) -> bool | None:
        """Whether nothing was found that neither rounding nor chance explains; None if the outputs
        are not judged, because the target cannot be computed as they were."""
        if not self.file.is_judged:
            return None
        follows = self.samples.holds and not self.distribution_p_value < self.alpha
        own = all(self._are_own) and not self.has_too_many_ties
        return follows and not self.ends and own

    @property
    def promise(self) -> str:
        """The criteria that the outputs are judged by, in words."""
        if not self.file.is_judged:
            return "none: outputs of quantised weights or KV are compared and measured, not judged"
        greedy = "greedy output is the target's own, equal up to ties that rounding explains"
        sampled = "sampled output follows the target's distribution (distribution only)"
        ends = "each ends at its first stop token or at max_tokens"
        return "; ".join(
            [greedy] * bool(self.greedy)
            + [sampled] * bool(self.sampled)
            + [ends] * (not self.file.is_text)
        )

    @property
    def sentence(self) -> str:
        """The findings, in words."""
        if not self.file.is_judged:
            num_tokens = sum(own.num_tokens for own in self.judged)
            num_other = sum(len(own.divergences) for own in self.judged)
            return f"{num_other} of {num_tokens} tokens of {self.file.label} are not the target's."
        greedy = (
            f"{sum(self._are_own)} of {len(self.greedy)} greedy outputs of {self.file.label} are "
            "the target's own up to ties"
        )
        if self.has_too_many_ties:
            worst = min(self.tie_tests, key=lambda test: test.p_value)
            size = f"of at least {worst.at_least:.2g} logits, " * (worst.at_least > 0)
            greedy += (
                f"; there are more ties than rounding explains: {worst.observed} {size}instead of "
                f"{worst.expected:.1f} (p = {self.tie_p_value:.1g})"
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
            + (f" {self.hint}" if self.hint else "")
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
        is_eos_ignored = all(o.params.ignore_eos for o in self.outputs)
        if num_long and not is_eos_ignored:
            sentence += ' (if the engine ignored stop tokens, say so: "ignore_eos": true)'
        return sentence

    @property
    def title(self) -> str:
        """Whose outputs, and the target."""
        return f"Audit of outputs of {self.file.label} under {self.target}"

    @property
    def located(self) -> list[tuple[str, Divergence]]:
        """Every divergence with its line."""
        return [(f"line {line}", divergence) for line, divergence in self.divergences]

    @property
    def curves(self) -> dict[str, np.ndarray]:
        """Shares of greedy outputs without a difference so far."""
        if not self.greedy:
            return {}
        first = {
            "first difference": lambda own: next(iter(own.divergences), None),
            "first that no tie explains": lambda own: own.first,
        }
        return {
            label: prefix_shares((own.num_tokens, first_of(own)) for _, own in self.greedy)
            for label, first_of in first.items()
        }

    @property
    def result_tables(self) -> list[TextTable]:
        """The file; its greedy and its sampled outputs, and what these can show."""
        file = {
            "target": self.target,
            "reference": self.reference,
            "outputs of": self.file.label,
            "outputs": f"{len(self.greedy)} greedy, {len(self.sampled)} sampled",
            "a gap moves by": f"{self.noise.scale:.3g} (scale of {len(self.noise.changes)} "
            f"changes, the largest {self.noise.changes[-1]:.3g}); a tie is up to "
            f"{self.noise.bound:.3g}",
        }
        if self.file.is_text:
            file["token ids"] = "made from text; the engine may have emitted other ids"
            file["ends"] = "not judged: text does not say whether a stop token was emitted"
        else:
            num_short = self.num_too_short
            file["ends too early"] = f"{num_short} outputs: no stop token, and not yet max_tokens"
            file["ends too late"] = f"{len(self.ends) - num_short} outputs"
            num_padded = sum(bool(o.after_stop) and o.number not in self.ends for o in self.outputs)
            file["padding after a stop token"] = f"in {num_padded} outputs; it was cut off"
        tables = [TextTable.of_values("File", file)]
        if greedy := [own for _, own in self.greedy]:
            count = collections.Counter(d.finding for own in greedy for d in own.divergences)
            found = {
                "outputs": str(len(greedy)),
                "exact": percent(self.exact),
                "exact up to ties": percent(self.exact_up_to_ties),
                "prefix match": percent(self.prefix_match),
                "tokens": str(sum(own.num_tokens for own in greedy)),
                "ties": str(count[Finding.TIE]),
                "ties that rounding explains": "; ".join(map(_tie_words, self.tie_tests)),
                "tokens that show second-best ones": ", ".join(
                    f"{num} (if {share} are)" for share, num in self.tokens_needed.items()
                ),
                "p of the ties": f"{self.tie_p_value:.2g}, alpha {TIE_ALPHA:g}",
                "faults": f"{count[Finding.FAULT]}, of which chance explains {self.num_beyond:.2g}",
            }
            title = "Greedy outputs under the target, every token after the output's own"
            tables.append(TextTable.of_values(title, found))
        if self.sampled:
            tests = self.distribution_tests.values()
            statistic = sum(test.statistic for test in tests)
            sampled = {
                "outputs": str(len(self.sampled)),
                "break the distribution": str(
                    self.samples.num_excluded + self.samples.num_unlikely
                ),
                "log evidence of all together": f"{self.samples.together.log_evidence:.1f}, "
                f"at most {evidence_limit():.1f}",
                "prompts tested": str(len(tests)),
                "chi-square": f"{statistic:.1f} of {sum(t.degrees_of_freedom for t in tests)}",
                "p": f"{self.distribution_p_value:.3g}" if tests else NONE,
                "alpha": f"{self.alpha:g}",
            }
            title = "Sampled outputs under the target's distribution"
            tables.append(TextTable.of_values(title, sampled))
            if self.samples.powers:
                tables.append(self.samples.power_table())
        return tables

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        divergences = [{"line": line, **found.to_json()} for line, found in self.divergences]
        count = collections.Counter(divergence["finding"] for divergence in divergences)
        return {
            "promise": self.promise,
            "holds": self.holds,
            "sentence": self.sentence,
            "engine": f"{self.file.engine} {self.file.version}".strip(),
            "dtype": self.file.dtype,
            "kv_dtype": self.file.kv_dtype,
            "batch_size": self.file.batch_size,
            "target": self.target,
            "reference": self.reference,
            "noise": self.noise.to_json(),
            "ids_from_text": self.file.is_text,
            "num_outputs": len(self.outputs),
            "num_after_stop": sum(bool(output.after_stop) for output in self.outputs),
            "are_ends_judged": not self.file.is_text,
            "num_too_short": self.num_too_short,
            "num_too_long": len(self.ends) - self.num_too_short,
            "greedy": {
                "num_outputs": len(self.greedy),
                "exact": json_number(self.exact),
                "exact_up_to_ties": json_number(self.exact_up_to_ties),
                "prefix_match": json_number(self.prefix_match),
                "tie_tests": [dataclasses.asdict(test) for test in self.tie_tests],
                "tie_p_value": json_number(self.tie_p_value),
                "tie_alpha": TIE_ALPHA,
                "num_beyond_bound": self.num_beyond,
                "tokens_needed": self.tokens_needed,
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


def _tie_words(test: TieTest) -> str:
    size = f"of {test.at_least:.2g} or more " if test.at_least > 0 else ""
    return f"{size}{test.expected:.1f} ({test.observed} found)"


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
      target: the model whose outputs they are claimed to be. Its weights, rounded to the dtype,
        are the reference's, which computes in fp32.
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
    if scorer is None:
        declared = file.dtype if file.is_judged else None
        scorer = Scorer(target, max_length=longest_of([file]) + 1, dtype=dtype or declared)
    num_outputs, num_judged = len(file.outputs), 0

    def note() -> None:
        nonlocal num_judged
        num_judged += 1
        if on_output is not None:
            on_output(min(num_judged, num_outputs))

    if file.is_judged:
        file = dataclasses.replace(file, dtype=scorer.dtype.name)
    whole = _of_the_vocabulary(target, file.outputs)
    noise = measure_noise(scorer, [(o.prompt_token_ids, o.token_ids, o.params) for o in whole])
    # Other engines draw with other noise, so their seeds cannot be used here.
    is_keyed = file.engine == "jaxspec"
    params = {
        o.number: o.params if is_keyed else dataclasses.replace(o.params, seed=None)
        for o in file.outputs
    }
    judged: dict[int, OwnOutput] = {}
    same: dict[Any, OwnOutput] = {}  # equal outputs are judged once
    for output in file.outputs:
        if output.params.temperature > 0:
            continue
        key = output.prompt_token_ids, output.token_ids, output.params
        if key not in same:
            same[key] = judge_alone(
                scorer,
                prompt_ids=output.prompt_token_ids,
                output_ids=output.token_ids,
                params=output.params,
                noise=noise,
            )
        judged[output.number] = same[key]
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
        noise=noise,
        on_output=note,
    )
    judged |= {output.number: own for output, own in zip(sampled, found, strict=True)}
    ends = {}
    for output in () if file.is_text else whole:
        end = judge_end(
            scorer,
            prompt_ids=output.prompt_token_ids,
            output_ids=output.token_ids,
            params=params[output.number],
            after_stop=output.after_stop,
        )
        if end is not None:
            ends[output.number] = end
    gaps, is_other = _contexts([(o, judged[o.number]) for o in file.outputs])
    audit = OutputsAudit(
        file=file,
        target=target.name,
        reference=scorer.reference,
        noise=noise,
        judged=tuple(judged[output.number] for output in file.outputs),
        tie_tests=tie_tests(noise, gaps, is_other) if len(gaps) else (),
        num_beyond=float(noise.flips(gaps[gaps > noise.bound]).sum()),
        ends=ends,
        samples=evidence,
        distribution_tests=_distribution_tests(scorer, [o for o in sampled if o in whole]),
        alpha=alpha,
    )
    return dataclasses.replace(audit, hint=_hint(scorer, audit))


def longest_of(files: Sequence[OutputsFile]) -> int:
    """The most tokens of a prompt and its output together."""
    return max(len(o.prompt_token_ids) + len(o.token_ids) for file in files for o in file.outputs)


def _of_the_vocabulary(target: Model, outputs: Sequence[Output]) -> list[Output]:
    """The outputs whose ids are all of the target's vocabulary."""
    size = target.vocab_size
    return [o for o in outputs if all(0 <= token < size for token in o.token_ids)]


def _contexts(pairs: Sequence[tuple[Output, OwnOutput]]) -> tuple[np.ndarray, np.ndarray]:
    """The gaps `[n]` of the distinct contexts of greedy outputs, and whether each has another token
    than the best one."""
    known: set[tuple[int, SamplingParams]] = set()
    gaps, is_other = [], []
    for output, own in pairs:
        if output.params.temperature > 0:
            continue
        other = {divergence.index for divergence in own.divergences}
        places = contexts(output.prompt_token_ids, output.token_ids)
        for index, (gap, context) in enumerate(zip(own.gaps, places, strict=False)):
            if (context, output.params) not in known:
                known.add((context, output.params))
                gaps.append(gap)
                is_other.append(index in other)
    return np.array(gaps), np.array(is_other, bool)


def _hint(scorer: Scorer, audit: OutputsAudit) -> str | None:
    """What may explain the findings: that the engine computed in bfloat16 (as OpenVINO does on
    CPUs), whatever the file says."""
    found = [d for _, own in audit.greedy for d in own.divergences]
    is_wrong = audit.has_too_many_ties or any(d.finding != Finding.TIE for d in found)
    if not (audit.file.is_judged and is_wrong) or scorer.dtype == jnp.bfloat16:
        return None
    coarse = Scorer(
        scorer.target,
        max_length=longest_of([audit.file]) + 1,
        dtype="bfloat16",
        reference_weights=scorer.reference_weights,
    )
    whole = _of_the_vocabulary(scorer.target, [output for output, _ in audit.greedy])
    explained = measure_noise(coarse, [(o.prompt_token_ids, o.token_ids, o.params) for o in whole])
    tests = tie_tests(explained, *_contexts(audit.greedy))
    if any(d.margin > explained.bound for d in found) or tie_p_value(tests) < TIE_ALPHA:
        return None
    return "All of it would be explained if the engine computed in bfloat16."


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
