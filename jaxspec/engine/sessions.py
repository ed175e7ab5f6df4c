"""Sessions: conversations whose KV is kept between turns."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any, Unpack

from jaxspec.engine.conversation import Conversation
from jaxspec.engine.core import EngineCore
from jaxspec.engine.executor import Executor
from jaxspec.engine.intake import Intake, RequestSettings
from jaxspec.engine.memory import in_units
from jaxspec.engine.queue import StreamOutput, Ticket
from jaxspec.errors import RequestError, SettingError
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import Params, Prompt
from jaxspec.requests.sampling_params import SamplingParams


class Session:
    """A conversation, made by `Engine.session`.

    Give each turn the whole prompt, as for `Engine.generate`: all messages so far, or the whole
    text. It is compared with the tokens whose KV the session has, and prefilled from the first
    difference on; `Completion.num_reused_tokens` and `.num_reread_tokens` report the result. A
    prompt may share nothing with the last one; it is then prefilled like any other.

    Between turns the KV stays in its row as long as no other request needs it, and is then parked
    on the host (`Engine(session_bytes=...)`). KV that was dropped is prefilled again. So a session
    takes no room from other requests, and any number may be open.

    Turns of one session follow one another; different sessions may be used by different threads.
    `with engine.session() as session:` closes it.

    Example:
      >>> import jaxspec
      >>> engine = jaxspec.Engine("demo-target", "ngram", batch_size=2)
      >>> few = jaxspec.SamplingParams(max_tokens=8, ignore_eos=True)
      >>> with engine.session() as session:
      ...     first = session.generate("Once upon a time", few)
      ...     second = session.generate("Once upon a time" + first.text + " So", few)
      >>> second.num_reused_tokens > first.num_reused_tokens == 0
      True
    """

    def __init__(
        self, core: EngineCore, intake: Intake, *, exactness: str, conversation: Conversation
    ):
        self.exactness = exactness
        self._core, self._intake, self._conversation = core, intake, conversation
        self._lock = threading.RLock()
        self._ticket: Ticket | None = None

    def __repr__(self) -> str:
        kept = f"{self.num_kept_tokens} tokens of KV on the {self.place}"
        return f"<Session: {'closed' if self._conversation.is_closed else kept}>"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output of the last turn that has ended."""
        return self._settled.token_ids

    @property
    def num_kept_tokens(self) -> int:
        """Number of tokens whose KV is kept; while a turn is in progress, as of the last one."""
        return self._settled.num_slots

    @property
    def row(self) -> int | None:
        """The row of the executor that holds the KV, or None."""
        return self._settled.row

    @property
    def place(self) -> str:
        """Where the KV is: `device`, `host`, or `none` if there is none."""
        if self.row is not None:
            return "device"
        return "host" if self._settled.stored is not None else "none"

    def generate(
        self,
        prompt: Prompt,
        params: Params | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Completion:
        """The completion of the next turn. Other requests are decoded alongside.

        Args:
          prompt: all messages so far, or the whole prompt as text or token ids.

        The other arguments are those of `Engine.submit`.

        Raises:
          PromptError, SettingError, QueueFullError: as in `Engine.submit`; the session is left
            unchanged.
          RequestError: the session is closed, or its last turn has not ended.
        """
        ticket = self._intake.single(prompt, params, **settings)
        ticket = dataclasses.replace(ticket, has_consumer=True)
        self._core.measure()
        self.enqueue(ticket)
        [completion] = self._core.completions([ticket], None)
        return completion

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Generator[StreamOutput, None, None]:
        """Yields what the next turn emits, as it is emitted; the last piece holds the completion.
        Takes the arguments of `generate`, and raises the same errors, when it is called. Closing
        the iterator cancels the turn."""
        ticket = self._intake.single(prompt, params, **settings).streamed()
        self.enqueue(ticket)
        return self._core.stream(ticket)

    def astream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        wait: bool = True,
        **settings: Unpack[RequestSettings],
    ) -> AsyncGenerator[StreamOutput, None]:
        """`stream` for asyncio; see `Engine.astream`. The turn begins with the iteration, or with
        `wait=False` at once."""
        ticket = self._intake.single(prompt, params, **settings).streamed()
        return self._core.astream(ticket, self.enqueue, wait=wait)

    def fork(self) -> Session:
        """Another, independent session that continues from the same tokens. It has a copy of the KV
        on the host, if `session_bytes` allows.

        Raises:
          RequestError: the session is closed, or its last turn has not ended.
        """
        with self._lock, self._core.lock:
            self._check("forked")
            self._end_if_given_up()
            copy = self._core.watched(lambda: self._core.kept.fork(self._conversation))
        if copy is None:  # the device no longer answers
            copy = Conversation(is_reread=self._conversation.is_reread)
        return Session(self._core, self._intake, exactness=self.exactness, conversation=copy)

    def close(self) -> None:
        """Forgets the KV; a turn in progress is cancelled. Closing twice does nothing."""
        with self._lock, self._core.lock:
            self._conversation.is_closed = True
            turn = self._ticket
            if turn is not None:
                self._core.queue.give_up([turn])
                self._end_if_given_up()
            if turn is None or turn.completion is not None:
                self._core.kept.drop(self._conversation)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def enqueue(self, ticket: Ticket, core: EngineCore | None = None) -> None:
        """Queues a ticket for a row, as the next turn; called by `Engine.submit` and the methods
        above.

        Args:
          ticket: a ticket without a conversation.
          core: that of the engine which was given the ticket.

        Raises:
          RequestError: the session is closed, another engine's, or its last turn has not ended.
          QueueFullError: too many are waiting.
        """
        if core is not None and core is not self._core:
            raise RequestError(
                "A session of another engine was given, and its KV is in that engine's rows; make "
                "a session of this one with engine.session()."
            )
        with self._lock:
            self._check("given a turn")  # a turn that was given up ends before this one is admitted
            ticket.conversation = self._conversation
            self._core.queue.add(ticket)
            self._ticket = ticket

    @property
    def _is_busy(self) -> bool:
        turn = self._ticket
        return turn is not None and turn.completion is None and turn.given_up is None

    def _end_if_given_up(self) -> None:
        """Ends a turn that was given up, if it has not ended yet."""
        turn = self._ticket
        if turn is not None and turn.completion is None and turn.given_up is not None:
            with self._core.lock:
                self._core.release()

    @property
    def _settled(self) -> Conversation:
        """The conversation, to which a turn that was given up has been added."""
        self._end_if_given_up()
        return self._conversation

    def _check(self, what: str) -> None:
        if self._conversation.is_closed:
            raise RequestError(f"A closed session was {what}; make another with engine.session().")
        if self._is_busy:
            raise RequestError(
                f"A session was {what} while its last turn has not ended, perhaps in another "
                "thread; wait for that or cancel it, or fork the session before."
            )


