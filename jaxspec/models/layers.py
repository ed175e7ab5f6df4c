"""One layer of the decoder, and the rotary angles that all layers share.

Kernels (`jaxspec.kernels`) compute products and attention; this module puts them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.base import PackedWeight, Product, product, rms_norm
from jaxspec.models.config import ModelConfig, RopeConfig

LayerParams = Mapping[str, Any]


def rotary_angles(rope: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors for `rotate`, fp32, at the positions `[B, T]`.

    Returns:
      cos of each pair's angle, twice, and sin, once negative: `[B, T, 1, 2, rotary_size / 2]`, or
      with the last two axes swapped where pairs are interleaved.
    """
    inverse, factor = rope.inverse_frequencies()
    angles = positions[:, :, None, None].astype(jnp.float32) * inverse[None, None, None]
    cos, sin = jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor)
    pair_axis = -1 if rope.is_interleaved else -2
    cos_sin = jnp.stack([cos, cos], axis=pair_axis), jnp.stack([-sin, sin], axis=pair_axis)
    # Without the barrier XLA:CPU computes every cosine again in every layer: a tenth of a round.
    return lax.optimization_barrier(cos_sin)


def attention_settings(config: ModelConfig, params: LayerParams) -> dict[str, Any]:
    """The arguments of a layer's attention other than projections and cache; see
    `Kernels.attend`."""
    return {
        "is_interleaved": config.rope.is_interleaved,
        "bias": params.get("qkv_bias"),
        "query_norm": params.get("q_norm"),
        "key_norm": params.get("k_norm"),
        "epsilon": config.norm_epsilon,
    }


def decoder_layer(
    config: ModelConfig,
    params: LayerParams,
    x: jax.Array,
    attend: Callable[[jax.Array], jax.Array],
    product: Product = product,
    *,
    has_feed_forward: bool = True,
) -> jax.Array:
    """Hidden states `[B, T, E]` after one layer, or after its attention only.

    `attend(qkv)` returns the heads `[B, T, Q, H]` for the projections `[B, T, K, G + 2, H]`; the
    caller decides where keys and values are kept (in a cache or, in training, nowhere).
    """
    x = attention(config, params, x, attend, product)
    return feed_forward(config, params, x, product) if has_feed_forward else x


def attention(
    config: ModelConfig,
    params: LayerParams,
    x: jax.Array,
    attend: Callable[[jax.Array], jax.Array],
    product: Product = product,
) -> jax.Array:
    """Hidden states `[B, T, E]` after a layer's attention; see `decoder_layer`."""
    epsilon = config.norm_epsilon
    qkv = product(x, params["qkv"], norm=params["attention_norm"], epsilon=epsilon)
    heads = attend(qkv).reshape(*x.shape[:-1], -1)
    output = params["output"]
    if not isinstance(output, PackedWeight):
        output = output.reshape(-1, config.width)
    if config.has_output_bias or config.has_sandwich_norms:
        mixed = product(heads, output)
        if config.has_output_bias:
            mixed = mixed + params["output_bias"][None, None]
        if config.has_sandwich_norms:
            mixed = rms_norm(mixed, params["post_attention_norm"], epsilon)
        return x + mixed
    return product(heads, output, residual=x)


def feed_forward(
    config: ModelConfig, params: LayerParams, x: jax.Array, product: Product = product
) -> jax.Array:
    """Hidden states `[B, T, E]` after a layer's feed-forward; it does not mix rows."""
    epsilon = config.norm_epsilon
    both = product(x, params["gate_up"], norm=params["feed_forward_norm"], epsilon=epsilon)
    if config.has_sandwich_norms:
        fed = product(both, params["down"], is_gated=True)
        return x + rms_norm(fed, params["post_feed_forward_norm"], epsilon)
    return product(both, params["down"], is_gated=True, residual=x)
