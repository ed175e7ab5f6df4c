"""`jaxspec train lm`: train a small language model, or distil a draft from one."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from jaxspec.training.lm import TrainConfig, train_lm


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a small language model on text (`lm`), from scratch or distilled from a teacher."""

    kind: Annotated[Literal["lm"], tyro.conf.Positional]
    """What to train."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        results = train_lm(self.config)
        table = Table("result", "value", show_header=False)
        for name, value in results.items():
            table.add_row(name, str(value))
        console.print(table)
        return {"command": "train lm", **results}
