"""Qwen3: Llama with normed q and k and a head size of its own."""

from __future__ import annotations

from jaxspec.models.config import ModelConfig

from . import hf_config
from .hf_config import HFConfig
from .mapping import Family, llama_like_leaves


def read_config(config: HFConfig) -> ModelConfig:
    """`head_dim` must be stated: HF's default is 128, not width / heads."""
    config.count("head_dim")
    has_bias = config.flag("attention_bias", False)
    return hf_config.llama_like(
        config,
        "qwen3",
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        sliding_windows=hf_config.qwen_sliding_windows(config),
    )


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), read_config, llama_like_leaves)
