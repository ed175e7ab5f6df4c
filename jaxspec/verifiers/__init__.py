"""Verifiers: rules that decide how much of a draft is kept."""

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias

from jaxspec.errors import named
from jaxspec.runtime.values import check_kind
from jaxspec.verifiers.base import Verifier
from jaxspec.verifiers.block import Block
from jaxspec.verifiers.coupled import Coupled
from jaxspec.verifiers.rejection import Rejection
from jaxspec.verifiers.typical import Typical

VerifierName: TypeAlias = Literal["coupled", "coupled:independent", "rejection", "block", "typical"]
VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "coupled": Coupled,
    "coupled:independent": functools.partial(Coupled, is_noise_shared=False),
    "rejection": Rejection,
    "block": Block,
    "typical": Typical,
}


def make_verifier(verifier: Verifier | str) -> Verifier:
    """The verifier with this name in `VERIFIERS`; a verifier is returned as it is.

    Raises:
      SettingError: it is neither, or there is no verifier with that name.
    """
    if isinstance(verifier, str):
        return named("verifier", verifier, VERIFIERS)()
    check_kind("verifier", verifier, Verifier, f"a verifier, or one of {', '.join(VERIFIERS)}")
    return verifier


__all__ = [
    "VERIFIERS",
    "Block",
    "Coupled",
    "Rejection",
    "Typical",
    "Verifier",
    "VerifierName",
    "make_verifier",
]
