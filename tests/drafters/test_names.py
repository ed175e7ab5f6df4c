"""Drafters by name, and names of other libraries."""

import warnings

import jax
import jax.numpy as jnp
import pytest
import tiny

import jaxspec
from jaxspec.drafters.heads.config import heads_config, param_shapes
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.load.drafters import choose_drafter, make_drafter
from jaxspec.drafters.trees import BudgetTree
from jaxspec.errors import CheckpointError, ModelError, SettingError
from jaxspec.models import decoder
from jaxspec.runtime.other_names import OTHER_NAMES
from jaxspec.schedulers import SCHEDULERS, make_scheduler
from jaxspec.verifiers import VERIFIERS, make_verifier

TARGET = tiny.model(text=tiny.tokenizer())


def test_a_drafter_is_left_as_it_is():
    ngram = jaxspec.NGram(2, 3)
    assert make_drafter(ngram, TARGET) is ngram
    assert make_drafter(None, TARGET) is None
    assert make_drafter("none", TARGET) is None
    assert make_drafter("ngram:2-3", TARGET) == ngram
    for name in ("ngram[4]:1-4", "ngram[4]:2-3", "ngram:2-3"):
        assert make_drafter(name, TARGET).name == name
    assert make_drafter("ngram[4]", TARGET) == jaxspec.NGram(branches=4)


def test_a_model_is_named_as_for_load_model(tmp_path):
    path = tiny.save(tmp_path, "draft", text=tiny.tokenizer())
    for name in (str(path), f"draft_model:{path}"):
        drafter = make_drafter(name, TARGET)
        assert isinstance(drafter, jaxspec.DraftModel)
        assert drafter.name == f"draft_model:{path}"
    assert jaxspec.DraftModel(str(path), 0.5).min_confidence == 0.5
    early = make_drafter(f"draft_model@0.25:{path}", TARGET)
    assert isinstance(early, jaxspec.DraftModel)
    assert early.min_confidence == 0.25
    tree = make_drafter(f"draft_model[2x3:5]:{path}", TARGET)
    assert isinstance(tree, jaxspec.DraftModel)
    assert tree.tree == jaxspec.BeamTree(width=2, depth=3, nodes=5)
    assert tree.name == f"draft_model[2x3:5]:{path}"
    kept = make_drafter(f"draft_model[2x3:5]~256:{path}", TARGET)
    assert isinstance(kept, jaxspec.DraftModel)
    assert (kept.tree, kept.kv_window, kept.kv_sinks) == (tree.tree, 256, 4)
    assert kept.name == f"draft_model[2x3:5]~256+4:{path}"
    assert make_drafter(f"draft_model@0.25~512+0:{path}", TARGET).name == (
        f"draft_model@0.25~512+0:{path}"
    )
    # Only looked at: nothing is loaded until the drafter is made.
    assert choose_drafter("demo-draft")
    assert choose_drafter("random:qwen3-0.6b")
    assert choose_drafter("organisation/model")
    with pytest.raises(SettingError, match="There is no drafter 'eagle'; choose none, ngram"):
        choose_drafter("eagle")


