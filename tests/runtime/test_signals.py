"""How a process ends that is interrupted: in Python, in compiled code, and while it cleans up."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

PROGRAM = """
import hashlib, sys, time
from jaxspec.runtime import signals

def main():
    try:
        with signals.raised():
            print("started", flush=True)
            {work}
    except KeyboardInterrupt as interrupt:
        {cleaning}
        print("cleaned up")
        return interrupt.status
    return 0

signals.GRACE_S = {grace_s}
signals.exit_with(main)
"""
CLOSED = """
from jaxspec.runtime import signals

def main():
    try:
        print("lost", flush=True)
    except BrokenPipeError:
        return signals.BROKEN_PIPE_STATUS

signals.exit_with(main)
"""
IN_PYTHON = "time.sleep(100)"
IN_COMPILED_CODE = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"  # no handler runs meanwhile


@pytest.fixture
def start():
    """Starts a program, and returns it when it has begun with its work."""
    with contextlib.ExitStack() as stack:

        def run(*, work, cleaning="pass", grace_s=100.0, **options) -> subprocess.Popen:
            code = PROGRAM.format(work=work, cleaning=cleaning, grace_s=grace_s)
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    **options,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            if work == IN_COMPILED_CODE:
                time.sleep(1)  # until it is there
            return process

        yield run


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("num_sent", [1, 2])
def test_a_signal_lets_the_program_clean_up(start, number, status, num_sent):
    process = start(work=IN_PYTHON, cleaning="time.sleep(0.1)")
    for _ in range(num_sent):  # `timeout` sends two, and one is meant
        process.send_signal(number)
    assert process.communicate(timeout=60) == ("cleaned up\n", "")
    assert process.returncode == status


def test_another_signal_ends_the_program_at_once(start):
    process = start(work=IN_COMPILED_CODE)
    deadline = time.monotonic() + 60
    while process.poll() is None:  # one of them comes late enough to be another
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert process.communicate() == ("", "interrupted\n")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("work", "cleaning"), [(IN_COMPILED_CODE, "pass"), (IN_PYTHON, "time.sleep(100)")]
)
def test_a_program_that_does_not_end_is_ended(start, work, cleaning):
    process = start(work=work, cleaning=cleaning, grace_s=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 143


def test_a_signal_that_the_shell_ignores_stays_ignored(start):
    process = start(
        work="time.sleep(1)", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_a_closed_pipe_does_not_keep_the_status_back():
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            CLOSED,
        ],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(reading)
    os.close(writing)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 141


# A signal that comes where an exception would be wrapped, forgotten or printed

HELPERS = """
import os, signal, sys, time
from jaxspec.runtime import signals

def send():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)  # the handler runs

def exit_with(work):
    def main():
        try:
            work()
        except KeyboardInterrupt as interrupt:
            print("cleaned up")
            return interrupt.status
        return 0
    signals.exit_with(main)
"""
# As extension modules do: what is raised while they are initialised becomes another error.
SLOW_MODULE = """
import program

try:
    program.send()
except BaseException as error:
    raise ImportError("Encountered an error while initializing the extension.") from error
print("imported")
"""
CASES = {
    "before there is anything to clean up": (
        """
def work():
    import slow
""",
        "",
        "interrupted\n",
    ),
    "after the last that had to be cleaned up": (
        """
def work():
    with signals.raised():
        pass
    send()
    print("not reached")
""",
        "",
        "interrupted\n",
    ),
    "in a later import": (
        """
def work():
    with signals.raised():
        import slow
        time.sleep(100)
""",
        "imported\ncleaned up\n",
        "",
    ),
    "in a destructor": (
        """
class Thing:
    def __del__(self):
        send()

def work():
    with signals.raised():
        thing = Thing()
        del thing
        time.sleep(100)
""",
        "cleaned up\n",
        "",
    ),
    "in a destructor that raises something else": (
        """
class Thing:
    def __del__(self):
        try:
            send()
        except BaseException:
            raise SystemError("returned a result with an exception set")

