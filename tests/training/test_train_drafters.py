"""`train_heads` and `train_flexdraft`: whole runs on a small target and texts of its own."""

from __future__ import annotations

import collections
import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny
from training.test_trainer import Stopped, stop_after
from training.test_training import are_equal
from written import write_texts

import jaxspec
from jaxspec.drafters.trees import StaticTree
from jaxspec.engine.engine import Engine
from jaxspec.errors import CheckpointError, JaxspecError, ModelError, SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.load.drafters import load_drafter
from jaxspec.load.models import load_model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.locks import only_writer
from jaxspec.training import head_accuracy
from jaxspec.training.flexdraft import FlexTrainConfig, train_flexdraft
from jaxspec.training.heads import HeadsTrainConfig, train_heads
from jaxspec.training.text_passes import TextPasses
from jaxspec.training.texts import Text, held_out_part, read_texts
from jaxspec.training.trainer import train_step

NAMES = ("heads", "flexdraft")
BRANCHES = (384, 768, 1536)  # 6, 12 and 24 steps of 64 tokens, 1, 2 and 4 of them decay


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny.save(tmp_path_factory.mktemp("models"), "target", text=tiny.tokenizer()))


@pytest.fixture(scope="module")
def texts(tmp_path_factory, target):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", target)


def config(name, out, target, texts, **overrides):
    settings = {
        "tokens": 64 * 12,
        "batch_tokens": 64,
        "sequence_length": 32,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "checkpoint_every": 4,
    }
    if name == "heads":
        cls, settings = HeadsTrainConfig, settings | {"kind": "clover", "num_heads": 2}
    else:
        sizes = {"layers": 1, "block": 4, "rank": 8, "anchors": 6}
        cls, settings = FlexTrainConfig, settings | sizes | {"new_learning_rate": 3e-2}
    return cls(target=target, texts=texts, out=out, **(settings | overrides))


def train(settings, **how):
    is_heads = isinstance(settings, HeadsTrainConfig)
    return (train_heads if is_heads else train_flexdraft)(settings, **how)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target, texts):
    """Uninterrupted runs: of each the directory, the result, and the loss of every step."""
    found = {}
    for name in NAMES:
        out, losses = tmp_path_factory.mktemp("run") / "whole", []
        settings = config(name, out, target, texts)
        result = train(settings, on_step=lambda _, m, losses=losses: losses.append(m["loss"]))
        found[name] = out, result, losses
    return found


