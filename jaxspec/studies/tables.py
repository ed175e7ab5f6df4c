"""The tables of the study: ours, and beside them the published ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxspec.runtime.report import NONE, Columns, TextTable
from jaxspec.studies import published_figures as theirs
from jaxspec.studies.claims import check_claims

Cell = dict[str, Any]

PARTS = ("draft", "verify", "align", "regroup", "rest of the rounds", "prefill", "host")


# ---- cells by kind


def decodings(cells: dict[str, Cell]) -> list[Cell]:
    """Those of decoding."""
    return [cell for name, cell in cells.items() if name.startswith("decode-")]


def broken_down(cells: dict[str, Cell]) -> list[Cell]:
    """Those whose time was broken down."""
    return [cell for cell in decodings(cells) if "time_breakdown" in cell]


def of_kind(cells: dict[str, Cell], prefix: str) -> list[Cell]:
    """Those whose names begin so."""
    return [cell for name, cell in cells.items() if name.startswith(prefix)]


def paper_window(grouping: Cell) -> int:
    """The paper's window, or what comes nearest."""
    return min({rate["window_size"] for rate in grouping["rates"]}, key=lambda w: abs(w - 50))


def shares(breakdown: dict[str, Any]) -> dict[str, float]:
    """Of the wall time, by part."""
    return {name: each / breakdown["wall_s"] for name, each in breakdown["seconds"].items()}


# ---- columns


def _pair(exact: float | None, partial: float | None) -> str:
    if exact is None or partial is None:
        return NONE
    return f"{100 * exact:.1f} / {100 * partial:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


CLAIM_COLUMNS: Columns = {
    "claim": lambda claim: claim.claim,
    "paper": lambda claim: claim.paper,
    "ours": lambda claim: claim.ours or NONE,
    "reproduced?": lambda claim: claim.reproduced,
    "why": lambda claim: claim.why,
}


def claims_table(cells: dict[str, Cell]) -> TextTable:
    """Claim, paper, ours, reproduced?, why."""
    title = "What the paper claims, and what this study finds"
    return TextTable.of_columns(title, CLAIM_COLUMNS, check_claims(cells))


def rounds_rows(cells: dict[str, Cell]) -> list[dict[str, Any]]:
    """A row per system and batch size, and the ideal schedules."""
    rows = []
    for cell in of_kind(cells, "rounds-"):
        size = cell["batch_size"]
        rows += [
            {
                "batch_size": size,
                "system": name,
                "rounds": system["schedule"]["num_rounds"],
                "num_prompts": cell["num_prompts"],
                **system,
            }
            for name, system in cell["systems"].items()
        ]
        rows += [
            {"batch_size": size, "system": "ideal, rows refilled at once",
             "rounds": cell["ideal_rounds"]},
            {"batch_size": size, "system": "ideal, static batches",
             "rounds": cell["ideal_rounds_static"]},
        ]  # fmt: skip
    return rows


