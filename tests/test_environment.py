"""Where a figure was measured."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jaxspec.runtime import directories, environment


@pytest.mark.parametrize(
    ("platform", "number", "sentence"),
    [
        ("gpu", 4, "using 1 of 4 GPUs"),
        ("gpu", 1, "using the only GPU device"),
        ("tpu", 8, "using 1 of 8 TPUs"),
        ("cpu", 1, "using the only CPU device"),
        ("metal", 2, "using 1 of 2 metals"),
    ],
)
def test_devices_sentence(platform, number, sentence):
    found = {"platform": platform, "num_devices": number, "num_used": 1}
    assert environment.devices_sentence(found) == sentence


def test_provenance_is_json():
    found = environment.provenance()
    assert json.loads(json.dumps(found)) == found
    assert found["devices"]["num_devices"] == len(jax.local_devices())
    assert found["versions"]["jax"] == jax.__version__


def test_a_missing_package_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package-at-all",))
    assert environment.versions()["no-such-package-at-all"] == "not installed"


def test_commit_of_a_checkout_and_elsewhere(monkeypatch, tmp_path):
    (tmp_path / "jaxspec").mkdir()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "jaxspec" / "environment.py"))
    assert environment.commit() is None
    (tmp_path / ".git").mkdir()  # not a repository that git can read
    assert environment.commit() is None


def test_sha256_of(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert directories.sha256_of(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()


def test_compiled_programs_are_kept_for_the_next_process(tmp_path):
    code = (
        "import jax, jaxspec, toy\n"
        "from jaxspec.engine.engine import Engine\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(\n"
        "    lambda name, **_: hits.append(name) if name.endswith('/cache_hits') else None\n"
        ")\n"
        "jaxspec.enable_compilation_cache()\n"
        "Engine(toy.model(), batch_size=1, max_length=128).generate([[1, 2]])\n"
        "print(len(hits))\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environ |= {"JAXSPEC_CACHE": str(tmp_path), "PYTHONPATH": str(pathlib.Path(__file__).parent)}

    def run(**more):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environ | more)
        assert done.returncode == 0, done.stderr
        return int(done.stdout), sorted((tmp_path / directories.COMPILED_DIRECTORY).glob("*-cache"))

    assert run(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "chosen")) == (0, [])
    num_hits, kept = run()
    assert num_hits == 0
    assert kept
    num_hits, kept_later = run()
    assert num_hits > 0
    assert set(kept) <= set(kept_later)
