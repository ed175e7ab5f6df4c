"""Signals at every moment of commands (while they load, compile, decode, train and write), and
outputs that nobody reads: the exit status, one line, and files that are whole or can be
continued."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import hf_checkpoints
import pytest
from attack.outcomes import Outcome, Tally, of_status
from attack.test_writers import TRAIN_OPTIONS

from jaxspec.checkpoint.format import load_converted
from jaxspec.training.lm_runs import load_run

ROOT = pathlib.Path(__file__).parent.parent.parent
LIMIT_S = 120  # a command that takes longer after a signal hangs
ENDS_IN_S = 5  # a command that continues for longer has swallowed the signal
STEP_S = 0.02  # of the sweep
SIGNALS = (signal.SIGINT, signal.SIGTERM)
NUM_PROMPTS = 6
# What commands say before they are interrupted.
SAYS = (
    "compiling ", "compiled ", "weights ", "/new starts", "step ", "using ", "finishing this step",
    "to go on: ",
)  # fmt: skip

# A program that runs a command and sends itself a signal when a function is first called: after a
# delay, or at once, where the function then makes another error of whatever is raised in it.
DRIVER = """
import importlib, os, sys, threading, time
from jaxspec.cli import program

where, number, delay, *sys.argv[1:] = sys.argv[1:]
module, _, names = where.partition(":")
*outer, name = names.split(".")
place = importlib.import_module(module)
for each in outer:
    place = getattr(place, each)
real = getattr(place, name)

def send():
    os.kill(os.getpid(), int(number))

def sending(*args, **kwargs):
    setattr(place, name, real)
    if delay != "wrapped":
        threading.Timer(float(delay), send).start()
        return real(*args, **kwargs)
    try:
        send()
        time.sleep(0.05)
    except BaseException as error:
        raise RuntimeError("an error of threads") from error
    raise TypeError("'NoneType' object is not subscriptable")

setattr(place, name, sending)
program()
"""
LOAD = "orbax.checkpoint.experimental.v1:load"
COMPILE = "jaxspec.runtime.compilation:Program.compile"
SAVE = "orbax.checkpoint:CheckpointManager.save"
DECODE = "jaxspec.engine.core:EngineCore.step"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that is interrupted.

    Attributes:
      args: for `jaxspec`, given the directory that it writes to.
      problem: what is wrong with what it left there, or None.
      text: its standard input.
    """

    args: Callable[[pathlib.Path], list[object]]
    problem: Callable[[pathlib.Path], str | None]
    text: str = ""


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, Command]:
    root = tmp_path_factory.mktemp("inputs")
    source = hf_checkpoints.write_golden(root / "hf", "qwen3")
    prompts = root / "prompts.txt"
    prompts.write_text("".join(f"prompt {index}\n" for index in range(NUM_PROMPTS)))
    (root / "corpora" / "words").mkdir(parents=True)
    text = json.dumps({"text": "the quick brown fox jumps over the lazy dog. " * 40})
    (root / "corpora" / "words" / "texts.jsonl").write_text(f"{text}\n" * 24)
    model = ["--target", "demo-draft", "--drafter", "ngram"]
    return {
        "generate": Command(
            lambda place: [
                "generate", *model, "--prompts", prompts, "--output", place / "out.jsonl",
                "--max-tokens", 40, "--batch-size", 1,
            ],
            lines_problem,
        ),
        "convert": Command(
            lambda place: ["convert", source, place / "converted", "--dtype", "float32"],
            directory_problem,
        ),
        "chat": Command(
            lambda _: ["chat", *model, "--max-tokens", 20],
            nothing_problem,
            text="hello\nhow are you?\n",
        ),
        "audit": Command(
            lambda _: ["audit", *model, "--limit", 4, "--max-tokens", 8],
            nothing_problem,
        ),
        "train": Command(
            lambda place: [
                "train", "lm", "--corpora", root / "corpora", "--out", place / "run",
                *TRAIN_OPTIONS,
            ],
            run_problem,
        ),
    }  # fmt: skip


def names_in(directory: pathlib.Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def nothing_problem(directory: pathlib.Path) -> str | None:
    """Whether the command left nothing."""
    left = names_in(directory)
    return f"{left} was left" if left else None


def lines_problem(directory: pathlib.Path) -> str | None:
    """Whether the output file is whole lines, in order."""
    path = directory / "out.jsonl"
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        return "the last line is cut off"
    for index, line in enumerate(content.splitlines()):
        if json.loads(line)["request_id"] != str(index):
            return f"line {index} is of another prompt"
    others = [name for name in names_in(directory) if name != path.name]
    return f"{others} lie beside the output" if others else None


def directory_problem(directory: pathlib.Path) -> str | None:
    """Whether the converted directory is complete, or not there."""
    if names_in(directory) == ["converted"]:
        load_converted(directory / "converted", dtype="float32")
        return None
    return nothing_problem(directory)


def run_problem(directory: pathlib.Path) -> str | None:
    """Whether a training run has only whole files, but for one checkpoint that bears the name of an
    unfinished one, which the next save removes."""
    run = directory / "run"
    if not run.exists():
        return nothing_problem(directory)
    unfinished = [name for name in names_in(run) + names_in(directory) if name.startswith(".")]
    if unfinished:
        return f"{unfinished} was left"
    kept = names_in(run / "checkpoints") if (run / "checkpoints").exists() else []
    steps = [name for name in kept if not name.endswith(".orbax-checkpoint-tmp")]
    if len(kept) - len(steps) > 1 or len(steps) > 3 or not all(map(str.isdecimal, steps)):
        return f"{kept} were left"
    # The newest two are whole, and can be read one after the other; a third is being removed.
    for step in sorted(map(int, steps), reverse=True)[:2]:
        load_run(run)
        shutil.rmtree(run / "checkpoints" / str(step))
    if (run / "log.jsonl").exists():
        for line in (run / "log.jsonl").read_text().splitlines():
            json.loads(line)
    return None


def start(program: Sequence[object], command: Command, place: pathlib.Path) -> subprocess.Popen:
    """The process of a command, which writes to `place / "out"`, has its temporary files in
    `place / "tmp"`, and keeps what it says in a file."""
    for name in ("out", "tmp"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "in").write_text(command.text)
    with (
        open(place / "in") as stdin,
        open(place / "stdout", "w") as stdout,
        open(place / "stderr", "w") as stderr,
    ):
        return subprocess.Popen(
            [sys.executable, *map(str, program), *map(str, command.args(place / "out"))],
            cwd=place / "out",
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(place / "tmp")},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )


