"""The door between target and drafter: taps, observe, uses_target, score, trees by depth."""

import dataclasses

import door
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec import SamplingParams
from jaxspec.decode import round as decode_round
from jaxspec.drafters.base import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.errors import ModelError, SettingError
from jaxspec.models.base import LAST, forward_features
from jaxspec.requests.requests import Request
from jaxspec.serving import ServingEngine
from jaxspec.testing import check_drafter
from jaxspec.types import Draft, Window, chain_parents

PROMPTS = toy.prompts((1, 3, 20, 40, 7))
PARAMS = [
    SamplingParams(max_tokens=20 + index, temperature=0.5 * (index % 2), seed=index)
    for index in range(len(PROMPTS))
]
SMALL = {"batch_size": 2, "max_length": 128}


@pytest.fixture(scope="module")
def target():
    return toy.model()


@pytest.fixture(scope="module")
def plain(target):
    return [c.token_ids for c in Engine(target, **SMALL).generate(PROMPTS, PARAMS)]


def drafter(name, target):
    return {"head": door.linear_head, "riding": door.Riding}[name](target)


@pytest.mark.parametrize("name", [pytest.param("head", marks=pytest.mark.slow), "riding"])
def test_output_is_the_targets_and_nothing_lags(target, plain, name):
    settings = SMALL | {"exactness": "ties", "draft_length": "auto", "verify_length": 4}
    engine = Engine(target, drafter(name, target), **settings)
    found = engine.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in found] == plain
    assert not np.any(engine.executor.lags())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head", "riding"])
def test_the_whole_battery(target, name):
    report = check_drafter(drafter(name, target), target)
    report.assert_ok()
    assert report["score"].passed is (True if name == "riding" else None)


class Corrupting(door.Riding):
    """Lets its probe be seen by the target's own rows."""

    def score(self, shape, params, state, rows, draft, tokens, window, cache):
        changed = tokens.at[:, -1].set(self.probe)
        return super().score(shape, params, state, rows, draft, changed, window, cache)


@pytest.mark.slow
def test_the_battery_sees_a_score_that_changes_the_targets_own_rows(target):
    report = check_drafter(Corrupting(target), target, only=["score"])
    assert report["score"].passed is False


