"""What settings may be, and what follows from them."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal, TypeAlias, get_args

import jax

from jaxspec.cache import pages as kv
from jaxspec.drafters.base import Drafter
from jaxspec.errors import SettingError, warn_once
from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.values import LARGEST_COUNT, is_one_of, refusal, shown, whole_number
from jaxspec.types import PyTree

_log = logging.getLogger(__name__)

Exactness: TypeAlias = Literal["bitwise", "ties"]
DraftLength: TypeAlias = int | Literal["auto"]
DEFAULT_DRAFT_LENGTH = 4
LARGEST_NUM_SLOTS = LARGEST_COUNT  # over all rows
MAX_STOP_TOKENS = 8  # room for a request's stop tokens in the compiled loop
# For a request whose draft is longer than its engine allows.
LONGER_DRAFTS = "lower it, or make the engine with a larger draft_length"
PINNED = "pinned_host"  # JAX's name of that kind of memory


def as_draft_length(draft_length: Any) -> DraftLength | None:
    """A draft length that an engine was given: a whole number, `auto`, or None for the default.

    Raises:
      SettingError: it is something else; the range is checked by `check_draft_length`.
    """
    if draft_length is None:
        return None
    if isinstance(draft_length, str):
        if draft_length != "auto":
            raise refusal("draft_length", draft_length, "a whole number or 'auto'")
        return "auto"
    return whole_number("draft_length", draft_length)


def warn_of_long_rows(target: Model, drafter: Drafter | None, max_length: int) -> None:
    """Says in the log, once for each model, that rows may become longer than what target or draft
    model was trained for; models without a `ModelConfig` are not checked."""
    model: Any
    for role, model, effect in (
        ("target", target, "outputs"),
        ("draft model", getattr(drafter, "model", None), "drafts"),
    ):
        config = getattr(model, "config", None)
        if isinstance(config, ModelConfig) and max_length > config.context_length:
            name = f"{role} {getattr(model, 'name', '')}"
            _say_too_long(name, config.context_length, max_length, effect)


@functools.cache
def _say_too_long(model: str, context_length: int, max_length: int, effect: str) -> None:
    _log.warning(
        "max_length %d was given, and the %s was trained for %d tokens; beyond them its %s are "
        "likely to be poor.",
        max_length,
        model,
        context_length,
        effect,
    )


def check_exactness(exactness: Any) -> None:
    """Raises `SettingError` unless an engine offers this promise."""
    if not is_one_of(exactness, get_args(Exactness)):
        raise SettingError(
            f"exactness {shown(exactness)} was given; it must be 'bitwise' (one window width, "
            "equal to the bit) or 'ties' (the narrowest window that serves, equal except at ties)."
        )


def choose_verify_length(
    drafter: Drafter, draft_length: int | None, verify_length: int | None
) -> tuple[int, str]:
    """The number of tokens scored per round, and which of the two settings decides it, in words for
    `does_not_fit`.

    Raises:
      SettingError: the settings contradict each other, or leave no room for drafts.
    """
    if draft_length is not None:
        check_draft_length(draft_length, verify_length)
    default = default_draft_length(drafter)
    if verify_length is not None:
        if draft_length is None and verify_length <= default:
            raise SettingError(
                f"A verify_length of {verify_length} was given, and {drafter.name} drafts "
                f"{default} tokens per round by default; raise it to {default + 1} or more, or "
                "give a draft_length below it."
            )
        return verify_length, f"A verify_length of {verify_length}"
    if draft_length is not None:
        return draft_length + 1, f"A draft_length of {draft_length}"
    return default + 1, f"The default draft_length of {drafter.name}, {default},"


def does_not_fit(given: str, verify_length: int, max_length: int) -> SettingError:
    """The error for a round that does not fit into a row.

    Args:
      given: the setting that decides the verify length, as `choose_verify_length` returns it.
      verify_length: tokens scored per round.
      max_length: as it was given.
    """
    return SettingError(
        f"{given} does not fit a max_length of {max_length}: a round scores {verify_length} tokens,"
        f" and rows have {kv.round_up_to_block(max_length)} slots, so raise the max_length, or "
        f"lower the {'verify_length' if 'verify_length' in given else 'draft_length'}."
    )


def warn_of_unused(drafter: Drafter | None, **settings: Any) -> None:
    """Warns, once in a process, of settings that were given (are not None) and have no effect
    because there is no drafter."""
    for name, value in settings.items():
        if drafter is None and value is not None:
            warn_once(
                f"{name}={value!r} was given without a drafter, so it has no effect; leave it out, "
                "or give a drafter."
            )


def check_draft_length(
    draft_length: int,
    verify_length: int | None,
    *,
    advice: str = "lower it, or raise the verify_length",
) -> None:
    """Raises `SettingError` unless a draft of this length fits the window; None for a window that
    follows from the draft length."""
    if verify_length is None:
        if draft_length < 1:
            raise SettingError(
                f"A draft length of {draft_length} was given; it must be at least 1, so raise it, "
                "or decode without a drafter."
            )
    elif not 1 <= draft_length < verify_length:
        raise SettingError(
            f"A draft length of {draft_length} was given for a verify_length of {verify_length}; "
            "it must be at least 1 and less than the verify_length, which also counts the newest "
            f"committed token, so {advice if draft_length else 'raise it'}."
        )


def check_num_nodes(drafter: Drafter, draft_length: int) -> None:
    """Raises `SettingError` if a drafter is asked for more nodes than it can draft: the extra
    window positions would never hold a draft."""
    if drafter.num_nodes is not None and draft_length > drafter.num_nodes:
        raise SettingError(
            f"A draft length of {draft_length} was given, and {drafter.name} drafts at most "
            f"{drafter.num_nodes} tokens per round; give at most that, or leave it out. (A wider "
            "window is set by verify_length.)"
        )


def default_draft_length(drafter: Drafter | None) -> int:
    """The number of nodes that a drafter drafts by default."""
    num_nodes = None if drafter is None else drafter.num_nodes
    return DEFAULT_DRAFT_LENGTH if num_nodes is None else num_nodes


def choose_tree_depth(drafter: Drafter, num_nodes: int, tree_depth: int | None) -> int:
    """`EngineShape.tree_depth` for a drafter with `num_nodes` nodes: the requested depth, or by
    default that of its trees, 0 for chains.

    Raises:
      SettingError: the drafter's trees are deeper than the requested depth.
    """
    deepest = num_nodes if drafter.max_depth is None else min(drafter.max_depth, num_nodes)
    if tree_depth is None:
        return 0 if drafter.is_chain else deepest
    if tree_depth < deepest and not (drafter.is_chain and tree_depth == 0):
        raise SettingError(
            f"A tree_depth of {tree_depth} was given, and the drafts of {drafter.name} are up to "
            f"{deepest} deep; give at least that, or leave it out."
        )
    return tree_depth


def home_of(params: PyTree) -> jax.sharding.Sharding | None:
    """The single device that holds the parameters, or None.

    A first state on another device would move there in the first call, and every program would be
    compiled twice.
    """
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    homes = {device for array in arrays for device in array.devices()}
    return jax.sharding.SingleDeviceSharding(*homes) if len(homes) == 1 else None


def pinned_memory(home: jax.sharding.Sharding) -> jax.sharding.Sharding | None:
    """Host memory that the device of `home` can copy to and from directly; None if it has none, and
    on a CPU, which is the host."""
    [device] = home.device_set
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or PINNED not in kinds:
        return None
    return home.with_memory_kind(PINNED)
