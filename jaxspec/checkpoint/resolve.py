"""Checkpoints: save and load a `LanguageModel`; resolve whatever names a model.

A converted directory is one Orbax checkpoint and what belongs to it:

    jaxspec.json   format_version, config, dtype, eos_token_ids, prefix_token_ids,
                   generation_config, source, revision, transformers_version, num_params
    params/        Orbax: "embedding", "layers" / "0" / "qkv", ..., "final_norm", "head"
    tokenizer/     tokenizer.json and tokenizer_config.json, absent for a model without a tokenizer

It is written beside its destination and renamed when complete, so that a destination is either
absent or complete whenever the writer is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import importlib.resources
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.errors import CheckpointError, ModelError
from jaxspec.kernels.registry import KernelsName, check_kernels, default_kernels
from jaxspec.models import decoder, registry
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.runtime.directories import cache_directory
from jaxspec.runtime.other_names import refuse_other_names
from jaxspec.types import PyTree

FORMAT_VERSION = 1
MANIFEST = "jaxspec.json"
DEMO_MODELS = {"demo-target": "target", "demo-draft": "draft"}

_DTYPES = {
    "float32": jnp.float32,
    "fp32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "bf16": jnp.bfloat16,
    "float16": jnp.float16,
    "fp16": jnp.float16,
}
_SAVE_BATCH_BYTES = (
    256 * 2**20
)  # parameters handed to Orbax at once; it copies them while it writes
_READ_AHEAD_BYTES = 512 * 2**20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

LeafPath = tuple[str | int, ...]


# Names, dtypes, leaves


def parse_dtype(dtype: Any) -> jnp.dtype:
    """The numpy dtype of `float32`, `bfloat16`, `float16` (or `fp32`, `bf16`, `fp16`, or a dtype).

    Raises:
      ModelError: any other dtype.
    """
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    with contextlib.suppress(TypeError):
        if chosen is not None and jnp.dtype(chosen) in _DTYPES.values():
            return jnp.dtype(chosen)
    raise ModelError(f"The dtype {dtype!r} is not supported; choose float32, bfloat16 or float16.")


def leaf_shapes(config: ModelConfig) -> dict[LeafPath, tuple[int, ...]]:
    """Shape of every parameter by its path, e.g. `("layers", 0, "qkv")`, in the order of the
    layers."""
    shapes = decoder.param_shapes(config)
    leaves: dict[LeafPath, tuple[int, ...]] = {("embedding",): shapes["embedding"]}
    for index, layer in enumerate(shapes["layers"]):
        leaves |= {("layers", index, name): shape for name, shape in layer.items()}
    return leaves | {(name,): shapes[name] for name in ("final_norm", "head") if name in shapes}


def _nest(leaves: Mapping[LeafPath, Any]) -> dict[str, Any]:
    """Nested dicts with string keys, which is how Orbax stores the tuple of layers."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = leaf
    return tree


def _as_params(stored: Mapping[str, Any]) -> PyTree:
    """The decoder's pytree of what `_nest` made: layers become a tuple again."""
    layers = stored["layers"]
    return {**stored, "layers": tuple(layers[str(index)] for index in range(len(layers)))}


# Writing


def is_converted(path: str | os.PathLike) -> bool:
    """Whether `path` is a converted directory."""
    return (Path(path) / MANIFEST).is_file()


