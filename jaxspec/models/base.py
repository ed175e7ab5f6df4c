"""What the decode loop needs from a model, and the package's own model.

`Model` is a Protocol: any function of parameters, tokens, a window and our cache will do (an NNX or
Linen module, a hand-written decoder). It must accept per-row cache offsets, because the rows of a
speculative batch have different lengths after the first round; a cache with one scalar index for
the whole batch cannot be used.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.cache import pages as kv
from jaxspec.errors import ModelError, SettingError
from jaxspec.kernels.base import XLA, Kernels, TiedEmbedding, rms_norm, splittable, unpacked
from jaxspec.kernels.registry import KernelsName, check_kernels, get_kernels
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.runtime.kinds import first_mismatch, kinds_of
from jaxspec.types import PyTree, Window


@runtime_checkable
class Model(Protocol):
    """A language model as pure functions.

    A model may also have a method `param_specs(num_shards)` that returns the `PartitionSpec` of
    each of its `params` over a mesh axis `model` of that size (see `LanguageModel`); without it,
    every device of the axis runs the whole model. With `num_layers` and `forward_features` (see
    `TappedModel`) drafters can read its residual stream between layers, and with the methods of
    `HeadedModel` use its head. With an attribute
    `is_width_invariant` that is True it declares that a token's hidden states, logits and KV have
    the same bits in windows of every width; engines then score in narrow windows too.

    Attributes:
      name: for reports.
      params: pytree of arrays, which is passed to the functions below.
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
        """Hidden states `[B, T, E]` of `tokens` `[B, T]`, and the cache with the window's KV. Each
        layer writes all of it before its attention reads any: where `window.rows` repeats a row,
        that is for consecutive chunks of its prompt."""
        ...

    def logits(self, params: PyTree, hidden: jax.Array) -> jax.Array:
        """Logits `[..., V]` fp32 of hidden states `[..., E]`."""
        ...


LAST = -1  # the last boundary of any model: what `forward` returns


@runtime_checkable
class TappedModel(Model, Protocol):
    """A model whose residual stream can be read between its layers.

    Attributes:
      num_layers: L. Boundary b, from 0 to L, is the residual stream after b layers: boundary 0 is
        the embeddings, boundary L is what `forward` returns. `LAST` means L.
    """

    @property
    def num_layers(self) -> int:  # noqa: D102
        ...

    def forward_features(
        self,
        params: PyTree,
        tokens: jax.Array,
        window: Window,
        cache: kv.KVCache,
        taps: tuple[int, ...],
    ) -> tuple[jax.Array, jax.Array, kv.KVCache]:
        """Hidden states as `forward` returns them, the streams `[B, T, n, E]` at n boundaries, and
        the cache."""
        ...


def check_taps(model: Model, taps: tuple[int, ...], reader: str) -> None:
    """Raises `ModelError` unless these boundaries of the model can be read.

    Args:
      reader: the name of what reads them, for the error message.
    """
    is_tapped = isinstance(model, TappedModel)
    for tap in taps:
        if is_tapped and not LAST <= tap <= model.num_layers:
            raise ModelError(
                f"{reader} taps boundary {tap} of {model.name}, which has boundaries 0 (the "
                f"embeddings) to {model.num_layers} (the last); name one of these, or {LAST} for "
                "the last."
            )
        if not is_tapped and tap != LAST:
            raise ModelError(
                f"{reader} taps boundary {tap} of {model.name}, which has no num_layers and no "
                f"forward_features; add them, or tap {LAST}, the hidden states of `forward`."
            )


def forward_features(
    model: Model,
    params: PyTree,
    tokens: jax.Array,
    window: Window,
    cache: kv.KVCache,
    taps: tuple[int, ...],
) -> tuple[jax.Array, jax.Array | None, kv.KVCache]:
    """`model.forward`, with the residual stream `[B, T, n, E]` at `taps` (None without taps). The
    last boundary needs only `forward`."""
    inner = ()
    if isinstance(model, TappedModel):
        taps = tuple(model.num_layers if tap == LAST else tap for tap in taps)
        inner = tuple(tap for tap in taps if tap != model.num_layers)
        if inner:
            return model.forward_features(params, tokens, window, cache, taps)
    hidden, cache = model.forward(params, tokens, window, cache)
    return hidden, jnp.stack([hidden] * len(taps), axis=2) if taps else None, cache


def logits_of(model: Model, params: PyTree, hidden: jax.Array, window: Window) -> jax.Array:
    """`model.logits` of a window's hidden states `[B, T, E]`, or of each row's last `[B, E]`; what
    lies beyond `window.num_live` may be anything."""
    if isinstance(model, LanguageModel):
        return model.logits(params, hidden, window)
    return model.logits(params, hidden)


def kv_dtype_of(model: Any) -> kv.KvDtype | None:
    """The dtype in which a model stores KV; None is its compute dtype, or for a user's model,
    whatever it does."""
    return getattr(model, "kv_dtype", None)


