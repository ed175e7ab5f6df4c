"""Medusa's heads as vLLM stores them, `config.json` and safetensors.

    blocks.{k}.layers.{j}.weight    residual block j of head k; .bias only with medusa_fc_bias
    lm_heads.{k}.weight             the head's own lm_head; with original_lm_head only lm_heads.0,
                                    which serves all heads
    token_map                       with truncated_vocab_size below vocab_size: the tokens that the
                                    heads have logits of; lm_heads may still have a row for each
                                    token of the vocabulary

Names may begin with `medusa_heads.`. Heads are counted from the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxspec.checkpoint.format import LeafPath
from jaxspec.convert.hf_config import HFConfig
from jaxspec.convert.mapping import Leaf
from jaxspec.drafters.heads.config import HeadsConfig

from .medusa import block_leaves, count_blocks
from .tables import Layout, TargetSizes, Tensors, as_it_is, matrix_sizes, product

_PREFIX = "medusa_heads."
_BLOCK = re.compile(r"blocks\.(\d{1,9})\.layers\.(\d{1,9})\.weight", re.ASCII)
_MAP = "token_map"


def _is_vllm(config: HFConfig, names: Iterable[str]) -> bool:
    return any(_BLOCK.fullmatch(name.removeprefix(_PREFIX)) for name in names)


def _selected(tensors: Tensors) -> Tensors:
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _read_config(tensors: Tensors, hf: HFConfig, target: TargetSizes) -> HeadsConfig:
    if hf.get("logit_scale") is not None and hf.number("logit_scale", least=0, most=1e6) != 1:
        raise hf.refuse("logit_scale", "1")
    num_heads, num_layers = count_blocks(_BLOCK, tensors)
    width, _ = matrix_sizes(tensors, "blocks.0.layers.0.weight", hf.path)
    num_rows, _ = matrix_sizes(tensors, "lm_heads.0.weight", hf.path)
    vocab_size = hf.count("vocab_size", num_rows)
    num_head_tokens = hf.count("truncated_vocab_size", vocab_size)
    return HeadsConfig(
        kind="medusa",
        width=width,
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        norm_epsilon=target.norm_epsilon,
        shares_head=False,
        num_head_tokens=None if num_head_tokens == vocab_size else num_head_tokens,
    )


def _leaves(config: HeadsConfig, tensors: Tensors, hf: HFConfig) -> list[Leaf]:
    has_one_head = hf.flag("original_lm_head", False)
    has_bias = hf.flag("medusa_fc_bias", False)
    leaves = block_leaves(config, "blocks.{}.layers.{}", has_bias=has_bias)
    for k in range(config.num_heads):
        name = f"lm_heads.{0 if has_one_head else k}.weight"
        leaves.append(_head(config, tensors, ("heads", k, "head"), name))
    if config.num_head_tokens is not None:
        leaves.append(as_it_is((_MAP,), _MAP, config.num_head_tokens))
    return leaves


def _head(config: HeadsConfig, tensors: Tensors, path: LeafPath, name: str) -> Leaf:
    """A head, whose rows are those of the tokens that it has logits of, or of all tokens."""
    num_tokens = config.num_head_tokens or config.vocab_size
    num_rows = tensors[name].shape[0] if name in tensors else num_tokens
    if num_rows == num_tokens or num_rows != config.vocab_size:
        return product(path, name, config.width, num_tokens)
    sources = {name: (num_rows, config.width), _MAP: (num_tokens,)}
    return Leaf(path, sources, lambda weight, tokens: [(..., weight[tokens].T)])


VLLM = Layout("vLLM", _is_vllm, _selected, _read_config, _leaves)
