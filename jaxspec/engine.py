"""The engine: requests in, completions out."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import cache as kv
from jaxspec.decoding import LogprobsConfig, Seat, SpeculativeLoop
from jaxspec.drafters.base import Drafter, EngineShape
from jaxspec.environment import devices, devices_sentence, use_compilation_cache
from jaxspec.errors import SettingError
from jaxspec.models.base import Model
from jaxspec.plain import PlainLoop
from jaxspec.requests import (
    Completion,
    Completions,
    Prompt,
    Request,
    SamplingParams,
    StopMatch,
    find_stop,
    make_completion,
    make_requests,
)
from jaxspec.schedulers import Scheduler, Static
from jaxspec.telemetry import Acceptance, Metrics, TraceConfig, TraceLevel, row_trace
from jaxspec.types import DecodeState, Finish
from jaxspec.verifiers import Coupled, Verifier

_log = logging.getLogger(__name__)

MAX_STOP_TOKENS = 8  # room for a request's stop tokens in the compiled loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What a progress callback is told, every few rounds.

    Attributes:
      num_requests: of the call.
      num_finished: requests that have ended.
      num_emitted_tokens: of all requests so far.
      num_rounds: rounds run so far, in all batches.
    """

    num_requests: int
    num_finished: int
    num_emitted_tokens: int
    num_rounds: int


