"""Options at their edges: numbers that mean nothing and files that cannot be written are refused
before a model is loaded, by a sentence that names them."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pathlib
import re
import sys
import types
import typing

import pytest
import rich.console
import tyro

from jaxspec.cli import load_command
from jaxspec.commands import bench
from jaxspec.errors import JaxspecError
from jaxspec.lab.bench import cases, program
from jaxspec.lab.plan import planner
from jaxspec.load import models as loading
from jaxspec.runtime.options import check_numbers
from jaxspec.verifiers import VERIFIERS, VerifierName

PAIR = ("--target", "demo-target", "--draft", "demo-draft")
TRAIN = ("--out", "{absent}", "--batch-tokens", "512", "--sequence-length", "128")
COMMANDS = {
    "demo": (),
    "generate": (*PAIR, "--prompt", "hello", "--temperature", "1"),
    "chat": PAIR,
    "serve": PAIR,
    "audit": PAIR,
    "compare": ("--target", "demo-target", "--drafter", "none", "--drafter", "ngram"),
    "plan": ("--target", "qwen3-8b", "--draft", "qwen3-0.6b", "--budget", "24GiB"),
    "study scaling": ("--out", "{absent}"),
    "study published": ("--out", "{absent}"),
    "train lm": (*TRAIN, "--corpora", "{absent}"),
    "train texts": ("--target", "demo-target", "--corpora", "{absent}", "--out", "{absent}"),
    "train heads": (*TRAIN, "--kind", "clover", "--target", "demo-target", "--texts", "{absent}"),
    "train flexdraft": (*TRAIN, "--target", "demo-target", "--texts", "{absent}"),
    "bench decode": (),
    "bench gpu": ("--dry-run", "--out", "{absent}"),
    "bench peers": ("--target", "."),
    **dict.fromkeys(
        f"bench {name}"
        for name in (
            "predict", "program", "schedulers", "verifiers", "drafters", "memory", "sessions",
            "kernels", "kv", "forward", "prefill", "streams", "compile-time",
        )
    ),
}  # fmt: skip
# Options that may be 0 or below, and mean it.
ZERO = {
    "seed", "seeds", "temperature", "warmup_steps", "long_fraction", "oracle", "budget_s",
    "acceptance", "window_acceptance", "per_position",
}  # fmt: skip
ZERO_OF = {("plan", "draft_lengths"), ("plan", "max_logprobs"), ("serve", "port")}


class Started(Exception):
    """A model would be loaded now."""


def options(cls, path=()):
    """Path and type of every option of a command, those of its parts included."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from options(hint, (*path, field.name))
        else:
            yield (*path, field.name), hint


def is_a(kind: type, hint) -> bool:
    """Whether an option with this type takes a value of a kind, or several."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return any(is_a(kind, each) for each in typing.get_args(hint))
    return hint is kind


def changed(command, path, value):
    """The command with another value of an option."""
    name, *rest = path
    if rest:
        value = changed(getattr(command, name), rest, value)
    return dataclasses.replace(command, **{name: value})


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Every command as `COMMANDS` has it, by name."""
    absent = str(tmp_path_factory.mktemp("options") / "absent")
    found = {}
    for name, words in COMMANDS.items():
        first, *rest = name.split()
        filled = [absent if word == "{absent}" else word for word in (*rest, *(words or ()))]
        command = tyro.cli(load_command(first), args=filled)
        for part in ("bench", "study", "what"):
            command = getattr(command, part, command)
        found[name] = command
    return found


@pytest.fixture
def outcome(monkeypatch, tmp_path):
    """What becomes of a command: the sentence that refuses it, or None if it would start."""

    def start(*args, **kwargs):
        raise Started

    modules = [module for name, module in sys.modules.items() if name.startswith("jaxspec")]
    for name in ("load_model", "load_packed"):
        load = getattr(loading, name)
        for module in modules:
            if getattr(module, name, None) is load:
                monkeypatch.setattr(module, name, start)
    monkeypatch.setattr(planner.Planner, "plan", start)
    monkeypatch.setattr(cases, "random_model", start)
    monkeypatch.setattr(bench, "measure_grid", start)
    monkeypatch.setattr(program, "as_if_on", start)
    monkeypatch.chdir(tmp_path)

    def run(command, path, value) -> str | None:
        try:
            given = changed(command, path, value)
            check_numbers(given)
            given.run(rich.console.Console(file=io.StringIO()))
        except Started:
            return None
        except JaxspecError as error:
            return str(error)
        return None  # what needs no model

    return run


