"""How a draft tree grows, level by level, whichever model scores its tokens.

A level expands K nodes of one depth: it finds the W best children of each. For K = W = 2 and depth
3, where `r` is the newest token and capitals are expanded nodes:

    level 0    r -> A B
    level 1    A -> c D    B -> E f
    level 2    D -> g h    E -> i j

All children are candidates; the tree chooses which of them become the draft's nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.drafters.trees import Tree
from jaxspec.kernels import sums
from jaxspec.kernels.base import XLA, Kernels
from jaxspec.kernels.highest import Highest
from jaxspec.sampling import (
    Stream,
    adjust,
    filtered_logits,
    fit_vocabulary,
    gumbel,
    is_greedy,
    is_penalised,
    over_vocabulary,
    position_keys,
    round_keys,
)
from jaxspec.types import BatchView, Draft, DraftContext, EngineShape


class Growth(struct.PyTreeNode, kw_only=True):
    """A tree as it grows. Level l expands nodes `l * K` to `(l + 1) * K`; in level 0 only the first
    one is real: the newest token. S is `max_depth * K`.

    Attributes:
      tokens: `[B, S, W]` int32, the children of each expanded node: the candidates.
      value: `[B, S, W]` fp32, the value of the path to each candidate; -inf where there is none.
      q: `[B, S, V]` fp32, the distribution after each expanded node, or None.
      chosen: `[B, S]` int32, which candidate each expanded node is; -1 is the newest token, -2
        means none.
      drafted: `[B, S]` int32, the token of each expanded node.
      paths: `[B, K, max_depth]` int32, for each node of the last level, the offset from the newest
        token of its ancestor at each depth, as in `Window.paths`: expanded node `K + i` has offset
        `i + 1`.
    """

    tokens: jax.Array
    value: jax.Array
    q: jax.Array | None
    chosen: jax.Array
    drafted: jax.Array
    paths: jax.Array


class Level(NamedTuple):
    """The nodes that one level expands, from level 1 on.

    Attributes:
      tokens: `[B, K]` int32.
      value: `[B, K]` fp32, the value of the paths to them.
      parent: `[B, K]` int32, which expanded node of the previous level each of them continues.
      offset: `[1, K]` int32, the offset of each, as in `Growth.paths`.
      is_wanted: `[B, 1]` bool, which rows want this level.
    """

    tokens: jax.Array
    value: jax.Array
    parent: jax.Array
    offset: jax.Array
    is_wanted: jax.Array


def num_offsets(tree: Tree) -> int:
    """The largest offset that `Growth.paths` may hold."""
    return (tree.max_depth - 1) * tree.num_expanded


def count_levels(
    tree: Tree, shape: EngineShape, rows: BatchView, can_draft: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Nodes and levels `[B]` int32 that each row wants; 0 where it cannot draft.

    The first n nodes are no deeper than n, so n nodes need at most n levels.
    """
    wanted = jnp.where(can_draft, rows.draft_limit, 0)
    wanted = jnp.minimum(wanted, min(tree.num_nodes, shape.num_nodes))
    num_levels = jnp.minimum(wanted, tree.max_depth)
    if rows.depth_limit is not None:
        num_levels = jnp.minimum(num_levels, rows.depth_limit)
    return wanted, num_levels


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Grower:
    """What stays the same from level to level.

    Attributes:
      tree: chooses which children are expanded, and which are kept.
      shape: the engine's.
      rows: the batch.
      num_levels: `[B]` int32, levels that each row wants.
      greedy_sharpness: factor on a greedy row's logits before they become probabilities, whose
        product along a path is its value. Draft models gain from more than 1 (see `draft_tree`),
        heads hardly.
      sampled_sharpness: the same for a sampled row.
      kernels: used to find the highest scores.
      token_map: `[V']` int32, the tokens that logits are of; None is the first V'. Only what is
        drawn by noise or returned as a distribution is spread over the vocabulary.
    """

    tree: Tree
    shape: EngineShape
    rows: BatchView
    num_levels: jax.Array
    greedy_sharpness: float = 1.0
    sampled_sharpness: float = 1.0
    kernels: Kernels = XLA
    token_map: jax.Array | None = None

    def start(self) -> Growth:
        """A growth without nodes."""
        num_rows, tree, shape = self.num_levels.shape[0], self.tree, self.shape
        size = (num_rows, tree.max_depth * tree.num_expanded)
        q = None
        if shape.needs_draft_probs:
            q = jnp.zeros((*size, shape.vocab_size), jnp.float32)
        chosen = jnp.full(size, -2, jnp.int32)
        return Growth(
            tokens=jnp.zeros((*size, tree.num_children), jnp.int32),
            value=jnp.full((*size, tree.num_children), -jnp.inf, jnp.float32),
            q=q,
            chosen=chosen.at[:, : tree.num_expanded].set(-1),
            drafted=jnp.zeros(size, jnp.int32),
            paths=jnp.zeros((num_rows, tree.num_expanded, tree.max_depth), jnp.int32),
        )

    def is_wanted(self, growth: Growth, level: jax.Array | int) -> jax.Array:
        """Which rows `[B]` bool have nodes of `level`: those that want so many levels, and whose
        tree has room for more nodes."""
        return (level < self.num_levels) & self.tree.can_grow(growth.value)

    def expand(self, growth: Growth, level: jax.Array | int) -> tuple[Growth, Level]:
        """The growth with the nodes that `level` (from 1 on) expands, and these nodes."""
        num_expanded, num_children = self.tree.num_expanded, self.tree.num_children
        before, here = (level - 1) * num_expanded, level * num_expanded

        def level_before(values: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(values, before, num_expanded, axis=1)

        value = level_before(growth.value)
        index = self.tree.expand(level, value)
        drafted = at(flat(level_before(growth.tokens)), index)

        # Row by row: a row with fewer levels sees its newest token only.
        is_wanted = (level < self.num_levels)[:, None]
        offset = 1 + before + jnp.arange(num_expanded, dtype=jnp.int32)[None]
        parent = index // num_children
        path = jnp.take_along_axis(growth.paths, parent[..., None], axis=1)
        is_here = jnp.arange(self.tree.max_depth, dtype=jnp.int32)[None, None] == level
        path = jnp.where(is_wanted[..., None], jnp.where(is_here, offset[..., None], path), 0)

        def put(values: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(values, new, here, axis=1)

        growth = growth.replace(
            chosen=put(growth.chosen, before * num_children + index),
            drafted=put(growth.drafted, drafted),
            paths=path,
        )
        return growth, Level(
            tokens=drafted,
            value=at(flat(value), index),
            parent=parent,
            offset=offset,
            is_wanted=is_wanted,
        )

    def add_children(
        self, growth: Growth, level: jax.Array | int, logits: jax.Array, value: jax.Array
    ) -> Growth:
        """The growth with the best children of the nodes that `level` expands.

        Args:
          growth: the growth so far.
          level: int32 scalar, or an int.
          logits: `[B, n, V']` after the first n nodes that the level expands; `[B, 1, V']` if they
            are the same after each of them.
          value: `[B, n]` fp32, the value of the paths to them.
        """
        if self.token_map is None:
            logits = fit_vocabulary(logits, self.shape.vocab_size)
        num_nodes, num_alike = value.shape[1], value.shape[1] // logits.shape[1]

        def choose_once() -> tuple[jax.Array, jax.Array, jax.Array | None]:
            found = self._choose(growth, level, logits)
            return jax.tree.map(lambda of_one: jnp.repeat(of_one, num_alike, axis=1), found)

        def choose_for_each() -> tuple[jax.Array, jax.Array, jax.Array | None]:
            size = (logits.shape[0], num_nodes, logits.shape[2])
            return self._choose(growth, level, jnp.broadcast_to(logits, size))

        if num_alike == 1 or not self.shape.is_noise_shared:
            tokens, log_share, q = choose_for_each()
        else:  # penalties count the tokens on the way to a node
            tokens, log_share, q = lax.cond(is_penalised(self.rows), choose_for_each, choose_once)
        of_path = value[..., None] + log_share
        is_candidate = jnp.isfinite(of_path) & (level < self.num_levels)[:, None, None]
        of_path = jnp.where(is_candidate, of_path, -jnp.inf)

        def put(values: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(
                values, new, level * self.tree.num_expanded, axis=1
            )

        return growth.replace(
            tokens=put(growth.tokens, tokens),
            value=put(growth.value, self.tree.prune(of_path, log_share, growth.value)),
            q=None if growth.q is None or q is None else put(growth.q, q),
        )

    def _choose(
        self, growth: Growth, level: jax.Array | int, logits: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The best children of the first n nodes that a level expands, `[B, n, W]`: tokens, the
        logarithms of their shares of their parents' value, and q `[B, n, V]` or None.

        `logits` are `[B, n, V']` fp32.
        """
        num_rows, num_nodes = logits.shape[:2]
        offset = 1 + jnp.arange(num_offsets(self.tree), dtype=jnp.int32)
        paths = growth.paths[:, :num_nodes]
        context = DraftContext(
            tokens=growth.drafted[:, self.tree.num_expanded :],
            is_before=jnp.any(paths[..., None] == offset[None, None, None], axis=2),
            position=jnp.broadcast_to(
                (self.rows.num_committed + level)[:, None], (num_rows, num_nodes)
            ),
        )
        numbers = self.tree.key_numbers(level)[None, :num_nodes]
        numbers = jnp.broadcast_to(numbers, (num_rows, num_nodes))
        best, q = _draw(
            logits, self.rows, context, numbers, self.shape, self._highest, self.token_map
        )
        if not self.tree.ranks_paths:
            share = jnp.where(jnp.isfinite(best.scores), jnp.float32(0), -jnp.inf)
            return best.places, share, q
        scores, sharpness = best.scores, self._sharpness
        if sharpness is not None:
            scores = sharpness[:, None, None] * scores
        return best.places, scores - best.log_total[..., None], q

    def _highest(self, scores: jax.Array) -> Highest:
        """The children of each node, chosen from the `scores` `[B, n, V]` of all tokens after
        it."""
        return self.kernels.highest(scores, self.tree.num_children, self._sharpness)

    @property
    def _sharpness(self) -> jax.Array | None:
        """`[B]` fp32, each row's sharpness; None if all are 1, or if it affects nothing."""
        is_one = self.greedy_sharpness == 1 and self.sampled_sharpness == 1
        if is_one or not self.tree.ranks_paths:
            return None
        is_greedy_row = self.rows.sampling.temperature == 0
        greedy, sampled = jnp.float32(self.greedy_sharpness), jnp.float32(self.sampled_sharpness)
        return jnp.where(is_greedy_row, greedy, sampled)

    def draft(self, growth: Growth, wanted: jax.Array) -> tuple[Draft, jax.Array]:
        """The draft of `shape.num_nodes` nodes, of which each row wants the first `wanted` `[B]`,
        and the candidates `[B, tree.num_nodes]` int32 that were kept as its nodes."""
        kept = self.tree.keep(growth.value)
        is_hole = jnp.isneginf(at(flat(growth.value), kept))
        tokens = jnp.where(is_hole, -1, at(flat(growth.tokens), kept))
        expanded_by = kept // self.tree.num_children
        above = at(growth.chosen, expanded_by)  # the candidate that each node's parent is
        parents = jnp.where(is_hole, -1, index_of(above, kept))
        q = growth.q
        if q is not None:
            q = jnp.take_along_axis(q, expanded_by[..., None], axis=1)
        num_nodes = self.shape.num_nodes
        draft = Draft(
            tokens=_fit(tokens, num_nodes),
            parents=_fit(parents, num_nodes),
            num_valid=wanted,
            q=None if q is None else _fit(q, num_nodes),
        )
        return draft, kept


def _draw(
    logits: jax.Array,
    rows: BatchView,
    context: DraftContext,
    numbers: jax.Array,
    shape: EngineShape,
    choose: Callable[[jax.Array], Highest],
    token_map: jax.Array | None,
) -> tuple[Highest, jax.Array | None]:
    """What `choose` returns for the scores `[B, n, V]` fp32 of the children of n nodes, with tokens
    as its places, and q `[B, n, V]`.

    A sampled row's scores are log-probabilities plus Gumbel noise: the highest one is a sample, and
    in descending order they are samples without replacement. If noise is shared, all nodes of a
    depth use the noise with which the target will draw the token at that position.

    Args:
      logits: `[B, n, V']` fp32, of the tokens of the map.
      rows: the batch.
      context: that of the n tokens to be drawn.
      numbers: `[B, n]` int32, numbers that key the noise if it is not shared.
      shape: used for `is_noise_shared`, `needs_draft_probs` and `needs_greedy_probs`.
      choose: called where the scores are computed, so that XLA need not copy them out of a
        conditional.
      token_map: see `Grower`.
    """
    vocab_size = shape.vocab_size
    of_all_tokens = functools.partial(over_vocabulary, logits, token_map, vocab_size)

    def draw():
        adjusted = adjust(of_all_tokens(), rows, context)
        drawn_from = filtered_logits(adjusted, rows.sampling)
        if shape.is_noise_shared:
            keys = position_keys(rows.sampling, context.position[:, :1])
        else:
            keys = round_keys(rows, numbers, Stream.DRAFT)
        is_sampled = (rows.sampling.temperature > 0)[:, None, None]
        scores = jnp.where(is_sampled, drawn_from + gumbel(keys, vocab_size), adjusted)
        q = sums.softmax(drawn_from) if shape.needs_draft_probs else None
        return choose(scores), q

    def take_highest():
        q = None
        if shape.needs_greedy_probs:
            q = sums.softmax(filtered_logits(of_all_tokens(), rows.sampling))
        elif shape.needs_draft_probs:
            q = jnp.zeros((*logits.shape[:-1], vocab_size), jnp.float32)
        best = choose(logits)
        return best if token_map is None else best._replace(places=token_map[best.places]), q

    return lax.cond(is_greedy(rows), take_highest, draw)


def flat(values: jax.Array) -> jax.Array:
    """`[B, n, W]` as `[B, n * W]`."""
    return values.reshape(values.shape[0], -1)


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values` `[B, n]` at `index` `[B, m]`."""
    return jnp.take_along_axis(values, index, axis=1)


def index_of(values: jax.Array, among: jax.Array) -> jax.Array:
    """`[B, n]` int32, the first index of each of `values` `[B, n]` in `among` `[B, m]`; -1 if it is
    not there."""
    is_same = values[:, :, None] == among[:, None]
    return jnp.where(jnp.any(is_same, axis=2), jnp.argmax(is_same, axis=2).astype(jnp.int32), -1)


def _fit(values: jax.Array, num_nodes: int) -> jax.Array:
    """The first `num_nodes` of `values` `[B, n, ...]`, padded with zeros."""
    missing = max(0, num_nodes - values.shape[1])
    padding = ((0, 0), (0, missing), *((0, 0) for _ in values.shape[2:]))
    return jnp.pad(values[:, :num_nodes], padding)
