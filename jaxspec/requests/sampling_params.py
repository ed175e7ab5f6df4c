"""Sampling parameters of a request, under vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.models.base import LanguageModel, Model
from jaxspec.runtime.values import (
    LARGEST_COUNT,
    flag,
    is_whole,
    listed,
    number,
    plain,
    refusal,
    whole_number,
)
from jaxspec.sampling import request_key
from jaxspec.types import MAX_BIASED_TOKENS, RowSampling, TokenBias

LOWEST_TEMPERATURE = 1e-3  # below it, and above 0, scaled logits lose their differences or overflow
HIGHEST_TEMPERATURE = 1e6
LARGEST_SEED = 2**63 - 1
LARGEST_N = 2**14  # completions of a prompt, each of which is a request
LARGEST_BIAS = 100.0  # in either direction, as in OpenAI's API

# Ranges of the fields that are numbers and depend on no other: the smallest and the largest of
# whole numbers, and arguments of `number` for the others; with the range in words.
_WHOLE_NUMBERS = {
    "max_tokens": (0, LARGEST_COUNT, "from 1 to 2**30, or 0 with prompt_logprobs"),
    "top_k": (-1, LARGEST_COUNT, "at least 1, or 0 or -1 (off)"),
    "n": (1, LARGEST_N, f"from 1 to {LARGEST_N}"),
}
_PENALTY = ("from -1000 to 1000", {"least": -1e3, "most": 1e3})
_NUMBERS: dict[str, tuple[str, dict[str, float]]] = {
    "temperature": (
        f"0 (greedy), or from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}",
        {"least": 0, "most": HIGHEST_TEMPERATURE},
    ),
    "top_p": ("above 0 and at most 1 (off)", {"above": 0, "most": 1}),
    "min_p": ("from 0 (off) to 1", {"least": 0, "most": 1}),
    "repetition_penalty": ("from 0.001 to 1000", {"least": 1e-3, "most": 1e3}),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded, under vLLM's names, and with vLLM's defaults except that of
    `temperature`: 0, greedy decoding, where vLLM's is 1. Functions that take it also take a dict of
    its fields: `{"max_tokens": 64}`.

    The order of operations is that of `jaxspec.sampling`: `logit_bias` and `allowed_token_ids`,
    penalties, `min_tokens`, temperature, top-k, top-p, min-p.

    Attributes:
      max_tokens: tokens to emit at most; 0 only with `prompt_logprobs`.
      min_tokens: emitted tokens before which no stop token or string ends the output.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: keep the k likeliest tokens, and all that tie with the last; 0 and -1 are off.
      top_p: keep the likeliest tokens that together reach this probability; 1 is off.
      min_p: keep tokens at least this fraction as likely as the likeliest; 0 is off.
      seed: seed of the request's draws; None chooses one, which the completion reports.
      n: completions of the prompt; the i-th has the seed `seed + i`.
      stop: strings that end the output. The text ends before the string; the token ids end with the
        token that completes it. A string that is a special token, such as `</s>`, ends the output
        by its id.
      stop_token_ids: further tokens that end the output, besides the model's EOS tokens.
      ignore_eos: do not stop at the model's EOS tokens.
      logprobs: return log-probabilities of this many likeliest tokens, and of the emitted one, at
        each position; needs an engine with `max_logprobs`. None returns none.
      prompt_logprobs: the same for the tokens of the prompt, under the model's own logits; the
        first token has none. With `max_tokens` 0 nothing is generated.
      repetition_penalty: above 1 makes tokens of prompt and output less likely; 1 is off.
      presence_penalty: subtracted from logits of tokens in the output; 0 is off.
      frequency_penalty: subtracted once per occurrence in the output; 0 is off.
      logit_bias: a dict of token ids and numbers from -100 to 100 that are added to their logits;
        at most 300. It is kept as pairs in the order of the ids. Ids may be text, as in JSON.
      allowed_token_ids: the only tokens that may be emitted, at most 300; None allows all. Unless
        an EOS token is among them, the output never ends by one.

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
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = ()
    allowed_token_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        checked: dict[str, Any] = {
            name: whole_number(name, getattr(self, name), least=least, most=most, expected=expected)
            for name, (least, most, expected) in _WHOLE_NUMBERS.items()
        }
        for name, (expected, limits) in _NUMBERS.items():
            checked[name] = number(name, getattr(self, name), expected=expected, **limits)
        if 0 < checked["temperature"] < LOWEST_TEMPERATURE:
            raise refusal("temperature", self.temperature, _NUMBERS["temperature"][0])
        max_tokens, n = checked["max_tokens"], checked["n"]
        if max_tokens == 0 and self.prompt_logprobs is None:
            raise refusal("max_tokens", 0, _WHOLE_NUMBERS["max_tokens"][-1])
        checked |= {
            "min_tokens": whole_number(
                "min_tokens",
                self.min_tokens,
                least=0,
                most=max_tokens,
                expected="from 0 to max_tokens",
            ),
            "stop": _texts("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "logit_bias": _logit_bias(self.logit_bias),
        }
        if self.seed is not None:
            checked["seed"] = whole_number(
                "seed",
                self.seed,
                least=0,
                most=LARGEST_SEED - n + 1,
                expected="from 0 to 2**63 - n, as each completion has its own",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                checked[name] = whole_number(name, getattr(self, name), least=0)
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = _allowed_token_ids(self.allowed_token_ids)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if n > 1 and self.temperature == 0:
            raise SettingError(
                f"n {n} was given at temperature 0, where all completions are the same; set a "
                "temperature or n to 1."
            )

    @classmethod
    def from_generation_config(cls, model: LanguageModel, **changes: Any) -> SamplingParams:
        """The defaults that the checkpoint's authors recommend, with `changes` applied.

        Only what `generation_config.json` states is used. (Hugging Face's `generate` adds `top_k`
        50 if the file has none; here top-k stays off.)

        Raises:
          SettingError: the file asks for something that is not supported.
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
        """The parameters in the form that the decode loop takes: a `RowSampling` of one row's
        values, without the axis of rows."""
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
            "bias": self._bias(),
        }
        return RowSampling(**values)

    def _bias(self) -> TokenBias:
        """`logit_bias` and `allowed_token_ids` of one row. Where both are given, a bias of a token
        that is not allowed has no effect."""
        bias, allowed = dict(self.logit_bias or ()), self.allowed_token_ids
        if allowed is not None:
            bias = {token: bias.get(token, 0.0) for token in allowed}
        tokens = np.full((MAX_BIASED_TOKENS,), -1, np.int32)
        values = np.zeros((MAX_BIASED_TOKENS,), np.float32)
        tokens[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
        row: dict[str, Any] = {
            "tokens": tokens,
            "values": values,
            "is_exclusive": np.bool_(allowed is not None),
        }
        return TokenBias(**row)

    def stop_tokens(self, model: Model) -> tuple[int, ...]:
        """Every token id that ends the output. A stop string that is a special token is one.

        Raises:
          SettingError: a stop string can never be in the text.
        """
        eos = () if self.ignore_eos else tuple(model.eos_token_ids)
        special = () if model.tokenizer is None else model.tokenizer.special_stops(self.stop)
        return tuple(dict.fromkeys(eos + self.stop_token_ids + special))

    def check_token_ids(self, name: str, model: Model) -> None:
        """Raises `SettingError` unless the token ids are of the model's vocabulary, and some
        allowed token may be emitted before `min_tokens`; `name` is what the parameters are of."""
        given = {
            "the stop token": self.stop_token_ids,
            "logit_bias of the token": dict(self.logit_bias or ()),
            "the allowed token": self.allowed_token_ids or (),
        }
        for kind, tokens in given.items():
            for token in tokens:
                if not 0 <= token < model.vocab_size:
                    raise SettingError(
                        f"{name} has {kind} {token}, and the vocabulary of {model.name} ends at "
                        f"{model.vocab_size - 1}; give ids of this model's tokenizer."
                    )
        if self.allowed_token_ids is None or self.min_tokens == 0:
            return
        if set(self.allowed_token_ids) <= set(self.stop_tokens(model)):
            raise SettingError(
                f"{name} has min_tokens {self.min_tokens}, and every token of its "
                "allowed_token_ids ends the output; allow another token, or leave out min_tokens."
            )


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or a list of them as a tuple."""
    each = plain(value)
    each = (each,) if isinstance(each, str) else listed(name, value)
    if not all(isinstance(one, str) and one for one in each):
        raise refusal(name, each, "texts that are not empty")
    return tuple(map(str, each))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids as a tuple; the model's vocabulary is checked later."""
    each = listed(name, value)
    if not all(is_whole(token) for token in each):
        raise refusal(name, each, "token ids")
    return tuple(map(int, each))


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """A dict of token ids and biases, or pairs of them, as pairs in the order of the ids; the
    model's vocabulary is checked later."""
    pairs = listed("logit_bias", value.items() if isinstance(value, Mapping) else value)
    if len(pairs) > MAX_BIASED_TOKENS:
        raise refusal("logit_bias", value, f"a dict of at most {MAX_BIASED_TOKENS} token ids")
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise refusal("logit_bias", value, "a dict of token ids and biases")
        token = plain(pair[0])
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10:
            token = int(token)
        token = whole_number("A token id of logit_bias", token, least=0)
        if token in found:
            raise refusal("logit_bias", value, f"a dict with each token id once, {token} too")
        found[token] = number(
            "A bias of logit_bias",
            pair[1],
            least=-LARGEST_BIAS,
            most=LARGEST_BIAS,
            expected="from -100 to 100",
        )
    return tuple(sorted(found.items()))


def _allowed_token_ids(value: Any) -> tuple[int, ...]:
    """A list of token ids as a tuple in their order; the model's vocabulary is checked later."""
    given = _token_ids("allowed_token_ids", value)
    allowed = sorted({whole_number("A token id of allowed_token_ids", t, least=0) for t in given})
    if not 0 < len(allowed) <= MAX_BIASED_TOKENS:
        raise refusal("allowed_token_ids", given, f"from 1 to {MAX_BIASED_TOKENS} token ids")
    return tuple(allowed)


def as_sampling_params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """`SamplingParams` from a dict of its fields or from None; `SamplingParams` are returned as is.

    Raises:
      SettingError: there is no such field, or a value is out of range.
    """
    if isinstance(params, SamplingParams):
        return params
    if params is not None and not isinstance(params, Mapping):
        raise SettingError(
            f"Sampling parameters of type {type(params).__name__} were given; give SamplingParams "
            "or a dict of its fields."
        )
    fields: dict[str, Any] = dict(params or {})
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    try:
        return SamplingParams(**fields)
    except TypeError as error:
        unknown = next((name for name in fields if name not in names), None)
        if unknown is None:
            raise
        raise SettingError(
            f"There is no sampling parameter {unknown!r}; choose from {', '.join(names)}."
        ) from error


def seeds(
    params: SamplingParams | Mapping[str, Any] | None, num_prompts: int
) -> list[SamplingParams]:
    """`params` for each of `num_prompts` prompts, with consecutive seeds, as the commands make
    them. One seed for a list of prompts gives all of them the same noise.

    Args:
      params: those of the first prompt; a seed of None is 0. With `n` completions per prompt the
        next prompt's seed is `n` higher.
      num_prompts: at least 0.

    Raises:
      SettingError: a value out of range, or the last seed would be.
    """
    params = as_sampling_params(params)
    num_prompts = whole_number("num_prompts", num_prompts, least=0)
    first, num_seeds = params.seed or 0, num_prompts * params.n
    if first + num_seeds - 1 > LARGEST_SEED:
        raise SettingError(
            f"The seed {first} was given for {num_seeds} completions, which have consecutive seeds "
            f"of at most 2**63 - 1; give at most {LARGEST_SEED - num_seeds + 1}."
        )
    return [
        dataclasses.replace(params, seed=first + index * params.n) for index in range(num_prompts)
    ]


# Fields of a generation config, by their names here; the second group applies only if it samples.
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
