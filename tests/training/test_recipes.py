"""The recipes: prompts to train on are none of those that are measured with; a FlexDraft drafter
without its calibration."""

import importlib.util
import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest

from jaxspec.kernels.base import unpacked
from jaxspec.load.drafters import make_drafter
from jaxspec.load.models import load_model

ROOT = pathlib.Path(__file__).parents[2]
DATA = pathlib.Path(os.environ.get("JAXSPEC_TEST_DATA", ROOT.parent / "shared" / "data"))
TEST_SETS = {
    "spec_bench/question.jsonl": "turns",
    "prompts/mt_bench_question.jsonl": "turns",
    "prompts/vicuna_bench_question.jsonl": "turns",
    "prompts/gsm8k/test.jsonl": "question",
}
WORDS = 13  # in a row that two texts have in common only if one has them from the other


def recipe(name):
    """A recipe as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/recipes/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runs_of_words(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(max(len(words) - WORDS, 0) + 1)}


@pytest.fixture(scope="module")
def measured_with():
    if not all((DATA / name).is_file() for name in TEST_SETS):
        pytest.skip("the data is not here")
    found = set()
    for name, field in TEST_SETS.items():
        for line in (DATA / name).read_text(encoding="utf-8").splitlines():
            texts = json.loads(line)[field]
            for text in [texts] if isinstance(texts, str) else texts:
                found |= runs_of_words(text)
    return found


@pytest.fixture(scope="module")
def trained_on(tmp_path_factory, measured_with):
    out = tmp_path_factory.mktemp("recipe") / "prompts.jsonl"
    recipe("prompts").main(str(DATA), str(out))
    return [json.loads(line)["prompt"] for line in out.open(encoding="utf-8")]


def test_no_prompt_is_in_a_test_set(trained_on, measured_with):
    assert len(trained_on) > 15_000
    assert [prompt for prompt in trained_on if runs_of_words(prompt) & measured_with] == []


def test_a_question_that_leaks_is_seen(measured_with):
    line = (DATA / "prompts/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()[3]
    assert runs_of_words(f"Please solve: {json.loads(line)['question']}") & measured_with


def test_a_drafter_without_its_calibration(tmp_path):
    recipe("uncalibrated").main("demo-target", "demo-flexdraft", str(tmp_path / "out"))
    target = load_model("demo-target")
    whole, without = (
        unpacked(make_drafter(f"flexdraft:{name}", target).params)
        for name in ("demo-flexdraft", tmp_path / "out")
    )
    assert not any(leaf.any() for leaf in jax.tree.leaves(without.pop("calibrator")))
    assert any(leaf.any() for leaf in jax.tree.leaves(whole.pop("calibrator")))
    jax.tree.map(np.testing.assert_array_equal, whole, without)


def test_questions_of_every_kind_of_task(tmp_path, measured_with):
    out = tmp_path / "questions.jsonl"
    recipe("questions").main(str(DATA / "spec_bench/question.jsonl"), "24", str(out))
    found = [json.loads(line) for line in out.open(encoding="utf-8")]
    assert len({question["question_id"] for question in found}) == 24
    kinds = [question["category"] for question in found]
    for kind in ("translation", "summarization", "qa", "math_reasoning", "rag"):
        assert kinds.count(kind) == 4
