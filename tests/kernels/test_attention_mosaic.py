"""The kernels for Hopper GPUs: interpreted, against other kernels; compiled for one."""

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from windows import ROUNDING, as_trees, random_parents, setup

from jaxspec.cache import pages as kv
from jaxspec.kernels import mosaic
from jaxspec.kernels.mosaic import SPLIT_LENGTH, can_write, is_supported, mosaic_attention
from jaxspec.kernels.pallas import pallas_attention
from jaxspec.kernels.pallas import write_window as triton_write_window
from jaxspec.kernels.registry import get_kernels
from jaxspec.kernels.xla import block_attention
from jaxspec.lab.bench.deviceless import ABSENT_DEVICES, as_if_on, compile_for
from jaxspec.models.config import RopeConfig
from jaxspec.models.layers import rotary_angles
from jaxspec.models.prefill import chain_window
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


def projections(num_rows, window_length, heads, group, size, *, has_norm, dtype):
    """`qkv` with a value that is not finite, and bias or norms."""
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    qkv = random(num_rows, window_length, heads, group + 2, size)
    return qkv.at[1, 2, heads - 1, group + 1, 3].set(jnp.inf), {
        "bias": None if has_norm else random(heads, group + 2, size),
        "query_norm": random(size) if has_norm else None,
        "key_norm": random(size) if has_norm else None,
        "epsilon": 1e-6,
        "is_interleaved": False,
    }


@interpreted
@pytest.mark.parametrize(
    ("window_length", "heads", "group", "size", "rotary_size", "dtype", "has_norm"),
    [
        (4, 2, 3, 64, 64, jnp.bfloat16, True),
        (4, 1, 1, 80, 32, jnp.float16, False),
        (35, 1, 2, 16, 16, jnp.bfloat16, False),  # 70 tokens: the last 6 are a tile of their own
    ],
)
def test_a_window_is_written_as_the_triton_kernel_writes_it(
    window_length, heads, group, size, rotary_size, dtype, has_norm
):
    shape = {"dtype": dtype, "heads": heads, "group": group, "size": size}
    _, layer, pages, window = setup([3, 200], 4, **shape)
    window = chain_window(jnp.asarray([3, 200], jnp.int32), window_length)
    window = window.replace(slots=window.slots.at[0, 3].set(-1).at[1, 1].set(512))  # not stored
    table = kv.AlignedTable(pages=pages, first_slot=jnp.asarray([0, 50], jnp.int32))
    qkv, settings = projections(
        2, window_length, heads, group, size, has_norm=has_norm, dtype=dtype
    )
    angles = rotary_angles(RopeConfig(theta=1e4, rotary_size=rotary_size), window.positions)
    (ours, mine), (theirs, reference) = (
        jax.jit(functools.partial(write, **settings, interpret=interpret))(
            qkv, layer, table, window, angles
        )
        for write, interpret in (
            (mosaic.write_window, plgpu.InterpretGPUParams(detect_races=True)),
            (triton_write_window, True),
        )
    )
    close = {"rtol": float(jnp.finfo(dtype).eps), "atol": ROUNDING[dtype]}
    ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, **close)
    every = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), (2, 512))
    keys, values = zip(
        *(kv.read_slots(written, pages, every, dtype) for written in (mine, reference)), strict=True
    )
    keys, values = ([np.asarray(x, np.float32) for x in both] for both in (keys, values))
    np.testing.assert_allclose(keys[0], keys[1], **close)
    np.testing.assert_array_equal(values[0], values[1])
    assert np.isnan(keys[0][1, 252, heads - 1, 3]), "the key of a value that is not finite"
    assert np.isnan(keys[0]).sum() == 1


@pytest.mark.parametrize("change", ["interleaved", "int8", "fp32", "odd"])
def test_what_cannot_be_written_is_left_to_the_triton_kernel(change):
    dtype = jnp.float32 if change == "fp32" else jnp.bfloat16
    size = 24 if change == "odd" else 64
    kv_dtype = "int8" if change == "int8" else None
    shape = SHAPE | {"dtype": dtype, "size": size}
    _, layer, _, window = setup([40, 200], 4, **shape, kv_dtype=kv_dtype)
    qkv, settings = projections(2, 4, 1, 4, size, has_norm=True, dtype=dtype)
    angles = rotary_angles(RopeConfig(theta=1e4, rotary_size=size), window.positions)
    settings["is_interleaved"] = change == "interleaved"
    kernels: Any = get_kernels("mosaic", "gpu")
    assert not can_write(qkv, layer, angles, is_interleaved=settings["is_interleaved"])
    # Heads of 24 numbers are none for Triton either, and go to XLA.
    assert kernels.takes(qkv, layer, window, angles, **settings) == (change != "odd")


