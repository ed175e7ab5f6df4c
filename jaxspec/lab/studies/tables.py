"""The tables of the study: ours, next to the published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxspec.lab.studies import published_figures as theirs
from jaxspec.lab.studies.claims import Claim, paper_window
from jaxspec.lab.studies.workload import Cell, Cells, of_kind
from jaxspec.runtime.report import NONE, Columns, TextTable

PARTS = ("draft", "verify", "align", "regroup", "rest")


def broken_down(cells: Cells) -> list[Cell]:
    """The decoding cells whose time was broken down."""
    return [cell for cell in of_kind(cells, "decode-") if "time_breakdown" in cell]


def shares(breakdown: dict[str, Any]) -> dict[str, float]:
    """Fractions of the wall time, by part."""
    found = {name: breakdown["seconds"][name] / breakdown["wall_s"] for name in PARTS[:-1]}
    return found | {"rest": 1.0 - sum(found.values())}


def claims_table(claims: Iterable[Claim]) -> TextTable:
    """Claim, paper, ours, reproduced?, why."""
    columns: Columns = {
        "claim": "{claim}",
        "paper": "{paper}",
        "ours": lambda claim: claim.ours or NONE,
        "reproduced?": "{reproduced}",
        "why": "{why}",
    }
    return TextTable.of_columns("What the paper claims, and what this study finds", columns, claims)


def rounds_rows(cells: Cells) -> list[dict[str, Any]]:
    """A row per system and batch size, and the list schedules, for which only rounds are known."""
    rows = []
    for cell in of_kind(cells, "rounds-"):
        rounds = {
            "list schedule, rows refilled at once": cell["ideal_rounds"],
            "list schedule, static batches": cell["ideal_rounds_static"],
        }
        ideals = {name: {"schedule": {"num_rounds": n}} for name, n in rounds.items()}
        for name, found in (cell["systems"] | ideals).items():
            of_cell = {key: cell[key] for key in ("batch_size", "num_prompts")}
            row = {**of_cell, "system": name, **found}
            if "num_drafted" in row:
                bound = row["num_drafted"] + row["num_committed"]
                row["read_of_bound"] = row["draft_positions"] / bound
            rows.append(row)
    return rows


ROUNDS: Columns = {
    "batch": "{batch_size}",
    "system": "{system}",
    "rounds": "{schedule[num_rounds]}",
    "rows used": "{rows_used:.0%}",
    "emitted/round": "{emitted_per_round:.2f}",
    "target positions": "{target_positions}",
    "draft positions": "{draft_positions}",
    "draft positions / (drafted + committed)": "{read_of_bound:.2f}",
    "outputs as jaxspec's": "{num_equal_to_jaxspec} of {num_prompts}",
}
SYSTEM: Columns = {"system": "{system}", "batch": "{batch_size}"}
RATES: Columns = {"tokens/s": "{tokens_per_s:.0f}", "plain tokens/s": "{plain_tokens_per_s:.0f}"}


def _percent(*shares: float | None) -> str:
    """Per cent, separated by a slash, if all are known."""
    return NONE if None in shares else " / ".join(f"{100 * (share or 0):.1f}" for share in shares)


def _acceptance(cell: Cell) -> str:
    drafted = cell["acceptance"]["num_draft_tokens"]
    return f"{cell['acceptance']['num_accepted_tokens'] / drafted:.3f}" if drafted else NONE


def _part_ms(*names: str) -> Callable[[Cell], str]:
    """Milliseconds per call of some parts together."""
    return lambda cell: (
        f"{1e3 * sum(cell['time_breakdown']['part_s'].get(name, 0) for name in names):.2f}"
    )


def _percentiles(of: str) -> Columns:
    return {f"{name.upper()} s": f"{{{of}[{name}]:.2f}}" for name in ("p50", "p90", "p99")}


def make_tables(cells: Cells) -> list[TextTable]:
    """All tables, ours and the published ones, except those without a cell in the study."""
    tables = [
        TextTable.of_columns("Rounds and token-positions", ROUNDS, rounds_rows(cells)),
        *_equivalence_tables(cells),
        *_throughput_tables(cells),
        _grouping_table(cells),
        *_serving_tables(cells),
    ]
    return [table for table in tables if table.rows]


def _equivalence_tables(cells: Cells) -> list[TextTable]:
    compared = [cell | cell["equivalence"] for cell in of_kind(cells, "decode-")] + [
        {"system": f"control: {name}", "batch_size": cell["batch_size"], **found}
        for cell in of_kind(cells, "controls-")
        for name, found in cell["systems"].items()
    ]
    return [
        TextTable.of_columns(
            "Equivalence with batch-1 plain decoding: the paper's E / P on text, then tokens",
            {
                **SYSTEM,
                "outputs": "{num_outputs}",
                "E / P %": lambda row: _percent(row["exact_text"], row["partial_text"]),
                "tokens equal": "{exact_tokens:.1%}",
                "ties": "{num_ties}",
                "faults": "{num_faults}",
            },
            compared,
        ),
        TextTable.of_columns(
            f"Published: equivalence, E / P % ({theirs.HARDWARE})",
            {
                "method": lambda found: found[0],
                **{
                    f"{at[0]}, batch {at[1]}": lambda found, at=at: (
                        "{:.1f} / {:.1f}".format(*found[1][at]) if at in found[1] else NONE
                    )
                    for at in ((model, batch) for model in theirs.MODELS for batch in (1, 4))
                },
            },
            theirs.EQUIVALENCE.items(),
            is_quoted=True,
        ),
    ]


def _throughput_tables(cells: Cells) -> list[TextTable]:
    return [
        TextTable.of_columns(
            "Throughput (whole runs, prefill included) and rounds",
            {
                **SYSTEM,
                "requests": "{num_requests}",
                **RATES,
                "times plain, in turns": "{ratio_to_plain:.2f}",
                "emitted/round": "{acceptance[emitted_per_round]:.2f}",
                "rounds": "{schedule[num_rounds]}",
                "list schedule": "{ideal_rounds}",
                "realignments": "{schedule[num_realignments]}",
            },
            of_kind(cells, "decode-"),
        ),
        TextTable.of_columns(
            "Time breakdown. Milliseconds per call: parts compiled alone, timed on rows in "
            "mid-decode. Shares of the wall time, %: draft, verify, align and regroup are calls "
            "times milliseconds",
            {
                **SYSTEM,
                **RATES,
                "calls": "{schedule[num_rounds]}",
                "tokens/call": lambda cell: (
                    f"{cell['num_tokens'] / cell['schedule']['num_rounds']:.1f}"
                ),
                "acceptance": _acceptance,
                "draft ms": _part_ms("draft"),
                "verify ms": _part_ms("target", "verify"),
                "align ms": _part_ms("align"),
                **{
                    f"{name} %": lambda cell, name=name: _percent(
                        shares(cell["time_breakdown"])[name]
                    )
                    for name in PARTS
                },
            },
            broken_down(cells),
        ),
        TextTable.of_columns(
            "Published: time breakdown (Vicuna-7B, A100, batch 4)",
            {
                "system": "{system}",
                "tokens/s": "{tokens_per_s:.1f}",
                "plain tokens/s": "{plain_tokens_per_s}",
                "calls": "{calls:.0f}",
                "verify ms": "{verify_ms:.1f}",
                **{f"{name} %": f"{{{name}:.1f}}" for name in ("verify", "draft", "overhead")},
            },
            [{"system": name, **found} for name, found in theirs.TIME_BREAKDOWN.items()],
            is_quoted=True,
        ),
    ]


def _grouping_table(cells: Cells) -> TextTable:
    grouping = cells.get("grouping", {"rates": []})
    window = paper_window(grouping) if grouping["rates"] else 0
    rates = [
        rate | {"published": theirs.GROUPING[rate["lengths"]].get(rate["batch_size"])}
        for rate in grouping["rates"]
        if rate["window_size"] == window
    ]
    return TextTable.of_columns(
        f"Grouping rate of a pool of {window} rows, and the published one (Multi30k, window "
        "50, other models)",
        {
            "prompts": "{lengths}",
            "layout": "{layout}",
            "batch": "{batch_size}",
            "by calls": "{by_calls:.1%}",
            "by rows": "{by_rows:.1%}",
            "published, by calls": "{published:.1f}%",
        },
        rates,
    )


def _serving_tables(cells: Cells) -> list[TextTable]:
    return [
        TextTable.of_columns(
            "Request latency under Poisson arrivals: the same arrivals for all",
            {
                **SYSTEM,
                "requests/s": "{arrivals_per_s:.2f}",
                "requests": "{num_requests}",
                "tokens/s": "{tokens_per_s:.0f}",
                **_percentiles("latency_s"),
            },
            of_kind(cells, "serving-"),
        ),
        TextTable.of_columns(
            "Published: simulated serving (A100)",
            {**SYSTEM, "tokens/s": "{latency_s[tokens_per_s]:.1f}", **_percentiles("latency_s")},
            [
                {"system": system, "batch_size": batch, "latency_s": found}
                for system, by_batch in theirs.SERVING.items()
                for batch, found in by_batch.items()
            ],
            is_quoted=True,
        ),
    ]
