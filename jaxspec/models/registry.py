"""Presets: the published pairs' architectures by name, with random weights.

Values as in `lmsys/vicuna-7b-v1.3`, `double7/vicuna-68m`, `meta-llama/Llama-2-70b-chat-hf`,
`Qwen/Qwen3-8B`, `Qwen/Qwen3-0.6B`, `zai-org/GLM-4-9B-0414` and `jukofyork/GLM-4.5-DRAFT-0.6B-v3.0`
(for the last the YaRN factor is inferred from its context length). `llama-635m` and `llama-65m` are
not published models: they are a pair of a size that a CPU decodes at some ten tokens per second,
with a draft model a tenth as large as the target.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import KvDtype
from jaxspec.errors import ModelError
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig, RopeConfig

PRESETS: dict[str, ModelConfig] = {
    "vicuna-7b": ModelConfig(
        family="llama",
        vocab_size=32000,
        width=4096,
        feed_forward_width=11008,
        num_layers=32,
        num_query_heads=32,
        num_kv_heads=32,
        head_size=128,
        max_length=2048,
        norm_epsilon=1e-6,
        rope=RopeConfig(theta=1e4, rotary_size=128),
    ),
    "vicuna-68m": ModelConfig(
        family="llama",
        vocab_size=32000,
        width=768,
        feed_forward_width=3072,
        num_layers=2,
        num_query_heads=12,
        num_kv_heads=12,
        head_size=64,
        max_length=2048,
        norm_epsilon=1e-6,
        rope=RopeConfig(theta=1e4, rotary_size=64),
    ),
    "llama-2-70b": ModelConfig(
        family="llama",
        vocab_size=32000,
        width=8192,
        feed_forward_width=28672,
        num_layers=80,
        num_query_heads=64,
        num_kv_heads=8,
        head_size=128,
        max_length=4096,
        norm_epsilon=1e-5,
        rope=RopeConfig(theta=1e4, rotary_size=128),
    ),
    "qwen3-8b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        width=4096,
        feed_forward_width=12288,
        num_layers=36,
        num_query_heads=32,
        num_kv_heads=8,
        head_size=128,
        max_length=40960,
        norm_epsilon=1e-6,
        rope=RopeConfig(theta=1e6, rotary_size=128),
        has_qk_norm=True,
    ),
    "qwen3-0.6b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        width=1024,
        feed_forward_width=3072,
        num_layers=28,
        num_query_heads=16,
        num_kv_heads=8,
        head_size=128,
        max_length=40960,
        norm_epsilon=1e-6,
        rope=RopeConfig(theta=1e6, rotary_size=128),
        has_qk_norm=True,
        is_tied=True,
    ),
    "glm-4-9b": ModelConfig(
        family="glm4",
        vocab_size=151552,
        width=4096,
        feed_forward_width=13696,
        num_layers=40,
        num_query_heads=32,
        num_kv_heads=2,
        head_size=128,
        max_length=32768,
        norm_epsilon=1e-5,
        rope=RopeConfig(theta=1e4, rotary_size=64, is_interleaved=True),
        has_qkv_bias=True,
        has_sandwich_norms=True,
    ),
    "glm-4-draft-0.6b": ModelConfig(
        family="qwen2",
        vocab_size=151552,
        width=896,
        feed_forward_width=4864,
        num_layers=24,
        num_query_heads=14,
        num_kv_heads=2,
        head_size=64,
        max_length=131072,
        norm_epsilon=1e-6,
        rope=RopeConfig(
            theta=1e6, rotary_size=64, scaling="yarn", factor=4.0, original_max_length=32768
        ),
        has_qkv_bias=True,
    ),
    "llama-635m": ModelConfig(
        family="llama",
        vocab_size=4000,
        width=1536,
        feed_forward_width=4096,
        num_layers=24,
        num_query_heads=16,
        num_kv_heads=8,
        head_size=96,
        max_length=2048,
        norm_epsilon=1e-5,
        rope=RopeConfig(theta=1e4, rotary_size=96),
    ),
    "llama-65m": ModelConfig(
        family="llama",
        vocab_size=4000,
        width=768,
        feed_forward_width=2048,
        num_layers=9,
        num_query_heads=8,
        num_kv_heads=4,
        head_size=96,
        max_length=2048,
        norm_epsilon=1e-5,
        rope=RopeConfig(theta=1e4, rotary_size=96),
    ),
}


def random_model(
    preset: str | ModelConfig,
    *,
    dtype=jnp.bfloat16,
    seed: int = 0,
    sharding=None,
    kernels: KernelsName | None = None,
    kv_dtype: KvDtype | None = None,
) -> LanguageModel:
    """A model of a preset's (or any) architecture with random weights, built on the device.

    Args:
      preset: a key of `PRESETS`, or a `ModelConfig`.
      dtype: that of parameters and compute; KV is read in it too.
      seed: seed of the weights.
      sharding: a `jax.sharding.Sharding` (or a pytree of them) for the parameters.
      kernels: see `LanguageModel`; None is `default_kernels()`.
      kv_dtype: see `LanguageModel`.

    Raises:
      ModelError: unknown preset.
    """
    if isinstance(preset, ModelConfig):
        name, config = f"random:{preset.family}", preset
    elif preset in PRESETS:
        name, config = f"random:{preset}", PRESETS[preset]
    else:
        raise ModelError(f"There is no preset {preset!r}; choose one of {', '.join(PRESETS)}.")
    kernels = kernels or default_kernels()
    params = decoder.init_params(config, jax.random.key(seed), dtype, sharding=sharding)
    return LanguageModel(
        name=name, config=config, params=params, kernels=kernels, kv_dtype=kv_dtype
    )
