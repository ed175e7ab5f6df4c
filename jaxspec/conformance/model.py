"""The battery for models."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.conformance.checks import (
    CHUNK,
    ROWS,
    WINDOW,
    demand,
    demand_compiled_once,
    demand_methods,
    demand_name_and_params,
    demand_nothing_closed_over,
    demand_same_output,
    demand_same_tree,
    distance_of,
    equal_values,
    rounding_of,
    wide,
)
from jaxspec.conformance.report import (
    Broken,
    Check,
    ConformanceReport,
    chosen_checks,
    enters,
    run_checks,
)
from jaxspec.conformance.under_test import ModelUnderTest, rewritten
from jaxspec.models.base import Model, packed_model

MODEL_CHECKS: dict[str, Check] = {}


def check_model(
    model: Model,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    max_length: int = 256,
    seed: int = 0,
) -> ConformanceReport:
    """Checks that a model keeps the contracts that decoding relies on.

    Args:
      model: anything that follows the `Model` protocol.
      only: names of checks to run; default all of `MODEL_CHECKS`.
      skip: names of checks to leave out: `tree_paths` for a model that will only see chains,
        `positions` for one without positions.
      max_length: slots per row, a multiple of 128; only positions below it are used.
      seed: seed of the tokens and requests.

    Raises:
      SettingError: there is no such check.
    """
    chosen = chosen_checks(MODEL_CHECKS, only, skip)
    prepared = ModelUnderTest(
        packed_model(model), max_length=kv.round_up_to_block(max_length), seed=seed
    )
    return run_checks("model", model, chosen, prepared)


@enters(MODEL_CHECKS, "C6", "attributes and methods of the Model protocol")
def _protocol(b: ModelUnderTest) -> str:
    model = b.model
    demand_name_and_params(model)
    demand_methods(model, "init_cache", "forward", "logits")
    demand(jax.tree.leaves(model.params), "params holds no arrays")
    size = getattr(model, "vocab_size", None)
    demand(isinstance(size, int) and size > 1, f"vocab_size is {size!r}, not a number above 1")
    stops = getattr(model, "eos_token_ids", None)
    demand(isinstance(stops, tuple), f"eos_token_ids is {stops!r}, not a tuple")
    for stop in stops or ():
        is_token = isinstance(stop, int) and 0 <= stop < model.vocab_size
        demand(is_token, f"eos_token_ids holds {stop!r}, which is no token id")
    demand(hasattr(model, "tokenizer"), "it has no tokenizer (None will do)")
    if model.tokenizer is not None:
        demand_methods(model.tokenizer, "encode", "decode")
    return f"{len(jax.tree.leaves(model.params))} parameter arrays, V = {size}"


@enters(MODEL_CHECKS, "C1", "init_cache gives pages of their own to each of the rows asked for")
def _cache(b: ModelUnderTest) -> str:
    cache = b.empty()
    demand(cache.layers, "the cache has no layers")
    num_rows, num_blocks = cache.table.shape
    demand(num_rows == ROWS, f"it has {num_rows} rows where {ROWS} were asked for")
    demand(
        cache.capacity >= b.max_length,
        f"it has {cache.capacity} slots per row where {b.max_length} were asked for",
    )
    pages = np.asarray(cache.table)
    demand(len(np.unique(pages)) == pages.size, "two entries of its table name one page")
    num_pages = min(layer.k.shape[0] for layer in cache.layers)
    demand(pages.min() >= 0 and pages.max() < num_pages, "its table names a page that is not there")
    return f"{len(cache.layers)} layers, {num_rows * num_blocks} pages, {cache.dtype.name}"


@enters(MODEL_CHECKS, "C6", "hidden states [B, T, E], logits [..., V] in fp32")
def _shapes(b: ModelUnderTest) -> str:
    hidden, _, _ = jax.eval_shape(b.forward, b.model.params, *b.shapes)
    demand(
        hidden.ndim == 3 and hidden.shape[:2] == (ROWS, WINDOW),
        f"hidden states are {list(hidden.shape)}, not [{ROWS}, {WINDOW}, E]",
    )
    is_floating = jnp.issubdtype(hidden.dtype, jnp.floating)
    demand(is_floating, f"hidden states are {hidden.dtype}")
    for leading in ((ROWS, WINDOW), (ROWS,), (1, 1)):
        states = jax.ShapeDtypeStruct((*leading, hidden.shape[-1]), hidden.dtype)
        logits = jax.eval_shape(b.model.logits, b.model.params, states)
        expected = (*leading, b.model.vocab_size)
        demand(
            logits.shape == expected,
            f"logits of {list(states.shape)} are {list(logits.shape)}, not {list(expected)}",
        )
        demand(logits.dtype == jnp.float32, f"logits are {logits.dtype}, not float32")
    return f"hidden states {hidden.dtype}{list(hidden.shape)}"


@enters(MODEL_CHECKS, "C2", "the cache comes back as it was; other values trace nothing again")
def _static_shapes(b: ModelUnderTest) -> str:
    _, _, after = jax.eval_shape(b.forward, b.model.params, *b.shapes)
    demand_same_tree(b.shapes[0], after, "the cache")
    b.num_traces = 0
    cache = b.score(b.read, b.window, b.lengths)[2]
    b.score(cache, b.other(b.window), b.lengths + 1, is_running=[True, False, True])
    demand(b.num_traces <= 1, f"windows of one shape were traced {b.num_traces} times")
    return "one trace for all windows of one shape"


@enters(MODEL_CHECKS, "C6", "parameters are handed in, not closed over")
def _params(b: ModelUnderTest) -> str:
    params = b.model.params

    def run(params, cache, tokens, window):
        hidden, _ = b.model.forward(params, tokens, window, cache)
        return b.model.logits(params, hidden)

    demand_nothing_closed_over(run, params, *b.shapes)

    def change(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = b.rng.standard_normal(leaf.shape).astype(np.float32)
        return (jnp.asarray(wide(leaf)) * (1 + 0.5 * noise) + 0.1 * noise).astype(leaf.dtype)

    changed = jax.tree.map(change, params)
    start = np.zeros(ROWS, np.int32)
    hidden, logits, _ = b.score(b.empty(), b.window, start)
    new_hidden, new_logits, _ = b.score(b.empty(), b.window, start, params=changed)
    demand(not equal_values(hidden, new_hidden), "other parameters gave the same hidden states")
    demand(not equal_values(logits, new_logits), "other parameters gave the same logits")
    kept = b.model.logits(changed, hidden)
    demand(not equal_values(logits, kept), "logits do not depend on the parameters handed to them")
    return "no parameter among the constants; other parameters, other output"


@enters(MODEL_CHECKS, "C1", "KV is written at the window's slots, row by row, and nowhere else")
def _writes(b: ModelUnderTest) -> str:
    before = b.filled(b.read, b.lengths, float("nan"))
    is_running = np.array([True, True, False])
    after = b.score(before, b.window, b.lengths, is_running=is_running)[2]
    for index, (old, new) in enumerate(zip(b.contents(before), b.contents(after), strict=True)):
        layer, part = index // 2, "kv"[index % 2]
        for row in range(ROWS):
            first = int(b.lengths[row])
            inside = np.zeros(b.max_length, bool)
            inside[first : first + WINDOW] = is_running[row]
            where = f"{part} of layer {layer}, row {row}"
            missing = np.flatnonzero(inside & ~np.isfinite(new[row]).all(axis=(1, 2)))
            demand(not missing.size, f"{where}: slots {missing.tolist()} were not written")
            same = (old[row] == new[row]) | (np.isnan(old[row]) & np.isnan(new[row]))
            touched = np.flatnonzero(~inside & ~same.all(axis=(1, 2)))
            demand(
                not touched.size,
                f"{where}: slots {touched[:8].tolist()} were written, which are not the window's",
            )
    return f"windows at slots {b.lengths[0]} and {b.lengths[1]}, and a row that writes nothing"


@enters(MODEL_CHECKS, "C1", "slots outside [0, S) are stored nowhere")
def _outside_slots(b: ModelUnderTest) -> str:
    size = b.max_length
    slots = np.array([[-1, -2, size, size + 1], [size + 7, -1, -9, 2 * size], [-1] * WINDOW])
    after = b.score(b.read, b.window, b.lengths, slots=slots)[2]
    for old, new in zip(b.contents(b.read), b.contents(after), strict=True):
        for row, slot in np.argwhere((old != new).any(axis=(2, 3))):
            raise Broken(f"a token whose slot is outside was stored at slot {slot} of row {row}")
    return f"slots -9 to {2 * size} of rows of {size}"


@enters(MODEL_CHECKS, "C1", "window.rows names the rows of the cache that are read and written")
def _rows(b: ModelUnderTest) -> str:
    row, length = ROWS - 1, CHUNK - 3
    before = b.filled(b.empty(), np.zeros(ROWS), 0.5)
    after = b.prefill_row(row, [length], cache=before)
    for old, new in zip(b.contents(before), b.contents(after), strict=True):
        changed = (old != new).any(axis=(2, 3))
        expected = np.zeros_like(changed)
        expected[row, :length] = True
        wrong = np.argwhere(changed & ~expected)[:1].tolist()
        demand(not wrong, f"a prefill of row {row} wrote to row {wrong}")
        demand(changed[expected].all(), f"a prefill of row {row} did not write all of its slots")
    return f"a prefill of row {row} alone"


@enters(MODEL_CHECKS, "C1", "the window's KV is written before it is read")
def _write_before_read(b: ModelUnderTest) -> str:
    cache = b.filled(b.empty(), np.zeros(ROWS), float("nan"))
    scored = b.score(cache, b.window, np.zeros(ROWS, np.int32))
    for name, values in zip(("hidden states", "logits"), scored, strict=False):
        demand(
            np.isfinite(wide(values)).all(),
            f"{name} of the first window of a row are not finite where the cache held NaN: the "
            "window reads its slots before it writes them, or reads beyond them",
        )
    return "first window of rows whose slots held NaN"


@enters(MODEL_CHECKS, "C4", "a token sees the tokens before it, in window and context, none after")
def _window_visibility(b: ModelUnderTest) -> str:
    hidden = wide(b.score(b.read, b.window, b.lengths)[0])
    for index in range(WINDOW):
        changed = b.window.copy()
        changed[:, index] = b.other(changed[:, index])
        new = wide(b.score(b.read, changed, b.lengths)[0])
        demand(
            np.array_equal(hidden[:, :index], new[:, :index]),
            f"changing token {index} of the window changed the states of tokens before it",
        )
        if index + 1 < WINDOW:
            is_seen = (hidden[:, index + 1] != new[:, index + 1]).any(axis=1)
            demand(
                is_seen.all(),
                f"changing token {index} of the window did not change the state of the next one",
            )
    tokens = b.tokens.copy()
    last = (np.arange(ROWS), b.lengths - 1)
    tokens[last] = b.other(tokens[last])
    new = wide(b.score(b.context(b.lengths, tokens), b.window, b.lengths)[0])
    is_seen = (hidden[:, 0] != new[:, 0]).any(axis=1)
    demand(is_seen.all(), "changing the last committed token did not change the window's states")
    return f"every token of windows at {b.lengths.tolist()}"


@enters(MODEL_CHECKS, "C1", "each row stands at its own offset: ragged rows as rows of one length")
def _ragged_rows(b: ModelUnderTest) -> str:
    ragged = b.score(b.read, b.window, b.lengths)
    for row in range(ROWS):
        tokens = np.tile(b.tokens[row], (ROWS, 1))
        lengths = np.full(ROWS, b.lengths[row])
        cache = b.context(lengths, tokens)
        alone = b.score(cache, b.following(tokens, lengths), lengths)
        demand(
            equal_values([x[row] for x in ragged[:2]], [x[row] for x in alone[:2]]),
            f"row {row} at offset {b.lengths[row]} differs from the same row among rows at its "
            "own offset",
        )
    return f"offsets {b.lengths.tolist()} in one batch"


@enters(MODEL_CHECKS, "C1", "positions are heeded: the order of the context matters")
def _positions(b: ModelUnderTest) -> str:
    # Two rows, each of one token only, so that a KV depends on its token and position alone. Then
    # the halves are exchanged: row 0 is a a a b b b, row 1 is b b b a a a. A model without
    # positions gives the next token the same state in both.
    half = 2 * WINDOW
    pair = np.array([[0], [1], [0]])
    cache = b.context(np.full(ROWS, 2 * half), np.broadcast_to(pair, b.tokens.shape))
    slots = np.broadcast_to(half + np.arange(half, dtype=np.int32), (ROWS, half))
    cache = rewritten(cache, slots, lambda x: x[np.array([1, 0, 2])])
    next_token = np.full((ROWS, WINDOW), 2 % b.model.vocab_size)
    hidden, _, _ = b.score(cache, next_token, np.full(ROWS, 2 * half))
    states = wide(hidden[:, 0])
    distance = distance_of(states[:1], states[1:2])
    allowed = min(b.allowed(hidden), 8 * rounding_of(b.model.params, hidden))
    demand(
        distance > allowed,
        f"exchanging the halves of a context changed the state by {distance:.1g} of its size, "
        "which is rounding: positions have no effect (skip this check if the model has none)",
    )
    return f"exchanging the halves of a context changed the state by {distance:.2g} of its size"


@enters(MODEL_CHECKS, "C4", "E2: a row's bits do not depend on its neighbours or its row")
def _row_independence(b: ModelUnderTest) -> str:
    def bits(cache, tokens, start, row, **options):
        hidden, logits, after = b.score(cache, tokens, start, **options)
        stored = [part[row, : int(b.lengths[0]) + WINDOW] for part in b.contents(after)]
        return [wide(hidden[row]), np.asarray(logits[row]), *stored]

    expected = bits(b.read, b.window, b.lengths, 0)

    others = b.window.copy()
    others[1:] = b.other(others[1:])
    only_first = np.array([True, False, False])
    broken = b.filled(b.read, np.array([b.max_length, 0, 0]), float("nan"))
    order = np.roll(np.arange(ROWS), 1)
    tokens, lengths = b.tokens[order], b.lengths[order]
    moved = b.context(lengths, tokens), b.following(tokens, lengths), lengths, 1
    for what, found in {
        "its neighbours had other tokens": bits(b.read, others, b.lengths, 0),
        "its neighbours had ended": bits(b.read, b.window, b.lengths, 0, is_running=only_first),
        "its neighbours' slots held NaN": bits(broken, b.window, b.lengths, 0),
        "it took another row": bits(*moved),
    }.items():
        demand(equal_values(expected, found), f"row 0 changed when {what}")
    return "other tokens, ended and broken neighbours, another row"


@enters(MODEL_CHECKS, "C1", "rejected drafts leave no trace: rolling back lowers an integer")
def _rollback(b: ModelUnderTest) -> str:
    wrong = b.other(b.window)
    wrong[:, 0] = b.window[:, 0]  # the root is committed
    plain = b.score(b.read, b.window, b.lengths)
    drafted = b.score(b.read, wrong, b.lengths)[2]
    for num_kept in (0, 1):  # drafts all rejected; the root committed
        start = b.lengths + num_kept
        tokens = b.following(b.tokens, start)
        expected = b.score(plain[2], tokens, start)
        found = b.score(drafted, tokens, start)
        is_same = equal_values(expected[:2], found[:2])
        demand(is_same, "logits after a rejected draft differ from those without it")
        live = np.arange(b.max_length) < (start + WINDOW)[:, None]
        is_same = equal_values(*([kv[live] for kv in b.contents(x[2])] for x in (expected, found)))
        demand(is_same, "live KV after a rejected draft differs from that without it")
    return f"{WINDOW - 1} wrong drafts per row, then the right ones, to the bit"


@enters(MODEL_CHECKS, "C1", "garbage beyond the committed slots changes nothing, NaN included")
def _garbage(b: ModelUnderTest) -> str:
    expected = b.score(b.filled(b.read, b.lengths, 0.0), b.window, b.lengths)
    for value in (1e4, float("nan")):
        found = b.score(b.filled(b.read, b.lengths, value), b.window, b.lengths)
        is_same = equal_values(expected[:2], found[:2])
        demand(is_same, f"slots beyond the window that held {value:g} changed a row's logits")
    return "zeros, 1e4 and NaN beyond the committed slots"


@enters(MODEL_CHECKS, "C4", "E4: a prompt read in chunks, at once or token by token: one KV")
def _chunked_prefill(b: ModelUnderTest) -> str:
    row, length = 1, CHUNK - 2
    pieces = {
        "in one chunk": b.prefill_row(row, [length]),
        "in chunks of 5, 6 and 3": b.prefill_row(row, [5, 11, length]),
        "in these chunks, all in one call": b.prefill_row(row, [5, 11, length], at_once=True),
        "window by window": b.context(np.full(ROWS, length)),
    }
    cache = b.empty()
    wrong = np.zeros((ROWS, WINDOW - 1), np.int32)
    for place in range(length):
        window = np.concatenate([b.tokens[:, place : place + 1], wrong], axis=1)
        cache = b.score(cache, window, np.full(ROWS, place))[2]
    pieces["token by token, with rejected drafts"] = cache
    start = np.full(ROWS, length)
    tokens = b.following(b.tokens, start)
    found = {how: b.score(cache, tokens, start) for how, cache in pieces.items()}
    hidden, logits, _ = found["in one chunk"]
    allowed = b.allowed(hidden)
    distances = {how: distance_of(other[row], logits[row]) for how, (_, other, _) in found.items()}
    for how, distance in distances.items():
        demand(
            distance <= allowed,
            f"a prompt read {how} gives logits that differ from those of one chunk by "
            f"{distance:.1g} of their size, where rounding makes at most {allowed:.1g}",
        )
    return f"logits differ by {max(distances.values()):.1g} of their size, {allowed:.1g} allowed"


@enters(MODEL_CHECKS, "C5", "a node of a tree is scored as if the path to it were committed")
def _tree_paths(b: ModelUnderTest) -> str:
    # Entries: 0 the root; 1 below 0; 2 below 0; 3 below 2.    As a chain: 0, then 2, then 3.
    tree = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 2, 3, 0]])
    chain = np.tril(np.ones((WINDOW, WINDOW), int)) * np.arange(WINDOW)

    def of_all(paths):
        return np.broadcast_to(paths, (ROWS, WINDOW, WINDOW))

    as_chain = b.window[:, [0, 2, 3, 1]]
    in_tree = b.score(b.read, b.window, b.lengths, paths=of_all(tree))
    in_chain = b.score(b.read, as_chain, b.lengths, paths=of_all(chain))
    for entry, depth in ((0, 0), (2, 1), (3, 2)):
        demand(
            equal_values(in_tree[1][:, entry], in_chain[1][:, depth]),
            f"entry {entry} of a tree is scored differently from its path as a chain",
        )
    changed = b.window.copy()
    changed[:, 1] = b.other(changed[:, 1])
    other = b.score(b.read, changed, b.lengths, paths=of_all(tree))
    is_same = equal_values(in_tree[1][:, 2:], other[1][:, 2:])
    demand(is_same, "a node's logits depend on a sibling")
    distance = distance_of(in_chain[1], b.score(b.read, as_chain, b.lengths)[1])
    allowed = b.allowed(in_chain[0])
    demand(
        distance <= allowed,
        f"a chain given as a tree differs from the chain by {distance:.1g} of its size, where "
        f"rounding makes at most {allowed:.1g}",
    )
    return "a branch equals its path as a chain, to the bit"


@enters(MODEL_CHECKS, "C4", "E1: speculative output equals plain output of the same program")
def _same_program(b: ModelUnderTest) -> str:
    num_accepted = demand_same_output(b.engine and b.plain, b.drafted)
    demand(num_accepted > 0, "no draft was accepted, not even the target's own tokens")
    return f"{len(b.plain)} requests, greedy and sampled; {num_accepted} drafts accepted"


@enters(MODEL_CHECKS, "C2", "nothing is compiled after the first requests")
def _trace_count(b: ModelUnderTest) -> str:
    return demand_compiled_once(b.engine)
