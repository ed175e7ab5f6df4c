"""Prefill, insert, generate, free: the same tokens as `Engine`, whoever comes and goes."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import doctest
import functools
import itertools

import flex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toy

import jaxspec.serving.engine as module
from jaxspec import DraftModel, Engine, NGram, Oracle, Rejection, SamplingParams
from jaxspec.cache import pages as kv
from jaxspec.cache.pages import BLOCK, copy_row, init_cache, read_slots, write
from jaxspec.decode import state as decode_state
from jaxspec.decode.loop import DecodeLoop
from jaxspec.drafters.base import Drafter
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.engine.memory import bytes_of
from jaxspec.errors import PromptError, SettingError
from jaxspec.serving import ServingEngine
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import Draft, Finish, Shared, chain_parents

SHAPE = {"batch_size": 3, "max_length": 256}
PROMPTS = toy.prompts((3, 40, 150, 1, 9, 240, 17))
PARAMS = [
    SamplingParams(max_tokens=25),
    SamplingParams(max_tokens=25, temperature=0.8, seed=3, logit_bias={5: -100, 9: 1.5}),
    SamplingParams(max_tokens=20, frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(max_tokens=12, temperature=1.1, top_p=0.9, top_k=20, seed=2**40),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=100, allowed_token_ids=range(40)),  # ends at the max_length
    SamplingParams(max_tokens=30),  # ends at a stop token, see `requests`
]


@dataclasses.dataclass(frozen=True)
class Remembering(Drafter):
    """A user's drafter with rows of its own and something that all rows share.

    Proposes the token that followed the newest one the last time any row emitted it, from a table
    that all rows fill; each row offers nothing until it has been told its prompt's length.
    """

    name: str = "remembering"

    def init(self, shape):
        """The table, how many requests came, and each row's prompt length."""
        return {
            "next": Shared(jnp.zeros((shape.vocab_size,), jnp.int32)),
            "num_admitted": jnp.int32(0),
            "prompt_length": jnp.full((shape.batch_size,), -1, jnp.int32),
        }

    def admit(self, shape, params, state, rows, row):
        """Counts it, and notes its length."""
        return {
            **state,
            "num_admitted": state["num_admitted"] + 1,
            "prompt_length": state["prompt_length"].at[row].set(rows.num_committed[row]),
        }

    def propose(self, shape, params, state, rows):
        """A chain through the table."""
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)[:, 0]
        chain = []
        for _ in range(shape.num_nodes):
            newest = state["next"].value[newest]
            chain.append(newest)
        knows = state["prompt_length"] > 0
        draft = Draft(
            tokens=jnp.stack(chain, axis=1),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.where(knows, jnp.minimum(rows.draft_limit, shape.num_nodes), 0),
        )
        return draft, state

    def commit(self, shape, params, state, rows, outcome):
        """Every row's newest pair goes into the table."""
        index = rows.num_committed - 1
        newest = jnp.take_along_axis(rows.tokens, index[:, None], axis=1)[:, 0]
        before = jnp.take_along_axis(rows.tokens, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0]
        return {**state, "next": Shared(state["next"].value.at[before].set(newest))}


@pytest.fixture(scope="module")
def target():
    return toy.model()


@pytest.fixture(scope="module")
def draft(target):
    """Right often enough: the target's own weights with some noise on them."""
    noise = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + 0.03 * noise.standard_normal(leaf.shape).astype(np.float32),
        target.params,
    )
    return DraftModel(dataclasses.replace(target, name="noisy", params=params))


@pytest.fixture(scope="module")
def requests(target, plain_reference):
    """Prompts and parameters; the last one is stopped by a token that it emits in mid-output."""
    output = plain_reference.generate([PROMPTS[6]], PARAMS[6])[0].token_ids
    stop = next(t for i, t in enumerate(output) if i > 8 and t not in output[:i])
    stopped = dataclasses.replace(PARAMS[6], stop_token_ids=(stop,))
    return list(zip(PROMPTS, [*PARAMS[:6], stopped], strict=True))


