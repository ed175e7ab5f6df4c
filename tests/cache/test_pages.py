"""Pages: what is written where, what is dropped, what a committed path moves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError

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


def test_what_is_written_head_by_head_is_what_is_written_at_once():
    cache = make()
    slots = jnp.asarray([[2, -1, 4], [127, 128, 256]], jnp.int32)
    k = jax.random.normal(jax.random.key(0), (2, 3, HEADS, SIZE))
    at_once = kv.write(cache.layers[0], cache.table, k, -k, slots)
    layer = cache.layers[0].replace(is_written_by_head=True)
    by_head = kv.write(layer, cache.table, k, -k, slots).replace(is_written_by_head=False)
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


@pytest.mark.slow
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


WINDOW, SINKS, LONGEST_CALL = 150, 4, 40


def ring_cache(num_rows=2, *, capacity=1024, num_pages=None):
    """Empty, one layer of one head of size 1."""
    ring = kv.Ring.of_calls(window=WINDOW, num_sinks=SINKS, longest_call=LONGEST_CALL)
    if num_pages is not None:
        ring = dataclasses.replace(ring, num_pages=num_pages)
    empty = kv.init_cache(
        num_layers=1,
        num_rows=num_rows,
        capacity=min(ring.num_pages * kv.BLOCK, capacity),
        num_kv_heads=1,
        head_size=1,
        dtype=jnp.float32,
    )
    return kv.as_ring(empty, ring, capacity)


def written(cache, start, stop, *, row=0):
    """The cache after positions `start` to `stop` of a row were stored: position p as the value
    1000 * row + p."""
    for first in range(start, stop, LONGEST_CALL):
        at = jnp.arange(first, min(first + LONGEST_CALL, stop), dtype=jnp.int32)[None]
        value = jnp.float32(1000 * row) + at.astype(jnp.float32)[..., None, None]
        layer = kv.write(cache.layers[0], cache.table[row : row + 1], value, -value, at)
        cache = cache.replace(layers=(layer,))
    return cache


def read_positions(cache, row, positions):
    at = jnp.asarray(positions, jnp.int32)[None]
    k, v = kv.read_slots(cache.layers[0], cache.table[row : row + 1], at, jnp.float32)
    np.testing.assert_array_equal(k, -v)
    return np.asarray(k)[0, :, 0, 0] - 1000 * row


def test_a_ring_names_its_pages_in_turn_and_takes_no_more_for_longer_rows():
    cache = ring_cache()
    assert cache.table.tolist() == [[0, 1, 2, 1, 2, 1, 2, 1], [3, 4, 5, 4, 5, 4, 5, 4]]
    assert ring_cache(capacity=8192).layers[0].k.shape == cache.layers[0].k.shape
    assert ring_cache(capacity=8192).capacity == 8192
    # Rows that fit are kept whole, as without a ring.
    assert ring_cache(capacity=200).table.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_pages", [3, 2])
def test_a_ring_holds_what_queries_see_and_one_page_less_does_not(num_pages):
    cache = written(written(ring_cache(num_pages=num_pages), 0, 900), 0, 400, row=1)
    kept = []
    for row, end in ((0, 900), (1, 400)):
        # The first query of the call that wrote last.
        first = end - LONGEST_CALL
        seen = [*range(SINKS), *range(first - WINDOW + 1, end)]
        kept.append(np.array_equal(read_positions(cache, row, seen), seen))
    assert kept == [num_pages == 3] * 2
    assert not np.array_equal(read_positions(cache, 0, range(200, 300)), np.arange(200, 300))


def test_a_ring_knows_what_it_has_overwritten():
    ring = ring_cache().ring
    cache = written(ring_cache(), 0, 900)
    for num_kept in (0, 1, 100, 128, 129, 200, 500, 600, 780, 792, 793, 794, 850, 899, 900):
        seen = [*range(min(SINKS, num_kept)), *range(max(num_kept - WINDOW + 1, 0), num_kept)]
        is_there = np.array_equal(read_positions(cache, 0, seen), seen)
        assert bool(ring.holds(jnp.int32(num_kept), jnp.int32(900))) == is_there, num_kept
    assert bool(ring.holds(jnp.int32(793), jnp.int32(900)))
    assert not bool(ring.holds(jnp.int32(792), jnp.int32(900)))


def test_rows_of_rings_are_copied_and_paths_moved():
    source = written(ring_cache(num_rows=1), 0, 900)
    seen = [*range(SINKS), *range(900 - WINDOW, 900)]
    copy = jax.jit(kv.copy_row)
    cache = written(ring_cache(), 0, 300, row=1)
    copied = copy(cache, jnp.int32(0), source, jnp.int32(0), jnp.int32(900))
    np.testing.assert_array_equal(read_positions(copied, 0, seen), seen)
    np.testing.assert_array_equal(read_positions(copied, 1, range(150, 300)), range(150, 300))
    assert copied.num_distinct_blocks == 3  # of eight that the row has

    # A path over the end of a page that takes turns: entries 895, 897 and 898 of a tree at 893.
    start, path = jnp.asarray([893, 0], jnp.int32), jnp.asarray([[1, 3, 4], [-1] * 3], jnp.int32)
    moved = kv.commit_path(copied, start, path)
    assert read_positions(moved, 0, [893, 894, 895, 896]).tolist() == [893, 895, 897, 898]
    np.testing.assert_array_equal(read_positions(moved, 0, seen[:-10]), seen[:-10])


def test_poison_spares_what_queries_of_a_ring_see():
    cache = written(written(ring_cache(), 0, 900), 0, 100, row=1)
    poisoned = kv.poison_uncommitted(cache, jnp.asarray([890, 100], jnp.int32))
    seen = [*range(SINKS), *range(890 - WINDOW, 890)]
    np.testing.assert_array_equal(read_positions(poisoned, 0, seen), seen)
    np.testing.assert_array_equal(read_positions(poisoned, 1, range(100)), range(100))
    assert np.isnan(read_positions(poisoned, 0, [SINKS, 100, 890, 899])).all()
    stored = np.asarray(poisoned.layers[0].k)
    assert np.sum(~np.isnan(stored)) == SINKS + WINDOW + 100


def test_a_ring_cannot_be_aligned():
    with pytest.raises(SettingError, match=r"'aligned' was given for a cache that keeps 150"):
        kv.aligned(ring_cache())


@pytest.mark.parametrize("own", [None, 100, 150, 400])
def test_the_narrower_window_counts(own):
    expected = {"sliding_window": own, "num_sinks": 0}
    if own in (None, 400):
        expected = {"sliding_window": WINDOW, "num_sinks": SINKS}
    assert ring_cache().span(own) == expected
    assert ring_cache().replace(ring=None).span(own) == {"sliding_window": own}
