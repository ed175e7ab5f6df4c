"""The trainer, with a task that takes no time: ends, resuming, branches, checkpoints, mistakes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.runtime.locks import only_writer
from jaxspec.training import checkpoints, schedule, trainer

BRANCHES = (60, 120, 240)  # 6, 12 and 24 steps of 10 tokens, 1, 2 and 4 of them decay


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineSettings(trainer.TrainSettings):
    """Of the task below."""

    noise: float = 0.1


def line_loss(params, frozen, batch):
    loss = jnp.mean((params["slope"] * batch[0] + params["offset"] - frozen * batch[1]) ** 2)
    return loss, {"loss": loss}


class LineTask(trainer.Task):
    """Fits a line; a step's points depend on its index alone."""

    PRODUCT = "line"

    def __init__(self, settings: LineSettings):
        super().__init__(settings)
        self.loss, self.frozen = line_loss, jnp.float32(1.0)
        self.optimizer = trainer.make_optimizer()
        self.about, self.fingerprint = {"line": {"size": 2}}, settings.decisive()

    @classmethod
    def may_replace(cls, product: pathlib.Path) -> bool:
        return product.is_file()

    def init_params(self, key, frozen):
        return {"slope": jax.random.normal(key, (1,)), "offset": jnp.zeros((1,)) * frozen}

    def batch(self, index, end):
        rng = np.random.default_rng((self.settings.seed, index))
        x = rng.normal(size=8).astype(np.float32)
        return x, 2 * x + 1 + np.float32(self.settings.noise) * rng.normal(size=8).astype("f4")

    def evaluate(self, params):
        return {"held_out/slope": float(params["slope"][0])}

    def export(self, params, out) -> dict[str, Any]:
        numbers = {name: leaf.tolist() for name, leaf in params.items()}
        (out / "line").write_text(json.dumps(numbers))
        return {"line": str(out / "line")}


class Stopped(Exception):
    pass


def stop_after(number):
    """An `on_step` that ends the run at its step with this number, counted over all parts."""
    steps = []

    def on_step(step, _):
        steps.append(step)
        if len(steps) == number:
            raise Stopped

    return on_step


def config(out, **overrides):
    settings = {
        "out": out,
        "tokens": 240,
        "batch_tokens": 10,
        "sequence_length": 5,
        "learning_rate": 0.1,
        "warmup_steps": 3,
        "checkpoint_every": 2,
    }
    return LineSettings(**(settings | overrides))


def train(settings, **how):
    return trainer.train(LineTask, settings, **how)


def line_of(out):
    return json.loads((out / "line").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with one end: its directory and its result."""
    out = tmp_path_factory.mktemp("run") / "whole"
    return out, train(config(out))


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A run with branches: its directory and its result."""
    out = tmp_path_factory.mktemp("run") / "grown"
    return out, train(config(out, tokens=BRANCHES))


def without_time(result, out):
    """A result without what differs between directories."""
    shown = json.loads(json.dumps(result).replace(str(out), "OUT"))
    for each in (shown, *shown.get("branches", {}).values()):
        each.pop("wall_s")
    return shown


def test_a_run_says_what_it_did(whole):
    out, result = whole
    assert (result["steps"], result["tokens"], result["num_params"]) == (24, 240, 2)
    assert json.loads((out / "result.json").read_text()) == result
    assert abs(line_of(out)["slope"][0] - 2) < abs(line_of(out)["slope"][0])
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [20, 24]
    assert checkpoints.latest_step(out) == 24


def test_metrics_of_held_out_texts_come_with_every_checkpoint(tmp_path):
    with_metrics = []

    def on_step(step, metrics):
        if "held_out/slope" in metrics:
            with_metrics.append(step)

    train(config(tmp_path / "out"), on_step=on_step)
    assert with_metrics == list(range(2, 24, 2))


@pytest.mark.parametrize("number", [1, 3, 24])
def test_a_resumed_run_is_bit_equal(tmp_path, whole, number):
    part, steps = config(tmp_path / "part"), []
    with pytest.raises(Stopped):
        train(part, on_step=stop_after(number))
    if number == 1:  # there is no checkpoint yet
        with pytest.raises(CheckpointError, match="nothing to resume"):
            train(dataclasses.replace(part, resume=True))
    resumed = dataclasses.replace(part, resume=number > 1)
    result = train(resumed, on_step=lambda step, _: steps.append(step))
    assert steps == list(range(number - number % 2 + 1, 25))
    assert line_of(part.out) == line_of(whole[0])
    assert without_time(result, part.out) == without_time(whole[1], whole[0])


INTERRUPTED = """
import os, pathlib, signal, sys, time
from training.test_trainer import config, train
from jaxspec.runtime import signals

def on_step(step, _):
    if step == 7:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)

signals.handle_signals()
signals.exit_with(lambda: bool(train(config(pathlib.Path(sys.argv[1])), on_step=on_step)))
"""


def test_the_first_interrupt_writes_a_checkpoint(tmp_path, whole):
    out, tests = tmp_path / "part", pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(out)],
        env=os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith(
        "finishing this step first; interrupt again to end at once\ninterrupted\n"
    )
    assert checkpoints.latest_step(out) == 7  # not one of every second step
    train(config(out, resume=True))
    assert line_of(out) == line_of(whole[0])


