"""Drafters by name."""

import json
import warnings

import jax
import jax.numpy as jnp
import pytest
import tiny

import jaxspec
from jaxspec.drafters.heads.config import heads_config, param_shapes
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.trees import BudgetTree
from jaxspec.errors import CheckpointError, ModelError, SettingError
from jaxspec.load.drafters import choose_drafter, load_drafter, make_drafter, parse_drafter
from jaxspec.models import decoder
from jaxspec.schedulers import SCHEDULERS, make_scheduler
from jaxspec.verifiers import VERIFIERS, make_verifier

TARGET = tiny.model(text=tiny.tokenizer())


def test_a_drafter_is_left_as_it_is():
    ngram = jaxspec.NGram(2, 3)
    assert make_drafter(ngram, TARGET) is ngram
    assert make_drafter(None, TARGET) is None
    assert make_drafter("none", TARGET) is None
    assert make_drafter({"kind": "none"}, TARGET) is None


def test_settings_stand_in_a_mapping_in_json_or_in_arguments():
    given = {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    expected = jaxspec.NGram(2, 3)
    assert make_drafter({"kind": "ngram", **given}, TARGET) == expected
    assert make_drafter(json.dumps({"kind": "ngram", **given}), TARGET) == expected
    assert choose_drafter("ngram", given)(TARGET) == expected
    assert load_drafter("ngram", TARGET, **given) == expected
    assert make_drafter("ngram", TARGET) == jaxspec.NGram()
    with pytest.raises(SettingError, match="which is plain decoding"):
        load_drafter("none", TARGET)


def test_a_model_is_named_as_for_load_model(tmp_path):
    path = tiny.save(tmp_path, "draft", text=tiny.tokenizer())
    model = {"model": str(path)}
    for name in (str(path), f"draft_model:{path}", model, {"kind": "draft_model", "model": path}):
        drafter = make_drafter(name, TARGET)
        assert isinstance(drafter, jaxspec.DraftModel)
        assert drafter.name == f"draft_model:{path}"
    early = make_drafter(model | {"min_confidence": 0.25}, TARGET)
    assert isinstance(early, jaxspec.DraftModel)
    assert early.min_confidence == 0.25
    kept = load_drafter(path, TARGET, tree="2x3:5", kv_window=256, kv_dtype="int8")
    assert isinstance(kept, jaxspec.DraftModel)
    assert kept.tree == jaxspec.trees.BeamTree(width=2, depth=3, nodes=5)
    assert (kept.kv_window, kept.kv_sinks, kept.model.kv_dtype) == (256, 4, "int8")
    assert load_drafter(path, TARGET, tree=kept.tree).tree == kept.tree
    assert load_drafter(path, TARGET, tree="mc_sim_7b_63").tree.num_nodes == 63
    # Only looked at: nothing is loaded until the drafter is made.
    for name in ("demo-draft", "random:qwen3-0.6b", "organisation/model"):
        assert parse_drafter(name) == ("draft_model", {"model": name})
    with pytest.raises(SettingError, match=r"Engine\(target, drafter='demo-draft'\)"):
        jaxspec.DraftModel(str(path))


def test_heads_are_named_by_their_directory(tmp_path, monkeypatch):
    config = heads_config("clover", TARGET.config, num_heads=2, block=None)
    shapes = param_shapes(config)
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=decoder.is_shape)
    path = tmp_path / "heads"
    jaxspec.save_drafter(Heads(config, params), path, target=TARGET)
    monkeypatch.chdir(tmp_path)  # where the directory is called like its kind
    for name in (str(path), "heads", f"heads:{path}", {"kind": "heads", "model": path}):
        heads = make_drafter(name, TARGET)
        assert isinstance(heads, Heads)
        assert heads.tree == BudgetTree(nodes=4, depth=2)
    for name, tree in {
        8: BudgetTree(nodes=8, depth=2),
        "8": BudgetTree(nodes=8, depth=2),
        "4x2:16": jaxspec.trees.BeamTree(4, 2, 16),
        "chain": None,
    }.items():
        assert load_drafter(path, TARGET, tree=name).tree == tree
    assert make_drafter(f"ngram+{path}", TARGET).ngram == jaxspec.NGram(2, 4)
    assert load_drafter(path, TARGET, prompt_lookup_min=3).ngram == jaxspec.NGram(3, 4)
    assert make_drafter(str(path), TARGET).ngram is None
    with pytest.raises(CheckpointError, match="holds heads, not a drafter of kind flexdraft"):
        make_drafter(f"flexdraft:{path}", TARGET)
    with pytest.raises(SettingError, match="4 deep, and there are 2 heads"):
        load_drafter(path, TARGET, tree="mc_sim_7b_63")
    with pytest.raises(CheckpointError, match="holds heads, not a model"):
        make_drafter(f"draft_model:{path}", TARGET)


