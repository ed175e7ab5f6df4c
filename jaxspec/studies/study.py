"""The study of 2510.22876 on the user's own machine: layouts x schedulers x batch sizes.

    python -m jaxspec.studies.study --quick --output study

EQSPEC is the aligned layout with static batches, EXSPEC the aligned layout with the same-length
pool, and jaxspec's own the ragged layout with continuous batching; all six combinations are run,
with speculation and without. Every result is a cell, written to the disk as soon as it is known, so
an interrupted study goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console

from jaxspec.audit.judge import Finding, judge
from jaxspec.audit.scoring import Scorer
from jaxspec.audit.self_audit import StudyMetrics
from jaxspec.bench.schedulers import list_scheduling
from jaxspec.cache.layouts import Layout
from jaxspec.checkpoint.format import is_converted, read_manifest
from jaxspec.checkpoint.resolve import cached_models, load_model
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.engine import Engine
from jaxspec.errors import CheckpointError, SettingError
from jaxspec.models.base import Model
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import (
    SAMPLE_PROMPTS,
    PromptLine,
    encode_prompts,
    read_prompts,
    sample_prompts,
)
from jaxspec.requests.requests import Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import sha256_of, write_atomically
from jaxspec.runtime.environment import provenance
from jaxspec.schedulers import Continuous, Pool, Scheduler, Static
from jaxspec.studies import published
from jaxspec.studies.replay import Row, emitted_by_round, replay_pool
from jaxspec.studies.report import write_report
from jaxspec.studies.time_breakdown import clocked, time_parts
from jaxspec.telemetry.counters import Acceptance

# The file that the published study decodes, by its hash.
SPEC_BENCH = {
    "sha256": "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    "source": "github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl",
    "commit": "fd2c1cd7d2201ef71db4c5f4e455008f017967bf",
}
LAYOUTS: tuple[Layout, ...] = ("ragged", "aligned")
SCHEDULERS = ("static", "pool", "continuous")
GROUPING_WINDOW = 50  # the paper's
ROUNDS_PROMPTS, ROUNDS_PROMPT_TOKENS, ROUNDS_TOKENS = 32, 64, 48  # of the table of rounds
SERVED = ("EQSPEC", "EXSPEC", "jaxspec", "plain, ragged + continuous")
SERVING_LOAD = 0.7  # arrivals, as a share of what the slowest system decodes offline
EQUAL_LENGTH = 64  # tokens of every prompt where prompts are of equal length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Reproduce the published study of batched speculative decoding, and see what beats it."""

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    draft: str = "demo-draft"
    """Its draft model."""
    prompts: pathlib.Path | None = None
    """Prompt file; Spec-Bench's question.jsonl is recognised by its hash. Default: the sample
    prompts."""
    output: pathlib.Path = pathlib.Path("study")
    """Directory for the report (study.html, study.json, plots) and its cells."""
    resume: bool = False
    """Go on with the cells that are in the output directory already."""
    quick: bool = False
    """Few requests, cut short: minutes on a CPU."""
    limit: int | None = None
    """Use the first so many prompts."""
    max_prompt_tokens: int = 1024
    """Prompts are cut to their first so many tokens."""
    max_tokens: int = 128
    """Tokens emitted per prompt; fewer where the model ends by itself."""
    draft_length: int = 5
    """Tokens drafted per round."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Seats."""
    pool: int = 48
    """Rows of the pool, at least twice the batch size."""
    repeats: int = 3
    """Timed runs of every cell, each beside a run of plain decoding."""
    oracle: float | None = None
    """Where there are no weights (`random:PRESET`): draft what the target will emit, right with
    this probability, at the cost of the draft model."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of parameters, compute and cache; default float32 on CPU, else the checkpoint's."""
    seed: int = 0
    """Of arrivals and of random prompts."""

    def run(self, console: Console) -> dict[str, Any]:
        """Runs what is missing, writes the report; returns the JSON document."""
        started_s = time.perf_counter()
        options = _quick(self) if self.quick else self
        _check(options)
        bench = Bench(options, console)
        cells = {name: bench.cell(name, measure) for name, measure in bench.cells().items()}
        document = {
            "command": "bench study",
            "config": options.to_json(),
            "inputs": bench.inputs,
            "is_spec_bench": bench.is_spec_bench,
            "is_synthetic": options.oracle is not None,
            "cells": cells,
            "elapsed_s": time.perf_counter() - started_s,
            **provenance(),
        }
        write_report(document, options.output)
        console.print(f"report written to {options.output}", markup=False, highlight=False)
        return document

    def to_json(self) -> dict[str, Any]:
        """The options that results depend on; files by name only."""
        fields = dataclasses.asdict(self) | {
            "prompts": "sample prompts" if self.prompts is None else self.prompts.name,
            "batch_sizes": list(self.batch_sizes),
        }
        left_out = ("output", "resume", "json")
        return {name: value for name, value in fields.items() if name not in left_out}


