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
