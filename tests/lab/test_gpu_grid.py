"""The GPU grid: what it measures, in which order, and what becomes of it when a cell fails."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxspec.commands import bench
from jaxspec.errors import SettingError
from jaxspec.lab.bench import cells, gpu_grid
from jaxspec.lab.bench.gpu_grid import DRY_RUN, GPU, measure_grid, plot_grid

TINY = dataclasses.replace(
    DRY_RUN, places=((2, 100),), acceptances=(0.0, 1.0), draft_length=2, num_rounds=4
)
HEADER = {"config": {"dry_run": True}, "devices": {"kinds": ["none"]}}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The document of a small grid, the file that it wrote, and its programs."""
    programs = []

    class Recorded(gpu_grid._Rounds):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            programs.append(self)

    path = tmp_path_factory.mktemp("grid") / "grid.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_grid, "_Rounds", Recorded)
        document = measure_grid(TINY, path, budget_s=600, repeats=1, header=HEADER)
    return document, path, programs


@pytest.mark.slow
def test_the_oracle_is_accepted_exactly_as_often_as_it_should_be(measured):
    document, _, _ = measured
    assert [cell["kernels"] for cell in document["cells"].values()] == ["xla", "pallas"]
    for cell in document["cells"].values():
        assert cell["outcome"] == "measured", cell
        assert cell["plain"]["emitted_per_round"] == 1.0
        never, always = cell["speculative"]
        assert never["emitted_per_round"] == never["expected_emitted_per_round"] == 1.0
        assert always["emitted_per_round"] == always["expected_emitted_per_round"] == 3.0
        assert always["roofline_ms"] > cell["plain"]["roofline_ms"] > 0
        assert always["round_ms"] > 0
        assert always["program_bytes"] > cell["plain"]["program_bytes"]


@pytest.mark.slow
def test_the_draft_models_steps_are_run(measured):
    for program in measured[-1]:
        drafter = program.executor.state.drafter
        if drafter:  # at least a step per drafted token of each row, in the last run alone
            assert int(drafter["cost"].num_positions) >= 2 * 2 * TINY.num_rounds


def test_documents_are_written_whole_and_can_be_drawn(measured):
    document, path, _ = measured
    assert json.loads(path.read_text()) == json.loads(json.dumps(document))
    assert [file.name for file in path.parent.iterdir()] == ["grid.json"]
    assert str(path.parent) not in path.read_text()
    assert plot_grid(document).axes
    assert len(bench.GpuCommand().tables(document)[0].rows) == 2


def test_published_pairs_come_at_every_batch_size_and_context():
    cells = GPU.cells()
    assert {cell["pair"] for cell in cells[:6]} == {
        "qwen3-8b / qwen3-0.6b",
        "glm-4-9b / glm-4-draft-0.6b",
        "vicuna-7b / vicuna-68m",
    }
    places = {(cell["batch_size"], cell["context"]) for cell in cells}
    assert places == {(batch, context) for batch in (1, 8, 32) for context in (1024, 8192)}
    assert len(cells) == 3 * 6 * 2


@pytest.fixture
def quick(monkeypatch, measured):
    """Cells that measure nothing, and fail by batch size as told."""
    errors: dict[int, Exception] = {}
    first = next(iter(measured[0]["cells"].values()))
    result = {name: first[name] for name in ("plain", "speculative")}

    def measure(plan, cell, *_):
        if cell["batch_size"] in errors:
            raise errors[cell["batch_size"]]
        return result

    monkeypatch.setattr(gpu_grid, "_measure", measure)
    monkeypatch.setattr(gpu_grid, "_models", lambda *_: {})
    ceilings = gpu_grid.Ceilings(**measured[0]["ceilings"])
    monkeypatch.setattr(gpu_grid, "measure_ceilings", lambda *_, **__: ceilings)
    return errors


PLAN = dataclasses.replace(TINY, places=((1, 10), (2, 10), (3, 10)))


def outcomes(document):
    return [cell["outcome"] for cell in document["cells"].values()]


def test_a_cell_that_fails_does_not_cost_the_others(quick, tmp_path):
    quick[1] = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    quick[2] = NotImplementedError("/home/someone/kernel.py")
    document = measure_grid(PLAN, tmp_path / "s.json", budget_s=600, repeats=1, header=HEADER)
    assert outcomes(document) == ["out of memory"] * 2 + ["failed"] * 2 + ["measured"] * 2
    assert "someone" not in json.dumps(document)
    assert len(bench.GpuCommand().tables(document)[0].rows) == 6
    assert plot_grid(document).axes


def test_a_grid_stops_at_its_budget_and_goes_on_from_there(quick, tmp_path, monkeypatch):
    path = tmp_path / "s.json"
    clock = iter(np.arange(0.0, 1e6, 10.0))
    monkeypatch.setattr(cells.time, "perf_counter", lambda: next(clock))
    first = measure_grid(PLAN, path, budget_s=60, repeats=1, header=HEADER)
    assert 0 < len(first["cells"]) < 6
    whole = measure_grid(PLAN, path, budget_s=1e6, repeats=1, header=HEADER, resume=True)
    assert {name: whole["cells"][name] for name in first["cells"]} == first["cells"]
    assert len(whole["cells"]) == 6


def test_a_grid_goes_on_under_its_own_settings_only(quick, tmp_path):
    path = tmp_path / "s.json"
    measure_grid(PLAN, path, budget_s=600, repeats=1, header=HEADER)
    with pytest.raises(SettingError, match="its config is another"):
        measure_grid(
            PLAN, path, budget_s=600, repeats=1, header={**HEADER, "config": {}}, resume=True
        )
    path.write_text("[]")
    with pytest.raises(SettingError, match="not the file of a grid"):
        measure_grid(PLAN, path, budget_s=600, repeats=1, header=HEADER, resume=True)
    with pytest.raises(SettingError, match="cannot be written"):
        measure_grid(PLAN, path / "s.json", budget_s=600, repeats=1, header=HEADER)


def test_without_a_gpu_the_command_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "cpu")
    command = bench.GpuCommand(out=tmp_path / "s.json")
    with pytest.raises(SettingError, match="--dry-run"):
        command.run(bench.Console(quiet=True))


def test_the_command_writes_results_and_a_figure(quick, tmp_path):
    plot = tmp_path / "s.png"
    command = bench.GpuCommand(out=tmp_path / "s.json", dry_run=True, plot=plot)
    document = command.run(bench.Console(quiet=True))
    assert outcomes(document) == ["measured"] * 4
    assert plot.read_bytes().startswith(b"\x89PNG")
