"""The attention kernel, interpreted, against block attention; compiled where there is a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ties
import toy
from windows import ROUNDING, SIZE, as_trees, random_parents, setup

from jaxspec import Engine, NGram, SamplingParams, load_model
from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.kernels import pallas as attention_pallas
from jaxspec.kernels.base import XLA
from jaxspec.kernels.pallas import (
    SPLIT_LENGTH,
    attend_grouped,
    is_supported,
    write_window,
)
from jaxspec.kernels.registry import get_kernels
from jaxspec.kernels.xla import block_attention
from jaxspec.models import prefill
from jaxspec.models.config import RopeConfig
from jaxspec.models.layers import rotary_angles
from jaxspec.models.prefill import chain_window

pallas_attention = get_kernels("pallas").attention  # interpreted where there is no GPU


@functools.partial(jax.jit, static_argnames=("backend", "dtype", "sliding_window"))
def run(*inputs, backend=pallas_attention, dtype=jnp.float32, sliding_window=None):
    return backend(*inputs, dtype=dtype, sliding_window=sliding_window)


def distance(inputs, dtype=jnp.float32, **settings):
    """The largest difference to block attention, which has a dense reference of its own."""
    ours = run(*inputs, dtype=dtype, **settings)
    assert ours.dtype == dtype
    theirs = run(*inputs, backend=block_attention, dtype=dtype, **settings)
    return np.abs(np.asarray(ours, np.float32) - np.asarray(theirs, np.float32)).max()


CASES = [
    # starts, T, dtype, K, G, sliding window
    ([0, 1, 127], 1, jnp.float32, 2, 4, None),
    ([125, 128, 255], 4, jnp.float32, 1, 1, None),
    ([3, 250, 380, 40], 8, jnp.float32, 2, 2, None),
    ([253, 256, 507], 5, jnp.float32, 3, 7, 130),
    ([60, 400], 3, jnp.float32, 2, 3, 1),
    ([0, 300], 5, jnp.bfloat16, 2, 4, None),
    ([130, 270], 2, jnp.bfloat16, 1, 16, 100),
    ([20, 383], 8, jnp.float16, 2, 1, None),
]


@pytest.mark.parametrize(("starts", "window_length", "dtype", "heads", "group", "sliding"), CASES)
def test_equals_block_attention(starts, window_length, dtype, heads, group, sliding):
    inputs = setup(starts, window_length, dtype=dtype, heads=heads, group=group, fill=np.nan)
    assert distance(inputs, dtype, sliding_window=sliding) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_tree", [False, True])
def test_codes_with_scales_equal_block_attention(dtype, is_tree):
    inputs = setup([3, 250, 380, 40], 5, dtype=dtype, fill=np.nan, kv_dtype="int8")
    inputs = trees(inputs, depth=3) if is_tree else inputs
    assert distance(inputs, dtype, sliding_window=130) < ROUNDING[dtype]


def test_the_check_above_catches_the_neighbours_scale():
    queries, layer, table, window = setup([3, 250, 380, 40], 5, kv_dtype="int8")
    wrong = layer.replace(v_scale=jnp.roll(layer.v_scale, 1, axis=2))
    ours = run(queries, layer, table, window)
    others = run(queries, wrong, table, window, backend=block_attention)
    assert np.abs(ours - others).max() > 1e-2


def trees(inputs, *, depth, seed=0):
    """The same with the window as random trees."""
    *others, window = inputs
    rng = np.random.default_rng(seed)
    num_rows, window_length = window.positions.shape
    parents = [random_parents(rng, window_length - 1, depth=depth) for _ in range(num_rows)]
    return *others, as_trees(window, parents, depth=depth)


@pytest.mark.parametrize(("starts", "window_length", "dtype", "heads", "group", "sliding"), CASES)
@pytest.mark.parametrize("depth", [2, 7])
def test_trees_equal_block_attention(starts, window_length, dtype, heads, group, sliding, depth):
    inputs = setup(starts, window_length, dtype=dtype, heads=heads, group=group, fill=np.nan)
    inputs = trees(inputs, depth=depth)
    assert is_supported(inputs[-1], group=group, head_size=SIZE)
    assert distance(inputs, dtype, sliding_window=sliding) < ROUNDING[dtype]


def test_queries_may_see_beyond_themselves():
    queries, layer, table, window = setup([3, 126, 254], 4, fill=np.nan)
    chain = window.replace(ends=jnp.broadcast_to(window.start[:, None] + 4, (3, 4)))
    assert distance((queries, layer, table, chain)) < ROUNDING[jnp.float32]
    tree = as_trees(window, [[0, 1, 0]] * 3, depth=3)
    tree = tree.replace(
        paths=tree.paths.at[:, 0].set(jnp.arange(4)), ends=(tree.positions + 1).at[:, 0].add(2)
    )
    assert distance((queries, layer, table, tree)) < ROUNDING[jnp.float32]


def test_the_round_in_which_a_node_is_scored_changes_no_bit():
    # The token at position 257 as the root, and as the last node of a path with siblings.
    queries, layer, table, window = setup([252, 252], 8)
    tree = as_trees(window, [[0, 0, 2, 3, 2, 4, 6]] * 2, depth=5)
    assert int(tree.positions[0, 7]) == 257
    stored = tree.stored_at(jnp.broadcast_to(jnp.arange(258, dtype=jnp.int32), (2, 8, 258)))
    k, v = kv.read_slots(layer, table, stored[:, 7], jnp.float32)
    slots = jnp.broadcast_to(jnp.arange(258, dtype=jnp.int32), (2, 258))
    committed = kv.write(layer, table, k, v, jnp.where(slots < 258, slots, -1))
    root = window.replace(start=window.start + 5, positions=window.positions + 5)
    later = as_trees(root, [[0] * 7] * 2, depth=5)
    ours = run(queries, layer, table, tree)
    again = run(jnp.roll(queries, 1, axis=1), committed, table, later)
    np.testing.assert_array_equal(again[:, 0], ours[:, 7])


def test_the_check_above_catches_a_query_that_sees_one_slot_too_many():
    queries, layer, table, window = setup([40, 256], 4)
    shifted = window.replace(positions=window.positions + 1)
    ours = run(queries, layer, table, shifted)
    theirs = run(queries, layer, table, window, backend=block_attention)
    assert np.abs(ours - theirs).max() > 1e-2


def test_partial_sums_that_nobody_wrote_are_not_read(monkeypatch):
    inputs = setup([3, 300], 4, capacity=1024)
    assert distance(inputs) < ROUNDING[jnp.float32]

    # Sabotage: the splits beyond a row's end are put together too.
    combine = attention_pallas._combine_splits

    def greedy(extents_ref, *references, tiles_per_split, group):
        class Everything:
            def __getitem__(self, index):
                return (0, 1024 // SPLIT_LENGTH * tiles_per_split)[index[1]]

        combine(Everything(), *references, tiles_per_split=tiles_per_split, group=group)

    monkeypatch.setattr(attention_pallas, "_combine_splits", greedy)
    poisoned = pallas_attention(*inputs, dtype=jnp.float32)
    assert not np.all(np.isfinite(poisoned))


def test_neighbours_and_seats_change_no_bit():
    alone = np.asarray(run(*setup([300], 4)))[0]
    for starts, seat in (([300, 0], 0), ([17, 300], 1), ([500, 300, 128], 1)):
        together = run(*setup(starts, 4))
        np.testing.assert_array_equal(together[seat], alone)


def test_capacity_changes_no_bit():
    short, long = (
        run(*setup([300, 5], 4, capacity=capacity, heads=1, group=1)) for capacity in (512, 1024)
    )
    # Random KV is drawn row by row of slots, so that the same slots hold the same numbers.
    np.testing.assert_array_equal(short, long)


def test_what_follows_in_the_window_changes_no_bit():
    queries, layer, table, window = setup([254, 60], 4)
    whole = np.asarray(run(queries, layer, table, window))
    # Other drafts after the first two entries: their queries, keys and values.
    other = setup([11, 12], 4)
    queries = queries.at[:, 2:].set(other[0][:, 2:])
    k, v = kv.read_slots(other[1], other[2], window.slots[:, 2:], jnp.float32)
    layer = kv.write(layer, table, k + 1, v - 1, window.slots[:, 2:])
    changed = np.asarray(run(queries, layer, table, window))
    np.testing.assert_array_equal(changed[:, :2], whole[:, :2])
    assert np.any(changed[:, 2:] != whole[:, 2:])
    # Nor does a narrower window whose queries fill the same tile.
    narrow = window.replace(positions=window.positions[:, :2], slots=window.slots[:, :2])
    narrow = run(queries[:, :2], layer, table, narrow)
    np.testing.assert_array_equal(narrow, whole[:, :2])


def test_garbage_changes_no_bit_even_if_it_is_nan():
    clean, dirty = (setup([5, 130, 255], 4, fill=fill) for fill in (0.0, np.nan))
    np.testing.assert_array_equal(run(*clean), run(*dirty))


def test_padded_rows_see_no_padding():
    queries, layer, pages, window = setup([60, 126], 4)
    k, v = kv.read_slots(
        layer, pages, jnp.broadcast_to(jnp.arange(130, dtype=jnp.int32), (2, 130)), jnp.float32
    )
    table = kv.AlignedTable(pages=pages, first_slot=jnp.asarray([200, 3], jnp.int32))
    nan = jax.tree.map(lambda stored: jnp.full_like(stored, jnp.nan), layer)
    slots = jnp.arange(130, dtype=jnp.int32)[None]
    slots = jnp.where(slots < window.start[:, None] + 4, slots, -1)
    padded = kv.write(nan, table, k, v, slots)
    for sliding_window in (None, 70):
        ours = run(queries, padded, table, window, sliding_window=sliding_window)
        theirs = run(
            queries, layer, pages, window, backend=block_attention, sliding_window=sliding_window
        )
        np.testing.assert_allclose(ours, theirs, atol=ROUNDING[jnp.float32])


@pytest.mark.parametrize(("window_length", "size"), [(8, 8), (8, 24)])
@pytest.mark.parametrize("is_tree", [True, False])
def test_what_the_kernel_cannot_do_is_left_to_block_attention(window_length, size, is_tree):
    inputs = setup([40, 200], window_length, size=size)
    if is_tree:
        inputs = trees(inputs, depth=3)
    assert not is_supported(inputs[-1], group=3, head_size=size)
    np.testing.assert_array_equal(run(*inputs), run(*inputs, backend=block_attention))


def test_the_kernel_takes_short_windows_only():
    window = setup([40, 200], 8)[-1]
    assert is_supported(window, group=16, head_size=128)
    assert not is_supported(window, group=17, head_size=128)


@pytest.mark.parametrize(
    ("dtype", "is_interleaved", "rotary_size", "has_norm", "kv_dtype"),
    [
        (jnp.bfloat16, False, SIZE, True, None),
        (jnp.float32, True, SIZE // 2, False, None),
        (jnp.float32, False, SIZE, False, "int8"),
        (jnp.bfloat16, False, SIZE, False, "int8"),
    ],
)
def test_a_window_is_written_as_xla_writes_it(
    dtype, is_interleaved, rotary_size, has_norm, kv_dtype
):
    _, layer, pages, window = setup([3, 200], 4, dtype=dtype, kv_dtype=kv_dtype)
    table = kv.AlignedTable(pages=pages, first_slot=jnp.asarray([0, 50], jnp.int32))
    window = window.replace(slots=window.slots.at[0, 3].set(-1))  # not to be stored
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    qkv = random(2, 4, 2, 5, SIZE).at[1, 2, 1, 4, 3].set(jnp.inf)  # a value
    rope = RopeConfig(theta=1e4, rotary_size=rotary_size, is_interleaved=is_interleaved)
    settings = {
        "bias": None if has_norm else random(2, 5, SIZE),
        "query_norm": random(SIZE) if has_norm else None,
        "key_norm": random(SIZE) if has_norm else None,
        "epsilon": 1e-6,
        "is_interleaved": is_interleaved,
    }

    def attend(kernels):
        def run(*inputs):
            return kernels.attend(*inputs, dtype=dtype, sliding_window=None, **settings)

        angles = rotary_angles(rope, window.positions)
        return jax.jit(run)(qkv, layer, table, window, angles)

    (ours, our_layer), (theirs, their_layer) = attend(get_kernels("pallas")), attend(XLA)
    np.testing.assert_allclose(
        np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=ROUNDING[dtype]
    )
    every = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), (2, 512))
    mine, reference = (
        [np.asarray(x, np.float32) for x in kv.read_slots(written, pages, every, dtype)]
        for written in (our_layer, their_layer)
    )
    # fp32 sums in another order; and XLA may quantise a key before it is rounded to bf16, so that a
    # few get the next code.
    is_rounded = kv_dtype is not None and dtype == jnp.bfloat16
    np.testing.assert_allclose(mine[0], reference[0], rtol=0, atol=4 / 127 if is_rounded else 2e-6)
    np.testing.assert_array_equal(mine[1], reference[1])
    assert np.isnan(mine[0][1, 252, 1]).any(), "a key whose value is not finite"
    assert np.isfinite(mine[1]).all()


# A prefill chunk: rows of 64 queries per KV head.


def chunks(*, dtype, kernels, sliding_window=None):
    """Heads of two consecutive chunks of row 1 and one of row 0 in one call, and the KV after it;
    NaN beyond them."""
    starts, rows, length, group = (128, 192, 37), jnp.asarray([1, 1, 0]), 64, 4
    _, layer, pages, _ = setup([37, 128], 64, dtype=dtype, heads=2, group=group, fill=np.nan)
    window = chain_window(
        jnp.asarray(starts, jnp.int32), length, stop=jnp.asarray([192, 250, 101]), rows=rows
    )
    rope = RopeConfig(theta=1e4, rotary_size=SIZE)
    qkv = np.random.default_rng(0).standard_normal((3, length, 2, group + 2, SIZE))
    settings = {
        "dtype": dtype,
        "sliding_window": sliding_window,
        "is_interleaved": False,
        "bias": None,
        "query_norm": None,
        "key_norm": None,
        "epsilon": 1e-6,
    }

    @jax.jit
    def attend(qkv, layer, table, window):
        angles = rotary_angles(rope, window.positions)
        return kernels.attend(qkv, layer, table, window, angles, **settings)

    heads, after = attend(jnp.asarray(qkv, dtype), layer, pages[rows], window)
    k, v = kv.read_slots(after, pages, jnp.broadcast_to(jnp.arange(250), (2, 250)), dtype)
    return [np.asarray(x, np.float32) for x in (heads, k, v)]


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize(
    ("dtype", "sliding_window"),
    [
        (jnp.float32, 70),
        pytest.param(jnp.float32, None, marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, None, marks=pytest.mark.slow),
    ],
)
def test_long_chains_are_attended_to_in_parts(monkeypatch, dtype, sliding_window):
    def refuse(*_, **__):
        raise AssertionError("XLA's attention")

    settings = {"dtype": dtype, "sliding_window": sliding_window}
    theirs = chunks(kernels=XLA, **settings)
    monkeypatch.setattr(attention_pallas, "block_attention", refuse)
    monkeypatch.setattr(attention_pallas.Kernels, "attend", refuse)
    ours = chunks(kernels=get_kernels("pallas"), **settings)
    for mine, reference in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, reference, rtol=0, atol=ROUNDING[dtype])


@pytest.mark.usefixtures("traced_anew")
def test_the_check_above_catches_parts_of_another_row(monkeypatch):
    theirs = chunks(kernels=XLA, dtype=jnp.float32)
    parts = attention_pallas.in_parts

    def rolled(*inputs):
        queries, table, window = parts(*inputs)
        return queries, jax.tree.map(lambda pages: jnp.roll(pages, 1, axis=0), table), window

    monkeypatch.setattr(attention_pallas, "in_parts", rolled)
    ours = chunks(kernels=get_kernels("pallas"), dtype=jnp.float32)
    assert not np.allclose(ours[0], theirs[0], rtol=0, atol=ROUNDING[jnp.float32])


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="later versions compile as they lower, with the driver"
)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(jnp.float32, None), (jnp.bfloat16, None), (jnp.bfloat16, "int8")]
)
@pytest.mark.parametrize("is_tree", [False, True])
def test_triton_takes_them(dtype, kv_dtype, is_tree):
    # The shapes of a published model, and no GPU: as far as the code that Triton would compile.
    inputs = setup([40, 300], 5, dtype=dtype, heads=8, group=4, size=128, kv_dtype=kv_dtype)
    _, layer, table, window = trees(inputs, depth=3) if is_tree else inputs
    norm = jnp.ones((128,), dtype)

    def attend(qkv, layer, table, window):
        queries, layer = write_window(
            qkv,
            layer,
            table,
            window,
            rotary_angles(RopeConfig(theta=1e4, rotary_size=128), window.positions),
            is_interleaved=False,
            bias=None,
            query_norm=norm,
            key_norm=norm,
            epsilon=1e-6,
            interpret=False,
        )
        return attend_grouped(
            queries, layer, table, window, dtype=dtype, sliding_window=None, interpret=False
        )

    inputs = jnp.zeros((2, 5, 8, 6, 128), dtype), layer, table, window
    text = jax.jit(attend).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3


PARAMS = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def model():
    rope = RopeConfig(theta=1e4, rotary_size=SIZE)
    return toy.model(head_size=SIZE, rope=rope, num_layers=1)


@pytest.fixture(scope="module")
def engine(model):
    ours = dataclasses.replace(model, kernels="pallas")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "CHUNK", 128)  # which goes through the kernel in parts
        return Engine(ours, NGram(), draft_length=3, batch_size=2, max_length=384)


@pytest.mark.slow
def test_a_model_with_the_kernel_decodes_the_same_or_parts_at_ties(model, engine):
    prompts = toy.prompts((3, 240, 20))
    ours = engine.generate(prompts, PARAMS)
    theirs = Engine(model, batch_size=2, max_length=384).generate(prompts, PARAMS)
    divergences = ties.divergences(model, ours, theirs, PARAMS)
    assert len(divergences) < len(prompts)


def test_speculation_and_neighbours_change_no_token(engine):
    prompts = toy.prompts((3, 240, 20))
    speculative = engine.generate(prompts, PARAMS)
    assert sum(done.acceptance.num_accepted_tokens for done in speculative) > 0
    plain = engine.generate(prompts, PARAMS, speculate=False)
    for ours, theirs in zip(speculative, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
    assert engine.generate([prompts[1]], PARAMS)[0].token_ids == speculative[1].token_ids


def test_models_are_loaded_with_it():
    assert load_model("demo-draft", kernels="pallas").kernels == "pallas"
    with pytest.raises(SettingError, match="no kernels 'cudnn'; choose one of xla, mosaic, "):
        load_model("demo-draft", kernels="cudnn")  # pyright: ignore


# Where there is a GPU

needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")


@pytest.mark.accelerator
@needs_gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("heads", "group"), [(8, 4), (2, 16), (4, 1)])
def test_the_compiled_kernel_equals_block_attention(dtype, heads, group):
    inputs = setup(
        [0, 127, 300, 1900],
        5,
        dtype=dtype,
        heads=heads,
        group=group,
        size=128,
        capacity=2048,
        fill=np.nan,
    )
    rounding = max(ROUNDING[dtype], 1e-5)  # sums of up to 1900 slots, and another exponential
    assert distance(inputs, dtype) < rounding
    assert distance(inputs, dtype, sliding_window=200) < rounding


@pytest.mark.accelerator
@needs_gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_compiled_kernel_is_alone_with_its_row(dtype):
    settings = {"dtype": dtype, "heads": 8, "group": 4, "size": 128, "capacity": 2048}
    alone = np.asarray(run(*setup([1900], 5, **settings), dtype=dtype), np.float32)[0]
    for starts in ([1900, 3], [700, 1900], [2000, 1900, 1, 40]):
        together = run(*setup(starts, 5, **settings), dtype=dtype)
        np.testing.assert_array_equal(np.asarray(together, np.float32)[starts.index(1900)], alone)


@pytest.mark.accelerator
@needs_gpu
@pytest.mark.parametrize("kernels", ["xla", "pallas"])
def test_a_compiled_round_gives_plain_tokens_whoever_the_neighbours_are(kernels):
    shape = {"head_size": 64, "rope": RopeConfig(theta=1e4, rotary_size=64), "width": 256}
    ours = dataclasses.replace(toy.model(dtype=jnp.bfloat16, **shape), kernels=kernels)
    engine = Engine(ours, NGram(), draft_length=4, batch_size=4, max_length=1024)
    prompts = toy.prompts((3, 700, 20, 300, 5, 128))
    params = SamplingParams(max_tokens=100)
    speculative = engine.generate(prompts, params)
    assert sum(done.acceptance.num_accepted_tokens for done in speculative) > 0
    plain = engine.generate(prompts, params, speculate=False)
    for prompt, ours, theirs in zip(prompts, speculative, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert engine.generate([prompt], params)[0].token_ids == ours.token_ids
