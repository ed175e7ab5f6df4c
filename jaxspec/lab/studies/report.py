"""Claims, findings, tables, plots and page of the study."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxspec.lab.studies.claims import SOURCE, check_claims, paper_window
from jaxspec.lab.studies.workload import NAMED, Cell, Cells, nearest, of_kind
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.documents import write_document
from jaxspec.runtime.environment import load_remark
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import Plot, TextTable, new_figure, write_page

if TYPE_CHECKING:
    import pandas


def write_report(document: dict[str, Any], output: pathlib.Path) -> None:
    """Writes `study.json`, a PNG file per plot and `study.html` with all of them.

    Args:
      document: that of `Study.run`; parts of its cells that only serve resuming are left out of the
        JSON file.
      output: the directory.

    Raises:
      SettingError: matplotlib is not installed, or a file cannot be written.
    """
    cells = document["cells"]
    found = {"claims": check_claims(cells), "findings": findings(cells), **_written(cells)}
    write_document(document | found, output / "study.json")
    for plot in make_plots(cells):
        write_atomically(output / f"{plot.name}.png", plot.png())
    write_html(document, output / "study.html")


def write_html(document: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the page of a study, from the document of `Study.run` or from a `study.json`; raises
    what `write_report` raises."""
    pd = import_extra("pandas", "the report of a study")
    cells, claims = document["cells"], pd.DataFrame(check_claims(document["cells"]))
    names = ("config", "inputs", "versions", "devices", "commit")
    setup = pd.json_normalize({name: document[name] for name in names}, max_level=1).iloc[0]
    write_page(
        path,
        title="Study of batched speculative decoding",
        summary=TextTable.of_frame("What the paper claims, and what this study finds", claims),
        findings=findings(cells),
        paragraphs=[
            "EQSPEC and EXSPEC run as published: the aligned layout with static batches or with "
            "the same-length pool, no bonus token after a full acceptance, drafts of the batch's "
            'least length, and a draft model that keeps no KV. "aligned + static" and "aligned + '
            "pool\" are the same layout and scheduler with jaxspec's drafting and verification; "
            "jaxspec is the ragged layout with continuous batching. Everything ran in this "
            "package, on this machine.",
            f"The paper's figures are from {SOURCE}.",
        ],
        tables=[
            TextTable.of_values("Setup", setup.map(str).to_dict()),
            *(TextTable.of_frame(title, table) for title, table in make_tables(cells).items()),
        ],
        plots=make_plots(cells),
    )


def _written(cells: Cells) -> dict[str, Any]:
    """Cells as `study.json` has them, without what only serves resuming. The provenance of the
    first cell is that of the document (a cell of another keeps its own). `engine` has the settings
    that all engines have in common."""
    cells = copy.deepcopy(dict(cells))
    engines = [cell["engine"] for cell in cells.values() if "engine" in cell]
    common = {
        name: value
        for name, value in engines[0].items()
        if all(name in engine and engine[name] == value for engine in engines)
    }
    for engine in engines:
        for name in common:
            del engine[name]
    first = next(iter(cells.values()))["provenance"]
    for cell in cells.values():
        for name in ("rows", "token_ids", "run_s", "plain_run_s"):
            cell.pop(name, None)
        if cell["provenance"] == first:
            del cell["provenance"]
    return {**first, "engine": common, "cells": cells}


def print_report(cells: Cells, console: Console) -> None:
    """The claims, the rounds and the findings, on a terminal."""
    for claim in check_claims(cells):
        console.print(f"[bold]{claim['claim']}[/]: {claim['reproduced']}", highlight=False)
        for label in ("paper", "ours", "why"):
            if claim[label]:
                console.print(f"  {label}: {claim[label]}", markup=False, highlight=False)
    columns = "system batch_size schedule.num_rounds ideal_rounds schedule.draft_positions"
    named = [cell for cell in of_kind(cells, "decode-") if cell["system"] in NAMED]
    console.print(TextTable.of_frame("Rounds", _fields(named, columns)))
    for sentence in findings(cells):
        console.print(f"- {sentence}", markup=False, highlight=False)


