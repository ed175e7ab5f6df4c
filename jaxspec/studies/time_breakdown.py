"""Where the time of a run goes.

Two kinds of measurement, kept apart. *Inside the run*: every compiled call of the engine is waited
for and timed, so what remains of the wall time is the host's. *Beside it*: the stages of a round
(draft, target, verify, commit), a realignment and a change of rows are compiled one by one and
timed on a state from the middle of the run; how often each was done is known from the run's
counters. What they do not explain of the rounds is shown as the rest, and is negative where a stage
is cheaper inside the loop.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.roofline import time_in_turns
from jaxspec.bench.stages import Repeated, plain_stages, speculative_stages
from jaxspec.cache import layouts
from jaxspec.decode.loop import SpeculativeLoop, put_rows, rows_axis, take_rows
from jaxspec.decode.plain import PlainLoop
from jaxspec.engine.engine import Engine
from jaxspec.types import DecodeState

NUM_ROUNDS_IN = 4  # rounds decoded before the stages are timed
NUM_REPEATS = 3


@dataclasses.dataclass
class Clock:
    """What the compiled calls of a run took.

    Attributes:
      seconds: by kind of call, `rounds` or `prefill`.
      own_s: seconds that the clock itself took, to be left out of the run's.
      middle: a copy of the state when most rows were running for the first time.
    """

    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    own_s: float = 0.0
    middle: DecodeState | None = None


@contextlib.contextmanager
def clocked(engine: Engine) -> Iterator[Clock]:
    """Times every compiled call of an engine, waiting for each; and keeps a state."""
    clock = Clock()
    kinds = {"run": "rounds", "prefill": "prefill", "admit": "prefill"}
    programs = engine.executor.programs
    own = {name: programs[name] for name in kinds}
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

    for name, kind in kinds.items():
        programs[name] = timed(own[name], kind)
    try:
        yield clock
    finally:
        programs.update(own)


def time_parts(engine: Engine, state: DecodeState) -> dict[str, float]:
    """Seconds of one call of each part of a round, alone, on the rows that would be seated.

    Args:
      engine: whose parts they are.
      state: from the middle of a run; it is used up.

    Returns:
      `draft`, `target` (forward pass and head), `verify` and `commit` of a round (plain decoding
      has `target` only); `align`, a realignment after rows have emitted different numbers of
      tokens (0 in the ragged layout); `seat`, choosing rows, and taking and putting back what is
      kept per row (0 where every row has a row).
    """
    loop, shape = engine.executor.loop, engine.shape
    assert isinstance(loop, SpeculativeLoop | PlainLoop), "the parts of one device's loop"
    engine.executor.state = state
    engine.executor.run(NUM_ROUNDS_IN)
    state = engine.executor.state
    engine.executor.reset()
    parts: dict[str, Repeated] = {}
    view = state
    if engine.num_residents > shape.batch_size:
        is_per_row = rows_axis(loop.empty, shape, engine.num_residents)

        def seat(_, nothing: tuple, state: DecodeState) -> tuple[DecodeState, jax.Array]:
            rows = engine.scheduler.choose(state, shape.batch_size)
            state = put_rows(state, rows, take_rows(state, rows, is_per_row), is_per_row)
            return state, rows  # something to wait for

        parts["seat"] = Repeated(seat, (), (), jax.tree.map(jnp.copy, state))
        rows = engine.scheduler.choose(state, shape.batch_size)
        view = take_rows(state, rows, is_per_row)
    if engine.layout == "aligned":
        parts["align"] = _alignment(engine, view)
    if isinstance(loop, SpeculativeLoop):
        stages = speculative_stages(loop, view)
    else:
        stages = plain_stages(loop, view)
    parts |= {name: stage for name, stage in stages.items() if name != "round"}
    times = time_in_turns(list(parts.values()), NUM_REPEATS)
    seconds = {name: statistics.median(each) for name, each in zip(parts, times, strict=True)}
    if "align" in seconds:
        seconds["align"] /= 2  # there and back
    return {"seat": 0.0, "align": 0.0} | seconds


def _alignment(engine: Engine, view: DecodeState) -> Repeated:
    """Realigning rows that have emitted 1, 2, ... tokens in turn, and undoing it."""
    shape = engine.shape
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
