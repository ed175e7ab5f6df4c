"""Training of a small language model from text, and distillation of a draft from it.

A run is a function of its `TrainConfig` and its data: initial weights and the order of the rows
follow from the seed, so a run that was interrupted and resumed ends with the same parameters, to
the bit, as one that was not. Most tokens are seen in short rows, which cost less, and the last
`long_fraction` of them in rows of the full context.

With `schedule="trunk"` one run ends in models of several token counts (`training.trunk`): each of
its `branches` is a directory `branches/TOKENS` with checkpoint, log, result and `model/` of its
own, equal to the bit to what a run with this branch alone makes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from jaxspec.checkpoint.resolve import load_model
from jaxspec.errors import CheckpointError, ModelError, SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.directories import write_atomically
from jaxspec.training import data, export, runs, trunk
from jaxspec.training.acceptance import measure_acceptance
from jaxspec.training.runs import (
    OnStep,
    TrainState,
    apply_gradients,
    make_optimizer,
    make_unscheduled_optimizer,
    weighted_mean,
)
from jaxspec.types import PyTree

_TOKENIZER = "tokenizer.json"
_COMMAND = "jaxspec train lm"
# Settings that do not change what is trained, so a run may be resumed with others.
_FREE_FIELDS = (
    "out",
    "corpora",
    "teacher",
    "tokenizer",
    "resume",
    "epochs",
    "log_every",
    "evaluate_every",
    "evaluate_tokens",
    "checkpoint_every",
)
# Those that a cosine run does not have, and those that a trunk is not made of: where it ends, and
# what only a run with a known end has.
_OF_TRUNK = ("schedule", "branches", "warmup_steps", "teacher_states")
_FREE_OF_TRUNK = ("branches", "teacher_states", "tokens", "long_fraction", "warmup_fraction")
_BRANCHES = "branches"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of `jaxspec train lm`.

    Attributes:
      out: directory of the run: checkpoint, tokens, log, and at the end `model/`, the Hugging Face
        checkpoint.
      corpora: directory of the domains' directories, each with JSONL files, `{"text": ...}` a line.
      domains: NAME[:SOURCE][=WEIGHT] each; SOURCE is a directory or JSONL file within `corpora`,
        or `stdlib` for the Python standard library's source. Unless given, every directory counts.
      exclude: documents whose "source" contains one of these are left out.
      schedule: `cosine` has one end; `trunk` keeps a constant rate, and ends in `branches`.
      branches: tokens of every model to be made of a trunk, its decay included, in increasing
        order; a finished run may be resumed with further ones.
      tokens: training tokens in all; of a cosine run only.
      batch_tokens: tokens of a step.
      sequence_length: tokens of a row.
      max_length: the model's context, and the row length of the last `long_fraction` of the tokens.
      long_fraction: share of the tokens that are seen at `max_length`; of a cosine run only: a
        trunk's rows, and those of its branches, all have `sequence_length` tokens.
      vocab_size: entries of the tokenizer; ignored if one is given or taken from a teacher.
      tokenizer: a directory with a `tokenizer.json` to use instead of training one.
      width: E.
      feed_forward_width: F.
      num_layers: L.
      num_query_heads: Q.
      num_kv_heads: K.
      head_size: H.
      epochs: passes that a trunk may take over the text of a domain; None is as many as it takes.
      learning_rate: peak; reached after `warmup_fraction` of the steps, then a cosine to a tenth.
      warmup_fraction: share of the steps; of a cosine run only.
      warmup_steps: of a trunk.
      weight_decay: on matrices.
      clip_norm: largest global norm of a gradient.
      teacher: model to distil from, as `load_model` takes it, or an earlier run's directory; its
        tokenizer is used.
      total_variation_weight: with a teacher, share of 1 - sum(min(p, q)), which is one minus the
        acceptance rate itself, in the loss; the rest is KL(p || q).
      teacher_states: file of the teacher's hidden states by row, to be made and used by trunks with
        the same teacher, texts and seed: two thirds of a small draft's training are the teacher's.
      resume: continue the run in `out`.
      seed: of weights and row order.
      log_every: steps between log lines.
      evaluate_every: steps between held-out losses.
      evaluate_tokens: held-out tokens per domain.
      checkpoint_every: steps between checkpoints.
    """

    out: pathlib.Path
    corpora: pathlib.Path
    domains: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    schedule: Literal["cosine", "trunk"] = "cosine"
    branches: tuple[int, ...] = ()
    tokens: int = 6_500_000
    batch_tokens: int = 2048
    sequence_length: int = 256
    max_length: int = 1024
    long_fraction: float = 0.12
    vocab_size: int = 4096
    tokenizer: pathlib.Path | None = None
    width: int = 256
    feed_forward_width: int = 640
    num_layers: int = 8
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    epochs: int | None = None
    learning_rate: float = 2.5e-3
    warmup_fraction: float = 0.04
    warmup_steps: int = 40
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    teacher: str | None = None
    total_variation_weight: float = 0.5
    teacher_states: pathlib.Path | None = None
    resume: bool = False
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 250
    evaluate_tokens: int = 16_384
    checkpoint_every: int = 100

    def __post_init__(self):
        positive = ("tokens", "batch_tokens", "sequence_length", "max_length", "vocab_size")
        every = ("log_every", "evaluate_every", "evaluate_tokens", "checkpoint_every")
        for name in (*positive, *every):
            if getattr(self, name) < 1:
                raise SettingError(
                    f"{name} is {getattr(self, name)}; it must be a positive number."
                )
        if self.sequence_length > self.max_length:
            raise SettingError(
                f"sequence_length {self.sequence_length} exceeds max_length {self.max_length}; "
                "lower the first or raise the second."
            )
        for name in ("long_fraction", "warmup_fraction", "total_variation_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"{name} is {getattr(self, name)}; it must lie in [0, 1].")
        if bool(self.branches) != (self.schedule == "trunk"):
            raise SettingError(
                f"schedule {self.schedule} was given with {len(self.branches)} branches; give "
                "branches with the schedule trunk, and only with it."
            )
        if self.teacher_states is not None and (self.teacher is None or not self.branches):
            raise SettingError(
                "teacher_states was given without a teacher and a trunk; leave it out, or give "
                "both."
            )
        self.planned_branches()  # raises now, before a corpus is read

    @property
    def num_rows(self) -> int:
        """Rows of a step, B, where they have `sequence_length` tokens."""
        return max(1, self.batch_tokens // self.sequence_length)

    def planned_branches(self) -> list[trunk.Branch]:
        """The branches by steps."""
        return trunk.plan_branches(
            self.branches,
            step_tokens=self.num_rows * self.sequence_length,
            warmup_steps=self.warmup_steps,
        )

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The Qwen3 architecture that these settings describe."""
        return ModelConfig(
            family="qwen3",
            vocab_size=vocab_size,
            width=self.width,
            feed_forward_width=self.feed_forward_width,
            num_layers=self.num_layers,
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            max_length=self.max_length,
            norm_epsilon=1e-6,
            rope=RopeConfig(theta=1e4, rotary_size=self.head_size),
            has_qk_norm=True,
            is_tied=True,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A model as training needs it: of a run's directory, or any other as a teacher.

    Attributes:
      config: architecture.
      params: fp32.
      tokenizer: its tokenizer.
    """

    config: ModelConfig
    params: PyTree
    tokenizer: tokenizers.Tokenizer


def distillation_loss(
    logits: jax.Array,
    teacher_logits: jax.Array,
    weights: jax.Array,
    *,
    total_variation_weight: float,
) -> tuple[jax.Array, jax.Array]:
    """Loss against the teacher's distribution p and the acceptance rate, both means over `weights`
    `[B, T]`.

    The loss mixes KL(p || q) with the total variation distance, which is one minus the acceptance
    rate sum(min(p, q)) of rejection sampling (2211.17192, corollary 3.6; DistillSpec, 2310.08461).
    """
    log_p = jax.nn.log_softmax(teacher_logits)
    log_q = jax.nn.log_softmax(logits)
    p = jnp.exp(log_p)
    divergence = weighted_mean(jnp.sum(p * (log_p - log_q), axis=-1), weights)
    acceptance = weighted_mean(jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=-1), weights)
    share = total_variation_weight
    return (1 - share) * divergence + share * (1 - acceptance), acceptance


@functools.partial(
    jax.jit,
    donate_argnums=0,
    static_argnames=("model", "optimizer", "teacher", "total_variation_weight"),
)
def train_step(
    state: TrainState,
    batch: data.Batch,
    teacher_params: PyTree = None,
    *,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    teacher: ModelConfig | None = None,
    total_variation_weight: float = 0.0,
    teacher_hidden: jax.Array | None = None,
    rate: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after one optimizer step, and the batch's metrics; the given state is donated.

    `teacher_hidden` `[B, T, E]`, the teacher's last hidden states, spares computing them; `rate`
    multiplies the updates of an optimizer without a schedule.
    """

    def loss_of(params):
        logits = decoder.training_logits(model, params, batch.inputs, batch.segments)
        if teacher is None:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            loss = weighted_mean(losses, batch.weights)
            return loss, {"loss": loss}
        if teacher_hidden is None:
            theirs = decoder.training_logits(teacher, teacher_params, batch.inputs, batch.segments)
        else:
            theirs = decoder.head(teacher, teacher_params, teacher_hidden)
        loss, acceptance = distillation_loss(
            logits, theirs, batch.weights, total_variation_weight=total_variation_weight
        )
        return loss, {"loss": loss, "acceptance": acceptance}

    gradients, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    metrics["gradient_norm"] = optax.tree.norm(gradients)
    return apply_gradients(state, gradients, optimizer, rate), metrics


def held_out_loss(
    model: ModelConfig, params: PyTree, windows: np.ndarray, end_of_text: int
) -> float:
    """Mean loss in nats per token over windows `[num_rows, T + 1]`; NaN without any."""
    sums = functools.partial(_LOSS_SUMS, model, params)
    loss, weight = data.add_up(sums, windows, end_of_text, 2)
    return loss / weight if weight else math.nan


def train_lm(config: TrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains a model as `config` says and writes it to `config.out`.

    Args:
      config: the run.
      on_step: called after every step with the number of steps taken and the step's metrics.

    Returns:
      `steps`, `tokens`, `train_loss`, `held_out_loss` per domain (nats per token at `max_length`),
      `num_params`, `model` (the Hugging Face directory) and `wall_s`; with a teacher also
      `acceptance` per domain, the fields of `TextAcceptance`. Of a trunk: `branches`, these of
      every branch by its tokens (measured at `sequence_length`), `steps` and `tokens` of all that
      was trained for them, and `wall_s`.

    Raises:
      SettingError: settings or corpora that cannot be trained on, or another process is writing to
        `config.out`.
      ModelError: the teacher's vocabulary is not the tokenizer's.
      CheckpointError: there is nothing to resume, or it is another run's; or `config.out` cannot be
        written.
    """
    with runs.run_directory(config.out):
        _check_out(config)
        start_s = time.perf_counter()
        task = _begin(config)
        result = _train_trunk(task, on_step) if config.branches else _train_cosine(task, on_step)
        result["wall_s"] = time.perf_counter() - start_s
        runs.write_result(config.out, result)
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """A run's model, texts and teacher.

    Attributes:
      config: the run.
      model: architecture.
      teacher: to distil from.
      tokenizer: of both.
      domains: of the texts.
      streams: training tokens of each domain.
      held_out: held-out tokens of each.
    """

    config: TrainConfig
    model: ModelConfig
    teacher: Run | None
    tokenizer: tokenizers.Tokenizer
    domains: Sequence[data.Domain]
    streams: Sequence[np.ndarray]
    held_out: Sequence[np.ndarray]

    @functools.cached_property
    def end_of_text(self) -> int:
        return data.end_of_text_id(self.tokenizer)

    def batch(self, plan: data.Plan, index: int) -> data.Batch:
        """The rows of a step of a plan."""
        return data.pack(data.cut(plan, self.streams, index), self.end_of_text)

    def windows(self, length: int, num_tokens: int) -> Iterator[tuple[str, np.ndarray]]:
        """Held-out windows of every domain."""
        for domain, stream in zip(self.domains, self.held_out, strict=True):
            cut = data.held_out_windows(stream, min(length, len(stream) - 1), num_tokens)
            yield domain.name, cut

    def held_out_losses(self, params: PyTree, length: int, num_tokens: int) -> dict[str, float]:
        """Held-out loss per domain."""
        return {
            name: held_out_loss(self.model, params, windows, self.end_of_text)
            for name, windows in self.windows(length, num_tokens)
        }

    def step(self, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
        """`train_step` but for the state, the batch and what a trunk adds."""
        teacher = self.teacher
        return functools.partial(
            Program(train_step, "the training step", shapes_vary=True),
            teacher_params=None if teacher is None else teacher.params,
            model=self.model,
            optimizer=optimizer,
            teacher=None if teacher is None else teacher.config,
            total_variation_weight=self.config.total_variation_weight,
        )

    def run_steps(
        self, out: pathlib.Path, state: TrainState, steps: range, **how: Any
    ) -> tuple[TrainState, dict[str, float]]:
        """`runs.run_steps` with the held-out losses of this model."""

        def evaluate(params: PyTree) -> dict[str, float]:
            config = self.config
            losses = self.held_out_losses(params, config.sequence_length, config.evaluate_tokens)
            return {f"held_out/{name}": loss for name, loss in losses.items()}

        described = {"model": self.model.to_json()}
        return runs.run_steps(
            self.config, out, state, steps, evaluate=evaluate, described=described, **how
        )

    def finish(
        self, out: pathlib.Path, params: PyTree, *, length: int, num_tokens: int, **figures: Any
    ) -> dict[str, Any]:
        """Writes the model; returns the result, measured on held-out windows of `length`."""
        result = {
            **figures,
            "held_out_loss": self.held_out_losses(params, length, num_tokens),
            "num_params": decoder.num_params(self.model),
            "model": str(out / "model"),
        }
        if self.teacher is not None:
            pair = (self.teacher.config, self.teacher.params), (self.model, params)
            result["acceptance"] = {
                name: dataclasses.asdict(measure_acceptance(*pair, windows, self.end_of_text))
                for name, windows in self.windows(length, num_tokens)
            }
        export.write_hugging_face(out / "model", self.model, params, self.tokenizer)
        return result


def _begin(config: TrainConfig) -> _Task:
    """Reads and tokenizes what a run is made of."""
    teacher = None if config.teacher is None else load_teacher(config.teacher)
    domains = [data.Domain.parse(text) for text in config.domains]
    domains = domains or data.discover_domains(config.corpora)
    tokenizer, streams, held_out = _prepare(config, domains, _tokenizer(config, teacher))
    # A teacher's vocabulary may be padded beyond its tokenizer's.
    model = config.model_config(
        tokenizer.get_vocab_size() if teacher is None else teacher.config.vocab_size
    )
    return _Task(
        config=config,
        model=model,
        teacher=teacher,
        tokenizer=tokenizer,
        domains=domains,
        streams=streams,
        held_out=held_out,
    )


def _train_cosine(task: _Task, on_step: OnStep | None) -> dict[str, Any]:
    """A run that ends after `config.tokens`."""
    config = task.config
    plans = _plans(config, task.domains, [len(stream) for stream in task.streams])
    places = [(plan, index) for plan in plans for index in range(len(plan.start))]
    optimizer = make_optimizer(
        learning_rate=config.learning_rate,
        warmup_fraction=config.warmup_fraction,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        num_steps=len(places),
    )
    fingerprint = _fingerprint(task)
    state, first_step = _initial_state(
        task, config.out, optimizer, fingerprint, resume=config.resume
    )
    step = task.step(optimizer)
    state, metrics = task.run_steps(
        config.out,
        state,
        range(first_step, len(places)),
        step=lambda state, index: step(state, task.batch(*places[index])),
        step_tokens=lambda index: places[index][0].start.shape[1] * places[index][0].length,
        fingerprint=fingerprint,
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


def _train_trunk(task: _Task, on_step: OnStep | None) -> dict[str, Any]:
    """A run without an end of its own, and every branch as soon as the trunk has come to it."""
    config, branches = task.config, task.config.planned_branches()
    optimizer = make_unscheduled_optimizer(
        weight_decay=config.weight_decay, clip_norm=config.clip_norm
    )
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
    fingerprint = _fingerprint(task)
    program = task.step(optimizer)
    teacher_hidden = _teacher_hidden(task, plan)

    step_tokens = plan.start.shape[1] * plan.length

    def advance(
        out: pathlib.Path, state: TrainState, steps: range, branch: trunk.Branch | None
    ) -> tuple[TrainState, dict[str, float]]:
        def step(state: TrainState, index: int) -> tuple[TrainState, dict[str, jax.Array]]:
            rate = trunk.rate_at(
                index,
                learning_rate=config.learning_rate,
                warmup_steps=config.warmup_steps,
                branch=branch,
            )
            return program(
                state,
                task.batch(plan, index),
                teacher_hidden=None if teacher_hidden is None else teacher_hidden(index),
                rate=np.float32(rate),
            )

        return task.run_steps(
            out,
            state,
            steps,
            step=step,
            step_tokens=lambda _: step_tokens,
            fingerprint=fingerprint if branch is None else fingerprint | {"branch": branch.tokens},
            on_step=on_step,
        )

    state, num_done = _initial_state(task, config.out, optimizer, fingerprint, resume=config.resume)
    results = {}
    for branch in branches:
        out = config.out / _BRANCHES / branch.name
        of_branch = fingerprint | {"branch": branch.tokens}
        if not (out / runs.CHECKPOINT).is_file():
            if num_done > branch.leaves_at:
                raise SettingError(
                    f"The trunk in {config.out} has taken {num_done} steps, and a branch of "
                    f"{branch.tokens} tokens leaves it after {branch.leaves_at}; add later "
                    "branches, or train this one in another directory."
                )
            state, _ = advance(config.out, state, range(num_done, branch.leaves_at), None)
            num_done = branch.leaves_at
            write_atomically(out / _TOKENIZER, task.tokenizer.to_str(pretty=True).encode())
            save_checkpoint(out / runs.CHECKPOINT, task.model, state, num_done, of_branch)
        if (out / runs.RESULT).is_file():
            results[branch.name] = runs.read_result(out)
            continue
        start_s = time.perf_counter()
        ending, first_step = _initial_state(task, out, optimizer, of_branch, resume=True)
        ending, metrics = advance(out, ending, range(first_step, branch.num_steps), branch)
        results[branch.name] = task.finish(
            out,
            ending.params,
            length=config.sequence_length,
            num_tokens=config.evaluate_tokens,
            steps=branch.num_steps,
            tokens=branch.num_steps * step_tokens,
            train_loss=metrics["loss"],
        ) | {"wall_s": time.perf_counter() - start_s}
        runs.write_result(out, results[branch.name])
    num_steps = branches[-1].leaves_at + sum(
        branch.num_steps - branch.leaves_at for branch in branches
    )
    return {"steps": num_steps, "tokens": num_steps * step_tokens, "branches": results}


def _check_epochs(task: _Task, plan: data.Plan) -> None:
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


def _teacher_hidden(task: _Task, plan: data.Plan) -> Callable[[int], np.ndarray] | None:
    """The teacher's last hidden states `[B, T, E]` of a step, from a file where one is given."""
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
        origin={name: _fingerprint(task)[name] for name in decisive},
        compute=compute,
    )


@functools.partial(jax.jit, static_argnums=0)
def _last_hidden(teacher: ModelConfig, params: PyTree, tokens: jax.Array, segments: jax.Array):
    features = decoder.training_features(teacher, params, tokens, segments, (teacher.num_layers,))
    return features[:, :, 0]


def save_checkpoint(
    path: pathlib.Path,
    model: ModelConfig,
    state: TrainState,
    step: int,
    fingerprint: dict[str, Any],
) -> None:
    """Writes a checkpoint of a model, complete or not at all."""
    runs.save_checkpoint(path, state, step, fingerprint, model=model.to_json())


def load_run(directory: pathlib.Path) -> Run:
    """The model of a run's directory.

    Raises:
      CheckpointError: there is no checkpoint, or it cannot be read.
    """
    record = runs.read_checkpoint(directory / runs.CHECKPOINT, command=_COMMAND)
    config = ModelConfig.from_json(json.loads(record["model"]))
    template = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0), jnp.float32))
    return Run(
        config=config,
        params=runs.from_arrays(template, record["params"]),
        tokenizer=_read_tokenizer(directory / _TOKENIZER),
    )


