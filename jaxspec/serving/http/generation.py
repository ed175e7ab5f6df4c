"""From a request's body to the engine's streams, and from completions to the response."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from jaxspec.engine.queue import StreamOutput
from jaxspec.errors import JaxspecError, PromptError, RequestError, SettingError
from jaxspec.requests.completions import Completion
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.values import shown
from jaxspec.serving.http import protocol
from jaxspec.serving.http.protocol import ChatBody, GenerationBody
from jaxspec.serving.http.service import ClientGoneError, HttpError, Service, response_of

_log = logging.getLogger(__name__)

T = TypeVar("T")


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
      session: name of the session of which it is the next turn, or None.
    """

    def __init__(self, service: Service, body: GenerationBody, session: str | None = None):
        self.service, self.body, self.session = service, body, session
        self.has_session = False
        self.is_chat = isinstance(body, ChatBody)
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + secrets.token_hex(16)
        self.created = int(time.time())
        self.names: list[str] = []
        self.streams: list[AsyncGenerator[StreamOutput, None]] = []
        self.copies = 1
        self.num_emitted: dict[int, int] = {}
        self.offsets: dict[int, protocol.TextOffsets] = {}

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
        kept = service.engine.config.max_logprobs
        top_name = "top_logprobs" if self.is_chat else "logprobs"
        asked_for = {top_name: body.num_logprobs, "prompt_logprobs": body.num_prompt_logprobs}
        for name, wanted in asked_for.items():
            if wanted is not None and (kept is None or wanted > kept):
                raise SettingError(
                    f"{name} {wanted} was given, and this server keeps {kept or 'none'} at each "
                    "position (max_logprobs); give at most as many."
                )
        if body.stream and body.num_prompt_logprobs is not None:
            asked = "echo with logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            raise SettingError(
                f"{asked} was given with stream, and a stream has log-probabilities of the output "
                "only; leave stream out."
            )
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
        if (length := body.draft_length) is not None:
            if not 1 <= length <= max(longest_draft, 1):
                raise SettingError(
                    f"draft_length {shown(length)} was given; it must be from 1 to "
                    f"{max(longest_draft, 1)}."
                )
            if longest_draft and body.speculate is not False:
                options["draft_length"] = length
        samples, astream = each_sample(params), service.engine.astream
        if self.session is not None and len(prompts) * len(samples) > 1:
            raise SettingError(
                f"session_id was given with {len(prompts) * len(samples)} completions, and a "
                "conversation has one; give one prompt and leave n out, or leave session_id out."
            )
        try:
            for prompt, ids in enumerate(self.token_ids):
                for index, one in enumerate(samples):
                    request = f"{self.id}:{prompt}:{index}"
                    options |= {"request_id": request, "wait": False}
                    if self.session is not None:
                        options["session"] = await service.sessions.take(self.session)
                        self.has_session = True
                    self.streams.append(astream(ids, one, **options))
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
        if self.session is not None and self.has_session:
            self.service.sessions.give_back(self.session)
            self.has_session = False

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
            **(self.prompt_logprobs(completions[0]) if self.is_chat else {}),
            usage=protocol.usage(completions, self.copies),
            metrics=protocol.speculation(completions),
        )

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice of a response that is not streamed."""
        whole = self.echoed(index) + (completion.text or "")
        output: dict[str, Any] = {"text": whole}
        if self.is_chat:
            output = {"message": {"role": "assistant", "content": whole}}
        else:
            output |= self.prompt_logprobs(completion)
        token_ids, logprobs = completion.token_ids, completion.logprobs
        if logprobs is not None and getattr(self.body, "echo", False):
            token_ids = completion.prompt_token_ids + token_ids
            # A request that timed out before its prompt was read has none.
            logprobs = completion.prompt_logprobs and completion.prompt_logprobs + logprobs
        return {
            "index": index,
            **output,
            "logprobs": self.logprobs(index, token_ids, logprobs, text=whole),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **self.ids_of(index, completion.token_ids),
        }

    def prompt_logprobs(self, completion: Completion) -> dict[str, Any]:
        """The log-probabilities of the prompt, if they were asked for by this name."""
        num_top, found = self.body.prompt_logprobs, completion.prompt_logprobs
        if num_top is None:
            return {}
        tokenizer = self.service.tokenizer
        return {
            "prompt_logprobs": found and protocol.prompt_logprobs(tokenizer, found, num_top=num_top)
        }

    def prompt_of(self, index: int) -> int:
        """The number of the prompt of a choice."""
        return index * len(self.prompts) // (len(self.streams) * self.copies)

    def ids_of(self, index: int, token_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids, if they were asked for."""
        if not self.body.return_token_ids:
            return {}
        prompt = self.token_ids[self.prompt_of(index)]
        return {"prompt_token_ids": list(prompt), "token_ids": list(token_ids)}

    def echoed(self, index: int) -> str:
        """The text of the prompt of a choice, if it is to be repeated."""
        if not getattr(self.body, "echo", False):
            return ""
        prompt = self.prompts[self.prompt_of(index)]
        return prompt if isinstance(prompt, str) else self.service.tokenizer.decode(prompt)

    def logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Any, *, text: str = ""
    ) -> Any:
        """The log-probabilities of some tokens, in the form of the route; `text` is that of a whole
        choice."""
        if logprobs is None:
            return None
        tokenizer, num_top = self.service.tokenizer, self.body.num_logprobs or 0
        if self.is_chat:
            return protocol.chat_logprobs(tokenizer, token_ids, logprobs, num_top=num_top)
        offsets = self.offsets.setdefault(index, protocol.TextOffsets(tokenizer, text))
        return protocol.completion_logprobs(tokenizer, token_ids, logprobs, offsets=offsets)

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
                    if piece.completion is not None and not options.include_usage:
                        chunk["metrics"] = protocol.speculation([piece.completion])
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


def naming(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names the fields of a body that are unknown here, if there are any."""
    names = (name.encode("ascii", "replace").decode()[:64] for name in ignored[:32])
    safe = ("".join(c if c.isprintable() else "?" for c in name) for name in names)
    return {"x-ignored-fields": ", ".join(safe)} if ignored else {}


async def respond(service: Service, body: GenerationBody, request: Request) -> Response:
    """The response to `/v1/completions` and `/v1/chat/completions`."""
    ignored = body.ignored
    service.check_model(body.model)
    session, header = body.session_id, service.settings.session_header
    if session is None and header is not None:
        session = request.headers.get(header)
    generation = Generation(service, body, session)
    await generation.begin()
    headers = {"x-request-id": generation.id, **naming(ignored)}
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
