"""Reports of an audit: tables for the terminal, and one self-contained HTML page with plots."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jinja2
import numpy as np
from rich.table import Table

from jaxspec.audit.external import OutputsAudit
from jaxspec.audit.judge import Divergence, Finding
from jaxspec.audit.self_audit import CLAIMS, EngineAudit, Level
from jaxspec.errors import SettingError
from jaxspec.runtime.directories import write_atomically

COLOURS = {Finding.TIE: "#2a7f62", Finding.FAULT: "#c0392b", Finding.SAMPLING: "#c98a1b"}
NONE = "-"
MAX_LISTED = 200  # divergences listed in a report; the JSON document holds all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of text.

    Attributes:
      title: above it.
      header: names of the columns.
      rows: cells.
    """

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Where outputs part from what was expected.

    Attributes:
      label: what they are compared with.
      lengths: tokens of each output.
      first: index of the first difference of each, or None.
    """

    label: str
    lengths: tuple[int, ...]
    first: tuple[int | None, ...]

    def shares(self) -> np.ndarray:
        """Share of outputs without a difference in their first i tokens, i = 0, 1, ..."""
        end = max(self.lengths, default=0)
        parted = np.array([end + 1 if first is None else first for first in self.first])
        return np.array([np.mean(parted >= i) for i in range(end + 1)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What both kinds of audit have in common, for display.

    Attributes:
      title: a line.
      promise: in words.
      sentence: what was found.
      holds: whether the promise held.
      tables: for terminal and page.
      divergences: of all levels, with where each stands.
      curves: prefix match.
    """

    title: str
    promise: str
    sentence: str
    holds: bool
    tables: list[Grid]
    divergences: list[tuple[str, Divergence]]
    curves: list[Curve]

    @property
    def divergence_table(self) -> Grid:
        """The first `MAX_LISTED` divergences, those that no tie explains first."""
        ranked = sorted(self.divergences, key=lambda pair: pair[1].finding == Finding.TIE)
        more = len(ranked) - MAX_LISTED
        return Grid(
            title="Divergences" + f", {MAX_LISTED} of {len(ranked)}" * (more > 0),
            header=("where", "index", "token", "expected", "gap", "margin", "bound", "verdict"),
            rows=[
                (
                    where,
                    str(d.index),
                    "(end)" if d.token < 0 else str(d.token),
                    "(end)" if d.expected < 0 else str(d.expected),
                    f"{d.gap:.3g}",
                    f"{d.margin:.3g}",
                    f"{d.bound:.3g}",
                    d.finding.value,
                )
                for where, d in ranked[:MAX_LISTED]
            ],
        )


def report_of_engine(audit: EngineAudit) -> Report:
    """The report of jaxspec's own run."""
    engine = audit.engine
    tables = [_level_table(audit)]
    tables.append(
        Grid(
            title="What each level claims",
            header=("level", "claim"),
            rows=[
                (name, CLAIMS[name] + (f" (n/a: {level.reason})" if level.reason else ""))
                for name, level in (*audit.levels.items(), ("distribution", audit.distribution))
            ],
        )
    )
    if audit.study is not None:
        tables.append(
            Grid(
                title="The published study's raw string metrics (text compared, not tokens)",
                header=("against", "exact match", "partial match"),
                rows=[
                    (
                        "the window-1 loop",
                        _percent(audit.study.exact),
                        _percent(audit.study.partial),
                    )
                ],
            )
        )
    tables.append(
        Grid(
            title="Run",
            header=("what", "value"),
            rows=[
                ("target", f"{engine['target']}, {audit.dtype}"),
                ("drafter", f"{engine['drafter']}, {engine['draft_length']} tokens per round"),
                ("verifier", str(engine["verifier"])),
                (
                    "shape",
                    f"batch {engine['batch_size']}, window {engine['verify_length']}, max_length "
                    f"{engine['max_length']}, prefill chunk {engine['prefill_chunk']}",
                ),
                ("requests", f"{audit.num_requests}, {audit.num_sampled} of them sampled"),
                ("emitted per round", f"{audit.acceptance.emitted_per_round:.2f}"),
                ("start-up probe", audit.probe.sentence),
            ],
        )
    )
    return Report(
        title=f"Audit of {engine['target']} with {engine['drafter']}",
        promise=audit.promise,
        sentence=audit.sentence,
        holds=audit.holds,
        tables=tables,
        divergences=[
            (f"{name}, request {c.request_id}", c.divergence)
            for name, level in audit.levels.items()
            for c in level
            if c.divergence is not None
        ],
        curves=[
            Curve(
                label=f"{name}: {_COMPARED_WITH[name]}",
                lengths=tuple(c.num_tokens for c in level),
                first=tuple(c.divergence and c.divergence.index for c in level),
            )
            for name, level in audit.levels.items()
            if level.comparisons
        ],
    )


