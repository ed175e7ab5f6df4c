"""Training of FlexDraft on its target's texts: `jaxspec train flexdraft`.

The target is frozen. Loss and anchors follow DFlash (2602.06036, A.1), whose blocks are drafted in
the same way; FlexDraft's authors have not published theirs. A run is a function of its
`FlexTrainConfig`, its target and its texts; see `training.runs`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.checkpoint.format import weights_digest
from jaxspec.checkpoint.manifest import kind_of
from jaxspec.drafters.flexdraft.config import FlexConfig, flex_config, param_shapes
from jaxspec.drafters.flexdraft.drafter import FlexDraft
from jaxspec.errors import SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.load.drafters import save_drafter
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.options import check_between
from jaxspec.training import drafters, runs
from jaxspec.training.drafters import DrafterTrainConfig
from jaxspec.training.dual_path import (
    BlockBatch,
    BlockScores,
    Params,
    draw_blocks,
    score_blocks,
    slot_weights,
)
from jaxspec.training.runs import OnStep, TrainState
from jaxspec.training.text_rows import fill_rows, pack_texts
from jaxspec.training.texts import Text
from jaxspec.types import PyTree

_COMMAND = "jaxspec train flexdraft"
_MASK_STDDEV = 0.02
# Weight of the loss without calibration, which falls from the first value to the second over the
# run.
_UNCALIBRATED = 1.0, 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexTrainConfig(DrafterTrainConfig):
    """Settings of `jaxspec train flexdraft`. A setting that is None has the default of
    `flex_config`.

    Attributes:
      layers: D, the number of last layers of the target that get draft projectors.
      block: K, the number of tokens of a block.
      rank: the rank of the calibrator.
      anchors: number of blocks that are drafted in a row, at new random places in every pass.
      learning_rate: the peak for the draft projectors, which start as copies of the target's;
        reached after `warmup_fraction` of the steps, then a cosine decays it to a tenth.
      new_learning_rate: the same for the mask and the calibrator.
    """

    layers: int | None = None
    block: int = 16
    rank: int | None = None
    anchors: int = 64
    learning_rate: float = 2e-4
    new_learning_rate: float = 6e-4

    def __post_init__(self):
        super().__post_init__()
        runs.check_positive(self, "layers", "rank", "anchors", "block")
        check_between(
            "new_learning_rate", self.new_learning_rate, 0, runs.LARGEST_RATE, excludes_least=True
        )
        if self.block < 2:
            raise SettingError(
                f"block is {self.block}; its first token is the target's own, so it must be 2 or "
                "more."
            )

    def flex_config(self, target: ModelConfig) -> FlexConfig:
        """The sizes that these settings describe."""
        return flex_config(
            target, num_deep_layers=self.layers, block_size=self.block, rank=self.rank
        )


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
        went wrong.
      uncalibrated_accepted: the same without calibration.
    """

    top1: list[float]
    uncalibrated_top1: list[float]
    num_tokens: list[int]
    accepted: float
    uncalibrated_accepted: float


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


