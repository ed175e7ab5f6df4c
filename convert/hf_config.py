"""Reading `config.json`, as transformers v4 and v5 write it.

v4 has `rope_theta`, `rope_scaling`, `partial_rotary_factor` and `torch_dtype` at the top; v5 has
`rope_parameters` (all of the rotary settings) and `dtype`. Settings that the decoder does not
implement are refused here, by name, because a setting that is silently ignored would change the
output. Every value is read through a method of `HFConfig` that checks its type and range before
anything is allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.errors import CheckpointError, ModelError
from jaxspec.models.config import MAX_LAYERS, ModelConfig, RopeConfig
from jaxspec.runtime.values import shown

LARGEST_COUNT = 2**31 - 1  # sizes and positions are int32 on the device
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
    """The fields of a `config.json` (or of an object in one), and where they were read.

    `count`, `number`, `flag`, `text` and `texts` return a value of the type in their name, or
    `default` if the field is absent or null; they raise `CheckpointError` for a value of another
    type or out of range, and if there is neither a value nor a default.
    """

    fields: Mapping[str, Any]
    path: str

    def get(self, key: str) -> Any:
        """The unchecked value of `key`; None if it is absent."""
        return self.fields.get(key)

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_COUNT
    ) -> int:
        """A whole number from `least` to `most`."""
        value = self._stated(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.malformed(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self._stated(key, default)
        if type(value) not in (int, float) or not least <= value <= most:  # false for NaN too
            raise self.malformed(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._stated(key, default)
        if not isinstance(value, bool):
            raise self.malformed(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._stated(key, default)
        if not isinstance(value, str):
            raise self.malformed(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty if the field is absent."""
        value = self._stated(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.malformed(key, "a list of texts")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A list of token ids; empty if the field is absent."""
        value = self._stated(key, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.malformed(key, "a list of token ids")
        return tuple(value)

    def section(self, key: str) -> HFConfig:
        """The object at `key`; empty if the field is absent."""
        value = self._stated(key, {})
        if not isinstance(value, dict):
            raise self.malformed(key, "an object")
        return HFConfig(value, f"{self.path} ({key})")

    def _stated(self, key: str, default: Any) -> Any:
        value = self.fields.get(key)
        if value is None and default is None:
            raise CheckpointError(
                f"{self.path} does not state {key!r}, which cannot be guessed; "
                "add the value the model was trained with."
            )
        return default if value is None else value

    def malformed(self, key: str, expected: str) -> CheckpointError:
        """The error for a value of the wrong type, or out of range."""
        return CheckpointError(
            f"{self.path} sets {key} to {shown(self.fields.get(key))}; it must be {expected}, so "
            "correct it or fetch the file again."
        )

    def refuse(self, key: str, supported: str) -> ModelError:
        """The error for a setting that the decoder does not implement."""
        return ModelError(
            f"{self.path} sets {key} to {shown(self.fields.get(key))}, which this decoder does not "
            f"compute; it supports {supported}."
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return self.count("num_hidden_layers", most=MAX_LAYERS)

    @property
    def head_size(self) -> int:
        """H: as stated, or width / heads."""
        width, heads = self.count("hidden_size"), self.count("num_attention_heads")
        return self.count("head_dim", width // heads)


def refuse_unsupported(config: HFConfig) -> None:
    """Raises `ModelError` for settings of any family that the decoder does not implement."""
    if config.get("quantization_config"):
        raise ModelError(
            f"{config.path} describes quantized weights (quantization_config); "
            "convert the model's float checkpoint instead."
        )
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise config.refuse("hidden_act", "'silu'")
    if config.flag("mlp_bias", False):
        raise config.refuse("mlp_bias", "false")


def rope_section(config: HFConfig) -> HFConfig:
    """The object with the rotary settings, of either style; empty if there is none."""
    is_v4 = config.get("rope_scaling") not in (None, {})
    return config.section("rope_scaling" if is_v4 else "rope_parameters")


def read_rope(config: HFConfig, *, rotary_size: int, is_interleaved: bool = False) -> RopeConfig:
    """Rotary settings in either style; theta is 10000 if it is not stated, as in every HF
    family."""
    rope = rope_section(config)
    unknown = sorted(set(rope.fields) - _ROPE_KEYS)
    if unknown:
        raise ModelError(
            f"{config.path} has rotary settings that this decoder does not know "
            f"({', '.join(unknown)}); it supports default, linear, llama3 and yarn for all layers "
            "alike."
        )

    def original_length() -> int:
        key = "original_max_position_embeddings"
        return (config if config.get(key) is not None else rope).count(
            key, config.count("max_position_embeddings")
        )

    def factor(default: float | None = None) -> float:
        return rope.number("factor", default, least=1e-3, most=1e6)

    kind = rope.text("rope_type", rope.text("type", "default"))
    scaling: dict[str, Any]
    if kind == "default":
        scaling = {}
    elif kind == "linear":
        scaling = {"factor": factor()}
    elif kind == "llama3":
        scaling = {
            "factor": factor(),
            "original_max_length": original_length(),
            "low_frequency_factor": rope.number("low_freq_factor", least=1e-3, most=1e6),
            "high_frequency_factor": rope.number("high_freq_factor", least=1e-3, most=1e6),
        }
    elif kind == "yarn":
        original = original_length()
        extension = factor(config.count("max_position_embeddings") / original)
        scaling = {
            "factor": extension,
            "original_max_length": original,
            "beta_fast": rope.number("beta_fast", 32.0, least=1e-3, most=1e6),
            "beta_slow": rope.number("beta_slow", 1.0, least=1e-3, most=1e6),
            "attention_factor": _yarn_attention_factor(rope, extension),
            "is_truncated": rope.flag("truncate", True),
        }
    else:
        raise ModelError(
            f"{config.path} asks for {kind!r} rotary scaling, which this decoder does not compute; "
            "it supports default, linear, llama3 and yarn."
        )
    _check_stated_once(config)
    stated = rope if rope.get("rope_theta") is not None else config
    return RopeConfig(
        theta=stated.number("rope_theta", 10000.0, least=2, most=1e15),
        rotary_size=rotary_size,
        is_interleaved=is_interleaved,
        scaling="none" if kind == "default" else kind,
        **scaling,
    )


def _check_stated_once(config: HFConfig) -> None:
    """Raises `ModelError` for a rotary setting that is stated twice, with different values."""
    sections = [config.section(name).fields for name in ("rope_scaling", "rope_parameters")]
    top = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    found: dict[str, Any] = {}
    for fields in (top, *sections):
        for key, value in fields.items():
            name = "rope_type" if key == "type" else key
            if value is not None and found.setdefault(name, value) != value:
                raise ModelError(
                    f"{config.path} states the rotary setting {name} twice, as "
                    f"{shown(found[name])} and as {shown(value)}; remove the one that the model "
                    "was not trained with."
                )


def _yarn_attention_factor(rope: HFConfig, factor: float) -> float:
    """The factor on cos and sin: stated, or from mscale and the extension factor (2309.00071)."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", least=1e-3, most=1e3)
    mscale = rope.number("mscale", 0.0, least=0, most=1e3)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, least=0, most=1e3)
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def rotary_share(config: HFConfig, default: float) -> float:
    """`partial_rotary_factor` in either style."""
    rope = rope_section(config)
    stated = rope if rope.get("partial_rotary_factor") is not None else config
    return stated.number("partial_rotary_factor", default, least=1e-3, most=1)


