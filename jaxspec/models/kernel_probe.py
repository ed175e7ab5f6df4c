"""Do a model's kernels compute on this device what XLA's compute?

Kernels for GPUs are written ahead of the devices that they will run on, and a compiler may refuse
or miscompile them there. So engines on an accelerator try them before they rely on them: the
attention of one layer, in windows as wide as the engine's, over random KV, with NaN in every slot
that nothing may read. Where they fail or give other numbers, the next kernels of `FALLBACKS` take
their place, and a warning says so. The results themselves are compared with a tolerance, because
sums are rounded in another order.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.kernels.base import XLA, Kernels
from jaxspec.kernels.registry import KernelsName, get_kernels, problem_on_gpu
from jaxspec.kernels.xla import block_attention
from jaxspec.models import layers
from jaxspec.models.base import LanguageModel
from jaxspec.models.prefill import chain_window
from jaxspec.models.shapes import shortened
from jaxspec.models.width_probe import branches
from jaxspec.runtime.environment import note_fallback
from jaxspec.types import EngineShape, PyTree, Window

_log = logging.getLogger(__name__)

# What takes the place of kernels that do not work.
FALLBACKS: dict[KernelsName, KernelsName] = {"mosaic": "pallas", "pallas": "xla", "native": "xla"}
# The largest difference, as a fraction of the largest value of its token. (Attention over a long
# context averages many values, so its results are far smaller than over a short one.) In 16 bits
# kernels that work differ by one unit in the last place, or by two (7.8e-3 each in bfloat16).
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 8e-3}
MOST_ROWS = 4  # of a probe, whatever the batch size: rows do not depend on each other


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSize:
    """A window that is tried.

    Attributes:
      num_rows: B, its rows; their contexts are of lengths from 0 to the capacity.
      num_tokens: T, tokens per row.
      capacity: S, slots per row.
      tree_depth: depth of the deepest node, 0 for chains.
    """

    num_rows: int
    num_tokens: int
    capacity: int
    tree_depth: int = 0


def windows_of(shape: EngineShape, *, verify_length: int | None = None) -> tuple[WindowSize, ...]:
    """The windows of an engine of this shape: of one token, of a round, and of a prefill call.

    Args:
      shape: the engine's.
      verify_length: tokens of a round's window, if not the engine's.
    """
    widest = shape.verify_length if verify_length is None else verify_length
    rows = min(shape.batch_size, MOST_ROWS)
    tree_depth = 0 if widest == 1 else min(shape.tree_depth, widest - 1)
    chunk = min(shape.prefill_chunk, shape.max_length)
    sizes = [
        (rows, 1, 0),
        (rows, widest, tree_depth),
        (min(shape.chunks_per_call, MOST_ROWS), chunk, 0),
    ]
    return tuple(
        WindowSize(num_rows=rows, num_tokens=tokens, capacity=shape.max_length, tree_depth=depth)
        for rows, tokens, depth in dict.fromkeys(sizes)
    )


_found: dict[Hashable, str | None] = {}  # by everything that `problem` depends on


def with_working_kernels(model: LanguageModel, windows: Sequence[WindowSize]) -> LanguageModel:
    """The model with its own kernels, or with the first of their `FALLBACKS` that work for these
    windows on this device. XLA's are not tried."""
    while model.kernels != "xla":
        key = (model.config, model.dtype, model.kv_dtype, model.kernels, model.platform, *windows)
        if key not in _found:
            _found[key] = problem(model, windows)
        why = _found[key]
        if why is None:
            break
        instead = FALLBACKS[model.kernels]
        if instead == "pallas" and problem_on_gpu(instead) is not None:
            instead = FALLBACKS[instead]
        _log.warning(
            "The %s kernels cannot be used for %s on this device: %s. The kernels %s are used "
            "instead; they are slower, and two tokens that tie within rounding may be exchanged.",
            model.kernels,
            model.name,
            why,
            instead,
        )
        why = f"{model.kernels}: {why}"
        note_fallback(why)
        model = dataclasses.replace(model, kernels=instead, kernels_fallback=why)
    return model


def problem(model: LanguageModel, windows: Sequence[WindowSize]) -> str | None:
    """Why the model's kernels cannot be used for these windows here, or None if they can."""
    try:
        worst = max(disagreement(model, window) for window in windows)
    except Exception as error:  # compilers and devices raise what they like
        said = str(error).partition("\n")[0].rstrip(".")[:200] or "it says nothing"
        return f"{type(error).__name__}: {said}"
    tolerance = TOLERANCE[jnp.dtype(model.dtype).name]
    if model.kv_dtype == "int8":
        tolerance = max(tolerance, 2 / 127)  # a code may be rounded the other way
    if worst <= tolerance:
        return None
    return f"its results differ from XLA's by {worst:.1e} of the largest value of a token"


