"""Prompt files: Spec-Bench questions, plain lines, and JSON lines of several kinds."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import PromptError
from jaxspec.models.base import Model
from jaxspec.requests import Prompt, prompt_token_ids

VICUNA_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% else %}A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions.{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One prompt of a file.

    Attributes:
      prompt: text, token ids or messages.
      fields: the line's other fields (`question_id`, `category`, `domain`, ...).
      number: line of the file, counted from 1.
    """

    prompt: Prompt
    fields: Mapping[str, Any]
    number: int


def read_prompts(path: str | os.PathLike) -> list[PromptLine]:
    """Prompts of a file, one a line.

    A line is plain text, or a JSON object with `turns` (Spec-Bench and MT-bench: the first turn is
    used), `prompt`, `prompt_token_ids` or `messages`. Blank lines are skipped.

    Raises:
      PromptError: the file cannot be read or holds no prompt, or a line (it is named) is malformed.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PromptError(
            f"The prompt file {os.fspath(path)} cannot be read ({reason}); name a text file with "
            "one prompt a line."
        ) from error
    lines = text.split("\n")
    is_json = os.fspath(path).endswith((".jsonl", ".json"))
    prompts = [
        _parse_line(line, number, is_json=is_json)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(
            f"The prompt file {os.fspath(path)} holds no prompt; give at least one line."
        )
    return prompts


def _parse_line(line: str, number: int, *, is_json: bool) -> PromptLine:
    if not is_json and not line.lstrip().startswith("{"):
        return PromptLine(prompt=line.rstrip("\r"), fields={}, number=number)
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(
            f"Line {number} of the prompt file is not JSON ({error.msg} at column {error.colno}); "
            "mend the line, or give plain text lines in a file that does not end in .jsonl."
        ) from error
    kinds = ("turns", "prompt", "prompt_token_ids", "messages")
    present = [kind for kind in kinds if isinstance(fields, dict) and kind in fields]
    if len(present) != 1:
        raise PromptError(
            f"Line {number} of the prompt file has {' and '.join(present) or 'no prompt field'}; "
            f"give exactly one of {', '.join(kinds)}."
        )
    kind, value = present[0], fields[present[0]]
    item = {"turns": str, "prompt_token_ids": int, "messages": dict}.get(kind)
    is_good = isinstance(value, str) if item is None else _is_list_of(value, item)
    if not is_good:
        form = "text" if item is None else f"a non-empty list of {item.__name__}"
        raise PromptError(f"Line {number} of the prompt file has a {kind!r} that is not {form}.")
    others = {name: field for name, field in fields.items() if name != kind}
    prompt = value[0] if kind == "turns" else value
    return PromptLine(prompt=prompt, fields=others, number=number)


def _is_list_of(value: Any, item: type) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(x, item) and not isinstance(x, bool) for x in value)
    )


def sample_prompts() -> list[PromptLine]:
    """The 48 prompts of the embedded pair, in four domains."""
    assets = importlib.resources.files("jaxspec") / "assets" / "prompts.jsonl"
    with importlib.resources.as_file(assets) as path:
        return read_prompts(path)


def chat_template(name: str | None) -> str | None:
    """The Jinja template behind `--chat-template`: `vicuna`, or a file; None stays None.

    Raises:
      PromptError: no such file.
    """
    if name is None:
        return None
    if name == "vicuna":
        return VICUNA_TEMPLATE
    try:
        return pathlib.Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(
            f"The chat template {name!r} is neither 'vicuna' nor a readable file "
            f"({error.strerror}); name one of these."
        ) from error


def encode_prompts(
    lines: list[PromptLine],
    model: Model,
    *,
    max_prompt_tokens: int | None = None,
    is_chat: bool = False,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[int, ...]]:
    """Token ids of prompts read from a file.

    Args:
      max_prompt_tokens: longer prompts are cut to their first tokens.
      is_chat: text is the user's message of a chat, put through the chat template.
      template: a Jinja template instead of the tokenizer's own.
      template_kwargs: further variables of the template.

    Raises:
      PromptError: see `requests.prompt_token_ids`.
    """
    encoded = []
    for line in lines:
        prompt = line.prompt
        if is_chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        ids = prompt_token_ids(
            prompt,
            model,
            index=line.number,
            chat_template=template,
            chat_template_kwargs=template_kwargs,
        )
        encoded.append(ids[:max_prompt_tokens])
    return encoded
