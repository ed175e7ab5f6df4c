"""Whatever is asked and whatever is drafted: plain decoding's output, and counts that add up.

Two engines are compiled once. Each example scripts the drafts: at which positions they are right,
and how many nodes a round that starts there proposes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import live_kv, poison

from jaxspec.cache import pages as kv
from jaxspec.decode import recorders
from jaxspec.decode import round as decoding
from jaxspec.drafters.base import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.schedulers import Static
from jaxspec.types import Draft, Origin, Window, chain_parents

pytestmark = pytest.mark.as_shipped

BATCH_SIZE, MAX_LENGTH, WINDOW, SIZE = 3, 128, 6, 17


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted(Drafter):
    """Proposes true tokens where the script says so, others elsewhere.

    Its parameters are arrays `[B, S]`, so another script compiles nothing: `truth` tokens by
    position, `is_right` by position, `length` of the draft of a round that starts there.
    """

    name: str = "scripted"

    @property
    def params(self):
        return script_params([], [], [])

    def propose(self, shape, params, state, rows):
        position = rows.num_committed[:, None] + jnp.arange(shape.num_nodes, dtype=jnp.int32)
        position = jnp.minimum(position, shape.max_length - 1)
        truth, is_right, length = (
            jnp.take_along_axis(params[name], position, axis=1)
            for name in ("truth", "is_right", "length")
        )
        draft = Draft(
            tokens=jnp.where(is_right, truth, (truth + 1) % shape.vocab_size),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.minimum(rows.draft_limit, length[:, 0]),
        )
        return draft, state


def script_params(truth, is_right, length):
    def table(rows, dtype):
        filled = np.zeros((BATCH_SIZE, MAX_LENGTH), dtype)
        for row, values in enumerate(rows):
            filled[row, : len(values)] = values[:MAX_LENGTH]
        return jnp.asarray(filled)

    return {
        "truth": table(truth, np.int32),
        "is_right": table(is_right, bool),
        "length": table(length, np.int32),
    }


def make_engine():
    target = toy.model(num_layers=1, vocab_size=SIZE)
    return Engine(
        target,
        Scripted(),
        scheduler=Static(),  # the script goes by rows
        draft_length=WINDOW - 1,
        batch_size=BATCH_SIZE,
        max_length=MAX_LENGTH,
        rounds_per_sync=5,
    )


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def witness(engine):
    """The window-1 loop, whose max_length ends where the other's does."""
    return Engine(engine.target, batch_size=BATCH_SIZE, max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def fresh_kv(engine):
    """Function from sequences to the KV that one forward pass over them leaves."""
    target = engine.target

    @jax.jit
    def read(tokens, length):
        positions = jnp.broadcast_to(jnp.arange(MAX_LENGTH, dtype=jnp.int32), tokens.shape)
        window = Window(
            start=jnp.zeros((BATCH_SIZE,), jnp.int32),
            positions=positions,
            slots=jnp.where(positions < length[:, None] - 1, positions, -1),
        )
        cache = target.init_cache(BATCH_SIZE, MAX_LENGTH)
        _, cache = target.forward(target.params, tokens, window, cache)
        return [
            kv.read_slots(layer, cache.table, positions, target.dtype) for layer in cache.layers
        ]

    def of(sequences):
        tokens = np.zeros((BATCH_SIZE, MAX_LENGTH), np.int32)
        length = np.ones((BATCH_SIZE,), np.int32)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)], length[row] = sequence, len(sequence)
        is_live = np.arange(MAX_LENGTH) < length[:, None] - 1
        found = [values for layer in read(tokens, length) for values in layer]
        return [np.where(is_live[..., None, None], values, 0) for values in found]

    return of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A batch of requests with their script."""

    prompts: list
    params: list
    stop_at: list  # index into the free-running output whose token becomes a stop token, or None
    is_right: list
    length: list
    draft_length: int


@st.composite
def examples(draw):
    num_rows = draw(st.integers(1, BATCH_SIZE))
    prompts, params, stop_at, is_right, length = [], [], [], [], []
    for _ in range(num_rows):
        size = draw(st.one_of(st.integers(1, 40), st.integers(95, MAX_LENGTH - WINDOW + 1)))
        random = np.random.default_rng(draw(st.integers(0, 2**16)))
        prompts.append(random.integers(0, SIZE, size).tolist())
        max_tokens = draw(st.integers(1, 24))
        params.append(
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=draw(st.integers(0, max_tokens)),
                temperature=draw(st.sampled_from((0.0, 0.8, 1.5))),
                top_p=draw(st.sampled_from((1.0, 0.9))),
                seed=draw(st.integers(0, 2**40)),
            )
        )
        stop_at.append(draw(st.none() | st.integers(0, 23)))
        chance = draw(st.sampled_from((0.0, 0.5, 0.8, 1.0)))
        is_right.append(random.random(MAX_LENGTH) < chance)
        length.append(random.integers(draw(st.sampled_from((0, WINDOW - 1))), WINDOW, MAX_LENGTH))
    return Example(
        prompts=prompts,
        params=params,
        stop_at=stop_at,
        is_right=is_right,
        length=length,
        draft_length=draw(st.integers(1, WINDOW - 1)),
    )


def token_ids(completions):
    return [completion.token_ids for completion in completions]


def check(engine, witness, fresh_kv, example):
    """Runs an example and asserts all that must hold."""
    free = witness.generate(example.prompts, example.params)
    params = []
    for one, completion, at in zip(example.params, free, example.stop_at, strict=True):
        stops = () if at is None or at >= len(completion.token_ids) else (completion.token_ids[at],)
        params.append(dataclasses.replace(one, stop_token_ids=stops))
    alone = witness.generate(example.prompts, params)
    truth = toy.sequences(alone)
    engine.update_params(draft=script_params(truth, example.is_right, example.length))

    plain = engine.generate(example.prompts, params, speculate=False)
    plain_kv = live_kv(engine, len(plain))
    poison(engine)
    drafted = engine.generate(example.prompts, params, draft_length=example.draft_length)
    drafted_kv = live_kv(engine, len(plain))

    assert token_ids(drafted) == token_ids(plain)
    for ours, theirs in zip(drafted_kv, plain_kv, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(drafted_kv, fresh_kv(toy.sequences(drafted)), strict=True):
        np.testing.assert_allclose(ours, theirs[: len(drafted)], atol=1e-4)

    for ours, e1, single, asked in zip(drafted, plain, alone, params, strict=True):
        ends = (ours.finish_reason, ours.stop_reason)
        assert ends == (e1.finish_reason, e1.stop_reason)
        # The narrower window leaves room for more tokens before the max_length.
        assert ours.token_ids == single.token_ids[: len(ours.token_ids)]
        if ours.stop_reason != "max_length":
            assert ours.token_ids == single.token_ids
            assert ends == (single.finish_reason, single.stop_reason)
        check_lengths(ours, asked)
        check_counts(ours, example.draft_length)
        check_counts(e1, 0)


def check_lengths(completion, asked):
    """Limits, and the place of a stop token."""
    length = len(completion.token_ids)
    assert 1 <= length <= asked.max_tokens
    assert len(completion.prompt_token_ids) + length <= MAX_LENGTH
    assert all(0 <= token < SIZE for token in completion.token_ids)
    if completion.finish_reason == "stop":
        assert completion.stop_reason == completion.token_ids[-1]
        assert completion.stop_reason in asked.stop_token_ids
        assert length > asked.min_tokens
    else:
        assert completion.finish_reason == "length"
        assert completion.stop_reason == "max_length" or length == asked.max_tokens
    assert not set(completion.token_ids[:-1]) & set(asked.stop_token_ids)


def check_counts(completion, draft_length):
    """What was emitted is what was accepted, and one more per round."""
    counts, origins = completion.acceptance, completion.origins
    assert counts.num_emitted_tokens == len(completion.token_ids) == len(origins)
    assert counts.num_accepted_tokens == origins.count(Origin.ACCEPTED)
    was_cut = origins[-1] == Origin.ACCEPTED  # a stop token among the drafts ends their round
    assert not was_cut or completion.finish_reason == "stop"
    assert counts.num_emitted_tokens == counts.num_accepted_tokens + counts.num_rounds - was_cut
    drafts, accepted = counts.num_drafts_per_pos, counts.num_accepted_tokens_per_pos
    for totals in (drafts, accepted):
        assert list(totals) == sorted(totals, reverse=True)
        assert not any(totals[draft_length:])
    assert sum(drafts) == counts.num_draft_tokens
    assert sum(accepted) == counts.num_accepted_tokens
    assert all(a <= d for a, d in zip(accepted, drafts, strict=True))
    assert drafts[0] == counts.num_drafts <= counts.num_rounds


HOW = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@settings(max_examples=25, **HOW)
@given(example=examples())
def test_output_is_plain_decodings_and_counts_add_up(engine, witness, fresh_kv, example):
    check(engine, witness, fresh_kv, example)


@pytest.mark.slow
@settings(max_examples=1000, **HOW)
@given(example=examples())
def test_the_same_on_many_more_examples(engine, witness, fresh_kv, example):
    check(engine, witness, fresh_kv, example)


# Sabotage: each fault must break what `check` asserts, on a plain example.

PLAIN_EXAMPLE = Example(
    prompts=[[token % SIZE for token in prompt] for prompt in toy.prompts((5, 30))],
    params=[SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.8, seed=1)],
    stop_at=[None, 14],
    is_right=[np.arange(MAX_LENGTH) % 4 > 0] * 2,
    length=[np.full(MAX_LENGTH, WINDOW - 1)] * 2,
    draft_length=WINDOW - 1,
)


def one_short(state, info, cache, *, real=decoding.commit):
    """Rolls back one token too few."""
    after = real(state, info, cache)
    rejected = (info.verdict.num_accepted < info.draft.num_valid) & after.is_running
    return after.replace(num_committed=after.num_committed + rejected.astype(jnp.int32))


def deaf(state, draft, verdict, *, real=decoding.emit):
    """Looks for stop tokens only where the target speaks: not among accepted drafts."""
    deafened = state.replace(
        stop_tokens=jnp.where(verdict.num_accepted[:, None] > 0, -1, state.stop_tokens)
    )
    return real(deafened, draft, verdict)


def counts_rejected(state, info, *, real=recorders.count):
    """Counts the bonus token as an accepted one."""
    verdict = info.verdict.replace(num_accepted=info.verdict.num_accepted + 1)
    return real(state, info.replace(verdict=verdict))


def stale_kv(state, draft, *, tree_depth, real=decoding.make_window):
    """Does not store the first draft's KV, and so not that of most accepted ones."""
    window = real(state, draft, tree_depth=tree_depth)
    is_second = jnp.arange(window.slots.shape[1], dtype=jnp.int32) == 1
    return window.replace(slots=jnp.where(is_second, -1, window.slots))


def test_the_example_that_is_sabotaged_is_sound(engine, witness, fresh_kv):
    check(engine, witness, fresh_kv, PLAIN_EXAMPLE)
    assert engine.executor.compile_counts()["run"] == 1  # after all these examples


@pytest.mark.parametrize(
    ("module", "name", "sabotage"),
    [
        (decoding, "commit", one_short),
        (decoding, "emit", deaf),
        (recorders, "count", counts_rejected),
        (decoding, "make_window", stale_kv),
    ],
)
def test_sabotage_is_caught(monkeypatch, witness, fresh_kv, module, name, sabotage):
    monkeypatch.setattr(module, name, sabotage)
    with pytest.raises(AssertionError):
        check(make_engine(), witness, fresh_kv, PLAIN_EXAMPLE)
