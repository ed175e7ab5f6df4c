"""What the rules for chains have in common: distributions along a chain, and the verdict for an
accepted length."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import sampling
from jaxspec.types import BatchView, Draft, DraftContext, Verdict
from jaxspec.verifiers.tree import verify_tree


class ChainDistributions(struct.PyTreeNode, kw_only=True):
    """Distributions along a drafted chain, fp32.

    Attributes:
      p: `[B, N + 1, V]`, the target's, before each node and after the last.
      q: `[B, N + 1, V]`, the distribution each node was drawn from; zero where there is no node, so
        that the residual of a fully accepted draft is p itself.
      p_token: `[B, N]`, p of each drafted token.
      q_token: `[B, N]`, q of each drafted token; 1 where there is no node.
      is_node: `[B, N]` bool.
    """

    p: jax.Array
    q: jax.Array
    p_token: jax.Array
    q_token: jax.Array
    is_node: jax.Array


Accept = Callable[[ChainDistributions, jax.Array], tuple[jax.Array, jax.Array]]


class ChainVerifier:
    """Base class of rules for chains: a rule defines `accept` and what it promises."""

    promise = "tokens of the target's distribution (greedy rows: the target's own tokens)"
    is_lossless = True
    is_coupled = False
    is_noise_shared = False
    needs_draft_probs = True
    takes_trees = False

    def accept(
        self, distributions: ChainDistributions, draws: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """How many leading nodes are accepted, and the weights that the next token is drawn from;
        see `verify_chain`."""
        raise NotImplementedError(f"{type(self).__name__} has no accept")

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """The verdict on a chain; see `Verifier.verify`."""
        return verify_chain(self.accept, logits, draft, rows, prefix)


def verify_chain(
    accept: Accept, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
) -> Verdict:
    """The verdict of a chain rule; rows at temperature 0 follow the arg max instead.

    Args:
      accept: a function of the distributions and one uniform draw per node, `[B, N]`, that returns
        the number of accepted nodes `[B]` and the weights `[B, V]` from which the next token is
        drawn. Where these are all zero, which only rounding can cause, the target's distribution is
        used.
    """

    def accept_path(p: jax.Array, draft: Draft, draws: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_accepted, weights = accept(chain_distributions(p, draft), draws)
        node = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
        return jnp.where(node < num_accepted[:, None], node, -1), weights

    return verify_tree(accept_path, logits, draft, rows, prefix)


def chain_distributions(p: jax.Array, draft: Draft) -> ChainDistributions:
    """Distributions of a draft. A draft without q is deterministic: its q is a point mass on each
    token. A chain ends before its first hole."""
    num_nodes = draft.tokens.shape[1]
    is_node = jnp.cumprod(draft.is_node.astype(jnp.int32), axis=1) > 0
    q = jax.nn.one_hot(draft.tokens, p.shape[2], dtype=jnp.float32) if draft.q is None else draft.q
    q = jnp.where(is_node[..., None], q, 0)
    return ChainDistributions(
        p=p,
        q=jnp.pad(q, ((0, 0), (0, 1), (0, 0))),
        p_token=sampling.of_tokens(p[:, :num_nodes], draft.tokens),
        q_token=jnp.where(is_node, sampling.of_tokens(q, draft.tokens), 1),
        is_node=is_node,
    )
