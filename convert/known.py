"""Things that people give where a model or a drafter is expected, by their names: what each is, and
what to do.

One table serves targets and drafters. A row looks at names only (of files, tensors and settings),
so nothing is loaded, and a damaged file matches no row.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ModelError
from jaxspec.runtime.files import LARGEST_TEXT_BYTES, check_access, why_unreadable

_LFS = b"version https://git-lfs.github.com/spec/"
_WRAPPERS = {
    "module.": "torch's DataParallel",
    "_orig_mod.": "torch.compile",
    "base_model.model.": "PEFT",
}
_FLOATS = "convert the model's float checkpoint instead"
_OTHER_DRAFTER = "which is not supported; use a draft model, ngram, heads or FlexDraft"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What is known of a path without loading it.

    Attributes:
      path: a file or a directory.
      files: names in the directory, or the file's own.
      config: `config.json`, empty where it cannot be read.
      tensors: dtype by name of the tensors in safetensors files, and of those that an index names
        (dtype empty).
    """

    path: Path
    files: frozenset[str] = frozenset()
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def has(self, pattern: str) -> bool:
        """Whether a file's whole name matches."""
        return any(re.fullmatch(pattern, name) for name in self.files)

    def has_tensor(self, pattern: str) -> bool:
        """Whether a tensor's whole name matches."""
        return any(re.fullmatch(pattern, name) for name in self.tensors)

    def is_of(self, *words: str) -> bool:
        """Whether the config names an architecture or a model type with one of these words."""
        stated = self.config.get("architectures")
        names = [*(stated if isinstance(stated, list) else []), self.config.get("model_type")]
        return any(word in str(name).lower() for name in names for word in words)


@dataclasses.dataclass(frozen=True)
class Known:
    """A row of the table.

    Attributes:
      what: what the path is or holds, to follow its name; `{}` stands for what `matches` found.
      advice: what to do; likewise.
      matches: whether a path is this, or the name by which it was recognised.
    """

    what: str
    advice: str
    matches: Callable[[Given], Any]


def _pointer(given: Given) -> str | None:
    for name in sorted(given.files):
        file = given.path / name if given.path.is_dir() else given.path
        if _first_bytes(file, len(_LFS)) == _LFS:
            return name
    return None


def _gguf(given: Given) -> str | None:
    names = sorted(name for name in given.files if name.endswith(".gguf"))
    is_itself = names == [given.path.name]  # a dangling link or a pipe, for example
    return names[0] if names and not is_itself and not given.has(_WEIGHTS) else None


def _hub_name(given: Given) -> str | None:
    match = re.fullmatch(r"models--(.+?)--(.+)", given.path.name)
    return "/".join(match.groups()) if match and "snapshots" in given.files else None


def _is_eagle3(given: Given) -> bool:
    return given.is_of("eagle3", "eagle-3") or bool({"d2t", "t2d"} & given.tensors.keys())


def _is_eagle(given: Given) -> bool:
    has_layer = given.has_tensor(r"(model\.)?layers\.0\.self_attn\..*")
    return given.is_of("eagle") or (given.has_tensor(r"fc\.weight") and has_layer)


def _wrapper(given: Given) -> str | None:
    for prefix, name in _WRAPPERS.items():
        if given.tensors and all(tensor.startswith(prefix) for tensor in given.tensors):
            return f"{prefix}, as {name} writes them"
    return None


