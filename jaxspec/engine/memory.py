"""What an engine takes: weights and state, counted from shapes; its programs, as XLA compiled them;
and what fits into a budget or into the free memory.

Which settings are best for a budget is the choice of `lab.plan`, because it needs predicted speeds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import BLOCK, KVCache
from jaxspec.decode.buckets import may_skip_padding
from jaxspec.decode.loop import DecodeLoop, init
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.recorders import SCORED_TOGETHER
from jaxspec.decode.settings import home_of
from jaxspec.decode.sharded import ShardedLoop
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.errors import SettingError
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.compilation import shapes_at
from jaxspec.runtime.host_limits import free_memory
from jaxspec.runtime.values import LARGEST_BYTES, whole_number
from jaxspec.sampling import SMALLEST_PART, num_drawn_together
from jaxspec.types import PyTree

# fp32 arrays `[V]` that XLA allocates for a token besides its logits: where it is drawn (a copy of
# the logits, noise, penalties, filters), and where a verifier compares distributions and draws one
# token for the whole window. A test compares both with compiled rounds.
ARRAYS_PER_DRAW = 11
ARRAYS_PER_COMPARISON = 6

# A window of its KV is mentioned for a draft model in rows of this many slots, and where rounds
# would read this many times fewer bytes with it.
MENTIONED_WINDOW, LEAST_LENGTH, LEAST_GAIN = 512, 4096, 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What an engine keeps on the device between rounds, and the largest temporary of a round. With
    a mesh, all numbers are per device.

    Attributes:
      num_devices: number of devices that hold this much each.
      num_rows: number of resident rows; the devices of a `model` axis share them.
      max_length: slots of a row.
      weights_bytes: parameters of target and drafter.
      kv_bytes: KV caches of target and drafter, for all rows.
      buffers_bytes: tokens, log-probabilities and everything else kept per row.
      logits_bytes: what a round needs for its logits: these themselves, the distributions of
        drafts, and what tokens are drawn with; or what prompt log-probabilities need, if that is
        more. See `Parts.round_bytes`. A tree with many nodes makes them large; a round also needs
        other temporaries.
      free_bytes: bytes free on the device before the state is made; None if the device does not
        say. On a CPU, what the host, the process's cgroups and its limits (`ulimit`) allow.
      num_resident_tokens: tokens of finished turns whose KV is in a row at present, for the next
        turn of their session; only in `Engine.memory`.
      num_parked_tokens: tokens whose KV is on the host, for sessions and common prefixes.
      parked_bytes: the bytes of these on the host.
      num_reread_tokens: prompt tokens that sessions have had to prefill again so far.
    """

    num_devices: int
    num_rows: int
    max_length: int
    weights_bytes: int
    kv_bytes: int
    buffers_bytes: int
    logits_bytes: int
    free_bytes: int | None
    num_resident_tokens: int = 0
    num_parked_tokens: int = 0
    parked_bytes: int = 0
    num_reread_tokens: int = 0

    def __repr__(self) -> str:
        return f"<Memory: {self.sentence}>"

    @property
    def state_bytes(self) -> int:
        """KV and buffers."""
        return self.kv_bytes + self.buffers_bytes

    @property
    def needed_bytes(self) -> int:
        """The state, and the logits of a round."""
        return self.state_bytes + self.logits_bytes

    @property
    def sentence(self) -> str:
        """E.g. `weights 28.9 MiB, KV 20.0 MiB and buffers 0.1 MiB for 10 rows of 1024 slots`."""
        each = "" if self.num_devices == 1 else f", on each of {self.num_devices} devices"
        free = "" if self.free_bytes is None else f"; {in_units(self.free_bytes)} were free"
        if self.num_resident_tokens or self.num_parked_tokens:
            free += (
                f"; sessions have {self.num_resident_tokens} tokens in rows and "
                f"{self.num_parked_tokens} on the host ({in_units(self.parked_bytes)})"
            )
        return (
            f"weights {in_units(self.weights_bytes)}, KV {in_units(self.kv_bytes)} and buffers "
            f"{in_units(self.buffers_bytes)} for {self.num_rows} rows of {self.max_length} slots, "
            f"logits of a round {in_units(self.logits_bytes)}{each}{free}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Where the bytes of an engine go, per device, before anything runs. Temporaries of programs
    are additional.

    Attributes:
      target_weights_bytes: parameters of the target.
      draft_weights_bytes: parameters of the drafter.
      target_kv_bytes: KV of the target, for all resident rows.
      draft_kv_bytes: KV that the drafter keeps.
      buffers_bytes: tokens, log-probabilities and everything else kept per row.
      logits_bytes: fp32 logits of the tokens that a round scores, `[B, T, V]`.
      draft_probs_bytes: fp32 distributions that drafts were drawn from, `[B, N, V]`, if the
        verifier needs them.
      drawing_bytes: fp32 arrays `[V]` that tokens are drawn with: `ARRAYS_PER_DRAW` for each that
        is drawn at a time (`sampling.num_drawn_together`), or `ARRAYS_PER_COMPARISON` for each of
        the window where the verifier compares distributions.
      scoring_bytes: fp32 arrays `[V]` of the prompt tokens that are scored at a time, if the engine
        keeps log-probabilities: logits, and their order where likeliest ones are kept.
    """

    target_weights_bytes: int
    draft_weights_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int
    buffers_bytes: int
    logits_bytes: int
    draft_probs_bytes: int
    drawing_bytes: int
    scoring_bytes: int = 0

    @property
    def weights_bytes(self) -> int:
        """Parameters."""
        return self.target_weights_bytes + self.draft_weights_bytes

    @property
    def kv_bytes(self) -> int:
        """KV of target and drafter."""
        return self.target_kv_bytes + self.draft_kv_bytes

    @property
    def state_bytes(self) -> int:
        """KV and buffers."""
        return self.kv_bytes + self.buffers_bytes

    @property
    def round_bytes(self) -> int:
        """What a round needs for its logits, or the scoring of prompts if that needs more."""
        of_round = self.logits_bytes + self.draft_probs_bytes + self.drawing_bytes
        return max(of_round, self.scoring_bytes)


def measure_parts(loop: DecodeLoop | ShardedLoop) -> Parts:
    """Where the bytes of an engine with this loop go, from shapes, without allocating anything.

    Args:
      loop: a loop, whose parameters may be shapes.
    """
    of_shard = loop.parts
    shape = of_shard.shape
    state = jax.eval_shape(lambda: init(of_shard))
    params = loop.params
    if isinstance(loop, ShardedLoop):
        state, params = loop.state_of_device(state), loop.params_of_device()
    target_kv, draft_kv = (_cache_bytes(part) for part in (state.cache, state.drafter))
    of_token = shape.vocab_size * 4  # fp32
    return Parts(
        target_weights_bytes=num_bytes(params["target"]),
        draft_weights_bytes=num_bytes(params["drafter"]),
        target_kv_bytes=target_kv,
        draft_kv_bytes=draft_kv,
        buffers_bytes=num_bytes(state) - target_kv - draft_kv,
        logits_bytes=shape.batch_size * shape.verify_length * of_token,
        draft_probs_bytes=shape.needs_draft_probs * shape.batch_size * shape.num_nodes * of_token,
        drawing_bytes=_num_drawing_arrays(of_shard) * of_token,
        scoring_bytes=_num_scoring_arrays(of_shard) * of_token,
    )


def _num_drawing_arrays(parts: RoundParts) -> int:
    """Arrays `[V]` of `Parts.drawing_bytes`. A few rows may draw more tokens at a time than a few
    more rows do; here they do not, so that more rows never need fewer bytes."""
    num_rows, length = parts.shape.batch_size, parts.shape.verify_length
    if not parts.verifier.is_coupled:
        return ARRAYS_PER_COMPARISON * num_rows * length
    numbers = (*range(1, min(num_rows, SMALLEST_PART)), num_rows)
    on_host = parts.shape.loops_run_on_host
    return ARRAYS_PER_DRAW * max(
        each * num_drawn_together(each, length, loops_run_on_host=on_host) for each in numbers
    )


def _num_scoring_arrays(parts: RoundParts) -> int:
    """Arrays `[V]` of `Parts.scoring_bytes`."""
    if parts.logprobs is None:
        return 0
    return (1 + (parts.logprobs.num_top > 0)) * min(SCORED_TOGETHER, parts.shape.prefill_chunk)


def _cache_bytes(state: PyTree) -> int:
    """Bytes of the KV caches in a part of a state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KVCache))
    return num_bytes([node for node in nodes if isinstance(node, KVCache)])


