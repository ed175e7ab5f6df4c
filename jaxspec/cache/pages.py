"""Paged KV cache: allocate, write, read a block, move an accepted path, realign.

KV lives in pages, per layer `[P, K, block, H]`, and a table `[rows, S / block]` of page numbers
says which pages are a row's slots. Slot i of a row holds position i. The cache does not know how
many slots are valid: the decode state holds one integer per row, and slots past it are garbage. So
rollback just lowers an integer, reusing a row is free, and nothing is ever copied or zeroed:

    row 0, 3 committed, window of 3:   a b c . . .   ->  write at slots 2, 3, 4 (c and two drafts)
    row 1, 5 committed, window of 3:   a b c d e .   ->  write at slots 4, 5, 6

This is the `ragged` layout. In the `aligned` layout (2510.22876) rows are padded on the left, and
all rows of a batch end at one slot: position i of a row is at slot `first_slot + i`.

    row 0, 3 committed, first slot 2:  - - a b c .   ->  write at slots 4, 5, 6
    row 1, 5 committed, first slot 0:  a b c d e .   ->  write at slots 4, 5, 6

Rows that accept different numbers of tokens then have to be moved, by `realign`. Other modules use
positions in both layouts. The functions below take a `table`, either an array of page numbers or an
`AlignedTable`, whose `first_slot` they add.

A draft model may keep only its first and its newest positions (`Ring`): its table then names the
same pages repeatedly. Attention masks the positions that have been overwritten.

Only this module and the kernels know how KV is stored. Within a page heads come before slots,
because attention multiplies head by head. With slots first, XLA:CPU would transpose every block it
reads, which costs more than the products. bf16 is stored as uint16 and bitcast after a block is
read, because XLA:CPU would otherwise convert the whole cache to fp32 in every round.

KV may also be stored in int8, with a scale per token and KV head. It is quantised once, when it is
written; moving KV moves codes and scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.errors import SettingError
from jaxspec.runtime.values import is_one_of, shown

BLOCK = 128  # slots of a page; attention reads KV block by block

KvDtype: TypeAlias = Literal["int8"]  # dtypes for stored KV, besides that of the model
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)

_LARGEST_CODE = 127  # int8, without -128, so that codes are symmetric


class LayerCache(struct.PyTreeNode):
    """KV of one layer, opaque outside this module.

    Attributes:
      k: `[P, K, block, H]`, in the dtype that KV is read in (bf16 as uint16), or int8 codes.
      v: likewise.
      k_scale: `[P, K, block]` fp32, the factor of the codes of each token's key; None if `k` holds
        no codes.
      v_scale: likewise.
      is_written_by_head: static, whether writes go head by head, as they do on a TPU. For a write
        of all heads at once, XLA would lay the pages out differently there from reading, and copy
        the cache between the two layouts in every layer.
      heads_axis: static, the mesh axis over which the heads are split, if any, while a program is
        traced in which the compiler splits arrays over mesh axes.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    is_written_by_head: bool = struct.field(pytree_node=False, default=False)
    heads_axis: str | None = struct.field(pytree_node=False, default=None)

    @property
    def is_quantised(self) -> bool:
        """Whether k and v are int8 codes."""
        return self.k_scale is not None

    @property
    def block(self) -> int:
        """Slots of a page."""
        return self.k.shape[2]

    @property
    def num_heads(self) -> int:
        """K, the KV heads."""
        return self.k.shape[1]


class AlignedTable(struct.PyTreeNode):
    """The table of a cache whose rows are padded on the left; indexed by rows, like an array.

    Attributes:
      pages: `[rows, S / block]` int32 page numbers.
      first_slot: `[rows]` int32, the slot of each row's position 0, which is the length of its
        padding.
    """

    pages: jax.Array
    first_slot: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """`(rows, S / block)`."""
        return self.pages.shape

    def __getitem__(self, rows) -> AlignedTable:
        return AlignedTable(pages=self.pages[rows], first_slot=self.first_slot[rows])


