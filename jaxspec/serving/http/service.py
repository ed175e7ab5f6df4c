"""What a server shares: its settings, its errors, its engine and its sessions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jaxspec.engine.engine import Engine
from jaxspec.engine.fingerprint import fingerprint
from jaxspec.engine.sessions import Session
from jaxspec.errors import JaxspecError, PromptError, QueueFullError, RequestError, SettingError
from jaxspec.requests.requests import prompt_token_ids
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.values import (
    flag,
    listed,
    number,
    seconds,
    shown,
    text,
    whole_number,
)
from jaxspec.serving.http import protocol
from jaxspec.serving.http.protocol import ChatBody, CompletionBody, DetokenizeBody

_log = logging.getLogger(__name__)

LIMITS = ("max_body_bytes", "max_prompts", "max_n", "max_connections", "max_sessions")
LONGEST_NAME = 256  # characters of a session's
KINDS = {401: "authentication_error", 429: "rate_limit_error"}
# What sentences call fields that they do not name.
SAID = {
    "stop string": "stop",
    "stop token": "stop_token_ids",
    "allowed token": "allowed_token_ids",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits of a server, and what it serves.

    Attributes:
      served_model_name: the name that requests give as `model`.
      api_key: the key that requests must have; None for none.
      max_body_bytes: most bytes of a request's body.
      max_prompts: most prompts of a request.
      max_n: most completions of a prompt.
      max_connections: most open connections.
      request_timeout_s: seconds after which a request ends with the tokens it has; None for never.
      header_timeout_s: seconds in which a request's head, and then its body, must have come.
      keep_alive_timeout_s: seconds after which an idle connection is closed.
      write_timeout_s: seconds that a client may take none of its response.
      drain_timeout_s: seconds that running requests have after SIGTERM.
      allow_request_template: whether a request may bring a chat template.
      chat_template: Jinja template instead of the tokenizer's own.
      generation_config: `model` takes the defaults of the checkpoint's generation config; `none`
        those of OpenAI (temperature 1).
      cors_origins: web pages from which browsers may call.
      session_header: header that names the session of a request, besides `session_id` in its body.
      max_sessions: most sessions that are kept.
      system_prompt: text that many conversations begin with, whose KV is computed at the start.

    Raises:
      SettingError: a value out of range.
    """

    served_model_name: str
    api_key: str | None = None
    max_body_bytes: int = 2**20
    max_prompts: int = 64
    max_n: int = 16
    max_connections: int = 1024
    request_timeout_s: float | None = None
    header_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    allow_request_template: bool = False
    chat_template: str | None = None
    generation_config: str = "none"
    cors_origins: Sequence[str] = ()
    session_header: str | None = None
    max_sessions: int = 64
    system_prompt: str | None = None

    def __post_init__(self):
        for name in LIMITS:
            whole_number(name, getattr(self, name), least=1)
        for name in ("header_timeout_s", "keep_alive_timeout_s", "write_timeout_s"):
            number(name, getattr(self, name), above=0, expected="a number of seconds above 0")
        number("drain_timeout_s", self.drain_timeout_s, least=0)
        seconds("request_timeout_s", self.request_timeout_s)
        text("served_model_name", self.served_model_name)
        flag("allow_request_template", self.allow_request_template)
        listed("cors_origins", self.cors_origins)
        for name in ("chat_template", "session_header", "system_prompt"):
            if getattr(self, name) is not None:
                text(name, getattr(self, name))
        if self.generation_config not in ("model", "none"):
            raise SettingError(
                f"generation_config {shown(self.generation_config)} was given; it must be model or "
                "none."
            )


class HttpError(Exception):
    """A response that is no success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers


class ClientGoneError(Exception):
    """The client has closed the connection."""


def response_of(error: Exception) -> Response:
    """The response for an error: ours and the framework's as they say, others with status 500."""
    status, message, param, code, headers = 500, "The server failed; see its log.", None, None, None
    match error:
        case HttpError():
            status, message, headers = error.status, str(error), error.headers
            param, code = error.param, error.code
        case QueueFullError():
            status, message, headers = 429, str(error), {"retry-after": "1"}
        case RequestError():
            status, message = 503, str(error)
        case JaxspecError():
            status, message, param = 400, " ".join(str(error).split()), param_of(error)
        case RequestValidationError():
            status, (message, param) = 400, described(error.errors()[0])
        case HTTPException():
            status, message, headers = error.status_code, f"{error.detail}.", error.headers
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = protocol.error_body(message, kind, param=param, code=code)
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


