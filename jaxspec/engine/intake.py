"""Turns a user's call into tickets that the engine can serve."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from jaxspec.decode.settings import LONGER_DRAFTS, check_draft_length
from jaxspec.engine.admission import stop_tokens
from jaxspec.engine.executor import Executor
from jaxspec.engine.queue import Ticket
from jaxspec.errors import JaxspecWarning, SettingError, warn_once
from jaxspec.requests.requests import Params, Prompt, Request, make_request
from jaxspec.runtime.values import flag, seconds, text, whole_number


class RequestSettings(TypedDict, total=False):
    """The keywords that `Engine.submit` and others share; they are those of `Engine.generate`."""

    speculate: bool
    draft_length: int | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    timeout_s: float | None


@dataclasses.dataclass(frozen=True)
class Intake:
    """Checks requests against the engine's settings, before anything is queued.

    Attributes:
      executor: the executor that they will run on.
      draft_length: the default for requests that do not set one; 0 without a drafter.
      max_logprobs: log-probabilities kept per position, or None.
    """

    executor: Executor
    draft_length: int
    max_logprobs: int | None
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count, init=False)
    has_warned: threading.Event = dataclasses.field(default_factory=threading.Event, init=False)

    def single(
        self,
        prompt: Prompt,
        params: Params | None,
        *,
        request_id: str | None = None,
        speculate: bool = True,
        draft_length: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """The ticket of one prompt, whose output is awaited. See `Engine.submit`."""
        if request_id is None:
            request_id = f"request-{next(self.numbers)}"
        request = make_request(
            prompt,
            params,
            self.executor.parts.target,
            longest=self.executor.longest_prompt,
            request_id=text("request_id", request_id),
            chat_template=as_chat_template(chat_template),
            chat_template_kwargs=chat_template_kwargs,
        )
        self._check(request)
        self.executor.check_weights()
        draft_length = self._draft_length(speculate, draft_length)
        return Ticket(
            request=request,
            draft_length=draft_length if request.params.max_tokens else 0,
            has_consumer=False,
            is_interactive=True,
            deadline=_deadline(timeout_s),
        )

    def listed(
        self,
        requests: Sequence[Request],
        *,
        speculate: bool,
        draft_length: int | None,
        timeout_s: float | None,
    ) -> list[Ticket]:
        """The tickets of a list of requests. See `Engine.run`."""
        draft_length = self._draft_length(speculate, draft_length)
        deadline = _deadline(timeout_s)
        for request in requests:
            self._check(request)
        self.executor.check_weights()
        return [
            Ticket(
                request=request,
                draft_length=draft_length if request.params.max_tokens else 0,
                has_consumer=True,
                deadline=deadline,
            )
            for request in requests
        ]

    def _draft_length(self, speculate: bool, draft_length: int | None) -> int:
        given = draft_length is not None
        draft_length = whole_number("draft_length", draft_length if given else self.draft_length)
        if not flag("speculate", speculate) or self.draft_length == 0:
            if given and draft_length:
                why = (
                    "with speculate=False"
                    if self.draft_length
                    else "to an engine without a drafter"
                )
                warn_once(
                    f"draft_length={draft_length} was given {why}, so it has no effect; leave it "
                    "out."
                )
            return 0
        verify_length = self.executor.shape.verify_length
        check_draft_length(draft_length, verify_length, advice=LONGER_DRAFTS)
        return draft_length

    def _check(self, request: Request) -> None:
        """Raises `SettingError` for a request for log-probabilities that the engine does not keep,
        and warns once if a request asks for more tokens than fit."""
        stop_tokens(request, self.executor.parts.target)
        for name in ("logprobs", "prompt_logprobs"):
            wanted, kept = getattr(request.params, name), self.max_logprobs
            if wanted is not None and (kept is None or wanted > kept):
                raise SettingError(
                    f"Request {request.request_id} asks for {wanted} {name}, and the engine keeps "
                    f"{'none' if kept is None else kept}; make it with max_logprobs={wanted}."
                )
        room = self.executor.longest_prompt + 1 - len(request.prompt_token_ids)
        if request.params.max_tokens > room and not self.has_warned.is_set():
            self.has_warned.set()
            warnings.warn(
                f"Request {request.request_id} asks for {request.params.max_tokens} tokens, and "
                f"the engine's max_length of {self.executor.shape.max_length} leaves room for "
                f"{room} after its prompt of {len(request.prompt_token_ids)}: its output will be "
                "cut there; raise max_length or lower max_tokens. (Shown once.)",
                JaxspecWarning,
                stacklevel=2,
            )


def as_chat_template(chat_template: Any) -> str | None:
    """A chat template, or None for the tokenizer's own.

    Raises:
      SettingError: it is neither None nor text.
    """
    return None if chat_template is None else text("chat_template", chat_template)


def _deadline(timeout_s: float | None) -> float | None:
    """When requests that arrive now must end, by `time.monotonic`."""
    timeout_s = seconds("timeout_s", timeout_s)
    return None if timeout_s is None else time.monotonic() + timeout_s
