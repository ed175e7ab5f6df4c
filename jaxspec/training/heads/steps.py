"""Initial parameters of heads, their losses, and the training step."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspec.drafters.heads.config import HeadsConfig, param_shapes
from jaxspec.drafters.heads.formulas import Params, head_logits
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.training import runs
from jaxspec.training.runs import TrainState
from jaxspec.training.teacher_forcing import last_features, run_heads, target_parts
from jaxspec.training.text_rows import TextBatch, shifted
from jaxspec.types import PyTree

# Loss of a later head counts less: 0.8 in Medusa (2401.10774), 0.7 in Clover-2's release.
_DECAY: dict[str, float] = {"medusa": 0.8, "hydra": 0.8, "clover": 0.8, "clover2": 0.7}
_REGRESSION_WEIGHT = 10.0  # weight of Clover-2's SmoothL1, as in its release
_NOISE = 0.01  # added to matrices that start as the identity


def init_heads(
    config: HeadsConfig, target: ModelConfig, params: Params, key: jax.Array
) -> dict[str, Any]:
    """Initial parameters, fp32: heads that add nothing to what they read, and a block of copies of
    the target's last layer.

    Matrices that read or pass on hidden states start as the identity with noise (Clover, Clover-2's
    release), those that add something start as zeros, and own heads as copies of the target's
    (Medusa).

    Args:
      config: of the heads.
      target: their target's configuration.
      params: their target's, not packed.
      key: the key of the noise.
    """
    width = config.width
    keys = (jax.random.fold_in(key, index) for index in itertools.count())
    identity = jnp.eye(width, dtype=jnp.float32)

    def uniform(*shape: int) -> jax.Array:
        return jax.random.uniform(next(keys), shape, jnp.float32, -_NOISE, _NOISE)

    def normal(*shape: int) -> jax.Array:
        return _NOISE * jax.random.normal(next(keys), shape, jnp.float32)

    made: dict[str, Any] = jax.tree.map(
        lambda shape: jnp.zeros(shape, jnp.float32), param_shapes(config), is_leaf=decoder.is_shape
    )
    if config.block is not None:
        copied = jax.tree.map(_as_fp32, params["layers"][-1])
        made["layers"] = (copied,) * config.block.num_layers
    if config.kind == "clover2":
        norm = _as_fp32(params["final_norm"])
        for name in ("first", "connection"):
            made[name] |= {"norm": norm, "value": uniform(width, width)}
            made[name] |= {part: identity + uniform(width, width) for part in ("query", "key")}
        made |= {"norm": norm, "head_norm": norm}
        made["head"]["weight"] = identity + uniform(width, width)
        passed_on = jnp.concatenate([identity, jnp.zeros((width, width), jnp.float32)])
        made["next"]["weight"] = passed_on + uniform(2 * width, width)
    for connection in made.get("connections", ()):
        connection["norm"] = jnp.ones((width,), jnp.float32)
        if config.connection == "attention":
            # In this order: that of a set would differ from process to process, and the noise too.
            for part in ("query", "key"):
                connection[part] = identity + normal(width, width)
    if not config.shares_head:
        for own in made["heads"]:
            own["head"] = _as_fp32(decoder.head_weight(params))
    return made


def heads_loss(
    config: HeadsConfig,
    params: Params,
    target_config: ModelConfig,
    target_params: Params,
    batch: TextBatch,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a batch, and its metrics: `loss` and each head's `top1/k`, its accuracy on the
    labels.

    Medusa, Hydra and Clover: cross entropy of the true tokens, with weight 0.8^k for head k.
    Clover-2, as in its release: 0.7^k times the cross entropy against the target's distribution,
    plus ten times the SmoothL1 distance to the target's normed hidden states where it predicts the
    same token.

    Args:
      config: of the heads.
      params: the heads', fp32; the computation is in the target's dtype.
      target_config: their target's.
      target_params: not packed.
      batch: the texts.
    """
    target = target_parts(target_config, target_params)
    features = last_features(target_config, target_params, batch)
    params = jax.tree.map(lambda leaf: leaf.astype(features.dtype), params)
    regressed = distribution = None
    if config.kind == "clover2":
        regressed = target.final_norm(features)
        distribution = jax.nn.softmax(target.head(regressed))
    loss, metrics = jnp.zeros((), jnp.float32), {}
    for index, made in enumerate(run_heads(config, params, target, features, batch)):
        logits = head_logits(config, params, target, index, made.hidden)
        if regressed is None or distribution is None:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, made.labels)
        else:
            distance = index + 1  # the target's state there is that before the label
            losses = optax.softmax_cross_entropy(logits, shifted(distribution, distance))
            apart = made.hidden - shifted(regressed, distance)
            smooth = optax.huber_loss(apart.astype(jnp.float32), delta=1.0)
            losses = losses + jnp.float32(_REGRESSION_WEIGHT) * jnp.mean(smooth, axis=-1)
        weight = jnp.float32(_DECAY[config.kind] ** index)
        loss = loss + weight * runs.weighted_mean(losses, made.weights)
        is_right = (jnp.argmax(logits, axis=-1) == made.labels).astype(jnp.float32)
        metrics[f"top1/{index}"] = runs.weighted_mean(is_right, made.weights)
    return loss, {"loss": loss} | metrics


@functools.partial(
    jax.jit, donate_argnums=0, static_argnames=("config", "target_config", "optimizer")
)
def train_step(
    state: TrainState,
    target_params: PyTree,
    batch: TextBatch,
    *,
    config: HeadsConfig,
    target_config: ModelConfig,
    optimizer: optax.GradientTransformation,
    rate: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after one optimizer step, and the batch's metrics; the given state is donated.
    `rate` multiplies the updates of an optimizer without a schedule."""

    def loss_of(params):
        return heads_loss(config, params, target_config, target_params, batch)

    gradients, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    metrics["gradient_norm"] = optax.tree.norm(gradients)
    return runs.apply_gradients(state, gradients, optimizer, rate), metrics


def _as_fp32(leaf: jax.Array) -> jax.Array:
    return jnp.asarray(leaf, jnp.float32)
