"""Heads on the disk, in our directories; `other_layouts` has those of other projects."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jaxspec.checkpoint.format import is_converted
from jaxspec.checkpoint.manifest import MAX_LAYERS, kind_of
from jaxspec.drafters.growth import Tree
from jaxspec.drafters.heads.config import HeadsConfig, Kind, param_shapes
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.heads.other_layouts import (
    check_fits,
    dtype_of,
    leaf_shapes,
    read_layout,
    stored_dtype,
)
from jaxspec.drafters.stored import (
    DrafterManifest,
    read_manifest,
    read_weights,
    write_drafter,
)
from jaxspec.kernels.base import unpacked
from jaxspec.models.base import LanguageModel, Model
from jaxspec.types import PyTree

MakeTree: TypeAlias = Callable[[int], Tree | Literal["chain"] | None]

_AGAIN = "train or fetch the heads again"
_WHAT = "heads"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsManifest(DrafterManifest):
    """The fields of `jaxspec.json` in a directory of heads.

    Attributes:
      config: architecture.
      kind: tells heads from models.
    """

    config: HeadsConfig
    kind: Literal["heads"] = "heads"


# Our directories


def save_heads(
    heads: Heads, directory: str | os.PathLike, *, target: LanguageModel | None, overwrite: bool
) -> None:
    """`save_drafter` of heads, whose tree is not stored."""
    params = unpacked(heads.params)
    write_drafter(
        directory,
        HeadsManifest,
        config=heads.config,
        params=params,
        shapes=param_shapes(heads.config),
        dtype=stored_dtype(params, leaf_shapes(heads.config)),
        name=heads.name,
        target=target,
        overwrite=overwrite,
    )


def holds_heads(directory: Path) -> bool:
    """Whether `save_drafter` wrote heads to this directory."""
    return kind_of(directory) == _WHAT


def _read_saved(
    directory: Path, target: Model, *, dtype: Any, kind: Kind | None, verify: bool
) -> tuple[HeadsConfig, PyTree]:
    """Configuration and parameters of one of our directories, placed like the target's."""
    manifest = read_manifest(
        directory,
        HeadsManifest,
        _check_ranges,
        param_shapes,
        what=_WHAT,
        again=_AGAIN,
        verify=verify,
    )
    config = manifest.config
    fitting = check_fits(config, target, directory, kind=kind)
    params = read_weights(
        directory,
        manifest,
        param_shapes(config),
        target,
        dtype=fitting if dtype is None else dtype,
        dtype_of=dtype_of,
        what=f"{config.kind} heads",
        plural=_WHAT,
        again=_AGAIN,
        verify=verify,
    )
    return config, params


def _check_ranges(manifest: HeadsManifest) -> None:
    """Raises `ValueError` for what no heads have, before anything is made of its size."""
    config = manifest.config
    counts = {"num_heads": config.num_heads, "num_layers": config.num_layers}
    if config.block is not None:
        counts["num_layers of the block"] = config.block.num_layers
    for name, count in counts.items():
        if count > MAX_LAYERS:
            raise ValueError(f"{name} is {count}")


# Loading


def load_heads(
    directory: Path,
    target: Model,
    *,
    name: str,
    dtype: Any,
    make_tree: MakeTree,
    kind: Kind | None,
    verify: bool,
) -> Heads:
    """`load_drafter` of heads in a directory; `make_tree` makes their tree of their number."""
    if is_converted(directory):
        config, params = _read_saved(directory, target, dtype=dtype, kind=kind, verify=verify)
    else:
        config, params = read_layout(directory, target, dtype=dtype, kind=kind)
    return Heads(config, params, tree=make_tree(config.num_heads), name=name)
