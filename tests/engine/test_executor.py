"""The executor by itself: rows, rounds, checks and KV without an engine's queue."""

from __future__ import annotations

import engines
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec import DraftModel, SamplingParams
from jaxspec.decode import settings
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.engine.executor import Executor, make_executor
from jaxspec.errors import SettingError
from jaxspec.models.config import RopeConfig
from jaxspec.requests.requests import make_requests
from jaxspec.serving.engine import ServingEngine
from jaxspec.types import Finish

PROMPTS = toy.prompts((3, 20))
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


@pytest.fixture(scope="module")
def executor(target):
    parts = make_parts(
        target,
        jaxspec.NGram(),
        EngineConfig(scheduler="static", draft_length=3, batch_size=2, max_length=128),
    )
    return Executor(parts)


def fill(executor):
    """Empties the executor and reads both prompts."""
    executor.reset()
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    target = executor.parts.target
    requests = make_requests(PROMPTS, params, target, longest=executor.longest_prompt)
    for row, request in enumerate(requests):
        executor.admit_and_prefill(row, request, draft_length=3, arrival=row)
    return executor


@pytest.fixture
def filled(executor):
    """The executor after both prompts were read."""
    return fill(executor)


def outputs(executor):
    state = executor.fetch("tokens", "num_committed")
    return [
        state.tokens[row, len(prompt) : state.num_committed[row]].tolist()
        for row, prompt in enumerate(PROMPTS)
    ]


def test_it_decodes_as_an_engine_does(filled):
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = engines.engine("toy", "ngram").generate(PROMPTS, params)
    filled.run(NUM_TOKENS)
    assert outputs(filled) == [list(completion.token_ids) for completion in expected]
    assert filled.fetch("finish").finish.tolist() == [Finish.MAX_TOKENS] * 2


def test_draft_limits_of_zero_draft_nothing_and_change_no_output(filled):
    filled.run(NUM_TOKENS)
    drafted = outputs(filled)
    assert filled.fetch("counts").counts.num_draft_tokens.sum() > 0
    fill(filled).set_draft_limits([0, 0])
    filled.run(NUM_TOKENS)
    assert filled.fetch("counts").counts.num_draft_tokens.tolist() == [0, 0]
    assert outputs(filled) == drafted


def test_committed_kv_is_that_of_all_tokens_but_the_newest(filled):
    filled.run(3)
    lengths = filled.fetch("num_committed").num_committed
    for row, length in enumerate(lengths):
        kv = filled.committed_kv(row)
        assert {len(each) for each in kv} == {length - 1}
        assert all(each.dtype == np.uint32 for each in kv)
    before = [filled.committed_kv(row) for row in range(2)]
    filled.poison()
    after = [filled.committed_kv(row) for row in range(2)]
    for kept, found in zip(before, after, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(kept, found, strict=True))


def test_poison_turns_what_reads_uncommitted_slots_to_nan(filled):
    filled.poison()
    filled.run(1)
    assert Finish.NON_FINITE not in filled.fetch("finish").finish  # the round reads none
    # One more token than was committed: its slot was never written.
    state = filled.state
    filled.state = state.replace(num_committed=state.num_committed + 2)
    filled.poison()
    stale = filled.state
    filled.state = stale.replace(num_committed=stale.num_committed + 4)
    filled.run(1)
    assert Finish.NON_FINITE in filled.fetch("finish").finish


def test_rows_that_are_ended_stay_as_they_ended(filled):
    filled.end_rows([0], Finish.CANCELLED)
    filled.run(NUM_TOKENS)
    assert filled.fetch("finish").finish.tolist() == [Finish.CANCELLED, Finish.MAX_TOKENS]
    filled.end_rows([0, 1], Finish.STOP_STRING)
    assert filled.fetch("finish").finish.tolist() == [Finish.CANCELLED, Finish.MAX_TOKENS]
    counts = filled.compile_counts()  # after whatever the tests above did to the state
    assert [counts[name] for name in ("init", "admit", "prefill", "run")] == [1] * 4


def test_weights_of_another_shape_are_refused(executor):
    other = toy.model(num_layers=1, width=24)
    with pytest.raises(SettingError, match="The new weights of the target"):
        executor.update_params(target=other.params)


def test_rows_longer_than_a_model_was_trained_for_are_said_once(caplog):
    settings._say_too_long.cache_clear()
    target = toy.model(num_layers=1)  # 512 tokens
    draft = toy.model(seed=1, num_layers=1, max_length=256)
    extended = toy.model(
        seed=2,
        num_layers=1,
        max_length=100,
        rope=RopeConfig(
            theta=1e4, rotary_size=8, scaling="yarn", factor=4.0, original_max_length=128
        ),
    )

    def said(target, drafter, max_length):
        caplog.clear()
        make_executor(target, drafter, batch_size=1, max_length=max_length)
        return caplog.messages

    assert said(target, DraftModel(draft), 256) == []
    [of_draft] = said(target, DraftModel(draft), 512)
    assert of_draft.startswith("max_length 512 was given, and the draft model toy1 was trained")
    assert "for 256 tokens" in of_draft
    [of_target] = said(target, DraftModel(draft, kv_window=128), 513)[:1]
    assert of_target.startswith("max_length 513 was given, and the target toy0 was trained for 512")
    assert said(target, DraftModel(draft), 513) == []  # both were said
    assert said(extended, None, 512) == []
    assert "the target toy2 was trained for 512 tokens" in said(extended, None, 640)[0]
    settings._say_too_long.cache_clear()
    caplog.clear()
    ServingEngine(target, None, batch_size=1, max_length=1024)
    assert len(caplog.messages) == 1
