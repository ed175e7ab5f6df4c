"""Block attention against a dense reference, and what must not change a bit of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import windows
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import as_trees, path_of, random_parents

from jaxspec.cache import pages as kv
from jaxspec.kernels.xla import block_attention
from jaxspec.types import Window

HEADS, GROUP, SIZE = 2, 3, 8


def setup(starts, window_length, *, dtype=jnp.float32, fill=0.0):
    """What attention takes, and its KV `[B, S, K, H]`."""
    inputs = windows.setup(starts, window_length, dtype=dtype, size=SIZE, fill=fill)
    _, layer, table, _ = inputs
    every = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), (len(starts), 512))
    k, v = kv.read_slots(layer, table, every, dtype)
    return *inputs, np.asarray(k, np.float32), np.asarray(v, np.float32)


def dense(queries, k, v, window, sliding_window=None):
    """Softmax attention in float64, one query at a time."""
    queries, positions = np.asarray(queries, np.float64), np.asarray(window.positions)
    out = np.zeros(queries.shape)
    for row, t, head in np.ndindex(queries.shape[:3]):
        if window.paths is None:
            seen = np.arange(int(window.visible_ends[row, t]))
        else:
            seen = path_of(window, row, t)
        if sliding_window is not None:
            seen = seen[max(0, positions[row, t] - sliding_window + 1) :]
        keys = np.asarray(k[row, seen, head // GROUP], np.float64)
        vals = np.asarray(v[row, seen, head // GROUP], np.float64)
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
    expected = dense(queries, k, v, window, sliding_window)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_the_check_above_catches_a_query_that_sees_one_slot_too_many():
    queries, layer, table, window, k, v = setup([40, 200, 300], 4)
    shifted = window.replace(positions=window.positions + 1)
    got = run(queries, layer, table, shifted, dtype=jnp.float32)
    assert np.abs(got - dense(queries, k, v, window)).max() > 1e-2


@pytest.mark.parametrize("sliding_window", [None, 130])
@pytest.mark.parametrize("is_tree", [False, True])
def test_codes_with_scales_are_read_as_the_numbers_that_they_stand_for(is_tree, sliding_window):
    inputs = windows.setup([3, 250, 380], 5, fill=np.nan, kv_dtype="int8")
    queries, layer, table, window = inputs
    if is_tree:
        window = as_trees(window, [[0, 0, 2, 1]] * 3, depth=3)
    every = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), (3, 512))
    k, v = kv.read_slots(layer, table, every, jnp.float32)
    numbers = windows.setup([3, 250, 380], 5)[1]
    numbers = kv.write(numbers, table, k, v, every)
    given = {"dtype": jnp.float32, "sliding_window": sliding_window}
    ours, theirs = (
        np.asarray(run(queries, one, table, window, **given)) for one in (layer, numbers)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert np.isfinite(ours).all()


def test_neighbours_of_any_length_change_no_bit():
    alone, *others = (
        np.asarray(run(*setup([37, neighbour], 4)[:4], dtype=jnp.float32))[0]
        for neighbour in (37, 0, 100, 380)
    )
    for other in others:
        np.testing.assert_array_equal(other, alone)


def test_garbage_beyond_the_window_changes_no_bit_even_if_it_is_nan():
    clean = setup([5, 130], 4, fill=0.0)
    dirty = setup([5, 130], 4, fill=np.nan)
    np.testing.assert_array_equal(
        run(*clean[:4], dtype=jnp.float32), run(*dirty[:4], dtype=jnp.float32)
    )


@settings(max_examples=12, deadline=None)
@given(
    starts=st.lists(st.integers(0, 400), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
    sliding_window=st.sampled_from([None, 3, 130]),
    padding=st.sampled_from([None, (70, 0, 3)]),
)
def test_trees_equal_dense_attention(starts, seed, sliding_window, padding):
    queries, layer, table, window, k, v = setup(starts, 6, fill=np.nan)
    rng = np.random.default_rng(seed)
    tree = as_trees(window, [random_parents(rng, 5, depth=4) for _ in starts], depth=4)
    if padding is not None:
        table, layer = pad(layer, table, padding, k, v, starts, window_length=6)
    got = run(queries, layer, table, tree, dtype=jnp.float32, sliding_window=sliding_window)
    np.testing.assert_allclose(got, dense(queries, k, v, tree, sliding_window), atol=2e-5)


def test_the_check_above_catches_a_node_that_sees_its_sibling():
    queries, layer, table, window, k, v = setup([40, 200, 300], 4)
    tree = as_trees(window, [[0, 0, 2]] * 3, depth=2)
    wrong = tree.replace(paths=tree.paths.at[:, 3, 1].set(1))
    got = run(queries, layer, table, wrong, dtype=jnp.float32)
    differs = np.abs(got - dense(queries, k, v, tree)).max(axis=(0, 2, 3))
    assert differs[3] > 1e-2 > differs[:3].max()


def test_entries_of_a_tree_may_see_beyond_themselves():
    queries, layer, table, window, k, v = setup([3, 126, 250], 5, fill=np.nan)
    # Root 0 and a branch 1, 2; a group of 3 and 4 below the root, which see both of them.
    tree = as_trees(window, [[0, 1, 0, 3]] * 3, depth=3)
    group = jnp.asarray([0, 3, 4, 0], jnp.int32)
    tree = tree.replace(
        paths=tree.paths.at[:, 3:].set(group),
        ends=(tree.positions + 1).at[:, 3].add(1),
    )
    for sliding_window in (None, 2, 100):
        got = run(queries, layer, table, tree, dtype=jnp.float32, sliding_window=sliding_window)
        np.testing.assert_allclose(got, dense(queries, k, v, tree, sliding_window), atol=2e-5)


DEPTH, LENGTH = 5, 9  # of the trees below, and of their windows


def rounds_that_score(position, *, dtype, is_chain):
    """All rounds that may score one token, one per row: they begin 0 to `DEPTH` tokens before it.
    Returns what attention takes, and the entry that is the token in each of them."""
    rng = np.random.default_rng(position)
    starts = position - np.arange(DEPTH + 1)
    cache = kv.init_cache(
        num_layers=1,
        num_rows=len(starts),
        capacity=384,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=dtype,
    )
    text = rng.standard_normal((3, 384, HEADS, SIZE)).astype(np.float32)  # KV, by position
    query = rng.standard_normal((HEADS * GROUP, SIZE)).astype(np.float32)
    k, v = (np.full((len(starts), 384, HEADS, SIZE), np.nan, np.float32) for _ in range(2))
    queries = rng.standard_normal((len(starts), LENGTH, HEADS * GROUP, SIZE)).astype(np.float32)
    parents, entries = [], []
    for row, start in enumerate(starts):
        # The path to the token stands in some of the entries, in their order; others hang from it.
        path = [0, *range(1, row + 1)]
        if not is_chain:
            path[1:] = sorted(rng.choice(np.arange(1, LENGTH), row, replace=False))
        own = [0] * (LENGTH - 1)
        for entry in range(1, LENGTH):
            before = sum(node < entry for node in path)
            own[entry - 1] = path[before - 1] if before <= DEPTH else 0
        parents.append(own)
        entries.append(path[-1])
        for values, of_text in ((k, text[0]), (v, text[1])):
            values[row, :start] = of_text[:start]
            values[row, start : start + LENGTH] = rng.standard_normal((LENGTH, HEADS, SIZE))
            values[row, start + np.asarray(path)] = of_text[start : position + 1]
        queries[row, path[-1]] = query
    slots = jnp.broadcast_to(jnp.arange(384, dtype=jnp.int32), k.shape[:2])
    layer = kv.write(
        cache.layers[0], cache.table, jnp.asarray(k, dtype), jnp.asarray(v, dtype), slots
    )
    start = jnp.asarray(starts, jnp.int32)
    positions = start[:, None] + jnp.arange(LENGTH, dtype=jnp.int32)[None]
    window = Window(start=start, positions=positions, slots=positions)
    window = as_trees(window, parents, depth=DEPTH)
    return (jnp.asarray(queries, dtype), layer, cache.table, window), np.asarray(entries)


def num_differing(dtype, is_chain, sliding_window=None):
    """Heads of tokens around slots 128 and 256 that are not the same to the bit in all rounds."""

    @jax.jit
    def attend(*inputs):
        return block_attention(*inputs, dtype=dtype, sliding_window=sliding_window)

    differing = 0
    for position in (*range(124, 140), *range(252, 268)):
        inputs, entries = rounds_that_score(position, dtype=dtype, is_chain=is_chain)
        heads = np.asarray(attend(*inputs), np.float32)[np.arange(len(entries)), entries]
        assert np.isfinite(heads).all()
        differing += np.any(heads != heads[:1], axis=(0, 2)).sum()
    return differing


@pytest.mark.as_shipped
@pytest.mark.parametrize(
    ("dtype", "is_chain", "sliding_window"),
    [
        (jnp.float32, True, None),
        (jnp.float32, False, None),
        (jnp.float32, False, 100),
        (jnp.bfloat16, True, None),
        (jnp.bfloat16, False, None),
    ],
)
def test_the_round_in_which_a_token_is_scored_changes_no_bit(dtype, is_chain, sliding_window):
    assert num_differing(dtype, is_chain, sliding_window) == 0


@pytest.mark.as_shipped
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sabotage_tails_that_begin_where_the_round_does(dtype, monkeypatch):
    def by_start(window):
        return jnp.broadcast_to(window.start[:, None], window.positions.shape)

    monkeypatch.setattr(Window, "tail_start", property(by_start))
    assert num_differing(dtype, is_chain=False) > 0


@pytest.mark.as_shipped
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_a_model_scores_and_stores_a_node_as_if_its_path_were_a_chain(dtype):
    model = toy.model(dtype=dtype)
    starts = np.asarray([3, 124, 131])
    rng = np.random.default_rng(0)
    text = rng.integers(0, toy.VOCAB, (3, 256), np.int32)
    forward = jax.jit(model.forward)
    positions = jnp.broadcast_to(jnp.arange(140, dtype=jnp.int32), (3, 140))
    context = Window(start=positions[:, 0], positions=positions, slots=positions)
    _, cache = forward(model.params, jnp.asarray(text[:, :140]), context, model.init_cache(3, 256))

    def score(tokens, parents):
        start = jnp.asarray(starts, jnp.int32)
        slots = start[:, None] + jnp.arange(LENGTH, dtype=jnp.int32)[None]
        window = Window(start=start, positions=slots, slots=slots)
        window = as_trees(window, parents, depth=DEPTH)
        hidden, after = forward(model.params, jnp.asarray(tokens), window, cache)
        stored = [kv.read_slots(layer, after.table, slots, after.dtype) for layer in after.layers]
        return window, [np.asarray(x, np.float32) for x in jax.tree.leaves((hidden, stored))]

    tokens = text[:, 150 : 150 + LENGTH]
    window, of_tree = score(tokens, [random_parents(rng, LENGTH - 1, depth=DEPTH) for _ in starts])
    for leaf in range(LENGTH):
        # Each row's path to this entry stands first, and then other tokens, children of the root.
        as_chains, parents = text[:, 200 : 200 + LENGTH].copy(), []
        depths = np.asarray(window.positions - window.start[:, None])[:, leaf]
        for row, depth in enumerate(depths):
            path = np.asarray(window.paths)[row, leaf, : depth + 1]
            as_chains[row, : depth + 1] = tokens[row, path]
            parents.append([*range(depth), *[0] * (LENGTH - 1 - depth)])
        _, of_chain = score(as_chains, parents)
        for in_tree, in_chain in zip(of_tree, of_chain, strict=True):
            np.testing.assert_array_equal(in_tree[:, leaf], in_chain[np.arange(3), depths])


def temporaries(capacity):
    """Bytes that a compiled pass with trees needs beside its arguments and results."""
    model = toy.model(num_layers=1)

    def make():
        tokens = jnp.zeros((2, LENGTH), jnp.int32)
        window = Window(start=tokens[:, 0], positions=tokens, slots=tokens)
        trees = as_trees(window, [[0] * (LENGTH - 1)] * 2, depth=DEPTH)
        return tokens, trees, model.init_cache(2, capacity)

    forward = jax.jit(lambda *inputs: model.forward(*inputs), donate_argnums=3)
    compiled = forward.lower(model.params, *jax.eval_shape(make)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.system
@pytest.mark.as_shipped
def test_temporaries_of_a_pass_with_trees_do_not_grow_with_capacity(monkeypatch):
    short = temporaries(512)
    assert temporaries(4096) <= short

    # Sabotage: tails that hold all of a row.
    monkeypatch.setattr(Window, "tail_length", 4096)
    assert temporaries(4096) > 2 * short


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_near_full(dtype):
    queries, layer, table, window, k, v = setup([50, 260], 3, dtype=dtype)
    got = run(queries, layer, table, window, dtype=dtype)
    assert got.dtype == dtype
    expected = dense(queries, k, v, window)
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
    expected = dense(queries, k, v, window, sliding_window)
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_padding_that_is_seen_is_caught_by_the_check_above():
    starts = [40, 100, 200]
    queries, layer, pages, window, k, v = setup(starts, 4)
    table, layer = pad(layer, pages, [9, 0, 30], k, v, starts, fill=1.0)
    # Positions are taken for slots: two rows look at their padding, and not at their last tokens.
    got = run(queries, layer, table.pages, window, dtype=jnp.float32)
    differs = np.abs(got - dense(queries, k, v, window)).max(axis=(1, 2, 3))
    assert differs[0] > 1e-2 > differs[1]


def pad(layer, pages, padding, k, v, starts, *, window_length=4, fill=np.nan):
    """The rows moved to the right by their `padding`, garbage wherever no token of theirs is."""
    table = kv.AlignedTable(pages=pages, first_slot=jnp.asarray(padding, jnp.int32))
    shape = (len(starts), pages.shape[1] * layer.block)
    every = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    garbage = jnp.full((*shape, HEADS, SIZE), fill, jnp.float32)
    layer = kv.write(layer, pages, garbage, garbage, every)
    last = np.asarray(starts)[:, None] + window_length
    slots = jnp.where(every < last, every, -1)
    return table, kv.write(layer, table, jnp.asarray(k), jnp.asarray(v), slots)
