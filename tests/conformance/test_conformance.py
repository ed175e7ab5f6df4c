"""The conformance battery passes what is right, and names the clause that a broken part breaks.

Our own models and drafters go through the same table as anybody's. Every check has at least one
sabotaged model or drafter that it must catch.
"""

import dataclasses
import functools
import io

import flex
import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from rich.console import Console
from test_protocols import ForeignModel, RepeatLast

import jaxspec
from jaxspec import sampling
from jaxspec.cache import pages as kv
from jaxspec.conformance.report import chosen_checks, run_checks
from jaxspec.conformance.under_test import DrafterUnderTest
from jaxspec.engine.engine import Engine
from jaxspec.errors import ConformanceError, ModelError, SettingError
from jaxspec.kernels.base import Kernels
from jaxspec.kernels.xla import block_attention
from jaxspec.models import decoder
from jaxspec.models.config import RopeConfig
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.testing import (
    DRAFTER_CHECKS,
    MODEL_CHECKS,
    Outcome,
    battery_prompts,
    check_drafter,
    check_model,
)
from jaxspec.types import Draft, Shared, chain_parents

SMALL = {"num_layers": 1, "num_query_heads": 2, "num_kv_heads": 1}
BASE = toy.model(**SMALL)
DEEP = toy.model(**SMALL | {"num_layers": 2})  # what a layer reads shows in the next one's KV
GLM = {
    "family": "glm4",
    "rope": RopeConfig(theta=1e4, rotary_size=4, is_interleaved=True),
    "has_qk_norm": False,
    "has_qkv_bias": True,
    "has_sandwich_norms": True,
}

MODELS = {
    "qwen3": lambda: BASE,
    "glm4 in bfloat16": lambda: toy.model(dtype=jnp.bfloat16, num_layers=1, **GLM),
    "sliding window": lambda: toy.model(family="mistral", sliding_windows=(6,), **SMALL),
    "NNX module": lambda: ForeignModel(0),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "NNX module" else ())
        for name in MODELS  # the notebook on models of one's own checks an NNX module too
    ],
)
def test_models_conform(name):
    report = check_model(MODELS[name]())
    report.assert_ok()
    assert [check.name for check in report.checks] == list(MODEL_CHECKS)
    assert all(check.passed for check in report.checks)


# Broken models. Each is the toy model but for one thing.


class Wrapped:
    """A model that does what another one does."""

    name = "wrapped"
    tokenizer = None
    vocab_size = BASE.vocab_size
    eos_token_ids = ()
    params = BASE.params
    init_cache = staticmethod(BASE.init_cache)
    forward = staticmethod(BASE.forward)
    logits = staticmethod(BASE.logits)


def poisoned(**attributes):
    """A wrapped model with other attributes or methods."""
    attributes = {
        name: staticmethod(value) if callable(value) else value
        for name, value in attributes.items()
    }
    return type("Spoilt", (Wrapped,), attributes)()


def moved(change):
    """A model that sees its window changed."""

    def forward(params, tokens, window, cache):
        return BASE.forward(params, tokens, change(window), cache)

    return poisoned(forward=forward)


def looking(change, *, turns=False):
    """A model whose attention (or, if it `turns`, whose rotary embedding), and nothing else, sees
    the window changed."""

    def forward(params, tokens, window, cache):
        # Slots do not follow from positions, so KV is stored where it should be.
        rotated, seen = (change(window), window) if turns else (window, change(window))

        def attention(queries, layer, table, _, **options):
            return block_attention(queries, layer, table, seen, **options)

        kernels = Kernels(attention=attention)
        return decoder.forward(BASE.config, params, tokens, rotated, cache, kernels=kernels)

    return poisoned(forward=forward)


def listing_layers(params, tokens, window, cache):
    hidden, cache = BASE.forward(params, tokens, window, cache)
    return hidden, cache.replace(layers=list(cache.layers))


def listing_layers_in_prefill(params, tokens, window, cache):
    forward = BASE.forward if window.rows is None else listing_layers
    return forward(params, tokens, window, cache)


def reading_first(params, tokens, window, cache):
    nowhere = window.replace(slots=jnp.full_like(window.slots, -1))
    hidden, _ = BASE.forward(params, tokens, nowhere, cache)
    return hidden, BASE.forward(params, tokens, window, cache)[1]


