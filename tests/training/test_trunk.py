"""Trunk and branches: one run for many token counts, on the corpus of `test_training`."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from training.test_trainer import Stopped, stop_after
from training.test_training import leaves_of, tiny, write_corpus

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.training import data, lm, trainer

pytestmark = pytest.mark.as_shipped

BRANCHES = (768, 1536, 3072)  # 6, 12 and 24 steps of 128 tokens, 1, 2 and 4 of them decay


def tiny_trunk(out, corpora, **overrides):
    settings = {"branches": BRANCHES, "long_fraction": 0.0}
    return tiny(out, corpora, **(settings | overrides))


def branch_leaves(out, tokens):
    return leaves_of(lm.load_run(out / "branches" / str(tokens)))


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


def test_states_from_a_file_change_no_bit(tmp_path, corpora, teacher, grown):
    states = tmp_path / "states" / "seed1.f32"
    with pytest.raises(SettingError, match="without a teacher"):
        tiny_trunk(tmp_path / "a", corpora, teacher_states=states)
    settings = {"teacher": str(teacher), "seed": 1, "teacher_states": states}
    config = tiny_trunk(tmp_path / "a", corpora, **settings)
    with pytest.raises(Stopped):
        lm.train_lm(config, on_step=stop_after(9))
    content = states.read_bytes()
    assert len(content) == 8 * 128 * 32 * 4  # the branch's row is the trunk's next
    states.write_bytes(content[:-100])  # cut off in a crash
    lm.train_lm(dataclasses.replace(config, resume=True))
    assert are_equal(branch_leaves(config.out, 3072), branch_leaves(grown[0], 3072))
    assert states.read_bytes()[: len(content)] == content
    wide = dataclasses.replace(config, out=tmp_path / "b", width=64)
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


def test_rows_of_a_plan_do_not_depend_on_its_end():
    settings = {"num_rows": 3, "length": 8}
    long = data.plan_rows((100, 300), (1.0, 2.0), num_steps=60, seed=(4,), **settings)
    short = data.plan_rows((100, 300), (1.0, 2.0), num_steps=25, seed=(4,), **settings)
    other = data.plan_rows((100, 300), (1.0, 2.0), num_steps=25, seed=(5,), **settings)
    assert (long.stream[:25] == short.stream).all()
    assert (long.start[:25] == short.start).all()
    assert (other.start != short.start).any()


def test_the_step_is_compiled_once_for_trunk_and_branches(tmp_path, corpora):
    jax.clear_caches()
    lm.train_lm(tiny_trunk(tmp_path / "out", corpora))
    assert trainer.train_step._cache_size() == 1
