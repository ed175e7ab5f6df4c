"""Tables, plots and page of the study: our figures, and beside them the published ones.

Published figures are of other models, other hardware and other code. They are drawn in panels of
their own, with the hardware named.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import numpy as np

from jaxspec.errors import SettingError
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.report import TextTable
from jaxspec.studies import published_figures as theirs

Cell = dict[str, Any]

NAMED = ("EQSPEC", "EXSPEC", "jaxspec")  # systems that every batch size is measured for
PLAIN = "plain, ragged + continuous"
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
    "seat": "#e59866",
    "rest of the rounds": "#aab7b8",
    "prefill": "#a9dfbf",
    "host": "#f4d03f",
    "overhead (published)": "#7b241c",
}
NONE = "-"


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
    tables = make_tables(cells)
    found = findings(cells)
    write_atomically(
        output / "study.json",
        json.dumps(document | {"findings": found, "cells": kept}, indent=1).encode() + b"\n",
    )
    images = []
    for name, caption, figure in plots:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
        write_atomically(output / f"{name}.png", buffer.getvalue())
        images.append((caption, base64.b64encode(buffer.getvalue()).decode()))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_PAGE).render(
        findings=found,
        images=images,
        tables=tables,
        setup=_setup(document),
        published=f"{theirs.SOURCE}; {theirs.HARDWARE}",
    )
    write_atomically(output / "study.html", page.encode())


# ---- what was found, in words


def findings(cells: dict[str, Cell]) -> list[str]:
    """Sentences, each from figures of this study."""
    found = []
    decoded = _decodings(cells)
    num_faults = sum(cell["equivalence"]["num_faults"] for cell in decoded)
    num_outputs = sum(cell["equivalence"]["num_outputs"] for cell in decoded)
    num_ties = sum(cell["equivalence"]["num_ties"] for cell in decoded)
    if decoded:
        found.append(
            f"Equivalence: of {num_outputs} outputs {num_outputs - num_ties - num_faults} equal "
            f"batch-1 plain decoding in every token, {num_ties} part from it at proven ties, and "
            f"{num_faults} otherwise."
        )
    same = [_are_same_bits(cells, size) for size in _sizes(cells)]
    if True in same or False in same:
        holds = False not in same
        found.append(
            "Scheduling changes no token: at each batch size the ragged layout's outputs are "
            + ("the same under every scheduler." if holds else "NOT the same: this is a bug.")
        )
    for cell in _of_kind(cells, "rounds-"):
        systems, ideal = cell["systems"], cell["ideal_rounds"]
        rounds = {name: system["schedule"]["num_rounds"] for name, system in systems.items()}
        listed = ", ".join(f"{name} {n}" for name, n in rounds.items())
        over = rounds["jaxspec"] / ideal - 1
        read = systems["jaxspec"]["draft_positions"]
        bound = systems["jaxspec"]["num_drafted"] + systems["jaxspec"]["num_committed"]
        found.append(
            f"Rounds at batch {cell['batch_size']}, {cell['num_prompts']} prompts: {listed}; the "
            f"ideal schedule of its acceptance is {ideal}, jaxspec needs {over:.1%} more. Its "
            f"draft model read {read} token-positions, {read / bound:.0%} of drafted + committed."
        )
    rates = {
        cell["batch_size"]: cell["tokens_per_s"] for cell in decoded if cell["system"] == "jaxspec"
    }
    if len(rates) > 1:
        sizes = sorted(rates)
        rises = all(rates[a] < rates[b] for a, b in itertools.pairwise(sizes))
        listed = ", ".join(f"{rates[size]:.0f}" for size in sizes)
        found.append(
            f"Throughput of jaxspec at batch {', '.join(map(str, sizes))}: {listed} tokens/s; it "
            + ("rises with every batch size." if rises else "does not rise with every batch size.")
        )
    shares = {
        layout: [
            cell["anatomy"]["seconds"]["align"] / cell["anatomy"]["wall_s"]
            for cell in decoded
            if cell["speculates"] and cell["layout"] == layout and "anatomy" in cell
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
        for cell in _decodings(cells)
        if cell["layout"] == "ragged" and cell["speculates"] and cell["batch_size"] == size
    ]
    return len(set(digests)) == 1 if len(digests) > 1 else None


# ---- tables


def make_tables(cells: dict[str, Cell]) -> list[TextTable]:
    """All tables, ours and the published ones."""
    makers: Sequence[Callable[[dict[str, Cell]], TextTable | None]] = (
        rounds_table,
        equivalence_table,
        _published_equivalence,
        throughput_table,
        anatomy_table,
        _published_anatomy,
        grouping_table,
        serving_table,
        _published_serving,
    )
    return [table for make in makers if (table := make(cells)) is not None]


def rounds_table(cells: dict[str, Cell]) -> TextTable | None:
    """Rounds and token-positions: what does not depend on the machine."""
    rows = []
    for cell in _of_kind(cells, "rounds-"):
        size = str(cell["batch_size"])
        for name, system in cell["systems"].items():
            schedule, read = system["schedule"], system["draft_positions"]
            bound = system["num_drafted"] + system["num_committed"]
            rows.append(
                (
                    size,
                    name,
                    str(schedule["num_rounds"]),
                    f"{schedule['num_rows'] / schedule['num_rounds'] / cell['batch_size']:.0%}",
                    f"{system['acceptance']['emitted_per_round']:.2f}",
                    str(system["target_positions"]),
                    str(read),
                    f"{read / bound:.2f}",
                    f"{system['num_equal_to_jaxspec']} of {cell['num_prompts']}",
                )
            )
        rows.append(
            (size, "ideal, batch_size refilled at once", str(cell["ideal_rounds"]), *[""] * 6)
        )
        rows.append((size, "ideal, static batches", str(cell["ideal_rounds_static"]), *[""] * 6))
    if not rows:
        return None
    return TextTable(
        title="Rounds and token-positions",
        header=(
            "batch",
            "system",
            "rounds",
            "batch_size used",
            "emitted/round",
            "target positions",
            "draft positions",
            "draft positions / (drafted + committed)",
            "outputs as jaxspec's",
        ),
        rows=rows,
    )


def equivalence_table(cells: dict[str, Cell]) -> TextTable | None:
    """Outputs beside batch-1 plain decoding, in the shape of the paper's table 1."""
    rows = [
        (
            cell["system"],
            str(cell["batch_size"]),
            str(cell["equivalence"]["num_outputs"]),
            _pair(cell["equivalence"]["exact_text"], cell["equivalence"]["partial_text"]),
            _percent(cell["equivalence"]["exact_tokens"]),
            str(cell["equivalence"]["num_ties"]),
            str(cell["equivalence"]["num_faults"]),
        )
        for cell in _decodings(cells)
    ]
    if not rows:
        return None
    return TextTable(
        title="Equivalence with batch-1 plain decoding: the paper's E / P on text, then tokens",
        header=("system", "batch", "outputs", "E / P %", "tokens equal", "ties", "faults"),
        rows=rows,
    )


