"""Dtypes and shapes of pytrees as text, for messages about arrays that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def kind_of(array: Any) -> str:
    """Dtype and shape of an array, or of a shape: `float32[8, 128]`."""
    return f"{getattr(array, 'dtype', type(array).__name__)}{list(np.shape(array))}"


def are_arrays(tree: Any) -> bool:
    """Whether a pytree has leaves, and all of them are arrays of numbers or flags."""
    try:
        leaves = jax.tree.leaves(tree)
    except (TypeError, ValueError):  # a dict whose keys cannot be sorted
        return False
    return bool(leaves) and all(
        isinstance(leaf, jax.Array | np.ndarray)
        and (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_)
        for leaf in leaves
    )


def kinds_of(tree: Any) -> dict[str, str]:
    """`kind_of` each array of a pytree, by its path: `{"['layers'][0]": "float32[8, 128]"}`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): kind_of(leaf) for path, leaf in leaves}


def first_mismatch(
    found: Mapping[str, str], expected: Mapping[str, str]
) -> tuple[str, str, str] | None:
    """The first path at which two results of `kinds_of` differ, with what was found there and what
    was expected (`nothing` if there is no array); None if they are equal."""
    for path in [*expected, *found]:
        pair = found.get(path, "nothing"), expected.get(path, "nothing")
        if pair[0] != pair[1]:
            return path, *pair
    return None
