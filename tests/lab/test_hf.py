"""Both libraries on one Hugging Face directory: the same outputs, whatever the assistance."""

from __future__ import annotations

import dataclasses
import pathlib

import hf_checkpoints
import pytest
import toy

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.errors import ModelError
from jaxspec.lab.bench.decode import DecodeBench, agreement
from jaxspec.lab.bench.hf import HuggingFace, compare, exported
from jaxspec.load.models import load_model
from jaxspec.models.config import RopeConfig
from jaxspec.requests.sampling_params import SamplingParams

pytest.importorskip("torch")

PROMPTS = [tuple(prompt) for prompt in toy.prompts([3, 9, 6])]
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    for seed, name in enumerate(("target", "draft")):
        hf_checkpoints.write(root / name, "llama", seed=seed)
    return str(root / "target"), str(root / "draft")


@pytest.fixture(scope="module")
def hf(names):
    return HuggingFace.load(*names, dtype="float32")


@pytest.fixture(scope="module")
def greedy(hf):
    return hf.greedy(PROMPTS, batch_size=1, max_new_tokens=MAX_TOKENS)


def test_outputs_have_the_length_that_was_asked_for(greedy):
    assert [len(output) for output in greedy] == [MAX_TOKENS] * 3


def test_left_padding_changes_no_output(hf, greedy):
    assert hf.greedy(PROMPTS, batch_size=3, max_new_tokens=MAX_TOKENS) == greedy


@pytest.mark.parametrize("draft_length", [None, 3])
def test_assistance_changes_no_output(hf, greedy, draft_length):
    settings = {"max_new_tokens": MAX_TOKENS, "draft_length": draft_length}
    assert hf.assisted(PROMPTS, **settings) == greedy
    assert hf.lookup(PROMPTS, **settings) == greedy


def test_a_matched_run_leaves_the_defaults_as_they_were(hf):
    before = hf.draft.generation_config.to_dict()
    hf.assisted(PROMPTS[:1], max_new_tokens=4, draft_length=3)
    assert hf.draft.generation_config.to_dict() == before


def test_a_name_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="Hugging Face directory"):
        HuggingFace.load(str(tmp_path), None, dtype="float32")


@pytest.mark.slow
def test_comparisons_pair_every_system_with_every_engine(names, hf, greedy):
    target, draft = (load_model(name, dtype="float32") for name in names)
    bench = DecodeBench(
        target=target,
        drafter=DraftModel(draft),
        prompts=PROMPTS,
        max_tokens=MAX_TOKENS,
        batch_sizes=(1, 2),
        draft_lengths=(3,),
        repeats=2,
    )
    found = compare(bench, hf)
    assisted = [
        f"hf {kind}, {how}" for kind in ("assisted", "lookup") for how in ("defaults", "matched 3")
    ]
    expected = {(1, "hf greedy"), (2, "hf greedy"), *((1, name) for name in assisted)}
    assert {(pair["batch_size"], pair["hf"]) for pair in found} == expected
    chosen = {"auto, bitwise"} if target.is_width_invariant else {"auto, bitwise", "auto, ties"}
    assert {pair["ours"] for pair in found} == {"plain", "drafted 3", "n-gram 3", *chosen}
    for pair in found:
        assert pair["num_not_ties"] == 0
        assert len(pair["ratios"]) == 2
        ratios = [a / b for a, b in zip(pair["hf_run_s"], pair["run_s"], strict=True)]
        assert pair["ratios"] == pytest.approx(ratios)
        assert min(ratios) <= pair["ratio_to_hf"] <= max(ratios)
    # Sabotage: a changed output is not waved through as a tie.
    done = bench.engine(1, 0).generate(PROMPTS, bench.params)
    wrong = [[*output] for output in greedy]
    wrong[0][2] = (wrong[0][2] + 1) % target.vocab_size
    assert agreement(target, done, greedy)[1] == 0
    assert agreement(target, done, wrong)[1] == 1
    assert dataclasses.replace(bench, least_length=300).max_length == 384


def test_a_random_model_is_written_for_transformers_to_read():
    rope = RopeConfig(theta=1e4, rotary_size=8)
    model = toy.model(family="llama", has_qk_norm=False, rope=rope)
    ours = Engine(model, batch_size=1, max_length=128)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    expected = [list(done.token_ids) for done in ours.generate(PROMPTS, params)]
    with exported(model) as directory:
        hf = HuggingFace.load(directory, None, dtype="float32")
    assert not pathlib.Path(directory).exists()
    assert hf.greedy(PROMPTS, batch_size=3, max_new_tokens=MAX_TOKENS) == expected
    scaled = dataclasses.replace(rope, scaling="linear", factor=2.0)
    refused = toy.model(family="llama", has_qk_norm=False, rope=scaled)
    with pytest.raises(ModelError, match="only qwen3 and llama"), exported(refused):
        pass
