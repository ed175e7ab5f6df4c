"""Hugging Face checkpoints: finds the files and maps the tensors.

Nothing is read before it is used, and then only through the page cache: a tensor is a view of a
mapped file, so it takes none of the process's own memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.errors import CheckpointError
from jaxspec.runtime.files import (
    LARGEST_TEXT_BYTES,
    check_access,
    is_there,
    reading,
    why_unreadable,
)
from jaxspec.runtime.values import shown

from .hf_config import HFConfig

_DTYPES = {  # by their names in safetensors and in torch
    ("F32", "torch.float32"): np.dtype(np.float32),
    ("F16", "torch.float16"): np.dtype(np.float16),
    ("BF16", "torch.bfloat16"): np.dtype(ml_dtypes.bfloat16),
}
_INDEX_DTYPES = {
    ("I32", "torch.int32"): np.dtype(np.int32),
    ("I64", "torch.int64"): np.dtype(np.int64),
}
_OTHER_DTYPE = np.dtype("V1")  # fp8, float64: dtypes that the decoder does not compute in
_MOST_LEVELS = 100  # of a JSON file; deeper ones could be read, but not written again
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED_ROWS = 4096  # of two tensors at once
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


# Files


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      CheckpointError: it is absent, unreadable, or not an object.
    """
    if not is_there(path):
        raise CheckpointError(f"{path} is missing; give a complete Hugging Face directory.")
    check_file(path, largest_bytes=LARGEST_TEXT_BYTES)

    def malformed(reason: str) -> CheckpointError:
        return CheckpointError(f"{path} cannot be read as JSON ({reason}); fetch the file again.")

    with reading(path, malformed):
        fields = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch the file again.")
    if _is_nested(fields, levels=_MOST_LEVELS):
        raise CheckpointError(
            f"{path} is nested more than {_MOST_LEVELS} levels deep; fetch the file again."
        )
    return fields


def _is_nested(value: Any, *, levels: int) -> bool:
    """Whether a JSON value is nested deeper than this many levels."""
    if not isinstance(value, (dict, list)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_nested(item, levels=levels - 1) for item in items)


def check_file(path: Path, *, largest_bytes: int | None = None) -> None:
    """Raises `CheckpointError` unless `path` is a file that can be read, or a link to one."""
    check_access(path)
    why = why_unreadable(path, largest_bytes=largest_bytes)
    if why is not None:
        raise CheckpointError(f"{path} cannot be read ({why}); fetch the file again.")


def read_config(directory: Path) -> HFConfig:
    """The model's `config.json`."""
    path = directory / "config.json"
    return HFConfig(read_json(path), str(path))


def read_generation_config(directory: Path) -> HFConfig:
    """`generation_config.json`, or no fields if there is none."""
    path = directory / "generation_config.json"
    return HFConfig(read_json(path) if is_there(path) else {}, str(path))


