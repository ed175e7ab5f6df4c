"""Tables from Hugging Face's tensors to our parameters.

HF weights are `[out, in]`. Ours are `[in, out...]`, with a layer's q, k and v in one array and gate
and up in another (see `jaxspec.models.decoder.param_shapes`). A family's table is a list of `Leaf`:
which HF tensors a parameter is made from, and where each goes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxspec.checkpoint.format import LeafPath
from jaxspec.models.config import ModelConfig

from .hf_config import HFConfig

Shape: TypeAlias = tuple[int, ...]
Pieces: TypeAlias = Callable[..., Sequence[tuple[Any, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our parameters.

    Attributes:
      path: its path in the pytree of parameters.
      sources: the tensors that it is made from, by HF's name, with the expected shape of each.
      pieces: a function of those tensors that returns pairs (index into the parameter, view of a
        tensor), which are copied into place. None if the parameter is the single tensor as it is.
    """

    path: LeafPath
    sources: Mapping[str, Shape]
    pieces: Pieces | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: how to read its configuration and its tensors.

    Attributes:
      name: `ModelConfig.family`, HF's `model_type`.
      architectures: HF class names that it covers.
      read_config: converts an HF configuration to ours.
      leaves: the tensor table for a configuration.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[HFConfig], ModelConfig]
    leaves: Callable[[ModelConfig], list[Leaf]]


def outer_leaves(config: ModelConfig) -> list[Leaf]:
    """Embedding, final norm and head, which have the same names in every family."""
    table = (config.num_rows, config.width)
    leaves = [
        Leaf(("embedding",), {"model.embed_tokens.weight": table}),
        Leaf(("final_norm",), {"model.norm.weight": (config.width,)}),
    ]
    if not config.is_tied:
        leaves.append(Leaf(("head",), {"lm_head.weight": table}, lambda w: [(np.s_[:], w.T)]))
    return leaves


def layer_leaf(
    layer: int, name: str, sources: Mapping[str, Shape], pieces: Pieces | None = None
) -> Leaf:
    """A parameter of a layer; `sources` have their names in HF's layer."""
    full = {f"model.layers.{layer}.{tensor}": shape for tensor, shape in sources.items()}
    return Leaf(("layers", layer, name), full, pieces)


def attention_leaves(config: ModelConfig, layer: int) -> list[Leaf]:
    """Attention projections, with the configuration's biases and head norms."""
    heads, group = config.num_kv_heads, config.group
    size, width = config.head_size, config.width
    num_queries, num_keys = heads * group * size, heads * size

    def projections(tail: str, *last: int) -> dict[str, Shape]:
        sizes = {"q": num_queries, "k": num_keys, "v": num_keys}
        return {f"self_attn.{x}_proj.{tail}": (n, *last) for x, n in sizes.items()}

    def qkv(q, k, v):
        # query head k * G + g of HF is entry [k, g]; entries G and G + 1 are key and value
        return [
            (np.s_[:, :, :group], q.reshape(heads, group, size, width).transpose(3, 0, 1, 2)),
            (np.s_[:, :, group], k.reshape(heads, size, width).transpose(2, 0, 1)),
            (np.s_[:, :, group + 1], v.reshape(heads, size, width).transpose(2, 0, 1)),
        ]

    def qkv_bias(q, k, v):
        return [
            (np.s_[:, :group], q.reshape(heads, group, size)),
            (np.s_[:, group], k.reshape(heads, size)),
            (np.s_[:, group + 1], v.reshape(heads, size)),
        ]

    def output(o):
        return [(..., o.reshape(width, heads, group, size).transpose(1, 2, 3, 0))]

    leaf = functools.partial(layer_leaf, layer)
    leaves = [
        leaf("qkv", projections("weight", width), qkv),
        leaf("output", {"self_attn.o_proj.weight": (width, num_queries)}, output),
    ]
    if config.has_qkv_bias:
        leaves.append(leaf("qkv_bias", projections("bias"), qkv_bias))
    if config.has_output_bias:
        leaves.append(leaf("output_bias", {"self_attn.o_proj.bias": (width,)}))
    if config.has_qk_norm:
        leaves += [
            leaf(name, {f"self_attn.{name}.weight": (size,)}) for name in ("q_norm", "k_norm")
        ]
    return leaves


def norm_leaves(config: ModelConfig, layer: int, names: dict[str, str]) -> list[Leaf]:
    """Norms of a layer; `names` maps our names to HF's."""
    shape = (config.width,)
    return [layer_leaf(layer, ours, {f"{hf}.weight": shape}) for ours, hf in names.items()]


def down_leaf(config: ModelConfig, layer: int) -> Leaf:
    """The feed-forward's down projection."""
    source = {"mlp.down_proj.weight": (config.width, config.feed_forward_width)}
    return layer_leaf(layer, "down", source, lambda down: [(..., down.T)])


def llama_like_leaves(config: ModelConfig) -> list[Leaf]:
    """The table of Llama and its relatives: two norms per layer, separate gate and up."""
    shape = (config.feed_forward_width, config.width)
    norms = {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    }

    def gate_up(gate, up):
        return [(np.s_[:, 0], gate.T), (np.s_[:, 1], up.T)]

    leaves = outer_leaves(config)
    for layer in range(config.num_layers):
        sources = {"mlp.gate_proj.weight": shape, "mlp.up_proj.weight": shape}
        leaves += norm_leaves(config, layer, norms)
        leaves += attention_leaves(config, layer)
        leaves.append(layer_leaf(layer, "gate_up", sources, gate_up))
        leaves.append(down_leaf(config, layer))
    return leaves