def shared_fields(config: HFConfig, *, norm_epsilon: float | None) -> dict[str, Any]:
    """Fields of `ModelConfig` that all families read in the same way; `norm_epsilon` is the
    family's default, or None if it is ambiguous and must be stated."""
    heads = config.count("num_attention_heads")
    return {
        "vocab_size": config.count("target_vocab_size", config.count("vocab_size")),
        "draft_vocabulary": config.token_ids("draft_vocabulary"),
        "width": config.count("hidden_size"),
        "feed_forward_width": config.count("intermediate_size"),
        "num_layers": config.num_layers,
        "num_query_heads": heads,
        "num_kv_heads": config.count("num_key_value_heads", heads),
        "head_size": config.head_size,
        "max_length": config.count("max_position_embeddings"),
        "norm_epsilon": config.number("rms_norm_eps", norm_epsilon, least=1e-12, most=1),
        "is_tied": config.flag("tie_word_embeddings", False),
    }


def llama_like(config: HFConfig, family: str, **fields: Any) -> ModelConfig:
    """The configuration of Llama and its near relatives, which rotate the whole head; `fields` are
    those of `ModelConfig` in which the family differs from Llama.

    Raises:
      ModelError: only part of a head is rotated.
    """
    if rotary_share(config, 1.0) != 1.0:
        raise ModelError(
            f"{config.path} rotates a part of each head (partial_rotary_factor "
            f"{rotary_share(config, 1.0)}), which {family} models do not; "
            "remove the setting or use the matching architecture."
        )
    return ModelConfig(
        family=family,
        **shared_fields(config, norm_epsilon=1e-6),
        rope=read_rope(config, rotary_size=config.head_size),
        **fields,
    )


def sliding_window(config: HFConfig) -> int | None:
    """Number of tokens that a query sees: 4096 if `sliding_window` is absent, as in HF's classes;
    None (all tokens) if it is null."""
    if "sliding_window" in config.fields and config.get("sliding_window") is None:
        return None
    return config.count("sliding_window", 4096)


def qwen_sliding_windows(config: HFConfig) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: off unless `use_sliding_window` is set; then on for the layers
    that `layer_types` names, or those from `max_window_layers` on."""
    num_layers = config.num_layers
    window = sliding_window(config) if config.flag("use_sliding_window", False) else None
    first = config.count("max_window_layers", 28, least=0)
    kinds = config.texts("layer_types") or [
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


def config_fields(config: ModelConfig, *, end_of_text: int | None, dtype: Any) -> dict[str, Any]:
    """The `config.json` of a Qwen3 or a Llama.

    Raises:
      ModelError: another family, or scaled rotary embeddings.
    """
    of_family = {
        "qwen3": {
            "architectures": ["Qwen3ForCausalLM"],
            "max_window_layers": config.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        "llama": {"architectures": ["LlamaForCausalLM"], "mlp_bias": False},
    }
    if config.family not in of_family or config.rope.scaling != "none":
        raise ModelError(
            f"A {config.family} model with {config.rope.scaling} rotary scaling was to be written "
            "as a Hugging Face checkpoint; only qwen3 and llama without scaling can be."
        )
    vocabulary = {}
    if config.draft_vocabulary:  # fields of ours
        vocabulary = {
            "draft_vocabulary": list(config.draft_vocabulary),
            "target_vocab_size": config.vocab_size,
        }
    return {
        **of_family[config.family],
        **vocabulary,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "intermediate_size": config.feed_forward_width,
        "max_position_embeddings": config.max_length,
        "model_type": config.family,
        "num_attention_heads": config.num_query_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": {"rope_theta": config.rope.theta, "rope_type": "default"},
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.is_tied,
        "torch_dtype": np.dtype(dtype).name,
        "use_cache": True,
        "vocab_size": config.num_rows,
    }