def work():
    with signals.raised():
        thing = Thing()
        del thing
        time.sleep(100)
""",
        "cleaned up\n",
        "",
    ),
    "in a function that is uninterrupted": (
        """
@signals.uninterrupted
def finish():
    send()
    print("finished")

def work():
    with signals.raised():
        finish()
        time.sleep(100)
""",
        "finished\ncleaned up\n",
        "",
    ),
}


def run(code: str, directory: pathlib.Path, *args: object) -> subprocess.CompletedProcess:
    """Runs a program that may import `program` (helpers) and `slow`."""
    (directory / "program.py").write_text(HELPERS)
    (directory / "slow.py").write_text(SLOW_MODULE)
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": f"{directory}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_signal_comes_at_a_bad_moment(case, tmp_path):
    work, printed, said = CASES[case]
    done = run(f"from program import *\n{work}\nexit_with(work)", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, printed, said)


def test_other_errors_of_destructors_are_printed(tmp_path):
    code = """
class Thing:
    def __del__(self):
        raise ValueError("of the program itself")

def work():
    Thing()
"""
    done = run(f"from program import *\n{code}\nexit_with(work)", tmp_path)
    assert done.returncode == 0
    assert "ValueError: of the program itself" in done.stderr


COMMAND = """
import sys
from program import send
from jaxspec import cli
from jaxspec.runtime import signals

def run_command(args):
    with signals.raised():
        try:
            send()
        except BaseException as error:
            raise SystemError("returned a result with an exception set") from error

cli.run_command = run_command
cli.program()
"""


def test_whatever_a_library_makes_of_a_signal_a_command_ends_as_interrupted(tmp_path):
    done = run(COMMAND, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "interrupted\n")


def test_a_signal_ends_a_command_that_still_imports(tmp_path):
    """`tyro` is imported before the command is known."""
    (tmp_path / "tyro.py").write_text(SLOW_MODULE)
    code = "from jaxspec import cli; cli.signals.exit_with(lambda: cli.main(['env']))"
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "interrupted\n")


# A signal while a directory is made, put into its place and removed

WRITER = """
import contextlib, os, shutil, sys, time
from program import exit_with, send
from jaxspec.runtime import signals
from jaxspec.runtime.directories import atomic_directory

destination, function, order = sys.argv[1:]
module = shutil if function == "rmtree" else os
real, is_sent = getattr(module, function), False

def sending(path, *args, **kwargs):
    global is_sent
    is_there = function == "mkdir" or os.path.exists(path)
    first = not is_sent and is_there and "partial" in str(path)
    is_sent = is_sent or first
    if first and order == "before":
        send()
    real(path, *args, **kwargs)
    if first and order == "after":
        send()

def work():
    with signals.raised():
        with contextlib.suppress(ValueError), atomic_directory(destination) as directory:
            (directory / "file").write_text("new")
            if function == "rmtree":
                raise ValueError
        time.sleep(100)

setattr(module, function, sending)
exit_with(work)
"""


@pytest.mark.parametrize(
    ("function", "order", "left"),
    [("mkdir", "after", []), ("rename", "after", ["out"]), ("rmtree", "before", [])],
)
def test_a_signal_to_a_writer_leaves_a_whole_directory_or_none(function, order, left, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    done = run(WRITER, tmp_path, place / "out", function, order)
    assert (done.returncode, done.stdout, done.stderr) == (143, "cleaned up\n", "")
    assert [path.name for path in place.iterdir()] == left


STUCK = """
import hashlib, os, signal, sys, threading
from program import exit_with
from jaxspec.runtime import signals
from jaxspec.runtime.directories import atomic_directory

signals.GRACE_S = 0.5

def work():
    with signals.raised(), atomic_directory(sys.argv[1]) as directory:
        (directory / "file").write_text("new")
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # no handler runs meanwhile

exit_with(work)
"""


def test_a_writer_that_has_to_be_ended_leaves_nothing(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    done = run(STUCK, tmp_path, place / "out")
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "interrupted\n")
    assert not list(place.iterdir())
