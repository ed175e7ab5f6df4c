"""Free memory: of the host, of cgroups of both versions, under `ulimit`."""

from __future__ import annotations

import contextlib
import resource

import psutil
import pytest
import toy

from jaxspec import Engine, SettingError
from jaxspec.runtime import host_memory

MIB = 2**20


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Cgroups of this process as files: a function that makes them."""
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")

    def make(membership, **groups):
        (tmp_path / "membership").write_text(membership)
        for path, files in groups.items():
            directory = tmp_path / "cgroup" / path.replace("_", "/")
            directory.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (directory / name).write_text(f"{content}\n")

    return make


def version_2(limit, used, cached=0):
    stat = f"anon 1\ninactive_file {cached}\nactive_file 0"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def version_1(limit, used, cached=0):
    stat = f"cache 1\ntotal_inactive_file {cached}\ntotal_active_file 0"
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": stat,
    }


def test_the_tightest_cgroup_counts(cgroups):
    cgroups(
        "0::/slice/inner\n",
        slice=version_2(8 * MIB, 6 * MIB, cached=1 * MIB),
        slice_inner=version_2("max", 2 * MIB),
    )
    assert host_memory.free_memory() == (3 * MIB, "in this cgroup")


def test_version_1_with_the_hosts_path_in_a_container(cgroups):
    cgroups(
        "5:devices:/docker/x\n4:memory:/docker/x\n0::/\n",
        memory=version_1(8 * MIB, 10 * MIB, cached=3 * MIB),
    )
    assert host_memory.free_memory() == (1 * MIB, "in this cgroup")


@pytest.mark.parametrize("membership", ["0::/\n", "0::/gone\n4:memory:/\n"])
def test_without_limits_the_host_counts(cgroups, membership):
    cgroups(membership, memory=version_1(2**63 - 4096, 10 * MIB))
    count, where = host_memory.free_memory()
    assert where == "on this host"
    assert count == pytest.approx(psutil.virtual_memory().available, rel=0.1)


@contextlib.contextmanager
def at_most(limit, num_bytes):
    """Runs a block under a limit."""
    old = resource.getrlimit(limit)
    resource.setrlimit(limit, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, old)


@pytest.mark.parametrize(
    ("limit", "used", "option"),
    [(resource.RLIMIT_AS, "vms", "-v"), (resource.RLIMIT_DATA, "data", "-d")],
)
def test_an_engine_that_does_not_fit_under_a_limit_is_refused(limit, used, option):
    model = toy.model()
    shape = {"batch_size": 64, "max_length": 8192}  # more than 130 MiB
    Engine(model, **shape)
    num_used = getattr(psutil.Process().memory_info(), used)
    with (
        at_most(limit, num_used + 100 * MIB),
        pytest.raises(SettingError, match=f"MiB are free under ulimit {option} beside"),
    ):
        Engine(model, **shape)
