"""Live progress, on standard error: standard output is for results."""

from __future__ import annotations

import functools
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.status import Status

from jaxspec.engine.engine import Engine
from jaxspec.engine.engine import Progress as EngineProgress
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.console import Console


@functools.cache
def standard_error() -> Console:
    """The console for everything that is redrawn; two consoles would draw over each other."""
    return Console(stderr=True)


def working(message: str) -> Status:
    """A spinner with `message`, for work of unknown length; drawn on a terminal only."""
    console = standard_error()
    return console.status(message, spinner="line" if console.options.ascii_only else "dots")


def warm_up(engine: Engine) -> float:
    """Compiles an engine's programs and runs them once; returns the seconds taken."""
    started_s = time.perf_counter()
    with working("compiling") as status:
        engine.warm_up(
            lambda program: status.update(
                f"compiling {program.number} of {program.num_programs}: {program.name}"
            )
        )
        engine.generate([[0, 0]], SamplingParams(max_tokens=1))
    return time.perf_counter() - started_s


class DecodingProgress:
    """A bar of finished prompts with tokens and tokens per second; drawn on a terminal only."""

    def __init__(self, num_requests: int):
        console = standard_error()
        self._bar = Progress(
            TextColumn("decoding"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("prompts"),
            TextColumn("[dim]{task.fields[detail]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_requests, detail="")
        self._started_s = time.perf_counter()

    def __enter__(self) -> DecodingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def update(self, seen: EngineProgress) -> None:
        """Draws the progress of `Engine.run`."""
        elapsed_s = time.perf_counter() - self._started_s
        detail = f"{seen.num_emitted_tokens} tokens, "
        detail += f"{seen.num_emitted_tokens / elapsed_s:.0f} tokens/s"
        if seen.acceptance is not None:
            detail += f", {seen.acceptance:.0%} of drafts accepted"
        if seen.time_left_s:
            detail += f", at most {seen.time_left_s:.0f} s left"
        self._bar.update(self._task, completed=seen.num_finished, detail=detail)
