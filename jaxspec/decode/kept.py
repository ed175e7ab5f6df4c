"""Rows that outlive their request: continued with another prompt, copied out of the state, put
back.

A row that has ended holds its KV until another request takes the row. If that request's prompt
begins with the same tokens, only the rest has to be prefilled. Below, `=` marks what both share,
and `|` the end of the valid KV:

    kept        a b c d e f|g        the newest token has no KV
    prompt      a b c d x y z
    continued   = = = =|x y z        positions 0 to 3 stay, x and y are read, the first round
                                     scores z

To make room for other requests, a row is copied out page by page, at a cost that depends on its
live pages and not on its capacity, and later copied back into any row. The drafter's state of the
row goes with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import BLOCK, AlignedTable, KVCache
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.state import (
    Admission,
    admit_row,
    batch_view,
    has_rows,
    is_cache,
    mark_prefilled,
)
from jaxspec.drafters.base import function_params
from jaxspec.types import DecodeState, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRow:
    """A copy of one row of a state.

    Attributes:
      pages: for each block of the row, the pages `[K, block, H]` of every layer of every cache.
      rest: the row's part of all other state of target and drafter.
    """

    pages: tuple[PyTree, ...]
    rest: PyTree

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.pages, self.rest)))

    def on_host(self, place: jax.sharding.Sharding | None = None) -> StoredRow:
        """The same row in the host's memory.

        Args:
          place: host memory that the device can copy to and from directly; None makes NumPy arrays.
        """
        parts = self.pages, self.rest
        if place is not None:
            # Waits, so that running out of memory raises here.
            pages, rest = jax.block_until_ready(jax.device_put(parts, place))
        else:
            # A copy: on a CPU `device_get` returns views of the device's arrays.
            pages, rest = jax.tree.map(np.array, jax.device_get(parts))
        return StoredRow(pages=pages, rest=rest)


def continue_row(
    parts: RoundParts,
    params: PyTree,
    state: DecodeState,
    row: jax.Array,
    admission: Admission,
    num_kept: jax.Array,
    start: jax.Array,
) -> DecodeState:
    """State with a request in row `row`, which already holds the beginning of the prompt.

    Args:
      parts: the engine's, in the ragged layout.
      params: those of target and drafter.
      state: that of the resident rows.
      row: int32 scalar.
      admission: the request.
      num_kept: int32 scalar, number of prompt tokens whose KV the row holds; less than the prompt's
        length.
      start: int32 scalar, the first token that will be prefilled, at most `num_kept`: a drafter
        that pairs a token's feature with the token after it has to see the last kept token again.
    """
    state = mark_prefilled(admit_row(state, row, admission), row, start)
    drafter, own = parts.drafter, function_params(parts.drafter, params)
    rows = batch_view(state, is_chain=drafter.is_chain)
    rewound = drafter.rewind(parts.resident_shape, own, state.drafter, rows, row, num_kept)
    return state.replace(drafter=rewound)


def num_pages(num_slots: int) -> int:
    """Number of blocks that hold this many slots."""
    return -(-num_slots // BLOCK)


def _caches(state: DecodeState) -> list[KVCache]:
    """The caches of target and drafter."""
    nodes = jax.tree.leaves((state.cache, state.drafter), is_leaf=is_cache)
    return [node for node in nodes if is_cache(node)]


def _page_of(cache: KVCache, row: jax.Array, index: jax.Array) -> jax.Array:
    """Number of the row's `index`-th page, or of its last one if it has fewer."""
    pages = cache.table.pages if isinstance(cache.table, AlignedTable) else cache.table
    return pages[row, jnp.minimum(index, pages.shape[1] - 1)]


def take_page(state: DecodeState, row: jax.Array, index: jax.Array) -> PyTree:
    """The `index`-th page of a row in every cache; for each cache a tuple of layers."""

    def take(cache: KVCache) -> PyTree:
        page = _page_of(cache, row, index)
        return jax.tree.map(lambda values: values[page], cache.layers)

    return [take(cache) for cache in _caches(state)]


def put_page(state: DecodeState, row: jax.Array, index: jax.Array, pages: PyTree) -> DecodeState:
    """State in which the `index`-th page of a row is what `take_page` returned."""
    given = iter(pages)

    def put(node: PyTree) -> PyTree:
        if not is_cache(node):
            return node
        page = _page_of(node, row, index)
        layers = jax.tree.map(lambda old, new: old.at[page].set(new), node.layers, next(given))
        return node.replace(layers=layers)

    cache, drafter = jax.tree.map(put, (state.cache, state.drafter), is_leaf=is_cache)
    return state.replace(cache=cache, drafter=drafter)


def take_rest(state: DecodeState, row: jax.Array) -> PyTree:
    """A row's part of all state of target and drafter other than pages of KV."""
    parts = state.cache, state.drafter

    def take(is_per_row: bool, node: PyTree) -> Any:
        return node[row] if is_per_row and not is_cache(node) else None

    return jax.tree.leaves(jax.tree.map(take, has_rows(parts), parts))


def put_rest(state: DecodeState, row: jax.Array, rest: PyTree) -> DecodeState:
    """State in which a row's part is what `take_rest` returned."""
    parts, given = (state.cache, state.drafter), iter(rest)

    def put(is_per_row: bool, node: PyTree) -> PyTree:
        return node.at[row].set(next(given)) if is_per_row and not is_cache(node) else node

    cache, drafter = jax.tree.map(put, has_rows(parts), parts)
    return state.replace(cache=cache, drafter=drafter)


def shape_of_page(state: DecodeState) -> PyTree:
    """Shapes of what `take_page` returns for a state (or for its shapes)."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(take_page, state, number, number)
