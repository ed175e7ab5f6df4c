"""What goes into an engine and what comes out: host records of plain Python values."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxspec.errors import PromptError, SettingError
from jaxspec.models.base import Model
from jaxspec.types import AcceptanceCounts, Finish, Origin

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

# Colours of a completion's tokens, by origin: terminal style and CSS.
ORIGIN_STYLES = {
    Origin.PLAIN: ("", ""),
    Origin.ACCEPTED: ("green", "background:#c8f0cf;color:#111"),
    Origin.CORRECTED: ("bold red", "background:#f8c9c4;color:#111"),
    Origin.BONUS: ("bold blue", "background:#c9dcf8;color:#111"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded, in vLLM's names. Decoding is greedy.

    Attributes:
      max_tokens: tokens to emit at most.
      temperature: 0, greedy; other values are refused in this version.
      stop_token_ids: tokens that end the output besides the model's EOS tokens.
      ignore_eos: do not stop at the model's EOS tokens.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if self.max_tokens < 1:
            raise SettingError(f"max_tokens {self.max_tokens} was given; it must be at least 1.")
        if self.temperature != 0:
            raise SettingError(
                f"temperature {self.temperature} was given, but this version decodes greedily; "
                "set it to 0."
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def stop_tokens(self, model: Model) -> tuple[int, ...]:
        """Every token id that ends the output."""
        eos = () if self.ignore_eos else tuple(model.eos_token_ids)
        return tuple(dict.fromkeys(eos + self.stop_token_ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt on its way into an engine.

    Attributes:
      request_id: position among the prompts of a call, unless the caller chose another.
      prompt_token_ids: at least one.
      params: how to decode it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What became of a request's drafts.

    Attributes:
      num_rounds: rounds the request took.
      num_drafts: rounds in which something was drafted.
      num_draft_tokens: drafted tokens.
      num_accepted_tokens: drafted tokens that were emitted.
      num_emitted_tokens: tokens of the output.
      num_drafts_per_pos: rounds whose draft reached position i.
      num_accepted_tokens_per_pos: rounds that accepted position i and all before it.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_drafts_per_pos: tuple[int, ...] = ()
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @property
    def emitted_per_round(self) -> float:
        """tau: emitted tokens per round (vLLM's mean acceptance length); 1 for plain decoding."""
        return self.num_emitted_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Cumulative acceptance by draft position: accepted at i / rounds that drafted (vLLM's)."""
        return tuple(n / self.num_drafts for n in self.num_accepted_tokens_per_pos[: self.depth])

    @property
    def depth(self) -> int:
        """Positions that were drafted at all."""
        return sum(n > 0 for n in self.num_drafts_per_pos)

    def __add__(self, other: Acceptance) -> Acceptance:
        """Totals of both."""

        def pad(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            size = max(len(a), len(b))
            a, b = a + (0,) * (size - len(a)), b + (0,) * (size - len(b))
            return tuple(x + y for x, y in zip(a, b, strict=True))

        sums = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            sums[field.name] = pad(mine, theirs) if isinstance(mine, tuple) else mine + theirs
        return Acceptance(**sums)

    @classmethod
    def total(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """Totals of many."""
        return sum(parts, start=cls())

    @classmethod
    def of_row(cls, counts: AcceptanceCounts, row: int, *, num_emitted: int) -> Acceptance:
        """Totals of one row of device counts that have been fetched to the host."""
        return cls(
            num_rounds=int(counts.num_rounds[row]),
            num_drafts=int(counts.num_drafts[row]),
            num_draft_tokens=int(counts.num_draft_tokens[row]),
            num_accepted_tokens=int(counts.num_accepted_tokens[row]),
            num_emitted_tokens=num_emitted,
            num_drafts_per_pos=tuple(np.asarray(counts.drafted_at[row]).tolist()),
            num_accepted_tokens_per_pos=tuple(np.asarray(counts.accepted_at[row]).tolist()),
        )

    def to_json(self) -> dict:
        """Counts, and the figures derived from them."""
        counts = dataclasses.asdict(self)
        per_position = ("num_drafts_per_pos", "num_accepted_tokens_per_pos")
        return counts | {
            **{name: list(counts[name]) for name in per_position},
            "emitted_per_round": self.emitted_per_round,
            "per_position_acceptance": list(self.per_position),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. In a notebook it shows itself with its tokens coloured by origin.

    Attributes:
      request_id: of the request.
      prompt_token_ids: what was decoded from, special prefix included.
      token_ids: the output; the stop token, if one ended it, is its last.
      text: the output without special tokens, or None if the model has no tokenizer.
      finish_reason: `stop` (a stop token), `length` (max_tokens or capacity) or `abort`.
      stop_reason: the stop token's id, `capacity`, `non-finite`, or None.
      acceptance: what became of the drafts.
      origins: `Origin` of each output token.
      pieces: text of each output token, for display; bytes of a split character are shown apart.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    acceptance: Acceptance
    origins: tuple[Origin, ...] = dataclasses.field(repr=False)
    pieces: tuple[str, ...] = dataclasses.field(repr=False, default=())

    def to_json(self) -> dict:
        """Fields as JSON values, with vLLM's names."""
        return {
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "acceptance": self.acceptance.to_json(),
        }

    def __rich__(self):
        """Output with accepted (green), corrected (red) and bonus (blue) tokens marked."""
        from rich.text import Text

        text = Text()
        for piece, origin in zip(self._shown_pieces(), self.origins, strict=True):
            text.append(piece, style=ORIGIN_STYLES[origin][0])
        return text

    def _repr_html_(self) -> str:
        spans = "".join(
            f'<span style="{ORIGIN_STYLES[origin][1]}">{html.escape(piece)}</span>'
            for piece, origin in zip(self._shown_pieces(), self.origins, strict=True)
        )
        legend = " ".join(
            f'<span style="{ORIGIN_STYLES[origin][1]}">{origin.name.lower()}</span>'
            for origin in (Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS)
        )
        summary = (
            f"{len(self.token_ids)} tokens in {self.acceptance.num_rounds} rounds, "
            f"{self.acceptance.emitted_per_round:.2f} per round; {legend}"
        )
        return f'<div style="white-space:pre-wrap">{spans}</div><small>{summary}</small>'

    def _shown_pieces(self) -> Sequence[str]:
        return self.pieces or [f"{token} " for token in self.token_ids]


def make_requests(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    model: Model,
    *,
    longest: int,
    chat_template: str | None = None,
    names: Sequence[str] | None = None,
) -> list[Request]:
    """Requests `0, 1, ...` of prompts given as text, token ids or chat messages.

    Args:
      params: one for all prompts, or one each.
      longest: prompt tokens the engine can take.
      chat_template: Jinja template for messages instead of the tokenizer's own.
      names: what errors call each prompt; default `Prompt 0`, `Prompt 1`, ...

    Raises:
      PromptError: a prompt is empty, too long, out of the vocabulary, or in a form that `model` has
        no tokenizer or template for.
      SettingError: not one `params` per prompt.
    """
    if isinstance(prompts, str):
        raise PromptError(
            "One text was given where a list of prompts is expected; put it in brackets, [text]."
        )
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise SettingError(
            f"{len(each)} sampling parameters were given for {len(prompts)} prompts; give one, or "
            "one for each prompt."
        )
    requests = []
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        name = f"Prompt {index}" if names is None else names[index]
        ids = prompt_token_ids(prompt, model, name=name, chat_template=chat_template)
        if len(ids) > longest:
            raise PromptError(
                f"{name} has {len(ids)} tokens, and the engine's capacity leaves room for "
                f"{longest}; raise the capacity or shorten the prompt."
            )
        requests.append(Request(request_id=str(index), prompt_token_ids=ids, params=one))
    return requests


def prompt_token_ids(
    prompt: Prompt,
    model: Model,
    *,
    name: str,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of one prompt; `name` is what errors call it. Raises as `make_requests`."""
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
    elif isinstance(prompt, str):
        ids = tokenizer.encode(prompt) if prompt else []
    else:
        messages: Any = prompt
        try:
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


def make_completion(
    request: Request,
    model: Model,
    *,
    token_ids: Sequence[int],
    origins: Sequence[int],
    finish: Finish,
    stop_token: int,
    acceptance: Acceptance,
) -> Completion:
    """The completion of a row that has ended."""
    ended_by_token = finish == Finish.STOP_TOKEN
    text, pieces = None, ()
    if model.tokenizer is not None:
        text = model.tokenizer.decode(token_ids[:-1] if ended_by_token else token_ids)
        pieces = tuple(model.tokenizer.pieces(token_ids))
    finish_reason, stop_reason = {
        Finish.STOP_TOKEN: ("stop", stop_token),
        Finish.MAX_TOKENS: ("length", None),
        Finish.CAPACITY: ("length", "capacity"),
        Finish.NON_FINITE: ("abort", "non-finite"),
    }[finish]
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(int(token) for token in token_ids),
        text=text,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        acceptance=acceptance,
        origins=tuple(Origin(int(origin)) for origin in origins),
        pieces=pieces,
    )