def findings(cells: Cells) -> list[str]:
    """Sentences on what must hold in every study, and on other work on the machine."""
    found = []
    decoded = of_kind(cells, "decode-")
    if decoded:
        num_faults, num_outputs, num_ties = (
            sum(cell["equivalence"][name] for cell in decoded)
            for name in ("num_faults", "num_outputs", "num_ties")
        )
        found.append(
            f"Equivalence: of {num_outputs} outputs {num_outputs - num_ties - num_faults} equal "
            f"batch-1 plain decoding in every token, {num_ties} diverge from it at proven ties, "
            f"and {num_faults} otherwise."
        )
    ragged = [cell for cell in decoded if cell["layout"] == "ragged" and cell["speculates"]]
    sizes = {cell["batch_size"] for cell in ragged}
    if len(ragged) > len(sizes):
        holds = len({(cell["batch_size"], cell["outputs_sha256"]) for cell in ragged}) == len(sizes)
        found.append(
            "Scheduling changes no token: at each batch size the ragged layout's outputs are "
            + ("the same under every scheduler." if holds else "NOT the same: this is a bug.")
        )
    if replays := cells.get("grouping", {}).get("replays"):
        agrees = all(replay["compiled"] == replay["replayed"] for replay in replays)
        found.append(
            "Grouping rates are replayed from what each row emitted; the replay "
            + ("agrees" if agrees else "does NOT agree")
            + f" with the counters of all {len(replays)} compiled pools."
        )
    busiest = max((cell.get("load_average") or 0.0 for cell in cells.values()), default=0.0)
    num_cpus = min((cell["cpu_count"] for cell in cells.values()), default=1)
    if (remark := load_remark(busiest, num_cpus)) is not None:
        found.append(f"{remark} Rounds, positions and tokens do not depend on it.")
    return found


# ---- tables

_RATES = "system batch_size tokens_per_s plain_tokens_per_s"
_THROUGHPUT = f"{_RATES} num_requests ratio_to_plain"
_ROUNDS = (
    "system batch_size schedule.num_rounds ideal_rounds acceptance.emitted_per_round "
    "schedule.num_realignments target_positions.live target_positions.computed "
    "schedule.draft_positions"
)
_EQUIVALENCE = (
    "system batch_size equivalence.num_outputs equivalence.exact_text equivalence.partial_text "
    "equivalence.exact_tokens equivalence.num_ties equivalence.num_faults"
)
_SERVING = (
    "system batch_size arrivals_per_s num_requests tokens_per_s latency_s.p50 latency_s.p90 "
    "latency_s.p99"
)


def make_tables(cells: Cells) -> dict[str, pandas.DataFrame]:
    """Tables by title, except those without a cell in the study. Columns have the names that the
    fields have in `study.json`."""
    pd = import_extra("pandas", "the report of a study")
    decoded = of_kind(cells, "decode-")
    controls = [
        {"system": f"control: {name}", "batch_size": cell["batch_size"], "equivalence": found}
        for cell in of_kind(cells, "controls-")
        for name, found in cell["systems"].items()
    ]
    timed = [cell for cell in decoded if "time_breakdown" in cell]
    part_s = pd.DataFrame([cell["time_breakdown"]["part_s"] for cell in timed])
    times = (_fields(timed, _RATES), (1e3 * part_s).add_suffix(" ms"), _shares(timed))
    rates = cells.get("grouping", {}).get("rates", [])
    window = paper_window(cells["grouping"]) if rates else 0
    tables = {
        "Rounds and token-positions": _fields(decoded, _ROUNDS),
        "Equivalence with batch-1 plain decoding: the paper's exact and partial match on text, and "
        "on tokens": _fields([*decoded, *controls], _EQUIVALENCE),
        "Throughput (whole runs, prefill included)": _fields(decoded, _THROUGHPUT),
        "Time breakdown: milliseconds per call of parts compiled alone, timed on rows in "
        "mid-decode; shares of the wall time, calls times milliseconds": pd.concat(times, axis=1),
        f"Grouping rate of a pool of {window} rows": _fields(
            [rate for rate in rates if rate["window_size"] == window],
            "lengths layout batch_size by_calls",
        ),
        "Request latency under Poisson arrivals: the same arrivals for all": _fields(
            of_kind(cells, "serving-"), _SERVING
        ),
    }
    return {title: table for title, table in tables.items() if len(table)}