def param_of(error: JaxspecError) -> str | None:
    """The field that a message begins with, or the first that it names."""
    message = str(error)
    first, *others = message.replace("[", " ").replace(",", " ").split(" ")
    known = {*ChatBody.model_fields, *CompletionBody.model_fields, *DetokenizeBody.model_fields}
    if first in known or first in protocol.NOT_SUPPORTED:
        return first
    if isinstance(error, PromptError):
        return "prompt"
    if (said := next((name for words, name in SAID.items() if words in message), None)) is not None:
        return said
    ordinary = {"model", "n", "prompt", "seed", "stop", "tokens", "user"}  # words of any sentence
    return next((word for word in others if word in known - ordinary), None)


def described(problem: Mapping[str, Any]) -> tuple[str, str | None]:
    """A sentence for what is wrong with a body, and the field."""
    parts = [part for part in problem["loc"] if part != "body"]
    if not parts:
        return "The body is no JSON object; give it as the API's reference says.", None
    param = path = str(parts[0])
    for part in parts[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):  # members of unions
            path += f".{part}"
    if problem["type"] == "missing":
        return f"{path} is missing; give it as the API's reference says.", param
    wanted = problem["msg"].replace("Input should", "should").rstrip(".")
    return f"{path} {shown(problem.get('input'))} was given; it {wanted}.", param


class Sessions:
    """The engine's sessions, by the names that clients give. If there are too many, the one that
    was used least recently is closed; a conversation that goes on is then prefilled once more."""

    def __init__(self, engine: Engine, most: int):
        self._engine, self._most = engine, most
        self._open: dict[str, Session] = {}  # the least recently used first
        self._taken: set[str] = set()

    async def take(self, name: str) -> Session:
        """The session of a name, for one request, until it is given back.

        Raises:
          HttpError: another request has it, or requests have as many as there may be.
        """
        if not 0 < len(name) <= LONGEST_NAME:
            raise HttpError(
                400,
                f"session_id has {len(name)} characters; give from 1 to {LONGEST_NAME}.",
                param="session_id",
            )
        if name in self._taken:
            raise HttpError(
                409,
                f"The session {shown(name)} was given while another request of it has not ended; "
                "send this one after that, or with another session_id.",
                param="session_id",
                code="session_busy",
                headers={"retry-after": "1"},
            )
        if len(self._taken) >= self._most:
            raise QueueFullError(
                f"A session was given while {self._most} are answering requests, as many as there "
                "may be (max_sessions); try again when some have ended."
            )
        self._taken.add(name)
        try:
            # In threads, because they may compile something, or wait for a step.
            session = self._open.pop(name, None) or await asyncio.to_thread(self._make)
            self._open[name] = session
            while len(self._open) > self._most:
                idle = next(each for each in self._open if each not in self._taken)
                await asyncio.to_thread(self._open.pop(idle).close)
        except BaseException:
            self._taken.discard(name)
            raise
        return session

    def _make(self) -> Session:
        """A session; with kernels whose bits depend on the width, answers are prefilled once more,
        so that a turn is what it would be without one."""
        return self._engine.session(reread=not self._engine.row_store.keeps_prompt_bits)

    def give_back(self, name: str) -> None:
        """Lets other requests have a session."""
        self._taken.discard(name)


