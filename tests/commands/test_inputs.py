"""Files that commands read: pipes are read once and their digest is that of what was read; what is
no file, and checkpoints and tokenizers that others wrote, are refused."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import threading

import numpy as np
import pytest
import tiny
import toy
import xxhash
from flax import serialization

from jaxspec.audit.outputs import read_outputs_text
from jaxspec.commands.generate import GenerateCommand
from jaxspec.errors import CheckpointError, JaxspecError
from jaxspec.lab.cost.devices import read_device
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.prompts import load_prompts
from jaxspec.runtime import files
from jaxspec.training import checkpoints, trainer
from jaxspec.training.lm_runs import load_run
from jaxspec.training.texts import read_texts

DEVICE = pathlib.Path(__file__).parents[2] / "docs" / "results" / "decode-cpu.json"


@pytest.fixture
def pipe(tmp_path):
    """A named pipe that a thread writes some bytes to, once."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    threads = []

    def write(content: bytes) -> pathlib.Path:
        def send():
            with open(path, "wb", buffering=0) as file:
                try:
                    file.write(content)
                except BrokenPipeError:
                    pass

        threads.append(threading.Thread(target=send, daemon=True))
        threads[-1].start()
        return path

    yield write
    for thread in threads:
        thread.join(10)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [b"a\nb\n", b"\xef\xbb\xbfa\r\nb\r\n"])
def test_prompts_of_a_pipe_are_read_once(pipe, content):
    def by_generate(path):
        return GenerateCommand(target="x", prompts=path)._read_lines()

    for read in (load_prompts, by_generate):
        lines, inputs = read(pipe(content))
        assert [line.prompt for line in lines] == ["a", "b"]
        assert inputs == {"pipe": hashlib.sha256(content).hexdigest()}


@pytest.mark.timeout(60)
def test_other_files_may_be_pipes(pipe):
    assert read_outputs_text(pipe(b"\xef\xbb\xbfx")) == (
        "x",
        hashlib.sha256(b"\xef\xbb\xbfx").hexdigest(),
    )
    assert callable(read_device(str(pipe(DEVICE.read_bytes()))))


@pytest.mark.timeout(60)
def test_an_endless_pipe_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_PIPE_BYTES", 1000)
    with pytest.raises(JaxspecError, match="a pipe with more than 1,000 bytes"):
        load_prompts(pipe(b"a\n" * 1000))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", [load_prompts, read_outputs_text, read_texts, read_device])
@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero", ".", "absent", "empty", "latin"])
def test_what_is_no_file_of_text_is_refused(read, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    if (read, name) == (read_outputs_text, "empty"):
        return  # `parse_outputs` refuses it
    with pytest.raises(JaxspecError):
        read(name if read is read_device else pathlib.Path(name))


def old_checkpoint(path: pathlib.Path, record) -> None:
    """A checkpoint of an earlier version whose checksum is right."""
    content = serialization.msgpack_serialize(record)
    path.write_bytes(xxhash.xxh3_128_digest(content) + content)


MODEL = json.dumps(toy.config().to_json())


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (5, "does not describe a model"),
        ({}, "does not describe a model"),
        *(
            ({"model": model, "params": {}}, "does not describe a model")
            for model in ("[]", "{}", '{"rope": []}', "x", 7)
        ),
        *(
            ({"model": MODEL, "params": params}, "do not fit its model")
            for params in ([1], {}, {"0": "text"}, {str(i): np.ones(2) for i in range(99)})
        ),
    ],
)
def test_an_old_checkpoint_that_another_program_wrote_is_refused(record, words, tmp_path):
    old_checkpoint(tmp_path / trainer.OLD_CHECKPOINT, record)
    with pytest.raises(CheckpointError, match=words):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({}, "is damaged"),
        ({"fingerprint": [], "metrics": {}}, "is damaged"),
        *(
            ({"fingerprint": {}, "metrics": {}, "model": model}, "does not describe a model")
            for model in (None, [], {}, {"rope": []}, "x")
        ),
        (
            {"fingerprint": {}, "metrics": {}, "model": toy.config().to_json()},
            "is damaged",
        ),
    ],
)
def test_a_checkpoint_that_describes_no_model_is_refused(about, words, tmp_path):
    state = trainer.TrainState(params={"a": np.ones(2)}, optimizer={"b": np.ones(2)})
    checkpoints.save(tmp_path, state, 3, about)
    with pytest.raises(CheckpointError, match=words):
        load_run(tmp_path)


def test_results_that_are_none_are_refused(tmp_path):
    for text in ("{}", "[]", "x", json.dumps({"steps": 1})):
        (tmp_path / trainer.RESULT).write_text(text)
        with pytest.raises(CheckpointError, match="is damaged"):
            trainer.read_result(tmp_path)


def test_a_tokenizer_with_dropout_is_refused():
    hf = tiny.tokenizer().hf
    hf.backend_tokenizer.model.dropout = 0.25
    with pytest.raises(CheckpointError, match=r"BPE dropout of 0\.25"):
        TextTokenizer(hf, ())
