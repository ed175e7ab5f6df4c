"""Runs of `jaxspec train lm`, read as models."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import xxhash
from flax import serialization

from jaxspec.errors import CheckpointError, ModelError
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.models.tokenizer import check_repeatable
from jaxspec.runtime.files import is_file, reading
from jaxspec.training import checkpoints
from jaxspec.training.trainer import OLD_CHECKPOINT
from jaxspec.types import PyTree

TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A model in the form that training needs: from a run's directory, or any other model as a
    teacher.

    Attributes:
      config: architecture.
      params: fp32; those of a teacher that is no run, in the dtype that `load_model` gives it.
      tokenizer: its tokenizer.
    """

    config: ModelConfig
    params: PyTree
    tokenizer: tokenizers.Tokenizer


def load_run(directory: pathlib.Path) -> Run:
    """The model of a run's newest checkpoint.

    Raises:
      CheckpointError: there is no checkpoint, or it cannot be read.
    """
    if is_file(directory / OLD_CHECKPOINT):
        config, params = _read_old(directory / OLD_CHECKPOINT)
    else:
        step, about = checkpoints.read_about(directory)
        config = _model_config(directory, about.get("model"))
        template = _template(config)
        params = checkpoints.read_arrays(directory, step, about, "params", template)
    return Run(config=config, params=params, tokenizer=read_tokenizer(directory / TOKENIZER))


def load_teacher(name: str) -> Run:
    """The model in a run's directory, or any model that `load_model` takes.

    Raises:
      ModelError: there is no such model, or it has no tokenizer to share.
      CheckpointError: it cannot be read.
    """
    directory = pathlib.Path(name)
    if checkpoints.latest_step(directory) is not None or is_file(directory / OLD_CHECKPOINT):
        return load_run(directory)
    model = load_model(name)
    if model.tokenizer is None:
        raise ModelError(
            f"The teacher {name} has no tokenizer, and a draft is trained on its tokens; name a "
            "model with one."
        )
    tokenizer = model.tokenizer.hf.backend_tokenizer
    return Run(config=model.config, params=model.params, tokenizer=tokenizer)


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


def _model_config(directory: pathlib.Path, fields: Any) -> ModelConfig:
    try:
        return ModelConfig.from_json(fields)
    except (KeyError, ValueError, TypeError, AttributeError, ModelError) as error:
        raise CheckpointError(
            f"The checkpoint in {directory} does not describe a model; give the directory of a run "
            "of `jaxspec train lm`."
        ) from error


def _template(config: ModelConfig) -> PyTree:
    """Shapes and dtypes of a model's parameters."""
    return jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0), jnp.float32))


def _read_old(path: pathlib.Path) -> tuple[ModelConfig, PyTree]:
    """The model in a `checkpoint.msgpack`, the file of earlier versions' runs: its checksum, then a
    msgpack map with `model` and the leaves of `params` by number.

    Raises:
      CheckpointError: it is damaged, or describes no model.
    """
    with reading(path):
        written = path.read_bytes()
    digest, content = written[:16], written[16:]
    if xxhash.xxh3_128_digest(content) != digest:
        raise CheckpointError(f"{path} is damaged, not as it was written; train again.")
    try:
        record: Any = serialization.msgpack_restore(content)
        fields, arrays = json.loads(record["model"]), record["params"]
    except Exception:  # msgpack and flax have no class of their own for what they cannot read
        fields, arrays = None, {}
    config = _model_config(path.parent, fields)
    # The template of a damaged configuration may be of any size, so it is not made for few arrays.
    if isinstance(arrays, dict) and len(arrays) >= config.num_layers:
        leaves, treedef = jax.tree.flatten(_template(config))
        found = [arrays.get(str(index)) for index in range(len(leaves))]
        if all(_is_like(array, leaf) for array, leaf in zip(found, leaves, strict=True)):
            return config, jax.tree.unflatten(treedef, [jnp.asarray(array) for array in found])
    raise CheckpointError(f"The arrays in {path} do not fit its model; train again.")


def _is_like(array: Any, leaf: jax.ShapeDtypeStruct) -> bool:
    is_array = isinstance(array, np.ndarray)
    return is_array and (array.shape, array.dtype) == (leaf.shape, leaf.dtype)
