"""What a round spends its time on: its stages compiled apart, and forward passes on a grid.

A stage is timed inside a loop of its own on the device, as it runs inside the decode loop: no
dispatch, no transfer. Its inputs are those of a real state in mid-decode, and made to look new in
every repetition, or XLA would compute once what does not change.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.analysis.cost import Measured, Pass
from jaxspec.bench.roofline import forward_pass
from jaxspec.cache.pages import BLOCK
from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.recorders import record
from jaxspec.decode.round import (
    commit,
    draft_context,
    emit,
    make_window,
    propose,
    score,
    window_tokens,
)
from jaxspec.decode.state import batch_view, newest_token
from jaxspec.drafters.base import function_params
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.turns import time_loops
from jaxspec.types import (
    DecodeState,
    Draft,
    PyTree,
    RoundInfo,
    Scores,
    Window,
    chain_parents,
)

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


def round_stages(loop: DecodeLoop, state: DecodeState) -> dict[str, Repeated]:
    """The stages of a round, and the whole `round`, each repeated on `state`, which is copied.

    `target` is the forward pass with the head; a plain step has no other stage. A speculative round
    has `draft`, `verify` and `commit` too, the last being bookkeeping: the state's and the
    drafter's.
    """
    stages = plain_stages(loop, state) if loop.is_plain else speculative_stages(loop, state)
    return stages | {"round": _whole(loop.round, loop.params, state)}


def speculative_stages(loop: DecodeLoop, state: DecodeState) -> dict[str, Repeated]:
    """`draft`, `target`, `verify` and `commit`; see `round_stages`."""
    params, shape = loop.params, loop.shape

    @jax.jit
    def prepare(params, state):
        rows = batch_view(state)
        draft, drafter_state = propose(loop, params, state, rows)
        window = make_window(state, draft, is_chain=loop.drafter.is_chain)
        tokens, context = window_tokens(state, draft), draft_context(draft, window)
        scores, _, drafter_state = score(
            loop, params, drafter_state, rows, draft, tokens, window, state.cache
        )
        verdict = loop.verifier.verify(scores.logits, draft, rows, context)
        info = RoundInfo(
            rows=rows,
            draft=draft,
            tokens=tokens,
            window=window,
            context=context,
            scores=scores,
            verdict=verdict,
            emission=emit(state, draft, verdict),
        )
        return info, drafter_state

    info, drafter_state = prepare(params, state)
    bare = state.replace(cache=(), drafter=())
    seen = state.cache if loop.drafter.uses_target_cache else ()

    def draft_stage(params, fixed, drafter_state):
        bare, rows, cache = fixed
        before = bare.replace(drafter=drafter_state, cache=cache)
        draft, drafter_state = propose(loop, params, before, rows)
        return drafter_state, draft

    def target_stage(params, info, cache):
        return _score(loop.target, params["target"], info.tokens, info.window, cache)

    def verify_stage(params, info, moving):
        verdict = loop.verifier.verify(info.scores.logits, info.draft, info.rows, info.context)
        return moving, verdict

    def commit_stage(params, fixed, drafter_state):
        bare, info = fixed
        info = info.replace(emission=emit(bare, info.draft, info.verdict))
        after = commit(bare, info, ()).replace(**record(bare, info, logprobs=None, trace=None))
        drafter_state = loop.drafter.commit(
            shape, function_params(loop.drafter, params), drafter_state, batch_view(after), info
        )
        return drafter_state, after

    return {
        "draft": Repeated(draft_stage, params, (bare, info.rows, seen), _copy(drafter_state)),
        "target": Repeated(target_stage, params, info, _copy(state.cache)),
        "verify": Repeated(verify_stage, params, info, ()),
        "commit": Repeated(commit_stage, params, (bare, info), _copy(drafter_state)),
    }


def plain_stages(loop: DecodeLoop, state: DecodeState) -> dict[str, Repeated]:
    """`target` of a plain step; see `round_stages`."""
    num_rows = loop.shape.batch_size
    draft = Draft(
        tokens=jnp.zeros((num_rows, 0), jnp.int32),
        parents=chain_parents(num_rows, 0),
        num_valid=jnp.zeros((num_rows,), jnp.int32),
    )
    window = make_window(state, draft, is_chain=True)

    def target_stage(params, fixed, cache):
        token, window = fixed
        return _score(loop.target, params["target"], token, window, cache)

    inputs = (newest_token(state), window)
    return {"target": Repeated(target_stage, loop.params, inputs, _copy(state.cache))}


def _score(model, params, tokens, window, cache):
    hidden, cache = model.forward(params, tokens, window, cache)
    return cache, Scores(logits=model.logits(params, hidden), hidden=hidden)


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
            cache, scores = _score(model, params, again, where, carry[0])
            return cache, scores.logits

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
