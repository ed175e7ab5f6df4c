"""Steps that all tasks of an event loop wait for together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from jaxspec.errors import RequestError


class SharedSteps:
    """Steps on another thread, for the streams of one event loop at a time.

    Args:
      step: a function that may be called on any thread.
    """

    def __init__(self, step: Callable[[], None]):
        self._step = step
        self._lock = threading.Lock()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._num_streams = 0
        self._running: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def for_stream(self) -> Iterator[None]:
        """While a stream lasts, lets the running event loop call `wait_for_step`.

        Raises:
          RequestError: another event loop has streams that have not ended.
        """
        event_loop = asyncio.get_running_loop()
        with self._lock:
            if self._event_loop is not event_loop:
                other = self._event_loop
                if self._num_streams and other is not None and not other.is_closed():
                    raise RequestError(
                        "A stream was started in one event loop while another event loop streams "
                        "from the same engine; keep to one event loop per engine."
                    )
                self._event_loop, self._num_streams, self._running = event_loop, 0, None
            self._num_streams += 1
        try:
            yield
        finally:
            with self._lock:
                if self._event_loop is event_loop:
                    self._num_streams -= 1

    async def wait_for_step(self) -> None:
        """Waits for a step, which all waiting tasks share."""
        if self._running is None or self._running.done():
            event_loop = asyncio.get_running_loop()
            self._running = event_loop.run_in_executor(None, self._step)
        await asyncio.shield(self._running)
