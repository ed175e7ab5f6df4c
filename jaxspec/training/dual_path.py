"""FlexDraft's mask rows beside packed texts of their target, for training.

A block has an anchor x, the last clean token that it sees. Its K mask rows are at positions x + 1
to x + K, see the clean tokens of their text up to x and each other, and each predicts the token at
its own position. Clean rows see no mask row: they are the target's own, computed once for all
blocks, and have no gradients. In decoding, x + 1 is the newest token, at the position of slot 0,
and the calibrator gets it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.drafters.flexdraft.config import FlexConfig
from jaxspec.drafters.flexdraft.formulas import calibration
from jaxspec.kernels.base import attention_inputs, precision_of
from jaxspec.kernels.training import training_product
from jaxspec.models import decoder, layers
from jaxspec.training.teacher_forcing import target_features, target_parts
from jaxspec.training.text_rows import TextBatch

Params: TypeAlias = Mapping[str, Any]
# Most logits at a time; as many blocks are processed together as fit. More of them were slower.
_MAX_LOGITS = 2**24


class BlockBatch(struct.PyTreeNode, kw_only=True):
    """Packed texts, and the blocks that are drafted in them.

    Attributes:
      texts: `[B, T]`.
      anchors: `[B, N]` int32, x of each block.
      is_block: `[B, N]` bool, false where a row has fewer than N anchors.
    """

    texts: TextBatch
    anchors: jax.Array
    is_block: jax.Array


class BlockScores(NamedTuple):
    """What mask rows predict for the tokens at their positions, all `[B, N, K]`.

    Attributes:
      loss: cross entropy without calibration, fp32.
      calibrated_loss: the same with calibration; 0 for slot 0, which is not calibrated.
      is_right: bool, whether the token is the likeliest without calibration.
      is_right_calibrated: the same with calibration; false for slot 0.
      is_label: bool, whether the token belongs to the anchor's text and the target wrote it.
    """

    loss: jax.Array
    calibrated_loss: jax.Array
    is_right: jax.Array
    is_right_calibrated: jax.Array
    is_label: jax.Array


def draw_blocks(
    texts: TextBatch, num_blocks: int, rngs: Sequence[np.random.Generator]
) -> BlockBatch:
    """Blocks at random anchors among those with a draft to learn: the token at x + 2 belongs to the
    same text, and the target wrote it.

    Args:
      texts: `[B, T]`.
      num_blocks: N; a row with fewer anchors uses all of them.
      rngs: one generator per row.
    """
    segments, is_output = np.asarray(texts.segments), np.asarray(texts.is_output)
    anchors = np.zeros((len(segments), num_blocks), np.int32)
    is_block = np.zeros(anchors.shape, bool)
    has_draft = is_output[:, 2:] & (segments[:, 2:] == segments[:, :-2])
    for row, rng in enumerate(rngs):
        possible = np.flatnonzero(has_draft[row])
        drawn = rng.choice(possible, min(num_blocks, len(possible)), replace=False)
        anchors[row, : len(drawn)] = np.sort(drawn)
        is_block[row, : len(drawn)] = True
    return BlockBatch(texts=texts, anchors=jnp.asarray(anchors), is_block=jnp.asarray(is_block))


def slot_weights(block_size: int) -> np.ndarray:
    """Weight `[K]` of each slot's loss, fp32: exp(-(j - 1) / gamma) for slot j, and 1 for slot 0.
    Gamma is DFlash's (2602.06036, A.1) for blocks of 8, 10 and 16, and proportional for others."""
    gamma = np.interp(block_size, (0, 8, 10, 16), (0, 4, 5, 7))
    return np.exp(-np.maximum(np.arange(block_size) - 1, 0) / gamma).astype(np.float32)


