"""Clover-2's heads as its release stores them, `config.json` and safetensors.

    clover_head_mlp_rnn             the attention decoder before the layers
    layers.{i}                      the augmenting block, layers of a Llama
    clover_norm                     after the block
    clover_head_mlp                 head 0
    clover_head_mlp_rnn2            the attention decoder between heads
    clover_head_mlp2                the other heads, all of them one
    clover_head_norm                of every head
    lm_head, clover_embed_tokens    the target's head, twice: compared, and not loaded

`config.json` is a Llama's, with an object `clover` that states the number of heads. The release
rotates with base 10,000 whatever the target does. Files of an earlier jaxspec may have layers of
another base or family, with `rope_theta` in that object, and with the names that their tensors have
in a model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from jaxspec.convert.conversion import find_family, read_model_config
from jaxspec.convert.hf_config import HFConfig
from jaxspec.convert.mapping import Leaf
from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.models.config import ModelConfig

from .tables import Layout, TargetSizes, Tensors, as_it_is, matrix_sizes, product

HEAD, EMBEDDING = "lm_head.weight", "clover_embed_tokens.weight"
ROPE_THETA = 10_000.0
_LAYER = re.compile(r"layers\.(\d{1,9})\.", re.ASCII)


def _is_clover2(config: HFConfig, names: Iterable[str]) -> bool:
    return config.get("clover") is not None


def _read_config(tensors: Tensors, hf: HFConfig, target: TargetSizes) -> HeadsConfig:
    clover = hf.section("clover")
    layers = {match[1] for match in map(_LAYER.match, tensors) if match}
    shape = HFConfig({**hf.fields, "num_hidden_layers": len(layers)}, hf.path)
    block = read_model_config(shape, find_family(shape))
    theta = clover.number("rope_theta", ROPE_THETA, least=2, most=1e15)
    width, _ = matrix_sizes(tensors, "clover_head_mlp.weight", hf.path)
    return HeadsConfig(
        kind="clover2",
        width=width,
        vocab_size=block.vocab_size,
        num_heads=clover.count("num_heads", most=1000),
        norm_epsilon=block.norm_epsilon,
        gate="cosine",
        num_gate_heads=block.num_query_heads,
        has_silu=False,
        block=dataclasses.replace(block, rope=dataclasses.replace(block.rope, theta=theta)),
    )


def _leaves(config: HeadsConfig, tensors: Tensors, hf: HFConfig) -> list[Leaf]:
    width = config.width
    leaves = _attention_decoder("first", "clover_head_mlp_rnn", width)
    leaves += _layers(_block(config), hf)
    leaves += [
        as_it_is(("norm",), "clover_norm.weight", width),
        product(("head", "weight"), "clover_head_mlp.weight", width, width),
        as_it_is(("head", "bias"), "clover_head_mlp.bias", width),
    ]
    leaves += _attention_decoder("connection", "clover_head_mlp_rnn2", width)
    leaves += [
        product(("next", "weight"), "clover_head_mlp2.weight", 2 * width, width),
        as_it_is(("next", "bias"), "clover_head_mlp2.bias", width),
        as_it_is(("head_norm",), "clover_head_norm.weight", width),
    ]
    return leaves


def _attention_decoder(ours: str, theirs: str, width: int) -> list[Leaf]:
    leaves = [as_it_is((ours, "norm"), f"{theirs}.input_layernorm.weight", width)]
    for name in ("query", "key", "value"):
        leaves.append(product((ours, name), f"{theirs}.{name[0]}.weight", width, width))
        leaves.append(as_it_is((ours, f"{name}_bias"), f"{theirs}.{name[0]}.bias", width))
    return leaves


def _layers(block: ModelConfig, hf: HFConfig) -> list[Leaf]:
    """The table of the family's layers, whose tensors have no `model.` before their names here."""
    return [
        Leaf(
            leaf.path,
            {name.removeprefix("model."): shape for name, shape in leaf.sources.items()},
            leaf.pieces,
        )
        for leaf in find_family(hf).leaves(block)
        if leaf.path[0] == "layers"
    ]


def _block(config: HeadsConfig) -> ModelConfig:
    assert config.block is not None, "Clover-2's heads always have one"
    return config.block


def _selected(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in (HEAD, EMBEDDING)}


CLOVER2 = Layout("Clover-2's release", _is_clover2, _selected, _read_config, _leaves)