def with_kv_dtype(model: Model, kv_dtype: kv.KvDtype | None) -> Model:
    """The same model with KV stored in `kv_dtype`; None leaves it as it is.

    Raises:
      SettingError: an unknown dtype, or the model is not a `LanguageModel` and makes its own cache.
    """
    kv.check_kv_dtype(kv_dtype)
    if kv_dtype in (None, kv_dtype_of(model)):
        return model
    if not isinstance(model, LanguageModel):
        raise SettingError(
            f"The KV dtype {kv_dtype!r} was given for {model.name}, which makes its cache itself; "
            "hand the dtype to `jaxspec.cache.pages.init_cache` there."
        )
    return dataclasses.replace(model, kv_dtype=kv_dtype)


def param_specs(owner: Any, num_shards: int) -> PyTree:
    """How a mesh axis `model` splits `owner.params`: as its own `param_specs` says, or not at all.

    Args:
      owner: a model, or a drafter.
      num_shards: devices of the axis.

    Returns:
      a `PartitionSpec` for each parameter.
    """
    if num_shards > 1 and hasattr(owner, "param_specs"):
        return owner.param_specs(num_shards)
    params = jax.eval_shape(splittable, owner.params) if num_shards > 1 else owner.params
    return jax.tree.map(lambda _: PartitionSpec(), params)


