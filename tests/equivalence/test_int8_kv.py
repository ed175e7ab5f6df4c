"""The promise with KV in int8: plain and speculative decoding see the same codes and scales.

E1 with the same engine, E2 alone and in another order, E3 for the sampled rows, and with kernels
whose bits do not depend on the width the window-1 loop, all to the bit: tokens, codes and scales.
"""

import dataclasses

import flex
import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from live import live_pages, poison

import jaxspec
from jaxspec import Engine, SamplingParams
from jaxspec.cache import pages as kv
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.errors import SettingError
from jaxspec.kernels import cpu as native
from jaxspec.models.config import RopeConfig
from jaxspec.testing import check_model

LENGTHS = (3, 140, 1, 126, 30, 60)  # one row's window crosses the end of a page
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(LENGTHS))
]
BATCH_SIZE = 4
SHAPE = {"batch_size": BATCH_SIZE, "max_length": 256, "scheduler": "static"}
WINDOW = {"draft_length": 6, "verify_length": 7}


def target_of(kernels, dtype, **changes):
    rope = RopeConfig(theta=1e4, rotary_size=16)
    changes |= {"head_size": 16, "rope": rope, "kv_dtype": "int8"}
    return toy.model(kernels=kernels, dtype=dtype, **changes)


needs_native = pytest.mark.skipif(native.problem() is not None, reason=f"{native.problem()}")
SETTINGS = {
    "XLA, fp32": ("xla", jnp.float32),
    "native, fp32": ("native", jnp.float32),
    "native, bf16": ("native", jnp.bfloat16),
    "Pallas, fp32": ("pallas", jnp.float32),
}
MARKS = {
    "native, fp32": [needs_native, pytest.mark.system],
    "native, bf16": [needs_native],
    "Pallas, fp32": [pytest.mark.system],
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MARKS.get(name, [])) for name in SETTINGS],
)
def setting(request):
    """A target, prompts, and a tree drafter that is often right and that has what follows them."""
    target, prompts = target_of(*SETTINGS[request.param]), toy.prompts(LENGTHS)
    reference = Engine(target, **SHAPE).generate(prompts, PARAMS)
    return target, prompts, reference


# Those of a test that takes long; what is left to the slow tests is interpreted, or much alike.
FEW = [
    pytest.param("XLA, fp32"),
    pytest.param("native, bf16", marks=needs_native),
    pytest.param("native, fp32", marks=[needs_native, pytest.mark.slow]),
]
few_settings = pytest.mark.parametrize("setting", FEW, indirect=True)


def tree_of(reference):
    return toy.TreeOracle(tuple(map(tuple, toy.sequences(reference[:BATCH_SIZE]))), right_until=150)


def token_ids(completions):
    return [completion.token_ids for completion in completions]


def plain_and_drafted(target, prompts, drafter, **settings):
    """Tokens and what is stored, of both."""
    engine = Engine(target, drafter, **{**SHAPE, **WINDOW, **settings})
    found = []
    for speculate in (False, True):
        done = engine.generate(prompts[:BATCH_SIZE], PARAMS[:BATCH_SIZE], speculate=speculate)
        found.append((token_ids(done), live_pages(engine)))
        poison(
            engine
        )  # or the plain run's KV would stand in for what the drafted run does not write
    total = done.acceptance
    assert total.num_draft_tokens > 0
    return *found, total


def are_equal(plain, drafted):
    (tokens, pages), (other_tokens, other_pages) = plain, drafted
    same = [np.array_equal(a, b) for a, b in zip(pages, other_pages, strict=True)]
    return tokens == other_tokens and all(same)


def test_trees_and_sampled_rows_equal_plain_decoding_to_the_bit(setting):
    target, prompts, reference = setting
    plain, drafted, total = plain_and_drafted(target, prompts, tree_of(reference))
    assert [pages.dtype for pages in plain[1][:4]] == [np.int8, np.int8, np.float32, np.float32]
    assert np.abs(plain[1][0]).max() == 127
    assert total.num_accepted_tokens > 20
    assert are_equal(plain, drafted)
    if target.kernels == "native":  # whose bits are those of the window-1 loop
        assert drafted[0] == token_ids(reference)[:BATCH_SIZE]


@pytest.mark.system
def test_a_request_does_not_depend_on_neighbours_row_or_order(setting):
    target, prompts, _ = setting
    engine = Engine(target, jaxspec.NGram(), **SHAPE, draft_length=3)
    together = token_ids(engine.generate(prompts, PARAMS))
    order = [5, 2, 0, 4, 1, 3]
    shuffled = engine.generate([prompts[i] for i in order], [PARAMS[i] for i in order])
    assert [token_ids(shuffled)[order.index(i)] for i in range(len(order))] == together
    for i in (1, 2):
        assert token_ids(engine.generate([prompts[i]], [PARAMS[i]])) == [together[i]]


