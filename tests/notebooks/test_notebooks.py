"""Every notebook runs from top to bottom, and is stored with the outputs of such a run."""

import os
import pathlib

import nbclient
import nbformat
import pytest

# What the cell with the tag `parameters` ends with in the test: sizes that show the same in less
# time.
SMALL = {
    "00_acceptance": "MAX_TOKENS, DRAFT_LENGTHS = 16, (2, 6)",
    "02_your_own_model_and_drafter": "TRAIN_STEPS, CHECKS = 60, ('draft_shape', 'output')",
    "03_where_the_speedup_comes_from": "NUM_PROMPTS, MAX_TOKENS, REPEATS = 16, 24, 1\n"
    "POOLS = {'grouping': 'cross_batch'}",
    "04_heads_that_read_the_target": "KINDS, TEXT_TOKENS, NEW_TOKENS = ('clover',), 3_000, 16\n"
    "TRAIN_TOKENS, BATCH_TOKENS = 5_120, 512",
    "07_a_real_model": "MAX_TOKENS, COMPARED_TOKENS, PER_CATEGORY = 16, 8, 1",
}
SLOW = ("03_where_the_speedup_comes_from", "04_heads_that_read_the_target", "07_a_real_model")
# Variables that name what a notebook needs, which is not in the repository.
NEEDED = {"07_a_real_model": "JAXSPEC_SMOLLM2"}
NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def test_small_sizes_are_of_notebooks_that_exist():
    assert set(SMALL) < {path.stem for path in NOTEBOOKS}


def missing_outputs(notebook):
    """What shows that the notebook was not stored after one run from top to bottom."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        yield f"execution counts are {counts}"
    if not any(cell.outputs for cell in cells):
        yield "no cell has an output"
    for cell in cells:
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"cell {cell.execution_count} raised an error"
        shows = "print(" in cell.source or "plt.show()" in cell.source
        if shows and not cell.outputs:
            yield f"cell {cell.execution_count} should have printed or drawn something"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_its_outputs(path):
    assert not list(missing_outputs(nbformat.read(path, as_version=4)))


def test_the_check_sees_a_cell_that_was_not_run():
    cells = [nbformat.v4.new_code_cell("print(1)", execution_count=n) for n in (1, None)]
    found = list(missing_outputs(nbformat.v4.new_notebook(cells=cells)))
    assert found[0] == "execution counts are [1, None]"
    assert "no cell has an output" in found
    assert sum("should have printed" in line for line in found) == 2


def run(notebook, environment) -> None:
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute(env=environment)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs(path, fast_environment):
    if (needed := NEEDED.get(path.stem)) and needed not in os.environ:
        pytest.skip(f"{needed} names no model")
    notebook = nbformat.read(path, as_version=4)
    with_parameters = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())
    ]
    assert len(with_parameters) == (path.stem in SMALL)
    for cell in with_parameters:
        cell.source += f"\n{SMALL[path.stem]}"
    run(notebook, fast_environment)


def test_a_failing_cell_fails(fast_environment):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert False")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        run(broken, fast_environment)
