"""What KV in int8 costs in time: forward passes with it and without, in turns.

Attention reads half the bytes of bfloat16 KV, or a quarter of float32's, and has to widen and scale
them. A ratio above 1 says that int8 is slower.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

from jaxspec.bench.measure import Bench, check_at_least_one
from jaxspec.bench.stages import forward_runs
from jaxspec.checkpoint.resolve import load_model
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.models.base import with_kv_dtype
from jaxspec.runtime.report import Columns
from jaxspec.runtime.turns import time_loops

OWN, INT8 = "own", "int8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvBench(Bench):
    """Time forward passes with KV in the model's own dtype and in int8."""

    NAME: ClassVar[str] = "kv"
    MEASURES: ClassVar[tuple[str, ...]] = (
        "kernels", "cache/pages.py", "models/decoder.py", "models/layers.py", "bench/kv.py",
    )  # fmt: skip
    TITLE: ClassVar[str] = "forward passes, KV in the model's dtype and in int8"
    COLUMNS: ClassVar[Columns] = {
        "dtype": "{dtype}",
        "window": "{window}",
        "context": "{context}",
        "batch": "{batch_size}",
        "its own ms": "{own_ms:.3f}",
        "int8 ms": "{int8_ms:.3f}",
        "ratio": "{ratio:.3f}",
    }

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    kernels: KernelsName | None = None
    """Which kernels; default those of this machine."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """Dtype of parameters and compute, and of the KV that int8 is compared with."""
    batch_sizes: tuple[int, ...] = (8,)
    """Rows decoded together."""
    windows: tuple[int, ...] = (1, 5)
    """Tokens per row."""
    contexts: tuple[int, ...] = (80, 1000)
    """Committed tokens per row."""
    repeats: int = 15
    """Timed runs of each pass; the median counts."""

    def measure(self) -> dict[str, Any]:
        """Milliseconds of each pass, and the ratio of int8's to the other, the median of turns."""
        check_at_least_one(self, "batch_sizes", "windows", "contexts", "repeats")
        default_kernels()  # the document names them, and their family of instructions
        results = []
        for dtype in self.dtypes:
            own = load_model(self.target, dtype=dtype, kernels=self.kernels)
            models = {OWN: own, INT8: with_kv_dtype(own, "int8")}
            for batch, window in itertools.product(self.batch_sizes, self.windows):
                passes = {
                    name: forward_runs(
                        model,
                        batch=batch,
                        window=window,
                        contexts=self.contexts,
                        max_length=max(self.contexts) + window,
                    )
                    for name, model in models.items()
                }
                for index, context in enumerate(self.contexts):
                    runs = {name: passes[name][index][1] for name in models}
                    turns = time_loops(runs, self.repeats)
                    results.append(
                        {
                            "dtype": dtype,
                            "kernels": own.kernels,
                            "batch_size": batch,
                            "window": window,
                            "context": context,
                            **{f"{name}_ms": 1e3 * turns.median_s(name) for name in models},
                            "ratio": turns.speedup(OWN, over=INT8),
                            "ratios": turns.ratios(OWN, over=INT8),
                        }
                    )
        return {"results": results}
