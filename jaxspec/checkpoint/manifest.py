"""`jaxspec.json`: what a directory records about its model, drafter or run, and its own files.

It holds a checksum of every other file and one of itself, so that a directory whose bytes have
changed is refused instead of being decoded with. The checksums (XXH3, 128 bits) find damage; they
are not a signature: whoever can write to the directory can change them too. That of a drafter or a
run has a field `kind`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import importlib.metadata
import json
import mmap
import os
import stat
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax.numpy as jnp
import xxhash

from jaxspec.errors import CheckpointError, DamagedError, UnreadableError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.documents import json_text
from jaxspec.runtime.files import reading

FORMAT_VERSION = 2
MANIFEST = "jaxspec.json"
DTYPES = ("float32", "bfloat16", "float16")

_LARGEST_MANIFEST_BYTES = 2**28
_SMALL_BYTES = 2**20  # files up to this size are checked before any is read
_BLOCK_BYTES = 2**21
_MADV_POPULATE_READ = 22  # from Linux 5.14 on; Python's mmap has no name for it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The fields of `jaxspec.json` in a directory of a model.

    Attributes:
      config: architecture.
      dtype: that of the stored parameters: `float32`, `bfloat16` or `float16`.
      eos_token_ids: stop tokens.
      prefix_token_ids: token ids that are put in front of text.
      generation_config: the checkpoint's generation defaults.
      source: the name of what was converted.
      revision: the commit if the source is a hub id, otherwise None.
      transformers_version: the version that wrote the tokenizer's files.
      num_params: number of parameters.
      files: size in bytes and checksum of every other file, by its path in the directory.
    """

    kind = None  # a drafter has one
    config: ModelConfig
    dtype: str
    eos_token_ids: tuple[int, ...]
    prefix_token_ids: tuple[int, ...]
    generation_config: dict[str, Any]
    source: str
    revision: str | None
    transformers_version: str
    num_params: int
    files: dict[str, FileChecksum]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterManifest:
    """The fields of `jaxspec.json` in a directory of a drafter with weights of its own.

    Attributes:
      kind: its kind, see `TrainedDrafter`.
      config: architecture, as fields of the kind's configuration.
      dtype: that of the stored parameters.
      target: name of the model that they were made for; None if it was not given.
      target_weights: `weights_digest` of its parameters; None if it was not given.
      num_params: number of parameters.
      files: size in bytes and checksum of every other file, by its path in the directory.
    """

    kind: str
    config: dict[str, Any]
    dtype: str
    target: str | None
    target_weights: str | None
    num_params: int
    files: dict[str, FileChecksum]


RUN = "run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunManifest:
    """The fields of `jaxspec.json` in a directory of a saved run.

    Attributes:
      kind: `run`.
      run: see `engine.saved_runs.run_fields`.
      files: size in bytes and checksum of every other file, by its path in the directory.
    """

    kind: str = RUN
    run: dict[str, Any]
    files: dict[str, FileChecksum]


Record = TypeVar("Record", Manifest, DrafterManifest, RunManifest)
AnyRecord: TypeAlias = Manifest | DrafterManifest | RunManifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileChecksum:
    """Size in bytes and XXH3 checksum in hex of a file when it was written."""

    num_bytes: int
    xxh3: str


def described(kind: str | None) -> str:
    """What a directory of this kind holds, for messages; None is a model."""
    return {None: "a model", RUN: "a saved run"}.get(kind, f"a drafter of kind {kind}")


def again(kind: str | None) -> str:
    """What to do about a damaged directory of this kind, for messages."""
    if kind == RUN:
        return "save the run again"
    return "convert the model again" if kind is None else "train or fetch the drafter again"


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
    """Writes `jaxspec.json`, last of all files: its presence makes a directory a converted one."""
    manifest = Manifest(
        config=config,
        dtype=jnp.dtype(dtype).name,
        eos_token_ids=eos_token_ids,
        prefix_token_ids=prefix_token_ids,
        generation_config=dict(generation_config),
        source=source,
        revision=revision,
        transformers_version=importlib.metadata.version("transformers"),
        num_params=decoder.num_params(config),
        files=checksums(directory),
    )
    write_record(directory, manifest)


