"""A target's or teacher's hidden states, kept in a file so that they are computed once.

`HiddenStates` has those of the rows of training steps. The order of rows does not depend on the
size of the model or the end of the run, so runs of every size share the states of a teacher, which
would otherwise take two thirds of the training time of a small draft model.

`TextStates` has those of whole texts, whatever rows they are packed into, for runs that pass over
the texts several times.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import xxhash

from jaxspec.errors import CheckpointError
from jaxspec.runtime.directories import write_atomically
from jaxspec.training.text_rows import TextBatch
from jaxspec.training.trainer import json_object


class HiddenStates:
    """A teacher's last hidden states `[B, T, E]` of every step's rows, each computed once.

    The file only grows at its end, so it holds the steps from the first one on, and what a crash
    cut off is computed again. It takes 4 E bytes per token.

    Args:
      path: that of the file; what it depends on is stored beside it.
      shape: `[B, T, E]` of a step.
      origin: everything that decides the states, as JSON values.
      compute: computes the states of the step with a given index.

    Raises:
      CheckpointError: the file holds the states of another teacher, or of other rows.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        shape: tuple[int, int, int],
        origin: Mapping[str, Any],
        compute: Callable[[int], np.ndarray],
    ):
        self._path, self._shape, self._compute = path, shape, compute
        _check_origin(path, {"shape": list(shape), **origin}, "teacher_states")
        self._step_bytes = 4 * int(np.prod(shape))
        self._num_known = path.stat().st_size // self._step_bytes if path.exists() else 0

    def __call__(self, step: int) -> np.ndarray:
        """fp32 states of a step's rows."""
        with self._path.open("r+b" if self._path.exists() else "w+b") as file:
            while self._num_known <= step:
                file.seek(self._num_known * self._step_bytes)
                file.write(np.asarray(self._compute(self._num_known), np.float32).tobytes())
                self._num_known += 1
            file.seek(step * self._step_bytes)
            found = np.frombuffer(file.read(self._step_bytes), np.float32)
        return found.reshape(self._shape)


class TextStates:
    """A target's last hidden states of texts, each computed once: those of a text depend on nothing
    else in its row. They are bfloat16, 2 E bytes per token. Texts that are added later find those
    of the texts before them.

    Args:
      path: that of the file; what it depends on is stored beside it.
      texts: token ids of each text.
      width: E.
      target_weights: the `weights_digest` of the target.
      compute: computes the states `[B, T, E]` of a batch.

    Raises:
      CheckpointError: the file holds the states of another target.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        texts: Sequence[Sequence[int]],
        width: int,
        target_weights: str,
        compute: Callable[[TextBatch], jax.Array],
    ):
        self._starts = [0, *itertools.accumulate(map(len, texts))]
        self._compute = compute
        # A text is known by its tokens and by its place in the file.
        self._digests = [
            xxhash.xxh3_64_intdigest(np.asarray(ids, np.int32).tobytes(), seed=start)
            for ids, start in zip(texts, self._starts, strict=False)
        ]
        _check_origin(path, {"width": width, "target_weights": target_weights}, "target_states")
        known = path.with_suffix(".known")  # the digest of each text whose states were written
        for file in (path, known):
            file.touch()
        shape = (self._starts[-1], width)
        self._states = np.memmap(path, ml_dtypes.bfloat16, "r+", shape=shape)
        self._known = np.memmap(known, np.uint64, "r+", shape=(len(texts),))

    def __call__(self, rows: Sequence[Sequence[int]], batch: TextBatch) -> np.ndarray:
        """bfloat16 states `[B, T, E]` of a batch, whose `rows` are texts by index; zeros in
        padding."""
        shape = (*batch.tokens.shape, self._states.shape[1])
        if any(self._known[index] != self._digests[index] for row in rows for index in row):
            computed = np.asarray(self._compute(batch)).astype(self._states.dtype)
            for stored, (row, start) in self._places(rows):
                self._states[stored] = computed[row, start : start + stored.stop - stored.start]
            self._states.flush()
            for index in itertools.chain.from_iterable(rows):
                self._known[index] = self._digests[index]
            self._known.flush()
        found = np.zeros(shape, self._states.dtype)
        for stored, (row, start) in self._places(rows):
            found[row, start : start + stored.stop - stored.start] = self._states[stored]
        return found

    def _places(self, rows: Sequence[Sequence[int]]) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Of each text, its part of the file, and the row and position where it begins in a
        batch."""
        for row, texts in enumerate(rows):
            start = 0
            for index in texts:
                stored = slice(self._starts[index], self._starts[index + 1])
                yield stored, (row, start)
                start += stored.stop - stored.start


def _check_origin(path: pathlib.Path, origin: Mapping[str, Any], option: str) -> None:
    """Stores what a file of states depends on; raises `CheckpointError` if it holds others."""
    about = path.with_suffix(".json")
    expected = json.loads(json.dumps(origin))
    if about.is_file() and json_object(about.read_bytes()) != expected:
        raise CheckpointError(
            f"{path} holds the hidden states of another teacher or of other rows; "
            f"remove it, or name another {option}."
        )
    if not about.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        write_atomically(about, json.dumps(expected).encode())
