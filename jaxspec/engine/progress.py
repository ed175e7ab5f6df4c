"""The progress of a call of `Engine.generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxspec.engine.queue import Ticket
from jaxspec.telemetry.counters import Acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What a progress callback gets, every few rounds.

    Attributes:
      num_requests: requests of the call.
      num_finished: requests that have ended.
      num_emitted_tokens: tokens that all requests have emitted so far.
      num_rounds: rounds run since the call began, on all shards of a mesh together.
      num_draft_tokens: tokens drafted so far.
      num_accepted_tokens: how many of these were accepted.
      elapsed_s: seconds since the call began.
      time_left_s: estimated seconds left, if the speed stays the same and every output reaches its
        `max_tokens`; None while there is no estimate.
    """

    num_requests: int
    num_finished: int
    num_emitted_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    elapsed_s: float
    time_left_s: float | None

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second."""
        return self.num_emitted_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def acceptance(self) -> float | None:
        """Accepted tokens per drafted token; None if nothing was drafted."""
        drafted = self.num_draft_tokens
        return self.num_accepted_tokens / drafted if drafted else None

    @classmethod
    def of(cls, tickets: Sequence[Ticket], *, num_rounds: int, elapsed_s: float) -> Progress:
        """The progress of these requests."""
        acceptance = Acceptance.total([ticket.acceptance for ticket in tickets])
        done = sum(
            1.0
            if ticket.completion is not None
            else ticket.acceptance.num_emitted_tokens / ticket.request.params.max_tokens
            for ticket in tickets
        )
        return cls(
            num_requests=len(tickets),
            num_finished=sum(ticket.completion is not None for ticket in tickets),
            num_emitted_tokens=acceptance.num_emitted_tokens,
            num_rounds=num_rounds,
            num_draft_tokens=acceptance.num_draft_tokens,
            num_accepted_tokens=acceptance.num_accepted_tokens,
            elapsed_s=elapsed_s,
            time_left_s=elapsed_s * (len(tickets) - done) / done if done else None,
        )
