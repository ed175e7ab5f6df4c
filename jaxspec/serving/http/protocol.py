"""OpenAI's names: bodies of requests in, bodies of responses out. Nothing else here knows them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from jaxspec.errors import SettingError
from jaxspec.models.tokenizer import REPLACEMENT, TextTokenizer
from jaxspec.requests.completions import LEAST_LOGPROB, Completion, Completions
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.values import shown

# Fields for things that this server does not do, and the values (besides null) that ask for nothing
# and are sent by default.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        "audio guided_grammar guided_json guided_regex prediction reasoning_effort "
        "structured_outputs truncate_prompt_tokens web_search_options".split(),
        (),
    ),
    **dict.fromkeys(
        "bad_words documents functions guided_choice logits_processors tools".split(), ([],)
    ),
    **dict.fromkeys(
        "continue_final_message include_stop_str_in_output use_beam_search".split(), (False,)
    ),
    **dict.fromkeys(
        "add_generation_prompt add_special_tokens skip_special_tokens "
        "spaces_between_special_tokens".split(),
        (True,),
    ),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    "best_of": (1,),
    "length_penalty": (1,),
    "modalities": ([], ["text"]),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
# Fields that change no output of this server, whatever their value.
WITHOUT_EFFECT = {"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store"}
# Fields of `SamplingParams` that have the same name in a body.
SAMPLING = (
    "max_tokens temperature top_p top_k min_p n seed stop presence_penalty frequency_penalty "
    "repetition_penalty logit_bias min_tokens ignore_eos stop_token_ids allowed_token_ids"
).split()


class Body(BaseModel):
    """A body of a request. Unknown fields are kept, to be named in the response's header."""

    model_config = ConfigDict(extra="allow", strict=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_SUPPORTED

    @property
    def ignored(self) -> list[str]:
        """Names of fields that are unknown here, also of `stream_options`.

        Raises:
          SettingError: a field asks for something that is not supported.
        """
        options = getattr(self, "stream_options", None)
        unknown = [] if options is None else [f"stream_options.{each}" for each in options.ignored]
        for name, value in (self.model_extra or {}).items():
            if value is None or name in WITHOUT_EFFECT:
                continue
            if name not in self.neutral:
                unknown.append(name)
            elif value not in self.neutral[name]:
                raise SettingError(
                    f"{name} {shown(value)} was given, and this server does not support {name}; "
                    "leave it out."
                )
        return unknown


class StreamOptions(Body):
    """What a stream reports besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What completions and chats share. Names and ranges are those of `SamplingParams`."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    session_id: str | None = None
    speculate: bool | None = None
    draft_length: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities that are asked for at each position; None for none."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    def sampling(self, defaults: SamplingParams, *, room: int) -> SamplingParams:
        """The sampling parameters, with the server's defaults for what was not given.

        Args:
          room: tokens that fit after the prompt.

        Raises:
          SettingError: a value is out of range.
        """
        given = {name: getattr(self, name) for name in SAMPLING}
        given = {name: value for name, value in given.items() if value is not None}
        # At temperature 0 all completions of a prompt are the same, and one is decoded.
        temperature = given.get("temperature", defaults.temperature)
        if temperature == 0 and given.get("n", 1) > 0:
            given.pop("n", None)
        given |= {"logprobs": self.num_logprobs, "prompt_logprobs": self.num_prompt_logprobs}
        return dataclasses.replace(defaults, **given)


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """See `GenerationBody`; `logprobs` are those of the prompt too if it is repeated."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each text or token ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if is_one else list(prompt)


class Message(Body):
    """One message of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`. Templates write special tokens themselves."""

    neutral: ClassVar = {**NOT_SUPPORTED, "add_special_tokens": (False,)}

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        if not self.logprobs:
            if self.top_logprobs:
                raise SettingError(
                    f"top_logprobs {self.top_logprobs} was given without logprobs, so it would "
                    "have no effect; set logprobs to true."
                )
            return None
        return self.top_logprobs or 0

    def sampling(self, defaults: SamplingParams, *, room: int) -> SamplingParams:
        """See `GenerationBody`; by default a chat's answer has all the room there is."""
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens is None:
            self.max_tokens = max(room, 1)
        try:
            return super().sampling(defaults, room=room)
        except SettingError as error:
            if self.max_completion_tokens is None:
                raise
            named = str(error).replace("max_tokens", "max_completion_tokens")
            raise SettingError(named) from error

    @property
    def prompts(self) -> list[Any]:
        """The only prompt: its messages, with contents as text."""
        return [[_plain_message(index, one) for index, one in enumerate(self.messages)]]


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    """A message as chat templates take it: parts of text are joined by newlines, as in vLLM."""
    content, where = message.content, f"messages[{index}].content"
    if isinstance(content, list):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise SettingError(
                    f"{where} has the part {shown(part)}, and this server takes text only; give "
                    "parts of the type text."
                )
        content = "\n".join(part["text"] for part in content)
    if content is None:
        raise SettingError(f"{where} is missing; give a text, or leave the message out.")
    extra = {name: value for name, value in (message.model_extra or {}).items() if value}
    if "tool_calls" in extra or "function_call" in extra:
        raise SettingError(
            f"messages[{index}] calls a tool, and this server has none; leave it out."
        )
    return {"role": message.role, "content": content, **extra}


class TokenizeBody(Body):
    """The body of `/tokenize`: a text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


# Bodies of responses.


def error_body(message: str, kind: str, *, param: str | None, code: str | None) -> dict[str, Any]:
    """The body of every response that is not a success."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(completions: Sequence[Completion], copies: int) -> dict[str, Any]:
    """Tokens of a whole response; those of a prompt count once, however many completions it has."""
    prompts = {one.request_id.rsplit(":", 1)[0]: one for one in completions}
    counts = Completions(completions).acceptance
    num_output = copies * sum(len(one.token_ids) for one in completions)
    num_accepted = copies * counts.num_accepted_tokens
    return {
        **counted(sum(len(one.prompt_token_ids) for one in prompts.values()), num_output),
        "prompt_tokens_details": {
            "cached_tokens": sum(one.num_reused_tokens or 0 for one in prompts.values())
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": copies * counts.num_draft_tokens - num_accepted,
        },
    }


def counted(num_prompt: int, num_output: int) -> dict[str, Any]:
    """Numbers of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def speculation(completions: Sequence[Completion]) -> dict[str, Any]:
    """`metrics` of a response, as in vLLM: what drafting did, and times in milliseconds, those of
    the first completion."""
    counts = Completions(completions).acceptance
    at_least = [counts.num_drafts, *counts.num_accepted_tokens_per_pos]
    longest = max(counts.depth, 1)
    metrics: dict[str, Any] = {
        "speculative_decoding": {
            "mean_acceptance_length": counts.emitted_per_round,
            "draft_acceptance_rate": counts.num_accepted_tokens / max(counts.num_draft_tokens, 1),
            "acceptance_histogram": [
                at_least[n] - at_least[n + 1] if n < longest and n + 1 < len(at_least) else number
                for n, number in enumerate(at_least[: longest + 1])
            ],
            "num_spec_steps": counts.num_drafts,
            "num_accepted_draft_tokens": counts.num_accepted_tokens,
            "num_draft_tokens": counts.num_draft_tokens,
        }
    }
    if all(one.trace is not None for one in completions):
        rounds = [one.trace.rounds for one in completions if one.trace is not None]
        metrics["speculative_decoding"]["per_step_accepted"] = [
            int(number) for each in rounds for number in each.accepted[each.drafted > 0]
        ]
    times = completions[0].times
    if times is not None and times.first_token_s is not None:
        metrics |= {
            "time_to_first_token_ms": 1e3 * (times.first_token_s - times.arrival_s),
            "queue_time_ms": 1e3 * times.queue_s,
            "generation_time_ms": 1e3 * (times.end_s - times.first_token_s),
        }
    return metrics


def token_texts(tokenizer: TextTokenizer, token_ids: Iterable[int]) -> dict[int, str]:
    """The text of each token, as it stands after other text; `token_id:N` for a token that holds
    only part of a character."""
    each = list(dict.fromkeys(token_ids))
    return {
        token: f"token_id:{token}" if REPLACEMENT in text else text
        for token, text in zip(each, tokenizer.texts(each), strict=True)
    }


class TextOffsets:
    """Where the tokens of a choice begin in its text, as they come. The tokens of one character
    begin where it does. Special tokens take no room, unless the text has them.

    Args:
      tokenizer: the model's.
      text: the prompt as it was given, followed by the output; or nothing, if only the output is
        shown.
    """

    def __init__(self, tokenizer: TextTokenizer, text: str = ""):
        self._tokenizer, self._text = tokenizer, text
        self._next = 0
        self._part: list[int] = []  # the tokens of a character of which some are still to come

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token, text in zip(token_ids, self._tokenizer.texts(token_ids), strict=True):
            if REPLACEMENT in text:
                offsets.append(self._next)
                self._part.append(token)
                character = self._tokenizer.decode(self._part)
                if REPLACEMENT not in character:
                    self._end_part(character)
                continue
            if self._part:
                self._end_part(self._tokenizer.decode(self._part))
            offsets.append(self._next)
            self._next += self._length(token, text)
        return offsets

    def _end_part(self, character: str) -> None:
        self._next += len(character)
        self._part = []

    def _length(self, token: int, text: str) -> int:
        is_here = self._text.startswith(text, self._next)
        if token in self._tokenizer.special_tokens and not is_here:
            return 0
        # A text does not begin with the space that its first token has after other text.
        is_first = bool(self._text) and self._next == 0 and not is_here
        return len(text.removeprefix(" ") if is_first else text)


def completion_logprobs(
    tokenizer: TextTokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, float] | None],
    *,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """Log-probabilities in the form of completions, null for a prompt's first token. Of tokens with
    the same text, `top_logprobs` has the likeliest."""
    texts = token_texts(tokenizer, itertools.chain(token_ids, *(each or () for each in logprobs)))

    def top(each: Mapping[int, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in sorted(each.items(), key=lambda pair: -pair[1]):
            found.setdefault(texts[token], max(value, LEAST_LOGPROB))
        return found

    return {
        "tokens": [texts[token] for token in token_ids],
        "token_logprobs": [
            each and max(each[token], LEAST_LOGPROB)
            for token, each in zip(token_ids, logprobs, strict=True)
        ],
        "top_logprobs": [each and top(each) for each in logprobs],
        "text_offset": offsets.of(token_ids),
    }


def prompt_logprobs(
    tokenizer: TextTokenizer, logprobs: Sequence[Mapping[int, float] | None], *, num_top: int
) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt by token id, as in vLLM; the rank is null for a token that is
    not among the `num_top` likeliest."""
    texts = token_texts(tokenizer, itertools.chain(*(each or () for each in logprobs)))

    def entries(each: Mapping[int, float]) -> dict[str, Any]:
        ranked = sorted(each.items(), key=lambda pair: -pair[1])
        return {
            str(token): {
                "logprob": max(value, LEAST_LOGPROB),
                "rank": rank if rank <= num_top else None,
                "decoded_token": texts[token],
            }
            for rank, (token, value) in enumerate(ranked, start=1)
        }

    return [None if each is None else entries(each) for each in logprobs]


def chat_logprobs(
    tokenizer: TextTokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, float]],
    *,
    num_top: int,
) -> dict[str, Any]:
    """Log-probabilities in the form of chats; `bytes` is null for a part of a character."""
    texts = token_texts(tokenizer, itertools.chain(token_ids, *logprobs))

    def entry(token: int, value: float) -> dict[str, Any]:
        text = texts[token]
        is_part = text == f"token_id:{token}"
        return {
            "token": text,
            "logprob": max(value, LEAST_LOGPROB),
            "bytes": None if is_part else list(text.encode()),
        }

    content = []
    for token, each in zip(token_ids, logprobs, strict=True):
        top = sorted(each.items(), key=lambda pair: -pair[1])[:num_top]
        content.append({**entry(token, each[token]), "top_logprobs": [entry(*one) for one in top]})
    return {"content": content}
