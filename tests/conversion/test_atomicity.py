"""A conversion that is killed at any moment leaves its destination absent or complete."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import hf_checkpoints
import jax
import numpy as np
import pytest

from jaxspec.checkpoint.format import load_converted
from jaxspec.convert import convert
from jaxspec.errors import CheckpointError
from jaxspec.runtime import directories

# Small batches and a pause after each make the time of writing most of the run.
_CHILD = """
import sys, time
import orbax.checkpoint.experimental.v1 as ocp
from jaxspec.convert import convert
from jaxspec.checkpoint import format as checkpoint
checkpoint._SAVE_BATCH_BYTES = 20_000
save = ocp.partial.save
def slow_save(*args):
    save(*args)
    time.sleep(0.02)
ocp.partial.save = slow_save
print("started", flush=True)
convert(sys.argv[1], sys.argv[2], overwrite=len(sys.argv) > 3)
print("finished", flush=True)
"""


def start(source: Path, destination: Path, *flags: str) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(source), str(destination), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    return child


def params_of(directory: Path) -> list[np.ndarray]:
    model = load_converted(directory, dtype="float32")
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model.params)]


def kill_trials(tmp_path: Path, num_trials: int) -> dict[str, int]:
    """Kills conversions at random moments; counts what was left."""
    source = hf_checkpoints.write_golden(tmp_path / "hf", "qwen3", num_shards=3)
    destination = tmp_path / "place" / "out"
    child = start(source, destination)
    began = time.perf_counter()
    assert child.wait() == 0
    duration = time.perf_counter() - began
    expected = params_of(destination)
    directories.shutil.rmtree(destination)

    outcomes = {"absent": 0, "partial directory left": 0, "complete": 0}
    rng = random.Random(5)
    for trial in range(num_trials):
        child = start(source, destination)
        # from the first write to a little after the last
        time.sleep(duration * 1.1 * (trial + rng.random()) / num_trials)
        child.send_signal(signal.SIGKILL)
        child.wait()
        if destination.exists():
            outcomes["complete"] += 1
            for ours, theirs in zip(params_of(destination), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            directories.shutil.rmtree(destination)
        else:
            outcomes["absent"] += 1
            left = destination.parent.is_dir() and any(destination.parent.iterdir())
            outcomes["partial directory left"] += int(left)

    convert(source, destination)
    for ours, theirs in zip(params_of(destination), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [path.name for path in destination.parent.iterdir()] == ["out"]
    return outcomes


def test_killed_at_some_moments(tmp_path):
    outcomes = kill_trials(tmp_path, 4)
    assert outcomes["absent"] >= 1


@pytest.mark.slow
def test_killed_at_twenty_moments(tmp_path):
    outcomes = kill_trials(tmp_path, 20)
    print(outcomes)
    assert outcomes["partial directory left"] >= 5  # the moments did hit the writing


def test_killed_while_overwriting(tmp_path):
    """The old checkpoint stays until the new one is complete."""
    source = hf_checkpoints.write_golden(tmp_path / "hf", "qwen3")
    destination = tmp_path / "out"
    convert(source, destination)
    before = params_of(destination)
    child = start(source, destination, "--overwrite")
    while not list(tmp_path.glob(".out.partial-*/params*")):
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    for ours, theirs in zip(params_of(destination), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    convert(source, destination, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_a_living_writer_is_left_alone(tmp_path):
    """Only directories of processes that have ended are removed."""
    mine = directories._sibling(tmp_path / "out")
    mine.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = mine.with_name(mine.name.replace(f"-{directories.os.getpid()}-", f"-{ended.pid}-"))
    stale.mkdir()
    with directories.atomic_directory(tmp_path / "out"):
        assert mine.exists()
        assert not stale.exists()


def test_the_slower_of_two_writers_is_told(tmp_path):
    def write(text, meanwhile=lambda: None):
        with directories.atomic_directory(tmp_path / "out") as directory:
            (directory / "from").write_text(text)
            meanwhile()

    with pytest.raises(CheckpointError, match="created by another process"):
        write("slower", meanwhile=lambda: write("faster"))
    assert (tmp_path / "out/from").read_text() == "faster"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
