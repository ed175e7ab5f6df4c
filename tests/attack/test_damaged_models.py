"""Converted directories and cached models with damaged files: refused, or loaded as they were."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import warnings
from pathlib import Path

import hf_checkpoints
import jax
import numpy as np
import pytest
import tiny
import xxhash
from attack import hf_damage, outcomes

from jaxspec.load.models import cached_models, load_model
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.directories import KERNELS_DIRECTORY


def damage(path: Path, rng: random.Random) -> str:
    """Damages a file; returns what was done."""
    num_bytes = path.stat().st_size
    if num_bytes and rng.random() < 0.5:
        return hf_damage.damage(path, rng, num_bytes)
    return hf_damage.replace(path, rng)


# What a field of the manifest may be made, of any type and size.
VALUES = (
    None, True, "x", "", [], {}, [None], {"a": 1}, 0, -1, 1, 2, 3, 1.5, 1e30, 1e-30, -0.0, 2**31,
    2**64, float("nan"), float("inf"), "9" * 5000, [2**70], ["\ud800"], [[[[]]]],
)  # fmt: skip


def change_a_field(path: Path, rng: random.Random) -> str:
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
    return f"with {kind} of {name}"


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
        # A field with a right checksum may describe another model: then it is that model.
        is_meant = seed % 3 == 0
        name = Path("jaxspec.json") if is_meant else rng.choice(names)
        done = (change_a_field if is_meant else damage)(copy / name, rng)
        tally.add(
            f"seed {seed}: {name} {done}",
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
        name = rng.choice(names)
        done = damage(Path(entry.path) / name, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tally.add(
                f"seed {seed}: {name} {done}",
                outcomes.of_call(lambda: load_model(source), limit_s=60, problem=problem),
            )
    return tally


def test_damaged_cache_entries(tmp_path, monkeypatch, record_property):
    attack_cache(tmp_path, monkeypatch, range(5)).finish(record_property)


@pytest.mark.slow
def test_many_damaged_cache_entries(tmp_path, monkeypatch, record_property):
    attack_cache(tmp_path, monkeypatch, range(100, 300)).finish(record_property)