def throughput_table(cells: dict[str, Cell]) -> TextTable | None:
    """Wall time and rounds of every cell."""
    rows = [
        (
            cell["system"],
            str(cell["batch_size"]),
            str(cell["num_requests"]),
            f"{cell['tokens_per_s']:.0f}",
            f"{cell['ratio_to_plain']:.2f}",
            f"{cell['acceptance']['emitted_per_round']:.2f}",
            str(cell["schedule"]["num_rounds"]),
            str(cell["ideal_rounds"]),
            str(cell["schedule"]["num_realignments"]),
        )
        for cell in _decodings(cells)
    ]
    if not rows:
        return None
    return TextTable(
        title="Throughput (whole runs, prompts read included) and rounds",
        header=(
            "system",
            "batch",
            "requests",
            "tokens/s",
            "times the plain loop of that batch, in turns",
            "emitted/round",
            "rounds",
            "ideal",
            "realignments",
        ),
        rows=rows,
    )


def anatomy_table(cells: dict[str, Cell]) -> TextTable | None:
    """Where the time goes, in the shape of the paper's table 2."""
    rows = []
    for cell in _dissected(cells):
        anatomy, schedule = cell["anatomy"], cell["schedule"]
        shares = _shares(anatomy)
        part_ms = {name: 1e3 * seconds for name, seconds in anatomy["part_s"].items()}
        drafted = cell["acceptance"]["num_draft_tokens"]
        accepted = cell["acceptance"]["num_accepted_tokens"]
        rows.append(
            (
                cell["system"],
                str(cell["batch_size"]),
                str(schedule["num_rounds"]),
                f"{cell['num_tokens'] / schedule['num_rounds']:.1f}",
                f"{accepted / drafted:.3f}" if drafted else NONE,
                f"{part_ms.get('draft', 0):.1f}",
                f"{part_ms['target'] + part_ms.get('verify', 0):.1f}",
                f"{part_ms['align']:.2f}",
                *(f"{100 * shares[name]:.1f}" for name in anatomy["seconds"]),
            )
        )
    if not rows:
        return None
    parts = list(_dissected(cells)[0]["anatomy"]["seconds"])
    return TextTable(
        title=(
            "Where the time goes. Milliseconds per call: parts compiled alone, timed on a state "
            "from the middle of the run. Shares of the wall time, %: draft, verify, align and seat "
            "are calls times milliseconds; rounds, prefill and host are timed in the run itself"
        ),
        header=(
            "system",
            "batch",
            "calls",
            "tokens/call",
            "acceptance",
            "draft ms",
            "verify ms",
            "align ms",
            *(f"{name} %" for name in parts),
        ),
        rows=rows,
    )


