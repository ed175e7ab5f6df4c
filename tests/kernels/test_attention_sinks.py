"""Attention over a ring of pages: the newest positions and the first few, whatever lies between."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from windows import ROUNDING, as_trees, path_of, random_parents

from jaxspec.cache import pages as kv
from jaxspec.kernels import xla
from jaxspec.kernels.registry import default_kernels, get_kernels
from jaxspec.kernels.xla import block_attention
from jaxspec.models import layers
from jaxspec.types import Window

HEADS, GROUP, SIZE, CAPACITY, LONGEST_CALL = 2, 2, 16, 1536, 40
WINDOW = 150
STARTS = (0, 3, 126, 149, 270, 700, 1400)


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def window_after(starts, length, tree_depth=None):
    """A chain after each of `starts`, or random trees."""
    start = jnp.asarray(starts, jnp.int32)
    positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    window = Window(start=start, positions=positions, slots=positions)
    if tree_depth is None:
        return window
    rng = np.random.default_rng(0)
    parents = [random_parents(rng, length - 1, depth=tree_depth) for _ in starts]
    return as_trees(window, parents, depth=tree_depth)


def ring_setup(window, num_sinks, *, num_pages=None, dtype=jnp.float32):
    """A cache with NaN wherever no query of the window looks, and its KV `[B, S, K, H]`, each row's
    the same whoever its neighbours are."""
    starts = np.asarray(window.start).tolist()
    ring = kv.Ring.of_calls(window=WINDOW, num_sinks=num_sinks, longest_call=LONGEST_CALL)
    if num_pages is not None:
        ring = kv.Ring(window=WINDOW, num_sinks=num_sinks, num_pages=num_pages)
    cache = kv.init_cache(
        num_layers=1,
        num_rows=len(starts),
        capacity=min(ring.num_pages * kv.BLOCK, CAPACITY),
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=dtype,
    )
    cache = kv.as_ring(cache, ring, CAPACITY)
    k, v = (
        np.stack([random(seed + start, CAPACITY, HEADS, SIZE) for start in starts])
        for seed in (1000, 2000)
    )
    every = jnp.broadcast_to(jnp.arange(CAPACITY, dtype=jnp.int32), k.shape[:2])
    positions = np.asarray(window.positions)
    begin = jnp.asarray(positions.min(axis=1, keepdims=True) - WINDOW + 1)
    end = jnp.asarray(np.asarray(window.slots).max(axis=1, keepdims=True) + 1)
    is_seen = ((every >= begin) | (every < num_sinks)) & (every < end)
    nan = kv._to_storage(jnp.full((), jnp.nan, dtype), cache.layers[0].k)
    poisoned = jax.tree.map(lambda x: jnp.broadcast_to(nan, x.shape), cache.layers[0])
    layer = kv.write(
        poisoned,
        cache.table,
        jnp.asarray(k).astype(dtype),
        jnp.asarray(v).astype(dtype),
        jnp.where(is_seen, every, -1),
    )
    return layer, cache, k, v


def queries_of(window, dtype=jnp.float32):
    length = window.positions.shape[1]
    made = [random(int(start), 40, HEADS * GROUP, SIZE)[:length] for start in window.start]
    return jnp.asarray(np.stack(made)).astype(dtype)


def dense(queries, k, v, window, num_sinks):
    """Softmax attention in float64, one query at a time, over all of a row's KV."""
    queries, positions = np.asarray(queries, np.float64), np.asarray(window.positions)
    out = np.zeros(queries.shape)
    for row, t, head in np.ndindex(queries.shape[:3]):
        is_tree = window.paths is not None
        at = path_of(window, row, t) if is_tree else np.arange(positions[row, t] + 1)
        virtual = np.arange(len(at))
        at = at[(virtual < num_sinks) | (virtual > positions[row, t] - WINDOW)]
        scores = k[row, at, head // GROUP].astype(np.float64) @ queries[row, t, head]
        weights = np.exp((scores - scores.max()) / np.sqrt(SIZE))
        out[row, t, head] = weights @ v[row, at, head // GROUP] / weights.sum()
    return out


@functools.partial(jax.jit, static_argnames=("backend", "num_sinks", "dtype"))
def attention(queries, layer, table, window, *, backend, num_sinks, dtype=jnp.float32):
    return backend(
        queries, layer, table, window, dtype=dtype, sliding_window=WINDOW, num_sinks=num_sinks
    )


BACKENDS = {"xla": block_attention, "pallas": get_kernels("pallas").attention}
CASES = [(1, None, 4), (8, None, 4), (8, None, 0), (8, None, 128), (8, 3, 4), (20, 7, 20)]


@pytest.mark.parametrize(
    ("backend", "length", "tree_depth", "num_sinks"),
    [("xla", *case) for case in CASES] + [("pallas", *case) for case in CASES[1::2]],
)
def test_equals_dense_attention_over_what_is_visible(backend, length, tree_depth, num_sinks):
    window = window_after(STARTS, length, tree_depth)
    layer, cache, k, v = ring_setup(window, num_sinks)
    assert cache.layers[0].k.shape[0] == len(STARTS) * 3  # of 12 blocks that a row may have
    queries = queries_of(window)
    got = attention(
        queries, layer, cache.table, window, backend=BACKENDS[backend], num_sinks=num_sinks
    )
    np.testing.assert_allclose(got, dense(queries, k, v, window, num_sinks), atol=2e-5)


@pytest.mark.parametrize("tree_depth", [None, 7])
def test_the_check_above_catches_a_ring_that_is_one_page_short(tree_depth):
    window = window_after((370,), LONGEST_CALL, tree_depth)  # 221 to 409: more than one block
    for num_pages, is_right in ((3, True), (2, False)):
        layer, cache, k, v = ring_setup(window, 4, num_pages=num_pages)
        queries = queries_of(window)
        got = attention(queries, layer, cache.table, window, backend=block_attention, num_sinks=4)
        distance = np.abs(np.asarray(got) - dense(queries, k, v, window, 4)).max()
        assert (distance < 2e-5) == is_right


def attend(name, qkv, layer, table, window, num_sinks, dtype):
    """Projections to heads, as a decoder calls it."""
    config = toy.config(
        num_query_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_size=SIZE,
        rope=toy.RopeConfig(theta=1e4, rotary_size=SIZE),
        has_qk_norm=False,
    )

    @jax.jit
    def run(qkv, layer, table, window):
        return get_kernels(name).attend(
            qkv,
            layer,
            table,
            window,
            layers.rotary_angles(config.rope, window.positions),
            dtype=dtype,
            sliding_window=WINDOW,
            num_sinks=num_sinks,
            **layers.attention_settings(config, {}),
        )

    heads, layer = run(qkv, layer, table, window)
    stored = kv.read_slots(layer, table, window.slots, dtype)
    return [np.asarray(values, np.float32) for values in (heads, *stored)]


@pytest.mark.skipif(default_kernels() != "native", reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "length", "tree_depth", "num_sinks"),
    [(jnp.float32, *case) for case in CASES[1:]] + [(jnp.bfloat16, *CASES[4])],
)
def test_native_attention_equals_xlas(dtype, length, tree_depth, num_sinks):
    window = window_after(STARTS, length, tree_depth)
    layer, cache, *_ = ring_setup(window, num_sinks, dtype=dtype)
    qkv = np.stack([random(start, 20, HEADS, GROUP + 2, SIZE)[:length] for start in STARTS])
    qkv = jnp.asarray(qkv).astype(dtype)
    ours, theirs = (
        attend(name, qkv, layer, cache.table, window, num_sinks, dtype)
        for name in ("native", "xla")
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=4 * ROUNDING[dtype])
    # A row's bits are its own.
    for row in (1, 5):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], (qkv, window))
        table = cache.table[row : row + 1]
        heads, *_ = attend("native", alone[0], layer, table, alone[1], num_sinks, dtype)
        np.testing.assert_array_equal(heads[0], ours[0][row])


