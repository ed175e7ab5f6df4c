"""Paired comparisons: what they say of drafters whose difference is known, and what they refuse."""

import dataclasses
import doctest

import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
import jaxspec.lab.compare
from jaxspec.audit.judge import Divergences, Finding
from jaxspec.engine.engine import Engine
from jaxspec.lab.compare import compare, mean_interval
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.types import Shared

NUM_TOKENS, DRAFT_LENGTH = 24, 3
PROMPTS = toy.prompts([3, 9, 4, 12, 6, 5])
CATEGORIES = ["short", "long", "short", "long", "long", "short"]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def target():
    return toy.model()


@pytest.fixture(scope="module")
def drafters(target):
    plain = Engine(target, batch_size=2, max_length=128).generate(PROMPTS, GREEDY)
    known = toy.sequences(plain)
    return {
        "none": None,
        "always wrong": jaxspec.Oracle(known, acceptance=0.0),
        "always right": jaxspec.Oracle(known, acceptance=1.0),
    }


def run(target, drafters, **changes):
    options = {
        "draft_length": DRAFT_LENGTH,
        "batch_size": 2,
        "max_length": 128,
        "repeats": 2,
    } | changes
    return compare(target, drafters, PROMPTS, GREEDY, categories=CATEGORIES, **options)


@pytest.fixture(scope="module")
def comparison(target, drafters):
    return run(target, drafters)


@dataclasses.dataclass(frozen=True)
class Learner(jaxspec.Drafter):
    """Drafts what followed the newest token when any request had it last: one table for all."""

    name = "learner"
    shares_state = True

    def init(self, shape):
        return Shared(jnp.zeros((shape.vocab_size,), jnp.int32))

    def propose(self, shape, params, state, rows):
        draft, _ = jaxspec.NGram().propose(shape, params, (), rows)
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)
        tokens = jnp.broadcast_to(state.value[newest], draft.tokens.shape)
        return draft.replace(tokens=tokens, num_valid=jnp.minimum(rows.draft_limit, 1)), state

    def commit(self, shape, params, state, rows, info):
        place = rows.num_committed[:, None] - jnp.asarray([2, 1], jnp.int32)
        before, newest = jnp.take_along_axis(rows.tokens, jnp.maximum(place, 0), axis=1).T
        return Shared(state.value.at[before].set(newest))


def test_every_run_of_a_drafter_that_learns_begins_without_what_it_learned(target):
    found = run(target, {"none": None, "learner": Learner()}, repeats=3)
    once = run(target, {"none": None, "learner": Learner()}, repeats=1)
    learner, again = (one.candidates[1] for one in (found, once))
    assert learner.acceptance == again.acceptance


def test_drafters_may_be_named(target):
    ngram = '{"kind": "ngram", "prompt_lookup_max": 2}'
    found = run(target, ["none", ngram], repeats=1)
    assert [one.label for one in found.candidates] == ["none", ngram]
    assert found.candidates[1].engine["drafter"] == "ngram:1-2"


def test_known_differences_are_found(comparison):
    assert comparison.holds
    fewest = NUM_TOKENS // (DRAFT_LENGTH + 1)
    assert comparison.values("rounds", "none").mean == NUM_TOKENS
    assert comparison.values("emitted per round", "always right").mean == DRAFT_LENGTH + 1
    assert comparison.difference("rounds", "always wrong", "none").mean == 0
    assert comparison.difference("rounds", "always right", "none").mean == fewest - NUM_TOKENS
    assert comparison.difference("rounds", "always right", "none").high < 0
    by_category = comparison.values("rounds", "always right", "long")
    assert by_category.num_prompts == CATEGORIES.count("long")
    assert comparison.category_names == ("short", "long")
    assert comparison.pairs() == [
        ("always wrong", "none"),
        ("always right", "none"),
        ("always right", "always wrong"),
    ]


def test_json_holds_every_pair_prompt_and_category(comparison):
    document = comparison.to_json()
    assert document["holds"]
    assert len(document["prompts"]) == len(PROMPTS)
    assert len(document["differences"]) == 2 * 3
    right = document["candidates"][2]
    assert right["num_unequal_to_plain"] == 0
    assert right["acceptance"]["emitted_per_round"] == DRAFT_LENGTH + 1
    assert set(right["by_category"]) == {"short", "long"}
    assert document["candidates"][0]["speedup"] == [1.0, 1.0]
    assert document["candidates"][0]["num_unequal_to_plain"] is None


