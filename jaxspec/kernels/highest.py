"""The highest scores of a row and their log-sum-exp, for choosing the children of a tree's node."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import sums

BLOCK = 64  # size of the blocks of scores whose maxima are compared first


class Highest(NamedTuple):
    """The highest scores of some rows.

    Attributes:
      scores: `[..., n]` fp32, in descending order.
      places: `[..., n]` int32, their indices in the row.
      log_total: `[...]` fp32, the logarithm of the sum of `exp(sharpness * score)` over the row.
    """

    scores: jax.Array
    places: jax.Array
    log_total: jax.Array


def highest(
    scores: jax.Array, count: int, sharpness: jax.Array | None = None, *, in_blocks: bool = True
) -> Highest:
    """The `count` highest of `scores` `[B, ..., V]` fp32; on a tie, the first ones.

    XLA:CPU's `top_k` handles one score at a time, but the maximum of a block is vectorised. The
    highest scores are in the blocks with the highest maxima, so `top_k` only has to look at these.
    A GPU looks at all of them.

    Args:
      scores: may be -inf. For a row with a NaN, `log_total` is NaN and the other results are
        unspecified, except that `places` are valid indices.
      count: at most V.
      sharpness: `[B]` fp32, above 0; None means 1.
      in_blocks: static, whether maxima of blocks are compared first.
    """
    *leading, size = scores.shape
    scaled = scores
    if sharpness is not None:
        scaled = jnp.expand_dims(sharpness, range(1, scores.ndim)) * scores
    log_total = sums.logsumexp(scaled)[..., 0]
    num_blocks = -(-size // BLOCK)
    if not in_blocks or num_blocks <= 2 * count:
        return Highest(*lax.top_k(scores, count), log_total)
    padding = [*[(0, 0)] * len(leading), (0, num_blocks * BLOCK - size)]
    blocks = jnp.pad(scores, padding, constant_values=-jnp.inf)
    blocks = blocks.reshape(*leading, num_blocks, BLOCK)
    chosen = jnp.sort(lax.top_k(jnp.max(blocks, axis=-1), count)[1], axis=-1)
    looked_at = jnp.take_along_axis(blocks, chosen[..., None], axis=-2)
    best, index = lax.top_k(looked_at.reshape(*leading, count * BLOCK), count)
    of_block = jnp.take_along_axis(chosen, index // BLOCK, axis=-1)
    return Highest(best, of_block * BLOCK + index % BLOCK, log_total)
