"""The one decoder, in parts: embed, a range of layers, head.

Parameters are a plain pytree, `{"embedding", "layers": (per layer), "final_norm", "head"}`; a tied
model has no head `[E, V]`, and its embedding may be a `TiedEmbedding`. Layers are unrolled, with
separate parameters and caches: a scan over stacked ones would copy the cache and slice every weight
in each round.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.kernels.base import (
    XLA,
    Kernels,
    TiedEmbedding,
    attention_inputs,
    columns,
    read_only_there,
    unpacked,
)
from jaxspec.kernels.training import TRAINING, training_product
from jaxspec.kernels.xla import causal_attention
from jaxspec.models import layers
from jaxspec.models.config import ModelConfig
from jaxspec.types import Window

Params = Mapping[str, Any]

# The weights of products, and the number of their input axes.
_PRODUCTS = {"qkv": 1, "output": 3, "gate_up": 1, "down": 1}


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """The parameter pytree with a shape tuple at each leaf."""
    c = config
    layer = {
        "attention_norm": (c.width,),
        "qkv": (c.width, c.num_kv_heads, c.group + 2, c.head_size),
        "output": (c.num_kv_heads, c.group, c.head_size, c.width),
        "feed_forward_norm": (c.width,),
        "gate_up": (c.width, 2, c.feed_forward_width),
        "down": (c.feed_forward_width, c.width),
    }
    if c.has_qkv_bias:
        layer["qkv_bias"] = (c.num_kv_heads, c.group + 2, c.head_size)
    if c.has_output_bias:
        layer["output_bias"] = (c.width,)
    if c.has_qk_norm:
        layer |= {"q_norm": (c.head_size,), "k_norm": (c.head_size,)}
    if c.has_sandwich_norms:
        layer |= {"post_attention_norm": (c.width,), "post_feed_forward_norm": (c.width,)}
    shapes = {
        "embedding": (c.num_rows, c.width),
        "layers": tuple(dict(layer) for _ in range(c.num_layers)),
        "final_norm": (c.width,),
    }
    if not c.is_tied:
        shapes["head"] = (c.width, c.num_rows)
    return shapes


def param_specs(config: ModelConfig, num_shards: int) -> dict[str, Any]:
    """The parameter pytree with each leaf's `PartitionSpec` over a mesh axis `model`.

    Attention is split by KV head, the feed-forward by its hidden units, embedding and head by the
    vocabulary, so that partial results meet only after attention, feed-forward, embedding and head
    (Megatron-LM, 1909.08053). A tied model has a spec for the head that its `TiedEmbedding` may be
    stored as.

    Raises:
      SettingError: `num_shards` does not divide one of these.
    """
    for size, what in (
        (config.num_kv_heads, "KV heads"),
        (config.feed_forward_width, "hidden units of a feed-forward"),
        (config.num_rows, "tokens in the vocabulary"),
    ):
        if size % num_shards:
            raise SettingError(
                f"A mesh whose model axis has {num_shards} devices was given for a model with "
                f"{size} {what}; that number must be a multiple of the devices, so give the model "
                f"axis a divisor of it."
            )
    specs = jax.tree.map(lambda _: P(), param_shapes(config), is_leaf=is_shape)
    split = {
        "qkv": P(None, "model"),
        "qkv_bias": P("model"),
        "output": P("model"),
        "gate_up": P(None, None, "model"),
        "down": P("model"),
    }
    layers = tuple(
        {name: split.get(name, spec) for name, spec in layer.items()} for layer in specs["layers"]
    )
    return {
        **specs,
        "layers": layers,
        "embedding": P("model"),
        "head": P(None, "model"),
    }


def num_params(config: ModelConfig) -> int:
    """Number of parameters; a tied head is counted once."""
    shapes = jax.tree.leaves(param_shapes(config), is_leaf=is_shape)
    return sum(math.prod(shape) for shape in shapes)


def is_shape(node: Any) -> bool:
    """Whether a node of `param_shapes` is a leaf."""
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def init_params(
    config: ModelConfig, key: jax.Array, dtype, *, stddev: float = 0.02, sharding: Any = None
) -> Params:
    """Random parameters: norms 1, biases 0, matrices normal with `stddev` (with GPT-2's residual
    scaling of the two products that enter the residual stream).

    Drawing one layer is compiled once for all layers, and the draws are made on the devices they
    belong to.

    Args:
      sharding: a `jax.sharding.Sharding` for every parameter, or a pytree of them like the
        parameters.
    """
    shapes = param_shapes(config)
    outer = {name: shape for name, shape in shapes.items() if name != "layers"}

    of_layer = of_outer = sharding
    if isinstance(sharding, Mapping):
        of_layer, of_outer = sharding["layers"][0], {name: sharding[name] for name in outer}

    @functools.partial(jax.jit, out_shardings=of_layer)
    def make_layer(key):
        return _init_leaves(config, shapes["layers"][0], key, dtype, stddev)

    @functools.partial(jax.jit, out_shardings=of_outer)
    def make_outer(key):
        return _init_leaves(config, outer, key, dtype, stddev)

    keys = [jax.random.fold_in(key, index) for index in range(config.num_layers + 1)]
    return {**make_outer(keys[-1]), "layers": tuple(make_layer(key) for key in keys[:-1])}


def _init_leaves(config: ModelConfig, shapes, key: jax.Array, dtype, stddev: float) -> Params:
    def init(index: int, name: str) -> jax.Array:
        shape = shapes[name]
        if name.endswith("norm"):
            return jnp.ones(shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape, dtype)
        scale = stddev / math.sqrt(2 * config.num_layers) if name in ("output", "down") else stddev
        noise = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
        return (noise * jnp.float32(scale)).astype(dtype)

    return {name: init(index, name) for index, name in enumerate(shapes)}


def without_tied_head(config: ModelConfig, params: Params, *, name: str) -> Params:
    """Parameters without the head, if the config says that it is tied to the embedding.

    Args:
      config: architecture.
      params: in any form.
      name: the model's, for messages.

    Raises:
      SettingError: the head is not the transposed embedding. (Shapes without values are not
        compared.)
    """
    if not config.is_tied or "head" not in params:
        return params
    parts = unpacked({part: params[part] for part in ("embedding", "head") if part in params})
    has_values = not any(isinstance(leaf, Tracer) for leaf in parts.values())
    if has_values and "embedding" in parts and not is_transposed(**parts):
        raise SettingError(
            f"The config of {name} says that its head is tied to its embedding, and params['head'] "
            "is not the transposed params['embedding']; leave the head out, or make the model with "
            "is_tied=False in its config."
        )
    return {part: leaf for part, leaf in params.items() if part != "head"}


def is_transposed(embedding: Any, head: Any) -> bool:
    """Whether a head `[E, V]` is an embedding `[V, E]`, transposed."""
    embedding, head = np.asarray(embedding), np.asarray(head)
    return head.shape == embedding.T.shape and bool((head == embedding.T).all())


def pack_params(params: Params, kernels: Kernels, *, consume: bool = False) -> Params:
    """Parameters with the weights of products in the form that these kernels read fastest; see
    `Kernels.pack`.

    XLA:CPU is three times slower at products of a few rows with a transposed matrix, so on a CPU an
    embedding without a head becomes a `TiedEmbedding`: the head, from which embeddings are read.

    Args:
      consume: whether to free each weight as soon as it has been packed, so that there are never
        two copies of everything; the given parameters cannot be used afterwards.
    """

    def pack(weight: Any, num_input_axes: int) -> Any:
        packed = kernels.pack(weight, num_input_axes)
        if packed is not weight:
            free(weight, after=packed)
        return packed

    def free(weight: Any, *, after: Any) -> None:
        if consume and not isinstance(weight, Tracer):
            jax.block_until_ready(after)
            jax.tree.map(lambda leaf: leaf.delete(), weight)

    def pack_layer(layer: layers.LayerParams) -> layers.LayerParams:
        return {
            name: pack(leaf, _PRODUCTS[name]) if name in _PRODUCTS else leaf
            for name, leaf in layer.items()
        }

    made = dict(params)
    if "layers" in params:
        made["layers"] = tuple(map(pack_layer, params["layers"]))
    embedding = params.get("embedding")
    if "head" in params:
        made["head"] = pack(params["head"], 1)
    elif isinstance(embedding, TiedEmbedding):
        made["embedding"] = TiedEmbedding(head=pack(embedding.head, 1))
    elif embedding is not None and kernels.platform == "cpu":
        head = embedding.T
        free(embedding, after=head)
        made["embedding"] = TiedEmbedding(head=pack(head, 1))
    return made


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Hidden states `[B, T, E]` of `tokens` `[B, T]`; ids outside the vocabulary are clipped into
    it.
    """
    embedding = params["embedding"]
    if isinstance(embedding, TiedEmbedding):
        return embedding.rows(tokens)
    embedding, tokens = read_only_there(embedding, tokens)
    return jnp.take(embedding, tokens, axis=0, mode="clip")