@contextlib.contextmanager
def atomic_directory(destination: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory beside `destination` that becomes it when the block ends well.

    If the block raises, the directory is removed; if the process is killed, it stays after as
    `.NAME.partial-HOST-PID-...` until the next write to the same destination removes it. With
    `overwrite`, the old directory is moved aside first, so between two renames the destination is
    absent; it is never a mixture.

    Raises:
      CheckpointError: the destination exists and `overwrite` is false, or it is something else
        than a converted directory; or the disk is full.
    """
    destination = Path(destination).absolute()
    if destination.exists() and not overwrite:
        raise CheckpointError(
            f"{destination} exists already; name another destination, or allow it to be "
            "overwritten (--overwrite)."
        )
    if destination.exists() and not is_converted(destination) and not _is_empty(destination):
        raise CheckpointError(
            f"{destination} exists and is not a converted directory, so it is not overwritten; "
            "name another destination or remove it yourself."
        )
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(destination)
        working = _sibling(destination)
        working.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"{destination} cannot be created ({error.strerror or error}); "
            "name a directory that can be written."
        ) from error
    try:
        yield working
        _move_into_place(working, destination, overwrite=overwrite)
    except Exception as error:
        if _is_disk_full(error):
            raise CheckpointError(
                f"The disk of {destination.parent} filled up while {destination.name} was written; "
                "free some space or name a destination on another disk (nothing was left after)."
            ) from error
        raise
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _sibling(destination: Path) -> Path:
    owner = f"{socket.gethostname()}-{os.getpid()}"
    return destination.with_name(f".{destination.name}.partial-{owner}-{secrets.token_hex(4)}")


def _remove_stale(destination: Path) -> None:
    """Removes what killed writers on this host left of `destination`."""
    prefix = f".{destination.name}.partial-{socket.gethostname()}-"
    for left in destination.parent.iterdir():
        if not left.name.startswith(prefix):
            continue
        pid, _, _ = left.name.removeprefix(prefix).partition("-")
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _move_into_place(working: Path, destination: Path, *, overwrite: bool) -> None:
    replaced = None
    if overwrite and destination.exists():
        replaced = _sibling(destination)
        os.rename(destination, replaced)
    try:
        os.rename(working, destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise CheckpointError(
            f"{destination} was created by another process meanwhile; use it, or name another "
            "destination."
        ) from error
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def check_free_space(directory: str | os.PathLike, num_bytes: int, *, what: str) -> None:
    """Raises `CheckpointError` unless the disk of `directory` has room for `num_bytes` more."""
    existing = Path(directory).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise CheckpointError(
            f"{what} needs {num_bytes / 2**30:.2f} GiB below {directory}, where "
            f"{free / 2**30:.2f} GiB are free; free some space or use another disk."
        )


def write_params(directory: Path, leaves: Iterable[tuple[LeafPath, Any]]) -> None:
    """Writes parameters to `directory / "params"` in batches, holding no more than one batch.

    Args:
      directory: of the checkpoint.
      leaves: path and array (numpy, mapped or not, or `jax.Array`); made when they are asked for.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    path = str(directory / "params")
    context = ocp.Context()
    context.array.saving.use_compression = False  # weights hardly compress
    # Each save waits for the one before it, so no one changes an array under Orbax's hands.
    context.memory.deepcopy_host_arrays = False
    batch: dict[LeafPath, Any] = {}

    def save() -> None:
        num_bytes = sum(leaf.nbytes for leaf in batch.values())
        check_free_space(directory.parent, num_bytes, what="The next part of the checkpoint")
        ocp.partial.save(path, _nest(batch))
        batch.clear()

    with _quiet_orbax(), context:
        for leaf_path, leaf in leaves:
            if batch and sum(held.nbytes for held in batch.values()) + leaf.nbytes > (
                _SAVE_BATCH_BYTES
            ):
                save()
            batch[leaf_path] = leaf
            del leaf
        save()
        ocp.partial.finalize(path)


def write_manifest(
    directory: Path,
    *,
    config: ModelConfig,
    dtype: Any,
    eos_token_ids: tuple[int, ...],
    prefix_token_ids: tuple[int, ...],
    generation_config: Mapping[str, Any],
    source: str,
    revision: str | None = None,
) -> None:
    """Writes `jaxspec.json`, last of all files: what has it is a converted directory."""
    fields = {
        "format_version": FORMAT_VERSION,
        "config": config.to_json(),
        "dtype": jnp.dtype(dtype).name,
        "eos_token_ids": list(eos_token_ids),
        "prefix_token_ids": list(prefix_token_ids),
        "generation_config": dict(generation_config),
        "source": source,
        "revision": revision,
        "transformers_version": importlib.metadata.version("transformers"),
        "num_params": decoder.num_params(config),
    }
    (directory / MANIFEST).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def save_model(
    model: LanguageModel, destination: str | os.PathLike, *, overwrite: bool = False
) -> None:
    """Writes a model as a converted directory, which `load_model` reads back bit for bit.

    Raises:
      CheckpointError: the destination exists and `overwrite` is false, or the disk is full.
    """
    params = model.params

    def leaf(path):
        node = params
        for key in path:
            node = node[key]
        return node

    paths = leaf_shapes(model.config)
    num_bytes = sum(leaf(path).nbytes for path in paths)
    check_free_space(Path(destination).absolute().parent, num_bytes, what=f"Saving {model.name}")
    with atomic_directory(destination, overwrite=overwrite) as directory:
        write_params(directory, ((path, leaf(path)) for path in paths))
        prefix: tuple[int, ...] = ()
        if model.tokenizer is not None:
            prefix = model.tokenizer.prefix_token_ids
            model.tokenizer.hf.save_pretrained(directory / "tokenizer")
        write_manifest(
            directory,
            config=model.config,
            dtype=model.dtype,
            eos_token_ids=model.eos_token_ids,
            prefix_token_ids=prefix,
            generation_config=model.generation_config,
            source=model.name,
        )


# Reading


def read_manifest(directory: str | os.PathLike) -> dict[str, Any]:
    """The fields of `jaxspec.json`.

    Raises:
      CheckpointError: it cannot be read, or a newer jaxspec wrote it.
    """
    path = Path(directory) / MANIFEST
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not readable as a jaxspec manifest; convert the model again."
        ) from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has checkpoint format {version}, this jaxspec reads format "
            f"{FORMAT_VERSION}; convert the model again or install the matching jaxspec."
        )
    return fields


