"""The settings of a run, and which of them decide its result."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any, Literal

from jaxspec.drafters.heads.config import (
    Connection,
    Gate,
    HeadsConfig,
    Kind,
    block_config,
    heads_config,
)
from jaxspec.errors import SettingError
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.options import check_between
from jaxspec.training import runs, trunk
from jaxspec.training.drafters import DrafterTrainConfig

# Settings that do not change what is trained, besides those of every run.
_FREE_FIELDS = ("format", "tree_nodes")
# Those that a cosine run does not have, and those that a trunk is not made of.
_OF_TRUNK = ("schedule", "branches", "warmup_steps")
_FREE_OF_TRUNK = ("branches", "tokens", "warmup_fraction")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsTrainConfig(DrafterTrainConfig):
    """Settings of `jaxspec train heads`. A setting that is None has the kind's own default, see
    `heads_config`.

    Attributes:
      kind: medusa, hydra, clover or clover2.
      num_heads: number of heads, each of which proposes one token.
      num_layers: number of residual blocks of each Medusa head, or of layers of the augmenting
        block.
      own_heads: Medusa and Hydra: whether every head has its own matrix to the vocabulary, which
        starts as a copy of the target's.
      connection: Clover: how a token reaches the next head.
      gate: Clover and Clover-2: the gate of the attention decoder.
      block: Clover: which parts of the augmenting block's layers are computed.
      clip_value: replaces `clip_norm`: the largest magnitude of each component of the gradient
        (Clover-2's release: 0.5).
      schedule: `cosine` has one end, after `tokens`; `trunk` keeps a constant learning rate, and
        ends in `branches`.
      branches: for a trunk, the number of tokens of each set of heads, decay included, in
        increasing order; a finished run may be resumed with further ones.
      warmup_steps: warm-up steps of a trunk, which does not use `tokens` and `warmup_fraction`.
      format: also write the heads in another project's layout, to `out / format`: vllm for Medusa,
        clover2 for Clover-2.
      tree_nodes: sizes of the static trees that are made from the final measurements.
    """

    kind: Kind
    num_heads: int | None = None
    num_layers: int | None = None
    own_heads: bool = False
    connection: Connection | None = None
    gate: Gate | None = None
    block: Literal["whole", "attention", "none"] | None = None
    clip_value: float | None = None
    schedule: Literal["cosine", "trunk"] = "cosine"
    branches: tuple[int, ...] = ()
    warmup_steps: int = 40
    tree_nodes: tuple[int, ...] = (4, 16)

    def __post_init__(self):
        super().__post_init__()
        runs.check_positive(self, "num_heads", "num_layers")
        if self.clip_value is not None:
            check_between("clip_value", self.clip_value, 0, math.inf, excludes_least=True)
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
        for nodes in self.tree_nodes:
            if nodes < 1:
                raise SettingError(f"tree_nodes has {nodes}; a tree has at least one node.")
        trunk.check_schedule(self.schedule, self.branches)
        self.planned_branches()  # raises now, before the target is loaded

    def planned_branches(self) -> list[trunk.Branch]:
        """The branches, in steps; none for a cosine run."""
        return trunk.plan_branches(
            self.branches, step_tokens=self.step_tokens, warmup_steps=self.warmup_steps
        )

    @property
    def ends(self) -> dict[int, pathlib.Path]:
        """The directories that finished heads are written to, by steps of the run."""
        if not self.branches:
            return {self.num_steps: self.out}
        return {
            branch.num_steps: trunk.branch_directory(self.out, branch.tokens)
            for branch in self.planned_branches()
        }

    @property
    def free_fields(self) -> tuple[str, ...]:
        """Settings that do not change what is trained, besides those of every run."""
        return (*_FREE_FIELDS, *(_FREE_OF_TRUNK if self.branches else _OF_TRUNK))

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
