"""Heads in the layouts of other projects: Medusa's, vLLM's, Clover-2's.

They are read as they are, and not converted first: they are small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.format import leaf_paths
from jaxspec.convert import hf_reader, hub
from jaxspec.convert.hf_config import HFConfig
from jaxspec.convert.known import refuse_known
from jaxspec.convert.mapping import Leaf
from jaxspec.drafters.heads.config import HeadsConfig, param_shapes
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.errors import CheckpointError, ModelError
from jaxspec.models.base import HeadedModel, Model
from jaxspec.runtime.files import is_there
from jaxspec.types import PyTree

from . import clover2, medusa, vllm
from .tables import Layout, Layouts, TargetSizes, Tensors, place, warn_of_other_weights

# Those that are files of their own are recognised by the files' names, the others in this order.
_LAYOUTS = (clover2.CLOVER2, medusa.MERGED, vllm.VLLM)
NAMES = (
    "name a directory that jaxspec train heads wrote, one with medusa_lm_head.safetensors or "
    "another known layout, a hub id such as FasterDecoding/medusa-vicuna-7b-v1.3, or smollm2-clover"
)
_COMPARED_ROWS = 4096  # of the target's head at once


def matches(directory: Path) -> bool:
    """Whether file names or `config.json` say that a directory holds heads. A merged model, which
    holds its target too, is a model."""
    if any(is_there(directory / own) for own in medusa.FILES):
        return True
    hf = _config(directory)
    return hf.get("clover") is not None or hf.get("model_type") == "medusa"


def fetch(files: Iterable[str], get: Callable[[list[str]], Path]) -> Path:
    """Fetches what holds heads: a file of their own, or the shards with heads of a merged model.

    Raises:
      ModelError: an index says that the shards hold none.
    """
    files = set(files)
    config = "config.json"
    for own in medusa.FILES:
        if own in files:
            return get([config, own])
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        whole = index.removesuffix(".index.json")
        if index in files and whole not in files:
            directory = get([config, index])
            stated = HFConfig(hf_reader.read_json(directory / index), index).section("weight_map")
            if not any(each.matches(_config(directory), stated.fields) for each in _LAYOUTS):
                raise _no_heads(directory)
            shards = hf_reader.shard_names(directory / index, prefix=medusa.PREFIX)
            shards = shards or hf_reader.shard_names(directory / index)
            return get([config, index, *shards])
    return get([config, hub.weight_patterns(files)])


def read(directory: Path, target: Model, dtype: Any) -> tuple[HeadsConfig, PyTree]:
    """Configuration and parameters of heads in another project's layout."""
    layout, tensors, hf = _find(directory)
    sizes = TargetSizes(
        vocab_size=target.vocab_size,
        norm_epsilon=getattr(getattr(target, "config", None), "norm_epsilon", 1e-6),
    )
    tensors_of_heads = layout.select(tensors)
    config = layout.read_config(tensors_of_heads, hf, sizes)
    fitting = Heads.fit(config, target, str(directory))
    assert isinstance(target, HeadedModel), "fit has said so"
    leaves = layout.leaves(config, tensors_of_heads, hf)
    hf_reader.check_tensors(
        tensors_of_heads,
        {name: shape for leaf in leaves for name, shape in leaf.sources.items()},
        where=str(directory),
        indices=("token_map",),
        hint=f"they are no heads as in the layout of {layout.name}",
    )
    if config.num_head_tokens is not None:
        _check_token_map(tensors_of_heads["token_map"].load(), config, directory)
    if layout is clover2.CLOVER2:
        _compare_head(config, tensors, target, directory)
    elif not config.shares_head and _all_are_the_targets(leaves, tensors_of_heads, target):
        config = dataclasses.replace(config, shares_head=True, num_head_tokens=None)
        kept = dict(leaf_paths(param_shapes(config)))
        leaves = [leaf for leaf in leaves if leaf.path in kept]
    dtype = fitting if dtype is None else dtype
    return config, place(Heads, config, leaves, tensors_of_heads, dtype, target)


def _find(directory: Path) -> tuple[Layout, dict[str, hf_reader.Tensor], HFConfig]:
    """The layout of a directory's heads, all tensors of its files, and its `config.json`.

    Raises:
      ModelError: it holds none.
      CheckpointError: a file cannot be read.
    """
    try:
        found = _match(directory)
    except CheckpointError:
        refuse_known(directory)
        raise
    if found is None:
        refuse_known(directory)
        raise _no_heads(directory)
    return found


