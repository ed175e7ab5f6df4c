"""How commands show compilations: on a terminal, one line that is redrawn."""

from __future__ import annotations

import logging
import threading

from rich.markup import escape

from jaxspec.commands.progress import standard_error, working
from jaxspec.runtime import compilation

MAX_LINES = 10  # if output cannot be redrawn


def show_compiling() -> None:
    """Shows the compilations of this process that take over two seconds, on standard error."""
    logger = logging.getLogger(compilation.__name__)
    if any(isinstance(handler, CompilingLine) for handler in logger.handlers):
        return
    logger.addHandler(CompilingLine())
    logger.setLevel(logging.INFO)
    logger.propagate = False


class CompilingLine(logging.Handler):
    """A spinner that names what is being compiled and disappears when it is done; in a log file,
    the first `MAX_LINES` long compilations, one line each."""

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._status = working("")
        self._num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Draws a record of `jaxspec.runtime.compilation`."""
        message, is_start = record.getMessage(), getattr(record, "compiling", False)
        with self._lock:
            if standard_error().is_terminal:
                self._draw(message if is_start else None)
            elif is_start:
                self._print(message)

    def _draw(self, started: str | None) -> None:
        if started is not None:
            self._running.append(started)
        elif self._running:
            self._running.pop()
        self._status.stop()
        if self._running:
            self._status = working(escape(self._running[-1]))
            self._status.start()

    def _print(self, message: str) -> None:
        self._num_lines += 1
        more = " (later ones are not shown)" * (self._num_lines == MAX_LINES)
        if self._num_lines <= MAX_LINES:
            standard_error().print(message + more, markup=False, highlight=False, soft_wrap=True)
