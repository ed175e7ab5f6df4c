"""Passes of a model over texts that it wrote, with its own kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax
import numpy as np

from jaxspec.models.base import LanguageModel
from jaxspec.models.prefill import CHUNK, chain_window, prefill_chunks
from jaxspec.runtime.compilation import Program
from jaxspec.types import PyTree, Window

TokenIds: TypeAlias = Sequence[int] | np.ndarray

_NUM_CHUNKS = 16  # of a call: 2,048 tokens
_MAX_SLOTS = 1 << 16  # of KV, unless one text needs more


class TextPasses:
    """Passes over texts, as many at a time as fill a call.

    Args:
      model: packed.
      function: of parameters, the last hidden states `[R, CHUNK, E]` of a call's chunks and their
        window; returns arrays `[R, CHUNK, ...]`. It is compiled.
      longest: tokens of the longest text.
      name: what is computed, for messages about compilation.
    """

    def __init__(
        self,
        model: LanguageModel,
        function: Callable[[PyTree, jax.Array, Window], PyTree],
        *,
        longest: int,
        name: str,
    ):
        def call(params, tokens, rows, starts, stops):
            cache = model.init_cache(*tokens.shape)
            place = {"rows": rows, "starts": starts, "stops": stops}
            hidden = prefill_chunks(model, params, cache, tokens, **place, chunk=CHUNK)[2]
            return function(params, hidden, chain_window(starts, CHUNK, stop=stops))

        self._params = model.params
        self._most = -(-longest // CHUNK)  # chunks of a text
        self._num_chunks = max(_NUM_CHUNKS, self._most)
        self._num_rows = max(1, min(self._num_chunks, _MAX_SLOTS // (self._most * CHUNK)))
        self._call = Program(jax.jit(call), name)

    def __call__(self, texts: Sequence[TokenIds]) -> Iterator[PyTree]:
        """The arrays `[T, ...]` of each text's token ids, in order."""
        first = 0
        while first < len(texts):
            # The last row stays empty, for chunks that are not needed.
            tokens = np.zeros((self._num_rows + 1, self._most * CHUNK), np.int32)
            chunks: list[tuple[int, int, int]] = []  # row, start and stop
            places = []  # of each text's chunks
            for row, text in enumerate(texts[first : first + self._num_rows]):
                starts = range(0, len(text), CHUNK)
                if len(chunks) + len(starts) > self._num_chunks:
                    break
                tokens[row, : len(text)] = text
                places.append(range(len(chunks), len(chunks) + len(starts)))
                chunks += [(row, start, min(start + CHUNK, len(text))) for start in starts]
            padding = [(self._num_rows, 0, 0)] * (self._num_chunks - len(chunks))
            rows, starts, stops = np.array([*chunks, *padding], np.int32).T
            made = jax.device_get(self._call(self._params, tokens, rows, starts, stops))
            lengths = (stops - starts).tolist()
            for place in places:
                yield jax.tree.map(functools.partial(_of_text, place=place, lengths=lengths), made)
            first += len(places)


def _of_text(array: np.ndarray, place: range, lengths: Sequence[int]) -> np.ndarray:
    """What a call computed for a text, of an array of all its chunks."""
    return np.concatenate([array[chunk, : lengths[chunk]] for chunk in place])
