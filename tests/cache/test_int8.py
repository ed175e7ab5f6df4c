"""KV in int8: what is stored, what is read, and that moving it changes no bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError

ROWS, CAPACITY, HEADS, SIZE = 2, 256, 2, 16
SLOTS = jnp.broadcast_to(jnp.arange(CAPACITY, dtype=jnp.int32), (ROWS, CAPACITY))


def random(seed, *shape):
    """Vectors of very different lengths, so that each has a scale of its own."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-4, 4, (*shape[:-1], 1)))
    return jnp.asarray(rng.standard_normal(shape) * sizes, jnp.float32)


def filled(dtype=jnp.float32, kv_dtype="int8", seed=0):
    """A cache with KV in every slot, and that KV."""
    cache = kv.init_cache(
        num_layers=1,
        num_rows=ROWS,
        capacity=CAPACITY,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    k, v = (random(seed + i, ROWS, CAPACITY, HEADS, SIZE).astype(dtype) for i in range(2))
    layer = kv.write(cache.layers[0], cache.table, k, v, SLOTS)
    return cache.replace(layers=(layer,)), k, v


def stored(cache):
    """Codes and scales by row and slot: `[B, S, K, H]` twice and `[B, S, K]` twice."""
    pages = jax.tree.leaves(cache.layers[0])
    table = np.asarray(cache.table.pages if cache.first_slot is not None else cache.table)
    return [
        np.moveaxis(np.asarray(x)[table], 3, 2).reshape(ROWS, CAPACITY, *x.shape[1:2], -1)
        for x in pages
    ]


def as_defined(x):
    """Codes and scales by the definition, in NumPy."""
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(axis=-1) * np.float32(1 / 127)
    scale = np.where(scale == 0, np.float32(1), scale)
    inverse = np.float32(1) / scale
    return np.clip(np.round(x * inverse[..., None]), -127, 127).astype(np.int8), scale


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_codes_and_scales_are_those_of_the_definition(dtype):
    x = random(1, 50, 3, SIZE).astype(dtype).at[4, 1].set(0)
    codes, scale = jax.jit(kv.quantise)(x)
    expected_codes, expected_scale = as_defined(x)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes, expected_codes)
    assert codes.dtype == jnp.int8
    assert scale.dtype == jnp.float32
    assert scale[4, 1] == 1
    assert np.abs(np.asarray(codes, np.int32)).max(axis=-1).tolist() == [
        [0 if (i, j) == (4, 1) else 127 for j in range(3)] for i in range(50)
    ]
    error = np.abs(np.asarray(kv.dequantise(codes, scale, jnp.float32)) - np.asarray(x, np.float32))
    assert np.all(error <= 0.5001 * np.asarray(scale)[..., None])


def test_ties_are_rounded_to_even():
    halves = jnp.asarray(
        [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127, 0.49999997, 126.5], jnp.float32
    )
    codes, scale = kv.quantise(halves)
    assert scale == 1
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, -2, -127, 0, 126]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_is_read_as_nan_and_its_neighbours_are_not(bad):
    x = random(2, 3, 4, SIZE).at[1, 2, 5].set(bad)
    read = np.asarray(kv.dequantise(*kv.quantise(x), jnp.float32))
    expected = np.zeros((3, 4), bool)
    expected[1, 2] = True
    np.testing.assert_array_equal(np.isnan(read).all(axis=-1), expected)
    np.testing.assert_array_equal(np.isnan(read).any(axis=-1), expected)


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-36, 3e38])
def test_the_smallest_and_the_largest_vectors_are_finite(size):
    read = kv.dequantise(*kv.quantise(jnp.full((1, SIZE), size, jnp.float32)), jnp.float32)
    np.testing.assert_allclose(read, np.full((1, SIZE), size), rtol=1e-6, atol=2e-36)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_read_is_the_code_times_the_scale_in_the_compute_dtype(dtype):
    cache, k, v = filled(dtype)
    expected = [
        jnp.asarray(codes * scale[..., None]).astype(dtype)
        for codes, scale in map(as_defined, (k, v))
    ]
    layer = cache.layers[0]
    for got, wanted in zip(kv.read_slots(layer, cache.table, SLOTS, dtype), expected, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))
    block = kv.read_block(layer, cache.table, jnp.int32(1), dtype)
    for got, wanted in zip(block, expected, strict=True):
        wanted = jnp.swapaxes(wanted[:, kv.BLOCK :], 1, 2)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.parametrize("size", [64, 128])
def test_bytes_are_those_of_the_codes_and_one_scale_a_vector(size):
    def num_bytes(kv_dtype):
        cache = jax.eval_shape(
            lambda: kv.init_cache(
                num_layers=3,
                num_rows=2,
                capacity=300,
                num_kv_heads=2,
                head_size=size,
                dtype=jnp.bfloat16,
                kv_dtype=kv_dtype,
            )
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))

    assert num_bytes("int8") / num_bytes(None) == (size + 4) / (2 * size)


# Moving

