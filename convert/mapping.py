"""Tables from Hugging Face's tensors to our parameters.

HF weights are `[out, in]`. Ours are `[in, out...]`, with a layer's q, k and v in one array and gate
and up in another (see `jaxspec.models.decoder.param_shapes`). A family's table is a list of `Leaf`:
which HF tensors a parameter is made of, and where each goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.checkpoint.format import LeafPath
from jaxspec.models.config import ModelConfig

from .hf_config import HFConfig


@dataclasses.dataclass(frozen=True)
class Source:
    """Name and expected shape of an HF tensor."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our parameters.

    Attributes:
      path: in the pytree of parameters.
      sources: the tensors it is made of.
      pieces: a function of those tensors that returns pairs (index into the parameter, view of a
        tensor), which are copied into place. None if the parameter is the single tensor as it is.
    """

    path: LeafPath
    sources: tuple[Source, ...]
    pieces: Callable[..., Sequence[tuple[Any, np.ndarray]]] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: how to read its configuration and its tensors.

    Attributes:
      name: `ModelConfig.family`, HF's `model_type`.
      architectures: HF class names it covers.
      read_config: converts an HF configuration to ours.
      leaves: the tensor table for a configuration.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[HFConfig], ModelConfig]
    leaves: Callable[[ModelConfig], list[Leaf]]


def outer_leaves(config: ModelConfig) -> list[Leaf]:
    """Embedding, final norm and head, which have the same names in every family."""
    table = (config.vocab_size, config.width)
    leaves = [
        Leaf(("embedding",), (Source("model.embed_tokens.weight", table),)),
        Leaf(("final_norm",), (Source("model.norm.weight", (config.width,)),)),
    ]
    if not config.is_tied:
        head = Leaf(("head",), (Source("lm_head.weight", table),), lambda w: [(np.s_[:], w.T)])
        leaves.append(head)
    return leaves


def attention_leaves(config: ModelConfig, layer: int) -> list[Leaf]:
    """Attention projections, with the configuration's biases and head norms."""
    heads, group = config.num_kv_heads, config.group
    size, width = config.head_size, config.width
    num_queries, num_keys = heads * group * size, heads * size

    def name(tensor: str) -> str:
        return f"model.layers.{layer}.self_attn.{tensor}"

    def projections(tail: str, *last: int) -> tuple[Source, ...]:
        sizes = {"q": num_queries, "k": num_keys, "v": num_keys}
        return tuple(Source(name(f"{x}_proj.{tail}"), (n, *last)) for x, n in sizes.items())

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

    path = ("layers", layer)
    leaves = [
        Leaf((*path, "qkv"), projections("weight", width), qkv),
        Leaf((*path, "output"), (Source(name("o_proj.weight"), (width, num_queries)),), output),
    ]
    if config.has_qkv_bias:
        leaves.append(Leaf((*path, "qkv_bias"), projections("bias"), qkv_bias))
    if config.has_output_bias:
        leaves.append(Leaf((*path, "output_bias"), (Source(name("o_proj.bias"), (width,)),)))
    if config.has_qk_norm:
        leaves += [
            Leaf((*path, ours), (Source(name(f"{ours}.weight"), (size,)),))
            for ours in ("q_norm", "k_norm")
        ]
    return leaves


def norm_leaves(config: ModelConfig, layer: int, names: dict[str, str]) -> list[Leaf]:
    """Norms of a layer; `names` maps our names to HF's."""
    return [
        Leaf(
            ("layers", layer, ours),
            (Source(f"model.layers.{layer}.{theirs}.weight", (config.width,)),),
        )
        for ours, theirs in names.items()
    ]


def down_leaf(config: ModelConfig, layer: int) -> Leaf:
    """The feed-forward's down projection."""
    shape = (config.width, config.feed_forward_width)
    source = Source(f"model.layers.{layer}.mlp.down_proj.weight", shape)
    return Leaf(("layers", layer, "down"), (source,), lambda down: [(..., down.T)])


def llama_like_leaves(config: ModelConfig) -> list[Leaf]:
    """The table of Llama and its relatives: two norms per layer, separate gate and up."""
    leaves = outer_leaves(config)
    for layer in range(config.num_layers):
        shape = (config.feed_forward_width, config.width)
        gate_and_up = tuple(
            Source(f"model.layers.{layer}.mlp.{name}.weight", shape)
            for name in ("gate_proj", "up_proj")
        )
        norms = {
            "attention_norm": "input_layernorm",
            "feed_forward_norm": "post_attention_layernorm",
        }
        leaves += norm_leaves(config, layer, norms)
        leaves += attention_leaves(config, layer)
        leaves.append(
            Leaf(
                ("layers", layer, "gate_up"),
                gate_and_up,
                lambda gate, up: [(np.s_[:, 0], gate.T), (np.s_[:, 1], up.T)],
            )
        )
        leaves.append(down_leaf(config, layer))
    return leaves
