"""Array records of the decode loop, and the dimension legend used in every docstring.

Dimension letters:
    B  rows (sequences decoded together)       V  vocabulary
    S  slots of a row's KV (its max_length)      L  layers
    T  window: query tokens of one call        E  width (hidden size)
    N  draft nodes of a round, T - 1           F  feed-forward width
    P  pages of a layer's KV                   Q  query heads, K  KV heads, G = Q / K
    R  rounds of a row's trace                 H  head size

Throughout, p is the target's distribution and q the drafter's (as in Leviathan et al., 2211.17192).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

PyTree = Any


class Origin(enum.IntEnum):
    """Where a token of a row came from; the values of `DecodeState.origin`."""

    PROMPT = 0
    PLAIN = 1  # the target's own token in a round that drafted nothing
    ACCEPTED = 2  # drafted, and what the target would have produced
    CORRECTED = 3  # the target's token in place of a rejected draft
    BONUS = 4  # the target's token after a fully accepted draft


class Finish(enum.IntEnum):
    """Why a row stopped; the values of `DecodeState.finish`."""

    RUNNING = 0
    STOP_TOKEN = 1
    MAX_TOKENS = 2
    MAX_LENGTH = 3
    NON_FINITE = 4
    EMPTY_ROW = 5
    STOP_STRING = 6
    PREFILLING = 7  # its prompt is still being prefilled
    CANCELLED = 8
    DEVICE_ERROR = 9  # the device call failed, and the batch with it
    TOKENIZER_ERROR = 10  # the tokenizer failed on its output
    TIMEOUT = 11  # its own time limit had passed
    DEVICE_TIMEOUT = 12  # the device did not answer in time, and the engine has ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The static shape of an engine: everything its programs are compiled for.

    Attributes:
      batch_size: B, rows of the batch.
      max_length: S, slots per row.
      verify_length: T, tokens scored per round.
      prefill_chunk: tokens of one chunk of a prompt; no setting, see `models.prefill.CHUNK`.
      vocab_size: V of the target.
      tree_depth: the depth of the deepest tree that windows are laid out for, 0 for chains. With
        most kernels the bits of a token depend on it (see `Window.tail_start`), so engines whose
        outputs are compared should share it.
      is_noise_shared: whether a sampling drafter draws with the noise that the target will use at
        the same position (coupled verification), instead of its own noise.
      needs_draft_probs: whether drafts must come with the distribution they were drawn from,
        `Draft.q`.
      needs_greedy_probs: whether a trace needs the q of greedy rows too, at temperature 1;
        otherwise nothing reads it. A drafter that leaves it zero is traced as deterministic.
      loops_run_on_host: whether the host runs loops with a dynamic trip count, waiting for the
        device before every trip, as on a GPU; loops inside a round then have static trip counts.
      chunks_per_call: R, the chunks of one prefill call, of any rows.
    """

    batch_size: int
    max_length: int
    verify_length: int
    prefill_chunk: int
    vocab_size: int
    tree_depth: int = 0
    is_noise_shared: bool = True
    needs_draft_probs: bool = False
    needs_greedy_probs: bool = False
    loops_run_on_host: bool = False
    chunks_per_call: int = 1

    def decisive(self) -> dict[str, Any]:
        """The fields that decide an output or how it is computed: all but the shape of prefill
        calls, which is a constant of the device and the kernels."""
        shape = dataclasses.asdict(self)
        del shape["prefill_chunk"], shape["chunks_per_call"]
        return shape

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes that a draft has room for."""
        return self.verify_length - 1


class Window(struct.PyTreeNode, kw_only=True):
    """The T tokens that one model call processes for each row, and their positions and slots.

    Index 0 is the newest committed token (its KV is not in the cache yet), the others are draft
    nodes or prompt tokens. A query at position i sees the slots below `i + 1`: slot i of a row
    holds position i, so a chain needs no other mask. For a tree, `paths` says which window entry
    each query sees at each virtual slot `start + depth`. In this canonical order a node sees
    exactly the KV, in exactly the order, that it would see in plain decoding.

    Attributes:
      start: `[B]` int32; slots below it hold committed context.
      positions: `[B, T]` int32, `start + depth`; also the rotary position.
      slots: `[B, T]` int32, where each token's KV is stored; it is dropped if the slot is outside
        `[0, S)`.
      rows: `[B]` int32 rows of the cache's page table, or None for all of them in order. A row is
        repeated for consecutive chunks of its prompt.
      paths: `[B, T, D]` int32 or None (a chain), where D is one more than the depth of the deepest
        node, independent of T. `paths[b, t, d]` is the offset from `start` of the entry that entry
        t sees at virtual slot `start + d`: its ancestor at depth d, or t itself. An earlier call of
        the same round may have stored that entry.
      ends: `[B, T]` int32 or None. One past the last virtual slot that each entry sees; None means
        `positions + 1`: the entry itself and all before it.
      num_live: `[B]` int32 or None (all). Only the first `num_live[b]` entries of row b are needed;
        what is returned for the others is arbitrary.
    """

    start: jax.Array
    positions: jax.Array
    slots: jax.Array
    rows: jax.Array | None = None
    paths: jax.Array | None = None
    ends: jax.Array | None = None
    num_live: jax.Array | None = None

    @property
    def visible_ends(self) -> jax.Array:
        """`[B, T]` int32, one past the last virtual slot that each entry sees."""
        return self.positions + 1 if self.ends is None else self.ends

    @property
    def tail_start(self) -> jax.Array:
        """`[B, T]` int32, for trees only: where each entry's own part of its context begins.

        The slots below it are committed in every round that may score this entry, because `start`
        is at least the entry's end minus D; the `tail_length` slots from there on are read along
        the entry's path. It depends on the entry's position and on D, never on where the round
        began, so a token's sums are the same in whichever round it is scored.
        """
        return jnp.maximum(self.visible_ends - self.tail_length, 0)

    @property
    def tail_length(self) -> int:
        """D, the number of slots of every entry's tail; static. Entries at positions below D - 1
        see fewer."""
        assert self.paths is not None, "a chain has no tail"
        return self.paths.shape[2]

    def stored_at(self, slots: jax.Array) -> jax.Array:
        """Where the KV of each entry's virtual `slots` `[B, T, n]` is stored, `[B, T, n]` int32.

        Slots below `start` are stored at their own place; those from `start` on follow the entry's
        path. Either of the first two axes of `slots` may have size 1. For trees only.
        """
        assert self.paths is not None, "a chain's slots are where they seem to be"
        num_depths = self.paths.shape[2]
        start = self.start[:, None, None]
        depth = slots - start
        is_on_path = (depth >= 0) & (depth < num_depths)
        offset = jnp.take_along_axis(self.paths, jnp.clip(depth, 0, num_depths - 1), axis=2)
        return jnp.where(is_on_path, start + offset, slots)


class Draft(struct.PyTreeNode, kw_only=True):
    """A tree of proposed tokens per row; a chain is the tree `parents[b, n] == n - 1`.

    A drafter puts the best nodes first: the first n nodes are a tree too, for any n, and a row that
    wants fewer gets the first ones. A node with token -1 is a hole, where a level had fewer
    candidates than room: it is scored as some token, but never accepted.

    Attributes:
      tokens: `[B, N]` int32.
      parents: `[B, N]` int32, index of each node's parent, parents before children; -1 is the
        newest committed token.
      num_valid: `[B]` int32, the first `num_valid[b]` nodes are proposals, the rest padding.
      q: `[B, N, V]` fp32, the distribution each token was drawn from, or None if the draft is
        deterministic. Siblings are drawn from their parent's distribution without replacement, in
        the order of their index, and `q` holds that whole distribution for each of them.
      max_depth: static, the greatest depth of a node (children of the newest token have depth 1);
        the round takes it from the drafter. None means N, the depth of a chain.
      is_chain: static, whether all nodes follow one another; the round takes it from the drafter.
    """

    tokens: jax.Array
    parents: jax.Array
    num_valid: jax.Array
    q: jax.Array | None = None
    max_depth: int | None = struct.field(pytree_node=False, default=None)
    is_chain: bool = struct.field(pytree_node=False, default=False)

    @property
    def is_node(self) -> jax.Array:
        """`[B, N]` bool, which nodes are proposals: neither padding nor holes."""
        index = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        return (index < self.num_valid[:, None]) & (self.tokens >= 0)

    @property
    def depth(self) -> int:
        """D, the greatest depth that a node may have."""
        num_nodes = self.tokens.shape[1]
        return num_nodes if self.max_depth is None else min(self.max_depth, num_nodes)


class Verdict(struct.PyTreeNode, kw_only=True):
    """The verifier's decision on a draft.

    Attributes:
      num_accepted: `[B]` int32, length of the accepted path.
      path: `[B, D]` int32, node at each depth of the accepted path; -1 beyond `num_accepted`. D is
        `Draft.depth`: N for a chain.
      next_token: `[B]` int32, the target's own token after the accepted path; -1 where the target's
        logits there are not finite.
      chosen: `[B, N + 1]` int32, for traces: the token that the target draws after the newest one
        (index 0) and after each node. None where the rule does not draw them.
    """

    num_accepted: jax.Array
    path: jax.Array
    next_token: jax.Array
    chosen: jax.Array | None = None


class Scores(struct.PyTreeNode, kw_only=True):
    """What the target computed for the T tokens of a window.

    Attributes:
      logits: `[B, T, V]` fp32, for the token after each of them.
      hidden: `[B, T, E]`, the hidden states that the logits were computed from.
      features: `[B, T, n, E]`, the residual stream at the drafter's n `taps`; None without taps.
    """

    logits: jax.Array
    hidden: jax.Array
    features: jax.Array | None = None


class Emission(struct.PyTreeNode, kw_only=True):
    """The tokens that a round adds to each row, and whether the row ends with them.

    Attributes:
      tokens: `[B, D + 1]` int32, the accepted path, then the target's next token.
      origin: `[B, D + 1]` int8, `Origin` of each.
      num_emitted: `[B]` int32, how many of them are kept; 0 for rows that are not running.
      finish: `[B]` int32, `Finish` after the round.
      stop_token: `[B]` int32, the stop token that ended the row, or -1.
    """

    tokens: jax.Array
    origin: jax.Array
    num_emitted: jax.Array
    finish: jax.Array
    stop_token: jax.Array


class AcceptanceCounts(struct.PyTreeNode, kw_only=True):
    """Running totals per row, all int32. `accepted_at` is cumulative acceptance by position.

    A position is a depth of the tree. In a chain node n stands at depth n + 1, so `accepted_at` and
    `accepted_node` agree. Because the best nodes come first, drafts of only the first n nodes would
    have emitted 1 + sum(accepted_node[:n]) / num_rounds tokens per round.

    Attributes:
      num_rounds: `[B]`, rounds the row took part in.
      num_drafts: `[B]`, rounds in which something was drafted for the row.
      num_draft_tokens: `[B]`, drafted tokens, all nodes of a tree.
      num_accepted_tokens: `[B]`, drafted tokens that were accepted and kept.
      drafted_at: `[B, D]`, rounds whose draft reached depth d + 1.
      accepted_at: `[B, D]`, rounds that accepted at least d + 1 tokens.
      accepted_node: `[B, N]`, rounds that accepted node n.
    """

    num_rounds: jax.Array
    num_drafts: jax.Array
    num_draft_tokens: jax.Array
    num_accepted_tokens: jax.Array
    drafted_at: jax.Array
    accepted_at: jax.Array
    accepted_node: jax.Array


class ScheduleCounts(struct.PyTreeNode, kw_only=True):
    """What rounds have cost so far, int32 scalars (they wrap around, so take differences).

    The length of a row is `num_committed`, plus its padding in the `aligned` layout. Lengths are
    compared at the point where rows would have to be aligned: when they enter the batch if the
    scheduler regroups rows, otherwise at the end of a round.

    Attributes:
      num_rounds: rounds run.
      num_rows: rows decoded, summed over rounds; a round decodes the running rows in the batch.
      num_grouped_rounds: rounds in which the batch was full and all rows had the same length
        (2510.22876 counts these as grouped calls; with one row every round is one).
      num_grouped_rows: rows decoded, summed over rounds, that had the same length as another row of
        their round.
      num_realignments: how often KV had to be moved to align rows.
      num_slots_moved: slots whose KV was moved, summed over rows; each was moved in every layer.
    """

    num_rounds: jax.Array
    num_rows: jax.Array
    num_grouped_rounds: jax.Array
    num_grouped_rows: jax.Array
    num_realignments: jax.Array
    num_slots_moved: jax.Array


MAX_BIASED_TOKENS = 300  # per request, as in OpenAI's API


class TokenBias(struct.PyTreeNode, kw_only=True):
    """What each row adds to the logits of some tokens. A row without a bias lists no tokens.

    Attributes:
      tokens: `[B, MAX_BIASED_TOKENS]` int32, each at most once, padded with -1.
      values: `[B, MAX_BIASED_TOKENS]` fp32, added to the logits of `tokens`.
      is_exclusive: `[B]` bool, whether a row may emit the listed tokens only.
    """

    tokens: jax.Array
    values: jax.Array
    is_exclusive: jax.Array


class RowSampling(struct.PyTreeNode, kw_only=True):
    """How each row's tokens are drawn, as arrays, so that new values trigger no compilation.

    Attributes:
      temperature: `[B]` fp32, 0 is greedy.
      top_k: `[B]` int32, 0 is off.
      top_p: `[B]` fp32, 1 is off.
      min_p: `[B]` fp32, 0 is off.
      repetition_penalty: `[B]` fp32, 1 is off; over prompt and output.
      presence_penalty: `[B]` fp32, 0 is off; over the output.
      frequency_penalty: `[B]` fp32, 0 is off; over the output.
      key: `[B, 2]` uint32, threefry key of the request.
      prompt_length: `[B]` int32.
      min_length: `[B]` int32, `num_committed` below which no stop token is drawn.
      bias: of `logit_bias` and `allowed_token_ids`. None, in a hand-made record, is no bias; a
        decode loop always sets it.
      loops_run_on_host: static, that of `EngineShape`; it changes no result.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    key: jax.Array
    prompt_length: jax.Array
    min_length: jax.Array
    bias: TokenBias | None = None
    loops_run_on_host: bool = struct.field(pytree_node=False, default=False)


