"""Training of FlexDraft on its target's texts: `jaxspec train flexdraft`.

The target is frozen. Loss and anchors follow DFlash (2602.06036, A.1), whose blocks are drafted in
the same way; FlexDraft's authors have not published theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.drafters.flexdraft.config import FlexConfig, flex_config, param_shapes
from jaxspec.drafters.flexdraft.drafter import FlexDraft
from jaxspec.errors import SettingError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.options import check_between
from jaxspec.training.drafters import (
    NUM_EVALUATED,
    DrafterTask,
    DrafterTrainConfig,
    text_lengths,
    train_drafter,
)
from jaxspec.training.dual_path import (
    BlockBatch,
    BlockScores,
    Params,
    draw_blocks,
    score_blocks,
    slot_weights,
)
from jaxspec.training.schedule import Branch
from jaxspec.training.text_rows import fill_rows, pack_texts
from jaxspec.training.texts import Text
from jaxspec.training.trainer import (
    LARGEST_RATE,
    NoOption,
    OnStep,
    check_positive,
    make_optimizer,
    weighted_mean,
)
from jaxspec.types import PyTree

_MASK_STDDEV = 0.02
# Weight of the loss without calibration, which falls from the first value to the second over the
# run.
_UNCALIBRATED = 1.0, 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexTrainConfig(DrafterTrainConfig):
    """Settings of `jaxspec train flexdraft`. A setting that is None has the default of
    `flex_config`.

    Attributes:
      tokens: number of training tokens.
      layers: D, the number of last layers of the target that get draft projectors.
      block: K, the number of tokens of a block.
      rank: the rank of the calibrator.
      anchors: number of blocks that are drafted in a row, at new random places in every pass.
      learning_rate: the peak for the draft projectors, which start as copies of the target's.
      new_learning_rate: the same for the mask and the calibrator; None is three times
        `learning_rate`.
    """

    tokens: int = 1_000_000
    minutes: NoOption[float | None] = None
    layers: int | None = None
    block: int = 16
    rank: int | None = None
    anchors: NoOption[int] = 64
    learning_rate: float = 2e-4
    new_learning_rate: NoOption[float | None] = None

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "layers", "rank", "anchors", "block")
        if (rate := self.new_learning_rate) is not None:
            check_between("new_learning_rate", rate, 0, LARGEST_RATE, excludes_least=True)
        if self.has_branches or self.minutes is not None:
            what = f"tokens is {self.tokens}"
            if self.minutes is not None:
                what = f"minutes is {self.minutes:g}"
            raise SettingError(
                f"{what}; FlexDraft's loss depends on where the run ends, so give one number of "
                "tokens."
            )
        if self.block < 2:
            raise SettingError(
                f"block is {self.block}; its first token is the target's own, so it must be 2 or "
                "more."
            )

    def drafter_config(self, target: ModelConfig) -> FlexConfig:
        """The sizes that these settings describe."""
        return flex_config(
            target, num_deep_layers=self.layers, block_size=self.block, rank=self.rank
        )


def train_flexdraft(config: FlexTrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains FlexDraft as `config` says and writes it to `config.out / "flexdraft"`.

    See `trainer.train`. The result also has `num_texts` and `num_skipped_texts`, `held_out` (the
    fields of `FlexAccuracy` for all texts and by domain), and `flexdraft` (the drafter's
    directory).
    """
    return train_drafter(FlexTask, config, on_step)


def init_flexdraft(config: FlexConfig, target_params: Params, key: jax.Array) -> dict[str, Any]:
    """Initial parameters, fp32: copies of the target's projectors, a mask of small noise, and a
    calibrator that adds nothing.

    Args:
      config: of FlexDraft.
      target_params: not packed.
      key: the key of the noise.
    """
    shapes = param_shapes(config)
    mask_key, embedding_key, hidden_key = jax.random.split(key, 3)

    def normal(key: jax.Array, shape: tuple[int, ...], stddev: float) -> jax.Array:
        return jnp.float32(stddev) * jax.random.normal(key, shape, jnp.float32)

    made = jax.tree.map(
        lambda shape: jnp.zeros(shape, jnp.float32), shapes, is_leaf=decoder.is_shape
    )
    deep = target_params["layers"][config.first_deep_layer :]
    made["layers"] = tuple(
        {name: jnp.asarray(layer[name], jnp.float32) for name in own}
        for layer, own in zip(deep, shapes["layers"], strict=True)
    )
    made["mask"] = normal(mask_key, shapes["mask"], _MASK_STDDEV)
    # Both halves of one matrix [2 E, r], scaled so that inputs of size 1 give outputs of size 1.
    stddev = (2 * config.target.width) ** -0.5
    for name, part_key in (("embedding", embedding_key), ("hidden", hidden_key)):
        shape = shapes["calibrator"][name]
        made["calibrator"][name] = normal(part_key, shape, stddev)
    return made


