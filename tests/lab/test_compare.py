"""Paired comparisons: what they say of drafters whose difference is known, and what they refuse."""

import dataclasses
import doctest
import json

import jax.numpy as jnp
import pytest
import toy

import jaxspec
import jaxspec.lab.compare
from jaxspec.audit.judge import Divergences, Finding
from jaxspec.engine.engine import Engine
from jaxspec.lab.compare import compare
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import as_json
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_known_differences_are_found(comparison):
    assert comparison.holds
    fewest = NUM_TOKENS // (DRAFT_LENGTH + 1)
    assert comparison.values("rounds", "none").value == NUM_TOKENS
    assert comparison.values("emitted per round", "always right").value == DRAFT_LENGTH + 1
    assert comparison.difference("rounds", "always wrong", "none").value == 0
    assert comparison.difference("rounds", "always right", "none").value == fewest - NUM_TOKENS
    by_category = comparison.values("rounds", "always right", "long")
    assert by_category.num_clusters == CATEGORIES.count("long") == len(by_category.points)
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
        {"unequal_to_plain": (1,)},
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


ANYTHING = {
    "plain": None,
    "k=2": {"drafter": "ngram", "draft_length": 2},
    "warm": {"drafter": "ngram", "draft_length": 2, "temperature": 0.8},
    "rejection": {"drafter": {"kind": "ngram", "branches": 2}, "tree_depth": 4, "temperature": 0.8,
                  "verifier": "rejection"},
    "auto": {"drafter": "ngram", "draft_length": "auto"},
    "fails": {"drafter": {"kind": "ngram", "branches": 2}, "verifier": "block"},
}  # fmt: skip


def compare_anything(target, candidates=ANYTHING, **options):
    options = {"repeats": 0, "batch_size": 2, "max_length": 128, "draft_length": 3} | options
    return compare(target, candidates, PROMPTS, GREEDY, categories=CATEGORIES, **options)


def counts(comparison):
    """Everything that does not depend on the machine."""
    figures = comparison.to_json()
    for own in figures["candidates"]:
        del own["compile_s"], own["run_s"], own["speedup"], own["tokens_per_s"], own["engine"]
    return figures


@pytest.mark.slow
def test_candidates_may_differ_in_anything_and_one_that_fails_is_a_row(target):
    stages = []
    found = compare_anything(target, on_stage=stages.append)
    described = {own.label: own.engine for own in found.ran}
    assert list(described) == [label for label in ANYTHING if label != "fails"]
    assert described["k=2"]["draft_length"] == 2
    assert described["auto"]["draft_length"] == "auto"
    assert described["rejection"]["verifier"] == "rejection"
    assert [own.reference for own in found.ran] == [None, "plain", None, None, "plain"]
    assert found.ran[2].requests[0].params.temperature == 0.8
    assert found.ran[2].token_ids != found.ran[1].token_ids
    assert "takes chains only" in found.failed["fails"]
    assert not found.is_timed
    shown = str(found)
    assert "takes chains only" in " ".join(shown.split())
    assert "distribution" in shown
    assert "tokens/s" not in shown
    # The tests' kernels round by width, so all that draft have one window, and the table says so.
    assert {own["verify_length"] for name, own in described.items() if name != "plain"} == {5}
    assert "score 5 tokens per round" in " ".join(shown.split())
    assert sum(stage.startswith("k=2: ") for stage in stages) >= 4
    assert "<table>" in found._repr_html_()
    assert "k=2 - plain" in found._repr_html_()
    frame = found.to_frame()
    assert len(frame) == 5 * len(PROMPTS)
    rounds = frame[frame.candidate == "k=2"].num_rounds
    assert rounds.mean() == found.values("rounds", "k=2").value


@pytest.mark.slow
def test_where_bits_do_not_depend_on_the_width_a_chain_has_its_own(target, monkeypatch):
    monkeypatch.setattr(type(target), "is_width_invariant", True)
    candidates = {"short": {"drafter": "ngram", "draft_length": 1}, "long": {"drafter": "ngram"}}
    found = compare_anything(target, candidates)
    assert [own.engine["verify_length"] for own in found.ran] == [2, 4]
    assert not found.notes


