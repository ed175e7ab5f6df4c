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
import xxhash
from flax import serialization

from jaxspec.audit.outputs import read_outputs_text
from jaxspec.commands.generate import GenerateCommand
from jaxspec.commands.plan import parse_bytes
from jaxspec.errors import CheckpointError, JaxspecError, SettingError
from jaxspec.lab.cost.devices import read_device
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.prompts import load_prompts
from jaxspec.runtime import files
from jaxspec.training import runs
from jaxspec.training.lm.saved import load_run
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
    lines, inputs = load_prompts(pipe(content))
    assert [line.prompt for line in lines] == ["a", "b"]
    assert inputs == {"pipe": hashlib.sha256(content).hexdigest()}


@pytest.mark.timeout(60)
def test_generate_records_what_it_read_from_a_pipe(pipe):
    command = GenerateCommand(target="x", prompts=pipe(b"a\n"))
    lines, inputs = command._read_lines()
    assert [line.prompt for line in lines] == ["a"]
    assert inputs == {"pipe": hashlib.sha256(b"a\n").hexdigest()}


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


@pytest.mark.parametrize(
    "text", ["9" * 400, "9" * 5000, "1" + "0" * 400 + "GiB", "0", "9e9", "1e400"]
)
def test_budgets_that_are_no_bytes(text):
    with pytest.raises(SettingError, match=r"^--budget .* was given; write a number of bytes"):
        parse_bytes(text)


def checkpoint(path: pathlib.Path, record) -> pathlib.Path:
    """A checkpoint whose checksum is right."""
    content = serialization.msgpack_serialize(record)
    path.write_bytes(xxhash.xxh3_128_digest(content) + content)
    return path


GOOD = {"step": 3, "fingerprint": "{}", "params": {"0": np.ones(2)}, "optimizer": {}}


@pytest.mark.parametrize(
    "change",
    [
        {},
        5,
        {"step": None},
        {"step": -1},
        {"step": 1.5},
        {"fingerprint": "["},
        {"fingerprint": "[]"},
        {"fingerprint": 7},
        {"params": [1]},
        {"params": {"0": "text"}},
        {"optimizer": None},
    ],
)
def test_a_checkpoint_that_another_program_wrote_is_refused(change, tmp_path):
    record = GOOD | change if isinstance(change, dict) and change else change
    path = checkpoint(tmp_path / runs.CHECKPOINT, record)
    with pytest.raises(CheckpointError, match="another program wrote it"):
        runs.read_checkpoint(path, command="x")
    assert runs.read_checkpoint(checkpoint(path, GOOD), command="x")["step"] == 3


@pytest.mark.parametrize("model", [None, "[]", "{}", '{"rope": []}', "x"])
def test_a_checkpoint_that_describes_no_model_is_refused(model, tmp_path):
    checkpoint(tmp_path / runs.CHECKPOINT, GOOD | ({} if model is None else {"model": model}))
    with pytest.raises(CheckpointError, match="does not describe a model"):
        load_run(tmp_path)


def test_a_step_after_the_end_is_not_a_finished_run(tmp_path):
    unused = dict.fromkeys(("step", "step_tokens", "evaluate"))
    with pytest.raises(CheckpointError, match=r"of step 1000000000, and the run ends after step 9"):
        runs.run_steps(
            None, tmp_path, None, range(10**9, 9), **unused, fingerprint={}, described={}
        )


def test_results_that_are_none_are_refused(tmp_path):
    for text in ("{}", "[]", "x", json.dumps({"steps": 1})):
        (tmp_path / runs.RESULT).write_text(text)
        with pytest.raises(CheckpointError, match="is damaged"):
            runs.read_result(tmp_path)


def test_a_tokenizer_with_dropout_is_refused():
    hf = tiny.tokenizer().hf
    hf.backend_tokenizer.model.dropout = 0.25
    with pytest.raises(CheckpointError, match=r"BPE dropout of 0\.25"):
        TextTokenizer(hf, ())
