"""FlexDraft with weights that were not trained, for toy targets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import toy
from heads import normal_params

from jaxspec import FlexDraft
from jaxspec.drafters.flexdraft.config import FlexConfig, param_shapes
from jaxspec.kernels.base import unpacked
from jaxspec.kernels.registry import default_kernels
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import RopeConfig

BLOCK = 4


def target(*, seed=0, kernels=None, **changes) -> LanguageModel:
    """A toy of three layers that often repeats its last token: its head is its embedding. Its heads
    fill the vectors of every processor the native kernels are written for."""
    rope = RopeConfig(theta=1e4, rotary_size=16)
    kernels = default_kernels() if kernels is None else kernels
    changes = {"num_layers": 3, "head_size": 16, "rope": rope} | changes
    model = toy.model(seed=seed, kernels=kernels, **changes)
    params = decoder.init_params(model.config, jax.random.key(seed), model.dtype, stddev=0.25)
    params = {**params, "head": 2 * params["embedding"].T}
    return LanguageModel(name=f"echo{seed}", config=model.config, params=params, kernels=kernels)


def config_of(model: LanguageModel, *, block_size=BLOCK, num_deep_layers=2, rank=None):
    rank = model.config.width if rank is None else rank
    return FlexConfig(
        target=model.config, num_deep_layers=num_deep_layers, block_size=block_size, rank=rank
    )


def random_params(config: FlexConfig, *, seed=0, dtype=jnp.float32, stddev=0.2):
    """Normal weights; norms are one and a bit."""
    return normal_params(param_shapes(config), seed=seed + 100, stddev=stddev, dtype=dtype)


def copied_params(config: FlexConfig, model: LanguageModel):
    """The target's projectors, and a calibrator that proposes to repeat the newest token."""
    params, size = unpacked(model.params), (config.rank, config.target.width)
    assert size[0] == size[1], "the calibrator passes the embedding on"
    layers = params["layers"][config.first_deep_layer :]
    named = param_shapes(config)["layers"][0]
    embedding = params["embedding"]
    return {
        "layers": tuple({name: layer[name] for name in named} for layer in layers),
        "mask": jnp.full((config.target.width,), 0.02, model.dtype),
        "calibrator": {
            "embedding": jnp.eye(config.rank, dtype=model.dtype),
            "hidden": jnp.zeros(size, model.dtype),
            "hidden_bias": jnp.zeros(size[:1], model.dtype),
            "logits": (8 * jax.nn.silu(embedding).T).astype(model.dtype),
            "logits_bias": jnp.zeros((config.target.vocab_size,), model.dtype),
        },
    }


def random_flex(
    model: LanguageModel, *, seed=0, block_size=BLOCK, num_deep_layers=2, **settings
) -> FlexDraft:
    """Random weights: their drafts are hardly ever right."""
    config = config_of(model, block_size=block_size, num_deep_layers=num_deep_layers)
    return FlexDraft(config, random_params(config, seed=seed, dtype=model.dtype), **settings)


def copied_flex(
    model: LanguageModel, *, block_size=BLOCK, num_deep_layers=2, **settings
) -> FlexDraft:
    """Copied projectors: their drafts are often right for `target`."""
    config = config_of(model, block_size=block_size, num_deep_layers=num_deep_layers)
    return FlexDraft(config, copied_params(config, model), **settings)