def measure_memory(loop: DecodeLoop | ShardedLoop) -> Memory:
    """What an engine with this loop needs, computed from shapes without allocating anything.

    Raises:
      SettingError: the state and the logits of a round do not fit into the free memory. The message
        gives the largest batch_size and the largest max_length that would.
    """
    resident, parts = loop.parts.resident_shape, measure_parts(loop)
    if isinstance(loop, ShardedLoop):
        devices = loop.mesh.devices.flatten().tolist()
    else:
        devices = [_device(loop.params)]
    if devices[0].platform == "cpu":  # they share the host's memory
        num_free, where = free_memory()
        free = num_free // len(devices)
    else:
        each = [_free_bytes(device) for device in devices]
        free = min((count for count in each if count is not None), default=None)
        where = "on the device"
    memory = Memory(
        num_devices=len(devices),
        num_rows=resident.batch_size,
        max_length=resident.max_length,
        weights_bytes=parts.weights_bytes,
        kv_bytes=parts.kv_bytes,
        buffers_bytes=parts.buffers_bytes,
        logits_bytes=parts.round_bytes,
        free_bytes=free,
    )
    if memory.free_bytes is not None and memory.needed_bytes > memory.free_bytes:
        raise SettingError(_does_not_fit(loop, memory, where))
    return memory


