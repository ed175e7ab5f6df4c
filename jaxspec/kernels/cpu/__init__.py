"""Products and attention of a few rows in C++, for CPUs.

A decoding round multiplies every weight by a few rows: one for a single request, some fifty for a
batch. XLA:CPU runs such products far below the speed of cores and memory, copies the KV that
attention reads, and starts some thirty small programs per layer. `kernels.cc` runs a layer as five:
four products with the norms, gates and sums around them, and attention from the projections on.
`product`, `attend`, `highest` and `move_within` call it through JAX's foreign function interface.
Engines pack the weights, so that a product reads them sequentially.

The machine's C++ compiler builds the kernels for its own processor when a model is first loaded on
a CPU; the library is kept in the cache directory. Without a compiler, `problem` says so, and models
use XLA's.

The bits of an output depend on its own row only, not on how many rows there are. XLA's products sum
in a different order for each number of rows. They do depend on the instructions that multiply
bfloat16; a process always uses one `family` of these: AMX, AVX512-BF16, or products in fp32.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.kernels.base import Angles, Kernels, PackedWeight, axes_of_compiler, unpacked
from jaxspec.kernels.base import product as xla_product
from jaxspec.kernels.cpu import build
from jaxspec.kernels.highest import Highest
from jaxspec.kernels.highest import highest as xla_highest
from jaxspec.runtime.host_limits import usable_cpus
from jaxspec.types import Window

MAX_QUERIES = 1024  # per row and KV head; with more (long prompts) XLA is as fast
MAX_VECTORS = 32  # vectors per head

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
_PANEL, _INPUTS = 16, 32  # columns of a panel, and what inputs are padded to a multiple of


def problem() -> str | None:
    """The reason why the kernels cannot be used here, with what to do after a semicolon, or None;
    compiles them if necessary."""
    return _load()[1]


def family() -> str | None:
    """Which instructions multiply bfloat16: `AMX`, `AVX512-BF16`, `AVX512`, `AVX2`, `NEON` or
    `generic`; None where the kernels cannot be used."""
    return _load()[2]


@functools.cache
def _load() -> tuple[int, str | None, str | None]:
    """The number of lanes of a vector, the result of `problem`, and the family; registers the
    kernels with JAX."""
    try:
        library = build.load_library()
    except build.BuildError as error:
        return 0, str(error), None
    for name in build.FUNCTIONS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    library.jaxspec_start_threads(num_threads())
    library.jaxspec_family.restype = ctypes.c_char_p
    return library.jaxspec_num_lanes(), None, library.jaxspec_family().decode()


def num_threads() -> int:
    """The number of threads that share the work: `$JAXSPEC_NUM_THREADS`, or the number of CPUs that
    the process may keep busy (`runtime.host_limits.usable_cpus`), but at most 16.

    Raises:
      SettingError: the variable is not a valid number of threads.
    """
    chosen = os.environ.get("JAXSPEC_NUM_THREADS")
    if chosen is not None:
        if len(chosen) > 4 or not chosen.isdecimal() or not 1 <= int(chosen) <= 1024:
            raise SettingError(
                f"JAXSPEC_NUM_THREADS is {chosen[:9]!r}; make it a whole number from 1 to 1024, or "
                "leave it out."
            )
        return int(chosen)
    return min(usable_cpus(), 16)


def pack(weight: jax.Array, num_input_axes: int = 1) -> PackedWeight:
    """A weight `[in..., out...]`, fp32 or bf16, packed in the order in which `product` reads it."""
    _load()
    shape = weight.shape
    num_inputs = math.prod(shape[:num_input_axes])
    num_outputs = math.prod(shape[num_input_axes:])
    packed = (-(-num_outputs // _PANEL), -(-num_inputs // _INPUTS) * _INPUTS // 2, _PANEL, 2)
    data = _pack(weight.reshape(num_inputs, num_outputs), packed)
    return PackedWeight(data=data, shape=shape, num_input_axes=num_input_axes)


@functools.partial(jax.jit, static_argnums=1)
def _pack(weight: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.ffi.ffi_call("jaxspec_pack", jax.ShapeDtypeStruct(shape, weight.dtype))(weight)


def product(
    x: jax.Array,
    weight: PackedWeight,
    *,
    norm: jax.Array | None = None,
    epsilon: float = 0.0,
    is_gated: bool = False,
    residual: jax.Array | None = None,
    dtype=None,
    num_live: jax.Array | None = None,
) -> jax.Array:
    """`f(x) @ weight + residual` `[..., out...]`, like `jaxspec.kernels.base.product`, for a packed
    weight in x's dtype. With `num_live` `[B]` int32 only the first ones of x `[B, T, ...]` are
    computed, and the rest of the result is whatever the memory held."""
    leading = x.shape[: -2 if is_gated else -1]
    num_rows, num_outputs = math.prod(leading), math.prod(weight.output_shape)
    nothing = jnp.zeros((0,), x.dtype)
    made = jax.ffi.ffi_call(
        "jaxspec_product",
        jax.ShapeDtypeStruct((num_rows, num_outputs), x.dtype if dtype is None else dtype),
    )(
        x.reshape(num_rows, -1),
        nothing if norm is None else norm,
        weight.data,
        nothing if residual is None else residual.reshape(num_rows, -1),
        jnp.zeros((0,), jnp.int32) if num_live is None else num_live,
        epsilon=np.float32(epsilon),
        is_gated=is_gated,
    )
    return made.reshape(*leading, *weight.output_shape)


def highest(scores: jax.Array, count: int, sharpness: jax.Array | None = None) -> Highest:
    """As `jaxspec.kernels.highest.highest`; of a row with a NaN or an infinite score all scores are
    NaN."""
    _load()
    *leading, size = scores.shape
    num_rows = math.prod(leading)
    of_rows = jnp.zeros((0,), jnp.float32)
    if sharpness is not None:
        of_rows = jnp.repeat(sharpness, num_rows // sharpness.shape[0])
    best, places, log_total = jax.ffi.ffi_call(
        "jaxspec_highest",
        (
            jax.ShapeDtypeStruct((num_rows, count), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, count), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
    )(scores.reshape(num_rows, size), of_rows)
    return Highest(
        scores=best.reshape(*leading, count),
        places=places.reshape(*leading, count),
        log_total=log_total.reshape(*leading),
    )


def is_attention_supported(
    qkv: jax.Array, layer: kv.LayerCache, table: kv.Table, window: Window
) -> bool:
    """Whether `attend` supports these: fp32 or bf16, with KV in the same dtype or in int8, the
    ragged layout, heads that fit into `MAX_VECTORS` vectors (128 numbers if a vector has 4, 512 if
    it has 16), and at most `MAX_QUERIES` queries."""
    num_lanes = _load()[0]
    _, window_length, _, group_and_kv, head_size = qkv.shape
    return (
        qkv.dtype in _DTYPES
        and (layer.is_quantised or layer.k.dtype == _stored_dtype(qkv.dtype))
        and not isinstance(table, kv.AlignedTable)
        and head_size <= MAX_VECTORS * num_lanes
        and layer.block % num_lanes == 0
        and window_length * (group_and_kv - 2) <= MAX_QUERIES
    )


def _stored_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which KV of this dtype is stored, see `jaxspec.cache.pages`."""
    return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else dtype


