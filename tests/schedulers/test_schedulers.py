"""Schedulers: who is decoded when changes no bit of anybody's output, only the number of rounds."""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec.cache import pages as kv
from jaxspec.decode import loop as decoding
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.schedulers import Continuous, Pool, Static
from jaxspec.types import DecodeState, EngineShape, Finish

BATCH_SIZE = 3
LENGTHS = (1, 2, 30, 129, 5, 140, 77, 12, 9, 31, 64, 3)
SCHEDULERS = (
    Static(),
    Continuous(),
    Continuous(waiting=0),
    Continuous(waiting=5),
    Pool(4),
    Pool(8),
)


def params(num_requests):
    """Every request with a limit, a temperature and a seed of its own."""
    limits = np.random.default_rng(0).integers(5, 40, num_requests).tolist()
    return [
        SamplingParams(max_tokens=limit, temperature=0.5 * (index % 3), seed=index)
        for index, limit in enumerate(limits)
    ]


@pytest.fixture(scope="module")
def setting(engine_of):
    target = toy.model(num_layers=1)
    prompts = toy.prompts(LENGTHS)
    completions = engine_of(target, None, Static()).generate(prompts, params(len(prompts)))
    oracle = jaxspec.Oracle(toy.sequences(completions), acceptance=0.7)
    return target, prompts, completions, oracle


@pytest.fixture(scope="module")
def engine_of():
    """The engine of a target, a drafter and a scheduler, made once."""
    return functools.cache(engine_for)


def engine_for(target, drafter, scheduler, **more):
    more = {"batch_size": BATCH_SIZE, "max_length": 256, "rounds_per_sync": 8} | more
    return Engine(target, drafter, scheduler=scheduler, **more)


def list_scheduling(rounds, batch_size):
    """Rounds until all have ended, if every free row is taken at once in order of arrival."""
    ends = [0] * batch_size
    for own in rounds:
        heapq.heappush(ends, heapq.heappop(ends) + own)
    return max(ends)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=str)
@pytest.mark.parametrize("drafts", [True, pytest.param(False, marks=pytest.mark.system)])
def test_schedulers_agree_to_the_bit_and_need_the_rounds_they_should(
    setting, engine_of, scheduler, drafts
):
    target, prompts, witness, oracle = setting
    make = engine_of if drafts else engine_for  # another tier compiles in another way
    engine = make(target, oracle if drafts else None, scheduler)
    first = int(engine.state.num_rounds)
    completions = engine.generate(prompts, params(len(prompts)))
    assert [c.token_ids for c in completions] == [c.token_ids for c in witness]
    assert [c.request_id for c in completions] == [str(i) for i in range(len(prompts))]
    num_rounds = int(engine.state.num_rounds) - first
    own = [completion.acceptance.num_rounds for completion in completions]
    batches = [max(own[i : i + BATCH_SIZE]) for i in range(0, len(own), BATCH_SIZE)]
    if scheduler.name == "static":
        assert num_rounds == sum(batches)
    elif scheduler.name == "continuous":
        assert num_rounds == list_scheduling(own, BATCH_SIZE) < sum(batches)
    else:
        assert sum(own) / BATCH_SIZE <= num_rounds <= sum(batches)
    counts = engine.executor.compile_counts()
    assert [counts[name] for name in ("run", "admit", "prefill")] == [1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [Continuous(), Pool(5)], ids=str)
def test_a_draft_model_keeps_its_cache_when_rows_change_seats(setting, engine_of, scheduler):
    target, prompts, _, _ = setting
    engine = engine_for(target, jaxspec.DraftModel(target), scheduler, draft_length=3)
    completions = engine.generate(prompts, SamplingParams(max_tokens=20))
    for completion in completions:  # the target drafts for itself: everything is accepted
        assert completion.acceptance.num_rounds == 5
    greedy = engine_of(target, None, Static()).generate(prompts, SamplingParams(max_tokens=20))
    assert [c.token_ids for c in completions] == [c.token_ids for c in greedy]


def test_rows_put_back_wrongly_are_caught(setting, monkeypatch):
    target, prompts, witness, oracle = setting
    real = decoding.put_rows
    monkeypatch.setattr(
        decoding,
        "put_rows",
        lambda state, rows, batch: real(state, jnp.roll(rows, 1), batch),
    )
    broken = engine_for(target, oracle, Continuous()).generate(prompts, params(len(prompts)))
    assert [c.token_ids for c in broken] != [c.token_ids for c in witness]