class BatchView(struct.PyTreeNode, kw_only=True):
    """What drafters and verifiers may know about the batch.

    Attributes:
      tokens: `[B, S]` int32, committed tokens, garbage beyond `num_committed`.
      num_committed: `[B]` int32.
      draft_limit: `[B]` int32, most nodes to draft in this round; 0 for rows that are not running.
      depth_limit: `[B]` int32, depth beyond which a node could not be emitted. A chain's
        `draft_limit` exceeds it only with `Drafter.drafts_last_token`, by one. May be None in a
        hand-made record.
      stop_tokens: `[B, num_stop]` int32, -1 pads.
      sampling: how tokens are drawn.
      remaining: `[B]` int32, tokens that each row may still emit; 0 for rows that are not running.
        May be None in a hand-made record; a decode loop always sets it.
    """

    tokens: jax.Array
    num_committed: jax.Array
    draft_limit: jax.Array
    stop_tokens: jax.Array
    sampling: RowSampling
    remaining: jax.Array | None = None
    depth_limit: jax.Array | None = None


class DraftContext(struct.PyTreeNode, kw_only=True):
    """The uncommitted tokens that precede each of T tokens to be drawn.

    Attributes:
      tokens: `[B, n]` int32, drafted tokens.
      is_before: `[B or 1, T, n]` bool, which of them precede the t-th token to be drawn.
      position: `[B, T]` int32, the position of the token to be drawn.
      max_depth: static, for trees: the most by which a `position[b, t]` may exceed `position[b,
        0]`. None means T - 1, as in a chain.
    """

    tokens: jax.Array
    is_before: jax.Array
    position: jax.Array
    max_depth: int | None = struct.field(pytree_node=False, default=None)


