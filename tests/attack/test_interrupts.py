"""Signals at random moments of commands (while they load, compile, decode and write), and outputs
that nobody reads: the exit status, no traceback, and files that are whole or can be continued."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import hf_checkpoints
import pytest
from attack.outcomes import Outcome, Tally, of_status

from jaxspec.checkpoint.format import load_converted

ROOT = pathlib.Path(__file__).parent.parent.parent
LIMIT_S = 120  # a command that takes longer after a signal hangs
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}
# Nothing comes from a cache: most of the time XLA compiles.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
NUM_PROMPTS = 6


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that is interrupted.

    Attributes:
      args: for `jaxspec`, given the directory that it writes to.
      problem: what is wrong with what it left there, or None.
    """

    args: Callable[[pathlib.Path], list[str]]
    problem: Callable[[pathlib.Path], str | None]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return hf_checkpoints.write_golden(tmp_path_factory.mktemp("source") / "hf", "qwen3")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"prompt {index}\n" for index in range(NUM_PROMPTS)))
    return path


@pytest.fixture(scope="module")
def commands(source, prompts) -> dict[str, Command]:
    def generate(directory):
        return [
            "generate", "--target", "demo-draft", "--drafter", "ngram", "--prompts", str(prompts),
            "--output", str(directory / "out.jsonl"), "--max-tokens", "40", "--batch-size", "1",
        ]  # fmt: skip

    def convert(directory):
        return ["convert", str(source), str(directory / "converted"), "--dtype", "float32"]

    return {
        "generate": Command(generate, lines_problem),
        "convert": Command(convert, directory_problem),
    }


def lines_problem(directory: pathlib.Path) -> str | None:
    """Whether the output file is whole lines, in order."""
    path = directory / "out.jsonl"
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        return "the last line is cut off"
    for index, line in enumerate(content.splitlines()):
        if json.loads(line)["request_id"] != str(index):
            return f"line {index} is of another prompt"
    others = [each.name for each in directory.iterdir() if each != path]
    return f"{others} lie beside the output" if others else None


def directory_problem(directory: pathlib.Path) -> str | None:
    """Whether the converted directory is complete, or not there. What was partly written may stay
    only where the process was not let clean up."""
    left = sorted(each.name for each in directory.iterdir())
    if left == ["converted"]:
        load_converted(directory / "converted", dtype="float32")
        return None
    return f"{left} was left" if left else None


def start(command: Command, directory: pathlib.Path) -> subprocess.Popen:
    """The command's process, when it has taken over the signals; Python itself leaves SIGTERM to
    the system."""
    directory.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxspec", *command.args(directory)],
        cwd=directory,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not catches(process.pid, signal.SIGTERM):
        time.sleep(0.01)
    return process


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def interrupt(
    command: Command, directory: pathlib.Path, *, number: int, after_s: float, again: bool
) -> Outcome:
    """Sends a signal some time after the start, perhaps again a little later."""
    process = start(command, directory)
    try:
        time.sleep(after_s)
        process.send_signal(number)
        if again:
            time.sleep(1.0)
            process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Outcome("failed", f"hangs: no end {LIMIT_S} s after the signal")
    if process.returncode == 128 + number and "Traceback" not in err and "interrupted" in err:
        outcome = Outcome("refused", "interrupted")
    elif process.returncode == -number:  # the work is done, and Python takes its handlers away
        outcome = Outcome("unchanged")
    else:
        outcome = of_status(process.returncode, err)
    problem = command.problem(directory) if not again else None
    if problem is not None and outcome.kind != "failed":
        return Outcome("failed", problem)
    return outcome


@pytest.mark.parametrize("name", ["generate", "convert"])
@pytest.mark.parametrize(
    ("num_moments", "seed"),
    [(4, 0), pytest.param(40, 1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_signals(commands, tmp_path, record_property, name, num_moments, seed):
    command, rng, tally = commands[name], random.Random(seed), Tally(f"signals to {name}")
    process, started_s = start(command, tmp_path / "whole"), time.monotonic()
    _, err = process.communicate()
    duration_s = time.monotonic() - started_s
    assert process.returncode == 0, err
    for moment in range(num_moments):
        share, number = rng.uniform(0, 1), rng.choice(list(SIGNALS))
        outcome = interrupt(
            command,
            tmp_path / str(moment),
            number=SIGNALS[number],
            after_s=share * duration_s,
            again=rng.random() < 0.2,
        )
        tally.add(f"{number} after {share:.2f} of {name} ({seed}-{moment})", outcome)
    tally.finish(record_property)


@pytest.mark.parametrize("args", [["env"], ["env", "--json"], ["cache", "list"], ["--help"]])
@pytest.mark.parametrize("closed", [["stdout"], ["stdout", "stderr"]])
def test_an_output_that_nobody_reads(args, closed, record_property):
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    streams |= dict.fromkeys(closed, writing)
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec", *args], cwd=ROOT, env=ENVIRONMENT, text=True, **streams
    )
    os.close(writing)
    tally = Tally("closed pipes")
    is_right = done.returncode == 141 and not done.stderr
    outcome = (
        Outcome("refused", "141") if is_right else of_status(done.returncode, str(done.stderr))
    )
    tally.add(" ".join(args), outcome)
    tally.finish(record_property)
