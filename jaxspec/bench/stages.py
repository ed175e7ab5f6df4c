"""What a round spends its time on: its stages compiled apart, and forward passes on a grid.

A stage is timed inside a loop of its own on the device, as it runs inside the decode loop: no
dispatch, no transfer. Its inputs are those of a real state in mid-decode, and made to look new in
every repetition, or XLA would compute once what does not change.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.analysis.cost import Measured, Pass
from jaxspec.bench.roofline import forward_pass
from jaxspec.cache.pages import BLOCK
from jaxspec.decode.loop import (
    SpeculativeLoop,
    batch_view,
    commit,
    draft_context,
    make_window,
    newest_token,
    window_tokens,
)
from jaxspec.decode.settings import Loop
from jaxspec.drafters.base import RoundInfo
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.turns import time_loops
from jaxspec.types import DecodeState, Draft, PyTree, Window, chain_parents

Stage = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
Run = Callable[[int], None]


class Repeated:
    """A stage, ready to be run `num_times` in one compiled loop.

    Args:
      stage: `(params, fixed, moving) -> (moving, outputs)`.
      params: of the models.
      fixed: inputs, the same in every repetition.
      moving: what the stage updates in place (caches); taken over, the caller's arrays are gone.
    """

    def __init__(self, stage: Stage, params: PyTree, fixed: PyTree, moving: PyTree):
        self._params, self._fixed, self._moving = params, fixed, moving

        @functools.partial(jax.jit, donate_argnums=2)
        def program(params, fixed, moving, num_times):
            shapes = jax.eval_shape(stage, params, fixed, moving)[1]
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

            def body(index, carry):
                return stage(params, changing(fixed, index), carry[0])

            return lax.fori_loop(0, num_times, body, (moving, nothing))

        what = stage.__name__.replace("_", " ")
        self._program = Program(program, f"the {what}, to be timed by itself")

    def __call__(self, num_times: int) -> None:
        """Runs the stage so often and waits for it."""
        self._moving, outputs = self._program(self._params, self._fixed, self._moving, num_times)
        jax.block_until_ready(outputs)

    def program_bytes(self) -> int | None:
        """Bytes of the compiled program's arguments and temporaries, where the compiler says."""
        lowered = self._program.lower(self._params, self._fixed, self._moving, 1)
        memory = lowered.compile().memory_analysis()
        return memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes


def changing(tree: PyTree, index: jax.Array) -> PyTree:
    """The same values, but to the compiler others in every iteration `index` of a loop.

    What does not change is moved out of a loop, optimisation barriers notwithstanding (XLA:CPU
    drops them first).
    """
    zero = jnp.minimum(index, 0)

    def change(leaf: jax.Array) -> jax.Array:
        return leaf ^ (zero < 0) if leaf.dtype == bool else leaf + zero.astype(leaf.dtype)

    return jax.tree.map(change, tree)


def speculative_stages(loop: SpeculativeLoop, state: DecodeState) -> dict[str, Repeated]:
    """`draft`, `target`, `verify`, `commit` and the whole `round`, each repeated on `state`.

    `target` is the forward pass with the head. `commit` is bookkeeping: the state's and the
    drafter's. The state is copied.
    """
    params, shape = loop.params, loop.shape

    @jax.jit
    def prepare(params, state):
        rows = batch_view(state)
        draft, drafter_state = loop.drafter.propose(shape, params["drafter"], state.drafter, rows)
        window = make_window(state, draft, is_chain=loop.drafter.is_chain)
        tokens, prefix = window_tokens(state, draft), draft_context(draft, window)
        _, (hidden, logits) = _score(loop.target, params["target"], tokens, window, state.cache)
        verdict = loop.verifier.verify(logits, draft, rows, prefix)
        return rows, draft, drafter_state, tokens, window, prefix, hidden, logits, verdict

    rows, draft, drafter_state, tokens, window, prefix, hidden, logits, verdict = prepare(
        params, state
    )
    bare = state.replace(cache=(), drafter=())

    def draft_stage(params, rows, drafter_state):
        draft, drafter_state = loop.drafter.propose(shape, params["drafter"], drafter_state, rows)
        return drafter_state, draft

    def target_stage(params, fixed, cache):
        tokens, window = fixed
        return _score(loop.target, params["target"], tokens, window, cache)

    def verify_stage(params, fixed, moving):
        return moving, loop.verifier.verify(*fixed)

    def commit_stage(params, fixed, drafter_state):
        bare, draft, verdict, hidden = fixed
        after = commit(bare, draft, verdict)
        outcome = RoundInfo(
            draft=draft,
            verdict=verdict,
            hidden=hidden,
            num_committed_before=bare.num_committed,
        )
        drafter_state = loop.drafter.commit(
            shape, params["drafter"], drafter_state, batch_view(after), outcome
        )
        return drafter_state, after

    return {
        "draft": Repeated(draft_stage, params, rows, _copy(drafter_state)),
        "target": Repeated(target_stage, params, (tokens, window), _copy(state.cache)),
        "verify": Repeated(verify_stage, params, (logits, draft, rows, prefix), ()),
        "commit": Repeated(
            commit_stage, params, (bare, draft, verdict, hidden), _copy(drafter_state)
        ),
        "round": _whole(loop.round, params, state),
    }


