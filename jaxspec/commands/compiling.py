"""How commands show that something compiles: one line that is redrawn, on a terminal."""

from __future__ import annotations

import logging
import threading

from rich.markup import escape
from rich.status import Status

from jaxspec.commands.progress import standard_error
from jaxspec.runtime import compilation

MAX_LINES = 10  # where nothing can be redrawn


def show_compiling() -> None:
    """Shows the compilations of this process that take over two seconds, on standard error."""
    logger = logging.getLogger(compilation.__name__)
    if any(isinstance(handler, CompilingLine) for handler in logger.handlers):
        return
    logger.addHandler(CompilingLine())
    logger.setLevel(logging.INFO)
    logger.propagate = False


class CompilingLine(logging.Handler):
    """A spinner with what is being compiled, gone when it is; in a log file, the first `MAX_LINES`
    long compilations, one line each."""

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._status: Status | None = None
        self._num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Draws a record of `jaxspec.runtime.compilation`."""
        is_start = getattr(record, "compiling", False)
        with self._lock:
            if standard_error().is_terminal:
                self._draw(record, is_start)
            elif is_start:
                self._print(record)

    def _draw(self, record: logging.LogRecord, is_start: bool) -> None:
        if is_start:
            self._running.append(record.getMessage())
        elif self._running:
            self._running.pop()
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._running:
            self._status = standard_error().status(escape(self._running[-1]))
            self._status.start()

    def _print(self, record: logging.LogRecord) -> None:
        self._num_lines += 1
        if self._num_lines <= MAX_LINES:
            more = " (later ones are not shown)" if self._num_lines == MAX_LINES else ""
            standard_error().print(
                f"{record.getMessage()}{more}", markup=False, highlight=False, soft_wrap=True
            )