@runtime_checkable
class HeadedModel(Model, Protocol):
    """A model whose head drafters may use separately: `logits` in two steps, between which they may
    insert their own computation, and the head's weights of a token."""

    def final_norm(self, params: PyTree, hidden: jax.Array) -> jax.Array:
        """Hidden states `[..., E]` of `forward` after the final norm."""
        ...

    def head(self, params: PyTree, normed: jax.Array) -> jax.Array:
        """Logits `[..., V]` fp32 of normed hidden states `[..., E]`."""
        ...

    def head_rows(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """The head's weights `[..., E]` for each of `tokens` `[...]` int32."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A model computed by the package's own decoder: config, parameters, tokenizer and stop tokens.

    Attributes:
      name: the name it was loaded under.
      config: architecture.
      params: plain arrays as they are stored, in the compute dtype (KV is read in it too). Engines
        pack them for the kernels, see `packed_model`. A tied model has no `head`.
      eos_token_ids: from the checkpoint's generation config.
      tokenizer: None for random presets.
      generation_config: the checkpoint's generation defaults; they apply only where
        `SamplingParams.from_generation_config` is called.
      kernels: `xla`; `native`, products and attention in C++ on a CPU; `mosaic`, attention for
        Hopper GPUs; or `pallas`, attention for GPUs from Ampere on (interpreted elsewhere, for
        tests). They sum in different orders, so outputs differ at ties within rounding. On a mesh
        that splits the model, `native` falls back to `xla`; `mosaic` and `pallas` run on each
        device's heads.
      kv_dtype: the dtype in which KV is stored: None is that of the parameters; `int8` takes half
        the bytes of bfloat16 and changes the logits a little, see `jaxspec.cache.pages.quantise`.
      platform: JAX's name of the kind of device that its programs are made for.
      kernels_fallback: the reason why these are not the kernels that were asked for, or None.

    Raises:
      SettingError: unknown kernels, kernels that cannot be used here, an unknown KV dtype, or a
        head that is not the embedding's where the config says that it is tied.
    """

    name: str
    config: ModelConfig
    params: PyTree
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: TextTokenizer | None = None
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernels: KernelsName = "xla"
    kv_dtype: kv.KvDtype | None = None
    platform: str = dataclasses.field(default_factory=lambda: jax.default_backend())
    kernels_fallback: str | None = None

    def __post_init__(self):
        check_kernels(self.kernels)
        kv.check_kv_dtype(self.kv_dtype)
        params = decoder.without_tied_head(self.config, self.params, name=self.name)
        object.__setattr__(self, "params", params)

    def __repr__(self) -> str:
        size = decoder.num_params(self.config) / 1e6
        return (
            f"<LanguageModel {self.name}: {self.config.family}, {size:.1f} M parameters, "
            f"{self.dtype.name}{self._kv_words}, {self.kernels} kernels>"
        )

    @property
    def _kv_words(self) -> str:
        return "" if self.kv_dtype is None else f" with KV in {self.kv_dtype}"

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype, in which KV is read."""
        return self.params["embedding"].dtype

    @property
    def is_width_invariant(self) -> bool:
        """Whether its kernels declare it; see `Kernels` and `models.width_probe`."""
        return kernels_of(self).is_width_invariant

    def pack(self, params: PyTree) -> PyTree:
        """Parameters in the form that the kernels read fastest, from any form that
        `jaxspec.models.decoder` takes: as they are stored, or as this method returned them.

        The C++ kernels and TPUs have weights in a form of their own, as `PackedWeight`. On a CPU a
        tied model keeps its embedding once, as a `TiedEmbedding`. `jaxspec.kernels.base.unpacked`
        turns both into plain arrays. A tied model needs no `head`; one that is given is left out.

        Raises:
          SettingError: the config says that the head is tied to the embedding, and another head was
            given.
        """
        params = decoder.without_tied_head(self.config, params, name=self.name)
        return decoder.pack_params(params, kernels_of(self))

    def check_params(self) -> None:
        """Raises `ModelError` unless the parameters have the shapes that `config` asks for, and one
        floating dtype."""
        wanted = decoder.param_shapes(self.config)
        dtype = jnp.dtype(getattr(self.params.get("embedding"), "dtype", jnp.float32))
        if not jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.dtype(jnp.float32)
        like = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, dtype),
            wanted,
            is_leaf=decoder.is_shape,
        )
        params = jax.eval_shape(unpacked, self.params)
        given = {name: params[name] for name in wanted if name in params}
        mismatch = first_mismatch(kinds_of(given), kinds_of(like))
        if mismatch is not None:
            path, found, expected = mismatch
            raise ModelError(
                f"The model {self.name} has {found} at params{path}, where its config asks for "
                f"{expected}; give it the parameters of this config, all in one dtype."
            )

    def param_specs(self, num_shards: int) -> PyTree:
        """How a mesh axis `model` of `num_shards` devices splits `params`.

        Raises:
          SettingError: `num_shards` does not divide the heads, the feed-forward width or the
            vocabulary.
        """
        specs = decoder.param_specs(self.config, num_shards)
        if isinstance(self.params["embedding"], TiedEmbedding):
            specs["embedding"] = TiedEmbedding(head=specs["head"])
        return {name: specs[name] for name in self.params}

    def init_cache(self, num_rows: int, capacity: int) -> kv.KVCache:
        """A cache of `num_rows` rows of `capacity` slots, KV in `kv_dtype` or the model's dtype."""
        return kv.init_cache(
            num_layers=self.config.num_layers,
            num_rows=num_rows,
            capacity=capacity,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            is_written_by_head=self.platform == "tpu",
        )

    def forward(self, params, tokens, window, cache):
        """Last layer's hidden states `[B, T, E]` before the final norm, and the cache."""
        kernels = kernels_of(self)
        return decoder.forward(self.config, params, tokens, window, cache, kernels=kernels)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.config.num_layers

    def forward_features(self, params, tokens, window, cache, taps):
        """`forward`, with the residual stream `[B, T, n, E]` after each of `taps` layers."""
        kernels = kernels_of(self)
        return decoder.forward_features(
            self.config, params, tokens, window, cache, taps, kernels=kernels
        )

    def logits(self, params, hidden, window=None):
        """Logits `[..., V]` fp32; of a window's hidden states, without its padding."""
        kernels = kernels_of(self)
        return decoder.head(self.config, params, hidden, window=window, kernels=kernels)

    def draft_logits(self, params, hidden, window):
        """Logits `[..., N]` fp32 of the tokens of a draft vocabulary, or of all tokens."""
        kernels = kernels_of(self)
        return decoder.head(
            self.config, params, hidden, window=window, kernels=kernels, drafts_only=True
        )

    def final_norm(self, params, hidden):
        """Hidden states `[..., E]` after the final norm."""
        return rms_norm(hidden, params["final_norm"], self.config.norm_epsilon)

    def head(self, params, normed):
        """Logits `[..., V]` fp32 of normed hidden states; `logits` does both in one product."""
        kernels = kernels_of(self)
        return decoder.head(self.config, params, normed, is_normed=True, kernels=kernels)

    def head_rows(self, params, tokens):
        """The head's weights `[..., E]` for each of `tokens` `[...]`."""
        return decoder.head_rows(params, decoder.rows_of(self.config, tokens))


# The packed copy of each model that some engine has. Neither is kept alive.
_packed: weakref.WeakKeyDictionary[LanguageModel, weakref.ref[LanguageModel]]
_packed = weakref.WeakKeyDictionary()
_Given = TypeVar("_Given", bound=Model)


def packed_model(model: _Given) -> _Given:
    """The model with its parameters as `LanguageModel.pack` returns them, for an engine.

    All engines of a model share this copy, and it is freed with the last of them. What needs no
    packing, such as a user's own model, is returned as it is.
    """
    if not isinstance(model, LanguageModel):
        return model
    known = _packed.get(model)
    found: Any = None if known is None else known()
    if found is None:
        params = model.pack(model.params)
        before, after = jax.tree.leaves(model.params), jax.tree.leaves(params)
        is_packed = all(old is new for old, new in zip(before, after, strict=True))
        found = model if is_packed else dataclasses.replace(model, params=params)
        _packed[model] = weakref.ref(found)
    return found


def kernels_of(model: Model | None) -> Kernels:
    """The kernels of a model of the package; XLA's for any other."""
    if isinstance(model, LanguageModel):
        return get_kernels(model.kernels, model.platform)
    return XLA
