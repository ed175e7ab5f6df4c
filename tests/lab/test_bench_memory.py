"""`jaxspec bench memory`: the same tokens in fewer bytes."""

import io
import json

import pytest
from rich.console import Console

from jaxspec.lab.bench import memory
from jaxspec.load.models import load_model


@pytest.mark.slow
def test_the_plan_takes_fewer_bytes_for_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "DRAFT_LENGTHS", (2, 3))
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"turns": ["Once upon a time", "And then"]}) + "\n")
    console = Console(file=io.StringIO(), width=160)
    bench = memory.memory(prompts=questions, max_tokens=6, repeats=1)
    found = bench.run(console)
    assert found["holds"]
    free, plan, int8 = found["results"]
    assert [each["num_tokens"] for each in found["results"]] == [12, 12, 12]
    assert plan["num_equal_turns"] == plan["num_turns"] == 2
    assert int8["generation_bytes"] < plan["generation_bytes"] < free["generation_bytes"]
    assert "int8 KV of the target" in int8["sentence"]
    assert 0 < plan["num_reused_tokens"] < plan["num_prompt_tokens"]
    # The plans are for what the chat needed, not for all that the model could take.
    assert found["context"] == found["longest_prompt"] + 6
    assert found["plans"]["plan"]["chosen"]["settings"]["max_length"] == 128
    total = sum(
        count for name, count in found["baseline_bytes"].items() if name != "generation_bytes"
    )
    assert found["baseline_bytes"]["generation_bytes"] == total
    assert plan["less_than_baseline"] == pytest.approx(1 - plan["generation_bytes"] / total)
    without = found["without_draft_logits"]
    assert without < total
    assert plan["less_without_draft_logits"] == pytest.approx(
        1 - plan["generation_bytes"] / without
    )
    assert "baseline policy takes" in console.file.getvalue()


@pytest.mark.slow
def test_a_chat_reuses_its_answers(tmp_path, monkeypatch):
    """Other than lines of text, where the line break before an answer was not there when it was
    emitted, so that the second turn reads it again."""

    def with_template(name, **options):
        model = load_model(name, **options)
        model.tokenizer.hf.chat_template = "{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
        return model

    monkeypatch.setattr(memory, "DRAFT_LENGTHS", (2,))
    monkeypatch.setattr(memory, "load_model", with_template)
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"turns": ["Once upon a time", "And then"]}) + "\n")
    reread = {}
    for is_chat in (False, True):
        bench = memory.memory(prompts=questions, chat=is_chat, max_tokens=6, repeats=1)
        found = bench.run(Console(quiet=True))
        assert found["holds"]
        reread[is_chat] = found["results"][1]["num_reread_tokens"]
    assert reread[True] < reread[False] == 5
