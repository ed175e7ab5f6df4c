"""Llama 1, 2 and 3, Vicuna, and what shares their architecture."""

from __future__ import annotations

from jaxspec.models.config import ModelConfig

from . import hf_config
from .hf_config import HFConfig
from .mapping import Family, llama_like_leaves


def read_config(config: HFConfig) -> ModelConfig:
    """`attention_bias` gives q, k, v and o a bias."""
    has_bias = config.flag("attention_bias", False)
    return hf_config.llama_like(
        config,
        "llama",
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )


FAMILY = Family("llama", ("LlamaForCausalLM",), read_config, llama_like_leaves)