def _match(directory: Path) -> tuple[Layout, dict[str, hf_reader.Tensor], HFConfig] | None:
    """`_find`, but None for a directory without heads."""
    hf = _config(directory)
    for own in medusa.FILES:
        if is_there(directory / own):
            tensors = hf_reader.read_tensors([directory / own])
            if medusa.MEDUSA.matches(hf, tensors):
                return medusa.MEDUSA, tensors, hf
            raise ModelError(
                f"{directory / own} holds no {{k}}.{{j}}.linear.weight, which every Medusa head "
                "has; fetch the file again."
            )
    if hf.fields:
        tensors = hf_reader.read_tensors(_weight_files(directory))
        for layout in _LAYOUTS:
            if layout.matches(hf, tensors):
                return layout, tensors, hf
    return None


def _config(directory: Path) -> HFConfig:
    """`config.json` of a directory; empty where there is none."""
    path = directory / "config.json"
    return HFConfig(hf_reader.read_json(path) if is_there(path) else {}, str(directory))


def _no_heads(directory: Path) -> ModelError:
    return ModelError(
        f"{directory} holds no heads in a layout that is known here; {NAMES}, and name a "
        "draft model as draft_model:MODEL."
    )


def _weight_files(directory: Path) -> list[Path]:
    """Of a merged model only the shards with heads, which may be the only ones that are here."""
    for index in directory.glob("*.index.json"):
        if hf_reader.shard_names(index, prefix=medusa.PREFIX):
            return hf_reader.weight_files(directory, prefix=medusa.PREFIX)
    return hf_reader.weight_files(directory)


def _check_token_map(tokens: np.ndarray, config: HeadsConfig, directory: Path) -> None:
    outside = (tokens < 0) | (tokens >= config.vocab_size)
    if outside.any() or len(np.unique(tokens)) != len(tokens):
        raise CheckpointError(
            f"The token_map in {directory} does not name {len(tokens)} different tokens below "
            f"{config.vocab_size}; fetch the file again."
        )


# The target's head in the files of heads


def _all_are_the_targets(leaves: list[Leaf], tensors: Tensors, target: HeadedModel) -> bool:
    """Whether every head's own matrix is the target's."""
    own = [leaf for leaf in leaves if leaf.path[0] == "heads" and leaf.path[-1] == "head"]
    checked: dict[tuple[str, ...], bool] = {}
    for leaf in own:
        names = tuple(leaf.sources)
        if names not in checked:
            tokens = tensors["token_map"].load() if "token_map" in tensors else None
            rows = tensors[names[0]].load()
            if tokens is not None and len(rows) == target.vocab_size:
                rows = rows[tokens]
            checked[names] = _is_targets_head(rows, target, tokens)
        if not checked[names]:
            return False
    return True


def _is_targets_head(rows: np.ndarray, target: HeadedModel, tokens: np.ndarray | None) -> bool:
    """Whether `rows` `[n, E]` are what the target's head gives `tokens` `[n]` (None: all), in the
    dtype of either."""
    if tokens is None:
        tokens = np.arange(target.vocab_size)
    if len(rows) != len(tokens):
        return False
    for start in range(0, len(tokens), _COMPARED_ROWS):
        part = slice(start, start + _COMPARED_ROWS)
        theirs = np.asarray(target.head_rows(target.params, jnp.asarray(tokens[part], jnp.int32)))
        ours = rows[part]
        with np.errstate(over="ignore"):  # of what fp16 cannot hold
            is_same = np.array_equal(ours.astype(theirs.dtype), theirs)
            is_same = is_same or np.array_equal(ours, theirs.astype(ours.dtype))
        if not is_same:
            return False
    return True


def _compare_head(
    config: HeadsConfig, tensors: Tensors, target: HeadedModel, directory: Path
) -> None:
    """Warns unless the head in the files is the target's; what embeds tokens must be that head."""
    expected = {
        name: (config.vocab_size, config.width)
        for name in (clover2.HEAD, clover2.EMBEDDING)
        if name in tensors
    }
    stored = {name: tensors[name] for name in expected}
    hint = f"they are no heads as in the layout of {clover2.CLOVER2.name}"
    hf_reader.check_tensors(stored, expected, where=str(directory), hint=hint)
    loaded = [tensor.load() for tensor in stored.values()]
    if len(loaded) == 2 and not np.array_equal(loaded[0], loaded[1]):
        raise ModelError(
            f"The heads in {directory} embed tokens with {clover2.EMBEDDING}, which differs from "
            f"{clover2.HEAD}; only heads whose embedding is the target's head can be used here."
        )
    if loaded and not _is_targets_head(loaded[0], target, None):
        warn_of_other_weights(directory, f"the model with the {clover2.HEAD} in it", target)


LAYOUTS = Layouts(matches, fetch, read, NAMES)
