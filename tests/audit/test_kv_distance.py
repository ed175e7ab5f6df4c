"""How far int8 KV is from full KV: the figures of an audit."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxspec.audit.kv_distance import measure_kv_distance
from jaxspec.cache import pages as kv
from jaxspec.models.prefill import chain_window

SEQUENCES = toy.prompts((5, 70, 1))  # within a segment, longer than one, a single token


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1, kv_dtype="int8")


def by_hand(target):
    """KL and agreement after each token, each sequence read at once."""
    models = dataclasses.replace(target, kv_dtype=None), target
    divergences, agreements = [], []
    for sequence in SEQUENCES:
        window = chain_window(jnp.zeros((1,), jnp.int32), len(sequence))
        tokens = jnp.asarray([sequence], jnp.int32)
        logits = []
        for model in models:
            hidden, _ = model.forward(model.params, tokens, window, model.init_cache(1, 128))
            logits.append(np.asarray(model.logits(model.params, hidden)[0], np.float64))
        p, q = (one - np.log(np.exp(one).sum(axis=-1, keepdims=True)) for one in logits)
        divergences.extend((np.exp(p) * (p - q)).sum(axis=-1))
        agreements.extend(p.argmax(axis=-1) == q.argmax(axis=-1))
    return np.asarray(divergences), np.asarray(agreements)


def test_the_figures_are_those_of_both_models_side_by_side(target):
    found = measure_kv_distance(target, SEQUENCES)
    assert found is not None
    divergences, agreements = by_hand(target)
    assert (found.kv_dtype, found.num_tokens) == ("int8", 76)
    assert found.greedy_agreement == pytest.approx(agreements.mean())
    assert found.mean_kl == pytest.approx(divergences.mean(), rel=0.05)
    assert found.max_kl == pytest.approx(divergences.max(), rel=0.05)
    assert 0 < found.mean_kl < 0.01


def test_the_neighbours_scale_is_far_from_full_kv(target, monkeypatch):
    real = kv._stored_form

    def stored_form(layer, k, v):
        stored = real(layer, k, v)
        if layer.is_quantised:
            stored = stored.replace(v_scale=jnp.roll(stored.v_scale, 1, axis=1))
        return stored

    near = measure_kv_distance(target, SEQUENCES)
    monkeypatch.setattr(kv, "_stored_form", stored_form)
    far = measure_kv_distance(target, SEQUENCES)
    assert near is not None
    assert far is not None
    assert far.mean_kl > 100 * near.mean_kl
    assert far.greedy_agreement < near.greedy_agreement


def test_full_kv_has_no_distance():
    assert measure_kv_distance(toy.model(num_layers=1), SEQUENCES) is None
