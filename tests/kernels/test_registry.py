"""Which kernels a device is given, and that nothing is done by others in silence."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.kernels import registry
from jaxspec.kernels.xla import block_attention
from jaxspec.runtime import environment
from jaxspec.types import Window


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    before = environment.noted_kernels()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield
    environment.note_kernels(before["kernels"], fallback=before["kernels_fallback"])


def test_a_gpu_is_given_the_attention_kernel():
    assert registry.default_kernels() == "pallas"
    assert environment.noted_kernels() == {
        "kernels": "pallas",
        "kernels_family": None,
        "kernels_fallback": None,
    }


def test_a_hopper_gpu_is_given_the_kernel_for_it(monkeypatch):
    for capability, wanted in (("8.9", "pallas"), ("9.0", "mosaic"), ("10.0", "pallas")):
        device = types.SimpleNamespace(compute_capability=capability, device_kind="x")
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert registry.default_kernels() == wanted
        assert environment.noted_kernels()["kernels"] == wanted


def test_the_kernel_for_hopper_is_refused_elsewhere():
    with pytest.raises(SettingError, match=r"compute capability 9 .*; choose 'xla' or 'pallas'"):
        registry.check_kernels("mosaic")


def test_where_pallas_is_missing_that_is_announced(monkeypatch, caplog):
    def lacks(name):
        raise SettingError("refused") from ImportError("no Triton in this JAX")

    monkeypatch.setattr(registry, "get_kernels", lacks)
    assert registry.default_kernels() == "xla"
    [record] = caplog.records
    assert record.getMessage().startswith(
        "The Pallas kernels cannot be used: no Triton in this JAX. XLA's are used instead"
    )
    assert environment.noted_kernels()["kernels_fallback"] == "no Triton in this JAX"


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_a_loop_over_the_kv_is_announced_on_a_gpu(platform, monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    environment.note_kernels("pallas")
    cache = kv.init_cache(
        num_layers=1, num_rows=1, capacity=128, num_kv_heads=1, head_size=24, dtype=jnp.float32
    )
    positions = jnp.zeros((1, 3), jnp.int32)
    window = Window(start=positions[:, 0], positions=positions, slots=positions)
    for _ in range(2):
        jax.eval_shape(
            lambda queries: block_attention(
                queries, cache.layers[0], cache.table, window, dtype=jnp.float32
            ),
            jnp.zeros((1, 3, 2, 24)),
        )
    fallback = environment.noted_kernels()["kernels_fallback"]
    if platform == "cpu":
        assert not caplog.records
        assert fallback is None
    else:
        assert "windows of 3 tokens, heads of 24" in fallback
        assert [fallback in record.getMessage() for record in caplog.records] == [True]
