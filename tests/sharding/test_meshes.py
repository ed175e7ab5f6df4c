"""Meshes, on eight virtual devices: `eight_devices.py` in one process of its own, for the suite has
one device."""

import ast
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest
import toy
from jax.sharding import Mesh

from jaxspec import sharding
from jaxspec.errors import SettingError

HERE = pathlib.Path(__file__).parent
SCRIPT = HERE / "eight_devices.py"
NAMES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Failures by test name; an empty list where all its cases passed."""
    path = tmp_path_factory.mktemp("report") / "report.xml"
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", str(SCRIPT), f"--junitxml={path}"],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        cwd=HERE.parent.parent,
    )
    assert path.exists(), done.stdout + done.stderr
    failures = {}
    for case in ElementTree.parse(path).iter("testcase"):
        failed = failures.setdefault(case.get("name", "").split("[")[0], [])
        failed += [child.text for child in case if child.tag != "system-out"]
    return failures


@pytest.mark.parametrize("name", NAMES)
def test_on_eight_devices(report, name):
    assert name in report
    assert not report[name], "\n".join(map(str, report[name]))


def mesh(*axes):
    """A mesh of one device with these axes."""
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(axes)), axes)


@pytest.mark.parametrize("axes", [("model",), ("data", "expert"), ("batch",)])
def test_other_axes_are_refused(axes):
    with pytest.raises(SettingError, match=rf"axes \({', '.join(axes)}\)"):
        sharding.check_mesh(mesh(*axes))


class Wide:
    """As much of a mesh as its sizes."""

    def __init__(self):
        self.shape = {"data": 3, "model": 4}


def test_seats_that_the_data_axis_does_not_divide_are_refused():
    assert sharding.seats_per_shard(6, Wide()) == 2
    with pytest.raises(SettingError, match=r"8 seats were given .* 3 shards"):
        sharding.seats_per_shard(8, Wide())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_kv_heads": 2}, "2 KV heads"),
        ({"feed_forward_width": 50}, "50 hidden units"),
        ({"vocab_size": 61}, "61 tokens in the vocabulary"),
    ],
)
def test_a_model_that_the_model_axis_does_not_divide_is_refused(changes, what):
    fits = {"num_kv_heads": 4, "vocab_size": 64, "num_layers": 1}
    toy.model(**fits).param_specs(4)
    with pytest.raises(SettingError, match=f"model axis has 4 devices .* {what}"):
        toy.model(**(fits | changes)).param_specs(4)
