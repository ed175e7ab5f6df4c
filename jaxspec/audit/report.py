"""What an audit shows: tables for the terminal, and one page with plots."""

from __future__ import annotations

import collections
import dataclasses
import math
import os

import numpy as np

from jaxspec.audit.external import OutputsAudit
from jaxspec.audit.judge import Divergence, Finding
from jaxspec.audit.self_audit import CLAIMS, DistributionLevel, EngineAudit, Level
from jaxspec.runtime.report import NONE, Plot, TextTable, new_figure, percent, write_page

COLOURS = {Finding.TIE: "#2a7f62", Finding.FAULT: "#c0392b", Finding.SAMPLING: "#c98a1b"}
MAX_LISTED = 200  # divergences listed in a report; the JSON document holds all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Where outputs first differ from what was expected.

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
        first = np.array([end + 1 if index is None else index for index in self.first])
        return np.array([np.mean(first >= i) for i in range(end + 1)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What both kinds of audit show.

    Attributes:
      title: a line.
      promise: in words.
      sentence: what was found.
      holds: whether the promise held.
      tables: of figures, for terminal and page.
      divergences: of all levels, with where each stands.
      curves: shares of outputs that are equal so far.
    """

    title: str
    promise: str
    sentence: str
    holds: bool
    tables: list[TextTable]
    divergences: list[tuple[str, Divergence]]
    curves: list[Curve]

    @property
    def all_tables(self) -> list[TextTable]:
        """The tables, and the divergences if there are any."""
        return [*self.tables, *([self.divergence_table] if self.divergences else [])]

    @property
    def divergence_table(self) -> TextTable:
        """The first `MAX_LISTED` divergences, those that no tie explains first."""
        ranked = sorted(self.divergences, key=lambda pair: pair[1].finding == Finding.TIE)
        more = len(ranked) - MAX_LISTED
        return TextTable(
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

    def plots(self) -> list[Plot]:
        """Where outputs diverge, margins against bounds, and the share of equal outputs.

        Raises:
          SettingError: matplotlib is not installed.
        """
        found = {
            finding: [d for _, d in self.divergences if d.finding == finding] for finding in Finding
        }
        shown = {finding: divergences for finding, divergences in found.items() if divergences}
        plots = [_plot_indices(shown), _plot_margins(shown)] if shown else []
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


def report_of_engine(audit: EngineAudit) -> AuditReport:
    """The report of jaxspec's own run."""
    engine = audit.engine
    claims = {
        name: CLAIMS[name] + (f" (n/a: {level.reason})" if level.reason else "")
        for name, level in audit.every_level.items()
    }
    run = {
        "target": f"{engine['target']}, {audit.dtype}",
        "drafter": f"{engine['drafter']}, {engine['draft_length']} tokens per round",
        "verifier": str(engine["verifier"]),
        "shape": f"batch {engine['batch_size']}, window {engine['verify_length']}, max_length "
        f"{engine['max_length']}, prefill chunk {engine['prefill_chunk']}",
        "requests": f"{audit.num_requests}, {audit.num_sampled} of them sampled",
        "emitted per round": f"{audit.acceptance.emitted_per_round:.2f}",
        "start-up probe": audit.probe.sentence,
    }
    tables = [
        _level_table(audit),
        TextTable.of_values("What each level claims", claims),
        TextTable.of_values("Run", run),
    ]
    if audit.study is not None:
        found = {
            "exact match": percent(audit.study.exact),
            "partial match": percent(audit.study.partial),
        }
        title = "The published study's raw string metrics, against the reference loop"
        tables.insert(2, TextTable.of_values(title, found))
    return AuditReport(
        title=f"Audit of {engine['target']} with {engine['drafter']}",
        promise=audit.promise,
        sentence=audit.sentence,
        holds=audit.holds,
        tables=tables,
        divergences=[
            (f"{name}, request {request_id}", divergence)
            for name, level in audit.levels.items()
            for request_id, divergence in level.divergences
        ],
        curves=[
            Curve(
                label=f"{name}: {_COMPARED_WITH[name]}",
                lengths=tuple(c.num_tokens for c in level.outputs),
                first=tuple(c.divergence and c.divergence.index for c in level.outputs),
            )
            for name, level in audit.levels.items()
            if level.outputs
        ],
    )


_COMPARED_WITH = {
    "E1": "the same program, nothing drafted",
    "E2": "another order, alone",
    "E3": "plain sampling, same seeds",
    "E4": "the reference loop",
}


def _level_table(audit: EngineAudit) -> TextTable:
    """A column for each level."""
    names = (
        "holds",
        "outputs",
        "exact",
        "prefix match",
        "equal tokens, other bits",
        "ties",
        "synchronisation faults",
        "other draws",
        "log evidence, at most",
    )

    def cells(level: Level | DistributionLevel) -> list[str]:
        if level.reason is not None:
            return [NONE] * len(names)
        holds = {True: "yes", False: "NO", None: "n/a"}[level.holds]
        if isinstance(level, DistributionLevel):
            num_excluded, evidence = str(level.num_excluded), max(level.log_evidence, default=0)
            num_outputs = str(len(level.log_evidence))
            return [holds, num_outputs, *[NONE] * 4, num_excluded, NONE, f"{evidence:.1f}"]
        num_ties, num_faults, num_draws = map(level.count, Finding)
        return [
            holds,
            str(len(level.outputs)),
            percent(level.exact),
            percent(level.prefix_match),
            *map(str, (level.num_other_bits, num_ties, num_faults, num_draws)),
            NONE,
        ]

    return TextTable(
        title="Levels, on token ids cut after the stop token",
        header=("", *audit.every_level),
        rows=list(zip(names, *map(cells, audit.every_level.values()), strict=True)),
    )


def report_of_outputs(audit: OutputsAudit) -> AuditReport:
    """The report of another system's outputs."""
    file = {
        "target": audit.target,
        "outputs of": f"{audit.engine}, computed in {audit.dtype}",
        "outputs": f"{len(audit.greedy)} greedy, {len(audit.sampled)} sampled",
    }
    num_after = sum(output.num_after_stop > 0 for output in audit.outputs)
    if num_after:
        file["tokens after a stop token"] = f"in {num_after} outputs; they were cut off"
    if audit.is_text:
        file["token ids"] = "made from text; the engine may have emitted other ids"
    tables = [TextTable.of_values("File", file)]
    if audit.greedy:
        count = collections.Counter(d.finding for _, own in audit.greedy for d in own.divergences)
        greedy = {
            "outputs": str(len(audit.greedy)),
            "exact": percent(audit.exact),
            "exact up to ties": percent(audit.exact_up_to_ties),
            "prefix match": percent(audit.prefix_match),
            "tokens": str(sum(own.num_tokens for _, own in audit.greedy)),
            "ties": str(count[Finding.TIE]),
            "faults": str(count[Finding.FAULT]),
        }
        title = "Greedy outputs under the target, every token after the output's own"
        tables.append(TextTable.of_values(title, greedy))
    if audit.sampled:
        tests = audit.distribution_tests.values()
        statistic = sum(test.statistic for test in tests)
        sampled = {
            "outputs": str(len(audit.sampled)),
            "break the distribution": str(audit.num_excluded),
            "prompts tested": str(len(tests)),
            "chi-square": f"{statistic:.1f} of {sum(t.degrees_of_freedom for t in tests)}",
            "p": f"{audit.distribution_p_value:.3g}" if tests else NONE,
            "alpha": f"{audit.alpha:g}",
        }
        title = "Sampled outputs under the target's distribution"
        tables.append(TextTable.of_values(title, sampled))
    outputs = [own for _, own in audit.greedy]
    first = [own.divergences[0].index if own.divergences else None for own in outputs]
    first_wrong = [own.first.index if own.first else None for own in outputs]
    curves = {"first difference": first, "first that no tie explains": first_wrong}
    lengths = tuple(own.num_tokens for own in outputs)
    return AuditReport(
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
            Curve(label=label, lengths=lengths, first=tuple(indices))
            for label, indices in curves.items()
            if outputs
        ],
    )


def _plot_indices(shown: dict[Finding, list[Divergence]]) -> Plot:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure()
    last = max(d.index for found in shown.values() for d in found)
    axes.hist(
        [[d.index for d in found] for found in shown.values()],
        bins=np.linspace(-0.5, last + 0.5, min(last + 1, 32) + 1).tolist(),
        stacked=True,
        label=[finding.value for finding in shown],
        color=[COLOURS[finding] for finding in shown],
    )
    axes.set(xlabel="index of the token in the output", ylabel="divergences")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return Plot(name="indices", caption="Where outputs diverge", figure=figure)


def _plot_margins(shown: dict[Finding, list[Divergence]]) -> Plot:
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
    caption = "Margins against the bound: ties lie below the line"
    return Plot(name="margins", caption=caption, figure=figure)


def _plot_curves(curves: list[Curve]) -> Plot:
    figure, axes = new_figure()
    for index, curve in enumerate(curves):
        shares = 100 * curve.shares()
        style = ("-", "--", "-.", ":")[index % 4]  # equal curves stay visible
        axes.step(range(len(shares)), shares, style, where="post", label=curve.label)
    lowest = min(float(curve.shares().min()) for curve in curves)
    axes.set(
        xlabel="tokens",
        ylabel="outputs without a difference so far, %",
        ylim=(max(0, 100 * lowest - 5), 102),
    )
    axes.legend(frameon=False, fontsize=8)
    return Plot(name="prefix", caption="Prefix match", figure=figure)
