"""A grid of cells: what is kept when it is resumed."""

import json
import time

import pytest

from jaxspec.lab.bench.cells import CellStore


def test_the_seconds_of_a_resumed_grid_are_those_of_all_its_cells(tmp_path):
    def cell():
        time.sleep(0.05)
        return {}

    path = tmp_path / "cells.json"
    CellStore(path, header={"config": 1, "date": "2026-11-26"}).run(
        {"first": cell}, say=lambda text: None
    )
    first_s = json.loads(path.read_text())["elapsed_s"]
    assert first_s >= 0.05
    resumed = CellStore(path, header={"config": 1, "date": "2026-11-27"}, resume=True)
    resumed.run({"first": cell, "second": cell}, say=lambda text: None)
    assert resumed.elapsed_s >= first_s + 0.05
    assert json.loads(path.read_text())["elapsed_s"] == resumed.elapsed_s
    assert resumed.document["cells"].keys() == {"first", "second"}
    assert resumed.document["date"] == "2026-11-27"


def test_a_failed_measurement_leaves_no_cell(tmp_path):
    def fail():
        raise RuntimeError("out of luck")

    store = CellStore(tmp_path / "cells.json", header={})
    with pytest.raises(RuntimeError):
        store.run({"one": fail}, say=lambda text: None)
    assert not store.path.exists()
    store.run({"one": lambda: {"value": 3}}, say=lambda text: None)
    assert store.cells["one"] == {"value": 3}
