"""Resolves names of models: the embedded pair, presets, directories, GGUF files, hub ids; and keeps
the cache of converted models."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import KvDtype, check_kv_dtype
from jaxspec.checkpoint.format import is_converted, load_converted, parse_dtype
from jaxspec.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    check_files,
    read_manifest,
)
from jaxspec.convert import convert_directory
from jaxspec.convert.gguf_reader import part_files
from jaxspec.convert.hub import NAMES_OF_MODELS, download
from jaxspec.convert.known import is_gguf, refuse_known
from jaxspec.errors import (
    CheckpointError,
    DamagedError,
    JaxspecWarning,
    ModelError,
    UnreadableError,
)
from jaxspec.kernels.registry import KernelsName, check_kernels
from jaxspec.models import decoder, registry
from jaxspec.models.base import LanguageModel, Model, kernels_of
from jaxspec.runtime.compilation import check_not_forked
from jaxspec.runtime.directories import (
    cache_directory,
    finish_interrupted,
    remove_directory,
    size_of_directory,
)
from jaxspec.runtime.environment import lacks_bfloat16
from jaxspec.runtime.files import expand_user, is_file, is_there, reading
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.values import check_kind, flag, text

DEMO_MODELS = {"demo-target": "target", "demo-draft": "draft"}
# Models that come with the package, and their directories in it.
PACKAGED_MODELS = {**DEMO_MODELS, "smollm2-draft": "smollm2-draft"}  # for SmolLM2-135M-Instruct


def load_model(
    src: str | os.PathLike,
    *,
    dtype: Any = None,
    revision: str | None = None,
    sharding: Any = None,
    kernels: KernelsName | None = None,
    kv_dtype: KvDtype | None = None,
    verify: bool = True,
) -> LanguageModel:
    """Loads a model by name or path.

    `src` is one of these, tried in this order: `demo-target`, `demo-draft` (the embedded pair) or
    `smollm2-draft` (a draft model for SmolLM2-135M-Instruct); `random:PRESET` (a published
    architecture with random weights, see `registry.PRESETS`); a converted directory; a GGUF file; a
    Hugging Face directory; a hub id. A Hugging Face model is converted once, into the user's cache
    directory (`$JAXSPEC_CACHE`); a GGUF file once for each `dtype`.

    Args:
      src: the name or path of the model.
      dtype: that of parameters, compute and cache; None is the checkpoint's own, and bfloat16 for a
        GGUF file that is not in float32. On a CPU float16 is then loaded as float32, as is bfloat16
        without the `native` kernels, and a warning in the log says so once. The embedded pair and
        random presets have float32 on a CPU and bfloat16 on an accelerator. On GPUs that have no
        bfloat16 (T4, V100) float16 takes its place.
      revision: branch, tag or commit of a hub id.
      sharding: a `jax.sharding.Sharding` for every parameter, or a pytree of them like the
        parameters; None is the first device of this process.
      kernels: `xla`, `native`, `mosaic` or `pallas`, see `LanguageModel`; None is `native` on a CPU
        if there is a C++ compiler, `mosaic` on a Hopper GPU, `pallas` on other GPUs, otherwise
        `xla`.
      kv_dtype: the dtype in which KV is stored, `int8` or None, see `LanguageModel`.
      verify: compare the files of a converted directory with their checksums while they are read.
        A damaged cached conversion is made again; any other damaged directory is refused.

    Raises:
      SettingError: an argument of the wrong type; the kernels are unknown or cannot be used here,
        the KV dtype is unknown, a sharding has devices of other processes or does not fit a
        parameter, or this process was forked from one that had used JAX.
      ModelError: there is no such model, or its architecture is not supported.
      CheckpointError: it cannot be read, converted or cached; `DamagedError` if its files have
        changed, `UnreadableError` if the system does not let this process read them.
    """
    check_not_forked()
    src = os.fspath(src) if isinstance(src, os.PathLike) else src
    name = text("src", src, "a name or a path")
    verify = flag("verify", verify)
    if revision is not None:
        text("revision", revision)
    for leaf in jax.tree.leaves(sharding):
        check_kind("sharding", leaf, jax.sharding.Sharding, "a Sharding, or a pytree of them")
    if kernels is not None:
        check_kernels(kernels)
    check_kv_dtype(kv_dtype)
    if dtype is None and (name in DEMO_MODELS or name.startswith("random:")):
        narrow = jnp.float16 if lacks_bfloat16() else jnp.bfloat16
        dtype = jnp.float32 if jax.default_backend() == "cpu" else narrow
    dtype = None if dtype is None else parse_dtype(dtype)
    load = functools.partial(
        load_converted,
        name=name,
        dtype=dtype,
        sharding=sharding,
        kernels=kernels,
        kv_dtype=kv_dtype,
        verify=verify,
    )
    with reading(name):
        if name in PACKAGED_MODELS:
            assets = importlib.resources.files("jaxspec") / "assets" / PACKAGED_MODELS[name]
            with importlib.resources.as_file(assets) as directory:
                return _load_cached(load, directory, name=name)
        if name.startswith("random:"):
            return registry.random_model(
                name.removeprefix("random:"),
                dtype=dtype,
                sharding=sharding,
                kernels=kernels,
                kv_dtype=kv_dtype,
            )

        directory = expand_user(name)
        finish_interrupted(directory)
        if not is_there(directory):
            commit, directory = download(name, revision)
            return _load_cached(load, directory, name=name, commit=commit)
        if is_converted(directory):
            return load(directory)
        if is_gguf(directory):
            return _load_cached(load, directory, name=directory.name, dtype=dtype)
        if is_file(directory / "config.json"):
            return _load_cached(load, directory, name=directory.resolve().name)
        refuse_known(directory)
        raise ModelError(
            f"{name} is neither a converted directory (it has no {MANIFEST}) nor a Hugging Face "
            f"one (no config.json); {NAMES_OF_MODELS}."
        )


def load_packed(src: str | os.PathLike, **options: Any) -> LanguageModel:
    """`load_model` for an engine: the weights are packed for the kernels (see `packed_model`), and
    each is freed as soon as it has been packed, so that there are never two copies of the model."""
    model = load_model(src, **options)
    params = decoder.pack_params(model.params, kernels_of(model), consume=True)
    return dataclasses.replace(model, params=params)


def as_model(model: Model | str | os.PathLike) -> Model:
    """Loads a model by name as `load_packed` does; returns a model as it is.

    Raises:
      SettingError: it is neither.
    """
    if isinstance(model, str | os.PathLike):
        return load_packed(model)
    check_kind("model", model, Model, "a model, or a name for load_model")
    return model


# The cache of converted models


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A converted model in the cache.

    Attributes:
      name: the name of its directory, for `remove_cached_model`.
      source: the name of what was converted; None if the manifest cannot be read.
      revision: the commit if the source is a hub id, otherwise None.
      path: that of the converted directory.
      dtype: that of the stored parameters; None if the manifest cannot be read.
      num_params: number of parameters; None if the manifest cannot be read.
      num_bytes: its size on the disk.
      problem: a sentence about why it cannot be loaded, or None.
      is_damaged: whether that is because its files have changed.
    """

    name: str
    source: str | None
    revision: str | None
    path: str
    dtype: str | None
    num_params: int | None
    num_bytes: int
    problem: str | None = None
    is_damaged: bool = False


