"""Damaged Hugging Face checkpoints are refused in one sentence, or load as what they say."""

from __future__ import annotations

import contextlib
import shutil

import hf_checkpoints
import jax
import numpy as np
import pytest
from attack import hf_damage, outcomes
from attack.outcomes import Outcome, Tally

from jaxspec.checkpoint.format import load_converted
from jaxspec.convert import convert
from jaxspec.errors import PromptError
from jaxspec.models.base import LanguageModel


def _convert_and_load(directory) -> LanguageModel:
    convert(directory / "hf", directory / "out", progress=False)
    return load_converted(directory / "out")


def _problem(model: LanguageModel) -> str | None:
    """What of a model that was loaded is no possible model: a damaged file may be a good one that
    says something else, but it may not say what cannot be computed."""
    frequencies, scale = model.config.rope.inverse_frequencies()
    if not (np.isfinite(frequencies).all() and np.isfinite(scale) and (frequencies > 0).all()):
        return f"rotary frequencies {frequencies}, scale {scale}"
    if not all(type(eos) is int and 0 <= eos < model.vocab_size for eos in model.eos_token_ids):
        return f"stop tokens {model.eos_token_ids}"
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(model.params)):
        return "weights that are no numbers"
    if model.tokenizer is None:
        return "no tokenizer"
    ids = model.tokenizer.encode("hello")
    if not all(type(token) is int and token >= 0 for token in ids):
        return f"token ids {ids}"
    with contextlib.suppress(PromptError):  # of a damaged chat template
        model.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    return None


def _attempt(root, seed: int) -> tuple[str, Outcome]:
    directory = root / str(seed)
    directory.mkdir()
    name = hf_damage.checkpoint(directory / "hf", seed)
    outcome = outcomes.of_call(lambda: _convert_and_load(directory), problem=_problem)
    if outcome.kind == "refused" and sorted(path.name for path in directory.iterdir()) != ["hf"]:
        outcome = Outcome("failed", f"left {sorted(path.name for path in directory.iterdir())}")
    shutil.rmtree(directory)
    return name, outcome


def _attack(root, seeds: range, record_property) -> Tally:
    tally = Tally(f"damaged HF checkpoints, seeds {seeds.start} to {seeds.stop - 1}")
    for seed in seeds:
        tally.add(*_attempt(root, seed))
    tally.finish(record_property)
    return tally


def test_some_checkpoints(tmp_path, record_property):
    tally = _attack(tmp_path, range(50), record_property)
    # The damage is real, and does not hit everything.
    assert tally.counts["refused"] > 25
    assert tally.counts["unchanged"] > 5


@pytest.mark.slow
def test_many_checkpoints(tmp_path, record_property):
    _attack(tmp_path, range(50, 2500), record_property)


@pytest.mark.parametrize("family", hf_damage.FAMILIES)
def test_without_damage(family, tmp_path):
    hf_damage.undamaged(tmp_path / "hf", family, num_shards=3)
    model = _convert_and_load(tmp_path)
    assert _problem(model) is None
    assert model.eos_token_ids == (1, hf_checkpoints.golden_config(family)["vocab_size"] - 1)
