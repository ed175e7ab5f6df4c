"""Where a figure was measured."""

import json
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import jax
import pytest

from jaxspec.runtime import directories, environment


def test_devices_sentence():
    for platform, number, sentence in (
        ("gpu", 4, "using 1 of 4 GPUs"),
        ("cpu", 1, "using the only CPU device"),
        ("metal", 2, "using 1 of 2 metals"),
    ):
        found = {"platform": platform, "num_devices": number, "num_used": 1}
        assert environment.devices_sentence(found) == sentence


def test_provenance_is_json():
    found = environment.provenance()
    assert json.loads(json.dumps(found)) == found
    assert found["devices"]["num_devices"] == len(jax.local_devices())
    assert found["versions"]["jax"] == jax.__version__
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", found["date"])


def test_a_missing_package_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package-at-all",))
    assert environment.versions()["no-such-package-at-all"] == "not installed"


def test_commit_of_a_checkout_and_elsewhere(monkeypatch, tmp_path):
    package = tmp_path / "jaxspec"
    (package / "runtime").mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(package / "runtime" / "environment.py"))
    assert environment.commit() is None
    (package / "_commit.txt").write_text("abc\n")  # as a wheel has it
    assert environment.commit() == "abc"
    (tmp_path / ".git").mkdir()  # not a repository that git can read
    assert environment.commit() is None


def test_results_of_autotuning_are_told_apart(monkeypatch, tmp_path):
    assert environment.autotune_directory() is None  # this is no GPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert environment.autotuned() is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert environment.autotuned()["num_results"] == 0
        directory = environment.autotune_directory()
        assert directory.parent == tmp_path
        directory.mkdir()
        digests = set()
        for text in ("tile 64", "tile 128"):
            (directory / "fusion.textproto").write_text(text)
            found = environment.autotuned()
            assert found["num_results"] == 1
            digests.add(found["digest"])
        assert len(digests) == 2
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_jax_hands_the_directory_to_xla(monkeypatch, tmp_path):
    from jax._src import compiler

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
        given = options.executable_build_options.debug_options
        assert given.xla_gpu_per_fusion_autotune_cache_dir == str(environment.autotune_directory())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def git(directory, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository with the package's setup.py and next to nothing else."""
    root = pathlib.Path(__file__).parents[2]
    checkout = tmp_path / "checkout"
    (checkout / "jaxspec").mkdir(parents=True)
    (checkout / "jaxspec" / "__init__.py").write_text("")
    (checkout / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "it"\nversion = "1"\n'
        '[tool.setuptools]\npackages = ["jaxspec"]\n'
        '[tool.setuptools.package-data]\njaxspec = ["_commit.txt"]\n'
    )
    (checkout / "setup.py").write_bytes((root / "setup.py").read_bytes())
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "all")
    return checkout


def test_a_wheel_knows_its_commit_also_by_way_of_a_source_distribution(checkout, tmp_path):
    head = git(checkout, "rev-parse", "HEAD")

    def build(source, what):
        code = f"from setuptools import build_meta; print(build_meta.{what}({str(tmp_path)!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=source, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return tmp_path / done.stdout.strip().split("\n")[-1]

    def commit_in(wheel):
        return zipfile.ZipFile(wheel).read("jaxspec/_commit.txt").decode().strip()

    assert commit_in(build(checkout, "build_wheel")) == head
    (checkout / "jaxspec" / "__init__.py").write_text("changed = True\n")
    assert commit_in(build(checkout, "build_wheel")) == head + "+"
    git(checkout, "checkout", "-q", ".")
    with tarfile.open(build(checkout, "build_sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    assert not (source / ".git").exists()
    assert commit_in(build(source, "build_wheel")) == head


@pytest.mark.slow
def test_compiled_programs_are_kept_for_the_next_process(tmp_path, fast_environment):
    code = (
        "import jax, jaxspec, toy\n"
        "from jaxspec.engine.engine import Engine\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(\n"
        "    lambda name, **_: hits.append(name) if name.endswith('/cache_hits') else None\n"
        ")\n"
        "jaxspec.enable_compilation_cache()\n"
        "Engine(toy.model(kernels='xla'), batch_size=1, max_length=128).generate([[1, 2]])\n"
        "print(len(hits))\n"
    )
    environ = {
        name: value for name, value in fast_environment.items() if not name.startswith("JAX_")
    }
    environ |= {
        "JAXSPEC_CACHE": str(tmp_path),
        "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),
    }

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


def test_a_result_names_the_processor(monkeypatch):
    named = environment.devices()["cpu_model"]
    assert named is None or named.strip()
    monkeypatch.setattr(
        pathlib.Path,
        "read_text",
        lambda *_, **__: "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n",
    )
    assert environment.devices()["cpu_model"] == "Some CPU @ 2 GHz"
