"""Faults that are planted while decoding, on the embedded pair's target in fp32; what the audit
finds on a real model in bf16 is in docs/results/audit-sensitivity-cpu.json."""

import dataclasses
import functools

import planted
import pytest
import sensitivity

import jaxspec
from jaxspec.audit import external, noise
from jaxspec.audit.external import audit_outputs
from jaxspec.audit.scoring import Scorer
from jaxspec.engine.engine import Engine
from jaxspec.requests.prompts import encode_prompts, sample_prompts
from jaxspec.requests.sampling_params import SamplingParams

MAX_TOKENS = 32


@pytest.fixture(scope="module")
def target():
    return jaxspec.load_model("demo-target")


@pytest.fixture(scope="module")
def prompts(target):
    return encode_prompts(sample_prompts()[:6], target, max_prompt_tokens=40)


@pytest.fixture(scope="module")
def scorer(target):
    return Scorer(target, max_length=120)


@pytest.fixture(scope="module")
def files(target, prompts):
    """Outputs by fault and seed."""
    made = sensitivity.planted_files(target, prompts, MAX_TOKENS, num_seeds=1)
    return {(name, seed): outputs for name, seed, outputs in made}


def audit_of(target, prompts, scorer, outputs):
    ids = [output.token_ids for output in outputs]
    return audit_outputs(target, sensitivity.file_of(ids, prompts, "float32"), scorer=scorer)


@pytest.fixture(scope="module")
def audits(target, prompts, scorer, files):
    """The audits of the files whose fault begins like this, with their outputs."""

    @functools.cache
    def of(beginning):
        chosen = [each for (name, _), each in files.items() if name.startswith(beginning)]
        return [(audit_of(target, prompts, scorer, outputs), outputs) for outputs in chosen]

    return of


def test_nothing_planted_is_the_engines_output_and_nothing_is_found(target, prompts, files, audits):
    engine = Engine(target, batch_size=6, max_length=120)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    done = engine.generate([list(prompt) for prompt in prompts], params)
    healthy = files["nothing", 0]
    assert [output.token_ids for output in healthy] == [list(one.token_ids) for one in done]
    [(audit, _)] = audits("nothing")
    assert audit.holds
    assert audit.tie_p_value > 0.5


def test_second_best_tokens_are_found_in_every_file(audits):
    assert [audit.holds for audit, _ in audits("the second best")] == [False] * 3


@pytest.mark.parametrize("kind", ["one second-best", "a dropped", "another prompt's"])
def test_a_single_fault_is_found_in_every_output_where_rounding_is_far_away(audits, kind):
    [(audit, outputs)] = audits(kind)
    row = sensitivity.row(kind, audit, [output.is_planted for output in outputs])
    assert row["what"] == kind
    assert 5 <= row["num_clear"] <= row["num_near"]
    assert row["num_clear_found"] == row["num_clear"]


@pytest.mark.parametrize(
    "kind", ["stale KV", "positions of generated", "two tokens share", "a hole of one"]
)
def test_broken_kv_and_positions_are_found(audits, kind):
    [(audit, _)] = audits(kind)
    assert not audit.holds


def test_positions_that_are_all_shifted_change_nothing_but_rounding(audits):
    [(audit, _)] = audits("all positions")
    assert audit.holds


# Sabotages of the auditor, in bf16, where rounding is large enough to hide something.


@pytest.fixture(scope="module")
def coarse(prompts):
    """A target in bf16, its scorer, and outputs with the second best token at every gap below ten
    times the scale of the noise."""
    target = jaxspec.load_model("demo-target", dtype="bfloat16")
    made = planted.Decoder(target, prompts, MAX_TOKENS).outputs(small_gap=0.15)
    file = sensitivity.file_of([output.token_ids for output in made], prompts, "bfloat16")
    return target, Scorer(target, max_length=120), file


def test_small_gaps_are_found_in_bf16_too(coarse):
    target, scorer, file = coarse
    assert not audit_outputs(target, file, scorer=scorer).holds


def test_the_old_bound_would_miss_them(coarse, monkeypatch):
    """Twice the largest change of any logit, and no test of the number of ties."""
    target, scorer, file = coarse
    one = file.outputs[0]
    segments = scorer.segments(one.prompt_token_ids, one.token_ids, one.params)
    largest = 2 * max(float(segment.noise.max()) for segment in segments)
    monkeypatch.setattr(noise.GapNoise, "bound", property(lambda self: largest))
    monkeypatch.setattr(external, "tie_tests", lambda *args: ())
    assert audit_outputs(target, file, scorer=scorer).holds


def test_noise_that_is_ten_times_too_large_would_miss_them(coarse, monkeypatch):
    target, scorer, file = coarse
    real = external.measure_noise

    def too_wide(*args):
        found = real(*args)
        return dataclasses.replace(found, changes=10 * found.changes)

    monkeypatch.setattr(external, "measure_noise", too_wide)
    assert audit_outputs(target, file, scorer=scorer).holds
