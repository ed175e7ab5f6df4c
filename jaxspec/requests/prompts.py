"""Prompt files: Spec-Bench questions, plain text lines, and JSON lines of several kinds."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.resources
import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from jaxspec.errors import PromptError, SettingError
from jaxspec.models.base import Model
from jaxspec.requests.requests import Prompt, prompt_token_ids
from jaxspec.runtime.files import decode_text, read_input

SAMPLE_PROMPTS = importlib.resources.files("jaxspec") / "assets" / "prompts.jsonl"

Turns: TypeAlias = Literal["first", "all"]

# FastChat's conversation template `vicuna_v1.1`, which Spec-Bench applies to Vicuna. The text of an
# answer may begin with the space that is written before it.
VICUNA_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% else %}A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions.{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ASSISTANT: ' + message['content'].lstrip() + eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One prompt of a file.

    Attributes:
      prompt: text, token ids or messages.
      fields: the line's other fields (`question_id`, `category`, `domain`, ...).
      number: line of the file, counted from 1; 0 if the prompt is not from a file.
      later_turns: what the user says after the first answer, the second, and so on.
    """

    prompt: Prompt
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    number: int = 0
    later_turns: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        """The first one included."""
        return 1 + len(self.later_turns)

    def turn(self, answers: Sequence[str], *, is_chat: bool) -> PromptLine:
        """The whole prompt of the turn after these answers: all messages so far, or, unless
        `is_chat`, all texts so far, each on lines of its own."""
        if not self.later_turns:
            return self
        assert isinstance(self.prompt, str), "turns are texts"
        said = [self.prompt]
        for answer, text in zip(answers, self.later_turns, strict=False):
            said += [answer, text]
        prompt: Prompt = "\n".join(said)
        if is_chat:
            roles = itertools.cycle(("user", "assistant"))
            prompt = [
                {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
            ]
        fields = {**self.fields, "turn": len(answers)}
        return dataclasses.replace(self, prompt=prompt, fields=fields, later_turns=())

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"Line {self.number} of the prompt file" if self.number else "The prompt"

    @property
    def is_chat(self) -> bool:
        """Whether it is a list of messages."""
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], Mapping)


def read_prompts(path: str | os.PathLike, *, turns: Turns = "first") -> list[PromptLine]:
    """Prompts of a file, one per line.

    A line is plain text, or a JSON object with `turns` (Spec-Bench and MT-bench), `prompt`,
    `prompt_token_ids` or `messages`. In a `.jsonl` or `.json` file every line is JSON; in other
    files, the lines that begin with a brace are. Blank lines are skipped.

    Args:
      path: the prompt file.
      turns: what to do with the turns of a line: `first` drops those after the first one, `all`
        keeps them as `PromptLine.later_turns`.

    Raises:
      PromptError: the file cannot be read or has no prompt, or a line is malformed.
      SettingError: `turns` is something else.
    """
    return _read_prompts(path, turns)[0]


def load_prompts(
    path: pathlib.Path | None, limit: int | None = None, *, turns: Turns = "first"
) -> tuple[list[PromptLine], dict[str, str]]:
    """The first `limit` prompts of a file (None: the sample prompts), and the SHA-256 of what was
    read, by the file's name. The file is opened once, so it may be a pipe.

    Raises:
      PromptError: see `read_prompts`.
    """
    with contextlib.ExitStack() as stack:
        if path is None:
            path = stack.enter_context(importlib.resources.as_file(SAMPLE_PROMPTS))
        lines, content = _read_prompts(path, turns)
        return lines[:limit], {path.name: hashlib.sha256(content).hexdigest()}


