"""Continuous batching: a row that ends is replaced in the next round, inside the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jaxspec.runtime.values import flag, whole_number
from jaxspec.schedulers.base import by_arrival, input_order
from jaxspec.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Continuous:
    """First come, first served: the request that has waited longest takes the first free row.

    Attributes:
      waiting: extra rows whose prompts are prefilled in advance and wait in the KV cache; default a
        quarter of the batch size, at least one. The host admits more requests when all of these
        have joined the batch and another row ends.
      longest_first: admit the requests of a list by descending `max_tokens`, so that no long one
        runs alone at the end; otherwise in input order.
    """

    waiting: int | None = None
    longest_first: bool = False
    name: str = dataclasses.field(default="continuous", init=False)
    refills_rows: bool = dataclasses.field(default=True, init=False)
    regroups: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self):
        if self.waiting is not None:
            waiting = whole_number("waiting", self.waiting, least=0)
            object.__setattr__(self, "waiting", waiting)
        object.__setattr__(self, "longest_first", flag("longest_first", self.longest_first))

    def num_residents(self, batch_size: int) -> int:
        """Rows in the batch plus waiting rows."""
        return batch_size + (max(1, batch_size // 4) if self.waiting is None else self.waiting)

    def min_running(self, batch_size: int) -> int:
        """The batch size: with fewer running, a row of the batch would be empty."""
        return batch_size

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """Input order, or by descending `max_tokens`; prompt lengths do not affect rounds."""
        order = input_order(prompt_lengths, max_tokens)
        return sorted(order, key=lambda i: -max_tokens[i]) if self.longest_first else order

    def choose(self, state: DecodeState, batch_size: int) -> jax.Array:
        """The rows whose requests arrived first. Requests in the batch arrived before the waiting
        ones, so they stay in it until they end."""
        return by_arrival(state)[:batch_size]
