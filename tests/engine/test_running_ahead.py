"""Rounds that start before the result of those before them is read: the order in which things
happen, and outputs and counts that do not show it. A CPU does without, so the tests switch it on.

The counts of a request with a stop string are those of the rounds after which it was found. They
depend on the requests beside it, so they are compared where there are none."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import threading
import time

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import stranger

from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.engine.adaptive import DraftLengthController
from jaxspec.engine.executor import make_executor
from jaxspec.engine.round_times import RoundKind, RoundTimes

PROMPTS = ["a", "Once upon a time", "xyz" * 50, "def main():", "1 + 1 =", "What"]
LONG = SamplingParams(max_tokens=90, ignore_eos=True, logprobs=2)
LIMIT_S = 60
DEVICE_S, HOST_S = 0.3, 0.2


@pytest.fixture(scope="module")
def engine():
    settings = {"max_logprobs": 2, "trace": "rounds", "rounds_per_sync": 4, "rounds_per_piece": 2}
    return engines.engine("text", "ngram", **settings)


@pytest.fixture(autouse=True)
def _switched_back(engine):
    engine.reset()
    yield
    engine.executor.runs_ahead = False
    assert not engine.has_unfinished


@pytest.fixture(scope="module")
def mixed(engine):
    """Greedy and sampled, with stop strings early and late, scored prompts, and one that asks for
    nothing but the scores."""
    params = [
        dataclasses.replace(LONG, temperature=0.8 * (i % 2), seed=i, max_tokens=30 + 25 * (i % 3))
        for i in range(len(PROMPTS))
    ]
    done = engine.generate(PROMPTS, params)
    for index, start in ((1, 8), (2, 31), (5, 50)):
        stop = done[index].text[start : start + 3]
        params[index] = dataclasses.replace(params[index], stop=(stop,))
    params[3] = dataclasses.replace(params[3], prompt_logprobs=1)
    params[4] = SamplingParams(max_tokens=0, prompt_logprobs=2)
    return params


def facts(done):
    """All that a completion says, besides times; of a trace, how many rounds it has."""
    trace = [] if done.trace is None else [len(each) for each in jax.tree.leaves(done.trace)]
    names = ("token_ids", "text", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs")
    more = ("acceptance", "num_reused_tokens", "num_reread_tokens")
    return {name: getattr(done, name) for name in (*names, *more)} | {"trace": trace}


def outputs(done):
    """What of a completion is output, and not a count of rounds."""
    return {k: v for k, v in facts(done).items() if k not in ("acceptance", "trace")}


def both(engine, scenario):
    """What a scenario returns without and with rounds that run ahead."""
    found = []
    for runs_ahead in (False, True):
        engine.reset()
        engine.executor.runs_ahead = runs_ahead
        found.append(scenario(engine))
    return found


def comparable(found, params):
    """Facts without the counts of those that have a stop string."""
    counts = ("acceptance", "trace")
    return [
        {k: v for k, v in each.items() if not (of.stop and k in counts)}
        for each, of in zip(found, params, strict=True)
    ]


def drained(engine):
    done = []
    while engine.has_unfinished:
        done += engine.step()
    return {one.request_id: facts(one) for one in done + engine.step()}


# Each returns what must not depend on whether rounds run ahead.


def one_by_one(engine, mixed):
    return [
        facts(engine.generate([prompt], params)[0])
        for prompt, params in zip(PROMPTS, mixed, strict=True)
    ]


def a_list(engine, mixed):
    return comparable(map(facts, engine.generate(PROMPTS, mixed)), mixed)


def submitted(engine, mixed):
    names = [engine.submit(p, s) for p, s in zip(PROMPTS, mixed, strict=True)]
    found = drained(engine)
    return comparable([found[name] for name in names], mixed)


def streams(engine, mixed):
    async def read(prompt, params):
        return [piece async for piece in engine.astream(prompt, params)]

    async def read_all():
        found = []
        for first in range(0, len(PROMPTS), 2):  # as many as there are rows: none waits for one
            pair = slice(first, first + 2)
            found += await asyncio.gather(*map(read, PROMPTS[pair], mixed[pair]))
        return found

    found = []
    for pieces in asyncio.run(read_all()):
        done = pieces[-1].completion
        assert sum((piece.token_ids for piece in pieces), ()) == done.token_ids
        assert "".join(piece.text for piece in pieces) == done.text
        if done.logprobs:
            assert sum((piece.logprobs or () for piece in pieces), ()) == done.logprobs
        found.append(facts(done))
    return comparable(found, mixed)


def driven_streams(engine, mixed):
    with engine.driven():
        return streams(engine, mixed)


def counted(engine, mixed):
    before = engine.metrics()
    one_by_one(engine, mixed)
    after = engine.metrics()
    names = [name for name, value in before.items() if isinstance(value, int)]
    return {name: after[name] - before[name] for name in names}


def cancelled(engine, mixed):
    names = [engine.submit(PROMPTS[index], LONG) for index in (0, 1)]
    engine.step()
    engine.step()
    engine.cancel(names[0])
    found = drained(engine)
    assert found[names[0]]["stop_reason"] == "cancelled"
    assert 0 < len(found[names[0]]["token_ids"]) < LONG.max_tokens
    return [found[name] for name in names]


def out_of_time(engine, mixed):
    names = [engine.submit(PROMPTS[index], LONG, timeout_s=1e6) for index in (0, 1)]
    for _ in range(3):
        engine.step()
    engine._core.queue.tickets_by_row[0].deadline = 0.0
    found = drained(engine)
    assert "timeout" in [each["stop_reason"] for each in found.values()]
    return [found[name] for name in names]


def a_session(engine, mixed):
    found = []
    with engine.session() as session, engine.session() as other:
        first = session.generate(PROMPTS[1], mixed[1])
        found += [facts(first), session.num_kept_tokens, session.token_ids]
        stream = other.stream(PROMPTS[2], LONG)
        pieces = [next(stream).token_ids for _ in range(2)]
        stream.close()
        found += [pieces, other.num_kept_tokens, other.token_ids]
        for each in (session, other):
            # The n-grams of the rounds that were too many are gone too, and what they replaced.
            found.append(outputs(each.generate([*each.token_ids, 70, 71], mixed[0])))
        with other.fork() as copy:
            found.append(outputs(copy.generate([*copy.token_ids, 72], mixed[0])))
    return found


SCENARIOS = (
    one_by_one, a_list, submitted, streams, driven_streams, counted, cancelled, out_of_time,
    a_session,
)  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_shows_that_rounds_run_ahead(engine, mixed, scenario):
    without, ahead = both(engine, lambda engine: scenario(engine, mixed))
    assert ahead == without


@pytest.mark.parametrize("scenario", [one_by_one, counted])
def test_counts_read_from_the_newest_state_would_show(engine, mixed, scenario, monkeypatch):
    fetch = engine.executor.fetch

    def mistaken(*fields, state=None):
        found = fetch(*fields, state=state)
        return found.replace(counts=fetch("counts").counts) if "counts" in fields else found

    monkeypatch.setattr(engine.executor, "fetch", mistaken)
    without, ahead = both(engine, lambda engine: scenario(engine, mixed))
    assert ahead != without


def test_kv_kept_up_to_where_the_row_went_would_show(engine, mixed, monkeypatch):
    keep = engine._core.kept.keep

    def too_far(ticket, state, row):
        newest = int(engine.executor.fetch("num_committed").num_committed[row])
        extra = newest - ticket.num_committed
        counts = ticket.acceptance
        ticket.acceptance = dataclasses.replace(
            counts, num_emitted_tokens=counts.num_emitted_tokens + extra
        )
        keep(ticket, state, row)
        ticket.acceptance = counts

    monkeypatch.setattr(engine._core.kept, "keep", too_far)
    without, ahead = both(engine, lambda engine: a_session(engine, mixed))
    assert ahead != without


@contextlib.contextmanager
def waiting_programs(engine, events, *, until_read):
    """A device that only waits: rounds take until the result of those before them has been read,
    and from then on as long as nothing."""
    real, read = engine.executor.programs["run"], threading.Semaphore(0)
    fetch, numbers = engine.executor.fetch, {}

    def run(params, state, *arguments):
        number = len(numbers)
        numbers[number] = True
        state = jax.block_until_ready(real(params, state, *arguments))
        if until_read and number > 0:
            assert read.acquire(timeout=LIMIT_S), "the host waits for rounds that wait for the host"
        events.append(("over", number))
        return state

    def note(*fields, state=None):
        found = fetch(*fields, state=state)
        if "counts" in fields:
            events.append(("read", sum(what == "read" for what, _ in events)))
            read.release()
        return found

    def noted(function):
        def call(*arguments, **settings):
            events.append(("started", sum(what == "started" for what, _ in events)))
            return function(*arguments, **settings)

        return call

    engine.executor.run = noted(engine.executor.run)
    engine.executor.programs["run"], engine.executor.fetch = run, note
    try:
        yield
    finally:
        engine.executor.programs["run"] = real
        del engine.executor.fetch, engine.executor.run


@pytest.mark.parametrize("is_driven", [False, True])
def test_the_host_reads_a_result_while_the_device_runs_the_next_rounds(engine, is_driven):
    events = []
    engine.executor.runs_ahead = True
    with waiting_programs(engine, events, until_read=True):
        with engine.driven() if is_driven else contextlib.nullcontext():
            *_, last = engine.stream(PROMPTS[0], LONG)
    assert len(last.completion.token_ids) == LONG.max_tokens
    at = {event: index for index, event in enumerate(events)}
    num_read = sum(what == "read" for what, _ in events)
    assert num_read > 5
    for number in range(num_read - 1):
        assert at["started", number + 1] < at["read", number] < at["over", number + 1]


def seconds_per_step(engine):
    """Of a device that only waits, and of a reader that does."""

    @functools.partial(jax.jit, donate_argnums=0)
    def one_more_token(state):
        num_committed = state.num_committed + state.is_running.astype(jnp.int32)
        is_over = state.is_running & (num_committed >= state.limit)
        finish = jnp.where(is_over, state.limit_finish, state.finish)
        return state.replace(num_committed=num_committed, finish=finish)

    def run(params, state, *_):
        time.sleep(DEVICE_S)
        return one_more_token(state)

    real = engine.executor.programs["run"]
    engine.executor.programs["run"] = run
    try:
        started_s = []
        for _ in engine.stream("a", SamplingParams(max_tokens=6, ignore_eos=True)):
            started_s.append(time.perf_counter())
            time.sleep(HOST_S)
        assert len(started_s) == 6
        return float(np.median(np.diff(started_s[1:])))
    finally:
        engine.executor.programs["run"] = real


def test_a_step_takes_as_long_as_the_slower_of_device_and_host(engine):
    without_s, ahead_s = both(engine, seconds_per_step)
    assert without_s >= DEVICE_S + HOST_S
    assert ahead_s < max(DEVICE_S, HOST_S) + 0.5 * min(DEVICE_S, HOST_S)


def test_without_running_ahead_the_device_waits_for_the_host(engine):
    events = []
    with waiting_programs(engine, events, until_read=False):
        list(engine.stream(PROMPTS[0], LONG))
    at = {event: index for index, event in enumerate(events)}
    for number in range(5):
        assert at["over", number] < at["read", number] < at["started", number + 1]


def test_what_needs_the_host_comes_between(engine):
    """A request that arrives is admitted and read before more rounds are started."""
    events, executor = [], engine.executor
    executor.runs_ahead = True
    prefill = executor.prefill

    def noted(chunks, **settings):
        events.append((len(engine._core._rounds), len(engine._core.queue.tickets_by_row)))
        prefill(chunks, **settings)

    executor.prefill = noted
    try:
        engine.submit(PROMPTS[0], LONG)
        engine.step()
        assert len(engine._core._rounds) == 1
        engine.submit(PROMPTS[2], LONG)  # of several chunks, one for each step
        drained(engine)
    finally:
        del executor.prefill
    first, *others = events
    assert first == (0, 1)
    assert len(others) > 1
    assert set(others) == {(0, 2)}


def test_an_interrupt_amid_rounds(engine, monkeypatch):
    """The next step begins anew, and no token is lost."""
    expected = [facts(done) for done in engine.generate(PROMPTS[:2], LONG)]
    engine.executor.runs_ahead = True
    names = [engine.submit(prompt, LONG) for prompt in PROMPTS[:2]]
    engine.step()

    def interrupted(*fields, state=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine._core._rounds
    found = drained(engine)
    assert [found[name] for name in names] == expected


def test_rounds_that_fail(engine):
    """The error is raised, nothing stays behind, and the engine goes on."""
    expected = engine.generate(PROMPTS[:2], LONG)
    engine.executor.runs_ahead = True
    real = engine.executor.programs["run"]
    for fails_before in (False, True):
        calls = []

        def fails(*arguments, fails_before=fails_before, calls=calls):
            calls.append(1)
            if len(calls) < 3:
                return real(*arguments)
            if not fails_before:
                jax.block_until_ready(real(*arguments))
            raise RuntimeError("the device is gone")

        engine.executor.programs["run"] = fails
        names = [engine.submit(prompt, LONG) for prompt in PROMPTS[:2]]
        with pytest.raises(RuntimeError, match="is gone"):
            drained(engine)
        engine.executor.programs["run"] = real
        found = drained(engine)
        assert {found[name]["stop_reason"] for name in names} == {"device failure"}
        again = engine.generate(PROMPTS[:2], LONG)
        assert [facts(done) for done in again] == [facts(done) for done in expected]


def test_an_engine_that_ends_amid_rounds(engine):
    engine.executor.runs_ahead = True
    with engine.driven():
        stream = engine.stream(PROMPTS[0], LONG)
        next(stream)
    *_, last = stream
    assert last.completion.stop_reason == "cancelled"
    assert 0 < len(last.completion.token_ids) < LONG.max_tokens


def test_weights_may_change_after_the_last_output(engine, mixed):
    for _ in range(3):
        engine.executor.runs_ahead = True
        engine.generate(PROMPTS[:2], mixed[:2])
        assert not engine._core._rounds
        engine.update_params(target=engine.target.params)


def test_a_device_that_does_not_answer_amid_rounds():
    """All that is called then returns, although the rounds do not."""
    made = Engine(
        engines.target(), batch_size=1, max_length=64, rounds_per_sync=4, step_timeout_s=2
    )
    made.executor.runs_ahead = True
    few, answers = SamplingParams(max_tokens=40, ignore_eos=True), threading.Event()
    [done] = made.generate([[1]], few)
    assert done.finish_reason == "length"
    real, calls = made.executor.programs["run"], []

    def run(*arguments):
        calls.append("started")
        if len(calls) == 3:
            answers.wait(LIMIT_S)
            calls.append("over")
        return real(*arguments)

    made.executor.programs["run"] = run
    name = made.submit([1], few)
    assert drained(made)[name]["stop_reason"] == "device timeout"
    made.update_params(target=made.target.params)
    made.shutdown()
    assert "over" not in calls
    answers.set()


def test_only_accelerators_run_ahead_where_invariants_are_not_checked(monkeypatch):
    for is_accelerated, is_checked in itertools.product((False, True), repeat=2):
        with monkeypatch.context() as patch:
            if is_accelerated:
                patch.setattr("jaxspec.engine.executor._is_accelerated", lambda home: True)
            made = make_executor(engines.target(), batch_size=1, check_invariants=is_checked)
        assert made.runs_ahead == (is_accelerated and not is_checked)


# ---- draft_length="auto"


@pytest.fixture(scope="module")
def adaptive():
    target = engines.target("text")
    return Engine(
        target,
        DraftModel(stranger(target)),
        draft_length="auto",
        verify_length=3,
        batch_size=2,
        max_length=256,
        rounds_per_sync=4,
    )


def controller():
    short = {RoundKind(n, 0): 1e-3 * (1 + 0.1 * n) for n in range(3)}
    times = RoundTimes(
        short_context=16, long_context=200, short_s=short, long_s=short, chunk_s=1e-4,
        call_s=0.0, noise=0.05, error=0.05, covariance=np.eye(len(short)),
    )  # fmt: skip
    return DraftLengthController(times)


def watched(adaptive, monkeypatch):
    """Completions of a list; what is noted of their rounds, by row; and of every call whether it
    runs ahead, whether it is timed, and how many are in flight before it."""
    adaptive.adaptive.controller = chooser = controller()
    before_rounds, note = adaptive.adaptive.before_rounds, chooser.note
    calls, row_rounds = [], []

    def noted_rounds(tickets, num_rounds, *, is_ahead=False):
        choice = before_rounds(tickets, num_rounds, is_ahead=is_ahead)
        is_timed = adaptive.adaptive._started_s is not None
        calls.append((is_ahead, is_timed, len(adaptive._core._rounds)))
        return choice

    def noted(*, num_row_rounds, **more):
        row_rounds.append(num_row_rounds)
        note(num_row_rounds=num_row_rounds, **more)

    params = [dataclasses.replace(LONG, logprobs=None, max_tokens=160 - 40 * i) for i in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(adaptive.adaptive, "before_rounds", noted_rounds)
        patch.setattr(chooser, "note", noted)
        return adaptive.generate(PROMPTS[:2], params), row_rounds, calls


def test_auto_runs_ahead_unless_it_measures(adaptive, monkeypatch):
    """Outputs are those without; rounds that are timed start on an idle device, and are over
    before others start; and every round is noted once."""
    outputs = []
    for runs_ahead in (False, True):
        adaptive.reset()
        adaptive.executor.runs_ahead = runs_ahead
        done, row_rounds, calls = watched(adaptive, monkeypatch)
        outputs.append([one.token_ids for one in done])
        assert sum(row_rounds) == sum(one.acceptance.num_rounds for one in done)
        num_noted = sum(adaptive.adaptive.controller.num_rounds.values())
        assert num_noted <= adaptive._core.num_rounds <= num_noted + 4
        are_ahead, are_timed, in_flight = zip(*calls, strict=True)
        assert sum(are_ahead) > 10 if runs_ahead else not any(are_ahead)
        assert any(are_timed)
        for is_timed, here, later in zip(are_timed, in_flight, [*in_flight[1:], 0], strict=True):
            assert not is_timed or here == later == 0
    assert outputs[0] == outputs[1]
