"""`jaxspec serve`: a server with OpenAI's routes."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import pathlib
import sys
import warnings
from typing import Any

from rich.console import Console

from jaxspec.commands.options import (
    DrafterOptions,
    EngineArgs,
    JsonOption,
    TargetOption,
    settings_of,
)
from jaxspec.commands.progress import working
from jaxspec.decode.settings import DraftLength, check_draft_length
from jaxspec.engine.engine import Engine
from jaxspec.errors import JaxspecWarning, SettingError
from jaxspec.load.drafters import MakeDrafter
from jaxspec.load.models import load_packed
from jaxspec.requests.prompts import chat_template
from jaxspec.runtime import signals
from jaxspec.runtime.documents import json_text, make_document
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.files import decode_text, read_input
from jaxspec.runtime.options import check_between, check_counts
from jaxspec.runtime.values import shown, text

KEY_VARIABLE = "JAXSPEC_API_KEY"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeCommand(JsonOption, EngineArgs, DrafterOptions, TargetOption):
    """Serve a model with the routes of OpenAI's API, until Ctrl-C or SIGTERM. A response depends on
    the request alone: not on the load, other requests or the drafter."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is every one of this machine."""
    port: int = 8000
    """Port to listen at; 0 lets the system choose one."""
    api_key: str | None = None
    """Key that requests must have, or @FILE to read it from a file; default: the environment
    variable JAXSPEC_API_KEY, or none."""
    dtype: str | None = None
    """Dtype of parameters and compute, such as `bfloat16`; default: the checkpoint's."""
    verify: bool = True
    """--no-verify loads models without comparing their files with their checksums."""
    batch_size: int = 8
    """Requests decoded together; more wait."""
    max_length: int | None = None
    """Most tokens of a prompt and its completion together; default: what the target was trained
    for, and at most 2048."""
    draft_length: DraftLength | None = None
    """Tokens drafted per round (for a tree: nodes); default: the number of nodes of the drafter's
    tree, or 4. `auto` chooses while decoding."""
    session_header: str | None = None
    """Header that names the conversation of a request, such as `x-session-id`; its KV is kept
    between turns. Bodies may have `session_id` instead."""
    max_sessions: int = 64
    """Conversations that are kept; the one that was used least recently is dropped."""
    system_prompt: pathlib.Path | None = None
    """A text that many conversations begin with: its KV is computed once, at the start. It adds no
    message; requests give their own."""
    server_args: str | None = None
    """Limits of the server, as a JSON object, such as `{"max_n": 4, "request_timeout_s": 60}`. They
    are `served_model_name`, `max_body_bytes`, `max_prompts`, `max_n`, `max_connections`,
    `max_logprobs`, `request_timeout_s`, `header_timeout_s`, `keep_alive_timeout_s`,
    `write_timeout_s`, `drain_timeout_s`, `chat_template` (`vicuna`, or a Jinja file),
    `allow_request_template`, `generation_config` (`model` or `none`) and `cors_origins`."""

    def run(self, console: Console) -> dict[str, Any]:
        """Serves; returns the JSON document."""
        check_counts(self, "batch_size", "max_length", "max_sessions")
        check_between("--port", self.port, 0, 2**16 - 1)
        if self.draft_length not in (None, "auto"):
            check_draft_length(self.draft_length, None)
        for module in ("fastapi", "uvicorn", "prometheus_client"):
            import_extra(module, "jaxspec serve", extra="serve")
        from jaxspec.serving.http.listener import Server, open_listener
        from jaxspec.serving.http.service import ServerSettings, Service

        given = settings_of(self, "server_args")
        max_logprobs = given.pop("max_logprobs", 5)
        names = {field.name for field in dataclasses.fields(ServerSettings)} - {*vars(self)}
        if unknown := [name for name in given if name not in names]:
            raise SettingError(
                f"{unknown[0]!r} was given in --server-args, which take max_logprobs, "
                f"{', '.join(sorted(names))}."
            )
        if given.get("chat_template") is not None:
            name = text("chat_template", given["chat_template"], "`vicuna`, or the name of a file")
            given["chat_template"] = chat_template(name)
        named: dict[str, Any] = {"served_model_name": self.target, **given}
        settings = ServerSettings(
            **named,
            system_prompt=self.read_system_prompt(),
            api_key=self.read_key(),
            session_header=self.session_header,
            max_sessions=self.max_sessions,
        )
        self.given_engine()  # raises what is wrong
        make_drafter = self.choose_drafter(dtype=self.dtype, verify=self.verify)
        if settings.api_key is None and not is_loopback(self.host):
            warnings.warn(
                f"--host {self.host} was given without --api-key, so whoever reaches this machine "
                "may use the model.",
                JaxspecWarning,
                stacklevel=2,
            )
        with open_listener(self.host, self.port) as listener:
            engine = self.make_engine(make_drafter, max_logprobs=max_logprobs)
            service = Service(engine, settings)
            server = Server(service, listener)
            host, port = listener.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            document = make_document(
                "serve",
                dataclasses.replace(self, api_key=None),
                url=url,
                fingerprint=service.fingerprint,
                engine=engine.describe(),
            )

            def say_ready() -> None:
                said = f"serving {settings.served_model_name} at {url}/v1 ({engine.exactness})"
                print(said, file=sys.stderr, flush=True)

            print(f"{engine.memory.sentence}\nlistening at {url}; compiling", file=sys.stderr)
            if self.json:
                print(json_text(document), flush=True)
            with signals.handed_to(server.drain):
                server.run(say_ready)
        return document

    def make_engine(self, make_drafter: MakeDrafter | None, *, max_logprobs: int | None) -> Engine:
        """The engine, not compiled yet."""
        engine_args = self.given_engine()
        with working(f"loading {self.target}"):
            target = load_packed(self.target, dtype=self.dtype, verify=self.verify)
        with working("loading the drafter"):
            drafter = None if make_drafter is None else make_drafter(target)
        return Engine(
            target,
            drafter,
            draft_length=self.draft_length,
            batch_size=self.batch_size,
            max_length=self.max_length or min(2048, target.config.context_length),
            max_logprobs=max_logprobs,
            **engine_args,
        )

    def read_system_prompt(self) -> str | None:
        """The text of the common prompt."""
        path = self.system_prompt
        return None if path is None else read_text_of("--system-prompt", path, str(path))

    def read_key(self) -> str | None:
        """The key, from the option, a file or the environment.

        Raises:
          SettingError: the file cannot be read, or the key is empty or not ASCII.
        """
        key = self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE)
        if key is None:
            return None
        if key.startswith("@"):
            key = read_text_of("--api-key", pathlib.Path(key[1:]), key)
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise SettingError(
                "The key is empty, or has other characters than ASCII letters, digits and signs; "
                "give another."
            )
        return key


def read_text_of(option: str, path: pathlib.Path, given: str) -> str:
    """The text of the file that an option names, without space around it.

    Raises:
      SettingError: it cannot be read, or is empty.
    """
    try:
        content = decode_text(read_input(path)).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{option} {shown(given)} was given, and that file cannot be read "
            f"({getattr(error, 'strerror', None) or 'it is not UTF-8 text'}); name another."
        ) from error
    if not content:
        raise SettingError(f"{option} {shown(given)} was given, and that file is empty; fill it.")
    return content


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
