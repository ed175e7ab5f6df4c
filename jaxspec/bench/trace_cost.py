"""Cost of recording: rounds of the same requests with every level of trace, beside none.

    python -m jaxspec.bench.trace_cost --json trace-cpu.json

All levels decode the same state in turn, so that a slow moment of the machine falls on each, and
every ratio is one of neighbours in time. Without a trace the program is the one it always was.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import Any, Literal

import jax
import numpy as np
import tyro

from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.requests.requests import make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.environment import provenance
from jaxspec.telemetry.trace import LEVELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceCost:
    """Time speculative rounds without a trace and with each level of it."""

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    draft: str = "demo-draft"
    """Its draft model."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Seats, all of them taken."""
    draft_length: int = 4
    """Tokens drafted per round."""
    prompt_tokens: int = 64
    """Committed tokens per row when timing starts."""
    max_length: int = 512
    """Slots per row; buffers of the trace are as long."""
    rounds: int = 48
    """Rounds of one timed run."""
    repeats: int = 11
    """Timed runs per level."""
    temperature: float = 0.0
    """Of all rows; 0 is greedy."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of parameters, compute and cache."""
    json: pathlib.Path | None = None
    """File to write the results to, instead of printing them."""

    def run(self) -> dict[str, Any]:
        """Milliseconds per round, and ratios to no trace, by batch size and level."""
        target = load_model(self.target, dtype=self.dtype)
        drafter = DraftModel(load_model(self.draft, dtype=self.dtype))
        results = []
        for batch_size in self.batch_sizes:
            engines = {
                level: Engine(
                    target,
                    drafter,
                    draft_length=self.draft_length,
                    batch_size=batch_size,
                    max_length=self.max_length,
                    trace=level,
                )
                for level in (None, *LEVELS)
            }
            seconds = np.zeros((self.repeats + 1, len(engines)))
            for repeat in range(self.repeats + 1):  # the first run compiles
                for index, engine in enumerate(engines.values()):
                    seconds[repeat, index] = self._time(engine)
            ms = np.median(seconds[1:], axis=0) / self.rounds * 1e3
            ratios = seconds[1:] / seconds[1:, :1]
            emitted = {
                int(np.sum(jax.device_get(engine.state.num_committed)))
                for engine in engines.values()
            }
            assert len(emitted) == 1, "a trace changed the output"
            for index, (level, engine) in enumerate(engines.items()):
                results.append(
                    {
                        "batch_size": batch_size,
                        "trace": level,
                        "ms_per_round": float(ms[index]),
                        "ratio_to_none": float(np.median(ratios[:, index])),
                        "ratio_quartiles": np.quantile(ratios[:, index], [0.25, 0.75]).tolist(),
                        "trace_bytes": sum(
                            leaf.nbytes for leaf in jax.tree.leaves(engine.state.trace)
                        ),
                    }
                )
        config = dataclasses.asdict(self)
        del config["json"]
        return {
            "command": "bench trace_cost",
            "config": config,
            "results": results,
            **provenance(),
        }

    def _time(self, engine: Engine) -> float:
        """Seconds of `rounds` rounds of rows whose prompts have been read."""
        shape = engine.shape
        prompts = np.random.default_rng(0).integers(
            0, engine.target.vocab_size, (shape.batch_size, self.prompt_tokens)
        )
        params = SamplingParams(
            max_tokens=self.rounds * shape.verify_length + 1,
            ignore_eos=True,
            temperature=self.temperature,
            seed=0,
        )
        requests = make_requests(
            prompts.tolist(), params, engine.target, longest=engine.longest_prompt
        )
        for row, request in enumerate(requests):
            engine.executor.admit_and_prefill(
                row, request, draft_length=self.draft_length, arrival=row
            )
        jax.block_until_ready(engine.executor.state)
        started = time.perf_counter()
        engine.executor.run(self.rounds)
        jax.block_until_ready(engine.executor.state)
        return time.perf_counter() - started


if __name__ == "__main__":
    command = tyro.cli(TraceCost)
    text = json.dumps(command.run(), indent=2) + "\n"
    if command.json is None:
        print(text, end="")
    else:
        write_atomically(command.json, text.encode())
