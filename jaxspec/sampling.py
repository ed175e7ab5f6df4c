"""From logits to tokens.

Greedy decoding only, which is sampling at temperature 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def greedy_tokens(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the highest logit over the last axis, the first of equals, and whether it is finite.

    Two plain reductions instead of `argmax`, whose paired reduction XLA:CPU does not vectorise.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(logits == highest, index, logits.shape[-1] - 1), axis=-1)
    return first, jnp.isfinite(highest[..., 0])
