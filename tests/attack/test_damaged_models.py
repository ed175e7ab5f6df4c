"""Converted directories and cached models with damaged files: refused, or loaded as they were."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import hf_checkpoints
import jax
import numpy as np
import pytest
import tiny
import xxhash
from attack import outcomes

from jaxspec.load.models import cached_models, load_model
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.directories import KERNELS_DIRECTORY

# What happens to a file. Each takes the file, and a generator of its own.


def flip_a_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(max(path.stat().st_size, 1)))


def extend(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def overwrite_a_part(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    start = rng.randrange(len(content))
    length = rng.randrange(1, 1 + min(512, len(content) - start))
    content[start : start + length] = rng.choice([bytes(length), rng.randbytes(length)])
    path.write_bytes(content)


def grow_to_a_terabyte(path: Path, _: random.Random) -> None:
    os.truncate(path, 2**40)  # a hole: it takes no space, and years to read


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


def make_a_directory(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def make_a_pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_nothing(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def link_to_a_device(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_a_bit,
    cut,
    extend,
    overwrite_a_part,
    grow_to_a_terabyte,
    remove,
    make_a_directory,
    make_a_pipe,
    link_to_nothing,
    link_to_a_device,
)

# What a field of the manifest may be made, of any type and size.
VALUES = (
    None, True, "x", "", [], {}, [None], {"a": 1}, 0, -1, 1, 2, 3, 1.5, 1e30, 1e-30, -0.0, 2**31,
    2**64, float("nan"), float("inf"), "9" * 5000, [2**70], ["\ud800"], [[[[]]]],
)  # fmt: skip


def change_a_field(path: Path, rng: random.Random) -> None:
    """A manifest whose checksum is right: only its types and ranges can be judged."""
    fields = json.loads(path.read_text())
    part = rng.choice([fields, fields["config"], fields["config"]["rope"]])
    name = rng.choice(sorted(part))
    kind = rng.choice(["remove", "rename", "change", "change", "change"])
    value = part.pop(name)
    if kind != "remove":
        part[name + "s" * (kind == "rename")] = rng.choice(VALUES) if kind == "change" else value
    fields.pop("checksum", None)
    described = {name: value for name, value in fields.items() if name != "format_version"}
    fields["checksum"] = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
    path.write_text(json.dumps(fields))


def difference(found: LanguageModel, expected: LanguageModel) -> str | None:
    """How a model that was loaded differs from the one that was saved."""
    if found.config != expected.config or found.eos_token_ids != expected.eos_token_ids:
        return "another configuration was loaded"
    for one, other in zip(*map(jax.tree.leaves, (found.params, expected.params)), strict=True):
        if not np.array_equal(np.asarray(one), np.asarray(other)):
            return "other parameters were loaded"
    if found.tokenizer.encode("Once upon") != expected.tokenizer.encode("Once upon"):
        return "another tokenizer was loaded"
    return None


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("saved"), "model", text=tiny.tokenizer())


def attack_directories(saved: Path, directory: Path, seeds: range) -> outcomes.Tally:
    """A damaged copy for every seed, and what loading it came to."""
    expected = load_model(saved)
    names = sorted(path.relative_to(saved) for path in saved.rglob("*") if path.is_file())
    tally = outcomes.Tally("damaged converted directories")
    for seed in seeds:
        rng = random.Random(seed)
        copy = Path(shutil.copytree(saved, directory / "copy"))
        if seed % 3:
            damage, name = rng.choice(DAMAGES), rng.choice(names)
        else:
            damage, name = change_a_field, Path("jaxspec.json")
        damage(copy / name, rng)
        # A field with a right checksum may describe another model: then it is that model.
        is_meant = damage is change_a_field
        tally.add(
            f"seed {seed}: {damage.__name__} {name}",
            outcomes.of_call(
                lambda copy=copy: load_model(copy),
                limit_s=20,
                problem=lambda found, is_meant=is_meant: (
                    None if is_meant else difference(found, expected)
                ),
            ),
        )
        shutil.rmtree(copy)
    return tally


def test_damaged_directories(saved, tmp_path, record_property):
    attack_directories(saved, tmp_path, range(36)).finish(record_property)


@pytest.mark.slow
def test_many_damaged_directories(saved, tmp_path, record_property):
    attack_directories(saved, tmp_path, range(1000, 2000)).finish(record_property)


def attack_cache(directory: Path, monkeypatch, seeds: range) -> outcomes.Tally:
    """A damaged entry of the cache for every seed: with its source there, it is made again."""
    source = hf_checkpoints.write_golden(directory / "hf", "qwen3", dtype=np.float16)
    monkeypatch.setenv("JAXSPEC_CACHE", str(directory / "cache"))
    expected = dataclasses.replace(load_model(source), tokenizer=tiny.tokenizer())
    [entry] = cached_models()
    kept = Path(shutil.copytree(entry.path, directory / "kept"))
    names = sorted(path.relative_to(kept) for path in kept.rglob("*") if path.is_file())
    tally = outcomes.Tally("damaged cache entries")

    def problem(found: LanguageModel) -> str | None:
        left = [path.name for path in (directory / "cache").iterdir()]
        if set(left) - {entry.name, KERNELS_DIRECTORY}:
            return f"the cache holds {left}"
        if any(model.problem for model in cached_models(verify=True)):
            return "the cache is still damaged"
        return difference(dataclasses.replace(found, tokenizer=tiny.tokenizer()), expected)

    for seed in seeds:
        rng = random.Random(seed)
        shutil.rmtree(entry.path)
        shutil.copytree(kept, entry.path)
        damage, name = rng.choice(DAMAGES), rng.choice(names)
        damage(Path(entry.path) / name, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tally.add(
                f"seed {seed}: {damage.__name__} {name}",
                outcomes.of_call(lambda: load_model(source), limit_s=60, problem=problem),
            )
    return tally


def test_damaged_cache_entries(tmp_path, monkeypatch, record_property):
    attack_cache(tmp_path, monkeypatch, range(5)).finish(record_property)


@pytest.mark.slow
def test_many_damaged_cache_entries(tmp_path, monkeypatch, record_property):
    attack_cache(tmp_path, monkeypatch, range(100, 300)).finish(record_property)
