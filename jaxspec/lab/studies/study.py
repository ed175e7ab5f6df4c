"""The study of 2510.22876 on the user's own machine: layouts x schedulers x batch sizes.

    jaxspec study published --quick --out study

EQSPEC and EXSPEC run as published (`studies.published`): the aligned layout, with static batches or
with the same-length pool, and the drafting and verification of their code. All six combinations of
layout and scheduler also run with jaxspec's drafting and verification, with speculation and
without; ragged + continuous is jaxspec's default. BSP and DSD are negative controls. Every result
is a cell, written to the disk as soon as it is known, so an interrupted study continues where it
stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import Console

from jaxspec.lab.bench.cells import CellStore
from jaxspec.lab.bench.measure import Dtype, Say, only_run_into
from jaxspec.lab.studies import measurements
from jaxspec.lab.studies.report import print_report, write_report
from jaxspec.lab.studies.workload import NAMED, Decoding, Workload, WorkloadOptions, nearest
from jaxspec.runtime.directories import check_can_write_into
from jaxspec.runtime.environment import provenance
from jaxspec.training.trainer import NoOption

CELLS = "cells.json"  # in the output directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(WorkloadOptions):
    """Repeat the published study of batched speculative decoding, and compare it with jaxspec."""

    COMMAND: ClassVar[str] = "study"
    NAME: ClassVar[str] = "published"

    out: pathlib.Path = pathlib.Path("study")
    """Directory for the report (study.html, study.json, plots) and its cells."""
    resume: bool = False
    """Keep the cells that the output directory already holds, and run the others."""
    quick: bool = False
    """Few and short requests: takes minutes on a CPU."""
    repeats: NoOption[int] = 3
    """Timed runs of every cell, each next to a run of plain decoding."""
    oracle: float | None = None
    """For models without trained weights (`random:PRESET`): draft what the target will emit, each
    token right with this probability, at the cost of the draft model."""
    dtype: NoOption[Dtype | None] = None
    """Dtype of parameters, compute and cache; default: the checkpoint's (on a CPU float32 for
    float16, for the embedded pair and for random presets)."""

    def check_out(self) -> None:
        """Raises `SettingError` if the report cannot be written."""
        check_can_write_into(self.out)

    def run(self, console: Console) -> dict[str, Any]:
        """Runs the missing cells and writes the report; returns the JSON document."""
        options = self
        if self.quick:  # requests that a CPU decodes in minutes
            options = dataclasses.replace(
                self,
                max_prompt_tokens=min(self.max_prompt_tokens, 128 if self.chat else 64),
                max_tokens=min(self.max_tokens, 48),
                repeats=min(self.repeats, 5),
            )
        options.check()
        with only_run_into(options.out):
            running = Running(options)
            running.measure(say=lambda text: console.print(text, highlight=False, markup=False))
            document = options.document(
                inputs=running.workload.inputs,
                models=running.workload.models,
                is_synthetic=options.oracle is not None,
                cells=running.store.cells,
                elapsed_s=running.store.elapsed_s,
            )
            write_report(document, options.out)
        print_report(document["cells"], console)
        console.print(f"report written to {options.out}", markup=False, highlight=False)
        return document


class Running:
    """A running study: its workload, and the known cells.

    Raises:
      SettingError: the output directory holds a study although `resume` is False, or a different
        one.
    """

    def __init__(self, options: Study):
        self.options = options
        path = options.out / CELLS
        CellStore(path, header={}, resume=options.resume)  # refuses before models are loaded
        self.workload = Workload(options, lambda: self.store.cells["reference"]["token_ids"])
        config = options.document()["config"]
        del config["batch_sizes"]  # they choose cells
        header = {
            "config": config,
            "inputs": self.workload.inputs,
            "models": self.workload.models,
            "kernels": self.workload.target.kernels,
        }
        self.store = CellStore(path, header=header, resume=options.resume)

    def measure(self, *, say: Say) -> None:
        """Measures the cells that are missing."""
        cells = {
            name: functools.partial(self.cell, name, each) for name, each in self.cells().items()
        }
        self.store.run(cells, say=say)

    def cell(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A cell's result, with its provenance."""
        # Readers of a time should know what else the machine was doing.
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        made_by = {"xla_flags": os.environ.get("XLA_FLAGS", ""), **provenance()}
        machine = {"load_average": load, "cpu_count": os.cpu_count()}
        return {"name": name, **machine, **measure(), "provenance": made_by}

    def cells(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """A function that measures each cell, by name; later cells read the results of earlier
        ones."""
        workload, known, sizes = self.workload, self.store.cells, self.options.batch_sizes
        found: dict[str, Callable[[], dict[str, Any]]] = {}

        def add(name: str, measure: Callable[..., dict[str, Any]], *args: Any, **how: Any) -> None:
            found[name] = functools.partial(measure, workload, *args, **how)

        def near(*wanted: int) -> list[int]:
            return sorted({nearest(one, sizes) for one in wanted})

        add("reference", measurements.measure_reference)
        for decoding in (decoding for size in sizes for decoding in workload.decodings(size)):
            add(
                f"decode-{decoding.cell}",
                measurements.measure_decoding,
                known,
                decoding,
                is_broken_down=self.is_broken_down(decoding),
            )
        for size in near(1, 4):
            add(f"controls-b{size}", measurements.measure_controls, known, size)
        add("grouping", measurements.measure_grouping, known)
        for size in near(8) if self.options.quick else near(1, 2, 4, 8):
            for decoding in (workload.named(name, size) for name in NAMED):
                add(f"serving-{decoding.cell}", measurements.measure_serving, known, decoding)
        return found

    def is_broken_down(self, decoding: Decoding) -> bool:
        """Whether the parts of its rounds are timed, which compiles each part once more."""
        sizes = nearest(8, self.options.batch_sizes), 32
        return not self.options.quick or (decoding.system in NAMED and decoding.batch_size in sizes)
