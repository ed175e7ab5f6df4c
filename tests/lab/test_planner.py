"""The planner: its bytes are those that XLA and the arrays show, and its choice is the best."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import json

import flex
import heads
import jax
import jax.numpy as jnp
import pytest
import toy

import jaxspec
from jaxspec import errors
from jaxspec.cache.pages import BLOCK
from jaxspec.commands.generate import GenerateCommand
from jaxspec.decode.loop import empty
from jaxspec.decode.state import batch_view
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.trees import BeamTree, StaticTree
from jaxspec.engine import memory, plan
from jaxspec.engine.budget import bytes_of
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.executor import make_executor
from jaxspec.engine.memory import measure_parts, num_bytes
from jaxspec.engine.plan import PlanBytes, PlannedRun, PlanSettings
from jaxspec.errors import JaxspecWarning, SettingError
from jaxspec.kernels.registry import default_kernels
from jaxspec.lab.cost.baseline import baseline_bytes
from jaxspec.lab.cost.devices import read_device
from jaxspec.lab.plan import bytes as planned_bytes
from jaxspec.lab.plan.bytes import SHORT_LAYERS, Layers
from jaxspec.lab.plan.planner import Planner, choose, plan_memory
from jaxspec.lab.plan.request import (
    PlanRequest,
    Search,
    describe,
    doubling,
    find_drafter,
    model_axes,
)
from jaxspec.models.registry import PRESETS
from jaxspec.schedulers import Static
from jaxspec.verifiers import Coupled, Rejection

TARGET = toy.config(num_layers=3)
DRAFT = toy.config(num_layers=1, width=16, feed_forward_width=24, num_query_heads=2)
GLM_TARGET = toy.config(
    family="glm4",
    vocab_size=251,
    width=48,
    num_layers=5,
    num_query_heads=6,
    num_kv_heads=3,
    has_qkv_bias=True,
    has_qk_norm=False,
    has_sandwich_norms=True,
)
GLM_DRAFT = toy.config(vocab_size=251, num_layers=2, width=24, num_kv_heads=1, is_tied=True)
HERE = {"is_datasheet": False}  # a fitted device
PAIRS = {"qwen3": (TARGET, DRAFT), "glm4": (GLM_TARGET, GLM_DRAFT)}
GIB = 2**30
SMALL = Search(draft_lengths=(0, 1, 3), prefill_chunks=(32, 128))


def make_planner(target=TARGET, draft=DRAFT, **changes):
    fields = {
        "target": describe(target),
        "draft": None if draft is None else describe(draft),
        "batch": 4,
        "context": 300,
        "prompt_tokens": 100,
        "is_datasheet": True,
        "find_devices": read_device("h200"),
        "acceptance": 0.7,
        "given_dtype": "float32",
        "verifier": Coupled(),
        "scheduler": jaxspec.Continuous(),
        "mesh": None,
        "num_devices": 1,
        "search": SMALL,
    }
    request = PlanRequest(**{**fields, **changes})
    return Planner(request=request, say=lambda stage: None)


def settings(**changes):
    fields = {
        "batch_size": 3,
        "max_length": 256,
        "draft_length": 4,
        "prefill_chunk": 32,
        "draft_dtype": "float32",
    }
    return PlanSettings(**{**fields, **changes})


# ------------------------------------------------------------------------------------- the bytes


SETTINGS = [
    settings(),
    settings(batch_size=1, draft_length=1, max_length=128),
    settings(batch_size=8, draft_length=7, draft_dtype="bfloat16"),
    settings(draft_length=0),
    settings(kv_dtype="int8"),
    settings(draft_kv_dtype="int8"),
    settings(kv_dtype="int8", draft_kv_dtype="int8", batch_size=2),
]


def kv_bytes(config, *, num_rows, num_slots, kv_dtype, itemsize):
    """`rows * 2 L K (H b + s) * slots`, and a page number of 4 bytes per block."""
    per_vector = config.head_size * (1 if kv_dtype else itemsize) + (4 if kv_dtype else 0)
    per_slot = 2 * config.num_layers * config.num_kv_heads * per_vector
    return num_rows * (per_slot * num_slots + 4 * (num_slots // BLOCK))


@pytest.mark.parametrize("each", SETTINGS, ids=lambda each: each.sentence)
@pytest.mark.parametrize("verifier", [Coupled(), Rejection()], ids=lambda each: each.name)
def test_the_formula_is_what_the_loop_allocates(each, verifier):
    made = make_planner(verifier=verifier)
    parts = measure_parts(made.bytes.loop(each))
    rows = made.request.scheduler.num_residents(each.batch_size)
    shared = {"num_rows": rows, "num_slots": each.max_length}
    assert parts.target_kv_bytes == kv_bytes(TARGET, kv_dtype=each.kv_dtype, itemsize=4, **shared)
    itemsize = jnp.dtype(each.draft_dtype).itemsize
    wanted = kv_bytes(DRAFT, kv_dtype=each.draft_kv_dtype, itemsize=itemsize, **shared)
    assert parts.draft_kv_bytes == (wanted if each.draft_length else 0)
    made_here = expected_round_bytes(made.bytes.loop(each))
    assert made_here == (parts.logits_bytes, parts.draft_probs_bytes)
    has_probs = each.draft_length > 0 and verifier.needs_draft_probs
    assert (parts.draft_probs_bytes > 0) == has_probs


def expected_round_bytes(loop):
    """Bytes of the logits and of q, by tracing what makes them."""
    parts = loop.parts
    state = jax.eval_shape(lambda: empty(parts, parts.shape))
    length = parts.shape.verify_length
    hidden = jax.ShapeDtypeStruct(
        (parts.shape.batch_size, length, parts.target.config.width), parts.target.dtype
    )
    logits = jax.eval_shape(parts.target.logits, parts.target.params, hidden)
    if parts.is_plain:
        return num_bytes(logits), 0

    def propose(params, state):
        draft, _ = parts.drafter.propose(
            parts.shape, params, state.drafter, batch_view(state, is_chain=True)
        )
        return draft.q

    return num_bytes(logits), num_bytes(jax.eval_shape(propose, parts.drafter.params, state))


def test_a_planner_that_forgets_q_is_caught(monkeypatch):
    loop = make_planner(verifier=Rejection()).bytes.loop(settings())
    expected = expected_round_bytes(loop)
    monkeypatch.setattr(memory, "draft_probs_bytes", lambda shape: 0)
    parts = measure_parts(loop)
    assert expected != (parts.logits_bytes, parts.draft_probs_bytes)


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


random_model = functools.cache(jaxspec.random_model)


def check_live_arrays(each, *, verifier, pair="qwen3"):
    """The state of a real engine takes what was predicted, before and after a round."""
    made = make_planner(*PAIRS[pair], verifier=verifier, **HERE)
    predicted = measure_parts(made.bytes.loop(each))
    config, draft_config = PAIRS[pair]
    target = random_model(config, dtype="float32", kernels="xla", kv_dtype=each.kv_dtype)
    drafter = None
    if each.draft_length:
        draft = random_model(draft_config, dtype=each.draft_dtype, kernels="xla")
        drafter = DraftModel(draft, **each.options_of("drafter"))
    executor = make_executor(
        target,
        drafter,
        verifier=verifier if each.draft_length else Coupled(),
        draft_length=each.draft_length or None,
        batch_size=each.batch_size,
        max_length=each.max_length,
        prefill_chunk=each.prefill_chunk,
    )
    assert executor.memory.weights_bytes == predicted.weights_bytes
    before = live_bytes()
    assert num_bytes(executor.state) == predicted.state_bytes
    assert live_bytes() - before == predicted.state_bytes
    executor.run(1)
    executor.wait()
    assert live_bytes() - before == predicted.state_bytes


def test_live_arrays_are_what_was_predicted(monkeypatch):
    monkeypatch.setattr(planned_bytes, "default_kernels", lambda: "xla")
    check_live_arrays(settings(), verifier=Rejection())


MANY = [
    settings(batch_size=rows, draft_length=length, prefill_chunk=chunk, draft_dtype=dtype)
    for rows, length, chunk, dtype in (
        (1, 0, 64, "float32"),
        (1, 1, 32, "float32"),
        (1, 8, 256, "float32"),
        (2, 4, 128, "bfloat16"),
        (2, 6, 64, "float32"),
        (5, 0, 128, "float32"),
        (5, 1, 64, "bfloat16"),
        (5, 4, 32, "float32"),
        (5, 8, 128, "float32"),
        (8, 3, 64, "float32"),
    )
] + [
    settings(kv_dtype="int8", draft_length=3),
    settings(draft_kv_dtype="int8", draft_length=3),
    settings(kv_dtype="int8", draft_kv_dtype="int8", batch_size=6),
    settings(kv_dtype="int8", draft_length=0),
    settings(kv_dtype="int8", draft_kv_dtype="int8", max_length=512, prefill_chunk=128),
    settings(max_length=1024, draft_kv_window=128, batch_size=2),
    settings(max_length=1024, draft_kv_window=256, draft_length=7),
]


VERIFIERS = pytest.mark.parametrize(
    "verifier", [Coupled(), Rejection()], ids=lambda each: each.name
)


@pytest.mark.system
@pytest.mark.parametrize("pair", PAIRS)
@VERIFIERS
def test_predicted_arrays_against_measured(verifier, pair, monkeypatch):
    """Of 68 runs, to the byte."""
    monkeypatch.setattr(planned_bytes, "default_kernels", lambda: "xla")
    for each in MANY:
        check_live_arrays(each, verifier=verifier, pair=pair)


@functools.cache
def planner_of_programs(pair, verifier):
    """Whose estimates go through a few short programs of the pair."""
    search = dataclasses.replace(SMALL, draft_lengths=(0, 8), prefill_chunks=(32, 256))
    return make_planner(*PAIRS[pair], verifier=verifier, search=search, **HERE)


@pytest.mark.system
@pytest.mark.parametrize("pair", PAIRS)
@VERIFIERS
@pytest.mark.parametrize("each", MANY, ids=lambda each: each.sentence)
def test_predicted_programs_against_measured(each, verifier, pair, monkeypatch):
    """Within 5 %."""
    monkeypatch.setattr(planned_bytes, "default_kernels", lambda: "xla")
    made = planner_of_programs(pair, verifier)
    parts = measure_parts(made.bytes.loop(each))
    estimated = made.bytes.estimated(each)
    programs = {program.name: program for program in made.bytes.programs(each)}
    total = parts.weights_bytes + parts.state_bytes
    assert programs["round"].argument_bytes == pytest.approx(total, abs=64)
    measured = total + max(program.added_bytes for program in programs.values())
    assert estimated.total_bytes == pytest.approx(measured, rel=0.05)


LAYERS = toy.config(vocab_size=64, num_layers=5, num_query_heads=8, num_kv_heads=4)
DEEP = {
    "target": (LAYERS, DRAFT),
    "draft": (dataclasses.replace(LAYERS, num_layers=3), LAYERS),
}


@pytest.mark.system
@pytest.mark.parametrize("which", DEEP)
def test_layers_that_short_programs_lack_are_estimated(which, monkeypatch):
    """Each adds what its attention begins with: per token and query head, H numbers and two."""
    monkeypatch.setattr(planned_bytes, "default_kernels", lambda: "xla")
    target, draft = DEEP[which]
    made = make_planner(target, draft, **HERE, search=SMALL)
    each = settings(draft_length=3, prefill_chunk=128)
    _, prefill = made.bytes.programs(each)
    short = max(program.added_bytes for program in made.bytes.programs(each, SHORT_LAYERS))
    assert short < 0.95 * prefill.added_bytes
    assert made.bytes.temporaries(each).added_bytes(each) == pytest.approx(
        prefill.added_bytes, rel=0.01
    )
    added, _ = made.bytes.compiled(each, "short")
    assert added == pytest.approx(prefill.added_bytes, rel=0.01)
    further = Layers(target=target.num_layers - 2, draft=max(draft.num_layers - 2, 0))
    num_heads = further.target * target.num_query_heads + further.draft * draft.num_query_heads
    expected = 128 * num_heads * (LAYERS.head_size + 2) * 4
    _, of_prefill = made.bytes.temporaries(each).further_bytes(each)
    assert of_prefill == pytest.approx(expected, rel=0.02)


def test_the_baseline_policy_is_that_of_the_published_code():
    """Vicuna-7B in fp16 at 4096 slots, five Medusa heads, a tree of 64 nodes and 42 paths."""
    found = baseline_bytes(
        PRESETS["vicuna-7b"],
        context=4096,
        prompt_tokens=1024,
        num_heads=5,
        num_nodes=64,
        num_leaves=42,
        depth=4,
    )
    megabytes = {name: count / 1e6 for name, count in found.items()}
    assert megabytes == pytest.approx(
        {
            "target_kv_bytes": 2147.5,
            "prefill_logits_bytes": 393.2,
            "verify_logits_bytes": 24.6,
            "duplicated_logits_bytes": 80.6,
        },
        rel=2e-3,
    )


@pytest.mark.parametrize(
    ("changes", "gigabytes"),
    [({}, 155.54), ({"kv_dtype": "int8", "draft_kv_dtype": "int8"}, 88.92)],
)
def test_the_published_pair_takes_what_was_reckoned(changes, gigabytes):
    """64 rows of 8192 slots, five drafts; temporaries not counted."""
    made = make_planner("qwen3-8b", "qwen3-0.6b", scheduler=Static(), given_dtype="bfloat16")
    each = settings(
        batch_size=64, max_length=8192, draft_length=5, draft_dtype="bfloat16", **changes
    )
    parts = measure_parts(made.bytes.loop(each))
    total = parts.weights_bytes + parts.state_bytes + parts.logits_bytes
    q_bytes = 64 * 5 * 151936 * 4  # which the reckoning has, and coupled decoding has not
    assert (total + q_bytes) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_a_draft_window_takes_its_pages_in_flight_besides():
    """99 GB was reckoned for 512 slots; a ring has pages for what one call may touch."""
    made = make_planner("qwen3-8b", "qwen3-0.6b", scheduler=Static(), given_dtype="bfloat16")
    each = settings(
        batch_size=64,
        max_length=8192,
        draft_length=5,
        draft_dtype="bfloat16",
        draft_kv_window=512,
        prefill_chunk=128,
    )
    parts = measure_parts(made.bytes.loop(each))
    total = parts.weights_bytes + parts.state_bytes + parts.logits_bytes
    exactly = 64 * 512 * 112 * 1024
    assert (total - parts.draft_kv_bytes + exactly) / 1e9 == pytest.approx(99, rel=0.01)
    assert exactly < parts.draft_kv_bytes <= 2 * exactly


def test_temporaries_are_estimated_through_the_programs_that_were_compiled():
    """Of rounds of other proportions too: short windows need more for a token that they score."""
    made = make_planner(target=toy.config(vocab_size=4096, num_layers=2), draft=DRAFT)
    estimate = made.bytes.temporaries(settings())
    for each in (settings(batch_size=6, draft_length=1), settings(batch_size=6, draft_length=3)):
        rounds, prefill = made.bytes.programs(each, SHORT_LAYERS)
        measured = max(rounds.added_bytes, prefill.added_bytes)
        assert estimate.added_bytes(each) == pytest.approx(measured, rel=0.1)
        assert estimate.added_bytes(each) == pytest.approx(rounds.added_bytes, rel=0.1)


# ------------------------------------------------------------------------------------ the choice


def run(tokens_per_s, total, **changes):
    parts = measure_parts(make_planner().bytes.loop(settings()))
    count = total - parts.weights_bytes
    nothing = {field.name: 0 for field in dataclasses.fields(parts)}
    weights = {"target_weights_bytes": parts.weights_bytes}
    return PlannedRun(
        settings=settings(**changes),
        bytes=PlanBytes(
            parts=dataclasses.replace(parts, **{**nothing, **weights}),
            temporaries_bytes=count,
            source="estimated",
        ),
        tokens_per_s=tokens_per_s,
        decode_tokens_per_s=tokens_per_s,
    )


def test_the_choice_is_the_least_bytes_at_nearly_the_best_speed():
    million = 10**6
    runs = [run(100, 9 * million), run(97, 5 * million), run(95, 4 * million), run(50, million)]
    assert choose(runs, 10 * million, keep=0.96) is runs[1]
    assert choose(runs, 10 * million, keep=1.0) is runs[0]
    assert choose(runs, 10 * million, keep=0.1) is runs[3]
    assert choose(runs, 4 * million, keep=0.96) is runs[2]
    assert choose(runs, million - 1, keep=0.96) is None


def test_what_changes_the_output_comes_last():
    million = 10**6
    runs = [run(90, 4 * million), run(100, 2 * million, kv_dtype="int8")]
    assert choose(runs, 5 * million, keep=0.96) is runs[0]
    assert choose(runs, 3 * million, keep=0.96) is runs[1]


def plan_of(budget_bytes, **changes):
    options = {"batch": 4, "context": 300, "search": SMALL, "compiles": "short", **changes}
    return plan_memory(TARGET, DRAFT, budget_bytes, **options)


@pytest.mark.system
def test_a_smaller_budget_gives_a_smaller_plan_and_the_smallest_works():
    large = plan_of(GIB, keep=1.0)
    assert large.chosen.bytes.total_bytes <= large.fastest.bytes.total_bytes <= GIB
    assert large.chosen.tokens_per_s == large.fastest.tokens_per_s
    total = large.chosen.bytes.total_bytes
    small = plan_of(total - 1, keep=1.0)
    assert small.chosen.bytes.total_bytes < total
    assert small.chosen.tokens_per_s <= large.chosen.tokens_per_s
    assert large.cheaper is not None
    with pytest.raises(SettingError, match="the smallest that works is") as refused:
        plan_of(small.chosen.bytes.parts.weights_bytes + 1)
    least = int(str(refused.value).split(" bytes), with")[0].split("(")[-1])
    found = plan_of(least)
    assert found.chosen.bytes.total_bytes <= least
    assert found.settings.batch_size == 1
    json.dumps(found.to_json())


def test_a_plan_makes_its_engine():
    target = toy.model(num_layers=3)
    draft = jaxspec.random_model(DRAFT, dtype="float32", kernels="xla")
    found = plan_memory(
        target,
        draft,
        GIB,
        batch=2,
        context=200,
        search=dataclasses.replace(SMALL, draft_lengths=(2,)),
        dtype="float32",
        compiles="short",
    )
    assert found.settings.draft_length == 2
    parts = found.chosen.bytes.parts
    drafter = DraftModel(draft, **found.settings.options_of("drafter"))
    engine = Engine.from_plan(found, target, drafter, max_queue=3)
    assert (engine.shape.batch_size, engine.shape.max_length) == (2, found.settings.max_length)
    assert engine.draft_length == 2
    assert engine.max_queue == 3
    assert engine.memory.state_bytes == parts.state_bytes
    assert engine.memory.weights_bytes == parts.weights_bytes
    [done] = engine.generate([[1, 2, 3]], jaxspec.SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(done.token_ids) == 5
    with pytest.raises(SettingError, match="no drafter was given"):
        Engine.from_plan(found, target)
    other = dataclasses.replace(
        found,
        chosen=dataclasses.replace(
            found.chosen, settings=dataclasses.replace(found.settings, num_model_shards=4)
        ),
    )
    with pytest.raises(SettingError, match="for 4 devices, and JAX has 1"):
        Engine.from_plan(other, target, drafter)
    for line in ("jaxspec.load_model", "jaxspec.DraftModel", "draft_length=2"):
        assert line in found.code


def test_a_plan_for_another_device_says_so(recwarn):
    search = dataclasses.replace(SMALL, draft_lengths=(0,))
    options = {"batch": 2, "context": 100, "search": search, "compiles": "short"}
    target = toy.model(num_layers=1, dtype="float32")

    def said(plan):
        errors.warn_once.cache_clear()
        recwarn.clear()
        for _ in range(2):
            Engine.from_plan(plan, target)
        return [str(each.message) for each in recwarn if each.category is JaxspecWarning]

    elsewhere = plan_memory(target.config, None, GIB, device="h200", **options)
    assert (elsewhere.device, elsewhere.platform) == ("h200", "gpu")
    assert any("on this machine (cpu) may take more" in remark for remark in elsewhere.remarks)
    [sentence] = said(elsewhere)
    assert sentence.startswith(
        "The plan is for gpu (h200), and its engine runs on cpu, and has the target in bfloat16, "
        "and it was loaded in float32: the engine may take more than the planned "
    )
    here = plan_memory(target, None, GIB, device="h200", **options)
    assert here.platform == "cpu"
    assert said(here) == []
    assert elsewhere.to_json()["platform"] == "gpu"


@pytest.mark.parametrize(("dtype", "is_tied"), [("bfloat16", True), ("float32", False)])
def test_a_plan_takes_what_its_engine_takes(dtype, is_tied):
    """To the byte, temporaries and packed weights too: one counter, with the kernels that run."""
    target = toy.model(num_layers=1, dtype=dtype, is_tied=is_tied, kernels=default_kernels())
    search = Search(draft_lengths=(2,), prefill_chunks=(32,), kv_dtypes=(None,))
    options = {"batch": 4, "context": 100, "search": search, "scheduler": "static"}
    found = plan_memory(target, None, GIB, drafter="ngram", keep=1.0, **options)
    engine = Engine.from_plan(found, target, "ngram")
    total = found.chosen.bytes.total_bytes
    assert bytes_of(engine.executor.loop).to_json() == found.chosen.bytes.to_json()
    assert engine.memory.weights_bytes == num_bytes(target.params)
    # What the plan says is enough for an engine, and a byte less is not.
    shape = {**found.engine_options, "batch_size": 9}
    assert Engine(target, "ngram", budget_bytes=total, **shape).shape.batch_size == 4
    assert Engine(target, "ngram", budget_bytes=total - 1, **shape).shape.batch_size == 3


@pytest.mark.system
def test_no_plan_takes_less_than_the_smallest_that_works(monkeypatch):
    """With estimates that are far too low for some programs and far too high for others."""
    target = toy.model(num_layers=2, kernels=default_kernels())
    search = dataclasses.replace(SMALL, draft_lengths=(0, 2, 3))
    options = {"batch": 4, "context": 300, "search": search, "drafter": "ngram"}
    real = planned_bytes.LoopBytes.compiled

    def compiled(self, settings, compiles):
        added, programs = real(self, settings, "short")
        return added * (1 + 8 * (settings.prefill_chunk == 128)), programs

    monkeypatch.setattr(planned_bytes.LoopBytes, "compiled", compiled)
    with pytest.raises(SettingError, match="the smallest that works is") as refused:
        plan_memory(target, None, num_bytes(target.params) + 1, **options)
    least = int(str(refused.value).split(" bytes), with")[0].split("(")[-1])
    assert "batch 1, max_length 384, no drafter, chunks of 32" in str(refused.value)
    assert plan_memory(target, None, least, **options).chosen.bytes.total_bytes == least
    for budget in (least - 1, least - 10**5):
        with pytest.raises(SettingError, match=rf"the smallest that works is .*\({least} bytes"):
            plan_memory(target, None, budget, **options)
    for budget in (int(1.1 * least), 5 * least):
        found = plan_memory(target, None, budget, keep=1.0, **options)
        assert least <= found.chosen.bytes.total_bytes <= budget


def test_what_is_loaded_is_planned_for_this_machine():
    loaded = make_planner(toy.model(num_layers=1, kernels=default_kernels())).request
    assert loaded.is_here
    assert not make_planner().request.is_here
    assert make_planner(**HERE).request.is_here
    named = dataclasses.replace(describe(TARGET), dtype_here="bfloat16")
    for device, dtype_here, dtype in (
        (HERE, "bfloat16", "bfloat16"),
        (HERE, None, "float32"),
        ({}, "float32", "bfloat16"),
    ):
        target = dataclasses.replace(named, dtype_here=dtype_here)
        request = make_planner(target=TARGET, **device, given_dtype=None).request
        assert dataclasses.replace(request, target=target).dtype == dtype
    # XLA on a CPU would turn bfloat16 weights into float32 ones for another device's programs.
    ngram = make_planner(draft=None, given_dtype="bfloat16")
    request = dataclasses.replace(ngram.request, drafter=jaxspec.NGram())
    programs = planned_bytes.LoopBytes(request=request, say=print)
    assert programs._programs_dtype == "float32"


def test_bad_input_is_refused():
    with pytest.raises(SettingError, match="budget_bytes 0"):
        plan_of(0)
    with pytest.raises(SettingError, match=r"keep 1\.5"):
        plan_of(GIB, keep=1.5)
    with pytest.raises(SettingError, match="300 prompt tokens"):
        plan_of(GIB, prompt_tokens=300)
    with pytest.raises(SettingError, match="nothing to choose from"):
        plan_of(GIB, search=Search(draft_lengths=()))
    with pytest.raises(SettingError, match="--device abacus"):
        plan_of(GIB, device="abacus")
    with pytest.raises(SettingError, match=r"weights alone take .* in float32; bfloat16 takes"):
        plan_memory("vicuna-7b", None, 20 * 10**9, dtype="float32")
    with pytest.raises(SettingError, match=r"in bfloat16; 8-bit weights, .* model of 2 devices"):
        plan_memory("vicuna-7b", None, 10 * 10**9, dtype="bfloat16")


def test_verifiers_that_need_q_cost_its_bytes():
    each = settings(draft_length=3)
    for verifier, num_drafts in ((Coupled(), 0), (Rejection(), 3)):
        made = make_planner(verifier=verifier)
        parts = measure_parts(made.bytes.loop(each))
        assert parts.draft_probs_bytes == each.batch_size * num_drafts * TARGET.vocab_size * 4
        assert ("draft_probs_bytes" in made.bytes.formulas(each)) == (num_drafts > 0)


# ---------------------------------------------------------------------------------------- meshes


def test_a_model_axis_splits_the_target_and_leaves_a_small_draft_whole():
    made = make_planner("llama-2-70b", "vicuna-68m", given_dtype="bfloat16", mesh=(1, 8))
    whole = settings(max_length=4096, draft_dtype="bfloat16")
    split = dataclasses.replace(whole, num_model_shards=8)
    one, each = (measure_parts(made.bytes.loop(one)) for one in (whole, split))
    assert each.target_kv_bytes == pytest.approx(one.target_kv_bytes / 8, rel=1e-3)
    assert each.target_weights_bytes == pytest.approx(one.target_weights_bytes / 8, rel=1e-2)
    assert each.draft_weights_bytes == one.draft_weights_bytes  # 12 heads: replicated
    assert each.draft_kv_bytes == one.draft_kv_bytes


def test_an_axis_that_does_not_fit_is_refused_with_those_that_do():
    with pytest.raises(SettingError, match=r"8 KV heads.*Up to 16 devices, 1, 2, 4, 8 work"):
        plan_memory("llama-2-70b", "vicuna-68m", GIB, mesh=(1, 16))
    assert model_axes(PRESETS["glm-4-9b"], 8) == [1, 2]
    assert make_planner("llama-2-70b", None, num_devices=8).request.meshes == [
        (8, 1),
        (4, 2),
        (2, 4),
        (1, 8),
    ]


def test_batches_double():
    assert list(doubling(1)) == [1]
    assert list(doubling(6)) == [1, 2, 4, 6]
    assert list(doubling(8)) == [1, 2, 4, 8]


def test_ten_rows_are_predicted_to_bring_what_the_paper_measured():
    """SpecMemo reports 8x at batch 10; on Qwen3-8B's shape at 0.8 the bar is 6x."""
    made = make_planner(
        "qwen3-8b",
        "qwen3-0.6b",
        context=1024,
        prompt_tokens=512,
        acceptance=0.8,
        given_dtype="bfloat16",
    )
    one, ten = (
        max(
            made.speed.tokens_per_s(
                settings(batch_size=rows, draft_length=length, draft_dtype="bfloat16")
            )[1]
            for length in range(1, 9)
        )
        for rows in (1, 10)
    )
    assert 6 <= ten / one < 10


