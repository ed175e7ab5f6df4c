"""`jaxspec train`: trains a small language model (`lm`) or drafters for a target (`heads`,
`flexdraft`), and has the target write their training texts (`texts`)."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxspec.commands.options import JsonOption
from jaxspec.commands.progress import standard_error, tell, working
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.report import TextTable
from jaxspec.runtime.signals import advising
from jaxspec.training import export
from jaxspec.training.checkpoints import latest_step
from jaxspec.training.flexdraft import FlexTrainConfig, train_flexdraft
from jaxspec.training.heads import HeadsTrainConfig, train_heads
from jaxspec.training.lm import LmTask, TrainConfig, train_lm
from jaxspec.training.texts import TextsConfig, write_texts
from jaxspec.training.trainer import TrainSettings

_LINES_EVERY_S = 60.0  # progress away from a terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmCommand(JsonOption):
    """Train a small language model on text, from scratch or distilled from a teacher."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        with advising(lambda: _resuming(self.config)):
            results = train_lm(self.config)
        console.print(results_table(results))
        _print_trial(console, trial_options(self.config.teacher, _ends(results)[-1]["model"]))
        return make_document("train lm", self.config, **results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextsCommand(JsonOption):
    """Have a target write training texts for a drafter: its answers to prompts, or its own
    continuations of the beginnings of documents. The same command continues an interrupted run."""

    config: Annotated[TextsConfig, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Writes the texts; returns the JSON document."""
        started_s = shown_s = time.perf_counter()
        with (
            working("loading the target") as status,
            advising(lambda: f"to go on: {_command_line()}"),
        ):

            def show(num_texts: int, num_tokens: int) -> None:
                nonlocal shown_s
                now_s = time.perf_counter()
                if standard_error().is_terminal or now_s - shown_s > _LINES_EVERY_S:
                    shown_s = now_s
                    tell(
                        status,
                        f"{num_texts} texts, {num_tokens} of {self.config.tokens} tokens, "
                        f"{now_s - started_s:.0f} s",
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
        with advising(lambda: _resuming(self.config)):
            results = train_heads(self.config)
        for end in _ends(results):
            console.print(results_table(end, without=("held_out", "trees")))
            console.print(accuracy_table(end["held_out"], "head", {"top1": 1, "top5": 1}))
        drafter = f"heads:{_ends(results)[-1]['heads']}"
        _print_trial(console, f"--target {self.config.target} --drafter {drafter}")
        return make_document("train heads", self.config, **results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexDraftCommand(JsonOption):
    """Train FlexDraft's mask rows in the last layers of a target, on texts that it wrote."""

    config: Annotated[FlexTrainConfig, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        with advising(lambda: _resuming(self.config)):
            results = train_flexdraft(self.config)
        held_out = results["held_out"]
        accepted = {name: each["accepted"] for name, each in held_out.items()}
        console.print(results_table({**results, "accepted": accepted}, without=("held_out",)))
        console.print(accuracy_table(held_out, "slot", {"uncalibrated_top1": 0, "top1": 1}))
        drafter = f"flexdraft:{results['flexdraft']}"
        _print_trial(console, f"--target {self.config.target} --drafter {drafter}")
        return make_document("train flexdraft", self.config, **results)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Have a target write texts (`texts`) and train a drafter for it: a draft model (`lm`), heads
    (`heads`) or FlexDraft (`flexdraft`). `lm` also trains a small language model from text."""

    what: Annotated[
        Annotated[LmCommand, tyro.conf.subcommand("lm")]
        | Annotated[TextsCommand, tyro.conf.subcommand("texts")]
        | Annotated[HeadsCommand, tyro.conf.subcommand("heads")]
        | Annotated[FlexDraftCommand, tyro.conf.subcommand("flexdraft")],
        tyro.conf.arg(name=""),
    ]

    def run(self, console: Console) -> dict[str, Any]:
        """Trains; returns the JSON document."""
        return self.what.run(console)


def _ends(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The results of every end of a run."""
    return list(results["branches"].values()) if "branches" in results else [results]


def trial_options(teacher: str | None, model: str) -> str:
    """The options of what was trained: a target, or the draft model of its teacher."""
    if teacher is None:
        return shlex.join(("--target", model))
    exported = pathlib.Path(teacher) / LmTask.PRODUCT  # of an earlier run
    target = str(exported) if export.is_hugging_face(exported) else teacher
    return shlex.join(("--target", target, "--draft", model))


def _command_line() -> str:
    return shlex.join(("jaxspec", *sys.argv[1:]))


def _resuming(config: TrainSettings) -> str | None:
    """How to go on with a run that has a checkpoint."""
    if latest_step(config.out) is None:
        return None
    return f"to go on: {_command_line()}{'' if config.resume else ' --resume'}"


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


def accuracy_table(
    held_out: Mapping[str, Mapping[str, Any]], place: str, first: Mapping[str, int]
) -> TextTable:
    """Accuracy on held-out texts, a line for each measure of all texts and of each domain.

    Args:
      held_out: measures by domain, as lists over heads or slots.
      place: what a column is of: `head` or `slot`.
      first: the measures to show, each with the number of its first place.
    """
    columns = sorted(
        {
            start + index
            for name, start in first.items()
            for index in range(len(held_out["all"][name]))
        }
    )
    rows = []
    for domain, measured in held_out.items():
        for name, start in first.items():
            shown = {start + index: f"{share:.3f}" for index, share in enumerate(measured[name])}
            cells = (shown.get(column, "") for column in columns)
            rows.append([domain, name.replace("_", " "), *cells])
    header = ["texts", "accuracy", *(f"{place} {column}" for column in columns)]
    return TextTable(title="accuracy on held-out texts", header=header, rows=rows)


def _flatten(results: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*path, name))
        else:
            yield ", ".join((*path, name)), value
