"""What is recorded of every round besides its tokens: counts, log-probabilities, a trace.

A recorder is a function of the state before a round and of the round's `RoundInfo`; it returns its
own buffers with the round added. Later rounds read none of them, so recording changes no output.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import sampling
from jaxspec.decode.state import LogprobsConfig, empty_logprobs, scatter_rows
from jaxspec.kernels import sums
from jaxspec.kernels.highest import highest
from jaxspec.models.base import Model, logits_of
from jaxspec.models.prefill import chain_window
from jaxspec.telemetry.trace import TraceConfig, record_round
from jaxspec.types import AcceptanceCounts, DecodeState, Logprobs, PyTree, RoundInfo

SCORED_TOGETHER = 64  # prompt positions whose logits are computed at a time


def record(
    state: DecodeState,
    info: RoundInfo,
    *,
    logprobs: LogprobsConfig | None,
    trace: TraceConfig | None,
) -> dict[str, Any]:
    """The fields of `state` (the state before the round) with the round recorded in them."""
    recorded: dict[str, Any] = {"counts": count(state, info)}
    if logprobs is not None:
        recorded["logprobs"] = record_logprobs(logprobs, state, info)
    if trace is not None:
        recorded["trace"] = record_round(trace, state, info)
    return recorded


def count(state: DecodeState, info: RoundInfo) -> AcceptanceCounts:
    """Totals after the round. Only tokens that were kept count as accepted: tokens after a stop
    token were never emitted."""
    num_emitted = info.emission.num_emitted
    is_counted = num_emitted > 0
    if info.draft.tokens.shape[1] == 0:  # plain steps, also of engines whose other rounds draft
        num_rounds = state.counts.num_rounds + is_counted.astype(jnp.int32)
        return state.counts.replace(num_rounds=num_rounds)
    num_nodes = jnp.sum(info.draft.is_node, axis=1, dtype=jnp.int32)
    num_drafted = jnp.where(is_counted, num_nodes, 0)
    num_accepted = jnp.minimum(info.verdict.num_accepted, num_emitted)
    # Deeper nodes of a tree could not have been emitted.
    limit = info.rows.depth_limit
    reached = info.depth if limit is None else jnp.minimum(info.depth, limit)
    reached = jnp.where(is_counted, reached, 0)
    depth = jnp.arange(state.counts.drafted_at.shape[1], dtype=jnp.int32)[None]
    node = jnp.arange(state.counts.accepted_node.shape[1], dtype=jnp.int32)
    is_kept = jnp.arange(info.verdict.path.shape[1], dtype=jnp.int32)[None] < num_accepted[:, None]
    on_path = (info.verdict.path[..., None] == node[None, None]) & is_kept[..., None]
    of_round = AcceptanceCounts(
        num_rounds=is_counted,
        num_drafts=num_drafted > 0,
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        drafted_at=depth < reached[:, None],
        accepted_at=depth < num_accepted[:, None],
        accepted_node=jnp.any(on_path, axis=1),
    )
    return jax.tree.map(lambda total, new: total + new.astype(jnp.int32), state.counts, of_round)


def record_logprobs(config: LogprobsConfig, state: DecodeState, info: RoundInfo) -> Logprobs:
    """The buffers with the log-probabilities of the tokens that this round may emit, of rows that
    asked for them; if none did, nothing is computed.

    They are written for all of these tokens, kept or not: everything past `num_committed` is
    garbage.
    """
    tokens, is_written = info.emission.tokens, state.is_running & state.wants_logprobs

    def compute() -> Logprobs:
        logits = info.scores.logits
        # The j-th token was drawn from the logits of the window entry before it on the path.
        entry = jnp.pad(info.verdict.path + 1, ((0, 0), (1, 0)))
        if config.is_processed:
            logits = sampling.adjust(logits, info.rows, info.context)
            logits = sampling.filtered_logits(logits, info.rows.sampling)
        logprobs = sums.log_softmax(logits)
        logprobs = jnp.take_along_axis(logprobs, entry[..., None], axis=1)
        return _chosen(config, logprobs, tokens)

    nothing = empty_logprobs(config, *tokens.shape)
    new = lax.cond(jnp.any(is_written), compute, lambda: nothing)
    num_written = jnp.where(is_written, tokens.shape[1], 0)
    return jax.tree.map(
        lambda buffer, values: scatter_rows(buffer, state.num_committed, values, num_written),
        state.logprobs,
        new,
    )


def _chosen(config: LogprobsConfig, logprobs: jax.Array, tokens: jax.Array) -> Logprobs:
    """The log-probabilities of `tokens` `[B, T]` and of the likeliest tokens, selected from
    `logprobs` `[B, T, V]`."""
    of_token = sampling.of_tokens(logprobs, jnp.maximum(tokens, 0))
    top, top_tokens = lax.platform_dependent(
        logprobs,
        cpu=lambda scores: highest(scores, config.num_top)[:2],
        default=lambda scores: tuple(lax.top_k(scores, config.num_top)),
    )
    return Logprobs(of_token=of_token, top=top, top_tokens=top_tokens.astype(jnp.int32))


def record_prompt_logprobs(
    config: LogprobsConfig,
    target: Model,
    params: PyTree,
    state: DecodeState,
    hidden: jax.Array,
    *,
    rows: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
) -> Logprobs:
    """The buffers with the log-probabilities, under the model's own logits, of the prompt tokens
    that follow those of some chunks.

    The head runs in blocks of `SCORED_TOGETHER` positions, and only for blocks with tokens. Where a
    token is in its block depends only on where it is in its chunk.

    Args:
      hidden: `[R, chunk, E]`, the target's last hidden states.
      rows: `[R]` int32, the row of each chunk; -1 where there are fewer, and these come last.
      starts: `[R]` int32, each chunk's first token.
      stops: `[R]` int32, one past each chunk's last token.
    """
    chunk, num_slots = hidden.shape[1], state.tokens.shape[1]
    size = min(SCORED_TOGETHER, chunk)

    def score_block(place: jax.Array, index: jax.Array, logprobs: Logprobs) -> Logprobs:
        first = jnp.minimum(index * size, chunk - size)
        block = lax.dynamic_slice(hidden, (place, first, 0), (1, size, hidden.shape[2]))
        window = chain_window((starts[place] + first)[None], size, stop=stops[place][None])
        following = jnp.where(window.slots < 0, num_slots, window.slots + 1)[0]
        tokens = state.tokens[rows[place]].at[following].get(mode="clip")
        found = sums.log_softmax(logits_of(target, params, block, window))
        return jax.tree.map(
            lambda buffer, new: buffer.at[rows[place], following].set(new[0], mode="drop"),
            logprobs,
            _chosen(config, found, tokens[None]),
        )

    def score_chunk(place: jax.Array, logprobs: Logprobs) -> Logprobs:
        num_blocks = (stops[place] - starts[place] + size - 1) // size
        return lax.fori_loop(0, num_blocks, functools.partial(score_block, place), logprobs)

    num_chunks = jnp.sum(rows >= 0, dtype=jnp.int32)
    return lax.fori_loop(0, num_chunks, score_chunk, state.logprobs)
