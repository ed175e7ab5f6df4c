"""The benches of one part each: small runs, and what they refuse."""

import io
import json
import os
import subprocess
import sys
import types

import pytest
import tiny
from rich.console import Console

from jaxspec.cli import main
from jaxspec.errors import SettingError
from jaxspec.lab.bench import cases, measure
from jaxspec.lab.bench.roofline import Ceilings
from jaxspec.requests.prompts import sample_prompts


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A single timed turn of everything."""
    monkeypatch.setattr(cases, "REPEATS", 1)


def run(bench) -> tuple[dict, str]:
    """The document of a bench, and what it prints."""
    console = Console(file=io.StringIO(), width=120)
    document = bench.run(console)
    return document, console.file.getvalue()


def test_a_function_becomes_a_bench():
    @measure.case("halves", {"results": ("halves", {"n": "{n}", "half": "{half:.1f}"})})
    def halves(numbers: tuple[int, ...] = (1, 2), word: str = "one") -> dict:
        """Halve numbers.

        Args:
          numbers: what is halved.
          word: nothing.
        """
        return {"results": [{"n": n, "half": n / 2} for n in numbers], "notes": [f"Said {word}."]}

    document, shown = run(halves(numbers=(3, 5)))
    assert document["command"] == "bench halves"
    assert document["config"] == {"numbers": [3, 5], "word": "one"}
    assert "2.5" in shown
    assert "Said one." in shown
    with pytest.raises(SettingError, match="--numbers 0 was given"):
        halves(numbers=(0,)).check()
    with pytest.raises(TypeError):
        halves(weights=(1,))


def test_options_of_a_case_are_explained(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Time forward passes with XLA's kernels" in shown
    for words in ("Rows decoded together", "JSON file to write", "End with one line of JSON"):
        assert words in shown


@pytest.mark.parametrize(
    ("bench", "names", "num_results"),
    [
        pytest.param(cases.kernels, ("xla", "native"), 2, marks=pytest.mark.slow),
        (cases.kv, ("int8", "own"), 2),
        pytest.param(cases.forward, ("tree", "chain"), 2, marks=pytest.mark.slow),
    ],
)
def test_forward_passes_are_timed_in_turns(bench, names, num_results, monkeypatch):
    known = Ceilings(num_bytes=1, bytes_per_s=1e10, matmul_flops_per_s=1e11, dtype="float32")
    monkeypatch.setattr(cases, "measure_ceilings", lambda *_: known)
    monkeypatch.setattr(cases, "CONTEXTS", (40,))
    for name in ("WINDOWS", "TREE_WINDOWS"):
        monkeypatch.setattr(cases, name, (3,))
    document, _ = run(bench(batch_sizes=(2,)))
    assert len(document["results"]) == num_results  # dtypes, or kernels
    for found in document["results"]:
        assert (found["batch_size"], found["window"], found["context"]) == (2, 3, 40)
        first, second = (found[f"{name}_ms"] for name in names)
        assert found["ratios"] == [found["ratio"]] == [pytest.approx(first / second)]


@pytest.mark.parametrize(
    ("bench", "expected"),
    [
        (cases.kv(batch_sizes=()), "--batch-sizes nothing was given"),
        (cases.sessions(histories=(64, 200)), "--histories 64 was given"),
        *(
            (cases.compile_time(layers=layers), "two or more numbers, rising")
            for layers in ((4,), (4, 2), (2, 2))
        ),
    ],
)
def test_options_that_nothing_can_be_measured_with_are_refused(bench, expected):
    with pytest.raises(SettingError, match=expected):
        run(bench)


@pytest.mark.slow
def test_gaps_of_a_stream_are_reported_by_the_prompts_length(tmp_path):
    target = tiny.save(tmp_path, "target", text=tiny.tokenizer())
    document, _ = run(cases.prefill(target=str(target), draft=str(target), prompt_tokens=(16, 64)))
    assert [found["prompt_tokens"] for found in document["results"]] == [16, 64]
    for found in document["results"]:
        assert 0 < found["usual_gap_ms"]
        assert 0 < found["longest_gap_ms"] <= found["first_token_ms"]
        ratio = found["longest_gap_ms"] / found["usual_gap_ms"]
        assert found["longest_over_usual"] == ratio
        assert 0 < found["short_alone_ms"]
        assert 0 < found["short_first_token_ms"]
    assert not {"json", "out"} & set(document["config"])


@pytest.mark.slow
def test_an_event_loop_with_many_streams_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "NUM_STREAMS", 10)
    monkeypatch.setattr(cases, "STREAM_TOKENS", 12)
    target = str(tiny.save(tmp_path, "target", text=tiny.tokenizer()))
    results = run(cases.streams(target=target, draft=target, repeats=1))[0]["results"]
    assert [found["rounds_per_piece"] for found in results] == [4, 4, 2, 1]
    assert [found["who"] for found in results] == ["callers", *["a driver"] * 3]
    for found in results:
        for name in ("lag", "gap", "first"):
            assert 0 < found[f"{name}_p50_ms"] <= found[f"{name}_p99_ms"] <= found[f"{name}_max_ms"]


def test_a_second_turn_prefills_only_what_is_new(monkeypatch):
    monkeypatch.setattr(cases, "ANSWER_TOKENS", 20)
    monkeypatch.setattr(cases, "ADDED_TOKENS", 9)
    document, shown = run(cases.sessions(histories=(150,)))
    assert document["holds"]
    without, in_row, on_host = document["results"]
    assert without["num_prefilled"] == without["prompt_tokens"] == 159
    # The newest token of the first turn has no KV yet.
    assert [each["num_prefilled"] for each in (in_row, on_host)] == [10, 10]
    assert [each["num_reread"] for each in (in_row, on_host)] == [0, 0]
    assert without["speedup"] == 1
    assert "session on the host" in shown


@pytest.mark.slow
def test_a_small_run_of_the_verifiers(monkeypatch):
    monkeypatch.setattr(cases, "MAX_TOKENS", 8)
    monkeypatch.setattr(cases, "NUM_OUTPUTS", 1)
    monkeypatch.setattr(cases, "sample_prompts", lambda: sample_prompts()[::6])
    document, _ = run(cases.verifiers())
    of_all = [found for found in document["results"] if found["domain"] == "all"]
    assert len(of_all) == len(cases.VERIFIERS)
    assert all(found["emitted_per_round"] > 1 for found in of_all)
    assert all(0 < found["sum_min_p_q"] < 1 for found in of_all)
    assert document["round_cost"][0]["ratio_to_greedy"] == 1


@pytest.mark.slow
def test_growth_is_measured_without_the_cache(tmp_path):
    # A cache that holds everything after the first repeat, if it were asked.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec", "bench", "compile-time", "--layers", "1", "3", "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    document = json.loads(done.stdout.strip().split("\n")[-1])
    one, three = document["results"]
    assert (one["num_layers"], three["num_layers"]) == (1, 3)
    assert all(each["cpu_s"] > 0 for each in (one, three))
    added_s = three["cpu_s"] - one["cpu_s"]
    assert three["cpu_s_per_added_layer"] == pytest.approx(added_s / 2)


def test_growth_of_a_compiler_that_takes_the_square(monkeypatch):
    def compile(target, draft):
        return 0.5 * target.config.num_layers**2, 1.0

    monkeypatch.setattr(cases, "_compile_engine", compile)
    monkeypatch.setattr(
        cases, "random_model", lambda config, dtype: types.SimpleNamespace(config=config)
    )
    monkeypatch.setattr(cases.jax.config, "update", lambda *_: None)
    results = run(cases.compile_time(layers=(1, 2, 4)))[0]["results"]
    assert [each["exponent"] for each in results[1:]] == pytest.approx([2, 2])
    assert [each["cpu_s_per_added_layer"] for each in results[1:]] == pytest.approx([1.5, 3])
