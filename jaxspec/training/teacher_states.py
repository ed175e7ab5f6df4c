"""A teacher's hidden states for the rows of training steps, kept in a file.

The order of rows does not depend on the size of the model or the end of the run, so runs of every
size share the states of a teacher, which would otherwise take two thirds of the training time of a
small draft model.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.errors import CheckpointError
from jaxspec.runtime.directories import write_atomically
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
        about = path.with_suffix(".json")
        expected = json.loads(json.dumps({"shape": list(shape), **origin}))
        if about.is_file() and json_object(about.read_bytes()) != expected:
            raise CheckpointError(
                f"{path} holds the hidden states of another teacher or of other rows; remove it, "
                "or name another teacher_states."
            )
        if not about.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            write_atomically(about, json.dumps(expected).encode())
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
