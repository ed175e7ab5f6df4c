"""Nothing is left of many requests, of which some clients leave and some run out of time."""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import random
import re
import threading
import urllib.request

import psutil
import pytest
from served import MODEL, served, until

import jaxspec
from jaxspec import DraftModel, Engine
from jaxspec.engine.queue import Ticket
from jaxspec.requests.prompts import sample_prompts
from jaxspec.serving.http.generation import Generation

NUM_CLIENTS = 24
TIMEOUT_S = 0.5
# What a client does: reads the response, whole or as a stream; leaves as soon as it has sent the
# request; leaves within some milliseconds, about when the first token comes; leaves a stream after
# its first token; or asks for more tokens than there is time for.
WAYS = ["plain"] * 7 + ["stream"] * 7 + ["late"] * 2 + ["before", "during", "during", "after"]
LEAVING = ("before", "during", "after")
# What the process may grow by while the last four tenths of the requests are answered, over its
# size before, when all caches are full. Of 10,000 these are 4,000, so it is 1.3 kB of each: less
# than its body takes as Python's objects. Single requests that are kept are found by their type.
MOST_GROWTH_MIB = 5
MANY = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def engine():
    target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
    return Engine(target, DraftModel(draft), batch_size=8, max_length=1024, draft_length=3)


def body_of(way, draw):
    """A request of a few tokens, or of many."""
    return {
        "model": MODEL,
        "prompt": draw.choice(PROMPTS),
        "max_tokens": 960 if way == "late" else draw.randint(1, 4),
        "temperature": draw.choice([0, 1]),
        "seed": draw.randint(0, 9),
        "stream": way in ("stream", "after") or (way != "plain" and draw.random() < 0.5),
        "ignore_eos": way == "late",
        "return_token_ids": True,
    }


PROMPTS = [line.prompt[:40] for line in sample_prompts()[:12]]


async def ask(port, way, draw):
    """The finish reason of a response and the number of its tokens, or None of a client that has
    gone away. Each has a connection of its own, which leaving closes."""
    body = body_of(way, draw)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + content)
        await writer.drain()
        if way == "during":
            await asyncio.sleep(draw.uniform(0, 0.05))
        elif way == "after":
            await reader.readuntil(b"\ndata: ")
        if way in LEAVING:
            return None
        response = (await reader.read()).decode()
    finally:
        writer.close()
    assert response.startswith("HTTP/1.1 200"), response[:300]
    [*_, reason] = re.findall(r'"finish_reason": ?"(\w+)"', response)
    ids = re.findall(r'[^_]token_ids": ?\[([\d, ]+)\]', response)
    return reason, sum(len(each.split(",")) for each in ids)


def answer(url, number, seed):
    """What became of `number` requests: the tokens of each finish reason, and how many left."""
    draw = random.Random(seed)
    ways = [draw.choice(WAYS) for _ in range(number)]

    async def ask_all():
        places = asyncio.Semaphore(NUM_CLIENTS)

        async def one(way):
            async with places:
                return await ask(int(url.rsplit(":", 1)[1]), way, draw)

        return await asyncio.gather(*map(one, ways))

    found = asyncio.run(ask_all())
    assert [each is None for each in found] == [way in LEAVING for way in ways]
    return [each for each in found if each is not None]


def counters(engine, url):
    """An engine's counters, which are those of `/metrics`: requests by finish reason, emitted
    tokens, and the number of latencies."""
    metrics = engine.metrics()
    shown = urllib.request.urlopen(url + "/metrics").read().decode()
    ended = dict(re.findall(r'request_success_total{.*finished_reason="([\w ]+)".*} (.*)', shown))
    assert {reason: float(n) for reason, n in ended.items()} == metrics["num_by_finish_reason"]
    [emitted] = re.findall(r"vllm:generation_tokens_total{.*} (.*)", shown)
    assert float(emitted) == metrics["num_emitted_tokens"]
    found = collections.Counter(metrics["num_by_finish_reason"])
    found["tokens"] = metrics["num_emitted_tokens"]
    found["latencies"] = sum(metrics["latencies"]["e2e_latency_s"]["counts"])
    assert metrics["num_running"] == metrics["num_waiting"] == 0
    return found


def left(server):
    """What a server holds: tasks of its event loop, threads, requests."""
    gc.collect()
    kinds = collections.Counter(type(each) for each in gc.get_objects())
    tasks = asyncio.all_tasks(server._event_loop)
    return {
        "tasks": sorted(task.get_coro().__qualname__ for task in tasks),
        "threads": threading.active_count(),
        "requests": kinds[Ticket] + kinds[Generation],
    }


def soak(engine, number):
    """Answers the requests in ten parts; checks that nothing is left of the last nine."""
    answered, sizes = [], []
    with served(engine, request_timeout_s=TIMEOUT_S) as (url, server):
        answer(url, number // 10, seed=0)
        assert until(lambda: not engine.queue.unfinished)
        before, held = counters(engine, url), left(server)
        for part in range(1, 10):
            answered += answer(url, number // 10, seed=part)
            assert until(lambda: not engine.queue.unfinished)
            sizes.append(psutil.Process().memory_info().rss / 2**20)
        assert until(lambda: left(server)["tasks"] == held["tasks"])
        after, now = counters(engine, url), left(server)

    number -= number // 10
    ended = after - before
    print(f"{number} requests, {dict(ended)}, left {now}, MiB {[round(size, 1) for size in sizes]}")
    assert engine.queue.tickets_by_row == {}
    assert now["requests"] == held["requests"] == 0, "requests are kept"
    assert now["threads"] <= held["threads"] + NUM_CLIENTS  # those of asyncio.to_thread
    assert max(sizes[5:]) - max(sizes[:5]) < MOST_GROWTH_MIB

    tokens, latencies = ended.pop("tokens"), ended.pop("latencies")
    assert latencies == ended.total()  # every request that was queued has ended once
    num_left = number - len(answered)
    assert 0.15 * number < num_left < 0.25 * number
    assert len(answered) <= latencies <= number  # some leave before their request is queued
    assert ended["cancelled"] > 0.02 * number
    reasons = collections.Counter(reason for reason, _ in answered)
    for ours, theirs in (("length", "length"), ("stop", "stop"), ("timeout", "abort")):
        assert 0 <= ended[ours] - reasons[theirs] <= num_left
    assert reasons["abort"] > 0
    assert sum(number for _, number in answered) <= tokens


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=MANY)])
def test_nothing_is_left_of_many_requests(engine, number):
    soak(engine, number)


@pytest.mark.system
def test_requests_that_are_kept_are_seen(engine, monkeypatch):
    kept, begin = [], Generation.begin

    async def keep(generation):
        kept.append(generation)
        await begin(generation)

    monkeypatch.setattr(Generation, "begin", keep)
    with pytest.raises(AssertionError, match="requests are kept"):
        soak(engine, 40)
