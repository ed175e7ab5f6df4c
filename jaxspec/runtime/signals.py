"""How a command ends when it is interrupted, and when its output is no longer read.

SIGINT (Ctrl-C) and SIGTERM end the process at once, unless they come in a block of `raised`, where
there may be something to clean up. There they raise `Interrupted` in the main thread, so that files
are finished or removed on the way out. That needs more than a handler:

- An exception that comes in the middle of an import may be wrapped by an extension module, or leave
  a module half made; one that comes in a destructor or a callback is printed and forgotten by
  Python. So the handler waits for imports, and for functions that are `uninterrupted`; swallowed
  exceptions are raised again; and whatever an interrupted process finally raises, it ends as
  interrupted (`interruption`).
- Python calls no handler while the main thread is in compiled code. So a thread that the signals
  wake ends the process at the second signal, or `GRACE_S` after the first, and itself calls the
  functions of `called_at_end`.
- XLA continues compiling in its own threads, which crash when the exiting interpreter destroys
  their client. So an interrupted process ends without that (`os._exit`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 8.0  # to clean up after a signal; containers are killed 10 s after SIGTERM
AT_ONCE_S = 0.2  # signals so close together are one: `timeout` sends two
WAIT_S = 0.02  # between two checks whether the main thread may be interrupted
BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it

_IMPORTING = "<frozen importlib._bootstrap>"
_UNINTERRUPTED: set[CodeType] = set()
_AT_END: list[Callable[[], object]] = []
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end.

    Attributes:
      status: exit status, 128 plus the signal's number, as in shells: 130 after Ctrl-C, 143 after
        SIGTERM.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class _State:
    """State of this process: the first signal that came, and whether signals raise."""

    number: int | None = None
    is_raised = False


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and ends the process with the status that it returns. Call it in the main thread.

    `main` returns the status of an `Interrupted` that it catches, and `BROKEN_PIPE_STATUS` after a
    `BrokenPipeError`.
    """
    _handle_signals()
    status = main()
    if status == BROKEN_PIPE_STATUS or interruption() is not None:
        _call_at_end()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """A block in which the signals that `exit_with` handles raise `Interrupted`."""
    _State.is_raised = True
    try:
        yield
    finally:
        _State.is_raised = False


def interruption() -> Interrupted | None:
    """The signal that this process got, as an exception; None before one came."""
    return None if _State.number is None else Interrupted(_State.number)


def uninterrupted(function: _Function) -> _Function:
    """Decorates a short function: a signal that comes while it runs raises after it."""
    _UNINTERRUPTED.add(function.__code__)
    return function


@contextlib.contextmanager
def called_at_end(remove: Callable[[], object]) -> Iterator[None]:
    """A block after which `remove` is called, perhaps twice, even if the process has to be ended
    within the block. In that case it may run in another thread, and its errors are ignored."""
    _AT_END.append(remove)
    try:
        yield
    finally:
        try:
            remove()
        finally:
            _AT_END.remove(remove)


def _handle_signals() -> None:
    """Handles the signals, except those that the parent process made us ignore (`nohup`, a shell's
    background jobs)."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGALRM, _raise)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    sys.unraisablehook = functools.partial(_raise_again, sys.unraisablehook)
    threading.Thread(target=_end_in_time, args=(reading,), daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises for the first signal; later ones do not disturb the clean-up, but `_end_in_time` sees
    them."""
    if _State.number is not None:
        return
    _State.number = number
    if not _State.is_raised:
        _end(number)
    # Threads of libraries (Orbax's) fail and print errors when their files are removed.
    logging.disable()
    threading.excepthook = lambda _: None
    _raise(number, frame)


def _raise(_: int, frame: FrameType | None) -> None:
    """Raises `Interrupted`, or makes SIGALRM call this again soon."""
    if _State.number is None or not _State.is_raised:
        return
    if _may_be_interrupted(frame):
        raise Interrupted(_State.number)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)


def _may_be_interrupted(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _UNINTERRUPTED or frame.f_code.co_filename == _IMPORTING:
            return False
        frame = frame.f_back
    return True


@uninterrupted
def _raise_again(print_error: Callable[[Any], None], unraisable: Any) -> None:
    """`sys.unraisablehook`: what a destructor or callback raised is printed, unless it is ours."""
    error = unraisable.exc_value
    while error is not None:
        if isinstance(error, Interrupted):
            signal.setitimer(signal.ITIMER_REAL, WAIT_S)
            return
        error = error.__cause__ or error.__context__
    print_error(unraisable)


def _end_in_time(reading: int) -> NoReturn:
    """Ends the process at the second signal, or `GRACE_S` after the first."""
    number = _wait_for_signal(reading, None)
    assert number is not None
    time.sleep(AT_ONCE_S)
    with contextlib.suppress(BlockingIOError):
        os.read(reading, 1024)
    _wait_for_signal(reading, GRACE_S)
    _end(number)


def _wait_for_signal(reading: int, limit_s: float | None) -> int | None:
    """The number of the next of `SIGNALS`, None after `limit_s`. SIGALRM arrives here too."""
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    while True:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not select.select([reading], [], [], left_s)[0]:
            return None
        [number] = os.read(reading, 1)
        if number in SIGNALS:
            return number


def _call_at_end() -> None:
    for remove in reversed(tuple(_AT_END)):
        with contextlib.suppress(Exception):
            remove()


def _end(number: int) -> NoReturn:
    _call_at_end()
    with contextlib.suppress(OSError):
        cursor = SHOW_CURSOR if os.isatty(2) else b""
        os.write(2, cursor + b"interrupted\n")
    os._exit(128 + number)
