"""Requests that wait for a row, those that have one, and what they have emitted so far."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from jaxspec.engine.conversation import Conversation
from jaxspec.errors import QueueFullError, RequestError
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.completions import Completion, StopMatch, find_stop, settled_text
from jaxspec.requests.requests import Request
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import Finish


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOutput:
    """A piece of a request's output.

    Attributes:
      request_id: of the request.
      token_ids: emitted since the last piece.
      text: what became final since the last piece. Incomplete characters, and text that may turn
        into a stop string, come with a later piece. All pieces joined are the completion's text.
      completion: only with the last piece.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request on its way through the engine: it waits, gets a row, has its prompt read, runs, and
    ends with a completion.

    Attributes:
      request: what is decoded.
      draft_length: drafted tokens per round; 0 decodes plainly.
      has_consumer: the completion is taken from the ticket; otherwise `Engine.step` returns it.
      is_interactive: submitted or streamed, so that its output is awaited; otherwise it is one of a
        list that is decoded for the least time in all.
      is_streamed: the output is read while it grows.
      deadline: when it ends with what it has, by `time.monotonic`; None for never.
      conversation: of which it is a turn, or None.
      name: by which it can be cancelled; unique among unfinished tickets.
      row: on the device, while it has one.
      arrival: order among those that got a row.
      num_prefilled: prompt tokens read so far, or taken over.
      num_reused: prompt tokens whose KV was taken over; None where none could be.
      num_reread: prompt tokens that the conversation had read or emitted before, and that are read
        again; None like `num_reused`.
      is_cancelled: to be ended at the next step.
      stopped: the stop string found in its output.
      acceptance: as of the last time the host looked.
      completion: once it has ended.
      pending_output: token ids and text that the stream has not handed out yet.
      num_streamed: tokens put into `pending_output` so far.
      text: their text.
    """

    request: Request
    draft_length: int
    has_consumer: bool
    is_interactive: bool = False
    is_streamed: bool = False
    deadline: float | None = None
    conversation: Conversation | None = None
    name: Hashable = None
    row: int | None = None
    arrival: int = 0
    num_prefilled: int = 0
    num_reused: int | None = None
    num_reread: int | None = None
    is_cancelled: bool = False
    stopped: StopMatch | None = None
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    completion: Completion | None = None
    pending_output: list[tuple[tuple[int, ...], str]] = dataclasses.field(default_factory=list)
    num_streamed: int = 0
    text: str = ""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt is still to be read. Its last token is not prefilled: the
        first round scores it."""
        return self.num_prefilled < self.prompt_length - 1

    @property
    def num_committed(self) -> int:
        """Tokens of prompt and output, as of the last time the host looked."""
        return self.prompt_length + self.acceptance.num_emitted_tokens

    @property
    def reads_output(self) -> bool:
        """Whether the host must see the output while it grows."""
        return self.is_streamed or bool(self.request.params.stop)

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def has_output(self) -> bool:
        """Whether `take_output` has something to return."""
        return bool(self.pending_output) or self.completion is not None

    def streamed(self) -> Ticket:
        """The same ticket, of an output that is read while it grows."""
        return dataclasses.replace(self, has_consumer=True, is_streamed=True)

    def check_stop_strings(self, tokenizer: TextTokenizer | None, output: Sequence[int]) -> None:
        """Sets `stopped` if a stop string is in the output."""
        params = self.request.params
        if params.stop and tokenizer is not None:
            self.stopped = find_stop(tokenizer, output, params.stop, min_tokens=params.min_tokens)

    def buffer_output(self, tokenizer: TextTokenizer | None, output: Sequence[int]) -> None:
        """Adds what is new in the output to `pending_output`, with the text that is final."""
        token_ids = tuple(output[self.num_streamed :])
        if not token_ids:
            return
        text = self.text
        if tokenizer is not None:
            settled = settled_text(tokenizer, output, self.request.params.stop)
            text = settled if settled.startswith(text) else text
        self.pending_output.append((token_ids, text[len(self.text) :]))
        self.num_streamed, self.text = len(output), text

    def take_output(self) -> list[StreamOutput]:
        """What the request has emitted since the last call."""
        pending, self.pending_output = self.pending_output, []
        request_id, completion = self.request.request_id, self.completion
        outputs = [
            StreamOutput(request_id=request_id, token_ids=token_ids, text=text)
            for token_ids, text in pending
        ]
        if completion is not None:
            outputs.append(
                StreamOutput(
                    request_id=request_id,
                    token_ids=completion.token_ids[self.num_streamed :],
                    text=(completion.text or "")[len(self.text) :],
                    completion=completion,
                )
            )
        return outputs


