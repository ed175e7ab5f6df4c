"""Every notebook runs from top to bottom, and is stored with the outputs of such a run."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()


def test_a_failing_cell_fails():
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert False")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(broken, timeout=60, kernel_name="python3").execute()
