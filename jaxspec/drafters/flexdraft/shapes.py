"""FlexDraft with shapes instead of weights, for planning and compiling."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxspec.drafters.flexdraft.config import FlexConfig, param_shapes
from jaxspec.drafters.flexdraft.drafter import FlexDraft
from jaxspec.models import decoder
from jaxspec.models.shapes import shortened
from jaxspec.types import PyTree


class ShapeFlexDraft(FlexDraft):
    """FlexDraft whose parameters are `jax.ShapeDtypeStruct`s, as they are stored.

    Its functions can be traced, lowered and compiled, but not run.
    """

    def pack(self, params: PyTree) -> PyTree:
        """Shapes of the parameters as the target's kernels read them."""
        return jax.eval_shape(super().pack, params)

    def resized(self, *, num_layers: int | None, dtype: Any) -> ShapeFlexDraft:
        """The same settings for another dtype and, unless `num_layers` is None, for at most this
        many first layers of the target (`models.shapes.shortened`). All but the first of them
        draft; the first one does too if every layer of the target does."""
        config, target = self.config, self.config.target
        if num_layers is not None and num_layers < target.num_layers:
            num_shallow = min(config.first_deep_layer, num_layers - 1)
            config = dataclasses.replace(
                config,
                target=shortened(target, num_layers),
                num_deep_layers=min(config.num_deep_layers, num_layers - num_shallow),
            )
        return self._with(config=config, params=_shapes(config, dtype))


def shape_flexdraft(config: FlexConfig, *, dtype: Any, **settings: Any) -> ShapeFlexDraft:
    """FlexDraft with these sizes and shapes instead of weights. Nothing is allocated.

    Args:
      config: sizes.
      dtype: that of the parameters, which is the target's.
      **settings: settings of `FlexDraft`.
    """
    return ShapeFlexDraft(config, _shapes(config, dtype), **settings)


def as_shapes(drafter: FlexDraft, *, dtype: Any) -> ShapeFlexDraft:
    """The same FlexDraft with shapes instead of weights."""
    return shape_flexdraft(
        drafter.config,
        dtype=dtype,
        mode=drafter.mode,
        confidence=drafter.confidence,
        rule=drafter.rule,
        block_size=drafter.block_size,
        name=drafter.label,
    )


def _shapes(config: FlexConfig, dtype: Any) -> PyTree:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        param_shapes(config),
        is_leaf=decoder.is_shape,
    )
