"""Connections, and the life of a server: it starts, serves, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxspec.errors import SettingError
from jaxspec.runtime.values import shown
from jaxspec.serving.http.app import make_app
from jaxspec.serving.http.service import HttpError, ServerSettings, Service, response_of

BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that listens; with port 0 the system chooses one.

    Raises:
      SettingError: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError(
            f"--host {shown(host)} and --port {port} were given, where nothing can listen "
            f"({reason}); give another address."
        ) from error


class Connection(H11Protocol):
    """A connection whose client must send the head of a request in time, and take what it was sent
    in time; too many are refused."""

    settings: ServerSettings
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins, unless there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` as soon as anything is unsent
        if len(self.connections) > self.settings.max_connections:
            most = self.settings.max_connections
            error = HttpError(503, f"Over {most} connections are open; try again later.")
            body = bytes(response_of(error).body)
            head = "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            transport.write(head.encode() + body)
            transport.close()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Takes what the client sends."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not taken everything: if it does not in time, the connection is dropped,
        with what is buffered for it."""
        super().pause_writing()
        after_s = self.settings.write_timeout_s
        self._write_timer = self.loop.call_later(after_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken everything."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _await_head(self) -> None:
        if self._head_timer is None:
            after_s = self.settings.header_timeout_s
            self._head_timer = self.loop.call_later(after_s, self.transport.abort)


class Server:
    """One run of a server.

    Args:
      service: what it serves.
      listener: the socket.
    """

    def __init__(self, service: Service, listener: socket.socket):
        self.service, self.listener = service, listener
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._ending = threading.Event()
        self._drain: asyncio.Event | None = None
        self._driving = contextlib.ExitStack()  # the engine, once everything is compiled

    def drain(self) -> None:
        """Takes no more requests, and lets `run` return when those that run have ended. Any thread
        may call it."""
        self._ending.set()
        event_loop, drain = self._event_loop, self._drain
        if event_loop is not None and drain is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                event_loop.call_soon_threadsafe(drain.set)

    def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Serves until `drain` is called; `on_ready` is called when requests are taken. Raises what
        compiling raises."""
        with self._driving:
            asyncio.run(self._run(on_ready))

    async def _run(self, on_ready: Callable[[], object]) -> None:
        self._drain, self._event_loop = asyncio.Event(), asyncio.get_running_loop()
        if self._ending.is_set():
            return
        settings = self.service.settings
        config = uvicorn.Config(
            make_app(self.service),
            http=type("Connection", (Connection,), {"settings": settings}),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_timeout_s,  # pyright: ignore
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # pyright: ignore
        serving = asyncio.ensure_future(server.serve(sockets=[self.listener]))
        starting = asyncio.ensure_future(self._start(on_ready))
        draining = asyncio.ensure_future(self._drain.wait())
        try:
            waited = {serving, starting, draining}
            while not (serving.done() or draining.done()):
                done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if starting in done:
                    starting.result()
            await self.service.drain()
        finally:
            server.should_exit = True
            await serving
            for task in (starting, draining):
                task.cancel()
            await asyncio.gather(starting, draining, return_exceptions=True)

    async def _start(self, on_ready: Callable[[], object]) -> None:
        """Compiles everything in a thread that the end of the server does not wait for."""
        event_loop = asyncio.get_running_loop()
        compiled = event_loop.create_future()

        def finish(error: Exception | None) -> None:
            if not compiled.done():
                compiled.set_result(error)

        def warm_up() -> None:
            error = None
            try:
                self.service.prepare()
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the server has ended
                event_loop.call_soon_threadsafe(finish, error)

        threading.Thread(target=warm_up, daemon=True).start()
        if (error := await compiled) is not None:
            raise error
        if not self._ending.is_set():
            self._driving.enter_context(self.service.engine.driven())
            self.service.unavailable = None
            on_ready()
