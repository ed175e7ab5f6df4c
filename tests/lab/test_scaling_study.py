"""The analysis of a whole study: law or trend, the batch axis, the report, what is refused."""

from __future__ import annotations

import functools
import json
import pathlib
import re

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from simulated_study import TRUTHS, simulate

from jaxspec.errors import SettingError
from jaxspec.lab.studies.scaling import analyse, print_report, read_rows, write_report
from jaxspec.lab.studies.scaling.fits import LogLinear
from jaxspec.lab.studies.scaling.report import findings

SHIPPED = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results" / "scaling-cpu"
OVER_128 = tuple(31_250 * 2**power for power in range(8))
# Of every token, so that E(n) and all that follows from it can be written down.
RATE = 0.6


@functools.cache
def simulated(truth, **changes):
    return simulate(TRUTHS[truth], **changes)


@functools.cache
def several():
    """Drafters of 1 to 6 layers, three seeds of one of them."""
    found = [simulated("saturating")]
    for layers in (1, 3, 4, 6):
        gain = 0.3 * np.log10(layers / 2 + 0.5)
        rows = simulate(
            lambda d, gain=gain: TRUTHS["saturating"](d) + gain, seed=layers, num_seeds=1
        )
        num_params = 150_000 * layers
        found.append(
            rows.assign(
                drafter=f"{layers}x128", num_layers=layers, num_params_without_embedding=num_params
            )
        )
    return pd.concat(found, ignore_index=True)


def times(**changes):
    cells = [
        {
            "drafter": "2x128",
            "batch": batch,
            "draft_length": n,
            "plain_s": 1e-3 * (1 + batch / 32),
            "round_s": 1e-3 * (1 + (n + 1) * batch / 32) + 1e-4 * n,
        }
        for batch in (1, 2, 4, 8, 16)
        for n in (1, 2, 3, 4, 6, 8)
    ]
    return pd.DataFrame(cells).assign(**changes)


def test_the_saturating_truth_is_a_trend_however_straight_it_looks():
    """3.0 - 1.8 D^-0.25 over 1 to 128 has an R^2 of 0.97."""
    d = np.array(OVER_128) / OVER_128[0]
    assert np.corrcoef(np.log(d), TRUTHS["saturating"](d))[0, 1] ** 2 > 0.97
    document = analyse(simulated("saturating", tokens=OVER_128), num_draws=500)
    [axis] = document["axes"]
    assert axis["word"] == "trend"
    failing = [gate["name"] for gate in axis["gates"] if not gate["passes"]]
    assert "no curvature" in failing
    assert {"points", "seeds", "not saturated"}.isdisjoint(failing)
    line, saturating, _ = axis["fits"]
    # The line overshoots ten times further on; the truth's own curve does not.
    truth = TRUTHS["saturating"](1280.0)
    assert line["extrapolated"]["low"] > truth
    assert saturating["extrapolated"]["low"] < truth < saturating["extrapolated"]["high"]
    assert abs(saturating["held_out"]["error"]) < line["held_out"]["error"]


def test_the_log_linear_truth_is_a_law():
    document = analyse(simulated("log-linear"), num_draws=500)
    [axis] = document["axes"]
    assert axis["word"] == "law"
    slope = axis["slope_per_decade"]
    assert slope["low"] < 0.7 < slope["high"]
    assert "a law. All gates pass." in axis["sentence"]


def recovered(truth, num_studies, num_draws):
    """Shares of simulated studies that are called a law; whose intervals of the slope, of the
    largest point and of the value at ten times the tokens hold the truth, the last by the curve of
    the truth's own form; and that pass each gate."""
    of, found = TRUTHS[truth], []
    for seed in range(num_studies):
        document = analyse(simulate(of, seed=seed), num_draws=num_draws, seed=seed, response="tau")
        [axis] = document["axes"]
        x = np.array([point["x"] for point in axis["points"]])
        line = LogLinear().fit(x, of(x / x[0]), np.array(axis["weights"]))
        own = next(fit for fit in axis["fits"] if fit["form"] == truth)
        holds = {
            "slope": (axis["slope_per_decade"], line[1]),
            "largest": (axis["points"][-1]["response"], of(x[-1] / x[0])),
            "extrapolated": (own["extrapolated"], of(10 * x[-1] / x[0])),
        }
        found.append(
            {"law": axis["word"] == "law"}
            | {name: each["low"] <= true <= each["high"] for name, (each, true) in holds.items()}
            | {gate["name"]: gate["passes"] for gate in axis["gates"]}
        )
    return pd.DataFrame(found).mean()


