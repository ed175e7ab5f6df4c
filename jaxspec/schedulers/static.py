"""Static batches: consecutive batches, each decoded to its end (EQSPEC, 2510.22876)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Static:
    """Every resident row has a seat, and keeps it until the whole batch has ended."""

    name: str = dataclasses.field(default="static", init=False)
    fills_seats: bool = dataclasses.field(default=False, init=False)
    regroups: bool = dataclasses.field(default=False, init=False)

    def num_residents(self, seats: int) -> int:
        """As many as there are seats."""
        return seats

    def min_running(self, seats: int) -> int:
        """A batch is decoded to its end."""
        return 1

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """First come, first served."""
        return list(range(len(prompt_lengths)))

    def choose(self, state: DecodeState, seats: int) -> jax.Array:
        """All of them."""
        return jnp.arange(seats, dtype=jnp.int32)
