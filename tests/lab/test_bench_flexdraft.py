"""`jaxspec bench flexdraft`: a small run, and where modes cross."""

import json

import pytest

from jaxspec.cli import main
from jaxspec.lab.bench.flexdraft import crossing, crossings, predicted


def test_modes_cross_between_the_batches_that_were_measured():
    assert crossing([1, 2, 4], [0.5, 0.75, 1.25]) == 3.0
    assert crossing([1, 2, 4], [0.5, 1.0, 1.25]) == 2.0
    assert crossing([2, 4], [1.5, 1.25]) == 2.0
    assert crossing([1, 2, 4], [0.5, 0.75, 0.9]) is None
    rounds = [
        {"draft_length": 3, "batch_size": batch, "ratio": ratio, "ratios": ratios}
        for batch, ratio, ratios in ((1, 0.5, [0.5, 0.5]), (2, 1.5, [1.5, 0.75]))
    ]
    (found,) = crossings(rounds)
    assert (found["batch"], found["low"], found["high"]) == (1.5, 1.5, 1.5)
    assert found["num_turns_without"] == 1


def test_predictions_are_of_the_releases_sizes():
    found = {each["draft_length"]: each for each in predicted()}
    assert set(found) == {15, 7, 3}
    # The paper: between 2 and 4 on an A100, with whole blocks.
    assert 2 <= found[15]["crossing_batch"] <= 4
    assert found[15]["parallel_ms"] < found[15]["sequential_ms"]


@pytest.mark.system
def test_a_small_run(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "domain": "any"} for text in ("def main():", "Once upon a time")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--prompts", str(prompts), "--batch-sizes", "1", "--round-lengths", "1", "9"]
    options += ["--max-tokens", "8", "--repeats", "1", "--json"]
    assert main(["bench", "flexdraft", *options]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["holds"]
    assert document["config"]["weights"] == "demo-flexdraft"
    drafters = [found["drafter"] for found in document["acceptance"]]
    assert drafters == ["FlexDraft", "draft model", "n-gram"]
    parts = [found["parts"] for found in document["ablation"]]
    assert parts == ["attention tuning", "+ calibration", "+ selective verification"]
    (found,) = document["rounds"]  # a block has no room for nine drafts
    # 2 tokens in 8 layers, beside two groups of 8 mask rows in 3 layers, or after one.
    assert found["parallel_layer_rows"] == 2 * 8 + 2 * 8 * 3
    assert found["sequential_layer_rows"] == 2 * 8 + 8 * 3
    assert [each["drafter"] for each in document["speeds"]] == [
        "plain",
        "parallel",
        "sequential",
        "auto",
    ]
    assert main(["bench", "flexdraft", "--draft-length", "8"]) != 0
    assert "drafts at most 7 tokens per round; give at most that" in capsys.readouterr().err
