"""Live progress of decoding, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxspec import engine


class DecodingProgress:
    """A bar of finished prompts with tokens per second and emitted tokens per round.

    Args:
      console: decides whether anything is drawn (it must be a terminal).
      num_requests: prompts to decode.
    """

    def __init__(self, console: Console, num_requests: int):
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("prompts"),
            TimeRemainingColumn(compact=True),
            TextColumn("[dim]{task.fields[detail]}"),
            console=Console(stderr=True, force_terminal=console.is_terminal or None),
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("decoding", total=num_requests, detail="compiling")
        self._started: float | None = None
        self._earlier_tokens = 0

    def __enter__(self) -> DecodingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def describe(self, description: str) -> None:
        """Says what is being done; a new kind of run compiles first."""
        self._bar.update(self._task, description=description, detail="compiling")
        self._started, self._earlier_tokens = None, 0

    def batch_at(self, num_before: int) -> Callable[[engine.Progress], None]:
        """A callback for `Engine.run` on a batch that follows `num_before` finished prompts."""
        earlier, emitted = self._earlier_tokens, 0

        def show(seen: engine.Progress) -> None:
            nonlocal emitted
            if self._started is None:  # the first report ends the compilation
                self._started = time.perf_counter()
                self._uncounted = seen.num_emitted_tokens
            emitted = seen.num_emitted_tokens
            self._earlier_tokens = earlier + emitted
            elapsed_s = time.perf_counter() - self._started
            detail = f"{self._earlier_tokens} tokens"
            if elapsed_s > 0.2:
                rate = (self._earlier_tokens - self._uncounted) / elapsed_s
                detail += f", {rate:.0f} tokens/s"
            self._bar.update(
                self._task, completed=num_before + seen.num_finished, detail=detail
            )

        return show
