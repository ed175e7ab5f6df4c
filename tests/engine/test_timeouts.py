"""Requests whose time is up, a device that does not answer, event loops that share an engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import jax
import pytest
import toy

from jaxspec import DraftModel, Engine, NGram, SamplingParams
from jaxspec.errors import RequestError, SettingError
from jaxspec.runtime.compilation import Program

PROMPTS = toy.prompts((3, 9, 1))
LONG = SamplingParams(max_tokens=150, ignore_eos=True)
SHAPE = {"batch_size": 1, "max_length": 256, "rounds_per_sync": 5}


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


@pytest.fixture(scope="module")
def engine(target):
    engine = Engine(target, NGram(1, 3), draft_length=3, max_queue=1, **SHAPE)
    engine.generate(PROMPTS, SamplingParams(max_tokens=3))
    return engine


@pytest.fixture(scope="module")
def whole(engine):
    """The output of the first prompt, nothing cut off."""
    [completion] = engine.generate([PROMPTS[0]], LONG)
    assert len(completion.token_ids) == 150
    return completion.token_ids


@pytest.fixture
def slow(engine, monkeypatch):
    """Rounds that take a while, so that deadlines pass in mid-output."""
    real = engine.executor.programs["run"]

    def run(*arguments):
        time.sleep(0.1)
        return real(*arguments)

    monkeypatch.setitem(engine.executor.programs, "run", run)


def drain(engine):
    done = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def check_cut(completion, whole):
    assert (completion.finish_reason, completion.stop_reason) == ("abort", "timeout")
    assert completion.token_ids == whole[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(whole)


def test_a_request_ends_when_its_time_is_up_with_what_it_has(engine, whole, slow):
    running = engine.submit(PROMPTS[0], LONG, timeout_s=0.3)
    engine.step()
    waiting = engine.submit(PROMPTS[1], LONG, timeout_s=1e-6)
    done = drain(engine)
    check_cut(done[running], whole)
    assert len(done[running].token_ids) > 0
    assert done[waiting].stop_reason == "timeout"
    assert done[waiting].token_ids == ()
    # The row is free for the next, and the time of those who have enough does not matter.
    kept = engine.submit(PROMPTS[0], LONG, timeout_s=1000)
    assert drain(engine)[kept].token_ids == whole


def test_deadlines_of_lists_and_streams(engine, whole, slow):
    found = engine.generate([PROMPTS[0]] * 3, LONG, timeout_s=0.3)
    for completion in found:
        check_cut(completion, whole)
    assert [len(completion.token_ids) > 0 for completion in found] == [True, False, False]
    *pieces, last = engine.stream(PROMPTS[0], LONG, timeout_s=0.3)
    check_cut(last.completion, whole)
    streamed = [token for piece in [*pieces, last] for token in piece.token_ids]
    assert tuple(streamed) == last.completion.token_ids != ()


@pytest.mark.slow
def test_a_task_that_waits_for_a_place_in_the_queue_has_a_deadline_too(engine, whole, slow):
    async def read(timeout_s):
        *_, last = [piece async for piece in engine.astream(PROMPTS[0], LONG, timeout_s=timeout_s)]
        return last.completion

    async def read_all():
        return await asyncio.gather(*(read(timeout_s) for timeout_s in (None, None, 0.3, None)))

    found = asyncio.run(read_all())
    for index, completion in enumerate(found):
        if index == 2:
            check_cut(completion, whole)
            assert completion.token_ids == ()
        else:
            assert completion.token_ids == whole


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5"])
def test_what_is_no_time_is_refused(engine, target, timeout_s):
    for call in (
        lambda: engine.submit(PROMPTS[0], timeout_s=timeout_s),
        lambda: engine.generate(PROMPTS, timeout_s=timeout_s),
        lambda: Engine(target, step_timeout_s=timeout_s, **SHAPE),
    ):
        with pytest.raises(SettingError, match=r"timeout_s .* must be a number of seconds above 0"):
            call()
    assert not engine.has_unfinished


def test_an_engine_whose_device_does_not_answer_ends(target, whole):
    engine = Engine(target, NGram(1, 3), draft_length=3, step_timeout_s=2.0, **SHAPE)
    engine.warm_up()
    [before] = engine.generate([PROMPTS[0]], LONG)
    assert before.token_ids == whole  # steps that are in time are the same steps
    real, answer, ended = engine.executor.programs["run"], threading.Event(), threading.Event()

    def hangs(*arguments):
        answer.wait()
        try:
            return real(*arguments)
        finally:
            ended.set()

    engine.executor.programs["run"] = hangs
    waiting = engine.submit(PROMPTS[1], LONG)
    found = []
    reader = threading.Thread(target=lambda: found.extend(engine.stream(PROMPTS[2], LONG)))
    reader.start()
    completions = engine.generate([PROMPTS[0]], LONG)
    reader.join()
    [submitted] = engine.step()
    assert submitted.request_id == waiting
    for completion in (*completions, submitted, found[-1].completion):
        assert (completion.finish_reason, completion.stop_reason) == ("abort", "device timeout")
    with pytest.raises(RequestError, match="ended because a step took longer than 2 s"):
        engine.submit(PROMPTS[0], LONG)
    # An answer that comes too late changes nothing.
    answer.set()
    assert ended.wait(60)
    assert engine.step() == []
    assert not engine.has_unfinished
    engine.shutdown()


class SlowToCompile:
    """A jitted function that takes longer to lower than a step may."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self.function(*arguments)

    def lower(self, *arguments):
        time.sleep(1.0)
        return self.function.lower(*arguments)


