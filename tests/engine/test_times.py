"""What a server asks of an engine: times, log-probabilities of pieces, places in the queue."""

from __future__ import annotations

import asyncio
import time

import engines
import pytest
import toy

from jaxspec import SamplingParams
from jaxspec.errors import QueueFullError, SettingError

PROMPT, OTHER = toy.prompts((20, 5))
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def engine():
    return engines.engine("toy", "ngram", max_queue=2, max_logprobs=3, rounds_per_piece=2)


async def read(stream):
    return [piece async for piece in stream]


def test_times_are_in_order_and_add_up_in_the_metrics(engine):
    before, start_s = engine.metrics(), time.monotonic()
    done = engine.generate([PROMPT, OTHER, OTHER], PARAMS)
    for one in done:
        times = one.times
        seen = [times.arrival_s, times.admitted_s, times.first_token_s, times.last_token_s]
        assert start_s <= seen[0]
        assert sorted([*seen, times.end_s]) == [*seen, times.end_s]
        assert "times" not in one.to_json()
    after = engine.metrics()
    assert after["num_prompt_tokens"] - before["num_prompt_tokens"] == 30
    assert after["num_by_finish_reason"]["length"] == 3 + before["num_by_finish_reason"].get(
        "length", 0
    )

    def grown(name, field):
        return after["latencies"][name][field] - before["latencies"][name][field]

    for name in after["latencies"]:
        number = sum(after["latencies"][name]["counts"]) - sum(before["latencies"][name]["counts"])
        assert number == (3 * 39 if name == "inter_token_latency_s" else 3)
    whole_s = sum(one.times.end_s - one.times.arrival_s for one in done)
    assert grown("e2e_latency_s", "sum") == pytest.approx(whole_s)
    parts = ("queue_time_s", "prefill_time_s", "decode_time_s")
    assert sum(grown(name, "sum") for name in parts) == pytest.approx(whole_s, rel=0.2)


def test_what_never_had_a_row_is_counted(engine):
    engine.submit(PROMPT, PARAMS, timeout_s=1e-6)
    [late] = engine.step()
    assert late.times.admitted_s is None
    assert engine.metrics()["num_by_finish_reason"]["timeout"] == 1
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    engine.submit(PROMPT, long)
    engine.submit(PROMPT, long)
    now = engine.metrics()
    assert (now["num_running"], now["num_waiting"]) == (0, 2)
    engine.step()
    assert engine.metrics()["num_running"] == 2
    while engine.has_unfinished:
        engine.step()


def test_pieces_have_their_log_probabilities(engine):
    [expected] = engine.generate([PROMPT], PARAMS)
    pieces = list(engine.stream(PROMPT, PARAMS))
    assert [each for piece in pieces for each in piece.logprobs] == list(expected.logprobs)
    for piece in pieces:
        assert len(piece.logprobs) == len(piece.token_ids)
    assert all(piece.logprobs is None for piece in engine.stream(PROMPT, {"max_tokens": 9}))


def test_rounds_per_piece(engine):
    longest = max(len(piece.token_ids) for piece in engine.stream(PROMPT, PARAMS))
    assert longest <= 2 * engine.shape.verify_length
    plain = engine.stream(PROMPT, PARAMS, speculate=False)
    assert max(len(piece.token_ids) for piece in plain) == 2
    with pytest.raises(SettingError, match="rounds_per_piece 0 was given; it must be at least 1"):
        engines.engine("toy", "ngram", rounds_per_piece=0)


@pytest.mark.parametrize("is_driven", [False, True])
def test_a_place_in_the_queue_is_not_waited_for(engine, is_driven):
    async def main():
        streams, is_full = [], False
        while not is_full:
            try:
                streams.append(engine.astream(OTHER, PARAMS, wait=False))
            except QueueFullError:
                is_full = True
        assert 2 <= len(streams) < 20
        return await asyncio.gather(*map(read, streams))

    [expected] = engine.generate([OTHER], PARAMS)
    if is_driven:
        with engine.driven():
            found = asyncio.run(main())
    else:
        found = asyncio.run(main())
    assert all(pieces[-1].completion.token_ids == expected.token_ids for pieces in found)


@pytest.mark.parametrize("is_driven", [False, True])
def test_turns_of_a_session_in_asyncio(engine, is_driven):
    async def main():
        with engine.session(reread=True) as session:
            await read(session.astream(PROMPT, PARAMS))
            prompt = [*session.token_ids, 1, 2]
            for astream in (
                session.astream(prompt, PARAMS, wait=False),
                engine.astream([*prompt, 3], PARAMS, session=session),
            ):
                done = (await read(astream))[-1].completion
                assert done.num_reused_tokens > 0
                [expected] = await asyncio.to_thread(
                    engine.generate, [list(done.prompt_token_ids)], PARAMS
                )
                assert done.token_ids == expected.token_ids

    if is_driven:
        with engine.driven():
            asyncio.run(main())
    else:
        asyncio.run(main())
