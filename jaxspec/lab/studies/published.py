"""EQSPEC and EXSPEC as their published code runs them (2510.22876), behaviour by behaviour.

Layout and scheduler are settings of the engine (`aligned` with `Static` or `Pool`). This module has
the other differences of their code, so that a study can switch them on and off:

- `WithoutBonus`: the target's logits after the last draft are computed and discarded, so a round
  never emits more tokens than it drafted.
- `RereadingDraftModel`: no draft KV is kept between rounds; each round reads the whole context
  again.
- `PublishedDraftModel`: the same, and every row drafts only as many tokens as the row nearest to
  its end.

None of them changes an output. Faults that change outputs there (an end-of-text token looked for in
the prompt, tokens kept after it, sorted completions) are not reproduced, nor is the second prefill
of a whole batch when one row joins.

BSP and DSD, which the paper finds broken, are included as negative controls: their errors in
positions, padding and the bonus token are faults of `jaxspec.audit.controls`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.audit.controls.faults import FAULTS
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel, DraftModelState
from jaxspec.drafters.oracle import Oracle
from jaxspec.models.base import Model
from jaxspec.models.prefill import chain_window
from jaxspec.schedulers import Pool, Static
from jaxspec.types import BatchView, Draft, DraftContext, EngineShape, PyTree, Verdict
from jaxspec.verifiers import Coupled

# What each system does wrong, by the names of the auditor's faults. DSD also pads again without
# unpadding and compares pads with pads; the two named here ruin every output already.
BROKEN: dict[str, tuple[str, ...]] = {
    "BSP": ("positions_by_buffer_index",),
    "DSD": ("bonus_from_draft", "padding_attended"),
}


@contextlib.contextmanager
def as_broken(system: str) -> Iterator[None]:
    """In this context, engines that are built and run have the faults of BSP or DSD; for any other
    system, none."""
    with contextlib.ExitStack() as stack:
        for name in BROKEN.get(system, ()):
            stack.enter_context(FAULTS[name].apply())
        yield


def eqspec(draft: Model) -> dict[str, Any]:
    """Settings of an `Engine` that runs EQSPEC as published, with this draft model.

    Example:
      >>> import jaxspec
      >>> from jaxspec.lab.studies import published
      >>> target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
      >>> engine = jaxspec.Engine(target, **published.eqspec(draft), batch_size=4)
    """
    return {
        "drafter": PublishedDraftModel(draft),
        "verifier": WithoutBonus(),
        "layout": "aligned",
        "scheduler": Static(),
    }


def exspec(draft: Model, **pool: Any) -> dict[str, Any]:
    """Settings of an `Engine` that runs EXSPEC as published; `pool` are those of `Pool`."""
    return eqspec(draft) | {"scheduler": Pool(**pool)}


@dataclasses.dataclass(frozen=True)
class WithoutBonus(Coupled):
    """Coupled verification that emits at most k tokens for k drafts: if all are accepted, the last
    one is counted as the target's own token, and no token follows it.

    So with one draft nothing is ever accepted, and acceptance is at most (k - 1) / k. Chains only.
    """

    takes_trees: bool = dataclasses.field(default=False, init=False)

    @property
    def name(self) -> str:
        """`coupled:without-bonus`."""
        return "coupled:without-bonus"

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """The verdict of `Coupled`, one token shorter after full acceptance."""
        verdict = super().verify(logits, draft, rows, prefix)
        last = jnp.maximum(draft.num_valid - 1, 0)
        is_full = (draft.num_valid > 0) & (verdict.num_accepted == draft.num_valid)
        num_accepted = jnp.where(is_full, last, verdict.num_accepted)
        depth = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
        of_last = jnp.take_along_axis(draft.tokens, last[:, None], axis=1)[:, 0]
        return Verdict(
            num_accepted=num_accepted,
            path=jnp.where(depth < num_accepted[:, None], verdict.path, -1),
            next_token=jnp.where(is_full, of_last, verdict.next_token),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class RereadingDraftModel(DraftModel):
    """A draft model that forgets everything after a round, and prefills the context in the next.

    `DraftModelState.num_positions` counts what it reads, including padding: a batch is read at the
    length of its longest row.
    """

    @property
    def name(self) -> str:
        """`rereading:draft_model:NAME`."""
        return f"rereading:{super().name}"

    def lag(self, state: DraftModelState, rows: BatchView) -> None:
        """Keeps nothing that could lag."""
        return None

    def catch_up(
        self, shape, params, state: DraftModelState, rows: BatchView, chunk_rows
    ) -> DraftModelState:
        """Nothing is read before it is needed."""
        return state

    def propose(self, shape, params, state: DraftModelState, rows: BatchView):
        """Reads all but the newest token of every row that drafts, then drafts."""
        is_drafting = rows.draft_limit > 0
        context = jnp.where(is_drafting, rows.num_committed - 1, 0)
        longest = jnp.max(context)
        tokens = jnp.minimum(rows.tokens, self.model.vocab_size - 1)

        def read(chunk, cache):
            start = jnp.broadcast_to(chunk * shape.prefill_chunk, context.shape)
            window = chain_window(start, shape.prefill_chunk, stop=context)
            window = window.replace(num_live=None)  # these systems compute their padding
            read = jnp.take_along_axis(tokens, window.positions, axis=1)
            return self.model.forward(params, read, window, cache)[1]

        num_chunks = -(-longest // shape.prefill_chunk)
        cache = lax.fori_loop(0, num_chunks, read, state.cache)
        num_prefilled = longest * jnp.sum(is_drafting, dtype=jnp.int32)
        state = state.replace(
            cache=cache,
            num_seen=jnp.where(is_drafting, rows.num_committed - 1, state.num_seen),
            num_positions=state.num_positions + num_prefilled,
        )
        return super().propose(shape, params, state, rows)


class _BatchMinimum(Drafter):
    """As the first base of a drafter, makes it draft `min(k, fewest tokens that a row may still
    emit)` for every row of a round; the engine's draft length k must fill its window.

    The last token that a row may emit is drafted too, although the target supplies it anyway,
    because the published counts of drafted tokens include it.
    """

    drafts_last_token = True

    @property
    def name(self) -> str:
        """`batch-minimum:` and the drafter's name."""
        return f"batch-minimum:{super().name}"

    def propose(self, shape: EngineShape, params: PyTree, state: PyTree, rows: BatchView):
        """A draft of one length for all rows."""
        remaining = rows.remaining
        assert remaining is not None, "rows of a decode loop say what remains"
        is_running = remaining > 0
        fewest = jnp.min(jnp.where(is_running, rows.draft_limit, shape.num_nodes))
        rows = rows.replace(draft_limit=jnp.where(is_running, fewest, 0))
        return super().propose(shape, params, state, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedDraftModel(_BatchMinimum, RereadingDraftModel):
    """The draft model of EQSPEC and EXSPEC: rereads the context, and drafts one length for all."""


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedOracle(_BatchMinimum, Oracle):
    """An oracle that drafts one length for all."""