NGRAM = {"kind": "ngram"}
DRAFT = {"kind": "draft_model", "model": "x"}
HEADS = {"kind": "heads", "model": "x"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle", "There is no drafter 'eagle'; choose none, ngram, draft_model, heads, flexdraft"),
        ("~nouser", "the home directory of a user that this machine does not know"),
        ("", "There is no drafter ''"),
        ("x" * 5000, "There is no drafter 'xxx"),
        ("ngram:1-4", "model was given for the drafter ngram, which takes prompt_lookup_min"),
        ("ngram[4]", "There is no drafter 'ngram[4]'"),
        ("ngram+demo-flexdraft", "only heads and draft models can follow ngram+"),
        ("ngram+none", "only heads and draft models can follow ngram+"),
        ("ngram+ngram+heads:x", "There is no drafter 'ngram+heads:x'"),
        (HEADS | {"prompt_lookup_max": 8}, "was given without a prompt_lookup_min"),
        ("ngram+", "only heads and draft models can follow ngram+"),
        (HEADS | {"prompt_lookup_min": 0}, "prompt_lookup_min 0 and prompt_lookup_max 4 were"),
        ("draft_model[4x4:12]:/x", "and give settings as --drafter-args JSON"),
        ("heads", "The drafter heads was given without a model; write heads:MODEL"),
        ("heads:", "was given without a model"),
        ("{", "write a JSON object or a name"),
        ("{1}", "write a JSON object or a name"),
        ("{}", "was given without a kind"),
        ("[" * 9999, "There is no drafter"),
        (7, "drafter 7 was given; it must be a drafter, what names one, or None"),
        ({"kind": "eagle"}, "There is no drafter 'eagle'"),
        ({"kind": 7}, "kind 7 was given"),
        ({"model": 7}, "model 7 was given"),
        ({"kind": "heads", "model": ""}, "was given without a model"),
        ({"branches": 4}, "was given without a kind; add one of ngram, draft_model"),
        (NGRAM | {"prompt_lookup_min": 0}, "1 <= min <= max <= 64"),
        (NGRAM | {"prompt_lookup_max": 65}, "1 <= min <= max <= 64"),
        (NGRAM | {"branches": 17}, "branches 17 was given; it must be 1 (chains) to 16"),
        (NGRAM | {"kv_dtype": "int8"}, "kv_dtype was given for the drafter ngram, which takes"),
        (DRAFT | {"kv_window": 64}, "kv_window 64 was given; KV is kept in blocks of 128"),
        (DRAFT | {"kv_sinks": 200}, "kv_sinks 200 was given"),
        (DRAFT | {"min_confidence": 1.5}, "min_confidence 1.5 was given"),
        (DRAFT | {"tree": "4x4"}, "The tree '4x4' was given; write WIDTHxDEPTH:NODES"),
        (DRAFT | {"tree": 8}, "The tree '8' was given; write WIDTHxDEPTH:NODES"),
        (DRAFT | {"tree": "2x2:7"}, "make 6 candidates, so ask for at most as many nodes"),
        (DRAFT | {"tree": "0x2:1"}, "must be at least 1"),
        (DRAFT | {"tree": "2x2:4", "min_confidence": 0.5}, "A min_confidence of 0.5 and the tree"),
        (DRAFT | {"tree": "2x2:4", "prompt_lookup_min": 2}, "prompt_lookup_min of 2 and the tree"),
        (HEADS | {"tree": "4x4"}, "write chain, NODES, WIDTHxDEPTH:NODES"),
        (HEADS | {"tree": ""}, "The tree '' was given; write chain"),
        (HEADS | {"tree": "0"}, "must be at least 1"),
        (HEADS | {"tree": "9" * 5000}, "was given; write chain, NODES"),
        (HEADS | {"tree": "mc_sim"}, "There is no Medusa tree 'mc_sim'; choose one of"),
    ],
)  # fmt: skip
def test_names_that_are_none(name, message):
    """They are refused before any model is loaded."""
    with pytest.raises(SettingError) as raised:
        choose_drafter(name)
    assert message in str(raised.value)