class Service:
    """What the routes share: the engine, its sessions, and whether it takes requests.

    Attributes:
      unavailable: why no requests are taken, or None.
    """

    def __init__(self, engine: Engine, settings: ServerSettings):
        self.engine, self.settings = engine, settings
        self.tokenizer: Any = engine.target.tokenizer
        if self.tokenizer is None:
            raise SettingError(
                f"The model {engine.target.name} has no tokenizer, so it has no text to serve; "
                "name another."
            )
        self.defaults = SamplingParams(temperature=1.0)
        if settings.generation_config == "model":
            target: Any = engine.target
            self.defaults = SamplingParams.from_generation_config(target)
        self.started_s = int(time.time())
        self.sessions = Sessions(engine, settings.max_sessions)
        self.chat_template = settings.chat_template or self.tokenizer.hf.chat_template
        more = {"defaults": repr(self.defaults), "chat_template": repr(self.chat_template)}
        self.fingerprint = "fp_" + fingerprint(engine, more)
        self.unavailable: str | None = "The server is starting: programs are being compiled."
        self._num_in_flight = 0

    @contextlib.contextmanager
    def counted(self, method: str) -> Iterator[None]:
        """A block that handles a request; the end of the server waits for those that POST."""
        number = int(method == "POST")
        self._num_in_flight += number
        try:
            yield
        finally:
            self._num_in_flight -= number

    @property
    def trouble(self) -> str | None:
        """Why no requests are taken, or None."""
        if self.unavailable is None and self.engine.queue.is_closed:
            return "The engine has ended, perhaps because the device does not answer."
        return self.unavailable

    def prepare(self) -> None:
        """Compiles everything, and prefills the system prompt."""
        engine, prompt, template = self.engine, self.settings.system_prompt, self.chat_template
        engine.warm_up()
        if prompt is None:
            return
        try:
            if template is not None:
                # What follows it differs, and some templates write it within the user's message.
                system = {"role": "system", "content": prompt}
                chats = [[system, {"role": "user", "content": text}] for text in ("a", "b")]
                first, other = (self.token_ids(chat, "A chat with it") for chat in chats)
                pairs = zip(first, other, strict=False)
                alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                prompt = [token for token, _ in alike]
            num_tokens = engine.cache_prefix(prompt)
        except PromptError as error:
            raise SettingError(
                f"The system prompt (--system-prompt) cannot be prefilled: {error}"
            ) from error
        chunk = engine.shape.prefill_chunk
        if num_tokens <= chunk and not engine.row_store.keeps_prompt_bits:
            _log.warning(
                "prompts share %d tokens with the system prompt, and with these kernels only whole "
                "chunks of %d are reused",
                num_tokens,
                chunk,
            )

    def check_model(self, name: str | None) -> None:
        """Raises `HttpError` unless a request names this model, or none."""
        served = self.settings.served_model_name
        if name not in (None, served):
            raise HttpError(
                404,
                f"The model {shown(name)} does not exist; this server has {served!r}.",
                param="model",
                code="model_not_found",
            )

    def token_ids(self, prompt: Any, name: str, body: Any = None) -> tuple[int, ...]:
        """Token ids of a prompt; of a chat with the template of its body, or the server's."""
        given = getattr(body, "chat_template", None)
        if given is not None and not self.settings.allow_request_template:
            raise SettingError(
                "chat_template was given in a request, and this server takes none "
                "(allow_request_template); leave it out."
            )
        is_chat = isinstance(prompt, list) and isinstance(prompt[0] if prompt else None, Mapping)
        return prompt_token_ids(
            prompt,
            self.engine.target,
            name=name,
            chat_template=(given or self.settings.chat_template) if is_chat else None,
            chat_template_kwargs=getattr(body, "chat_template_kwargs", None),
        )

    def model_entry(self) -> dict[str, Any]:
        """The model, as `/v1/models` lists it."""
        drafter = self.engine.drafter
        return {
            "id": self.settings.served_model_name,
            "object": "model",
            "created": self.started_s,
            "owned_by": "jaxspec",
            "root": self.engine.target.name,
            "parent": None,
            "max_model_len": self.engine.shape.max_length,
            "drafter": drafter.name if drafter else "none",
            "exactness": self.engine.exactness,
        }

    async def drain(self) -> None:
        """Takes no more requests, and waits for the end of those that run; cancels them when their
        time is up."""
        self.unavailable = "The server is ending."
        end_s = time.monotonic() + self.settings.drain_timeout_s
        while self._num_in_flight and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        self.engine.queue.give_up(self.engine.queue.unfinished)
