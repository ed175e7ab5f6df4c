"""Pages: what is written where, what is dropped, what a committed path moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache import pages as kv

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
    np.testing.assert_array_equal(np.asarray(k, np.float32), -np.asarray(v, np.float32))
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


def test_a_tpu_writes_head_by_head_what_others_write_at_once(monkeypatch):
    cache = make()
    slots = jnp.asarray([[2, -1, 4], [127, 128, 256]], jnp.int32)
    k = jax.random.normal(jax.random.key(0), (2, 3, HEADS, SIZE))
    at_once = kv.write(cache.layers[0], cache.table, k, -k, slots)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    by_head = kv.write(cache.layers[0], cache.table, k, -k, slots)
    jax.tree.map(np.testing.assert_array_equal, at_once, by_head)
    assert np.count_nonzero(at_once.k) == 4 * HEADS * SIZE


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


commit_path = jax.jit(kv.commit_path)


@settings(max_examples=25, deadline=None)
@given(paths=st.lists(st.lists(st.integers(-1, 8), min_size=3, max_size=3), min_size=2, max_size=2))
def test_a_path_of_any_places_moves_no_more_than_its_depth(paths):
    """A draft model stores nodes in an order of its own, and some not at all."""
    starts, num_stored = [10, 120], 9  # the second row's go over the end of a page
    cache = make()
    slots = jnp.asarray([[start + offset for offset in range(10)] for start in starts], jnp.int32)
    layer = kv.write(cache.layers[0], cache.table, *values(slots), slots)
    cache = cache.replace(layers=(layer,))
    before = read_all(cache)
    after = read_all(commit_path(cache, np.asarray(starts, np.int32), np.asarray(paths, np.int32)))
    expected = before.copy()
    for row, (start, path) in enumerate(zip(starts, paths, strict=True)):
        for depth, place in enumerate(path):
            assert place < num_stored
            if place >= 0:
                expected[row, start + 1 + depth] = before[row, start + 1 + place]
    np.testing.assert_array_equal(after, expected)


def test_capacity_is_rounded_up_to_a_block():
    assert make(capacity=1).capacity == kv.BLOCK
    assert make(capacity=129).capacity == 2 * kv.BLOCK


def padded(first_slot, num_committed, *, dtype=jnp.float32):
    """An aligned cache of three blocks a row whose KV names row and position, NaN elsewhere."""
    cache = kv.aligned(make(num_rows=len(first_slot), capacity=3 * kv.BLOCK, dtype=dtype))
    table = cache.table.replace(first_slot=jnp.asarray(first_slot, jnp.int32))
    # Pages in disorder: a row's blocks are nowhere near each other.
    table = table.replace(pages=table.pages[::-1, ::-1])
    every = np.broadcast_to(np.arange(cache.capacity), (len(first_slot), cache.capacity))
    named = 1000 * np.arange(len(first_slot))[:, None] + every  # in fp32; the others hold less
    k, v = values(named if dtype == jnp.float32 else every % 100, dtype)
    slots = jnp.asarray(every, jnp.int32)
    layer = kv.write(cache.layers[0], table, k, v, slots)
    num_live = jnp.asarray(num_committed, jnp.int32) - 1
    return kv.poison_uncommitted(cache.replace(table=table, layers=(layer,)), num_live)


def live(cache, num_committed):
    """K of each row's positions that have KV, with a check that V is theirs."""
    stored = read_all(cache)
    return [stored[row, : n - 1].tolist() for row, n in enumerate(num_committed)]


realign = jax.jit(functools.partial(kv.realign, largest=380))


def realigned(cache, num_committed):
    return realign(cache, jnp.asarray(num_committed, jnp.int32))


def test_an_aligned_row_is_written_and_read_by_position():
    cache = kv.aligned(make())
    cache = cache.replace(table=cache.table.replace(first_slot=jnp.asarray([0, 100], jnp.int32)))
    slots = jnp.asarray([[2, -1], [50, 200]], jnp.int32)  # slot 300 is none of the row's
    layer = kv.write(cache.layers[0], cache.table, *values(slots), slots)
    written = cache.replace(layers=(layer,))
    assert np.count_nonzero(read_all(written.replace(table=cache.table.pages))) == 2
    assert read_all(written.replace(table=cache.table.pages))[1, 150] == 151
    k, _ = kv.read_slots(layer, cache.table, jnp.asarray([[2], [50]], jnp.int32), jnp.float32)
    assert k[:, 0, 0, 0].tolist() == [3, 151]
    assert kv.positions_of(cache.table, jnp.asarray([0, 150], jnp.int32)).tolist() == [
        [0, 150],
        [-100, 50],
    ]