def wait_until_caught(process: subprocess.Popen) -> None:
    """Waits until a process has a handler for SIGTERM, which Python leaves to the system."""
    while process.poll() is None:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)


def outcome_of(
    process: subprocess.Popen, command: Command, place: pathlib.Path, number: int
) -> Outcome:
    """How a command ended to which this signal was sent just now."""
    sent_s = time.monotonic()
    try:
        status = process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return Outcome("failed", f"hangs: no end {LIMIT_S} s after the signal")
    took_s = time.monotonic() - sent_s
    err = (place / "stderr").read_text()
    said = [line for line in err.splitlines() if not line.startswith(SAYS)]
    problem = command.problem(place / "out") or nothing_problem(place / "tmp")
    if problem is not None:
        return Outcome("failed", problem)
    if took_s > ENDS_IN_S:
        return Outcome("failed", f"status {status}, {took_s:.1f} s after the signal")
    if status == 128 + number:
        if said != ["interrupted"] or not err.endswith("interrupted\n"):
            return Outcome("failed", f"it said {err[-500:]!r}")
        return Outcome("refused", "interrupted")
    return of_status(status, err)  # the work was done


# The functions at whose first call a signal comes, and after how long: those of the gate, and more.
SOME_PHASES = {
    "generate": ((LOAD, "wrapped"), (DECODE, 0.01)),
    "convert": (("orbax.checkpoint.experimental.v1.partial:save", 0.01),),
    "chat": ((DECODE, 0),),
    "audit": ((LOAD, "wrapped"),),
    "train": ((COMPILE, 0.02), (SAVE, 0.02)),
}
IN_GATE_PHASES = ("convert",)
PHASES = {
    "generate": ((LOAD, 0), (LOAD, 0.02), ("os:fsync", 0)),
    "convert": (("os:fsync", 0),),
    "chat": ((LOAD, 0.01),),
    "train": (("os:replace", 0), (SAVE, 0), (SAVE, 0.06)),
}


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        *((name, SOME_PHASES[name]) for name in IN_GATE_PHASES),
        *(
            pytest.param(name, phases, marks=pytest.mark.slow)
            for name, phases in (*SOME_PHASES.items(), *PHASES.items())
            if phases not in [SOME_PHASES[each] for each in IN_GATE_PHASES]
        ),
    ],
)
def test_signals_in_every_phase(commands, tmp_path, record_property, name, phases):
    tally = Tally(f"signals to phases of {name}")
    for index, (where, delay) in enumerate(phases):
        number, place = SIGNALS[index % 2], tmp_path / str(index)
        process = start(["-c", DRIVER, where, int(number), delay], commands[name], place)
        assert process.wait(timeout=LIMIT_S) == 128 + number, (place / "stderr").read_text()
        outcome = outcome_of(process, commands[name], place, number)
        tally.add(f"{number.name} in {where}, {delay}", outcome)
    tally.finish(record_property)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", SOME_PHASES)
def test_a_signal_every_20_ms(commands, tmp_path, record_property, name):
    """From the moment from which the command handles signals to its end."""
    command, tally = commands[name], Tally(f"a signal every 20 ms of {name}")
    for run in ("first", "second"):  # the second has everything that is kept in caches
        process = start(["-m", "jaxspec"], command, tmp_path / run)
        wait_until_caught(process)
        started_s = time.monotonic()
        assert process.wait() == 0, (tmp_path / run / "stderr").read_text()
        duration_s = time.monotonic() - started_s
    for index in range(int(duration_s / STEP_S) + 5):
        number, place = SIGNALS[index % 2], tmp_path / str(index)
        process = start(["-m", "jaxspec"], command, place)
        wait_until_caught(process)
        time.sleep(index * STEP_S)
        process.send_signal(number)
        outcome = outcome_of(process, command, place, number)
        tally.add(f"{number.name} after {index * STEP_S:.2f} s of {name}", outcome)
    tally.finish(record_property)


# Whether standard error is closed too, and the command; the other pairs are slow.
IN_GATE = [(True, "cache list"), (False, "--help")]
CLOSED = [
    pytest.param(is_both, args, marks=() if (is_both, args) in IN_GATE else pytest.mark.slow)
    for is_both in (False, True)
    for args in ("doctor --versions", "doctor --versions --json", "cache list", "--help")
]


@pytest.mark.parametrize(("is_both", "args"), CLOSED)
def test_an_output_that_nobody_reads(is_both, args, record_property):
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": writing, "stderr": writing if is_both else subprocess.PIPE}
    command = [sys.executable, "-m", "jaxspec", *args.split()]
    done = subprocess.run(command, cwd=ROOT, text=True, **streams)
    os.close(writing)
    tally = Tally("closed pipes")
    is_right = done.returncode == 141 and not done.stderr
    outcome = (
        Outcome("refused", "141") if is_right else of_status(done.returncode, str(done.stderr))
    )
    tally.add(args, outcome)
    tally.finish(record_property)
