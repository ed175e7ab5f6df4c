"""The measurements of a study: each function returns one cell's result."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.audit.judge import Finding, judge_all
from jaxspec.audit.levels import StudyMetrics
from jaxspec.cache.layouts import LAYOUTS
from jaxspec.engine.engine import Engine
from jaxspec.lab.studies.published import BROKEN, as_broken
from jaxspec.lab.studies.replay import emitted_by_round, list_scheduling, replay_pool
from jaxspec.lab.studies.rounds import count
from jaxspec.lab.studies.time_breakdown import break_down
from jaxspec.lab.studies.workload import (
    NAMED,
    PLAIN,
    Cell,
    Cells,
    Decoding,
    Workload,
    of_kind,
)
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import Request
from jaxspec.runtime.turns import take_turns
from jaxspec.telemetry.counters import Acceptance

GROUPING_WINDOW = 50  # the paper's
SERVING_LOAD = 0.7  # arrival rate as a fraction of the slowest system's offline rate
EQUAL_LENGTH = 64  # tokens of every prompt in the runs with prompts of equal length
CONTROL_RUN = "the same program without a fault"


def measure_reference(workload: Workload) -> Cell:
    """Batch-1 plain decoding, the reference of all comparisons."""
    engine = workload.engine(
        Decoding(layout="ragged", scheduler="static", batch_size=1, speculates=False)
    )
    completions = engine.run(workload.requests(max(workload.options.batch_sizes)))
    return {
        "engine": engine.describe(),
        "token_ids": [list(completion.token_ids) for completion in completions],
    }


def measure_decoding(
    workload: Workload, cells: Cells, decoding: Decoding, *, is_broken_down: bool
) -> Cell:
    """Rounds, counters, equivalence, wall time next to plain decoding, and its breakdown."""
    requests = workload.requests(decoding.batch_size)
    engine = workload.engine(decoding)
    plain = workload.engine(workload.named(PLAIN, decoding.batch_size))
    contenders = {"plain": plain, "own": engine}
    turns = take_turns(
        {name: functools.partial(count, each, requests) for name, each in contenders.items()},
        workload.options.repeats,
    )
    completions, schedule = turns.results["own"]
    total = Acceptance.total([completion.acceptance for completion in completions])
    own_rounds = [completion.acceptance.num_rounds for completion in completions]
    plain_tokens = sum(len(completion.token_ids) for completion in turns.results["plain"][0])
    shape = engine.shape
    prompt_tokens = sum(len(request.prompt_token_ids) - 1 for request in requests)
    result = {
        "system": decoding.system,
        **dataclasses.asdict(decoding),
        "engine": engine.describe(),
        "num_requests": len(requests),
        "num_tokens": total.num_emitted_tokens,
        "num_prompt_tokens": prompt_tokens + len(requests),
        "run_s": turns.seconds["own"],
        "plain_run_s": turns.seconds["plain"],
        "tokens_per_s": total.num_emitted_tokens / turns.median_s("own"),
        "plain_tokens_per_s": plain_tokens / turns.median_s("plain"),
        "ratio_to_plain": turns.speedup("own", over="plain"),
        "schedule": schedule,
        "ideal_rounds": list_scheduling(own_rounds, decoding.batch_size),
        "acceptance": total.to_json(),
        "target_positions": {
            "live": schedule["num_rows"] * shape.verify_length + prompt_tokens,
            "computed": schedule["num_rounds"] * shape.batch_size * shape.verify_length
            + _chunked(requests, shape.prefill_chunk),
        },
        "equivalence": equivalence(workload, cells, requests, completions),
        "outputs_sha256": _digest(completions),
    }
    if decoding.speculates:
        result["rows"] = [
            [len(completion.prompt_token_ids), *emitted_by_round(completion.origins)]
            for completion in completions
        ]
    if is_broken_down:
        result["time_breakdown"] = break_down(
            engine, requests, schedule=schedule, wall_s=turns.median_s("own")
        )
    return result


def equivalence(
    workload: Workload,
    cells: Cells,
    requests: Sequence[Request],
    completions: Sequence[Completion],
) -> dict[str, Any]:
    """Compares outputs with batch-1 plain decoding: the published metrics on text, then on
    tokens."""
    references = cells["reference"]["token_ids"][: len(requests)]
    params = [request.params for request in requests]
    found = judge_all(workload.scorer, completions, references, params)
    num_ties = found.count(Finding.TIE)
    return {
        **_matches(workload, completions, references),
        "num_ties": num_ties,
        "num_faults": len(found.differing) - num_ties,
    }


def _matches(
    workload: Workload, completions: Sequence[Completion], references: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The published metrics, and the fraction of outputs that are equal token by token."""
    outputs = [tuple(completion.token_ids) for completion in completions]
    metrics = StudyMetrics.of(workload.target, outputs, references)
    pairs = zip(outputs, references, strict=True)
    return {
        "exact_text": metrics and metrics.exact,
        "partial_text": metrics and metrics.partial,
        "exact_tokens": sum(ours == tuple(theirs) for ours, theirs in pairs) / len(outputs),
        "num_outputs": len(outputs),
    }


