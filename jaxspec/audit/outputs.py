"""Outputs of other systems, as a JSON lines file.

The first line is a header, an object with `engine` and `dtype`, and optionally `version`, `model`
and `sampling_params` (the defaults of all lines). Every further line is one output:

    {"engine": "vllm", "version": "0.11.0", "dtype": "bfloat16"}
    {"prompt_token_ids": [1, 450, 7483], "token_ids": [310, 3444, 338]}
    {"prompt_token_ids": [1, 29871], "token_ids": [297], "sampling_params": {"temperature": 1.0}}

    prompt_token_ids   what was decoded from, special tokens included
    token_ids          the output, its stop token included
    prompt, text       instead of these: text, turned into ids by the target's tokenizer
    sampling_params    of this output: temperature, top_k, top_p, min_p, max_tokens, min_tokens,
                       stop_token_ids, ignore_eos, repetition_penalty, presence_penalty,
                       frequency_penalty; vLLM's names, default greedy
    seed               of a sampled output; its draws can be repeated only if `engine` is jaxspec

All lines give ids, or all give text. Ids are better: text does not say how it was cut into tokens.
Several lines with the same prompt and sampling parameters are samples of one distribution.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.checkpoint.format import parse_dtype
from jaxspec.errors import ModelError, PromptError, SettingError
from jaxspec.models.base import Model
from jaxspec.requests.sampling_params import LARGEST_COUNT, SamplingParams

# Of `SamplingParams`, what decides which tokens are drawn; a line's seed stands apart.
SAMPLING_FIELDS = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("seed", "n", "stop", "logprobs")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """One output of another system.

    Attributes:
      number: its line in the file, counted from 1.
      prompt_token_ids: at least one.
      token_ids: cut after the first stop token; at least one.
      num_after_stop: tokens that followed the stop token.
      params: how it was drawn.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_after_stop: int
    params: SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputsFile:
    """A file of outputs.

    Attributes:
      engine: what made them.
      version: of the engine, as the header gives it.
      dtype: canonical name of the dtype they were computed in; None if the header does not say.
      is_text: whether ids were made from text.
      outputs: in the order of the lines.
    """

    engine: str
    version: str
    dtype: str | None
    is_text: bool
    outputs: tuple[Output, ...]


def canonical_dtype(name: str, *, where: str) -> str:
    """`float32`, `bfloat16` or `float16` for any usual name of it.

    Raises:
      SettingError: another name.
    """
    try:
        return parse_dtype(name.lower().removeprefix("torch.").replace("half", "float16")).name
    except (ModelError, AttributeError) as error:
        raise SettingError(
            f"{where} names the dtype {name!r}; write float32, bfloat16 or float16."
        ) from error


