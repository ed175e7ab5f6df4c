"""Sampling parameters of a request, under vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.models.base import LanguageModel, Model
from jaxspec.runtime.other_names import refuse_other_names
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
from jaxspec.types import RowSampling

LOWEST_TEMPERATURE = 1e-3  # below it, and above 0, scaled logits lose their differences or overflow
HIGHEST_TEMPERATURE = 1e6
LARGEST_SEED = 2**63 - 1
LARGEST_N = 2**14  # completions of a prompt, each of which is a request
_TEMPERATURE = f"0 (greedy), or from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"


@refuse_other_names
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded, under vLLM's names. Functions that take it also take a dict of
    its fields: `{"max_tokens": 64}`.

    The order of operations is that of `jaxspec.sampling`: penalties, `min_tokens`, temperature,
    top-k, top-p, min-p.

    Attributes:
      max_tokens: tokens to emit at most.
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

    def __post_init__(self):
        max_tokens = whole_number(
            "max_tokens", self.max_tokens, least=1, most=LARGEST_COUNT, expected="from 1 to 2**30"
        )
        n = whole_number("n", self.n, least=1, most=LARGEST_N, expected=f"from 1 to {LARGEST_N}")
        temperature = number(
            "temperature",
            self.temperature,
            least=0,
            most=HIGHEST_TEMPERATURE,
            expected=_TEMPERATURE,
        )
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise refusal("temperature", self.temperature, _TEMPERATURE)
        checked = {
            "max_tokens": max_tokens,
            "min_tokens": whole_number(
                "min_tokens",
                self.min_tokens,
                least=0,
                most=max_tokens,
                expected="from 0 to max_tokens",
            ),
            "temperature": temperature,
            "top_k": whole_number(
                "top_k",
                self.top_k,
                least=-1,
                most=LARGEST_COUNT,
                expected="at least 1, or 0 or -1 (off)",
            ),
            "top_p": number(
                "top_p", self.top_p, above=0, most=1, expected="above 0 and at most 1 (off)"
            ),
            "min_p": number("min_p", self.min_p, least=0, most=1, expected="from 0 (off) to 1"),
            "n": n,
            "stop": _texts("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "repetition_penalty": number(
                "repetition_penalty",
                self.repetition_penalty,
                least=1e-3,
                most=1e3,
                expected="from 0.001 to 1000",
            ),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            checked[name] = number(
                name, getattr(self, name), least=-1e3, most=1e3, expected="from -1000 to 1000"
            )
        if self.seed is not None:
            checked["seed"] = whole_number(
                "seed",
                self.seed,
                least=0,
                most=LARGEST_SEED - n + 1,
                expected="from 0 to 2**63 - n, as each completion has its own",
            )
        if self.logprobs is not None:
            checked["logprobs"] = whole_number("logprobs", self.logprobs, least=0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if n > 1 and temperature == 0:
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
        scalars."""
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
        """Every token id that ends the output. A stop string that is a special token is one.

        Raises:
          SettingError: a stop string can never be in the text.
        """
        eos = () if self.ignore_eos else tuple(model.eos_token_ids)
        special = () if model.tokenizer is None else model.tokenizer.special_stops(self.stop)
        return tuple(dict.fromkeys(eos + self.stop_token_ids + special))


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
