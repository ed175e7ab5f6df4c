"""Requests: prompts as token ids, with their sampling parameters."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxspec.errors import PromptError, SettingError, warn_once
from jaxspec.models.base import Model
from jaxspec.requests.sampling_params import SamplingParams, as_sampling_params
from jaxspec.requests.shapes import Prompt, as_prompt, as_prompts

Params: TypeAlias = SamplingParams | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to decode.

    Attributes:
      request_id: the prompt's index in its call, unless the caller chose a name; with `n` above 1
        followed by the index of the completion: `3-0`, `3-1`.
      prompt_token_ids: at least one.
      params: its sampling parameters, with a seed if it is sampled.
      index: which of the prompt's `n` completions this is.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    index: int = 0


def make_requests(
    prompts: Sequence[Prompt] | Prompt,
    params: Params | Sequence[Params] | None,
    model: Model,
    *,
    longest: int,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    first: int = 0,
) -> list[Request]:
    """Requests named `0, 1, ...` for prompts given as text, token ids or chat messages; with `n`
    above 1 `0-0, 0-1, ...`.

    Args:
      prompts: a list of them, or one; see `shapes.as_prompts`.
      params: one for all prompts, or one each, as `SamplingParams` or dicts of its fields; default
        `SamplingParams()`.
      longest: most tokens that a prompt may have.
      chat_template: Jinja template for messages instead of the tokenizer's own.
      chat_template_kwargs: further variables of the template.
      names: of the prompts in error messages; default `Prompt 0`, `Prompt 1`, ...
      first: number of the first prompt.

    Raises:
      PromptError: a prompt is empty, too long, outside the vocabulary, or needs a tokenizer or a
        chat template that `model` lacks; or it has a shape that is not understood.
      SettingError: the number of `params` is not that of the prompts, a stop token, a token with a
        bias or an allowed token is outside the vocabulary, no allowed token can be emitted before
        `min_tokens`, there are stop strings but no tokenizer, or a stop string cannot occur in
        text.
    """
    plain = as_prompts(prompts, names)
    each = params_of_prompts(params, len(plain))
    _warn_of_unused(plain, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs)
    requests = []
    for index, (prompt, one) in enumerate(zip(plain, each, strict=True)):
        name = f"Prompt {index}" if names is None else names[index]
        ids = _token_ids(prompt, model, name, chat_template, chat_template_kwargs)
        if len(ids) > longest:
            raise PromptError(
                f"{name} has {len(ids)} tokens, and the engine's max_length leaves room for "
                f"{longest}; raise the max_length or shorten the prompt."
            )
        if one.stop and model.tokenizer is None:
            raise SettingError(
                f"{name} has stop strings, but the model {model.name} has no tokenizer to read its "
                "output with; give stop_token_ids instead."
            )
        one.check_token_ids(name, model)
        requests.extend(_samples(str(first + index), ids, one))
    return requests


def _warn_of_unused(prompts: Sequence[Any], **settings: Any) -> None:
    """Warns, once in a process, of settings of chats if no prompt is one."""
    has_chat = any(not isinstance(each, str) and _is_chat(each) for each in prompts)
    for name, value in settings.items():
        is_given = value is not None and not (isinstance(value, Mapping) and not value)
        if is_given and not has_chat and len(prompts):
            warn_once(
                f"{name} was given, and no prompt is a chat, so it has no effect; leave it out, or "
                "give lists of messages."
            )


def _is_chat(plain: Sequence[Any]) -> bool:
    return len(plain) > 0 and isinstance(plain[0], Mapping)


def params_of_prompts(
    params: Params | Sequence[Params] | None, num_prompts: int
) -> list[SamplingParams]:
    """`SamplingParams` for each prompt.

    Raises:
      SettingError: `params` has a different length from the prompts, or holds something else.
    """
    if not isinstance(params, (list, tuple)):
        one: Any = params
        return [as_sampling_params(one)] * num_prompts
    if len(params) != num_prompts:
        raise SettingError(
            f"{len(params)} sampling parameters were given for {num_prompts} prompts; give one, or "
            "one for each prompt."
        )
    return [as_sampling_params(one) for one in params]


def make_request(
    prompt: Prompt,
    params: Params | None,
    model: Model,
    *,
    longest: int,
    request_id: str,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Request:
    """The request of one prompt, with the caller's id; in error messages the prompt has this `name`
    instead. Raises what `make_requests` raises, and `SettingError` for more than one completion
    (`n`)."""
    params = as_sampling_params(params)
    if params.n != 1:
        raise SettingError(
            f"n {params.n} was given for a single request; submit it {params.n} times with "
            "the seeds seed, seed + 1, ..., or use generate."
        )
    name = f"The prompt of {request_id}" if name is None else name
    [request] = make_requests(
        [as_prompt(prompt, name)],
        params,
        model,
        longest=longest,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        names=[name],
    )
    return dataclasses.replace(request, request_id=request_id)


def _samples(request_id: str, ids: tuple[int, ...], params: SamplingParams) -> list[Request]:
    """The `n` requests of one prompt, each with its own seed if it is sampled."""
    if params.temperature == 0:
        return [Request(request_id=request_id, prompt_token_ids=ids, params=params)]
    first = secrets.randbits(62) if params.seed is None else params.seed
    return [
        Request(
            request_id=request_id if params.n == 1 else f"{request_id}-{index}",
            prompt_token_ids=ids,
            params=dataclasses.replace(params, seed=first + index, n=1),
            index=index,
        )
        for index in range(params.n)
    ]


def prompt_token_ids(
    prompt: Prompt,
    model: Model,
    *,
    name: str,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of one prompt, called `name` in error messages. Raises what `make_requests`
    raises."""
    plain = as_prompt(prompt, name)
    return _token_ids(plain, model, name, chat_template, chat_template_kwargs)


def _token_ids(
    plain: Any,
    model: Model,
    name: str,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> tuple[int, ...]:
    """Token ids of a prompt in its plain form."""
    tokenizer, ids = model.tokenizer, plain
    if isinstance(plain, str) or isinstance(plain[0], Mapping):
        if tokenizer is None:
            raise PromptError(
                f"{name} is text, but the model {model.name} has no tokenizer; give token ids."
            )
        try:
            if isinstance(plain, str):
                ids = tokenizer.encode(plain)
            else:
                ids = tokenizer.encode_chat(
                    plain, template=chat_template, template_kwargs=chat_template_kwargs
                )
        except PromptError as error:
            raise PromptError(f"{name}: {error}") from error
        if not ids:
            raise PromptError(f"{name} has no tokens; give at least one.")
    outside = [token for token in ids if not 0 <= token < model.vocab_size]
    if outside:
        first = outside[0] if abs(outside[0]) < 2**63 else "of more than 63 bits"
        raise PromptError(
            f"{name} holds the token id {first}, and the vocabulary of {model.name} "
            f"ends at {model.vocab_size - 1}; give ids of this model's tokenizer."
        )
    return tuple(ids)