WITHOUT_TRITON = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax, jax.numpy as jnp
from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import get_kernels
from jaxspec.models.config import RopeConfig
from jaxspec.models.layers import rotary_angles
from jaxspec.models.prefill import chain_window

def lower(dtype, num_tokens):
    cache = kv.init_cache(num_layers=1, num_rows=2, capacity=512, num_kv_heads=2, head_size=64,
        dtype=dtype)
    window = chain_window(jnp.zeros((2,), jnp.int32), num_tokens)
    def attend(qkv, layer):
        return get_kernels("mosaic", "gpu").attend(qkv, layer, cache.table, window,
            rotary_angles(RopeConfig(theta=1e4, rotary_size=64), window.positions), dtype=dtype,
            is_interleaved=False, bias=None, query_norm=None, key_norm=None, epsilon=1e-6,
            sliding_window=None)
    qkv = jax.ShapeDtypeStruct((2, num_tokens, 2, 6, 64), dtype)
    text = jax.jit(attend).trace(qkv, cache.layers[0]).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in text
    return text.count("custom_call @mosaic_gpu")

print(lower(jnp.bfloat16, 5), lower(jnp.bfloat16, 256), lower(jnp.float32, 5))
try:
    get_kernels("pallas")
except SettingError as error:
    print(error)
"""


def test_no_triton_is_needed():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True
    )
    counts, refusal = done.stdout.splitlines()
    assert counts == "2 2 0"
    assert refusal.startswith("kernels='pallas' was given, but this JAX lacks what they are")


def needs_h100(test):
    """A test that compiles for one."""
    problem = ABSENT_DEVICES["h100"].problem
    test = pytest.mark.skipif(problem is not None, reason=str(problem))(test)
    return pytest.mark.as_shipped(pytest.mark.deviceless(test))


@needs_h100
@pytest.mark.parametrize(
    ("window_length", "group", "size", "num_splits", "is_tree"),
    [
        (5, 4, 128, 1, True),
        (5, 4, 128, 2, False),
        (8, 4, 80, 1, False),
        (8, 8, 256, 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (5, 4, 128, 1, False),
                (1, 1, 64, 1, False),
                (5, 4, 16, 1, False),
                (3, 2, 96, 2, True),
                (8, 16, 128, 1, False),
                (32, 4, 128, 1, True),
            )
        ),
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


@needs_h100
@pytest.mark.parametrize(
    ("num_rows", "window_length", "group", "size", "has_norm"),
    [
        (8, 5, 4, 128, True),
        (2, 256, 2, 256, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 1, 1, 64, False), (8, 5, 4, 80, True), (4, 256, 8, 128, True))
        ),
    ],
)
def test_the_kernel_that_writes_compiles_for_an_h100(
    num_rows, window_length, group, size, has_norm
):
    def write(layer, table, qkv, window, settings):
        angles = rotary_angles(RopeConfig(theta=1e4, rotary_size=size), window.positions)
        return mosaic.write_window(
            qkv, layer, table, window, angles, **settings, is_interleaved=False, epsilon=1e-6
        )

    def make():
        cache = kv.init_cache(
            num_layers=1,
            num_rows=num_rows,
            capacity=SPLIT_LENGTH,
            num_kv_heads=2,
            head_size=size,
            dtype=jnp.bfloat16,
        )
        qkv = jnp.zeros((num_rows, window_length, 2, group + 2, size), jnp.bfloat16)
        norm = qkv[0, 0, 0, 0] if has_norm else None
        settings = {"bias": qkv[0, 0], "query_norm": norm, "key_norm": norm}
        window = chain_window(jnp.zeros((num_rows,), jnp.int32), window_length)
        return cache.layers[0], cache.table, qkv, window, settings

    given = jax.eval_shape(make)
    with as_if_on("h100"):
        text = compile_for("h100", write, *given, donated=0)
    assert text.hlo.count('custom_call_target="mosaic_gpu') == 1
    kv_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(given[0]))
    assert text.memory.alias_size_in_bytes == kv_bytes
    assert " copy(" not in text.hlo
