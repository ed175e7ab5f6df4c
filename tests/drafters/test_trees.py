"""Shapes of trees, each against an obvious search in Python."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.drafters.trees import (
    BeamTree,
    BudgetTree,
    StaticTree,
    best_static_tree,
    product_tree,
)
from jaxspec.errors import SettingError


def every_path(num_depths, width):
    return [
        path
        for depth in range(1, num_depths + 1)
        for path in itertools.product(range(width), repeat=depth)
    ]


def value_of(path, table):
    return np.prod([table[depth][rank] for depth, rank in enumerate(path)])


def test_a_static_tree_on_a_drawn_example():
    tree = StaticTree([(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1)])
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1, 2]
    assert tree.depth.tolist() == [1, 1, 2, 2, 2, 3]
    assert tree.rank.tolist() == [0, 1, 0, 2, 0, 1]
    assert (tree.num_nodes, tree.max_depth, tree.name) == (6, 3, "static:6")
    assert tree.prunes_by_token  # of node 0's children rank 1 is missing
    assert not StaticTree([(0,), (1,), (1, 0), (0, 0)]).prunes_by_token
    assert StaticTree([(1,), (0,)]).prunes_by_token


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "given no choices"),
        ([(0,), (1, 0)], r"choice \(1, 0\) was given without its prefix \(1,\) before it"),
        ([(0, 1), (0,)], r"choice \(0, 1\) was given without its prefix \(0,\) before it"),
        ([(0,), (1,), (0,)], r"choice \(0,\) was given twice"),
        ([(0,), (0, -1)], r"choice \(0, -1\) was given; a choice is a path"),
        ([()], r"choice \(\) was given; a choice is a path"),
    ],
)
def test_choices_that_are_no_tree_are_named(choices, message):
    with pytest.raises(SettingError, match=message):
        StaticTree(choices)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ((2, 2, 7), "7 nodes was asked for; a width of 2 and a depth of 2 make 6 candidates"),
        ((0, 2, 1), "width 0 was given; it must be at least 1"),
        ((2, 0, 1), "depth 0 was given; it must be at least 1"),
        ((2, 2, 0), "nodes 0 was given; it must be at least 1"),
    ],
)
def test_beams_that_are_no_tree(tree, message):
    with pytest.raises(SettingError, match=message):
        BeamTree(*tree)
    assert BeamTree(2, 2, 6).name == "2x2:6"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_best_static_tree_is_the_best_of_all_trees(data):
    num_depths, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    cell = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])  # many ties
    table = [[data.draw(cell) for _ in range(width)] for _ in range(num_depths)]
    paths = every_path(num_depths, width)
    nodes = data.draw(st.integers(1, len(paths)))
    tree = best_static_tree(table, nodes)
    values = [value_of(path, table) for path in tree.choices]
    # The best of all sets of paths; that they are a tree, StaticTree has checked.
    assert sum(values) == sum(sorted(value_of(path, table) for path in paths)[-nodes:])
    assert values == sorted(values, reverse=True)
    # Of equals the shallower, then the lower ranks.
    assert list(tree.choices) == sorted(
        tree.choices, key=lambda path: (-value_of(path, table), len(path), path)
    )


@pytest.mark.parametrize(
    ("acceptance", "nodes", "message"),
    [
        ([0.5, 0.2], 1, r"shape \(2,\) was given; give a table of probabilities"),
        ([[1.5]], 1, "give a table of probabilities"),
        ([[float("nan")]], 1, "give a table of probabilities"),
        ([[0.5, 0.2]], 3, "there are 2 paths, so ask for 1 to 2 nodes"),
        ([[0.5, 0.2]], 0, "there are 2 paths, so ask for 1 to 2 nodes"),
    ],
)
def test_tables_that_have_no_best_tree(acceptance, nodes, message):
    with pytest.raises(SettingError, match=message):
        best_static_tree(acceptance, nodes)


@pytest.mark.parametrize("size", [(1, 4, 3), (2, 3, 12), (4, 2, 30), (3, 1, 3), (2, 3, 7)])
@pytest.mark.parametrize("has_ties", [False, True])
def test_a_product_tree_is_the_best_paths_of_all(size, has_ties):
    num_depths, width, nodes = size
    rng = np.random.default_rng(sum(size))
    log_q = -np.sort(rng.exponential(size=(2, num_depths, width)), axis=2).astype(np.float32)
    if has_ties:
        log_q = np.round(log_q)
    if width > 2:
        log_q[1, :, -1] = -np.inf  # a filter has removed it
    tree = product_tree(jnp.asarray(log_q), nodes)
    for row in range(2):
        found = []
        for node in range(nodes):
            parent = int(tree.parents[row, node])
            assert parent < node
            found.append((*(found[parent] if parent >= 0 else ()), int(tree.rank[row, node])))
        assert len(set(found)) == nodes
        assert tree.depth[row].tolist() == [len(path) for path in found]

        def log_prob(path, table=log_q[row]):
            total = np.float32(0)
            for depth, rank in enumerate(path):
                total += table[depth, rank]
            return total

        values = [log_prob(path) for path in found]
        np.testing.assert_array_equal(tree.log_prob[row], values)
        best = sorted(map(log_prob, every_path(num_depths, width)), reverse=True)
        np.testing.assert_array_equal(values, best[:nodes])


def test_a_product_tree_of_more_nodes_than_there_are_is_refused():
    with pytest.raises(SettingError, match="there are 6 paths, so ask for 1 to 6 nodes"):
        product_tree(jnp.zeros((1, 2, 2), jnp.float32), 7)


def budget_nodes(tree, *levels):
    """Candidates that become nodes, by level: shares `[n, W]` of the children of the nodes that the
    level expands, which are given in the order in which it does."""
    size = tree.max_depth * tree.num_expanded
    value = jnp.full((1, size, tree.num_children), -jnp.inf, jnp.float32)
    above = jnp.zeros((1, 1), jnp.float32)
    for level, shares in enumerate(levels):
        shares = np.pad(shares, ((0, above.shape[1] - len(shares)), (0, 0)))
        log_share = jnp.log(jnp.asarray(shares, jnp.float32))[None]
        pruned = tree.prune(above[..., None] + log_share, log_share, value)
        start = level * tree.num_expanded
        value = value.at[:, start : start + pruned.shape[1]].set(pruned)
        here = value[:, start : start + tree.num_expanded]
        index = tree.expand(level + 1, here)
        above = jnp.take_along_axis(here.reshape(1, -1), index, axis=1)
    kept = np.asarray(tree.keep(value))[0]
    value = np.exp(np.asarray(value).reshape(-1)[kept])
    return [(int(node), round(float(w), 3)) for node, w in zip(kept, value, strict=True) if w > 0]


def test_a_budget_is_spent_level_by_level():
    """The example of Clover's picture: a and b, then the two best of their children."""
    tree = BudgetTree(nodes=4, depth=3)
    first = [[0.5, 0.3, 0.1, 0.05]]
    second = [[0.8, 0.1, 0.05, 0.05], [0.3, 0.1, 0.05, 0.02]]
    third = [[0.9, 0.05, 0.03, 0.02]] * 2
    found = budget_nodes(tree, first, second, third)
    assert found == [(0, 0.5), (12, 0.4), (1, 0.3), (16, 0.09)]
    flat = [[0.2, 0.2, 0.2, 0.2]]
    assert budget_nodes(tree, flat, second, third) == [(n, 0.2) for n in range(4)]
    sure = [[0.9, 0.05, 0.02, 0.02]]
    assert budget_nodes(tree, sure, sure, sure) == [(0, 0.9), (12, 0.81), (24, 0.729)]
    assert tree.within(2) == BudgetTree(nodes=2, depth=3)
    assert tree.within(9) == tree
    assert tree.within(2).max_depth == 2
    for fields in ({"nodes": 0}, {"depth": 0}, {"top_p": 0}, {"top_p": 1.1}, {"min_ratio": -0.1}):
        with pytest.raises(SettingError, match=r"was given|were given"):
            BudgetTree(**fields)
