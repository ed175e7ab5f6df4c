"""The computations of a decoder, products and attention, and XLA's version of both.

Kernels know arrays, not model families. Norms, rotary angles and logits are fp32 whatever the
parameters' dtype, as in Hugging Face's models.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import AxisType

from jaxspec.cache import pages as kv
from jaxspec.kernels.highest import Highest, highest
from jaxspec.kernels.xla import Attention, block_attention
from jaxspec.types import PyTree, Window

Angles: TypeAlias = tuple[jax.Array, jax.Array]  # cos and signed sin, see `layers.rotary_angles`


def precision_of(dtype) -> lax.Precision | None:
    """Full fp32 products for fp32 operands (an accelerator would round them otherwise)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """`x / rms(x) * weight` over the last axis; the statistics are fp32, the product x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(epsilon))
    return jnp.expand_dims(weight, range(x.ndim - 1)) * (wide * scale).astype(x.dtype)


class PackedWeight(struct.PyTreeNode):
    """The weight of a product, in an order that allows reading it sequentially.

    For the C++ kernels the columns are in panels of 16. `data[panel, i, column, j]` is the weight
    of input `2 i + j`; it is zero past the last column, and past the last input up to a multiple of
    32. For a TPU `data` is the weight as a matrix: XLA tiles the last two axes there, and would lay
    out anew in every call a weight whose last axis but one is short.

    Attributes:
      data: `[ceil(outputs / 16), padded inputs / 2, 16, 2]`, or on a TPU `[inputs, outputs]`.
      shape: that of the weight, `[in..., out...]`.
      num_input_axes: how many of these axes are inputs.
    """

    data: jax.Array
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    num_input_axes: int = struct.field(pytree_node=False)

    @property
    def num_inputs(self) -> int:
        """Elements of the input axes."""
        return math.prod(self.shape[: self.num_input_axes])

    @property
    def is_matrix(self) -> bool:
        """Whether it has the form for TPUs."""
        return self.data.ndim == 2

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The axes that are not inputs."""
        return self.shape[self.num_input_axes :]

    def unpacked(self) -> jax.Array:
        """The weight itself, of `shape`."""
        if self.is_matrix:
            return self.data.reshape(self.shape)
        num_panels, num_pairs, panel, _ = self.data.shape
        flat = self.data.transpose(1, 3, 0, 2).reshape(2 * num_pairs, num_panels * panel)
        return flat[: self.num_inputs, : math.prod(self.output_shape)].reshape(self.shape)

    def columns(self, index: jax.Array) -> jax.Array:
        """The columns `[..., in]` of a matrix at `index` `[...]` int32; nothing else is read."""
        panel = self.data.shape[2]
        data, index = read_only_there(self.data, index)
        pairs = data[index // panel, :, index % panel]
        return pairs.reshape(*index.shape, -1)[..., : self.num_inputs]


class TiedEmbedding(struct.PyTreeNode):
    """The embedding `[V, E]` of a tied model, stored once and in the form of its head.

    Attributes:
      head: `[E, V]`, an array or a `PackedWeight`.
    """

    head: Any

    @property
    def shape(self) -> tuple[int, int]:
        """`(V, E)`."""
        width, vocab_size = self.head.shape
        return vocab_size, width

    @property
    def dtype(self) -> jnp.dtype:
        """That of the weights."""
        return getattr(self.head, "data", self.head).dtype

    def unpacked(self) -> jax.Array:
        """The embedding itself, `[V, E]`."""
        return unpacked(self.head).T

    def rows(self, tokens: jax.Array) -> jax.Array:
        """The embeddings `[..., E]` of `tokens` `[...]`; ids outside the vocabulary are clipped
        into it."""
        return columns(self.head, tokens)


def columns(head: jax.Array | PackedWeight, tokens: jax.Array) -> jax.Array:
    """The columns `[..., E]` of a head `[E, V]` for `tokens` `[...]`; nothing else is read. Ids
    outside the vocabulary are clipped into it."""
    tokens = jnp.clip(tokens, 0, head.shape[1] - 1)
    if isinstance(head, PackedWeight):
        return head.columns(tokens)
    head, tokens = read_only_there(head, tokens)
    return jnp.moveaxis(jnp.take(head, tokens, axis=1, mode="clip"), 0, -1)


def read_only_there(table: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A table and the index at which it is read, as they are.

    XLA:CPU reads bfloat16 and float16 as float32, and would convert the whole table ahead of a
    loop, if the table did not seem to change with the index.
    """
    return lax.optimization_barrier((table, index)) if table.dtype.itemsize == 2 else (table, index)


def unpacked(tree: PyTree) -> PyTree:
    """A pytree with plain arrays instead of its `PackedWeight`s and `TiedEmbedding`s: parameters as
    they are stored."""
    return _unpack_all(tree, (PackedWeight, TiedEmbedding))


def splittable(tree: PyTree) -> PyTree:
    """A pytree with plain arrays instead of its `PackedWeight`s, which a mesh cannot split. A
    `TiedEmbedding` remains one."""
    return _unpack_all(tree, PackedWeight)


def _unpack_all(tree: PyTree, classes: Any) -> PyTree:
    def is_packed(node: Any) -> bool:
        return isinstance(node, classes)

    return jax.tree.map(lambda n: n.unpacked() if is_packed(n) else n, tree, is_leaf=is_packed)


def axes_of_compiler() -> frozenset[str]:
    """The mesh axes over which XLA itself splits what is being traced. It cannot split a call that
    it does not know, and would gather all parts on every device."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in axes if kind == AxisType.Auto and mesh.shape[name] > 1)


Product: TypeAlias = Callable[..., jax.Array]  # a backend with the signature of `product`
FindHighest: TypeAlias = Callable[..., Highest]  # one with the signature of `highest`


def product(
    x: jax.Array,
    weight: jax.Array | PackedWeight,
    *,
    norm: jax.Array | None = None,
    epsilon: float = 0.0,
    is_gated: bool = False,
    residual: jax.Array | None = None,
    dtype=None,
) -> jax.Array:
    """`f(x) @ weight + residual` `[..., out...]`: a product with the operations around it in a
    decoder.

    The weight is not flattened: a `model` mesh axis that splits one of its inner axes would have to
    move it for that.

    Args:
      x: `[..., in]`; `[..., 2, in]` if it is gated.
      weight: `[in, out...]`, or a `PackedWeight` for TPUs.
      norm: `[in]` weight of an RMS norm of x (`rms_norm`), or None.
      epsilon: that of the norm.
      is_gated: x is `silu(x[..., 0, :]) * x[..., 1, :]` (SwiGLU).
      residual: `[..., out...]` to be added, or None.
      dtype: that of the result; None is that of x.
    """
    x = product_input(x, norm=norm, epsilon=epsilon, is_gated=is_gated)
    matrix = weight.data if isinstance(weight, PackedWeight) else weight
    made = jnp.tensordot(
        x, matrix, axes=1, precision=precision_of(x.dtype), preferred_element_type=dtype
    )
    if isinstance(weight, PackedWeight):
        made = made.reshape(*x.shape[:-1], *weight.output_shape)
    return made if residual is None else residual + made


def product_input(
    x: jax.Array, *, norm: jax.Array | None, epsilon: float, is_gated: bool
) -> jax.Array:
    """f(x) of `product`."""
    if norm is not None:
        x = rms_norm(x, norm, epsilon)
    if is_gated:
        x = jax.nn.silu(x[..., 0, :]) * x[..., 1, :]
    return x


def rotate(x: jax.Array, angles: Angles, *, is_interleaved: bool) -> jax.Array:
    """Rotates the components of each head of `x` `[B, T, heads, H]` that have angles.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin): each component times cos, plus its partner
    times the signed sin.
    """
    cos, signed_sin = angles
    pair_axis = -1 if is_interleaved else -2
    rotary_size = cos.shape[-2] * cos.shape[-1]
    turned = x[..., :rotary_size].astype(jnp.float32)
    pairs = turned.reshape(*x.shape[:-1], *cos.shape[-2:])
    pairs = pairs * cos + jnp.flip(pairs, axis=pair_axis) * signed_sin
    turned = pairs.reshape(turned.shape).astype(x.dtype)
    if rotary_size == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., rotary_size:]], axis=-1)


