"""How long a long prompt holds up a request that is being streamed.

    python -m jaxspec.bench.prefill_interference --json stall-cpu.json

Between two chunks of a prompt the engine runs a few rounds. So whoever is streaming waits for no
more than one chunk, and the chunk's size trades that wait against the time until the newcomer's
first token. A chunk as long as the prompt stands beside: the whole prompt read at once.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import tyro

from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.engine.queue import StreamOutput
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.environment import provenance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stall:
    """Time the pieces of a stream while a long prompt is read."""

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    draft: str = "demo-draft"
    """Its draft model."""
    chunks: tuple[int, ...] = (32, 128, 896)
    """Prompt tokens per prefill call."""
    prompt_tokens: int = 896
    """Length of the prompt that arrives while another request is streamed."""
    draft_length: int = 4
    """Tokens drafted per round."""
    repeats: int = 7
    """Arrivals per chunk size; medians count."""
    json: pathlib.Path | None = None
    """File to write the results to, instead of printing them."""

    def run(self) -> dict[str, Any]:
        """Milliseconds between pieces of the stream, before and after the arrival."""
        target = load_model(self.target)
        drafter = DraftModel(load_model(self.draft))
        results = []
        for chunk in self.chunks:
            engine = Engine(
                target,
                drafter,
                draft_length=self.draft_length,
                batch_size=2,
                max_length=self.prompt_tokens + 128,
                prefill_chunk=chunk,
            )
            engine.warm_up()
            runs = [self._arrival(engine) for _ in range(self.repeats + 1)][1:]
            found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            results.append(
                {
                    "prefill_chunk": chunk,
                    **found,
                    "longest_over_usual": found["longest_gap_ms"] / found["usual_gap_ms"],
                }
            )
        config = dataclasses.asdict(self)
        del config["json"]
        return {"command": "bench stall", "config": config, "results": results, **provenance()}

    def _arrival(self, engine: Engine) -> dict[str, float]:
        """Gaps between pieces of a stream before a long prompt is submitted, and from then until
        the long prompt's request has ended."""
        long_prompt = np.random.default_rng(0).integers(
            2, engine.target.vocab_size, self.prompt_tokens
        )
        stream = engine.stream(
            [2, 3, 5, 7], SamplingParams(max_tokens=engine.longest_prompt - 8, ignore_eos=True)
        )
        next(stream)
        before = [self._gap_ms(stream) for _ in range(8)]
        num_ended = engine.metrics()["num_requests"]
        started_s = time.perf_counter()
        engine.submit(long_prompt.tolist(), SamplingParams(max_tokens=1, ignore_eos=True))
        after = []
        while engine.metrics()["num_requests"] == num_ended:
            after.append(self._gap_ms(stream))
        first_token_s = time.perf_counter() - started_s
        stream.close()
        while engine.has_unfinished:
            engine.step()
        return {
            "usual_gap_ms": statistics.median(before),
            "longest_gap_ms": max(after),
            "first_token_ms": 1e3 * first_token_s,
        }

    def _gap_ms(self, stream: Generator[StreamOutput, None, None]) -> float:
        started_s = time.perf_counter()
        next(stream)
        return 1e3 * (time.perf_counter() - started_s)


if __name__ == "__main__":
    command = tyro.cli(Stall)
    text = json.dumps(command.run(), indent=2) + "\n"
    if command.json is None:
        print(text, end="")
    else:
        write_atomically(command.json, text.encode())
