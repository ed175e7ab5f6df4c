"""What FlexDraft adds to a target: its sizes, and its parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.errors import ModelError
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig

LARGEST = 2**20  # block size, and rank
# The layer parameters of which mask rows have their own versions; all others are the target's.
DRAFT_PROJECTORS = ("qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexConfig:
    """Architecture of FlexDraft's weights (2605.20022). Hashable, so that it can be static under
    `jax.jit`.

    Attributes:
      target: the target's architecture.
      num_deep_layers: D, the last layers of the target that have draft projectors; mask rows enter
        before the first of them, layer s = L - D.
      block_size: K, mask rows of a group. The first is at the position of the target's next token,
        the others draft the K - 1 tokens after it.
      rank: the rank of the calibrator, which is the width of its hidden layer.

    Raises:
      ModelError: a number is out of range.
    """

    target: ModelConfig
    num_deep_layers: int
    block_size: int
    rank: int

    def __post_init__(self):
        for name, least, most in (
            ("num_deep_layers", 1, self.target.num_layers),
            ("block_size", 2, LARGEST),
            ("rank", 1, LARGEST),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                layers = ", the target's layers" if name == "num_deep_layers" else ""
                raise ModelError(
                    f"The FlexDraft weights' {name} is {value!r}; it must be a whole number, "
                    f"{least} to {most}{layers}, so check their configuration."
                )

    @property
    def first_deep_layer(self) -> int:
        """s, the layer that mask rows enter at."""
        return self.target.num_layers - self.num_deep_layers


def flex_config(
    target: ModelConfig,
    *,
    num_deep_layers: int | None = None,
    block_size: int = 16,
    rank: int | None = None,
) -> FlexConfig:
    """The paper's sizes for a target: 10 of Qwen3-8B's 36 layers and the same fraction of other
    models', blocks of 16, and a calibrator of rank 512, or an eighth of the width if that is less
    (but at least 64)."""
    if num_deep_layers is None:
        num_deep_layers = max(round(target.num_layers * 10 / 36), 1)
    if rank is None:
        rank = max(min(512, target.width // 8), 64)
    return FlexConfig(
        target=target, num_deep_layers=num_deep_layers, block_size=block_size, rank=rank
    )


def param_shapes(config: FlexConfig) -> dict[str, Any]:
    """The parameter pytree with a shape tuple at each leaf.

    `layers` are the draft projectors of layers s to L - 1, named and shaped as the target's own;
    `mask` is the vector that every mask row enters as. The calibrator adds
    `silu(embedding(bonus) @ embedding + hidden @ hidden + hidden_bias) @ logits + logits_bias` to
    the logits of a mask row, `hidden` after the target's final norm.
    """
    width, vocab_size, rank = config.target.width, config.target.vocab_size, config.rank
    layer = decoder.param_shapes(config.target)["layers"][0]
    projectors = {name: layer[name] for name in DRAFT_PROJECTORS if name in layer}
    return {
        "layers": tuple(dict(projectors) for _ in range(config.num_deep_layers)),
        "mask": (width,),
        "calibrator": {
            "embedding": (width, rank),
            "hidden": (width, rank),
            "hidden_bias": (rank,),
            "logits": (rank, vocab_size),
            "logits_bias": (vocab_size,),
        },
    }
