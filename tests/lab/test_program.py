"""What a decode round becomes on GPUs and TPUs that are not there.

These compile and run nothing. They need the extra `deviceless`, and for the TPU `jax[tpu]`.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxspec.decode.loop import DecodeLoop
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import default_kernels
from jaxspec.lab.bench import program
from jaxspec.lab.bench.deviceless import ABSENT_DEVICES, as_if_on, compile_for
from jaxspec.lab.bench.program import (
    Shape,
    compile_prefill,
    compile_run,
    launch_problems,
    launches_per_layer,
)
from jaxspec.lab.cost.programs import LAUNCHES_PER_LAYER, Hlo
from jaxspec.models.prefill import chain_window
from jaxspec.models.registry import PRESETS
from jaxspec.models.shapes import shape_model
from jaxspec.runtime.environment import lacks_bfloat16

pytestmark = [pytest.mark.deviceless, pytest.mark.as_shipped]

WHOLE = Shape(
    target=PRESETS["qwen3-8b"],
    draft=PRESETS["qwen3-0.6b"],
    kernels="mosaic",
    batch_size=8,
    context=1024,
    draft_length=4,
)
# At 4096 entries XLA fuses sums over the vocabulary otherwise than at those of real models.
NARROW = {"vocab_size": 32768, "width": 512, "feed_forward_width": 1024}
SMALL = dataclasses.replace(
    WHOLE,
    target=dataclasses.replace(
        WHOLE.target, num_layers=2, num_query_heads=8, num_kv_heads=2, **NARROW
    ),
    draft=dataclasses.replace(
        WHOLE.draft, num_layers=1, num_query_heads=4, num_kv_heads=2, is_tied=False, **NARROW
    ),
    batch_size=4,
)


def needs(device: str):
    problem = ABSENT_DEVICES[device].problem
    return pytest.mark.skipif(problem is not None, reason=str(problem))


@needs("h100")
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["mosaic", "pallas"])
def test_a_round_on_an_h100(kernels):
    with as_if_on("h100"):
        found = compile_run("h100", dataclasses.replace(SMALL, kernels=kernels))
    assert found.problems(draft_length=4) == []
    assert found.loops == [(1, None), (2, 3)]  # rounds, and the draft steps after the first
    for launches in (found.greedy, found.sampled):
        assert launches.num_graphs <= 6
        assert launches.num_predicates <= 2
        assert launches.num_kernels <= 2  # the condition of the round


@needs("h100")
def test_a_round_without_draft_steps_is_one_graph():
    with as_if_on("h100"):
        found = compile_run("h100", dataclasses.replace(SMALL, is_resting=True))
    assert found.problems(draft_length=0) == []
    assert found.loops == [(1, None)]
    assert (found.greedy.num_graphs, found.greedy.num_predicates) == (1, 1)


@needs("h100")
@pytest.mark.slow
def test_draft_steps_that_read_a_window_of_their_kv_have_no_loops(monkeypatch):
    whole = Shape.loop

    def in_window(shape):
        parts = whole(shape).parts
        [drafter] = parts.drafter.trying_window(512).variants
        return DecodeLoop(dataclasses.replace(parts, drafter=drafter))

    monkeypatch.setattr(Shape, "loop", in_window)
    with as_if_on("h100"):
        found = compile_run("h100", dataclasses.replace(SMALL, context=8192))
    assert found.problems(draft_length=4) == []
    assert found.loops == [(1, None), (2, 3)]


@needs("t4")
@pytest.mark.slow
def test_a_t4_compiles_with_xlas_kernels_and_its_problems_are_their_loops():
    with as_if_on("t4"):
        kernels, dtype = default_kernels(), "float16" if lacks_bfloat16() else "bfloat16"
        found = compile_run("t4", dataclasses.replace(SMALL, kernels=kernels, dtype=dtype))
    assert (kernels, dtype) == ("xla", "float16")
    assert found.cache_moves == []
    assert found.num_host_buffers == 0
    assert found.aliased_bytes >= found.kv_bytes
    assert len(found.problems(draft_length=4)) == 6, found.problems(draft_length=4)


@needs("a100")
@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100", "rtx4090", "b200"])
def test_a_round_on_other_gpus(device):
    with as_if_on(device):
        assert default_kernels() == "pallas"
        found = compile_run(device, dataclasses.replace(SMALL, kernels="pallas"))
    assert found.problems(draft_length=4) == []


@needs("h100")
@pytest.mark.parametrize("kernels", ["mosaic", pytest.param("pallas", marks=pytest.mark.slow)])
def test_a_prefill_call_on_an_h100(kernels):
    shape = dataclasses.replace(SMALL, kernels=kernels)
    with as_if_on("h100"):
        for name in program.PREFILL:
            found = compile_prefill("h100", shape, name)
            assert found.problems() == []
            assert (found.launches.num_graphs, found.launches.num_predicates) == (1, 0)


@needs("h100")
@pytest.mark.parametrize("kernels", ["mosaic", pytest.param("pallas", marks=pytest.mark.slow)])
def test_launches_of_a_layer(kernels):
    shape = dataclasses.replace(SMALL, kernels=kernels)
    with as_if_on("h100"):
        number = launches_per_layer("h100", shape)
    assert number > 0
    assert launch_problems(shape, number) == []
    (problem,) = launch_problems(shape, LAUNCHES_PER_LAYER[kernels] + 1)
    assert "a layer of the target has" in problem


@needs("h100")
@pytest.mark.parametrize("kernels", ["mosaic", pytest.param("pallas", marks=pytest.mark.slow)])
def test_kernels_are_lowered_once_for_all_layers(kernels):
    """A kernel takes much longer to lower than the rest of a layer."""

    def num_kernels(num_layers: int) -> int:
        target = dataclasses.replace(SMALL.target, num_layers=num_layers)
        loop = dataclasses.replace(SMALL, kernels=kernels, target=target).loop()
        count = jax.ShapeDtypeStruct((), jnp.int32)
        given = (loop.params, jax.eval_shape(loop.init), count, count)
        text = jax.jit(loop.run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert ("xla.gpu.triton" in text) == (kernels == "pallas")  # `mosaic` needs no Triton
        return text.count("custom_call @")

    with as_if_on("h100"):
        assert num_kernels(3) == num_kernels(1) > 0


@needs("h100")
@pytest.mark.slow
def test_sabotage_a_loop_in_every_layer_is_seen():
    """`block_attention`, the default of all accelerators once, loops over the live KV."""
    with as_if_on("h100"):
        found = compile_run("h100", dataclasses.replace(SMALL, kernels="xla"))
        prefill = compile_prefill("h100", dataclasses.replace(SMALL, kernels="xla"), "prefill")
    for problems in (" ".join(found.problems(draft_length=4)), " ".join(prefill.problems())):
        assert "predicates" in problems
        assert "CUDA graphs" in problems
    assert "have no known trip count" in " ".join(found.problems(draft_length=4))


@needs("h100")
def test_gpus_are_given_the_attention_kernel():
    with as_if_on("h100"):
        assert default_kernels() == "mosaic"


@needs("h200")
@pytest.mark.slow
def test_the_command(tmp_path):
    bench = program.program(devices=("h200",), num_layers=1, out=tmp_path / "program.json")
    bench.run(Console(quiet=True))
    document = json.loads((tmp_path / "program.json").read_text())
    kinds = [result["rows"] for result in document["results"]]
    assert kinds == [
        "greedy", "sampled", "greedy, resting", "prefill", "prefill_target", "catch_up"
    ]  # fmt: skip
    for result in document["results"]:
        assert result["problems"] == []
        assert result["launches"]["num_graphs"] > 0
    for result in document["results"][:3]:
        assert result["launches_per_layer"] > 0


@needs("h100")
@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_whole_models(device):
    with as_if_on(device):
        found = compile_run(device, WHOLE)
    assert found.problems(draft_length=4) == []


@needs("v5e")
@pytest.mark.slow
def test_a_round_on_a_tpu_copies_no_kv():
    with as_if_on("v5e"):
        found = compile_run("v5e", dataclasses.replace(SMALL, kernels="xla"))
    assert found.cache_moves == []


def weight_moves(*, is_packed):
    """Copies of weights of a layer of Qwen3-8B in a pass over rounds of a TPU."""
    config = dataclasses.replace(PRESETS["qwen3-8b"], num_layers=1, vocab_size=4096)
    with as_if_on("v5e"):
        model = shape_model(config, name="target", dtype="bfloat16", is_packed=is_packed)

        def forward(params, cache, tokens, window):
            return model.forward(params, tokens, window, cache)

        cache = jax.eval_shape(lambda: model.init_cache(8, 1024))
        window = jax.eval_shape(lambda: chain_window(jnp.zeros((8,), jnp.int32), 5))
        text = compile_for("v5e", forward, model.params, cache, window.slots, window, donated=1)
    return program._weight_moves(Hlo(text.hlo), model.params["layers"])


@needs("v5e")
@pytest.mark.slow
def test_a_pass_on_a_tpu_copies_no_weight():
    assert weight_moves(is_packed=True) == []


@needs("v5e")
@pytest.mark.slow
def test_the_check_above_sees_that_weights_as_they_are_stored_are_copied():
    assert (
        len(weight_moves(is_packed=False)) >= 2
    )  # those of queries, keys and values, and of gates


def test_a_device_that_nothing_is_known_of():
    known = "choose one of h100, h200, a100, rtx4090, b200, t4, v5e"
    with pytest.raises(SettingError, match=known), as_if_on("b300"):
        pass
