"""Models with shapes instead of weights, for planning and compiling."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxspec.kernels.registry import KernelsName
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShapeModel(LanguageModel):
    """A model whose parameters are `jax.ShapeDtypeStruct`s.

    Its functions can be traced, lowered and compiled, but not run.
    """

    def pack(self, params: PyTree) -> PyTree:
        """The parameters as they are, because they already have the form that the kernels read."""
        return params


def shape_model(
    config: ModelConfig,
    *,
    name: str,
    dtype: Any,
    kernels: KernelsName = "xla",
    is_packed: bool = True,
    **options: Any,
) -> ShapeModel:
    """A model of this architecture with shapes instead of weights. Nothing is allocated.

    Args:
      config: architecture.
      name: for reports.
      dtype: that of parameters, compute and cache.
      kernels: see `LanguageModel`.
      is_packed: whether the parameters have the form that `LanguageModel.pack` makes on this
        machine; False leaves them as they are stored, for another kind of device.
      **options: other fields of `LanguageModel`.
    """

    shapes = decoder.param_shapes(config)
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=decoder.is_shape
    )
    if is_packed:
        plain = LanguageModel(name=name, config=config, params=params, kernels=kernels)
        params = jax.eval_shape(plain.pack, params)
    return ShapeModel(name=name, config=config, params=params, kernels=kernels, **options)


def shortened(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The architecture with at most the first `num_layers` layers."""
    num_layers = min(num_layers, config.num_layers)
    windows = config.sliding_windows[:num_layers]
    return dataclasses.replace(config, num_layers=num_layers, sliding_windows=windows)
