"""`jaxspec study`: grids of many runs, with a report at the end.

A new study is one line in `StudyCommand.study`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxspec.lab.studies.scaling import ScalingStudy
from jaxspec.lab.studies.study import Study


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyCommand:
    """How acceptance grows with a drafter's training tokens and capacity (`scaling`), and the
    published study of batched speculative decoding (`published`)."""

    study: Annotated[
        Annotated[ScalingStudy, tyro.conf.subcommand("scaling")]
        | Annotated[Study, tyro.conf.subcommand("published")],
        tyro.conf.arg(name=""),
    ]

    def run(self, console: Console) -> dict[str, Any]:
        """Runs the study; returns the JSON document."""
        return self.study.run(console)
