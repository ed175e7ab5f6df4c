"""`--draft` and `--drafter`: from a name on the command line to a drafter."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.errors import ModelError, SettingError
from jaxspec.models.base import Model

MakeDrafter: TypeAlias = Callable[[Model], Drafter]


def choose_drafter(
    drafter: str | None, draft: str | None, *, dtype: str | None
) -> MakeDrafter | None:
    """What makes the drafter that `--drafter` or `--draft` names; None decodes plainly.

    Names are checked now, models are loaded when the drafter is made.

    Args:
      drafter: `none`, `ngram`, `ngram:MIN-MAX`, `draft_model:MODEL`,
        `draft_model@MIN_CONFIDENCE:MODEL` (see `DraftModel`), or `package.module:factory`.
      draft: a model, short for `draft_model:MODEL`; with it, `drafter` may be `draft_model` or
        `draft_model@MIN_CONFIDENCE`.
      dtype: of a draft model.

    Raises:
      SettingError: both are given, or the name is malformed.
      ModelError: the factory cannot be imported; when called, also if it returns no drafter.
    """
    if drafter is None:
        drafter = "none" if draft is None else "draft_model"
    name, _, rest = drafter.partition(":")
    kind, at, confidence = name.partition("@")
    if draft is not None and (kind != "draft_model" or rest):
        raise SettingError(
            f"Both --draft {draft} and --drafter {drafter} were given; name one drafter."
        )
    if drafter == "none":
        return None
    if name == "ngram":
        low, _, high = rest.partition("-")
        if rest and not (low.isdecimal() and high.isdecimal()):
            raise SettingError(
                f"--drafter {drafter} was given; write ngram, or ngram:MIN-MAX as in ngram:2-4."
            )
        ngram = NGram(int(low), int(high)) if rest else NGram()
        return lambda target: ngram
    if kind == "draft_model":
        model = rest or draft
        if not model:
            raise SettingError(
                f"--drafter {name} was given without a model; write {name}:MODEL, or add --draft "
                "MODEL."
            )
        return _draft_model(model, dtype, _min_confidence(drafter, confidence) if at else 0.0)
    return _of_factory(drafter)


def make_drafter(
    drafter: str | None, draft: str | None, *, target: Model, dtype: str | None
) -> Drafter | None:
    """The drafter for `target` that `choose_drafter` names."""
    make = choose_drafter(drafter, draft, dtype=dtype)
    return None if make is None else make(target)


def _draft_model(name: str, dtype: str | None, min_confidence: float) -> MakeDrafter:
    return lambda target: DraftModel(load_model(name, dtype=dtype), min_confidence)


def _min_confidence(drafter: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise SettingError(
            f"--drafter {drafter} was given; write draft_model@MIN_CONFIDENCE:MODEL with a "
            "probability, as in draft_model@0.4:MODEL."
        )
    return value


def _of_factory(name: str) -> MakeDrafter:
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise SettingError(
            f"There is no drafter {name!r}; choose none, ngram, draft_model:MODEL, or name your "
            "own as package.module:factory."
        )
    # As with `python -m`: an installed script does not find modules of the current directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        needed = _required_arguments(factory)
    except Exception as error:  # whatever the user's module raises
        raise ModelError(
            f"The drafter {name} cannot be imported ({type(error).__name__}: {error}); check the "
            "name, and that the module is installed or in the current directory."
        ) from error
    if needed > 1:
        raise ModelError(
            f"The drafter {name} needs {needed} arguments; name a function of the "
            "target, or of nothing."
        )

    def make(target: Model) -> Drafter:
        drafter = factory(target) if needed else factory()
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
