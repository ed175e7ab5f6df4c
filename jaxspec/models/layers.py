"""Building blocks of the decoder: arrays in, arrays out.

Norms, rotary angles and logits are fp32 whatever the parameters' dtype, as in Hugging Face's
models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.config import ModelConfig, RopeConfig

LayerParams = Mapping[str, jax.Array]


def precision_of(dtype) -> lax.Precision | None:
    """Full fp32 products for fp32 operands (an accelerator would round them otherwise)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """`x / rms(x) * weight` over the last axis; the statistics are fp32, the product x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(epsilon))
    return weight * (wide * scale).astype(x.dtype)


class Product(Protocol):
    """A backend of products with weights; see `product`."""

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        *,
        norm: jax.Array | None = None,
        epsilon: float = 0.0,
        is_gated: bool = False,
        residual: jax.Array | None = None,
        dtype=None,
    ) -> jax.Array:
        """Returns `[..., out...]`."""
        ...


def product(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: jax.Array | None = None,
    epsilon: float = 0.0,
    is_gated: bool = False,
    residual: jax.Array | None = None,
    dtype=None,
) -> jax.Array:
    """`f(x) @ weight + residual` `[..., out...]`, with what stands around a product in a decoder.

    The weight is not flattened: a `model` mesh axis that splits one of its inner axes would have to
    move it for that.

    Args:
      x: `[..., in]`; `[..., 2, in]` if it is gated.
      weight: `[in, out...]`.
      norm: `[in]` weight of an RMS norm of x (`rms_norm`), or None.
      epsilon: of the norm.
      is_gated: x is `silu(x[..., 0, :]) * x[..., 1, :]` (SwiGLU).
      residual: `[..., out...]` to be added, or None.
      dtype: of the result; None is that of x.
    """
    if norm is not None:
        x = rms_norm(x, norm, epsilon)
    if is_gated:
        x = jax.nn.silu(x[..., 0, :]) * x[..., 1, :]
    made = jnp.tensordot(
        x, weight, axes=1, precision=precision_of(x.dtype), preferred_element_type=dtype
    )
    return made if residual is None else residual + made


def rotary_angles(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `rotate` multiplies by, fp32, of the positions `[B, T]`.

    Returns:
      cos of each pair's angle, twice, and sin, once negative: `[B, T, 1, 2, rotary_size / 2]`, or
      with the last two axes swapped where pairs are interleaved.
    """
    inverse, factor = rope.inverse_frequencies()
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(inverse)
    cos, sin = jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)
    pair_axis = -1 if rope.is_interleaved else -2
    cos_sin = jnp.stack([cos, cos], axis=pair_axis), jnp.stack([-sin, sin], axis=pair_axis)
    # Without the barrier XLA:CPU computes every cosine again in every layer: a tenth of a round.
    return lax.optimization_barrier(cos_sin)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array], rope: RopeConfig) -> jax.Array:
    """Rotates the leading `rotary_size` components of each head of `x` `[B, T, heads, H]`.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin): each component times cos, plus its partner
    times the signed sin.
    """
    cos, signed_sin = angles
    pair_axis = -1 if rope.is_interleaved else -2
    turned = x[..., : rope.rotary_size].astype(jnp.float32)
    pairs = turned.reshape(*x.shape[:-1], *cos.shape[-2:])
    pairs = pairs * cos + jnp.flip(pairs, axis=pair_axis) * signed_sin
    turned = pairs.reshape(turned.shape).astype(x.dtype)
    if rope.rotary_size == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., rope.rotary_size :]], axis=-1)


def attention_inputs(
    config: ModelConfig, params: LayerParams, qkv: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[B, T, Q, H]`, keys and values `[B, T, K, H]` of their projections `qkv`.

    One product makes all three, `[B, T, K, G + 2, H]`: for each KV head its query heads, then its
    key, then its value, so that a `model` mesh axis can split it by KV head.
    """
    group, heads = config.group, config.num_kv_heads
    if config.has_qkv_bias:
        qkv = qkv + params["qkv_bias"]
    queries = qkv[..., :group, :].reshape(*qkv.shape[:2], heads * group, config.head_size)
    keys, values = qkv[..., group, :], qkv[..., group + 1, :]
    if config.has_qk_norm:
        queries = rms_norm(queries, params["q_norm"], config.norm_epsilon)
        keys = rms_norm(keys, params["k_norm"], config.norm_epsilon)
    return rotate(queries, angles, config.rope), rotate(keys, angles, config.rope), values


def decoder_layer(
    config: ModelConfig,
    params: LayerParams,
    x: jax.Array,
    attend: Callable[[jax.Array], jax.Array],
    product: Product = product,
) -> jax.Array:
    """Hidden states `[B, T, E]` after one layer.

    `attend(qkv)` returns heads `[B, T, Q, H]` of what `attention_inputs` takes apart; where keys
    and values are kept is its affair (a cache, a training batch).
    """
    epsilon = config.norm_epsilon
    qkv = product(x, params["qkv"], norm=params["attention_norm"], epsilon=epsilon)
    heads = attend(qkv).reshape(*x.shape[:-1], -1)
    output = params["output"].reshape(-1, config.width)
    if config.has_output_bias or config.has_sandwich_norms:
        mixed = product(heads, output)
        if config.has_output_bias:
            mixed = mixed + params["output_bias"]
        if config.has_sandwich_norms:
            mixed = rms_norm(mixed, params["post_attention_norm"], epsilon)
        x = x + mixed
    else:
        x = product(heads, output, residual=x)
    both = product(x, params["gate_up"], norm=params["feed_forward_norm"], epsilon=epsilon)
    if config.has_sandwich_norms:
        fed = product(both, params["down"], is_gated=True)
        return x + rms_norm(fed, params["post_feed_forward_norm"], epsilon)
    return product(both, params["down"], is_gated=True, residual=x)