def test_the_planner_allocates_no_weights(monkeypatch):
    """Not one array of a model's size is made for a preset."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were made")

    monkeypatch.setattr(jaxspec.models.decoder, "init_params", refuse)
    before = live_bytes()
    made = make_planner("qwen3-8b", "qwen3-0.6b", given_dtype="bfloat16")
    measure_parts(made.bytes.loop(settings(draft_dtype="bfloat16")))
    assert live_bytes() - before < 2**20


def test_knobs_name_arguments_that_exist():
    owners = {
        "engine": EngineConfig,
        "draft": jaxspec.load_model,
        "target": jaxspec.load_model,
        "drafter": DraftModel,
    }
    for field, knob in plan.KNOBS.items():
        assert field in {each.name for each in dataclasses.fields(PlanSettings)}
        assert knob.argument in inspect.signature(owners[knob.owner]).parameters
        option = (knob.option or "--target").removeprefix("--").replace("-", "_")
        assert option in {each.name for each in dataclasses.fields(GenerateCommand)}


# --------------------------------------------------------------------- drafters without a model


NODES = Search(draft_lengths=(0, 3, 8), prefill_chunks=(32,), kv_dtypes=(None,))
BY_NODE = (0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)


def plan_with(drafter, **changes):
    options = {
        "batch": 2,
        "context": 200,
        "dtype": "float32",
        "search": NODES,
        "scheduler": "static",
        "compiles": "short",
        **changes,
    }
    return plan_memory(toy.model(num_layers=3), None, GIB, drafter=drafter, **options)


@pytest.mark.parametrize("name", ["ngram", '{"kind": "ngram", "branches": 2}', "clover2"])
def test_drafters_without_a_draft_model_are_planned_as_they_are(name):
    """To the byte what their engine takes."""
    drafter = name
    if name == "clover2":
        drafter = heads.random_heads(
            "clover2", toy.model(num_layers=3), tree=StaticTree(choices=((0,), (1,), (0, 0)))
        )
    search = dataclasses.replace(NODES, draft_lengths=(3,))
    found = plan_with(drafter, acceptance=BY_NODE, search=search)
    assert found.settings.draft_length == 3
    assert str(found.drafter) in found.code
    engine = Engine.from_plan(found, toy.model(num_layers=3), drafter)
    parts = found.chosen.bytes.parts
    assert engine.memory.state_bytes == parts.state_bytes
    assert engine.memory.weights_bytes == parts.weights_bytes
    [done] = engine.generate([[1, 2, 3]], jaxspec.SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(done.token_ids) == 5
    json.dumps(found.to_json())


BEAM = BeamTree(width=2, depth=3, nodes=6)


def draft_model(tree=BEAM, **options):
    draft = jaxspec.random_model(DRAFT, dtype="float32", kernels="xla")
    return DraftModel(draft, tree=tree, **options)


def check_whole(found, target, drafter):
    """State and weights of the engine to the byte; compiled programs within 5 % of the estimate."""
    engine = Engine.from_plan(found, target, drafter)
    parts = found.chosen.bytes.parts
    assert engine.memory.state_bytes == parts.state_bytes
    assert engine.memory.weights_bytes == parts.weights_bytes
    before = live_bytes()
    assert num_bytes(engine.executor.state) == parts.state_bytes
    assert live_bytes() - before == parts.state_bytes
    [done] = engine.generate([[1, 2, 3]], jaxspec.SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(done.token_ids) == 5
    compiled = bytes_of(engine.executor.loop)
    assert found.chosen.bytes.total_bytes == pytest.approx(compiled.total_bytes, rel=0.05)


@pytest.mark.system
@pytest.mark.parametrize("options", [{}, {"kv_window": 128}, {"kv_dtype": "int8"}], ids=str)
def test_trees_of_a_draft_model_are_planned(options, monkeypatch):
    """With the draft cache's extra slots, in a window for all nodes and in one for fewer."""
    monkeypatch.setattr(planned_bytes, "default_kernels", lambda: "xla")
    target = toy.model(num_layers=3)
    for length in (6, 4, 2):
        search = dataclasses.replace(NODES, draft_lengths=(length,))
        found = plan_with(draft_model(**options), acceptance=BY_NODE, search=search, context=300)
        assert found.settings.draft_length == length
        assert "tree=jaxspec.BeamTree(width=2, depth=3, nodes=6)" in found.code
        check_whole(found, target, draft_model(**options))
        json.dumps(found.to_json())
    with pytest.raises(SettingError, match="The plan has tree="):
        Engine.from_plan(found, target, draft_model(tree=None, **options))


