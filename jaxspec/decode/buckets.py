"""Several windows over one state: what `exactness="ties"` changes between, down to plain decoding.

A round that drafts n tokens needs a window of n + 1, and a wider one only costs time. The widest
window of an engine makes the state; a narrower round writes less of it. Which window a token was
scored in shows in its rounding (another matrix shape sums in another order), so outputs agree with
those of one window except at ties within rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxspec.decode.loop import SpeculativeLoop
from jaxspec.decode.plain import PlainLoop
from jaxspec.drafters.base import EngineShape
from jaxspec.errors import SettingError
from jaxspec.types import DecodeState, PyTree


def window_buckets(widest: int) -> tuple[int, ...]:
    """The windows that are compiled: 1 (plain decoding), those of 2, 4, 8, ... drafts, and the
    widest; so no draft is scored in twice the window it needs."""
    windows, draft_length = {1, widest}, 2
    while draft_length + 1 < widest:
        windows.add(draft_length + 1)
        draft_length *= 2
    return tuple(sorted(windows))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NarrowLoop(SpeculativeLoop):
    """A speculative loop that scores `verify_length` tokens per round, over the state of a wider
    one with the same `shape`. With a window of 1 it takes the steps of `PlainLoop`, and the drafter
    rests.

    Attributes:
      verify_length: T of a round, at most `shape.verify_length`.
    """

    verify_length: int

    @functools.cached_property
    def _steps(self) -> SpeculativeLoop | PlainLoop:
        """The loop whose rounds these are, made for this window alone."""
        shape = dataclasses.replace(self.shape, verify_length=self.verify_length)
        if self.verify_length > 1:
            return SpeculativeLoop(**{**_settings(self), "shape": shape})
        return PlainLoop(
            target=self.target,
            scheduler=self.scheduler,
            shape=shape,
            num_stop_tokens=self.num_stop_tokens,
            logprobs=self.logprobs,
            layout=self.layout,
            trace=self.trace,
        )

    def round(self, params: PyTree, state: DecodeState) -> DecodeState:
        """One round at this window."""
        steps = self._steps
        if isinstance(steps, PlainLoop):
            return steps.step(params["target"], state)
        return steps.round(params, state)


def make_buckets(loop: SpeculativeLoop) -> dict[int, SpeculativeLoop]:
    """A loop for each of `window_buckets`, all over the state of `loop`, the widest.

    Raises:
      SettingError: the drafter keeps a state that depends on the window.
    """
    ladder: dict[int, SpeculativeLoop] = {}
    widest = loop.shape.verify_length
    for verify_length in window_buckets(widest):
        if verify_length == widest:
            ladder[verify_length] = loop
            continue
        shape = dataclasses.replace(loop.held, verify_length=verify_length)
        if _shapes(loop, shape) != _shapes(loop, loop.held):
            raise SettingError(
                f'exactness="ties" was given with the drafter {loop.drafter.name}, which keeps a '
                "state that depends on the window and so cannot be used at several; leave the "
                "exactness out, or make the drafter's `init` independent of `shape.verify_length`."
            )
        ladder[verify_length] = NarrowLoop(**_settings(loop), verify_length=verify_length)
    return ladder


def _settings(loop: SpeculativeLoop) -> dict[str, Any]:
    """What a loop was made with."""
    return {field.name: getattr(loop, field.name) for field in dataclasses.fields(SpeculativeLoop)}


def _shapes(loop: SpeculativeLoop, shape: EngineShape) -> tuple[Any, Any]:
    """Structure, shapes and dtypes of the drafter's state."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: loop.drafter.init(shape)))
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
