"""What sampling rules have in common: greedy rows, noise, and the verdict for an accepted path."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import sampling
from jaxspec.types import BatchView, Draft, DraftContext, Verdict
from jaxspec.verifiers.coupled import follow

AcceptPath = Callable[[jax.Array, Draft, jax.Array], tuple[jax.Array, jax.Array]]


def verify_tree(
    accept: AcceptPath, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
) -> Verdict:
    """The verdict of a rule; rows at temperature 0 follow the arg max instead.

    Args:
      accept: a function of the target's distributions `[B, N + 1, V]` after the newest token and
        after each node, the draft, and one uniform draw per node, `[B, N]`. It returns the accepted
        path `[B, D]` (see `Verdict.path`) and the weights `[B, V]` from which the next token is
        drawn. Where these are all zero, which only rounding can cause, the target's distribution is
        used.
    """
    num_rows, num_nodes = draft.tokens.shape
    chex.assert_shape(logits, (num_rows, num_nodes + 1, None))
    verdict = follow(sampling.choose(logits, greedy_rows(rows), prefix), draft)
    is_sampled = rows.sampling.temperature > 0

    def sampled() -> Verdict:
        p = sampling.distribution(logits, rows, prefix)
        node = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32), draft.tokens.shape)
        draws = sampling.uniform(sampling.round_keys(rows, node, sampling.Stream.ACCEPT))
        path, weights = accept(p, draft, draws)
        after = jnp.max(path, axis=1, initial=-1) + 1  # parents come before children
        weights = jnp.where(jnp.any(weights > 0, axis=1, keepdims=True), weights, at_node(p, after))
        keys = sampling.round_keys(rows, after[:, None], sampling.Stream.RESIDUAL)
        next_token = sampling.draw_weighted(keys[:, 0], weights)
        is_finite = jnp.isfinite(sampling.highest_of(at_node(logits, after)))
        num_accepted = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
        return Verdict(
            num_accepted=jnp.where(is_sampled, num_accepted, verdict.num_accepted),
            path=jnp.where(is_sampled[:, None], path, verdict.path),
            next_token=jnp.where(
                is_sampled, jnp.where(is_finite, next_token, -1), verdict.next_token
            ),
        )

    return lax.cond(jnp.any(is_sampled), sampled, lambda: verdict)


def greedy_rows(rows: BatchView) -> BatchView:
    """The same rows at temperature 0."""
    cold = jnp.zeros_like(rows.sampling.temperature)
    return rows.replace(sampling=rows.sampling.replace(temperature=cold))


def at_node(values: jax.Array, node: jax.Array) -> jax.Array:
    """`values` `[B, n, V]` at one `node` `[B]` of each row."""
    return jnp.take_along_axis(values, node[:, None, None], axis=1)[:, 0]
