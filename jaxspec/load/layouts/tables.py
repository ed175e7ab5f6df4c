"""What the layouts share: how one is described, parts of tables, and how parameters are placed.

A table is a list of `Leaf`, as of a model's family: which tensors a parameter is made of, and where
each goes. Weights are stored `[out, in]`; ours are `[in, out]`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxspec.checkpoint.format import LeafPath, as_params, leaf_paths
from jaxspec.convert import hub
from jaxspec.convert.hf_config import HFConfig
from jaxspec.convert.hf_reader import Tensor
from jaxspec.convert.mapping import Leaf
from jaxspec.convert.writer import assemble
from jaxspec.drafters.base import TrainedDrafter
from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.errors import JaxspecWarning, ModelError
from jaxspec.models.base import Model
from jaxspec.types import PyTree

Tensors: TypeAlias = Mapping[str, Tensor]


class Layouts(NamedTuple):
    """How a kind of drafter is read from files of other projects.

    Attributes:
      matches: whether a directory holds such files, by their names and `config.json`.
      fetch: fetches them from a repository, see `hub.Choose`.
      read: the configuration and the parameters in a directory, placed for a target, in a dtype;
        None is the target's.
      names: what may be named, for messages.
    """

    matches: Callable[[Path], bool]
    fetch: hub.Choose
    read: Callable[[Path, Model, Any], tuple[Any, PyTree]]
    names: str


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
    """

    name: str
    matches: Callable[[HFConfig, Iterable[str]], bool]
    select: Callable[[Tensors], Tensors]
    read_config: Callable[[Tensors, HFConfig, TargetSizes], HeadsConfig]
    leaves: Callable[[HeadsConfig, Tensors, HFConfig], list[Leaf]]


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


def place(
    drafter: type[TrainedDrafter],
    config: Any,
    leaves: Iterable[Leaf],
    tensors: Tensors,
    dtype: Any,
    target: Model,
) -> PyTree:
    """The parameters that a table makes of tensors, placed like the target's. Those of one name
    that are made of the same tensors (a head that serves all) are placed once.

    Args:
      drafter: their class.
      config: its configuration.
      leaves: the table.
      tensors: by name.
      dtype: of the weights.
      target: the model that they draft for.
    """
    shapes = drafter.param_shapes(config)
    sizes, sharding = dict(leaf_paths(shapes)), sharding_of(target)
    made: dict[Any, jax.Array] = {}
    placed: dict[LeafPath, jax.Array] = {}
    for leaf in leaves:
        key = (leaf.path[-1], *leaf.sources) if leaf.sources else leaf.path
        if key not in made:
            leaf_dtype = np.dtype(drafter.param_dtype(leaf.path, dtype))
            array = assemble(leaf, sizes[leaf.path], tensors, leaf_dtype)
            made[key] = jax.device_put(np.ascontiguousarray(array), sharding)
        placed[leaf.path] = made[key]
    return as_params(shapes, placed.__getitem__)


def warn_of_other_weights(directory: Path, made_for: str, target: Model) -> None:
    """Warns that a drafter was made for another target than this one."""
    warnings.warn(
        f"The weights in {directory} were made for {made_for}, whose weights are not those of "
        f"{target.name}: outputs stay the target's own, but fewer drafted tokens will be accepted "
        "than could be; train them on this target.",
        JaxspecWarning,
        stacklevel=5,
    )


def sharding_of(target: Model) -> jax.sharding.Sharding:
    """Where a drafter's parameters go: to all devices of the target's parameters, replicated."""
    found = next(
        (leaf.sharding for leaf in jax.tree.leaves(target.params) if isinstance(leaf, jax.Array)),
        jax.sharding.SingleDeviceSharding(jax.local_devices()[0]),
    )
    if isinstance(found, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(found.mesh, jax.sharding.PartitionSpec())
    return found
