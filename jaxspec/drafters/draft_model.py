"""A small language model as the drafter (Leviathan et al., 2211.17192), with its own KV cache.

The cache is kept between rounds: rejected drafts are forgotten by lowering an integer, as in the
target. After full acceptance the last draft has not been read yet. So the first draft step of a
round reads two tokens, and stores the first one's KV if that is new. Below, `d` marks the drafts of
a round of three, and `|` the end of what the drafter has seen:

    rejected after d1:   ... x d1|y          the next round drafts from y, having read d1 again
    all accepted:        ... x d1 d2|d3 y    the next round reads d3 and drafts from y

With a `tree` it drafts trees instead of chains, level by level; see `draft_tree`.

With a `kv_window` the cache keeps only the newest positions and the first few (`cache.pages.Ring`),
so that its memory does not grow with the context. This changes what is drafted, but not the output.
Without one, draft steps may still read no more than that of a cache that keeps everything: a
variant, which engines with `draft_length="auto"` try where contexts are long.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from jaxspec.cache.pages import BLOCK, KVCache, KvDtype, Ring, as_ring, round_up_to_block
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_tree import commit_tree, draft_tree
from jaxspec.drafters.growth import num_offsets
from jaxspec.drafters.ngram import NGram, draft_ngram_first, ngram_of
from jaxspec.drafters.trees import Tree
from jaxspec.errors import JaxspecWarning, ModelError, SettingError
from jaxspec.kernels.base import splittable
from jaxspec.models.base import (
    LanguageModel,
    Model,
    logits_of,
    packed_model,
    param_specs,
    with_kv_dtype,
)
from jaxspec.models.prefill import next_starts, prefill_chunks
from jaxspec.runtime.values import check_kind, number, whole_number
from jaxspec.sampling import draw_draft
from jaxspec.types import BatchView, Draft, EngineShape, PyTree, RoundInfo, Window, chain_parents

NUM_SINKS = 4  # enough, according to StreamingLLM


class DraftModelState(struct.PyTreeNode, kw_only=True):
    """The draft model's cache, and up to where it is valid.

    Attributes:
      cache: the draft model's.
      num_seen: `[B]` int32, number of committed tokens whose KV is in the cache.
      num_steps: `[B]` int32, draft steps (for a tree: levels) that each row took in the round in
        progress.
      num_positions: int32 scalar, the drafter's cost so far: tokens of prompts and drafts that it
        has read, over all rows that were drafting or prefilling. Tokens that a first step reads
        again are not counted. It wraps around, so take differences.
      stored: `[B, nodes of the tree]` int32, where the KV of the round's nodes is stored, see
        `draft_tree.TreeDraft`; None without a tree.
      num_written: `[B]` int32, one past the highest position stored since the row was read from its
        beginning; it determines what a ring has overwritten. None without a `kv_window`.
    """

    cache: KVCache
    num_seen: jax.Array
    num_steps: jax.Array
    num_positions: jax.Array
    stored: jax.Array | None = None
    num_written: jax.Array | None = None


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class DraftModel(Drafter):
    """Drafts with another model that shares the target's tokenizer, with each row's own sampling
    parameters (greedily for a greedy row).

    Vocabularies that are padded to different sizes are fine: only ids that both have are proposed.
    So are a few ids that stand for different tokens, as in Llama 3 and 3.1: they are never drafted.

    With `min_confidence` a row stops drafting after the first token whose probability is lower; the
    round's draft steps end when every row has stopped (Hugging Face's
    `assistant_confidence_threshold`). That token itself stays in the draft. A draft may end because
    of tokens that it contains, but leaving a token out because of its own value would bias the
    output under `rejection` and `block`: the target would draw the next token as if that draft had
    never been made.

    With a `tree` the draft model's second and third choices are drafted too. A greedy row's
    children are the likeliest tokens. A sampled row's are the highest after adding noise: under
    `coupled` the noise that the target will use, so that the first child is what a chain would have
    drafted; under `rejection` they are drawn without replacement, which needs a `StaticTree`.

    With a `kv_window` each query of the draft model sees the newest `kv_window` positions and the
    first `kv_sinks` (StreamingLLM, 2309.17453, but with positions counted from the beginning of the
    text). However long a row grows, its KV takes `1 + ceil((kv_window + n - 1) / 128)` pages of 128
    slots, where n is the largest of a prefill chunk, a round's window and the slots of a tree.
    Layers whose own sliding window is narrower keep that window, and see no sinks.

    With a `prompt_lookup_min` a row whose last tokens occurred before gets the tokens that followed
    there, as an `NGram` drafts them, and the draft model drafts for the other rows. It reads the
    tokens of both.

    Attributes:
      model: the draft model. The argument `kv_dtype` sets the dtype in which its KV is stored
        (`int8`), independently of the target's; None keeps the model's. This changes a little what
        is drafted, but not what is emitted.
      min_confidence: probability in [0, 1] under the distribution that the row's drafts are drawn
        from (for a greedy row, the softmax of its logits). 0 never stops early, and costs nothing.
      tree: a `BeamTree`, `BudgetTree` or `StaticTree` to draft; None drafts chains.
      kv_window: number of newest positions that a query of the draft model sees, its own included,
        at least 128; None for all.
      kv_sinks: number of first positions that it sees as well, 0 to 128. Has no effect without a
        `kv_window`.
      ngram: the `NGram` in front of it, which the arguments `prompt_lookup_min` and
        `prompt_lookup_max` ask for, or None.
      tried_window: for a drafter returned by `trying_window`, what draft steps of its variant read;
        otherwise None.
      read_window: number of newest positions that draft steps read of a cache that keeps all; None
        for all. Only of that variant.
      room: for a drafter returned by `within`, the number of nodes that rounds have room for;
        otherwise None.
      excluded: for a drafter returned by `for_target`, the ids that stand for different tokens in
        the two tokenizers.

    Raises:
      SettingError: the model is only named; `min_confidence` is not a probability; it or
        `prompt_lookup_min` was given together with a tree; the KV dtype is unknown, or the model
        makes its own cache; another setting is out of range; or `kv_window` was given for a model
        that is not a `LanguageModel`, whose attention may not support it.
    """

    model: Model
    min_confidence: float = 0.0
    tree: Tree | None = None
    kv_window: int | None = None
    kv_sinks: int = NUM_SINKS
    ngram: NGram | None = None
    tried_window: int | None = dataclasses.field(default=None, repr=False)
    read_window: int | None = dataclasses.field(default=None, repr=False)
    room: int | None = dataclasses.field(default=None, repr=False)
    excluded: tuple[int, ...] = dataclasses.field(default=(), repr=False)

    variants_draft_alike = False

    def __init__(
        self,
        model: Model,
        min_confidence: float = 0.0,
        tree: Tree | None = None,
        kv_window: int | None = None,
        kv_sinks: int = NUM_SINKS,
        *,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        kv_dtype: KvDtype | None = None,
    ):
        settings = check_settings(
            min_confidence, tree, kv_window, kv_sinks, prompt_lookup_min, prompt_lookup_max
        )
        min_confidence, tree, kv_window, kv_sinks, ngram = settings
        expected = "a model; name one as Engine(target, drafter='demo-draft') or in load_drafter"
        check_kind("model", model, Model, expected)
        model = with_kv_dtype(model, kv_dtype)
        if kv_window is not None and not isinstance(model, LanguageModel):
            raise SettingError(
                f"A kv_window of {kv_window} was given for the draft model {model.name}, which is "
                f"a {type(model).__name__}; only attention of jaxspec's own LanguageModel keeps to "
                "it, so leave it out."
            )
        self._set(
            model=model,
            min_confidence=min_confidence,
            tree=tree,
            kv_window=kv_window,
            kv_sinks=kv_sinks,
            ngram=ngram,
        )

    @property
    def name(self) -> str:
        """`draft_model:NAME`, `draft_model@MIN_CONFIDENCE:NAME` or `draft_model[TREE]:NAME`; with a
        KV window `draft_model~WINDOW+SINKS:NAME`; with an `NGram` its name, a `+` and this."""
        tree = "" if self.tree is None else f"[{self.tree.name}]"
        confidence = f"@{self.min_confidence:g}" if self.min_confidence else ""
        window = "" if self.kv_window is None else f"~{self.kv_window}+{self.kv_sinks}"
        ngram = "" if self.ngram is None else f"{self.ngram.name}+"
        return f"{ngram}draft_model{tree}{confidence}{window}:{self.model.name}"

    @property
    def is_chain(self) -> bool:
        """Whether it has no tree, or rounds only have room for a chain of it."""
        if self.tree is None or self.room is None:
            return self.tree is None
        return self.tree.within(self.room).is_chain

    @property
    def max_depth(self) -> int | None:
        """The tree's; None for chains."""
        return None if self.tree is None else self.tree.max_depth

    @property
    def num_nodes(self) -> int | None:
        """The tree's; None for chains."""
        return None if self.tree is None else self.tree.num_nodes

    @property
    def prunes_by_token(self) -> bool:
        """Whether its tree leaves out nodes by their token, or siblings by their rank."""
        return self.tree is not None and self.tree.prunes_by_token

    @property
    def params(self) -> PyTree:
        """The draft model's parameters."""
        return self.model.params

    def param_specs(self, num_shards: int) -> PyTree:
        """How a mesh axis `model` splits the draft model; a draft model that cannot be split evenly
        is replicated (every device runs all of it, which costs a small model little)."""
        try:
            return param_specs(self.model, num_shards)
        except SettingError:
            return jax.tree.map(lambda _: PartitionSpec(), jax.eval_shape(splittable, self.params))

    def pack(self, params: PyTree) -> PyTree:
        """The draft model's parameters in the form that its kernels read fastest; see
        `LanguageModel.pack`."""
        return self.model.pack(params) if isinstance(self.model, LanguageModel) else params

    def check(self, target: Model) -> None:
        """Warns of ids that stand for different tokens in the two tokenizers.

        Raises:
          ModelError: most of the ids do, or most of the draft vocabulary is not the target's.
          SettingError: a node of the tree has more children than the two models share tokens.
        """
        mine, theirs = _tokens_by_id(self.model), _tokens_by_id(target)
        different = _differing_ids(mine, theirs)
        own: Sequence[int] = self._draft_vocabulary or range(self.model.vocab_size)
        num_unknown = sum(token >= target.vocab_size for token in self._draft_vocabulary)
        if 2 * num_unknown > len(own):
            raise ModelError(
                f"The draft model {self.model.name} drafts {len(own)} tokens, of which "
                f"{num_unknown} are beyond the vocabulary of {target.name} "
                f"({target.vocab_size} tokens); use a draft model of the same family, or the ngram "
                "drafter."
            )
        num_tokens = len({token for token in own if token < target.vocab_size} - {*different})
        if self.tree is not None and self.tree.num_children > num_tokens:
            raise SettingError(
                f"The tree {self.tree.name} has nodes of {self.tree.num_children} children, and "
                f"{self.model.name} can draft {num_tokens} tokens of {target.name}; make it "
                "narrower."
            )
        if not different:
            return
        first, num_shared = different[0], len(mine.keys() & theirs.keys())
        found = (
            f"The draft model {self.model.name} and the target {target.name} have different "
            f"tokenizers ({len(different)} of {num_shared} ids differ; id {first} is "
            f"{mine[first]!r} to the one and {theirs[first]!r} to the other)"
        )
        if 2 * len(different) > num_shared:
            raise ModelError(
                f"{found}; use a draft model of the same family, or the ngram drafter."
            )
        warnings.warn(
            f"{found}; these are never drafted, and the output does not change.",
            JaxspecWarning,
            stacklevel=2,
        )

    def for_target(self, target: Model) -> DraftModel:
        """The same draft model, packed, which drafts only ids that stand for one token in both."""
        different = _differing_ids(_tokens_by_id(self.model), _tokens_by_id(target))
        unknown = [token for token in self._draft_vocabulary if token >= target.vocab_size]
        excluded = tuple(sorted({*different, *unknown}))
        return self.with_fields(model=packed_model(self.model), excluded=excluded)

    def within(self, num_nodes: int) -> DraftModel:
        """The same draft model, which drafts chains where there is no room for a tree."""
        return self.with_fields(room=num_nodes)

    def trying_window(self, window: int) -> DraftModel:
        """The same draft model, with a variant whose draft steps read only the newest `window`
        positions, and the first `kv_sinks`, of all that the cache keeps."""
        return self.with_fields(tried_window=window)

    @property
    def variants(self) -> tuple[DraftModel, ...]:
        """The one of `trying_window`."""
        if self.tried_window is None:
            return ()
        return (self.with_fields(tried_window=None, read_window=self.tried_window),)

    def _longest_draft(self, shape: EngineShape) -> int:
        """The number of slots, from the newest token's on, in which a round may store KV."""
        num_scratch = 0 if self.tree is None else num_offsets(self.tree)
        return max(shape.verify_length, 1 + num_scratch)

    @property
    def _draft_vocabulary(self) -> tuple[int, ...]:
        """The model's draft vocabulary, if it has one."""
        return self.model.config.draft_vocabulary if isinstance(self.model, LanguageModel) else ()

    def _logits(self, params: PyTree, hidden: jax.Array, window: Window) -> jax.Array:
        """The draft model's logits of a window's hidden states, or its last ones, -inf for ids that
        it must not draft: `[..., V]`, or `[..., N]` of its draft vocabulary's tokens."""
        excluded = np.array(self.excluded, np.int32)
        if isinstance(self.model, LanguageModel) and self._draft_vocabulary:
            logits = self.model.draft_logits(params, hidden, window)
            excluded = np.flatnonzero(np.isin(self._draft_vocabulary, excluded))
        else:
            logits = logits_of(self.model, params, hidden, window)
        if not excluded.size:
            return logits
        return logits.at[..., excluded].set(-jnp.inf, mode="drop")

    def _token_map(self) -> jax.Array | None:
        """The tokens `[N]` int32 that `_logits` are of; None if these are all of the model's."""
        return jnp.array(self._draft_vocabulary, jnp.int32) if self._draft_vocabulary else None

    def _empty_cache(self, shape: EngineShape, capacity: int) -> KVCache:
        if self.kv_window is None:
            return self.model.init_cache(shape.batch_size, capacity)
        ring = Ring.of_calls(
            window=self.kv_window,
            num_sinks=self.kv_sinks,
            longest_call=max(shape.prefill_chunk, self._longest_draft(shape)),
        )
        num_slots = min(ring.num_pages * BLOCK, round_up_to_block(capacity))
        return as_ring(self.model.init_cache(shape.batch_size, num_slots), ring, capacity)

    def init(self, shape: EngineShape) -> DraftModelState:
        """An empty cache; with a tree it has room for the expanded nodes after the newest token."""
        capacity, stored, num_written = shape.max_length, None, None
        if self.tree is not None:
            capacity += num_offsets(self.tree)
            stored = jnp.full((shape.batch_size, self.tree.num_nodes), -1, jnp.int32)
        if self.kv_window is not None:
            num_written = jnp.zeros((shape.batch_size,), jnp.int32)
        return DraftModelState(
            cache=self._empty_cache(shape, capacity),
            num_seen=jnp.zeros((shape.batch_size,), jnp.int32),
            num_steps=jnp.zeros((shape.batch_size,), jnp.int32),
            num_positions=jnp.int32(0),
            stored=stored,
            num_written=num_written,
        )

    def admit(self, shape, params, state: DraftModelState, rows: BatchView, row) -> DraftModelState:
        """Nothing has been seen of the new request."""
        state = state.replace(num_seen=state.num_seen.at[row].set(0))
        if state.num_written is None:
            return state
        return state.replace(num_written=state.num_written.at[row].set(0))

    def lag(self, state: DraftModelState, rows: BatchView) -> jax.Array:
        """`[B]`, the number of tokens that `catch_up` should read; the next round itself makes up
        for a lag of one."""
        return jnp.maximum(rows.num_committed - 1 - state.num_seen, 0)

    def catch_up(
        self, shape, params, state: DraftModelState, rows: BatchView, chunk_rows: jax.Array
    ) -> DraftModelState:
        """Reads chunks of unseen tokens, all in one pass; with a `kv_window` one after the other,
        because the pages that take turns have room for the KV of one chunk only."""
        if self.kv_window is None:
            return self._read_chunks(shape, params, state, rows, chunk_rows)

        def read_one(index, state):
            return self._read_chunks(shape, params, state, rows, chunk_rows[index][None])

        return lax.fori_loop(0, jnp.sum(chunk_rows >= 0, dtype=jnp.int32), read_one, state)

    def _read_chunks(
        self, shape, params, state: DraftModelState, rows: BatchView, chunk_rows: jax.Array
    ) -> DraftModelState:
        own = jnp.maximum(chunk_rows, 0)
        starts = next_starts(state.num_seen, chunk_rows, shape.prefill_chunk)
        stops = jnp.minimum(starts + shape.prefill_chunk, rows.num_committed[own] - 1)
        stops = jnp.where(chunk_rows < 0, 0, stops)
        cache, *_ = prefill_chunks(
            self.model,
            params,
            state.cache,
            jnp.minimum(rows.tokens, self.model.vocab_size - 1),
            rows=own,
            starts=starts,
            stops=stops,
            chunk=shape.prefill_chunk,
        )
        num_read = jnp.sum(jnp.maximum(stops - starts, 0), dtype=jnp.int32)
        if state.num_written is not None:
            state = state.replace(num_written=state.num_written.at[own].max(stops))
        return state.replace(
            cache=cache,
            num_seen=state.num_seen.at[own].max(stops),
            num_positions=state.num_positions + num_read,
        )

    def propose(self, shape, params, state: DraftModelState, rows: BatchView):
        """A chain or a tree; it takes as many steps as the longest draft of any row needs, counted
        at run time. On a GPU it takes all steps that the window has room for, unless drafts end
        early.

        The first step also reads the one token that a row may lag by; with an `NGram` as many as a
        round may emit, also of rows that the `NGram` drafts for. A row stores only what its own
        draft needs, however long its neighbours draft. Rows that lag by more get no draft, because
        their context is incomplete.
        """
        if self.read_window is not None:
            return self._propose_in_window(self.read_window, shape, params, state, rows)
        if self.tree is not None and not self.is_chain:
            return self._propose_tree(self.tree, shape, params, state, rows)
        if self.ngram is None:
            is_reading = (rows.draft_limit > 0) & (rows.num_committed - 2 <= state.num_seen)
            return self._propose_chain(shape, params, state, rows, is_reading, 2)

        def propose(others: BatchView) -> tuple[Draft, DraftModelState]:
            longest = shape.verify_length
            return self._propose_chain(shape, params, state, others, rows.draft_limit > 0, longest)

        return draft_ngram_first(self.ngram, shape, rows, shape.num_nodes, propose)

    def _propose_chain(
        self,
        shape: EngineShape,
        params,
        state: DraftModelState,
        rows: BatchView,
        is_reading: jax.Array,
        longest: int,
    ) -> tuple[Draft, DraftModelState]:
        """Chains. The first step reads the next tokens of the rows that are `is_reading` `[B]`, up
        to `longest`; those of which it reads the newest token may draft."""
        batch_size, num_nodes = shape.batch_size, shape.num_nodes
        stops_early, token_map = self.min_confidence > 0, self._token_map()
        newest = rows.num_committed - 1
        first = jnp.minimum(state.num_seen, newest)
        num_first = jnp.where(is_reading, jnp.minimum(newest + 1 - first, longest), 0)
        is_complete = is_reading & (first + num_first > newest)
        num_valid = jnp.where(is_complete, jnp.minimum(rows.draft_limit, num_nodes), 0)
        # A row that reads nothing gets a position that does not make attention longer.
        newest = jnp.where(is_reading, newest, jnp.max(jnp.where(is_reading, newest, 0)))

        def read(tokens, positions, num_live, cache):
            """Logits `[B, V']` after the last of each row's first `num_live` `[B]` tokens, whose KV
            is stored. Tokens and positions are `[B, T]`."""
            places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            slots = jnp.where(places < num_live[:, None], positions, -1)
            window = Window(
                start=positions[:, 0], positions=positions, slots=slots, num_live=num_live
            )
            tokens = jnp.minimum(tokens, self.model.vocab_size - 1)
            hidden, cache = self.model.forward(params, tokens, window, cache)
            last = jnp.maximum(num_live - 1, 0)[:, None, None]
            hidden = hidden if tokens.shape[1] == 1 else jnp.take_along_axis(hidden, last, axis=1)
            return self._logits(params, hidden[:, 0], window), cache

        def draw(node, logits, carry: _Drafting) -> _Drafting:
            """Node `node` from logits `[B, V']`."""
            drawn = draw_draft(
                logits,
                rows,
                carry.tokens,
                node,
                vocab_size=shape.vocab_size,
                is_noise_shared=shape.is_noise_shared,
                needs_probs=shape.needs_draft_probs,
                needs_greedy_probs=shape.needs_greedy_probs,
                needs_confidence=stops_early,
                token_map=token_map,
            )
            num_valid, distributions = carry.num_valid, carry.distributions
            if distributions is not None and drawn.distribution is not None:
                distributions = lax.dynamic_update_slice_in_dim(
                    distributions, drawn.distribution[:, None], node, axis=1
                )
            if drawn.confidence is not None:
                is_sure = drawn.confidence >= self.min_confidence
                num_valid = end_draft(num_valid, node, is_sure=is_sure)
            tokens = lax.dynamic_update_slice_in_dim(
                carry.tokens, drawn.token[:, None], node, axis=1
            )
            return carry.replace(tokens=tokens, num_valid=num_valid, distributions=distributions)

        def first_step(_, carry: _Drafting) -> _Drafting:
            start = jnp.where(is_reading, first, newest)
            positions = start[:, None] + jnp.arange(longest, dtype=jnp.int32)[None]
            positions = jnp.minimum(positions, newest[:, None])
            tokens = jnp.take_along_axis(rows.tokens, positions, axis=1)
            logits, cache = read(tokens, positions, num_first, carry.cache)
            return draw(jnp.int32(0), logits, carry.replace(cache=cache))

        def step(node, carry: _Drafting) -> _Drafting:
            last = lax.dynamic_slice_in_dim(carry.tokens, node - 1, 1, axis=1)
            # A row that has stopped keeps its position, so that it sees no unwritten slot.
            depth = jnp.minimum(node, jnp.maximum(carry.num_valid - 1, 0))
            is_drafting = (node < carry.num_valid).astype(jnp.int32)
            logits, cache = read(last, (newest + depth)[:, None], is_drafting, carry.cache)
            return draw(node, logits, carry.replace(cache=cache))

        distributions = None
        if shape.needs_draft_probs:
            distributions = jnp.zeros((batch_size, num_nodes, shape.vocab_size), jnp.float32)
        drafting = _Drafting(
            tokens=jnp.zeros((batch_size, num_nodes), jnp.int32),
            num_valid=jnp.where(is_reading, jnp.maximum(num_valid, 1), 0),  # takes the first step
            distributions=distributions,
            cache=state.cache,
        )
        drafting = self._take_steps(shape, first_step, drafting, 0, 1)
        drafting = drafting.replace(num_valid=jnp.where(num_valid > 0, drafting.num_valid, 0))
        drafting = self._take_steps(shape, step, drafting, 1, num_nodes)
        num_valid = drafting.num_valid
        draft = Draft(
            tokens=drafting.tokens,
            parents=chain_parents(batch_size, num_nodes),
            num_valid=num_valid,
            q=drafting.distributions,
        )
        num_read = jnp.sum(num_first + jnp.maximum(num_valid - 1, 0), dtype=jnp.int32)
        state = state.replace(
            cache=drafting.cache,
            num_seen=jnp.where(is_reading, first + num_first, state.num_seen),
            num_steps=jnp.where(is_complete, jnp.maximum(num_valid, 1), 0),
            num_positions=state.num_positions + num_read,
        )
        return draft, state

    def _propose_in_window(
        self, window: int, shape: EngineShape, params, state: DraftModelState, rows: BatchView
    ) -> tuple[Draft, DraftModelState]:
        """`propose` on a cache that shows its newest positions and the first ones only: a ring with
        as many pages as a row has blocks, so that none takes turns."""
        cache = state.cache
        num_blocks = cache.capacity // BLOCK
        ring = Ring(window=window, num_sinks=self.kv_sinks, num_pages=num_blocks)
        shown = state.replace(cache=cache.replace(ring=ring))
        whole = self.with_fields(read_window=None)
        draft, state = whole.propose(shape, params, shown, rows)
        return draft, state.replace(cache=state.cache.replace(ring=None))

    def _propose_tree(
        self, tree: Tree, shape: EngineShape, params, state: DraftModelState, rows: BatchView
    ) -> tuple[Draft, DraftModelState]:
        own = tree.within(shape.num_nodes)
        drafted = draft_tree(
            self.model,
            self._logits,
            own,
            shape,
            params,
            state.cache,
            rows,
            state.num_seen,
            token_map=self._token_map(),
        )
        missing = ((0, 0), (0, tree.num_nodes - own.num_nodes))  # windows share one state
        state = state.replace(
            cache=drafted.cache,
            num_steps=drafted.num_levels,
            num_positions=state.num_positions + drafted.num_read,
            stored=jnp.pad(drafted.stored, missing, constant_values=-1),
        )
        return drafted.draft, state

    def _take_steps(
        self,
        shape: EngineShape,
        step: Callable[[jax.Array, _Drafting], _Drafting],
        drafting: _Drafting,
        start: int,
        stop: int,
    ) -> _Drafting:
        """Draft steps `start` to `stop`, for as long as some row wants them.

        A loop ends there, and unlike a conditional passes the cache through without copying it.
        Where the host runs loops, all steps are taken; those that no row wants store nothing.
        """
        if shape.loops_run_on_host and not self.min_confidence:
            return lax.fori_loop(start, stop, step, drafting)

        def is_wanted(carry):
            node, drafting = carry
            return (node < stop) & (node < jnp.max(drafting.num_valid))

        def advance(carry):
            node, drafting = carry
            return node + 1, step(node, drafting)

        return lax.while_loop(is_wanted, advance, (jnp.int32(start), drafting))[1]

    def rewind(self, shape, params, state: DraftModelState, rows: BatchView, row, num_kept):
        """Forgets the KV of what was cut off. If a ring has overwritten what the last kept tokens
        see, everything is forgotten, and the row is read from its beginning."""
        num_seen = jnp.minimum(state.num_seen[row], num_kept)
        ring = state.cache.ring
        if ring is not None and state.num_written is not None:
            num_written = state.num_written[row]
            is_there = ring.holds(num_seen, num_written)
            num_seen = jnp.where(is_there, num_seen, 0)
            num_written = jnp.where(is_there, num_written, 0)
            state = state.replace(num_written=state.num_written.at[row].set(num_written))
        return state.replace(num_seen=state.num_seen.at[row].set(num_seen))

    def commit(self, shape, params, state: DraftModelState, rows: BatchView, info: RoundInfo):
        """All accepted drafts have been seen, except the one of the row's last step."""
        before = info.rows.num_committed
        if self.is_chain or state.stored is None:
            seen = before + jnp.minimum(info.verdict.num_accepted, state.num_steps - 1)
        else:
            cache, num_stored = commit_tree(
                self.model, state.cache, state.stored, before, info.verdict.path
            )
            state, seen = state.replace(cache=cache), before + num_stored
        num_seen = jnp.where(state.num_steps > 0, seen, state.num_seen)
        if state.num_written is not None:
            stored = before - 1 + self._longest_draft(shape)
            written = jnp.where(state.num_steps > 0, stored, 0)
            state = state.replace(num_written=jnp.maximum(state.num_written, written))
        return state.replace(num_seen=jnp.minimum(num_seen, rows.num_committed))


