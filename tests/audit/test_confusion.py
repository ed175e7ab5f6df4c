"""What the audit of outputs finds: nothing in real outputs, and what is wrong in damaged ones."""

import importlib.resources
import importlib.util
import io

import confusion
import pytest
from rich.console import Console

import jaxspec
from jaxspec.runtime.report import TextTable

pytestmark = [pytest.mark.slow, pytest.mark.as_shipped, pytest.mark.timeout(3600)]

HAS_TORCH = importlib.util.find_spec("torch") is not None
ASSETS = importlib.resources.files(jaxspec) / "assets"
PAIR = str(ASSETS / "target"), str(ASSETS / "draft")


@pytest.fixture(scope="module")
def rows():
    """The rows of the documentation's table, which `-s` shows."""
    found = confusion.confusion(PAIR, with_transformers=HAS_TORCH)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(TextTable.of_columns("What the audit finds", confusion.COLUMNS, found))
    print(console.export_text())
    return found


def test_real_outputs_raise_no_alarm(rows):
    real = [row for row in rows if row["kind"] == "real"]
    assert {row["mode"] for row in real} == set(confusion.MODES)
    assert len({row["what"] for row in real}) == (13 if HAS_TORCH else 10)
    assert [row for row in real if row["num_found"]] == []


def test_every_way_of_being_wrong_is_tried(rows):
    tried = {row["what"] for row in rows if row["kind"] != "real"}
    assert tried == {"BSP", "DSD", "another seed", *confusion.DAMAGED, *confusion.MISDECLARED}
    assert all(row["num_tried"] > 0 for row in rows)


def test_wrong_lengths_are_found(rows):
    ends = ("cut to half", "cut to one token", "empty", "longer than max_tokens")
    found = [row for row in rows if row["what"] in ends]
    assert len(found) == 2 * len(ends)
    assert all(row["num_found"] == row["num_tried"] for row in found)


def test_changed_tokens_of_greedy_outputs_are_found(rows):
    found = [row for row in rows if row["mode"] == "greedy"]
    changed = next(row for row in found if row["what"] == "a token changed")
    assert changed["num_found"] == changed["num_tried"]


def test_the_largest_files_show_other_temperatures(rows):
    for what in ("greedy, said to be sampled", "temperature said to be x 2"):
        largest = [row for row in rows if row["what"] == what][-1]
        assert largest["num_found"] == largest["num_tried"]
