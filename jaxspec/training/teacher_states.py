"""A target's or teacher's hidden states, kept in a file so that they are computed once.

`HiddenStates` has those of the rows of training steps. The order of rows does not depend on the
size of the model or the end of the run, so runs of every size share the states of a teacher, which
would otherwise take two thirds of the training time of a small draft model.

`TextStates` has those of whole texts, for runs that pass over the texts several times.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
      CheckpointError: the file holds the states of another teacher, or of other rows, or something
        else.
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
        about, origin = path.with_suffix(".json"), {"shape": list(shape), **origin}
        check_origin(about, path, origin, whose="another teacher or of other rows")
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
    """A target's hidden states of texts after one of its layers, in a directory: bfloat16, 2 E
    bytes per token.

    A text is known by its tokens, and its states depend on nothing else in its row, so each is
    computed once, whatever rows it is packed into, and by whatever run. States are only appended,
    and the index names a text after its states were written; what a crash cut off is overwritten,
    and texts whose states are no longer in the file are computed again.

    Args:
      directory: of the files, which one process at a time may use.
      width: E.
      num_layers: the number of layers after which they are taken.
      target_weights: the `weights_digest` of the target.
      dtype: the target's, in which they are computed.
      compute: computes the states `[T, E]` of texts, given by their tokens, in order.

    Raises:
      CheckpointError: the directory holds the states of another target or layer, or other files.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        width: int,
        num_layers: int,
        target_weights: str,
        dtype: str,
        compute: Callable[[Sequence[np.ndarray]], Iterable[np.ndarray]],
    ):
        self._data, self._index = directory / "states.bf16", directory / "index.txt"
        self._width, self._compute = width, compute
        origin = {
            "width": width,
            "num_layers": num_layers,
            "target_weights": target_weights,
            "dtype": dtype,
        }
        whose = "another target, or of another layer or dtype"
        check_origin(directory / "about.json", self._data, origin, whose=whose)
        self._starts: dict[str, int] = {}
        self._num_tokens = 0
        if self._index.is_file():
            written = self._index.read_text()
            # A crash cut off the last line, or somebody removed or cut off the data.
            num_stored = self._data.stat().st_size // (2 * width) if self._data.exists() else 0
            lines = written[: written.rfind("\n") + 1].splitlines(keepends=True)
            kept = []
            for line in lines:
                digest, length = line.split()
                if self._num_tokens + int(length) > num_stored:
                    break
                self._note(digest, length)
                kept.append(line)
            if (whole := "".join(kept)) != written:
                write_atomically(self._index, whole.encode())

    def __call__(self, batch: TextBatch) -> np.ndarray:
        """bfloat16 states `[B, T, E]` of a batch; zeros in padding."""
        texts, tokens = list(_texts_of(batch)), np.asarray(batch.tokens)
        if unknown := {
            digest: tokens[row, part] for digest, row, part in texts if digest not in self._starts
        }:
            self._add(list(unknown), self._compute(list(unknown.values())))
        stored = np.memmap(
            self._data, ml_dtypes.bfloat16, "r", shape=(self._num_tokens, self._width)
        )
        found = np.zeros((*batch.tokens.shape, self._width), stored.dtype)
        for digest, row, part in texts:
            start = self._starts[digest]
            found[row, part] = stored[start : start + part.stop - part.start]
        return found

    def _add(self, digests: Sequence[str], computed: Iterable[np.ndarray]) -> None:
        """Appends the states of texts that are not known."""
        self._data.touch()
        with self._data.open("r+b") as data, self._index.open("a") as index:
            data.seek(2 * self._width * self._num_tokens)
            added = []
            for digest, states in zip(digests, computed, strict=True):
                data.write(states.astype(ml_dtypes.bfloat16).tobytes())
                self._note(digest, len(states))
                added.append(f"{digest} {len(states)}\n")
            data.flush()
            index.writelines(added)

    def _note(self, digest: str, length: int | str) -> None:
        self._starts[digest] = self._num_tokens
        self._num_tokens += int(length)


def _texts_of(batch: TextBatch) -> Iterator[tuple[str, int, slice]]:
    """The digest, the row and the place in it of each text of a batch."""
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segments)
    for row, of_row in enumerate(segments):
        for segment in range(of_row.max() + 1):
            where = np.flatnonzero(of_row == segment)
            part = slice(int(where[0]), int(where[-1]) + 1)
            yield xxhash.xxh3_128_hexdigest(tokens[row, part].tobytes()), row, part


def check_origin(
    about: pathlib.Path,
    data: pathlib.Path,
    origin: Mapping[str, Any],
    *,
    whose: str,
    what: str = "the hidden states",
) -> None:
    """Writes to `about` what the contents of `data` depend on.

    Raises:
      CheckpointError: they are those of others, or nothing says whose they are.
    """
    expected = json.loads(json.dumps(origin))
    if data.exists() and not about.is_file():
        raise CheckpointError(
            f"{data} exists, and no {about.name} that says what it holds; name another place."
        )
    if data.exists() and json_object(about.read_bytes()) != expected:
        raise CheckpointError(f"{data} holds {what} of {whose}; remove it, or name another place.")
    about.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(about, json.dumps(expected).encode())
