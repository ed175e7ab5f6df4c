"""Texts packed into rows of one length, for training steps."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.training.texts import Text

# Rows that a text may still be put into; more of them would hardly improve the packing.
_NUM_OPEN_ROWS = 64


class TextBatch(struct.PyTreeNode, kw_only=True):
    """Packed texts, `[B, T]` unless another shape is given.

    Attributes:
      tokens: int32, prompts and outputs; 0 in padding.
      segments: int32, the index of each token's text within its row; -1 in padding.
      is_output: bool, whether the target wrote the token.
      features: `[B, T, E]`, the target's hidden states after the layer that the drafter reads, if
        they are known.
    """

    tokens: jax.Array
    segments: jax.Array
    is_output: jax.Array
    features: jax.Array | None = None


def fill_rows(lengths: Sequence[int], row_length: int, rng: np.random.Generator) -> list[list[int]]:
    """Rows of whole texts, given by index: every text is in one row, in random order.

    Args:
      lengths: those of the texts, none above `row_length`.
      row_length: T.
      rng: generator of the order.
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


def pack_texts(rows: Sequence[Sequence[Text]], row_length: int) -> TextBatch:
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
    return TextBatch(
        tokens=jnp.asarray(tokens), segments=jnp.asarray(segments), is_output=jnp.asarray(is_output)
    )


def shifted(values: jax.Array, distance: int) -> jax.Array:
    """`values` `[B, T, ...]` at positions `distance` further on; zeros past the last."""
    padding = [(0, 0), (0, distance)] + [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values, padding)[:, distance:]
