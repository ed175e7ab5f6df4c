"""`jaxspec doctor`, `cache`, `convert` and `train`, and what all commands have in common."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from unittest import mock

import jax
import pytest
import tiny

import jaxspec
from jaxspec.cli import COMMANDS, load_command
from jaxspec.commands import train
from jaxspec.commands.generate import GenerateCommand
from jaxspec.errors import SettingError
from jaxspec.load import models as checkpoint
from jaxspec.models.registry import PRESETS
from jaxspec.runtime.documents import make_document

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_help_names_every_command_and_preset(cli):
    result = cli("--help")
    assert result.status == 0
    assert result.out == cli().out
    assert all(len(line) <= 80 for line in result.out.split("\n"))
    for preset in PRESETS:
        assert preset in result.out
    for name in COMMANDS:
        assert f"\n  {name} " in result.out
    benches = re.findall(r"• ([a-z-]+) ", cli("bench", "--help").out)
    assert {"decode", "predict", "gpu", "compile-time"} <= {*benches}
    for words in [
        *((name,) for name in COMMANDS if name not in ("bench", "study", "train")),
        *(("bench", b) for b in benches),
        *(("train", what) for what in ("lm", "texts", "heads", "flexdraft")),
        *(("study", what) for what in ("scaling", "published")),
    ]:
        shown = cli(*words, "--help")
        assert shown.status == 0
        assert "--json" in shown.out
        assert not re.search(r"\{None\}|default:\s*None|--no-.*default:\s*True", shown.out)


def test_json_to_a_file(cli, refused, tmp_path, monkeypatch):
    """The same document as on standard output, of commands of every kind; a file that another
    option names, or that cannot be written, is refused before anything is done."""
    monkeypatch.chdir(tmp_path)
    result = cli("doctor", "--versions", "--json", "--json-file", "it.json")
    assert json.loads((tmp_path / "it.json").read_text()) == result.document
    assert cli("doctor", "--versions", "--json-file", "it.json").out.count("{") == 0
    decoding = ("generate", "--target", "absent", "--prompt", "x")
    training = ("train", "lm", "--corpora", "absent", "--out", "x")
    writing = ("train", "texts", "--target", "absent", "--corpora", "y", "--out", "x")
    outputs = [
        ((*decoding, "--output", "x"), "x"),
        ((*decoding, "--output", "x"), "../" + tmp_path.name + "/x"),
        (training, "x"),
        (training, "x/model"),
        (writing, "./x"),
        (("compare", "--target", "absent", "--drafter", "none", "--output", "x"), "x"),
        (("convert", "absent", "x"), "x/manifest.json"),
    ]
    for words, file in outputs:
        assert "for another option; give each a place of its own" in refused(
            *words, "--json-file", file
        )
    for words in (("doctor", "--versions"), decoding, training):
        assert "cannot be written (Is a directory)" in refused(*words, "--json-file", ".")
    assert [file.name for file in tmp_path.iterdir()] == ["it.json"]


def test_help_and_version_load_neither_jax_nor_a_command():
    code = (
        "import sys; from jaxspec.cli import main; main(['--help']); main(['--version']); "
        "assert not {'jax', 'tyro', 'numpy', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"jaxspec {jaxspec.__version__}\n" in done.stdout


@pytest.mark.parametrize("name", ["generate", "audit"])
def test_help_begins_with_what_people_set_first(cli, name):
    command = load_command(name)
    first, more = (
        set(re.findall(r"^[│ ]{1,4}(--[a-z][a-z-]*)", part, re.MULTILINE))
        for part in cli(name, "--help").out.split(" more options ")
    )
    assert len(first) == 12
    assert first == {"--" + option.replace("_", "-") for option in command.FIRST}
    assert len(first | more) == len(dataclasses.fields(command))


def test_a_command_that_does_not_exist(cli):
    result = cli("gnerate")
    assert result.status == 2
    assert "no command 'gnerate'; did you mean generate?" in result.err
    assert "choose one of demo, generate" in cli("xyz").err


def test_versions_and_devices(cli):
    result = cli("doctor", "--versions", "--json")
    assert result.status == 0
    assert result.document["versions"]["jax"] in result.out
    assert result.document["devices"]["num_devices"] >= 1
    assert "jaxspec is using" in result.out
    assert cli("doctor", "--versions").out.rstrip().endswith(".")  # no JSON unless asked for


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache(cli, refused, cache):
    empty = cli("cache", "list")
    assert empty.status == 0
    assert "is empty" in empty.out
    for name in ("one-1", "two-2"):
        tiny.save(cache, name, text=tiny.tokenizer())
    listed = cli("cache", "list", "--json")
    assert [model["name"] for model in listed.document["models"]] == ["one-1", "two-2"]
    assert "one-1" in listed.out
    assert listed.document["directory"] == str(cache)
    removed = cli("cache", "remove", "one-1", "--json")
    assert removed.document["removed"] == ["one-1"]
    assert [model["name"] for model in removed.document["models"]] == ["two-2"]
    assert [model.name for model in checkpoint.cached_models()] == ["two-2"]
    assert "has 0 models named 'three'" in refused("cache", "remove", "three")
    assert "was given no name" in refused("cache", "remove")
    assert "takes no names" in refused("cache", "list", "two-2")
    assert [model.name for model in checkpoint.cached_models()] == ["two-2"]


def test_a_damaged_model_in_the_cache(cli, cache):
    for name in ("one", "two"):
        tiny.save(cache, name)
    whole = cli("cache", "verify")
    assert whole.status == 0
    assert "2 of 2 converted models are as they were written" in whole.out
    weights = max(cache.glob("two/params/**/d/*"), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert cli("cache", "list").status == 0  # reads the manifests only
    verified = cli("cache", "verify", "--json")
    assert verified.status == 3
    assert "1 of 2 converted models" in verified.out
    assert "is not as it was written" in verified.out
    assert [bool(model["problem"]) for model in verified.document["models"]] == [False, True]
    (cache / "two" / "jaxspec.json").write_text("{")
    listed = cli("cache", "list")
    assert listed.status == 0
    assert "damaged" in listed.out
    assert cli("cache", "remove", "two").status == 0
    assert [path.name for path in cache.iterdir()] == ["one"]


def test_compiled_programs_are_listed_and_removed(cli, cache):
    kept = cache / ".compiled" / "jit_run-0-cache"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(bytes(2**20))
    listed = cli("cache", "list", "--json")
    assert "compiled" in listed.out
    assert listed.document["compiled_bytes"] == 2**20
    assert "removed compiled (1 MiB)" in cli("cache", "remove", "compiled").out
    assert not kept.exists()


def test_train(cli, refused, monkeypatch, tmp_path):
    result = {
        "steps": 12,
        "tokens": 123456,
        "held_out_loss": {"code": 1.23456789, "math": 2.0},
        "model": "run/model",
    }
    given = []
    monkeypatch.setattr(train, "train_lm", lambda config: given.append(config) or result)
    args = ("train", "lm", "--out", tmp_path, "--corpora", tmp_path, "--tokens", 123456)
    shown = cli(*args, "--json")
    assert shown.status == 0, shown.err
    assert given[0].tokens == 123456
    assert "held out loss, code" in shown.out
    assert "1.235" in shown.out
    assert "123,456" in shown.out
    assert shown.document["held_out_loss"]["math"] == 2.0
    assert shown.document["config"]["tokens"] == 123456
    monkeypatch.undo()
    assert "tokens 0 was given" in refused(*args[:-1], 0)


def test_documents_are_what_json_reads_back(tmp_path):
    options = GenerateCommand(target="demo-target", output=tmp_path)
    document = make_document("x", options, sizes=(1, 2), at={1: tmp_path})
    assert json.loads(json.dumps(document)) == document
    assert document["sizes"] == [1, 2]
    assert document["at"] == {"1": str(tmp_path)}


def test_how_an_error_is_told(cli, monkeypatch):
    """In one line, if it is the user's to mend; with a traceback, if it is a bug."""

    def status_of(error) -> tuple[int, str]:
        monkeypatch.setattr("jaxspec.cli.run_command", mock.Mock(side_effect=error))
        result = cli("doctor", "--versions")
        return result.status, result.err

    assert status_of(SettingError("one\n  two\nthree.")) == (1, "error: one two three.\n")
    assert status_of(KeyboardInterrupt()) == (130, "interrupted\n")
    for error in (
        MemoryError("Unable to allocate 373. GiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand a long table"),
    ):
        status, said = status_of(error)
        assert status == 1
        assert said.count("\n") == 1
        assert "lower --batch-size or --max-length, or choose" in said
    with pytest.raises(jax.errors.JaxRuntimeError):
        status_of(jax.errors.JaxRuntimeError("INTERNAL: a bug"))
