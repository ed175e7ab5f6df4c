"""The study as a command: from its settings to its report."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from rich.console import Console

from jaxspec.lab.bench.measure import only_run_into
from jaxspec.lab.studies.scaling.cells import Running
from jaxspec.lab.studies.scaling.document import analyse, read_rows
from jaxspec.lab.studies.scaling.report import print_report, write_report
from jaxspec.lab.studies.scaling.settings import ScalingSettings
from jaxspec.lab.studies.scaling.tables import (
    checks,
    holds,
    rows_table,
    times_table,
    write_table,
)
from jaxspec.runtime.extras import import_extra


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingStudy(ScalingSettings):
    """Train drafters of several sizes on several numbers of tokens, and see how acceptance scales.

    Without --corpora they are trained on the source of the Python standard library.
    """

    def run(self, console: Console) -> dict[str, Any]:
        """Trains and measures what is missing, writes rows and report; returns the document."""
        import_extra("pandas", "a scaling study")
        import_extra("pyarrow", "a scaling study")
        if self.rows is not None:
            return self._report(console, self.rows, self.times)
        settings = self.made_quick() if self.quick else self
        settings.check()
        with only_run_into(settings.out):
            running = Running(settings)
            running.measure(say=lambda text: console.print(text, highlight=False, markup=False))
            cells, target, out = running.store.cells, running.target, settings.out
            rows = write_table(rows_table(cells), out / "rows.parquet")
            times = times_table(cells, settings, target)
            return settings._report(
                console,
                rows,
                write_table(times, out / "times.parquet"),
                models=running.models,
                inputs=running.inputs,
                checks=checks(cells),
                holds=holds(cells, target),
                elapsed_s=running.store.elapsed_s,
            )

    def _report(
        self, console: Console, rows: pathlib.Path, times: pathlib.Path | None, **fields: Any
    ) -> dict[str, Any]:
        """Fits the rows, writes the report and prints it; returns the document."""
        found = analyse(read_rows(rows), None if times is None else read_rows(times))
        document = self.document(**fields, **found)
        self.out.mkdir(parents=True, exist_ok=True)
        write_report(document, self.out)
        print_report(document, console)
        console.print(f"report written to {self.out}", markup=False, highlight=False)
        return document
