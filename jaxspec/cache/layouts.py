"""Layouts: which slots hold a row's KV, as data of the target's cache.

`ragged`: position i of every row is at slot i, and rows end at different slots. Nothing is ever
moved, and the compiled program contains no realignment. `aligned`: rows are padded on the left so
that all rows in the batch end at one slot, and are moved whenever they accept different numbers of
tokens (EQSPEC and EXSPEC, 2510.22876). Model and verifier are the same; only the placement differs.
Sums run over slots in block order, so an aligned row's rounding depends on its neighbours' lengths,
and its output equals the ragged one except at ties within rounding.

Only the target's cache has a layout; a drafter's own cache is always ragged.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.runtime.values import is_one_of, shown
from jaxspec.types import DecodeState, Finish, PyTree

Layout = Literal["ragged", "aligned"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def check_layout(layout: Any) -> None:
    """Raises `SettingError` unless there is a layout with this name."""
    if not is_one_of(layout, LAYOUTS):
        raise SettingError(
            f"The layout {shown(layout)} was given; it must be one of {', '.join(LAYOUTS)}."
        )


def longest_prompt(layout: Layout, *, max_length: int, verify_length: int) -> int:
    """The most prompt tokens that leave room for one round; a row may grow to one token more.

    A round that begins with n committed tokens writes slots n - 1 to n + verify_length - 2. Aligned
    rows all begin where the longest row in the batch does, even if that row has ended at its limit,
    so their limit is one token lower.
    """
    if layout == "aligned":
        return max_length - verify_length
    return min(max_length - verify_length + 1, max_length - 1)


def to_layout(cache: PyTree, *, layout: Layout) -> PyTree:
    """A new cache in this layout."""
    return kv.aligned(cache) if layout == "aligned" else cache


def reset_padding(cache: PyTree, row: jax.Array) -> PyTree:
    """The cache without padding in `row`, before a new request's prompt is prefilled there."""
    return kv.without_padding(cache, row) if isinstance(cache, kv.KVCache) else cache


def paddings(state: DecodeState) -> jax.Array:
    """`[B]` int32, the slot of each row's position 0."""
    first_slot = state.cache.first_slot if isinstance(state.cache, kv.KVCache) else None
    return jnp.zeros_like(state.num_committed) if first_slot is None else first_slot


def lengths(state: DecodeState) -> jax.Array:
    """`[B]` int32, the slot at which each row ends, including its padding."""
    return paddings(state) + state.num_committed


def window_start(state: DecodeState) -> jax.Array:
    """`[B]` int32, the position at which each row's window begins: that of its newest token.

    Rows that are not running begin at the same slot as the running row that is furthest ahead, so
    that they do not extend the range of blocks that attention reads.
    """
    is_running = state.is_running
    start = state.num_committed - 1
    first_slot = state.cache.first_slot if isinstance(state.cache, kv.KVCache) else None
    if first_slot is None:
        return jnp.where(is_running, start, jnp.max(jnp.where(is_running, start, 0)))
    foremost = jnp.max(jnp.where(is_running, first_slot + start, 0))
    return jnp.where(is_running, start, jnp.maximum(foremost - first_slot, 0))


def align(state: DecodeState, *, max_length: int, verify_length: int) -> DecodeState:
    """The state of the rows in the batch after realigning an aligned cache and counting the move;
    with a ragged cache the state is returned as it is. Rows that have ended are moved too, as in
    the published code."""
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
