"""Prompt lookup: drafts copied from the row's own tokens (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.base import Drafter
from jaxspec.errors import SettingError
from jaxspec.runtime.values import whole_number
from jaxspec.types import BatchView, Draft, EngineShape, chain_parents

State = TypeVar("State")

LONGEST_LOOKUP = 64  # the compiled program has one comparison per length
MOST_BRANCHES = 16  # and one for every branch and depth
NODES_PER_BRANCH = 4
HEAD_START = 2  # levels by which a branch is ahead of the next one


@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """Proposes the tokens that followed the latest earlier occurrence of the row's last tokens.

    The longest match is used; of several, the latest. Matching runs on the device for all rows at
    once. A chain is at most as long as the match that it continues, because what follows a short
    match is seldom right for long; a match of `prompt_lookup_max` tokens, which may be longer than
    was looked for, is continued as far as the draft length allows. A continuation that reaches the
    row's end goes on with its own beginning: the row is repeating itself.

    With `branches` it proposes what followed each of the best matches, merged into a tree: common
    beginnings are proposed once, and matches with the same continuation count as one. The first
    branch begins with the chain that would have been drafted without `branches`; none is limited by
    its match. A branch is drafted two levels ahead of the next one: with prompt lookup about 0.7 of
    the tokens at each depth are right, so this treats a match as half as likely as the previous
    one.

    Attributes:
      prompt_lookup_min: shortest match that is used.
      prompt_lookup_max: longest match that is tried, at most 64.
      branches: number of matches whose continuations are drafted, at most 16; 1 drafts chains.
    """

    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4
    branches: int = 1

    def __post_init__(self):
        for name in ("prompt_lookup_min", "prompt_lookup_max", "branches"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= LONGEST_LOOKUP:
            raise SettingError(
                f"prompt_lookup_min {self.prompt_lookup_min} and prompt_lookup_max "
                f"{self.prompt_lookup_max} were given; they must satisfy 1 <= min <= max <= "
                f"{LONGEST_LOOKUP}."
            )
        if not 1 <= self.branches <= MOST_BRANCHES:
            raise SettingError(
                f"branches {self.branches} was given; it must be 1 (chains) to {MOST_BRANCHES}."
            )

    @property
    def name(self) -> str:
        """`ngram:MIN-MAX`, or `ngram[BRANCHES]:MIN-MAX`."""
        branches = f"[{self.branches}]" if self.branches > 1 else ""
        return f"ngram{branches}:{self.prompt_lookup_min}-{self.prompt_lookup_max}"

    @property
    def is_chain(self) -> bool:
        """Whether there is one branch."""
        return self.branches == 1

    @property
    def num_nodes(self) -> int | None:
        """Four for each branch; None for chains."""
        return None if self.is_chain else NODES_PER_BRANCH * self.branches

    def propose(self, shape: EngineShape, params, state, rows: BatchView):
        """A chain or a tree per row; none where nothing matches."""
        matched = self._match(shape, rows)
        if not self.is_chain:
            return self._tree(shape, rows, matched), state
        size, source = self._best(matched)
        longest = jnp.where(size < self.prompt_lookup_max, size, shape.num_nodes)
        longest = jnp.where(size >= self.prompt_lookup_min, longest, 0)
        draft = Draft(
            tokens=continuation(rows, source, shape.num_nodes),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.minimum(rows.draft_limit, jnp.minimum(longest, shape.num_nodes)),
        )
        return draft, state

    def _match(self, shape: EngineShape, rows: BatchView) -> jax.Array:
        """`[B, S]` int32, how many tokens agree, going backwards from slot j - 1 and from the row's
        end; slot j then holds the continuation."""
        tokens, length = rows.tokens, rows.num_committed[:, None]
        slot = jnp.arange(shape.max_length, dtype=jnp.int32)[None]
        # Slots wrap around, hence the test against `size`.
        still = (slot >= 1) & (slot < length)
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for size in range(1, self.prompt_lookup_max + 1):
            pattern = jnp.take_along_axis(tokens, jnp.maximum(length - size, 0), axis=1)
            still &= (slot >= size) & (jnp.roll(tokens, size, axis=1) == pattern)
            matched = jnp.where(still, size, matched)
        return matched

    def _best(self, matched: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Size and slot `[B]` of the longest match (of several, the latest): one maximum over
        both."""
        num_slots = matched.shape[1]
        slot = jnp.arange(num_slots, dtype=jnp.int32)[None]
        best = jnp.max(jnp.where(matched > 0, matched * num_slots + slot, 0), axis=1)
        return best // num_slots, best % num_slots

    def _tree(self, shape: EngineShape, rows: BatchView, matched: jax.Array) -> Draft:
        num_nodes = shape.num_nodes
        branches, available = [], []
        for _ in range(self.branches):
            size, source = self._best(matched)
            left = jnp.where(size >= self.prompt_lookup_min, num_nodes, 0)
            branch = continuation(rows, source, num_nodes)
            matched = jnp.where(adds_nothing(rows, branch, left), 0, matched)
            branches.append(branch)
            available.append(left)
        left = jnp.stack(available, axis=1)
        if rows.depth_limit is not None:
            left = jnp.minimum(left, rows.depth_limit[:, None])
        tokens, parents, num_merged = merge(jnp.stack(branches, axis=1), left)
        return Draft(
            tokens=tokens,
            parents=parents,
            num_valid=jnp.minimum(num_merged, jnp.minimum(rows.draft_limit, num_nodes)),
        )