def test_a_log_has_whole_lines_and_no_step_twice(tmp_path, whole, capsys):
    part = config(tmp_path / "part", checkpoint_every=15)
    with pytest.raises(Stopped):  # the checkpoint is of step 15, and step 20 is logged
        train(part, on_step=stop_after(22))
    with (part.out / "log.jsonl").open("a") as log:
        log.write('{"step": 40, "lo')  # killed while it wrote a line
    train(dataclasses.replace(part, resume=True))
    logged = [json.loads(line) for line in (part.out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [20, 24]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"step 2[04]/24  .* tokens_per_s \S+", line) for line in lines)


def test_a_finished_run_that_is_resumed_has_its_result(tmp_path):
    first = config(tmp_path / "run", tokens=120)
    result = train(first)
    again = train(dataclasses.replace(first, resume=True))
    assert without_time(again, first.out) == without_time(result, first.out)
    assert again["wall_s"] > checkpoints.read_about(first.out)[1]["wall_s"]
    # A branch that leaves before the first step, of which there is no loss.
    short = config(tmp_path / "short", tokens=(10,), warmup_steps=0)
    train(short)
    written = [p.read_text() for p in short.out.rglob("about/*") if p.is_file()]
    assert written
    assert "NaN" not in "".join(written)


@pytest.fixture
def clock(monkeypatch):
    """A clock for the trainer; the function that it returns moves it on by a second per step."""
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(trainer, "time", types.SimpleNamespace(perf_counter=lambda: now.s))

    def on_step(_, __):
        now.s += 1.0

    return on_step


def test_a_run_of_so_many_minutes(tmp_path, clock, whole):
    """It decays when five sixths of them are over, and is the run of as many tokens."""
    timed, alone = config(tmp_path / "timed", minutes=11.9 / 60), config(tmp_path / "a", tokens=120)
    result = train(timed, on_step=clock)
    assert (result["steps"], result["tokens"], result["wall_s"]) == (12, 120, 12.0)
    train(alone, on_step=clock)
    assert line_of(timed.out) == line_of(alone.out) != line_of(whole[0])
    # The tokens end it earlier, and it takes the warm-up at least.
    slow, brief = config(tmp_path / "s", minutes=99), config(tmp_path / "b", minutes=1e-6)
    assert train(slow, on_step=clock)["steps"] == 24
    assert line_of(slow.out) == line_of(whole[0])
    assert train(brief, on_step=clock)["steps"] == 4  # of them 3 of the warm-up


# On the trunk, and in the decay, where the end is known.
@pytest.mark.parametrize(("number", "num_steps"), [(7, 25), (23, 24)])
def test_minutes_add_up_over_resumes(tmp_path, clock, number, num_steps):
    stop = stop_after(number)

    def on_step(step, metrics):
        clock(step, metrics)
        stop(step, metrics)

    timed = config(tmp_path / "timed", tokens=10_000, minutes=23.9 / 60)
    with pytest.raises(Stopped):
        train(timed, on_step=on_step)
    # At its checkpoint of step 6, five seconds were over.
    result = train(dataclasses.replace(timed, resume=True), on_step=clock)
    assert result["steps"] == num_steps
    assert result["wall_s"] == num_steps - 1
    train(config(tmp_path / "alone", tokens=result["tokens"]), on_step=clock)
    assert line_of(timed.out) == line_of(tmp_path / "alone")


def test_other_rows_are_noticed(tmp_path, whole):
    """Sabotage: of another seed, or of another noise."""
    for index, change in enumerate(({"seed": 1}, {"noise": 0.2})):
        train(config(tmp_path / str(index), **change))
        assert line_of(tmp_path / str(index)) != line_of(whole[0])


# Branches


