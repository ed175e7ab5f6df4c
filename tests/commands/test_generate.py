"""`jaxspec generate`: inputs, outputs, resuming, and everything it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import resource
import shlex
import shutil
import sys
from typing import Any

import hf_checkpoints
import jax
import pytest
import tiny
from rich.console import Console

from jaxspec import Block, Coupled, Engine, NGram, Rejection, SamplingParams, Typical
from jaxspec.checkpoint.format import save_model, weights_digest
from jaxspec.cli import main
from jaxspec.commands import generate
from jaxspec.commands import options as common
from jaxspec.commands.outputs import OutputFile, round_lengths
from jaxspec.errors import JaxspecError
from jaxspec.load.drafters import make_drafter
from jaxspec.load.models import load_model
from jaxspec.requests.completions import find_stop, make_completion
from jaxspec.requests.requests import make_requests
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import Finish, Origin

PROMPTS = [
    {"prompt": "Once upon a time", "domain": "tales"},
    {"prompt_token_ids": [5, 80, 7], "question_id": 12},
    {"messages": [{"role": "user", "content": "Why?"}]},
    {"turns": ["first turn", "second turn"], "question_id": 81, "category": "math"},
    {"prompt": "def f(x):\n    return"},
]


def settings(models):
    """Options that all runs here share."""
    return (
        "--target", models.target, "--draft", models.draft, "--max-tokens", 9,
        "--batch-size", 2, "--max-length", 100, "--draft-length", 3,
    )  # fmt: skip


def read_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def token_ids(path: pathlib.Path) -> list[list[int]]:
    return [line["token_ids"] for line in read_lines(path)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)) + "\n")
    return path


@pytest.fixture(scope="module")
def whole(models, prompts, tmp_path_factory) -> pathlib.Path:
    """Output of a run that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "out.jsonl"
    args = ("generate", *settings(models), "--prompts", prompts, "--output", path)
    assert main([str(arg) for arg in args]) == 0
    return path


def test_lines_follow_the_prompts(whole):
    lines = read_lines(whole)
    text = tiny.tokenizer()
    assert [line["request_id"] for line in lines] == ["0", "1", "2", "3", "4"]
    assert lines[0]["domain"] == "tales"
    assert lines[1]["question_id"] == 12
    assert lines[1]["prompt_token_ids"] == [5, 80, 7]
    expected = {0: "Once upon a time", 2: "[user] Why?\n[assistant]", 3: "first turn"}
    for index, prompt in expected.items():
        ids = lines[index]["prompt_token_ids"]
        assert ids == text.encode(prompt)
        assert ids.count(tiny.BOS) == 1
    for line in lines:
        ended = line["finish_reason"] == "stop"
        assert len(line["token_ids"]) == 9 or ended
        assert line["text"] == text.decode(line["token_ids"])
    assert len({tuple(line["token_ids"]) for line in lines}) == len(lines)


def test_prompt_with_json(cli, models):
    prompt = "a [bold]b"
    result = cli("generate", *settings(models), "--prompt", prompt, "--ignore-eos", "--json")
    assert result.status == 0, result.err
    document = result.document
    assert document["command"] == "generate"
    assert document["engine"]["batch_size"] == 1  # not the batch size: there is one prompt
    assert document["engine"]["verify_length"] == 4
    assert document["exactness"] == "bitwise"
    assert document["config"]["draft_length"] == 3
    assert document["inputs"] == {"--prompt": hashlib.sha256(prompt.encode()).hexdigest()}
    assert document["num_completions"] == document["num_prompts"] == 1
    [completion] = document["completions"]
    assert len(completion["token_ids"]) == 9 == document["acceptance"]["num_emitted_tokens"]
    for name in ("load_s", "compile_s", "decode_s", "elapsed_s", "tokens_per_s"):
        assert document[name] > 0
    assert {"versions", "devices", "commit"} <= document.keys()
    assert "finished: length" in result.out


@pytest.mark.slow
def test_settings_as_json(cli, models, prompts, whole):
    """`--sampling-args` reach the requests, and `--engine-args` the engine."""
    args = ("generate", *settings(models), "--prompt", "Once")
    biased = '{"allowed_token_ids": [40, 41], "logit_bias": {"41": -100}}'
    result = cli(*args, "--sampling-args", biased, "--json")
    assert result.status == 0, result.err
    assert result.document["completions"][0]["token_ids"] == [40] * 9
    assert result.document["sampling"]["logit_bias"] == [[41, -100.0]]
    aligned = '{"layout": "aligned", "scheduler": "static", "check_invariants": true}'
    result = cli(*args[:-2], "--prompts", prompts, "--engine-args", aligned, "--json")
    assert result.status == 0, result.err
    document = result.document
    assert (document["engine"]["layout"], document["engine"]["scheduler"]) == ("aligned", "static")
    assert document["exactness"] == "ties"
    # These prompts meet no tie, so the output is that of the ragged layout.
    assert [c["token_ids"] for c in document["completions"]] == token_ids(whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 6])
