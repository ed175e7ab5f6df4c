"""A draft model grows a tree: level by level, several nodes in one call of the model.

A level expands K nodes of one depth: it reads their tokens and finds the W best children of each.
With K = W = 2 and depth 3, `r` the newest token and expanded nodes in capitals:

    level 0    r -> A B             reads r               stored at slot start
    level 1    A -> c D  B -> E f   reads A and B         stored at slots start + 1, start + 2
    level 2    D -> g h  E -> i j   reads D and E         stored at slots start + 3, start + 4

All children are candidates, and the tree says which of them are the draft's nodes. A node's KV
stands where its level put it, and `Window.paths` leads its descendants there. After the verdict the
accepted path's KV moves into consecutive slots, and only its last node may have none.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.cache.pages import KVCache, commit_path
from jaxspec.drafters.trees import BeamTree, StaticTree
from jaxspec.models.base import Model
from jaxspec.runtime.environment import loops_run_on_host
from jaxspec.sampling import (
    Stream,
    adjust,
    filtered_logits,
    fit_vocabulary,
    gumbel,
    is_greedy,
    position_keys,
    round_keys,
)
from jaxspec.types import BatchView, Draft, DraftContext, EngineShape, PyTree, Window

# A node is worth the chance that the target takes its token. That is more for the likeliest tokens
# than their probability says: a greedy target takes the likeliest one, however unlikely it is, and
# one that samples with the drafter's noise takes the highest of nearly the same scores. So scores
# are multiplied by these before they become probabilities. Of 1 to 6 (sampled: 1 to 3) they gave
# the most tokens per round on the embedded pair, with trees of 16 nodes: 4.40 instead of 3.68 at 1,
# and 3.45 instead of 3.36.
GREEDY_SHARPNESS, SAMPLED_SHARPNESS = 3.0, 1.5

Tree: TypeAlias = BeamTree | StaticTree


def num_scratch_slots(tree: Tree) -> int:
    """Slots after the newest token's that hold the KV of expanded nodes."""
    return (tree.max_depth - 1) * tree.num_expanded


class TreeDraft(struct.PyTreeNode, kw_only=True):
    """A drafted tree, and what drafting it has left behind.

    Attributes:
      draft: of `shape.num_nodes` nodes.
      cache: the draft model's, with the KV of the newest token and of the expanded nodes.
      stored: `[B, tree.num_nodes]` int32: the KV of node n stands at `start + 1 + stored[b, n]`,
        where start is the position of the newest token; -1 where it has none.
      num_levels: `[B]` int32, levels of each row; 0 for rows that drafted nothing.
      num_read: int32 scalar, tokens read for all rows; what a first step reads again is not
        counted.
    """

    draft: Draft
    cache: KVCache
    stored: jax.Array
    num_levels: jax.Array
    num_read: jax.Array


def draft_tree(
    model: Model,
    tree: Tree,
    shape: EngineShape,
    params: PyTree,
    cache: KVCache,
    rows: BatchView,
    num_seen: jax.Array,
) -> TreeDraft:
    """A tree per row: the first `shape.num_nodes` nodes of `tree`, in the order of their worth.

    A row's tree does not depend on how large its neighbours' are. Rows that lag by more than one
    token get none, and a lag of one is made up by the first level, as in a chain.

    Args:
      model: the draft model.
      tree: which children are expanded, and which are kept.
      shape: of the engine.
      params: of the draft model.
      cache: of the draft model, with room for `num_scratch_slots` after any newest token.
      rows: the batch.
      num_seen: `[B]` int32, tokens whose KV is in the cache.
    """
    wanted = jnp.where(rows.num_committed - 2 <= num_seen, rows.draft_limit, 0)
    wanted = jnp.minimum(wanted, min(tree.num_nodes, shape.num_nodes))
    # The first n nodes are no deeper than n, so that a row needs no more levels.
    num_levels = jnp.minimum(wanted, tree.max_depth)
    if rows.depth_limit is not None:
        num_levels = jnp.minimum(num_levels, rows.depth_limit)
    grower = _Grower(model, tree, shape, params, rows, num_levels)
    lags = (num_levels > 0) & (num_seen < rows.num_committed - 1)
    growth = grower.grow(cache, lags)

    kept = tree.keep(growth.worth)
    is_hole = jnp.isneginf(_at(_flat(growth.worth), kept))
    tokens = jnp.where(is_hole, -1, _at(_flat(growth.tokens), kept))
    expanded_by = kept // tree.num_children
    above = _at(growth.chosen, expanded_by)  # the candidate that each node's parent is
    parents = jnp.where(is_hole, -1, _index(above, kept))
    q = growth.q
    if q is not None:
        q = jnp.take_along_axis(q, expanded_by[..., None], axis=1)
    num_read = jnp.sum(jnp.where(num_levels > 0, 1 + (num_levels - 1) * tree.num_expanded, 0))
    return TreeDraft(
        draft=Draft(
            tokens=_fit(tokens, shape.num_nodes),
            parents=_fit(parents, shape.num_nodes),
            num_valid=wanted,
            q=None if q is None else _fit(q, shape.num_nodes),
        ),
        cache=growth.cache,
        stored=grower.stored(growth.chosen, kept),
        num_levels=num_levels,
        num_read=num_read + jnp.sum(lags, dtype=jnp.int32),
    )