def flexdraft_loss(
    config: FlexConfig,
    params: Params,
    target_params: Params,
    batch: BlockBatch,
    uncalibrated: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a batch, and its metrics: `loss`, and `top1/j`, the calibrated accuracy of slot
    j.

    Cross entropy of the true tokens with calibration (slots 1 to K - 1), plus `uncalibrated` times
    that without it (all slots), with each slot weighted by `slot_weights`.

    Args:
      config: of FlexDraft.
      params: FlexDraft's, fp32; the computation is in the target's dtype.
      target_params: not packed.
      batch: the texts and blocks.
      uncalibrated: fp32 scalar.
    """
    scores = score_blocks(config, params, target_params, batch)
    is_label = scores.is_label.astype(jnp.float32)
    weights = is_label * jnp.asarray(slot_weights(config.block_size))[None, None]
    calibrated = runs.weighted_mean(scores.calibrated_loss[..., 1:], weights[..., 1:])
    loss = calibrated + uncalibrated * runs.weighted_mean(scores.loss, weights)
    is_right = scores.is_right_calibrated.astype(jnp.float32)
    metrics = {"loss": loss, "calibrated_loss": calibrated}
    for slot in range(1, config.block_size):
        metrics[f"top1/{slot}"] = runs.weighted_mean(is_right[..., slot], is_label[..., slot])
    return loss, metrics


@functools.lru_cache
def make_flex_optimizer(
    *,
    learning_rate: float,
    new_learning_rate: float,
    warmup_fraction: float,
    weight_decay: float,
    clip_norm: float,
    num_steps: int,
) -> optax.GradientTransformation:
    """`runs.make_optimizer` with one learning rate for draft projectors and another for the new
    parameters (mask and calibrator). Equal settings give the same object."""
    by_rate = runs.make_optimizer(
        learning_rate=learning_rate,
        warmup_fraction=warmup_fraction,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        num_steps=num_steps,
    )

    def is_new(params: PyTree) -> dict[str, bool]:
        return {name: name != "layers" for name in params}

    return optax.chain(
        by_rate, optax.masked(optax.scale(new_learning_rate / learning_rate), is_new)
    )


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("config", "optimizer"))
def train_step(
    state: TrainState,
    target_params: PyTree,
    batch: BlockBatch,
    uncalibrated: jax.Array,
    *,
    config: FlexConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after one optimizer step, and the batch's metrics; the given state is donated."""

    def loss_of(params):
        return flexdraft_loss(config, params, target_params, batch, uncalibrated)

    gradients, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    metrics["gradient_norm"] = optax.tree.norm(gradients)
    return runs.apply_gradients(state, gradients, optimizer), metrics


def train_flexdraft(config: FlexTrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains FlexDraft as `config` says and writes it to `config.out / "flexdraft"`.

    Args:
      config: the run.
      on_step: called after every step with the number of steps taken and the step's metrics.

    Returns:
      `steps`, `tokens`, `train_loss`, `num_params`, `num_texts` and `num_skipped_texts`, `held_out`
      (the fields of `FlexAccuracy` for all texts and by domain), `flexdraft` (the drafter's
      directory), `wall_s`.

    Raises:
      SettingError: the settings cannot be trained with, or another process is writing to
        `config.out`.
      ModelError: the texts were written by another target, or none can be trained on; or the sizes
        do not fit the target.
      CheckpointError: the texts cannot be read; there is nothing to resume, or it belongs to
        another run; or `config.out` cannot be written.
    """
    with runs.run_directory(config.out):
        out = config.out / "flexdraft"
        drafters.check_run(config, {out: lambda path: kind_of(path) == "flexdraft"})
        return _train(config, on_step)


def _train(config: FlexTrainConfig, on_step: OnStep | None) -> dict[str, Any]:
    """`train_flexdraft` in a directory that no other process writes to."""
    start_s = time.perf_counter()
    target = load_model(config.target, dtype=config.dtype, kernels="xla")
    target_params = unpacked(target.params)
    flex = config.flex_config(target.config)
    digest = weights_digest(target_params)
    split = drafters.read_split(
        config,
        digest,
        lambda text: _has_draft(text, config.sequence_length),
        needs="a token after its prompt that could be drafted",
    )
    num_steps = config.num_steps
    plan = drafters.plan_rows(config, split.training, num_steps)
    optimizer = make_flex_optimizer(
        learning_rate=config.learning_rate,
        new_learning_rate=config.new_learning_rate,
        warmup_fraction=config.warmup_fraction,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        num_steps=num_steps,
    )
    fingerprint = drafters.fingerprint(
        config, split.training, flexdraft=flex.to_json(), target_weights=digest
    )

    def init(target_params: PyTree) -> TrainState:
        params = init_flexdraft(flex, target_params, jax.random.key(config.seed))
        # Copies, because training donates them, and the target keeps its own.
        params = jax.tree.map(jnp.copy, params)
        return TrainState(params=params, optimizer=optimizer.init(params))

    state, first_step = runs.initial_state(
        config.out,
        init,
        fingerprint,
        operands=(target_params,),
        resume=config.resume,
        command=_COMMAND,
    )
    program = functools.partial(
        Program(train_step, "the training step"), config=flex, optimizer=optimizer
    )

    def step(state: TrainState, index: int) -> tuple[TrainState, dict[str, jax.Array]]:
        places = range(index * config.num_rows, (index + 1) * config.num_rows)
        rows = [[split.training[text] for text in plan[place]] for place in places]
        rngs = [np.random.default_rng((config.seed, place, 1)) for place in places]
        batch = draw_blocks(pack_texts(rows, config.sequence_length), config.anchors, rngs)
        first, last = _UNCALIBRATED
        share = first + (last - first) * index / max(num_steps - 1, 1)
        return program(state, target_params, batch, jnp.float32(share))

    def measure(params: PyTree, texts: Sequence[Text]) -> dict[str, FlexAccuracy]:
        return measure_flex_accuracy(
            flex,
            params,
            target_params,
            texts,
            row_length=config.sequence_length,
            anchors=config.anchors,
        )

    def evaluate(params: PyTree) -> dict[str, float]:
        some = measure(params, split.held_out[: config.evaluate_texts])["all"]
        return {
            "held_out/accepted": some.accepted,
            "held_out/uncalibrated_accepted": some.uncalibrated_accepted,
        }

    config.out.mkdir(parents=True, exist_ok=True)
    state, metrics = runs.run_steps(
        config,
        config.out,
        state,
        range(first_step, num_steps),
        step=step,
        step_tokens=lambda _: config.step_tokens,
        evaluate=evaluate,
        fingerprint=fingerprint,
        described={"flexdraft": flex.to_json()},
        on_step=on_step,
    )
    directory = config.out / "flexdraft"
    drafter = FlexDraft(flex, jax.tree.map(lambda leaf: leaf.astype(target.dtype), state.params))
    save_drafter(drafter, directory, target=target, overwrite=True)
    result = {
        "steps": num_steps,
        "tokens": num_steps * config.step_tokens,
        "train_loss": metrics["loss"],
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "num_texts": len(split.training),
        "num_skipped_texts": split.num_skipped,
        "held_out": {
            name: dataclasses.asdict(each)
            for name, each in measure(state.params, split.held_out).items()
        },
        "flexdraft": str(directory),
        "wall_s": time.perf_counter() - start_s,
    }
    runs.write_result(config.out, result)
    return result


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
    rows = fill_rows(drafters.text_lengths(texts, row_length), row_length, rng)
    found: dict[str, list[np.ndarray]] = {}
    for row in rows:
        texts_of_row = [texts[index] for index in row]
        batch = draw_blocks(pack_texts([texts_of_row], row_length), anchors, [rng])
        scores: BlockScores = jax.device_get(_SCORE(config, params, target_params, batch))
        segments = np.asarray(batch.texts.segments)[0, np.asarray(batch.anchors)[0]]
        scored = np.stack([scores.is_right, scores.is_right_calibrated, scores.is_label])[:, 0]
        for index, text in enumerate(texts_of_row):
            of_text = scored[:, (segments == index) & np.asarray(batch.is_block)[0]]
            for name in ("all", text.domain):
                found.setdefault(name, []).append(of_text)
    return {name: _accuracy(np.concatenate(each, axis=1)) for name, each in found.items()}


def _accuracy(scored: np.ndarray) -> FlexAccuracy:
    """The accuracy for `is_right`, `is_right_calibrated` and `is_label`, `[3, N, K]`."""
    is_right, is_right_calibrated, is_label = scored
    num_tokens = is_label.sum(axis=0)

    def top1(is_right: np.ndarray) -> list[float]:
        return ((is_right & is_label).sum(axis=0) / np.maximum(num_tokens, 1)).tolist()

    def accepted(is_right: np.ndarray) -> float:
        whole = is_right[is_label[:, 1:].all(axis=1), 1:]
        return float(np.cumprod(whole, axis=1).sum() / max(len(whole), 1))

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


def _has_draft(text: Text, row_length: int) -> bool:
    """Whether a token of the output could be drafted: two come before it, within a row."""
    length = min(len(text.prompt) + len(text.output), row_length)
    return length > max(len(text.prompt), 2)
