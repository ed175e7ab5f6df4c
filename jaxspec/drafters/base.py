"""The drafter protocol: pure functions and a state.

A drafter proposes up to N nodes per row and round. It sees the rows' committed tokens, and after
verification, what was accepted. All functions run inside the compiled loop, so they are traced
once. They are given `params` and must not close over them; `EngineShape` fixes every shape.

An engine may hold more rows than it decodes at a time. `init`, `admit` and `catch_up` are given a
`shape` whose `batch_size` counts all resident rows, and `rows` of all of them; `propose` and
`commit` those of the batch, with the state of just these. So every array of a drafter's state has
the rows as its first axis (or is a `KVCache`, whose page table has them). What all rows share is a
scalar, or is wrapped in `types.Shared`; an engine refuses other states.

To write one, subclass `DrafterBase` and define `name` and `propose`. Pass an instance to
`Engine(drafter=...)`, or name it on the command line as `--drafter package.module:factory`. The
base class has defaults for everything else, such as access to the target (`taps`, `uses_target`,
`uses_target_cache`) and drafting in its forward pass (`score`). A class that implements `Drafter`
without the base works too, and gets the same defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp

from jaxspec.models.base import Model
from jaxspec.types import BatchView, Draft, EngineShape, PyTree, RoundInfo, chain_parents


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts: the least that a class without `DrafterBase` must have.

    Attributes:
      name: for reports.
      params: pytree of arrays, passed back to every function.
      is_chain: whether every draft is a chain; then no KV has to be moved after acceptance.
      is_synthetic: whether it knows the answer (an oracle); reports must say so.
    """

    @property
    def name(self) -> str:  # noqa: D102
        ...

    @property
    def params(self) -> PyTree:  # noqa: D102
        ...

    @property
    def is_chain(self) -> bool:  # noqa: D102
        ...

    @property
    def is_synthetic(self) -> bool:  # noqa: D102
        ...

    def check(self, target: Model) -> None:
        """Raises `ModelError` if this drafter cannot draft for `target`."""
        ...

    def init(self, shape: EngineShape) -> PyTree:
        """State of an engine with no requests."""
        ...

    def admit(
        self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView, row: jax.Array
    ) -> PyTree:
        """State after a new request took row `row` (int32 scalar); nothing of it has been seen."""
        ...

    def lag(self, state: PyTree, rows: BatchView) -> jax.Array | None:
        """`[B]` int32, committed tokens before the newest that the drafter has not seen; None if it
        keeps nothing that could lag."""
        ...

    def catch_up(
        self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView, row: jax.Array
    ) -> PyTree:
        """State after reading up to `shape.prefill_chunk` unseen committed tokens of row `row`."""
        ...

    def propose(
        self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView
    ) -> tuple[Draft, PyTree]:
        """A draft of `shape.num_nodes` nodes; the round takes no more than `rows.draft_limit`."""
        ...

    def commit(
        self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView, info: RoundInfo
    ) -> PyTree:
        """State after the round; `rows` are those after it."""
        ...


