"""Acceptance of a draft model on held-out text, without decoding anything."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import ModelError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.training import data
from jaxspec.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextAcceptance:
    """How well a draft model matches its target, per predicted token of real text.

    Attributes:
      sampled: mean of sum(min(p, q)) over the vocabulary at temperature 1, the probability that
        rejection sampling accepts a drafted token (2211.17192, corollary 3.6).
      greedy: fraction of positions where draft and target have the same most likely token.
      num_tokens: number of positions measured.
    """

    sampled: float
    greedy: float
    num_tokens: int


def measure_acceptance(
    target: tuple[ModelConfig, PyTree],
    draft: tuple[ModelConfig, PyTree],
    windows: np.ndarray,
    end_of_text: int,
) -> TextAcceptance:
    """Acceptance over `windows` `[num_rows, T + 1]` of held-out tokens, in batches of some 4096.

    The context of each position is the text itself, not what the target would have written, so the
    rates differ somewhat from those of a decode.

    Raises:
      ModelError: the models' vocabularies differ in size.
    """
    if target[0].vocab_size != draft[0].vocab_size:
        raise ModelError(
            f"The target has {target[0].vocab_size} vocabulary entries and the draft "
            f"{draft[0].vocab_size}; measure models that share a tokenizer."
        )
    sums = functools.partial(_SUMS, target[0], draft[0], target[1], draft[1])
    sampled, greedy, num_tokens = data.add_up(sums, windows, end_of_text, 3)
    count = max(num_tokens, 1.0)
    return TextAcceptance(
        sampled=sampled / count, greedy=greedy / count, num_tokens=int(num_tokens)
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(target_config, draft_config, target_params, draft_params, batch):
    target = decoder.training_logits(target_config, target_params, batch.inputs, batch.segments)
    draft = decoder.training_logits(draft_config, draft_params, batch.inputs, batch.segments)
    kept = jnp.sum(jnp.minimum(jax.nn.softmax(target), jax.nn.softmax(draft)), axis=-1)
    agrees = jnp.argmax(target, axis=-1) == jnp.argmax(draft, axis=-1)
    weights = batch.weights
    return jnp.sum(kept * weights), jnp.sum(jnp.where(agrees, weights, 0.0)), jnp.sum(weights)


_SUMS = Program(_sums, "the measuring of acceptance", shapes_vary=True)
