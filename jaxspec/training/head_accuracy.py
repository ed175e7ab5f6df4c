"""How often heads are right on texts of their target, without decoding anything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.drafters.heads.formulas import head_logits
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.training.teacher_forcing import (
    HeadBatch,
    fill_rows,
    last_features,
    pack_texts,
    run_heads,
    target_parts,
)
from jaxspec.training.texts import Text
from jaxspec.types import PyTree

NUM_RANKS = 10  # W of `HeadAccuracy.acceptance`
_BATCH_TOKENS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadAccuracy:
    """How often heads are right about tokens that the target wrote, after the true ones.

    Attributes:
      top1: of each head, the share of tokens that it finds the likeliest.
      top5: the share that it counts among the five likeliest.
      num_tokens: how many tokens each head was asked for.
      acceptance: `[D, W]` nested lists: the share of tokens that have rank w for head d, where
        every head before found the true token among its first W. This is what `best_static_tree`
        takes.
    """

    top1: list[float]
    top5: list[float]
    num_tokens: list[int]
    acceptance: list[list[float]]


def measure_head_accuracy(
    config: HeadsConfig,
    params: PyTree,
    target: tuple[ModelConfig, PyTree],
    texts: Sequence[Text],
    row_length: int,
) -> dict[str, HeadAccuracy]:
    """Accuracy of heads on texts that their target wrote, of all of them (`all`) and by domain.

    Args:
      config: of the heads.
      params: of the heads, in the target's dtype.
      target: configuration and parameters, not packed.
      texts: at least one.
      row_length: tokens of a row; longer texts are cut.
    """
    found = {}
    for domain in dict.fromkeys(text.domain for text in texts):
        some = [text for text in texts if text.domain == domain]
        found[domain] = _add_up(config, params, target, some, row_length)
    by_rank, by_path = (np.sum(tables, axis=0) for tables in zip(*found.values(), strict=True))
    found = {"all": (by_rank, by_path)} | found
    return {name: _accuracy(*tables) for name, tables in found.items()}


def _add_up(
    config: HeadsConfig,
    params: PyTree,
    target: tuple[ModelConfig, PyTree],
    texts: Sequence[Text],
    row_length: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The tables of `_counts` over all texts."""
    lengths = [min(len(text.prompt) + len(text.output), row_length) for text in texts]
    rows = fill_rows(lengths, row_length, np.random.default_rng(0))
    num_rows = max(1, _BATCH_TOKENS // row_length)
    shape = (config.num_heads, NUM_RANKS + 1)
    by_rank, by_path = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for start in range(0, len(rows), num_rows):
        chosen = rows[start : start + num_rows]
        chosen += [[]] * (num_rows - len(chosen))  # one shape for all batches
        batch = pack_texts([[texts[index] for index in row] for row in chosen], row_length)
        counted = _COUNTS(config, target[0], params, target[1], batch)
        by_rank, by_path = by_rank + np.asarray(counted[0]), by_path + np.asarray(counted[1])
    return by_rank, by_path


def _accuracy(by_rank: np.ndarray, by_path: np.ndarray) -> HeadAccuracy:
    num_tokens = by_rank.sum(axis=1)
    shares = by_rank / np.maximum(num_tokens, 1)[:, None]
    acceptance = by_path / np.maximum(by_path.sum(axis=1), 1)[:, None]
    return HeadAccuracy(
        top1=shares[:, 0].tolist(),
        top5=shares[:, :5].sum(axis=1).tolist(),
        num_tokens=num_tokens.tolist(),
        acceptance=acceptance[:, :NUM_RANKS].tolist(),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _counts(
    config: HeadsConfig,
    target_config: ModelConfig,
    params: Any,
    target_params: Any,
    batch: HeadBatch,
) -> tuple[jax.Array, jax.Array]:
    """Tokens of each head by rank, `[D, W + 1]` int32 (the last are all beyond W): all of them, and
    those that every head before counted among its first W."""
    target = target_parts(target_config, target_params)
    features = last_features(target_config, target_params, batch)
    by_rank, by_path = [], []
    is_found = batch.is_output  # of each anchor, whether the path to the head is right
    for index, made in enumerate(run_heads(config, params, target, features, batch)):
        logits = head_logits(config, params, target, index, made.hidden)
        ranks = jnp.minimum(rank_of(logits, made.labels), NUM_RANKS)
        ranked = jax.nn.one_hot(ranks, NUM_RANKS + 1, dtype=jnp.int32)
        counted = made.weights > 0
        # A path begins with a token that the target wrote.
        is_found = counted if index == 0 else is_found
        by_rank.append(jnp.sum(jnp.where(counted[..., None], ranked, 0), axis=(0, 1)))
        on_path = (counted & is_found)[..., None]
        by_path.append(jnp.sum(jnp.where(on_path, ranked, 0), axis=(0, 1)))
        is_found = is_found & (ranks < NUM_RANKS)
    return jnp.stack(by_rank), jnp.stack(by_path)


_COUNTS = Program(_counts, "the accuracy of heads", shapes_vary=True)


def rank_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """How many tokens come before the label `[...]` by `logits` `[..., V]`, as `lax.top_k` orders
    them: of equals the lower id first."""
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    ids = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    ids = jnp.expand_dims(ids, range(labels.ndim))
    comes_before = (logits > own) | ((logits == own) & (ids < labels[..., None]))
    return jnp.sum(comes_before, axis=-1, dtype=jnp.int32)
