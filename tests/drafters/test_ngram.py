"""Prompt lookup against an obvious search in Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.drafters.ngram import NGram
from jaxspec.errors import SettingError
from jaxspec.sampling import neutral_sampling
from jaxspec.types import BatchView, EngineShape

SHAPE = EngineShape(batch_size=1, max_length=32, verify_length=5, prefill_chunk=8, vocab_size=9)
GREEDY = neutral_sampling(1)


def propose(tokens, limit, low, high):
    buffer = np.full((1, 32), 2)  # garbage that would match
    buffer[0, : len(tokens)] = tokens
    rows = BatchView(
        tokens=jnp.asarray(buffer, jnp.int32),
        num_committed=jnp.asarray([len(tokens)], jnp.int32),
        draft_limit=jnp.asarray([limit], jnp.int32),
        stop_tokens=jnp.full((1, 2), -1, jnp.int32),
        sampling=GREEDY,
    )
    draft, _ = NGram(low, high).propose(SHAPE, (), (), rows)
    return draft.tokens[0, : int(draft.num_valid[0])].tolist()


def search(tokens, limit, low, high):
    for size in range(high, low - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if size < len(tokens) and tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size :][: min(limit, 4)]
    return []


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


@pytest.mark.parametrize("bounds", [(0, 3), (4, 3)])
def test_bounds_are_checked(bounds):
    with pytest.raises(SettingError, match="1 <= min <= max"):
        NGram(*bounds)