class RequestQueue:
    """Tickets in the order in which they came, and the rows that some of them have.

    Any thread may call it. Only the thread that steps the engine gives out rows and takes them
    back.

    Args:
      num_rows: rows on the device.
      max_waiting: tickets that may wait; more are refused.
      abort: makes the completion of a request that emitted nothing.
    """

    def __init__(
        self, num_rows: int, *, max_waiting: int, abort: Callable[[Request, Finish], Completion]
    ):
        self._lock = threading.RLock()
        self._max_waiting = max_waiting
        self._abort = abort
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._unfinished: dict[Hashable, Ticket] = {}
        self._rows: list[Ticket | None] = [None] * num_rows
        self._finished: list[Completion] = []
        self._closed: str | None = None  # what became of the engine

    @property
    def num_waiting(self) -> int:
        """Tickets without a row."""
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Tickets that wait or have a row."""
        return len(self._unfinished)

    @property
    def is_empty(self) -> bool:
        """Whether every ticket has ended, and `take_finished` has returned all it should."""
        with self._lock:
            return not self._unfinished and not self._finished

    @property
    def is_closed(self) -> bool:
        """Whether new tickets are refused."""
        return self._closed is not None

    @property
    def tickets_by_row(self) -> dict[int, Ticket]:
        """Tickets that have a row, by row."""
        return {row: ticket for row, ticket in enumerate(self._rows) if ticket is not None}

    def add(self, *tickets: Ticket, is_limited: bool = True) -> None:
        """Lets tickets wait for rows.

        Raises:
          RequestError: the queue is closed, or an unfinished ticket has the same name.
          QueueFullError: too many are waiting, and their number `is_limited`.
        """
        with self._lock:
            if self._closed is not None:
                raise RequestError(
                    f"A request was given to an engine that {self._closed}; make another engine."
                )
            if is_limited and len(self._waiting) >= self._max_waiting:
                raise QueueFullError(
                    f"A request was given while {len(self._waiting)} are waiting, as many as the "
                    "queue holds (max_queue); try again when some have ended."
                )
            for ticket in tickets:
                # Requests of a list may share ids, and cannot be cancelled by them.
                ticket.name = ticket.request.request_id if ticket.is_interactive else object()
                if ticket.name in self._unfinished:
                    raise RequestError(
                        f"The request id {ticket.name!r} was given twice, and the first of that "
                        "name has not ended; give another, or none."
                    )
                self._unfinished[ticket.name] = ticket
                self._waiting.append(ticket)

    def place_next(self, choose_row: Callable[[Ticket], int]) -> Ticket | None:
        """Gives the ticket that has waited longest the row that is chosen for it; None if none
        waits."""
        with self._lock:
            if not self._waiting:
                return None
            ticket = self._waiting.popleft()
            row = choose_row(ticket)
            self._rows[row], ticket.row = ticket, row
            return ticket

    def cancel(self, name: Hashable) -> None:
        """Ends a ticket: at once if it waits, at the next step if it has a row.

        Raises:
          RequestError: no unfinished ticket has this name.
        """
        with self._lock:
            if name not in self._unfinished:
                raise RequestError(
                    f"The request {name!r} was to be cancelled, and no unfinished request of "
                    "this engine has that name; it has ended already, or was never submitted."
                )
            self.cancel_all([self._unfinished[name]])

    def cancel_all(self, tickets: Sequence[Ticket]) -> None:
        """`cancel` for those of the tickets that have not ended."""
        with self._lock:
            for ticket in tickets:
                if ticket.row is not None:
                    ticket.is_cancelled = True
                elif ticket.completion is None:
                    self._waiting.remove(ticket)
                    self.abort(ticket, Finish.CANCELLED)

    def end_overdue(self) -> None:
        """Ends the tickets that wait and whose deadline has passed."""
        with self._lock:
            for ticket in [ticket for ticket in self._waiting if ticket.is_overdue]:
                self._waiting.remove(ticket)
                self.abort(ticket, Finish.TIMEOUT)

    def abort(self, ticket: Ticket, finish: Finish) -> None:
        """Finishes a ticket without output."""
        self.finish(ticket, self._abort(ticket.request, finish))

    def finish(self, ticket: Ticket, completion: Completion) -> None:
        """Gives a ticket its completion, and frees its name and its row. A completion that it has
        stays: a step that was given up may come back."""
        with self._lock:
            if ticket.completion is not None:
                return
            ticket.completion, ticket.acceptance = completion, completion.acceptance
            if ticket.row is not None:
                self._rows[ticket.row] = None
                ticket.row = None
            self._unfinished.pop(ticket.name, None)
            if not ticket.has_consumer:
                self._finished.append(completion)

    def take_finished(self) -> list[Completion]:
        """Completions of tickets without a consumer since the last call, in the order in which they
        ended."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Cancels every ticket, and refuses new ones."""
        with self._lock:
            self._closed = self._closed or "was shut down"
            self.cancel_all(list(self._unfinished.values()))

    def abandon(self, finish: Finish, why: str) -> None:
        """Ends every ticket at once, without output, and refuses new ones.

        Args:
          finish: of every ticket.
          why: what became of the engine, to go after "an engine that".
        """
        with self._lock:
            self._closed = why
            self._waiting.clear()
            for ticket in list(self._unfinished.values()):
                self.abort(ticket, finish)