def measure_controls(workload: Workload, cells: Cells, batch_size: int) -> Cell:
    """Negative controls: how often BSP and DSD, with their faults, emit plain decoding's output;
    and the same settings without a fault."""
    requests = workload.requests(batch_size)
    references = cells["reference"]["token_ids"][: len(requests)]
    decoding = Decoding(layout="ragged", scheduler="static", batch_size=batch_size, speculates=True)
    systems = {}
    for name in (CONTROL_RUN, *BROKEN):
        with as_broken(name):
            completions = list(workload.engine(decoding).run(requests))
        systems[name] = _matches(workload, completions, references)
    return {"batch_size": batch_size, "systems": systems}


def measure_serving(workload: Workload, cells: Cells, decoding: Decoding) -> Cell:
    """Latencies of requests that arrive at random times, the same for every system."""
    engine = workload.engine(decoding)
    requests = workload.requests(decoding.batch_size)
    arrivals_per_s = arrival_rate(cells, decoding.batch_size)
    gaps = np.random.default_rng(workload.options.seed).exponential(size=len(requests))
    arrival_s = np.cumsum(gaps) / arrivals_per_s
    latency_s, num_tokens, elapsed_s = serve(engine, requests, arrival_s)
    p50, p90, p99 = np.percentile(latency_s, (50, 90, 99)).tolist()
    return {
        "system": decoding.system,
        **dataclasses.asdict(decoding),
        "engine": engine.describe(),
        "num_requests": len(requests),
        "arrivals_per_s": arrivals_per_s,
        "tokens_per_s": num_tokens / elapsed_s,
        "latency_s": {"p50": p50, "p90": p90, "p99": p99, "mean": float(np.mean(latency_s))},
    }


def arrival_rate(cells: Cells, batch_size: int) -> float:
    """Requests per second: a fraction of the slowest system's offline rate, so that no queue grows
    without bound."""
    rates = [
        cell["num_requests"] / float(np.median(cell["run_s"]))
        for cell in of_kind(cells, "decode-")
        if cell["system"] in NAMED and cell["batch_size"] == batch_size
    ]
    return SERVING_LOAD * min(rates)


def serve(
    engine: Engine, requests: Sequence[Request], arrival_s: Sequence[float] | np.ndarray
) -> tuple[list[float], int, float]:
    """Submits each request at its time, and steps the engine in between, in real time.

    Args:
      engine: an idle engine with compiled programs.
      requests: in order of arrival.
      arrival_s: seconds from the start, ascending.

    Returns:
      Seconds from each request's arrival (not from when the engine took it) to its completion;
      tokens emitted; seconds until the last one ended.
    """
    latency_s = [0.0] * len(requests)
    num_submitted = num_done = num_tokens = 0
    started_s = time.perf_counter()
    while num_done < len(requests):
        now_s = time.perf_counter() - started_s
        while num_submitted < len(requests) and arrival_s[num_submitted] <= now_s:
            request = requests[num_submitted]
            engine.submit(request.prompt_token_ids, request.params, request_id=str(num_submitted))
            num_submitted += 1
        if not engine.has_unfinished:
            time.sleep(max(0.0, float(arrival_s[num_submitted]) - now_s))
            continue
        for completion in engine.step():
            index = int(completion.request_id)
            latency_s[index] = time.perf_counter() - started_s - float(arrival_s[index])
            num_tokens += len(completion.token_ids)
            num_done += 1
    return latency_s, num_tokens, time.perf_counter() - started_s


def measure_grouping(workload: Workload, cells: Cells) -> Cell:
    """Grouping rates of the pool for every batch size and window, by replay; and whether the replay
    agrees with the compiled pools of this study."""
    widest = max(
        (cell for cell in cells.values() if cell.get("system") == "jaxspec"),
        key=lambda cell: cell["num_requests"],
    )
    rows = widest["rows"]
    equal = [[EQUAL_LENGTH, *emitted] for _, *emitted in rows]
    rates = []
    histories = {"random lengths": rows, "equal lengths": equal}
    for lengths, layout, size in itertools.product(
        histories, LAYOUTS, workload.options.batch_sizes
    ):
        for window in sorted({size, 16, 32, GROUPING_WINDOW, 96}):
            if not 1 < size <= window:
                continue
            place = {"batch_size": size, "window_size": window, "layout": layout}
            schedule = replay_pool(histories[lengths], **place)
            rates.append(
                {
                    **place,
                    "lengths": lengths,
                    "by_calls": schedule.grouping_by_calls,
                    "num_rounds": schedule.num_rounds,
                }
            )
    return {
        "num_requests": len(rows),
        "equal_length": EQUAL_LENGTH,
        "rates": rates,
        "replays": [
            _replayed(cell)
            for cell in of_kind(cells, "decode-")
            if cell["scheduler"] == "pool" and cell["speculates"]
        ],
    }


def _replayed(cell: Cell) -> dict[str, Any]:
    """A compiled pool's counters and those of the replay."""
    replayed = replay_pool(
        cell["rows"],
        batch_size=cell["batch_size"],
        window_size=cell["engine"]["num_residents"],
        layout=cell["layout"],
    )
    fields = dataclasses.asdict(replayed)
    return {
        "name": cell["name"],
        "compiled": {field: cell["schedule"][field] for field in fields},
        "replayed": fields,
    }


def _chunked(requests: Sequence[Request], chunk: int) -> int:
    """Token positions of prefill in chunks of one shape."""
    return sum(-(-(len(request.prompt_token_ids) - 1) // chunk) * chunk for request in requests)


def _digest(completions: Sequence[Completion]) -> str:
    """A digest of all outputs."""
    ids = [list(completion.token_ids) for completion in completions]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()