class RoundInfo(struct.PyTreeNode, kw_only=True):
    """Everything a round did, for `Drafter.commit` and for the recorders.

    A step of plain decoding is a round whose draft has no nodes.

    Attributes:
      rows: the batch before the round.
      draft: as it was scored, with `num_valid` clipped to each row's limit.
      tokens: `[B, T]` int32, the tokens that were scored: the newest committed one, then the nodes.
      window: the positions and slots of these tokens.
      context: the uncommitted tokens before each of the T tokens that could be drawn.
      scores: what the target computed for them.
      verdict: the verifier's decision.
      emission: the tokens that were added to the rows.
    """

    rows: BatchView
    draft: Draft
    tokens: jax.Array
    window: Window
    context: DraftContext
    scores: Scores
    verdict: Verdict
    emission: Emission

    @property
    def features(self) -> jax.Array | None:
        """`[B, T, n, E]`, the target's residual stream at the drafter's taps."""
        return self.scores.features

    @property
    def depth(self) -> jax.Array:
        """`[B]` int32, depth that the draft reached."""
        if self.window.paths is None:
            return self.draft.num_valid
        depth = self.window.positions[:, 1:] - self.window.start[:, None]
        return jnp.max(jnp.where(self.draft.is_node, depth, 0), axis=1, initial=0)


