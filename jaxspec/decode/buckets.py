"""Window buckets: the windows between which `exactness="ties"` changes, down to plain decoding.

A round that drafts n tokens needs a window of n + 1, and a wider one only costs time. The widest
window of an engine makes the state; a narrower round writes less of it. Which window a token was
scored in shows in its rounding (another matrix shape sums in another order), so outputs agree with
those of one window except at ties within rounding.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.state import form_of
from jaxspec.errors import SettingError
from jaxspec.types import EngineShape, PyTree


def window_buckets(widest: int) -> tuple[int, ...]:
    """The windows that are compiled: 1 (plain decoding), those of 2, 4, 8, ... drafts, and the
    widest; so no draft is scored in twice the window it needs."""
    windows, draft_length = {1, widest}, 2
    while draft_length + 1 < widest:
        windows.add(draft_length + 1)
        draft_length *= 2
    return tuple(sorted(windows))


def make_buckets(loop: DecodeLoop) -> dict[int, DecodeLoop]:
    """A loop for each of `window_buckets`, all over the state of `loop`, the widest.

    Raises:
      SettingError: the drafter keeps a state that depends on the window.
    """
    widest = loop.resident_shape
    buckets = window_buckets(widest.verify_length)
    for verify_length in buckets:
        shape = dataclasses.replace(widest, verify_length=verify_length)
        if _drafter_state(loop, shape) != _drafter_state(loop, widest):
            raise SettingError(
                f'exactness="ties" was given with the drafter {loop.drafter.name}, which keeps a '
                "state that depends on the window and so cannot be used at several; leave the "
                "exactness out, or make the drafter's `init` independent of `shape.verify_length`."
            )
    return {verify_length: loop.at(verify_length) for verify_length in buckets}


def _drafter_state(loop: DecodeLoop, shape: EngineShape) -> tuple[PyTree, list[tuple]]:
    """The form of the drafter's state."""
    return form_of(jax.eval_shape(lambda: loop.drafter.init(shape)))
