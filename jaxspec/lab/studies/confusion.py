"""Confusion table of the audit of outputs: real outputs of several systems, and damaged ones.

Real outputs are those of jaxspec in each of its modes, of EQSPEC and EXSPEC as published, and of
transformers: one at a time, eight at a time, and assisted by the draft model. Anything that the
audit finds in them is a false alarm. Then some are damaged, in one way at a time, and what the
audit does not find is a miss. All of them go through files, as for users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from jaxspec.audit.evidence import evidence_limit
from jaxspec.audit.external import OutputsAudit, audit_outputs
from jaxspec.audit.outputs import read_outputs
from jaxspec.audit.scoring import Scorer
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.hf import HuggingFace
from jaxspec.lab.bench.measure import PairBench
from jaxspec.lab.studies import published
from jaxspec.models.base import LanguageModel
from jaxspec.requests.prompts import encode_prompts, sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import temporary_directory
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.schedulers import Pool, Static
from jaxspec.verifiers import Block, Rejection

PROMPT_LENGTH = 48
BATCH_SIZE = 8

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """The outputs of one system with the same sampling parameters.

    Attributes:
      system: the system that made them.
      mode: a key of `ConfusionBench.modes`.
      header: that of their file.
      lines: one for each output.
    """

    system: str
    mode: str
    header: Line
    lines: Sequence[Line]


# Damage one output, given its tokens, the tokens of another prompt's output, and random numbers.
Spoil = Callable[[list[int], list[int], np.random.Generator, int], list[int]]


def _changed(ids: list[int], other: list[int], rng: np.random.Generator, size: int) -> list[int]:
    at = int(rng.integers(len(ids)))
    return [*ids[:at], (ids[at] + 1 + int(rng.integers(size - 1))) % size, *ids[at + 1 :]]


def _dropped(ids: list[int], other: list[int], rng: np.random.Generator, size: int) -> list[int]:
    at = int(rng.integers(len(ids)))
    return [*ids[:at], *ids[at + 1 :]]


def _doubled(ids: list[int], other: list[int], rng: np.random.Generator, size: int) -> list[int]:
    at = int(rng.integers(len(ids) - 1))
    return [*ids[: at + 1], *ids[at:-1]]


SPOILED: dict[str, Spoil] = {
    "a token changed": _changed,
    "a token dropped": _dropped,
    "a token doubled, the last one dropped": _doubled,
    "cut to half": lambda ids, other, rng, size: ids[: len(ids) // 2],
    "cut to one token": lambda ids, other, rng, size: ids[:1],
    "empty": lambda ids, other, rng, size: [],
    "longer than max_tokens": lambda ids, other, rng, size: [*ids, ids[-1]],
    "of another prompt": lambda ids, other, rng, size: other,
}

# Wrongly stated sampling parameters: for which mode, and what is stated instead.
MISDECLARED: dict[str, tuple[str, Callable[[float], Line]]] = {
    "greedy, said to be sampled": ("greedy", lambda t: {"temperature": t}),
    "sampled, said to be greedy": ("sampled", lambda t: {"temperature": 0}),
    **{
        f"temperature said to be x {factor:g}": (
            "sampled",
            lambda t, factor=factor: {"temperature": t * factor},
        )
        for factor in (0.5, 0.8, 1.25, 2)
    },
    "top-p 0.8, not said": ("top-p", lambda t: {"top_p": 1.0}),
    "top-p 0.8 said, not used": ("sampled", lambda t: {"top_p": 0.8}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfusionBench(PairBench):
    """Audit real outputs and deliberately damaged ones, and count false alarms and misses."""

    NAME: ClassVar[str] = "confusion"
    TITLE: ClassVar[str] = "What the audit finds"
    COLUMNS: ClassVar[Columns] = {
        "outputs": "{what}",
        "mode": "{mode}",
        "tried": lambda row: f"{row['num_tried']} {row['unit']}",
        "found wrong": "{num_found}",
    }

    against: Literal["hf"] | None = None
    """Also audit outputs of `transformers` on the same models (extra `parity`)."""
    limit: int = 12
    """Number of sample prompts to use."""
    max_tokens: int = 24
    """Tokens of an output."""
    temperature: float = 0.8
    """Temperature of sampled outputs."""
    spoiled: int = 36
    """Number of outputs to damage in each way."""
    files: int = 8
    """Files of each size whose stated sampling parameters differ from those of the draws."""
    file_sizes: tuple[int, ...] = (1, 12)
    """Numbers of outputs in these files."""

    @property
    def modes(self) -> dict[str, Line]:
        """Sampling parameters by name."""
        sampled = {"temperature": self.temperature}
        return {
            "greedy": {"temperature": 0},
            "sampled": sampled,
            "top-p": sampled | {"top_p": 0.8},
        }

    def measure(self) -> dict[str, Any]:
        """A row for each system, and for each way of damaging its outputs."""
        target, draft = self.load()
        prompts = encode_prompts(
            sample_prompts()[: self.limit], target, max_prompt_tokens=PROMPT_LENGTH
        )
        auditor = Auditor(target, max_length=PROMPT_LENGTH + self.max_tokens + 2)
        real = self._of_engines(target, draft, prompts)
        if self.against == "hf":
            real += self._of_transformers(target, prompts)
        rows = [
            {
                "kind": "real",
                "what": outputs.system,
                "mode": outputs.mode,
                "unit": "outputs",
                "num_tried": len(outputs.lines),
                "num_found": auditor.num_wrong(outputs),
            }
            for outputs in real
        ]
        num_false_alarms = sum(row["num_found"] for row in rows)
        for system in published.BROKEN:
            rows += self._broken(auditor, target, draft, prompts, system)
        rows += self._spoiled(auditor, real, target.vocab_size)
        rows += self._other_seeds(auditor, real)
        rows += self._misdeclared(auditor, real)
        return {"results": rows, "num_false_alarms": num_false_alarms}

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """False alarms."""
        num = sum(row["num_tried"] for row in document["results"] if row["kind"] == "real")
        found = document["num_false_alarms"]
        style = "bold red" if found else "bold green"
        return [(f"{found} false alarms in {num} real outputs.", style)]

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """The rows, grouped by kind."""
        rows = document["results"]
        return [TextTable.of_columns(self.TITLE, self.COLUMNS, rows, group=lambda row: row["kind"])]

    # Outputs.

    def _params(self, mode: str, seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, seed=seed, **self.modes[mode])

    def _outputs(
        self,
        system: str,
        mode: str,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        *,
        engine: str,
        seeds: Sequence[int] | None = None,
    ) -> Outputs:
        lines: list[Line] = [
            {"prompt_token_ids": list(prompt), "token_ids": list(ids)}
            for prompt, ids in zip(prompts, outputs, strict=True)
        ]
        if seeds is not None:
            lines = [line | {"seed": seed} for line, seed in zip(lines, seeds, strict=True)]
        header = {"engine": engine, "dtype": self.dtype, "max_tokens": self.max_tokens}
        return Outputs(system=system, mode=mode, header=header | self.modes[mode], lines=lines)

    def _run_engine(
        self, system: str, engine: Engine, prompts: Sequence[Sequence[int]]
    ) -> list[Outputs]:
        """The outputs of an engine in every mode, with their seeds if these determine the draws."""
        found = []
        for number, mode in enumerate(self.modes):
            seeds = [1000 * number + i for i in range(len(prompts))]
            params = [self._params(mode, seed) for seed in seeds]
            completions = engine.generate(prompts, params)
            found.append(
                self._outputs(
                    system,
                    mode,
                    prompts,
                    [completion.token_ids for completion in completions],
                    engine="jaxspec",
                    seeds=seeds if engine.verifier.is_coupled else None,
                )
            )
        return found

    def _of_engines(
        self, target: LanguageModel, draft: LanguageModel, prompts: Sequence[Sequence[int]]
    ) -> list[Outputs]:
        drafter = DraftModel(draft)
        aligned: dict[str, Any] = {"drafter": drafter, "layout": "aligned"}
        settings: dict[str, dict[str, Any]] = {
            "plain": {},
            "coupled, draft model": {"drafter": drafter},
            "coupled, n-gram": {"drafter": NGram()},
            "coupled, exactness ties": {"drafter": drafter, "exactness": "ties"},
            "rejection": {"drafter": drafter, "verifier": Rejection()},
            "block": {"drafter": drafter, "verifier": Block()},
            "aligned + static": aligned | {"scheduler": Static()},
            "aligned + pool": aligned | {"scheduler": Pool()},
            "EQSPEC as published": published.eqspec(draft),
            "EXSPEC as published": published.exspec(draft),
        }
        found = []
        for name, own in settings.items():
            engine = self._engine(target, **own)
            found += self._run_engine(f"jaxspec, {name}", engine, prompts)
        return found

    def _engine(self, target: LanguageModel, **settings: Any) -> Engine:
        max_length = PROMPT_LENGTH + self.max_tokens + 8
        return Engine(target, batch_size=BATCH_SIZE, max_length=max_length, **settings)

    def _of_transformers(
        self, target: LanguageModel, prompts: Sequence[Sequence[int]]
    ) -> list[Outputs]:
        import torch

        hf = HuggingFace.load(self.target, self.draft, dtype=target.dtype.name)
        eos = list(target.eos_token_ids)
        ends = {"eos_token_id": eos, "pad_token_id": eos[0], "max_new_tokens": self.max_tokens}
        runs: dict[str, Callable[..., list[list[int]]]] = {
            "one at a time": hf.greedy,
            f"{BATCH_SIZE} at a time": lambda prompts, **own: hf.greedy(
                prompts, batch_size=BATCH_SIZE, **own
            ),
            "assisted": lambda prompts, **own: hf.assisted(prompts, draft_length=4, **own),
        }
        found = []
        for name, run in runs.items():
            for mode, params in self.modes.items():
                torch.manual_seed(0)
                own: dict[str, Any] = {"do_sample": False}
                if params["temperature"] > 0:
                    own = {"do_sample": True, "top_k": 0, "top_p": 1.0} | params
                outputs = run(prompts, **ends, **own)
                system = f"transformers, {name}"
                found.append(self._outputs(system, mode, prompts, outputs, engine="hf"))
        return found

    # Wrong outputs.

    def _broken(
        self,
        auditor: Auditor,
        target: LanguageModel,
        draft: LanguageModel,
        prompts: Sequence[Sequence[int]],
        system: str,
    ) -> list[Line]:
        """Outputs of a system with a synchronisation fault."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(published.as_broken(system))
            engine = self._engine(target, drafter=DraftModel(draft), scheduler=Static())
            every = self._run_engine(system, engine, prompts)
        return [
            self._row("broken", system, outputs.mode, len(prompts), auditor.num_wrong(outputs))
            for outputs in every
            if outputs.mode != "top-p"
        ]

    def _spoiled(self, auditor: Auditor, real: Sequence[Outputs], vocab_size: int) -> list[Line]:
        """Outputs of all systems, each damaged in one way."""
        rows = []
        for name, spoil in SPOILED.items():
            for mode in ("greedy", "sampled"):
                rng = np.random.default_rng(0)
                pool = [
                    (outputs, index)
                    for outputs in real
                    if outputs.mode == mode
                    for index in range(len(outputs.lines))
                    if len(outputs.lines[index]["token_ids"]) == self.max_tokens
                ]
                lines = []
                for place in rng.permutation(len(pool))[: self.spoiled]:
                    outputs, index = pool[place]
                    own = outputs.lines[index]
                    other = outputs.lines[(index + 1) % len(outputs.lines)]["token_ids"]
                    ids = spoil(own["token_ids"], other, rng, vocab_size)
                    prompt = own["prompt_token_ids"]
                    lines.append({"prompt_token_ids": prompt, "token_ids": ids})
                header = {**self._outputs("", mode, [], [], engine="other").header}
                spoiled = Outputs(system="", mode=mode, header=header, lines=lines)
                num_found = auditor.num_wrong(spoiled)
                rows.append(self._row("spoiled", name, mode, len(lines), num_found))
        return rows

    def _other_seeds(self, auditor: Auditor, real: Sequence[Outputs]) -> list[Line]:
        """Outputs of jaxspec whose stated seed is the next one."""
        lines = [
            line | {"seed": line["seed"] + 1}
            for outputs in real
            if outputs.mode == "sampled"
            for line in outputs.lines
            if "seed" in line
        ][: self.spoiled]
        header = self._outputs("", "sampled", [], [], engine="jaxspec").header
        spoiled = Outputs(system="", mode="sampled", header=header, lines=lines)
        num_found = auditor.num_wrong(spoiled)
        return [self._row("spoiled", "another seed", "sampled", len(lines), num_found)]

    def _misdeclared(self, auditor: Auditor, real: Sequence[Outputs]) -> list[Line]:
        """Files of outputs whose stated sampling parameters differ from those of the draws."""
        rows = []
        for name, (mode, say) in MISDECLARED.items():
            for size in self.file_sizes:
                rng = np.random.default_rng(size)
                drawn = [outputs for outputs in real if outputs.mode == mode]
                num_found = 0
                for _ in range(self.files):
                    outputs = drawn[int(rng.integers(len(drawn)))]
                    chosen = rng.permutation(len(outputs.lines))[:size]
                    lines = [
                        {k: x for k, x in outputs.lines[i].items() if k != "seed"} for i in chosen
                    ]
                    header = outputs.header | {"engine": "other"} | say(self.temperature)
                    wrong = Outputs(system="", mode=mode, header=header, lines=lines)
                    num_found += not auditor.audit(wrong).holds
                unit = f"files of {size}"
                rows.append(self._row("misdeclared", name, mode, self.files, num_found, unit))
        return rows

    def _row(
        self, kind: str, what: str, mode: str, tried: int, found: int, unit: str = "outputs"
    ) -> Line:
        fields = {"kind": kind, "what": what, "mode": mode, "unit": unit}
        return fields | {"num_tried": tried, "num_found": found}


class Auditor:
    """Audits files of outputs under one target; its programs are compiled once."""

    def __init__(self, target: LanguageModel, *, max_length: int):
        self._target = target
        self._scorer = Scorer(target, max_length=max_length)

    def audit(self, outputs: Outputs) -> OutputsAudit:
        """The audit of a file of these outputs."""
        with temporary_directory() as directory:
            path = directory / "outputs.jsonl"
            lines = (outputs.header, *outputs.lines)
            path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
            file = read_outputs(path, self._target)
        return audit_outputs(self._target, file, scorer=self._scorer)

    def num_wrong(self, outputs: Outputs) -> int:
        """The number of outputs that are individually found wrong; all of them if only the file as
        a whole is."""
        audit = self.audit(outputs)
        most = evidence_limit(len(audit.sampled))
        num = sum(
            own.first is not None or output.number in audit.ends or (own.log_evidence or 0) > most
            for output, own in zip(audit.outputs, audit.judged, strict=True)
        )
        return num if num or audit.holds else len(audit.outputs)