def last_row_first(params, tokens, window, cache):
    """Reads a chunk of a prompt before it has written the KV of the chunk before."""
    hidden = []
    for row in reversed(range(tokens.shape[0])):
        own = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], window)
        rows = jnp.array([row]) if window.rows is None else own.rows
        found, cache = DEEP.forward(params, tokens[row : row + 1], own.replace(rows=rows), cache)
        hidden.insert(0, found)
    return jnp.concatenate(hidden), cache


def batch_normed(params, tokens, window, cache):
    hidden, cache = BASE.forward(params, tokens, window, cache)
    return hidden + 1e-3 * jnp.mean(hidden, axis=0, keepdims=True), cache


def last_slot(cache):
    return jnp.full((cache.table.shape[0], 1), cache.capacity - 1, jnp.int32)


def recurrent(params, tokens, window, cache):
    """Keeps a running sum of all that it has read in a row's last slot."""
    hidden, cache = BASE.forward(params, tokens, window, cache)
    slots = last_slot(cache)
    k, v = kv.read_slots(cache.layers[0], cache.table, slots, cache.dtype)
    memory = jnp.mean(k, axis=(1, 2, 3))
    layer = kv.write(cache.layers[0], cache.table, k + jnp.mean(hidden), v, slots)
    return hidden + memory[:, None, None], cache.replace(layers=(layer, *cache.layers[1:]))


def reading_garbage(params, tokens, window, cache):
    """Masks by multiplication: 0 * NaN is NaN."""
    hidden, cache = BASE.forward(params, tokens, window, cache)
    _, v = kv.read_slots(cache.layers[0], cache.table, last_slot(cache), cache.dtype)
    return hidden + 0 * jnp.mean(v, axis=(1, 2, 3))[:, None, None], cache


def sharing_pages(num_rows, max_length):
    cache = BASE.init_cache(num_rows, max_length)
    return cache.replace(table=cache.table.at[1].set(cache.table[0]))


def all_see_the_last(window):
    last = jnp.max(window.positions, axis=1, keepdims=True)
    return window.replace(positions=jnp.broadcast_to(last, window.positions.shape))


def own_entry_everywhere(window):
    length = window.positions.shape[1]
    entry = jnp.arange(length, dtype=jnp.int32)[:, None]
    return window.replace(
        paths=jnp.broadcast_to(entry, (window.positions.shape[0], length, length))
    )


def clamped(window):
    return window.replace(slots=jnp.clip(window.slots, 0, 255))


def of_row_0(window):
    return window.replace(rows=None if window.rows is None else jnp.zeros_like(window.rows))


# These are caught because they raise.
RAISING = {
    "its state grows",
    "tokens of 16 bits",
    "structure changes",
    "rows on another axis",
    "values read on the host",
    "prefill gives another structure",
    "refuses the target",
}

