"""Plots of acceptance: never only a mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.errors import SettingError
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import new_figure

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

NEEDED = ("request_id", "context_length", "drafted", "draft_depth", "accepted", "emitted")
BLUE, ORANGE, GREY = "#3366aa", "#d9822b", "#8a8f98"


def plot_acceptance(frame: pandas.DataFrame, *, by: str | None = None) -> Figure:
    """A figure of four panels: acceptance by draft position, emitted tokens per round by context
    length, by group, and their distribution.

    *Cumulative* acceptance at position i is the share of drafting rounds that accepted at least i
    tokens; *conditional* acceptance is the share of those that had accepted all before i and did
    draft i. Bars and lines show means, and whiskers their 95 % interval (1.96 standard errors,
    rounds taken as independent).

    Args:
      frame: of `Completions.rounds`; several joined with `pandas.concat` will do.
      by: the column that names each round's group, e.g. `category`; default `domain` or `category`
        if the frame has one, else the panel shows the distribution over requests.

    Returns:
      a `matplotlib.figure.Figure`: a notebook shows it, `savefig` writes it, no window is opened.

    Raises:
      SettingError: matplotlib is not installed, or the frame is empty or lacks a column.
    """
    missing = [name for name in (*NEEDED, *([by] if by else [])) if name not in frame]
    if missing:
        raise SettingError(
            f"The frame lacks the column {missing[0]!r}; give one of Completions.rounds()"
            f"{', with the groups as a column of it' if missing[0] == by else ''}."
        )
    if frame.empty:
        raise SettingError("A frame without rounds was given; decode something first.")
    if by is None:
        by = next((name for name in ("domain", "category") if name in frame), None)

    figure, axes = new_figure(2, 2, size=(10, 7))
    for each in axes.flat:
        each.grid(axis="y", alpha=0.25)
    _by_position(axes[0, 0], frame)
    _by_context(axes[0, 1], frame)
    if by is None:
        _by_request(axes[1, 0], frame)
    else:
        _by_group(axes[1, 0], frame, by)
    _distribution(axes[1, 1], frame)
    return figure


def position_acceptance(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Acceptance by draft position of the rounds of `frame`, indexed by `position` from 1.

    Its columns: `rounds` that drafted, `cumulative` (accepted at least so many, over these),
    `tried` (rounds whose draft was judged at that position) and `conditional` (accepted, over
    these). Rounds that a stop token or the limit ended count as tried only as far as they went.
    """
    pd = import_extra("pandas", "frames")
    drafted = frame[frame.drafted > 0]
    depth = int(drafted.draft_depth.max()) if len(drafted) else 0
    rows = []
    for position in range(1, depth + 1):
        is_accepted = drafted.accepted >= position
        is_tried = (drafted.accepted >= position - 1) & (drafted.draft_depth >= position)
        is_tried &= drafted.emitted >= position
        rows.append(
            {
                "position": position,
                "rounds": len(drafted),
                "cumulative": is_accepted.mean(),
                "tried": int(is_tried.sum()),
                "conditional": is_accepted[is_tried].mean(),
            }
        )
    names = ["position", "rounds", "cumulative", "tried", "conditional"]
    return pd.DataFrame(rows, columns=names).set_index("position")


def _by_position(axes: Any, frame: pandas.DataFrame) -> None:
    found = position_acceptance(frame)
    for name, colour, number in (
        ("cumulative", BLUE, found.rounds),
        ("conditional", ORANGE, found.tried),
    ):
        share = found[name]
        axes.errorbar(
            found.index,
            share,
            yerr=1.96 * np.sqrt(share * (1 - share) / number),
            marker="o",
            capsize=3,
            color=colour,
            label=name,
        )
    axes.set(xlabel="draft position", ylabel="acceptance", ylim=(0, 1.02), title="By position")
    axes.set_xticks(found.index)
    if len(found):
        axes.legend(frameon=False, loc="lower left")


def _by_context(axes: Any, frame: pandas.DataFrame) -> None:
    """Means over bins of equally many rounds."""
    num_bins = int(np.clip(len(frame) // 50, 1, 10))
    edges = np.unique(np.quantile(frame.context_length, np.linspace(0, 1, num_bins + 1)))
    index = np.clip(np.searchsorted(edges, frame.context_length, side="right") - 1, 0, None)
    grouped = frame.groupby(np.minimum(index, max(len(edges) - 2, 0)))
    means, errors = _means(grouped.emitted)
    axes.errorbar(
        grouped.context_length.mean(), means, yerr=errors, marker="o", capsize=3, color=BLUE
    )
    axes.set(
        xlabel="context length (tokens)",
        ylabel="emitted tokens per round",
        ylim=(0, None),
        title="By context length",
    )


def _by_group(axes: Any, frame: pandas.DataFrame, by: str) -> None:
    means, errors = _means(frame.groupby(by, sort=False).emitted)
    order = np.argsort(means.to_numpy())
    names = [str(means.index[n]) for n in order]
    axes.barh(
        names,
        means.to_numpy()[order],
        xerr=np.asarray(errors)[order],
        color=BLUE,
        ecolor=GREY,
        capsize=3,
    )
    for place, n in enumerate(order):
        axes.text(0.05, place, f"{means.iloc[n]:.2f}", va="center", color="white", fontsize=9)
    axes.set(xlabel="emitted tokens per round", title=f"By {by}")
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
    axes.axvline(mean, color=ORANGE, linewidth=1.5)
    axes.annotate(
        f"mean {mean:.2f}",
        (mean, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        color=ORANGE,
    )
    axes.set(
        xlabel="emitted tokens per round",
        ylabel="share of rounds",
        title=f"Over {len(frame)} rounds",
    )
    axes.set_xticks(range(1, int(frame.emitted.max()) + 1))


def _means(grouped: Any) -> tuple[Any, Any]:
    """Means, and half their 95 % intervals; a group of one round has none."""
    return grouped.mean(), 1.96 * (grouped.std() / np.sqrt(grouped.size())).fillna(0)
