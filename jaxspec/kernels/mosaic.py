"""A window's KV and attention as kernels for Hopper GPUs, written in Pallas for Mosaic GPU.

`write_window` makes the queries from the projections and writes the window's KV in place. In the
attention a program computes all queries of a row and KV head over one split of the row's slots,
with warpgroup products. KV is copied through the page table, `TILE` slots at a time and several
tiles ahead of their use; a program copies no further than its queries see, and a program without a
live slot ends at once and writes nothing. Splits are long, so that chains that fit into one need no
second kernel; otherwise another kernel combines the splits with the parts that XLA computes: the
tails of a tree and attention sinks (`tail_sums` and `sink_sums` of `jaxspec.kernels.xla`).

A query's bits depend on its own row only, and not on the width of the window: each query is a row
of the same products of 64, tiles and splits begin at absolute slots and are summed in their order,
and slots that a query does not see leave its sums unchanged to the bit.

`SPLIT_LENGTH` and `TILE` are estimates: the attention has run on GPUs, but was not tuned there;
`write_window` has only been compiled for one, and interpreted. The warpgroup products exist on
compute capability 9 only. Elsewhere, where `is_supported` is False, and for KV in int8,
`jaxspec.kernels.pallas` is used, or XLA's kernels in a JAX without Triton.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.cache import pages as kv
from jaxspec.kernels import pallas as triton
from jaxspec.kernels.base import Angles
from jaxspec.types import Window

SPLIT_LENGTH = 2048  # slots
TILE = 64  # slots that are multiplied at a time
_NUM_ROWS = 64  # rows of a product: what a warpgroup multiplies at once
_BYTES_AHEAD = 131072  # of KV copied ahead into shared memory,
_TILES_AHEAD = 8  # in at most this many tiles
_BY_QUERY = plgpu.Layout.WGMMA.reduce(1)  # layout of one value per query
_LOWEST = -1e30  # finite, for the reason given in `jaxspec.kernels.xla`


def mosaic_attention(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int | None = None,
    num_sinks: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Grouped-query attention `[B, T, Q, H]`, as `block_attention` but summed in another order.

    Calls `pallas_attention` where `is_supported` is False, and for KV in int8. A tree, or a
    capacity of more than `SPLIT_LENGTH`, needs scratch memory for one layer's partial sums, fp32:
    the number of splits, times the queries padded to 64.

    Args:
      queries: this and the arguments up to `sliding_window` are as in `block_attention`.
      layer: KV of this layer.
      table: page numbers of the window's rows.
      window: the positions of the queries.
      dtype: dtype of the KV that is read.
      sliding_window: number of slots that a query sees, or None for all.
      num_sinks: number of first slots that it sees as well, or None.
      interpret: `InterpretGPUParams` of Pallas' interpreter (from JAX 0.12), or None to compile.
    """
    return attend_grouped(
        triton.by_kv_head(queries, layer.num_heads),
        layer,
        table,
        window,
        dtype=dtype,
        sliding_window=sliding_window,
        num_sinks=num_sinks,
        interpret=interpret,
    )


