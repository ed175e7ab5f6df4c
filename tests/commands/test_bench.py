"""`jaxspec bench`: its documents, tables and refusals."""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax import lax

from jaxspec.commands import bench
from jaxspec.decode.loop import one_round
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench import measure, stages
from jaxspec.lab.bench.decode import agreement, positions_per_round
from jaxspec.lab.bench.roofline import Ceilings
from jaxspec.lab.cost import model as cost
from jaxspec.lab.cost.devices import DEVICES, Device
from jaxspec.load.models import load_model
from jaxspec.models.decoder import num_params
from jaxspec.models.registry import PRESETS
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.report import TextTable
from jaxspec.schedulers import Static


@pytest.fixture(scope="module")
def document(models, tmp_path_factory):
    """One decode bench."""
    command = bench.DecodeCommand(
        target=str(models.target),
        draft=str(models.draft),
        prompts=write_prompts(tmp_path_factory.mktemp("prompts"), 3),
        batch_sizes=(2,),
        draft_lengths=(2,),
        max_tokens=6,
        repeats=1,
    )
    return json.loads(json.dumps(command.run(bench.Console(quiet=True))))


def write_prompts(directory, num_prompts):
    """A file of prompts of eight tokens."""
    path = directory / "prompts.jsonl"
    lines = [
        json.dumps({"prompt_token_ids": [*range(first, first + 8)]})
        for first in range(3, 3 + num_prompts)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    "args",
    [
        ("bench", "predict", "--target", "qwen3-0.6b", "--draft", "qwen3-0.6b"),
        ("study", "published", "--quick"),
        ("bench", "gpu", "--dry-run"),
    ],
)
def test_the_second_run_into_one_place_is_told_of_the_first(refused, tmp_path, args):
    out = tmp_path / "results" / "out"
    out.parent.mkdir()
    with only_writer(out, during="run"):
        told = refused(*args, "--out", out)
    assert f"results/out is being written by process {os.getpid()} on" in told
    assert list(out.parent.iterdir()) == []


def test_a_bench_writes_its_file_and_leaves_no_lock(cli, tmp_path):
    out = tmp_path / "results" / "out.json"
    args = ("predict", "--target", "qwen3-0.6b", "--draft", "qwen3-0.6b", "--batch-sizes", "1")
    assert cli("bench", *args, "--out", out).status == 0
    assert json.loads(out.read_text())["command"] == "bench predict"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.slow
def test_decode_compares_every_draft_length_with_plain(document):
    runs = document["runs"]
    assert [(run["batch_size"], run["draft_length"]) for run in runs] == [(2, 0), (2, 2)]
    assert document["holds"] is True
    for run in runs:
        assert run["equal_to_plain"] is True
        assert run["num_not_ties"] == 0
        assert run["num_tokens"] == 3 * 6
        assert len(run["run_s"]) == 1
        assert run["verify_length"] == run["draft_length"] + 1
        split = run["stages_ms"]
        parts = split["draft"] + split["target"] + split["verify"] + split["other"]
        assert parts == pytest.approx(run["round_ms"])
        assert run["fraction_of_roofline"] == pytest.approx(run["roofline_ms"] / run["round_ms"])
    plain, drafted = runs
    assert plain["live_per_round"] == 3 * 6 / (6 + 6)  # two rows, then one
    assert plain["speedup_vs_plain"] == 1
    assert plain["stages_ms"]["draft"] == 0
    assert drafted["stages_ms"]["draft"] > 0
    assert drafted["stages_ms"]["verify"] > 0
    ratio = plain["run_s"][0] / drafted["run_s"][0]
    assert drafted["speedup_vs_plain"] == pytest.approx(ratio)


@pytest.mark.slow
def test_decode_shows_each_promise_with_a_draft_length_that_chooses_itself(document, models):
    if load_model(str(models.target)).is_width_invariant:
        assert [run["exactness"] for run in document["adaptive"]] == ["bitwise"]
        assert [run["verify_lengths"] for run in document["adaptive"]] == [[1, 3]]
    else:
        assert [run["exactness"] for run in document["adaptive"]] == ["bitwise", "ties"]
        assert [run["verify_lengths"] for run in document["adaptive"]] == [[3], [1, 3]]
    assert document["adaptive"][0]["equal_to_plain"] is True
    for run in document["adaptive"]:
        assert run["num_not_ties"] == 0
        assert set(run["rounds_by_draft_length"]) <= {"0", "1", "2"}
        assert sum(run["rounds_by_draft_length"].values()) > 0


