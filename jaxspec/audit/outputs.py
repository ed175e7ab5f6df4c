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
from jaxspec.models.tokenizer import TextTokenizer
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
        (number, _parse(line, number))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise PromptError(
            f"The outputs file {name} is empty; its first line is a header, and each further line "
            "an output."
        )
    header = lines[0][1]
    if not isinstance(header.get("engine"), str) or "token_ids" in header or "text" in header:
        raise PromptError(
            f"The outputs file {name} has no header; its first line must be an object like "
            '{"engine": "vllm", "version": "0.11.0", "dtype": "bfloat16"}.'
        )
    if len(lines) == 1:
        raise PromptError(
            f"The outputs file {name} holds a header and no output; add a line for each output."
        )
    _check_alike(lines[1:])
    given = lines[1][1]
    if target.tokenizer is None and not {"prompt_token_ids", "token_ids"} <= given.keys():
        raise PromptError(
            f"The outputs file {name} gives text, but the model {target.name} has no tokenizer; "
            "give prompt_token_ids and token_ids."
        )
    dtype = header.get("dtype")
    defaults = _object(header, "sampling_params", "The header")
    return OutputsFile(
        engine=header["engine"],
        version=str(header.get("version", "")),
        dtype=None if dtype is None else canonical_dtype(dtype, where="The header"),
        is_text="token_ids" not in given,
        outputs=tuple(_output(number, line, defaults, target) for number, line in lines[1:]),
    )


def _parse(line: str, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"{error.msg} at column {error.colno}" if isinstance(error, ValueError) else "depth"
        raise PromptError(
            f"Line {number} of the outputs file is not JSON ({where}); mend the line."
        ) from error
    if not isinstance(fields, dict):
        raise PromptError(
            f"Line {number} of the outputs file is JSON, but not an object; write one object a "
            "line."
        )
    return fields


def _check_alike(lines: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Raises unless all lines give the same of prompt and output: ids, or text."""
    kinds = ("prompt_token_ids", "prompt", "token_ids", "text")
    first_number, first = lines[0]
    for number, line in lines:
        for ids, text in (kinds[:2], kinds[2:]):
            if ids not in line and text not in line:
                raise PromptError(
                    f"Line {number} of the outputs file has neither {ids} nor {text}; give one of "
                    "them."
                )
        given, expected = ([kind for kind in kinds if kind in x] for x in (line, first))
        if given != expected:
            raise PromptError(
                f"The outputs file is ragged: line {number} has {', '.join(given)}, and line "
                f"{first_number} {', '.join(expected)}; give the same fields in every line."
            )


def _output(
    number: int, line: Mapping[str, Any], defaults: Mapping[str, Any], target: Model
) -> Output:
    where = f"Line {number} of the outputs file"
    params = _sampling_params(where, line, defaults)
    tokenizer: Any = target.tokenizer  # there is one if a line gives text
    if "prompt_token_ids" in line:
        prompt = _ids(line, "prompt_token_ids", where, target)
    else:
        prompt = tuple(tokenizer.encode(_text(line, "prompt", where)))
    if "token_ids" in line:
        ids = _ids(line, "token_ids", where, target)
        if "text" in line and tokenizer is not None:
            _check_text(tokenizer, ids, _text(line, "text", where), where, target)
    else:
        text = _text(line, "text", where)
        ids = tuple(tokenizer.hf.encode(text, add_special_tokens=False))
        again = tokenizer.hf.decode(list(ids), clean_up_tokenization_spaces=False)
        if again.strip() != text.strip():
            raise PromptError(
                f"{where} has a text that the tokenizer of {target.name} does not give back; the "
                "file is of another tokenizer, so name the model that made it, or give token_ids."
            )
    if not prompt or not ids:
        raise PromptError(
            f"{where} has an empty {'output' if prompt else 'prompt'}; give at least one token (an "
            "output keeps its stop token), or leave the line out."
        )
    stops = params.stop_tokens(target)
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    return Output(
        number=number,
        prompt_token_ids=prompt,
        token_ids=ids[:end],
        num_after_stop=len(ids) - end,
        params=params,
    )


def _check_text(
    tokenizer: TextTokenizer, ids: Sequence[int], text: str, where: str, target: Model
) -> None:
    """Raises unless `text` is what the ids say; a stop string may have cut it."""
    said = [
        tokenizer.hf.decode(
            list(ids), skip_special_tokens=skips, clean_up_tokenization_spaces=False
        ).strip()
        for skips in (True, False)
    ]
    # A character that the last token leaves unfinished may be missing, or be a replacement mark.
    wanted = text.strip().rstrip("\ufffd")
    if not any(one.startswith(wanted) for one in said):
        raise PromptError(
            f"{where} has a text that is not what the tokenizer of {target.name} reads in its "
            "token_ids; the file is of another tokenizer, so name the model that made it."
        )


def _ids(line: Mapping[str, Any], kind: str, where: str, target: Model) -> tuple[int, ...]:
    ids = line[kind]
    is_flat = isinstance(ids, list) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in ids
    )
    if not is_flat:
        raise PromptError(
            f"{where} has {kind} that are not one list of integers; write one output a line."
        )
    outside = [token for token in ids if not 0 <= token < target.vocab_size]
    if outside:
        raise PromptError(
            f"{where} holds the token id {outside[0]} in {kind}, and the vocabulary of "
            f"{target.name} ends at {target.vocab_size - 1}; the file is of another tokenizer, so "
            "name the model that made it."
        )
    return tuple(ids)


def _text(line: Mapping[str, Any], kind: str, where: str) -> str:
    if not isinstance(line[kind], str):
        raise PromptError(f"{where} has a {kind} that is not text; write one output a line.")
    return line[kind]


def _object(line: Mapping[str, Any], kind: str, where: str) -> Mapping[str, Any]:
    value = line.get(kind) or {}
    if not isinstance(value, dict):
        raise PromptError(f"{where} has {kind} that are not an object; write names and values.")
    return value


def _sampling_params(
    where: str, line: Mapping[str, Any], defaults: Mapping[str, Any]
) -> SamplingParams:
    given = {**defaults, **_object(line, "sampling_params", where)}
    unknown = [name for name in given if name not in (*SAMPLING_FIELDS, "seed")]
    if unknown:
        raise SettingError(
            f"{where} has the sampling parameter {unknown[0]!r}; leave it out if it changes no "
            f"token, else it cannot be judged (known are {', '.join(SAMPLING_FIELDS)})."
        )
    known = {name: value for name, value in given.items() if value is not None}
    seed = line.get("seed", known.pop("seed", None))
    known.setdefault("max_tokens", LARGEST_COUNT)  # no limit
    try:
        return SamplingParams(seed=seed, **known)
    except (SettingError, TypeError) as error:
        raise SettingError(f"{where}: {error}") from error
