"""The engine: settings it refuses, order, progress, and no compilation after the first batch."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toy

from jaxspec import (
    Block,
    DraftModel,
    Engine,
    NGram,
    Oracle,
    Rejection,
    SamplingParams,
    Typical,
    compare,
    errors,
    sampling,
)
from jaxspec.decode.settings import MAX_STOP_TOKENS
from jaxspec.engine.config import ServingSettings
from jaxspec.engine.progress import Progress
from jaxspec.errors import JaxspecWarning, ModelError, PromptError, SettingError
from jaxspec.models.prefill import chain_window
from jaxspec.serving import ServingEngine
from jaxspec.types import Origin


class Wide(toy.TreeOracle):
    """Drafts 200 nodes by default."""

    num_nodes = 200


PROMPTS = toy.prompts((3, 9, 1, 40, 6))
PROGRAMS = ("init", "admit", "prefill", "run")


# One of each kind, for `PROMPTS`.
MIXED = [
    SamplingParams(max_tokens=30, temperature=0.8, seed=2**40),
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=30, temperature=1.2, top_p=0.9, top_k=50, seed=7, logprobs=2),
    SamplingParams(
        max_tokens=30, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
    SamplingParams(
        max_tokens=30, temperature=0.7, min_p=0.02, frequency_penalty=0.4, seed=7, logprobs=0
    ),
]


@pytest.fixture(scope="module")
def target():
    return tiny.model(eos_token_ids=(), text=tiny.tokenizer())


@pytest.fixture(scope="module")
def engine(target):
    return Engine(
        target,
        NGram(1, 3),
        draft_length=2,
        verify_length=4,
        batch_size=2,
        max_length=100,
        rounds_per_sync=3,
        max_logprobs=3,
    )


class Pruned(toy.TreeOracle):
    """A tree of which the likeliest nodes are kept."""

    prunes_by_token = True


@pytest.fixture(scope="module")
def outputs(engine):
    """Token ids of `PROMPTS`, 12 each."""
    return [c.token_ids for c in engine.generate(PROMPTS, SamplingParams(max_tokens=12))]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size 0 was given"),
        ({"max_length": 0}, "max_length 0 was given"),
        ({"prefill_chunk": 64}, "prefill_chunk 64 was given, but it is no longer a setting"),
        ({"rounds_per_sync": 0}, "rounds_per_sync 0 was given"),
        ({"verify_length": 2}, "without a drafter"),
        ({"verifier": Rejection()}, "The verifier rejection was given without a drafter"),
        ({"drafter": toy.TreeOracle(()), "verifier": Block()}, "takes chains only"),
        (
            {"drafter": Pruned(()), "verifier": Rejection()},
            "leaves out nodes because of their own tokens",
        ),
        ({"max_logprobs": -1}, "max_logprobs -1 was given; it must be from 0 to 258"),
        ({"max_logprobs": 259}, "max_logprobs 259"),
        ({"drafter": NGram(), "draft_length": 4, "verify_length": 4}, "for a verify_length of 4"),
        (
            {"drafter": toy.TreeOracle(()), "draft_length": 6, "tree_depth": 2},
            "A tree_depth of 2 was given, and the drafts of tree-oracle are up to 3 deep; give at "
            "least that",
        ),
    ],
)
def test_settings_out_of_range(target, settings, message):
    serving = {"drafter", "draft_length"} | ServingSettings.__annotations__.keys()
    for make in (Engine, ServingEngine) if settings.keys() <= serving else (Engine,):
        with pytest.raises(SettingError) as raised:
            make(target, **settings)
        assert message in str(raised.value)


SHORT = {"max_length": 64}


@pytest.mark.parametrize("make", [Engine, ServingEngine])
@pytest.mark.parametrize(
    ("settings", "message", "others"),
    [
        (
            SHORT | {"draft_length": 1000},
            "A draft_length of 1000 does not fit a max_length of 64: a round scores 1001 tokens, "
            "and rows have 128 slots, so raise the max_length, or lower the draft_length.",
            "verify_length",
        ),
        (
            SHORT | {"verify_length": 200},
            "A verify_length of 200 does not fit a max_length of 64: a round scores 200 tokens, "
            "and rows have 128 slots, so raise the max_length, or lower the verify_length.",
            "draft_length",
        ),
        (
            SHORT | {"draft_length": 3, "verify_length": 200},
            "A verify_length of 200 does not fit a max_length of 64: ",
            "draft_length",
        ),
        (
            SHORT | {"drafter": Wide((), name="wide")},
            "The default draft_length of wide, 200, does not fit a max_length of 64: a round "
            "scores 201 tokens, and rows have 128 slots, so raise the max_length, or lower the "
            "draft_length.",
            "verify_length",
        ),
        (
            {"draft_length": 0},
            "A draft length of 0 was given; it must be at least 1, so raise it, or decode without "
            "a drafter.",
            "verify_length",
        ),
        (
            {"verify_length": 3},
            "A verify_length of 3 was given, and ngram:1-4 drafts 4 tokens per round by default; "
            "raise it to 5 or more, or give a draft_length below it.",
            "draft length of 4",
        ),
    ],
)
def test_errors_name_the_setting_that_was_given(target, make, settings, message, others):
    with pytest.raises(SettingError) as raised:
        make(target, **{"drafter": NGram()} | settings)
    assert str(raised.value).startswith(message)
    assert others not in str(raised.value)


@pytest.mark.slow
def test_errors_of_automatic_draft_lengths_name_the_setting_that_was_given(target):
    for settings, message in (
        ({"verify_length": 1}, "A verify_length of 1 was given with draft_length='auto'"),
        (
            {"drafter": Wide((), name="wide"), "max_length": 64},
            "The default draft_length of wide, 200, does",
        ),
        ({"verify_length": 200, "max_length": 64}, "A verify_length of 200 does not fit"),
    ):
        with pytest.raises(SettingError, match=message):
            Engine(target, **{"drafter": NGram(), "draft_length": "auto"} | settings)
    compared = compare(target, ["none", "ngram"], PROMPTS, draft_length=1000, max_length=64)
    assert "A draft_length of 1000 does not fit a max_length of 64" in compared.failed["ngram"]


def test_a_request_for_too_long_drafts_hears_of_the_engine(target):
    with pytest.raises(SettingError, match="or make the engine with a larger draft_length"):
        Engine(target, NGram(), max_length=128).submit(PROMPTS[0], draft_length=9)


@pytest.fixture
def said():
    """Calls a function twice; what it warned of."""

    def call(function, *arguments, **settings):
        errors.warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                function(*arguments, **settings)
        return [str(each.message) for each in caught if each.category is JaxspecWarning]

    yield call
    errors.warn_once.cache_clear()


def test_settings_without_effect_are_said_once(target, said):
    small = {"max_length": 128, "batch_size": 1}
    advice = "was given without a drafter, so it has no effect; leave it out, or give a drafter."
    for make in (Engine, ServingEngine):
        assert said(make, target, draft_length=4, **small) == [f"draft_length=4 {advice}"]
        assert said(make, target, **small) == []
        assert said(make, target, NGram(), draft_length=4, **small) == []
        assert said(make, target, NGram(), **small) == []
    assert said(Engine, target, draft_length="auto", **small) == [f"draft_length='auto' {advice}"]
    assert said(Engine, target, tree_depth=2, **small) == [f"tree_depth=2 {advice}"]
    assert said(Engine, target, exactness="ties", **small) == [f"exactness='ties' {advice}"]
    [logprobs] = said(Engine, target, logprobs_mode="processed_logprobs", **small)
    assert logprobs.startswith("logprobs_mode='processed_logprobs' was given without max_logprobs")


@pytest.mark.slow
def test_settings_of_requests_without_effect_are_said_once(target, engine, said):
    few = SamplingParams(max_tokens=1)
    plain = Engine(target, max_length=128, batch_size=1)
    assert said(plain.generate, PROMPTS[:1], few, draft_length=3) == [
        "draft_length=3 was given to an engine without a drafter, so it has no effect; leave it "
        "out."
    ]
    assert said(plain.generate, PROMPTS[:1], few) == []
    assert said(plain.generate, PROMPTS[:1], few, speculate=False) == []
    assert said(engine.generate, PROMPTS[:1], few, draft_length=3, speculate=False) == [
        "draft_length=3 was given with speculate=False, so it has no effect; leave it out."
    ]
    assert said(engine.generate, PROMPTS[:1], few, draft_length=3) == []
    for prompts in ("text", ["text", [1, 2]]):
        [kwargs] = said(engine.generate, prompts, few, chat_template_kwargs={"a": 1})
        assert kwargs.startswith("chat_template_kwargs was given, and no prompt is a chat, so it")
    [template] = said(engine.generate, ["text"], few, chat_template="{{ messages }}")
    assert template.startswith("chat_template was given, and no prompt is a chat")
    chat = [{"role": "user", "content": "a"}]
    template = "{{ messages[0]['content'] }}"
    assert said(engine.generate, ["text", chat], few, chat_template=template) == []
    assert said(engine.generate, [], few, chat_template=template) == []


def test_drafter_must_fit_the_target():
    mine, other = (tiny.model(text=tiny.tokenizer(is_reversed=r)) for r in (False, True))
    with pytest.raises(ModelError, match=r"different tokenizers \(256 of 258 ids differ"):
        Engine(mine, DraftModel(other))
    Engine(mine, DraftModel(tiny.model(seed=1, text=tiny.tokenizer())))


def test_describe(engine, target):
    found = engine.describe()
    assert found["target"] == target.name
    assert found["drafter"] == "ngram:1-3"
    assert found["exactness"] == "bitwise"
    assert found["verifier"] == "coupled"
    assert "bit for bit" in found["promise"]
    otherwise = dataclasses.replace(engine.shape, prefill_chunk=64, chunks_per_call=9)
    assert otherwise.decisive().items() <= found.items()  # packing decides nothing
    assert "prefill_chunk" not in found
    assert found["loops_run_on_host"] == (jax.default_backend() == "gpu")
    assert found["autotuned"] is None or found["loops_run_on_host"]
    for verifier, exactness in (
        (Rejection(), "distribution"),
        (Block(), "distribution"),
        (Typical(), "lossy"),
    ):
        assert Engine(target, NGram(), verifier=verifier).describe()["exactness"] == exactness
    shape = {
        name: found[name] for name in ("batch_size", "max_length", "verify_length", "draft_length")
    }
    assert shape == {"batch_size": 2, "max_length": 128, "verify_length": 4, "draft_length": 2}


def test_outputs_are_in_the_order_of_the_prompts(engine, outputs):
    assert [len(output) for output in outputs] == [12] * 5
    backwards = engine.generate(PROMPTS[::-1], SamplingParams(max_tokens=12))
    assert [completion.token_ids for completion in backwards] == outputs[::-1]
    assert [completion.request_id for completion in backwards] == list("01234")
    assert [list(c.prompt_token_ids) for c in backwards] == PROMPTS[::-1]
    assert engine.generate([]) == []


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
    engine.generate(PROMPTS, MIXED)
    engine.generate(PROMPTS, SamplingParams(temperature=1.5, min_p=0.1, n=2, max_tokens=3))
    counts = engine.executor.compile_counts()
    assert {name: counts[name] for name in PROGRAMS} == dict.fromkeys(PROGRAMS, 1)


def test_nothing_is_compiled_after_the_first_batch_with_placed_params(models_on_disk):
    """Parameters read from a checkpoint are committed to their device, unlike fresh ones."""
    engine = Engine(models_on_disk, batch_size=1, max_length=50)
    for prompt in PROMPTS[:3]:
        engine.generate([prompt], SamplingParams(max_tokens=3))
    counts = engine.executor.compile_counts()
    assert {name: counts[name] for name in PROGRAMS} == dict.fromkeys(PROGRAMS, 1)


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
    assert sum(rounds) / 2 <= last.num_rounds < max(rounds[0:2]) + max(rounds[2:4]) + rounds[4]
    assert (last.num_draft_tokens, last.num_accepted_tokens) == tuple(
        sum(getattr(c.acceptance, name) for c in found)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert last.time_left_s == 0
    assert last.tokens_per_s == pytest.approx(60 / last.elapsed_s)
    assert 0 < last.acceptance < 1
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
    assert (found[4].finish_reason, found[4].stop_reason) == ("length", "max_length")
    assert found[4].token_ids[:12] == outputs[4]


def test_longest_prompt(engine):
    assert engine.longest_prompt == 125
    params = SamplingParams(max_tokens=20)
    [found] = engine.generate([[5] * 125], params)
    assert len(found.token_ids) == 1
    assert found.stop_reason == "max_length"
    with pytest.raises(PromptError, match="Prompt 1 has 126 tokens"):
        engine.generate([[5], [5] * 126], params)


def test_too_many_stop_tokens(engine):
    params = SamplingParams(stop_token_ids=tuple(range(2, 3 + MAX_STOP_TOKENS)))
    with pytest.raises(SettingError, match=f"there is room for {MAX_STOP_TOKENS}"):
        engine.generate([[5]], params)
    assert engine.generate([[5]])[0].token_ids  # still of use


@pytest.fixture(scope="module")
def mixed(engine):
    """Completions of `PROMPTS` under `MIXED`."""
    return engine.generate(PROMPTS, MIXED)


@pytest.fixture(scope="module")
def oracle(target, mixed):
    """Another engine of the same shape: it knows the sampled continuations and looks after every
    round."""
    return Engine(
        target,
        Oracle(toy.sequences(mixed), acceptance=0.9),
        draft_length=3,
        batch_size=2,
        max_length=100,
        rounds_per_sync=1,
        max_logprobs=4,
        logprobs_mode="processed_logprobs",
    )


def token_ids(completions):
    return [completion.token_ids for completion in completions]


def test_parameters_of_all_kinds_mix_in_a_batch(engine, oracle, outputs, mixed):
    expected = token_ids(mixed)
    assert expected[1][:12] == outputs[1]
    assert len({tokens[:12] for tokens in expected} | set(outputs)) == 9  # only row 1 is the same
    assert token_ids(engine.generate(PROMPTS, MIXED, speculate=False)) == expected
    assert token_ids(engine.generate(PROMPTS, MIXED, draft_length=1)) == expected
    assert token_ids(engine.generate(PROMPTS[::-1], MIXED[::-1])) == expected[::-1]
    alone = [engine.generate([p], m)[0].token_ids for p, m in zip(PROMPTS, MIXED, strict=True)]
    assert alone == expected
    drafted = oracle.generate(PROMPTS, MIXED)
    assert token_ids(drafted) == expected
    for completion in drafted:
        assert completion.acceptance.num_accepted_tokens > 10


def test_penalties_and_seeds_matter(engine, mixed):
    for index, off in (
        (0, {"seed": 2**40 + 1}),
        (0, {"seed": 0}),  # differs from 2**40 in the upper half only
        (2, {"top_p": 1.0, "top_k": 0, "temperature": 2.0}),
        (3, {"presence_penalty": 0.0, "frequency_penalty": 0.0}),
        (3, {"repetition_penalty": 1.0}),
    ):
        changed = dataclasses.replace(MIXED[index], **off)
        [found] = engine.generate([PROMPTS[index]], changed)
        assert found.token_ids != mixed[index].token_ids, (index, off)


def test_a_drawn_seed_reproduces_its_output(engine):
    params = SamplingParams(max_tokens=20, temperature=1.0)
    first, second = engine.generate([PROMPTS[0]] * 2, params)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    for completion in (first, second):
        again = dataclasses.replace(params, seed=completion.seed)
        assert engine.generate([PROMPTS[0]], again)[0].token_ids == completion.token_ids
    assert engine.generate([PROMPTS[0]])[0].seed is None


def test_several_completions_of_a_prompt(engine):
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=11, n=3)
    found = engine.generate(PROMPTS[:2], params)
    assert [c.request_id for c in found] == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert [(c.index, c.seed) for c in found] == [(0, 11), (1, 12), (2, 13)] * 2
    assert len({c.token_ids for c in found}) == 6
    one = dataclasses.replace(params, n=1, seed=13)
    assert engine.generate([PROMPTS[1]], one)[0].token_ids == found[5].token_ids


def test_min_tokens_holds_stop_tokens_back(engine, oracle, outputs):
    stops = tuple(dict.fromkeys(outputs[0][:5]))
    for min_tokens in (0, 3, 12):
        params = SamplingParams(max_tokens=12, stop_token_ids=stops, min_tokens=min_tokens)
        [found] = engine.generate([PROMPTS[0]], params)
        assert len(found.token_ids) >= max(min_tokens, 1)
        assert not set(found.token_ids[:min_tokens]) & set(stops)
        if len(found.token_ids) < 12:
            assert found.token_ids[-1] in stops
        assert token_ids(oracle.generate([PROMPTS[0]], params)) == [found.token_ids]
    [early] = engine.generate([PROMPTS[0]], SamplingParams(stop_token_ids=stops))
    assert early.token_ids == outputs[0][:1]


def ascii_runs(completion, size):
    """(number of tokens that complete it, text) of the plain runs of `size` bytes in an output."""
    tokens, text = completion.token_ids, tiny.tokenizer()
    for end in range(size + 2, len(tokens)):
        run = text.decode(tokens[end - size : end])
        if run.isascii() and run.isprintable() and "\ufffd" not in run and len(run) == size:
            yield end, run


def test_stop_strings_end_the_output_where_plain_decoding_would(engine, oracle, mixed):
    num_inside = 0
    for index, completion in enumerate(mixed):
        prompt, params = PROMPTS[index], dataclasses.replace(MIXED[index], logprobs=None)
        for size in (1, 2):
            for _, stop in list(ascii_runs(completion, size))[:3]:
                with_stop = dataclasses.replace(params, stop=(stop, "never \u2603 this"))
                found = engine.generate([prompt], with_stop)[0]
                whole = completion.text
                assert found.text == whole[: whole.index(stop)]
                assert (found.finish_reason, found.stop_reason) == ("stop", stop)
                assert found.token_ids == completion.token_ids[: len(found.token_ids)]
                # The last token completes the string, and the one before it does not.
                decode = tiny.tokenizer().decode
                assert decode(found.token_ids) == found.text + stop
                assert stop not in decode(found.token_ids[:-1])
                assert len(found.origins) == len(found.token_ids) == len(found.pieces)
                for other in (
                    engine.generate([prompt], with_stop, speculate=False)[0],
                    oracle.generate([prompt], with_stop, draft_length=1)[0],
                    oracle.generate([prompt], with_stop)[0],
                ):
                    assert other.token_ids == found.token_ids
                    assert (other.text, other.stop_reason) == (found.text, found.stop_reason)
                num_inside += other.origins[-1] == Origin.ACCEPTED
                later = dataclasses.replace(with_stop, min_tokens=len(found.token_ids))
                [longer] = engine.generate([prompt], later)
                assert len(longer.token_ids) > len(found.token_ids)
    assert num_inside > 3  # strings that were complete inside an accepted run


def test_a_stop_string_at_the_limit_and_rows_beside_it(engine, mixed):
    index = 0
    end, stop = next(ascii_runs(mixed[index], 2))
    at_limit = dataclasses.replace(MIXED[index], max_tokens=end, stop=(stop,))
    found = engine.generate(PROMPTS, [at_limit, *MIXED[1:]])
    assert (found[0].finish_reason, found[0].stop_reason) == ("stop", stop)
    assert token_ids(found)[1:] == token_ids(mixed)[1:]
    short = dataclasses.replace(at_limit, max_tokens=end - 1)
    [cut] = engine.generate([PROMPTS[index]], short)
    assert (cut.finish_reason, cut.stop_reason) == ("length", None)


def teacher_forced(target, completion):
    """Logits `[len(token_ids), V]` that one pass over the whole sequence gives."""
    tokens = list(completion.prompt_token_ids + completion.token_ids)
    window = chain_window(jnp.zeros((1,), jnp.int32), len(tokens))
    cache = target.init_cache(1, 128)
    hidden, _ = target.forward(target.params, jnp.asarray([tokens], jnp.int32), window, cache)
    logits = target.logits(target.params, hidden)[0]
    return np.asarray(logits)[len(completion.prompt_token_ids) - 1 : -1]


def processed(logits, params):
    """Log-probabilities of the distribution that is sampled from, for rows without penalties."""
    fields = sampling.RowSampling.__dataclass_fields__
    values = {name: [getattr(params, name, 0)] for name in fields if name != "key"}
    parameters = sampling.RowSampling(
        key=sampling.request_key(0)[None],
        **{name: jnp.asarray(value, jnp.float32) for name, value in values.items()},
    )
    return jax.nn.log_softmax(sampling.filtered_logits(jnp.asarray(logits)[None], parameters)[0])


@pytest.mark.parametrize("index", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_logprobs_are_those_of_a_single_pass(engine, oracle, target, mixed, index):
    params = dataclasses.replace(MIXED[index], logprobs=3)
    for mode, made_by in (("raw_logprobs", engine), ("processed_logprobs", oracle)):
        [found] = made_by.generate([PROMPTS[index]], params)
        assert found.logprobs_mode == mode
        assert len(found.logprobs) == len(found.token_ids) == 30
        logits = teacher_forced(target, found)
        expected = np.asarray(
            jax.nn.log_softmax(jnp.asarray(logits))
            if mode == "raw_logprobs"
            else processed(logits, params)
        )
        for of_token, token, row in zip(found.logprobs, found.token_ids, expected, strict=True):
            for other, value in of_token.items():
                np.testing.assert_allclose(value, row[other], atol=2e-4)
            assert token in of_token
            assert len(of_token) in (3, 4)
            likeliest = sorted(of_token.values(), reverse=True)[:3]
            np.testing.assert_allclose(likeliest, np.sort(row)[::-1][:3], atol=2e-4)
        # Plain decoding and drafting give the same bits.
        assert made_by.generate([PROMPTS[index]], params, speculate=False)[0].logprobs == (
            found.logprobs
        )
        assert made_by.generate([PROMPTS[index]], params, draft_length=1)[0].logprobs == (
            found.logprobs
        )


def test_rounds_compute_logprobs_only_of_rows_that_ask_for_them(target):
    engine = Engine(target, "ngram", max_logprobs=3, batch_size=2, max_length=128)
    asks = SamplingParams(max_tokens=20, seed=1, temperature=1, logprobs=2, ignore_eos=True)
    silent = dataclasses.replace(asks, logprobs=None)
    written = lambda: np.asarray(engine.executor.state.logprobs.of_token).any(axis=1)[:2]  # noqa: E731
    [plain, _] = engine.generate(PROMPTS[:2], silent)
    assert not written().any()
    [alone] = engine.generate(PROMPTS[:1], asks)
    assert written().tolist() == [True, False]
    [beside, other] = engine.generate(PROMPTS[:2], [asks, silent])
    assert beside.logprobs == alone.logprobs
    assert beside.token_ids == alone.token_ids == plain.token_ids
    assert other.logprobs is None


def test_number_of_logprobs(engine, mixed):
    assert mixed[0].logprobs is None
    assert all(set(of) == {t} for of, t in zip(mixed[4].logprobs, mixed[4].token_ids, strict=True))
    with pytest.raises(SettingError, match="asks for 4 logprobs, and the engine keeps 3"):
        engine.generate([[5]], SamplingParams(logprobs=4))
    without = Engine(engine.target, batch_size=1)
    with pytest.raises(SettingError, match=r"the engine keeps none; make it with max_logprobs=1"):
        without.generate([[5]], SamplingParams(logprobs=1))


def test_stop_token_beyond_the_vocabulary(engine):
    with pytest.raises(SettingError, match="has the stop token 258"):
        engine.generate([[5]], SamplingParams(stop_token_ids=(258,)))
