"""Files and directories that appear whole or not at all, whatever happens to their writers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.runtime import directories
from jaxspec.runtime.directories import atomic_directory, write_atomically
from jaxspec.runtime.locks import only_writer

ROOT = Path(__file__).parents[2]


def run(code: str, *args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], cwd=ROOT, capture_output=True, text=True
    )


def write(destination: Path, text: str | None, **options) -> None:
    with atomic_directory(destination, **options) as directory:
        (directory / "inner").mkdir()
        (directory / "inner" / "file").write_text(text)


def content(destination: Path) -> str:
    return (destination / "inner" / "file").read_text()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# A process that is killed at a step


KILLED = """
import os, shutil, sys
from jaxspec.runtime import directories

steps = int(sys.argv[2])

def counted(function):
    def call(*args, **kwargs):
        global steps
        if steps == 0:
            os._exit(9)
        steps -= 1
        return function(*args, **kwargs)
    return call

for module, name in ((os, "rename"), (os, "fsync"), (shutil, "rmtree")):
    setattr(module, name, counted(getattr(module, name)))
with directories.atomic_directory(sys.argv[1], overwrite=True) as directory:
    (directory / "inner").mkdir()
    (directory / "inner" / "file").write_text("new")
os._exit(0)
"""


@pytest.mark.system
def test_a_writer_killed_at_any_step_loses_nothing(tmp_path):
    destination, found = tmp_path / "out", []
    for step in range(40):
        if destination.exists():
            directories.shutil.rmtree(destination)
        write(destination, "old")
        if run(KILLED, destination, step).returncode == 0:
            break
        found.append(content(destination) if destination.exists() else "absent")
        # The next writer fails, and loses nothing either.
        with pytest.raises(TypeError):
            write(destination, None, overwrite=True)
        assert content(destination) == {"old": "old", "new": "new", "absent": "new"}[found[-1]]
        assert names(tmp_path) == ["out"]
    assert [kind for kind in dict.fromkeys(found)] == ["old", "absent", "new"]
    assert found.count("absent") >= 1


def test_a_reader_finishes_what_a_killed_writer_had_complete(tmp_path):
    destination = tmp_path / "out"
    write(tmp_path / ".out.complete", "new")
    write(tmp_path / ".out.replaced", "old")
    directories.finish_interrupted(destination)
    assert content(destination) == "new"
    assert names(tmp_path) == ["out"]
    for name in ("none-such", "x" * 300, "\0"):
        directories.finish_interrupted(tmp_path / name)
    assert names(tmp_path) == ["out"]


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: order.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd)
    )
    monkeypatch.setattr(os, "rename", lambda a, b: order.append("rename") or rename(a, b))
    write(tmp_path / "out", "text")
    partial = tmp_path / ".out.partial"
    before = order[: order.index("rename")]
    assert before == [str(partial / "inner" / "file"), str(partial / "inner"), str(partial)]
    assert order[-1] == str(tmp_path)


def test_links_are_followed(tmp_path):
    """What is named by a link is written where the link points to, and the link stays."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "model")
    write(tmp_path / "out", "one")
    write(tmp_path / "out", "two", overwrite=True)
    assert (tmp_path / "out").is_symlink()
    assert content(tmp_path / "disk" / "model") == "two"
    (tmp_path / "file").symlink_to(tmp_path / "disk" / "file")
    write_atomically(tmp_path / "file", b"text")
    assert (tmp_path / "disk" / "file").read_bytes() == b"text"
    assert names(tmp_path) == ["disk", "file", "out"]
    assert names(tmp_path / "disk") == ["file", "model"]


def test_links_in_the_place_of_a_working_file_are_not_followed(tmp_path):
    """In a shared directory somebody else may have put them there."""
    (tmp_path / "theirs").write_text("theirs")
    for name in (".file.partial", ".file.lock"):
        (tmp_path / name).symlink_to(tmp_path / "theirs")
    with pytest.raises(SettingError, match="file cannot be written"):
        write_atomically(tmp_path / "file", b"text")
    (tmp_path / ".file.lock").unlink()
    write_atomically(tmp_path / "file", b"text")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert names(tmp_path) == ["file", "theirs"]


# A disk that takes no more


@pytest.fixture
def small_files():
    """No file of this process may grow beyond 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_directory_that_cannot_be_written_whole(tmp_path, small_files):
    write(tmp_path / "out", "old")
    small_files()
    with pytest.raises(CheckpointError, match=r"out cannot be written \(File too large\)"):
        write(tmp_path / "out", "x" * 2000, overwrite=True)
    assert content(tmp_path / "out") == "old"
    assert names(tmp_path) == ["out"]


def test_a_name_that_no_directory_can_have(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be created \(File name too long\)"):
        write(tmp_path / ("x" * 300), "text")


def test_a_file_that_cannot_be_written_whole(tmp_path, small_files):
    write_atomically(tmp_path / "file", b"old")
    small_files()
    with pytest.raises(SettingError, match=r"file cannot be written \(File too large\)"):
        write_atomically(tmp_path / "file", bytes(2000))
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path, make):
    make(tmp_path / "special")
    with pytest.raises(SettingError, match="special cannot be written"):
        write_atomically(tmp_path / "special", b"text")
    assert not (tmp_path / "special").is_file()
    assert names(tmp_path) == ["special"]


# Two writers


HOLDER = """
import pathlib, sys, time
from jaxspec.runtime.locks import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that writes `out`, until its standard input ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "out")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "held\n"
    yield child
    child.stdin.close()
    child.wait()


def test_the_second_writer_is_told_who_the_first_is(tmp_path, holder):
    told = rf"out is being written by process {holder.pid} on .*; wait until it has finished"
    with pytest.raises(SettingError, match=told):
        write(tmp_path / "out", "second")
    assert names(tmp_path) == [".out.lock"]


def test_the_lock_of_a_killed_writer_locks_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert names(tmp_path) == [".out.lock"]
    write(tmp_path / "out", "second")
    assert names(tmp_path) == ["out"]


def test_waiting_for_the_first_writer(tmp_path, holder, caplog):
    code = HOLDER.replace("sys.argv[1])", "sys.argv[1]), wait=True")
    waiting = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert f"waiting for process {holder.pid}" in waiting.stderr.readline()
    assert waiting.poll() is None
    holder.stdin.close()
    assert waiting.communicate()[0] == "held\n"
    assert waiting.returncode == 0
    assert names(tmp_path) == []


def test_threads_and_nested_writers_are_told_too(tmp_path):
    with only_writer(tmp_path / "out"), pytest.raises(SettingError, match=f"{os.getpid()}"):
        write(tmp_path / "out", "second")
    with only_writer(tmp_path / "out"):
        pass
    assert names(tmp_path) == []
