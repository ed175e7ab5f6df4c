"""What a directory of a model or a drafter holds, and how it is written and read.

    jaxspec.json   the fields of a manifest: configuration, source, a checksum of every file
    params/        Orbax: for a model "embedding", "layers" / "0" / "qkv", ..., "head"
    tokenizer/     tokenizer.json and tokenizer_config.json, absent for a model without a tokenizer

It is written beside its destination and renamed when complete, so that the destination is either
absent or complete, whenever the writer is killed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from flax import traverse_util

from jaxspec.cache.pages import KvDtype
from jaxspec.checkpoint.manifest import (
    MANIFEST,
    again,
    described,
    read_manifest,
    verified,
    write_manifest,
)
from jaxspec.errors import CheckpointError, DamagedError, ModelError, SettingError
from jaxspec.kernels.base import PackedWeight, TiedEmbedding, unpacked
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.runtime.compilation import check_not_forked
from jaxspec.runtime.directories import atomic_directory, check_free_space
from jaxspec.runtime.environment import lacks_bfloat16
from jaxspec.runtime.extras import import_transformers
from jaxspec.runtime.files import (
    absolute,
    check_tree_access,
    first_line,
    is_file,
    is_there,
    reading,
)
from jaxspec.runtime.values import refusal, shown
from jaxspec.types import PyTree

_log = logging.getLogger(__name__)

_DTYPES = {
    "float32": jnp.float32,
    "fp32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "bf16": jnp.bfloat16,
    "float16": jnp.float16,
    "fp16": jnp.float16,
}
# Bytes of parameters passed to Orbax at a time; it copies them while it writes.
_SAVE_BATCH_BYTES = 256 * 2**20
_READ_AHEAD_BYTES = 512 * 2**20

LeafPath = tuple[str | int, ...]


# Names, dtypes, leaves


def parse_dtype(dtype: Any) -> jnp.dtype:
    """The numpy dtype of `float32`, `bfloat16`, `float16` (or `fp32`, `bf16`, `fp16`, or a dtype).

    Raises:
      ModelError: any other dtype.
    """
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    with contextlib.suppress(TypeError, ValueError):
        if chosen is not None and jnp.dtype(chosen) in _DTYPES.values():
            return jnp.dtype(chosen)
    raise ModelError(
        f"The dtype {shown(dtype)} is not supported; choose float32, bfloat16 or float16."
    )


def leaf_shapes(config: ModelConfig) -> dict[LeafPath, tuple[int, ...]]:
    """Shape of every parameter by its path, e.g. `("layers", 0, "qkv")`, in the order of the
    layers."""
    return dict(leaf_paths(decoder.param_shapes(config)))


def leaf_paths(shapes: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, tuple[int, ...]]]:
    """Path and shape of every leaf of a pytree of shapes."""
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


def _nest(leaves: Mapping[LeafPath, Any]) -> dict[str, Any]:
    """Nested dicts with string keys, the form in which Orbax stores the tuple of layers."""
    return traverse_util.unflatten_dict(
        {tuple(map(str, path)): leaf for path, leaf in leaves.items()}
    )


def weights_digest(params: PyTree) -> str:
    """A hex digest of a model's weights, whatever kernels they are packed for.

    Weights are rounded to bfloat16, so that a model has the same digest in every dtype; a head that
    is the transposed embedding counts as tied.
    """
    digest = xxhash.xxh3_128()
    for path, leaf in sorted(traverse_util.flatten_dict(_named(params)).items()):
        if path == ("head",) and "embedding" in params:
            if decoder.is_transposed(unpacked(params["embedding"]), unpacked(params["head"])):
                continue
        rounded = np.asarray(unpacked(leaf)).astype(jnp.bfloat16)
        values = np.ascontiguousarray(rounded, np.float32)
        digest.update(f"{'/'.join(path)} {values.shape}\n".encode())
        digest.update(values.data)
    return digest.hexdigest()


def _named(tree: Any) -> Any:
    """Nested dicts with string keys, from dicts, tuples and lists, and from other pytrees by their
    order."""
    if isinstance(tree, Mapping):
        return {str(name): _named(value) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return {str(index): _named(value) for index, value in enumerate(tree)}
    if isinstance(tree, (PackedWeight, TiedEmbedding)) or jax.tree_util.all_leaves([tree]):
        return tree
    return _named(jax.tree.leaves(tree))


# Writing


def is_converted(path: str | os.PathLike) -> bool:
    """Whether `path` is a converted directory.

    Raises:
      UnreadableError: the system does not say, because of the directory's permissions for example.
    """
    return is_file(Path(path) / MANIFEST)


def write_params(directory: Path, leaves: Iterable[tuple[LeafPath, Any]]) -> None:
    """Writes parameters to `directory / "params"`, holding one batch of them at a time.

    Args:
      directory: of the checkpoint.
      leaves: path and array (NumPy, mapped or not, or `jax.Array`) of each; an iterator may make
        each array when its turn comes.
    """
    if jax.process_count() > 1:
        return _write_in_process(directory, leaves)
    path = str(absolute(directory / "params"))
    batch: dict[LeafPath, Any] = {}

    def save(ocp: Any) -> None:
        num_bytes = _num_bytes(batch)
        check_free_space(directory.parent, num_bytes, what="The next part of the checkpoint")
        ocp.partial.save(path, _nest(batch))
        batch.clear()

    with quiet_orbax() as ocp:
        context = ocp.Context()
        context.array.saving.use_compression = False  # weights hardly compress
        # Each save waits for the previous one, so no array changes while Orbax reads it.
        context.memory.deepcopy_host_arrays = False
        with context:
            for leaf_path, leaf in leaves:
                if batch and _num_bytes(batch) + leaf.nbytes > _SAVE_BATCH_BYTES:
                    save(ocp)
                batch[leaf_path] = leaf
                del leaf
            save(ocp)
            ocp.partial.finalize(path)
    # Orbax names a directory of this machine in it, and only asks whether it is there.
    for committed in Path(path).glob("commit_success.txt"):
        committed.write_bytes(b"")


def _write_in_process(directory: Path, leaves: Iterable[tuple[LeafPath, Any]]) -> None:
    """`write_params` under `jax.distributed`, where Orbax saves only what all processes save. So it
    runs in a process that is not one of them, and gets the parameters through a pipe."""
    script = "from jaxspec.checkpoint.format import write_received; write_received()"
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(absolute(directory))],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert writer.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it failed, and says why
            for path, leaf in leaves:
                pickle.dump((path, np.asarray(leaf)), writer.stdin)
            pickle.dump(None, writer.stdin)
        _, printed = writer.communicate()
    finally:
        writer.kill()
        writer.wait()
    if writer.returncode:
        reason = (printed.decode(errors="replace").strip().splitlines() or ["it was killed"])[-1]
        raise CheckpointError(
            f"The parameters in {directory} could not be written by a process of their own "
            f"({reason}); save them outside of jax.distributed."
        )


def write_received() -> None:
    """The process of `_write_in_process`: the directory is its argument, the parameters its
    input."""

    def received() -> Iterator[tuple[LeafPath, Any]]:
        while (item := pickle.load(sys.stdin.buffer)) is not None:
            yield item

    write_params(Path(sys.argv[1]), received())


def _num_bytes(leaves: Mapping[LeafPath, Any]) -> int:
    return sum(leaf.nbytes for leaf in leaves.values())


def save_model(
    model: LanguageModel, destination: str | os.PathLike, *, overwrite: bool = False
) -> None:
    """Writes a model as a converted directory, which `load_model` reads back bit for bit.

    Raises:
      SettingError: this process was forked from one that had used JAX.
      CheckpointError: the destination exists and `overwrite` is false, or the disk is full.
    """
    check_not_forked()
    paths = leaf_shapes(model.config)
    num_bytes = sum(math.prod(shape) for shape in paths.values()) * model.dtype.itemsize
    check_free_space(Path(destination).absolute().parent, num_bytes, what=f"Saving {model.name}")
    with atomic_directory(destination, overwrite=overwrite, may_replace=is_converted) as directory:
        write_params(directory, ((path, unpacked(at_path(model.params, path))) for path in paths))
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


def load_converted(
    directory: str | os.PathLike,
    *,
    name: str | None = None,
    dtype: Any = None,
    sharding: Any = None,
    kernels: KernelsName | None = None,
    kv_dtype: KvDtype | None = None,
    verify: bool = True,
) -> LanguageModel:
    """The model in a converted directory; arguments as in `load_model`."""
    directory = Path(directory)
    manifest = read_manifest(directory, verify=verify)
    kernels, name = kernels or default_kernels(), name or str(directory)
    dtype = parse_dtype(default_dtype(manifest.dtype, kernels, name) if dtype is None else dtype)
    with verified(directory, manifest, verify=verify):
        params = _read_model_params(directory, manifest.config, dtype=dtype, sharding=sharding)
        tokenizer = _load_tokenizer(directory, manifest.prefix_token_ids)
    return LanguageModel(
        name=name,
        config=manifest.config,
        params=params,
        eos_token_ids=manifest.eos_token_ids,
        tokenizer=tokenizer,
        generation_config=manifest.generation_config,
        kernels=kernels,
        kv_dtype=kv_dtype,
    )


def default_dtype(stored: str, kernels: KernelsName, name: str) -> str:
    """The dtype that a checkpoint is loaded in unless another is asked for: its own; float32 on a
    CPU whose kernels would not multiply it, which a warning in the log says once; and float16 for
    bfloat16 on a GPU without it.

    Args:
      stored: dtype of the checkpoint.
      kernels: those that the model is loaded with.
      name: the model's.
    """
    is_multiplied = stored == "float32" or (stored == "bfloat16" and kernels == "native")
    if is_multiplied or jax.default_backend() != "cpu":
        return "float16" if stored == "bfloat16" and lacks_bfloat16() else stored
    _say_widened(name, stored, kernels)
    return "float32"


@functools.cache
def _say_widened(name: str, stored: str, kernels: str) -> None:
    _log.warning(
        "%s is stored in %s and is loaded as float32, in twice the memory, because the %s kernels "
        "do not multiply %s on a CPU; name a dtype to choose another.",
        name,
        stored,
        kernels,
        stored,
    )


def _read_model_params(
    directory: Path, config: ModelConfig, *, dtype: Any, sharding: Any
) -> PyTree:
    """A model's parameters in `dtype`."""
    shapes = leaf_shapes(config)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        shardings = dict.fromkeys(shapes, sharding)
    else:
        try:
            shardings = {path: at_path(sharding, path) for path in shapes}
        except (IndexError, KeyError, TypeError):
            expected = "a Sharding, or a pytree of them like the parameters"
            raise refusal("sharding", sharding, expected) from None
    wanted = {path: _placed(path, shape, dtype, shardings[path]) for path, shape in shapes.items()}
    return read_params(directory, decoder.param_shapes(config), wanted)


