"""KV in int8 beyond what tests/equivalence/test_equivalence.py compares: caches of drafters, the
aligned layout, rows that were parked, and faults in how codes and scales are stored.
"""

import dataclasses

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from live import live_pages, poison
from test_equivalence import (
    INT8_NATIVE,
    INT8_XLA,
    NUM_ROWS,
    PARAMS,
    Setting,
    engine_for,
    needs_native,
    token_ids,
)

import jaxspec
from jaxspec.cache import pages as kv
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.errors import SettingError
from jaxspec.testing import check_model

INT8_FP32, INT8_PALLAS = "float32, native, int8", "float32, pallas, int8"
# What is left to the slow tests is interpreted, or much alike.
FEW = [
    pytest.param(INT8_XLA),
    pytest.param(INT8_NATIVE, marks=needs_native),
    pytest.param(INT8_FP32, marks=[needs_native, pytest.mark.slow]),
]
few_settings = pytest.mark.parametrize("setting", FEW, indirect=True)


@pytest.fixture(scope="module")
def setting(request):
    return Setting.of(request.param)


def is_plain_decoding(setting, drafter):
    """Whether tokens and what is stored are plain decoding's; some drafts are accepted."""
    engine, prompts = engine_for(setting.target, drafter), setting.prompts[:NUM_ROWS]
    found = []
    for speculate in (False, True):
        done = engine.generate(prompts, PARAMS[:NUM_ROWS], speculate=speculate)
        found.append((token_ids(done), live_pages(engine)))
        poison(engine)  # or the plain run's KV would stand in for what is not written
    assert sum(completion.acceptance.num_accepted_tokens for completion in done) > 0
    (tokens, pages), (other_tokens, other_pages) = found
    return tokens == other_tokens and all(map(np.array_equal, pages, other_pages))


@pytest.mark.system
@few_settings
@pytest.mark.parametrize(
    ("tree", "draft_kv_dtype"),
    [
        (jaxspec.trees.BeamTree(3, 3, 6), "int8"),
        pytest.param(None, None, marks=pytest.mark.slow),
        pytest.param(None, "int8", marks=pytest.mark.slow),
        pytest.param(jaxspec.trees.BeamTree(3, 3, 6), None, marks=pytest.mark.slow),
    ],
)
def test_target_and_draft_model_have_each_their_own(setting, tree, draft_kv_dtype):
    target = setting.target
    full = dataclasses.replace(target, kv_dtype=None)
    drafter = DraftModel(full, tree=tree, kv_dtype=draft_kv_dtype)
    assert (target.kv_dtype, drafter.model.kv_dtype) == ("int8", draft_kv_dtype)
    engine = engine_for(full, drafter)
    assert engine.state.cache.layers[0].k.dtype != jnp.int8
    assert engine.state.drafter.cache.layers[0].is_quantised == (draft_kv_dtype == "int8")
    described = engine.describe()
    assert (described["kv_dtype"], described["draft_kv_dtype"]) == (None, draft_kv_dtype)
    assert is_plain_decoding(setting, drafter)


@pytest.mark.system
@pytest.mark.parametrize("setting", [INT8_XLA], indirect=True)
def test_caches_of_heads_are_not_quantised(setting):
    engine = engine_for(setting.target, heads.random_heads("clover", setting.target))
    assert engine.state.cache.layers[0].is_quantised

    def is_layer(node):
        return isinstance(node, kv.LayerCache)

    own = [x for x in jax.tree.leaves(engine.state.drafter, is_leaf=is_layer) if is_layer(x)]
    assert own
    assert not any(layer.is_quantised for layer in own)


