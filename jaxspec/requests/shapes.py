"""Shapes of prompts: what counts as one prompt, and what as a list of them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from jaxspec.errors import PromptError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
# A prompt in its plain form.
PlainPrompt: TypeAlias = str | list[int] | list[Message]

_FIELDS = ("prompt", "prompt_token_ids", "input_ids", "messages")
_PROMPTS = "a text, a list of token ids, a list of messages, or a list of these"


def as_prompts(prompts: Any, names: Sequence[str] | None = None) -> list[PlainPrompt]:
    """A list of prompts in their plain form. One text, one chat or one list of token ids counts as
    a list of one, and so does whatever else `as_prompt` takes.

    Args:
      prompts: a list of prompts, a tokenizer's output for several texts, an array of token ids
        `[B, T]`, or one prompt.
      names: of the prompts in error messages; default `Prompt 0`, `Prompt 1`, ...

    Raises:
      PromptError: it is none of these.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        prompts = _without_padding(prompts, "The prompts")
    prompts = _as_list(prompts, "The prompts")
    if isinstance(prompts, (str, Mapping)) or (_is_list(prompts) and _begins_one(prompts)):
        prompts = [prompts]
    if not _is_list(prompts):
        raise PromptError(f"The prompts are {_described(prompts)}; give {_PROMPTS}.")
    if names is None:
        names = [f"Prompt {index}" for index in range(len(prompts))]
    return [as_prompt(prompt, name) for prompt, name in zip(prompts, names, strict=True)]


def as_prompt(prompt: Any, name: str) -> PlainPrompt:
    """One prompt, called `name` in error messages, in its plain form: text, a list of ints, or a
    list of messages whose contents are text.

    Args:
      prompt: text, token ids, chat messages, a dict with one of `prompt`, `prompt_token_ids` and
        `messages`, or a tokenizer's output for one text. Ids may be an array of NumPy, JAX or
        PyTorch, also one with a single row.

    Raises:
      PromptError: it is none of these, empty, or several.
    """
    if isinstance(prompt, Mapping):
        prompt = _of_fields(prompt, name)
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError(f"{name} is empty; give at least one token.")
        return str(prompt)
    rows = _as_list(prompt, name)
    if rows is not prompt:  # it was an array
        rows = _only_row(rows, name)
    if not _is_list(rows):
        raise PromptError(
            f"{name} is {_described(rows)}; give text, a list of token ids, or a list of messages."
        )
    if len(rows) == 0:
        raise PromptError(f"{name} is empty; give at least one token.")
    if all(isinstance(message, Mapping) for message in rows):
        return [_checked(message, index, name) for index, message in enumerate(rows)]
    is_plain = all(type(token) is int for token in rows)
    ids = list(rows) if is_plain else [_as_id(token) for token in rows]
    if None in ids:
        raise PromptError(
            f"{name} is a list, but not of token ids (integers) or of messages (objects with "
            "'role' and 'content'); give one of these, or text."
        )
    return ids  # pyright: ignore[reportReturnType]


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(
        value, (str, bytes, bytearray, memoryview)
    )


def _begins_one(prompts: Sequence[Any]) -> bool:
    """Whether a list is one prompt, of token ids or messages."""
    if not len(prompts) or isinstance(first := prompts[0], str):
        return False
    if isinstance(first, Mapping):
        return "role" in first or not any(field in first for field in _FIELDS)
    return isinstance(first, numbers.Number) or getattr(first, "ndim", None) == 0


def _as_list(value: Any, name: str) -> Any:
    """An array as nested lists; everything else as it is."""
    is_array = hasattr(value, "tolist") and hasattr(value, "ndim")
    if not is_array or isinstance(value, (memoryview, np.generic)):
        return value
    try:
        return value.tolist()
    except Exception as error:  # a traced, deleted or distributed array
        raise PromptError(
            f"{name} is an array that cannot be read ({type(error).__name__}); give its values as "
            "a list."
        ) from error


