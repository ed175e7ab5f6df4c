"""The configuration of a model.

One decoder serves Llama, Vicuna, Mistral, Qwen2, Qwen3 and GLM-4-0414. They differ in the fields
below, which `convert` fills from a Hugging Face `config.json`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxspec.errors import ModelError

MAX_LAYERS = 10_000  # so that a damaged number is refused before anything is made of it

RopeScaling: TypeAlias = Literal["none", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its context-extension rule.

    Attributes:
      theta: base of the frequencies.
      rotary_size: leading components of a head that are rotated (all, or half of them for GLM-4).
      is_interleaved: whether rotated pairs are (0, 1), (2, 3), ... (GLM-4) instead of (i, i +
        rotary_size / 2).
      scaling: `none`, `linear`, `llama3` (Llama 3.1) or `yarn` (2309.00071).
      factor: extension factor of the rule.
      original_max_length: context length of the original training (`llama3`, `yarn`).
      low_frequency_factor: `llama3` only.
      high_frequency_factor: `llama3` only.
      beta_fast: `yarn` only; frequencies that make more rotations than this over the original
        context are not scaled.
      beta_slow: `yarn` only; frequencies that make fewer are scaled fully.
      attention_factor: `yarn` only, multiplies cos and sin; None means 0.1 ln(factor) + 1.
      is_truncated: `yarn` only, whether the ramp's bounds are rounded to whole components.
    """

    theta: float
    rotary_size: int
    is_interleaved: bool = False
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_max_length: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    is_truncated: bool = True

    def __post_init__(self):
        factors = ("theta", "factor", "low_frequency_factor", "high_frequency_factor")
        for name in (*factors, "beta_fast", "beta_slow"):
            _check_factor(f"rope.{name}", getattr(self, name))
        if self.attention_factor is not None:
            _check_factor("rope.attention_factor", self.attention_factor)
        if self.scaling not in get_args(RopeScaling):
            raise _out_of_range("rope.scaling", self.scaling, f"one of {get_args(RopeScaling)}")
        if self.scaling in ("llama3", "yarn"):
            _check_count("rope.original_max_length", self.original_max_length)
        if self.scaling == "llama3" and self.low_frequency_factor >= self.high_frequency_factor:
            raise _out_of_range(
                "rope.low_frequency_factor",
                self.low_frequency_factor,
                f"below its high_frequency_factor, {self.high_frequency_factor}",
            )
        if self.scaling == "yarn" and self.theta == 1:  # its logarithm divides
            raise _out_of_range("rope.theta", self.theta, "another number than 1 for yarn")

    def inverse_frequencies(self) -> tuple[np.ndarray, float]:
        """Radians per position `[rotary_size / 2]` fp32, and the factor on cos and sin."""
        size = self.rotary_size
        exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        inverse = (1.0 / np.float32(self.theta) ** exponent).astype(np.float32)
        if self.scaling == "none":
            return inverse, 1.0
        if self.scaling == "linear":
            return inverse / np.float32(self.factor), 1.0
        if self.scaling == "llama3":
            wavelength = 2 * math.pi / inverse
            low = self.original_max_length / self.low_frequency_factor
            high = self.original_max_length / self.high_frequency_factor
            blend = (self.original_max_length / wavelength - self.low_frequency_factor) / (
                self.high_frequency_factor - self.low_frequency_factor
            )
            blended = (1 - blend) * inverse / self.factor + blend * inverse
            scaled = np.where(wavelength > low, inverse / self.factor, blended)
            return np.where(wavelength < high, inverse, scaled).astype(np.float32), 1.0

        def component(num_rotations: float) -> float:
            ratio = self.original_max_length / (num_rotations * 2 * math.pi)
            return size * math.log(ratio) / (2 * math.log(self.theta))

        low, high = component(self.beta_fast), component(self.beta_slow)
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = (np.arange(size // 2, dtype=np.float32) - low) / max(high - low, 0.001)
        kept = 1 - np.clip(ramp, 0, 1)
        scaled = inverse / self.factor * (1 - kept) + inverse * kept
        attention = self.attention_factor
        if attention is None:
            attention = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return scaled.astype(np.float32), attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder. Hashable, so that it can be static under `jax.jit`.

    Attributes:
      family: `llama`, `mistral`, `qwen2`, `qwen3` or `glm4`; for reports only.
      vocab_size: V, rows of the embedding (which may be padded beyond the tokenizer's).
      width: E.
      feed_forward_width: F.
      num_layers: L.
      num_query_heads: Q.
      num_kv_heads: K, a divisor of Q.
      head_size: H.
      max_length: context length of the model.
      norm_epsilon: the epsilon of every RMS norm.
      rope: rotary embedding.
      has_qkv_bias: q, k and v projections have a bias (Qwen2, GLM-4).
      has_output_bias: the attention output projection has a bias.
      has_qk_norm: q and k are RMS-normed per head before rotation (Qwen3).
      has_sandwich_norms: attention and feed-forward outputs are normed too (GLM-4-0414).
      is_tied: the head is the embedding.
      sliding_windows: for each layer, the number of tokens that a query sees, or None for all
        (Mistral, some Qwen2).
      draft_vocabulary: of a draft model that drafts only some tokens, their ids in increasing
        order: row i of its embedding and head is of the i-th of them, and the last row is of all
        other tokens, which it reads alike and never drafts. Otherwise empty.
    """

    family: str
    vocab_size: int
    width: int
    feed_forward_width: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    max_length: int
    norm_epsilon: float
    rope: RopeConfig
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_sandwich_norms: bool = False
    is_tied: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    draft_vocabulary: tuple[int, ...] = dataclasses.field(
        default=(), repr=False, metadata={"is_newer": True}
    )

    def __post_init__(self):
        counts = ("vocab_size", "width", "feed_forward_width", "num_layers", "num_query_heads")
        for name in (*counts, "num_kv_heads", "head_size", "max_length"):
            _check_count(name, getattr(self, name))
        if self.num_layers > MAX_LAYERS:
            raise _out_of_range("num_layers", self.num_layers, f"at most {MAX_LAYERS}")
        epsilon = self.norm_epsilon
        if not isinstance(epsilon, (int, float, np.floating)) or not 0 < np.float32(epsilon) <= 1:
            raise _out_of_range("norm_epsilon", epsilon, "a number above 0 and at most 1")
        for window in self.sliding_windows:
            if window is not None:
                _check_count("sliding_windows", window)
        if self.num_query_heads % self.num_kv_heads:
            raise ModelError(
                f"The model has {self.num_query_heads} query heads and {self.num_kv_heads} KV "
                "heads; the second must divide the first, so check its configuration."
            )
        _check_count("rope.rotary_size", self.rope.rotary_size)
        if self.rope.rotary_size % 2 or self.rope.rotary_size > self.head_size:
            raise ModelError(
                f"The model rotates {self.rope.rotary_size} of {self.head_size} head components; "
                "it must be an even number of at most the head size, so check its configuration."
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ModelError(
                f"The model names {len(self.sliding_windows)} sliding windows for "
                f"{self.num_layers} layers; give one per layer."
            )
        bounds = (-1, *self.draft_vocabulary, self.vocab_size)
        if not all(a < b for a, b in itertools.pairwise(bounds)):
            raise ModelError(
                f"The draft vocabulary's {len(self.draft_vocabulary)} ids are not in increasing "
                f"order below {self.vocab_size}; check the model's configuration."
            )

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def num_rows(self) -> int:
        """Rows of the embedding."""
        return len(self.draft_vocabulary) + 1 if self.draft_vocabulary else self.vocab_size

    def rows_of_tokens(self) -> np.ndarray:
        """The embedding's row of every token, `[V]` int32."""
        if not self.draft_vocabulary:
            return np.arange(self.vocab_size, dtype=np.int32)
        rows = np.full(self.vocab_size, self.num_rows - 1, np.int32)
        rows[list(self.draft_vocabulary)] = np.arange(self.num_rows - 1)
        return rows

    def over_rows(self) -> ModelConfig:
        """The same model, whose tokens are the rows of its embedding."""
        return dataclasses.replace(self, vocab_size=self.num_rows, draft_vocabulary=())

    @property
    def context_length(self) -> int:
        """Positions that the model was trained for, or that its rotary scaling extends them to."""
        rope = self.rope
        extended = {
            "linear": rope.factor * self.max_length,
            "yarn": rope.factor * rope.original_max_length,
        }
        return max(self.max_length, int(extended.get(rope.scaling, 0)))

    def sliding_window(self, layer_index: int) -> int | None:
        """Tokens a query of this layer sees, or None for all."""
        return self.sliding_windows[layer_index] if self.sliding_windows else None

    def to_json(self) -> dict[str, Any]:
        """The fields, for `from_json`."""
        fields = dataclasses.asdict(self)
        if not self.draft_vocabulary:
            del fields["draft_vocabulary"]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_json`."""
        lists = {
            name: tuple(fields.get(name, ())) for name in ("sliding_windows", "draft_vocabulary")
        }
        return cls(**{**fields, "rope": RopeConfig(**fields["rope"]), **lists})


def _check_count(name: str, value: Any) -> None:
    """Raises `ModelError` unless a field is a positive integer that fits into int32."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or not 1 <= value < 2**31:
        raise _out_of_range(name, value, f"a whole number from 1 to {2**31 - 1}")


def _check_factor(name: str, value: Any) -> None:
    """Raises `ModelError` unless a field is a finite number above 0."""
    if not isinstance(value, (int, float, np.floating)) or not 0 < value < math.inf:
        raise _out_of_range(name, value, "a finite number above 0")


def _out_of_range(name: str, value: Any, expected: str) -> ModelError:
    return ModelError(
        f"The model's {name} is {value!r}; it must be {expected}, so check its configuration."
    )
