"""Bytes of an engine's weights and state, and whether they fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.cache.pages import BLOCK, KVCache
from jaxspec.decode.loop import DecodeLoop, empty
from jaxspec.decode.sharded import ShardedLoop
from jaxspec.errors import SettingError
from jaxspec.runtime.host_limits import free_memory
from jaxspec.types import EngineShape, PyTree


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
      logits_bytes: fp32 logits of all tokens that a round scores, `[B, T, V]`, and as much again
        for the distributions of drafts if the verifier needs them. A tree with many nodes makes
        them large; a round also needs other temporaries.
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
    """

    target_weights_bytes: int
    draft_weights_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int
    buffers_bytes: int
    logits_bytes: int
    draft_probs_bytes: int

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


def measure_parts(
    loop: DecodeLoop | ShardedLoop, *, num_rows: int | None = None, max_length: int | None = None
) -> Parts:
    """Where the bytes of an engine with this loop go, from shapes, without allocating anything.

    Args:
      loop: a loop, whose parameters may be shapes.
      num_rows: resident rows of a shard, instead of the loop's own.
      max_length: slots per row, instead of the loop's own.
    """
    of_shard = loop.parts
    own = of_shard.resident_shape
    shape = dataclasses.replace(
        own,
        batch_size=own.batch_size if num_rows is None else num_rows,
        max_length=own.max_length if max_length is None else max_length,
    )
    state = jax.eval_shape(lambda: empty(of_shard, shape))
    params = loop.params
    if isinstance(loop, ShardedLoop):
        state, params = loop.state_of_device(state), loop.params_of_device()
    target_kv, draft_kv = (_cache_bytes(part) for part in (state.cache, state.drafter))
    return Parts(
        target_weights_bytes=num_bytes(params["target"]),
        draft_weights_bytes=num_bytes(params["drafter"]),
        target_kv_bytes=target_kv,
        draft_kv_bytes=draft_kv,
        buffers_bytes=num_bytes(state) - target_kv - draft_kv,
        logits_bytes=_distribution_bytes(of_shard.shape, of_shard.shape.verify_length),
        draft_probs_bytes=draft_probs_bytes(of_shard.shape),
    )


def draft_probs_bytes(shape: EngineShape) -> int:
    """Bytes of the fp32 distributions that a round's drafts were drawn from; 0 if the verifier does
    not need them."""
    return _distribution_bytes(shape, shape.needs_draft_probs * shape.num_nodes)


def _distribution_bytes(shape: EngineShape, num_tokens: int) -> int:
    """Bytes of `[B, num_tokens, V]` in fp32."""
    return shape.batch_size * num_tokens * shape.vocab_size * 4


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
        logits_bytes=parts.logits_bytes + parts.draft_probs_bytes,
        free_bytes=free,
    )
    if memory.free_bytes is not None and memory.needed_bytes > memory.free_bytes:
        raise SettingError(_does_not_fit(loop, memory, where))
    return memory


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


def _state_bytes(loop: DecodeLoop | ShardedLoop, num_rows: int, max_length: int) -> int:
    """Bytes of a state of this shape, per device."""
    return measure_parts(loop, num_rows=num_rows, max_length=max_length).state_bytes


def _logits_bytes(shape: EngineShape) -> int:
    """Bytes of the fp32 logits of a round, and of its drafts' distributions if they are needed."""
    return _distribution_bytes(shape, shape.verify_length) + draft_probs_bytes(shape)


def _does_not_fit(loop: DecodeLoop | ShardedLoop, memory: Memory, where: str) -> str:
    """The error message, with the largest batch_size and the largest max_length that fit."""
    free = memory.free_bytes
    assert free is not None
    of_shard = loop.parts
    scheduler, given = of_shard.scheduler, of_shard.shape.batch_size
    num_shards = loop.num_shards if isinstance(loop, ShardedLoop) else 1

    def needed_bytes(batch_size: int, max_length: int) -> int:
        logits_bytes = _logits_bytes(dataclasses.replace(of_shard.shape, batch_size=batch_size))
        state_bytes = _state_bytes(loop, scheduler.num_residents(batch_size), max_length)
        return state_bytes + logits_bytes

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
        f"buffers and logits (of {of_shard.shape.verify_length} tokens a row) need "
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