def window_break_even(parts: RoundParts) -> float | None:
    """The bytes that a round of full rows would read if the draft model had a `kv_window` of
    `MENTIONED_WINDOW`, as a fraction of what it reads: where reading memory decides how long a
    round takes, the window pays if rounds emit more than this fraction of their tokens with it.

    None where that is not worth a mention (see `LEAST_LENGTH`), and where there is a window or no
    draft model.
    """
    drafter, shape = parts.drafter, parts.shape
    if not isinstance(drafter, DraftModel) or drafter.kv_window or shape.max_length < LEAST_LENGTH:
        return None
    target, draft = parts.target, drafter.model
    if not isinstance(target, LanguageModel) or not isinstance(draft, LanguageModel):
        return None
    num_steps = shape.tree_depth or shape.verify_length - 1
    windowed, full = (
        _bytes_read(target, shape.batch_size, shape.max_length)
        + num_steps * _bytes_read(draft, shape.batch_size, num_slots)
        for num_slots in (MENTIONED_WINDOW + BLOCK, shape.max_length)
    )
    return windowed / full if full >= LEAST_GAIN * windowed else None


def _bytes_read(model: LanguageModel, num_rows: int, num_slots: int) -> float:
    """Bytes of its weights, and of the KV of rows of this length that its layers see."""
    layers = jax.eval_shape(lambda: model.init_cache(num_rows, BLOCK)).layers
    spans = (model.config.sliding_window(index) for index in range(len(layers)))
    num_blocks = sum(min(num_slots, span or num_slots) for span in spans) / BLOCK
    return num_bytes(model.params) + num_bytes(layers[0]) * num_blocks


def num_bytes(tree: PyTree) -> int:
    """Bytes of all arrays (or shapes) of a pytree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _free_bytes(device: Any) -> int | None:
    """Bytes that are free on an accelerator; None if it does not say."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def in_units(count: int) -> str:
    """Bytes in readable units: `512 B`, `1.5 MiB`, `23.4 GiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _device(params: PyTree) -> Any:
    """The device of the parameters; the default device if they are not on one."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array):
            return min(leaf.devices(), key=lambda device: device.id)
    return jax.local_devices()[0]


def _resized(parts: RoundParts, **sizes: int) -> RoundParts:
    """The parts with another `batch_size` (of a shard) or `max_length`."""
    return dataclasses.replace(parts, shape=dataclasses.replace(parts.shape, **sizes))


