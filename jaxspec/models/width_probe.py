"""Do a token's bits depend on the width of the window that it is computed in?

They do with XLA's products: a different number of rows means a different order of sums. Kernels
that always sum in one order declare it (`Kernels.is_width_invariant`). An engine may then score a
token in whichever window is cheapest, down to plain decoding's one token, and leave out what nobody
drafted (`Kernels.skips_padding`), and still promise the same bits. The declaration is tested before
it is relied on: with one layer and the head, and the model's own weights. What follows the logits
is tested too: filters, draws and log-probabilities.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Hashable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import sampling
from jaxspec.cache import pages as kv
from jaxspec.kernels import sums
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel, Model, kernels_of, logits_of, packed_model
from jaxspec.models.prefill import chain_window
from jaxspec.models.shapes import shortened
from jaxspec.runtime.environment import loops_run_on_host
from jaxspec.types import PyTree, Window

_log = logging.getLogger(__name__)

# Returns logits `[B, T, V]` of tokens `[B, T]` in a window, and the cache.
_Score: TypeAlias = Callable[[PyTree, jax.Array, Window, kv.KVCache], tuple[jax.Array, kv.KVCache]]

_InitCache: TypeAlias = Callable[[int, int], kv.KVCache]  # given a number of rows and of slots

NUM_COUNTS = 6  # ways to leave out entries of the rows that are tried

_found: dict[Hashable, bool] = {}  # keyed by everything that a `LanguageModel`'s bits depend on


def is_width_invariant(
    model: Model, *, batch_size: int, verify_length: int, tree_depth: int = 0
) -> bool:
    """Whether tokens get the same bits in windows of one token and of `verify_length`, whatever
    `Window.num_live` leaves out: logits, KV, draws and log-probabilities.

    The model must declare it (see `Model`); the declaration is then tested, once per architecture,
    dtype, kernels and size. A declaration that turns out to be wrong is logged as a warning.
    Kernels leave to XLA what they cannot do (long windows, some dtypes); their declaration does not
    cover this, and nothing is tested.

    Args:
      model: the target.
      batch_size: rows of a batch.
      verify_length: tokens of the widest window.
      tree_depth: the greatest depth of a tree in this window, 0 for chains.
    """
    if not getattr(model, "is_width_invariant", False):
        return False
    model = packed_model(model)
    size = batch_size, verify_length, tree_depth
    if not isinstance(model, LanguageModel):
        return _try_widths(model, model.params, *size, score=_whole(model), init=model.init_cache)
    key = (model.config, model.dtype, model.kv_dtype, model.kernels, model.platform, *size)
    if key not in _found:
        first = {**model.params, "layers": model.params["layers"][:1]}
        score, init = _first_layer(model)
        _found[key] = _try_widths(model, first, *size, score=score, init=init)
    return _found[key]


def _whole(model: Model) -> _Score:
    def score(params, tokens, window, cache):
        hidden, cache = model.forward(params, tokens, window, cache)
        return logits_of(model, params, hidden, window), cache

    return score


def _first_layer(model: LanguageModel) -> tuple[_Score, _InitCache]:
    """The embedding, one layer and the head; a cache for that layer."""
    config, kernels = model.config, kernels_of(model)

    def score(params, tokens, window, cache):
        hidden = decoder.embed(params, tokens)
        hidden, cache = decoder.run_layers(
            config, params, hidden, window, cache, stop=1, kernels=kernels
        )
        return decoder.head(config, params, hidden, window=window, kernels=kernels), cache

    one_layer = dataclasses.replace(model, config=shortened(config, 1))
    return score, one_layer.init_cache


def _try_widths(
    model: Model,
    params: PyTree,
    num_rows: int,
    num_tokens: int,
    tree_depth: int,
    *,
    score: _Score,
    init: _InitCache,
) -> bool:
    """Whether a window and its tokens one at a time give the same logits, bit for bit, and for
    chains the same KV (a tree's is stored in other slots). With kernels that leave out padding,
    other windows leave out some of the entries, and all of some rows."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, model.vocab_size, (num_rows, num_tokens))
    counts = random.integers(0, num_tokens, (NUM_COUNTS, num_rows), np.int32, endpoint=True)
    counts = counts[: NUM_COUNTS * kernels_of(model).skips_padding]
    depth = np.arange(num_tokens, dtype=np.int32)
    if tree_depth > 0:
        depth[1:] = 1 + (depth[1:] - 1) % tree_depth
    # One block more than the window needs: the context fills it in some rows, and not in others.
    capacity = kv.BLOCK + kv.round_up_to_block(num_tokens)
    start = np.linspace(capacity - num_tokens, 1, num_rows)

    # One program, because compiling takes most of the time here.
    @jax.jit
    def both_ways(params, tokens, start):
        cache = _with_context(init(num_rows, capacity))
        window = chain_window(start, num_tokens)
        if tree_depth > 0:
            window = window.replace(
                positions=start[:, None] + depth[None],
                paths=branches(num_rows, depth, tree_depth),
            )
        at_once = score(params, tokens[:, depth], window, cache)

        def has_same_bits(num_live):
            some = window.replace(num_live=num_live)
            of_some, _ = score(params, tokens[:, depth], some, cache)
            is_live = jnp.arange(num_tokens, dtype=jnp.int32)[None] < num_live[:, None]
            one, other = (lax.bitcast_convert_type(x, jnp.uint32) for x in (of_some, at_once[0]))
            return jnp.all((one == other) | ~is_live[..., None])

        are_same = lax.map(has_same_bits, counts) if len(counts) else jnp.ones((0,), bool)

        def score_one(cache, index):
            token = lax.dynamic_slice_in_dim(tokens, index, 1, axis=1)
            logits, cache = score(params, token, chain_window(start + index, 1), cache)
            return cache, logits[:, 0]

        written, logits = lax.scan(score_one, cache, jnp.arange(num_tokens, dtype=jnp.int32))
        one_by_one = jnp.swapaxes(logits, 0, 1)[:, depth], written
        if tree_depth > 0:
            at_once, one_by_one = at_once[0], one_by_one[0]
        return at_once, one_by_one, are_same

    lowered = both_ways.lower(params, tokens.astype(np.int32), start.astype(np.int32))
    if isinstance(model, LanguageModel) and "dot_general" in lowered.as_text():
        return False  # the kernels leave a product of this size to XLA
    *found, are_same = lowered.compile()(params, tokens.astype(np.int32), start.astype(np.int32))
    at_once, one_by_one = (jax.tree.leaves(jax.device_get(each)) for each in found)
    if not _are_equal(at_once, one_by_one):
        _log.warning(
            "%s declares that its results do not depend on the width of a window, but %s of "
            "%d tokens and of 1 gave other bits; every round scores %d tokens instead.",
            model.name,
            "windows" if tree_depth == 0 else "trees",
            num_tokens,
            num_tokens,
        )
        return False
    if not np.all(are_same):
        _log.warning(
            "%s declares that its results do not depend on the width of a window, but they depend "
            "on how many of its tokens are left out; every round scores %d tokens instead.",
            model.name,
            num_tokens,
        )
        return False
    if tree_depth == 0 and not _are_equal(*_draw_widths(found[0][0], loops_run_on_host())):
        _log.warning(
            "Draws and log-probabilities of %d tokens at once and of 1 have other bits on this "
            "device; every round scores %d tokens instead.",
            num_tokens,
            num_tokens,
        )
        return False
    return True


def _are_equal(one: PyTree, other: PyTree) -> bool:
    """Whether two trees of arrays are equal, bit for bit."""
    pairs = zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (one, other)), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


