"""Cost of recording: rounds of the same requests with every trace level, and without a trace.

Without a trace the program is the same as if there were no tracing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench import measure
from jaxspec.lab.bench.measure import PairBench
from jaxspec.runtime.report import Columns
from jaxspec.telemetry.trace import LEVELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceCostBench(PairBench):
    """Time speculative rounds with each trace level, and without a trace."""

    NAME: ClassVar[str] = "trace-cost"
    TITLE: ClassVar[str] = "cost of a trace"
    COLUMNS: ClassVar[Columns] = {
        "batch": "{batch_size}",
        "trace": lambda found: found["trace"] or "none",
        "ms per round": "{ms_per_round:.3f}",
        "of untraced": "{ratio_to_none:.2f}",
        "KiB": lambda found: f"{found['trace_bytes'] / 1024:.0f}",
    }

    batch_sizes: tuple[int, ...] = (1, 8)
    """Batch sizes; all rows are running."""
    draft_length: int = 4
    """Tokens drafted per round."""
    prompt_tokens: int = 64
    """Committed tokens per row when timing starts."""
    max_length: int = 512
    """Slots per row; the buffers of the trace have the same length."""
    rounds: int = 48
    """Rounds of one timed run."""
    repeats: int = 11
    """Timed runs per level."""
    temperature: float = 0.0
    """Temperature of all rows; 0 is greedy."""

    def measure(self) -> dict[str, Any]:
        """Milliseconds per round, and ratios to no trace, by batch size and level."""
        target, draft = self.load()
        results = []
        for batch_size in self.batch_sizes:
            executors = {
                level: Engine(
                    target,
                    DraftModel(draft),
                    draft_length=self.draft_length,
                    batch_size=batch_size,
                    max_length=self.max_length,
                    trace=level,
                ).executor
                for level in (None, *LEVELS)
            }
            turns = measure.time_rounds(
                executors,
                self.repeats,
                num_rounds=self.rounds,
                num_tokens=self.rounds * (self.draft_length + 1) + 1,
                prompt_tokens=self.prompt_tokens,
                draft_length=self.draft_length,
                temperature=self.temperature,
                seed=0,
            )
            lengths = {int(np.sum(each.fetch("num_committed").num_committed))
                       for each in executors.values()}  # fmt: skip
            assert len(lengths) == 1, "a trace changed the output"
            for level, executor in executors.items():
                ratios = turns.ratios(None, over=level)
                traces = jax.tree.leaves(executor.state.trace)
                results.append(
                    {
                        "batch_size": batch_size,
                        "trace": level,
                        "ms_per_round": 1e3 * turns.median_s(level) / self.rounds,
                        "ratio_to_none": float(np.median(ratios)),
                        "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
                        "trace_bytes": sum(leaf.nbytes for leaf in traces),
                    }
                )
        return {"results": results}
