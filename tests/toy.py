"""Tiny models, drafters that follow a script, and a plain-Python decoder to compare with."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import sampling
from jaxspec.drafters.base import Drafter
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.types import Draft, chain_parents

VOCAB = 61


def config(**changes) -> ModelConfig:
    """Two layers, four query heads on two KV heads."""
    fields = {
        "family": "qwen3",
        "vocab_size": VOCAB,
        "width": 32,
        "feed_forward_width": 48,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "max_length": 512,
        "norm_epsilon": 1e-6,
        "rope": RopeConfig(theta=1e4, rotary_size=8),
        "has_qk_norm": True,
    } | changes
    return ModelConfig(**fields)


def model(
    *, seed=0, dtype=jnp.float32, eos_token_ids=(), kernels="xla", kv_dtype=None, **changes
) -> LanguageModel:
    """A random model with weights so large that its greedy output wanders instead of repeating."""
    shape = config(**changes)
    return LanguageModel(
        name=f"toy{seed}",
        config=shape,
        params=_params(shape, seed, jnp.dtype(dtype)),
        eos_token_ids=tuple(eos_token_ids),
        kernels=kernels,
        kv_dtype=kv_dtype,
    )


@functools.cache
def _params(shape: ModelConfig, seed: int, dtype):
    """Weights, drawn once in a process; a test that deletes or donates them copies them first."""
    return decoder.init_params(shape, jax.random.key(seed), dtype, stddev=0.4)


def prompts(lengths, *, seed=0) -> list[list[int]]:
    """Random prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def sequences(completions) -> list[list[int]]:
    """Prompt and output of each completion, as an oracle wants them."""
    return [list(c.prompt_token_ids + c.token_ids) for c in completions]


def copied(text, num_tokens):
    """What `ngram:2-4` drafts: what followed the latest of the longest earlier matches, as far as a
    chain of it goes."""
    for size in (4, 3, 2):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                count = num_tokens if size == 4 else min(size, num_tokens)
                return list(itertools.islice(itertools.cycle(text[start + size :]), count))
    return []


@dataclasses.dataclass(frozen=True)
class WrongDrafter(Drafter):
    """Proposes one token over and over."""

    token: int = 0
    name: str = "wrong"

    def propose(self, shape, params, state, rows):
        """A chain of that token."""
        draft = Draft(
            tokens=jnp.full((shape.batch_size, shape.num_nodes), self.token, jnp.int32),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.minimum(rows.draft_limit, shape.num_nodes),
        )
        return draft, state


@dataclasses.dataclass(frozen=True, eq=False)
class TreeOracle(Drafter):
    """Hides the true continuation in a tree of wrong siblings.

    Nodes: 0 wrong, 1 right; below 1: 2 wrong, 3 right; below 3: 4 right, 5 wrong. From position
    `right_until` of a row onwards all nodes are wrong.
    """

    table: tuple[tuple[int, ...], ...]
    right_until: int = 10_000
    name: str = "tree-oracle"
    is_chain = False
    max_depth = 3

    def propose(self, shape, params, state, rows):
        """Rows must be seated in the order of the table."""
        width = max(map(len, self.table))
        rows_held = self.table[: shape.batch_size]
        table = jnp.asarray([list(row) + [0] * (width - len(row)) for row in rows_held], jnp.int32)
        position = rows.num_committed[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
        truth = jnp.take_along_axis(table, jnp.minimum(position, width - 1), axis=1)
        truth = jnp.where(position < self.right_until, truth, (truth + 7) % shape.vocab_size)
        wrong = (truth + 1) % shape.vocab_size
        tokens = jnp.stack(
            [wrong[:, 0], truth[:, 0], wrong[:, 1], truth[:, 1], truth[:, 2], wrong[:, 2]], axis=1
        )
        parents = jnp.broadcast_to(jnp.asarray([-1, -1, 1, 1, 3, 3], jnp.int32), tokens.shape)
        return (
            Draft(
                tokens=tokens,
                parents=parents,
                num_valid=jnp.minimum(jnp.where(rows.draft_limit > 0, 6, 0), shape.num_nodes),
            ),
            state,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class SampledTree(Drafter):
    """Draws a tree of one shape from a table of logits `[V, V]`, by the token before, as each row
    draws its own tokens. Siblings are drawn without replacement; where a filter leaves fewer tokens
    than there are siblings, the last are holes.
    """

    parents: tuple[int, ...]
    params: jax.Array
    name: str = "sampled-tree"
    is_chain = False

    @property
    def num_nodes(self):
        """N."""
        return len(self.parents)

    @property
    def depths(self):
        """Of the root and of each node."""
        depths = [0]
        for parent in self.parents:
            depths.append(1 + depths[parent + 1])
        return depths

    @property
    def max_depth(self):
        """Depth of the deepest node."""
        return max(self.depths)

    def propose(self, shape, params, state, rows):
        """Level by level; with the target's noise where it is shared."""
        batch_size = rows.num_committed.shape[0]
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)
        entries = jnp.pad(newest, ((0, 0), (0, self.num_nodes)))
        q = jnp.zeros((batch_size, self.num_nodes, shape.vocab_size), jnp.float32)
        is_sampled = (rows.sampling.temperature > 0)[:, None, None]
        for above in range(self.num_nodes):
            children = np.flatnonzero(np.array(self.parents) + 1 == above)
            if not children.size:
                continue
            logits = jnp.take(params, jnp.maximum(entries[:, above], 0), axis=0)[:, None]
            drawn_from = sampling.filtered_logits(logits, rows.sampling)
            if shape.is_noise_shared:
                position = rows.num_committed[:, None] + self.depths[above]
                keys = sampling.position_keys(rows.sampling, position)
            else:
                entry = jnp.full((batch_size, 1), above, jnp.int32)
                keys = sampling.round_keys(rows, entry, sampling.Stream.DRAFT)
            noisy = drawn_from + sampling.gumbel(keys, shape.vocab_size)
            ranked = jnp.where(is_sampled, noisy, drawn_from)[:, 0]
            values, tokens = jax.lax.top_k(ranked, len(children))
            entries = entries.at[:, children + 1].set(jnp.where(jnp.isfinite(values), tokens, -1))
            q = q.at[:, children].set(jax.nn.softmax(drawn_from, axis=-1))
        draft = Draft(
            tokens=entries[:, 1:],
            parents=jnp.broadcast_to(jnp.asarray(self.parents, jnp.int32), entries[:, 1:].shape),
            num_valid=jnp.minimum(rows.draft_limit, self.num_nodes),
            q=q if shape.needs_draft_probs else None,
        )
        return draft, state
