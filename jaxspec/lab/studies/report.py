"""Findings, plots and page of the study: our figures next to the published ones.

Published figures come from other models, hardware and code. They are drawn in separate panels, with
the hardware named.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from jaxspec.lab.studies import published_figures as theirs
from jaxspec.lab.studies.claims import check_claims, paper_window
from jaxspec.lab.studies.tables import (
    ROUNDS,
    broken_down,
    claims_table,
    make_tables,
    rounds_rows,
    shares,
)
from jaxspec.lab.studies.workload import NAMED, PLAIN, Cells, nearest, of_kind, rounds_of
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.documents import write_document
from jaxspec.runtime.environment import load_remark
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import Plot, TextTable, new_figure, write_page

COLOURS = {
    "EQSPEC": "#b5651d",
    "EXSPEC": "#8e44ad",
    "jaxspec": "#2a7f62",
    PLAIN: "#7f8c8d",
    "list schedule": "#2c3e50",
}
PART_COLOURS = {
    "draft": "#5dade2",
    "verify": "#1f618d",
    "align": "#c0392b",
    "regroup": "#e59866",
    "rest": "#aab7b8",
    "overhead (published)": "#7b241c",
}


def write_report(document: dict[str, Any], output: pathlib.Path) -> None:
    """Writes `study.json`, a PNG file per plot and `study.html` with all of them.

    Args:
      document: that of `Study.run`; parts of its cells that only serve resuming are left out of the
        JSON file.
      output: the directory.

    Raises:
      SettingError: matplotlib is not installed, or a file cannot be written.
    """
    cells, claims = document["cells"], check_claims(document["cells"])
    plots, found = make_plots(cells), findings(cells)
    kept = {
        name: {key: value for key, value in cell.items() if key not in ("rows", "token_ids")}
        for name, cell in cells.items()
    }
    added = {"claims": list(map(dataclasses.asdict, claims)), "findings": found, "cells": kept}
    write_document(document | added, output / "study.json")
    for plot in plots:
        write_atomically(output / f"{plot.name}.png", plot.png())
    write_page(
        output / "study.html",
        title="Study of batched speculative decoding",
        summary=claims_table(claims),
        findings=found,
        paragraphs=[
            "EQSPEC and EXSPEC run as published: the aligned layout with static batches or with "
            "the same-length pool, no bonus token after a full acceptance, drafts of the batch's "
            'least length, and a draft model that keeps no KV. "aligned + static" and "aligned + '
            "pool\" are the same layout and scheduler with jaxspec's drafting and verification; "
            "jaxspec is the ragged layout with continuous batching. Everything ran in this "
            "package, on this machine.",
            f"Published figures stand on a tinted ground: {theirs.SOURCE}; {theirs.HARDWARE}",
        ],
        tables=[TextTable.of_values("Setup", _setup(document)), *make_tables(cells)],
        plots=plots,
    )


def print_report(cells: Cells, console: Console) -> None:
    """The claims, the rounds and the findings, on a terminal."""
    for claim in check_claims(cells):
        console.print(f"[bold]{claim.claim}[/]: {claim.reproduced}", highlight=False)
        for label in ("paper", "ours", "why"):
            if text := getattr(claim, label):
                console.print(f"  {label}: {text}", markup=False, highlight=False)
    short = {name: ROUNDS[name] for name in ("batch", "system", "rounds", "emitted/round")}
    short["draft\npositions"] = ROUNDS["draft positions"]
    short["outputs as\njaxspec's"] = ROUNDS["outputs as jaxspec's"]
    rows = rounds_rows(cells)
    table = TextTable.of_columns("rounds", short, rows, group=lambda row: row["batch_size"])
    console.print(table)
    for sentence in findings(cells):
        console.print(f"- {sentence}", markup=False, highlight=False)


# ---- findings in words


def findings(cells: Cells) -> list[str]:
    """Sentences, each based on figures of this study."""
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
    for cell in of_kind(cells, "rounds-"):
        systems, listed_rounds = cell["systems"], cell["ideal_rounds"]
        rounds = rounds_of(cell)
        listed = ", ".join(f"{name} {n}" for name, n in rounds.items())
        over = rounds["jaxspec"] / listed_rounds - 1
        read = systems["jaxspec"]["draft_positions"]
        bound = systems["jaxspec"]["num_drafted"] + systems["jaxspec"]["num_committed"]
        found.append(
            f"Rounds at batch {cell['batch_size']}, {cell['num_prompts']} prompts: {listed}; the "
            f"list schedule of the same requests is {listed_rounds}, jaxspec needs {over:.1%} "
            f"more. Its draft model read {read} token-positions, {read / bound:.0%} of drafted + "
            "committed."
        )
    ours = sorted(
        (cell for cell in decoded if cell["system"] == "jaxspec"),
        key=lambda cell: cell["batch_size"],
    )
    if len(ours) > 1:
        listed = "; ".join(
            f"batch {cell['batch_size']}: {cell['tokens_per_s']:.0f} ({cell['ratio_to_plain']:.2f} "
            f"times plain decoding's {cell['plain_tokens_per_s']:.0f})"
            for cell in ours
        )
        found.append(f"Throughput of jaxspec, tokens/s: {listed}.")
    aligned, ragged = (
        [
            shares(cell["time_breakdown"])["align"]
            for cell in broken_down(cells)
            if cell["speculates"] and cell["layout"] == layout
        ]
        for layout in ("aligned", "ragged")
    )
    if aligned and ragged:
        found.append(
            f"Alignment takes {min(aligned):.1%} to {max(aligned):.1%} of the time of the aligned "
            f"layout, and {max(ragged):.1%} of the ragged one's: its program holds no realignment."
        )
    busiest = max((cell.get("load_average") or 0.0 for cell in cells.values()), default=0.0)
    num_cpus = next(iter(cells.values()))["provenance"]["devices"]["cpu_count"] if cells else 1
    if (remark := load_remark(busiest, num_cpus)) is not None:
        found.append(f"{remark} Rounds, positions and tokens do not depend on it.")
    replays = cells.get("grouping", {}).get("replays")
    if replays:
        agrees = all(replay["compiled"] == replay["replayed"] for replay in replays)
        found.append(
            "Grouping rates are replayed from what each row emitted; the replay "
            + ("agrees" if agrees else "does NOT agree")
            + f" with the counters of all {len(replays)} compiled pools."
        )
    return found


# ---- plots


def make_plots(cells: Cells) -> list[Plot]:
    """The plots for which there are cells.

    Raises:
      SettingError: matplotlib is not installed.
    """
    draws = (_plot_throughput, _plot_rounds, _plot_time_breakdown, _plot_grouping, _plot_serving)
    return [plot for draw in draws if (plot := draw(cells)) is not None]


def _panels(*titles: str, width_ratios: Sequence[float] = (3, 2), height: float = 3.7) -> Any:
    """A figure, and its axes side by side; those of published figures are tinted."""
    figure, axes = new_figure(
        1, len(titles), size=(9.6, height), width_ratios=width_ratios, squeeze=False
    )
    for each, title in zip(axes[0], titles, strict=True):
        each.set_title(title, fontsize=9)
        if title.startswith("published"):
            each.set_facecolor("#f4f1ea")
    return figure, axes[0]


def _log_2(axes: Any, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter("{x:g}")


def _plot_throughput(cells: Cells) -> Plot | None:
    decoded = [cell for cell in of_kind(cells, "decode-") if cell["system"] in COLOURS]
    if not decoded:
        return None
    pd = import_extra("pandas", "plots")
    # Relative to alternating runs of plain decoding, because cells run one after another and a
    # machine's speed varies.
    ours = pd.DataFrame(decoded).pivot(
        index="batch_size", columns="system", values="ratio_to_plain"
    )
    there = pd.DataFrame(theirs.SERVING).map(lambda found: found["tokens_per_s"])
    figure, axes = _panels("measured here, in turns", "published: simulated serving, A100")
    ylabels = ("tokens/s over plain decoding's", "tokens/s")
    for each, rates, marker, ylabel in zip(axes, (ours, there), "os", ylabels, strict=True):
        for system in rates:
            style = f"{marker}--" if system == PLAIN else f"{marker}-"
            each.plot(rates[system].dropna(), style, color=COLOURS[system], label=system)
        _log_2(each, "batch size")
        each.set(ylabel=ylabel, ylim=(0, None))
        each.legend(frameon=False, fontsize=8)
    return Plot(name="throughput", caption="Throughput against batch size", figure=figure)


def _plot_rounds(cells: Cells) -> Plot | None:
    found = of_kind(cells, "rounds-")
    if not found:
        return None
    titles = [f"batch {cell['batch_size']}" for cell in found]
    figure, axes = _panels(*titles, width_ratios=[1] * len(found))
    for each, cell in zip(axes, found, strict=True):
        rounds = rounds_of(cell) | {"list schedule": cell["ideal_rounds"]}
        colours = [COLOURS.get(name, "#bdc3c7") for name in rounds]
        bars = each.barh(list(rounds), list(rounds.values()), color=colours)
        each.bar_label(bars, padding=3, fontsize=8)
        each.invert_yaxis()
        most = 1.15 * max(rounds.values())
        each.set(xlabel=f"rounds for {cell['num_prompts']} prompts", xlim=(0, most))
        each.tick_params(axis="y", labelsize=8)
    caption = "Rounds: the same prompts, tokens and draft length"
    return Plot(name="rounds", caption=caption, figure=figure)


def _plot_time_breakdown(cells: Cells) -> Plot | None:
    found = [cell for cell in broken_down(cells) if cell["system"] in NAMED]
    if not found:
        return None
    pd = import_extra("pandas", "plots")
    ours = {
        f"{cell['system']}, batch {cell['batch_size']}": shares(cell["time_breakdown"])
        for cell in sorted(found, key=lambda cell: cell["batch_size"])
    }
    published = pd.DataFrame(theirs.TIME_BREAKDOWN).loc[["draft", "verify", "overhead"]]
    figure, axes = _panels(
        "measured here: shares of the wall time",
        "published: Vicuna-7B, A100, batch 4",
        height=1.8 + 0.24 * len(found),
    )
    handles = {}
    # Negative parts (those that are cheaper inside the loop) cannot be drawn.
    for each, per_cent in (
        (axes[0], 100 * pd.DataFrame(ours).clip(lower=0)),
        (axes[1], published.rename({"overhead": "overhead (published)"})),
    ):
        per_cent.T.plot.barh(ax=each, stacked=True, color=PART_COLOURS, width=0.8, legend=False)
        handles |= {bars.get_label(): bars for bars in each.containers}
        each.set_xlabel("% of the time")
        each.tick_params(axis="y", labelsize=8)
        each.invert_yaxis()
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=8, frameon=False, fontsize=8
    )
    return Plot(name="time-breakdown", caption="Where the time goes", figure=figure)


def _plot_grouping(cells: Cells) -> Plot | None:
    if not cells.get("grouping", {}).get("rates"):
        return None
    rates = import_extra("pandas", "plots").DataFrame(cells["grouping"]["rates"])
    window, middle = paper_window(cells["grouping"]), nearest(8, rates.batch_size.unique())
    titles = f"here, pool of {window}", f"here, batch {middle}", "published: Multi30k, pool of 50"
    figure, axes = _panels(*titles, width_ratios=(1, 1, 1), height=4.3)
    styles = {"ragged": "-", "aligned": "--"}
    colours = {"random lengths": "#2980b9", "equal lengths": "#d35400"}
    for axis, chosen, along in (
        (axes[0], rates[rates.window_size == window], "batch_size"),
        (axes[1], rates[rates.batch_size == middle], "window_size"),
    ):
        for (lengths, layout), line in chosen.groupby(["lengths", "layout"], sort=False):
            for kind, marker, alpha in (("by_calls", "o", 1), ("by_rows", "^", 0.45)):
                label = f"{lengths.split()[0]}, {layout}, {kind[3:]}"
                style = {"color": colours[lengths], "alpha": alpha, "markersize": 4, "label": label}
                axis.plot(line[along], 100 * line[kind], styles[layout] + marker, **style)
    for lengths, by_size in theirs.GROUPING.items():
        axes[2].plot(list(by_size), list(by_size.values()), "s-", color=colours[lengths])
    for axis, label in zip(axes, ("batch size", "rows of the pool", "batch size"), strict=True):
        _log_2(axis, label)
        axis.set_ylim(-3, 103)
    axes[0].set_ylabel("grouping rate, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return Plot(name="grouping", caption="Grouping rate of the same-length pool", figure=figure)


def _plot_serving(cells: Cells) -> Plot | None:
    found = of_kind(cells, "serving-")
    if not found:
        return None
    pd = import_extra("pandas", "plots")
    size = max(cell["batch_size"] for cell in found)
    ours = {cell["system"]: cell["latency_s"] for cell in found if cell["batch_size"] == size}
    there = {system: by_size[8] for system, by_size in theirs.SERVING.items()}
    figure, axes = _panels(f"measured here, batch {size}", "published: A100, batch 8")
    for each, by_system in zip(axes, (ours, there), strict=True):
        latency_s = pd.DataFrame(by_system).loc[["p50", "p90", "p99"]].rename(str.upper)
        colours = [COLOURS.get(system, "#34495e") for system in by_system]
        latency_s.plot.bar(ax=each, rot=0, width=0.8, color=colours)
        highest = latency_s.to_numpy().max()
        each.set(ylabel="request latency, s", ylim=(0, 1.35 * highest))  # room for the legend
        each.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return Plot(name="serving", caption="Request latency under Poisson arrivals", figure=figure)


def _setup(document: dict[str, Any]) -> dict[str, str]:
    """What was run on what."""
    config, devices = document["config"], document["devices"]
    prompts = ", ".join(f"{name} (sha256 {sha[:12]})" for name, sha in document["inputs"].items())
    synthetic = "; drafts of an oracle: SYNTHETIC" if document["is_synthetic"] else ""
    spec_bench = ": Spec-Bench's questions" if document["is_spec_bench"] else ""
    return {
        "models": f"{config['target']} drafted for by {config['draft']}{synthetic}",
        "prompts": f"{prompts}{spec_bench}, cut to {config['max_prompt_tokens']} tokens; "
        f"{config['max_tokens']} new tokens",
        "draft length": str(config["draft_length"]),
        "machine": f"{devices['num_devices']} x {', '.join(devices['kinds'])} ({devices['host']}, "
        f"{devices['cpu_count']} CPUs)",
        "versions": "jax {jax}, python {python}".format_map(document["versions"]),
        "commit": document["commit"] or "not a checkout",
    }
