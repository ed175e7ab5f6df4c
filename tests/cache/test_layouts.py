"""Layouts: all six combinations with schedulers, the invariants after every round, and faults that
break each of them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ties
import toy

import jaxspec
from jaxspec import schedulers
from jaxspec.audit.scoring import Scorer
from jaxspec.cache import layouts
from jaxspec.cache import pages as kv
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.kernels.base import Kernels
from jaxspec.kernels.xla import block_attention
from jaxspec.models import decoder
from jaxspec.models.prefill import prefill_chunks
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.schedulers import Continuous, Pool, Static

BATCH_SIZE, MAX_LENGTH = 3, 256
LENGTHS = (1, 2, 30, 129, 5, 140, 77, 12)  # more than one block, so that KV moves across its edge
SCHEDULERS = {"static": Static(), "pool": Pool(5), "continuous": Continuous()}
COMBINATIONS = [(layout, name) for layout in layouts.LAYOUTS for name in SCHEDULERS]


def params():
    """Greedy and sampled rows with limits of their own."""
    return [
        SamplingParams(max_tokens=5 + 3 * index, temperature=0.4 * (index % 3), seed=index)
        for index in range(len(LENGTHS))
    ]


@pytest.fixture(scope="module")
def setting():
    target = toy.model(num_layers=1)
    prompts = toy.prompts(LENGTHS)
    witness = Engine(target, batch_size=BATCH_SIZE, max_length=MAX_LENGTH).generate(
        prompts, params()
    )
    longest = max(len(c.prompt_token_ids + c.token_ids) for c in witness)
    oracle = jaxspec.Oracle(toy.sequences(witness), acceptance=0.7)
    return target, prompts, witness, oracle, Scorer(target, max_length=longest)


def engine_for(setting, layout, scheduler=None, **more):
    target, _, _, oracle, _ = setting
    more = {"draft_length": 3, "batch_size": BATCH_SIZE, "max_length": MAX_LENGTH} | more
    return Engine(target, oracle, scheduler=scheduler, layout=layout, **more)


def test_the_table_holds_what_the_package_exports():
    exported = {name for name in schedulers.__all__ if isinstance(getattr(schedulers, name), type)}
    exported -= {"Scheduler"}
    assert list(schedulers.SCHEDULERS) == ["continuous", "static", "pool"]
    assert {type(scheduler).__name__ for scheduler in SCHEDULERS.values()} == exported
    assert [scheduler.name for scheduler in SCHEDULERS.values()] == list(SCHEDULERS)
    assert {layout for layout, _ in COMBINATIONS} == set(layouts.LAYOUTS) == {"ragged", "aligned"}


@pytest.fixture(scope="module")
def checked(setting):
    """The engine of a layout and a scheduler, which checks its invariants, and its completions."""

    @functools.cache
    def generate(layout, name):
        engine = engine_for(setting, layout, SCHEDULERS[name], check_invariants=True)
        return engine, engine.generate(setting[1], params())

    return generate


@pytest.mark.parametrize(("layout", "name"), COMBINATIONS)
def test_every_combination_keeps_the_invariants_and_the_targets_output(
    setting, checked, layout, name
):
    _, prompts, witness, _, scorer = setting
    engine, found = checked(layout, name)
    # Ties among the ragged three too: the witness decodes plainly, in another window.
    ties.divergences(setting[0], found, witness, params(), scorer=scorer)
    assert [c.request_id for c in found] == [str(index) for index in range(len(prompts))]

    counts = {name: int(count) for name, count in vars(engine.state.schedule).items()}
    assert counts["num_rows"] == sum(c.acceptance.num_rounds for c in found)
    assert counts["num_rounds"] <= counts["num_rows"] <= BATCH_SIZE * counts["num_rounds"]
    assert (
        BATCH_SIZE * counts["num_grouped_rounds"]
        <= counts["num_grouped_rows"]
        <= counts["num_rows"]
    )
    assert engine.exactness == ("bitwise" if layout == "ragged" else "ties")
    if layout == "ragged":
        assert counts["num_realignments"] == counts["num_slots_moved"] == 0
    else:
        assert 0 < counts["num_realignments"] <= counts["num_slots_moved"]


def test_the_ragged_schedulers_agree_to_the_bit(checked):
    outputs = [[c.token_ids for c in checked("ragged", name)[1]] for name in SCHEDULERS]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.slow
def test_plain_decoding_and_trees_run_aligned(setting):
    target, prompts, witness, _, scorer = setting
    plain = Engine(
        target,
        batch_size=BATCH_SIZE,
        max_length=MAX_LENGTH,
        layout="aligned",
        check_invariants=True,
    )
    ties.divergences(target, plain.generate(prompts, params()), witness, params(), scorer=scorer)
    first = slice(0, BATCH_SIZE)
    greedy = SamplingParams(max_tokens=14)
    truth = Engine(target, batch_size=BATCH_SIZE, max_length=MAX_LENGTH).generate(
        prompts[first], greedy
    )
    tree = toy.TreeOracle(tuple(map(tuple, toy.sequences(truth))))
    # Rows of one batch are right to different depths, so that they are moved apart.
    limits = [SamplingParams(max_tokens=14 - 5 * index) for index in range(BATCH_SIZE)]
    engine = Engine(
        target,
        tree,
        draft_length=6,
        batch_size=BATCH_SIZE,
        max_length=MAX_LENGTH,
        layout="aligned",
        check_invariants=True,
    )
    found = engine.generate(prompts[first], limits)
    shortened = [
        dataclasses.replace(c, token_ids=c.token_ids[: p.max_tokens])
        for c, p in zip(truth, limits, strict=True)
    ]
    ties.divergences(target, found, shortened, limits, scorer=scorer)
    assert sum(c.acceptance.num_accepted_tokens for c in found) > 5


def read_alone(target, tokens):
    """K and V of each layer `[n, K, H]` of `tokens`, read at once into a ragged cache."""
    cache, *_ = prefill_chunks(
        target,
        target.params,
        target.init_cache(1, MAX_LENGTH),
        jnp.asarray([tokens], jnp.int32),
        rows=jnp.array([0], jnp.int32),
        starts=jnp.array([0], jnp.int32),
        stops=jnp.array([len(tokens)], jnp.int32),
        chunk=len(tokens),
    )
    return [np.asarray(values)[0, : len(tokens)] for values in layouts.kv_by_position(cache)]


def compiled_text(engine):
    return engine.executor.lower_run().compile().as_text()


@pytest.mark.slow
def test_only_the_aligned_program_holds_a_realignment(setting):
    scope = re.compile(r'op_name="[^"]*\brealign\b')
    assert scope.search(compiled_text(engine_for(setting, "aligned")))
    assert not scope.search(compiled_text(engine_for(setting, "ragged")))


@pytest.mark.as_shipped
def test_realignment_is_a_function_whose_cost_can_be_measured_alone(setting):
    target = setting[0]
    cache = kv.aligned(target.init_cache(BATCH_SIZE, MAX_LENGTH))
    realign = jax.jit(functools.partial(kv.realign, largest=MAX_LENGTH), donate_argnums=0)
    lowered = realign.lower(cache, jnp.zeros((BATCH_SIZE,), jnp.int32)).compile()
    memory = lowered.memory_analysis()
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))
    assert memory.alias_size_in_bytes >= kept  # in place
    small = memory.temp_size_in_bytes
    longer = kv.aligned(target.init_cache(BATCH_SIZE, 16 * MAX_LENGTH))
    lowered = realign.lower(longer, jnp.zeros((BATCH_SIZE,), jnp.int32)).compile()
    assert lowered.memory_analysis().temp_size_in_bytes <= small + 4096  # a block at a time


def test_rows_that_fill_their_capacity_drop_no_write(setting):
    # An ended row at its limit keeps its row, and all others begin their windows where it ends.
    target = setting[0]
    longest = engine_for(setting, "aligned").longest_prompt
    assert longest == MAX_LENGTH - 4 == engine_for(setting, "ragged").longest_prompt - 1
    prompts = toy.prompts((longest, 3, longest - 9), seed=5)
    asked = SamplingParams(max_tokens=60)
    truth = Engine(target, batch_size=BATCH_SIZE, max_length=512).generate(prompts, asked)
    oracle = jaxspec.Oracle(toy.sequences(truth), acceptance=0.8)
    engine = Engine(
        target,
        oracle,
        draft_length=3,
        batch_size=BATCH_SIZE,
        max_length=MAX_LENGTH,
        layout="aligned",
        check_invariants=True,
    )
    found = engine.generate(prompts, asked)
    assert [c.stop_reason for c in found] == ["max_length", None, "max_length"]
    assert [len(c.token_ids) for c in found] == [1, 60, 10]
    shortened = [
        dataclasses.replace(c, token_ids=c.token_ids[: len(f.token_ids)])
        for c, f in zip(truth, found, strict=True)
    ]
    large = Scorer(target, max_length=512)
    ties.divergences(target, found, shortened, [asked] * 3, scorer=large)


def _moved_otherwise(cache, after, source):
    """`after` with the KV at each position taken from position `source` `[B, S]` of `cache`."""
    every = jnp.broadcast_to(jnp.arange(cache.capacity, dtype=jnp.int32), source.shape)

    def move(old, new):
        k, v = kv.read_slots(old, cache.table, source, cache.dtype)
        return kv.write(new, after.table, k, v, every)

    pairs = zip(cache.layers, after.layers, strict=True)
    return after.replace(layers=tuple(move(old, new) for old, new in pairs))


def one_slot_too_far(cache, after):
    is_moved = (after.first_slot != cache.first_slot)[:, None]
    every = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
    return _moved_otherwise(cache, after, jnp.where(is_moved, every - 1, every))


def one_row_forgotten(cache, after):
    every = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
    delta = (after.first_slot - cache.first_slot).at[1:].set(0)
    return _moved_otherwise(cache, after, every + delta[:, None])


def old_padding_kept(cache, after):
    return after.replace(table=cache.table)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(
            one_slot_too_far,
            "I3: k of layer 0 of row . has changed at position",
            marks=pytest.mark.slow,
        ),
        (one_row_forgotten, "I3: k of layer 0 of row 0 has changed at position 0"),
        pytest.param(
            old_padding_kept, "I1: rows of one round end at slots", marks=pytest.mark.slow
        ),
    ],
)
def test_faulty_realignments_are_caught(setting, monkeypatch, fault, message):
    real = kv.realign

    def faulty(cache, num_committed, *, largest):
        return fault(cache, real(cache, num_committed, largest=largest))

    engine = engine_for(setting, "aligned", check_invariants=True)
    monkeypatch.setattr(kv, "realign", faulty)
    with pytest.raises(AssertionError, match=message):
        engine.generate(setting[1][2:5], SamplingParams(max_tokens=12))


def test_padding_that_is_attended_is_caught(setting, monkeypatch):
    def unmasked(queries, layer, table, window, **settings):
        if isinstance(table, kv.AlignedTable):
            moved = window.positions + table.first_slot[:, None]
            window = window.replace(positions=moved, start=moved[:, 0])
            table = table.pages
        return block_attention(queries, layer, table, window, **settings)

    monkeypatch.setattr(
        decoder,
        "run_layers",
        functools.partial(decoder.run_layers, kernels=Kernels(attention=unmasked)),
    )
    monkeypatch.setattr(decoder, "forward", _forward_through_run_layers)
    engine = engine_for(setting, "aligned", check_invariants=True)
    with pytest.raises(AssertionError, match="has read a slot that holds no committed KV"):
        engine.generate(setting[1], params())


def _forward_through_run_layers(config, params, tokens, window, cache, **_):
    return decoder.run_layers(config, params, decoder.embed(params, tokens), window, cache)


@pytest.mark.slow
def test_committed_kv_is_that_of_a_row_read_alone_unless_rotary_positions_are_slots(
    setting, monkeypatch
):
    target, prompts, _, _, _ = setting

    def largest_difference():
        engine = engine_for(setting, "aligned")
        asked = SamplingParams(max_tokens=12)
        found = engine.generate(prompts[2:5], asked)
        state = engine.state
        assert np.any(np.asarray(state.cache.first_slot))
        worst = 0.0
        for row, completion in enumerate(found):
            tokens = (completion.prompt_token_ids + completion.token_ids)[:-1]
            alone = read_alone(target, tokens)
            held = [np.asarray(x)[row, : len(tokens)] for x in layouts.kv_by_position(state.cache)]
            worst = max(worst, *(np.abs(a - b).max() for a, b in zip(held, alone, strict=True)))
        return worst

    assert largest_difference() < 1e-4
    real = decoder.layers.rotary_angles
    offset = []

    def forward(config, params, tokens, window, cache, **_):
        table = cache.table if window.rows is None else cache.table[window.rows]
        offset[:] = [table.first_slot[:, None]] if isinstance(table, kv.AlignedTable) else [0]
        return _forward_through_run_layers(config, params, tokens, window, cache)

    monkeypatch.setattr(decoder, "forward", forward)
    monkeypatch.setattr(
        decoder.layers, "rotary_angles", lambda rope, positions: real(rope, positions + offset[0])
    )
    assert largest_difference() > 1e-2


def test_an_unknown_layout_and_a_check_on_a_mesh_are_refused(setting):
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(SettingError, match="check_invariants was given with a mesh"):
        engine_for(setting, "aligned", mesh=mesh, check_invariants=True)
    with pytest.raises(SettingError, match=r"layout 'diagonal' was given.*ragged, aligned"):
        engine_for(setting, "diagonal")
