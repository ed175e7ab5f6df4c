"""What is compiled, how often, and what it keeps in memory."""

import functools
import math
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec.engine.engine import Engine
from jaxspec.schedulers import Continuous, Static

pytestmark = pytest.mark.as_shipped

SMALL = {"num_kv_heads": 1, "num_query_heads": 2, "head_size": 8}  # one KV head: the hard layout


DRAFTERS = ("plain", "draft model", "ngram")


@pytest.fixture(scope="module")
def engine_of():
    """The engine of a drafter, made once for a dtype, a `max_length` and other settings."""

    @functools.cache
    def make(drafter, dtype, max_length, *, batch_size=4, scheduler=None):
        target = toy.model(dtype=dtype)
        if drafter == "draft model":
            draft = toy.model(seed=1, dtype=dtype, width=24, num_layers=1, **SMALL)
        made = {
            "plain": lambda: None,
            "draft model": lambda: jaxspec.DraftModel(draft),
            "ngram": jaxspec.NGram,
        }[drafter]()
        shape = {"batch_size": batch_size, "max_length": max_length, "scheduler": scheduler}
        return Engine(target, made, **shape)

    return make


# Bytes per slot and seat that may grow with the max_length: the int32 tokens; where more rows are
# held than there are rows, tokens and int8 origins of those in the batch: they are taken and
# put back.
@pytest.mark.parametrize(
    ("drafter", "dtype", "scheduler", "bytes_per_slot"),
    [
        ("draft model", jnp.float32, Static(), 4),
        *(
            pytest.param(drafter, dtype, scheduler, num_bytes, marks=pytest.mark.slow)
            for dtype, scheduler, num_bytes in (
                (jnp.float32, Static(), 4),
                (jnp.bfloat16, Static(), 4),
                (jnp.float16, Static(), 4),
                (jnp.float32, Continuous(), 5),
            )
            for drafter in DRAFTERS
            if (drafter, dtype, num_bytes) != ("draft model", jnp.float32, 4)
        ),
    ],
)
def test_state_is_donated_and_temporaries_do_not_grow_with_capacity(
    engine_of, drafter, dtype, scheduler, bytes_per_slot
):
    figures = []
    for max_length in (256, 4096):
        engine = engine_of(drafter, dtype, max_length, scheduler=scheduler)
        memory = hlo.compiled(engine).memory_analysis()
        state = engine.executor.eval_state()
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
        assert memory.alias_size_in_bytes >= num_bytes
        figures.append(memory.temp_size_in_bytes)
    # Token buffers grow, and what n-gram lookup compares; no cache does: it grew by megabytes.
    allowed = 4 * 4096 * (48 if drafter == "ngram" else bytes_per_slot)
    assert figures[1] - figures[0] <= allowed, figures


@pytest.mark.slow  # with the kernels of CPUs: kernels/test_cpu_models.py
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_instruction_copies_or_converts_a_whole_cache(engine_of, dtype, batch_size):
    for drafter in DRAFTERS:
        engine = engine_of(drafter, dtype, 2048, batch_size=batch_size)
        state = engine.executor.eval_state()
        layers = state.cache.layers
        if isinstance(engine.drafter, jaxspec.DraftModel):
            layers += state.drafter.cache.layers
        found = hlo.whole_cache_moves(
            hlo.compiled(engine).as_text(), {layer.k.size for layer in layers}
        )
        assert not found, (engine.describe()["drafter"], found)


def test_the_check_above_catches_a_copy():
    shape = toy.model().init_cache(4, 2048).layers[0].k.shape

    def doubles(k):
        return jax.lax.while_loop(lambda k: k.sum() < 9, lambda k: k.at[0].add(k[::-1][0]), k)

    copying = jax.jit(lambda k: doubles(k).swapaxes(0, 1) + 1)
    text = copying.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()
    assert hlo.whole_cache_moves(text, {math.prod(shape)})


@pytest.mark.slow
def test_the_params_of_both_models_are_arguments_not_constants(engine_of):
    for drafter in DRAFTERS:
        engine = engine_of(drafter, jnp.float32, 256, scheduler=Static())  # compiled above too
        text = hlo.compiled(engine).as_text()
        biggest = max(
            (int(np.prod([int(n) for n in dims.split(",") if n] or [1])))
            for dims in re.findall(r"= f32\[([\d,]*)\]\S* constant\(", text)
        )
        assert biggest < 1000