def attend_grouped(
    queries: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    dtype: jnp.dtype,
    sliding_window: int | None,
    num_sinks: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Attention `[B, T, Q, H]` of queries by KV head, `[B, K, T, G, H]`; see `mosaic_attention`."""
    num_rows, num_heads, window_length, group, head_size = queries.shape
    if layer.is_quantised or not is_supported(
        window, group=group, head_size=head_size, dtype=dtype
    ):
        return triton.attend_grouped(
            queries,
            layer,
            table,
            window,
            dtype=dtype,
            sliding_window=sliding_window,
            num_sinks=num_sinks,
            interpret=bool(interpret),
        )
    chex.assert_shape(window.positions, (num_rows, window_length))
    dtype, block = jnp.dtype(dtype), layer.block
    pages, first_slot = triton.pages_of(table)
    capacity = pages.shape[1] * block
    num_splits = pl.cdiv(capacity, SPLIT_LENGTH)
    # A chain that fits into one split needs no partial sums, unless there are sinks besides.
    is_whole = num_splits == 1 and window.paths is None and not num_sinks
    # Per row: its first tile, one past its last, one past its last position, the slot of its first;
    # of a ring also the first position that is read.
    last_read = triton.last_read_together(window)
    begin = first_slot + triton.first_read(window, sliding_window)
    end_position = jnp.max(last_read, axis=1) + 1
    end = jnp.minimum(first_slot + end_position, capacity)
    extents = [begin // TILE, pl.cdiv(end, TILE), end_position, first_slot]
    extents = jnp.stack([*extents, begin] if num_sinks is not None else extents, axis=1)

    num_queries = window_length * group
    padded = _padded(num_queries)
    # For each query the first position that it sees, and one past the last that is read for it.
    first = jnp.zeros_like(last_read)
    if sliding_window is not None:
        first = jnp.maximum(window.positions - sliding_window + 1, 0)
    read = jnp.repeat(jnp.stack([first, last_read + 1], axis=1), group, axis=2)
    read = jnp.pad(read, ((0, 0), (0, 0), (0, padded - num_queries)))  # padding sees nothing
    k, v = (
        x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype) for x in (layer.k, layer.v)
    )

    swizzle = plgpu.find_swizzle(8 * dtype.itemsize * head_size)
    tiled = (
        plgpu.TilingTransform((8, swizzle // dtype.itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    num_stages = min(_BYTES_AHEAD // (2 * TILE * head_size * dtype.itemsize), _TILES_AHEAD)
    staged = plgpu.SMEM((padded, head_size), dtype)
    heads = jax.ShapeDtypeStruct((num_rows, window_length, num_heads, group, head_size), dtype)
    partial_shape = (num_rows, num_heads, num_splits, padded)
    partials = (
        jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        jax.ShapeDtypeStruct((*partial_shape, head_size), jnp.float32),
    )
    settings = {
        "compiler_params": plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        "interpret": interpret,
    }
    made = plgpu.kernel(
        functools.partial(_attend_split, block=block),
        out_type=(heads,) if is_whole else partials,
        grid=(num_rows, num_heads, num_splits),
        grid_names=("row", "head", "split"),
        scratch_types={
            "staged_s": staged,
            "queries_s": plgpu.SMEM((padded, head_size), dtype, transforms=tiled),
            "k_s": plgpu.SMEM((num_stages, TILE, head_size), dtype, transforms=tiled),
            "v_s": plgpu.SMEM((num_stages, TILE, head_size), dtype, transforms=tiled),
            "weights_s": plgpu.SMEM((padded, TILE), dtype, transforms=tiled),
            "read_s": plgpu.SMEM((2, padded), jnp.int32),
            "queries_loaded": plgpu.Barrier(num_arrivals=2),
            "k_loaded": plgpu.Barrier(num_barriers=num_stages),
            "v_loaded": plgpu.Barrier(num_barriers=num_stages),
        },
        kernel_name="window_attention",
        **settings,
    )(extents, read, pages, queries.reshape(num_rows, num_heads, -1, head_size), k, v)
    if not is_whole:
        rest = ()
        if window.paths is not None or num_sinks:
            rest = triton.padded_rest_sums(
                queries,
                layer,
                table,
                window,
                dtype=dtype,
                sliding_window=sliding_window,
                num_sinks=num_sinks,
                num_queries=padded,
            )
        made = plgpu.kernel(
            _combine_splits,
            out_type=(heads,),
            grid=(num_rows, num_heads),
            grid_names=("row", "head"),
            scratch_types={"staged_s": staged},
            kernel_name="combine_splits",
            **settings,
        )(extents, *made, *rest)
    [heads] = made
    return heads.reshape(num_rows, window_length, num_heads * group, head_size)


def write_window(
    qkv: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    angles: Angles,
    *,
    is_interleaved: bool = False,
    bias: jax.Array | None,
    query_norm: jax.Array | None,
    key_norm: jax.Array | None,
    epsilon: float,
    interpret: Any = None,
) -> tuple[jax.Array, kv.LayerCache]:
    """Queries `[B, K, T, G, H]`, and the layer's KV with the window's own written in place.

    As the function of this name in `jaxspec.kernels.pallas`, where `can_write` is True. A program
    makes one query head, or the keys and values, of a KV head for `_NUM_ROWS` tokens.
    """
    assert can_write(qkv, layer, angles, is_interleaved=is_interleaved)
    num_rows, window_length, num_heads, group_and_kv, head_size = qkv.shape
    num_tokens, group = num_rows * window_length, group_and_kv - 2
    tile = min(num_tokens, _NUM_ROWS)
    half = angles[0].shape[-1]
    # Each token's cos and sin, and where its KV goes: the page times the block plus the slot in it,
    # or -1. At least a tile, so that all are copied in the same way.
    cos, sin = (x[..., -1, :].reshape(num_tokens, half).astype(jnp.float32) for x in angles)
    pages, slots = triton.pages_of(table)[0], kv.slots_of(table, window.slots)
    is_inside = (slots >= 0) & (slots < pages.shape[1] * layer.block)
    page = jnp.take_along_axis(pages, jnp.where(is_inside, slots // layer.block, 0), axis=1)
    places = jnp.where(is_inside, page * layer.block + slots % layer.block, -1)
    optional = {"bias": bias, "query_norm": query_norm, "key_norm": key_norm}
    given = {name: x for name, x in optional.items() if x is not None}

    missing = max(_NUM_ROWS - num_tokens, 0)
    cos, sin = (jnp.pad(x, ((0, missing), (0, 0))) for x in (cos, sin))
    places = jnp.pad(places.reshape(-1), (0, missing))

    # Copies to and from shared memory begin at multiples of 128 bytes.
    stride = pl.cdiv(head_size * qkv.dtype.itemsize, 128) * 128 // qkv.dtype.itemsize
    scratch = {
        "loaded": plgpu.Barrier(num_arrivals=5),
        "projections_s": plgpu.SMEM((2, _NUM_ROWS, head_size), qkv.dtype),
        "cos_s": plgpu.SMEM((_NUM_ROWS, half), jnp.float32),
        "sin_s": plgpu.SMEM((_NUM_ROWS, half), jnp.float32),
        "places_s": plgpu.SMEM((_NUM_ROWS,), jnp.int32),
        "queries_s": plgpu.SMEM((_NUM_ROWS, stride), qkv.dtype),
        "k_s": plgpu.SMEM((_NUM_ROWS, stride), layer.k.dtype),
        "v_s": plgpu.SMEM((_NUM_ROWS, stride), layer.v.dtype),
    }
    body = functools.partial(
        _write_window, given=tuple(given), window_length=window_length, epsilon=epsilon
    )
    k_ref, v_ref = jax.new_ref(layer.k), jax.new_ref(layer.v)  # written in place
    # `plgpu.kernel` takes such references from JAX 0.11 on only.
    write: Any = pl.kernel(
        lambda *references: pl.run_scoped(functools.partial(body, *references), **scratch),
        out_type=jax.ShapeDtypeStruct(
            (num_rows, num_heads, window_length, group, head_size), qkv.dtype
        ),
        mesh=plgpu.Mesh(
            grid=(pl.cdiv(num_tokens, tile), num_heads, group + 1),
            grid_names=("tile", "head", "member"),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        name="write_window",
        interpret=interpret or False,
    )
    projections = qkv.reshape(num_tokens, *qkv.shape[2:])
    queries = write(k_ref, v_ref, places, projections, cos, sin, *given.values())
    return queries, layer.replace(k=jax.freeze(k_ref), v=jax.freeze(v_ref))


def can_write(
    qkv: jax.Array, layer: kv.LayerCache, angles: Angles, *, is_interleaved: bool
) -> bool:
    """Whether `write_window` can be used: for bf16 or fp16, KV in the same dtype, and rotated pairs
    from two halves, each a multiple of 8 numbers, as is what is not rotated. A copy of projections
    of a tile of tokens must be a multiple of 128 bytes."""
    num_tokens, head_size = qkv.shape[0] * qkv.shape[1], qkv.shape[-1]
    half = angles[0].shape[-1]
    is_tileable = not is_interleaved and half % 8 == 0 and head_size % 8 == 0 and head_size <= 256
    num_bytes = min(num_tokens, _NUM_ROWS) * head_size * qkv.dtype.itemsize
    is_stored = not layer.is_quantised and layer.k.dtype.itemsize == qkv.dtype.itemsize
    is_half = qkv.dtype in (jnp.bfloat16, jnp.float16)
    return is_tileable and is_stored and is_half and num_bytes % 128 == 0


def _write_window(
    k_ref,  # [P, K, block, H]
    v_ref,
    places_ref,  # [n], n tokens, or `_NUM_ROWS` if these are more
    qkv_ref,  # [n, K, G + 2, H]
    cos_ref,  # [n, rotated / 2], as above
    sin_ref,  # [n, rotated / 2]
    *references,
    given: tuple[str, ...],
    window_length: int,
    epsilon: float,
    loaded,
    projections_s,
    cos_s,
    sin_s,
    places_s,
    queries_s,
    k_s,
    v_s,
):
    """One query head, or at last the key and value, of a KV head, for up to `_NUM_ROWS` tokens."""
    # The bias [K, G + 2, H] and the norms [H], if given; then the queries [B, K, T, G, H].
    *optional, queries_ref = references
    optional_refs = dict(zip(given, optional, strict=True))
    head, member = lax.axis_index("head"), lax.axis_index("member")
    num_tokens, _, group_and_kv, head_size = qkv_ref.shape
    half, group, block = cos_ref.shape[1], group_and_kv - 2, k_ref.shape[2]
    tile = min(num_tokens, _NUM_ROWS)
    # The last tile begins earlier, so that nothing is read past the end, and writes what is left.
    begin = lax.axis_index("tile") * tile
    first = jnp.minimum(begin, num_tokens - tile)
    tokens, inside = pl.ds(first, tile), pl.ds(0, tile)
    parts = [slice(0, half), slice(half, 2 * half), slice(2 * half, head_size)]
    parts = [part for part in parts if part.start < part.stop]

    last = jnp.minimum(member + 1, group + 1)
    for which, index in enumerate((member, last)):
        plgpu.copy_gmem_to_smem(
            qkv_ref.at[tokens, head, index], projections_s.at[which, inside], loaded
        )
    for reference, copied_s in ((cos_ref, cos_s), (sin_ref, sin_s), (places_ref, places_s)):
        plgpu.copy_gmem_to_smem(reference.at[pl.ds(first, _NUM_ROWS)], copied_s, loaded)
    plgpu.barrier_wait(loaded)

    def of_columns(reference, part):
        values = _load(reference.at[part], plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)
        return lax.broadcast_in_dim(values, (_NUM_ROWS, part.stop - part.start), [1])

    def projection(which, index):
        """In fp32, part by part."""
        dtype = projections_s.dtype
        for part in parts:
            x = _load(projections_s.at[which, :, part], plgpu.Layout.WGMMA).astype(jnp.float32)
            if "bias" in given:
                x += of_columns(optional_refs["bias"].at[head, index], part)
                x = x.astype(dtype).astype(jnp.float32)
            yield x

    def rotated(norm):
        dtype = projections_s.dtype
        x = list(projection(0, member))
        if norm in given:
            total = sum(jnp.sum(each * each, axis=1) for each in x)
            scale = lax.rsqrt(total / head_size + epsilon)
            for i, part in enumerate(parts):
                each = x[i] * lax.broadcast_in_dim(scale, x[i].shape, [0])
                each = each.astype(dtype).astype(jnp.float32)
                each *= of_columns(optional_refs[norm], part)
                x[i] = each.astype(dtype).astype(jnp.float32)
        cos, sin = (_load(reference, plgpu.Layout.WGMMA) for reference in (cos_s, sin_s))
        x[:2] = x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin
        return [each.astype(dtype) for each in x]

    def stage(staged_s, values):
        for part, each in zip(parts, values, strict=True):
            stored = staged_s.dtype
            each = each if each.dtype == stored else lax.bitcast_convert_type(each, stored)
            _store(staged_s.at[:, part], each)
        plgpu.commit_smem()

    @pl.when(member < group)
    def _():
        stage(queries_s, rotated("query_norm"))

        @pl.loop(begin - first, tile)
        def _(at):
            row, entry = lax.div(first + at, window_length), lax.rem(first + at, window_length)
            plgpu.copy_smem_to_gmem(
                queries_s.at[at, pl.ds(0, head_size)], queries_ref.at[row, head, entry, member]
            )

    @pl.when(member == group)
    def _():
        # As in `Kernels.attend`: 0 * NaN is NaN, so V must be finite; whoever sees it gets the key.
        keys, values = rotated("key_norm"), []
        for i, value in enumerate(projection(1, group + 1)):
            is_finite = jnp.abs(value) < jnp.inf
            keys[i] = jnp.where(is_finite, keys[i], jnp.full_like(keys[i], jnp.nan))
            values.append(jnp.where(is_finite, value, 0.0).astype(projections_s.dtype))
        stage(k_s, keys)
        stage(v_s, values)

        @pl.loop(begin - first, tile)
        def _(at):
            place = places_s[at]

            @pl.when(place >= 0)
            def _():
                page, slot = lax.div(place, block), lax.rem(place, block)
                for staged_s, reference in ((k_s, k_ref), (v_s, v_ref)):
                    plgpu.copy_smem_to_gmem(
                        staged_s.at[at, pl.ds(0, head_size)], reference.at[page, head, slot]
                    )

    plgpu.wait_smem_to_gmem(0)


def is_supported(window: Window, *, group: int, head_size: int, dtype: jnp.dtype) -> bool:
    """Whether the kernel can be used: for bf16 or fp16, at most 128 queries per KV head
    (`T * group`), and heads whose size is a multiple of 16, up to 128, or 256 with at most 64
    queries. The heads of a group must fill multiples of 128 bytes, as copies to and from shared
    memory do."""
    dtype, padded = jnp.dtype(dtype), _padded(window.positions.shape[1] * group)
    is_tileable = head_size % 16 == 0 and (group * head_size * dtype.itemsize) % 128 == 0
    fits = padded <= 128 and head_size <= 256 and padded * head_size <= 128 * 128
    return dtype in (jnp.bfloat16, jnp.float16) and is_tileable and fits


def _padded(num_queries: int) -> int:
    return pl.cdiv(num_queries, _NUM_ROWS) * _NUM_ROWS


def _attend_split(
    extents_ref,  # [B, 4 or 5]
    read_ref,  # [B, 2, M], M the padded queries
    pages_ref,  # [B, S / block]
    queries_ref,  # [B, K, T * G, H]
    k_ref,  # [P, K, block, H]
    v_ref,
    *outputs,
    staged_s,
    queries_s,
    k_s,
    v_s,
    weights_s,
    read_s,
    queries_loaded,
    k_loaded,
    v_loaded,
    block: int,
):
    """One row, KV head and split: the heads or, if parts are still to be combined, the highest
    score, the total weight and the weighted values."""
    # The outputs are `[B, T, K, G, H]`, or `[B, K, splits, M]` twice and `[B, K, splits, M, H]`.
    is_partial = len(outputs) == 3
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    num_stages, _, head_size = k_s.shape
    padded, num_queries = read_s.shape[1], queries_ref.shape[2]
    tiles_per_split = SPLIT_LENGTH // TILE
    first = jnp.maximum(extents_ref[row, 0], split * tiles_per_split)
    end = jnp.minimum(extents_ref[row, 1], (split + 1) * tiles_per_split)
    end_position, first_slot = extents_ref[row, 2], extents_ref[row, 3]
    begin_position = extents_ref[row, 4] if extents_ref.shape[1] == 5 else 0

    def fetch(tile):
        page = pages_ref[row, lax.div(tile * TILE, block)]
        inside = pl.ds(lax.rem(tile * TILE, block), TILE)
        stage = lax.rem(tile - first, num_stages)
        plgpu.copy_gmem_to_smem(k_ref.at[page, head, inside], k_s.at[stage], k_loaded.at[stage])
        plgpu.copy_gmem_to_smem(v_ref.at[page, head, inside], v_s.at[stage], v_loaded.at[stage])

    def attend():
        whole = pl.ds(0, num_queries)
        plgpu.copy_gmem_to_smem(queries_ref.at[row, head], staged_s.at[whole], queries_loaded)
        plgpu.copy_gmem_to_smem(read_ref.at[row], read_s, queries_loaded)
        for ahead in range(num_stages - 1):
            pl.when(first + ahead < end)(functools.partial(fetch, first + ahead))
        plgpu.barrier_wait(queries_loaded)
        own_first, own_end = (_load(read_s.at[which], _BY_QUERY) for which in range(2))
        queries_s[...] = _load(staged_s, plgpu.Layout.WGMMA)
        plgpu.commit_smem()

        def body(tile, carry):
            highest, total, output = carry
            stage = lax.rem(tile - first, num_stages)
            held = tile * TILE - first_slot  # position of the tile's first slot

            plgpu.barrier_wait(k_loaded.at[stage])

            def multiply_keys(acc):
                plgpu.wgmma(acc, queries_s, k_s.at[stage].transpose((1, 0)))
                return acc[...]

            scores = pl.run_scoped(
                multiply_keys, plgpu.WGMMAAccumulatorRef((padded, TILE), jnp.float32)
            )
            at = held + plgpu.broadcasted_iota(
                jnp.int32, (padded, TILE), 1, layout=plgpu.Layout.WGMMA
            )
            visible = at >= lax.broadcast_in_dim(own_first, at.shape, [0])
            visible &= at < lax.broadcast_in_dim(own_end, at.shape, [0])
            scores = jnp.where(visible, scores * head_size**-0.5, -jnp.inf)
            new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
            rescale = jnp.exp(highest - new_highest)
            weights = jnp.exp(scores - lax.broadcast_in_dim(new_highest, scores.shape, [0]))
            weights_s[...] = weights.astype(weights_s.dtype)

            plgpu.barrier_wait(v_loaded.at[stage])

            @pl.when((held < begin_position) | (held + TILE > end_position))
            def _():
                # Garbage may be NaN, and 0 * NaN is NaN, so V is zeroed where no query looks.
                at = held + plgpu.broadcasted_iota(
                    jnp.int32, (TILE, head_size), 0, layout=plgpu.Layout.WGMMA
                )
                is_live = (at >= begin_position) & (at < end_position)
                values = _load(v_s.at[stage], plgpu.Layout.WGMMA)
                v_s[stage] = jnp.where(is_live, values, jnp.zeros_like(values))

            plgpu.commit_smem()
            # All warps are done with the previous tile, so its place can be overwritten.
            ahead = tile + num_stages - 1
            pl.when(ahead < end)(functools.partial(fetch, ahead))

            def multiply_values(acc):
                plgpu.wgmma(acc, weights_s, v_s.at[stage])
                return acc[...]

            values = pl.run_scoped(
                multiply_values, plgpu.WGMMAAccumulatorRef((padded, head_size), jnp.float32)
            )
            return (
                new_highest,
                total * rescale + jnp.sum(weights, axis=1),
                output * lax.broadcast_in_dim(rescale, output.shape, [0]) + values,
            )

        sums = lax.fori_loop(first, end, body, _nothing(padded, head_size))
        if is_partial:
            for reference, values in zip(outputs, sums, strict=True):
                _store(reference.at[row, head, split], values)
        else:
            _, total, output = sums
            _write_heads(total, output, staged_s, outputs[0], row, head)

    if is_partial:
        pl.when(first < end)(attend)
    else:
        attend()


def _combine_splits(
    extents_ref,  # [B, 4 or 5]
    highest_ref,  # [B, K, splits, M]
    total_ref,  # [B, K, splits, M]
    output_ref,  # [B, K, splits, M, H]
    *references,  # sinks and tails, if any, [B, K, M] twice and [B, K, M, H]; [B, T, K, G, H]
    staged_s,
):
    """One row and KV head: combines the live splits, in the order of their slots, and the other
    parts."""
    *rest, heads_ref = references
    row, head = lax.axis_index("row"), lax.axis_index("head")
    tiles_per_split = SPLIT_LENGTH // TILE
    first = lax.div(extents_ref[row, 0], tiles_per_split)
    end = lax.div(extents_ref[row, 1] + tiles_per_split - 1, tiles_per_split)

    def added(carry, place, references):
        highest, total, output = carry
        here, total_here = (_load(each.at[place], _BY_QUERY) for each in references[:2])
        values = _load(references[2].at[place], plgpu.Layout.WGMMA)
        new_highest = jnp.maximum(highest, here)
        rescale, weight = jnp.exp(highest - new_highest), jnp.exp(here - new_highest)
        return (
            new_highest,
            total * rescale + total_here * weight,
            output * lax.broadcast_in_dim(rescale, output.shape, [0])
            + values * lax.broadcast_in_dim(weight, output.shape, [0]),
        )

    def body(split, carry):
        return added(carry, (row, head, split), (highest_ref, total_ref, output_ref))

    sums = lax.fori_loop(first, end, body, _nothing(*staged_s.shape))
    if rest:
        sums = added(sums, (row, head), rest)
    _, total, output = sums
    _write_heads(total, output, staged_s, heads_ref, row, head)


def _write_heads(total: jax.Array, output: jax.Array, staged_s, heads_ref, row, head) -> None:
    """Normalises the weighted values `[M, H]` and copies them to the output."""
    _, window_length, _, group, _ = heads_ref.shape
    heads = output / lax.broadcast_in_dim(total, output.shape, [0])
    _store(staged_s, heads.astype(staged_s.dtype))
    plgpu.commit_smem()

    @pl.loop(0, window_length)
    def _(entry):
        members = pl.ds(entry * group, group)
        plgpu.copy_smem_to_gmem(staged_s.at[members], heads_ref.at[row, entry, head])

    plgpu.wait_smem_to_gmem(0)


def _nothing(num_queries: int, head_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Highest score, total weight and output before any slot."""

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    return (
        full((num_queries,), _LOWEST, _BY_QUERY),
        full((num_queries,), 0.0, _BY_QUERY),
        full((num_queries, head_size), 0.0, plgpu.Layout.WGMMA),
    )


# For loads and stores that happen once per program and need not be fast. From JAX 0.11 on `load`
# takes no index, and from 0.12 on there is a `store` for them.
_NO_INDEX = () if jax.__version_info__ >= (0, 11) else ((),)


def _load(reference, layout) -> jax.Array:
    return plgpu.load(reference, *_NO_INDEX, layout=layout, optimized=False)


def _store(reference, values: jax.Array) -> None:
    store = getattr(plgpu, "store", None)
    if store is None:
        reference[...] = values
    else:
        store(reference, values, optimized=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicKernels(triton.PallasKernels):
    """The kernels above, and those of `jaxspec.kernels.pallas` where they do not apply."""

    def takes(
        self, qkv: jax.Array, layer: kv.LayerCache, window: Window, angles: Angles, **settings
    ) -> bool:
        """See `PallasKernels.takes`."""
        size = {"group": qkv.shape[3] - 2, "head_size": qkv.shape[4]}
        is_own = self._writes(qkv, layer, angles, **settings) and is_supported(
            window, **size, dtype=qkv.dtype
        )
        return is_own or super().takes(qkv, layer, window, angles, **settings)

    def write(
        self,
        qkv: jax.Array,
        layer: kv.LayerCache,
        table: kv.Table,
        window: Window,
        angles: Angles,
        **settings,
    ) -> tuple[jax.Array, kv.LayerCache]:
        """See `PallasKernels.write`."""
        if not self._writes(qkv, layer, angles, **settings):
            return super().write(qkv, layer, table, window, angles, **settings)
        return write_window(qkv, layer, table, window, angles, **settings)

    def _writes(
        self,
        qkv: jax.Array,
        layer: kv.LayerCache,
        angles: Angles,
        *,
        is_interleaved: bool,
        **settings,
    ) -> bool:
        is_possible = can_write(qkv, layer, angles, is_interleaved=is_interleaved)
        return self.platform == "gpu" and is_possible


MOSAIC = MosaicKernels(attention=mosaic_attention, grouped_attention=attend_grouped)