_WEIGHTS = r".*\.(safetensors|bin)(\.index\.json)?"
# In the order in which they are tried.
_TABLE = (
    Known(
        "holds pointers of Git LFS ({} is one) instead of the files",
        "fetch these with git lfs pull",
        _pointer,
    ),
    Known(
        "is the hub cache's folder of a model, with its snapshots",
        "give the hub id {}, or one of the snapshots",
        _hub_name,
    ),
    Known(
        "is a hub cache with many models",
        "give the hub id of one of them",
        lambda given: given.has(r"models--.+--.+"),
    ),
    Known("holds GGUF files", "give the file itself, {} for example, from this machine", _gguf),
    Known(
        "holds a LoRA adapter (adapter_config.json)",
        "merge it into its model (PEFT's merge_and_unload), save the result and give that",
        lambda given: given.has(r"adapter_config\.json|adapter_model\..*"),
    ),
    Known("is an EAGLE-3 drafter", _OTHER_DRAFTER, _is_eagle3),
    Known("is an EAGLE drafter", _OTHER_DRAFTER, _is_eagle),
    Known(
        "is a DFlash drafter",
        _OTHER_DRAFTER,
        lambda given: given.is_of("dflash") or "dflash_config" in given.config,
    ),
    Known(
        "is a DSpark drafter",
        _OTHER_DRAFTER,
        lambda given: given.is_of("dspark") or "dspark_config" in given.config,
    ),
    Known(
        "holds a module for multi-token prediction (MTP)",
        _OTHER_DRAFTER + ", and a target without MTP",
        lambda given: given.is_of("mtp") or given.has_tensor(r"(model\.)?mtp(_layers)?\..*"),
    ),
    Known(
        "holds weights quantized by GPTQ or AWQ",
        _FLOATS,
        lambda given: given.has_tensor(r".*\.(qweight|qzeros|g_idx)"),
    ),
    Known(
        "holds weights quantized to FP8 or to packed integers",
        _FLOATS,
        lambda given: (
            given.has_tensor(r".*\.weight_(scale|scale_inv|packed)")
            or any(dtype.startswith("F8") for dtype in given.tensors.values())
        ),
    ),
    Known(
        "holds weights quantized by bitsandbytes",
        _FLOATS,
        lambda given: given.has_tensor(r".*\.(absmax|quant_map|SCB|quant_state\..*)"),
    ),
    Known(
        "holds tensors whose names begin with {}",
        "save the model that is inside this wrapper",
        _wrapper,
    ),
    Known(
        "is in the layout of its authors (params.json)",
        "give the model's Hugging Face version",
        lambda given: (
            given.has(r"params\.json") and given.has(r"consolidated\..*") and not given.config
        ),
    ),
    Known(
        "is a training checkpoint in shards of its processes",
        "consolidate it, and save the model as a Hugging Face directory",
        lambda given: (
            given.has(r".*\.distcp|global_step\d+|zero_to_fp32\.py") and not given.has(_WEIGHTS)
        ),
    ),
    Known(
        "is a file, and models and drafters are directories, or files that begin with GGUF",
        "give the directory that holds it, or fetch the file again",
        lambda given: given.path.is_file(),
    ),
)


def refuse_known(path: Path, files: Iterable[str] | None = None) -> None:
    """Raises `ModelError` for what is known, and cannot be loaded.

    Args:
      path: a file or a directory; a hub id if `files` are given.
      files: the names of the files of a hub repository.
    """
    given = _given(path) if files is None else Given(path=path, files=frozenset(files))
    for row in _TABLE:
        if found := row.matches(given):
            what, advice = (text.replace("{}", str(found)) for text in (row.what, row.advice))
            raise ModelError(f"{path} {what}; {advice}.")


def _given(path: Path) -> Given:
    if not path.is_dir():
        return Given(path=path, files=frozenset([path.name]))
    try:
        files = frozenset(os.listdir(path))
    except OSError:
        files = frozenset()
    config = _json(path / "config.json")
    tensors: dict[str, str] = {}
    for name in sorted(files):
        if name.endswith(".index.json"):
            named = _json(path / name).get("weight_map")
            tensors |= dict.fromkeys(map(str, named), "") if isinstance(named, dict) else {}
        elif name.endswith(".safetensors"):
            tensors |= _dtypes(path / name)
    return Given(path=path, files=files, config=config, tensors=tensors)


def _json(path: Path) -> dict[str, Any]:
    if why_unreadable(path, largest_bytes=LARGEST_TEXT_BYTES) is not None:  # a pipe, for example
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _dtypes(path: Path) -> dict[str, str]:
    """Dtype by name of a safetensors file's tensors."""
    if why_unreadable(path) is not None:
        return {}
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LARGEST_TEXT_BYTES:
                return {}
            header = json.loads(file.read(length))
        return {name: str(entry.get("dtype")) for name, entry in header.items() if name[:2] != "__"}
    except (OSError, ValueError, RecursionError, AttributeError):
        return {}


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as a GGUF file does."""
    check_access(path)
    return _first_bytes(path, 4) == b"GGUF"


def _first_bytes(path: Path, count: int) -> bytes:
    if why_unreadable(path) is not None:
        return b""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""
