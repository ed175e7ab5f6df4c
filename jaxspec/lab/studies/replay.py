"""What a scheduler would do with rows whose rounds are known, in a few lines of plain Python.

A row's output does not depend on its neighbours or on the round it is decoded in, so the tokens
that it emits per round are a fixed list. Any schedule can then be counted without decoding anything
again, and the compiled schedulers can be checked against it.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Literal

from jaxspec.types import Origin


@dataclasses.dataclass(kw_only=True)
class Schedule:
    """The counts of a schedule; see `types.ScheduleCounts`.

    Attributes:
      num_rounds: number of rounds until every row has ended.
      num_rows: rows decoded, summed over rounds.
      num_grouped_rounds: rounds in which the batch was full and all rows had the same length.
      num_grouped_rows: rows decoded that had the same length as another row of their round.
    """

    num_rounds: int = 0
    num_rows: int = 0
    num_grouped_rounds: int = 0
    num_grouped_rows: int = 0

    @property
    def grouping_by_calls(self) -> float:
        """Fraction of rounds in which all rows had the same length, as the paper counts."""
        return self.num_grouped_rounds / self.num_rounds


def emitted_by_round(origins: Sequence[Origin]) -> tuple[int, ...]:
    """Tokens emitted in each round of an output; each round ends with the target's own token."""
    emitted, current = [], 0
    for origin in origins:
        current += 1
        if origin != Origin.ACCEPTED:
            emitted.append(current)
            current = 0
    return (*emitted, current) if current else tuple(emitted)


def list_scheduling(rounds: Sequence[int], batch_size: int) -> int:
    """Rounds until all rows have ended, if a free row is filled immediately, in order of arrival.

    Args:
      rounds: how many each row takes, in order of arrival.
      batch_size: rows of a round.
    """
    ends = [0] * batch_size
    for own in rounds:
        heapq.heappush(ends, heapq.heappop(ends) + own)
    return max(ends)


def replay_pool(
    rows: Sequence[Sequence[int]],
    *,
    batch_size: int,
    window_size: int,
    layout: Literal["ragged", "aligned"] = "ragged",
) -> Schedule:
    """EXSPEC's pool (2510.22876, algorithm 2): the first group of `batch_size` rows of one length
    in a window of resident rows, otherwise its first rows.

    Args:
      rows: for each request, in order of arrival, its prompt's length and the tokens that its
        rounds emit.
      batch_size: rows of a round.
      window_size: resident rows; a row that ends is replaced before the next round.
      layout: `aligned` counts padding as length, as the published code does: rows decoded together
        without being a group are padded to the longest of them, and keep that padding.
    """
    length = [first for first, *_ in rows]  # with padding, if there is any
    num_committed = length.copy()
    emits = [collections.deque(rest) for _, *rest in rows]
    schedule = Schedule()
    while any(emits):
        waiting = (row for row, rest in enumerate(emits) if rest)
        window = list(itertools.islice(waiting, window_size))
        chosen = window[:batch_size]
        groups: dict[int, list[int]] = {}
        for row in window:
            group = groups.setdefault(length[row], [])
            group.append(row)
            if len(group) == batch_size:
                chosen = group
                break
        of_length = collections.Counter(length[row] for row in chosen)
        schedule.num_rounds += 1
        schedule.num_rows += len(chosen)
        schedule.num_grouped_rounds += len(of_length) == 1 and len(chosen) == batch_size
        schedule.num_grouped_rows += sum(n for n in of_length.values() if n > 1)
        longest = max(num_committed[row] for row in chosen)
        for row in chosen:
            if layout == "aligned" and len(of_length) > 1:
                length[row] = longest
            num_emitted = emits[row].popleft()
            num_committed[row] += num_emitted
            length[row] += num_emitted
    return schedule
