"""What the hardware can do at best: copy and read bandwidth, and the rate of matrix products.

The floor of a round is what its forward passes must read (weights and live KV) over the bandwidth,
or what they must compute over the rate of products, whichever is larger. Both ceilings are measured
here, on the device that the bench runs on, in programs that do nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.base import precision_of

TIMED_S = 0.05  # what one timed call should take at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured ceilings of one device.

    Attributes:
      num_bytes: working set of the two bandwidths. One that fits a cache is as fast as the cache,
        so it should be that of the model it is compared with.
      copy_bytes_per_s: bytes read and bytes written by a copy, together, over its seconds.
      read_bytes_per_s: bytes read by a product of a matrix and a vector over its seconds: what
        decoding one token does with weights.
      matmul_flops_per_s: of square products in `dtype`, two per multiply-add.
      dtype: of the products and of the matrix that is read.
    """

    num_bytes: int
    copy_bytes_per_s: float
    read_bytes_per_s: float
    matmul_flops_per_s: float
    dtype: str

    @property
    def bytes_per_s(self) -> float:
        """The larger of the two bandwidths: no program here read or wrote faster."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)

    def floor_s(self, num_bytes: float, num_flops: float) -> float:
        """Seconds below which nothing can read so much and compute so much."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.matmul_flops_per_s)


def measure_ceilings(num_bytes: int, dtype, *, repeats: int = 5) -> Ceilings:
    """Ceilings of the default device, medians of `repeats`.

    Args:
      num_bytes: working set of the bandwidths, rounded down to whole rows.
      dtype: of the model.
    """
    dtype = jnp.dtype(dtype)
    sizes = (512, 1024) if jax.default_backend() == "cpu" else (4096, 8192)
    return Ceilings(
        num_bytes=num_bytes,
        copy_bytes_per_s=_copy_bandwidth(num_bytes, repeats),
        read_bytes_per_s=_read_bandwidth(num_bytes, dtype, repeats),
        matmul_flops_per_s=max(_matmul_rate(size, dtype, repeats) for size in sizes),
        dtype=dtype.name,
    )


def _copy_bandwidth(num_bytes: int, repeats: int) -> float:
    """Every number of the working set is read and written back with the other sign."""
    size = max(num_bytes // 4, 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def copies(array, num_times):
        return lax.fori_loop(0, num_times, lambda _, array: -array, array)

    array = jnp.ones((size,), jnp.float32)

    def run(num_times: int) -> None:
        nonlocal array
        array = jax.block_until_ready(copies(array, num_times))

    return 2 * 4 * size / seconds_per_time(run, repeats)


def _read_bandwidth(num_bytes: int, dtype, repeats: int) -> float:
    """A matrix times a vector, over and over, on a matrix of the whole working set."""
    width = 1024
    rows = max(num_bytes // (width * dtype.itemsize), 1)
    matrix = jnp.ones((width, rows), dtype) / jnp.asarray(width, dtype)

    @jax.jit
    def products(matrix, vector, num_times):
        def body(_, carry):
            vector, _ = carry
            out = jnp.matmul(vector, matrix, precision=precision_of(dtype))
            first = jnp.resize(out[:, :1], vector.shape)
            return vector + first * jnp.asarray(1e-6, dtype), out

        out = jnp.zeros((1, rows), dtype)
        return lax.fori_loop(0, num_times, body, (vector, out))

    vector = jnp.ones((1, width), dtype)

    def run(num_times: int) -> None:
        jax.block_until_ready(products(matrix, vector, num_times))

    return width * rows * dtype.itemsize / seconds_per_time(run, repeats)


def _matmul_rate(size: int, dtype, repeats: int) -> float:
    matrix = jnp.ones((size, size), dtype) / jnp.asarray(size, dtype)

    @jax.jit
    def products(left, right, num_times):
        def body(_, left):
            return jnp.matmul(left, right, precision=precision_of(dtype))

        return lax.fori_loop(0, num_times, body, left)

    def run(num_times: int) -> None:
        jax.block_until_ready(products(matrix, matrix, num_times))

    return 2.0 * size**3 / seconds_per_time(run, repeats)


def seconds_per_time(run: Callable[[int], None], repeats: int) -> float:
    """Median seconds of one of the times that `run(num_times)` does something, compiled first."""
    return statistics.median(time_in_turns([run], repeats)[0])


def time_in_turns(runs: Sequence[Callable[[int], None]], repeats: int) -> list[list[float]]:
    """Seconds per time of each of `runs`, `repeats` of them, taken in turns.

    Taking turns spreads a slow moment of the machine over all of them. Each timed call does its
    thing so often that it takes some `TIMED_S`.
    """
    num_times = [_num_times(run) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for index, run in enumerate(runs):
            seconds[index].append(_timed(run, num_times[index]) / num_times[index])
    return seconds


def _num_times(run: Callable[[int], None]) -> int:
    run(1)  # compiles
    one_s = min(_timed(run, 1), _timed(run, 2) / 2)
    return max(2, min(4096, round(TIMED_S / max(one_s, 1e-7))))


def _timed(run: Callable[[int], None], num_times: int) -> float:
    started_s = time.perf_counter()
    run(num_times)
    return time.perf_counter() - started_s
