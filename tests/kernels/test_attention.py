"""Block attention against a dense reference, and what must not change a bit of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache import pages as kv
from jaxspec.kernels.xla import block_attention
from jaxspec.types import Window

HEADS, GROUP, SIZE = 2, 3, 8


def setup(starts, window_length, *, capacity=512, dtype=jnp.float32, seed=0, fill=0.0):
    """A cache of random KV up to each row's window end, garbage (`fill`) beyond, and queries."""
    rng = np.random.default_rng(seed)
    num_rows = len(starts)
    start = jnp.asarray(starts, jnp.int32)
    positions = start[:, None] + jnp.arange(window_length, dtype=jnp.int32)[None]
    cache = kv.init_cache(
        num_layers=1,
        num_rows=num_rows,
        capacity=capacity,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=jnp.float32,
    )
    k, v = (
        np.asarray(rng.standard_normal((num_rows, capacity, HEADS, SIZE)), np.float32)
        for _ in range(2)
    )
    for row, begin in enumerate(starts):
        k[row, begin + window_length :] = v[row, begin + window_length :] = fill
    slots = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (num_rows, capacity))
    layer = kv.write(cache.layers[0], cache.table, jnp.asarray(k), jnp.asarray(v), slots)
    queries = jnp.asarray(
        rng.standard_normal((num_rows, window_length, HEADS * GROUP, SIZE)), jnp.float32
    )
    window = Window(start=start, positions=positions, slots=positions)
    return queries, layer, cache.table, window, k, v


def dense(queries, k, v, positions, sliding_window=None):
    """Softmax attention in float64, one query at a time."""
    queries, positions = np.asarray(queries, np.float64), np.asarray(positions)
    out = np.zeros(queries.shape)
    for row, t, head in np.ndindex(queries.shape[:3]):
        last = positions[row, t]
        first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
        keys = np.asarray(k[row, first : last + 1, head // GROUP], np.float64)
        vals = np.asarray(v[row, first : last + 1, head // GROUP], np.float64)
        scores = keys @ queries[row, t, head] / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max())
        out[row, t, head] = weights @ vals / weights.sum()
    return out


run = jax.jit(block_attention, static_argnames=("dtype", "sliding_window"))


@settings(max_examples=25, deadline=None)
@given(
    starts=st.lists(st.integers(0, 400), min_size=3, max_size=3),
    sliding_window=st.sampled_from([None, 1, 5, 130]),
)
def test_equals_dense_attention(starts, sliding_window):
    queries, layer, table, window, k, v = setup(starts, 4, fill=np.nan)
    got = run(queries, layer, table, window, dtype=jnp.float32, sliding_window=sliding_window)
    expected = dense(queries, k, v, window.positions, sliding_window)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_the_check_above_catches_a_query_that_sees_one_slot_too_many():
    queries, layer, table, window, k, v = setup([40, 200, 300], 4)
    shifted = window.replace(positions=window.positions + 1)
    got = run(queries, layer, table, shifted, dtype=jnp.float32)
    assert np.abs(got - dense(queries, k, v, window.positions)).max() > 1e-2


def test_neighbours_of_any_length_change_no_bit():
    results = []
    for neighbour in (0, 37, 100, 380):
        _, layer, table, window, k, v = setup([37, neighbour], 4, seed=neighbour)
        queries, _, _, _, own_k, own_v = setup([37, 37], 4, seed=1)
        k[0], v[0] = own_k[0], own_v[0]
        every = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), (2, 512))
        layer = kv.write(layer, table, jnp.asarray(k), jnp.asarray(v), every)
        results.append(np.asarray(run(queries, layer, table, window, dtype=jnp.float32))[0])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_garbage_beyond_the_window_changes_no_bit_even_if_it_is_nan():
    clean = setup([5, 130], 4, fill=0.0)
    dirty = setup([5, 130], 4, fill=np.nan)
    np.testing.assert_array_equal(
        run(*clean[:4], dtype=jnp.float32), run(*dirty[:4], dtype=jnp.float32)
    )


def test_a_tree_node_sees_its_ancestors_as_if_they_were_committed():
    # Two branches below the root: nodes 1 and 2, then 3 below 2. Bits equal those of the chain
    # root, 2, 3 standing in consecutive slots.
    queries, layer, table, window, k, v = setup([60, 126], 4)
    paths = jnp.asarray([[[0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 2, 3, 0]]] * 2, jnp.int32)
    depth = jnp.asarray([0, 1, 1, 2], jnp.int32)
    tree = window.replace(positions=window.start[:, None] + depth[None], paths=paths)
    got = run(queries, layer, table, tree, dtype=jnp.float32)

    chain_k, chain_v = k.copy(), v.copy()
    for row, start in enumerate((60, 126)):
        for source, target in ((2, 1), (3, 2)):
            chain_k[row, start + target] = k[row, start + source]
            chain_v[row, start + target] = v[row, start + source]
    every = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), (2, 512))
    chain_layer = kv.write(layer, table, jnp.asarray(chain_k), jnp.asarray(chain_v), every)
    chain_queries = queries.at[:, 1].set(queries[:, 2]).at[:, 2].set(queries[:, 3])
    identity = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4, 4))
    chain = run(
        chain_queries, chain_layer, table, window.replace(paths=identity), dtype=jnp.float32
    )
    np.testing.assert_array_equal(got[:, 0], chain[:, 0])
    np.testing.assert_array_equal(got[:, 2], chain[:, 1])
    np.testing.assert_array_equal(got[:, 3], chain[:, 2])
    np.testing.assert_allclose(
        chain, run(chain_queries, chain_layer, table, window, dtype=jnp.float32), atol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_near_full(dtype):
    queries, _, _, window, k, v = setup([50, 260], 3)
    half = kv.init_cache(
        num_layers=1, num_rows=2, capacity=512, num_kv_heads=HEADS, head_size=SIZE, dtype=dtype
    )
    every = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), (2, 512))
    layer = kv.write(
        half.layers[0],
        half.table,
        jnp.asarray(k).astype(dtype),
        jnp.asarray(v).astype(dtype),
        every,
    )
    got = run(queries.astype(dtype), layer, half.table, window, dtype=dtype)
    assert got.dtype == dtype
    expected = dense(queries, k, v, window.positions)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=3e-2)


