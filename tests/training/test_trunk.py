"""Trunk and branches: one run for many token counts, on the corpus of `test_training`."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from training.test_training import leaves_of, tiny, write_corpus

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.training import data, lm, schedule, trainer

pytestmark = pytest.mark.as_shipped

BRANCHES = (768, 1536, 3072)  # 6, 12 and 24 steps of 128 tokens, 1, 2 and 4 of them decay


class Stopped(Exception):
    pass


def tiny_trunk(out, corpora, **overrides):
    settings = {"branches": BRANCHES, "long_fraction": 0.0}
    return tiny(out, corpora, **(settings | overrides))


def stop_after(number):
    """An `on_step` that ends the run at its step with this number, counted over all parts."""
    steps = []

    def on_step(step, _):
        steps.append(step)
        if len(steps) == number:
            raise Stopped

    return on_step


def branch_leaves(out, tokens):
    return leaves_of(lm.load_run(out / "branches" / str(tokens)))


def files_of(directory):
    """The files in a directory: their bytes by name."""
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def are_equal(some, others):
    return all((a == b).all() for a, b in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, corpora):
    out = tmp_path_factory.mktemp("run") / "teacher"
    lm.train_lm(tiny(out, corpora))
    return out


@pytest.fixture(scope="module")
def grown(tmp_path_factory, corpora, teacher):
    """A trunk distilled from `teacher` with all branches: its directory and its result."""
    out = tmp_path_factory.mktemp("run") / "trunk"
    return out, lm.train_lm(tiny_trunk(out, corpora, teacher=str(teacher), seed=1))


def test_branches_are_finished_models(grown):
    out, result = grown
    assert list(result["branches"]) == ["768", "1536", "3072"]
    for tokens, steps in zip(BRANCHES, (6, 12, 24), strict=True):
        own = result["branches"][str(tokens)]
        assert (own["tokens"], own["steps"]) == (tokens, steps)
        assert own == json.loads((out / "branches" / str(tokens) / "result.json").read_text())
        model = lm.load_teacher(own["model"])  # what was exported is what was trained
        assert model.config == lm.load_run(out / "branches" / str(tokens)).config
    losses = [np.mean(list(own["held_out_loss"].values())) for own in result["branches"].values()]
    overlaps = [own["acceptance"]["tales"]["sampled"] for own in result["branches"].values()]
    assert losses[0] > losses[1] > losses[2]
    assert overlaps[0] < overlaps[2]
    # The trunk's 20 steps, and the decays'.
    assert result["steps"] == 20 + 1 + 2 + 4
    assert result["tokens"] == 27 * 128


def test_a_branch_is_bit_equal_to_a_run_with_this_branch_alone(tmp_path, corpora, teacher, grown):
    alone = tiny_trunk(tmp_path / "alone", corpora, teacher=str(teacher), seed=1, branches=(1536,))
    lm.train_lm(alone)
    assert are_equal(branch_leaves(alone.out, 1536), branch_leaves(grown[0], 1536))
    # Sabotage: a decay that begins a step later, or another order of rows, is noticed.
    late = dataclasses.replace(alone, out=tmp_path / "late", branches=(1664,))
    lm.train_lm(late)
    assert not are_equal(branch_leaves(late.out, 1664), branch_leaves(grown[0], 1536))
    other = dataclasses.replace(alone, out=tmp_path / "other", domains=("tales", "sums"))
    lm.train_lm(other)
    assert not are_equal(branch_leaves(other.out, 1536), branch_leaves(grown[0], 1536))


# In the trunk before a checkpoint, in a decay, in the trunk after a branch, in the last decay.
@pytest.mark.parametrize("number", [3, 12, 16, 26])
def test_a_trunk_is_resumed_to_the_bit(tmp_path, corpora, teacher, grown, number):
    config = tiny_trunk(tmp_path / "part", corpora, teacher=str(teacher), seed=1)
    config = dataclasses.replace(config, checkpoint_every=2)
    with pytest.raises(Stopped):
        lm.train_lm(config, on_step=stop_after(number))
    result = lm.train_lm(dataclasses.replace(config, resume=True))
    for tokens in BRANCHES:
        assert are_equal(branch_leaves(config.out, tokens), branch_leaves(grown[0], tokens))
        mine, whole = (each["branches"][str(tokens)] for each in (result, grown[1]))
        for name in ("steps", "tokens", "train_loss", "held_out_loss", "acceptance"):
            assert mine[name] == whole[name]


def test_later_branches_are_added_to_a_finished_trunk(tmp_path, corpora, teacher, grown):
    config = tiny_trunk(tmp_path / "t", corpora, teacher=str(teacher), seed=1, branches=(768, 1536))
    lm.train_lm(config)
    before = files_of(config.out / "branches" / "768" / "checkpoints")
    lm.train_lm(dataclasses.replace(config, branches=BRANCHES, resume=True))
    assert are_equal(branch_leaves(config.out, 3072), branch_leaves(grown[0], 3072))
    assert files_of(config.out / "branches" / "768" / "checkpoints") == before
    with pytest.raises(SettingError, match="has taken 20 steps, and a branch of 1280 tokens"):
        lm.train_lm(dataclasses.replace(config, branches=(1280,), resume=True))


def test_states_from_a_file_change_no_bit(tmp_path, corpora, teacher, grown):
    states = tmp_path / "states" / "seed1.f32"
    settings = {"teacher": str(teacher), "seed": 1, "teacher_states": states}
    config = tiny_trunk(tmp_path / "a", corpora, **settings)
    with pytest.raises(Stopped):
        lm.train_lm(config, on_step=stop_after(9))
    content = states.read_bytes()
    assert len(content) == 8 * 128 * 16 * 4  # the branch's row is the trunk's next
    states.write_bytes(content[:-100])  # cut off in a crash
    lm.train_lm(dataclasses.replace(config, resume=True))
    assert are_equal(branch_leaves(config.out, 3072), branch_leaves(grown[0], 3072))
    assert states.read_bytes()[: len(content)] == content
    wide = dataclasses.replace(config, out=tmp_path / "b", width=32)
    known = states.stat().st_mtime_ns
    lm.train_lm(wide)
    assert states.stat().st_mtime_ns == known, "a model of another size computed them again"
    with pytest.raises(CheckpointError, match="hidden states of another teacher or of other rows"):
        lm.train_lm(dataclasses.replace(wide, out=tmp_path / "c", seed=2))
    # Sabotage: states that are not the teacher's are noticed.
    flipped = np.frombuffer(states.read_bytes(), np.float32) * np.float32(1.01)
    states.write_bytes(flipped.tobytes())
    again = dataclasses.replace(config, out=tmp_path / "d")
    lm.train_lm(again)
    assert not are_equal(branch_leaves(again.out, 3072), branch_leaves(grown[0], 3072))


def test_rates_of_trunk_and_branch():
    [branch] = schedule.plan_branches((1000,), step_tokens=10, warmup_steps=10)
    assert (branch.num_steps, branch.leaves_at) == (100, 83)
    settings = {"learning_rate": 2.0, "warmup_steps": 10}
    on_trunk = np.array([schedule.rate_at(i, branch=None, **settings) for i in range(100)])
    on_branch = np.array([schedule.rate_at(i, branch=branch, **settings) for i in range(100)])
    np.testing.assert_allclose(on_trunk[:10], 2.0 * np.arange(1, 11) / 10)
    assert (on_trunk[10:] == 2.0).all()
    assert (on_branch[:83] == on_trunk[:83]).all()
    np.testing.assert_allclose(on_branch[-1], 0.2)
    np.testing.assert_allclose(np.diff(on_branch[82:]), -1.8 / 17)


def test_rows_of_a_plan_do_not_depend_on_its_end():
    settings = {"num_rows": 3, "length": 8}
    long = data.plan_rows((100, 300), (1.0, 2.0), num_steps=60, seed=(4,), **settings)
    short = data.plan_rows((100, 300), (1.0, 2.0), num_steps=25, seed=(4,), **settings)
    other = data.plan_rows((100, 300), (1.0, 2.0), num_steps=25, seed=(5,), **settings)
    assert (long.stream[:25] == short.stream).all()
    assert (long.start[:25] == short.start).all()
    assert (other.start != short.start).any()


def test_mistakes_are_named(tmp_path, corpora, grown):
    def train(**overrides):
        lm.train_lm(tiny_trunk(tmp_path / "out", corpora, **overrides))

    cases = [
        ("give tokens that increase", lambda: train(branches=(1536, 768))),
        ("give tokens that increase", lambda: train(branches=(768, 780))),
        ("at least 512 tokens", lambda: train(branches=(256, 768))),
        ("without a teacher", lambda: train(teacher_states=tmp_path / "s")),
    ]
    for words, mistake in cases:
        with pytest.raises(SettingError, match=words):
            mistake()
    out = tmp_path / "other"
    shutil.copytree(grown[0], out)
    with pytest.raises(CheckpointError, match="other values of teacher_checksum, tokens"):
        lm.train_lm(tiny_trunk(out, corpora, seed=1, branches=(), resume=True))


def test_the_step_is_compiled_once_for_trunk_and_branches(tmp_path, corpora):
    jax.clear_caches()
    lm.train_lm(tiny_trunk(tmp_path / "out", corpora))
    assert trainer.train_step._cache_size() == 1