@pytest.fixture(scope="module")
def plain_reference(target):
    return Engine(target, **SHAPE)


def completions_of(engine, requests):
    return engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])


@pytest.fixture(scope="module")
def plain(plain_reference, requests):
    """What window-1 decoding emits."""
    return completions_of(plain_reference, requests)


@pytest.fixture(scope="module")
def expected(target, draft, requests):
    """What the engine emits at a window of 5."""
    return completions_of(Engine(target, draft, **SHAPE), requests)


@dataclasses.dataclass
class Served:
    """What the host saw of one request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish: Finish = Finish.RUNNING
    num_drafted: int = 0
    num_accepted: int = 0
    acceptance: Acceptance | None = None


def serve(engine, requests, *, seed, state=None, prefill=None):
    """Every request through some row, in an order drawn from `seed`; batch_size are freed or simply
    taken over, and some requests wait although a row is free."""
    random = np.random.default_rng(seed)
    prefill = prefill or engine.prefill
    state = engine.init_decode_state() if state is None else state
    waiting = collections.deque(random.permutation(len(requests)).tolist())
    active: dict[int, int] = {}
    served = [Served() for _ in requests]
    while waiting or active:
        free = [row for row in range(engine.shape.batch_size) if row not in active]
        for row in random.permutation(free).tolist():
            if waiting and (not active or random.random() < 0.7):
                active[row] = waiting.popleft()
                state = engine.insert(prefill(*requests[active[row]]), state, row)
        state, result = engine.generate(state)
        result = jax.device_get(result)
        for row in range(engine.shape.batch_size):
            if row not in active:
                assert result.done[row]
                assert result.num_new[row] == 0
                continue
            request, num_new = served[active[row]], result.num_new[row]
            is_finite = result.finish[row] != Finish.NON_FINITE
            assert is_finite <= num_new <= engine.shape.verify_length
            assert np.all(result.tokens[row, num_new:] == -1)
            request.token_ids += result.tokens[row, :num_new].tolist()
            request.num_drafted += int(result.num_drafted[row])
            request.num_accepted += int(result.num_accepted[row])
            if result.done[row]:
                request.finish = Finish(int(result.finish[row]))
                request.acceptance = Acceptance.of_row(
                    jax.device_get(state.counts), row, num_emitted=len(request.token_ids)
                )
                del active[row]
                if random.random() < 0.5:
                    state = engine.free(state, row)
    return served


def generate_into(outputs, engine, state):
    """The state after a round, and its result, whose tokens are added to each row's."""
    state, result = engine.generate(state)
    result = jax.device_get(result)
    for row, output in enumerate(outputs):
        output += result.tokens[row, : result.num_new[row]].tolist()
    return state, result


def tokens_of(outputs):
    return [tuple(output.token_ids) for output in outputs]


def make_drafter(name, target, draft, expected):
    return {
        "none": lambda: None,
        "ngram": lambda: NGram(),
        "draft_model": lambda: draft,
        "oracle": lambda: Oracle(toy.sequences(expected), acceptance=0.7),
        "remembering": lambda: Remembering(),
        "parallel": lambda: flex.copied_flex(
            target, mode="parallel", num_deep_layers=1, block_size=5
        ),
        "sequential": lambda: flex.random_flex(
            target, mode="sequential", num_deep_layers=1, block_size=5
        ),
    }[name]()


@pytest.fixture(scope="module")
def engine_of(target, draft, expected):
    """Serving engines by their drafter's name, made once."""
    return functools.cache(
        lambda name: ServingEngine(target, make_drafter(name, target, draft, expected), **SHAPE)
    )


