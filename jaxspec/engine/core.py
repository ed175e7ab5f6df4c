"""The engine's steps: each admits requests, prefills prompts, runs rounds and collects completions.
Callers that wait for output step the engine until it is there, unless a driver does."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import math
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterator,
    Sequence,
)
from typing import Any, TypeVar

import numpy as np

from jaxspec.engine.adaptive import FixedDrafting
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.driver import DeviceLock, Driver
from jaxspec.engine.executor import Executor, Started
from jaxspec.engine.kept_rows import KeptRows
from jaxspec.engine.progress import Progress
from jaxspec.engine.queue import RequestQueue, StreamOutput, Ticket
from jaxspec.engine.shared_steps import SharedSteps
from jaxspec.engine.watchdog import StepTimeoutError, Watchdog
from jaxspec.errors import QueueFullError, RequestError
from jaxspec.models.base import kernels_of
from jaxspec.requests.completions import Completion, make_completion
from jaxspec.runtime.compilation import Compiled, OnProgram
from jaxspec.runtime.host_limits import free_memory
from jaxspec.telemetry.counters import Acceptance, Metrics
from jaxspec.telemetry.trace import row_trace
from jaxspec.types import DecodeState, Finish

_log = logging.getLogger(__name__)

# Chunks that a step may prefill for each idle row after the first. 48 requests of 512 + 64 tokens
# at batch 16 take 703 rounds with 0, 157 with 1, 142 with 2, 131 with 4 and 129 without a limit;
# the longest gap of a stream beside a burst of 15 prompts is 261, 481, 742, 920 and 1548 ms.
CHUNKS_PER_IDLE_ROW = 2
# Chunks that a step may prefill while no row has begun to decode: 2,048 tokens, as in vLLM.
CHUNKS_OF_A_BURST = 16
LIVE = (Finish.RUNNING, Finish.PREFILLING)
# Finish reasons that the host decides; the device would go on with these rows.
BY_HOST = (Finish.CANCELLED, Finish.TIMEOUT, Finish.STOP_STRING, Finish.TOKENIZER_ERROR)

T = TypeVar("T")


def is_compiling(executor: Executor) -> bool:
    """Whether one of the executor's programs is being compiled, in any thread."""
    return any(getattr(each, "is_compiling", False) for each in executor.programs.values())