def test_neighbours_change_no_bit():
    window = window_after(STARTS, 8)
    layer, cache, *_ = ring_setup(window, 4)
    queries = queries_of(window)
    for backend in BACKENDS.values():
        together = attention(queries, layer, cache.table, window, backend=backend, num_sinks=4)
        for row in (1, 4, 6):
            one = jax.tree.map(lambda x, row=row: x[row : row + 1], (queries, window))
            alone = attention(
                one[0], layer, cache.table[row][None], one[1], backend=backend, num_sinks=4
            )
            np.testing.assert_array_equal(alone[0], together[row])


def num_blocks_read(starts, monkeypatch):
    """How often blocks are read for a window of 5 after each of `starts`."""
    window = window_after(starts, 5)
    layer, cache, *_ = ring_setup(window, 4)
    read, real = [], kv.read_block

    def counted(*arguments):
        read.append(arguments[2])
        return real(*arguments)

    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(xla.kv, "read_block", counted)
        block_attention(
            queries_of(window),
            layer,
            cache.table,
            window,
            dtype=jnp.float32,
            sliding_window=WINDOW,
            num_sinks=4,
        )
    return len(read)


@pytest.mark.slow
def test_the_blocks_between_are_not_read(monkeypatch):
    """However far a row has come, and however far apart rows are."""
    assert num_blocks_read((100,), monkeypatch) == 1
    assert num_blocks_read((300,), monkeypatch) == 3
    assert num_blocks_read((900,), monkeypatch) == 4  # 751 to 904 are in three
    assert num_blocks_read((1500,), monkeypatch) == 3
    assert num_blocks_read((60, 300, 900, 1500), monkeypatch) == 4