def eos_token_ids(
    config: HFConfig, generation_config: HFConfig, *, vocab_size: int
) -> tuple[int, ...]:
    """Stop tokens: those of the generation config, otherwise the config's; one id or several.

    Raises:
      CheckpointError: they are not ids of the vocabulary.
    """
    key = "eos_token_id"
    stating = config if generation_config.get(key) is None else generation_config
    stated = stating.get(key)
    if stated is None:
        return ()
    ids = stated if isinstance(stated, list) else [stated]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise stating.malformed(key, f"one or several token ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def weight_files(directory: Path, *, prefix: str = "") -> list[Path]:
    """The files that hold the parameters: safetensors if there are any, otherwise `.bin`; the whole
    file if there is one, otherwise the shards that the index names for tensors whose names begin
    with `prefix`.

    Raises:
      CheckpointError: there are none, a shard is missing, or the index names something other than
        files beside it.
    """
    for whole in _WEIGHT_FILES:
        index = directory / f"{whole}.index.json"
        if is_there(directory / whole):
            return [directory / whole]
        if is_there(index):
            shards = shard_names(index, prefix=prefix)
            if not shards:
                raise _names_other_files(index, "nothing")
            files = [directory / name for name in shards]
            missing = [file.name for file in files if not is_there(file)]
            if missing:
                raise CheckpointError(
                    f"{directory} lacks {_some(missing)}, named in {index.name}; "
                    "fetch the missing files."
                )
            return files
    raise CheckpointError(
        f"{directory} has no weights: expected model.safetensors or pytorch_model.bin, whole or in "
        "shards with an index."
    )


def shard_names(index: Path, *, prefix: str = "") -> list[str]:
    """The files that an index names for tensors whose names begin with `prefix`, in order.

    Raises:
      CheckpointError: it cannot be read, or names something other than weight files beside it.
    """
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    stated = HFConfig(read_json(index), str(index)).section("weight_map").fields
    shards = [file for name, file in stated.items() if name.startswith(prefix)]
    strange = [shown(name) for name in shards if not _is_file_name(name, suffix=suffix)]
    if strange:
        raise _names_other_files(index, _some(strange))
    return sorted(set(shards))


def _names_other_files(index: Path, named: str) -> CheckpointError:
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    return CheckpointError(
        f"{index} names {named} as shards (weight_map); it must name {suffix} files "
        "beside it, so fetch it again."
    )


def _is_file_name(name: Any, *, suffix: str) -> bool:
    """Whether a name from an index is that of a file of this kind in the same directory."""
    is_name = isinstance(name, str) and name.endswith(suffix) and len(name) <= 255
    return is_name and name.isprintable() and not set(name) & {"/", "\\"}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


# Tensors


class Tensor(NamedTuple):
    """A tensor of a checkpoint, whose file is mapped when it is loaded."""

    dtype: np.dtype
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of a checkpoint's weight files, by name."""
    found: dict[str, Tensor] = {}
    for file in files:
        check_file(file)
        read = _read_torch if file.suffix in (".bin", ".pt") else _read_safetensors
        for name, tensor in read(file):
            if name in found:
                raise CheckpointError(
                    f"{file} repeats the tensor {name!r} of another shard; remove one of them."
                )
            found[name] = tensor
    return found


def _dtype_named(name: str) -> np.dtype:
    known = {**_DTYPES, **_INDEX_DTYPES}
    return next((dtype for names, dtype in known.items() if name in names), _OTHER_DTYPE)


def _read_safetensors(file: Path):
    """Yields name and `Tensor` of each tensor of a safetensors file.

    `safe_open` validates header and length; the views are our own, because its NumPy arrays are
    copies.
    """
    from safetensors import safe_open

    def malformed(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{file} cannot be read as safetensors ({reason}); fetch the file again."
        )

    with reading(file, malformed):
        with safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as stream:
            header_length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        dtype = _dtype_named(entry["dtype"])
        shape = tuple(entry["shape"])
        offset = 8 + header_length + entry["data_offsets"][0]

        def load(dtype=dtype, shape=shape, offset=offset):
            if math.prod(shape) == 0:
                return np.empty(shape, dtype)
            return np.memmap(file, mode="r", dtype=dtype, offset=offset, shape=shape)

        yield name, Tensor(dtype, shape, load)


def _read_torch(file: Path):
    """Yields name and `Tensor` of each tensor of a torch file."""
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{file} is a torch file, and torch is not installed; install the parity extra "
            "(pip install 'jaxspec-decoding[parity]') or use the model's safetensors."
        ) from error

    def malformed(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{file} cannot be read as a torch state dict of tensors ({reason}); "
            "fetch the file again, or use the model's safetensors."
        )

    with reading(file, malformed):
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(tensors, dict):
        raise CheckpointError(
            f"{file} holds a {type(tensors).__name__}; give a state dict of the whole model."
        )
    for name, tensor in tensors.items():
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not is_plain or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{file} holds {shown(name)}, which is not a plain tensor; give a state dict of "
                "the whole model."
            )
        dtype = _dtype_named(str(tensor.dtype))

        def load(tensor=tensor, dtype=dtype):
            if tensor.dtype == torch.bfloat16:
                return tensor.detach().view(torch.uint16).numpy().view(dtype)
            return tensor.detach().numpy()

        yield name, Tensor(dtype, tuple(tensor.shape), load)


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    where: str,
    indices: tuple[str, ...] = (),
    hint: str = "its weights and its config.json do not belong to one supported model",
) -> None:
    """Raises unless the checkpoint has the expected tensors, in the expected shapes, and no others.

    Args:
      tensors: those of the checkpoint, by name.
      expected: shapes by name.
      where: where the checkpoint is, for the message.
      indices: names of those that hold integers; the others hold floats.
      hint: what is wrong, for the message.

    Raises:
      CheckpointError: names the tensors that are missing, unexpected, or have the wrong shape or a
        dtype that is not a float.
    """
    found = {name: shape for name, shape in expected.items() if name in tensors}
    problems = {
        "lacks {}": [name for name in expected if name not in found],
        "has the wrong shape for {}": [
            f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in found.items()
            if tensors[name].shape != shape
        ],
        "has the unexpected tensors {}": [
            name for name in tensors if name not in found and not _is_ignored(name, expected)
        ],
        "stores {} in a dtype other than float32, float16 and bfloat16": [
            name
            for name in found
            if name not in indices and tensors[name].dtype not in _DTYPES.values()
        ],
        "stores {} in a dtype other than int32 and int64": [
            name for name in indices if name in found and not _is_index(tensors[name])
        ],
    }
    named = [text.format(_some(names)) for text, names in problems.items() if names]
    if named:
        raise CheckpointError(f"The checkpoint in {where} {'; it '.join(named)}; {hint}.")


def repeats_embedding(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the head of a checkpoint, if it has one, is its embedding. A model that was trained
    on from a tied one may have a head of its own although its config still says that they are
    tied."""
    head, embedding = (tensors.get(name) for name in (HEAD, EMBEDDING))
    if head is None or embedding is None or head.shape != embedding.shape:
        return head is None or embedding is None
    if head.dtype not in _DTYPES.values() or embedding.dtype not in _DTYPES.values():
        return False  # `check_tensors` names the dtype
    one, other = head.load(), embedding.load()
    for start in range(0, len(one), _COMPARED_ROWS):
        rows = slice(start, start + _COMPARED_ROWS)
        if not np.array_equal(one[rows].astype(np.float32), other[rows].astype(np.float32)):
            return False
    return True


def _is_index(tensor: Tensor) -> bool:
    return tensor.dtype in _INDEX_DTYPES.values()


def _is_ignored(name: str, expected: Mapping[str, Any]) -> bool:
    """Whether a tensor can be ignored: a computed buffer of an old file, or a head that repeats the
    tied embedding."""
    if name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")):
        return True
    return name == HEAD and name not in expected
