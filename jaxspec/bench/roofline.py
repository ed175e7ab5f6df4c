"""What the hardware can do at best: copy and read bandwidth, and the rate of matrix products.

The roofline of a forward pass is what it must read (weights and live KV) over the bandwidth, or
what it must compute over the rate of products, whichever takes longer. Both ceilings are measured
here, on the device that the bench runs on, in programs that do nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.analysis.cost import Pair, Pass, Timed
from jaxspec.bench.measure import Repeated, Stage
from jaxspec.kernels.base import precision_of
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.turns import time_loops
from jaxspec.types import PyTree


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

    @property
    def round_s(self) -> float:
        """Nothing: a round's roofline is that of its passes."""
        return 0.0

    def pass_s(self, work: Pass) -> float:
        """The roofline: seconds below which nothing can read and compute what the pass must."""
        return max(work.num_bytes / self.bytes_per_s, work.num_flops / self.matmul_flops_per_s)


def forward_pass(
    model: LanguageModel, *, batch: int, window: int, context: int, block: int | None = None
) -> Pass:
    """The work of one forward pass: a window of tokens per row after `context` committed ones.

    Args:
      block: slots of KV that attention reads at a time; None reads what is live and no more.
    """
    return Pass(
        config=model.config,
        batch=batch,
        window=window,
        context=context + window,
        itemsize=jnp.dtype(model.dtype).itemsize,
        block=block,
    )


def pair_of(
    models: Mapping[str, LanguageModel], devices: Mapping[str, Timed], **others: Any
) -> Pair:
    """The pair of `target` and `draft` on the device of each, or on `Ceilings`: a round then takes
    its roofline, the sum over its forward passes, which follow one another. Without a `draft`, a
    drafter that has no model, its time is not counted.

    Args:
      others: fields of the pair.
    """
    draft = models.get("draft")
    return Pair(
        target=models["target"].config,
        target_device=devices["target"],
        draft=draft and draft.config,
        draft_device=devices.get("draft", devices["target"]),
        itemsize=jnp.dtype(models["target"].dtype).itemsize,
        **others,
    )


def measure_ceilings(num_bytes: int, dtype, *, repeats: int = 5) -> Ceilings:
    """Ceilings of the default device, medians of `repeats`.

    Args:
      num_bytes: working set of the bandwidths, rounded down to whole rows.
      dtype: of the model.
    """
    dtype, width = jnp.dtype(dtype), 1024
    rows = max(num_bytes // (width * dtype.itemsize), 1)
    sizes = (512, 1024) if jax.default_backend() == "cpu" else (4096, 8192)

    def copy(_params, _fixed, array):
        return -array, ()  # read, and written back with the other sign

    def read(matrix, _fixed, vector):
        out = jnp.matmul(vector, matrix, precision=precision_of(dtype))
        return vector + jnp.resize(out[:, :1], vector.shape) * jnp.asarray(1e-6, dtype), out

    def product(right, _fixed, left):
        return jnp.matmul(left, right, precision=precision_of(dtype)), ()

    def seconds(stage: Stage, params: PyTree, moving: PyTree) -> float:
        run = Repeated(stage, params, (), moving)
        return time_loops({"it": run}, repeats).median_s("it")

    def constant(*shape: int) -> jax.Array:
        return jnp.ones(shape, dtype) / jnp.asarray(shape[0], dtype)

    num_floats = max(num_bytes // 4, 1)
    copy_s = seconds(copy, (), jnp.ones((num_floats,), jnp.float32))
    read_s = seconds(read, constant(width, rows), jnp.ones((1, width), dtype))
    rates = [2.0 * n**3 / seconds(product, constant(n, n), constant(n, n)) for n in sizes]
    return Ceilings(
        num_bytes=num_bytes,
        copy_bytes_per_s=2 * 4 * num_floats / copy_s,
        read_bytes_per_s=width * rows * dtype.itemsize / read_s,
        matmul_flops_per_s=max(rates),
        dtype=dtype.name,
    )
