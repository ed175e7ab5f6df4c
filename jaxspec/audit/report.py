"""Reports of audits: tables for the terminal, and one page with plots."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.audit.judge import Divergence, Finding
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import Plot, Printed, TextTable, new_figure, write_page

if TYPE_CHECKING:
    import pandas

COLOURS = {Finding.TIE: "#2a7f62", Finding.FAULT: "#c0392b", Finding.SAMPLING: "#c98a1b"}
MAX_LISTED = 200  # divergences listed in a report; the JSON document holds all


def prefix_shares(outputs: Iterable[tuple[int, Divergence | None]]) -> np.ndarray:
    """Fraction of outputs without a divergence in their first i tokens, i = 0, 1, ...; each output
    is given as its number of tokens and its first divergence."""
    lengths, divergences = zip(*outputs, strict=True)
    index = np.arange(max(lengths) + 1)
    first = np.array([d.index if d else len(index) for d in divergences])
    return np.mean(first[:, None] >= index, axis=0)


class Audit(Printed):
    """Base class of audits. They print as the command `audit` prints them.

    Attributes:
      promise: what must hold, in words.
      holds: whether it does; None if nothing is judged.
      sentence: what was found, in words.
      title: one line.
      result_tables: those of results, for terminal and page.
      located: every divergence, with its place in words.
      curves: `prefix_shares`, by the reference of the comparison.
    """

    promise: str
    holds: bool | None
    sentence: str
    title: str
    result_tables: Sequence[TextTable]
    located: Sequence[tuple[str, Divergence]]
    curves: Mapping[str, np.ndarray]

    @property
    def headings(self) -> list[tuple[str, str]]:
        """Title and promise."""
        return [(self.title, "bold"), (f"Promise: {self.promise}.", "")]

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """The verdict."""
        return [(self.sentence, {True: "bold green", False: "bold red", None: "bold"}[self.holds])]

    def to_frame(self) -> pandas.DataFrame:
        """A row per divergence: `where` it is, and the fields of `Divergence`; needs pandas."""
        names = ["where", *(field.name for field in dataclasses.fields(Divergence))]
        rows = [{"where": where, **vars(own)} for where, own in self.located]
        return import_extra("pandas", "frames").DataFrame(rows, columns=names)

    @property
    def all_tables(self) -> list[TextTable]:
        """The tables, and the divergences if there are any."""
        return [*self.result_tables, *([self.divergence_table] if self.located else [])]

    @property
    def divergence_table(self) -> TextTable:
        """The first `MAX_LISTED` divergences, those that no tie explains first."""
        ranked = sorted(self.located, key=lambda pair: pair[1].finding == Finding.TIE)
        is_cut = len(ranked) > MAX_LISTED
        columns = {
            "where": "{where}",
            "index": "{index}",
            "token": lambda d: "(end)" if d["token"] < 0 else d["token"],
            "expected": lambda d: "(end)" if d["expected"] < 0 else d["expected"],
            **{name: f"{{{name}:.3g}}" for name in ("gap", "margin", "bound")},
            "verdict": "{finding}",
        }
        return TextTable.of_columns(
            "Divergences" + f", {MAX_LISTED} of {len(ranked)}" * is_cut,
            columns,
            [{"where": where, **vars(d)} for where, d in ranked[:MAX_LISTED]],
        )

    def plots(self) -> list[Plot]:
        """Margins against bounds, and the share of equal outputs.

        Raises:
          SettingError: matplotlib is not installed.
        """
        every = [d for _, d in self.located]
        found = {finding: [d for d in every if d.finding == finding] for finding in Finding}
        shown = {finding: divergences for finding, divergences in found.items() if divergences}
        plots = [_plot_margins(shown)] if shown else []
        return [*plots, _plot_curves(self.curves)] if self.curves else plots

    def write_html(self, path: str | os.PathLike) -> None:
        """Writes the report as one HTML file; it appears whole or not at all.

        Raises:
          SettingError: matplotlib is not installed, or the file cannot be written.
        """
        write_page(
            path,
            title=self.title,
            verdict=self.sentence,
            holds=self.holds,
            paragraphs=[f"Promise: {self.promise}."],
            tables=self.all_tables,
            plots=self.plots(),
        )


def _plot_margins(shown: dict[Finding, list[Divergence]]) -> Plot:
    figure, axes = new_figure()
    finite = [d.margin for found in shown.values() for d in found if math.isfinite(d.margin)]
    bounds = [d.bound for found in shown.values() for d in found if d.bound > 0]
    numbers = [x for x in (*finite, *bounds) if x > 0] or [1.0]
    low, high = min(numbers) / 2, max(numbers) * 2
    # Divergences that no rounding can explain (a missing token) are drawn at the edge.
    for finding, found in shown.items():
        axes.scatter(
            np.clip([d.bound for d in found], low, high),
            np.clip([d.margin for d in found], low, high),
            s=22,
            alpha=0.8,
            color=COLOURS[finding],
            label=finding.value,
            linewidths=0,
        )
    axes.plot([low, high], [low, high], color="#888", linewidth=1, label="margin = bound")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(min(bounds, default=low) / 5, max(bounds, default=high) * 5),
        ylim=(low / 1.3, high * 1.3),
        xlabel="bound: what rounding explains (logits)",
        ylabel="margin (logits)",
    )
    axes.legend(frameon=False, fontsize=8)
    caption = "Margins against the bound: ties lie below the line"
    return Plot(name="margins", caption=caption, figure=figure)


def _plot_curves(curves: Mapping[str, np.ndarray]) -> Plot:
    figure, axes = new_figure()
    styles = itertools.cycle(("-", "--", "-.", ":"))  # equal curves stay visible
    for (label, shares), style in zip(curves.items(), styles, strict=False):
        axes.step(range(len(shares)), 100 * shares, style, where="post", label=label)
    lowest = min(float(shares.min()) for shares in curves.values())
    axes.set(
        xlabel="tokens",
        ylabel="outputs without a difference so far, %",
        ylim=(max(0, 100 * lowest - 5), 102),
    )
    axes.legend(frameon=False, fontsize=8)
    return Plot(name="prefix", caption="Prefix match", figure=figure)
