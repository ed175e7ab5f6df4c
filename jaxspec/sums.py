"""Sums over the vocabulary whose bits depend on the numbers of their row alone.

A sum of floating-point numbers depends on the order of its additions, and XLA chooses that order by
the shape of the whole array: rows, window and vocabulary. So numbers are split into integers here,
whose sum is the same in every order: in windows of every width, in every batch, on every mesh.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax


def sum_integers(*numbers: jax.Array) -> tuple[jax.Array, ...]:
    """Sums over the last axis, `[..., 1]`, of one or more uint32 arrays `[..., V]`."""
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[axis] > 1 for axis in mesh.auto_axes):
        # XLA may have split V over these axes. It adds parts of one sum, and gathers V for several.
        return tuple(jnp.sum(each, axis=-1, keepdims=True, dtype=jnp.uint32) for each in numbers)
    zeros = (jnp.uint32(0),) * len(numbers)
    add = functools.partial(jax.tree.map, operator.add)
    return tuple(
        found[..., None] for found in lax.reduce(numbers, zeros, add, [numbers[0].ndim - 1])
    )


def num_digit_bits(size: int) -> int:
    """The bits of a digit of which `size` can be added in uint32."""
    return min(30, 31 - (size - 1).bit_length())


def total(numbers: jax.Array) -> jax.Array:
    """The sum `[..., 1]` of fp32 numbers `[..., V]` from 0 to 2^126, as exact as an fp32 sum; NaN
    or infinite for a row with such a number."""
    highest = jnp.max(numbers, axis=-1, keepdims=True)
    above = jnp.clip(exponent(highest) + 1, -126, 126)
    summed = _total_up_to_one(numbers * power_of_two(-above)) * power_of_two(above)
    return jnp.where(jnp.isfinite(highest), summed, highest)


def _total_up_to_one(numbers: jax.Array) -> jax.Array:
    """`total` of numbers from 0 to 1: each is split into three digits, which are added apart."""
    num_bits = num_digit_bits(numbers.shape[-1])
    base = jnp.float32(2**num_bits)
    first, rest = split(numbers * base)
    second, rest = split(rest * base)
    third, _ = split(jnp.round(rest * base))
    first, second, third = sum_integers(first, second, third)
    second += third >> num_bits
    first += second >> num_bits
    second &= 2**num_bits - 1
    return first.astype(jnp.float32) / base + second.astype(jnp.float32) / (base * base)


def split(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """fp32 numbers from 0 to 2^30 as integers, uint32, and the fp32 rest of each."""
    whole = numbers.astype(jnp.int32)  # for which every processor has an instruction
    return whole.astype(jnp.uint32), numbers - whole.astype(jnp.float32)


def exponent(numbers: jax.Array) -> jax.Array:
    """int32, the exponents of the greatest powers of two up to some positive fp32 numbers."""
    return (lax.bitcast_convert_type(numbers, jnp.int32) >> 23) - 127


def power_of_two(exponent: jax.Array) -> jax.Array:
    """fp32 `2^exponent`, for int32 exponents from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def masses(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`exp(logits - highest)` `[..., V]` fp32, their sums `[..., 1]` and `highest` `[..., 1]`, the
    highest logit of each row. NaN for a row whose highest logit is not finite."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    of_tokens = jnp.exp(logits - highest)
    summed = jnp.where(jnp.isfinite(highest), _total_up_to_one(of_tokens), jnp.nan)
    return of_tokens, summed, highest


def softmax(logits: jax.Array) -> jax.Array:
    """Probabilities `[..., V]` fp32; NaN for a row whose highest logit is not finite."""
    of_tokens, summed, _ = masses(logits)
    return of_tokens / summed


def log_softmax(logits: jax.Array) -> jax.Array:
    """Log-probabilities `[..., V]` fp32; NaN for a row whose highest logit is not finite."""
    _, summed, highest = masses(logits)
    return logits - highest - jnp.log(summed)


def logsumexp(logits: jax.Array) -> jax.Array:
    """`[..., 1]` fp32, the logarithm of the sum of `exp(logits)`: -inf where all logits of a row
    are, and NaN where its highest logit is not finite otherwise."""
    _, summed, highest = masses(logits)
    return jnp.where(jnp.isneginf(highest), highest, highest + jnp.log(summed))
