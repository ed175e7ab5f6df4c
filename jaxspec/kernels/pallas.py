"""Attention of a short window as GPU kernels: split over KV, at a cost that depends on each row's
own length.

These are `attention_inputs`, `kv.write` and `block_attention` for GPUs, written in Pallas for
Triton. Elsewhere they are interpreted, which is slow and meant for tests. `write_window` makes the
queries from the projections and writes the window's KV in place. XLA reads blocks of KV one after
the other, up to the end of the longest row. Here they are read in parallel, as in flash-decoding
(Dao et al., 2023): one kernel has a program per row, KV head and split of `SPLIT_LENGTH` slots, and
another combines the splits of each row. A program without a live slot ends at once and writes
nothing. A tree's queries share the splits up to their tails (`Window.tail_start`), which XLA
computes and which are combined as the last split. So are attention sinks before the sliding window.

They have run on GPUs but were not tuned there: `SPLIT_LENGTH` and the tile sizes are estimates. A
long chain (a prefill chunk) goes through them as several rows of short ones. JAX 0.12 still
accepts Triton kernels, and warns that a later version will not.

Results are as reproducible as those of `block_attention`: the splits, and the order in which they
are summed, depend on absolute slots only, not on the batch or on other entries of the window. Slots
that a query does not see leave its sums unchanged to the bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxspec.cache import pages as kv
from jaxspec.kernels.base import Angles, Kernels, axes_of_compiler
from jaxspec.kernels.xla import Attention, Sums, block_attention, sink_sums, tail_sums
from jaxspec.types import Window

try:
    from jax.experimental.pallas import triton as _triton
except ImportError:  # `jaxspec.kernels.mosaic` uses what is here as far as it needs no Triton
    _triton = None
triton: Any = _triton

SPLIT_LENGTH = 256  # slots: short ones fill a GPU with few rows, long ones leave less to combine
MAX_QUERIES = 128  # query rows of a program, padded, that fit into its registers
PART_QUERIES = 64  # query rows of a program that attends to a part of a longer chain
_MIN_SIZE = 16  # the smallest side of a product on tensor cores
_TILE_BYTES = 16384  # of K, and likewise of V, that a program reads at a time
_LOWEST = -1e30  # finite, for the reason given in `jaxspec.kernels.xla`


def pallas_attention(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int | None = None,
    num_sinks: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Grouped-query attention `[B, T, Q, H]`, as `block_attention` but summed in another order.

    Calls `block_attention` where `is_supported` is False: for wide trees, for head sizes that
    Triton cannot tile, and for long chains, which `PallasKernels.attend` splits (`in_parts`). Needs
    scratch memory for one layer's partial sums, fp32: the capacity divided by `SPLIT_LENGTH`, times
    the padded queries.

    Args:
      queries: this and the arguments up to `sliding_window` are as in `block_attention`.
      layer: KV of this layer.
      table: page numbers of the window's rows.
      window: the positions of the queries.
      dtype: dtype of the KV that is read.
      sliding_window: number of slots that a query sees, or None for all.
      num_sinks: number of first slots that it sees as well, or None.
      interpret: static, whether to run in Pallas' interpreter.
    """
    return attend_grouped(
        by_kv_head(queries, layer.num_heads),
        layer,
        table,
        window,
        dtype=dtype,
        sliding_window=sliding_window,
        num_sinks=num_sinks,
        interpret=interpret,
    )


def by_kv_head(queries: jax.Array, num_heads: int) -> jax.Array:
    """Queries `[B, T, Q, H]` as `[B, K, T, G, H]`, with K = `num_heads`."""
    num_rows, window_length, num_query_heads, head_size = queries.shape
    group = num_query_heads // num_heads
    grouped = queries.reshape(num_rows, window_length, num_heads, group, head_size)
    return grouped.transpose(0, 2, 1, 3, 4)


