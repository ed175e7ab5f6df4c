"""Saved FlexDraft weights: our directories, and those of the authors' release.

The release's `config.json` is a Qwen3's with D layers; `num_target_layers` and `block_size` stand
beside its fields, and an object `dflash_config` or `flexdraft_config` states `target_layer_ids` and
`anchor_bias_rank`. Its tensors:

    layers.{i}.self_attn            q_proj, k_proj, v_proj, o_proj, q_norm, k_norm of mask rows
    mask_embedding                  what a mask row enters as
    anchor_bias_mlp.0, .2           the calibrator; its inputs are the embedding, then the state
    layers.{i}.mlp, norms           present and ignored: those of the target are used
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxspec.checkpoint.format import is_converted
from jaxspec.checkpoint.manifest import MAX_LAYERS, kind_of
from jaxspec.convert import hf_reader, hub
from jaxspec.convert.hf_config import HFConfig, config_fields
from jaxspec.convert.mapping import Leaf, attention_leaves
from jaxspec.convert.writer import assemble
from jaxspec.drafters.flexdraft.config import FlexConfig, param_shapes
from jaxspec.drafters.flexdraft.drafter import FlexDraft, check_target
from jaxspec.drafters.stored import (
    DrafterManifest,
    as_params,
    leaf_paths,
    read_manifest,
    read_weights,
    sharding_of,
    tensors_of,
    write_drafter,
    write_tensors,
)
from jaxspec.errors import ModelError
from jaxspec.kernels.base import unpacked
from jaxspec.models.base import LanguageModel, Model
from jaxspec.runtime.files import is_file
from jaxspec.types import PyTree

KIND = "flexdraft"
_AGAIN = "train or fetch the weights again"
_LARGEST = 2**20  # block size, and rank
_SECTIONS = ("flexdraft_config", "dflash_config")
_MLP = "anchor_bias_mlp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexManifest(DrafterManifest):
    """The fields of `jaxspec.json` in a directory of FlexDraft's weights.

    Attributes:
      config: sizes.
      kind: distinguishes them from models and heads.
    """

    config: FlexConfig
    kind: Literal["flexdraft"] = "flexdraft"


# Our directories


def save_flexdraft(
    drafter: FlexDraft,
    directory: str | os.PathLike,
    *,
    target: LanguageModel | None,
    overwrite: bool,
) -> None:
    """`save_drafter` for FlexDraft, whose mode, confidence, rule and block size are not stored."""
    params = unpacked(drafter.params)
    write_drafter(
        directory,
        FlexManifest,
        config=drafter.config,
        params=params,
        shapes=param_shapes(drafter.config),
        dtype=params["mask"].dtype,
        name=drafter.name,
        target=target,
        overwrite=overwrite,
    )


def holds_flexdraft(directory: Path) -> bool:
    """Whether `save_drafter` wrote FlexDraft's weights to this directory."""
    return kind_of(directory) == KIND


def load_flexdraft(
    directory: Path, target: Model, *, name: str, dtype: Any, verify: bool, **settings: Any
) -> FlexDraft:
    """`load_drafter` for FlexDraft in a directory; `settings` are those of `FlexDraft`."""
    if is_converted(directory):
        config, params = _read_saved(directory, target, dtype=dtype, verify=verify)
    else:
        config, params = _read_release(directory, target, dtype=dtype)
    return FlexDraft(config, params, name=name, **settings)


def _read_saved(
    directory: Path, target: Model, *, dtype: Any, verify: bool
) -> tuple[FlexConfig, PyTree]:
    """Sizes and parameters of one of our directories, placed like the target's."""
    manifest = read_manifest(
        directory,
        FlexManifest,
        _check_ranges,
        param_shapes,
        what="FlexDraft's weights",
        again=_AGAIN,
        verify=verify,
    )
    config = manifest.config
    check_target(config, target, str(directory))
    params = read_weights(
        directory,
        manifest,
        param_shapes(config),
        target,
        dtype=_dtype_of(target) if dtype is None else dtype,
        what="FlexDraft's weights",
        plural="FlexDraft weights",
        again=_AGAIN,
        verify=verify,
    )
    return config, params


def _check_ranges(manifest: FlexManifest) -> None:
    """Raises `ValueError` for impossible sizes, before anything of that size is made."""
    config = manifest.config
    if config.target.num_layers > MAX_LAYERS:
        raise ValueError(f"num_layers is {config.target.num_layers}")
    for name in ("block_size", "rank"):
        if getattr(config, name) > _LARGEST:
            raise ValueError(f"{name} is {getattr(config, name)}")


def _dtype_of(target: Model) -> Any:
    return target.params["embedding"].dtype


# The release: read and written


def is_release(fields: dict[str, Any]) -> bool:
    """Whether a `config.json` is one of the release's."""
    return any(isinstance(fields.get(section), dict) for section in _SECTIONS)


def fetch_release(files: Iterable[str], fetch: Callable[[list[str]], Path]) -> Path:
    """Fetches the weights of the release."""
    return fetch(["config.json", hub.weight_patterns(files)])