Table = jax.Array | AlignedTable
MoveWithin: TypeAlias = Callable[..., tuple["LayerCache", ...]]  # as `move_within`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """What a row keeps in a cache of fixed size: its first positions (the attention sinks) and its
    newest ones (StreamingLLM, 2309.17453).

    A query at position t sees position p if `p <= t`, and `p < num_sinks` or `p > t - window`.
    Positions keep their rotary angles. (StreamingLLM counts positions within the cache, so that a
    model can go beyond the length it was trained for.) Block 0 of a row has a page of its own;
    later blocks take turns. With four pages:

        block   0  1  2  3  4  5  6  7 ...
        page    0  1  2  3  1  2  3  1 ...

    So a page that the table gives for an older block may hold the KV of a newer one. No query sees
    it there, as long as everything that one call of the model reads and writes fits into the pages
    that take turns.

    Attributes:
      window: number of newest positions that a query sees, its own included.
      num_sinks: number of first positions that every query sees, at most a block.
      num_pages: number of pages of a row.
    """

    window: int
    num_sinks: int
    num_pages: int

    @classmethod
    def of_calls(cls, *, window: int, num_sinks: int, longest_call: int) -> Ring:
        """A ring with room for calls that write up to `longest_call` consecutive positions, and for
        all that their queries see."""
        num_slots = round_up_to_block(window + longest_call - 1)
        return cls(window=window, num_sinks=num_sinks, num_pages=1 + num_slots // BLOCK)

    def holds(self, num_kept: jax.Array, num_written: jax.Array) -> jax.Array:
        """Whether a row still holds everything that the query at position `num_kept` sees, after KV
        was stored at positions up to `num_written`; both int32, of any shape."""
        first = jnp.maximum(num_kept - self.window + 1, BLOCK)
        return (num_kept <= BLOCK) | (num_written - first <= (self.num_pages - 1) * BLOCK)


class KVCache(struct.PyTreeNode):
    """Per-layer pages and the table that assigns them to rows.

    Attributes:
      layers: one `LayerCache` per layer (a tuple: stacking them makes XLA copy a whole cache).
      table: `[rows, S / block]` int32 page numbers; in the aligned layout an `AlignedTable`.
      dtype: static, the dtype that KV is read in.
      ring: static, what rows keep, unless they keep everything.
    """

    layers: tuple[LayerCache, ...]
    table: Table
    dtype: jnp.dtype = struct.field(pytree_node=False)
    ring: Ring | None = struct.field(pytree_node=False, default=None)

    @property
    def first_slot(self) -> jax.Array | None:
        """`[rows]` int32, the slot of each row's position 0; None if that is slot 0 of all rows,
        as in the `ragged` layout."""
        return self.table.first_slot if isinstance(self.table, AlignedTable) else None

    @property
    def capacity(self) -> int:
        """S, the slots of a row."""
        return self.table.shape[1] * self.layers[0].block

    @property
    def num_distinct_blocks(self) -> int:
        """The number of blocks at the beginning of a row that use each of its pages exactly
        once."""
        num_blocks = self.table.shape[1]
        return num_blocks if self.ring is None else min(num_blocks, self.ring.num_pages)

    def span(self, sliding_window: int | None) -> dict[str, Any]:
        """What part of this cache the queries of a layer see, as settings of the attention.

        Args:
          sliding_window: the layer's own. If it is narrower than the ring's, it applies instead,
            without sinks.
        """
        ring = self.ring
        if ring is None:
            return {"sliding_window": sliding_window}
        if sliding_window is not None and sliding_window <= ring.window:
            return {"sliding_window": sliding_window, "num_sinks": 0}
        return {"sliding_window": ring.window, "num_sinks": ring.num_sinks}


def round_up_to_block(num_slots: int) -> int:
    """Smallest multiple of the block size that holds `num_slots`."""
    return -(-num_slots // BLOCK) * BLOCK


def check_kv_dtype(kv_dtype: Any) -> None:
    """Raises `SettingError` unless KV can be stored in this dtype, or None is given."""
    if kv_dtype is not None and not is_one_of(kv_dtype, KV_DTYPES):
        raise SettingError(
            f"The KV dtype {shown(kv_dtype)} was given; it must be {' or '.join(KV_DTYPES)}, or "
            "None to store KV in the model's own dtype."
        )


def init_cache(
    *,
    num_layers: int,
    num_rows: int,
    capacity: int,
    num_kv_heads: int,
    head_size: int,
    dtype,
    kv_dtype: KvDtype | None = None,
    is_written_by_head: bool = False,
) -> KVCache:
    """A cache of `num_rows` rows of `capacity` slots (rounded up to a block), with an identity page
    table.

    Args:
      dtype: the dtype that KV is read in: bfloat16, float16 or float32; bfloat16 is stored as
        uint16.
      kv_dtype: the dtype that KV is stored in: None means `dtype`; `int8` stores codes with a scale
        per token and KV head, see `quantise`.
      is_written_by_head: see `LayerCache`.

    Raises:
      SettingError: KV cannot be stored in `kv_dtype`.
    """
    check_kv_dtype(kv_dtype)
    dtype = jnp.dtype(dtype)
    num_blocks = round_up_to_block(capacity) // BLOCK
    shape = (num_rows * num_blocks, num_kv_heads, BLOCK, head_size)
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype

    def empty_layer() -> LayerCache:
        if kv_dtype is None:
            return LayerCache(
                k=jnp.zeros(shape, stored),
                v=jnp.zeros(shape, stored),
                is_written_by_head=is_written_by_head,
            )
        return LayerCache(
            k=jnp.zeros(shape, kv_dtype),
            v=jnp.zeros(shape, kv_dtype),
            k_scale=jnp.ones(shape[:-1], jnp.float32),
            v_scale=jnp.ones(shape[:-1], jnp.float32),
            is_written_by_head=is_written_by_head,
        )

    return KVCache(
        layers=tuple(empty_layer() for _ in range(num_layers)),
        table=jnp.arange(num_rows * num_blocks, dtype=jnp.int32).reshape(num_rows, num_blocks),
        dtype=dtype,
    )


def as_ring(cache: KVCache, ring: Ring, capacity: int) -> KVCache:
    """An empty cache of at most `ring.num_pages` blocks per row, presented as one of `capacity`
    slots per row (rounded up to a block), of which it keeps those that `ring` says. For ragged
    caches only."""
    num_rows, num_pages = cache.table.shape
    block = jnp.arange(round_up_to_block(capacity) // BLOCK, dtype=jnp.int32)
    page = jnp.where(block == 0, 0, 1 + (block - 1) % max(num_pages - 1, 1))
    first = num_pages * jnp.arange(num_rows, dtype=jnp.int32)
    return cache.replace(table=first[:, None] + page[None], ring=ring)


def quantise(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 codes `[..., H]` of vectors `[..., H]`, and the scale fp32 `[...]` of each vector.

    Symmetric: the scale is the vector's largest magnitude over 127, and a code is the number over
    the scale, rounded to even on a tie. A vector of zeros has the scale 1. So has a vector whose
    scale would be subnormal, which processors may flush to zero: its codes are 0. A vector that is
    not finite has the scale NaN, so that every value read from it is NaN.
    """
    wide = values.astype(jnp.float32)
    # NaN is replaced by infinity first, because not every compiler's maximum propagates it.
    magnitude = jnp.where(jnp.abs(wide) < jnp.inf, jnp.abs(wide), jnp.float32(jnp.inf))
    largest = jnp.max(magnitude, axis=-1)
    is_finite = largest < jnp.inf
    # Divisions are written as products with an inverse, because some compilers rewrite them so and
    # some do not.
    scale = largest * jnp.float32(1 / _LARGEST_CODE)
    scale = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, jnp.float32(1))
    codes = jnp.where(is_finite[..., None], wide, jnp.float32(0)) * (1 / scale)[..., None]
    codes = jnp.clip(_round_half_to_even(codes), -_LARGEST_CODE, _LARGEST_CODE)
    return codes.astype(jnp.int8), jnp.where(is_finite, scale, jnp.float32(jnp.nan))