def names_it(said: str, name: str) -> bool:
    """Whether a sentence names an option."""
    forms = (name, name.replace("_", "-"), name.replace("_", " "), name.removesuffix("s"))
    forms += (name.removeprefix("draft_").removesuffix("s"),)
    if name == "per_position":
        forms += ("acceptance",)
    return any(form in said.lower() for form in forms)


def numeric(command):
    """Path and kind of every numeric option of a command."""
    for path, hint in options(type(command)):
        for kind in (int, float):
            if is_a(kind, hint):
                yield path, kind, "tuple" in str(hint)


@pytest.mark.parametrize("name", COMMANDS)
def test_numbers_that_mean_nothing_are_refused(name, commands, outcome):
    command = commands[name]
    wrong = []
    for path, kind, is_several in numeric(command):
        option = path[-1]
        values = [0, -1, 10**400] if kind is int else [0.0, -1.0, math.nan, math.inf, -math.inf]
        for value in values:
            said = outcome(command, path, (value,) if is_several else value)
            may_be = value == 0 and (option in ZERO or (name, option) in ZERO_OF)
            if may_be:
                is_right = said is None or not names_it(said, option)
            else:
                is_right = said is not None and names_it(said, option)
            if not is_right:
                wrong.append(f"{option} {str(value)[:9]}: {said}")
    assert not wrong, "\n".join(wrong)


def test_every_command_is_tried(commands):
    def leaves(cls):
        for hint in typing.get_type_hints(cls).values():
            parts = typing.get_args(hint) or (hint,)
            for part in parts:
                if dataclasses.is_dataclass(part) and hasattr(part, "run"):
                    yield part
                    yield from leaves(part)

    found = {leaf for group in ("bench", "study", "train") for leaf in leaves(load_command(group))}
    assert found <= {type(command) for command in commands.values()}


# What nothing can be written to.
def unwritable(tmp_path: pathlib.Path) -> dict[str, pathlib.Path]:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir(exist_ok=True)
    return {
        "a directory": tmp_path / "folder",
        "a device": pathlib.Path("/dev/null"),
        "below a file": tmp_path / "file" / "x.png",
        "in no file system for files": pathlib.Path("/proc/none/x.png"),
        "a long name": tmp_path / ("x" * 300 + ".png"),
        "almost too long": tmp_path / ("x" * 250 + ".png"),
        "a loop": tmp_path / "loop" / "x.png",
    }


OUTPUTS = ("output", "trace", "html", "plot", "out", "teacher_states", "target_states")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_written_is_refused_at_once(name, commands, outcome, tmp_path):
    command = commands[name]
    (tmp_path / "loop").symlink_to("loop")
    places = unwritable(tmp_path)
    before = sorted(os.listdir(tmp_path))
    wrong = []
    for path, hint in options(type(command)):
        option = path[-1]
        if option not in OUTPUTS or not is_a(pathlib.Path, hint):
            continue
        is_directory = name.startswith(("study", "train")) and name != "train texts"
        for place, wanted in places.items():
            if is_directory and place in ("a directory", "almost too long"):
                continue
            if option == "trace" and wanted.suffix == ".png":
                wanted = wanted.with_suffix(".parquet")
            said = outcome(command, path, wanted)
            if said is None:
                wrong.append(f"--{option} {place}: it would start")
        missing = tmp_path / "no" / "such" / ("x.parquet" if option == "trace" else "x.png")
        said = outcome(command, path, missing)
        if said is not None and str(missing.parent) in said:
            wrong.append(f"--{option} in a missing directory: {said}")
    assert not wrong, "\n".join(wrong)
    left = set(os.listdir(tmp_path)).difference(before)
    assert left <= {"no"}


def test_a_plot_without_a_format_is_refused(commands, outcome, tmp_path):
    for file in ("rates", "rates.txt", "rates.", ".png"):
        said = outcome(commands["compare"], ("plot",), tmp_path / file)
        assert said is not None, file
        assert re.search(r"cannot be written to .*; name a file like rates\.png", said)
    assert not os.listdir(tmp_path)


def test_every_verifier_can_be_chosen():
    assert set(typing.get_args(VerifierName)) == set(VERIFIERS)