def test_realignment_on_the_drawn_example():
    cache = padded([2, 1], [4, 6])
    moved = realigned(cache, [4, 6])
    assert moved.first_slot.tolist() == [2, 0]
    assert live(moved, [4, 6]) == live(cache, [4, 6])


@settings(max_examples=60, deadline=None)
@given(
    first_slot=st.lists(st.integers(0, 100), min_size=3, max_size=3),
    num_committed=st.lists(st.integers(1, 280), min_size=3, max_size=3),
)
def test_realignment_keeps_kv_and_makes_rows_end_together(first_slot, num_committed):
    cache = padded(first_slot, num_committed)
    moved = realigned(cache, num_committed)
    np.testing.assert_array_equal(live(moved, num_committed)[0], live(cache, num_committed)[0])
    assert live(moved, num_committed) == live(cache, num_committed)
    ends = np.asarray(moved.first_slot) + num_committed
    assert len(set(ends.tolist())) == 1
    was = np.asarray(first_slot) + num_committed
    if len(set(was.tolist())) == 1:  # corollary B.3: whatever the paddings are
        assert moved.first_slot.tolist() == first_slot
    else:
        assert ends[0] == max(num_committed)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_realignment_moves_bits_of_any_dtype_both_ways_across_blocks(dtype):
    first_slot, num_committed = [0, 110, 3], [270, 150, 5]
    cache = padded(first_slot, num_committed, dtype=dtype)
    moved = realigned(cache, num_committed)
    assert moved.first_slot.tolist() == [0, 120, 265]
    assert live(moved, num_committed) == live(cache, num_committed)


def test_what_is_aligned_is_left_alone_unless_a_round_would_not_fit():
    first_slot = jnp.asarray([10, 7, 90], jnp.int32)
    num_committed = jnp.asarray([5, 8, 0], jnp.int32)  # the third row holds nothing
    kept = kv.aligned_first_slot(first_slot, num_committed, largest=15)
    assert kept.tolist() == [10, 7, 0]
    assert kv.num_moved(first_slot, kept, num_committed).tolist() == [0, 0, 0]
    compact = kv.aligned_first_slot(first_slot, num_committed, largest=14)
    assert compact.tolist() == [3, 0, 0]
    assert kv.num_moved(first_slot, compact, num_committed).tolist() == [4, 7, 0]


def test_a_ragged_cache_is_not_realigned_and_a_new_request_has_no_padding():
    cache = make()
    assert kv.realign(cache, jnp.asarray([3, 9], jnp.int32), largest=200) is cache
    assert kv.without_padding(cache, jnp.int32(0)) is cache
    assert cache.first_slot is None
    assert kv.without_padding(padded([4, 5], [2, 2]), jnp.int32(1)).first_slot.tolist() == [4, 0]


def test_rows_that_move_both_ways_in_one_order_would_overwrite_what_is_still_to_be_read():
    # The sabotage: both directions in ascending order. The check of live KV sees it.
    first_slot, num_committed = [0, 0], [270, 150]
    cache = padded(first_slot, num_committed)
    layer, pages = cache.layers[0], cache.table.pages
    after = kv.AlignedTable(pages=pages, first_slot=jnp.asarray([0, 120], jnp.int32))
    for start in (0, kv.BLOCK):
        source = jnp.broadcast_to(start + jnp.arange(kv.BLOCK, dtype=jnp.int32), (2, kv.BLOCK))
        target = jnp.where(source < jnp.asarray([[0], [149]]), source, -1)
        k, v = kv.read_slots(layer, cache.table, source, cache.dtype)
        layer = kv.write(layer, after, k, v, target)
    broken = cache.replace(layers=(layer,), table=after)
    assert live(broken, num_committed)[1] != live(cache, num_committed)[1]