class Engine:
    """Decodes batches of prompts, speculatively if it has a drafter.

    Requests are taken in order. The `static` scheduler decodes batch after batch, each to its end;
    with `continuous` a row that ends is replaced in the next round by one whose prompt has been
    read already, in rows held besides those in seats; `pool` is EXSPEC's.

    With the `coupled` verifier an output depends on the request (its seed included) and on the
    engine's shape (`capacity`, `window`, `seats`, `prefill_chunk`, dtype), not on its neighbours,
    its seat, the drafter or the draft length. Other verifiers keep what their `promise` says; plain
    decoding draws as `coupled` does, so sampled tokens differ from theirs.

    Args:
      target: the model whose output this is.
      drafter: what proposes tokens; None decodes plainly, one token per step.
      scheduler: which rows take part in a round; default `Static()`.
      verifier: what decides how much of a draft is kept; default `Coupled()`.
      draft_length: tokens proposed per round, 1 to `window - 1`.
      window: T, tokens scored per round; default `draft_length + 1`. Runs that should agree bit for
        bit must share it.
      seats: B, rows of a batch.
      capacity: slots per row for prompt and output, rounded up to a multiple of 128. The last round
        of a row needs `window` slots.
      prefill_chunk: prompt tokens read per call.
      rounds_per_sync: rounds between two looks of the host.
      max_logprobs: log-probabilities kept per token for requests that ask for them, besides the
        emitted token's; None keeps none and costs nothing.
      logprobs_mode: of the model's own logits (`raw_logprobs`), or of the law that tokens are drawn
        from (`processed_logprobs`; of a greedy row at temperature 1).
      trace: what is recorded for `Completions.rounds()` and `.tokens()`: `rounds`; `tokens`, one
        record per drafted token as well; or `laws`, also entropies and overlap of p and q. None
        records nothing and costs nothing.

    Raises:
      SettingError: a setting out of range.
      ModelError: the drafter cannot draft for the target.

    Example:
      >>> import jaxspec
      >>> target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
      >>> engine = jaxspec.Engine(
      ...     target, drafter=jaxspec.DraftModel(draft), draft_length=4, seats=8, capacity=1024
      ... )
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
        draft_length: int = 4,
        window: int | None = None,
        seats: int = 8,
        capacity: int = 1024,
        prefill_chunk: int = 128,
        rounds_per_sync: int = 32,
        max_logprobs: int | None = None,
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs",
        trace: TraceLevel | None = None,
    ):
        use_compilation_cache()
        self.target = target
        self.drafter = drafter
        self.verifier = Coupled() if verifier is None else verifier
        self.scheduler = Static() if scheduler is None else scheduler
        self.max_logprobs = max_logprobs
        self.logprobs_mode = logprobs_mode
        self.draft_length = draft_length if drafter is not None else 0
        self.rounds_per_sync = rounds_per_sync
        for name, value in (
            ("seats", seats),
            ("capacity", capacity),
            ("prefill_chunk", prefill_chunk),
            ("rounds_per_sync", rounds_per_sync),
        ):
            if value < 1:
                raise SettingError(f"{name} {value} was given; it must be at least 1.")
        if max_logprobs is not None and not 0 <= max_logprobs <= target.vocab_size:
            raise SettingError(
                f"max_logprobs {max_logprobs} was given; it must be from 0 to {target.vocab_size}, "
                "the size of the vocabulary."
            )
        if drafter is None:
            if not self.verifier.is_coupled:
                raise SettingError(
                    f"The verifier {self.verifier.name} was given without a drafter, so there is "
                    "nothing to verify; leave it out or give a drafter."
                )
            if window not in (None, 1):
                raise SettingError(
                    f"A window of {window} was given without a drafter; plain decoding scores one "
                    "token per step, so leave the window out or give a drafter."
                )
            window = 1
        else:
            window = draft_length + 1 if window is None else window
            check_draft_length(draft_length, window)
            drafter.check(target)
            if not (drafter.is_chain or self.verifier.takes_trees):
                raise SettingError(
                    f"The drafter {drafter.name} drafts trees, and the verifier "
                    f"{self.verifier.name} takes chains only; use the coupled verifier."
                )
        recording = None if trace is None else TraceConfig(level=trace)
        is_tracing_tokens = recording is not None and recording.has_tokens
        self.shape = EngineShape(
            seats=seats,
            capacity=kv.round_up_to_block(capacity),
            window=window,
            prefill_chunk=prefill_chunk,
            vocab_size=target.vocab_size,
            is_noise_shared=self.verifier.is_noise_shared,
            needs_draft_law=self.verifier.needs_draft_law or is_tracing_tokens,
            needs_greedy_law=is_tracing_tokens,
        )
        if self.longest_prompt < 1:
            raise SettingError(
                f"A window of {window} does not fit a capacity of {self.shape.capacity}; raise the "
                "capacity or narrow the window."
            )
        logprobs = None
        if max_logprobs is not None:
            is_processed = logprobs_mode == "processed_logprobs"
            logprobs = LogprobsConfig(num_top=max_logprobs, is_processed=is_processed)
        if drafter is None:
            self._loop = PlainLoop(
                target=target,
                scheduler=self.scheduler,
                shape=self.shape,
                num_stop_tokens=MAX_STOP_TOKENS,
                logprobs=logprobs,
                trace=recording,
            )
        else:
            self._loop = SpeculativeLoop(
                target=target,
                drafter=drafter,
                verifier=self.verifier,
                scheduler=self.scheduler,
                shape=self.shape,
                num_stop_tokens=MAX_STOP_TOKENS,
                logprobs=logprobs,
                trace=recording,
            )
        self.num_residents = self.scheduler.num_residents(seats)
        self._metrics = Metrics()
        self._is_busy = False
        self._params = self._loop.params
        donating = functools.partial(jax.jit, donate_argnums=1)
        self._admit = donating(self._loop.admit)
        self._prefill = donating(self._loop.prefill)
        self._run = donating(self._loop.run)
        self._end_rows = jax.jit(_end_rows, donate_argnums=0)
        # Parameters on a device of their own choice put every state after the first one there too;
        # so the first is put there as well, or `admit` and `prefill` would be compiled twice.
        arrays = [leaf for leaf in jax.tree.leaves(self._params) if isinstance(leaf, jax.Array)]
        homes = {device for array in arrays for device in array.devices()}
        placed = jax.sharding.SingleDeviceSharding(*homes) if len(homes) == 1 else None
        self._init = jax.jit(self._loop.init, out_shardings=placed)
        self._state: DecodeState | None = None
        if jax.local_device_count() > 1:
            _log.warning("this engine is %s", devices_sentence(devices()))

    @property
    def longest_prompt(self) -> int:
        """Prompt tokens that leave room for one round."""
        return min(self.shape.capacity - self.shape.window + 1, self.shape.capacity - 1)

    @property
    def exactness(self) -> str:
        """`bitwise` (the target's own tokens), `law` (the target's law) or `lossy`."""
        if self.verifier.is_coupled:
            return "bitwise"
        return "law" if self.verifier.is_lossless else "lossy"

    def metrics(self) -> dict[str, Any]:
        """Counters of the engine's life, in vLLM's names; any thread may ask (see
        `telemetry.Metrics.snapshot`). Rows that are running are counted as far as the host last
        looked."""
        return self._metrics.snapshot()

    def describe(self) -> dict[str, Any]:
        """Shape and promise, for reports."""
        return {
            "target": self.target.name,
            "drafter": self.drafter.name if self.drafter else "none",
            "is_synthetic": bool(self.drafter and self.drafter.is_synthetic),
            "verifier": self.verifier.name,
            "scheduler": self.scheduler.name,
            "num_residents": self.num_residents,
            "draft_length": self.draft_length,
            "exactness": self.exactness,
            "promise": self.verifier.promise,
            **dataclasses.asdict(self.shape),
        }

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

        Args:
          prompts: each text, token ids or a list of chat messages.
          params: one for all, or one each; default `SamplingParams()`.
          speculate: False runs the same compiled program with every draft marked invalid: plain
            decoding, to the bit.
          draft_length: instead of the engine's, up to `window - 1`; compiles nothing.
          chat_template: Jinja template for messages instead of the tokenizer's own.
          on_progress: called on the host every `rounds_per_sync` rounds.

        Raises:
          PromptError: a prompt is empty, too long or malformed; nothing has been decoded then.
          SettingError: a parameter out of range.
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
    ) -> Iterator[Completion]:
        """Yields the completions of `requests` in order, each as soon as it and those before it
        have ended. See `generate`.

        Raises:
          SettingError: also if the engine is still decoding for an earlier call.
        """
        draft_length = self.draft_length if draft_length is None else draft_length
        if self.drafter is None or not speculate:
            draft_length = 0
        else:
            check_draft_length(draft_length, self.shape.window)
        for request in requests:
            self._stop_tokens(request)
            self._check_logprobs(request)
        if self._is_busy:
            raise SettingError(
                "The engine was asked to decode while an earlier call's completions are still "
                "being taken; finish or close that one first, or make another engine."
            )
        self._is_busy = True
        try:
            yield from self._decode(requests, draft_length, on_progress)
        except BaseException:
            self._state = None  # rows are left in it, or it was donated to a call that failed
            self._metrics.abandon()
            raise
        finally:
            self._is_busy = False

    def _decode(
        self,
        requests: Sequence[Request],
        draft_length: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> Iterator[Completion]:
        """Admits requests to rows, runs rounds, harvests rows that have ended, until all have."""
        queue = collections.deque(enumerate(requests))
        rows: list[Resident | None] = [None] * self.num_residents
        completions: list[Completion | None] = [None] * len(requests)
        num_yielded = 0
        first_round = int(self.state.num_rounds)
        while num_yielded < len(requests):
            if self.scheduler.fills_seats or not any(rows):
                for row in [row for row, resident in enumerate(rows) if resident is None]:
                    if queue:
                        index, request = queue.popleft()
                        rows[row] = Resident(index=index, request=request)
                        self._admit_request(row, request, index, draft_length)
            min_running = self.scheduler.min_running(self.shape.seats) if queue else 1
            self._state = self._run(
                self._params, self.state, np.int32(self.rounds_per_sync), np.int32(min_running)
            )
            self._look_for_stop_strings(rows)
            for resident, completion in self._harvest(rows):
                completions[resident.index] = completion
            if on_progress is not None:
                on_progress(self._progress(rows, completions, first_round))
            while num_yielded < len(requests):
                completion = completions[num_yielded]
                if completion is None:
                    break
                num_yielded += 1
                yield completion

    @property
    def state(self) -> DecodeState:
        """The decode state on the device; every seat is empty before the first call."""
        state = self._init() if self._state is None else self._state
        self._state = state
        return state

    def reset(self) -> None:
        """Empties every row; no output depends on it, it only lets go of what was decoded last."""
        self._state = None

    def _progress(
        self,
        rows: Sequence[Resident | None],
        completions: Sequence[Completion | None],
        first_round: int,
    ) -> Progress:
        """Where a call stands."""
        num_committed, num_rounds = jax.device_get(
            (self.state.num_committed, self.state.num_rounds)
        )
        finished = [completion for completion in completions if completion is not None]
        num_running = sum(
            int(num_committed[row]) - len(resident.request.prompt_token_ids)
            for row, resident in enumerate(rows)
            if resident is not None
        )
        return Progress(
            num_requests=len(completions),
            num_finished=len(finished),
            num_emitted_tokens=sum(len(done.token_ids) for done in finished) + num_running,
            num_rounds=int(num_rounds) - first_round,
        )

    def _stop_tokens(self, request: Request) -> tuple[int, ...]:
        """Every token that ends the request's output; refuses more than the loop has room for."""
        stops = request.params.stop_tokens(self.target)
        if len(stops) > MAX_STOP_TOKENS:
            raise SettingError(
                f"Request {request.request_id} has {len(stops)} stop tokens (with the model's "
                f"EOS tokens); there is room for {MAX_STOP_TOKENS}, so name fewer."
            )
        return stops

    def _check_logprobs(self, request: Request) -> None:
        wanted, kept = request.params.logprobs, self.max_logprobs
        if wanted is not None and (kept is None or wanted > kept):
            raise SettingError(
                f"Request {request.request_id} asks for {wanted} logprobs, and the engine keeps "
                f"{'none' if kept is None else kept}; make it with max_logprobs={wanted}."
            )

    def _look_for_stop_strings(self, rows: Sequence[Resident | None]) -> None:
        """Reads the outputs of rows that have stop strings, and ends those that hold one.

        Rows run a few rounds too far, until the host looks; what they emitted there is cut off.
        """
        tokenizer = self.target.tokenizer
        watched = {
            row: resident
            for row, resident in enumerate(rows)
            if resident is not None and resident.request.params.stop
        }
        if tokenizer is None or not watched:
            return
        tokens, num_committed = jax.device_get((self.state.tokens, self.state.num_committed))
        is_found = np.zeros((self.num_residents,), bool)
        for row, resident in watched.items():
            request = resident.request
            output = tokens[row, len(request.prompt_token_ids) : num_committed[row]].tolist()
            resident.stopped = find_stop(
                tokenizer, output, request.params.stop, min_tokens=request.params.min_tokens
            )
            is_found[row] = resident.stopped is not None
        self._state = self._end_rows(self.state, is_found)

    def _admit_request(self, row: int, request: Request, arrival: int, draft_length: int) -> None:
        """Puts a request into a row and reads its prompt."""
        prompt, params = request.prompt_token_ids, request.params
        tokens = np.zeros((self.shape.capacity,), np.int32)
        tokens[: len(prompt)] = prompt
        stop_tokens = np.full((MAX_STOP_TOKENS,), -1, np.int32)
        stops = self._stop_tokens(request)
        stop_tokens[: len(stops)] = stops
        wanted = len(prompt) + params.max_tokens
        largest = self.longest_prompt + 1
        limit = min(wanted, largest)
        limit_finish = Finish.MAX_TOKENS if wanted <= largest else Finish.CAPACITY
        seat = Seat(
            tokens=tokens,
            length=np.int32(len(prompt)),
            limit=np.int32(limit),
            limit_finish=np.int32(limit_finish),
            draft_limit=np.int32(draft_length),
            stop_tokens=stop_tokens,
            sampling=params.of_row(prompt_length=len(prompt)),
            arrival=np.int32(arrival),
        )
        self._state = self._admit(self._params, self.state, np.int32(row), seat)
        for start in range(0, len(prompt) - 1, self.shape.prefill_chunk):
            self._state = self._prefill(self._params, self.state, np.int32(row), np.int32(start))

    def _harvest(self, rows: list[Resident | None]) -> list[tuple[Resident, Completion]]:
        """Empties the rows that have ended; their requests and completions."""
        finish, num_committed, counts = jax.device_get(
            (self.state.finish, self.state.num_committed, self.state.counts)
        )
        acceptance = {
            row: Acceptance.of_row(
                counts,
                row,
                num_emitted=int(num_committed[row]) - len(resident.request.prompt_token_ids),
            )
            for row, resident in enumerate(rows)
            if resident is not None
        }
        ended = [row for row in acceptance if finish[row] != Finish.RUNNING]
        self._metrics.update(
            ended=[acceptance[row] for row in ended],
            running=[acceptance[row] for row in acceptance if row not in ended],
        )
        if not ended:
            return []
        state = jax.device_get(self.state.replace(cache=(), drafter=()))
        harvested = []
        for row in ended:
            resident = rows[row]
            assert resident is not None
            request = resident.request
            first, last = len(request.prompt_token_ids), int(state.num_committed[row])
            completion = make_completion(
                request,
                self.target,
                token_ids=state.tokens[row, first:last].tolist(),
                origins=state.origin[row, first:last],
                finish=Finish(int(state.finish[row])),
                stop_token=int(state.stop_token[row]),
                acceptance=acceptance[row],
                stopped=resident.stopped,
                logprobs=_logprobs(state, row, first, last, request.params.logprobs),
                logprobs_mode=self.logprobs_mode,
                trace=row_trace(state.trace, row, acceptance[row].num_rounds),
            )
            harvested.append((resident, completion))
            rows[row] = None
        return harvested


@dataclasses.dataclass
class Resident:
    """A request whose row is held on the device.

    Attributes:
      index: of the request in its call.
      request: what is decoded.
      stopped: the stop string found in its output, if any.
    """

    index: int
    request: Request
    stopped: StopMatch | None = None


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


def _end_rows(state: DecodeState, is_found: jax.Array) -> DecodeState:
    """State in which rows that emitted a stop string have ended."""
    ends = is_found & state.is_running
    return state.replace(finish=jnp.where(ends, jnp.int32(Finish.STOP_STRING), state.finish))


def check_draft_length(draft_length: int, window: int) -> None:
    """Raises `SettingError` unless a draft of this length fits the window."""
    if not 1 <= draft_length < window:
        raise SettingError(
            f"A draft length of {draft_length} was given for a window of {window}; it must be at "
            "least 1 and less than the window, which also holds the newest committed token."
        )
