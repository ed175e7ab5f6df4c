"""The study of 2510.22876 on the user's own machine: layouts x schedulers x batch sizes.

    jaxspec bench study --quick --out study

EQSPEC and EXSPEC run as published (`studies.published`): the aligned layout, with static batches or
with the same-length pool, and the drafting and verification of their code. All six combinations of
layout and scheduler also run with jaxspec's drafting and verification, with speculation and
without; ragged + continuous is jaxspec's default. BSP and DSD are negative controls. Every result
is a cell, written to the disk as soon as it is known, so an interrupted study goes on where it
stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import Console

from jaxspec.bench.cells import CellStore
from jaxspec.bench.measure import Dtype, PairBench, Say, check_at_least_one
from jaxspec.runtime.environment import provenance
from jaxspec.studies import measurements
from jaxspec.studies.report import print_report, write_report
from jaxspec.studies.workload import NAMED, Decoding, Workload

CELLS = "cells.json"  # in the output directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(PairBench):
    """Reproduce the published study of batched speculative decoding, and see what beats it."""

    NAME: ClassVar[str] = "study"
    MEASURES: ClassVar[tuple[str, ...]] = (
        "decode", "cache", "kernels", "models/decoder.py", "models/layers.py", "schedulers",
        "drafters/draft_model.py", "verifiers/coupled.py", "engine/engine.py", "engine/executor.py",
        "studies/published.py", "studies/measurements.py",
    )  # fmt: skip

    out: pathlib.Path = pathlib.Path("study")
    """Directory for the report (study.html, study.json, plots) and its cells."""
    prompts: pathlib.Path | None = None
    """Prompt file; Spec-Bench's question.jsonl is recognised by its hash. Default: the sample
    prompts."""
    resume: bool = False
    """Go on with the cells that the output directory holds already."""
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
    """Rows decoded together."""
    pool: int = 48
    """Rows of the pool, at least twice the batch size."""
    repeats: int = 3
    """Timed runs of every cell, each beside a run of plain decoding."""
    oracle: float | None = None
    """Where there are no weights (`random:PRESET`): draft what the target will emit, right with
    this probability, at the cost of the draft model."""
    dtype: Dtype | None = None
    """Of parameters, compute and cache; default float32 on CPU, else the checkpoint's."""
    seed: int = 0
    """Of arrivals and of random prompts."""

    def run(self, console: Console) -> dict[str, Any]:
        """Runs what is missing, writes the report; returns the JSON document."""
        started_s = time.perf_counter()
        options = _quick(self) if self.quick else self
        check_at_least_one(
            options, "limit", "max_prompt_tokens", "max_tokens", "draft_length", "pool", "repeats",
            "batch_sizes",
        )  # fmt: skip
        running = Running(options)
        running.measure(say=lambda text: console.print(text, highlight=False, markup=False))
        document = options.document(
            inputs=running.workload.inputs,
            is_spec_bench=running.workload.is_spec_bench,
            is_synthetic=options.oracle is not None,
            cells=running.store.cells,
            elapsed_s=time.perf_counter() - started_s,
        )
        write_report(document, options.out)
        print_report(document["cells"], console)
        console.print(f"report written to {options.out}", markup=False, highlight=False)
        return document


def _quick(study: Study) -> Study:
    """The same study on requests that a CPU decodes in minutes."""
    return dataclasses.replace(
        study,
        max_prompt_tokens=min(study.max_prompt_tokens, 64),
        max_tokens=min(study.max_tokens, 48),
        repeats=min(study.repeats, 5),
    )


class Running:
    """A study under way: its workload, and the cells that are known.

    Raises:
      SettingError: the output directory holds a study that is not to be resumed, or another one.
    """

    def __init__(self, options: Study):
        self.options = options
        path = options.out / CELLS
        CellStore(path, header={}, resume=options.resume)  # refuses before models are loaded
        self.workload = Workload(options, lambda: self.store.cells["reference"]["token_ids"])
        config = options.document()["config"]
        del config["batch_sizes"]  # they choose cells
        header = {"config": config, "inputs": self.workload.inputs, "models": self.workload.models}
        self.store = CellStore(path, header=header, resume=options.resume)

    def measure(self, *, say: Say) -> None:
        """Measures the cells that are missing."""
        cells = {name: functools.partial(self.cell, name, each) for name, each in self.cells()}
        self.store.run(cells, say=say)

    def cell(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A cell's result, with where it comes from."""
        # Whoever reads a time should know what else the machine was doing.
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        result = {"name": name, "load_average": load, **measure()}
        engine = result.get("engine", {})
        return result | {
            "provenance": {
                "models": self.workload.models,
                "prompts": self.workload.inputs,
                "engine": engine,
                "verifier": engine.get("verifier"),
                "exactness": engine.get("exactness"),
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
                **provenance(),
            }
        }

    def cells(self) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
        """What measures each cell, by name; later ones read the results of earlier ones."""
        workload, known, sizes = self.workload, self.store.cells, self.options.batch_sizes

        def nearest(*wanted: int) -> list[int]:
            return sorted({min(sizes, key=lambda size: abs(size - one)) for one in wanted})

        found: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("reference", functools.partial(measurements.measure_reference, workload))
        ]
        for size in sizes:
            for decoding in workload.decodings(size):
                measure = functools.partial(
                    measurements.measure_decoding,
                    workload,
                    known,
                    decoding,
                    is_broken_down=self.is_broken_down(decoding),
                )
                found.append((f"decode-{decoding.cell}", measure))
        for size in nearest(1, 4):
            measure = functools.partial(measurements.measure_controls, workload, known, size)
            found.append((f"controls-b{size}", measure))
        for size in nearest(4, 8):
            measure = functools.partial(measurements.measure_rounds, workload, size)
            found.append((f"rounds-b{size}", measure))
        grouping = functools.partial(measurements.measure_grouping, workload, known)
        found.append(("grouping", grouping))
        for size in nearest(8) if self.options.quick else nearest(1, 2, 4, 8):
            for decoding in (workload.named(name, size) for name in NAMED):
                measure = functools.partial(measurements.measure_serving, workload, known, decoding)
                found.append((f"serving-{decoding.cell}", measure))
        return found

    def is_broken_down(self, decoding: Decoding) -> bool:
        """Whether the parts of its rounds are timed: each is compiled once more for it."""
        sizes = (min(self.options.batch_sizes, key=lambda size: abs(size - 8)), 32)
        return not self.options.quick or (decoding.system in NAMED and decoding.batch_size in sizes)
