"""The study: its cells are kept and resumed, its report is of its cells, and it runs as a whole."""

import copy
import dataclasses
import html
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
from jaxspec.lab.studies import measurements, workload
from jaxspec.lab.studies import report as study_report
from jaxspec.lab.studies.claims import check_claims
from jaxspec.lab.studies.measurements import serve
from jaxspec.lab.studies.study import Running, Study
from jaxspec.lab.studies.workload import Decoding
from jaxspec.requests.requests import make_requests
from jaxspec.requests.sampling_params import SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "study-cpu" / "study.json"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("study-models")
    return {
        "target": str(tiny.save(root, "target", text=tiny.tokenizer())),
        "draft": str(tiny.save(root, "draft", seed=1, text=tiny.tokenizer())),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallStudy(Study):
    pool = 4


def options(models, output, **changes) -> Study:
    given = {
        **models,
        "out": output,
        "quick": True,
        "batch_sizes": (2,),
        "limit": 6,
        "max_prompt_tokens": 24,
        "max_tokens": 8,
        "draft_length": 3,
        "repeats": 1,
    }
    return SmallStudy(**(given | changes))


@pytest.fixture
def running(models, tmp_path):
    return Running(options(models, tmp_path))


def silent(text):
    pass


# ---- cells


def test_a_cell_is_measured_once_and_says_where_it_comes_from(running, models, tmp_path):
    calls, said = [], []

    def measure():
        calls.append(1)
        return {"value": len(calls)}

    cells = {name: lambda name=name: running.cell(name, measure) for name in ("one", "two")}
    running.store.run(cells, say=said.append)
    again = Running(options(models, tmp_path, resume=True))
    again.store.run(cells, say=said.append)
    assert len(calls) == 2
    assert again.store.cells == running.store.cells
    assert said[0] == "cell 1 of 2: one"
    assert said[1] == "cell 2 of 2, less than a minute left: two"
    first = again.store.cells["one"]
    assert {*first["provenance"]} == {"xla_flags", "versions", "devices", "commit", "date"}
    made_of = again.store.header["models"]
    assert made_of["target"] != made_of["draft"]
    text = (tmp_path / "cells.json").read_text()
    assert str(tmp_path) not in text  # no path of this machine
    assert str(pathlib.Path(models["target"]).parent) not in text


def test_a_study_of_other_settings_is_not_resumed(running, models, tmp_path):
    running.store.run({"one": dict}, say=silent)
    more = Running(options(models, tmp_path, resume=True, batch_sizes=(2, 4)))
    assert more.store.cells == {"one": {}}  # batch sizes only choose cells
    with pytest.raises(SettingError, match="its config is another"):
        Running(options(models, tmp_path, resume=True, max_tokens=9))
    with pytest.raises(SettingError, match="add --resume"):
        options(models, tmp_path).run(Console(quiet=True))


def test_every_combination_has_a_name_and_a_cell(models, tmp_path):
    full = Running(options(models, tmp_path, quick=False)).workload
    decodings = full.decodings(2)
    assert len({decoding.cell for decoding in decodings}) == len(decodings) == 2 * 3 * 2 + 2
    assert len({decoding.system for decoding in decodings}) == len(decodings)
    for name in workload.NAMED:
        assert full.named(name, 2) in decodings
        assert full.named(name, 2).system == name
    # The published names are kept for what runs as published.
    improved = dataclasses.replace(full.named("EQSPEC", 2), is_published=False)
    assert improved.system == "aligned + static"
    assert len(full.requests(2)) == 6


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
    text = " ".join(study_report.findings(committed["cells"]))
    assert "1200 equal" in text
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


def test_the_page_has_every_claim_table_and_plot(committed, tmp_path):
    study_report.write_html(committed, tmp_path / "study.html")
    page = (tmp_path / "study.html").read_text(encoding="utf-8")
    claims = check_claims(committed["cells"])
    answers = [claim["reproduced"] for claim in claims]
    assert answers == [claim["reproduced"] for claim in committed["claims"]]
    assert all(html.escape(claim["paper"]) in page for claim in claims)
    assert page.count("<h2>") == 8  # claims, setup, and six of what was measured
    assert page.count("<img") == 3


def test_the_claims_of_a_real_model_follow_from_its_cells():
    path = RESULTS.parents[1] / "smollm2-study-cpu.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert check_claims(found["cells"]) == found["claims"]
    del found["cells"]["grouping"]
    assert check_claims(found["cells"]) != found["claims"]


def test_claims_follow_the_figures(committed):
    """Each answer changes with the cells that it is drawn from."""
    cells = copy.deepcopy(committed["cells"])
    decoded = [cell for name, cell in cells.items() if name.startswith("decode-aligned-")]
    controls = [name for name in cells if name.startswith("controls-")]
    assert [c["reproduced"] for c in check_claims(cells)][:3] == ["yes", "yes", "yes"]

    def answer(claim):
        return next(c["reproduced"] for c in check_claims(cells) if claim in c["claim"])

    for name in controls:
        cells[name]["systems"]["DSD"]["exact_tokens"] = 0.9
    assert answer("BSP and DSD") == "no"
    for cell in decoded:
        cell["equivalence"]["num_faults"] = 1
    assert answer("EQSPEC emits") == answer("EXSPEC emits") == "no"
    ours = [c for c in cells.values() if c.get("system") == "jaxspec" and "ratio_to_plain" in c]
    for cell in ours:
        cell["ratio_to_plain"] = 0.5
    assert answer("speculation is slower") == "yes"
    for name in (*controls, "grouping"):
        del cells[name]
    assert answer("BSP and DSD") == answer("Groups become rare") == "not measured"


def test_tables_show_plain_decoding_wherever_they_show_tokens_per_second(committed):
    for title, table in study_report.make_tables(committed["cells"]).items():
        if "tokens_per_s" in table:
            beside = "plain_tokens_per_s" in table
            assert beside or table.system.str.contains("plain").any(), title


def test_tables_hold_what_was_measured(committed):
    """Figures with their fields; a share is of the wall time; a cell that is missing is a dash."""
    tables = study_report.make_tables(committed["cells"])
    [title] = [title for title in tables if title.startswith("Time breakdown")]
    one = tables[title].iloc[0]
    cell = next(cell for cell in committed["cells"].values() if "time_breakdown" in cell)
    assert (one.system, one.batch_size) == (cell["system"], cell["batch_size"])
    found = cell["time_breakdown"]
    assert one["draft share"] == found["seconds"]["draft"] / found["wall_s"]
    shares = [one[f"{part} share"] for part in ("draft", "verify", "align", "rest")]
    assert sum(shares) == pytest.approx(1.0)
    rounds = tables["Rounds and token-positions"]
    name = "decode-ragged-continuous-speculative-b4"
    four = rounds[(rounds.system == "jaxspec") & (rounds.batch_size == 4)]
    assert four.ideal_rounds.tolist() == [committed["cells"][name]["ideal_rounds"]]
    assert rounds[rounds.system.str.startswith("plain")].draft_positions.isna().all()


def test_what_is_printed_fits_80_columns(committed, capsys):
    study_report.print_report(committed["cells"], Console(width=80))
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "paper: exact match" in shown


# ---- as a whole


@pytest.mark.slow
def test_a_whole_study_on_a_tiny_pair(models, tmp_path):
    output = tmp_path / "study"
    document = options(models, output).run(Console(quiet=True))
    cells = document["cells"]
    names = {Decoding(layout="ragged", scheduler="continuous", batch_size=2, speculates=s).cell
             for s in (True, False)}  # fmt: skip
    assert {f"decode-{name}" for name in names} < set(cells)
    for name, cell in cells.items():
        if name.startswith("decode-"):
            assert cell["equivalence"]["num_faults"] == 0
            assert cell["schedule"]["num_rounds"] >= cell["ideal_rounds"]
            is_aligned = cell["layout"] == "aligned" and cell["speculates"]
            assert (cell["time_breakdown"]["part_s"]["align"] > 0) == is_aligned
    controls = cells["controls-b2"]["systems"]
    assert controls["BSP"]["exact_tokens"] < controls[measurements.CONTROL_RUN]["exact_tokens"]
    assert controls["DSD"]["exact_tokens"] < controls[measurements.CONTROL_RUN]["exact_tokens"]
    read = {
        cell["system"]: cell["schedule"]["draft_positions"]
        for cell in cells.values()
        if cell.get("speculates") and "schedule" in cell
    }
    assert read["jaxspec"] < read["EQSPEC"]
    ours = cells["decode-ragged-continuous-speculative-b2"]
    bound = ours["acceptance"]["num_draft_tokens"] + ours["num_prompt_tokens"] + ours["num_tokens"]
    assert read["jaxspec"] <= 1.1 * bound
    assert all(r["compiled"] == r["replayed"] for r in cells["grouping"]["replays"])
    assert "not measured" not in [c["reproduced"] for c in check_claims(cells)][:8]
    page = (output / "study.html").read_text()
    assert page.count("<img") == len(list(output.glob("*.png"))) == 3
    assert page.index("<th>reproduced</th>") < page.index("<img")
    kept = json.loads((output / "study.json").read_text())
    assert "token_ids" not in kept["cells"]["reference"]
    assert "provenance" not in kept["cells"]["reference"]
    decoded = next(name for name in cells if name.startswith("decode-"))
    assert kept["engine"] | kept["cells"][decoded]["engine"] == cells[decoded]["engine"]
    assert kept["claims"]

    again = options(models, output, resume=True).run(Console(quiet=True))
    assert again["cells"] == cells


@pytest.mark.slow
def test_an_oracle_study_needs_no_weights(tmp_path, monkeypatch):
    """Random weights of a preset's shape, without a tokenizer: prompts are random ids."""
    monkeypatch.setattr(workload, "load_model", lambda name, dtype: toy.model(seed=len(name)))
    made = options({"target": "random:a", "draft": "random:ab"}, tmp_path, oracle=0.8)
    running = Running(made)
    work, cells = running.workload, running.store.cells
    running.store.run({"reference": lambda: measurements.measure_reference(work)}, say=silent)
    decoding = work.named("jaxspec", 2)
    cell = measurements.measure_decoding(work, cells, decoding, is_broken_down=False)
    assert cell["engine"]["is_synthetic"]
    assert cell["acceptance"]["num_accepted_tokens"] > 0
    for name in ("jaxspec", "EQSPEC"):
        assert isinstance(work.engine(work.named(name, 2)).drafter, jaxspec.Oracle)
