"""Log-probabilities of prompts: the values that generating the same tokens reports."""

from __future__ import annotations

import dataclasses

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.engine import core
from jaxspec.errors import SettingError
from jaxspec.kernels import cpu
from jaxspec.models.prefill import chain_window
from jaxspec.serving import ServingEngine

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=2)
PROMPTS = toy.prompts((1, 7, 40, 129, 30))


@pytest.fixture
def engine():
    return engines.engine("toy", "draft model", max_logprobs=2)


def prompt_logprobs(completions):
    return [one.prompt_logprobs for one in completions]


@pytest.mark.as_shipped
@pytest.mark.skipif(cpu.problem() is not None, reason=f"{cpu.problem()}")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_they_have_the_bits_that_generating_the_tokens_reports(dtype):
    names = ("demo-target", "demo-draft")
    target, draft = (jaxspec.load_model(name, dtype=dtype) for name in names)
    engine = Engine(
        target, DraftModel(draft), draft_length=3, batch_size=3, max_length=512, max_logprobs=2
    )
    prompts = [list(range(5, 5 + length)) for length in (1, 7, 300, 129, 40, 60, 121)]
    made = engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2))
    whole = [[*one.prompt_token_ids, *one.token_ids] for one in made]
    engine.reset()  # the rows still have the values of these tokens
    for prompt, one, scored in zip(prompts, made, engine.generate(whole, SCORE), strict=True):
        assert (scored.token_ids, scored.finish_reason) == ((), "length")
        assert scored.prompt_logprobs[0] is None
        assert scored.prompt_logprobs[len(prompt) :] == one.logprobs
    # Tokens after a scored prompt are those after one that is not, and drafted.
    params = SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=2)
    plain = engine.generate(whole, dataclasses.replace(params, prompt_logprobs=None))
    both = engine.generate(whole, params)
    assert [one.token_ids for one in both] == [one.token_ids for one in plain]
    assert prompt_logprobs(both) == prompt_logprobs(engine.generate(whole, SCORE))
    assert sum(one.acceptance.num_accepted_tokens for one in both) > 0


def check_values(target, completions):
    """Compares with the log-probabilities of one pass of the model over all prompts."""
    prompts = [one.prompt_token_ids for one in completions]
    longest = max(map(len, prompts))
    tokens = jnp.asarray([[*one, *[0] * (longest - len(one))] for one in prompts], jnp.int32)
    window = chain_window(jnp.zeros((len(prompts),), jnp.int32), longest)
    cache = target.init_cache(len(prompts), 256)
    hidden, _ = target.forward(target.params, tokens, window, cache)
    expected = np.asarray(jax.nn.log_softmax(target.logits(target.params, hidden)))
    for prompt, found, rows in zip(prompts, prompt_logprobs(completions), expected, strict=True):
        assert len(found) == len(prompt)
        assert found[0] is None
        for token, of_token, row in zip(prompt[1:], found[1:], rows, strict=False):
            assert token in of_token
            assert len(of_token) in (2, 3)
            for other, value in of_token.items():
                np.testing.assert_allclose(value, row[other], atol=1e-4)
            likeliest = sorted(of_token.values())[-2:]
            np.testing.assert_allclose(likeliest, np.sort(row)[-2:], atol=1e-4)


def test_they_are_those_of_a_full_pass_and_a_shift_is_seen(engine):
    scored = engine.generate(PROMPTS, SCORE)
    check_values(engine.target, scored)
    assert prompt_logprobs(engine.generate(PROMPTS[:1], SCORE)) == [(None,)]  # nothing to prefill
    assert all(
        (one.token_ids, one.text, one.finish_reason) == ((), None, "length") for one in scored
    )
    found = scored[2].prompt_logprobs
    for shifted in ((None, *found[2:], found[1]), (None, *found[-1:], *found[1:-1])):
        with pytest.raises(AssertionError):
            check_values(engine.target, [dataclasses.replace(scored[2], prompt_logprobs=shifted)])


@pytest.mark.slow
def test_a_session_and_a_prefix_change_no_value(engine):
    prompt, greedy = PROMPTS[3], SamplingParams(max_tokens=12, ignore_eos=True)
    expected = prompt_logprobs(engine.generate([prompt], SCORE))
    [after] = engine.generate([prompt], greedy)
    assert engine.cache_prefix(prompt[:64]) == 64
    session = engine.session()
    session.generate(prompt[:50], greedy)
    scored = [*engine.generate([prompt], SCORE), session.generate(prompt, SCORE)]
    assert prompt_logprobs(scored) == expected * 2
    assert not any(one.num_reused_tokens for one in scored)
    following = session.generate(prompt, greedy)  # on the KV of the scored turn
    assert following.token_ids == after.token_ids
    assert following.num_reused_tokens > 64
    session.close()
    engine.forget_prefixes()


@pytest.mark.parametrize(("max_tokens", "scored_first"), [(6, False), (200, True)])
def test_neither_a_scored_row_nor_one_that_decodes_waits_for_the_other(
    engine, max_tokens, scored_first, monkeypatch
):
    monkeypatch.setattr(core, "CHUNKS_OF_A_BURST", 0)  # otherwise both would begin together
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=3, ignore_eos=True)
    [alone] = engine.generate([PROMPTS[1]], params)
    [expected] = prompt_logprobs(engine.generate([PROMPTS[3]], SCORE))
    names = [engine.submit(PROMPTS[1], params), engine.submit(PROMPTS[3], SCORE)]
    done = []
    while engine.has_unfinished:
        done += engine.step()
    assert [one.request_id for one in done] == (names[::-1] if scored_first else names)
    found = {one.request_id: one for one in done}
    assert found[names[0]].token_ids == alone.token_ids
    assert found[names[1]].prompt_logprobs == expected


def test_what_is_refused(engine):
    serving = ServingEngine(engines.target(), **engines.SHAPE)
    for message, call in (
        (
            r"max_tokens 0 was given; it must be from 1 to 2\*\*30, or 0 with prompt_logprobs",
            lambda: SamplingParams(max_tokens=0),
        ),
        ("prompt_logprobs -1 was given", lambda: SamplingParams(prompt_logprobs=-1)),
        (
            "asks for 3 prompt_logprobs, and the engine keeps 2; make it with max_logprobs=3",
            lambda: engine.submit([5], SamplingParams(prompt_logprobs=3)),
        ),
        (
            "asks for 2 prompt_logprobs, and the engine keeps none; make it with max_logprobs=2",
            lambda: engines.engine("toy").generate([[5]], SCORE),
        ),
        ("2 prompt_logprobs were asked for", lambda: serving.prefill([5], SCORE)),
    ):
        with pytest.raises(SettingError, match=message):
            call()
