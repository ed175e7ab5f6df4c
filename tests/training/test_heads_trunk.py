"""Heads of several token counts from one run: `train_heads` with trunk and branches."""

from __future__ import annotations

import dataclasses
import json

import pytest
from training.test_train_heads import config, params_of, target, texts  # noqa: F401  fixtures
from training.test_trunk import Stopped, are_equal, stop_after

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.training.heads import train_heads, train_step

BRANCHES = (384, 768, 1536)  # 6, 12 and 24 steps of 64 tokens, 1, 2 and 4 of them decay


def trunk_config(out, target, texts, **overrides):  # noqa: F811
    settings = {"schedule": "trunk", "branches": BRANCHES, "warmup_steps": 3, "kind": "hydra"}
    return config(out, target, texts, **(settings | overrides))


def branch_params(out, tokens, target):  # noqa: F811
    return params_of(out / "branches" / str(tokens), target)


@pytest.fixture(scope="module")
def grown(tmp_path_factory, target, texts):  # noqa: F811
    """A trunk with all branches: its directory, its result, and the number of compiled steps as
    it went on."""
    out = tmp_path_factory.mktemp("run") / "trunk"
    programs = []
    given = trunk_config(out, target, texts, clip_value=0.5)
    result = train_heads(given, on_step=lambda *_: programs.append(train_step._cache_size()))
    return out, result, programs


def test_branches_are_finished_heads(grown, target):  # noqa: F811
    out, result, programs = grown
    assert list(result["branches"]) == ["384", "768", "1536"]
    for tokens, steps in zip(BRANCHES, (6, 12, 24), strict=True):
        own = result["branches"][str(tokens)]
        assert (own["tokens"], own["steps"]) == (tokens, steps)
        assert own == json.loads((out / "branches" / str(tokens) / "result.json").read_text())
        assert own["heads"] == str(out / "branches" / str(tokens) / "heads")
        assert sum(leaf.size for leaf in branch_params(out, tokens, target)) == own["num_params"]
    losses = [own["train_loss"] for own in result["branches"].values()]
    shares = [own["held_out"]["all"]["top1"][0] for own in result["branches"].values()]
    assert losses[0] > losses[1] > losses[2]
    assert shares[0] < shares[2]
    # The trunk's 20 steps, and the decays'.
    assert (result["steps"], result["tokens"]) == (27, 27 * 64)
    # The first state is not yet bound to a device; no branch needs another program.
    assert programs[1:] == [programs[1]] * 26
    assert not (out / "heads").exists()


def test_a_branch_is_bit_equal_to_a_run_with_this_branch_alone(tmp_path, target, texts, grown):  # noqa: F811
    settings = {"branches": (768,), "clip_value": 0.5}
    alone = trunk_config(tmp_path / "alone", target, texts, **settings)
    train_heads(alone)
    whole = branch_params(grown[0], 768, target)
    assert are_equal(branch_params(alone.out, 768, target), whole)
    # Sabotage: another end, and with it a decay that begins later, is noticed.
    late = dataclasses.replace(alone, out=tmp_path / "late", branches=(832,))
    train_heads(late)
    assert not are_equal(branch_params(late.out, 832, target), whole)


# In the trunk before a checkpoint, in a decay, in the trunk after a branch, in the last decay.
@pytest.mark.parametrize("number", [3, 12, 16, 26])
def test_a_trunk_is_resumed_to_the_bit(tmp_path, target, texts, grown, number):  # noqa: F811
    settings = {"checkpoint_every": 2, "clip_value": 0.5}
    part = trunk_config(tmp_path / "part", target, texts, **settings)
    with pytest.raises(Stopped):
        train_heads(part, on_step=stop_after(number))
    result = train_heads(dataclasses.replace(part, resume=True))
    for tokens in BRANCHES:
        params = branch_params(part.out, tokens, target)
        assert are_equal(params, branch_params(grown[0], tokens, target))
        mine, whole = (each["branches"][str(tokens)] for each in (result, grown[1]))
        for name in mine.keys() - {"heads", "wall_s"}:
            assert mine[name] == whole[name]


def test_later_branches_are_added_to_a_finished_trunk(tmp_path, target, texts, grown):  # noqa: F811
    settings = {"branches": (384, 768), "clip_value": 0.5}
    first = trunk_config(tmp_path / "run", target, texts, **settings)
    train_heads(first)
    before = (first.out / "branches" / "384" / "checkpoint.msgpack").read_bytes()
    train_heads(dataclasses.replace(first, branches=BRANCHES, resume=True))
    mine, whole = (branch_params(out, 1536, target) for out in (first.out, grown[0]))
    assert are_equal(mine, whole)
    assert (first.out / "branches" / "384" / "checkpoint.msgpack").read_bytes() == before
    with pytest.raises(SettingError, match="has taken 20 steps, and a branch of 640 tokens"):
        train_heads(dataclasses.replace(first, branches=(640,), resume=True))


def test_mistakes_are_named(tmp_path, target, texts, grown):  # noqa: F811
    def train(**overrides):
        out = overrides.pop("out", tmp_path / "out")
        train_heads(trunk_config(out, target, texts, clip_value=0.5, **overrides))

    occupied = tmp_path / "occupied"
    (occupied / "branches" / "768" / "heads").mkdir(parents=True)
    (occupied / "branches" / "768" / "heads" / "notes").write_text("mine")
    cases = [
        (SettingError, "0 branches", lambda: train(branches=())),
        (SettingError, "3 branches", lambda: train(schedule="cosine")),
        (SettingError, "give tokens that increase", lambda: train(branches=(768, 384))),
        (SettingError, "at least 256 tokens", lambda: train(branches=(128, 768))),
        (CheckpointError, "heads exists, and the trained", lambda: train(out=occupied)),
        (CheckpointError, "already holds a run", lambda: train(out=grown[0])),
        (
            CheckpointError,
            "other values of warmup_steps",
            lambda: train(out=grown[0], resume=True, warmup_steps=4),
        ),
        (
            CheckpointError,
            "other values of tokens, warmup_fraction",
            lambda: train(out=grown[0], resume=True, schedule="cosine", branches=()),
        ),
    ]
    for error, words, mistake in cases:
        with pytest.raises(error, match=words):
            mistake()
