"""The console of commands."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """rich's, except that a closed pipe raises `BrokenPipeError`, as `print` does; rich would end
    the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Raises the error again."""
        raise BrokenPipeError