def load_converted(
    directory: str | os.PathLike,
    *,
    name: str | None = None,
    dtype: Any = None,
    sharding: Any = None,
    kernels: KernelsName | None = None,
) -> LanguageModel:
    """The model in a converted directory; arguments as in `load_model`."""
    directory = Path(directory)
    fields = read_manifest(directory)
    try:
        config = ModelConfig.from_json(fields["config"])
        stored_dtype = parse_dtype(fields["dtype"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / MANIFEST} lacks fields that a model needs; convert the model again."
        ) from error
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else stored_dtype
    return LanguageModel(
        name=name or str(directory),
        config=config,
        params=_read_params(directory, config, dtype=parse_dtype(dtype), sharding=sharding),
        eos_token_ids=tuple(fields["eos_token_ids"]),
        tokenizer=_load_tokenizer(directory, tuple(fields["prefix_token_ids"])),
        generation_config=fields["generation_config"],
        kernels=kernels or default_kernels(),
    )


def _read_params(directory: Path, config: ModelConfig, *, dtype: Any, sharding: Any) -> PyTree:
    """Parameters in `dtype`; Orbax reads, casts and places leaf by leaf, a few at a time."""
    import orbax.checkpoint.experimental.v1 as ocp

    shapes = leaf_shapes(config)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        shardings = dict.fromkeys(shapes, sharding)
    else:
        shardings = {path: _at(sharding, path) for path in shapes}
    wanted = {
        path: jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[path])
        for path, shape in shapes.items()
    }
    largest = max(4 * math.prod(shape) for shape in shapes.values())
    context = ocp.Context()
    context.memory.read_concurrent_bytes = 2 * largest + _READ_AHEAD_BYTES
    try:
        with _quiet_orbax(), context:
            found = ocp.metadata(str(directory / "params")).metadata
            _check_shapes(found, shapes)
            stored = ocp.load(str(directory / "params"), _nest(wanted))
    except Exception as error:
        raise CheckpointError(
            f"The parameters in {directory / 'params'} cannot be read as those of a "
            f"{config.family} model ({_first_line(error)}); convert the model again."
        ) from error
    return _as_params(stored)


