"""What the chain rules have in common: distributions of the nodes, and the verdict of an accepted
length."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec import sampling
from jaxspec.types import BatchView, Draft, DraftContext, Verdict
from jaxspec.verifiers.coupled import follow


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
    """Base of the rules for chains: a rule is an `accept`, and what it promises."""

    promise = "tokens of the target's distribution (greedy rows: the target's own tokens)"
    is_lossless = True
    is_coupled = False
    is_noise_shared = False
    needs_draft_probs = True
    takes_trees = False

    def accept(
        self, distributions: ChainDistributions, draws: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """How many leading nodes are accepted, and from what the next token is drawn; see
        `verify_chain`."""
        raise NotImplementedError(f"{type(self).__name__} has no accept")

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """The verdict on a chain; see `Verifier.verify`."""
        return verify_chain(self.accept, logits, draft, rows, prefix)


def verify_chain(
    accept: Accept, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
) -> Verdict:
    """The verdict of a chain rule; rows of temperature 0 follow the arg max instead.

    Args:
      accept: from the distributions and one uniform draw per node, `[B, N]`, to the number of
        accepted nodes `[B]` and the weights `[B, V]` from which the next token is drawn; the
        target's distribution is used where they are all zero (possible by rounding only).
    """
    num_rows, num_nodes = draft.tokens.shape
    chex.assert_shape(logits, (num_rows, num_nodes + 1, None))
    verdict = follow(sampling.choose(logits, greedy_rows(rows), prefix), draft)
    is_sampled = rows.sampling.temperature > 0

    def sampled() -> Verdict:
        distributions = chain_distributions(sampling.distribution(logits, rows, prefix), draft)
        node = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), draft.tokens.shape)
        draws = sampling.uniform(sampling.round_keys(rows, node, sampling.Stream.ACCEPT))
        num_accepted, weights = accept(distributions, draws)
        of_target = at_node(distributions.p, num_accepted)
        weights = jnp.where(jnp.any(weights > 0, axis=1, keepdims=True), weights, of_target)
        keys = sampling.round_keys(rows, num_accepted[:, None], sampling.Stream.RESIDUAL)
        next_token = sampling.draw_weighted(keys[:, 0], weights)
        is_finite = jnp.isfinite(jnp.max(at_node(logits, num_accepted), axis=1))
        return Verdict(
            num_accepted=jnp.where(is_sampled, num_accepted, verdict.num_accepted),
            path=jnp.where(
                is_sampled[:, None],
                jnp.where(node < num_accepted[:, None], node, -1),
                verdict.path,
            ),
            next_token=jnp.where(
                is_sampled, jnp.where(is_finite, next_token, -1), verdict.next_token
            ),
        )

    return lax.cond(jnp.any(is_sampled), sampled, lambda: verdict)


def greedy_rows(rows: BatchView) -> BatchView:
    """The same rows at temperature 0."""
    cold = jnp.zeros_like(rows.sampling.temperature)
    return rows.replace(sampling=rows.sampling.replace(temperature=cold))


def chain_distributions(p: jax.Array, draft: Draft) -> ChainDistributions:
    """Distributions of a draft; one without q is deterministic, and its q a point mass on each
    token."""
    num_nodes = draft.tokens.shape[1]
    is_node = jnp.arange(num_nodes, dtype=jnp.int32)[None] < draft.num_valid[:, None]
    q = jax.nn.one_hot(draft.tokens, p.shape[2], dtype=jnp.float32) if draft.q is None else draft.q
    q = jnp.where(is_node[..., None], q, 0)
    return ChainDistributions(
        p=p,
        q=jnp.pad(q, ((0, 0), (0, 1), (0, 0))),
        p_token=sampling.of_tokens(p[:, :num_nodes], draft.tokens),
        q_token=jnp.where(is_node, sampling.of_tokens(q, draft.tokens), 1),
        is_node=is_node,
    )


def at_node(values: jax.Array, node: jax.Array) -> jax.Array:
    """`values` `[B, n, V]` at one `node` `[B]` of each row."""
    return jnp.take_along_axis(values, node[:, None, None], axis=1)[:, 0]