@pytest.mark.parametrize("kernels", [pytest.param("xla", marks=pytest.mark.slow), "native"])
def test_positions_of_a_round_are_those_of_the_trace(kernels):
    target = toy.model(num_layers=1, kernels=kernels)
    drafter = DraftModel(toy.model(seed=1, num_layers=1))
    shape = {"batch_size": 2, "max_length": 128, "scheduler": Static()}
    engine = Engine(target, drafter, draft_length=3, trace="rounds", **shape)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    completions = engine.generate(toy.prompts((9, 30, 12)), params)
    found, rounds = positions_per_round(engine, completions.acceptance), completions.rounds()
    live = (len(rounds) + rounds.drafted.sum()) / int(engine.state.num_rounds)
    assert 2 < live < 2 * 4
    assert found == {
        "live_per_round": pytest.approx(live),
        "computed_per_round": pytest.approx(live) if kernels == "native" else 2 * 4,
    }


@pytest.mark.slow
def test_an_oracle_drafts_for_random_weights_at_the_cost_of_a_draft_model(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    llama = {"family": "llama", "has_qk_norm": False}
    monkeypatch.setitem(PRESETS, "tiny-target", toy.config(**llama))
    monkeypatch.setitem(PRESETS, "tiny-draft", toy.config(num_layers=1, **llama))
    command = bench.DecodeCommand(
        target="random:tiny-target",
        draft="random:tiny-draft",
        oracle=0.75,
        against="hf",
        batch_sizes=(2,),
        draft_lengths=(2,),
        prompts=write_prompts(tmp_path, 4),
        max_tokens=40,
        repeats=1,
    )
    found = command.run(bench.Console(quiet=True))
    assert found["holds"]
    plain, drafted = found["runs"]
    assert (plain["is_synthetic"], drafted["is_synthetic"]) == (False, True)
    assert drafted["drafter"] == "oracle:0.75 (synthetic, cost of draft_model:random:tiny-draft)"
    assert drafted["per_position_acceptance"][0] == pytest.approx(0.75, abs=0.15)
    assert drafted["stages_ms"]["draft"] > 0
    assert set(found["cost_model"]["fits"]) == {"all", "target", "draft"}
    assert {pair["hf"] for pair in found["against"]} == {"hf greedy"}
    assert any("synthetic" in sentence for sentence, _ in command.remarks(found))


def test_the_embedded_pair_is_written_for_transformers_to_read():
    pytest.importorskip("torch")
    command = bench.DecodeCommand(against="hf")
    command.check()
    target = load_model("demo-target", dtype="float32")
    models = {"target": target, "draft": load_model("demo-draft", dtype="float32")}
    hf = command._load_hf(SimpleNamespace(models=models))
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    [done] = Engine(target, batch_size=1).generate([prompt], params)
    assert hf.greedy([prompt], max_new_tokens=12) == [list(done.token_ids)]
    assisted = hf.assisted([prompt], draft_length=3, max_new_tokens=12)
    assert assisted == [list(done.token_ids)]


def test_the_pair_for_cpus_has_the_sizes_that_it_is_named_for():
    target, draft = (num_params(PRESETS[name]) for name in ("llama-635m", "llama-65m"))
    assert (round(target / 1e6), round(draft / 1e6)) == (635, 65)


def test_the_roofline_is_bytes_over_the_bandwidth_that_was_measured(document):
    ceilings = document["ceilings"]["target"]
    plain = document["runs"][0]
    assert (
        plain["roofline_ms"] >= 1e3 * ceilings["num_bytes"] / ceilings["bytes_per_s"]
    )  # weights alone
    assert document["runs"][1]["roofline_ms"] > plain["roofline_ms"]


def test_decode_fits_the_cost_model_and_holds_points_out(document):
    model = document["cost_model"]
    assert set(model["fits"]) == {"all", "target", "draft"}
    assert "passes" not in model  # raw timings
    for fit in model["fits"].values():
        assert fit["num_held_out"] == (fit["num_held_out"] + fit["num_fitted"]) // 3
        assert fit["held_out_error_median"] <= fit["held_out_error_worst"]
        Device.from_json(fit["device"])
    assert all(run["predicted"]["round_ms"] > 0 for run in document["runs"])
    assert document["round_error"]["worst"] >= document["round_error"]["median"]


def test_documents_name_no_directories(document, models):
    assert str(models.target.parent) not in json.dumps(document)


def test_tables_fit_80_columns(document, capsys):
    console = bench.Console(width=80)
    pair = {
        "batch_size": 8,
        "hf": "hf assisted, matched 16",
        "ours": "n-gram 16",
        "hf_tokens_per_s": 1234.0,
        "tokens_per_s": 12345.0,
        "ratio_to_hf": 3.5,
        "num_equal": 24,
    }
    for table in bench.DecodeCommand().tables({**document, "against": [pair]}):
        console.print(table)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "3.50x" in shown
    assert max(map(len, shown.split("\n"))) <= 80
    assert shown.count("tokens/s") > 2


def test_a_column_is_a_format_string_or_a_function():
    columns = {"ms": "{run[ms]:.1f}", "name": "{name}", "twice": lambda found: 2 * found["n"]}
    records = [{"run": {"ms": 1.25}, "name": "a", "n": 1}, {"run": {"ms": None}, "n": 2}]
    table = TextTable.of_columns("", columns, records)
    assert table.rows == [["1.2", "a", "2"], ["-", "-", "4"]]  # what is missing is a dash
    with pytest.raises(ValueError, match="format"):  # a mistake in a column is not missing data
        TextTable.of_columns("", {"name": "{name:.1f}"}, records[:1])


def test_predict_reads_the_constants_of_a_document(document, models, tmp_path, cli):
    path = tmp_path / "device.json"
    path.write_text("a table\n" + json.dumps(document) + "\n")
    own = ["--target", models.target, "--draft", models.draft]
    result = cli("bench", "predict", *own, "--device", path, "--batch-sizes", "2", "--json")
    fits = document["cost_model"]["fits"]
    assert result.document["target_device"] == fits["target"]["device"]
    assert result.document["draft_device"] == fits["draft"]["device"]
    other = cli(
        *("bench", "predict", "--target", "qwen3-8b", "--draft", "qwen3-0.6b"),
        *("--device", path, "--batch-sizes", "2", "--json"),
    )
    assert other.document["target_device"] == fits["all"]["device"]


def test_predict_prints_the_table(cli):
    result = cli(
        *("bench", "predict", "--target", "qwen3-8b", "--draft", "qwen3-0.6b"),
        *("--device", "h200", "--json"),
    )
    assert result.status == 0
    assert "not measured" in " ".join(result.out.split())
    predictions = result.document["predictions"]
    assert [p["batch_size"] for p in predictions[::3]] == [1, 2, 4, 8, 16, 32, 64]
    for found in predictions:
        assert 1 <= found["speedup"] < found["draft_length"] + 1.01
        expected = found["plain_tokens_per_s"] * found["speedup"]
        assert found["tokens_per_s"] == pytest.approx(expected)
    # 8.2 B parameters in bf16, but for the embedding, at 4.8 TB/s: no step can be faster.
    roofline_ms = 1e3 * 2 * 7.5e9 / 4.8e12
    assert predictions[0]["plain_ms"] > roofline_ms
    longest = [p["draft_length"] for p in predictions if p["acceptance"] == 0.8]
    assert longest[0] > longest[-1] > 0


def test_predict_takes_measured_acceptance(cli):
    result = cli(
        *("bench", "predict", "--target", "vicuna-7b", "--draft", "vicuna-68m"),
        *("--batch-sizes", "1", "--per-position", "0.8", "0.6", "0.1", "--json"),
    )
    (found,) = result.document["predictions"]
    pair = cost.Pair(
        target=PRESETS["vicuna-7b"],
        target_device=DEVICES["h200"],
        draft=PRESETS["vicuna-68m"],
        draft_device=DEVICES["h200"],
    )
    where = {"batch": 1, "context": 1024}
    assert (found["draft_length"], found["speedup"]) == pair.best_draft_length(
        **where, acceptance=(0.8, 0.6, 0.1)
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("decode --drafter none", "nothing to compare"),
        ("decode --batch-sizes 0", "--batch-sizes 0"),
        ("decode --draft-lengths 0", "--draft-lengths 0"),
        ("decode --repeats 0", "--repeats 0"),
        (
            "decode --against hf --target Qwen/Qwen3-8B --drafter ngram",
            "is no Hugging Face directory, not of the embedded pair and not random:PRESET",
        ),
        (
            "decode --target random:llama-635m --drafter ngram --oracle 0.8",
            "--oracle was given without a draft model",
        ),
        ("predict --device abacus", "neither one of"),
        ("predict --acceptance 1.0", "they are probabilities"),
        ("predict --per-position 0.5 0.6", "cumulative"),
        ("predict --context 0", "at least 1"),
    ],
)
def test_options_that_nothing_can_be_measured_with_are_refused(refused, options, expected):
    assert expected in refused("bench", *options.split())


