"""A run's model and tokenizer, written and read again."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers

from jaxspec.errors import CheckpointError, ModelError
from jaxspec.kernels.base import unpacked
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.models.tokenizer import check_repeatable
from jaxspec.runtime.files import is_file, reading
from jaxspec.training import runs
from jaxspec.training.runs import TrainState
from jaxspec.types import PyTree

COMMAND = "jaxspec train lm"
TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A model in the form that training needs: from a run's directory, or any other model as a
    teacher.

    Attributes:
      config: architecture.
      params: fp32.
      tokenizer: its tokenizer.
    """

    config: ModelConfig
    params: PyTree
    tokenizer: tokenizers.Tokenizer


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
    record = runs.read_checkpoint(directory / runs.CHECKPOINT, command=COMMAND)
    try:
        config = ModelConfig.from_json(json.loads(record["model"]))
        if config.num_layers > len(record["params"]):
            raise ModelError(f"The model has {config.num_layers} layers, of which arrays lack.")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / runs.CHECKPOINT} does not describe a model; give the directory of a run "
            f"of `{COMMAND}`."
        ) from error
    template = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0), jnp.float32))
    return Run(
        config=config,
        params=runs.from_arrays(template, record["params"]),
        tokenizer=read_tokenizer(directory / TOKENIZER),
    )


def load_teacher(name: str) -> Run:
    """The model in a run's directory, or any model that `load_model` takes.

    Raises:
      ModelError: there is no such model, or it has no tokenizer to share.
      CheckpointError: it cannot be read.
    """
    if is_file(pathlib.Path(name) / runs.CHECKPOINT):
        return load_run(pathlib.Path(name))
    model = load_model(name, dtype="float32")
    if model.tokenizer is None:
        raise ModelError(
            f"The teacher {name} has no tokenizer, and a draft is trained on its tokens; name a "
            "model with one."
        )
    tokenizer = model.tokenizer.hf.backend_tokenizer
    return Run(config=model.config, params=unpacked(model.params), tokenizer=tokenizer)


def read_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json`.

    Raises:
      CheckpointError: it cannot be read.
    """

    def unusable(reason: str) -> CheckpointError:
        return CheckpointError(f"The tokenizer {path} cannot be read ({reason}); give another.")

    with reading(path, unusable):
        found = tokenizers.Tokenizer.from_file(str(path))
    check_repeatable(found, named=f"The tokenizer {path}")
    return found
