"""What a round is made of: models, rules and shapes of one engine, without parameters."""

from __future__ import annotations

import dataclasses

from jaxspec.cache import layouts
from jaxspec.cache.layouts import Layout
from jaxspec.decode.state import LogprobsConfig
from jaxspec.drafters.base import Drafter
from jaxspec.models.base import Model
from jaxspec.schedulers.base import Scheduler
from jaxspec.schedulers.static import Static
from jaxspec.telemetry.trace import TraceConfig
from jaxspec.types import EngineShape, PyTree
from jaxspec.verifiers.base import Verifier


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RoundParts:
    """The static argument of the functions in `round`, `plain` and `loop`.

    Their parameters are an argument of their own, `{"target": ..., "drafter": ...}` everywhere; see
    `params_of`. Without a drafter the window has one token and every round is a plain step.

    Attributes:
      target: the model whose output is decoded.
      drafter: what proposes tokens.
      verifier: what decides how much of a draft is kept.
      scheduler: which rows take part in a round.
      shape: that of the batch, with the widest window that the state is used with.
      num_stop_tokens: room for stop tokens per row.
      layout: the layout of the target's cache; a drafter's own cache is always ragged.
      logprobs: which log-probabilities are kept, if any.
      trace: what is recorded of each round, if anything.
      verify_length: tokens scored per round, at most `shape.verify_length`, which is the default;
        see `at`.
      skips_padding: whether a round asks its target only for what was drafted, of rows that have
        not ended (`Window.num_live`); see `buckets.may_skip_padding`.
      is_resting: whether rounds leave the draft steps out and draft nothing; see `resting`.
    """

    target: Model
    drafter: Drafter
    verifier: Verifier
    scheduler: Scheduler = dataclasses.field(default_factory=Static)
    shape: EngineShape
    num_stop_tokens: int
    layout: Layout = "ragged"
    logprobs: LogprobsConfig | None = None
    trace: TraceConfig | None = None
    verify_length: int | None = None
    skips_padding: bool = False
    is_resting: bool = False

    @property
    def resident_shape(self) -> EngineShape:
        """The shape of the state, whose rows are all resident ones and not only those of the
        batch."""
        num_rows = self.scheduler.num_residents(self.shape.batch_size)
        return dataclasses.replace(self.shape, batch_size=num_rows)

    @property
    def round_shape(self) -> EngineShape:
        """The shape of a round."""
        verify_length = self.verify_length or self.shape.verify_length
        return dataclasses.replace(self.shape, verify_length=verify_length)

    @property
    def draft_depth(self) -> int:
        """D, the greatest depth of a draft."""
        num_nodes, max_depth = self.shape.num_nodes, self.drafter.max_depth
        return num_nodes if max_depth is None else min(max_depth, num_nodes)

    @property
    def is_plain(self) -> bool:
        """Whether rounds are plain steps."""
        return self.round_shape.verify_length == 1

    @property
    def longest_prompt(self) -> int:
        """The most prompt tokens that leave room for one round."""
        return layouts.longest_prompt(
            self.layout,
            max_length=self.shape.max_length,
            verify_length=self.shape.verify_length,
        )

    def with_variant(self, variant: int) -> RoundParts:
        """The parts of rounds over the same state with one of the drafter's `variants`; 0 is the
        drafter itself."""
        if variant == 0:
            return self
        return dataclasses.replace(self, drafter=self.drafter.variants[variant - 1])

    @property
    def resting(self) -> RoundParts:
        """The parts of rounds of the same width that draft nothing, over the same state. The
        drafter lags after them, as it does after plain steps."""
        return dataclasses.replace(self, is_resting=True)

    def at(self, verify_length: int) -> RoundParts:
        """The parts of rounds of `verify_length` tokens over the same state.

        A narrower window is laid out for what the drafter drafts in it: if these are chains, for no
        trees.
        """
        if verify_length == self.shape.verify_length:
            return self
        drafter, shape = self.drafter, self.shape
        if verify_length > 1:
            drafter = drafter.within(verify_length - 1)
        if drafter.is_chain and not self.drafter.is_chain:
            shape = dataclasses.replace(shape, tree_depth=0)
        return dataclasses.replace(self, drafter=drafter, shape=shape, verify_length=verify_length)


def params_of(parts: RoundParts) -> PyTree:
    """The parameters that target and drafter were made with."""
    return {"target": parts.target.params, "drafter": parts.drafter.params}