def _fields(records: Sequence[Cell], paths: str) -> pandas.DataFrame:
    """Records as a table of fields and fields of fields (`schedule.num_rounds`)."""
    frame = import_extra("pandas", "the report of a study").json_normalize(list(records))
    return frame.reindex(columns=paths.split()).rename(columns=lambda path: path.split(".")[-1])


def _shares(timed: Sequence[Cell]) -> pandas.DataFrame:
    """Fractions of the wall time by part, a row per cell; the rest is what the parts leave."""
    pd = import_extra("pandas", "the report of a study")
    seconds = pd.DataFrame([cell["time_breakdown"]["seconds"] for cell in timed])
    wall_s = [cell["time_breakdown"]["wall_s"] for cell in timed]
    shares = seconds.reindex(columns=["draft", "verify", "align"]).div(wall_s, axis=0)
    return shares.assign(rest=1 - shares.sum(axis=1)).add_suffix(" share")


# ---- plots


def make_plots(cells: Cells) -> list[Plot]:
    """The plots for which there are cells; raises `SettingError` if matplotlib is not installed."""
    pd = import_extra("pandas", "plots")
    plots = []
    named = [cell for cell in of_kind(cells, "decode-") if cell["system"] in NAMED]
    if named:
        # Relative to alternating runs of plain decoding, because cells run one after another and a
        # machine's speed varies.
        ratios = pd.DataFrame(named).pivot(
            index="batch_size", columns="system", values="ratio_to_plain"
        )
        panels = {"tokens/s over plain decoding's": ratios}
        plots.append(_plot("throughput", "Throughput against batch size", panels))
    if timed := [cell for cell in named if "time_breakdown" in cell]:
        # Negative parts (those that are cheaper inside the loop) cannot be drawn.
        shares = 100 * _shares(timed).clip(lower=0)
        shares.index = pd.Index([f"{cell['system']}, {cell['batch_size']}" for cell in timed])
        panels = {"% of the wall time, by batch size": shares}
        plots.append(
            _plot("time-breakdown", "Where the time goes", panels, kind="barh", stacked=True)
        )
    if cells.get("grouping", {}).get("rates"):
        rates = pd.DataFrame(cells["grouping"]["rates"])
        rates = rates.assign(per_cent=100 * rates.by_calls, of=rates.lengths + ", " + rates.layout)
        window, middle = paper_window(cells["grouping"]), nearest(8, rates.batch_size.unique())
        panels = {
            f"% by batch size, pool of {window}": rates[rates.window_size == window].pivot(
                index="batch_size", columns="of", values="per_cent"
            ),
            f"% by size of the pool, batch {middle}": rates[rates.batch_size == middle].pivot(
                index="window_size", columns="of", values="per_cent"
            ),
        }
        plots.append(_plot("grouping", "Grouping rate of the same-length pool, by calls", panels))
    return plots


def _plot(
    name: str,
    caption: str,
    panels: Mapping[str, pandas.DataFrame],
    *,
    kind: str = "line",
    **options: Any,
) -> Plot:
    """Tables drawn side by side, by title."""
    figure, axes = new_figure(1, len(panels), size=(4.8 * len(panels), 4.2), squeeze=False)
    for each, (title, frame) in zip(axes[0], panels.items(), strict=True):
        # Batch sizes are powers of two: as names they stand at equal distances.
        style = {"marker": "o", "markersize": 4} if kind == "line" else {"width": 0.8}
        frame.rename(index=str).plot(ax=each, kind=kind, **style, **options)
        each.set_title(title, fontsize=9)
        # Below the panel: bars leave no room in it.
        each.legend(
            frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2
        )
        if kind == "barh":
            each.invert_yaxis()
    return Plot(name=name, caption=caption, figure=figure)
