"""The attention kernel for Hopper GPUs: interpreted, against block attention; compiled for one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from windows import ROUNDING, as_trees, random_parents, setup

from jaxspec.cache import pages as kv
from jaxspec.kernels import mosaic
from jaxspec.kernels.mosaic import SPLIT_LENGTH, is_supported, mosaic_attention
from jaxspec.kernels.pallas import pallas_attention
from jaxspec.kernels.xla import block_attention
from jaxspec.lab.bench.deviceless import ABSENT_DEVICES, as_if_on, compile_for
from jaxspec.types import Window


def interpreted(test):
    """A test that runs the kernel in Pallas' interpreter."""
    reason = "the interpreter of earlier versions has no layouts and no transposed operands"
    is_old = jax.__version_info__ < (0, 12)
    return pytest.mark.as_shipped(pytest.mark.skipif(is_old, reason=reason)(test))


def run(*inputs, dtype=jnp.bfloat16, sliding_window=None, num_sinks=None):
    """Interpreted; a race between copies, products and stores is an error."""
    backend = functools.partial(
        mosaic_attention,
        dtype=dtype,
        sliding_window=sliding_window,
        num_sinks=num_sinks,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    return np.asarray(jax.jit(backend)(*inputs), np.float32)


def reference(*inputs, dtype=jnp.bfloat16, **span):
    backend = functools.partial(block_attention, dtype=dtype, **span)
    return np.asarray(jax.jit(backend)(*inputs), np.float32)


CASES = [
    # starts, T, dtype, K, G, H, sliding window
    ([0, 1, 127], 1, jnp.bfloat16, 2, 4, 128, None),
    ([125, 128, 255], 4, jnp.float16, 1, 1, 64, None),
    ([253, 256, 507], 5, jnp.bfloat16, 1, 7, 64, 130),
    ([60, 400], 3, jnp.bfloat16, 2, 4, 80, 1),
    ([0, 300], 5, jnp.float16, 1, 2, 96, None),
    ([130, 270], 4, jnp.bfloat16, 1, 16, 256, 100),
    ([20, 383], 8, jnp.bfloat16, 1, 16, 64, None),
]


@interpreted
@pytest.mark.parametrize(
    ("starts", "window_length", "dtype", "heads", "group", "size", "sliding_window"), CASES
)
def test_equals_block_attention(starts, window_length, dtype, heads, group, size, sliding_window):
    shape = {"dtype": dtype, "heads": heads, "group": group, "size": size}
    inputs = setup(starts, window_length, **shape, fill=np.nan)
    settings = {"dtype": dtype, "sliding_window": sliding_window}
    assert np.abs(run(*inputs, **settings) - reference(*inputs, **settings)).max() < ROUNDING[dtype]


@interpreted
def test_the_check_above_catches_a_query_that_sees_one_slot_too_many():
    queries, layer, table, window = setup([40, 256], 4, dtype=jnp.bfloat16, size=64, group=4)
    shifted = window.replace(positions=window.positions + 1)
    ours, theirs = run(queries, layer, table, shifted), reference(queries, layer, table, window)
    assert np.abs(ours - theirs).max() > ROUNDING[jnp.bfloat16]


def trees(inputs, *, depth):
    """The same with the window as random trees."""
    *others, window = inputs
    rng = np.random.default_rng(0)
    num_rows, window_length = window.positions.shape
    parents = [random_parents(rng, window_length - 1, depth=depth) for _ in range(num_rows)]
    return *others, as_trees(window, parents, depth=depth)


@interpreted
@pytest.mark.parametrize(
    ("starts", "window_length", "dtype", "heads", "group", "size", "sliding_window"), CASES[1:]
)
def test_trees_equal_block_attention(
    starts, window_length, dtype, heads, group, size, sliding_window
):
    shape = {"dtype": dtype, "heads": heads, "group": group, "size": size}
    inputs = trees(setup(starts, window_length, **shape, fill=np.nan), depth=3)
    settings = {"dtype": dtype, "sliding_window": sliding_window}
    assert np.abs(run(*inputs, **settings) - reference(*inputs, **settings)).max() < ROUNDING[dtype]


SHAPE = {"dtype": jnp.bfloat16, "heads": 1, "group": 4, "size": 64}


@interpreted
@pytest.mark.parametrize("sliding_window", [None, 100])
def test_splits_are_put_together_and_change_nothing_else(sliding_window, monkeypatch):
    # The interpreter fills memory that nobody wrote to with NaN.
    inputs = setup([0, 130, 400], 5, **SHAPE, fill=np.nan)
    whole = run(*inputs, sliding_window=sliding_window)
    monkeypatch.setattr(mosaic, "SPLIT_LENGTH", 128)
    split = run(*inputs, sliding_window=sliding_window)
    assert np.abs(split - whole).max() < ROUNDING[jnp.bfloat16]
    np.testing.assert_array_equal(split[0], whole[0])  # it fits into one
    assert np.any(split[2] != whole[2])
    longer = setup([0, 130, 400], 5, **SHAPE, capacity=1024, fill=np.nan)
    np.testing.assert_array_equal(run(*longer, sliding_window=sliding_window), split)


@interpreted
@pytest.mark.parametrize("num_sinks", [0, 4, 128])
@pytest.mark.parametrize("depth", [None, 3])
def test_sinks_are_seen_and_nothing_between_them_and_the_window(num_sinks, depth):
    inputs = setup([0, 130, 400], 5, **SHAPE, fill=np.nan)
    if depth is not None:
        inputs = trees(inputs, depth=depth)
    queries, layer, table, window = inputs
    every = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), (3, 512))
    is_between = (every >= num_sinks) & (every <= window.start[:, None] - 100)
    nan = jnp.full((3, 512, SHAPE["heads"], SHAPE["size"]), jnp.nan, jnp.bfloat16)
    layer = kv.write(layer, table, nan, nan, jnp.where(is_between, every, -1))
    span = {"sliding_window": 100, "num_sinks": num_sinks}
    ours, theirs = (f(queries, layer, table, window, **span) for f in (run, reference))
    assert np.abs(ours - theirs).max() < ROUNDING[jnp.bfloat16]