def _check_shapes(found: Any, shapes: Mapping[LeafPath, tuple[int, ...]]) -> None:
    """Raises `ValueError` unless Orbax's metadata lists every parameter in its shape."""
    for path, shape in shapes.items():
        stored = _at(found, tuple(map(str, path)))
        if tuple(stored.shape) != shape:
            name = "/".join(map(str, path))
            raise ValueError(f"{name} is stored as {list(stored.shape)}, not {list(shape)}")


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Keeps Orbax from logging a traceback per thread of an error that it raises anyway."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _at(tree: Any, path: LeafPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _load_tokenizer(directory: Path, prefix_token_ids: tuple[int, ...]) -> TextTokenizer | None:
    files = directory / "tokenizer"
    if not files.is_dir():
        return None
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer: the class it picks may rebuild the pipeline that tokenizer.json states.
    return TextTokenizer(PreTrainedTokenizerFast.from_pretrained(files), prefix_token_ids)


# Names of models


@refuse_other_names
def load_model(
    src: str | os.PathLike,
    *,
    dtype: Any = None,
    revision: str | None = None,
    sharding: Any = None,
    kernels: KernelsName | None = None,
) -> LanguageModel:
    """Loads a model from whatever names one.

    `src` is, in the order in which it is tried: `demo-target` or `demo-draft` (the embedded pair);
    `random:PRESET` (random weights of a published architecture, see `registry.PRESETS`); a
    converted directory; a Hugging Face directory; a hub id. Hugging Face sources are converted
    once, into the user's cache directory (`cache_directory`).

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
      SettingError: unknown kernels, or such as cannot be used here.
      ModelError: nothing of that name is found, or its architecture is not supported.
      CheckpointError: it is found and cannot be read, converted or cached.
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

    directory = Path(name).expanduser()
    if not directory.exists():
        commit, directory = download(name, revision)
        converted = _convert_cached(directory, name=name, commit=commit)
    elif is_converted(directory):
        converted = directory
    elif (directory / "config.json").is_file():
        converted = _convert_cached(directory, name=directory.resolve().name)
    else:
        raise ModelError(
            f"{name} is neither a converted directory (it has no {MANIFEST}) nor a Hugging Face "
            f"one (no config.json); {_WHAT_NAMES_A_MODEL}."
        )
    return load_converted(converted, name=name, dtype=dtype, sharding=sharding, kernels=kernels)


def as_model(model: Model | str) -> Model:
    """The model of a name that `load_model` takes; a model as it is."""
    return load_model(model) if isinstance(model, str) else model


_WHAT_NAMES_A_MODEL = (
    "name a converted directory, a Hugging Face directory, a hub id such as Qwen/Qwen3-0.6B, "
    "random:PRESET, demo-target or demo-draft"
)


def download(name: str, revision: str | None) -> tuple[str, Path]:
    """Commit and local snapshot of a hub id.

    Raises:
      ModelError: the name is no hub id, or no model is found under it.
    """
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"There is no model at {name!r}; {_WHAT_NAMES_A_MODEL}.")
    from convert import hf_reader

    return hf_reader.download(name, revision)


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
    # Renamed first, so that no reader finds half of it.
    path = Path(chosen[0].path)
    aside = _sibling(path)
    os.rename(path, aside)
    shutil.rmtree(aside)
    return chosen[0].num_bytes


def _convert_cached(directory: Path, *, name: str, commit: str | None = None) -> Path:
    """The converted form of a Hugging Face directory, made now unless the cache has it.

    Two processes may convert the same model at once: each writes its own temporary directory, the
    first rename wins, and the other one's work is dropped.
    """
    label = re.sub(r"[^\w.-]+", "--", name).strip("-.") or "model"
    key = commit or _content_key(directory)
    digest = hashlib.sha256(f"{FORMAT_VERSION} {key}".encode()).hexdigest()[:16]
    destination = cache_directory() / f"{label}-{digest}"
    if is_converted(destination):
        return destination
    from convert import convert_directory

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
