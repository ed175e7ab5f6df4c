"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from jaxspec.models.config import ModelConfig

from . import hf_config
from .hf_config import HFConfig
from .mapping import Family, llama_like_leaves


def read_config(config: HFConfig) -> ModelConfig:
    """No `sliding_window` means 4096, as in HF's class; null means none (Mistral 7B v0.2 on)."""
    if config.texts("layer_types"):
        raise config.refuse("layer_types", "one sliding_window for all layers of a Mistral model")
    if config.flag("attention_bias", False):
        raise config.refuse("attention_bias", "false for Mistral")
    window = hf_config.sliding_window(config)
    return hf_config.llama_like(
        config,
        "mistral",
        sliding_windows=() if window is None else (window,) * config.num_layers,
    )


FAMILY = Family("mistral", ("MistralForCausalLM",), read_config, llama_like_leaves)