def attention_inputs(
    qkv: jax.Array,
    angles: Angles,
    *,
    is_interleaved: bool,
    bias: jax.Array | None,
    query_norm: jax.Array | None,
    key_norm: jax.Array | None,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[B, T, Q, H]`, keys and values `[B, T, K, H]` from their projections `qkv`.

    One product makes all three, `[B, T, K, G + 2, H]`: for each KV head its query heads, then its
    key, then its value, so that a `model` mesh axis can split it by KV head. Arguments as in
    `Kernels.attend`.
    """
    if bias is not None:
        qkv = qkv + bias[None, None]
    num_rows, window_length, num_heads, group_and_kv, head_size = qkv.shape
    group = group_and_kv - 2
    queries = qkv[..., :group, :].reshape(num_rows, window_length, num_heads * group, head_size)
    keys, values = qkv[..., group, :], qkv[..., group + 1, :]
    if query_norm is not None:
        queries = rms_norm(queries, query_norm, epsilon)
    if key_norm is not None:
        keys = rms_norm(keys, key_norm, epsilon)
    queries = rotate(queries, angles, is_interleaved=is_interleaved)
    return queries, rotate(keys, angles, is_interleaved=is_interleaved), values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The expensive parts of a layer, and of growing a tree. A backend provides its own functions,
    or overrides `attend` to compute a layer's attention from the projections on.

    Attributes:
      attention: see `block_attention`.
      product: see `product`.
      highest: see `jaxspec.kernels.highest.highest`.
      is_width_invariant: whether a token gets the same bits in windows of every width, as long as
        these kernels leave no product to XLA. Engines test it before they rely on it.
      skips_padding: whether entries beyond `Window.num_live` are not computed.
      platform: JAX's name of the kind of device that programs are made for; see `on`.
    """

    attention: Attention = block_attention
    product: Product = product
    highest: FindHighest = highest
    is_width_invariant: bool = False
    skips_padding: bool = False
    platform: str = "cpu"

    def on(self, platform: str) -> Kernels:
        """These kernels for programs of another platform."""
        find = functools.partial(highest, in_blocks=platform != "gpu")
        own = {"highest": find} if self.highest is highest else {}
        return dataclasses.replace(self, platform=platform, **own)

    def pack(self, weight: jax.Array | PackedWeight, num_input_axes: int = 1) -> Any:
        """A weight in the form that `product` reads fastest: `[in..., out...]` or a `PackedWeight`.

        It may be given in either form, and is not copied if it already has the right one.
        """
        is_tpu = self.platform == "tpu"
        if is_tpu and isinstance(weight, PackedWeight) and weight.is_matrix:
            return weight
        plain: jax.Array = unpacked(weight)
        if not is_tpu or num_input_axes > 1 or plain.ndim < 3:
            return plain
        data = plain.reshape(len(plain), -1)
        return PackedWeight(data=data, shape=plain.shape, num_input_axes=num_input_axes)

    def product_for(self, num_live: jax.Array | None) -> Product:
        """The product for x `[B, T, ...]` of which only the first `num_live` `[B]` int32 entries of
        each row are needed (all if None); by default `product`."""
        return self.product

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
        bias: jax.Array | None,
        query_norm: jax.Array | None,
        key_norm: jax.Array | None,
        epsilon: float,
        sliding_window: int | None,
        **sinks: int,
    ) -> tuple[jax.Array, kv.LayerCache]:
        """Heads `[B, T, Q, H]` of a window, and the layer's KV with the window's own written.

        Args:
          qkv: `[B, T, K, G + 2, H]` projections.
          layer: KV of this layer.
          table: `[B, S / block]`, page numbers of the window's rows.
          window: the positions of the queries, and the slots for their KV.
          angles: those of the window's positions.
          dtype: that of the KV.
          is_interleaved: whether rotated pairs are neighbours, instead of one from each half.
          bias: `[K, G + 2, H]` added to the projections, or None.
          query_norm: `[H]` weight of the queries' RMS norm, or None.
          key_norm: the same for the keys, or None.
          epsilon: of these norms.
          sliding_window: number of slots that a query sees, or None for all.
          sinks: `num_sinks` where the cache is a ring, see `block_attention`.
        """
        queries, keys, values = attention_inputs(
            qkv,
            angles,
            is_interleaved=is_interleaved,
            bias=bias,
            query_norm=query_norm,
            key_norm=key_norm,
            epsilon=epsilon,
        )
        # 0 * NaN is NaN, so a non-finite value would reach earlier queries, which do not see it. A
        # non-finite key reaches only the queries that see it.
        is_finite = jnp.isfinite(values)
        keys = jnp.where(is_finite, keys, jnp.array(jnp.nan, keys.dtype))
        values = jnp.where(is_finite, values, jnp.zeros((), values.dtype))
        layer = kv.write(layer, table, keys, values, window.slots)
        heads = self.attention(
            queries, layer, table, window, dtype=dtype, sliding_window=sliding_window, **sinks
        )
        return heads, layer

    def move_within(
        self,
        layers: tuple[kv.LayerCache, ...],
        table: kv.Table,
        source: jax.Array,
        target: jax.Array,
    ) -> tuple[kv.LayerCache, ...]:
        """As `jaxspec.cache.pages.move_within`."""
        return kv.move_within(layers, table, source, target)


XLA = Kernels()