def test_agreement_tells_a_fault_from_equality():
    target = toy.model()
    done = Engine(target, batch_size=2, max_length=128).generate(
        toy.prompts([5, 9]), SamplingParams(max_tokens=8)
    )
    theirs = [list(completion.token_ids) for completion in done]
    assert agreement(target, done, theirs) == (2, 0)
    theirs[1][4] = (theirs[1][4] + 1) % toy.VOCAB  # sabotage
    assert agreement(target, done, theirs) == (1, 1)


@pytest.fixture(scope="module")
def engine():
    return Engine(
        toy.model(),
        DraftModel(toy.model(seed=1)),
        scheduler=Static(),
        draft_length=3,
        batch_size=2,
        max_length=128,
    )


@pytest.fixture(scope="module")
def middle(engine):
    measure.fill_mid_decode(engine.executor, toy.prompts([4, 11]), num_tokens=6, draft_length=3)
    state = jax.tree.map(jnp.copy, engine.executor.state)
    engine.reset()
    return state


@pytest.mark.slow
def test_a_state_in_mid_decode_goes_on_as_an_uninterrupted_run(engine, middle):
    prompts = toy.prompts([4, 11])
    expected = engine.generate(prompts, SamplingParams(max_tokens=18, ignore_eos=True))
    assert np.array_equal(middle.num_committed, [4 + 6, 11 + 6])
    parts, params = engine.executor.parts, engine.executor.params
    draft, _ = parts.drafter.propose(
        parts.shape, params["drafter"], middle.drafter, stages.batch_view(middle)
    )
    assert np.array_equal(draft.num_valid, [3, 3])
    rounds = jax.jit(lambda params, state: lax.fori_loop(0, 12, again(parts, params), state))
    after = rounds(params, middle)
    for row, (prompt, completion) in enumerate(zip(prompts, expected, strict=True)):
        first = len(prompt)
        assert after.num_committed[row] >= first + 18
        assert after.tokens[row, first : first + 18].tolist() == list(completion.token_ids)


