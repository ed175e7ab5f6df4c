"""Training of heads on their target's texts: `jaxspec train heads`.

The target is frozen: each step runs it once, unless its hidden states are kept, and only the heads
have gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.drafters.heads.config import (
    HeadsConfig,
    Kind,
    block_config,
    heads_config,
    param_shapes,
)
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.heads.formulas import Params, head_logits
from jaxspec.errors import SettingError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.training.data import most_frequent
from jaxspec.training.drafters import (
    NUM_EVALUATED,
    DrafterTask,
    DrafterTrainConfig,
    train_drafter,
)
from jaxspec.training.head_accuracy import RankedText, accuracy_of, best_trees, rank_texts
from jaxspec.training.teacher_forcing import run_heads, target_features, target_parts
from jaxspec.training.text_rows import TextBatch, shifted
from jaxspec.training.texts import Text
from jaxspec.training.trainer import (
    NoOption,
    OnStep,
    check_positive,
    make_optimizer,
    weighted_mean,
)
from jaxspec.types import PyTree

# Loss of a later head counts less: 0.8 in Medusa (2401.10774), 0.7 in Clover-2's release.
_DECAY: dict[str, float] = {"medusa": 0.8, "hydra": 0.8, "clover": 0.8, "clover2": 0.7}
_REGRESSION_WEIGHT = 10.0  # weight of Clover-2's SmoothL1, as in its release
_NOISE = 0.01  # added to matrices that start as the identity
# Fields of `HeadsConfig` that may be chosen.
_PARTS = (
    "shares_head", "connection", "shares_connection", "has_normed_inputs", "gate",
    "num_gate_heads", "has_silu", "block", "block_part",
)  # fmt: skip
_TREE_NODES = (4, 16)  # sizes of the static trees that are made from the final measurements


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsTrainConfig(DrafterTrainConfig):
    """Settings of `jaxspec train heads`. A setting that is None has the kind's own default, see
    `heads_config`.

    Attributes:
      kind: medusa, hydra, clover or clover2.
      num_heads: number of heads, each of which proposes one token.
      num_layers: number of residual blocks of each Medusa head, or of layers of the augmenting
        block.
      parts: fields of `HeadsConfig` that differ from the kind's own, such as
        `{"connection": "mlp"}`. Without `shares_head`, every head begins as a copy of
        the target's.
      draft_vocab_size: propose only so many tokens, the most frequent in what the target wrote, so
        that a head reads only their columns of the target's; None for all.
    """

    # Of these, the parts are compared as "drafter".
    FREE: ClassVar[tuple[str, ...]] = (*DrafterTrainConfig.FREE, "parts")

    kind: Kind
    num_heads: int | None = None
    num_layers: int | None = None
    parts: NoOption[Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    draft_vocab_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "num_heads", "num_layers", "draft_vocab_size")
        if unknown := sorted(self.parts.keys() - set(_PARTS)):
            raise SettingError(f"parts has {', '.join(unknown)}; give some of {', '.join(_PARTS)}.")
        if self.num_layers is not None and "block" in self.parts:
            raise SettingError("num_layers and a block were given; leave one of them out.")

    def drafter_config(self, target: ModelConfig) -> HeadsConfig:
        """The heads that these settings describe."""
        fields = dict(self.parts)
        if self.num_layers is not None and self.kind in ("clover", "clover2"):
            fields["block"] = block_config(target, num_layers=self.num_layers)
        elif self.num_layers is not None:
            fields["num_layers"] = self.num_layers
        if (count := self.draft_vocab_size or 0) > target.vocab_size:
            raise SettingError(
                f"draft_vocab_size is {count}, and the target has {target.vocab_size} tokens; give "
                "fewer, or leave it out."
            )
        fields["num_head_tokens"] = self.draft_vocab_size
        return heads_config(self.kind, target, num_heads=self.num_heads, **fields)


def train_heads(config: HeadsTrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains heads as `config` says and writes them to `config.out / "heads"`.

    See `trainer.train`. A result also has `kind`, `num_texts` and `num_skipped_texts`, `held_out`
    (the fields of `HeadAccuracy` of all texts and by domain), `trees` (the choices of the best
    static tree by its number of nodes) and `tokens_per_round` (with these trees, on the held-out
    texts), and `heads` (the drafter's directory).
    """
    return train_drafter(HeadsTask, config, on_step)


