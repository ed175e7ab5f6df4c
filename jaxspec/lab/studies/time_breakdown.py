"""Where the time of a run goes.

The stages of a round (draft, target, verify, commit), a realignment and a change of rows are
compiled one by one and timed on rows in mid-decode. The run's counters say how often each was done;
what they do not explain of its wall time (prefill, the host, what is fused inside the loop) is the
rest, which is negative if a stage is cheaper inside the loop.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import layouts
from jaxspec.decode.state import put_rows, take_rows
from jaxspec.engine.engine import Engine
from jaxspec.engine.executor import Executor
from jaxspec.lab.bench.measure import Repeated, fill
from jaxspec.lab.bench.stages import round_stages
from jaxspec.requests.requests import Request
from jaxspec.runtime.turns import time_loops
from jaxspec.types import DecodeState

NUM_ROUNDS_IN = 4  # rounds decoded before the stages are timed
NUM_REPEATS = 3


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
    list(engine.run(requests))
    wall_s = time.perf_counter() - started_s
    num_realignments = int(engine.executor.state.schedule.num_realignments) - before
    prompts = [request.prompt_token_ids for request in requests]
    draft_length = engine.shape.verify_length - 1
    fill(engine.executor, prompts, requests[0].params, draft_length=draft_length)
    engine.executor.run(NUM_ROUNDS_IN)
    parts = time_parts(engine.executor, engine.executor.state)
    engine.reset()
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
    return {
        "wall_s": wall_s,
        "part_s": parts,
        "num_regroupings": num_regroupings,
        "seconds": seconds | {"rest": wall_s - sum(seconds.values())},
    }


def time_parts(executor: Executor, state: DecodeState) -> dict[str, float]:
    """Seconds of one call of each part of a round, alone, on the rows that a round would take.

    Args:
      executor: the executor whose parts these are.
      state: of rows in mid-decode; it is copied.

    Returns:
      `draft`, `target` (forward pass and head), `verify` and `commit` of a round (plain decoding
      has `target` only); `align`, a realignment after rows have emitted different numbers of tokens
      (0 in the ragged layout); `regroup`, choosing rows, and taking and putting back per-row state
      (0 if every row is in the batch).
    """
    parts, shape = executor.parts, executor.shape
    stages: dict[str, Repeated] = {}
    view = state
    if executor.num_rows > shape.batch_size:

        def regroup(_, nothing: tuple, state: DecodeState) -> tuple[DecodeState, jax.Array]:
            rows = own.scheduler.choose(state, shape.batch_size)
            state = put_rows(state, rows, take_rows(state, rows))
            return state, rows  # something to wait for

        stages["regroup"] = Repeated(regroup, (), (), jax.tree.map(jnp.copy, state))
        rows = parts.scheduler.choose(state, shape.batch_size)
        view = take_rows(state, rows)
    if parts.layout == "aligned":
        stages["align"] = _alignment(executor, view)
    stages |= round_stages(parts, view)
    del stages["round"]
    turns = time_loops(stages, NUM_REPEATS)
    seconds = {name: turns.median_s(name) for name in stages}
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
