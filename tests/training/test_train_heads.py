"""`train_heads`: whole runs on a small target and texts of its own."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from written import write_texts

from jaxspec.drafters.trees import StaticTree
from jaxspec.engine.engine import Engine
from jaxspec.errors import CheckpointError, JaxspecError, ModelError, SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.load.drafters import load_drafter
from jaxspec.load.models import load_model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.training import head_accuracy, runs
from jaxspec.training.heads import HeadsTrainConfig, train_heads
from jaxspec.training.texts import Text


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny.save(tmp_path_factory.mktemp("models"), "target", text=tiny.tokenizer()))


@pytest.fixture(scope="module")
def texts(tmp_path_factory, target):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", target)


def config(out, target, texts, **overrides):
    settings = {
        "kind": "clover",
        "num_heads": 2,
        "tokens": 64 * 12,
        "batch_tokens": 64,
        "sequence_length": 32,
        "learning_rate": 2e-2,
        "log_every": 4,
        "evaluate_every": 6,
        "evaluate_texts": 2,
        "checkpoint_every": 4,
        "tree_nodes": (2,),
    }
    return HeadsTrainConfig(target=target, texts=texts, out=out, **(settings | overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target, texts):
    """An uninterrupted run: its directory, its result, and the loss of every step."""
    out = tmp_path_factory.mktemp("run") / "whole"
    losses = []
    result = train_heads(config(out, target, texts), on_step=lambda _, m: losses.append(m["loss"]))
    return out, result, losses


def params_of(out, target):
    return [
        np.asarray(leaf) for leaf in jax.tree.leaves(load_drafter(out / "heads", target).params)
    ]


def test_a_run_learns_and_says_what_it_measured(trained):
    out, result, losses = trained
    assert result["steps"] == len(losses) == 12
    assert result["tokens"] == 64 * 12
    assert losses[-1] < losses[0] - 0.5
    assert set(result["held_out"]) == {"all", "tales", "sums"}
    measured = result["held_out"]["all"]
    assert len(measured["top1"]) == len(measured["top5"]) == 2
    assert np.asarray(measured["acceptance"]).shape == (2, 10)
    assert StaticTree(tuple(map(tuple, result["trees"]["2"]))).max_depth <= 2
    assert json.loads((out / "result.json").read_text()) == result
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == [4, 8, 12]


def test_resumed_run_is_bit_equal_to_uninterrupted_one(tmp_path, target, texts, trained):
    class InterruptedError(Exception):
        pass

    def interrupt(step, _):
        if step == 6:  # after the checkpoint of step 4, so steps 5 and 6 are done again
            raise InterruptedError

    part = config(tmp_path / "part", target, texts)
    with pytest.raises(InterruptedError):
        train_heads(part, on_step=interrupt)
    steps = []
    train_heads(dataclasses.replace(part, resume=True), on_step=lambda n, _: steps.append(n))
    assert steps == list(range(5, 13))
    whole, resumed = params_of(trained[0], target), params_of(part.out, target)
    assert all((a == b).all() for a, b in zip(whole, resumed, strict=True))
    # Sabotage: rows in another order are noticed.
    other = config(tmp_path / "other", target, texts, seed=1)
    train_heads(other)
    pairs = zip(whole, params_of(other.out, target), strict=True)
    assert any((a != b).any() for a, b in pairs)


def test_mistakes_are_named(tmp_path, target, texts, trained):
    def train(**overrides):
        out = overrides.pop("out", tmp_path / "out")
        train_heads(config(out, target, overrides.pop("texts", texts), **overrides))

    def written(name, **options):
        return write_texts(tmp_path / name, target, **options)

    occupied = tmp_path / "occupied"
    (occupied / "heads").mkdir(parents=True)
    (occupied / "heads" / "notes").write_text("mine")
    cases = [
        (SettingError, "positive", lambda: train(tokens=0)),
        (SettingError, "less than one step", lambda: train(tokens=1)),
        (SettingError, "one step of 4096", lambda: train(sequence_length=4096)),
        (SettingError, "which has no layers", lambda: train(block="none", num_layers=2)),
        (SettingError, "which has none", lambda: train(connection="mlp", gate="cosine")),
        (
            SettingError,
            "connection was given for medusa",
            lambda: train(kind="medusa", connection="mlp"),
        ),
        (SettingError, "own_heads was given for clover", lambda: train(own_heads=True)),
        (SettingError, "format vllm was given for clover", lambda: train(format="vllm")),
        (SettingError, "at least one node", lambda: train(tree_nodes=(0,))),
        (
            ModelError,
            "written by somebody",
            lambda: train(texts=written("a", target="somebody", weights="0")),
        ),
        (ModelError, "None of the 60 texts", lambda: train(texts=written("b", num_output=1))),
        (ModelError, "There is one text", lambda: train(texts=written("c", num_texts=1))),
        (SettingError, "documents to train on", lambda: train(held_out=texts)),
        (CheckpointError, "nothing to resume", lambda: train(resume=True)),
        (CheckpointError, "already holds a run", lambda: train(out=trained[0])),
        (CheckpointError, "heads exists, and the trained", lambda: train(out=occupied)),
        (
            CheckpointError,
            "learning_rate",
            lambda: train(out=trained[0], resume=True, learning_rate=1.0),
        ),
        (
            CheckpointError,
            "other values of texts",
            lambda: train(out=trained[0], resume=True, texts=written("d", num_texts=59)),
        ),
    ]
    for error, words, mistake in cases:
        with pytest.raises(error, match=words) as caught:
            mistake()
        assert isinstance(caught.value, JaxspecError)
        assert "\n" not in str(caught.value)

    with pytest.raises(SettingError, match=r"The loss became (nan|inf) at step \d; lower"):
        train(out=tmp_path / "nan", learning_rate=1e30)
    assert not (tmp_path / "nan" / runs.CHECKPOINT).exists()


def test_texts_that_are_too_short_are_skipped_and_counted(tmp_path, target, texts):
    short = write_texts(tmp_path / "short", target, num_texts=3, num_output=1)
    mixed = tmp_path / "mixed"
    mixed.write_text(texts.read_text() + "".join(short.read_text().splitlines(keepends=True)[1:]))
    held_out = write_texts(tmp_path / "held_out", target, num_texts=5, split="held-out")
    given = config(tmp_path / "out", target, mixed, held_out=held_out, tokens=64, kind="medusa")
    result = train_heads(given)
    assert (result["num_texts"], result["num_skipped_texts"]) == (60, 3)
    # Each of the five texts has 12 labels for the first head.
    assert result["held_out"]["all"]["num_tokens"][0] == 60


@pytest.mark.system
def test_rounds_on_texts_are_those_of_the_engine(target, trained):
    """So the accuracy of training is that of drafting, at every position that a round begins at."""
    model = load_model(target)
    prompts = [[2 + (11 * i + 5 * j) % 200 for j in range(4 + i)] for i in range(6)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    tree = StaticTree(((0,), (1,), (0, 0), (2,), (1, 0), (0, 1)))

    def decoded(chosen):
        drafter = load_drafter(trained[0] / "heads", model, tree=chosen)
        engine = Engine(model, drafter, batch_size=2, max_length=128, draft_length=len(nodes))
        done = engine.generate(prompts, params)
        texts = [Text("any", "any", list(d.prompt_token_ids), list(d.token_ids)) for d in done]
        return texts, [d.acceptance.num_rounds for d in done]

    def rounds(ranked, nodes):
        return [len(head_accuracy._walk([text], nodes)) for text in ranked]

    config = load_drafter(trained[0] / "heads", model).config
    for chosen, nodes in (("chain", {(0,), (0, 0)}), (tree, {*tree.choices})):
        texts, of_engine = decoded(chosen)
        heads = unpacked(load_drafter(trained[0] / "heads", model).params)
        pair = (model.config, unpacked(model.params))
        ranked = head_accuracy.rank_texts(config, heads, pair, texts, 64)
        assert rounds(ranked, nodes) == of_engine
        assert sum(of_engine) < 6 * 40 - 10  # something was accepted
        # Sabotage: without the augmenting block.
        wrong = heads | {"layers": jax.tree.map(np.zeros_like, heads["layers"])}
        other = head_accuracy.rank_texts(config, wrong, pair, texts, 64)
        assert rounds(other, nodes) != of_engine
