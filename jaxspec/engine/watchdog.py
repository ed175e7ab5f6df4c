"""A time limit for steps, so that nothing waits forever for a device that does not answer."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

POLL_S = 0.1  # between two checks whether something is being compiled

T = TypeVar("T")


class StepTimeoutError(Exception):
    """A step that has not returned in time; it continues in its thread."""


class Watchdog:
    """Runs calls of the device in a thread that can be abandoned, as they cannot be interrupted.

    One caller at a time.

    Args:
      limit_s: seconds that a step may take, or a part of it between calls of `renew`.
      is_compiling: tells whether something is being compiled, which does not count.
    """

    def __init__(self, limit_s: float, is_compiling: Callable[[], bool]):
        self._limit_s = limit_s
        self._is_compiling = is_compiling
        self._last: concurrent.futures.Future[Any] | None = None
        self._is_renewed = False

    def run(self, step: Callable[[], T]) -> T:
        """Returns the step's result, or raises its error.

        Raises:
          StepTimeoutError: the step takes too long.
        """
        if self._last is not None:  # its caller may have been interrupted
            self._wait_for(self._last)
        self._last = done = concurrent.futures.Future()
        threading.Thread(target=set_result, args=(done, step), daemon=True).start()
        self._wait_for(done)
        return done.result()

    def renew(self) -> None:
        """Gives the running step its full time again. A step that waits for the device several
        times calls this when the device has answered."""
        self._is_renewed = True

    def _wait_for(self, done: concurrent.futures.Future[Any]) -> None:
        left_s, before_s = self._limit_s, time.monotonic()
        while left_s > 0:
            concurrent.futures.wait([done], timeout=min(left_s, POLL_S))
            if done.done():
                return
            now_s = time.monotonic()
            if self._is_renewed:
                self._is_renewed, left_s = False, self._limit_s
            elif not self._is_compiling():
                left_s -= now_s - before_s
            before_s = now_s
        raise StepTimeoutError


def set_result(done: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
    """Makes a call, and gives a future its result or its error."""
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)