def grouping_table(cells: dict[str, Cell]) -> TextTable | None:
    """Grouping rates of the pool at the paper's window, ours and theirs."""
    grouping = cells.get("grouping")
    if not grouping:
        return None
    window = _paper_window(grouping)
    rows = []
    for rate in grouping["rates"]:
        if rate["window_size"] == window:
            published = theirs.GROUPING[rate["lengths"]].get(rate["batch_size"])
            rows.append(
                (
                    rate["lengths"],
                    rate["layout"],
                    str(rate["batch_size"]),
                    _percent(rate["by_calls"]),
                    _percent(rate["by_rows"]),
                    NONE if published is None else f"{published:.1f} %",
                )
            )
    return TextTable(
        title=(
            f"Grouping rate of a pool of {window} rows ({grouping['num_requests']} requests), and "
            "the published one (Multi30k, window 50, other models)"
        ),
        header=("prompts", "layout", "batch", "by calls", "by rows", "published, by calls"),
        rows=rows,
    )


def serving_table(cells: dict[str, Cell]) -> TextTable | None:
    """Request latency under Poisson arrivals, in the shape of the paper's table 4."""
    rows = [
        (
            cell["system"],
            str(cell["batch_size"]),
            f"{cell['arrivals_per_s']:.2f}",
            str(cell["num_requests"]),
            f"{cell['tokens_per_s']:.0f}",
            *(f"{cell['latency_s'][name]:.2f}" for name in ("p50", "p90", "p99")),
        )
        for cell in _of_kind(cells, "serving-")
    ]
    if not rows:
        return None
    return TextTable(
        title="Request latency under Poisson arrivals: the same arrivals for all",
        header=("system", "batch", "requests/s", "requests", "tokens/s", "P50 s", "P90 s", "P99 s"),
        rows=rows,
    )


def _published_equivalence(cells: dict[str, Cell]) -> TextTable:
    columns = [(model, batch) for model in theirs.MODELS for batch in (1, 4)]
    return TextTable(
        title=f"Published: equivalence, E / P % ({theirs.HARDWARE})",
        header=("method", *(f"{model}, batch {batch}" for model, batch in columns)),
        rows=[
            (
                method,
                *(
                    f"{found[column][0]:.1f} / {found[column][1]:.1f}" if column in found else NONE
                    for column in columns
                ),
            )
            for method, found in theirs.EQUIVALENCE.items()
        ],
    )


def _published_anatomy(cells: dict[str, Cell]) -> TextTable:
    return TextTable(
        title="Published: overhead anatomy (Vicuna-7B, A100, batch 4)",
        header=("system", "tokens/s", "calls", "verify ms", "verify %", "draft %", "overhead %"),
        rows=[
            (
                system,
                f"{found['tokens_per_s']:.1f}",
                f"{found['calls']:.0f}",
                f"{found['verify_ms']:.1f}",
                *(f"{found[name]:.1f}" for name in ("verify", "draft", "overhead")),
            )
            for system, found in theirs.ANATOMY.items()
        ],
    )


def _published_serving(cells: dict[str, Cell]) -> TextTable:
    return TextTable(
        title="Published: simulated serving (A100)",
        header=("system", "batch", "tokens/s", "P50 s", "P90 s", "P99 s"),
        rows=[
            (
                system,
                str(batch),
                f"{found['tokens_per_s']:.1f}",
                *(f"{found[name]:.2f}" for name in ("p50", "p90", "p99")),
            )
            for system, by_batch in theirs.SERVING.items()
            for batch, found in by_batch.items()
        ],
    )


# ---- plots


