"""`jaxspec train texts` and `train heads`, from documents to drafts; `train flexdraft`."""

from __future__ import annotations

import json

import pytest
import tiny
from written import write_texts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hydra", ("--own-heads",)),
        ("clover", ("--block", "attention", "--gate", "cosine")),
    ],
)
@pytest.mark.filterwarnings("ignore::jaxspec.errors.JaxspecWarning")
def test_from_documents_to_drafts(cli, tmp_path, kind, options):
    """The commands one after another; what was trained drafts, and the output is the target's."""
    model = tiny.save(tmp_path, "target", text=tiny.tokenizer())
    (tmp_path / "corpora").mkdir()
    lines = [{"source": f"{i}", "text": f"The fox {i} sleeps. " * 9} for i in range(40)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "corpora" / "tales.jsonl").write_text(text)
    texts, out = tmp_path / "texts.jsonl", tmp_path / "run"
    shown = cli(
        *("train", "texts", "--target", model, "--corpora", tmp_path / "corpora", "--out", texts),
        *("--tokens", 600, "--output-tokens", 16, "--max-prompt-tokens", 8, "--json"),
    )
    assert shown.status == 0, shown.err
    assert shown.document["tokens"] >= 600
    shown = cli(
        *("train", "heads", "--kind", kind, "--target", model, "--texts", texts, "--out", out),
        *("--tokens", 1024, "--batch-tokens", 128, "--sequence-length", 64, "--num-heads", 3),
        *("--warmup-steps", 2, "--json", *options),
    )
    assert shown.status == 0, shown.err
    assert shown.document["steps"] == 8
    assert "head 3" in shown.out
    drafted = cli(
        *("generate", "--target", model, "--drafter", f"heads:{out / 'heads'}"),
        *("--prompt", "The fox", "--max-tokens", 12, "--json"),
    )
    plain = cli("generate", "--target", model, "--prompt", "The fox", "--max-tokens", 12, "--json")
    assert drafted.status == plain.status == 0, drafted.err
    tokens = [d.document["completions"][0]["token_ids"] for d in (drafted, plain)]
    assert tokens[0] == tokens[1]


def test_flexdraft_from_texts_to_drafts(cli, tmp_path):
    model = tiny.save(tmp_path, "target", text=tiny.tokenizer())
    texts, out = write_texts(tmp_path / "texts.jsonl", str(model)), tmp_path / "run"
    shown = cli(
        *("train", "flexdraft", "--target", model, "--texts", texts, "--out", out),
        *("--layers", 1, "--block", 4, "--rank", 8, "--anchors", 8, "--json"),
        *("--tokens", 1024, "--batch-tokens", 128, "--sequence-length", 64),
        *("--warmup-steps", 2),
    )
    assert shown.status == 0, shown.err
    assert shown.document["steps"] == 8
    assert "slot 3" in shown.out
    for mode in ("parallel", "sequential"):
        drafted = cli(
            *("generate", "--target", model, "--draft", out / "flexdraft"),
            *("--drafter-args", json.dumps({"mode": mode})),
            *("--prompt", "The fox", "--max-tokens", 12, "--draft-length", 3, "--json"),
        )
        plain = cli(
            *("generate", "--target", model, "--prompt", "The fox", "--max-tokens", 12, "--json")
        )
        assert drafted.status == plain.status == 0, drafted.err
        tokens = [d.document["completions"][0]["token_ids"] for d in (drafted, plain)]
        assert tokens[0] == tokens[1]
