"""What a round records on the device: every row's rounds, and their tokens.

A row's history is indexed by its own count of rounds, so it stays right when rows change places,
join late or end early. Nothing is written, or even allocated, unless requested: a state without a
trace has no such arrays, and its program no such instructions.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import sampling
from jaxspec.errors import SettingError
from jaxspec.kernels import sums
from jaxspec.runtime.values import is_one_of, shown
from jaxspec.types import (
    DecodeState,
    DistributionTrace,
    Draft,
    RoundInfo,
    RoundTrace,
    TokenTrace,
    Trace,
)

TraceLevel: TypeAlias = Literal["rounds", "tokens", "distributions"]
LEVELS: tuple[TraceLevel, ...] = ("rounds", "tokens", "distributions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What the loop records.

    Each level includes the previous ones; with S slots and N draft nodes a row takes, in bytes, `24
    S` (rounds), `23 S (N + 1)` more (tokens) and `12 S (N + 1)` more (distributions).

    Attributes:
      level: `rounds`; `tokens`, one record per drafted token and per token of the target's own; or
        `distributions`, with entropies and overlap of p and q.
    """

    level: TraceLevel

    def __post_init__(self):
        if not is_one_of(self.level, LEVELS):
            raise SettingError(
                f"trace {shown(self.level)} was given; it must be 'rounds', 'tokens' or "
                "'distributions', or None to record nothing."
            )

    @property
    def has_tokens(self) -> bool:
        """Whether drafted tokens are recorded, so that drafters must return q."""
        return self.level != "rounds"

    @property
    def has_distributions(self) -> bool:
        """Whether entropies and overlap are recorded."""
        return self.level == "distributions"


def empty_trace(
    config: TraceConfig | None, num_rows: int, num_rounds: int, num_nodes: int
) -> Trace | None:
    """Buffers for `num_rows` rows with room for `num_rounds` rounds each; None without a config."""
    if config is None:
        return None

    def of_rounds(dtype=jnp.int32) -> jax.Array:
        return jnp.zeros((num_rows, num_rounds), dtype)

    def of_tokens(dtype=jnp.float32) -> jax.Array:
        return jnp.zeros((num_rows, num_rounds, num_nodes + 1), dtype)

    tokens = distributions = None
    if config.has_tokens:
        tokens = TokenTrace(
            token_id=of_tokens(jnp.int32),
            target_token_id=of_tokens(jnp.int32),
            parent=of_tokens(jnp.int16),
            is_accepted=of_tokens(jnp.bool_),
            logprob_p=of_tokens(),
            logprob_q=of_tokens(),
            rank=of_tokens(jnp.int32),
        )
    if config.has_distributions:
        distributions = DistributionTrace(
            entropy_p=of_tokens(), entropy_q=of_tokens(), overlap=of_tokens()
        )
    rounds = RoundTrace(
        engine_round=of_rounds(),
        context_length=of_rounds(),
        drafted=of_rounds(),
        draft_depth=of_rounds(),
        accepted=of_rounds(),
        emitted=of_rounds(),
    )
    return Trace(rounds=rounds, tokens=tokens, distributions=distributions)