def commit_tree(
    cache: KVCache, stored: jax.Array, num_committed: jax.Array, path: jax.Array
) -> tuple[KVCache, jax.Array]:
    """The draft model's cache with the accepted path in place, and how many of its nodes `[B]` have
    KV.

    Args:
      cache: after drafting.
      stored: `[B, tree.num_nodes]` int32, see `TreeDraft`.
      num_committed: `[B]` int32, before the round.
      path: `[B, D]` int32, see `Verdict`.
    """
    place = jnp.where(path >= 0, _at(stored, jnp.maximum(path, 0)), -1)
    cache = commit_path(cache, num_committed - 1, place)
    return cache, jnp.sum(place >= 0, axis=1, dtype=jnp.int32)


class _Growth(struct.PyTreeNode, kw_only=True):
    """A tree as it grows. Level l expands as nodes `l * K` to `(l + 1) * K`; of level 0 only the
    first is real, the newest token. S is `max_depth * K`.

    Attributes:
      tokens: `[B, S, W]` int32, the children of each expanded node: the candidates.
      worth: `[B, S, W]` fp32, of the path to each; -inf is no candidate.
      q: `[B, S, V]` fp32, the distribution after each expanded node, or None.
      chosen: `[B, S]` int32, which candidate each expanded node is; -1 is the newest token, -2
        none.
      drafted: `[B, S]` int32, its token.
      paths: `[B, K, max_depth]` int32, of the last level's nodes, see `Window.paths`.
      cache: of the draft model.
    """

    tokens: jax.Array
    worth: jax.Array
    q: jax.Array | None
    chosen: jax.Array
    drafted: jax.Array
    paths: jax.Array
    cache: KVCache


