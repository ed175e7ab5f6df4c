"""The positions of mask rows, what they see, how their logits are corrected, and how much of a
draft is verified.

For a block of K = 3, with the newest token t at position `a` and the drafts d and e, the target
scores three tokens, and G = 3 groups of mask rows draft for 0, 1 or 2 accepted ones. Rows below are
queries, and `x` marks what they see; each row of a group sees the whole group:

    position            a  a+1 a+2   a+1 a+2 a+3   a+2 a+3 a+4   a+3 a+4 a+5
                 < a    t   d   e    g0  g0  g0    g1  g1  g1    g2  g2  g2
    t            x      x
    d            x      x   x
    e            x      x   x   x
    group 0      x      x            x   x   x
    group 1      x      x   x                      x   x   x
    group 2      x      x   x   x                                x   x   x

The first row of a group is at the position of the target's next token, and drafts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.kernels.base import Product, product
from jaxspec.types import Window


def group_window(window: Window, *, num_groups: int, block_size: int) -> Window:
    """The window of the mask rows of all groups beside a `window` of T clean rows: G K rows, group
    by group.

    Row j of group g, at position `start + g + 1 + j`, sees the committed tokens, the clean rows 0
    to g and its own group; it is stored after the window, at slot `start + T + g K + j`. Every path
    is 2 K long, like that of `block_window`, so that both sum over the same slots in the same
    order. With n live clean rows, only the first n groups are asked for.
    """
    num_clean = window.positions.shape[1]
    group = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), block_size)
    place = jnp.tile(jnp.arange(block_size, dtype=jnp.int32), num_groups)
    depth = jnp.arange(2 * block_size, dtype=jnp.int32)[None]
    start, after = window.start[:, None], group[:, None] + 1
    stored = num_clean + group * block_size
    in_group = stored[:, None] + jnp.clip(depth - after, 0, block_size - 1)
    paths = jnp.where(depth < after, depth, in_group)
    is_stored = window.slots[:, :1] >= 0
    return Window(
        start=window.start,
        positions=start + (group + 1 + place)[None],
        slots=jnp.where(is_stored, start + (stored + place)[None], -1),
        rows=window.rows,
        paths=jnp.broadcast_to(paths, (start.shape[0], *paths.shape)),
        ends=jnp.broadcast_to(start + (group + 1 + block_size)[None], (len(start), len(group))),
        num_live=None if window.num_live is None else window.num_live * block_size,
    )


def block_window(start: jax.Array, is_wanted: jax.Array, *, block_size: int) -> Window:
    """The window of one group of K mask rows, the first at position `start` `[B]`, that of the
    newest token. Its KV is stored there, in the rows where it `is_wanted` `[B]`, and the round's
    window overwrites it."""
    num_rows = start.shape[0]
    positions = start[:, None] + jnp.arange(block_size, dtype=jnp.int32)[None]
    depth = jnp.arange(2 * block_size, dtype=jnp.int32)[None, None]
    return Window(
        start=start,
        positions=positions,
        slots=jnp.where(is_wanted[:, None], positions, -1),
        paths=jnp.broadcast_to(depth, (num_rows, block_size, 2 * block_size)),
        ends=jnp.broadcast_to(start[:, None] + block_size, positions.shape),
        num_live=jnp.where(is_wanted, block_size, 0),
    )


def sure_length(confidence: jax.Array, *, least: float, rule: str) -> jax.Array:
    """`[B]` int32, how many drafts are worth verifying, at least one, given the `confidence` `[B,
    N]` in each: with the rule `product`, as long as the product of all so far is at least `least`;
    with `minimum`, as long as each is."""
    so_far = jnp.cumprod(confidence, axis=1) if rule == "product" else confidence
    is_sure = (so_far >= least).astype(jnp.int32)
    return jnp.maximum(jnp.sum(jnp.cumprod(is_sure, axis=1), axis=1, dtype=jnp.int32), 1)


def calibration(
    params: Mapping[str, Any],
    bonus: jax.Array,
    hidden: jax.Array,
    product: Product = product,
) -> jax.Array:
    """What is added to the logits of mask rows, `[..., K, V]` fp32: how the bonus token corrects a
    block that was drafted without it.

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
