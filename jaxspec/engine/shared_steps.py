"""Steps that all tasks of an event loop wait for together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from jaxspec.engine.queue import Ticket
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
        self._streams: set[Ticket] = set()
        self._running: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def for_stream(self, ticket: Ticket) -> Iterator[None]:
        """While the stream of a ticket lasts, lets the running event loop call `wait_for_step`.

        Raises:
          RequestError: another event loop has streams that have not ended.
        """
        event_loop = asyncio.get_running_loop()
        with self._lock:
            if self._event_loop is not event_loop:
                if any(other.given_up is None for other in self._streams):
                    raise RequestError(
                        "A stream was started in one event loop while another event loop streams "
                        "from the same engine; keep to one event loop per engine."
                    )
                self._event_loop, self._running = event_loop, None
                self._streams.clear()
            self._streams.add(ticket)
            ticket.event_loop = event_loop
        try:
            yield
        finally:
            with self._lock:
                self._streams.discard(ticket)

    async def wait_for_step(self) -> None:
        """Waits for a step, which all waiting tasks share."""
        if self._running is None or self._running.done():
            event_loop = asyncio.get_running_loop()
            self._running = event_loop.run_in_executor(None, self._step)
        await asyncio.shield(self._running)