@pytest.mark.parametrize(
    "name",
    [
        *("draft_model", "remembering"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("none", "ngram", "oracle", "parallel", "sequential")
        ),
    ],
)
def test_tokens_are_the_engines_whatever_the_order(engine_of, requests, plain, expected, name):
    engine = engine_of(name)
    wanted = plain if name == "none" else expected
    sizes = []
    for seed in range(2):
        served = serve(engine, requests, seed=seed)
        sizes.append({name: one.num_compilations() for name, one in engine.programs.items()})
        assert tokens_of(served) == tokens_of(wanted)
        assert [request.finish for request in served] == [Finish.MAX_TOKENS] * 5 + [
            Finish.MAX_LENGTH,
            Finish.STOP_TOKEN,
        ]
        for request in served:
            assert request.num_drafted == request.acceptance.num_draft_tokens
            assert request.num_accepted == request.acceptance.num_accepted_tokens
    assert sizes[1] == sizes[0]
    del sizes[0]["free"]  # of no model, so engines share it
    assert set(sizes[0].values()) == {1}
    if name not in ("none", "ngram", "sequential"):
        assert sum(request.num_accepted for request in served) > 0


@pytest.mark.slow
def test_another_verifier_in_bfloat16():
    target = toy.model(dtype=jnp.bfloat16)
    draft = DraftModel(toy.model(seed=1, dtype=jnp.bfloat16, num_layers=1))
    shape = {"batch_size": 2, "max_length": 128, "draft_length": 2}
    requests = [(PROMPTS[i], dataclasses.replace(PARAMS[i], max_tokens=15)) for i in (0, 1, 3, 6)]
    expected = completions_of(Engine(target, draft, verifier=Rejection(), **shape), requests)
    engine = ServingEngine(target, draft, verifier=Rejection(), **shape)
    for seed in range(2):
        assert tokens_of(serve(engine, requests, seed=seed)) == tokens_of(expected)


@pytest.mark.slow
def test_trees(target):
    shape = {"batch_size": 2, "max_length": 128, "draft_length": 6}
    prompts, params = [PROMPTS[0], PROMPTS[1]], SamplingParams(max_tokens=20)
    expected = Engine(target, NGram(), **shape).generate(prompts, params)
    engine = ServingEngine(target, toy.TreeOracle(tuple(toy.sequences(expected))), **shape)
    state, outputs, num_steps = engine.init_decode_state(), [[], []], 0
    for row in (1, 0):  # this oracle knows its rows by their rows
        state = engine.insert(engine.prefill(prompts[row], params), state, row)
    is_done = False
    while not is_done:
        state, result = generate_into(outputs, engine, state)
        num_steps, is_done = num_steps + 1, result.done.all()
    assert [tuple(output) for output in outputs] == tokens_of(expected)
    assert num_steps == 5  # three nodes of the path are right, and the bonus token: four a round


def test_the_drafter_comes_along(engine_of, requests, expected):
    """Acceptance is the engine's to the last count, so the draft model has read the prompt too."""
    served = serve(engine_of("draft_model"), requests, seed=5)
    assert [request.acceptance for request in served] == [done.acceptance for done in expected]


def test_a_drafter_left_behind_is_noticed(engine_of, requests, expected):
    engine = engine_of("draft_model")
    empty = engine.programs["init_row"]().drafter

    def prefill(*request):
        return engine.prefill(*request).replace(drafter=empty)

    served = serve(engine, requests, seed=5, prefill=prefill)
    assert tokens_of(served) == tokens_of(expected)  # the drafter has no say in these
    assert [request.acceptance for request in served] != [done.acceptance for done in expected]


def with_nan(tree, num_live=0):
    """Every cache in `tree` with NaN after the first `num_live` slots of each row."""

    def poison(cache):
        return kv.poison_uncommitted(cache, jnp.full(cache.table.shape[:1], num_live, jnp.int32))

    return tree.replace(
        cache=poison(tree.cache), drafter=tree.drafter.replace(cache=poison(tree.drafter.cache))
    )