def test_a_factory_that_fails_is_named():
    make = choose_drafter("json:loads")
    with pytest.raises(ModelError, match=r"The drafter json:loads cannot be made \(TypeError: "):
        make(TARGET)


@pytest.mark.parametrize("name", ["~nouser/x", "draft_model:~nouser/x"])
def test_a_draft_model_in_a_home_that_is_not_there(name):
    with pytest.raises(SettingError, match="~nouser/x begins with the home directory of a user"):
        choose_drafter(name)(TARGET)


def test_verifiers_and_schedulers_by_name():
    assert make_verifier("coupled:independent") == jaxspec.Coupled(is_noise_shared=False)
    typical = jaxspec.Typical(epsilon=0.5)
    assert make_verifier(typical) is typical
    with pytest.raises(SettingError, match="no verifier 'strict'; choose one of coupled, "):
        make_verifier("strict")
    assert make_scheduler("pool") == jaxspec.Pool()
    with pytest.raises(SettingError, match="no scheduler 'fifo'; choose one of continuous, "):
        make_scheduler("fifo")
    for name in SCHEDULERS:
        assert make_scheduler(name).name == name
    assert {type(make_verifier(name)).__name__.lower() for name in VERIFIERS} == {
        name.partition(":")[0] for name in VERIFIERS
    }


def test_an_engine_of_names_and_what_it_prints(tmp_path):
    path = str(tiny.save(tmp_path, "model", text=tiny.tokenizer()))
    shape = {"batch_size": 2, "max_length": 128}
    named = jaxspec.Engine(path, path, verifier="rejection", scheduler="static", **shape)
    assert named.target.name == path
    assert isinstance(named.drafter, jaxspec.DraftModel)
    assert (named.verifier, named.scheduler) == (jaxspec.Rejection(), jaxspec.Static())
    assert "Engine of model with drafter draft_model:model: verifier rejection, sche" in repr(named)
    assert len(repr(named.target)) < len(path) + 80
    plain = jaxspec.Engine(TARGET, "none", **shape)
    assert plain.drafter is None


def test_more_tokens_than_fit_are_warned_of_once():
    engine = jaxspec.Engine(TARGET, "ngram", batch_size=2, max_length=128)
    room = engine.longest_prompt + 1 - 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        [fits] = engine.generate([[5, 6]], {"max_tokens": room, "ignore_eos": True})
        assert not caught
        [cut, _] = engine.generate([[5, 6]] * 2, {"max_tokens": room + 9, "ignore_eos": True})
        engine.generate([[5, 6]], {"max_tokens": room + 1})
    assert (len(fits.token_ids), fits.stop_reason) == (room, None)
    assert (len(cut.token_ids), cut.stop_reason) == (room, "max_length")
    [warning] = caught
    assert warning.category is jaxspec.errors.JaxspecWarning
    assert f"asks for {room + 9} tokens" in str(warning.message)
    assert f"max_length of 128 leaves room for {room} after its prompt of 2" in str(warning.message)
