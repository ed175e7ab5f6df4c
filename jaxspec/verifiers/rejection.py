"""Rejection verification, token by token (Leviathan et al., 2211.17192).

The same rule is in Chen et al. (2302.01318).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.verifiers.chain import ChainDistributions, ChainVerifier, at_node


@dataclasses.dataclass(frozen=True)
class Rejection(ChainVerifier):
    """Accepts a drafted token x with probability min(1, p(x) / q(x)); on rejection the next token
    comes from the residual distribution, norm(max(p - q, 0))."""

    name = "rejection"

    def accept(
        self, distributions: ChainDistributions, draws: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Number of leading nodes with `u q < p`, and the residual after them."""
        passes = (draws * distributions.q_token < distributions.p_token) & distributions.is_node
        num_accepted = jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1)
        residual = jnp.maximum(
            at_node(distributions.p, num_accepted) - at_node(distributions.q, num_accepted), 0
        )
        return num_accepted, residual
