"""Audits several files of outputs under one target, and compares each with one of them: plain with
speculative decoding, batch 1 with batch 8, an engine with another."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jaxspec.audit.external import OutputsAudit, audit_outputs, longest_of
from jaxspec.audit.judge import Divergence, Finding, first_difference
from jaxspec.audit.outputs import Output, OutputsFile
from jaxspec.audit.report import Audit
from jaxspec.audit.scoring import Scorer, parameter_dtype
from jaxspec.errors import PromptError, SettingError
from jaxspec.models.base import Model
from jaxspec.runtime.report import TextTable, percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """Where two outputs of one prompt part.

    Attributes:
      line, other_line: of the two outputs.
      index: of the first token that differs.
      token, other_token: the two tokens; -1 where an output has ended.
      finding: TIE if rounding explains it, FAULT if one of the tokens is a fault under the target;
        SAMPLING if the outputs were sampled and both tokens are possible. None if one of the files
        is not judged.
    """

    line: int
    other_line: int
    index: int
    token: int
    other_token: int
    finding: Finding | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A file of outputs compared with another one, prompt by prompt.

    Attributes:
      num_matched: outputs whose prompt both files have. The n-th output of a prompt is compared
        with the n-th of the other file.
      num_unmatched: outputs of either file without a counterpart.
      differences: of the outputs that are not equal.
      faults_in_both: lines whose first fault the other file has in the same place.
    """

    num_matched: int
    num_unmatched: int
    differences: tuple[FirstDifference, ...]
    faults_in_both: tuple[int, ...]

    @property
    def num_equal(self) -> int:
        """Outputs that are equal in every token."""
        return self.num_matched - len(self.differences)

    def count(self, finding: Finding) -> int:
        """Number of first differences with this finding."""
        return sum(difference.finding == finding for difference in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Figures, and every first difference."""
        return {
            "num_matched": self.num_matched,
            "num_unmatched": self.num_unmatched,
            "num_equal": self.num_equal,
            "num_ties": self.count(Finding.TIE),
            "num_faults": self.count(Finding.FAULT),
            "faults_in_both": list(self.faults_in_both),
            "differences": [dataclasses.asdict(one) for one in self.differences],
        }


def compare_outputs(audit: OutputsAudit, other: OutputsAudit) -> Comparison:
    """Compares two audited files. The verdict on a first difference is the target's: both tokens
    follow the same tokens, and were judged there.

    Raises:
      PromptError: the files have no prompt in common.
    """
    pairs, num_unmatched = _matched(audit.outputs, other.outputs)
    if not pairs:
        raise PromptError(
            f"The outputs of {audit.file.label} and of {other.file.label} have no prompt in common;"
            " give files of the same prompts, with the same tokenizer and chat template."
        )
    is_judged = audit.file.is_judged and other.file.is_judged
    differences, in_both = [], []
    for own, theirs in pairs:
        faults = _faults(audit, own), _faults(other, theirs)
        index = first_difference(own.token_ids, theirs.token_ids)
        first = min(faults[0], default=None)
        if first is not None and first in faults[1] and (index is None or first < index):
            in_both.append(own.number)
        if index is None:
            continue
        tokens = [
            one.token_ids[index] if index < len(one.token_ids) else -1 for one in (own, theirs)
        ]
        is_fault = index in faults[0] or index in faults[1]
        is_sampled = own.params.temperature > 0
        finding = Finding.FAULT if is_fault else Finding.SAMPLING if is_sampled else Finding.TIE
        if -1 in tokens and not is_fault:  # one of them was cut off earlier, as it says
            finding = None
        differences.append(
            FirstDifference(
                line=own.number,
                other_line=theirs.number,
                index=index,
                token=tokens[0],
                other_token=tokens[1],
                finding=finding if is_judged else None,
            )
        )
    return Comparison(
        num_matched=len(pairs),
        num_unmatched=num_unmatched,
        differences=tuple(differences),
        faults_in_both=tuple(in_both),
    )


def _matched(
    ours: Sequence[Output], theirs: Sequence[Output]
) -> tuple[list[tuple[Output, Output]], int]:
    """Outputs of the same prompt and temperature, and the number of those without a counterpart."""
    waiting = collections.defaultdict(collections.deque)
    for output in theirs:
        waiting[output.prompt_token_ids, output.params.temperature].append(output)
    pairs = []
    for output in ours:
        candidates = waiting[output.prompt_token_ids, output.params.temperature]
        if candidates:
            pairs.append((output, candidates.popleft()))
    return pairs, len(ours) + len(theirs) - 2 * len(pairs)


def _faults(audit: OutputsAudit, output: Output) -> set[int]:
    """Indices of the faults of an output, its end included."""
    own = audit.judged[audit.outputs.index(output)]
    found = {d.index for d in own.divergences if d.finding == Finding.FAULT}
    end = audit.ends.get(output.number)
    return found | ({end.index} if end is not None else set())


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FilesAudit(Audit):
    """An audit of several files of outputs. It prints as tables.

    Attributes:
      audits: by the name of the file, and how the outputs were computed if it holds several kinds.
      against: the name of the file that the others are compared with; None if there is none.
      comparisons: of the others with it, by name.
    """

    audits: dict[str, OutputsAudit]
    against: str | None
    comparisons: dict[str, Comparison]
    curves: ClassVar = {}  # those of a file are its own

    @property
    def holds(self) -> bool | None:
        """Whether every file holds that is judged; None if none is."""
        found = [audit.holds for audit in self.audits.values() if audit.holds is not None]
        return all(found) if found else None

    @property
    def promise(self) -> str:
        """What is judged, in words."""
        return "; ".join(dict.fromkeys(audit.promise for audit in self.audits.values()))

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        num_good = sum(audit.holds is True for audit in self.audits.values())
        num_judged = sum(audit.holds is not None for audit in self.audits.values())
        words = [f"{num_good} of {num_judged} files are the target's own up to ties"]
        for name, audit in self.audits.items():
            if audit.holds is not False:
                continue
            words.append(f"{name}: {audit.sentence.rstrip('.')}")
            comparison = self.comparisons.get(name)
            if comparison is not None and comparison.faults_in_both:
                words[-1] += (
                    f" ({len(comparison.faults_in_both)} of the outputs with faults have the first "
                    f"one in {self.against} too)"
                )
        return "; ".join(words) + "."

    @property
    def title(self) -> str:
        """Number of files, and the target."""
        target = next(iter(self.audits.values())).target
        return f"Audit of {len(self.audits)} files of outputs under {target}"

    @property
    def located(self) -> list[tuple[str, Divergence]]:
        """Every divergence with its file and line."""
        return [
            (f"{name}, line {line}", divergence)
            for name, own in self.audits.items()
            for line, divergence in own.divergences
        ]

    @property
    def result_tables(self) -> list[TextTable]:
        """A line for each file."""
        titles = {True: "yes", False: "NO", None: "not judged"}
        records = []
        for name, own in self.audits.items():
            count = collections.Counter(d.finding for _, d in own.divergences)
            record = {
                "file": name,
                "label": own.file.label,
                "num_outputs": len(own.outputs),
                "holds": titles[own.holds],
                "exact": percent(own.exact),
                "ties": count[Finding.TIE],
                "expected": own.tie_tests[0].expected if own.tie_tests else None,
                "p": own.tie_p_value if own.tie_tests else None,
                "faults": count[Finding.FAULT] if own.file.is_judged else None,
            }
            comparison = self.comparisons.get(name)
            if comparison is not None:
                equal = f"{comparison.num_equal} of {comparison.num_matched}"
                parted = {f: comparison.count(f) for f in (Finding.TIE, Finding.FAULT)}
                record |= {"equal": equal, "at ties": parted[Finding.TIE]}
                record |= {
                    "at faults": parted[Finding.FAULT],
                    "unmatched": comparison.num_unmatched,
                }
            records.append(record)
        columns = {
            "file": "{file}",
            "outputs of": "{label}",
            "outputs": "{num_outputs}",
            "holds": "{holds}",
            "exact": "{exact}",
            "ties": "{ties}",
            "explained": "{expected:.1f}",
            "p": "{p:.2g}",
            "faults": "{faults}",
        }
        tables = [TextTable.of_columns("Files, each under the target", columns, records)]
        if self.against is not None:
            names = ("equal", "at ties", "at faults", "unmatched")
            columns = {"file": "{file}"} | {name: f"{{{name}}}" for name in names}
            others = [record for record in records if record["file"] != self.against]
            title = f"Beside {self.against}: equal outputs, and where the others first part"
            tables.append(TextTable.of_columns(title, columns, others))
        first = next(iter(self.audits.values()))
        words = {name: own.reference for name, own in self.audits.items()}
        if len(set(words.values())) == 1:
            words = {"all files": first.reference}
        return [*tables, TextTable.of_values("Reference", words)]

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        return {
            "holds": self.holds,
            "sentence": self.sentence,
            "against": self.against,
            "files": {name: audit.to_json() for name, audit in self.audits.items()},
            "comparisons": {name: each.to_json() for name, each in self.comparisons.items()},
        }


def audit_files(
    target: Model,
    files: dict[str, OutputsFile],
    *,
    against: str | None = None,
    dtype: str | None = None,
    reference_weights: str | None = None,
    on_output: Callable[[str, int], None] | None = None,
) -> FilesAudit:
    """Audits files of outputs under one target, with one scorer for each dtype.

    Args:
      target: the model whose outputs they are claimed to be.
      files: by name.
      against: name of the file that the others are compared with.
      dtype: in which all were computed; default what each file says, otherwise the target's.
      reference_weights: the dtype that the reference's weights are rounded to; default the dtype
        of each file.
      on_output: called with a file's name and the number of its outputs judged so far.

    Raises:
      SettingError: `against` is not one of the files, or they name different models.
      PromptError: a file has no prompt in common with the one that it is compared with.
    """
    if against is not None and against not in files:
        raise SettingError(
            f"against={against!r} was given; name one of the files, {', '.join(files)}."
        )
    models = sorted({file.model for file in files.values() if file.model is not None})
    if len(models) > 1:
        raise SettingError(
            f"The files say that their outputs are of {' and of '.join(models)}; audit files of "
            "one model."
        )
    scorers: dict[str, Scorer] = {}
    audits = {}
    for name, file in files.items():
        declared = dtype or (file.dtype if file.is_judged else None) or parameter_dtype(target).name
        if declared not in scorers:
            scorers[declared] = Scorer(
                target,
                max_length=longest_of(list(files.values())) + 1,
                dtype=declared,
                reference_weights=reference_weights,
            )
        note = None if on_output is None else lambda done, name=name: on_output(name, done)
        audits[name] = audit_outputs(target, file, scorer=scorers[declared], on_output=note)
    others = [name for name in audits if name != against] if against is not None else []
    return FilesAudit(
        audits=audits,
        against=against,
        comparisons={name: compare_outputs(audits[name], audits[against]) for name in others},
    )