def test_branches_are_finished_runs(grown):
    out, result = grown
    assert list(result["branches"]) == ["60", "120", "240"]
    for tokens, steps in zip(BRANCHES, (6, 12, 24), strict=True):
        own, directory = result["branches"][str(tokens)], out / "branches" / str(tokens)
        assert (own["tokens"], own["steps"]) == (tokens, steps)
        assert own == json.loads((directory / "result.json").read_text())
        assert own["line"] == str(directory / "line")
    # The trunk's 20 steps, and the decays'.
    assert (result["steps"], result["tokens"]) == (27, 270)
    assert not (out / "line").exists()


@pytest.mark.parametrize("has_branches", [True, False])
def test_a_branch_is_bit_equal_to_a_run_with_this_end_alone(tmp_path, grown, has_branches):
    alone = config(tmp_path / "alone", tokens=(120,) if has_branches else 120)
    train(alone)
    [end] = alone.ends()
    expected = line_of(grown[0] / "branches" / "120")
    assert line_of(alone.directory(end)) == expected
    # Sabotage: a decay that begins a step later is noticed.
    late = config(tmp_path / "late", tokens=(130,) if has_branches else 130)
    train(late)
    assert line_of(late.directory(late.ends()[0])) != expected


# In the trunk after a checkpoint, at the end of a decay, in one, in the trunk after a branch, at
# the end of the trunk, in the last decay.
@pytest.mark.parametrize("number", [3, 6, 12, 16, 23, 26])
def test_a_run_with_branches_is_resumed_to_the_bit(tmp_path, grown, number):
    part = config(tmp_path / "part", tokens=BRANCHES)
    with pytest.raises(Stopped):
        train(part, on_step=stop_after(number))
    result = train(dataclasses.replace(part, resume=True))
    assert without_time(result, part.out) == without_time(grown[1], grown[0])
    for tokens in BRANCHES:
        directory = pathlib.Path("branches", str(tokens))
        assert line_of(part.out / directory) == line_of(grown[0] / directory)


def files_of(directory):
    """The files in a directory: their bytes by name."""
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_later_branches_are_added_to_a_finished_run(tmp_path, grown):
    first = config(tmp_path / "run", tokens=BRANCHES[:2])
    train(first)
    before = files_of(first.out / "branches" / "60")
    train(dataclasses.replace(first, tokens=BRANCHES, resume=True))
    assert line_of(first.out / "branches" / "240") == line_of(grown[0] / "branches" / "240")
    assert files_of(first.out / "branches" / "60") == before
    with pytest.raises(SettingError, match="has taken 20 steps, and a branch of 100 tokens"):
        train(dataclasses.replace(first, tokens=(100,), resume=True))


def test_the_results_of_a_finished_run_are_read_without_its_texts(grown):
    settings = config(grown[0], tokens=BRANCHES)
    assert trainer.finished_branches(settings) == grown[1]["branches"]
    assert trainer.finished_branches(dataclasses.replace(settings, tokens=(60, 300))) is None
    with pytest.raises(CheckpointError, match="other values of noise"):
        trainer.finished_branches(dataclasses.replace(settings, noise=0.5))


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


def test_clipping_bounds_what_the_optimizer_sees():
    optimizer = trainer.make_optimizer()
    params = {"w": jnp.ones((3,))}
    with jax.numpy_dtype_promotion("standard"):  # as in `train_step`
        gradients = {"w": jnp.array([50.0, -50.0, 0.0])}
        _, state = optimizer.update(gradients, optimizer.init(params), params)
    moment = next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (3,))
    expected = np.array([0.1, -0.1, 0.0]) / np.sqrt(2)  # (1 - b1) of a gradient of norm 1
    np.testing.assert_allclose(moment, expected, rtol=1e-5)


# Checkpoints


def state_of(value):
    params = {"layers": ({"w": jnp.full((64, 64), value)},)}
    return trainer.TrainState(params=params, optimizer=trainer.make_optimizer().init(params))


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path):
    about = {"fingerprint": {}, "metrics": {"loss": 1.0}}
    checkpoints.save(tmp_path, state_of(1.0), 3, about)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="of step 4 cannot be written") as caught:
            checkpoints.save(tmp_path, state_of(2.0), 4, about)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    step, found = checkpoints.read_about(tmp_path)
    assert (step, found["metrics"]) == (3, {"loss": 1.0})
    for name in ("params", "optimizer"):
        arrays = checkpoints.read_arrays(tmp_path, step, found, name, getattr(state_of(0.0), name))
        jax.tree.map(np.testing.assert_array_equal, arrays, getattr(state_of(1.0), name))
    for number in (4, 5):
        checkpoints.save(tmp_path, state_of(2.0), number, about)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(config(pathlib.Path("run"), tokens=120))
    assert checkpoints.latest_step(tmp_path / "run") == 12