def _read_release(directory: Path, target: Model, *, dtype: Any) -> tuple[FlexConfig, PyTree]:
    """Sizes and parameters of a directory of the release."""
    config = _release_config(hf_reader.read_config(directory), target, directory)
    tensors = hf_reader.read_tensors(hf_reader.weight_files(directory))
    leaves = _release_leaves(config)
    expected = {name: shape for leaf in leaves for name, shape in leaf.sources.items()}
    hf_reader.check_tensors(
        {name: tensor for name, tensor in tensors.items() if not _is_unused(name)},
        expected,
        where=str(directory),
        hint="they are no weights as FlexDraft's release has them",
    )
    shapes, sharding = param_shapes(config), sharding_of(target)
    sizes = dict(leaf_paths(shapes))
    dtype = np.dtype(_dtype_of(target) if dtype is None else dtype)
    placed = {}
    for leaf in leaves:
        array = assemble(leaf, sizes[leaf.path], tensors, dtype)
        placed[leaf.path] = jax.device_put(np.ascontiguousarray(array), sharding)
    return config, as_params(shapes, placed.__getitem__)


def _release_config(hf: HFConfig, target: Model, directory: Path) -> FlexConfig:
    """The sizes that `config.json` states, for this target.

    Raises:
      ModelError: the sizes are those of another target; the weights are not for its last layers; or
        they have no calibrator.
    """
    if not isinstance(target, LanguageModel):
        raise ModelError(
            f"The FlexDraft weights in {directory} run layers of their target one by one, as only "
            f"a jaxspec.LanguageModel has them, and {target.name} is another kind of model."
        )
    own = hf.section(next(name for name in _SECTIONS if isinstance(hf.get(name), dict)))
    config = target.config
    num_deep = hf.count("num_hidden_layers", most=MAX_LAYERS)
    stated = {
        "layers": (hf.count("num_target_layers", config.num_layers), config.num_layers),
        "a width of": (hf.get("hidden_size"), config.width),
        "a vocabulary of": (hf.get("vocab_size"), config.vocab_size),
        "query heads": (hf.get("num_attention_heads"), config.num_query_heads),
        "KV heads": (hf.get("num_key_value_heads"), config.num_kv_heads),
    }
    for what, (theirs, ours) in stated.items():
        if theirs != ours:
            words = (
                (f"{what} {theirs}", f"{what} {ours}")
                if what.endswith("of")
                else (f"{theirs} {what}", f"{ours} {what}")
            )
            raise ModelError(
                f"The FlexDraft weights in {directory} were made for a target with {words[0]}, "
                f"and {target.name} has {words[1]}; use weights that were made for this target."
            )
    last = list(range(config.num_layers - num_deep, config.num_layers))
    if own.get("target_layer_ids") not in (None, last):
        raise ModelError(
            f"The FlexDraft weights in {directory} belong to the layers "
            f"{own.get('target_layer_ids')} of their target; only the last ones, here {last}, can "
            "have draft projectors."
        )
    if own.get("enable_anchor_bias_logits") is not True:
        raise ModelError(
            f"The FlexDraft weights in {directory} have no calibrator "
            "(enable_anchor_bias_logits); use weights that have one."
        )
    return FlexConfig(
        target=config,
        num_deep_layers=num_deep,
        block_size=hf.count("block_size", most=_LARGEST),
        rank=own.count("anchor_bias_rank", 256, most=_LARGEST),
    )


def _release_leaves(config: FlexConfig) -> list[Leaf]:
    """The table of the release's tensors."""
    width, rank, vocab_size = config.target.width, config.rank, config.target.vocab_size
    leaves = []
    for index in range(config.num_deep_layers):
        for leaf in attention_leaves(config.target, index):
            sources = {name.removeprefix("model."): shape for name, shape in leaf.sources.items()}
            leaves.append(Leaf(leaf.path, sources, leaf.pieces))
    both = {f"{_MLP}.0.weight": (rank, 2 * width)}
    last = {f"{_MLP}.2.weight": (vocab_size, rank)}
    return [
        *leaves,
        Leaf(("mask",), {"mask_embedding": (width,)}),
        Leaf(("calibrator", "embedding"), both, lambda w: [(..., w[:, :width].T)]),
        Leaf(("calibrator", "hidden"), both, lambda w: [(..., w[:, width:].T)]),
        Leaf(("calibrator", "hidden_bias"), {f"{_MLP}.0.bias": (rank,)}),
        Leaf(("calibrator", "logits"), last, lambda w: [(..., w.T)]),
        Leaf(("calibrator", "logits_bias"), {f"{_MLP}.2.bias": (vocab_size,)}),
    ]


def export_release(
    drafter: FlexDraft,
    directory: str | os.PathLike,
    *,
    target: LanguageModel,
    overwrite: bool,
) -> None:
    """`export_drafter` for FlexDraft, in the release's layout without the unused tensors."""
    config = drafter.config
    check_target(config, target, drafter.name)
    params = unpacked(drafter.params)
    own = {
        "target_layer_ids": list(range(config.first_deep_layer, config.target.num_layers)),
        "enable_anchor_bias_logits": True,
        "anchor_bias_rank": config.rank,
    }
    dtype = params["mask"].dtype.name
    fields = {
        **config_fields(config.target, end_of_text=None, dtype=dtype),
        "num_hidden_layers": config.num_deep_layers,
        "num_target_layers": config.target.num_layers,
        "block_size": config.block_size,
        _SECTIONS[0]: own,
    }
    write_tensors(
        directory,
        fields,
        tensors_of(_release_leaves(config), params),
        what=f"Exporting {drafter.name}",
        overwrite=overwrite,
        may_replace=_holds_release,
    )


def _holds_release(directory: Path) -> bool:
    path = directory / "config.json"
    return is_file(path) and is_release(hf_reader.read_json(path))


def _is_unused(name: str) -> bool:
    """Whether decoding does not use this tensor of the release: those of a layer outside its
    attention, and the final norm."""
    is_of_layer = name.startswith("layers.") and ".self_attn." not in name
    return is_of_layer or name == "norm.weight"
