"""The bonus token's say in a block that was drafted without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxspec.kernels.base import product


def calibration(params: Mapping[str, Any], bonus: jax.Array, hidden: jax.Array) -> jax.Array:
    """What is added to the logits of mask rows, `[..., K, V]` fp32.

    Args:
      params: `calibrator` of `param_shapes`.
      bonus: `[..., E]`, the target's embedding of the token where the block begins.
      hidden: `[..., K, E]`, of the block's mask rows, after the target's final norm.
    """
    read = product(bonus, params["embedding"])[..., None, :] + product(hidden, params["hidden"])
    bias = params["hidden_bias"]
    activated = jax.nn.silu(read + bias.reshape((1,) * (read.ndim - 1) + bias.shape))
    added = product(activated, params["logits"], dtype=jax.numpy.float32)
    bias = params["logits_bias"].astype(added.dtype)
    return added + bias.reshape((1,) * (added.ndim - 1) + bias.shape)
