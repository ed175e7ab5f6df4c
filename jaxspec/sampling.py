"""From logits to tokens: the distribution of each row, and keyed draws from it.

The order of operations is the same everywhere, for the target's tokens, drafts, bonus tokens and
residuals. It is Hugging Face's, with vLLM's biases and penalties:

    logit_bias, allowed_token_ids                                  `adjust`
    repetition, presence, frequency penalty -> min_tokens          `adjust`
    temperature -> top-k -> top-p -> min-p                         `filtered_logits`

An operation leaves a row that does not use it unchanged, bit for bit, so a row's distribution never
depends on its neighbours. Temperature 0 is the arg max of the adjusted logits.

Draws are keyed, so that they depend on the request alone. Coupled verification draws the token at a
position with `fold_in(request key, position)`, whatever was drafted. The other verifiers use
`fold_in(fold_in(request key, length at the start of the round), node)` and one stream per purpose:
with position-only keys, a round would reuse noise that decided an earlier one, and the output would
be biased (most of all under block verification).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.kernels import sums
from jaxspec.types import BatchView, DraftContext, RowSampling

_IMPL = "threefry2x32"
BLOCK = 128  # committed tokens counted at a time
NUM_PARTS = 8  # most parts into which a window is split for drawing
SMALLEST_PART = 8  # fewest tokens of a part, over all rows
CPU_BLOCK = 128  # logits per block in `greedy_tokens`

# Whether each of some sets of tokens (each `[B, T, V]` bool) is enough; see `_lowest_kept`.
AreEnough: TypeAlias = Callable[..., list[jax.Array]]
# `_lowest_kept` with `loops_run_on_host` filled in.
LowestKept: TypeAlias = Callable[[jax.Array, AreEnough], jax.Array]


class Stream(enum.IntEnum):
    """Purposes of random draws, which never share noise within a round."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2


def request_key(seed: int) -> np.ndarray:
    """`[2]` uint32, the key of a request with this seed (0 to 2**64 - 1)."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def position_keys(sampling: RowSampling, position: jax.Array) -> jax.Array:
    """Keys `[B, T]` for the tokens at `position` `[B, T]`, the same in every round."""

    def of_row(key, position):
        return jax.vmap(lambda place: jax.random.fold_in(key, place))(position)

    return jax.vmap(of_row)(jax.random.wrap_key_data(sampling.key, impl=_IMPL), position)


def round_keys(rows: BatchView, node: jax.Array, stream: Stream) -> jax.Array:
    """Keys `[B, n]` for the nodes `[B, n]` of this round and one purpose."""

    def of_row(key, length, node):
        key = jax.random.fold_in(key, length)
        return jax.vmap(lambda n: jax.random.fold_in(jax.random.fold_in(key, n), stream))(node)

    keys = jax.random.wrap_key_data(rows.sampling.key, impl=_IMPL)
    return jax.vmap(of_row)(keys, rows.num_committed, node)


def _draw_each(draw: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    """`draw` for each key. No draw depends on the process's JAX settings: the threefry
    implementation is fixed here, and `draw` has to name its dtype."""
    with jax.threefry_partitionable(True):
        drawn = jax.vmap(draw)(keys.reshape(-1))
    return drawn.reshape(*keys.shape, *drawn.shape[1:])


def gumbel(keys: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise `[..., V]` fp32. Adding it to log-probabilities makes their arg max a sample."""

    def draw(key):
        # "high": with the default no draw exceeds 16, and tokens below 1e-7 would never be drawn.
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")

    return _draw_each(draw, keys)


def uniform(keys: jax.Array) -> jax.Array:
    """Uniform draws in [0, 1), fp32, one per key."""
    return _draw_each(lambda key: jax.random.uniform(key, (), jnp.float32), keys)