def attend(
    qkv: jax.Array,
    layer: kv.LayerCache,
    table: kv.Table,
    window: Window,
    *,
    cos: jax.Array,
    sin: jax.Array,
    is_interleaved: bool,
    bias: jax.Array | None,
    query_norm: jax.Array | None,
    key_norm: jax.Array | None,
    epsilon: float,
    sliding_window: int | None,
    num_sinks: int | None = None,
) -> tuple[jax.Array, kv.LayerCache]:
    """Heads `[B, T, Q, H]` and the layer's KV, which is written in place; as `Kernels.attend`, with
    the angles' cos and sin `[B, T, rotary_size / 2]` fp32, and projections in the KV's dtype, fp32
    or bf16. A node of a tree gets the bits of its path as a chain. Of entries beyond
    `window.num_live` nothing is computed or written, see `product`; with it, and with
    `window.rows`, several rows of the window may be of one row of the table."""
    num_rows, window_length, num_heads, group_and_kv, head_size = qkv.shape
    heads = (num_rows, window_length, num_heads * (group_and_kv - 2), head_size)
    nothing, no_slots = jnp.zeros((0,), qkv.dtype), jnp.zeros((0,), jnp.int32)
    stored = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), layer)
    scales, in_place = (), {6: 1, 7: 2}
    if layer.is_quantised:
        scales, in_place = (layer.k_scale, layer.v_scale), {6: 1, 7: 2, 15: 3, 16: 4}
    sinks = {} if num_sinks is None else {"num_sinks": np.int64(num_sinks)}
    made, k, v, *new_scales = jax.ffi.ffi_call(
        "jaxspec_coded_attention" if layer.is_quantised else "jaxspec_attention",
        (jax.ShapeDtypeStruct(heads, qkv.dtype), *jax.tree.leaves(stored)),
        input_output_aliases=in_place,
    )(
        qkv,
        nothing if bias is None else bias,
        nothing if query_norm is None else query_norm,
        nothing if key_norm is None else key_norm,
        cos,
        sin,
        layer.k,
        layer.v,
        table,
        window.positions,
        window.slots,
        window.start,
        no_slots if window.paths is None else window.paths,
        no_slots if window.ends is None else window.ends,
        no_slots if window.num_live is None else window.num_live,
        *scales,
        epsilon=np.float32(epsilon),
        is_interleaved=is_interleaved,
        has_chunks=window.rows is not None,
        sliding_window=np.int64(sliding_window or 0),
        **sinks,
    )
    return made, jax.tree.unflatten(jax.tree.structure(layer), (k, v, *new_scales))