def disagreement(model: LanguageModel, size: WindowSize) -> float:
    """The largest difference between what the model's kernels and XLA's compute, as a fraction of
    the largest value of the same token; infinite if a value is not finite. Compared are the heads
    of a window, the KV that is written, and products where the kernels have their own."""
    kernels = get_kernels(model.kernels, model.platform)
    reference = dataclasses.replace(
        XLA.on(model.platform), attention=functools.partial(block_attention, is_reference=True)
    )
    spans = {model.config.sliding_window(index) for index in range(model.config.num_layers)}
    found = [_attention(model, size, span, (kernels, reference)) for span in spans]
    if kernels.product is not XLA.product:
        found.append(_products(model, size.num_rows * size.num_tokens, (kernels, reference)))
    return max(found)


def _attention(
    model: LanguageModel, size: WindowSize, span: int | None, both: tuple[Kernels, Kernels]
) -> float:
    config, dtype = model.config, model.dtype
    num_rows, num_tokens, capacity = size.num_rows, size.num_tokens, size.capacity
    # On the host, because the parameters may be on several devices.
    first = {
        name: np.asarray(value)
        for name, value in model.params["layers"][0].items()
        if name in ("qkv_bias", "q_norm", "k_norm")
    }
    settings = layers.attention_settings(config, first)
    one_layer = dataclasses.replace(model, config=shortened(config, 1))

    @jax.jit
    def inputs(key: jax.Array, start: jax.Array) -> PyTree:
        cache = one_layer.init_cache(num_rows, capacity)
        keys = jax.random.split(key, 3)
        shape = (num_rows, num_tokens, config.num_kv_heads, config.group + 2, config.head_size)
        qkv = jax.random.normal(keys[0], shape, dtype)
        slots = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (num_rows, capacity))
        is_committed = (slots < start[:, None])[..., None, None]
        shape = (num_rows, capacity, config.num_kv_heads, config.head_size)
        # Codes have no NaN; large values take its place.
        hole = jnp.asarray(jnp.nan if model.kv_dtype is None else 1e3, dtype)
        k, v = (
            jnp.where(is_committed, jax.random.normal(key, shape, dtype), hole) for key in keys[1:]
        )
        # `kv.write` stores NaN as it is; `Kernels.attend` would not.
        return qkv, cache.replace(layers=(kv.write(cache.layers[0], cache.table, k, v, slots),))

    start = np.linspace(0, capacity - num_tokens, num_rows).astype(np.int32)
    window = chain_window(jnp.asarray(start), num_tokens)
    if size.tree_depth > 0:
        depth = np.arange(num_tokens, dtype=np.int32)
        depth[1:] = 1 + (depth[1:] - 1) % size.tree_depth
        window = window.replace(
            positions=window.start[:, None] + depth[None],
            paths=branches(num_rows, depth, size.tree_depth),
        )

    @functools.partial(jax.jit, static_argnums=0)
    def run(kernels: Kernels, qkv: jax.Array, cache: kv.KVCache, window: Window) -> PyTree:
        heads, after = kernels.attend(
            qkv,
            cache.layers[0],
            cache.table,
            window,
            layers.rotary_angles(config.rope, window.positions),
            dtype=cache.dtype,
            **cache.span(span),
            **settings,
        )
        return heads, *kv.read_slots(after, cache.table, window.slots, dtype)

    given = inputs(jax.random.key(0), start)
    ours, theirs = (run(kernels, *given, window) for kernels in both)
    return _difference(ours, theirs)


def _products(model: LanguageModel, num_tokens: int, both: tuple[Kernels, Kernels]) -> float:
    """Of a product with a norm, and of one with a gate and a residual."""
    width, dtype = model.config.width, model.dtype
    keys = jax.random.split(jax.random.key(1), 4)
    hidden = jax.random.normal(keys[0], (num_tokens, width), dtype)
    gates = jax.random.normal(keys[1], (num_tokens, 2, width), dtype)
    weight = jax.random.normal(keys[2], (width, width), dtype)
    norm = jax.random.normal(keys[3], (width,), dtype)

    def run(kernels: Kernels) -> PyTree:
        packed = kernels.pack(weight)
        normed = kernels.product(hidden, packed, norm=norm, epsilon=1e-6)
        return normed, kernels.product(gates, packed, is_gated=True, residual=hidden)

    ours, theirs = (jax.jit(functools.partial(run, kernels))() for kernels in both)
    return _difference(ours, theirs)


def _difference(ours: PyTree, theirs: PyTree) -> float:
    worst = 0.0
    for mine, reference in zip(ours, theirs, strict=True):
        mine, reference = np.asarray(mine, np.float32), np.asarray(reference, np.float32)
        # Heads and KV are by row and token, products by token.
        of_a_token = tuple(range(min(2, mine.ndim - 1), mine.ndim))
        scale = np.maximum(np.abs(reference).max(axis=of_a_token, keepdims=True), 1e-9)
        found = (np.abs(mine - reference) / scale).max()
        worst = max(worst, float(found) if np.isfinite(found) else np.inf)
    return worst
