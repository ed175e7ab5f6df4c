"""Tables, plots and the page of a scaling study."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from jaxspec.lab.plots import BLUE, GREY, ORANGE
from jaxspec.lab.studies.scaling.estimators import OPTIONAL
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.documents import write_document
from jaxspec.runtime.environment import load_remark
from jaxspec.runtime.report import GOOD as GREEN
from jaxspec.runtime.report import Columns, Plot, TextTable, new_figure, write_page

LABELS = {
    "tokens": "training tokens",
    "layers": "layers",
    "width": "width",
    "parameters": "parameters without the embedding",
}
RESPONSES = {"tau": "tokens per round (tau)", "logit": "logit of the acceptance rate"}

Axis = dict[str, Any]
Document = dict[str, Any]


def write_report(document: Document, directory: pathlib.Path) -> None:
    """Writes `scaling.json`, `scaling.html` and a PNG file per plot.

    Args:
      document: of `analyse`.
      directory: where to.

    Raises:
      SettingError: matplotlib is not installed, or a file cannot be written.
    """
    write_document(document, directory / "scaling.json")
    for plot in make_plots(document):
        write_atomically(directory / f"{plot.name}.png", plot.png())
    write_html(document, directory / "scaling.html")


def write_html(document: Document, page: pathlib.Path) -> None:
    """Writes the page of a study, from the document of `analyse` or from a `scaling.json`.

    Raises:
      SettingError: matplotlib is not installed, or the file cannot be written.
    """
    laws = [axis for axis in main_axes(document) if axis["word"] == "law"]
    of_main = f"{len(laws)} of {len(main_axes(document))} axes pass every gate."
    write_page(
        page,
        title="Scaling study of acceptance",
        verdict=of_main,
        summary=slopes_table(document),
        findings=findings(document),
        paragraphs=PARAGRAPHS,
        tables=make_tables(document),
        plots=make_plots(document),
    )


PARAGRAPHS = (
    'A line through a few points has a high R^2 whatever the truth is. The word "law" stands only '
    'where every gate passes; everything else is a "trend". Predictions beyond the largest point '
    "are extrapolations, and marked so.",
    "tau is emitted tokens per round without the last round of each output, which its end cuts "
    "short; emitted per round counts it too. Intervals are of 95 %, from whole prompts and whole "
    "training seeds drawn again and again.",
)


def print_report(document: Document, console: Console) -> None:
    """Slopes, gates and findings, on a terminal."""
    gates = map(gates_table, main_axes(document))
    for table in (slopes_table(document), *gates, *batch_tables(document)):
        console.print(table)
    for sentence in findings(document):
        console.print(f"- {sentence}", markup=False, highlight=False)


def main_axes(document: Document) -> list[Axis]:
    """The axes of the main way of decoding."""
    return [axis for axis in document["axes"] if axis["is_main"]]


# ---- in words


def findings(document: Document) -> list[str]:
    """Sentences, each from figures of the document."""
    found = [
        f"{LABELS[axis['axis']].capitalize()}, {axis['sentence']}" for axis in main_axes(document)
    ]
    if checks := document.get("checks"):
        found.append(
            "{num_equal_to_plain} of {num_compared_with_plain} greedy and coupled outputs are "
            "plain decoding's, token for token; so are {num_equal_over_batches} of "
            "{num_compared_over_batches} decoded at several batch sizes, of which "
            "{num_same_counts_over_batches} took the same rounds.".format_map(checks)
        )
    for cell in document["batch"] or ():
        listed = ", ".join(f"{each['best']} at batch {each['batch']}" for each in cell["batches"])
        how = "falls" if cell["falls"] else "does not fall"
        found.append(f"{cell['drafter']}: the best draft length {how} with the batch: {listed}.")
        loads = [each["load_average"] for each in cell["batches"] if "load_average" in each]
        if loads and (remark := load_remark(max(loads), cell["batches"][0]["cpu_count"])):
            found.append(f"{cell['drafter']}: {remark}")
    notes = [*document["notes"], *(f"{axis['title']}: {note}" for axis in main_axes(document)
                                   for note in axis["notes"])]  # fmt: skip
    return [*found, *dict.fromkeys(notes)]


# ---- tables


def _interval(found: dict[str, Any], form: str = ".3f") -> str:
    return f"{found['value']:{form}} ({found['low']:{form}} to {found['high']:{form}})"


def _decoding(decoding: dict[str, Any]) -> str:
    return (
        "{prompt_set}, {verifier}, temperature {temperature}, draft length {draft_length}"
    ).format_map(decoding)


SLOPES: Columns = {
    "axis": "{title}",
    "points": lambda axis: len(axis["points"]),
    "fitted": "{response}",
    "per tenfold": lambda axis: _interval(axis["slope_per_decade"], "+.3f"),
    "word": "{word}",
}
GATES: Columns = {
    "gate": "{name}",
    "must hold": "{requirement}",
    "found": "{found}",
    "": lambda gate: "pass" if gate["passes"] else "FAIL",
}
POINTS: Columns = {
    "x": "{x:,.0f}",
    "fitted": lambda point: _interval(point["response"]),
    **{
        name.replace("_", " "): f"{{{name}:.3f}}"
        for name in ("tau", "emitted_per_round", "rate", "all_accepted", *OPTIONAL)
    },
}
CURVES: Columns = {
    "curve": "{formula}",
    "parameters": lambda fit: ", ".join(f"{name} {x:.4g}" for name, x in fit["params"].items()),
    "R^2": "{r_squared:.4f}",
    "error held out": "{held_out[error]:+.3f}",
    "extrapolated to": "{extrapolated[x]:,.0f}",
    "gives": lambda fit: _interval(fit["extrapolated"]),
}
BATCHES: Columns = {
    "batch": "{batch}",
    "best draft length": "{best}",
    "95 % interval": "{low} to {high}",
    "speed-up": "{speedup:.2f}",
    "load average": "{load_average:.1f}",
}


def slopes_table(document: Document) -> TextTable:
    """A line per main axis."""
    return TextTable.of_columns("What acceptance gains", SLOPES, main_axes(document))


def gates_table(axis: Axis) -> TextTable:
    """A line per gate of an axis."""
    title = f"Gates, {axis['title']}: a {axis['word']}"
    return TextTable.of_columns(title, GATES, axis["gates"])


def batch_tables(document: Document) -> list[TextTable]:
    """For each drafter with times, a line per batch size."""
    return [
        TextTable.of_columns(
            f"The draft length that pays, by batch size, {found['drafter']}",
            BATCHES,
            found["batches"],
        )
        for found in document["batch"] or ()
    ]


def make_tables(document: Document) -> list[TextTable]:
    """All tables of the page, without the first."""
    values = {
        "target": document["target"],
        "drafters": ", ".join(document["drafters"]),
        "seeds": ", ".join(map(str, document["seeds"])),
        "rows": f"{document['num_rows']:,}",
        "decoding of the plots": _decoding(document["main_decoding"]),
        "bootstrap": f"{document['num_draws']} draws of prompts and seeds",
        **{name: str(value) for name, value in document["made_by"].items()},
    }
    tables = [TextTable.of_values("Setup", values)]
    for axis in main_axes(document):
        tables += [
            gates_table(axis),
            TextTable.of_columns(f"Points, {axis['title']}", POINTS, axis["points"]),
            TextTable.of_columns(f"Curves, {axis['title']}", CURVES, axis["fits"]),
        ]
    tables += batch_tables(document)
    if others := [axis for axis in document["axes"] if not axis["is_main"]]:
        columns = {"decoding": lambda axis: _decoding(axis["decoding"]), **SLOPES}
        title = "What acceptance gains, other ways of decoding"
        tables.append(TextTable.of_columns(title, columns, others))
    return tables


# ---- plots


def make_plots(document: Document) -> list[Plot]:
    """The plots that the document suffices for.

    Raises:
      SettingError: matplotlib is not installed.
    """
    axes = main_axes(document)
    # Of several drafters' token axes the one of the most seeds and points is drawn.
    ranked = sorted(axes, key=lambda axis: (len(axis["seeds"]), len(axis["points"])), reverse=True)
    drawn = {axis["axis"]: axis for axis in reversed(ranked)}
    plots = [_plot_axis(drawn[name]) for name in LABELS if name in drawn]
    return [*plots, _plot_positions(document["acceptance_by_position"])]


def _plot_axis(axis: Axis) -> Plot:
    """The points with the band of the log-linear fit and the held-out prediction; residuals."""
    figure, (top, bottom) = new_figure(2, 1, size=(6.4, 5.2), height_ratios=(3, 1), sharex=True)
    x = [point["x"] for point in axis["points"]]
    band, largest = axis["band"], x[-1]
    is_inside = [at <= largest * 1.0001 for at in band["x"]]
    last = sum(is_inside)
    for part, style in ((slice(0, last), "-"), (slice(last - 1, None), ":")):
        label = "log-linear" if style == "-" else "extrapolated"
        top.plot(band["x"][part], band["value"][part], style, color=BLUE, label=label)
    top.fill_between(band["x"], band["low"], band["high"], color=BLUE, alpha=0.15, linewidth=0)
    found = [point["response"] for point in axis["points"]]
    _whiskers(top, x, found, color="black", label="measured, 95 %")
    colours = BLUE, ORANGE, GREEN
    for place, (fit, colour) in enumerate(zip(axis["fits"], colours, strict=False), start=1):
        if (held_out := fit["held_out"]) is None:
            continue
        predicted = [{**held_out, "value": held_out["predicted"]}]
        label = f"largest point from the others: {fit['form']}"
        beside = held_out["x"] * (x[-1] / x[0]) ** (0.02 * place)  # or they would hide one another
        _whiskers(top, [beside], predicted, fmt="D", fillstyle="none", color=colour, label=label)
    top.set(ylabel=RESPONSES[axis["response"]], title=f"{axis['title']}: a {axis['word']}")
    top.legend(frameon=False, fontsize=7, loc="upper left")
    bottom.axhline(0, color=GREY, linewidth=1)
    bottom.plot(x, axis["residuals"], "o", color=BLUE, markersize=4)
    bottom.set(xscale="log", xlabel=LABELS[axis["axis"]], ylabel="residual")
    caption = f"Acceptance over {LABELS[axis['axis']]}, and residuals of the log-linear fit"
    return Plot(name=axis["axis"], caption=caption, figure=figure)


def _plot_positions(found: Sequence[dict[str, Any]]) -> Plot:
    """Conditional acceptance by position: one drafter over tokens, the others at their most."""
    figure, (left, right) = new_figure(1, 2, size=(9.6, 3.6), sharey=True)
    counts = [of["drafter"] for of in found]
    drafter = max(dict.fromkeys(counts), key=counts.count)
    for of in found:
        if of["drafter"] == drafter:
            _line_of_positions(left, of, f"{of['training_tokens']:,} tokens")
    most: dict[str, dict[str, Any]] = {}
    for of in sorted(found, key=lambda of: of["training_tokens"]):
        most[of["drafter"]] = of
    for of in most.values():
        _line_of_positions(right, of, of["drafter"])
    left.set(title=drafter, ylabel="conditional acceptance", ylim=(0, 1))
    right.set(title="every drafter, at its most tokens")
    for each in (left, right):
        each.set_xlabel("draft position")
        each.legend(frameon=False, fontsize=7)
    return Plot(name="positions", caption="Acceptance by position", figure=figure)


def _line_of_positions(axes: Any, of: dict[str, Any], label: str) -> None:
    known = [each for each in of["positions"] if each["conditional"] is not None]
    shares = [each["conditional"] for each in known]
    axes.plot([each["position"] for each in known], shares, "o-", markersize=3, label=label)


def _whiskers(
    axes: Any, x: Sequence[float], found: Sequence[dict[str, Any]], fmt: str = "o", **style: Any
) -> None:
    values = [each["value"] for each in found]
    # A value may lie outside the interval of its draws; whiskers cannot.
    ends = [[max(each["value"] - each["low"], 0.0) for each in found],
            [max(each["high"] - each["value"], 0.0) for each in found]]  # fmt: skip
    axes.errorbar(x, values, yerr=ends, fmt=fmt, markersize=4, capsize=3, **style)
