"""Responses to the `openai` client, at random times, are what `Engine.generate` returns."""

from __future__ import annotations

import asyncio
import random

import heads
import openai
import pytest
from served import MODEL, served, until

import jaxspec
from jaxspec import DraftModel, Engine, NGram, SamplingParams
from jaxspec.requests.prompts import sample_prompts
from jaxspec.serving.http import generation

SHAPE = {"batch_size": 4, "max_length": 256, "draft_length": 3, "max_logprobs": 3}
DRAFTERS = {
    "none": lambda target: None,
    "draft model": lambda target: DraftModel(jaxspec.load_model("demo-draft")),
    "ngram": lambda target: NGram(1, 3),
}
REFUSED = "refused"  # by a server that ends
LONG = {"max_tokens": 128, "n": 1, "stop": None}  # more than a piece of a stream


def requests(number: int, seed: int):
    """Bodies of mixed requests, each with what its client does."""
    draw = random.Random(seed)
    prompts = [line.prompt[:90] for line in sample_prompts()]
    for index in range(number):
        body = {
            "prompt": draw.choice(prompts),
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice([0, 0, 0.7, 1.3]),
            "seed": 1000 * index,
            "n": draw.choice([1, 1, 1, 3]),
            "top_p": draw.choice([1.0, 0.9]),
            "presence_penalty": draw.choice([0, 0, 0.5]),
            "logprobs": draw.choice([None, None, 0, 2]),
            "stop": draw.choice([None, None, [" the", "\n"]]),
        }
        yield body, draw.choice(["plain", "stream", "stream", "cancel"]), draw.random()


def expected_of(engine, bodies):
    """For each body the completions of its choices."""
    params = []
    for body in bodies:
        fields = {name: value for name, value in body.items() if value is not None}
        del fields["prompt"]
        if body["temperature"] == 0:
            del fields["n"]
        params.append(SamplingParams(**fields))
    found = iter(engine.generate([body["prompt"] for body in bodies], params, speculate=False))
    lists = [[next(found) for _ in range(one.n)] for one in params]
    return [
        each * body["n"] if body["temperature"] == 0 else each
        for each, body in zip(lists, bodies, strict=True)
    ]


def logprobs_of(choice):
    return choice.logprobs and choice.logprobs.token_logprobs


async def ask(client, body, way, delay_s, on_chunk=lambda: None):
    """The choices of a response as `(text, token ids, log-probabilities, reason)`; None if the
    client has gone away."""
    options = {**body, "model": MODEL, "extra_body": {"return_token_ids": True}}
    if way == "plain":
        done = await client.completions.create(**options)
        return [
            (
                one.text,
                one.token_ids,
                one.logprobs and one.logprobs.token_logprobs,
                one.finish_reason,
            )
            for one in sorted(done.choices, key=lambda one: one.index)
        ]
    found = {index: ["", [], None, None] for index in range(body["n"])}
    stream = await client.completions.create(**options, stream=True)
    async for chunk in stream:
        on_chunk()
        for one in chunk.choices:
            choice = found[one.index]
            choice[0] += one.text
            choice[1] += one.token_ids
            if one.logprobs is not None:
                choice[2] = (choice[2] or []) + logprobs_of(one)
            choice[3] = one.finish_reason or choice[3]
        if way == "cancel" and delay_s < 0.5:
            await stream.close()
            return None
    return [tuple(choice) for choice in found.values()]


def check(found, completions):
    for choice, one in zip(found, completions, strict=True):
        logprobs = one.logprobs and [
            of_token[token] for token, of_token in zip(one.token_ids, one.logprobs, strict=True)
        ]
        expected = (one.text, list(one.token_ids), logprobs and list(logprobs), one.finish_reason)
        assert choice == expected


def num_ended(engine):
    return sum(engine.metrics()["num_by_finish_reason"].values())


def compare(engine, number, *, num_clients=16, seed=0, drains=False):
    """Sends requests at random times; compares each finished response, and returns what became of
    all. If it `drains`, one more request tells the server to end, after its own first token and
    while others run and some have not been sent."""
    cases = list(requests(number, seed))
    if drains:
        cases.append(({**cases[0][0], **LONG}, "drain", 0.0))
    expected = expected_of(engine, [body for body, _, _ in cases])

    async def ask_all(url):
        places, num_answered = asyncio.Semaphore(num_clients), 0
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:

            async def one(case):
                nonlocal num_answered
                await asyncio.sleep(3 * case[-1])
                async with places:
                    try:
                        return await ask(client, *case)
                    except Exception:  # 503, or the server has closed the connection
                        if not (drains and server.service.unavailable):
                            raise
                        return REFUSED
                    finally:
                        num_answered += 1

            async def drain(case):
                while num_answered < number - max(number // 5, 5 * num_clients // 2):
                    await asyncio.sleep(0.01)
                return await ask(client, *case, on_chunk=server.drain)

            return await asyncio.gather(
                *(drain(case) if case[1] == "drain" else one(case) for case in cases)
            )

    num_before = num_ended(engine)
    with served(engine, drain_timeout_s=300) as (url, server):
        found = asyncio.run(ask_all(url))
        assert until(lambda: not engine.queue.unfinished)
    # Of what was refused nothing was decoded: no response of the engine's was lost.
    taken = [case for case, one in zip(cases, found, strict=True) if one != REFUSED]
    num_taken = sum(body["n"] if body["temperature"] else 1 for body, _, _ in taken)
    assert num_ended(engine) - num_before == num_taken
    finished = [pair for pair in zip(found, expected, strict=True) if isinstance(pair[0], list)]
    assert len(finished) > number / 2
    for choices, completions in finished:
        check(choices, completions)
    return found


def make_engine(drafter):
    target = jaxspec.load_model("demo-target")
    if drafter == "heads":
        return Engine(target, heads.random_heads("medusa", target), **SHAPE)
    settings = dict(SHAPE)
    if drafter == "none":
        del settings["draft_length"]
    return Engine(target, DRAFTERS[drafter](target), **settings)


@pytest.fixture(scope="module")
def engine():
    return make_engine("draft model")


def test_a_hundred_responses_are_those_of_the_engine(engine):
    compare(engine, 100)


@pytest.mark.slow
def test_one_seed_for_all_choices_is_seen(engine, monkeypatch):
    monkeypatch.setattr(
        generation, "each_sample", lambda p: [SamplingParams(**{**vars(p), "n": 1})] * p.n
    )
    with pytest.raises(AssertionError):
        compare(engine, 12)


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [1, 8, 64])
@pytest.mark.parametrize("drafter", ["none", "ngram", "heads", "draft model"])
def test_drafters_and_numbers_of_clients(drafter, num_clients):
    """With the hundred above 2,140 requests, some of which meet a server that ends."""
    number = 170
    found = compare(
        make_engine(drafter), number, num_clients=num_clients, seed=num_clients, drains=True
    )
    assert found.count(REFUSED) > 0
    assert isinstance(found[-1], list)  # it was running when the server was told to end
