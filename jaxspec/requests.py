"""What goes into an engine and what comes out: host records of plain Python values."""

from __future__ import annotations

import dataclasses
import html
import itertools
import numbers
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, overload

import numpy as np

from jaxspec.errors import PromptError, SettingError
from jaxspec.models.base import LanguageModel, Model, TextTokenizer
from jaxspec.sampling import request_key
from jaxspec.telemetry import Acceptance, TracedRequest, rounds_frame, tokens_frame
from jaxspec.types import Finish, Origin, RowSampling, Trace

if TYPE_CHECKING:
    import pandas

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

# Colours of a completion's tokens, by origin: terminal style and CSS.
ORIGIN_STYLES = {
    Origin.PLAIN: ("", ""),
    Origin.ACCEPTED: ("green", "background:#c8f0cf;color:#111"),
    Origin.CORRECTED: ("bold red", "background:#f8c9c4;color:#111"),
    Origin.BONUS: ("bold blue", "background:#c9dcf8;color:#111"),
}


LOWEST_TEMPERATURE = 1e-3  # below it, and above 0, scaled logits lose their differences or overflow
HIGHEST_TEMPERATURE = 1e6
LARGEST_SEED = 2**63 - 1
LARGEST_COUNT = 2**30  # tokens; the device counts in int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded, in vLLM's names.

    The order of operations is that of `jaxspec.sampling`: penalties, `min_tokens`, temperature,
    top-k, top-p, min-p.

    Attributes:
      max_tokens: tokens to emit at most; `max_new_tokens` is another name for it.
      min_tokens: tokens before which nothing ends the output.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: keep the k likeliest tokens, and what ties with the last; 0 and -1 are off.
      top_p: keep the likeliest tokens that reach this mass together; 1 is off.
      min_p: keep tokens at least this fraction as likely as the likeliest; 0 is off.
      seed: of the request's draws; None draws one, which the completion names.
      n: completions of the prompt; the i-th has the seed `seed + i`.
      stop: strings that end the output; text is cut before the string, tokens after the one that
        completes it.
      stop_token_ids: tokens that end the output besides the model's EOS tokens.
      ignore_eos: do not stop at the model's EOS tokens.
      logprobs: log-probabilities of this many likeliest tokens, and of the emitted one, at each
        position; the engine must keep them (`max_logprobs`). None for none.
      repetition_penalty: above 1 makes tokens of prompt and output less likely; 1 is off.
      presence_penalty: subtracted from logits of tokens in the output; 0 is off.
      frequency_penalty: subtracted once per occurrence in the output; 0 is off.

    Raises:
      SettingError: a value of the wrong type or out of its range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: dataclasses.InitVar[int | None] = None

    def __post_init__(self, max_new_tokens: int | None):
        if max_new_tokens is not None:
            object.__setattr__(self, "max_tokens", max_new_tokens)
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            is_left_out = value is None and name in ("seed", "logprobs")
            if not (is_left_out or isinstance(value, kind)):
                wanted = "a whole number" if kind is numbers.Integral else "a number"
                raise SettingError(f"{name} {value!r} was given; it must be {wanted}.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        t, largest_seed = self.temperature, LARGEST_SEED - self.n + 1
        for name, is_right, expected in (
            ("max_tokens", 1 <= self.max_tokens <= LARGEST_COUNT, "from 1 to 2**30"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens"),
            (
                "temperature",
                t == 0 or LOWEST_TEMPERATURE <= t <= HIGHEST_TEMPERATURE,
                f"0 (greedy), or from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}",
            ),
            ("top_k", -1 <= self.top_k <= LARGEST_COUNT, "at least 1, or 0 or -1 (off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("n", self.n >= 1, "at least 1"),
            (
                "seed",
                self.seed is None or 0 <= self.seed <= largest_seed,
                "from 0 to 2**63 - n, as each completion has its own",
            ),
            ("stop", all(isinstance(s, str) and s for s in stop), "texts that are not empty"),
            (
                "stop_token_ids",
                all(isinstance(token, numbers.Integral) for token in self.stop_token_ids),
                "token ids",
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
            ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "from 0.001 to 1000"),
            ("presence_penalty", abs(self.presence_penalty) <= 1e3, "from -1000 to 1000"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 1e3, "from -1000 to 1000"),
        ):
            if not is_right:
                value = getattr(self, name)
                raise SettingError(f"{name} {value!r} was given; it must be {expected}.")
        if self.n > 1 and t == 0:
            raise SettingError(
                f"n {self.n} was given at temperature 0, where all completions are the same; set a "
                "temperature or n to 1."
            )

    @classmethod
    def from_generation_config(cls, model: LanguageModel, **changes: Any) -> SamplingParams:
        """The defaults that the checkpoint's authors recommend, with `changes`.

        Only what the checkpoint's `generation_config.json` holds is read. (Hugging Face's
        `generate` fills in `top_k` 50 where the file has none; here that stays off.)

        Raises:
          SettingError: the file asks for something that this decoder does not do.
        """
        config = model.generation_config
        for name, neutral in _NOT_SUPPORTED.items():
            if config.get(name, neutral) not in (neutral, None):
                raise SettingError(
                    f"The generation config of {model.name} asks for {name} {config[name]}, which "
                    "is not supported; give SamplingParams of your own."
                )
        is_sampled = bool(config.get("do_sample", False))
        names = _READ_ALWAYS | (_READ_IF_SAMPLED if is_sampled else {})
        read = {
            ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None
        }
        defaults: dict[str, Any] = {"temperature": 1.0} if is_sampled else {}
        return cls(**(defaults | read | changes))

    def of_row(self, *, prompt_length: int) -> RowSampling:
        """What the loop knows of these parameters: a `RowSampling` of scalars, for one row."""
        values: dict[str, Any] = {
            "temperature": np.float32(self.temperature),
            "top_k": np.int32(max(self.top_k, 0)),
            "top_p": np.float32(self.top_p),
            "min_p": np.float32(self.min_p),
            "repetition_penalty": np.float32(self.repetition_penalty),
            "presence_penalty": np.float32(self.presence_penalty),
            "frequency_penalty": np.float32(self.frequency_penalty),
            "key": request_key(self.seed or 0),
            "prompt_length": np.int32(prompt_length),
            "min_length": np.int32(prompt_length + self.min_tokens),
        }
        return RowSampling(**values)

    def stop_tokens(self, model: Model) -> tuple[int, ...]:
        """Every token id that ends the output."""
        eos = () if self.ignore_eos else tuple(model.eos_token_ids)
        return tuple(dict.fromkeys(eos + self.stop_token_ids))


_KINDS = {
    "max_tokens": numbers.Integral,
    "min_tokens": numbers.Integral,
    "temperature": numbers.Real,
    "top_k": numbers.Integral,
    "top_p": numbers.Real,
    "min_p": numbers.Real,
    "n": numbers.Integral,
    "seed": numbers.Integral,
    "logprobs": numbers.Integral,
    "repetition_penalty": numbers.Real,
    "presence_penalty": numbers.Real,
    "frequency_penalty": numbers.Real,
}

# Fields of a generation config by what they are called here; the latter only where it samples.
_READ_ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_READ_IF_SAMPLED = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}

# Settings of a generation config that would change the output, and their neutral values.
_NOT_SUPPORTED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "top_h": None,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "force_words_ids": None,
    "constraints": None,
    "dola_layers": None,
    "token_healing": False,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "penalty_alpha": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "sequence_bias": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt on its way into an engine.

    Attributes:
      request_id: position among the prompts of a call, unless the caller chose another; with
        `n` above 1, also the number of the sample: `3-0`, `3-1`.
      prompt_token_ids: at least one.
      params: how to decode it; a sampled request has a seed.
      index: which of the prompt's `n` completions this is.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    index: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request. In a notebook it shows itself with its tokens coloured by origin.

    Attributes:
      request_id: of the request.
      prompt_token_ids: what was decoded from, special prefix included.
      token_ids: the output; the stop token, if one ended it, is its last.
      text: the output without special tokens, or None if the model has no tokenizer.
      finish_reason: `stop` (a stop token or string), `length` (max_tokens or capacity) or `abort`.
      stop_reason: the stop token's id, the stop string, `capacity`, `non-finite`, or None.
      acceptance: what became of the drafts; those that a stop string cut off are counted too.
      index: which of the prompt's `n` completions this is.
      seed: of the request's draws; None for a greedy one.
      logprobs: for each output token, log-probabilities by token id: the emitted token's and the
        likeliest ones'; None unless asked for.
      logprobs_mode: `raw_logprobs` (of the model's own logits) or `processed_logprobs` (of the law
        that was sampled from), as in vLLM.
      origins: `Origin` of each output token.
      pieces: text of each output token, for display; bytes of a split character are shown apart.
      trace: its rounds and drafted tokens, NumPy arrays with rounds first (`Completions.rounds` and
        `.tokens` make frames of them); None unless the engine records them. Rounds behind a stop
        string are in it too.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    acceptance: Acceptance
    index: int = 0
    seed: int | None = None
    logprobs: tuple[dict[int, float], ...] | None = dataclasses.field(repr=False, default=None)
    logprobs_mode: str | None = None
    origins: tuple[Origin, ...] = dataclasses.field(repr=False)
    pieces: tuple[str, ...] = dataclasses.field(repr=False, default=())
    trace: Trace | None = dataclasses.field(repr=False, compare=False, default=None)

    def to_json(self) -> dict:
        """Fields as JSON values, with vLLM's names."""
        fields = {
            "request_id": self.request_id,
            "index": self.index,
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "acceptance": self.acceptance.to_json(),
        }
        if self.logprobs is not None:
            fields["logprobs_mode"] = self.logprobs_mode
            fields["logprobs"] = [
                {str(token): value for token, value in of_token.items()}
                for of_token in self.logprobs
            ]
        return fields

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


class Completions(list[Completion]):
    """Completions in the order of their requests: a list, and the data of an acceptance study.

    Frames need an engine that records (`Engine(trace=...)`) and pandas (the `analysis` extra).
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Completion: ...
    @overload
    def __getitem__(self, index: slice) -> Completions: ...
    def __getitem__(self, index):
        """One of them, or some as `Completions`."""
        found = super().__getitem__(index)
        return Completions(found) if isinstance(index, slice) else found

    def rounds(self, **columns: Iterable[Any]) -> pandas.DataFrame:
        """A frame with one row per request and round.

        Its columns, whole numbers int32:
          request_id: text.
          index: which of the prompt's `n` completions.
          round: of this request, from 0.
          engine_round: rounds the engine had run before it; rounds of other requests with the same
            number were computed together.
          context_length: committed tokens at its start, prompt included.
          drafted: drafted tokens; 0 where the round decoded plainly.
          draft_depth: depth that the draft reached; equals `drafted` unless it was a tree.
          accepted: drafted tokens that were accepted and kept.
          emitted: tokens the output grew by: `accepted`, and one of the target's own unless a stop
            token or the limit came first. Rounds that emitted nothing are left out.

        Sums over a request equal its `Acceptance`.

        Args:
          **columns: further columns by name, e.g. `category=[...]`: one value per completion, or
            one per prompt.

        Raises:
          SettingError: there is no trace, no pandas, or a column does not fit.
        """
        return rounds_frame(self._traced(), columns)

    def tokens(self, **columns: Iterable[Any]) -> pandas.DataFrame:
        """A frame with one row per drafted token, rejected ones included.

        p is the law that the row is sampled from, after penalties, temperature and filters. q is
        the draft model's law at the same settings. A greedy row is traced at temperature 1: p is
        then the softmax of the model's own logits (penalised, if penalties were asked for).

        Its columns, whole numbers int32, others fp32 unless stated:
          request_id, index, round: as in `rounds`.
          node: in the draft.
          parent: the node it follows; -1 is the newest committed token.
          depth: 1 for the first drafted token.
          position: where the token would stand in the sequence, prompt included, from 0.
          token_id: the drafted token.
          logprob_p: natural logarithm of its probability under p; -inf where a filter removed it.
          logprob_q: under q; NaN where the drafter is deterministic.
          rank: under p, 1 is the likeliest; tokens that a filter removed are counted too.
          accepted: bool, accepted and kept.
          reached: bool, whether its acceptance was decided on: every node above it was kept, and
            the output did not end before it. Conditional acceptance is the mean of `accepted` over
            these.
          entropy_p, entropy_q: in nats; only with `trace='laws'`.
          overlap: sum of min(p, q), the probability that rejection sampling keeps a token of q;
            only with `trace='laws'`. The law of a deterministic drafter is a point mass: entropy 0,
            and the overlap is p of its token.

        Args:
          **columns: as in `rounds`.

        Raises:
          SettingError: there is no trace of tokens, no pandas, or a column does not fit.
        """
        return tokens_frame(self._traced(), columns)

    def _traced(self) -> list[TracedRequest]:
        return [
            TracedRequest(request_id=one.request_id, index=one.index, trace=one.trace)
            for one in self
        ]


def make_requests(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    model: Model,
    *,
    longest: int,
    chat_template: str | None = None,
    names: Sequence[str] | None = None,
) -> list[Request]:
    """Requests `0, 1, ...` of prompts given as text, token ids or chat messages; with `n` above 1
    `0-0, 0-1, ...`.

    Args:
      params: one for all prompts, or one each.
      longest: prompt tokens the engine can take.
      chat_template: Jinja template for messages instead of the tokenizer's own.
      names: what errors call each prompt; default `Prompt 0`, `Prompt 1`, ...

    Raises:
      PromptError: a prompt is empty, too long, out of the vocabulary, or in a form that `model` has
        no tokenizer or template for.
      SettingError: not one `params` per prompt, or stops that the model cannot emit or read.
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


def _samples(request_id: str, ids: tuple[int, ...], params: SamplingParams) -> list[Request]:
    """The `n` requests of one prompt, each with a seed of its own if it is sampled."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopMatch:
    """Where a stop string ended an output.

    Attributes:
      num_tokens: tokens up to the one that completes the string.
      text: what stands before it.
      stop: the string.
    """

    num_tokens: int
    text: str
    stop: str


def find_stop(
    tokenizer: TextTokenizer, token_ids: Sequence[int], stop: Sequence[str], *, min_tokens: int
) -> StopMatch | None:
    """The stop string that is complete first in the text of `token_ids`, if any.

    Strings that are complete within the first `min_tokens` tokens do not count.
    """
    text = tokenizer.decode(token_ids)
    # A character whose bytes are not complete decodes to something else: it is not there yet.
    early = tokenizer.decode(token_ids[:min_tokens]) if min_tokens else ""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, early, strict=False))
    too_early = len(list(same))
    found = []
    for string in stop:
        start = text.find(string, max(0, too_early - len(string) + 1))
        if start >= 0:
            found.append((start + len(string), start, string))
    if not found:
        return None
    end, start, string = min(found)
    least, most = 0, len(token_ids)  # the text of `least` tokens is too short, of `most` enough
    while most - least > 1:
        middle = (least + most) // 2
        if tokenizer.decode(token_ids[:middle]).startswith(text[:end]):
            most = middle
        else:
            least = middle
    return StopMatch(num_tokens=most, text=text[:start], stop=string)


def settled_text(tokenizer: TextTokenizer, token_ids: Sequence[int], stop: Sequence[str]) -> str:
    """The part of the text of `token_ids` that further tokens leave as it is.

    Held back are characters whose bytes are not complete, and an end that may become a stop string.
    """
    text = tokenizer.decode(token_ids).rstrip("\ufffd")
    begun = [n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])]
    return text[: len(text) - max(begun, default=0)]


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
    stopped: StopMatch | None = None,
    logprobs: tuple[dict[int, float], ...] | None = None,
    logprobs_mode: str | None = None,
    trace: Trace | None = None,
) -> Completion:
    """The completion of a row that has ended, cut at a stop string if it was `stopped`; without
    text if it is `Finish.UNREADABLE`."""
    if stopped is not None:
        token_ids = token_ids[: stopped.num_tokens]
        origins = origins[: stopped.num_tokens]
        logprobs = logprobs and logprobs[: stopped.num_tokens]
    text, pieces = None, ()
    if model.tokenizer is not None and finish != Finish.UNREADABLE:
        ended_by_token = finish == Finish.STOP_TOKEN and stopped is None
        text = model.tokenizer.decode(token_ids[:-1] if ended_by_token else token_ids)
        pieces = tuple(model.tokenizer.pieces(token_ids))
    if stopped is not None:
        text, finish_reason, stop_reason = stopped.text, "stop", stopped.stop
    else:
        finish_reason, stop_reason = {
            Finish.STOP_TOKEN: ("stop", stop_token),
            Finish.MAX_TOKENS: ("length", None),
            Finish.CAPACITY: ("length", "capacity"),
            Finish.NON_FINITE: ("abort", "non-finite"),
            Finish.CANCELLED: ("abort", "cancelled"),
            Finish.LOST: ("abort", "device failure"),
            Finish.UNREADABLE: ("abort", "tokenizer failure"),
        }[finish]
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(int(token) for token in token_ids),
        text=text,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        acceptance=acceptance,
        index=request.index,
        seed=request.params.seed if request.params.temperature else None,
        logprobs=logprobs,
        logprobs_mode=logprobs_mode if logprobs is not None else None,
        origins=tuple(Origin(int(origin)) for origin in origins),
        pieces=pieces,
        trace=trace,
    )
