"""GLM-4-0414: four norms per layer, half of each head rotated in pairs, gate and up in one
tensor."""

from __future__ import annotations

from jaxspec.models.config import ModelConfig

from . import hf_config
from .hf_config import HFConfig
from .mapping import (
    Family,
    Leaf,
    attention_leaves,
    down_leaf,
    layer_leaf,
    norm_leaves,
    outer_leaves,
)


def read_config(config: HFConfig) -> ModelConfig:
    """The norms' epsilon must be stated: HF's class default is that of the older GLM-4 (1.6e-7)."""
    config.count("head_dim")
    rotary_size = int(config.head_size * hf_config.rotary_share(config, 0.5))
    return ModelConfig(
        family="glm4",
        **hf_config.shared_fields(config, norm_epsilon=None),
        rope=hf_config.read_rope(config, rotary_size=rotary_size, is_interleaved=True),
        has_qkv_bias=config.flag("attention_bias", True),
        has_sandwich_norms=True,
    )


def leaves(config: ModelConfig) -> list[Leaf]:
    """The table; the fused `gate_up_proj` has the gate in its first half."""
    width, inner = config.width, config.feed_forward_width
    norms = {
        "attention_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "post_feed_forward_norm": "post_mlp_layernorm",
    }

    def gate_up(fused):
        return [(..., fused.reshape(2, inner, width).transpose(2, 0, 1))]

    table = outer_leaves(config)
    for layer in range(config.num_layers):
        source = {"mlp.gate_up_proj.weight": (2 * inner, width)}
        table += norm_leaves(config, layer, norms)
        table += attention_leaves(config, layer)
        table.append(layer_leaf(layer, "gate_up", source, gate_up))
        table.append(down_leaf(config, layer))
    return table


FAMILY = Family("glm4", ("Glm4ForCausalLM",), read_config, leaves)
