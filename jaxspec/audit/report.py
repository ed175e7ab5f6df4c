"""Reports of audits: tables for the terminal, and one page with plots."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.audit.evidence import evidence_limit
from jaxspec.audit.external import OutputsAudit
from jaxspec.audit.files import FilesAudit
from jaxspec.audit.judge import Divergence, Finding
from jaxspec.audit.kv_distance import KvDistance
from jaxspec.audit.noise import TIE_ALPHA, TieTest
from jaxspec.audit.self_audit import CLAIMS, DistributionLevel, EngineAudit, Level, TablesLevel
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import (
    NONE,
    Plot,
    Printed,
    TextTable,
    new_figure,
    percent,
    write_page,
)

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


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Printed):
    """The report of an audit of any kind. It prints as the command `audit` prints it.

    Attributes:
      audit: the audit that is shown, with its promise and whether it held.
      title: one line.
      tables: the tables of results, for terminal and page.
      divergences: those of all levels, with the place of each.
      curves: `prefix_shares`, by the reference of the comparison.
    """

    audit: EngineAudit | OutputsAudit | FilesAudit
    title: str
    tables: list[TextTable]
    divergences: list[tuple[str, Divergence]]
    curves: Mapping[str, np.ndarray]

    @property
    def headings(self) -> list[tuple[str, str]]:
        """Title and promise."""
        return [(self.title, "bold"), (f"Promise: {self.audit.promise}.", "")]

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """The verdict."""
        style = {True: "bold green", False: "bold red", None: "bold"}[self.audit.holds]
        return [(self.audit.sentence, style)]

    def to_frame(self) -> pandas.DataFrame:
        """A row per divergence: `where` it is, and the fields of `Divergence`; needs pandas."""
        names = ["where", *(field.name for field in dataclasses.fields(Divergence))]
        rows = [{"where": where, **vars(own)} for where, own in self.divergences]
        return import_extra("pandas", "frames").DataFrame(rows, columns=names)

    @property
    def all_tables(self) -> list[TextTable]:
        """The tables, and the divergences if there are any."""
        return [*self.tables, *([self.divergence_table] if self.divergences else [])]

    @property
    def divergence_table(self) -> TextTable:
        """The first `MAX_LISTED` divergences, those that no tie explains first."""
        ranked = sorted(self.divergences, key=lambda pair: pair[1].finding == Finding.TIE)
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
        every = [d for _, d in self.divergences]
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
            verdict=self.audit.sentence,
            holds=self.audit.holds,
            paragraphs=[f"Promise: {self.audit.promise}."],
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
        "target": f"{engine['target']}, {audit.dtype}{_kv_words(engine['kv_dtype'])}",
        "drafter": f"{engine['drafter']}{_kv_words(engine['draft_kv_dtype'])}, "
        f"{engine['draft_length']} tokens per round",
        "verifier": str(engine["verifier"]),
        "shape": f"batch {engine['batch_size']}, window {engine['verify_length']}, max_length "
        f"{engine['max_length']}, prefill chunk {engine['prefill_chunk']}",
        "requests": f"{audit.num_requests}, {audit.num_sampled} of them sampled",
        "emitted per round": f"{audit.acceptance.emitted_per_round:.2f}",
        "start-up probe": audit.probe.sentence,
    }
    tables = [_level_table(audit), TextTable.of_values("What each level claims", claims)]
    if audit.study is not None:
        found = {f"{name} match": percent(x) for name, x in vars(audit.study).items()}
        title = "The published study's raw string metrics, against the reference loop"
        tables.append(TextTable.of_values(title, found))
    if audit.distribution.samples.powers:
        tables.append(audit.distribution.samples.power_table())
    if audit.kv_distance is not None:
        tables.append(_kv_table(audit.kv_distance))
    return AuditReport(
        audit=audit,
        title=f"Audit of {engine['target']} with {engine['drafter']}",
        tables=[*tables, TextTable.of_values("Run", run)],
        divergences=[
            (f"{name}, request {request_id}", divergence)
            for name, level in audit.levels.items()
            for request_id, divergence in level.divergences
        ],
        curves={
            f"{name}: {_COMPARED_WITH[name]}": prefix_shares(
                (c.num_tokens, c.divergence) for c in level.outputs
            )
            for name, level in audit.levels.items()
            if level.outputs
        },
    )


def _kv_words(kv_dtype: str | None) -> str:
    return "" if kv_dtype is None else f", KV in {kv_dtype}"


def _kv_table(distance: KvDistance) -> TextTable:
    title = f"This target beside the same one with full KV instead of {distance.kv_dtype}"
    found = {
        "tokens of prompts and outputs": str(distance.num_tokens),
        "same likeliest token": percent(distance.greedy_agreement),
        "mean KL divergence": f"{distance.mean_kl:.2g} nats",
        "largest KL divergence": f"{distance.max_kl:.2g} nats",
    }
    return TextTable.of_values(f"{title}, for information", found)


_COMPARED_WITH = {
    "E1": "the same engine, nothing drafted",
    "E2": "another order, alone",
    "E3": "plain sampling, same seeds",
    "E4": "the reference loop",
    "E5": "the same chat from nothing",
}


def _level_table(audit: EngineAudit) -> TextTable:
    """A column for each level."""

    def figures(level: Level | DistributionLevel | TablesLevel) -> dict[str, Any]:
        if level.reason is not None:
            return {}
        holds = {"holds": "yes" if level.holds else "NO"}
        if isinstance(level, DistributionLevel):
            samples = level.samples
            return holds | {
                "outputs": len(samples.log_evidence),
                "faults": samples.num_excluded + level.num_wrong_ends,
                "log evidence of one, together": f"{max(samples.log_evidence, default=0):.1f}, "
                f"{samples.together.log_evidence:.1f}",
            }
        if isinstance(level, TablesLevel):
            least = f"{min(level.p_values.values()):.2g}"
            return holds | {"outputs": level.num_outputs, "p, at least": least}
        return holds | {
            "outputs": len(level.outputs),
            "exact": percent(level.exact),
            "prefix match": percent(level.prefix_match),
            "equal tokens, other bits": level.num_other_bits,
            "ties": level.count(Finding.TIE),
            "faults": level.count(Finding.FAULT),
            "other draws": level.count(Finding.SAMPLING),
        }

    levels = {name: figures(level) for name, level in audit.every_level.items()}
    names = dict.fromkeys(name for found in levels.values() for name in found)
    return TextTable(
        title="Levels, on token ids cut after the stop token",
        header=("", *levels),
        rows=[(name, *(str(found.get(name, NONE)) for found in levels.values())) for name in names],
    )


def report_of_outputs(audit: OutputsAudit) -> AuditReport:
    """The report of another system's outputs."""
    file = {
        "target": audit.target,
        "reference": audit.reference,
        "outputs of": audit.file.label,
        "outputs": f"{len(audit.greedy)} greedy, {len(audit.sampled)} sampled",
        "a gap moves by": f"{audit.noise.scale:.3g} (scale of {len(audit.noise.changes)} changes, "
        f"the largest {audit.noise.changes[-1]:.3g}); a tie is up to {audit.noise.bound:.3g}",
    }
    if audit.file.is_text:
        file["token ids"] = "made from text; the engine may have emitted other ids"
        file["ends"] = "not judged: text does not say whether a stop token was emitted"
    else:
        num_short = audit.num_too_short
        file["ends too early"] = f"{num_short} outputs: no stop token, and not yet max_tokens"
        file["ends too late"] = f"{len(audit.ends) - num_short} outputs"
        num_padded = sum(bool(o.after_stop) and o.number not in audit.ends for o in audit.outputs)
        file["padding after a stop token"] = f"in {num_padded} outputs; it was cut off"
    tables = [TextTable.of_values("File", file)]
    greedy = [own for _, own in audit.greedy]
    curves = {}
    if greedy:
        first = {
            "first difference": lambda own: next(iter(own.divergences), None),
            "first that no tie explains": lambda own: own.first,
        }
        for label, first_of in first.items():
            curves[label] = prefix_shares((own.num_tokens, first_of(own)) for own in greedy)
        count = collections.Counter(d.finding for own in greedy for d in own.divergences)
        found = {
            "outputs": str(len(greedy)),
            "exact": percent(audit.exact),
            "exact up to ties": percent(audit.exact_up_to_ties),
            "prefix match": percent(audit.prefix_match),
            "tokens": str(sum(own.num_tokens for own in greedy)),
            "ties": str(count[Finding.TIE]),
            "ties that rounding explains": "; ".join(map(_tie_words, audit.tie_tests)),
            "tokens that show second-best ones": ", ".join(
                f"{num} (if {share} are)" for share, num in audit.tokens_needed.items()
            ),
            "p of the ties": f"{audit.tie_p_value:.2g}, alpha {TIE_ALPHA:g}",
            "faults": f"{count[Finding.FAULT]}, of which chance explains {audit.num_beyond:.2g}",
        }
        title = "Greedy outputs under the target, every token after the output's own"
        tables.append(TextTable.of_values(title, found))
    if audit.sampled:
        tests = audit.distribution_tests.values()
        statistic = sum(test.statistic for test in tests)
        sampled = {
            "outputs": str(len(audit.sampled)),
            "break the distribution": str(audit.samples.num_excluded + audit.samples.num_unlikely),
            "log evidence of all together": f"{audit.samples.together.log_evidence:.1f}, at most "
            f"{evidence_limit():.1f}",
            "prompts tested": str(len(tests)),
            "chi-square": f"{statistic:.1f} of {sum(t.degrees_of_freedom for t in tests)}",
            "p": f"{audit.distribution_p_value:.3g}" if tests else NONE,
            "alpha": f"{audit.alpha:g}",
        }
        title = "Sampled outputs under the target's distribution"
        tables.append(TextTable.of_values(title, sampled))
        if audit.samples.powers:
            tables.append(audit.samples.power_table())
    return AuditReport(
        audit=audit,
        title=f"Audit of outputs of {audit.file.label} under {audit.target}",
        tables=tables,
        divergences=[(f"line {line}", divergence) for line, divergence in audit.divergences],
        curves=curves,
    )


