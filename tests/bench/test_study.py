"""The study: its cells are kept and resumed, its report is of its cells, and it runs as a whole."""

import copy
import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tiny
import toy
from rich.console import Console

import jaxspec
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.requests.requests import make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.studies import published_figures, study
from jaxspec.studies import report as study_report
from jaxspec.studies.study import Bench, Decoding, Study, serve, system_of

RESULTS = pathlib.Path(study.__file__).parent / "results" / "study-cpu" / "study.json"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("study-models")
    return {
        "target": str(tiny.save(root, "target", text=tiny.tokenizer())),
        "draft": str(tiny.save(root, "draft", seed=1, text=tiny.tokenizer())),
    }


def options(models, output, **changes) -> Study:
    given = {
        **models,
        "output": output,
        "quick": True,
        "batch_sizes": (2,),
        "limit": 6,
        "max_prompt_tokens": 24,
        "max_tokens": 8,
        "draft_length": 3,
        "repeats": 1,
        "pool": 4,
    }
    return Study(**(given | changes))


@pytest.fixture
def bench(models, tmp_path):
    return Bench(options(models, tmp_path), Console(quiet=True))


# ---- cells


def test_a_cell_is_measured_once(bench, models, tmp_path):
    calls = []

    def measure():
        calls.append(1)
        return {"value": len(calls), "engine": {"verifier": "coupled", "exactness": "bitwise"}}

    first = bench.cell("one", measure)
    again = Bench(options(models, tmp_path, resume=True), Console(quiet=True)).cell("one", measure)
    assert calls == [1]
    assert first == again
    provenance = first["provenance"]
    assert provenance["models"]["target"]["sha256"] != provenance["models"]["draft"]["sha256"]
    assert provenance["verifier"] == "coupled"
    for name in ("prompts", "engine", "exactness", "xla_flags", "versions", "devices", "commit"):
        assert name in provenance
    assert str(tmp_path) not in json.dumps(first)  # no path of this machine
    assert str(pathlib.Path(models["target"]).parent) not in json.dumps(first)


def test_a_cell_of_other_settings_is_not_resumed(bench, models, tmp_path):
    bench.cell("one", dict)
    other = Bench(options(models, tmp_path, resume=True, max_tokens=9), Console(quiet=True))
    with pytest.raises(SettingError, match="other models, prompts or options"):
        other.cell("one", dict)


