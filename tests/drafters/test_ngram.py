"""Prompt lookup against an obvious search in Python."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.drafters.ngram import NGram, merge
from jaxspec.sampling import neutral_sampling
from jaxspec.testing import check_drafter
from jaxspec.types import BatchView, Draft, EngineShape

SHAPE = EngineShape(batch_size=1, max_length=32, verify_length=5, prefill_chunk=8, vocab_size=9)
GREEDY = neutral_sampling(1)


@functools.cache
def compiled(ngram):
    return jax.jit(lambda rows: ngram.propose(SHAPE, (), (), rows)[0])


def draft_of(ngram, tokens, limit, **changes):
    buffer = np.full((1, 32), 2)  # garbage that would match
    buffer[0, : len(tokens)] = tokens
    rows = BatchView(
        tokens=jnp.asarray(buffer, jnp.int32),
        num_committed=jnp.asarray([len(tokens)], jnp.int32),
        draft_limit=jnp.asarray([limit], jnp.int32),
        stop_tokens=jnp.full((1, 2), -1, jnp.int32),
        sampling=GREEDY,
    ).replace(**changes)
    return compiled(ngram)(rows)


def propose(tokens, limit, low, high):
    draft = draft_of(NGram(low, high), tokens, limit)
    return draft.tokens[0, : int(draft.num_valid[0])].tolist()


def search(tokens, limit, low, high):
    for size in range(high, low - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if size < len(tokens) and tokens[start : start + size] == tokens[-size:]:
                return again(tokens[start + size :], min(limit, size if size < high else 4))
    return []


def again(tokens, count):
    """The tokens, repeated until there are so many."""
    return list(itertools.islice(itertools.cycle(tokens), count))


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    limit=st.integers(0, 6),
    bounds=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
)
def test_equals_a_search_by_hand(tokens, limit, bounds):
    assert propose(tokens, limit, *bounds) == search(tokens, limit, *bounds)


def test_the_longest_match_wins_over_a_later_shorter_one():
    #        1 2 3 -> 7        3 -> 8      ends in 1 2 3
    assert propose([1, 2, 3, 7, 0, 3, 8, 1, 2, 3], 1, 1, 3) == [7]
    assert propose([1, 2, 3, 7, 0, 3, 8, 1, 2, 3], 1, 1, 1) == [8]


def test_a_chain_is_as_long_as_its_match_unless_that_may_be_longer():
    tokens = [1, 2, 3, 7, 0, 4, 5, 1, 2, 3]
    found = [len(propose(tokens, 4, 1, high)) for high in (2, 3, 4, 5)]
    assert found == [4, 4, 3, 3]


def test_a_row_that_repeats_itself_goes_on_repeating():
    assert propose([5, 7, 7, 7, 7], 4, 2, 4) == [7, 7, 7]
    assert propose([1, 2, 1, 2, 1, 2], 4, 1, 4) == [1, 2, 1, 2]


def matches(tokens, low, high):
    """Slots at which a continuation begins: of the longest match, then of the latest."""
    slots = [
        start + size
        for size in range(high, low - 1, -1)
        for start in range(len(tokens) - size - 1, -1, -1)
        if size < len(tokens) and tokens[start : start + size] == tokens[-size:]
    ]
    return list(dict.fromkeys(slots))


def search_tree(tokens, limit, low, high, num_branches):
    """The paths to the nodes of the tree, in their order."""
    branches = []
    for slot in matches(tokens, low, high):
        branch = tokens[slot:]
        if not any(known[: len(branch)] == branch[:4] for known in branches):
            branches.append(again(branch, 4))
    paths = [
        (depth + 2 * index, index, tuple(branch[:depth]))
        for index, branch in enumerate(branches[:num_branches])
        for depth in range(1, len(branch) + 1)
    ]
    return list(dict.fromkeys(path for _, _, path in sorted(paths)))[: min(limit, 4)]


def paths_of(draft):
    paths = []
    for node in range(int(draft.num_valid[0])):
        parent = int(draft.parents[0, node])
        assert parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), int(draft.tokens[0, node])))
    return paths


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    limit=st.integers(0, 6),
    bounds=st.sampled_from([(1, 3), (2, 4)]),
)
def test_branches_equal_a_search_by_hand(tokens, limit, bounds):
    found = paths_of(draft_of(NGram(*bounds, branches=3), tokens, limit))
    assert found == search_tree(tokens, limit, *bounds, num_branches=3)
    chain = tuple(propose(tokens, limit, *bounds))
    assert chain[:2] in ((), *found)  # the first branch, two levels ahead of the others


def test_branches_on_a_drawn_example():
    #         1 2 -> 5 0 ..   1 2 -> 5 6 ..   2 -> 7 ..   ends in 1 2
    tokens = [1, 2, 5, 0, 8, 1, 2, 5, 6, 8, 4, 2, 7, 8, 8, 1, 2]
    ngram = NGram(branches=3)
    draft = draft_of(ngram, tokens, 9)
    assert paths_of(draft) == [(5,), (5, 6), (5, 6, 8), (5, 6, 8, 4)]
    # Nodes that are too deep to be emitted make room for others.
    draft = draft_of(ngram, tokens, 9, depth_limit=jnp.asarray([2], jnp.int32))
    assert paths_of(draft) == [(5,), (5, 6), (5, 0), (7,)]
    assert (ngram.name, ngram.num_nodes, ngram.is_chain) == ("ngram[3]:1-4", 12, False)


@pytest.mark.parametrize("tree", [[(0, 1, 2), (0, 3)], [(0,), (1, 1, 1), (0, 2, 3)], [(), (1,)]])
def test_branches_are_merged(tree):
    length = 8
    branches = np.zeros((1, len(tree), length), np.int32)
    for index, branch in enumerate(tree):
        branches[0, index, : len(branch)] = branch
    num_tokens = jnp.asarray([[len(branch) for branch in tree]], jnp.int32)
    tokens, parents, num_nodes = jax.jit(merge)(branches, num_tokens)
    draft = Draft(tokens=tokens, parents=parents, num_valid=num_nodes)
    paths = [
        (depth + 2 * index, index, branch[:depth])
        for index, branch in enumerate(tree)
        for depth in range(1, len(branch) + 1)
    ]
    assert paths_of(draft) == list(dict.fromkeys(path for _, _, path in sorted(paths)))


@pytest.mark.slow
def test_branches_pass_the_battery():
    check_drafter(NGram(branches=3), toy.model()).assert_ok()