def test_pooled_and_per_prompt_are_told_apart(comparison):
    label = "always right"
    tokens, rounds = next(own for own in comparison.ran if own.label == label).by_prompt()
    pooled, each = (
        comparison.values("emitted per round", label, estimator=estimator).value
        for estimator in ("pooled", "per prompt")
    )
    assert (pooled, each) == (tokens.sum() / rounds.sum(), (tokens / rounds).mean())
    with pytest.raises(jaxspec.errors.SettingError, match="estimators pooled, per prompt"):
        comparison.values("emitted per round", label, estimator="mean")


class Killed(BaseException):
    """As if the process had been killed."""


@pytest.mark.slow
def test_a_killed_comparison_that_is_resumed_equals_an_uninterrupted_one(target, tmp_path):
    candidates = {label: own for label, own in ANYTHING.items() if label != "auto"}
    whole = compare_anything(target, candidates, repeats=1)
    file, seen, results = tmp_path / "found.json", [], []

    def stop(stage):
        seen.append(stage)
        if stage == "warm: decoding":
            raise Killed

    with pytest.raises(Killed):
        compare_anything(target, candidates, output=file, on_stage=stop, on_result=results.append)
    assert [own.label for own in results[-1].ran] == ["plain", "k=2"]
    assert set(json.loads(file.read_text())["cells"]) == {"plain", "k=2"}
    with pytest.raises(jaxspec.errors.SettingError, match=r"there already; add --resume"):
        compare_anything(target, candidates, output=file)
    seen.clear()
    options = {"output": file, "resume": True, "on_stage": seen.append}
    resumed = compare_anything(target, candidates, repeats=1, **options)
    assert "k=2: decoding" not in seen
    assert "warm: decoding" in seen
    assert counts(resumed) == counts(whole)
    assert json.loads(file.read_text())["comparison"] == as_json(resumed.to_json())
    assert resumed.is_timed
    # A candidate that is another under the same label runs again.
    candidates["k=2"] = {"drafter": "ngram", "draft_length": 1}
    again = compare_anything(target, candidates, **options)
    assert again.ran[1].engine["draft_length"] == 1
    with pytest.raises(jaxspec.errors.SettingError, match="its prompts is another"):
        compare(target, candidates, PROMPTS[:3], GREEDY, output=file, resume=True, repeats=0)


def test_what_a_callback_raises_is_its_callers(target):
    def fail(stage):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compare_anything(target, on_stage=fail)
    with pytest.raises(jaxspec.errors.SettingError, match="takes chains only"):
        compare_anything(target, {"a": ANYTHING["fails"], "b": ANYTHING["fails"]})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"candidates": {"none": None}}, "at least two"),
        (
            {"candidates": {"a": None, "b": {"drafter": "ngram", "k": 2}}},
            "'k' was given for .* 'b'",
        ),
        ({"candidates": {"a": None, "b": {"tree": 4}}}, "without a drafter's name"),
        ({"candidates": {"a": None, "b": {"drafter": "ngram", "top_p": 2}}}, "top_p 2 was given"),
        ({"prompts": []}, "No prompts"),
        ({"categories": ["a"]}, "1 categories were given for 6"),
        ({"repeats": -1}, "repeats -1"),
    ],
)
def test_mistakes_are_refused(target, changes, sentence):
    given = {"candidates": {"none": None, "ngram": jaxspec.NGram()}, "prompts": PROMPTS} | changes
    with pytest.raises(jaxspec.errors.SettingError, match=sentence):
        compare(target, **given)


@pytest.mark.slow
def test_the_docstring_example_runs(monkeypatch):
    monkeypatch.setattr(jaxspec, "compare", compare, raising=False)
    results = doctest.testmod(jaxspec.lab.compare)
    assert results.attempted > 0
    assert results.failed == 0
