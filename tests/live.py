"""The KV of an engine's batch_size: what is committed, to compare it bit by bit; and garbage for
it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.engine.engine import Engine
from jaxspec.types import DecodeState


def live_kv(engine: Engine, num_rows: int | None = None) -> list[np.ndarray]:
    """K and V of each layer `[B, S, K, H]` at the slots of committed tokens, zero elsewhere; of the
    first `num_rows` batch_size."""
    state: DecodeState = engine.state
    max_length = state.cache.capacity
    slots = jnp.broadcast_to(
        jnp.arange(max_length, dtype=jnp.int32), (engine.shape.batch_size, max_length)
    )
    is_live = np.arange(max_length) < np.asarray(state.num_committed)[:, None] - 1
    read = [
        kv.read_slots(layer, state.cache.table, slots, engine.target.dtype)
        for layer in state.cache.layers
    ]
    return [
        np.where(is_live[..., None, None], np.asarray(values, np.float32), 0)[:num_rows]
        for layer in read
        for values in layer
    ]


def poison(engine: Engine) -> None:
    """Makes all of the target's KV NaN. An earlier run of the same requests leaves the right values
    where a faulty one forgets to write them; so no check sees that fault unless these are gone."""

    def nan(stored):
        if jnp.issubdtype(stored.dtype, jnp.floating):
            return jnp.full_like(stored, jnp.nan)
        return jnp.full_like(stored, 0x7FC0)  # bf16, stored as its bits

    cache = engine.state.cache
    layers = tuple(jax.tree.map(nan, layer) for layer in cache.layers)
    engine.executor.state = engine.executor.state.replace(cache=cache.replace(layers=layers))
