"""Whether bits depend on the width of a window: what is declared is tried."""

from __future__ import annotations

import dataclasses
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxspec import Engine, NGram
from jaxspec.kernels import cpu, registry, sums
from jaxspec.kernels.base import Kernels
from jaxspec.models import width_probe
from jaxspec.models.base import LanguageModel, packed_model
from jaxspec.models.width_probe import is_width_invariant

pytestmark = [
    pytest.mark.as_shipped,
    pytest.mark.skipif(cpu.problem() is not None, reason=f"{cpu.problem()}"),
]


def holds(model, *, batch_size=2, verify_length=3, **tree):
    return is_width_invariant(model, batch_size=batch_size, verify_length=verify_length, **tree)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_cpu_kernels_keep_what_they_declare(dtype):
    assert holds(toy.model(kernels="native", dtype=dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_cpu_kernels_keep_it_in_trees(dtype):
    model = toy.model(kernels="native", dtype=dtype)
    assert holds(model, verify_length=8, tree_depth=3)
    assert holds(model, verify_length=2, tree_depth=3)


@pytest.mark.slow
def test_where_the_cpu_kernels_leave_products_to_xla_nothing_is_declared(caplog):
    model = toy.model(kernels="native")
    assert holds(model, batch_size=100)
    assert not holds(toy.model(kernels="native", dtype=jnp.float16))
    assert not holds(toy.model(kernels="xla"))
    assert not caplog.records


def _wide_rows_are_larger(x, weight, *, is_gated=False, **settings):
    """A product that depends on the number of rows in its last bits."""
    num_rows = math.prod(x.shape[: -2 if is_gated else -1])
    made = cpu.NATIVE.product(x, weight, is_gated=is_gated, **settings)
    return made * jnp.asarray(1 + num_rows * 2**-20, made.dtype)


WRONG = dataclasses.replace(cpu.NATIVE, product=_wide_rows_are_larger)


def test_kernels_that_declare_it_wrongly_are_caught(monkeypatch, caplog):
    monkeypatch.setitem(registry.KERNELS, "wrong", (__name__, "WRONG"))
    model = dataclasses.replace(toy.model(), kernels="wrong")
    with caplog.at_level(logging.WARNING):
        assert not holds(model)
    [record] = caplog.records
    assert "windows of 3 tokens and of 1 gave other bits" in record.getMessage()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongCounts(cpu.NativeKernels):
    """Products that depend on the number of entries that are asked for in their last bits."""

    def product_for(self, num_live):
        right = super().product_for(num_live)
        if num_live is None:
            return right
        is_odd = (jnp.sum(num_live) % 2).astype(jnp.float32)

        def wrong(x, weight, **settings):
            made = right(x, weight, **settings)
            return made * (1 + is_odd * jnp.float32(2**-20)).astype(made.dtype)

        return wrong


WRONG_COUNTS = WrongCounts(product=cpu.NATIVE.product, is_width_invariant=True, skips_padding=True)


@pytest.mark.parametrize("tree_depth", [0, 2])
def test_kernels_whose_bits_depend_on_what_is_left_out_are_caught(monkeypatch, caplog, tree_depth):
    monkeypatch.setitem(registry.KERNELS, "wrong counts", (__name__, "WRONG_COUNTS"))
    model = dataclasses.replace(toy.model(), kernels="wrong counts")
    with caplog.at_level(logging.WARNING):
        assert not holds(model, tree_depth=tree_depth)
    [record] = caplog.records
    assert "depend on how many of its tokens are left out" in record.getMessage()
    engine = Engine(model, NGram(), batch_size=2, max_length=128, draft_length=2)
    assert not engine.executor.parts.skips_padding
    sound = Engine(toy.model(kernels="native"), NGram(), batch_size=2, max_length=128)
    assert sound.executor.parts.skips_padding


class WrongInTrees(cpu.NativeKernels):
    """Attention that depends on the number of nodes in its last bits."""

    def attend(self, qkv, layer, table, window, angles, **settings):
        heads, layer = super().attend(qkv, layer, table, window, angles, **settings)
        grown = 1 if window.paths is None else 1 + qkv.shape[1] * 2**-20
        return heads * jnp.asarray(grown, heads.dtype), layer


WRONG_IN_TREES = WrongInTrees(product=cpu.NATIVE.product, is_width_invariant=True)


def test_kernels_that_declare_it_wrongly_of_trees_are_caught(monkeypatch, caplog):
    monkeypatch.setitem(registry.KERNELS, "wrong in trees", (__name__, "WRONG_IN_TREES"))
    model = dataclasses.replace(toy.model(), kernels="wrong in trees")
    with caplog.at_level(logging.WARNING):
        assert holds(model)
        assert not holds(model, tree_depth=1)
    [record] = caplog.records
    assert "trees of 3 tokens and of 1 gave other bits" in record.getMessage()


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """A model from outside: the package's own behind the least that the protocol asks for."""

    inside: LanguageModel

    def __getattr__(self, name):
        if name == "is_width_invariant":
            raise AttributeError(name)
        return getattr(self.inside, name)


class DeclaredModel(OwnModel):
    is_width_invariant = True


def test_a_model_from_outside_declares_it_or_does_not(caplog):
    inside = packed_model(toy.model(kernels="native", num_layers=1))
    assert not holds(OwnModel(inside))
    assert holds(DeclaredModel(inside))
    assert not caplog.records


def test_a_model_from_outside_that_declares_it_wrongly_is_caught(monkeypatch, caplog):
    monkeypatch.setitem(registry.KERNELS, "wrong", (__name__, "WRONG"))
    with caplog.at_level(logging.WARNING):
        wrong = packed_model(dataclasses.replace(toy.model(), kernels="wrong"))
        assert not holds(DeclaredModel(wrong))
    assert caplog.records


def test_kernels_declare_nothing_unless_they_say_so():
    assert not Kernels().is_width_invariant


def test_draws_that_depend_on_the_width_are_caught(monkeypatch, caplog):
    model = toy.model(kernels="native", num_layers=1)

    def log_softmax(logits):
        return jax.nn.log_softmax(logits) * (1 + logits.shape[1] * 2**-20)

    monkeypatch.setattr(width_probe, "_found", {})
    monkeypatch.setattr(sums, "log_softmax", log_softmax)
    jax.clear_caches()
    with caplog.at_level(logging.WARNING):
        assert not holds(model)
    jax.clear_caches()
    [record] = caplog.records
    assert "Draws and log-probabilities of 3 tokens at once and of 1" in record.getMessage()


@pytest.mark.slow
def test_sums_whose_order_xla_chooses_are_caught(monkeypatch):
    def equal(logits):
        return width_probe._are_equal(*width_probe._draw_widths(logits, False))

    logits = 3 * np.random.default_rng(0).standard_normal((2, 5, 512)).astype(np.float32)
    assert equal(jnp.asarray(logits))
    monkeypatch.setattr(sums, "_total_up_to_one", lambda x: jnp.sum(x, axis=-1, keepdims=True))
    jax.clear_caches()
    assert not equal(jnp.asarray(logits))
    jax.clear_caches()
