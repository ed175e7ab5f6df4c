"""The trainer: takes a `Task` from its first step to what it exports.

A task says what is trained: initial parameters, the rows and the loss of a step, an evaluation, an
export. The trainer owns the rest: the schedule (`training.schedule`), the optimizer step,
checkpoints (`training.checkpoints`), resuming, the log and the result.

A run's directory holds `checkpoints/`, `log.jsonl` and, at its end, `result.json` and what the task
exports. A run with branches has such a directory in `branches/TOKENS` for each of them, equal to
the bit to that of a run with this branch alone. A run that was interrupted and resumed ends with
the same parameters, to the bit, as one that was not. A signal is answered after the step in
progress, with a checkpoint.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.progress
import tyro

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.console import Console
from jaxspec.runtime.directories import check_can_write_into, write_atomically
from jaxspec.runtime.documents import json_text
from jaxspec.runtime.files import is_file
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.options import LARGEST_COUNT, LARGEST_NUMBER, check_between
from jaxspec.runtime.signals import postponed
from jaxspec.training import checkpoints
from jaxspec.training.checkpoints import TrainState
from jaxspec.training.schedule import DECAY_SHARE, Branch, branch_after, plan_branches, rate_at
from jaxspec.types import PyTree

LOG = "log.jsonl"
RESULT = "result.json"
OLD_CHECKPOINT = "checkpoint.msgpack"  # of runs up to version 0.1.0
LARGEST_RATE = 3e38  # of learning rates, in fp32
_LOG_EVERY = 20  # steps between log lines
_CLIP_NORM = 1.0

OnStep: TypeAlias = Callable[[int, dict[str, float]], None]
T = TypeVar("T")
NoOption: TypeAlias = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
"""A setting of the library that is no option of a command."""
Tokens: TypeAlias = Annotated[int | tuple[int, ...], tyro.conf.arg(metavar="INT [INT ...]")]


# Settings and tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of every run.

    Attributes:
      out: directory of the run, for checkpoints, log, result and what was trained.
      tokens: number of training tokens. Several, in increasing order, make a run with branches,
        which exports what was trained after each; a finished one may be resumed with further ones.
      minutes: end the run after so many minutes, those before a `resume` included, if it has not
        taken all `tokens` by then. It takes the warm-up at least, and measures after its end.
      batch_tokens: tokens per step.
      sequence_length: tokens per row.
      learning_rate: the peak, reached after `warmup_steps`; the last sixth of the steps lowers it
        linearly to a tenth.
      warmup_steps: number of steps of the warm-up.
      resume: continue the run in `out`.
      seed: seed of parameters and row order.
      checkpoint_every: steps between checkpoints, each followed by a measurement on held-out texts.
    """

    # Settings that do not decide what is trained, so a run may be resumed with others. `tokens`
    # decide where it ends, which the trainer adds.
    FREE: ClassVar[tuple[str, ...]] = (
        "out",
        "tokens",
        "minutes",
        "resume",
        "checkpoint_every",
    )

    out: pathlib.Path
    tokens: Tokens = 1_000_000
    minutes: float | None = None
    batch_tokens: int = 2048
    sequence_length: int = 512
    learning_rate: float = 1e-3
    warmup_steps: int = 40
    resume: bool = False
    seed: int = 0
    checkpoint_every: int = 100

    def __post_init__(self):
        check_positive(self, "batch_tokens", "sequence_length", "checkpoint_every")
        check_between("learning_rate", self.learning_rate, 0, LARGEST_RATE, excludes_least=True)
        check_between("seed", self.seed, 0, LARGEST_NUMBER)
        if self.minutes is not None:
            check_between("minutes", self.minutes, 0, LARGEST_NUMBER, excludes_least=True)
            if self.has_branches:
                raise SettingError(
                    f"minutes is {self.minutes:g}, and tokens is {self.tokens}, which says where "
                    "each branch ends; leave minutes out, or give one number of tokens."
                )
        self.ends()  # raises now, before a model or a text is read

    @property
    def has_branches(self) -> bool:
        """Whether the run has branches."""
        return isinstance(self.tokens, tuple)

    @property
    def num_rows(self) -> int:
        """B, the number of rows of a step."""
        return max(1, self.batch_tokens // self.sequence_length)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step with full rows."""
        return self.num_rows * self.sequence_length

    def ends(self) -> list[Branch]:
        """Where the run ends, in steps."""
        return plan_branches(
            self.tokens if isinstance(self.tokens, tuple) else (self.tokens,),
            step_tokens=self.step_tokens,
            warmup_steps=self.warmup_steps,
        )

    def directory(self, end: Branch) -> pathlib.Path:
        """The directory that what ends there is written to."""
        return branch_directory(self.out, end.tokens) if self.has_branches else self.out

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what is trained, as JSON values."""
        fields = dataclasses.asdict(self)
        return json.loads(json.dumps({n: fields[n] for n in fields if n not in self.FREE}))


class Task(abc.ABC):
    """What is trained. It is made from its settings, reads what it needs, and sets what follows.

    Attributes:
      settings: of the run.
      loss: takes the parameters, `frozen` and a batch; returns the loss and metrics, which are fp32
        scalars and include `loss`. It is hashable: equal losses share a compiled step.
      frozen: arrays that the loss reads and that are not trained.
      optimizer: as `make_optimizer` returns it.
      about: what the parameters belong to, as JSON values for checkpoints.
      fingerprint: everything that decides what is trained, as JSON values.
    """

    # The name of what is exported, in the directory of a run.
    PRODUCT: ClassVar[str]

    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
    frozen: PyTree = ()
    optimizer: optax.GradientTransformation
    about: dict[str, Any]
    fingerprint: dict[str, Any]

    def __init__(self, settings: Any):
        self.settings = settings

    @classmethod
    @abc.abstractmethod
    def may_replace(cls, product: pathlib.Path) -> bool:
        """Whether this directory is an earlier export, which a new one may replace."""

    @abc.abstractmethod
    def init_params(self, key: jax.Array, frozen: PyTree) -> PyTree:
        """The initial parameters, fp32; it is compiled, and `frozen` is its operand."""

    @abc.abstractmethod
    def batch(self, index: int, end: Branch | None) -> PyTree:
        """The batch of the step with this index; what differs between ends does so in their decays
        only.

        Args:
          index: from 0.
          end: where the run ends; None where that is not known yet: on the trunk of a run with
            branches, and before the decay of one with `minutes`.
        """

    @abc.abstractmethod
    def evaluate(self, params: PyTree) -> dict[str, float]:
        """Metrics on some held-out texts."""

    @abc.abstractmethod
    def export(self, params: PyTree, out: pathlib.Path) -> dict[str, Any]:
        """Writes what was trained to `out / PRODUCT`; returns figures for the result."""


def train(make_task: type[Task], settings: Any, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains a task and writes it to `settings.out`.

    Args:
      make_task: makes the task from its settings.
      settings: of the task.
      on_step: called after every step with the number of steps taken and the step's metrics.

    Returns:
      `steps`, `tokens`, `train_loss`, `num_params`, what the task's `export` returns, and `wall_s`,
      to which what the run took before it was resumed is added, up to its last checkpoint.
      With branches: `branches`, the same for every branch by its tokens, `steps` and `tokens` of
      the trunk and branches together, and `wall_s`.

    Raises:
      SettingError: the settings or texts cannot be trained with, the trunk is already past a branch
        that was not made, or another process is writing to `settings.out`.
      ModelError: models and texts do not belong together.
      CheckpointError: there is nothing to resume, or it belongs to another run; something cannot be
        read; or `settings.out` cannot be written.
    """
    with _run_directory(settings.out):
        check_out(settings.out, resume=settings.resume)
        for end in settings.ends():
            product = settings.directory(end) / make_task.PRODUCT
            if product.exists() and not make_task.may_replace(product):
                raise CheckpointError(
                    f"{product} exists, and what is trained would be written there; name another "
                    "directory or move it."
                )
        start_s = time.perf_counter() - _spent_s(settings)
        run = _Run(make_task(settings), on_step, start_s)
        result = run.grow() if settings.has_branches else run.finish(settings.ends()[0])
        result["wall_s"] = time.perf_counter() - start_s
        write_result(settings.out, result)
        return result


class _Run:
    """A run of a task, from what its directory holds to its end. It began at `start_s`, or so long
    before this process as earlier ones took."""

    def __init__(self, task: Task, on_step: OnStep | None, start_s: float):
        self._task, self._settings, self._on_step = task, task.settings, on_step
        self._start_s = start_s
        self._step = Program(train_step, "the training step", shapes_vary=True)

    def finish(self, end: Branch) -> dict[str, Any]:
        """The result of the run that ends there, or earlier if its minutes are over."""
        out = self._settings.directory(end)
        state, num_steps, metrics = self._advance(out, end.num_steps, end)
        return {
            "steps": num_steps,
            "tokens": num_steps * self._settings.step_tokens,
            "train_loss": metrics["loss"],
            "num_params": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            **self._task.export(state.params, out),
        }

    def grow(self) -> dict[str, Any]:
        """The result of a trunk, and of every branch as soon as the trunk reaches it."""
        settings, ends, results = self._settings, self._settings.ends(), {}
        found = self._checkpoint(settings.out, None)
        num_done = 0 if found is None else found[0]
        for end in ends:
            out = settings.directory(end)
            if checkpoints.latest_step(out) is None:
                if num_done > end.leaves_at:
                    raise SettingError(
                        f"The trunk in {settings.out} has taken {num_done} steps, and a branch of "
                        f"{end.tokens} tokens leaves it after {end.leaves_at}; add later branches, "
                        "or train this one in another directory."
                    )
                state, num_done, metrics = self._advance(settings.out, end.leaves_at, None)
                self._save(out, state, num_done, end, metrics)
            if not is_file(out / RESULT):
                start_s = time.perf_counter()
                result = self.finish(end)
                write_result(out, result | {"wall_s": time.perf_counter() - start_s})
            results[str(end.tokens)] = read_result(out)
        num_steps = ends[-1].leaves_at + sum(end.num_steps - end.leaves_at for end in ends)
        tokens = num_steps * settings.step_tokens
        return {"steps": num_steps, "tokens": tokens, "branches": results}

    def _advance(
        self, out: pathlib.Path, num_steps: int, end: Branch | None
    ) -> tuple[TrainState, int, dict[str, float]]:
        """Takes the run in `out` to a number of steps, writing checkpoints and log on the way;
        returns the state, the number of steps, and the last one's metrics."""
        task, settings, latest = self._task, self._settings, end
        state, num_done, metrics, end = self._state(out, end)
        if end is not None:
            num_steps = end.num_steps
        if num_done > (num_steps if end or latest is None else latest.leaves_at):
            raise CheckpointError(
                f"The checkpoint in {out} is of step {num_done}, and the run ends after step "
                f"{num_steps}; it is of another run, so train again."
            )
        how = {"loss": task.loss, "optimizer": task.optimizer}
        peak, warmup_steps = settings.learning_rate, settings.warmup_steps

        def save() -> None:
            if checkpoints.latest_step(out) != num_done:
                self._save(out, state, num_done, end, metrics)

        # A signal waits for the steps after the first, which has been compiled then.
        protected = contextlib.nullcontext()
        with _progress(out, settings.step_tokens, first=num_done) as report:
            while num_done < num_steps:
                if end is None and latest is not None and self._must_end(num_done, latest):
                    end = latest
                    if num_done < latest.leaves_at:
                        end = branch_after(num_done, step_tokens=settings.step_tokens)
                    num_steps = end.num_steps
                with protected:
                    rate = rate_at(
                        num_done, learning_rate=peak, warmup_steps=warmup_steps, branch=end
                    )
                    batch = task.batch(num_done, end)
                    state, found = self._step(state, task.frozen, batch, np.float32(rate), **how)
                    num_done += 1
                    metrics = {name: float(value) for name, value in found.items()}
                    _check_finite(metrics["loss"], num_done, settings.learning_rate)
                    is_last = num_done == num_steps
                    if num_done % settings.checkpoint_every == 0 or is_last:
                        save()
                        if not is_last:
                            metrics |= task.evaluate(state.params)
                    is_open = end is None and latest is not None
                    report(num_done, None if is_open else num_steps, metrics)
                    if self._on_step is not None:
                        self._on_step(num_done, metrics)
                protected = postponed(save)
        return state, num_done, metrics

    def _must_end(self, num_done: int, latest: Branch) -> bool:
        """Whether the decay begins now in a run with `minutes`, of which it gets its share."""
        assert self._settings.minutes is not None
        spent_s = time.perf_counter() - self._start_s
        is_over = spent_s >= (1 - DECAY_SHARE) * 60 * self._settings.minutes
        is_warm = num_done >= max(1, self._settings.warmup_steps)
        return num_done == latest.leaves_at or (is_over and is_warm)

    def _state(
        self, out: pathlib.Path, end: Branch | None
    ) -> tuple[TrainState, int, dict[str, float], Branch | None]:
        """The state in a run's directory or, in a new one, the first; the number of steps taken;
        the last one's metrics; and where the run ends, None if that is not known yet."""

        def init(frozen: PyTree) -> TrainState:
            params = self._task.init_params(jax.random.key(self._settings.seed), frozen)
            # Copies, because training donates them, and the target keeps its own.
            params = jax.tree.map(jnp.copy, params)
            return TrainState(params=params, optimizer=self._task.optimizer.init(params))

        frozen = self._task.frozen
        found = self._checkpoint(out, end)
        if found is None:
            out.mkdir(parents=True, exist_ok=True)
            first = Program(jax.jit(init), "the initial weights")
            return first(frozen), 0, {}, None if self._settings.minutes is not None else end
        step, about, end = found
        template = jax.eval_shape(init, frozen)
        state = TrainState(
            params=checkpoints.read_arrays(out, step, about, "params", template.params),
            optimizer=checkpoints.read_arrays(out, step, about, "optimizer", template.optimizer),
        )
        return state, step, about["metrics"], end

    def _checkpoint(
        self, out: pathlib.Path, end: Branch | None
    ) -> tuple[int, dict[str, Any], Branch | None] | None:
        """What `checkpoints.read_about` says of a run's directory, and where the run ends; None if
        there is no checkpoint.

        Raises:
          CheckpointError: it is of another run, or damaged.
        """
        if checkpoints.latest_step(out) is None:
            return None
        step, about = checkpoints.read_about(out)
        fingerprint = _fingerprint(self._task.fingerprint, end)
        if self._settings.minutes is not None:  # the run ends where the checkpoint's decay does
            end, fingerprint = None, self._task.fingerprint
            if (tokens := about["fingerprint"].get("tokens")) is not None:
                [chosen] = dataclasses.replace(self._settings, tokens=tokens, minutes=None).ends()
                end = chosen if step > chosen.leaves_at else None
        check_fingerprint(out, about, fingerprint)
        return step, about, end

    def _save(
        self,
        out: pathlib.Path,
        state: TrainState,
        step: int,
        end: Branch | None,
        metrics: dict[str, float],
    ) -> None:
        fingerprint = _fingerprint(self._task.fingerprint, end)
        about = {**self._task.about, "fingerprint": fingerprint, "metrics": metrics}
        about["wall_s"] = time.perf_counter() - self._start_s
        checkpoints.save(out, state, step, about)


# The step


@functools.lru_cache
def make_optimizer(*, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """AdamW at learning rate 1, whose updates `train_step` multiplies by the step's own, on
    gradients that are clipped to a global norm of 1; only matrices decay. Equal settings give the
    same object, so that their runs share a compiled step."""
    return optax.chain(
        optax.clip_by_global_norm(_CLIP_NORM),
        optax.adamw(
            1.0,
            b1=0.9,
            b2=0.95,
            weight_decay=weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("loss", "optimizer"))
def train_step(
    state: TrainState,
    frozen: PyTree,
    batch: PyTree,
    rate: jax.Array | np.float32,
    *,
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]],
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after one optimizer step at a learning rate, and the batch's metrics; the given
    state is donated. `loss`, `frozen` and `batch` are a task's."""

    def loss_of(params: PyTree) -> tuple[jax.Array, dict[str, jax.Array]]:
        return loss(params, frozen, batch)

    gradients, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    metrics["gradient_norm"] = optax.tree.norm(gradients)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer count with floats
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
    updates = jax.tree.map(lambda update: rate * update, updates)
    return TrainState(params=optax.apply_updates(state.params, updates), optimizer=moments), metrics


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean of `values`, weighted by `weights` of the same shape; 0 if all weights are 0."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def _check_finite(loss: float, step: int, learning_rate: float) -> None:
    """Raises `SettingError` for a loss that is not finite."""
    if not math.isfinite(loss):
        raise SettingError(
            f"The loss became {loss} at step {step}; lower learning_rate "
            f"({learning_rate}) and train again."
        )


# A run's directory


def branch_directory(out: pathlib.Path, tokens: int) -> pathlib.Path:
    """The directory of the branch of this many tokens, in a run's directory."""
    return out / "branches" / str(tokens)


def check_positive(settings: Any, *names: str) -> None:
    """Raises `SettingError` unless these settings are whole numbers of at least 1, or None."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= 1:
            raise SettingError(f"{name} is {value}; it must be a positive number.")
        if value is not None:
            check_between(name, value, 1, LARGEST_COUNT)


def check_out(out: pathlib.Path, *, resume: bool) -> None:
    """Raises `CheckpointError` if there is no run to resume or, without `resume`, if there is
    one."""
    if is_file(out / OLD_CHECKPOINT):
        raise CheckpointError(
            f"{out} holds a run of an earlier version, which cannot be resumed; name another "
            "directory (its weights still load)."
        )
    is_run = checkpoints.latest_step(out) is not None
    if resume and not is_run:
        raise CheckpointError(
            f"There is nothing to resume in {out}; give a run's directory or drop --resume."
        )
    if is_run and not resume:
        raise CheckpointError(f"{out} already holds a run; use --resume or name another directory.")


@contextlib.contextmanager
def _run_directory(out: pathlib.Path) -> Iterator[None]:
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


def _fingerprint(fingerprint: dict[str, Any], end: Branch | None) -> dict[str, Any]:
    """Everything that decides a state: what decides the trunk, and where the run ends."""
    return fingerprint | {"tokens": None if end is None else end.tokens}


def check_fingerprint(
    out: pathlib.Path, about: dict[str, Any], fingerprint: dict[str, Any]
) -> None:
    """Raises `CheckpointError` unless a checkpoint was made with these values."""
    saved = about["fingerprint"]
    if different := sorted(name for name in fingerprint if saved.get(name) != fingerprint[name]):
        raise CheckpointError(
            f"The run in {out} had other values of {', '.join(different)}; resume it with "
            "the settings and data it was started with."
        )


def finished_branches(settings: TrainSettings) -> dict[str, Any] | None:
    """The results of the branches of a finished run (see `train`), otherwise None. Settings are
    compared; models and texts are not read.

    Raises:
      CheckpointError: the run had other settings, or is damaged.
    """
    ends = settings.ends()
    if not all(is_file(settings.directory(end) / RESULT) for end in ends):
        return None
    last = settings.directory(ends[-1])
    check_fingerprint(last, checkpoints.read_about(last)[1], settings.decisive())
    return {str(end.tokens): read_result(settings.directory(end)) for end in ends}


def write_result(out: pathlib.Path, result: dict[str, Any]) -> None:
    """Writes `result.json`."""
    write_atomically(out / RESULT, json_text(result, indent=2).encode() + b"\n")


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


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a text; None if it holds something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _spent_s(settings: TrainSettings) -> float:
    """The seconds that a run had taken at its last checkpoint; 0 for a new one."""
    places = [settings.out, *(settings.directory(end) for end in settings.ends())]
    found = [place for place in places if checkpoints.latest_step(place) is not None]
    return max((checkpoints.read_about(each)[1].get("wall_s", 0.0) for each in found), default=0.0)


@contextlib.contextmanager
def _progress(
    out: pathlib.Path, step_tokens: int, *, first: int
) -> Iterator[Callable[[int, int | None, dict[str, float]], None]]:
    """A progress bar on a terminal, a line every so many steps, and the same figures in
    `log.jsonl`, of which lines of steps after the `first` are dropped: the function that it yields
    takes the number of steps done, that of all steps if it is known, and the step's metrics."""
    columns = (
        rich.progress.TextColumn("step"),
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[status]}"),
        rich.progress.TimeRemainingColumn(),
    )
    lines = (out / LOG).read_bytes().splitlines(keepends=True) if is_file(out / LOG) else []
    steps = [(json_object(line) or {}).get("step", math.inf) for line in lines]
    kept = [line for line, step in zip(lines, steps, strict=True) if step <= first]
    write_atomically(out / LOG, b"".join(kept))
    logged, since_s = first, time.perf_counter()
    console = Console(stderr=True)
    with (
        rich.progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        (out / LOG).open("a", encoding="utf-8") as log,
    ):
        task = bar.add_task("train", total=None, completed=first, status="")

        def report(num_done: int, num_steps: int | None, metrics: dict[str, float]) -> None:
            nonlocal logged, since_s
            bar.update(task, completed=num_done, total=num_steps)
            if num_done % _LOG_EVERY and num_done != num_steps:
                return
            now_s = time.perf_counter()
            rate = (num_done - logged) * step_tokens / (now_s - since_s)
            figures = {**metrics, "tokens_per_s": rate}
            logged, since_s = num_done, now_s
            status = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            bar.update(task, status=status)
            step = f"step {num_done}" if num_steps is None else f"step {num_done}/{num_steps}"
            console.print(f"{step}  {status}", soft_wrap=True, highlight=False)
            log.write(json_text({"step": num_done, **figures}) + "\n")
            log.flush()

        yield report