@pytest.mark.system
@few_settings
@pytest.mark.parametrize(
    ("tree", "draft_kv_dtype"),
    [
        (None, None),
        (jaxspec.trees.BeamTree(3, 3, 6), "int8"),
        pytest.param(None, "int8", marks=pytest.mark.slow),
        pytest.param(jaxspec.trees.BeamTree(3, 3, 6), None, marks=pytest.mark.slow),
    ],
)
def test_target_and_draft_model_have_each_their_own(setting, tree, draft_kv_dtype):
    target, prompts, _ = setting
    full = dataclasses.replace(target, kv_dtype=None)
    drafter = DraftModel(full, tree=tree, kv_dtype=draft_kv_dtype)
    assert (target.kv_dtype, drafter.model.kv_dtype) == ("int8", draft_kv_dtype)
    engine = Engine(full, drafter, **SHAPE, **WINDOW)
    assert engine.state.cache.layers[0].k.dtype != jnp.int8
    assert engine.state.drafter.cache.layers[0].is_quantised == (draft_kv_dtype == "int8")
    described = engine.describe()
    assert (described["kv_dtype"], described["draft_kv_dtype"]) == (None, draft_kv_dtype)
    plain, drafted, total = plain_and_drafted(target, prompts, drafter)
    assert are_equal(plain, drafted)
    assert total.num_accepted_tokens > 0


@pytest.mark.system
@few_settings
def test_flexdraft_and_heads_draft_for_such_a_target(setting):
    target, prompts, _ = setting
    for mode in ("parallel", "sequential"):
        flexdraft = flex.copied_flex(
            target, mode=mode, block_size=7, num_deep_layers=1, confidence=0.0
        )
        plain, drafted, _ = plain_and_drafted(target, prompts, flexdraft)
        assert are_equal(plain, drafted)
    clover = heads.random_heads("clover", target)
    engine = Engine(target, clover, **SHAPE, **WINDOW)
    assert engine.state.cache.layers[0].is_quantised
    own = [
        node
        for node in jax.tree.leaves(
            engine.state.drafter, is_leaf=lambda node: isinstance(node, kv.LayerCache)
        )
        if isinstance(node, kv.LayerCache)
    ]
    assert own
    assert not any(layer.is_quantised for layer in own)
    plain, drafted, _ = plain_and_drafted(target, prompts, clover)
    assert are_equal(plain, drafted)


@pytest.mark.system
@few_settings
def test_the_aligned_layout_gives_plain_decodings_codes(setting):
    target, prompts, reference = setting
    oracle = jaxspec.Oracle(toy.sequences(reference), acceptance=0.6)
    engine = Engine(target, oracle, **SHAPE, layout="aligned", draft_length=3)
    alike = [prompt[:30] for prompt in prompts[:BATCH_SIZE]]
    drafted = engine.generate(alike, PARAMS[0])
    plain = engine.generate(alike, PARAMS[0], speculate=False)
    same = [a == b for a, b in zip(token_ids(drafted), token_ids(plain), strict=True)]
    assert sum(same) >= BATCH_SIZE - 1  # sums run in another order: ties


@pytest.mark.system
@needs_native
@pytest.mark.parametrize("setting", ["native, fp32", "native, bf16"], indirect=True)
def test_a_parked_row_comes_back_with_its_codes_and_scales(setting):
    """With the native kernels, which read again to the bit."""
    target, prompts, _ = setting
    one_row = {**SHAPE, "batch_size": 1}
    engine = Engine(target, jaxspec.NGram(), **one_row, draft_length=3)
    first, second = engine.session(), engine.session()
    done = first.generate(prompts[1], PARAMS[1])
    before = live_pages(engine)
    second.generate(prompts[3], PARAMS[0])
    assert first.place == "host"
    after = first.generate([*done.prompt_token_ids, *done.token_ids, 7, 8, 9], PARAMS[1])
    assert after.num_reused_tokens > 140
    num_kept = after.num_reused_tokens
    for was, now in zip(before, live_pages(engine), strict=True):
        np.testing.assert_array_equal(now[:, :num_kept], was[:, :num_kept])
    [alone] = engine.generate([after.prompt_token_ids], PARAMS[1])
    assert after.token_ids == alone.token_ids


@pytest.mark.system
@pytest.mark.parametrize(
    "setting", [*FEW, pytest.param("Pallas, fp32", marks=pytest.mark.slow)], indirect=True
)
def test_the_model_keeps_the_contracts_of_decoding(setting):
    check_model(setting[0]).assert_ok()


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
    [with_changed_moves, pytest.param(with_the_neighbours_scale, marks=pytest.mark.system)],
)
def test_sabotage_is_caught(monkeypatch, sabotage):
    target, prompts = target_of("xla", jnp.float32, num_layers=1), toy.prompts(LENGTHS)
    reference = Engine(target, **SHAPE).generate(prompts[:BATCH_SIZE], PARAMS[:BATCH_SIZE])
    sabotage(monkeypatch)
    plain, drafted, total = plain_and_drafted(target, prompts, tree_of(reference))
    assert total.num_accepted_tokens > 0
    assert not are_equal(plain, drafted)


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