def _round_half_to_even(x: jax.Array) -> jax.Array:
    """Like `jnp.round`, which Pallas' Triton compiler does not have."""
    below = jnp.floor(x)
    rest = x - below
    is_odd = below != 2 * jnp.floor(below / 2)
    return below + ((rest > 0.5) | ((rest == 0.5) & is_odd)).astype(x.dtype)


def dequantise(codes: jax.Array, scale: jax.Array, dtype) -> jax.Array:
    """Vectors `[..., H]` in `dtype` from codes `[..., H]` and scales `[...]`: the product is
    computed in fp32 and then rounded."""
    return (codes.astype(jnp.float32) * scale[..., None]).astype(dtype)


def _to_storage(values: jax.Array, stored: jax.Array) -> jax.Array:
    if values.dtype == stored.dtype:
        return values
    return lax.bitcast_convert_type(values, stored.dtype)


def _from_storage(values: jax.Array) -> jax.Array:
    """Values as they were before `_to_storage`; codes stay codes."""
    if values.dtype != jnp.uint16:
        return values
    return lax.bitcast_convert_type(values, jnp.bfloat16)


def _stored_form(layer: LayerCache, k: jax.Array, v: jax.Array) -> LayerCache:
    """k and v `[..., K, H]` in the form that this layer stores."""
    if not layer.is_quantised:
        return layer.replace(k=k, v=v)
    (k, k_scale), (v, v_scale) = quantise(k), quantise(v)
    return layer.replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def _values(stored: LayerCache, dtype) -> tuple[jax.Array, jax.Array]:
    """k and v in `dtype`, from what was taken out of a layer."""
    if stored.k_scale is None or stored.v_scale is None:
        return stored.k, stored.v
    return (
        dequantise(stored.k, stored.k_scale, dtype),
        dequantise(stored.v, stored.v_scale, dtype),
    )


