"""How much memory the host still has for this process, its cgroups and limits counted."""

from __future__ import annotations

import pathlib
import resource
from collections.abc import Iterator

import psutil

CGROUPS = pathlib.Path("/sys/fs/cgroup")
MEMBERSHIP = pathlib.Path("/proc/self/cgroup")


def free_memory() -> tuple[int, str]:
    """Bytes that this process can still allocate, and what bounds them: `on this host`, `in this
    cgroup`, `under ulimit -v` or `under ulimit -d`."""
    bounds = [(psutil.virtual_memory().available, "on this host")]
    bounds += [(count, "in this cgroup") for count in _left_in_cgroups()]
    bounds += _left_under_limits()
    count, where = min(bounds)
    return max(count, 0), where


def _left_under_limits() -> Iterator[tuple[int, str]]:
    """What the limits on address space and on data leave, if they are set."""
    used = psutil.Process().memory_info()
    for limit, num_used, name in (
        (resource.RLIMIT_AS, used.vms, "under ulimit -v"),
        (resource.RLIMIT_DATA, getattr(used, "data", used.vms), "under ulimit -d"),
    ):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            yield most - num_used, name


def _left_in_cgroups() -> Iterator[int]:
    """What the limits of this process's cgroups, and of those around them, leave. Page cache that
    the kernel would give back counts as free."""
    for directory in _memory_cgroups():
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
            except (OSError, ValueError, KeyError):  # not of this version, or not ours to read
                continue


def _memory_cgroups() -> Iterator[pathlib.Path]:
    """Directories of the cgroups that this process's memory counts in. In a container the path of a
    cgroup may be the host's, of which only the last directories, or none, are mounted."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = CGROUPS
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
        else:
            continue
        inner = root / path.strip("/")
        yield from (
            directory for directory in (inner, *inner.parents) if directory.is_relative_to(root)
        )