def _tokens_by_id(model: Model) -> dict[int, str]:
    """A model's tokens by id; empty without a tokenizer."""
    if model.tokenizer is None:
        return {}
    return {i: token for token, i in model.tokenizer.fingerprint().items()}


def _differing_ids(mine: Mapping[int, str], theirs: Mapping[int, str]) -> list[int]:
    """Ids that both have, for different tokens, in order."""
    return sorted(i for i in theirs if i in mine and theirs[i] != mine[i])


def check_settings(
    min_confidence: float,
    tree: Tree | None,
    kv_window: int | None,
    kv_sinks: int,
    prompt_lookup_min: Any = None,
    prompt_lookup_max: Any = None,
) -> tuple[float, Tree | None, int | None, int, NGram | None]:
    """The settings of a `DraftModel`, which do not depend on its model.

    Raises:
      SettingError: one is out of range, or two contradict each other.
    """
    expected = "from 0 (drafts never end early) to 1, since it is a probability"
    min_confidence = number("min_confidence", min_confidence, least=0, most=1, expected=expected)
    if tree is not None:
        check_kind("tree", tree, Tree, "a BeamTree, BudgetTree or StaticTree, or None")
    ngram = ngram_of(prompt_lookup_min, prompt_lookup_max)
    of_chains = {"min_confidence": min_confidence, "prompt_lookup_min": prompt_lookup_min}
    for name, given in of_chains.items():
        if given and tree is not None:
            raise SettingError(
                f"A {name} of {given:g} and the tree {tree.name} were given; a draft model takes "
                "the first for chains only, so leave one of them out."
            )
    return min_confidence, tree, *check_kv_window(kv_window, kv_sinks), ngram