def test_shards_joined_are_the_whole(cli, models, prompts, whole, tmp_path, number):
    """Of six shards of five prompts one is empty. Sampled too, where seeds can be seen."""
    outputs = []
    for more in ((), ("--temperature", 1, "--n", 2, "--seed", 5)):
        args = ("generate", *settings(models), "--prompts", prompts, *more, "--json")
        parts = []
        for index in range(1, number + 1):
            parts.append(tmp_path / f"{len(outputs)}-{index}.jsonl")
            result = cli(*args, "--output", parts[-1], "--shard", f"{index}/{number}")
            assert result.status == 0, result.err
        outputs.append(b"".join(part.read_bytes() for part in parts))
    assert outputs[0] == whole.read_bytes()
    path = tmp_path / "whole.jsonl"
    assert cli(*args, "--output", path).status == 0
    assert outputs[1] == path.read_bytes()
    last = parts[-1]
    last.write_bytes(last.read_bytes()[:-20])
    result = cli(*args, "--output", last, "--shard", f"{number}/{number}", "--resume")
    assert result.status == 0, result.err
    assert b"".join(part.read_bytes() for part in parts) == path.read_bytes()


def test_interrupted_run_keeps_its_lines_and_resumes(
    cli, models, prompts, whole, tmp_path, monkeypatch
):
    path = tmp_path / "out.jsonl"
    append = OutputFile.append

    def interrupt_second(self, lines, batch, first, share_s):
        if first:
            raise KeyboardInterrupt
        append(self, lines, batch, first, share_s)

    args = ("generate", *settings(models), "--prompts", prompts, "--output", path, "--json")
    with monkeypatch.context() as patched:
        patched.setattr(OutputFile, "append", interrupt_second)
        result = cli(*args)
    assert result.status == 130
    assert result.err.endswith("interrupted\n")
    assert token_ids(path) == token_ids(whole)[:2]

    # Killed in the middle of a line, on top of it.
    third = whole.read_bytes().split(b"\n")[2]
    with open(path, "ab") as file:
        file.write(third[: len(third) // 2])
    result = cli(*args, "--resume")
    assert result.status == 0, result.err
    assert result.document["num_resumed"] == 2
    assert result.document["num_completions"] == 3
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        *(
            ("whole", changes)
            for changes in (
                ("--max-tokens", 8),
                ("--verify-length", 5),
                ("--batch-size", 3),
                ("--ignore-eos",),
                ("--max-prompt-tokens", 4),
                ("--temperature", 0.5),
                ("--sampling-args", '{"logprobs": 1}'),
                ("--limit", 3),
            )
        ),
        ("sampled", ("--seed", 6)),
        ("sampled", ("--top-p", 0.9)),
        ("sampled", ("--sampling-args", '{"allowed_token_ids": [5, 6]}')),
        ("sampled", ("--verifier", "block")),
    ],
    ids=str,
)
def test_resume_with_other_settings_is_refused(
    refused, models, prompts, tmp_path, request, made, changes
):
    path, before = tmp_path / "out.jsonl", request.getfixturevalue(made).read_bytes()
    path.write_bytes(before)
    options = (*settings(models), *(SAMPLED if made == "sampled" else ()))
    # A later option replaces an earlier one of the same name.
    said = refused(
        "generate", *options, "--prompts", prompts, "--output", path, "--resume", *changes
    )
    few = "has 5 lines, and this run makes 3"
    assert (few if changes[0] == "--limit" else "Line 1 of") in said
    assert path.read_bytes() == before


def with_noise(path, destination):
    """A converted directory with other weights."""
    model = load_model(path)
    noisy = jax.tree.map(lambda leaf: leaf + 0.01, model.params)
    save_model(dataclasses.replace(model, params=noisy), destination, overwrite=True)


