"""Rounds of each layout and scheduler for the same requests, and of EQSPEC and EXSPEC as published.

Outputs are the target's for all of them (checked: equal, or different from a tie within rounding
on), so rounds and token-positions are all that differs, and they do not depend on the machine. The
*ideal* is list scheduling of the rounds that each request takes with jaxspec's own round: a free
row is filled at once in order of arrival. Prefill is not a round. How EQSPEC and EXSPEC as
published differ from the same layout and scheduler here, `jaxspec.studies.published` says.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from rich.console import Console

from jaxspec.audit.judge import judge_all
from jaxspec.audit.scoring import Scorer
from jaxspec.bench import measure
from jaxspec.bench.measure import PairBench
from jaxspec.cache.layouts import LAYOUTS
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.schedulers import Continuous, Pool, Static
from jaxspec.studies.published import eqspec, exspec
from jaxspec.studies.replay import list_scheduling
from jaxspec.telemetry.counters import Acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulersBench(PairBench):
    """Rounds of both layouts with static batches, the same-length pool and continuous batching, and
    of EQSPEC and EXSPEC as published."""

    NAME: ClassVar[str] = "schedulers"
    MEASURES: ClassVar[tuple[str, ...]] = (
        "decode", "schedulers", "cache/layouts.py", "engine/engine.py", "drafters/draft_model.py",
        "studies/published.py", "studies/rounds.py",
    )  # fmt: skip

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
    """Rows decoded together."""
    pool: int = 32
    """Rows of the pool."""

    def measure(self, console: Console) -> dict[str, Any]:
        """Rounds, and whether outputs agree, by batch size and system."""
        target, draft = self.load()
        prompts, inputs = measure.read_and_encode(
            self.prompts, target, limit=self.limit, max_prompt_tokens=self.max_prompt_tokens
        )
        max_length = self.max_prompt_tokens + self.max_tokens + self.draft_length + 2
        params = SamplingParams(max_tokens=self.max_tokens)
        requests = make_requests(prompts, params, target, longest=max_length)
        scorer = Scorer(target, max_length=max_length)
        results = []
        for batch_size in self.batch_sizes:
            reference: list[Completion] = []
            for name, settings in self._systems(draft, batch_size).items():
                engine = Engine(
                    target,
                    **settings,
                    draft_length=self.draft_length,
                    batch_size=batch_size,
                    max_length=max_length,
                )
                completions, result = count_rounds(engine, requests)
                reference = reference or completions  # ragged, whose bits no neighbour changes
                own = [completion.acceptance.num_rounds for completion in reference]
                results.append(
                    {
                        "system": name,
                        "batch_size": batch_size,
                        **result,
                        "ideal_rounds": list_scheduling(own, batch_size),
                        "num_ties": count_ties(scorer, completions, reference),
                    }
                )
        console.print(rounds_table(results))
        return {"inputs": inputs, "results": results}

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
        return systems | {"EQSPEC": eqspec(draft), "EXSPEC": exspec(draft, window_size=window_size)}


def totals(engine: Engine) -> dict[str, int]:
    """The running counts of an engine's rounds, and of what its draft model has read
    (`draft_positions`), where it has one."""
    state = engine.executor.state
    found = {name: int(n) for name, n in vars(jax.device_get(state.schedule)).items()}
    if hasattr(state.drafter, "num_positions"):
        found["draft_positions"] = int(state.drafter.num_positions)
    return found


def count_rounds(
    engine: Engine, requests: Sequence[Request]
) -> tuple[list[Completion], dict[str, Any]]:
    """The completions of requests, and the rounds and token-positions that they took."""
    measure.seconds_to_compile(engine)
    before = totals(engine)
    completions = list(engine.run(requests))
    schedule = {name: n - before[name] for name, n in totals(engine).items()}
    draft_positions = schedule.pop("draft_positions")
    total = Acceptance.total([completion.acceptance for completion in completions])
    num_prompt_tokens = sum(len(completion.prompt_token_ids) for completion in completions)
    rounds, batch_size = schedule["num_rounds"], engine.shape.batch_size
    return completions, {
        "engine": engine.describe(),
        "schedule": schedule,
        "acceptance": total.to_json(),
        "rows_used": schedule["num_rows"] / (rounds * batch_size),
        "emitted_per_round": total.emitted_per_round,
        "emitted_per_call": total.num_emitted_tokens / rounds,
        "num_prompts": len(requests),
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": total.num_emitted_tokens,
        "num_drafted": total.num_draft_tokens,
        "num_committed": num_prompt_tokens + total.num_emitted_tokens,
        "target_positions": schedule["num_rows"] * engine.shape.verify_length
        + num_prompt_tokens
        - len(requests),
        "draft_positions": draft_positions,
    }


def count_ties(
    scorer: Scorer, completions: Sequence[Completion], reference: Sequence[Completion]
) -> int:
    """How many greedy outputs diverge from the reference's, each at a tie within rounding.

    Raises:
      AssertionError: one diverges elsewhere.
    """
    expected = [completion.token_ids for completion in reference]
    found = judge_all(scorer, completions, expected, SamplingParams())
    assert found.are_ties, found.judged
    return len(found.differing)


def rounds_table(results: Sequence[dict[str, Any]]) -> TextTable:
    """Systems by batch size."""

    def share(name: str, of: str) -> Any:
        return lambda found: f"{found['schedule'][name] / found['schedule'][of]:.0%}"

    columns: Columns = {
        "batch": lambda found: found["batch_size"],
        "system": lambda found: found["system"],
        "rounds": lambda found: found["schedule"]["num_rounds"],
        "of\nideal": lambda found: f"{found['schedule']['num_rounds'] / found['ideal_rounds']:.0%}",
        "tokens\n/call": lambda found: f"{found['emitted_per_call']:.2f}",
        "grouped\ncalls": share("num_grouped_rounds", "num_rounds"),
        "grouped\nrows": share("num_grouped_rows", "num_rows"),
        "slots\nmoved": lambda found: found["schedule"]["num_slots_moved"],
        "draft\npositions": lambda found: found["draft_positions"],
    }
    return TextTable.of_columns("rounds", columns, results, group=lambda found: found["batch_size"])
