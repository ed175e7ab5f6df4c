"""Plots of acceptance, with more than the mean."""

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
ACCEPTANCES = ("cumulative", "conditional")
BLUE, ORANGE, GREY = "#3366aa", "#d9822b", "#8a8f98"


def plot_acceptance(frame: pandas.DataFrame, *, by: str | None = None) -> Figure:
    """A figure of acceptance by draft position and emitted tokens per round, with 95 % intervals.

    *Cumulative* acceptance at position i is the fraction of drafting rounds that accepted at least
    i tokens; *conditional* acceptance is the fraction among those that accepted all tokens before i
    and drafted i. Panels: acceptance by position; emitted tokens per round by context length, by
    group, and their distribution; with groups also both acceptances by position and group.

    Points, lines and bars show means over rounds, and whiskers their intervals. The rounds of a
    request are correlated, so a request counts as one observation of several rounds (see
    `clustered_mean`): with one request there is no interval.

    Args:
      frame: from `Completions.rounds`; several may be joined with `pandas.concat`.
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

    num_lines = 2 if by is None else 3
    figure, axes = new_figure(num_lines, 2, size=(10, 3.5 * num_lines))
    for each in axes.flat:
        each.grid(axis="y", alpha=0.25)
    _by_position(axes[0, 0], frame)
    _by_context(axes[0, 1], frame)
    if by is None:
        _by_request(axes[1, 0], frame)
    else:
        _by_group(axes[1, 0], frame, by)
        for each, name in zip(axes[2], ACCEPTANCES, strict=True):
            _by_position_and_group(each, frame, by, name)
        handles, labels = axes[2, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    _distribution(axes[1, 1], frame)
    return figure


def position_acceptance(frame: pandas.DataFrame, *, by: str | None = None) -> pandas.DataFrame:
    """Acceptance by draft position for the rounds of `frame`, indexed by `position` from 1; with
    `by`, a column of groups, indexed by group and position.

    Its columns: `rounds` that drafted, `cumulative` (accepted at least that many, over these),
    `tried` (rounds whose draft was judged at that position) and `conditional` (accepted, over
    these). Rounds that a stop token or the limit ended count as tried only as far as they went.
    `cumulative_error` and `conditional_error` are half their 95 % intervals (`clustered_mean`).
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
        cumulative, error = clustered_mean(is_accepted, drafted.request_id)
        of_tried = clustered_mean(is_accepted[is_tried], drafted.request_id[is_tried])
        counts = len(drafted), int(is_tried.sum())
        rows.append((position, counts[0], cumulative, error, counts[1], *of_tried))
    names = ("rounds", "cumulative", "cumulative_error")
    names += ("tried", "conditional", "conditional_error")
    return pd.DataFrame(rows, columns=["position", *names]).set_index("position")


def clustered_mean(values: Any, clusters: Any) -> tuple[float, float]:
    """The mean of `values`, and half its 95 % interval if values within a cluster are correlated.

    With r the mean, and x_c the sum and n_c the number of the values of cluster c of C, the
    variance of r is C / (C - 1) sum((x_c - r n_c)^2) / sum(n_c)^2 (a ratio of two sums over
    clusters; Cochran 1977, section 6.5), and the interval is Student's with C - 1 degrees of
    freedom.

    Args:
      values: `[n]` numbers or bools.
      clusters: `[n]` labels, e.g. request ids.

    Returns:
      mean and half width, fp64; NaN without values, and the half width also with one cluster.
    """
    # Importing scipy.stats takes a second, and importing jaxspec imports this module.
    from scipy.special import stdtrit

    values = np.asarray(values, np.float64)
    if not len(values):
        return float("nan"), float("nan")
    mean = float(values.mean())
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    num_clusters = int(cluster.max()) + 1
    if num_clusters == 1:
        return mean, float("nan")
    residuals = np.bincount(cluster, weights=values - mean)
    variance = num_clusters / (num_clusters - 1) * np.sum(residuals**2) / len(values) ** 2
    return mean, float(stdtrit(num_clusters - 1, 0.975) * np.sqrt(variance))


def _by_position(axes: Any, frame: pandas.DataFrame) -> None:
    found = position_acceptance(frame)
    for name, colour in zip(ACCEPTANCES, (BLUE, ORANGE), strict=True):
        _draw_shares(axes, found.index, found[name], found[f"{name}_error"], name, color=colour)
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
        _draw_shares(axes, own.index + offset, own[name], own[f"{name}_error"], str(group))
    positions = found.index.get_level_values("position")
    axes.set(
        xlabel="draft position",
        ylabel=f"{name} acceptance",
        ylim=(0, 1.02),
        title=f"By position and {by}",
    )
    axes.set_xticks(sorted(set(positions)))


def _draw_shares(axes: Any, at: Any, share: Any, error: Any, label: str, **style: Any) -> None:
    """Shares with whiskers that end at 0 and 1."""
    ends = np.nan_to_num([np.minimum(error, share), np.minimum(error, 1 - share)])
    axes.errorbar(at, share, yerr=ends, fmt="o-", markersize=4, capsize=3, label=label, **style)


def _by_context(axes: Any, frame: pandas.DataFrame) -> None:
    """Means over bins of equally many rounds."""
    num_bins = int(np.clip(len(frame) // 50, 1, 10))
    edges = np.unique(np.quantile(frame.context_length, np.linspace(0, 1, num_bins + 1)))
    index = np.clip(np.searchsorted(edges, frame.context_length, side="right") - 1, 0, None)
    bins = np.minimum(index, max(len(edges) - 2, 0))
    found, centres = _emitted(frame, bins), frame.groupby(bins).context_length.mean()
    axes.errorbar(centres, found["mean"], yerr=found.error, marker="o", capsize=3, color=BLUE)
    axes.set(
        xlabel="context length (tokens)",
        ylabel="emitted tokens per round",
        ylim=(0, None),
        title="By context length",
    )


def _by_group(axes: Any, frame: pandas.DataFrame, by: str) -> None:
    found = _emitted(frame, by).sort_values("mean")
    names = list(found.index.astype(str))
    axes.barh(names, found["mean"], xerr=found.error, color=BLUE, ecolor=GREY, capsize=3)
    for place, mean in enumerate(found["mean"]):
        axes.text(0.05, place, f"{mean:.2f}", va="center", color="white", fontsize=9)
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
    axes.axvline(mean, color=ORANGE, linewidth=1.5, label=f"mean {mean:.2f}")
    axes.legend(frameon=False, labelcolor=ORANGE)
    axes.set(
        xlabel="emitted tokens per round",
        ylabel="share of rounds",
        title=f"Over {len(frame)} rounds",
    )
    axes.set_xticks(range(1, int(frame.emitted.max()) + 1))


def _emitted(frame: pandas.DataFrame, by: Any) -> pandas.DataFrame:
    """The `mean` of emitted tokens per round by group, in the order of their first rounds, and
    half its interval, `error`; 0 where there is none."""
    pd = import_extra("pandas", "frames")
    found = {
        name: clustered_mean(own.emitted, own.request_id)
        for name, own in frame.groupby(by, sort=not isinstance(by, str))
    }
    return pd.DataFrame.from_dict(found, orient="index", columns=["mean", "error"]).fillna(0)