@pytest.mark.system
@pytest.mark.parametrize("mode", ["auto", "parallel", "sequential"])
@pytest.mark.parametrize("batch", [1, 4])
def test_flexdraft_is_planned_with_its_scratch_slots(mode, batch, monkeypatch):
    monkeypatch.setattr(planned_bytes, "default_kernels", lambda: "xla")
    target = flex.target(kernels="xla")
    drafter = flex.random_flex(target, mode=mode, block_size=16)
    search = dataclasses.replace(NODES, draft_lengths=(15,))
    found = plan_memory(
        target,
        None,
        GIB,
        drafter=drafter,
        batch=batch,
        context=100,
        dtype="float32",
        search=search,
        scheduler="static",
        compiles="short",
        device="a100",
    )
    check_whole(found, target, drafter)
    is_parallel = mode == "parallel" or (mode == "auto" and found.settings.batch_size <= 2)
    num_slots = found.settings.max_length + (256 if is_parallel else 128)
    assert f"x {num_slots} slots" in found.formulas["target_kv_bytes"]


def test_nodes_are_searched_over_the_windows():
    request = dataclasses.replace(make_planner().request, search=Search())
    assert request.draft_lengths == tuple(range(9))
    trees = dataclasses.replace(request, draft_options={"tree": BeamTree()})
    assert trees.draft_lengths == (0, 2, 4, 8, 12)
    drafter = find_drafter("flexdraft", describe(TARGET), "float32")
    assert drafter.name == "flexdraft[auto]:WEIGHTS"
    flexible = dataclasses.replace(request, draft=None, drafter=drafter)
    assert flexible.draft_lengths == (0, 2, 4, 8, 15)


