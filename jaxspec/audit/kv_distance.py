"""The distance between a target with quantised KV and the same target with full KV.

The promise of an audit is about the target that decodes, including its quantised KV. The effect of
quantisation is reported separately, for information: both models read the same sequences, token by
token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audit.scoring import SEGMENT, window_logits
from jaxspec.cache import pages as kv
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.compilation import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvDistance:
    """Compares two distributions of the next token after each token of some text.

    Attributes:
      kv_dtype: the dtype of the quantised KV.
      num_tokens: number of tokens after which both were computed.
      greedy_agreement: fraction of these where both have the same likeliest token.
      mean_kl: mean of the Kullback-Leibler divergence from the distribution with full KV to that
        with rounded KV, in nats.
      max_kl: the largest.
    """

    kv_dtype: str
    num_tokens: int
    greedy_agreement: float
    mean_kl: float
    max_kl: float


def measure_kv_distance(
    target: LanguageModel, sequences: Sequence[Sequence[int]]
) -> KvDistance | None:
    """The distance on some sequences of at least one token id; None if the KV of `target` is stored
    as it is computed.

    Logits are computed in the target's dtype, in windows of `SEGMENT` tokens.
    """
    if target.kv_dtype is None:
        return None
    full = dataclasses.replace(target, kv_dtype=None)
    longest = kv.round_up_to_block(max(map(len, sequences)) + SEGMENT)

    def compare(params, caches, tokens, start, stop):
        """KL and agreement `[SEGMENT]` after the tokens from `start` on, and both caches."""
        (of_full, first), (of_own, second) = (
            window_logits(model, params, cache, tokens, start, stop, SEGMENT)
            for model, cache in zip((full, target), caches, strict=True)
        )
        p, q = jax.nn.log_softmax(of_full), jax.nn.log_softmax(of_own)
        divergence = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
        agrees = jnp.argmax(of_full, axis=-1) == jnp.argmax(of_own, axis=-1)
        return divergence, agrees, (first, second)

    name = f"the comparison of {target.name} with and without KV in {target.kv_dtype}"
    program = Program(jax.jit(compare, donate_argnums=1), name)
    divergences, agreements = [], []
    for sequence in sequences:
        tokens = np.zeros((longest,), np.int32)
        tokens[: len(sequence)] = sequence
        caches = full.init_cache(1, longest), target.init_cache(1, longest)
        for start in range(0, len(sequence), SEGMENT):
            stop = min(start + SEGMENT, len(sequence))
            place = np.int32(start), np.int32(stop)
            divergence, agrees, caches = program(target.params, caches, tokens, *place)
            divergences.append(np.asarray(divergence)[: stop - start])
            agreements.append(np.asarray(agrees)[: stop - start])
    found = np.concatenate(divergences)
    return KvDistance(
        kv_dtype=target.kv_dtype,
        num_tokens=len(found),
        greedy_agreement=float(np.concatenate(agreements).mean()),
        mean_kl=float(found.mean()),
        max_kl=float(found.max()),
    )
