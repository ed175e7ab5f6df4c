"""Reading `config.json`, as transformers v4 and v5 write it.

v4 has `rope_theta`, `rope_scaling`, `partial_rotary_factor` and `torch_dtype` at the top; v5 has
`rope_parameters` (all of the rotary settings) and `dtype`. What the decoder does not compute is
refused here, by name: a setting that is silently ignored would change the output.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxspec.errors import CheckpointError, ModelError
from jaxspec.models.config import ModelConfig, RopeConfig

_ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "finetuned",
}


@dataclasses.dataclass(frozen=True)
class HFConfig:
    """The fields of a `config.json`, and where they were read."""

    fields: dict[str, Any]
    path: str

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; absent and null are `default`."""
        value = self.fields.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """The value of `key`, which must be there.

        Raises:
          CheckpointError: it is absent.
        """
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.path} does not state {key!r}, which cannot be guessed; "
                "add the value the model was trained with."
            )
        return value

    def refuse(self, key: str, supported: str) -> ModelError:
        """The error for a setting that the decoder does not compute."""
        return ModelError(
            f"{self.path} sets {key} to {self.fields.get(key)!r}, which this decoder does not "
            f"compute; it supports {supported}."
        )

    @property
    def head_size(self) -> int:
        """H: stated, or width / heads."""
        width, heads = self.require("hidden_size"), self.require("num_attention_heads")
        return self.get("head_dim", width // heads)


def refuse_unsupported(config: HFConfig) -> None:
    """Raises `ModelError` for settings of any family that the decoder does not compute."""
    if config.get("quantization_config"):
        raise ModelError(
            f"{config.path} describes quantized weights (quantization_config); "
            "convert the model's float checkpoint instead."
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise config.refuse("hidden_act", "'silu'")
    if config.get("mlp_bias"):
        raise config.refuse("mlp_bias", "false")


def read_rope(config: HFConfig, *, rotary_size: int, is_interleaved: bool = False) -> RopeConfig:
    """Rotary settings in either style; theta is 10000 where none is stated, as in every HF
    family."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise config.refuse("rope_scaling", "an object with a rope_type")
    unknown = sorted(set(rope) - _ROPE_KEYS)
    if unknown:
        raise ModelError(
            f"{config.path} has rotary settings that this decoder does not know "
            f"({', '.join(unknown)}); it supports default, linear, llama3 and yarn for all layers "
            "alike."
        )

    def stated(key: str, default: Any = None) -> Any:
        value = rope.get(key)
        return default if value is None else value

    def required(key: str) -> Any:
        if rope.get(key) is None:
            raise CheckpointError(
                f"{config.path} asks for {kind} rotary scaling without {key!r}; "
                "add the value the model was trained with."
            )
        return rope[key]

    kind = stated("rope_type", stated("type", "default"))
    original = config.get(
        "original_max_position_embeddings",
        stated("original_max_position_embeddings", config.get("max_position_embeddings")),
    )
    scaling: dict[str, Any]
    if kind == "default":
        scaling = {}
    elif kind == "linear":
        scaling = {"factor": float(required("factor"))}
    elif kind == "llama3":
        scaling = {
            "factor": float(required("factor")),
            "original_max_length": original,
            "low_frequency_factor": float(required("low_freq_factor")),
            "high_frequency_factor": float(required("high_freq_factor")),
        }
    elif kind == "yarn":
        factor = stated("factor") or config.require("max_position_embeddings") / original
        scaling = {
            "factor": float(factor),
            "original_max_length": original,
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
            "attention_factor": _yarn_attention_factor(rope, factor),
            "is_truncated": bool(stated("truncate", True)),
        }
    else:
        raise ModelError(
            f"{config.path} asks for {kind!r} rotary scaling, which this decoder does not compute; "
            "it supports default, linear, llama3 and yarn."
        )
    return RopeConfig(
        theta=float(stated("rope_theta", config.get("rope_theta", 10000.0))),
        rotary_size=rotary_size,
        is_interleaved=is_interleaved,
        scaling="none" if kind == "default" else kind,
        **scaling,
    )


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    """The factor on cos and sin: stated, or from mscale and the extension factor (2309.00071)."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def rotary_share(config: HFConfig, default: float) -> float:
    """`partial_rotary_factor` in either style."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    return config.get("partial_rotary_factor", default) if share is None else share


def shared_fields(config: HFConfig, *, norm_epsilon: float | None) -> dict[str, Any]:
    """Fields of `ModelConfig` that all families read alike; `norm_epsilon` is the family's default,
    or None where it is ambiguous and must be stated."""
    heads = config.require("num_attention_heads")
    epsilon = config.get("rms_norm_eps", norm_epsilon)
    return {
        "vocab_size": config.require("vocab_size"),
        "width": config.require("hidden_size"),
        "feed_forward_width": config.require("intermediate_size"),
        "num_layers": config.require("num_hidden_layers"),
        "num_query_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_size": config.head_size,
        "max_length": config.require("max_position_embeddings"),
        "norm_epsilon": float(config.require("rms_norm_eps") if epsilon is None else epsilon),
        "is_tied": bool(config.get("tie_word_embeddings", False)),
    }


def llama_like(config: HFConfig, family: str, **fields: Any) -> ModelConfig:
    """The configuration of Llama and its near relatives, which rotate all of a head; `fields` are
    those of `ModelConfig` in which the family differs from Llama.

    Raises:
      ModelError: only part of a head is rotated.
    """
    if rotary_share(config, 1.0) != 1.0:
        raise ModelError(
            f"{config.path} rotates a part of each head (partial_rotary_factor "
            f"{rotary_share(config, 1.0)}), which {config.get('model_type')} models do not; "
            "remove the setting or use the matching architecture."
        )
    return ModelConfig(
        family=family,
        **shared_fields(config, norm_epsilon=1e-6),
        rope=read_rope(config, rotary_size=config.head_size),
        **fields,
    )


def qwen_sliding_windows(config: HFConfig) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: off unless `use_sliding_window`, then for the layers that
    `layer_types` names, or those from `max_window_layers` on."""
    num_layers = config.require("num_hidden_layers")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if "sliding_window" in config.fields and config.fields["sliding_window"] is None:
        window = None
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise config.refuse(
            "layer_types", "one of 'full_attention' and 'sliding_attention' for each layer"
        )
    if window is None and "sliding_attention" in kinds:
        raise ModelError(
            f"{config.path} names sliding_attention layers without a window in use; "
            "set use_sliding_window and sliding_window, or make the layers full_attention."
        )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
