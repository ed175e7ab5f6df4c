"""Heads on packed texts of their target, with the true tokens in the place of proposed ones.

At the anchor t head k proposes the token at t + 2 + k, from the target's hidden state at t and the
tokens at t + 1 to t + 1 + k; see `drafters.heads.formulas`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.drafters.heads.block import run_training_block
from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.drafters.heads.formulas import Params, TargetParts, anchor, apply_head
from jaxspec.kernels.base import rms_norm
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.training.texts import Text

# Rows that a text may still be put into; more of them would hardly be filled better.
_NUM_OPEN_ROWS = 64


class HeadBatch(struct.PyTreeNode, kw_only=True):
    """Packed texts, all `[B, T]`.

    Attributes:
      tokens: int32, prompts and outputs; 0 where a row is filled up.
      segments: int32, the text of each token within its row, from 0; -1 where a row is filled up.
      is_output: bool, whether the target wrote the token.
    """

    tokens: jax.Array
    segments: jax.Array
    is_output: jax.Array


class HeadOutput(NamedTuple):
    """What one head makes of a batch.

    Attributes:
      hidden: `[B, T, E]`, of which `head_logits` makes logits.
      labels: `[B, T]` int32, the token that the head should propose at each anchor.
      weights: `[B, T]` fp32, 1 where that token is of the anchor's text and the target wrote it,
        else 0.
    """

    hidden: jax.Array
    labels: jax.Array
    weights: jax.Array


def fill_rows(lengths: Sequence[int], row_length: int, rng: np.random.Generator) -> list[list[int]]:
    """Rows of whole texts, given by index: every text is in one row, in random order.

    Args:
      lengths: of the texts, none above `row_length`.
      row_length: T.
      rng: of the order.
    """
    done: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # the room that is left, and the texts
    for index in rng.permutation(len(lengths)).tolist():
        length = lengths[index]
        fitting = [place for place, (room, _) in enumerate(open_rows) if room >= length]
        if fitting:
            place = min(fitting, key=lambda place: open_rows[place][0])
            room, row = open_rows.pop(place)
        else:
            if len(open_rows) == _NUM_OPEN_ROWS:
                done.append(open_rows.pop(0)[1])
            room, row = row_length, []
        open_rows.append((room - length, [*row, index]))
    done += [row for _, row in open_rows]
    return [done[place] for place in rng.permutation(len(done))]


def pack_texts(rows: Sequence[Sequence[Text]], row_length: int) -> HeadBatch:
    """The batch of `rows`, each of which is cut after `row_length` tokens."""
    shape = (len(rows), row_length)
    tokens = np.zeros(shape, np.int32)
    segments = np.full(shape, -1, np.int32)
    is_output = np.zeros(shape, bool)
    for row, texts in enumerate(rows):
        start = 0
        for segment, text in enumerate(texts):
            whole = [*text.prompt, *text.output][: row_length - start]
            end = start + len(whole)
            tokens[row, start:end] = whole
            segments[row, start:end] = segment
            is_output[row, start + len(text.prompt) : end] = True
            start = end
    return HeadBatch(
        tokens=jnp.asarray(tokens), segments=jnp.asarray(segments), is_output=jnp.asarray(is_output)
    )


def shifted(values: jax.Array, distance: int) -> jax.Array:
    """`values` `[B, T, ...]` of the positions `distance` further on; zeros after the last."""
    padding = [(0, 0), (0, distance)] + [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values, padding)[:, distance:]


def labels_of(batch: HeadBatch, index: int) -> tuple[jax.Array, jax.Array]:
    """Labels and weights `[B, T]` of head `index`; see `HeadOutput`."""
    distance = index + 2
    is_same = shifted(batch.segments, distance) == batch.segments
    weights = (is_same & shifted(batch.is_output, distance)).astype(jnp.float32)
    return shifted(batch.tokens, distance), weights


def target_parts(config: ModelConfig, params: Params) -> TargetParts:
    """What heads use of a target whose parameters are not packed."""
    return TargetParts(
        final_norm=lambda hidden: rms_norm(hidden, params["final_norm"], config.norm_epsilon),
        head=functools.partial(decoder.head, config, params, is_normed=True),
        head_rows=functools.partial(decoder.head_rows, config, params),
    )


def last_features(config: ModelConfig, params: Params, batch: HeadBatch) -> jax.Array:
    """The target's hidden states `[B, T, E]` after its last layer, not yet normed."""
    last = (config.num_layers,)
    return decoder.training_features(config, params, batch.tokens, batch.segments, last)[:, :, 0]


def run_heads(
    config: HeadsConfig,
    params: Params,
    target: TargetParts,
    features: jax.Array,
    batch: HeadBatch,
) -> Iterator[HeadOutput]:
    """What each head makes of the target's `features` `[B, T, E]`, first head first."""

    def run_block(hidden: jax.Array) -> jax.Array:
        return run_training_block(config, params, hidden, batch.segments)

    following = [shifted(batch.tokens, 1 + index) for index in range(config.num_heads)]
    hidden = anchor(config, params, target, features, following[0], run_block)
    for index in range(config.num_heads):
        tokens = jnp.stack(following[: index + 1], axis=-1)
        hidden, output = apply_head(config, params, target, index, hidden, tokens)
        labels, weights = labels_of(batch, index)
        yield HeadOutput(output, labels, weights)
