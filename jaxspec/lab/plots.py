"""Plots of acceptance, with more than the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.lab.intervals import CONFIDENCE, FEWEST, Interval, clustered_interval
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import new_figure

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

NEEDED = ("request_id", "context_length", "drafted", "draft_depth", "accepted", "emitted")
OF_TOKENS = ("request_id", "depth", "accepted", "reached")
ACCEPTANCES = ("cumulative", "conditional")
LABELS = {
    "output_position": "position in the output (tokens)",
    "context_length": "context length (tokens)",
    "prompt_length": "prompt length (tokens)",
    "position": "position in the sequence (tokens)",
    "depth": "draft position",
    "entropy_p": "entropy of the target's distribution (nats)",
    "entropy_q": "entropy of the draft's distribution (nats)",
    "overlap": "overlap of the two distributions",
}
BLUE, ORANGE, GREY = "#3366aa", "#d9822b", "#8a8f98"
SHARE, PER_ROUND = (0.0, 1.0), (1.0, np.inf)  # what acceptance and tokens per round can be


def plot_acceptance(frame: pandas.DataFrame, *, by: str | None = None) -> Figure:
    """A figure of acceptance, with 95 % intervals.

    *Cumulative* acceptance at position i is the fraction of drafting rounds that accepted at least
    i tokens; *conditional* acceptance is the fraction among those that accepted all tokens before i
    and drafted i. Figures are `pooled`: over all rounds or tokens, whichever request they are of.

    Of `Completions.rounds`, the panels are acceptance by position; emitted tokens per round along
    an axis, by group, and their distribution; with groups also both acceptances by position and
    group. Of `Completions.tokens`, they are conditional acceptance by position, and along an axis
    or by group: over the target's entropy, and over the overlap of the distributions, if the trace
    has them.

    Rounds of a request are alike, so a request counts as one observation (`jaxspec.lab.intervals`).
    With fewer than five there is no interval, and dots show each request's own figure.

    Args:
      frame: from `Completions.rounds` or `.tokens`; several may be joined with `pandas.concat`.
      by: a column. One of text or with few values names groups, e.g. `category`; one of numbers is
        the axis, in bins of equally many rows, e.g. `output_position` or `entropy_p`. Default: the
        groups `domain` or `category`, and the axis `output_position`, if the frame has them.

    Returns:
      a `matplotlib.figure.Figure`: a notebook shows it, `savefig` writes it, no window is opened.

    Raises:
      SettingError: matplotlib is not installed, or the frame is empty or lacks a column.
    """
    is_tokens = "depth" in frame
    kind = "tokens" if is_tokens else "rounds"
    needed = OF_TOKENS if is_tokens else NEEDED
    missing = [name for name in (*needed, *([by] if by else [])) if name not in frame]
    if missing:
        level = {"entropy_p": "distributions", "entropy_q": "distributions",
                 "overlap": "distributions"}.get(missing[0])  # fmt: skip
        advice = f" of an engine with trace='{level}'" if level else ""
        if missing[0] == by and not level:
            advice = ", with the groups as a column of it"
        kind = "tokens" if level else kind
        raise SettingError(
            f"The frame lacks the column {missing[0]!r}; give one of Completions.{kind}(){advice}."
        )
    if frame.empty or (is_tokens and not frame.reached.any()):
        raise SettingError(f"A frame without {kind} was given; decode something first.")
    groups, axis = (by, None) if by is None or _is_group(frame[by]) else (None, by)
    if groups is None:
        groups = next((name for name in ("domain", "category") if name in frame), None)
    if is_tokens:
        return _of_tokens(frame[frame.reached], groups=groups if axis is None else None, axis=axis)
    axis = axis or next(name for name in ("output_position", "context_length") if name in frame)
    num_lines = 2 if groups is None else 3
    figure, axes = new_figure(num_lines, 2, size=(10, 3.5 * num_lines))
    for each in axes.flat:
        each.grid(axis="y", alpha=0.25)
    _by_position(axes[0, 0], frame)
    _along(axes[0, 1], frame, axis, "emitted", PER_ROUND)
    if groups is None:
        _by_request(axes[1, 0], frame)
    else:
        _by_group(axes[1, 0], frame, groups, "emitted", PER_ROUND)
        for each, name in zip(axes[2], ACCEPTANCES, strict=True):
            _by_position_and_group(each, frame, groups, name)
        handles, labels = axes[2, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    _distribution(axes[1, 1], frame)
    _say_intervals(figure, frame)
    return figure


def _is_group(column: Any) -> bool:
    return column.dtype.kind not in "iuf" or column.nunique() <= 4


def _of_tokens(judged: Any, *, groups: str | None, axis: str | None) -> Figure:
    """The figure of drafted tokens that were judged."""
    given = [axis] if axis is not None else ["entropy_p", "overlap"]
    along = [name for name in given if name in judged]
    figure, axes = new_figure(
        1, 1 + len(along) + (groups is not None), size=(12, 3.5), squeeze=False
    )
    panels = iter(axes[0])
    depths = sorted(judged.depth.unique())
    first = next(panels)
    draw_intervals(first, depths, [_accepted(judged[judged.depth == depth]) for depth in depths])
    first.set(xlabel=LABELS["depth"], ylabel="conditional acceptance", title="By position")
    for name in along:
        _along(next(panels), judged, name, "accepted", SHARE)
    if groups is not None:
        _by_group(next(panels), judged, groups, "accepted", SHARE)
    _say_intervals(figure, judged)
    return figure


def _say_intervals(figure: Figure, frame: pandas.DataFrame) -> None:
    num = frame.request_id.nunique()
    few = f"a figure that fewer than {FEWEST} have, or all equally, has none; dots are requests"
    figure.supxlabel(f"{CONFIDENCE:.0%} intervals over {num} requests: {few}", fontsize=8)


def _accepted(judged: Any) -> Interval:
    return clustered_interval(judged.accepted, judged.request_id, within=SHARE)


def position_acceptance(frame: pandas.DataFrame, *, by: str | None = None) -> pandas.DataFrame:
    """Acceptance by draft position for the rounds of `frame`, indexed by `position` from 1; with
    `by`, a column of groups, indexed by group and position.

    Its columns: `rounds` that drafted, `cumulative` (accepted at least that many, over these),
    `tried` (rounds whose draft was judged at that position) and `conditional` (accepted, over
    these). Rounds that a stop token or the limit ended count as tried only as far as they went.
    `cumulative_interval` and `conditional_interval` are of type `jaxspec.lab.intervals.Interval`.
    """
    pd = import_extra("pandas", "frames")
    if by is not None:
        groups = {name: position_acceptance(own) for name, own in frame.groupby(by, sort=False)}
        return pd.concat(groups, names=[by])
    drafted = frame[frame.drafted > 0]
    depth = int(drafted.draft_depth.max()) if len(drafted) else 0
    rows = []
    for position in range(1, depth + 1):
        is_accepted = drafted.accepted >= position
        is_tried = (drafted.accepted >= position - 1) & (drafted.draft_depth >= position)
        is_tried &= drafted.emitted >= position
        cumulative, conditional = (
            clustered_interval(is_accepted[own], drafted.request_id[own], within=SHARE)
            for own in (slice(None), is_tried)
        )
        counts = len(drafted), int(is_tried.sum())
        rows.append((position, counts[0], cumulative.value, cumulative))
        rows[-1] += (counts[1], conditional.value, conditional)
    names = ("rounds", "cumulative", "cumulative_interval")
    names += ("tried", "conditional", "conditional_interval")
    return pd.DataFrame(rows, columns=["position", *names]).set_index("position")


def _by_position(axes: Any, frame: pandas.DataFrame) -> None:
    found = position_acceptance(frame)
    for name, colour in zip(ACCEPTANCES, (BLUE, ORANGE), strict=True):
        draw_intervals(axes, found.index, found[f"{name}_interval"], label=name, color=colour)
    axes.set(xlabel="draft position", ylabel="acceptance", ylim=(0, 1.02), title="By position")
    axes.set_xticks(found.index)
    if len(found):
        axes.legend(frameon=False, loc="lower left")


def _by_position_and_group(axes: Any, frame: pandas.DataFrame, by: str, name: str) -> None:
    """One line per group, side by side at each position."""
    found = position_acceptance(frame, by=by)
    groups = found.index.unique(level=0)
    offsets = 0.5 * ((np.arange(len(groups)) + 0.5) / max(len(groups), 1) - 0.5)
    for group, offset in zip(groups, offsets, strict=True):
        own = found.loc[group]
        draw_intervals(axes, own.index + offset, own[f"{name}_interval"], label=str(group))
    positions = found.index.get_level_values("position")
    axes.set(
        xlabel="draft position",
        ylabel=f"{name} acceptance",
        ylim=(0, 1.02),
        title=f"By position and {by}",
    )
    axes.set_xticks(sorted(set(positions)))


def draw_intervals(
    axes: Any, at: Any, found: Any, *, is_across: bool = False, **style: Any
) -> None:
    """Draws estimates with whiskers for their intervals, and dots for the points of those that have
    none. `at` are their places along x, or with `is_across` along y; `style` is that of
    `errorbar`."""
    values = np.array([own.value for own in found])
    ends = np.array([(own.value - own.low, own.high - own.value) for own in found]).reshape(-1, 2)
    which, places = ("xerr", (values, at)) if is_across else ("yerr", (at, values))
    style = {"fmt": "o" if is_across else "o-", "color": None} | style
    drawn = axes.errorbar(
        *places, **{which: np.clip(ends, 0, None).T}, markersize=4, capsize=3, **style
    )
    dots = [(place, point) for place, own in zip(at, found, strict=True) for point in own.points]
    if dots:
        x, y = np.array(dots).T
        axes.plot(
            *((y, x) if is_across else (x, y)),
            ".",
            color=drawn[0].get_color() if drawn[0] else GREY,
            alpha=0.4,
        )


def _along(axes: Any, frame: Any, name: str, what: str, within: tuple[float, float]) -> None:
    """A figure over bins of equally many rows along an axis."""
    frame = frame[frame[name].notna()]
    values = frame[name]
    num_bins = int(np.clip(len(frame) // 50, 1, 10))
    edges = np.unique(np.quantile(values, np.linspace(0, 1, num_bins + 1))) if len(frame) else []
    index = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, None)
    bins = np.minimum(index, max(len(edges) - 2, 0))
    found = [
        clustered_interval(own[what], own.request_id, within=within)
        for _, own in frame.groupby(bins)
    ]
    draw_intervals(axes, np.asarray(values.groupby(bins).mean()), found, color=BLUE)
    label = LABELS.get(name, name)
    axes.set(
        xlabel=label,
        ylabel=_MEANING[what],
        ylim=(0, 1.02 if within == SHARE else None),
        title=f"By {label.split(' (')[0]}",
    )


_MEANING = {"emitted": "emitted tokens per round (pooled)", "accepted": "conditional acceptance"}


def _by_group(
    axes: Any, frame: pandas.DataFrame, by: str, what: str, within: tuple[float, float]
) -> None:
    groups = {
        str(name): clustered_interval(own[what], own.request_id, within=within)
        for name, own in frame.groupby(by, sort=False)
    }
    groups = dict(sorted(groups.items(), key=lambda item: item[1].value))
    axes.barh(list(groups), [own.value for own in groups.values()], color=BLUE)
    draw_intervals(
        axes, range(len(groups)), list(groups.values()), is_across=True, fmt="none", ecolor=GREY
    )
    for place, own in enumerate(groups.values()):
        axes.text(0.01, place, f"{own.value:.2f}", va="center", color="white", fontsize=9,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set(xlabel=_MEANING[what], title=f"By {by}")
    axes.grid(visible=False)
    axes.grid(axis="x", alpha=0.25)


def _by_request(axes: Any, frame: pandas.DataFrame) -> None:
    means = frame.groupby("request_id").emitted.mean()
    axes.hist(means, bins=min(20, max(5, len(means) // 3)), color=BLUE, edgecolor="white")
    axes.set(
        xlabel="emitted tokens per round (mean of a request)",
        ylabel="requests",
        title=f"Over {len(means)} requests",
    )


def _distribution(axes: Any, frame: pandas.DataFrame) -> None:
    counts = frame.emitted.value_counts(normalize=True).sort_index()
    axes.bar(counts.index, counts, color=BLUE, width=0.8)
    mean = frame.emitted.mean()
    axes.axvline(mean, color=ORANGE, linewidth=1.5, label=f"mean {mean:.2f}")
    axes.legend(frameon=False, labelcolor=ORANGE)
    axes.set(
        xlabel="emitted tokens per round",
        ylabel="share of rounds",
        title=f"Over {len(frame)} rounds",
    )
    axes.set_xticks(range(1, int(frame.emitted.max()) + 1))
