"""Heads with random weights for toy targets."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import toy

from jaxspec import Heads
from jaxspec.drafters.heads.config import HeadsConfig, heads_config, param_shapes
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.types import Trace

KINDS = ("medusa", "hydra", "clover", "clover2")
FORMS = {  # what there is besides the four kinds as their papers have them
    "medusa of two blocks with heads of its own": (
        "medusa",
        {"num_layers": 2, "shares_head": False},
    ),
    "medusa with heads for some tokens": ("medusa", {"shares_head": False, "num_head_tokens": 40}),
    "medusa for some tokens": ("medusa", {"num_head_tokens": 40}),
    "clover for some tokens": ("clover", {"num_head_tokens": 40}),
    "hydra with heads of its own": ("hydra", {"shares_head": False}),
    "clover without a block": ("clover", {"block": None, "num_gate_heads": 4, "gate": "cosine"}),
    "clover with a block of attention": ("clover", {"block_part": "attention", "has_silu": False}),
    "clover with connections of its own": ("clover", {"shares_connection": False}),
    "clover with an MLP for a connection": ("clover", {"connection": "mlp"}),
    "clover with normed inputs": ("clover", {"has_normed_inputs": True, "connection": "mlp"}),
    "clover without a connection": ("clover", {"connection": "none"}),
}


def target(*, seed=0, **changes) -> LanguageModel:
    """A toy whose next token depends less on its context than that of `toy.model`, so that heads
    with random weights are sometimes right."""
    model = toy.model(seed=seed, **changes)
    params = decoder.init_params(model.config, jax.random.key(seed), model.dtype, stddev=0.2)
    noise = jax.random.normal(jax.random.key(seed + 1), params["final_norm"].shape, model.dtype)
    params = {**params, "final_norm": params["final_norm"] + noise / 4}
    return LanguageModel(
        name=f"calm{seed}", config=model.config, params=params, kernels=model.kernels
    )


def normal_params(shapes, *, seed, stddev, dtype):
    """Normal weights; norms are one and a bit."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=decoder.is_shape)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = []
    for key, (path, shape) in zip(keys, leaves, strict=True):
        weight = jax.random.normal(key, shape) * stddev + float(path[-1].key.endswith("norm"))
        made.append(weight.astype(dtype))
    return jax.tree.unflatten(structure, made)


def random_params(config: HeadsConfig, *, seed=0, stddev=0.05, dtype=jnp.float32):
    """Those of heads; a token map has random tokens."""
    params = normal_params(param_shapes(config), seed=seed, stddev=stddev, dtype=dtype)
    if config.num_head_tokens is not None:
        tokens = jax.random.permutation(jax.random.key(seed), config.vocab_size)
        params["token_map"] = tokens[: config.num_head_tokens].astype(jnp.int32)
    return params


def random_heads(
    kind, model: LanguageModel, *, tree=None, seed=0, stddev=0.05, num_heads=3, **fields
) -> Heads:
    """Three heads of a kind for a model of the package."""
    config = heads_config(kind, model.config, num_heads=num_heads, **fields)
    params = random_params(config, seed=seed, stddev=stddev, dtype=model.dtype)
    return Heads(config, params, tree=tree)


class Recorded(NamedTuple):
    """What tests read of a completion, of a row that is still running."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    trace: Trace