def params_of(directory, target):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_drafter(directory, target).params)]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_learns_and_says_what_it_measured(trained, target, name):
    out, result, losses = trained[name]
    assert result["steps"] == len(losses) == 12
    assert result["tokens"] == 64 * 12
    assert losses[-1] < losses[0] - 0.5
    assert set(result["held_out"]) == {"all", "tales", "sums"}
    assert json.loads((out / "result.json").read_text()) == result
    [line] = (out / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 12
    leaves = params_of(out / name, target)
    assert sum(leaf.size for leaf in leaves) == result["num_params"]
    measured = result["held_out"]["all"]
    if name == "heads":
        assert len(measured["top1"]) == len(measured["top5"]) == 2
        assert np.asarray(measured["acceptance"]).shape == (2, 10)
        assert StaticTree(tuple(map(tuple, result["trees"]["4"]))).max_depth <= 2
    else:
        of_slots = ("top1", "uncalibrated_top1", "num_tokens")
        assert [len(measured[each]) for each in of_slots] == [3, 4, 4]
        assert 0 <= measured["accepted"] <= 3
        drafter = load_drafter(out / name, target)
        assert (drafter.config.num_deep_layers, drafter.config.block_size) == (1, 4)


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_is_bit_equal_to_uninterrupted_one(tmp_path, target, texts, trained, name):
    part = config(name, tmp_path / "part", target, texts)
    with pytest.raises(Stopped):
        train(part, on_step=stop_after(6))  # after the checkpoint of step 4: two are done again
    steps = []
    train(dataclasses.replace(part, resume=True), on_step=lambda n, _: steps.append(n))
    assert steps == list(range(5, 13))
    whole = params_of(trained[name][0] / name, target)
    assert are_equal(whole, params_of(part.out / name, target))
    # Sabotage: rows (and anchors) in another order are noticed.
    other = dataclasses.replace(part, out=tmp_path / "other", seed=1)
    train(other)
    assert not are_equal(whole, params_of(other.out / name, target))


def test_the_targets_states_are_computed_once(tmp_path, target, texts, monkeypatch):
    calls = []
    read = TextPasses.__call__
    monkeypatch.setattr(TextPasses, "__call__", lambda *args: calls.append(1) or read(*args))

    def losses_of(settings, **how):
        losses = []
        before = len(calls)
        train(dataclasses.replace(settings, **how), on_step=lambda _, m: losses.append(m["loss"]))
        return losses, len(calls) - before

    states = tmp_path / "deep" / "states"
    data, index = states / "states.bf16", states / "index.txt"
    settings = config("heads", tmp_path / "run", target, texts, target_states=states)
    settings = dataclasses.replace(settings, tokens=64 * 60)  # about two passes over the texts
    with pytest.raises(Stopped):
        train(settings, on_step=stop_after(50))
    assert 20 < len(calls) < 45
    kept = data.read_bytes()
    assert losses_of(settings, resume=True)[1] == 0, "a text that had been read was read again"
    assert data.read_bytes() == kept
    # Another run, of another kind, finds them too; without them, only rounding differs.
    other = dataclasses.replace(settings, out=tmp_path / "other", kind="hydra", tokens=64 * 12)
    found, num_calls = losses_of(other)
    assert num_calls == 0
    alone, _ = losses_of(other, out=tmp_path / "alone", target_states=None)
    np.testing.assert_allclose(found, alone, rtol=2e-3)
    # So does one of other texts, of those that are the same: here all but the first two thirds.
    lines = texts.read_text().splitlines(keepends=True)
    changed = tmp_path / "changed.jsonl"
    longer = [json.loads(line) for line in lines[1:41]]
    longer = [{**text, "prompt": [9, *text["prompt"]]} for text in longer]
    parts = [lines[0], *(json.dumps(text) + "\n" for text in longer), *lines[41:]]
    changed.write_text("".join(parts))
    _, num_calls = losses_of(other, out=tmp_path / "changed", texts=changed)
    assert 0 < num_calls <= 12
    assert data.read_bytes()[: len(kept)] == kept
    again, num_calls = losses_of(other, out=tmp_path / "again")
    assert (again, num_calls) == (found, 0)
    # What a crash cut off is computed again.
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:20]) + "0123")
    again, num_calls = losses_of(other, out=tmp_path / "cut")
    assert num_calls > 0
    np.testing.assert_allclose(again, found, rtol=2e-3)
    # Sabotage: states that are not the target's are noticed.
    data.write_bytes(np.frombuffer(data.read_bytes(), np.uint16)[::-1].tobytes())
    wrong, _ = losses_of(other, out=tmp_path / "wrong")
    assert np.max(np.abs(np.subtract(found, wrong))) > 2e-2


