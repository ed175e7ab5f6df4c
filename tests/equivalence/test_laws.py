"""Sampled output of the engine follows the target's distribution, whatever verifies it.

Eight requests of different sampling parameters at a time, many seeds; the distribution they are
held against is computed from the model's logits by a few lines of numpy, which test_sampling.py
compares with Hugging Face's warpers.
"""

import itertools

import heads as toys
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import toy
from test_sampling import reference

import jaxspec
from jaxspec import sampling
from jaxspec.audit.chi_square import pooled
from jaxspec.engine.engine import Engine
from jaxspec.models.prefill import chain_window
from jaxspec.requests.sampling_params import SamplingParams

ALPHA = 1e-3  # of a whole run over one verifier, shared among its tests (Bonferroni)
SIZE = 11
SMALL = {
    "vocab_size": SIZE,
    "width": 16,
    "feed_forward_width": 16,
    "num_layers": 1,
    "num_query_heads": 2,
    "num_kv_heads": 1,
}
PROMPT = [3, 7]
NUM_SEEDS = 300
FILTERS = (
    {},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.12},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
)
SETTINGS = [
    {"temperature": temperature, **filters}
    for filters, temperature in itertools.product(FILTERS, (0.0, 0.7, 1.0, 1.5))
]
VERIFIERS = {
    "coupled": jaxspec.Coupled(),
    "rejection": jaxspec.Rejection(),
    "block": jaxspec.Block(),
    "block, deterministic drafts": jaxspec.Block(),
    "rejection, trees": jaxspec.Rejection(),
    "rejection, deterministic trees": jaxspec.Rejection(),
    "coupled, trees": jaxspec.Coupled(),
    "rejection, draft vocabulary": jaxspec.Rejection(),
    "block, draft vocabulary": jaxspec.Block(),
}
TREE = (-1, -1, 0, 0, 1, 2)


@pytest.fixture(scope="module")
def target():
    return toy.model(**SMALL)


@pytest.fixture(scope="module")
def drafter():
    return jaxspec.DraftModel(toy.model(seed=1, **SMALL))


@pytest.fixture(scope="module")
def plain(target):
    """Logits `[V]` after the prompt, and `[V, V]` after the prompt and each first token."""
    tokens = jnp.asarray([[*PROMPT, first] for first in range(SIZE)], jnp.int32)
    window = chain_window(jnp.zeros((SIZE,), jnp.int32), 3)
    hidden, _ = target.forward(target.params, tokens, window, target.init_cache(SIZE, 128))
    logits = np.asarray(target.logits(target.params, hidden), np.float64)
    return logits[0, 1], logits[:, 2]


