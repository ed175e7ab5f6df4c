"""Moves the rows of an executor with compiled programs of their own: continues them with another
prompt, copies them out of the state, and puts them back; see `decode.kept`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.decode import kept
from jaxspec.decode.kept import StoredRow
from jaxspec.decode.settings import pinned_memory
from jaxspec.engine.admission import make_admission
from jaxspec.engine.executor import Executor
from jaxspec.engine.memory import num_bytes
from jaxspec.models.width_probe import is_width_invariant
from jaxspec.requests.requests import Request
from jaxspec.types import DecodeState, PyTree

# Compiled when they are first needed, not by `Executor.warm_up`.
ROW_PROGRAMS = ("continue", "take_page", "take_rest", "put_page", "put_rest")


class RowStore:
    """Moves rows of an executor's state, with programs that it adds to the executor's.

    Args:
      executor: the executor whose rows these are.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        loop, parts = executor.loop, executor.parts

        def continue_row(params: PyTree, state: DecodeState, row: jax.Array, *given: Any):
            function = functools.partial(kept.continue_row, parts)
            return loop.on_row(function, params, state, row, *given)

        def put(function: Callable[..., DecodeState]):
            def put_on_row(state: DecodeState, row: jax.Array, *given: PyTree):
                # `on_row` passes the parameters first; these functions take none.
                return loop.on_row(lambda _, *each: function(*each), (), state, row, *given)

            return put_on_row

        home: dict[str, Any] = {"out_shardings": executor.home}
        copies: dict[str, Any] = {"out_shardings": self._home_of_copies}
        functions = (
            ("next turn", continue_row, {"donate_argnums": 1, **home}),
            ("copying of a page", functools.partial(loop.of_row, kept.take_page), copies),
            ("copying of a row", functools.partial(loop.of_row, kept.take_rest), copies),
            ("return of a page", put(kept.put_page), {"donate_argnums": 0, **home}),
            ("return of a row", put(kept.put_rest), {"donate_argnums": 0, **home}),
        )
        self._programs: dict[str, Any] = executor.programs
        for name, (what, function, options) in zip(ROW_PROGRAMS, functions, strict=True):
            self._programs[name] = executor.program(what, function, **options)

    def continue_row(
        self,
        row: int,
        request: Request,
        *,
        draft_length: int,
        num_kept: int,
        start: int,
        arrival: int = 0,
    ) -> None:
        """Puts a request into a row that holds the KV of the first `num_kept` tokens of its prompt;
        `Executor.prefill` must prefill the prompt from `start` on.

        Args:
          row: the row of an earlier request, or one filled by `put_row`.
          request: as in `Executor.admit`.
          draft_length: as in `Executor.admit`.
          num_kept: must be less than the length of the prompt.
          start: must be at most `num_kept`.
          arrival: as in `Executor.admit`.
        """
        executor = self._executor
        admission = make_admission(
            request, executor.parts, draft_length=draft_length, arrival=arrival
        )
        executor.state = self._programs["continue"](
            executor.params,
            executor.state,
            np.int32(row),
            admission,
            np.int32(num_kept),
            np.int32(start),
        )

    @property
    def _home_of_copies(self) -> Any:
        """The sharding of a row's copies: every device of a mesh has them."""
        mesh = self._executor.mesh
        if mesh is None:
            return self._executor.home
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    @functools.cached_property
    def parking_place(self) -> jax.sharding.Sharding | None:
        """Where copies of rows are kept on the host: memory that the device can copy to and from
        directly, or None for NumPy arrays. It is None on a mesh, where each device would have a
        copy, and on a CPU, whose memory is the host's."""
        home = self._home_of_copies if self._executor.mesh is None else None
        return None if home is None else pinned_memory(home)

    def park_row(self, row: int, num_slots: int) -> StoredRow:
        """A copy of a row's first slots on the host; the row stays as it is."""
        return self.take_row(row, num_slots).on_host(self.parking_place)

    def take_row(self, row: int, num_slots: int) -> StoredRow:
        """A copy of a row's first slots, on the device; the row stays as it is."""
        state, programs = self._executor.state, self._programs
        return StoredRow(
            pages=tuple(
                programs["take_page"](state, np.int32(row), np.int32(index))
                for index in range(kept.num_pages(num_slots))
            ),
            rest=programs["take_rest"](state, np.int32(row)),
        )

    def put_row(self, row: int, stored: StoredRow) -> None:
        """Copies what `take_row` returned into a row that holds no running request."""
        if self._home_of_copies is not None:  # otherwise programs would be compiled again
            parts = jax.device_put((stored.pages, stored.rest), self._home_of_copies)
            stored = StoredRow(pages=parts[0], rest=parts[1])
        state = self._executor.state
        for index, pages in enumerate(stored.pages):
            state = self._programs["put_page"](state, np.int32(row), np.int32(index), pages)
        self._executor.state = self._programs["put_rest"](state, np.int32(row), stored.rest)

    def row_bytes(self, num_slots: int) -> int:
        """The bytes of a row's pages for this many slots, for target and drafter."""
        return kept.num_pages(num_slots) * self._page_bytes

    @functools.cached_property
    def _page_bytes(self) -> int:
        return num_bytes(kept.shape_of_page(self._executor.eval_state()))

    @functools.cached_property
    def keeps_prompt_bits(self) -> bool:
        """Whether a token's KV has the same bits from a round as from a prefill chunk, wherever the
        chunk begins: on one device, in the ragged layout, with the target's own forward pass, if
        the kernels' bits were found not to depend on the width (see `models.width_probe`)."""
        executor, parts = self._executor, self._executor.parts
        shape = parts.shape
        sizes = (
            (shape.batch_size, shape.verify_length, shape.tree_depth),
            (shape.chunks_per_call, shape.prefill_chunk, 0),
        )
        is_simple = (
            executor.mesh is None and parts.layout == "ragged" and parts.drafter.score is None
        )
        return is_simple and all(
            is_width_invariant(
                executor.target, batch_size=rows, verify_length=tokens, tree_depth=depth
            )
            for rows, tokens, depth in sizes
        )
