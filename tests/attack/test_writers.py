"""Writers that are killed, two of them at once, and disks that fill up: nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hf_checkpoints
import pytest
import tiny
from attack import outcomes

from jaxspec.cli import main
from jaxspec.load.models import load_model
from jaxspec.training.checkpoints import latest_step
from jaxspec.training.lm_runs import load_run

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 80, 7], [9, 9, 9, 30], [200, 3], [44], [17, 18], [250, 2, 2], [33, 34], [100]]
# Of a run of 24 steps, each with a checkpoint.
TRAIN_OPTIONS = (
    "--tokens", 6144, "--batch-tokens", 256, "--sequence-length", 64, "--max-length", 128,
    "--vocab-size", 300, "--width", 16, "--feed-forward-width", 16, "--num-layers", 1,
    "--checkpoint-every", 1, "--warmup-steps", 2,
)  # fmt: skip
TEXTS = ["the quick brown fox jumps over the lazy dog. " * 40] * 24


class Place:
    """What a program reads and writes, and the judgement of what it left.

    Attributes:
      name: of the program.
      inputs: directory of what it reads, made where it is not there.
      output: file or directory that it writes.
      arguments: of the program.
    """

    def __init__(self, name: str, inputs: Path, output: Path):
        self.name, self.inputs, self.output = name, inputs / name, output
        output.parent.mkdir(parents=True, exist_ok=True)
        self.arguments = [str(each) for each in getattr(self, f"_{name}")()]

    def _generate(self) -> tuple:
        model, prompts = self.inputs / "model", self.inputs / "prompts.jsonl"
        if not model.exists():
            tiny.save(self.inputs, "model", text=tiny.tokenizer())
        prompts.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS))
        return (
            "generate", "--target", model, "--prompts", prompts, "--max-tokens", 24,
            "--batch-size", 1, "--max-length", 64, "--output", self.output, "--resume",
        )  # fmt: skip

    def _convert(self) -> tuple:
        source = hf_checkpoints.write_golden(self.inputs / "hf", "qwen3", num_shards=2)
        return "convert", source, self.output, "--overwrite"

    def _train(self) -> tuple:
        texts = self.inputs / "corpora" / "words"
        texts.mkdir(parents=True, exist_ok=True)
        (texts / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
        return "train", "lm", "--corpora", texts.parent, "--out", self.output, *TRAIN_OPTIONS

    def command(self) -> list[str]:
        """The program's command line, now: a run of `train` is resumed where there is one."""
        resumes = self.name == "train" and latest_step(self.output) is not None
        return [sys.executable, "-m", "jaxspec", *self.arguments, *["--resume"] * resumes]

    def found(self) -> bytes | None:
        """What the output amounts to; None without one.

        Raises:
          JaxspecError: the output is damaged.
        """
        is_replaced = self.output.with_name(".out.complete").exists()
        if not self.output.exists() and not is_replaced:
            return None
        if self.name == "generate":
            return self.output.read_bytes()
        if self.name == "train":
            if latest_step(self.output) is None:
                return None
            params = load_run(self.output).params
        else:
            params = load_model(self.output).params
        return b"".join(bytes(leaf) for leaf in _leaves(params))

    def clear(self) -> None:
        """Removes the output."""
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.unlink(missing_ok=True)

    def problem(self, expected: bytes, *, ended: bool) -> str | None:
        """What is wrong with the output of a program that was killed, or has ended."""
        try:
            found = self.found()
        except Exception as error:
            return f"the output is damaged: {error}"
        if found is None:
            return "there is no output" if ended else None
        # Weights of a run that is under way are others; they can be read, and that is all.
        is_under_way = self.name == "train" and not ended
        is_beginning = self.name == "generate" and not ended and expected.startswith(found)
        if found != expected and not is_under_way and not is_beginning:
            return f"the output has {len(found)} bytes that are not the expected {len(expected)}"
        left = [path.name for path in self.output.parent.iterdir() if path.name.startswith(".out")]
        return f"beside the output there are {left}" if ended and left else None