def _placed(table: Table, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Page numbers, and the slots `[B, ...]` of `positions` `[B, ...]`; -1 stays -1."""
    if not isinstance(table, AlignedTable):
        return table, positions
    first_slot = table.first_slot.reshape(-1, *[1] * (positions.ndim - 1))
    return table.pages, jnp.where(positions >= 0, positions + first_slot, positions)


def positions_of(table: Table, slots: jax.Array) -> jax.Array:
    """The positions at `slots` `[n]`: `[1, n]`, the same for all rows, or for an aligned table `[B,
    n]`, negative in the padding."""
    if not isinstance(table, AlignedTable):
        return slots[None]
    return slots[None] - table.first_slot[:, None]


def slots_of(table: Table, positions: jax.Array) -> jax.Array:
    """The slots `[B, ...]` of `positions` `[B, ...]`."""
    return _placed(table, positions)[1]


def _flat_index(table: jax.Array, slots: jax.Array, num_flat: int, block: int) -> jax.Array:
    """Index `[B, T]` of each slot in the flattened pages; slots outside `[0, S)` get distinct
    indices past the end, where a scatter with `mode="drop"` drops them (-1 would wrap around)."""
    is_inside = (slots >= 0) & (slots < table.shape[1] * block)
    page = jnp.take_along_axis(table, jnp.where(is_inside, slots // block, 0), axis=1)
    outside = num_flat + jnp.arange(slots.size, dtype=jnp.int32).reshape(slots.shape)
    return jnp.where(is_inside, page * block + slots % block, outside)


def write(
    layer: LayerCache, table: Table, k: jax.Array, v: jax.Array, slots: jax.Array
) -> LayerCache:
    """Stores `k`, `v` `[B, T, K, H]` at `slots` `[B, T]` of the rows in `table` `[B, S / block]`.

    Slots of a row are counted from the slot of its position 0. They must be distinct; values at
    negative slots, or slots beyond the row's capacity, are dropped.
    """
    return _put(layer, table, _stored_form(layer, k, v), slots)


def _put(layer: LayerCache, table: Table, new: LayerCache, slots: jax.Array) -> LayerCache:
    """The layer with `new` (k and v `[B, T, K, H]`, scales `[B, T, K]`) stored at `slots` `[B, T]`;
    see `write`."""
    num_pages, num_heads, block, _ = layer.k.shape
    pages, slots = _placed(table, slots)
    index = _flat_index(pages, slots, num_pages * block, block).reshape(-1)

    page, slot, head = index // block, index % block, slice(None)
    if layer.is_written_by_head:
        page, slot, head = page[:, None], slot[:, None], jnp.arange(num_heads)[None]

    def scatter(stored, values):
        values = _to_storage(values, stored).reshape(-1, num_heads, *stored.shape[3:])
        return stored.at[page, head, slot].set(values, mode="drop", unique_indices=True)

    return jax.tree.map(scatter, layer, new)


def read_block(
    layer: LayerCache, table: Table, block_index: jax.Array, dtype
) -> tuple[jax.Array, jax.Array]:
    """k and v `[B, K, block, H]` of the `block_index`-th block of every row in `table`;
    `positions_of` says which positions these are. With indices `[B]` each row reads its own block;
    an index beyond the last block reads the last one."""
    pages = table.pages if isinstance(table, AlignedTable) else table
    if block_index.ndim:
        page = jnp.take_along_axis(pages, block_index[:, None], axis=1, mode="clip")[:, 0]
    else:
        page = lax.dynamic_index_in_dim(pages, block_index, axis=1, keepdims=False)
    return _values(jax.tree.map(lambda stored: _from_storage(stored[page]), layer), dtype)


def read_slots(
    layer: LayerCache, table: Table, slots: jax.Array, dtype
) -> tuple[jax.Array, jax.Array]:
    """k and v `[B, ..., K, H]` at `slots` `[B, ...]`, counted from the slot of position 0; slots
    that the row does not have read some valid slot instead.
    """
    return _values(_take(layer, table, slots), dtype)


def _take(layer: LayerCache, table: Table, slots: jax.Array) -> LayerCache:
    """What is stored at `slots` `[B, ...]`: k and v `[B, ..., K, H]`, or codes and their scales
    `[B, ..., K]`; see `read_slots`."""
    num_pages, _, block, _ = layer.k.shape
    pages, placed = _placed(table, slots)
    inside = jnp.clip(placed, 0, table.shape[1] * block - 1).reshape(slots.shape[0], -1)
    index = _flat_index(pages, inside, num_pages * block, block).reshape(slots.shape)

    def gather(stored):
        return _from_storage(stored[index // block, :, index % block])

    return jax.tree.map(gather, layer)


def move_slots(
    layer: LayerCache, before: Table, source: jax.Array, after: Table, target: jax.Array
) -> LayerCache:
    """The layer after copying KV from slots `source` `[B, T]` of the rows in table `before` to
    slots `target` `[B, T]` of the rows in `after`: bit for bit, even where `write` would quantise.

    Args:
      layer: KV of one layer.
      before: the table that KV is read through.
      source: as in `read_slots`; everything is read before anything is written.
      after: the table that it is written through, for the same rows.
      target: as in `write`.
    """
    return _put(layer, after, _take(layer, before, source), target)


def copy_row(
    cache: KVCache, row: jax.Array, source: KVCache, source_row: jax.Array, num_slots: jax.Array
) -> KVCache:
    """`cache` after copying the first `num_slots` slots of a row of `source`, block by block, to
    the beginning of `row`. Slots up to the end of the last block are copied too; they are garbage
    in both.

    Args:
      row: int32 scalar, a row in the table of `cache`.
      source: a cache with the same layers, dtype and ring (if any); it may have a different number
        of rows.
      source_row: int32 scalar, a row in the table of `source`.
      num_slots: int32 scalar; the cost of copying depends on it, not on the capacity.
    """
    block = cache.layers[0].block
    num_blocks = jnp.minimum((num_slots + block - 1) // block, cache.num_distinct_blocks)

    def copy_block(index, layers):
        target_page, source_page = cache.table[row, index], source.table[source_row, index]

        def copy(stored, values):
            page = lax.dynamic_index_in_dim(values, source_page, keepdims=False)
            return stored.at[target_page].set(page)

        return jax.tree.map(copy, layers, source.layers)

    return cache.replace(layers=lax.fori_loop(0, num_blocks, copy_block, cache.layers))


def move_within(
    layers: tuple[LayerCache, ...], table: Table, source: jax.Array, target: jax.Array
) -> tuple[LayerCache, ...]:
    """All layers after `move_slots` within the rows of one table."""
    return tuple(move_slots(layer, table, source, table, target) for layer in layers)


def commit_path(
    cache: KVCache, start: jax.Array, path: jax.Array, *, move: MoveWithin = move_within
) -> KVCache:
    """Moves the KV of an accepted path into consecutive slots, at most one per level of the path.

    The KV of a path's d-th node is stored at slot `start + 1 + path[d]`, and belongs at `start + 1
    + d`. In the target's cache, `path[d]` is the number of the node in the draft; a draft model may
    store nodes in another order. Two rows, path in brackets, before and after:

        start | root a b c d     path [1, 3]  ->  start | root b d . .
        start | root a b c d     path [0]     ->  start | root a . . .

    Args:
      start: `[B]` int32, slot of the window's first token, counted from the slot of position 0.
      path: `[B, D]` int32, where the node at each depth is stored; -1 past the accepted nodes.
      move: `move_within`, or kernels that do the same.
    """
    depth = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    source = start[:, None] + 1 + path
    moves = (path >= 0) & (path != depth)
    target = jnp.where(moves, start[:, None] + 1 + depth, -1)
    return cache.replace(layers=move(cache.layers, cache.table, source, target))


def poison_uncommitted(cache: KVCache, num_live: jax.Array) -> KVCache:
    """The cache with NaN in every slot except those of each row's positions below `num_live` `[B]`.

    For checks: anything computed from such a slot becomes NaN. `num_live` must cover all rows that
    own pages. In a ring, positions that the newest live query and later ones cannot see are filled
    with NaN too.
    """
    shape = (cache.table.shape[0], cache.capacity)
    every = jnp.broadcast_to(jnp.arange(cache.capacity, dtype=jnp.int32), shape)
    is_kept = every < num_live[:, None]
    if cache.ring is not None:
        first = (num_live - cache.ring.window)[:, None]
        is_kept &= (every < cache.ring.num_sinks) | (every >= first)
    kept = jnp.where(is_kept, every, -1)

    def fill_with_nan(stored):
        if stored.dtype == jnp.int8:  # a scale of NaN makes them NaN
            return stored
        dtype = jnp.bfloat16 if stored.dtype == jnp.uint16 else stored.dtype
        garbage = _to_storage(jnp.full((), jnp.nan, dtype), stored)
        return jnp.broadcast_to(garbage, stored.shape)

    def poison(layer):
        live = _take(layer, cache.table, every)
        return _put(jax.tree.map(fill_with_nan, layer), cache.table, live, kept)

    return cache.replace(layers=tuple(poison(layer) for layer in cache.layers))


def aligned(cache: KVCache) -> KVCache:
    """The cache in the `aligned` layout, with every row's position 0 at slot 0 for now."""
    if isinstance(cache.table, AlignedTable):
        return cache
    if cache.ring is not None:
        raise SettingError(
            f"The layout 'aligned' was given for a cache that keeps {cache.ring.window} positions; "
            "its slots are those of its positions, so use the layout 'ragged'."
        )
    first_slot = jnp.zeros((cache.table.shape[0],), jnp.int32)
    return cache.replace(table=AlignedTable(pages=cache.table, first_slot=first_slot))


def without_padding(cache: KVCache, row: jax.Array) -> KVCache:
    """The cache with position 0 of `row` at slot 0: for a new request, so that its prompt can be
    prefilled independently of the other rows' padding."""
    if not isinstance(cache.table, AlignedTable):
        return cache
    first_slot = cache.table.first_slot.at[row].set(0)
    return cache.replace(table=cache.table.replace(first_slot=first_slot))


def put_table(table: Table, rows: jax.Array, new: Table) -> Table:
    """`table` after rounds that ran on `new`, which holds its `rows` `[n]`: pages stay, padding may
    have changed."""
    if not isinstance(table, AlignedTable) or not isinstance(new, AlignedTable):
        return table
    first_slot = table.first_slot.at[rows].set(new.first_slot, unique_indices=True)
    return table.replace(first_slot=first_slot)


def aligned_first_slot(
    first_slot: jax.Array, num_committed: jax.Array, *, largest: int
) -> jax.Array:
    """The slot `[B]` int32 that position 0 of each row must have for all rows to end at one slot.

    `first_slot + num_committed` is made the same for all rows (invariant I1 of 2510.22876, section
    3.1). If it already is, nothing changes, even if all rows are padded (corollary B.3). Otherwise
    the longest row loses its padding and the others are padded to its length (equation 1).

    Args:
      first_slot: `[B]` int32.
      num_committed: `[B]` int32; 0 for an empty row, which gets 0 and is ignored.
      largest: the largest common end at which a round's window still fits. Beyond it, padding that
        all rows share is removed.
    """
    is_held = num_committed > 0
    end = first_slot + num_committed
    last = jnp.max(jnp.where(is_held, end, 0))
    is_aligned = jnp.all(~is_held | (end == last)) & (last <= largest)
    padding = jnp.max(num_committed) - num_committed
    return jnp.where(is_held, jnp.where(is_aligned, first_slot, padding), 0)


def num_moved(before: jax.Array, after: jax.Array, num_committed: jax.Array) -> jax.Array:
    """`[B]` int32, how many slots' KV moves when `first_slot` `[B]` changes; the newest token has
    none yet."""
    return jnp.where(before == after, 0, jnp.maximum(num_committed - 1, 0))


def realign(cache: KVCache, num_committed: jax.Array, *, largest: int) -> KVCache:
    """The cache with all rows moved to end at one slot, see `aligned_first_slot`; a pure function.

    Two rows (of 4 and 6 tokens, the newest without KV), before and after:

        first slot 2   - - a b c . .     ->   first slot 2   - - a b c . .
        first slot 1   - a b c d e .     ->   first slot 0   a b c d e . .

    KV is moved in place, block by block: rows that shift to the left in ascending order, rows that
    shift to the right in descending order, so that nothing is overwritten before it has been read.
    A ragged cache is returned as it is.

    Args:
      num_committed: `[B]` int32, for all rows in the table; see `aligned_first_slot`.
      largest: see `aligned_first_slot`.
    """
    before = cache.table
    if not isinstance(before, AlignedTable):
        return cache
    block = cache.layers[0].block
    with jax.named_scope("realign"):
        first_slot = aligned_first_slot(before.first_slot, num_committed, largest=largest)
        num_live = num_moved(before.first_slot, first_slot, num_committed)
        num_blocks = -(-num_live // block)
        after = before.replace(first_slot=first_slot)
        is_descending = first_slot > before.first_slot
        within = jnp.arange(block, dtype=jnp.int32)[None]

        def body(index, layers):
            chunk = jnp.where(is_descending, num_blocks - 1 - index, index)
            source = chunk[:, None] * block + within
            moves = (index < num_blocks)[:, None] & (source < num_live[:, None])
            target = jnp.where(moves, source, -1)

            def move(layer):
                return move_slots(layer, before, source, after, target)

            return tuple(move(layer) for layer in layers)

        layers = lax.fori_loop(0, jnp.max(num_blocks), body, cache.layers)
    return cache.replace(layers=layers, table=after)
