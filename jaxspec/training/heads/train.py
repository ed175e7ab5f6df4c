"""A run, from its settings to its result: with one end, or a trunk with branches."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.manifest import kind_of
from jaxspec.training import drafters, runs, trunk
from jaxspec.training.heads.settings import HeadsTrainConfig
from jaxspec.training.heads.task import Task, begin
from jaxspec.training.runs import (
    OnStep,
    TrainState,
    make_optimizer,
    make_unscheduled_optimizer,
)


def train_heads(config: HeadsTrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains heads as `config` says and writes them to `config.out / "heads"`.

    Args:
      config: the run.
      on_step: called after every step with the number of steps taken and the step's metrics.

    Returns:
      `kind`, `steps`, `tokens`, `train_loss`, `num_params`, `num_texts` and `num_skipped_texts`,
      `held_out` (the fields of `HeadAccuracy` of all texts and by domain), `trees` (the choices of
      the best static tree by its number of nodes) and `tokens_per_round` (with these trees, on the
      held-out texts), `heads` (the drafter's directory), `wall_s`. For a trunk: `branches`, the
      same for every branch by its tokens, `kind`, `steps` and `tokens` of the trunk and branches
      together, and `wall_s`.

    Raises:
      SettingError: the settings cannot be trained with, or another process is writing to
        `config.out`.
      ModelError: the texts were written by another target, or none can be trained on.
      CheckpointError: the texts cannot be read; there is nothing to resume, or it belongs to
        another run; or `config.out` cannot be written.
    """
    with runs.run_directory(config.out):
        for out in config.ends.values():
            drafters.check_run(config, {out / "heads": lambda path: kind_of(path) == "heads"})
        start_s = time.perf_counter()
        task = begin(config)
        result = _train_trunk(task, on_step) if config.branches else _train_cosine(task, on_step)
        result["wall_s"] = time.perf_counter() - start_s
        runs.write_result(config.out, result)
        return result


def _train_cosine(task: Task, on_step: OnStep | None) -> dict[str, Any]:
    """A run that ends after `config.tokens`."""
    config = task.config
    optimizer = make_optimizer(
        learning_rate=config.learning_rate,
        warmup_fraction=config.warmup_fraction,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        clip_value=config.clip_value,
        num_steps=config.num_steps,
    )
    state, first_step = task.initial_state(
        config.out, optimizer, task.fingerprint, resume=config.resume
    )
    state, metrics = task.run_steps(
        config.out,
        state,
        range(first_step, config.num_steps),
        step=task.step(optimizer),
        fingerprint=task.fingerprint,
        on_step=on_step,
    )
    return task.finish(config.out, state.params, steps=config.num_steps, train_loss=metrics["loss"])


def _train_trunk(task: Task, on_step: OnStep | None) -> dict[str, Any]:
    """Trains a trunk, and every branch as soon as the trunk reaches it."""
    config = task.config
    trained = _TrunkHeads(task, on_step)
    branches = config.planned_branches()
    results, num_steps = trunk.train_trunk(config, branches, task.fingerprint, trained)
    return {
        "kind": config.kind,
        "steps": num_steps,
        "tokens": num_steps * config.step_tokens,
        "branches": results,
    }


class _TrunkHeads:
    """The heads that a trunk trains, as `trunk.Trained`."""

    def __init__(self, task: Task, on_step: OnStep | None):
        config = task.config
        self._task, self._on_step = task, on_step
        self._optimizer = make_unscheduled_optimizer(
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            clip_value=config.clip_value,
        )
        self._step = task.step(self._optimizer)

    def initial_state(
        self, out: pathlib.Path, fingerprint: dict[str, Any], *, resume: bool
    ) -> tuple[TrainState, int]:
        return self._task.initial_state(out, self._optimizer, fingerprint, resume=resume)

    def run_steps(
        self,
        out: pathlib.Path,
        state: TrainState,
        steps: range,
        *,
        rate: Callable[[int], np.float32],
        fingerprint: dict[str, Any],
    ) -> tuple[TrainState, dict[str, float]]:
        def step(state: TrainState, index: int) -> tuple[TrainState, dict[str, jax.Array]]:
            return self._step(state, index, rate=rate(index))

        return self._task.run_steps(
            out, state, steps, step=step, fingerprint=fingerprint, on_step=self._on_step
        )

    def begin(
        self, out: pathlib.Path, state: TrainState, step: int, fingerprint: dict[str, Any]
    ) -> None:
        path = out / runs.CHECKPOINT
        runs.save_checkpoint(path, state, step, fingerprint, **self._task.described)

    def finish(
        self, out: pathlib.Path, state: TrainState, branch: trunk.Branch, metrics: dict[str, float]
    ) -> dict[str, Any]:
        return self._task.finish(
            out, state.params, steps=branch.num_steps, train_loss=metrics["loss"]
        )
