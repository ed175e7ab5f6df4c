"""Prefill: computes the KV of prompts, some chunks in one call of one shape.

A prompt is prefilled up to, but not including, its last token, which is the root of the first
round's window; so prefill needs no logits. The chunks of a call may belong to any rows, and several
consecutive ones to the same row, because a layer writes the KV of all chunks before it reads any. A
request's KV therefore depends neither on what else is being decoded nor on how chunks are divided
among calls.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import KVCache
from jaxspec.models.base import Model, forward_features, kernels_of
from jaxspec.types import PyTree, Window

CHUNK = 128  # tokens of a prompt in a chunk
# Chunks of one call: 512 tokens fill an accelerator. XLA computes empty chunks too; on a CPU, which
# one chunk fills, it prefills them one at a time. The C++ kernels leave all padding out.
CHUNKS_PER_CALL = 4


def chunks_per_call(target: Model) -> int:
    """How many chunks a call prefills: a constant of the device and the kernels."""
    platform = getattr(target, "platform", jax.default_backend())
    skips_padding = kernels_of(target).skips_padding
    return 1 if platform == "cpu" and not skips_padding else CHUNKS_PER_CALL


def next_starts(num_read: jax.Array, rows: jax.Array, chunk: int) -> jax.Array:
    """`[R]` int32, where the chunks of `rows` `[R]` begin if they continue what was read of each
    row, its first `num_read` `[B]` tokens; 0 for those of row -1."""
    num_before = jnp.sum(jnp.tril(rows[:, None] == rows[None], -1), axis=1, dtype=jnp.int32)
    return jnp.where(rows < 0, 0, num_read[jnp.maximum(rows, 0)] + chunk * num_before)


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
      stop: `[B]` int32, one past each row's last token. The rest of the window is padding, which
        nobody asks for: it is not stored, and repeats the last position, so that it sees no slot
        that a real token does not see. None if there is no padding.
      rows: as in `Window`.
    """
    positions = slots = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    num_live = None
    if stop is not None:
        num_live = jnp.clip(stop - start, 0, num_tokens)
        slots = jnp.where(positions < stop[:, None], positions, -1)
        positions = jnp.clip(positions, 0, jnp.maximum(stop - 1, 0)[:, None])
    return Window(start=start, positions=positions, slots=slots, rows=rows, num_live=num_live)


def prefill_chunks(
    model: Model,
    params: PyTree,
    cache: KVCache,
    tokens: jax.Array,
    *,
    rows: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
    chunk: int,
    taps: tuple[int, ...] = (),
) -> tuple[KVCache, jax.Array | None, jax.Array]:
    """The cache with the KV of R chunks, each the tokens `starts` to `stops` (at most `chunk`) of
    one row, their residual stream `[R, chunk, n, E]` at the model's boundaries `taps`, None without
    any, and their last hidden states `[R, chunk, E]`, which cost nothing unless they are used.

    Args:
      tokens: `[B, S]` int32, the rows' committed tokens.
      rows: `[R]` int32, each chunk's row in `tokens` and in the cache's table. A row may have
        several chunks, one after the other without a gap.
      starts: `[R]` int32.
      stops: `[R]` int32; the rest of a chunk is padding and is not written.
      chunk: static, the number of tokens of each.
      taps: see `models.base.forward_features`.
    """
    window = chain_window(starts, chunk, stop=stops, rows=rows)
    own = jnp.take_along_axis(tokens[rows], window.positions, axis=1)
    hidden, features, cache = forward_features(model, params, own, window, cache, taps)
    return cache, features, hidden
