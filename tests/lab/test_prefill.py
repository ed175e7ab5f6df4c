"""Prefill interference: what is reported of a stream during which a long prompt arrives."""

import tiny
from rich.console import Console

from jaxspec.lab.bench.prefill import PrefillBench


def test_gaps_of_a_stream_are_reported_by_chunk_size(tmp_path):
    target = tiny.save(tmp_path, "target", text=tiny.tokenizer())
    bench = PrefillBench(
        target=str(target), draft=str(target), chunks=(16, 64), prompt_tokens=64, repeats=1
    )
    document = bench.run(Console(quiet=True))
    assert [found["prefill_chunk"] for found in document["results"]] == [16, 64]
    for found in document["results"]:
        assert 0 < found["usual_gap_ms"]
        assert 0 < found["longest_gap_ms"] <= found["first_token_ms"]
        ratio = found["longest_gap_ms"] / found["usual_gap_ms"]
        assert found["longest_over_usual"] == ratio
    assert not {"json", "out"} & set(document["config"])