class _Grower:
    """What stays the same from level to level."""

    def __init__(
        self,
        model: Model,
        tree: Tree,
        shape: EngineShape,
        params: PyTree,
        rows: BatchView,
        num_levels: jax.Array,
    ):
        self.model, self.tree, self.shape, self.params = model, tree, shape, params
        self.rows, self.num_levels = rows, num_levels
        # A row that drafts nothing takes a position that does not make attention longer.
        is_drafting = num_levels > 0
        newest = rows.num_committed - 1
        self.newest = jnp.where(is_drafting, newest, jnp.max(jnp.where(is_drafting, newest, 0)))

    def grow(self, cache: KVCache, lags: jax.Array) -> _Growth:
        """All levels that some row wants, counted at run time; on a GPU, where the host runs loops,
        all there are."""
        num_rows, tree, shape = self.newest.shape[0], self.tree, self.shape
        size = (num_rows, tree.max_depth * tree.num_expanded)
        q = None
        if shape.needs_draft_probs:
            q = jnp.zeros((*size, shape.vocab_size), jnp.float32)
        chosen = jnp.full(size, -2, jnp.int32)
        growth = _Growth(
            tokens=jnp.zeros((*size, tree.num_children), jnp.int32),
            worth=jnp.full((*size, tree.num_children), -jnp.inf, jnp.float32),
            q=q,
            chosen=chosen.at[:, : tree.num_expanded].set(-1),
            drafted=jnp.zeros(size, jnp.int32),
            paths=jnp.zeros((num_rows, tree.num_expanded, tree.max_depth), jnp.int32),
            cache=cache,
        )
        stop = tree.max_depth if loops_run_on_host() else jnp.max(self.num_levels)
        first = 1 if loops_run_on_host() else jnp.minimum(stop, 1)

        def read_newest(_, growth: _Growth) -> _Growth:
            return self._read_newest(growth, lags)

        # A loop of one step, because a conditional would copy the cache.
        growth = lax.fori_loop(0, first, read_newest, growth)
        return lax.fori_loop(1, stop, self._expand, growth) if tree.max_depth > 1 else growth

    def _read_newest(self, growth: _Growth, lags: jax.Array) -> _Growth:
        """Level 0; the token before the newest is read too, and kept where the row lags."""
        position = self.newest[:, None] + jnp.arange(-1, 1, dtype=jnp.int32)[None]
        position = jnp.maximum(position, 0)
        is_kept = jnp.stack([lags, self.num_levels > 0], axis=1)
        window = Window(
            start=position[:, 0], positions=position, slots=jnp.where(is_kept, position, -1)
        )
        tokens = jnp.take_along_axis(self.rows.tokens, position, axis=1)
        hidden, cache = self._forward(tokens, window, growth.cache)
        worth = jnp.zeros((position.shape[0], 1), jnp.float32)
        return self._add_children(
            growth.replace(cache=cache), jnp.int32(0), hidden[:, -1:], worth, growth.paths[:, :1]
        )

    def _expand(self, level: jax.Array, growth: _Growth) -> _Growth:
        """Level `level`, from 1 on: K children of the level before are read."""
        num_expanded, num_children = self.tree.num_expanded, self.tree.num_children
        before, here = (level - 1) * num_expanded, level * num_expanded

        def level_before(values: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(values, before, num_expanded, axis=1)

        worth = level_before(growth.worth)
        index = self.tree.expand(level, worth)
        drafted = _at(_flat(level_before(growth.tokens)), index)

        # Row by row: a row of fewer levels looks at its newest token alone, and writes nothing.
        is_wanted = (level < self.num_levels)[:, None]
        offset = 1 + before + jnp.arange(num_expanded, dtype=jnp.int32)[None]
        path = jnp.take_along_axis(growth.paths, (index // num_children)[..., None], axis=1)
        is_here = jnp.arange(self.tree.max_depth, dtype=jnp.int32)[None, None] == level
        path = jnp.where(is_wanted[..., None], jnp.where(is_here, offset[..., None], path), 0)
        depth = jnp.broadcast_to(jnp.where(is_wanted, level, 0), index.shape)
        window = Window(
            start=self.newest,
            positions=self.newest[:, None] + depth,
            slots=jnp.where(is_wanted, self.newest[:, None] + offset, -1),
            paths=path,
        )
        hidden, cache = self._forward(drafted, window, growth.cache)

        def put(values: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(values, new, here, axis=1)

        growth = growth.replace(
            chosen=put(growth.chosen, before * num_children + index),
            drafted=put(growth.drafted, drafted),
            paths=path,
            cache=cache,
        )
        return self._add_children(growth, level, hidden, _at(_flat(worth), index), path)

    def _forward(
        self, tokens: jax.Array, window: Window, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        tokens = jnp.minimum(tokens, self.model.vocab_size - 1)
        return self.model.forward(self.params, tokens, window, cache)

    def _add_children(
        self,
        growth: _Growth,
        level: jax.Array,
        hidden: jax.Array,
        worth: jax.Array,
        paths: jax.Array,
    ) -> _Growth:
        """The growth with the best children of the nodes that `level` expands.

        Args:
          growth: so far.
          level: int32 scalar.
          hidden: `[B, n, E]`, of the n nodes; all K, or the newest token alone.
          worth: `[B, n]` fp32, of the paths to them.
          paths: `[B, n, max_depth]` int32, see `Window.paths`.
        """
        num_rows, num_nodes = worth.shape
        offset = 1 + jnp.arange(num_scratch_slots(self.tree), dtype=jnp.int32)
        context = DraftContext(
            tokens=growth.drafted[:, self.tree.num_expanded :],
            is_before=jnp.any(paths[..., None] == offset[None, None, None], axis=2),
            position=jnp.broadcast_to(
                (self.rows.num_committed + level)[:, None], (num_rows, num_nodes)
            ),
        )
        logits = fit_vocabulary(self.model.logits(self.params, hidden), self.shape.vocab_size)
        numbers = jnp.broadcast_to(self.tree.key_numbers(level)[None, :num_nodes], worth.shape)
        scores, q = _draw_scores(logits, self.rows, context, numbers, self.shape)
        best, tokens = lax.top_k(scores, self.tree.num_children)
        is_greedy_row = (self.rows.sampling.temperature == 0)[:, None, None]
        sharpness = jnp.where(is_greedy_row, GREEDY_SHARPNESS, SAMPLED_SHARPNESS)
        log_total = jax.nn.logsumexp(sharpness * scores, axis=-1, keepdims=True)
        log_share = sharpness * best - log_total
        of_path = worth[..., None] + log_share
        is_candidate = jnp.isfinite(of_path) & (level < self.num_levels)[:, None, None]

        def put(values: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(
                values, new, level * self.tree.num_expanded, axis=1
            )

        return growth.replace(
            tokens=put(growth.tokens, tokens),
            worth=put(growth.worth, jnp.where(is_candidate, of_path, -jnp.inf)),
            q=None if growth.q is None or q is None else put(growth.q, q),
        )

    def stored(self, chosen: jax.Array, kept: jax.Array) -> jax.Array:
        """`TreeDraft.stored` of the candidates that were `kept` `[B, N]`."""
        num_expanded = self.tree.num_expanded
        node = _index(kept, chosen)
        is_stored = (node >= 0) & (node // num_expanded < self.num_levels[:, None])
        return jnp.where(is_stored, node - num_expanded, -1)


def _draw_scores(
    logits: jax.Array,
    rows: BatchView,
    context: DraftContext,
    numbers: jax.Array,
    shape: EngineShape,
) -> tuple[jax.Array, jax.Array | None]:
    """Scores `[B, n, V]` fp32 whose highest are the children of each of n nodes, and q `[B, n, V]`.

    Of a sampled row these are log-probabilities with Gumbel noise: the highest one is a sample, and
    in falling order they are samples without replacement. With shared noise all nodes of a depth
    have that by which the target will draw the token there.

    Args:
      logits: `[B, n, V]` fp32.
      rows: the batch.
      context: of the n tokens to be drawn.
      numbers: `[B, n]` int32, keys of the noise that is not shared.
      shape: `is_noise_shared`, `needs_draft_probs`, `needs_greedy_probs` of it.
    """
    vocab_size = logits.shape[-1]

    def draw():
        adjusted = adjust(logits, rows, context)
        drawn_from = filtered_logits(adjusted, rows.sampling)
        if shape.is_noise_shared:
            keys = position_keys(rows.sampling, context.position[:, :1])
        else:
            keys = round_keys(rows, numbers, Stream.DRAFT)
        is_sampled = (rows.sampling.temperature > 0)[:, None, None]
        scores = jnp.where(is_sampled, drawn_from + gumbel(keys, vocab_size), adjusted)
        return scores, jax.nn.softmax(drawn_from, axis=-1) if shape.needs_draft_probs else None

    def take_highest():
        q = None
        if shape.needs_greedy_probs:
            q = jax.nn.softmax(filtered_logits(logits, rows.sampling), axis=-1)
        elif shape.needs_draft_probs:
            q = jnp.zeros_like(logits)
        return logits, q

    return lax.cond(is_greedy(rows), take_highest, draw)


def _flat(values: jax.Array) -> jax.Array:
    """`[B, n, W]` as `[B, n * W]`."""
    return values.reshape(values.shape[0], -1)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values` `[B, n]` at `index` `[B, m]`."""
    return jnp.take_along_axis(values, index, axis=1)


def _index(values: jax.Array, among: jax.Array) -> jax.Array:
    """`[B, n]` int32, where each of `values` `[B, n]` first stands in `among` `[B, m]`; -1 where it
    does not."""
    is_same = values[:, :, None] == among[:, None]
    return jnp.where(jnp.any(is_same, axis=2), jnp.argmax(is_same, axis=2).astype(jnp.int32), -1)


def _fit(values: jax.Array, num_nodes: int) -> jax.Array:
    """The first `num_nodes` of `values` `[B, n, ...]`, padded with zeros."""
    missing = max(0, num_nodes - values.shape[1])
    padding = ((0, 0), (0, missing), *((0, 0) for _ in values.shape[2:]))
    return jnp.pad(values[:, :num_nodes], padding)
