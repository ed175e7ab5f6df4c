"""Requirements that both batteries share, and helpers for checking them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audit.judge import first_difference
from jaxspec.conformance.report import Broken
from jaxspec.engine.engine import Engine
from jaxspec.requests.completions import Completion
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.kinds import kind_of, kinds_of
from jaxspec.types import PyTree

ROWS = 3
WINDOW = 4
MAX_TOKENS = 24  # for requests that go through an engine
CHUNK = 16  # prompt tokens of one prefill call
LARGEST_CONSTANT = 2**18  # elements; larger arrays must be parameters


def demand(condition: Any, message: str) -> None:
    """Raises `Broken` unless the condition holds."""
    if not condition:
        raise Broken(message)


def equal_values(a: PyTree, b: PyTree) -> bool:
    """Equality of the values of all arrays; NaN equals NaN."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(wide(x), wide(y), equal_nan=True) for x, y in pairs)


def distance_of(a: Any, b: Any) -> float:
    """Root mean square difference over the last axis, relative to the size of `b`: the largest."""
    a, b = (np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1]) for x in (a, b))
    size = np.sqrt(np.mean(b**2)) + np.finfo(np.float64).tiny
    distance = np.sqrt(np.mean((a - b) ** 2, axis=1)) / size
    return float(np.max(distance)) if np.all(np.isfinite(distance)) else float("inf")


def wide(values: Any) -> np.ndarray:
    """Floating values in fp32, on the host."""
    return np.asarray(jnp.asarray(values).astype(jnp.float32))


def rounding_of(*trees: PyTree) -> float:
    """Rounding of the narrowest floating dtype among arrays of at least two dimensions."""
    dtypes = {
        leaf.dtype
        for leaf in jax.tree.leaves(trees)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 1
    }
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=2.0**-23)


def demand_methods(subject: Any, *names: str) -> None:
    """It has methods of these names."""
    for name in names:
        demand(callable(getattr(subject, name, None)), f"it has no method {name}")


def demand_name_and_params(subject: Any, hint: str = "") -> None:
    """It has a name for reports, and parameters that are arrays."""
    name = getattr(subject, "name", None)
    demand(isinstance(name, str) and name, f"name is {name!r}, not a text")
    demand(hasattr(subject, "params"), f"it has no params{hint}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(subject.params):
        demand(
            isinstance(leaf, jax.Array | np.ndarray),
            f"params{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, not an array",
        )


def demand_nothing_closed_over(function: Callable, params: PyTree, *arguments: Any) -> None:
    """Looks for parameters among the constants of what a function traces to."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params) if leaf.size > 1]
    for constant in _constants(jax.make_jaxpr(function)(params, *arguments)):
        array = np.asarray(constant)
        kind = f"an array {kind_of(array)}"
        is_parameter = any(
            kind_of(leaf) == kind_of(array) and leaf.tobytes() == array.tobytes() for leaf in leaves
        )
        message = f"{kind} that is a parameter was closed over instead of taken from params"
        demand(not is_parameter, message)
        message = f"{kind} was closed over, so it is compiled in; make it a parameter"
        demand(array.size <= LARGEST_CONSTANT, message)


def _constants(closed: Any) -> list[Any]:
    found = list(closed.consts)
    for equation in closed.jaxpr.eqns:
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            if hasattr(value, "jaxpr") and hasattr(value, "consts"):
                found += _constants(value)
    return found


def demand_same_tree(before: PyTree, after: PyTree, what: str) -> None:
    """A carried value must keep its structure, shapes and dtypes, or every call is traced anew."""
    old, new = kinds_of(before), kinds_of(after)
    for path, kind in old.items():
        demand(path in new, f"{what} lost {path or 'its leaf'}")
        demand(new[path] == kind, f"{what}{path} became {new[path]}, it was {kind}")
    for path in new:
        demand(path in old, f"{what} gained {path}")
    demand(
        jax.tree.structure(before) == jax.tree.structure(after),
        f"{what} changed its structure (a list for a tuple, or a static field)",
    )


def mixed_params(number: int, **changes: Any) -> SamplingParams:
    """How request `number` is decoded: greedy and sampled ones take turns."""
    kinds = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.9})
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 7 + number}
    return SamplingParams(**{**fields, **kinds[number % len(kinds)], **changes})


def demand_same_output(plain: Sequence[Completion], drafted: Sequence[Completion]) -> int:
    """Outputs are equal token by token; returns how many drafts were accepted on the way."""
    for index, (expected, found) in enumerate(zip(plain, drafted, strict=True)):
        first = first_difference(expected.token_ids, found.token_ids)
        demand(first is None, f"request {index} differs from plain decoding from token {first} on")
    return sum(completion.acceptance.num_accepted_tokens for completion in drafted)


def demand_compiled_once(engine: Engine) -> str:
    """Each program of an engine that has been used was compiled once; returns that in words."""
    for name, size in engine.executor.compile_counts().items():
        is_once = size == 1 or name not in ("admit", "prefill", "run")
        demand(is_once, f"the program {name!r} was compiled {size} times")
    return "admit, prefill and run were compiled once each"