def finished_branches(config: TrainConfig) -> dict[str, Any] | None:
    """The results of the branches of a trunk (see `train_lm`) that is finished, else None. Settings
    are compared, texts and teacher are not read.

    Raises:
      CheckpointError: the run had other settings, or is damaged.
    """
    outs = {branch: config.out / _BRANCHES / branch.name for branch in config.planned_branches()}
    if not all((out / runs.RESULT).is_file() for out in outs.values()):
        return None
    last = list(outs.values())[-1]
    record = runs.read_checkpoint(last / runs.CHECKPOINT, command=_COMMAND)
    runs.check_fingerprint(config.out, record, _decisive_settings(config))
    return {branch.name: runs.read_result(out) for branch, out in outs.items()}


def load_teacher(name: str) -> Run:
    """The model of a run's directory, or any that `load_model` takes.

    Raises:
      ModelError: there is no such model, or it has no tokenizer to share.
      CheckpointError: it cannot be read.
    """
    if (pathlib.Path(name) / runs.CHECKPOINT).is_file():
        return load_run(pathlib.Path(name))
    model = load_model(name, dtype="float32")
    if model.tokenizer is None:
        raise ModelError(
            f"The teacher {name} has no tokenizer, and a draft is trained on its tokens; name a "
            "model with one."
        )
    tokenizer = model.tokenizer.hf.backend_tokenizer
    return Run(config=model.config, params=unpacked(model.params), tokenizer=tokenizer)


