"""Rounds of each layout and scheduler for the same requests, and of EQSPEC and EXSPEC as published.

    python -m jaxspec.bench.schedulers --prompts question.jsonl --limit 32

Outputs are the target's for all of them (checked: equal, or parted at a tie within rounding), so
rounds and token-positions are all that differs, and they do not depend on the machine. *Ideal* is
list scheduling of the rounds that each request takes with jaxspec's own round: a free row is
filled at once in order of arrival. Reading a prompt is not a round. How EQSPEC and EXSPEC as
published differ from the same layout and scheduler here, `jaxspec.studies.published` says.
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

from jaxspec.audit.judge import Finding, judge
from jaxspec.audit.scoring import Scorer
from jaxspec.cache.layouts import LAYOUTS
from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import encode_prompts, read_prompts, sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import sha256_of
from jaxspec.runtime.environment import provenance
from jaxspec.schedulers import Continuous, Pool, Static
from jaxspec.studies.published import eqspec, exspec
from jaxspec.telemetry.counters import Acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedulers:
    """Count rounds of both layouts with static batches, the same-length pool and continuous
    batching, and of EQSPEC and EXSPEC as published."""

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
        draft = load_model(self.draft, dtype=self.dtype)
        lines = sample_prompts() if self.prompts is None else read_prompts(self.prompts)
        prompts = encode_prompts(
            lines[: self.limit], target, max_prompt_tokens=self.max_prompt_tokens
        )
        scorer = Scorer(target, max_length=self.max_prompt_tokens + self.max_tokens)
        results = []
        for batch_size in self.batch_sizes:
            witness: list[Completion] | None = None
            for name, settings in self._systems(draft, batch_size).items():
                completions, result = self._measure(target, settings, prompts, batch_size)
                if witness is None:  # the first: ragged, whose bits no neighbour changes
                    witness = completions
                own = [completion.acceptance.num_rounds for completion in witness]
                results.append(
                    {
                        "system": name,
                        **result,
                        "ideal_rounds": list_scheduling(own, batch_size),
                        "num_ties": count_ties(scorer, completions, witness),
                    }
                )
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

    def _systems(self, draft: LanguageModel, batch_size: int) -> dict[str, dict[str, Any]]:
        """Engine settings by name."""
        window_size = max(self.pool, batch_size)
        systems: dict[str, dict[str, Any]] = {
            f"{layout} + {scheduler.name}": {
                "drafter": DraftModel(draft),
                "layout": layout,
                "scheduler": scheduler,
            }
            for layout in LAYOUTS
            for scheduler in (Static(), Pool(window_size), Continuous())
        }
        return systems | {
            "EQSPEC as published": eqspec(draft),
            "EXSPEC as published": exspec(draft, window_size=window_size),
        }

    def _measure(
        self,
        target: LanguageModel,
        settings: dict[str, Any],
        prompts: Sequence[Any],
        batch_size: int,
    ) -> tuple[list[Completion], dict[str, Any]]:
        """The completions of one system, and what they have cost."""
        engine = Engine(
            target,
            **settings,
            draft_length=self.draft_length,
            batch_size=batch_size,
            max_length=self.max_prompt_tokens + self.max_tokens + self.draft_length + 2,
        )
        engine.generate(prompts[:1], SamplingParams(max_tokens=1))  # compiles
        before = totals(engine)
        started_s = time.perf_counter()
        completions = engine.generate(prompts, SamplingParams(max_tokens=self.max_tokens))
        elapsed_s = time.perf_counter() - started_s
        counts = {name: total - before[name] for name, total in totals(engine).items()}
        total = Acceptance.total([completion.acceptance for completion in completions])
        num_tokens, rounds = total.num_emitted_tokens, counts["num_rounds"]
        return completions, {
            "layout": engine.layout,
            "scheduler": engine.scheduler.name,
            "drafter": engine.describe()["drafter"],
            "verifier": engine.verifier.name,
            "batch_size": batch_size,
            "num_residents": engine.num_residents,
            "rounds": rounds,
            "seats_used": counts["num_rows"] / (rounds * batch_size),
            "emitted_per_round": total.emitted_per_round,
            "emitted_per_call": num_tokens / rounds,
            "num_prompt_tokens": sum(len(c.prompt_token_ids) for c in completions),
            "num_tokens": num_tokens,
            "num_draft_tokens": total.num_draft_tokens,
            "num_accepted_tokens": total.num_accepted_tokens,
            "grouped_calls": counts["num_grouped_rounds"] / rounds,
            "grouped_rows": counts["num_grouped_rows"] / counts["num_rows"],
            "realignments": counts["num_realignments"],
            "slots_moved": counts["num_slots_moved"],
            "target_positions": rounds * batch_size * engine.shape.verify_length,
            "draft_positions": counts["draft_positions"],
            "elapsed_s": elapsed_s,
        }


def totals(engine: Engine) -> dict[str, int]:
    """The engine's running counts of rounds and of what the draft model has read."""
    state = engine.state
    counts = {name: int(total) for name, total in vars(state.schedule).items()}
    return counts | {"draft_positions": int(state.drafter.num_positions)}


def count_ties(
    scorer: Scorer, completions: Sequence[Completion], witness: Sequence[Completion]
) -> int:
    """How many outputs part from the witness's, each at a tie within rounding.

    Raises:
      AssertionError: one parts elsewhere.
    """
    num_ties = 0
    for ours, theirs in zip(completions, witness, strict=True):
        if ours.token_ids == theirs.token_ids:
            continue
        divergence = judge(
            scorer,
            prompt_ids=ours.prompt_token_ids,
            output_ids=ours.token_ids,
            reference_ids=theirs.token_ids,
            params=SamplingParams(),
        )
        assert divergence is not None
        assert divergence.finding == Finding.TIE, divergence
        num_ties += 1
    return num_ties


def list_scheduling(rounds: Sequence[int], batch_size: int) -> int:
    """Rounds until all rows have ended, if a free row is filled at once in order of arrival."""
    ends = [0] * batch_size
    for own in rounds:
        heapq.heappush(ends, heapq.heappop(ends) + own)
    return max(ends)


def rounds_table(results: Sequence[dict[str, Any]]) -> Table:
    """Systems by batch size."""
    table = Table(
        "batch_size",
        "system",
        "rounds",
        "of ideal",
        "tokens/call",
        "grouped calls",
        "grouped rows",
        "slots moved",
        "draft positions",
    )
    for result in results:
        table.add_row(
            str(result["batch_size"]),
            result["system"],
            str(result["rounds"]),
            f"{result['rounds'] / result['ideal_rounds']:.0%}",
            f"{result['emitted_per_call']:.2f}",
            f"{result['grouped_calls']:.1%}",
            f"{result['grouped_rows']:.1%}",
            str(result["slots_moved"]),
            str(result["draft_positions"]),
        )
    return table


if __name__ == "__main__":
    print(json.dumps(tyro.cli(Schedulers).run(Console(stderr=True))))
