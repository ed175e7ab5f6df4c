"""Medusa's heads as its release stores them.

    {k}.{j}.linear.weight, .bias    residual block j of head k
    {k}.{num_layers}.weight         the head's own lm_head; absent where it shares the target's

In version 0.1, and in the copies of TGI (whose second version shares the target's head), they are a
file of their own, `medusa_lm_head.pt` or `.safetensors`. Medusa-1.0 and Medusa-2 store them among
the tensors of the target, with `medusa_head.` before each name. What `config.json` says of them is
not used: on the hub it says two heads where there are five.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from jaxspec.convert.hf_config import HFConfig
from jaxspec.convert.mapping import Leaf
from jaxspec.drafters.heads.config import HeadsConfig

from .tables import Layout, TargetSizes, Tensors, as_it_is, matrix_sizes, product, zero

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PREFIX = "medusa_head."  # in a merged model
_BLOCK = re.compile(r"(\d{1,9})\.(\d{1,9})\.linear\.weight", re.ASCII)
_HEAD = re.compile(r"\d{1,9}\.\d{1,9}\.weight", re.ASCII)


def _read_config(tensors: Tensors, hf: HFConfig, target: TargetSizes) -> HeadsConfig:
    num_heads, num_layers = count_blocks(_BLOCK, tensors)
    width, _ = matrix_sizes(tensors, "0.0.linear.weight", hf.path)
    has_own = any(map(_HEAD.fullmatch, tensors))
    vocab_size = target.vocab_size
    if has_own:
        vocab_size, _ = matrix_sizes(tensors, f"0.{num_layers}.weight", hf.path)
    return HeadsConfig(
        kind="medusa",
        width=width,
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        norm_epsilon=target.norm_epsilon,
        shares_head=not has_own,
    )


def _leaves(config: HeadsConfig, tensors: Tensors, hf: HFConfig) -> list[Leaf]:
    leaves = block_leaves(config, "{}.{}.linear")
    for k in range(0 if config.shares_head else config.num_heads):
        name = f"{k}.{config.num_layers}.weight"
        leaves.append(product(("heads", k, "head"), name, config.width, config.vocab_size))
    return leaves


def count_blocks(block: re.Pattern[str], names: Iterable[str]) -> tuple[int, int]:
    """Numbers of heads, and of each head's residual blocks, by the names of these."""
    numbers = [match.groups() for match in map(block.fullmatch, names) if match]
    num_heads, num_layers = map(len, map(set, zip(*numbers, strict=True)))
    return num_heads, num_layers


def block_leaves(config: HeadsConfig, name: str, *, has_bias: bool = True) -> list[Leaf]:
    """The residual blocks of all heads; `name` has places for the numbers of head and block."""
    width, leaves = config.width, []
    for k, j in itertools.product(range(config.num_heads), range(config.num_layers)):
        path, stored = ("heads", k, "blocks", j), name.format(k, j)
        bias = as_it_is((*path, "bias"), f"{stored}.bias", width)
        leaves.append(product((*path, "weight"), f"{stored}.weight", width, width))
        leaves.append(bias if has_bias else zero((*path, "bias")))
    return leaves


def _is_medusa(config: HFConfig, names: Iterable[str]) -> bool:
    return any(map(_BLOCK.fullmatch, names))


def _is_merged(config: HFConfig, names: Iterable[str]) -> bool:
    return any(_BLOCK.fullmatch(n.removeprefix(PREFIX)) for n in names if n.startswith(PREFIX))


def _of_merged(tensors: Tensors) -> Tensors:
    return {
        name.removeprefix(PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }


MEDUSA = Layout("Medusa's release", _is_medusa, dict, _read_config, _leaves)
MERGED = Layout("Medusa's merged models", _is_merged, _of_merged, _read_config, _leaves)