class DrafterBase:
    """Base of drafters: defaults for all but `name` and `propose`.

    Attributes:
      name: for reports.
      params: the drafter's own parameters, a pytree of arrays.
      is_chain: whether every draft is a chain; then no KV has to be moved after acceptance.
      is_synthetic: whether it knows the answer (an oracle); reports must say so.
      shares_state: whether its drafts may depend on other requests, as those of a cache that
        learns.
      max_depth: of trees, the depth that no node exceeds; None for chains.
      prunes_by_token: whether a node is drafted or left out because of its own token's probability,
        as where the likeliest nodes of a larger tree are kept. Under verifiers that judge a token
        by the distribution it was drawn from that is a bias, so an engine refuses the two together.
        What the tokens *before* a node are (its ancestors, its earlier siblings) may decide.
      num_nodes: nodes of its trees; None where any number is as good. An engine drafts so many
        unless its `draft_length` says otherwise.
      taps: boundaries of the target whose residual stream it reads: boundary b is the stream after
        b layers, 0 the embeddings, `models.base.LAST` what `forward` returns. `observe` is given
        it for prompts, `commit` in `RoundInfo.features`.
      uses_target: whether its functions get `{"own": params, "target": the target's}` instead of
        its own parameters alone. Nothing is copied.
      uses_target_cache: whether `propose` is given the target's cache, as `target_cache`, and
        returns `(draft, state, cache)`. It may read what is committed, and write to slots from the
        newest token's on, of which the round reads nothing that it has not written itself. The
        cache is returned even if nothing was written, as XLA would copy one that is only read.
      score_keeps_bits: whether the hidden states and KV that its `score` returns have the bits of
        the target's forward pass, where these do not depend on the width of a window.
      variants: other ways to the same drafts, over the same state and with the same parameters, at
        another cost. Variant 0 is the drafter itself, variant i + 1 is `variants[i]`. Where
        the output does not depend on it, an engine with `draft_length="auto"` measures all of them
        and uses the fastest; others use what `choose_variant` says.
      drafts_at_once: whether a chain is drafted as a whole, so that a shorter one costs the same in
        the same window. Then an engine with `draft_length="auto"` tries only those that fill one.
      drafts_last_token: whether it may draft the last token that a row may still emit, which is the
        target's own in any case unless the verifier adds no bonus token.
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
    variants: tuple[DrafterBase, ...] = ()
    drafts_at_once: bool = False
    drafts_last_token: bool = False

    def check(self, target: Model) -> None:
        """Drafts for any target."""

    def for_target(self, target: Model) -> DrafterBase:
        """The drafter that an engine of `target` uses, after `check`; one that calls functions of
        its target returns a copy that knows it."""
        return self

    def within(self, num_nodes: int) -> DrafterBase:
        """The drafter of rounds that have room for `num_nodes` nodes and no more. It drafts the
        first nodes of what this one drafts, from the same state; where so few can be drafted at
        less cost, this is another drafter."""
        return self

    def init(self, shape: EngineShape) -> PyTree:
        """No state."""
        return ()

    def admit(self, shape, params, state, rows, row):
        """Nothing to note."""
        return state

    def lag(self, state, rows):
        """Cannot lag."""
        return None

    def catch_up(self, shape, params, state, rows, row):
        """Nothing to read."""
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
        """State after the target prefilled tokens `start` to `stop` of row `row`; only called for
        drafters with taps, also while they rest.

        Args:
          shape: of the resident rows.
          params: see `uses_target`.
          state: of the resident rows.
          rows: the resident rows.
          row: int32 scalar.
          start: int32 scalar, position of the chunk's first token.
          stop: int32 scalar, the position after its last.
          features: `[prefill_chunk, n, E]`, of the tokens from `start` on; padding from `stop` on.
        """
        return state

    def choose_variant(self, shape: EngineShape) -> int:
        """The variant that rounds of this shape use where nothing measures them; itself by
        default."""
        return 0

    def num_scratch_slots(self, shape: EngineShape) -> int:
        """Slots that the target's cache has beyond `shape.max_length`, for KV of the drafter's own:
        `propose` and `score` may store it after the round's window. None by default."""
        return 0

    def propose(
        self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView
    ) -> tuple[Draft, PyTree]:
        """A draft of `shape.num_nodes` nodes; the round takes no more than `rows.draft_limit`."""
        raise NotImplementedError(f"{type(self).__name__} has no propose")

    # None, or a method. It replaces the target's forward pass of a round, so that rows of the
    # drafter's own can ride in it:
    #     score(shape, params, state, rows, draft, tokens, window, cache)
    #         -> (hidden, features, cache, state)
    # `tokens` `[B, T]` and `window` are what the target is to score. Of these, the hidden states
    # `[B, T, E]`, the features at `taps` (or None) and the KV in `cache` must be those of the
    # target's own `forward`. `state` is what `propose` returned, and is handed on to `commit`.
    score: Callable[..., tuple[jax.Array, jax.Array | None, PyTree, PyTree]] | None = None

    def commit(self, shape, params, state, rows, info):
        """Nothing to note."""
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
        """State after row `row` was cut back to its first `num_kept` tokens.

        A session calls it before a turn, in place of `admit`: the row is to hold a prompt that
        begins with the same `num_kept` tokens. `rows` has that prompt. What is missing may lag (see
        `catch_up`), and a drafter with taps is shown the last kept token again by `observe`, for
        the token after it has changed. For a drafter that does not define this, `admit` is called.
        """
        return state


class _WithDefaults:
    """A drafter without `DrafterBase`, with its defaults."""

    def __init__(self, drafter: Drafter):
        self._drafter, self._defaults = drafter, DrafterBase()

    def for_target(self, target: Model) -> DrafterBase:
        make = getattr(self._drafter, "for_target", lambda target: self._drafter)
        return with_defaults(make(target))

    def within(self, num_nodes: int) -> DrafterBase:
        make = getattr(self._drafter, "within", lambda num_nodes: self._drafter)
        return with_defaults(make(num_nodes))

    def __getattr__(self, name: str):
        owner = self._drafter if hasattr(self._drafter, name) else self._defaults
        return getattr(owner, name)


def with_defaults(drafter: Drafter) -> DrafterBase:
    """The drafter, with `DrafterBase`'s defaults for what it lacks."""
    if isinstance(drafter, DrafterBase):
        return drafter
    return cast(DrafterBase, _WithDefaults(drafter))


def function_params(drafter: DrafterBase, params: PyTree) -> PyTree:
    """What a drafter's functions are given of a loop's `params`."""
    if drafter.uses_target:
        return {"own": params["drafter"], "target": params["target"]}
    return params["drafter"]


def draft_with(
    drafter: DrafterBase,
    shape: EngineShape,
    params: PyTree,
    state: PyTree,
    rows: BatchView,
    target_cache: PyTree,
) -> tuple[Draft, PyTree, PyTree]:
    """`drafter.propose`, given the target's cache if it uses it; draft, state and that cache.

    Args:
      params: of the loop, target's and drafter's.
    """
    own, propose = function_params(drafter, params), cast(Callable[..., Any], drafter.propose)
    if drafter.uses_target_cache:
        return propose(shape, own, state, rows, target_cache=target_cache)
    return *propose(shape, own, state, rows), target_cache


class NoDrafter(DrafterBase):
    """Drafts nothing: plain decoding."""

    name = "none"

    def propose(self, shape, params, state, rows):
        """A chain of no valid nodes."""
        draft = Draft(
            tokens=jnp.zeros((shape.batch_size, shape.num_nodes), jnp.int32),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.zeros((shape.batch_size,), jnp.int32),
        )
        return draft, state
