"""Where the time of a run goes.

Two kinds of measurement, kept apart. *Inside the run*: every compiled call of the engine is waited
for and timed, so the rest of the wall time is the host's. *Separately*: the stages of a round
(draft, target, verify, commit), a realignment and a change of rows are compiled one by one and
timed on a state from the middle of the run; the run's counters say how often each was done. The
part of the rounds that they do not explain is shown as the rest, and is negative if a stage is
cheaper inside the loop.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import layouts
from jaxspec.decode.state import put_rows, take_rows
from jaxspec.engine.engine import Engine
from jaxspec.engine.executor import Executor
from jaxspec.lab.bench.measure import Repeated
from jaxspec.lab.bench.stages import round_stages
from jaxspec.requests.requests import Request
from jaxspec.runtime.turns import time_loops
from jaxspec.types import DecodeState

NUM_ROUNDS_IN = 4  # rounds decoded before the stages are timed
NUM_REPEATS = 3


@dataclasses.dataclass
class Clock:
    """The times of the compiled calls of a run.

    Attributes:
      seconds: by kind of call, `rounds` or `prefill`.
      own_s: seconds that the clock itself took, which are subtracted from the run's.
      middle: a copy of the state when most rows were running for the first time.
    """

    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    own_s: float = 0.0
    middle: DecodeState | None = None


@contextlib.contextmanager
def clocked(executor: Executor) -> Iterator[Clock]:
    """Times every compiled call of an executor, waiting for each, and keeps a state."""
    clock = Clock()
    kinds = {"run": "rounds", "prefill": "prefill", "admit": "prefill"}
    own = {name: executor.programs[name] for name in kinds}
    most_running = 0

    def timed(function: Callable[..., DecodeState], kind: str) -> Callable[..., DecodeState]:
        def call(params: Any, state: DecodeState, *args: Any) -> DecodeState:
            nonlocal most_running
            jax.block_until_ready(state)
            called_s = time.perf_counter()
            if kind == "rounds":
                num_running = int(jnp.sum(state.is_running))
                if num_running > most_running:
                    copied = jax.block_until_ready(jax.tree.map(jnp.copy, state))
                    most_running, clock.middle = num_running, copied
            started_s = time.perf_counter()
            clock.own_s += started_s - called_s
            result = jax.block_until_ready(function(params, state, *args))
            clock.seconds[kind] += time.perf_counter() - started_s
            return result

        return call

    executor.programs |= {name: timed(own[name], kind) for name, kind in kinds.items()}
    try:
        yield clock
    finally:
        executor.programs |= own


def break_down(engine: Engine, requests: Sequence[Request], *, num_rounds: int) -> dict[str, Any]:
    """Where the time of one run goes: `wall_s`, the seconds of each part alone (`part_s`), and
    `seconds` of the run by part.

    Args:
      engine: an idle engine with compiled programs.
      requests: to run.
      num_rounds: number of rounds that they take.
    """
    before = int(engine.executor.state.schedule.num_realignments)
    started_s = time.perf_counter()
    with clocked(engine.executor) as clock:
        list(engine.run(requests))
    wall_s = time.perf_counter() - started_s - clock.own_s
    num_realignments = int(engine.executor.state.schedule.num_realignments) - before
    assert clock.middle is not None
    parts = time_parts(engine.executor, clock.middle)
    num_regroupings = {
        "static": 0,
        "pool": num_rounds,
        "continuous": len(requests),  # at most: rows that end together are replaced together
    }[engine.scheduler.name]
    seconds = {
        "draft": num_rounds * parts.get("draft", 0.0),
        "verify": num_rounds * (parts["target"] + parts.get("verify", 0.0)),
        "align": num_realignments * parts["align"],
        "regroup": num_regroupings * parts["regroup"],
    }
    in_rounds = clock.seconds["rounds"] - sum(seconds.values())
    return {
        "wall_s": wall_s,
        "part_s": parts,
        "num_regroupings": num_regroupings,
        "seconds": {
            **seconds,
            "rest of the rounds": in_rounds,
            "prefill": clock.seconds["prefill"],
            "host": wall_s - sum(clock.seconds.values()),
        },
    }


def time_parts(executor: Executor, state: DecodeState) -> dict[str, float]:
    """Seconds of one call of each part of a round, alone, on the rows that a round would take.

    Args:
      executor: the executor whose parts these are.
      state: one from the middle of a run; it is donated.

    Returns:
      `draft`, `target` (forward pass and head), `verify` and `commit` of a round (plain decoding
      has `target` only); `align`, a realignment after rows have emitted different numbers of tokens
      (0 in the ragged layout); `regroup`, choosing rows, and taking and putting back per-row state
      (0 if every row is in the batch).
    """
    own, shape = executor.parts, executor.shape
    run = executor.programs["run"]
    state = run(executor.params, state, np.int32(NUM_ROUNDS_IN), np.int32(1))
    parts: dict[str, Repeated] = {}
    view = state
    if executor.num_rows > shape.batch_size:

        def regroup(_, nothing: tuple, state: DecodeState) -> tuple[DecodeState, jax.Array]:
            rows = own.scheduler.choose(state, shape.batch_size)
            state = put_rows(state, rows, take_rows(state, rows))
            return state, rows  # something to wait for

        parts["regroup"] = Repeated(regroup, (), (), jax.tree.map(jnp.copy, state))
        rows = own.scheduler.choose(state, shape.batch_size)
        view = take_rows(state, rows)
    if own.layout == "aligned":
        parts["align"] = _alignment(executor, view)
    stages = round_stages(own, view)
    parts |= {name: stage for name, stage in stages.items() if name != "round"}
    turns = time_loops(parts, NUM_REPEATS)
    seconds = {name: turns.median_s(name) for name in parts}
    if "align" in seconds:
        seconds["align"] /= 2  # there and back
    return {"regroup": 0.0, "align": 0.0} | seconds


def _alignment(executor: Executor, view: DecodeState) -> Repeated:
    """Realigning rows that have emitted 1, 2, ... tokens in turn, and undoing it."""
    shape = executor.shape
    align = functools.partial(
        layouts.align, max_length=shape.max_length, verify_length=shape.verify_length
    )
    before = view.num_committed
    after = before + 1 + jnp.arange(shape.batch_size, dtype=jnp.int32) % shape.verify_length

    def there_and_back(_, lengths: Any, state: DecodeState) -> tuple[DecodeState, jax.Array]:
        for num_committed in lengths:
            state = align(state.replace(num_committed=num_committed))
        return state, layouts.paddings(state)  # something to wait for

    moving = jax.tree.map(jnp.copy, view)
    return Repeated(there_and_back, (), (after, before), moving)
