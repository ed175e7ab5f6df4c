"""Scaling studies: estimators on counts that can be checked by hand, curves, intervals, gates."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from simulated_study import simulate

from jaxspec.errors import SettingError
from jaxspec.lab.intervals import ENDS, resample
from jaxspec.lab.studies.scaling.estimators import (
    acceptance_by_position,
    check_rows,
    estimate,
    estimates_at,
)
from jaxspec.lab.studies.scaling.fits import (
    LogLinear,
    RejectionPower,
    Saturating,
    chain_rate,
    quadratic_term,
)
from jaxspec.lab.studies.scaling.gates import check_gates

pytestmark = pytest.mark.core

X = np.array([1.0, 2, 4, 8, 16, 32])
ONES = np.ones(6)


def row(rounds, *, draft_length=3, max_tokens=None, **columns):
    """A row of rounds (offered, accepted); each emits one token more than it accepts."""
    depth = np.arange(1, draft_length + 1)
    offered, accepted = (np.array(each)[:, None] >= depth for each in zip(*rounds, strict=True))
    is_limited = [tried == kept < draft_length for tried, kept in rounds]
    found = {
        "target": "t",
        "drafter": "2x128",
        "num_params_without_embedding": 1000,
        "num_layers": 2,
        "width": 128,
        "training_tokens": 1000,
        "seed": 0,
        "prompt_set": "own",
        "prompt": 0,
        "verifier": "rejection",
        "temperature": 1.0,
        "draft_length": draft_length,
        "rounds": len(rounds),
        "emitted": sum(kept + 1 for _, kept in rounds),
        "num_limited_rounds": sum(is_limited),
        "offered_at": offered.sum(axis=0).tolist(),
        "accepted_at": accepted.sum(axis=0).tolist(),
    }
    return found | columns


# Rejected at once, after two, accepted whole, and cut by the end of the output after one.
ROUNDS = [(3, 0), (3, 2), (3, 3), (1, 1)]


def test_estimates_on_a_drawn_example():
    [found] = estimate(check_rows(pd.DataFrame([row(ROUNDS)]))).to_dict("records")
    assert found["emitted_per_round"] == 10 / 4
    assert found["tau"] == 8 / 3  # without the last round, which the end cut short
    assert found["rate"] == 6 / (6 + 2)  # the last round rejects nothing
    assert list(found["judged"]) == [3, 2, 2]
    assert list(found["kept"]) == [2, 2, 1]
    by_position = acceptance_by_position(estimate(pd.DataFrame([row(ROUNDS)])))
    assert [each["conditional"] for each in by_position] == [2 / 3, 1, 1 / 2]
    assert sum(each["cumulative"] for each in by_position) == pytest.approx(8 / 3 - 1)


def test_an_output_that_ends_at_a_stop_token_says_what_its_last_round_emitted():
    # The last round accepted two drafts, the second of which was the stop token.
    stopped = row([(3, 1), (3, 2)], emitted=4, num_limited_rounds=1)
    with pytest.raises(SettingError, match="column last_emitted"):
        check_rows(pd.DataFrame([stopped]))
    [found] = estimate(check_rows(pd.DataFrame([stopped | {"last_emitted": 2}]))).to_dict("records")
    assert found["tau"] == 2.0
    assert list(found["kept"]) == [1, 0, 0]
    for value in (9, "two"):
        with pytest.raises(SettingError, match=f"last_emitted {value}, expected from 1 up to its"):
            check_rows(pd.DataFrame([stopped | {"last_emitted": value}]))


def test_a_single_round_is_all_there_is():
    [found] = estimate(check_rows(pd.DataFrame([row([(2, 2)])]))).to_dict("records")
    assert found["tau"] == found["emitted_per_round"] == 3.0


def test_tau_is_unbiased_where_emitted_per_round_is_not():
    truth = np.array([1.5, 3.5, 5.5])
    study = simulate(
        lambda d: truth, seed=0, tokens=(1, 10, 100), num_seeds=1, num_prompts=6000, max_tokens=32,
        prompt_spread=0.0, seed_spread=0.0,
    )  # fmt: skip
    found = estimate(check_rows(study)).groupby("training_tokens")
    np.testing.assert_allclose(found.tau.mean(), truth, atol=0.08)
    assert found.emitted_per_round.mean().iloc[-1] < truth[-1] - 0.16
    np.testing.assert_allclose(found.rate.mean(), chain_rate(truth, 8), atol=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accepted_at": [3, 4, 1]}, r"accepted_at \[3, 4, 1\], expected at most offered_at"),
        ({"accepted_at": [2, 3, 1]}, "no more at a position than at the one before it"),
        ({"accepted_at": [2, float("nan"), 1]}, "counts from 0 up"),
        ({"accepted_at": [2, 1]}, r"a list of 3 numbers"),
        ({"accepted_at": ["3", "2", "1"]}, r"a list of 3 numbers"),
        ({"offered_at": [[4, 3, 3]]}, r"a list of 3 numbers"),
        ({"offered_at": [9, 3, 3]}, "at most its 4 rounds"),
        ({"rounds": 0}, "rounds 0, expected at least 1"),
        ({"emitted": float("nan")}, "emitted nan, expected at least 0"),
        ({"emitted": 11}, "11 emitted tokens, expected at most a token for each of 4 rounds"),
        ({"num_limited_rounds": 5}, "5 limited rounds, expected at most its 4 rounds"),
        ({"num_limited_rounds": 0.5}, "num_limited_rounds 0.5, expected a whole number"),
        ({"training_tokens": -1}, "training_tokens -1, expected at least 1"),
        ({"training_tokens": float("inf")}, "training_tokens inf, expected a finite number"),
        ({"rounds": "4"}, "rounds 4, expected at least 1"),
        ({"seed": float("nan")}, "seed nan, expected a finite number"),
        ({"seed": "first"}, "seed first, expected a finite number"),
        ({"temperature": float("inf")}, "temperature inf, expected a finite number"),
        ({"verifier": None}, "no verifier, expected one"),
        ({"target": None}, "no target, expected one"),
        ({"held_out_loss": "low"}, "held_out_loss low, expected a number"),
    ],
)
def test_impossible_counts_name_their_row(changes, message):
    rows = [row(ROUNDS, prompt=index) for index in range(3)]
    rows[1] |= changes
    with pytest.raises(SettingError, match=message) as caught:
        check_rows(pd.DataFrame(rows))
    assert "Row 1 (drafter 2x128" in str(caught.value)
    assert "prompt 1)" in str(caught.value)


def test_a_prompt_that_is_there_twice_is_named():
    """As when a table was joined to itself; other prompts, seeds and ways of decoding are fine."""
    rows = [row(ROUNDS), row(ROUNDS, prompt=1), row(ROUNDS, seed=1), row(ROUNDS, temperature=0.5)]
    check_rows(pd.DataFrame(rows))
    with pytest.raises(SettingError, match=r"Row 4 .* has the same prompt as an earlier row"):
        check_rows(pd.DataFrame([*rows, rows[2]]))


def test_rows_that_are_no_study():
    rows = pd.DataFrame([row(ROUNDS), row(ROUNDS, target="u")])
    with pytest.raises(SettingError, match=r"rows are of 2 targets \(t, u\)"):
        check_rows(rows)
    with pytest.raises(SettingError, match="lack the column 'rounds'"):
        check_rows(rows.drop(columns="rounds"))
    with pytest.raises(SettingError, match="without rows"):
        check_rows(rows[:0])


def test_points_keep_the_seeds_and_prompts_that_are_everywhere():
    rows = [
        row(ROUNDS, training_tokens=tokens, seed=seed, prompt=prompt)
        for tokens in (10, 20)
        for seed in (0, 1)
        for prompt in range(6)
        if (tokens, seed) != (20, 1) and (tokens, prompt) != (10, 5)
    ]
    values, x, seeds, notes = estimates_at(
        estimate(check_rows(pd.DataFrame(rows))), "training_tokens", "tau"
    )
    assert values.shape == (2, 1, 5)
    assert x.tolist() == [10, 20]
    assert seeds == [0]
    assert "seeds 1" in notes[0]
    assert "1 of 6 prompts" in notes[1]


@pytest.mark.parametrize(
    ("form", "params"),
    [
        (LogLinear(), [1.2, 0.7]),
        (Saturating(), [3.0, 1.8, 0.25]),
        (RejectionPower(8), [0.8, 0.3]),
        (RejectionPower(8, is_logit=True), [0.8, 0.3]),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_curves_are_found_again(form, params):
    weights = np.array([1.0, 2, 3, 1, 2, 3])
    y = form.predict(np.array(params), 1000 * X)
    found = form.fit(1000 * X, y, weights)
    np.testing.assert_allclose(found, params, rtol=2e-2)
    np.testing.assert_allclose(form.predict(found, 1000 * X), y, atol=2e-3)
    # Many curves at once are the same as one by one, but a rejection power has the weights of the
    # first.
    many = y + 0.01 * np.random.default_rng(0).standard_normal((5, 6))
    same = 1 if isinstance(form, RejectionPower) else 5
    one_by_one = [form.fit(1000 * X, each, weights) for each in many]
    np.testing.assert_allclose(form.fit(1000 * X, many, weights)[:same], one_by_one[:same])


def test_a_parabola_has_its_quadratic_term_and_a_line_none():
    decades, weights = np.log10(X), np.array([1.0, 2, 3, 1, 2, 3])
    curves = np.stack([1.2 + 0.7 * decades, 1.2 + 0.7 * decades - 0.1 * decades**2])
    np.testing.assert_allclose(quadratic_term(X, curves, weights), [0.0, -0.1], atol=1e-12)


def coverage(*, seed_spread, num_seeds, careless=False, trials=400):
    """How often the interval of a slope holds it, of normal noise, prompts and seeds whose slopes
    differ."""
    random, held = np.random.default_rng(0), 0
    steps = np.log10(X)[:, None, None]
    for _ in range(trials):
        values = random.standard_normal((6, num_seeds, 24))
        values += random.standard_normal(24) * (1 + 0.5 * steps)
        values += seed_spread * random.standard_normal((1, num_seeds, 1)) * steps
        if careless:  # cells as if they had nothing in common
            cells = values.reshape(6, -1)
            drawn = random.integers(cells.shape[1], size=(400, cells.shape[1]))
            draws = np.stack([cells[:, each].mean(axis=1) for each in drawn])
        else:
            draws = resample(values, num_draws=400, random=random)[1:]
        low, high = np.quantile(LogLinear().fit(X, draws, ONES)[:, 1], ENDS)
        held += low <= 0.0 <= high
    return held / trials


@pytest.mark.parametrize("seed_spread", [0.0, 0.1])
def test_intervals_hold_the_slope_as_often_as_they_say(seed_spread):
    assert 0.90 <= coverage(seed_spread=seed_spread, num_seeds=3) <= 0.98


def test_three_seeds_that_differ_more_than_prompts_are_too_few():
    """As docs/scaling.md says: such an interval ends at the lowest and the highest seed, between
    which the truth lies three times in four."""
    assert 0.68 <= coverage(seed_spread=1.0, num_seeds=3) <= 0.84
    assert 0.90 <= coverage(seed_spread=1.0, num_seeds=12, trials=200) <= 0.98


def test_cells_taken_as_independent_are_found_out():
    assert coverage(seed_spread=1.0, num_seeds=3, careless=True, trials=100) < 0.6


def test_one_seed_has_the_intervals_of_its_prompts():
    values = np.random.default_rng(0).standard_normal((6, 1, 40))
    means, *draws = resample(values, num_draws=4000, random=np.random.default_rng(1))[:, 0]
    assert means == values[0].mean()
    low, high = np.quantile(draws, ENDS)
    assert high - low == pytest.approx(2 * 1.96 * values[0, 0].std(ddof=1) / np.sqrt(40), rel=0.07)


PASSING = {
    "num_points": 6,
    "decades": 1.505,
    "held_out": {"observed": 2.0, "predicted": 2.1, "low": 1.9, "high": 2.3, "is_inside": True},
    "curvature": None,
    "all_accepted": 0.05,
    "response": "tau",
    "num_seeds": 3,
    "decades_beyond": 1.0,
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("", {}),
        ("points", {"num_points": 4}),
        ("points", {"decades": 1.2}),
        ("largest point held out", {"held_out": PASSING["held_out"] | {"is_inside": False}}),
        ("largest point held out", {"held_out": None}),
        ("no curvature", {"curvature": (0.01, 0.2)}),
        ("no curvature", {"curvature": None}),
        ("not saturated", {"all_accepted": 0.2}),
        ("", {"all_accepted": 0.2, "response": "logit"}),
        ("seeds", {"num_seeds": 2}),
        ("extrapolation", {"decades_beyond": 1.5}),
    ],
)
def test_each_gate_fails_alone(name, changes):
    given = PASSING | {"curvature": (-0.1, 0.1)} | changes
    if given["curvature"] is not None:
        low, high = given["curvature"]
        given["curvature"] = {"value": (low + high) / 2, "low": low, "high": high}
    gates = check_gates(**given)
    assert [gate["name"] for gate in gates if not gate["passes"]] == ([name] if name else [])
