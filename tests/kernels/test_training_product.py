"""Products that are differentiated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kernels.base import product
from jaxspec.kernels.training import training_product

OPTIONS = [
    {},
    {"norm": True, "epsilon": 1e-5},
    {"is_gated": True},
    {"residual": True},
    {"dtype": jnp.float32},
]


def operands(options, dtype):
    """An x `[B, T, 12]`, a weight `[12, 2, 5]`, and the arrays among the options."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (3, 4, 2, 12) if "is_gated" in options else (3, 4, 12)
    x, weight = jax.random.normal(keys[0], shape), jax.random.normal(keys[1], (12, 2, 5))
    arrays = {"norm": jax.random.normal(keys[2], (12,))} if "norm" in options else {}
    if "residual" in options:
        arrays["residual"] = jax.random.normal(keys[3], (3, 4, 2, 5))
    x, weight, arrays = jax.tree.map(lambda leaf: leaf.astype(dtype), (x, weight, arrays))
    return x, weight, options | arrays


@pytest.mark.parametrize("options", OPTIONS)
def test_in_fp32_it_is_the_product(options):
    x, weight, options = operands(options, jnp.float32)
    ours, theirs = (
        jax.jit(lambda x, w, f=f: f(x, w, **options)) for f in (training_product, product)
    )
    np.testing.assert_array_equal(ours(x, weight), theirs(x, weight))
    ours, theirs = (
        jax.grad(lambda x, w, f=f: jnp.sum(jnp.sin(f(x, w, **options))), argnums=(0, 1))
        for f in (training_product, product)
    )
    for mine, expected in zip(ours(x, weight), theirs(x, weight), strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_in_bfloat16_values_and_gradients_are_rounded_once(options):
    x, weight, options = operands(options, jnp.bfloat16)
    made = training_product(x, weight, **options)
    assert made.dtype == options.get("dtype", jnp.bfloat16)

    def wide(values):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values)

    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    exact = options | wide(arrays)
    expected = product(wide(x), wide(weight), **exact)
    np.testing.assert_allclose(wide(made), expected, rtol=2e-2, atol=6e-2)

    def loss(function, options):
        return lambda x, w: jnp.sum(jnp.sin(function(x, w, **options).astype(jnp.float32)))

    ours = jax.grad(loss(training_product, options), argnums=(0, 1))(x, weight)
    theirs = jax.grad(loss(product, exact), argnums=(0, 1))(wide(x), wide(weight))
    for mine, gradient in zip(ours, theirs, strict=True):
        assert mine.dtype == jnp.bfloat16
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(wide(mine) / scale, gradient / scale, atol=3e-2)


def test_sums_of_bfloat16_are_fp32():
    """A bfloat16 sum of 4,096 ones would end at 256."""
    x, weight = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((4096, 1), jnp.bfloat16)
    assert training_product(x, weight, dtype=jnp.float32) == 4096
    of_weight = jax.grad(lambda w: jnp.sum(training_product(x.T, w)).astype(jnp.float32))
    assert of_weight(jnp.ones((1, 1), jnp.bfloat16)) == 4096
