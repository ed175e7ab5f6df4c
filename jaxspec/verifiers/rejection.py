"""Rejection verification, token by token (Leviathan et al., 2211.17192).

The same rule is in Chen et al. (2302.01318).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.types import BatchView, Draft, DraftContext, Verdict
from jaxspec.verifiers.chain import ChainDistributions, at_node, verify_chain


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Accepts a drafted token x with probability min(1, p(x) / q(x)); on rejection the next token
    comes from the residual distribution, norm(max(p - q, 0))."""

    name = "rejection"
    promise = "tokens of the target's distribution (greedy rows: the target's own tokens)"
    is_lossless = True
    is_coupled = False
    is_noise_shared = False
    needs_draft_probs = True
    takes_trees = False

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """Accepts the leading drafts that pass their test."""
        return verify_chain(accept_leading, logits, draft, rows, prefix)


def accept_leading(
    distributions: ChainDistributions, draws: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Number of leading nodes with `u q < p`, and the residual after them."""
    passes = (draws * distributions.q_token < distributions.p_token) & distributions.is_node
    num_accepted = jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1)
    residual = jnp.maximum(
        at_node(distributions.p, num_accepted) - at_node(distributions.q, num_accepted), 0
    )
    return num_accepted, residual