def test_compilations_do_not_count_as_hanging(target):
    engine = Engine(target, step_timeout_s=0.5, **SHAPE)
    programs = engine.executor.programs
    programs["run"] = Program(SlowToCompile(programs["run"]), "the decode round")
    [completion] = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=5))
    assert completion.finish_reason == "length"


def in_time(call, limit_s=60):
    """What a call returns or raises, if it does so in time."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result(timeout=limit_s)
    finally:
        pool.shutdown(wait=False)


ENDED = "ended because a step took longer than 1 s"


@pytest.mark.parametrize("when", ["the first step", "a warm-up", "rounds are measured"])
def test_a_device_that_does_not_answer_before_there_are_rounds(target, when):
    settings = {"step_timeout_s": 1.0, **SHAPE}
    if when == "rounds are measured":
        drafter = DraftModel(toy.model(seed=1, num_layers=1))
        engine = Engine(target, drafter, draft_length="auto", **settings)
    else:
        engine = Engine(target, **settings)
    answer, programs = threading.Event(), engine.executor.programs
    name = "init" if when == "the first step" else "run"
    real = programs[name]
    programs[name] = lambda *arguments: (answer.wait(), real(*arguments))[1]
    if when == "the first step":
        [completion] = in_time(lambda: engine.generate([PROMPTS[0]], LONG))
        assert (completion.finish_reason, completion.stop_reason) == ("abort", "device timeout")
    else:
        first = {
            "a warm-up": lambda: engine.warm_up(lambda program: answer.wait()),
            "rounds are measured": lambda: engine.generate([PROMPTS[0]], LONG),
        }[when]
        for call in (first, lambda: engine.submit(PROMPTS[0], LONG), engine.warm_up):
            with pytest.raises(RequestError, match=ENDED):
                in_time(call)
    answer.set()


@pytest.mark.slow
def test_measuring_many_rounds_may_take_longer_than_a_step(target):
    drafter = DraftModel(toy.model(seed=1, num_layers=1))
    engine = Engine(target, drafter, draft_length="auto", step_timeout_s=1.0, **SHAPE)
    real, calls = engine.executor.programs["run"], []

    def slow(*arguments):
        calls.append(time.monotonic())
        time.sleep(0.06)
        return real(*arguments)

    engine.executor.warm_up()
    engine.executor.programs["run"] = slow
    engine.warm_up()
    assert calls[-1] - calls[0] > 1.5
    engine.shutdown()


def test_a_warm_up_may_compile_for_longer_than_a_step(target, monkeypatch):
    real = jax.stages.Lowered.compile

    def slow(*arguments):
        time.sleep(1.0)
        return real(*arguments)

    engine = Engine(target, step_timeout_s=0.5, **SHAPE)
    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    assert min(program.seconds for program in engine.warm_up()) > 1.0


def test_an_error_of_a_step_reaches_its_caller_through_the_watchdog(target):
    engine = Engine(target, step_timeout_s=60, **SHAPE)

    def fails(*_):
        raise RuntimeError("the device is gone")

    real = engine.executor.programs["run"]
    engine.executor.programs["run"] = fails
    with pytest.raises(RuntimeError, match="is gone"):
        engine.generate([PROMPTS[0]], LONG)
    engine.executor.programs["run"] = real
    [completion] = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=5))
    assert completion.finish_reason == "length"


def test_a_second_event_loop_is_refused_while_the_first_streams(engine, whole):
    async def read():
        return [piece async for piece in engine.astream(PROMPTS[0], LONG)][-1].completion

    async def read_beside_another_loop():
        stream = engine.astream(PROMPTS[0], LONG)
        await anext(stream)
        with pytest.raises(RequestError, match="keep to one event loop per engine"):
            await asyncio.to_thread(asyncio.run, read())
        *_, last = [piece async for piece in stream]
        return last.completion

    assert asyncio.run(read_beside_another_loop()).token_ids == whole
    # One after the other they may, also where one was closed in mid-stream.
    assert asyncio.run(read()).token_ids == whole
    stream = engine.astream(PROMPTS[0], LONG)
    event_loop = asyncio.new_event_loop()
    event_loop.run_until_complete(anext(stream))
    event_loop.close()
    assert asyncio.run(read()).token_ids == whole
    assert not drain(engine)
