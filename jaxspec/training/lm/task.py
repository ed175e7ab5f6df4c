"""The parts of a run: its model, its texts, its teacher."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from jaxspec.errors import CheckpointError, ModelError, SettingError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.directories import write_atomically
from jaxspec.training import data, export, runs
from jaxspec.training.acceptance import measure_acceptance
from jaxspec.training.lm.saved import COMMAND, TOKENIZER, Run, load_teacher, read_tokenizer
from jaxspec.training.lm.settings import TrainConfig, decisive_settings
from jaxspec.training.lm.steps import held_out_loss, train_step
from jaxspec.training.runs import TrainState
from jaxspec.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A run's model, texts and teacher.

    Attributes:
      config: the run.
      model: architecture.
      teacher: the model to distil from, or None.
      tokenizer: that of both.
      domains: those of the texts.
      streams: training tokens of each domain.
      held_out: held-out tokens of each domain.
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
        """The token that ends a document."""
        return data.end_of_text_id(self.tokenizer)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides a run's result: its settings, its tokens, its teacher."""
        return decisive_settings(self.config) | {
            "token_checksums": [zlib.crc32(np.ascontiguousarray(s).data) for s in self.streams],
            "teacher_checksum": (
                None if self.teacher is None else runs.checksum(self.teacher.params)
            ),
        }

    def initial_state(
        self,
        out: pathlib.Path,
        optimizer: optax.GradientTransformation,
        fingerprint: dict[str, Any],
        *,
        resume: bool,
    ) -> tuple[TrainState, int]:
        """The initial state, and the number of steps taken before it."""

        def init():
            key = jax.random.key(self.config.seed)
            params = decoder.init_params(self.model, key, jnp.float32)
            return TrainState(params=params, optimizer=optimizer.init(params))

        return runs.initial_state(out, init, fingerprint, resume=resume, command=COMMAND)

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
        """`train_step` without the state, the batch and what a trunk adds."""
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


def begin(config: TrainConfig) -> Task:
    """Reads and tokenizes the parts of a run."""
    teacher = None if config.teacher is None else load_teacher(config.teacher)
    domains = [data.Domain.parse(text) for text in config.domains]
    domains = domains or data.discover_domains(config.corpora)
    tokenizer, streams, held_out = _prepare(config, domains, _tokenizer(config, teacher))
    # A teacher's vocabulary may be padded beyond its tokenizer's.
    model = config.model_config(
        tokenizer.get_vocab_size() if teacher is None else teacher.config.vocab_size
    )
    return Task(
        config=config,
        model=model,
        teacher=teacher,
        tokenizer=tokenizer,
        domains=domains,
        streams=streams,
        held_out=held_out,
    )


def check_out(config: TrainConfig) -> None:
    """Raises if there is no run to resume or, without `resume`, if there is one."""
    runs.check_out(config.out, resume=config.resume)
    model = config.out / "model"
    if model.exists() and not export.is_hugging_face(model):
        raise CheckpointError(
            f"{model} exists, and the trained model would be written there; name another directory "
            "or move it."
        )


def _tokenizer(config: TrainConfig, teacher: Run | None) -> tokenizers.Tokenizer | None:
    """The requested tokenizer, or None if one is to be trained."""
    given = None
    if config.tokenizer is not None:
        path = config.tokenizer / TOKENIZER
        if not path.is_file():
            raise SettingError(
                f"There is no {TOKENIZER} in {config.tokenizer}; give its directory."
            )
        given = read_tokenizer(path)
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
        saved = config.out / TOKENIZER
        if config.resume and saved.is_file():
            tokenizer = read_tokenizer(saved)
        else:
            texts = [text for part in documents for text in part.train]
            tokenizer = data.train_tokenizer(texts, config.vocab_size)
    write_atomically(config.out / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    streams, held_out = [], []
    for domain, part in zip(domains, documents, strict=True):
        stem = config.out / "tokens" / domain.name
        streams.append(data.write_tokens(stem.with_suffix(".train"), part.train, tokenizer))
        held_out.append(data.write_tokens(stem.with_suffix(".held_out"), part.held_out, tokenizer))
    return tokenizer, streams, held_out
