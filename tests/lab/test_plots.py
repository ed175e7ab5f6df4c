"""Plots of acceptance: the figures in them, on rounds that can be counted by hand."""

from __future__ import annotations

import importlib

import numpy as np
import pandas as pd
import pytest

from jaxspec.errors import SettingError
from jaxspec.lab.plots import plot_acceptance, position_acceptance


def frame(rounds, **columns):
    """Of (drafted, accepted, emitted), all of one request unless told otherwise."""
    drafted, accepted, emitted = zip(*rounds, strict=True)
    start = 10 + np.cumsum((0, *emitted[:-1]))
    return pd.DataFrame(
        {
            "request_id": "0",
            "context_length": start,
            "drafted": drafted,
            "draft_depth": drafted,
            "accepted": accepted,
            "emitted": emitted,
            **columns,
        }
    )


ROUNDS = [(3, 0, 1), (3, 1, 2), (3, 2, 3), (3, 3, 4), (3, 2, 2), (1, 1, 2), (0, 0, 1)]


def test_acceptance_by_position_on_a_drawn_example():
    found = position_acceptance(frame(ROUNDS))
    assert found.rounds.tolist() == [6, 6, 6]  # those that drafted
    assert found.cumulative.tolist() == [5 / 6, 3 / 6, 1 / 6]
    # Position 2 was not tried by the round that was rejected before it, nor by the short draft;
    # position 3 not by the round that a stop token ended after two either.
    assert found.tried.tolist() == [6, 4, 2]
    assert found.conditional.tolist() == [5 / 6, 3 / 4, 1 / 2]
    # Where no round is cut off and all drafts are as long, conditional ones multiply up.
    whole = position_acceptance(frame(ROUNDS[:4]))
    np.testing.assert_allclose(whole.conditional.cumprod(), whole.cumulative)


def test_a_cut_round_that_counts_as_tried_would_show():
    careless = frame(ROUNDS).assign(emitted=lambda rounds: rounds.accepted + 1)
    assert position_acceptance(careless).tried.tolist() == [6, 4, 3]


def test_panels_show_what_was_counted():
    rounds = frame(ROUNDS * 30, domain=["tales", "code", "code"] * 70)
    position, context, group, distribution, *by_group = plot_acceptance(rounds).axes
    lines = {line.get_label(): line for line in position.containers}
    drawn = lines["conditional"].lines[0].get_ydata(orig=False)
    np.testing.assert_allclose(drawn, position_acceptance(rounds).conditional)
    drawn = lines["cumulative"].lines[0].get_ydata(orig=False)
    np.testing.assert_allclose(drawn, position_acceptance(rounds).cumulative)
    assert group.get_title() == "By domain"
    names = [label.get_text() for label in group.get_yticklabels()]
    by_name = dict(zip(names, [bar.get_width() for bar in group.patches], strict=True))
    assert by_name == pytest.approx(rounds.groupby("domain").emitted.mean().to_dict())
    shares = [bar.get_height() for bar in distribution.patches]
    np.testing.assert_allclose(shares, np.array([2, 3, 1, 1]) / 7)
    for axes, name in zip(by_group, ("cumulative", "conditional"), strict=True):
        assert axes.get_title() == "By position and domain"
        assert axes.get_ylabel() == f"{name} acceptance"
        drawn = {each.get_label(): each.lines[0].get_ydata(orig=False) for each in axes.containers}
        assert drawn.keys() == {"tales", "code"}
        for domain, shares in drawn.items():
            expected = position_acceptance(rounds[rounds.domain == domain])[name]
            np.testing.assert_allclose(shares, expected)
    bins = context.containers[0].lines[0].get_xydata().astype(float)
    assert len(bins) == 4
    assert bins[:, 0].tolist() == sorted(bins[:, 0])
    assert bins[:, 1].mean() == pytest.approx(rounds.emitted.mean(), rel=0.1)


def tokens_frame(num=400, **columns):
    """Judged tokens of eight requests, accepted where the entropy is low, and one row that nothing
    judged."""
    random = np.random.default_rng(0)
    entropy = random.uniform(0, 4, num)
    found = pd.DataFrame(
        {
            "request_id": np.arange(num) % 8,
            "depth": 1 + np.arange(num) % 3,
            "entropy_p": entropy,
            "overlap": 1 - entropy / 4,
            "accepted": random.random(num) > entropy / 4,
            "reached": True,
            **columns,
        }
    )
    return pd.concat([found, found[:1].assign(reached=False, accepted=True, entropy_p=np.nan)])


