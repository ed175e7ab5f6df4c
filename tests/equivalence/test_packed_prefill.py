"""A prompt's KV and output do not depend on the calls that its chunks were prefilled in."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from heads import random_heads

from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.engine.executor import Executor
from jaxspec.models import decoder, prefill
from jaxspec.requests.requests import make_requests

CHUNK, SLOTS = prefill.CHUNK, 3
PROMPTS = toy.prompts((70, 2, 33, 47, 16))
PARAMS = [
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.7 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
CHUNKS = [(row, at) for row, ids in enumerate(PROMPTS) for at in range(0, len(ids) - 1, CHUNK)]


def shuffled(seed):
    """The chunks in another order, which is right for each row."""
    rows = [row for row, _ in CHUNKS]
    random.Random(seed).shuffle(rows)
    rest = {row: iter([chunk for chunk in CHUNKS if chunk[0] == row]) for row in rows}
    return [next(rest[row]) for row in rows]


PACKINGS = {
    "one by one": [[chunk] for chunk in CHUNKS],
    "in order": [CHUNKS],
    "the last row first": [sorted(CHUNKS, key=lambda chunk: (-chunk[0], chunk[1]))],
    "round robin": [sorted(CHUNKS, key=lambda chunk: chunk[::-1])],
    "shuffled": [shuffled(0)],
    "in two parts": [shuffled(1)[:4], shuffled(1)[4:]],
}


def made(target, drafter=None, *, slots=SLOTS, **settings) -> Executor:
    """An executor of so many chunks a call."""
    config = EngineConfig(batch_size=len(PROMPTS), max_length=128, **settings)
    parts = make_parts(target, drafter, config)
    shape = dataclasses.replace(parts.shape, chunks_per_call=slots)
    return Executor(dataclasses.replace(parts, shape=shape))


def bits_of(executor, packing, *, is_drafter_later: bool = False) -> list[np.ndarray]:
    """Everything of the drafter's (its KV, if it has any) and KV of the prompts, then outputs and
    their KV."""
    executor.reset()
    requests = make_requests(PROMPTS, PARAMS, executor.target, longest=executor.longest_prompt)
    for row, request in enumerate(requests):
        executor.admit(row, request, draft_length=3, arrival=row)
    for chunks in packing:
        executor.prefill(chunks, target_only=is_drafter_later)
    if is_drafter_later:
        executor.catch_up(dict(enumerate(executor.lags().tolist())))
    rows = range(len(PROMPTS))
    found = [*map(np.array, jax.tree.leaves(executor.state.drafter))]  # the state is donated
    found += [bits for row in rows for bits in executor.committed_kv(row)]
    executor.run(20)
    state = executor.fetch("tokens", "num_committed")
    assert state.num_committed[: len(PROMPTS)].tolist() == [len(ids) + 9 for ids in PROMPTS]
    return [*found, state.tokens, *(bits for row in rows for bits in executor.committed_kv(row))]


def are_equal(one, other) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def draft_model(target):
    return DraftModel(toy.model(seed=1, dtype=target.dtype, kernels=target.kernels, num_layers=1))


DRAFTERS = {
    "draft model": draft_model,
    "clover": lambda target: random_heads("clover", target),
    "medusa": lambda target: random_heads("medusa", target),
}
CASES = [
    ("xla", "float32", None, "draft model"),
    ("xla", "bfloat16", "int8", "clover"),
    ("native", "float32", None, "clover"),
    ("native", "bfloat16", None, "draft model"),
    ("native", "bfloat16", "int8", "medusa"),
]


@pytest.mark.parametrize(("kernels", "dtype", "kv_dtype", "drafter"), CASES)
def test_no_bit_depends_on_the_packing(kernels, dtype, kv_dtype, drafter):
    target = toy.model(dtype=dtype, kernels=kernels, kv_dtype=kv_dtype)
    drafter = DRAFTERS[drafter](target)
    executor = made(target, drafter, draft_length=3)
    first = bits_of(executor, PACKINGS["one by one"])
    for name, packing in PACKINGS.items():
        assert are_equal(bits_of(executor, packing), first), name
    assert are_equal(bits_of(executor, PACKINGS["shuffled"], is_drafter_later=True), first)
    assert executor.compile_counts()["prefill"] == 1
    if kernels == "native":  # nor on how many chunks a call has
        alone = made(target, drafter, slots=1, draft_length=3)
        assert are_equal(bits_of(alone, PACKINGS["in order"]), first)


@pytest.mark.parametrize("whose", ["target", "draft model"])
def test_bits_that_depend_on_the_place_in_a_call_are_seen(whose, monkeypatch):
    target, draft = toy.model(num_layers=1), toy.model(seed=1, width=24, num_layers=1)
    width = (target if whose == "target" else draft).config.width
    real = decoder.embed

    def embed(params, tokens):
        hidden = real(params, tokens)
        place = jnp.arange(tokens.shape[0], dtype=jnp.float32)[:, None, None]
        return hidden * (1 + place * 2.0**-20) if hidden.shape[2] == width else hidden

    monkeypatch.setattr(decoder, "embed", embed)
    executor = made(target, DraftModel(draft), draft_length=3)
    first = bits_of(executor, PACKINGS["one by one"])
    other = bits_of(executor, PACKINGS["in order"])
    assert not are_equal(other, first)
    num_leaves = len(jax.tree.leaves(executor.state.drafter))
    is_same = are_equal(other[:num_leaves], first[:num_leaves])
    assert is_same == (whose == "target")  # what the draft model reads is not the target's


def calls_of(engine, monkeypatch):
    """The rows of each chunk of each prefill call from now on."""
    calls, real = [], engine.executor.programs["prefill"]

    def counted(params, state, rows, starts):
        calls.append(rows.tolist())
        return real(params, state, rows, starts)

    monkeypatch.setitem(engine.executor.programs, "prefill", counted)
    return calls


def test_a_call_takes_chunks_of_several_prompts(monkeypatch):
    target = toy.model(kernels="native", num_layers=1)
    engine = Engine(target, batch_size=5, max_length=128)
    assert engine.shape.chunks_per_call == prefill.CHUNKS_PER_CALL == 4
    calls = calls_of(engine, monkeypatch)
    engine.generate(PROMPTS, PARAMS)
    # The oldest prompt and the one with the fewest tokens left take turns.
    assert calls == [[0, 1, 0, 4], [0, 0, 0, 2], [2, 3, 3, 3]]


def test_xla_on_a_cpu_prefills_chunk_by_chunk(monkeypatch):
    engine = Engine(toy.model(num_layers=1), batch_size=5, max_length=128)
    calls = calls_of(engine, monkeypatch)
    engine.generate(PROMPTS, PARAMS)
    assert calls == [[row] for row in (0, 1, 0, 4, 0, 0, 0, 2, 2, 3, 3, 3)]


def test_a_model_of_another_device_fills_it():
    assert prefill.chunks_per_call(toy.model()) == 1
    on_gpu = dataclasses.replace(toy.model(), platform="gpu")
    assert prefill.chunks_per_call(on_gpu) == prefill.CHUNKS_PER_CALL


def test_a_stream_waits_for_as_many_chunks_as_before(monkeypatch):
    target = toy.model(kernels="native", num_layers=1)
    engine = Engine(target, batch_size=3, max_length=128)
    stream = engine.stream(PROMPTS[1], SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    calls = calls_of(engine, monkeypatch)
    for prompt in (PROMPTS[0], PROMPTS[3]):
        engine.submit(prompt, PARAMS[0])
    engine.step()  # two idle rows: one chunk, and two for the second row
    assert [sum(row >= 0 for row in rows) for rows in calls] == [3]
    stream.close()
    while engine.has_unfinished:
        engine.step()
    assert sum(row >= 0 for rows in calls for row in rows) == 5 + 3