@interpreted
def test_neighbours_and_seats_change_no_bit():
    alone = run(*setup([300], 4, **SHAPE))[0]
    for starts, seat in (([300, 0], 0), ([500, 300, 128], 1)):
        np.testing.assert_array_equal(run(*setup(starts, 4, **SHAPE))[seat], alone)


@interpreted
def test_the_window_changes_no_bit():
    queries, layer, table, window = setup([254, 60], 8, **SHAPE | {"group": 16})
    whole = run(queries, layer, table, window)  # twice 64 queries
    for begin, end in ((0, 1), (1, 4), (5, 8)):
        part = window.replace(
            positions=window.positions[:, begin:end], slots=window.slots[:, begin:end]
        )
        narrow = run(queries[:, begin:end], layer, table, part)
        np.testing.assert_array_equal(narrow, whole[:, begin:end])


@interpreted
def test_garbage_changes_no_bit_even_if_it_is_nan():
    clean, dirty = (setup([5, 130, 255], 4, **SHAPE, fill=fill) for fill in (0.0, np.nan))
    np.testing.assert_array_equal(run(*clean), run(*dirty))


@interpreted
@pytest.mark.parametrize("sliding_window", [None, 70])
def test_padded_rows_see_no_padding(sliding_window):
    queries, layer, pages, window = setup([60, 126], 4, **SHAPE)
    slots = jnp.arange(130, dtype=jnp.int32)[None]
    k, v = kv.read_slots(layer, pages, jnp.repeat(slots, 2, axis=0), jnp.bfloat16)
    table = kv.AlignedTable(pages=pages, first_slot=jnp.asarray([200, 3], jnp.int32))
    nan = jnp.full((2, 512, *k.shape[2:]), jnp.nan, jnp.bfloat16)
    every = jnp.repeat(jnp.arange(512, dtype=jnp.int32)[None], 2, axis=0)
    slots = jnp.where(slots < window.start[:, None] + 4, slots, -1)
    padded = kv.write(kv.write(layer, pages, nan, nan, every), table, k, v, slots)
    ours = run(queries, padded, table, window, sliding_window=sliding_window)
    theirs = reference(queries, layer, pages, window, sliding_window=sliding_window)
    np.testing.assert_allclose(ours, theirs, atol=ROUNDING[jnp.bfloat16])


