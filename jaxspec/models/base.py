"""What the decode loop needs of a model, and the package's own model record.

`Model` is a Protocol: anything that is a function of parameters, tokens, a window and our cache
plugs in (an NNX or Linen module, a hand-written decoder). A cache with one scalar cursor for the
whole batch cannot be used: rows of a speculative batch stand at different offsets after the first
round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import KernelsName, check_kernels, get_kernels
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.types import PyTree, Window


@runtime_checkable
class Model(Protocol):
    """A language model as pure functions.

    A model may also have a method `param_specs(num_shards)`: the `PartitionSpec` of each of its
    `params` over a mesh axis `model` of so many devices (see `LanguageModel`). Without it every
    device of such an axis holds, and runs, all of the model.

    Attributes:
      name: for reports.
      params: pytree of arrays; handed back to the functions below, never closed over.
      vocab_size: V of the logits.
      eos_token_ids: tokens that end an output unless a request says otherwise.
      tokenizer: a `TextTokenizer`, or None if prompts come as token ids only.
    """

    @property
    def name(self) -> str:  # noqa: D102
        ...

    @property
    def params(self) -> PyTree:  # noqa: D102
        ...

    @property
    def vocab_size(self) -> int:  # noqa: D102
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:  # noqa: D102
        ...

    @property
    def tokenizer(self) -> TextTokenizer | None:  # noqa: D102
        ...

    def init_cache(self, num_rows: int, capacity: int) -> kv.KVCache:
        """A cache of `num_rows` rows of `capacity` slots."""
        ...

    def forward(
        self, params: PyTree, tokens: jax.Array, window: Window, cache: kv.KVCache
    ) -> tuple[jax.Array, kv.KVCache]:
        """Hidden states `[B, T, E]` of `tokens` `[B, T]`; writes the window's KV before it
        reads."""
        ...

    def logits(self, params: PyTree, hidden: jax.Array) -> jax.Array:
        """Logits `[..., V]` fp32 of hidden states `[..., E]`."""
        ...


def param_specs(owner: Any, num_shards: int) -> PyTree:
    """How a mesh axis `model` splits `owner.params`: what its method of that name says, or nowhere.

    Args:
      owner: a model, or a drafter.
      num_shards: devices of the axis.

    Returns:
      a `PartitionSpec` for each parameter.
    """
    if num_shards > 1 and hasattr(owner, "param_specs"):
        return owner.param_specs(num_shards)
    return jax.tree.map(lambda _: PartitionSpec(), owner.params)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A model of the package's own decoder: `(config, params)`, tokenizer and stop tokens.

    Attributes:
      name: the name it was loaded under.
      config: architecture.
      params: parameters in the compute dtype, which is also the KV cache's.
      eos_token_ids: from the checkpoint's generation config.
      tokenizer: None for random presets.
      generation_config: the checkpoint's generation defaults, as read; nothing applies them
        silently.
      kernels: `xla`; `native` for products and attention in C++ on a CPU (`native`); or `pallas`
        for the attention of `attention_pallas`, for GPUs (elsewhere it is interpreted, for tests).
        They sum in other orders, so outputs differ at ties within rounding. On a mesh that splits
        the model `native` leaves all to `xla`, and `pallas` is refused.

    Raises:
      SettingError: unknown kernels, or such as cannot be used here.
    """

    name: str
    config: ModelConfig
    params: PyTree
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: TextTokenizer | None = None
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: KernelsName = "xla"

    def __post_init__(self):
        check_kernels(self.kernels)
        # XLA:CPU multiplies a few rows by a transposed matrix three times slower, so there a tied
        # head is kept a second time, transposed.
        if "head" not in self.params and jax.default_backend() == "cpu":
            params = {**self.params, "head": self.params["embedding"].T}
            object.__setattr__(self, "params", params)

    def __repr__(self) -> str:
        size = decoder.num_params(self.config) / 1e6
        return (
            f"<LanguageModel {self.name}: {self.config.family}, {size:.1f} M parameters, "
            f"{self.dtype.name}, {self.kernels} kernels>"
        )

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def dtype(self) -> jnp.dtype:
        """Compute and cache dtype."""
        return self.params["embedding"].dtype

    def param_specs(self, num_shards: int) -> PyTree:
        """How a mesh axis `model` of `num_shards` devices splits `params`.

        Raises:
          SettingError: it does not divide the heads, the feed-forward or the vocabulary, or the
            kernels cannot be split.
        """
        if num_shards > 1 and self.kernels == "pallas":
            raise SettingError(
                f"The model {self.name} has kernels={self.kernels!r}, which a mesh axis model of "
                f"{num_shards} devices cannot split; load it with kernels='xla'."
            )
        specs = decoder.param_specs(self.config, num_shards)
        return {name: specs[name] for name in self.params}

    def init_cache(self, num_rows: int, capacity: int) -> kv.KVCache:
        """A cache of `num_rows` rows of `capacity` slots in the model's dtype."""
        return kv.init_cache(
            num_layers=self.config.num_layers,
            num_rows=num_rows,
            capacity=capacity,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            dtype=self.dtype,
        )

    def forward(self, params, tokens, window, cache):
        """Last layer's hidden states `[B, T, E]` before the final norm, and the cache."""
        kernels = get_kernels(self.kernels)
        return decoder.forward(self.config, params, tokens, window, cache, kernels=kernels)

    def logits(self, params, hidden):
        """Logits `[..., V]` fp32."""
        return decoder.head(self.config, params, hidden, kernels=get_kernels(self.kernels))
