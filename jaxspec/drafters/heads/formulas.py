"""What heads compute, for drafting and for training alike.

The newest feature of a round is that of position t, the token before the newest one; `anchor` makes
of it the state that the first head reads. Head k proposes the token at t + 2 + k, after the tokens
at t + 1 (the newest) to t + 1 + k: known ones in training, those of a node's path in drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.kernels.base import Product, product, rms_norm
from jaxspec.models import decoder

Params: TypeAlias = Mapping[str, Any]
RunBlock: TypeAlias = Callable[[jax.Array], jax.Array]


class TargetParts(NamedTuple):
    """What heads use of their target.

    Attributes:
      final_norm: hidden states `[..., E]`, normed as before the head.
      head: logits fp32 of normed hidden states, `[..., V]`, or `[..., num_head_tokens]` of the
        tokens that heads may propose.
      head_rows: of tokens `[...]`, the weights `[..., E]` that the head gives each of them.
      product: how its kernels multiply; the heads' own weights are packed for it, or plain.
    """

    final_norm: Callable[[jax.Array], jax.Array]
    head: Callable[[jax.Array], jax.Array]
    head_rows: Callable[[jax.Array], jax.Array]
    product: Product = product


def anchor(
    config: HeadsConfig,
    params: Params,
    target: TargetParts,
    features: jax.Array,
    next_tokens: jax.Array,
    run_block: RunBlock,
) -> jax.Array:
    """The state `[B, T, E]` that the first head reads.

    Args:
      config: of the heads.
      params: of the heads.
      target: what they use of the target.
      features: `[B, T, E]`, the target's hidden states after its last layer, not yet normed.
      next_tokens: `[B, T]` int32, the token after each.
      run_block: the augmenting block, on hidden states `[B, T, E]`; not called where there is none.
    """
    if config.kind == "clover2":
        embedded = target.head_rows(next_tokens)
        first = params["first"]
        mixed = features + attention_decoder(
            config, first, features, embedded, product=target.product
        )
        return rms_norm(run_block(mixed), params["norm"], config.norm_epsilon)
    if config.kind == "clover":
        hidden = features if config.block is None else run_block(features)
        return _of_unit_rms(config, hidden) if config.has_normed_inputs else hidden
    return target.final_norm(features)


def run_training_block(
    config: HeadsConfig, params: Params, hidden: jax.Array, segments: jax.Array
) -> jax.Array:
    """Hidden states `[B, T, E]` of packed sequences after the augmenting block: causal within
    segments `[B, T]`, nothing cached."""
    assert config.block is not None, "callers run a block only where there is one"
    return decoder.training_layers(
        config.block, params, hidden, segments, has_feed_forward=config.block_part == "whole"
    )


def apply_head(
    config: HeadsConfig,
    params: Params,
    target: TargetParts,
    index: int,
    hidden: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The state for the next head, and the hidden states of this head's logits, both `[..., E]`.

    Args:
      config: of the heads.
      params: of the heads.
      target: what they use of the target.
      index: k, which head; static.
      hidden: `[..., E]`, the state from the head before, or from `anchor`.
      tokens: `[..., k + 1]` int32, the newest token and those that the heads before proposed.
    """
    if config.kind in ("medusa", "hydra"):
        output = inputs = hidden
        if config.kind == "hydra":
            embedded = target.head_rows(tokens)
            flat = embedded.reshape(*tokens.shape[:-1], -1)
            inputs = jnp.concatenate([hidden, flat], axis=-1)
        for block in params["heads"][index]["blocks"]:
            inputs = output = output + jax.nn.silu(_linear(block, inputs, target.product))
        return hidden, output

    embedded = target.head_rows(tokens[..., -1])
    if config.kind == "clover2":
        if index == 0:
            made = _linear(params["head"], hidden, target.product)
        else:
            connection = params["connection"]
            hidden = hidden + attention_decoder(
                config, connection, hidden, embedded, product=target.product
            )
            both = jnp.concatenate([hidden, embedded], axis=-1)
            made = _linear(params["next"], both, target.product)
        return hidden, rms_norm(made, params["head_norm"], config.norm_epsilon)

    if config.connection != "none":
        connection = params["connections"][0 if config.shares_connection else index]
        to_unit = _of_unit_rms if config.has_normed_inputs else _of_unit_length
        embedded = to_unit(config, embedded)
        if config.connection == "attention":
            mixed = attention_decoder(config, connection, hidden, embedded, product=target.product)
        else:
            normed = rms_norm(hidden, connection["norm"], config.norm_epsilon)
            both = jnp.concatenate([normed, embedded], axis=-1)
            mixed = jax.nn.silu(_linear(connection, both, target.product))
        hidden = hidden + mixed
    normed = target.final_norm(hidden)
    return hidden, normed + jax.nn.silu(_linear(params["heads"][index], normed, target.product))


def head_logits(
    config: HeadsConfig, params: Params, target: TargetParts, index: int, output: jax.Array
) -> jax.Array:
    """Logits fp32 of what head `index` made, `[..., E]`: `[..., V]`, or `[..., num_head_tokens]` of
    the tokens that heads may propose."""
    if config.shares_head:
        return target.head(output)
    return target.product(output, params["heads"][index]["head"], dtype=jnp.float32)


def attention_decoder(
    config: HeadsConfig,
    params: Params,
    hidden: jax.Array,
    embedded: jax.Array,
    *,
    product: Product,
) -> jax.Array:
    """What the token `embedded` adds to `hidden`, both `[..., E]` (Clover, 2405.00263, eq. 1 and 2,
    figure 5; Clover-2's released code).

    The query comes from the hidden states, key and value from the token. With this one key a
    softmax would always be one, so each part of the value is gated by how query and key agree.
    """

    def project(name: str, x: jax.Array, **norm: Any) -> jax.Array:
        made = product(x, params[name], **norm)
        if f"{name}_bias" in params:
            made = _add_bias(made, params[f"{name}_bias"])
        return made.reshape(*made.shape[:-1], config.num_gate_heads, -1)

    query = project("query", hidden, norm=params["norm"], epsilon=config.norm_epsilon)
    key, value = project("key", embedded), project("value", embedded)
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    gate = jnp.sum(query * key, axis=-1, keepdims=True)
    if config.gate == "cosine":
        squares = jnp.sum(jnp.square(query), axis=-1, keepdims=True)
        squares = squares * jnp.sum(jnp.square(key), axis=-1, keepdims=True)
        # The root of the larger one, because the gradient of a root at zero is not finite.
        gate = gate / jnp.sqrt(jnp.maximum(squares, jnp.float32(config.norm_epsilon**2)))
    else:
        gate = gate / jnp.sqrt(jnp.float32(query.shape[-1]))
    mixed = gate.astype(value.dtype) * value
    mixed = jax.nn.silu(mixed) if config.has_silu else mixed
    return mixed.reshape(*hidden.shape)


def _linear(params: Params, x: jax.Array, product: Product) -> jax.Array:
    return _add_bias(product(x, params["weight"]), params["bias"])


def _add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + jnp.expand_dims(bias, range(x.ndim - 1))


def _of_unit_rms(config: HeadsConfig, rows: jax.Array) -> jax.Array:
    return rms_norm(rows, jnp.ones((config.width,), rows.dtype), config.norm_epsilon)


def _of_unit_length(config: HeadsConfig, rows: jax.Array) -> jax.Array:
    """As Clover embeds tokens."""
    wide = rows.astype(jnp.float32)
    length = jnp.linalg.norm(wide, axis=-1, keepdims=True)
    return (wide / jnp.maximum(length, 1e-12)).astype(rows.dtype)
