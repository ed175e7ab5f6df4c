"""How a command ends when it is interrupted, and when its output is no longer read.

SIGINT (Ctrl-C) and SIGTERM raise `Interrupted` in the main thread, so that files are finished or
removed on the way out. Two things need more than that:

- Python calls no handler while the main thread is in compiled code. So a thread that the signals
  wake ends the process at the second signal, and `GRACE_S` after the first.
- XLA goes on compiling in threads of its own, which crash when the interpreter takes their client
  away at its end. So an interrupted process ends without that (`os._exit`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 8.0  # to clean up after a signal; containers are killed 10 s after SIGTERM
AT_ONCE_S = 0.2  # signals so close together are one: `timeout` sends two
BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end.

    Attributes:
      status: exit status, 128 and the signal's number, as shells have it: 130 after Ctrl-C, 143
        after SIGTERM.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and ends the process with the status that it returns. Call it in the main thread.

    `main` returns the status of an `Interrupted` that it catches, and `BROKEN_PIPE_STATUS` after a
    `BrokenPipeError`.
    """
    _raise_on_signals()
    status = main()
    if status in (BROKEN_PIPE_STATUS, *(128 + number for number in SIGNALS)):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _raise_on_signals() -> None:
    """Lets the signals raise `Interrupted`, except those that the parent process has us ignore
    (`nohup`, a shell's background jobs)."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    threading.Thread(target=_end_in_time, args=(reading,), daemon=True).start()


def _interrupt(number: int, _) -> NoReturn:
    """Raises once; later signals do not disturb the cleaning up, and `_end_in_time` sees them."""
    for each in SIGNALS:
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, lambda *_: None)
    raise Interrupted(number)


def _end_in_time(reading: int) -> NoReturn:
    """Ends the process at the second signal, or `GRACE_S` after the first."""
    select.select([reading], [], [])
    [number] = os.read(reading, 1)
    time.sleep(AT_ONCE_S)
    with contextlib.suppress(BlockingIOError):
        os.read(reading, 1024)
    select.select([reading], [], [], GRACE_S)
    with contextlib.suppress(OSError):
        cursor = SHOW_CURSOR if os.isatty(2) else b""
        os.write(2, cursor + b"interrupted\n")
    os._exit(128 + number)
