"""Attention of a short window as a GPU kernel: split over KV, each row at its own length's cost.

This is `block_attention` for GPUs, written for Pallas' Triton compiler. Elsewhere it is
interpreted, which is slow and meant for tests. XLA reads blocks of KV one after the other, up to
the end of the longest row. Here they are read in parallel, as in flash-decoding (Dao et al., 2023):
a first kernel has one program per row, KV head and split of `SPLIT_LENGTH` slots, and a second one
combines the splits of each row. A program without a live slot ends at once and writes nothing.

It has not run on a GPU yet, so `SPLIT_LENGTH` and the tile sizes are estimates. JAX 0.12 still
accepts Triton kernels, and warns that a later version will not.

Results are as reproducible as those of `block_attention`: the splits, and the order in which they
are summed, depend on absolute slots only, not on the batch or on other entries of the window. Slots
that a query does not see leave its sums unchanged to the bit.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxspec.cache import pages as kv
from jaxspec.kernels.base import Kernels
from jaxspec.kernels.xla import block_attention
from jaxspec.types import Window

SPLIT_LENGTH = 256  # slots: short ones fill a GPU with few rows, long ones leave less to combine
MAX_QUERIES = 128  # query rows of a program, padded: what its registers hold
_MIN_SIZE = 16  # the smallest side of a product on tensor cores
_TILE_BYTES = 16384  # of K, and of V, that a program reads at a time
_LOWEST = -1e30  # finite, for the reason given in `jaxspec.kernels.xla`


def pallas_attention(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Grouped-query attention `[B, T, Q, H]`, as `block_attention` but summed in another order.

    Calls `block_attention` where `is_supported` says no: for trees, long windows (prefill) and head
    sizes that Triton cannot tile. Needs scratch memory for one layer's partial sums, fp32: the
    capacity divided by `SPLIT_LENGTH`, times the padded queries.

    Args:
      queries: this and the arguments up to `sliding_window` are as in `block_attention`.
      layer: KV of this layer.
      table: page numbers of the window's rows.
      window: where the queries stand.
      dtype: dtype of the KV that is read.
      sliding_window: slots that a query sees, or None for all.
      interpret: run in Pallas' interpreter; None does so unless there is a GPU.
    """
    num_rows, window_length, num_query_heads, head_size = queries.shape
    num_heads, block = layer.num_heads, layer.block
    chex.assert_shape(window.positions, (num_rows, window_length))
    group = num_query_heads // num_heads
    if not is_supported(window, group=group, head_size=head_size):
        return block_attention(
            queries, layer, table, window, dtype=dtype, sliding_window=sliding_window
        )
    if interpret is None:
        interpret = jax.default_backend() != "gpu"

    # The queries of a KV head form one tile. Padding has position -1 and sees nothing.
    num_queries = window_length * group
    padded = _padded(num_queries)
    grouped = queries.reshape(num_rows, window_length, num_heads, group, head_size)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_heads, num_queries, head_size)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - num_queries), (0, 0)))
    positions = jnp.repeat(window.positions, group, axis=1)
    positions = jnp.pad(positions, ((0, 0), (0, padded - num_queries)), constant_values=-1)

    is_aligned = isinstance(table, kv.AlignedTable)
    pages = table.pages if is_aligned else table
    first_slot = table.first_slot if is_aligned else jnp.zeros((num_rows,), jnp.int32)
    tile = min(block, pl.next_power_of_2(_TILE_BYTES // (head_size * jnp.dtype(dtype).itemsize)))
    tiles_per_split = max(SPLIT_LENGTH // tile, 1)
    capacity = pages.shape[1] * block
    num_splits = pl.cdiv(capacity, tiles_per_split * tile)
    # Per row: its first tile, one past its last, and the slot of its position 0.
    begin = first_slot
    if sliding_window is not None:
        oldest = jnp.min(window.positions, axis=1) - sliding_window + 1
        begin = begin + jnp.maximum(oldest, 0)
    end = jnp.minimum(first_slot + jnp.max(window.positions, axis=1) + 1, capacity)
    extents = jnp.stack([begin // tile, pl.cdiv(end, tile), first_slot], axis=1)

    whole = pl.BlockSpec()
    of_queries = pl.BlockSpec(
        (None, None, padded, head_size), lambda row, head, *_: (row, head, 0, 0)
    )
    partial_shape = (num_rows, num_heads, num_splits, padded)
    partials = (
        jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        jax.ShapeDtypeStruct((*partial_shape, head_size), jnp.float32),
    )
    of_split = pl.BlockSpec(
        (None, None, None, padded), lambda row, head, split: (row, head, split, 0)
    )
    of_splits = pl.BlockSpec((None, None, num_splits, padded), lambda row, head: (row, head, 0, 0))
    compiler_params = triton.CompilerParams(num_warps=4 if padded <= 32 else 8, num_stages=2)
    highest, total, output = pl.pallas_call(
        functools.partial(
            _attend_split,
            tile=tile,
            tiles_per_split=tiles_per_split,
            block=block,
            dtype=jnp.dtype(dtype),
            sliding_window=sliding_window,
        ),
        grid=(num_rows, num_heads, num_splits),
        in_specs=[
            whole,
            whole,
            pl.BlockSpec((None, padded), lambda row, head, split: (row, 0)),
            of_queries,
            whole,
            whole,
        ],
        out_specs=(
            of_split,
            of_split,
            pl.BlockSpec(
                (None, None, None, padded, head_size),
                lambda row, head, split: (row, head, split, 0, 0),
            ),
        ),
        out_shape=partials,
        compiler_params=compiler_params,
        interpret=interpret,
        name="window_attention",
    )(extents, pages, positions, grouped, layer.k, layer.v)
    combined = pl.pallas_call(
        functools.partial(_combine_splits, tiles_per_split=tiles_per_split),
        grid=(num_rows, num_heads),
        in_specs=[
            whole,
            of_splits,
            of_splits,
            pl.BlockSpec(
                (None, None, num_splits, padded, head_size),
                lambda row, head: (row, head, 0, 0, 0),
            ),
        ],
        out_specs=of_queries,
        out_shape=jax.ShapeDtypeStruct(grouped.shape, queries.dtype),
        compiler_params=compiler_params,
        interpret=interpret,
        name="combine_splits",
    )(extents, highest, total, output)
    combined = combined[:, :, :num_queries].reshape(
        num_rows, num_heads, window_length, group, head_size
    )
    return combined.transpose(0, 2, 1, 3, 4).reshape(queries.shape)


def is_supported(window: Window, *, group: int, head_size: int) -> bool:
    """Whether the kernel can be used: for chains, a head size that is a power of two from 16, and
    at most `MAX_QUERIES` queries per KV head (`T * group`, padded to a power of two)."""
    is_tileable = head_size >= _MIN_SIZE and head_size == pl.next_power_of_2(head_size)
    num_queries = _padded(window.positions.shape[1] * group)
    is_chain = window.paths is None and window.ends is None
    return is_chain and is_tileable and num_queries <= MAX_QUERIES


def _padded(num_queries: int) -> int:
    return max(_MIN_SIZE, pl.next_power_of_2(num_queries))


def _attend_split(
    extents_ref,  # [B, 3]
    pages_ref,  # [B, S / block]
    positions_ref,  # [M], M the padded queries
    queries_ref,  # [M, H]
    k_ref,  # [P, K, block, H]
    v_ref,
    highest_ref,  # [M]
    total_ref,  # [M]
    output_ref,  # [M, H]
    *,
    tile: int,
    tiles_per_split: int,
    block: int,
    dtype: jnp.dtype,
    sliding_window: int | None,
):
    """One row, KV head and split: the highest score, the total weight, and the weighted values."""
    row, head, split = (pl.program_id(axis) for axis in range(3))
    first = jnp.maximum(extents_ref[row, 0], split * tiles_per_split)
    end = jnp.minimum(extents_ref[row, 1], (split + 1) * tiles_per_split)
    first_slot = extents_ref[row, 2]

    @pl.when(first < end)
    def _():
        positions = positions_ref[:]
        queries = queries_ref[:, :]
        num_queries, head_size = queries.shape
        row_end = jnp.max(positions) + 1
        scale = head_size**-0.5

        def body(tile_index, carry):
            highest, total, output = carry
            slot = tile_index * tile
            page = pages_ref[row, slot // block]
            inside = pl.ds(slot % block, tile)
            k = _from_storage(k_ref[page, head, inside, :], dtype)
            v = _from_storage(v_ref[page, head, inside, :], dtype)
            held = slot + jnp.arange(tile, dtype=jnp.int32) - first_slot
            # Garbage may be NaN, and 0 * NaN is NaN, so V is zeroed where no query looks.
            is_live = (held >= 0) & (held < row_end)
            v = jnp.where(is_live[:, None], v, jnp.zeros_like(v))
            visible = (held[None, :] <= positions[:, None]) & (held >= 0)[None, :]
            if sliding_window is not None:
                visible &= held[None, :] > positions[:, None] - sliding_window
            scores = jnp.where(visible, scale * _product(queries, k, 1), -jnp.inf)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
            rescale = jnp.exp(highest - new_highest)
            weights = jnp.exp(scores - new_highest[:, None])
            values = _product(weights.astype(dtype), v, 0)
            return (
                new_highest,
                total * rescale + jnp.sum(weights, axis=1),
                output * rescale[:, None] + values,
            )

        highest_ref[:], total_ref[:], output_ref[:, :] = lax.fori_loop(
            first, end, body, _nothing(num_queries, head_size)
        )


def _combine_splits(
    extents_ref,  # [B, 3]
    highest_ref,  # [splits, M]
    total_ref,  # [splits, M]
    output_ref,  # [splits, M, H]
    combined_ref,  # [M, H]
    *,
    tiles_per_split: int,
):
    """One row and KV head: combines the live splits, in the order of their slots."""
    row = pl.program_id(0)
    first = extents_ref[row, 0] // tiles_per_split
    end = (extents_ref[row, 1] + tiles_per_split - 1) // tiles_per_split

    def body(split, carry):
        highest, total, output = carry
        here = highest_ref[split, :]
        new_highest = jnp.maximum(highest, here)
        rescale, weight = jnp.exp(highest - new_highest), jnp.exp(here - new_highest)
        return (
            new_highest,
            total * rescale + total_ref[split, :] * weight,
            output * rescale[:, None] + output_ref[split, :, :] * weight[:, None],
        )

    _, total, output = lax.fori_loop(first, end, body, _nothing(*combined_ref.shape))
    combined_ref[:, :] = (output / total[:, None]).astype(combined_ref.dtype)


def _nothing(num_queries: int, head_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Highest score, total weight and output before any slot."""
    return (
        jnp.full((num_queries,), _LOWEST, jnp.float32),
        jnp.zeros((num_queries,), jnp.float32),
        jnp.zeros((num_queries, head_size), jnp.float32),
    )


def _product(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """fp32 product over the last axis of `left` and `axis` of `right`."""
    return lax.dot_general(
        left,
        right,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _from_storage(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return values if values.dtype == dtype else lax.bitcast_convert_type(values, dtype)


PALLAS = Kernels(attention=pallas_attention)
