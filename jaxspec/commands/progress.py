"""Live progress, on standard error: standard output is for results."""

from __future__ import annotations

import functools
import time

from rich.status import Status

from jaxspec.engine.engine import Engine, Progress
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


def tell(status: Status, message: str) -> None:
    """Shows progress in the line of `working`; away from a terminal, in a line of its own."""
    if standard_error().is_terminal:
        status.update(message)
    else:
        standard_error().print(message, markup=False, highlight=False, soft_wrap=True)


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


def decoding(seen: Progress, num_requests: int, elapsed_s: float) -> str:
    """The progress of `Engine.run`, in words."""
    text = f"decoding: {seen.num_finished} of {num_requests} done, {seen.num_emitted_tokens} tokens"
    text += f", {seen.num_emitted_tokens / elapsed_s:.0f} tokens/s"
    if seen.acceptance is not None:
        text += f", {seen.acceptance:.0%} of drafts accepted"
    if seen.time_left_s:
        text += f", at most {seen.time_left_s:.0f} s left"
    return text
