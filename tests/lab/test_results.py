"""Committed results: whole, and of a known commit and machine."""

import itertools
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "docs" / "results").rglob("*.json"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def cited():
    """Results that README or the documentation link to."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    links = set(re.findall(r"[\w./-]+\.json", text))
    return [path for path in RESULTS if any(link.endswith(path.name) for link in links)]


def test_results_are_cited():
    assert cited()


@pytest.mark.parametrize("path", cited(), ids=lambda path: path.name)
def test_a_cited_result_says_what_it_was_measured_on(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["commit"]
    assert document["devices"].get("kernels")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_name_no_directory_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r'"(/|~)[^"]*/', text)


def test_the_parts_of_flexdraft_are_compared_in_the_papers_order():
    document = json.loads((ROOT / "docs/results/flexdraft-cpu.json").read_text(encoding="utf-8"))
    steps = document["ablation"]
    assert [step["parts"] for step in steps] == [
        "attention tuning",
        "+ calibration",
        "+ selective verification",
    ]
    for before, step in itertools.pairwise(steps):
        gain = step["emitted_gain"]
        assert gain["low"] <= gain["mean"] <= gain["high"]
        assert gain["num_prompts"] == document["num_prompts"]
        assert step["drafted_per_round"] <= before["drafted_per_round"]
    assert steps[1]["emitted_gain"]["low"] > 0  # as docs/flexdraft.md says
    assert all(step["tokens_per_s"] > 0 for step in steps)
