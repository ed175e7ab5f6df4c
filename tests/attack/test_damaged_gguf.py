"""Damaged and foreign GGUF files are refused in one sentence, or load as what they say."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import gguf
import gguf_files
import pytest
from attack import hf_damage, outcomes
from attack.outcomes import Tally

from jaxspec.convert import convert
from jaxspec.errors import JaxspecError
from jaxspec.load.models import load_model

BYTES = gguf_files.byte_level_tokenizer()
RAW = "tokenizer.ggml"


def settings(**changes):
    """Writes a model with other settings of its architecture."""
    return lambda path: gguf_files.write_gguf(path, "llama", **changes)


def tokenizer(**changes):
    """Writes a model with other settings of its tokenizer."""
    changed = {f"{RAW}.{key}": value for key, value in changes.items()}
    return lambda path: gguf_files.write_gguf(path, "llama", tokenizer={**BYTES, **changed})


def of_architecture(name: str):
    return lambda path: gguf_files.write_gguf(path, "llama", tokenizer={"architecture": name})


def cut(share: float):
    def write(path: Path) -> None:
        gguf_files.write_gguf(path, "llama")
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return write


def with_version(number: int):
    def write(path: Path) -> None:
        gguf_files.write_gguf(path, "llama")
        content = path.read_bytes()
        path.write_bytes(content[:4] + number.to_bytes(4, "little") + content[8:])

    return write


def of_kind(number: int):
    """Writes a model whose output norm has the type of this number."""

    def write(path: Path) -> None:
        gguf_files.write_gguf(path, "llama")
        content = path.read_bytes()
        at = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
        path.write_bytes(content[:at] + number.to_bytes(4, "little") + content[at + 4 :])

    return write


def parts(*left: int):
    """Writes a model in three parts, of which these are left; the first of them gets the name."""

    def write(path: Path) -> Path:
        gguf_files.write_gguf(path, "llama", num_parts=3)
        names = [path.with_name(f"{path.stem}-{i:05d}-of-00003.gguf") for i in (1, 2, 3)]
        for number, name in enumerate(names, start=1):
            if number not in left:
                name.unlink()
        return names[left[0] - 1]

    return write


def renamed_part(path: Path) -> None:
    parts(1)(path).rename(path)


BAD = {
    "architecture": (of_architecture("gemma3"), "of the architecture 'gemma3', which is not supp"),
    "mixture": (settings(expert_count=8, expert_used_count=2), "not compute: {'expert_count': 8"),
    "partial": (settings(rope__dimension_count=8), "{'rope.dimension_count': 8}"),
    "longrope": (settings(rope__scaling__type="longrope"), "'longrope' rotary scaling"),
    "no width": (settings(embedding_length=None), "'llama.embedding_length'"),
    "no epsilon": (settings(attention__layer_norm_rms_epsilon=None), "layer_norm_rms_epsilon"),
    "heads of layers": (settings(attention__head_count_kv=[2, 2]), "a whole number"),
    "other width": (settings(embedding_length=96), "has the wrong shape for"),
    "more layers": (settings(block_count=3), "lacks model.layers.2"),
    "quantization": (of_kind(26), "tensors in I32, which the installed package gguf"),
    "unknown type": (of_kind(99), "99) is not a valid GGMLQuantizationType); fetch it again, or"),
    "version": (with_version(1), "version 1 which we cannot handle"),
    "big-endian": (with_version(3 << 24), "cannot be read as GGUF"),
    "cut settings": (cut(0.01), "cannot be read as GGUF (it ends early)"),
    "cut tensors": (cut(0.7), "(it ends early)"),
    "cut end": (cut(0.999), "(it ends early)"),
    "only a name": (lambda path: path.write_bytes(b"GGUF"), "as GGUF (it ends early)"),
    "no GGUF": (lambda path: path.write_bytes(b"PK\3\4" * 9), "or files that begin with GGUF"),
    "empty": (lambda path: path.write_bytes(b""), "or files that begin with GGUF"),
    "part missing": (parts(1, 3), "which lacks model-00002-of-00003.gguf; fetch"),
    "first part missing": (parts(2), "model-00001-of-00003.gguf, model-00003-of-00003.gguf"),
    "renamed part": (renamed_part, "is one of 3 parts"),
    "pre-tokenizer": (
        tokenizer(pre="poro-chat"),
        "pre-tokenizer 'poro-chat'; llama, and gpt2",
    ),
    "no pre-tokenizer": (tokenizer(pre=None), "the pre-tokenizer 'none'"),
    "kind of tokenizer": (tokenizer(model="rwkv"), "a tokenizer of the kind 'rwkv'"),
    "no types": (tokenizer(token_type=None), "tokenizer.ggml.token_type"),
    "no scores": (tokenizer(model="llama"), "tokenizer.ggml.scores"),
    "strange merges": (tokenizer(merges=["zz qq"]), "Token `zz` out of vocabulary"),
    "stop token": (tokenizer(eos_token_id=5000), "5000"),
}


def write_bad(directory: Path, name: str) -> tuple[Path, str]:
    """Writes a bad file; returns its path and what the message says."""
    write, message = BAD[name]
    found = write(directory / "model.gguf")
    return found if isinstance(found, Path) else directory / "model.gguf", message


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    path, message = write_bad(tmp_path, name)
    before = sorted(tmp_path.iterdir())
    for call in (lambda: convert(path, tmp_path / "out"), lambda: load_model(path)):
        outcome = outcomes.of_call(call)
        assert outcome.kind == "refused", outcome
        assert message in outcome.reason
        assert path.name in outcome.reason
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert sorted(tmp_path.iterdir()) == before


def test_without_the_package(tmp_path, monkeypatch):
    gguf_files.write_gguf(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(JaxspecError, match=r"pip install 'jaxspec-decoding\[gguf\]'"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_without_a_tokenizer(tmp_path, monkeypatch, capsys):
    from jaxspec.cli import main

    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    gguf_files.write_gguf(path, "llama", tokenizer={})
    assert load_model(path).tokenizer is None
    assert main(["generate", "--target", str(path), "--prompt", "hello"]) == 1
    outcome = outcomes.of_status(1, capsys.readouterr().err)
    assert outcome.kind == "refused"
    assert "no tokenizer" in outcome.reason


def attack(directory: Path, seeds: range) -> Tally:
    """A file damaged at random for every seed, most of them in what precedes the tensors."""
    gguf_files.write_gguf(directory / "good.gguf", "qwen3", kind="Q8_0")
    reader = gguf.GGUFReader(directory / "good.gguf")
    content = (directory / "good.gguf").read_bytes()
    tally = Tally("damaged GGUF files")
    for seed in seeds:
        rng = random.Random(seed)
        path = directory / "model.gguf"
        path.write_bytes(content)
        done = hf_damage.damage(path, rng, rng.choice([600, reader.data_offset, len(content)]))
        outcome = outcomes.of_call(
            lambda path=path: convert(path, directory / "out", overwrite=True, progress=False)
        )
        tally.add(f"{seed}: {done}", outcome)
    return tally


def test_some_damage(tmp_path, record_property):
    tally = attack(tmp_path, range(30))
    tally.finish(record_property)
    assert tally.counts["refused"] > 5


@pytest.mark.slow
def test_much_damage(tmp_path, record_property):
    attack(tmp_path, range(30, 1000)).finish(record_property)
