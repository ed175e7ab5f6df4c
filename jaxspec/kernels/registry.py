"""What a decoder computes its products and its attention with, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.kernels import cpu as native
from jaxspec.kernels.pallas import pallas_attention
from jaxspec.kernels.xla import Attention, block_attention
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import LayerParams, Product, attention_inputs, product
from jaxspec.types import Window

KernelsName: TypeAlias = Literal["xla", "pallas", "native"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The costly parts of a layer.

    Attributes:
      attention: see `attention.block_attention`.
      product: see `layers.product`.
    """

    attention: Attention = block_attention
    product: Product = product

    def attend(
        self,
        config: ModelConfig,
        params: LayerParams,
        qkv: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        layer: kv.LayerCache,
        table: kv.Table,
        window: Window,
        *,
        dtype: jnp.dtype,
        sliding_window: int | None,
    ) -> tuple[jax.Array, kv.LayerCache]:
        """Heads `[B, T, Q, H]` of a window, and its layer's KV with the window's own written.

        Args:
          config: architecture.
          params: of the layer.
          qkv: `[B, T, K, G + 2, H]`, see `layers.attention_inputs`.
          angles: of the window's positions, see `layers.rotary_angles`.
          layer: KV of this layer.
          table: as for `attention.block_attention`, like all that follow.
          window: where the queries stand, and where their KV goes.
          dtype: of the KV.
          sliding_window: slots that a query sees, or None for all.
        """
        queries, keys, values = attention_inputs(config, params, qkv, angles)
        # 0 * NaN is NaN: values that are no numbers would reach the queries before them, which do
        # not see them. As keys they reach those that do.
        is_finite = jnp.all(jnp.isfinite(values), axis=-1, keepdims=True)
        keys = jnp.where(is_finite, keys, jnp.array(jnp.nan, keys.dtype))
        values = jnp.where(is_finite, values, jnp.zeros((), values.dtype))
        layer = kv.write(layer, table, keys, values, window.slots)
        heads = self.attention(
            queries, layer, table, window, dtype=dtype, sliding_window=sliding_window
        )
        return heads, layer


def _is_split() -> bool:
    """Whether what is traced now is for a mesh axis that XLA splits by itself: for a call that it
    does not know it would bring all parts together on every device."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(mesh.shape[name] > 1 for name, kind in axes if kind == AxisType.Auto)


class NativeKernels(Kernels):
    """Those of `native`, and XLA's for what these cannot do."""

    def attend(self, config, params, qkv, angles, layer, table, window, **settings):
        """As `Kernels.attend`."""
        if _is_split() or not native.is_attention_supported(qkv, layer, table, window):
            return super().attend(config, params, qkv, angles, layer, table, window, **settings)
        cos, signed_sin = angles
        pair = (Ellipsis, 1) if config.rope.is_interleaved else (Ellipsis, 1, slice(None))
        return native.attend(
            qkv,
            layer,
            table,
            window,
            cos=cos[:, :, 0][pair],
            sin=signed_sin[:, :, 0][pair],
            is_interleaved=config.rope.is_interleaved,
            bias=params.get("qkv_bias"),
            query_norm=params.get("q_norm"),
            key_norm=params.get("k_norm"),
            epsilon=config.norm_epsilon,
            sliding_window=settings["sliding_window"],
        )


def _native_product(
    x: jax.Array, weight: jax.Array, *, is_gated: bool = False, **settings
) -> jax.Array:
    is_supported = native.is_product_supported(x, weight, is_gated=is_gated)
    multiply = native.product if is_supported and not _is_split() else product
    return multiply(x, weight, is_gated=is_gated, **settings)


XLA = Kernels()
KERNELS: Mapping[KernelsName, Kernels] = {
    "xla": XLA,
    "pallas": Kernels(attention=pallas_attention),
    "native": NativeKernels(product=_native_product),
}


def check_kernels(name: str) -> None:
    """Raises `SettingError` unless kernels of this name exist and can be used here."""
    if name not in KERNELS:
        raise SettingError(
            f"There are no kernels {name!r}; choose one of {', '.join(get_args(KernelsName))}."
        )
    if name == "native":
        if jax.default_backend() != "cpu":
            raise SettingError(
                f"kernels='native' was given, but JAX runs on {jax.default_backend()} and they are "
                f"for CPUs; choose 'xla' or 'pallas'."
            )
        if native.problem() is not None:
            raise SettingError(
                f"kernels='native' was given, but {native.problem()}; install one, or choose 'xla'."
            )


def default_kernels() -> KernelsName:
    """`native` on a CPU whose machine can compile them, otherwise `xla`."""
    is_native = jax.default_backend() == "cpu" and native.problem() is None
    return "native" if is_native else "xla"
