"""What all training runs have in common: optimizer, checkpoints, resuming, log and progress.

A run's directory holds `checkpoint.msgpack`, `log.jsonl` and, at the end, `result.json`. A run that
was interrupted and resumed ends with the same parameters, to the bit, as one that was not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pathlib
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.progress
import xxhash
from flax import serialization, struct

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.console import Console
from jaxspec.runtime.directories import check_can_write_into, write_atomically
from jaxspec.runtime.documents import json_text
from jaxspec.runtime.files import is_file, reading
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.options import LARGEST_COUNT, LARGEST_NUMBER, check_between
from jaxspec.types import PyTree

CHECKPOINT = "checkpoint.msgpack"
LOG = "log.jsonl"
RESULT = "result.json"
LARGEST_RATE = 3e38  # of learning rates and weight decay, in fp32

OnStep: TypeAlias = Callable[[int, dict[str, float]], None]
Report: TypeAlias = Callable[[int, dict[str, float], int], None]


class StepSettings(Protocol):
    """The settings that the steps of a run need: the peak learning rate, and the steps between log
    lines, evaluations and checkpoints."""

    @property
    def learning_rate(self) -> float: ...  # noqa: D102

    @property
    def log_every(self) -> int: ...  # noqa: D102

    @property
    def evaluate_every(self) -> int: ...  # noqa: D102

    @property
    def checkpoint_every(self) -> int: ...  # noqa: D102


class TrainState(struct.PyTreeNode, kw_only=True):
    """The state of training: parameters and the optimizer's moments, fp32."""

    params: PyTree
    optimizer: PyTree


def learning_rate_schedule(
    learning_rate: float, warmup_fraction: float, num_steps: int
) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine that ends at a tenth of it."""
    num_warmup = max(1, round(warmup_fraction * num_steps))
    last_step = max(num_steps, num_warmup + 1)
    return optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, num_warmup, last_step, learning_rate / 10
    )


@functools.lru_cache
def make_optimizer(
    *,
    learning_rate: float,
    warmup_fraction: float,
    weight_decay: float,
    clip_norm: float,
    num_steps: int,
    clip_value: float | None = None,
) -> optax.GradientTransformation:
    """AdamW on gradients that are clipped by global norm or, with `clip_value`, elementwise to that
    size; only matrices decay. Equal settings give the same object."""
    schedule = learning_rate_schedule(learning_rate, warmup_fraction, num_steps)
    return _adamw(schedule, weight_decay, clip_norm, clip_value)


@functools.lru_cache
def make_unscheduled_optimizer(
    *, weight_decay: float, clip_norm: float, clip_value: float | None = None
) -> optax.GradientTransformation:
    """`make_optimizer` at learning rate 1, for steps that get their own rate (`apply_gradients`),
    so that runs with any schedule share one compiled step."""
    return _adamw(1.0, weight_decay, clip_norm, clip_value)


def _adamw(
    learning_rate: float | optax.Schedule,
    weight_decay: float,
    clip_norm: float,
    clip_value: float | None,
) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_value is None else optax.clip(clip_value),
        optax.adamw(
            learning_rate,
            b1=0.9,
            b2=0.95,
            weight_decay=weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def apply_gradients(
    state: TrainState,
    gradients: PyTree,
    optimizer: optax.GradientTransformation,
    rate: jax.Array | None = None,
) -> TrainState:
    """The state after one step of the optimizer, whose updates are multiplied by `rate` if one is
    given."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer count with floats
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
    if rate is not None:
        updates = jax.tree.map(lambda update: rate * update, updates)
    return TrainState(params=optax.apply_updates(state.params, updates), optimizer=moments)


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean of `values`, weighted by `weights` of the same shape; 0 if all weights are 0."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)


# Checkpoints


def save_checkpoint(
    path: pathlib.Path,
    state: TrainState,
    step: int,
    fingerprint: dict[str, Any],
    **described: Any,
) -> None:
    """Writes a checkpoint, complete or not at all.

    Args:
      path: that of the file.
      state: parameters and optimizer.
      step: number of steps taken.
      fingerprint: what decides the run's result.
      described: what the parameters belong to, as JSON values.
    """
    record = {
        "step": step,
        **{name: json.dumps(value) for name, value in described.items()},
        "fingerprint": json.dumps(fingerprint),
        "params": _to_arrays(state.params),
        "optimizer": _to_arrays(state.optimizer),
    }
    content = serialization.msgpack_serialize(record)
    write_atomically(path, xxhash.xxh3_128_digest(content) + content)