def test_acceptance_over_entropy_overlap_and_any_axis_of_tokens():
    tokens = tokens_frame(category=["a", "b"] * 200)
    position, entropy, overlap, group = plot_acceptance(tokens).axes
    judged = tokens[tokens.reached]
    drawn = position.containers[0].lines[0].get_ydata(orig=False)
    np.testing.assert_allclose(drawn, judged.groupby("depth").accepted.mean())
    falls, rises = (
        each.containers[0].lines[0].get_ydata(orig=False) for each in (entropy, overlap)
    )
    assert falls[0] > 0.9 > 0.2 > falls[-1]
    assert rises[-1] > 0.9 > 0.2 > rises[0]
    assert "entropy of the target" in entropy.get_xlabel()
    assert group.get_title() == "By category"
    position, axis = plot_acceptance(tokens, by="overlap").axes
    assert "overlap" in axis.get_xlabel()
    with pytest.raises(SettingError, match=r"'entropy_q'.*tokens.*trace='distributions'"):
        plot_acceptance(tokens, by="entropy_q")
    with pytest.raises(SettingError, match="without tokens"):
        plot_acceptance(tokens[~tokens.reached])


def test_an_axis_of_rounds_and_intervals_inside_the_possible_range():
    requests = np.random.default_rng(0).integers(0, 7, 210)
    rounds = frame(ROUNDS * 30, output_position=np.arange(210), request_id=requests)
    figure = plot_acceptance(rounds)
    assert figure.axes[1].get_xlabel() == "position in the output (tokens)"
    assert plot_acceptance(rounds, by="context_length").axes[1].get_title() == "By context length"
    assert "7 requests" in figure._supxlabel.get_text()
    for axes, least, most in zip(figure.axes[:2], (0, 1), (1, np.inf), strict=True):
        for drawn in axes.containers:
            ends = np.concatenate([each for line in drawn.lines[2] for each in line.get_segments()])
            ends = ends[:, 1]
            assert len(ends)
            assert np.nanmin(ends) >= least
            assert np.nanmax(ends) <= most
    found = position_acceptance(rounds)
    assert all(own.low < own.value < own.high for own in found.cumulative_interval)
    # Two requests have no interval; each one's own figure is a dot.
    few = plot_acceptance(frame(ROUNDS, request_id=list("0011001"))).axes[0]
    assert len(position_acceptance(frame(ROUNDS)).cumulative_interval[1].points) == 1
    assert any(line.get_marker() == "." for line in few.lines)


def test_acceptance_by_position_and_group():
    rounds = frame(ROUNDS, category=list("aabbaab"), request_id=list("0011001"))
    found = position_acceptance(rounds, by="category")
    assert found.index.names == ["category", "position"]
    for category in "ab":
        own = position_acceptance(rounds[rounds.category == category])
        pd.testing.assert_frame_equal(found.loc[category].map(repr), own.map(repr))
    plain = frame([(0, 0, 1)] * 4, category=list("aabb"))
    assert position_acceptance(plain, by="category").empty
    assert len(plot_acceptance(plain).axes) == 6


@pytest.mark.parametrize(
    "rounds", [ROUNDS[:1], [(0, 0, 1)] * 5, [(2, 2, 3)] * 60], ids=["one", "plain", "equal"]
)
def test_few_rounds_plain_decoding_and_no_spread(rounds, tmp_path):
    figure = plot_acceptance(frame(rounds))
    figure.savefig(tmp_path / "acceptance.png")
    written = (tmp_path / "acceptance.png").read_bytes()
    assert len(written) > 5000
    assert figure._repr_png_()[:4] == written[:4] == b"\x89PNG"
    assert figure.axes[2].get_title() == "Over 1 requests"


def test_groups_of_the_callers_choice_and_what_is_refused(monkeypatch):
    rounds = frame(ROUNDS, category=list("aabbaab"), kind=list("xyxyxyx"))
    assert plot_acceptance(rounds).axes[2].get_title() == "By category"
    assert plot_acceptance(rounds, by="kind").axes[2].get_title() == "By kind"
    with pytest.raises(SettingError, match=r"lacks the column 'genre'.*as a column of it"):
        plot_acceptance(rounds, by="genre")
    with pytest.raises(SettingError, match="lacks the column 'draft_depth'"):
        plot_acceptance(rounds.drop(columns="draft_depth"))
    with pytest.raises(SettingError, match="without rounds"):
        plot_acceptance(rounds[:0])

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SettingError, match=r"matplotlib is needed for plots.*\[analysis\]"):
        plot_acceptance(rounds)
