"""Cost of a round against max_length, at the same number of live slots.

Attention reads only live blocks, so the cost should not depend on the allocated size.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxspec.drafters.ngram import NGram
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench import measure
from jaxspec.lab.bench.measure import Bench, Dtype
from jaxspec.load.models import load_model
from jaxspec.runtime.report import Columns
from jaxspec.schedulers import Static


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCostBench(Bench):
    """Time of a round of plain decoding in a speculative program, by max_length."""

    NAME: ClassVar[str] = "step-cost"
    TITLE: ClassVar[str] = "cost of a round"
    COLUMNS: ClassVar[Columns] = {
        "max_length": "{max_length}",
        "ms per round": "{ms_per_round:.3f}",
        "of the first": "{ratio_to_first:.2f}",
    }

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    dtype: Dtype = "float32"
    """Dtype of parameters, compute and cache."""
    max_lengths: tuple[int, ...] = (1024, 4096, 16384)
    """Slots per row; the first is the baseline."""
    live_slots: int = 256
    """Committed tokens per row when timing starts."""
    batch_size: int = 8
    """Rows decoded together."""
    verify_length: int = 5
    """Tokens scored per round."""
    rounds: int = 64
    """Rounds of one timed run."""
    repeats: int = 9
    """Timed runs per max_length."""

    def measure(self) -> dict[str, Any]:
        """Milliseconds per round (median of the repeats) and temporaries, by max_length."""
        model = load_model(self.target, dtype=self.dtype)
        executors = {
            max_length: Engine(
                model,
                NGram(),
                scheduler=Static(),
                verify_length=self.verify_length,
                batch_size=self.batch_size,
                max_length=max_length,
            ).executor
            for max_length in self.max_lengths
        }
        turns = measure.time_rounds(
            executors,
            self.repeats,
            num_rounds=self.rounds,
            num_tokens=self.rounds + 1,
            prompt_tokens=self.live_slots,
            draft_length=0,
        )
        results = []
        for length, executor in executors.items():
            memory = executor.lower_run().compile().memory_analysis()
            results.append(
                {
                    "max_length": length,
                    "ms_per_round": 1e3 * turns.median_s(length) / self.rounds,
                    "ratio_to_first": turns.speedup(self.max_lengths[0], over=length),
                    "temporary_bytes": memory and memory.temp_size_in_bytes,
                }
            )
        return {"results": results}
