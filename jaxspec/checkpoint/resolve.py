"""What a name means: the embedded pair, presets, directories, hub ids; and the cache of converted
models."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint.format import (
    FORMAT_VERSION,
    MANIFEST,
    is_converted,
    load_converted,
    parse_dtype,
    read_manifest,
)
from jaxspec.convert import convert_directory
from jaxspec.convert.hub import NAMES_OF_MODELS, download
from jaxspec.errors import CheckpointError, ModelError
from jaxspec.kernels.registry import KernelsName, check_kernels
from jaxspec.models import registry
from jaxspec.models.base import LanguageModel, Model
from jaxspec.runtime.directories import cache_directory, remove_directory
from jaxspec.runtime.files import expand_user
from jaxspec.runtime.other_names import refuse_other_names

DEMO_MODELS = {"demo-target": "target", "demo-draft": "draft"}


@refuse_other_names
def load_model(
    src: str | os.PathLike,
    *,
    dtype: Any = None,
    revision: str | None = None,
    sharding: Any = None,
    kernels: KernelsName | None = None,
) -> LanguageModel:
    """Loads a model by name or path.

    `src` is, in the order in which it is tried: `demo-target` or `demo-draft` (the embedded pair);
    `random:PRESET` (a published architecture with random weights, see `registry.PRESETS`); a
    converted directory; a Hugging Face directory; a hub id. A Hugging Face model is converted once,
    into the user's cache directory (`$JAXSPEC_CACHE`).

    Args:
      src: the model.
      dtype: of parameters, compute and cache; None is float32 on a CPU and the checkpoint's own
        dtype on an accelerator (bfloat16 for a random preset).
      revision: branch, tag or commit of a hub id.
      sharding: a `jax.sharding.Sharding` for every parameter, or a pytree of them like the
        parameters; None is the first device.
      kernels: `xla`, `native` or `pallas`, see `LanguageModel`; None is `native` on a CPU where
        there is a C++ compiler, otherwise `xla`.

    Raises:
      SettingError: the kernels are unknown or cannot be used here.
      ModelError: there is no such model, or its architecture is not supported.
      CheckpointError: it cannot be read, converted or cached.
    """
    name = os.fspath(src)
    if kernels is not None:
        check_kernels(kernels)
    dtype = None if dtype is None else parse_dtype(dtype)
    if name in DEMO_MODELS:
        assets = importlib.resources.files("jaxspec") / "assets" / DEMO_MODELS[name]
        with importlib.resources.as_file(assets) as directory:
            converted = _convert_cached(directory, name=name)
        return load_converted(converted, name=name, dtype=dtype, sharding=sharding, kernels=kernels)
    if name.startswith("random:"):
        if dtype is None:
            dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        return registry.random_model(
            name.removeprefix("random:"), dtype=dtype, sharding=sharding, kernels=kernels
        )

    directory = expand_user(name)
    if not os.path.exists(directory):  # also False for a name that no file can have
        commit, directory = download(name, revision)
        converted = _convert_cached(directory, name=name, commit=commit)
    elif is_converted(directory):
        converted = directory
    elif (directory / "config.json").is_file():
        converted = _convert_cached(directory, name=directory.resolve().name)
    else:
        raise ModelError(
            f"{name} is neither a converted directory (it has no {MANIFEST}) nor a Hugging Face "
            f"one (no config.json); {NAMES_OF_MODELS}."
        )
    return load_converted(converted, name=name, dtype=dtype, sharding=sharding, kernels=kernels)


def as_model(model: Model | str) -> Model:
    """The model of a name that `load_model` takes; a model as it is."""
    return load_model(model) if isinstance(model, str) else model


# The cache of converted models


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A converted model in the cache.

    Attributes:
      name: of its directory, what `remove_cached_model` takes.
      source: what was converted.
      revision: commit of a hub id, else None.
      path: of the converted directory.
      dtype: of the stored parameters.
      num_params: parameters.
      num_bytes: on the disk.
    """

    name: str
    source: str
    revision: str | None
    path: str
    dtype: str
    num_params: int
    num_bytes: int


def cached_models() -> list[CachedModel]:
    """The converted models in the cache, by name; directories that cannot be read are left out."""
    root = cache_directory()
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".") or not is_converted(path):
            continue
        try:
            fields = read_manifest(path)
        except CheckpointError:
            continue
        found.append(
            CachedModel(
                name=path.name,
                source=fields["source"],
                revision=fields["revision"],
                path=str(path),
                dtype=fields["dtype"],
                num_params=fields["num_params"],
                num_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            )
        )
    return found


def remove_cached_model(name: str) -> int:
    """Removes a converted model from the cache and returns the bytes it held.

    Args:
      name: of a `CachedModel`, or the source it was converted from if only one was.

    Raises:
      ModelError: there is none, or several, of that name.
    """
    models = cached_models()
    chosen = [model for model in models if model.name == name]
    chosen = chosen or [model for model in models if model.source == name]
    if len(chosen) != 1:
        known = ", ".join(model.name for model in chosen or models) or "nothing"
        raise ModelError(
            f"The cache {cache_directory()} has {len(chosen)} models named {name!r}; "
            f"choose one of what it holds: {known}."
        )
    remove_directory(Path(chosen[0].path))
    return chosen[0].num_bytes


def _convert_cached(directory: Path, *, name: str, commit: str | None = None) -> Path:
    """The converted form of a Hugging Face directory, made now unless the cache has it.

    If two processes convert the same model at once, each writes its own temporary directory; the
    first rename wins, and the other's work is discarded.
    """
    label = re.sub(r"[^\w.-]+", "--", name).strip("-.") or "model"
    key = commit or _content_key(directory)
    digest = hashlib.sha256(f"{FORMAT_VERSION} {key}".encode()).hexdigest()[:16]
    destination = cache_directory() / f"{label}-{digest}"
    if is_converted(destination):
        return destination
    source = name if commit or name in DEMO_MODELS else str(directory.resolve())
    try:
        convert_directory(directory, destination, source=source, revision=commit)
    except CheckpointError:
        if not is_converted(destination):
            raise
    return destination


def _content_key(directory: Path) -> str:
    """Changes when a file of `directory` does: config and index by content, the rest by size and
    time of change."""
    parts = [str(directory.resolve())]
    for file in sorted(path for path in directory.iterdir() if path.is_file()):
        status = file.stat()
        parts.append(f"{file.name} {status.st_size}")
        if file.suffix == ".json" and status.st_size < 2**20:
            parts.append(hashlib.sha256(file.read_bytes()).hexdigest())
        else:
            parts.append(str(status.st_mtime_ns))
    return "\n".join(parts)