def write_record(directory: Path, record: AnyRecord) -> None:
    """Writes a manifest as `jaxspec.json`, with the version of the format and a checksum."""
    described = json.loads(json_text(dataclasses.asdict(record)))  # as it will be read
    checksum = _checksum_of_fields(described)
    fields = {"format_version": FORMAT_VERSION, **described, "checksum": checksum}
    (directory / MANIFEST).write_text(json_text(fields, indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: str | os.PathLike, *, verify: bool = True) -> Manifest:
    """The manifest of a converted directory; its fields have the right types and ranges.

    Args:
      directory: the converted directory.
      verify: compare its own checksum too, which fails for a manifest that was edited by hand.

    Raises:
      DamagedError: it is missing, malformed, or has changed since it was written.
      UnreadableError: the system does not let this process read it.
      CheckpointError: another version of jaxspec wrote it.
    """
    return read_record(directory, Manifest, _check_ranges, verify=verify)


def kind_of(directory: str | os.PathLike) -> str | None:
    """The field `kind` of a directory's `jaxspec.json`; None if it has none, as for models, or if
    there is no such file or it is malformed."""
    try:
        kind = _read_fields(Path(directory) / MANIFEST).get("kind")
    except DamagedError:
        return None
    return kind if isinstance(kind, str) else None


def read_record(
    directory: str | os.PathLike,
    record: type[Record],
    check: Callable[[Record], None],
    *,
    kind: str | None = None,
    verify: bool = True,
) -> Record:
    """The manifest of a directory; raises what `read_manifest` raises.

    Args:
      directory: the directory that holds the file.
      record: the dataclass; its fields have the right types.
      check: raises `ValueError` for values out of range.
      kind: that of a drafter or a run; None for a model.
      verify: compare its own checksum too.
    """
    path = Path(directory) / MANIFEST
    fields = _read_fields(path, kind)
    stored = fields.get("kind")
    if stored != kind and RUN in (stored, kind):
        raise CheckpointError(
            f"{directory} holds {described(stored)}, not {described(kind)}; name another, or read "
            f"a run with jaxspec.load_run."
        )
    if stored != kind:
        found, name, load = "a model", "draft_model", "load_model"
        if stored is not None:
            found, name, load = str(stored)[:20], str(stored)[:20], "load_drafter"
        raise CheckpointError(
            f"{directory} holds {found}, not {described(kind)}; as a drafter it is named "
            f"{name}:{directory}, and in Python jaxspec.{load} loads it."
        )
    version, checksum = fields.pop("format_version"), fields.pop("checksum", None)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has format {str(version)[:20]}, this jaxspec reads format "
            f"{FORMAT_VERSION}; {again(kind)} or install the matching jaxspec."
        )
    if verify and checksum != _checksum_of_fields(fields):
        raise DamagedError(
            f"{path} was changed after it was written; {again(kind)}, or load it without "
            "checks (--no-verify, verify=False) if the change was meant."
        )
    try:
        found = typed(fields, record, MANIFEST)
        check(found)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise DamagedError(
            f"{path} does not describe {described(kind)} ({error}); {again(kind)}."
        ) from error
    return found


def _read_fields(path: Path, kind: str | None = None) -> dict[str, Any]:
    """The fields of a `jaxspec.json`, one of which is its version."""

    def damaged(_: str) -> DamagedError:
        return DamagedError(f"{path} is not readable as a jaxspec manifest; {again(kind)}.")

    with reading(path, damaged):
        if _size_of_file(path) > _LARGEST_MANIFEST_BYTES:
            raise ValueError("too large")
        fields = json.loads(path.read_text(encoding="utf-8"))
        if "format_version" not in fields.keys():
            raise KeyError("format_version")
        _checksum_of_fields(fields)
    return fields


