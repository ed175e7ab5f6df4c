"""Prefill interference: how long a long prompt holds up a request that is being streamed.

Between two chunks of a prompt the engine runs a few rounds. So a stream waits for at most one
chunk, and the chunk size trades that wait against the time to the new request's first token. A
chunk as long as the prompt is included for comparison: the whole prompt at once.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, ClassVar

import numpy as np

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.measure import PairBench
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import Columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillBench(PairBench):
    """How long a stream waits while a long prompt is prefilled, by chunk size."""

    NAME: ClassVar[str] = "prefill"
    TITLE: ClassVar[str] = "prefill interference"
    COLUMNS: ClassVar[Columns] = {
        "chunk": "{prefill_chunk}",
        "usual gap ms": "{usual_gap_ms:.1f}",
        "longest gap ms": "{longest_gap_ms:.1f}",
        "ratio": "{longest_over_usual:.1f}",
        "first token ms": "{first_token_ms:.1f}",
    }

    chunks: tuple[int, ...] = (32, 128, 896)
    """Prompt tokens per prefill call."""
    prompt_tokens: int = 896
    """Length of the prompt that arrives while another request is streamed."""
    draft_length: int = 4
    """Tokens drafted per round."""
    repeats: int = 7
    """Arrivals per chunk size; the median is reported."""

    def measure(self) -> dict[str, Any]:
        """Milliseconds between pieces of the stream, before and after the arrival."""
        target, draft = self.load()
        results = []
        for chunk in self.chunks:
            engine = Engine(
                target,
                DraftModel(draft),
                draft_length=self.draft_length,
                batch_size=2,
                max_length=self.prompt_tokens + 128,
                prefill_chunk=chunk,
            )
            engine.warm_up()
            runs = [self._arrival(engine) for _ in range(self.repeats + 1)][1:]
            found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            ratio = found["longest_gap_ms"] / found["usual_gap_ms"]
            results.append({"prefill_chunk": chunk, **found, "longest_over_usual": ratio})
        return {"results": results}

    def _arrival(self, engine: Engine) -> dict[str, float]:
        """Gaps between pieces of a stream before a long prompt is submitted, and from then until
        the long prompt's request has ended."""
        random = np.random.default_rng(0)
        long_prompt = random.integers(2, engine.target.vocab_size, self.prompt_tokens).tolist()
        stream = engine.stream(
            [2, 3, 5, 7], SamplingParams(max_tokens=engine.longest_prompt - 8, ignore_eos=True)
        )

        def gap_ms() -> float:
            started_s = time.perf_counter()
            next(stream)
            return 1e3 * (time.perf_counter() - started_s)

        next(stream)
        before = [gap_ms() for _ in range(8)]
        num_ended = engine.metrics()["num_requests"]
        started_s = time.perf_counter()
        engine.submit(long_prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        after = []
        while engine.metrics()["num_requests"] == num_ended:
            after.append(gap_ms())
        first_token_s = time.perf_counter() - started_s
        stream.close()
        while engine.has_unfinished:
            engine.step()
        return {
            "usual_gap_ms": statistics.median(before),
            "longest_gap_ms": max(after),
            "first_token_ms": 1e3 * first_token_s,
        }
