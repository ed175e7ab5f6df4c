"""The CPU kernels of `jaxspec.kernels.cpu` beside XLA's: forward passes of one model, in turns.

    python -m jaxspec.bench.kernels --json kernels-cpu.json

A ratio above 1 says that ours are faster.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import statistics
from typing import Any

import tyro

from jaxspec.bench.roofline import measure_ceilings, time_in_turns
from jaxspec.bench.stages import forward_runs
from jaxspec.checkpoint.resolve import load_model
from jaxspec.kernels.registry import KernelsName
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.environment import provenance

NAMES: tuple[KernelsName, KernelsName] = ("xla", "native")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsBench:
    """Time forward passes with either kind of kernels."""

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """BatchView."""
    windows: tuple[int, ...] = (1, 3, 5)
    """Tokens per row."""
    contexts: tuple[int, ...] = (80, 1000)
    """Committed tokens per row."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Of parameters, compute and cache."""
    repeats: int = 7
    """Timed runs of each pass; medians count."""
    json: pathlib.Path | None = None
    """File to write the results to, instead of printing them."""

    def run(self) -> dict[str, Any]:
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
                    seconds = time_in_turns(
                        [passes[name][index][1] for name in NAMES], self.repeats
                    )
                    medians = [statistics.median(times) for times in seconds]
                    floor_s = ceilings.floor_s(work.num_bytes, work.num_flops)
                    results.append(
                        {
                            "dtype": dtype,
                            "batch_size": batch,
                            "window": window,
                            "context": context,
                            **{
                                f"{name}_ms": 1e3 * median
                                for name, median in zip(NAMES, medians, strict=True)
                            },
                            "ratio": statistics.median(
                                theirs / ours for theirs, ours in zip(*seconds, strict=True)
                            ),
                            "native_fraction_of_floor": floor_s / medians[1],
                        }
                    )
        config = dataclasses.asdict(self)
        del config["json"]
        return {"command": "bench kernels", "config": config, "results": results, **provenance()}


if __name__ == "__main__":
    command = tyro.cli(KernelsBench)
    text = json.dumps(command.run(), indent=2) + "\n"
    if command.json is None:
        print(text, end="")
    else:
        write_atomically(command.json, text.encode())
