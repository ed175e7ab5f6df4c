"""A draft model grows a tree: level by level (`growth`), several nodes in one call of the model.

A level reads the tokens of the K nodes that it expands. For K = W = 2 and depth 3, where `r` is the
newest token and capitals are expanded nodes:

    level 0    r -> A B             reads r               stored at slot start
    level 1    A -> c D  B -> E f   reads A and B         stored at slots start + 1, start + 2
    level 2    D -> g h  E -> i j   reads D and E         stored at slots start + 3, start + 4

A node's KV stays where its level put it, and `Window.paths` leads its descendants there. After the
verdict the accepted path's KV moves into consecutive slots; only the last node may have none.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.cache.pages import KVCache, commit_path
from jaxspec.drafters.growth import (
    Grower,
    Growth,
    at,
    count_levels,
    index_of,
)
from jaxspec.drafters.trees import Tree
from jaxspec.models.base import Model, kernels_of
from jaxspec.types import BatchView, Draft, EngineShape, PyTree, Window

# A node's value is the probability that the target takes its token. For the likeliest tokens this
# is higher than their probability under the draft model: a greedy target takes the likeliest token,
# however unlikely it is, and a target that samples with the drafter's noise takes the highest of
# nearly the same logits. So logits are multiplied by these factors before they become
# probabilities. Of the values 1 to 6 (sampled: 1 to 3) these gave the most tokens per round on the
# embedded pair, with trees of 16 nodes: 4.40 instead of 3.68 at 1, and 3.45 instead of 3.36.
GREEDY_SHARPNESS, SAMPLED_SHARPNESS = 3.0, 1.5


class TreeDraft(struct.PyTreeNode, kw_only=True):
    """A drafted tree, and the state after drafting it.

    Attributes:
      draft: a draft of `shape.num_nodes` nodes.
      cache: the draft model's, with the KV of the newest token and of the expanded nodes.
      stored: `[B, tree.num_nodes]` int32: the KV of node n is stored at `start + 1 + stored[b, n]`,
        where start is the position of the newest token; -1 if it has none.
      num_levels: `[B]` int32, number of levels of each row; 0 for rows that drafted nothing.
      num_read: int32 scalar, tokens read for all rows, without those that a first step reads again.
    """

    draft: Draft
    cache: KVCache
    stored: jax.Array
    num_levels: jax.Array
    num_read: jax.Array


def draft_tree(
    model: Model,
    logits: Callable[[PyTree, jax.Array, Window], jax.Array],
    tree: Tree,
    shape: EngineShape,
    params: PyTree,
    cache: KVCache,
    rows: BatchView,
    num_seen: jax.Array,
    *,
    token_map: jax.Array | None = None,
) -> TreeDraft:
    """A tree per row: the first `shape.num_nodes` nodes of `tree`, best first.

    A row's tree does not depend on the size of its neighbours'. Rows that lag by more than one
    token get none; the first level makes up for a lag of one, as in a chain.

    Args:
      model: the draft model.
      logits: takes its parameters, hidden states and their window, and returns logits to draft by.
      tree: which children are expanded, and which are kept.
      shape: the engine's.
      params: the draft model's.
      cache: of the draft model, with room for `num_offsets(tree)` slots after any newest token.
      rows: the batch.
      num_seen: `[B]` int32, tokens whose KV is in the cache.
      token_map: the tokens that logits are of, see `Grower`.
    """
    can_draft = rows.num_committed - 2 <= num_seen
    wanted, num_levels = count_levels(tree, shape, rows, can_draft)
    grower = Grower(
        tree=tree,
        shape=shape,
        rows=rows,
        num_levels=num_levels,
        greedy_sharpness=GREEDY_SHARPNESS,
        sampled_sharpness=SAMPLED_SHARPNESS,
        kernels=kernels_of(model),
        token_map=token_map,
    )
    lags = (num_levels > 0) & (num_seen < rows.num_committed - 1)
    growth, cache = _Reader(model, logits, params, grower).grow(cache, lags)
    draft, kept = grower.draft(growth, wanted)
    num_read = jnp.sum(jnp.where(num_levels > 0, 1 + (num_levels - 1) * tree.num_expanded, 0))
    return TreeDraft(
        draft=draft,
        cache=cache,
        stored=_stored(tree, growth.chosen, kept, num_levels),
        num_levels=num_levels,
        num_read=num_read + jnp.sum(lags, dtype=jnp.int32),
    )


def commit_tree(
    model: Model, cache: KVCache, stored: jax.Array, num_committed: jax.Array, path: jax.Array
) -> tuple[KVCache, jax.Array]:
    """The draft model's cache with the accepted path in place, and how many nodes of that path
    `[B]` have KV.

    Args:
      model: the draft model.
      cache: after drafting.
      stored: `[B, tree.num_nodes]` int32, see `TreeDraft`.
      num_committed: `[B]` int32, before the round.
      path: `[B, D]` int32, see `Verdict`.
    """
    place = jnp.where(path >= 0, at(stored, jnp.maximum(path, 0)), -1)
    move = kernels_of(model).move_within
    cache = commit_path(cache, num_committed - 1, place, move=move)
    return cache, jnp.sum(place >= 0, axis=1, dtype=jnp.int32)


class _Reader:
    """Grows a tree by running the draft model."""

    def __init__(
        self,
        model: Model,
        logits: Callable[[PyTree, jax.Array, Window], jax.Array],
        params: PyTree,
        grower: Grower,
    ):
        self.model, self.logits, self.params, self.grower = model, logits, params, grower
        # A row that drafts nothing gets a position that does not make attention longer.
        is_drafting = grower.num_levels > 0
        newest = grower.rows.num_committed - 1
        self.newest = jnp.where(is_drafting, newest, jnp.max(jnp.where(is_drafting, newest, 0)))

    def grow(self, cache: KVCache, lags: jax.Array) -> tuple[Growth, KVCache]:
        """Grows all levels that some row wants, counted at run time; on a GPU, where the host runs
        loops, all levels of the tree."""
        tree, runs_on_host = self.grower.tree, self.grower.shape.loops_run_on_host
        stop = tree.max_depth if runs_on_host else jnp.max(self.grower.num_levels)
        first = 1 if runs_on_host else jnp.minimum(stop, 1)

        def read_newest(_, grown: tuple[Growth, KVCache]) -> tuple[Growth, KVCache]:
            return self._read_newest(*grown, lags)

        # A loop of one step, because a conditional would copy the cache.
        grown = lax.fori_loop(0, first, read_newest, (self.grower.start(), cache))
        return lax.fori_loop(1, stop, self._expand, grown) if tree.max_depth > 1 else grown

    def _read_newest(
        self, growth: Growth, cache: KVCache, lags: jax.Array
    ) -> tuple[Growth, KVCache]:
        """Level 0; the token before the newest one is read too, and its KV kept if the row lags."""
        position = self.newest[:, None] + jnp.arange(-1, 1, dtype=jnp.int32)[None]
        position = jnp.maximum(position, 0)
        is_kept = jnp.stack([lags, self.grower.num_levels > 0], axis=1)
        window = Window(
            start=position[:, 0],
            positions=position,
            slots=jnp.where(is_kept, position, -1),
            num_live=jnp.where(is_kept[:, 1], 2, 0),
        )
        tokens = jnp.take_along_axis(self.grower.rows.tokens, position, axis=1)
        logits, cache = self._read(tokens, window, cache, num_last=1)
        value = jnp.zeros((position.shape[0], 1), jnp.float32)
        return self.grower.add_children(growth, jnp.int32(0), logits, value), cache

    def _expand(self, level: jax.Array, grown: tuple[Growth, KVCache]) -> tuple[Growth, KVCache]:
        """Level `level`, from 1 on: reads K children of the previous level. A row with fewer levels
        writes nothing."""
        growth, cache = grown
        growth, nodes = self.grower.expand(growth, level)
        depth = jnp.broadcast_to(jnp.where(nodes.is_wanted, level, 0), nodes.tokens.shape)
        window = Window(
            start=self.newest,
            positions=self.newest[:, None] + depth,
            slots=jnp.where(nodes.is_wanted, self.newest[:, None] + nodes.offset, -1),
            paths=growth.paths,
            num_live=jnp.where(nodes.is_wanted[:, 0], nodes.tokens.shape[1], 0),
        )
        logits, cache = self._read(nodes.tokens, window, cache)
        return self.grower.add_children(growth, level, logits, nodes.value), cache

    def _read(
        self, tokens: jax.Array, window: Window, cache: KVCache, num_last: int = 0
    ) -> tuple[jax.Array, KVCache]:
        """Logits `[B, n, V']` after the last n tokens of the window; 0 means all of them."""
        tokens = jnp.minimum(tokens, self.model.vocab_size - 1)
        hidden, cache = self.model.forward(self.params, tokens, window, cache)
        return self.logits(self.params, hidden[:, -num_last:], window), cache


def _stored(tree: Tree, chosen: jax.Array, kept: jax.Array, num_levels: jax.Array) -> jax.Array:
    """`TreeDraft.stored` for the candidates that were `kept` `[B, N]`."""
    node = index_of(kept, chosen)
    is_stored = (node >= 0) & (node // tree.num_expanded < num_levels[:, None])
    return jnp.where(is_stored, node - tree.num_expanded, -1)
