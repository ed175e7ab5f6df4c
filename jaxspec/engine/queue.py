"""Requests that wait for a row, those that have one, and what they have emitted so far."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxspec.engine.conversation import Conversation
from jaxspec.errors import QueueFullError, RequestError
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.completions import Completion, OutputText, RequestTimes, StopMatch
from jaxspec.requests.requests import Request
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import Finish


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOutput:
    """A piece of a request's output.

    Attributes:
      request_id: that of the request.
      token_ids: tokens emitted since the last piece.
      text: the text that became final since the last piece. Incomplete characters, and text that
        may turn into a stop string, come with a later piece. All pieces joined are the completion's
        text.
      logprobs: of these tokens, as in `Completion.logprobs`; None unless asked for.
      completion: set only in the last piece.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, float], ...] | None = None
    completion: Completion | None = None


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request on its way through the engine: it waits, gets a row, has its prompt prefilled,
    runs, and ends with a completion.

    Attributes:
      request: the request to decode.
      draft_length: drafted tokens per round; 0 decodes plainly.
      has_consumer: whether a caller takes the completion from the ticket; otherwise `Engine.step`
        returns it.
      is_interactive: whether it was submitted or streamed, so that its output is awaited; otherwise
        it belongs to a list, for which only the total time counts.
      is_streamed: whether the output is read as it is emitted.
      is_counted: whether it is in `Engine.metrics`, as a request of the engine's users.
      deadline: when it ends with the tokens it has, by `time.monotonic`; None for never.
      conversation: the conversation of which it is a turn, or None.
      event_loop: the event loop that reads its output, or None.
      row: its row on the device, while it has one.
      draft_limit: the draft length that this row has on the device: the most that is drafted in the
        next rounds.
      arrival: order among tickets that got a row.
      num_prefilled: prompt tokens prefilled or reused so far.
      num_reused: prompt tokens whose KV was reused; None if there was nothing to reuse from.
      num_reread: prompt tokens that the conversation had prefilled or emitted before, and that are
        prefilled again; None if `num_reused` is.
      is_cancelled: whether its caller has given it up.
      output: the text of its output, once this has been read.
      acceptance: counts as of the host's last check.
      completion: its completion, once it has ended.
      pending_output: token ids, text and log-probabilities that the stream has not returned yet.
      num_streamed: tokens put into `pending_output` so far.
      arrival_s: when it was made, by `time.monotonic`.
      admitted_s: when it got a row, or None.
      first_token_s: when its first token was seen, or None.
      last_token_s: when its newest token was seen, or None.
    """

    request: Request
    draft_length: int
    has_consumer: bool
    is_interactive: bool = False
    is_streamed: bool = False
    is_counted: bool = True
    deadline: float | None = None
    conversation: Conversation | None = None
    event_loop: asyncio.AbstractEventLoop | None = None
    row: int | None = None
    draft_limit: int = 0
    arrival: int = 0
    num_prefilled: int = 0
    num_reused: int | None = None
    num_reread: int | None = None
    is_cancelled: bool = False
    output: OutputText | None = None
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    completion: Completion | None = None
    pending_output: list[tuple[tuple[int, ...], str, Any]] = dataclasses.field(default_factory=list)
    num_streamed: int = 0
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt is still to be prefilled. The last token is not prefilled,
        because the first round scores it."""
        return self.num_prefilled < self.prompt_length - 1

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of its prompt are asked for."""
        return self.request.params.prompt_logprobs is not None

    @property
    def is_decoding(self) -> bool:
        """Whether rounds decode it: its prompt is prefilled, and it asks for tokens."""
        return not self.is_prefilling and self.request.params.max_tokens > 0

    @property
    def num_committed(self) -> int:
        """Number of tokens of prompt and output, as of the host's last check."""
        return self.prompt_length + self.acceptance.num_emitted_tokens

    @property
    def reads_output(self) -> bool:
        """Whether the host must see the output as it is emitted."""
        return self.is_streamed or bool(self.request.params.stop)

    @property
    def streams_logprobs(self) -> bool:
        """Whether log-probabilities are read as they are emitted."""
        return self.is_streamed and self.request.params.logprobs is not None

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def given_up(self) -> Finish | None:
        """Why it must end with the tokens it has: it was cancelled, or the event loop that reads it
        is closed, or its time is up. None if it may go on."""
        if self.is_cancelled or (self.event_loop is not None and self.event_loop.is_closed()):
            return Finish.CANCELLED
        return Finish.TIMEOUT if self.is_overdue else None

    @property
    def has_output(self) -> bool:
        """Whether `take_output` has something to return."""
        return bool(self.pending_output) or self.completion is not None

    def streamed(self) -> Ticket:
        """A copy of the ticket, with output that the caller reads as it is emitted."""
        return dataclasses.replace(self, has_consumer=True, is_streamed=True)

    @property
    def stopped(self) -> StopMatch | None:
        """The stop string found in its output."""
        return None if self.output is None else self.output.stopped

    @property
    def num_read(self) -> int:
        """Output tokens that were read or streamed so far."""
        return self.num_streamed if self.output is None else self.output.num_tokens

    def read_output(self, tokenizer: TextTokenizer | None, token_ids: Sequence[int]) -> None:
        """Decodes output tokens that follow those read so far, and looks for stop strings."""
        if tokenizer is not None:
            if self.output is None:
                params = self.request.params
                self.output = OutputText(
                    tokenizer,
                    self.request.prompt_token_ids,
                    stop=params.stop,
                    min_tokens=params.min_tokens,
                )
            self.output.push(token_ids)

    @property
    def times(self) -> RequestTimes:
        """When things happened to it, up to now, which is its end."""
        names = ("arrival_s", "admitted_s", "first_token_s", "last_token_s")
        seen = {name: getattr(self, name) for name in names}
        return RequestTimes(**seen, end_s=time.monotonic())

    def buffer_output(self, token_ids: Sequence[int], logprobs: Any = None) -> None:
        """Adds tokens that were read, with their log-probabilities, and text that has become final,
        to `pending_output`."""
        if not token_ids:
            return
        text = "" if self.output is None else self.output.take_settled()
        self.pending_output.append((tuple(token_ids), text, logprobs))
        self.num_streamed += len(token_ids)

    def take_output(self) -> list[StreamOutput]:
        """What the request has emitted since the last call."""
        pending, self.pending_output = self.pending_output, []
        request_id, completion = self.request.request_id, self.completion
        num_shown = 0 if self.output is None else self.output.num_taken
        outputs = [
            StreamOutput(request_id=request_id, token_ids=token_ids, text=text, logprobs=logprobs)
            for token_ids, text, logprobs in pending
        ]
        if completion is not None:
            logprobs = completion.logprobs
            outputs.append(
                StreamOutput(
                    request_id=request_id,
                    token_ids=completion.token_ids[self.num_streamed :],
                    text=(completion.text or "")[num_shown:],
                    logprobs=None if logprobs is None else logprobs[self.num_streamed :],
                    completion=completion,
                )
            )
        return outputs


