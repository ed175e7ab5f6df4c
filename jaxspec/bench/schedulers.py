"""Rounds that each scheduler needs for the same requests, beside what is ideal for its acceptance.

    python -m jaxspec.bench.schedulers --prompts question.jsonl --limit 32

Outputs are the same for all (asserted), so rounds are all that differs: they do not depend on the
machine. *Ideal* is list scheduling: every row takes the rounds it took, and a free seat is filled
at once in order of arrival. Reading a prompt is not a round.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint import load_model
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine import Engine
from jaxspec.environment import provenance, sha256_of
from jaxspec.prompts import encode_prompts, read_prompts, sample_prompts
from jaxspec.requests import Acceptance, SamplingParams
from jaxspec.schedulers import Continuous, Pool, Static


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedulers:
    """Count rounds of static batches, of the same-length pool and of continuous seats."""

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    draft: str = "demo-draft"
    """Its draft model."""
    prompts: pathlib.Path | None = None
    """Prompt file; default the sample prompts."""
    limit: int = 32
    """Prompts to decode."""
    max_prompt_tokens: int = 64
    """Prompts are cut to their first so many tokens."""
    max_tokens: int = 48
    """Tokens emitted per prompt; fewer where the model ends by itself."""
    draft_length: int = 5
    """Tokens drafted per round."""
    batch_sizes: tuple[int, ...] = (4, 8)
    """Seats."""
    pool: int = 32
    """Rows of the pool."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of parameters, compute and cache."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints the table; returns the JSON document."""
        target = load_model(self.target, dtype=self.dtype)
        drafter = DraftModel(load_model(self.draft, dtype=self.dtype))
        lines = sample_prompts() if self.prompts is None else read_prompts(self.prompts)
        prompts = encode_prompts(
            lines[: self.limit], target, max_prompt_tokens=self.max_prompt_tokens
        )
        params = SamplingParams(max_tokens=self.max_tokens)
        results, outputs = [], []
        for seats in self.batch_sizes:
            for scheduler in (Static(), Pool(max(self.pool, seats)), Continuous()):
                engine = Engine(
                    target,
                    drafter,
                    scheduler=scheduler,
                    draft_length=self.draft_length,
                    seats=seats,
                    capacity=self.max_prompt_tokens + self.max_tokens + self.draft_length + 1,
                )
                engine.generate(prompts[:1], SamplingParams(max_tokens=1))  # compiles
                before = int(engine.state.num_rounds)
                started_s = time.perf_counter()
                completions = engine.generate(prompts, params)
                seconds = time.perf_counter() - started_s
                outputs.append([completion.token_ids for completion in completions])
                rounds = int(engine.state.num_rounds) - before
                own = [completion.acceptance.num_rounds for completion in completions]
                total = Acceptance.total([completion.acceptance for completion in completions])
                results.append(
                    {
                        "scheduler": scheduler.name,
                        "seats": seats,
                        "num_residents": engine.num_residents,
                        "rounds": rounds,
                        "ideal_rounds": list_scheduling(own, seats),
                        "seats_used": sum(own) / (rounds * seats),
                        "emitted_per_round": total.emitted_per_round,
                        "num_tokens": total.num_emitted_tokens,
                        "elapsed_s": seconds,
                    }
                )
        assert all(output == outputs[0] for output in outputs), "schedulers differ"
        console.print(rounds_table(results))
        name = "sample prompts" if self.prompts is None else self.prompts.name
        inputs = {} if self.prompts is None else {name: sha256_of(self.prompts)}
        return {
            "command": "bench schedulers",
            "config": dataclasses.asdict(self) | {"prompts": name},
            "inputs": inputs,
            "results": results,
            **provenance(),
        }


def list_scheduling(rounds: Sequence[int], seats: int) -> int:
    """Rounds until all rows have ended, if a free seat is filled at once in order of arrival."""
    ends = [0] * seats
    for own in rounds:
        heapq.heappush(ends, heapq.heappop(ends) + own)
    return max(ends)


def rounds_table(results: Sequence[dict[str, Any]]) -> Table:
    """Schedulers by number of seats."""
    table = Table("seats", "scheduler", "rounds", "ideal", "seats used", "emitted/round")
    for result in results:
        table.add_row(
            str(result["seats"]),
            result["scheduler"],
            str(result["rounds"]),
            str(result["ideal_rounds"]),
            f"{result['seats_used']:.0%}",
            f"{result['emitted_per_round']:.2f}",
        )
    return table


if __name__ == "__main__":
    print(json.dumps(tyro.cli(Schedulers).run(Console(stderr=True))))
