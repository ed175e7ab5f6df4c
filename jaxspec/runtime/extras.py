"""Modules of optional extras, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxspec.errors import SettingError

if TYPE_CHECKING:
    pass


def import_extra(module: str, purpose: str) -> Any:
    """A module of the `analysis` extra.

    Raises:
      SettingError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise SettingError(
            f"{package} is needed for {purpose}, and is not installed; install it with pip install "
            "'jaxspec-decoding[analysis]'."
        ) from error