def test_the_plot_shows_every_candidate_and_category(comparison):
    figure = comparison.plot()
    left, right = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        candidate.label for candidate in comparison.candidates
    ]
    assert [label.get_text() for label in left.get_yticklabels()] == ["short", "long", "all"]
    assert len(right.lines) >= 3


def test_a_candidate_that_emits_another_token_is_caught(comparison):
    bad = comparison.candidates[2]
    # Another window than the baseline's allows ties; a fault in them, or in its own program, fails.
    assert not bad.must_be_equal
    for changes in (
        {"num_unequal_to_plain": 1},
        {"divergences": one(Finding.FAULT)},
        {"divergences": one(Finding.TIE), "must_be_equal": True},
    ):
        broken = dataclasses.replace(bad, **changes)
        assert not broken.holds
        assert not dataclasses.replace(
            comparison, candidates=(*comparison.candidates[:2], broken)
        ).holds
    assert dataclasses.replace(bad, divergences=one(Finding.TIE)).holds


@dataclasses.dataclass
class _Divergence:
    finding: Finding


def one(finding):
    """One output of three that differs."""
    return Divergences(num_outputs=3, differing=(0,), judged={0: _Divergence(finding)})


def test_a_wrong_model_behind_a_drafter_s_label_is_caught(target, drafters, monkeypatch):
    """Sabotage: one engine decodes with other weights."""
    engine = jaxspec.lab.compare.Engine

    def make(model, drafter, **options):
        is_bad = drafter is drafters["always right"]
        return engine(toy.model(seed=5) if is_bad else model, drafter, **options)

    monkeypatch.setattr(jaxspec.lab.compare, "Engine", make)
    found = run(target, drafters, repeats=1)
    assert [candidate.holds for candidate in found.candidates] == [True, True, False]


def test_same_window_candidates_must_agree_to_the_token(target, drafters):
    del_none = {label: drafter for label, drafter in drafters.items() if drafter is not None}
    found = run(target, del_none, repeats=1)
    assert all(candidate.must_be_equal for candidate in found.candidates)
    assert found.holds


def test_sampled_requests_share_their_seeds(target, drafters):
    params = SamplingParams(max_tokens=8, temperature=0.8)  # no seed: one is drawn, for all of them
    found = compare(
        target,
        {label: drafters[label] for label in ("none", "always wrong")},
        PROMPTS,
        params,
        draft_length=DRAFT_LENGTH,
        batch_size=2,
        max_length=128,
        repeats=1,
    )
    assert found.holds
    assert found.category_names == ("all",)
    outputs = [[c.token_ids for c in candidate.completions] for candidate in found.candidates]
    assert outputs[0] == outputs[1]


def test_intervals_are_as_wide_as_they_say():
    values = np.random.default_rng(0).normal(1.0, 1.0, 30)
    found, error = mean_interval(values), 1.96 * values.std(ddof=1) / np.sqrt(30)
    assert found.low < found.mean == values.mean() < found.high
    assert found.high - found.low == pytest.approx(2 * error, rel=0.1)


def test_degenerate_samples_have_honest_intervals():
    alone = mean_interval(np.array([2.0]))
    assert alone.mean == 2
    assert np.isnan(alone.low)
    assert alone.to_json()["low"] is None
    same = mean_interval(np.array([2.0, 2.0, 2.0]))
    assert (same.low, same.high) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"drafters": {"none": None}}, "at least two"),
        ({"prompts": []}, "No prompts"),
        ({"categories": ["a"]}, "1 categories were given for 6"),
        ({"repeats": 0}, "repeats 0"),
    ],
)
def test_mistakes_are_refused(target, changes, sentence):
    given = {"drafters": {"none": None, "ngram": jaxspec.NGram()}, "prompts": PROMPTS} | changes
    drafters, prompts = given.pop("drafters"), given.pop("prompts")
    with pytest.raises(jaxspec.errors.SettingError, match=sentence):
        compare(target, drafters, prompts, **given)


def test_the_docstring_example_runs(monkeypatch):
    monkeypatch.setattr(jaxspec, "compare", compare, raising=False)
    results = doctest.testmod(jaxspec.lab.compare)
    assert results.attempted > 0
    assert results.failed == 0