def test_garbage_is_never_read(engine_of, requests, expected):
    engine = engine_of("draft_model")

    def prefill(prompt, params):
        return with_nan(engine.prefill(prompt, params), num_live=len(prompt) - 1)

    state = with_nan(engine.init_decode_state())
    served = serve(engine, requests, seed=7, state=state, prefill=prefill)
    assert tokens_of(served) == tokens_of(expected)


@pytest.mark.slow
def test_a_block_left_behind_is_noticed(target, draft, requests, expected, monkeypatch):
    def forgetful(cache, row, source, source_row, num_slots):
        return copy_row(cache, row, source, source_row, num_slots - BLOCK)

    monkeypatch.setattr(decode_state, "copy_row", forgetful)
    engine = ServingEngine(target, draft, **SHAPE)
    served = serve(engine, requests, seed=7, state=with_nan(engine.init_decode_state()))
    assert served[2].finish == Finish.NON_FINITE  # of the first block nothing came along
    assert tokens_of(served) != tokens_of(expected)


def test_a_prompt_is_read_once_and_inserted_often(engine_of, requests, expected):
    engine = engine_of("draft_model")
    read = [engine.prefill(*request) for request in requests]
    for index in (1, 2):
        state = engine.init_decode_state()
        for row, prefilled in ((2, read[index]), (0, read[index]), (1, read[5])):
            state = engine.insert(prefilled, state, row)
        outputs = [[], [], []]
        for step in itertools.count():
            if step == 4:  # a third time, over a longer predecessor in mid-flight
                state = engine.insert(read[index], state, 1)
                outputs[1] = []
            state, result = generate_into(outputs, engine, state)
            if result.done.all():
                break
        assert outputs == [list(expected[index].token_ids)] * 3


def test_prompts_are_read_on_another_thread(engine_of, requests, expected):
    engine = engine_of("draft_model")
    with concurrent.futures.ThreadPoolExecutor(2) as readers:
        read = [readers.submit(engine.prefill, *request) for request in requests]
        waiting = iter(read)
        served = serve(engine, requests, seed=1, prefill=lambda *request: next(waiting).result())
    order = np.random.default_rng(1).permutation(len(requests)).tolist()
    for index, place in enumerate(order):  # `serve` asks in this order
        assert tuple(served[place].token_ids) == expected[index].token_ids


def test_plain_rows_in_the_same_program(engine_of, requests, expected):
    engine = engine_of("draft_model")
    served = serve(
        engine,
        requests,
        seed=2,
        prefill=lambda *request: engine.prefill(
            *request, draft_length=0 if request[0] in PROMPTS[::2] else 2
        ),
    )
    assert tokens_of(served) == tokens_of(expected)
    assert [request.num_drafted == 0 for request in served[:4]] == [True, False, True, False]


def test_a_row_is_cancelled_and_its_neighbours_do_not_notice(engine_of, requests, expected):
    engine = engine_of("ngram")
    state = engine.init_decode_state()
    for row in range(3):
        state = engine.insert(engine.prefill(*requests[row]), state, row)
    outputs = [[], [], []]
    for step in range(40):
        if step == 3:
            state = engine.free(state, 1)
        state, result = generate_into(outputs, engine, state)
        if step >= 3:
            assert result.num_new[1] == 0
            assert result.done[1]
            assert result.finish[1] == Finish.EMPTY_ROW
    assert result.num_new.tolist() == [0, 0, 0]
    assert outputs[0] == list(expected[0].token_ids)
    assert outputs[2] == list(expected[2].token_ids)
    assert 3 <= len(outputs[1]) < 25
    assert outputs[1] == list(expected[1].token_ids[: len(outputs[1])])


