"""Outputs of other systems, as a JSON lines file.

The first line is a header, an object with `engine` and the fields that hold for all lines. Every
further line is one output:

    {"engine": "vllm", "version": "0.11.0", "dtype": "bfloat16", "max_tokens": 3}
    {"prompt_token_ids": [1, 450, 7483], "token_ids": [310, 3444, 338]}
    {"prompt_token_ids": [1, 29871], "token_ids": [297, 2], "temperature": 1.0, "seed": 7}

    prompt_token_ids   the prompt, special tokens included
    token_ids          the output, its stop token included; may be empty
    prompt, text       instead of these: text, turned into ids by the target's tokenizer
    sampling_params    an object of the fields of `SAMPLING_FIELDS`, vLLM's names, default greedy;
                       they may stand in the line itself or in the header, too
    max_tokens         one of these: tokens after which the output was cut off. An output that does
                       not end with a stop token (or one of the strings `stop`) needs it
    ignore_eos         another one: true if the engine went on after a stop token
    seed               of a sampled output. Its draws can be repeated only if `engine` is jaxspec
                       and the verifier coupled; leave it out for `rejection` and `block`

How it was computed, in the header, or in a line where it differs from the header:

    engine, version    the system, for the report; draws of `jaxspec` are repeated
    dtype              of parameters and compute: float32, bfloat16, float16; `other` for quantised
                       weights, whose outputs are compared and measured, not judged
    kv_dtype           of the KV cache, if it is not `dtype`; likewise not judged
    batch_size         for the report
    model              for the reader; files that are compared must agree in it

Further fields that `jaxspec generate` writes (`DESCRIPTIONS`) are ignored; any other field is
refused, because an unknown parameter would be judged as if it had not been used.

All lines give ids, or all give text. Ids are better: text shows neither how it was split into
tokens nor whether a stop token ended it, so the lengths of texts are not judged. Several lines with
the same prompt and sampling parameters are samples of one distribution. Lines without a seed, or
with different ones, count as drawn independently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.checkpoint.format import parse_dtype
from jaxspec.errors import ModelError, PromptError, SettingError
from jaxspec.models.base import Model
from jaxspec.requests.sampling_params import LARGEST_COUNT, SamplingParams
from jaxspec.runtime.files import decode_text, read_input
from jaxspec.runtime.values import whole_number

# The fields of `SamplingParams` that decide which tokens are drawn and where the output ends.
SAMPLING_FIELDS = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("n", "logprobs")
]
OF_SAMPLED = ("seed", "top_k", "top_p", "min_p")  # meaningless without a temperature
SETTING_FIELDS = ("engine", "version", "dtype", "kv_dtype", "batch_size", "model")
OTHER = "other"  # a dtype whose outputs are compared and measured, not judged
OUTPUT_FIELDS = ("prompt_token_ids", "prompt", "token_ids", "text")
# Fields of a completion; they are not judged.
DESCRIPTIONS = (
    "jaxspec",
    "request_id",
    "index",
    "finish_reason",
    "stop_reason",
    "acceptance",
    "logprobs",
    "logprobs_mode",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """One output of another system.

    Attributes:
      number: its line in the file, counted from 1.
      prompt_token_ids: at least one.
      token_ids: cut after the first stop token.
      after_stop: tokens that followed the stop token.
      params: how it was drawn; without a limit, `max_tokens` is `LARGEST_COUNT`.
      stop_tokens: every token that ends it.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    after_stop: tuple[int, ...]
    params: SamplingParams
    stop_tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputsFile:
    """The outputs of a file that were computed in the same way.

    Attributes:
      engine: the system that made them.
      version: the engine's.
      dtype: canonical name of the dtype they were computed in, or `OTHER`; None if that is not
        said.
      kv_dtype: that of the KV cache; None if it is `dtype`.
      batch_size: None if that is not said.
      model: what the file calls the model; None if it does not.
      is_text: whether ids were made from text.
      outputs: in the order of the lines.
    """

    engine: str
    version: str
    dtype: str | None
    kv_dtype: str | None = None
    batch_size: int | None = None
    model: str | None = None
    is_text: bool
    outputs: tuple[Output, ...]

    @property
    def is_judged(self) -> bool:
        """Whether the target can be computed in the same way, so that tokens can be judged."""
        return self.dtype != OTHER and self.kv_dtype is None

    @property
    def label(self) -> str:
        """How they were computed, in words."""
        kv_words = f"KV in {self.kv_dtype}" if self.kv_dtype else ""
        batch = f"batch {self.batch_size}" if self.batch_size else ""
        words = (self.engine, self.version, self.dtype or "", kv_words, batch)
        return " ".join(word for word in words if word)


