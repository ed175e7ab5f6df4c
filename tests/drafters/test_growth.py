"""How trees grow: how many nodes a level need expand, and how many it keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from jaxspec.drafters.growth import Grower
from jaxspec.drafters.heads.drafter import if_any
from jaxspec.drafters.trees import BeamTree, BudgetTree, StaticTree
from jaxspec.types import BatchView, EngineShape

VOCAB = 1000
STATIC = StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0)))


@functools.partial(jax.jit, static_argnames=("tree", "counts", "are_alike", "stops"))
def grow(tree, counts, tables, rows, *, are_alike=False, stops=False):
    """The draft of a tree whose level l expands `counts[l]` nodes, after which the logits are the
    first of `tables[l]` `[B, K, V]`; if it `stops`, none that no row wants."""
    num_rows = rows.num_committed.shape[0]
    shape = EngineShape(
        batch_size=num_rows,
        max_length=128,
        verify_length=tree.num_nodes + 1,
        prefill_chunk=16,
        vocab_size=VOCAB,
        tree_depth=tree.max_depth,
    )
    grower = Grower(
        tree=tree,
        shape=shape,
        rows=rows,
        num_levels=jnp.full((num_rows,), tree.max_depth, jnp.int32),
        greedy_sharpness=1.0,
        sampled_sharpness=1.0,
    )

    def add_level(level, found):
        value = jnp.zeros((num_rows, tree.num_expanded), jnp.float32)
        if level:
            found, nodes = grower.expand(found, level)
            value = nodes.value
        logits = tables[level, :, : 1 if are_alike else counts[level]]
        return grower.add_children(found, level, logits, value[:, : counts[level]])

    found = grower.start()
    for level in range(len(counts)):
        is_wanted = grower.is_wanted(found, level) if stops else jnp.ones((num_rows,), bool)
        found = if_any(shape, is_wanted, functools.partial(add_level, level), found)
    return grower.draft(found, jnp.full((num_rows,), tree.num_nodes, jnp.int32))[0]


def every_node(tree):
    return (1, *[tree.num_expanded] * (tree.max_depth - 1))


def needed_nodes(tree):
    return tuple(map(tree.num_expanded_by, range(tree.max_depth)))


@pytest.fixture(scope="module")
def rows():
    """Rows in mid-decode, two of them greedy, two sampled, one of these with a filter."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (4, 128))
    return BatchView(
        tokens=jnp.asarray(tokens, jnp.int32),
        num_committed=jnp.asarray([9, 12, 7, 20], jnp.int32),
        draft_limit=jnp.full((4,), 9, jnp.int32),
        depth_limit=None,
        stop_tokens=jnp.full((4, 2), -1, jnp.int32),
        sampling=sampling.neutral_sampling(4).replace(
            temperature=jnp.asarray([0, 0.8, 1.2, 0], jnp.float32),
            top_k=jnp.asarray([0, 0, 20, 0], jnp.int32),
            key=jnp.asarray(np.arange(8).reshape(4, 2), jnp.uint32),
        ),
    )


def tables(tree, seed):
    """Logits so peaked that trees of a budget have holes."""
    size = (tree.max_depth, 4, tree.num_expanded, VOCAB)
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=size), jnp.float32)


def assert_same_draft(one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.parents, other.parents)


BUDGET = BudgetTree(nodes=8, depth=3, min_ratio=0.05)
OTHERS = [BudgetTree(nodes=4, depth=4), BudgetTree(1, 3), BeamTree(3, 3, 8), BeamTree(1, 4, 4)]


def named(tree, *marks):
    return pytest.param(tree, id=tree.name, marks=marks)


@pytest.mark.parametrize(
    "tree", [named(BUDGET), *[named(tree, pytest.mark.slow) for tree in (STATIC, *OTHERS)]]
)
def test_levels_that_expand_fewer_nodes_grow_the_same_tree(tree, rows):
    for seed in range(4):
        every = grow(tree, every_node(tree), tables(tree, seed), rows)
        assert_same_draft(grow(tree, needed_nodes(tree), tables(tree, seed), rows), every)
    assert int(jnp.sum(every.tokens >= 0)) > tree.num_nodes


@pytest.mark.parametrize(
    "tree", [named(BUDGET), *[named(tree, pytest.mark.slow) for tree in (STATIC, *OTHERS)]]
)
@pytest.mark.parametrize("flatness", [0.2, 50])
def test_levels_after_a_spent_budget_add_nothing(tree, flatness, rows):
    """Where logits are flat the two greedy rows have spent theirs on the first level."""
    for seed in range(4):
        logits = tables(tree, seed) / flatness
        every = grow(tree, needed_nodes(tree), logits, rows)
        assert_same_draft(grow(tree, needed_nodes(tree), logits, rows, stops=True), every)
    is_spent = isinstance(tree, BudgetTree) and flatness > 1
    greedy_parents = every.parents[jnp.asarray([0, 3])]
    assert bool(jnp.all(greedy_parents < 0)) == (is_spent or tree.num_nodes == 1)


def test_fewer_nodes_still_would_grow_another_tree(rows):
    """Sabotage: a node too few for the second level."""
    assert needed_nodes(BUDGET) == (1, 7, 6)
    found = [
        [grow(BUDGET, counts, tables(BUDGET, seed), rows).tokens for seed in range(4)]
        for counts in (every_node(BUDGET), (1, 1, 1))
    ]
    assert np.any(np.stack(found[0]) != np.stack(found[1]))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [named(tree) for tree in (BUDGET, STATIC, OTHERS[2])])
def test_logits_that_all_nodes_share_grow_the_tree_of_their_copies(tree, rows):
    counts, copies = needed_nodes(tree), tables(tree, 5)[:, :, :1]
    copies = jnp.broadcast_to(copies, tables(tree, 5).shape)
    for penalty in (0, 0.5):
        asked = rows.sampling.replace(presence_penalty=jnp.full((4,), penalty, jnp.float32))
        expected = grow(tree, counts, copies, rows.replace(sampling=asked))
        found = grow(tree, counts, copies, rows.replace(sampling=asked), are_alike=True)
        assert_same_draft(found, expected)