def again(parts, params):
    return lambda _, state: one_round(parts, params, state)


def test_a_repeated_stage_computes_every_time():
    """XLA must not move what does not change out of the loop, as it does with a sort."""

    def stage(params, fixed, moving):
        return moving + 1, jnp.sort(fixed + params, axis=0)

    matrix = jnp.ones((64, 64))
    repeated = measure.Repeated(stage, matrix, matrix, jnp.int32(0))
    repeated(5)
    assert repeated._moving == 5

    def sorts_once(program):
        text = jax.jit(program).lower(matrix, matrix, jnp.int32(0), 5).compile().as_text()
        assert " sort(" in text
        return " sort(" in text[text.index("ENTRY") :]

    assert not sorts_once(repeated._program)

    def naive(params, fixed, moving, num_times):  # sabotage: nothing depends on the last time
        return lax.fori_loop(
            0, num_times, lambda _, c: stage(params, fixed, c[0]), (moving, jnp.zeros_like(fixed))
        )

    assert sorts_once(naive)


def test_the_roofline_is_the_larger_of_two():
    ceilings = Ceilings(
        num_bytes=1,
        bytes_per_s=20.0,
        matmul_flops_per_s=100.0,
        dtype="float32",
    )

    @dataclasses.dataclass
    class Work:
        num_bytes: float
        num_flops: float

    assert ceilings.pass_s(Work(40.0, 100.0)) == 2.0
    assert ceilings.pass_s(Work(40.0, 1000.0)) == 10.0
