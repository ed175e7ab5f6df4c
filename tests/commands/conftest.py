"""The command line in this process, and tiny models to run it on."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import tiny

from jaxspec.cli import main


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command left after."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict:
        return json.loads(self.out.strip().split("\n")[-1])


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs `jaxspec` with these arguments."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*args) -> Result:
        capsys.readouterr()
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as end:
            status = end.code
        result = Result(status, *capsys.readouterr())
        assert "…" not in result.out  # 80 columns cut nothing
        return result

    return run


@pytest.fixture
def refused(cli):
    """Runs `jaxspec`, asserts that it ends in one sentence and status 1, and returns that."""

    def run(*args) -> str:
        result = cli(*args)
        assert result.status == 1, result
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1, result.err
        assert "Traceback" not in result.err
        return result.err.strip()

    return run


@dataclasses.dataclass(frozen=True)
class Models:
    """Directories of converted models."""

    target: pathlib.Path
    draft: pathlib.Path
    other_tokenizer: pathlib.Path
    no_template: pathlib.Path
    no_tokenizer: pathlib.Path


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(
        target=tiny.save(root, "target", text=tiny.tokenizer()),
        draft=tiny.save(root, "draft", seed=1, text=tiny.tokenizer()),
        other_tokenizer=tiny.save(root, "other", text=tiny.tokenizer(is_reversed=True)),
        no_template=tiny.save(root, "no-template", text=tiny.tokenizer(chat=None)),
        no_tokenizer=tiny.save(root, "no-tokenizer"),
    )
