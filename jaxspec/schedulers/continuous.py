"""Continuous batch_size: a row that ends is replaced in the very next round, inside the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxspec.errors import SettingError
from jaxspec.schedulers.base import by_arrival, input_order
from jaxspec.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Continuous:
    """First come, first served: the row that has waited longest takes the first free row.

    Attributes:
      waiting: rows whose prompts are read in advance, besides those in the batch, and held in the
        KV cache; default a quarter of the rows of the batch, but at least one. The host is asked
        for more when the last of them has been seated and another row ends.
      longest_first: admit the requests of an offline list by falling `max_tokens`, so that no long
        one is left over at the end, when other rows are empty; otherwise in input order.
    """

    waiting: int | None = None
    longest_first: bool = False
    name: str = dataclasses.field(default="continuous", init=False)
    refills_rows: bool = dataclasses.field(default=True, init=False)
    regroups: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self):
        if self.waiting is not None and self.waiting < 0:
            raise SettingError(f"waiting {self.waiting} was given; it must be at least 0.")

    def num_residents(self, batch_size: int) -> int:
        """Rows in the batch and rows that wait."""
        return batch_size + (max(1, batch_size // 4) if self.waiting is None else self.waiting)

    def min_running(self, batch_size: int) -> int:
        """Otherwise a row of the batch would stay empty."""
        return batch_size

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """Input order, or by falling `max_tokens`: a round costs the same whatever the prompts."""
        order = input_order(prompt_lengths, max_tokens)
        return sorted(order, key=lambda i: -max_tokens[i]) if self.longest_first else order

    def choose(self, state: DecodeState, batch_size: int) -> jax.Array:
        """The rows whose requests came first. Rows in the batch came before those that wait,
        so they keep their rows until they end."""
        return by_arrival(state)[:batch_size]