def _does_not_fit(loop: DecodeLoop | ShardedLoop, memory: Memory, where: str) -> str:
    """The error message, with the largest batch_size and the largest max_length that fit."""
    free = memory.free_bytes
    assert free is not None
    shape = loop.parts.shape
    given = shape.batch_size
    num_shards = loop.num_shards if isinstance(loop, ShardedLoop) else 1

    def needed_bytes(batch_size: int, max_length: int) -> int:
        resized = _resized(loop.parts, batch_size=batch_size, max_length=max_length)
        found = measure_parts(dataclasses.replace(loop, parts=resized))
        return found.state_bytes + found.round_bytes

    batch_size = largest_that_fits(lambda n: needed_bytes(n, memory.max_length), given, free)
    most_blocks = memory.max_length // BLOCK
    blocks = largest_that_fits(lambda n: needed_bytes(given, n * BLOCK), most_blocks, free)
    advice = []
    if batch_size:
        advice.append(f"a batch_size of {num_shards * batch_size} at this max_length")
    if blocks:
        advice.append(f"a max_length of {blocks * BLOCK} at this batch_size")
    return (
        f"batch_size {num_shards * given} and max_length {memory.max_length} were given, whose KV, "
        f"buffers and logits (of {shape.verify_length} tokens a row) need "
        f"{in_units(memory.needed_bytes)} where {in_units(free)} are free {where} beside "
        f"{in_units(memory.weights_bytes)} of weights; "
        + (
            f"the most that fits is {' or '.join(advice)}."
            if advice
            else "choose a smaller model, or a dtype of fewer bytes."
        )
    )