def greedy_tokens(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of the highest logit over the last axis (the first one on a tie), and whether the
    highest is finite and none is NaN.

    On a CPU blocks are compared by their highest logits, so that each logit is read only once.
    """
    *leading, size = logits.shape
    if size % CPU_BLOCK != 0 or size < CPU_BLOCK**2:
        return _first_highest(logits)

    def in_blocks(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = logits.reshape(*leading, -1, CPU_BLOCK)
        # A sum is NaN if one of its logits is, and takes XLA:CPU less time than a selection.
        has_nan = jnp.isnan(jnp.sum(blocks, axis=-1))
        highest = jnp.where(has_nan, jnp.inf, jnp.max(blocks, axis=-1))
        block, is_finite = _first_highest(highest)
        looked_at = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)
        place, _ = _first_highest(looked_at[..., 0, :])
        return block * CPU_BLOCK + place, is_finite

    return lax.platform_dependent(logits, cpu=in_blocks, default=_first_highest)


def _first_highest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `greedy_tokens`. Two plain reductions instead of `argmax`, whose paired reduction XLA:CPU
    does not vectorise."""
    highest = highest_of(logits)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    is_highest = logits == highest[..., None]
    first = jnp.min(jnp.where(is_highest, index, logits.shape[-1] - 1), axis=-1)
    return first, jnp.isfinite(highest)


def highest_of(logits: jax.Array) -> jax.Array:
    """The highest logit over the last axis; infinity where one is NaN, which the maximum of XLA:CPU
    passes over in long rows."""
    return jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)


def of_tokens(values: jax.Array, tokens: jax.Array) -> jax.Array:
    """`values` `[B, N, V]` at `tokens` `[B, N]`."""
    return jnp.take_along_axis(values, tokens[..., None], axis=2)[..., 0]


def chain_prefix(rows: BatchView, tokens: jax.Array) -> DraftContext:
    """The context of the `N + 1` tokens to be drawn along the chain `tokens` `[B, N]`: none of
    these precede the first, and one more precedes each later one."""
    index = jnp.arange(tokens.shape[1] + 1, dtype=jnp.int32)[None]
    return DraftContext(
        tokens=tokens,
        is_before=(index[:, :-1] < index.T)[None],
        position=rows.num_committed[:, None] + index,
    )


def is_greedy(rows: BatchView) -> jax.Array:
    """Bool scalar: whether every row takes the arg max of its unadjusted logits."""
    return ~(jnp.any(rows.sampling.temperature > 0) | is_adjusted(rows))


