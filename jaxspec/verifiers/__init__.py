"""Verifiers: what decides how much of a draft is kept."""

from jaxspec.verifiers.base import Verifier
from jaxspec.verifiers.block import Block
from jaxspec.verifiers.coupled import Coupled
from jaxspec.verifiers.rejection import Rejection
from jaxspec.verifiers.typical import Typical

__all__ = ["Block", "Coupled", "Rejection", "Typical", "Verifier"]
