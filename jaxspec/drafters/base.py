"""What a drafter is: pure functions and a state.

A drafter proposes up to N nodes per row and round. It sees the rows' committed tokens and, after
verification, what was accepted. All functions run inside the compiled loop, so they are traced
once. They receive `params` as an argument and must not close over them; `EngineShape` fixes every
shape.

An engine may hold more rows than it decodes at a time. `init`, `admit` and `catch_up` get a `shape`
whose `batch_size` counts all resident rows, and `rows` of all of them; `propose` and `commit` get
the rows of the batch only, with their part of the state. So every array of a drafter's state has
the rows as its first axis (or is a `KVCache`, whose page table does). What all rows share is a
scalar, or is wrapped in `types.Shared`; an engine refuses other states.

To write one, subclass `Drafter` and define `name` and `propose`. Pass an instance to
`Engine(drafter=...)`, or name it on the command line as `--drafter package.module:factory`. The
base class has defaults for everything else, such as access to the target (`taps`, `uses_target`,
`uses_target_cache`) and drafting in its forward pass (`score`). A drafter with weights of its own
subclasses `TrainedDrafter`, which can be saved and loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from jaxspec.errors import ModelError
from jaxspec.kernels.base import unpacked
from jaxspec.models.base import Model
from jaxspec.models.decoder import is_shape
from jaxspec.runtime.kinds import are_arrays, first_mismatch, kinds_of
from jaxspec.types import BatchView, Draft, EngineShape, PyTree, RoundInfo, chain_parents


class Drafter:
    """Base class of drafters, with defaults for everything but `name` and `propose`.

    Attributes:
      name: for reports.
      params: the drafter's own parameters, a pytree of arrays.
      is_chain: whether every draft is a chain; then no KV has to be moved after acceptance.
      is_synthetic: whether it knows the answer (an oracle); reports must say so.
      shares_state: whether its drafts may depend on other requests, as with a cache that learns
        from them.
      max_depth: for trees, the greatest depth of a node; None for chains.
      prunes_by_token: whether a node may be left out because of its own token's probability, as
        when only the likeliest nodes of a larger tree are kept. This would bias verifiers that
        judge a token by the distribution it was drawn from, so an engine refuses the combination.
        The choice may depend on the tokens *before* a node (its ancestors and earlier siblings).
      num_nodes: the most nodes that it drafts, such as those of its trees; an engine drafts so many
        by default, and refuses a greater `draft_length` if it is given no `verify_length`. None
        where there is no limit.
      taps: boundaries of the target at which it reads the residual stream: boundary b is the stream
        after b layers, 0 the embeddings, `models.base.LAST` what `forward` returns. `observe` gets
        these features for prompts, `commit` gets them in `RoundInfo.features`.
      uses_target: whether its functions get `{"own": params, "target": the target's}` instead of
        just its own parameters. Nothing is copied.
      uses_target_cache: whether `propose` gets the target's cache, as `target_cache`, and returns
        `(draft, state, cache)`. It may read committed slots, and write to the newest token's slot
        and those after it: the round reads nothing there before it has written it itself. The cache
        must be returned even if nothing was written, because XLA would copy one that is only read.
      score_keeps_bits: whether the hidden states and KV that its `score` returns have the bits of
        the target's forward pass, where these do not depend on the width of a window.
      variants: other ways to draft, over the same state and with the same parameters, at a
        different cost. Variant 0 is the drafter itself, variant i + 1 is `variants[i]`. Where the
        output does not depend on the choice, an engine with `draft_length="auto"` measures all of
        them and uses the fastest; other engines use the one that `choose_variant` returns.
      variants_draft_alike: whether all of them draft the same tokens, so that they differ in cost
        only. Otherwise `auto` learns the acceptance of each.
      drafts_at_once: whether a chain is drafted as a whole, so that a shorter one costs the same in
        the same window. An engine with `draft_length="auto"` then tries only lengths that fill a
        window.
      drafts_last_token: whether it may draft the last token that a row may still emit. The target
        supplies that token anyway, unless the verifier adds no bonus token.
    """

    name: str
    params: PyTree = ()
    is_chain: bool = True
    is_synthetic: bool = False
    shares_state: bool = False
    max_depth: int | None = None
    prunes_by_token: bool = False
    num_nodes: int | None = None
    taps: tuple[int, ...] = ()
    uses_target: bool = False
    uses_target_cache: bool = False
    score_keeps_bits: bool = False
    variants: tuple[Drafter, ...] = ()
    variants_draft_alike: bool = True
    drafts_at_once: bool = False
    drafts_last_token: bool = False

    def check(self, target: Model) -> None:
        """Raises `ModelError` if this drafter cannot draft for `target`; by default it drafts for
        any."""

    def for_target(self, target: Model) -> Drafter:
        """The drafter that an engine of `target` uses, after `check`; a drafter that calls
        functions of its target returns a copy that holds the target."""
        return self

    def derive_params(self, params: PyTree, target_params: PyTree) -> PyTree:
        """The parameters of a drafter that `for_target` returned, from weights of its own: with
        what it copies from the target's. An engine calls it when weights are replaced; by default
        nothing is copied."""
        return params

    def within(self, num_nodes: int) -> Drafter:
        """The drafter for rounds that have room for only `num_nodes` nodes. It drafts the first
        nodes that this one would draft, from the same state; it is a different drafter where fewer
        nodes can be drafted at less cost."""
        return self

    def init(self, shape: EngineShape) -> PyTree:
        """The state for an engine with no requests; by default there is none."""
        return ()

    def admit(self, shape, params, state, rows, row):
        """The state after a new request took row `row` (int32 scalar), of whose tokens the drafter
        has seen none; by default as it is."""
        return state

    def lag(self, state, rows) -> jax.Array | None:
        """`[B]` int32, how many committed tokens before the newest one the drafter has not seen;
        None, the default, if it keeps no state that could lag."""
        return None

    def catch_up(self, shape, params, state, rows, chunk_rows):
        """The state after reading some chunks, each of up to `shape.prefill_chunk` unseen committed
        tokens of one row; by default as it is.

        `chunk_rows`, `[R]` int32, has the row of each chunk; a row's chunks follow each other. -1
        where there are fewer chunks; these come last. See `models.prefill.next_starts`.
        """
        return state

    def observe(
        self,
        shape: EngineShape,
        params: PyTree,
        state: PyTree,
        rows: BatchView,
        row: jax.Array,
        start: jax.Array,
        stop: jax.Array,
        features: jax.Array,
    ) -> PyTree:
        """The state after the target prefilled tokens `start` to `stop` of row `row`. Only called
        for drafters with taps, even while drafting is switched off.

        Args:
          shape: the engine's, with all resident rows as its batch.
          params: see `uses_target`.
          state: the state of all resident rows.
          rows: all resident rows.
          row: int32 scalar; B, whose updates JAX drops, where a call has fewer chunks.
          start: int32 scalar, position of the chunk's first token.
          stop: int32 scalar, the position after its last; `start` if there is no chunk.
          features: `[prefill_chunk, n, E]`, those of the tokens from `start` on; padding from
            `stop` on.
        """
        return state

    def choose_variant(self, shape: EngineShape) -> int:
        """The variant that rounds of this shape use unless they are measured; by default 0, the
        drafter itself."""
        return 0

    def num_scratch_slots(self, shape: EngineShape) -> int:
        """Extra slots of the target's cache beyond `shape.max_length`, for the drafter's own KV,
        which `propose` and `score` may store after the round's window. 0 by default."""
        return 0

    def propose(
        self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView
    ) -> tuple[Draft, PyTree]:
        """A draft of `shape.num_nodes` nodes; the round takes no more than `rows.draft_limit`."""
        raise NotImplementedError(f"{type(self).__name__} has no propose")

    def with_fields(self, **changes: Any) -> Self:
        """A copy with some attributes changed, which are not checked again."""
        made = copy.copy(self)
        made._set(**changes)
        return made

    def _set(self, **fields: Any) -> None:
        """Sets attributes of a frozen dataclass."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    # None, or a method that replaces the target's forward pass in a round, so that the drafter can
    # compute its own entries in the same pass:
    #     score(shape, params, state, rows, draft, tokens, window, cache)
    #         -> (hidden, features, cache, state)
    # `tokens` `[B, T]` and `window` are what the target is to score. For these tokens, the hidden
    # states `[B, T, E]`, the features at `taps` (or None) and the KV in `cache` must be those of
    # the target's own `forward`. `state` is what `propose` returned, and is passed on to `commit`.
    score: Callable[..., tuple[jax.Array, jax.Array | None, PyTree, PyTree]] | None = None

    def commit(self, shape, params, state, rows: BatchView, info: RoundInfo):
        """The state after the round, where `rows` shows the batch after it; by default as it is."""
        return state

    def rewind(
        self,
        shape: EngineShape,
        params: PyTree,
        state: PyTree,
        rows: BatchView,
        row: jax.Array,
        num_kept: jax.Array,
    ) -> PyTree:
        """The state after row `row` was cut back to its first `num_kept` tokens.

        A session calls it before a turn, instead of `admit`: the row will hold a prompt that begins
        with the same `num_kept` tokens. `rows` has that prompt. Missing state may lag (see
        `catch_up`), and `observe` shows a drafter with taps the last kept token again, because the
        token after it has changed. By default the drafter starts from scratch, as with a new
        request.
        """
        return self.admit(shape, params, state, rows, row)


class TrainedDrafter(Drafter):
    """Base class of drafters with weights of their own, made for one target.

    `save_drafter` writes them to a directory, from which `load_drafter` makes them again with
    `type(drafter)(config, params, name=..., **settings)`. Settings are the other keyword arguments
    of a class; they are given anew each time.

    Attributes:
      kind: its name in `load.drafters.KINDS`, and in saved directories.
      config_type: the dataclass of `config`.
      config: the architecture: numbers, strings, tuples, and dataclasses of these.
      params: the weights, with the shapes of `param_shapes`.
    """

    kind: ClassVar[str]
    config_type: ClassVar[type]
    config: Any

    @staticmethod
    def param_shapes(config: Any) -> PyTree:
        """The parameters of this architecture: dicts and tuples with a shape at each leaf."""
        raise NotImplementedError

    @staticmethod
    def param_dtype(path: tuple[str | int, ...], dtype: jnp.dtype) -> jnp.dtype:
        """The dtype of a parameter of weights that are loaded in `dtype`."""
        return dtype

    @staticmethod
    def fit(config: Any, target: Model, name: str) -> jnp.dtype:
        """The dtype that weights for this target have; raises `ModelError` if weights of this
        architecture were not made for it."""
        dtypes = (leaf.dtype for leaf in jax.tree.leaves(target.params))
        floats = (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
        return next(floats, jnp.dtype(jnp.float32))

    def check(self, target: Model) -> None:
        """Raises `ModelError` if these weights were not made for this target; see `fit`."""
        self.fit(self.config, target, self.name)

    @classmethod
    def check_params(cls, config: Any, params: PyTree, name: str) -> None:
        """Raises `ModelError` unless `params` have the shapes that `config` asks for, and the
        weights one floating dtype."""
        weights = f"The weights {name}" if name else f"The {cls.kind} weights"
        if not are_arrays(params):
            raise ModelError(
                f"{weights} were given params that are not a pytree of arrays; give them the "
                "parameters of their config."
            )
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
        floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        dtype = min(floats, key=str, default=jnp.dtype(jnp.float32))

        def expected(path: tuple[Any, ...], shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            names = tuple(key.key if isinstance(key, DictKey) else key.idx for key in path)
            return jax.ShapeDtypeStruct(shape, cls.param_dtype(names, dtype))

        like = jax.tree_util.tree_map_with_path(
            expected, cls.param_shapes(config), is_leaf=is_shape
        )
        mismatch = first_mismatch(kinds_of(jax.eval_shape(unpacked, params)), kinds_of(like))
        if mismatch is not None:
            path, found, wanted = mismatch
            raise ModelError(
                f"{weights} have {found} at params{path}, where their config asks for {wanted}; "
                "give them the parameters of this config, all in one dtype."
            )

    @staticmethod
    def check_settings(**settings: Any) -> None:
        """Raises `SettingError` for settings that are wrong for any weights, before a target is
        loaded."""


def function_params(drafter: Drafter, params: PyTree) -> PyTree:
    """The part of a loop's `params` that a drafter's functions get."""
    if drafter.uses_target:
        return {"own": params["drafter"], "target": params["target"]}
    return params["drafter"]


def draft_with(
    drafter: Drafter,
    shape: EngineShape,
    params: PyTree,
    state: PyTree,
    rows: BatchView,
    target_cache: PyTree,
) -> tuple[Draft, PyTree, PyTree]:
    """Calls `drafter.propose`, with the target's cache if it uses it; returns draft, state and
    cache.

    Args:
      params: those of the loop, the target's and the drafter's.
    """
    own, propose = function_params(drafter, params), cast(Callable[..., Any], drafter.propose)
    if drafter.uses_target_cache:
        return propose(shape, own, state, rows, target_cache=target_cache)
    return *propose(shape, own, state, rows), target_cache


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding."""

    name = "none"

    def propose(self, shape, params, state, rows):
        """A chain without valid nodes."""
        draft = Draft(
            tokens=jnp.zeros((shape.batch_size, shape.num_nodes), jnp.int32),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.zeros((shape.batch_size,), jnp.int32),
        )
        return draft, state
