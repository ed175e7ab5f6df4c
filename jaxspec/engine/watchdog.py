"""A limit on the time of a step, so that a device that does not answer is not waited for."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable

POLL_S = 0.1  # between two looks at whether something is being compiled


class StepTimeoutError(Exception):
    """A step that has not returned in time; it goes on in its thread."""


class Watchdog:
    """Runs steps, each in a thread that can be given up: a call of the device cannot be ended.

    One caller at a time.

    Args:
      limit_s: seconds that a step may take.
      is_compiling: whether something is being compiled now, which does not count.
    """

    def __init__(self, limit_s: float, is_compiling: Callable[[], bool]):
        self._limit_s = limit_s
        self._is_compiling = is_compiling
        self._last: concurrent.futures.Future[None] | None = None

    def run(self, step: Callable[[], None]) -> None:
        """Returns when the step does, and raises what it raises.

        Raises:
          StepTimeoutError: it takes too long.
        """
        if self._last is not None:  # its caller may have been interrupted
            self._wait_for(self._last)
        self._last = done = concurrent.futures.Future()
        threading.Thread(target=_call, args=(step, done), daemon=True).start()
        self._wait_for(done)
        done.result()

    def _wait_for(self, done: concurrent.futures.Future[None]) -> None:
        left_s, before_s = self._limit_s, time.monotonic()
        while left_s > 0:
            concurrent.futures.wait([done], timeout=min(left_s, POLL_S))
            if done.done():
                return
            now_s = time.monotonic()
            left_s -= 0 if self._is_compiling() else now_s - before_s
            before_s = now_s
        raise StepTimeoutError


def _call(step: Callable[[], None], done: concurrent.futures.Future[None]) -> None:
    try:
        done.set_result(step())
    except BaseException as error:
        done.set_exception(error)