def check_recovered(*, num_studies, num_draws, held):
    straight, bent = (recovered(truth, num_studies, num_draws) for truth in TRUTHS)
    assert straight.law >= 0.75
    assert bent.law <= 0.10
    for found in (straight, bent):
        assert found[["slope", "largest", "extrapolated"]].min() >= held
    # Without the gates that look at the shape every line would be a law.
    assert bent[["points", "seeds", "not saturated"]].min() == 1.0


def test_twenty_studies_are_recovered():
    check_recovered(num_studies=20, num_draws=300, held=0.75)


@pytest.mark.slow
def test_three_hundred_studies_are_recovered():
    # 0.95 less twice the error of a share of 300.
    check_recovered(num_studies=300, num_draws=1000, held=0.925)


def test_a_saturated_chain_is_fitted_by_its_rate():
    rows = simulated("saturating", draft_length=2, prompt_spread=0.1, num_prompts=24)
    [axis] = analyse(rows, num_draws=200)["axes"]
    assert axis["response"] == "logit"
    assert axis["points"][-1]["all_accepted"] >= 0.10
    last = axis["points"][-1]
    assert last["response"]["value"] == pytest.approx(np.log(last["rate"] / (1 - last["rate"])))
    [as_tau] = analyse(rows, num_draws=200, response="tau")["axes"]
    assert "not saturated" in [gate["name"] for gate in as_tau["gates"] if not gate["passes"]]


def test_axes_and_what_one_seed_lacks():
    document = analyse(several(), num_draws=200)
    titles = [axis["title"] for axis in document["axes"]]
    assert titles[:2] == ["tokens, 1x128", "tokens, 2x128"]
    assert titles[-1] == "layers, width 128, 1,000,000 tokens"
    layers = document["axes"][-1]
    assert layers["seeds"] == [0]
    assert any("There is one seed (0)" in note for note in layers["notes"])
    assert any("not trained at every point: seeds 1, 2" in note for note in layers["notes"])
    assert layers["slope_per_decade"]["low"] > 0


def test_the_document_is_json_and_the_same_for_the_same_seed():
    first = analyse(simulated("log-linear"), num_draws=100)
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    shuffled = simulated("log-linear").sample(frac=1.0, random_state=0)
    assert analyse(shuffled, num_draws=100) == first
    other = analyse(simulated("log-linear"), num_draws=100, seed=1)
    assert other["axes"][0]["slope_per_decade"] != first["axes"][0]["slope_per_decade"]


def test_seeds_that_were_trained_on_fewer_tokens_are_an_axis_of_their_own():
    rows = simulated("log-linear")
    fewer = rows[(rows.seed == 0) | (rows.training_tokens < 1_000_000)]
    longer, of_all = analyse(fewer, num_draws=100)["axes"]
    assert (len(longer["points"]), longer["seeds"]) == (6, [0])
    assert (len(of_all["points"]), of_all["seeds"]) == (5, [0, 1, 2])
    assert of_all["title"] == "tokens, 2x128, where all seeds were trained"


def of_one_rate():
    """A study in which every token is accepted with the chance `RATE`."""
    emitted = np.sum(RATE ** np.arange(9))
    return simulate(
        lambda d: np.full(len(d), emitted), seed=0, tokens=(1, 10, 100), num_seeds=1,
        num_prompts=400, prompt_spread=0.0, seed_spread=0.0,
    )  # fmt: skip


