"""`jaxspec bench study`: the published study of batched speculative decoding, on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.studies.report import findings, rounds_table
from jaxspec.studies.study import Study


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyCommand(Study):
    """Reproduce the published study of batched speculative decoding, and see what beats it."""

    json: bool = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Runs what is missing, writes the report; returns the JSON document."""
        document = super().run(console)
        grid = rounds_table(document["cells"])
        if grid is not None:
            table = Table(title=grid.title, title_justify="left", title_style="bold")
            for name in grid.header:
                table.add_column(name, overflow="fold")
            for row in grid.rows:
                table.add_row(*row)
            console.print(table)
        for sentence in findings(document["cells"]):
            console.print(f"- {sentence}", markup=False, highlight=False)
        return document
