"""Where the time of a run goes.

The stages of a round (draft, target, verify, commit) and a realignment are compiled one by one and
timed on rows in mid-decode. The run's counters say how often each was done; what they do not
explain of its wall time (prefill, changes of rows, the host, what is fused inside the loop) is the
rest, which is negative if a stage is cheaper inside the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import layouts
from jaxspec.decode.state import take_rows
from jaxspec.engine.engine import Engine
from jaxspec.engine.executor import Executor
from jaxspec.lab.bench.measure import Repeated, fill
from jaxspec.lab.bench.stages import round_stages
from jaxspec.requests.requests import Request
from jaxspec.runtime.turns import time_loops
from jaxspec.types import DecodeState

NUM_ROUNDS_IN = 4  # rounds decoded before the stages are timed
NUM_REPEATS = 3


def break_down(
    engine: Engine, requests: Sequence[Request], *, schedule: Mapping[str, int], wall_s: float
) -> dict[str, Any]:
    """Where the time of a run goes.

    Args:
      engine: an idle engine with compiled programs.
      requests: of the run.
      schedule: the run's counters.
      wall_s: its seconds.

    Returns:
      `wall_s`; `part_s`, seconds of one call of `draft`, `target` (forward pass and head), `verify`
      and `commit` of a round (plain decoding has `target` only) and of `align`, a realignment after
      rows have emitted different numbers of tokens (0 in the ragged layout); and `seconds` of the
      run by part.
    """
    executor, parts, shape = engine.executor, engine.executor.parts, engine.shape
    prompts = [request.prompt_token_ids for request in requests]
    fill(executor, prompts, requests[0].params, draft_length=shape.verify_length - 1)
    executor.run(NUM_ROUNDS_IN)
    view = executor.state
    if executor.num_rows > shape.batch_size:
        view = take_rows(view, parts.scheduler.choose(view, shape.batch_size))
    stages = round_stages(parts, view)
    del stages["round"]
    if parts.layout == "aligned":
        stages["align"] = _alignment(executor, view)
    turns = time_loops(stages, NUM_REPEATS)
    part_s = {"align": 0.0} | {name: turns.median_s(name) for name in stages}
    part_s["align"] /= 2  # there and back
    engine.reset()
    num_rounds = schedule["num_rounds"]
    seconds = {
        "draft": num_rounds * part_s.get("draft", 0.0),
        "verify": num_rounds * (part_s["target"] + part_s.get("verify", 0.0)),
        "align": schedule["num_realignments"] * part_s["align"],
    }
    seconds["rest"] = wall_s - sum(seconds.values())
    return {"wall_s": wall_s, "part_s": part_s, "seconds": seconds}


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
