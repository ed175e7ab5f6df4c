"""`jaxspec chat`: a chat in the terminal that keeps its KV between turns."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from rich.console import Console

from jaxspec.commands.options import (
    DrafterOptions,
    DtypeName,
    JsonOption,
    KvOptions,
    SamplingOptions,
)
from jaxspec.commands.progress import warm_up, working
from jaxspec.decode.settings import DraftLength, check_draft_length
from jaxspec.engine.engine import Engine
from jaxspec.engine.memory import in_units
from jaxspec.engine.sessions import Session
from jaxspec.errors import PromptError, SettingError
from jaxspec.load.models import load_packed
from jaxspec.requests.completions import Completion, counted
from jaxspec.requests.prompts import chat_template, json_object
from jaxspec.requests.requests import Prompt
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.options import check_counts

HELP = "/new starts a new chat; /quit, /exit or the end of the input exits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatCommand(JsonOption, KvOptions, SamplingOptions, DrafterOptions):
    """Chat with a model, one line per turn. Each turn prefills only what is new, because the KV of
    the chat so far is kept. After each answer a line says how many tokens were reused, and how many
    bytes the KV takes."""

    target: str
    """Hub id, Hugging Face directory, converted directory, `demo-target`, or `random:PRESET`."""
    max_tokens: int = 512
    """Most tokens of an answer."""
    system: str | None = None
    """A system message; without a chat template, the text begins with it."""
    chat_template: str | None = None
    """Template to use instead of the tokenizer's own: `vicuna`, or a Jinja file. If there is none,
    turns are joined as lines of text."""
    chat_template_kwargs: str | None = None
    """More template variables as a JSON object, e.g. '{"enable_thinking": false}'."""
    draft_length: DraftLength | None = None
    """Tokens drafted per round (for a tree: nodes); default: the number of nodes of the drafter's
    tree, or 4. `auto` chooses while decoding."""
    max_length: int | None = None
    """Most tokens of the whole chat; default: what the target was trained for, and at most 2048."""
    reread: bool = False
    """Prefill every answer again with the next turn, so that outputs are bitwise those without a
    session with any kernels. With the native kernels they are in any case."""
    dtype: DtypeName | None = None
    """Dtype of parameters and compute, and of KV unless --kv-dtype is given; default: the
    checkpoint's (on a CPU float32 for float16, for the embedded pair and for random presets)."""
    verify: bool = True
    """--no-verify loads target and draft model without comparing their files with their
    checksums."""

    def run(self, console: Console) -> dict[str, Any]:
        """Chats; returns the JSON document."""
        check_counts(self, "max_length")
        if self.draft_length not in (None, "auto"):
            check_draft_length(self.draft_length, None)
        params = self.sampling_params()
        make_drafter = self.choose_drafter(dtype=self.dtype, verify=self.verify)
        template = chat_template(self.chat_template)
        template_kwargs = json_object("--chat-template-kwargs", self.chat_template_kwargs)
        with working(f"loading {self.target}"):
            target = load_packed(
                self.target, dtype=self.dtype, kv_dtype=self.kv_dtype, verify=self.verify
            )
            drafter = None if make_drafter is None else make_drafter(target)
        if target.tokenizer is None:
            raise SettingError(
                f"The model {target.name} has no tokenizer, so there is nothing to chat with; name "
                "another."
            )
        is_chat = template is not None or bool(target.tokenizer.hf.chat_template)
        if template_kwargs is not None and not is_chat:
            raise SettingError(
                f"--chat-template-kwargs was given, and {target.name} has no chat template; name "
                "one with --chat-template, or leave it out."
            )
        engine = Engine(
            target,
            drafter,
            draft_length=self.draft_length,
            batch_size=1,
            max_length=self.max_length or min(2048, target.config.context_length),
        )
        print(f"{engine.memory.sentence}\n{HELP}", file=sys.stderr)
        warm_up(engine)
        chat = Chat(
            session=engine.session(reread=self.reread),
            params=params,
            system=self.system,
            template=template,
            template_kwargs=template_kwargs,
            is_chat=is_chat,
        )
        turns = []
        while (text := read_line()) is not None:
            if text.strip() in ("/quit", "/exit"):
                break
            if text.strip() == "/new":
                chat.messages.clear()
                print("a new chat", file=sys.stderr)
            elif text.startswith("/"):
                print(
                    f"{text.strip()!r} is no command, and nothing was sent: {HELP}; with a space "
                    "in front it is a message",
                    file=sys.stderr,
                )
            elif text.strip():
                turns += self._answer(console, engine, chat, text)
        return make_document(
            "chat",
            self,
            engine=engine.describe(),
            exactness=chat.session.exactness,
            turns=turns,
            metrics=engine.metrics(),
        )

    def _answer(
        self, console: Console, engine: Engine, chat: Chat, text: str
    ) -> list[dict[str, Any]]:
        """Shows the answer to a text, and a summary of the turn; the result is empty if the text
        does not fit."""
        try:
            completion = chat.answer(console, text)
        except PromptError as error:
            print(f"error: {error} {HELP}.", file=sys.stderr)
            return []
        num_kept = chat.session.num_kept_tokens
        kv_bytes = engine.row_store.row_bytes(num_kept)
        said = summary(completion, num_kept=num_kept, kv_bytes=kv_bytes)
        console.print(said, style="dim", markup=False, highlight=False, soft_wrap=True)
        return [{**completion.to_json(), "num_kept_tokens": num_kept, "kv_bytes": kv_bytes}]


@dataclasses.dataclass(kw_only=True)
class Chat:
    """A chat so far.

    Attributes:
      session: keeps the KV.
      params: those of every answer.
      system: a system message, or None.
      template: a Jinja chat template instead of the tokenizer's own.
      template_kwargs: its further variables, or None.
      is_chat: whether there is a template; otherwise texts are joined.
      messages: those of user and assistant.
    """

    session: Session
    params: SamplingParams
    system: str | None
    template: str | None
    template_kwargs: dict[str, Any] | None
    is_chat: bool
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def answer(self, console: Console, text: str) -> Completion:
        """Prints the answer to a text as it is emitted, and adds both to the messages.

        Raises:
          PromptError: the chat would no longer fit; it is left unchanged.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        whole = system + asked
        prompt: Prompt = whole if self.is_chat else join(whole)
        pieces = self.session.stream(
            prompt,
            self.params,
            chat_template=self.template,
            chat_template_kwargs=self.template_kwargs,
        )
        for piece in pieces:
            console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
            completion = piece.completion
        console.print()
        assert completion is not None, "the last piece has the completion"
        self.messages = [*asked, {"role": "assistant", "content": completion.text or ""}]
        return completion


def join(messages: list[dict[str, str]]) -> str:
    """Messages as lines of text, for models without a chat template."""
    return "".join(f"{message['content']}\n" for message in messages)


def read_line() -> str | None:
    """The next line of standard input; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def summary(completion: Completion, *, num_kept: int, kv_bytes: int) -> str:
    """A one-line summary of a turn."""
    num_reused = completion.num_reused_tokens or 0
    num_read = len(completion.prompt_token_ids) - num_reused
    return (
        f"[{completion.summary}; {counted(num_reused, 'prompt token')} reused, {num_read} "
        f"prefilled; KV of {counted(num_kept, 'token')}, {in_units(kv_bytes)}]"
    )