BROKEN_MODELS = {
    "EOS tokens in a list": ("protocol", poisoned(eos_token_ids=[1])),
    "EOS beyond the vocabulary": ("protocol", poisoned(eos_token_ids=(toy.VOCAB,))),
    "a number among the parameters": ("protocol", poisoned(params={**BASE.params, "scale": 0.1})),
    "no logits": ("protocol", poisoned(logits=None)),
    "rows share a page": ("cache", poisoned(init_cache=sharing_pages)),
    "half the slots": ("cache", poisoned(init_cache=lambda rows, s: BASE.init_cache(rows, s // 2))),
    "no paged cache": ("cache", poisoned(init_cache=lambda rows, s: {"k": jnp.zeros((rows, s))})),
    "logits in bfloat16": (
        "shapes",
        poisoned(logits=lambda params, h: BASE.logits(params, h).astype(jnp.bfloat16)),
    ),
    "logits of the last token": (
        "shapes",
        poisoned(logits=lambda params, h: BASE.logits(params, h[..., -1:, :])),
    ),
    "a list for a tuple": ("static_shapes", poisoned(forward=listing_layers)),
    "values read on the host": (
        "static_shapes",
        moved(lambda window: window.replace(slots=window.slots + int(window.start[0] > 500))),
    ),
    "parameters closed over": (
        "params",
        poisoned(forward=lambda params, *rest: BASE.forward(BASE.params, *rest)),
    ),
    "the head closed over": (
        "params",
        poisoned(logits=lambda params, hidden: BASE.logits(BASE.params, hidden)),
    ),
    "writes nothing": (
        "writes",
        moved(lambda window: window.replace(slots=jnp.full_like(window.slots, -1))),
    ),
    "writes at a common cursor": (
        "writes",
        moved(lambda w: w.replace(slots=jnp.broadcast_to(w.slots[:1], w.slots.shape))),
    ),
    "writes a slot too far": (
        "writes",
        moved(lambda w: w.replace(slots=jnp.where(w.slots >= 0, w.slots + 1, -1))),
    ),
    "clamps slots": ("outside_slots", moved(clamped)),
    "prefills row 0": ("rows", moved(of_row_0)),
    "reads before it writes": ("write_before_read", poisoned(forward=reading_first)),
    "sees the future": ("window_visibility", looking(all_see_the_last)),
    "sees itself only": ("window_visibility", looking(own_entry_everywhere)),
    "one position for all rows": (
        "ragged_rows",
        looking(
            lambda w: w.replace(positions=jnp.broadcast_to(w.positions[:1], w.positions.shape)),
            turns=True,
        ),
    ),
    "no positions": (
        "positions",
        looking(lambda w: w.replace(positions=jnp.zeros_like(w.positions)), turns=True),
    ),
    "normed over the batch": ("row_independence", poisoned(forward=batch_normed)),
    "a recurrent state": ("rollback", poisoned(forward=recurrent)),
    "reads garbage": ("garbage", poisoned(forward=reading_garbage)),
    "positions restart in each window": (
        "chunked_prefill",
        looking(lambda w: w.replace(positions=w.positions - w.start[:, None]), turns=True),
    ),
    "reads chunks before it writes all": (
        "chunked_prefill",
        poisoned(params=DEEP.params, init_cache=DEEP.init_cache, forward=last_row_first),
    ),
    "knows chains only": ("tree_paths", moved(lambda window: window.replace(paths=None))),
    "sees the drafts": ("same_program", looking(all_see_the_last)),
    "prefill gives another structure": (
        "trace_count",
        poisoned(forward=listing_layers_in_prefill),
    ),
}


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_broken_models_are_caught(name):
    expected, model = BROKEN_MODELS[name]
    report = check_model(model, only=[expected])
    [failure] = report.failures
    assert failure.detail.startswith("raised") == (name in RAISING)  # none by accident
    assert failure.name == expected
    assert failure.clause == MODEL_CHECKS[expected].clause
    with pytest.raises(ConformanceError, match=rf"breaks {failure.clause} \({expected}: "):
        report.assert_ok()


def as_is(window):
    return window


def test_the_wrapping_of_broken_models_breaks_nothing():
    checks = ["params", "writes", "window_visibility", "chunked_prefill", "positions"]
    for model in (moved(as_is), looking(as_is), looking(as_is, turns=True)):
        check_model(model, only=checks).assert_ok()


# Drafters


@dataclasses.dataclass(frozen=True, eq=False)
class Bigram(jaxspec.Drafter):
    """Draws each token from a distribution that depends on the one before it: a drafter that
    samples, and says from what."""

    name: str = "bigram"
    spread: float = 2.0

    @property
    def params(self):
        rng = np.random.default_rng(3)
        size = (toy.VOCAB, toy.VOCAB)
        return jnp.asarray(self.spread * rng.standard_normal(size), jnp.float32)

    def draw(self, shape, params, rows, drafted, last, node):
        """The next token and the distribution it comes from."""
        drawn = sampling.draw_draft(
            params[last],
            rows,
            drafted,
            node,
            vocab_size=shape.vocab_size,
            is_noise_shared=shape.is_noise_shared,
            needs_probs=shape.needs_draft_probs,
        )
        return drawn.token, drawn.distribution

    def propose(self, shape, params, state, rows):
        last = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)[:, 0]

        def step(carry, node):
            drafted, last = carry
            last, q = self.draw(shape, params, rows, drafted, last, node)
            return (drafted.at[:, node].set(last), last), q

        drafted = jnp.zeros((shape.batch_size, shape.num_nodes), jnp.int32)
        nodes = jnp.arange(shape.num_nodes, dtype=jnp.int32)
        (drafted, _), distributions = jax.lax.scan(step, (drafted, last), nodes)
        draft = Draft(
            tokens=drafted,
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.minimum(rows.draft_limit, shape.num_nodes),
            q=None if distributions is None else distributions.swapaxes(0, 1),
        )
        return draft, state


@dataclasses.dataclass(frozen=True)
class Branches(jaxspec.Drafter):
    """A tree: the newest token's successor, its predecessor, and the former's successor."""

    name: str = "branches"
    is_chain = False

    def propose(self, shape, params, state, rows):
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)
        step = jnp.asarray([1, -1, 2], jnp.int32)
        parents = jnp.asarray([-1, -1, 0], jnp.int32)
        tokens = (newest + step) % shape.vocab_size
        num_valid = jnp.minimum(rows.draft_limit, 3)
        draft = Draft(
            tokens=tokens, parents=jnp.broadcast_to(parents, tokens.shape), num_valid=num_valid
        )
        return draft, state


DRAFT = toy.model(seed=9, width=24, **SMALL)
TREE = jaxspec.trees.StaticTree(((0,), (1,), (0, 0), (0, 1)))


def sure():
    """A draft model so sure of its first token that the second one drawn is clearly another."""
    params = {**DRAFT.params, "final_norm": 8 * DRAFT.params["final_norm"]}
    return dataclasses.replace(DRAFT, params=params)


@functools.cache
def native():
    """A target with the native kernels."""
    return flex.target(num_layers=2)


@functools.cache
def truth():
    """The battery's prompts with what the target makes of them."""
    prompts = battery_prompts(toy.VOCAB)
    engine = Engine(BASE, batch_size=3, max_length=256)
    return toy.sequences(engine.generate(prompts, SamplingParams(max_tokens=40)))


DRAFTERS = {
    "DraftModel": lambda: jaxspec.DraftModel(DRAFT),
    "DraftModel that ends drafts early": lambda: jaxspec.DraftModel(DRAFT, 0.25),
    "DraftModel of a fixed shape": lambda: jaxspec.DraftModel(DRAFT, tree=TREE),
    "DraftModel of a beam tree": lambda: jaxspec.DraftModel(
        DRAFT, tree=jaxspec.trees.BeamTree(2, 2, 4)
    ),
    "Heads": lambda: heads.random_heads("clover", BASE),
    "Heads of a fixed shape": lambda: heads.random_heads("medusa", BASE, tree=TREE),
    "FlexDraft": lambda: flex.random_flex(native(), mode="parallel"),
    "FlexDraft in passes of its own": lambda: flex.random_flex(
        BASE, mode="sequential", num_deep_layers=1
    ),
    "NGram": lambda: jaxspec.NGram(1, 3),
    "Oracle": lambda: jaxspec.Oracle(truth(), acceptance=0.7),
    "Oracle with cost": lambda: jaxspec.Oracle(truth(), cost_of=RepeatLast()),
    "one that samples": lambda: Bigram(),
    "one of trees": lambda: Branches(),
}


SELDOM = {
    "Oracle with cost": "slow",
    "DraftModel of a fixed shape": "slow",
    "DraftModel of a beam tree": "slow",
    "Heads": "slow",
    "Heads of a fixed shape": "slow",
    "FlexDraft in passes of its own": "slow",
}
DRAWING = {"draft_probs", "fresh_noise", "shared_noise"}
LEFT_OUT = {  # checks that do not apply, where that is known
    "DraftModel": {"score"},
    "DraftModel that ends drafts early": {"score"},
    "DraftModel of a fixed shape": {"score"},
    "DraftModel of a beam tree": {"score", *DRAWING},
    "one that samples": {"catch_up", "score"},
    "FlexDraft": {"catch_up"},
    "FlexDraft in passes of its own": {"catch_up", "score"},
}


def test_the_table_holds_every_drafter_the_package_exports():
    exported = {name for name in jaxspec.__all__ if hasattr(getattr(jaxspec, name), "propose")}
    assert exported - {"Drafter"} <= set(DRAFTERS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, SELDOM[name]) if name in SELDOM else ())
        for name in DRAFTERS
    ],
)
def test_drafters_conform(name):
    drafter = DRAFTERS[name]()
    report = check_drafter(drafter, native() if name == "FlexDraft" else BASE)
    report.assert_ok()
    assert [check.name for check in report.checks] == list(DRAFTER_CHECKS)
    left_out = {check.name for check in report.checks if check.passed is None}
    assert left_out == LEFT_OUT.get(name, left_out)
    if name == "DraftModel":
        assert "with full and with no acceptance" in report["no_drift"].detail


