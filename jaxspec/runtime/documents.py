"""The parts that the JSON documents of all commands and benches have in common."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.environment import provenance


def make_document(command: str, options: Any, **fields: Any) -> dict[str, Any]:
    """A command's document: its name and options, `fields`, versions, devices and commit.

    Args:
      command: e.g. `generate`.
      options: the command's dataclass.
      **fields: the command's results.
    """
    return as_json(
        {"command": command, "config": dataclasses.asdict(options), **fields, **provenance()}
    )


def write_document(document: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a document as a JSON file that appears whole or not at all.

    Raises:
      SettingError: it cannot be written.
    """
    write_atomically(path, json_text(document, indent=1).encode() + b"\n")


def json_text(value: Any, **options: Any) -> str:
    """`value` as JSON text. JSON has no NaN and no infinity, so these are written as null.

    Args:
      value: dicts, lists, tuples, texts and numbers.
      **options: those of `json.dumps`.
    """
    return json.dumps(_without_nan(value), allow_nan=False, **options)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(value: Any) -> Any:
    """Tuples as lists and paths as text, as JSON would return them."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, pathlib.PurePath) else value


def public_name(name: str) -> str:
    """A model's, drafter's or file's name without the directories of this machine."""
    kind, colon, rest = name.rpartition(":")
    path = pathlib.Path(rest)
    return f"{kind}{colon}{path.name}" if path.exists() else name
