"""Plain decoding, one token per step: the baseline of every speed-up, and an independent reference.

It shares the model, the distribution of a row's tokens (`sampling`), the state and the recorders
with the speculative round, but no code that places, verifies or commits tokens. With most kernels
its bits differ from a wider window's (a different matrix shape sums in a different order), and its
output is equal except at ties within rounding; with kernels that are `is_width_invariant` it is
equal, bit for bit.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec import sampling
from jaxspec.cache import layouts
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.recorders import record
from jaxspec.decode.state import batch_view
from jaxspec.drafters.base import function_params
from jaxspec.models.base import forward_features, logits_of
from jaxspec.types import (
    DecodeState,
    Draft,
    DraftContext,
    Emission,
    Finish,
    Origin,
    PyTree,
    RoundInfo,
    Scores,
    Verdict,
    Window,
    chain_parents,
)


def plain_round(parts: RoundParts, params: PyTree, state: DecodeState) -> DecodeState:
    """The state with one more token in every running row. The drafter does nothing, but a drafter
    that reads the target sees the token as a round without drafts, so that it never lags."""
    drafter = parts.drafter
    num_rows, max_length = state.tokens.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)
    is_running = state.finish == Finish.RUNNING
    here = state.num_committed - 1
    newest = state.tokens[row, here]
    start = layouts.window_start(state)
    window = Window(
        start=start,
        positions=start[:, None],
        slots=jnp.where(is_running, here, -1)[:, None],
        num_live=is_running.astype(jnp.int32) if parts.skips_padding else None,
    )
    hidden, features, cache = forward_features(
        parts.target, params["target"], newest[:, None], window, state.cache, drafter.taps
    )
    logits = logits_of(parts.target, params["target"], hidden, window)
    rows = batch_view(state)
    context = DraftContext(
        tokens=jnp.zeros_like(newest)[:, None],
        is_before=jnp.zeros((1, 1, 1), bool),
        position=(here + 1)[:, None],
    )
    token = sampling.choose(logits, rows, context)[:, 0]

    is_finite = token >= 0
    emits = is_running & is_finite
    length = state.num_committed + emits.astype(jnp.int32)
    stops = emits & jnp.any(token[:, None] == state.stop_tokens, axis=1)
    finish = jnp.where(length >= state.limit, state.limit_finish, Finish.RUNNING)
    finish = jnp.where(stops, Finish.STOP_TOKEN, finish)
    finish = jnp.where(is_finite, finish, Finish.NON_FINITE)
    finish = jnp.where(is_running, finish, state.finish).astype(jnp.int32)
    stop_token = jnp.where(stops, token, state.stop_token)
    slot = jnp.where(emits, here + 1, max_length + row)

    none = jnp.zeros_like(token)
    nodes = jnp.zeros((num_rows, 0), jnp.int32)
    info = RoundInfo(
        rows=rows,
        draft=Draft(tokens=nodes, parents=chain_parents(num_rows, 0), num_valid=none),
        tokens=newest[:, None],
        window=window,
        context=context,
        scores=Scores(logits=logits, hidden=hidden, features=features),
        verdict=Verdict(
            num_accepted=none,
            path=nodes,
            next_token=token,
            chosen=token[:, None] if parts.verifier.is_coupled else None,
        ),
        emission=Emission(
            tokens=token[:, None],
            origin=jnp.full((num_rows, 1), Origin.PLAIN, jnp.int8),
            num_emitted=emits.astype(jnp.int32),
            finish=finish,
            stop_token=stop_token,
        ),
    )
    recorded = record(state, info, logprobs=parts.logprobs, trace=parts.trace)
    state = state.replace(
        cache=cache,
        num_committed=length,
        finish=finish,
        tokens=state.tokens.at[row, slot].set(token, mode="drop", unique_indices=True),
        origin=state.origin.at[row, slot].set(
            jnp.int8(Origin.PLAIN), mode="drop", unique_indices=True
        ),
        stop_token=stop_token,
        **recorded,
    )
    if not drafter.taps:
        return state
    own, after = function_params(drafter, params), batch_view(state, is_chain=drafter.is_chain)
    drafter_state = drafter.commit(parts.round_shape, own, state.drafter, after, info)
    return state.replace(drafter=drafter_state)