def init_heads(
    config: HeadsConfig,
    target: ModelConfig,
    params: Params,
    key: jax.Array,
    token_map: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Initial parameters, fp32: heads that add nothing to what they read, and a block of copies of
    the target's last layer. The token map is not among them.

    Matrices that read or pass on hidden states start as the identity with noise (Clover, Clover-2's
    release), those that add something start as zeros, and own heads as copies of the target's
    (Medusa).

    Args:
      config: of the heads.
      target: their target's configuration.
      params: their target's, not packed.
      key: the key of the noise.
      token_map: the tokens that heads may propose, `num_head_tokens` of them; None is all.
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
    made.pop("token_map", None)
    if config.block is not None:
        last = params["layers"][-1]
        copied = {name: _as_fp32(last[name]) for name in made["layers"][0]}
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
        columns = decoder.head_weight(params)
        if token_map is not None:
            columns = decoder.head_rows(params, jnp.array(token_map)).T
        for own in made["heads"]:
            own["head"] = _as_fp32(columns)
    return made


@dataclasses.dataclass(frozen=True)
class HeadsLoss:
    """The loss of heads on a batch of texts.

    Medusa, Hydra and Clover: cross entropy of the true tokens, with weight 0.8^k for head k.
    Clover-2, as in its release: 0.7^k times the cross entropy against the target's distribution,
    plus ten times the SmoothL1 distance to the target's normed hidden states where it predicts the
    same token.

    Heads that propose only the tokens of a `token_map` learn their logits; anchors whose label is
    another token do not count.
    """

    heads: HeadsConfig
    target: ModelConfig
    token_map: tuple[int, ...] | None = None

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: TextBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and the metrics: `loss` and each head's `top1/k`, its accuracy on the labels.

        Args:
          params: the heads', fp32; the computation is in the target's dtype.
          frozen: the target's, not packed.
          batch: the texts.
        """
        config = self.heads
        token_map = None if self.token_map is None else jnp.array(self.token_map)
        target = target_parts(self.target, frozen, token_map)
        features = target_features(self.target, frozen, batch)
        params = jax.tree.map(lambda leaf: leaf.astype(features.dtype), params)
        regressed = distribution = None
        if config.kind == "clover2":
            regressed = target.final_norm(features)
            distribution = jax.nn.softmax(target.head(regressed))
        loss, metrics = jnp.zeros((), jnp.float32), {}
        outputs = run_heads(config, params, target, features, batch, token_map)
        for index, made in enumerate(outputs):
            logits = head_logits(config, params, target, index, made.hidden)
            labels, weights = made.labels, jnp.where(made.labels < 0, 0.0, made.weights)
            if regressed is None or distribution is None:
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            else:
                distance = index + 1  # the target's state there is that before the label
                losses = optax.softmax_cross_entropy(logits, shifted(distribution, distance))
                apart = made.hidden - shifted(regressed, distance)
                smooth = optax.huber_loss(apart.astype(jnp.float32), delta=1.0)
                losses = losses + jnp.float32(_REGRESSION_WEIGHT) * jnp.mean(smooth, axis=-1)
            weight = jnp.float32(_DECAY[config.kind] ** index)
            loss = loss + weight * weighted_mean(losses, weights)
            is_right = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
            metrics[f"top1/{index}"] = weighted_mean(is_right, made.weights)
        return loss, {"loss": loss} | metrics


class HeadsTask(DrafterTask):
    """Heads for a target."""

    PRODUCT = "heads"
    settings: HeadsTrainConfig

    def __init__(self, settings: HeadsTrainConfig):
        super().__init__(settings)
        self._token_map = None
        if (count := self.config.num_head_tokens) is not None:
            written = [np.array(text.output) for text in self.split.training]
            self._token_map = most_frequent(written, self.config.vocab_size, count)
        self.loss = HeadsLoss(self.config, self.target.config, self._token_map)
        self.optimizer = make_optimizer()

    def is_usable(self, text: Text) -> bool:
        """Whether every head has a label: a token of the output that is far enough from the
        beginning, within a row."""
        return self.length_of(text) > max(len(text.prompt), self.config.num_heads + 1)

    def init_params(self, key: jax.Array, frozen: PyTree) -> PyTree:
        """Heads that add nothing yet."""
        return init_heads(self.config, self.target.config, frozen, key, self._token_map)

    def evaluate(self, params: PyTree) -> dict[str, float]:
        """The accuracy of every head."""
        ranked = self._ranked(self.cast(params), self.split.held_out[:NUM_EVALUATED])
        top1 = accuracy_of(ranked)["all"].top1
        return {f"held_out/top1/{index}": share for index, share in enumerate(top1)}

    def drafter(self, params: PyTree) -> Heads:
        """The heads."""
        return Heads(self.config, self._with_map(params))

    def measure(self, params: PyTree, texts: Sequence[Text]) -> dict[str, Any]:
        """Accuracy of the heads, and the best static trees."""
        ranked = self._ranked(params, texts)
        num_tokens = self.config.num_head_tokens or self.config.vocab_size
        accuracy, trees = accuracy_of(ranked), best_trees(ranked, _TREE_NODES, num_tokens)
        return {
            "kind": self.settings.kind,
            "held_out": {name: dataclasses.asdict(each) for name, each in accuracy.items()},
            "trees": {
                str(nodes): [list(path) for path in tree.choices]
                for nodes, (tree, _) in trees.items()
            },
            "tokens_per_round": {str(nodes): tokens for nodes, (_, tokens) in trees.items()},
        }

    def _ranked(self, params: PyTree, texts: Sequence[Text]) -> list[RankedText]:
        target, params = (self.target.config, self.frozen), self._with_map(params)
        return rank_texts(self.config, params, target, texts, self.settings.sequence_length)

    def _with_map(self, params: PyTree) -> PyTree:
        if self._token_map is None:
            return params
        return params | {"token_map": jnp.array(self._token_map)}


def _as_fp32(leaf: jax.Array) -> jax.Array:
    return jnp.asarray(leaf, jnp.float32)
