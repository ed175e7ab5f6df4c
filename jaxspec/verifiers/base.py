"""The verifier protocol: from the target's scores of a draft to what is kept of it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax

from jaxspec.types import BatchView, Draft, DraftContext, Verdict


@runtime_checkable
class Verifier(Protocol):
    """A rule that decides which drafted tokens stay and which token follows them.

    Attributes:
      name: for reports and the command line.
      promise: what its output is, in words.
      is_lossless: whether the output follows the target's distribution.
      is_coupled: whether the output is plain decoding's, token for token.
      is_noise_shared: whether sampling drafters should draw with the target's noise.
      needs_draft_probs: whether a sampling drafter must hand over `Draft.q`.
      takes_trees: whether drafts may be trees; otherwise chains only.
    """

    @property
    def name(self) -> str:  # noqa: D102
        ...

    @property
    def promise(self) -> str:  # noqa: D102
        ...

    @property
    def is_lossless(self) -> bool:  # noqa: D102
        ...

    @property
    def is_coupled(self) -> bool:  # noqa: D102
        ...

    @property
    def is_noise_shared(self) -> bool:  # noqa: D102
        ...

    @property
    def needs_draft_probs(self) -> bool:  # noqa: D102
        ...

    @property
    def takes_trees(self) -> bool:  # noqa: D102
        ...

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """The verdict on a draft.

        Args:
          logits: `[B, N + 1, V]` fp32, the target's scores after the newest committed token (index
            0) and after each node.
          draft: of `rows.draft_limit` nodes at most.
          rows: before the round.
          prefix: what precedes each of the `N + 1` tokens that could be drawn.
        """
        ...
