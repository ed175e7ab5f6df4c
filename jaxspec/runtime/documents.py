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
    """A command's document: its name and options, `fields`, versions, devices, commit and date.

    Args:
      command: e.g. `generate`.
      options: the command's dataclass.
      **fields: the command's results.
    """
    return as_json(
        {"command": command, "config": dataclasses.asdict(options), **fields, **provenance()}
    )


def write_document(document: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a document as a JSON file (`document_text`) that appears whole or not at all.

    Raises:
      SettingError: it cannot be written.
    """
    write_atomically(path, document_text(document).encode() + b"\n")


def document_text(value: Any, *, indent: int = 0) -> str:
    """`value` as JSON text of few lines: a list of scalars and a record of scalars and lists of
    scalars are on one line each, and the parts of everything else fill lines of 100 columns.

    Args:
      value: as for `json_text`.
      indent: columns in front of the text, for the parts of a document.
    """
    text = json_text(value)
    if _is_line(value) or indent + len(text) <= _COLUMNS:
        return text
    if isinstance(value, Mapping):
        opening, closing = "{}"
        parts = [
            f"{json_text(name)}: {document_text(part, indent=indent + 1)}"
            for name, part in value.items()
        ]
    else:
        opening, closing = "[]"
        parts = [document_text(part, indent=indent + 1) for part in value]
    lines = parts[:1]
    for part in parts[1:]:
        joined = f"{lines[-1]}, {part}"
        if indent + len(joined) < _COLUMNS and "\n" not in joined:
            lines[-1] = joined
        else:
            lines.append(part)
    line = "\n" + " " * indent
    return f"{opening}{line} " + f",{line} ".join(lines) + f"{line}{closing}"


_COLUMNS = 100


def _is_line(value: Any) -> bool:
    """Whether a value is a scalar, a list of scalars, or a record of scalars and such lists."""
    if isinstance(value, Mapping):
        return not any(isinstance(part, Mapping) or not _is_line(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return not any(isinstance(part, (Mapping, list, tuple)) for part in value)
    return True


def json_text(value: Any, **options: Any) -> str:
    """`value` as JSON text. JSON has no NaN and no infinity, so these are written as null.

    Args:
      value: dicts, lists, tuples, texts and numbers.
      **options: those of `json.dumps`.
    """
    return json.dumps(as_json(value), allow_nan=False, **options)


def as_json(value: Any) -> Any:
    """A value as JSON would return it: tuples as lists, paths as text, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, pathlib.PurePath) else value


def public_name(name: str) -> str:
    """A model's, drafter's or file's name without the directories of this machine."""
    for mark in (":", "+"):  # as in `heads:DIRECTORY` and `ngram+DIRECTORY`
        front, mark, rest = name.rpartition(mark)
        path = pathlib.Path(rest)
        if path.exists():
            return f"{front}{mark}{path.name}"
    return name