def read_checkpoint(path: pathlib.Path, *, command: str) -> dict[str, Any]:
    """Reads what `save_checkpoint` wrote: its checksum, then the record.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    try:
        with reading(path):
            written = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no {path.name} in {path.parent}; give the directory of a run of `{command}`."
        ) from None
    digest, content = written[:16], written[16:]
    if xxhash.xxh3_128_digest(content) != digest:
        raise CheckpointError(f"{path} is damaged, not as it was written; train again.")
    try:
        record: Any = serialization.msgpack_restore(content)
    except Exception:  # msgpack and flax have no class of their own for what they cannot read
        record = None
    return _checked(record, path)


def _checked(record: Any, path: pathlib.Path) -> dict[str, Any]:
    """A record, if it has all that `save_checkpoint` writes.

    Raises:
      CheckpointError: it has not.
    """
    fields = record if isinstance(record, dict) else {}
    step, fingerprint = fields.get("step"), json_object(fields.get("fingerprint"))
    has_arrays = all(
        isinstance(arrays := fields.get(name), dict)
        and all(isinstance(array, np.ndarray) for array in arrays.values())
        for name in ("params", "optimizer")
    )
    if type(step) is not int or step < 0 or fingerprint is None or not has_arrays:
        raise CheckpointError(
            f"{path} has the checksum of a checkpoint and not its contents, so another program "
            "wrote it; train again."
        )
    return fields


def json_object(text: Any) -> dict[str, Any] | None:
    """The JSON object in a text; None if it holds something else."""
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def initial_state(
    out: pathlib.Path,
    init: Callable[..., TrainState],
    fingerprint: Mapping[str, Any],
    *,
    operands: Sequence[PyTree] = (),
    resume: bool,
    command: str,
) -> tuple[TrainState, int]:
    """The initial state, and the number of steps taken before it.

    Args:
      out: the run's directory.
      init: makes the first state from `operands`; it is compiled.
      fingerprint: what decides the run's result.
      operands: arrays that would otherwise become constants of the program.
      resume: take the state from the checkpoint.
      command: the command that wrote it, for messages.

    Raises:
      CheckpointError: the checkpoint is damaged, or belongs to another run.
    """
    if not resume:
        return Program(jax.jit(init), "the initial weights")(*operands), 0
    record = read_checkpoint(out / CHECKPOINT, command=command)
    check_fingerprint(out, record, fingerprint)
    template = jax.eval_shape(init, *operands)
    state = TrainState(
        params=from_arrays(template.params, record["params"]),
        optimizer=from_arrays(template.optimizer, record["optimizer"]),
    )
    return state, record["step"]


def check_fingerprint(
    out: pathlib.Path, record: Mapping[str, Any], fingerprint: Mapping[str, Any]
) -> None:
    """Raises `CheckpointError` unless the checkpoint that was read was made with these values."""
    saved = json.loads(record["fingerprint"])
    if different := sorted(name for name in fingerprint if saved.get(name) != fingerprint[name]):
        raise CheckpointError(
            f"The run in {out} had other values of {', '.join(different)}; resume it with "
            "the settings and data it was started with."
        )


def checksum(params: PyTree) -> int:
    """A number that distinguishes parameters, computed leaf by leaf in order."""
    total = 0
    for leaf in jax.tree.leaves(params):
        total = zlib.crc32(np.ascontiguousarray(leaf).data, total)
    return total


def _to_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    return {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}


def from_arrays(template: PyTree, arrays: dict[str, np.ndarray]) -> PyTree:
    """A pytree like `template` with the leaves of a checkpoint."""
    leaves, treedef = jax.tree.flatten(template)
    wanted = {str(i): (leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)}
    if {name: (array.shape, array.dtype) for name, array in arrays.items()} != wanted:
        raise CheckpointError("The checkpoint's arrays do not fit its configuration; train again.")
    return jax.tree.unflatten(treedef, [jnp.asarray(arrays[name]) for name in wanted])


# A run


class OptimizerSettings(Protocol):
    """The settings of the optimizer that every run has."""

    @property
    def learning_rate(self) -> float: ...  # noqa: D102

    @property
    def warmup_fraction(self) -> float: ...  # noqa: D102

    @property
    def weight_decay(self) -> float: ...  # noqa: D102

    @property
    def clip_norm(self) -> float: ...  # noqa: D102

    @property
    def seed(self) -> int: ...  # noqa: D102


def check_positive(config: Any, *names: str, most: int = LARGEST_COUNT) -> None:
    """Raises `SettingError` unless these settings are whole numbers from 1 to `most`, or None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= 1:
            raise SettingError(f"{name} is {value}; it must be a positive number.")
        if value is not None:
            check_between(name, value, 1, most)


def check_optimizer(config: OptimizerSettings) -> None:
    """Raises `SettingError` for settings of the optimizer that nothing can be trained with."""
    check_between("learning_rate", config.learning_rate, 0, LARGEST_RATE, excludes_least=True)
    if not 0 <= config.warmup_fraction <= 1:
        raise SettingError(f"warmup_fraction is {config.warmup_fraction}; it must lie in [0, 1].")
    check_between("weight_decay", config.weight_decay, 0, LARGEST_RATE)
    check_between("clip_norm", config.clip_norm, 0, sys.float_info.max, excludes_least=True)
    check_between("seed", config.seed, 0, LARGEST_NUMBER)


