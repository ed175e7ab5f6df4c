"""Shapes of draft trees: fixed ones, those of a beam search, and those for independent positions.

Nodes are always ordered best first, with parents before children, so that the first n nodes are a
tree too, for any n. Drafters grow `StaticTree`, `BeamTree` and `BudgetTree` level by level (see
`growth`): a level expands some of the nodes of its depth, each into its likeliest children.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.errors import SettingError
from jaxspec.runtime.values import (
    LONGEST_LIST,
    listed,
    number,
    refusal,
    whole_number,
)

Path: TypeAlias = tuple[int, ...]
MOST_CANDIDATES = 2**24  # of a row


class Tree:
    """What all trees that are grown have. `growth` calls the methods; a level expands the best of
    the level before it unless a tree says otherwise.

    Attributes:
      name: for reports.
      num_nodes: N.
      max_depth: no node is deeper; children of the newest token have depth 1.
      is_chain: whether every node continues the one before it.
      num_children: W, candidates that each expanded node has.
      num_expanded: K, the most nodes that a level expands.
      ranks_paths: whether the values of paths decide anything.
      prunes_by_token: whether it leaves nodes out by their token, or siblings by their rank.
    """

    name: str
    num_nodes: int
    max_depth: int
    is_chain: bool
    num_children: int
    num_expanded: int
    ranks_paths: bool = True
    prunes_by_token: bool = True

    def within(self, num_nodes: int) -> Tree:
        """What is drafted for a window of `num_nodes` nodes."""
        return self

    def num_expanded_by(self, level: int) -> int:
        """The number of nodes that `level` expands, at most K; they come first in the result of
        `expand`."""
        return 1 if level == 0 else self.num_expanded

    def expand(self, level: jax.Array | int, value: jax.Array) -> jax.Array:
        """Which candidates `[B, K]` int32 of `level - 1` are expanded by `level`.

        Args:
          level: int32 scalar or int, from 1 on.
          value: `[B, K, W]`, of the candidates.
        """
        return lax.top_k(value.reshape(value.shape[0], -1), self.num_expanded)[1]

    def can_grow(self, value: jax.Array) -> jax.Array:
        """Which rows `[B]` bool may have further nodes; `value` is `[B, S, W]`, of the candidates
        so far."""
        return jnp.ones(value.shape[:1], bool)

    def prune(self, value: jax.Array, log_share: jax.Array, before: jax.Array) -> jax.Array:
        """The value `[B, n, W]` of a level's candidates, -inf for those that do not become nodes.

        Args:
          value: `[B, n, W]`, log-probabilities of the paths to them.
          log_share: `[B, n, W]`, log-probability of each after its parent, in descending order.
          before: `[B, S, W]`, value of the candidates of earlier levels.
        """
        return value

    def keep(self, value: jax.Array) -> jax.Array:
        """Which candidates `[B, N]` int32 of all levels are the nodes, best first; `value` is
        `[B, max_depth * K, W]`.

        A path has no higher value than its beginnings, and of equally good candidates the first are
        kept, so parents are kept with their children, and come before them.
        """
        return lax.top_k(value.reshape(value.shape[0], -1), self.num_nodes)[1]

    def key_numbers(self, level: jax.Array | int) -> jax.Array:
        """`[K]` int32, by which the noise of each expanded node's children is keyed: all numbers of
        a round differ, and the newest token's is 0."""
        return level * self.num_expanded + jnp.arange(self.num_expanded, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class StaticTree(Tree):
    """A tree whose nodes are known before anything is drafted.

    Attributes:
      choices: for each node, the ranks on the path to it, as in Medusa (2401.10774): `(0,)` is the
        likeliest token, `(0, 1)` the second likeliest token after that. They are ordered best
        first, each after the one that it continues.

    Raises:
      SettingError: there are no choices, or one of them appears twice, comes before the one that it
        continues, or has a negative rank.
    """

    choices: tuple[Path, ...]
    ranks_paths = False

    def __post_init__(self):
        choices = tuple(
            tuple(whole_number("the rank", rank) for rank in listed("the choice", choice))
            for choice in listed("choices", self.choices)
        )
        object.__setattr__(self, "choices", choices)
        if not choices:
            raise SettingError("A StaticTree was given no choices; give at least one, as [(0,)].")
        known: set[Path] = {()}
        for choice in choices:
            if not choice or min(choice) < 0:
                raise SettingError(
                    f"The choice {choice} was given; a choice is a path of one rank or more, each "
                    "0 (the likeliest) or above."
                )
            if choice in known:
                raise SettingError(f"The choice {choice} was given twice; give it once.")
            if choice[:-1] not in known:
                raise SettingError(
                    f"The choice {choice} was given without its prefix {choice[:-1]} before it; "
                    "list every choice after the one that it continues."
                )
            known.add(choice)

    @property
    def name(self) -> str:
        """`static:NODES`."""
        return f"static:{self.num_nodes}"

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.choices)

    @property
    def max_depth(self) -> int:
        """The depth of the deepest node; children of the newest token have depth 1."""
        return int(self.depth.max())

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """`[N]` int32, the node that each node continues; -1 is the newest token."""
        index = {choice: node for node, choice in enumerate(self.choices)}
        return np.array([index.get(choice[:-1], -1) for choice in self.choices], np.int32)

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """`[N]` int32, the depth of each node, from 1 on."""
        return np.array([len(choice) for choice in self.choices], np.int32)

    @functools.cached_property
    def rank(self) -> np.ndarray:
        """`[N]` int32, the rank of each node among the tokens that may follow its parent; 0 is the
        likeliest."""
        return np.array([choice[-1] for choice in self.choices], np.int32)

    @property
    def prunes_by_token(self) -> bool:
        """Whether some siblings do not have the ranks 0, 1, 2, ... in this order. Siblings drawn
        without replacement must, because each is drawn from what the earlier ones have left."""
        siblings = [self.rank[self.parents == parent].tolist() for parent in set(self.parents)]
        return any(ranks != list(range(len(ranks))) for ranks in siblings)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return self.max_depth == self.num_nodes

    # Growing the tree level by level; see `growth`.

    @property
    def num_children(self) -> int:
        """W, the number of candidates that each expanded node needs."""
        return int(self.rank.max()) + 1

    @property
    def num_expanded(self) -> int:
        """K, the largest number of nodes at one depth that have children."""
        return max(1, *(len(self._inner(depth)) for depth in range(1, self.max_depth + 1)))

    def num_expanded_by(self, level: int) -> int:
        """The nodes of this depth that have children."""
        return max(1, len(self._inner(level)))

    def _inner(self, depth: int) -> np.ndarray:
        """The nodes of a depth that have children; for depth 0, the newest token."""
        if depth == 0:
            return np.array([-1], np.int32)
        return np.intersect1d(np.flatnonzero(self.depth == depth), self.parents).astype(np.int32)

    @functools.cached_property
    def _place(self) -> np.ndarray:
        """`[N]` int32, index of each node among the candidates of its level, as in `expand`."""
        parent_place = [
            self._inner(depth - 1).tolist().index(parent)
            for depth, parent in zip(self.depth, self.parents, strict=True)
        ]
        return np.array(parent_place, np.int32) * self.num_children + self.rank

    @functools.cached_property
    def _expanded(self) -> np.ndarray:
        """`[max_depth, K]` int32, the nodes that each level expands. A level with fewer than K
        repeats one of them, which is never used."""
        levels = np.full((self.max_depth, self.num_expanded), -1, np.int32)
        for level in range(self.max_depth):
            inner = self._inner(level)
            levels[level] = inner[0]
            levels[level, : len(inner)] = inner
        return levels

    def expand(self, level: jax.Array | int, value: jax.Array) -> jax.Array:
        """The places of the nodes that have children."""
        place = jnp.asarray(self._place[np.maximum(self._expanded, 0)])[level]
        return jnp.broadcast_to(place, (value.shape[0], self.num_expanded))

    def keep(self, value: jax.Array) -> jax.Array:
        """The places of the nodes that are choices."""
        level_size = self.num_expanded * self.num_children
        place = jnp.asarray((self.depth - 1) * level_size + self._place)
        return jnp.broadcast_to(place, (value.shape[0], self.num_nodes))

    def key_numbers(self, level: jax.Array | int) -> jax.Array:
        """Each node's number plus one."""
        return jnp.asarray(self._expanded + 1)[level]


