"""Rows that outlive their request: continued by another prompt, taken out of the state, put back.

A row that has ended holds its KV until another request takes the row. If that request's prompt
begins with the same tokens, only the rest has to be read. With `=` what both share, and `|` the end
of the KV that counts:

    kept        a b c d e f|g        the newest token has no KV
    prompt      a b c d x y z
    continued   = = = =|x y z        positions 0 to 3 stay, x and y are read, the first round
                                     scores z

To make room for others, a row is copied out page by page, at the cost of its live pages and not of
its capacity, and copied back into any row later. What a drafter keeps of the row goes with it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import BLOCK, AlignedTable, KVCache
from jaxspec.decode.state import Admission, admit_row, batch_view, has_rows, mark_prefilled
from jaxspec.drafters.base import DrafterBase, function_params
from jaxspec.types import DecodeState, PyTree

if TYPE_CHECKING:
    from jaxspec.decode.loop import DecodeLoop


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRow:
    """A copy of what a state holds of one row.

    Attributes:
      pages: for each block of the row, the page of every layer of every cache, `[K, block, H]`.
      rest: the row's part of everything else that target and drafter keep.
    """

    pages: tuple[PyTree, ...]
    rest: PyTree

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.pages, self.rest)))

    def on_host(self, place: jax.sharding.Sharding | None = None) -> StoredRow:
        """The same in the host's memory.

        Args:
          place: memory of the host that the device copies to and from directly; None makes NumPy
            arrays.
        """
        parts = self.pages, self.rest
        if place is not None:
            # Waits, so that a lack of memory shows here.
            pages, rest = jax.block_until_ready(jax.device_put(parts, place))
        else:
            # A copy: on a CPU `device_get` returns views of the device's arrays.
            pages, rest = jax.tree.map(np.array, jax.device_get(parts))
        return StoredRow(pages=pages, rest=rest)


def keeps_prefixes(drafter: DrafterBase) -> bool:
    """Whether a drafter says how to keep the beginning of a row (`rewind`). One that does not
    starts anew, as with a new request."""
    return getattr(drafter.rewind, "__func__", None) is not DrafterBase.rewind


def continue_row(
    loop: DecodeLoop,
    params: PyTree,
    state: DecodeState,
    row: jax.Array,
    admission: Admission,
    num_kept: jax.Array,
    start: jax.Array,
) -> DecodeState:
    """State with a request in row `row`, which holds the beginning of its prompt.

    Args:
      loop: of the engine, ragged.
      params: of target and drafter.
      state: of the resident rows.
      row: int32 scalar.
      admission: of the request.
      num_kept: int32 scalar, tokens of the prompt whose KV the row holds, less than its length.
      start: int32 scalar, the first token that will be read, at most `num_kept`. A drafter that
        pairs the feature of a token with the token after it has to be shown the last kept one
        again.
    """
    state = mark_prefilled(admit_row(state, row, admission), row, start)
    drafter, own = loop.drafter, function_params(loop.drafter, params)
    rows = batch_view(state, is_chain=drafter.is_chain)
    arguments = loop.resident_shape, own, state.drafter, rows, row
    if keeps_prefixes(drafter):
        return state.replace(drafter=drafter.rewind(*arguments, num_kept))
    return state.replace(drafter=drafter.admit(*arguments))


def num_pages(num_slots: int) -> int:
    """Blocks that hold this many slots."""
    return -(-num_slots // BLOCK)


def _is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)


def _caches(state: DecodeState) -> list[KVCache]:
    """The target's and the drafter's."""
    nodes = jax.tree.leaves((state.cache, state.drafter), is_leaf=_is_cache)
    return [node for node in nodes if _is_cache(node)]


def _page_of(cache: KVCache, row: jax.Array, index: jax.Array) -> jax.Array:
    """Number of the row's page; of a cache of fewer pages the last."""
    pages = cache.table.pages if isinstance(cache.table, AlignedTable) else cache.table
    return pages[row, jnp.minimum(index, pages.shape[1] - 1)]


def take_page(state: DecodeState, row: jax.Array, index: jax.Array) -> PyTree:
    """The `index`-th page of a row in every cache, for each of them a tuple of layers."""

    def take(cache: KVCache) -> PyTree:
        page = _page_of(cache, row, index)
        return jax.tree.map(lambda values: values[page], cache.layers)

    return [take(cache) for cache in _caches(state)]


def put_page(state: DecodeState, row: jax.Array, index: jax.Array, pages: PyTree) -> DecodeState:
    """State with what `take_page` returned as the `index`-th page of a row."""
    given = iter(pages)

    def put(node: PyTree) -> PyTree:
        if not _is_cache(node):
            return node
        page = _page_of(node, row, index)
        layers = jax.tree.map(lambda old, new: old.at[page].set(new), node.layers, next(given))
        return node.replace(layers=layers)

    cache, drafter = jax.tree.map(put, (state.cache, state.drafter), is_leaf=_is_cache)
    return state.replace(cache=cache, drafter=drafter)


def take_rest(state: DecodeState, row: jax.Array) -> PyTree:
    """A row's part of what target and drafter keep besides pages of KV."""
    parts = state.cache, state.drafter

    def take(is_per_row: bool, node: PyTree) -> Any:
        return node[row] if is_per_row and not _is_cache(node) else None

    return jax.tree.leaves(jax.tree.map(take, has_rows(parts), parts))


def put_rest(state: DecodeState, row: jax.Array, rest: PyTree) -> DecodeState:
    """State with what `take_rest` returned as a row's part."""
    parts, given = (state.cache, state.drafter), iter(rest)

    def put(is_per_row: bool, node: PyTree) -> PyTree:
        return node.at[row].set(next(given)) if is_per_row and not _is_cache(node) else node

    cache, drafter = jax.tree.map(put, has_rows(parts), parts)
    return state.replace(cache=cache, drafter=drafter)


def shape_of_page(state: DecodeState) -> PyTree:
    """Shapes of what `take_page` returns, of a state or of its shapes."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(take_page, state, number, number)


@dataclasses.dataclass(frozen=True, eq=False)
class RowFunctions:
    """The functions above for one loop; `ShardedLoop` has them for all shards of a mesh."""

    loop: DecodeLoop
    take_page = staticmethod(take_page)
    put_page = staticmethod(put_page)
    take_rest = staticmethod(take_rest)
    put_rest = staticmethod(put_rest)

    def continue_row(
        self, params: PyTree, state: DecodeState, row: jax.Array, *arguments: Any
    ) -> DecodeState:
        """See `continue_row` of this module."""
        return continue_row(self.loop, params, state, row, *arguments)