def record_round(config: TraceConfig, state: DecodeState, info: RoundInfo) -> Trace:
    """The trace with this round written to the rows that emitted something.

    Args:
      config: what is recorded.
      state: the state before the round.
      info: that of the round.
    """
    draft, verdict, num_emitted = info.draft, info.verdict, info.emission.num_emitted
    num_kept = jnp.minimum(verdict.num_accepted, num_emitted)
    rounds = RoundTrace(
        engine_round=jnp.broadcast_to(state.num_rounds, num_emitted.shape),
        context_length=state.num_committed,
        drafted=draft.num_valid,
        draft_depth=info.depth,
        accepted=num_kept,
        emitted=num_emitted,
    )
    tokens = distributions = None
    if config.has_tokens:
        # The target's own token follows the last accepted node; then come the nodes.
        last = jnp.max(verdict.path, axis=1, keepdims=True, initial=-1)
        token = jnp.concatenate([verdict.next_token[:, None], draft.tokens], axis=1)
        parent = jnp.concatenate([last, draft.parents], axis=1)
        # The window entry that each token follows; parents of padding may be garbage.
        entry = 1 + jnp.concatenate([last, jnp.where(draft.is_node, draft.parents, -1)], axis=1)
        adjusted = sampling.adjust(info.scores.logits, info.rows, info.context)
        logits = jnp.take_along_axis(adjusted, entry[..., None], axis=1)
        p = sums.log_softmax(sampling.filtered_logits(logits, info.rows.sampling))
        logit = sampling.of_tokens(logits, token)[..., None]
        chosen = verdict.chosen
        if chosen is None:
            chosen, _ = sampling.greedy_tokens(adjusted)
        has_probs = None
        logprob_q = jnp.full(draft.tokens.shape, jnp.nan, jnp.float32)
        if draft.q is not None:
            # A drafter may leave the distribution of a greedy row zero: that draft is deterministic
            # too.
            has_probs = jnp.any(draft.q > 0, axis=-1)
            logprob_q = jnp.where(
                has_probs, jnp.log(sampling.of_tokens(draft.q, draft.tokens)), jnp.nan
            )
        node = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
        is_kept = jnp.arange(verdict.path.shape[1], dtype=jnp.int32)[None] < num_kept[:, None]
        is_accepted = jnp.any(
            (verdict.path[..., None] == node[None, None]) & is_kept[..., None], axis=1
        )
        tokens = TokenTrace(
            token_id=token,
            target_token_id=jnp.take_along_axis(chosen, entry, axis=1),
            parent=parent.astype(jnp.int16),
            is_accepted=_after_own(is_accepted, False),
            logprob_p=sampling.of_tokens(p, token),
            logprob_q=_after_own(logprob_q, jnp.nan),
            rank=1 + jnp.sum(logits > logit, axis=-1, dtype=jnp.int32),
        )
        if config.has_distributions:
            distributions = _compare_distributions(p, draft, has_probs)
    return _write(
        state, Trace(rounds=rounds, tokens=tokens, distributions=distributions), num_emitted
    )


def _after_own(values: jax.Array, own: float) -> jax.Array:
    """Values `[B, N]` of the nodes after that of the target's own token."""
    return jnp.pad(values, ((0, 0), (1, 0)), constant_values=own)


def _compare_distributions(
    log_p: jax.Array, draft: Draft, has_probs: jax.Array | None
) -> DistributionTrace:
    """Entropies and overlap of p, given by its logarithm `[B, N + 1, V]`, and the draft's q."""
    p = jnp.exp(log_p)
    entropy_p = sums.total(jnp.where(p > 0, -p * log_p, 0))[..., 0]
    p = p[:, 1:]
    entropy_q = jnp.zeros(draft.tokens.shape, jnp.float32)
    overlap = sampling.of_tokens(p, draft.tokens)
    if draft.q is not None and has_probs is not None:
        q = draft.q
        entropy_q = sums.total(-q * jnp.log(jnp.where(q > 0, q, 1)))[..., 0]
        overlap = jnp.where(has_probs, sums.total(jnp.minimum(p, q))[..., 0], overlap)
    return DistributionTrace(
        entropy_p=entropy_p,
        entropy_q=_after_own(entropy_q, jnp.nan),
        overlap=_after_own(overlap, jnp.nan),
    )


def _write(state: DecodeState, new: Trace, num_emitted: jax.Array) -> Trace:
    """The state's trace with `new` at each row's own round; what `new` leaves out stays as it
    is."""
    trace = state.trace
    assert trace is not None, "a loop with a trace has a state with one"
    num_rounds = trace.rounds.emitted.shape[1]
    row = jnp.arange(len(num_emitted), dtype=jnp.int32)
    # The same rounds that `AcceptanceCounts` counts; others are not written.
    place = jnp.where(num_emitted > 0, state.counts.num_rounds, num_rounds)

    def put(buffer: jax.Array, values: jax.Array) -> jax.Array:
        # A round that is narrower than the engine's window drafts fewer nodes than there is room
        # for.
        missing = [
            (0, size - num) for size, num in zip(buffer.shape[2:], values.shape[1:], strict=True)
        ]
        values = jnp.pad(values, [(0, 0), *missing])
        return buffer.at[row, place].set(values, mode="drop", unique_indices=True)

    written = {
        name: jax.tree.map(put, getattr(trace, name), part)
        for name, part in (
            ("rounds", new.rounds),
            ("tokens", new.tokens),
            ("distributions", new.distributions),
        )
        if part is not None
    }
    return trace.replace(**written)


def row_trace(trace: Trace | None, row: int, num_rounds: int) -> Trace | None:
    """One row's history, copied from buffers that were fetched to the host: NumPy arrays
    `[num_rounds, ...]`, so that the buffers need not be kept."""
    return jax.tree.map(lambda buffer: np.array(buffer[row, :num_rounds]), trace)
