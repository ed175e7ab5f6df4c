"""Sampling parameters of a request, under vLLM's names."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.models.base import LanguageModel, Model
from jaxspec.runtime.other_names import refuse_other_names
from jaxspec.sampling import request_key
from jaxspec.types import RowSampling

LOWEST_TEMPERATURE = 1e-3  # below it, and above 0, scaled logits lose their differences or overflow
HIGHEST_TEMPERATURE = 1e6
LARGEST_SEED = 2**63 - 1
LARGEST_N = 2**14  # completions of a prompt, each of which is a request
LARGEST_COUNT = 2**30  # tokens; the device counts in int32


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
        for field in dataclasses.fields(self):
            value, is_whole = getattr(self, field.name), field.type in ("int", "int | None")
            if not (is_whole or field.type == "float") or (value is None and field.default is None):
                continue
            if not isinstance(value, numbers.Integral if is_whole else numbers.Real):
                wanted = "a whole number" if is_whole else "a number"
                raise SettingError(f"{field.name} {value!r} was given; it must be {wanted}.")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
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
            ("n", 1 <= self.n <= LARGEST_N, f"from 1 to {LARGEST_N}"),
            (
                "seed",
                self.seed is None or 0 <= self.seed <= largest_seed,
                "from 0 to 2**63 - n, as each completion has its own",
            ),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "texts that are not empty"),
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


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A list, tuple or set as a tuple, None as an empty one."""
    if value is not None and not isinstance(value, Iterable):
        raise SettingError(f"{name} {value!r} was given; it must be a list.")
    return tuple(value or ())


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
