"""The scheduler protocol.

An engine holds `num_residents` rows whose prompts have been prefilled; a round decodes `batch_size`
of them, chosen on the device by a table of row numbers, so that no KV is copied when a row joins or
leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxspec.types import DecodeState


@runtime_checkable
class Scheduler(Protocol):
    """A rule for choosing the rows of a batch.

    Attributes:
      name: for reports and the command line.
      refills_rows: whether a request may join a batch that is being decoded; otherwise a batch is
        decoded to its end before the next one is admitted.
      regroups: whether `choose` may replace rows that are still running; otherwise `choose` is
        called only when a row has ended and another is waiting.
    """

    @property
    def name(self) -> str:  # noqa: D102
        ...

    @property
    def refills_rows(self) -> bool:  # noqa: D102
        ...

    @property
    def regroups(self) -> bool:  # noqa: D102
        ...

    def num_residents(self, batch_size: int) -> int:
        """The number of resident rows in an engine with this batch size; at least the batch size.

        Raises:
          SettingError: the scheduler allows fewer than `batch_size`.
        """
        ...

    def min_running(self, batch_size: int) -> int:
        """While requests are queued, the host admits some once fewer rows than this are running."""
        ...

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """The indices of a list of requests, in the order in which to admit them; completions are
        returned in the order of the list in any case.

        Args:
          prompt_lengths: tokens of each request's prompt.
          max_tokens: tokens that each may emit.
        """
        ...

    def choose(self, state: DecodeState, batch_size: int) -> jax.Array:
        """`[batch_size]` int32, distinct rows for the next round. If fewer are running, rows that
        have ended fill the rest."""
        ...


def input_order(prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
    """The order of the list: first come, first served."""
    return list(range(len(prompt_lengths)))


def by_arrival(state: DecodeState) -> jax.Array:
    """`[B]` int32, the running rows by arrival of their requests, then the other rows."""
    last = jnp.iinfo(jnp.int32).max
    return jnp.argsort(jnp.where(state.is_running, state.arrival, last)).astype(jnp.int32)
