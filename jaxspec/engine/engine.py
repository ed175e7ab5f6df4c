"""The engine: requests in, completions out."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxspec.cache.layouts import Layout
from jaxspec.decode.loop import LogprobsConfig
from jaxspec.decode.settings import (
    DEFAULT_DRAFT_LENGTH,
    DraftLength,
    Exactness,
    check_draft_length,
    make_loop,
)
from jaxspec.decode.sharded import batch_size_per_shard, check_mesh
from jaxspec.drafters.base import Drafter
from jaxspec.engine.adaptive import Choice, DraftLengthController, measure_round_times
from jaxspec.engine.admission import stop_tokens
from jaxspec.engine.executor import Executor
from jaxspec.errors import QueueFullError, RequestError, SettingError
from jaxspec.models.base import Model
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.completions import (
    Completion,
    Completions,
    StopMatch,
    find_stop,
    make_completion,
    settled_text,
)
from jaxspec.requests.requests import Prompt, Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Compiled, OnProgram
from jaxspec.runtime.environment import devices, devices_sentence
from jaxspec.schedulers import Continuous, Scheduler
from jaxspec.telemetry.counters import Acceptance, Metrics
from jaxspec.telemetry.trace import TraceConfig, TraceLevel, row_trace
from jaxspec.types import DecodeState, Finish, PyTree
from jaxspec.verifiers import Coupled, Verifier

_log = logging.getLogger(__name__)

ROUNDS_PER_CHUNK = 4  # between two chunks of prompts, and between two pieces of a stream
LIVE = (Finish.RUNNING, Finish.PREFILLING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What a progress callback is told, every few rounds.

    Attributes:
      num_requests: of the call.
      num_finished: requests that have ended.
      num_emitted_tokens: of all requests so far.
      num_rounds: rounds run since the call began, on all shards of a mesh together.
      num_draft_tokens: drafted so far.
      num_accepted_tokens: of these, accepted.
      elapsed_s: seconds since the call began.
      time_left_s: seconds, if the rest takes as long per token and no output ends before its
        `max_tokens`; None while nothing is known.
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


class Engine:
    """Decodes batches of prompts, speculatively if it has a drafter.

    `generate` decodes a list. `submit` and `step`, or `stream` and `astream`, take requests while
    others are being decoded; these may be called by several threads. Requests are taken in the
    order in which they came. With the default scheduler `Continuous()` a row that ends is replaced
    in the next round by one whose prompt has been read already, in rows held besides those in
    batch_size; `Static()` decodes batch after batch, each to its end; `Pool()` is EXSPEC's.

    With the `coupled` verifier an output depends on the request (its seed included) and on the
    engine's shape (`max_length`, `verify_length`, `batch_size`, `prefill_chunk`, mesh, dtype), not
    on its neighbours, its row, the drafter or the draft length. Other verifiers keep what their
    `promise` says; plain decoding draws as `coupled` does, so sampled tokens differ from theirs.

    With a `mesh` the engine uses its devices. Each shard of the axis `data` decodes rows of its own
    and shares nothing with the others but the queue; an axis `model` splits heads, feed-forward and
    vocabulary of the models over the devices of a shard. A request's output does not depend on the
    shard it lands on; between meshes it may differ by rounding.

    Args:
      target: the model whose output this is.
      drafter: what proposes tokens; None decodes plainly, one token per step.
      scheduler: which rows take part in a round; default `Continuous()`.
      layout: where KV stands in the target's cache. `ragged` never moves any; `aligned` pads rows
        on the left so that those in the batch end at one slot, and moves them after every round, as
        2510.22876 does. Its output equals the ragged one's except at ties within rounding.
      verifier: what decides how much of a draft is kept; default `Coupled()`.
      draft_length: tokens proposed per round, 1 to `verify_length - 1`; or `auto`, which chooses
        between 0 and `verify_length - 1` as the rows go on, by their acceptance and by what rounds
        cost here (see `jaxspec.engine.adaptive`), which is measured before the first request.
      exactness: `bitwise` scores every token in a window of one width, so that outputs do not
        depend on drafts to the bit. `ties` scores no more than the drafts need, down to plain steps
        of one token where nothing is drafted: faster, and equal except at ties within rounding.
      verify_length: T, tokens scored per round, or at most with `ties`; default `draft_length + 1`,
        and 5 with `auto`. Runs that should agree bit for bit must share it.
      batch_size: B, rows of a batch; of all data shards together, if there is a mesh. A scheduler's
        own numbers of rows are of each shard.
      max_length: slots per row for prompt and output, rounded up to a multiple of 128. The last
        round of a row needs `verify_length` slots.
      prefill_chunk: prompt tokens read per call.
      rounds_per_sync: most rounds between two looks of the host.
      max_queue: requests that may wait for a row; `submit` refuses more.
      max_logprobs: log-probabilities kept per token for requests that ask for them, besides the
        emitted token's; None keeps none and costs nothing.
      logprobs_mode: of the model's own logits (`raw_logprobs`), or of the distribution that tokens
        are drawn from (`processed_logprobs`; of a greedy row at temperature 1).
      trace: what is recorded for `Completions.rounds()` and `.tokens()`: `rounds`; `tokens`, one
        record per drafted token as well; or `distributions`, also entropies and overlap of p and q.
        None records nothing and costs nothing.
      check_invariants: run round by round and check after each that KV, padding and positions are
        what `layouts.broken_invariants` says; many times slower, for hunting a fault. A broken one
        raises `AssertionError`.
      mesh: devices to use, with an axis `data` and perhaps an axis `model`, whatever their axis
        types; default one device. Parameters that are not on it as they should be are copied there.

    Raises:
      SettingError: a setting out of range; a mesh with other axes, or one that does not divide the
        batch_size, or the target's KV heads, feed-forward width or vocabulary.
      ModelError: the drafter cannot draft for the target.

    Example:
      >>> import jaxspec
      >>> target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
      >>> engine = jaxspec.Engine(
      ...     target, drafter=jaxspec.DraftModel(draft), draft_length=4, batch_size=8,
      max_length=1024 ... )
      >>> completions = engine.generate(
      ...     ["Once upon a time", "def main():"],
      ...     jaxspec.SamplingParams(max_tokens=64, ignore_eos=True),
      ... )
      >>> len(completions[0].token_ids), completions[0].finish_reason
      (64, 'length')
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None = None,
        *,
        verifier: Verifier | None = None,
        scheduler: Scheduler | None = None,
        layout: Layout = "ragged",
        draft_length: DraftLength = DEFAULT_DRAFT_LENGTH,
        exactness: Exactness = "bitwise",
        verify_length: int | None = None,
        batch_size: int = 8,
        max_length: int = 1024,
        prefill_chunk: int = 128,
        rounds_per_sync: int = 32,
        max_queue: int = 1024,
        max_logprobs: int | None = None,
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs",
        trace: TraceLevel | None = None,
        check_invariants: bool = False,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.target = target
        self.drafter = drafter
        self.verifier = Coupled() if verifier is None else verifier
        self.scheduler = Continuous() if scheduler is None else scheduler
        self.layout: Layout = layout
        self.max_logprobs = max_logprobs
        self.logprobs_mode = logprobs_mode
        self.is_adaptive = draft_length == "auto" and drafter is not None
        if draft_length == "auto":
            verify_length = (
                DEFAULT_DRAFT_LENGTH + 1
                if verify_length is None and drafter is not None
                else verify_length
            )
            draft_length = DEFAULT_DRAFT_LENGTH if verify_length is None else verify_length - 1
        self.draft_length = draft_length if drafter is not None else 0
        self.rounds_per_sync = rounds_per_sync
        self.max_queue = max_queue
        for name, value in (("rounds_per_sync", rounds_per_sync), ("max_queue", max_queue)):
            if value < 1:
                raise SettingError(f"{name} {value} was given; it must be at least 1.")
        if max_logprobs is not None and not 0 <= max_logprobs <= target.vocab_size:
            raise SettingError(
                f"max_logprobs {max_logprobs} was given; it must be from 0 to {target.vocab_size}, "
                "the size of the vocabulary."
            )
        logprobs = None
        if max_logprobs is not None:
            is_processed = logprobs_mode == "processed_logprobs"
            logprobs = LogprobsConfig(num_top=max_logprobs, is_processed=is_processed)
        loop = make_loop(
            target,
            drafter,
            verifier=self.verifier,
            scheduler=self.scheduler,
            layout=layout,
            draft_length=draft_length,
            verify_length=verify_length,
            batch_size=batch_size
            if mesh is None
            else batch_size_per_shard(batch_size, check_mesh(mesh)),
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            logprobs=logprobs,
            trace=None if trace is None else TraceConfig(level=trace),
        )
        self.executor = Executor(
            loop,
            exactness=exactness,
            is_adaptive=self.is_adaptive,
            check_invariants=check_invariants,
            mesh=mesh,
        )
        self.mesh = self.executor.mesh
        self.verify_lengths = self.executor.verify_lengths
        self.shape = self.executor.shape
        self.num_residents = self.executor.num_rows
        self.memory = self.executor.memory
        _log.info(self.memory.sentence)

        # Who waits, and who has a row. `_lock` guards these and is held for moments; `_device_lock`
        # guards the state on the device and is held for a step. Whoever takes both takes the latter
        # first.
        self._lock, self._device_lock = threading.RLock(), threading.RLock()
        self._queue: collections.deque[Ticket] = collections.deque()
        self._rows: list[Ticket | None] = [None] * self.num_residents
        self._tickets: dict[Hashable, Ticket] = {}
        self._finished: list[Completion] = []
        self._metrics = Metrics()
        self._numbers, self._arrivals = itertools.count(), itertools.count()
        self._is_closed = False
        self._shared_step: asyncio.Future[None] | None = None
        self.controller: DraftLengthController | None = None
        self._choice: Choice | None = None  # of the rounds that `_collect` looks at next
        self._first_round: Any = 0  # before these, by shard
        num_used = 1 if self.mesh is None else self.mesh.devices.size
        if jax.local_device_count() > num_used:
            _log.warning("this engine is %s", devices_sentence(devices(num_used)))

    @property
    def longest_prompt(self) -> int:
        """Prompt tokens that leave room for one round."""
        return self.executor.longest_prompt

    @property
    def exactness(self) -> str:
        """`bitwise` (the target's own tokens), `ties` (the same except at ties within rounding:
        asked for, or the aligned layout), `distribution` (the target's distribution) or `lossy`."""
        if self.verifier.is_coupled:
            return (
                "bitwise" if self.layout == "ragged" and len(self.verify_lengths) == 1 else "ties"
            )
        return "distribution" if self.verifier.is_lossless else "lossy"

    @property
    def rounds_by_draft_length(self) -> dict[int, int]:
        """With `draft_length="auto"`: rounds run so far at each length it chose, 0 being plain
        decoding; empty otherwise."""
        chosen = {} if self.controller is None else self.controller.num_rounds
        return dict(sorted(chosen.items()))

    def metrics(self) -> dict[str, Any]:
        """Counters of the engine's life, in vLLM's names; any thread may ask (see
        `telemetry.Metrics.snapshot`). Rows that are running are counted as far as the host
        last looked."""
        return self._metrics.snapshot()

    def describe(self) -> dict[str, Any]:
        """Shape and promise, for reports."""
        return {
            "target": self.target.name,
            "drafter": self.drafter.name if self.drafter else "none",
            "is_synthetic": bool(self.drafter and self.drafter.is_synthetic),
            "verifier": self.verifier.name,
            "layout": self.layout,
            "scheduler": self.scheduler.name,
            "num_residents": self.num_residents,
            "draft_length": "auto" if self.is_adaptive else self.draft_length,
            "verify_lengths": list(self.verify_lengths),
            "exactness": self.exactness,
            "promise": self.verifier.promise,
            "mesh": None if self.mesh is None else dict(self.mesh.shape),
            **dataclasses.asdict(self.shape),
            **dataclasses.asdict(self.memory),
        }

    # Requests one by one: what a server or a loop of one's own calls.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        speculate: bool = True,
        draft_length: int | None = None,
        chat_template: str | None = None,
    ) -> str:
        """Queues a request, to be decoded by `step`; returns its id. May be called by any thread.

        Args:
          prompt: text, token ids or a list of chat messages.
          params: default `SamplingParams()`; `n` must be 1.
          request_id: a name that no unfinished request has; by default one is made.
          speculate: False decodes plainly; see `generate`.
          draft_length: instead of the engine's, up to `verify_length - 1`.
          chat_template: Jinja template for messages instead of the tokenizer's own.

        Raises:
          PromptError: the prompt is empty, malformed or too long for the engine's max_length.
          SettingError: a parameter out of range.
          QueueFullError: `max_queue` requests are waiting.
          RequestError: the id is taken, or the engine was shut down.
        """
        ticket = self._ticket(
            prompt, params, request_id, speculate, draft_length, chat_template, has_consumer=False
        )
        self._enqueue(ticket)
        return ticket.request.request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request; its completion has what was emitted until then, and the finish reason
        `abort` (`cancelled`). May be called by any thread.

        Raises:
          RequestError: there is no unfinished request of this name.
        """
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is None:
                raise RequestError(
                    f"The request {request_id!r} was to be cancelled, and no unfinished request of "
                    "this engine has that name; it has ended already, or was never submitted."
                )
            self._cancel_ticket(ticket)

    def step(self) -> list[Completion]:
        """Admits what waits, reads prompts, runs some rounds; returns the submitted requests that
        have ended since the last call, in the order in which they ended.

        A step decodes until a row ends, or for `rounds_per_sync` rounds. While prompts are being
        read it is one chunk of a prompt and `ROUNDS_PER_CHUNK` rounds, so that a long prompt holds
        up no running row for longer than a chunk takes.
        """
        with self._device_lock:
            self._advance()
        with self._lock:
            done, self._finished = self._finished, []
        return done

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or is being decoded, or has ended since the last `step`."""
        with self._lock:
            return bool(self._tickets or self._finished)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        speculate: bool = True,
        draft_length: int | None = None,
        chat_template: str | None = None,
    ) -> Generator[StreamOutput, None, None]:
        """Yields what a request emits, as it is emitted; the last piece has the completion.

        Takes the arguments of `submit`, and raises what it raises, at once. Other requests are
        decoded alongside. Closing the iterator cancels the request.
        """
        ticket = self._ticket(
            prompt, params, request_id, speculate, draft_length, chat_template, has_consumer=True
        )
        ticket.is_streamed = True
        self._enqueue(ticket)
        return self._stream(ticket)

    def _stream(self, ticket: Ticket) -> Generator[StreamOutput, None, None]:
        try:
            is_done = False
            while not is_done:
                with self._device_lock:
                    if not ticket.pending_output and ticket.completion is None:
                        self._advance()
                for output in self._take_pending_output(ticket):
                    is_done = output.completion is not None
                    yield output
        finally:
            self._release([ticket])

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        speculate: bool = True,
        draft_length: int | None = None,
        chat_template: str | None = None,
    ) -> AsyncGenerator[StreamOutput, None]:
        """`stream` for asyncio: any number of tasks of one event loop may stream at a time, and
        share the steps. Waits for a place in the queue where `stream` would refuse.
        """
        ticket = self._ticket(
            prompt, params, request_id, speculate, draft_length, chat_template, has_consumer=True
        )
        ticket.is_streamed = True
        while True:
            try:
                self._enqueue(ticket)
                break
            except QueueFullError:
                await self._step_in_thread()
        try:
            is_done = False
            while not is_done:
                if not ticket.pending_output and ticket.completion is None:
                    await self._step_in_thread()
                for output in self._take_pending_output(ticket):
                    is_done = output.completion is not None
                    yield output
        finally:
            self._release([ticket])

    async def _step_in_thread(self) -> None:
        """A step on another thread; whoever else waits for one shares it."""
        loop = asyncio.get_running_loop()
        if self._shared_step is None or self._shared_step.done():
            self._shared_step = loop.run_in_executor(None, self._locked_advance)
        await asyncio.shield(self._shared_step)

    def _locked_advance(self) -> None:
        with self._device_lock:
            self._advance()

    # Lists of requests.

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        draft_length: int | None = None,
        chat_template: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Completions:
        """Completions of `prompts`, in their order; `n` in a row where a prompt asks for `n`.

        Requests that were submitted are decoded alongside.

        Args:
          prompts: each text, token ids or a list of chat messages.
          params: one for all, or one each; default `SamplingParams()`.
          speculate: False decodes plainly: in the same compiled program with every draft marked
            invalid, or with `exactness="ties"` in steps of one token.
          draft_length: instead of the engine's, up to `verify_length - 1`; compiles nothing.
          chat_template: Jinja template for messages instead of the tokenizer's own.
          on_progress: called on the host whenever it looks, every `rounds_per_sync` rounds at the
            least.

        Raises:
          PromptError: a prompt is empty, too long or malformed; nothing has been decoded then.
          SettingError: a parameter out of range.
          RequestError: the engine was shut down.
        """
        requests = make_requests(
            prompts,
            params if params is not None else SamplingParams(),
            self.target,
            longest=self.longest_prompt,
            chat_template=chat_template,
        )
        return Completions(
            self.run(
                requests, speculate=speculate, draft_length=draft_length, on_progress=on_progress
            )
        )

    def run(
        self,
        requests: Sequence[Request],
        *,
        speculate: bool = True,
        draft_length: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Generator[Completion, None, None]:
        """Yields the completions of `requests` in order, each as soon as it and those before it
        have ended. See `generate`. Closing the iterator cancels what has not ended.
        """
        draft_length = self._draft_length(speculate, draft_length)
        for request in requests:
            self._check(request)
        tickets = [
            Ticket(request=request, draft_length=draft_length, has_consumer=True)
            for request in requests
        ]
        order = self.scheduler.order(
            [len(request.prompt_token_ids) for request in requests],
            [request.params.max_tokens for request in requests],
        )
        self._enqueue(*(tickets[index] for index in order), is_limited=False)
        started_s, first_round = time.perf_counter(), self._num_rounds
        try:
            num_yielded = 0
            while num_yielded < len(tickets):
                with self._device_lock:
                    if tickets[num_yielded].completion is None:
                        self._advance()
                if on_progress is not None:
                    on_progress(self._progress(tickets, started_s, first_round))
                while num_yielded < len(tickets):
                    completion = tickets[num_yielded].completion
                    if completion is None:
                        break
                    num_yielded += 1
                    yield completion
        finally:
            self._release(tickets)

    def _progress(self, tickets: Sequence[Ticket], started_s: float, first_round: int) -> Progress:
        """Where a call stands."""
        with self._device_lock:
            num_rounds = self._num_rounds - first_round
        acceptance = Acceptance.total([ticket.acceptance for ticket in tickets])
        elapsed_s = time.perf_counter() - started_s
        shares = [
            1.0
            if ticket.completion is not None
            else ticket.acceptance.num_emitted_tokens / ticket.request.params.max_tokens
            for ticket in tickets
        ]
        done = sum(shares)
        return Progress(
            num_requests=len(tickets),
            num_finished=sum(ticket.completion is not None for ticket in tickets),
            num_emitted_tokens=acceptance.num_emitted_tokens,
            num_rounds=num_rounds,
            num_draft_tokens=acceptance.num_draft_tokens,
            num_accepted_tokens=acceptance.num_accepted_tokens,
            elapsed_s=elapsed_s,
            time_left_s=elapsed_s * (len(shares) - done) / done if done else None,
        )

    # The engine's own life.

    def update_params(self, *, target: PyTree | None = None, draft: PyTree | None = None) -> None:
        """Puts other weights in the place of the target's, the draft model's or both, of the same
        shapes and dtypes; nothing is traced or compiled again.

        Args:
          target: like `engine.target.params`.
          draft: like `engine.drafter.params`.

        Raises:
          RequestError: requests are being decoded; their KV is the old weights'.
          SettingError: a pytree of another structure, shape or dtype.
        """
        with self._device_lock:
            with self._lock:
                num_unfinished = len(self._tickets)
            if num_unfinished:
                raise RequestError(
                    f"New weights were given while {num_unfinished} requests are unfinished, whose "
                    "KV is the old weights'; finish or cancel them first."
                )
            self.executor.update_params(target=target, drafter=draft)
            if target is not None and dataclasses.is_dataclass(self.target):
                model: Any = self.target
                self.target = dataclasses.replace(model, params=self.executor.target_params)

    def warm_up(self, on_program: OnProgram | None = None) -> tuple[Compiled, ...]:
        """Compiles every program that the engine will use, ahead of its first request.

        Nothing is decoded and no state is made; the first request compiles nothing then. (With
        `draft_length="auto"` that request still waits until rounds have been measured.) Without a
        warm-up each program is compiled at its first use. Programs that take long say so
        (`jaxspec.runtime.compilation`). May be called by any thread.

        Args:
          on_program: called before each program is compiled, with a name for `str`, `number` and
            `num_programs`.

        Returns:
          of each program its name, the seconds it took, and whether the persistent cache held it.
        """
        return self.executor.warm_up(on_program)

    def shutdown(self) -> None:
        """Cancels what has not ended, lets go of the device's state, and refuses requests from now
        on. `with Engine(...) as engine:` ends with it."""
        with self._device_lock:
            with self._lock:
                self._is_closed = True
                for ticket in list(self._tickets.values()):
                    self._cancel_ticket(ticket)
            self._end_cancelled()
            self._collect()
            self.executor.reset()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()

    @property
    def state(self) -> DecodeState:
        """The decode state on the device; every row is empty before the first call."""
        return self.executor.state

    @property
    def _num_rounds(self) -> int:
        """Rounds run so far, on all shards together."""
        return int(np.sum(self.executor.fetch("schedule").num_rounds))

    def reset(self) -> None:
        """Empties every row; no output depends on it, it only lets go of what was decoded last.

        Raises:
          RequestError: requests are being decoded.
        """
        if any(self._rows):
            raise RequestError("The engine was to be emptied while requests are being decoded.")
        self.executor.reset()

    # From here on: what a request passes through.

    def _ticket(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        speculate: bool,
        draft_length: int | None,
        chat_template: str | None,
        *,
        has_consumer: bool,
    ) -> Ticket:
        """A single request, checked."""
        params = SamplingParams() if params is None else params
        if params.n != 1:
            raise SettingError(
                f"n {params.n} was given for a single request; submit it {params.n} times with "
                "the seeds seed, seed + 1, ..., or use generate."
            )
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        [request] = make_requests(
            [prompt],
            params,
            self.target,
            longest=self.longest_prompt,
            chat_template=chat_template,
            names=[f"The prompt of {request_id}"],
        )
        request = dataclasses.replace(request, request_id=request_id)
        self._check(request)
        return Ticket(
            request=request,
            draft_length=self._draft_length(speculate, draft_length),
            has_consumer=has_consumer,
            is_interactive=True,
        )

    def _draft_length(self, speculate: bool, draft_length: int | None) -> int:
        draft_length = self.draft_length if draft_length is None else draft_length
        if self.drafter is None or not speculate:
            return 0
        check_draft_length(draft_length, self.shape.verify_length)
        return draft_length

    def _check(self, request: Request) -> None:
        """Refuses what the engine was not made for."""
        stop_tokens(request, self.target)
        wanted, kept = request.params.logprobs, self.max_logprobs
        if wanted is not None and (kept is None or wanted > kept):
            raise SettingError(
                f"Request {request.request_id} asks for {wanted} logprobs, and the engine keeps "
                f"{'none' if kept is None else kept}; make it with max_logprobs={wanted}."
            )

    def _enqueue(self, *tickets: Ticket, is_limited: bool = True) -> None:
        """Lets tickets wait for rows. Those of a list have no names that others could use."""
        self._prepare()
        with self._lock:
            if self._is_closed:
                raise RequestError(
                    "A request was given to an engine that was shut down; make another engine."
                )
            if is_limited and len(self._queue) >= self.max_queue:
                raise QueueFullError(
                    f"A request was given while {len(self._queue)} are waiting, as many as the "
                    "queue holds (max_queue); try again when some have ended."
                )
            for ticket in tickets:
                ticket.name = ticket.request.request_id if ticket.is_interactive else object()
                if ticket.name in self._tickets:
                    raise RequestError(
                        f"The request id {ticket.name!r} was given twice, and the first of that "
                        "name has not ended; give another, or none."
                    )
                self._tickets[ticket.name] = ticket
                self._queue.append(ticket)

    def _cancel_ticket(self, ticket: Ticket) -> None:
        """Ends a ticket: at once if it waits, at the next step if it has a row. Needs `_lock`."""
        if ticket.row is not None:
            ticket.is_cancelled = True
        elif ticket.completion is None:
            self._queue.remove(ticket)
            self._finish(ticket, self._aborted(ticket.request, Finish.CANCELLED))

    def _release(self, tickets: Sequence[Ticket]) -> None:
        """Cancels what no one waits for any more."""
        with self._lock:
            for ticket in tickets:
                if ticket.completion is None:
                    self._cancel_ticket(ticket)

    def _finish(self, ticket: Ticket, completion: Completion) -> None:
        """A ticket has its completion, and its name and row are free. Needs `_lock`."""
        ticket.completion, ticket.acceptance = completion, completion.acceptance
        if ticket.row is not None:
            self._rows[ticket.row] = None
            ticket.row = None
        self._tickets.pop(ticket.name, None)
        if not ticket.has_consumer:
            self._finished.append(completion)

    def _take_pending_output(self, ticket: Ticket) -> list[StreamOutput]:
        """What a streamed request emitted since the last call."""
        pending_output, ticket.pending_output = ticket.pending_output, []
        outputs = []
        for token_ids, text in pending_output:
            outputs.append(
                StreamOutput(request_id=ticket.request.request_id, token_ids=token_ids, text=text)
            )
        completion = ticket.completion
        if completion is not None:
            outputs.append(
                StreamOutput(
                    request_id=completion.request_id,
                    token_ids=completion.token_ids[ticket.num_streamed :],
                    text=(completion.text or "")[len(ticket.text) :],
                    completion=completion,
                )
            )
        return outputs

    # A step, in the order it runs. All of this needs `_device_lock`.

    def _advance(self) -> None:
        try:
            self._end_cancelled()
            self._admit_waiting()
            self._prefill_prompts()
            self._run_rounds()
            self._collect()
        except BaseException:
            self._give_up_if_lost()
            raise

    def _end_cancelled(self) -> None:
        ends = [row for row, ticket in self._held.items() if ticket.is_cancelled]
        if ends:
            self.executor.end_rows(ends, Finish.CANCELLED)

    def _admit_waiting(self) -> None:
        """Gives free rows to those that wait, first come, first served."""
        for row in self.executor.free_rows(self._held):
            with self._lock:
                if not self._queue:
                    return
                ticket = self._queue.popleft()
                self._rows[row], ticket.row = ticket, row
            ticket.arrival = next(self._arrivals)
            self.executor.admit(
                row, ticket.request, draft_length=ticket.draft_length, arrival=ticket.arrival
            )

    def _prefill_prompts(self) -> None:
        """Reads the prompts of new rows, the oldest first: all of them, or one chunk where rows are
        running whose output somebody awaits."""
        while self._prefill_chunk():
            if self._is_interactive and self._running:
                break

    def _prefill_chunk(self) -> bool:
        """Reads a chunk of the oldest prompt that is not read, on each shard; False if there is
        none."""
        unread = [(row, ticket) for row, ticket in self._held.items() if ticket.num_unprefilled > 0]
        oldest: dict[int, tuple[int, Ticket]] = {}
        for row, ticket in sorted(unread, key=lambda item: item[1].arrival):
            oldest.setdefault(self.executor.shard_of(row), (row, ticket))
        if not oldest:
            return False
        # While nothing is drafted the drafter reads nothing either.
        rests = self.controller is not None and self.controller.draft_length == 0
        self.executor.prefill(
            {row: ticket.num_prefilled for row, ticket in oldest.values()}, target_only=rests
        )
        for _, ticket in oldest.values():
            ticket.num_prefilled += self.shape.prefill_chunk
        return True

    def _run_rounds(self) -> None:
        """Decodes until the host has something to do."""
        held = self._held
        running = [row for row, ticket in held.items() if ticket.num_unprefilled <= 0]
        if not running:
            return
        num_shards = self.executor.num_shards
        num_rounds, min_running = self.rounds_per_sync, np.ones((num_shards,), np.int32)
        if self._is_interactive:  # whoever ends is reported at once
            num_running = collections.Counter(map(self.executor.shard_of, running))
            for shard, number in num_running.items():
                min_running[shard] = number
            if len(running) < len(held) or any(ticket.is_streamed for ticket in held.values()):
                num_rounds = min(ROUNDS_PER_CHUNK, num_rounds)
        elif self._queue:
            min_running[:] = self.scheduler.min_running(self.shape.batch_size // num_shards)
        longest = max(held[row].draft_length for row in running)
        if self.controller is not None and longest > 0:
            num_rounds = self._choose_draft_length(num_rounds)
        if self._choice is not None:
            longest = min(longest, self._choice.draft_length)
        self.executor.run(num_rounds, draft_length=longest, min_running=min_running)

    @property
    def _held(self) -> dict[int, Ticket]:
        """Requests that have a row, by row."""
        return {row: ticket for row, ticket in enumerate(self._rows) if ticket is not None}

    @property
    def _running(self) -> list[Ticket]:
        """Requests whose prompts have been read."""
        return [ticket for ticket in self._held.values() if ticket.num_unprefilled <= 0]

    @property
    def _is_interactive(self) -> bool:
        """Whether somebody awaits single requests; lists are decoded for the least time in all."""
        return any(ticket.is_interactive for ticket in self._held.values())

    def _collect(self) -> None:
        """Looks at the rows: notes what they emitted, and finishes those that have ended."""
        held = self._held
        if not held:
            return
        is_read = any(ticket.reads_output for ticket in held.values())
        state = self.executor.fetch(
            "num_committed", "finish", "counts", "schedule", *(["tokens"] if is_read else [])
        )
        before = {row: ticket.acceptance for row, ticket in held.items()}
        stopped, unreadable, ended = [], [], []
        for row, ticket in held.items():
            # The loop would be called for ever without decoding such a row.
            assert state.finish[row] != Finish.PREFILLING or ticket.num_unprefilled > 0, (
                "its prompt was read"
            )
            first, last = len(ticket.request.prompt_token_ids), int(state.num_committed[row])
            ticket.acceptance = Acceptance.of_row(state.counts, row, num_emitted=last - first)
            output = state.tokens[row, first:last].tolist() if ticket.reads_output else []
            is_live = state.finish[row] in LIVE
            try:
                ticket.check_stop_strings(self.target.tokenizer, output)
                if ticket.stopped is not None:
                    stopped.append(row)
                elif is_live and ticket.is_streamed:
                    ticket.buffer_output(self.target.tokenizer, output)
            except Exception:  # of a tokenizer, perhaps the user's own: the others go on
                _log.exception("the output of request %s cannot be read", ticket.request.request_id)
                unreadable.append(row)
            if not is_live or ticket.stopped is not None or row in unreadable:
                ended.append(row)
        self._note_drafts(held, before, state.num_rounds)
        self._metrics.update(
            ended=[held[row].acceptance for row in ended],
            running=[ticket.acceptance for row, ticket in held.items() if row not in ended],
        )
        if stopped:
            # They ran a few rounds too far; what they emitted there is cut off.
            self.executor.end_rows(stopped, Finish.STOP_STRING)
        if unreadable:
            self.executor.end_rows(unreadable, Finish.TOKENIZER_ERROR)
        if ended:
            self._harvest(ended)

    def _harvest(self, ended: Sequence[int]) -> None:
        """Makes the completions of rows that have ended, and frees the rows."""
        state, held = self.executor.fetch(), self._held
        for row in ended:
            ticket = held[row]
            request = ticket.request
            first, last = len(request.prompt_token_ids), int(state.num_committed[row])
            complete = functools.partial(
                make_completion,
                request,
                self.target,
                token_ids=state.tokens[row, first:last].tolist(),
                origins=state.origin[row, first:last],
                stop_token=int(state.stop_token[row]),
                acceptance=ticket.acceptance,
                trace=row_trace(state.trace, row, ticket.acceptance.num_rounds),
                logprobs=_logprobs(state, row, first, last, request.params.logprobs),
                logprobs_mode=self.logprobs_mode,
            )
            try:
                finish = Finish(int(state.finish[row]))
                completion = complete(finish=finish, stopped=ticket.stopped)
            except Exception:  # of a tokenizer: the tokens are kept, and the others go on
                _log.exception("the output of request %s cannot be read", request.request_id)
                completion = complete(finish=Finish.TOKENIZER_ERROR)
            with self._lock:
                self._finish(ticket, completion)

    # Adaptive draft length.

    def _prepare(self) -> None:
        """Measures, before the first request, what the controller of draft lengths has to know."""
        if not self.is_adaptive or self.controller is not None or self._is_closed:
            return
        with self._device_lock:
            if self.controller is None:
                times = measure_round_times(
                    _MadeUpRequests(self.executor, draft_length=self.draft_length),
                    longest=self.shape.verify_length - 1,
                    room=self.longest_prompt,
                )
                self.executor.reset()
                self.controller = DraftLengthController(times)

    def _choose_draft_length(self, num_rounds: int) -> int:
        """Sets the draft length of all rows for the next rounds; returns after how many to choose
        again."""
        assert self.controller is not None
        self._first_round = self.executor.fetch("schedule").num_rounds
        lags = functools.cache(self._lags)
        drafting = [ticket.request for ticket in self._running if ticket.draft_length > 0]
        self._choice = self.controller.choose(
            context=self._longest_context,
            num_rounds=num_rounds,
            count_unprefilled=lambda: sum(map(self._num_chunks, lags().values())),
            chunks_per_token=sum(
                self._num_chunks(len(request.prompt_token_ids)) / request.params.max_tokens
                for request in drafting
            ),
        )
        if self._choice.draft_length > 0:
            self.executor.catch_up(lags())
        if self.executor.verify_length_for(self._choice.draft_length) > 1:  # else none are drafted
            self._limit_drafts(self._choice.draft_length)
        return self._choice.num_rounds

    def _num_chunks(self, num_tokens: int) -> int:
        """In which so many tokens are read."""
        return -(-num_tokens // self.shape.prefill_chunk)

    def _lags(self) -> dict[int, int]:
        """Committed tokens that the drafter has not seen, of running rows that would draft and for
        which the next round will not make up."""
        lags = self.executor.lags()
        return {
            row: int(lags[row])
            for row, ticket in self._held.items()
            if ticket.num_unprefilled <= 0 and ticket.draft_length > 0 and lags[row] > 1
        }

    def _limit_drafts(self, draft_length: int) -> None:
        """Lets no row draft more than so many tokens per round, nor more than it asked for."""
        limits = np.zeros((len(self._rows),), np.int32)
        for row, ticket in self._held.items():
            limits[row] = min(ticket.draft_length, draft_length)
        self.executor.set_draft_limits(limits)

    @property
    def _longest_context(self) -> int:
        """Committed tokens of the longest running row, at the last look."""
        return max(
            len(ticket.request.prompt_token_ids) + ticket.acceptance.num_emitted_tokens
            for ticket in self._running
        )

    def _note_drafts(
        self, held: Mapping[int, Ticket], before: Mapping[int, Acceptance], num_rounds: np.ndarray
    ) -> None:
        """Tells the controller what came of its choice.

        Args:
          held: requests by row.
          before: what had become of their drafts at the last look.
          num_rounds: run so far, by shard if there is a mesh.
        """
        choice, self._choice = self._choice, None
        if choice is None or self.controller is None:
            return
        new = [
            (before[row], ticket.acceptance)
            for row, ticket in held.items()
            if ticket.draft_length >= choice.draft_length and ticket.num_unprefilled <= 0
        ]
        num_row_rounds = [now.num_rounds - then.num_rounds for then, now in new]
        positions = range(choice.draft_length)
        self.controller.note(
            draft_length=choice.draft_length,
            context=self._longest_context,
            num_rounds=int(np.max(num_rounds - self._first_round)),
            num_row_rounds=sum(num_row_rounds),
            num_accepted_at=[
                sum(now.num_accepted_at(j) - then.num_accepted_at(j) for then, now in new)
                for j in positions
            ],
        )

    def _give_up_if_lost(self) -> None:
        """Ends every request that has a row if the state was donated to a call that failed."""
        if not self.executor.is_lost:
            return
        self.executor.reset()
        self._metrics.abandon()
        with self._lock:
            for ticket in self._held.values():
                self._finish(ticket, self._aborted(ticket.request, Finish.DEVICE_ERROR))

    def _aborted(self, request: Request, finish: Finish) -> Completion:
        """The completion of a request that emitted nothing."""
        return make_completion(
            request,
            self.target,
            token_ids=(),
            origins=(),
            finish=finish,
            stop_token=-1,
            acceptance=Acceptance(),
        )


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request on its way through the engine.

    Attributes:
      request: what is decoded.
      draft_length: drafted tokens per round; 0 decodes plainly.
      has_consumer: somebody holds the ticket and takes the completion from it; otherwise `step`
        returns it.
      is_interactive: came alone and is awaited; otherwise it is one of a list.
      is_streamed: somebody reads the output as it grows.
      name: by which it can be cancelled; for one of a list, no one's.
      row: it holds on the device, if it does.
      arrival: order among the admitted.
      num_prefilled: prompt tokens that prefill has been called for.
      is_cancelled: to be ended at the next step.
      stopped: the stop string found in its output.
      acceptance: at the last look.
      completion: once it has ended.
      pending_output: token ids and text that a stream has still to hand out.
      num_streamed: tokens among the pending_output so far.
      text: of the pending_output so far.
    """

    request: Request
    draft_length: int
    has_consumer: bool
    is_interactive: bool = False
    is_streamed: bool = False
    name: Hashable = None
    row: int | None = None
    arrival: int = 0
    num_prefilled: int = 0
    is_cancelled: bool = False
    stopped: StopMatch | None = None
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    completion: Completion | None = None
    pending_output: list[tuple[tuple[int, ...], str]] = dataclasses.field(default_factory=list)
    num_streamed: int = 0
    text: str = ""

    @property
    def num_unprefilled(self) -> int:
        """Prompt tokens left to prefill; the last one is the root of the first round."""
        return len(self.request.prompt_token_ids) - 1 - self.num_prefilled

    @property
    def reads_output(self) -> bool:
        """Whether the host reads the output while it grows."""
        return self.is_streamed or bool(self.request.params.stop)

    def check_stop_strings(self, tokenizer: TextTokenizer | None, output: Sequence[int]) -> None:
        """Notes the first stop string in the output so far."""
        params = self.request.params
        if params.stop and tokenizer is not None:
            self.stopped = find_stop(tokenizer, output, params.stop, min_tokens=params.min_tokens)

    def buffer_output(self, tokenizer: TextTokenizer | None, output: Sequence[int]) -> None:
        """Notes what was emitted since the last look, and how much of its text is final."""
        token_ids = tuple(output[self.num_streamed :])
        if not token_ids:
            return
        text = self.text
        if tokenizer is not None:
            settled = settled_text(tokenizer, output, self.request.params.stop)
            text = settled if settled.startswith(text) else text
        self.pending_output.append((token_ids, text[len(self.text) :]))
        self.num_streamed, self.text = len(output), text


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOutput:
    """A piece of a request's output.

    Attributes:
      request_id: of the request.
      token_ids: emitted since the last piece.
      text: that became final since the last piece; characters whose bytes are not complete, and
        what may become a stop string, come with a later one. All pieces together are the text of
        the completion.
      completion: with the last piece.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None


@dataclasses.dataclass(frozen=True)
class _MadeUpRequests:
    """What an empty engine decodes to measure its rounds; see `adaptive.Rounds`."""

    executor: Executor
    draft_length: int

    def fill(self, prompt_length: int) -> None:
        executor = self.executor
        executor.reset()
        params = SamplingParams(max_tokens=executor.shape.max_length, ignore_eos=True)
        for index, row in enumerate(executor.free_rows(())[: executor.shape.batch_size]):
            prompt = (0,) * (prompt_length if index == 0 else 1)
            request = Request(request_id=str(index), prompt_token_ids=prompt, params=params)
            executor.admit_and_prefill(row, request, draft_length=self.draft_length, arrival=index)
        jax.block_until_ready(executor.state)

    def run(self, draft_length: int, num_rounds: int) -> None:
        executor = self.executor
        executor.set_draft_limits([draft_length] * executor.num_rows)
        executor.run(num_rounds, draft_length=draft_length)
        jax.block_until_ready(executor.state)

    def catch_up(self) -> int:
        lags = self.executor.lags()
        num_chunks = self.executor.catch_up({row: int(n) for row, n in enumerate(lags) if n > 1})
        jax.block_until_ready(self.executor.state)
        return num_chunks


def _logprobs(
    state: DecodeState, row: int, first: int, last: int, num_top: int | None
) -> tuple[dict[int, float], ...] | None:
    """Log-probabilities by token id of the output tokens of a row that was fetched to the host."""
    kept = state.logprobs
    if num_top is None or kept is None:
        return None
    each = []
    for slot in range(first, last):
        top = zip(kept.top_tokens[row, slot, :num_top], kept.top[row, slot, :num_top], strict=True)
        of_token = {int(state.tokens[row, slot]): float(kept.of_token[row, slot])}
        each.append({int(token): float(value) for token, value in top} | of_token)
    return tuple(each)
