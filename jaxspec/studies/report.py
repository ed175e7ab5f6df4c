"""Findings, plots and page of the study: our figures, and beside them the published ones.

Published figures are of other models, other hardware and other code. They are drawn in panels of
their own, with the hardware named.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.documents import write_document
from jaxspec.runtime.report import Plot, TextTable, new_figure, write_page
from jaxspec.studies import published_figures as theirs
from jaxspec.studies.claims import check_claims
from jaxspec.studies.tables import (
    ROUNDS_COLUMNS,
    broken_down,
    claims_table,
    decodings,
    make_tables,
    of_kind,
    paper_window,
    rounds_rows,
    shares,
)
from jaxspec.studies.workload import NAMED, PLAIN

Cell = dict[str, Any]

COLOURS = {
    "EQSPEC": "#b5651d",
    "EXSPEC": "#8e44ad",
    "jaxspec": "#2a7f62",
    PLAIN: "#7f8c8d",
}
PART_COLOURS = {
    "draft": "#5dade2",
    "verify": "#1f618d",
    "align": "#c0392b",
    "regroup": "#e59866",
    "rest of the rounds": "#aab7b8",
    "prefill": "#a9dfbf",
    "host": "#f4d03f",
    "overhead (published)": "#7b241c",
}


def write_report(document: dict[str, Any], output: pathlib.Path) -> None:
    """Writes `study.json`, a PNG file per plot and `study.html` with all of them.

    Args:
      document: of `Study.run`; of its cells what only serves resuming is left out of the JSON file.
      output: the directory.

    Raises:
      SettingError: matplotlib is not installed, or a file cannot be written.
    """
    cells = document["cells"]
    plots = make_plots(cells)
    kept = {
        name: {key: value for key, value in cell.items() if key not in ("rows", "token_ids")}
        for name, cell in cells.items()
    }
    claims = [dataclasses.asdict(claim) for claim in check_claims(cells)]
    found = findings(cells)
    write_document(
        document | {"claims": claims, "findings": found, "cells": kept}, output / "study.json"
    )
    for plot in plots:
        write_atomically(output / f"{plot.name}.png", plot.png())
    write_page(
        output / "study.html",
        title="Study of batched speculative decoding",
        summary=claims_table(cells),
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
        tables=[TextTable.of_values("Setup", dict(_setup(document))), *make_tables(cells)],
        plots=plots,
    )


def print_report(cells: dict[str, Cell], console: Console) -> None:
    """The claims, the rounds and the findings, on a terminal."""
    for claim in check_claims(cells):
        console.print(f"[bold]{claim.claim}[/]: {claim.reproduced}", highlight=False)
        for label, text in (("paper", claim.paper), ("ours", claim.ours), ("why", claim.why)):
            if text:
                console.print(f"  {label}: {text}", markup=False, highlight=False)
    short = {name: ROUNDS_COLUMNS[name] for name in ("batch", "system", "rounds", "emitted/round")}
    short |= {
        "draft\npositions": ROUNDS_COLUMNS["draft positions"],
        "outputs as\njaxspec's": ROUNDS_COLUMNS["outputs as jaxspec's"],
    }
    console.print(
        TextTable.of_columns(
            "rounds", short, rounds_rows(cells), group=lambda row: row["batch_size"]
        )
    )
    for sentence in findings(cells):
        console.print(f"- {sentence}", markup=False, highlight=False)


# ---- what was found, in words


def findings(cells: dict[str, Cell]) -> list[str]:
    """Sentences, each from figures of this study."""
    found = []
    decoded = decodings(cells)
    num_faults = sum(cell["equivalence"]["num_faults"] for cell in decoded)
    num_outputs = sum(cell["equivalence"]["num_outputs"] for cell in decoded)
    num_ties = sum(cell["equivalence"]["num_ties"] for cell in decoded)
    if decoded:
        found.append(
            f"Equivalence: of {num_outputs} outputs {num_outputs - num_ties - num_faults} equal "
            f"batch-1 plain decoding in every token, {num_ties} diverge from it at proven ties, "
            f"and {num_faults} otherwise."
        )
    same = [_are_same_bits(cells, size) for size in _sizes(cells)]
    if True in same or False in same:
        holds = False not in same
        found.append(
            "Scheduling changes no token: at each batch size the ragged layout's outputs are "
            + ("the same under every scheduler." if holds else "NOT the same: this is a bug.")
        )
    for cell in of_kind(cells, "rounds-"):
        systems, ideal = cell["systems"], cell["ideal_rounds"]
        rounds = {name: system["schedule"]["num_rounds"] for name, system in systems.items()}
        listed = ", ".join(f"{name} {n}" for name, n in rounds.items())
        over = rounds["jaxspec"] / ideal - 1
        read = systems["jaxspec"]["draft_positions"]
        bound = systems["jaxspec"]["num_drafted"] + systems["jaxspec"]["num_committed"]
        found.append(
            f"Rounds at batch {cell['batch_size']}, {cell['num_prompts']} prompts: {listed}; the "
            f"ideal schedule of jaxspec's acceptance is {ideal}, jaxspec needs {over:.1%} more. "
            f"Its draft model read {read} token-positions, {read / bound:.0%} of drafted + "
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
    shares = {
        layout: [
            cell["time_breakdown"]["seconds"]["align"] / cell["time_breakdown"]["wall_s"]
            for cell in decoded
            if cell["speculates"] and cell["layout"] == layout and "time_breakdown" in cell
        ]
        for layout in ("aligned", "ragged")
    }
    if shares["aligned"] and shares["ragged"]:
        found.append(
            f"Alignment takes {min(shares['aligned']):.1%} to {max(shares['aligned']):.1%} of the "
            f"time of the aligned layout, and {max(shares['ragged']):.1%} of the ragged one's: its "
            "program holds no realignment."
        )
    busiest = max((cell.get("load_average") or 0.0 for cell in cells.values()), default=0.0)
    num_cpus = next(iter(cells.values()))["provenance"]["devices"]["cpu_count"] if cells else 1
    if busiest > 2 * num_cpus:
        found.append(
            f"Times are not to be trusted: other work ran on this machine (load average up to "
            f"{busiest:.1f} on {num_cpus} CPUs). Rounds, positions and tokens do not depend on it."
        )
    grouping = cells.get("grouping")
    if grouping and grouping["replays"]:
        agrees = all(replay["compiled"] == replay["replayed"] for replay in grouping["replays"])
        found.append(
            "Grouping rates are replayed from what each row emitted; the replay "
            + ("agrees" if agrees else "does NOT agree")
            + f" with the counters of all {len(grouping['replays'])} compiled pools."
        )
    return found


def _are_same_bits(cells: dict[str, Cell], size: int) -> bool | None:
    """Whether the ragged layout's speculative outputs at a batch size are equal to the token."""
    digests = [
        cell["outputs_sha256"]
        for cell in decodings(cells)
        if cell["layout"] == "ragged" and cell["speculates"] and cell["batch_size"] == size
    ]
    return len(set(digests)) == 1 if len(digests) > 1 else None


