"""Prompts of submitted requests: idle rows are filled soon, and a stream waits for a chunk only."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest
import toy

from jaxspec import Engine, NGram, SamplingParams, load_model
from jaxspec.engine import core
from jaxspec.models import prefill

NUM_REQUESTS, BATCH_SIZE, CHUNK = 24, 8, prefill.CHUNK
PROMPTS = toy.prompts([4 * CHUNK + 1] * NUM_REQUESTS)  # four chunks each
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    """Decodes plainly, so that every request takes as many rounds as it emits tokens."""
    return Engine(toy.model(num_layers=1), batch_size=BATCH_SIZE, max_length=128)


def decode(engine, prompts, params):
    """Submits all at once. Returns the rounds, the mean of running rows, the median of rounds until
    a request's first token, and the completions in order."""

    def counted():
        schedule = engine.executor.fetch("schedule").schedule
        return np.array([np.sum(schedule.num_rounds), np.sum(schedule.num_rows)])

    before = counted()
    names = [engine.submit(prompt, params) for prompt in prompts]
    first, done = {}, {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
        num_rounds = int((counted() - before)[0])
        for ticket in engine.queue.tickets_by_row.values():
            if ticket.acceptance.num_emitted_tokens:
                first.setdefault(ticket.request.request_id, num_rounds)
        for name in done:
            first.setdefault(name, num_rounds)
    num_rounds, num_rows = (counted() - before).tolist()
    median = statistics.median(first.values())
    return num_rounds, num_rows / num_rounds, median, [done[name] for name in names]


def test_submitted_requests_keep_the_batch_full(engine):
    num_rounds, num_running, first_token, completions = decode(engine, PROMPTS, PARAMS)
    expected = engine.generate(PROMPTS, PARAMS)
    assert [done.token_ids for done in completions] == [done.token_ids for done in expected]
    # A list takes 96 rounds. This load has a chunk to read for every 8 tokens.
    assert num_rounds <= 160
    assert num_running >= 4.8
    assert first_token <= 55


def test_the_check_above_sees_rows_that_starve(engine, monkeypatch):
    monkeypatch.setattr(core, "CHUNKS_PER_IDLE_ROW", 0)
    monkeypatch.setattr(core, "CHUNKS_OF_A_BURST", 0)
    num_rounds, num_running, first_token, _ = decode(engine, PROMPTS, PARAMS)
    assert num_rounds > 350
    assert num_running < 2
    assert first_token > 150


@pytest.fixture
def padded(monkeypatch):
    """An engine whose calls of two chunks compute their padding, as on a GPU."""
    monkeypatch.setattr(prefill, "chunks_per_call", lambda target: 2)
    target = dataclasses.replace(toy.model(num_layers=1), kernels="xla")
    return Engine(target, batch_size=BATCH_SIZE, max_length=128)


@pytest.mark.parametrize(("name", "num_calls"), [("engine", 4), ("padded", 2)])
def test_one_long_prompt_is_read_a_chunk_at_a_time_however_many_rows_are_idle(
    request, name, num_calls, monkeypatch
):
    engine = request.getfixturevalue(name)
    calls, programs = [], engine.executor.programs
    for name in ("prefill", "run"):
        real = programs[name]
        monkeypatch.setitem(
            programs, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))[1]
        )
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    calls.clear()
    engine.submit(PROMPTS[1], PARAMS)
    for _ in range(4):
        next(stream)
    assert calls == ["prefill", "run"] * num_calls + ["run"] * (4 - num_calls)
    stream.close()
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize(("num_chunks", "num_first"), [(1, 8), (4, 4)])
def test_requests_that_come_together_begin_together(engine, num_chunks, num_first):
    """Up to 16 chunks of them are prefilled before the first round of an idle engine."""
    for prompt in toy.prompts([num_chunks * CHUNK + 1] * BATCH_SIZE):
        engine.submit(prompt, dataclasses.replace(PARAMS, max_tokens=64))
    engine.step()
    tickets = engine.queue.tickets_by_row.values()
    assert sum(ticket.acceptance.num_emitted_tokens > 0 for ticket in tickets) == num_first
    while engine.has_unfinished:
        engine.step()


def test_the_first_tokens_of_a_stream_come_after_one_round(engine):
    stream = engine.stream(PROMPTS[0], dataclasses.replace(PARAMS, max_tokens=20))
    assert [len(piece.token_ids) for piece in stream] == [1, 4, 4, 4, 4, 3]


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one(engine):
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    long, *shorts = toy.prompts([6 * CHUNK + 1, CHUNK + 1, CHUNK + 1, CHUNK + 1])
    names = [engine.submit(prompt, PARAMS) for prompt in (long, *shorts)]
    order = []
    for _ in range(8):
        next(stream)
        for ticket in engine.queue.tickets_by_row.values():
            if (name := ticket.request.request_id) in names and not ticket.is_prefilling:
                order += [name] if name not in order else []
    # The long one is read in every second chunk, and no row is late by much.
    assert order == [*names[1:], names[0]]
    stream.close()
    while engine.has_unfinished:
        engine.step()


@pytest.mark.slow
@pytest.mark.as_shipped
def test_forty_eight_requests_of_512_tokens():
    target = load_model("demo-target", dtype="float32")
    engine = Engine(target, NGram(), draft_length=4, batch_size=16, max_length=592)
    random = np.random.default_rng(0)
    prompts = [random.integers(5, target.vocab_size - 5, 512).tolist() for _ in range(48)]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    num_rounds, num_running, first_token, completions = decode(engine, prompts, params)
    assert num_rounds <= 150
    assert num_running >= 11
    assert first_token <= 60
    expected = engine.generate(prompts, params)
    assert [done.token_ids for done in completions] == [done.token_ids for done in expected]