def _of_system(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """A column that is empty for the ideal schedules."""
    return lambda row: show(row) if "schedule" in row else ""


ROUNDS_COLUMNS: Columns = {
    "batch": lambda row: row["batch_size"],
    "system": lambda row: row["system"],
    "rounds": lambda row: row["rounds"],
    "rows used": _of_system(lambda row: f"{row['rows_used']:.0%}"),
    "emitted/round": _of_system(lambda row: f"{row['emitted_per_round']:.2f}"),
    "target positions": _of_system(lambda row: str(row["target_positions"])),
    "draft positions": _of_system(lambda row: str(row["draft_positions"])),
    "draft positions / (drafted + committed)": _of_system(
        lambda row: f"{row['draft_positions'] / (row['num_drafted'] + row['num_committed']):.2f}"
    ),
    "outputs as jaxspec's": _of_system(
        lambda row: f"{row['num_equal_to_jaxspec']} of {row['num_prompts']}"
    ),
}

EQUIVALENCE_COLUMNS: Columns = {
    "system": lambda row: row["system"],
    "batch": lambda row: row["batch_size"],
    "outputs": lambda row: row["num_outputs"],
    "E / P %": lambda row: _pair(row["exact_text"], row["partial_text"]),
    "tokens equal": lambda row: _percent(row["exact_tokens"]),
    "ties": lambda row: row.get("num_ties", NONE),
    "faults": lambda row: row.get("num_faults", NONE),
}

THROUGHPUT_COLUMNS: Columns = {
    "system": lambda cell: cell["system"],
    "batch": lambda cell: cell["batch_size"],
    "requests": lambda cell: cell["num_requests"],
    "tokens/s": lambda cell: f"{cell['tokens_per_s']:.0f}",
    "plain tokens/s": lambda cell: f"{cell['plain_tokens_per_s']:.0f}",
    "times plain, in turns": lambda cell: f"{cell['ratio_to_plain']:.2f}",
    "emitted/round": lambda cell: f"{cell['acceptance']['emitted_per_round']:.2f}",
    "rounds": lambda cell: cell["schedule"]["num_rounds"],
    "ideal": lambda cell: cell["ideal_rounds"],
    "realignments": lambda cell: cell["schedule"]["num_realignments"],
}


def _acceptance(cell: Cell) -> str:
    drafted = cell["acceptance"]["num_draft_tokens"]
    return f"{cell['acceptance']['num_accepted_tokens'] / drafted:.3f}" if drafted else NONE


def _part_ms(*names: str) -> Callable[[Cell], str]:
    return lambda cell: f"{1e3 * sum(_parts(cell).get(name, 0) for name in names):.2f}"


def _parts(cell: Cell) -> dict[str, float]:
    return cell["time_breakdown"]["part_s"]


def _share_of_time(name: str) -> Callable[[Cell], str]:
    return lambda cell: f"{100 * shares(cell['time_breakdown'])[name]:.1f}"


BREAKDOWN_COLUMNS: Columns = {
    "system": lambda cell: cell["system"],
    "batch": lambda cell: cell["batch_size"],
    "tokens/s": lambda cell: f"{cell['tokens_per_s']:.0f}",
    "plain tokens/s": lambda cell: f"{cell['plain_tokens_per_s']:.0f}",
    "calls": lambda cell: cell["schedule"]["num_rounds"],
    "tokens/call": lambda cell: f"{cell['num_tokens'] / cell['schedule']['num_rounds']:.1f}",
    "acceptance": _acceptance,
    "draft ms": _part_ms("draft"),
    "verify ms": _part_ms("target", "verify"),
    "align ms": _part_ms("align"),
    **{f"{name} %": _share_of_time(name) for name in PARTS},
}

SERVING_COLUMNS: Columns = {
    "system": lambda cell: cell["system"],
    "batch": lambda cell: cell["batch_size"],
    "requests/s": lambda cell: f"{cell['arrivals_per_s']:.2f}",
    "requests": lambda cell: cell["num_requests"],
    "tokens/s": lambda cell: f"{cell['tokens_per_s']:.0f}",
    **{
        f"{name.upper()} s": (lambda cell, name=name: f"{cell['latency_s'][name]:.2f}")
        for name in ("p50", "p90", "p99")
    },
}

PUBLISHED_EQUIVALENCE_COLUMNS: Columns = {
    "method": lambda found: found[0],
    **{
        f"{model}, batch {batch}": (
            lambda found, at=(model, batch): (
                "{:.1f} / {:.1f}".format(*found[1][at]) if at in found[1] else NONE
            )
        )
        for model in theirs.MODELS
        for batch in (1, 4)
    },
}

PUBLISHED_BREAKDOWN_COLUMNS: Columns = {
    "system": lambda found: found[0],
    "tokens/s": lambda found: f"{found[1]['tokens_per_s']:.1f}",
    "plain tokens/s": lambda found: NONE,
    "calls": lambda found: f"{found[1]['calls']:.0f}",
    "verify ms": lambda found: f"{found[1]['verify_ms']:.1f}",
    **{
        f"{name} %": (lambda found, name=name: f"{found[1][name]:.1f}")
        for name in ("verify", "draft", "overhead")
    },
}

PUBLISHED_SERVING_COLUMNS: Columns = {
    "system": lambda found: found[0],
    "batch": lambda found: found[1],
    "tokens/s": lambda found: f"{found[2]['tokens_per_s']:.1f}",
    **{
        f"{name.upper()} s": (lambda found, name=name: f"{found[2][name]:.2f}")
        for name in ("p50", "p90", "p99")
    },
}


def make_tables(cells: dict[str, Cell]) -> list[TextTable]:
    """All tables, ours and the published ones; those of which the study has no cell are left
    out."""
    decoded = decodings(cells)
    compared = [
        {"system": cell["system"], "batch_size": cell["batch_size"], **cell["equivalence"]}
        for cell in decoded
    ] + [
        {"system": f"control: {name}", "batch_size": cell["batch_size"], **found}
        for cell in of_kind(cells, "controls-")
        for name, found in cell["systems"].items()
    ]
    grouping = cells.get("grouping")
    window = paper_window(grouping) if grouping else 0
    rates = (
        [rate for rate in grouping["rates"] if rate["window_size"] == window] if grouping else []
    )
    served = [
        (system, batch, found)
        for system, by_batch in theirs.SERVING.items()
        for batch, found in by_batch.items()
    ]
    grouping_columns: Columns = {
        "prompts": lambda rate: rate["lengths"],
        "layout": lambda rate: rate["layout"],
        "batch": lambda rate: rate["batch_size"],
        "by calls": lambda rate: _percent(rate["by_calls"]),
        "by rows": lambda rate: _percent(rate["by_rows"]),
        "published, by calls": lambda rate: (
            f"{found:.1f} %"
            if (found := theirs.GROUPING[rate["lengths"]].get(rate["batch_size"])) is not None
            else NONE
        ),
    }
    tables = [
        TextTable.of_columns("Rounds and token-positions", ROUNDS_COLUMNS, rounds_rows(cells)),
        TextTable.of_columns(
            "Equivalence with batch-1 plain decoding: the paper's E / P on text, then tokens",
            EQUIVALENCE_COLUMNS,
            compared,
        ),
        TextTable.of_columns(
            f"Published: equivalence, E / P % ({theirs.HARDWARE})",
            PUBLISHED_EQUIVALENCE_COLUMNS,
            theirs.EQUIVALENCE.items(),
            is_quoted=True,
        ),
        TextTable.of_columns(
            "Throughput (whole runs, prefill included) and rounds", THROUGHPUT_COLUMNS, decoded
        ),
        TextTable.of_columns(
            "Time breakdown. Milliseconds per call: parts compiled alone, timed on a state from "
            "the middle of the run. Shares of the wall time, %: draft, verify, align and regroup "
            "are calls times milliseconds; rounds, prefill and host are timed in the run itself",
            BREAKDOWN_COLUMNS,
            broken_down(cells),
        ),
        TextTable.of_columns(
            "Published: time breakdown (Vicuna-7B, A100, batch 4)",
            PUBLISHED_BREAKDOWN_COLUMNS,
            theirs.TIME_BREAKDOWN.items(),
            is_quoted=True,
        ),
        TextTable.of_columns(
            f"Grouping rate of a pool of {window} rows, and the published one (Multi30k, window "
            "50, other models)",
            grouping_columns,
            rates,
        ),
        TextTable.of_columns(
            "Request latency under Poisson arrivals: the same arrivals for all",
            SERVING_COLUMNS,
            of_kind(cells, "serving-"),
        ),
        TextTable.of_columns(
            "Published: simulated serving (A100)", PUBLISHED_SERVING_COLUMNS, served, is_quoted=True
        ),
    ]
    return [table for table in tables if table.rows]
