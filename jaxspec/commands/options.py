"""Options that several commands share, each stated once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import tyro

from jaxspec.commands.progress import working
from jaxspec.engine.config import EngineConfig
from jaxspec.errors import SettingError
from jaxspec.load.drafters import MakeDrafter, choose_drafter
from jaxspec.load.models import KvDtype, load_packed
from jaxspec.models.base import LanguageModel
from jaxspec.requests.prompts import PromptLine, Turns, json_object, load_prompts
from jaxspec.requests.sampling_params import SamplingParams, as_sampling_params, seeds
from jaxspec.runtime.options import check_counts
from jaxspec.schedulers import make_scheduler

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The options of a command's JSON document."""

    json: bool = False
    """Print one line of JSON at the end of standard output."""
    json_file: pathlib.Path | None = None
    """Write the same JSON to this file; replaces an older one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetOption:
    """Which target."""

    target: str
    """Hub id, Hugging Face or converted directory, GGUF file, `demo-target`, `random:PRESET`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions:
    """How messages become text."""

    chat_template: str | None = None
    """Template to use instead of the tokenizer's own: `vicuna`, or a Jinja file."""
    chat_template_kwargs: str | None = None
    """More template variables as a JSON object, e.g. '{"enable_thinking": false}'."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Which drafter."""

    draft: str | None = None
    """A draft model, named in the same way as the target, or a directory of a drafter."""
    drafter: str | None = None
    """What drafts: `none`, `ngram`, a kind with its weights, as in `draft_model:MODEL` or
    `heads:MODEL` (MODEL is a directory or a hub id), `ngram+HEADS` (heads that draft where n-grams
    find nothing), or your own `package.module:factory`."""
    drafter_args: str | None = None
    """Settings of the drafter, as a JSON object. Draft models have `tree` (`4x4:12` keeps the 12
    best nodes of a beam search of width 4 and depth 4), `min_confidence` (a draft ends after its
    first token with a lower probability), `kv_window` and `kv_sinks` (KV is kept only for so many
    newest and first positions) and `kv_dtype` (`int8`). ngram has `branches`, `prompt_lookup_min`
    and `prompt_lookup_max`. Heads have `tree` (`chain`, a number of nodes, `4x4:16`, or one of
    Medusa's trees) and, for n-grams in front, `prompt_lookup_min` and `prompt_lookup_max`."""

    @property
    def is_plain(self) -> bool:
        """Whether no drafter is named."""
        return self.draft is None and self.drafter in (None, "none")

    def choose_drafter(self, *, dtype: str | None, verify: bool = True) -> MakeDrafter | None:
        """A function that makes the drafter for a target, or None; raises what
        `load.drafters.choose_drafter` raises."""
        if self.draft is not None and self.drafter is not None:
            raise SettingError(
                f"Both --draft {self.draft} and --drafter {self.drafter} were given; name one "
                "drafter."
            )
        given = json_object("--drafter-args", self.drafter_args) or {}
        if self.is_plain and given:
            raise SettingError(
                f"--drafter-args {self.drafter_args} was given without a drafter; add --draft or "
                "--drafter."
            )
        named: Any = "none" if self.drafter is None else self.drafter
        if self.draft is not None:
            named = {"model": self.draft}
        return drafter_of_command(named, given, dtype=dtype, verify=verify)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Which prompts to decode."""

    prompts: pathlib.Path | None = None
    """A file of prompts, one per line: Spec-Bench questions, plain text, or JSON objects with
    `prompt`, `prompt_token_ids` or `messages`. Default: the sample prompts of the embedded pair."""
    limit: int | None = None
    """Use only this many prompts, from the beginning of the file."""
    max_prompt_tokens: int | None = None
    """Cut longer prompts after this many tokens."""

    def read_prompts(self, *, turns: Turns = "first") -> tuple[list[PromptLine], dict[str, str]]:
        """The requested number of prompts, and the SHA-256 of what was read, by the file's name."""
        check_counts(self, "limit", "max_prompt_tokens")
        return load_prompts(self.prompts, self.limit, turns=turns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen."""

    max_tokens: int = 64
    """Emit at most this many tokens per prompt."""
    temperature: float | None = None
    """Divides the logits; 0 is greedy. Default 0."""
    top_p: float | None = None
    """Keep the likeliest tokens whose probabilities add up to this. Default 1: all."""
    seed: int = 0
    """Seed of the first prompt; later prompts have consecutive seeds."""
    sampling_args: str | None = None
    """More fields of `jaxspec.SamplingParams`, as a JSON object, such as `{"top_k": 50,
    "repetition_penalty": 1.1}`. They are `top_k`, `min_p`, `min_tokens`, `stop_token_ids`,
    `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias`,
    `allowed_token_ids`, `logprobs`, `prompt_logprobs`, and `stop` and `ignore_eos` where they
    are no options."""

    def given_sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that were given."""
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        more = settings_of(self, "sampling_args")
        if "n" in more:
            raise SettingError(
                "n was given in --sampling-args, which are those of one completion; leave it out "
                "(`jaxspec generate` has --n)."
            )
        return {name: value for name, value in values.items() if value is not None} | more

    def sampling_params(self) -> SamplingParams:
        """Sampling parameters of the first prompt; raises `SettingError` for values out of
        range."""
        return as_sampling_params(self.given_sampling())

    def with_seeds(self, params: SamplingParams, num_prompts: int) -> list[SamplingParams]:
        """`seeds` of the prompts, from --seed on."""
        return seeds(dataclasses.replace(params, seed=self.seed), num_prompts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How the models are loaded."""

    dtype: DtypeName | None = None
    """Dtype of parameters and compute, and of KV unless --kv-dtype is given; default: the
    checkpoint's (on a CPU float32 for float16, for the embedded pair and for random presets)."""
    kv_dtype: KvDtype | None = None
    """`int8` stores the target's KV in half the bytes of bfloat16, with a scale per token and head;
    its outputs then change a little. Default: the dtype it is computed in."""
    verify: bool = True
    """--no-verify loads target and draft model without comparing their files with their
    checksums."""

    def load(self, name: str) -> LanguageModel:
        """The model with this name."""
        with working(f"loading {name}"):
            return load_packed(name, dtype=self.dtype, kv_dtype=self.kv_dtype, verify=self.verify)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """The shape of an engine."""

    batch_size: int = 8
    """Prompts decoded together (fewer if there are fewer prompts)."""
    max_length: int = 1024
    """Most tokens of a prompt and its completion together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Settings of an engine that few people change."""

    engine_args: str | None = None
    """More settings of `jaxspec.Engine`, as a JSON object, such as `{"scheduler": "pool"}`. Rows
    take part in rounds by `scheduler` (`continuous`; `static`, as in EQSPEC; `pool`, as in EXSPEC),
    and their KV is stored by `layout` (`ragged`; `aligned`, as in EQSPEC). `check_invariants` tests
    KV and positions after every round. Others are `rounds_per_sync`, `rounds_per_piece`,
    `max_queue`, `tree_depth`, `budget_bytes`, `session_bytes`, `step_timeout_s` and
    `logprobs_mode`."""

    def given_engine(self) -> dict[str, Any]:
        """The settings that were given.

        Raises:
          SettingError: there is no such setting, it is an option of its own, or its value is wrong.
        """
        given = settings_of(self, "engine_args")
        names = {field.name for field in dataclasses.fields(EngineConfig)}
        names -= {"mesh", "trace", "max_logprobs", *vars(self)}
        if unknown := [name for name in given if name not in {*names, "prefill_chunk"}]:
            raise SettingError(
                f"{unknown[0]!r} was given in --engine-args, which take {', '.join(sorted(names))}."
            )
        if given.get("scheduler") is not None:
            make_scheduler(given["scheduler"])
        EngineConfig(**given)
        return given


def settings_of(options: Any, field: str) -> dict[str, Any]:
    """The JSON object in a field of these options, none of whose names is an option of its own."""
    option = "--" + field.replace("_", "-")
    given = json_object(option, getattr(options, field)) or {}
    for name in given:
        if name in vars(options):
            own = "--" + name.replace("_", "-")
            raise SettingError(f"{name} was given in {option}, and is an option; use {own}.")
    return given


def parse(command: type[Any], **settings: Any) -> Any:
    """`tyro.cli`; if the command has a tuple `FIRST`, its help lists these options first, and the
    others under a heading of their own."""
    _hide_empty_defaults(command)
    if not hasattr(command, "FIRST"):
        return tyro.cli(command, **settings)
    names = [field.name for field in dataclasses.fields(command)]
    hidden = tyro.conf.Suppress[tyro.conf.Fixed[Any]]

    def only(shown: Collection[str], *more: Any) -> type[Any]:
        """The options in `shown`: the others are hidden."""
        others = [(name, hidden, None) for name in names if name not in shown]
        return dataclasses.make_dataclass(
            "Options", [*others, *more], bases=(command,), frozen=True, kw_only=True
        )

    rest = only([name for name in names if name not in command.FIRST])
    rest.__doc__ = "For experts, and for long runs."
    both = only(command.FIRST, ("more", tyro.conf.OmitArgPrefixes[rest], rest()))
    found = tyro.cli(both, description=" ".join((command.__doc__ or "").split()), **settings)
    parts = {True: found, False: found.more}
    return command(**{name: getattr(parts[name in command.FIRST], name) for name in names})


def _hide_empty_defaults(command: Any) -> None:
    """Keeps the help of a command, and of commands that it chooses from, from saying of an option
    that its default is None, or of a flag `--no-x` that it is True."""
    if not (isinstance(command, type) and dataclasses.is_dataclass(command)):
        for part in typing.get_args(command):
            _hide_empty_defaults(part)
        return
    hints = typing.get_type_hints(command, include_extras=True)
    nothing = tyro.conf.arg(help_behavior_hint="")
    for field in dataclasses.fields(command):
        if field.default is None or field.default is True:
            owner = next(each for each in command.__mro__ if field.name in vars(each))
            owner.__annotations__[field.name] = Annotated[hints[field.name], nothing]
        else:
            _hide_empty_defaults(hints[field.name])


def drafter_of_command(
    drafter: str | Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    dtype: str | None,
    verify: bool = True,
) -> MakeDrafter | None:
    """`choose_drafter` for the command line."""
    find_modules_here()
    return choose_drafter(drafter, arguments, dtype=dtype, verify=verify)


def find_modules_here() -> None:
    """Finds modules of the current directory, as `python -m` does and an installed script does
    not."""
    with contextlib.suppress(FileNotFoundError):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