def clean_keys_values(
    config: FlexConfig, target_params: Params, texts: TextBatch
) -> list[tuple[jax.Array, jax.Array]]:
    """Rotated keys and values, `[B, T, KV heads, H]` each, of the texts in every deep layer; a
    position is the place in the row."""
    target, first = config.target, config.first_deep_layer
    hidden = target_features(target, target_params, texts, first)
    places = jnp.arange(texts.tokens.shape[1], dtype=jnp.int32)
    angles = layers.rotary_angles(target.rope, jnp.broadcast_to(places, texts.tokens.shape))
    made = []
    for layer_index in range(first, target.num_layers):
        layer = target_params["layers"][layer_index]
        norm = {"norm": layer["attention_norm"], "epsilon": target.norm_epsilon}
        qkv = training_product(hidden, layer["qkv"], **norm)
        _, keys, values = attention_inputs(qkv, angles, **layers.attention_settings(target, layer))
        made.append((keys, values))
        hidden = decoder.training_layers(
            target, target_params, hidden, texts.segments, start=layer_index, stop=layer_index + 1
        )
    return made


def run_mask_rows(
    config: FlexConfig,
    params: Params,
    target_params: Params,
    clean: Sequence[tuple[jax.Array, jax.Array]],
    batch: BlockBatch,
) -> jax.Array:
    """Hidden states `[B, N, K, E]` of the blocks' mask rows after the last layer, not yet normed.

    Args:
      config: FlexDraft's.
      params: FlexDraft's, in the target's dtype.
      target_params: not packed.
      clean: keys and values of the texts, see `clean_keys_values`.
      batch: texts and anchors.
    """
    target, block = config.target, config.block_size
    num_rows, num_blocks = batch.anchors.shape
    slots = jnp.arange(block, dtype=jnp.int32)
    positions = batch.anchors[:, :, None] + (1 + slots)[None, None]  # [B, N, K]
    angles = layers.rotary_angles(target.rope, positions.reshape(num_rows, -1))
    hidden = jnp.broadcast_to(params["mask"], (num_rows, num_blocks * block, target.width))
    for index, own in enumerate(params["layers"]):
        layer_index = config.first_deep_layer + index
        layer = {**target_params["layers"][layer_index], **own}

        def attend(qkv, index=index, layer=layer, layer_index=layer_index):
            inputs = attention_inputs(qkv, angles, **layers.attention_settings(target, layer))
            sliding_window = target.sliding_window(layer_index)
            return _attend(*inputs, *clean[index], batch, block, sliding_window)

        hidden = layers.decoder_layer(target, layer, hidden, attend, training_product)
    return hidden.reshape(num_rows, num_blocks, block, target.width)


