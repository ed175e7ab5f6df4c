"""How fast servers with OpenAI's routes answer, beside an engine in this process.

    python docs/recipes/load.py TARGET NAME=http://127.0.0.1:8000/v1 [NAME=URL ...] > load.json

Each server must serve TARGET under that name. In turns, each server answers the same greedy
requests, streamed, to so many clients at a time; and `Engine.generate` decodes the same list, as
many at a time. Needs the package openai. `CLIENTS`, `TURNS`, `MAX_TOKENS`, and the engine's `DTYPE`
and `BATCH_SIZE`, which should be those of the servers, are environment variables.
"""

import asyncio
import os
import statistics
import sys
import time

import numpy as np
import openai

import jaxspec
from jaxspec.requests.prompts import sample_prompts
from jaxspec.runtime.documents import document_text, provenance

CLIENTS = [int(number) for number in os.environ.get("CLIENTS", "1 4 8 32").split()]
TURNS = int(os.environ.get("TURNS", "5"))
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "32"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
DTYPE = os.environ.get("DTYPE") or None  # default: the checkpoint's
PROMPTS = [line.prompt[:400] for line in sample_prompts()]


async def ask(client, target, prompt):
    """The number of tokens of a response, and when its pieces came, from the request on."""
    started_s, number, times_s = time.perf_counter(), 0, []
    stream = await client.completions.create(
        model=target,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            number = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].text:
            times_s.append(time.perf_counter() - started_s)
    return number, times_s


async def ask_all(url, target, prompts, num_clients):
    """One turn of a server: tokens per second, and the times of each response's pieces."""
    places = asyncio.Semaphore(num_clients)
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=600) as client:

        async def one(prompt):
            async with places:
                return await ask(client, target, prompt)

        started_s, cpu_s = time.perf_counter(), time.process_time()
        found = await asyncio.gather(*map(one, prompts))
        spent_s = time.perf_counter() - started_s
    return {
        "tokens_per_s": sum(number for number, _ in found) / spent_s,
        "client_cpu": (time.process_time() - cpu_s) / spent_s,
        "first_ms": [1e3 * times_s[0] for _, times_s in found if times_s],
        "gap_ms": [1e3 * gap for _, times_s in found for gap in np.diff(times_s)],
    }


def generate(engine, prompts, num_clients, max_tokens=MAX_TOKENS):
    """One turn of the engine: tokens per second."""
    at_once = num_clients if num_clients < BATCH_SIZE else len(prompts)
    started_s, number = time.perf_counter(), 0
    for start in range(0, len(prompts), at_once):
        done = engine.generate(prompts[start : start + at_once], {"max_tokens": max_tokens})
        number += sum(len(one.token_ids) for one in done)
    return {"tokens_per_s": number / (time.perf_counter() - started_s)}


def summary(turns, engine_turns):
    """The medians of a server's turns, and of the ratios to the engine's turns beside them."""
    pairs = zip(turns, engine_turns, strict=True)
    ratios = [one["tokens_per_s"] / beside["tokens_per_s"] for one, beside in pairs]
    found = {"ratio": statistics.median(ratios), "ratios": ratios}
    for name in ("tokens_per_s", "client_cpu"):
        found[name] = statistics.median(turn[name] for turn in turns)
    for name in ("first_ms", "gap_ms"):
        every = [value for turn in turns for value in turn[name]]
        found[f"{name}_p50"], found[f"{name}_p99"] = np.percentile(every, [50, 99]).tolist()
    return found


def measure(engine, target, servers, num_clients):
    """The rows of one number of clients."""
    prompts = PROMPTS[: min(2 * num_clients, 32)]
    turns = {name: [] for name in servers}
    engine_turns, prefills, loads = [], [], []
    for turn in range(TURNS + 1):  # the first is not counted
        order = list(servers.items())
        for name, url in order if turn % 2 else order[::-1]:
            turns[name].append(asyncio.run(ask_all(url, target, prompts, num_clients)))
        engine_turns.append(generate(engine, prompts, num_clients))
        prefills.append(1e3 / generate(engine, prompts[:1], 1, max_tokens=1)["tokens_per_s"])
        loads.append(os.getloadavg()[0])
        print(f"{num_clients} clients, turn {turn} of {TURNS}", file=sys.stderr)
    beside = {"clients": num_clients, "requests": len(prompts), "load_average": max(loads)}
    alone = {
        "tokens_per_s": statistics.median(turn["tokens_per_s"] for turn in engine_turns[1:]),
        "prefill_ms": statistics.median(prefills[1:]),
    }
    rows = [{**beside, "who": "Engine.generate", **alone}]
    for name in servers:
        rows.append({**beside, "who": name, **summary(turns[name][1:], engine_turns[1:])})
    print(*rows, sep="\n", file=sys.stderr)
    return rows


def main(target, *named):
    """Prints the document."""
    servers = dict(each.split("=", 1) for each in named)
    model = jaxspec.load_model(target, dtype=DTYPE)
    engine = jaxspec.Engine(model, batch_size=BATCH_SIZE, max_length=1024)
    engine.warm_up()
    name, dtype = os.path.basename(target), str(model.params["embedding"].dtype)
    config = {"target": name, "dtype": dtype, "batch_size": BATCH_SIZE}
    config |= {"max_tokens": MAX_TOKENS, "turns": TURNS}
    rows = [row for number in CLIENTS for row in measure(engine, target, servers, number)]
    document = {"command": "docs/recipes/load.py", "config": config, "results": rows}
    print(document_text(document | provenance()))


if __name__ == "__main__":
    main(*sys.argv[1:])