@settings(max_examples=15, deadline=None)
@given(
    starts=st.lists(st.integers(0, 200), min_size=3, max_size=3),
    padding=st.lists(st.integers(0, 250), min_size=3, max_size=3),
    sliding_window=st.sampled_from([None, 5, 130]),
)
def test_padded_rows_equal_dense_attention_and_see_no_padding(starts, padding, sliding_window):
    queries, layer, pages, window, k, v = setup(starts, 4)
    table, layer = pad(layer, pages, padding, k, v, starts)
    got = run(queries, layer, table, window, dtype=jnp.float32, sliding_window=sliding_window)
    expected = dense(queries, k, v, window.positions, sliding_window)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_padding_that_is_seen_is_caught_by_the_check_above():
    starts = [40, 100, 200]
    queries, layer, pages, window, k, v = setup(starts, 4)
    table, layer = pad(layer, pages, [9, 0, 30], k, v, starts, fill=1.0)
    # Positions are taken for slots: two rows look at their padding, and not at their last tokens.
    got = run(queries, layer, table.pages, window, dtype=jnp.float32)
    differs = np.abs(got - dense(queries, k, v, window.positions)).max(axis=(1, 2, 3))
    assert differs[0] > 1e-2 > differs[1]


def test_a_tree_in_a_padded_row_sees_what_it_sees_in_an_unpadded_one():
    queries, layer, pages, window, k, v = setup([60, 126], 4)
    paths = jnp.asarray([[[0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 2, 3, 0]]] * 2, jnp.int32)
    depth = jnp.asarray([0, 1, 1, 2], jnp.int32)
    tree = window.replace(positions=window.start[:, None] + depth[None], paths=paths)
    expected = run(queries, layer, pages, tree, dtype=jnp.float32)
    table, layer = pad(layer, pages, [70, 3], k, v, [60, 126])
    got = run(queries, layer, table, tree, dtype=jnp.float32)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def pad(layer, pages, padding, k, v, starts, *, fill=np.nan):
    """The rows moved to the right by their `padding`, garbage wherever no token of theirs is."""
    table = kv.AlignedTable(pages=pages, first_slot=jnp.asarray(padding, jnp.int32))
    shape = (len(starts), pages.shape[1] * layer.block)
    every = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    garbage = jnp.full((*shape, HEADS, SIZE), fill, jnp.float32)
    layer = kv.write(layer, pages, garbage, garbage, every)
    last = np.asarray(starts)[:, None] + 4
    slots = jnp.where(every < last, every, -1)
    return table, kv.write(layer, table, jnp.asarray(k), jnp.asarray(v), slots)
