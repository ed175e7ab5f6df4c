"""The cost of a round and the gain of speculation: a roofline with four constants of a device.

A forward pass of a model with L layers over B rows, a window of T tokens and S live slots takes

    max(W / bandwidth, 2 P B T / rate)                  products of the layers, weights read once
    + max((W_head + 8 B T V) / bandwidth, ... / rate)   head, logits written and read in fp32
    + max(KV / kv_bandwidth, 4 B T S Q H L / rate)      attention over the live slots
    + (L (1 + S / block) + 1) step_s                    what runs one after the other: the layers,
                                                        their blocks of KV, the head

and a speculative round N draft passes, the first of two tokens and the others of one (of a tree one
pass per level, of the tokens that it expands), a target pass of N + 1, and `round_s` for verifying
and committing. A sum of maxima per kind of kernel is tighter than one maximum of sums (Williams et
al. 2009 for the roofline; Yuan et al., 2402.16363, for its use on decoding). The constants come
from a measured grid of passes (`fit_device`) or from a datasheet (`DEVICES`).

Speed-ups follow Leviathan et al., 2211.17192: if a is the probability that a drafted token is
accepted, a round of N drafts emits (1 - a^(N + 1)) / (1 - a) tokens. Measured acceptance by
position replaces this if available.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.drafters.growth import Tree
from jaxspec.lab.cost.devices import Timed
from jaxspec.lab.cost.passes import Pass
from jaxspec.models.config import ModelConfig

LONGEST_DRAFT = 16  # longest draft length that is searched


def geometric(acceptance: float, draft_length: int) -> tuple[float, ...]:
    """Cumulative acceptance by position if every drafted token is accepted with the same
    probability."""
    return tuple(acceptance ** (index + 1) for index in range(draft_length))


def emitted_per_round(cumulative: Sequence[float]) -> float:
    """Tokens that a round emits, including the target's own: 1 + sum of the cumulative acceptance.

    Args:
      cumulative: probability that at least n + 1 drafted tokens are accepted, for each position n.
    """
    return 1.0 + sum(cumulative)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafter, each with its own device constants.

    On a CPU whose caches hold one model but not the other, constants fitted to each of them predict
    better than one device for both.

    Attributes:
      target: architecture of the target.
      target_device: constants for its passes, and `round_s`.
      draft: architecture of a draft model; None if the drafter runs no model (n-gram).
      draft_device: constants for its passes.
      itemsize: bytes of a parameter.
      block: see `Pass`.
      drafter_s: seconds per round of a drafter that runs no model.
      draft_itemsize: bytes of a parameter of the draft model, if different from `itemsize`.
      kv_itemsize: the target's, see `Pass`.
      draft_kv_itemsize: the draft model's, likewise.
      draft_context: most slots that the draft model keeps; None keeps all.
      tree: what the draft model drafts, level by level; None for chains.
    """

    target: ModelConfig
    target_device: Timed
    draft: ModelConfig | None
    draft_device: Timed
    itemsize: int = 2
    block: int | None = None
    drafter_s: float = 0.0
    draft_itemsize: int | None = None
    kv_itemsize: float | None = None
    draft_kv_itemsize: float | None = None
    draft_context: int | None = None
    tree: Tree | None = None

    def target_s(self, *, batch: int, window: int, context: float) -> float:
        """Seconds of a target pass over `window` tokens after `context` slots."""
        scored = self._pass(self.target, batch, window, context + window)
        return self.target_device.pass_s(dataclasses.replace(scored, kv_itemsize=self.kv_itemsize))

    def draft_step_s(self, *, batch: int, context: float, window: int = 1) -> float:
        """Seconds of one draft step, over `window` tokens."""
        if self.draft is None:
            return 0.0
        kept = context + 1 if self.draft_context is None else min(context + 1, self.draft_context)
        step = dataclasses.replace(
            self._pass(self.draft, batch, window, kept),
            itemsize=self.draft_itemsize or self.itemsize,
            kv_itemsize=self.draft_kv_itemsize,
        )
        return self.draft_device.pass_s(step)

    def plain_s(self, *, batch: int, context: float) -> float:
        """Seconds of a step of window-1 plain decoding."""
        step_s = self.target_s(batch=batch, window=1, context=context)
        return step_s + self.target_device.round_s

    def round_s(self, *, batch: int, draft_length: int, context: float) -> float:
        """Seconds of a speculative round of `draft_length` drafts (for a tree, nodes)."""
        target_s = self.target_s(batch=batch, window=draft_length + 1, context=context)
        draft_s = self.drafter_s + sum(
            self.draft_step_s(batch=batch, context=context, window=num_tokens)
            for num_tokens in self.draft_windows(draft_length)
        )
        return draft_s + target_s + self.target_device.round_s

    def draft_windows(self, draft_length: int) -> tuple[int, ...]:
        """Tokens per row that each draft step of a round reads. The first reads two: the newest,
        and the one before it, which a fully accepted draft leaves unread. The others read the
        token before, or the tokens that a level of the tree expands."""
        if not draft_length:
            return ()
        if self.tree is None:
            return (2, *(draft_length - 1) * (1,))
        within = self.tree.within(draft_length)
        num_levels = min(within.max_depth, draft_length)
        return (2, *(num_levels - 1) * (within.num_expanded,))

    def speed_up(self, *, batch: int, context: float, cumulative: Sequence[float]) -> float:
        """Speed-up over window-1 plain decoding, at the draft length `len(cumulative)`."""
        return self.speed_up_of(
            emitted_per_round(cumulative),
            batch=batch,
            context=context,
            draft_length=len(cumulative),
        )

    def speed_up_of(self, emitted: float, *, batch: int, context: float, **of_round: Any) -> float:
        """Speed-up over window-1 plain decoding, for rounds that emit this many tokens; see
        `round_s`."""
        round_s = self.round_s(batch=batch, context=context, **of_round)
        return emitted * self.plain_s(batch=batch, context=context) / round_s

    def best_draft_length(
        self, *, batch: int, context: float, acceptance: float | Sequence[float]
    ) -> tuple[int, float]:
        """Draft length with the largest predicted speed-up, by search, and that speed-up; (0, 1.0)
        if plain decoding is predicted to be fastest.

        Args:
          acceptance: the same for every token, searched up to `LONGEST_DRAFT`; or measured
            cumulative acceptance by position, searched up to its length.
        """
        if isinstance(acceptance, (int, float)):
            acceptance = geometric(acceptance, LONGEST_DRAFT)
        best = (0, 1.0)
        for length in range(1, len(acceptance) + 1):
            gain = self.speed_up(batch=batch, context=context, cumulative=acceptance[:length])
            best = max(best, (length, gain), key=lambda pair: pair[1])
        return best

    def _pass(self, config: ModelConfig, batch: int, window: int, context: float) -> Pass:
        return Pass(
            config=config,
            batch=batch,
            window=window,
            context=context,
            itemsize=self.itemsize,
            block=self.block,
        )
