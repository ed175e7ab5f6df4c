"""Layouts: where a row's KV stands among the slots of its batch, as data of the target's cache.

`ragged`: position i of every row stands at slot i, and rows end where they end. Nothing is ever
moved; the compiled program holds no realignment. `aligned`: rows are padded on the left so that all
rows in the batch end at one slot, and are moved whenever they have accepted different numbers of
tokens (EQSPEC and EXSPEC, 2510.22876). Same forward, same verifier; only the placement differs. A
row's sums run over slots in block order, so an aligned row's rounding depends on its neighbours'
lengths: its output equals the ragged one except at ties within rounding.

Only the target's cache has a layout. A drafter's own cache stays ragged, which is no business of
the target's.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.types import DecodeState, Finish, PyTree

Layout = Literal["ragged", "aligned"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def check_layout(layout: str) -> None:
    """Raises `SettingError` unless there is a layout of this name."""
    if layout not in LAYOUTS:
        raise SettingError(
            f"The layout {layout!r} was given; it must be one of {', '.join(LAYOUTS)}."
        )


def longest_prompt(layout: Layout, *, max_length: int, verify_length: int) -> int:
    """Prompt tokens that leave room for one round; a row may grow to one token more.

    A round that begins with n committed tokens writes slots n - 1 to n + window - 2. Aligned rows
    all begin where the longest row in the batch does, even one that has ended there, at its limit:
    so the limit is one token less than where everybody begins at a place of their own.
    """
    if layout == "aligned":
        return max_length - verify_length
    return min(max_length - verify_length + 1, max_length - 1)


def to_layout(cache: PyTree, *, layout: Layout) -> PyTree:
    """A new cache in this layout."""
    return kv.aligned(cache) if layout == "aligned" else cache


def reset_padding(cache: PyTree, row: jax.Array) -> PyTree:
    """The cache before a new request's prompt is read into `row`: without padding."""
    return kv.without_padding(cache, row) if isinstance(cache, kv.KVCache) else cache


def paddings(state: DecodeState) -> jax.Array:
    """`[B]` int32, the slot of each row's position 0."""
    first_slot = state.cache.first_slot if isinstance(state.cache, kv.KVCache) else None
    return jnp.zeros_like(state.num_committed) if first_slot is None else first_slot


def lengths(state: DecodeState) -> jax.Array:
    """`[B]` int32, the slot at which each row ends, padding counted."""
    return paddings(state) + state.num_committed


def window_start(state: DecodeState) -> jax.Array:
    """`[B]` int32, the position at which each row's window begins: that of its newest token.

    Rows that are not running begin at the slot at which the foremost running row does, so that
    they neither lengthen nor widen the range of blocks that attention reads.
    """
    is_running = state.is_running
    start = state.num_committed - 1
    first_slot = state.cache.first_slot if isinstance(state.cache, kv.KVCache) else None
    if first_slot is None:
        return jnp.where(is_running, start, jnp.max(jnp.where(is_running, start, 0)))
    foremost = jnp.max(jnp.where(is_running, first_slot + start, 0))
    return jnp.where(is_running, start, jnp.maximum(foremost - first_slot, 0))


