"""Every notebook runs from top to bottom."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def test_a_failing_cell_fails():
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert False")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(broken, timeout=60, kernel_name="python3").execute()