@pytest.mark.parametrize("name", ["none", "ngram", "draft_model"])
def test_the_state_is_donated_and_no_cache_is_copied(engine_of, requests, name):
    engine = engine_of(name)
    prefilled = engine.prefill(*requests[0])
    state = engine.init_decode_state()
    parts = (prefilled.admission, prefilled.cache, prefilled.drafter)
    row, params, programs = np.int32(1), engine.params, engine.programs
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache.layers))
    for lowered, most in (
        (programs["insert"].lower(params, state.rows, row, *parts), 8192),
        (programs["generate"].lower(params, state.rows, row), num_bytes),
        (programs["free"].lower(state.rows, row), 8192),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= num_bytes
        assert memory.temp_size_in_bytes < most
    for call in (
        lambda state: engine.insert(prefilled, state, 1),
        lambda state: engine.generate(state)[0],
        lambda state: engine.free(state, 1),
    ):
        given, state = state, call(state)
        assert given.cache.layers[0].k.is_deleted()
        assert not prefilled.cache.layers[0].k.is_deleted()


def test_copying_a_row_costs_as_much_as_is_live():
    cache, source = (
        init_cache(
            num_layers=1,
            num_rows=num_rows,
            capacity=4 * BLOCK,
            num_kv_heads=1,
            head_size=2,
            dtype="bfloat16",
        )
        for num_rows in (2, 1)
    )
    slots = jnp.arange(4 * BLOCK, dtype=jnp.int32)[None]
    values = jax.random.normal(jax.random.key(0), (1, 4 * BLOCK, 1, 2), jnp.bfloat16)
    source = source.replace(
        layers=(write(source.layers[0], source.table, values, 2 * values, slots),)
    )
    cache = cache.replace(table=cache.table[:, ::-1])  # pages out of order
    for num_slots, num_copied in ((1, 1), (BLOCK, 1), (BLOCK + 1, 2), (4 * BLOCK, 4)):
        one, none = jnp.int32(1), jnp.int32(0)
        copied = jax.jit(copy_row)(cache, one, source, none, jnp.int32(num_slots))
        every = jnp.broadcast_to(slots, (2, 4 * BLOCK))
        k, v = read_slots(copied.layers[0], copied.table, every, copied.dtype)
        end = num_copied * BLOCK
        assert np.array_equal(k[1, :end], values[0, :end])
        assert np.array_equal(v[1, :end], 2 * values[0, :end])
        assert not np.any(k[1, end:])
        assert not np.any(k[0])


def test_a_seed_is_drawn_and_named(engine_of):
    engine = engine_of("ngram")
    params = SamplingParams(temperature=1.0)
    first, second = (engine.prefill(PROMPTS[0], params).request for _ in range(2))
    assert first.params.seed != second.params.seed
    assert first.prompt_token_ids == tuple(PROMPTS[0])


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "message"),
    [
        ([], {}, PromptError, "The prompt is empty"),
        ([61], {}, PromptError, "The prompt holds the token id 61"),
        ([1] * 253, {}, PromptError, "253 tokens, and the engine's max_length leaves room for 252"),
        ("text", {}, PromptError, "has no tokenizer"),
        ([1], {"stop": "x"}, SettingError, "this engine does not read text"),
        ([1], {"n": 2, "temperature": 1.0}, SettingError, "makes one row of a prompt"),
        ([1], {"logprobs": 1}, SettingError, "keeps none"),
        ([1], {"stop_token_ids": (99,)}, SettingError, "the stop token 99"),
        ([1], {"stop_token_ids": range(9)}, SettingError, "9 stop tokens"),
    ],
)
def test_what_prefill_refuses(engine_of, prompt, params, kind, message):
    with pytest.raises(kind, match=message):
        engine_of("ngram").prefill(prompt, SamplingParams(**params))


