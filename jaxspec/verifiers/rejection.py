"""Rejection verification, token by token (Leviathan et al., 2211.17192).

The same rule is in Chen et al. (2302.01318). On trees it is SpecInfer's (Miao et al., 2305.09781),
for siblings that were drawn without replacement.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.kernels import sums
from jaxspec.types import BatchView, Draft, DraftContext, Verdict
from jaxspec.verifiers.chain import ChainDistributions, ChainVerifier
from jaxspec.verifiers.tree import at_node, verify_tree


@dataclasses.dataclass(frozen=True)
class Rejection(ChainVerifier):
    """Accepts a drafted token x with probability min(1, p(x) / q(x)); on rejection the next token
    comes from the residual distribution, norm(max(p - q, 0)).

    In a tree the rejected token's next sibling is judged in the same way with what is left: the
    residual instead of p, and q without that token, both normalised. See `accept_in_tree`.
    """

    name = "rejection"
    takes_trees = True

    def accept(
        self, distributions: ChainDistributions, draws: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Number of leading nodes with `u q < p`, and the residual after them."""
        passes = (draws * distributions.q_token < distributions.p_token) & distributions.is_node
        is_kept = jnp.cumprod(passes.astype(jnp.int32), axis=1)
        num_accepted = jnp.sum(is_kept, axis=1, dtype=jnp.int32)
        residual = jnp.maximum(
            at_node(distributions.p, num_accepted) - at_node(distributions.q, num_accepted), 0
        )
        return num_accepted, residual

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """The verdict on a chain or a tree; see `Verifier.verify`."""
        if draft.is_chain:  # all nodes at once, with the same verdict
            return super().verify(logits, draft, rows, prefix)
        return verify_tree(accept_in_tree, logits, draft, rows, prefix)


class Walk(struct.PyTreeNode, kw_only=True):
    """How far a tree has been walked: the last accepted node, and what its rejected children have
    left of p.

    Attributes:
      node: `[B]` int32, the last accepted node; -1 is the root.
      p: `[B, V]` fp32, what is left of the target's distribution after it, not normalised.
      is_rejected: `[B, V]` bool, tokens of its children that were rejected.
      path: `[B, D]` int32, as in `Verdict`.
    """

    node: jax.Array
    p: jax.Array
    is_rejected: jax.Array
    path: jax.Array


def accept_in_tree(p: jax.Array, draft: Draft, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The accepted path of a tree, and what is left of p after its last node; see `verify_tree`.

    Nodes are judged in their order. A child x of the last accepted node passes if `u q(x) |p| <
    p(x) |q|`, where p and q are what its rejected siblings have left, and `|p|` and `|q|` their
    masses. In a draft without q, each node's q is a point mass. A token that q cannot draw, such as
    an earlier sibling's, cannot have been drawn: so its node is skipped like a hole, even where the
    test alone would accept it.
    """
    num_rows, num_nodes = draft.tokens.shape
    is_node = draft.is_node
    depth = jnp.arange(draft.depth, dtype=jnp.int32)[None]
    vocabulary = jnp.arange(p.shape[2], dtype=jnp.int32)[None]

    def judge(node: jax.Array, walk: Walk) -> Walk:
        is_child = is_node[:, node] & (draft.parents[:, node] == walk.node)
        is_token = vocabulary == draft.tokens[:, node][:, None]
        if draft.q is None:
            q = is_token.astype(jnp.float32)
        else:
            q = jnp.where(walk.is_rejected, 0, draft.q[:, node])
        # Distributions that are still whole have mass 1, whatever their fp32 numbers sum to.
        is_first = ~jnp.any(walk.is_rejected, axis=1)
        p_mass = jnp.where(is_first, 1, sums.total(walk.p)[:, 0])
        q_mass = jnp.where(is_first, 1, sums.total(q)[:, 0])
        p_token = jnp.max(jnp.where(is_token, walk.p, 0), axis=1)
        q_token = jnp.max(jnp.where(is_token, q, 0), axis=1)

        was_drawn = is_child & (q_token > 0)
        passes = draws[:, node] * q_token * p_mass < p_token * q_mass
        accepts, rejects = was_drawn & passes, was_drawn & ~passes
        left = residual(walk.p, q, p_mass=p_mass, q_mass=q_mass)
        num_accepted = jnp.sum(walk.path >= 0, axis=1, keepdims=True, dtype=jnp.int32)
        return Walk(
            node=jnp.where(accepts, node, walk.node),
            p=jnp.where(
                accepts[:, None], p[:, node + 1], jnp.where(rejects[:, None], left, walk.p)
            ),
            is_rejected=~accepts[:, None] & (walk.is_rejected | (rejects[:, None] & is_token)),
            path=jnp.where(accepts[:, None] & (depth == num_accepted), node, walk.path),
        )

    root = Walk(
        node=jnp.full((num_rows,), -1, jnp.int32),
        p=p[:, 0],
        is_rejected=jnp.zeros((num_rows, p.shape[2]), bool),
        path=jnp.full((num_rows, draft.depth), -1, jnp.int32),
    )
    walk = lax.fori_loop(0, num_nodes, judge, root)
    return walk.path, walk.p


def residual(p: jax.Array, q: jax.Array, *, p_mass: jax.Array, q_mass: jax.Array) -> jax.Array:
    """`max(p / |p| - q / |q|, 0)` `[B, V]`, the distribution of the token that replaces a rejected
    draw from q; not normalised. Masses are `[B]`; a mass that has vanished by rounding leaves
    nothing."""
    tiny = jnp.finfo(jnp.float32).tiny
    p = p / jnp.maximum(p_mass, tiny)[:, None]
    return jnp.maximum(p - q / jnp.maximum(q_mass, tiny)[:, None], 0)
