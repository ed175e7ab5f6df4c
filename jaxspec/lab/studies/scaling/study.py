"""The study as a command: from its settings to its cells, tables and report."""

from __future__ import annotations

import dataclasses
import io
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxspec.lab.bench.cells import Cell
from jaxspec.lab.bench.measure import only_run_into
from jaxspec.lab.studies.scaling.cells import Running
from jaxspec.lab.studies.scaling.document import analyse, read_rows
from jaxspec.lab.studies.scaling.report import print_report, write_report
from jaxspec.lab.studies.scaling.settings import ScalingSettings
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.extras import import_extra

if TYPE_CHECKING:
    import pandas


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
            times = self.rows.with_name("times.parquet")
            return self._report(console, self.rows, times if times.exists() else None)
        settings = self.made_quick() if self.quick else self
        settings.check()
        with only_run_into(settings.out):
            running = Running(settings)
            running.measure(say=lambda text: console.print(text, highlight=False, markup=False))
            cells, target, out = running.store.cells, running.target, settings.out
            rows = write_table(rows_table(cells), out / "rows.parquet")
            times = times_table(cells, settings.reference.name)
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


def rows_table(cells: Mapping[str, Cell]) -> pandas.DataFrame:
    """The rows of all drafters."""
    measured = [cell for cell in cells.values() if "rows" in cell]
    rows = [{**cell["drafter"], **row} for cell in measured for row in cell["rows"]]
    return import_extra("pandas", "a scaling study").DataFrame(rows)


def times_table(cells: Mapping[str, Cell], drafter: str) -> pandas.DataFrame:
    """Seconds of rounds, and of a plain round at the same batch size."""
    timed = [cell for name, cell in cells.items() if name.startswith("times-")]
    plain = {cell["batch"]: cell["round_s"] for cell in timed if not cell["draft_length"]}
    rows = [
        {"drafter": drafter, **cell, "plain_s": plain[cell["batch"]]}
        for cell in timed
        if cell["draft_length"]
    ]
    return import_extra("pandas", "a scaling study").DataFrame(rows)


def checks(cells: Mapping[str, Cell]) -> dict[str, int]:
    """Outputs that were compared with plain decoding, over all drafters and batch sizes, and how
    many are equal; and how many of those by batch size took the same rounds."""
    drafters = [cell for cell in cells.values() if "rows" in cell]
    batches = [cell for cell in cells.values() if "num_same_counts" in cell]
    return {
        "num_compared_with_plain": sum(each["num_compared_with_plain"] for each in drafters),
        "num_equal_to_plain": sum(each["num_equal_to_plain"] for each in drafters),
        "num_compared_over_batches": sum(each["num_compared"] for each in batches),
        "num_equal_over_batches": sum(each["num_equal_to_plain"] for each in batches),
        "num_same_counts_over_batches": sum(each["num_same_counts"] for each in batches),
    }


def holds(cells: Mapping[str, Cell], target: LanguageModel) -> bool:
    """Whether every output is the target's own, where the kernels' bits do not depend on the width
    of a window; ties within rounding may change others."""
    found = checks(cells)
    is_equal = (
        found["num_equal_to_plain"] == found["num_compared_with_plain"]
        and found["num_equal_over_batches"]
        == found["num_same_counts_over_batches"]
        == found["num_compared_over_batches"]
    )
    return is_equal or not target.is_width_invariant


def write_table(table: pandas.DataFrame, path: pathlib.Path) -> pathlib.Path:
    """Writes a table as Parquet, whole or not at all; returns its path."""
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    write_atomically(path, content.getvalue())
    return path
