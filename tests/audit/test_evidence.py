"""Bets on alternatives to the distribution that outputs are said to be drawn from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.audit import evidence
from jaxspec.audit.segment import Segment


def segment_of(log_p, tokens, noise):
    """A segment of tokens with these log-probabilities `[n, V]`."""
    found = {name: np.asarray(each) for name, each in evidence.bets(log_p, tokens).items()}
    rows = np.arange(len(tokens))
    return Segment(
        first=0,
        tokens=np.asarray(tokens),
        chosen=np.asarray(tokens),
        gap=np.zeros(len(tokens), np.float32),
        noise=np.full(len(tokens), noise, np.float32),
        gap_changes=np.zeros((0, len(tokens)), np.float32),
        log_probs=np.asarray(log_p)[rows, np.asarray(tokens)],
        adjusted=log_p,
        gumbel=jnp.zeros_like(log_p),
        **found,
    )


@pytest.mark.parametrize("noise", [0.0, 1e-6, 0.5])
@pytest.mark.parametrize("gap", [10, 100, 300])
def test_bets_on_a_very_sharp_distribution_are_numbers(gap, noise):
    """Probabilities, and how many times as likely an alternative is, are not all fp32 numbers."""
    log_p = jax.nn.log_softmax(jnp.asarray([[gap, 0.0, -5.0], [gap, 0.0, 1.0]]), axis=-1)
    segment = segment_of(log_p, jnp.asarray([0, 2]), noise)
    with np.errstate(all="raise", under="ignore"):
        found = evidence.bets_of(segment, temperature=1.0)
    assert np.isfinite(found).all()
    assert (found <= segment.log_bets).all()
    assert (found >= segment.log_bets - 2 * noise - 1e-4).all()
    if noise == 0:
        np.testing.assert_array_equal(found, segment.log_bets)
    if gap >= 100:
        assert evidence.log_evidence(found.sum(axis=0)) > evidence.evidence_limit()


def test_the_spread_of_a_bet_is_its_standard_deviation():
    log_p = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(0), (5, 40)), axis=-1)
    p, all_tokens = np.exp(np.asarray(log_p, np.float64)), np.arange(40)
    ratios = np.exp(
        [
            np.asarray(evidence.bets(log_p, jnp.full((5,), token))["log_bets"], np.float64)
            for token in all_tokens
        ]
    )  # [V, n, A]
    expected = np.sqrt(np.einsum("nv,vna->na", p, (ratios - 1) ** 2))
    spread = np.asarray(evidence.bets(log_p, jnp.zeros((5,), jnp.int32))["spread"])
    np.testing.assert_allclose(spread, expected, rtol=1e-4, atol=1e-4)