def rows_of(config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """The embedding's row of each token, which is its id unless there is a draft vocabulary."""
    if not config.draft_vocabulary:
        return tokens
    return jnp.take(jnp.asarray(config.rows_of_tokens()), tokens, mode="clip")


def run_layers(
    config: ModelConfig,
    params: Params,
    hidden: jax.Array,
    window: Window,
    cache: kv.KVCache,
    *,
    start: int = 0,
    stop: int | None = None,
    kernels: Kernels = XLA,
    has_feed_forward: bool = True,
) -> tuple[jax.Array, kv.KVCache]:
    """Hidden states `[B, T, E]` after layers `start` to `stop`, their KV written to the cache.

    The window's KV is written before it is attended to, at each row's own offset. If the
    feed-forward is left out, only the layers' attention is computed.
    """
    stop = config.num_layers if stop is None else stop
    angles = layers.rotary_angles(config.rope, window.positions)
    product = kernels.product_for(window.num_live)
    for index in range(start, stop):
        layer = params["layers"][index]
        hidden, cache = _run_attention(
            config, layer, index, hidden, window, angles, cache, kernels=kernels
        )
        if has_feed_forward:
            hidden = layers.feed_forward(config, layer, hidden, product)
    return hidden, cache


def _run_attention(
    config: ModelConfig,
    layer: layers.LayerParams,
    index: int,
    hidden: jax.Array,
    window: Window,
    angles: tuple[jax.Array, jax.Array],
    cache: kv.KVCache,
    *,
    kernels: Kernels,
) -> tuple[jax.Array, kv.KVCache]:
    """Hidden states `[B, T, E]` after the attention of layer `index`, with the parameters `layer`;
    the window's KV is written to that layer's cache."""
    chex.assert_shape(window.positions, hidden.shape[:2])
    written = list(cache.layers)

    def attend(qkv):
        heads, written[index] = kernels.attend(
            qkv,
            written[index],
            cache.table if window.rows is None else cache.table[window.rows],
            window,
            angles,
            dtype=cache.dtype,
            **cache.span(config.sliding_window(index)),
            **layers.attention_settings(config, layer),
        )
        return heads

    hidden = layers.attention(config, layer, hidden, attend, kernels.product_for(window.num_live))
    return hidden, cache.replace(layers=tuple(written))


def run_dual_layers(
    config: ModelConfig,
    params: Params,
    projectors: Sequence[layers.LayerParams],
    hidden: jax.Array,
    mask_hidden: jax.Array,
    window: Window,
    mask_window: Window,
    cache: kv.KVCache,
    *,
    start: int,
    kernels: Kernels = XLA,
) -> tuple[jax.Array, jax.Array, kv.KVCache]:
    """`run_layers` from layer `start` to the last, with mask rows beside the window's own rows.

    Mask rows have their own attention projectors, and share everything else with the target. In
    each layer the window's own attention comes first, as if they were not there: it never sees a
    mask row, whatever `mask_window` says. The feed-forward takes both kinds of rows in one product.

    Args:
      projectors: for layers `start` on, the parameters that replace the target's.
      hidden: `[B, T, E]`, before layer `start`.
      mask_hidden: `[B, M, E]`, likewise.
      window: that of the T rows.
      mask_window: that of the M mask rows; their KV has its own slots.

    Returns:
      hidden states `[B, T, E]` and `[B, M, E]` after the last layer, and the cache with the KV of
      both.
    """
    num_own = hidden.shape[1]
    own_angles = layers.rotary_angles(config.rope, window.positions)
    mask_angles = layers.rotary_angles(config.rope, mask_window.positions)
    product = kernels.product
    if mask_window.num_live is not None:  # mask rows come last: before them everything is computed
        num_live = mask_window.num_live
        num_live = jnp.where(num_live > 0, num_own + num_live, 0)
        product = kernels.product_for(num_live)
    for index in range(start, config.num_layers):
        layer = params["layers"][index]
        hidden, cache = _run_attention(
            config, layer, index, hidden, window, own_angles, cache, kernels=kernels
        )
        # Mask rows must write their KV after the window's rows have read the layer's: if one does
        # not depend on the other, XLA copies the layer's cache. (A barrier does not help, because
        # XLA removes it before it decides about copies.)
        is_finite = jnp.isfinite(hidden[:, :1, :1])
        mask_hidden = jnp.where(is_finite, mask_hidden, jnp.zeros((), mask_hidden.dtype))
        mask_layer = {**layer, **projectors[index - start]}
        mask_hidden, cache = _run_attention(
            config, mask_layer, index, mask_hidden, mask_window, mask_angles, cache, kernels=kernels
        )
        both = jnp.concatenate([hidden, mask_hidden], axis=1)
        both = layers.feed_forward(config, layer, both, product)
        hidden, mask_hidden = both[:, :num_own], both[:, num_own:]
    return hidden, mask_hidden, cache


def head(
    config: ModelConfig,
    params: Params,
    hidden: jax.Array,
    *,
    is_normed: bool = False,
    window: Window | None = None,
    kernels: Kernels = XLA,
    drafts_only: bool = False,
) -> jax.Array:
    """Logits `[..., V]` fp32 of hidden states `[..., E]` after the last layer, which are normed
    first unless they already are. Tokens outside of a draft vocabulary have -inf; with
    `drafts_only` they are left out, which leaves logits `[..., N]` of `config.draft_vocabulary`.
    The padding of a `window` may be left out."""
    product = kernels.product_for(None if window is None else window.num_live)
    logits = product(
        hidden,
        head_weight(params),
        norm=None if is_normed else params["final_norm"],
        epsilon=config.norm_epsilon,
        dtype=jnp.float32,
    )
    if not config.draft_vocabulary:
        return logits
    if drafts_only:
        return logits[..., :-1]
    logits = logits.at[..., -1].set(-jnp.inf)
    return jnp.take(logits, jnp.asarray(config.rows_of_tokens()), axis=-1)


def head_weight(params: Params) -> Any:
    """The head `[E, V]`, an array or a `PackedWeight`; if it is tied, the transposed embedding."""
    if "head" in params:
        return params["head"]
    embedding = params["embedding"]
    return embedding.head if isinstance(embedding, TiedEmbedding) else embedding.T


def head_rows(params: Params, tokens: jax.Array) -> jax.Array:
    """The head's weights `[..., E]` for each of `tokens` `[...]`; for a tied head, those of the
    embedding. Ids outside the vocabulary are clipped into it."""
    return columns(params["head"], tokens) if "head" in params else embed(params, tokens)


def forward(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    window: Window,
    cache: kv.KVCache,
    *,
    kernels: Kernels = XLA,
) -> tuple[jax.Array, kv.KVCache]:
    """Last layer's hidden states `[B, T, E]` of `tokens` `[B, T]`, and the cache with their KV."""
    hidden = embed(params, rows_of(config, tokens))
    return run_layers(config, params, hidden, window, cache, kernels=kernels)


def forward_features(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    window: Window,
    cache: kv.KVCache,
    taps: Sequence[int],
    *,
    kernels: Kernels = XLA,
) -> tuple[jax.Array, jax.Array, kv.KVCache]:
    """`forward`, with the residual stream `[B, T, n, E]` after each of `taps` layers as the second
    result: 0 is the embeddings, `num_layers` what `forward` returns."""
    hidden = embed(params, rows_of(config, tokens))
    streams, done = {0: hidden}, 0
    for stop in sorted({*taps, config.num_layers}):
        hidden, cache = run_layers(
            config, params, hidden, window, cache, start=done, stop=stop, kernels=kernels
        )
        streams[stop], done = hidden, stop
    return hidden, jnp.stack([streams[tap] for tap in taps], axis=2), cache


def training_logits(
    config: ModelConfig, params: Params, tokens: jax.Array, segments: jax.Array
) -> jax.Array:
    """Logits `[B, T, V]` fp32 of packed sequences: causal within segments `[B, T]`, nothing cached.

    Packed weights are unpacked, because only XLA's products can be differentiated.
    """
    params = unpacked(params)
    hidden = embed(params, rows_of(config, tokens))
    hidden = training_layers(config, params, hidden, segments)
    return head(config, params, hidden, kernels=TRAINING)


def training_features(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    segments: jax.Array,
    taps: Sequence[int],
) -> jax.Array:
    """Residual stream `[B, T, n, E]` of packed sequences after each of `taps` layers, as in
    `forward_features`, but computed as in `training_logits`."""
    params = unpacked(params)
    hidden = embed(params, rows_of(config, tokens))
    streams, done = {0: hidden}, 0
    for stop in sorted({*taps}):
        hidden = training_layers(config, params, hidden, segments, start=done, stop=stop)
        streams[stop], done = hidden, stop
    return jnp.stack([streams[tap] for tap in taps], axis=2)


def training_layers(
    config: ModelConfig,
    params: Params,
    hidden: jax.Array,
    segments: jax.Array,
    *,
    start: int = 0,
    stop: int | None = None,
    has_feed_forward: bool = True,
) -> jax.Array:
    """Hidden states `[B, T, E]` after layers `start` to `stop`, causal within segments `[B, T]`:
    `run_layers` without a cache, for parameters that are not packed.

    Rotary angles depend on differences of positions only, so a segment need not start at position
    0.
    """
    stop = config.num_layers if stop is None else stop
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    angles = layers.rotary_angles(config.rope, index)
    for layer_index in range(start, stop):
        layer = params["layers"][layer_index]

        def attend(qkv, layer=layer, layer_index=layer_index):
            inputs = attention_inputs(qkv, angles, **layers.attention_settings(config, layer))
            sliding_window = config.sliding_window(layer_index)
            return causal_attention(*inputs, segments, sliding_window=sliding_window)

        hidden = layers.decoder_layer(
            config, layer, hidden, attend, training_product, has_feed_forward=has_feed_forward
        )
    return hidden
