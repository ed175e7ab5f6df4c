"""Prefill: a request's prompt, alone, in chunks of one shape.

A prompt of p tokens is read up to its last but one; the last one is the root of the first round's
window. So prefill needs no logits, and a request's KV never depends on what else is being decoded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import KVCache
from jaxspec.models.base import Model, forward_features
from jaxspec.types import PyTree, Window


def prefill_chunk(
    model: Model,
    params: PyTree,
    cache: KVCache,
    tokens: jax.Array,
    *,
    row: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    chunk: int,
    taps: tuple[int, ...] = (),
) -> tuple[KVCache, jax.Array | None]:
    """The cache with the KV of tokens `start` to `stop` (at most `chunk`) of one row, and the
    residual stream `[chunk, n, E]` at the model's boundaries `taps`, None without any.

    Args:
      tokens: `[B, S]` int32, the rows' committed tokens.
      row: int32 scalar, the row in `tokens` and in the cache's table.
      start: int32 scalar.
      stop: int32 scalar; the rest of the chunk is padding, written nowhere.
      chunk: static shape of the call.
      taps: see `models.base.forward_features`.
    """
    index = start + jnp.arange(chunk, dtype=jnp.int32)
    # Padding repeats the last position, so that it looks at no slot a real token does not.
    positions = jnp.clip(index, 0, jnp.maximum(stop - 1, 0))
    window = Window(
        start=start[None],
        positions=positions[None],
        slots=jnp.where(index < stop, index, -1)[None],
        rows=row[None],
    )
    _, features, cache = forward_features(
        model, params, tokens[row][positions][None], window, cache, taps
    )
    return cache, None if features is None else features[0]
