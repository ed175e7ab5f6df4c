"""The drafter protocol: a record of pure functions around a state of its own.

A drafter proposes up to N nodes per row and round. It sees the rows' committed tokens, and after
the verdict it learns what became of its draft. All functions run inside the compiled loop, so they
are traced once; `params` is handed in, never closed over, and every shape is fixed by
`EngineShape`.

An engine may hold more rows than it decodes at a time. `init`, `admit` and `catch_up` are given a
`shape` whose `batch_size` counts all resident rows, and `rows` of all of them; `propose` and
`commit` those of the batch, with the state of just these. So every array of a drafter's state has
the rows as its first axis (or is a `KVCache`, whose page table has them). What all rows share is a
scalar, or is wrapped in `types.Shared`; an engine refuses a state that breaks this rule.

To write one: a class with the attributes and methods below (a frozen dataclass will do), passed to
`Engine(drafter=...)` or named on the command line as `--drafter package.module:factory`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxspec.models.base import Model
from jaxspec.types import BatchView, Draft, EngineShape, PyTree, RoundInfo, chain_parents


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts.

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
        """A draft of `shape.num_nodes` nodes; at most `rows.draft_limit` of them valid."""
        ...

    def commit(
        self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView, info: RoundInfo
    ) -> PyTree:
        """State after the round; `rows` are those after it."""
        ...


class StatelessDrafter:
    """Base of drafters that keep nothing between rounds: only `propose` is left to write."""

    params: PyTree = ()
    is_chain = True
    is_synthetic = False

    def check(self, target: Model) -> None:
        """Drafts for any target."""

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

    def commit(self, shape, params, state, rows, info):
        """Nothing to note."""
        return state


class NoDrafter(StatelessDrafter):
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