SHAPE = EngineShape(
    batch_size=4, max_length=128, verify_length=3, prefill_chunk=8, vocab_size=toy.VOCAB
)


def choose(scheduler, arrival, lengths, *, ended=(), padding=None):
    """Rows that a scheduler batch_size."""
    cache = None
    if padding is not None:
        cache = kv.aligned(toy.model(num_layers=1).init_cache(len(padding), 128))
        table = cache.table.replace(first_slot=jnp.asarray(padding, jnp.int32))
        cache = cache.replace(table=table)
    finish = np.full(len(arrival), Finish.RUNNING, np.int32)
    finish[list(ended)] = Finish.MAX_TOKENS
    state = DecodeState(
        **{field: None for field in DecodeState.__dataclass_fields__}
        | {
            "cache": cache,
            "arrival": jnp.asarray(arrival, jnp.int32),
            "num_committed": jnp.asarray(lengths, jnp.int32),
            "finish": jnp.asarray(finish),
        }
    )
    return scheduler.choose(state, 2).tolist()


def test_continuous_seats_whoever_came_first():
    assert choose(Continuous(), [3, 0, 2, 1], [9, 9, 9, 9]) == [1, 3]
    assert choose(Continuous(), [3, 0, 2, 1], [9, 9, 9, 9], ended=[1]) == [3, 2]
    assert choose(Continuous(), [3, 0, 2, 1], [9, 9, 9, 9], ended=[0, 1, 2])[0] == 3


def test_the_pool_prefers_the_first_group_of_equal_length():
    assert choose(Pool(4), [0, 1, 2, 3], [5, 6, 5, 6]) == [0, 2]  # complete before the other
    assert choose(Pool(4), [3, 0, 2, 1], [5, 6, 5, 6]) == [1, 3]
    assert choose(Pool(4), [0, 1, 2, 3], [5, 6, 7, 6]) == [1, 3]
    assert choose(Pool(4), [0, 1, 2, 3], [5, 6, 7, 8]) == [0, 1]  # no group
    assert choose(Pool(4), [0, 1, 2, 3], [5, 6, 5, 6], ended=[2]) == [1, 3]


def test_the_pools_length_counts_padding_and_the_batch_strategy_looks_for_no_group():
    assert choose(Pool(4, strategy="batch"), [0, 1, 2, 3], [5, 6, 5, 6]) == [0, 1]
    assert choose(Pool(4, strategy="batch"), [0, 1, 2, 3], [5, 6, 5, 6], ended=[0]) == [1, 2]
    padded = [1, 2, 0, 0]  # rows 1 and 3 stand at 8 both, rows 0 and 2 at 6 and 5
    assert choose(Pool(4), [0, 1, 2, 3], [5, 6, 5, 8], padding=padded) == [1, 3]
    # The first length to reach the rows of the batch wins, though another came first: 5 5 before 6
    # 6.
    assert choose(Pool(5), [0, 1, 2, 3, 4], [6, 5, 5, 6, 6]) == [1, 2]


def test_orders_of_admission():
    prompts, limits = [7, 3, 9, 3], [10, 40, 40, 5]
    assert Static().order(prompts, limits) == [0, 1, 2, 3]
    assert Continuous().order(prompts, limits) == [0, 1, 2, 3]
    assert Continuous(longest_first=True).order(prompts, limits) == [1, 2, 0, 3]
    assert Pool(8).order(prompts, limits) == [0, 1, 2, 3]
    assert Pool(8, sort_by_length=True).order(prompts, limits) == [1, 3, 0, 2]


@pytest.mark.parametrize(
    "scheduler", [Continuous(longest_first=True), Pool(8, sort_by_length=True)], ids=str
)
def test_outputs_come_back_in_input_order_whatever_the_order_of_admission(
    setting, engine_of, scheduler
):
    target, prompts, witness, _ = setting
    completions = engine_of(target, None, scheduler).generate(prompts, params(len(prompts)))
    assert [c.token_ids for c in completions] == [c.token_ids for c in witness]
    assert [c.prompt_token_ids for c in completions] == [c.prompt_token_ids for c in witness]


def test_longest_first_needs_no_more_rounds(setting, engine_of):
    target, prompts, _, _ = setting
    limits = [SamplingParams(max_tokens=4 + 3 * index) for index in range(len(prompts))]
    rounds = []
    for scheduler in (Continuous(), Continuous(longest_first=True)):
        engine = engine_of(target, None, scheduler)
        first = int(engine.state.num_rounds)
        engine.generate(prompts, limits)
        rounds.append(int(engine.state.num_rounds) - first)
    assert rounds[1] < rounds[0]


