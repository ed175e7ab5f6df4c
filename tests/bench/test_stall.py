"""The stall bench: what it reports of a stream during which a long prompt arrives."""

import tiny

from jaxspec.bench.prefill_interference import Stall


def test_gaps_of_a_stream_are_reported_by_chunk_size(tmp_path):
    target = tiny.save(tmp_path, "target", text=tiny.tokenizer())
    bench = Stall(
        target=str(target), draft=str(target), chunks=(16, 64), prompt_tokens=64, repeats=1
    )
    document = bench.run()
    assert [found["prefill_chunk"] for found in document["results"]] == [16, 64]
    for found in document["results"]:
        assert 0 < found["usual_gap_ms"]
        assert 0 < found["longest_gap_ms"] <= found["first_token_ms"]
        ratio = found["longest_gap_ms"] / found["usual_gap_ms"]
        assert found["longest_over_usual"] == ratio
    assert "json" not in document["config"]
