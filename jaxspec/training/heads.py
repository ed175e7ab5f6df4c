"""Training of heads on texts of their target: `jaxspec train heads`.

The target is frozen: each step runs it once, and only the heads have gradients. A run is a function
of its `HeadsTrainConfig`, its target and its texts; see `training.runs`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxspec.checkpoint.format import weights_digest
from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.files import export_drafter, save_drafter
from jaxspec.drafters.heads.config import (
    Connection,
    Gate,
    HeadsConfig,
    Kind,
    block_config,
    heads_config,
    param_shapes,
)
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.heads.files import holds_heads
from jaxspec.drafters.heads.formulas import Params, head_logits
from jaxspec.drafters.heads.other_layouts import EXPORTED, holds_export
from jaxspec.errors import SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.training import drafters, runs
from jaxspec.training.drafters import DrafterTrainConfig
from jaxspec.training.head_accuracy import RankedText, accuracy_of, best_trees, rank_texts
from jaxspec.training.runs import OnStep, TrainState
from jaxspec.training.teacher_forcing import last_features, run_heads, target_parts
from jaxspec.training.text_rows import TextBatch, pack_texts, shifted
from jaxspec.training.texts import Text
from jaxspec.types import PyTree

_COMMAND = "jaxspec train heads"
# Loss of a later head counts less: 0.8 in Medusa (2401.10774), 0.7 in Clover-2's release.
_DECAY: dict[str, float] = {"medusa": 0.8, "hydra": 0.8, "clover": 0.8, "clover2": 0.7}
_REGRESSION_WEIGHT = 10.0  # of Clover-2's SmoothL1, as in its release
_NOISE = 0.01  # added to matrices that begin as the identity
# Settings that do not change what is trained, besides those of every run.
_FREE_FIELDS = ("format", "tree_nodes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsTrainConfig(DrafterTrainConfig):
    """Settings of `jaxspec train heads`. What is None is the kind's own, see `heads_config`.

    Attributes:
      kind: medusa, hydra, clover or clover2.
      num_heads: tokens proposed one after another.
      num_layers: residual blocks of each of Medusa's heads, or layers of the augmenting block.
      own_heads: Medusa and Hydra: every head has a matrix to the vocabulary of its own, which
        begins as the target's.
      connection: Clover: how a token reaches the next head.
      gate: Clover and Clover-2: of the attention decoder.
      block: Clover: what is computed of the augmenting block's layers.
      clip_value: instead of `clip_norm`, the largest size of each of a gradient's components
        (Clover-2's release: 0.5).
      format: also write the heads in another project's layout, to `out / format`: vllm for Medusa,
        clover2 for Clover-2.
      tree_nodes: sizes of the static trees that are made of what was measured at the end.
    """

    kind: Kind
    num_heads: int | None = None
    num_layers: int | None = None
    own_heads: bool = False
    connection: Connection | None = None
    gate: Gate | None = None
    block: Literal["whole", "attention", "none"] | None = None
    clip_value: float | None = None
    format: Literal["vllm", "clover2"] | None = None
    tree_nodes: tuple[int, ...] = (4, 16)

    def __post_init__(self):
        super().__post_init__()
        self.check_positive("num_heads", "num_layers")
        for name, kinds in (
            ("own_heads", ("medusa", "hydra")),
            ("num_layers", ("medusa", "clover", "clover2")),
            ("connection", ("clover",)),
            ("gate", ("clover", "clover2")),
            ("block", ("clover",)),
        ):
            if getattr(self, name) not in (None, False) and self.kind not in kinds:
                raise SettingError(
                    f"{name} was given for {self.kind}; it is a setting of {' and '.join(kinds)}, "
                    "so leave it out."
                )
        if self.num_layers is not None and self.block == "none":
            raise SettingError(
                "num_layers was given with block none, which has no layers; leave one of them out."
            )
        if self.gate is not None and self.connection not in (None, "attention"):
            raise SettingError(
                f"gate was given with connection {self.connection}, which has none; leave one of "
                "them out."
            )
        if self.format is not None and EXPORTED[self.format][0] != self.kind:
            raise SettingError(
                f"format {self.format} was given for {self.kind}; it holds "
                f"{EXPORTED[self.format][0]} heads, so leave it out."
            )
        for nodes in self.tree_nodes:
            if nodes < 1:
                raise SettingError(f"tree_nodes has {nodes}; a tree has at least one node.")

    def heads_config(self, target: ModelConfig) -> HeadsConfig:
        """The heads that these settings describe."""
        fields: dict[str, Any] = {"shares_head": not self.own_heads}
        for name in ("connection", "gate"):
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        if self.num_layers is not None and self.kind == "medusa":
            fields["num_layers"] = self.num_layers
        elif self.num_layers is not None:
            fields["block"] = block_config(target, num_layers=self.num_layers)
        if self.block == "none":
            fields["block"] = None
        elif self.block is not None:
            fields["block_part"] = self.block
        return heads_config(self.kind, target, num_heads=self.num_heads, **fields)


def init_heads(
    config: HeadsConfig, target: ModelConfig, params: Params, key: jax.Array
) -> dict[str, Any]:
    """Parameters to start from, fp32: heads that add nothing to what they read, and a block of
    copies of the target's last layer.

    Matrices that read or pass on hidden states begin as the identity with noise (Clover, Clover-2's
    release), those that add something as zeros, own heads as the target's (Medusa).

    Args:
      config: of the heads.
      target: of their target.
      params: of their target, not packed.
      key: of the noise.
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
        head = params["head"] if "head" in params else params["embedding"].T
        for own in made["heads"]:
            own["head"] = _as_fp32(head)
    return made


def heads_loss(
    config: HeadsConfig,
    params: Params,
    target_config: ModelConfig,
    target_params: Params,
    batch: TextBatch,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a batch, and its metrics: `loss` and each head's `top1/k`, the share of labels
    that it finds the likeliest.

    Medusa, Hydra and Clover: cross entropy of the true tokens, of head k times 0.8^k. Clover-2, as
    in its release: 0.7^k times the cross entropy against the target's distribution, plus ten times
    the SmoothL1 distance to the target's normed hidden states where it predicts the same token.

    Args:
      config: of the heads.
      params: of the heads, fp32; they are computed in the target's dtype.
      target_config: of their target.
      target_params: not packed.
      batch: of texts.
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
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after one optimizer step, and the batch's metrics; the given state is donated."""

    def loss_of(params):
        return heads_loss(config, params, target_config, target_params, batch)

    gradients, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    metrics["gradient_norm"] = optax.tree.norm(gradients)
    return runs.apply_gradients(state, gradients, optimizer), metrics


def train_heads(config: HeadsTrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains heads as `config` says and writes them to `config.out / "heads"`.

    Args:
      config: the run.
      on_step: called after every step with the number of steps taken and the step's metrics.

    Returns:
      `kind`, `steps`, `tokens`, `train_loss`, `num_params`, `num_texts` and `num_skipped_texts`,
      `held_out` (the fields of `HeadAccuracy` of all texts and by domain), `trees` (the choices of
      the best static tree by its number of nodes) and `tokens_per_round` (with these trees, on the
      held-out texts), `heads` (the drafter's directory), `wall_s`.

    Raises:
      SettingError: settings that cannot be trained with, or another process is writing to
        `config.out`.
      ModelError: the texts were written by another target, or none can be trained on.
      CheckpointError: texts that cannot be read; there is nothing to resume, or it is another
        run's; or `config.out` cannot be written.
    """
    with runs.run_directory(config.out):
        written = {"heads": holds_heads}
        if config.format is not None:
            written[config.format] = holds_export
        drafters.check_run(config, written)
        return _train(config, on_step)


def _train(config: HeadsTrainConfig, on_step: OnStep | None) -> dict[str, Any]:
    """`train_heads` in a directory that no other process writes."""
    start_s = time.perf_counter()
    target = load_model(config.target, dtype=config.dtype, kernels="xla")
    target_config, target_params = target.config, unpacked(target.params)
    heads = config.heads_config(target_config)
    digest = weights_digest(target_params)
    split = drafters.read_split(
        config,
        digest,
        lambda text: _has_labels(text, heads, config.sequence_length),
        needs=f"the {heads.num_heads} tokens after its prompt that {heads.num_heads} heads are "
        "trained on",
    )
    plan = drafters.plan_rows(config, split.training)
    optimizer = runs.make_optimizer(
        learning_rate=config.learning_rate,
        warmup_fraction=config.warmup_fraction,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        clip_value=config.clip_value,
        num_steps=config.num_steps,
    )
    fingerprint = drafters.fingerprint(
        config,
        split.training,
        free=_FREE_FIELDS,
        heads=heads.to_json(),
        target_weights=digest,
    )

    def init(target_params: PyTree) -> TrainState:
        params = init_heads(heads, target_config, target_params, jax.random.key(config.seed))
        # Training donates them, and what is the target's stays the target's.
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
        Program(train_step, "the training step"),
        config=heads,
        target_config=target_config,
        optimizer=optimizer,
    )

    def step(state: TrainState, index: int) -> tuple[TrainState, dict[str, jax.Array]]:
        chosen = plan[index * config.num_rows : (index + 1) * config.num_rows]
        rows = [[split.training[text] for text in row] for row in chosen]
        return program(state, target_params, pack_texts(rows, config.sequence_length))

    def ranked(params: PyTree, texts: Sequence[Text]) -> list[RankedText]:
        cast = jax.tree.map(lambda leaf: leaf.astype(target.dtype), params)
        return rank_texts(
            heads, cast, (target_config, target_params), texts, config.sequence_length
        )

    def evaluate(params: PyTree) -> dict[str, float]:
        some = accuracy_of(ranked(params, split.held_out[: config.evaluate_texts]))
        return {f"held_out/top1/{i}": share for i, share in enumerate(some["all"].top1)}

    config.out.mkdir(parents=True, exist_ok=True)
    state, metrics = drafters.run_steps(
        config,
        state,
        first_step,
        step=step,
        evaluate=evaluate,
        fingerprint=fingerprint,
        described={"heads": heads.to_json()},
        on_step=on_step,
    )
    measured = ranked(state.params, split.held_out)
    trees = best_trees(measured, config.tree_nodes)
    directory = config.out / "heads"
    drafter = Heads(heads, jax.tree.map(lambda leaf: leaf.astype(target.dtype), state.params))
    save_drafter(drafter, directory, target=target, overwrite=True)
    if config.format is not None:
        path = config.out / config.format
        export_drafter(drafter, path, config.format, target=target, overwrite=True)
    result = {
        "kind": config.kind,
        "steps": config.num_steps,
        "tokens": config.num_steps * config.num_rows * config.sequence_length,
        "train_loss": metrics["loss"],
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "num_texts": len(split.training),
        "num_skipped_texts": split.num_skipped,
        "held_out": {
            name: dataclasses.asdict(each) for name, each in accuracy_of(measured).items()
        },
        "trees": {
            str(nodes): [list(path) for path in tree.choices] for nodes, (tree, _) in trees.items()
        },
        "tokens_per_round": {str(nodes): tokens for nodes, (_, tokens) in trees.items()},
        "heads": str(directory),
        "wall_s": time.perf_counter() - start_s,
    }
    runs.write_result(config.out, result)
    return result


def _has_labels(text: Text, heads: HeadsConfig, row_length: int) -> bool:
    """Whether every head has a label: a token of the output so far from the beginning, in a row."""
    length = min(len(text.prompt) + len(text.output), row_length)
    return length - len(text.prompt) >= heads.num_heads and length >= heads.num_heads + 2


def _as_fp32(leaf: jax.Array) -> jax.Array:
    return jnp.asarray(leaf, jnp.float32)