def test_heads_are_named_by_kind_tree_and_place(tmp_path):
    config = heads_config("clover", TARGET.config, num_heads=2, block=None)
    shapes = param_shapes(config)
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=decoder.is_shape)
    path = tmp_path / "heads"
    jaxspec.save_drafter(Heads(config, params), path, target=TARGET)
    for name, tree in {
        f"heads:{path}": BudgetTree(nodes=4, depth=2),
        f"clover:{path}": BudgetTree(nodes=4, depth=2),
        f"clover[8]:{path}": BudgetTree(nodes=8, depth=2),
        f"clover[4x2:16]:{path}": jaxspec.BeamTree(4, 2, 16),
        f"heads[chain]:{path}": None,
    }.items():
        heads = make_drafter(name, TARGET)
        assert isinstance(heads, Heads)
        assert heads.tree == tree
        assert make_drafter(heads.name, TARGET).tree == tree  # a report's name is one too
    for kind in ("medusa", "clover2"):
        with pytest.raises(ModelError, match=f"of kind clover, and {kind} was asked for"):
            make_drafter(f"{kind}:{path}", TARGET)
    with pytest.raises(SettingError, match="4 deep, and there are 2 heads"):
        make_drafter(f"clover[mc_sim_7b_63]:{path}", TARGET)
    with pytest.raises(CheckpointError, match="holds heads, not a model"):
        make_drafter(str(path), TARGET)
    assert choose_drafter("medusa:organisation/model")  # only looked at


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ngram:1-999999999999", "write ngram, or ngram:MIN-MAX"),
        ("ngram:1-" + "9" * 5000, "write ngram, or ngram:MIN-MAX"),
        ("ngram:1-65", "1 <= min <= max <= 64"),
        ("ngram:1-99999999", "1 <= min <= max <= 64"),
        ("ngram[x]", "or ngram[BRANCHES] as in ngram[4] or ngram[4]:2-4"),
        ("ngram[4", "or ngram[BRANCHES] as in ngram[4] or ngram[4]:2-4"),
        ("ngram[17]", "branches 17 was given; it must be 1 (chains) to 16"),
        ("draft_model~x:y", "write draft_model~WINDOW:MODEL or draft_model~WINDOW+SINKS:MODEL"),
        ("draft_model~:y", "write draft_model~WINDOW:MODEL or draft_model~WINDOW+SINKS:MODEL"),
        ("draft_model~64:y", "kv_window 64 was given; KV is kept in blocks of 128 positions"),
        ("draft_model~256+200:y", "kv_sinks 200 was given"),
        ("draft_model~256+4", "was given without a model; write draft_model~256+4:MODEL"),
        ("draft_model[4x4]:x", "write draft_model[WIDTHxDEPTH:NODES]:MODEL, as in"),
        ("draft_model[4x4:12:x", "write draft_model[WIDTHxDEPTH:NODES]:MODEL, as in"),
        ("draft_model[4x4:12]@0.4:x", "write draft_model[WIDTHxDEPTH:NODES]:MODEL, as in"),
        ("draft_model[4x4:12]", "write draft_model[4x4:12]:MODEL"),
        ("draft_model[2x2:7]:x", "make 6 candidates, so ask for at most as many nodes"),
        ("draft_model[0x2:1]:x", "each must be at least 1"),
        ("medusa", "was given without a name of heads; write medusa:NAME"),
        ("heads[8]:", "was given without a name of heads; write heads:NAME"),
        ("clover[8:x", "write KIND[TREE]:NAME, as in clover[8]:NAME"),
        ("clover[4x4]:x", "The tree '4x4' was given; write chain, NODES, WIDTHxDEPTH:NODES, or"),
        ("clover[]:x", "The tree '' was given; write chain"),
        ("clover[0]:x", "each must be at least 1"),
        ("clover[2x2:7]:x", "make 6 candidates, so ask for at most as many nodes"),
        ("medusa[mc_sim]:x", "There is no Medusa tree 'mc_sim'; choose one of mc_sim_7b_63"),
        ("~nouser", "the home directory of a user that this machine does not know"),
        ("", "There is no drafter ''"),
        ("x" * 5000, "There is no drafter 'xxx"),
    ],
)
def test_names_that_are_none(name, message):
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


@pytest.mark.parametrize(
    ("call", "name"),
    [(jaxspec.NGram, "NGram"), (jaxspec.DraftModel, "DraftModel"),
     (jaxspec.SamplingParams, "SamplingParams"), (jaxspec.load_model, "load_model"),
     (lambda **wrong: jaxspec.Engine(TARGET, **wrong), "Engine"),
     (lambda **wrong: jaxspec.Engine.generate(None, [[1]], **wrong), "Engine.generate")],
)  # fmt: skip
def test_names_of_other_libraries_are_refused_with_ours(call, name):
    for theirs, ours in OTHER_NAMES[name].items():
        with pytest.raises(SettingError) as error:
            call(**{theirs: 1})
        assert str(error.value) == (
            f"{name} was given {theirs}, another library's name; use {ours}."
        )
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        call(nonsense=1)


def test_what_is_printed_of_parts():
    assert repr(jaxspec.Rejection()) == "Rejection()"
    assert repr(jaxspec.Coupled()) == "Coupled(is_noise_shared=True)"
    assert repr(jaxspec.NGram()) == "NGram(prompt_lookup_min=1, prompt_lookup_max=4, branches=1)"
    shown = repr(TARGET)
    assert shown.startswith("<LanguageModel ")
    assert "M parameters, float32, " in shown
    assert len(shown) < 120
    assert repr(jaxspec.DraftModel(TARGET)) == (
        f"DraftModel(model={shown}, min_confidence=0.0, tree=None, kv_window=None, kv_sinks=4)"
    )


def test_an_engine_of_names_and_what_it_prints(tmp_path):
    path = str(tiny.save(tmp_path, "model", text=tiny.tokenizer()))
    shape = {"batch_size": 2, "max_length": 128}
    named = jaxspec.Engine(path, path, verifier="rejection", scheduler="static", **shape)
    assert named.target.name == path
    assert isinstance(named.drafter, jaxspec.DraftModel)
    assert (named.verifier, named.scheduler) == (jaxspec.Rejection(), jaxspec.Static())
    assert repr(named) == (
        f"<Engine of {path} with drafter draft_model:{path}: verifier rejection, scheduler static, "
        "draft_length 4, verify_length 5, batch_size 2, max_length 128>"
    )
    assert repr(named.memory) == f"<Memory: {named.memory.sentence}>"
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
    assert warning.category is jaxspec.JaxspecWarning
    assert f"asks for {room + 9} tokens" in str(warning.message)
    assert f"max_length of 128 leaves room for {room} after its prompt of 2" in str(warning.message)
