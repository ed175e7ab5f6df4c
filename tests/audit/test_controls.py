"""Every fault is caught, its control run passes, and a fault that does nothing is not caught."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from rich.console import Console

import jaxspec
from jaxspec.audit.controls import runner as controls
from jaxspec.audit.controls.faults import FAULTS
from jaxspec.audit.controls.instrument import Fault, installed
from jaxspec.audit.scenes import TableModel
from jaxspec.errors import ModelError, SettingError

KINDS = ("tokens", "sampling", "order", "efficiency", "numerics")
OF_TOKENS = [name for name, fault in FAULTS.items() if fault.kind in KINDS]
OF_LAW = [
    pytest.param(name, marks=[pytest.mark.slow] * name.startswith(("draft_", "position_")))
    for name, fault in FAULTS.items()
    if fault.kind == "distribution"
]


def nothing(value, at):
    """An edit that changes nothing."""
    return value


# One harmless fault of every kind, each with an edit at some place of the round.
HARMLESS = [
    Fault(name=f"harmless {place}", source="", invariant="", kind=kind, edits={place: nothing})
    for kind, place in (
        ("tokens", "window"),
        ("tokens", "kv"),
        ("sampling", "rows"),
        ("order", "commit"),
        ("efficiency", "verdict"),
    )
]


def nearly(model, *, share):
    """A draft model for `model`: its parameters with some noise."""
    leaves, tree = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf + share * jnp.std(leaf) * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return dataclasses.replace(model, params=tree.unflatten(noisy), name="nearly")


@pytest.fixture(scope="module")
def pair():
    target = toy.model()
    return target, jaxspec.DraftModel(nearly(target, share=0.1))


@pytest.fixture(scope="module")
def bench(pair):
    edited = [fault for fault in FAULTS.values() if not fault.patches]
    return controls.ControlRuns(*pair, faults=[*edited, *HARMLESS])


# Whether a wrong output is right if its request is decoded alone.
NEEDS_BATCH = {
    "kv_cut_to_batch_minimum": True,
    "kv_shifted_by_one": True,
    "one_cursor_for_all_rows": True,
    "padding_attended": True,
    "padding_accumulates": True,
    "positions_not_recomputed": True,
    "bonus_from_draft": False,
    "bonus_without_kv": False,
    "rejected_tail_visible": False,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "positions_by_buffer_index"))
        for name in OF_TOKENS
    ],
)
def test_fault_is_caught_and_its_control_run_passes(bench, name):
    result = bench.run(FAULTS[name])
    assert result.control_passes, result.detail
    assert result.caught, result.detail
    if name in NEEDS_BATCH:
        assert result.needs_batch is NEEDS_BATCH[name]


@pytest.mark.parametrize("name", OF_LAW)
def test_fault_of_the_distribution_is_caught_and_its_control_run_passes(name):
    result = controls.run_distribution_control(FAULTS[name])
    assert result.control_passes, result.detail
    assert result.caught, result.detail


@pytest.mark.parametrize("fault", HARMLESS, ids=lambda fault: fault.name)
def test_a_fault_that_does_nothing_is_not_caught(bench, fault):
    result = bench.run(fault)
    assert result.control_passes
    assert not result.caught, result.detail


def test_a_distribution_fault_that_does_nothing_is_not_caught():
    patches = ((jaxspec.sampling, "round_keys", lambda real, pad_token: real),)
    fault = dataclasses.replace(FAULTS["one_stream"], patches=patches)
    result = controls.run_distribution_control(fault)
    assert result.control_passes
    assert not result.caught, result.detail


def test_the_table_holds_what_eqspec_lists():
    """Every kind is there, and each fault acts somewhere; only the numerics control is harmless."""
    assert {fault.kind for fault in FAULTS.values()} == {*KINDS, "distribution"}
    for fault in FAULTS.values():
        assert bool(fault.edits or fault.patches) == (fault.kind != "numerics")
        assert all((fault.source, fault.invariant))


def test_the_workload_lets_faults_show(bench):
    params = bench.params
    assert {p.temperature > 0 for p in params} == {True, False}
    assert sum(bool(p.stop_token_ids) for p in params) >= 3
    assert any(bench.pad_token in prompt for prompt in bench.prompts)
    with_stop_in_prompt = [
        p
        for p, prompt in zip(params, bench.prompts, strict=True)
        if set(p.stop_token_ids) & set(prompt)
    ]
    assert with_stop_in_prompt


@pytest.mark.slow
def test_a_fault_applied_alone_does_what_it_does_in_the_shared_program(bench, pair):
    fault = FAULTS["bonus_from_draft"]
    with bench._faulty(fault) as engine:
        shared = engine.generate(bench.prompts, bench.params)
    with fault.apply(pad_token=bench.pad_token):
        engine = controls._engine(*pair)
        alone = engine.generate(bench.prompts, bench.params)
    assert [c.token_ids for c in alone] == [c.token_ids for c in shared]
    # Nothing of it is left after.
    assert controls.decoder.run_layers.__module__ == "jaxspec.models.decoder"
    assert jaxspec.decode.round.commit.__qualname__ == "commit"


def test_reports_hold_every_control(bench):
    results = [bench.run(FAULTS[name]) for name in ("bonus_from_draft", "batch_expansion")]
    missed = dataclasses.replace(results[0], caught=False, control_passes=False)
    document = [result.to_json() for result in [*results, missed]]
    for entry in document:
        assert {"name", "invariant", "caught", "control_passes", "source"} <= set(entry)
    assert [entry["caught"] for entry in document] == [True, True, False]
    console = Console(width=240, file=io.StringIO(), record=True)
    console.print(controls.controls_table([*results, missed]))
    text = console.export_text()
    for word in ("bonus from draft", "caught", "passes, cost seen", "MISSED", "FAILS"):
        assert word in text
    assert "margin" in document[0]["detail"]


def test_the_distribution_of_a_scene_is_that_of_the_sampler():
    scene = controls.scene_of(FAULTS["one_stream"])
    size = scene.p.shape[0]
    distribution = scene.distribution()
    assert distribution.shape == (size,) * scene.num_tokens
    assert distribution.sum() == pytest.approx(1)
    values = dataclasses.replace(scene, num_rows=size)._sampling()
    logits = jaxspec.sampling.filtered_logits(jnp.asarray(scene.p, jnp.float32)[:, None], values)
    step = np.asarray(jax.nn.softmax(logits, axis=-1))[:, 0]
    np.testing.assert_allclose(
        distribution.sum(axis=tuple(range(1, distribution.ndim))), step[0], atol=1e-6
    )
    assert (step == 0).any(), "the filter removes nothing, so its order cannot show"


def test_bad_input_is_refused(pair):
    target, drafter = pair
    with pytest.raises(SettingError, match="no fault 'gremlins'"):
        controls.run_controls(target, drafter, names=["gremlins"])
    table = TableModel(params=jnp.zeros((2, 2)), vocab_size=2)
    with pytest.raises(ModelError, match="own decoder"):
        controls.run_controls(table, drafter)
    with pytest.raises(SettingError, match="at least 7"):
        controls.run_controls(target, drafter, names=["sorted_outputs"], prompts=[[1, 2]])
    with installed([]):
        pass


@pytest.mark.slow
def test_all_controls_on_the_embedded_pair():
    target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
    seen = []
    results = controls.run_controls(target, jaxspec.DraftModel(draft), on_progress=seen.append)
    assert seen == list(FAULTS)
    bad = [r.fault.name for r in results if not r.is_good]
    assert not bad
