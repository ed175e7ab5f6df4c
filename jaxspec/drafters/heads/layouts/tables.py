"""What the layouts share: how one is described, and parts of tables.

A table is a list of `Leaf`, as of a model's family: which tensors a parameter is made of, and where
each goes. Weights are stored `[out, in]`; ours are `[in, out]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxspec.checkpoint.format import LeafPath
from jaxspec.convert.hf_config import HFConfig
from jaxspec.convert.hf_reader import Tensor
from jaxspec.convert.mapping import Leaf
from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.errors import ModelError

Shape: TypeAlias = tuple[int, ...]
Tensors: TypeAlias = Mapping[str, Tensor]


class TargetSizes(NamedTuple):
    """What a layout has to know of the target, whose sizes its files may not state."""

    vocab_size: int
    norm_epsilon: float


@dataclasses.dataclass(frozen=True)
class Layout:
    """A form in which heads are stored.

    Attributes:
      name: whose form it is, for messages.
      matches: whether files hold heads in this form, by the fields of their `config.json` and the
        names of their tensors.
      select: of all tensors of the files, those of the heads, by the names that the table has.
      read_config: of tensors that were selected, `config.json` and the target.
      leaves: the table, for a configuration, the tensors and `config.json`.
      config_fields: of `config.json`, for heads to be written; None where this form is only read.
    """

    name: str
    matches: Callable[[HFConfig, Iterable[str]], bool]
    select: Callable[[Tensors], Tensors]
    read_config: Callable[[Tensors, HFConfig, TargetSizes], HeadsConfig]
    leaves: Callable[[HeadsConfig, Tensors, HFConfig], list[Leaf]]
    config_fields: Callable[[HeadsConfig], dict[str, Any]] | None = None


def as_it_is(path: LeafPath, name: str, *shape: int) -> Leaf:
    """A parameter that is stored as it is."""
    return Leaf(path, {name: shape})


def product(path: LeafPath, name: str, num_inputs: int, num_outputs: int) -> Leaf:
    """The weight of a product, stored `[out, in]`."""
    return Leaf(path, {name: (num_outputs, num_inputs)}, lambda weight: [(..., weight.T)])


def zero(path: LeafPath) -> Leaf:
    """A parameter that is not stored, because it is zero."""
    return Leaf(path, {}, lambda: [(..., np.zeros((), np.float32))])


def matrix_sizes(tensors: Tensors, name: str, where: str) -> tuple[int, int]:
    """Outputs and inputs of the weight of this name.

    Raises:
      ModelError: it is absent, or no matrix.
    """
    shape = tensors[name].shape if name in tensors else ()
    if len(shape) != 2 or 0 in shape:
        found = f"{name} {list(shape)}" if name in tensors else f"no {name}"
        raise ModelError(
            f"The heads in {where} have {found}; it must be a matrix, so fetch them again."
        )
    return shape[0], shape[1]
