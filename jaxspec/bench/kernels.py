"""The CPU kernels of `jaxspec.kernels.cpu` beside XLA's: forward passes of one model, in turns.

A ratio above 1 says that ours are faster.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

from rich.console import Console

from jaxspec.bench.measure import Bench
from jaxspec.bench.roofline import measure_ceilings
from jaxspec.bench.stages import forward_runs
from jaxspec.checkpoint.resolve import load_model
from jaxspec.kernels.registry import KernelsName
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.runtime.turns import time_loops

NAMES: tuple[KernelsName, KernelsName] = ("xla", "native")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsBench(Bench):
    """Forward passes with either kind of CPU kernels."""

    NAME: ClassVar[str] = "kernels"
    MEASURES: ClassVar[tuple[str, ...]] = (
        "kernels", "cache/pages.py", "models/decoder.py", "models/layers.py", "bench/kernels.py",
    )  # fmt: skip

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Of parameters, compute and cache."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Rows."""
    windows: tuple[int, ...] = (1, 3, 5)
    """Tokens per row."""
    contexts: tuple[int, ...] = (80, 1000)
    """Committed tokens per row."""
    repeats: int = 7
    """Timed runs of each pass; medians count."""

    def measure(self, console: Console) -> dict[str, Any]:
        """Milliseconds of each pass, and the ratio of XLA's to ours, the median of turns."""
        results = []
        for dtype in self.dtypes:
            models = {name: load_model(self.target, dtype=dtype, kernels=name) for name in NAMES}
            ceilings = None
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
                    if ceilings is None:
                        ceilings = measure_ceilings(work.weight_bytes, models["xla"].dtype)
                    turns = time_loops(
                        {name: passes[name][index][1] for name in NAMES}, self.repeats
                    )
                    results.append(
                        {
                            "dtype": dtype,
                            "batch_size": batch,
                            "window": window,
                            "context": context,
                            **{f"{name}_ms": 1e3 * turns.median_s(name) for name in NAMES},
                            "ratio": turns.speedup("native", over="xla"),
                            "native_fraction_of_roofline": ceilings.roofline_s(work)
                            / turns.median_s("native"),
                        }
                    )
        columns: Columns = {
            "dtype": lambda found: found["dtype"],
            **{name: (lambda found, name=name: found[name]) for name in ("window", "context")},
            "batch": lambda found: found["batch_size"],
            "XLA ms": lambda found: f"{found['xla_ms']:.3f}",
            "ours ms": lambda found: f"{found['native_ms']:.3f}",
            "ratio": lambda found: f"{found['ratio']:.2f}",
            "of the roofline": lambda found: f"{found['native_fraction_of_roofline']:.0%}",
        }
        console.print(TextTable.of_columns("forward passes", columns, results))
        return {"results": results}
