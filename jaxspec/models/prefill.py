"""Prefill: computes the KV of one request's prompt, in chunks of one shape.

A prompt is prefilled up to its last token but one; the last token is the root of the first round's
window. So prefill needs no logits, and a request's KV never depends on what else is being decoded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import KVCache
from jaxspec.models.base import Model, forward_features
from jaxspec.types import PyTree, Window


def chain_window(
    start: jax.Array,
    num_tokens: int,
    *,
    stop: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> Window:
    """The window of consecutive tokens: each is stored in the slot of its position.

    Args:
      start: `[B]` int32, position of each row's first token.
      num_tokens: T, tokens of each row.
      stop: `[B]` int32, one past each row's last token. The rest of the window is padding: it is
        not stored, and repeats the last position, so that it sees no slot that a real token does
        not see. None if there is no padding.
      rows: as in `Window`.
    """
    positions = slots = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    if stop is not None:
        slots = jnp.where(positions < stop[:, None], positions, -1)
        positions = jnp.clip(positions, 0, jnp.maximum(stop - 1, 0)[:, None])
    return Window(start=start, positions=positions, slots=slots, rows=rows)


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
      stop: int32 scalar; the rest of the chunk is padding and is not written.
      chunk: static, the number of tokens of the call.
      taps: see `models.base.forward_features`.
    """
    window = chain_window(start[None], chunk, stop=stop[None], rows=row[None])
    _, features, cache = forward_features(
        model, params, tokens[row][window.positions], window, cache, taps
    )
    return cache, None if features is None else features[0]
