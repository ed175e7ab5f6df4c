"""Directories that version 0.1.0 saved are loaded as they were."""

import pathlib

import numpy as np
import pytest
from make_directories import leaves

from jaxspec.drafters.flexdraft.drafter import FlexDraft
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.load.drafters import load_drafter
from jaxspec.load.models import load_model

HERE = pathlib.Path(__file__).resolve().parent / "directories"


@pytest.fixture(scope="module")
def target():
    return load_model(HERE / "model", kernels="xla")


def expected(name):
    with np.load(HERE / "expected.npz") as arrays:
        return {key.removeprefix(name): arrays[key] for key in arrays if key.startswith(name)}


def assert_as_saved(params, name):
    found = leaves(params)
    assert found.keys() == expected(name).keys()
    for path, leaf in expected(name).items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


def test_a_model(target):
    assert target.name.endswith("model")
    assert_as_saved(target.params, "model")


@pytest.mark.filterwarnings("error")  # nothing is said of another target
@pytest.mark.parametrize(("name", "kind"), [("heads", Heads), ("flexdraft", FlexDraft)])
def test_drafters(target, name, kind):
    drafter = load_drafter(HERE / name, target)
    assert isinstance(drafter, kind)
    assert_as_saved(drafter.params, name)