def align(state: DecodeState, *, max_length: int, verify_length: int) -> DecodeState:
    """The state of the rows in the batch with an aligned cache realigned, and the move counted;
    with a ragged cache it is returned as it is. Rows that have ended are moved too, as
    published."""
    before = state.cache.first_slot if isinstance(state.cache, kv.KVCache) else None
    if before is None:
        return state
    num_committed = jnp.where(state.finish == Finish.EMPTY_ROW, 0, state.num_committed)
    largest = longest_prompt("aligned", max_length=max_length, verify_length=verify_length) + 1
    schedule = state.schedule
    state = state.replace(cache=kv.realign(state.cache, num_committed, largest=largest))
    moved = jnp.sum(kv.num_moved(before, paddings(state), num_committed), dtype=jnp.int32)
    return state.replace(
        schedule=schedule.replace(
            num_realignments=schedule.num_realignments + (moved > 0).astype(jnp.int32),
            num_slots_moved=schedule.num_slots_moved + moved,
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the invariants speak of, on the host, for every row that is held.

    Attributes:
      num_committed: `[B]`; 0 where no one holds the row.
      finish: `[B]`, `Finish`.
      num_rounds: `[B]`, rounds the row has taken part in.
      tokens: `[B, S]`.
      first_slot: `[B]`, or None in the ragged layout.
      kv: k and v of each layer, `[B, S, K, H]` by position, as unsigned integers.
    """

    num_committed: np.ndarray
    finish: np.ndarray
    num_rounds: np.ndarray
    tokens: np.ndarray
    first_slot: np.ndarray | None
    kv: tuple[np.ndarray, ...]


@jax.jit
def kv_by_position(cache: kv.KVCache) -> list[jax.Array]:
    """k and v of each layer, `[B, S, K, H]`, by position instead of slot."""
    shape = (cache.table.shape[0], cache.capacity)
    every = jnp.broadcast_to(jnp.arange(cache.capacity, dtype=jnp.int32), shape)
    return [
        values
        for layer in cache.layers
        for values in kv.read_slots(layer, cache.table, every, cache.dtype)
    ]


def snapshot(state: DecodeState) -> Snapshot:
    """A copy of what the invariants speak of."""
    finish, first_slot = np.array(state.finish), state.cache.first_slot
    values = [np.array(each) for each in kv_by_position(state.cache)]
    return Snapshot(
        num_committed=np.where(finish == Finish.EMPTY_ROW, 0, np.array(state.num_committed)),
        finish=finish,
        num_rounds=np.array(state.counts.num_rounds),
        tokens=np.array(state.tokens),
        first_slot=None if first_slot is None else np.array(first_slot),
        kv=tuple(each.view(f"u{each.dtype.itemsize}") for each in values),
    )


def broken_invariants(
    before: Snapshot, after: Snapshot, *, verify_length: int, regroups: bool
) -> list[str]:
    """A sentence for each invariant of 2510.22876, section 3.1, that one round has broken.

    - I1 (aligned only): all rows of the round end at one slot: after it, or, where the scheduler
      `regroups` and rows are aligned only as they are seated, before it.
    - I2: a token's position is its slot less the padding, and positions are contiguous: a row grows
      by 1 to `verify_length` tokens after those it has, which stay, and lies within its max_length.
    - I3: a row's slots hold the KV of its tokens but the newest: to the bit what they held before
      the round, for those that were committed then, and none that was never written for the others.

    Args:
      before: with NaN in all slots without committed KV (`cache.poison_uncommitted`), so that KV
        which was not written shows, and KV that was read by mistake makes the row's scores not
        finite.
      after: one round later.
    """
    sentences = []
    num_before, num_after = before.num_committed, after.num_committed
    was_active = after.num_rounds > before.num_rounds
    max_length = before.tokens.shape[1]
    if after.first_slot is not None:
        ends = after.first_slot + (num_before if regroups else num_after)
        ends = ends[was_active].tolist()
        if len(set(ends)) > 1:
            sentences.append(f"I1: rows of one round end at slots {ends}.")
        outside = (num_after > 0) & (
            (after.first_slot < 0) | (after.first_slot + num_after > max_length)
        )
        for row in np.flatnonzero(outside):
            sentences.append(
                f"I2: row {row} has {num_after[row]} tokens from slot {after.first_slot[row]} on, "
                f"and {max_length} slots."
            )
    for row in np.flatnonzero(num_before > 0):
        old, new = int(num_before[row]), int(num_after[row])
        if not (1 <= new - old <= verify_length if was_active[row] else new == old):
            sentences.append(f"I2: row {row} went from {old} to {new} tokens in one round.")
        if not np.array_equal(before.tokens[row, :old], after.tokens[row, :old]):
            sentences.append(f"I2: committed tokens of row {row} have changed.")
        for index, (was, now) in enumerate(zip(before.kv, after.kv, strict=True)):
            name = f"{'kv'[index % 2]} of layer {index // 2}"
            differs = np.any(was[row, : old - 1] != now[row, : old - 1], axis=(1, 2))
            if np.any(differs):
                sentences.append(
                    f"I3: {name} of row {row} has changed at position {np.argmax(differs)}, which "
                    "was committed before the round."
                )
            stale = np.any(was[row, old - 1 : new - 1] == now[row, old - 1 : new - 1], axis=(1, 2))
            if np.any(stale):
                sentences.append(
                    f"I3: {name} of row {row} was not written at position "
                    f"{old - 1 + np.argmax(stale)}, whose token was committed in the round."
                )
        if after.finish[row] == Finish.NON_FINITE != before.finish[row]:
            sentences.append(
                f"I3: row {row} has read a slot that holds no committed KV (or the model's own "
                "scores are not finite)."
            )
    return sentences


def poison_uncommitted(state: DecodeState) -> DecodeState:
    """The state with NaN in every slot of the target's cache that holds no committed KV."""
    is_held = state.finish != Finish.EMPTY_ROW
    num_live = jnp.where(is_held, state.num_committed - 1, 0)
    return state.replace(cache=kv.poison_uncommitted(state.cache, num_live))
