"""Alternating forward passes with the CPU kernels of `jaxspec.kernels.cpu` and with XLA's.

A ratio above 1 means that ours are faster.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.lab.bench.forward import ForwardBench
from jaxspec.lab.bench.roofline import forward_pass, measure_ceilings
from jaxspec.load.models import load_model
from jaxspec.runtime.report import Columns

NAMES: tuple[KernelsName, KernelsName] = ("xla", "native")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsBench(ForwardBench):
    """Time forward passes with the C++ kernels and with XLA's."""

    NAME: ClassVar[str] = "kernels"
    TITLE: ClassVar[str] = "forward passes"
    COLUMNS: ClassVar[Columns] = {
        **ForwardBench.COLUMNS,
        "XLA ms": "{xla_ms:.3f}",
        "ours ms": "{native_ms:.3f}",
        "ratio": "{ratio:.2f}",
        "of the roofline": "{native_fraction_of_roofline:.0%}",
    }

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Dtype of parameters, compute and cache."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Rows decoded together."""
    windows: tuple[int, ...] = (1, 3, 5)
    """Tokens per row."""
    repeats: int = 7
    """Timed runs of each pass; the median is reported."""

    def measure(self) -> dict[str, Any]:
        """Milliseconds of each pass, and the ratio of XLA's to ours, the median of turns."""
        default_kernels()  # the document names them, and their family of instructions
        results = []
        for dtype in self.dtypes:
            models = {name: load_model(self.target, dtype=dtype, kernels=name) for name in NAMES}
            weight_bytes = forward_pass(models["xla"], batch=1, window=1, context=1).weight_bytes
            ceilings = measure_ceilings(weight_bytes, models["xla"].dtype)
            for timed in self.time_passes(models):
                roofline_ms = 1e3 * ceilings.pass_s(timed.work["native"])
                results.append(
                    {
                        "dtype": dtype,
                        **timed.found,
                        "ratio": timed.turns.speedup("native", over="xla"),
                        "native_fraction_of_roofline": roofline_ms / timed.found["native_ms"],
                    }
                )
        return {"results": results}
