"""The same-length pool of EXSPEC (2510.22876): each round decodes rows of equal length, if any."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxspec.cache.layouts import lengths
from jaxspec.errors import SettingError
from jaxspec.runtime.values import flag, is_one_of, shown, whole_number
from jaxspec.schedulers.base import by_arrival, input_order
from jaxspec.types import DecodeState


@dataclasses.dataclass(frozen=True)
class Pool:
    """Decodes a batch of rows of equal length if the pool has one, otherwise its first rows.

    The pool is scanned in order of arrival, and the first length shared by `batch_size` rows is
    chosen; a smaller group is never decoded alone. As in 2510.22876, length includes padding in the
    `aligned` layout, because rows padded to one length need no realignment. Unlike the published
    code, no prompt is prefilled again when another row joins, and completions come back in input
    order even if the requests were sorted.

    Attributes:
      window_size: resident rows, at least `batch_size`; the paper uses 32 and 48.
      sort_by_length: admit the requests of a list by ascending prompt length.
      strategy: `cross_batch` looks for rows of equal length; `batch` always takes the first rows of
        the pool.
    """

    window_size: int = 32
    sort_by_length: bool = False
    strategy: Literal["cross_batch", "batch"] = "cross_batch"
    name: str = dataclasses.field(default="pool", init=False)
    refills_rows: bool = dataclasses.field(default=True, init=False)
    regroups: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self):
        window_size = whole_number("window_size", self.window_size, least=1)
        object.__setattr__(self, "window_size", window_size)
        object.__setattr__(self, "sort_by_length", flag("sort_by_length", self.sort_by_length))
        if not is_one_of(self.strategy, ("cross_batch", "batch")):
            raise SettingError(
                f"The strategy {shown(self.strategy)} was given; it must be cross_batch or batch."
            )

    def num_residents(self, batch_size: int) -> int:
        """The size of the pool."""
        if self.window_size < batch_size:
            raise SettingError(
                f"A pool of {self.window_size} rows was given for a batch_size of {batch_size}; it "
                "must hold at least as many rows as a round decodes."
            )
        return self.window_size

    def min_running(self, batch_size: int) -> int:
        """The size of the pool, so that it is kept full."""
        return self.window_size

    def order(self, prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> list[int]:
        """Input order, or by ascending prompt length."""
        order = input_order(prompt_lengths, max_tokens)
        return sorted(order, key=lambda i: prompt_lengths[i]) if self.sort_by_length else order

    def choose(self, state: DecodeState, batch_size: int) -> jax.Array:
        """Rows of equal length, or otherwise the first running rows."""
        order = by_arrival(state)
        if self.strategy == "batch":
            return order[:batch_size]
        length, is_running = lengths(state)[order], state.is_running[order]
        index = jnp.arange(len(order), dtype=jnp.int32)
        # peers[i, j]: row j arrived no later than row i and has the same length.
        peers = (length[:, None] == length[None]) & is_running[:, None] & is_running[None]
        peers &= index[None] <= index[:, None]
        is_full = jnp.sum(peers, axis=1, dtype=jnp.int32) == batch_size
        is_chosen = jnp.where(jnp.any(is_full), peers[jnp.argmax(is_full)], is_running)
        return order[jnp.argsort(jnp.where(is_chosen, index, len(order) + index))[:batch_size]]
