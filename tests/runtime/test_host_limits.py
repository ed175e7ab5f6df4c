"""Free memory and CPUs: of the host, of cgroups of both versions, under `ulimit`."""

from __future__ import annotations

import contextlib
import resource

import psutil
import pytest
import toy

from jaxspec import Engine
from jaxspec.errors import SettingError
from jaxspec.runtime import host_limits

MIB = 2**20


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Cgroups of this process as files: a function that makes them."""
    monkeypatch.setattr(host_limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_limits, "MEMBERSHIP", tmp_path / "membership")

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
    assert host_limits.free_memory() == (3 * MIB, "in this cgroup")


def test_version_1_with_the_hosts_path_in_a_container(cgroups):
    cgroups(
        "5:devices:/docker/x\n4:memory:/docker/x\n0::/\n",
        memory=version_1(8 * MIB, 10 * MIB, cached=3 * MIB),
    )
    assert host_limits.free_memory() == (1 * MIB, "in this cgroup")


@pytest.mark.parametrize("membership", ["0::/\n", "0::/gone\n4:memory:/\n"])
def test_without_limits_the_host_counts(cgroups, membership):
    cgroups(membership, memory=version_1(2**63 - 4096, 10 * MIB))
    count, where = host_limits.free_memory()
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


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"slice": {"cpu.max": "max 100000"}}, 64),
        ({"slice": {"cpu.max": "150000 100000"}}, 2),  # one and a half: two threads keep it busy
        ({"slice": {"cpu.max": "400000 100000"}, "slice_inner": {"cpu.max": "max 100000"}}, 4),
        ({"slice_inner": {"cpu.max": "20000 100000"}}, 1),
        ({"slice_inner": {"cpu.max": "nonsense"}}, 64),
    ],
)
def test_cpus_are_those_that_a_cgroup_grants(cgroups, monkeypatch, limits, expected):
    monkeypatch.setattr(host_limits.os, "sched_getaffinity", lambda _: set(range(64)))
    cgroups("0::/slice/inner\n", **limits)
    assert host_limits.usable_cpus() == expected


def test_cpus_of_a_cgroup_of_version_1(cgroups, monkeypatch):
    monkeypatch.setattr(host_limits.os, "sched_getaffinity", lambda _: set(range(8)))
    limits = {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000}
    cgroups("4:cpu,cpuacct:/docker/x\n", cpu=limits)
    assert host_limits.usable_cpus() == 3
    cgroups("4:cpu,cpuacct:/docker/x\n", cpu=limits | {"cpu.cfs_quota_us": -1})
    assert host_limits.usable_cpus() == 8
