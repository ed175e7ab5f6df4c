"""The JSON document that `--json` prints: what every command's has in common."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxspec.runtime.environment import provenance


def make_document(command: str, options: Any, **fields: Any) -> dict[str, Any]:
    """A command's document: its name and options, `fields`, versions, devices and commit.

    Args:
      command: e.g. `generate`.
      options: the command's dataclass.
      **fields: what it found.
    """
    found = {"command": command, "config": dataclasses.asdict(options), **fields, **provenance()}
    return _as_json(found)


def _as_json(value: Any) -> Any:
    """Tuples as lists and paths as text, as they would be read back."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, pathlib.PurePath) else value
