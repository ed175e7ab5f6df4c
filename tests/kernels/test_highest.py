"""The highest scores of rows: XLA's way to find them, and that of the CPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspec.kernels import cpu as native
from jaxspec.kernels.highest import highest

needs_native = pytest.mark.skipif(native.problem() is not None, reason=f"{native.problem()}")
BACKENDS = [
    pytest.param(highest, id="xla"),
    pytest.param(native.highest, id="native", marks=needs_native),
]


def scores_of(size, *, has_ties=False):
    rng = np.random.default_rng(size)
    scores = rng.normal(size=(2, 3, size)).astype(np.float32)
    if has_ties:
        scores = np.round(2 * scores) + 0.0  # no -0
    scores[1, 0] = -np.inf
    scores[1, 1, 2:] = -np.inf
    scores[1, 2] = 0  # all equal: the first tokens
    return scores


@pytest.mark.parametrize("find", BACKENDS)
@pytest.mark.parametrize("size", [8, 61, 64, 513, 1000, 4096])
@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("has_ties", [False, True])
def test_they_are_those_of_top_k(find, size, count, has_ties):
    scores = jnp.asarray(scores_of(size, has_ties=has_ties))
    found = jax.jit(find, static_argnums=1)(scores, count)
    expected = lax.top_k(scores, count)
    np.testing.assert_array_equal(found.scores, expected[0])
    np.testing.assert_array_equal(found.places, expected[1])


@pytest.mark.parametrize("find", BACKENDS)
def test_all_scores_are_put_in_order(find):
    scores = scores_of(200, has_ties=True)[:1]
    scores[0, 0, 30:] = -np.inf  # more than a block of equals
    found = find(jnp.asarray(scores), 200)
    order = np.argsort(-scores, axis=-1, kind="stable")
    np.testing.assert_array_equal(found.places, order)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, order, axis=-1))


@pytest.mark.parametrize("find", BACKENDS)
@pytest.mark.parametrize("size", [61, 4096])
def test_their_total_is_that_of_the_sharpened_scores(find, size):
    scores, sharpness = 4 * scores_of(size), np.array([3.0, 0.5], np.float32)
    plain = find(jnp.asarray(scores), 2).log_total
    sharp = find(jnp.asarray(scores), 2, jnp.asarray(sharpness)).log_total
    wide = scores.astype(np.float64)
    for found, of_row in ((plain, 1.0), (sharp, sharpness[:, None, None])):
        with np.errstate(divide="ignore"):
            expected = np.log(np.sum(np.exp(of_row * wide), axis=-1))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("find", BACKENDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_row(find, bad):
    scores = scores_of(300)
    healthy = find(jnp.asarray(scores), 3)
    scores[0, 1, 7] = bad
    found = find(jnp.asarray(scores), 3)
    assert not np.isfinite(found.scores[0, 1] - found.log_total[0, 1]).any()
    assert np.all((found.places >= 0) & (found.places < 300))
    for one, other in zip(found, healthy, strict=True):
        one, other = np.array(one), np.array(other)
        one[0, 1] = other[0, 1] = 0
        np.testing.assert_array_equal(one, other)


@needs_native
def test_a_rows_bits_do_not_depend_on_other_rows():
    scores = jnp.asarray(scores_of(4096).reshape(6, 4096))
    together = native.highest(scores, 4)
    for row in range(6):
        alone = native.highest(scores[row : row + 1], 4)
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one, other[row : row + 1])
