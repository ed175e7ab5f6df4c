"""Typical acceptance (Medusa, Cai et al., 2401.10774). Lossy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.kernels import sums
from jaxspec.runtime.values import number
from jaxspec.types import BatchView, Draft, DraftContext, Verdict
from jaxspec.verifiers.tree import at_node, verify_tree


@dataclasses.dataclass(frozen=True)
class Typical:
    """Accepts drafted tokens that the target finds likely enough: `p(x) > min(epsilon, delta
    exp(-H(p)))`. **Lossy:** the output does not follow the target's distribution (greedy rows do).

    In a tree it takes the longest path of such tokens, and the likeliest if there are several.

    Attributes:
      epsilon: probability above which any token is accepted.
      delta: scale of the threshold where the target is uncertain; Medusa takes sqrt(epsilon).
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name = "typical (lossy)"
    promise = "lossy: tokens that the target finds typical, not its distribution"
    is_lossless = False
    is_coupled = False
    is_noise_shared = False
    needs_draft_probs = False
    takes_trees = True

    def __post_init__(self):
        for field, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            expected = "above 0 and at most 1, as a threshold on probabilities"
            object.__setattr__(
                self, field, number(field, value, above=0, most=1, expected=expected)
            )

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """The verdict on a chain or a tree; see `Verifier.verify`."""
        return verify_tree(self.accept, logits, draft, rows, prefix)

    def accept(self, p: jax.Array, draft: Draft, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The longest path of typical tokens (the likeliest if there are several), and p after it;
        see `verify_tree`. It needs no draws."""
        del draws
        surprise = jnp.where(p > 0, -jnp.log(jnp.where(p > 0, p, 1)), 0)
        entropy = sums.total(p * surprise)[..., 0]
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))  # [B, N + 1]

        # Indexed by entry: 0 is the root, node n is entry n + 1. Padding and holes hang from the
        # root.
        row = jnp.arange(p.shape[0], dtype=jnp.int32)[:, None]
        parent = jnp.where(draft.is_node, draft.parents + 1, 0)
        p_token = p[row, parent, jnp.where(draft.is_node, draft.tokens, 0)]
        passes = draft.is_node & (p_token > threshold[row, parent])
        log_p = jnp.pad(jnp.log(jnp.where(passes, p_token, 1)), ((0, 0), (1, 0)))
        passes = jnp.pad(passes, ((0, 0), (1, 0)), constant_values=True)
        parent = jnp.pad(parent, ((0, 0), (1, 0)))

        above = jnp.broadcast_to(jnp.arange(parent.shape[1], dtype=jnp.int32)[None], parent.shape)
        lineage = []
        for _ in range(draft.depth):
            lineage.append(above)
            above = parent[row, above]
        lineage = jnp.stack(lineage, axis=2)  # [B, N + 1, D]: itself, its parent, ..., the root
        is_path = jnp.all(passes[row[..., None], lineage], axis=2)
        length = jnp.where(is_path, jnp.sum(lineage > 0, axis=2, dtype=jnp.int32), 0)
        longest = jnp.max(length, axis=1, keepdims=True)
        total = jnp.sum(log_p[row[..., None], lineage], axis=2)
        last = jnp.argmax(jnp.where(is_path & (length == longest), total, -jnp.inf), axis=1)

        depth = jnp.arange(draft.depth, dtype=jnp.int32)[None]
        upwards = jnp.take_along_axis(lineage, last[:, None, None], axis=1)[:, 0]
        downwards = jnp.take_along_axis(upwards, jnp.maximum(longest - 1 - depth, 0), axis=1)
        return jnp.where(depth < longest, downwards - 1, -1), at_node(p, last)