_COMPARED_WITH = {
    "E1": "the same program, nothing drafted",
    "E2": "another order, alone",
    "E3": "plain sampling, same seeds",
    "E4": "the window-1 loop",
}


def _level_table(audit: EngineAudit) -> Grid:
    """A column for each level."""
    levels, distribution = audit.levels.values(), audit.distribution

    def row(name: str, value: Callable[[Level], str], of_distribution: str) -> tuple[str, ...]:
        cells = [value(level) if level.reason is None else NONE for level in levels]
        return (name, *cells, NONE if distribution.reason else of_distribution)

    return Grid(
        title="Levels, on token ids cut after the stop token",
        header=("", *audit.levels, "distribution"),
        rows=[
            row("holds", lambda level: _word(level.holds), _word(distribution.holds)),
            row(
                "outputs",
                lambda level: str(level.num_compared),
                str(len(distribution.log_evidence)),
            ),
            row("exact", lambda level: _percent(level.exact), NONE),
            row("prefix match", lambda level: _percent(level.prefix_match), NONE),
            row("equal tokens, other bits", lambda level: str(level.num_other_bits), NONE),
            row("ties", lambda level: str(level.count(Finding.TIE)), NONE),
            row(
                "synchronisation faults",
                lambda level: str(level.count(Finding.FAULT)),
                str(distribution.num_excluded),
            ),
            row("other draws", lambda level: str(level.count(Finding.SAMPLING)), NONE),
            row(
                "log evidence, at most",
                lambda level: NONE,
                f"{max(distribution.log_evidence, default=0):.1f}",
            ),
        ],
    )


def report_of_outputs(audit: OutputsAudit) -> Report:
    """The report of another system's outputs."""
    rows = [
        ("target", audit.target),
        ("outputs of", f"{audit.engine}, computed in {audit.dtype}"),
        ("outputs", f"{len(audit.greedy)} greedy, {len(audit.sampled)} sampled"),
    ]
    num_after = sum(output.num_after_stop > 0 for output in audit.outputs)
    if num_after:
        rows.append(("tokens after a stop token", f"in {num_after} outputs; they were cut off"))
    if audit.is_text:
        rows.append(("token ids", "made from text; the engine may have emitted other ids"))
    tables = [Grid(title="File", header=("what", "value"), rows=rows)]
    if audit.greedy:
        divergences = [d for _, own in audit.greedy for d in own.divergences]
        tables.append(
            Grid(
                title="Greedy outputs under the target, every token after the output's own",
                header=(
                    "outputs",
                    "exact",
                    "exact up to ties",
                    "prefix match",
                    "tokens",
                    "ties",
                    "faults",
                ),
                rows=[
                    (
                        str(len(audit.greedy)),
                        _percent(audit.exact),
                        _percent(audit.exact_up_to_ties),
                        _percent(audit.prefix_match),
                        str(sum(own.num_tokens for _, own in audit.greedy)),
                        str(sum(d.finding == Finding.TIE for d in divergences)),
                        str(sum(d.finding == Finding.FAULT for d in divergences)),
                    )
                ],
            )
        )
    if audit.sampled:
        tests = list(audit.distribution_tests.values())
        tables.append(
            Grid(
                title="Sampled outputs under the target's distribution",
                header=(
                    "outputs",
                    "break the distribution",
                    "prompts tested",
                    "chi-square",
                    "p",
                    "alpha",
                ),
                rows=[
                    (
                        str(len(audit.sampled)),
                        str(audit.num_excluded),
                        str(len(tests)),
                        f"{sum(t.statistic for t in tests):.1f} of "
                        f"{sum(t.degrees_of_freedom for t in tests)}",
                        NONE if not tests else f"{audit.distribution_p_value:.3g}",
                        f"{audit.alpha:g}",
                    )
                ],
            )
        )
    both = [("first difference", False), ("first that no tie explains", True)]
    return Report(
        title=f"Audit of outputs of {audit.engine} under {audit.target}",
        promise=audit.promise,
        sentence=audit.sentence,
        holds=audit.holds,
        tables=tables,
        divergences=[
            (f"line {output.number}", divergence)
            for output, own in zip(audit.outputs, audit.judged, strict=True)
            for divergence in own.divergences
        ],
        curves=[
            Curve(
                label=label,
                lengths=tuple(own.num_tokens for _, own in audit.greedy),
                first=tuple(
                    min(
                        (
                            d.index
                            for d in own.divergences
                            if d.finding != Finding.TIE or not is_strict
                        ),
                        default=None,
                    )
                    for _, own in audit.greedy
                ),
            )
            for label, is_strict in both
            if audit.greedy
        ],
    )


