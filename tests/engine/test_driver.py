"""An engine that one thread drives: callers hand over requests, and wait for output only."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import threading
import time

import engines
import pytest
import toy

from jaxspec import SamplingParams
from jaxspec.engine.driver import Driver
from jaxspec.errors import QueueFullError, RequestError

PROMPTS = toy.prompts((3, 9, 1, 40, 6, 17))
PARAMS = [
    SamplingParams(max_tokens=9 + 5 * i, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    return engines.engine("toy", "ngram", max_queue=4)


@pytest.fixture(scope="module")
def alone(engine):
    return [engine.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


def until(holds, limit_s: float = 20.0) -> bool:
    """Whether a condition holds in time."""
    end_s = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.005)
    return holds()


async def read(engine, prompt, params, **settings):
    return [piece async for piece in engine.astream(prompt, params, **settings)]


def check(pieces, expected):
    """The pieces of a stream are those of the expected completion."""
    assert pieces[-1].completion.token_ids == expected.token_ids
    assert sum((piece.token_ids for piece in pieces), ()) == expected.token_ids


def test_all_callers_at_a_time_get_what_they_get_alone(engine, alone):
    cases = list(zip(PROMPTS, PARAMS, alone, strict=True))

    def in_a_loop_of_its_own():
        async def read_all():
            # More than rows and queue together: those that find no room wait.
            return await asyncio.gather(*(read(engine, p, s) for p, s, _ in cases * 2))

        for pieces, (_, _, expected) in zip(asyncio.run(read_all()), cases * 2, strict=True):
            check(pieces, expected)

    def without_a_loop():
        for prompt, params, expected in cases:
            while True:
                try:
                    check(list(engine.stream(prompt, params)), expected)
                    break
                except QueueFullError:
                    time.sleep(0.01)

    def as_a_list():
        done = engine.generate(PROMPTS, PARAMS)
        assert [one.token_ids for one in done] == [one.token_ids for one in alone]

    def one_by_one():
        for prompt, params, expected in cases:
            while True:
                try:
                    name = engine.submit(prompt, params)
                    break
                except QueueFullError:
                    time.sleep(0.01)
            done = []
            while not done:
                done = engine.step()
            assert [(one.request_id, one.token_ids) for one in done] == [(name, expected.token_ids)]

    ways = [in_a_loop_of_its_own, in_a_loop_of_its_own, without_a_loop, as_a_list, one_by_one]
    with engine.driven(), concurrent.futures.ThreadPoolExecutor() as threads:
        for done in [threads.submit(way) for way in ways]:
            done.result()


@pytest.fixture
def steps(engine, monkeypatch):
    """One entry for each step that begins."""
    steps, step = [], engine._core._step
    monkeypatch.setattr(engine._core, "_step", lambda: (steps.append(1), step())[1])
    return steps


def test_an_idle_driver_does_nothing(engine, steps):
    with engine.driven():
        list(engine.stream(PROMPTS[0], PARAMS[0]))
        time.sleep(0.05)
        steps.clear()
        time.sleep(0.2)
        assert steps == []
        assert not engine._core.lock.is_mine


def cancel_a_stream(engine):
    stream = engine.stream(PROMPTS[0], LONG)
    next(stream)
    stream.close()


def drop_a_stream(engine):
    cycle = [engine.stream(PROMPTS[0], LONG)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()


def cancel_a_task(engine):
    async def main():
        task = asyncio.create_task(read(engine, PROMPTS[0], LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def never_iterate(engine):
    async def main():
        engine.astream(PROMPTS[0], LONG)

    asyncio.run(main())


def close_the_loop(engine):
    stream = engine.astream(PROMPTS[0], LONG)
    event_loop = asyncio.new_event_loop()
    event_loop.run_until_complete(anext(stream))
    event_loop.close()
    engine.held = stream


def cancel_by_name(engine):
    name = engine.submit(PROMPTS[0], LONG)
    until(lambda: bool(engine.queue.tickets_by_row))
    engine.cancel(name)


def run_out_of_time(engine):
    engine.submit(PROMPTS[0], LONG, timeout_s=0.05)
    time.sleep(0.05)


WAYS = [
    cancel_a_stream,
    drop_a_stream,
    cancel_a_task,
    never_iterate,
    close_the_loop,
    cancel_by_name,
    run_out_of_time,
]


@pytest.fixture
def is_slow(engine, monkeypatch):
    """Slows the rounds down, so that requests are given up while they run."""
    run = engine.executor.programs["run"]
    slow = lambda *args: (time.sleep(0.02), run(*args))[1]  # noqa: E731
    monkeypatch.setitem(engine.executor.programs, "run", slow)


@pytest.mark.parametrize("give_up", WAYS, ids=lambda give_up: give_up.__name__)
def test_what_is_given_up_is_freed_within_two_steps_without_other_traffic(
    engine, steps, is_slow, give_up
):
    with engine.driven():
        give_up(engine)
        num_before = len(steps)
        assert until(lambda: not engine.queue.unfinished)
        assert len(steps) <= num_before + 2
    engine.step()
    assert not engine.has_unfinished


def test_the_check_sees_a_driver_that_stops_stepping_after_a_cancel(engine, is_slow, monkeypatch):
    is_armed, run = True, Driver._run

    def stops(driver):
        step = driver._step

        def unless_cancelled():
            if is_armed and engine.queue.has_given_up:
                time.sleep(0.01)
            else:
                step()

        driver._step = unless_cancelled
        run(driver)

    monkeypatch.setattr(Driver, "_run", stops)
    with engine.driven():
        cancel_a_stream(engine)
        assert not until(lambda: not engine.queue.unfinished, limit_s=0.5)
        is_armed = False


def test_requests_are_handed_over_while_a_step_runs(engine, alone, monkeypatch):
    begun, may_end = engines.hold_rounds(engine, monkeypatch)

    async def main():
        first = asyncio.create_task(read(engine, PROMPTS[0], LONG, request_id="first"))
        await asyncio.to_thread(begun.wait)
        second = asyncio.create_task(read(engine, PROMPTS[1], PARAMS[1]))
        await asyncio.sleep(0)
        engine.submit(PROMPTS[2], PARAMS[2])
        engine.stream(PROMPTS[0], LONG).close()
        engine.cancel("first")
        assert engine.metrics()["num_requests"] >= 0
        assert engine.queue.num_unfinished == 2
        may_end.set()
        check(await second, alone[1])
        assert (await first)[-1].completion.stop_reason == "cancelled"

    with engine.driven():
        asyncio.run(asyncio.wait_for(main(), 60))
        assert until(lambda: engine.queue.has_finished)
    [done] = engine.step()
    assert done.token_ids == alone[2].token_ids


def test_a_turn_is_handed_over_while_the_one_that_was_given_up_still_runs(
    engine, alone, monkeypatch
):
    begun, may_end = engines.hold_rounds(engine, monkeypatch)
    with engine.session() as session, engine.driven():
        stream = session.stream(PROMPTS[0], LONG)
        begun.wait()
        stream.close()
        turn = session.stream(PROMPTS[1], PARAMS[1])
        with pytest.raises(RequestError, match="not ended"):
            session.stream(PROMPTS[1], PARAMS[1])
        may_end.set()
        check(list(turn), alone[1])


def test_the_end_of_a_stream_is_delivered_once(engine, monkeypatch):
    """However many steps follow before it is read."""
    real, received = Driver.receiving, []

    def recorded(driver, ticket, receive):
        return real(driver, ticket, lambda output: (received.append(output), receive(output)))

    monkeypatch.setattr(Driver, "receiving", recorded)
    with engine.driven():
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
        next(stream)
        engine.generate([PROMPTS[1]], LONG)
        assert [piece.completion is not None for piece in stream].count(True) == 1
    assert [output.completion is not None for output in received].count(True) == 1


def test_others_get_the_device_while_requests_run(engine, is_slow):
    with engine.driven():
        stream = engine.stream(PROMPTS[0], LONG)
        next(stream)
        with pytest.raises(RequestError, match="1 requests are unfinished"):
            engine.update_params(target=engine.target.params)
        stream.close()
        with engine.session() as session:
            turns = session.stream(PROMPTS[0], LONG)
            next(turns)
            turns.close()
            done = session.generate([*session.token_ids, 1], PARAMS[0])
            assert done.num_reused_tokens > 0
        assert engine.cache_prefix(PROMPTS[3]) == len(PROMPTS[3])
        engine.forget_prefixes()


def test_a_step_that_fails_ends_its_requests_and_no_others(engine, alone, monkeypatch, caplog):
    with engine.driven():
        with monkeypatch.context() as patch:

            def fail(*arguments):
                raise RuntimeError("the device is on fire")

            patch.setitem(engine.executor.programs, "run", fail)
            for pieces in (list(engine.stream(PROMPTS[0], LONG)),):
                assert pieces[-1].completion.stop_reason == "device failure"
            assert [one.stop_reason for one in engine.generate(PROMPTS, PARAMS)] == [
                "device failure"
            ] * len(PROMPTS)
        assert "on fire" in caplog.text
        check(list(engine.stream(PROMPTS[0], PARAMS[0])), alone[0])


def test_the_end_of_the_block_cancels_what_is_unfinished(engine, alone, is_slow):
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine.driven())
        with pytest.raises(RequestError, match="begun within another"), engine.driven():
            pass
        stream = engine.stream(PROMPTS[0], LONG)
        next(stream)
    assert [piece.completion for piece in stream][-1].stop_reason == "cancelled"
    assert not any(thread.name == "jaxspec-driver" for thread in threading.enumerate())
    check(list(engine.stream(PROMPTS[0], PARAMS[0])), alone[0])  # as without a driver
