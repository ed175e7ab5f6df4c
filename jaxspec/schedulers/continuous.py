"""Continuous seats: a row that ends is replaced in the very next round, inside the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxspec.errors import SettingError
from jaxspec.schedulers.base import by_arrival
from jaxspec.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Continuous:
    """First come, first served: the row that has waited longest takes the first free seat.

    Attributes:
      waiting: rows whose prompts are read in advance, besides those in seats, and held in the KV
        cache; default a quarter of the seats, but at least one. The host is asked for more when the
        last of them has been seated and another row ends.
    """

    waiting: int | None = None
    name: str = dataclasses.field(default="continuous", init=False)
    fills_seats: bool = dataclasses.field(default=True, init=False)
    regroups: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self):
        if self.waiting is not None and self.waiting < 0:
            raise SettingError(f"waiting {self.waiting} was given; it must be at least 0.")

    def num_residents(self, seats: int) -> int:
        """Rows in seats and rows that wait."""
        return seats + (max(1, seats // 4) if self.waiting is None else self.waiting)

    def min_running(self, seats: int) -> int:
        """A seat would stay empty."""
        return seats

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """First come, first served."""
        return list(range(len(prompt_lengths)))

    def choose(self, state: DecodeState, seats: int) -> jax.Array:
        """The rows whose requests came first. Rows in seats came before those that wait, so they
        keep their seats until they end."""
        return by_arrival(state)[:seats]