def test_states_of_others_are_refused_and_kept(tmp_path, target, texts):
    states = tmp_path / "states"
    settings = config("heads", tmp_path / "run", target, texts, target_states=states)
    train(settings)
    other = dataclasses.replace(settings, out=tmp_path / "other")
    with only_writer(states), pytest.raises(SettingError, match="states"):
        train(other)
    about, data = states / "about.json", states / "states.bf16"
    kept = data.read_bytes()
    about.write_text(about.read_text().replace('"width": 32', '"width": 31'))
    with pytest.raises(
        CheckpointError, match="of another target, or of another layer or dtype; remove"
    ):
        train(other)
    about.unlink()
    with pytest.raises(CheckpointError, match=r"and no about.json that says what"):
        train(other)
    assert data.read_bytes() == kept
    data.unlink()  # as the error says; the index stays
    train(other)
    assert data.read_bytes() == kept
    data.write_bytes(kept[: len(kept) // 2])
    train(dataclasses.replace(settings, out=tmp_path / "third"))
    assert data.read_bytes() == kept
    with pytest.raises(SettingError, match="Nothing can be written into"):
        train(dataclasses.replace(other, target_states=texts))


def test_flexdraft_reads_states_below_its_layers(tmp_path):
    model = tiny.model(text=tiny.tokenizer())
    deeper = dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, num_layers=2),
        params={**model.params, "layers": 2 * tuple(model.params["layers"])},
    )
    jaxspec.save_model(deeper, tmp_path / "target")
    target = str(tmp_path / "target")
    texts = write_texts(tmp_path / "texts.jsonl", target)

    def losses_of(name, **how):
        losses = []
        settings = config("flexdraft", tmp_path / name, target, texts, **how)
        train(settings, on_step=lambda _, m: losses.append(m["loss"]))
        return losses

    states = tmp_path / "states"
    kept, alone = losses_of("kept", target_states=states), losses_of("alone")
    assert json.loads((states / "about.json").read_text())["num_layers"] == 1
    np.testing.assert_allclose(kept, alone, rtol=2e-3)
    with pytest.raises(CheckpointError, match="of another layer or dtype; remove it"):
        train(config("heads", tmp_path / "heads", target, texts, target_states=states))
    # Without layers below there is nothing to keep.
    losses_of("whole", layers=2, target_states=tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("clover", {"block_part": "attention"}),
        ("medusa", {"shares_head": False}),
        pytest.param("medusa", {}, marks=pytest.mark.slow),
        pytest.param("hydra", {"shares_head": False}, marks=pytest.mark.slow),
    ],
)
def test_heads_learn_to_draft_some_tokens(tmp_path, target, texts, kind, parts):
    given = {"kind": kind, "parts": parts, "draft_vocab_size": 24}
    settings = config("heads", tmp_path / "run", target, texts, **given)
    losses = []
    result = train(settings, on_step=lambda _, m: losses.append(m["loss"]))
    assert losses[-1] < losses[0] - 0.5
    drafter = load_drafter(tmp_path / "run" / "heads", target)
    assert drafter.config.num_head_tokens == 24
    assert result["num_params"] == sum(leaf.size for leaf in jax.tree.leaves(drafter.params)) - 24
    tokens = np.asarray(drafter.params["token_map"])
    training, _ = held_out_part(read_texts(texts).texts, texts)
    written = collections.Counter(token for text in training for token in text.output)
    least = min(written[token] for token in tokens.tolist())
    assert len(set(tokens.tolist())) == 24
    assert all(count <= least for token, count in written.items() if token not in tokens)
    # Of the other tokens none can be right.
    share = sum(count for token, count in written.items() if token in tokens) / written.total()
    assert 0 < result["held_out"]["all"]["top1"][0] < share + 0.05


@pytest.mark.slow
def test_clover2_learns_what_its_target_says(tmp_path):
    # Clover-2 learns the target's distribution, so the target must prefer some tokens, and have
    # written the texts.
    model = tiny.model(text=tiny.tokenizer())
    params = {**model.params, "final_norm": 3 * model.params["final_norm"]}
    jaxspec.save_model(dataclasses.replace(model, params=params), tmp_path / "target")
    target = str(tmp_path / "target")
    texts = write_texts(tmp_path / "texts.jsonl", target)
    header, *lines = map(json.loads, texts.read_text().splitlines())
    engine = Engine(target, "none", batch_size=20, max_length=64)
    sampling = {"max_tokens": 12, "ignore_eos": True}
    outputs = engine.generate([text["prompt"] for text in lines], sampling)
    for text, output in zip(lines, outputs, strict=True):
        text["output"] = list(output.token_ids)
    written = collections.Counter(token for text in lines for token in text["output"])
    for path, split in ((texts, "train"), (tmp_path / "same.jsonl", "held-out")):
        made = [header | {"split": split}, *lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in made))
    given = {"kind": "clover2", "tokens": 64 * 96, "held_out": tmp_path / "same.jsonl"}
    result = train(config("heads", tmp_path / "run", target, texts, **given))
    commonest = max(written.values()) / written.total()
    assert result["held_out"]["all"]["top1"][0] > 1.5 * commonest


