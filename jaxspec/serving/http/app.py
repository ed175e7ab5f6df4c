"""The routes: OpenAI's, and those that vLLM's clients and Kubernetes ask for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec import __version__
from jaxspec.engine.engine import Engine
from jaxspec.engine.fingerprint import fingerprint
from jaxspec.engine.queue import StreamOutput
from jaxspec.errors import JaxspecError, PromptError, QueueFullError, RequestError, SettingError
from jaxspec.requests.completions import Completion
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
from jaxspec.serving.http.metrics import CONTENT_TYPE, exposition
from jaxspec.serving.http.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_PATHS = ("/health", "/ping")  # without a key
KINDS = {401: "authentication_error", 429: "rate_limit_error"}


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

    def __post_init__(self):
        for name in ("max_body_bytes", "max_prompts", "max_n", "max_connections"):
            whole_number(name, getattr(self, name), least=1)
        for name in ("header_timeout_s", "keep_alive_timeout_s", "write_timeout_s"):
            number(name, getattr(self, name), above=0, expected="a number of seconds above 0")
        number("drain_timeout_s", self.drain_timeout_s, least=0)
        seconds("request_timeout_s", self.request_timeout_s)
        text("served_model_name", self.served_model_name)
        flag("allow_request_template", self.allow_request_template)
        listed("cors_origins", self.cors_origins)
        if self.chat_template is not None:
            text("chat_template", self.chat_template)
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
    first, *others = str(error).replace("[", " ").replace(",", " ").split(" ")
    known = {*ChatBody.model_fields, *CompletionBody.model_fields, *DetokenizeBody.model_fields}
    if first in known or first in protocol.NOT_SUPPORTED:
        return first
    if isinstance(error, PromptError):
        return "prompt"
    ordinary = {"model", "n", "prompt", "seed", "stop", "tokens", "user"}  # words of any sentence
    return next((word for word in others if word in known - ordinary), None)


def described(problem: Mapping[str, Any]) -> tuple[str, str | None]:
    """A sentence for what is wrong with a body, and the field."""
    names = [str(part) for part in problem["loc"] if part != "body"]
    if not names or problem["type"] == "missing":
        what = f"{names[0]} is missing" if names else "The body is no JSON object"
        return f"{what}; give it as the API's reference says.", names[0] if names else None
    wanted = problem["msg"].replace("Input should", "should").rstrip(".")
    return f"{names[0]} {shown(problem.get('input'))} was given; it {wanted}.", names[0]


class Service:
    """What the routes share: the engine, and whether it takes requests.

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
        defaults: dict[str, Any] = {"temperature": 1.0}
        self.defaults = SamplingParams(**defaults)
        if settings.generation_config == "model":
            target: Any = engine.target
            self.defaults = SamplingParams.from_generation_config(target)
        self.started_s = int(time.time())
        template = settings.chat_template or self.tokenizer.hf.chat_template
        more = {"defaults": repr(self.defaults), "chat_template": repr(template)}
        self.fingerprint = "fp_" + fingerprint(engine, more)
        self.unavailable: str | None = "The server is starting: programs are being compiled."

    @property
    def trouble(self) -> str | None:
        """Why no requests are taken, or None."""
        if self.unavailable is None and self.engine.queue.is_closed:
            return "The engine has ended, perhaps because the device does not answer."
        return self.unavailable

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
        ids = prompt_token_ids(
            prompt,
            self.engine.target,
            name=name,
            chat_template=(given or self.settings.chat_template) if is_chat else None,
            chat_template_kwargs=getattr(body, "chat_template_kwargs", None),
        )
        return ids

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
        while self.engine.queue.unfinished and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        self.engine.queue.give_up(self.engine.queue.unfinished)


def check_ended(completion: Completion) -> None:
    """Raises `HttpError` for a completion that ended by no fault of its request."""
    reason = completion.stop_reason
    if completion.finish_reason == "abort" and reason != "timeout":
        status = 503 if reason in ("cancelled", "device timeout") else 500
        what = "because the server is ending" if reason == "cancelled" else f"early ({reason})"
        raise HttpError(status, f"The request ended {what}; send it again.")