# ---- plots


def make_plots(cells: dict[str, Cell]) -> list[Plot]:
    """The plots that the cells suffice for.

    Raises:
      SettingError: matplotlib is not installed.
    """

    def panels(*titles: str, width_ratios: Sequence[float] = (3, 2)) -> tuple[Any, Any]:
        figure, axes = new_figure(
            1, len(titles), size=(9.6, 3.7), width_ratios=width_ratios[: len(titles)]
        )
        for each, title in zip(np.atleast_1d(axes), titles, strict=True):
            each.set_title(title, fontsize=9)
            if title.startswith("published"):
                each.set_facecolor("#f4f1ea")
        return figure, np.atleast_1d(axes)

    plots = []
    for draw in (
        _plot_throughput,
        _plot_rounds,
        _plot_time_breakdown,
        _plot_grouping,
        _plot_serving,
    ):
        plot = draw(cells, panels)
        if plot is not None:
            plots.append(plot)
    return plots


def _plot_throughput(cells: dict[str, Cell], panels) -> Plot | None:
    rates: dict[str, dict[int, float]] = {}
    for cell in decodings(cells):
        if cell["system"] in COLOURS:
            rates.setdefault(cell["system"], {})[cell["batch_size"]] = cell["tokens_per_s"]
    if not rates:
        return None
    figure, (ours, published) = panels("measured here", "published: simulated serving, A100")
    for system, by_size in rates.items():
        sizes = sorted(by_size)
        ours.plot(
            sizes,
            [by_size[size] for size in sizes],
            marker="o",
            color=COLOURS[system],
            label=system,
            linestyle="--" if system == PLAIN else "-",
        )
    for system, by_size in theirs.SERVING.items():
        rates_there = [found["tokens_per_s"] for found in by_size.values()]
        published.plot(list(by_size), rates_there, "s-", color=COLOURS[system], label=system)
    for axes in (ours, published):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="batch size", ylabel="tokens/s", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, fontsize=8)
    return Plot(name="throughput", caption="Throughput against batch size", figure=figure)