def _read_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(
            f"The tokenizer {path} cannot be read ({error}); give another."
        ) from error


@functools.partial(jax.jit, static_argnums=0)
def _loss_sums(model: ModelConfig, params: PyTree, batch: data.Batch) -> tuple[jax.Array, ...]:
    logits = decoder.training_logits(model, params, batch.inputs, batch.segments)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.sum(losses * batch.weights), jnp.sum(batch.weights)


_LOSS_SUMS = Program(_loss_sums, "the held-out loss", shapes_vary=True)


def _check_out(config: TrainConfig) -> None:
    """Raises unless a run is there to be resumed, or none is."""
    runs.check_out(config.out, resume=config.resume)
    model = config.out / "model"
    if model.exists() and not export.is_hugging_face(model):
        raise CheckpointError(
            f"{model} exists, and the trained model would be written there; name another directory "
            "or move it."
        )


def _tokenizer(config: TrainConfig, teacher: Run | None) -> tokenizers.Tokenizer | None:
    """The tokenizer that was asked for, or None if one is to be trained."""
    given = None
    if config.tokenizer is not None:
        path = config.tokenizer / _TOKENIZER
        if not path.is_file():
            raise SettingError(
                f"There is no {_TOKENIZER} in {config.tokenizer}; give its directory."
            )
        given = _read_tokenizer(path)
    if teacher is None:
        return given
    if given is not None and given.get_vocab() != teacher.tokenizer.get_vocab():
        raise ModelError(
            f"The tokenizer in {config.tokenizer} and the teacher in {config.teacher} have "
            "different vocabularies; leave the tokenizer out to use the teacher's."
        )
    return teacher.tokenizer