@functools.lru_cache
def make_flex_optimizer(new_rate: float) -> optax.GradientTransformation:
    """`make_optimizer` whose updates of the new parameters (mask and calibrator) are `new_rate`
    times as large. Equal rates give the same object."""

    def is_new(params: PyTree) -> dict[str, bool]:
        return {name: name != "layers" for name in params}

    return optax.chain(make_optimizer(), optax.masked(optax.scale(new_rate), is_new))


class FlexBatch(NamedTuple):
    """The texts and blocks of a step, and the weight of the loss without calibration, an fp32
    scalar."""

    blocks: BlockBatch
    uncalibrated: jax.Array


@dataclasses.dataclass(frozen=True)
class FlexLoss:
    """The loss of FlexDraft: cross entropy of the true tokens with calibration (slots 1 to K - 1),
    plus `FlexBatch.uncalibrated` times that without it (all slots), with each slot weighted by
    `slot_weights`."""

    flex: FlexConfig

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: FlexBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and the metrics: `loss`, `calibrated_loss` and `top1/j`, the calibrated
        accuracy of slot j.

        Args:
          params: FlexDraft's, fp32; the computation is in the target's dtype.
          frozen: the target's, not packed.
          batch: the texts and blocks.
        """
        scores = score_blocks(self.flex, params, frozen, batch.blocks)
        is_label = scores.is_label.astype(jnp.float32)
        weights = is_label * jnp.asarray(slot_weights(self.flex.block_size))[None, None]
        calibrated = weighted_mean(scores.calibrated_loss[..., 1:], weights[..., 1:])
        loss = calibrated + batch.uncalibrated * weighted_mean(scores.loss, weights)
        is_right = scores.is_right_calibrated.astype(jnp.float32)
        metrics = {"loss": loss, "calibrated_loss": calibrated}
        for slot in range(1, self.flex.block_size):
            metrics[f"top1/{slot}"] = weighted_mean(is_right[..., slot], is_label[..., slot])
        return loss, metrics


class FlexTask(DrafterTask):
    """FlexDraft for a target."""

    PRODUCT = "flexdraft"
    settings: FlexTrainConfig

    def __init__(self, settings: FlexTrainConfig):
        super().__init__(settings)
        self.loss = FlexLoss(self.config)
        rate = settings.new_learning_rate or 3 * settings.learning_rate
        self.optimizer = make_flex_optimizer(rate / settings.learning_rate)

    @property
    def num_read_layers(self) -> int:
        """The number of layers below the deep ones."""
        return self.config.first_deep_layer

    def init_params(self, key: jax.Array, frozen: PyTree) -> PyTree:
        """The target's projectors, and a calibrator that adds nothing yet."""
        return init_flexdraft(self.config, frozen, key)

    def batch(self, index: int, end: Branch | None) -> FlexBatch:
        """The texts and blocks of a step."""
        assert end is not None, "a run without branches has no trunk"
        seed, (first, last) = self.settings.seed, _UNCALIBRATED
        rngs = [np.random.default_rng((seed, place, 1)) for place in self.places(index)]
        share = first + (last - first) * index / max(end.num_steps - 1, 1)
        blocks = draw_blocks(self.texts_of(index), self.settings.anchors, rngs)
        return FlexBatch(blocks, jnp.float32(share))

    def evaluate(self, params: PyTree) -> dict[str, float]:
        """How many drafts of a block are right."""
        some = self._accuracy(self.cast(params), self.split.held_out[:NUM_EVALUATED])["all"]
        return {
            "held_out/accepted": some.accepted,
            "held_out/uncalibrated_accepted": some.uncalibrated_accepted,
        }

    def drafter(self, params: PyTree) -> FlexDraft:
        """FlexDraft."""
        return FlexDraft(self.config, params)

    def measure(self, params: PyTree, texts: Sequence[Text]) -> dict[str, Any]:
        """Accuracy of every slot."""
        found = self._accuracy(params, texts)
        return {"held_out": {name: dataclasses.asdict(each) for name, each in found.items()}}

    def _accuracy(self, params: PyTree, texts: Sequence[Text]) -> dict[str, FlexAccuracy]:
        return measure_flex_accuracy(
            self.config,
            params,
            self.frozen,
            texts,
            row_length=self.settings.sequence_length,
            anchors=self.settings.anchors,
        )


