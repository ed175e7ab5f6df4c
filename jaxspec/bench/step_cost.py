"""Cost of a round against max_length, at the same number of live slots.

    python -m jaxspec.bench.step_cost --capacities 1024 4096 16384 --live-slots 256

Attention reads live blocks only, so the cost should not depend on what is allocated. Rounds of all
capacities take turns, so that a slow moment of the machine falls on each.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any, Literal

import jax
import numpy as np
import tyro

from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.engine import Engine
from jaxspec.requests.requests import make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.environment import provenance
from jaxspec.schedulers import Static


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Time rounds of plain decoding in a speculative program (every draft invalid)."""

    model: str = "demo-target"
    """Any model that `load_model` takes."""
    capacities: tuple[int, ...] = (1024, 4096, 16384)
    """Slots per row; the first is the baseline."""
    live_slots: int = 256
    """Committed tokens per row when timing starts."""
    batch_size: int = 8
    """BatchView."""
    verify_length: int = 5
    """Tokens scored per round."""
    rounds: int = 64
    """Rounds of one timed run."""
    repeats: int = 9
    """Timed runs per max_length."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of parameters, compute and cache."""

    def run(self) -> dict[str, Any]:
        """Milliseconds per round (median of the repeats) and temporaries, by max_length."""
        model = load_model(self.model, dtype=self.dtype)
        engines = [
            Engine(
                model,
                NGram(),
                scheduler=Static(),
                verify_length=self.verify_length,
                batch_size=self.batch_size,
                max_length=max_length,
            )
            for max_length in self.capacities
        ]
        seconds = np.zeros((self.repeats + 1, len(engines)))
        for repeat in range(self.repeats + 1):  # the first run compiles
            for index, engine in enumerate(engines):
                seconds[repeat, index] = self._time(engine)
        ms = np.median(seconds[1:], axis=0) / self.rounds * 1e3
        pairs = np.median(seconds[1:] / seconds[1:, :1], axis=0)
        return {
            "command": "bench step_cost",
            "config": dataclasses.asdict(self),
            "results": [
                {
                    "max_length": max_length,
                    "ms_per_round": float(ms[index]),
                    "ratio_to_first": float(pairs[index]),
                    "temporary_bytes": self._temporaries(engines[index]),
                }
                for index, max_length in enumerate(self.capacities)
            ],
            **provenance(),
        }

    def _time(self, engine: Engine) -> float:
        prompts = np.random.default_rng(0).integers(
            0, engine.target.vocab_size, (self.batch_size, self.live_slots)
        )
        params = SamplingParams(max_tokens=self.rounds + 1, ignore_eos=True)
        requests = make_requests(
            prompts.tolist(), params, engine.target, longest=engine.longest_prompt
        )
        for row, request in enumerate(requests):
            engine.executor.admit_and_prefill(row, request, draft_length=0, arrival=row)
        jax.block_until_ready(engine.executor.state)
        started = time.perf_counter()
        engine.executor.run(self.rounds)
        jax.block_until_ready(engine.executor.state)
        return time.perf_counter() - started

    @staticmethod
    def _temporaries(engine: Engine) -> int | None:
        memory = engine.executor.lower_run().compile().memory_analysis()
        return memory.temp_size_in_bytes if memory is not None else None


if __name__ == "__main__":
    print(json.dumps(tyro.cli(StepCost).run()))
