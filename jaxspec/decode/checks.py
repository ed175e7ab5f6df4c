"""Checks that what a model and a drafter return has the dtypes and shapes that the loop takes.

Nothing is computed: the functions are only traced for their shapes. The package's own parts are not
traced, because that would cost every engine another trace and tests already check them; for the
package's models the parameters are checked. `jaxspec.testing` checks values.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import KVCache
from jaxspec.decode import loop as decode_loop
from jaxspec.decode.parts import RoundParts, params_of
from jaxspec.decode.round import draft_and_verify
from jaxspec.decode.state import batch_view
from jaxspec.drafters.base import Drafter, draft_with, function_params
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.errors import ModelError
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.prefill import chain_window
from jaxspec.runtime.kinds import first_mismatch, kinds_of
from jaxspec.types import EngineShape, PyTree


def check_parts(parts: RoundParts, drafter: Drafter | None) -> None:
    """Raises `ModelError` unless rounds can run with target and drafter.

    Args:
      parts: the engine's, whose drafter has its defaults filled in.
      drafter: the drafter that the caller gave, or None.
    """
    models = [parts.target]
    if isinstance(drafter, DraftModel):
        models.append(drafter.model)
    for model in models:
        if isinstance(model, LanguageModel):
            model.check_params()
        else:
            check_model(model, parts.round_shape)
    if drafter is not None and not type(drafter).__module__.startswith("jaxspec."):
        check_drafter(parts)


def check_model(model: Model, shape: EngineShape) -> None:
    """Raises `ModelError` unless the model's functions return what `models.base.Model` says."""
    who, num_rows, length = f"The model {model.name}", shape.batch_size, shape.verify_length
    cache = jax.eval_shape(lambda: model.init_cache(num_rows, shape.max_length))
    if not isinstance(cache, KVCache):
        raise ModelError(
            f"{who} made a {type(cache).__name__} in `init_cache`; make a jaxspec.cache.pages."
            "KVCache, which rows of different lengths can share."
        )
    if cache.table.shape[0] != num_rows or cache.capacity < shape.max_length:
        raise ModelError(
            f"{who} made a cache of {cache.table.shape[0]} rows of {cache.capacity} slots in "
            f"`init_cache`, where {num_rows} rows of {shape.max_length} were asked for; make as "
            "many as it is given."
        )
    window = chain_window(jnp.zeros((num_rows,), jnp.int32), length)
    tokens = jax.ShapeDtypeStruct((num_rows, length), jnp.int32)
    hidden, after = jax.eval_shape(model.forward, model.params, tokens, window, cache)
    _check_same(f"{who} returned from `forward` a cache with", after, cache)
    size = hidden.shape[-1] if hidden.ndim else 0
    expected: Any = jax.ShapeDtypeStruct((num_rows, length, size), hidden.dtype)
    _check_same(f"{who} returned from `forward` hidden states", hidden, expected)
    logits = jax.eval_shape(model.logits, model.params, hidden)
    expected = jax.ShapeDtypeStruct((num_rows, length, model.vocab_size), jnp.float32)
    _check_same(f"{who} returned from `logits`", logits, expected)


def check_drafter(parts: RoundParts) -> None:
    """Raises `ModelError` unless the drafter's functions return what `drafters.base` says."""
    drafter, params = parts.drafter, params_of(parts)
    who, own = f"The drafter {drafter.name}", function_params(drafter, params)

    shape = parts.resident_shape
    state = jax.eval_shape(lambda: decode_loop.init(parts))
    rows = jax.eval_shape(batch_view, state)
    for name, size in (("admit", ()), ("catch_up", (shape.chunks_per_call,))):
        function = functools.partial(getattr(drafter, name), shape)
        row = jax.ShapeDtypeStruct(size, jnp.int32)
        after = jax.eval_shape(function, own, state.drafter, rows, row)
        _check_same(f"{who} returned from `{name}` a state with", after, state.drafter)

    shape = parts.round_shape
    state = jax.eval_shape(lambda: decode_loop.empty(parts, shape))
    rows = jax.eval_shape(functools.partial(batch_view, is_chain=drafter.is_chain), state)
    if drafter.uses_target_cache:
        propose = functools.partial(drafter.propose, shape)
        returned = jax.eval_shape(propose, own, state.drafter, rows, target_cache=state.cache)
        if len(returned) != 3:
            raise ModelError(
                f"{who} has uses_target_cache and returned {len(returned)} values from `propose`, "
                "where the engine takes draft, state and the target's cache; return the cache too."
            )
    propose = functools.partial(draft_with, drafter, shape)
    draft, after, cache = jax.eval_shape(propose, params, state.drafter, rows, state.cache)
    _check_same(f"{who} returned from `propose` a state with", after, state.drafter)
    _check_same(f"{who} returned from `propose` a cache with", cache, state.cache)
    size = (shape.batch_size, shape.num_nodes)
    expected = {
        "tokens": jax.ShapeDtypeStruct(size, jnp.int32),
        "parents": jax.ShapeDtypeStruct(size, jnp.int32),
        "num_valid": jax.ShapeDtypeStruct(size[:1], jnp.int32),
    }
    if draft.q is not None:
        expected["q"] = jax.ShapeDtypeStruct((*size, shape.vocab_size), jnp.float32)
    found = {name: getattr(draft, name) for name in expected}
    _check_same(f"{who} returned a draft with", found, expected)

    info, _, after = jax.eval_shape(functools.partial(draft_and_verify, parts), params, state)
    commit = functools.partial(drafter.commit, shape)
    after = jax.eval_shape(commit, own, after, rows, info)
    _check_same(f"{who} returned from `commit` a state with", after, state.drafter)


def _check_same(what: str, found: PyTree, expected: PyTree) -> None:
    """Raises `ModelError` unless two pytrees have the same structure, dtypes and shapes."""
    mismatch = first_mismatch(kinds_of(found), kinds_of(expected))
    if mismatch is not None:
        path, given, wanted = mismatch
        where = f" at {path}" if path else ""
        raise ModelError(f"{what} {given}{where}, where the engine takes {wanted}; return that.")
    if jax.tree.structure(found) != jax.tree.structure(expected):
        raise ModelError(
            f"{what} the structure {jax.tree.structure(found)}, where the engine takes "
            f"{jax.tree.structure(expected)}; return the containers that it was given."
        )
