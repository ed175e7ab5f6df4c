"""`train_flexdraft`: whole runs on a small target and texts of its own."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from written import write_texts

from jaxspec.errors import CheckpointError, JaxspecError, ModelError, SettingError
from jaxspec.load.drafters import load_drafter
from jaxspec.training.flexdraft import FlexTrainConfig, train_flexdraft


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny.save(tmp_path_factory.mktemp("models"), "target", text=tiny.tokenizer()))


@pytest.fixture(scope="module")
def texts(tmp_path_factory, target):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", target)


def config(out, target, texts, **overrides):
    settings = {
        "layers": 1,
        "block": 4,
        "rank": 8,
        "anchors": 6,
        "tokens": 64 * 12,
        "batch_tokens": 64,
        "sequence_length": 32,
        "learning_rate": 1e-2,
        "new_learning_rate": 3e-2,
        "log_every": 4,
        "evaluate_every": 6,
        "evaluate_texts": 2,
        "checkpoint_every": 4,
    }
    return FlexTrainConfig(target=target, texts=texts, out=out, **(settings | overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target, texts):
    """An uninterrupted run: its directory, its result, and the loss of every step."""
    out = tmp_path_factory.mktemp("run") / "whole"
    losses = []
    result = train_flexdraft(
        config(out, target, texts), on_step=lambda _, metrics: losses.append(metrics["loss"])
    )
    return out, result, losses


def params_of(out, target):
    drafter = load_drafter(out / "flexdraft", target, kind="flexdraft")
    return [np.asarray(leaf) for leaf in jax.tree.leaves(drafter.params)]


def test_a_run_learns_and_says_what_it_measured(trained, target):
    out, result, losses = trained
    assert result["steps"] == len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert set(result["held_out"]) == {"all", "tales", "sums"}
    measured = result["held_out"]["all"]
    assert [len(measured[name]) for name in ("top1", "uncalibrated_top1", "num_tokens")] == [
        3,
        4,
        4,
    ]
    assert 0 <= measured["accepted"] <= 3
    assert json.loads((out / "result.json").read_text()) == result
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [4, 8, 12]
    drafter = load_drafter(out / "flexdraft", target)
    assert (drafter.config.num_deep_layers, drafter.config.block_size) == (1, 4)
    assert sum(leaf.size for leaf in params_of(out, target)) == result["num_params"]


def test_resumed_run_is_bit_equal_to_uninterrupted_one(tmp_path, target, texts, trained):
    class InterruptedError(Exception):
        pass

    def interrupt(step, _):
        if step == 6:  # after the checkpoint of step 4, so steps 5 and 6 are done again
            raise InterruptedError

    part = config(tmp_path / "part", target, texts)
    with pytest.raises(InterruptedError):
        train_flexdraft(part, on_step=interrupt)
    steps = []
    train_flexdraft(dataclasses.replace(part, resume=True), on_step=lambda n, _: steps.append(n))
    assert steps == list(range(5, 13))
    whole, resumed = params_of(trained[0], target), params_of(part.out, target)
    assert all((a == b).all() for a, b in zip(whole, resumed, strict=True))
    # Sabotage: rows and anchors in another order are noticed.
    other = config(tmp_path / "other", target, texts, seed=1)
    train_flexdraft(other)
    pairs = zip(whole, params_of(other.out, target), strict=True)
    assert any((a != b).any() for a, b in pairs)


def test_mistakes_are_named(tmp_path, target, texts, trained):
    def train(**overrides):
        out = overrides.pop("out", tmp_path / "out")
        train_flexdraft(config(out, target, overrides.pop("texts", texts), **overrides))

    def written(name, **options):
        return write_texts(tmp_path / name, target, **options)

    occupied = tmp_path / "occupied"
    (occupied / "flexdraft").mkdir(parents=True)
    cases = [
        (SettingError, "anchors is 0", lambda: train(anchors=0)),
        (SettingError, "block is 1; its first", lambda: train(block=1)),
        (SettingError, "less than one step", lambda: train(tokens=1)),
        (ModelError, "num_deep_layers is 9", lambda: train(layers=9)),
        (
            ModelError,
            "written by somebody",
            lambda: train(texts=written("a", target="somebody", weights="0")),
        ),
        (
            ModelError,
            "None of the 60 texts in .* has a token",
            lambda: train(texts=written("b", num_output=0)),
        ),
        (CheckpointError, "nothing to resume", lambda: train(resume=True)),
        (CheckpointError, "already holds a run", lambda: train(out=trained[0])),
        (CheckpointError, "flexdraft exists, and the trained", lambda: train(out=occupied)),
        (
            CheckpointError,
            "other values of anchors",
            lambda: train(out=trained[0], resume=True, anchors=5),
        ),
    ]
    for error, words, mistake in cases:
        with pytest.raises(error, match=words) as caught:
            mistake()
        assert isinstance(caught.value, JaxspecError)
        assert "\n" not in str(caught.value)
