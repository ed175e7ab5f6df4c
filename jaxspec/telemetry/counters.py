"""Acceptance counts and an engine's counters on the host."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.types import AcceptanceCounts

# Upper ends of the classes of a histogram of seconds; a last class has no end.
BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
LATENCIES = (
    "time_to_first_token_s",
    "inter_token_latency_s",
    "time_per_output_token_s",
    "e2e_latency_s",
    "queue_time_s",
    "prefill_time_s",
    "decode_time_s",
)


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
        return _at(self.num_accepted_tokens_per_node, node)

    def num_drafted_at(self, position: int) -> int:
        """Rounds whose draft reached this position, counted from 0."""
        return _at(self.num_drafts_per_pos, position)

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


def _at(counts: tuple[int, ...], index: int) -> int:
    return counts[index] if index < len(counts) else 0


class Histogram:
    """How often durations in seconds were in each class of `BOUNDS_S`, and their sum."""

    def __init__(self):
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum = 0.0

    def observe(self, value_s: float, number: int = 1) -> None:
        """Counts `number` durations of the same length."""
        self.counts[bisect.bisect_left(BOUNDS_S, value_s)] += number
        self.sum += number * value_s

    def snapshot(self) -> dict[str, Any]:
        """`bounds`, the `counts` of each class, and the `sum` in seconds."""
        return {"bounds": list(BOUNDS_S), "counts": list(self.counts), "sum": self.sum}


class Metrics:
    """Counters over an engine's life, under vLLM's names; they never decrease.

    One thread updates them, any thread may take a snapshot.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_by_reason: collections.Counter[str] = collections.Counter()
        self._latencies = {name: Histogram() for name in LATENCIES}
        self._ended = Acceptance()
        self._running = Acceptance()

    def update(self, ended: Sequence[Acceptance], running: Sequence[Acceptance]) -> None:
        """Adds rows that have `ended` since the last update, and replaces the counts of those still
        `running`."""
        with self._lock:
            self._num_requests += len(ended)
            self._ended = Acceptance.total([self._ended, *ended])
            self._running = Acceptance.total(running)

    def note_tokens(self, gap_s: float, number: int) -> None:
        """Counts tokens that were seen so many seconds after those before them."""
        with self._lock:
            self._latencies["inter_token_latency_s"].observe(gap_s / number, number)

    def note_end(self, reason: str, *, num_prompt: int, num_emitted: int, times: Any) -> None:
        """Counts a request that has ended.

        Args:
          reason: `stop`, `length`, or the stop reason of an abort.
          num_prompt: tokens of its prompt, if it had a row.
          num_emitted: tokens of its output.
          times: `RequestTimes` of the request.
        """
        durations = {"e2e_latency_s": times.end_s - times.arrival_s, "queue_time_s": times.queue_s}
        if times.first_token_s is not None:
            decode_s = times.last_token_s - times.first_token_s
            durations |= {
                "time_to_first_token_s": times.first_token_s - times.arrival_s,
                "prefill_time_s": times.first_token_s - times.admitted_s,
                "decode_time_s": decode_s,
            }
            if num_emitted > 1:
                durations["time_per_output_token_s"] = decode_s / (num_emitted - 1)
        with self._lock:
            self._num_prompt_tokens += num_prompt
            self._num_by_reason[reason] += 1
            for name, value_s in durations.items():
                self._latencies[name].observe(value_s)

    def abandon(self) -> None:
        """Keeps the counts of running rows, which will not be finished."""
        with self._lock:
            self._ended += self._running
            self._running = Acceptance()

    def snapshot(self) -> dict[str, Any]:
        """The counters: `num_requests` that have ended and, over all rows, `num_rounds` (a round
        counts for every row that took part), `num_emitted_tokens`, `num_drafts`,
        `num_draft_tokens`, `num_accepted_tokens` and the list `num_accepted_tokens_per_pos` (rounds
        that accepted at least that many). Those of all requests, also of those that never had a
        row: `num_by_finish_reason` (`stop`, `length`, or the stop reason of an abort), and the
        `latencies` in seconds as `Histogram.snapshot` gives them; `num_prompt_tokens` of those that
        had one."""
        with self._lock:
            total, num_requests = self._ended + self._running, self._num_requests
            others = {
                "num_prompt_tokens": self._num_prompt_tokens,
                "num_by_finish_reason": dict(self._num_by_reason),
                "latencies": {name: each.snapshot() for name, each in self._latencies.items()},
            }
        names = ("num_rounds", "num_emitted_tokens", "num_drafts", "num_draft_tokens")
        return {
            "num_requests": num_requests,
            **{name: getattr(total, name) for name in (*names, "num_accepted_tokens")},
            "num_accepted_tokens_per_pos": list(total.num_accepted_tokens_per_pos),
            **others,
        }