@contextlib.contextmanager
def run_directory(out: pathlib.Path) -> Iterator[None]:
    """Makes this process the only one that writes to `out` while the block runs.

    Raises:
      SettingError: another process does, or nothing can be written there.
      CheckpointError: a file could not be read or written.
    """
    check_can_write_into(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with only_writer(out.resolve()):
            yield
    except OSError as error:
        raise CheckpointError(
            f"Training in {out} stopped, as a file cannot be read or written ({error}); "
            "mend that and run again, with --resume if a checkpoint was written."
        ) from error


def check_out(out: pathlib.Path, *, resume: bool) -> None:
    """Raises `CheckpointError` if there is no run to resume or, without `resume`, if there is
    one."""
    path = out / CHECKPOINT
    if resume and not is_file(path):
        raise CheckpointError(
            f"There is nothing to resume in {out}; give a run's directory or drop --resume."
        )
    if is_file(path) and not resume:
        raise CheckpointError(f"{out} already holds a run; use --resume or name another directory.")


def check_finite(loss: float, step: int, learning_rate: float) -> None:
    """Raises `SettingError` for a loss that is not finite."""
    if not math.isfinite(loss):
        raise SettingError(
            f"The loss became {loss} at step {step}; lower learning_rate "
            f"({learning_rate}) and train again."
        )


def write_result(out: pathlib.Path, result: dict[str, Any]) -> None:
    """Writes `result.json`."""
    write_atomically(out / RESULT, json_text(result, indent=2).encode() + b"\n")


def run_steps(
    config: StepSettings,
    out: pathlib.Path,
    state: TrainState,
    steps: range,
    *,
    step: Callable[[TrainState, int], tuple[TrainState, Mapping[str, Any]]],
    step_tokens: Callable[[int], int],
    evaluate: Callable[[PyTree], dict[str, float]],
    fingerprint: dict[str, Any],
    described: Mapping[str, Any],
    on_step: OnStep | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """The state after the last of `steps`, and that step's metrics; writes checkpoints and log on
    the way.

    Args:
      config: the run's.
      out: its directory.
      state: that after `steps.start` steps.
      steps: the steps to take, by index from 0.
      step: takes the state and the index of a step.
      step_tokens: tokens per step.
      evaluate: computes metrics of parameters on some held-out texts.
      fingerprint: what decides the run's result.
      described: what the parameters belong to, as JSON values for the checkpoint.
      on_step: called after every step with the number of steps taken and the step's metrics.
    """
    num_steps = steps.stop
    if steps.start > num_steps:
        raise CheckpointError(
            f"The checkpoint in {out} is of step {steps.start}, and the run ends after step "
            f"{num_steps}; it is of another run, so train again."
        )
    metrics: dict[str, float] = {"loss": math.nan}
    with progress(
        out, num_steps=num_steps, first_step=steps.start, log_every=config.log_every
    ) as report:
        for index in steps:
            state, found = step(state, index)
            num_done = index + 1
            metrics = {name: float(value) for name, value in found.items()}
            check_finite(metrics["loss"], num_done, config.learning_rate)
            if num_done % config.evaluate_every == 0 and num_done < num_steps:
                metrics |= evaluate(state.params)
            if num_done % config.checkpoint_every == 0 or num_done == num_steps:
                save_checkpoint(out / CHECKPOINT, state, num_done, fingerprint, **described)
            report(num_done, metrics, step_tokens(index))
            if on_step is not None:
                on_step(num_done, metrics)
    return state, metrics


def read_result(out: pathlib.Path) -> dict[str, Any]:
    """Reads what `write_result` wrote.

    Raises:
      CheckpointError: it is not a result.
    """
    result = json_object((out / RESULT).read_bytes())
    if result is None or not {"steps", "train_loss", "wall_s"} <= result.keys():
        raise CheckpointError(
            f"{out / RESULT} is damaged, not as it was written; remove it, and resume the run."
        )
    return result


@contextlib.contextmanager
def progress(
    out: pathlib.Path, *, num_steps: int, first_step: int, log_every: int
) -> Iterator[Report]:
    """A progress bar, a line every `log_every` steps, and the same figures in `log.jsonl`: the
    function that it yields takes the number of steps done, their metrics, and the tokens of the
    last one."""
    columns = (
        rich.progress.TextColumn("step"),
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[status]}"),
        rich.progress.TimeRemainingColumn(),
    )
    num_tokens, since_s = 0, time.perf_counter()
    with (
        rich.progress.Progress(*columns, console=Console(stderr=True)) as bar,
        (out / LOG).open("a", encoding="utf-8") as log,
    ):
        task = bar.add_task("train", total=num_steps, completed=first_step, status="")

        def report(num_done: int, metrics: dict[str, float], batch_tokens: int) -> None:
            nonlocal num_tokens, since_s
            num_tokens += batch_tokens
            bar.update(task, completed=num_done)
            if num_done % log_every and num_done != num_steps:
                return
            now_s = time.perf_counter()
            figures = {**metrics, "tokens_per_s": num_tokens / (now_s - since_s)}
            num_tokens, since_s = 0, now_s
            status = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            bar.update(task, status=status)
            bar.console.print(f"step {num_done}/{num_steps}  {status}", soft_wrap=True)
            log.write(json_text({"step": num_done, **figures}) + "\n")
            log.flush()

        yield report
