"""A server in a thread of the test's process, and requests to it."""

from __future__ import annotations

import contextlib
import threading
import time

from jaxspec.serving.http.listener import Server, open_listener
from jaxspec.serving.http.service import ServerSettings, Service

MODEL = "served"


@contextlib.contextmanager
def served(engine, **settings):
    """A server over an engine: its address, and the server."""
    service = Service(engine, ServerSettings(served_model_name=MODEL, **settings))
    listener = open_listener("127.0.0.1", 0)
    server, ready = Server(service, listener), threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,))
    thread.start()
    try:
        while not ready.wait(0.1):
            assert thread.is_alive()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.drain()
        thread.join(60)
        assert not thread.is_alive()


def until(holds, limit_s: float = 20.0) -> bool:
    """Whether a condition holds in time."""
    end_s = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.01)
    return holds()