@dataclasses.dataclass(frozen=True, eq=False)
class Spoilt(Bigram):
    """A drafter with some of its functions replaced."""

    functions: tuple = ()

    def __getattribute__(self, name):
        functions = dict(object.__getattribute__(self, "functions"))
        if name in functions:
            function = functions[name]
            return functools.partial(function, self) if callable(function) else function
        return object.__getattribute__(self, name)


def replaced(**functions):
    return Spoilt(functions=tuple(functions.items()))


def spoiling(**changes):
    """A `propose` by name, with some fields of its drafts replaced, each by a function of the
    shape, the draft and the rows."""

    def propose(self, shape, params, state, rows):
        draft, state = RepeatLast().propose(shape, params, state, rows)
        changed = {name: change(shape, draft, rows) for name, change in changes.items()}
        return draft.replace(**changed), state

    return {"propose": propose}


def drawing(draw):
    """A `propose` by name: that of the bigram drafter, drawing in another way."""

    def propose(self, shape, params, state, rows):
        return replaced(draw=draw).propose(shape, params, state, rows)

    return {"propose": propose}


class Switched(jaxspec.Drafter):
    """A drafter with its faults in one program.

    A fault is functions of the drafter, by name; `drafted` changes what it proposed. Which fault is
    on, counted from 1, is among the parameters; 0 is none.
    """

    def __init__(self, sound, faults):
        self.sound, self.faults, self.armed = sound, faults, 0
        self.name, self.is_chain = sound.name, sound.is_chain
        self.max_depth, self.num_nodes = sound.max_depth, sound.num_nodes
        self.init, self.lag = sound.init, sound.lag

    @property
    def params(self):
        return {"sound": self.sound.params, "armed": jnp.int32(self.armed)}

    def _call(self, name, shape, params, *rest):
        ways, way_of = [getattr(self.sound, name, self.drafted)], [0]
        for fault in self.faults:
            if name in fault:
                ways.append(functools.partial(fault[name], self.sound))
            way_of.append(len(ways) - 1 if name in fault else 0)
        calls = [functools.partial(way, shape, params["sound"]) for way in ways]
        return jax.lax.switch(jnp.asarray(way_of, jnp.int32)[params["armed"]], calls, *rest)

    def admit(self, *arguments):
        return self._call("admit", *arguments)

    def catch_up(self, *arguments):
        return self._call("catch_up", *arguments)

    def propose(self, shape, params, state, rows):
        draft, state = self._call("propose", shape, params, state, rows)
        return self._call("drafted", shape, params, draft), state

    def drafted(self, shape, params, draft):
        return draft

    def commit(self, *arguments):
        return self._call("commit", *arguments)