@functools.partial(jax.jit, static_argnums=1)
def _draw_widths(logits: jax.Array, runs_on_host: bool) -> PyTree:
    """What follows from logits `[B, T, V]`, with several positions at once and with one at a time:
    log-probabilities of token 0 and, of as many positions as are drawn together, the tokens drawn
    and their log-probabilities after top-p."""
    num_rows, num_tokens, vocab_size = logits.shape
    # The mass of the tokens that are at least as likely as the one in the middle: a sum that is
    # rounded differently keeps other tokens at the first position.
    p = sums.softmax(logits[:, 0])
    top_p = sums.total(jnp.where(p >= p[:, vocab_size // 2, None], p, 0))[:, 0]
    rows = sampling.neutral_sampling(num_rows).replace(top_p=top_p, loops_run_on_host=runs_on_host)

    def draw(logits: jax.Array, start: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        filtered = sampling.filtered_logits(logits, rows)
        position = start + jnp.arange(logits.shape[1], dtype=jnp.int32)
        position = jnp.broadcast_to(position, logits.shape[:2])
        noise = sampling.gumbel(sampling.position_keys(rows, position), vocab_size)
        drawn, _ = sampling.greedy_tokens(filtered + noise)
        return drawn, sampling.of_tokens(sums.log_softmax(filtered), drawn)

    def one_by_one(compute: Callable[..., PyTree], num: int) -> PyTree:
        def at(index: jax.Array) -> PyTree:
            here = lax.dynamic_slice_in_dim(logits, index, 1, axis=1)
            return jax.tree.map(lambda found: found[:, 0], compute(here, index))

        return jax.tree.map(jnp.transpose, lax.map(at, jnp.arange(num, dtype=jnp.int32)))

    def logprobs(logits: jax.Array, start: jax.Array | int) -> jax.Array:
        return sums.log_softmax(logits)[..., 0]

    size = sampling.num_drawn_together(num_rows, num_tokens, loops_run_on_host=runs_on_host)
    return (
        (draw(logits[:, :size], 0), logprobs(logits, 0)),
        (one_by_one(draw, size), one_by_one(logprobs, num_tokens)),
    )


def branches(num_rows: int, depth: np.ndarray, tree_depth: int) -> jax.Array:
    """`Window.paths` of a tree whose branches all start at its root and have the greatest depth,
    with entries in the order of their branches; `depth` is `[T]`."""
    entry, place = np.arange(len(depth))[:, None], np.arange(tree_depth + 1)
    is_below_root = (place > 0) & (place <= depth[:, None])
    paths = np.where(is_below_root, entry - depth[:, None] + place, 0).astype(np.int32)
    return jnp.broadcast_to(paths, (num_rows, *paths.shape))


def _with_context(cache: kv.KVCache) -> kv.KVCache:
    """The cache with some KV in every slot, the same in every row."""
    num_rows, num_slots = cache.table.shape[0], cache.capacity
    slots = jnp.broadcast_to(jnp.arange(num_slots, dtype=jnp.int32), (num_rows, num_slots))

    def fill(layer: kv.LayerCache) -> kv.LayerCache:
        _, num_heads, _, head_size = layer.k.shape
        shape = (num_slots, num_heads, head_size)
        some = jnp.sin(jnp.arange(math.prod(shape), dtype=jnp.float32)).astype(cache.dtype)
        some = jnp.broadcast_to(some.reshape(shape), (num_rows, *shape))
        return kv.write(layer, cache.table, some, some[:, ::-1], slots)

    return cache.replace(layers=tuple(map(fill, cache.layers)))
