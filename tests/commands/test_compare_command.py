"""`jaxspec compare`: tables, plot, document, and what it refuses."""

import json
import re

import pytest
import tyro
from rich.console import Console

from jaxspec.commands.compare import CompareCommand
from jaxspec.errors import PromptError, SettingError
from jaxspec.lab import compare


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
    for shown in ("tales (2)", "code (1)", "ngram - none", "accepted at", "speed-up"):
        assert shown in text
    assert re.search(r"^none .*[0-9] .*equal", text, re.MULTILINE)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert document["holds"]
    assert document["inputs"].keys() == {"prompts.jsonl"}
    found = document["comparison"]
    assert [one["label"] for one in found["candidates"]][:2] == ["none", "ngram"]
    assert [len(one["run_s"]) for one in found["candidates"]] == [2, 2, 2]
    assert [one["category"] for one in found["prompts"]] == ["tales", "code", "tales"]
    json.dumps(document)


QUESTIONS = [
    {"turns": ["Name a tree."], "category": "writing"},
    {"turns": ["Name a river."], "category": "writing"},
    {"turns": ["Say one."], "category": "math"},
    {"turns": ["Say two."], "category": "qa"},
]
COUNTED = ("--max-tokens", 6, "--max-length", 128, "--batch-size", 2, "--no-timing")


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return path


@pytest.mark.slow
def test_candidates_of_settings_on_chats_by_task(models, questions, tmp_path):
    given = ("--target", models.target, "--prompts", questions, *COUNTED)
    given += ("--drafter", "none", "--candidate", 'k=2={"drafter": "ngram", "draft_length": 2}')
    given += ("--candidate", 'warm={"drafter": "ngram", "verifier": "block", "temperature": 0.5}')
    console = Console(width=80, record=True)
    document = run(console, *given, "--chat", "--per-category", 1, "--by-task")
    found = document["comparison"]
    assert [one["label"] for one in found["candidates"]] == ["none", "k=2", "warm"]
    assert [one["category"] for one in found["prompts"]] == ["mt_bench", "mt_bench", "qa"]
    text = console.export_text()
    assert "mt_bench (2)" in text
    assert "distribution" in text
    assert "tokens/s" not in text
    assert "chat template" not in text
    assert "…" not in text
    # Without --chat every prompt is another, and the command says so.
    plain = run(console, *given)
    assert plain["comparison"]["prompts"] != found["prompts"]
    assert "has a chat template and was given plain text" in console.export_text()


@pytest.mark.slow
def test_an_interrupted_run_prints_what_it_has_and_goes_on(
    models, questions, tmp_path, monkeypatch, cli
):
    output = tmp_path / "found.json"
    words = ("compare", "--target", models.target, "--prompts", questions, *COUNTED, "--chat")
    words += ("--drafter", "none", "--drafter", "ngram", "--output", output)
    decode = compare._decode

    def interrupted(engine, requests, tell, stage, **options):
        if stage == "ngram: decoding":
            raise KeyboardInterrupt
        return decode(engine, requests, tell, stage, **options)

    monkeypatch.setattr(compare, "_decode", interrupted)
    ended = cli(*words)
    assert ended.status == 130
    assert "1 of 2 candidates are done; give the same command with --resume" in ended.out
    assert "none: decoding" in ended.err
    monkeypatch.setattr(compare, "_decode", decode)
    assert "add --resume to go on" in cli(*words).err
    resumed = cli(*words, "--resume", "--json")
    assert "none: decoding" not in resumed.err
    assert "ngram: decoding" in resumed.err
    whole = cli(*words[:-2], "--json")
    for one in (whole, resumed):
        assert one.status == 0
    of_whole, of_resumed = (one.document["comparison"] for one in (whole, resumed))
    for name in ("prompts", "differences"):
        assert of_whole[name] == of_resumed[name]


def test_a_candidate_that_fails_has_a_row_and_the_command_says_so(models, questions, cli):
    bad = 'bad={"drafter": {"kind": "ngram", "branches": 2}, "verifier": "block"}'
    words = ("--target", models.target, "--prompts", questions, *COUNTED, "--chat")
    ended = cli("compare", *words, "--drafter", "none", "--candidate", bad, "--json")
    assert ended.status == 1
    assert list(ended.document["failed"]) == ["bad"]
    assert "chains only" in " ".join(ended.out.split())


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "Nothing was given to compare"),
        (("--drafter", "none"), "name at least two"),
        (("--drafter", "ngram", "--drafter", "ngram"), "2 candidates are called ngram"),
        (
            ("--candidate", 'a={"drafter": "none"}', "--candidate", "a={}"),
            "2 candidates are called a",
        ),
        (("--candidate", "ngram"), "write LABEL=JSON"),
        (("--candidate", "a={5"), "must be a JSON object"),
        (("--drafter", "none", "--candidate", 'a={"k": 2}'), "'k' was given for the candidate 'a'"),
        (("--drafter", "none", "--drafter", "ngram", "--resume"), "without --output"),
        (("--drafter", "none", "--drafter", "ngram:x"), "which takes prompt_lookup_min"),
        (tuple("--drafter none --drafter ngram --draft-length 0".split()), "at least 1"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(args, sentence):
    with pytest.raises(SettingError, match=sentence):
        run(Console(), "--target", "no-such-model", *args)


def test_categories_that_are_not_there_are_refused_before_a_model_is_loaded(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "category": "qa"}\n{"prompt": "b"}\n')
    words = (
        "--target",
        "no-such-model",
        "--drafter",
        "none",
        "--drafter",
        "ngram",
        "--prompts",
        file,
    )
    for option in (("--per-category", 1), ("--by-task",)):
        with pytest.raises(PromptError, match=f"Line 2 of .* has no category, and {option[0]}"):
            run(Console(), *words, *option)
    file.write_text('{"prompt": "a", "category": "qa"}\n')
    with pytest.raises(SettingError, match="--limit and --per-category"):
        run(Console(), *words, "--limit", 1, "--per-category", 1)
