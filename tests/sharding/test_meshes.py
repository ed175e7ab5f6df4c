"""Meshes, on eight virtual devices: two modules of tests, each in a process of its own, for the
suite has one device."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import toy
from jax.sharding import Mesh

from jaxspec.decode import sharded as sharding
from jaxspec.errors import SettingError

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    ("module", "marks"),
    [
        ("eight_devices.py", "not slow"),
        pytest.param("engine_on_eight_devices.py", "not slow", marks=pytest.mark.slow),
        pytest.param("eight_devices.py", "slow", marks=pytest.mark.slow),
        pytest.param("engine_on_eight_devices.py", "slow", marks=pytest.mark.slow),
    ],
)
def test_on_eight_devices(module, marks):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", marks]
    done = subprocess.run(
        [*command, str(HERE / module)],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d passed", done.stdout), done.stdout
    assert not re.search(r"\d (skipped|xfailed)", done.stdout), done.stdout


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
    assert sharding.batch_size_per_shard(6, Wide()) == 2
    with pytest.raises(SettingError, match=r"batch_size 8 was given .* 3 shards"):
        sharding.batch_size_per_shard(8, Wide())


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
