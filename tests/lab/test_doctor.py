"""What `jaxspec doctor` finds out about kernels that fail in every way, and who heeds it."""

import dataclasses
import fnmatch
import glob
import json
import sys

import jax
import pytest

from jaxspec.errors import SettingError
from jaxspec.kernels import registry
from jaxspec.lab import doctor
from jaxspec.lab.cost.devices import read_device
from jaxspec.models.registry import PRESETS
from jaxspec.runtime import environment, verdicts

# One small case of the Pallas kernels, interpreted.
SMALL = """
import dataclasses, json, os, sys, time
import jax.numpy as jnp
from jaxspec.kernels import pallas
from jaxspec.lab import doctor
from jaxspec.models.kernel_probe import WindowSize

doctor.why_not_here = lambda name: None
window = WindowSize(num_rows=2, num_tokens=3, capacity=256)
doctor.CASES = (("qwen3-0.6b", "float32", None, (window,)),)
{sabotage}
print(json.dumps(doctor.tried(sys.argv[1])))
"""
ONE_SLOT_TOO_MANY = """
last_read = pallas.last_read_together
pallas.last_read_together = lambda window: last_read(window) + 1
"""
DOES_NOT_COMPILE = """
def refuse(*_, **__):
    raise RuntimeError("no such instruction")
pallas.write_window = refuse
"""
SLEEP = "import time; time.sleep(60)"
ABORT = "import os; os.abort()"


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    """Kernels that are chosen here are not noted for other tests."""
    monkeypatch.setattr(environment, "_kernels", environment.noted_kernels())


@pytest.mark.parametrize(
    ("code", "timeout_s", "outcome", "why"),
    [
        (SMALL.format(sabotage=""), 120, "works", None),
        (SMALL.format(sabotage=ONE_SLOT_TOO_MANY), 120, "fails", "differ from XLA's by"),
        pytest.param(
            SMALL.format(sabotage=DOES_NOT_COMPILE),
            120,
            "fails",
            "RuntimeError: no such instruc",
            marks=pytest.mark.slow,
        ),
        (ABORT, 120, "crashes", "its process ended with -6"),
        (SLEEP, 1, "hangs", "no result after 1 s"),
    ],
)
def test_what_becomes_of_kernels(code, timeout_s, outcome, why):
    command = [sys.executable, "-c", code]
    found = doctor.try_kernels("pallas", timeout_s=timeout_s, command=command)
    assert found["outcome"] == outcome
    assert found["why"] is None if why is None else why in found["why"]
    if outcome == "hangs":
        assert found["seconds"] < 30


def test_verdicts_choose_the_kernels_of_this_device_and_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    assert verdicts.kept_problem("native") is None
    verdicts.keep_verdicts({"native": "it differs", "mosaic": None})
    assert verdicts.kept_problem("native") == "it differs (found by jaxspec doctor)"
    assert verdicts.kept_problem("mosaic") is None
    assert registry.default_kernels() == "xla"
    for name, value in (("commit", lambda: "another"), ("versions", lambda: {"jax": "1"})):
        with monkeypatch.context() as patched:
            patched.setattr(verdicts, name, value)
            assert verdicts.kept_problem("native") is None
    (tmp_path / "cache" / ".kernels.json").write_text("[1")
    assert verdicts.kept_problem("native") is None


def test_a_cache_that_is_no_directory_is_refused(monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", "/etc/hostname/x")
    with pytest.raises(SettingError, match=r"/etc/hostname/x/.kernels.json.*cannot be written"):
        verdicts.keep_verdicts({"native": None})


def test_a_kernel_that_fails_on_hopper_gives_way_to_the_next(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    verdicts.keep_verdicts({"mosaic": "it hangs"})
    monkeypatch.setattr(environment, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert registry.default_kernels() == "pallas"
    assert (environment.noted_kernels()["kernels_fallback"] or "").startswith("it hangs (found")
    verdicts.keep_verdicts({"pallas": "it crashes"})  # what is known of others stays
    assert registry.default_kernels() == "xla"


@pytest.mark.parametrize(
    ("files", "platforms", "says"),
    [
        (["/dev/nvidia0"], None, "This machine has an NVIDIA GPU, but JAX runs on the CPU"),
        (["/dev/accel0"], None, "This machine has a TPU, but JAX runs on the CPU"),
        (["/usr/lib/wsl/lib/libcuda.so.1"], None, "This machine has an NVIDIA GPU, but JAX runs"),
        (["/dev/dxg"], None, None),  # WSL2 has it for GPUs of any maker
        (["/dev/nvidia0"], "cpu", None),
        ([], None, None),
    ],
)
def test_an_accelerator_that_jax_does_not_use(monkeypatch, files, platforms, says):
    monkeypatch.setattr(
        glob,
        "glob",
        lambda pattern: fnmatch.filter(files, pattern),
    )
    before = getattr(jax.config, "jax_platforms", None)
    jax.config.update("jax_platforms", platforms)
    try:
        found = environment.unused_accelerator()
    finally:
        jax.config.update("jax_platforms", before)
    assert found is None if says is None else (found or "").startswith(says)


def test_gpus_before_ampere_are_given_xlas_kernels_and_float16(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(environment, "compute_capability", lambda: 7.5)
    assert registry.default_kernels() == "xla"
    assert "compute capability 7.5" in (environment.noted_kernels()["kernels_fallback"] or "")
    assert environment.lacks_bfloat16()


def test_what_was_measured_is_a_device_of_the_cost_model(tmp_path):
    costs = {
        "kernel_s": 2e-6,
        "read_result_s": 1e-4,
        "bytes_per_s": 2e12,
        "flops_per_s": 5e14,
    }
    device = doctor.device_of(costs)
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({"measured_device": dataclasses.asdict(device)}))
    target, _, block = read_device(str(path))(PRESETS["qwen3-8b"], None)
    assert (target, block) == (device, None)
    assert "measured by jaxspec doctor at commit" in target.source
    path.write_text(json.dumps({"measured_device": {"name": "x"}}))
    with pytest.raises(SettingError, match="The device lacks bytes_per_s"):
        read_device(str(path))
