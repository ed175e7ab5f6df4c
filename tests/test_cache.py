"""Pages: what is written where, what is dropped, what a committed path moves."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import cache as kv

HEADS, SIZE = 2, 4


def make(num_rows=2, capacity=256, dtype=jnp.float32, table=None):
    cache = kv.init_cache(
        num_layers=1,
        num_rows=num_rows,
        capacity=capacity,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=dtype,
    )
    return cache if table is None else cache.replace(table=jnp.asarray(table, jnp.int32))


def values(slots, dtype=jnp.float32):
    """KV that names its slot and row: k = 100 row + slot, v = -k."""
    slots = np.asarray(slots)
    k = 100 * np.arange(slots.shape[0])[:, None] + slots + 1
    k = np.broadcast_to(k[..., None, None], (*slots.shape, HEADS, SIZE))
    return jnp.asarray(k, dtype), jnp.asarray(-k, dtype)


def read_all(cache):
    slots = jnp.broadcast_to(
        jnp.arange(cache.capacity, dtype=jnp.int32), (cache.table.shape[0], cache.capacity)
    )
    k, v = kv.read_slots(cache.layers[0], cache.table, slots, cache.dtype)
    np.testing.assert_array_equal(k, -v)
    return np.asarray(k[..., 0, 0], np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_are_written_at_their_own_offsets(dtype):
    cache = make(dtype=dtype)
    slots = jnp.asarray([[2, 3, 4], [126, 127, 128]], jnp.int32)
    layer = kv.write(cache.layers[0], cache.table, *values(slots, dtype), slots)
    stored = read_all(cache.replace(layers=(layer,)))
    expected = np.zeros((2, 256))
    expected[0, 2:5] = [3, 4, 5]
    expected[1, 126:129] = [227, 228, 229]
    np.testing.assert_array_equal(stored, expected)


def test_bfloat16_is_stored_as_integers():
    assert make(dtype=jnp.bfloat16).layers[0].k.dtype == jnp.uint16


@pytest.mark.parametrize("bad", [-1, -200, 256, 257, 100_000])
def test_slots_outside_the_row_are_dropped_and_touch_no_neighbour(bad):
    cache = make()
    slots = jnp.asarray([[0, bad], [bad, 1]], jnp.int32)
    layer = kv.write(cache.layers[0], cache.table, *values(slots), slots)
    stored = read_all(cache.replace(layers=(layer,)))
    assert stored[0, 0] == 1
    assert stored[1, 1] == 102
    assert np.count_nonzero(stored) == 2


def test_the_page_table_decides_where_rows_live():
    plain, permuted = make(), make(table=[[3, 0], [2, 1]])
    slots = jnp.asarray([[0, 130], [5, 255]], jnp.int32)
    for cache in (plain, permuted):
        layer = kv.write(cache.layers[0], cache.table, *values(slots), slots)
        stored = read_all(cache.replace(layers=(layer,)))
        assert [stored[0, 0], stored[0, 130], stored[1, 5], stored[1, 255]] == [1, 131, 106, 356]
    block = kv.read_block(layer, permuted.table, jnp.int32(1), jnp.float32)[0]
    assert block.shape == (2, HEADS, kv.BLOCK, SIZE)
    assert float(block[0, 0, 2, 0]) == 131


def test_an_accepted_path_moves_into_consecutive_slots():
    cache = make()
    slots = jnp.asarray([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]], jnp.int32)
    layer = kv.write(cache.layers[0], cache.table, *values(slots), slots)
    path = jnp.asarray([[1, 3, -1, -1], [0, 1, 2, -1]], jnp.int32)
    moved = kv.commit_path(cache.replace(layers=(layer,)), jnp.asarray([10, 20], jnp.int32), path)
    stored = read_all(moved)
    assert stored[0, 10:13].tolist() == [11, 13, 15]  # root, node 1 (slot 12), node 3 (slot 14)
    assert stored[1, 20:25].tolist() == [121, 122, 123, 124, 125]  # a chain does not move


def test_capacity_is_rounded_up_to_a_block():
    assert make(capacity=1).capacity == kv.BLOCK
    assert make(capacity=129).capacity == 2 * kv.BLOCK