def attend_grouped(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int | None,
    num_sinks: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention `[B, T, Q, H]` of queries by KV head, `[B, K, T, G, H]`; see `pallas_attention`."""
    num_rows, num_heads, window_length, group, head_size = queries.shape
    block = layer.block
    chex.assert_shape(window.positions, (num_rows, window_length))
    if not is_supported(window, group=group, head_size=head_size):
        ungrouped = queries.transpose(0, 2, 1, 3, 4)
        return block_attention(
            ungrouped.reshape(num_rows, window_length, num_heads * group, head_size),
            layer,
            table,
            window,
            dtype=dtype,
            sliding_window=sliding_window,
            num_sinks=num_sinks,
        )
    padded = _padded(window_length * group)
    pages, first_slot = pages_of(table)
    tile = min(block, pl.next_power_of_2(_TILE_BYTES // (head_size * jnp.dtype(dtype).itemsize)))
    tiles_per_split = max(SPLIT_LENGTH // tile, 1)
    capacity = pages.shape[1] * block
    num_splits = pl.cdiv(capacity, tiles_per_split * tile)
    # Per row: its first tile, one past its last, and the slot of its position 0.
    last_read = last_read_together(window)
    begin = first_slot + first_read(window, sliding_window)
    end = jnp.minimum(first_slot + jnp.max(last_read, axis=1) + 1, capacity)
    extents = jnp.stack([begin // tile, pl.cdiv(end, tile), first_slot], axis=1)

    whole, stored = pl.BlockSpec(), jax.tree.leaves(layer)
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
    settings = {
        "compiler_params": triton.CompilerParams(num_warps=4 if padded <= 32 else 8, num_stages=2),
        "interpret": interpret,
    }
    highest, total, output = pl.pallas_call(
        functools.partial(
            _attend_split,
            padded=padded,
            tile=tile,
            tiles_per_split=tiles_per_split,
            block=block,
            dtype=jnp.dtype(dtype),
            sliding_window=sliding_window,
            is_ring=num_sinks is not None,
        ),
        grid=(num_rows, num_heads, num_splits),
        in_specs=[whole] * (5 + len(stored)),
        out_specs=(
            of_split,
            of_split,
            pl.BlockSpec(
                (None, None, None, padded, head_size),
                lambda row, head, split: (row, head, split, 0, 0),
            ),
        ),
        out_shape=partials,
        name="window_attention",
        **settings,
    )(extents, pages, last_read, window.positions, queries, *stored)
    rest = ()
    if window.paths is not None or num_sinks:
        rest = padded_rest_sums(
            queries,
            layer,
            table,
            window,
            dtype=dtype,
            sliding_window=sliding_window,
            num_sinks=num_sinks,
            num_queries=padded,
        )
    of_head = pl.BlockSpec((None, None, padded), lambda row, head: (row, head, 0))
    of_heads = pl.BlockSpec((None, None, padded, head_size), lambda row, head: (row, head, 0, 0))
    return pl.pallas_call(
        functools.partial(_combine_splits, group=group, tiles_per_split=tiles_per_split),
        grid=(num_rows, num_heads),
        in_specs=[
            whole,
            of_splits,
            of_splits,
            pl.BlockSpec(
                (None, None, num_splits, padded, head_size),
                lambda row, head: (row, head, 0, 0, 0),
            ),
            *([of_head, of_head, of_heads] if rest else []),
        ],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(
            (num_rows, window_length, num_heads * group, head_size), queries.dtype
        ),
        name="combine_splits",
        **settings,
    )(extents, highest, total, output, *rest)


def last_read_together(window: Window) -> jax.Array:
    """`[B, T]` int32, the last position that a kernel reads for each query: in a chain the last one
    that the query sees, in a tree the one before its tail, -1 if there is none."""
    if window.paths is not None:
        return window.tail_start - 1
    return window.positions if window.ends is None else window.ends - 1


def first_read(window: Window, sliding_window: int | None) -> jax.Array:
    """`[B]` int32: the first position that any query of a row sees."""
    if sliding_window is None:
        return jnp.zeros_like(window.start)
    return jnp.maximum(jnp.min(window.positions, axis=1) - sliding_window + 1, 0)


def padded_rest_sums(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int | None,
    num_sinks: int | None = None,
    num_queries: int,
) -> Sums:
    """`sink_sums` and `tail_sums` of queries by KV head, in the form of a split's sums: `[B, K, M]`
    twice and `[B, K, M, H]`, with M = `num_queries`, padded with copies of the last query."""
    inputs = queries.transpose(0, 2, 1, 3, 4), layer, table, window
    settings = {"dtype": dtype, "sliding_window": sliding_window}
    if num_sinks:
        settings["num_sinks"] = num_sinks
        sums = sink_sums(*inputs, **settings)
        if window.paths is not None:
            sums = tail_sums(*inputs, **settings, before=sums)
    else:
        sums = tail_sums(*inputs, **settings)

    def padded(values):
        values = jnp.swapaxes(values, 2, 3)  # [B, K, T, G, ...]
        values = values.reshape(*values.shape[:2], -1, *values.shape[4:])
        missing = num_queries - values.shape[2]
        rest = [(0, 0)] * (values.ndim - 3)
        return jnp.pad(values, [(0, 0), (0, 0), (0, missing), *rest], mode="edge")

    highest, total, output = map(padded, sums)
    return highest, total, output


def is_supported(window: Window, *, group: int, head_size: int) -> bool:
    """Whether the kernel can be used: for a head size that is a power of two from 16, and at most
    `MAX_QUERIES` queries per KV head (`T * group`, padded to a power of two)."""
    is_tileable = head_size >= _MIN_SIZE and head_size == pl.next_power_of_2(head_size)
    num_queries = _padded(window.positions.shape[1] * group)
    return triton is not None and is_tileable and num_queries <= MAX_QUERIES


def in_parts(
    queries: jax.Array, table: kv.Table, window: Window
) -> tuple[jax.Array, kv.Table, Window]:
    """A long chain as several rows of short ones, which share the row's pages: its queries
    `[B * n, K, T / n, G, H]`, table and window. Its KV must be written already.

    A part has the most tokens that divide T and have at most `PART_QUERIES` queries per KV head.
    """
    num_rows, num_heads, window_length, group, head_size = queries.shape
    length = math.gcd(window_length, 1 << (max(PART_QUERIES // group, 1).bit_length() - 1))
    num_parts = window_length // length
    queries = queries.reshape(num_rows, num_heads, num_parts, length, group, head_size)
    queries = jnp.swapaxes(queries, 1, 2).reshape(-1, num_heads, length, group, head_size)
    positions = window.positions.reshape(-1, length)
    parts = Window(
        start=positions[:, 0],
        positions=positions,
        slots=window.slots.reshape(-1, length),
        ends=None if window.ends is None else window.ends.reshape(-1, length),
    )
    return queries, jax.tree.map(lambda x: jnp.repeat(x, num_parts, axis=0), table), parts


def _padded(num_queries: int) -> int:
    return max(_MIN_SIZE, pl.next_power_of_2(num_queries))


def pages_of(table: kv.Table) -> tuple[jax.Array, jax.Array]:
    """Page numbers `[B, S / block]`, and the slot of each row's position 0 `[B]`."""
    if isinstance(table, kv.AlignedTable):
        return table.pages, table.first_slot
    return table, jnp.zeros(table.shape[:1], jnp.int32)


def _query_indices(padded: int, window_length: int, group: int) -> tuple[jax.Array, jax.Array]:
    """For each query of a tile `[M]`, its entry of the window and its index in the group. Copies of
    the last query fill the tile; they are stored to the same place, and are bitwise equal."""
    index = jnp.minimum(jnp.arange(padded, dtype=jnp.int32), window_length * group - 1)
    return lax.div(index, group), lax.rem(index, group)


def _attend_split(
    extents_ref,  # [B, 3]
    pages_ref,  # [B, S / block]
    last_ref,  # [B, T], the last position that each query reads here
    positions_ref,  # [B, T]
    queries_ref,  # [B, K, T, G, H]
    k_ref,  # [P, K, block, H]
    v_ref,
    *references,  # for codes their scales, [P, K, block] twice; then highest, total and output
    padded: int,
    tile: int,
    tiles_per_split: int,
    block: int,
    dtype: jnp.dtype,
    sliding_window: int | None,
    is_ring: bool,
):
    """One row, KV head and split: the highest score, the total weight, and the weighted values."""
    *scale_refs, highest_ref, total_ref, output_ref = references  # [M] twice, [M, H]; M queries
    k_scale_ref, v_scale_ref = scale_refs or (None, None)
    row, head, split = (pl.program_id(axis) for axis in range(3))
    first = jnp.maximum(extents_ref[row, 0], split * tiles_per_split)
    end = jnp.minimum(extents_ref[row, 1], (split + 1) * tiles_per_split)
    first_slot = extents_ref[row, 2]

    @pl.when(first < end)
    def _():
        *_, window_length, group, head_size = queries_ref.shape
        entry, member = _query_indices(padded, window_length, group)
        last, positions = last_ref[row, entry], positions_ref[row, entry]
        queries = queries_ref[row, head, entry, member, :]
        row_end = jnp.max(last) + 1
        scale = head_size**-0.5

        def body(tile_index, carry):
            highest, total, output = carry
            slot = tile_index * tile
            page = pages_ref[row, slot // block]
            inside = pl.ds(slot % block, tile)
            k = _read(k_ref, k_scale_ref, (page, head, inside), dtype)
            v = _read(v_ref, v_scale_ref, (page, head, inside), dtype)
            held = slot + jnp.arange(tile, dtype=jnp.int32) - first_slot
            # Garbage may be NaN, and 0 * NaN is NaN, so V is zeroed where no query looks.
            is_live = (held >= 0) & (held < row_end)
            if is_ring and sliding_window is not None:
                is_live &= held > jnp.min(positions) - sliding_window
            v = jnp.where(is_live[:, None], v, jnp.zeros_like(v))
            visible = (held[None, :] <= last[:, None]) & (held >= 0)[None, :]
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
            first, end, body, _nothing(padded, head_size)
        )


def _combine_splits(
    extents_ref,  # [B, 3]
    highest_ref,  # [splits, M]
    total_ref,  # [splits, M]
    output_ref,  # [splits, M, H]
    *references,  # sinks and tails, if any, [M] twice and [M, H]; at last the heads, [B, T, Q, H]
    group: int,
    tiles_per_split: int,
):
    """One row and KV head: combines the live splits, in the order of their slots, and the other
    parts."""
    *rest, combined_ref = references
    row, head = pl.program_id(0), pl.program_id(1)
    first = extents_ref[row, 0] // tiles_per_split
    end = (extents_ref[row, 1] + tiles_per_split - 1) // tiles_per_split

    def added(carry, here, total_here, output_here):
        highest, total, output = carry
        new_highest = jnp.maximum(highest, here)
        rescale, weight = jnp.exp(highest - new_highest), jnp.exp(here - new_highest)
        return (
            new_highest,
            total * rescale + total_here * weight,
            output * rescale[:, None] + output_here * weight[:, None],
        )

    def body(split, carry):
        return added(carry, highest_ref[split, :], total_ref[split, :], output_ref[split, :, :])

    padded, head_size = output_ref.shape[1:]
    sums = lax.fori_loop(first, end, body, _nothing(padded, head_size))
    if rest:
        sums = added(sums, *(reference[...] for reference in rest))
    _, total, output = sums
    entry, member = _query_indices(padded, combined_ref.shape[1], group)
    combined = (output / total[:, None]).astype(combined_ref.dtype)
    combined_ref[row, entry, head * group + member, :] = combined


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


def _read(stored_ref, scale_ref, slots, dtype: jnp.dtype) -> jax.Array:
    """Keys or values `[n, H]` of some slots, dequantised if they are codes with scales."""
    values = stored_ref[(*slots, slice(None))]
    if scale_ref is not None:
        return kv.dequantise(values, scale_ref[slots], dtype)
    return values if values.dtype == dtype else lax.bitcast_convert_type(values, dtype)


def write_window(
    qkv: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    angles: Angles,
    *,
    is_interleaved: bool,
    bias: jax.Array | None,
    query_norm: jax.Array | None,
    key_norm: jax.Array | None,
    epsilon: float,
    interpret: bool = False,
) -> tuple[jax.Array, kv.LayerCache]:
    """Queries `[B, K, T, G, H]`, and the layer's KV with the window's own written in place.

    One kernel for what `Kernels.attend` does before the attention; arguments as there.
    """
    num_rows, window_length, num_heads, group_and_kv, head_size = qkv.shape
    pages, _ = pages_of(table)
    slots = kv.slots_of(table, window.slots)
    cos, sin = (x.reshape(num_rows, window_length, -1).astype(jnp.float32) for x in angles)
    rest = ((0, 0), (0, 0), (0, head_size - cos.shape[2]))
    cos, signed_sin = jnp.pad(cos, rest, constant_values=1.0), jnp.pad(sin, rest)
    optional = {"bias": bias, "query_norm": query_norm, "key_norm": key_norm}
    given = {name: x for name, x in optional.items() if x is not None}

    whole = pl.BlockSpec()
    stored, form = jax.tree.flatten(layer)
    inputs = (pages, slots, qkv, cos, signed_sin, *given.values(), *stored)
    queries, *written = pl.pallas_call(
        functools.partial(
            _write_window,
            given=tuple(given),
            num_stored=len(stored),
            rotary_size=angles[0].shape[-1] * angles[0].shape[-2],
            is_interleaved=is_interleaved,
            epsilon=epsilon,
        ),
        grid=(num_rows, window_length, num_heads),
        in_specs=[whole] * len(inputs),
        out_specs=(whole,) * (1 + len(stored)),
        out_shape=(
            jax.ShapeDtypeStruct(
                (num_rows, num_heads, window_length, group_and_kv - 2, head_size), qkv.dtype
            ),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in stored),
        ),
        input_output_aliases={len(inputs) - len(stored) + i: 1 + i for i in range(len(stored))},
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="write_window",
    )(*inputs)
    return queries, jax.tree.unflatten(form, written)