def _prepare(
    config: TrainConfig, domains: Sequence[data.Domain], tokenizer: tokenizers.Tokenizer | None
) -> tuple[tokenizers.Tokenizer, list[np.ndarray], list[np.ndarray]]:
    """Tokenizer, and per domain the training and the held-out token stream."""
    documents = [data.read_domain(domain, config.corpora, config.exclude) for domain in domains]
    config.out.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        saved = config.out / _TOKENIZER
        if config.resume and saved.is_file():
            tokenizer = _read_tokenizer(saved)
        else:
            texts = [text for part in documents for text in part.train]
            tokenizer = data.train_tokenizer(texts, config.vocab_size)
    write_atomically(config.out / _TOKENIZER, tokenizer.to_str(pretty=True).encode())
    streams, held_out = [], []
    for domain, part in zip(domains, documents, strict=True):
        stem = config.out / "tokens" / domain.name
        streams.append(data.write_tokens(stem.with_suffix(".train"), part.train, tokenizer))
        held_out.append(data.write_tokens(stem.with_suffix(".held_out"), part.held_out, tokenizer))
    return tokenizer, streams, held_out


def _plans(
    config: TrainConfig, domains: Sequence[data.Domain], stream_lengths: Sequence[int]
) -> list[data.Plan]:
    """The short-row phase and the full-context phase; either may be empty."""
    num_long = round(config.long_fraction * config.tokens)
    phases = [(config.sequence_length, config.tokens - num_long), (config.max_length, num_long)]
    plans = []
    for index, (length, num_tokens) in enumerate(phases):
        num_rows = max(1, config.batch_tokens // length)
        num_steps = round(num_tokens / (num_rows * length))
        if num_steps:
            plans.append(
                data.plan_rows(
                    stream_lengths,
                    [domain.weight for domain in domains],
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


def _fingerprint(task: _Task) -> dict[str, Any]:
    """What decides a run's result: its settings, its tokens, its teacher."""
    return _decisive_settings(task.config) | {
        "token_checksums": [zlib.crc32(np.ascontiguousarray(s).data) for s in task.streams],
        "teacher_checksum": None if task.teacher is None else runs.checksum(task.teacher.params),
    }


def _decisive_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide a run's result, as JSON values."""
    fields = dataclasses.asdict(config)
    free = (*_FREE_FIELDS, *(_FREE_OF_TRUNK if config.branches else _OF_TRUNK))
    kept = {name: value for name, value in fields.items() if name not in free}
    return kept | {"domains": list(config.domains), "exclude": list(config.exclude)}


def _initial_state(
    task: _Task,
    out: pathlib.Path,
    optimizer: optax.GradientTransformation,
    fingerprint: dict[str, Any],
    *,
    resume: bool,
) -> tuple[TrainState, int]:
    """The state to start from, and the steps that were taken before it."""

    def init():
        key = jax.random.key(task.config.seed)
        params = decoder.init_params(task.model, key, jnp.float32)
        return TrainState(params=params, optimizer=optimizer.init(params))

    return runs.initial_state(out, init, fingerprint, resume=resume, command=_COMMAND)