def _plot_rounds(cells: dict[str, Cell], panels) -> Plot | None:
    found = of_kind(cells, "rounds-")
    if not found:
        return None
    figure, axes = panels(
        *(f"batch {cell['batch_size']}" for cell in found), width_ratios=[1] * len(found)
    )
    for each, cell in zip(axes, found, strict=True):
        names = [*cell["systems"], "ideal"]
        rounds = [system["schedule"]["num_rounds"] for system in cell["systems"].values()]
        bars = each.barh(
            names,
            [*rounds, cell["ideal_rounds"]],
            color=[_colour(name) for name in cell["systems"]] + ["#2c3e50"],
        )
        each.bar_label(bars, padding=3, fontsize=8)
        each.invert_yaxis()
        each.set(xlabel=f"rounds for {cell['num_prompts']} prompts", xlim=(0, 1.15 * max(rounds)))
        each.tick_params(axis="y", labelsize=8)
    return Plot(
        name="rounds", caption="Rounds: the same prompts, tokens and draft length", figure=figure
    )


def _plot_time_breakdown(cells: dict[str, Cell], panels) -> Plot | None:
    found = [cell for cell in broken_down(cells) if cell["system"] in NAMED]
    if not found:
        return None
    figure, (ours, published) = panels(
        "measured here: shares of the wall time", "published: Vicuna-7B, A100, batch 4"
    )
    figure.set_size_inches(9.6, 1.8 + 0.24 * len(found))
    bars = [
        (f"{cell['system']}, batch {cell['batch_size']}", shares(cell["time_breakdown"]))
        for cell in sorted(found, key=lambda cell: cell["batch_size"])
    ]
    _stack(ours, bars)
    _stack(
        published,
        [
            (
                name,
                {
                    "draft": shares["draft"] / 100,
                    "verify": shares["verify"] / 100,
                    "overhead (published)": shares["overhead"] / 100,
                },
            )
            for name, shares in theirs.TIME_BREAKDOWN.items()
        ],
    )
    handles = [*ours.get_legend_handles_labels()[0], *published.get_legend_handles_labels()[0][-1:]]
    figure.legend(
        handles, [handle.get_label() for handle in handles], loc="outside lower center", ncols=8,
        frameon=False, fontsize=8,
    )  # fmt: skip
    return Plot(name="time-breakdown", caption="Where the time goes", figure=figure)


def _stack(axes: Any, bars: Sequence[tuple[str, dict[str, float]]]) -> None:
    names = [name for name, _ in bars]
    left = np.zeros(len(bars))
    for part in bars[0][1]:
        # What is negative (parts that are cheaper inside the loop) has no length to draw.
        widths = np.array([max(shares[part], 0.0) for _, shares in bars]) * 100
        axes.barh(range(len(bars)), widths, left=left, color=PART_COLOURS[part], label=part)
        left += widths
    axes.set(yticks=range(len(bars)), yticklabels=names, xlabel="% of the time")
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()


