"""The cost of a FlexDraft round in either mode, by the model of `lab.cost.model`."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.drafters.flexdraft.config import FlexConfig
from jaxspec.lab.cost.devices import Device
from jaxspec.lab.cost.passes import LOGITS_PASSES, Pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexPass:
    """A pass of FlexDraft: a window of the target, mask rows in its deep layers, or both at once,
    where shared weights are read once.

    Attributes:
      config: of the weights; D deep layers of L.
      batch: B, rows.
      window: T, tokens of each row that the target scores; 0 of a pass of mask rows alone.
      num_masks: M, mask rows of each row.
      num_drafts: mask rows of each row whose calibrated logits are computed.
      context: S, live slots of each row.
      itemsize: bytes of a parameter and of a component of the KV cache.
      block: see `Pass`.
      kv_itemsize: see `Pass`.
    """

    config: FlexConfig
    batch: int
    window: int = 0
    num_masks: int = 0
    num_drafts: int = 0
    context: float
    itemsize: int = 2
    block: int | None = None
    kv_itemsize: float | None = None

    @property
    def layer_rows(self) -> int:
        """Layers that each row of the batch runs, times the tokens and mask rows in them."""
        layers = self.config.target.num_layers
        return self.window * layers + self.num_masks * self.config.num_deep_layers

    @property
    def num_steps(self) -> int:
        """The number of sequential steps: for mask rows beside a window, only their attention
        counts."""
        deep = self.config.num_deep_layers if self.num_masks else 0
        num_steps = self._pass.num_steps if self.window else 0
        num_heads = 2 * (self.num_drafts > 0)  # the head and the calibrator
        return num_steps + deep * (1 + self._pass.num_blocks) + num_heads

    def kernels(self) -> tuple[tuple[float, float], ...]:
        """Bytes and FLOPs of the layers' products, of the heads, and of attention."""
        c, deep = self.config.target, self.config.num_deep_layers if self.num_masks else 0
        products, head, attention = self._pass.kernels() if self.window else ((0.0, 0.0),) * 3
        of_layer = self._pass.layer_params / c.num_layers
        feed_forward = 3 * c.width * c.feed_forward_width
        masks = self.batch * self.num_masks
        # Beside a window the feed-forward has been read; the draft projectors never have.
        new_params = deep * (of_layer - feed_forward * (self.window > 0))
        calibrator = (2 * c.width + c.vocab_size) * self.config.rank
        heads = (self._pass.head_params + calibrator) * (self.num_drafts > 0)
        drafts = self.batch * self.num_drafts
        kv_itemsize = self.itemsize if self.kv_itemsize is None else self.kv_itemsize
        per_slot = 2 * c.num_kv_heads * c.head_size * kv_itemsize
        num_slots = self._pass.num_blocks * self.block if self.block else self.context
        return (
            (
                products[0] + new_params * self.itemsize,
                products[1] + 2.0 * deep * of_layer * masks,
            ),
            (
                head[0] + heads * self.itemsize + LOGITS_PASSES * 4 * drafts * c.vocab_size,
                head[1] + 2.0 * heads * drafts,
            ),
            (
                attention[0] + deep * per_slot * (self.batch * num_slots + masks),
                attention[1] + 4.0 * deep * masks * num_slots * c.num_query_heads * c.head_size,
            ),
        )

    @property
    def _pass(self) -> Pass:
        return Pass(
            config=self.config.target,
            batch=self.batch,
            window=self.window,
            context=self.context,
            itemsize=self.itemsize,
            block=self.block,
            kv_itemsize=self.kv_itemsize,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexPair:
    """A target that drafts for itself (FlexDraft, 2605.20022), in one of two modes.

    Attributes:
      config: of the weights, with blocks of K mask rows.
      device: constants for all passes, and `round_s`.
      itemsize: bytes of a parameter.
      block: see `Pass`.
      kv_itemsize: see `Pass`.
    """

    config: FlexConfig
    device: Device
    itemsize: int = 2
    block: int | None = None
    kv_itemsize: float | None = None

    def passes(
        self, mode: str, *, batch: int, draft_length: int, context: float
    ) -> tuple[FlexPass, ...]:
        """The passes of a round that scores T = `draft_length` + 1 tokens.

        `parallel`: the target's, in which T groups of K mask rows ride. `sequential`: one group of
        K mask rows, then the target's. The drafts' logits are computed between rounds or passes
        either way.
        """
        window, block_size = draft_length + 1, self.config.block_size
        shared: dict[str, Any] = {
            "config": self.config,
            "batch": batch,
            "context": context + window,
            "itemsize": self.itemsize,
            "block": self.block,
            "kv_itemsize": self.kv_itemsize,
        }
        scored = FlexPass(window=window, **shared)
        if mode == "parallel":
            num_groups = min(window, block_size)
            return (
                FlexPass(num_drafts=draft_length, **shared),
                dataclasses.replace(scored, num_masks=num_groups * block_size),
            )
        return FlexPass(num_masks=block_size, num_drafts=draft_length, **shared), scored

    def round_s(self, mode: str, *, batch: int, draft_length: int, context: float) -> float:
        """Seconds of a round; see `passes`."""
        works = self.passes(mode, batch=batch, draft_length=draft_length, context=context)
        return sum(self.device.pass_s(work) for work in works) + self.device.round_s

    def plain_s(self, *, batch: int, context: float) -> float:
        """Seconds of a step of window-1 plain decoding."""
        step = FlexPass(
            config=self.config,
            batch=batch,
            window=1,
            context=context + 1,
            itemsize=self.itemsize,
            block=self.block,
            kv_itemsize=self.kv_itemsize,
        )
        return self.device.pass_s(step) + self.device.round_s

    def crossing_batch(
        self, *, draft_length: int, context: float, largest: int = 256
    ) -> int | None:
        """The smallest batch at which the sequential mode is the faster one; None if it is at none
        up to the `largest`. The drafts are the same, so acceptance does not matter."""
        where: dict[str, Any] = {"draft_length": draft_length, "context": context}
        for batch in range(1, largest + 1):
            parallel_s = self.round_s("parallel", batch=batch, **where)
            if self.round_s("sequential", batch=batch, **where) < parallel_s:
                return batch
        return None