def test_a_tree_costs_one_pass_per_level():
    def tokens_per_s(tree):
        options = {} if tree is None else {"tree": tree}
        made = make_planner(acceptance=BY_NODE, draft_options=options)
        return made.speed.tokens_per_s(settings(draft_length=6))[1]

    deep, shallow = BeamTree(width=2, depth=6, nodes=6), BeamTree(width=4, depth=2, nodes=6)
    assert tokens_per_s(None) == pytest.approx(tokens_per_s(deep), rel=0.02)
    assert tokens_per_s(shallow) > 1.2 * tokens_per_s(deep)


def test_a_tree_is_as_large_as_its_nodes_are_worth():
    """More nodes emit more, and cost more; without any gain from them, none are drafted."""
    ngram = {"kind": "ngram", "branches": 4}
    rich = plan_with(ngram, acceptance=BY_NODE, keep=1.0)
    poor = plan_with(ngram, acceptance=(1e-6,) * 8, keep=1.0)
    assert rich.settings.draft_length > 0 == poor.settings.draft_length
    assert repr(json.dumps(ngram)) in rich.code


def test_heads_are_predicted_to_cost_what_is_read_for_them():
    request = dataclasses.replace(make_planner(draft=None).request, acceptance=0.7)
    each = settings(draft_length=3, draft_dtype=None)

    def tokens_per_s(drafter):
        planned = dataclasses.replace(request, drafter=drafter)
        return Planner(request=planned, say=lambda stage: None).speed.tokens_per_s(each)[1]

    chain = heads.random_heads("medusa", toy.model(num_layers=3), tree="chain")
    assert 0 < tokens_per_s(chain) < tokens_per_s(jaxspec.NGram())


def test_drafters_that_cannot_be_planned_are_refused():
    with pytest.raises(SettingError, match="Both a draft model and a drafter"):
        plan_memory(TARGET, DRAFT, GIB, drafter="ngram")
    with pytest.raises(SettingError, match=r"acceptance of 0\.7 was given for the tree of ngram"):
        plan_with({"kind": "ngram", "branches": 4})
    with pytest.raises(SettingError, match=r"acceptance of 0\.7 was given for the tree of draft_m"):
        plan_with({"model": "random:llama-65m", "tree": BEAM.name})
    with pytest.raises(SettingError, match="The drafter none was given"):
        plan_with("none")