def test_counts_of_a_schedule_on_a_drawn_example():
    state = decoding.empty_state(SHAPE, num_stop_tokens=1, cache=(), drafter=())
    state = state.replace(num_committed=jnp.asarray([5, 7, 5, 9], jnp.int32))

    def counted(*was_active):
        after = decoding.count_lengths(state, jnp.asarray(was_active))
        return int(after.schedule.num_grouped_rounds), int(after.schedule.num_grouped_rows)

    assert counted(True, True, True, True) == (0, 2)  # two rows of length 5
    assert counted(True, True, False, True) == (0, 0)
    assert counted(False, False, False, False) == (0, 0)
    assert counted(True, False, True, False) == (0, 2)  # of one length, but rows are empty
    state = state.replace(num_committed=jnp.asarray([5, 5, 5, 5], jnp.int32))
    assert counted(True, True, True, True) == (1, 4)


def test_refilled_rows_stop_at_their_own_strings_and_keep_their_logprobs():
    target = jaxspec.load_model("demo-target")
    prompts = ["Once upon a time", "def main():", "The sum of", "To install", "In the", "import"]
    asked = [
        SamplingParams(max_tokens=12 + 3 * i, temperature=0.7, seed=i, stop=["e"], logprobs=1)
        for i in range(len(prompts))
    ]
    runs = [
        Engine(
            target,
            jaxspec.NGram(),
            batch_size=2,
            max_length=128,
            scheduler=scheduler,
            rounds_per_sync=rounds_per_sync,
            max_logprobs=1,
        ).generate(prompts, asked)
        for scheduler, rounds_per_sync in ((Static(), 32), (Continuous(), 3))
    ]
    for one, other in zip(*runs, strict=True):
        assert (one.token_ids, one.text, one.stop_reason) == (
            other.token_ids,
            other.text,
            other.stop_reason,
        )
        assert one.logprobs == other.logprobs
    assert any(completion.stop_reason == "e" for completion in runs[0])


def test_progress_counts_all_rounds(setting, engine_of):
    target, prompts, _, oracle = setting
    engine = engine_of(target, oracle, Continuous())
    for _ in range(2):
        seen = []
        completions = engine.generate(prompts, params(len(prompts)), on_progress=seen.append)
        assert seen[-1].num_finished == seen[-1].num_requests == len(prompts)
        assert seen[-1].num_emitted_tokens == sum(len(c.token_ids) for c in completions)
        own = [completion.acceptance.num_rounds for completion in completions]
        assert seen[-1].num_rounds == list_scheduling(own, BATCH_SIZE)
        assert all(a.num_rounds <= b.num_rounds for a, b in itertools.pairwise(seen))


def test_an_abandoned_run_leaves_the_engine_usable(setting, engine_of):
    target, prompts, witness, oracle = setting
    engine = engine_of(target, oracle, Continuous())
    requests = jaxspec.requests.requests.make_requests(
        prompts, params(len(prompts)), target, longest=engine.longest_prompt
    )
    running = engine.run(requests)
    assert next(running).token_ids == witness[0].token_ids
    beside = engine.generate(prompts[:1], params(1))  # while the others are being decoded
    assert beside[0].token_ids == witness[0].token_ids
    running.close()
    again = engine.generate(prompts, params(len(prompts)))
    assert [c.token_ids for c in again] == [c.token_ids for c in witness]


@pytest.mark.slow
def test_seating_copies_no_kv(setting):
    target, _, _, oracle = setting

    def temporaries(scheduler, max_length):
        engine = engine_for(target, oracle, scheduler, max_length=max_length)
        state = engine.executor.eval_state()
        compiled = engine.executor.lower_run().compile()
        cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
        return compiled.memory_analysis().temp_size_in_bytes, cache

    small, _ = temporaries(Continuous(waiting=3), 512)
    large, cache = temporaries(Continuous(waiting=3), 8192)
    assert large - small < cache / 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda target: Engine(target, batch_size=4, scheduler=Pool(3)),
            "A pool of 3 rows was given",
        ),
        (lambda target: Continuous(waiting=-1), "waiting -1 was given"),
        (lambda target: Pool(4, strategy="best"), "strategy 'best' was given"),
    ],
)
def test_refusals(setting, make, message):
    with pytest.raises(SettingError, match=message):
        make(setting[0])
