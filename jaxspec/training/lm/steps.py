"""The training step, the losses that it minimises, and those that are measured."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.training import data
from jaxspec.training.runs import TrainState, apply_gradients, weighted_mean
from jaxspec.types import PyTree


def distillation_loss(
    logits: jax.Array,
    teacher_logits: jax.Array,
    weights: jax.Array,
    *,
    total_variation_weight: float,
) -> tuple[jax.Array, jax.Array]:
    """Loss against the teacher's distribution p and the acceptance rate, both means over `weights`
    `[B, T]`.

    The loss mixes KL(p || q) with the total variation distance, which is one minus the acceptance
    rate sum(min(p, q)) of rejection sampling (2211.17192, corollary 3.6; DistillSpec, 2310.08461).
    """
    log_p = jax.nn.log_softmax(teacher_logits)
    log_q = jax.nn.log_softmax(logits)
    p = jnp.exp(log_p)
    divergence = weighted_mean(jnp.sum(p * (log_p - log_q), axis=-1), weights)
    acceptance = weighted_mean(jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1), weights)
    share = total_variation_weight
    return (1 - share) * divergence + share * (1 - acceptance), acceptance


@functools.partial(
    jax.jit,
    donate_argnums=0,
    static_argnames=("model", "optimizer", "teacher", "total_variation_weight"),
)
def train_step(
    state: TrainState,
    batch: data.Batch,
    teacher_params: PyTree = None,
    *,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    teacher: ModelConfig | None = None,
    total_variation_weight: float = 0.0,
    teacher_hidden: jax.Array | None = None,
    rate: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after one optimizer step, and the batch's metrics; the given state is donated.

    If `teacher_hidden` `[B, T, E]`, the teacher's last hidden states, is given, they are not
    computed; `rate` multiplies the updates of an optimizer without a schedule.
    """

    def loss_of(params):
        logits = decoder.training_logits(model, params, batch.inputs, batch.segments)
        if teacher is None:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            loss = weighted_mean(losses, batch.weights)
            return loss, {"loss": loss}
        if teacher_hidden is None:
            theirs = decoder.training_logits(teacher, teacher_params, batch.inputs, batch.segments)
        else:
            theirs = decoder.head(teacher, teacher_params, teacher_hidden)
        loss, acceptance = distillation_loss(
            logits, theirs, batch.weights, total_variation_weight=total_variation_weight
        )
        return loss, {"loss": loss, "acceptance": acceptance}

    gradients, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    metrics["gradient_norm"] = optax.tree.norm(gradients)
    return apply_gradients(state, gradients, optimizer, rate), metrics


def held_out_loss(
    model: ModelConfig, params: PyTree, windows: np.ndarray, end_of_text: int
) -> float:
    """Mean loss in nats per token over windows `[num_rows, T + 1]`; NaN without any."""
    sums = functools.partial(_LOSS_SUMS, model, params)
    loss, weight = data.add_up(sums, windows, end_of_text, 2)
    return loss / weight if weight else math.nan


@functools.partial(jax.jit, static_argnums=0)
def _loss_sums(model: ModelConfig, params: PyTree, batch: data.Batch) -> tuple[jax.Array, ...]:
    logits = decoder.training_logits(model, params, batch.inputs, batch.segments)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.sum(losses * batch.weights), jnp.sum(batch.weights)


_LOSS_SUMS = Program(_loss_sums, "the held-out loss", shapes_vary=True)
