"""Timing programs against each other in alternation: A B A B.

A slow moment of the machine then falls on all of them, and a speed-up is the median of the ratios
of neighbouring runs instead of the ratio of two times that were measured minutes apart.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

LOOP_S = 0.05  # shortest time that one timed call of a loop should take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns(Generic[K]):
    """The results of alternating runs.

    Attributes:
      seconds: those of every turn, by contender.
      results: what each contender returned in its last turn.
    """

    seconds: dict[K, list[float]]
    results: dict[K, Any]

    def median_s(self, name: K) -> float:
        """Median seconds of a contender."""
        return statistics.median(self.seconds[name])

    def ratios(self, name: K, *, over: K) -> list[float]:
        """How many times as fast as `over` the contender was, turn by turn."""
        pairs = zip(self.seconds[over], self.seconds[name], strict=True)
        return [theirs / own for theirs, own in pairs]

    def speedup(self, name: K, *, over: K) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios(name, over=over))


def take_turns(
    contenders: Mapping[K, Callable[[], Any]],
    repeats: int,
    *,
    num_warm_ups: int = 0,
    prepare: Callable[[K], None] | None = None,
    on_turn: Callable[[K, int], None] | None = None,
) -> Turns[K]:
    """Runs each contender once per turn, in the same order in every turn.

    Args:
      contenders: the functions to time. Each must wait for its own result.
      repeats: number of timed turns.
      num_warm_ups: number of turns before them, whose times are dropped (the first call compiles).
      prepare: called before each run, not timed.
      on_turn: called before each run with the contender and the turn, counted from 1 (0 and less
        are warm-ups), for progress.
    """
    seconds: dict[K, list[float]] = {name: [] for name in contenders}
    results: dict[K, Any] = {}
    for turn in range(1 - num_warm_ups, repeats + 1):
        for name, run in contenders.items():
            if on_turn is not None:
                on_turn(name, turn)
            if prepare is not None:
                prepare(name)
            started_s = time.perf_counter()
            results[name] = run()
            elapsed_s = time.perf_counter() - started_s
            if turn > 0:
                seconds[name].append(elapsed_s)
    return Turns(seconds=seconds, results=results)


def time_loops(loops: Mapping[K, Callable[[int], None]], repeats: int) -> Turns[K]:
    """Seconds per iteration of each of `loops`, in turns.

    `loop(n)` runs n iterations and waits for them. Each timed call runs enough iterations to take
    about `LOOP_S`.
    """
    num_times = {name: _num_times(loop) for name, loop in loops.items()}
    calls = {name: functools.partial(loop, num_times[name]) for name, loop in loops.items()}
    turns = take_turns(calls, repeats)
    each = {name: [s / num_times[name] for s in found] for name, found in turns.seconds.items()}
    return Turns(seconds=each, results={})


def _num_times(loop: Callable[[int], None]) -> int:
    loop(1)  # compiles

    def timed(n: int) -> float:
        started_s = time.perf_counter()
        loop(n)
        return time.perf_counter() - started_s

    one_s = min(timed(1), timed(2) / 2)
    return max(2, min(4096, round(LOOP_S / max(one_s, 1e-7))))
