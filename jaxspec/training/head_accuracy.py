"""How often heads are right on their target's texts, without decoding anything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.drafters.heads.formulas import head_logits
from jaxspec.drafters.trees import StaticTree, best_static_tree
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.sampling import without_nan
from jaxspec.training.teacher_forcing import run_heads, target_features, target_parts
from jaxspec.training.text_rows import TextBatch, fill_rows, pack_texts
from jaxspec.training.texts import Text
from jaxspec.types import PyTree

NUM_RANKS = 10  # W of `HeadAccuracy.acceptance`
_NUM_TRIALS = 4  # trees made from the rounds of the previous one; after these they hardly change
_BATCH_TOKENS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadAccuracy:
    """How often heads predict the tokens that the target wrote, given the true tokens before them.

    Attributes:
      top1: for each head, the fraction of tokens that it ranks first.
      top5: the fraction that it ranks among the first five.
      num_tokens: how many tokens each head predicted.
      acceptance: `[D, W]` nested lists for `best_static_tree`: the fraction of tokens that have
        rank w for head d, where every earlier head had the true token among its first W. Counted
        where rounds of a chain begin, as in decoding: after a token that the heads got wrong, and
        so less often in text that is easy to predict.
    """

    top1: list[float]
    top5: list[float]
    num_tokens: list[int]
    acceptance: list[list[float]]


class RankedText(NamedTuple):
    """A text, and how heads ranked its tokens.

    Attributes:
      domain: the text's domain.
      num_prompt: number of tokens of its prompt.
      ranks: `[T, D]`, rank of the token at t + 2 + d for head d at the anchor t, at most
        `NUM_RANKS`; those beyond the text are meaningless.
    """

    domain: str
    num_prompt: int
    ranks: np.ndarray


def rank_texts(
    config: HeadsConfig,
    params: PyTree,
    target: tuple[ModelConfig, PyTree],
    texts: Sequence[Text],
    row_length: int,
) -> list[RankedText]:
    """Texts that a target wrote, with the ranks that heads give their tokens after reading those
    before.

    Args:
      config: the heads'.
      params: the heads', in the target's dtype.
      target: configuration and parameters, not packed.
      texts: at least one.
      row_length: tokens of a row; longer texts are cut.
    """
    lengths = [min(len(text.prompt) + len(text.output), row_length) for text in texts]
    rows = fill_rows(lengths, row_length, np.random.default_rng(0))
    num_rows = max(1, _BATCH_TOKENS // row_length)
    ranked: list[RankedText | None] = [None] * len(texts)
    for start in range(0, len(rows), num_rows):
        chosen = rows[start : start + num_rows]
        chosen += [[]] * (num_rows - len(chosen))  # one shape for all batches
        batch = pack_texts([[texts[index] for index in row] for row in chosen], row_length)
        ranks = np.asarray(_RANKS(config, target[0], params, target[1], batch))
        for row, indices in enumerate(chosen):
            at = 0
            for index in indices:
                own = ranks[row, at : at + lengths[index]]
                ranked[index] = RankedText(texts[index].domain, len(texts[index].prompt), own)
                at += lengths[index]
    return [text for text in ranked if text is not None]


def accuracy_of(texts: Sequence[RankedText]) -> dict[str, HeadAccuracy]:
    """Accuracy over all texts (`all`), and over those of each domain."""
    found = {"all": _accuracy(texts)}
    for domain in dict.fromkeys(text.domain for text in texts):
        if domain != "all":
            found[domain] = _accuracy([text for text in texts if text.domain == domain])
    return found


def best_trees(
    texts: Sequence[RankedText], num_nodes: Sequence[int], num_tokens: int
) -> dict[int, tuple[StaticTree, float]]:
    """The best static tree for each number of nodes, and how many tokens its rounds emit on the
    texts, from heads that propose any of `num_tokens` tokens; numbers for which a table of ranks
    has too few paths are left out.

    Where rounds begin depends on the tree that they draft, and the best tree depends on where
    rounds begin. So a tree is made from the rounds of the previous one, a few times over, and the
    best one is kept.
    """
    num_heads = texts[0].ranks.shape[1]
    num_ranks = min(NUM_RANKS, num_tokens)
    num_paths = sum(num_ranks ** (depth + 1) for depth in range(num_heads))
    best = {}
    for nodes in num_nodes:
        if nodes > num_paths:
            continue
        walked, tried = _walk(texts, _chain(num_heads)), []
        for _ in range(_NUM_TRIALS):
            tree = best_static_tree(_acceptance(walked, num_heads)[:, :num_ranks], nodes)
            walked = _walk(texts, set(tree.choices))
            num_emitted = sum(each.num_emitted for each in walked)
            tried.append((num_emitted / max(len(walked), 1), -len(tried), tree))
        tokens_per_round, _, tree = max(tried, key=lambda each: each[:2])
        best[nodes] = tree, tokens_per_round
    return best


class _Round(NamedTuple):
    """A round of greedy decoding: ranks of the next tokens, and how many it emits."""

    ranks: tuple[int, ...]
    num_emitted: int


def _chain(num_heads: int) -> set[tuple[int, ...]]:
    return {(0,) * (depth + 1) for depth in range(num_heads)}


def _walk(texts: Sequence[RankedText], tree: Set[tuple[int, ...]]) -> list[_Round]:
    """The rounds that decode the texts greedily and draft this tree, by the paths to its nodes."""
    rounds = []
    for text in texts:
        # The first round's newest token is the prompt's last. A prompt of one token is followed by
        # a round that drafts nothing, which is left out.
        anchor, num_heads = max(text.num_prompt - 2, 0), text.ranks.shape[1]
        while (num_left := len(text.ranks) - 2 - anchor) > 0:
            path = tuple(text.ranks[anchor, : min(num_heads, num_left)].tolist())
            num_accepted = 0
            while num_accepted < len(path) and path[: num_accepted + 1] in tree:
                num_accepted += 1
            num_emitted = min(num_accepted + 1, num_left)
            rounds.append(_Round(path, num_emitted))
            anchor += num_emitted
    return rounds


def _acceptance(rounds: Sequence[_Round], num_heads: int) -> np.ndarray:
    """`HeadAccuracy.acceptance` of these rounds."""
    counts = np.zeros((num_heads, NUM_RANKS + 1))
    for each in rounds:
        for depth, rank in enumerate(each.ranks):
            counts[depth, rank] += 1
            if rank == NUM_RANKS:
                break
    return counts[:, :NUM_RANKS] / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def _accuracy(texts: Sequence[RankedText]) -> HeadAccuracy:
    num_heads = texts[0].ranks.shape[1]
    counts = np.zeros((num_heads, NUM_RANKS + 1), np.int64)
    for text in texts:
        for head in range(num_heads):
            first = max(text.num_prompt - 2 - head, 0)
            ranks = text.ranks[first : max(len(text.ranks) - 2 - head, 0), head]
            counts[head] += np.bincount(ranks, minlength=NUM_RANKS + 1)
    num_tokens = counts.sum(axis=1)
    shares = counts / np.maximum(num_tokens, 1)[:, None]
    return HeadAccuracy(
        top1=shares[:, 0].tolist(),
        top5=shares[:, :5].sum(axis=1).tolist(),
        num_tokens=num_tokens.tolist(),
        acceptance=_acceptance(_walk(texts, _chain(num_heads)), num_heads).tolist(),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ranks(
    config: HeadsConfig,
    target_config: ModelConfig,
    params: Any,
    target_params: Any,
    batch: TextBatch,
) -> jax.Array:
    """Ranks `[B, T, D]` int32 of the tokens that each head should propose, at most `NUM_RANKS`."""
    token_map = params.get("token_map")
    head_map = token_map if config.shares_head else None
    target = target_parts(target_config, target_params, head_map)
    features = target_features(target_config, target_params, batch)
    ranks = []
    for index, made in enumerate(run_heads(config, params, target, features, batch, token_map)):
        logits = without_nan(head_logits(config, params, target, index, made.hidden))
        rank = rank_of(logits, jnp.maximum(made.labels, 0))
        ranks.append(jnp.where(made.labels < 0, NUM_RANKS, rank))
    return jnp.minimum(jnp.stack(ranks, axis=-1), NUM_RANKS)


_RANKS = Program(_ranks, "the accuracy of heads", shapes_vary=True)


def rank_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """How many tokens come before the label `[...]` by `logits` `[..., V]`, in the order of
    `lax.top_k`: on a tie, the lower id first."""
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    ids = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    ids = jnp.expand_dims(ids, range(labels.ndim))
    comes_before = (logits > own) | ((logits == own) & (ids < labels[..., None]))
    return jnp.sum(comes_before, axis=-1, dtype=jnp.int32)
