"""Windows over caches of random KV, for tests of attention kernels."""

import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.types import Window

SIZE = 16  # of heads
ROUNDING = {jnp.float32: 2e-6, jnp.float16: 4e-3, jnp.bfloat16: 3e-2}


def setup(
    starts,
    window_length,
    *,
    dtype=jnp.float32,
    heads=2,
    group=3,
    size=SIZE,
    capacity=512,
    fill=0.0,
    kv_dtype=None,
):
    """Queries of a window after each of `starts`, and a cache of random KV: each row's the same
    whoever its neighbours are, in pages that are not in order; `fill` beyond the window."""
    num_rows = len(starts)
    start = jnp.asarray(starts, jnp.int32)
    positions = start[:, None] + jnp.arange(window_length, dtype=jnp.int32)[None]
    cache = kv.init_cache(
        num_layers=1,
        num_rows=num_rows,
        capacity=capacity,
        num_kv_heads=heads,
        head_size=size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    shuffled = np.random.default_rng(9).permutation(cache.table.size)
    table = jnp.asarray(shuffled.reshape(cache.table.shape), jnp.int32)

    def random(seed, *shape):
        # By slot and not by capacity: the same numbers in a longer row.
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    slots = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (num_rows, capacity))
    k, v = (
        np.stack([random(which + int(begin), capacity, heads, size) for begin in starts])
        for which in (1000, 2000)
    )
    for row, begin in enumerate(starts):
        k[row, begin + window_length :] = v[row, begin + window_length :] = fill
    layer = kv.write(
        cache.layers[0], table, jnp.asarray(k).astype(dtype), jnp.asarray(v).astype(dtype), slots
    )
    queries = np.stack([random(int(begin), 8, heads * group, size) for begin in starts])
    queries = jnp.asarray(queries[:, :window_length]).astype(dtype)
    window = Window(start=start, positions=positions, slots=positions)
    return queries, layer, table, window


def tree_window(starts, num_entries, *, max_depth):
    """A window of random trees, each row's its own."""
    start = jnp.asarray(starts, jnp.int32)
    positions = start[:, None] + jnp.arange(num_entries, dtype=jnp.int32)[None]
    window = Window(start=start, positions=positions, slots=positions)
    parents = [
        random_parents(np.random.default_rng(begin), num_entries - 1, depth=max_depth)
        for begin in starts
    ]
    return as_trees(window, parents, depth=max_depth)


def as_trees(window, parents, *, depth):
    """`window` as trees of at most this depth, one per row: entry n + 1 follows entry
    `parents[row][n]`, and entry 0 is the root."""
    paths = np.zeros((*window.positions.shape, depth + 1), np.int32)
    depths = np.zeros(window.positions.shape, np.int32)
    for row, own in enumerate(parents):
        for entry, parent in enumerate(own, 1):
            depths[row, entry] = depths[row, parent] + 1
            paths[row, entry] = paths[row, parent]
            paths[row, entry, depths[row, entry]] = entry
    positions = window.start[:, None] + jnp.asarray(depths)
    return window.replace(positions=positions, paths=jnp.asarray(paths))


def random_parents(rng, num_nodes, *, depth):
    """Of a random tree, for `as_trees`."""
    parents, depths = [], [0]
    for _ in range(num_nodes):
        parent = rng.choice([entry for entry, at in enumerate(depths) if at < depth])
        parents.append(int(parent))
        depths.append(depths[parent] + 1)
    return parents


def path_of(window, row, entry):
    """Where an entry of a tree finds the KV that it sees, slot by slot, as `Window` defines it."""
    start, end = int(window.start[row]), int(window.visible_ends[row, entry])
    own = [start + int(offset) for offset in window.paths[row, entry]]
    return np.asarray([*range(start), *own][:end])
