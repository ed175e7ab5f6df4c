"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and windows on some layers."""

from __future__ import annotations

from jaxspec.models.config import ModelConfig

from . import hf_config
from .hf_config import HFConfig
from .mapping import Family, llama_like_leaves


def read_config(config: HFConfig) -> ModelConfig:
    """The bias is part of the architecture and not stated."""
    return hf_config.llama_like(
        config,
        "qwen2",
        has_qkv_bias=True,
        sliding_windows=hf_config.qwen_sliding_windows(config),
    )


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), read_config, llama_like_leaves)