@pytest.mark.slow
def test_resume_with_other_weights_under_the_same_name_is_refused(
    cli, refused, models, prompts, tmp_path
):
    """The target's; and the draft model's, where these change tokens."""
    args = ("generate", *settings(models), "--prompts", prompts, "--resume")
    for role, options in (
        ("target", ()),
        ("draft", ("--verifier", "rejection", "--temperature", 1)),
    ):
        model, path = tmp_path / role, tmp_path / f"{role}.jsonl"
        shutil.copytree(getattr(models, role), model)
        run = (*args, f"--{role}", model, "--output", path, *options)
        assert cli(*run).status == 0
        before = path.read_bytes()
        with_noise(getattr(models, role), model)
        assert "Line 1 of" in refused(*run)
        assert path.read_bytes() == before
    # The same weights, written once more, are the same weights; nothing is left to decode.
    save_model(load_model(models.draft), model, overwrite=True)
    result = cli(*run, "--json")
    assert result.document["num_resumed"] == 5
    assert result.document["num_completions"] == 0
    assert result.document["tokens_per_s"] is None
    assert path.read_bytes() == before


@pytest.mark.slow
def test_checks_of_the_draft_model_can_be_left_out_too(cli, refused, models, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(models.draft, draft)
    hf_checkpoints.edit_json(draft / "jaxspec.json", source="edited by hand")
    args = ("generate", "--target", models.target, "--draft", draft, *ONE, "--max-tokens", 2)
    assert "draft/jaxspec.json was changed after it was written" in refused(*args)
    assert cli(*args, "--no-verify").status == 0


def test_resume_leaves_a_foreign_file_alone(refused, models, prompts, tmp_path):
    path = tmp_path / "notes"
    args = ("generate", *settings(models), "--prompts", prompts, "--output", path, "--resume")
    for content in ("my notes", "my notes\nand more", '{"prompt": "mine"}\n', '{"prompt"'):
        path.write_text(content)
        assert "was not written by this run" in refused(*args)
        assert path.read_text() == content


SAMPLED = ("--temperature", 0.8, "--top-p", 0.95, "--seed", 5, "--n", 2, "--ignore-eos")


@pytest.fixture(scope="module")
def sampled(models, prompts, tmp_path_factory) -> pathlib.Path:
    """Output of a sampled run that nothing interrupted."""
    path = tmp_path_factory.mktemp("sampled") / "out.jsonl"
    args = ("generate", *settings(models), *SAMPLED, "--prompts", prompts, "--output", path)
    assert main([str(arg) for arg in args]) == 0
    return path


def test_every_prompt_gives_n_lines_with_seeds_of_their_own(sampled, whole):
    lines, greedy = read_lines(sampled), read_lines(whole)
    assert [line["request_id"] for line in lines] == [f"{i}-{j}" for i in range(5) for j in (0, 1)]
    assert [line["index"] for line in lines] == [0, 1] * 5
    assert [line["seed"] for line in lines] == [5 + place for place in range(10)]
    assert [line["jaxspec"]["index"] for line in lines] == list(range(10))
    assert [line["seed"] for line in greedy] == [None] * 5
    for place, line in enumerate(lines):
        assert line["prompt_token_ids"] == greedy[place // 2]["prompt_token_ids"]
        assert len(line["token_ids"]) == 9
    assert lines[3]["question_id"] == 12
    assert len({tuple(line["token_ids"]) for line in lines}) == 10


@pytest.mark.parametrize(
    "drafting", [(), ("--drafter", "ngram", "--draft-length", 2, "--verify-length", 4)]
)
def test_a_sampled_run_resumes_after_a_cut_line(cli, models, prompts, sampled, tmp_path, drafting):
    """Also under another drafter."""
    path = tmp_path / "out.jsonl"
    content = sampled.read_bytes()
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")]
    path.write_bytes(content[: ends[2] + 30])  # three lines, in the middle of a prompt, and a bit
    options = (*SAMPLED, "--prompts", prompts, "--output", path, "--resume", "--json")
    shared = settings(models)
    if drafting:
        shared = (*shared[:2], *shared[4:-2], *drafting)  # without --draft and --draft-length
    result = cli("generate", *shared, *options)
    assert result.status == 0, result.err
    assert result.document["num_resumed"] == 3
    assert result.document["num_prompts"] == 5
    assert result.document["num_completions"] == 7
    assert token_ids(path) == token_ids(sampled)
    assert path.read_bytes() == content or drafting


def digest(verifier=None, drafter=None, draft_length=3, kernels="xla", **params):
    engine = Engine(
        dataclasses.replace(tiny.model(), kernels=kernels),
        drafter or NGram(),
        verifier=verifier,
        draft_length=draft_length,
        verify_length=6,
    )
    return generate._settings_digest(engine, SamplingParams(**params), "jsonl")


def test_a_line_depends_on_what_computes_it(monkeypatch):
    """Other kernels and devices sum in another order: their tokens are not mixed in one file."""
    on_cpu = digest()
    assert digest(kernels="pallas") != on_cpu
    with monkeypatch.context() as patch:
        patch.setattr(generate.jax, "default_backend", lambda: "tpu")
        assert digest() != on_cpu
    assert digest() == on_cpu


def test_what_a_line_depends_on():
    sampled, others = {"temperature": 0.5, "seed": 1}, {"drafter": NGram(2, 3), "draft_length": 5}
    coupled = digest(**sampled)
    # Under coupled verification no drafter, draft length or noise of the drafter's changes a token.
    assert digest(**sampled, **others) == coupled
    assert digest(Coupled(is_noise_shared=False), **sampled) == coupled
    for verifier in (Rejection(), Block(), Typical()):
        found = digest(verifier, **sampled)
        assert found != coupled
        assert digest(verifier, **sampled) == found
        for name, value in others.items():
            assert digest(verifier, **sampled, **{name: value}) != found
        # Greedy lines are the target's own under every verifier, and have no seed.
        assert digest(verifier) == digest(**others) == digest(seed=3)
    assert digest(temperature=0.5, seed=2) != coupled != digest()


def test_a_line_depends_on_every_sampling_parameter():
    engine, given = Engine(tiny.model(), NGram()), {"temperature": 0.5, "seed": 1, "n": 2}
    others = {
        "temperature": 0.7, "seed": 2, "n": 1, "max_tokens": 8, "min_tokens": 2, "top_k": 5,
        "top_p": 0.9, "min_p": 0.1, "stop": "x", "stop_token_ids": [5], "ignore_eos": True,
        "logprobs": 1, "prompt_logprobs": 1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {5: 1}, "allowed_token_ids": [5, 6],
    }  # fmt: skip
    assert others.keys() == {field.name for field in dataclasses.fields(SamplingParams)}
    params = [SamplingParams(**given | {name: others[name]}) for name in others]
    params.append(SamplingParams(**given))
    digests = {generate._settings_digest(engine, each, "jsonl") for each in params}
    assert len(digests) == len(params)


@pytest.mark.slow
def test_sampling_in_the_document(cli, models):
    result = cli(
        "generate", *settings(models), "--prompt", "Once", "--temperature", 1,
        "--sampling-args", '{"logprobs": 2}',
        "--verifier", "rejection", "--stop", "never this", "--stop", "nor this", "--json",
    )  # fmt: skip
    assert result.status == 0, result.err
    document = result.document
    assert document["verifier"] == "rejection"
    assert document["exactness"] == "distribution"
    assert document["promise"] == document["engine"]["promise"]
    assert document["sampling"]["stop"] == ["never this", "nor this"]
    [completion] = document["completions"]
    assert completion["seed"] == document["sampling"]["seed"] == 0
    assert completion["logprobs_mode"] == "raw_logprobs"
    for token, of_token in zip(completion["token_ids"], completion["logprobs"], strict=True):
        assert str(token) in of_token
        assert len(of_token) in (2, 3)


def test_a_stop_string_on_the_command_line(cli, models):
    args = ("generate", *settings(models), "--ignore-eos", "--prompt", "Once", "--json")
    [whole] = cli(*args).document["completions"]
    stop = next(character for character in whole["text"] if character != "\ufffd")
    result = cli(*args, "--stop", stop)
    assert result.status == 0, result.err
    [stopped] = result.document["completions"]
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


def test_defaults_of_the_checkpoint(cli, refused, models, monkeypatch):
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 3}
    load = common.load_packed

    def load_recommending(*args, **options):
        return dataclasses.replace(load(*args, **options), generation_config=dict(recommended))

    monkeypatch.setattr(common, "load_packed", load_recommending)
    args = ("generate", *settings(models), "--prompt", "Once", "--ignore-eos", "--json")
    plain = cli(*args).document
    assert plain["sampling"]["temperature"] == 0  # nothing is read silently
    off = ("--sampling-args", '{"top_k": 0}')
    read = cli(*args, "--generation-config", "--n", 2, *off).document
    assert read["sampling"]["temperature"] == 0.6
    assert read["sampling"]["top_k"] == 0
    assert read["num_completions"] == 2
    assert [len(c["token_ids"]) for c in read["completions"]] == [9, 9]  # --max-tokens
    recommended["num_beams"] = 4
    assert "asks for num_beams 4" in refused(*args[:-1], "--generation-config")
    recommended.clear()
    message = refused(*args[:-1], "--generation-config", "--n", 2)
    assert "n 2 was given at temperature 0" in message


def test_spec_bench_format(cli, models, tmp_path):
    prompts, path = tmp_path / "question.jsonl", tmp_path / "deep" / "answer.jsonl"
    questions = [
        {"question_id": 81 + i, "category": category, "turns": [f"Question {i}", "More?"]}
        for i, category in enumerate(("writing", "qa", "rag"))
    ]
    prompts.write_text("".join(json.dumps(question) + "\n" for question in questions))
    result = cli(
        "generate", "--target", models.target, "--drafter", "ngram", "--prompts", prompts,
        "--output", path, "--format", "spec-bench", "--max-tokens", 12, "--ignore-eos", "--chat",
        "--chat-template", "vicuna", "--max-length", 400, "--batch-size", 2,
    )  # fmt: skip
    assert result.status == 0, result.err
    lines = read_lines(path)
    assert [line["question_id"] for line in lines] == [81, 82, 83]
    assert [line["category"] for line in lines] == ["writing", "qa", "rag"]
    for line in lines:
        [choice] = line["choices"]
        assert choice["index"] == 0
        assert choice["new_tokens"] == [12]
        assert sum(choice["accept_lengths"]) == 12
        assert len(choice["accept_lengths"]) == choice["decoding_steps"][0]
        assert choice["wall_time"][0] > 0
        assert len(choice["turns"]) == 1
        assert isinstance(line["model_id"], str)


A, C, B, P = Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS, Origin.PLAIN


@pytest.mark.parametrize(
    ("origins", "lengths"),
    [
        ([], []),
        ([P, P, P], [1, 1, 1]),
        ([A, A, B, C, A, C], [3, 1, 2]),
        ([A, A, B, A], [3, 1]),  # the last round was cut by the limit or a stop token
        ([A, A], [2]),
        ([P, A, B, P], [1, 2, 1]),
    ],
)
def test_round_lengths(origins, lengths):
    assert round_lengths(origins) == lengths


def test_a_trace(cli, models, tmp_path):
    """It names the kind of each prompt, and replaces an older one."""
    pandas = pytest.importorskip("pandas")
    path, trace = tmp_path / "prompts.jsonl", tmp_path / "trace.parquet"
    lines = [{"prompt": "aa bb", "domain": "x"}, {"prompt": "cc", "domain": "y", "category": "z"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    trace.write_text("old")
    args = ("--prompts", path, "--n", 2, "--temperature", 1, "--trace", trace, "--json")
    result = cli("generate", *settings(models), *args)
    assert result.status == 0, result.err
    rounds, totals = pandas.read_parquet(trace), result.document["acceptance"]
    assert len(rounds) == totals["num_rounds"]
    assert rounds.accepted.sum() == totals["num_accepted_tokens"]
    assert "category" not in rounds  # not all prompts have one
    kinds = rounds.groupby("request_id").domain.unique().map(list).to_dict()
    assert kinds == {"0-0": ["x"], "0-1": ["x"], "1-0": ["y"], "1-1": ["y"]}
    assert [file.name for file in tmp_path.iterdir() if "trace" in file.name] == ["trace.parquet"]
    manifest = rounds.attrs["jaxspec"]
    assert (manifest["seeds"], manifest["sampling"][0]["temperature"]) == ([0, 1, 2, 3], 1)
    digest = weights_digest(load_model(str(models.target)).params)
    assert manifest["weights"]["target"]["digest"] == digest
    assert manifest["settings"]["verifier"]["class"] == "Coupled"
    assert manifest["versions"] == result.document["versions"]


@pytest.fixture
def small_files():
    """Files of this process that grow beyond 3,000 bytes are refused, as by a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_trace_that_cannot_be_written_leaves_the_older_one(tmp_path, small_files):
    pandas = pytest.importorskip("pandas")
    trace = tmp_path / "trace.parquet"
    trace.write_text("old")
    small_files()
    with pytest.raises(JaxspecError, match=r"trace.parquet cannot be written \(File too large"):
        generate.write_parquet(pandas.DataFrame({"value": range(9999)}), trace)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_an_output_that_cannot_grow_keeps_its_whole_lines_and_resumes(
    cli, models, prompts, whole, tmp_path, small_files
):
    path = tmp_path / "out.jsonl"
    args = ("generate", *settings(models), "--prompts", prompts, "--output", path, "--resume")
    small_files()
    result = cli(*args)
    assert result.status == 1
    assert "out.jsonl cannot be written (File too large); make room and run again" in result.err
    kept = path.read_bytes()
    assert whole.read_bytes().startswith(kept)
    assert kept.endswith(b"\n") or not kept
    assert 0 < len(read_lines(path)) < len(PROMPTS)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    assert cli(*args).status == 0
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_factory_drafter_in_the_current_directory(cli, refused, models, tmp_path, monkeypatch):
    (tmp_path / "my_drafters.py").write_text(
        "from jaxspec import NGram\n"
        "def of_target(target, prompt_lookup_max=3):\n"
        "    assert target.vocab_size\n"
        "    return NGram(1, prompt_lookup_max)\n"
        "def nothing(): return 3\n"
        "def two(a, b): return None\n"
    )
    (tmp_path / "broken_drafters.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())]
    )
    base = ("generate", "--target", models.target, "--prompt", "abcabcabc", "--max-tokens", 3)
    args = ("--drafter-args", '{"prompt_lookup_max": 2}')
    for own, name in (((), "ngram:1-3"), (args, "ngram:1-2")):
        result = cli(*base, "--drafter", "my_drafters:of_target", *own, "--json")
        assert result.status == 0, result.err
        assert result.document["engine"]["drafter"] == name
    assert make_drafter("jaxspec:NGram", tiny.model()) == NGram()  # a factory of nothing
    # More names that are none are in drafters/test_names.py.
    for name, message in (
        ("my_drafters:nothing", "a subclass of jaxspec.Drafter"),
        ("my_drafters:two", "needs 2 arguments"),
        ("my_drafters:absent", "AttributeError"),
        ("no_such_module:factory", "No module named"),
        ("broken_drafters:factory", "ZeroDivisionError"),
    ):
        assert message in refused(*base, "--drafter", name)


@pytest.mark.slow
def test_settings_of_a_drafter(cli, refused, models):
    base = ("generate", "--target", models.target, "--prompt", "abcabcabc", "--max-tokens", 9)
    early, tree = '{"min_confidence": 0.25}', '{"tree": "2x3:5", "kv_window": 256, "kv_sinks": 8}'
    results = [
        cli(*base, *drafter, "--json").document
        for drafter in (
            ("--draft", models.draft, "--drafter-args", early),
            ("--drafter", f"draft_model:{models.draft}", "--drafter-args", tree),
        )
    ]
    assert [document["engine"]["drafter"] for document in results] == [
        f"draft_model@0.25:{models.draft}",
        f"draft_model[2x3:5]~256+8:{models.draft}",
    ]
    tokens = [document["completions"][0]["token_ids"] for document in results]
    assert tokens[0] == tokens[1]
    for given, message in (
        ((), "was given without a drafter; add --draft or --drafter"),
        (("--drafter", "none"), "was given without a drafter; add --draft or --drafter"),
        (("--drafter", "ngram"), "min_confidence was given for the drafter ngram, which takes"),
    ):
        assert message in refused(*base, *given, "--drafter-args", early)
    assert "must be a JSON object" in refused(*base, "--drafter", "ngram", "--drafter-args", "4")


ONE = ("--prompt", "Once")


# What is given besides --target and --prompt, and what is said. Numbers out of range are in
# test_options.py.
REFUSED = {
    "--prompts some.txt": "Both --prompt and --prompts",
    "--draft-length 5 --verify-length 5 --drafter ngram": "verify_length of 5",
    "--verify-length 5": "--verify-length 5 was given without a drafter",
    "--verifier block": "--verifier block was given without a drafter",
    "--top-p 1.5 --generation-config": "top_p 1.5 was given",
    "--n 0 --generation-config": "n 0 was given",
    "--n 2": "n 2 was given at temperature 0",
    "--stop ''": "stop ('',)",
    "--sampling-args x": "must be a JSON object",
    """--sampling-args '{"min_tokens": 65}'""": "min_tokens 65",
    """--sampling-args '{"logit_bias": {"5": 101}}'""": "logit_bias",
    """--sampling-args '{"n": 2}'""": "n was given in --sampling-args, and is an option; use --n",
    """--sampling-args '{"topk": 2}'""": "There is no sampling parameter 'topk'",
    "--engine-args 5": "must be a JSON object",
    """--engine-args '{"mesh": 2}'""": "'mesh' was given in --engine-args, which take budget_bytes",
    """--engine-args '{"batch_size": 2}'""": "is an option; use --batch-size",
    """--engine-args '{"scheduler": "x"}'""": "There is no scheduler",
    """--engine-args '{"layout": 5}'""": "layout",
    "--n 2 --temperature 1 --format spec-bench --output o": "one answer per question",
    "--draft x --drafter ngram": "name one drafter",
    "--resume": "--resume was given without --output",
    "--format spec-bench": "was given without --output",
    "--format spec-bench --output o": "no question_id or no category",
    "--output /proc/none/out": "/proc/none/out cannot be written",
    "--output .": "cannot be written (Is a directory)",
    "--output /dev/full": "/dev/full cannot be written (it is a device, a pipe",
    "--output /dev/full --resume": "/dev/full cannot be written (it is a",
    "--output mine": "exists; add --resume",
    "--chat --chat-template absent.jinja": "neither 'vicuna' nor a readable file",
    "--chat-template vicuna": "add --chat",
    "--chat-template-kwargs {}": "add --chat",
    "--chat --chat-template-kwargs [1]": "must be a JSON object",
    "--trace trace.csv": "must end in .parquet",
    "--trace t.parquet --output o --resume": "with --resume",
    "--trace t.parquet --output ./t.parquet": "give each a file of its own",
    "--turns all --n 2 --temperature 1": "was given with --turns all",
    "--shard 0/2": "--shard 0/2 was given; give I/N",
    "--shard 3/2": "--shard 3/2 was given; give I/N",
    "--shard 2": "--shard 2 was given; give I/N",
    "--turns all --shard 1/2": "was given with --turns all",
    "--turns all --max-prompt-tokens 9": "was given with --turns all",
    "--turns all --output x --resume": "was given with --turns all",
    """--turns all --engine-args '{"layout": "aligned"}'""": "was given with --turns all",
    "--num-replicas 2": "--num-replicas was given without --ray",
    "--mixed-nodes": "--mixed-nodes was given without --ray",
    "--ray local": "--ray local was given; it takes --prompts FILE and --output DIRECTORY",
}
# The same with a file of prompts instead of one.
REFUSED_WITH_RAY = {
    "": "it takes --prompts FILE and --output DIRECTORY",
    "--output o --turns all": "--turns all was given with --ray, and a turn needs the answers",
    "--output o --shard 1/2": "--shard was given with --ray",
    "--output o --max-prompt-tokens 9": "--max-prompt-tokens was given with --ray, and prompts",
    "--output o --generation-config": "--generation-config was given with --ray, and sampling val",
    "--output o --trace t.parquet": "--trace was given with --ray",
    "--output o --format spec-bench": "--format spec-bench was given with --ray",
    "--output o": "ray is needed for --ray, and is not installed; install it with pip install",
}


def test_refused_before_any_model_is_loaded(refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "load_packed", lambda *_, **__: pytest.fail("loaded a model"))
    (tmp_path / "mine").write_text("mine\n")
    target = ("generate", "--target", "demo-target")
    for words, message in REFUSED.items():
        assert message in refused(*target, *ONE, *shlex.split(words)), words
    assert "No prompt was given" in refused(*target)
    assert "The prompt is empty" in refused(*target, "--prompt", "")
    absent = refused(*target, "--prompts", "absent.txt")
    assert "absent.txt cannot be read (No such file" in absent
    assert "it is a directory, not a file" in refused(*target, "--prompts", ".")
    (tmp_path / "p.txt").write_text("Once\n")
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    for words, message in REFUSED_WITH_RAY.items():
        with_ray = ("--prompts", "p.txt", "--ray", "local", *shlex.split(words))
        assert message in refused(*target, *with_ray), words
    assert (tmp_path / "mine").read_text() == "mine\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine", "p.txt"]


def test_the_settings_that_rows_of_a_cluster_are_resumed_with():
    plain = generate.GenerateCommand(target="demo-target")
    others: list[dict[str, Any]] = [
        *({"target": "demo-draft"}, {"dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"draft": "a"}),
        *({"max_length": 99}, {"batch_size": 2}, {"verifier": "typical"}, {"exactness": "ties"}),
        *({"engine_args": "{}"}, {"chat_template": "vicuna"}, {"chat_template_kwargs": "{}"}),
    ]
    for other in others:
        changed = dataclasses.replace(plain, **other)
        assert changed.settings_of_rows() != plain.settings_of_rows(), other
    elsewhere = dataclasses.replace(plain, ray="auto", num_replicas=2, resume=True, limit=3)
    assert elsewhere.settings_of_rows() == plain.settings_of_rows()


def test_refused_with_the_models_at_hand(refused, models, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n\n" + "long " * 40 + "\n")
    base = ("generate", "--target", models.target)
    long = refused(*base, "--prompts", prompts, "--max-length", 128, "--drafter", "ngram")
    assert "Line 3 of the prompt file has 201 tokens" in long
    assert "leaves room for 124" in long
    different = refused(*base, *ONE, "--draft", models.other_tokenizer)
    assert "different tokenizers" in different
    wide = refused(*base, *ONE, "--drafter", "ngram", "--verify-length", 500, "--max-length", 128)
    assert "verify_length of 500 does not fit a max_length of 128" in wide
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\nthree\n")
    sampled = ("--temperature", 1, "--seed", 2**63 - 2)
    assert (
        "The seed 9223372036854775806 was given for 3 completions, which have consecutive seeds"
        in refused(*base, "--prompts", few, *sampled)
    )
    template = refused("generate", "--target", models.no_template, *ONE, "--chat")
    assert "has no chat template; name one with --chat-template" in template
    text = refused("generate", "--target", models.no_tokenizer, *ONE)
    assert "The prompt is text, but the model" in text
    prompts.write_text('{"prompt_token_ids": [1]}\n{"prompt_token_ids": [1, 258]}\n')
    outside = refused("generate", "--target", models.no_tokenizer, "--prompts", prompts)
    assert "Line 2 of the prompt file holds the token id 258" in outside
    assert "There is no preset" in refused("generate", "--target", "random:nonsense", *ONE)
    unknown = refused("generate", "--target", "no such model", *ONE)
    assert "There is no model at 'no such model'" in unknown


def test_options_that_cannot_be_parsed_exit_with_2(cli):
    assert cli("generate", "--target", "demo-target", "--max-tokens", "many").status == 2
    assert cli("no-such-command").status == 2


# ------------------------------------------------------------------------------- several turns


@pytest.mark.slow
def test_all_turns_are_answered_one_after_the_other(cli, models, tmp_path):
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out.jsonl"
    chats = [["what", "why", "how"], ["when"], ["where", "who"]]
    questions.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in chats))
    options = (*settings(models), "--prompts", questions, "--turns", "all", "--chat")
    result = cli("generate", *options, "--ignore-eos", "--max-length", 512, "--output", out)
    assert result.status == 0, result.err
    lines = read_lines(out)
    assert [line["request_id"] for line in lines] == ["0:0", "0:1", "0:2", "1:0", "2:0", "2:1"]
    assert [line.get("turn") for line in lines] == [0, 1, 2, None, 0, 1]
    text = tiny.tokenizer()
    asked = [
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": lines[0]["text"]},
        {"role": "user", "content": "why"},
    ]
    assert lines[1]["prompt_token_ids"] == text.encode_chat(asked)
    assert lines[0]["num_reused_tokens"] == 0
    assert lines[1]["num_reused_tokens"] >= len(lines[0]["prompt_token_ids"])
    # Each turn is what its whole prompt gives by itself.
    engine = Engine(load_model(str(models.target)), NGram(), batch_size=1, max_length=512)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for line in lines:
        [alone] = engine.generate([line["prompt_token_ids"]], params)
        assert list(alone.token_ids) == line["token_ids"]


def test_a_turn_that_does_not_fit_ends_its_chat_only(cli, models, tmp_path):
    questions = tmp_path / "questions.jsonl"
    chats = [["a", "b" * 300, "c"], ["d", "e"]]
    questions.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in chats))
    result = cli("generate", *settings(models), "--prompts", questions, "--turns", "all", "--json")
    assert result.status == 0, result.err
    assert "Line 1 of the prompt file: The prompt of 0:1 has" in result.err
    found = [one["request_id"] for one in result.document["completions"]]
    assert found == ["0:0", "1:0", "1:1"]
    assert "prompt 1, turn 1" in result.out


def test_the_text_of_completions_is_printed():
    """Without special tokens, and without what a stop string cut off."""
    model = tiny.model(text=tiny.tokenizer())
    ids = [*model.tokenizer.encode("né one")[1:], tiny.BOS, *model.tokenizer.encode(" two")[1:]]
    [request] = make_requests(["a prompt"], SamplingParams(stop=("e t",)), model, longest=99)
    stop = find_stop(model.tokenizer, ids, ("e t",), min_tokens=0)
    for token_ids, ended, text in (
        ([*ids, tiny.EOS], {"finish": Finish.STOP_TOKEN}, "né one two"),
        (ids, {"finish": Finish.STOP_STRING, "stopped": stop}, "né on"),
    ):
        origins = ([Origin.PLAIN, Origin.ACCEPTED] * 9)[: len(token_ids)]
        common = {"stop_token": 1, "acceptance": Acceptance(num_rounds=1), **ended}
        made = make_completion(request, model, token_ids=token_ids, origins=origins, **common)
        console = Console(file=io.StringIO(), color_system=None, width=80)
        generate.show_completions(console, [made], model.tokenizer)
        shown, _, ending = console.file.getvalue().rpartition("\nfinished: ")
        assert shown == made.text == text
        assert ending.startswith(made.finish_reason)
