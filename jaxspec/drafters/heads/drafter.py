"""Heads as a drafter: chains and trees from the target's hidden states, one head for each level.

The target's hidden states at position t are the *feature* of t. At the start of a round the newest
token stands at n - 1, and the newest feature is that of n - 2, since the newest token has not been
through the target. `observe` is shown the features of prompts, `commit` those of every round:

    tokens      x_0  x_1  ...  x_{n-2}  x_{n-1}
    features    f_0  f_1  ...  f_{n-2}             head k proposes x_{n+k}

An augmenting block reads one entry per position: feature t is in slot t, and Clover-2's entry also
depends on the token at t + 1. The features are always the target's own: features of rejected tokens
are never stored, and neither are states that the heads computed. Because features are stored, the
block need not run in plain steps; it catches up before the next draft.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.cache import pages as kv
from jaxspec.drafters.base import TrainedDrafter
from jaxspec.drafters.growth import Grower, Growth, Level, count_levels
from jaxspec.drafters.heads import formulas
from jaxspec.drafters.heads.config import HeadsConfig, param_shapes
from jaxspec.drafters.heads.formulas import TargetParts
from jaxspec.drafters.ngram import NGram, draft_ngram_first, ngram_of
from jaxspec.drafters.tree_names import named_tree
from jaxspec.drafters.trees import BudgetTree, Tree
from jaxspec.errors import ModelError, SettingError
from jaxspec.kernels.base import Kernels, PackedWeight
from jaxspec.models import decoder
from jaxspec.models.base import LAST, HeadedModel, Model, kernels_of
from jaxspec.models.prefill import chain_window, next_starts
from jaxspec.runtime.values import check_kind, text
from jaxspec.sampling import draw_draft, without_nan
from jaxspec.types import (
    BatchView,
    Draft,
    EngineShape,
    PyTree,
    RoundInfo,
    Window,
    chain_parents,
)

DEFAULT_NODES = 4  # Clover's budget, at which it found that more nodes hardly pay in large batches
# The parameters of heads that are weights of products.
PRODUCTS = frozenset({"weight", "query", "key", "value", "head", "head_columns"})
Carry = TypeVar("Carry")


class HeadsState(struct.PyTreeNode, kw_only=True):
    """What heads keep of each row.

    Attributes:
      anchor: `[B, E]`, what `formulas.anchor` made of the newest feature that was read.
      is_ready: `[B]` bool, whether there is one; a prompt of one token has none.
      num_taken: `[B]` int32, number of positions, from the first on, whose features were received.
      num_seen: `[B]` int32, how many of these the block has read; without a block, all of them.
      features: the features of all these positions, stored as a cache of one layer and one head: k
        holds the first half of a feature, v the second. None without a block.
      cache: the block's KV; None without a block.
    """

    anchor: jax.Array
    is_ready: jax.Array
    num_taken: jax.Array
    num_seen: jax.Array
    features: kv.KVCache | None
    cache: kv.KVCache | None


class Expanded(NamedTuple):
    """The nodes that the next level of a tree expands. A level of fewer than K has them first.

    Attributes:
      hidden: `[B, K, E]`, the states that its head reads.
      path: `[B, K, max_depth]` int32, the newest token and those on the way to each node.
      value: `[B, K]` fp32, of these paths.
    """

    hidden: jax.Array
    path: jax.Array
    value: jax.Array

    @classmethod
    def newest(cls, anchor: jax.Array, newest: jax.Array, tree: Tree) -> Expanded:
        """The newest token `[B, 1]`, before any level."""
        size = (newest.shape[0], tree.num_expanded)
        return cls(
            hidden=jnp.broadcast_to(anchor[:, None], (*size, anchor.shape[-1])),
            path=jnp.broadcast_to(newest[:, None], (*size, tree.max_depth)),
            value=jnp.zeros(size, jnp.float32),
        )

    def children(self, chosen: Level, hidden: jax.Array, level: int) -> Expanded:
        """The nodes `chosen` for `level`, children of these; `hidden` `[B, n, E]` are the states
        after the n that were expanded."""
        # Where there are fewer children, the others are none of these nodes' and are not used.
        parent = jnp.minimum(chosen.parent, hidden.shape[1] - 1)[..., None]
        path = jnp.take_along_axis(self.path, parent, axis=1)
        is_here = jnp.arange(path.shape[2], dtype=jnp.int32) == level
        return Expanded(
            hidden=jnp.take_along_axis(hidden, parent, axis=1),
            path=jnp.where(is_here[None, None], chosen.tokens[..., None], path),
            value=chosen.value,
        )


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Heads(TrainedDrafter):
    """Drafts with Medusa's, Hydra's, Clover's or Clover-2's heads, each row by its own sampling
    parameters: greedily where the row is greedy.

    A regressive head runs once for each node that a level expands, with the tokens on the way to
    it. A node's children are the highest scores of its head: of a greedy row the likeliest tokens,
    of a sampled one the highest after noise. Under `coupled` that is the noise by which the target
    will draw; under `rejection` they are drawn without replacement, which takes a chain or a
    `StaticTree`. The value of a node is the probability of its path.

    A head whose logits are NaN proposes no nodes of a tree, and an arbitrary token of a chain; for
    verifiers that need its distribution it proposes from a uniform one.

    With an `ngram`, a row whose last tokens occurred before gets the tokens that followed there,
    and heads draft only for rows where it finds nothing: n-grams draft copied text better, heads
    all other text. Suffix decoding (2411.04975) is combined with other drafters in the same way. On
    a CPU no head runs while n-grams find something in all rows.

    Attributes:
      config: architecture.
      params: as `heads.config.param_shapes` says, in the target's dtype.
      tree: a `BudgetTree`, `BeamTree` or `StaticTree`; None drafts chains.
      label: name of the weights, for reports; may be empty.
      ngram: an `NGram` of one branch, or None.
      target: the model whose head they use; an engine fills it in (`for_target`).

    Raises:
      ModelError: the parameters are not those of `config`.
      SettingError: the tree is deeper than there are heads, or lengths of matches are out of range.
    """

    config: HeadsConfig
    params: PyTree = dataclasses.field(repr=False)
    tree: Tree | None
    label: str
    ngram: NGram | None
    target: Model | None

    kind: ClassVar[str] = "heads"
    config_type: ClassVar[type] = HeadsConfig
    param_shapes = staticmethod(param_shapes)
    taps: ClassVar[tuple[int, ...]] = (LAST,)
    uses_target: ClassVar[bool] = True

    def __init__(
        self,
        config: HeadsConfig,
        params: PyTree,
        *,
        tree: Tree | str | int | None = None,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        name: str = "",
    ):
        """See the class; `tree` None is Clover's tree of four nodes, `"chain"` drafts chains, and
        others may be named, see `named_tree`. With a `prompt_lookup_min` there is an `NGram` of
        these lengths, at most 4 by default."""
        check_kind("config", config, HeadsConfig, "a HeadsConfig")
        name = text("name", name)
        self.check_params(config, params, name)
        if tree is None:
            tree = BudgetTree(nodes=DEFAULT_NODES, depth=min(config.num_heads, DEFAULT_NODES))
        if isinstance(tree, str | int):
            tree = None if tree == "chain" else named_tree(tree, most_levels=config.num_heads)
        grown = tree
        if grown is not None:
            check_kind("tree", grown, Tree, "a BeamTree, BudgetTree or StaticTree, or a name")
        if grown is not None and grown.max_depth > config.num_heads:
            raise SettingError(
                f"The tree {grown.name} is {grown.max_depth} deep, and there are "
                f"{config.num_heads} heads, one for each level; make it shallower."
            )
        ngram = ngram_of(prompt_lookup_min, prompt_lookup_max)
        self._set(config=config, params=params, tree=grown, label=name, ngram=ngram, target=None)

    @staticmethod
    def check_settings(
        *, tree: Any = None, prompt_lookup_min: Any = None, prompt_lookup_max: Any = None
    ) -> None:
        """Raises `SettingError` if there is no tree of this name, or lengths of matches are out of
        range."""
        if isinstance(tree, str | int) and tree != "chain":
            named_tree(tree, most_levels=1)
        ngram_of(prompt_lookup_min, prompt_lookup_max)

    @staticmethod
    def param_dtype(path: tuple[str | int, ...], dtype: Any) -> jnp.dtype:
        """The dtype of a parameter: int32 for a token map, otherwise `dtype`."""
        return jnp.dtype(jnp.int32 if path == ("token_map",) else dtype)

    @staticmethod
    def fit(config: HeadsConfig, target: Model, name: str) -> jnp.dtype:
        """The target's dtype; raises `ModelError` if its head cannot be used by itself, or it has
        another width or vocabulary."""
        if not isinstance(target, HeadedModel):
            methods = ("final_norm", "head", "head_rows")
            missing = [method for method in methods if not hasattr(target, method)]
            raise ModelError(
                f"The heads {name} use the head of their target, and {target.name} has no "
                f"{', '.join(missing)}; add them as jaxspec.models.base.HeadedModel says."
            )
        token = jax.ShapeDtypeStruct((1,), jnp.int32)
        row = jax.eval_shape(target.head_rows, target.params, token)
        for what, mine, theirs in (
            ("width", config.width, row.shape[-1]),
            ("a vocabulary of", config.vocab_size, target.vocab_size),
        ):
            if mine != theirs:
                raise _other_size(name, target, what, mine, theirs)
        return row.dtype

    @property
    def name(self) -> str:
        """`KIND[TREE]:LABEL`, such as `clover[budget:4]:demo-heads` or `medusa[chain]`; with an
        `NGram` its name, a `+` and this."""
        tree = "chain" if self.tree is None else self.tree.name
        own = f"{self.config.kind}[{tree}]" + (f":{self.label}" if self.label else "")
        return own if self.ngram is None else f"{self.ngram.name}+{own}"

    @property
    def is_chain(self) -> bool:
        """Whether it has no tree."""
        return self.tree is None

    @property
    def max_depth(self) -> int | None:
        """The tree's; None for chains."""
        return None if self.tree is None else self.tree.max_depth

    @property
    def num_nodes(self) -> int:
        """The tree's; for chains one for each head."""
        return self.config.num_heads if self.tree is None else self.tree.num_nodes

    @property
    def prunes_by_token(self) -> bool:
        """Whether its tree leaves nodes out by what they hold, or siblings by their rank."""
        return self.tree is not None and self.tree.prunes_by_token

    def check(self, target: Model) -> None:
        """Raises `ModelError` if these are no heads for `target`, `SettingError` if a node of the
        tree has more children than there are tokens."""
        dtype = self.fit(self.config, target, self.name)
        if self._dtype != dtype:
            raise _other_size(self.name, target, "dtype", self._dtype, dtype)
        num_tokens = self.config.num_head_tokens or self.config.vocab_size
        if self.tree is not None and self.tree.num_children > num_tokens:
            raise SettingError(
                f"The tree {self.tree.name} has nodes of {self.tree.num_children} children, and "
                f"these heads propose {num_tokens} tokens; make it narrower."
            )

    def for_target(self, target: Model) -> Heads:
        """A copy that uses the head of `target`, and its kernels for the block."""
        bound = self.with_fields(target=target)
        params = bound.derive_params(self.params, target.params)
        return bound.with_fields(params=bound.pack(params))

    def derive_params(self, params: PyTree, target_params: PyTree) -> PyTree:
        """With `head_columns`, the columns `[E, N]` of the target's head for the N tokens of the
        token map, where heads share it and propose only these."""
        has_columns = self.config.shares_head and self.config.num_head_tokens is not None
        if not has_columns or not isinstance(params, Mapping) or "token_map" not in params:
            return params

        def gather(target_params: PyTree, tokens: jax.Array) -> jax.Array:
            assert isinstance(self.target, HeadedModel)
            return self.target.head_rows(target_params, tokens).T

        some = jax.tree.leaves(target_params)[0]
        if isinstance(some, jax.ShapeDtypeStruct):  # a model that is planned has no weights
            gather = functools.partial(jax.eval_shape, gather)
        return {**params, "head_columns": gather(target_params, params["token_map"])}

    def pack(self, params: PyTree) -> PyTree:
        """The heads' parameters, their products' weights as the target's kernels read them best;
        see `LanguageModel.pack`."""

        def pack(path: tuple[Any, ...], leaf: Any) -> Any:
            is_of_product = getattr(path[-1], "key", None) in PRODUCTS
            return self._kernels.pack(leaf) if is_of_product else leaf

        packed = jax.tree_util.tree_map_with_path(
            pack,
            {name: leaves for name, leaves in params.items() if name != "layers"},
            is_leaf=lambda node: isinstance(node, PackedWeight),
        )
        if "layers" not in params:
            return packed
        return {**packed, **decoder.pack_params({"layers": params["layers"]}, self._kernels)}

    @property
    def _kernels(self) -> Kernels:
        """The target's, where it is one of the package's own models."""
        return kernels_of(self.target)

    @property
    def _dtype(self) -> jnp.dtype:
        return jax.tree.leaves(self.params)[0].dtype

    def _parts(self, params: PyTree, num_live: jax.Array | None = None) -> TargetParts:
        """The target's parts with its parameters in them; `params` as `propose` gets them,
        `num_live` as in `Kernels.product_for`."""
        if not isinstance(self.target, HeadedModel):
            raise ModelError(
                f"The heads {self.name} were used without a target; take those that "
                "for_target(target) returns."
            )
        own, target_params = params["own"], params["target"]
        product = self._kernels.product_for(num_live)
        head = functools.partial(self.target.head, target_params)
        if "head_columns" in own:
            head = functools.partial(product, weight=own["head_columns"], dtype=jnp.float32)
        return TargetParts(
            final_norm=functools.partial(self.target.final_norm, target_params),
            head=head,
            head_rows=functools.partial(self.target.head_rows, target_params),
            product=product,
        )

    def init(self, shape: EngineShape) -> HeadsState:
        """Empty state."""
        num_rows, width = shape.batch_size, self.config.width
        block, features, cache = self.config.block, None, None
        if block is not None:
            make = functools.partial(
                kv.init_cache, num_rows=num_rows, capacity=shape.max_length, dtype=self._dtype
            )
            features = make(num_layers=1, num_kv_heads=1, head_size=-(-width // 2))
            cache = make(
                num_layers=block.num_layers,
                num_kv_heads=block.num_kv_heads,
                head_size=block.head_size,
            )
        return HeadsState(
            anchor=jnp.zeros((num_rows, width), self._dtype),
            is_ready=jnp.zeros((num_rows,), bool),
            num_taken=jnp.zeros((num_rows,), jnp.int32),
            num_seen=jnp.zeros((num_rows,), jnp.int32),
            features=features,
            cache=cache,
        )

    def admit(self, shape, params, state: HeadsState, rows: BatchView, row) -> HeadsState:
        """Nothing of the new request has been seen."""
        return state.replace(
            is_ready=state.is_ready.at[row].set(False),
            num_taken=state.num_taken.at[row].set(0),
            num_seen=state.num_seen.at[row].set(0),
        )

    def lag(self, state: HeadsState, rows: BatchView) -> jax.Array | None:
        """`[B]`, features that the block has not read; None without a block. Rounds make up for a
        few of them."""
        return None if self.config.block is None else _num_unread(state, rows)

    def observe(
        self, shape, params, state: HeadsState, rows: BatchView, row, start, stop, features
    ) -> HeadsState:
        """Takes the features of a chunk of a prompt."""
        is_new = stop > start
        window = chain_window(start[None], features.shape[0], stop=stop[None], rows=row[None])
        num_taken = jnp.where(is_new, stop, state.num_taken[row])
        state = state.replace(num_taken=state.num_taken.at[row].set(num_taken))
        if state.features is not None:
            return state.replace(features=_kept(state.features, features[None, :, 0], window))
        last = jnp.clip(stop - start - 1, 0, features.shape[0] - 1)[None]
        tokens = jnp.take(rows.tokens, row[None], axis=0)
        anchor, _ = self._read(params, None, features[None, :, 0], tokens, window, last)
        return self._with_anchors(state, row[None], anchor, is_new[None], num_taken[None])

    def catch_up(
        self, shape, params, state: HeadsState, rows: BatchView, chunk_rows: jax.Array
    ) -> HeadsState:
        """The block reads chunks of features that it has not read, all in one pass."""
        if state.features is None:
            return state
        own = jnp.maximum(chunk_rows, 0)
        starts = next_starts(state.num_seen, chunk_rows, shape.prefill_chunk)
        end = (state.num_seen + _num_unread(state, rows))[own]
        stops = jnp.where(chunk_rows < 0, 0, jnp.minimum(starts + shape.prefill_chunk, end))
        window = chain_window(starts, shape.prefill_chunk, stop=stops, rows=own)
        features = _recalled(state.features, window, self.config.width)
        last = jnp.maximum(stops - starts - 1, 0)
        anchors, cache = self._read(params, state.cache, features, rows.tokens[own], window, last)
        return self._with_anchors(state.replace(cache=cache), own, anchors, stops > starts, stops)

    def _with_anchors(
        self,
        state: HeadsState,
        rows: jax.Array,
        anchors: jax.Array,
        is_new: jax.Array,
        num_seen: jax.Array,
    ) -> HeadsState:
        """The state after chunks of `rows` `[R]` were read up to positions `num_seen` `[R]`, those
        that are `is_new` `[R]`. A row's anchor is the last one of its `anchors` `[R, E]`."""
        place = jnp.arange(rows.shape[0], dtype=jnp.int32)
        last = jnp.full_like(state.num_seen, -1).at[rows].max(jnp.where(is_new, place, -1))
        is_read, last = last >= 0, jnp.maximum(last, 0)
        return state.replace(
            anchor=jnp.where(is_read[:, None], anchors[last], state.anchor),
            is_ready=is_read | state.is_ready,
            num_seen=jnp.where(is_read, num_seen[last], state.num_seen),
        )

    def commit(
        self, shape, params, state: HeadsState, rows: BatchView, info: RoundInfo
    ) -> HeadsState:
        """Takes the target's features of the newest token of before the round and of what was
        accepted after it. The round's last token has none yet.

        A block reads as many positions as a round may accept, from where it stopped: usually these.
        After a plain step it reads nothing.
        """
        assert info.features is not None, "heads have a tap"
        start, num_kept = info.rows.num_committed - 1, info.emission.num_emitted
        entry = jnp.pad(info.verdict.path + 1, ((0, 0), (1, 0)))  # 0 is the newest token
        features = jnp.take_along_axis(info.features[:, :, 0], entry[..., None], axis=1)
        stop = start + num_kept
        is_next = (state.num_taken >= start) & (num_kept > 0)
        state = state.replace(num_taken=jnp.where(is_next, stop, state.num_taken))
        first, window = start, chain_window(start, entry.shape[1], stop=stop)
        if state.features is not None:
            kept = _kept(state.features, features, window)
            state = state.replace(features=kept)
            if entry.shape[1] == 1:
                return state
            first = jnp.minimum(state.num_seen, start)
            stop = jnp.where(is_next, jnp.minimum(stop, first + entry.shape[1]), first)
            window = chain_window(first, entry.shape[1], stop=stop)
            features = _recalled(kept, window, self.config.width)
        last = jnp.maximum(stop - first - 1, 0)
        anchor, cache = self._read(params, state.cache, features, rows.tokens, window, last)
        return state.replace(
            anchor=jnp.where(is_next[:, None], anchor, state.anchor),
            is_ready=jnp.where(num_kept > 0, is_next, state.is_ready),
            num_seen=jnp.where(is_next, stop, state.num_seen),
            cache=cache,
        )

    def _read(
        self,
        params: PyTree,
        cache: kv.KVCache | None,
        features: jax.Array,
        tokens: jax.Array,
        window: Window,
        last: jax.Array,
    ) -> tuple[jax.Array, kv.KVCache | None]:
        """The anchor `[B, E]` of entry `last` `[B]` of the window, and the block's cache with all
        of its entries.

        Args:
          params: as `propose` gets them.
          cache: of the block.
          features: `[B, T, E]` of the window.
          tokens: `[B, S]` int32, committed ones.
          window: where the features stand.
          last: `[B]` int32.
        """

        def of_last(values: jax.Array) -> jax.Array:
            index = jnp.expand_dims(last, range(1, values.ndim))
            return jnp.take_along_axis(values, index, axis=1)

        positions = window.positions
        if self.config.block is None:  # nothing is kept of the others
            features, positions = of_last(features), of_last(positions)
        following = jnp.clip(positions + 1, 0, tokens.shape[1] - 1)
        next_tokens = jnp.take_along_axis(tokens, following, axis=1)

        def run(hidden: jax.Array) -> jax.Array:
            nonlocal cache
            assert self.config.block is not None
            assert cache is not None, "there is a cache where there is a block"
            hidden, cache = decoder.run_layers(
                self.config.block,
                params["own"],
                hidden,
                window,
                cache,
                kernels=self._kernels,
                has_feed_forward=self.config.block_part == "whole",
            )
            return hidden

        parts = self._parts(params)
        anchors = formulas.anchor(self.config, params["own"], parts, features, next_tokens, run)
        return (anchors if self.config.block is None else of_last(anchors))[:, 0], cache

    def propose(self, shape, params, state: HeadsState, rows: BatchView):
        """A chain or a tree; as many levels as the most demanding row asks for, none after the last
        row's budget is spent, but on a GPU all that the window has room for. A row whose newest
        feature was not seen gets no draft of heads."""
        if self.ngram is None:
            return self._propose(shape, params, state, rows), state

        def propose(others: BatchView):
            return self._propose(shape, params, state, others), state

        most = self.max_depth or self.num_nodes
        return draft_ngram_first(self.ngram, shape, rows, most, propose)

    def _propose(
        self, shape: EngineShape, params: PyTree, state: HeadsState, rows: BatchView
    ) -> Draft:
        """The draft of heads."""
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)
        can_draft = state.is_ready & (state.num_seen == rows.num_committed - 1)
        if self.tree is None:
            return self._propose_chain(shape, params, state.anchor, rows, newest, can_draft)
        tree = self.tree.within(shape.num_nodes)
        return self._propose_tree(tree, shape, params, state.anchor, rows, newest, can_draft)

    def _propose_chain(
        self,
        shape: EngineShape,
        params: PyTree,
        anchor: jax.Array,
        rows: BatchView,
        newest: jax.Array,
        can_draft: jax.Array,
    ) -> Draft:
        num_rows, num_nodes = newest.shape[0], min(shape.num_nodes, self.config.num_heads)
        wanted = jnp.where(can_draft, jnp.minimum(rows.draft_limit, num_nodes), 0)
        score = self._scorer(shape, params, anchor, num_nodes, wanted)
        token_map = params["own"].get("token_map")
        q = None
        if shape.needs_draft_probs:
            q = jnp.zeros((num_rows, shape.num_nodes, shape.vocab_size), jnp.float32)
        tokens = jnp.zeros((num_rows, shape.num_nodes), jnp.int32)

        def draw(node: int, carry):
            hidden, tokens, q = carry
            path = jnp.concatenate([newest, tokens[:, :node]], axis=1)
            hidden, logits = score(node, hidden, path, (node < wanted).astype(jnp.int32))
            drawn = draw_draft(
                without_nan(logits) if shape.needs_draft_probs else logits,
                rows,
                tokens,
                jnp.int32(node),
                vocab_size=shape.vocab_size,
                is_noise_shared=shape.is_noise_shared,
                needs_probs=shape.needs_draft_probs,
                needs_greedy_probs=shape.needs_greedy_probs,
                token_map=token_map,
            )
            if q is not None:
                q = q.at[:, node].set(drawn.distribution)
            return hidden, tokens.at[:, node].set(drawn.token), q

        carry = anchor, tokens, q
        for node in range(num_nodes):
            carry = if_any(shape, node < wanted, functools.partial(draw, node), carry)
        return Draft(
            tokens=carry[1],
            parents=chain_parents(num_rows, shape.num_nodes),
            num_valid=wanted,
            q=carry[2],
        )

    def _propose_tree(
        self,
        tree: Tree,
        shape: EngineShape,
        params: PyTree,
        anchor: jax.Array,
        rows: BatchView,
        newest: jax.Array,
        can_draft: jax.Array,
    ) -> Draft:
        wanted, num_levels = count_levels(tree, shape, rows, can_draft)
        score = self._scorer(shape, params, anchor, tree.max_depth, num_levels)
        grower = Grower(
            tree=tree,
            shape=shape,
            rows=rows,
            num_levels=num_levels,
            kernels=self._kernels,
            token_map=params["own"].get("token_map"),
        )

        def grow(level: int, carry: tuple[Growth, Expanded]) -> tuple[Growth, Expanded]:
            growth, nodes = carry
            count = tree.num_expanded_by(level)
            path, value = nodes.path[:, :count, : level + 1], nodes.value[:, :count]
            is_node = jnp.isfinite(value) & grower.is_wanted(growth, level)[:, None]
            number = 1 + jnp.arange(count, dtype=jnp.int32)[None]
            num_live = jnp.max(jnp.where(is_node, number, 0), axis=1)
            hidden, logits = score(level, nodes.hidden[:, :count], path, num_live)
            logits = without_nan(logits) if shape.needs_draft_probs else logits
            growth = grower.add_children(growth, level, logits, value)
            if level + 1 == tree.max_depth:
                return growth, nodes
            # Chosen here and not by the next level, whose gathers XLA would fuse with the choice,
            # and choose again for every element.
            growth, chosen = grower.expand(growth, level + 1)
            return growth, nodes.children(chosen, hidden, level + 1)

        carry = grower.start(), Expanded.newest(anchor, newest, tree)
        for level in range(tree.max_depth):
            is_wanted = grower.is_wanted(carry[0], level)
            carry = if_any(shape, is_wanted, functools.partial(grow, level), carry)
        return grower.draft(carry[0], wanted)[0]

    def _scorer(
        self,
        shape: EngineShape,
        params: PyTree,
        anchor: jax.Array,
        num_heads: int,
        wanted: jax.Array,
    ) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """A function of a head's index, hidden states `[B, ..., E]`, the tokens so far
        `[B, ..., index + 1]` and how many of each row's states are needed, the first `[B]` int32,
        that returns the hidden states for the next head and logits `[B, ..., V']`; what is not
        needed may be anything. V' are the tokens of the map if there is one.

        Heads that do not read tokens are the same for all nodes of a level, and their logits are
        `[B, 1, V']`: all of them are computed at once, if some row has `wanted` `[B]` any.
        """
        config, own = self.config, params["own"]

        def run(index: int, hidden: jax.Array, tokens: jax.Array, num_live: jax.Array):
            # A verifier that needs distributions may look at those of what is not needed.
            parts = self._parts(params, None if shape.needs_draft_probs else num_live)
            hidden, output = formulas.apply_head(config, own, parts, index, hidden, tokens)
            return hidden, formulas.head_logits(config, own, parts, index, output)

        if config.is_regressive:
            return run

        parts = self._parts(params)

        def run_all(_):
            no_tokens = jnp.zeros((anchor.shape[0], 1), jnp.int32)
            outputs = [
                formulas.apply_head(config, own, parts, index, anchor, no_tokens)[1]
                for index in range(num_heads)
            ]
            if config.shares_head:  # one product, which reads the head once
                return parts.head(jnp.stack(outputs, axis=1))
            made = [
                formulas.head_logits(config, own, parts, index, output)
                for index, output in enumerate(outputs)
            ]
            return jnp.stack(made, axis=1)

        size = (anchor.shape[0], num_heads, config.num_head_tokens or config.vocab_size)
        every = if_any(shape, wanted > 0, run_all, jnp.zeros(size, jnp.float32))

        def look_up(index: int, hidden: jax.Array, tokens: jax.Array, num_live: jax.Array):
            return hidden, every[:, index] if hidden.ndim == 2 else every[:, index, None]

        return look_up

    def rewind(self, shape, params, state: HeadsState, rows: BatchView, row, num_kept):
        """Forgets what was cut off. If the row's anchor goes with it, the row drafts again once a
        new feature has been read; the engine prefills the last kept token again for that.

        The anchor of an earlier feature is no longer stored. Clover-2's entry at t also depends on
        the token at t + 1, so one entry fewer is kept.
        """
        stays = num_kept - 1 if self.config.kind == "clover2" else num_kept
        is_cut = state.num_seen[row] >= num_kept
        num_seen = jnp.minimum(state.num_seen[row], stays)
        return state.replace(
            is_ready=state.is_ready.at[row].set(state.is_ready[row] & ~is_cut),
            num_taken=state.num_taken.at[row].set(jnp.minimum(state.num_taken[row], num_kept)),
            num_seen=state.num_seen.at[row].set(num_seen),
        )


def _kept(cache: kv.KVCache, features: jax.Array, window: Window) -> kv.KVCache:
    """`HeadsState.features` with those of a window, `[B, T, E]`."""
    (layer,), table = cache.layers, _table(cache, window)
    halves = jnp.pad(features, ((0, 0), (0, 0), (0, features.shape[2] % 2)))
    first, second = jnp.split(halves[:, :, None], 2, axis=-1)
    return cache.replace(layers=(kv.write(layer, table, first, second, window.slots),))


def _recalled(cache: kv.KVCache, window: Window, width: int) -> jax.Array:
    """The features `[B, T, E]` of a window out of `HeadsState.features`."""
    (layer,), table = cache.layers, _table(cache, window)
    halves = kv.read_slots(layer, table, window.positions, cache.dtype)
    return jnp.concatenate(halves, axis=-1)[:, :, 0, :width]


def _table(cache: kv.KVCache, window: Window) -> kv.Table:
    return cache.table if window.rows is None else cache.table[window.rows]


def _num_unread(state: HeadsState, rows: BatchView) -> jax.Array:
    """`[B]` int32, features that a block has not read."""
    return jnp.maximum(jnp.minimum(rows.num_committed - 1, state.num_taken) - state.num_seen, 0)


def _other_size(name: str, target: Model, what: str, mine: Any, theirs: Any) -> ModelError:
    return ModelError(
        f"The heads {name} have {what} {mine}, and the target {target.name} has {what} {theirs}; "
        "use heads that were made for this target."
    )


def if_any(
    shape: EngineShape, is_wanted: jax.Array, step: Callable[[Carry], Carry], carry: Carry
) -> Carry:
    """`step(carry)` if some row `[B]` wants it, otherwise `carry`. On a GPU the step is taken in
    any case: a conditional would wait for the host."""
    if shape.loops_run_on_host:
        return step(carry)
    return lax.cond(jnp.any(is_wanted), step, lambda carry: carry, carry)