# Accuracy


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexAccuracy:
    """How often mask rows predict the tokens that the target wrote, given the true tokens before
    them.

    Attributes:
      top1: accuracy of the likeliest token for slots 1 to K - 1, with calibration.
      uncalibrated_top1: the same for slots 0 to K - 1, without calibration.
      num_tokens: how many tokens each of the K slots predicted.
      accepted: number of correct drafts of a block before the first wrong one, on average over
        blocks within a text. Decoding accepts fewer, because its blocks begin where earlier drafts
        went wrong. NaN, like a slot's accuracy, where there was nothing to measure.
      uncalibrated_accepted: the same without calibration.
    """

    top1: list[float]
    uncalibrated_top1: list[float]
    num_tokens: list[int]
    accepted: float
    uncalibrated_accepted: float


def measure_flex_accuracy(
    config: FlexConfig,
    params: PyTree,
    target_params: PyTree,
    texts: Sequence[Text],
    *,
    row_length: int,
    anchors: int,
) -> dict[str, FlexAccuracy]:
    """Accuracy of mask rows on texts that their target wrote, for all texts (`all`) and by domain.

    Args:
      config: of FlexDraft.
      params: of FlexDraft.
      target_params: not packed.
      texts: at least one that has a draft.
      row_length: tokens of a row; longer texts are cut.
      anchors: number of blocks that are drafted in a row, always the same ones.
    """
    rng = np.random.default_rng(0)
    rows = fill_rows(text_lengths(texts, row_length), row_length, rng)
    found: dict[str, list[np.ndarray]] = {}
    for row in rows:
        texts_of_row = [texts[index] for index in row]
        batch = draw_blocks(pack_texts([texts_of_row], row_length), anchors, [rng])
        scores: BlockScores = jax.device_get(_SCORE(config, params, target_params, batch))
        segments = np.asarray(batch.texts.segments)[0, np.asarray(batch.anchors)[0]]
        scored = np.stack([scores.is_right, scores.is_right_calibrated, scores.is_label])[:, 0]
        for index, text in enumerate(texts_of_row):
            of_text = scored[:, (segments == index) & np.asarray(batch.is_block)[0]]
            for name in dict.fromkeys(("all", text.domain)):
                found.setdefault(name, []).append(of_text)
    return {name: _accuracy(np.concatenate(each, axis=1)) for name, each in found.items()}


def _accuracy(scored: np.ndarray) -> FlexAccuracy:
    """The accuracy for `is_right`, `is_right_calibrated` and `is_label`, `[3, N, K]`."""
    is_right, is_right_calibrated, is_label = scored
    num_tokens = is_label.sum(axis=0)

    def top1(is_right: np.ndarray) -> list[float]:
        shares = (is_right & is_label).sum(axis=0) / np.maximum(num_tokens, 1)
        return np.where(num_tokens > 0, shares, np.nan).tolist()

    def accepted(is_right: np.ndarray) -> float:
        whole = is_right[is_label[:, 1:].all(axis=1), 1:]
        return float(np.cumprod(whole, axis=1).sum() / len(whole)) if len(whole) else math.nan

    return FlexAccuracy(
        top1=top1(is_right_calibrated)[1:],
        uncalibrated_top1=top1(is_right),
        num_tokens=num_tokens.tolist(),
        accepted=accepted(is_right_calibrated),
        uncalibrated_accepted=accepted(is_right),
    )


_SCORE = Program(
    functools.partial(jax.jit, static_argnums=0)(score_blocks),
    "the accuracy of FlexDraft",
    shapes_vary=True,
)
