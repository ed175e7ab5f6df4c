"""The end of a process does not cut off a program that JAX is writing to its persistent cache."""

from __future__ import annotations

import threading
import time

import jax
import pytest
from jax._src import lru_cache

from jaxspec.runtime import compilation


@pytest.fixture
def cache(tmp_path):
    """JAX's cache of limited size, in a directory that its configuration names."""
    before = {
        name: jax.config.values[name]
        for name in ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    }
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_compilation_cache_max_size", 10**6)
    yield lru_cache.LRUCache(str(tmp_path), max_size=10**6)
    for name, value in before.items():
        jax.config.update(name, value)


def waited_s() -> float:
    started_s = time.monotonic()
    compilation.finish_cache_writes()
    return time.monotonic() - started_s


def test_a_write_is_waited_for(cache, monkeypatch):
    is_writing, may_end = threading.Event(), threading.Event()

    def evict(**_):  # within the lock, before the program is written
        is_writing.set()
        may_end.wait()

    monkeypatch.setattr(cache, "_evict_if_needed", evict)
    writing = threading.Thread(target=cache.put, args=("key", b"program"))
    writing.start()
    is_writing.wait()
    threading.Timer(0.3, may_end.set).start()
    assert 0.25 < waited_s() < compilation.CACHE_WAIT_S
    assert cache.get("key") == b"program"
    writing.join()


def test_a_write_that_does_not_end_is_not(cache, monkeypatch):
    monkeypatch.setattr(compilation, "CACHE_WAIT_S", 0.1)
    with cache.lock:
        assert 0.1 <= waited_s() < 60


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_compilation_cache_dir", None),
        ("jax_compilation_cache_dir", "/proc/absent"),
        ("jax_compilation_cache_max_size", -1),
    ],
)
def test_without_such_a_cache_nothing_is_waited_for(cache, name, value):
    jax.config.update(name, value)
    with cache.lock:
        assert waited_s() < compilation.CACHE_WAIT_S
