"""`jaxspec plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys

import pytest

from jaxspec.commands.plan import PlanCommand, needs_virtual_devices, parse_bytes, parse_mesh
from jaxspec.errors import SettingError

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICK = ("--draft-lengths", "0", "2")


def test_budgets_are_numbers_with_units():
    for text, count in {
        "1000000": 10**6,
        "24GiB": 24 * 2**30,
        "80GB": 80 * 10**9,
        "1.5 MiB": 3 * 2**19,
        "2kB": 2000,
    }.items():
        assert parse_bytes(text) == count
    large = ("9" * 400, "9" * 5000, "1" + "0" * 400 + "GiB", "9e9", "1e400")
    for text in ("", "0", "-3GiB", "24 gigs", "1e9", "GiB", *large):
        with pytest.raises(SettingError, match=r"^--budget .* was given; write a number of bytes"):
            parse_bytes(text)


def test_meshes_name_their_axes():
    assert parse_mesh("data=2,model=4") == (2, 4)
    assert parse_mesh("model=8") == (1, 8)
    for text in ("8", "model=0", "tensor=8", "data=2;model=4", ""):
        with pytest.raises(SettingError, match="write it as data=1,model=8"):
            parse_mesh(text)


def test_a_process_with_virtual_devices_gets_the_same_options(monkeypatch):
    command = PlanCommand(
        target="llama-2-70b",
        draft="vicuna-68m",
        budget="24GiB",
        mesh="data=1,model=8",
        draft_lengths=(2, 4),
        json=True,
    )
    assert command.arguments() == [
        *("--target", "llama-2-70b", "--draft", "vicuna-68m", "--budget", "24GiB"),
        *("--mesh", "data=1,model=8", "--draft-lengths", "2", "4"),
    ]
    monkeypatch.setenv("XLA_FLAGS", "")
    assert needs_virtual_devices(8)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert not needs_virtual_devices(8)


def test_a_plan_is_printed(cli):
    models = ("--target", "demo-target", "--draft", "demo-draft")
    shape = ("--budget", "80MiB", "--batch", "2", "--context", "200", "--max-logprobs", "2")
    device = ("--device", str(ROOT / "docs" / "results" / "decode-cpu.json"))
    result = cli("plan", *models, *shape, *device, *QUICK, "--json")
    assert result.status == 0, result.err
    for words in ("KV of the target", "in all", "chosen", "fastest", "jaxspec.Engine("):
        assert words in result.out
    plan = result.document["plan"]
    assert plan["chosen"]["bytes"]["total_bytes"] <= 80 * 2**20
    assert plan["dtype"] == "float32"
    assert plan["num_candidates"] >= 4
    assert "max_logprobs=2)" in plan["description"]
    assert [each["name"] for each in plan["programs"]] == ["round", "prefill", "scoring"]


def test_what_does_not_fit_is_refused(refused):
    assert "the weights alone take" in refused(
        "plan", "--target", "llama-65m", "--budget", "10MiB", *QUICK
    )
    assert "acceptance of 0.7 was given for the tree" in refused(
        *("plan", "--target", "llama-65m", "--budget", "1GiB", *QUICK),
        *("--drafter", '{"kind": "ngram", "branches": 4}'),
    )
    assert "8 KV heads" in refused(
        *("plan", "--target", "llama-2-70b", "--budget", "80GB", "--mesh", "model=3", *QUICK)
    )


@pytest.mark.slow
def test_a_70b_target_is_compiled_for_eight_devices_without_an_array_of_it():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jaxspec", "plan", "--json"),
            *("--target", "llama-2-70b", "--draft", "vicuna-68m", "--mesh", "data=1,model=8"),
            *("--budget", "24GiB", "--batch", "4", "--context", "2000"),
            *("--draft-lengths", "4"),
        ],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout.strip().split("\n")[-1])["plan"]
    found = plan["chosen"]["bytes"]
    assert found["temporaries"] == "compiled"
    assert 17e9 < found["target_weights_bytes"] < 17.5e9  # an eighth of 138 GB
    assert {program["name"] for program in plan["programs"]} == {"round", "prefill"}
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak_kib < 4 * 2**20