def _leaves(params) -> Iterator:
    import jax
    import numpy as np

    return (np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Of all programs: a line of `generate` names its model by the path."""
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Callable[[str], tuple[bytes, float]]:
    """The output of a program that nothing disturbed, and the seconds it took."""
    known: dict[str, tuple[bytes, float]] = {}

    def of(name: str) -> tuple[bytes, float]:
        if name not in known:
            place = Place(name, inputs, tmp_path_factory.mktemp("whole") / "out")
            started_s = time.perf_counter()
            done = subprocess.run(place.command(), cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            known[name] = place.found(), time.perf_counter() - started_s
        return known[name]

    return of


def judged(problem: str | None) -> outcomes.Outcome:
    return outcomes.Outcome("failed" if problem else "unchanged", problem or "")


# Kills


def wait_until_it_writes(place: Place, child: subprocess.Popen) -> None:
    """Waits until a conversion has begun to write parameters beside its output, or has ended."""
    while child.poll() is None and not list(place.output.parent.glob(".out.partial/params*")):
        time.sleep(0.002)


def attack_by_kills(place: Place, whole, num_kills: int) -> outcomes.Tally:
    """Kills a program again and again while it works on one output, then lets it finish."""
    name, rng = place.name, random.Random(num_kills)
    expected, duration_s = whole(name)
    tally = outcomes.Tally(f"{name} killed")
    for trial in range(num_kills):
        before = place.found()
        if before == expected and name != "convert":  # which replaces what is there
            place.clear()
        child = subprocess.Popen(
            place.command(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        delay_s = duration_s * rng.uniform(0.2, 0.9)  # before, it imports; the first one compiled
        moment = f"after {delay_s:.3f} s"
        if name == "convert" and trial == 0:
            moment = "while it writes"
            wait_until_it_writes(place, child)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(delay_s)
        child.kill()
        child.wait()
        problem = place.problem(expected, ended=False)
        if name == "convert" and before is not None and place.found() is None:
            problem = "the older conversion is lost"
        tally.add(f"{name}, kill {trial} {moment}", judged(problem))
    tally.add(
        f"{name} after {num_kills} kills",
        outcomes.of_process(
            place.command(), cwd=ROOT, problem=lambda _: place.problem(expected, ended=True)
        ),
    )
    return tally


@pytest.mark.parametrize(
    "name",
    ["convert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("generate", "train"))],
)
def test_kills(name, inputs, tmp_path, whole, record_property):
    place = Place(name, inputs, tmp_path / "out")
    if name == "convert":  # the older conversion stays until the new one is complete
        run(place.arguments)
    attack_by_kills(place, whole, 1).finish(record_property)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_kills"), [("generate", 70), ("convert", 70), ("train", 60)])
def test_two_hundred_kills(name, num_kills, inputs, tmp_path, whole, record_property):
    attack_by_kills(Place(name, inputs, tmp_path / "out"), whole, num_kills).finish(record_property)


# Two writers


@pytest.mark.parametrize(
    "name", ["generate", "convert", pytest.param("train", marks=pytest.mark.slow)]
)
def test_two_writers(name, inputs, tmp_path, whole, record_property):
    """One of them writes, and the other is told who does."""
    expected, _ = whole(name)
    place = Place(name, inputs, tmp_path / "out")
    tally = outcomes.Tally(f"two of {name}")
    children = [
        subprocess.Popen(
            place.command(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for child in children:
        _, errors = child.communicate()
        outcome = outcomes.of_status(child.returncode, errors)
        if outcome.kind == "refused" and not re.search("by process [0-9]+ on", outcome.reason):
            outcome = outcomes.Outcome("failed", outcome.reason)
        tally.add(f"{name}, process {child.pid}", outcome)
    problem = place.problem(expected, ended=True)
    tally.add(f"{name}, output", judged(problem))
    tally.finish(record_property)


# Full disks


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of so many KiB, where that is allowed."""
    mounted: list[Path] = []

    def make(num_kib: int) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={num_kib}k", "tmpfs", str(path)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("no disk can be mounted here")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def run(arguments: list[str]) -> None:
    """A command in this process; raises what it refused as the commands' own error."""
    from jaxspec.cli import run_command

    assert run_command(arguments) == 0


def attack_disks(disk, inputs: Path, whole, sizes: dict[str, tuple[int, ...]]) -> outcomes.Tally:
    """Each program on disks that are too small, and then with room."""
    tally = outcomes.Tally("full disks")
    for name, kibs in sizes.items():
        expected, _ = whole(name)
        for num_kib in kibs:
            place = Place(name, inputs, disk(num_kib) / "out")
            outcome = outcomes.of_call(lambda place=place: run(place.arguments))
            left = sorted(path.name for path in place.output.parent.iterdir())
            if outcome.kind != "failed" and left not in ([], ["out"]):
                outcome = outcomes.Outcome("failed", f"there are {left}")
            output = place.output
            if outcome.kind == "refused" and name == "generate":
                lines = output.read_bytes() if output.exists() else b""
                if not expected.startswith(lines) or (lines and not lines.endswith(b"\n")):
                    outcome = outcomes.Outcome("failed", "the output holds a part of a line")
            if outcome.kind == "refused" and name == "convert" and output.exists():
                outcome = outcomes.Outcome("failed", "a part of the conversion was left")
            tally.add(f"{name} on {num_kib} KiB", outcome)
    return tally


def test_full_disks(disk, inputs, whole, record_property):
    sizes = {"generate": (4, 8), "convert": (16, 64, 128)}
    attack_disks(disk, inputs, whole, sizes).finish(record_property)


@pytest.mark.slow
def test_many_full_disks(disk, inputs, whole, record_property):
    sizes = {
        "generate": (4, 8, 12, 16, 20),
        "convert": tuple(range(16, 240, 16)),
        "train": (4, 16, 64, 96, 128, 160, 192, 224, 256),
    }
    attack_disks(disk, inputs, whole, sizes).finish(record_property)


# How standard output is given: a full one, a closed one, and standard error closed, too.
REDIRECTIONS = {"full": ">/dev/full", "closed": ">&-", "none": ">&- 2>&-"}


@pytest.mark.parametrize(
    "arguments",
    [
        "cache list",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("--help", "cache list --json")),
    ],
)
def test_standard_output_that_takes_nothing(arguments, record_property):
    """One sentence on standard error."""
    tally = outcomes.Tally("standard output")
    command = f"{sys.executable} -m jaxspec {arguments}"
    for name, redirection in REDIRECTIONS.items():
        outcome = outcomes.of_process(["bash", "-c", f"{command} {redirection}"], cwd=ROOT)
        if name == "none" and outcome.reason.startswith("status 1 and no single sentence"):
            outcome = outcomes.Outcome("refused", "by the status")
        if outcome.kind == "unchanged":
            outcome = outcomes.Outcome("failed", "nothing was said")
        tally.add(f"{arguments}, {name}", outcome)
    tally.finish(record_property)


def test_a_program_that_ends_by_itself_is_judged_too(inputs, tmp_path, whole):
    """The judgement can fail: a line that is lost, doubled or changed is seen."""
    expected, _ = whole("generate")
    place = Place("generate", inputs, tmp_path / "out")
    lines = expected.splitlines(keepends=True)
    for changed in (lines[1:], [*lines, lines[-1]], [lines[0].replace(b"5", b"6"), *lines[1:]]):
        place.output.write_bytes(b"".join(changed))
        assert place.problem(expected, ended=True) is not None
        assert place.problem(expected, ended=False) is not None
    place.output.write_bytes(b"".join(lines[:3]) + lines[3][:9])
    assert place.problem(expected, ended=False) is None
    assert main(place.arguments) == 0
    assert place.problem(expected, ended=True) is None
    assert os.listdir(tmp_path) == ["out"]