@contextlib.contextmanager
def verified(directory: Path, manifest: AnyRecord, *, verify: bool = True) -> Iterator[None]:
    """Compares files with their checksums: small ones now, the rest while the block reads them.

    Args:
      directory: the directory of the files.
      manifest: the directory's, with their checksums.
      verify: False compares them only if the block raises `CheckpointError`, to find out whether
        they are damaged.

    Raises:
      DamagedError: a file is missing, or has changed since it was written; an error that the block
        raised is its cause.
      UnreadableError: the system does not let this process read a file.
    """
    if not verify:
        try:
            yield
        except UnreadableError:
            raise
        except CheckpointError:
            with verified(directory, manifest):
                raise
        return
    check = functools.partial(_check_file, directory, again(manifest.kind))
    large = []
    for name, expected in manifest.files.items():
        if expected.num_bytes <= _SMALL_BYTES:
            check(name, expected)
        else:
            large.append((name, expected))
    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
        checks = [pool.submit(check, *item) for item in large]
        try:
            yield
        except Exception:
            for check in checks:
                check.result()
            raise
        except BaseException:  # an interrupt, which says nothing about the files
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for check in checks:
            check.result()


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compares every file of a converted directory with its checksum.

    Raises:
      DamagedError: a file is missing, or is not as it was written.
    """
    with verified(directory, manifest):
        pass


def _check_file(directory: Path, advice: str, name: str, expected: FileChecksum) -> None:
    """Raises `DamagedError` if a file has changed since it was written."""
    path = directory / name

    def damaged(problem: str) -> DamagedError:
        return DamagedError(f"{path} {problem}: the checkpoint is damaged; {advice}.")

    with reading(path, lambda reason: damaged(f"cannot be read ({reason})")):
        num_bytes = _size_of_file(path)
        if num_bytes != expected.num_bytes:
            raise damaged(f"has {num_bytes:,} bytes and not {expected.num_bytes:,}")
        if _xxh3(path) != expected.xxh3:
            raise damaged("is not as it was written")


def checksums(directory: Path) -> dict[str, FileChecksum]:
    """The checksum of every file of a directory, by its path in the directory."""
    return {
        path.relative_to(directory).as_posix(): FileChecksum(
            num_bytes=path.stat().st_size, xxh3=_xxh3(path)
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _xxh3(path: Path) -> str:
    """Hex digest of a file. Large files are mapped, because reading them, which copies the page
    cache, takes longer than hashing."""
    if path.stat().st_size <= _SMALL_BYTES:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    digest = xxhash.xxh3_128()
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as content,
    ):
        for start in range(0, len(content), _BLOCK_BYTES):
            with content[start : start + _BLOCK_BYTES] as block:
                _populate(mapped, start, len(block))
                digest.update(block)
    return digest.hexdigest()


def _populate(mapped: mmap.mmap, start: int, num_bytes: int) -> None:
    """Brings a part of a mapped file into memory, so that a disk error is an `OSError` here and not
    a signal (SIGBUS) where the part is used. Does nothing on systems that do not support it."""
    try:
        mapped.madvise(_MADV_POPULATE_READ, start, num_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _checksum_of_fields(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def _size_of_file(path: Path) -> int:
    """Size of a file in bytes; raises `OSError` for anything else, because opening a pipe would
    block."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file")
    return status.st_size


# Types and ranges


def typed(value: Any, wanted: Any, path: str) -> Any:
    """Converts a JSON value to the type of a field: dataclasses, tuples, dicts, unions and
    literals. A field whose metadata says `is_newer` may be absent, as it is in older files.

    Raises:
      TypeError: it has the wrong type; the message names the field.
    """
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted) and isinstance(value, dict):
        hints = typing.get_type_hints(wanted)
        fields = dataclasses.fields(wanted)
        absent = {field.name for field in fields if field.metadata.get("is_newer")} - set(value)
        if different := set(value) ^ (set(hints) - absent):
            listed = ", ".join(sorted(different))
            raise TypeError(f"{path} has other fields than it should: {listed:.80}")
        return wanted(**{name: typed(value[name], hints[name], name) for name in value})
    if origin is tuple and isinstance(value, list):
        return tuple(typed(item, arguments[0], path) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: typed(item, arguments[1], path) for key, item in value.items()}
    if origin in (types.UnionType, typing.Union):
        kept = types.NoneType if value is None else arguments[0]
        if kept in arguments:
            return typed(value, kept, path)
    if origin is typing.Literal and value in arguments:
        return value
    if wanted is Any or (type(value) is wanted and origin is None):
        return value
    if wanted is float and type(value) is int:
        return float(value)
    raise TypeError(f"{path} is {str(value)[:40]!r}")


def _check_ranges(manifest: Manifest) -> None:
    """Raises `ValueError` for numbers that no model has."""
    check_stored(manifest, decoder.num_params(manifest.config))
    for token_id in (*manifest.eos_token_ids, *manifest.prefix_token_ids):
        if not 0 <= token_id < 2**31:
            raise ValueError(f"a token id is {token_id}")


def check_stored(manifest: Manifest | DrafterManifest, num_params: int) -> None:
    """Raises `ValueError` unless the parameters have this number, and a dtype that is known."""
    if manifest.num_params != num_params:
        raise ValueError(f"num_params is {manifest.num_params}")
    if manifest.dtype not in DTYPES:
        raise ValueError(f"dtype is {manifest.dtype[:40]!r}")
