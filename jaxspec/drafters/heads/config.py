"""What heads are made of: their kind, their sizes, and their parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

from jaxspec.errors import ModelError
from jaxspec.models import decoder
from jaxspec.models.config import MAX_LAYERS, ModelConfig

Kind: TypeAlias = Literal["medusa", "hydra", "clover", "clover2"]
Connection: TypeAlias = Literal["attention", "mlp", "none"]
Gate: TypeAlias = Literal["dot", "cosine"]
BlockPart: TypeAlias = Literal["whole", "attention"]

# Fields that may differ from their defaults only for some kinds.
_FIELDS_OF_KINDS: dict[str, tuple[Kind, ...]] = {
    "num_layers": ("medusa",),
    "connection": ("clover",),
    "shares_connection": ("clover",),
    "has_normed_inputs": ("clover",),
    "block_part": ("clover",),
    "gate": ("clover", "clover2"),
    "num_gate_heads": ("clover", "clover2"),
    "has_silu": ("clover", "clover2"),
}
# The parameters of a layer that a block with attention only does not have.
_FEED_FORWARD = frozenset({"feed_forward_norm", "gate_up", "down", "post_feed_forward_norm"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Architecture of heads. Hashable, so that it can be static under `jax.jit`.

    Attributes:
      kind: `medusa` (2401.10774), `hydra` (2402.05109), `clover` (2405.00263) or `clover2`
        (2408.00264).
      width: E of the target.
      vocab_size: V of the target.
      num_heads: how many tokens are proposed one after another.
      norm_epsilon: of the RMS norms.
      num_layers: residual blocks of each head; Medusa only.
      shares_head: whether logits are the target's head's; otherwise every head has its own. Only
        Medusa and Hydra may have their own.
      num_head_tokens: how many tokens heads have logits of, where those are not all; the parameter
        `token_map` says which they are, and all others are never proposed. With the target's head,
        these columns of it are copied, which is a small part of what a level reads otherwise.
      connection: how a token that was proposed reaches the next head of Clover: by the attention
        decoder, by a residual block of as many inputs (`mlp`), or not at all.
      gate: of the attention decoder, the scaled dot product or the cosine of query and key.
      num_gate_heads: parts that the attention decoder gates by themselves; a divisor of E.
      has_silu: whether the attention decoder's values pass a SiLU.
      shares_connection: whether all heads of Clover have one attention decoder.
      has_normed_inputs: whether Clover's connections read hidden states and tokens of an RMS of
        one. The paper takes hidden states as they are, and tokens of length one; where hidden
        states are large, a token then has little influence until training has made its weights as
        large.
      block: the augmenting block, layers of the target's shape with a KV cache of their own; None
        is none. Clover and Clover-2 only.
      block_part: what of each layer of Clover's block is computed.

    Raises:
      ModelError: a field is out of range, or is not of this kind.
    """

    kind: Kind
    width: int
    vocab_size: int
    num_heads: int
    norm_epsilon: float
    num_layers: int = 1
    shares_head: bool = True
    num_head_tokens: int | None = None
    connection: Connection = "attention"
    gate: Gate = "dot"
    num_gate_heads: int = 1
    has_silu: bool = True
    shares_connection: bool = True
    has_normed_inputs: bool = dataclasses.field(default=False, metadata={"is_newer": True})
    block: ModelConfig | None = None
    block_part: BlockPart = "whole"

    def __post_init__(self):
        for name, choices in (
            ("kind", Kind),
            ("connection", Connection),
            ("gate", Gate),
            ("block_part", BlockPart),
        ):
            if getattr(self, name) not in get_args(choices):
                raise self._refused(name, f"one of {', '.join(get_args(choices))}")
        for name in ("width", "vocab_size", "num_heads", "num_layers", "num_gate_heads"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise self._refused(name, "a whole number of at least 1")
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) > MAX_LAYERS:
                raise self._refused(name, f"at most {MAX_LAYERS}")
        for name, kinds in _FIELDS_OF_KINDS.items():
            default = getattr(HeadsConfig, name)
            if self.kind not in kinds and getattr(self, name) != default:
                raise self._refused(name, f"{default!r} for {self.kind}")
        if self.width % self.num_gate_heads:
            raise self._refused("num_gate_heads", f"a divisor of the width, {self.width}")
        if not self.shares_head and self.has_block_cache:
            raise self._refused("shares_head", f"true for {self.kind}")
        if not 1 <= (self.num_head_tokens or self.vocab_size) <= self.vocab_size:
            raise self._refused("num_head_tokens", f"1 to the vocabulary, {self.vocab_size}")
        if self.kind == "clover2" and self.block is None:
            raise self._refused("block", "layers of the target's shape for clover2")
        if self.block is not None and not self.has_block_cache:
            raise self._refused("block", f"absent for {self.kind}")
        if self.block is not None and self.block.width != self.width:
            raise ModelError(
                f"The heads have width {self.width} and a block of width {self.block.width}; "
                "both must be the target's, so check their configuration."
            )

    def _refused(self, name: str, expected: str) -> ModelError:
        return ModelError(
            f"The heads' {name} is {getattr(self, name)!r}; it must be {expected}, so check their "
            "configuration."
        )

    @property
    def has_block_cache(self) -> bool:
        """Whether heads of this kind may have an augmenting block, which keeps KV."""
        return self.kind in ("clover", "clover2")

    @property
    def is_regressive(self) -> bool:
        """Whether a head reads what the heads before it proposed; Medusa's are not."""
        return self.kind != "medusa" and self.connection != "none"


