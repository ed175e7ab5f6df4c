"""The limits of the hardware: read bandwidth, and the rate of matrix products.

The roofline of a forward pass is the longer of two times: the bytes that it must read (weights and
live KV) over the bandwidth, and the FLOPs that it must compute over the rate of products. Both
ceilings are measured here, on the device that the bench runs on, in programs that do nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.kernels.registry import default_kernels, get_kernels
from jaxspec.lab.bench.measure import Repeated, Stage
from jaxspec.lab.cost.devices import Timed
from jaxspec.lab.cost.model import Pair
from jaxspec.lab.cost.passes import Pass
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.turns import time_loops
from jaxspec.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured ceilings of one device.

    Attributes:
      num_bytes: working set used for the bandwidth. A working set that fits into a cache is as fast
        as the cache, so it should have the size of the model that it is compared with.
      bytes_per_s: bytes read by a product of a matrix and a vector, in fp32, over its seconds. A
        copy may move more bytes because it writes while it reads, which decoding does not do with
        weights.
      matmul_flops_per_s: rate of square products in `dtype`, two per multiply-add: XLA's or those
        of the kernels that are this device's default, whichever are faster.
      dtype: that of the products.
    """

    num_bytes: int
    bytes_per_s: float
    matmul_flops_per_s: float
    dtype: str

    @property
    def round_s(self) -> float:
        """Zero, because a round's roofline is that of its passes."""
        return 0.0

    def pass_s(self, work: Pass) -> float:
        """The roofline: seconds below which nothing can read and compute what the pass must."""
        return max(work.num_bytes / self.bytes_per_s, work.num_flops / self.matmul_flops_per_s)


def forward_pass(
    model: LanguageModel, *, batch: int, window: int, context: int, block: int | None = None
) -> Pass:
    """The work of one forward pass: a window of tokens per row after `context` committed ones.

    Args:
      block: slots of KV that attention reads at a time; None means that it reads only live slots.
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
    its roofline, the sum over its sequential forward passes. Without a `draft` (a drafter without a
    model), its time is not counted.

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
      num_bytes: working set of the bandwidth, rounded down to whole rows.
      dtype: that of the model.
    """
    dtype, width = jnp.dtype(dtype), 1024
    kernels = get_kernels(default_kernels())
    rows = max(num_bytes // (width * 4), 1)
    sizes = (512, 1024) if jax.default_backend() == "cpu" else (4096, 8192)

    def read(matrix, _fixed, vector):
        return jnp.resize(matrix @ vector, vector.shape) / width, ()

    def product(right, _fixed, left):
        return kernels.product(left, right), ()

    def seconds(stage: Stage, params: PyTree, moving: PyTree) -> float:
        run = Repeated(stage, params, (), moving)
        return time_loops({"it": run}, repeats).median_s("it")

    def constant(*shape: int) -> jax.Array:
        return jnp.ones(shape, dtype) / jnp.asarray(shape[0], dtype)

    matrix, vector = jnp.ones((rows, width), jnp.float32), jnp.ones((width,), jnp.float32)
    read_s = seconds(read, matrix, vector)
    rates = [
        2.0 * n**3 / seconds(product, weight, constant(n, n))
        for n in sizes
        for weight in (constant(n, n), kernels.pack(constant(n, n)))  # by XLA, and by the kernels
    ]
    return Ceilings(
        num_bytes=num_bytes,
        bytes_per_s=matrix.nbytes / read_s,
        matmul_flops_per_s=max(rates),
        dtype=dtype.name,
    )