def each_sample(params: SamplingParams) -> list[SamplingParams]:
    """Parameters of each of the `n` completions, with consecutive seeds; one if all are alike."""
    if params.temperature == 0:
        return [params]
    first = secrets.randbits(62) if params.seed is None else params.seed
    return [dataclasses.replace(params, seed=first + i, n=1) for i in range(params.n)]


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
      ClientGoneError: it has gone away.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class Generation:
    """One request: its completions, as they are decoded.

    Args:
      service: the server's.
      body: the checked body.
    """

    def __init__(self, service: Service, body: GenerationBody):
        self.service, self.body = service, body
        self.is_chat = isinstance(body, ChatBody)
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + secrets.token_hex(16)
        self.created = int(time.time())
        self.names: list[str] = []
        self.streams: list[AsyncGenerator[StreamOutput, None]] = []
        self.copies = 1
        self.num_emitted: dict[int, int] = {}
        self.offsets: dict[int, int] = {}

    async def begin(self) -> None:
        """Queues a request for each completion; raises what is wrong with the body."""
        try:
            await self._begin()
        except PromptError as error:
            message, kind = " ".join(str(error).split()), "messages" if self.is_chat else "prompt"
            raise HttpError(400, message, param=kind) from error

    async def _begin(self) -> None:
        service, body, settings = self.service, self.body, self.service.settings
        prompts: list[Any] = body.prompts  # pyright: ignore[reportAttributeAccessIssue]
        if not 0 < len(prompts) <= settings.max_prompts:
            number = f"{len(prompts)} prompts" if prompts else "an empty list"
            raise SettingError(
                f"prompt was given with {number}; give from 1 to {settings.max_prompts} in a "
                "request."
            )
        if body.n is not None and not 1 <= body.n <= settings.max_n:
            raise SettingError(f"n {body.n} was given; it must be from 1 to {settings.max_n}.")
        if body.stream_options is not None and not body.stream:
            raise SettingError("stream_options was given without stream; leave it out.")
        self.prompts = prompts
        name = "The prompt" if len(prompts) == 1 else "Prompt {}"
        encode = service.token_ids
        self.token_ids = [
            await asyncio.to_thread(encode, one, name.format(index), body)
            for index, one in enumerate(prompts)
        ]
        longest = service.engine.longest_prompt
        room = longest + 1 - max(map(len, self.token_ids), default=0)
        params = body.sampling(service.defaults, room=room)
        self.copies = (body.n or 1) if params.temperature == 0 else 1
        options: dict[str, Any] = {"timeout_s": settings.request_timeout_s}
        if body.speculate is not None:
            options["speculate"] = body.speculate
        longest_draft = service.engine.shape.verify_length - 1  # 0 without a drafter
        if body.draft_length is not None and not 1 <= body.draft_length <= max(longest_draft, 1):
            raise SettingError(
                f"draft_length {shown(body.draft_length)} was given; it must be from 1 to "
                f"{max(longest_draft, 1)}."
            )
        if body.draft_length is not None and longest_draft and body.speculate is not False:
            options["draft_length"] = body.draft_length
        try:
            for prompt, ids in enumerate(self.token_ids):
                for index, one in enumerate(each_sample(params)):
                    request = f"{self.id}:{prompt}:{index}"
                    self.streams.append(
                        service.engine.astream(ids, one, request_id=request, wait=False, **options)
                    )
                    self.names.append(request)
        except (PromptError, SettingError) as error:
            self.give_up()
            # The engine names the request, by a name that the client does not know.
            message = str(error).replace(f" of {request}", "").replace(f" {request}", "")
            raise type(error)(message) from error
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Cancels what has not ended."""
        for name in self.names:
            with contextlib.suppress(RequestError):
                self.service.engine.cancel(name)

    async def read(self, emit: Callable[[int, StreamOutput], object]) -> list[Completion]:
        """The completions; `emit` is called with the index of each piece's stream, and the
        piece."""

        async def read_one(index: int, stream: Any) -> Completion:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    if piece.completion is not None:
                        check_ended(piece.completion)
                    emit(index, piece)
                    if piece.completion is not None:
                        return piece.completion
            raise AssertionError("the last piece has the completion")

        tasks = [asyncio.ensure_future(read_one(*pair)) for pair in enumerate(self.streams)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.give_up()

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        copied = [one for one in completions for _ in range(self.copies)]
        choices = [self.choice(index, one) for index, one in enumerate(copied)]
        return self.envelope(
            choices,
            usage=protocol.usage(completions, self.copies),
            metrics=protocol.speculation(completions),
        )

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice of a response that is not streamed."""
        whole = self.echoed(index) + (completion.text or "")
        output: dict[str, Any] = {"text": whole}
        if self.is_chat:
            output = {"message": {"role": "assistant", "content": whole}}
        return {
            "index": index,
            **output,
            "logprobs": self.logprobs(index, completion.token_ids, completion.logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **self.ids_of(index, completion.token_ids),
        }

    def ids_of(self, index: int, token_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids, if they were asked for."""
        if not self.body.return_token_ids:
            return {}
        per_prompt = len(self.streams) * self.copies // len(self.token_ids)
        prompt = self.token_ids[index // per_prompt]
        return {"prompt_token_ids": list(prompt), "token_ids": list(token_ids)}

    def echoed(self, index: int) -> str:
        """The text of the prompt of a choice, if it is to be repeated."""
        if not getattr(self.body, "echo", False):
            return ""
        per_prompt = len(self.streams) * self.copies // len(self.token_ids)
        prompt = self.prompts[index // per_prompt]
        return prompt if isinstance(prompt, str) else self.service.tokenizer.decode(prompt)

    def logprobs(self, index: int, token_ids: Sequence[int], logprobs: Any) -> Any:
        """The log-probabilities of some tokens, in the form of the route."""
        if logprobs is None:
            return None
        tokenizer, num_top = self.service.tokenizer, self.body.num_logprobs or 0
        if self.is_chat:
            return protocol.chat_logprobs(tokenizer, token_ids, logprobs, num_top=num_top)
        offset = self.offsets.get(index, 0)
        found = protocol.completion_logprobs(tokenizer, token_ids, logprobs, offset=offset)
        self.offsets[index] = offset + sum(map(len, found["tokens"]))
        return found

    def envelope(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A body of a response, or a chunk of a stream."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": self.id,
            "object": kind + (".chunk" if self.is_chat and self.body.stream else ""),
            "created": self.created,
            "model": self.service.settings.served_model_name,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
            **more,
        }

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a stream, the last with the usage if that was asked for."""
        options = self.body.stream_options or protocol.StreamOptions()
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        reading = asyncio.ensure_future(self.read(lambda *piece: pieces.put_nowait(piece)))
        reading.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (item := await pieces.get()) is not None:
                stream, piece = item
                for copy in range(self.copies):
                    chunk = self.chunk(stream * self.copies + copy, piece)
                    if options.continuous_usage_stats:
                        num_prompt = sum(map(len, self.token_ids))
                        chunk["usage"] = protocol.counted(
                            num_prompt, sum(self.num_emitted.values())
                        )
                    elif options.include_usage:
                        chunk["usage"] = None
                    yield chunk
            completions = await reading
            if options.include_usage:
                yield self.envelope(
                    [],
                    usage=protocol.usage(completions, self.copies),
                    metrics=protocol.speculation(completions),
                )
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def chunk(self, index: int, piece: StreamOutput) -> dict[str, Any]:
        """The chunk for a piece of a completion."""
        is_first = index not in self.num_emitted
        self.num_emitted[index] = self.num_emitted.get(index, 0) + len(piece.token_ids)
        new, ended = piece.text, piece.completion
        delta: dict[str, Any] = {"text": (self.echoed(index) if is_first else "") + new}
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            delta = {"delta": {**role, "content": new}}
        choice = {
            "index": index,
            **delta,
            "logprobs": self.logprobs(index, piece.token_ids, piece.logprobs),
            "finish_reason": None if ended is None else ended.finish_reason,
            "stop_reason": None if ended is None else ended.stop_reason,
            **self.ids_of(index, piece.token_ids),
        }
        return self.envelope([choice])


class EventStream(Response):
    """Server-sent events, which end when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, headers: Mapping[str, str]):
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**headers, **unbuffered})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self.generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; an error after the first is an event of its own."""

        async def event(data: str) -> None:
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self.generation.chunks()) as chunks:
                    async for chunk in chunks:
                        await event(json.dumps(chunk))
            except ClientGoneError:
                raise
            except Exception as error:
                if not isinstance(error, HttpError | JaxspecError):
                    _log.exception("a stream failed")
                await event(bytes(response_of(error).body).decode())
            await event("[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with contextlib.suppress(ClientGoneError):
            try:
                await until_gone(receive, write())
            finally:
                self.generation.give_up()


async def respond(service: Service, body: GenerationBody, request: Request) -> Response:
    """The response to `/v1/completions` and `/v1/chat/completions`."""
    ignored = body.ignored
    service.check_model(body.model)
    generation = Generation(service, body)
    await generation.begin()
    headers = {"x-request-id": generation.id}
    if ignored:
        shown_names = (name.encode("ascii", "replace").decode()[:64] for name in ignored[:32])
        safe = ("".join(c if c.isprintable() else "?" for c in name) for name in shown_names)
        headers["x-ignored-fields"] = ", ".join(safe)
    if body.stream:
        return EventStream(generation, headers)
    try:
        read = generation.read(lambda *_: None)
        completions = await until_gone(request.receive, read)
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it
    finally:
        generation.give_up()
    return JSONResponse(generation.whole(completions), headers=headers)


def check_json(content: bytes) -> None:
    """Raises `HttpError` for a body that is not JSON, or holds what no field can be."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON number")

    try:
        json.dumps(json.loads(content.decode(), parse_constant=refuse), ensure_ascii=False).encode()
        return
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
    except UnicodeEncodeError:
        why = "a text has half a character (a lone surrogate)"
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:
        why = str(error).split(";")[0]
    raise HttpError(400, f"The body cannot be read as JSON ({why}); correct it.")


class Gate:
    """What every request passes: the key, whether the server takes requests, the size and the form
    of the body, and the time that a client takes to send and to receive."""

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service, self.settings = app, service, service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def timed(message: Message) -> None:
            try:
                async with asyncio.timeout(self.settings.write_timeout_s):
                    await send(message)
            except TimeoutError:  # drop the connection, with what is buffered for it
                transport = getattr(getattr(send, "__self__", None), "transport", None)
                if transport is not None:
                    transport.abort()
                raise ClientGoneError from None

        try:
            self.check(scope)
            content = await self.body(receive)
            if content:
                check_json(content)
        except HttpError as error:
            response = response_of(error)
            response.headers["connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, timed)
            return
        except ClientGoneError:
            return
        messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
        scope["headers"] = [*headers, (b"content-type", b"application/json")]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        with contextlib.suppress(ClientGoneError):
            await self.app(scope, replay, timed)

    def check(self, scope: Scope) -> None:
        """Raises `HttpError` for a request without the key, or while none are taken."""
        if scope["path"] in OPEN_PATHS:
            return
        if (key := self.settings.api_key) is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                raise HttpError(
                    401,
                    "The key is missing or wrong; give it as `Authorization: Bearer KEY`.",
                    code="invalid_api_key",
                )
        if scope["method"] == "POST" and (trouble := self.service.trouble) is not None:
            raise HttpError(503, trouble, headers={"retry-after": "5"})

    async def body(self, receive: Receive) -> bytes:
        """The whole body, counted as it comes."""
        content, most = bytearray(), self.settings.max_body_bytes
        try:
            async with asyncio.timeout(self.settings.header_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    content += message.get("body", b"")
                    if len(content) > most:
                        raise HttpError(
                            413, f"The body has over {most} bytes (max_body_bytes); shorten it."
                        )
                    if not message.get("more_body", False):
                        return bytes(content)
        except TimeoutError:
            raise HttpError(408, "The body did not come in time; send it faster.") from None


def make_app(service: Service) -> FastAPI:
    """The application; its engine must be driven (`Engine.driven`) while it runs."""
    engine, settings = service.engine, service.settings
    app = FastAPI(title="jaxspec", version=__version__, summary="OpenAI's routes over jaxspec")

    async def handle(request: Request, error: Exception) -> Response:
        return response_of(error)

    for kind in (HttpError, JaxspecError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await respond(service, body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await respond(service, body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_entry()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_entry()

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise SettingError("prompt or messages must be given, and not both; give one of them.")
        prompt: Any = body.prompt
        if body.messages is not None:
            [prompt] = ChatBody(messages=body.messages).prompts
        ids = await asyncio.to_thread(service.token_ids, prompt, "The prompt")
        if body.prompt is not None and not body.add_special_tokens:
            ids = ids[len(service.tokenizer.prefix_token_ids) :]
        found: dict[str, Any] = {"count": len(ids), "max_model_len": engine.shape.max_length}
        if body.return_token_strs:
            found["token_strs"] = [protocol.token_text(service.tokenizer, one) for one in ids]
        return {**found, "tokens": list(ids)}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        if body.tokens:
            prompt_token_ids(body.tokens, engine.target, name="tokens")
        decode = service.tokenizer.decode
        prompt = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
        return {"prompt": prompt}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        hf = service.tokenizer.hf
        return {
            "tokenizer_class": type(hf).__name__,
            "vocab_size": engine.shape.vocab_size,
            "prefix_token_ids": list(service.tokenizer.prefix_token_ids),
            "chat_template": settings.chat_template or hf.chat_template,
            **{name: str(token) for name, token in hf.special_tokens_map.items()},
        }

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        if (trouble := service.trouble) is not None:
            raise HttpError(503, trouble)
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(engine, settings.served_model_name), media_type=CONTENT_TYPE)

    app.add_middleware(Gate, service=service)
    if settings.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app
