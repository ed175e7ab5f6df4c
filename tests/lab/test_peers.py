"""`jaxspec bench peers`: engines in processes of their own, those that fail among them."""

import io
import json
import pathlib
import shutil
import sys

import pytest
import tiny
from rich.console import Console

from jaxspec.errors import SettingError
from jaxspec.lab.bench import peers
from jaxspec.lab.bench.peers import PeersBench

SPEAKS = """
from protocol import answer, settings
def generate(prompts, max_tokens):
    last = settings["batch_size"] + (settings["drafter"] != "none")
    return [[*range(2, 1 + max_tokens), last] for _ in prompts]
answer({"versions": {"other": "1.0"}, "arithmetic": "integers"}, generate)
"""
STANDS_IN = {
    "peer_vllm.py": SPEAKS,
    "peer_openvino.py": SPEAKS.replace("max_tokens), last", "max_tokens - 1), last"),
    "peer_transformers.py": "import sys; sys.exit('No module named torch')",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the command finds with jaxspec itself, three other programs and no `node`."""
    root = tmp_path_factory.mktemp("peers")
    scripts = shutil.copytree(peers.SCRIPTS, root / "scripts")
    for name, text in STANDS_IN.items():
        (scripts / name).write_text(text)
    target = tiny.save(root, "target", text=tiny.tokenizer())
    console = Console(file=io.StringIO(), width=200)
    bench = PeersBench(
        target=str(target),
        vllm=sys.executable,
        openvino=sys.executable,
        openvino_model=str(root),
        transformers=sys.executable,
        llama_cpp=str(root / "missing"),
        gguf="model.gguf",
        num_prompts=(3,),
        batch_sizes=(2, 1),
        max_tokens=6,
        max_length=128,
        repeats=2,
        dtype="float32",
        outputs=root / "outputs",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "SCRIPTS", scripts)
        document = bench.run(console)
    lines = {(each["batch_size"], each["label"]): each for each in document["results"]}
    return document, lines, console.file.getvalue(), root / "outputs"


@pytest.mark.slow
def test_our_outputs_survive_batch_and_drafter(found):
    _, lines, printed, _ = found
    for batch in (1, 2):
        ngram = lines[batch, "jaxspec, ngram"]
        assert ngram["equal_to_plain"] == ngram["equal_to_batch_1"] == 3
        assert ngram["num_compared"] == {"equal_to_plain": 3, "equal_to_batch_1": 3}
        assert len(ngram["totals"]) == len(ngram["prefills"]) == 2
        assert ngram["peak_bytes"] > 1e6
    assert lines[2, "jaxspec, plain"]["equal_to_batch_1"] == 3
    assert "equal_to_batch_1" not in lines[1, "jaxspec, plain"]
    assert "3/3" in printed


@pytest.mark.slow
def test_an_engine_whose_outputs_change_is_seen(found):
    _, lines, _, _ = found
    assert lines[2, "vllm, plain"]["equal_to_batch_1"] == 0
    assert lines[1, "vllm, ngram"]["equal_to_plain"] == 0
    assert lines[1, "vllm, ngram"]["versions"] == {"other": "1.0"}
    assert lines[1, "vllm, ngram"]["arithmetic"] == "integers"


def test_the_error_of_node_stands_above_its_version(tmp_path):
    said = "at resolve:3\\n\\nError [NOT_EXPORTED]: no such path\\n  at a:9\\n\\nNode.js v20"
    command = (sys.executable, "-c", f"import sys; sys.exit('{said}')")
    with pytest.raises(peers.PeerError, match=r"^it ended with 1: Error \[NOT_EXPORTED\]: no such"):
        peers.Peer(command, {}, tmp_path)


def test_the_row_of_an_engine_that_fails_says_why_and_the_rest_goes_on(found):
    document, lines, printed, _ = found
    assert lines[1, "openvino, plain"]["why"] == "outputs of 5 to 5 tokens instead of 6"
    assert lines[1, "transformers, plain"]["why"] == "it ended with 1: No module named torch"
    assert "cannot be started" in lines[2, "llama_cpp, plain"]["why"]
    assert (2, "transformers, ngram") not in lines  # it has none for batches
    assert "No module named torch" in printed
    assert not any("outputs" in line for line in document["results"])
    assert (
        document["failed"]["transformers, plain at batch 1"]
        == lines[1, "transformers, plain"]["why"]
    )


def test_the_outputs_can_be_audited(found):
    *_, outputs = found
    names = {path.name for path in outputs.iterdir()}
    assert {"jaxspec-ngram-batch-2.jsonl", "vllm-none-batch-1.jsonl"} <= names
    head, *records = map(json.loads, (outputs / "jaxspec-ngram-batch-2.jsonl").open())
    assert head["max_tokens"] == 6
    assert [len(record["token_ids"]) for record in records] == [6, 6, 6]


@pytest.mark.parametrize("script", ["exec sleep 60", "sleep 60"])
def test_an_engine_that_hangs_is_ended(monkeypatch, tmp_path, script):
    """With a process that it started, which keeps its standard output open."""
    monkeypatch.setattr(peers, "START_S", 0.5)
    with pytest.raises(peers.PeerError, match=r"no answer after 0\.5 s"):
        peers.Peer(("bash", "-c", script), {}, tmp_path)


def _peer(tmp_path, answer, described='{"versions": {}, "arithmetic": "f"}'):
    script = f"echo 'PEER {described}'; while read n; do echo 'PEER {answer}'; done"
    return peers.Peer(("bash", "-c", script), {"prompts": [[1], [2]]}, tmp_path)


RUN = '{"seconds": 1.5, "outputs": [[1], [2]], "peak_bytes": 5}'


@pytest.mark.parametrize(
    ("changed", "to"),
    [
        (RUN, "{}"),
        (RUN, "3"),
        (RUN, "[]"),
        ("[[1], [2]]", "[[1]]"),
        ("[[1], [2]]", '[[1], ["a"]]'),
        ("1.5", '"x"'),
        ("1.5", "0"),
        ("1.5", "NaN"),
        (', "peak_bytes": 5', ""),
    ],
)
def test_an_answer_of_another_form_is_an_error_of_the_engine(tmp_path, changed, to):
    peer = _peer(tmp_path, RUN.replace(changed, to))
    with pytest.raises(peers.PeerError, match="is not what peer_scripts"):
        peer.generate(1)
    peer.close()


def test_settings_and_outputs_may_be_long(tmp_path):
    peer = _peer(tmp_path, RUN)
    assert peer.generate(1) == json.loads(RUN)
    peer.close()
    with pytest.raises(peers.PeerError, match="describes"):
        _peer(tmp_path, RUN, described="null")
    count = (
        "import json, sys; n = len(open(sys.argv[1]).read())\n"
        "print('PEER', json.dumps({'versions': {'n': n}}))"
    )
    peer = peers.Peer((sys.executable, "-c", count), {"prompts": [[*range(100_000)]]}, tmp_path)
    assert peer.described["versions"]["n"] > 2**17  # more than an argument may be long
    peer.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"openvino": "python"}, "--openvino was given without --openvino-model"),
        ({"gguf": "model.gguf"}, "--gguf was given without --llama-cpp"),
        ({"target": "demo-target"}, "--target is demo-target, which is not a directory"),
        ({"num_prompts": (1, 2, 3)}, "--num-prompts has 3 numbers"),
        (
            {"draft": ("a/heads", "b/heads"), "outputs": pathlib.Path("outputs")},
            "--draft is a/heads, b/heads, and --outputs names files after the last part",
        ),
        ({"draft": ("nosuch",)}, "There is no drafter 'nosuch'"),
        ({"max_length": 100}, "--max-length is 100, which leaves no room for a prompt"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, sentence, tmp_path):
    with pytest.raises(SettingError, match=sentence):
        PeersBench(**{"target": str(tmp_path), **options}).check()