def score_blocks(
    config: FlexConfig, params: Params, target_params: Params, batch: BlockBatch
) -> BlockScores:
    """What mask rows predict for the batch's tokens; arguments as in `run_mask_rows`."""
    clean = clean_keys_values(config, target_params, batch.texts)
    clean = jax.lax.stop_gradient(clean)
    dtype = clean[0][0].dtype
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    hidden = run_mask_rows(config, params, target_params, clean, batch)
    tokens, is_label = _labels(batch, config.block_size)
    parts = target_parts(config.target, target_params)

    def score(blocks: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        hidden, tokens = blocks  # [B, n, K, E] and [B, n, K]
        normed = parts.final_norm(hidden)
        logits = parts.head(normed)
        bonus = decoder.embed(target_params, tokens[..., 0])
        added = calibration(params["calibrator"], bonus, normed[..., 1:, :], training_product)
        calibrated = _score(logits[..., 1:, :] + added, tokens[..., 1:])
        before = [(0, 0), (0, 0), (1, 0)]
        return *_score(logits, tokens), *(jnp.pad(x, before) for x in calibrated)

    num_rows, num_blocks, block = tokens.shape
    num_together = max(1, _MAX_LOGITS // (num_rows * block * config.target.vocab_size))
    num_chunks = next(
        n
        for n in range(1, num_blocks + 1)
        if num_blocks % n == 0 and num_blocks // n <= num_together
    )

    def chunks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(num_rows, num_chunks, -1, *x.shape[2:]), 1, 0)

    # Chunks of blocks, not single ones that are batched: the gradients of weights would then be
    # made for each block before they are added.
    scored = jax.lax.map(
        score if num_chunks == 1 else jax.checkpoint(score), (chunks(hidden), chunks(tokens))
    )
    scored = (jnp.moveaxis(x, 0, 1).reshape(tokens.shape) for x in scored)
    loss, is_right, calibrated_loss, is_right_calibrated = scored
    return BlockScores(loss, calibrated_loss, is_right, is_right_calibrated, is_label)


def _attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    clean_keys: jax.Array,
    clean_values: jax.Array,
    batch: BlockBatch,
    block: int,
    sliding_window: int | None,
) -> jax.Array:
    """Heads `[B, N K, Q, H]` of mask rows, which see clean tokens up to their anchor and the rows
    of their own block."""
    num_rows, num_blocks = batch.anchors.shape
    num_kv_heads, head_size = keys.shape[2:]
    by_block = (num_rows, num_blocks, block, num_kv_heads)
    grouped = queries.reshape(*by_block, -1, head_size)
    keys, values = (each.reshape(*by_block, head_size) for each in (keys, values))

    segments, slots = batch.texts.segments, jnp.arange(block, dtype=jnp.int32)
    places = jnp.arange(segments.shape[1], dtype=jnp.int32)
    own = jnp.take_along_axis(segments, batch.anchors, axis=1)
    sees_clean = (segments[:, None] == own[:, :, None]) & (
        places[None, None] <= batch.anchors[:, :, None]
    )
    sees_clean = jnp.broadcast_to(sees_clean[:, :, None], (*by_block[:3], segments.shape[1]))
    sees_own = jnp.ones((block, block), bool)
    if sliding_window is not None:
        positions = batch.anchors[:, :, None] + (1 + slots)[None, None]
        distance = positions[:, :, :, None] - places[None, None, None]
        sees_clean &= distance < sliding_window
        sees_own &= slots[:, None] - slots[None] < sliding_window

    dot = functools.partial(
        jnp.einsum, precision=precision_of(queries.dtype), preferred_element_type=jnp.float32
    )
    scores = jnp.concatenate(
        [
            jnp.where(
                sees_clean[:, :, :, None, None],
                dot("bnjkgh,btkh->bnjkgt", grouped, clean_keys),
                -jnp.inf,
            ),
            jnp.where(
                sees_own[None, None, :, None, None],
                dot("bnjkgh,bnikh->bnjkgi", grouped, keys),
                -jnp.inf,
            ),
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(scores * jnp.float32(head_size**-0.5)).astype(values.dtype)
    of_clean, of_own = jnp.split(weights, [segments.shape[1]], axis=-1)
    heads = dot("bnjkgt,btkh->bnjkgh", of_clean, clean_values)
    heads = heads + dot("bnjkgi,bnikh->bnjkgh", of_own, values)
    return heads.astype(queries.dtype).reshape(queries.shape)


def _labels(batch: BlockBatch, block: int) -> tuple[jax.Array, jax.Array]:
    """The tokens `[B, N, K]` at the blocks' positions, and which of them are labels."""
    texts = batch.texts
    row_length = texts.tokens.shape[1]
    places = batch.anchors[:, :, None] + jnp.arange(1, 1 + block, dtype=jnp.int32)[None, None]
    num_rows = len(places)
    inside = jnp.minimum(places, row_length - 1).reshape(num_rows, -1)

    def at_places(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, inside, axis=1).reshape(places.shape)

    own = jnp.take_along_axis(texts.segments, batch.anchors, axis=1)
    is_same = (places < row_length) & (at_places(texts.segments) == own[:, :, None])
    is_label = is_same & at_places(texts.is_output) & batch.is_block[:, :, None]
    return at_places(texts.tokens), is_label


def _score(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross entropy `[...]` of `tokens` `[...]` under `logits` `[..., V]`, and whether each is the
    likeliest."""
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - own, jnp.argmax(logits, axis=-1) == tokens
