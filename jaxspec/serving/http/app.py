"""The routes: OpenAI's, and those that vLLM's clients and Kubernetes ask for; and what every
request passes before it gets to one."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec import __version__
from jaxspec.errors import JaxspecError, SettingError
from jaxspec.requests.requests import prompt_token_ids
from jaxspec.serving.http import protocol
from jaxspec.serving.http.generation import naming, respond
from jaxspec.serving.http.metrics import CONTENT_TYPE, exposition
from jaxspec.serving.http.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from jaxspec.serving.http.service import ClientGoneError, HttpError, Service, response_of

OPEN_PATHS = ("/health", "/ping")  # without a key


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
    of the body, and the time that a client takes to send it."""

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service, self.settings = app, service, service.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        try:
            self.check(scope)
            content = await self.body(receive)
            if content:
                check_json(content)
        except HttpError as error:
            response = response_of(error)
            response.headers["connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        except ClientGoneError:
            return
        messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
        scope["headers"] = [*headers, (b"content-type", b"application/json")]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        with contextlib.suppress(ClientGoneError), self.service.counted(scope["method"]):
            await self.app(scope, replay, send)

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
    """The application, for any ASGI server that knows lifespans: at the start of one the engine is
    driven and everything compiled, at its end running requests have `drain_timeout_s` to finish.
    `listener.Server` sees to both itself, so that it answers while programs are compiled."""
    engine, settings = service.engine, service.settings

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.prepare)
        with engine.driven():
            service.unavailable = None
            yield
            await service.drain()

    summary = "OpenAI's routes over jaxspec"
    app = FastAPI(title="jaxspec", version=__version__, summary=summary, lifespan=lifespan)

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
    async def tokenize(body: TokenizeBody, response: Response) -> dict[str, Any]:
        response.headers.update(naming(body.ignored))
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise SettingError("prompt or messages must be given, and not both; give one of them.")
        prompt: Any = body.prompt
        if body.messages is not None:
            [prompt] = ChatBody(messages=body.messages).prompts
        ids = await asyncio.to_thread(service.token_ids, prompt, "The prompt", body)
        if body.prompt is not None and not body.add_special_tokens:
            ids = ids[len(service.tokenizer.prefix_token_ids) :]
        found: dict[str, Any] = {"count": len(ids), "max_model_len": engine.shape.max_length}
        if body.return_token_strs:
            texts = protocol.token_texts(service.tokenizer, ids)
            found["token_strs"] = [texts[one] for one in ids]
        return {**found, "tokens": list(ids)}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, response: Response) -> dict[str, Any]:
        response.headers.update(naming(body.ignored))
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
            "chat_template": service.chat_template,
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