def read_outputs(path: str | os.PathLike, target: Model) -> OutputsFile:
    """Outputs of a file in the format of this module.

    Raises:
      PromptError: the file cannot be read, has no header or no output, or a line (it is named) is
        malformed, unlike the others, or of another tokenizer.
      SettingError: a sampling parameter is unknown or out of range.
    """
    name = os.fspath(path)
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PromptError(
            f"The outputs file {name} cannot be read ({reason}); name a JSON lines file."
        ) from error
    lines = [
        _Line.parsed(number, line, target)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise PromptError(
            f"The outputs file {name} is empty; its first line is a header, and each further line "
            "an output."
        )
    header, *outputs = lines
    fields = header.fields
    if not isinstance(fields.get("engine"), str) or "token_ids" in fields or "text" in fields:
        raise PromptError(
            f"The outputs file {name} has no header; its first line must be an object like "
            '{"engine": "vllm", "version": "0.11.0", "dtype": "bfloat16"}.'
        )
    if not outputs:
        raise PromptError(
            f"The outputs file {name} holds a header and no output; add a line for each output."
        )
    for line in outputs:
        line.check_like(outputs[0])
    given = outputs[0].fields
    if target.tokenizer is None and not {"prompt_token_ids", "token_ids"} <= given.keys():
        raise PromptError(
            f"The outputs file {name} gives text, but the model {target.name} has no tokenizer; "
            "give prompt_token_ids and token_ids."
        )
    header = dataclasses.replace(header, where="The header")
    dtype, defaults = fields.get("dtype"), header.sampling_fields()
    return OutputsFile(
        engine=fields["engine"],
        version=str(fields.get("version", "")),
        dtype=None if dtype is None else canonical_dtype(dtype, where=header.where),
        is_text="token_ids" not in given,
        outputs=tuple(line.output(defaults) for line in outputs),
    )


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of the file: its number, what messages call it, its fields, and whose ids they are."""

    number: int
    where: str
    fields: dict[str, Any]
    target: Model

    @classmethod
    def parsed(cls, number: int, line: str, target: Model) -> _Line:
        where = f"Line {number} of the outputs file"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            place = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                place = f"{error.msg} at column {error.colno}"
            raise PromptError(f"{where} is not JSON ({place}); mend the line.") from error
        if not isinstance(fields, dict):
            raise PromptError(f"{where} is JSON, but not an object; write one object a line.")
        return cls(number, where, fields, target)

    def wrong(self, what: str) -> PromptError:
        return PromptError(f"{self.where} {what}")

    def check_like(self, first: _Line) -> None:
        """Raises unless this line gives the same of prompt and output as another: ids, or text."""
        kinds = ("prompt_token_ids", "prompt", "token_ids", "text")
        for ids, text in (kinds[:2], kinds[2:]):
            if ids not in self.fields and text not in self.fields:
                raise self.wrong(f"has neither {ids} nor {text}; give one of them.")
        given, expected = ([k for k in kinds if k in line.fields] for line in (self, first))
        if given != expected:
            raise PromptError(
                f"The outputs file is ragged: line {self.number} has {', '.join(given)}, and line "
                f"{first.number} {', '.join(expected)}; give the same fields in every line."
            )

    def output(self, defaults: Mapping[str, Any]) -> Output:
        """The output of the line, drawn with its own sampling parameters or the defaults."""
        params = self.sampling_params(defaults)
        tokenizer: Any = self.target.tokenizer  # there is one if a line gives text
        if "prompt_token_ids" in self.fields:
            prompt = self.ids("prompt_token_ids")
        else:
            prompt = tuple(tokenizer.encode(self.text("prompt")))
        if "token_ids" in self.fields:
            ids = self.ids("token_ids")
            if "text" in self.fields and tokenizer is not None:
                self.check_text(ids)
        else:
            text = self.text("text")
            ids = tuple(tokenizer.hf.encode(text, add_special_tokens=False))
            again = tokenizer.hf.decode(list(ids), clean_up_tokenization_spaces=False)
            if again.strip() != text.strip():
                raise self.wrong(
                    f"has a text that the tokenizer of {self.target.name} does not give back; the "
                    "file is of another tokenizer, so name the model that made it, or give "
                    "token_ids."
                )
        if not prompt or not ids:
            raise self.wrong(
                f"has an empty {'output' if prompt else 'prompt'}; give at least one token (an "
                "output keeps its stop token), or leave the line out."
            )
        stops = params.stop_tokens(self.target)
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        return Output(
            number=self.number,
            prompt_token_ids=prompt,
            token_ids=ids[:end],
            num_after_stop=len(ids) - end,
            params=params,
        )

    def check_text(self, ids: Sequence[int]) -> None:
        """Raises unless the text is what the ids say; a stop string may have cut it."""
        tokenizer: Any = self.target.tokenizer
        decode = tokenizer.hf.decode
        said = (
            decode(list(ids), skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            for skips in (True, False)
        )
        # A character that the last token leaves unfinished may be missing, or a replacement mark.
        wanted = self.text("text").strip().rstrip("\ufffd")
        if not any(one.strip().startswith(wanted) for one in said):
            raise self.wrong(
                f"has a text that is not what the tokenizer of {self.target.name} reads in its "
                "token_ids; the file is of another tokenizer, so name the model that made it."
            )

    def ids(self, kind: str) -> tuple[int, ...]:
        ids, size = self.fields[kind], self.target.vocab_size
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise self.wrong(
                f"has {kind} that are not one list of integers; write one output a line."
            )
        for token in ids:
            if not 0 <= token < size:
                raise self.wrong(
                    f"holds the token id {token} in {kind}, and the vocabulary of "
                    f"{self.target.name} ends at {size - 1}; the file is of another tokenizer, so "
                    "name the model that made it."
                )
        return tuple(ids)

    def text(self, kind: str) -> str:
        if not isinstance(self.fields[kind], str):
            raise self.wrong(f"has a {kind} that is not text; write one output a line.")
        return self.fields[kind]

    def sampling_fields(self) -> dict[str, Any]:
        fields = self.fields.get("sampling_params") or {}
        if not isinstance(fields, dict):
            raise self.wrong("has sampling_params that are not an object; write names and values.")
        return fields

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        given = {**defaults, **self.sampling_fields()}
        unknown = [name for name in given if name not in (*SAMPLING_FIELDS, "seed")]
        if unknown:
            raise SettingError(
                f"{self.where} has the sampling parameter {unknown[0]!r}; leave it out if it "
                "changes no token, else it cannot be judged (known are "
                f"{', '.join(SAMPLING_FIELDS)})."
            )
        known = {name: value for name, value in given.items() if value is not None}
        seed = self.fields.get("seed", known.pop("seed", None))
        known.setdefault("max_tokens", LARGEST_COUNT)  # no limit
        try:
            return SamplingParams(seed=seed, **known)
        except (SettingError, TypeError) as error:
            raise SettingError(f"{self.where}: {error}") from error
