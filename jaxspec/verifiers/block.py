"""Block verification: the draft is judged as a whole (Sun et al., 2403.10444).

It accepts at least as many tokens in expectation as `rejection`, for every p and q, and no rule for
single chains accepts more. It takes chains only: a node's test depends on what follows it, and in a
tree several nodes may follow.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.kernels import sums
from jaxspec.verifiers.chain import ChainDistributions, ChainVerifier
from jaxspec.verifiers.tree import at_node


@dataclasses.dataclass(frozen=True)
class Block(ChainVerifier):
    """Accepts the longest prefix whose test passes; a later node may pass where an earlier one
    fails."""

    name = "block"

    def accept(
        self, distributions: ChainDistributions, draws: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Length of the longest passing prefix, and the residual after it.

        With `P_0 = 1` and `P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))`, node i passes with
        probability `S_i / (S_i + 1 - P_i)`, `S_i = sum_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0)`; the
        last node with `P_i`. The next token comes from `max(P p - q, 0)` at the end of the prefix.
        """
        num_nodes = distributions.p_token.shape[1]
        reach = [jnp.ones_like(distributions.p_token[:, 0])]
        for node in range(num_nodes):
            ratio = distributions.p_token[:, node] / distributions.q_token[:, node]
            reach.append(jnp.minimum(1, reach[-1] * ratio))
        reach = jnp.stack(reach, axis=1)  # [B, N + 1], P_0 to P_N
        residuals = jnp.maximum(
            reach[..., None] * distributions.p - distributions.q, 0
        )  # [B, N + 1, V]
        after = reach[:, 1:]  # P_i, after each node
        mass = sums.total(residuals[:, 1:])[..., 0]  # S_i
        # After the last node q is zero, so mass is P_i there, and S / (S + 1 - P) is P_i as it
        # should be.
        is_last = distributions.is_node & ~jnp.pad(distributions.is_node[:, 1:], ((0, 0), (0, 1)))
        mass = jnp.where(is_last, after, mass)
        # Where P_i is 1 the node always passes, also where p = q leaves no mass (0 / 0).
        passes = ((draws * (mass + 1 - after) < mass) | (after >= 1)) & distributions.is_node
        length = jnp.arange(1, num_nodes + 1, dtype=jnp.int32)[None]
        num_accepted = jnp.max(jnp.where(passes, length, 0), axis=1)
        is_complete = num_accepted == jnp.sum(distributions.is_node, axis=1, dtype=jnp.int32)
        residual = at_node(residuals, num_accepted)
        weights = jnp.where(is_complete[:, None], at_node(distributions.p, num_accepted), residual)
        return num_accepted, weights