class RequestQueue:
    """Tickets by arrival, and the rows that some of them have.

    Any thread may call it. Only the thread that steps the engine assigns and frees rows. So a
    ticket with a row that was given up keeps it until `EngineCore.release` or the next step, but is
    not counted any more, and its name is free.

    Args:
      num_rows: rows on the device.
      max_waiting: tickets that may wait; more are refused.
      abort: makes the completion of a request that emitted nothing.

    Attributes:
      on_change: called after a ticket was added, given up or finished. Python may call it at any
        time, when it frees an abandoned stream.
      on_finish: called with a ticket that has got its completion.
    """

    def __init__(
        self, num_rows: int, *, max_waiting: int, abort: Callable[[Ticket, Finish], Completion]
    ):
        self._lock = threading.RLock()
        self._max_waiting = max_waiting
        self._abort = abort
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._names: dict[str, Ticket] = {}  # of unfinished tickets that can be cancelled
        self._rows: list[Ticket | None] = [None] * num_rows
        self._finished: list[Completion] = []
        self._closed: str | None = None  # why the engine is closed
        self.on_change: Callable[[], object] = lambda: None
        self.on_finish: Callable[[Ticket], object] = lambda ticket: None

    @property
    def num_waiting(self) -> int:
        """Tickets without a row that were not given up."""
        with self._lock:
            return sum(ticket.given_up is None for ticket in self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether any ticket waits for a row."""
        return bool(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Tickets that wait or have a row and were not given up."""
        with self._lock:
            return sum(ticket.given_up is None for ticket in self.unfinished)

    @property
    def has_given_up(self) -> bool:
        """Whether a ticket was given up and has not ended yet."""
        with self._lock:
            return any(ticket.given_up is not None for ticket in self.unfinished)

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` has something to return."""
        return bool(self._finished)

    @property
    def is_empty(self) -> bool:
        """Whether every ticket has ended or was given up, and `take_finished` has nothing left to
        return, now or later."""
        with self._lock:
            return not self._finished and all(
                ticket.given_up is not None and ticket.has_consumer for ticket in self.unfinished
            )

    @property
    def is_closed(self) -> bool:
        """Whether new tickets are refused."""
        return self._closed is not None

    @property
    def tickets_by_row(self) -> dict[int, Ticket]:
        """Tickets that have a row, by row."""
        return {row: ticket for row, ticket in enumerate(self._rows) if ticket is not None}

    @property
    def unfinished(self) -> list[Ticket]:
        """Tickets without a completion, those that were given up included."""
        with self._lock:
            return [*self.tickets_by_row.values(), *self._waiting]

    def add(self, *tickets: Ticket, is_limited: bool = True) -> None:
        """Queues tickets for rows.

        Raises:
          RequestError: the queue is closed, or an unfinished ticket has the same name.
          QueueFullError: too many are waiting, and their number `is_limited`.
        """
        with self._lock:
            if self._closed is not None:
                raise RequestError(
                    f"A request was given to an engine that {self._closed}; make another engine."
                )
            self.end_waiting()
            if is_limited and len(self._waiting) >= self._max_waiting:
                raise QueueFullError(
                    f"A request was given while {len(self._waiting)} are waiting, as many as the "
                    "queue holds (max_queue); try again when some have ended."
                )
            for ticket in tickets:
                if ticket.is_interactive:  # requests of a list may share ids
                    name = ticket.request.request_id
                    if name in self._names and self._names[name].given_up is None:
                        raise RequestError(
                            f"The request id {name!r} was given twice, and the first of that name "
                            "has not ended; give another, or none."
                        )
                    self._names[name] = ticket
                self._waiting.append(ticket)
        self.on_change()

    def place_next(self, choose_row: Callable[[Ticket], int]) -> Ticket | None:
        """Gives the ticket that has waited longest the row that `choose_row` returns; None if no
        ticket waits."""
        with self._lock:
            if not self._waiting:
                return None
            ticket = self._waiting.popleft()
            row = choose_row(ticket)
            self._rows[row], ticket.row = ticket, row
            return ticket

    def cancel(self, name: str) -> None:
        """Gives a ticket up; it ends immediately if it is waiting.

        Raises:
          RequestError: no unfinished ticket has this name.
        """
        with self._lock:
            if name not in self._names:
                raise RequestError(
                    f"The request {name!r} was to be cancelled, and no unfinished request of "
                    "this engine has that name; it has ended already, or was never submitted."
                )
            self.give_up([self._names[name]])
            self.end_waiting()

    def give_up(self, tickets: Iterable[Ticket]) -> None:
        """Marks tickets that nobody waits for any more. Python may call this at any moment, where
        it frees a stream, so it changes nothing else."""
        for ticket in tickets:
            ticket.is_cancelled = True
        self.on_change()

    def end_waiting(self) -> None:
        """Ends waiting tickets that were given up."""
        with self._lock:
            for ticket in list(self._waiting):
                if (finish := ticket.given_up) is not None:
                    self._waiting.remove(ticket)
                    self.abort(ticket, finish)

    def abort(self, ticket: Ticket, finish: Finish) -> None:
        """Finishes a ticket without output."""
        self.finish(ticket, self._abort(ticket, finish))

    def finish(self, ticket: Ticket, completion: Completion) -> None:
        """Gives a ticket its completion, and frees its name and its row. A ticket that already has
        a completion keeps it, because an abandoned step may still return."""
        with self._lock:
            if ticket.completion is not None:
                return
            ticket.completion, ticket.acceptance = completion, completion.acceptance
            self.on_finish(ticket)
            if ticket.row is not None:
                self._rows[ticket.row] = None
                ticket.row = None
            name = ticket.request.request_id
            if self._names.get(name) is ticket:
                del self._names[name]
            if not ticket.has_consumer:
                self._finished.append(completion)
        self.on_change()

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
            self.give_up(self.unfinished)
            self.end_waiting()

    def abandon(self, finish: Finish, why: str) -> None:
        """Ends every ticket immediately, without output, and refuses new ones.

        Args:
          finish: the reason for every ticket.
          why: what happened to the engine, to follow "an engine that".
        """
        with self._lock:
            self._closed = why
            self.end_all(finish)

    def end_all(self, finish: Finish) -> None:
        """Ends every ticket immediately, without output; `finish` is the reason."""
        with self._lock:
            unfinished = self.unfinished
            self._waiting.clear()
            for ticket in unfinished:
                self.abort(ticket, finish)
