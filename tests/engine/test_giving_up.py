"""Requests that nobody waits for any more: every way of giving one up frees its row, its place in
the queue, its name and its session, without a further step."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable

import engines
import pytest
import toy

from jaxspec import Engine, NGram, SamplingParams
from jaxspec.errors import QueueFullError
from jaxspec.requests.requests import make_requests

PROMPTS = toy.prompts((3, 9, 1))
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(max_tokens=9, ignore_eos=True)
SHORT_S = 0.02


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


@pytest.fixture(scope="module")
def engine(target):
    engine = Engine(
        target,
        NGram(1, 3),
        draft_length=3,
        batch_size=1,
        max_length=128,
        rounds_per_sync=4,
        max_queue=3,
    )
    engine.generate(PROMPTS, SHORT)
    return engine


@pytest.fixture(scope="module")
def alone(engine):
    return [engine.generate([prompt], SHORT)[0].token_ids for prompt in PROMPTS]


def wait_until_overdue():
    time.sleep(2 * SHORT_S)


# Ways of giving up. Each returns how many completions `step` still has to return, None for none.
WAYS: list[Callable[[Engine], int | None]] = []


def way(function):
    WAYS.append(function)
    return function


@way
def close_a_stream_before_its_first_piece(engine):
    engine.stream(PROMPTS[0], LONG).close()


@way
def drop_a_stream_before_its_first_piece(engine):
    engine.stream(PROMPTS[0], LONG)
    gc.collect()


@way
def drop_a_stream_that_a_cycle_holds(engine):
    cycle = [engine.stream(PROMPTS[0], LONG)]
    cycle.append(cycle)
    del cycle
    gc.collect()


@way
def break_out_of_a_stream(engine):
    for _ in engine.stream(PROMPTS[0], LONG):
        break


@way
def close_a_stream_that_another_thread_began(engine):
    stream = engine.stream(PROMPTS[0], LONG)
    thread = threading.Thread(target=next, args=(stream,))
    thread.start()
    thread.join()
    stream.close()


@way
def drop_a_list_before_its_first_completion(engine):
    engine.run(requests_of(engine, LONG)).close()


@way
def drop_a_list_after_its_first_completion(engine):
    next(engine.run(requests_of(engine, SHORT)))
    gc.collect()


@way
def fail_in_a_list(engine):
    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, LONG, on_progress=stop)


@way
def interrupt_a_list_before_its_first_step(engine):
    core, fetch = engine._core, engine.executor.fetch

    def interrupted(*fields):
        raise KeyboardInterrupt

    core.executor.fetch = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, LONG)
    finally:
        core.executor.fetch = fetch


@way
def cancel_a_waiting_request(engine):
    engine.cancel(engine.submit(PROMPTS[0], LONG))
    return 1


@way
def cancel_a_running_request(engine):
    name = engine.submit(PROMPTS[0], LONG)
    engine.step()
    engine.cancel(name)
    return 1


@way
def cancel_a_request_whose_prompt_is_half_read(engine):
    name = engine.submit(toy.prompts((3,))[0], LONG)
    engine.step()
    half = engine.submit(toy.prompts((90,))[0], SHORT)
    engine.step()
    engine.cancel(half)
    engine.cancel(name)
    return 2


@way
def cancel_a_stream_by_its_name(engine):
    stream = engine.stream(PROMPTS[0], LONG, request_id="streamed")
    next(stream)
    engine.cancel("streamed")
    check_was_cancelled(stream)


@way
def miss_a_deadline_while_waiting(engine):
    engine.submit(PROMPTS[0], LONG, timeout_s=SHORT_S)
    wait_until_overdue()
    return 1


@way
def miss_a_deadline_while_running(engine):
    engine.submit(PROMPTS[0], LONG, timeout_s=10 * SHORT_S)
    engine.step()
    time.sleep(10 * SHORT_S)
    return 1


@way
def miss_the_deadline_of_a_stream_that_is_not_read(engine):
    stream = engine.stream(PROMPTS[0], LONG, timeout_s=SHORT_S)
    wait_until_overdue()
    check_is_free(engine)
    assert [piece.completion.stop_reason for piece in stream] == ["timeout"]


@way
def cancel_the_only_task(engine):
    async def read():
        async for _ in engine.astream(PROMPTS[0], LONG):
            pass

    async def main():
        task = asyncio.create_task(read())
        await asyncio.sleep(SHORT_S)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert engine.queue.num_unfinished == 0  # even while the step is still running
        assert not engine.has_unfinished
        engine.update_params(target=engine.target.params)

    asyncio.run(main())


@way
def run_out_of_time_in_a_task(engine):
    async def main():
        async with asyncio.timeout(SHORT_S):
            async for _ in engine.astream(PROMPTS[0], LONG):
                await asyncio.sleep(SHORT_S / 2)  # however fast the engine is

    with pytest.raises(TimeoutError):
        asyncio.run(main())


@way
def break_out_of_an_asynchronous_stream(engine):
    async def main():
        async for _ in engine.astream(PROMPTS[0], LONG):
            break

    asyncio.run(main())


@way
def make_asynchronous_streams_that_nobody_iterates(engine):
    async def main():
        held = engine.astream(PROMPTS[0], LONG)
        closed = engine.astream(PROMPTS[0], LONG)
        await closed.aclose()
        return held

    asyncio.run(main())


@way
def close_the_event_loop_of_a_stream_that_is_held(engine):
    stream = engine.astream(PROMPTS[0], LONG)
    event_loop = asyncio.new_event_loop()
    event_loop.run_until_complete(anext(stream))
    event_loop.close()
    check_is_free(engine)
    del stream


@way
def drop_a_stream_whose_event_loop_has_stopped(engine):
    event_loop = asyncio.new_event_loop()
    stream = engine.astream(PROMPTS[0], LONG)
    event_loop.run_until_complete(anext(stream))
    del stream
    gc.collect()
    check_is_free(engine)
    # Another event loop may stream now.
    asyncio.run(anext_of(engine.astream(PROMPTS[1], SHORT)))
    event_loop.close()


@way
def cancel_tasks_while_the_queue_is_full(engine):
    async def read():
        async for _ in engine.astream(PROMPTS[0], LONG):
            pass

    async def main():
        tasks = [asyncio.create_task(read()) for _ in range(3 * engine.max_queue)]
        await asyncio.sleep(SHORT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.queue.num_unfinished == engine.queue.num_waiting == 0

    asyncio.run(main())


@way
def close_a_turn_before_its_first_piece(engine):
    session = engine.session()
    session.stream(PROMPTS[0], LONG).close()
    check_turns(engine, session)


@way
def break_out_of_a_turn(engine):
    session = engine.session()
    for _ in session.stream(PROMPTS[0], LONG):
        break
    session.fork().close()
    check_turns(engine, session)


@way
def cancel_a_turn(engine):
    session = engine.session()
    name = engine.submit(PROMPTS[0], LONG, session=session)
    engine.step()
    engine.cancel(name)
    check_turns(engine, session)
    return 1


@way
def miss_the_deadline_of_a_turn(engine):
    session = engine.session()
    engine.submit(PROMPTS[0], LONG, session=session, timeout_s=SHORT_S)
    wait_until_overdue()
    check_turns(engine, session)
    return 1


@way
def close_a_session_in_mid_turn(engine):
    session = engine.session()
    stream = session.stream(PROMPTS[0], LONG)
    next(stream)
    session.close()
    assert engine.memory.num_resident_tokens == 0
    check_was_cancelled(stream)


def requests_of(engine, params):
    return make_requests(PROMPTS, params, engine.target, longest=engine.longest_prompt)


async def anext_of(stream):
    return await anext(stream)


def check_was_cancelled(stream):
    *_, last = stream
    assert last.completion.stop_reason == "cancelled"


def check_turns(engine, session):
    """The session takes its next turn at once, with the KV of the last one."""
    so_far = session.token_ids
    done = session.generate([*(so_far or PROMPTS[0]), 1, 2], SHORT)
    assert len(done.token_ids) == 9
    assert (done.num_reused_tokens > 0) == (len(so_far) > 0)
    session.close()


def check_is_free(engine):
    """Nothing is left of what was given up, and nobody has stepped."""
    assert engine.queue.num_unfinished == engine.queue.num_waiting == 0
    engine.update_params(target=engine.target.params)
    assert engine.queue.tickets_by_row == {}
    engine.reset()


@pytest.mark.parametrize("give_up", WAYS, ids=lambda give_up: give_up.__name__)
def test_what_was_given_up_is_free_without_a_step(engine, alone, give_up):
    num_to_return = give_up(engine) or 0
    check_is_free(engine)
    assert engine.has_unfinished == (num_to_return > 0)
    names = [engine.submit(prompt, SHORT) for prompt in PROMPTS]  # as many as the queue holds
    done = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    assert [done[name].token_ids for name in names] == alone
    given_up = [completion for name, completion in done.items() if name not in names]
    assert len(given_up) == num_to_return
    assert {completion.finish_reason for completion in given_up} <= {"abort"}


def test_clients_that_leave_before_the_first_piece_take_no_room(engine, alone):
    for _ in range(2 * engine.max_queue):
        engine.stream(PROMPTS[0], LONG, request_id="same").close()
        next(engine.stream(PROMPTS[1], LONG, request_id="same"))
    streams = [engine.stream(prompt, SHORT) for prompt in PROMPTS]
    with pytest.raises(QueueFullError):
        engine.submit(PROMPTS[0], SHORT)
    for stream, expected in zip(streams, alone, strict=True):
        assert list(stream)[-1].completion.token_ids == expected


def test_what_is_given_up_during_a_step_is_not_counted_and_free_after_it(engine, monkeypatch):
    begun, may_end = engines.hold_rounds(engine, monkeypatch)
    engine.submit(PROMPTS[0], LONG, request_id="mine")
    thread = threading.Thread(target=engine.step)
    thread.start()
    begun.wait()
    engine.cancel("mine")
    assert engine.queue.num_unfinished == 0
    engine.metrics()  # returns, although the step has not
    engine.submit(PROMPTS[1], SHORT, request_id="mine")
    assert engine.queue.num_unfinished == engine.queue.num_waiting == 1
    may_end.set()
    thread.join()
    num_requests = engine.metrics()["num_requests"]
    assert engine.queue.tickets_by_row == {}
    [cancelled] = engine.step()
    assert cancelled.stop_reason == "cancelled"
    [done] = engine.step()
    assert (done.request_id, len(done.token_ids)) == ("mine", 9)
    assert engine.metrics()["num_requests"] == num_requests + 1