def test_a_failed_measurement_leaves_no_cell(bench, tmp_path):
    def fail():
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError):
        bench.cell("one", fail)
    assert not list((tmp_path / "cells").glob("*")) if (tmp_path / "cells").exists() else True
    assert bench.cell("one", lambda: {"value": 3})["value"] == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"limit": 0}, "--limit 0"),
        ({"batch_sizes": ()}, "--batch-sizes nothing"),
        ({"batch_sizes": (0, 2)}, "--batch-sizes 0 2"),
        ({"repeats": 0}, "--repeats 0"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(tmp_path, changes, sentence):
    made = dataclasses.replace(options({"target": "no", "draft": "no"}, tmp_path), **changes)
    with pytest.raises(SettingError, match=sentence):
        made.run(Console(quiet=True))


def test_a_study_is_not_overwritten(bench, models, tmp_path):
    bench.cell("one", dict)
    with pytest.raises(SettingError, match="add --resume"):
        options(models, tmp_path).run(Console(quiet=True))


def test_every_combination_has_a_name_and_a_cell(models, tmp_path):
    full = Bench(options(models, tmp_path, quick=False), Console(quiet=True))
    decodings = full.decodings(2)
    assert len({decoding.name for decoding in decodings}) == len(decodings) == 2 * 3 * 2
    assert {"EQSPEC", "EXSPEC", "jaxspec"} < {decoding.system for decoding in decodings}
    assert system_of("ragged", "pool", speculates=True) == "ragged + pool"
    assert len(full.requests(2)) == 6


def test_requests_that_come_again_are_cut_shorter(models, tmp_path):
    bench = Bench(options(models, tmp_path, limit=None), Console(quiet=True))
    bench.prompts = bench.prompts[:20]
    requests = bench.requests(2)
    assert len(requests) == 24
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert lengths[20:] == [min(length, 24 - 8) for length in lengths[:4]]


# ---- arrivals


def test_latency_counts_from_arrival_and_nothing_is_lost():
    target = toy.model()
    engine = Engine(target, batch_size=1, max_length=128)
    prompts = toy.prompts([4, 5, 6, 3])
    params = SamplingParams(max_tokens=6)
    requests = make_requests(prompts, params, target, longest=engine.longest_prompt)
    alone = [completion.token_ids for completion in engine.run(requests)]
    latency_s, num_tokens, elapsed_s = serve(engine, requests, np.array([0.0, 0.0, 0.0, 0.3]))
    assert num_tokens == sum(map(len, alone))
    assert elapsed_s >= 0.3
    assert min(latency_s) > 0
    # One row: who came at the same time waits for those before.
    assert latency_s[0] < latency_s[1] < latency_s[2]


# ---- report, from the committed results


@pytest.fixture(scope="module")
def committed():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_committed_study_says_what_it_found(committed):
    found = study_report.findings(committed["cells"])
    assert found == committed["findings"]
    text = " ".join(found)
    assert "and 0 otherwise" in text
    assert "NOT" not in text


def test_findings_see_what_is_broken(committed):
    """Sabotage: another output in one ragged cell, a fault in another, a replay that is off."""
    cells = copy.deepcopy(committed["cells"])
    ragged = next(
        cell
        for cell in cells.values()
        if cell.get("layout") == "ragged" and cell["speculates"] and cell["batch_size"] == 8
    )
    ragged["outputs_sha256"] = "0" * 64
    ragged["equivalence"]["num_faults"] += 1
    cells["grouping"]["replays"][0]["replayed"]["num_rounds"] += 1
    ragged["load_average"] = 100.0
    text = " ".join(study_report.findings(cells))
    assert "Times are not to be trusted" in text
    assert "NOT the same" in text
    assert "and 1 otherwise" in text
    assert "does NOT agree" in text


def test_committed_results_name_no_path_or_host(committed):
    text = json.dumps(committed)
    assert "/work" not in text
    assert "/tmp" not in text
    assert "/home" not in text
    assert committed["inputs"]


def test_published_figures_stand_apart(committed):
    tables = study_report.make_tables(committed["cells"])
    published = [table for table in tables if table.title.startswith("Published")]
    assert len(published) == 3
    assert all("A100" in table.title for table in published)
    for _, caption, figure in study_report.make_plots(committed["cells"]):
        for axes in figure.axes:
            is_published = axes.get_title().startswith("published")
            assert is_published == (axes.get_facecolor()[:3] != (1, 1, 1)), caption


def test_published_tables_are_consistent():
    systems = published_figures.ANATOMY.values()
    assert all(abs(s["verify"] + s["draft"] + s["overhead"] - 100) < 0.1 for s in systems)
    for found in published_figures.EQUIVALENCE.values():
        assert all(exact <= partial for exact, partial in found.values())


# ---- as a whole


@pytest.mark.slow
def test_a_whole_study_on_a_tiny_pair(models, tmp_path):
    output = tmp_path / "study"
    document = options(models, output).run(Console(quiet=True))
    cells = document["cells"]
    names = {Decoding(layout="ragged", scheduler="continuous", batch_size=2, speculates=s).name
             for s in (True, False)}  # fmt: skip
    assert names < set(cells)
    for cell in cells.values():
        if cell["name"].startswith("decode-"):
            assert cell["equivalence"]["num_faults"] == 0
            assert cell["schedule"]["num_rounds"] >= cell["ideal_rounds"]
            is_aligned = cell["layout"] == "aligned" and cell["speculates"]
            assert (cell["anatomy"]["part_s"]["align"] > 0) == is_aligned
    rounds = cells["rounds-b2"]["systems"]
    assert rounds["jaxspec"]["draft_positions"] < rounds["EQSPEC as published"]["draft_positions"]
    bound = rounds["jaxspec"]["num_drafted"] + rounds["jaxspec"]["num_committed"]
    assert rounds["jaxspec"]["draft_positions"] <= 1.1 * bound
    assert all(r["compiled"] == r["replayed"] for r in cells["grouping"]["replays"])
    page = (output / "study.html").read_text()
    assert page.count("<img") == len(list(output.glob("*.png"))) == 5
    kept = json.loads((output / "study.json").read_text())
    assert "token_ids" not in kept["cells"]["reference"]

    again = options(models, output, resume=True).run(Console(quiet=True))
    assert again["cells"] == cells


def test_an_oracle_study_needs_no_weights(tmp_path, monkeypatch):
    """Random weights of a preset's shape, without a tokenizer: prompts are random ids."""
    monkeypatch.setattr(study, "load_model", lambda name, dtype: toy.model(seed=len(name)))
    made = options({"target": "random:a", "draft": "random:ab"}, tmp_path, oracle=0.8)
    bench = Bench(made, Console(quiet=True))
    bench.cell("reference", bench.measure_reference)
    assert bench.drafter.is_synthetic
    decoding = Decoding(layout="ragged", scheduler="continuous", batch_size=2, speculates=True)
    monkeypatch.setattr(Bench, "is_dissected", lambda self, decoding: False)
    cell = bench.cell(decoding.name, lambda: bench.measure_decoding(decoding))
    assert cell["engine"]["is_synthetic"]
    assert cell["acceptance"]["num_accepted_tokens"] > 0
    assert isinstance(bench.drafter, jaxspec.Oracle)
