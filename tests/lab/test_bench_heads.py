"""`jaxspec bench heads`: a small run, and what heads cost by the cost model."""

import json
import math

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec.cli import main
from jaxspec.drafters.heads.config import heads_config, param_shapes
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.heads import _TappedNGram
from jaxspec.lab.bench.measure import fill
from jaxspec.lab.bench.stages import round_stages
from jaxspec.lab.cost.heads import HeadsDraft
from jaxspec.load.drafters import save_drafter
from jaxspec.models import decoder
from jaxspec.models.registry import PRESETS
from jaxspec.requests.sampling_params import SamplingParams

TARGET = PRESETS["vicuna-7b"]
HEAD = 2 * TARGET.width * TARGET.vocab_size
LOGITS = 2 * 4 * TARGET.vocab_size


@pytest.mark.parametrize("kind", heads.KINDS)
def test_regressive_heads_read_the_targets_head_once_for_each_level(kind):
    config = heads_config(kind, TARGET, num_heads=3)
    (own_bytes, _), (head_bytes, _), _ = HeadsDraft(config=config, batch=1).kernels()
    assert head_bytes == HEAD * (1 if kind == "medusa" else 3) + 3 * LOGITS
    shapes = {name: leaf for name, leaf in param_shapes(config).items() if name != "layers"}
    leaves = jax.tree.leaves(shapes, is_leaf=decoder.is_shape)
    stored = 2 * sum(map(math.prod, leaves))
    # What heads share is read again by every level but the first; Clover-2's begins at the second.
    square = 2 * TARGET.width**2
    read_again = {"clover": 2 * 3 * square, "clover2": 5 * square}.get(kind, 0)
    assert own_bytes == pytest.approx(stored + read_again, rel=1e-3)


@pytest.mark.system
def test_a_small_run(capsys, tmp_path):
    target = jaxspec.load_model("demo-target")
    save_drafter(heads.random_heads("clover", target), tmp_path / "clover", target=target)
    options = ["--nodes", "4", "--batch-sizes", "1", "--max-tokens", "8", "--repeats", "1"]
    options += ["--turns", "2"]
    options += ["--parts", "acceptance", "costs", "predicted"]
    name = f"mine={tmp_path / 'clover'}"
    assert main(["bench", "heads", "--heads", name, *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["holds"]
    assert document["config"]["heads"] == ["mine"]
    assert {found["drafter"] for found in document["acceptance"]} >= {"mine", "n-gram"}
    costs = {found["drafter"]: found for found in document["costs"]}
    assert list(costs) == ["draft model, chain", "mine, chain", "mine"]
    assert costs["draft model, chain"]["level_over_draft_step"] == 1
    assert costs["mine, chain"]["num_levels"] == 3
    assert [found["batch_size"] for found in document["taps"]] == [1]
    assert {found["target"] for found in document["predicted"]} >= {"qwen3-8b"}
    assert str(tmp_path) not in json.dumps(document)
    assert main(["bench", "heads", "--heads", name, name]) != 0
    assert "Two of --heads are called mine" in capsys.readouterr().err


def test_a_round_that_is_timed_over_and_over_drafts_every_time():
    target = heads.target(num_layers=1)
    drafter = heads.random_heads("clover", target, tree="chain", stddev=0.3)
    engine = Engine(target, drafter, batch_size=4, max_length=128, scheduler=jaxspec.Static())
    executor = engine.executor
    fill(executor, toy.prompts((5, 9, 12, 7)), SamplingParams(max_tokens=90), draft_length=3)
    while True:  # until a round accepts something
        before = jax.tree.map(jnp.copy, executor.state)
        executor.run(1)
        if np.any(executor.state.num_committed - before.num_committed > 1):
            break
    repeated = round_stages(executor.parts, before)["round"]
    repeated(1)
    once = np.array(repeated._moving[1].num_taken)
    assert np.array_equal(once, executor.state.num_committed - 1)
    repeated(3)
    assert np.array_equal(repeated._moving[1].num_taken, once)


def test_trees_that_are_too_large_are_refused_before_anything_is_loaded(capsys):
    options = ["--heads", "/nowhere", "--target", "/nowhere", "--nodes", "4", "117"]
    assert main(["bench", "heads", *options]) != 0
    assert "--nodes 117 was given" in capsys.readouterr().err


def test_without_heads_it_says_what_to_give(capsys):
    assert main(["bench", "heads"]) != 0
    assert "No --heads were given" in capsys.readouterr().err


@pytest.mark.system
def test_untrained_heads_and_what_a_round_with_taps_costs(capsys):
    options = ["--nodes", "2", "--batch-sizes", "1", "--max-tokens", "8", "--turns", "2"]
    options += ["--parts", "costs", "--heads", "mine=random:clover2", "--json"]
    assert main(["bench", "heads", *options]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["drafters"]["mine"]["kind"] == "clover2"
    assert document["drafters"]["mine"]["num_heads"] == 2
    for found, quarters in (
        (document["costs"][1]["level_over_draft_step"], document["costs"][1]["level_quartiles"]),
        (document["taps"][0]["ratio"], document["taps"][0]["quartiles"]),
    ):
        assert 0 < quarters[0] <= found <= quarters[1]


def test_untrained_heads_of_no_kind_are_refused(capsys):
    assert main(["bench", "heads", "--heads", "random:eagle"]) != 0
    message = capsys.readouterr().err
    assert "random:eagle of --heads was given" in message
    assert "one of medusa, hydra, clover, clover2." in message


def test_the_round_with_taps_keeps_the_targets_hidden_states():
    """Otherwise XLA would leave out what is to be measured."""
    target = toy.model()
    drafter = _TappedNGram(width=target.config.width, dtype=target.dtype)
    engine = Engine(target, drafter, batch_size=2, max_length=128, scheduler=jaxspec.Static())
    executor = engine.executor
    fill(executor, toy.prompts((5, 9)), SamplingParams(max_tokens=40), draft_length=3)
    executor.run(2)
    newest = np.array(executor.state.num_committed) - 1
    kept = np.array(executor.state.drafter)
    assert kept.shape == (2, engine.executor.shape.verify_length, 1, target.config.width)
    assert np.all(np.any(kept[:, 0, 0] != 0, axis=-1)), newest