def make_plots(cells: dict[str, Cell]) -> list[tuple[str, str, Any]]:
    """Name, caption and matplotlib figure of each plot that the cells suffice for.

    Raises:
      SettingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError(
            "The study draws plots, and matplotlib is not installed; install it."
        ) from error

    def panels(*titles: str, width_ratios: Sequence[float] = (3, 2)) -> tuple[Any, Any]:
        figure = Figure(figsize=(9.6, 3.7), layout="constrained")
        axes = figure.subplots(1, len(titles), width_ratios=width_ratios[: len(titles)])
        for each, title in zip(np.atleast_1d(axes), titles, strict=True):
            each.set_title(title, fontsize=9)
            each.spines[["top", "right"]].set_visible(False)
            if title.startswith("published"):
                each.set_facecolor("#f4f1ea")
        return figure, np.atleast_1d(axes)

    plots = []
    for draw in (_plot_throughput, _plot_rounds, _plot_anatomy, _plot_grouping, _plot_serving):
        plot = draw(cells, panels)
        if plot is not None:
            plots.append(plot)
    return plots


def _plot_throughput(cells: dict[str, Cell], panels) -> tuple[str, str, Any] | None:
    rates: dict[str, dict[int, float]] = {}
    for cell in _decodings(cells):
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
    return "throughput", "Throughput against batch size", figure


def _plot_rounds(cells: dict[str, Cell], panels) -> tuple[str, str, Any] | None:
    found = _of_kind(cells, "rounds-")
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
    return "rounds", "Rounds: the same prompts, tokens and draft length", figure


def _plot_anatomy(cells: dict[str, Cell], panels) -> tuple[str, str, Any] | None:
    found = [cell for cell in _dissected(cells) if cell["system"] in (*NAMED, PLAIN)]
    if not found:
        return None
    figure, (ours, published) = panels(
        "measured here: shares of the wall time", "published: Vicuna-7B, A100, batch 4"
    )
    figure.set_size_inches(9.6, 1.8 + 0.24 * len(found))
    bars = [
        (f"{cell['system']}, batch {cell['batch_size']}", _shares(cell["anatomy"]))
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
            for name, shares in theirs.ANATOMY.items()
        ],
    )
    handles = [*ours.get_legend_handles_labels()[0], *published.get_legend_handles_labels()[0][-1:]]
    figure.legend(
        handles, [handle.get_label() for handle in handles], loc="outside lower center", ncols=8,
        frameon=False, fontsize=8,
    )  # fmt: skip
    return "anatomy", "Where the time goes", figure


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


def _plot_grouping(cells: dict[str, Cell], panels) -> tuple[str, str, Any] | None:
    grouping = cells.get("grouping")
    if not grouping or not grouping["rates"]:
        return None
    window = _paper_window(grouping)
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
    return "grouping", "Grouping rate of the same-length pool", figure


def _plot_serving(cells: dict[str, Cell], panels) -> tuple[str, str, Any] | None:
    found = _of_kind(cells, "serving-")
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
    return "serving", "Request latency under Poisson arrivals", figure


# ---- cells by kind


def _decodings(cells: dict[str, Cell]) -> list[Cell]:
    return [cell for name, cell in cells.items() if name.startswith("decode-")]


def _dissected(cells: dict[str, Cell]) -> list[Cell]:
    return [cell for cell in _decodings(cells) if "anatomy" in cell]


def _of_kind(cells: dict[str, Cell], prefix: str) -> list[Cell]:
    return [cell for name, cell in cells.items() if name.startswith(prefix)]


def _sizes(cells: dict[str, Cell]) -> list[int]:
    return sorted({cell["batch_size"] for cell in _decodings(cells)})


def _shares(anatomy: dict[str, Any]) -> dict[str, float]:
    return {name: seconds / anatomy["wall_s"] for name, seconds in anatomy["seconds"].items()}


def _paper_window(grouping: Cell) -> int:
    """The paper's window, or what comes nearest."""
    return min({rate["window_size"] for rate in grouping["rates"]}, key=lambda w: abs(w - 50))


def _colour(name: str) -> str:
    return next((colour for known, colour in COLOURS.items() if known in name), "#bdc3c7")


def _pair(exact: float | None, partial: float | None) -> str:
    if exact is None or partial is None:
        return NONE
    return f"{100 * exact:.1f} / {100 * partial:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


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


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Study of batched speculative decoding</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c1c; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .8rem .2rem 0; text-align: left;
  vertical-align: top; font-variant-numeric: tabular-nums; }
h2 { font-size: 1rem; margin-top: 2rem; }
.published { background: #f4f1ea; padding: .1rem .8rem; }
figure { margin: 0 0 1.5rem; } figure img { max-width: 100%; }
</style></head><body>
<h1>Study of batched speculative decoding</h1>
<ul>{% for sentence in findings %}<li>{{ sentence }}</li>{% endfor %}</ul>
<table>{% for name, value in setup %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}
</table>
<p>EQSPEC is the aligned layout with static batches, EXSPEC the aligned layout with the same-length
pool, jaxspec the ragged layout with continuous batching: all run by this package, on this machine.
Published figures stand on a tinted ground: {{ published }}.</p>
{% for caption, data in images %}
<figure><figcaption><b>{{ caption }}</b></figcaption>
<img alt="{{ caption }}" src="data:image/png;base64,{{ data }}"></figure>
{% endfor %}
{% for table in tables %}
<div{% if table.title.startswith("Published") %} class="published"{% endif %}>
<h2>{{ table.title }}</h2>
<table><tr>{% for name in table.header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
</body></html>
"""
