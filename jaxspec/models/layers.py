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
    """cos and sin `[B, T, 1, rotary_size / 2]` fp32 of the positions `[B, T]`."""
    inverse, factor = rope.inverse_frequencies()
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(inverse)
    return jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array], rope: RopeConfig) -> jax.Array:
    """Rotates the leading `rotary_size` components of each head of `x` `[B, T, heads, H]`."""
    cos, sin = angles
    turned, kept = x[..., : rope.rotary_size].astype(jnp.float32), x[..., rope.rotary_size :]
    if rope.is_interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    if rope.is_interleaved:
        turned = jnp.stack(rotated, axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate(rotated, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), kept], axis=-1)


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
    """SwiGLU: `down(silu(gate x) * up x)`; `gate_up` is `[E, 2, F]`."""
    gate, up = jnp.split(project(x, params["gate_up"]), 2, axis=-1)
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