def draw_flat_probs(self, *arguments):
    token, q = Bigram.draw(self, *arguments)
    return token, None if q is None else jnp.full_like(q, 1 / q.shape[-1])


def draw_warm_probs(self, *arguments):
    """Ignores the temperature where it states the distribution."""
    token, q = Bigram.draw(self, *arguments)
    _, params, _, _, last, _ = arguments
    return token, None if q is None else jax.nn.softmax(params[last], axis=-1)


def draw_without_probs(self, *arguments):
    return Bigram.draw(self, *arguments)[0], None


def draw_unnormalised(self, *arguments):
    token, q = Bigram.draw(self, *arguments)
    return token, None if q is None else 2 * q


def draw_with_one_key(self, shape, params, rows, drafted, last, node):
    """The same noise for every node of a round."""
    return Bigram.draw(self, shape, params, rows, jnp.zeros_like(drafted), last, node * 0)


def draw_with_noise(*, is_shared):
    def draw(self, shape, *arguments):
        return Bigram.draw(self, dataclasses.replace(shape, is_noise_shared=is_shared), *arguments)

    return draw


def swap_siblings(self, shape, params, draft):
    """The first two nodes, children of one parent, in another order than they were drawn."""
    order = jnp.asarray([1, 0, *range(2, shape.num_nodes)])
    return draft.replace(tokens=draft.tokens[:, order])