def canonical_dtype(name: str, *, where: str) -> str:
    """`float32`, `bfloat16` or `float16`, from any usual name.

    Raises:
      SettingError: another name.
    """
    try:
        return parse_dtype(name.lower().removeprefix("torch.").replace("half", "float16")).name
    except (ModelError, AttributeError) as error:
        raise SettingError(
            f"{where} names the dtype {name!r}; write float32, bfloat16 or float16, or other for "
            "quantised weights."
        ) from error


def read_outputs(path: str | os.PathLike, target: Model) -> OutputsFile:
    """Outputs of a file in the format of this module, all computed in the same way.

    Raises:
      PromptError: the file cannot be read, has no header or no output, or a line (it is named) is
        malformed, unlike the others, or of another tokenizer, or does not say whether it was cut
        off.
      SettingError: a field or sampling parameter is unknown, out of range, or given twice; or the
        outputs were computed in several ways.
    """
    text, _ = read_outputs_text(path)
    first, *others = parse_outputs(text, target, name=os.fspath(path))
    if others:
        raise SettingError(
            f"The outputs file {os.fspath(path)} holds outputs of {first.label} and of "
            f"{others[0].label}; give outputs of one setting, or audit the file with audit_files."
        )
    return first


def read_outputs_text(path: str | os.PathLike) -> tuple[str, str]:
    """The text of a file of outputs, which may be a pipe, and the SHA-256 of what was read.

    Raises:
      PromptError: the file cannot be read.
    """
    try:
        content = read_input(pathlib.Path(path))
        return decode_text(content), hashlib.sha256(content).hexdigest()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PromptError(
            f"The outputs file {os.fspath(path)} cannot be read ({reason}); name a JSON lines file."
        ) from error


def parse_outputs(text: str, target: Model, *, name: str) -> tuple[OutputsFile, ...]:
    """The outputs in the text of a file, by how they were computed, in the order in which these
    settings appear; `name` is the file's, for messages.

    Raises:
      PromptError: see `read_outputs`.
      SettingError: likewise.
    """
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
    header = dataclasses.replace(header, where="The header")
    header.check_fields(SETTING_FIELDS)
    for line in outputs:
        line.check_fields((*OUTPUT_FIELDS, *DESCRIPTIONS, *SETTING_FIELDS))
        line.check_like(outputs[0])
    given = outputs[0].fields
    if target.tokenizer is None and not {"prompt_token_ids", "token_ids"} <= given.keys():
        raise PromptError(
            f"The outputs file {name} gives text, but the model {target.name} has no tokenizer; "
            "give prompt_token_ids and token_ids."
        )
    defaults, settings = header.sampling_fields(), header.settings({})
    by_setting: dict[tuple[Any, ...], list[Output]] = {}
    for line in outputs:
        setting = line.settings(settings)
        by_setting.setdefault(tuple(setting.values()), []).append(line.output(defaults))
    check_vocabulary(itertools.chain.from_iterable(by_setting.values()), target, name=name)
    return tuple(
        OutputsFile(
            **dict(zip(SETTING_FIELDS, values, strict=True)),
            is_text="token_ids" not in given,
            outputs=tuple(each),
        )
        for values, each in by_setting.items()
    )


