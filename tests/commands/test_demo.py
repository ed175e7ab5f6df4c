"""`jaxspec demo`: its figures, and how it shows them."""

from __future__ import annotations

import dataclasses
import io

import pytest
import tiny
from rich.console import Console

from jaxspec.commands import demo
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.engine import Engine
from jaxspec.lab import compare
from jaxspec.load.models import load_model
from jaxspec.requests.completions import Completion
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import Origin

RUN_KEYS = {
    "drafter",
    "batch_size",
    "tokens_per_s",
    "speedup_vs_plain",
    "rounds",
    "emitted_per_round",
    "per_position_acceptance",
    "equal_to_plain",
    "engine",
    "compile_s",
    "run_s",
}


def check(document, *, max_tokens, batch_sizes, draft):
    assert document["command"] == "demo"
    assert document["all_equal_to_plain"] is True
    assert len(document["inputs"]["prompts.jsonl"]) == 64
    assert {"config", "exactness", "versions", "devices", "commit", "elapsed_s"} <= document.keys()
    runs = document["runs"]
    names = ["none", f"draft_model:{draft}", "ngram:1-4"]
    assert [(run["batch_size"], run["drafter"]) for run in runs] == [
        (size, name) for size in batch_sizes for name in names
    ]
    for run in runs:
        assert run.keys() >= RUN_KEYS
        assert run["equal_to_plain"] is True
        assert run["num_tokens"] == max_tokens * run["num_prompts"]
        assert run["emitted_per_round"] == run["num_tokens"] / run["rounds"]
        assert len(run["run_s"]) == 1
        if run["drafter"] == "none":
            assert run["speedup_vs_plain"] == 1
            assert run["rounds"] == run["num_tokens"]
            assert run["per_position_acceptance"] == []
        else:  # one window in common
            assert run["engine"]["verify_length"] == 5
            rates = run["per_position_acceptance"]
            assert rates == sorted(rates, reverse=True)


@pytest.fixture
def tiny_pair(models, monkeypatch):
    pair = {"demo-target": models.target, "demo-draft": models.draft}

    def load(name, *, dtype):
        return load_model(pair[name], dtype=dtype)

    monkeypatch.setattr(demo, "load_packed", load)
    return pair


@pytest.mark.slow
def test_demo(cli):
    result = cli("demo", "--max-tokens", 8, "--repeats", 1, "--json")
    assert result.status == 0, result.err
    check(result.document, max_tokens=8, batch_sizes=(1, 8), draft="demo-draft")


class WrongEngine(Engine):
    """Its n-gram drafts change the last token of every output."""

    def run(self, requests, *, speculate=True, **options):
        for made in super().run(requests, speculate=speculate, **options):
            if speculate and isinstance(self.drafter, NGram):
                *ids, last = made.token_ids
                made = dataclasses.replace(made, token_ids=(*ids, (last + 1) % 256))
            yield made


@pytest.mark.parametrize("is_wrong", [pytest.param(False, marks=pytest.mark.slow), True])
def test_outputs_are_compared_with_plain_decoding(cli, tiny_pair, monkeypatch, is_wrong):
    if is_wrong:
        monkeypatch.setattr(compare, "Engine", WrongEngine)
    args = ("--max-tokens", 6, "--repeats", 1, "--batch-sizes", 2)
    result = cli("demo", *args, "--json")
    assert result.status == 0, result.err
    document = result.document
    if not is_wrong:
        check(document, max_tokens=6, batch_sizes=(2,), draft=str(tiny_pair["demo-draft"]))
        assert "speculation pays at small batches" in " ".join(result.out.split())
        assert "~the target's correction" in result.out
    assert document["all_equal_to_plain"] is not is_wrong
    assert [run["equal_to_plain"] for run in document["runs"]] == [True, True, not is_wrong]
    assert [run["num_prompts"] for run in document["runs"]] == [4] * 3
    assert ("this is a bug" in result.out) == is_wrong
    assert ("Every output equals plain decoding" in result.out) != is_wrong
    # As wide as it gets, the table fits into 80 columns.
    wide = {"per_position_acceptance": [1, 0.99, 0.98, 0.97], "label": "draft model"}
    console = Console(file=io.StringIO(), width=80)
    console.print(demo.runs_table([run | wide for run in document["runs"]]))
    rows = [line for line in console.file.getvalue().split("\n") if " 100 99 98 97 " in line]
    assert len(rows) == 3  # nothing is folded
    assert sum("NO" in row for row in rows) == is_wrong
    assert sum("yes" in row for row in rows) == 2 - is_wrong


def test_prompts_are_ragged_and_from_every_domain():
    target = tiny.model(text=tiny.tokenizer())
    prompts = demo.choose_prompts(target)
    domains = {}
    for line in demo.sample_prompts():
        domains.setdefault(line.fields["domain"], []).append(
            tuple(target.tokenizer.encode(line.prompt))
        )
    assert len(domains) == 4
    assert len(set(prompts)) == 16
    for start in range(0, 16, 4):
        together = prompts[start : start + 4]
        assert all(sum(p in texts for p in together) == 1 for texts in domains.values())
    assert max(map(len, prompts)) > 3 * min(map(len, prompts))


def completion(pieces, origins):
    return Completion(
        request_id="0",
        prompt_token_ids=tuple(tiny.tokenizer().encode("[bold]x[/bold] \\[y]")),
        token_ids=tuple(range(len(pieces))),
        text="".join(pieces),
        finish_reason="length",
        stop_reason=None,
        acceptance=Acceptance(),
        origins=tuple(origins),
        pieces=tuple(pieces),
    )


SHOWN = completion(
    ["a", "[red]", "c", "\n", "e", "f"],
    [
        Origin.ACCEPTED,
        Origin.ACCEPTED,
        Origin.BONUS,
        Origin.CORRECTED,
        Origin.PLAIN,
        Origin.ACCEPTED,
    ],
)


def test_marks_without_colours():
    assert demo.marked_text(SHOWN) == "[a[red]]+c~\ne[f]"


def test_more_rows_than_prompts_are_refused(refused):
    assert "from 1 to 16" in refused("demo", "--batch-sizes", 1, 17)


@pytest.mark.parametrize("colour", [None, "truecolor"])
def test_square_brackets_are_shown_as_they_are(colour):
    console = Console(
        file=io.StringIO(), color_system=colour, force_terminal=bool(colour), width=80
    )
    demo.show_completions(console, tiny.model(text=tiny.tokenizer()), [SHOWN])
    shown = console.file.getvalue()
    assert "[bold]x[/bold] \\[y]" in shown
    assert "[red]" in shown
    assert ("\x1b[32m" in shown) == bool(colour)
