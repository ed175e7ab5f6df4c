"""Streams parameters from mapped HF tensors into an Orbax checkpoint.

A parameter that is one tensor in the checkpoint's dtype goes to Orbax as the mapped view it is.
One that is assembled (q, k and v in one, transposed) is laid into an array of our own, or, if it
is large, into a scratch file that is mapped: so the process's own memory holds one batch of
parameters at most.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxspec.checkpoint.format import LeafPath, leaf_shapes, write_params
from jaxspec.models.config import ModelConfig

from .hf_reader import Tensor
from .mapping import Leaf

_SCRATCH_FROM_BYTES = 64 * 2**20
_COPY_ROWS = 512  # rows of a tensor that are transposed at once: a third of the time of all at once


def stream_params(
    directory: Path,
    config: ModelConfig,
    leaves: list[Leaf],
    tensors: dict[str, Tensor],
    *,
    dtype: np.dtype,
    advance: Callable[[int], None],
) -> None:
    """Writes `directory / "params"` in `dtype`, by the family's table, which must make every
    parameter of `config` once; `advance` is called with the bytes of each when it is handed over.
    """
    shapes = leaf_shapes(config)
    if {leaf.path for leaf in leaves} != set(shapes) or len(leaves) != len(shapes):
        raise AssertionError(f"the tensor table of {config.family} does not match param_shapes")

    def made() -> Iterator[tuple[LeafPath, np.ndarray]]:
        for leaf in leaves:
            parameter = assemble(leaf, shapes[leaf.path], tensors, dtype, directory)
            advance(parameter.nbytes)
            yield leaf.path, parameter
            del parameter

    write_params(directory, made())


def assemble(
    leaf: Leaf,
    shape: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    dtype: np.dtype,
    scratch: Path | None = None,
) -> np.ndarray:
    """A parameter of `shape`, in `dtype`: a tensor's mapped view where that is all it is, else an
    array that its pieces are copied into, on a file below `scratch` if it is large."""
    sources = [tensors[name].load() for name in leaf.sources]
    if leaf.pieces is None and sources[0].dtype == dtype:
        assert sources[0].shape == shape, leaf.path
        return sources[0]
    parameter = _empty(shape, dtype, scratch)
    pieces = [(..., sources[0])] if leaf.pieces is None else leaf.pieces(*sources)
    for index, piece in pieces:
        _copy(parameter[index], piece)
    return parameter


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, rounded to the target's dtype; in blocks, for the caches' sake."""
    if target.ndim < 2:
        target[...] = source
        return
    longest = int(np.argmax(source.strides))
    target, source = np.moveaxis(target, longest, 0), np.moveaxis(source, longest, 0)
    for start in range(0, len(source), _COPY_ROWS):
        target[start : start + _COPY_ROWS] = source[start : start + _COPY_ROWS]


def _empty(shape: tuple[int, ...], dtype: np.dtype, scratch: Path | None) -> np.ndarray:
    """An array to fill; a large one is mapped from a nameless file below `scratch`."""
    array_bytes = int(np.prod(shape)) * dtype.itemsize
    if scratch is None or array_bytes < _SCRATCH_FROM_BYTES:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(dir=scratch) as file:
        # Reserved now: a mapped write to a full disk would be a signal, not an error.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, array_bytes)
        else:
            for _ in range(0, array_bytes, 2**24):
                file.write(bytes(2**24))
            file.flush()
        return np.memmap(file, mode="r+", dtype=dtype, shape=shape)