def _read_prompts(path: str | os.PathLike, turns: Turns) -> tuple[list[PromptLine], bytes]:
    """The prompts of a file, and its content."""
    if turns not in get_args(Turns):
        raise SettingError(f"turns {turns!r} was given; it must be 'first' or 'all'.")
    text, content = _read_text(
        pathlib.Path(path),
        problem=f"The prompt file {os.fspath(path)} cannot be read",
        advice="name a text file with one prompt per line",
    )
    is_json = os.fspath(path).endswith((".jsonl", ".json"))
    # Not splitlines: JSON strings may contain other line separators unescaped.
    prompts = [
        _parse_line(line, number, is_json=is_json)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(
            f"The prompt file {os.fspath(path)} holds no prompt; give at least one line."
        )
    if turns == "first":
        prompts = [dataclasses.replace(line, later_turns=()) for line in prompts]
    return prompts, content


def _parse_line(line: str, number: int, *, is_json: bool) -> PromptLine:
    if not is_json and not line.lstrip().startswith("{"):
        return PromptLine(prompt=line.rstrip("\r"), number=number)
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        where = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if isinstance(error, json.JSONDecodeError):
            where = f"{error.msg} at column {error.colno}"
        advice = (
            "correct the line, or give a file of plain text another suffix than .jsonl"
            if is_json
            else 'correct the line, or write text that begins with a brace as {"prompt": "..."}'
        )
        raise PromptError(
            f"Line {number} of the prompt file is not JSON ({where}); {advice}."
        ) from error
    if not isinstance(fields, dict):
        raise PromptError(
            f"Line {number} of the prompt file is JSON, but not an object; write "
            '{"prompt": ...} there.'
        )
    present = [kind for kind in _KINDS if kind in fields]
    if len(present) != 1:
        raise PromptError(
            f"Line {number} of the prompt file has {' and '.join(present) or 'no prompt field'}; "
            f"give exactly one of {', '.join(_KINDS)}."
        )
    kind = present[0]
    is_good, form = _KINDS[kind]
    if not is_good(fields[kind]):
        raise PromptError(f"Line {number} of the prompt file has a {kind!r} that is not {form}.")
    others = {name: field for name, field in fields.items() if name != kind}
    prompt, *later = fields[kind] if kind == "turns" else [fields[kind]]
    return PromptLine(prompt=prompt, fields=others, number=number, later_turns=tuple(later))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_turns(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_text, value))


def _is_token_ids(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(isinstance(x, int) and not isinstance(x, bool) for x in value)


def _is_messages(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(
        isinstance(x, dict) and isinstance(x.get("role"), str) and "content" in x for x in value
    )


_KINDS = {
    "turns": (_is_turns, "a list of texts, none of them empty"),
    "prompt": (_is_text, "text, or is empty"),
    "prompt_token_ids": (_is_token_ids, "a list of token ids, or is empty"),
    "messages": (_is_messages, "a list of objects with 'role' and 'content', or is empty"),
}


def sample_prompts() -> list[PromptLine]:
    """The 48 prompts of the embedded pair, in four domains."""
    return load_prompts(None)[0]


def chat_template(name: str | None) -> str | None:
    """The Jinja template named by `--chat-template`, `vicuna` or a file; None for None.

    Raises:
      PromptError: no such file.
    """
    if name is None:
        return None
    if name == "vicuna":
        return VICUNA_TEMPLATE
    text, _ = _read_text(
        pathlib.Path(name),
        problem=f"The chat template {name!r} is neither 'vicuna' nor a readable file",
        advice="name one of these",
    )
    return text


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """The JSON object given by a command line's `option`; None for None.

    Raises:
      SettingError: it is something else.
    """
    if text is None:
        return None
    found = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise SettingError(f"{option} {text!r} was given; it must be a JSON object.")
    return found


def _read_text(path: pathlib.Path, *, problem: str, advice: str) -> tuple[str, bytes]:
    """The text of a file or pipe that the user named, and its bytes. If it cannot be read, raises
    `PromptError`: `problem`, then the reason, then `advice`."""
    try:
        content = read_input(path)
        return decode_text(content), content
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    raise PromptError(f"{problem} ({reason}); {advice}.")


def encode_prompts(
    lines: Sequence[PromptLine],
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
      is_chat: put text through the chat template, as the user's message.
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
            name=line.name,
            chat_template=template,
            chat_template_kwargs=template_kwargs,
        )
        encoded.append(ids[:max_prompt_tokens])
    return encoded


def encode_within(
    max_prompt_tokens: int, lines: Sequence[PromptLine], model: Model, *, is_chat: bool
) -> list[tuple[PromptLine, tuple[int, ...]]]:
    """Prompts of at most so many tokens, each with its token ids. Longer ones are cut to their
    first tokens; those of a chat, which end with the opening of the answer, are left out.

    Raises:
      PromptError: all were left out; or see `requests.prompt_token_ids`.
    """
    if not is_chat:
        ids = encode_prompts(lines, model, max_prompt_tokens=max_prompt_tokens)
        return list(zip(lines, ids, strict=True))
    ids = encode_prompts(lines, model, is_chat=True)
    kept = [pair for pair in zip(lines, ids, strict=True) if len(pair[1]) <= max_prompt_tokens]
    if not kept:
        raise PromptError(
            f"Every one of the {len(lines)} prompts has more than {max_prompt_tokens} tokens with "
            "the chat template; give shorter ones."
        )
    return kept
