"""Requests one by one: submit, step, stream, cancel, other weights, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import engines
import jax
import jax.numpy as jnp
import pytest
import tiny
import toy

from jaxspec import DraftModel, Engine, NGram, SamplingParams, Static
from jaxspec.engine import core
from jaxspec.errors import PromptError, QueueFullError, RequestError, SettingError
from jaxspec.kernels.registry import default_kernels
from jaxspec.models.base import packed_model
from jaxspec.models.tokenizer import TextStream, TextTokenizer

BATCH_SIZE = 2
PROMPTS = toy.prompts((3, 9, 1, 40, 6, 17))
PARAMS = [
    SamplingParams(max_tokens=9 + 5 * i, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def target():
    return tiny.model(eos_token_ids=(), text=tiny.tokenizer())


@pytest.fixture(scope="module")
def engine(target):
    return Engine(
        target,
        NGram(1, 3),
        draft_length=3,
        batch_size=BATCH_SIZE,
        max_length=200,
        rounds_per_sync=5,
        max_queue=8,
    )


@pytest.fixture(scope="module")
def alone(engine):
    """Completions of `PROMPTS`, each decoded alone."""
    return [engine.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(autouse=True)
def _empty(engine):
    yield
    assert not engine.has_unfinished, "the test left requests after"


def drain(engine):
    done = []
    while engine.has_unfinished:
        done.extend(engine.step())
    return done


def test_submitted_requests_are_those_decoded_alone(engine, alone):
    names = [engine.submit(p, s) for p, s in zip(PROMPTS[:3], PARAMS, strict=False)]
    done = engine.step() + engine.step()
    names += [engine.submit(p, s) for p, s in zip(PROMPTS[3:], PARAMS[3:], strict=True)]
    done += drain(engine)
    assert len(names) == len(set(names)) == len(done) == len(PROMPTS)
    found = {completion.request_id: completion for completion in done}
    for name, expected in zip(names, alone, strict=True):
        assert found[name].token_ids == expected.token_ids
        assert found[name].acceptance.num_emitted_tokens == len(expected.token_ids)
    assert engine.step() == []


def test_nothing_is_compiled_for_requests_that_come_one_by_one(engine, alone):
    own = ("init", "admit", "prefill", "run")  # `end_rows` is one function for all engines
    engine.submit(PROMPTS[0], PARAMS[0], request_id="first")
    engine.step()
    engine.cancel("first")
    drain(engine)
    before = engine.executor.compile_counts()
    assert {before[name] for name in own} == {1}
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.submit(prompt, params)
        engine.step()
    drain(engine)
    assert engine.executor.compile_counts() == before


def test_the_pieces_of_a_stream_are_its_completion(engine, alone):
    for prompt, params, expected in zip(PROMPTS, PARAMS, alone, strict=True):
        *pieces, last = engine.stream(prompt, params)
        assert all(piece.completion is None and piece.token_ids for piece in pieces)
        assert last.completion.token_ids == expected.token_ids
        token_ids = itertools.chain(*(piece.token_ids for piece in [*pieces, last]))
        assert tuple(token_ids) == expected.token_ids
        assert "".join(piece.text for piece in [*pieces, last]) == expected.text
        assert len(pieces) > 0 or len(expected.token_ids) < 12


def test_a_stream_holds_back_what_may_become_a_stop_string(engine, target, alone):
    for completion, prompt, params in zip(alone, PROMPTS, PARAMS, strict=True):
        text = completion.text
        for start in range(len(text) - 3):
            stop = text[start : start + 3]
            if "\ufffd" in stop:
                continue
            with_stop = dataclasses.replace(params, stop=(stop,))
            [expected] = engine.generate([prompt], with_stop)
            pieces = list(engine.stream(prompt, with_stop))
            assert (
                "".join(piece.text for piece in pieces) == expected.text == text[: text.index(stop)]
            )
            assert pieces[-1].completion.stop_reason == stop
            break


def test_streams_of_many_tasks_share_the_steps(engine, alone, monkeypatch):
    steps = []
    real = core.EngineCore.step
    monkeypatch.setattr(core.EngineCore, "step", lambda self: (steps.append(1), real(self)))

    async def read(prompt, params):
        return [piece async for piece in engine.astream(prompt, params)]

    async def read_all():
        # More than rows and queue together: those that find no room wait.
        return await asyncio.gather(
            *(read(p, s) for p, s in zip(PROMPTS * 3, PARAMS * 3, strict=True))
        )

    found = asyncio.run(read_all())
    assert len(found) > engine.max_queue + engine.num_residents
    for pieces, expected in zip(found, alone * 3, strict=True):
        assert pieces[-1].completion.token_ids == expected.token_ids
        assert "".join(piece.text for piece in pieces) == expected.text
    assert len(steps) < sum(len(pieces) for pieces in found)


def test_cancelling(engine, alone):
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    names = [engine.submit(PROMPTS[0], long) for _ in range(engine.num_residents + 1)]
    other = engine.submit(PROMPTS[5], PARAMS[5])
    engine.step()
    engine.cancel(names[0])  # in a row
    engine.cancel(names[-1])  # in the queue
    engine.cancel(names[0])  # twice, before it took effect
    done = {completion.request_id: completion for completion in drain(engine)}
    full = done[names[1]]
    for name in (names[0], names[-1]):
        assert (done[name].finish_reason, done[name].stop_reason) == ("abort", "cancelled")
        assert done[name].token_ids == full.token_ids[: len(done[name].token_ids)]
    assert 0 < len(done[names[0]].token_ids) < 100
    assert done[names[-1]].token_ids == ()
    assert done[names[-1]].text == ""
    assert done[other].token_ids == alone[5].token_ids
    for name in (names[0], "never"):
        with pytest.raises(RequestError, match=f"{name}.* no unfinished request"):
            engine.cancel(name)


def test_a_long_prompt_holds_up_running_rows_for_one_chunk_at_a_time(engine, target, monkeypatch):
    calls = []
    programs = engine.executor.programs
    for name in ("prefill", "run"):
        real = programs[name]
        monkeypatch.setitem(
            programs,
            name,
            lambda *args, real=real, name=name: (calls.append((name, args)), real(*args))[1],
        )
    [long] = toy.prompts((150,))
    running = engine.submit(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    assert [name for name, _ in calls] == ["prefill", "run"]
    calls.clear()
    joined = engine.submit(long, SamplingParams(max_tokens=5, ignore_eos=True))
    done = drain(engine)
    assert [completion.request_id for completion in done] == [joined, running]
    names = [name for name, _ in calls]
    num_chunks = names.count("prefill")
    assert num_chunks == -(-149 // 16)
    first = names.index("prefill")
    assert names[first : first + 2 * num_chunks] == ["prefill", "run"] * num_chunks
    assert [int(a[2]) for n, a in calls if n == "run"][: num_chunks - 1] == [
        engine.config.rounds_per_piece
    ] * (num_chunks - 1)
    # A list that no one awaits reads its prompts at once.
    calls.clear()
    engine.generate([PROMPTS[1], long], SamplingParams(max_tokens=5, ignore_eos=True))
    names = [name for name, _ in calls]
    assert names[: names.index("run")] == ["prefill"] * (1 + num_chunks)


def test_a_list_and_single_requests_are_decoded_together(engine, alone):
    name = engine.submit(PROMPTS[3], PARAMS[3])
    found = engine.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]
    [completion] = drain(engine)
    assert completion.request_id == name
    assert completion.token_ids == alone[3].token_ids


def test_what_cannot_be_taken_is_refused_while_others_run_on(engine, alone):
    name = engine.submit(PROMPTS[1], PARAMS[1], request_id="mine")
    engine.step()
    for error, message, call in (
        (PromptError, "The prompt of x is empty", lambda: engine.submit([], request_id="x")),
        (PromptError, "has 254 tokens", lambda: engine.submit([5] * 254)),
        (
            SettingError,
            "n 2 was given",
            lambda: engine.submit([5], SamplingParams(temperature=1, n=2)),
        ),
        (SettingError, "draft length of 9", lambda: engine.submit([5], draft_length=9)),
        (SettingError, "logprobs", lambda: engine.submit([5], SamplingParams(logprobs=1))),
        (RequestError, "'mine' was given twice", lambda: engine.submit([5], request_id="mine")),
        (
            RequestError,
            "New weights were given while 1",
            lambda: engine.update_params(target=engine.target.params),
        ),
        (SettingError, "No weights were given; give target", engine.update_params),
        (RequestError, "emptied while requests", engine.reset),
    ):
        with pytest.raises(error, match=message):
            call()
    [completion] = drain(engine)
    assert completion.request_id == name
    assert completion.token_ids == alone[1].token_ids


def test_a_full_queue_pushes_back(engine):
    few = SamplingParams(max_tokens=2, ignore_eos=True)
    names = [engine.submit(PROMPTS[0], few) for _ in range(engine.max_queue)]
    with pytest.raises(QueueFullError, match="8 are waiting, as many as the queue holds"):
        engine.submit(PROMPTS[0], few)
    with pytest.raises(QueueFullError):
        next(engine.stream(PROMPTS[0], few))
    done = engine.step()
    names.append(engine.submit(PROMPTS[0], few))
    done += drain(engine)
    assert sorted(completion.request_id for completion in done) == sorted(names)


@pytest.mark.slow
def test_static_batches_take_submitted_requests_too(target, alone, engine):
    static = Engine(
        target,
        NGram(1, 3),
        draft_length=3,
        batch_size=BATCH_SIZE,
        max_length=200,
        scheduler=Static(),
    )
    names = [static.submit(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    found = {completion.request_id: completion.token_ids for completion in drain(static)}
    assert [found[name] for name in names] == [completion.token_ids for completion in alone]


def test_a_shut_down_engine_ends_what_it_holds_and_takes_no_more(target):
    with Engine(target, batch_size=1, max_length=128) as engine:
        names = [engine.submit(PROMPTS[0], SamplingParams(max_tokens=90)) for _ in range(4)]
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=90))
        engine.step()
    assert engine.queue.num_unfinished == engine.queue.num_waiting == 0
    assert engine.queue.tickets_by_row == {}
    done = {completion.request_id: completion for completion in engine.step()}
    assert sorted(done) == sorted(names)
    assert {completion.stop_reason for completion in done.values()} == {"cancelled"}
    assert len(done[names[0]].token_ids) > 0
    *_, last = stream
    assert last.completion.stop_reason == "cancelled"
    assert not engine.has_unfinished
    for call in (engine.submit, lambda prompt: engine.generate([prompt]), engine.stream):
        with pytest.raises(RequestError, match="shut down"):
            call(PROMPTS[0])


def test_a_call_that_loses_the_state_ends_who_had_a_row_and_nobody_else(engine, alone, monkeypatch):
    names = [engine.submit(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    real = engine.executor.programs["run"]

    def fails(params, state, *numbers):
        jax.block_until_ready(real(params, state, *numbers))
        raise RuntimeError("the device is gone")

    monkeypatch.setitem(engine.executor.programs, "run", fails)
    with pytest.raises(RuntimeError, match="is gone"):
        engine.step()
    monkeypatch.undo()
    done = {completion.request_id: completion for completion in drain(engine)}
    for index, name in enumerate(names):
        if index < engine.num_residents:
            assert done[name].stop_reason == "device failure"
        else:
            assert done[name].token_ids == alone[index].token_ids


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tokenizer_that_fails_on_one_output_ends_that_request_only(
    engine, alone, monkeypatch, is_streamed
):
    victim = alone[1].token_ids
    # Outputs are decoded after the last tokens of their prompts.
    context, _ = engine.target.tokenizer._context(alone[1].prompt_token_ids)
    start = [*context, victim[0]]
    assert all(
        [*done.prompt_token_ids, *done.token_ids][: len(start)] != start
        for i, done in enumerate(alone)
        if i != 1
    )
    for owner, name in ((TextTokenizer, "decode"), (TextStream, "_decode")):
        real = getattr(owner, name)

        def decode(self, token_ids, *args, real=real, **kwargs):
            if list(token_ids[: len(start)]) == start:
                raise RuntimeError("no such text")
            return real(self, token_ids, *args, **kwargs)

        monkeypatch.setattr(owner, name, decode)
    names = [engine.submit(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True) if p != PROMPTS[1]]
    if is_streamed:
        *_, last = engine.stream(PROMPTS[1], PARAMS[1])
        failed = last.completion
    else:
        [failed] = engine.generate([PROMPTS[1]], PARAMS[1])
    assert (failed.finish_reason, failed.stop_reason) == ("abort", "tokenizer failure")
    assert failed.text is None
    assert failed.token_ids == victim[: len(failed.token_ids)]
    assert len(failed.token_ids) == len(victim) or is_streamed
    found = {completion.request_id: completion for completion in drain(engine)}
    for name, expected in zip(names, [alone[0], *alone[2:]], strict=True):
        assert found[name].token_ids == expected.token_ids
        assert found[name].text == expected.text


def test_other_weights_need_no_new_trace():
    new, draft = (toy.model(seed=seed, num_layers=1) for seed in (2, 3))
    params = SamplingParams(max_tokens=20)
    engine = engines.engine("toy", "draft model")
    old = engine.target.params
    before = engine.generate(PROMPTS, params)
    engine.update_params(target=new.params, draft=draft.params)
    after = engine.generate(PROMPTS, params)
    made_with = Engine(new, DraftModel(draft), draft_length=3, **engines.SHAPE)
    expected = made_with.generate(PROMPTS, params)
    assert [c.token_ids for c in after] == [c.token_ids for c in expected]
    assert [c.acceptance for c in after] == [c.acceptance for c in expected]
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert engine.target.params is not old
    counts = engine.executor.compile_counts()
    assert {counts[name] for name in ("run", "admit", "prefill")} == {1}
    with pytest.raises(SettingError, match="without a drafter"):
        Engine(new, batch_size=1, max_length=128).update_params(draft=draft.params)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", sorted({"xla", default_kernels()}))
def test_other_weights_of_tied_models_bring_their_own_head(kernels):
    made = [toy.model(seed=seed, is_tied=True, kernels=kernels, num_layers=1) for seed in range(4)]
    shape = {"draft_length": 2, "batch_size": BATCH_SIZE, "max_length": 128}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine, other = (
        Engine(made[0], DraftModel(made[1]), **shape),
        Engine(made[2], DraftModel(made[3]), **shape),
    )
    expected = [
        [(c.token_ids, c.acceptance) for c in each.generate(PROMPTS, params)]
        for each in (engine, other)
    ]
    stored = [model.params for model in made]
    assert "head" not in stored[0]  # as `save_model` writes it
    with_heads = [{**each, "head": each["embedding"].T} for each in stored]
    packed = [packed_model(model).params for model in made]
    for forms in (stored, with_heads, packed):
        for pair in (1, 0):
            engine.update_params(target=forms[2 * pair], draft=forms[2 * pair + 1])
            found = [(c.token_ids, c.acceptance) for c in engine.generate(PROMPTS, params)]
            assert found == expected[pair]
    assert engine.executor.compile_counts()["run"] == 1

    old_head = {**stored[2], "head": stored[0]["embedding"].T}
    for name, part in (("target", "the target toy0"), ("draft", "the drafter toy1")):
        with pytest.raises(SettingError, match=f"config of {part} says that its head is tied"):
            engine.update_params(**{name: old_head})
    missing = {name: leaf for name, leaf in with_heads[2].items() if name != "embedding"}
    for given, message in (
        (missing, r"nothing at \['embedding'\] instead of float32\[61, 32\]"),
        ({**stored[2], "bias": jnp.zeros(3)}, r"float32\[3\] at \['bias'\] instead of nothing"),
        ({**stored[2], "layers": list(stored[2]["layers"])}, "the same arrays in other containers"),
        (
            {**stored[2], "final_norm": jnp.ones(31)},
            r"float32\[31\] at \['final_norm'\], and the engine was compiled for float32\[32\]",
        ),
        (
            {**stored[2], "final_norm": jnp.ones(32, jnp.bfloat16)},
            r"bfloat16\[32\] at \['final_norm'\], and the engine was compiled for float32\[32\]",
        ),
    ):
        with pytest.raises(SettingError, match=message):
            engine.update_params(target=given)
    found = [(c.token_ids, c.acceptance) for c in engine.generate(PROMPTS, params)]
    assert found == expected[0]  # what was refused changed nothing


def test_bytes_are_those_of_the_arrays_and_what_does_not_fit_is_refused(target, monkeypatch):
    engine = Engine(target, DraftModel(target), batch_size=3, max_length=256)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.state))
    caches = (engine.state.cache, engine.state.drafter.cache)
    kv_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
    memory = engine.memory
    assert (memory.state_bytes, memory.kv_bytes) == (nbytes, kv_bytes)
    assert memory.weights_bytes == 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    assert engine.describe()["kv_bytes"] == kv_bytes
    assert "4 rows of 256 slots" in memory.sentence

    # A round's logits, too: 3 rows, a window of 5 tokens, fp32, of which 9 tokens are drawn at a
    # time with eleven arrays each.
    needed = memory.needed_bytes
    assert needed == nbytes + (3 * 5 + 11 * 9) * target.vocab_size * 4

    # Exactly what is named fits, one row or one block more does not, nor does a longer draft.
    monkeypatch.setattr("jaxspec.engine.memory.free_memory", lambda: (needed, "in this cgroup"))
    Engine(target, DraftModel(target), batch_size=3, max_length=256)
    with pytest.raises(
        SettingError,
        match=r"are free in this cgroup .* batch_size of 3 .* or a max_length of 128 at this",
    ):
        Engine(target, DraftModel(target), batch_size=4, max_length=256)
    with pytest.raises(SettingError, match=r"\(of 65 tokens a row\) need .* a batch_size of"):
        Engine(target, DraftModel(target), draft_length=64, batch_size=3, max_length=256)
    monkeypatch.setattr("jaxspec.engine.memory.free_memory", lambda: (100, "on this host"))
    with pytest.raises(SettingError, match="choose a smaller model"):
        Engine(target, batch_size=1, max_length=128)
