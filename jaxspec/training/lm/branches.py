"""A run with several ends: a trunk with a constant learning rate, and a branch for every number of
tokens."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.errors import SettingError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.directories import write_atomically
from jaxspec.training import data, runs, trunk
from jaxspec.training.lm.saved import COMMAND, TOKENIZER, save_checkpoint
from jaxspec.training.lm.settings import TrainConfig, decisive_settings
from jaxspec.training.lm.task import Task
from jaxspec.training.runs import OnStep, TrainState, make_unscheduled_optimizer
from jaxspec.training.trunk import branch_directory
from jaxspec.types import PyTree


def train_trunk(task: Task, on_step: OnStep | None) -> dict[str, Any]:
    """Trains a trunk, and every branch as soon as the trunk reaches it."""
    config, branches = task.config, task.config.planned_branches()
    plan = data.plan_rows(
        [len(stream) for stream in task.streams],
        [domain.weight for domain in task.domains],
        num_steps=branches[-1].num_steps,
        num_rows=config.num_rows,
        length=config.sequence_length,
        seed=(config.seed,),
        is_extensible=True,
    )
    _check_epochs(task, plan)
    model = _Model(task, plan, on_step)
    results, num_steps = trunk.train_trunk(config, branches, task.fingerprint, model)
    return {"steps": num_steps, "tokens": num_steps * model.step_tokens, "branches": results}


class _Model:
    """The model that a trunk trains, as `trunk.Trained`."""

    def __init__(self, task: Task, plan: data.Plan, on_step: OnStep | None):
        config = task.config
        self._task, self._plan, self._on_step = task, plan, on_step
        self._optimizer = make_unscheduled_optimizer(
            weight_decay=config.weight_decay, clip_norm=config.clip_norm
        )
        self._program = task.step(self._optimizer)
        self._teacher_hidden = _teacher_hidden(task, plan)
        self.step_tokens = plan.start.shape[1] * plan.length

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
            hidden = self._teacher_hidden
            return self._program(
                state,
                self._task.batch(self._plan, index),
                teacher_hidden=None if hidden is None else hidden(index),
                rate=rate(index),
            )

        return self._task.run_steps(
            out,
            state,
            steps,
            step=step,
            step_tokens=lambda _: self.step_tokens,
            fingerprint=fingerprint,
            on_step=self._on_step,
        )

    def begin(
        self, out: pathlib.Path, state: TrainState, step: int, fingerprint: dict[str, Any]
    ) -> None:
        write_atomically(out / TOKENIZER, self._task.tokenizer.to_str(pretty=True).encode())
        save_checkpoint(out / runs.CHECKPOINT, self._task.model, state, step, fingerprint)

    def finish(
        self, out: pathlib.Path, state: TrainState, branch: trunk.Branch, metrics: dict[str, float]
    ) -> dict[str, Any]:
        config = self._task.config
        return self._task.finish(
            out,
            state.params,
            length=config.sequence_length,
            num_tokens=config.evaluate_tokens,
            steps=branch.num_steps,
            tokens=branch.num_steps * self.step_tokens,
            train_loss=metrics["loss"],
        )


def _check_epochs(task: Task, plan: data.Plan) -> None:
    """Raises `SettingError` if a domain has too little text for the rows of a plan."""
    if (epochs := task.config.epochs) is None:
        return
    for index, (domain, stream) in enumerate(zip(task.domains, task.streams, strict=True)):
        needed = plan.length * int(np.sum(plan.stream == index))
        if needed > epochs * len(stream):
            raise SettingError(
                f"The branch of {task.config.branches[-1]} tokens takes {needed} of the domain "
                f"{domain.name}, which has {len(stream)}; give it more text or a lower weight, or "
                f"set epochs to {-(-needed // len(stream))} to let it be read so often."
            )


def _teacher_hidden(task: Task, plan: data.Plan) -> Callable[[int], np.ndarray] | None:
    """The teacher's last hidden states `[B, T, E]` of a step, from a file if one is given."""
    if (teacher := task.teacher) is None:
        return None
    last = Program(_last_hidden, "the teacher's hidden states")

    def compute(index: int) -> np.ndarray:
        batch = task.batch(plan, index)
        return np.asarray(last(teacher.config, teacher.params, batch.inputs, batch.segments))

    if task.config.teacher_states is None:
        return compute
    decisive = ("seed", "domains", "sequence_length", "token_checksums", "teacher_checksum")
    return trunk.HiddenStates(
        task.config.teacher_states,
        shape=(plan.start.shape[1], plan.length, teacher.config.width),
        origin={name: task.fingerprint[name] for name in decisive},
        compute=compute,
    )


@functools.partial(jax.jit, static_argnums=0)
def _last_hidden(teacher: ModelConfig, params: PyTree, tokens: jax.Array, segments: jax.Array):
    features = decoder.training_features(teacher, params, tokens, segments, (teacher.num_layers,))
    return features[:, :, 0]


def finished_branches(config: TrainConfig) -> dict[str, Any] | None:
    """The results of the branches of a finished trunk (see `train_lm`), otherwise None. Settings
    are compared; texts and teacher are not read.

    Raises:
      CheckpointError: the run had other settings, or is damaged.
    """
    outs = {
        branch: branch_directory(config.out, branch.tokens) for branch in config.planned_branches()
    }
    if not all((out / runs.RESULT).is_file() for out in outs.values()):
        return None
    last = list(outs.values())[-1]
    record = runs.read_checkpoint(last / runs.CHECKPOINT, command=COMMAND)
    runs.check_fingerprint(config.out, record, decisive_settings(config))
    return {branch.name: runs.read_result(out) for branch, out in outs.items()}