def repeat_sibling(self, shape, params, draft):
    """Drawn with replacement: the second child may be the first again, and here it is."""
    return draft.replace(tokens=draft.tokens.at[:, 1].set(draft.tokens[:, 0]))


def own_noise(self, shape, params, state, rows):
    shape = dataclasses.replace(shape, is_noise_shared=False)
    return jaxspec.DraftModel.propose(self, shape, params, state, rows)


def random_tokens(shape, draft, rows):
    """Asks the host, which gives other numbers each time."""
    rng = np.random.default_rng()
    like = jax.ShapeDtypeStruct(draft.tokens.shape, jnp.int32)
    return jax.pure_callback(
        lambda _: rng.integers(0, toy.VOCAB, like.shape).astype(np.int32), like, rows.num_committed
    )


def all_nodes(shape, draft, rows):
    return jnp.full_like(draft.num_valid, shape.num_nodes)


def of_first_row(shape, draft, rows):
    return jnp.broadcast_to(draft.tokens[:1], draft.tokens.shape)


def by_row_number(shape, draft, rows):
    row = jnp.arange(shape.batch_size, dtype=jnp.int32)[:, None]
    return (draft.tokens + row) % shape.vocab_size


def growing(self, shape, params, state, rows, row):
    return (*state, jnp.zeros(()))


def listing(self, shape):
    return (jnp.zeros((shape.batch_size,), jnp.int32),)


def keep_rejected(self, shape, params, state, rows, outcome):
    """As if all drafts had been accepted."""
    seen = outcome.rows.num_committed + state.num_steps
    return state.replace(num_seen=jnp.maximum(state.num_seen, seen))


def count_rounds(self, shape, params, state, rows, outcome):
    return (state[0] + 1,)


def drift_with_rounds(self, shape, params, state, rows):
    draft, _ = Bigram.propose(self, shape, params, (), rows)
    tokens = (draft.tokens + state[0][:, None]) % shape.vocab_size
    return draft.replace(tokens=tokens), state


def catch_up_short(self, shape, params, state, rows, chunk_rows):
    """Notes that it has read what it has not."""
    after = jaxspec.DraftModel.catch_up(self, shape, params, state, rows, chunk_rows)
    return state.replace(num_seen=after.num_seen)


def catch_up_first(self, shape, params, state, rows, chunk_rows):
    chunk_rows = jnp.where(jnp.arange(chunk_rows.shape[0]) == 0, chunk_rows, -1)
    return jaxspec.DraftModel.catch_up(self, shape, params, state, rows, chunk_rows)


def forget_nothing(self, shape, params, state, rows, row):
    return state


def refuse(self, target):
    raise ModelError("It drafts for no model; use another.")


def siblings(shape, draft, rows):
    return jnp.full_like(draft.parents, -1)


def meddling(self, shape, params, state, rows, draft, tokens, window, cache):
    """Scores another token in the place of the last draft."""
    changed = tokens.at[:, -1].set((tokens[:, -1] + 1) % BASE.vocab_size)
    hidden, cache = BASE.forward(BASE.params, changed, window, cache)
    return hidden, None, cache, state


