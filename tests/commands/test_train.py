"""`jaxspec train texts` and `train heads`, from documents to drafts; `train flexdraft`."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny
from written import write_texts

from jaxspec.commands.train import trial_options
from jaxspec.training.lm_runs import load_run


@pytest.mark.parametrize(  # the others: tests/training/test_train_drafters.py
    ("kind", "options"),
    [("medusa", ("--num-layers", 2)), pytest.param("clover2", (), marks=pytest.mark.slow)],
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
        *("--tokens", 600, "--output-tokens", 16, "--prompt-tokens", 4, 8, "--json"),
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


SMALL = (
    "--batch-tokens", 128, "--sequence-length", 32, "--max-length", 64,
    "--width", 16, "--feed-forward-width", 16, "--num-layers", 1, "--warmup-steps", 2,
)  # fmt: skip


def test_from_prompts_to_a_draft_model(cli, tmp_path):
    """What a model answered teaches a draft model, and the line to try it has both."""
    target = tiny.save(tmp_path, "target", text=tiny.tokenizer())
    prompts, texts, out = (tmp_path / name for name in ("prompts.txt", "texts.jsonl", "run"))
    prompts.write_text("".join(f"Why is the fox number {n} asleep?\n" for n in range(40)))
    shown = cli(
        *("train", "texts", "--target", target, "--prompts", prompts, "--chat", "--out", texts),
        *("--output-tokens", 16, "--json"),
    )
    assert shown.status == 0, shown.err
    assert shown.document["texts"] == 40
    shown = cli(
        *("train", "lm", "--teacher", target, "--corpora", texts, "--out", out),
        *(*SMALL, "--tokens", 2048, "--draft-vocab-size", 30, "--json"),
    )
    assert shown.status == 0, shown.err
    assert shown.document["steps"] == 16
    [line] = [line for line in shown.out.splitlines() if line.startswith("Try it: ")]
    assert line == (f"Try it: jaxspec generate --target {target} --draft {out}/model --prompt TEXT")
    command = [*shlex.split(line)[3:-1], "The fox", "--max-tokens", 12, "--json"]
    drafted = cli(*command).document["completions"][0]
    plain = cli(*("generate", "--target", target), *command[-5:]).document["completions"][0]
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["acceptance"]["num_draft_tokens"] > 0


def test_a_teachers_run_is_tried_as_the_model_that_it_wrote(tmp_path):
    assert trial_options(None, "runs/lm/model") == "--target runs/lm/model"
    assert trial_options("Qwen/Q", "a b/model") == "--target Qwen/Q --draft 'a b/model'"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert trial_options(str(tmp_path), "draft") == f"--target {tmp_path}/model --draft draft"


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    """And ends with the weights of one that was not."""
    (tmp_path / "corpora").mkdir()
    document = json.dumps({"text": "the quick brown fox jumps over the lazy dog. " * 40})
    (tmp_path / "corpora" / "texts.jsonl").write_text(f"{document}\n" * 24)

    def start(words):
        command = [sys.executable, "-m", "jaxspec", *map(str, words)]
        return subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def run(out):
        words = ("train", "lm", "--corpora", "corpora", "--out", out, *SMALL, "--vocab-size", 300)
        return (*words, "--tokens", 49152)

    whole = start(run("whole"))
    _, err = whole.communicate()
    assert whole.returncode == 0, err
    part, log = start(run("part")), tmp_path / "part" / "log.jsonl"
    while part.poll() is None and not (log.exists() and log.stat().st_size):
        time.sleep(0.01)
    part.send_signal(signal.SIGINT)
    _, err = part.communicate()
    assert part.returncode == 130, err
    *_, advice, last = err.splitlines()
    assert last == "interrupted"
    assert advice.startswith("to go on: jaxspec train lm --corpora corpora --out part ")
    assert advice.endswith(" --resume")
    rest = start(shlex.split(advice)[4:])
    _, err = rest.communicate()
    assert rest.returncode == 0, err
    runs = [load_run(tmp_path / name) for name in ("whole", "part")]
    leaves = [jax.tree.leaves(run.params) for run in runs]
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*leaves, strict=True))


@pytest.mark.slow
def test_flexdraft_from_texts_to_drafts(cli, tmp_path):
    model = tiny.save(tmp_path, "target", text=tiny.tokenizer())
    texts, out = write_texts(tmp_path / "texts.jsonl", str(model)), tmp_path / "run"
    shown = cli(
        *("train", "flexdraft", "--target", model, "--texts", texts, "--out", out),
        *("--layers", 1, "--block", 4, "--rank", 8, "--json"),
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
