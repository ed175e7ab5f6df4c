"""How a process ends that is interrupted: promptly, in one line, and with nothing half-written."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent

HELPERS = """
import hashlib, os, pathlib, signal, sys, threading, time
from jaxspec.runtime import signals
from jaxspec.runtime.signals import advising, called_at_end, postponed, uninterrupted

def send():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)  # what a handler raises comes here

def leave(name):
    return called_at_end(pathlib.Path(name).touch)  # standard output is discarded by then

def exit_with(work):
    signals.handle_signals()
    signals.exit_with(lambda: work() or 0)
"""
# As extension modules do: what is raised while they are initialised becomes another error.
SLOW_MODULE = """
import program

try:
    program.send()
except BaseException as error:
    raise ImportError("Encountered an error while initializing the extension.") from error
print("imported")
raise ImportError("too late")
"""
IN_PYTHON = "time.sleep(100)"
IN_COMPILED_CODE = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"  # no handler runs meanwhile
INTERRUPTED = (143, "", "interrupted\n")
FINISHING = "finishing this step first; interrupt again to end at once\n"


def command(code: str, directory: pathlib.Path, *args: object) -> list[str]:
    """A program in `directory` that has the names of `HELPERS`."""
    (directory / "program.py").write_text(HELPERS)
    return [sys.executable, "-c", f"from program import *\n{code}", *map(str, args)]


def environment(directory: pathlib.Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{directory}:{ROOT}"}


def run(code: str, directory: pathlib.Path, *args: object) -> tuple[int, str, str]:
    """Runs such a program; its status and outputs."""
    done = subprocess.run(
        command(code, directory, *args),
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def start(tmp_path) -> Iterator:
    """Starts a program, and returns it when it has begun with its work."""
    started: list[subprocess.Popen] = []

    def start(work: str, *, cleaning: str = "pass", grace_s: float = 100.0, **options):
        code = f"""
def clean_up():
    {cleaning}
    pathlib.Path("cleaned").touch()

def main():
    with called_at_end(clean_up):
        print("started", flush=True)
        {work}

signals.GRACE_S = {grace_s}
exit_with(main)
"""
        process = subprocess.Popen(
            command(code, tmp_path),
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        if work == IN_COMPILED_CODE or work.startswith("with uninterrupted"):
            time.sleep(1)  # until it is there
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("work", "number", "num_sent"),
    [
        (IN_PYTHON, signal.SIGTERM, 2),  # `timeout` sends two, and one is meant
        (IN_COMPILED_CODE, signal.SIGINT, 1),
    ],
)
def test_a_signal_ends_the_program_after_it_is_cleaned_up(start, tmp_path, work, number, num_sent):
    process = start(work, cleaning="time.sleep(0.1)")
    for _ in range(num_sent):
        process.send_signal(number)
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 128 + number
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize(
    ("work", "cleaning", "is_repeated"),
    [
        (IN_PYTHON, "time.sleep(100)", False),
        (IN_PYTHON, "time.sleep(100)", True),
        (f"with uninterrupted: {IN_PYTHON}", "pass", True),
    ],
)
def test_a_program_that_does_not_end_is_ended(start, tmp_path, work, cleaning, is_repeated):
    process = start(work, cleaning=cleaning, grace_s=100 if is_repeated else 0.5)
    process.send_signal(signal.SIGINT)
    deadline_s = time.monotonic() + 60
    while is_repeated and process.poll() is None:  # one of them comes late enough to be another
        assert time.monotonic() < deadline_s
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130, "that of the first signal"
    assert not (tmp_path / "cleaned").exists()


def test_a_signal_that_the_shell_ignores_stays_ignored(start):
    process = start(
        "time.sleep(1)", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_a_closed_pipe_does_not_keep_the_status_back(tmp_path):
    code = """
def main():
    try:
        print("lost")
        sys.stdout.flush()
    except BrokenPipeError:
        return 141

signals.handle_signals()
signals.exit_with(main)
"""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command(code, tmp_path),
        env=environment(tmp_path),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_output_that_nobody_reads_does_not_keep_the_process(start):
    """Standard error is a full pipe."""
    process = start(
        'os.set_blocking(2, False); exec(\'try:\\n while True: os.write(2, b"." * 4096)\\n'
        "except BlockingIOError:\\n os.set_blocking(2, True)\\n time.sleep(100)')"
    )
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


# Moments at which an exception would be swallowed or printed

CASES = {
    "in a library that swallows everything": """
def work():
    for _ in range(200):
        try:
            send()
        except BaseException:
            pass
    print("not reached")
""",
    "in a pool of threads, whose exit waits": """
from concurrent.futures import ThreadPoolExecutor

def work():
    with ThreadPoolExecutor() as threads:
        threads.submit(time.sleep, 100)
        threads.submit(send)
""",
    "after which threads fail and print": """
import logging

def fail():
    while True:
        os.write(2, b"from C++\\n")
        print("to standard output", flush=True)
        logging.error("of a thread")
        threading.Thread(target=lambda: 1 / 0).start()

def work():
    with called_at_end(lambda: time.sleep(0.5)):
        send_in_time = threading.Timer(0.2, send)
        send_in_time.start()
        time.sleep(0.3)
        fail()
""",
    "in a library that takes the handler": """
def work():
    signal.signal(signal.SIGTERM, lambda *_: None)
    send()
    print("not reached", flush=True)
""",
    "after the work, while the process ends": """
def work():
    class Output:
        def flush(self):
            send()
    sys.stdout = Output()
""",
}


@pytest.mark.parametrize("case", CASES)
def test_a_signal_comes_at_a_bad_moment(case, tmp_path):
    assert run(f"{CASES[case]}\nexit_with(work)", tmp_path) == INTERRUPTED


@pytest.mark.parametrize("ending", ["return 3", "raise ValueError"])
def test_an_uninterrupted_block_is_finished_and_none_begins_afterwards(ending, tmp_path):
    code = f"""