def check_vocabulary(outputs: Iterable[Output], target: Model, *, name: str) -> None:
    """Raises `PromptError` if most of the outputs hold ids that are too large for the target: then
    it is not the engine that is wrong. A few are findings of their lines."""
    size = target.vocab_size
    largest = [max(output.token_ids, default=0) for output in outputs]
    if sum(token >= size for token in largest) > len(largest) / 2:
        raise PromptError(
            f"Most outputs of {name} hold token ids such as {max(largest)}, and the vocabulary of "
            f"{target.name} ends at {size - 1}; the file is of another tokenizer, so name the "
            "model that made it."
        )


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of the file: its number, its name in messages, its fields, and the model that the ids
    belong to."""

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
            raise PromptError(f"{where} is not JSON ({place}); correct the line.") from error
        if not isinstance(fields, dict):
            raise PromptError(f"{where} is JSON, but not an object; write one object per line.")
        return cls(number, where, fields, target)

    def wrong(self, what: str) -> PromptError:
        return PromptError(f"{self.where} {what}")

    def check_fields(self, names: Sequence[str]) -> None:
        """Raises unless every field is one of these or a sampling parameter."""
        known = (*names, "sampling_params", *SAMPLING_FIELDS)
        unknown = [name for name in self.fields if name not in known]
        if unknown:
            raise SettingError(
                f"{self.where} has the field {unknown[0]!r}, which is not known; leave it out if "
                f"it changes no token, otherwise it cannot be judged (known are "
                f"{', '.join(known)})."
            )

    def check_like(self, first: _Line) -> None:
        """Raises unless this line gives prompt and output in the same form as another: as ids, or
        as text."""
        for ids, text in (OUTPUT_FIELDS[:2], OUTPUT_FIELDS[2:]):
            if ids not in self.fields and text not in self.fields:
                raise self.wrong(f"has neither {ids} nor {text}; give one of them.")
        given, expected = (
            [kind for kind in OUTPUT_FIELDS if kind in line.fields] for line in (self, first)
        )
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
            is_inside = all(0 <= token < self.target.vocab_size for token in ids)
            if "text" in self.fields and tokenizer is not None and is_inside:
                self.check_text(prompt, ids)
        else:
            text = self.text("text")
            ids = tokenizer.encode_output(prompt, text)
            again = tokenizer.decode_output(prompt, ids, skip_special_tokens=False)
            if again.strip() != text.strip():
                raise self.wrong(
                    f"has a text that the tokenizer of {self.target.name} does not give back; the "
                    "file is of another tokenizer, so name the model that made it, or give "
                    "token_ids."
                )
        if not prompt:
            raise self.wrong("has an empty prompt; give at least one token.")
        if not ids and "token_ids" not in self.fields:
            raise self.wrong(
                "has an empty text, which does not say whether a stop token was emitted; give "
                "token_ids."
            )
        stops = params.stop_tokens(self.target)
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        is_stopped = 0 < end and ids[end - 1] in stops
        has_limit = params.max_tokens < LARGEST_COUNT or params.stop
        if "token_ids" in self.fields and not (is_stopped or has_limit):
            raise self.wrong(
                "ends without a stop token and gives no max_tokens, so there is no telling whether "
                "it was cut short; add max_tokens to the line, or to the header for all lines."
            )
        return Output(
            number=self.number,
            prompt_token_ids=prompt,
            token_ids=ids[:end],
            after_stop=ids[end:],
            params=params,
            stop_tokens=stops,
        )

    def check_text(self, prompt: Sequence[int], ids: Sequence[int]) -> None:
        """Raises unless the text is that of the ids; a stop string may have cut it."""
        tokenizer: Any = self.target.tokenizer
        said = (  # other engines may have decoded the output alone
            tokenizer.decode_output(before, ids, skip_special_tokens=skips)
            for before in (prompt, ())
            for skips in (True, False)
        )
        # A character that the last token leaves unfinished may be missing, or a replacement mark.
        wanted = self.text("text").strip().rstrip("\ufffd")
        if not any(one.strip().startswith(wanted) for one in said):
            raise self.wrong(
                f"has a text that is not what the tokenizer of {self.target.name} reads in its "
                "token_ids; the file is of another tokenizer, so name the model that made it."
            )

    def settings(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """How the output was computed: `SETTING_FIELDS`, with the header's where it does not
        say."""
        found = {name: self.fields.get(name, defaults.get(name)) for name in SETTING_FIELDS}
        for name in ("engine", "model", "kv_dtype"):
            if found[name] is not None and not isinstance(found[name], str):
                raise self.wrong(f"has {name} {found[name]!r}; write a name.")
        found["version"] = str(found["version"] or "")
        if found["dtype"] is not None and found["dtype"] != OTHER:
            found["dtype"] = canonical_dtype(found["dtype"], where=self.where)
        if found["kv_dtype"] is not None and found["kv_dtype"].lower() in ("auto", OTHER):
            found["kv_dtype"] = None if found["kv_dtype"].lower() == "auto" else OTHER
        if found["kv_dtype"] is not None and found["dtype"] != OTHER:
            with contextlib.suppress(SettingError):  # a name of the same dtype
                if canonical_dtype(found["kv_dtype"], where=self.where) == found["dtype"]:
                    found["kv_dtype"] = None
        if found["batch_size"] is not None:
            found["batch_size"] = whole_number(
                f"{self.where}: batch_size", found["batch_size"], least=1, most=LARGEST_COUNT
            )
        return found

    def ids(self, kind: str) -> tuple[int, ...]:
        ids, size = self.fields[kind], self.target.vocab_size
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise self.wrong(
                f"has {kind} that are not one list of integers; write one output per line."
            )
        for token in ids if kind == "prompt_token_ids" else ():
            if not 0 <= token < size:
                raise self.wrong(
                    f"holds the token id {token} in {kind}, and the vocabulary of "
                    f"{self.target.name} ends at {size - 1}; the file is of another tokenizer, so "
                    "name the model that made it."
                )
        return tuple(ids)

    def text(self, kind: str) -> str:
        if not isinstance(self.fields[kind], str):
            raise self.wrong(f"has a {kind} that is not text; write one output per line.")
        return self.fields[kind]

    def sampling_fields(self) -> dict[str, Any]:
        """Sampling parameters of the line, wherever they are in it."""
        within = self.fields.get("sampling_params") or {}
        if not isinstance(within, dict):
            raise self.wrong("has sampling_params that are not an object; write names and values.")
        beside = {name: x for name, x in self.fields.items() if name in SAMPLING_FIELDS}
        for name in within.keys() & beside.keys():
            if within[name] != beside[name]:
                raise SettingError(
                    f"{self.where} gives {name} twice, {beside[name]!r} and, in sampling_params, "
                    f"{within[name]!r}; keep the one that was used."
                )
        unknown = [name for name in within if name not in SAMPLING_FIELDS]
        if unknown:
            raise SettingError(
                f"{self.where} has the sampling parameter {unknown[0]!r}; leave it out if it "
                f"changes no token, otherwise it cannot be judged (known are "
                f"{', '.join(SAMPLING_FIELDS)})."
            )
        return {name: x for name, x in {**within, **beside}.items() if x is not None}

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        given = {**defaults, **self.sampling_fields()}
        alone = next((name for name in OF_SAMPLED if name in given), None)
        if alone is not None and "temperature" not in given:
            raise SettingError(
                f"{self.where} has {alone} {given[alone]!r} and no temperature, so there is no "
                "telling whether it was sampled; add the temperature (0 if it was greedy)."
            )
        if given.get("stop") and self.target.tokenizer is None:
            raise SettingError(
                f"{self.where} has stop strings, but the model {self.target.name} has no tokenizer "
                "to find them with; give stop_token_ids instead."
            )
        try:
            params = SamplingParams(**{"max_tokens": LARGEST_COUNT, **given})
        except (SettingError, TypeError) as error:
            raise SettingError(f"{self.where}: {error}") from error
        params.check_token_ids(self.where, self.target)
        return params
