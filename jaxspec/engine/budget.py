"""The largest number of rows that fits a memory budget, for loaded models.

The caller fixes the models, the length of a row and the draft length. Only the number of rows is
left to choose, and more rows are never slower, so no prediction of speed is needed here.
`lab.plan.planner` also chooses the other settings, by predicted speed.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.sharded import ShardedLoop
from jaxspec.engine.memory import in_units, largest_that_fits, measure_memory, measure_parts
from jaxspec.engine.plan import PlanBytes, compile_programs
from jaxspec.errors import SettingError
from jaxspec.runtime.values import LARGEST_BYTES, whole_number


def fit_rows(
    parts: RoundParts, budget_bytes: int, *, mesh: jax.sharding.Mesh | None = None
) -> RoundParts:
    """The parts with as many rows as fit beside weights and programs, at most its own number, into
    the budget and into what is free.

    Weights and state are read off the parts, without allocating anything. Programs are compiled to
    find the size of their temporaries: first with as many rows as weights and state alone would
    allow, then with fewer, until it is known how many are the most.

    Args:
      parts: those of one data shard.
      budget_bytes: the budget per device.
      mesh: the engine's mesh, or None.

    Raises:
      SettingError: one row does not fit; the message gives the smallest budget that would. Or one
        row does not fit into the free memory.
    """
    budget_bytes = whole_number("budget_bytes", budget_bytes, least=1, most=LARGEST_BYTES)

    def with_rows(num_rows: int) -> RoundParts:
        shape = dataclasses.replace(parts.shape, batch_size=num_rows)
        return dataclasses.replace(parts, shape=shape)

    def on_devices(num_rows: int) -> DecodeLoop | ShardedLoop:
        fewer = with_rows(num_rows)
        return DecodeLoop(fewer) if mesh is None else ShardedLoop(parts=fewer, mesh=mesh)

    def state_bytes(num_rows: int) -> int:
        found = measure_parts(on_devices(num_rows))
        return found.weights_bytes + found.state_bytes

    # A budget may be larger than what is free; no program of so many rows is compiled.
    alone, limit = measure_memory(on_devices(1)), budget_bytes
    if alone.free_bytes is not None:
        limit = min(limit, alone.weights_bytes + alone.free_bytes)
    # The most rows that are known to fit, and the fewest that are known not to.
    most, too_many = 0, 1 + largest_that_fits(state_bytes, parts.shape.batch_size, limit)
    num_rows = too_many - 1
    while most < num_rows:
        found = bytes_of(on_devices(num_rows))
        if found.total_bytes <= limit:
            most = num_rows
        else:
            too_many = num_rows
        if too_many == 1:
            break
        # Next, as many as fit with these temporaries, of which fewer rows need no more.
        added_bytes = found.generation_bytes - found.parts.state_bytes
        num_rows = largest_that_fits(state_bytes, too_many - 1, limit - added_bytes)
        num_rows = min(max(num_rows, most + 1), too_many - 1)
    if most:
        return with_rows(most)
    least = bytes_of(on_devices(1))
    raise SettingError(
        f"A budget of {in_units(budget_bytes)} ({budget_bytes} bytes) was given, and one row needs "
        f"{in_units(least.total_bytes)} ({least.total_bytes} bytes), of which "
        f"{in_units(least.parts.weights_bytes)} are weights; raise the budget, lower the "
        "max_length, or see what `jaxspec plan` proposes."
    )


def bytes_of(loop: DecodeLoop | ShardedLoop) -> PlanBytes:
    """The bytes that an engine with this loop takes, per device; compiles its programs to find
    out."""
    added_bytes = max(each.added_bytes for each in compile_programs(loop))
    return PlanBytes.of_programs(measure_parts(loop), added_bytes, "compiled")
