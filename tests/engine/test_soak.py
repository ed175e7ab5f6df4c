"""Ten thousand requests with random arrivals, cancellations, limits and lengths, on the embedded
pair: every output that of the request alone, nothing lost or given twice, no memory that grows."""

from __future__ import annotations

import collections
import gc
import random

import jax
import psutil
import pytest

import jaxspec
from jaxspec import SamplingParams
from jaxspec.errors import QueueFullError

pytestmark = pytest.mark.as_shipped

NUM_REQUESTS = 10_000
TEXTS = ("Once upon a time", "def main():", "The sum of 3 and 4 is", "To install", "a")


def variants(rng):
    """Prompts and parameters, few enough to be decoded alone as well."""
    for index in range(48):
        sampled = rng.random() < 0.4
        yield (
            TEXTS[index % len(TEXTS)] * rng.randint(1, 3),
            SamplingParams(
                max_tokens=rng.choice((1, 2, 5, 9, 20)),
                temperature=0.8 if sampled else 0.0,
                top_p=rng.choice((1.0, 0.9)) if sampled else 1.0,
                seed=index if sampled else None,
                ignore_eos=rng.random() < 0.5,
            ),
            rng.choice((None, None, 1, 3)),
        )


def soak(engine, num_requests, *, seed=0):
    """Runs the requests; returns (expected, found, cancelled, live arrays and bytes over time)."""
    rng = random.Random(seed)
    chosen = list(variants(rng))
    alone = []
    for prompt, params, draft_length in chosen:
        [completion] = engine.generate([prompt], params, draft_length=draft_length)
        alone.append(completion.token_ids)
    expected, found, cancelled = {}, collections.defaultdict(list), set()
    unfinished, footprints = [], []
    process = psutil.Process()
    num_submitted = 0
    while num_submitted < num_requests or engine.has_unfinished:
        for _ in range(rng.choice((0, 1, 1, 2, 30))):  # arrivals come in bursts
            if num_submitted == num_requests:
                break
            index = rng.randrange(len(chosen))
            prompt, params, draft_length = chosen[index]
            try:
                name = engine.submit(prompt, params, draft_length=draft_length)
            except QueueFullError:
                break
            expected[name] = alone[index]
            unfinished.append(name)
            num_submitted += 1
        if unfinished and rng.random() < 0.1:
            name = rng.choice(unfinished)
            engine.cancel(name)
            cancelled.add(name)
        for completion in engine.step():
            found[completion.request_id].append(completion)
            unfinished.remove(completion.request_id)
        if num_submitted // (num_requests // 5) > len(footprints):
            gc.collect()
            footprints.append((len(jax.live_arrays()), process.memory_info().rss))
    return expected, found, cancelled, footprints


def check(expected, found, cancelled):
    assert set(found) == set(expected), "requests were lost"
    assert all(len(completions) == 1 for completions in found.values()), "or given twice"
    for name, [completion] in found.items():
        if completion.stop_reason == "cancelled":
            assert name in cancelled
            assert completion.token_ids == expected[name][: len(completion.token_ids)]
        else:
            assert completion.token_ids == expected[name], name


@pytest.fixture(scope="module")
def engine():
    target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
    return jaxspec.Engine(
        target,
        jaxspec.DraftModel(draft),
        draft_length=3,
        batch_size=8,
        max_length=128,
        prefill_chunk=32,
        max_queue=64,
    )


@pytest.mark.slow
def test_ten_thousand_requests(engine):
    expected, found, cancelled, footprints = soak(engine, NUM_REQUESTS)
    assert len(expected) == NUM_REQUESTS
    check(expected, found, cancelled)
    num_cut = sum(c.stop_reason == "cancelled" for [c] in found.values())
    print(f"{NUM_REQUESTS} requests, {num_cut} cancelled, (arrays, bytes): {footprints}")
    assert num_cut > NUM_REQUESTS / 200
    arrays, resident = zip(*footprints, strict=True)
    assert arrays[-1] <= max(arrays[:-1]), arrays  # it may dip, and comes back to no more
    assert resident[-1] - resident[0] < 32 * 2**20, resident
    counts = engine.executor.compile_counts()
    assert counts["run"] == counts["prefill"] == 1


def test_the_check_sees_what_is_lost_given_twice_or_of_another_request(engine):
    expected, found, cancelled, _ = soak(engine, 60, seed=1)
    check(expected, found, cancelled)
    whole = [name for name, [c] in found.items() if c.stop_reason != "cancelled"]
    other = next(name for name in whole if expected[name] != expected[whole[0]])
    broken = {
        "lost": {name: c for name, c in found.items() if name != whole[0]},
        "twice": dict(found) | {whole[0]: found[whole[0]] * 2},
        "another's": dict(found) | {whole[0]: found[other]},
    }
    for changed in broken.values():
        with pytest.raises(AssertionError):
            check(expected, changed, cancelled)
