"""Models and drafters that return other dtypes or shapes than the loop takes: one sentence each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxspec import DraftModel, Engine, NGram
from jaxspec.errors import ModelError
from jaxspec.models.base import LanguageModel
from jaxspec.serving import ServingEngine

SHAPE = {"batch_size": 2, "max_length": 128}
MODEL = toy.model()


class OwnModel:
    """A user's model: the toy, with other functions in the place of some of its own."""

    def __init__(self, **replaced):
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(MODEL, name)


def cut(function, *, width):
    """A `forward` whose hidden states are shorter."""

    def forward(params, tokens, window, cache):
        hidden, cache = function(params, tokens, window, cache)
        return hidden[:, :width], cache

    return forward


def with_other_cache(params, tokens, window, cache):
    hidden, cache = MODEL.forward(params, tokens, window, cache)
    return hidden, cache.replace(table=cache.table.astype(jnp.int8))


MODELS = {
    "bfloat16 logits": (
        {"logits": lambda params, hidden: MODEL.logits(params, hidden).astype(jnp.bfloat16)},
        r"model toy0 returned from `logits` bfloat16\[2, 5, 61\], where the engine takes "
        r"float32\[2, 5, 61\]",
    ),
    "another vocabulary": (
        {"vocab_size": 64},
        r"returned from `logits` float32\[2, 5, 61\], where the engine takes float32\[2, 5, 64\]",
    ),
    "hidden states of one token": (
        {"forward": cut(MODEL.forward, width=1)},
        r"hidden states float32\[2, 1, 32\], where the engine takes float32\[2, 5, 32\]",
    ),
    "a cache of another dtype": (
        {"forward": with_other_cache},
        r"from `forward` a cache with int8\[2, 1\] at \.table, where .* takes int32\[2, 1\]",
    ),
    "a cache of fewer rows": (
        {"init_cache": lambda num_rows, capacity: MODEL.init_cache(num_rows - 1, capacity)},
        "made a cache of 1 rows of 128 slots in `init_cache`, where 2 rows of 128 were asked for",
    ),
    "no cache of ours": (
        {"init_cache": lambda num_rows, capacity: jnp.zeros((num_rows, capacity))},
        r"made a \w+ in `init_cache`; make a jaxspec.cache.pages.KVCache",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_a_user(name):
    replaced, message = MODELS[name]
    with pytest.raises(ModelError, match=message):
        Engine(OwnModel(**replaced), NGram(), **SHAPE)


def test_what_is_right_is_taken():
    Engine(OwnModel(), Counting(), **SHAPE)


def test_serving_engines_refuse_the_same():
    drafter, message = DRAFTERS["tokens of floats"]
    with pytest.raises(ModelError, match=message):
        ServingEngine(MODEL, drafter, **SHAPE)


def changed(**leaves) -> LanguageModel:
    return dataclasses.replace(MODEL, params={**MODEL.params, **leaves})


def first_layer(**leaves) -> LanguageModel:
    first, *others = MODEL.params["layers"]
    return changed(layers=({**first, **leaves}, *others))


PARAMS = {
    "another shape": (
        first_layer(down=jnp.zeros((32, 48))),
        r"toy0 has float32\[32, 48\] at params\['layers'\]\[0\]\['down'\], where its config asks "
        r"for float32\[48, 32\]",
    ),
    "two dtypes": (
        first_layer(down=jnp.zeros((48, 32), jnp.bfloat16)),
        r"has bfloat16\[48, 32\] at .* for float32\[48, 32\]; .* all in one dtype",
    ),
    "whole numbers": (
        changed(embedding=np.zeros((61, 32), np.int8)),
        r"has int8\[61, 32\] at params\['embedding'\], where .* float32\[61, 32\]",
    ),
    "no norm": (changed(final_norm={}), r"has nothing at params\['final_norm'\], where"),
    "one layer more": (
        changed(layers=MODEL.params["layers"] * 2),
        r"has float32\[32\] at params\['layers'\]\[2\]\['attention_norm'\], .* for nothing",
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_of_our_own_models(name):
    model, message = PARAMS[name]
    with pytest.raises(ModelError, match=message):
        Engine(model, NGram(), **SHAPE)
    with pytest.raises(ModelError, match=message):
        Engine(MODEL, DraftModel(model), **SHAPE)


@dataclasses.dataclass(frozen=True)
class Counting(toy.WrongDrafter):
    """Keeps a number per row."""

    name: str = "counting"

    def init(self, shape):
        """Zero for every row."""
        return {"count": jnp.zeros((shape.batch_size,), jnp.int32)}


def spoiled(function, *, change):
    """The drafter with one function whose result is changed."""

    def changed(self, *args):
        return change(getattr(Counting, function)(self, *args))

    return type("Spoiled", (Counting,), {function: changed})()


def of_draft(**fields):
    def change(proposed):
        draft, state = proposed
        return draft.replace(**{name: make(draft) for name, make in fields.items()}), state

    return change


def as_floats(state):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state)


DRAFTERS = {
    "a node too many": (
        spoiled(
            "propose",
            change=of_draft(tokens=lambda draft: jnp.pad(draft.tokens, ((0, 0), (0, 1)))),
        ),
        r"drafter counting returned a draft with int32\[2, 5\] at \['tokens'\], where the engine "
        r"takes int32\[2, 4\]",
    ),
    "tokens of floats": (
        spoiled("propose", change=of_draft(tokens=lambda draft: draft.tokens.astype(jnp.float32))),
        r"a draft with float32\[2, 4\] at \['tokens'\], where the engine takes int32\[2, 4\]",
    ),
    "one limit for all rows": (
        spoiled("propose", change=of_draft(num_valid=lambda draft: draft.num_valid[0])),
        r"int32\[\] at \['num_valid'\], where the engine takes int32\[2\]",
    ),
    "half a distribution": (
        spoiled(
            "propose",
            change=of_draft(q=lambda draft: jnp.zeros((*draft.tokens.shape, 30), jnp.float32)),
        ),
        r"float32\[2, 4, 30\] at \['q'\], where the engine takes float32\[2, 4, 61\]",
    ),
    "a state of another dtype": (
        spoiled("commit", change=as_floats),
        r"from `commit` a state with float32\[2\] at \['count'\], where .* takes int32\[2\]",
    ),
    "a state of another kind on admission": (
        spoiled("admit", change=as_floats),
        r"from `admit` a state with float32\[3\] at \['count'\], where",
    ),
    "a state that grows": (
        spoiled("catch_up", change=lambda state: {**state, "more": state["count"]}),
        r"from `catch_up` a state with int32\[3\] at \['more'\], where the engine takes nothing",
    ),
    "a state in another container": (
        spoiled("admit", change=lambda state: Boxed(**state)),
        "from `admit` a state",
    ),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Boxed:
    """The state as a record."""

    count: jax.Array


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_of_a_user(name):
    drafter, message = DRAFTERS[name]
    with pytest.raises(ModelError, match=message):
        Engine(MODEL, drafter, **SHAPE)
