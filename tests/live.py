"""The KV of an engine's batch: what is committed, to compare it bit by bit; and garbage for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.engine import Engine


def live_kv(engine: Engine, num_rows: int | None = None) -> list[np.ndarray]:
    """K and V of each layer `[B, S, K, H]` at the slots of committed tokens, zero elsewhere; of the
    first `num_rows` rows."""
    rows = range(engine.shape.batch_size if num_rows is None else num_rows)
    cache = engine.executor.state.cache

    def padded(bits: np.ndarray) -> np.ndarray:
        values = bits.view(cache.dtype).astype(np.float32)
        return np.pad(values, ((0, cache.capacity - len(values)), (0, 0), (0, 0)))

    by_layer = zip(*(engine.executor.committed_kv(row) for row in rows), strict=True)
    return [np.stack([padded(bits) for bits in of_rows]) for of_rows in by_layer]


def live_pages(engine: Engine) -> list[np.ndarray]:
    """What is stored at the slots of committed tokens, zero elsewhere: of each layer k and v
    `[B, S, K, H]`, and of int8 KV the scales `[B, S, K]`, as they are stored."""
    cache, num_committed = engine.state.cache, np.asarray(engine.state.num_committed)
    is_live = np.arange(cache.capacity) < num_committed[:, None] - 1

    def of_rows(stored) -> np.ndarray:
        pages = np.moveaxis(np.asarray(stored)[np.asarray(cache.table)], 3, 2)
        slots = pages.reshape(len(is_live), cache.capacity, *pages.shape[3:])
        return np.where(is_live.reshape(*is_live.shape, *[1] * (slots.ndim - 2)), slots, 0)

    return [of_rows(stored) for stored in jax.tree.leaves(cache.layers)]


def poison(engine: Engine) -> None:
    """Makes all of the target's KV NaN. An earlier run of the same requests leaves the right values
    where a faulty one forgets to write them; so no check sees that fault unless these are gone."""

    def nan(stored):
        if stored.dtype == jnp.int8:
            return stored  # its scales become NaN
        if jnp.issubdtype(stored.dtype, jnp.floating):
            return jnp.full_like(stored, jnp.nan)
        return jnp.full_like(stored, 0x7FC0)  # bf16, stored as its bits

    cache = engine.state.cache
    layers = tuple(jax.tree.map(nan, layer) for layer in cache.layers)
    engine.executor.state = engine.executor.state.replace(cache=cache.replace(layers=layers))
