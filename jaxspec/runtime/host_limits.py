"""The memory and CPUs of the host that this process may use, within the limits of its cgroups."""

from __future__ import annotations

import math
import os
import pathlib
import resource
from collections.abc import Iterator

import psutil

CGROUPS = pathlib.Path("/sys/fs/cgroup")
MEMBERSHIP = pathlib.Path("/proc/self/cgroup")


def free_memory() -> tuple[int, str]:
    """The bytes that this process can still allocate, and what limits them: `on this host`, `in
    this cgroup`, `under ulimit -v` or `under ulimit -d`."""
    bounds = [(psutil.virtual_memory().available, "on this host")]
    bounds += [(count, "in this cgroup") for count in _left_in_cgroups()]
    bounds += _left_under_limits()
    count, where = min(bounds)
    return max(count, 0), where


def usable_cpus() -> int:
    """The number of CPUs that this process may keep busy: those that it may run on, or fewer if a
    cgroup (such as a container's) grants it less time. At least 1."""
    # macOS does not say which CPUs a process may run on.
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    counts = [float(len(own) or os.cpu_count() or 1), *_cpus_in_cgroups()]
    return max(math.ceil(min(counts)), 1)


def _cpus_in_cgroups() -> Iterator[float]:
    """CPU time per wall-clock time that each of this process's cgroups with a limit grants."""
    for directory in _cgroups("cpu"):
        try:
            if (directory / "cpu.max").exists():  # version 2
                quota, period = (directory / "cpu.max").read_text().split()
            else:
                quota = (directory / "cpu.cfs_quota_us").read_text().strip()
                period = (directory / "cpu.cfs_period_us").read_text()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (
            OSError,
            ValueError,
            ZeroDivisionError,
        ):  # another version, or not readable
            continue


def _left_under_limits() -> Iterator[tuple[int, str]]:
    """Bytes left under the limits on address space and on data, if they are set."""
    used = psutil.Process().memory_info()
    for limit, num_used, name in (
        (resource.RLIMIT_AS, used.vms, "under ulimit -v"),
        (resource.RLIMIT_DATA, getattr(used, "data", used.vms), "under ulimit -d"),
    ):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            yield most - num_used, name


def _left_in_cgroups() -> Iterator[int]:
    """Bytes left under the limits of this process's cgroups and their parents. Page cache that the
    kernel would give back counts as free."""
    for directory in _cgroups("memory"):
        for limit, usage, prefix in (
            ("memory.max", "memory.current", ""),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # version 1
        ):
            try:
                most = (directory / limit).read_text().strip()
                if most == "max":
                    continue
                stat = dict(
                    line.split() for line in (directory / "memory.stat").read_text().splitlines()
                )
                used = int((directory / usage).read_text())
                cached = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
                yield int(most) - used + cached
            except (OSError, ValueError, KeyError):  # another version, or not readable
                continue


def _cgroups(controller: str) -> Iterator[pathlib.Path]:
    """Directories of the cgroups whose controller, `memory` or `cpu`, counts this process.

    In a container the path of a cgroup may be the host's, of which only the last directories, or
    none, are mounted.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = CGROUPS
        elif controller in controllers.split(","):
            root = CGROUPS / controller
        else:
            continue
        inner = root / path.strip("/")
        yield from (
            directory for directory in (inner, *inner.parents) if directory.is_relative_to(root)
        )
