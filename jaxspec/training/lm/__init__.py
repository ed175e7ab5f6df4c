"""Training of a small language model from text, and distillation of a draft model from it.

A run is a function of its `TrainConfig` and its data: initial weights and the order of the rows
follow from the seed, so a run that was interrupted and resumed ends with the same parameters, to
the bit, as one that was not. Most tokens are in short rows, which cost less, and the last
`long_fraction` of them in rows of the full context.

With `schedule="trunk"` one run ends in models of several token counts (`training.trunk`): each of
its `branches` is a directory `branches/TOKENS` with its own checkpoint, log, result and `model/`,
bitwise equal to what a run with this branch alone makes.
"""

from __future__ import annotations

from jaxspec.training.lm.branches import finished_branches
from jaxspec.training.lm.saved import Run, load_run, load_teacher, save_checkpoint
from jaxspec.training.lm.settings import TrainConfig
from jaxspec.training.lm.steps import distillation_loss, held_out_loss, train_step
from jaxspec.training.lm.train import train_lm
from jaxspec.training.trunk import branch_directory

__all__ = [
    "Run",
    "TrainConfig",
    "branch_directory",
    "distillation_loss",
    "finished_branches",
    "held_out_loss",
    "load_run",
    "load_teacher",
    "save_checkpoint",
    "train_lm",
    "train_step",
]