@pytest.mark.parametrize("name", NAMES)
def test_mistakes_are_named(tmp_path, target, texts, trained, name):
    def run(**overrides):
        out = overrides.pop("out", tmp_path / "out")
        train(config(name, out, target, overrides.pop("texts", texts), **overrides))

    def written(file, **options):
        return write_texts(tmp_path / file, target, **options)

    whole, occupied = trained[name][0], tmp_path / "occupied"
    (occupied / name).mkdir(parents=True)
    (occupied / name / "notes").write_text("mine")
    cases = [
        (SettingError, "has 0 steps of 4096", lambda: run(sequence_length=4096)),
        (
            ModelError,
            "written by somebody",
            lambda: run(texts=written("a", target="somebody", weights="0")),
        ),
        (ModelError, "Of the 1 usable texts", lambda: run(texts=written("c", num_texts=1))),
        (SettingError, "documents to train on", lambda: run(held_out=texts)),
        (CheckpointError, f"{name} exists, and what is trained", lambda: run(out=occupied)),
        (
            CheckpointError,
            "other values of texts",
            lambda: run(out=whole, resume=True, texts=written("d", num_texts=59)),
        ),
    ]
    cases += (
        [
            (SettingError, "leave one", lambda: run(parts={"block": None}, num_layers=2)),
            (SettingError, "parts has own_heads; give", lambda: run(parts={"own_heads": True})),
            (ModelError, "shares_head is False", lambda: run(parts={"shares_head": False})),
            (ModelError, "num_layers is 2", lambda: run(kind="hydra", num_layers=2)),
            (SettingError, "and the target has 258 tokens", lambda: run(draft_vocab_size=259)),
            (ModelError, "None of the 60 texts", lambda: run(texts=written("b", num_output=0))),
        ]
        if name == "heads"
        else [
            (SettingError, "so give one number", lambda: run(tokens=(384, 768))),
            (SettingError, "anchors is 0", lambda: run(anchors=0)),
            (SettingError, "block is 1; its first", lambda: run(block=1)),
            (ModelError, "num_deep_layers is 9", lambda: run(layers=9)),
            (
                ModelError,
                "None of the 60 texts in .* has enough tokens",
                lambda: run(texts=written("b", num_output=0)),
            ),
            (
                CheckpointError,
                "other values of anchors",
                lambda: run(out=whole, resume=True, anchors=5),
            ),
        ]
    )
    for error, words, mistake in cases:
        with pytest.raises(error, match=words) as caught:
            mistake()
        assert isinstance(caught.value, JaxspecError)
        assert "\n" not in str(caught.value)


