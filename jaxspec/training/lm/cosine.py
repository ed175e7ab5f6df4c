"""A run with one end: a cosine schedule over its tokens, the last of them in rows of the full
context."""

from __future__ import annotations

from typing import Any

from jaxspec.errors import SettingError
from jaxspec.training import data
from jaxspec.training.lm.task import Task
from jaxspec.training.runs import OnStep, make_optimizer


def train_cosine(task: Task, on_step: OnStep | None) -> dict[str, Any]:
    """A run that ends after `config.tokens`."""
    config = task.config
    plans = _plans(task)
    places = [(plan, index) for plan in plans for index in range(len(plan.start))]
    optimizer = make_optimizer(
        learning_rate=config.learning_rate,
        warmup_fraction=config.warmup_fraction,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        num_steps=len(places),
    )
    state, first_step = task.initial_state(
        config.out, optimizer, task.fingerprint, resume=config.resume
    )
    step = task.step(optimizer)
    state, metrics = task.run_steps(
        config.out,
        state,
        range(first_step, len(places)),
        step=lambda state, index: step(state, task.batch(*places[index])),
        step_tokens=lambda index: places[index][0].start.shape[1] * places[index][0].length,
        fingerprint=task.fingerprint,
        on_step=on_step,
    )
    return task.finish(
        config.out,
        state.params,
        length=config.max_length,
        num_tokens=4 * config.evaluate_tokens,
        steps=len(places),
        tokens=sum(plan.start.size * plan.length for plan in plans),
        train_loss=metrics["loss"],
    )


def _plans(task: Task) -> list[data.Plan]:
    """The short-row phase and the full-context phase; either may be empty."""
    config = task.config
    num_long = round(config.long_fraction * config.tokens)
    phases = [(config.sequence_length, config.tokens - num_long), (config.max_length, num_long)]
    plans = []
    for index, (length, num_tokens) in enumerate(phases):
        num_rows = max(1, config.batch_tokens // length)
        num_steps = round(num_tokens / (num_rows * length))
        if num_steps:
            plans.append(
                data.plan_rows(
                    [len(stream) for stream in task.streams],
                    [domain.weight for domain in task.domains],
                    num_steps=num_steps,
                    num_rows=num_rows,
                    length=length,
                    seed=(config.seed, index),
                )
            )
    if not plans:
        raise SettingError(
            f"{config.tokens} tokens are less than one step of {config.batch_tokens}; raise tokens "
            "or lower batch_tokens."
        )
    return plans
