"""Paged KV cache: allocate, write, read a block, move an accepted path.

KV lives in pages, per layer `[P, K, block, H]`, and a table `[rows, S / block]` of page numbers
says which pages are a row's slots. Slot i of a row holds position i. How many slots are valid is
not the cache's business: the decode state holds one integer per row, and slots beyond it are
garbage. So rolling back lowers an integer, reusing a seat is free, and nothing is ever copied or
zeroed:

    row 0, 3 committed, window of 3:   a b c . . .   ->  write at slots 2, 3, 4 (c and two drafts)
    row 1, 5 committed, window of 3:   a b c d e .   ->  write at slots 4, 5, 6

Only this module knows how KV is stored. Within a page heads come before slots: attention multiplies
head by head, and wherever slots came first XLA:CPU would transpose every block that it reads, which
costs more than the products. bf16 is stored as uint16 and bitcast after a block is read: XLA:CPU
otherwise converts the whole cache to fp32 in every round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

BLOCK = 128  # slots of a page; attention reads KV block by block


class LayerCache(struct.PyTreeNode):
    """KV of one layer, opaque outside this module: k and v `[P, K, block, H]` in storage dtype."""

    k: jax.Array
    v: jax.Array

    @property
    def block(self) -> int:
        """Slots of a page."""
        return self.k.shape[2]

    @property
    def num_heads(self) -> int:
        """K, the KV heads."""
        return self.k.shape[1]


class KVCache(struct.PyTreeNode):
    """Per-layer pages and the table that assigns them to rows.

    Attributes:
      layers: one `LayerCache` per layer (a tuple: stacking them makes XLA copy a whole cache).
      table: `[rows, S / block]` int32 page numbers.
      dtype: static, the dtype in which KV is read.
    """

    layers: tuple[LayerCache, ...]
    table: jax.Array
    dtype: jnp.dtype = struct.field(pytree_node=False)

    @property
    def capacity(self) -> int:
        """S, the slots of a row."""
        return self.table.shape[1] * self.layers[0].block


def round_up_to_block(num_slots: int) -> int:
    """Smallest multiple of the block size that holds `num_slots`."""
    return -(-num_slots // BLOCK) * BLOCK


def init_cache(
    *, num_layers: int, num_rows: int, capacity: int, num_kv_heads: int, head_size: int, dtype
) -> KVCache:
    """A cache of `num_rows` rows of `capacity` slots (rounded up to a block), identity page table.

    Args:
      dtype: bfloat16, float16 or float32; bfloat16 is stored as uint16.
    """
    dtype = jnp.dtype(dtype)
    num_blocks = round_up_to_block(capacity) // BLOCK
    shape = (num_rows * num_blocks, num_kv_heads, BLOCK, head_size)
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    return KVCache(
        layers=tuple(
            LayerCache(k=jnp.zeros(shape, stored), v=jnp.zeros(shape, stored))
            for _ in range(num_layers)
        ),
        table=jnp.arange(num_rows * num_blocks, dtype=jnp.int32).reshape(num_rows, num_blocks),
        dtype=dtype,
    )


def _to_storage(values: jax.Array, stored: jax.Array) -> jax.Array:
    if values.dtype == stored.dtype:
        return values
    return lax.bitcast_convert_type(values, stored.dtype)


def _from_storage(values: jax.Array, dtype) -> jax.Array:
    if values.dtype == dtype:
        return values
    return lax.bitcast_convert_type(values, dtype)


def _flat_index(table: jax.Array, slots: jax.Array, num_flat: int, block: int) -> jax.Array:
    """Index `[B, T]` of each slot in the flattened pages; slots outside `[0, S)` get distinct
    indices past the end, where a scatter with `mode="drop"` drops them (-1 would wrap around)."""
    is_inside = (slots >= 0) & (slots < table.shape[1] * block)
    page = jnp.take_along_axis(table, jnp.where(is_inside, slots // block, 0), axis=1)
    outside = num_flat + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
    return jnp.where(is_inside, page * block + slots % block, outside)


def write(
    layer: LayerCache, table: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> LayerCache:
    """Stores `k`, `v` `[B, T, K, H]` at `slots` `[B, T]` of the rows in `table` `[B, S / block]`.

    Slots of a row must be distinct; those outside `[0, S)` are not stored.
    """
    num_pages, num_heads, block, size = layer.k.shape
    index = _flat_index(table, slots, num_pages * block, block).reshape(-1)

    def scatter(stored, values):
        values = _to_storage(values, stored).reshape(-1, num_heads, size)
        place = stored.at[index // block, :, index % block]
        return place.set(values, mode="drop", unique_indices=True)

    return layer.replace(k=scatter(layer.k, k), v=scatter(layer.v, v))


def read_block(
    layer: LayerCache, table: jax.Array, block_index: jax.Array, dtype
) -> tuple[jax.Array, jax.Array]:
    """k and v `[B, K, block, H]` of the `block_index`-th block of every row in `table`."""
    page = lax.dynamic_index_in_dim(table, block_index, axis=1, keepdims=False)
    return _from_storage(layer.k[page], dtype), _from_storage(layer.v[page], dtype)


def read_slots(
    layer: LayerCache, table: jax.Array, slots: jax.Array, dtype
) -> tuple[jax.Array, jax.Array]:
    """k and v `[B, ..., K, H]` at `slots` `[B, ...]`; slots outside `[0, S)` read some valid
    slot.
    """
    num_pages, _, block, _ = layer.k.shape
    inside = jnp.clip(slots, 0, table.shape[1] * block - 1).reshape(slots.shape[0], -1)
    index = _flat_index(table, inside, num_pages * block, block).reshape(slots.shape)

    def gather(stored):
        return _from_storage(stored[index // block, :, index % block], dtype)

    return gather(layer.k), gather(layer.v)


def commit_path(cache: KVCache, start: jax.Array, path: jax.Array) -> KVCache:
    """Moves the KV of an accepted path into consecutive slots.

    Node n of a draft is stored at slot `start + 1 + n`; the d-th accepted node belongs at
    `start + 1 + d`. Two rows, path in brackets, before and after:

        start | root a b c d     path [1, 3]  ->  start | root b d . .
        start | root a b c d     path [0]     ->  start | root a . . .

    Args:
      start: `[B]` int32, slot of the window's first token.
      path: `[B, N]` int32 node at each depth, -1 beyond the accepted ones.
    """
    depth = jnp.arange(path.shape[1], dtype=jnp.int32)
    source = start[:, None] + 1 + path
    moves = (path >= 0) & (path != depth)
    target = jnp.where(moves, start[:, None] + 1 + depth, -1)

    def move(layer):
        k, v = read_slots(layer, cache.table, source, cache.dtype)
        return write(layer, cache.table, k, v, target)

    return cache.replace(layers=tuple(move(layer) for layer in cache.layers))