def neutral_sampling(num_rows: int) -> RowSampling:
    """Greedy rows without filters, biases, penalties or a minimum length; use `replace` to change
    fields."""

    def full(value: float, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full((num_rows,), value, dtype)

    return RowSampling(
        temperature=full(0),
        top_k=full(0, jnp.int32),
        top_p=full(1),
        min_p=full(0),
        repetition_penalty=full(1),
        presence_penalty=full(0),
        frequency_penalty=full(0),
        key=jnp.zeros((num_rows, 2), jnp.uint32),
        prompt_length=full(0, jnp.int32),
        min_length=full(0, jnp.int32),
    )


def as_greedy(sampling: RowSampling, is_out: jax.Array) -> RowSampling:
    """`sampling` with the rows in `is_out` `[B]` made greedy and unadjusted. Their tokens are not
    used, so they should not make `is_greedy` false for the others."""

    def unless_out(values: jax.Array, neutral: float) -> jax.Array:
        return jnp.where(is_out, jnp.array(neutral, values.dtype), values)

    bias = sampling.bias
    if bias is not None:
        bias = bias.replace(
            tokens=jnp.where(is_out[:, None], -1, bias.tokens),
            is_exclusive=bias.is_exclusive & ~is_out,
        )
    return sampling.replace(
        bias=bias,
        temperature=unless_out(sampling.temperature, 0),
        top_k=unless_out(sampling.top_k, 0),
        top_p=unless_out(sampling.top_p, 1),
        repetition_penalty=unless_out(sampling.repetition_penalty, 1),
        presence_penalty=unless_out(sampling.presence_penalty, 0),
        frequency_penalty=unless_out(sampling.frequency_penalty, 0),
        min_length=unless_out(sampling.min_length, 0),
    )


def is_adjusted(rows: BatchView) -> jax.Array:
    """Bool scalar: whether `adjust` changes the logits of some row."""
    return is_biased(rows.sampling) | is_penalised(rows)


def is_biased(sampling: RowSampling) -> jax.Array:
    """Bool scalar: whether some row has a bias; the first of its tokens is then no padding."""
    return jnp.bool_(False) if sampling.bias is None else jnp.any(sampling.bias.tokens[:, 0] >= 0)


def is_penalised(rows: BatchView) -> jax.Array:
    """Bool scalar: whether some row has a penalty, or has not reached its minimum length."""
    s = rows.sampling
    has_penalty = (s.repetition_penalty != 1) | (s.presence_penalty != 0)
    has_penalty |= s.frequency_penalty != 0
    return jnp.any(has_penalty | (rows.num_committed < s.min_length))


def adjust(logits: jax.Array, rows: BatchView, prefix: DraftContext) -> jax.Array:
    """Logits `[B, T, V]` after biases, penalties and `min_tokens`. They are exact while drafting:
    every node's penalties count the drafted tokens before it as if they were committed.

    Sources: repetition penalty, CTRL (1909.05858) over prompt and output as in Hugging Face;
    presence and frequency penalty over the output, as in vLLM.
    """

    def change() -> jax.Array:
        biased = add_bias(logits, rows.sampling)
        return lax.cond(is_penalised(rows), lambda: _penalise(biased, rows, prefix), lambda: biased)

    return lax.cond(is_adjusted(rows), change, lambda: logits.astype("float32"))


def add_bias(logits: jax.Array, sampling: RowSampling) -> jax.Array:
    """Logits `[B, T, V]` fp32 after `logit_bias` and `allowed_token_ids`, which depend on the row
    alone. If a model rules out every allowed token, as a drafter with a smaller vocabulary may,
    the bias alone decides among them."""
    logits, bias = logits.astype(jnp.float32), sampling.bias
    if bias is None:
        return logits

    def add() -> jax.Array:
        num_rows, _, vocab_size = logits.shape
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        token = jnp.where(bias.tokens < 0, vocab_size, bias.tokens)  # padding is dropped
        nothing = jnp.zeros((num_rows, vocab_size), jnp.float32)
        values = nothing.at[row, token].set(bias.values, mode="drop")[:, None]
        is_listed = nothing.astype(bool).at[row, token].set(True, mode="drop")[:, None]
        is_exclusive = bias.is_exclusive[:, None, None]
        biased = jnp.where(is_listed, logits + values, logits)
        biased = jnp.where(is_exclusive & ~is_listed, -jnp.inf, biased)
        none_left = jnp.isneginf(jnp.max(biased, axis=-1, keepdims=True))
        return jnp.where(is_exclusive & none_left & is_listed, values, biased)

    return lax.cond(is_biased(sampling), add, lambda: logits)


def _penalise(logits: jax.Array, rows: BatchView, prefix: DraftContext) -> jax.Array:
    s, vocab_size = rows.sampling, logits.shape[-1]
    drafted = jax.nn.one_hot(prefix.tokens, vocab_size, dtype=jnp.float32)
    drafted = jnp.einsum("btn,bnv->btv", _broadcast(prefix.is_before, drafted), drafted)
    in_all, in_output = _count_committed(rows, vocab_size)
    num_all, num_output = in_all[:, None] + drafted, in_output[:, None] + drafted

    penalty = s.repetition_penalty[:, None, None]
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(num_all > 0, penalised, logits)
    logits = logits - s.frequency_penalty[:, None, None] * num_output
    logits = logits - s.presence_penalty[:, None, None] * (num_output > 0).astype(jnp.float32)

    def mark(stop_tokens):
        is_stop = jnp.zeros((vocab_size,), bool)
        return is_stop.at[jnp.where(stop_tokens < 0, vocab_size, stop_tokens)].set(True)

    is_early = prefix.position < s.min_length[:, None]
    is_barred = is_early[..., None] & jax.vmap(mark)(rows.stop_tokens)[:, None]
    return jnp.where(is_barred, -jnp.inf, logits)


def _count_committed(rows: BatchView, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Occurrences `[B, V]` fp32 of each token in prompt and output, and in the output alone.

    Counted block by block, only as far as tokens are committed, so that no array grows with
    max_length. On a GPU all slots are counted at once, so that no loop waits for the host.
    """
    num_slots = rows.tokens.shape[1]
    row = jnp.arange(rows.tokens.shape[0], dtype=jnp.int32)[:, None]
    block = num_slots if rows.sampling.loops_run_on_host else BLOCK

    def count_block(index, counts):
        slot = index * block + jnp.arange(block, dtype=jnp.int32)
        tokens = jnp.take(rows.tokens, slot, axis=1, mode="clip")
        is_committed = slot[None] < rows.num_committed[:, None]
        is_output = is_committed & (slot[None] >= rows.sampling.prompt_length[:, None])
        in_all, in_output = counts
        return (
            in_all.at[row, tokens].add(is_committed.astype(jnp.float32)),
            in_output.at[row, tokens].add(is_output.astype(jnp.float32)),
        )

    zeros = jnp.zeros((rows.tokens.shape[0], vocab_size), jnp.float32)
    if block == num_slots:
        return count_block(0, (zeros, zeros))
    num_blocks = (jnp.max(rows.num_committed) + block - 1) // block
    return lax.fori_loop(0, num_blocks, count_block, (zeros, zeros))


def _broadcast(is_before: jax.Array, drafted: jax.Array) -> jax.Array:
    return jnp.broadcast_to(is_before, (drafted.shape[0], *is_before.shape[1:])).astype(jnp.float32)


def filtered_logits(logits: jax.Array, sampling: RowSampling) -> jax.Array:
    """Unnormalised log-probabilities `[B, T, V]` fp32 of the distribution that rows are sampled
    from: -inf where a filter removed a token. `softmax` of it is the distribution.

    Rows at temperature 0 get temperature 1 here; callers handle greedy rows.
    """

    def of_rows(values) -> jax.Array:
        return values[:, None, None]

    temperature = of_rows(sampling.temperature)
    scaled = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1)
    top_k, top_p = of_rows(sampling.top_k), of_rows(sampling.top_p)
    lowest_kept = functools.partial(_lowest_kept, loops_run_on_host=sampling.loops_run_on_host)
    scaled = lax.cond(
        jnp.any(top_k > 0), lambda: _keep_top_k(scaled, top_k, lowest_kept), lambda: scaled
    )
    scaled = lax.cond(
        jnp.any(top_p < 1), lambda: _keep_top_p(scaled, top_p, lowest_kept), lambda: scaled
    )
    highest = jnp.max(scaled, axis=-1, keepdims=True)
    # p < min_p * max p, in logarithms; min_p 0 gives -inf and removes nothing.
    return jnp.where(scaled < highest + jnp.log(of_rows(sampling.min_p)), -jnp.inf, scaled)


def _keep_top_k(scaled: jax.Array, top_k: jax.Array, lowest_kept: LowestKept) -> jax.Array:
    """`-inf` below the k-th highest, where `top_k` `[B, 1, 1]` is above 0; ties with it are
    kept."""

    def are_enough(*sets: jax.Array) -> list[jax.Array]:
        nums_above = sums.sum_integers(*(is_above.astype(jnp.uint32) for is_above in sets))
        return [num_above >= top_k.astype(jnp.uint32) for num_above in nums_above]

    order = _ordered_bits(scaled)
    return jnp.where((top_k > 0) & (order < lowest_kept(order, are_enough)), -jnp.inf, scaled)


def _keep_top_p(scaled: jax.Array, top_p: jax.Array, lowest_kept: LowestKept) -> jax.Array:
    """`-inf` below the token at which the likeliest tokens together reach the mass `top_p` `[B, 1,
    1]`, where that is less than 1; ties with that token are kept.

    Masses are added as integers, so which tokens reach `top_p` does not depend on the order.
    """
    masses, total, _ = sums.masses(scaled)
    # All tokens together have 2^29 to 2^30 units. A mass is its units and a fraction of `num_bits`.
    masses = masses * sums.power_of_two(29 - sums.exponent(total))
    num_bits = sums.num_digit_bits(scaled.shape[-1])
    units, rest = sums.split(masses)
    fractions, _ = sums.split(rest * jnp.float32(2**num_bits))

    def carried(units: jax.Array, fractions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return units + (fractions >> num_bits), fractions & (2**num_bits - 1)

    goal = _share_of(*carried(*sums.sum_integers(units, fractions)), top_p, num_bits=num_bits)
    # Without one unit, which the likeliest token has, no token at all would be enough.
    goal_units, goal_fraction = jnp.maximum(goal[0], 1), goal[1]

    def are_enough(*sets: jax.Array) -> list[jax.Array]:
        kept = [jnp.where(is_above, of, 0) for is_above in sets for of in (units, fractions)]
        added = sums.sum_integers(*kept)
        found = []
        for units_kept, fraction_kept in map(carried, added[::2], added[1::2]):
            is_goal = (units_kept == goal_units) & (fraction_kept >= goal_fraction)
            found.append((units_kept > goal_units) | is_goal)
        return found

    order = _ordered_bits(scaled)
    return jnp.where((top_p < 1) & (order < lowest_kept(order, are_enough)), -jnp.inf, scaled)


def _share_of(
    units: jax.Array, fraction: jax.Array, share: jax.Array, *, num_bits: int
) -> tuple[jax.Array, jax.Array]:
    """Units and fraction, uint32, of the fp32 `share`, below 1, of a number: their exact product,
    rounded down. A share below 2^-8 is rounded down to a multiple of 2^-32."""
    share = jnp.minimum(share * 2.0**32, 2.0**32 - 2.0**8).astype(jnp.uint32)
    upper, lower = _product(share, units)
    of_fraction, _ = _product(share, fraction << (32 - num_bits))
    added = lower + of_fraction
    upper += (added < lower).astype(jnp.uint32)
    return upper, added >> (32 - num_bits)


def _product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of the product of two uint32 numbers."""
    a_upper, a_lower, b_upper, b_lower = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    lowest = a_lower * b_lower
    middle = a_upper * b_lower + (lowest >> 16)
    carried = a_lower * b_upper + (middle & 0xFFFF)
    upper = a_upper * b_upper + (middle >> 16) + (carried >> 16)
    return upper, carried << 16 | lowest & 0xFFFF


def _ordered_bits(values: jax.Array) -> jax.Array:
    """uint32 numbers in the same order as the fp32 `values`; both zeros get the same number."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))


def _lowest_kept(order: jax.Array, are_enough: AreEnough, *, loops_run_on_host: bool) -> jax.Array:
    """The largest threshold `[B, T, 1]` uint32 for which the tokens at or above it are enough; 0,
    which keeps everything, if none is.

    Found bit by bit: 32 passes over the vocabulary instead of a sort. On a GPU the host would run
    that loop, so there it is unrolled into eight steps of four bits: one pass tests all 15 nonzero
    values of a hexadecimal digit.

    Args:
      order: `[B, T, V]` uint32.
      are_enough: for sets of tokens, each `[B, T, V]` bool, whether each is enough, `[B, T, 1]`.
      loops_run_on_host: as in `EngineShape`.
    """

    def highest_reached(threshold: jax.Array, *candidates: jax.Array) -> jax.Array:
        are_reached = are_enough(*(order >= candidate for candidate in candidates))
        for candidate, is_reached in zip(candidates, are_reached, strict=True):
            threshold = jnp.where(is_reached, candidate, threshold)
        return threshold

    threshold = jnp.zeros((*order.shape[:-1], 1), jnp.uint32)
    if loops_run_on_host:
        for shift in range(28, -1, -4):
            candidates = (threshold | jnp.uint32(digit << shift) for digit in range(1, 16))
            threshold = highest_reached(threshold, *candidates)
        return threshold

    def with_bit(index, threshold):
        return highest_reached(
            threshold, threshold | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        )

    return lax.fori_loop(0, 32, with_bit, threshold)


def scores(
    logits: jax.Array, rows: BatchView, prefix: DraftContext, noise: jax.Array | None = None
) -> jax.Array:
    """Perturbed logits `[B, T, V]` fp32, whose arg max is the token that a request draws at each
    position: adjusted logits at temperature 0, otherwise `filtered_logits` plus the position's
    noise (drawn here if None)."""
    adjusted = adjust(logits, rows, prefix)
    if noise is None:
        noise = _position_noise(rows.sampling, prefix, logits.shape[-1])
    is_sampled = (rows.sampling.temperature > 0)[:, None, None]
    return jnp.where(is_sampled, filtered_logits(adjusted, rows.sampling) + noise, adjusted)


def _position_noise(sampling: RowSampling, prefix: DraftContext, vocab_size: int) -> jax.Array:
    """Gumbel noise `[B, T, V]` of the positions. Where a tree has several nodes at one position, it
    is drawn once per depth and shared among them."""
    position = prefix.position
    by_depth = _noise_by_depth(sampling, prefix, vocab_size)
    if by_depth is None:
        return gumbel(position_keys(sampling, position), vocab_size)
    return jnp.take_along_axis(by_depth, (position - position[:, :1])[..., None], axis=1)


def _noise_by_depth(
    sampling: RowSampling, prefix: DraftContext, vocab_size: int
) -> jax.Array | None:
    """Noise `[B, D + 1, V]` for each depth of a tree; None where there are as many depths as
    nodes."""
    num_positions = prefix.position.shape[1]
    num_depths = num_positions if prefix.max_depth is None else prefix.max_depth + 1
    if num_depths >= num_positions:
        return None
    depth = jnp.arange(num_depths, dtype=jnp.int32)[None]
    return gumbel(position_keys(sampling, prefix.position[:, :1] + depth), vocab_size)


def choose(logits: jax.Array, rows: BatchView, prefix: DraftContext) -> jax.Array:
    """The token `[B, T]` int32 that plain decoding would emit at each position, -1 where the logits
    `[B, T, V]` are not finite."""
    greedy, is_finite = greedy_tokens(logits)
    chosen = lax.cond(is_greedy(rows), lambda: greedy, lambda: _draw(logits, rows, prefix))
    return jnp.where(is_finite, chosen, -1)


def num_drawn_together(
    num_rows: int, num_positions: int, *, loops_run_on_host: bool = False
) -> int:
    """How many positions of a window `choose` draws at a time. It is all of them for few tokens,
    which take longer in parts, and on a GPU, where each part would need its own kernel launches."""
    if loops_run_on_host:
        return num_positions
    size = max(-(-num_positions // NUM_PARTS), -(-SMALLEST_PART // num_rows))
    return min(size, num_positions)


def _draw(logits: jax.Array, rows: BatchView, prefix: DraftContext) -> jax.Array:
    """The arg max `[B, T]` of `scores`, a few positions at a time: noise, penalties and filters
    need ten arrays as large as the logits that they are applied to. A position's score depends on
    its own logits only, so it has the same bits either way."""
    num_rows, num_positions, vocab_size = logits.shape
    on_host = rows.sampling.loops_run_on_host
    size = num_drawn_together(num_rows, num_positions, loops_run_on_host=on_host)
    if size == num_positions:
        return greedy_tokens(scores(logits, rows, prefix))[0]
    by_depth = _noise_by_depth(rows.sampling, prefix, vocab_size)

    def draw_part(index: jax.Array, tokens: jax.Array) -> jax.Array:
        # The last part begins earlier if it would end beyond the last position.
        start = jnp.minimum(index * size, num_positions - size)

        def part(values: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(values, start, size, axis=1)

        position, noise = part(prefix.position), None
        if by_depth is not None:
            depth = position - prefix.position[:, :1]
            noise = jnp.take_along_axis(by_depth, depth[..., None], axis=1)
        here = prefix.replace(is_before=part(prefix.is_before), position=position, max_depth=None)
        drawn = greedy_tokens(scores(part(logits), rows, here, noise))[0]
        return lax.dynamic_update_slice_in_dim(tokens, drawn, start, axis=1)

    num_parts = -(-num_positions // size)
    return lax.fori_loop(0, num_parts, draw_part, jnp.zeros((num_rows, num_positions), jnp.int32))


def distribution(logits: jax.Array, rows: BatchView, prefix: DraftContext) -> jax.Array:
    """Probabilities `[B, T, V]` fp32 that rows are sampled from."""
    return sums.softmax(filtered_logits(adjust(logits, rows, prefix), rows.sampling))


def draw_weighted(keys: jax.Array, weights: jax.Array) -> jax.Array:
    """Tokens `[B]` int32 drawn in proportion to `weights` `[B, V]` (not all zero), with one key per
    row."""
    return greedy_tokens(jnp.log(weights) + gumbel(keys, weights.shape[-1]))[0]


def fit_vocabulary(logits: jax.Array, vocab_size: int) -> jax.Array:
    """A drafter's logits `[..., V']` as fp32 logits `[..., V]` over the target's token ids: ids
    that the target lacks are dropped, and ids that the drafter lacks get -inf."""
    logits = logits[..., :vocab_size].astype(jnp.float32)
    padding = [(0, 0)] * logits.ndim
    padding[-1] = (0, vocab_size - logits.shape[-1])
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


def over_vocabulary(logits: jax.Array, token_map: jax.Array | None, vocab_size: int) -> jax.Array:
    """A drafter's logits `[..., N]` of the tokens of a map `[N]` int32, as fp32 logits `[..., V]`
    over the target's token ids: all others get -inf. Without a map, see `fit_vocabulary`."""
    if token_map is None:
        return fit_vocabulary(logits, vocab_size)
    none = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, jnp.float32)
    return none.at[..., token_map].set(logits.astype(jnp.float32))


def without_nan(logits: jax.Array) -> jax.Array:
    """A drafter's logits `[..., V]` unchanged, or all zero if one of them is NaN or +inf. A token
    with logit -inf is never proposed."""
    are_numbers = jnp.all(logits < jnp.inf, axis=-1, keepdims=True)
    return jnp.where(are_numbers, logits, jnp.zeros((), logits.dtype))


class DraftToken(NamedTuple):
    """A chain drafter's tokens for one node, one per row.

    Attributes:
      token: `[B]` int32.
      distribution: `[B, V]` fp32, q, the distribution that the token was drawn from. None unless
        requested; no verifier uses that of a greedy row.
      confidence: `[B]` fp32, the token's probability under q; for a greedy row, under the softmax
        of its adjusted logits. None unless requested.
    """

    token: jax.Array
    distribution: jax.Array | None
    confidence: jax.Array | None


def draw_draft(
    logits: jax.Array,
    rows: BatchView,
    drafted: jax.Array,
    node: jax.Array,
    *,
    vocab_size: int,
    is_noise_shared: bool,
    needs_probs: bool,
    needs_greedy_probs: bool = False,
    needs_confidence: bool = False,
    token_map: jax.Array | None = None,
) -> DraftToken:
    """A chain drafter's token for `node`, drawn as the row draws its own tokens.

    Args:
      logits: `[B, V']`, the drafter's; ids that the target lacks are never drawn, and V' may be
        smaller than the target's V.
      drafted: `[B, N]` int32, the round's drafts so far.
      node: int32 scalar, the number of drafts so far.
      vocab_size: V of the target.
      is_noise_shared: as in `EngineShape`.
      needs_probs: whether to return the distribution that the token was drawn from.
      needs_greedy_probs: whether to return it for greedy rows too, at temperature 1.
      needs_confidence: whether to return the token's probability.
      token_map: `[V']` int32, the tokens that the logits are of, if not the first V'. Only what is
        drawn by noise or returned as a distribution is then spread over the vocabulary.
    """
    if token_map is None:
        logits = fit_vocabulary(logits, vocab_size)
    greedy, _ = greedy_tokens(logits)
    if token_map is not None:
        greedy = token_map[greedy]
    of_all_tokens = functools.partial(over_vocabulary, logits, token_map, vocab_size)

    def draw():
        prefix = DraftContext(
            tokens=drafted,
            is_before=(jnp.arange(drafted.shape[1], dtype=jnp.int32) < node)[None, None],
            position=(rows.num_committed + node)[:, None],
        )
        adjusted = adjust(of_all_tokens()[:, None], rows, prefix)
        drawn_from = filtered_logits(adjusted, rows.sampling)
        if is_noise_shared:
            keys = position_keys(rows.sampling, prefix.position)
        else:
            of_node = jnp.broadcast_to(node, (logits.shape[0], 1))
            keys = round_keys(rows, of_node, Stream.DRAFT)
        is_sampled = (rows.sampling.temperature > 0)[:, None, None]
        noisy = drawn_from + gumbel(keys, vocab_size)
        token = greedy_tokens(jnp.where(is_sampled, noisy, adjusted))[0][:, 0]
        distribution = sums.softmax(drawn_from[:, 0]) if needs_probs else None
        is_drawn_from = jnp.where(is_sampled, drawn_from, adjusted)[:, 0]
        return token, distribution, is_drawn_from if needs_confidence else None

    def take_highest():
        distribution = None
        if needs_greedy_probs and needs_probs:
            filtered = filtered_logits(of_all_tokens()[:, None], rows.sampling)
            distribution = sums.softmax(filtered[:, 0])
        elif needs_probs:
            distribution = jnp.zeros((logits.shape[0], vocab_size), jnp.float32)
        return greedy, distribution, of_all_tokens() if needs_confidence else None

    token, distribution, unnormalised = lax.cond(is_greedy(rows), take_highest, draw)
    confidence = None
    if unnormalised is not None:
        of_token = jnp.take_along_axis(unnormalised, token[:, None], axis=1)
        confidence = jnp.exp(of_token - sums.logsumexp(unnormalised))[:, 0]
    return DraftToken(token=token, distribution=distribution, confidence=confidence)


class DraftBlock(NamedTuple):
    """A chain drafter's tokens for all nodes at once.

    Attributes:
      tokens: `[B, N]` int32.
      distributions: `[B, N, V]` fp32, the distribution that each was drawn from; None unless
        requested. No verifier uses those of greedy rows.
    """

    tokens: jax.Array
    distributions: jax.Array | None


def draw_block(
    logits: jax.Array,
    rows: BatchView,
    *,
    is_noise_shared: bool,
    needs_probs: bool,
    needs_greedy_probs: bool = False,
) -> DraftBlock:
    """`draw_draft` for N nodes whose logits `[B, N, V]` do not depend on one another's tokens: all
    at once, or node by node if a row has penalties, which count earlier drafts.

    Args:
      logits: the drafter's, over the target's token ids.
      is_noise_shared: this and the other arguments are as in `draw_draft`.
    """
    num_rows, num_nodes, vocab_size = logits.shape
    node = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32)[None], (num_rows, num_nodes))

    def take_highest() -> DraftBlock:
        distributions = None
        if needs_probs:
            distributions = jnp.zeros_like(logits)
            if needs_greedy_probs:
                distributions = sums.softmax(filtered_logits(logits, rows.sampling))
        return DraftBlock(greedy_tokens(logits)[0], distributions)

    def draw() -> DraftBlock:
        adjusted = add_bias(logits, rows.sampling)
        drawn_from = filtered_logits(adjusted, rows.sampling)
        if is_noise_shared:
            keys = position_keys(rows.sampling, rows.num_committed[:, None] + node)
        else:
            keys = round_keys(rows, node, Stream.DRAFT)
        is_sampled = (rows.sampling.temperature > 0)[:, None, None]
        noisy = drawn_from + gumbel(keys, vocab_size)
        tokens = greedy_tokens(jnp.where(is_sampled, noisy, adjusted))[0]
        return DraftBlock(tokens, sums.softmax(drawn_from) if needs_probs else None)

    def draw_one_by_one() -> DraftBlock:
        def step(index: jax.Array, drawn: DraftBlock) -> DraftBlock:
            one = draw_draft(
                lax.dynamic_index_in_dim(logits, index, axis=1, keepdims=False),
                rows,
                drawn.tokens,
                index,
                vocab_size=vocab_size,
                is_noise_shared=is_noise_shared,
                needs_probs=needs_probs,
                needs_greedy_probs=needs_greedy_probs,
            )
            distributions = drawn.distributions
            if distributions is not None:
                distributions = distributions.at[:, index].set(one.distribution)
            return DraftBlock(drawn.tokens.at[:, index].set(one.token), distributions)

        nothing = jnp.zeros_like(logits) if needs_probs else None
        return lax.fori_loop(0, num_nodes, step, DraftBlock(jnp.zeros_like(node), nothing))

    return lax.cond(
        is_greedy(rows),
        take_highest,
        lambda: lax.cond(is_penalised(rows), draw_one_by_one, draw),
    )
