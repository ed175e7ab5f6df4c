"""Requests: prompts as token ids, with their sampling parameters."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxspec.errors import PromptError, SettingError
from jaxspec.models.base import Model
from jaxspec.requests.sampling_params import SamplingParams, as_sampling_params

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
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
    prompts: Sequence[Prompt],
    params: Params | Sequence[Params] | None,
    model: Model,
    *,
    longest: int,
    chat_template: str | None = None,
    names: Sequence[str] | None = None,
) -> list[Request]:
    """Requests named `0, 1, ...` for prompts given as text, token ids or chat messages; with `n`
    above 1 `0-0, 0-1, ...`.

    Args:
      params: one for all prompts, or one each, as `SamplingParams` or dicts of its fields; default
        `SamplingParams()`.
      longest: most tokens that a prompt may have.
      chat_template: Jinja template for messages instead of the tokenizer's own.
      names: of the prompts in error messages; default `Prompt 0`, `Prompt 1`, ...

    Raises:
      PromptError: a prompt is empty, too long, outside the vocabulary, or needs a tokenizer or a
        chat template that `model` lacks.
      SettingError: the number of `params` is not that of the prompts, a stop token is outside the
        vocabulary, or there are stop strings but no tokenizer.
    """
    if isinstance(prompts, str):
        raise PromptError(
            "One text was given where a list of prompts is expected; put it in brackets, [text]."
        )
    each = params_of_prompts(params, len(prompts))
    requests = []
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        name = f"Prompt {index}" if names is None else names[index]
        ids = prompt_token_ids(prompt, model, name=name, chat_template=chat_template)
        if len(ids) > longest:
            raise PromptError(
                f"{name} has {len(ids)} tokens, and the engine's max_length leaves room for "
                f"{longest}; raise the max_length or shorten the prompt."
            )
        for token in one.stop_token_ids:
            if not 0 <= token < model.vocab_size:
                raise SettingError(
                    f"{name} has the stop token {token}, and the vocabulary of {model.name} ends "
                    f"at {model.vocab_size - 1}; give ids of this model's tokenizer."
                )
        if one.stop and model.tokenizer is None:
            raise SettingError(
                f"{name} has stop strings, but the model {model.name} has no tokenizer to read its "
                "output with; give stop_token_ids instead."
            )
        requests.extend(_samples(str(index), ids, one))
    return requests


def params_of_prompts(
    params: Params | Sequence[Params] | None, num_prompts: int
) -> list[SamplingParams]:
    """`SamplingParams` for each prompt.

    Raises:
      SettingError: `params` has a different length from the prompts, or holds something else.
    """
    if not isinstance(params, Sequence):
        return [as_sampling_params(params)] * num_prompts
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
) -> Request:
    """The request of one prompt, with the caller's id. Raises what `make_requests` raises, and
    `SettingError` for more than one completion (`n`)."""
    params = as_sampling_params(params)
    if params.n != 1:
        raise SettingError(
            f"n {params.n} was given for a single request; submit it {params.n} times with "
            "the seeds seed, seed + 1, ..., or use generate."
        )
    [request] = make_requests(
        [prompt],
        params,
        model,
        longest=longest,
        chat_template=chat_template,
        names=[f"The prompt of {request_id}"],
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
    is_text = isinstance(prompt, str)
    is_chat = not is_text and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    tokenizer = model.tokenizer
    ids: Sequence[Any]
    if not is_text and not is_chat:
        ids = prompt
    elif tokenizer is None:
        raise PromptError(
            f"{name} is text, but the model {model.name} has no tokenizer; give token ids."
        )
    else:
        messages: Any = prompt
        try:
            if isinstance(prompt, str):
                ids = tokenizer.encode(prompt) if prompt else []
            else:
                ids = tokenizer.encode_chat(
                    messages, template=chat_template, template_kwargs=chat_template_kwargs
                )
        except PromptError as error:
            raise PromptError(f"{name}: {error}") from error
    if len(ids) == 0:
        raise PromptError(f"{name} is empty; give at least one token.")
    if not all(isinstance(token, (int, np.integer)) for token in ids):
        raise PromptError(
            f"{name} is a list, but not of token ids (integers) or of messages (objects with "
            "'role' and 'content'); give one of these, or text."
        )
    outside = [token for token in ids if not 0 <= token < model.vocab_size]
    if outside:
        raise PromptError(
            f"{name} holds the token id {outside[0]}, and the vocabulary of {model.name} "
            f"ends at {model.vocab_size - 1}; give ids of this model's tokenizer."
        )
    return tuple(int(token) for token in ids)
