"""KV that outlives its request: in the row where it was computed, parked on the host, put back.

A conversation stays in its row while no other request needs it. When a row is needed, the
conversation that was used least recently is parked on the host. The bytes there are limited; beyond
the limit the least recently used KV is forgotten, and is simply prefilled again when needed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.conversation import Conversation
from jaxspec.engine.executor import Executor
from jaxspec.engine.queue import Ticket
from jaxspec.engine.row_store import RowStore
from jaxspec.types import DecodeState, Finish

_log = logging.getLogger(__name__)


class KeptRows:
    """Which row, and which copy on the host, holds the KV of which conversation.

    Only the thread that holds the engine's lock calls it.

    Args:
      executor: the executor whose rows these are.
      max_bytes: most bytes parked on the host.

    Attributes:
      rows: moves the rows.
      max_bytes: most bytes parked on the host.
      prefixes: prefixes on the host that any request may share. They count towards its bytes, and
        are never forgotten to make room.
    """

    def __init__(self, executor: Executor, *, max_bytes: int):
        self._executor, self.rows = executor, RowStore(executor)
        self.max_bytes = max_bytes
        self.prefixes: list[Conversation] = []
        self._by_row: dict[int, Conversation] = {}
        self._parked: list[Conversation] = []
        self._uses = itertools.count(1)
        self._num_reused = self._num_reread = self._num_dropped = 0

    # Requests that come and go.

    def choose_row(self, ticket: Ticket, free: Sequence[int]) -> int:
        """The row among `free` that a ticket should get: its conversation's, otherwise one that
        holds nothing, otherwise the one that was used least recently."""
        own = None if ticket.conversation is None else ticket.conversation.row
        if own is not None and own in free:
            return own
        return min(free, key=self._last_used)

    def _last_used(self, row: int) -> int:
        return self._by_row[row].last_used if row in self._by_row else 0

    def admit(self, ticket: Ticket) -> None:
        """Puts a ticket's request into its row, with all kept KV of its prompt; KV of another
        conversation in that row is parked."""
        executor, row, own = self._executor, ticket.row, ticket.conversation
        assert row is not None, "a ticket is admitted to the row that it was given"
        request = ticket.request
        source, num_kept = self._longest(ticket)
        stored = None
        if source is not None and source.row != row:
            stored = source.stored
            if stored is None:
                assert source.row is not None, "what is not on the host is in a row"
                stored = self.rows.take_row(source.row, num_kept)
        if self._by_row.get(row, own) is not own:
            self._park(self._by_row[row])
        if stored is not None:
            self.rows.put_row(row, stored)
        start = 0
        if num_kept > 0:
            start = self._first_read(ticket, num_kept)
            self.rows.continue_row(
                row,
                request,
                draft_length=ticket.draft_limit,
                num_kept=num_kept,
                start=start,
                arrival=ticket.arrival,
            )
        else:
            executor.admit(row, request, draft_length=ticket.draft_limit, arrival=ticket.arrival)
        ticket.num_prefilled = start
        if own is not None or num_kept > 0:
            num_known = 0 if own is None else min(own.num_held, ticket.prompt_length - 1)
            ticket.num_reused, ticket.num_reread = start, max(num_known - start, 0)
            self._num_reused += ticket.num_reused
            self._num_reread += ticket.num_reread
        if own is not None:
            if own.row != row:
                self._leave(own)
                own.row = row
                self._by_row[row] = own
            own.last_used = next(self._uses)

    def _longest(self, ticket: Ticket) -> tuple[Conversation | None, int]:
        """Whichever of its own conversation and the common prefixes shares most tokens with a
        ticket's prompt, and how many these are; none if the prompt's log-probabilities are asked
        for, which only prefilling it gives."""
        if ticket.is_scored:
            return None, 0
        prompt, own = ticket.request.prompt_token_ids, ticket.conversation
        best: tuple[Conversation | None, int] = None, 0
        for each in ([] if own is None else [own]) + self.prefixes:
            num_kept = each.num_common(prompt, is_reread=self._is_reread(ticket))
            if self._first_read(ticket, num_kept) > 0 and num_kept > best[1]:
                best = each, num_kept
        return best

    def _first_read(self, ticket: Ticket, num_kept: int) -> int:
        """The token at which prefill begins. A drafter with taps pairs a token's feature with the
        token after it, so the last kept pair has the old next token and must be read again."""
        first = num_kept - bool(self._executor.parts.drafter.taps)
        if self._is_reread(ticket):
            first -= first % self._executor.shape.prefill_chunk
        return max(first, 0)

    def _is_reread(self, ticket: Ticket) -> bool:
        """Whether a ticket reuses only KV that the same chunks of its own prompt would have
        written. Without a session the output must not depend on whether there was any KV to
        reuse."""
        own = ticket.conversation
        return not self.rows.keeps_prompt_bits if own is None else own.is_reread

    def keep(self, ticket: Ticket, state: DecodeState, row: int) -> None:
        """Records what the row of a finished ticket holds, from a state on the host. The row may
        have gone on after the end of the ticket's output."""
        own = ticket.conversation
        if own is None:
            return
        if own.is_closed or state.finish[row] == Finish.NON_FINITE:
            self.drop(own)
            return
        num_committed, chunk = ticket.num_committed, self._executor.shape.prefill_chunk
        num_prefilled = min(ticket.num_prefilled, ticket.prompt_length - 1)
        is_regular = (ticket.num_reused or 0) % chunk == 0
        own.token_ids = tuple(state.tokens[row, :num_committed].tolist())
        own.num_slots = num_prefilled if ticket.is_prefilling else num_committed - 1
        own.num_prefilled = num_prefilled if is_regular else 0
        own.last_used = next(self._uses)

    # Conversations between their turns.

    def fork(self, source: Conversation) -> Conversation:
        """A conversation that continues from the same tokens, with a copy of the KV on the host if
        there is room."""
        copy = Conversation(
            is_reread=source.is_reread,
            token_ids=source.token_ids,
            num_slots=source.num_slots,
            num_prefilled=source.num_prefilled,
            last_used=next(self._uses),
        )
        if source.stored is not None:
            copy.stored = source.stored
            self._add_parked(copy)
        elif source.row is not None:
            self._store(copy, source.row)
        return copy

    def add_prefix(self, prefix: Conversation) -> bool:
        """Moves a prefilled prefix from its row to the host, where all requests may copy it; False
        if it does not fit there."""
        self._park(prefix)
        if prefix.stored is None:
            return False
        self._parked.remove(prefix)
        self.prefixes.append(prefix)
        return True

    def forget_prefixes(self) -> None:
        """Drops all common prefixes."""
        found, self.prefixes = self.prefixes, []
        self._drop_all(found)

    def drop(self, conversation: Conversation) -> None:
        """Forgets the KV of a conversation, wherever it is."""
        self._leave(conversation)
        conversation.num_slots = conversation.num_prefilled = 0

    def park_rows(self) -> None:
        """Moves the KV in rows to the host, as far as there is room."""
        for conversation in list(self._by_row.values()):
            self._park(conversation)

    def forget_rows(self) -> int:
        """Forgets the KV in rows whose state is gone; returns the number of tokens."""
        return self._drop_all(list(self._by_row.values()))

    def clear(self) -> int:
        """Forgets everything; returns the number of tokens whose KV was kept."""
        found = [*self._by_row.values(), *self._parked, *self.prefixes]
        self.prefixes = []
        return self._drop_all(found)

    def _drop_all(self, conversations: Sequence[Conversation]) -> int:
        num_tokens = sum(each.num_slots for each in conversations)
        for each in conversations:
            self.drop(each)
        self._num_dropped += num_tokens
        return num_tokens

    def _leave(self, conversation: Conversation) -> None:
        """Removes a conversation from wherever it is."""
        if conversation.row is not None:
            del self._by_row[conversation.row]
        if conversation in self._parked:
            self._parked.remove(conversation)
        conversation.row = conversation.stored = None

    # The host.

    def _park(self, conversation: Conversation) -> None:
        """Moves a conversation from its row to the host; if there is no room, its KV is dropped."""
        row = conversation.row
        assert row is not None, "only a row is parked"
        del self._by_row[row]
        conversation.row = None
        self._store(conversation, row)

    def _store(self, conversation: Conversation, row: int) -> None:
        """Copies a row to the host, for a conversation with the row's tokens."""
        num_bytes = self.rows.row_bytes(conversation.num_slots)
        num_bytes += sum(_num_bytes(prefix) for prefix in self.prefixes)
        try:
            if num_bytes <= self.max_bytes and conversation.num_slots > 0:
                stored = self.rows.park_row(row, conversation.num_slots)
                conversation.stored = stored
        except (MemoryError, RuntimeError) as error:
            if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
                raise
            _log.warning("the host has no memory for a parked conversation; it is read again")
        if conversation.stored is None:
            self._drop_all([conversation])
        else:
            self._add_parked(conversation)

    def _add_parked(self, conversation: Conversation) -> None:
        """Records a conversation that is on the host, and forgets others if there are too many
        bytes."""
        self._parked.append(conversation)
        for oldest in sorted(self._parked, key=lambda each: each.last_used):
            if self.parked_bytes <= self.max_bytes:
                break
            self._drop_all([oldest])

    # Counts.

    @property
    def parked_bytes(self) -> int:
        """Bytes on the host."""
        return sum(map(_num_bytes, [*self._parked, *self.prefixes]))

    @property
    def num_resident_tokens(self) -> int:
        """Tokens whose KV is in a row, for another turn."""
        return sum(each.num_slots for each in [*self._by_row.values()])

    @property
    def num_parked_tokens(self) -> int:
        """Tokens whose KV is on the host."""
        return sum(each.num_slots for each in [*self._parked, *self.prefixes])

    def metrics(self) -> dict[str, Any]:
        """Counts of tokens whose KV is kept now, and was reused, prefilled again and dropped so
        far."""
        return {
            "num_resident_tokens": self.num_resident_tokens,
            "num_parked_tokens": self.num_parked_tokens,
            "parked_bytes": self.parked_bytes,
            "num_reused_tokens": self._num_reused,
            "num_reread_tokens": self._num_reread,
            "num_dropped_tokens": self._num_dropped,
        }


def _num_bytes(conversation: Conversation) -> int:
    return 0 if conversation.stored is None else conversation.stored.num_bytes