class Shared(struct.PyTreeNode):
    """Marks a part of a drafter's state that all rows share and that therefore has no row axis.

    Attributes:
      value: any pytree.
    """

    value: PyTree


class Logprobs(struct.PyTreeNode, kw_only=True):
    """Log-probabilities of emitted tokens and of the likeliest alternatives.

    Attributes:
      of_token: `[B, S]` fp32.
      top: `[B, S, k]` fp32, descending.
      top_tokens: `[B, S, k]` int32.
    """

    of_token: jax.Array
    top: jax.Array
    top_tokens: jax.Array


class RoundTrace(struct.PyTreeNode, kw_only=True):
    """The outcome of a draft, for each row and each of its own rounds; all `[B, R]` int32.

    Attributes:
      engine_round: rounds that had been run for all rows before this one.
      context_length: `num_committed` at the start of the round.
      drafted: drafted tokens; 0 where the round decoded plainly.
      draft_depth: depth that the draft reached; `drafted` for a chain.
      accepted: drafted tokens that were accepted and kept.
      emitted: tokens that were added to the row.
    """

    engine_round: jax.Array
    context_length: jax.Array
    drafted: jax.Array
    draft_depth: jax.Array
    accepted: jax.Array
    emitted: jax.Array


class TokenTrace(struct.PyTreeNode, kw_only=True):
    """Every drafted token, rejected ones included, and the one that the target added itself, `[B,
    R, N + 1]`: index n + 1 is node n, index 0 the target's own. Garbage beyond what was drafted,
    and at index 0 where the round added no token.

    Attributes:
      token_id: int32.
      target_token_id: int32, what the target wanted in its place: `Verdict.chosen`, or the arg max
        of p.
      parent: int16, the node that it follows; -1 is the newest committed token.
      is_accepted: bool, drafted, accepted and kept.
      logprob_p: fp32, natural logarithm of its probability under p, the distribution that the row
        is sampled from (for a greedy row, at temperature 1); -inf where a filter removed it.
      logprob_q: fp32, under q, at the same temperature; NaN where the draft was deterministic, and
        for the target's own token.
      rank: int32, 1-based rank under p, filtered tokens counted too.
    """

    token_id: jax.Array
    target_token_id: jax.Array
    parent: jax.Array
    is_accepted: jax.Array
    logprob_p: jax.Array
    logprob_q: jax.Array
    rank: jax.Array


