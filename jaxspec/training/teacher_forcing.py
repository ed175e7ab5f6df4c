"""Heads on packed texts of their target, with the true tokens instead of proposed ones.

At the anchor t head k proposes the token at t + 2 + k, from the target's hidden state at t and the
tokens at t + 1 to t + 1 + k; see `drafters.heads.formulas`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.drafters.heads.formulas import (
    Params,
    TargetParts,
    anchor,
    apply_head,
    run_training_block,
)
from jaxspec.kernels.base import rms_norm
from jaxspec.kernels.training import TRAINING, training_product
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.training.text_rows import TextBatch, shifted


class HeadOutput(NamedTuple):
    """The output of one head for a batch.

    Attributes:
      hidden: `[B, T, E]`, from which `head_logits` computes logits.
      labels: `[B, T]` int32, the token that the head should propose at each anchor, or its place in
        the token map, -1 if it is not there.
      weights: `[B, T]` fp32, 1 where that token belongs to the anchor's text and the target wrote
        it, otherwise 0.
    """

    hidden: jax.Array
    labels: jax.Array
    weights: jax.Array


def labels_of(batch: TextBatch, index: int) -> tuple[jax.Array, jax.Array]:
    """Labels and weights `[B, T]` of head `index`; see `HeadOutput`."""
    distance = index + 2
    is_same = shifted(batch.segments, distance) == batch.segments
    weights = (is_same & shifted(batch.is_output, distance)).astype(jnp.float32)
    return shifted(batch.tokens, distance), weights


def target_parts(
    config: ModelConfig, params: Params, token_map: jax.Array | None = None
) -> TargetParts:
    """The parts of a target, with unpacked parameters, that heads use; its head gives logits of the
    tokens of a `token_map` only."""
    head = functools.partial(decoder.head, config, params, is_normed=True, kernels=TRAINING)
    if token_map is not None:
        columns = decoder.head_rows(params, token_map).T
        head = functools.partial(training_product, weight=columns, dtype=jnp.float32)
    return TargetParts(
        final_norm=lambda hidden: rms_norm(hidden, params["final_norm"], config.norm_epsilon),
        head=head,
        head_rows=functools.partial(decoder.head_rows, params),
        product=training_product,
    )


def target_features(
    config: ModelConfig, params: Params, batch: TextBatch, num_layers: int | None = None
) -> jax.Array:
    """The target's hidden states `[B, T, E]` after so many layers (None is all), not yet normed:
    those that the batch has, or computed."""
    if batch.features is not None:
        return batch.features
    taps = (config.num_layers if num_layers is None else num_layers,)
    return decoder.training_features(config, params, batch.tokens, batch.segments, taps)[:, :, 0]


def run_heads(
    config: HeadsConfig,
    params: Params,
    target: TargetParts,
    features: jax.Array,
    batch: TextBatch,
    token_map: jax.Array | None = None,
) -> Iterator[HeadOutput]:
    """The output of each head for the target's `features` `[B, T, E]`, first head first. Heads with
    a `token_map` propose only its tokens."""

    def run_block(hidden: jax.Array) -> jax.Array:
        return run_training_block(config, params, hidden, batch.segments)

    following = [shifted(batch.tokens, 1 + index) for index in range(config.num_heads)]
    hidden = anchor(config, params, target, features, following[0], run_block)
    for index in range(config.num_heads):
        tokens = jnp.stack(following[: index + 1], axis=-1)
        hidden, output = apply_head(config, params, target, index, hidden, tokens)
        labels, weights = labels_of(batch, index)
        if token_map is not None:
            nowhere = jnp.full((config.vocab_size,), -1, jnp.int32)
            places = jnp.arange(token_map.shape[0], dtype=jnp.int32)
            labels = nowhere.at[token_map].set(places)[labels]
        yield HeadOutput(output, labels, weights)
