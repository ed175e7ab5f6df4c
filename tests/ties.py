"""Whether two greedy outputs part at a tie within rounding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.types import Window


def first_difference(a, b) -> int | None:
    """Index of the first token that differs, or None."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def margin_at(target, tokens) -> tuple[float, float]:
    """Gap of the two highest scores after `tokens` in fp32, and the rounding noise of the dtype.

    The noise is the largest change of a score when the same tokens are scored again in the model's
    own dtype, over three window widths; at fp32 it is the change between these widths.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), target.params)
    wide = score_last(dataclasses.replace(target, params=params), tokens, num_last=1)
    own = [score_last(target, tokens, num_last=num_last) for num_last in (1, 3, 8)]
    top = np.sort(wide)[-2:]
    return float(top[1] - top[0]), max(float(np.abs(wide - scores).max()) for scores in own) + 1e-6


def score_last(model, tokens, *, num_last: int) -> np.ndarray:
    """Scores `[V]` after `tokens`; the last `num_last` of them are read in a window of their
    own.
    """
    num_last = min(num_last, len(tokens))
    cache = model.init_cache(1, len(tokens))
    first = len(tokens) - num_last
    hidden = None
    for start, stop in ((0, first), (first, len(tokens))):
        if start == stop:
            continue
        positions = jnp.arange(start, stop, dtype=jnp.int32)[None]
        window = Window(
            start=jnp.full((1,), start, jnp.int32), positions=positions, slots=positions
        )
        part = jnp.asarray([tokens[start:stop]], jnp.int32)
        hidden, cache = model.forward(model.params, part, window, cache)
    return np.asarray(model.logits(model.params, hidden[:, -1]), np.float32)[0]