def open_session(core: EngineCore, intake: Intake, *, exactness: str, reread: bool) -> Session:
    """A session without kept KV; `exactness` is the engine's.

    Raises:
      SettingError: the engine's rows cannot be kept.
      RequestError: the engine's weights were deleted.
    """
    check_keeps_rows(core.executor)
    core.executor.check_weights()  # they may be probed
    is_bitwise = reread or exactness != "bitwise" or core.kept.rows.keeps_prompt_bits
    return Session(
        core,
        intake,
        exactness=exactness if is_bitwise else "ties",
        conversation=Conversation(is_reread=reread),
    )


def cache_prefix(
    core: EngineCore,
    intake: Intake,
    prompt: Prompt,
    *,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> int:
    """Prefills a prefix that prompts share, and keeps its KV on the host; returns its number of
    tokens. See `Engine.cache_prefix`."""
    check_keeps_rows(core.executor)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    ticket = intake.single(
        prompt,
        one,
        speculate=False,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )
    prefix = Conversation(is_reread=not core.kept.rows.keeps_prompt_bits)
    ticket = dataclasses.replace(ticket, has_consumer=True, is_counted=False, conversation=prefix)
    num_tokens = ticket.prompt_length
    with core.lock:  # no other request may take the row before it has been copied
        core.queue.add(ticket)
        [completion] = core.completions([ticket], None)
        if completion.finish_reason == "abort":
            raise RequestError(
                f"The prefix could not be read ({completion.stop_reason}); try again, with another "
                "engine if this one has ended."
            )
        num_bytes = core.kept.rows.row_bytes(num_tokens)
        if not core.watched(lambda: core.kept.add_prefix(prefix)):
            raise SettingError(
                f"A prefix of {num_tokens} tokens was given, whose KV takes {in_units(num_bytes)}, "
                f"and session_bytes is {in_units(core.kept.max_bytes)} for all that is kept on the "
                "host; raise it, or shorten the prefix."
            )
    return num_tokens


def check_keeps_rows(executor: Executor) -> None:
    """Raises `SettingError` if rows of an executor cannot outlive their requests."""
    if executor.parts.layout != "ragged":
        raise SettingError(
            f"A session was asked for, and the layout is {executor.parts.layout}, which moves the "
            "KV of rows that have ended; use the ragged layout."
        )


def kept_counts(core: EngineCore) -> dict[str, Any]:
    """The counts of kept KV in `Engine.memory`."""
    names = ("num_resident_tokens", "num_parked_tokens", "parked_bytes", "num_reread_tokens")
    core.release()
    metrics = core.kept.metrics()
    return {name: metrics[name] for name in names}