def contiguous(tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Window(start=positions[:, 0], positions=positions, slots=positions)


def test_taps_are_the_stream_between_layers(target):
    tokens = jnp.asarray(toy.prompts((9, 9)), jnp.int32)
    window, cache = contiguous(tokens), target.init_cache(2, 128)
    plain, _ = target.forward(target.params, tokens, window, cache)
    hidden, features, _ = forward_features(
        target, target.params, tokens, window, cache, (2, 0, 1, LAST)
    )
    assert features is not None
    np.testing.assert_allclose(hidden, plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(features[:, :, 0], hidden)
    np.testing.assert_array_equal(features[:, :, 3], hidden)
    np.testing.assert_array_equal(features[:, :, 1], target.params["embedding"][tokens])
    shorter = dataclasses.replace(target.config, num_layers=1)
    params = {**target.params, "layers": target.params["layers"][:1]}
    model = dataclasses.replace(target, config=shorter, params=params)
    first, _ = model.forward(params, tokens, window, model.init_cache(2, 128))
    np.testing.assert_allclose(features[:, :, 2], first, rtol=1e-5, atol=1e-5)


def test_the_last_boundary_needs_only_forward(target, plain):
    found = Engine(door.Untapped(target), door.linear_head(target), **SMALL).generate(
        PROMPTS, PARAMS
    )
    assert [c.token_ids for c in found] == plain
    assert sum(c.acceptance.num_draft_tokens for c in found) > 0

    class Inner(door.LinearHead):
        """Reads the stream after the first layer."""

        taps = (1,)

    class Beyond(door.LinearHead):
        """Reads a stream that there is not."""

        taps = (3,)

    head = door.linear_head(target)
    with pytest.raises(ModelError, match="taps boundary 1 of toy0, which has no num_layers"):
        Engine(door.Untapped(target), Inner(head.config, head.params), **SMALL)
    with pytest.raises(ModelError, match=r"taps boundary 3 of toy0, which has boundaries 0"):
        Engine(target, Beyond(head.config, head.params), **SMALL)


@dataclasses.dataclass(frozen=True)
class Watching(Drafter):
    """Drafts nothing; counts the tokens whose features it has been shown."""

    name: str = "watching"
    taps = (LAST,)

    def init(self, shape):
        return {"num_seen": jnp.zeros((shape.batch_size,), jnp.int32)}

    def admit(self, shape, params, state, rows, row):
        return {"num_seen": state["num_seen"].at[row].set(0)}

    def observe(self, shape, params, state, rows, row, start, stop, features):
        new = jnp.maximum(stop - start, 0)
        return {"num_seen": state["num_seen"].at[row].add(new)}

    def propose(self, shape, params, state, rows):
        draft = Draft(
            tokens=jnp.zeros((shape.batch_size, shape.num_nodes), jnp.int32),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.zeros((shape.batch_size,), jnp.int32),
        )
        return draft, state

    def commit(self, shape, params, state, rows, info):
        assert info.features.shape[1:3] == (info.tokens.shape[1], 1)
        return {"num_seen": state["num_seen"] + info.emission.num_emitted}


@pytest.mark.as_shipped
@pytest.mark.slow
def test_a_resting_drafter_with_taps_never_lags_over_hundreds_of_plain_steps():
    target = toy.model(num_layers=1)
    engine = Engine(
        target,
        Watching(),
        exactness="ties",
        verify_length=4,
        draft_length=3,
        batch_size=2,
        max_length=768,
    )
    prompts = toy.prompts((40, 1))
    for row, prompt in enumerate(prompts):
        request = Request(
            request_id=str(row),
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=700, ignore_eos=True),
        )
        engine.executor.admit_and_prefill(row, request, draft_length=3)
    for draft_length in (0, 3, 0):
        engine.executor.run(200, draft_length=draft_length)
        state = engine.executor.state
        # Everything but the newest token, whose features the next round has.
        np.testing.assert_array_equal(state.drafter["num_seen"][:2], state.num_committed[:2] - 1)
    assert int(state.num_committed[0]) == 40 + 600


@pytest.mark.slow
def test_the_targets_weights_are_counted_once_and_updated(target):
    alone, riding = Engine(target, **SMALL), Engine(target, door.Riding(target), **SMALL)
    assert riding.memory.weights_bytes == alone.memory.weights_bytes
    other = toy.model(seed=5)
    riding.update_params(target=other.params)
    alone.update_params(target=other.params)
    found, expected = riding.generate(PROMPTS, PARAMS), alone.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert sum(c.acceptance.num_draft_tokens for c in found) > 0
    fresh = Engine(other, door.Riding(other), **SMALL).generate(PROMPTS, PARAMS)
    counts = [c.acceptance.num_accepted_tokens for c in found]
    assert counts == [c.acceptance.num_accepted_tokens for c in fresh]  # it drafts with them too


@pytest.mark.parametrize("name", ["head", "riding"])
def test_in_a_serving_engine(target, plain, name):
    engine = ServingEngine(target, drafter(name, target), **SMALL)
    state = engine.init_decode_state()
    state = engine.insert(engine.prefill(PROMPTS[2], PARAMS[2]), state, 1)
    tokens, done = [], False
    while not done:
        state, result = engine.generate(state)
        tokens += [int(t) for t in result.tokens[1] if t >= 0]
        done = bool(result.done[1])
    assert tuple(tokens) == tuple(plain[2])


@pytest.mark.slow
def test_trees_are_counted_by_depth_and_by_node(target):
    params = [SamplingParams(max_tokens=24)] * 2
    truth = Engine(target, **SMALL).generate(PROMPTS[2:4], params)
    tree = toy.TreeOracle(tuple(map(tuple, toy.sequences(truth))))
    engine = Engine(
        target, tree, draft_length=6, scheduler=jaxspec.Static(), trace="tokens", **SMALL
    )
    found = engine.generate(PROMPTS[2:4], params)
    assert [c.token_ids for c in found] == [c.token_ids for c in truth]
    counts = found[0].acceptance
    assert counts.num_rounds == 6  # four tokens each: the tree is as deep as three
    assert counts.per_position == (1.0, 1.0, 1.0)
    assert counts.depth == 3
    assert counts.num_accepted_tokens_per_node == (0, 6, 0, 6, 6, 0)
    assert counts.num_draft_tokens == 36


def test_a_chain_is_counted_alike_by_position_and_by_node(target):
    truth = Engine(target, **SMALL).generate(PROMPTS, PARAMS)
    oracle = jaxspec.Oracle(toy.sequences(truth), acceptance=0.7)
    for completion in Engine(target, oracle, **SMALL).generate(PROMPTS, PARAMS):
        counts = completion.acceptance
        assert counts.num_accepted_tokens_per_pos == counts.num_accepted_tokens_per_node


@pytest.mark.parametrize("name", ["head", "riding"])
def test_an_oracle_cannot_stand_in_for_a_drafter_that_reads_the_target(target, name):
    with pytest.raises(SettingError, match=rf"cost_of={drafter(name, target).name}, which reads"):
        jaxspec.Oracle([[1, 2, 3]], cost_of=drafter(name, target))


@dataclasses.dataclass(frozen=True)
class Greedy(toy.WrongDrafter):
    """Proposes more nodes than rows want."""

    def propose(self, shape, params, state, rows):
        draft, state = super().propose(shape, params, state, rows)
        return draft.replace(num_valid=jnp.full_like(draft.num_valid, 99)), state


def test_the_round_takes_no_more_nodes_than_a_row_wants(target, plain):
    found = Engine(target, Greedy(), draft_length=2, verify_length=5, **SMALL).generate(
        PROMPTS, PARAMS
    )
    assert [c.token_ids for c in found] == plain
    for completion in found:
        assert completion.acceptance.depth <= 2


def test_what_is_no_drafter_is_refused(target):
    class Bare:
        name, params, propose = "bare", (), None

    with pytest.raises(SettingError, match="it must be a drafter, what names one, or None"):
        Engine(target, Bare(), **SMALL)


class Wide(toy.WrongDrafter):
    """Keeps a table without a row axis and does not say so."""

    def init(self, shape):
        return jnp.zeros((7,), jnp.int32)


def test_a_state_without_rows_is_refused(target):
    with pytest.raises(ModelError, match=r"first axis of 7; put the rows first, or wrap"):
        Engine(target, Wide(), **SMALL)


@pytest.mark.slow
def test_a_program_without_taps_is_that_of_forward_alone(target, monkeypatch):
    class Tapping(toy.WrongDrafter):
        """Has taps, and no use for them."""

        taps = (LAST, 1)

    def text(drafter):
        return Engine(target, drafter, **SMALL).executor.lower_run().as_text()

    def forward_alone(model, params, tokens, window, cache, taps):
        hidden, cache = model.forward(params, tokens, window, cache)
        return hidden, None, cache

    without = text(toy.WrongDrafter())
    assert len(text(Tapping())) > 0
    monkeypatch.setattr(decode_round, "forward_features", forward_alone)
    assert text(toy.WrongDrafter()) == without