def check_kv_window(kv_window: int | None, kv_sinks: int = NUM_SINKS) -> tuple[int | None, int]:
    """The two sizes as ints.

    Raises:
      SettingError: a draft model cannot keep a KV window of these sizes.
    """
    if kv_window is not None:
        kv_window = whole_number("kv_window", kv_window)
    kv_sinks = whole_number("kv_sinks", kv_sinks)
    if kv_window is not None and kv_window < BLOCK:
        raise SettingError(
            f"kv_window {kv_window} was given; KV is kept in blocks of {BLOCK} positions, so give "
            f"at least {BLOCK}, or None to keep everything."
        )
    if not 0 <= kv_sinks <= BLOCK:
        raise SettingError(
            f"kv_sinks {kv_sinks} was given; the first positions that stay visible lie in "
            f"one block, so give a number from 0 to {BLOCK}."
        )
    return kv_window, kv_sinks


class _Drafting(struct.PyTreeNode, kw_only=True):
    """A draft in progress: the drafter's cache and the fields of `Draft`."""

    tokens: jax.Array
    num_valid: jax.Array
    distributions: jax.Array | None
    cache: KVCache


def end_draft(num_valid: jax.Array, node: jax.Array, *, is_sure: jax.Array) -> jax.Array:
    """`num_valid` `[B]` int32 after `node` was drafted: rows that are not sure of it end after it.

    So only the nodes before it decide whether a node is drafted, as lossless rules require: given
    these, the node is drawn from q, or the target draws a token instead.
    """
    return jnp.where(is_sure, num_valid, jnp.minimum(num_valid, node + 1))
