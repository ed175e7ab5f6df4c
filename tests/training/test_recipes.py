"""The prompts that drafters are trained on are none of those that they are measured with."""

import importlib.util
import json
import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DATA = pathlib.Path(os.environ.get("JAXSPEC_TEST_DATA", ROOT.parent / "shared" / "data"))
TEST_SETS = {
    "spec_bench/question.jsonl": "turns",
    "prompts/mt_bench_question.jsonl": "turns",
    "prompts/vicuna_bench_question.jsonl": "turns",
    "prompts/gsm8k/test.jsonl": "question",
}
WORDS = 13  # in a row that two texts have in common only if one has them from the other

pytestmark = pytest.mark.skipif(
    not all((DATA / name).is_file() for name in TEST_SETS), reason="the data is not here"
)


def runs_of_words(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(max(len(words) - WORDS, 0) + 1)}


@pytest.fixture(scope="module")
def measured_with():
    found = set()
    for name, field in TEST_SETS.items():
        for line in (DATA / name).read_text(encoding="utf-8").splitlines():
            texts = json.loads(line)[field]
            for text in [texts] if isinstance(texts, str) else texts:
                found |= runs_of_words(text)
    return found


@pytest.fixture(scope="module")
def trained_on(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("prompts", ROOT / "docs/recipes/prompts.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    out = tmp_path_factory.mktemp("recipe") / "prompts.jsonl"
    recipe.main(str(DATA), str(out))
    return [json.loads(line)["prompt"] for line in out.open(encoding="utf-8")]


def test_no_prompt_is_in_a_test_set(trained_on, measured_with):
    assert len(trained_on) > 15_000
    assert [prompt for prompt in trained_on if runs_of_words(prompt) & measured_with] == []


def test_a_question_that_leaks_is_seen(measured_with):
    line = (DATA / "prompts/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()[3]
    assert runs_of_words(f"Please solve: {json.loads(line)['question']}") & measured_with