# Faults that change no shapes: by a name of the drafter, those that share its engine.
FAULTS = {
    "one that repeats": {
        "no chain": ("draft_shape", spoiling(parents=siblings)),
        "children first": ("draft_shape", spoiling(parents=lambda s, d, r: d.parents + 2)),
        "tokens beyond the vocabulary": (
            "vocabulary",
            spoiling(tokens=lambda s, d, r: d.tokens + s.vocab_size),
        ),
        "ignores the limit": ("draft_limit", spoiling(num_valid=all_nodes)),
        "asks the host": ("determinism", spoiling(tokens=random_tokens)),
        "drafts row 0 for all": ("row_independence", spoiling(tokens=of_first_row)),
        "drafts by row number": ("row_independence", spoiling(tokens=by_row_number)),
    },
    "a draft model": {
        "keeps rejected drafts": ("no_drift", {"commit": keep_rejected}),
        "forgets nothing on admission": ("row_reuse", {"admit": forget_nothing}),
        "never catches up": ("catch_up", {"catch_up": forget_nothing}),
        "reads the first chunk of a call": ("catch_up", {"catch_up": catch_up_first}),
        "only says that it caught up": ("no_drift", {"catch_up": catch_up_short}),
    },
    "one that samples": {
        "a flat distribution": ("draft_probs", drawing(draw_flat_probs)),
        "the distribution of another temperature": ("draft_probs", drawing(draw_warm_probs)),
        "a distribution of mass 2": ("draft_probs", drawing(draw_unnormalised)),
        "one key per round": ("fresh_noise", drawing(draw_with_one_key)),
        "keys of the position only": ("fresh_noise", drawing(draw_with_noise(is_shared=True))),
        "noise of its own": ("shared_noise", drawing(draw_with_noise(is_shared=False))),
    },
    "a draft model of trees": {
        "siblings in another order than drawn": ("draft_probs", {"drafted": swap_siblings}),
        "siblings drawn with replacement": ("draft_probs", {"drafted": repeat_sibling}),
        "trees by noise of its own": ("shared_noise", {"propose": own_noise}),
    },
}
SOUND = {
    "one that repeats": lambda: RepeatLast(),
    "a draft model": lambda: jaxspec.DraftModel(DRAFT),
    "one that samples": lambda: Bigram(),
    "a draft model of trees": lambda: jaxspec.DraftModel(sure(), tree=TREE),
}


@functools.cache
def with_faults(kind):
    """A drafter with all of its faults, in the battery's engine."""
    return DrafterUnderTest(
        drafter=Switched(SOUND[kind](), [functions for _, functions in FAULTS[kind].values()]),
        target=BASE,
        prompts=battery_prompts(toy.VOCAB),
        max_length=256,
        seed=0,
    )


def check_armed(kind, number, names):
    """The report of these checks on a drafter with this fault, counted from 1; 0 is none."""
    under_test = with_faults(kind)
    under_test.drafter.armed = number
    for each in (under_test, under_test.with_probs, under_test.with_shared_noise):
        each.engine.update_params(draft=under_test.drafter.params)
    vars(under_test).pop("history", None)
    return run_checks(
        "drafter", under_test.drafter, chosen_checks(DRAFTER_CHECKS, names, ()), under_test
    )


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_drafters_are_caught_and_without_them_the_same_program_passes(kind):
    faults = FAULTS[kind]
    check_armed(kind, 0, {check for check, _ in faults.values()}).assert_ok()
    for number, (name, (expected, _)) in enumerate(faults.items(), start=1):
        [failure] = check_armed(kind, number, [expected]).failures
        assert not failure.detail.startswith("raised"), name
        assert (failure.name, failure.clause) == (expected, DRAFTER_CHECKS[expected].clause), name


# Faults that change a structure or a shape: each has an engine of its own, which seldom runs.
BROKEN_DRAFTERS = {
    "scores other tokens than the target's": ("score", replaced(score=meddling)),
    "is_chain unknown": ("protocol", replaced(is_chain=None)),
    "a text among the parameters": ("protocol", replaced(params={"table": "here"})),
    "refuses the target": ("protocol", replaced(check=refuse)),
    "its state grows": ("static_shapes", replaced(admit=growing)),
    "rows on another axis": (
        "static_shapes",
        replaced(init=lambda self, shape: (jnp.zeros((2, shape.batch_size), jnp.int32),)),
    ),
    "closes over its table": (
        "params",
        replaced(
            propose=lambda self, shape, params, state, rows: Bigram.propose(
                self, shape, Bigram().params, state, rows
            )
        ),
    ),
    "tokens of 16 bits": (
        "draft_shape",
        replaced(**spoiling(tokens=lambda s, d, r: d.tokens.astype("int16"))),
    ),
    "deeper than it says": ("draft_shape", replaced(is_chain=False, max_depth=1)),
    "drifts with the rounds": (
        "no_drift",
        replaced(init=listing, commit=count_rounds, propose=drift_with_rounds),
    ),
    "structure changes": (
        "trace_count",
        replaced(admit=lambda self, shape, params, state, rows, row: [*state]),
    ),
    "samples without a distribution": ("draft_probs", replaced(draw=draw_without_probs)),
}