def _quick(study: Study) -> Study:
    """The same study on requests that a CPU decodes in minutes."""
    return dataclasses.replace(
        study,
        max_prompt_tokens=min(study.max_prompt_tokens, 64),
        max_tokens=min(study.max_tokens, 48),
        repeats=min(study.repeats, 5),
    )


def _check(options: Study) -> None:
    for name in ("limit", "max_prompt_tokens", "max_tokens", "draft_length", "pool", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise SettingError(f"--{option} {value} was given; it must be at least 1.")
    if not options.batch_sizes or min(options.batch_sizes) < 1:
        given = " ".join(map(str, options.batch_sizes)) or "nothing"
        raise SettingError(f"--batch-sizes {given} was given; give sizes of at least 1.")
    if _cells_in(options.output) and not options.resume:
        raise SettingError(
            f"The directory {options.output} holds a study already; add --resume to go on with it, "
            "or name another --output."
        )


def _cells_in(output: pathlib.Path) -> list[pathlib.Path]:
    return sorted((output / "cells").glob("*.json"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """What one cell decodes with.

    Attributes:
      layout: of the target's cache.
      scheduler: a name of `SCHEDULERS`.
      batch_size: batch_size.
      speculates: False decodes plainly, by the window-1 loop.
    """

    layout: Layout
    scheduler: str
    batch_size: int
    speculates: bool

    @property
    def name(self) -> str:
        """Of the cell."""
        kind = "speculative" if self.speculates else "plain"
        return f"decode-{self.layout}-{self.scheduler}-{kind}-b{self.batch_size}"

    @property
    def system(self) -> str:
        """What it is known as; see `system_of`."""
        return system_of(self.layout, self.scheduler, speculates=self.speculates)


def system_of(layout: str, scheduler: str, *, speculates: bool) -> str:
    """The published system with this layout and scheduler, or jaxspec, or just both names."""
    known = {
        ("aligned", "static"): "EQSPEC",
        ("aligned", "pool"): "EXSPEC",
        ("ragged", "continuous"): "jaxspec",
    }
    if not speculates:
        return f"plain, {layout} + {scheduler}"
    return known.get((layout, scheduler), f"{layout} + {scheduler}")


class Bench:
    """The models and requests of a study, and its cells."""

    def __init__(self, options: Study, console: Console):
        self.options = options
        self.console = console
        lines = sample_prompts() if options.prompts is None else read_prompts(options.prompts)
        lines = lines[: options.limit]
        path = SAMPLE_PROMPTS if options.prompts is None else options.prompts
        self.inputs = {pathlib.Path(str(path)).name: sha256_of(str(path))}
        self.is_spec_bench = SPEC_BENCH["sha256"] in self.inputs.values()
        self.target = load_model(options.target, dtype=options.dtype)
        self.draft = load_model(options.draft, dtype=options.dtype)
        self.models = {
            "target": _identity(options.target, self.target),
            "draft": _identity(options.draft, self.draft),
        }
        self.results: dict[str, dict[str, Any]] = {}
        if self.target.tokenizer is None:
            self.prompts = self.in_file_order = self._random_prompts(len(lines))
        else:
            self.in_file_order = self._encode(lines)
            self.prompts = self._encode(_in_turn(lines))

    def _encode(self, lines: Sequence[PromptLine]) -> list[tuple[int, ...]]:
        return encode_prompts(lines, self.target, max_prompt_tokens=self.options.max_prompt_tokens)

    def _random_prompts(self, num_prompts: int) -> list[tuple[int, ...]]:
        """Random ids, for a target without a tokenizer."""
        random = np.random.default_rng(self.options.seed)
        longest = self.options.max_prompt_tokens
        lengths = random.integers(max(longest // 8, 1), longest + 1, num_prompts)
        vocab_size = min(self.target.vocab_size, self.draft.vocab_size)
        return [tuple(random.integers(0, vocab_size, length).tolist()) for length in lengths]

    # ---- cells

    def cells(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """What measures each cell, by its name; later ones may read the results of earlier."""
        sizes = self.options.batch_sizes
        found: dict[str, Callable[[], dict[str, Any]]] = {"reference": self.measure_reference}
        for size in sizes:
            for decoding in self.decodings(size):
                found[decoding.name] = functools.partial(self.measure_decoding, decoding)
        for size in sorted({min(sizes, key=lambda s: abs(s - wanted)) for wanted in (4, 8)}):
            found[f"rounds-b{size}"] = functools.partial(self.measure_rounds, size)
        found["grouping"] = self.measure_grouping
        wanted = (8,) if self.options.quick else (1, 2, 4, 8)
        for size in sorted({min(sizes, key=lambda s: abs(s - one)) for one in wanted}):
            for decoding in self.decodings(size):
                if decoding.system in SERVED:
                    name = decoding.name.replace("decode-", "serving-", 1)
                    found[name] = functools.partial(self.measure_serving, decoding)
        return found

    def decodings(self, batch_size: int) -> list[Decoding]:
        """All combinations; a quick study leaves out most that are no one's, except at batch 8."""
        every = [
            Decoding(
                layout=layout, scheduler=scheduler, batch_size=batch_size, speculates=speculates
            )
            for speculates in (False, True)
            for layout in LAYOUTS
            for scheduler in SCHEDULERS
        ]
        if not self.options.quick or batch_size == 8:
            return every
        named = ("EQSPEC", "EXSPEC", "jaxspec", "plain, ragged + continuous")
        return [decoding for decoding in every if decoding.system in named]

    def cell(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A cell's result: what an earlier run of the same study has left, or measured now."""
        path = self.options.output / "cells" / f"{name}.json"
        started_s = time.perf_counter()
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["settings"] != self.settings:
                raise SettingError(
                    f"The cell {name} in {self.options.output} was made with other models, prompts "
                    "or options; resume with the same ones, or name another --output."
                )
            note = "kept"
        else:
            self.console.print(f"[dim]{name} ...", end="\r", highlight=False)
            # Whoever reads a time should know what else the machine was doing.
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
            result = {
                "name": name,
                "settings": self.settings,
                "load_average": load,
                **measure(),
            }
            result["provenance"] = self.provenance(result.get("engine", {}))
            write_atomically(path, json.dumps(result).encode() + b"\n")
            note = f"{time.perf_counter() - started_s:.1f} s"
        self.console.print(f"{name}: {note}", highlight=False)
        self.results[name] = result
        return result

    @functools.cached_property
    def settings(self) -> str:
        """Digest of all that a cell's result depends on besides the machine and its name."""
        options = self.options.to_json()
        for name in ("batch_sizes",):  # they choose cells
            del options[name]
        known = [options, self.inputs, self.models]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    def provenance(self, engine: dict[str, Any]) -> dict[str, Any]:
        """Where a result comes from."""
        return {
            "models": self.models,
            "prompts": self.inputs,
            "engine": engine,
            "verifier": engine.get("verifier"),
            "exactness": engine.get("exactness"),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            **provenance(),
        }

    # ---- what is decoded

    def requests(self, batch_size: int) -> list[Request]:
        """A quick study decodes three times as many requests as there are rows, at least 24;
        where prompts do not suffice they come again, each time cut by eight more tokens."""
        num = max(24, 3 * batch_size) if self.options.quick else len(self.prompts)
        if self.options.limit is not None:
            num = min(num, self.options.limit)
        prompts = []
        for index in range(num):
            turn, place = divmod(index, len(self.prompts))
            kept = max(1, self.options.max_prompt_tokens - 8 * turn)
            prompts.append(self.prompts[place][:kept])
        return self._as_requests(prompts)

    def _as_requests(self, prompts: Sequence[Sequence[int]]) -> list[Request]:
        # The embedded pair writes on until it is stopped; so do random weights.
        params = SamplingParams(max_tokens=self.options.max_tokens)
        return make_requests(prompts, params, self.target, longest=self.max_length)

    @property
    def max_length(self) -> int:
        """Room for the longest prompt, its completion, and a window that begins at its end."""
        longest = max(map(len, (*self.prompts, *self.in_file_order)))
        return longest + self.options.max_tokens + self.options.draft_length + 2

    def scheduler(self, name: str, batch_size: int) -> Scheduler:
        """By its name."""
        if name == "pool":
            return Pool(max(self.options.pool, 2 * batch_size))
        return {"static": Static, "continuous": Continuous}[name]()

    def engine(self, decoding: Decoding, drafter: Drafter | None = None) -> Engine:
        """An engine for a decoding, with the study's drafter or another."""
        if decoding.speculates and drafter is None:
            drafter = self.drafter
        return self.compiled(
            drafter=drafter,
            layout=decoding.layout,
            scheduler=self.scheduler(decoding.scheduler, decoding.batch_size),
            batch_size=decoding.batch_size,
        )

    def compiled(self, **settings: Any) -> Engine:
        """An engine of the study's shape, its programs compiled."""
        engine = Engine(
            self.target,
            **settings,
            draft_length=self.options.draft_length,
            max_length=self.max_length,
            prefill_chunk=64 if self.options.quick else 128,
        )
        engine.generate([[0, 0]], SamplingParams(max_tokens=2))
        return engine

    @functools.cached_property
    def drafter(self) -> Drafter:
        """The draft model, or an oracle that costs as much."""
        draft = DraftModel(self.draft)
        if self.options.oracle is None:
            return draft
        outputs = self.results["reference"]["token_ids"]
        requests = self.requests(max(self.options.batch_sizes))
        sequences = [
            request.prompt_token_ids + tuple(output)
            for request, output in zip(requests, outputs, strict=True)
        ]
        return Oracle(sequences, acceptance=self.options.oracle, cost_of=draft)

    @functools.cached_property
    def scorer(self) -> Scorer:
        """For judging divergences."""
        return Scorer(self.target, max_length=self.max_length)

    # ---- measurements

    def measure_reference(self) -> dict[str, Any]:
        """Batch-1 plain decoding, which everything is compared with."""
        engine = self.engine(
            Decoding(layout="ragged", scheduler="static", batch_size=1, speculates=False)
        )
        requests = self.requests(max(self.options.batch_sizes))
        completions = list(engine.run(requests))
        return {
            "engine": engine.describe(),
            "token_ids": [list(completion.token_ids) for completion in completions],
        }

    def measure_decoding(self, decoding: Decoding) -> dict[str, Any]:
        """Rounds, counters, equivalence, wall time beside plain decoding, and where it goes."""
        requests = self.requests(decoding.batch_size)
        compile_started_s = time.perf_counter()
        engine = self.engine(decoding)
        compile_s = time.perf_counter() - compile_started_s
        baseline = self.baseline(decoding.batch_size)
        run_s: dict[str, list[float]] = {"own": [], "plain": []}
        completions: list[Completion] = []
        schedule: dict[str, int] = {}
        # Turns: a slow moment of the machine falls on both.
        for _ in range(self.options.repeats):
            for kind, each in (("plain", baseline), ("own", engine)):
                before = _counts(each)
                started_s = time.perf_counter()
                completions = list(each.run(requests))
                run_s[kind].append(time.perf_counter() - started_s)
                schedule = {name: n - before[name] for name, n in _counts(each).items()}
        total = Acceptance.total([completion.acceptance for completion in completions])
        own_rounds = [completion.acceptance.num_rounds for completion in completions]
        shape = engine.shape
        prompt_tokens = sum(len(request.prompt_token_ids) - 1 for request in requests)
        result = {
            "system": decoding.system,
            **dataclasses.asdict(decoding),
            "engine": engine.describe(),
            "num_requests": len(requests),
            "num_tokens": total.num_emitted_tokens,
            "num_prompt_tokens": prompt_tokens + len(requests),
            "run_s": run_s["own"],
            "plain_run_s": run_s["plain"],
            "tokens_per_s": total.num_emitted_tokens / float(np.median(run_s["own"])),
            "ratio_to_plain": float(np.median(np.array(run_s["plain"]) / np.array(run_s["own"]))),
            "compile_s": compile_s,
            "schedule": schedule,
            "ideal_rounds": list_scheduling(own_rounds, decoding.batch_size),
            "acceptance": total.to_json(),
            "target_positions": {
                "live": schedule["num_rows"] * shape.verify_length + prompt_tokens,
                "computed": schedule["num_rounds"] * shape.batch_size * shape.verify_length
                + _chunked(requests, shape.prefill_chunk),
            },
            "equivalence": self.equivalence(requests, completions),
            "outputs_sha256": _digest(completions),
        }
        if decoding.speculates:
            result["rows"] = [
                [len(completion.prompt_token_ids), *emitted_by_round(completion.origins)]
                for completion in completions
            ]
        if self.is_dissected(decoding):
            result["anatomy"] = self.measure_anatomy(engine, requests)
        return result

    def is_dissected(self, decoding: Decoding) -> bool:
        """Whether the parts of its rounds are timed: each is compiled once more for it."""
        sizes = (min(self.options.batch_sizes, key=lambda s: abs(s - 8)), 32)
        return not self.options.quick or (
            decoding.system in SERVED and decoding.batch_size in sizes
        )

    def measure_anatomy(self, engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
        """Where one run's time goes."""
        before = _counts(engine)
        started_s = time.perf_counter()
        with clocked(engine) as clock:
            list(engine.run(requests))
        wall_s = time.perf_counter() - started_s - clock.own_s
        schedule = {name: n - before[name] for name, n in _counts(engine).items()}
        assert clock.middle is not None
        parts = time_parts(engine, clock.middle)
        num_rounds = schedule["num_rounds"]
        num_regroupings = {
            "static": 0,
            "pool": num_rounds,
            "continuous": len(requests),  # at most: rows that end together are replaced together
        }[engine.scheduler.name]
        seconds = {
            "draft": num_rounds * parts.get("draft", 0.0),
            "verify": num_rounds * (parts["target"] + parts.get("verify", 0.0)),
            "align": schedule["num_realignments"] * parts["align"],
            "seat": num_regroupings * parts["seat"],
        }
        in_rounds = clock.seconds["rounds"] - sum(seconds.values())
        return {
            "wall_s": wall_s,
            "part_s": parts,
            "num_regroupings": num_regroupings,
            "seconds": {
                **seconds,
                "rest of the rounds": in_rounds,
                "prefill": clock.seconds["prefill"],
                "host": wall_s - sum(clock.seconds.values()),
            },
        }

    def baseline(self, batch_size: int) -> Engine:
        """The window-1 plain loop of this batch size: the fastest plain decoding there is."""
        if getattr(self, "_baseline_size", None) != batch_size:
            self._baseline = self.engine(
                Decoding(
                    layout="ragged",
                    scheduler="continuous",
                    batch_size=batch_size,
                    speculates=False,
                )
            )
            self._baseline_size = batch_size
        return self._baseline

    def equivalence(
        self, requests: Sequence[Request], completions: Sequence[Completion]
    ) -> dict[str, Any]:
        """Outputs beside batch-1 plain decoding: the published metrics on text, then tokens."""
        references = self.results["reference"]["token_ids"][: len(requests)]
        findings = []
        for request, completion, reference in zip(requests, completions, references, strict=True):
            divergence = judge(
                self.scorer,
                prompt_ids=request.prompt_token_ids,
                output_ids=completion.token_ids,
                reference_ids=reference,
                params=request.params,
            )
            findings.append(None if divergence is None else divergence.finding)
        outputs = [completion.token_ids for completion in completions]
        metrics = StudyMetrics.of(self.target, outputs, references)
        return {
            "exact_text": metrics and metrics.exact,
            "partial_text": metrics and metrics.partial,
            "exact_tokens": findings.count(None) / len(findings),
            "num_outputs": len(findings),
            "num_ties": findings.count(Finding.TIE),
            "num_faults": len(findings) - findings.count(None) - findings.count(Finding.TIE),
        }

    def measure_rounds(self, batch_size: int) -> dict[str, Any]:
        """Rounds and token-positions on the same few prompts, beside the ideal schedule's."""
        prompts = [prompt[:ROUNDS_PROMPT_TOKENS] for prompt in self.in_file_order[:ROUNDS_PROMPTS]]
        params = SamplingParams(max_tokens=ROUNDS_TOKENS)
        requests = make_requests(prompts, params, self.target, longest=self.max_length)
        prompt_tokens = sum(len(prompt) - 1 for prompt in prompts)
        systems, outputs, own_rounds = {}, {}, []
        for name, make in self.systems_by_rounds(batch_size).items():
            engine = make()
            before, read_before = _counts(engine), int(engine.state.drafter.num_positions)
            completions = list(engine.run(requests))
            num_prefilled = int(engine.state.drafter.num_positions) - read_before
            schedule = {key: n - before[key] for key, n in _counts(engine).items()}
            total = Acceptance.total([completion.acceptance for completion in completions])
            outputs[name] = [completion.token_ids for completion in completions]
            own_rounds = [completion.acceptance.num_rounds for completion in completions]
            committed = sum(map(len, prompts)) + total.num_emitted_tokens
            systems[name] = {
                "engine": engine.describe(),
                "schedule": schedule,
                "acceptance": total.to_json(),
                "num_drafted": total.num_draft_tokens,
                "num_committed": committed,
                "target_positions": schedule["num_rows"] * engine.shape.verify_length
                + prompt_tokens,
                "draft_positions": num_prefilled,
            }
        assert own_rounds, "jaxspec comes last: the ideal is of its acceptance"
        ours = outputs["jaxspec"]
        for name, system in systems.items():
            pairs = zip(outputs[name], ours, strict=True)
            system["num_equal_to_jaxspec"] = sum(own == other for own, other in pairs)
        return {
            "batch_size": batch_size,
            "num_prompts": len(prompts),
            "max_prompt_tokens": ROUNDS_PROMPT_TOKENS,
            "max_tokens": ROUNDS_TOKENS,
            "draft_length": self.options.draft_length,
            "systems": systems,
            "ideal_rounds": list_scheduling(own_rounds, batch_size),
            "ideal_rounds_static": sum(
                max(own_rounds[first : first + batch_size])
                for first in range(0, len(own_rounds), batch_size)
            ),
        }

    def systems_by_rounds(self, batch_size: int) -> dict[str, Callable[[], Engine]]:
        """EQSPEC and EXSPEC as their code runs them, then with jaxspec's drafting; jaxspec last."""

        def make(layout: Layout, scheduler: str) -> Engine:
            decoding = Decoding(
                layout=layout, scheduler=scheduler, batch_size=batch_size, speculates=True
            )
            return self.engine(decoding, DraftModel(self.draft))

        def make_published(settings: dict[str, Any]) -> Engine:
            return self.compiled(**settings, batch_size=batch_size)

        pool = {"window_size": max(ROUNDS_PROMPTS, 2 * batch_size)}
        return {
            "EQSPEC as published": functools.partial(make_published, published.eqspec(self.draft)),
            "EXSPEC as published": functools.partial(
                make_published, published.exspec(self.draft, **pool)
            ),
            "EQSPEC": functools.partial(make, "aligned", "static"),
            "EXSPEC": functools.partial(make, "aligned", "pool"),
            "jaxspec": functools.partial(make, "ragged", "continuous"),
        }

    def measure_serving(self, decoding: Decoding) -> dict[str, Any]:
        """Latencies of requests that arrive at random times, the same for every system."""
        engine = self.engine(decoding)
        requests = self.requests(decoding.batch_size)
        arrivals_per_s = self.arrival_rate(decoding.batch_size)
        gaps = np.random.default_rng(self.options.seed).exponential(size=len(requests))
        arrival_s = np.cumsum(gaps) / arrivals_per_s
        latency_s, num_tokens, elapsed_s = serve(engine, requests, arrival_s)
        p50, p90, p99 = np.percentile(latency_s, (50, 90, 99)).tolist()
        return {
            "system": decoding.system,
            **dataclasses.asdict(decoding),
            "engine": engine.describe(),
            "num_requests": len(requests),
            "arrivals_per_s": arrivals_per_s,
            "tokens_per_s": num_tokens / elapsed_s,
            "latency_s": {"p50": p50, "p90": p90, "p99": p99, "mean": float(np.mean(latency_s))},
            "all_latency_s": latency_s,
        }

    def arrival_rate(self, batch_size: int) -> float:
        """Requests per second: a share of what the slowest of the systems decodes offline, so that
        no queue grows without bound."""
        rates = [
            cell["num_requests"] / float(np.median(cell["run_s"]))
            for cell in self.results.values()
            if cell["name"].startswith("decode-")
            and cell["system"] in SERVED
            and cell["batch_size"] == batch_size
        ]
        return SERVING_LOAD * min(rates)

    def measure_grouping(self) -> dict[str, Any]:
        """Grouping rates of the pool for every batch size and window, by replay; and whether the
        replay agrees with the compiled pools of this study."""
        widest = max(
            (cell for cell in self.results.values() if cell.get("system") == "jaxspec"),
            key=lambda cell: cell["num_requests"],
        )
        rows = [Row(prompt_length=first, emitted=tuple(rest)) for first, *rest in widest["rows"]]
        equal = [dataclasses.replace(row, prompt_length=EQUAL_LENGTH) for row in rows]
        sizes = [size for size in self.options.batch_sizes if size > 1]
        rates = [
            {
                "batch_size": size,
                "window_size": window,
                "lengths": lengths,
                "layout": layout,
                "by_calls": schedule.grouping_by_calls,
                "by_rows": schedule.grouping_by_rows,
                "num_rounds": schedule.num_rounds,
            }
            for lengths, histories in (("random lengths", rows), ("equal lengths", equal))
            for layout in LAYOUTS
            for size in sizes
            for window in sorted({size, 16, 32, GROUPING_WINDOW, 96})
            if window >= size
            for schedule in [
                replay_pool(histories, batch_size=size, window_size=window, layout=layout)
            ]
        ]
        return {
            "num_requests": len(rows),
            "equal_length": EQUAL_LENGTH,
            "rates": rates,
            "replays": [
                self._replayed(cell)
                for cell in self.results.values()
                if cell.get("scheduler") == "pool" and cell["speculates"]
            ],
        }

    def _replayed(self, cell: dict[str, Any]) -> dict[str, Any]:
        """A compiled pool's counters beside the replay's."""
        replayed = replay_pool(
            [Row(prompt_length=first, emitted=tuple(rest)) for first, *rest in cell["rows"]],
            batch_size=cell["batch_size"],
            window_size=cell["engine"]["num_residents"],
            layout=cell["layout"],
        )
        fields = dataclasses.asdict(replayed)
        compiled = {name: cell["schedule"][name] for name in fields}
        return {"name": cell["name"], "compiled": compiled, "replayed": fields}


def serve(
    engine: Engine, requests: Sequence[Request], arrival_s: Sequence[float] | np.ndarray
) -> tuple[list[float], int, float]:
    """Submits each request at its time, and steps the engine in between, in real time.

    Args:
      engine: idle, its programs compiled.
      requests: in order of arrival.
      arrival_s: seconds from the start, ascending.

    Returns:
      Seconds from each request's arrival (not from when the engine took it) to its completion;
      tokens emitted; seconds until the last one ended.
    """
    latency_s = [0.0] * len(requests)
    num_submitted = num_done = num_tokens = 0
    started_s = time.perf_counter()
    while num_done < len(requests):
        now_s = time.perf_counter() - started_s
        while num_submitted < len(requests) and arrival_s[num_submitted] <= now_s:
            request = requests[num_submitted]
            engine.submit(request.prompt_token_ids, request.params, request_id=str(num_submitted))
            num_submitted += 1
        if not engine.has_unfinished:
            time.sleep(max(0.0, float(arrival_s[num_submitted]) - now_s))
            continue
        for completion in engine.step():
            index = int(completion.request_id)
            latency_s[index] = time.perf_counter() - started_s - float(arrival_s[index])
            num_tokens += len(completion.token_ids)
            num_done += 1
    return latency_s, num_tokens, time.perf_counter() - started_s


def _in_turn(lines: Sequence[PromptLine]) -> list[PromptLine]:
    """The lines of each category in turn, so that the first few are of all categories."""
    by_category: dict[str, list[PromptLine]] = {}
    for line in lines:
        name = str(line.fields.get("category", line.fields.get("domain")))
        by_category.setdefault(name, []).append(line)
    turns = itertools.zip_longest(*by_category.values())
    return [line for turn in turns for line in turn if line is not None]


def _identity(name: str, model: Model) -> dict[str, Any]:
    """What tells one checkpoint from another: a digest of its parameters as they are used, and the
    revision it was downloaded at, if it was."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return {
        "name": pathlib.Path(name).name if os.path.isdir(name) else name,
        "sha256": digest.hexdigest(),
        "revision": _revision(name),
    }


def _revision(name: str) -> str | None:
    """Commit of a hub id that was converted, or of the source of a converted directory."""
    if is_converted(name):
        with contextlib.suppress(CheckpointError):
            return read_manifest(name)["revision"]
    return next((model.revision for model in cached_models() if model.source == name), None)


def _counts(engine: Engine) -> dict[str, int]:
    """The schedule's counters so far."""
    counts = jax.device_get(engine.state.schedule)
    return {name: int(getattr(counts, name)) for name in counts.__dataclass_fields__}


def _chunked(requests: Sequence[Request], chunk: int) -> int:
    """Token-positions of reading prompts in chunks of one shape."""
    return sum(-(-(len(request.prompt_token_ids) - 1) // chunk) * chunk for request in requests)


def _digest(completions: Sequence[Completion]) -> str:
    """Of all outputs."""
    ids = [list(completion.token_ids) for completion in completions]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


if __name__ == "__main__":
    tyro.cli(Study).run(Console())