def _placed(
    path: LeafPath, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
    """A parameter as it will be placed; raises `SettingError` if it cannot be."""
    name = "/".join(map(str, path))
    if not sharding.is_fully_addressable:
        raise SettingError(
            f"The sharding of {name} has devices of other processes; give each process a model on "
            "jax.local_devices()."
        )
    try:
        sharding.shard_shape(shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    except ValueError as error:
        raise SettingError(
            f"The sharding given for {name} does not fit its shape {list(shape)} "
            f"({first_line(error)}); give one that divides it."
        ) from error


def read_params(
    directory: Path,
    shapes: Any,
    wanted: Mapping[LeafPath, jax.ShapeDtypeStruct],
    *,
    kind: str | None = None,
) -> PyTree:
    """The parameters below `directory`; Orbax reads, casts and places a few leaves at a time. Every
    process reads for itself and waits for no other.

    Args:
      directory: of the checkpoint.
      shapes: dicts and tuples with a shape at each leaf, as the result will be.
      wanted: shape, dtype and sharding of each parameter.
      kind: that of a drafter; None for a model.

    Raises:
      DamagedError: they are missing, or have the wrong shapes.
      UnreadableError: the system does not let this process read a file.
      CheckpointError: they cannot be read or placed for another reason; whether their files are
        damaged is for `verified` to find out.
    """
    params = absolute(directory / "params")

    def failed(error_class: type[CheckpointError], reason: str) -> CheckpointError:
        return error_class(
            f"The parameters in {directory / 'params'} cannot be read as those of "
            f"{described(kind)} ({reason}); {again(kind)}."
        )

    largest = max(4 * math.prod(leaf.shape) for leaf in wanted.values())
    with quiet_orbax() as ocp:
        context = _own_context(ocp)
        context.memory.read_concurrent_bytes = 2 * largest + _READ_AHEAD_BYTES
        with context:
            with reading(params, lambda reason: failed(DamagedError, reason)):
                # Orbax reports a file that it cannot open from many threads at once.
                check_tree_access(params)
                found = ocp.metadata(str(params)).metadata
                _check_shapes(found, {path: leaf.shape for path, leaf in wanted.items()})
            with reading(params, lambda reason: failed(CheckpointError, reason)):
                stored = ocp.load(str(params), _nest(wanted))
    return as_params(shapes, lambda path: at_path(stored, tuple(map(str, path))))


def _own_context(ocp: Any) -> Any:
    """Orbax's settings for a process that reads alone, also if there are others under
    `jax.distributed`."""
    context = ocp.Context()
    if jax.process_count() > 1:
        context.multiprocessing.primary_host = jax.process_index()
        context.multiprocessing.active_processes = {jax.process_index()}
        context.multiprocessing.barrier_sync_key_prefix = f"jaxspec-{jax.process_index()}"
    return context


def _check_shapes(found: Any, shapes: Mapping[LeafPath, tuple[int, ...]]) -> None:
    """Raises `ValueError` unless Orbax's metadata lists every parameter with its shape."""
    for path, shape in shapes.items():
        stored = at_path(found, tuple(map(str, path)))
        if tuple(stored.shape) != shape:
            name = "/".join(map(str, path))
            raise ValueError(f"{name} is stored as {list(stored.shape)}, not {list(shape)}")


@contextlib.contextmanager
def quiet_orbax() -> Iterator[Any]:
    """Orbax's module, which is kept from logging a traceback per thread for an error that it raises
    anyway; and absl, with which it logs, is kept from leaving a handler on the root logger."""
    logger = logging.getLogger("absl")
    level, handlers = logger.level, list(logging.root.handlers)
    logger.setLevel(logging.CRITICAL)
    try:
        import orbax.checkpoint.experimental.v1 as ocp

        yield ocp
    finally:
        logger.setLevel(level)
        for handler in logging.root.handlers[:]:
            if handler not in handlers:
                logging.root.removeHandler(handler)


def _load_tokenizer(directory: Path, prefix_token_ids: tuple[int, ...]) -> TextTokenizer | None:
    files = directory / "tokenizer"
    if not is_there(files):
        return None

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(
            f"The tokenizer in {files} cannot be read ({reason}); convert the model again."
        )

    with reading(files, failed):
        check_tree_access(files)
        # Not AutoTokenizer: the class that it picks may rebuild the pipeline defined by
        # tokenizer.json.
        tokenizer = import_transformers().PreTrainedTokenizerFast.from_pretrained(files)
    return TextTokenizer(tokenizer, prefix_token_ids)
