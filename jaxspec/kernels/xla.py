"""Attention of a window over a row's live KV blocks, with an online softmax.

Only blocks with slots that some query can see are read, so the cost of a step depends on live
slots, not on allocated ones. Fully masked blocks change no bit of a row's result, so neighbours of
other lengths do not matter either. With attention sinks each row reads its first block, then those
of its own window. The nodes of a tree share these blocks up to their tails (`Window.tail_start`),
which are gathered along their paths. Backends have the signature of `block_attention`, and are
passed to the decoder.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache import pages as kv
from jaxspec.runtime.environment import loops_run_on_host, note_fallback
from jaxspec.types import Window

_log = logging.getLogger(__name__)

# The running maximum starts finite: with a sliding window the first blocks are fully masked, and
# -inf - -inf would be NaN. Masked scores are -inf, so their weight is exactly zero.
_LOWEST = -1e30


Attention: TypeAlias = Callable[..., jax.Array]  # a backend, called like `block_attention`

# Sums over some of the slots that each query sees, fp32: the highest score and the total weight
# `[B, K, G, T]`, and the weighted values `[B, K, G, T, H]`; weights are relative to the highest.
Sums: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def block_attention(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int | None = None,
    num_sinks: int | None = None,
    is_reference: bool = False,
) -> jax.Array:
    """Grouped-query attention `[B, T, Q, H]` of a window that is already written to the cache.

    Scores, softmax and the output sum are fp32; the probabilities enter the second product in
    `dtype`. Sums run over absolute slots in block order, whatever the window holds: this is what
    makes a drafted token's result bit-equal to plain decoding's. In a tree the sums of each query
    end with its tail, whose slots depend on the query's own position only.

    The loop over blocks ends with the longest row, so its trip count is dynamic. On a GPU the host
    therefore waits for the device before every block of every layer, and a warning is logged.

    Args:
      queries: `[B, T, Q, H]`, rotated.
      layer: KV of this layer.
      table: `[B, S / block]`, page numbers of the window's rows, with their padding if there is
        any.
      window: the positions of the queries.
      dtype: dtype of the KV that is read.
      sliding_window: a query at position i sees positions above `i - sliding_window` only,
      num_sinks: and those below `num_sinks`, at most a block. Set, together with a sliding window,
        for a cache that keeps only these positions (`pages.Ring`); otherwise None.
      is_reference: whether others are only compared with it, so that its loop is not announced.
    """
    num_rows, window_length, num_query_heads, head_size = queries.shape
    block, num_kv_heads = layer.block, layer.num_heads
    chex.assert_shape(window.positions, (num_rows, window_length))
    if loops_run_on_host() and not is_reference:
        kind = "windows" if window.paths is None else "trees"
        _announce_host_loop(f"{kind} of {window_length} tokens, heads of {head_size}")
    group = num_query_heads // num_kv_heads
    grouped = queries.reshape(num_rows, window_length, num_kv_heads, group, head_size)

    positions = window.positions
    is_padded = isinstance(table, kv.AlignedTable)
    # One past the last slot that each query sees in the loop; a tree's tails come after it.
    ends = window.visible_ends if window.paths is None else window.tail_start
    row_end = jnp.max(ends, axis=1)
    # Slots and positions are the same in the ragged layout. In the aligned one a row's first block
    # may lie to the right of slot 0, and its padding is masked like everything else outside the
    # row.
    query_slots = kv.slots_of(table, positions)
    last_block = (jnp.max(kv.slots_of(table, ends - 1)) + block) // block
    first_block = jnp.int32(0)
    if sliding_window is not None and num_sinks is None:
        first_block = jnp.maximum(jnp.min(query_slots) - sliding_window + 1, 0) // block
    row_begin = own_first = None
    if sliding_window is not None and num_sinks is not None:
        # Step 0 is block 0 of every row, step i + 1 the i-th block of the row's own window.
        row_begin = jnp.maximum(jnp.min(positions, axis=1) - sliding_window + 1, 0)
        own_first = jnp.maximum(row_begin // block, 1)
        last_block = 1 + jnp.max((row_end - 1 + block) // block - own_first)

    def body(block_index, sums):
        if own_first is None:
            slots = block_index * block + jnp.arange(block, dtype=jnp.int32)
            key_positions = kv.positions_of(table, slots)  # [1, block], or [B, block] if padded
        else:
            block_index = jnp.where(block_index == 0, 0, own_first + block_index - 1)  # [B]
            within = jnp.arange(block, dtype=jnp.int32)
            key_positions = block_index[:, None] * block + within[None]
        k, v = kv.read_block(layer, table, block_index, dtype)
        # Garbage may be NaN, and 0 * NaN is NaN, so V is zeroed where no query of the row looks.
        is_live = key_positions < row_end[:, None]
        if is_padded:
            is_live &= key_positions >= 0
        if row_begin is not None and num_sinks is not None:
            is_live &= (key_positions >= row_begin[:, None]) | (key_positions < num_sinks)
        v = jnp.where(is_live[:, None, :, None], v, jnp.zeros((), dtype))
        visible = key_positions[:, None] < ends[:, :, None]
        if is_padded:
            visible &= key_positions[:, None] >= 0
        if sliding_window is not None:
            is_near = key_positions[:, None] > positions[:, :, None] - sliding_window
            if num_sinks is not None:
                is_near |= key_positions[:, None] < num_sinks
            visible &= is_near
        scores = _product("btkgh,bksh->bkgts", grouped, k)
        return _add(sums, scores, visible[:, None, None], v, "bkgts,bksh->bkgth")

    shape = (num_rows, num_kv_heads, group, window_length)
    sums = lax.fori_loop(first_block, last_block, body, _no_sums(shape, head_size))
    if window.paths is not None:
        settings = {"dtype": dtype, "sliding_window": sliding_window, "num_sinks": num_sinks}
        sums = tail_sums(grouped, layer, table, window, before=sums, **settings)
    _, total, output = sums
    output = (output / total[..., None]).astype(queries.dtype)
    return output.transpose(0, 3, 1, 2, 4).reshape(queries.shape)


def tail_sums(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int | None,
    num_sinks: int | None = None,
    before: Sums | None = None,
) -> Sums:
    """Sums over the tails of a tree's queries: each sees its own path there, from
    `window.tail_start` to its end.

    Args:
      queries: `[B, T, K, G, H]`.
      layer: KV of this layer; this and the next arguments are as in `block_attention`.
      table: page numbers of the window's rows.
      window: the positions of the queries, with `paths`.
      dtype: dtype of the KV that is read.
      sliding_window: number of slots that a query sees, or None for all.
      num_sinks: number of first slots that it sees as well, or None.
      before: sums over earlier slots to continue from; None for the tails alone.
    """
    num_rows, window_length, num_kv_heads, group, head_size = queries.shape
    if before is None:
        before = _no_sums((num_rows, num_kv_heads, group, window_length), head_size)
    place = jnp.arange(window.tail_length, dtype=jnp.int32)
    slots = window.tail_start[:, :, None] + place[None, None]  # [B, T, D]
    visible = slots < window.visible_ends[:, :, None]
    if sliding_window is not None:
        is_near = slots > window.positions[:, :, None] - sliding_window
        visible &= is_near if num_sinks is None else is_near | (slots < num_sinks)
    k, v = kv.read_slots(layer, table, window.stored_at(slots), dtype)
    v = jnp.where(visible[..., None, None], v, jnp.zeros((), dtype))  # it may be NaN, as above
    # By query and KV head: in this order XLA:CPU multiplies small matrices three times as fast.
    k, v = k.transpose(0, 1, 3, 2, 4), v.transpose(0, 1, 3, 2, 4)  # [B, T, K, D, H]
    scores = _product("btkgh,btksh->btkgs", queries, k)
    highest, total, output = (jnp.moveaxis(one, 3, 1) for one in before)
    sums = highest, total, output
    sums = _add(sums, scores, visible[:, :, None, None], v, "btkgs,btksh->btkgh")
    highest, total, output = (jnp.moveaxis(one, 1, 3) for one in sums)
    return highest, total, output


def sink_sums(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int,
    num_sinks: int,
) -> Sums:
    """Sums over the attention sinks that lie before the sliding window of each query, and before
    its tail: what kernels that support only sliding windows leave out. Arguments as in
    `tail_sums`."""
    num_rows, window_length, num_kv_heads, group, head_size = queries.shape
    before = _no_sums((num_rows, num_kv_heads, group, window_length), head_size)
    slots = jnp.arange(num_sinks, dtype=jnp.int32)[None]
    ends = window.positions - sliding_window + 1
    ends = jnp.minimum(ends, window.visible_ends if window.paths is None else window.tail_start)
    visible = slots[:, None] < ends[:, :, None]  # [B, T, n]
    every = jnp.broadcast_to(slots, (num_rows, num_sinks))
    k, v = kv.read_slots(layer, table, every, dtype)
    v = jnp.where(jnp.any(visible, axis=1)[..., None, None], v, jnp.zeros((), dtype))
    scores = _product("btkgh,bskh->bkgts", queries, k)
    return _add(before, scores, visible[:, None, None], v, "bkgts,bskh->bkgth")


def _no_sums(shape: tuple[int, ...], head_size: int) -> Sums:
    return (
        jnp.full(shape, _LOWEST, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_size), jnp.float32),
    )


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum of a and b in fp32."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32, precision=precision)


def _add(sums: Sums, scores: jax.Array, visible: jax.Array, v: jax.Array, equation: str) -> Sums:
    """One update of the online softmax.

    Args:
      sums: over earlier slots.
      scores: those of queries and keys, slots last; not yet scaled.
      visible: which of them are visible; broadcast to `scores`.
      v: values, finite.
      equation: einsum of the weights and `v`.
    """
    highest, total, output = sums
    scores = jnp.where(visible, v.shape[-1] ** -0.5 * scores, -jnp.inf)
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
    rescale = jnp.exp(highest - new_highest)
    weights = jnp.exp(scores - new_highest[..., None])
    return (
        new_highest,
        total * rescale + jnp.sum(weights, axis=-1),
        output * rescale[..., None] + _product(equation, weights.astype(v.dtype), v),
    )


@functools.cache
def _announce_host_loop(what: str) -> None:
    problem = f"attention ({what}) runs in a loop over the KV that waits for the host"
    note_fallback(problem)
    _log.warning(
        "On this GPU %s, before every block of every layer. The kernels 'mosaic' and 'pallas' "
        "have none, for chains and short trees, and heads of a power of two.",
        problem,
    )


def causal_attention(
    queries: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    sliding_window: int | None = None,
) -> jax.Array:
    """Dense causal attention `[B, T, Q, H]` within segments: for training, which needs no cache.

    Args:
      queries: `[B, T, Q, H]`.
      k: `[B, T, K, H]`.
      v: `[B, T, K, H]`.
      segments: `[B, T]` int32; a token sees earlier tokens of its own segment.
      sliding_window: as in `block_attention`.
    """
    index = jnp.arange(queries.shape[1])
    distance = index[:, None] - index[None]
    mask = (distance >= 0)[None] & (segments[:, :, None] == segments[:, None, :])
    if sliding_window is not None:
        mask &= (distance < sliding_window)[None]
    return jax.nn.dot_product_attention(queries, k, v, mask=mask[:, None])
