"""What the directories of all saved drafters have in common.

jaxspec.json   the fields of a `DrafterManifest`, among them `kind`
params/        Orbax, as in a converted model
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.format import LeafPath, read_params, weights_digest, write_params
from jaxspec.checkpoint.manifest import (
    DTYPES,
    FileChecksum,
    checksums,
    kind_of,
    read_record,
    verified,
    write_record,
)
from jaxspec.convert.mapping import Leaf
from jaxspec.errors import JaxspecWarning
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.shapes import ShapeModel
from jaxspec.runtime.directories import atomic_directory, check_free_space
from jaxspec.runtime.documents import json_text
from jaxspec.types import PyTree

DtypeOf: TypeAlias = Callable[[LeafPath, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterManifest:
    """The fields of `jaxspec.json` in a directory of every kind of drafter; each kind has two more,
    `config` and `kind`.

    Attributes:
      dtype: that of the stored parameters.
      target: name of the model that they were made for; None if it was not given.
      target_weights: `weights_digest` of its parameters; None if it was not given.
      num_params: number of parameters.
      files: size in bytes and checksum of every other file, by its path in the directory.
    """

    dtype: str
    target: str | None
    target_weights: str | None
    num_params: int
    files: dict[str, FileChecksum]


# Parameters by their paths


def leaf_paths(shapes: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, tuple[int, ...]]]:
    """Path, e.g. `("layers", 0, "qkv")`, and shape of every leaf of a pytree of shapes."""
    if decoder.is_shape(shapes):
        yield path, shapes
        return
    for key, inner in shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes):
        yield from leaf_paths(inner, (*path, key))


def as_params(shapes: Any, leaf: Callable[[LeafPath], Any], path: LeafPath = ()) -> PyTree:
    """A pytree like `shapes`, whose leaves are made from their paths."""
    if decoder.is_shape(shapes):
        return leaf(path)
    if isinstance(shapes, Mapping):
        return {key: as_params(inner, leaf, (*path, key)) for key, inner in shapes.items()}
    return tuple(as_params(inner, leaf, (*path, i)) for i, inner in enumerate(shapes))


def at_path(tree: Any, path: LeafPath) -> Any:
    """The leaf of a pytree at a path."""
    for key in path:
        tree = tree[key]
    return tree


def as_floats(path: LeafPath, dtype: Any) -> np.dtype:
    """The dtype of each leaf, for parameters that all have one dtype."""
    return np.dtype(dtype)


# Our directories


def write_drafter(
    directory: str | os.PathLike,
    manifest: type[DrafterManifest],
    *,
    config: Any,
    params: PyTree,
    shapes: Any,
    dtype: Any,
    name: str,
    target: LanguageModel | None,
    overwrite: bool,
) -> None:
    """Writes a drafter, complete or not at all.

    Args:
      directory: to write.
      manifest: the manifest class of the drafter's kind.
      config: its architecture.
      params: not packed.
      shapes: those of the parameters, a pytree with a shape at each leaf.
      dtype: of the parameters.
      name: the drafter's, for messages.
      target: the model that it was made for, or None.
      overwrite: replace the directory if it holds a drafter of this kind.

    Raises:
      CheckpointError: the directory exists and may not be replaced, or the disk is full.
    """
    paths = dict(leaf_paths(shapes))
    num_params = sum(map(math.prod, paths.values()))
    kind: str = getattr(manifest, "kind")  # noqa: B009

    def may_replace(found: Path) -> bool:
        return kind_of(found) == kind

    parent = Path(directory).absolute().parent
    check_free_space(parent, num_params * np.dtype(dtype).itemsize, what=f"Saving {name}")
    with atomic_directory(directory, overwrite=overwrite, may_replace=may_replace) as partial:
        write_params(partial, ((path, at_path(params, path)) for path in paths))
        fields: dict[str, Any] = {"config": config}
        record = manifest(
            dtype=np.dtype(dtype).name,
            target=None if target is None else target.name,
            target_weights=None if target is None else weights_digest(target.params),
            num_params=num_params,
            files=checksums(partial),
            **fields,
        )
        write_record(partial, record)


def read_manifest(
    directory: Path,
    manifest: type[DrafterManifest],
    check: Callable[[Any], None],
    shapes_of: Callable[[Any], Any],
    *,
    what: str,
    again: str,
    verify: bool,
) -> Any:
    """The manifest of a saved drafter.

    Args:
      directory: the directory that holds it.
      manifest: the manifest class of the expected kind.
      check: raises `ValueError` for impossible sizes, before anything of that size is made.
      shapes_of: returns the shapes of a configuration's parameters.
      what: description of the drafter, for messages.
      again: what a user does about a directory that is damaged, for messages.
      verify: compare its own checksum too.

    Raises:
      CheckpointError: it is of another kind, or damaged.
    """

    def check_all(found: Any) -> None:
        check(found)
        num_params = sum(math.prod(shape) for _, shape in leaf_paths(shapes_of(found.config)))
        if found.num_params != num_params:
            raise ValueError(f"num_params is {found.num_params}")
        if found.dtype not in DTYPES:
            raise ValueError(f"dtype is {found.dtype[:40]!r}")

    return read_record(directory, manifest, check_all, what=what, again=again, verify=verify)


def read_weights(
    directory: Path,
    manifest: DrafterManifest,
    shapes: Any,
    target: Model,
    *,
    dtype: Any,
    dtype_of: DtypeOf = as_floats,
    what: str,
    plural: str,
    again: str,
    verify: bool,
) -> PyTree:
    """The parameters of a saved drafter, placed like the target's.

    Args:
      directory: the directory that holds them.
      manifest: that of the directory.
      shapes: those of the parameters.
      target: the model that they are to draft for.
      dtype: of the parameters.
      dtype_of: the dtype of each leaf, by its path and `dtype`.
      what: description of the weights, for messages.
      plural: their name in the warning.
      again: what a user does about a directory that is damaged, for messages.
      verify: compare the files with their checksums.

    Raises:
      CheckpointError: they cannot be read or placed; a `DamagedError` if their files have changed.

    Warns:
      JaxspecWarning: they were made for a target with other weights.
    """
    sharding = sharding_of(target)
    wanted = {
        path: jax.ShapeDtypeStruct(shape, dtype_of(path, dtype), sharding=sharding)
        for path, shape in leaf_paths(shapes)
    }
    with verified(directory, manifest.files, verify=verify, again=again):
        stored = read_params(directory, wanted, what=what, again=again)
    has_values = isinstance(target, LanguageModel) and not isinstance(target, ShapeModel)
    if manifest.target_weights is not None and has_values:
        if manifest.target_weights != weights_digest(target.params):
            warn_of_other_weights(plural, directory, manifest.target or "a model", target)
    return as_params(shapes, lambda path: at_path(stored, tuple(map(str, path))))


def sharding_of(target: Model) -> jax.sharding.Sharding:
    """Where a drafter's parameters go: to all devices of the target's parameters, replicated."""
    found = next(
        (leaf.sharding for leaf in jax.tree.leaves(target.params) if isinstance(leaf, jax.Array)),
        jax.sharding.SingleDeviceSharding(jax.local_devices()[0]),
    )
    if isinstance(found, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(found.mesh, jax.sharding.PartitionSpec())
    return found


def warn_of_other_weights(plural: str, directory: Path, made_for: str, target: Model) -> None:
    """Warns that a drafter was made for another target than this one."""
    warnings.warn(
        f"The {plural} in {directory} were made for {made_for}, whose weights are not those of "
        f"{target.name}: outputs stay the target's own, but it will accept fewer drafted tokens "
        f"than the {plural} are able to; train them on this target.",
        JaxspecWarning,
        stacklevel=5,
    )


# Layouts of other projects


def tensors_of(leaves: Iterable[Leaf], params: PyTree) -> dict[str, np.ndarray]:
    """The tensors that parameters are made from: applies a table in reverse.

    Args:
      leaves: the table.
      params: not packed.
    """
    made: dict[str, np.ndarray] = {}
    for leaf in leaves:
        parameter = np.asarray(at_path(params, leaf.path))
        for name, shape in leaf.sources.items():
            if name not in made:
                made[name] = np.empty(shape, parameter.dtype)
        own = [made[name] for name in leaf.sources]
        for index, piece in [(..., own[0])] if leaf.pieces is None else leaf.pieces(*own):
            piece[...] = parameter[index]  # a piece is a view of its tensor
    return made


def write_tensors(
    directory: str | os.PathLike,
    fields: Mapping[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    what: str,
    overwrite: bool,
    may_replace: Callable[[Path], bool],
) -> None:
    """Writes `config.json` and `model.safetensors`, complete or not at all.

    Args:
      directory: to write.
      fields: the fields of `config.json`.
      tensors: the tensors by name.
      what: description of the operation, for messages.
      overwrite: replace the directory, if `may_replace` allows it.
      may_replace: whether a given directory may be replaced.

    Raises:
      CheckpointError: the directory exists and may not be replaced, or the disk is full.
    """
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    check_free_space(Path(directory).absolute().parent, num_bytes, what=what)
    with atomic_directory(directory, overwrite=overwrite, may_replace=may_replace) as partial:
        text = json_text(fields, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
        path = partial / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors lets only the owner read it
