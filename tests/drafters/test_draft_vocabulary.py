"""Draft models that draft some of the tokens only: what they read and draft, and that outputs stay
the target's. (Laws of `Rejection` and `Block`: tests/equivalence/test_laws.py.)"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec.errors import ModelError, SettingError
from jaxspec.models.base import packed_model
from jaxspec.models.config import ModelConfig
from jaxspec.models.prefill import chain_window

IDS = (0, 2, 3, 11, 12, 30, 59)
SIZE = {"num_layers": 1, "is_tied": True}


def reduced(**changes):
    return toy.model(seed=1, **SIZE | {"draft_vocabulary": IDS} | changes)


def logits_of(model, tokens):
    window = chain_window(jnp.zeros((1,), jnp.int32), len(tokens))
    cache = model.init_cache(1, 128)
    hidden, _ = model.forward(model.params, jnp.asarray([tokens], jnp.int32), window, cache)
    return np.asarray(model.logits(model.params, hidden))[0]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("pack", [packed_model, lambda model: model])
def test_it_is_the_whole_model_with_one_row_for_all_other_tokens(is_tied, pack):
    model = reduced(is_tied=is_tied)
    rows = model.config.rows_of_tokens()
    assert model.params["embedding"].shape == (len(IDS) + 1, 32)
    assert rows[list(IDS)].tolist() == list(range(len(IDS)))
    assert (np.delete(rows, IDS) == len(IDS)).all()
    params = dict(model.params, embedding=model.params["embedding"][rows])
    if not is_tied:
        params["head"] = model.params["head"][:, rows]
    config = dataclasses.replace(model.config, draft_vocabulary=())
    whole = dataclasses.replace(model, config=config, params=params)
    tokens = [0, 5, 3, 60, 59, 1]
    found, expected = logits_of(pack(model), tokens), logits_of(whole, tokens)
    assert found.shape == (len(tokens), toy.VOCAB)
    np.testing.assert_allclose(found[:, IDS], expected[:, IDS], atol=1e-5)
    assert (np.delete(found, IDS, axis=1) == -np.inf).all()
    # Sabotage: the ids are told apart.
    assert np.abs(found[:, IDS] - expected[:, [i + 1 for i in IDS]]).max() > 0.1


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """A model from outside, whose logits the drafter takes as they are: over all tokens."""

    inside: jaxspec.LanguageModel

    def __getattr__(self, name):
        return getattr(self.inside, name)


TREE = jaxspec.trees.BeamTree(width=2, depth=2, nodes=4)


@pytest.mark.parametrize(
    ("verifier", "settings"),
    [
        ("coupled", {"tree": TREE}),
        pytest.param("coupled", {"min_confidence": 0.2}, marks=pytest.mark.slow),
        pytest.param("rejection", {}, marks=pytest.mark.slow),
    ],
)
def test_it_drafts_as_from_logits_over_all_tokens(verifier, settings):
    """For a target that lacks the last token it drafts."""
    target, draft = toy.model(num_layers=1, is_tied=True, vocab_size=IDS[-1]), reduced()
    prompts = toy.prompts([3, 9, 5, 12])
    params = [
        jaxspec.SamplingParams(max_tokens=30, temperature=0.9 * (n % 2), seed=n) for n in range(4)
    ]
    found = []
    for model in (draft, OwnModel(draft)):
        drafter = jaxspec.DraftModel(model, **settings)
        engine = jaxspec.Engine(
            target, drafter, batch_size=4, max_length=128, verifier=verifier, trace="rounds"
        )
        found.append(engine.generate([[t % IDS[-1] for t in each] for each in prompts], params))
    own, over_all = found
    assert [each.token_ids for each in own] == [each.token_ids for each in over_all]
    assert own.acceptance == over_all.acceptance
    assert own.acceptance.num_draft_tokens > 0
    assert jaxspec.DraftModel(draft).for_target(target).excluded == IDS[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("tree", [None, TREE])
def test_outputs_are_plain_ones(tree):
    """Of a draft model that agrees with its target on the tokens that it drafts."""
    target = toy.model(num_layers=1, is_tied=True)
    embedding = target.params["embedding"]
    others = jnp.delete(embedding, jnp.array(IDS), axis=0).mean(axis=0, keepdims=True)
    params = dict(target.params, embedding=jnp.concatenate([embedding[jnp.array(IDS)], others]))
    draft = dataclasses.replace(reduced(), params=params)
    engine = jaxspec.Engine(
        target, jaxspec.DraftModel(draft, tree=tree), batch_size=4, max_length=128
    )
    prompts = toy.prompts([3, 9, 5, 12])
    for temperature in (0.0, 0.8):
        params = [
            jaxspec.SamplingParams(max_tokens=40, temperature=temperature, seed=n) for n in range(4)
        ]
        drafted = engine.generate(prompts, params)
        plain = engine.generate(prompts, params, speculate=False)
        tokens = [done.token_ids for done in drafted]
        assert tokens == [done.token_ids for done in plain]
        assert {token for each in tokens for token in each} - {*IDS}
        total = drafted.acceptance
        assert 0 < total.num_accepted_tokens < total.num_draft_tokens


def test_configurations():
    config = reduced().config
    assert ModelConfig.from_json(config.to_json()) == config
    assert "draft_vocabulary" not in toy.config().to_json()  # as before there were any
    assert toy.config().over_rows() == toy.config()
    for ids in ((3, 2), (2, 2), (-1, 4), (5, toy.VOCAB)):
        with pytest.raises(ModelError, match="2 ids are not in increasing order below 61"):
            toy.config(draft_vocabulary=ids)


def test_a_vocabulary_of_another_target_is_refused():
    """Without a tokenizer nothing else tells."""
    small = toy.model(vocab_size=12)
    drafter = jaxspec.DraftModel(reduced(draft_vocabulary=(0, 2, 3, 12, 30, 31, 59)))
    with pytest.raises(ModelError, match=r"drafts 7 tokens, of which 4 are beyond .* \(12 tokens"):
        drafter.check(small)
    jaxspec.DraftModel(reduced()).check(toy.model(vocab_size=31))  # one of seven is


def test_a_tree_has_no_more_children_than_the_vocabulary_has_tokens():
    drafter = jaxspec.DraftModel(reduced(), tree=jaxspec.trees.BeamTree(width=8, depth=1, nodes=8))
    with pytest.raises(SettingError, match=r"nodes of 8 children, and .* can draft 7 tokens of"):
        drafter.check(toy.model())
