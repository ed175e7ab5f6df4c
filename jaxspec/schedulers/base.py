"""The scheduler protocol.

An engine holds `num_residents` rows whose prompts have been read; a round decodes `seats` of them,
chosen on the device by a table of row numbers, so that no KV is copied when a row joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxspec.types import DecodeState


@runtime_checkable
class Scheduler(Protocol):
    """A rule for filling seats.

    Attributes:
      name: for reports and the command line.
      fills_seats: whether a request may join while others are being decoded; otherwise a batch is
        decoded to its end before the next one is admitted.
      regroups: whether `choose` may replace rows that are still running; otherwise it is asked only
        when a row has ended and another waits.
    """

    @property
    def name(self) -> str:  # noqa: D102
        ...

    @property
    def fills_seats(self) -> bool:  # noqa: D102
        ...

    @property
    def regroups(self) -> bool:  # noqa: D102
        ...

    def num_residents(self, seats: int) -> int:
        """Rows held by an engine with this many seats, at least as many.

        Raises:
          SettingError: fewer were asked for.
        """
        ...

    def min_running(self, seats: int) -> int:
        """While requests are queued, the host admits some when fewer rows than this are running."""
        ...

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """The order in which the requests of a list, by index, are admitted."""
        ...

    def choose(self, state: DecodeState, seats: int) -> jax.Array:
        """`[seats]` int32, distinct rows for the next round; rows that have ended may fill a seat
        that nobody wants."""
        ...


def by_arrival(state: DecodeState) -> jax.Array:
    """`[B]` int32, rows that are running in the order in which their requests came, then the
    others."""
    last = jnp.iinfo(jnp.int32).max
    return jnp.argsort(jnp.where(state.is_running, state.arrival, last)).astype(jnp.int32)
