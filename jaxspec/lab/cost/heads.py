"""The predicted cost of drafting with heads for given shapes, by the model of `lab.cost.model`."""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxspec.drafters.heads.config import HeadsConfig, Kind, heads_config, param_shapes
from jaxspec.lab.cost.model import LOGITS_PASSES, Device, Pair, Pass
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsDraft:
    """The draft stage of heads: a level for each head, each after the one before it.

    Every level of regressive heads reads the target's head again; Medusa's are one product. Weights
    of an attention decoder that heads share are read by each level. The augmenting block runs when
    a round is committed, see `block_pass`.

    Attributes:
      config: of the heads.
      batch: B, rows.
      nodes_per_level: how many nodes of a row each level expands.
      itemsize: bytes of a parameter.
    """

    config: HeadsConfig
    batch: int
    nodes_per_level: int = 1
    itemsize: int = 2

    @property
    def num_steps(self) -> int:
        """The number of sequential steps: a head's own products, and the target's head."""
        return 2 * self.config.num_heads if self.config.is_regressive else 2

    def kernels(self) -> tuple[tuple[float, float], ...]:
        """Bytes and FLOPs of the heads' own products, of the target's head, and of no attention."""
        c, num_nodes = self.config, self.batch * self.nodes_per_level
        own = {name: shapes for name, shapes in param_shapes(c).items() if name != "layers"}
        leaves = jax.tree.leaves(own, is_leaf=decoder.is_shape)
        params = sum(math.prod(shape) for shape in leaves)
        if c.kind == "clover" and c.shares_connection and "connections" in own:
            connection = jax.tree.leaves(own["connections"][0], is_leaf=decoder.is_shape)
            params += (c.num_heads - 1) * sum(math.prod(shape) for shape in connection)
        if c.kind == "clover2":
            later = {name: own[name] for name in ("connection", "next")}
            leaves = jax.tree.leaves(later, is_leaf=decoder.is_shape)
            params += (c.num_heads - 2) * sum(math.prod(shape) for shape in leaves)
        head = c.width * c.vocab_size
        num_reads = c.num_heads if c.is_regressive else 1
        logits_bytes = LOGITS_PASSES * 4 * num_nodes * c.vocab_size * c.num_heads
        return (
            (params * self.itemsize, 2.0 * params * num_nodes),
            (head * num_reads * self.itemsize + logits_bytes, 2.0 * head * num_nodes * c.num_heads),
            (0.0, 0.0),
        )


def predicted_draft(
    kind: Kind, pair: Pair, device: Device, *, batch: int, context: int, num_levels: int
) -> dict[str, float]:
    """Milliseconds of the draft stage of heads and of a draft model on a pair's shapes, for chains
    of `num_levels` tokens; the block's pass when the round is committed; and the target's pass.

    Args:
      kind: of heads, with the target's head.
      pair: target and draft model.
      device: see `lab.cost.model.DEVICES`.
      batch: B, rows.
      context: live slots per row.
      num_levels: drafted tokens.
    """
    assert pair.draft is not None
    config = heads_config(kind, pair.target, num_heads=num_levels)
    heads = HeadsDraft(config=config, batch=batch, itemsize=pair.itemsize)
    block_s = 0.0
    if config.block is not None:
        block_s = device.pass_s(_block_pass(config.block, batch, num_levels + 1, context, pair))
    steps_s = pair.draft_step_s(batch=batch, context=context, window=2)
    steps_s += (num_levels - 1) * pair.draft_step_s(batch=batch, context=context)
    target_s = pair.target_s(batch=batch, window=num_levels + 1, context=context)
    return {
        "heads_ms": 1e3 * device.pass_s(heads),
        "block_ms": 1e3 * block_s,
        "draft_model_ms": 1e3 * steps_s,
        "target_ms": 1e3 * target_s,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layers(Pass):
    """A pass of layers alone: no head follows."""

    @property
    def head_params(self) -> int:
        return 0

    def kernels(self) -> tuple[tuple[float, float], ...]:
        layers, _, attention = super().kernels()
        return layers, (0.0, 0.0), attention


def _block_pass(block: ModelConfig, batch: int, window: int, context: int, pair: Pair) -> Pass:
    return _Layers(
        config=block,
        batch=batch,
        window=window,
        context=context + window,
        itemsize=pair.itemsize,
        block=pair.block,
    )
