"""Figures of `jaxspec bench decode` documents. Needs matplotlib, the `analysis` extra."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from jaxspec.runtime.report import new_figure

MARKERS = "osD^vP*X"


def plot_decode(document: Mapping[str, Any]) -> Any:
    """A matplotlib figure: rates and speed-ups against batch size and draft length, measured and
    predicted.

    Raises:
      SettingError: matplotlib is not installed.
    """
    figure, axes = new_figure(2, 2, size=(11, 8.5))
    rates, gains, by_length, against = axes.flat
    runs = document["runs"]
    lengths = sorted({run["draft_length"] for run in runs})
    batches = sorted({run["batch_size"] for run in runs})
    config = document["config"]
    drafter = next((run["drafter"] for run in runs if run["draft_length"]), "no drafter")
    figure.suptitle(f"{config['target']}, {drafter}")

    for length, marker in zip(lengths, itertools.cycle(MARKERS), strict=False):
        line = [run for run in runs if run["draft_length"] == length]
        sizes = [run["batch_size"] for run in line]
        label = f"draft length {length}" if length else "plain (window 1)"
        colour = f"C{lengths.index(length)}"
        style = {"marker": marker, "color": colour, "label": label}
        rates.plot(sizes, [run["tokens_per_s"] for run in line], **style)
        gains.plot(sizes, [run["speedup_vs_plain"] for run in line], **style)
    for promise, colour in (("bitwise", "grey"), ("ties", "black")):
        line = [run for run in document["adaptive"] if run["exactness"] == promise]
        sizes, label = [run["batch_size"] for run in line], f"draft length auto, {promise}"
        style = {"marker": "*", "color": colour, "linestyle": "--", "label": label}
        rates.plot(sizes, [run["tokens_per_s"] for run in line], **style)
        gains.plot(sizes, [run["speedup_vs_plain"] for run in line], **style)
    drafted = [run for run in runs if run["draft_length"]]
    for index, size in enumerate(batches):
        line = [run for run in drafted if run["batch_size"] == size]
        x = [run["draft_length"] for run in line]
        style = {"marker": MARKERS[index % len(MARKERS)], "color": f"C{index}"}
        by_length.plot(
            x, [run["speedup_of_rounds"] for run in line], label=f"batch {size}", **style
        )
        predicted = [run["predicted"]["speedup"] for run in line]
        by_length.plot(x, predicted, linestyle=":", mfc="none", **style)
    by_length.plot([], [], color="black", label="measured")
    by_length.plot([], [], color="black", linestyle=":", label="predicted")

    for index, (name, passes) in enumerate(document["cost_model"]["passes"].items()):
        for held_out in (False, True):
            chosen = [point for point in passes if point["is_held_out"] == held_out]
            against.scatter(
                [point["ms"] for point in chosen],
                [point["predicted_ms"] for point in chosen],
                color=f"C{index}",
                facecolors="none" if held_out else f"C{index}",
                s=22,
                label=f"{name} pass, {'held out' if held_out else 'fitted'}",
            )
    measured = [run["round_ms"] for run in runs]
    predicted = [run["predicted"]["round_ms"] for run in runs]
    against.scatter(measured, predicted, marker="x", color="black", label="whole rounds")
    against.axline((1, 1), (2, 2), color="grey", linewidth=1, zorder=0)

    _dress(rates, "batch size", "tokens/s", "Rate, prompts included")
    _dress(gains, "batch size", "speed-up over plain", "Speed-up of whole runs")
    _dress(by_length, "draft length", "speed-up over plain", "Speed-up of rounds, prompts apart")
    _dress(against, "measured ms", "predicted ms", "Cost model")
    for axes in (rates, gains):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, map(str, batches))
        axes.set_ylim(bottom=0)
    by_length.set_xticks([length for length in lengths if length])
    by_length.set_ylim(bottom=0)
    for axes in (gains, by_length):
        axes.axhline(1.0, color="grey", linewidth=1, zorder=0)
    against.set_xscale("log")
    against.set_yscale("log")
    return figure


def _dress(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
