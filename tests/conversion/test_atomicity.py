"""A conversion that is killed at any moment leaves its destination absent or complete."""

from __future__ import annotations

import random
import resource
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
from jaxspec.errors import CheckpointError, SettingError
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
    while not list(tmp_path.glob(".out.partial/params*")):
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    for ours, theirs in zip(params_of(destination), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    convert(source, destination, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_the_second_of_two_conversions_is_refused(tmp_path):
    """It is told who converts, and the first one finishes."""
    source = hf_checkpoints.write_golden(tmp_path / "hf", "qwen3")
    first = start(source, tmp_path / "out")
    while not list(tmp_path.glob(".out.partial/params*")):
        assert first.poll() is None
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(SettingError, match=rf"out is being written by process {first.pid}"):
        convert(source, tmp_path / "out", overwrite=True)
    first.send_signal(signal.SIGCONT)
    assert first.wait() == 0
    assert load_converted(tmp_path / "out").vocab_size == 97
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_a_disk_that_fills_up(tmp_path):
    """As a limit on the size of files: it is an error of Orbax's C++."""
    source = hf_checkpoints.write_golden(tmp_path / "hf", "qwen3")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written \(File too large\)"):
            convert(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