class DistributionTrace(struct.PyTreeNode, kw_only=True):
    """How p and q compare at each token of `TokenTrace`, `[B, R, N + 1]` fp32. A deterministic
    draft's q is a point mass on its token; the target's own token has no q, and NaN in its place.

    Attributes:
      entropy_p: in nats.
      entropy_q: in nats; 0 for a point mass.
      overlap: sum of min(p, q), the probability that rejection sampling keeps a token drawn from q.
    """

    entropy_p: jax.Array
    entropy_q: jax.Array
    overlap: jax.Array


class Trace(struct.PyTreeNode, kw_only=True):
    """The history of every row, written at the row's own round number: index `counts.num_rounds` of
    R.

    A round that is counted emits at least one token, so R = S rounds are enough for any row.
    """

    rounds: RoundTrace
    tokens: TokenTrace | None = None
    distributions: DistributionTrace | None = None


class DecodeState(struct.PyTreeNode, kw_only=True):
    """Everything a decode loop carries from round to round, for every resident row. A round sees
    the same record with only the rows of its batch (`decode.state.take_rows`).

    Every array has the rows as its first axis (in a cache, the page table does); scalars, and what
    a drafter wraps in `Shared`, belong to all rows together.

    `num_committed` is the only truth about a row: tokens below it are final, the target's KV is
    valid for one token fewer, and everything past that is garbage that is never read as a value.
    """

    # evolving
    cache: PyTree
    drafter: PyTree
    num_committed: jax.Array  # [B] int32, prompt and output
    finish: jax.Array  # [B] int32, Finish
    # schedule
    arrival: jax.Array  # [B] int32, order in which requests came
    schedule: ScheduleCounts
    # requests
    limit: jax.Array  # [B] int32, num_committed at which the row ends
    limit_finish: jax.Array  # [B] int32, the Finish to report there
    draft_limit: jax.Array  # [B] int32, requested draft length; 0 decodes plainly
    # [B] int32, the least number of tokens that a round computes for a running row if it skips
    # padding, drafted or not; 0 except while rounds are timed
    least_live: jax.Array
    stop_tokens: jax.Array  # [B, num_stop] int32, -1 pads
    # randomness
    sampling: RowSampling
    # output
    tokens: jax.Array  # [B, S] int32
    origin: jax.Array  # [B, S] int8, Origin
    stop_token: jax.Array  # [B] int32, the stop token that ended the row, or -1
    wants_logprobs: jax.Array  # [B] bool, whether those of the row's output are asked for
    logprobs: Logprobs | None  # None where the engine keeps none
    # totals
    counts: AcceptanceCounts
    # history
    trace: Trace | None = None  # None where the engine keeps none

    @property
    def num_rounds(self) -> jax.Array:
        """int32 scalar, rounds run so far."""
        return self.schedule.num_rounds

    @property
    def is_running(self) -> jax.Array:
        """`[B]` bool."""
        return self.finish == Finish.RUNNING


def chain_parents(num_rows: int, num_nodes: int) -> jax.Array:
    """Parents `[B, N]` of a chain: every node follows the one before it."""
    return jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32) - 1, (num_rows, num_nodes))