@pytest.mark.system
@pytest.mark.parametrize(
    "setting", [pytest.param(INT8_XLA, marks=pytest.mark.slow), *FEW[1:]], indirect=True
)
def test_the_aligned_layout_gives_plain_decodings_codes(setting):
    oracle = jaxspec.Oracle(toy.sequences(setting.reference), acceptance=0.6)
    engine = engine_for(setting.target, oracle, layout="aligned")
    alike = [prompt[:30] for prompt in setting.prompts if len(prompt) >= 30]
    drafted = engine.generate(alike, PARAMS[1])
    plain = engine.generate(alike, PARAMS[1], speculate=False)
    same = [a == b for a, b in zip(token_ids(drafted), token_ids(plain), strict=True)]
    assert sum(same) >= len(alike) - 1  # sums run in another order: ties


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("setting", [INT8_FP32, INT8_NATIVE], indirect=True)
def test_a_parked_row_comes_back_with_its_codes_and_scales(setting):
    """With the native kernels, which read again to the bit."""
    prompts, params = setting.prompts, PARAMS[2]
    engine = engine_for(setting.target, jaxspec.NGram(), batch_size=1)
    first, second = engine.session(), engine.session()
    done = first.generate(prompts[5], params)
    before = live_pages(engine)
    second.generate(prompts[3], PARAMS[1])
    assert first.place == "host"
    after = first.generate([*done.prompt_token_ids, *done.token_ids, 7, 8, 9], params)
    assert after.num_reused_tokens > 140
    num_kept = after.num_reused_tokens
    for was, now in zip(before, live_pages(engine), strict=True):
        np.testing.assert_array_equal(now[:, :num_kept], was[:, :num_kept])
    [alone] = engine.generate([after.prompt_token_ids], params)
    assert after.token_ids == alone.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("setting", [*FEW[1:], INT8_XLA, INT8_PALLAS], indirect=True)
def test_the_model_keeps_the_contracts_of_decoding(setting):
    check_model(setting.target).assert_ok()


# Sabotage


def with_changed_moves(monkeypatch):
    """Quantises what it moves again."""

    def move_slots(layer, before, source, after, target):
        k, v = kv.read_slots(layer, before, source, jnp.float32)
        k, v = (jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) for x in (k, v))
        return kv.write(layer, after, k, v, target)

    monkeypatch.setattr(kv, "move_slots", move_slots)


def with_the_neighbours_scale(monkeypatch):
    """Stores each key with the scale of the next entry of the window."""
    real = kv._stored_form

    def stored_form(layer, k, v):
        stored = real(layer, k, v)
        return stored.replace(k_scale=jnp.roll(stored.k_scale, 1, axis=1))

    monkeypatch.setattr(kv, "_stored_form", stored_form)


@pytest.mark.parametrize(
    "sabotage",
    [with_changed_moves, pytest.param(with_the_neighbours_scale, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("setting", [INT8_XLA], indirect=True)
def test_sabotage_is_caught(monkeypatch, setting, sabotage):
    truth = toy.sequences(setting.reference[:NUM_ROWS])
    tree = toy.TreeOracle(tuple(map(tuple, truth)), right_until=150)
    sabotage(monkeypatch)
    assert not is_plain_decoding(setting, tree)


# What is refused


def test_an_unknown_dtype_and_a_model_with_a_cache_of_its_own_are_refused():
    with pytest.raises(SettingError, match="KV dtype 'int4' was given; it must be int8, or None"):
        jaxspec.load_model("demo-target", kv_dtype="int4")
    with pytest.raises(SettingError, match="KV dtype 'fp8' was given; it must be int8, or None"):
        DraftModel(toy.model(), kv_dtype="fp8")

    class Own:
        name = "a model of mine"
        params, vocab_size, eos_token_ids, tokenizer = None, 9, (), None
        init_cache = forward = logits = lambda *_: None

    with pytest.raises(SettingError, match="a model of mine, which makes its cache itself"):
        DraftModel(Own(), kv_dtype="int8")
    with pytest.raises(SettingError, match="kv_dtype was given for the drafter ngram"):
        jaxspec.load.drafters.choose_drafter("ngram", {"kv_dtype": "int8"})
