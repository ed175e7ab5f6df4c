"""Where the time of a round goes: its stages compiled separately, and forward passes on a grid.

A stage is timed inside its own loop on the device, as it runs inside the decode loop: no dispatch,
no transfer. Its inputs come from a real state in mid-decode, and are made to look new in every
repetition, because XLA would otherwise compute only once what does not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import layouts
from jaxspec.cache.pages import BLOCK, commit_path
from jaxspec.decode.loop import one_round
from jaxspec.decode.parts import RoundParts, params_of
from jaxspec.decode.recorders import record
from jaxspec.decode.round import commit, draft_and_verify, emit, lay_out, propose
from jaxspec.decode.state import batch_view, newest_token
from jaxspec.drafters.base import function_params
from jaxspec.lab.bench.measure import Repeated, Run
from jaxspec.lab.bench.roofline import forward_pass
from jaxspec.lab.cost.passes import Pass
from jaxspec.models.base import LanguageModel, kernels_of, packed_model
from jaxspec.runtime.turns import time_loops
from jaxspec.types import DecodeState, PyTree, Scores, Window


def round_stages(parts: RoundParts, state: DecodeState) -> dict[str, Repeated]:
    """The stages of a round, and the whole `round`, each repeated on `state`, which is copied.

    `target` is the forward pass with the head; a plain step has no other stage. A speculative round
    also has `draft`, `verify` and `commit`. The last is bookkeeping of state and drafter and, for
    trees, moving the accepted path's KV.
    """
    if parts.is_plain:
        start = layouts.window_start(state)[:, None]
        slots = jnp.where(state.is_running[:, None], start, -1)
        inputs = newest_token(state), Window(start=start[:, 0], positions=start, slots=slots)
        stages: dict[str, Repeated] = {}
    else:
        stages, inputs = _speculative_stages(parts, state)

    def target_stage(params, fixed, cache):
        tokens, window = fixed
        return _score(parts.target, params["target"], tokens, window, cache)

    leaves, form = jax.tree.flatten(state.drafter)
    # Lengths and similar fields. Without them a drafter would draft nothing after the same tokens
    # again.
    of_rows = {index: leaf for index, leaf in enumerate(leaves) if leaf.ndim < 3}

    def whole_round(params, fixed, moving):
        """The same round over and over: only caches change."""
        (bare, of_rows), (cache, drafter) = fixed, moving
        leaves = [of_rows.get(index, leaf) for index, leaf in enumerate(jax.tree.leaves(drafter))]
        drafter = jax.tree.unflatten(form, leaves)
        after = one_round(parts, params, bare.replace(cache=cache, drafter=drafter))
        return (after.cache, after.drafter), after.replace(cache=(), drafter=())

    bare, moving = state.replace(cache=(), drafter=()), _copy((state.cache, state.drafter))
    return stages | {
        "target": Repeated(target_stage, params_of(parts), inputs, _copy(state.cache)),
        "round": Repeated(whole_round, params_of(parts), (bare, _copy(of_rows)), moving),
    }


def _speculative_stages(
    parts: RoundParts, state: DecodeState
) -> tuple[dict[str, Repeated], tuple[jax.Array, Window]]:
    """`draft`, `verify` and `commit`, and the tokens and the window that the target scores."""
    params, shape = params_of(parts), parts.shape

    @jax.jit
    def prepare(params, state):
        info, _, drafter_state = draft_and_verify(parts, params, state)
        return info, drafter_state

    info, drafter_state = prepare(params, state)
    bare = state.replace(cache=(), drafter=())
    drafting = _copy((drafter_state, state.cache if parts.drafter.uses_target_cache else ()))

    def draft_stage(params, fixed, moving):
        (bare, rows), (drafter_state, cache) = fixed, moving
        before = bare.replace(drafter=drafter_state, cache=cache)
        draft, drafter_state, cache = propose(parts, params, before, rows)
        return (drafter_state, cache), draft

    def verify_stage(params, info, moving):
        verdict = parts.verifier.verify(info.scores.logits, info.draft, info.rows, info.context)
        return moving, verdict

    def commit_stage(params, fixed, moving):
        (bare, info), (cache, drafter_state) = fixed, moving
        scored = drafter_state
        if not info.draft.is_chain:
            move = kernels_of(parts.target).move_within
            cache = commit_path(cache, info.window.start, info.verdict.path, move=move)
        info = info.replace(emission=emit(bare, info.draft, info.verdict))
        after = commit(bare, info, ()).replace(**record(bare, info, logprobs=None, trace=None))
        drafter_state = parts.drafter.commit(
            shape, function_params(parts.drafter, params), drafter_state, batch_view(after), info
        )
        if jax.tree.structure(drafter_state) != jax.tree.structure(scored):
            return (cache, scored), (after, drafter_state)  # what scoring left is gone
        return (cache, drafter_state), after

    moved = () if info.draft.is_chain else _copy(state.cache)
    stages = {
        "draft": Repeated(draft_stage, params, (bare, info.rows), drafting),
        "verify": Repeated(verify_stage, params, info, ()),
        "commit": Repeated(commit_stage, params, (bare, info), (moved, _copy(drafter_state))),
    }
    return stages, (info.tokens, info.window)


def _score(model, params, tokens, window, cache):
    hidden, cache = model.forward(params, tokens, window, cache)
    return cache, Scores(logits=model.logits(params, hidden), hidden=hidden)


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def forward_runs(
    model: LanguageModel,
    *,
    batch: int,
    window: int,
    contexts: Sequence[int],
    max_length: int,
    parents: np.ndarray | None = None,
) -> list[tuple[Pass, Run]]:
    """A forward pass with the head after each of several contexts, one compiled program for all.

    The contents of the cache do not affect the time, so it holds zeros.

    Args:
      contexts: committed slots before the window.
      max_length: slots per row, the same number as in the engine that the times are meant for.
      parents: `[window - 1]`, those of a tree's nodes; None for a chain.
    """
    model = packed_model(model)
    entry = jnp.broadcast_to(jnp.arange(window, dtype=jnp.int32), (batch, window))
    depth, paths = entry, None
    if parents is not None:
        tree_depth = int(np.max(lay_out(jnp.asarray(parents)[None], len(parents))[0]))
        every = jnp.broadcast_to(jnp.asarray(parents), (batch, window - 1))
        depth, paths = lay_out(every, tree_depth)

    def forward(params, fixed, cache):
        tokens, where = fixed
        cache, scores = _score(model, params, tokens, where, cache)
        return cache, scores.logits

    def window_at(context: int) -> Window:
        start = jnp.full((batch,), context, jnp.int32)
        slots, positions = start[:, None] + entry, start[:, None] + depth
        return Window(start=start, positions=positions, slots=slots, paths=paths)

    tokens = jnp.zeros((batch, window), jnp.int32)
    kind = "window" if parents is None else "tree"
    what = f"the forward pass of {model.name}, {batch} rows, {kind} of {window}"
    cache = model.init_cache(batch, max_length)
    repeated = Repeated(forward, model.params, (tokens, window_at(0)), cache, what=what)

    def at(context: int) -> Run:
        where = window_at(context)

        def run(num_times: int) -> None:
            repeated.fixed = (tokens, where)
            repeated(num_times)

        return run

    shape = {"batch": batch, "window": window, "block": block_read_by(model)}
    return [(forward_pass(model, context=context, **shape), at(context)) for context in contexts]


def block_read_by(model: LanguageModel) -> int | None:
    """Slots of KV that the model's attention reads at a time, for `Pass`."""
    return BLOCK if model.kernels == "xla" else None


def measure_passes(
    model: LanguageModel,
    *,
    batches: Sequence[int],
    windows: Sequence[int],
    contexts: Sequence[int],
    max_length: int,
    repeats: int,
) -> list[tuple[Pass, float]]:
    """Forward passes at every combination and their median seconds, all timed in alternation."""
    passes = [
        pair
        for batch, window in itertools.product(batches, windows)
        for pair in forward_runs(
            model, batch=batch, window=window, contexts=contexts, max_length=max_length
        )
    ]
    turns = time_loops({index: run for index, (_, run) in enumerate(passes)}, repeats)
    return [(work, turns.median_s(index)) for index, (work, _) in enumerate(passes)]
