"""`--draft` and `--drafter`: from a name on the command line to a drafter."""

from __future__ import annotations

import importlib
import inspect

from jaxspec.checkpoint import load_model
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.errors import ModelError, SettingError
from jaxspec.models.base import Model


def make_drafter(
    drafter: str | None, draft: str | None, *, target: Model, dtype: str | None
) -> Drafter | None:
    """The drafter that `--drafter` or `--draft` names.

    Args:
      drafter: `none`, `ngram`, `ngram:MIN-MAX`, `draft_model:MODEL`, or `package.module:factory`.
      draft: a model, short for `draft_model:MODEL`.
      target: handed to a factory that takes an argument.
      dtype: of a draft model.

    Raises:
      SettingError: both are given, or the name is malformed.
      ModelError: the factory cannot be imported or returns no drafter.
    """
    if draft is not None and drafter not in (None, "draft_model"):
        raise SettingError(
            f"Both --draft {draft} and --drafter {drafter} were given; name one drafter."
        )
    if draft is not None:
        return DraftModel(load_model(draft, dtype=dtype))
    if drafter in (None, "none"):
        return None
    kind, _, rest = drafter.partition(":")
    if kind == "ngram":
        low, _, high = rest.partition("-")
        if rest and not (low.isdecimal() and high.isdecimal()):
            raise SettingError(
                f"--drafter {drafter} was given; write ngram, or ngram:MIN-MAX as in ngram:2-4."
            )
        return NGram(int(low), int(high)) if rest else NGram()
    if kind == "draft_model":
        if not rest:
            raise SettingError(
                "--drafter draft_model was given without a model; write draft_model:MODEL or --draft "
                "MODEL."
            )
        return DraftModel(load_model(rest, dtype=dtype))
    return _from_factory(drafter, target)


def _from_factory(name: str, target: Model) -> Drafter:
    module_name, _, factory_name = name.partition(":")
    if not factory_name:
        raise SettingError(
            f"There is no drafter {name!r}; choose none, ngram, draft_model:MODEL, or name your own "
            "as package.module:factory."
        )
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"The drafter {name} cannot be imported ({error}); check the module's name and that it "
            "is on the Python path."
        ) from error
    drafter = factory(target) if inspect.signature(factory).parameters else factory()
    if not isinstance(drafter, Drafter):
        raise ModelError(
            f"{name} returned a {type(drafter).__name__}, which lacks parts of the Drafter protocol; "
            "see jaxspec.drafters.base."
        )
    return drafter
