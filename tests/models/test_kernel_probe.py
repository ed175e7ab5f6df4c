"""Kernels are tried before they are relied on, and others take their place if they do not work."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest
import toy

from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.kernels import pallas
from jaxspec.lab import doctor
from jaxspec.models import kernel_probe
from jaxspec.models.config import RopeConfig
from jaxspec.models.kernel_probe import (
    WindowSize,
    disagreement,
    problem,
    windows_of,
    with_working_kernels,
)
from jaxspec.types import EngineShape

pytestmark = pytest.mark.usefixtures("traced_anew")

ROUND = WindowSize(num_rows=3, num_tokens=3, capacity=256)
TREE = dataclasses.replace(ROUND, num_tokens=5, tree_depth=2)
CHUNK = WindowSize(num_rows=1, num_tokens=64, capacity=256)


def model(kernels="pallas", dtype=jnp.float32, **settings):
    shape = {"head_size": 16, "rope": RopeConfig(theta=1e4, rotary_size=16), "num_layers": 1}
    made = toy.model(dtype=dtype, **shape)
    return dataclasses.replace(made, kernels=kernels, **settings)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("native", jnp.bfloat16),
        pytest.param("pallas", jnp.float32, marks=pytest.mark.slow),
        pytest.param("native", jnp.float32, marks=pytest.mark.slow),
        pytest.param("pallas", jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_kernels_that_work_are_kept(kernels, dtype):
    ours = model(kernels, dtype)
    windows = (ROUND, TREE, CHUNK)
    found = [disagreement(ours, window) for window in windows]
    assert 0 < max(found) < (1e-5 if dtype == jnp.float32 else 2e-2)
    assert with_working_kernels(ours, windows) is ours


def test_codes_are_compared_too():
    ours = model(kv_dtype="int8")
    assert problem(ours, (ROUND, TREE)) is None


def one_slot_too_many(monkeypatch):
    last_read = pallas.last_read_together
    monkeypatch.setattr(pallas, "last_read_together", lambda window: last_read(window) + 1)


def one_slot_too_few(monkeypatch):
    last_read = pallas.last_read_together

    def read(window):
        return jnp.maximum(last_read(window) - 1, 0)

    monkeypatch.setattr(pallas, "last_read_together", read)


def the_end_of_long_contexts_is_lost(monkeypatch):
    last_read = pallas.last_read_together
    monkeypatch.setattr(
        pallas, "last_read_together", lambda window: jnp.minimum(last_read(window), 2047)
    )


def another_slot_is_written(monkeypatch):
    write = pallas.write_window

    def wrong(qkv, layer, table, window, angles, **settings):
        return write(qkv, layer, table, window.replace(slots=window.slots + 1), angles, **settings)

    monkeypatch.setattr(pallas, "write_window", wrong)


def does_not_compile(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("Triton support is only enabled for Ampere GPUs")

    monkeypatch.setattr(pallas, "write_window", refuse)


DIFFER = "its results differ from XLA's"


@pytest.mark.parametrize(
    ("sabotage", "kv_dtype", "says"),
    [
        (one_slot_too_many, None, DIFFER),
        (one_slot_too_many, "int8", DIFFER),
        (one_slot_too_few, None, DIFFER),
        (another_slot_is_written, None, DIFFER),
        (does_not_compile, None, "RuntimeError: Triton support is only enabled for Ampere"),
    ],
)
def test_kernels_that_do_not_work_are_found(monkeypatch, sabotage, kv_dtype, says):
    sabotage(monkeypatch)
    assert says in (problem(model(kv_dtype=kv_dtype), (ROUND,)) or "")


@pytest.mark.slow
def test_the_end_of_a_long_context_counts_as_much_as_a_short_one(monkeypatch):
    """Although an average over 2,559 slots is a fiftieth of a single value."""
    the_end_of_long_contexts_is_lost(monkeypatch)
    for capacity, is_seen in ((2048, False), (2560, True)):
        window = WindowSize(num_rows=3, num_tokens=1, capacity=capacity)
        assert (problem(model(dtype=jnp.bfloat16), (window,)) is not None) == is_seen


def test_kernels_that_this_jax_lacks_are_no_fallback(monkeypatch):
    monkeypatch.setattr(kernel_probe, "problem", lambda ours, _: f"{ours.kernels} are wrong")
    monkeypatch.setattr(kernel_probe, "problem_on_gpu", {"pallas": "it lacks Triton"}.get)
    monkeypatch.setitem(kernel_probe.FALLBACKS, "native", "pallas")  # as mosaic's, on any machine
    instead = with_working_kernels(model("native"), (dataclasses.replace(ROUND, capacity=640),))
    assert (instead.kernels, instead.kernels_fallback) == ("xla", "native: native are wrong")


def test_xla_takes_their_place_and_it_is_said(monkeypatch, caplog):
    does_not_compile(monkeypatch)
    # Another capacity, because what was found is remembered.
    window = dataclasses.replace(ROUND, capacity=384)
    with caplog.at_level(logging.WARNING):
        instead = with_working_kernels(model(), (window,))
    assert instead.kernels == "xla"
    assert (instead.kernels_fallback or "").startswith("pallas: RuntimeError: Triton support")
    [record] = caplog.records
    assert "The kernels xla are used instead" in record.getMessage()


def test_an_engine_on_an_accelerator_tries_the_kernels_of_both_its_models():
    # Programs for a GPU do not compile on a CPU; XLA's kernels run on both.
    ours = model(platform="gpu")
    engine = Engine(ours, DraftModel(ours), draft_length=2, batch_size=2, max_length=128)
    described = engine.describe()
    assert described["kernels"] == "xla"
    assert described["kernels_fallback"].startswith("pallas: ")
    drafter = engine.executor.parts.drafter
    assert isinstance(drafter, DraftModel)
    assert drafter.model.kernels == "xla"  # pyright: ignore[reportAttributeAccessIssue]
    prompts, params = toy.prompts((3, 20)), SamplingParams(max_tokens=8)
    plain = Engine(model("xla"), batch_size=2, max_length=128).generate(prompts, params)
    ours = engine.generate(prompts, params)
    assert [done.token_ids for done in ours] == [done.token_ids for done in plain]


@pytest.mark.accelerator
@pytest.mark.skipif(jax.default_backend() == "cpu", reason="there is no GPU or TPU")
@pytest.mark.parametrize("kernels", [name for name in doctor.MADE_FOR if name != "native"])
@pytest.mark.parametrize("case", doctor.CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_the_kernels_of_this_device(kernels, case):
    if doctor.why_not_here(kernels) is not None:
        pytest.skip(f"not {doctor.MADE_FOR[kernels]}")
    preset, dtype, kv_dtype, windows = case
    ours = doctor.small_model(preset, dtype, kernels, kv_dtype)
    assert problem(ours, windows) is None


def test_the_windows_of_an_engine():
    shape = EngineShape(
        batch_size=8,
        max_length=512,
        verify_length=5,
        prefill_chunk=128,
        vocab_size=100,
        tree_depth=2,
        chunks_per_call=4,
    )
    sizes = [(w.num_rows, w.num_tokens, w.tree_depth) for w in windows_of(shape)]
    assert sizes == [(4, 1, 0), (4, 5, 2), (4, 128, 0)]
    narrow = [(w.num_rows, w.num_tokens, w.tree_depth) for w in windows_of(shape, verify_length=2)]
    assert narrow == [(4, 1, 0), (4, 2, 1), (4, 128, 0)]
