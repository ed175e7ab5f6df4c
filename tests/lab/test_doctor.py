"""What `jaxspec doctor` finds out about kernels that fail in every way, and who heeds it."""

import dataclasses
import fnmatch
import glob
import json
import sys
import types

import jax
import pytest
import toy

from jaxspec.engine.executor import make_executor
from jaxspec.errors import SettingError
from jaxspec.kernels import registry
from jaxspec.lab import doctor
from jaxspec.lab.cost.devices import DEVICES, read_device
from jaxspec.models import prefill
from jaxspec.models.registry import PRESETS
from jaxspec.runtime import environment, verdicts
from jaxspec.runtime.turns import Turns

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
        (SMALL.format(sabotage=DOES_NOT_COMPILE), 120, "fails", "RuntimeError: no such instruc"),
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
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_platforms=platforms))
    monkeypatch.setattr(
        glob,
        "glob",
        lambda pattern: fnmatch.filter(files, pattern),
    )
    found = environment.unused_accelerator()
    assert found is None if says is None else (found or "").startswith(says)


def test_gpus_before_ampere_are_given_xlas_kernels_and_float16(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(environment, "compute_capability", lambda: 7.5)
    assert registry.default_kernels() == "xla"
    assert "compute capability 7.5" in (environment.noted_kernels()["kernels_fallback"] or "")
    assert environment.lacks_bfloat16()
    assert doctor.usual_dtype() == "float16"
    assert doctor.why_not_here("pallas") == "for GPUs from Ampere on"
    monkeypatch.setattr(environment, "compute_capability", lambda: 8.0)
    assert doctor.usual_dtype() == "bfloat16"
    assert doctor.why_not_here("pallas") is None


def test_kernels_of_a_cpu_that_cannot_be_built_fail(monkeypatch):
    monkeypatch.setattr(registry, "native_problem", lambda: "there is no compiler; install one")
    found = doctor.tried("native")
    assert found["outcome"] == "fails"
    assert "there is no compiler; install one" in (found["why"] or "")


def test_what_was_measured_is_a_device_of_the_cost_model(tmp_path):
    costs = {
        "kernel_s": 2e-6,
        "read_result_s": 1e-4,
        "bytes_per_s": 2e12,
        "flops_per_s": 5e14,
    }
    device = doctor.device_of(costs)
    assert device.step_s == 5 * 2e-6  # calls of the C++ kernels in a layer
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({"measured_device": dataclasses.asdict(device)}))
    target, _, block = read_device(str(path))(PRESETS["qwen3-8b"], None)
    assert (target, block) == (device, None)
    assert "measured by jaxspec doctor at commit" in target.source
    path.write_text(json.dumps({"measured_device": {"name": "x"}}))
    with pytest.raises(SettingError, match=r"lacks bytes_per_s.*`jaxspec doctor --json`"):
        read_device(str(path))


@pytest.mark.parametrize(("kernels", "number"), [("mosaic", 12), ("pallas", 13)])
def test_the_devices_step_is_a_layer_of_its_kernels(monkeypatch, kernels, number):
    monkeypatch.setattr(doctor, "default_kernels", lambda: kernels)
    costs = {"kernel_s": 2e-6, "read_result_s": 1e-4, "bytes_per_s": 2e12, "flops_per_s": 5e14}
    device = doctor.device_of(costs)
    assert device.step_s == number * 2e-6
    assert f"{number} launches a layer of the {kernels} kernels" in device.source


def test_prefill_is_divided_by_the_calls_that_it_makes(monkeypatch):
    """Chunks of several prompts share a call, and admission is not timed."""
    made = []

    def make_watched(*given, **settings):
        executor = make_executor(*given, **settings)
        for name in ("admit", "prefill"):
            program = executor.programs[name]
            executor.programs[name] = lambda *given, name=name, program=program: (
                made.append(name) or program(*given)
            )
        return executor

    def run_once(contenders, *_, prepare, **__):
        ((what, run),) = contenders.items()
        prepare(what)
        made.clear()
        run()
        return Turns(seconds={what: [1.0]}, results={})

    monkeypatch.setattr(prefill, "CHUNK", 128)
    monkeypatch.setattr(prefill, "chunks_per_call", lambda _: 4)
    monkeypatch.setattr(doctor, "load_packed", lambda _: toy.model())
    monkeypatch.setattr(doctor, "make_executor", make_watched)
    monkeypatch.setattr(doctor, "take_turns", run_once)
    *_, cell = doctor.measure_cells(DEVICES["h100"])
    assert made == 4 * ["prefill"]  # 16 chunks of eight prompts
    assert cell["measured_ms"] == pytest.approx(1e3 / 4)