def work():
    with leave("left"):
        with uninterrupted:
            send()
            pathlib.Path("finished").touch()
        with uninterrupted:
            pathlib.Path("begun").touch()
        {ending}

exit_with(work)
"""
    assert run(code, tmp_path) == INTERRUPTED
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"finished", "left"}
    assert "begun" not in left


@pytest.mark.parametrize("num_sent", [1, 2])
def test_a_postponed_signal_ends_the_process_after_the_block_and_a_second_at_once(
    num_sent, tmp_path
):
    code = f"""
def work():
    with advising(lambda: "to go on: run again"), postponed(pathlib.Path("saved").touch):
        for _ in range({num_sent}):
            send()
        pathlib.Path("worked").touch()
    pathlib.Path("went on").touch()

exit_with(work)
"""
    said = f"{FINISHING}to go on: run again\ninterrupted\n"
    assert run(code, tmp_path) == (143, "", said)
    for name in ("worked", "saved"):
        assert (tmp_path / name).exists() == (num_sent == 1)
    assert not (tmp_path / "went on").exists()


def test_the_last_that_was_made_is_removed_first_whatever_the_others_raise(tmp_path):
    code = """
def work():
    with called_at_end(lambda: os.rename("b", "c")), called_at_end(lambda: 1 / 0):
        with called_at_end(lambda: os.rename("a", "b")):
            pathlib.Path("a").touch()
            send()

exit_with(work)
"""
    assert run(code, tmp_path) == INTERRUPTED
    assert (tmp_path / "c").exists()


def test_a_signal_ends_a_command_that_still_imports(tmp_path):
    """`tyro` is imported before the command is known."""
    (tmp_path / "tyro.py").write_text(SLOW_MODULE)
    code = """
from jaxspec import cli

signals.handle_signals()
signals.exit_with(lambda: cli.main(["doctor", "--versions"]))
"""
    assert run(code, tmp_path) == INTERRUPTED


def test_errors_that_follow_a_signal_are_not_those_of_the_command(tmp_path):
    code = """
from jaxspec import cli, errors

def run_command(args):
    send()
    raise errors.DamagedError("The parameters cannot be read; convert the model again.")

cli.run_command = run_command
cli.program()
"""
    assert run(code, tmp_path) == INTERRUPTED


# A signal while files are made, put into their places and removed

WRITER = """
import shutil
from jaxspec.errors import SettingError
from jaxspec.runtime.directories import atomic_directory, temporary_directory, write_atomically
from jaxspec.runtime.locks import only_writer

function, order, write = sys.argv[1:]
module = shutil if function == "rmtree" else os
real, is_sent, named = getattr(module, function), False, (".out", "jaxspec-")

def sending(*args, **kwargs):
    global is_sent
    is_ours = function == "fsync" or pathlib.Path(args[0]).name.startswith(named)
    first = is_ours and not is_sent
    is_sent = is_sent or first
    if first and order == "before":
        send()
    result = real(*args, **kwargs)
    if first and order == "after":
        send()
    return result

def directory():
    with atomic_directory("out") as made:
        (made / "file").write_text("new")
        if function == "rmtree":
            raise ValueError

def file():
    write_atomically(pathlib.Path("out"), b"new")

def lock():
    with only_writer(pathlib.Path("out")):
        time.sleep(100)

def temporary():
    with temporary_directory() as made:
        (made / "file").write_text("new")

os.mkdir("place")
os.chdir("place")
os.environ["TMPDIR"] = os.getcwd()
setattr(module, function, sending)
exit_with(globals()[write])
"""


@pytest.mark.parametrize(
    ("write", "function", "order", "left"),
    [
        ("directory", "mkdir", "after", []),
        ("directory", "rename", "before", ["out"]),
        ("directory", "rename", "after", ["out"]),
        ("directory", "fsync", "before", []),
        ("directory", "rmtree", "before", []),
        ("directory", "rmtree", "after", []),
        ("file", "fsync", "before", []),
        ("file", "replace", "after", ["out"]),
        ("lock", "open", "after", []),
        ("temporary", "mkdir", "after", []),
    ],
)
def test_a_signal_to_a_writer_leaves_everything_or_nothing(write, function, order, left, tmp_path):
    assert run(WRITER, tmp_path, function, order, write) == INTERRUPTED
    assert sorted(path.name for path in (tmp_path / "place").iterdir()) == left


def test_threads_that_make_a_directory_again_leave_nothing(tmp_path):
    """As threads of Orbax do, which continue for a moment."""
    code = """
from jaxspec.runtime.directories import atomic_directory

def write(directory):
    for index in range(50):
        (directory / "params").mkdir(parents=True, exist_ok=True)
        try:
            (directory / "params" / str(index)).write_text("new")
        except OSError:
            pass
        time.sleep(0.01)

def work():
    with atomic_directory("place/out") as directory:
        threading.Thread(target=write, args=(directory,)).start()
        send()
        time.sleep(100)

exit_with(work)
"""
    assert run(code, tmp_path) == INTERRUPTED
    assert not list((tmp_path / "place").iterdir())


def test_child_processes_are_ended(tmp_path):
    """With those that they started themselves."""
    code = """
from jaxspec.runtime.processes import run_child

def work():
    threading.Timer(0.5, send).start()
    run_child(["sh", "-c", "sh -c 'sleep 1; touch survived' & sleep 100; exit 0"])

exit_with(work)
"""
    assert run(code, tmp_path) == INTERRUPTED
    time.sleep(1.5)
    assert not (tmp_path / "survived").exists()