def _plot_grouping(cells: dict[str, Cell], panels) -> Plot | None:
    grouping = cells.get("grouping")
    if not grouping or not grouping["rates"]:
        return None
    window = paper_window(grouping)
    sizes = sorted({rate["batch_size"] for rate in grouping["rates"]})
    middle = min(sizes, key=lambda size: abs(size - 8))
    figure, axes = panels(
        f"here, pool of {window}",
        f"here, batch {middle}",
        "published: Multi30k, pool of 50",
        width_ratios=(1, 1, 1),
    )
    styles = {"ragged": "-", "aligned": "--"}
    colours = {"random lengths": "#2980b9", "equal lengths": "#d35400"}
    for axis, fixed, wanted, along in (
        (axes[0], "window_size", window, "batch_size"),
        (axes[1], "batch_size", middle, "window_size"),
    ):
        for lengths in colours:
            for layout, style in styles.items():
                chosen = [
                    rate
                    for rate in grouping["rates"]
                    if rate["lengths"] == lengths
                    and rate["layout"] == layout
                    and rate[fixed] == wanted
                ]
                places = [rate[along] for rate in chosen]
                for kind, marker in (("by_calls", "o"), ("by_rows", "^")):
                    axis.plot(
                        places,
                        [100 * rate[kind] for rate in chosen],
                        style,
                        color=colours[lengths],
                        marker=marker,
                        markersize=4,
                        alpha=1 if kind == "by_calls" else 0.45,
                        label=f"{lengths.split()[0]}, {layout}, {kind[3:]}",
                    )
    for lengths, by_size in theirs.GROUPING.items():
        axes[2].plot(list(by_size), list(by_size.values()), "s-", color=colours[lengths])
    for axis, label in zip(axes, ("batch size", "rows of the pool", "batch size"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set(xlabel=label, ylim=(-3, 103))
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("grouping rate, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.set_size_inches(9.6, 4.3)
    return Plot(name="grouping", caption="Grouping rate of the same-length pool", figure=figure)


def _plot_serving(cells: dict[str, Cell], panels) -> Plot | None:
    found = of_kind(cells, "serving-")
    if not found:
        return None
    size = max(cell["batch_size"] for cell in found)
    figure, (ours, published) = panels(f"measured here, batch {size}", "published: A100, batch 8")
    by_system = {cell["system"]: cell["latency_s"] for cell in found if cell["batch_size"] == size}
    there = {system: by_size[8] for system, by_size in theirs.SERVING.items()}
    for axes, latencies in ((ours, by_system), (published, there)):
        width = 0.8 / len(latencies)
        for index, (system, latency) in enumerate(latencies.items()):
            axes.bar(
                np.arange(3) + width * (index - (len(latencies) - 1) / 2),
                [latency[name] for name in ("p50", "p90", "p99")],
                width,
                color=COLOURS.get(system, "#34495e"),
                label=system,
            )
        highest = max(latency["p99"] for latency in latencies.values())
        axes.set(
            xticks=range(3),
            xticklabels=("P50", "P90", "P99"),
            ylabel="request latency, s",
            ylim=(0, 1.35 * highest),  # room for the legend
        )
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return Plot(name="serving", caption="Request latency under Poisson arrivals", figure=figure)


# ---- cells by kind


def _sizes(cells: dict[str, Cell]) -> list[int]:
    return sorted({cell["batch_size"] for cell in decodings(cells)})


def _colour(name: str) -> str:
    return next((colour for known, colour in COLOURS.items() if known in name), "#bdc3c7")


def _setup(document: dict[str, Any]) -> list[tuple[str, str]]:
    """What was run on what."""
    config, devices = document["config"], document["devices"]
    prompts = ", ".join(f"{name} (sha256 {sha[:12]})" for name, sha in document["inputs"].items())
    synthetic = "; drafts of an oracle: SYNTHETIC" if document["is_synthetic"] else ""
    versions = document["versions"]
    return [
        ("models", f"{config['target']} drafted for by {config['draft']}{synthetic}"),
        (
            "prompts",
            prompts
            + (": Spec-Bench's questions" if document["is_spec_bench"] else "")
            + f", cut to {config['max_prompt_tokens']} tokens; {config['max_tokens']} new tokens",
        ),
        ("draft length", str(config["draft_length"])),
        (
            "machine",
            f"{devices['num_devices']} x {', '.join(devices['kinds'])} ({devices['host']}, "
            f"{devices['cpu_count']} CPUs)",
        ),
        ("versions", f"jax {versions['jax']}, python {versions['python']}"),
        ("commit", document["commit"] or "not a checkout"),
    ]
