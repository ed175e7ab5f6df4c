"""A run, from its settings to its result."""

from __future__ import annotations

import time
from typing import Any

from jaxspec.training import runs
from jaxspec.training.lm.branches import train_trunk
from jaxspec.training.lm.cosine import train_cosine
from jaxspec.training.lm.settings import TrainConfig
from jaxspec.training.lm.task import begin, check_out
from jaxspec.training.runs import OnStep


def train_lm(config: TrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains a model as `config` says and writes it to `config.out`.

    Args:
      config: the run.
      on_step: called after every step with the number of steps taken and the step's metrics.

    Returns:
      `steps`, `tokens`, `train_loss`, `held_out_loss` per domain (nats per token at `max_length`),
      `num_params`, `model` (the Hugging Face directory) and `wall_s`; with a teacher also
      `acceptance` per domain, the fields of `TextAcceptance`. For a trunk: `branches`, the same for
      every branch by its tokens (measured at `sequence_length`), `steps` and `tokens` of the trunk
      and branches together, and `wall_s`.

    Raises:
      SettingError: the settings or corpora cannot be trained on, or another process is writing to
        `config.out`.
      ModelError: the teacher's vocabulary is not the tokenizer's.
      CheckpointError: there is nothing to resume, or it belongs to another run; or `config.out`
        cannot be written.
    """
    with runs.run_directory(config.out):
        check_out(config)
        start_s = time.perf_counter()
        task = begin(config)
        result = train_trunk(task, on_step) if config.branches else train_cosine(task, on_step)
        result["wall_s"] = time.perf_counter() - start_s
        runs.write_result(config.out, result)
        return result
