"""`jaxspec audit`: runs, files, snippets, and everything it refuses."""

import json

import pytest

from jaxspec.audit.snippets import NAMES, snippet


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "prompts.txt"
    path.write_text("Once upon a time\ndef f(x):\nThe end\n")
    return path


def settings(models):
    return (
        "--target", models.target, "--max-tokens", 9, "--batch-size", 2, "--max-length", 100,
        "--draft-length", 3,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_with_tables_page_and_json(cli, models, prompts, tmp_path):
    page = tmp_path / "report.html"
    result = cli(
        "audit", *settings(models), "--draft", models.draft, "--prompts", prompts,
        "--limit", 5, "--temperature", 0.7, "--top-p", 0.9, "--html", page, "--json",
    )  # fmt: skip
    assert result.status == 0, result.err
    for column in ("E1", "E2", "E3", "E4", "E5", "distribution"):
        assert column in result.out
    assert "Promise: bit-exact" in result.out
    assert "raw string metrics" in result.out
    audit = result.document["audit"]
    assert audit["holds"] is True
    assert (audit["num_requests"], audit["num_sampled"]) == (5, 5)
    assert {name: level["holds"] for name, level in audit["levels"].items()} == {
        **dict.fromkeys(("E1", "E2", "E3", "E4", "E5", "distribution"), True),
        "tables": None,
    }
    assert "sampled tokens can show" in result.out
    assert audit["study_metrics"]["exact"] == 1
    assert audit["probe"]["holds"] is True
    assert result.document["inputs"].keys() == {prompts.name}
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_a_run_with_kv_in_int8_says_how_far_it_is_from_full_kv(cli, refused, models, prompts):
    kv = ("--kv-dtype", "int8", "--drafter-args", '{"kv_dtype": "int8"}')
    options = ("audit", *settings(models), "--prompts", prompts)
    result = cli(*options, "--draft", models.draft, *kv, "--json")
    assert result.status == 0, result.err
    audit = result.document["audit"]
    assert audit["holds"] is True
    assert (audit["engine"]["kv_dtype"], audit["engine"]["draft_kv_dtype"]) == ("int8", "int8")
    distance = audit["kv_distance"]
    assert distance["kv_dtype"] == "int8"
    assert distance["num_tokens"] > 27
    assert 0 < distance["mean_kl"] < distance["max_kl"]
    assert "full KV" in result.out
    message = refused(*options, "--drafter", "ngram", *kv)
    assert "kv_dtype was given for the drafter ngram, which takes" in message


def test_a_greedy_run_of_a_lossy_verifier_says_so(cli, models, prompts):
    result = cli(
        "audit", *settings(models), "--drafter", "ngram", "--prompts", prompts, "--verifier",
        "typical", "--json",
    )  # fmt: skip
    audit = result.document["audit"]
    assert audit["promise"].startswith("lossy")
    assert audit["holds"] is True  # greedy rows are the target's own
    assert audit["levels"]["E3"]["reason"] == "no request is sampled"


def test_a_file_of_outputs(cli, models, tmp_path):
    made = tmp_path / "made.jsonl"
    options = ("--target", models.target, "--max-tokens", 9, "--max-length", 100)
    cli("generate", *options, "--prompt", "The end", "--output", made)
    line = json.loads(made.read_text())
    ids = {name: line[name] for name in ("prompt_token_ids", "token_ids")}
    header = {"engine": "other", "dtype": "fp32", "max_tokens": 9}
    outputs = tmp_path / "outputs.jsonl"
    outputs.write_text(f"{json.dumps(header)}\n{json.dumps(ids)}\n")
    audit = ("audit", "--target", models.target, "--outputs", outputs, "--json")
    result = cli(*audit)
    assert result.status == 0, result.err
    assert result.document["audit"]["greedy"]["exact"] == 1
    assert result.document["audit"]["dtype"] == "float32"

    ids["token_ids"][4] = (ids["token_ids"][4] + 1) % 200 + 2
    outputs.write_text(f"{json.dumps(header)}\n{json.dumps(ids)}\n")
    result = cli(*audit, "--dtype", "bfloat16", "--html", tmp_path / "r.html")
    found = result.document["audit"]
    assert result.status == 3
    assert found["holds"] is False
    assert found["dtype"] == "bfloat16"
    assert (found["divergences"][0]["line"], found["divergences"][0]["index"]) == (2, 4)
    assert "fault" in result.out

    outputs.write_text(f"{json.dumps(header)}\n{json.dumps(ids | {'token_ids': []})}\n")
    result = cli(*audit)
    assert result.status == 3
    assert "1 without a stop token before max_tokens" in result.out
    assert (tmp_path / "r.html").exists()


def test_a_directory_of_files_and_one_that_they_are_compared_with(cli, models, tmp_path):
    """Plain decoding, and the same with one wrong token; progress goes to the log, line by line."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    made = tmp_path / "made.jsonl"
    options = [*settings(models), "--max-tokens", 9, "--batch-size", 1]
    cli("generate", *options, "--prompt", "The end", "--output", made)
    line = json.loads(made.read_text())
    ids = {name: line[name] for name in ("prompt_token_ids", "token_ids")}
    header = {"engine": "other", "dtype": "fp32", "max_tokens": 9}
    (folder / "plain.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(ids)}\n")
    ids["token_ids"][4] = (ids["token_ids"][4] + 1) % 200 + 2
    (folder / "drafted.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(ids)}\n")
    audit = ("audit", "--target", models.target, "--outputs", folder, "--json")
    result = cli(*audit, "--against", folder / "plain.jsonl", "--html", tmp_path / "r.html")
    assert result.status == 3
    assert "judged 1 of 1 outputs of drafted" in result.err
    assert "1 of 2 files are the target's own up to ties" in result.out
    found = result.document["audit"]
    assert {name: file["holds"] for name, file in found["files"].items()} == {
        "drafted": False,
        "plain": True,
    }
    (difference,) = found["comparisons"]["drafted"]["differences"]
    assert (difference["index"], difference["finding"]) == (4, "fault")
    assert "weights rounded to float32 (digest " in found["files"]["plain"]["reference"]
    assert len(result.document["inputs"]) == 2
    assert "drafted" in (tmp_path / "r.html").read_text()

    (tmp_path / "empty").mkdir()
    result = cli("audit", "--target", models.target, "--outputs", tmp_path / "empty")
    assert result.status == 1
    assert "has no file *.jsonl" in result.err


def test_snippets_are_printed_as_they_are(cli):
    for name in NAMES:
        assert cli("audit", "--snippet", name).out == snippet(name)


@pytest.mark.slow
def test_controls(cli):
    result = cli("audit", "--json", "--controls")
    assert result.status == 0
    controls = result.document["controls"]
    assert len(controls) > 10
    for control in controls:
        assert {"name", "invariant", "caught", "control_passes"} <= control.keys()
        assert control["caught"], control
        assert control["control_passes"], control


NGRAM = ("--target", "TARGET", "--drafter", "ngram")
REFUSED = {
    (): "No target was given",
    ("--target", "TARGET"): "No drafter was given, so there is nothing to audit",
    ("--target", "TARGET", "--outputs", "none.jsonl"): "cannot be read",
    (*NGRAM, "--outputs", "x"): "Both --outputs and",
    (*NGRAM, "--draft-length", 9, "--engine-args", '{"verify_length": 4}'): "9",
    (*NGRAM, "--sampling-args", '{"n": 2}'): "those of one completion",
    (*NGRAM, "--engine-args", '{"trace": "rounds"}'): "'trace' was given in --engine-args",
    (*NGRAM, "--against", "x"): "--against and --reference-weights are for files of outputs",
    ("--controls", "--outputs", "x"): "Both --controls and --outputs",
    ("--controls", "no_such"): "There is no fault 'no_such'",
    ("--controls", "--target", "TARGET"): "for the negative controls",
}


def test_what_it_refuses(refused, models):
    for options, said in REFUSED.items():
        filled = [models.target if option == "TARGET" else option for option in options]
        assert said in refused("audit", *filled), options
