"""A small language model as the drafter (Leviathan et al., 2211.17192), with its own KV cache.

The cache is kept between rounds: rejected drafts are forgotten by lowering an integer, as in the
target. After full acceptance the last draft is still unseen, and the next round reads it first:
with `d` the drafts of a round of three, and `|` the end of what the drafter has seen,

    rejected after d1:   ... x d1|y          the next round drafts from y
    all accepted:        ... x d1 d2|d3 y    the next round reads d3, then drafts from y
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.cache import KVCache
from jaxspec.drafters.base import EngineShape, Outcome
from jaxspec.errors import ModelError, SettingError
from jaxspec.models.base import Model, param_specs
from jaxspec.prefill import prefill_chunk
from jaxspec.sampling import draw_draft
from jaxspec.types import Draft, PyTree, Rows, Window, chain_parents


class DraftModelState(struct.PyTreeNode, kw_only=True):
    """The draft model's cache and how far it is valid.

    Attributes:
      cache: of the draft model.
      num_seen: `[B]` int32, committed tokens whose KV is in it.
      num_steps: int32 scalar, draft steps of the round in progress.
      num_positions: int32 scalar, tokens read so far, prompts and drafts, of all rows that drafted
        or were read; what the drafter has cost. It wraps around: take differences.
    """

    cache: KVCache
    num_seen: jax.Array
    num_steps: jax.Array
    num_positions: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DraftModel:
    """Drafts with another model that shares the target's tokenizer, each row by its own sampling
    parameters: greedily where the row is greedy.

    Vocabularies that are padded to different sizes are fine: only ids that both have are proposed.
    """

    model: Model
    is_chain: bool = dataclasses.field(default=True, init=False)
    is_synthetic: bool = dataclasses.field(default=False, init=False)

    @property
    def name(self) -> str:
        """`draft_model:NAME`."""
        return f"draft_model:{self.model.name}"

    @property
    def params(self) -> PyTree:
        """The draft model's."""
        return self.model.params

    def param_specs(self, num_shards: int) -> PyTree:
        """How a mesh axis `model` splits the draft model; one that it does not divide is replicated
        (every device runs all of it, which a small model hardly feels)."""
        try:
            return param_specs(self.model, num_shards)
        except SettingError:
            return param_specs(self.model, 1)

    def check(self, target: Model) -> None:
        """Raises `ModelError` if the two tokenizers give one id to different tokens."""
        if target.tokenizer is None or self.model.tokenizer is None:
            return
        theirs = {i: token for token, i in target.tokenizer.fingerprint().items()}
        mine = {i: token for token, i in self.model.tokenizer.fingerprint().items()}
        different = [i for i in theirs if i in mine and theirs[i] != mine[i]]
        if different:
            first = min(different)
            raise ModelError(
                f"The draft model {self.model.name} and the target {target.name} have different "
                f"tokenizers ({len(different)} ids differ; id {first} is {mine[first]!r} to the "
                f"one and {theirs[first]!r} to the other); use a draft model of the same family, "
                "or the ngram drafter."
            )

    def init(self, shape: EngineShape) -> DraftModelState:
        """An empty cache."""
        return DraftModelState(
            cache=self.model.init_cache(shape.seats, shape.capacity),
            num_seen=jnp.zeros((shape.seats,), jnp.int32),
            num_steps=jnp.int32(0),
            num_positions=jnp.int32(0),
        )

    def admit(self, shape, params, state: DraftModelState, rows: Rows, row) -> DraftModelState:
        """Nothing of the new request has been seen."""
        return state.replace(num_seen=state.num_seen.at[row].set(0))

    def lag(self, state: DraftModelState, rows: Rows) -> jax.Array:
        """`[B]`, what `catch_up` should read; a lag of one is made up by the next round itself."""
        return jnp.maximum(rows.num_committed - 1 - state.num_seen, 0)

    def catch_up(self, shape, params, state: DraftModelState, rows: Rows, row) -> DraftModelState:
        """Reads a chunk of the unseen tokens of seat `row`."""
        start = state.num_seen[row]
        stop = jnp.minimum(start + shape.prefill_chunk, rows.num_committed[row] - 1)
        cache = prefill_chunk(
            self.model,
            params,
            state.cache,
            jnp.minimum(rows.tokens, self.model.vocab_size - 1),
            row=row,
            start=start,
            stop=stop,
            chunk=shape.prefill_chunk,
        )
        num_seen = state.num_seen.at[row].set(jnp.maximum(start, stop))
        num_positions = state.num_positions + jnp.maximum(stop - start, 0)
        return state.replace(cache=cache, num_seen=num_seen, num_positions=num_positions)

    def propose(self, shape, params, state: DraftModelState, rows: Rows):
        """A chain; as many steps as the most demanding row asks for, counted at run time.

        Rows that lag by more than one token get no draft: their context has a hole.
        """
        seats, num_nodes = shape.seats, shape.num_nodes
        can_draft = rows.num_committed - 2 <= state.num_seen
        num_valid = jnp.where(can_draft, jnp.minimum(rows.draft_limit, num_nodes), 0)
        is_drafting = num_valid > 0
        num_steps = jnp.max(num_valid)
        # A row that drafts nothing writes nothing, and stands where it cannot lengthen the
        # attention.
        newest = rows.num_committed - 1
        newest = jnp.where(is_drafting, newest, jnp.max(jnp.where(is_drafting, newest, 0)))

        def read(token, position, is_kept, cache):
            """Hidden states `[B, 1, E]` of one token per row; its KV is kept where `is_kept`."""
            position = jnp.maximum(position, 0)
            window = Window(
                start=position,
                positions=position[:, None],
                slots=jnp.where(is_kept, position, -1)[:, None],
            )
            token = jnp.minimum(token, self.model.vocab_size - 1)[:, None]
            return self.model.forward(params, token, window, cache)

        lags = is_drafting & (state.num_seen < newest)

        def read_unseen(_, cache):
            before = jnp.maximum(newest - 1, 0)[:, None]
            token = jnp.take_along_axis(rows.tokens, before, axis=1)[:, 0]
            return read(token, newest - 1, lags, cache)[1]

        def step(node, carry):
            tokens, laws, cache = carry
            last = lax.dynamic_slice_in_dim(tokens, node, 1, axis=1)[:, 0]
            hidden, cache = read(last, newest + node, is_drafting, cache)
            token, q = draw_draft(
                self.model.logits(params, hidden[:, 0]),
                rows,
                tokens[:, 1:],
                node,
                vocab_size=shape.vocab_size,
                is_noise_shared=shape.is_noise_shared,
                needs_law=shape.needs_draft_law,
                needs_greedy_law=shape.needs_greedy_law,
            )
            tokens = lax.dynamic_update_slice_in_dim(tokens, token[:, None], node + 1, axis=1)
            if q is not None:
                laws = lax.dynamic_update_slice_in_dim(laws, q[:, None], node, axis=1)
            return tokens, laws, cache

        # Loops of no or one trip, unlike conditionals, pass the cache through without copying it.
        cache = lax.fori_loop(0, jnp.any(lags).astype(jnp.int32), read_unseen, state.cache)
        root = jnp.take_along_axis(rows.tokens, newest[:, None], axis=1)
        tokens = jnp.pad(root, ((0, 0), (0, num_nodes)))
        laws = None
        if shape.needs_draft_law:
            laws = jnp.zeros((seats, num_nodes, shape.vocab_size), jnp.float32)
        tokens, laws, cache = lax.fori_loop(0, num_steps, step, (tokens, laws, cache))
        draft = Draft(
            tokens=tokens[:, 1:],
            parents=chain_parents(seats, num_nodes),
            num_valid=num_valid,
            q=laws,
        )
        num_read = num_steps * jnp.sum(is_drafting, dtype=jnp.int32)
        num_read += jnp.sum(lags, dtype=jnp.int32)
        state = state.replace(
            cache=cache, num_steps=num_steps, num_positions=state.num_positions + num_read
        )
        return draft, state

    def commit(self, shape, params, state: DraftModelState, rows: Rows, outcome: Outcome):
        """Of the accepted drafts all but the round's last step's have been seen."""
        drafted = outcome.draft.num_valid > 0
        seen = outcome.num_committed_before + jnp.minimum(
            outcome.verdict.num_accepted, state.num_steps - 1
        )
        num_seen = jnp.where(drafted, seen, state.num_seen)
        return state.replace(num_seen=jnp.minimum(num_seen, rows.num_committed))
