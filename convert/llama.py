"""Llama 1, 2 and 3, Vicuna, and what shares their architecture."""

from __future__ import annotations

from jaxspec.models.config import ModelConfig

from . import hf_config
from .hf_config import HFConfig
from .mapping import Family, llama_like_leaves


def read_config(config: HFConfig) -> ModelConfig:
    """`attention_bias` gives q, k, v and o a bias."""
    hf_config.refuse_partial_rotary(config)
    has_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family="llama",
        **hf_config.shared_fields(config, norm_epsilon=1e-6),
        rope=hf_config.read_rope(config, rotary_size=config.head_size),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )


FAMILY = Family("llama", ("LlamaForCausalLM",), read_config, llama_like_leaves)
