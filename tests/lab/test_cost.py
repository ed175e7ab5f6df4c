"""The cost model: its arithmetic, its fit, and the best draft length."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import toy

from jaxspec.errors import SettingError
from jaxspec.lab.cost import model as cost
from jaxspec.lab.cost.devices import DEVICES, Device, fit_device, is_held_out
from jaxspec.lab.cost.passes import Pass
from jaxspec.models.decoder import num_params
from jaxspec.models.registry import PRESETS

TARGET, DRAFT = PRESETS["qwen3-8b"], PRESETS["qwen3-0.6b"]
DEVICE = Device(
    name="made up",
    bytes_per_s=2e12,
    kv_bytes_per_s=1e12,
    flops_per_s=3e14,
    step_s=5e-6,
    round_s=3e-5,
    source="invented",
)
PAIR = cost.Pair(target=TARGET, target_device=DEVICE, draft=DRAFT, draft_device=DEVICE)


def grid(config):
    for batch, window, context in itertools.product((1, 8, 64), (1, 4, 16), (128, 4096)):
        yield Pass(config=config, batch=batch, window=window, context=context, block=512)


@pytest.mark.parametrize("name", list(PRESETS))
def test_products_are_all_parameters_but_embedding_and_vectors(name):
    config = PRESETS[name]
    work = Pass(config=config, batch=1, window=1, context=1)
    matrices = work.layer_params + work.head_params
    embedding = 0 if config.is_tied else config.vocab_size * config.width
    vectors = num_params(config) - matrices - embedding
    assert 0 < vectors < 3e-4 * matrices


def test_work_of_a_pass_by_hand():
    config = toy.config()  # E 32, F 48, L 2, Q 4, K 2, H 8, V 61
    work = Pass(config=config, batch=3, window=2, context=10, itemsize=4, block=8)
    layers = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
    slots = 16  # whole blocks
    kv = 2 * 2 * 2 * 8 * 4 * (3 * slots + 6)
    assert work.kernels() == (
        (layers * 4, 2 * layers * 6),
        (32 * 61 * 4 + 2 * 4 * 6 * 61, 2 * 32 * 61 * 6),
        (kv, 4 * 6 * slots * 4 * 8 * 2),
    )
    assert work.num_steps == 2 * (1 + 2) + 1  # two blocks of 8 slots
    assert work.num_bytes == (layers + 32 * 61) * 4 + kv
    headless = dataclasses.replace(work, has_head=False)
    assert headless.kernels() == (work.kernels()[0], (0, 0), work.kernels()[2])
    assert headless.num_steps == work.num_steps - 1
    assert headless.num_bytes == layers * 4 + kv


def test_a_pass_is_bound_by_bytes_at_small_batches_and_by_products_at_large_ones():
    bare = dataclasses.replace(DEVICE, step_s=0.0)
    small, twice = (Pass(config=TARGET, batch=b, window=1, context=1) for b in (1, 2))
    assert bare.pass_s(twice) < 1.01 * bare.pass_s(small)
    large, twice = (Pass(config=TARGET, batch=b, window=8, context=1) for b in (512, 1024))
    assert bare.pass_s(twice) > 1.98 * bare.pass_s(large)


def test_a_fit_finds_the_constants_that_made_the_times():
    measured = [(work, DEVICE.pass_s(work)) for config in (TARGET, DRAFT) for work in grid(config)]
    fit = fit_to(measured)
    for name in ("bytes_per_s", "kv_bytes_per_s", "flops_per_s", "step_s"):
        assert getattr(fit.device, name) == pytest.approx(getattr(DEVICE, name), rel=1e-3), name
    assert max(fit.held_out_errors) < 1e-3
    assert len(fit.errors) + len(fit.held_out_errors) == len(measured)


def test_held_out_errors_are_of_points_that_were_not_fitted():
    works = list(grid(TARGET))
    # Sabotage: every held-out time is twice what it was. The fit must not notice, its error must.
    is_out = is_held_out(len(works))
    measured = [
        (work, DEVICE.pass_s(work) * (2 if out else 1))
        for work, out in zip(works, is_out, strict=True)
    ]
    fit = fit_to(measured)
    assert max(fit.errors) < 1e-3
    assert fit.held_out_errors == pytest.approx([0.5] * (len(works) // 3), rel=1e-2)


def test_noisy_times_are_fitted_to_about_the_noise():
    rng = np.random.default_rng(0)
    works = [work for config in (TARGET, DRAFT) for work in grid(config)]
    noise = np.exp(rng.normal(0, 0.1, len(works)))
    measured = [
        (work, DEVICE.pass_s(work) * factor) for work, factor in zip(works, noise, strict=True)
    ]
    assert np.median(fit_to(measured).held_out_errors) < 0.15


def test_a_rate_nothing_is_known_of_stays_at_its_ceiling():
    # One row, one token, one slot: neither products nor KV take any time worth noting.
    works = [
        Pass(config=config, batch=1, window=1, context=1, itemsize=size)
        for config in PRESETS.values()
        for size in (2, 4)
    ]
    measured = [(work, DEVICE.pass_s(work)) for work in works]
    fit = fit_to(measured)
    assert fit.device.flops_per_s <= 1e15 * (1 + 1e-9)
    assert fit.device.bytes_per_s == pytest.approx(DEVICE.bytes_per_s, rel=0.05)


def fit_to(measured):
    return fit_device(
        measured, name="fit", source="test", most_bytes_per_s=5e12, most_flops_per_s=1e15
    )


def test_too_few_measurements_are_refused():
    with pytest.raises(SettingError, match="at least 6"):
        fit_to([(work, 1.0) for work in list(grid(TARGET))[:5]])


def test_emitted_per_round_is_the_sum_of_the_series():
    a, length = 0.7, 5
    expected = (1 - a ** (length + 1)) / (1 - a)
    assert cost.emitted_per_round(cost.geometric(a, length)) == pytest.approx(expected)


def test_search_equals_the_closed_form_where_its_assumptions_hold():
    """Theorem 3.8 of Leviathan et al. takes a target pass to cost the same for any window, as it
    nearly does at batch 1 and a tiny context."""
    bare = dataclasses.replace(DEVICE, step_s=0.0, round_s=0.0, flops_per_s=1e18)
    pair = dataclasses.replace(PAIR, target_device=bare, draft_device=bare)
    where = {"batch": 1, "context": 1}
    ratio = pair.draft_step_s(**where) / pair.plain_s(**where)
    for a in (0.5, 0.7, 0.8):
        closed = max(range(100), key=lambda n: (1 - a ** (n + 1)) / ((1 - a) * (n * ratio + 1)))
        length, _ = pair.best_draft_length(**where, acceptance=a)
        assert abs(length - closed) <= 1


def test_best_draft_length_is_never_worse_than_plain():
    hopeless = PAIR.best_draft_length(batch=64, context=1024, acceptance=0.05)
    assert hopeless == (0, 1.0)
    for batch, acceptance in itertools.product((1, 8, 64), (0.3, 0.6, 0.9)):
        length, gain = PAIR.best_draft_length(batch=batch, context=512, acceptance=acceptance)
        assert gain >= 1.0
        others = [
            PAIR.speed_up(batch=batch, context=512, cumulative=cost.geometric(acceptance, n))
            for n in range(1, 10)
        ]
        assert gain == pytest.approx(max([1.0, *others]), rel=1e-12) or length > 9


def test_best_draft_length_stops_where_measured_acceptance_does():
    length, _ = PAIR.best_draft_length(batch=1, context=64, acceptance=(0.99, 0.98))
    assert length == 2
    assert PAIR.best_draft_length(batch=1, context=64, acceptance=(0.9, 0.0, 0.0))[0] == 1


def test_the_first_draft_step_of_a_round_reads_two_tokens():
    where = {"batch": 4, "context": 256}
    step_s = PAIR.draft_step_s(**where)
    three, four = (PAIR.round_s(**where, draft_length=length) for length in (3, 4))
    wider_s = PAIR.target_s(**where, window=5) - PAIR.target_s(**where, window=4)
    assert four - three == pytest.approx(step_s + wider_s)
    steps_s = PAIR.draft_step_s(**where, window=2) + 2 * step_s
    rest_s = PAIR.target_s(**where, window=4) + PAIR.target_device.round_s
    assert three == pytest.approx(steps_s + rest_s)
    assert PAIR.round_s(**where, draft_length=0) == pytest.approx(PAIR.plain_s(**where))


def test_a_drafter_without_a_model_costs_what_it_was_measured_to():
    pair = dataclasses.replace(PAIR, draft=None, drafter_s=1e-3)
    free = dataclasses.replace(pair, drafter_s=0.0)
    where = {"batch": 1, "draft_length": 3, "context": 64}
    assert pair.round_s(**where) - free.round_s(**where) == pytest.approx(1e-3)


def test_devices_of_datasheets_say_that_they_were_not_measured():
    for device in DEVICES.values():
        assert "not measured" in device.source


def test_a_device_is_read_back():
    assert Device.from_json(dataclasses.asdict(DEVICE)) == DEVICE


@pytest.mark.parametrize(
    "change",
    [{"bytes_per_s": 0}, {"step_s": -1.0}, {"flops_per_s": math.inf}, {"round_s": "1"}, {}],
)
def test_a_device_with_impossible_constants_or_without_one_is_refused(change):
    fields = dataclasses.asdict(DEVICE) | change
    if not change:
        del fields["step_s"]
    with pytest.raises(SettingError, match=next(iter(change), "step_s")):
        Device.from_json(fields)