def move_within(
    layers: tuple[kv.LayerCache, ...], table: jax.Array, source: jax.Array, target: jax.Array
) -> tuple[kv.LayerCache, ...]:
    """As `jaxspec.cache.pages.move_within`, in one call for all layers, which are written in
    place; for tables of the ragged layout."""
    _load()
    leaves, form = jax.tree.flatten(layers)
    moved = jax.ffi.ffi_call(
        "jaxspec_move",
        tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
        input_output_aliases={3 + index: index for index in range(len(leaves))},
    )(table, source, target, *leaves)
    return jax.tree.unflatten(form, moved)


class NativeKernels(Kernels):
    """The C++ kernels, and XLA's where they do not apply: for weights that are not packed, because
    of their dtype or because a mesh splits them, for attention that `is_attention_supported`
    excludes, and for KV that is moved on a mesh or in the aligned layout."""

    def pack(self, weight, num_input_axes=1):
        """A `PackedWeight`, if `product` supports its dtype and it is not split over devices."""
        if isinstance(weight, PackedWeight):
            if weight.data.dtype in _DTYPES and not weight.is_matrix:
                return weight
            weight = unpacked(weight)
        if not _can_pack(weight, num_input_axes):
            return weight
        if isinstance(weight, jax.ShapeDtypeStruct):
            return jax.eval_shape(functools.partial(pack, num_input_axes=num_input_axes), weight)
        return pack(jnp.asarray(weight), num_input_axes)

    def product_for(self, num_live):
        """A product that leaves out what is not needed."""
        if num_live is None:
            return self.product
        return functools.partial(self.product, num_live=num_live)

    def attend(
        self,
        qkv: jax.Array,
        layer: kv.LayerCache,
        table: kv.Table,
        window: Window,
        angles: Angles,
        *,
        dtype: jnp.dtype,
        is_interleaved: bool,
        **settings,
    ) -> tuple[jax.Array, kv.LayerCache]:
        """As `Kernels.attend`."""
        if axes_of_compiler() or not is_attention_supported(qkv, layer, table, window):
            return super().attend(
                qkv,
                layer,
                table,
                window,
                angles,
                dtype=dtype,
                is_interleaved=is_interleaved,
                **settings,
            )
        cos, signed_sin = angles
        pair = (Ellipsis, 1) if is_interleaved else (Ellipsis, 1, slice(None))
        return attend(
            qkv,
            layer,
            table,
            window,
            cos=cos[:, :, 0][pair],
            sin=signed_sin[:, :, 0][pair],
            is_interleaved=is_interleaved,
            **settings,
        )

    def move_within(self, layers, table, source, target):
        """As `Kernels.move_within`."""
        if axes_of_compiler() or isinstance(table, kv.AlignedTable):
            return super().move_within(layers, table, source, target)
        return move_within(layers, table, source, target)


def _product_or_xla(
    x: jax.Array,
    weight: jax.Array | PackedWeight,
    *,
    num_live: jax.Array | None = None,
    **settings,
) -> jax.Array:
    if isinstance(weight, PackedWeight):
        return product(x, weight, num_live=num_live, **settings)
    return xla_product(x, weight, **settings)


def _highest_or_xla(scores: jax.Array, count: int, sharpness: jax.Array | None = None) -> Highest:
    find = xla_highest if axes_of_compiler() else highest
    return find(scores, count, sharpness)


def _can_pack(weight: Any, num_input_axes: int) -> bool:
    is_matrix = weight.dtype in _DTYPES and weight.ndim > num_input_axes and weight.size > 0
    sharding = getattr(weight, "sharding", None)
    return is_matrix and (sharding is None or sharding.is_fully_replicated)


NATIVE = NativeKernels(
    product=_product_or_xla, highest=_highest_or_xla, is_width_invariant=True, skips_padding=True
)
