"""Window buckets: the window widths that an engine switches between, down to plain decoding.

A round that drafts n tokens needs a window of n + 1; a wider one only costs time. The state is made
for the widest window of an engine; a narrower round writes less of it. With most kernels a token's
rounding depends on the width of the window it was scored in (a different matrix shape sums in a
different order); outputs then agree with those of one window except at ties within rounding, and
only `exactness="ties"` uses several. With kernels whose bits do not depend on the width, every
engine does.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxspec.decode.parts import RoundParts
from jaxspec.decode.settings import Exactness
from jaxspec.decode.state import form_of
from jaxspec.errors import SettingError
from jaxspec.models.base import kernels_of
from jaxspec.models.width_probe import is_width_invariant
from jaxspec.types import PyTree


def window_buckets(widest: int) -> tuple[int, ...]:
    """The windows that are compiled: 1 (plain decoding), those of 2, 4, 8, ... drafts, and the
    widest; so no draft is scored in a window twice as wide as it needs."""
    windows, draft_length = {1, widest}, 2
    while draft_length + 1 < widest:
        windows.add(draft_length + 1)
        draft_length *= 2
    return tuple(sorted(windows))


def choose_windows(
    parts: RoundParts, *, exactness: Exactness, is_adaptive: bool, keeps_bits: bool
) -> tuple[int, ...]:
    """The windows for which an engine compiles rounds, from the narrowest to the widest, which is
    that of `parts`.

    Args:
      parts: the engine's.
      exactness: the requested promise.
      is_adaptive: whether the draft length changes from round to round. If it does not, plain
        decoding is the only narrower window that `bitwise` uses.
      keeps_bits: the result of `keeps_bits_at_every_width`.

    Raises:
      SettingError: `ties`, with a drafter that keeps a state that depends on the window.
    """
    widest = parts.shape.verify_length
    if parts.is_plain or not (exactness == "ties" or keeps_bits):
        return (widest,)
    windows = window_buckets(widest) if exactness == "ties" or is_adaptive else (1, widest)
    if all(_drafter_state(parts, length) == _drafter_state(parts, widest) for length in windows):
        return windows
    if exactness == "ties":
        raise SettingError(
            f'exactness="ties" was given with the drafter {parts.drafter.name}, which keeps a '
            "state that depends on the window and so cannot be used at several; leave the "
            "exactness out, or make the drafter's `init` independent of `shape.verify_length`."
        )
    return (widest,)


def _drafter_state(parts: RoundParts, verify_length: int) -> tuple[PyTree, list[tuple]]:
    """The structure, shapes and dtypes of the drafter's state in an engine with this window."""
    shape = dataclasses.replace(parts.resident_shape, verify_length=verify_length)
    return form_of(jax.eval_shape(lambda: parts.drafter.init(shape)))


def keeps_bits_at_every_width(parts: RoundParts) -> bool:
    """Whether the output of `parts` on one device is the same, bit for bit, in every window up to
    its own: the verifier draws the target's own tokens, the layout is ragged, and neither the
    target's bits nor the drafter's `score` depend on the window. Callers rule out meshes."""
    return (
        parts.verifier.is_coupled
        and parts.layout == "ragged"
        and (parts.drafter.score is None or parts.drafter.score_keeps_bits)
        and _has_invariant_target(parts)
    )


def may_skip_padding(parts: RoundParts) -> bool:
    """Whether rounds may leave out what nobody drafted, and rows that have ended: the kernels can,
    and the target's bits do not depend on how much is left out. Not in the aligned layout, which
    computes what the published systems compute."""
    return (
        parts.layout == "ragged"
        and kernels_of(parts.target).skips_padding
        and (parts.is_plain or _has_invariant_target(parts))
    )


def _has_invariant_target(parts: RoundParts) -> bool:
    return all(
        is_width_invariant(
            parts.target,
            batch_size=parts.shape.batch_size,
            verify_length=parts.shape.verify_length,
            tree_depth=tree_depth,
        )
        for tree_depth in {0, parts.shape.tree_depth}  # narrow windows may hold chains
    )
