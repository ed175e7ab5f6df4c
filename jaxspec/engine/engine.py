"""The engine: requests in, completions out."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Unpack

from jaxspec.decode.settings import DraftLength, default_draft_length, warn_of_unused
from jaxspec.drafters.base import Drafter
from jaxspec.engine.adaptive import AdaptiveDrafting, FixedDrafting
from jaxspec.engine.config import EngineConfig, EngineSettings
from jaxspec.engine.core import EngineCore
from jaxspec.engine.executor import Executor, executor_of
from jaxspec.engine.intake import Intake, RequestSettings, as_chat_template
from jaxspec.engine.memory import Memory, in_units, window_break_even
from jaxspec.engine.progress import Progress
from jaxspec.engine.queue import StreamOutput, Ticket
from jaxspec.engine.saved_runs import RunSaver
from jaxspec.engine.sessions import Session, cache_prefix, kept_counts, open_session
from jaxspec.errors import RequestError, SettingError, warn_once
from jaxspec.kernels.registry import family_of
from jaxspec.load.drafters import make_drafter
from jaxspec.load.models import as_model
from jaxspec.models.base import Model, kv_dtype_of
from jaxspec.requests.completions import Completion, Completions
from jaxspec.requests.requests import Params, Prompt, Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Compiled, OnProgram
from jaxspec.runtime.documents import public_name
from jaxspec.runtime.environment import autotuned, noted_kernels
from jaxspec.runtime.values import check_callable, check_kind, flag, text
from jaxspec.types import DecodeState, PyTree

_log = logging.getLogger(__name__)


class Engine:
    """Decodes batches of prompts, speculatively if it has a drafter.

    There are three ways to decode: `generate` a list; `submit` requests, from any thread, and
    `step` until they have ended; `astream` requests, as many as you like at a time. (`run` is
    `generate` for `Request`s, and `stream` is `astream` without asyncio.) Requests are served in
    order of arrival.

    With the `coupled` verifier an output depends on the request (its seed included) and on the
    engine's shape: `max_length`, `verify_length`, `tree_depth`, `batch_size`, mesh and dtype. It
    does not depend on other requests, the row, the drafter or the draft length. For the other
    verifiers see their `promise`.

    With a `mesh`, each shard of its axis `data` decodes its own rows; an axis `model` splits heads,
    feed-forward layers and vocabulary over the devices of a shard. An output does not depend on the
    shard; between meshes it may differ by rounding.

    Args:
      target: the model to decode with; a name is passed to `load_model`. On a CPU a model that you
        loaded yourself is kept beside the packed copy that the engine decodes with.
      drafter: what proposes tokens, or what names it for `load_drafter`: a kind such as `ngram`, a
        draft model, `KIND:MODEL`, `package.module:factory`, or a dict such as `{"kind": "ngram",
        "prompt_lookup_max": 3}`. None and `none` decode plainly, one token per step.
      settings: those of `EngineConfig`, all of which have defaults: `batch_size`, `max_length`,
        `draft_length`, `verifier`, `scheduler` and others.

    Attributes:
      config: the settings.
      target: the target with its present weights, packed for its kernels.
      drafter: as given, or made from what named it; None without one.
      draft_length: most tokens drafted per round; 0 without a drafter.
      adaptive: with `draft_length="auto"`, what chooses the draft lengths; otherwise None.
      verify_lengths: tokens scored per round, from the narrowest window to the widest.
      num_residents: rows on the device, in the batch or waiting to join it.
      executor: holds the rows on the device and the compiled programs; for checks and measurements.
      queue: requests that are waiting or have a row.
      row_store: moves rows that sessions keep; for checks and measurements.
      shape: `EngineShape` of the batch.
      num_updates: how often `update_params` has replaced weights.

    Raises:
      SettingError: a setting out of range, or a state that does not fit into memory.
      ModelError: the drafter cannot draft for the target.

    Example:
      >>> import jaxspec
      >>> target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
      >>> engine = jaxspec.Engine(
      ...     target, drafter=jaxspec.DraftModel(draft), draft_length=4, batch_size=8
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
        target: Model | str,
        drafter: Drafter | str | Mapping[str, Any] | None = None,
        **settings: Unpack[EngineSettings],
    ):
        self.config = config = EngineConfig(**settings)
        target = as_model(target)
        self.drafter = drafter = make_drafter(drafter, target)
        self.executor = executor_of(target, drafter, config)
        self.target = self.executor.parts.target
        parts = self.executor.parts
        self.verifier, self.scheduler = parts.verifier, parts.scheduler
        warn_of_unused(
            drafter,
            draft_length=config.draft_length,
            tree_depth=config.tree_depth,
            exactness="ties" if config.exactness == "ties" else None,
        )
        if config.max_logprobs is None and config.logprobs_mode != "raw_logprobs":
            warn_once(
                f"logprobs_mode={config.logprobs_mode!r} was given without max_logprobs, so it has "
                "no effect; give max_logprobs too, or leave it out."
            )
        self.max_logprobs = None if parts.logprobs is None else parts.logprobs.num_top
        self.layout, self.max_queue = config.layout, config.max_queue
        self.mesh, self.shape = self.executor.mesh, self.executor.shape
        self.verify_lengths = self.executor.verify_lengths
        self.num_residents = self.executor.num_rows
        self.draft_length, self.adaptive = _drafting(self.executor, drafter, config.draft_length)
        self._core = EngineCore(self.executor, config, drafting=self.adaptive or FixedDrafting())
        self.queue, self.row_store = self._core.queue, self._core.kept.rows
        self._intake = Intake(self.executor, self.draft_length, self.max_logprobs)
        self.num_updates = 0

    def __repr__(self) -> str:
        return _shown(self.describe())

    @property
    def longest_prompt(self) -> int:
        """The most prompt tokens that leave room for one round."""
        return self.executor.longest_prompt

    @property
    def exactness(self) -> str:
        """`bitwise` (the target's own tokens), `ties` (the same except at ties within rounding:
        windows of several widths with kernels whose bits depend on the width, or the aligned
        layout), `distribution` (the target's distribution) or `lossy`."""
        if self.verifier.is_coupled:
            is_bitwise = self.layout == "ragged" and self.executor.is_width_invariant
            return "bitwise" if is_bitwise else "ties"
        return "distribution" if self.verifier.is_lossless else "lossy"

    @property
    def rounds_by_draft_length(self) -> dict[int, int]:
        """With `draft_length="auto"`: rounds run so far at each length it chose, 0 being plain
        decoding; empty otherwise."""
        return {} if self.adaptive is None else self.adaptive.rounds_by_draft_length

    @property
    def state(self) -> DecodeState:
        """The decode state on the device; every row is empty before the first call."""
        return self.executor.state

    @property
    def memory(self) -> Memory:
        """Bytes of weights and state, and what sessions keep at present."""
        return dataclasses.replace(self.executor.memory, **kept_counts(self._core))

    def metrics(self) -> dict[str, Any]:
        """Counters over the engine's life, under vLLM's names (see `telemetry.Metrics.snapshot`),
        and how many requests have a row (`num_running`) or wait for one (`num_waiting`) now.
        For its sessions: tokens whose KV is now in rows (`num_resident_tokens`) and on the host
        (`num_parked_tokens`, `parked_bytes`), and prompt tokens whose KV was reused, prefilled
        again and dropped so far (`num_reused_tokens`, `num_reread_tokens`, `num_dropped_tokens`).
        """
        self._core.release()
        num_waiting = self.queue.num_waiting
        now = {
            "num_running": self.queue.num_unfinished - num_waiting,
            "num_waiting": num_waiting,
        }
        return {**self._core.metrics.snapshot(), **now, **self._core.kept.metrics()}

    def describe(self) -> dict[str, Any]:
        """Shape and promise, for reports."""
        return _described(self)

    # Lists of requests.

    def generate(
        self,
        prompts: Sequence[Prompt] | Prompt,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        params: Params | Sequence[Params] | None = None,
        speculate: bool = True,
        draft_length: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Completions:
        """Completions of `prompts`, in order; `n` consecutive ones where a prompt asks for `n`.

        Requests that were submitted are decoded alongside.

        Args:
          prompts: each a text, token ids or a list of chat messages; also a dict with one of
            `prompt`, `prompt_token_ids` and `messages`, or a tokenizer's output. Ids may be arrays.
            One prompt counts as a list of one.
          sampling_params: one for all, or one each; default `SamplingParams()`.
          params: the same by a shorter name.
          speculate: False decodes plainly: in the same compiled program with every draft marked
            invalid, or in steps of one token where the engine has several widths.
          draft_length: replaces the engine's, up to `verify_length - 1`; triggers no compilation.
          chat_template: Jinja template for messages instead of the tokenizer's own.
          chat_template_kwargs: further variables of the template, such as `enable_thinking`.
          timeout_s: seconds after which requests end with the tokens they have and the stop reason
            `timeout`; checked every few rounds.
          on_progress: called whenever the host checks the rows, at least every `rounds_per_sync`
            rounds.

        Raises:
          PromptError: a prompt is empty, too long or malformed; nothing is decoded in this case.
          SettingError: a parameter out of range.
          RequestError: the engine was shut down, or its weights were deleted.
        """
        if params is not None and sampling_params is not None:
            raise SettingError("Both sampling_params and params were given; give one of them.")
        given = params if sampling_params is None else sampling_params
        requests = make_requests(
            prompts,
            SamplingParams() if given is None else given,
            self.target,
            longest=self.longest_prompt,
            chat_template=as_chat_template(chat_template),
            chat_template_kwargs=chat_template_kwargs,
        )
        options: dict[str, Any] = {"draft_length": draft_length, "timeout_s": timeout_s}
        found = self.run(requests, speculate=speculate, on_progress=on_progress, **options)
        saver = RunSaver(self, speculate=speculate, draft_length=draft_length)
        return Completions(found, save=saver)

    def run(
        self,
        requests: Sequence[Request],
        *,
        speculate: bool = True,
        draft_length: int | None = None,
        timeout_s: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Generator[Completion, None, None]:
        """Yields the completions of `requests` in order, each as soon as it and those before it
        have ended. See `generate`. Closing the iterator cancels what has not ended.
        """
        check_callable(on_progress=on_progress)
        tickets = self._intake.listed(
            requests, speculate=speculate, draft_length=draft_length, timeout_s=timeout_s
        )
        order = self.scheduler.order(
            [len(request.prompt_token_ids) for request in requests],
            [request.params.max_tokens for request in requests],
        )
        self._core.measure()
        try:
            self.queue.add(*(tickets[index] for index in order), is_limited=False)
            yield from self._core.completions(tickets, on_progress)
        finally:
            self.queue.give_up(tickets)

    # Requests one by one, for a server or your own loop.

    def submit(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        session: Session | None = None,
        **settings: Unpack[RequestSettings],
    ) -> str:
        """Queues a request, to be decoded by `step`; returns its id. Any thread may call it.

        Args:
          prompt: text, token ids or a list of chat messages.
          params: default `SamplingParams()`; `n` must be 1.
          request_id: a name that no unfinished request has; by default one is made.
          session: the session of which this is the next turn.

        The other arguments are those of `generate`.

        Raises:
          PromptError: the prompt is empty, malformed or too long for the engine's max_length.
          SettingError: a parameter out of range.
          QueueFullError: `max_queue` requests are waiting.
          RequestError: the id is taken; the engine was shut down, or its weights were deleted; or
            the session is closed, another engine's, or its last turn has not ended.
        """
        ticket = self._intake.single(prompt, params, request_id=request_id, **settings)
        self._add(session)(ticket)
        return ticket.request.request_id

    def _add(self, session: Session | None) -> Callable[[Ticket], None]:
        """What queues a ticket, as the next turn of a session if there is one."""
        if session is None:
            return self.queue.add
        check_kind("session", session, Session, "a session that engine.session() returned")
        return lambda ticket: session.enqueue(ticket, self._core)

    def cancel(self, request_id: str) -> None:
        """Ends a request; its completion holds the tokens emitted so far, with the finish reason
        `abort` and the stop reason `cancelled`. Any thread may call it.

        Raises:
          RequestError: there is no unfinished request with this id.
          SettingError: the id is not text.
        """
        self.queue.cancel(text("request_id", request_id))

    def step(self) -> list[Completion]:
        """Admits waiting requests, prefills prompts and runs some rounds; returns the submitted
        requests that have ended since the last call, in the order in which they ended.

        A step decodes until a row ends, or for `rounds_per_sync` rounds. While prompts are being
        prefilled, a step is a few rounds and one prefill call (one chunk on a CPU, four elsewhere),
        so that a long prompt delays running rows by no more than a call at a time. If several
        prompts wait for idle rows, a step prefills two more chunks for each idle row after the
        first. Within `driven` it waits for a step of the driver instead, unless there is something
        to return.
        """
        if self._core.driver is None:
            self._core.step()
        else:
            self._core.advance(unless=lambda: self.queue.has_finished or self.queue.is_empty)
        return self.queue.take_finished()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting, is being decoded, or was submitted and has ended since the
        last `step`. Cancelled and overdue requests end when this is asked."""
        self._core.release()
        return not self.queue.is_empty

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Generator[StreamOutput, None, None]:
        """Yields what a request emits, as it is emitted; the last piece holds the completion.

        Takes the arguments of `submit`, and raises the same errors, when it is called. Other
        requests are decoded alongside. Closing the iterator cancels the request.
        """
        ticket = self._intake.single(prompt, params, request_id=request_id, **settings).streamed()
        self.queue.add(ticket)
        return self._core.stream(ticket)

    def astream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        session: Session | None = None,
        wait: bool = True,
        **settings: Unpack[RequestSettings],
    ) -> AsyncGenerator[StreamOutput, None]:
        """`stream` for asyncio: any number of tasks of one event loop may stream at the same time,
        and share the steps; another event loop is refused with a `RequestError`, except within
        `driven`. Where `stream` raises `QueueFullError`, this waits for a place in the queue; with
        `wait=False` it raises too, when it is called, and the request is queued then.
        """
        ticket = self._intake.single(prompt, params, request_id=request_id, **settings).streamed()
        return self._core.astream(ticket, self._add(session), wait=flag("wait", wait))

    @contextlib.contextmanager
    def driven(self) -> Iterator[Engine]:
        """A block in which one thread runs all steps: while a request is unfinished, and not
        otherwise. For servers: `submit`, `stream` and `astream` then never wait for a step that
        runs, several event loops may stream at a time, and what is cancelled or overdue is freed
        within a step, whoever else waits.

        Requests that have not ended at the end of the block are cancelled. If a step raises an
        error, this is logged, and the requests end with the stop reason `device failure`.

        Raises:
          RequestError: the engine is driven already.

        Example:
          >>> import jaxspec
          >>> with jaxspec.Engine("demo-target", "ngram", batch_size=2).driven() as engine:
          ...     pieces = list(engine.stream("Once upon a time", {"max_tokens": 8}))
          >>> len(pieces[-1].completion.token_ids)
          8
        """
        with self._core.driven():
            yield self

    # Conversations, and prefixes that prompts share.

    def session(self, *, reread: bool = False) -> Session:
        """A conversation whose KV is kept between turns, so that a turn prefills only what is new.

        An answer's KV is written by rounds. With kernels whose bits do not depend on the width of a
        window (`native`) it equals, bit for bit, what prefilling the answer would have written;
        with others it does up to rounding. `Session.exactness` says which: `bitwise`, or `ties`.
        With `reread` it is as exact as the engine with any kernels.

        Args:
          reread: prefill every answer once more, as part of the next prompt, in chunks that begin
            where they would without a session. Prompts, with the answers of earlier turns in them,
            are still prefilled only once.

        Raises:
          SettingError: the layout is aligned, or `reread` is neither True nor False.
          RequestError: the engine's weights were deleted.
        """
        reread = flag("reread", reread)
        return open_session(self._core, self._intake, exactness=self.exactness, reread=reread)

    def cache_prefix(
        self,
        prompt: Prompt,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Prefills a prefix that many prompts share, such as a system prompt, and keeps its KV on
        the host; returns its number of tokens. From then on every request that begins with it, in a
        session or not, copies that KV instead of computing it, and emits the same tokens and bits.
        (With kernels whose bits depend on the width, only whole chunks of 128 tokens are copied,
        so a shorter prefix is of no use.) `forget_prefixes` drops it, as do new weights.

        Args:
          prompt: text, token ids or messages.
          chat_template: Jinja template for messages instead of the tokenizer's own.
          chat_template_kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
          PromptError: the prompt is empty, malformed or too long.
          SettingError: it does not fit into `session_bytes`, or the layout is aligned.
          RequestError: the engine was shut down, or the device failed.
        """
        return cache_prefix(
            self._core,
            self._intake,
            prompt,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )

    def forget_prefixes(self) -> None:
        """Drops all prefixes that `cache_prefix` keeps."""
        with self._core.lock:
            self._core.kept.forget_prefixes()

    # The engine's own life.

    def update_params(self, *, target: PyTree | None = None, draft: PyTree | None = None) -> None:
        """Replaces the weights of the target, the draft model or both by others, plain arrays like
        `LanguageModel.params` or packed ones like `engine.target.params`; nothing is recompiled. A
        tied model needs no `head`; one that is given must be the embedding's.

        The KV of sessions and common prefixes is dropped, and a logged warning says how much;
        sessions prefill it again with their next turn. With `draft_length="auto"` the acceptance
        seen so far is forgotten, and drafting begins again.

        Arrays that are on the engine's device and need no packing are not copied. If they are
        deleted later, such as by a step of training that they are donated to, requests are refused
        until this is called with others. Requests that had begun by then end with the stop reason
        `device failure`; those that were waiting are decoded with the new weights.

        Raises:
          RequestError: requests are unfinished.
          SettingError: neither was given; a pytree of another structure, shape or dtype, which the
            message gives with the path; arrays that were deleted; or a head that is not the
            embedding's where the config says that it is tied.
        """
        if target is None and draft is None:
            raise SettingError("No weights were given; give target=..., draft=... or both.")
        with self._core.lock:
            is_lost = self._core.give_up_if_lost()
            self._core.release()
            if (num_unfinished := self.queue.num_unfinished) and not is_lost:
                raise RequestError(
                    f"New weights were given while {num_unfinished} requests are unfinished, whose "
                    "KV is the old weights'; finish or cancel them first."
                )
            self.executor.update_params(target=target, drafter=draft)
            self.num_updates += 1
            if self.adaptive is not None and self.adaptive.controller is not None:
                self.adaptive.controller.forget_acceptance()
            num_bytes = self._core.kept.parked_bytes
            if num_dropped := self._core.kept.clear():
                _log.warning(
                    "new weights: the KV of %d tokens that sessions and common prefixes had was "
                    "dropped (%s of it on the host)",
                    num_dropped,
                    in_units(num_bytes),
                )
            if target is not None:
                self.target = self.executor.target

    def warm_up(
        self, on_program: OnProgram | None = None, *, scoring: bool = False
    ) -> tuple[Compiled, ...]:
        """Compiles every program before the first request instead of at its first use; see
        `Executor.warm_up`. With `scoring`, also the programs that `prompt_logprobs` need. With
        `draft_length="auto"` it then measures the rounds, unless requests are being decoded. Any
        thread may call it.

        Raises:
          RequestError: with `step_timeout_s`, the device does not answer.
        """
        check_callable(on_program=on_program)
        return self._core.warm_up(on_program, scoring=flag("scoring", scoring))

    def reset(self) -> None:
        """Drops the state of finished requests; no output depends on it. Sessions whose KV is in a
        row prefill it again.

        Raises:
          RequestError: requests are being decoded.
        """
        with self._core.lock:
            self._core.give_up_if_lost()
            self._core.release()
            if self.queue.tickets_by_row:
                raise RequestError("The engine was to be emptied while requests are being decoded.")
            self._core.reset()

    def shutdown(self) -> None:
        """Cancels all unfinished requests, frees the device's state, and refuses requests from now
        on. A block `with Engine(...) as engine:` calls it at its end."""
        self._core.shut_down()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()


def _drafting(
    executor: Executor, drafter: Drafter | None, draft_length: DraftLength | None
) -> tuple[int, AdaptiveDrafting | None]:
    """The longest draft length and, with `auto`, the controller that chooses lengths up to it."""
    if drafter is None:
        return 0, None
    if draft_length is None:
        return default_draft_length(drafter), None
    if draft_length != "auto":
        return draft_length, None
    longest = executor.shape.verify_length - 1
    return longest, AdaptiveDrafting(executor, draft_length=longest)


def _shown(described: Mapping[str, Any]) -> str:
    """One-line summary for `repr`."""
    names = ("verifier", "scheduler", "draft_length", "verify_length", "batch_size", "max_length")
    settings = ", ".join(f"{name} {described[name]}" for name in names)
    return f"<Engine of {described['target']} with drafter {described['drafter']}: {settings}>"


def _described(engine: Engine) -> dict[str, Any]:
    """Shape and promise of an engine."""
    drafter, kernels = engine.drafter, getattr(engine.target, "kernels", None)
    noted = noted_kernels()
    tried_window, rounds_in_window = None, 0
    if engine.adaptive is not None and len(engine.executor.variants) > 1:
        tried_window = getattr(engine.executor.parts.drafter, "tried_window", None)
        if tried_window is not None:
            rounds_in_window = engine.adaptive.rounds_by_variant.get(1, 0)
    return {
        "target": public_name(engine.target.name),
        "drafter": public_name(drafter.name) if drafter else "none",
        "kv_dtype": kv_dtype_of(engine.target),
        "draft_kv_dtype": kv_dtype_of(getattr(drafter, "model", None)),
        "is_synthetic": bool(drafter and drafter.is_synthetic),
        "kv_window_break_even": window_break_even(engine.executor.parts),
        "tried_kv_window": tried_window,
        "rounds_in_kv_window": rounds_in_window,
        "verifier": engine.verifier.name,
        "layout": engine.layout,
        "scheduler": engine.scheduler.name,
        "num_residents": engine.num_residents,
        "draft_length": engine.draft_length if engine.adaptive is None else "auto",
        "verify_lengths": list(engine.verify_lengths),
        "exactness": engine.exactness,
        "rests": None if engine.adaptive is None else engine.adaptive.rests,
        "promise": engine.verifier.promise,
        "mesh": None if engine.mesh is None else dict(engine.mesh.shape),
        "is_drafter_split": getattr(engine.executor.loop, "is_drafter_split", None),
        "kernels": kernels,
        "kernels_family": family_of(kernels),
        "kernels_fallback": getattr(engine.target, "kernels_fallback", None)
        or (noted["kernels_fallback"] if kernels == noted["kernels"] else None),
        "autotuned": autotuned(),
        **engine.shape.decisive(),
        **dataclasses.asdict(engine.memory),
    }
