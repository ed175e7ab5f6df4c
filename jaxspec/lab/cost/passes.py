"""Forward passes in the cost model: bytes, FLOPs, and sequential steps."""

from __future__ import annotations

import dataclasses
import math

from jaxspec.models.config import ModelConfig

LOGITS_PASSES = 2  # fp32 logits are written once and read once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass of a model.

    Attributes:
      config: the model's.
      batch: B, rows.
      window: T, tokens of each row.
      context: S, live slots of each row, the window's own included.
      itemsize: bytes of a parameter and of a component of the KV cache.
      block: slots that attention reads at a time, one block after the other, so that partly filled
        ones are counted whole; None where one kernel reads them all.
      kv_itemsize: bytes of a component of the KV cache, scales included, where it is not
        `itemsize`.
      has_head: whether it computes logits; prefill stops at the hidden states.
    """

    config: ModelConfig
    batch: int
    window: int
    context: float
    itemsize: int = 2
    block: int | None = None
    kv_itemsize: float | None = None
    has_head: bool = True

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return self.batch * self.window

    @property
    def layer_params(self) -> int:
        """Parameters of the products of all layers."""
        c = self.config
        attention = c.width * (2 * c.num_query_heads + 2 * c.num_kv_heads) * c.head_size
        return c.num_layers * (attention + 3 * c.width * c.feed_forward_width)

    @property
    def head_params(self) -> int:
        """Parameters of the product with the head; 0 without it."""
        return self.config.width * self.config.num_rows if self.has_head else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the pass reads. It reads only B T rows of the embedding, which are
        not counted."""
        return (self.layer_params + self.head_params) * self.itemsize

    @property
    def kv_bytes(self) -> float:
        """Bytes of live KV that the pass reads, and of the window's KV that it writes."""
        c = self.config
        itemsize = self.itemsize if self.kv_itemsize is None else self.kv_itemsize
        per_slot = 2 * c.num_layers * c.num_kv_heads * c.head_size * itemsize
        return per_slot * (self.batch * self._slots + self.num_tokens)

    @property
    def num_bytes(self) -> float:
        """Bytes that must be read: weights and live KV."""
        return self.weight_bytes + self.kv_bytes

    @property
    def num_flops(self) -> float:
        """FLOPs of all products, two per multiply-add."""
        return sum(flops for _, flops in self.kernels())

    @property
    def num_blocks(self) -> int:
        """The number of KV blocks that attention reads one after another; 0 if one kernel reads
        all."""
        return math.ceil(self.context / self.block) if self.block else 0

    @property
    def num_steps(self) -> int:
        """The number of sequential steps: layers, the blocks of each, the head if there is one."""
        return self.config.num_layers * (1 + self.num_blocks) + self.has_head

    @property
    def _slots(self) -> float:
        return self.num_blocks * self.block if self.block else self.context

    def kernels(self) -> tuple[tuple[float, float], ...]:
        """Bytes and FLOPs of the layers' products, of the head, and of attention."""
        c, num_tokens = self.config, self.num_tokens
        logits_bytes = LOGITS_PASSES * 4 * num_tokens * c.vocab_size * self.has_head
        head_bytes = self.head_params * self.itemsize + logits_bytes
        attention_flops = 4 * num_tokens * self._slots * c.num_query_heads * c.head_size
        return (
            (self.layer_params * self.itemsize, 2.0 * self.layer_params * num_tokens),
            (head_bytes, 2.0 * self.head_params * num_tokens),
            (self.kv_bytes, attention_flops * c.num_layers),
        )
