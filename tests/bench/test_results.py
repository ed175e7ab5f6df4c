"""Committed results: of today's code, and complete."""

import itertools
import json
import pathlib
import re

import pytest

from jaxspec.runtime import freshness
from jaxspec.runtime.freshness import code_digest, staleness

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
def test_a_cited_result_is_of_todays_code(path):
    """Measure it again, or say why it still holds; see `jaxspec.runtime.freshness`."""
    document = json.loads(path.read_text(encoding="utf-8"))
    assert staleness(document) is None
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


CODE = '''"""A module."""
import os


def add(a, b):
    """Adds."""
    return a + b
'''


@pytest.mark.parametrize(
    ("changed", "is_the_same"),
    [
        (CODE.replace("Adds.", "Adds two numbers."), True),
        (CODE.replace("import os", "import sys  # for nothing"), True),
        (CODE.replace("return a + b", "return (a\n            + b)"), True),
        (CODE.replace("a + b", "b + a"), False),
        (CODE + "\nx = 1\n", False),
    ],
)
def test_the_digest_is_of_what_code_does(tmp_path, changed, is_the_same):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text(CODE)
    before = code_digest(["room"], root=tmp_path)
    document = {"measures": ["room"], "code_digest": before, "commit": "abc"}
    assert staleness(document, root=tmp_path) is None
    (tmp_path / "room" / "one.py").unlink()
    (tmp_path / "room" / "two.py").write_text(changed)  # moved, too
    assert (code_digest(["room"], root=tmp_path) == before) == is_the_same
    assert (staleness(document, root=tmp_path) is None) == is_the_same


def test_the_digest_of_cpp_ignores_comments_only(tmp_path):
    def digest(text):
        (tmp_path / "k.cc").write_text(text)
        return code_digest(["k.cc"], root=tmp_path)

    first = digest("int f() { return 1; }  // one")
    assert digest("/* f */ int f() {\n  return 1; }") == first
    assert digest("int f() { return 2; }") != first


def test_results_without_origin_are_stale(tmp_path):
    assert "which code" in staleness({})
    assert "commit" in staleness({"measures": ["x"], "commit": None})
    missing = {"measures": ["x.py"], "commit": "abc", "code_digest": ""}
    assert "no part of the package" in staleness(missing, root=tmp_path)


def test_a_result_is_confirmed_with_a_reason(tmp_path, capsys):
    path = tmp_path / "it.json"
    path.write_text(json.dumps({"measures": ["errors.py"], "code_digest": "", "commit": "abc"}))
    assert freshness.main([str(path)]) == 1
    assert "has changed since abc" in capsys.readouterr().out
    assert freshness.main([str(path), "--confirm", "renamed only"]) == 0
    document = json.loads(path.read_text())
    assert document["confirmed"][0]["reason"] == "renamed only"
    assert document["code_digest"] == ""  # what it was made with stays
    assert freshness.main([str(tmp_path)]) == 0
