"""The engine: settings it refuses, order, progress, and no compilation after the first batch."""

from __future__ import annotations

import pytest
import tiny
import toy

from jaxspec import DraftModel, Engine, NGram, SamplingParams
from jaxspec.engine import MAX_STOP_TOKENS, Progress
from jaxspec.errors import ModelError, PromptError, SettingError

PROMPTS = toy.prompts((3, 9, 1, 40, 6))
PROGRAMS = ("_init", "_admit", "_prefill", "_run")


@pytest.fixture(scope="module")
def target():
    return tiny.model(eos_token_ids=())


@pytest.fixture(scope="module")
def engine(target):
    return Engine(
        target,
        NGram(1, 3),
        draft_length=2,
        window=4,
        seats=2,
        capacity=100,
        prefill_chunk=16,
        rounds_per_sync=3,
    )


@pytest.fixture(scope="module")
def outputs(engine):
    """Token ids of `PROMPTS`, 12 each."""
    return [c.token_ids for c in engine.generate(PROMPTS, SamplingParams(max_tokens=12))]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seats": 0}, "seats 0 was given"),
        ({"capacity": 0}, "capacity 0 was given"),
        ({"prefill_chunk": 0}, "prefill_chunk 0 was given"),
        ({"rounds_per_sync": 0}, "rounds_per_sync 0 was given"),
        ({"window": 2}, "without a drafter"),
        ({"drafter": NGram(), "draft_length": 0}, "A draft length of 0"),
        ({"drafter": NGram(), "draft_length": 4, "window": 4}, "for a window of 4"),
        ({"drafter": NGram(), "window": 129, "capacity": 128}, "does not fit a capacity of 128"),
    ],
)
def test_settings_out_of_range(target, settings, message):
    with pytest.raises(SettingError) as raised:
        Engine(target, **settings)
    assert message in str(raised.value)


def test_drafter_must_fit_the_target():
    mine, other = (tiny.model(text=tiny.tokenizer(is_reversed=r)) for r in (False, True))
    with pytest.raises(ModelError, match=r"different tokenizers \(256 ids differ"):
        Engine(mine, DraftModel(other))
    Engine(mine, DraftModel(tiny.model(seed=1, text=tiny.tokenizer())))


def test_describe(engine, target):
    found = engine.describe()
    assert found["target"] == target.name
    assert found["drafter"] == "ngram:1-3"
    assert found["exactness"] == "bitwise"
    shape = {name: found[name] for name in ("seats", "capacity", "window", "draft_length")}
    assert shape == {"seats": 2, "capacity": 128, "window": 4, "draft_length": 2}


def test_outputs_are_in_the_order_of_the_prompts(engine, outputs):
    assert [len(output) for output in outputs] == [12] * 5
    backwards = engine.generate(PROMPTS[::-1], SamplingParams(max_tokens=12))
    assert [completion.token_ids for completion in backwards] == outputs[::-1]
    assert [completion.request_id for completion in backwards] == list("01234")
    assert [list(c.prompt_token_ids) for c in backwards] == PROMPTS[::-1]


def test_plain_decoding_in_the_same_program(engine, outputs):
    plain = engine.generate(PROMPTS, SamplingParams(max_tokens=12), speculate=False)
    assert [completion.token_ids for completion in plain] == outputs
    assert all(completion.acceptance.num_draft_tokens == 0 for completion in plain)
    longer = engine.generate(PROMPTS, SamplingParams(max_tokens=12), draft_length=3)
    assert [completion.token_ids for completion in longer] == outputs
    for draft_length in (0, 4):
        with pytest.raises(SettingError, match=f"draft length of {draft_length}"):
            engine.generate(PROMPTS, draft_length=draft_length)


def test_nothing_is_compiled_after_the_first_batch(engine, outputs):
    engine.generate(PROMPTS, SamplingParams(max_tokens=3))
    assert {name: getattr(engine, name)._cache_size() for name in PROGRAMS} == dict.fromkeys(
        PROGRAMS, 1
    )


def test_nothing_is_compiled_after_the_first_batch_with_placed_params(models_on_disk):
    """Parameters read from a checkpoint are committed to their device, unlike fresh ones."""
    engine = Engine(models_on_disk, seats=1, capacity=50, prefill_chunk=16)
    for prompt in PROMPTS[:3]:
        engine.generate([prompt], SamplingParams(max_tokens=3))
    assert {name: getattr(engine, name)._cache_size() for name in PROGRAMS} == dict.fromkeys(
        PROGRAMS, 1
    )


@pytest.fixture
def models_on_disk(tmp_path):
    from jaxspec import load_model

    return load_model(tiny.save(tmp_path, "model"))


def test_progress(engine, outputs):
    seen: list[Progress] = []
    params = SamplingParams(max_tokens=12)
    found = engine.generate(PROMPTS, params, on_progress=seen.append)
    assert {progress.num_requests for progress in seen} == {5}
    for name in ("num_finished", "num_emitted_tokens", "num_rounds"):
        values = [getattr(progress, name) for progress in seen]
        assert values == sorted(values), name
    last = seen[-1]
    assert last.num_finished == 5
    assert last.num_emitted_tokens == sum(len(c.token_ids) for c in found) == 60
    rounds = [completion.acceptance.num_rounds for completion in found]
    assert last.num_rounds == max(rounds[0:2]) + max(rounds[2:4]) + rounds[4]
    # A look every three rounds: more than one a batch.
    assert len(seen) > 3


def test_params_of_each_request(engine, outputs):
    stop = outputs[2][4]
    params = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=12, stop_token_ids=(stop,)),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1000),
    ]
    found = engine.generate(PROMPTS, params)
    first_stop = outputs[2].index(stop)
    assert [c.token_ids for c in found[:4]] == [
        outputs[0],
        outputs[1][:5],
        outputs[2][: first_stop + 1],
        outputs[3][:1],
    ]
    assert (found[2].finish_reason, found[2].stop_reason) == ("stop", stop)
    assert (found[4].finish_reason, found[4].stop_reason) == ("length", "capacity")
    assert found[4].token_ids[:12] == outputs[4]


def test_longest_prompt(engine):
    assert engine.longest_prompt == 125
    params = SamplingParams(max_tokens=20)
    [found] = engine.generate([[5] * 125], params)
    assert len(found.token_ids) == 1
    assert found.stop_reason == "capacity"
    with pytest.raises(PromptError, match="Prompt 1 has 126 tokens"):
        engine.generate([[5], [5] * 126], params)


def test_too_many_stop_tokens(engine):
    params = SamplingParams(stop_token_ids=tuple(range(2, 3 + MAX_STOP_TOKENS)))
    with pytest.raises(SettingError, match=f"there is room for {MAX_STOP_TOKENS}"):
        engine.generate([[5]], params)
    assert engine.generate([[5]])[0].token_ids  # still of use


def test_no_prompts(engine):
    assert engine.generate([]) == []
