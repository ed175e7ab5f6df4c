"""Training of heads on their target's texts: `jaxspec train heads`.

The target is frozen: each step runs it once, and only the heads have gradients. A run is a function
of its `HeadsTrainConfig`, its target and its texts; see `training.runs`.

With `schedule="trunk"` one run ends in heads of several token counts (`training.trunk`): each of
its `branches` is a directory `branches/TOKENS` with its own checkpoint, log, result and `heads/`,
bitwise equal to what a run with this branch alone makes.
"""

from __future__ import annotations

from jaxspec.training.heads.settings import HeadsTrainConfig
from jaxspec.training.heads.steps import heads_loss, init_heads, train_step
from jaxspec.training.heads.train import train_heads

__all__ = ["HeadsTrainConfig", "heads_loss", "init_heads", "train_heads", "train_step"]