def test_several_sets_of_heads_from_one_run(tmp_path, target, texts):
    """Interrupted in a decay; one of them beside a run with it alone."""
    programs = []
    settings = {"tokens": BRANCHES, "kind": "hydra", "parts": {"shares_head": False}}
    grown = config("heads", tmp_path / "trunk", target, texts, **settings)
    with pytest.raises(Stopped):
        train(grown, on_step=stop_after(12))
    result = train(
        dataclasses.replace(grown, resume=True),
        on_step=lambda *_: programs.append(train_step._cache_size()),
    )
    assert list(result["branches"]) == ["384", "768", "1536"]
    for tokens, steps in zip(BRANCHES, (6, 12, 24), strict=True):
        own, out = result["branches"][str(tokens)], grown.out / "branches" / str(tokens)
        assert (own["tokens"], own["steps"]) == (tokens, steps)
        assert own == json.loads((out / "result.json").read_text())
        assert own["heads"] == str(out / "heads")
        assert sum(leaf.size for leaf in params_of(out / "heads", target)) == own["num_params"]
    losses = [own["train_loss"] for own in result["branches"].values()]
    assert losses[0] > losses[1] > losses[2]
    assert (result["steps"], result["tokens"]) == (27, 27 * 64)  # the trunk's 20, and the decays'
    assert programs == programs[:1] * len(programs)  # no branch needs another program
    assert not (grown.out / "heads").exists()
    alone = dataclasses.replace(grown, out=tmp_path / "alone", tokens=768)
    train(alone)
    shorter, same = (
        params_of(grown.out / "branches" / tokens / "heads", target) for tokens in ("384", "768")
    )
    assert are_equal(params_of(alone.out / "heads", target), same)
    assert not are_equal(shorter, same)


def test_texts_that_are_too_short_are_skipped_and_counted(tmp_path, target, texts):
    short = write_texts(tmp_path / "short", target, num_texts=3, num_output=0)
    mixed = tmp_path / "mixed"
    mixed.write_text(texts.read_text() + "".join(short.read_text().splitlines(keepends=True)[1:]))
    held_out = write_texts(
        tmp_path / "held_out", target, num_texts=5, num_output=13, split="held-out"
    )
    given = config("heads", tmp_path / "out", target, mixed, held_out=held_out, kind="medusa")
    result = train(given)
    assert (result["num_texts"], result["num_skipped_texts"]) == (60, 3)
    # Each of the five texts has 13 labels for the first head.
    assert result["held_out"]["all"]["num_tokens"][0] == 65
    with pytest.raises(SettingError, match="were written to measure on"):
        train(dataclasses.replace(given, out=tmp_path / "other", texts=held_out))
    same = write_texts(tmp_path / "same", target, num_texts=5, split="held-out")
    with pytest.raises(SettingError, match=r"same are in .* too"):
        train(dataclasses.replace(given, out=tmp_path / "other", held_out=same))


@pytest.mark.slow
def test_rounds_on_texts_are_those_of_the_engine(target, trained):
    """So the accuracy of training is that of drafting, at every position that a round begins at."""
    model = load_model(target)
    prompts = [[2 + (11 * i + 5 * j) % 200 for j in range(4 + i)] for i in range(6)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    tree = StaticTree(((0,), (1,), (0, 0), (2,), (1, 0), (0, 1)))

    def decoded(chosen):
        drafter = load_drafter(trained["heads"][0] / "heads", model, tree=chosen)
        engine = Engine(model, drafter, batch_size=2, max_length=128, draft_length=len(nodes))
        done = engine.generate(prompts, params)
        texts = [Text("any", "any", list(d.prompt_token_ids), list(d.token_ids)) for d in done]
        return texts, [d.acceptance.num_rounds for d in done]

    def rounds(ranked, nodes):
        return [len(head_accuracy._walk([text], nodes)) for text in ranked]

    config = load_drafter(trained["heads"][0] / "heads", model).config
    for chosen, nodes in (("chain", {(0,), (0, 0)}), (tree, {*tree.choices})):
        texts, of_engine = decoded(chosen)
        heads = unpacked(load_drafter(trained["heads"][0] / "heads", model).params)
        pair = (model.config, unpacked(model.params))
        ranked = head_accuracy.rank_texts(config, heads, pair, texts, 64)
        assert rounds(ranked, nodes) == of_engine
        assert sum(of_engine) < 6 * 40 - 10  # something was accepted
        # Sabotage: without the augmenting block.
        wrong = heads | {"layers": jax.tree.map(np.zeros_like, heads["layers"])}
        other = head_accuracy.rank_texts(config, wrong, pair, texts, 64)
        assert rounds(other, nodes) != of_engine