def continuation(rows: BatchView, source: jax.Array, num_tokens: int) -> jax.Array:
    """`[B, n]` int32, the committed tokens from slot `source` `[B]` on, again and again."""
    period = jnp.maximum(rows.num_committed - source, 1)
    slot = source[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None] % period[:, None]
    return jnp.take_along_axis(rows.tokens, slot, axis=1)


def adds_nothing(rows: BatchView, branch: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """`[B, S]` bool: whether the committed tokens from slot j on, up to the length of a branch, are
    the beginning of `branch` `[B, n]`, of which the first `num_tokens` `[B]` are real."""
    slot = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
    is_covered = jnp.ones(rows.tokens.shape, bool)
    for depth in range(branch.shape[1]):
        is_same = jnp.roll(rows.tokens, -depth, axis=1) == branch[:, depth, None]
        is_same &= (depth < num_tokens)[:, None]
        is_covered &= is_same | (slot + depth >= rows.num_committed[:, None])
    return is_covered


def merge(branches: jax.Array, num_tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens and parents `[B, n]` int32 of the tree that the branches form, and its number of nodes
    `[B]`.

    Two branches with the same first token, and the order of the nodes:

        a b c d        a0 b1 c2 d3
        a x y             x4 y5

    Args:
      branches: `[B, M, n]` int32, best first; n is also the number of nodes returned.
      num_tokens: `[B, M]` int32, how many tokens each of them has.
    """
    num_rows, num_branches, length = branches.shape
    depth = jnp.arange(length, dtype=jnp.int32)
    is_real = depth[None, None] < num_tokens[..., None]  # [B, M, n]
    # A node belongs to the first branch that agrees with its own up to there.
    is_same = branches[:, :, None] == branches[:, None]
    is_same &= is_real[:, :, None] & is_real[:, None]
    agrees = jnp.cumprod(is_same.astype(jnp.int32), axis=3) > 0  # [B, M, M, n]
    owner = jnp.argmax(agrees, axis=2).astype(jnp.int32)
    branch = jnp.arange(num_branches, dtype=jnp.int32)[None, :, None]
    is_node = is_real & (owner == branch)

    # All places, best first; those that are nodes are numbered in this order.
    of_branch, of_depth = np.divmod(np.arange(num_branches * length), length)
    order = np.lexsort((of_branch, of_depth + HEAD_START * of_branch))
    rank = np.argsort(order)
    num_before = jnp.cumsum(is_node.reshape(num_rows, -1)[:, order], axis=1, dtype=jnp.int32)
    number = (num_before - 1)[:, rank].reshape(branches.shape)
    parent = jnp.take_along_axis(number, owner, axis=1)[:, :, :-1]
    parent = jnp.pad(parent, ((0, 0), (0, 0), (1, 0)), constant_values=-1)

    target = jnp.where(is_node, number, length).reshape(num_rows, -1)

    def place(values: jax.Array) -> jax.Array:
        def of_row(target, values):
            return jnp.zeros((length,), jnp.int32).at[target].set(values, mode="drop")

        return jax.vmap(of_row)(target, values.reshape(num_rows, -1))

    return place(branches), place(parent), num_before[:, -1]


def ngram_of(prompt_lookup_min: Any, prompt_lookup_max: Any) -> NGram | None:
    """The n-grams of these lengths in front of another drafter; None without a `prompt_lookup_min`.

    Raises:
      SettingError: they are out of range, or only the longest is given.
    """
    if prompt_lookup_min is None:
        if prompt_lookup_max is not None:
            raise SettingError(
                f"prompt_lookup_max {prompt_lookup_max!r} was given without a prompt_lookup_min; "
                "give both, or leave it out."
            )
        return None
    if prompt_lookup_max is None:
        return NGram(prompt_lookup_min)
    return NGram(prompt_lookup_min, prompt_lookup_max)


def draft_ngram_first(
    ngram: NGram,
    shape: EngineShape,
    rows: BatchView,
    most: int,
    propose: Callable[[BatchView], tuple[Draft, State]],
) -> tuple[Draft, State]:
    """For rows whose last tokens occurred before, the tokens that followed there, `most` of them at
    most; for the others what `propose` drafts, which sees a draft limit of 0 in the former."""
    found, _ = ngram.propose(shape, (), (), rows)
    num_found = jnp.minimum(found.num_valid, most)
    if rows.depth_limit is not None:
        num_found = jnp.minimum(num_found, rows.depth_limit)
    is_found = num_found > 0
    others = rows.replace(draft_limit=jnp.where(is_found, 0, rows.draft_limit))
    draft, state = propose(others)
    is_found = is_found[:, None]
    q = draft.q
    if q is not None:
        one_hot = jax.nn.one_hot(found.tokens, q.shape[2], dtype=q.dtype)
        q = jnp.where(is_found[..., None], one_hot, q)
    draft = draft.replace(
        tokens=jnp.where(is_found, found.tokens, draft.tokens),
        parents=jnp.where(is_found, found.parents, draft.parents),
        num_valid=jnp.where(is_found[:, 0], num_found, draft.num_valid),
        q=q,
    )
    return draft, state