def test_what_insert_and_free_refuse(target, draft, engine_of):
    engine = engine_of("ngram")
    state = engine.init_decode_state()
    prefilled = engine.prefill([1, 2])
    for row in (-1, 3):
        with pytest.raises(SettingError, match=f"Row {row} was given, and the engine has 3"):
            engine.insert(prefilled, state, row)
        with pytest.raises(SettingError, match=f"Row {row} was given"):
            engine.free(state, row)
    with pytest.raises(
        SettingError, match="A draft length of 5 was given for a verify_length of 5"
    ):
        engine.prefill([1, 2], draft_length=5)
    for other in (
        engine_of("draft_model"),  # another drafter
        ServingEngine(target, NGram(), **SHAPE | {"max_length": 384}),
        ServingEngine(tiny.model(), NGram(), **SHAPE),  # another model
        ServingEngine(target, NGram(), draft_length=2, **SHAPE),
    ):
        with pytest.raises(SettingError, match="A prompt was inserted that an engine with another"):
            other.insert(prefilled, state, 0)
    assert not state.cache.layers[0].k.is_deleted()  # refused before anything happened
    other = ServingEngine(target, NGram(), **SHAPE | {"batch_size": 2})  # only the batch size
    other.insert(prefilled, other.init_decode_state(), 1)


def test_settings_that_are_none(target):
    with pytest.raises(SettingError, match="prefill_chunk 64 was given, but it is no longer"):
        ServingEngine(target, prefill_chunk=64)
    with pytest.raises(TypeError, match="unexpected keyword argument 'layout'"):
        ServingEngine(target, layout="ragged")


def test_a_donated_state_is_refused(engine_of):
    engine = engine_of("ngram")
    prefilled, donated = engine.prefill([1, 2]), engine.init_decode_state()
    state = engine.insert(prefilled, donated, 0)
    for call in (
        lambda: engine.insert(prefilled, donated, 1),
        lambda: engine.generate(donated),
        lambda: engine.free(donated, 0),
    ):
        with pytest.raises(SettingError, match="use the state that this call returned"):
            call()
    state, _ = engine.generate(state)
    jax.eval_shape(lambda state: engine.free(state, 0), state)  # in a program of the caller's
    engine.free(state, 0)


@pytest.mark.slow
def test_new_weights_and_what_is_left_of_the_old_ones(target, draft, requests, expected):
    engine = ServingEngine(target, draft, **SHAPE)
    state, prefilled = engine.init_decode_state(), engine.prefill(*requests[0])
    other = toy.model(seed=3)
    engine.update_params(target=other.params)
    assert engine.num_updates == 1
    for call in (
        lambda: engine.insert(engine.prefill([1, 2]), state, 1),
        lambda: engine.generate(state),
        lambda: engine.free(state, 0),
        lambda: engine.insert(prefilled, engine.init_decode_state(), 0),
    ):
        with pytest.raises(SettingError, match="weights number 0, and the engine has number 1"):
            call()
    assert not state.finish.is_deleted()
    new = completions_of(Engine(other, draft, **SHAPE), requests)
    assert tokens_of(serve(engine, requests, seed=1)) == tokens_of(new) != tokens_of(expected)
    engine.update_params(target=target.params)
    assert tokens_of(serve(engine, requests, seed=2)) == tokens_of(expected)
    compiled = (engine.programs[name].num_compilations() for name in ("insert", "generate"))
    assert set(compiled) == {1}


@pytest.mark.slow
def test_a_budget_lowers_the_number_of_rows(target):
    whole = ServingEngine(target, NGram(), **SHAPE)
    budget = fit_bytes(target, 2)
    fewer = ServingEngine(target, NGram(), **SHAPE, budget_bytes=budget)
    assert (whole.shape.batch_size, fewer.shape.batch_size) == (3, 2)
    state = fewer.insert(fewer.prefill([1, 2, 3]), fewer.init_decode_state(), 1)
    assert jax.device_get(fewer.generate(state)[1].num_new)[1] >= 1
    with pytest.raises(SettingError, match="budget"):
        ServingEngine(target, NGram(), **SHAPE, budget_bytes=1000)


def fit_bytes(target, batch_size):
    """What an engine of so many rows takes."""
    config = EngineConfig(scheduler="static", **SHAPE | {"batch_size": batch_size})
    return bytes_of(DecodeLoop(make_parts(target, NGram(), config))).total_bytes


@pytest.mark.slow
def test_docstring_example():
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
