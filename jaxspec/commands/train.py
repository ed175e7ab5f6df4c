"""`jaxspec train`: trains a small language model (`lm`) or drafters for a target (`heads`,
`flexdraft`), and has the target write their training texts (`texts`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxspec.commands.options import JsonOption
from jaxspec.commands.progress import working
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.report import TextTable
from jaxspec.training.flexdraft import FlexTrainConfig, train_flexdraft
from jaxspec.training.heads import HeadsTrainConfig, train_heads
from jaxspec.training.lm import TrainConfig, train_lm
from jaxspec.training.texts import TextsConfig, write_texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmCommand(JsonOption):
    """Train a small language model on text, from scratch or distilled from a teacher."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        results = train_lm(self.config)
        console.print(results_table(results))
        _print_trial(console, f"--target {_ends(results)[-1]['model']}")
        return make_document("train lm", self.config, **results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextsCommand(JsonOption):
    """Have a target write training texts for heads: its own continuations of the beginnings of
    documents. The same command continues an interrupted run."""

    config: Annotated[TextsConfig, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Writes the texts; returns the JSON document."""
        started_s = time.perf_counter()
        with working("loading the target") as status:

            def show(num_texts: int, num_tokens: int) -> None:
                elapsed_s = time.perf_counter() - started_s
                status.update(
                    f"{num_texts} texts, {num_tokens} of {self.config.tokens} tokens, "
                    f"{elapsed_s:.0f} s"
                )

            results = write_texts(self.config, on_text=show)
        console.print(results_table(results))
        return make_document("train texts", self.config, **results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsCommand(JsonOption):
    """Train Medusa, Hydra, Clover or Clover-2 heads on texts that their target wrote."""

    config: Annotated[HeadsTrainConfig, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        results = train_heads(self.config)
        for end in _ends(results):
            console.print(results_table(end, without=("held_out", "trees")))
            console.print(accuracy_table(end["held_out"]))
        drafter = f"heads:{_ends(results)[-1]['heads']}"
        _print_trial(console, f"--target {self.config.target} --drafter {drafter}")
        return make_document("train heads", self.config, **results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexDraftCommand(JsonOption):
    """Train FlexDraft's mask rows in the last layers of a target, on texts that it wrote."""

    config: Annotated[FlexTrainConfig, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        results = train_flexdraft(self.config)
        console.print(results_table(results, without=("held_out",)))
        console.print(slots_table(results["held_out"]))
        drafter = f"flexdraft:{results['flexdraft']}"
        _print_trial(console, f"--target {self.config.target} --drafter {drafter}")
        return make_document("train flexdraft", self.config, **results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a small language model (`lm`), or have a target write texts (`texts`) and train a
    drafter for it: heads (`heads`) or FlexDraft (`flexdraft`)."""

    what: Annotated[
        Annotated[LmCommand, tyro.conf.subcommand("lm")]
        | Annotated[TextsCommand, tyro.conf.subcommand("texts")]
        | Annotated[HeadsCommand, tyro.conf.subcommand("heads")]
        | Annotated[FlexDraftCommand, tyro.conf.subcommand("flexdraft")],
        tyro.conf.arg(name=""),
    ]

    @property
    def json(self) -> bool:
        """The option of the chosen command."""
        return self.what.json

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        return self.what.run(console)


def _ends(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The results of every end of a run."""
    return list(results["branches"].values()) if "branches" in results else [results]


def _print_trial(console: Console, options: str) -> None:
    command = f"Try it: jaxspec generate {options} --prompt TEXT"
    console.print(command, soft_wrap=True, markup=False)


def results_table(results: Mapping[str, Any], *, without: Sequence[str] = ()) -> TextTable:
    """The results, with a separate line for each domain."""
    forms = {float: "{:.4g}", int: "{:,}"}
    shown = {
        name.replace("_", " "): forms.get(type(value), "{}").format(value)
        for name, value in _flatten({n: each for n, each in results.items() if n not in without})
    }
    return TextTable.of_values("", shown)


def accuracy_table(held_out: Mapping[str, Mapping[str, Any]]) -> TextTable:
    """Accuracy of each head on held-out texts: one line for all texts, and one for each domain."""
    num_heads = len(held_out["all"]["top1"])
    header = ["texts", *(f"head {1 + index}" for index in range(num_heads))]
    rows = [
        [
            name,
            *(
                f"{top1:.3f} {top5:.3f}"
                for top1, top5 in zip(each["top1"], each["top5"], strict=True)
            ),
        ]
        for name, each in held_out.items()
    ]
    return TextTable(title="accuracy@1 and @5 on held-out texts", header=header, rows=rows)


def slots_table(held_out: Mapping[str, Mapping[str, Any]]) -> TextTable:
    """Accuracy of each slot of a block on held-out texts, calibrated and not, and how many drafts
    are right before the first wrong one."""
    num_slots = len(held_out["all"]["num_tokens"])
    header = ["texts", "right", *(f"slot {slot}" for slot in range(num_slots))]
    rows = [
        [
            name,
            f"{each['accepted']:.2f} {each['uncalibrated_accepted']:.2f}",
            f"- {each['uncalibrated_top1'][0]:.3f}",
            *(
                f"{calibrated:.3f} {uncalibrated:.3f}"
                for calibrated, uncalibrated in zip(
                    each["top1"], each["uncalibrated_top1"][1:], strict=True
                )
            ),
        ]
        for name, each in held_out.items()
    ]
    title = "drafts that are right and accuracy@1 on held-out texts, with and without calibration"
    return TextTable(title=title, header=header, rows=rows)


def _flatten(results: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*path, name))
        else:
            yield ", ".join((*path, name)), value
