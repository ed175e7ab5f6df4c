"""Which path is followed, against an obvious recursive walk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sampling import CPU_BLOCK, greedy_tokens
from jaxspec.types import Draft
from jaxspec.verifiers.coupled import follow


def walk(chosen, tokens, parents, num_valid):
    """The accepted path, node by node."""
    path, node = [], -1
    while True:
        children = [n for n in range(num_valid) if parents[n] == node]
        agreeing = [n for n in children if tokens[n] == chosen[node + 1]]
        if not agreeing:
            return path, chosen[node + 1]
        node = agreeing[0]
        path.append(node)


@st.composite
def trees(draw):
    num_nodes = draw(st.integers(1, 6))
    tokens = draw(st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes))
    parents = [draw(st.integers(-1, n - 1)) for n in range(num_nodes)]
    chosen = draw(st.lists(st.integers(0, 2), min_size=num_nodes + 1, max_size=num_nodes + 1))
    return tokens, parents, chosen, draw(st.integers(0, num_nodes))


@settings(max_examples=150, deadline=None)
@given(tree=trees())
def test_follows_what_a_recursive_walk_follows(tree):
    tokens, parents, chosen, num_valid = tree
    draft = Draft(
        tokens=jnp.asarray([tokens], jnp.int32),
        parents=jnp.asarray([parents], jnp.int32),
        num_valid=jnp.asarray([num_valid], jnp.int32),
    )
    verdict = follow(jnp.asarray([chosen], jnp.int32), draft)
    path, next_token = walk(chosen, tokens, parents, num_valid)
    assert int(verdict.num_accepted[0]) == len(path)
    assert verdict.path[0].tolist() == path + [-1] * (len(tokens) - len(path))
    assert int(verdict.next_token[0]) == next_token


def test_greedy_takes_the_first_of_equals_and_reports_numbers_that_are_none():
    logits = jnp.asarray([[0.0, 2.0, 2.0], [np.nan, 1.0, 0.0], [np.inf, 0.0, 0.0]])
    tokens, is_finite = greedy_tokens(logits)
    assert tokens[0] == 1
    assert is_finite.tolist() == [True, False, False]
    rng = np.random.default_rng(0)
    many = rng.standard_normal((50, 7)).astype(np.float32)
    np.testing.assert_array_equal(greedy_tokens(jnp.asarray(many))[0], many.argmax(-1))


@pytest.mark.parametrize(
    "size", [1024, CPU_BLOCK**2, CPU_BLOCK**2 + 1, 3 * CPU_BLOCK**2 + CPU_BLOCK]
)
def test_greedy_takes_the_first_of_equals_in_a_vocabulary_of_any_size(size):
    rng = np.random.default_rng(size)
    logits = np.round(rng.standard_normal((6, 5, size)).astype(np.float32))
    assert np.any(np.sum(logits == logits.max(-1, keepdims=True), axis=-1) > 1)
    logits[0, 0] = -np.inf
    logits[0, 1, size // 2] = np.nan
    logits[0, 2, -1] = np.inf
    logits[0, 3, 1:] = np.nan
    logits[0, 4] = 1.0
    tokens, is_finite = jax.jit(greedy_tokens)(jnp.asarray(logits))
    assert is_finite[0].tolist() == [False, False, False, False, True]
    assert bool(jnp.all(is_finite[1:]))
    tokens = np.asarray(tokens)
    assert tokens[0, 4] == 0
    assert np.all((tokens >= 0) & (tokens < size))
    np.testing.assert_array_equal(tokens[1:], logits[1:].argmax(-1))