def heads_config(
    kind: Kind, target: ModelConfig, *, num_heads: int | None = None, **fields: Any
) -> HeadsConfig:
    """Heads for a target with a paper's sizes: four for Medusa and Hydra, which use the target's
    head; three after an augmenting block of one layer for Clover; five after one of two layers for
    Clover-2.

    Args:
      kind: which.
      target: architecture that they draft for.
      num_heads: instead of the paper's number.
      fields: of `HeadsConfig`, instead of the paper's.
    """
    if kind == "clover":
        preset = {"num_heads": 3, "block": block_config(target, num_layers=1)}
    elif kind == "clover2":
        preset = {
            "num_heads": 5,
            "block": block_config(target, num_layers=2),
            "gate": "cosine",
            "num_gate_heads": target.num_query_heads,
            "has_silu": False,
        }
    else:
        preset = {"num_heads": 4}
    if num_heads is not None:
        preset["num_heads"] = num_heads
    return HeadsConfig(
        kind=kind,
        width=target.width,
        vocab_size=target.vocab_size,
        norm_epsilon=target.norm_epsilon,
        **{**preset, **fields},
    )


def block_config(target: ModelConfig, *, num_layers: int) -> ModelConfig:
    """An augmenting block: layers like the target's last one."""
    windows = (target.sliding_window(target.num_layers - 1),) * num_layers
    return dataclasses.replace(
        target, num_layers=num_layers, sliding_windows=windows if any(windows) else ()
    )


def param_shapes(config: HeadsConfig) -> dict[str, Any]:
    """The parameter pytree with a shape tuple at each leaf. Weights of products are `[in, out]`;
    all are floats but `token_map`, which is int32."""
    shapes = _float_shapes(config)
    if config.num_head_tokens is None:
        return shapes
    return shapes | {"token_map": (config.num_head_tokens,)}


def _float_shapes(config: HeadsConfig) -> dict[str, Any]:
    """`param_shapes` without the token map."""
    c, width = config, config.width
    if c.kind in ("medusa", "hydra"):
        return {"heads": tuple(_independent_head(c, index) for index in range(c.num_heads))}
    layers = {}
    if c.block is not None:
        whole = decoder.param_shapes(c.block)["layers"]
        is_whole = c.block_part == "whole"
        layers["layers"] = tuple(
            {name: layer[name] for name in layer if is_whole or name not in _FEED_FORWARD}
            for layer in whole
        )
    if c.kind == "clover2":
        return {
            "first": _attention_decoder(width, has_bias=True),
            **layers,
            "norm": (width,),
            "head": {"weight": (width, width), "bias": (width,)},
            "connection": _attention_decoder(width, has_bias=True),
            "next": {"weight": (2 * width, width), "bias": (width,)},
            "head_norm": (width,),
        }
    connections = {}
    if c.connection != "none":
        one = _attention_decoder(width, has_bias=False)
        if c.connection == "mlp":
            one = {"norm": (width,), "weight": (2 * width, width), "bias": (width,)}
        connections["connections"] = (one,) * (1 if c.shares_connection else c.num_heads)
    head = {"weight": (width, width), "bias": (width,)}
    return {**layers, **connections, "heads": (head,) * c.num_heads}


def _independent_head(config: HeadsConfig, index: int) -> dict[str, Any]:
    """A head of Medusa or Hydra; Hydra's first block also reads the tokens up to it."""
    width = config.width
    num_inputs = [width] * config.num_layers
    if config.kind == "hydra":
        num_inputs[0] = (index + 2) * width
    head: dict[str, Any] = {
        "blocks": tuple({"weight": (size, width), "bias": (width,)} for size in num_inputs)
    }
    if not config.shares_head:
        head["head"] = (width, config.num_head_tokens or config.vocab_size)
    return head


def _attention_decoder(width: int, *, has_bias: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"norm": (width,)}
    for name in ("query", "key", "value"):
        made[name] = (width, width)
        if has_bias:
            made[f"{name}_bias"] = (width,)
    return made
