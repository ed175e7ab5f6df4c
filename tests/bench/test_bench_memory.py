"""`jaxspec bench memory`: the same tokens in fewer bytes."""

import io
import json

import pytest
from rich.console import Console

from jaxspec.bench.memory import MemoryBench


def test_the_plan_takes_fewer_bytes_for_the_same_tokens(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"turns": ["Once upon a time", "And then"]}) + "\n")
    console = Console(file=io.StringIO(), width=120)
    bench = MemoryBench(prompts=questions, max_tokens=6, draft_lengths=(2, 3), repeats=1)
    found = bench.run(console)
    assert found["holds"]
    assert found["is_equal"]
    assert found["num_turns"] == 2
    free, plan = found["results"]
    assert free["num_tokens"] == plan["num_tokens"] == 12
    assert plan["generation_bytes"] < free["generation_bytes"]
    for each in found["results"]:
        state_bytes = each["kv_bytes"] + each["buffers_bytes"]
        assert each["measured_state_bytes"] == state_bytes
    total = sum(
        count for name, count in found["baseline_bytes"].items() if name != "generation_bytes"
    )
    assert found["baseline_bytes"]["generation_bytes"] == total
    wanted = 1 - plan["generation_bytes"] / total
    assert plan["less_than_baseline"] == pytest.approx(wanted)
    assert "baseline policy takes" in console.file.getvalue()
