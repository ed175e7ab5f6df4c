"""A thread that owns an engine's steps, so that whoever wants output only waits for it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeAlias

from jaxspec.engine.queue import RequestQueue, StreamOutput, Ticket
from jaxspec.errors import RequestError
from jaxspec.types import Finish

_log = logging.getLogger(__name__)

Receive: TypeAlias = Callable[[StreamOutput], object]


class DeviceLock:
    """A reentrant lock. A thread that takes it again and again lets others have it in between by
    calling `let_others_in`; otherwise they might wait forever."""

    def __init__(self):
        self._lock = threading.RLock()
        self._door = threading.Lock()  # held by the first of those who wait
        self._owner: int | None = None
        self._depth = 0

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def acquire(self, blocking: bool = True) -> bool:
        """Takes the lock; returns whether that succeeded, which it always does if `blocking`."""
        if not self._lock.acquire(blocking=False):
            if not blocking:
                return False
            with self._door:
                self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Gives it back."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()

    def let_others_in(self) -> None:
        """Waits until the first thread that waits for the lock has had it."""
        with self._door:
            pass

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_) -> None:
        self.release()


class Driver:
    """Steps while a request is unfinished, and sleeps otherwise: a new request, a cancellation, or
    any other change of the queue wakes it.

    Tickets are only touched by its thread; output leaves it as `StreamOutput`.

    Args:
      requests: the engine's queue.
      step: runs a step, and returns with the engine's lock free.
      fail: ends every request after a step that raised an error.
    """

    def __init__(
        self, requests: RequestQueue, *, step: Callable[[], None], fail: Callable[[], None]
    ):
        self._requests, self._step, self._fail = requests, step, fail
        # Streams that Python frees may cancel at any moment, and `put` may interrupt itself.
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        # For the same reason no lock guards these, whose single operations are atomic.
        self._receivers: dict[Ticket, Receive] = {}
        self._after_step: collections.deque[Callable[[], object]] = collections.deque()
        self._is_over = False
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="jaxspec-driver", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._requests.on_change = self.wake
        self._thread.start()
        self.wake()

    def end(self) -> None:
        """Cancels what is unfinished, waits for its end, and ends the thread."""
        self._is_ending = True
        self._requests.give_up(self._requests.unfinished)
        self.wake()
        self._thread.join()
        self._requests.on_change = lambda: None
        self._is_over = True
        if late := list(self._receivers):  # begun while the thread ended
            self._requests.give_up(late)
            self._step()
        self._deliver()

    def wake(self) -> None:
        """Tells the thread that something has changed."""
        self._changes.put(None)

    def _run(self) -> None:
        while not self._is_ending or self._requests.unfinished:
            self._changes.get()
            while self._requests.unfinished:
                while not self._changes.empty():
                    self._changes.get()
                try:
                    self._step()
                except Exception:
                    _log.exception("a step of the engine failed, and with it every request")
                    self._end_after_failure()
                self._deliver()
            self._deliver()

    def _end_after_failure(self) -> None:
        try:
            self._fail()
        except Exception:
            _log.exception("the engine cannot be emptied")
            self._requests.abandon(Finish.DEVICE_ERROR, "failed, and could not be emptied")

    def _deliver(self) -> None:
        """Gives all output to its receivers, and calls those who wait for a step."""
        for ticket, receive in list(self._receivers.items()):
            if ticket.has_output:
                for output in ticket.take_output():
                    with contextlib.suppress(RuntimeError):  # the event loop has been closed
                        receive(output)
                if ticket.completion is not None:  # the last output had it
                    self._receivers.pop(ticket, None)
        for _ in range(len(self._after_step)):
            with contextlib.suppress(RuntimeError):
                self._after_step.popleft()()

    # For callers, on other threads.

    @contextlib.contextmanager
    def receiving(self, ticket: Ticket, receive: Receive) -> Iterator[None]:
        """A block in which the driver's thread calls `receive` with each output of a ticket.

        Raises:
          RequestError: the driver has ended.
        """
        self._receivers[ticket] = receive
        try:
            if self._is_over:
                raise RequestError(
                    "A stream was begun after the end of engine.driven(); begin it within."
                )
            self.wake()  # there may be output already
            yield
        finally:
            self._receivers.pop(ticket, None)

    def stream(self, ticket: Ticket) -> Iterator[StreamOutput]:
        """The output of a ticket as it is emitted."""
        outputs: queue.SimpleQueue[StreamOutput] = queue.SimpleQueue()
        with self.receiving(ticket, outputs.put):
            is_done = False
            while not is_done:
                output = outputs.get()
                is_done = output.completion is not None
                yield output

    async def astream(self, ticket: Ticket) -> AsyncGenerator[StreamOutput, None]:
        """`stream` for the running event loop."""
        event_loop = asyncio.get_running_loop()
        ticket.event_loop = event_loop
        outputs: asyncio.Queue[StreamOutput] = asyncio.Queue()
        with self.receiving(
            ticket, lambda output: event_loop.call_soon_threadsafe(outputs.put_nowait, output)
        ):
            is_done = False
            while not is_done:
                output = await outputs.get()
                is_done = output.completion is not None
                yield output

    def wait_for_step(self, *, unless: Callable[[], bool]) -> None:
        """Waits for the end of a step, or of the driver, unless a condition holds already."""
        stepped = threading.Event()
        self._call_after_step(stepped.set)
        if not unless():
            stepped.wait()

    async def await_step(self) -> None:
        """`wait_for_step` for the running event loop."""
        event_loop, stepped = asyncio.get_running_loop(), asyncio.Event()
        self._call_after_step(lambda: event_loop.call_soon_threadsafe(stepped.set))
        await stepped.wait()

    def _call_after_step(self, call: Callable[[], object]) -> None:
        self._after_step.append(call)
        self.wake()  # perhaps no step will come
        if self._is_over:
            call()
