"""The round at its edges: stop tokens anywhere, limits, max_length, NaN, seat reuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec import sampling
from jaxspec.decode import loop
from jaxspec.decode import round as decoding
from jaxspec.engine.engine import Engine
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.types import Finish, Origin

WINDOW = 5


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


@pytest.fixture(scope="module")
def engines(target):
    """A plain engine, and one whose oracle knows every continuation."""
    prompts = toy.prompts((1, 3, 20, 40))
    plain = Engine(target, batch_size=2, max_length=256)
    truth = plain.generate(prompts, SamplingParams(max_tokens=60))
    oracle = Engine(
        target,
        jaxspec.Oracle(toy.sequences(truth), acceptance=1.0),
        draft_length=WINDOW - 1,
        batch_size=2,
        max_length=256,
    )
    return prompts, truth, plain, oracle


def test_full_acceptance_emits_draft_length_plus_one(engines):
    prompts, truth, _, oracle = engines
    for completion, true in zip(
        oracle.generate(prompts, SamplingParams(max_tokens=60)), truth, strict=True
    ):
        assert completion.token_ids == true.token_ids
        counts = completion.acceptance
        assert counts.num_rounds == 60 / WINDOW
        assert counts.per_position == (1.0,) * (WINDOW - 1)
        assert counts.emitted_per_round == WINDOW
        assert completion.origins == ((Origin.ACCEPTED,) * (WINDOW - 1) + (Origin.BONUS,)) * 12


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_the_limit_cuts_anywhere_in_an_accepted_run(engines, max_tokens):
    prompts, truth, _, oracle = engines
    for completion, true in zip(
        oracle.generate(prompts, SamplingParams(max_tokens=max_tokens)), truth, strict=True
    ):
        assert completion.token_ids == true.token_ids[:max_tokens]
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.acceptance.num_rounds == -(-max_tokens // WINDOW)
        assert len(completion.origins) == max_tokens


@pytest.mark.parametrize("at", range(1, 12))
def test_a_stop_token_ends_the_output_anywhere_in_an_accepted_run(engines, at):
    prompts, truth, plain, oracle = engines
    stop = truth[2].token_ids[at]
    params = SamplingParams(max_tokens=60, stop_token_ids=(stop,))
    expected = truth[2].token_ids[: truth[2].token_ids.index(stop) + 1]
    for engine, speculate in ((plain, True), (oracle, True), (oracle, False)):
        completion = engine.generate(prompts, params, speculate=speculate)[2]
        assert completion.token_ids == expected
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_several_eos_tokens_of_the_model_and_ignore_eos(engines):
    prompts, truth, _, _ = engines
    line = truth[3].token_ids
    eos = (line[9], line[4])
    target = toy.model(num_layers=1, eos_token_ids=eos)
    engine = Engine(
        target,
        jaxspec.Oracle(toy.sequences(truth)),
        draft_length=4,
        batch_size=2,
        max_length=256,
    )
    first = min(line.index(token) for token in eos)
    [stopped] = engine.generate([prompts[3]], SamplingParams(max_tokens=60))
    assert stopped.token_ids == line[: first + 1]
    assert stopped.stop_reason == line[first]
    [ignoring] = engine.generate([prompts[3]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert ignoring.token_ids == line


def test_a_stop_token_in_the_prompt_does_not_stop(engines):
    prompts, truth, _, oracle = engines
    absent = next(token for token in prompts[3] if token not in truth[3].token_ids)
    params = SamplingParams(max_tokens=60, stop_token_ids=(absent,))
    assert oracle.generate([prompts[3]], params)[0].token_ids == truth[3].token_ids


def test_no_acceptance_emits_one_token_per_round(engines, target):
    prompts, truth, _, _ = engines
    oracle = jaxspec.Oracle(toy.sequences(truth), acceptance=0.0)
    engine = Engine(target, oracle, draft_length=4, batch_size=2, max_length=256)
    for completion, true in zip(
        engine.generate(prompts, SamplingParams(max_tokens=20)), truth, strict=True
    ):
        assert completion.token_ids == true.token_ids[:20]
        assert completion.acceptance.num_rounds == 20
        assert completion.acceptance.num_accepted_tokens == 0
        assert set(completion.origins[:-1]) == {Origin.CORRECTED}
        assert completion.origins[-1] == Origin.PLAIN  # the last token is never drafted for


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_rounds_equal_what_the_oracles_coin_implies(engines, target, acceptance):
    prompts, truth, _, _ = engines
    oracle = jaxspec.Oracle(toy.sequences(truth), acceptance=acceptance, seed=5)
    engine = Engine(target, oracle, verify_length=WINDOW, batch_size=2, max_length=256)
    for draft_length in (1, 2, 4):
        completions = engine.generate(
            prompts, SamplingParams(max_tokens=60), draft_length=draft_length
        )
        for index, completion in enumerate(completions):
            # The same coin, tossed by hand: right tokens until the first wrong one, plus one.
            length, end, rounds = len(prompts[index]), len(prompts[index]) + 60, 0
            while length < end:
                drafted = min(draft_length, end - length - 1)
                key = jax.random.fold_in(jax.random.key(5), index)
                right = [
                    float(jax.random.uniform(jax.random.fold_in(key, length + i))) < acceptance
                    for i in range(drafted)
                ]
                length += ([*right, False]).index(False) + 1
                rounds += 1
            assert completion.acceptance.num_rounds == rounds
            assert completion.token_ids == truth[index].token_ids


@pytest.mark.slow
def test_capacity_ends_a_row_at_the_same_token_with_and_without_drafts(target):
    [prompt] = toy.prompts((100,))
    params = SamplingParams(max_tokens=200)
    truth = Engine(target, batch_size=1, max_length=512).generate([prompt], params)
    for acceptance in (1.0, 0.6):
        oracle = jaxspec.Oracle(toy.sequences(truth), acceptance=acceptance)
        engine = Engine(target, oracle, draft_length=4, batch_size=1, max_length=128)
        for speculate in (True, False):
            [completion] = engine.generate([prompt], params, speculate=speculate)
            assert (completion.finish_reason, completion.stop_reason) == ("length", "max_length")
            assert completion.token_ids == truth[0].token_ids[: engine.longest_prompt + 1 - 100]


def test_a_seat_is_reused_after_a_longer_predecessor_whose_kv_was_nan(target, engines):
    prompts, truth, _, oracle = engines
    oracle.generate(toy.prompts((200, 190), seed=4), SamplingParams(max_tokens=20))
    state = oracle.executor.state
    poisoned = jax.tree.map(
        lambda leaf: (
            jnp.full(leaf.shape, jnp.nan, leaf.dtype) if leaf.dtype == jnp.float32 else leaf
        ),
        state.cache,
    )
    oracle.executor.state = state.replace(cache=poisoned)
    again = oracle.generate(prompts, SamplingParams(max_tokens=60))
    assert [c.token_ids for c in again] == [c.token_ids for c in truth]


@pytest.fixture(scope="module")
def broken():
    """A model that has no numbers for token 7, and a drafter that proposes it."""
    target = toy.model()
    embedding = target.params["embedding"].at[7].set(jnp.nan)
    model = dataclasses.replace(target, params={**target.params, "embedding": embedding})
    return Engine(model, toy.WrongDrafter(token=7), batch_size=2, max_length=128)


@pytest.mark.parametrize("speculate", [True, False])
def test_scores_that_are_no_numbers_abort_their_row_only(broken, speculate):
    settings = SamplingParams(max_tokens=4)
    good, bad = broken.generate([[1, 2, 3], [1, 2, 7]], settings, speculate=speculate)
    assert (bad.finish_reason, bad.stop_reason) == ("abort", "non-finite")
    assert bad.token_ids == ()
    assert good.finish_reason == "length"


def test_a_draft_whose_values_are_no_numbers_changes_nothing_before_it(broken):
    settings = SamplingParams(max_tokens=4)
    plain = broken.generate([[1, 2, 3], [4, 5]], settings, speculate=False)
    drafted = broken.generate([[1, 2, 3], [4, 5]], settings)
    assert all(completion.finish_reason == "length" for completion in plain)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


def test_rows_that_have_ended_do_not_keep_a_batch_from_being_greedy(engines):
    state = loop.empty(engines[2].executor.parts, engines[2].shape)
    s = state.sampling
    finish = jnp.array([Finish.STOP_TOKEN, Finish.RUNNING], jnp.int32)
    for name, value in (("temperature", 1.0), ("presence_penalty", 1.0), ("min_length", 9)):
        asks = s.replace(**{name: getattr(s, name).at[0].set(value)})
        running = state.replace(sampling=asks, finish=jnp.zeros_like(finish))
        assert not sampling.is_greedy(decoding.batch_view(running)), name
        assert sampling.is_greedy(decoding.batch_view(running.replace(finish=finish))), name


def test_scatter_rows_on_a_drawn_example():
    buffer = jnp.zeros((2, 8), jnp.int32)
    new = jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32)
    got = decoding.scatter_rows(
        buffer, jnp.asarray([2, 6], jnp.int32), new, jnp.asarray([3, 2], jnp.int32)
    )
    assert got.tolist() == [[0, 0, 1, 2, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0, 4, 5]]


def test_window_of_a_tree_on_a_drawn_example(target):
    engine = Engine(
        target,
        toy.WrongDrafter(),
        scheduler=jaxspec.Static(),
        draft_length=4,
        batch_size=2,
        max_length=128,
    )
    engine.generate([[1] * 10, [2] * 20], SamplingParams(max_tokens=1))
    state = engine.executor.state.replace(finish=jnp.asarray([0, 1], jnp.int32))
    # root -> 0, root -> 1, 1 -> 2, 2 -> 3 (invalid: hangs from the root)
    draft = decoding.Draft(
        tokens=jnp.zeros((2, 4), jnp.int32),
        parents=jnp.asarray([[-1, -1, 1, 99]] * 2, jnp.int32),
        num_valid=jnp.asarray([3, 3], jnp.int32),
    )
    window = decoding.make_window(state, draft, tree_depth=draft.depth)
    assert window.slots.tolist() == [[10, 11, 12, 13, 14], [-1] * 5]  # row 1 has ended
    assert (window.positions[0] - 10).tolist() == [0, 1, 1, 2, 1]
    assert np.asarray(window.paths[0])[3, :3].tolist() == [0, 2, 3]
