"""Coupled verification: the target chooses a token at every node, and matching drafts are followed.

The output is what the target would have chosen alone, token for token, whatever was drafted. At
temperature 0 the choice is the arg max (greedy verification, Leviathan et al., 2211.17192).
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxspec.types import Draft, Verdict


def follow(chosen: jax.Array, draft: Draft) -> Verdict:
    """The path of drafted nodes that agree with the target's choices.

    Args:
      chosen: `[B, N + 1]` int32, the target's token after the newest committed one (index 0) and
        after each node.
      draft: any tree; of siblings with the same token the first is followed.
    """
    num_rows, num_nodes = draft.tokens.shape
    chex.assert_shape(chosen, (num_rows, num_nodes + 1))
    index = jnp.arange(num_nodes, dtype=jnp.int32)
    is_valid = index < draft.num_valid[:, None]
    node = jnp.full((num_rows,), -1, jnp.int32)  # the last node followed; -1 is the root
    is_walking = jnp.ones((num_rows,), bool)
    path = []
    for _ in range(num_nodes):
        wanted = jnp.take_along_axis(chosen, node[:, None] + 1, axis=1)
        matches = is_valid & (draft.parents == node[:, None]) & (draft.tokens == wanted)
        is_walking &= jnp.any(matches, axis=1)
        node = jnp.where(is_walking, jnp.argmax(matches, axis=1).astype(jnp.int32), node)
        path.append(jnp.where(is_walking, node, -1))
    path = jnp.stack(path, axis=1)
    return Verdict(
        num_accepted=jnp.sum(path >= 0, axis=1, dtype=jnp.int32),
        path=path,
        next_token=jnp.take_along_axis(chosen, node[:, None] + 1, axis=1)[:, 0],
    )
