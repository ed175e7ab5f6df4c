"""The augmenting block of Clover and Clover-2: layers of the target's shape after its last one."""

from __future__ import annotations

import jax

from jaxspec.cache import pages as kv
from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.drafters.heads.formulas import Params
from jaxspec.kernels.base import XLA, Kernels
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.types import Window


def run_block(
    config: HeadsConfig,
    params: Params,
    hidden: jax.Array,
    window: Window,
    cache: kv.KVCache,
    *,
    kernels: Kernels = XLA,
) -> tuple[jax.Array, kv.KVCache]:
    """Hidden states `[B, T, E]` after the block, and its cache with the window's KV: the block as
    it drafts. `params` are the heads', with `layers` as the kernels read them."""
    return decoder.run_layers(
        _block(config),
        params,
        hidden,
        window,
        cache,
        kernels=kernels,
        has_feed_forward=config.block_part == "whole",
    )


def run_training_block(
    config: HeadsConfig, params: Params, hidden: jax.Array, segments: jax.Array
) -> jax.Array:
    """Hidden states `[B, T, E]` of packed sequences after the block: causal within segments
    `[B, T]`, nothing cached."""
    return decoder.training_layers(
        _block(config),
        params,
        hidden,
        segments,
        has_feed_forward=config.block_part == "whole",
    )


def _block(config: HeadsConfig) -> ModelConfig:
    assert config.block is not None, "callers run a block only where there is one"
    return config.block
