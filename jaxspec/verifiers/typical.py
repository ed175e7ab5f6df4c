"""Typical acceptance (Medusa, Cai et al., 2401.10774). Lossy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.errors import SettingError
from jaxspec.verifiers.chain import ChainDistributions, ChainVerifier, at_node


@dataclasses.dataclass(frozen=True)
class Typical(ChainVerifier):
    """Accepts drafted tokens that the target finds likely enough: `p(x) > min(epsilon, delta
    exp(-H(p)))`. **Lossy:** the output does not follow the target's distribution (greedy rows do).

    Attributes:
      epsilon: probability above which any token is accepted.
      delta: scale of the threshold where the target is uncertain; Medusa takes sqrt(epsilon).
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name = "typical (lossy)"
    promise = "lossy: tokens that the target finds typical, not its distribution"
    is_lossless = False
    needs_draft_probs = False

    def __post_init__(self):
        for field, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 < value <= 1:
                raise SettingError(
                    f"{field} {value} was given; it must be above 0 and at most 1, as a threshold "
                    "on probabilities."
                )

    def accept(
        self, distributions: ChainDistributions, draws: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Accepts the leading drafts that are typical, and draws from p after them."""
        before = distributions.p[:, :-1]
        surprise = jnp.where(before > 0, -jnp.log(jnp.where(before > 0, before, 1)), 0)
        entropy = jnp.sum(before * surprise, axis=2)
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        passes = (distributions.p_token > threshold) & distributions.is_node
        num_accepted = jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1)
        return num_accepted, at_node(distributions.p, num_accepted)
