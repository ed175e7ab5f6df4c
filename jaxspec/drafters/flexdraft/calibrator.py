"""How the bonus token corrects a block that was drafted without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.kernels.base import Product, product


def calibration(
    params: Mapping[str, Any],
    bonus: jax.Array,
    hidden: jax.Array,
    product: Product = product,
) -> jax.Array:
    """What is added to the logits of mask rows, `[..., K, V]` fp32.

    Args:
      params: `calibrator` of `param_shapes`.
      bonus: `[..., E]`, the target's embedding of the token at the beginning of the block.
      hidden: `[..., K, E]`, hidden states of the block's mask rows after the target's final norm.
      product: that of the kernels that `params` are packed for.
    """
    read = product(bonus, params["embedding"])[..., None, :] + product(hidden, params["hidden"])
    bias = params["hidden_bias"]
    activated = jax.nn.silu(read + bias.reshape((1,) * (read.ndim - 1) + bias.shape))
    added = product(activated, params["logits"], dtype=jnp.float32)
    bias = params["logits_bias"].astype(added.dtype)
    return added + bias.reshape((1,) * (added.ndim - 1) + bias.shape)