def distribution(logits, *, temperature, **filters):
    """`[V]` float64."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    return reference(logits, temperature=temperature, **filters)


def distributions(plain, settings):
    """Of the first token `[V]`, and of the second `[V, V]` given it."""
    first, second = plain
    return distribution(first, **settings), np.stack(
        [distribution(logits, **settings) for logits in second]
    )


def sample(engine, *, settings=SETTINGS, num_seeds=NUM_SEEDS, **options):
    """First two tokens `[S, R, 2]` of `num_seeds` requests of each setting, the settings dealt out
    so that each batch of eight mixes them."""
    requests = [
        SamplingParams(max_tokens=3, seed=10_000 * index + seed, **values)
        for seed in range(num_seeds)
        for index, values in enumerate(settings)
    ]
    completions = engine.generate([PROMPT] * len(requests), requests, **options)
    tokens = np.array([completion.token_ids[:2] for completion in completions])
    return tokens.reshape(num_seeds, len(settings), 2).swapaxes(0, 1), completions


def p_values(tokens, first, second):
    """Chi-square of the first token, and of the second given each first that is frequent enough;
    0 where a token came up that has no chance."""
    found = []
    groups = [(tokens[:, 0], first)]
    groups += [(tokens[tokens[:, 0] == token, 1], second[token]) for token in range(SIZE)]
    for drawn, expected in groups:
        observed = np.bincount(drawn, minlength=SIZE)
        if observed[expected == 0].any():
            found.append(0.0)
            continue
        counts, means = pooled(observed, expected * len(drawn))
        if len(means) > 1:
            found.append(scipy.stats.chisquare(counts, means).pvalue)
    return found


class Likeliest(toy.SampledTree):
    """The likeliest tokens of the table, without q."""

    def propose(self, shape, params, state, rows):
        cold = jnp.zeros_like(rows.sampling.temperature)
        greedy = rows.replace(sampling=rows.sampling.replace(temperature=cold))
        draft, state = super().propose(shape, params, state, greedy)
        return draft.replace(q=None), state


def engine_for(target, drafter, verifier):
    return Engine(
        target,
        drafter,
        verifier=verifier,
        draft_length=drafter.num_nodes or 3,
        batch_size=8,
        max_length=128,
        rounds_per_sync=4,
    )


# In the gate verifiers/test_laws_exactly.py has these laws, without an engine.
@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIERS)
def test_first_two_tokens_follow_the_distribution(target, drafter, plain, name):
    if "trees" in name:
        table = np.random.default_rng(5).normal(scale=1.5, size=(SIZE, SIZE))
        drafter = toy.SampledTree(TREE, jnp.asarray(table, jnp.float32))
    if "vocabulary" in name:  # most of the target's tokens are never drafted
        drafter = jaxspec.DraftModel(toy.model(seed=1, **SMALL, draft_vocabulary=(1, 3, 4, 8)))
    if "deterministic trees" in name:
        drafter = Likeliest(TREE, drafter.params)
    elif "deterministic" in name:
        drafter = toy.WrongDrafter(token=4)
    engine = engine_for(target, drafter, VERIFIERS[name])
    tokens, completions = sample(engine)
    tested = []
    for settings, drawn in zip(SETTINGS, tokens, strict=True):
        first, second = distributions(plain, settings)
        if settings["temperature"] == 0:
            assert np.all(drawn[:, 0] == np.argmax(first))
            assert np.all(drawn[:, 1] == np.argmax(second[np.argmax(first)]))
        else:
            tested += p_values(drawn, first, second)
    assert len(tested) > 5 * len(SETTINGS) // 2
    assert min(tested) > ALPHA / len(tested)
    total = completions.acceptance
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens


STATIC = jaxspec.trees.StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
HEADS = [("medusa", "chain"), ("medusa", STATIC), ("clover", "chain"), ("clover", STATIC)]


class WrongLaw(jaxspec.Heads):
    """Says that drafts were drawn from another distribution than they were."""

    def propose(self, shape, params, state, rows):
        draft, state = super().propose(shape, params, state, rows)
        return draft.replace(q=jnp.roll(draft.q, 1, axis=-1)), state


def smallest_p_value(target, plain, heads, *, settings):
    """Of what `Rejection` emits after drafts of heads, and how many tests there were."""
    tokens, completions = sample(engine_for(target, heads, jaxspec.Rejection()), settings=settings)
    total = completions.acceptance
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens
    found = []
    for values, drawn in zip(settings, tokens, strict=True):
        found += p_values(drawn, *distributions(plain, values))
    return min(found), len(found)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), HEADS)
def test_rejection_of_heads_follows_the_distribution(target, plain, kind, tree):
    heads = toys.random_heads(kind, target, tree=tree, stddev=0.3)
    sampled = [settings for settings in SETTINGS if settings["temperature"] > 0]
    smallest, count = smallest_p_value(target, plain, heads, settings=sampled)
    assert count > 3 * len(sampled)
    assert smallest > ALPHA / count


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), [("medusa", "chain"), ("clover", STATIC)])
def test_a_wrong_distribution_of_heads_is_caught(target, plain, kind, tree):
    sound = toys.random_heads(kind, target, tree=tree, stddev=0.3)
    heads = WrongLaw(sound.config, sound.params, tree=tree)
    sampled = [settings for settings in SETTINGS if settings["temperature"] == 1.0]
    assert smallest_p_value(target, plain, heads, settings=sampled)[0] < 1e-9


def test_the_settings_filter_something(plain):
    """Or the test above would say nothing about the filters."""
    for settings in SETTINGS:
        if settings["temperature"] > 0 and len(settings) > 1:
            first, second = distributions(plain, settings)
            removed = np.sum(first == 0) + np.sum(second == 0)
            assert removed > 0, settings


# Sabotage: the check has to see a filter in the wrong order, and noise used twice.


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["temperature after the filters", "one key for all positions"])
def test_a_broken_distribution_is_caught(monkeypatch, target, drafter, plain, fault):
    settings = [s for s in SETTINGS if s["temperature"] == 1.5 and "top_p" in s]
    if fault == "temperature after the filters":
        real = sampling.filtered_logits

        def filtered_logits(logits, sampling_, *, real=real):
            temperature = jnp.asarray(sampling_.temperature)
            cold = jnp.where(temperature > 0, jnp.float32(1), temperature)
            filtered = real(logits, sampling_.replace(temperature=cold))
            return filtered / jnp.where(temperature > 0, temperature, 1)[:, None, None]

        monkeypatch.setattr(sampling, "filtered_logits", filtered_logits)
    else:
        real = sampling.position_keys
        monkeypatch.setattr(sampling, "position_keys", lambda s, position: real(s, position * 0))
    engine = engine_for(target, drafter, jaxspec.Coupled())
    tokens, _ = sample(engine, settings=settings)
    tested = []
    for values, drawn in zip(settings, tokens, strict=True):
        tested += p_values(drawn, *distributions(plain, values))
    assert min(tested) < 1e-9