def test_kv_in_int8_is_left_to_the_triton_kernel():
    inputs = setup([40, 200], 4, **SHAPE, kv_dtype="int8")
    assert is_supported(inputs[-1], group=4, head_size=64, dtype=jnp.bfloat16)
    ours, theirs = (
        jax.jit(functools.partial(backend, dtype=jnp.bfloat16, interpret=True))(*inputs)
        for backend in (mosaic_attention, pallas_attention)
    )
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_what_the_kernel_cannot_do_is_left_to_the_triton_kernel():
    *_, window = setup([40, 200], 4, **SHAPE)
    assert is_supported(window, group=4, head_size=64, dtype=jnp.bfloat16)
    assert not is_supported(window, group=4, head_size=64, dtype=jnp.float32)
    assert not is_supported(window, group=33, head_size=64, dtype=jnp.bfloat16)
    assert not is_supported(window, group=4, head_size=72, dtype=jnp.bfloat16)
    assert not is_supported(window, group=1, head_size=80, dtype=jnp.bfloat16)
    assert not is_supported(window, group=17, head_size=256, dtype=jnp.bfloat16)
    # Neither does that one take heads of 72 numbers.
    *inputs, tree = trees(setup([40, 200], 4, **SHAPE | {"size": 72}), depth=3)
    ours, theirs = (
        jax.jit(functools.partial(backend, dtype=jnp.bfloat16))(*inputs, tree)
        for backend in (mosaic_attention, block_attention)
    )
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.as_shipped
@pytest.mark.deviceless
@pytest.mark.skipif(
    ABSENT_DEVICES["h100"].problem is not None, reason=str(ABSENT_DEVICES["h100"].problem)
)
@pytest.mark.parametrize(
    ("window_length", "group", "size", "num_splits", "is_tree"),
    [
        (5, 4, 128, 1, False),
        (5, 4, 128, 1, True),
        (5, 4, 128, 2, False),
        (1, 1, 64, 1, False),
        (5, 4, 16, 1, False),
        (8, 4, 80, 1, False),
        (3, 2, 96, 2, True),
        (8, 8, 256, 1, False),
        (8, 16, 128, 1, False),
        (32, 4, 128, 1, True),
    ],
)
def test_it_compiles_for_an_h100(window_length, group, size, num_splits, is_tree):
    def attend(queries, layer, table, window):
        return mosaic_attention(queries, layer, table, window, dtype=jnp.bfloat16)

    def make():
        rows = jnp.zeros((8, window_length), jnp.int32)
        return (
            jnp.zeros((8, window_length, 2 * group, size), jnp.bfloat16),
            kv.init_cache(
                num_layers=1,
                num_rows=8,
                capacity=num_splits * SPLIT_LENGTH,
                num_kv_heads=2,
                head_size=size,
                dtype=jnp.bfloat16,
            ),
            Window(
                start=rows[:, 0],
                positions=rows,
                slots=rows,
                paths=jnp.zeros((8, window_length, 5), jnp.int32) if is_tree else None,
            ),
        )

    queries, cache, window = jax.eval_shape(make)
    with as_if_on("h100"):
        text = compile_for("h100", attend, queries, cache.layers[0], cache.table, window, donated=0)
    # Another puts the splits together, and the tails of trees with them.
    num_kernels = 2 if is_tree or num_splits > 1 else 1
    assert " while(" not in text.hlo  # no loop that waits for the host
    assert text.hlo.count('custom_call_target="mosaic_gpu') == num_kernels
