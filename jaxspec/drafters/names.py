"""Drafters by name, as `Engine(drafter=...)` and `--drafter` take them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, get_args

from jaxspec.cache.pages import KvDtype, check_kv_dtype
from jaxspec.checkpoint.resolve import DEMO_MODELS, load_model
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel, check_kv_window
from jaxspec.drafters.files import load_drafter
from jaxspec.drafters.flexdraft.drafter import Mode
from jaxspec.drafters.heads.tree_names import parse_beam, parse_tree
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.trees import BeamTree
from jaxspec.errors import JaxspecError, ModelError, SettingError
from jaxspec.models.base import Model
from jaxspec.runtime.files import expand_user
from jaxspec.runtime.values import check_kind

MakeDrafter: TypeAlias = Callable[[Model], Drafter]

# A number of more than nine digits is a mistake, and would be slow to parse.
_NGRAM = re.compile(r"ngram(?:\[(\d{1,9})\])?(?::(\d{1,9})-(\d{1,9}))?", re.ASCII)
_DRAFT_MODEL = re.compile(
    r"(draft_model(?:\[([^\]]*)\]|@([^:~]*))?(?:~([^:]*))?)(?::(.*))?", re.DOTALL
)
_BEGINS_DRAFT_MODEL = re.compile(r"draft_model([:@~\[]|$)")
_BEGINS_OTHER = re.compile(r"(ngram|heads|medusa|hydra|clover2?|flexdraft)([:\[]|$)")
_KV_WINDOW = re.compile(r"(\d{1,9})(?:\+(\d{1,9}))?", re.ASCII)
_HEADS = re.compile(r"(heads|medusa|hydra|clover2?)(?:\[([^\]]*)\])?(?::(.*))?", re.DOTALL)
_FLEXDRAFT = re.compile(r"flexdraft(?:\[([^\]]*)\])?(?::(.*))?", re.DOTALL)
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelName:
    """The parsed name of a draft model; see `choose_drafter`.

    Attributes:
      model: a name for `load_model`.
      options: arguments of `DraftModel` that the name gives: `min_confidence`, `tree`, `kv_window`
        and `kv_sinks`.
    """

    model: str
    options: Mapping[str, Any]


def choose_drafter(
    name: str, *, dtype: Any = None, kv_dtype: KvDtype | None = None, verify: bool = True
) -> MakeDrafter | None:
    """A function that makes the named drafter for a target; None for `none`, plain decoding.

    The name is checked now; models are loaded when the drafter is made.

    Args:
      name: `none`, `ngram`, `ngram:MIN-MAX`, `ngram[BRANCHES]` with or without lengths, the name of
        a draft model for `load_model`, `draft_model:MODEL`, `draft_model@MIN_CONFIDENCE:MODEL`,
        `draft_model[WIDTHxDEPTH:NODES]:MODEL`, each optionally with a KV window as in
        `draft_model~WINDOW:MODEL` or `draft_model~WINDOW+SINKS:MODEL` (see `DraftModel`),
        `heads:NAME` or, for heads of one kind only, `medusa:NAME`, `hydra:NAME`, `clover:NAME`,
        `clover2:NAME`, with a tree as in `clover[8]:NAME` (see `load_drafter` and `parse_tree`),
        `flexdraft:NAME` or `flexdraft[MODE]:NAME` with one of FlexDraft's modes, or
        `package.module:factory`, a function of the target or of nothing.
      dtype: that of a draft model, see `load_model`.
      kv_dtype: that of a draft model's KV, see `load_model`.
      verify: whether its files are compared with their checksums, see `load_model`.

    Raises:
      SettingError: the name is malformed, or begins with an unknown user's home directory; or a KV
        dtype was given, but the drafter is not a draft model.
      ModelError: the factory cannot be imported or, when it is called, does not return a drafter.
    """
    check_kv_dtype(kv_dtype)
    load = functools.partial(load_model, dtype=dtype, kv_dtype=kv_dtype, verify=verify)
    if kv_dtype is not None and not names_draft_model(name):
        raise SettingError(
            f"The KV dtype {kv_dtype!r} was given for the drafter {name!r}, which is not a draft "
            "model; leave it out."
        )
    if name == "none":
        return None
    if re.match(r"ngram([:\[]|$)", name):
        return _ngram(name)
    if names_draft_model(name):
        return _draft_model(name, load)
    if re.match(r"(heads|medusa|hydra|clover2?)([:\[]|$)", name):
        return _heads(name, verify=verify)
    if names_flexdraft(name):
        return _flexdraft(name, verify=verify)
    if not _FACTORY.fullmatch(name):
        raise SettingError(
            f"There is no drafter {name!r}; choose none, ngram, ngram:MIN-MAX, draft_model:MODEL, "
            "heads:NAME or flexdraft:NAME, or name your own as package.module:factory."
        )
    return _of_factory(name)


def make_drafter(
    drafter: Drafter | str | None, target: Model, *, dtype: Any = None
) -> Drafter | None:
    """A drafter for `target`: a name is resolved by `choose_drafter`; a drafter, or None, is
    returned as it is.

    Raises:
      SettingError: it is none of these, or what `choose_drafter` raises.
      ModelError: as `choose_drafter` raises it.
    """
    if drafter is None:
        return None
    if not isinstance(drafter, str):
        check_kind("drafter", drafter, Drafter, "a drafter, the name of one, or None")
        return drafter
    make = choose_drafter(drafter, dtype=dtype)
    return None if make is None else make(target)


def _ngram(name: str) -> MakeDrafter:
    match = _NGRAM.fullmatch(name)
    if match is None:
        raise SettingError(
            f"The drafter {name!r} was given; write ngram, or ngram:MIN-MAX as in ngram:2-4, or "
            "ngram[BRANCHES] as in ngram[4] or ngram[4]:2-4."
        )
    branches, low, high = match.groups()
    lengths = () if low is None else (int(low), int(high))
    ngram = NGram(*lengths, branches=1 if branches is None else int(branches))
    return lambda target: ngram


def _draft_model(name: str, load: Callable[[str], Model]) -> MakeDrafter:
    parsed = parse_draft_model(name)
    return lambda target: DraftModel(load(parsed.model), **parsed.options)


def parse_draft_model(name: str) -> DraftModelName:
    """Parses a name for which `names_draft_model` is true. No model is loaded.

    Raises:
      SettingError: the name is malformed, or one of its numbers is out of range.
    """
    if not _BEGINS_DRAFT_MODEL.match(name):
        return DraftModelName(model=name, options={})
    match = _DRAFT_MODEL.fullmatch(name)
    kind, tree, confidence, kept, model = (
        (name, "", None, None, None) if match is None else match.groups()
    )
    options: dict[str, Any] = {}
    if confidence is not None:
        try:
            options["min_confidence"] = float(confidence)
        except ValueError:
            options["min_confidence"] = -1.0
        if not 0 <= options["min_confidence"] <= 1:
            raise SettingError(
                f"The drafter {name!r} was given; write draft_model@MIN_CONFIDENCE:MODEL with a "
                "probability, as in draft_model@0.4:MODEL."
            )
    if tree is not None:
        options["tree"] = _beam_tree(name, tree)
    if kept is not None:
        options |= _kv_window(name, kept)
    if not model:
        raise SettingError(f"The drafter {name!r} was given without a model; write {kind}:MODEL.")
    return DraftModelName(model=model, options=options)


def _heads(name: str, *, verify: bool) -> MakeDrafter:
    match = _HEADS.fullmatch(name)
    if match is None:
        raise SettingError(
            f"The drafter {name!r} was given; write KIND[TREE]:NAME, as in clover[8]:NAME or "
            "medusa[chain]:NAME."
        )
    kind, tree, heads = match.groups()
    if tree is not None:
        parse_tree(tree)
    if not heads:
        raise SettingError(
            f"The drafter {name!r} was given without a name of heads; write {kind}:NAME with a "
            "directory or a hub id."
        )
    wanted: Any = None if kind == "heads" else kind
    return lambda target: load_drafter(heads, target, tree=tree, kind=wanted, verify=verify)


def _flexdraft(name: str, *, verify: bool) -> MakeDrafter:
    mode, weights = parse_flexdraft(name)
    if weights is None:
        raise SettingError(
            f"The drafter {name!r} was given without a name of weights; write flexdraft:NAME with "
            "a directory, a hub id or demo-flexdraft."
        )
    return lambda target: load_drafter(weights, target, kind="flexdraft", mode=mode, verify=verify)


def parse_flexdraft(name: str) -> tuple[Mode | None, str | None]:
    """The mode and the weights in a name for which `names_flexdraft` is true; None for what the
    name leaves out.

    Raises:
      SettingError: the name is malformed.
    """
    match = _FLEXDRAFT.fullmatch(name)
    modes = get_args(Mode)
    mode, weights = (None, None) if match is None else match.groups()
    if match is None or mode not in (None, *modes):
        raise SettingError(
            f"The drafter {name!r} was given; write flexdraft:NAME or flexdraft[MODE]:NAME, where "
            f"MODE is one of {', '.join(modes)}."
        )
    chosen: Any = mode
    return chosen, weights or None


def _beam_tree(name: str, tree: str) -> BeamTree:
    beam = parse_beam(tree)
    if beam is None:
        raise SettingError(
            f"The drafter {name!r} was given; write draft_model[WIDTHxDEPTH:NODES]:MODEL, as in "
            "draft_model[4x4:12]:MODEL."
        )
    return beam


def names_draft_model(name: str) -> bool:
    """Whether this name is that of a `DraftModel`."""
    if _BEGINS_OTHER.match(name):
        return False
    return bool(_BEGINS_DRAFT_MODEL.match(name)) or _is_model(name)


def names_flexdraft(name: str) -> bool:
    """Whether this name is that of a `FlexDraft`."""
    return bool(re.match(r"flexdraft([:\[]|$)", name))


def _is_model(name: str) -> bool:
    """Whether a name that is not a drafter's is a model's. A hub id without a slash looks like a
    misspelt drafter, so it is written `draft_model:ID`."""
    is_path = "/" in name or (name != "" and os.path.isdir(expand_user(name)))
    return name in DEMO_MODELS or name.startswith("random:") or is_path


def _kv_window(name: str, kept: str) -> dict[str, int]:
    """`kv_window`, and `kv_sinks` if they are named."""
    match = _KV_WINDOW.fullmatch(kept)
    if match is None:
        raise SettingError(
            f"The drafter {name!r} was given; write draft_model~WINDOW:MODEL or "
            "draft_model~WINDOW+SINKS:MODEL, as in draft_model~512+4:MODEL."
        )
    sizes = tuple(int(size) for size in match.groups() if size is not None)
    check_kv_window(*sizes)
    return dict(zip(("kv_window", "kv_sinks"), sizes, strict=False))


def _of_factory(name: str) -> MakeDrafter:
    module_name, _, factory_name = name.partition(":")
    try:
        factory: Any = importlib.import_module(module_name)
        for part in factory_name.split("."):
            factory = getattr(factory, part)
        needed = _required_arguments(factory)
    except Exception as error:  # whatever the user's module raises
        raise ModelError(
            f"The drafter {name} cannot be imported ({type(error).__name__}: {error}); check the "
            "name, and that the module is installed or in the current directory."
        ) from error
    if needed > 1:
        raise ModelError(
            f"The drafter {name} needs {needed} arguments; name a function of the target, or of "
            "nothing."
        )

    def make(target: Model) -> Drafter:
        try:
            drafter = factory(target) if needed else factory()
        except JaxspecError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise ModelError(
                f"The drafter {name} cannot be made ({type(error).__name__}: {error}); check that "
                "it takes the target, or nothing."
            ) from error
        if not isinstance(drafter, Drafter):
            raise ModelError(
                f"{name} returned a {type(drafter).__name__}, which lacks parts of the Drafter "
                "protocol; see jaxspec.drafters.base."
            )
        return drafter

    return make


def _required_arguments(factory: Any) -> int:
    return sum(
        parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(factory).parameters.values()
    )
