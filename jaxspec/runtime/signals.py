"""How a command ends when it is interrupted.

SIGINT (Ctrl-C) and SIGTERM wake a thread that ends the process. Nothing is raised in the main
thread, because an exception that comes in the middle of a library may be swallowed there, or
wrapped in another error, or printed by each of the library's threads; and while the main thread is
in compiled code, Python raises none. The order is:

1. What any thread prints from now on is discarded.
2. Blocks of `uninterrupted` are finished, and none begins any more, so that the main thread cannot
   put anything in place, or make anything that would have to be removed.
3. The functions of `called_at_end` are called.
4. The process prints "interrupted" and ends without running anything else. (XLA's threads would
   crash if the interpreter destroyed their client.)

A second signal leads to the last step at once, and so does the end of `GRACE_S`. In a block of
`handed_to` the first signal is handed to a server, which may take its time to end; the order above
begins when the block has ended.

Work that is lost if it is not written first is done in blocks of `postponed`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 8.0  # to clean up after a signal; containers are killed 10 s after SIGTERM
AT_ONCE_S = 0.2  # signals so close together are one: `timeout` sends two
SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it

_CLEANED_UP = 0  # the byte for it, beside the numbers of signals
_HANDED_BACK = 255  # the byte for the end of a block of `handed_to`
_AT_END: list[Callable[[], object]] = []
_ADVICE: list[Callable[[], str | None]] = []
_POSTPONED: list[int | None] = []  # for each block of `postponed`, the signal that has come
_POSTPONED_LOCK = threading.Lock()
_TAKERS: list[Callable[[], object]] = []  # of the block of `handed_to`
_TAKEN: list[int] = []  # where to write `_HANDED_BACK`, once a signal was handed over


class _Uninterrupted:
    """`with uninterrupted:` is a short block that is finished before a signal ends the process. One
    thread at a time is in such blocks. A block must not wait for another process or thread."""

    def __init__(self):
        self.is_ending = threading.Event()
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.is_ending.is_set() and self._depth == 0:
            self._lock.release()
            threading.Event().wait()  # for the end
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()

    def finish(self) -> None:
        """Waits until the blocks are finished, in the thread that ends the process."""
        self._lock.acquire()
        self._depth += 1


uninterrupted = _Uninterrupted()


@contextlib.contextmanager
def postponed(finish: Callable[[], object]) -> Iterator[None]:
    """A block that a first signal does not interrupt: the block is completed, `finish` is called,
    and then the process ends. A second signal ends it at once."""
    with _POSTPONED_LOCK:
        _POSTPONED.append(None)
    try:
        yield
    finally:
        with _POSTPONED_LOCK:
            number = _POSTPONED.pop()
    if number is not None:
        finish()
        signal.raise_signal(number)
        threading.Event().wait()  # for the end


@contextlib.contextmanager
def advising(advice: Callable[[], str | None]) -> Iterator[None]:
    """A block in which a signal that ends the process prints the line that `advice` returns."""
    _ADVICE.append(advice)
    try:
        yield
    finally:
        _ADVICE.remove(advice)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and ends the process with the status that it returns. Functions registered with
    `atexit` are only called if `main` raises."""
    try:
        status = main()
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    except BaseException:
        with uninterrupted:  # after a signal, errors are of no interest
            raise
    with uninterrupted:
        os._exit(status)


@contextlib.contextmanager
def called_at_end(remove: Callable[[], object]) -> Iterator[None]:
    """A block after which `remove` is called, perhaps twice, even if a signal ends the process
    within the block. In that case it is called in another thread, and its errors are ignored.

    What `remove` removes should be made in the same block of `uninterrupted` in which this block
    begins.
    """
    with uninterrupted:
        _AT_END.append(remove)
    try:
        yield
    finally:
        with uninterrupted:
            try:
                remove()
            finally:
                _AT_END.remove(remove)


@contextlib.contextmanager
def handed_to(take: Callable[[], object]) -> Iterator[None]:
    """A block in which the first signal calls `take`, in another thread, and does nothing else. The
    process ends when the block has ended, or at once after a second signal."""
    _TAKERS.append(take)
    try:
        yield
    finally:
        _TAKERS.remove(take)
        if _TAKEN:
            os.write(_TAKEN[0], bytes([_HANDED_BACK]))
            threading.Event().wait()  # for the end


def handle_signals() -> None:
    """Handles the signals, except those that the parent process made us ignore (`nohup`, a shell's
    background jobs). Call it in the main thread.

    Raises:
      RuntimeError: no thread can be started.
      OSError: no file can be opened.
    """
    # All that the end needs is made now, because later there may be no file descriptor or thread
    # left.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    ending = (_end_after_signal, reading, writing, stderr, nowhere)
    for function, *args in (ending, (_clean_up, writing)):
        threading.Thread(target=function, args=args, daemon=True).start()
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _end_after_signal(reading: int, writing: int, stderr: int, nowhere: int) -> NoReturn:
    """Ends the process after the first signal.

    Args:
      reading: the descriptor from which the numbers of signals are read, and `_CLEANED_UP`.
      writing: the one to write to.
      stderr: that of standard error.
      nowhere: that of a file that discards what is written.
    """
    number = _wait_for_signal(reading, stderr)
    first_s = time.monotonic()
    is_second = False
    if _TAKERS:
        _TAKEN.append(writing)
        _TAKERS[-1]()
        while not is_second and (byte := os.read(reading, 1)[0]) != _HANDED_BACK:
            is_second = byte in SIGNALS and time.monotonic() > first_s + AT_ONCE_S
        first_s = time.monotonic()
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    uninterrupted.is_ending.set()
    while not is_second and (left_s := first_s + GRACE_S - time.monotonic()) > 0:
        if not select.select([reading], [], [], left_s)[0]:
            break
        [byte] = os.read(reading, 1)
        is_second = byte in SIGNALS and time.monotonic() > first_s + AT_ONCE_S
        if byte == _CLEANED_UP or is_second:
            break
    said = SHOW_CURSOR if os.isatty(stderr) else b""
    with contextlib.suppress(Exception):
        lines = [f"{line}\n" for advice in _ADVICE if (line := advice())]
        said += "".join(lines).encode(errors="backslashreplace")
    _say(stderr, said + b"interrupted\n")
    os._exit(128 + number)


def _wait_for_signal(reading: int, stderr: int) -> int:
    """The number of the signal that ends the process, as soon as it has come."""
    postponed_s = -AT_ONCE_S
    while True:
        if (number := os.read(reading, 1)[0]) not in SIGNALS:
            continue
        with _POSTPONED_LOCK:
            if not _POSTPONED:
                return number
            if _POSTPONED[-1] is None:
                _POSTPONED[-1], postponed_s = number, time.monotonic()
                said = b"finishing this step first; interrupt again to end at once\n"
                _say(stderr, b"\n" * os.isatty(stderr) + said)
            elif time.monotonic() > postponed_s + AT_ONCE_S:
                return number


def _say(stderr: int, message: bytes) -> None:
    """Writes to standard error, unless it is a full pipe that nobody reads, or closed."""
    with contextlib.suppress(OSError):
        if select.select([], [stderr], [], AT_ONCE_S)[1]:
            os.write(stderr, message)


def _clean_up(writing: int) -> None:
    """Calls the functions of `called_at_end` when a signal has come."""
    uninterrupted.is_ending.wait()
    uninterrupted.finish()
    for remove in reversed(_AT_END):
        with contextlib.suppress(Exception):
            remove()
    os.write(writing, bytes([_CLEANED_UP]))