def _tie_words(test: TieTest) -> str:
    size = f"of {test.at_least:.2g} or more " if test.at_least > 0 else ""
    return f"{size}{test.expected:.1f} ({test.observed} found)"


def report_of_files(audit: FilesAudit) -> AuditReport:
    """The report of several files: a line for each."""
    titles = {True: "yes", False: "NO", None: "not judged"}
    records = []
    for name, own in audit.audits.items():
        count = collections.Counter(d.finding for _, d in own.divergences)
        record = {
            "file": name,
            "label": own.file.label,
            "num_outputs": len(own.outputs),
            "holds": titles[own.holds],
            "exact": percent(own.exact),
            "ties": count[Finding.TIE],
            "expected": own.tie_tests[0].expected if own.tie_tests else None,
            "p": own.tie_p_value if own.tie_tests else None,
            "faults": count[Finding.FAULT] if own.file.is_judged else None,
        }
        comparison = audit.comparisons.get(name)
        if comparison is not None:
            equal = f"{comparison.num_equal} of {comparison.num_matched}"
            parted = {f: comparison.count(f) for f in (Finding.TIE, Finding.FAULT)}
            record |= {"equal": equal, "at ties": parted[Finding.TIE]}
            record |= {"at faults": parted[Finding.FAULT], "unmatched": comparison.num_unmatched}
        records.append(record)
    columns = {
        "file": "{file}",
        "outputs of": "{label}",
        "outputs": "{num_outputs}",
        "holds": "{holds}",
        "exact": "{exact}",
        "ties": "{ties}",
        "explained": "{expected:.1f}",
        "p": "{p:.2g}",
        "faults": "{faults}",
    }
    tables = [TextTable.of_columns("Files, each under the target", columns, records)]
    if audit.against is not None:
        names = ("equal", "at ties", "at faults", "unmatched")
        columns = {"file": "{file}"} | {name: f"{{{name}}}" for name in names}
        others = [record for record in records if record["file"] != audit.against]
        title = f"Beside {audit.against}: equal outputs, and where the others first part"
        tables.append(TextTable.of_columns(title, columns, others))
    first = next(iter(audit.audits.values()))
    words = {name: own.reference for name, own in audit.audits.items()}
    if len(set(words.values())) == 1:
        words = {"all files": first.reference}
    tables.append(TextTable.of_values("Reference", words))
    return AuditReport(
        audit=audit,
        title=f"Audit of {len(audit.audits)} files of outputs under {first.target}",
        tables=tables,
        divergences=[
            (f"{name}, line {line}", divergence)
            for name, own in audit.audits.items()
            for line, divergence in own.divergences
        ],
        curves={},
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
