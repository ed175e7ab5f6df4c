"""Static batches: consecutive batches, each decoded to its end (EQSPEC, 2510.22876)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.schedulers.base import input_order
from jaxspec.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Static:
    """Every resident row is in the batch, and stays there until the whole batch has ended."""

    name: str = dataclasses.field(default="static", init=False)
    refills_rows: bool = dataclasses.field(default=False, init=False)
    regroups: bool = dataclasses.field(default=False, init=False)

    def num_residents(self, batch_size: int) -> int:
        """The batch size."""
        return batch_size

    def min_running(self, batch_size: int) -> int:
        """1: a batch is decoded to its end before others are admitted."""
        return 1

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """Consecutive batches, in input order."""
        return input_order(prompt_lengths, max_tokens)

    def choose(self, state: DecodeState, batch_size: int) -> jax.Array:
        """All resident rows."""
        return jnp.arange(batch_size, dtype=jnp.int32)