def test_the_best_draft_length_is_that_of_the_most_tokens_per_second():
    measured = times()
    document = analyse(of_one_rate(), measured, num_draws=200)
    [found] = document["batch"]
    for cell in found["batches"]:
        of_batch = measured[measured.batch == cell["batch"]]
        rates = {0: 1.0 / of_batch.plain_s.iloc[0]} | {
            int(n): np.sum(RATE ** np.arange(n + 1)) / seconds
            for n, seconds in zip(of_batch.draft_length, of_batch.round_s, strict=True)
        }
        assert cell["best"] == max(rates, key=rates.get)
        assert cell["low"] <= cell["best"] <= cell["high"]
        assert cell["speedup"] == pytest.approx(max(rates.values()) / rates[0], rel=0.03)
    best = [cell["best"] for cell in found["batches"]]
    assert found["falls"]
    assert best[0] > best[-1]


def test_times_of_a_busy_machine_are_marked():
    rows, measured = of_one_rate(), times(load_average=1.9, cpu_count=2)
    document = analyse(rows, measured, num_draws=100)
    assert [cell["load_average"] for cell in document["batch"][0]["batches"]] == [1.9] * 5
    assert "not to be trusted" not in " ".join(findings(document))
    measured.loc[measured.batch == 4, "load_average"] = 3.5
    text = " ".join(findings(analyse(rows, measured, num_draws=100)))
    assert "load average up to 3.5 on 2 CPUs)." in text
    unknown = analyse(rows, times(load_average=None, cpu_count=2), num_draws=100)
    assert "load_average" not in unknown["batch"][0]["batches"][0]


def test_the_report_shows_what_was_found(tmp_path):
    document = analyse(several(), times(), num_draws=100)
    write_report(document, tmp_path)
    page = (tmp_path / "scaling.html").read_text()
    assert json.loads((tmp_path / "scaling.json").read_text()) == document
    slope = document["axes"][0]["slope_per_decade"]
    assert f"{slope['value']:+.3f} ({slope['low']:+.3f} to {slope['high']:+.3f})" in page
    for text in ("Gates, tokens, 1x128: a trend", "FAIL", "extrapolated", "Setup"):
        assert text in page
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"tokens.png", "layers.png", "positions.png"}
    console = Console(record=True, width=160)
    print_report(document, console)
    text = console.export_text()
    assert "the best draft length falls with the batch" in text
    assert "a law" not in text


def test_rows_come_back_from_files(tmp_path):
    rows = simulated("log-linear")
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_json(tmp_path / "rows.jsonl.gz", orient="records", lines=True)
    expected = analyse(rows, num_draws=100)
    for name in ("rows.parquet", "rows.jsonl.gz"):
        assert analyse(read_rows(tmp_path / name), num_draws=100) == expected
    (tmp_path / "rows.jsonl").write_text("nonsense")
    with pytest.raises(SettingError, match="cannot be read as a table"):
        read_rows(tmp_path / "rows.jsonl")
    with pytest.raises(SettingError, match=r"neither a \.parquet nor a \.jsonl"):
        read_rows(tmp_path / "rows.csv")


def test_few_points_are_fitted_and_say_so():
    rows = simulated("log-linear")
    four = analyse(rows[rows.training_tokens <= 250_000], num_draws=100)["axes"][0]
    assert four["gates"][0]["found"] == "4 over 0.90"
    assert four["word"] == "trend"
    three = analyse(rows[rows.training_tokens <= 125_000], num_draws=100)["axes"][0]
    assert [fit["form"] for fit in three["fits"]] == ["log-linear"]
    with pytest.raises(SettingError, match="No axis has the 3 points"):
        analyse(rows[rows.training_tokens <= 62_500])
    layers = several()
    document = analyse(layers[layers.num_layers <= 2], num_draws=100)
    assert any("2 points are too few for a fit" in note for note in document["notes"])


