"""Libraries that are only imported when needed: those of optional extras, and slow ones."""

from __future__ import annotations

import importlib
import os
from typing import Any

from jaxspec.errors import SettingError


def import_extra(module: str, purpose: str, *, extra: str = "analysis") -> Any:
    """A module of an extra.

    Raises:
      SettingError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise SettingError(
            f"{package} is needed for {purpose}, and is not installed; install it with pip install "
            f"'jaxspec-decoding[{extra}]'."
        ) from error


def import_transformers() -> Any:
    """`transformers`, without its advice to install torch: we use its tokenizers and configs."""
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    if variable in os.environ:
        return importlib.import_module("transformers")
    os.environ[variable] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        del os.environ[variable]
