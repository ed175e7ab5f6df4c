"""The most rows that fit a memory budget, for models that are loaded.

The models, the length of a row and the length of a draft are what the caller needs. Rows are what
is left to choose, and more of them are not slower, so no prediction of speed is wanted here.
`analysis.planner` chooses the other settings too, by such a prediction.
"""

from __future__ import annotations

import bisect
import dataclasses

import jax

from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.settings import check_at_least_one
from jaxspec.decode.sharded import ShardedLoop
from jaxspec.engine.memory import in_units, measure_parts
from jaxspec.engine.plan import PlanBytes, compile_programs
from jaxspec.errors import SettingError


def fit_rows(
    loop: DecodeLoop, budget_bytes: int, *, mesh: jax.sharding.Mesh | None = None
) -> DecodeLoop:
    """The loop with as many rows, up to its own number, as weights, state and programs leave room
    for.

    Weights and state are counted exactly, without allocating anything. Programs are compiled to
    learn their temporaries: with the most rows that the others would leave room for, and with fewer
    until all of it fits.

    Args:
      loop: of one data shard.
      budget_bytes: per device.
      mesh: that the engine will have.

    Raises:
      SettingError: one row does not fit; the message has the smallest budget.
    """
    check_at_least_one(budget_bytes=budget_bytes)

    def with_rows(num_rows: int) -> DecodeLoop:
        return dataclasses.replace(loop, shape=dataclasses.replace(loop.shape, batch_size=num_rows))

    def on_devices(num_rows: int) -> DecodeLoop | ShardedLoop:
        fewer = with_rows(num_rows)
        return fewer if mesh is None else ShardedLoop(loop=fewer, mesh=mesh)

    def is_too_many(num_rows: int) -> bool:
        parts = measure_parts(on_devices(num_rows))
        return parts.weights_bytes + parts.state_bytes > budget_bytes

    num_rows = bisect.bisect_left(range(1, loop.shape.batch_size + 1), True, key=is_too_many)
    while num_rows > 0:
        found = bytes_of(on_devices(num_rows))
        if found.total_bytes <= budget_bytes:
            return with_rows(num_rows)
        # All but the weights grows with the rows, so it can be shared out among them.
        left = budget_bytes - found.parts.weights_bytes
        num_rows = min(num_rows - 1, int(num_rows * left / found.generation_bytes))
    least = bytes_of(on_devices(1))
    raise SettingError(
        f"A budget of {in_units(budget_bytes)} ({budget_bytes} bytes) was given, and one row needs "
        f"{in_units(least.total_bytes)} ({least.total_bytes} bytes), of which "
        f"{in_units(least.parts.weights_bytes)} are weights; raise the budget, lower the "
        "max_length, or see what `jaxspec plan` proposes."
    )


def bytes_of(loop: DecodeLoop | ShardedLoop) -> PlanBytes:
    """What an engine with this loop takes, per device; its programs are compiled for that."""
    added_bytes = max(each.added_bytes for each in compile_programs(loop))
    return PlanBytes.of_programs(measure_parts(loop), added_bytes, "compiled")