def cached_models(*, verify: bool = False) -> list[CachedModel]:
    """The converted models in the cache, by name.

    Args:
      verify: read all their files and compare them with their checksums; otherwise only the
        manifests are read.

    Raises:
      UnreadableError: the system does not let this process list the cache.
    """
    root = cache_directory()
    with reading(root):
        paths = sorted(root.iterdir()) if root.is_dir() else []
        kept = [path for path in paths if path.is_dir() and not path.name.startswith(".")]
    return [_cached_model(path, verify=verify) for path in kept]


def _cached_model(path: Path, *, verify: bool) -> CachedModel:
    manifest, problem, is_damaged = None, None, False
    try:
        manifest = read_manifest(path)
        if verify:
            check_files(path, manifest)
    except CheckpointError as error:
        problem, is_damaged = str(error), isinstance(error, DamagedError)
    return CachedModel(
        name=path.name,
        source=manifest.source if manifest else None,
        revision=manifest.revision if manifest else None,
        path=str(path),
        dtype=manifest.dtype if manifest else None,
        num_params=manifest.num_params if manifest else None,
        num_bytes=size_of_directory(path),
        problem=problem,
        is_damaged=is_damaged,
    )


def remove_cached_model(name: str) -> int:
    """Removes a converted model from the cache and returns the bytes it held.

    Args:
      name: that of a `CachedModel`, or its source if no other model has the same.

    Raises:
      ModelError: no model, or more than one, has that name.
      CheckpointError: the system does not let this process remove it.
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
    try:
        remove_directory(Path(chosen[0].path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise _cache_refused(chosen[0].path, reason, "removed") from error
    return chosen[0].num_bytes


def _load_cached(
    load: Callable[[Path], LanguageModel],
    directory: Path,
    **source: Any,
) -> LanguageModel:
    """Loads the converted form of a Hugging Face directory or a GGUF file, which is made now unless
    the cache has an undamaged one; `source` are arguments of `_convert_cached`."""
    converted = _convert_cached(directory, **source)
    try:
        return load(converted)
    except DamagedError as error:
        warnings.warn(f"{error} This is being done now.", JaxspecWarning, stacklevel=3)
    except UnreadableError as error:
        raise _unreadable_in_cache(error) from error
    return load(_convert_cached(directory, **source, verify=True))


def _convert_cached(
    directory: Path,
    *,
    name: str,
    commit: str | None = None,
    dtype: Any = None,
    verify: bool = False,
) -> Path:
    """The converted form of a Hugging Face directory or GGUF file in the cache.

    If several processes want the same one, the first converts it and the others wait. A damaged one
    is converted again; with `verify` the files are checked, otherwise only the manifest.
    """
    label = re.sub(r"[^\w.-]+", "--", name).strip("-.") or "model"
    key = (commit or _content_key(directory)) + ("" if dtype is None else f" {np.dtype(dtype)}")
    digest = hashlib.sha256(f"{FORMAT_VERSION} {key}".encode()).hexdigest()[:16]
    root = cache_directory()
    destination = root / f"{label}-{digest}"
    try:
        if not verify and _is_whole(destination):
            return destination
    except UnreadableError as error:
        raise _unreadable_in_cache(error) from error
    source = name if commit or name in PACKAGED_MODELS else str(directory.resolve())
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(destination, during="conversion", wait=True))
            is_whole = _is_whole(destination, verify=verify)
            if destination.exists() and not is_whole:
                remove_directory(destination)
        except OSError as error:
            raise _cache_refused(root, error.strerror or str(error), "written") from error
        if not is_whole:
            convert_directory(directory, destination, source=source, dtype=dtype, revision=commit)
    return destination


def _is_whole(path: Path, *, verify: bool = False) -> bool:
    """Whether a converted directory exists and is undamaged; with `verify` its files are checked,
    otherwise only its manifest."""
    try:
        manifest = read_manifest(path)
        if verify:
            check_files(path, manifest)
    except UnreadableError:
        raise
    except CheckpointError:
        return False
    return True


def _unreadable_in_cache(error: UnreadableError) -> UnreadableError:
    return UnreadableError(
        error.path, error.reason, instead="name another cache directory with JAXSPEC_CACHE"
    )


def _cache_refused(path: str | os.PathLike, reason: str, what: str) -> CheckpointError:
    """The error for a file or directory of the cache that cannot be read or written."""
    return CheckpointError(
        f"The cache of converted models, {os.fspath(path)}, cannot be {what} ({reason}); name "
        "another directory with JAXSPEC_CACHE."
    )


def _content_key(directory: Path) -> str:
    """A key that changes when a file of `directory`, or a part of a GGUF file, does: config and
    index by content, other files by size and modification time."""
    parts = [str(directory.resolve())]
    files = directory.iterdir() if directory.is_dir() else part_files(directory)
    for file in sorted(path for path in files if path.is_file()):
        status = file.stat()
        parts.append(f"{file.name} {status.st_size}")
        if file.suffix == ".json" and status.st_size < 2**20:
            parts.append(hashlib.sha256(file.read_bytes()).hexdigest())
        else:
            parts.append(str(status.st_mtime_ns))
    return "\n".join(parts)