def largest_that_fits(needed_bytes: Callable[[int], int], limit: int, num_bytes: int) -> int:
    """The largest n from 1 to `limit` that needs at most `num_bytes`; 0 if there is none.

    A larger n must not need fewer bytes. Bytes are nearly proportional to n, so few values are
    tried: each of them is traced. Every fourth value halves what is left, in case they are not.
    """
    low, high = 1, limit
    low_bytes, high_bytes = needed_bytes(low), needed_bytes(high)
    if low_bytes > num_bytes:
        return 0
    if high_bytes <= num_bytes:
        return limit
    for step in itertools.count(1):
        if high - low == 1:
            break
        between = (high - low) * (num_bytes - low_bytes) // (high_bytes - low_bytes)
        n = low + ((high - low) // 2 if step % 4 == 0 else between)
        n = min(max(n, low + 1), high - 1)
        if (n_bytes := needed_bytes(n)) <= num_bytes:
            low, low_bytes = n, n_bytes
        else:
            high, high_bytes = n, n_bytes
    return low


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramBytes:
    """What XLA reports about a compiled program, per device.

    Attributes:
      name: `round`, `prefill` or `scoring`.
      argument_bytes: its arguments, without parameters that it does not use.
      output_bytes: its results.
      alias_bytes: the part of the results that is written in place of arguments.
      temporary_bytes: its temporaries.
      lower_s: seconds to trace and lower it.
      compile_s: seconds to compile it, or to load it from the persistent cache.
    """

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    lower_s: float
    compile_s: float

    @property
    def added_bytes(self) -> int:
        """The bytes that it needs besides its arguments. (`peak_memory_in_bytes` leaves temporaries
        of donated arguments out.)"""
        return self.output_bytes - self.alias_bytes + self.temporary_bytes


def compile_programs(loop: DecodeLoop | ShardedLoop) -> tuple[ProgramBytes, ...]:
    """The rounds and the prefill of a loop, and its prefill with log-probabilities of prompts if it
    keeps any, compiled from shapes; nothing is allocated.

    Args:
      loop: a loop, whose parameters may be shapes. The devices of a mesh must exist, but may be
        virtual.
    """
    number = each = jax.ShapeDtypeStruct((), jnp.int32)
    state, params = jax.eval_shape(loop.init), jax.eval_shape(lambda: loop.params)
    if isinstance(loop, ShardedLoop):
        home, home_of_params = loop.state_shardings, loop.param_shardings
        each = jax.ShapeDtypeStruct((loop.num_shards,), jnp.int32)
    else:
        # That of an executor, which then finds these programs in the compilation cache.
        home = home_of(loop.params) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        home_of_params = home
    state, params = shapes_at(state, home), shapes_at(params, home_of_params)
    num_chunks = loop.resident_shape.chunks_per_call
    chunks = jax.ShapeDtypeStruct((*each.shape, num_chunks), jnp.int32)
    options: dict[str, Any] = {"donate_argnums": 1, "out_shardings": home}

    def compile_one(name: str, function: Any, *arguments: Any) -> ProgramBytes:
        started_s = time.perf_counter()
        lowered = jax.jit(function, **options).lower(params, state, *arguments)
        lowered_s = time.perf_counter()
        memory: Any = lowered.compile().memory_analysis()
        compiled_s = time.perf_counter()
        return ProgramBytes(
            name=name,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            lower_s=lowered_s - started_s,
            compile_s=compiled_s - lowered_s,
        )

    programs = [
        compile_one("round", loop.run, number, each),
        compile_one("prefill", loop.prefill, chunks, chunks),
    ]
    if loop.parts.logprobs is not None:
        programs.append(compile_one("scoring", loop.score, chunks, chunks))
    return tuple(programs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanBytes:
    """What an engine takes, per device.

    Attributes:
      parts: bytes of weights, KV, buffers and logits.
      added_bytes: what the largest program needs besides its arguments; the round's logits and its
        drafts' distributions are part of it.
      programs: the compiled programs; empty if `added_bytes` was computed.
    """

    parts: Parts
    added_bytes: int
    programs: tuple[ProgramBytes, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return self.parts.weights_bytes + self.generation_bytes

    @property
    def generation_bytes(self) -> int:
        """All bytes except the weights."""
        return self.parts.state_bytes + self.added_bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the sums, and with the temporaries besides logits and distributions.
        `temporaries` says whether these are `compiled` or `computed`."""
        parts = dataclasses.asdict(self.parts)
        del parts["drawing_bytes"], parts["scoring_bytes"]  # parts of the temporaries
        named = self.parts.logits_bytes + self.parts.draft_probs_bytes
        return {
            **parts,
            "temporaries_bytes": max(self.added_bytes - named, 0),
            "temporaries": "compiled" if self.programs else "computed",
            "generation_bytes": self.generation_bytes,
            "total_bytes": self.total_bytes,
        }


def bytes_of(loop: DecodeLoop | ShardedLoop) -> PlanBytes:
    """What an engine with this loop takes; compiles its programs to find out."""
    programs = compile_programs(loop)
    added_bytes = max(each.added_bytes for each in programs)
    return PlanBytes(parts=measure_parts(loop), added_bytes=added_bytes, programs=programs)


def fit_rows(
    parts: RoundParts, budget_bytes: int, *, mesh: jax.sharding.Mesh | None = None
) -> RoundParts:
    """The parts with as many rows as fit into the budget and into what is free, beside weights and
    programs; at most their own number.

    The models, the length of a row and the draft length are the caller's. Weights and state are
    read off shapes, without allocating anything. Programs are compiled to find the size of their
    temporaries: first with as many rows as weights and state alone would allow, then with fewer,
    until it is known how many are the most.

    Args:
      parts: those of one data shard.
      budget_bytes: the budget per device.
      mesh: the engine's mesh, or None.

    Raises:
      SettingError: one row does not fit; the message gives the smallest budget that would. Or one
        row does not fit into the free memory.
    """
    budget_bytes = whole_number("budget_bytes", budget_bytes, least=1, most=LARGEST_BYTES)
    if mesh is None and may_skip_padding(parts):  # as its engine will
        parts = dataclasses.replace(parts, skips_padding=True)

    def with_rows(num_rows: int) -> DecodeLoop | ShardedLoop:
        fewer = _resized(parts, batch_size=num_rows)
        return DecodeLoop(fewer) if mesh is None else ShardedLoop(parts=fewer, mesh=mesh)

    def state_bytes(num_rows: int) -> int:
        found = measure_parts(with_rows(num_rows))
        return found.weights_bytes + found.state_bytes

    # A budget may be larger than what is free; no program of so many rows is compiled.
    alone, limit = measure_memory(with_rows(1)), budget_bytes
    if alone.free_bytes is not None:
        limit = min(limit, alone.weights_bytes + alone.free_bytes)
    # The most rows that are known to fit, and the fewest that are known not to.
    most, too_many = 0, 1 + largest_that_fits(state_bytes, parts.shape.batch_size, limit)
    num_rows = too_many - 1
    while most < num_rows:
        found = bytes_of(with_rows(num_rows))
        if found.total_bytes <= limit:
            most = num_rows
        else:
            too_many = num_rows
        if too_many == 1:
            break
        # Next, as many as fit with these temporaries, of which fewer rows need no more.
        num_rows = largest_that_fits(state_bytes, too_many - 1, limit - found.added_bytes)
        num_rows = min(max(num_rows, most + 1), too_many - 1)
    if most:
        return _resized(parts, batch_size=most)
    least = bytes_of(with_rows(1))
    raise SettingError(
        f"A budget of {in_units(budget_bytes)} ({budget_bytes} bytes) was given, and one row needs "
        f"{in_units(least.total_bytes)} ({least.total_bytes} bytes), of which "
        f"{in_units(least.parts.weights_bytes)} are weights; raise the budget, lower the "
        "max_length, or see what `jaxspec plan` proposes."
    )
