"""Coupled verification: the target draws a token at every node, and matching drafts are followed.

Each draw is keyed by the request and the position, so the output is what the target alone would
have drawn, token for token, whatever was drafted, chain or tree. At temperature 0 the draw is the
arg max: greedy verification (Leviathan et al., 2211.17192). A drafter that samples should use the
same noise: wherever the two distributions are close, it then proposes the token that the target
will draw.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from jaxspec.runtime.values import flag
from jaxspec.sampling import choose
from jaxspec.types import BatchView, Draft, DraftContext, Verdict


@dataclasses.dataclass(frozen=True)
class Coupled:
    """Keeps the drafted tokens that the target draws as well; the default.

    Attributes:
      is_noise_shared: False lets sampling drafters draw with their own noise. The output stays the
        same, but hardly anything is accepted; for studying acceptance.
    """

    is_noise_shared: bool = True
    is_lossless = True
    is_coupled = True
    needs_draft_probs = False
    takes_trees = True
    promise = "the target's own tokens, bit for bit, at any temperature"

    def __post_init__(self):
        object.__setattr__(self, "is_noise_shared", flag("is_noise_shared", self.is_noise_shared))

    @property
    def name(self) -> str:
        """`coupled`, or `coupled:independent`."""
        return "coupled" if self.is_noise_shared else "coupled:independent"

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """Follows the drafts that the target draws."""
        chosen = choose(logits, rows, prefix)
        return follow(chosen, draft).replace(chosen=chosen)


def follow(chosen: jax.Array, draft: Draft) -> Verdict:
    """The path of drafted nodes that agree with the target's choices.

    Args:
      chosen: `[B, N + 1]` int32, the target's token after the newest committed one (index 0) and
        after each node; -1 is no token, and ends the path.
      draft: any tree; among siblings with the same token, the first is followed.
    """
    num_rows, num_nodes = draft.tokens.shape
    chex.assert_shape(chosen, (num_rows, num_nodes + 1))
    is_node = draft.is_node
    node = jnp.full((num_rows,), -1, jnp.int32)  # the last node followed; -1 is the root
    is_walking = jnp.ones((num_rows,), bool)
    path = []
    for _ in range(draft.depth):
        wanted = jnp.take_along_axis(chosen, node[:, None] + 1, axis=1)
        matches = is_node & (draft.parents == node[:, None]) & (draft.tokens == wanted)
        is_walking &= jnp.any(matches, axis=1)
        node = jnp.where(is_walking, jnp.argmax(matches, axis=1).astype(jnp.int32), node)
        path.append(jnp.where(is_walking, node, -1))
    path = jnp.stack(path, axis=1)
    return Verdict(
        num_accepted=jnp.sum(path >= 0, axis=1, dtype=jnp.int32),
        path=path,
        next_token=jnp.take_along_axis(chosen, node[:, None] + 1, axis=1)[:, 0],
    )
