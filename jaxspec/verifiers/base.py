"""The verifier protocol: from the target's logits at each node of a draft to the part of it that is
kept."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax

from jaxspec.types import BatchView, Draft, DraftContext, Verdict


@runtime_checkable
class Verifier(Protocol):
    """A rule that decides which drafted tokens are kept and which token follows them.

    Attributes:
      name: for reports and the command line.
      promise: what it guarantees about the output, in words.
      is_lossless: whether the output follows the target's distribution.
      is_coupled: whether the output equals that of plain decoding, token for token.
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
          logits: `[B, N + 1, V]` fp32, the target's logits after the newest committed token (index
            0) and after each node.
          draft: it has at most `rows.draft_limit` valid nodes.
          rows: the batch before the round.
          prefix: what precedes each of the `N + 1` tokens that could be drawn.
        """
        ...