@pytest.mark.parametrize("name", BROKEN_DRAFTERS)
def test_broken_drafters_are_caught(name):
    expected, drafter = BROKEN_DRAFTERS[name]
    report = check_drafter(drafter, BASE, only=[expected])
    [failure] = report.failures
    assert failure.detail.startswith("raised") == (name in RAISING)  # none by accident
    assert failure.name == expected
    assert failure.clause == DRAFTER_CHECKS[expected].clause


def test_a_tree_that_calls_itself_a_chain_changes_the_output():
    """No other mistake of a drafter can; a small vocabulary makes its guesses hit."""
    target = toy.model(vocab_size=5, **SMALL)

    class Liar(Branches):
        is_chain = True

    report = check_drafter(Liar(), target, only=["output"])
    assert [failure.clause for failure in report.failures] == ["C4"]
    check_drafter(Branches(), target, only=["output"]).assert_ok()


def test_where_nothing_is_drafted_checks_are_untested_and_never_pass():
    idle = replaced(**spoiling(num_valid=lambda shape, draft, rows: draft.num_valid * 0))
    report = check_drafter(idle, BASE)
    assert not report.ok
    assert not report.failures
    passed = {check.name for check in report.checks if check.passed}
    assert passed <= {"protocol", "static_shapes", "params", "trace_count"}
    untested = {check.name for check in report.of(Outcome.UNTESTED)}
    assert {"draft_shape", "row_independence", "row_reuse", "output", "draft_probs"} <= untested
    with pytest.raises(ConformanceError, match=r"leaves untested C5 \(draft_shape: nothing was"):
        report.assert_ok()


@pytest.mark.parametrize("longest", [1, 3, 5])
def test_a_lookup_drafts_on_the_battery_s_prompts(longest):
    report = check_drafter(jaxspec.NGram(longest, longest), BASE, only=["draft_shape"])
    report.assert_ok()


@dataclasses.dataclass(frozen=True)
class Learner(jaxspec.Drafter):
    """Counts the tokens of all requests in one table, and drafts by their number."""

    name: str = "learner"
    shares_state: bool = True

    def init(self, shape):
        return Shared(jnp.zeros((shape.vocab_size,), jnp.int32))

    def propose(self, shape, params, state, rows):
        draft, _ = RepeatLast().propose(shape, params, (), rows)
        tokens = (draft.tokens + jnp.sum(state.value)) % shape.vocab_size
        return draft.replace(tokens=tokens), state

    def commit(self, shape, params, state, rows, info):
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)
        return Shared(state.value.at[newest[:, 0]].add(1))


def test_state_that_requests_share_has_a_contract_of_its_own():
    report = check_drafter(Learner(), BASE)
    report.assert_ok()
    for name in ("row_independence", "no_drift", "row_reuse"):
        assert report[name].outcome == Outcome.NOT_APPLICABLE
    for name in ("determinism", "static_shapes", "output", "draft_shape"):
        assert report[name].passed, name
    report = check_drafter(Learner(shares_state=False), BASE, only=["row_reuse"])
    [failure] = report.failures
    assert "shares_state = True" in failure.detail


def test_every_check_has_something_that_it_catches():
    assert {check for check, _ in BROKEN_MODELS.values()} == set(MODEL_CHECKS)
    caught = {check for check, _ in BROKEN_DRAFTERS.values()}
    caught |= {check for faults in FAULTS.values() for check, _ in faults.values()}
    assert caught | {"output"} == set(DRAFTER_CHECKS)


# The report


def test_a_report_shows_itself():
    report = check_model(poisoned(eos_token_ids=(-1,)))
    assert not report.ok
    assert report["protocol"].passed is False
    assert all(check.passed is None for check in report.checks[1:])
    console = Console(width=100, file=io.StringIO())
    console.print(report)
    text = console.file.getvalue()
    assert "FAILED" in text
    assert "eos_token_ids holds -1" in text
    assert report.to_json()["checks"][0]["clause"] == "C6"


def test_what_cannot_be_checked_is_said():
    with pytest.raises(SettingError, match="no check 'speed'; choose among protocol, "):
        check_model(BASE, only=["speed"])
    with pytest.raises(SettingError, match="1 prompts were given"):
        check_drafter(RepeatLast(), BASE, prompts=[[1]])
    report = check_model(Wrapped(), only=["protocol"], skip=["protocol"])
    assert report.checks == ()