def stages_of(loop: Loop, state: DecodeState) -> dict[str, Repeated]:
    """The stages of a round of either loop."""
    if isinstance(loop, SpeculativeLoop):
        return speculative_stages(loop, state)
    return plain_stages(loop, state)


def plain_stages(loop: Any, state: DecodeState) -> dict[str, Repeated]:
    """`target` and the whole `round` of the window-1 loop (`jaxspec.decode.plain`)."""
    nothing = jnp.zeros((loop.shape.batch_size,), jnp.int32)
    draft = Draft(
        tokens=jnp.zeros((loop.shape.batch_size, 0), jnp.int32),
        parents=chain_parents(loop.shape.batch_size, 0),
        num_valid=nothing,
    )
    window = make_window(state, draft, is_chain=True)

    def target_stage(params, fixed, cache):
        token, window = fixed
        return _score(loop.target, params, token, window, cache)

    return {
        "target": Repeated(
            target_stage, loop.params, (newest_token(state), window), _copy(state.cache)
        ),
        "round": _whole(loop.step, loop.params, state),
    }


def _score(model, params, tokens, window, cache):
    hidden, cache = model.forward(params, tokens, window, cache)
    return cache, (hidden, model.logits(params, hidden))


def _whole(round_: Callable[[PyTree, DecodeState], DecodeState], params, state: DecodeState):
    """The same round over and over: caches move on, all else is as it was."""

    def whole_round(params, bare, moving):
        cache, drafter = moving
        after = round_(params, bare.replace(cache=cache, drafter=drafter))
        return (after.cache, after.drafter), after.replace(cache=(), drafter=())

    bare = state.replace(cache=(), drafter=())
    return Repeated(whole_round, params, bare, _copy((state.cache, state.drafter)))


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def forward_runs(
    model: LanguageModel, *, batch: int, window: int, contexts: Sequence[int], max_length: int
) -> list[tuple[Pass, Run]]:
    """A forward pass with the head after each of several contexts, one compiled program for all.

    What the cache holds makes no difference to the time, so it holds zeros.

    Args:
      contexts: committed slots before the window.
      max_length: slots per row, as many as the engine's that the times are to speak for.
    """
    cache = model.init_cache(batch, max_length)

    def program(params, cache, start, num_times):
        positions = start + jnp.arange(window, dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, (batch, window))
        tokens = jnp.zeros((batch, window), jnp.int32)

        def body(index, carry):
            again, places = changing((tokens, positions), index)
            where = Window(start=places[:, 0], positions=places, slots=places)
            cache, (_, logits) = _score(model, params, again, where, carry[0])
            return cache, logits

        logits = jnp.zeros((batch, window, model.vocab_size), jnp.float32)
        return lax.fori_loop(0, num_times, body, (cache, logits))

    compiled = Program(
        jax.jit(program, donate_argnums=1),
        f"the forward pass of {model.name}, {batch} rows, window {window}",
    )

    def at(context: int) -> Run:
        def run(num_times: int) -> None:
            nonlocal cache
            cache, logits = compiled(model.params, cache, np.int32(context), num_times)
            jax.block_until_ready(logits)

        return run

    shape = {"batch": batch, "window": window, "block": block_read_by(model)}
    return [(forward_pass(model, context=context, **shape), at(context)) for context in contexts]


def block_read_by(model: LanguageModel) -> int | None:
    """Slots of KV that the model's attention reads at a time, as `cost.Pass` wants it."""
    return BLOCK if model.kernels == "xla" else None


def measure_passes(
    model: LanguageModel,
    *,
    batches: Sequence[int],
    windows: Sequence[int],
    contexts: Sequence[int],
    max_length: int,
    repeats: int,
) -> list[Measured]:
    """Median seconds of forward passes at every combination, all of them timed in turns."""
    passes = [
        pair
        for batch, window in itertools.product(batches, windows)
        for pair in forward_runs(
            model, batch=batch, window=window, contexts=contexts, max_length=max_length
        )
    ]
    turns = time_loops({index: run for index, (_, run) in enumerate(passes)}, repeats)
    return [
        Measured(work=work, seconds=turns.median_s(index)) for index, (work, _) in enumerate(passes)
    ]