def test_a_damaged_run_is_not_resumed(tmp_path, whole):
    """Every file of the newest checkpoint with a byte flipped, cut, empty and absent: what is read
    is what was written, or nothing."""
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    newest, template = (
        out / "checkpoints" / "24",
        {"slope": np.ones(1, "f4"), "offset": np.ones(1, "f4")},
    )

    def read():
        step, about = checkpoints.read_about(out)
        arrays = checkpoints.read_arrays(out, step, about, "params", template)
        return about["fingerprint"], {name: leaf.tolist() for name, leaf in arrays.items()}

    written = read()
    assert written[1] == line_of(out)
    refused: dict[str, int] = {}
    for path in [each for each in sorted(newest.rglob("*")) if each.is_file()]:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for other in (bytes(flipped), content[:-1], b"", None):
            path.unlink() if other is None else path.write_bytes(other)
            try:
                assert read() == written, path
            except CheckpointError as error:
                refused[str(error)] = refused.get(str(error), 0) + 1
            path.write_bytes(content)
    assert sum(refused.values()) > 10
    for said in refused:
        assert f"{newest} is damaged, not as it was written" in said
        assert "\n" not in said
    for path in (newest / "params").rglob("d/*"):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="is damaged"):
        train(config(out, resume=True))
    shutil.rmtree(newest)  # as the message says
    steps = []
    train(config(out, resume=True), on_step=lambda step, _: steps.append(step))
    assert steps == [23, 24]
    assert line_of(out) == line_of(whole[0])
    newest.rename(newest.with_name("1000000000"))
    with pytest.raises(CheckpointError, match="of step 1000000000, and the run ends after step 24"):
        train(config(out, resume=True))


# Mistakes


def test_mistakes_are_named(tmp_path, whole, grown):
    def run(out="out", **overrides):
        train(config(tmp_path / out, **overrides))

    (tmp_path / "occupied" / "line").mkdir(parents=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / trainer.OLD_CHECKPOINT).write_bytes(b"")
    cases = [
        (SettingError, "tokens 0 was given", {"tokens": 0}),
        (SettingError, "tokens has no number", {"tokens": ()}),
        (SettingError, "has 0 steps of 10, and its decay would begin before", {"tokens": 1}),
        (SettingError, "give at least 40 tokens", {"tokens": 30}),
        (SettingError, "give at least 40 tokens", {"tokens": (30, 60)}),
        (SettingError, "give numbers that increase", {"tokens": (120, 60)}),
        (SettingError, "give numbers that increase", {"tokens": (120, 121)}),
        (SettingError, "learning_rate", {"learning_rate": 0.0}),
        (SettingError, "minutes 0.0 was given", {"minutes": 0.0}),
        (SettingError, "give one number of tokens", {"minutes": 1.0, "tokens": BRANCHES}),
        (CheckpointError, "nothing to resume", {"resume": True}),
        (CheckpointError, "line exists, and what is trained", {"out": "occupied"}),
        (CheckpointError, "a run of an earlier version", {"out": "old"}),
        (CheckpointError, "a run of an earlier version", {"out": "old", "resume": True}),
        (CheckpointError, "already holds a run", {"out": whole[0]}),
        (CheckpointError, "values of noise;", {"out": whole[0], "resume": True, "noise": 1.0}),
        (CheckpointError, "values of tokens;", {"out": whole[0], "resume": True, "tokens": 480}),
        (
            CheckpointError,
            "values of tokens;",
            {"out": whole[0], "resume": True, "tokens": (240,)},
        ),
        (CheckpointError, "values of tokens;", {"out": grown[0], "resume": True}),
        (
            CheckpointError,
            "values of warmup_steps;",
            {"out": grown[0], "resume": True, "tokens": BRANCHES, "warmup_steps": 4},
        ),
        (SettingError, r"The loss became (nan|inf) at step \d; lower", {"learning_rate": 1e30}),
    ]
    for error, words, changes in cases:
        with pytest.raises(error, match=words) as caught:
            run(**changes)
        assert "\n" not in str(caught.value)
    assert checkpoints.latest_step(tmp_path / "out") is None
    with only_writer(tmp_path / "free"), pytest.raises(SettingError, match="is being written by"):
        run("free")
    assert not (tmp_path / "free").exists()
