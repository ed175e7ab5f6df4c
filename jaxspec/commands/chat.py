"""`jaxspec chat`: a chat in the terminal that keeps its KV between turns."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from rich.console import Console

from jaxspec.commands.options import (
    ChatTemplateOptions,
    DrafterOptions,
    JsonOption,
    ModelOptions,
    SamplingOptions,
    TargetOption,
)
from jaxspec.commands.progress import warm_up, working
from jaxspec.decode.settings import DraftLength, check_draft_length
from jaxspec.engine.engine import Engine
from jaxspec.engine.memory import in_units
from jaxspec.errors import PromptError, SettingError
from jaxspec.requests.completions import Completion, counted
from jaxspec.requests.prompts import chat_template, json_object
from jaxspec.requests.requests import Prompt
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.options import check_counts

HELP = "/new starts a new chat; /quit, /exit or the end of the input exits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatCommand(
    JsonOption, ModelOptions, SamplingOptions, ChatTemplateOptions, DrafterOptions, TargetOption
):
    """Chat with a model, one line per turn. Each turn prefills only what is new, because the KV of
    the chat so far is kept. After each answer a line says how many tokens were reused, and how many
    bytes the KV takes."""

    max_tokens: int = 512
    """Most tokens of an answer."""
    system: str | None = None
    """A system message; without a chat template, the text begins with it."""
    draft_length: DraftLength | None = None
    """Tokens drafted per round (for a tree: nodes); default: the number of nodes of the drafter's
    tree, or 4. `auto` chooses while decoding."""
    max_length: int | None = None
    """Most tokens of the whole chat; default: what the target was trained for, and at most 2048."""

    def run(self, console: Console) -> dict[str, Any]:
        """Chats; returns the JSON document."""
        check_counts(self, "max_length")
        if self.draft_length not in (None, "auto"):
            check_draft_length(self.draft_length, None)
        params = self.sampling_params()
        make_drafter = self.choose_drafter(dtype=self.dtype, verify=self.verify)
        template = chat_template(self.chat_template)
        template_kwargs = json_object("--chat-template-kwargs", self.chat_template_kwargs)
        target = self.load(self.target)
        with working("loading the drafter"):
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
        session = engine.session()

        def answer(asked: list[dict[str, str]]) -> Completion:
            """Prints the answer to messages as it is emitted."""
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt: Prompt = system + asked if is_chat else join(system + asked)
            for piece in session.stream(
                prompt, params, chat_template=template, chat_template_kwargs=template_kwargs
            ):
                console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
                completion = piece.completion
            console.print()
            assert completion is not None, "the last piece has the completion"
            return completion

        messages: list[dict[str, str]] = []
        turns = []
        while (text := read_line()) is not None:
            if text.strip() in ("/quit", "/exit"):
                break
            if text.strip() == "/new":
                messages.clear()
                print("a new chat", file=sys.stderr)
            elif text.startswith("/"):
                print(
                    f"{text.strip()!r} is no command, and nothing was sent: {HELP}; with a space "
                    "in front it is a message",
                    file=sys.stderr,
                )
            elif text.strip():
                asked = [*messages, {"role": "user", "content": text}]
                try:
                    completion = answer(asked)
                except PromptError as error:  # the chat would no longer fit
                    print(f"error: {error} {HELP}.", file=sys.stderr)
                    continue
                messages = [*asked, {"role": "assistant", "content": completion.text or ""}]
                num_kept = session.num_kept_tokens
                kv_bytes = engine.row_store.row_bytes(num_kept)
                said = summary(completion, num_kept=num_kept, kv_bytes=kv_bytes)
                console.print(said, style="dim", markup=False, highlight=False, soft_wrap=True)
                kept = {"num_kept_tokens": num_kept, "kv_bytes": kv_bytes}
                turns.append({**completion.to_json(), **kept})
        return make_document(
            "chat",
            self,
            engine=engine.describe(),
            exactness=session.exactness,
            turns=turns,
            metrics=engine.metrics(),
        )


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
