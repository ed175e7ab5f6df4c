"""The time cost of KV in int8: alternating forward passes with and without it.

Attention reads half the bytes of bfloat16 KV, or a quarter of float32's, and has to widen and scale
them. A ratio above 1 means that int8 is slower.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.lab.bench.forward import ForwardBench
from jaxspec.load.models import load_model
from jaxspec.models.base import with_kv_dtype
from jaxspec.runtime.report import Columns

OWN, INT8 = "own", "int8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvBench(ForwardBench):
    """Time forward passes with KV in the model's own dtype and in int8."""

    NAME: ClassVar[str] = "kv"
    TITLE: ClassVar[str] = "forward passes, KV in the model's dtype and in int8"
    COLUMNS: ClassVar[Columns] = {
        **ForwardBench.COLUMNS,
        "its own ms": "{own_ms:.3f}",
        "int8 ms": "{int8_ms:.3f}",
        "ratio": "{ratio:.3f}",
    }

    kernels: KernelsName | None = None
    """Which kernels to use; default those of this machine."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """Dtypes of parameters and compute, and of the KV that int8 is compared with."""

    def measure(self) -> dict[str, Any]:
        """Milliseconds of each pass, and the ratio of int8's to the other, the median of turns."""
        default_kernels()  # the document names them, and their family of instructions
        results = []
        for dtype in self.dtypes:
            own = load_model(self.target, dtype=dtype, kernels=self.kernels)
            models = {OWN: own, INT8: with_kv_dtype(own, "int8")}
            for timed in self.time_passes(models):
                results.append(
                    {
                        "dtype": dtype,
                        "kernels": own.kernels,
                        **timed.found,
                        "ratio": timed.turns.speedup(OWN, over=INT8),
                        "ratios": timed.turns.ratios(OWN, over=INT8),
                    }
                )
        return {"results": results}