@dataclasses.dataclass(frozen=True)
class BeamTree(Tree):
    """A tree grown by beam search and pruned to its best nodes (EAGLE-2, 2406.16858, section 4).

    Every level expands its `width` best nodes into their `width` likeliest children. Of all these
    candidates the `nodes` best are kept, by the probability that the target takes the path to them,
    as estimated from the draft model's logits (`draft_tree.GREEDY_SHARPNESS`). Windows for fewer
    nodes get the first of them, or a chain if they have no more nodes than the tree has levels: so
    small a tree is a chain except for a node or two, and a chain is cheaper to draft.

    Attributes:
      width: K, nodes expanded per level and children of each.
      depth: levels, and the depth of the deepest node.
      nodes: N, nodes kept of the K + (depth - 1) K^2 candidates.

    Raises:
      SettingError: one of these is below 1, or there are fewer candidates than nodes.
    """

    width: int = 4
    depth: int = 4
    nodes: int = 12

    def __post_init__(self):
        _set_sizes(self, "width", "depth", "nodes")
        num_candidates = self.width + (self.depth - 1) * self.width**2
        if self.nodes > num_candidates:
            raise SettingError(
                f"A tree of {self.nodes} nodes was asked for; a width of {self.width} and a depth "
                f"of {self.depth} make {num_candidates} candidates, so ask for at most as many "
                "nodes."
            )
        _check_num_candidates(num_candidates)

    @property
    def name(self) -> str:
        """`WIDTHxDEPTH:NODES`."""
        return f"{self.width}x{self.depth}:{self.nodes}"

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.nodes

    @property
    def max_depth(self) -> int:
        """No node is deeper."""
        return self.depth

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return self.width == 1

    def within(self, num_nodes: int) -> BeamTree:
        """What is drafted for a window of `num_nodes` nodes: the first of this tree's nodes, or a
        chain."""
        if num_nodes < self.nodes and num_nodes <= self.depth:
            return BeamTree(width=1, depth=num_nodes, nodes=num_nodes)
        return self

    @property
    def num_children(self) -> int:
        """W, candidates that each expanded node has."""
        return self.width

    @property
    def num_expanded(self) -> int:
        """K, the number of nodes that a level expands."""
        return self.width

    @property
    def ranks_paths(self) -> bool:
        """Whether the values of paths decide anything; in a chain it does not."""
        return self.width > 1


