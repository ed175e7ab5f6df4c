"""Building blocks of the decoder: arrays in, arrays out.

Norms, rotary angles and logits are fp32 whatever the parameters' dtype, as in Hugging Face's
models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight`, flattening the weight's output axes: `[..., in]`, `[in, out...]`."""
    flat = weight.reshape(weight.shape[0], -1)
    return jnp.matmul(x, flat, precision=precision_of(x.dtype))


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
    config: ModelConfig, params: LayerParams, x: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[B, T, Q, H]`, keys and values `[B, T, K, H]` of normed hidden states `[B, T, E]`.

    One product makes all three: `qkv` is `[E, K, G + 2, H]`, for each KV head its query heads, then
    its key, then its value, so that a `model` mesh axis can split it by KV head.
    """
    group, heads = config.group, config.num_kv_heads
    qkv = project(x, params["qkv"])
    if config.has_qkv_bias:
        qkv = qkv + params["qkv_bias"].reshape(-1)
    qkv = qkv.reshape(*x.shape[:-1], heads, group + 2, config.head_size)
    queries = qkv[..., :group, :].reshape(*x.shape[:-1], heads * group, config.head_size)
    keys, values = qkv[..., group, :], qkv[..., group + 1, :]
    if config.has_qk_norm:
        queries = rms_norm(queries, params["q_norm"], config.norm_epsilon)
        keys = rms_norm(keys, params["k_norm"], config.norm_epsilon)
    return rotate(queries, angles, config.rope), rotate(keys, angles, config.rope), values


def feed_forward(params: LayerParams, x: jax.Array) -> jax.Array:
    """SwiGLU: `down(silu(gate x) * up x)`; `gate_up` is `[E, 2, F]`.

    It is not flattened: a `model` mesh axis splits F, and would have to move the weights for it.
    """
    both = jnp.tensordot(x, params["gate_up"], axes=1, precision=precision_of(x.dtype))
    gate, up = both[..., 0, :], both[..., 1, :]
    return project(jax.nn.silu(gate) * up, params["down"])


def decoder_layer(
    config: ModelConfig,
    params: LayerParams,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Hidden states `[B, T, E]` after one layer.

    `attend(queries, keys, values)` returns `[B, T, Q, H]`; where keys and values are kept is its
    affair (a cache, a training batch).
    """
    normed = rms_norm(x, params["attention_norm"], config.norm_epsilon)
    heads = attend(*attention_inputs(config, params, normed, angles))
    mixed = project(heads.reshape(*x.shape[:-1], -1), params["output"].reshape(-1, config.width))
    if config.has_output_bias:
        mixed = mixed + params["output_bias"]
    if config.has_sandwich_norms:
        mixed = rms_norm(mixed, params["post_attention_norm"], config.norm_epsilon)
    x = x + mixed
    fed = feed_forward(params, rms_norm(x, params["feed_forward_norm"], config.norm_epsilon))
    if config.has_sandwich_norms:
        fed = rms_norm(fed, params["post_feed_forward_norm"], config.norm_epsilon)
    return x + fed
