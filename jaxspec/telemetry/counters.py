"""Acceptance counts and an engine's counters on the host."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.types import AcceptanceCounts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How much was drafted and accepted for a request.

    Attributes:
      num_rounds: rounds that the request took.
      num_drafts: rounds in which something was drafted.
      num_draft_tokens: drafted tokens.
      num_accepted_tokens: drafted tokens that were emitted.
      num_emitted_tokens: tokens of the output.
      num_drafts_per_pos: rounds whose draft reached position i.
      num_accepted_tokens_per_pos: rounds that accepted position i and all before it.
      num_accepted_tokens_per_node: rounds that accepted the i-th drafted token; for chains the same
        as by position; for trees, what drafting the i-th node gained.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_drafts_per_pos: tuple[int, ...] = ()
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_accepted_tokens_per_node: tuple[int, ...] = ()

    @property
    def emitted_per_round(self) -> float:
        """tau: emitted tokens per round (vLLM's mean acceptance length); 1 for plain decoding."""
        return self.num_emitted_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Cumulative acceptance by draft position: accepted at i / rounds that drafted (vLLM's)."""
        return tuple(n / self.num_drafts for n in self.num_accepted_tokens_per_pos[: self.depth])

    def num_accepted_node(self, node: int) -> int:
        """Rounds that accepted the drafted token with this index."""
        counts = self.num_accepted_tokens_per_node
        return counts[node] if node < len(counts) else 0

    @property
    def depth(self) -> int:
        """The number of positions that were ever drafted."""
        return sum(n > 0 for n in self.num_drafts_per_pos)

    def __add__(self, other: Acceptance) -> Acceptance:
        """Totals of both."""

        def pad(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            size = max(len(a), len(b))
            a, b = a + (0,) * (size - len(a)), b + (0,) * (size - len(b))
            return tuple(x + y for x, y in zip(a, b, strict=True))

        sums = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            sums[field.name] = pad(mine, theirs) if isinstance(mine, tuple) else mine + theirs
        return Acceptance(**sums)

    @classmethod
    def total(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """Totals of all parts."""
        return sum(parts, start=cls())

    @classmethod
    def of_row(cls, counts: AcceptanceCounts, row: int, *, num_emitted: int) -> Acceptance:
        """Totals of one row of device counts that have been fetched to the host."""
        return cls(
            num_rounds=int(counts.num_rounds[row]),
            num_drafts=int(counts.num_drafts[row]),
            num_draft_tokens=int(counts.num_draft_tokens[row]),
            num_accepted_tokens=int(counts.num_accepted_tokens[row]),
            num_emitted_tokens=num_emitted,
            num_drafts_per_pos=tuple(np.asarray(counts.drafted_at[row]).tolist()),
            num_accepted_tokens_per_pos=tuple(np.asarray(counts.accepted_at[row]).tolist()),
            num_accepted_tokens_per_node=tuple(np.asarray(counts.accepted_node[row]).tolist()),
        )

    def to_json(self) -> dict:
        """Counts, and the figures derived from them."""
        counts = dataclasses.asdict(self).items()
        return {
            **{name: list(n) if isinstance(n, tuple) else n for name, n in counts},
            "emitted_per_round": self.emitted_per_round,
            "per_position_acceptance": list(self.per_position),
        }


class Metrics:
    """Counters over an engine's life, under vLLM's names; they never decrease.

    One thread updates them, any thread may take a snapshot.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._num_requests = 0
        self._ended = Acceptance()
        self._running = Acceptance()

    def update(self, ended: Sequence[Acceptance], running: Sequence[Acceptance]) -> None:
        """Adds rows that have `ended` since the last update, and replaces the counts of those still
        `running`."""
        with self._lock:
            self._num_requests += len(ended)
            self._ended = Acceptance.total([self._ended, *ended])
            self._running = Acceptance.total(running)

    def abandon(self) -> None:
        """Keeps the counts of running rows, which will not be finished."""
        with self._lock:
            self._ended += self._running
            self._running = Acceptance()

    def snapshot(self) -> dict[str, Any]:
        """The counters: `num_requests` that have ended and, over all rows, `num_rounds` (a round
        counts for every row that took part), `num_emitted_tokens`, `num_drafts`,
        `num_draft_tokens`, `num_accepted_tokens` and the list `num_accepted_tokens_per_pos` (rounds
        that accepted at least that many)."""
        with self._lock:
            total, num_requests = self._ended + self._running, self._num_requests
        names = ("num_rounds", "num_emitted_tokens", "num_drafts", "num_draft_tokens")
        return {
            "num_requests": num_requests,
            **{name: getattr(total, name) for name in (*names, "num_accepted_tokens")},
            "num_accepted_tokens_per_pos": list(total.num_accepted_tokens_per_pos),
        }