def _only_row(rows: Any, name: str) -> Any:
    """The token ids of a batch of one, `[1, T]`; those of `[T]` as they are."""
    if not (_is_list(rows) and len(rows) and _is_list(rows[0])):
        return rows
    if len(rows) > 1:
        raise PromptError(
            f"{name} has {len(rows)} rows of token ids, and one is expected; give one of them."
        )
    return rows[0]


def _as_id(token: Any) -> int | None:
    """A token id as int; None if it is none."""
    is_bool = isinstance(token, bool) or "bool" in str(getattr(token, "dtype", ""))
    if is_bool or getattr(token, "ndim", 0) != 0:
        return None
    try:
        index = operator.index(token)
    except TypeError:
        return None
    return index


def _described(value: Any) -> str:
    """What was given, and where there is a cure, it."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes, which are decoded with .decode()"
    if hasattr(value, "__next__"):
        return f"a {type(value).__name__}, which list(...) makes a list"
    return "None" if value is None else f"of type {type(value).__name__}"


def _of_fields(prompt: Mapping[str, Any], name: str) -> Any:
    """What a dict holds: text, token ids or messages."""
    fields = [field for field in _FIELDS if field in prompt]
    if len(fields) != 1:
        held = ", ".join(map(repr, list(prompt)[:9])) or "nothing"
        hint = "; put one message in brackets, [message]" if "role" in prompt else ""
        raise PromptError(
            f"{name} is a dict with {held}; give one of 'prompt', 'prompt_token_ids', 'messages' "
            f"or a tokenizer's 'input_ids'{hint}."
        )
    [field] = fields
    if field == "input_ids":
        return _only_row(_without_padding(prompt, name), name)
    others = [other for other in prompt if other != field]
    if others:
        raise PromptError(
            f"{name} is a dict with {field!r} and {others[0]!r}, which is not read; leave it out."
        )
    value = prompt[field]
    if isinstance(value, str) != (field == "prompt") or isinstance(value, Mapping):
        expected = {"prompt": "text", "messages": "a list of messages"}
        raise PromptError(
            f"{name} has a {field!r} of type {type(value).__name__}; give "
            f"{expected.get(field, 'a list of token ids')} there."
        )
    return value


def _without_padding(encoded: Mapping[str, Any], name: str) -> list[Any]:
    """Token ids of a tokenizer's output, a list or one for each text, without what its attention
    mask leaves out."""
    ids: Any = _as_list(encoded["input_ids"], name)
    mask = _as_list(encoded.get("attention_mask"), name) or []
    is_one = not _is_list(ids) or _begins_one(ids)
    try:
        rows = [ids] if is_one else [_as_list(row, name) for row in ids]
        masks: list[Any] = (
            [mask] if is_one else [_as_list(row, name) for row in mask or [()] * len(rows)]
        )
        kept = [
            [token for token, is_kept in zip(row, own or [1] * len(row), strict=True) if is_kept]
            for row, own in zip(rows, masks, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise PromptError(
            f"{name} is a dict whose 'input_ids' are no lists of token ids, or do not fit their "
            "'attention_mask'; give a tokenizer's output as it is."
        ) from error
    return kept[0] if is_one else kept


def _checked(message: Message, index: int, name: str) -> Message:
    """A message with text as its content."""
    where = f"Message {index} of {name[:1].lower()}{name[1:]}"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise PromptError(
            f"{where} has no 'role'; give messages like {{'role': 'user', 'content': 'Hello'}}."
        )
    if _is_list(content) and all(map(_is_text_part, content)):
        texts = [part if isinstance(part, str) else part["text"] for part in content]
        return {**message, "content": "\n".join(texts)}
    if content is None and message.get("tool_calls"):
        return message
    if not isinstance(content, str):
        raise PromptError(
            f"{where} has no 'content' that is text; give text, or parts like "
            "{'type': 'text', 'text': 'Hello'}."
        )
    return message


def _is_text_part(part: Any) -> bool:
    if isinstance(part, Mapping):
        return part.get("type", "text") == "text" and isinstance(part.get("text"), str)
    return isinstance(part, str)