START, PATH = jnp.asarray([10, 125], jnp.int32), jnp.asarray([[1, 3, -1], [0, 2, 4]], jnp.int32)


def moved_by_definition(before):
    after = [x.copy() for x in before]
    for row, path in enumerate(np.asarray(PATH)):
        for depth, node in enumerate(path):
            if node >= 0:
                for new, old in zip(after, before, strict=True):
                    new[row, START[row] + 1 + depth] = old[row, START[row] + 1 + node]
    return after


def committed(cache):
    return stored(jax.jit(kv.commit_path)(cache, START, PATH))


def requantised(layer, before, source, after, target):
    """What `move_slots` must not do; by way of bf16, so that numbers are rounded on the way."""
    k, v = kv.read_slots(layer, before, source, jnp.float32)
    k, v = (jax.lax.reduce_precision(part, exponent_bits=8, mantissa_bits=7) for part in (k, v))
    return kv.write(layer, after, k, v, target)


def num_other_bits(ours, expected):
    return sum(int((mine != right).sum()) for mine, right in zip(ours, expected, strict=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_committed_path_is_moved_bit_for_bit(dtype):
    cache, _, _ = filled(dtype)
    assert len(stored(cache)) == 4
    assert num_other_bits(committed(cache), moved_by_definition(stored(cache))) == 0


def test_the_check_above_catches_a_path_that_is_quantised_again(monkeypatch):
    cache, _, _ = filled()
    monkeypatch.setattr(kv, "move_slots", requantised)
    moved = stored(kv.commit_path(cache, START, PATH))
    assert num_other_bits(moved, moved_by_definition(stored(cache))) > 0


def aligned_case():
    cache, _, _ = filled()
    table = kv.AlignedTable(pages=cache.table, first_slot=jnp.asarray([60, 0], jnp.int32))
    return cache.replace(table=table), jnp.asarray([180, 100], jnp.int32)


def realigned():
    cache, num_committed = aligned_case()
    moved = kv.realign(cache, num_committed, largest=180)
    return stored(cache), stored(moved), np.asarray(moved.first_slot)


def test_rows_are_realigned_bit_for_bit():
    before, after, first_slot = realigned()
    assert first_slot.tolist() == [0, 80]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[0, :179], old[0, 60 : 60 + 179])
        np.testing.assert_array_equal(new[1, 80 : 80 + 99], old[1, :99])


def test_the_check_above_catches_rows_that_are_quantised_again(monkeypatch):
    monkeypatch.setattr(kv, "move_slots", requantised)
    before, after, _ = realigned()
    changes = [new[0, :179] != old[0, 60:239] for old, new in zip(before, after, strict=True)]
    assert any(change.any() for change in changes)


def test_a_row_is_copied_and_kept_with_its_scales():
    cache, source = filled()[0], filled(seed=7)[0]
    one, num_slots = jnp.int32(1), jnp.int32(130)
    copied = stored(jax.jit(kv.copy_row)(cache, jnp.int32(0), source, one, num_slots))
    for new, old, theirs in zip(copied, stored(cache), stored(source), strict=True):
        np.testing.assert_array_equal(new[0], theirs[1])
        np.testing.assert_array_equal(new[1], old[1])


def test_poison_leaves_what_is_live_and_spoils_the_rest():
    cache, _, _ = filled(jnp.bfloat16)
    num_live = jnp.asarray([100, 130], jnp.int32)
    spoiled = kv.poison_uncommitted(cache, num_live)
    is_live = np.arange(CAPACITY) < np.asarray(num_live)[:, None]
    for new, old in zip(stored(spoiled), stored(cache), strict=True):
        np.testing.assert_array_equal(new[is_live], old[is_live])
    for part in kv.read_slots(spoiled.layers[0], spoiled.table, SLOTS, jnp.bfloat16):
        is_nan = np.isnan(np.asarray(part, np.float32))
        np.testing.assert_array_equal(is_nan.all(axis=(2, 3)), ~is_live)
        np.testing.assert_array_equal(is_nan.any(axis=(2, 3)), ~is_live)


def test_a_scale_of_the_neighbour_is_read_as_other_numbers():
    cache, k, _ = filled()
    layer = cache.layers[0]
    wrong = dataclasses.replace(layer, k_scale=jnp.roll(layer.k_scale, 1, axis=2))
    read, _ = kv.read_slots(wrong, cache.table, SLOTS, jnp.float32)
    right, _ = kv.read_slots(layer, cache.table, SLOTS, jnp.float32)
    size = np.abs(np.asarray(k)).max(axis=-1)
    assert (np.abs(np.asarray(right - k)).max(axis=-1) <= 0.004 * size).all()
    assert (np.abs(np.asarray(read - k)).max(axis=-1) > 0.004 * size).mean() > 0.9


@pytest.mark.parametrize("kv_dtype", ["int4", "fp8", "bfloat16", ""])
def test_another_dtype_is_refused(kv_dtype):
    with pytest.raises(SettingError, match="it must be int8, or None"):
        filled(kv_dtype=kv_dtype)