def _write_window(
    pages_ref,  # [B, S / block]
    slots_ref,  # [B, T]
    qkv_ref,  # [B, T, K, G + 2, H]
    cos_ref,  # [B, T, H], 1 where nothing is rotated
    signed_sin_ref,  # [B, T, H], 0 there
    *references,
    given: tuple[str, ...],
    num_stored: int,
    rotary_size: int,
    is_interleaved: bool,
    epsilon: float,
):
    """One entry of a row's window, and one KV head."""
    # The bias [K, G + 2, H] and the norms [H], if given; K and V [P, K, block, H] and any scales
    # [P, K, block] before the call; then the queries [B, K, T, G, H], and K, V and scales after it.
    optional, queries_ref = references[: len(given)], references[len(given) + num_stored]
    k_ref, v_ref, *scale_refs = references[-num_stored:]
    optional_refs = dict(zip(given, optional, strict=True))
    row, entry, head = (pl.program_id(axis) for axis in range(3))
    group, head_size = queries_ref.shape[3:]
    block = k_ref.shape[2]
    component = jnp.arange(head_size, dtype=jnp.int32)
    if is_interleaved:
        partner = component ^ 1
    else:
        partner = lax.rem(component + rotary_size // 2, rotary_size)
    partner = jnp.where(component < rotary_size, partner, component)

    def projection(index, components):
        x = qkv_ref[row, entry, head, index, components]
        return x + optional_refs["bias"][head, index, components] if "bias" in given else x

    def rotated(index, norm):
        def normed(components):
            x = projection(index, components)
            return optional_refs[norm][components] * (x.astype(jnp.float32) * scale).astype(x.dtype)

        if norm in given:
            wide = projection(index, component).astype(jnp.float32)
            scale = lax.rsqrt(jnp.sum(wide * wide) / head_size + jnp.float32(epsilon))
            x, other = normed(component), normed(partner)
        else:
            x, other = projection(index, component), projection(index, partner)
        turned = x.astype(jnp.float32) * cos_ref[row, entry, :]
        turned += other.astype(jnp.float32) * signed_sin_ref[row, entry, :]
        return turned.astype(x.dtype)

    for member in range(group):
        queries_ref[row, head, entry, member, :] = rotated(member, "query_norm")

    slot = slots_ref[row, entry]

    @pl.when((slot >= 0) & (slot < pages_ref.shape[1] * block))
    def _():
        keys, values = rotated(group, "key_norm"), projection(group + 1, component)
        # As in `Kernels.attend`: 0 * NaN is NaN, so V must be finite; whoever sees it gets the key.
        is_finite = jnp.abs(values) < jnp.inf
        keys = jnp.where(is_finite, keys, jnp.full_like(keys, jnp.nan))
        values = jnp.where(is_finite, values, jnp.zeros_like(values))
        page, inside = pages_ref[row, lax.div(slot, block)], lax.rem(slot, block)
        if scale_refs:
            for scale_ref, stored_ref, x in zip(
                scale_refs, (k_ref, v_ref), (keys, values), strict=True
            ):
                codes, scale = kv.quantise(x)
                stored_ref[page, head, inside, :], scale_ref[page, head, inside] = codes, scale
        else:
            k_ref[page, head, inside, :] = _to_storage(keys, k_ref.dtype)
            v_ref[page, head, inside, :] = _to_storage(values, v_ref.dtype)


def _to_storage(values: jax.Array, stored: jnp.dtype) -> jax.Array:
    return values if values.dtype == stored else lax.bitcast_convert_type(values, stored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PallasKernels(Kernels):
    """The kernels above, and XLA's where they do not apply.

    Attributes:
      grouped_attention: see `attend_grouped`.
    """

    grouped_attention: Attention = attend_grouped
    platform: str = "gpu"

    def on(self, platform: str) -> PallasKernels:
        """These kernels for a GPU, or interpreted for another platform."""
        own: Any = super().on(platform)
        if platform == "gpu":
            return own
        return dataclasses.replace(
            own,
            attention=functools.partial(self.attention, interpret=True),
            grouped_attention=functools.partial(self.grouped_attention, interpret=True),
        )

    @functools.partial(
        jax.jit,
        static_argnums=0,
        static_argnames=("dtype", "is_interleaved", "epsilon", "sliding_window", "num_sinks"),
    )
    def attend(
        self,
        qkv: jax.Array,
        layer: kv.LayerCache,
        table: kv.Table,
        window: Window,
        angles: Angles,
        *,
        dtype: jnp.dtype,
        sliding_window: int | None,
        num_sinks: int | None = None,
        **settings,
    ) -> tuple[jax.Array, kv.LayerCache]:
        """As `Kernels.attend`. Jitted, so that the kernels are lowered once for all layers of a
        program that are alike; XLA inlines the calls."""
        span: dict[str, Any] = {"sliding_window": sliding_window}
        if num_sinks is not None:
            span["num_sinks"] = num_sinks
        axes = axes_of_compiler()
        if axes:
            return self._attend_on_shards(
                axes, qkv, layer, table, window, angles, dtype=dtype, **span, **settings
            )
        one = Window(start=window.start, positions=window.positions[:, :1], slots=window.slots)
        fits, one_fits = (
            self.takes(qkv, layer, each, angles, **settings) for each in (window, one)
        )
        is_long_chain = window.paths is None and one_fits
        if qkv.dtype != dtype or not (fits or is_long_chain):
            return super().attend(
                qkv,
                layer,
                table,
                window,
                angles,
                dtype=dtype,
                **span,
                **settings,
            )
        queries, layer = self.write(qkv, layer, table, window, angles, **settings)
        if not fits:
            queries, table, window = in_parts(queries, table, window)
        heads = self.grouped_attention(queries, layer, table, window, dtype=dtype, **span)
        return heads.reshape(*qkv.shape[:2], -1, qkv.shape[4]), layer

    def _attend_on_shards(
        self,
        axes: frozenset[str],
        qkv: jax.Array,
        layer: kv.LayerCache,
        table: kv.Table,
        window: Window,
        angles: Angles,
        *,
        bias: jax.Array | None,
        query_norm: jax.Array | None,
        key_norm: jax.Array | None,
        **settings,
    ) -> tuple[jax.Array, kv.LayerCache]:
        """`attend` on each device of these mesh axes, for its own KV heads and their queries; for
        all heads if the cache is not split. Heads do not depend on each other, so devices need
        nothing of each other, and bits are those of one device."""
        heads_axis = layer.heads_axis
        heads, pages = P(None, None, heads_axis), P(None, heads_axis)

        def attend(qkv, layer, bias, table, window, angles, query_norm, key_norm):
            norms = {"query_norm": query_norm, "key_norm": key_norm}
            return self.attend(qkv, layer, table, window, angles, bias=bias, **norms, **settings)

        return jax.shard_map(
            attend,
            in_specs=(heads, pages, P(heads_axis), *[P()] * 5),
            out_specs=(heads, pages),
            axis_names=axes,
            check_vma=False,
        )(qkv, layer, bias, table, window, angles, query_norm, key_norm)

    def takes(
        self, qkv: jax.Array, layer: kv.LayerCache, window: Window, angles: Angles, **settings
    ) -> bool:
        """Whether the kernels can be used for this window; arguments as in `attend`."""
        return is_supported(window, group=qkv.shape[3] - 2, head_size=qkv.shape[4])

    def write(
        self,
        qkv: jax.Array,
        layer: kv.LayerCache,
        table: kv.Table,
        window: Window,
        angles: Angles,
        **settings,
    ) -> tuple[jax.Array, kv.LayerCache]:
        """`write_window` for projections of a window that is taken."""
        interpret = self.platform != "gpu"
        return write_window(qkv, layer, table, window, angles, interpret=interpret, **settings)


if triton is not None:
    PALLAS = PallasKernels(attention=pallas_attention)