class EngineCore:
    """Moves requests from the queue through the executor's rows to their completions.

    Args:
      executor: an executor with every row empty.
      config: the engine's settings.
      drafting: chooses draft lengths.

    Attributes:
      lock: guards the device; held during a step. Take it before calling the executor.
      queue: the requests, with its own lock, which is only held briefly.
      kept: the KV that outlives its request.
      metrics: counters.
      driver: the thread that steps, within `driven`; otherwise None.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        drafting: FixedDrafting,
    ):
        self.executor = executor
        session_bytes = config.session_bytes
        if session_bytes is None:
            session_bytes = free_memory()[0] // 4
        self.kept = KeptRows(executor, max_bytes=session_bytes)
        self.drafting = drafting
        self.lock = DeviceLock()
        self.driver: Driver | None = None
        self.queue = RequestQueue(
            executor.num_rows, max_waiting=config.max_queue, abort=self._abort
        )
        self.metrics = Metrics()
        self.queue.on_finish = self._note_end
        self._rounds_per_sync = config.rounds_per_sync
        self._rounds_per_piece = config.rounds_per_piece
        self._logprobs_mode = config.logprobs_mode
        self._arrivals = itertools.count()
        self._is_oldest_next = True  # or the prompt with the fewest tokens left; see _take_chunks
        # Calls of `executor.run` whose result has not been read, oldest first; None for a call that
        # did not run in the background. No row gets another request while there are any.
        self._rounds: collections.deque[Started | None] = collections.deque()
        self._shared_steps = SharedSteps(lambda: self.step())
        self._step_timeout_s = config.step_timeout_s
        self._watchdog = None
        if config.step_timeout_s is not None:
            self._watchdog = self._make_watchdog(config.step_timeout_s)
        self._is_abandoned = False

    @property
    def num_rounds(self) -> int:
        """Rounds run so far, on all shards together."""
        schedule = self.watched(lambda: self.executor.fetch("schedule"))
        return 0 if schedule is None else int(np.sum(schedule.num_rounds))

    def step(self) -> None:
        """One step: until a row ends, or for `rounds_per_sync` rounds. While prompts are being
        prefilled and output is awaited, a step is a few chunks and `rounds_per_piece` rounds."""
        self.watched(self._step)

    def warm_up(
        self, on_program: OnProgram | None, *, scoring: bool = False
    ) -> tuple[Compiled, ...]:
        """Compiles every program, without the lock (see `Executor.warm_up`), and then measures.

        Raises:
          RequestError: the device does not answer.
        """
        warm_up = functools.partial(self.executor.warm_up, on_program, scoring=scoring)
        compiled: tuple[Compiled, ...] = ()
        if self._step_timeout_s is None:
            compiled = warm_up()
        else:
            try:
                compiled = self._make_watchdog(self._step_timeout_s).run(warm_up)
            except StepTimeoutError:
                with self.lock:
                    self._abandon()
        self.measure()
        if self._is_abandoned:
            raise RequestError(f"The engine {self._why_abandoned}; make another engine.")
        return compiled

    @contextlib.contextmanager
    def driven(self) -> Iterator[None]:
        """A block in which one thread runs all steps; see `Engine.driven`.

        Raises:
          RequestError: the engine is driven already.
        """
        self.measure()
        with self.lock:
            if self.driver is not None:
                raise RequestError(
                    "engine.driven() was begun within another; one thread steps for all callers, "
                    "so leave the second out."
                )
            self.driver = driver = Driver(self.queue, step=self._driven_step, fail=self._fail)
        driver.start()
        try:
            yield
        finally:
            self.driver = None
            driver.end()

    def _driven_step(self) -> None:
        self.lock.let_others_in()
        self.step()

    def _fail(self) -> None:
        """Ends every request, after a step that failed."""
        with self.lock:
            self.reset()
            self.metrics.abandon()
            self.queue.end_all(Finish.DEVICE_ERROR)

    def shut_down(self) -> None:
        """Cancels every request, and drops the state."""
        with self.lock:
            self.queue.close()
            self.watched(self._end_early)
            self.reset()
            self.kept.clear()

    def reset(self) -> None:
        """Drops the state, and the KV that its rows held."""
        self._rounds.clear()
        self.kept.forget_rows()
        self.executor.reset()

    def watched(self, call: Callable[[], T]) -> T | None:
        """Returns the result of a call of the device. If it takes too long, the engine ends; from
        then on nothing is called, and this returns None."""
        with self.lock:
            if self._is_abandoned:
                return None
            if self._watchdog is None:
                return self._attempt(call)
            try:
                return self._watchdog.run(lambda: self._attempt(call))
            except StepTimeoutError:
                self._abandon()
                return None

    def _attempt(self, call: Callable[[], T]) -> T:
        """The result of a call of the device. If it fails and the state is lost with it, the
        requests that had rows end."""
        try:
            return call()
        except BaseException:
            self._rounds.clear()  # the next result that is read includes theirs
            self.give_up_if_lost()
            raise

    def _make_watchdog(self, limit_s: float) -> Watchdog:
        return Watchdog(limit_s, lambda: is_compiling(self.executor))

    def release(self) -> None:
        """Ends the requests that were given up, and frees their rows. If another thread is calling
        the device, or a driver will, nothing happens; take the lock to wait for it."""
        if self.driver is not None and not self.lock.is_mine:
            return
        if self.queue.has_given_up and self.lock.acquire(blocking=False):
            try:
                self.watched(self._end_early)
            finally:
                self.lock.release()

    def measure(self) -> None:
        """With `draft_length="auto"`, measures what rounds take, unless that was done. It needs
        empty rows, so nothing is measured while requests have them."""
        if not self.drafting.needs_measuring:
            return
        with self.lock:
            self.release()
            if not self.queue.is_closed and not self.queue.tickets_by_row:
                self.watched(self._measure)

    def _measure(self) -> None:
        self.kept.park_rows()
        self.drafting.prepare(on_answer=None if self._watchdog is None else self._watchdog.renew)

    # Methods that wait for the output of requests, and step until it is there.

    def advance(self, *, unless: Callable[[], bool]) -> None:
        """Runs a step, or waits for one of the driver's, unless a condition holds."""
        driver = self.driver
        if driver is not None and not self.lock.is_mine:
            driver.wait_for_step(unless=unless)
            return
        with self.lock:
            if not unless():
                self.step()

    def completions(
        self, tickets: Sequence[Ticket], on_progress: Callable[[Progress], None] | None
    ) -> Generator[Completion, None, None]:
        """The completions of tickets in order, each as soon as it and those before it have ended.
        Closing the iterator cancels the others."""
        try:
            started_s, first_round = time.perf_counter(), self.num_rounds
            num_yielded = 0
            while num_yielded < len(tickets):
                first = tickets[num_yielded]
                self.advance(unless=lambda first=first: first.completion is not None)
                if on_progress is not None:
                    num_rounds = self.num_rounds - first_round
                    elapsed_s = time.perf_counter() - started_s
                    on_progress(Progress.of(tickets, num_rounds=num_rounds, elapsed_s=elapsed_s))
                while num_yielded < len(tickets):
                    completion = tickets[num_yielded].completion
                    if completion is None:
                        break
                    num_yielded += 1
                    yield completion
        finally:
            self.queue.give_up(tickets)

    def stream(self, ticket: Ticket) -> Generator[StreamOutput, None, None]:
        """The output of a ticket as it is emitted. Closing the iterator cancels the ticket."""
        outputs = self._stream(ticket)
        next(outputs)  # begins the generator: closing one that has not begun runs no `finally`
        return outputs

    def _stream(self, ticket: Ticket) -> Generator[Any, None, None]:
        try:
            yield None  # to `stream`
            if self.driver is not None:
                yield from self.driver.stream(ticket)
                return
            is_done = False
            while not is_done:
                with self.lock:
                    if not ticket.has_output:
                        self.step()
                for output in ticket.take_output():
                    is_done = output.completion is not None
                    yield output
        finally:
            self.queue.give_up([ticket])

    def astream(
        self, ticket: Ticket, add: Callable[[Ticket], object], *, wait: bool
    ) -> AsyncGenerator[StreamOutput, None]:
        """`stream` for asyncio. `add` queues the ticket: at once, or, with `wait`, as soon as the
        iterator has begun and there is a place for it."""
        if not wait:
            add(ticket)
        outputs = self._astream(ticket, add if wait else None)
        # An event loop that has stopped does not close its generators.
        weakref.finalize(outputs, self.queue.give_up, [ticket]).atexit = False
        return outputs

    async def _astream(
        self, ticket: Ticket, add: Callable[[Ticket], object] | None
    ) -> AsyncGenerator[StreamOutput, None]:
        if self.driver is not None:
            driven = self._astream_driven(ticket, self.driver, add)
            async with contextlib.aclosing(driven):
                async for output in driven:
                    yield output
            return
        with self._shared_steps.for_stream(ticket):
            if add is not None:
                await self._add_when_possible(ticket, add, self._shared_steps.wait_for_step)
            try:
                is_done = False
                while not is_done:
                    if not ticket.has_output:
                        await self._shared_steps.wait_for_step()
                    for output in ticket.take_output():
                        is_done = output.completion is not None
                        yield output
            finally:
                self.queue.give_up([ticket])

    async def _astream_driven(
        self, ticket: Ticket, driver: Driver, add: Callable[[Ticket], object] | None
    ) -> AsyncGenerator[StreamOutput, None]:
        try:
            if add is not None:
                await self._add_when_possible(ticket, add, driver.await_step)
            outputs = driver.astream(ticket)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self.queue.give_up([ticket])

    async def _add_when_possible(
        self,
        ticket: Ticket,
        add: Callable[[Ticket], object],
        wait_for_step: Callable[[], Awaitable[None]],
    ) -> None:
        """Queues a ticket as soon as there is a place for it, or ends it when its time is up."""
        while True:
            try:
                add(ticket)
                return
            except QueueFullError:
                await wait_for_step()
            if ticket.is_overdue:
                self.queue.abort(ticket, Finish.TIMEOUT)
                return

    # The parts of a step, in the order they run.

    def _step(self) -> None:
        self._end_early()
        if self.queue.num_unfinished:
            self.executor.check_weights()
        if not self._rounds:
            self._admit_waiting()
            self._prefill_prompts()
            self._run_rounds()
        if self._may_run_ahead():
            self._run_rounds()
        self._collect()

    def _end_early(self) -> None:
        """Ends requests that were given up, with the tokens seen so far, and frees their rows."""
        self.queue.end_waiting()
        tickets = self.queue.tickets_by_row.items()
        if ends := {row: why for row, ticket in tickets if (why := ticket.given_up) is not None}:
            self._finish(ends)

    def _admit_waiting(self) -> None:
        """Gives free rows to requests, first come, first served."""
        free = self.executor.free_rows(self.queue.tickets_by_row)
        while free:
            ticket = self.queue.place_next(lambda ticket: self.kept.choose_row(ticket, free))
            if ticket is None:
                return
            assert ticket.row is not None, "it was placed"
            free.remove(ticket.row)
            ticket.admitted_s = time.monotonic()
            ticket.arrival = next(self._arrivals)
            ticket.draft_limit = self.drafting.first_limit(ticket)
            self.kept.admit(ticket)
            self._catch_up(ticket)

    def _prefill_prompts(self) -> None:
        """Prefills prompts: all of them or, if the output of running rows is awaited, as many
        chunks as the step's budget allows."""
        tickets, num_chunks = self.queue.tickets_by_row, 0
        chunks: list[tuple[int, int]] = []
        least = 0 if _are_decoding(tickets.values()) else CHUNKS_OF_A_BURST
        while taken := self._take_chunks():
            chunks += taken
            num_chunks += 1
            is_awaited = _are_decoding(tickets.values()) and _is_interactive(tickets.values())
            if is_awaited and num_chunks >= max(least, self._chunk_budget()):
                break
        if not chunks:
            return
        if scored := [(row, start) for row, start in chunks if tickets[row].is_scored]:
            self.executor.prefill(scored, is_scored=True)
        if others := [(row, start) for row, start in chunks if not tickets[row].is_scored]:
            self.executor.prefill(others, target_only=self.drafting.is_resting)
        for row in dict(chunks):
            self._catch_up(tickets[row])

    def _chunk_budget(self) -> int:
        """Chunks that a step may prefill while rows are running: more of them, the more rows of the
        batch are idle and wait for a prompt. A single prompt gets one chunk per step, or a whole
        call where that takes no longer, because padding is computed too."""
        num_running, num_unread = collections.Counter(), collections.Counter()
        for row, ticket in self.queue.tickets_by_row.items():
            if not ticket.is_prefilling and not ticket.is_decoding:
                continue
            counts = num_unread if ticket.is_prefilling else num_running
            counts[self.executor.shard_of(row)] += 1
        parts = self.executor.parts
        num_idle = max(
            min(num_unread[shard], parts.shape.batch_size - num_running[shard])
            for shard in range(self.executor.num_shards)
        )
        budget = 1 + CHUNKS_PER_IDLE_ROW * max(num_idle - 1, 0)
        skips_padding = kernels_of(parts.target).skips_padding
        unit = 1 if skips_padding else parts.shape.chunks_per_call
        return math.ceil(budget / unit) * unit

    def _take_chunks(self) -> list[tuple[int, int]]:
        """The next chunk `(row, start)` of one unfinished prompt of each shard; from now on it
        counts as prefilled. The oldest prompt and the one with the fewest tokens left take turns: a
        short one need not wait for the whole of a long one, and the long one is read at half the
        rate at least."""
        tickets = self.queue.tickets_by_row.items()
        unread = [(row, ticket) for row, ticket in tickets if ticket.is_prefilling]
        is_oldest_next, self._is_oldest_next = self._is_oldest_next, not self._is_oldest_next

        def order(item: tuple[int, Ticket]) -> tuple[int, int]:
            ticket = item[1]
            num_left = ticket.prompt_length - ticket.num_prefilled
            return (0 if is_oldest_next else num_left, ticket.arrival)

        chosen: dict[int, tuple[int, Ticket]] = {}
        for row, ticket in sorted(unread, key=order):
            chosen.setdefault(self.executor.shard_of(row), (row, ticket))
        chunks = [(row, ticket.num_prefilled) for row, ticket in chosen.values()]
        for _, ticket in chosen.values():
            ticket.num_prefilled += self.executor.shape.prefill_chunk
        return chunks

    def _catch_up(self, ticket: Ticket) -> None:
        """Lets the drafter catch up on a prompt whose beginning was not prefilled for this request,
        or that the target alone has read, as soon as the target has prefilled the rest."""
        if (
            (ticket.num_reused or ticket.is_scored)
            and ticket.draft_length
            and not ticket.is_prefilling
            and not self.drafting.is_resting
        ):
            assert ticket.row is not None, "what is read has a row"
            lag = int(self.executor.lags()[ticket.row])
            if lag > 1:  # the next round makes up for one
                self.executor.catch_up({ticket.row: lag})

    def _run_rounds(self) -> None:
        """Decodes until the host has something to do."""
        executor, tickets = self.executor, self.queue.tickets_by_row
        running = {row: ticket for row, ticket in tickets.items() if ticket.is_decoding}
        if not running:
            return
        is_ahead = bool(self._rounds)
        num_rounds, min_running = self._rounds_per_sync, np.ones((executor.num_shards,), np.int32)
        if _is_interactive(tickets.values()):  # stop when a row ends, to report it at once
            for shard, number in collections.Counter(map(executor.shard_of, running)).items():
                min_running[shard] = number
            if any(one.is_streamed for one in tickets.values()):
                num_rounds = min(self._rounds_per_piece, num_rounds)
            begins = any(one.is_streamed and one.first_token_s is None for one in running.values())
            if begins and not is_ahead and not self.queue.has_waiting:
                num_rounds = 1  # in a full engine so many short calls would cost throughput
        elif self.queue.has_waiting:
            min_running[:] = executor.parts.scheduler.min_running(executor.parts.shape.batch_size)
        if len(running) < len(tickets) or any(one.deadline is not None for one in tickets.values()):
            num_rounds = min(self._rounds_per_piece, num_rounds)
        choice = self.drafting.before_rounds(tickets, num_rounds, is_ahead=is_ahead)
        started = executor.run(
            choice.num_rounds,
            draft_length=choice.draft_length,
            min_running=min_running,
            variant=choice.variant,
            in_background=executor.runs_ahead,
        )
        self._rounds.append(started)

    def _may_run_ahead(self) -> bool:
        """Whether rounds may start before the result of the last ones is read: only if that result
        cannot make anything but rounds come next. Rows end by themselves on the device."""
        return (
            self.executor.runs_ahead
            and bool(self._rounds)
            and not self.queue.has_waiting
            and all(ticket.is_decoding for ticket in self.queue.tickets_by_row.values())
            and self.drafting.runs_ahead
        )

    def _collect(self) -> None:
        """Checks the rows after the oldest rounds that were not collected yet: buffers output for
        streams, and finishes rows that have ended."""
        tickets = self.queue.tickets_by_row
        were_run = bool(self._rounds)
        if not tickets and not were_run:
            return
        started = self._rounds.popleft() if were_run else None
        fields = ["num_committed", "finish", "counts", *self.drafting.state_fields]
        if any(ticket.reads_output for ticket in tickets.values()):
            fields.append("tokens")
        if any(ticket.streams_logprobs for ticket in tickets.values()):
            fields += [name for name in ("tokens", "logprobs") if name not in fields]
        copy = None if started is None else started.result()[1]
        state = self.executor.fetch(*fields, state=copy)
        answered_s = time.perf_counter()
        ends: dict[int, Finish] = {}
        for row, ticket in tickets.items():
            is_live = state.finish[row] in LIVE
            # Otherwise the row would never be decoded, and the engine would step forever.
            assert state.finish[row] != Finish.PREFILLING or ticket.is_prefilling
            first, last = ticket.prompt_length, int(state.num_committed[row])
            self._note_tokens(ticket, last - first)
            ticket.acceptance = Acceptance.of_row(state.counts, row, num_emitted=last - first)
            unread = slice(first + ticket.num_read, last)
            output = state.tokens[row, unread].tolist() if ticket.reads_output else []
            tokenizer = self.executor.parts.target.tokenizer
            try:
                ticket.read_output(tokenizer, output)
                if ticket.stopped is not None:
                    ends[row] = Finish.STOP_STRING
                elif is_live and ticket.is_streamed:
                    wanted = ticket.request.params.logprobs
                    logprobs = _logprobs(state, row, unread.start, last, wanted)
                    ticket.buffer_output(output, logprobs)
            except Exception:  # from a tokenizer, perhaps the user's own; other requests continue
                _log.exception("the output of request %s cannot be read", ticket.request.request_id)
                ends[row] = Finish.TOKENIZER_ERROR
            if not is_live:
                ends[row] = Finish(int(state.finish[row]))
        if were_run:
            self.drafting.after_rounds(tickets, state, answered_s=answered_s)
        self._finish(ends, copy)

    def _finish(self, ends: dict[int, Finish], copy: DecodeState | None = None) -> None:
        """Ends rows with the tokens seen so far. Those that have not ended by themselves may have
        run a few rounds too many, whose tokens are cut off.

        Args:
          ends: why, by row.
          copy: a state after the rounds in which the tokens were seen; by default the newest.
        """
        tickets = self.queue.tickets_by_row
        self.metrics.update(
            ended=[tickets[row].acceptance for row in ends if tickets[row].is_counted],
            running=[
                ticket.acceptance
                for row, ticket in tickets.items()
                if row not in ends and ticket.is_counted
            ],
        )
        for finish in BY_HOST:
            if rows := [row for row, why in ends.items() if why == finish]:
                self.executor.end_rows(rows, finish)
        if ends:
            state = self.executor.fetch(state=copy)
            for row, finish in ends.items():
                self.kept.keep(tickets[row], state, row)
                completion = self._completion(state, row, tickets[row], finish)
                self.queue.finish(tickets[row], completion)
            if self._rounds and len(ends) == len(tickets):  # no request waits for these
                self._collect()

    def _note_tokens(self, ticket: Ticket, num_emitted: int) -> None:
        """Notes when a row's tokens were seen."""
        now_s, number = time.monotonic(), num_emitted - ticket.acceptance.num_emitted_tokens
        if number <= 0:
            return
        if ticket.last_token_s is None:
            ticket.first_token_s, ticket.last_token_s, number = now_s, now_s, number - 1
        if number:
            self.metrics.note_tokens(now_s - ticket.last_token_s, number)
        ticket.last_token_s = now_s

    def _note_end(self, ticket: Ticket) -> None:
        """Counts a ticket that has got its completion."""
        if not ticket.is_counted:
            return
        done = ticket.completion
        assert done is not None, "it has ended"
        is_aborted = done.finish_reason == "abort"
        self.metrics.note_end(
            str(done.stop_reason) if is_aborted else done.finish_reason,
            num_prompt=0 if ticket.admitted_s is None else ticket.prompt_length,
            num_emitted=len(done.token_ids),
            times=done.times,
        )

    def _completion(
        self, state: DecodeState, row: int, ticket: Ticket, finish: Finish
    ) -> Completion:
        """The completion of a row that has ended, from a state on the host."""
        request, of_prompt = ticket.request, None
        first, last = ticket.prompt_length, ticket.num_committed
        if ticket.is_scored and not ticket.is_prefilling:
            found = _logprobs(state, row, 1, first, request.params.prompt_logprobs) or ()
            of_prompt = (None, *found)
            if any(math.isnan(value) for of_token in found for value in of_token.values()):
                of_prompt, finish = None, Finish.NON_FINITE
        complete = functools.partial(
            make_completion,
            request,
            self.executor.parts.target,
            token_ids=state.tokens[row, first:last].tolist(),
            origins=np.asarray(state.origin[row, first:last]).tolist(),
            stop_token=int(state.stop_token[row]),
            acceptance=ticket.acceptance,
            trace=row_trace(state.trace, row, ticket.acceptance.num_rounds),
            logprobs=_logprobs(state, row, first, last, request.params.logprobs),
            logprobs_mode=self._logprobs_mode,
            prompt_logprobs=of_prompt,
            num_reused_tokens=ticket.num_reused,
            num_reread_tokens=ticket.num_reread,
            times=ticket.times,
        )
        try:
            return complete(finish=finish, stopped=ticket.stopped)
        except Exception:  # from a tokenizer: the tokens are kept, and other requests continue
            _log.exception("the output of request %s cannot be read", request.request_id)
            return complete(finish=Finish.TOKENIZER_ERROR)

    def give_up_if_lost(self) -> bool:
        """Ends every request that has a row, if the state was donated to a call that failed or the
        weights were deleted; returns whether that is so."""
        if not self.executor.is_lost:
            return False
        self.reset()
        self.metrics.abandon()
        for ticket in self.queue.tickets_by_row.values():
            self.queue.abort(ticket, Finish.DEVICE_ERROR)
        return True

    def _abandon(self) -> None:
        """Ends every request and the engine, because the device no longer answers."""
        self._is_abandoned = True
        self.kept.clear()
        self.executor.reset()  # else what was started would be waited for
        _log.error("the engine %s", self._why_abandoned)
        self.metrics.abandon()
        self.queue.abandon(Finish.DEVICE_TIMEOUT, self._why_abandoned)

    @property
    def _why_abandoned(self) -> str:
        return f"ended because a step took longer than {self._step_timeout_s:g} s (step_timeout_s)"

    def _abort(self, ticket: Ticket, finish: Finish) -> Completion:
        """The completion of a request that emitted nothing."""
        return make_completion(
            ticket.request,
            self.executor.parts.target,
            token_ids=(),
            origins=(),
            finish=finish,
            stop_token=-1,
            acceptance=Acceptance(),
            times=ticket.times,
        )


def _are_decoding(tickets: Collection[Ticket]) -> bool:
    """Whether any of them has been prefilled and has not ended."""
    return any(ticket.is_decoding for ticket in tickets)


def _is_interactive(tickets: Collection[Ticket]) -> bool:
    """Whether the output of any of them is awaited."""
    return any(ticket.is_interactive for ticket in tickets)


def _logprobs(
    state: DecodeState, row: int, first: int, last: int, num_top: int | None
) -> tuple[dict[int, float], ...] | None:
    """Log-probabilities by token id of some tokens of a row, from a state on the host."""
    kept: Any = state.logprobs
    if num_top is None or kept is None:
        return None
    each = []
    for slot in range(first, last):
        top = zip(kept.top_tokens[row, slot, :num_top], kept.top[row, slot, :num_top], strict=True)
        of_token = {int(state.tokens[row, slot]): float(kept.of_token[row, slot])}
        each.append({int(token): float(value) for token, value in top} | of_token)
    return tuple(each)