@dataclasses.dataclass(frozen=True)
class BudgetTree(Tree):
    """A tree that spends its nodes level by level, as in Clover (2405.00263, and the figure of its
    sampling in the Clover-2 release).

    A child is considered if it is among the likeliest tokens that together have the probability
    `top_p`, and at least `min_ratio` times as likely as its likeliest sibling. Of all children at a
    depth, the likeliest paths become nodes, as many as earlier depths have left of `nodes`. So a
    level that is sure of its token leaves more nodes for the next levels. A row may get fewer nodes
    than there is room for.

    Attributes:
      nodes: N, the most nodes.
      depth: number of levels, and the greatest depth of a node.
      top_p: probability in (0, 1].
      min_ratio: in [0, 1].

    Raises:
      SettingError: one of them is out of range.
    """

    nodes: int = 4
    depth: int = 3
    top_p: float = 0.8
    min_ratio: float = 0.25

    def __post_init__(self):
        _set_sizes(self, "nodes", "depth")
        for name in ("top_p", "min_ratio"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if not (0 < self.top_p <= 1 and 0 <= self.min_ratio <= 1):
            raise SettingError(
                f"A top_p of {self.top_p} and a min_ratio of {self.min_ratio} were given; the one "
                "must be above 0, the other at least 0, and neither above 1."
            )
        _check_num_candidates(self.max_depth * self.num_expanded * self.num_children)

    @property
    def name(self) -> str:
        """`budget:NODES`."""
        return f"budget:{self.nodes}"

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.nodes

    @property
    def max_depth(self) -> int:
        """No node is deeper."""
        return min(self.depth, self.nodes)

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return self.nodes == 1

    def within(self, num_nodes: int) -> BudgetTree:
        """What is drafted for a window of `num_nodes` nodes: a tree of a smaller budget."""
        return dataclasses.replace(self, nodes=min(self.nodes, num_nodes))

    @property
    def num_children(self) -> int:
        """W, candidates that each expanded node has."""
        return self.nodes

    @property
    def num_expanded(self) -> int:
        """K, the most nodes that a level expands; see `num_expanded_by`."""
        return max(1, self.nodes - 1)

    def num_expanded_by(self, level: int) -> int:
        """The number of nodes that `level` expands: first the newest token, then as many as leave
        one node for a child, if every earlier depth has at least one node."""
        return 1 if level == 0 else max(1, self.nodes - level)

    def can_grow(self, value: jax.Array) -> jax.Array:
        """Where the budget is not spent."""
        return self._num_left(value) > 0

    def _num_left(self, value: jax.Array) -> jax.Array:
        """`[B]` int32, nodes that the candidates so far, of `value` `[B, S, W]`, leave."""
        return self.nodes - jnp.sum(value > -jnp.inf, axis=(1, 2), dtype=jnp.int32)

    def prune(self, value: jax.Array, log_share: jax.Array, before: jax.Array) -> jax.Array:
        """The likeliest paths of likely enough children stay, as many as the budget has left."""
        share = jnp.exp(log_share)
        likelier = jnp.cumsum(share, axis=-1) - share
        is_good = likelier < self.top_p
        is_good &= share >= jnp.float32(self.min_ratio) * share[..., :1]
        flat = jnp.where(is_good, value, -jnp.inf).reshape(value.shape[0], -1)
        num_left = self._num_left(before)
        best, place = lax.top_k(flat, min(self.nodes, flat.shape[1]))
        # Candidates at least as good as the last one that fits the budget: comparing them is
        # cheaper than marking the chosen places.
        last = jnp.clip(num_left - 1, 0, best.shape[1] - 1)[:, None]
        worst, last_place = (jnp.take_along_axis(of, last, axis=1) for of in (best, place))
        is_first = jnp.arange(flat.shape[1], dtype=jnp.int32)[None] <= last_place
        is_within = (flat > worst) | ((flat == worst) & is_first)
        is_within &= num_left[:, None] > 0
        return jnp.where(is_within, flat, -jnp.inf).reshape(value.shape)


def best_static_tree(acceptance: np.typing.ArrayLike, nodes: int) -> StaticTree:
    """The tree with the largest expected accepted length among all trees of `nodes` nodes.

    It takes the likeliest paths (Medusa, 2401.10774, section 2.3.3); on a tie the shallower one,
    then the one with lower ranks.

    Args:
      acceptance: `[D, W]`, the probability that the token of rank w is right at depth d + 1, if the
        path to it is right.
      nodes: number of nodes.

    Raises:
      SettingError: `acceptance` is not a table of probabilities, or is too small for this many
        nodes.
    """
    nodes = whole_number("nodes", nodes, most=LONGEST_LIST)
    try:
        table = np.asarray(acceptance, np.float64)
    except (OverflowError, TypeError, ValueError):
        expected = "a table of probabilities by depth and rank"
        raise refusal("acceptance", acceptance, expected) from None
    if table.ndim != 2 or not table.size or not np.all((table >= 0) & (table <= 1)):
        raise SettingError(
            f"An acceptance of shape {table.shape} was given; give a table of probabilities by "
            "depth and rank."
        )
    _check_num_nodes(nodes, *table.shape)

    def children(path: Path, value: float) -> list[tuple[float, int, Path]]:
        if len(path) == len(table):
            return []
        return [(-value * p, len(path) + 1, (*path, r)) for r, p in enumerate(table[len(path)])]

    open_paths, choices = children((), 1.0), []
    heapq.heapify(open_paths)
    while len(choices) < nodes:
        negative_value, _, path = heapq.heappop(open_paths)
        choices.append(path)
        for child in children(path, -negative_value):
            heapq.heappush(open_paths, child)
    return StaticTree(tuple(choices))


class ProductTree(NamedTuple):
    """The likeliest paths of independent positions, likeliest first; all `[B, N]`.

    Attributes:
      rank: int32, the rank of each node's token at its position.
      parents: int32, -1 is the newest token.
      depth: int32, from 1 on.
      log_prob: fp32, log-probability of the path to the node.
    """

    rank: jax.Array
    parents: jax.Array
    depth: jax.Array
    log_prob: jax.Array


def product_tree(log_q: jax.Array, nodes: int) -> ProductTree:
    """The `nodes` likeliest paths where the distribution at every position is independent of the
    tokens before it (DDTree, 2604.12989: exact best-first search).

    Taking a node opens two more: its next sibling and its first child. Every path is opened once,
    by a path that is no less likely, so the likeliest open node is the next best of all. On a tie
    the one that was opened first is taken.

    Args:
      log_q: `[B, D, W]` fp32, log-probabilities by position and rank, in descending order.
      nodes: N, static.

    Raises:
      SettingError: D positions of W ranks have fewer paths.
    """
    num_depths, width = log_q.shape[1:]
    _check_num_nodes(nodes, num_depths, width)
    chex.assert_type(log_q, jnp.float32)
    return jax.vmap(lambda log_q: _product_tree_of_row(log_q, nodes))(log_q)


class _Frontier(NamedTuple):
    """Nodes that were opened, `[2 N + 1]` each, and whether they can still be taken."""

    is_open: jax.Array
    rank: jax.Array
    parent: jax.Array
    depth: jax.Array
    log_prob: jax.Array


def _product_tree_of_row(log_q: jax.Array, nodes: int) -> ProductTree:
    num_depths, width = log_q.shape
    lowest = jnp.finfo(jnp.float32).min  # for open nodes; impossible ones are taken last

    def take_best(node, carry: tuple[_Frontier, ProductTree]):
        opened, tree = carry
        order = jnp.where(opened.is_open, jnp.maximum(opened.log_prob, lowest), -jnp.inf)
        best = jnp.argmax(order)
        rank, parent, depth = opened.rank[best], opened.parent[best], opened.depth[best]
        log_prob = opened.log_prob[best]
        tree = ProductTree(
            rank=tree.rank.at[node].set(rank),
            parents=tree.parents.at[node].set(parent),
            depth=tree.depth.at[node].set(depth),
            log_prob=tree.log_prob.at[node].set(log_prob),
        )
        before = jnp.where(parent < 0, 0.0, tree.log_prob[parent])
        sibling, child = 2 * node + 1, 2 * node + 2
        sibling_prob = before + log_q[depth - 1, jnp.minimum(rank + 1, width - 1)]
        child_prob = log_prob + log_q[jnp.minimum(depth, num_depths - 1), 0]
        opened = _Frontier(
            is_open=opened.is_open.at[best].set(False)
            .at[sibling].set(rank + 1 < width)
            .at[child].set(depth < num_depths),
            rank=opened.rank.at[sibling].set(rank + 1),
            parent=opened.parent.at[sibling].set(parent).at[child].set(node),
            depth=opened.depth.at[sibling].set(depth).at[child].set(depth + 1),
            log_prob=opened.log_prob.at[sibling].set(sibling_prob).at[child].set(child_prob),
        )  # fmt: skip
        return opened, tree

    def zeros(size: int) -> jax.Array:
        return jnp.zeros((size,), jnp.int32)

    room = 2 * nodes + 1
    first = _Frontier(
        is_open=jnp.arange(room) == 0,
        rank=zeros(room),
        parent=zeros(room) - 1,
        depth=zeros(room) + 1,
        log_prob=jnp.zeros((room,), jnp.float32).at[0].set(log_q[0, 0]),
    )
    tree = ProductTree(
        rank=zeros(nodes),
        parents=zeros(nodes),
        depth=zeros(nodes),
        log_prob=jnp.zeros((nodes,), jnp.float32),
    )
    return lax.fori_loop(0, nodes, take_best, (first, tree))[1]


def _set_sizes(tree: Any, *names: str) -> None:
    """Makes whole numbers, of at least 1, of these fields of a tree."""
    for name in names:
        size = whole_number(name, getattr(tree, name), least=1)
        object.__setattr__(tree, name, size)


def _check_num_candidates(num_candidates: int) -> None:
    """Raises `SettingError` if a row would have too many candidates to choose nodes from."""
    if num_candidates > MOST_CANDIDATES:
        raise SettingError(
            f"A tree of {num_candidates} candidates for each row was asked for; they may be at "
            f"most {MOST_CANDIDATES}, so lower its width, its depth or its number of nodes."
        )


def _check_num_nodes(nodes: int, num_depths: int, width: int) -> None:
    """Raises `SettingError` unless there are at least this many paths of up to `num_depths`
    ranks."""
    num_paths = sum(width**depth for depth in range(1, num_depths + 1))
    if not 1 <= nodes <= num_paths:
        raise SettingError(
            f"A tree of {nodes} nodes was asked for; with {width} ranks at each of {num_depths} "
            f"depths there are {num_paths} paths, so ask for 1 to {num_paths} nodes."
        )
