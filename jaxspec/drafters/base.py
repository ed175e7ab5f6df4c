"""The drafter protocol: a record of pure functions around a state of its own.

A drafter proposes up to N nodes per row and round. It sees the rows' committed tokens, and after
the verdict it is told what became of its draft. All functions run inside the compiled loop, so they
are traced once; `params` is handed in, never closed over, and every shape is fixed by
`EngineShape`.

An engine may hold more rows than it decodes at a time. `init`, `admit` and `catch_up` are given a
`shape` whose `batch_size` are all rows that are held, and `rows` of all of them; `propose` and
`commit` those in the batch, with the state of just these. So whatever a drafter keeps per row has
the rows as its first axis (or is one of our caches); everything else is shared.

To write one: a class with the attributes and methods below (a frozen dataclass will do), passed to
`Engine(drafter=...)` or named on the command line as `--drafter package.module:factory`.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
from flax import struct

from jaxspec.models.base import Model
from jaxspec.types import BatchView, Draft, PyTree, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The static shape of an engine: everything its programs are compiled for.

    Attributes:
      batch_size: B, rows of the batch.
      max_length: S, slots per row.
      verify_length: T, tokens scored per round.
      prefill_chunk: tokens of one prefill call.
      vocab_size: V of the target.
      is_noise_shared: whether a sampling drafter draws with the noise by which the target will draw
        the same position's token (coupled verification), instead of noise of its own.
      needs_draft_probs: whether drafts must come with the distribution they were drawn from,
        `Draft.q`.
      needs_greedy_probs: whether q of greedy rows is wanted too, at temperature 1, for a trace;
        otherwise nothing reads it. A drafter that leaves it zero is traced as deterministic.
    """

    batch_size: int
    max_length: int
    verify_length: int
    prefill_chunk: int
    vocab_size: int
    is_noise_shared: bool = True
    needs_draft_probs: bool = False
    needs_greedy_probs: bool = False

    @property
    def num_nodes(self) -> int:
        """N, the nodes a draft has room for."""
        return self.verify_length - 1


class RoundInfo(struct.PyTreeNode, kw_only=True):
    """What a round did, handed to `Drafter.commit`.

    Attributes:
      draft: the draft as it was scored (`num_valid` clipped to what the row still wanted).
      verdict: the verifier's.
      hidden: `[B, T, E]` the target's hidden states of the window.
      num_committed_before: `[B]` int32; `BatchView.num_committed` is the count after.
    """

    draft: Draft
    verdict: Verdict
    hidden: jax.Array
    num_committed_before: jax.Array


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
        self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView, outcome: RoundInfo
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

    def commit(self, shape, params, state, rows, outcome):
        """Nothing to note."""
        return state
