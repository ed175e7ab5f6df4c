"""Weights that were deleted, as a step of training that they are donated to does: requests are
refused or ended, nothing stays taken, and `update_params` repairs the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.errors import RequestError, SettingError

FEW = SamplingParams(max_tokens=6, ignore_eos=True)
[PROMPT, OTHER, THIRD] = toy.prompts((9, 12, 7))


def copy(params):
    return jax.tree.map(jnp.array, params)


def delete(params):
    for leaf in jax.tree.leaves(params):
        leaf.delete()


@pytest.fixture(scope="module")
def good():
    """The weights of target and draft model."""
    return toy.model(num_layers=1).params, toy.model(seed=1, num_layers=1).params


@pytest.fixture(scope="module")
def made(good):
    """An engine, and what it emits for the prompt."""
    target, draft = toy.model(num_layers=1), toy.model(seed=1, num_layers=1)
    engine = Engine(target, DraftModel(draft), batch_size=1, max_length=128)
    return engine, engine.generate([PROMPT], FEW)[0].token_ids


@pytest.fixture
def engine(made, good):
    """The engine with weights of its own, which a test may delete."""
    engine, _ = made
    engine.update_params(target=copy(good[0]), draft=copy(good[1]))
    return engine


def assert_repaired(engine, made, good):
    """New weights are accepted, no row is taken, and the output is the same as before."""
    engine.update_params(target=copy(good[0]), draft=copy(good[1]))
    assert not engine.queue.tickets_by_row
    assert engine.step() is not None
    engine.reset()
    assert engine.generate([PROMPT], FEW)[0].token_ids == made[1]
    with engine.session() as session:
        assert session.generate(PROMPT, FEW).token_ids == made[1]
        turn = session.generate([*PROMPT, *made[1], 5], FEW)
        assert turn.num_reused_tokens > 0
    assert not engine.has_unfinished


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_an_engine_whose_weights_were_deleted_says_so_and_is_repaired(engine, made, good, which):
    delete(engine.executor.params[which])
    for call in (
        lambda: engine.generate([PROMPT], FEW),
        lambda: engine.submit(PROMPT, FEW),
        lambda: engine.stream(PROMPT, FEW),
        lambda: engine.cache_prefix(PROMPT),
        lambda: engine.session(),
    ):
        with pytest.raises(RequestError, match=r"weights were deleted.*update_params"):
            call()
    assert not engine.has_unfinished
    assert engine.step() == []
    engine.reset()
    assert_repaired(engine, made, good)


@pytest.mark.parametrize("is_stepped", [True, False])
def test_requests_in_progress_end_and_waiting_ones_go_on(engine, made, good, is_stepped):
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    first = engine.submit(OTHER, long)
    engine.submit(OTHER, long)
    last = engine.submit(PROMPT, FEW)
    engine.step()
    begun = {ticket.request.request_id for ticket in engine.queue.tickets_by_row.values()}
    assert first in begun
    assert last not in begun
    delete(engine.executor.params["target"])
    if is_stepped:
        for _ in range(3):
            with pytest.raises(RequestError, match="weights were deleted"):
                engine.step()
        assert not engine.queue.tickets_by_row
    engine.update_params(target=copy(good[0]))
    ended = {}
    while engine.has_unfinished:
        ended |= {one.request_id: one for one in engine.step()}
    assert {ended[name].stop_reason for name in begun} == {"device failure"}
    assert ended[last].token_ids == made[1]
    assert_repaired(engine, made, good)


def test_a_stream_ends_when_weights_are_deleted(engine, made, good):
    stream = engine.stream(OTHER, SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    delete(engine.executor.params["target"])
    with pytest.raises(RequestError, match="weights were deleted"):
        list(stream)
    assert_repaired(engine, made, good)


def test_a_sessions_kv_is_not_continued_with_other_weights(engine, made, good):
    with engine.session() as session:
        session.generate(OTHER, FEW)
        delete(engine.executor.params["target"])
        with pytest.raises(RequestError, match="weights were deleted"):
            session.generate([*OTHER, 1, 2], FEW)
        engine.update_params(target=copy(good[0]))
        assert session.generate(PROMPT, FEW).token_ids == made[1]
    assert_repaired(engine, made, good)


def test_weights_that_are_deleted_already_are_refused(engine, made, good):
    for part in ("target", "draft"):
        gone = copy(good[part == "draft"])
        jax.tree.leaves(gone)[0].delete()
        with pytest.raises(SettingError, match="were deleted already"):
            engine.update_params(**{part: gone})
    assert engine.generate([PROMPT], FEW)[0].token_ids == made[1]


@pytest.mark.parametrize(
    "given",
    [
        5,
        "x",
        0.5,
        float("nan"),
        object(),
        {},
        {"embedding": "x"},
        {"embedding": np.array(["x"])},
        {"embedding": np.array([None])},
        {1: 0, "a": 1},
        [1, 2],
        10**400,
        jnp.zeros(2),
        lambda: 0,
    ],
    ids=lambda given: type(given).__name__,
)
def test_weights_that_are_no_pytree_like_the_engines_are_refused(engine, given):
    for part in ("target", "draft"):
        with pytest.raises(
            SettingError, match=f"new weights of the {'target' if part == 'target' else 'drafter'}"
        ):
            engine.update_params(**{part: given})


def test_weights_of_other_shapes_and_dtypes_are_refused_and_the_old_ones_stay(engine, made, good):
    target = good[0]
    wider = jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape, 2), leaf.dtype), target)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target)
    shapes = jax.eval_shape(lambda: target)
    for given, message in (
        (wider, "convert them"),
        (half, "convert them"),
        (shapes, "pytree of arrays"),
    ):
        with pytest.raises(SettingError, match=message):
            engine.update_params(target=given)
    assert engine.generate([PROMPT], FEW)[0].token_ids == made[1]
