"""Figures of `jaxspec bench decode` documents. Needs the `analysis` extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import new_figure

MARKERS = "osD^vP*X"


def plot_decode(document: Mapping[str, Any]) -> Any:
    """A matplotlib figure: rates and speed-ups against batch size and draft length, measured and
    predicted.

    Raises:
      SettingError: matplotlib or pandas is not installed.
    """
    pd = import_extra("pandas", "plots")
    figure, axes = new_figure(2, 2, size=(11, 8.5))
    rates, gains, by_length, against = axes.flat
    runs, adaptive = (pd.DataFrame(document[name]) for name in ("runs", "adaptive"))
    drafted = runs[runs.draft_length > 0]
    drafter = next(iter(drafted.drafter), "no drafter")
    figure.suptitle(f"{document['config']['target']}, {drafter}")

    styles = [{"marker": MARKERS[n % len(MARKERS)], "color": f"C{n}"} for n in range(len(runs))]
    lines = {
        f"draft length {length}" if length else "plain (window 1)": (line, style)
        for (length, line), style in zip(runs.groupby("draft_length"), styles, strict=False)
    }
    for promise, line in adaptive.groupby("exactness"):
        colour = {"bitwise": "grey", "ties": "black"}[promise]
        style = {"marker": "*", "color": colour, "linestyle": "--"}
        lines[f"draft length auto, {promise}"] = line, style
    for label, (line, style) in lines.items():
        rates.plot(line.batch_size, line.tokens_per_s, label=label, **style)
        gains.plot(line.batch_size, line.speedup_vs_plain, label=label, **style)
    for (size, line), style in zip(drafted.groupby("batch_size"), styles, strict=False):
        by_length.plot(line.draft_length, line.speedup_of_rounds, label=f"batch {size}", **style)
        predicted = [each["speedup"] for each in line.predicted]
        by_length.plot(line.draft_length, predicted, linestyle=":", mfc="none", **style)
    by_length.plot([], [], color="black", label="measured")
    by_length.plot([], [], color="black", linestyle=":", label="predicted")

    for index, (name, passes) in enumerate(document["cost_model"]["passes"].items()):
        for held_out, chosen in pd.DataFrame(passes).groupby("is_held_out"):
            against.scatter(
                chosen.ms,
                chosen.predicted_ms,
                color=f"C{index}",
                facecolors="none" if held_out else f"C{index}",
                s=22,
                label=f"{name} pass, {'held out' if held_out else 'fitted'}",
            )
    predicted = [each["round_ms"] for each in runs.predicted]
    against.scatter(runs.round_ms, predicted, marker="x", color="black", label="whole rounds")
    against.axline((1, 1), (2, 2), color="grey", linewidth=1, zorder=0)
    against.set(xscale="log", yscale="log")

    for axes, x, y, title in (
        (rates, "batch size", "tokens/s", "Rate, prompts included"),
        (gains, "batch size", "speed-up over plain", "Speed-up of whole runs"),
        (by_length, "draft length", "speed-up over plain", "Speed-up of rounds, prompts apart"),
        (against, "measured ms", "predicted ms", "Cost model"),
    ):
        axes.set(xlabel=x, ylabel=y, title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    for axes in (rates, gains):
        axes.set_xscale("log", base=2)
        sizes = runs.batch_size.unique()
        axes.set_xticks(sizes, map(str, sizes))
    by_length.set_xticks(drafted.draft_length.unique())
    for axes in (rates, gains, by_length):
        axes.set_ylim(bottom=0)
    for axes in (gains, by_length):
        axes.axhline(1.0, color="grey", linewidth=1, zorder=0)
    return figure
