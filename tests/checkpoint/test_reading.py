"""Directories that are named by relative paths, that the system does not let a process read, or
whose reading ends for a reason that has nothing to do with their files."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import hf_checkpoints
import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from heads import random_params

import jaxspec
from jaxspec import Engine, SamplingParams, cli, errors, load_drafter, load_model
from jaxspec.convert import convert
from jaxspec.drafters.heads.config import heads_config
from jaxspec.load import models as loading
from jaxspec.load.models import cached_models, remove_cached_model
from jaxspec.runtime import files
from jaxspec.training import checkpoints, trainer
from jaxspec.training.lm_runs import load_run, read_tokenizer

ASSETS = Path(jaxspec.__file__).parent / "assets" / "target"
TINY = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """`hf`, a Hugging Face directory, and `out`, what is converted from it."""
    root = tmp_path_factory.mktemp("built")
    hf_checkpoints.write_golden(root / "hf", "qwen3", num_shards=2)
    (root / "hf" / "generation_config.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / name, root / "hf" / name)
    for path in (root / "hf").iterdir():
        path.chmod(0o644)  # safetensors lets only the owner read its files
    convert(root / "hf", root / "out", progress=False)
    return root


@pytest.fixture
def here(built, monkeypatch) -> Iterator[Path]:
    """A copy of `built` that every user may enter, as the current directory; a relative cache."""
    folder = Path(tempfile.mkdtemp(prefix="jaxspec-reading-"))
    folder.chmod(0o777)
    for name in ("hf", "out"):
        shutil.copytree(built / name, folder / name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAXSPEC_CACHE", "cache")
    yield folder
    shutil.rmtree(folder)


# Relative paths


def test_everything_by_relative_paths(here, capsys):
    """From the Hugging Face directory to a run with a saved drafter, in the current directory."""
    assert cli.main(["convert", "hf", "converted"]) == 0
    model = load_model("converted")
    jaxspec.save_model(model, "again")
    assert load_model("again").name == "again"
    by_cache = load_model("hf")
    pairs = zip(jax.tree.leaves(model.params), jax.tree.leaves(by_cache.params), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    [kept] = cached_models()
    assert Path(kept.path).is_absolute()
    assert Path(kept.path).is_relative_to(here / "cache")

    heads = heads_for(model)
    jaxspec.save_drafter(heads, "heads", target=model)
    load_drafter("heads", model)

    Path("prompts.jsonl").write_text('{"prompt_token_ids": [3, 4, 5]}\n')
    command = ["generate", "--target", "converted", "--prompts", "prompts.jsonl"]
    options = ["--max-tokens", "4", "--output", "below/results.jsonl", "--max-length", "64"]
    assert cli.main([*command, *options]) == 0, capsys.readouterr().err
    assert len(json.loads(Path("below/results.jsonl").read_text())["token_ids"]) == 4


def heads_for(model) -> jaxspec.Heads:
    config = heads_config("medusa", model.config, num_heads=2)
    return jaxspec.Heads(config, random_params(config), tree=None)


def test_a_relative_cache_survives_a_change_of_directory(here, monkeypatch):
    first = load_model("hf")
    [kept] = cached_models()
    assert kept.path == str(here / "cache" / kept.name)
    assert first.config.num_layers == 2


def test_a_relative_path_from_a_directory_that_was_removed(here, monkeypatch):
    def removed():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", removed)
    with pytest.raises(errors.SettingError, match="relative to the current directory, which was"):
        files.absolute("out")


# What the system does not let us read


def places(root: Path) -> list[Path]:
    return [root, *sorted(root.rglob("*"))]


def refusals(root: Path, read) -> dict[str, str]:
    """What `read` raises while a place below `root` is closed, by the place."""
    os.chmod(root, 0o755)
    found = {}
    for place in places(root):
        mode, is_root = place.stat().st_mode, not os.geteuid()
        place.chmod(0)
        if is_root:
            os.seteuid(65534)
        try:
            with warnings.catch_warnings(action="error"):
                read()
            found[str(place)] = "read"
        except errors.JaxspecError as error:
            found[str(place)] = f"{type(error).__name__}: {error}"
        finally:
            if is_root:
                os.seteuid(0)
            place.chmod(mode)
    return found


def assert_names_place(found: dict[str, str]) -> None:
    for place, message in found.items():
        assert message.count(". ") == 0, message
        assert f"{Path(place)}" in message, (place, message)
        assert "cannot be read (Permission denied)" in message, (place, message)
        assert not {"missing", "damaged", "convert the model again"} & set(message.split()), message
        assert not message.startswith("DamagedError"), message


@pytest.mark.parametrize("verify", [True, False])
def test_a_converted_directory_with_a_closed_part(here, verify):
    load_model(here / "out", verify=verify)
    assert_names_place(refusals(here / "out", lambda: load_model(here / "out", verify=verify)))


@pytest.mark.parametrize("door", ["load_model", "convert", "load_drafter"])
def test_a_hugging_face_directory_with_a_closed_part(here, door, monkeypatch):
    cache = here / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    target = load_model(here / "out") if door == "load_drafter" else None

    def read():
        if door == "load_model":
            load_model(here / "hf")
        elif door == "convert":
            convert(here / "hf", cache / "made", progress=False)
        else:
            load_drafter(here / "hf", target)

    found = refusals(here / "hf", read)
    if door == "load_drafter":  # which reads nothing else
        kept = ("hf", "config.json", "model.safetensors.index.json")
        found = {place: told for place, told in found.items() if Path(place).name in kept}
    assert_names_place(found)


def test_a_cache_of_another_user(here):
    load_model(here / "hf")
    [kept] = cached_models()
    cache = here / "cache"
    found = refusals(cache, lambda: load_model(here / "hf"))
    entries = {place: told for place, told in found.items() if kept.name in Path(place).parts}
    assert set(places(Path(kept.path))) == set(map(Path, entries))
    for place, message in {str(cache): found[str(cache)], **entries}.items():
        assert "JAXSPEC_CACHE" in message, message
        assert "Permission denied" in message, (place, message)
    cache.chmod(0)
    try:
        if not os.geteuid():
            os.seteuid(65534)
        with pytest.raises(errors.CheckpointError, match="Permission denied"):
            cached_models()
    finally:
        os.seteuid(0) if not os.getuid() else None
        cache.chmod(0o755)
    if not os.getuid():
        os.seteuid(65534)
        try:
            with pytest.raises(errors.CheckpointError, match="cannot be removed"):
                remove_cached_model(kept.name)
        finally:
            os.seteuid(0)


def test_a_run_of_training_that_is_closed(here):
    run, old = here / "run", here / "old"
    state = trainer.TrainState(params={"a": np.ones(2)}, optimizer={"b": np.ones(2)})
    checkpoints.save(run, state, 3, {"fingerprint": {}, "metrics": {}})
    old.mkdir()
    for path in (old / trainer.OLD_CHECKPOINT, run / "tokenizer.json"):
        path.write_bytes(b"0123456789abcdef")

    def read_run():
        step, about = checkpoints.read_about(run)
        checkpoints.read_arrays(run, step, about, "params", state.params)

    read_run()
    assert_names_place(refusals(run / "checkpoints", read_run))
    reads = {
        old / trainer.OLD_CHECKPOINT: lambda: load_run(old),
        run / "tokenizer.json": lambda: read_tokenizer(run / "tokenizer.json"),
        run: lambda: trainer.check_out(run, resume=True),
    }
    for path, read in reads.items():
        assert_names_place({str(path): refusals(path.parent, read)[str(path)]})


# Errors that say nothing about the files


def wrapped(cause: BaseException) -> Exception:
    try:
        try:
            raise cause
        except BaseException as error:
            raise Exception("Encountered error while reading array index") from error
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (wrapped(KeyboardInterrupt()), KeyboardInterrupt),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
        (wrapped(MemoryError()), MemoryError),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), RuntimeError),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), errors.UnreadableError),
        (wrapped(PermissionError(errno.EACCES, "denied")), errors.UnreadableError),
        (ValueError("PERMISSION_DENIED: x [os_error_code='13']"), errors.UnreadableError),
        (ValueError("If the Array has no addressable shards"), errors.CheckpointError),
        (jax.errors.JaxRuntimeError("INTERNAL: no device"), errors.CheckpointError),
    ],
    ids=repr,
)
def test_what_is_intact_is_never_called_damaged(here, monkeypatch, raised, expected):
    load_model(here / "hf")

    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(ocp, "load", fail)
    monkeypatch.setattr(loading, "convert_directory", None)  # nothing is converted again
    for where, verify in itertools.product(("out", "hf"), (True, False)):
        with warnings.catch_warnings(action="error"), pytest.raises(expected) as found:
            load_model(here / where, verify=verify)
        assert not isinstance(found.value, errors.DamagedError)


def test_an_error_that_was_being_handled_before_is_not_a_cause(here):
    (here / "out" / "jaxspec.json").write_text("{}")
    try:
        raise MemoryError
    except MemoryError:
        with pytest.raises(errors.DamagedError):
            load_model(here / "out")


def test_damage_is_found_without_checks_too(here):
    largest = max((here / "out" / "params").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"")
    for verify in (True, False):
        with pytest.raises(errors.DamagedError):
            load_model(here / "out", verify=verify)


def test_a_sharding_that_does_not_fit(here):
    mesh = jax.make_mesh((1,), ("model",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * 5, "model"))
    with pytest.raises(errors.SettingError, match="embedding does not fit its shape"):
        load_model(here / "out", sharding=split)


# Forks


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_child_is_refused_at_every_door(here):
    model = load_model(here / "out")
    heads = heads_for(model)
    doors = [
        lambda: load_model(here / "out"),
        lambda: load_model("demo-target"),
        lambda: load_model("random:llama-65m"),
        lambda: load_drafter(here / "out", model),
        lambda: jaxspec.save_model(model, here / "saved"),
        lambda: jaxspec.save_drafter(heads, here / "heads"),
        lambda: convert(here / "hf", here / "made"),
    ]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            said = []
            for door in doors:
                with pytest.raises(errors.SettingError) as refused:
                    door()
                said.append(str(refused.value))
            start = f"Process {os.getpid()} was forked from process {os.getppid()}"
            status = 0 if len(set(said)) == 1 and said[0].startswith(start) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Engine(model, batch_size=1, max_length=32).generate([[3, 4]], TINY)
