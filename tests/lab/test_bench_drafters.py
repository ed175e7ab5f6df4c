"""`jaxspec bench drafters`: small runs, and what static trees emit by the ranks of their tokens."""

import json
import types

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from written import write_texts

import jaxspec
from jaxspec.cli import main
from jaxspec.drafters.trees import StaticTree, best_static_tree
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.drafters import draft_ranks
from jaxspec.lab.bench.measure import fill, of_best_fixed
from jaxspec.lab.bench.stages import round_stages
from jaxspec.load.drafters import save_drafter
from jaxspec.requests.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads for `demo-target`, two prompts, and texts that it is said to have written."""
    root = tmp_path_factory.mktemp("drafters")
    target = jaxspec.load_model("demo-target")
    save_drafter(heads.random_heads("clover", target), root / "clover", target=target)
    lines = [
        {"prompt": "def main():", "domain": "code"},
        {"prompt": "Once upon a time", "domain": "tales"},
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_texts(root / "texts.jsonl", "demo-target", num_texts=6, split="held-out")
    return root


@pytest.fixture
def bench(folder, capsys):
    """Runs it with these options on small inputs; returns its document."""

    def run(*options) -> dict:
        small = ["--prompts", str(folder / "prompts.jsonl"), "--batch-sizes", "1"]
        small += ["--max-tokens", "8", "--repeats", "2", "--json"]
        assert main(["bench", "drafters", *small, *map(str, options)]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.slow
def test_every_part_has_a_row_for_each_drafter(bench, folder):
    drafters = ("ngram", f"mine=heads:{folder / 'clover'}")
    document = bench("--drafters", *drafters, "--texts", folder / "texts.jsonl")
    assert document["holds"]
    assert document["config"]["drafters"] == ["ngram", "mine"]
    assert document["drafters"]["ngram"]["num_params"] == 0
    assert document["drafters"]["mine"]["num_params"] > 0
    assert str(folder) not in json.dumps(document)

    assert {found["drafter"] for found in document["accuracy"]} == {"mine"}
    assert {found["domain"] for found in document["accuracy"]} == {"all", "tales", "sums"}
    acceptance = {found["drafter"]: found for found in document["acceptance"]}
    assert list(acceptance) == ["ngram", "mine"]
    for found in acceptance.values():
        assert found["is_equal"]
        assert found["draft_length"] == 4
        assert set(found["by_domain"]) == {"code", "tales"}
    assert acceptance["ngram"]["difference"]["value"] == 0
    costs = {found["drafter"]: found for found in document["costs"]}
    assert costs["ngram"]["level_over_first"] == [1, 1, 1]
    for found in costs.values():
        assert found["num_levels"] >= 1
        for name in ("draft_over_target", "level_over_first", "round_over_first"):
            median, low, high = found[name]
            assert 0 < low <= median <= high
        assert found["round_ms"] > 0
    speeds = [found["drafter"] for found in document["speeds"]]
    assert speeds == ["plain", "ngram", "ngram, auto", "mine", "mine, auto"]


@pytest.mark.slow
def test_flexdraft_in_both_modes_and_untrained_heads(bench):
    names = ["parallel", "sequential"]
    drafters = [f'{mode}={{"model": "demo-flexdraft", "mode": "{mode}"}}' for mode in names]
    parts = ("--parts", "acceptance", "costs", "--draft-length", 3)
    document = bench("--drafters", *drafters, "random:clover2", *parts)
    assert document["holds"]
    parallel, sequential, untrained = document["acceptance"]
    assert parallel["emitted_per_round"] == sequential["emitted_per_round"]
    assert {found["draft_length"] for found in (parallel, sequential, untrained)} == {3}
    assert document["drafters"]["random:clover2"]["name"].startswith("clover2[")
    assert [found["drafter"] for found in document["costs"]] == [*names, "random:clover2"]


@pytest.mark.slow
def test_sampled_outputs_of_a_verifier_that_is_not_coupled_are_not_compared(bench):
    options = ("--verifier", "rejection", "--temperature", 0.8, "--parts", "acceptance")
    document = bench("--drafters", "static[4]:demo-draft", *options)
    [found] = document["acceptance"]
    assert found["is_equal"] is None
    assert found["emitted_per_round"] > 1
    assert document["holds"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--drafters", "ngram", "ngram"), "Two of --drafters are called ngram"),
        (("--drafters", "mine=none"), "mine of --drafters drafts nothing"),
        (("--drafters", "abacus"), "There is no drafter 'abacus'"),
        (("--target", "random:qwen3-8b"), "No --drafters were given"),
        (
            ("--drafters", "flexdraft:demo-flexdraft", "--draft-length", "8"),
            "drafts at most 7 tokens per round; give at most that",
        ),
    ],
)
def test_drafters_that_cannot_be_compared_are_refused(capsys, options, expected):
    assert main(["bench", "drafters", *options]) != 0
    assert expected in capsys.readouterr().err


# ---- static trees by ranks


def chain_tree(num_nodes: int) -> StaticTree:
    return StaticTree(tuple((0,) * depth for depth in range(1, num_nodes + 1)))


def emitted_by_ranks(tree: StaticTree, ranks) -> float:
    """Tokens per round that a static tree would emit on outputs whose tokens have these ranks."""
    choices, num_rounds = set(tree.choices), 0
    for own in ranks:
        first = 0
        while first < len(own):
            depth = 0
            # The last token that may be emitted is never drafted.
            while first + depth + 1 < len(own) and tuple(own[first : first + depth + 1]) in choices:
                depth += 1
            first, num_rounds = first + depth + 1, num_rounds + 1
    return sum(map(len, ranks)) / num_rounds


@pytest.mark.slow
def test_decoding_emits_what_the_ranks_predict():
    target, draft = (jaxspec.load_model(name) for name in ("demo-target", "demo-draft"))
    prompts = [line.prompt for line in jaxspec.requests.prompts.sample_prompts()[::6]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    shape = {"batch_size": 8, "max_length": 256}
    ranks = draft_ranks(draft, Engine(target, **shape).generate(prompts, params))
    by_rank = [float(np.mean(np.concatenate(ranks) == rank)) for rank in range(8)]
    for tree in (chain_tree(4), best_static_tree(np.tile(by_rank, (8, 1)), 6)):
        engine = Engine(target, jaxspec.DraftModel(draft, tree=tree), **shape)
        done = engine.generate(prompts, params)
        total = done.acceptance
        assert total.emitted_per_round == pytest.approx(emitted_by_ranks(tree, ranks), rel=0.02)


def test_ranks_of_a_model_that_drafts_for_itself_are_all_zero():
    target = toy.model()
    done = Engine(target, batch_size=2, max_length=128).generate(
        toy.prompts((3, 20)), SamplingParams(max_tokens=12, ignore_eos=True)
    )
    for ranks in draft_ranks(target, done):
        np.testing.assert_array_equal(ranks, np.zeros(12, int))


# ---- what is timed


@pytest.mark.slow
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


def timed(label, *run_s):
    """Runs that emitted a thousand tokens each."""
    found = types.SimpleNamespace(label=label, tokens_per_s=1000 / float(np.median(run_s)))
    found.speedups = lambda other: np.divide(other.run_s, run_s)
    found.run_s = run_s
    return found


def test_an_automatic_length_is_compared_with_the_fastest_fixed_one_in_the_same_turns():
    found = [
        timed("plain", 2.0, 2.0, 2.0),
        timed("two", 1.0, 3.0, 1.0),
        timed("four", 1.5, 1.5, 1.5),
        timed("auto", 1.1, 3.0, 0.8),
        timed("other auto", 0.5, 0.5, 0.5),
    ]
    engines = [
        types.SimpleNamespace(adaptive=object() if "auto" in one.label else None) for one in found
    ]
    assert of_best_fixed(found, engines) == {
        "plain": None,
        "two": None,
        "four": None,
        "auto": pytest.approx(1.0),
        "other auto": pytest.approx(2.0),
    }
