"""The same-length pool of EXSPEC (2510.22876): each round decodes rows of equal length, if any."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.errors import SettingError
from jaxspec.schedulers.base import by_arrival
from jaxspec.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Pool:
    """Of a window of resident rows, in order of arrival, the first group of equal length that fills
    all seats is decoded; without one the first rows of the window, whatever their lengths.

    Attributes:
      window_size: resident rows, at least as many as there are seats; the paper takes 32 and 48.
    """

    window_size: int = 32
    name: str = dataclasses.field(default="pool", init=False)
    fills_seats: bool = dataclasses.field(default=True, init=False)
    regroups: bool = dataclasses.field(default=True, init=False)

    def num_residents(self, seats: int) -> int:
        """The window."""
        if self.window_size < seats:
            raise SettingError(
                f"A pool of {self.window_size} rows was given for {seats} seats; it must hold at "
                "least as many rows as a round decodes."
            )
        return self.window_size

    def min_running(self, seats: int) -> int:
        """The window is kept full."""
        return self.window_size

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """First come, first served."""
        return list(range(len(prompt_lengths)))

    def choose(self, state: DecodeState, seats: int) -> jax.Array:
        """Rows of equal length, or else the first that are running."""
        order = by_arrival(state)
        length, is_running = state.num_committed[order], state.is_running[order]
        index = jnp.arange(len(order), dtype=jnp.int32)
        # peers[i, j]: row j came no later than row i and has its length.
        peers = (length[:, None] == length) & is_running[:, None] & is_running
        peers &= index <= index[:, None]
        is_full = jnp.sum(peers, axis=1, dtype=jnp.int32) == seats
        is_chosen = jnp.where(jnp.any(is_full), peers[jnp.argmax(is_full)], is_running)
        return order[jnp.argsort(jnp.where(is_chosen, index, len(order) + index))[:seats]]
