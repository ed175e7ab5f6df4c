"""Bad command lines end in one sentence, and leave nothing behind."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest
import tiny
from attack import outcomes
from attack.command_lines import FILES, command_lines
from attack.outcomes import Outcome, Tally

from jaxspec.cli import main

LINES = command_lines()
LIMIT_S = 60  # more than a template's


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """What the words in braces stand for."""
    root = tmp_path_factory.mktemp("places")
    for name, content in FILES.items():
        (root / name).write_bytes(content)
    (root / "dir").mkdir()
    return {
        **{name: str(root / name) for name in FILES},
        "dir": str(root / "dir"),
        "absent": str(root / "absent"),
        "model": str(tiny.save(root, "model", text=tiny.tokenizer())),
    }


def _filled(word: str, places: dict[str, str]) -> str:
    return re.sub(r"\{([\w.]+)\}", lambda found: places.get(found[1], found[0]), word)


def _run(words: tuple[str, ...], places: dict[str, str]) -> Outcome:
    """Runs a command in this process."""
    absent = places["absent"]

    def command() -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main([_filled(word, places) for word in words])
            except SystemExit as end:
                status = end.code
        return status, err.getvalue()

    ended: list[Outcome] = []

    def problem(result: tuple[int, str]) -> str | None:
        ended.append(outcomes.of_status(*result))
        left = "a file is left" if os.path.lexists(absent) else None
        return ended[0].reason if ended[0].kind == "failed" else left

    called = outcomes.of_call(command, limit_s=LIMIT_S, problem=problem)
    return called if called.kind == "failed" else ended[0]


def _attack(lines, places, monkeypatch, tmp_path, record_property, name: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    tally = Tally(name)
    for index, words in enumerate(lines):
        shown = " ".join(f"{word[:60]!a}" for word in words)
        tally.add(f"{index}: jaxspec {shown}", _run(words, places))
    assert not os.listdir(tmp_path), "files are left"
    tally.finish(record_property)


def test_some_command_lines(places, monkeypatch, tmp_path, record_property):
    _attack(LINES[::12], places, monkeypatch, tmp_path, record_property, "some command lines")


@pytest.mark.slow
def test_all_command_lines(places, monkeypatch, tmp_path, record_property):
    assert len(LINES) >= 500
    _attack(LINES, places, monkeypatch, tmp_path, record_property, "command lines")


PROCESSES = (
    (["generate", "--target", b"caf\xe9", "--prompt", "x"], {}),
    (["doctor", "--versions"], {"JAX_PLATFORMS": "nothing"}),
    (["cache", "list"], {"JAXSPEC_CACHE": "~nouser/x"}),
)


@pytest.mark.parametrize(("arguments", "variables"), PROCESSES, ids=["UTF-8", "platform", "home"])
def test_processes(arguments, variables):
    command = [sys.executable, "-m", "jaxspec", *arguments]
    outcome = outcomes.of_process(command, env=os.environ | variables, stdin=subprocess.DEVNULL)
    assert outcome.kind == "refused", outcome
