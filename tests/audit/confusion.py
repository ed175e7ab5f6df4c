"""The audit of outputs on real outputs of several systems, and on damaged ones.

Real outputs are those of jaxspec in each of its modes, of EQSPEC and EXSPEC as published, and of
transformers: one at a time, eight at a time, and assisted by the draft model. Anything that the
audit finds in them is a false alarm. Then some are damaged, in one way at a time, and what the
audit does not find is a miss. All of them go through files, as for users. `test_confusion.py` runs
it on the embedded pair, and shows the table with `-s`.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.audit.evidence import evidence_limit
from jaxspec.audit.external import OutputsAudit, audit_outputs
from jaxspec.audit.outputs import read_outputs
from jaxspec.audit.scoring import Scorer
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.hf import HuggingFace
from jaxspec.lab.studies import published
from jaxspec.load.models import load_model
from jaxspec.models.base import LanguageModel
from jaxspec.requests.prompts import encode_prompts, sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import temporary_directory
from jaxspec.runtime.report import Columns
from jaxspec.schedulers import Pool, Static
from jaxspec.verifiers import Block, Rejection

Line = dict[str, Any]

NUM_PROMPTS, PROMPT_LENGTH, MAX_TOKENS, BATCH_SIZE = 12, 48, 24, 8
TEMPERATURE = 0.8
NUM_DAMAGED = 36  # outputs that are damaged in each way
NUM_FILES = 8  # of each size, whose stated sampling parameters are not those of the draws
FILE_SIZES = (1, 12)  # outputs in these files
# Sampling parameters by name.
MODES: dict[str, Line] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": TEMPERATURE},
    "top-p": {"temperature": TEMPERATURE, "top_p": 0.8},
}
COLUMNS: Columns = {
    "outputs": "{what}",
    "mode": "{mode}",
    "tried": lambda row: f"{row['num_tried']} {row['unit']}",
    "found wrong": "{num_found}",
}


class Outputs(NamedTuple):
    """The outputs of one system in one of `MODES`: header and lines of their file."""

    system: str
    mode: str
    header: Line
    lines: Sequence[Line]


# By name: what becomes of an output's tokens, given those of another prompt, a random place that is
# not the last, and a random token other than the one that stands there.
DAMAGED: dict[str, Callable[[list[int], list[int], int, int], list[int]]] = {
    "a token changed": lambda ids, other, at, token: [*ids[:at], token, *ids[at + 1 :]],
    "a token dropped": lambda ids, other, at, token: [*ids[:at], *ids[at + 1 :]],
    "a token doubled, the last one dropped": lambda ids, other, at, token: (
        [*ids[: at + 1], *ids[at:-1]]
    ),
    "cut to half": lambda ids, other, at, token: ids[: len(ids) // 2],
    "cut to one token": lambda ids, other, at, token: ids[:1],
    "empty": lambda ids, other, at, token: [],
    "longer than max_tokens": lambda ids, other, at, token: [*ids, ids[-1]],
    "of another prompt": lambda ids, other, at, token: other,
}

# Wrongly stated sampling parameters: for which mode, and what is stated instead.
MISDECLARED: dict[str, tuple[str, Line]] = {
    "greedy, said to be sampled": ("greedy", {"temperature": TEMPERATURE}),
    "sampled, said to be greedy": ("sampled", {"temperature": 0}),
    **{
        f"temperature said to be x {factor:g}": ("sampled", {"temperature": TEMPERATURE * factor})
        for factor in (0.5, 0.8, 1.25, 2)
    },
    "top-p 0.8, not said": ("top-p", {"top_p": 1.0}),
    "top-p 0.8 said, not used": ("sampled", {"top_p": 0.8}),
}


def confusion(names: tuple[str, str], *, with_transformers: bool) -> list[Line]:
    """A row for each system, and for each way of damaging its outputs, of a target and its draft
    model; `with_transformers` (which needs torch) those of `transformers` too."""
    target, draft = (load_model(name, dtype="float32") for name in names)
    lines = sample_prompts()[:NUM_PROMPTS]
    prompts = encode_prompts(lines, target, max_prompt_tokens=PROMPT_LENGTH)
    auditor = Auditor(target, max_length=PROMPT_LENGTH + MAX_TOKENS + 2)
    real = of_engines(target, draft, prompts)
    if with_transformers:
        real += of_transformers(names, target, prompts)
    return [
        *(
            row("real", each.system, each.mode, len(each.lines), auditor.num_wrong(each))
            for each in real
        ),
        *(
            found
            for name in published.BROKEN
            for found in broken(auditor, target, draft, prompts, name)
        ),
        *damaged(auditor, real, target.vocab_size),
        other_seeds(auditor, real),
        *misdeclared(auditor, real),
    ]


def row(
    kind: str, what: str, mode: str, num_tried: int, num_found: int, unit: str = "outputs"
) -> Line:
    """A row of the table."""
    fields = {"kind": kind, "what": what, "mode": mode, "unit": unit}
    return fields | {"num_tried": num_tried, "num_found": num_found}


# ---- outputs


def as_outputs(
    system: str,
    mode: str,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    *,
    engine: str,
    seeds: Sequence[int] | None = None,
) -> Outputs:
    """Outputs with the header and lines of their file."""
    lines: list[Line] = [
        {"prompt_token_ids": list(prompt), "token_ids": list(ids)}
        for prompt, ids in zip(prompts, outputs, strict=True)
    ]
    if seeds is not None:
        lines = [line | {"seed": seed} for line, seed in zip(lines, seeds, strict=True)]
    return Outputs(system, mode, header(mode, engine), lines)


def header(mode: str, engine: str) -> Line:
    """That of a file of outputs."""
    return {"engine": engine, "dtype": "float32", "max_tokens": MAX_TOKENS, **MODES[mode]}


def run_engine(system: str, engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Outputs]:
    """The outputs of an engine in every mode, with their seeds if these determine the draws."""
    found = []
    for number, (mode, fields) in enumerate(MODES.items()):
        seeds = [1000 * number + i for i in range(len(prompts))]
        params = [SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **fields) for seed in seeds]
        outputs = [done.token_ids for done in engine.generate(prompts, params)]
        given = seeds if engine.verifier.is_coupled else None
        found.append(as_outputs(system, mode, prompts, outputs, engine="jaxspec", seeds=given))
    return found


def make_engine(target: LanguageModel, **settings: Any) -> Engine:
    """An engine with room for these prompts and outputs."""
    max_length = PROMPT_LENGTH + MAX_TOKENS + 8
    return Engine(target, batch_size=BATCH_SIZE, max_length=max_length, **settings)


def of_engines(
    target: LanguageModel, draft: LanguageModel, prompts: Sequence[Sequence[int]]
) -> list[Outputs]:
    """The outputs of jaxspec in each of its modes, and of EQSPEC and EXSPEC as published."""
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
        found += run_engine(f"jaxspec, {name}", make_engine(target, **own), prompts)
    return found


def of_transformers(
    names: tuple[str, str], target: LanguageModel, prompts: Sequence[Sequence[int]]
) -> list[Outputs]:
    """The outputs of `transformers`: one prompt at a time, eight at a time, and assisted."""
    import torch

    hf = HuggingFace.load(*names, dtype=target.dtype.name)
    eos = list(target.eos_token_ids)
    ends = {"eos_token_id": eos, "pad_token_id": eos[0], "max_new_tokens": MAX_TOKENS}
    runs: dict[str, Callable[..., list[list[int]]]] = {
        "one at a time": hf.greedy,
        f"{BATCH_SIZE} at a time": functools.partial(hf.greedy, batch_size=BATCH_SIZE),
        "assisted": functools.partial(hf.assisted, draft_length=4),
    }
    found = []
    for name, run in runs.items():
        for mode, params in MODES.items():
            torch.manual_seed(0)
            own: dict[str, Any] = {"do_sample": False}
            if params["temperature"] > 0:
                own = {"do_sample": True, "top_k": 0, "top_p": 1.0} | params
            outputs = run(prompts, **ends, **own)
            found.append(as_outputs(f"transformers, {name}", mode, prompts, outputs, engine="hf"))
    return found


# ---- wrong outputs


def broken(
    auditor: Auditor,
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Sequence[int]],
    system: str,
) -> list[Line]:
    """Outputs of a system with a synchronisation fault."""
    with published.as_broken(system):
        engine = make_engine(target, drafter=DraftModel(draft), scheduler=Static())
        every = run_engine(system, engine, prompts)
    return [
        row("broken", system, outputs.mode, len(prompts), auditor.num_wrong(outputs))
        for outputs in every
        if outputs.mode != "top-p"
    ]


def damaged(auditor: Auditor, real: Sequence[Outputs], vocab_size: int) -> Iterator[Line]:
    """Outputs of all systems, each damaged in one way."""
    for (name, damage), mode in itertools.product(DAMAGED.items(), ("greedy", "sampled")):
        rng = np.random.default_rng(0)
        pool = [
            (outputs, index)
            for outputs in real
            if outputs.mode == mode
            for index in range(len(outputs.lines))
            if len(outputs.lines[index]["token_ids"]) == MAX_TOKENS
        ]
        lines = []
        for place in rng.permutation(len(pool))[:NUM_DAMAGED]:
            outputs, index = pool[place]
            own = outputs.lines[index]
            other = outputs.lines[(index + 1) % len(outputs.lines)]["token_ids"]
            at = int(rng.integers(len(own["token_ids"]) - 1))
            token = (own["token_ids"][at] + 1 + int(rng.integers(vocab_size - 1))) % vocab_size
            ids = damage(own["token_ids"], other, at, token)
            lines.append({"prompt_token_ids": own["prompt_token_ids"], "token_ids": ids})
        wrong = Outputs("", mode, header(mode, "other"), lines)
        yield row("damaged", name, mode, len(lines), auditor.num_wrong(wrong))


def other_seeds(auditor: Auditor, real: Sequence[Outputs]) -> Line:
    """Outputs of jaxspec whose stated seed is the next one."""
    lines = [
        line | {"seed": line["seed"] + 1}
        for outputs in real
        if outputs.mode == "sampled"
        for line in outputs.lines
        if "seed" in line
    ][:NUM_DAMAGED]
    wrong = Outputs("", "sampled", header("sampled", "jaxspec"), lines)
    return row("damaged", "another seed", "sampled", len(lines), auditor.num_wrong(wrong))


def misdeclared(auditor: Auditor, real: Sequence[Outputs]) -> Iterator[Line]:
    """Files of outputs whose stated sampling parameters differ from those of the draws."""
    for (name, (mode, said)), size in itertools.product(MISDECLARED.items(), FILE_SIZES):
        rng = np.random.default_rng(size)
        drawn = [outputs for outputs in real if outputs.mode == mode]
        num_found = 0
        for _ in range(NUM_FILES):
            outputs = drawn[int(rng.integers(len(drawn)))]
            chosen = rng.permutation(len(outputs.lines))[:size]
            lines = [{k: x for k, x in outputs.lines[i].items() if k != "seed"} for i in chosen]
            stated = outputs.header | {"engine": "other"} | said
            wrong = Outputs("", mode, stated, lines)
            num_found += not auditor.audit(wrong).holds
        yield row("misdeclared", name, mode, NUM_FILES, num_found, f"files of {size}")


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
