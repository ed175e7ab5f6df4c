"""What `jaxspec doctor` found out about the kernels on this device, for later processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import jax

from jaxspec.errors import SettingError
from jaxspec.runtime.directories import cache_directory, write_atomically
from jaxspec.runtime.environment import commit, versions

_FILE = ".kernels.json"  # in the cache directory


def _path() -> Path:
    return cache_directory() / _FILE


def _key() -> str:
    """What a verdict holds for: a kind of device, JAX's version, and this package's commit."""
    found = versions()
    kind = jax.local_devices()[0].device_kind
    return f"{kind}, jax {found['jax']}, {commit() or found['jaxspec-decoding']}"


def _read() -> dict[str, dict[str, str | None]]:
    with contextlib.suppress(OSError, ValueError, SettingError):
        found = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def keep_verdicts(problems: Mapping[str, str | None]) -> None:
    """Keeps, for each of these kernels, why they cannot be used on this kind of device with this
    JAX and this commit, or None if they can. What is known of other kernels stays.

    Raises:
      SettingError: the file cannot be written.
    """
    key, known = _key(), _read()
    before = known.get(key)
    known[key] = (before if isinstance(before, dict) else {}) | dict(problems)
    write_atomically(_path(), json.dumps(known, indent=1).encode() + b"\n")


def kept_problem(name: str) -> str | None:
    """Why these kernels cannot be used here, as `jaxspec doctor` found; None if it found nothing,
    or has not been run on this kind of device with this JAX and this commit."""
    known = _read()
    verdicts = known and known.get(_key())
    why = verdicts.get(name) if isinstance(verdicts, dict) else None
    return f"{why} (found by jaxspec doctor)" if isinstance(why, str) else None
