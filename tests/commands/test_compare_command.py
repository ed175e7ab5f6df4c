"""`jaxspec compare`: tables, plot, document, and what it refuses."""

import json

import pytest
import tyro
from rich.console import Console

from jaxspec.commands.compare import CompareCommand
from jaxspec.errors import SettingError


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("compare") / "prompts.jsonl"
    lines = [
        {"prompt": "Once upon a time", "category": "tales"},
        {"prompt": "def f(x):", "category": "code"},
        {"prompt": "The end of the end", "category": "tales"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(console, *args):
    command = tyro.cli(CompareCommand, args=[str(arg) for arg in args])
    return command.run(console)


def test_a_run_with_tables_plot_and_document(models, prompts, tmp_path):
    console = Console(width=80, record=True)
    plot = tmp_path / "plots" / "compare.png"
    document = run(
        console, "--target", models.target, "--drafter", "none", "--drafter", "ngram", "--drafter",
        f"draft_model:{models.draft}", "--prompts", prompts, "--max-tokens", 8, "--max-length", 100,
        "--batch-size", 2, "--draft-length", 3, "--repeats", 2, "--plot", plot,
    )  # fmt: skip
    text = console.export_text()
    assert "All outputs are equal" in text
    assert "…" not in text
    for shown in ("tales (2)", "code (1)", "ngram - none", "accepted at"):
        assert shown in text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert document["holds"]
    assert document["inputs"].keys() == {"prompts.jsonl"}
    found = document["comparison"]
    assert [one["label"] for one in found["candidates"]][:2] == ["none", "ngram"]
    assert [len(one["run_s"]) for one in found["candidates"]] == [2, 2, 2]
    assert [one["category"] for one in found["prompts"]] == ["tales", "code", "tales"]
    json.dumps(document)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "was given nothing"),
        (("--drafter", "none"), "at least two different"),
        (("--drafter", "ngram", "--drafter", "ngram"), "at least two different"),
        (("--drafter", "none", "--drafter", "ngram:x"), "which takes prompt_lookup_min"),
        (tuple("--drafter none --drafter ngram --draft-length 0".split()), "at least 1"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(args, sentence):
    with pytest.raises(SettingError, match=sentence):
        run(Console(), "--target", "no-such-model", *args)
