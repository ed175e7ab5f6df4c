"""Products that are differentiated. Where a processor multiplies bfloat16, XLA:CPU uses its units
only if the result is fp32: three to five times the speed of a bfloat16 result."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.kernels.base import XLA, product, product_input


def training_product(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: jax.Array | None = None,
    epsilon: float = 0.0,
    is_gated: bool = False,
    residual: jax.Array | None = None,
    dtype: Any = None,
) -> jax.Array:
    """`product`, whose sums and those of its gradients are fp32, and rounded to x's dtype once."""
    x = product_input(x, norm=norm, epsilon=epsilon, is_gated=is_gated)
    if x.dtype == jnp.float32:
        return product(x, weight, residual=residual, dtype=dtype)
    made = _product(x, weight).astype(dtype or x.dtype)
    return made if residual is None else residual + made


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight` `[..., out...]` in fp32, for x `[..., in]` and a weight `[in, out...]`."""
    return jnp.tensordot(x, weight, axes=1, preferred_element_type=jnp.float32)


def _forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, weight), (x, weight)


def _backward(
    operands: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    gradient = gradient.astype(x.dtype)
    leading, out = list(range(x.ndim - 1)), list(range(x.ndim - 1, gradient.ndim))
    wide = jnp.float32
    of_x = jnp.tensordot(
        gradient, weight, axes=(out, list(range(1, weight.ndim))), preferred_element_type=wide
    )
    of_weight = jnp.tensordot(x, gradient, axes=(leading, leading), preferred_element_type=wide)
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


_product.defvjp(_forward, _backward)

TRAINING = dataclasses.replace(XLA, product=training_product)
"""Kernels for what is differentiated; parameters must not be packed."""
