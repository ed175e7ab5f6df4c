"""Rounds of each layout and scheduler for the same requests, and of EQSPEC and EXSPEC as published.

All of them emit the target's output (checked: equal, or diverging at a tie within rounding), so
only rounds and token positions differ, and these do not depend on the machine. The yardstick is
list scheduling of the rounds that each request takes with jaxspec's own round: a free row is filled
immediately, in order of arrival. It is no lower bound, because another order may need fewer rounds.
Prefill is not a round. `jaxspec.lab.studies.published` describes how EQSPEC and EXSPEC as published
differ from the same layout and scheduler here.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.audit.judge import judge_all
from jaxspec.audit.scoring import Scorer
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.measure import case
from jaxspec.lab.studies.replay import list_scheduling
from jaxspec.lab.studies.workload import Workload, WorkloadOptions
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import Columns
from jaxspec.telemetry.counters import Acceptance

POOL = 32  # rows of the pool


def _share(name: str, of: str) -> Any:
    return lambda found: f"{found['schedule'][name] / found['schedule'][of]:.0%}"


ROUNDS: Columns = {
    "batch": "{batch_size}",
    "system": "{system}",
    "rounds": "{schedule[num_rounds]}",
    "of list\nschedule": lambda found: (
        f"{found['schedule']['num_rounds'] / found['ideal_rounds']:.0%}"
    ),
    "tokens\n/call": "{emitted_per_call:.2f}",
    "grouped\ncalls": _share("num_grouped_rounds", "num_rounds"),
    "grouped\nrows": _share("num_grouped_rows", "num_rows"),
    "slots\nmoved": "{schedule[num_slots_moved]}",
    "draft\npositions": "{draft_positions}",
}


@case("schedulers", {"results": ("rounds", ROUNDS)})
def schedulers(
    target: str = "demo-target",
    draft: str = "demo-draft",
    prompts: pathlib.Path | None = None,
    batch_sizes: tuple[int, ...] = (4, 8),
) -> dict[str, Any]:
    """Count rounds of layouts and schedulers, and of EQSPEC and EXSPEC as published.

    Args:
      target: Any model that `load_model` takes.
      draft: Its draft model, named in the same way.
      prompts: Prompt file; default the sample prompts.
      batch_sizes: Rows decoded together.
    """
    options = WorkloadOptions(
        target=target, draft=draft, prompts=prompts, limit=32, max_prompt_tokens=64, max_tokens=48
    )
    workload = Workload(options, reference=list)
    requests = workload.as_requests(workload.in_file_order, options.max_tokens)
    results = []
    for batch_size in batch_sizes:
        reference: list[Completion] = []
        for decoding in workload.decodings(batch_size):
            if not decoding.speculates:
                continue
            engine = workload.engine(decoding, pool=POOL)
            completions, schedule = count(engine, requests)
            draft_positions = schedule.pop("draft_positions")
            total = Acceptance.total([completion.acceptance for completion in completions])
            reference = reference or completions  # ragged, whose bits no neighbour changes
            own = [completion.acceptance.num_rounds for completion in reference]
            results.append(
                {
                    "system": decoding.system,
                    "batch_size": batch_size,
                    "engine": engine.describe(),
                    "schedule": schedule,
                    "acceptance": total.to_json(),
                    "emitted_per_call": total.num_emitted_tokens / schedule["num_rounds"],
                    "draft_positions": draft_positions,
                    "ideal_rounds": list_scheduling(own, batch_size),
                    "num_ties": count_ties(workload.scorer, completions, reference),
                }
            )
    return {"inputs": workload.inputs, "results": results}


def totals(engine: Engine) -> dict[str, int]:
    """The running counts of an engine's rounds and, if it has a draft model, of the positions that
    this has read (`draft_positions`)."""
    state = engine.executor.state
    found = {name: int(n) for name, n in vars(jax.device_get(state.schedule)).items()}
    if hasattr(state.drafter, "num_positions"):
        found["draft_positions"] = int(state.drafter.num_positions)
    return found


def count(engine: Engine, requests: Sequence[Request]) -> tuple[list[Completion], dict[str, int]]:
    """The completions of requests, and the increase of the engine's `totals`."""
    before = totals(engine)
    completions = list(engine.run(requests))
    return completions, {name: n - before[name] for name, n in totals(engine).items()}


def count_ties(
    scorer: Scorer, completions: Sequence[Completion], reference: Sequence[Completion]
) -> int:
    """How many greedy outputs diverge from the reference's, each at a tie within rounding.

    Raises:
      AssertionError: one diverges other than at a tie.
    """
    expected = [completion.token_ids for completion in reference]
    found = judge_all(scorer, completions, expected, SamplingParams())
    assert found.are_ties, found.judged
    return len(found.differing)