def test_settings_and_times_that_cannot_be(tmp_path):
    rows = simulated("log-linear")
    with pytest.raises(SettingError, match="no response 'taus'"):
        analyse(rows, response="taus")
    with pytest.raises(SettingError, match="at least 100 draws"):
        analyse(rows, num_draws=1)
    with pytest.raises(SettingError, match="times lack the column 'plain_s'"):
        analyse(rows, times().drop(columns="plain_s"))
    with pytest.raises(SettingError, match=r"has round_s -1, expected a finite number above 0"):
        analyse(rows, times(round_s=-1.0))
    with pytest.raises(SettingError, match="has round_s nan, expected a finite number above 0"):
        analyse(rows, times(round_s="long"))
    with pytest.raises(SettingError, match="times are of drafter '9x9', which the rows do not"):
        analyse(rows, times(drafter="9x9"))
    with pytest.raises(SettingError, match=r"4 prompts were decoded at every.*at least 5, because"):
        analyse(rows[rows.prompt < 4])
    apart = rows[(rows.seed == 0) == (rows.training_tokens < 100_000)]
    with pytest.raises(SettingError, match="No seed was trained at every training_tokens"):
        analyse(apart)


def differences(found, expected, path=""):
    """Where two documents differ, figures by more than what another machine's sums may."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = found.keys() | expected.keys()
        pairs = [(name, found.get(name), expected.get(name)) for name in sorted(names)]
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = list(zip(map(str, range(len(found))), found, expected, strict=True))
    else:
        is_figure = isinstance(expected, float) and isinstance(found, (int, float))
        if found != (pytest.approx(expected, rel=1e-3, abs=1e-6) if is_figure else expected):
            yield f"{path}: {found} is not {expected}"
        return
    for name, one, other in pairs:
        yield from differences(one, other, f"{path}/{name}")


def test_a_figure_that_does_not_follow_is_seen():
    first = analyse(simulated("log-linear"), num_draws=100)
    second = json.loads(json.dumps(first))
    assert not list(differences(first, second))
    second["axes"][0]["slope_per_decade"]["low"] += 0.01
    [found] = differences(first, second)
    assert found.startswith("/axes/0/slope_per_decade/low")


@pytest.mark.skipif(not SHIPPED.exists(), reason="this checkout has no shipped study")
def test_the_shipped_figures_follow_from_the_shipped_rows():
    expected = json.loads((SHIPPED / "scaling.json").read_text())
    rows, times = (read_rows(SHIPPED / f"{name}.parquet") for name in ("rows", "times"))
    found = json.loads(json.dumps(analyse(rows, times)))
    names = ("axes", "acceptance_by_position", "batch", "notes")
    seen = differences(*({name: each[name] for name in names} for each in (found, expected)))
    no_longer = r"/axes/\d+/direction:|/batch/0/.*(fit|is_clipped|predict)"
    assert not [one for one in seen if not re.match(no_longer, one)]


def figures_of_the_page(document):
    """What docs/scaling.md says of the shipped study beside its tables, which are made from its
    document."""
    for axis in document["axes"]:
        if axis["is_main"] and axis["axis"] == "tokens" and axis["curvature"]:  # with enough points
            yield "{value:+.2f} [{low:+.2f}, {high:+.2f}]".format_map(axis["curvature"])
            for fit in axis["fits"]:
                yield f"{fit['held_out']['predicted']:.2f}"
    checks = document["checks"]
    yield f"All {checks['num_compared_with_plain']:,} greedy and coupled outputs"
    assert checks["num_compared_with_plain"] == checks["num_equal_to_plain"]


@pytest.mark.skipif(not SHIPPED.exists(), reason="this checkout has no shipped study")
def test_the_page_has_the_shipped_figures():
    page = " ".join((SHIPPED.parents[1] / "scaling.md").read_text().split())
    document = json.loads((SHIPPED / "scaling.json").read_text())
    missing = [figure for figure in figures_of_the_page(document) if figure not in page]
    assert not missing
    # Sabotage: a figure that is another is noticed.
    document["checks"]["num_compared_with_plain"] += 1
    document["checks"]["num_equal_to_plain"] += 1
    assert any(figure not in page for figure in figures_of_the_page(document))