def terminal_tables(report: Report) -> list[Table]:
    """The report's tables for a terminal."""
    grids = [*report.tables]
    if report.divergences:
        grids.append(report.divergence_table)
    tables = []
    for grid in grids:
        table = Table(title=grid.title, title_justify="left", title_style="bold")
        for name in grid.header:
            table.add_column(name, overflow="fold")
        for row in grid.rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def write_html(report: Report, path: str | os.PathLike) -> None:
    """Writes the report as one HTML file; it appears whole or not at all.

    Raises:
      SettingError: matplotlib is not installed, or the file cannot be written.
    """
    plots = [(caption, _as_data(figure)) for caption, figure in make_plots(report)]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    tables = [*report.tables, *([report.divergence_table] if report.divergences else [])]
    page = environment.from_string(_PAGE).render(report=report, tables=tables, plots=plots)
    write_atomically(pathlib.Path(path), page.encode())


def make_plots(report: Report) -> list[tuple[str, Any]]:
    """Captions and matplotlib figures: positions, margins against bounds, prefix match.

    Raises:
      SettingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise SettingError(
            "A report with plots was asked for, and matplotlib is not installed; install it, or "
            "use --json."
        ) from error

    def new_figure():
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        return figure, axes

    plots = []
    by_finding = {
        finding: [d for _, d in report.divergences if d.finding == finding] for finding in Finding
    }
    shown = {finding: found for finding, found in by_finding.items() if found}
    if shown:
        figure, axes = new_figure()
        last = max(d.index for found in shown.values() for d in found)
        bins = np.linspace(-0.5, last + 0.5, min(last + 1, 32) + 1).tolist()
        axes.hist(
            [[d.index for d in found] for found in shown.values()],
            bins=bins,
            stacked=True,
            label=[finding.value for finding in shown],
            color=[COLOURS[finding] for finding in shown],
        )
        axes.set(xlabel="index of the token in the output", ylabel="divergences")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False)
        plots.append(("Where outputs part", figure))

        figure, axes = new_figure()
        finite = [d.margin for found in shown.values() for d in found if math.isfinite(d.margin)]
        bounds = [d.bound for found in shown.values() for d in found if d.bound > 0]
        numbers = [x for x in (*finite, *bounds) if x > 0] or [1.0]
        low, high = min(numbers) / 2, max(numbers) * 2
        # What no rounding explains at all (a missing token) is drawn at the edge.
        for finding, found in shown.items():
            axes.scatter(
                [min(max(d.bound, low), high) for d in found],
                [min(max(d.margin, low), high) for d in found],
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
        plots.append(("Margins against the bound: ties lie below the line", figure))
    if report.curves:
        figure, axes = new_figure()
        for index, curve in enumerate(report.curves):
            shares = 100 * curve.shares()
            style = ("-", "--", "-.", ":")[index % 4]  # equal curves stay visible
            axes.step(range(len(shares)), shares, style, where="post", label=curve.label)
        lowest = min(float(curve.shares().min()) for curve in report.curves)
        axes.set(
            xlabel="tokens",
            ylabel="outputs without a difference so far, %",
            ylim=(max(0, 100 * lowest - 5), 102),
        )
        axes.legend(frameon=False, fontsize=8)
        plots.append(("DraftContext match", figure))
    return plots


def _as_data(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _word(holds: bool | None) -> str:
    return {True: "yes", False: "NO", None: "n/a"}[holds]


def _percent(share: float) -> str:
    # Never rounded up to 100: 999 of 1000 must not look like all of them.
    return NONE if math.isnan(share) else f"{math.floor(share * 1000 + 1e-9) / 10:.1f} %"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ report.title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c1c; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: 14px; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem .25rem 0; text-align: left;
  vertical-align: top; }
.found { border-left: .4rem solid {{ "#2a7f62" if report.holds else "#c0392b" }};
  padding-left: .8rem; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
figure img { width: 33rem; max-width: 100%; }
</style></head><body>
<h1>{{ report.title }}</h1>
<p class="found"><b>{{ report.sentence }}</b><br>Promise: {{ report.promise }}.</p>
{% for caption, data in plots %}
<figure><figcaption><b>{{ caption }}</b></figcaption><img alt="{{ caption }}" src="{{ data }}">
</figure>
{% endfor %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<table><tr>{% for name in table.header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
</body></html>
"""
