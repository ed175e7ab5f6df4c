"""`jaxspec train lm`: train a small language model, or distil a draft from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from jaxspec.commands.options import JsonOption
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.report import TextTable
from jaxspec.training.lm import TrainConfig, train_lm


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand(JsonOption):
    """Train a small language model on text (`lm`), from scratch or distilled from a teacher."""

    kind: Annotated[Literal["lm"], tyro.conf.Positional]
    """What to train."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        results = train_lm(self.config)
        console.print(results_table(results))
        model = results["model"]
        console.print(
            f"Try it: jaxspec generate --target {model} --prompt TEXT", soft_wrap=True, markup=False
        )
        return make_document(f"train {self.kind}", self.config, **results)


def results_table(results: Mapping[str, Any]) -> TextTable:
    """Results, those of a domain on a line of their own."""
    forms = {float: "{:.4g}", int: "{:,}"}
    shown = {
        name.replace("_", " "): forms.get(type(value), "{}").format(value)
        for name, value in _flatten(results)
    }
    return TextTable.of_values("", shown)


def _flatten(results: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*path, name))
        else:
            yield ", ".join((*path, name)), value
