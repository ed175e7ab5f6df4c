"""The CPU kernels of `jaxspec.kernels.cpu` beside XLA's: forward passes of one model, in turns.

A ratio above 1 says that ours are faster.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

from jaxspec.bench.measure import Bench
from jaxspec.bench.roofline import forward_pass, measure_ceilings
from jaxspec.bench.stages import forward_runs
from jaxspec.checkpoint.resolve import load_model
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.runtime.report import Columns
from jaxspec.runtime.turns import time_loops

NAMES: tuple[KernelsName, KernelsName] = ("xla", "native")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsBench(Bench):
    """Time forward passes with the C++ kernels and with XLA's."""

    NAME: ClassVar[str] = "kernels"
    MEASURES: ClassVar[tuple[str, ...]] = (
        "kernels", "cache/pages.py", "models/decoder.py", "models/layers.py", "bench/kernels.py",
    )  # fmt: skip
    TITLE: ClassVar[str] = "forward passes"
    COLUMNS: ClassVar[Columns] = {
        "dtype": "{dtype}",
        "window": "{window}",
        "context": "{context}",
        "batch": "{batch_size}",
        "XLA ms": "{xla_ms:.3f}",
        "ours ms": "{native_ms:.3f}",
        "ratio": "{ratio:.2f}",
        "of the roofline": "{native_fraction_of_roofline:.0%}",
    }

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Dtype of parameters, compute and cache."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Rows decoded together."""
    windows: tuple[int, ...] = (1, 3, 5)
    """Tokens per row."""
    contexts: tuple[int, ...] = (80, 1000)
    """Committed tokens per row."""
    repeats: int = 7
    """Timed runs of each pass; the median counts."""

    def measure(self) -> dict[str, Any]:
        """Milliseconds of each pass, and the ratio of XLA's to ours, the median of turns."""
        default_kernels()  # the document names them, and their family of instructions
        results = []
        for dtype in self.dtypes:
            models = {name: load_model(self.target, dtype=dtype, kernels=name) for name in NAMES}
            weight_bytes = forward_pass(models["xla"], batch=1, window=1, context=1).weight_bytes
            ceilings = measure_ceilings(weight_bytes, models["xla"].dtype)
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
                    work, _ = passes["native"][index]
                    runs = {name: passes[name][index][1] for name in NAMES}
                    turns = time_loops(runs, self.repeats)
                    found = {
                        "dtype": dtype,
                        "batch_size": batch,
                        "window": window,
                        "context": context,
                        **{f"{name}_ms": 1e3 * turns.median_s(name) for name in NAMES},
                        "ratio": turns.speedup("native", over="xla"),
                    }
                    roofline_ms = 1e3 * ceilings.pass_s(work)
                    found["native_fraction_of_roofline"] = roofline_ms / found["native_ms"]
                    results.append(found)
        return {"results": results}
