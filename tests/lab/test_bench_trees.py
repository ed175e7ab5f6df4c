"""`jaxspec bench trees` and `bench verifiers`: small runs, and predictions for static trees."""

import json

import numpy as np
import pytest
import toy

from jaxspec.cli import main
from jaxspec.drafters.trees import StaticTree
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.trees import TreesBench, chain_tree, draft_ranks, emitted_by_ranks
from jaxspec.requests.sampling_params import SamplingParams

RANKS = [np.array([0, 0, 1, 0, 3, 0, 0]), np.array([1, 0, 0])]


def test_tokens_per_round_follow_from_the_ranks():
    # Rounds of the likeliest tokens: 0 0 1, 0 3, 0 0; and 1, 0 0.
    assert emitted_by_ranks(chain_tree(2), RANKS) == pytest.approx(10 / 5)
    # With the second likeliest first token: the same three; and 1 0 0.
    wide = StaticTree(((0,), (0, 0), (1,), (1, 0)))
    assert emitted_by_ranks(wide, RANKS) == pytest.approx(10 / 4)


def test_ranks_of_a_model_that_drafts_for_itself_are_all_zero():
    target = toy.model()
    done = Engine(target, batch_size=2, max_length=128).generate(
        toy.prompts((3, 20)), SamplingParams(max_tokens=12, ignore_eos=True)
    )
    for ranks in draft_ranks(target, done):
        np.testing.assert_array_equal(ranks, np.zeros(12, int))


@pytest.mark.system
def test_a_small_run(capsys):
    options = ["--windows", "5", "--contexts", "40", "--pass-batch-sizes", "1", "--nodes", "4"]
    options += [
        "--batch-sizes",
        "2",
        "--chains",
        "2",
        "--trees",
        "4",
        "--max-tokens",
        "8",
        "--repeats",
        "1",
        "--json",
    ]
    assert main(["bench", "trees", *options]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["holds"]
    assert {found["tree"] for found in document["acceptance"]} == {"chain", "static", "beam"}
    by_tree = {
        (found["verifier"], found["temperature"], found["tree"]): found
        for found in document["acceptance"]
    }
    for tree in ("chain", "static"):
        found = by_tree["coupled", 0.0, tree]
        assert found["emitted_per_round"] == pytest.approx(found["predicted"], rel=0.02)
    beside_static = by_tree["coupled", 0.0, "beam"]["over_static"]
    assert beside_static["low"] <= beside_static["mean"] <= beside_static["high"]
    assert by_tree["coupled", 0.0, "static"]["over_static"] is None
    [over_static] = [t for t in TreesBench().tables(document) if "over static" in t.title]
    assert len(over_static.rows) == 1
    assert {found["drafts"] for found in document["speeds"]} >= {"plain", "auto", "tree of 4"}


@pytest.mark.system
def test_a_small_run_of_the_verifiers(capsys):
    options = ["--max-tokens", "8", "--samples", "1", "--repeats", "1", "--json"]
    assert main(["bench", "verifiers", *options]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    of_all = [found for found in document["results"] if found["domain"] == "all"]
    assert all(found["emitted_per_round"] > 1 for found in of_all)
    assert all(0 < found["sum_min_p_q"] < 1 for found in of_all)
