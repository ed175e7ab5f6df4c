"""Intervals: how often they hold the truth, how wide they are, and where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from jaxspec.lab.intervals import Interval, clustered_interval, ratio_interval

# By name: a generator of so many values, their mean, and the least share of intervals to hold it.
KINDS = {
    "normal": (lambda random, n: random.normal(5, 1, n), 5.0, 0.93),
    "gamma(2)": (lambda random, n: random.gamma(2, 1, n), 2.0, 0.92),
    "exponential": (lambda random, n: random.exponential(1, n), 1.0, 0.92),
    "beta(.5, 2)": (lambda random, n: random.beta(0.5, 2, n), 0.2, 0.92),
    "log-normal(1)": (lambda random, n: random.lognormal(0, 1, n), np.exp(0.5), 0.87),
}


def covered(kind, num, is_unequal, num_sets):
    """The share of intervals that hold the mean, and their median width over Student's."""
    random, held, widths = np.random.default_rng(0), 0, []
    draw, mean, _ = KINDS[kind]
    for _ in range(num_sets):
        values = draw(random, num)
        sizes = random.integers(10, 41, num) if is_unequal else np.ones(num)
        found = ratio_interval(values * sizes, sizes)
        held += found.low <= mean <= found.high
        residuals = (values - found.value) * sizes
        error = np.sqrt(num / (num - 1) * np.sum(residuals**2)) / np.sum(sizes)
        widths.append((found.high - found.low) / (2 * stats.t.ppf(0.975, num - 1) * error))
    return held / num_sets, np.median(widths)


def check(kind, num, is_unequal, num_sets):
    share, width = covered(kind, num, is_unequal, num_sets)
    print(f"{kind}, {num} clusters{', unequal' * is_unequal}: {share:.3f}, {width:.2f} Student's")
    assert share >= KINDS[kind][2]
    assert kind != "normal" or share <= 0.97
    assert width <= 2


@pytest.mark.core
@pytest.mark.parametrize("is_unequal", [False, True])
@pytest.mark.parametrize(("kind", "num"), [("normal", 5), ("exponential", 5), ("gamma(2)", 10)])
def test_intervals_hold_the_mean_as_often_as_they_say(kind, num, is_unequal):
    check(kind, num, is_unequal, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("is_unequal", [False, True])
@pytest.mark.parametrize("num", [5, 6, 8, 10, 20, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_grid(kind, num, is_unequal):
    check(kind, num, is_unequal, 4000)


@pytest.mark.core
def test_percentiles_would_fail_the_same_check():
    """A negative control: the method of before."""
    random, held = np.random.default_rng(0), 0
    for _ in range(500):
        values = random.exponential(1, 5)
        drawn = values[random.integers(0, 5, (1000, 4))].mean(axis=1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        held += low <= 1 <= high
    assert held / 500 < 0.9


@pytest.mark.core
def test_few_or_equal_clusters_have_no_interval_and_say_so():
    few = ratio_interval([2.0, 6.0], [1, 2])
    assert (few.value, few.points, few.num_clusters) == (8 / 3, (2.0, 3.0), 2)
    assert f"{few:.2f}" == "2.67 [2.00 3.00]"
    equal = ratio_interval([3.0] * 9)
    assert np.isnan(equal.low)
    assert f"{equal:+.2f}" == "+3.00 (=)"
    # One that differs: most draws lack it, and say nothing of how far the mean may be.
    assert np.isnan(ratio_interval([1.0] * 9 + [2.0]).high)
    assert np.isnan(ratio_interval([]).value)
    assert equal.to_json()["low"] is None
    assert f"{Interval.from_json(equal.to_json()):.2f}" == f"{equal:.2f}"
    differing = ratio_interval(np.arange(9.0))
    assert f"{differing:.1f}" == f"4.0 ({differing.low:.1f}, {differing.high:.1f})"


@pytest.mark.core
def test_pooled_and_per_prompt_are_two_figures_and_ranges_are_kept():
    tokens, rounds = np.array([10, 30, 40, 9, 12, 18]), np.array([10, 10, 10, 8, 10, 12])
    assert ratio_interval(tokens, rounds).value == tokens.sum() / rounds.sum()
    assert ratio_interval(tokens / rounds).value == (tokens / rounds).mean()
    free = ratio_interval(tokens, rounds)
    possible = free.low + 0.1, free.high - 0.1
    cut = ratio_interval(tokens, rounds, within=possible)
    assert (cut.low, cut.high) == possible
    shares = clustered_interval([True] * 30 + [False] * 2, list("abcdefgh") * 4, within=(0, 1))
    assert shares.value == 30 / 32
    assert 0 <= shares.low <= shares.high <= 1 or np.isnan(shares.low)


@pytest.mark.core
def test_the_difference_of_two_ratios_is_paired():
    random = np.random.default_rng(0)
    hard, rounds = random.uniform(1, 4, 30), random.integers(10, 40, 30)
    better = (hard + 0.1 + random.normal(0, 0.02, 30)) * rounds
    found = ratio_interval(better, rounds, minus=(hard * rounds, rounds))
    alone = ratio_interval(better, rounds)
    assert 0 < found.low < found.value < found.high < 0.2
    assert found.high - found.low < (alone.high - alone.low) / 10
