"""Saving and loading models, the names that resolve to one, and the cache of converted models."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import convert
from jaxspec.checkpoint import format as checkpoint
from jaxspec.checkpoint import resolve
from jaxspec.checkpoint.format import load_converted, save_model
from jaxspec.checkpoint.resolve import cached_models, load_model, remove_cached_model
from jaxspec.errors import CheckpointError, ModelError
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.runtime.directories import KERNELS_DIRECTORY

CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    width=16,
    feed_forward_width=24,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_length=64,
    norm_epsilon=1e-6,
    rope=RopeConfig(theta=1e4, rotary_size=8),
    sliding_windows=(None, 5),
)


@functools.cache
def tiny_model(dtype: str = "float32", seed: int = 0) -> LanguageModel:
    rng = np.random.default_rng(seed)
    shapes = decoder.param_shapes(CONFIG)
    params = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), checkpoint.parse_dtype(dtype)),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple) and isinstance(node[0], int),
    )
    return LanguageModel(name="tiny", config=CONFIG, params=params)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hf(tmp_path) -> Path:
    return hf_checkpoints.write_golden(tmp_path / "hf", "qwen3", num_shards=2, dtype=np.float16)


@pytest.fixture
def conversions(monkeypatch) -> list[str]:
    """The sources that were converted."""
    made, original = [], resolve.convert_directory

    def record(directory, destination, **options):
        made.append(options["source"])
        return original(directory, destination, **options)

    monkeypatch.setattr(resolve, "convert_directory", record)
    return made


def assert_same_params(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


# Saving and loading


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_saved_model_comes_back_bit_for_bit(dtype, tmp_path):
    model = tiny_model(dtype)
    save_model(model, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved", dtype=dtype)
    assert loaded.config == model.config
    assert loaded.name == str(tmp_path / "saved")
    assert_same_params(loaded.params, model.params)


def test_dtypes(tmp_path):
    save_model(tiny_model("bfloat16"), tmp_path / "saved")
    assert load_model(tmp_path / "saved").dtype == jnp.float32  # on a CPU
    for name, dtype in {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}.items():
        assert load_model(tmp_path / "saved", dtype=name).dtype == dtype
        assert load_model(tmp_path / "saved", dtype=dtype).dtype == dtype
    with pytest.raises(ModelError, match=r"'int8' is not supported; choose float32"):
        load_model(tmp_path / "saved", dtype="int8")


def test_an_accelerator_keeps_the_dtype_of_the_checkpoint(tmp_path, monkeypatch):
    save_model(tiny_model("bfloat16"), tmp_path / "saved")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert load_model(tmp_path / "saved").dtype == jnp.bfloat16


def test_sharding(tmp_path):
    model = tiny_model()
    save_model(model, tmp_path / "saved")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    loaded = load_model(tmp_path / "saved", sharding=replicated)
    assert {leaf.sharding for leaf in jax.tree.leaves(loaded.params)} == {replicated}

    shardings = jax.tree.map(lambda _: replicated, model.params)
    shardings = {**shardings, "embedding": split}
    loaded = load_model(tmp_path / "saved", sharding=shardings)
    assert loaded.params["embedding"].sharding == split
    assert loaded.params["layers"][1]["qkv"].sharding == replicated
    assert_same_params(loaded.params, model.params)


def test_saving_does_not_overwrite_unasked(tmp_path):
    first, second = tiny_model(), tiny_model(seed=1)
    save_model(first, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="exists already"):
        save_model(second, tmp_path / "saved")
    assert_same_params(load_model(tmp_path / "saved").params, first.params)
    save_model(second, tmp_path / "saved", overwrite=True)
    assert_same_params(load_model(tmp_path / "saved").params, second.params)


def test_damaged_checkpoints(tmp_path):
    saved = tmp_path / "saved"
    save_model(tiny_model(), saved)
    manifest = saved / "jaxspec.json"
    kept = manifest.read_text()

    hf_checkpoints.edit_json(manifest, format_version=99)
    with pytest.raises(CheckpointError, match="format 99"):
        load_model(saved)
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="not readable"):
        load_model(saved)
    fields = json.loads(kept)
    del fields["config"]["width"]
    manifest.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="lacks fields"):
        load_model(saved)
    fields = json.loads(kept)
    fields["config"]["width"] = 32
    manifest.write_text(json.dumps(fields))
    with pytest.raises(
        CheckpointError, match=r"as those of a llama model \(embedding is stored as"
    ):
        load_model(saved)
    manifest.write_text(kept)
    shutil.rmtree(saved / "params")
    with pytest.raises(CheckpointError, match="convert the model again"):
        load_model(saved)


def test_checkpoints_import_neither_transformers_nor_torch():
    code = (
        "import sys, jaxspec.checkpoint.resolve; "
        "sys.exit(any(name in sys.modules for name in ('transformers', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Names of models


def test_random_presets(monkeypatch):
    asked = []

    def record(preset, **options):
        asked.append((preset, options["dtype"], options["sharding"]))
        return tiny_model()

    with monkeypatch.context() as patch:
        patch.setattr(resolve.registry, "random_model", record)
        assert load_model("random:vicuna-68m") is tiny_model()
        load_model("random:vicuna-68m", dtype="bf16", sharding="replicated")
        patch.setattr(jax, "default_backend", lambda: "gpu")
        load_model("random:vicuna-68m")
    assert asked == [
        ("vicuna-68m", jnp.float32, None),
        ("vicuna-68m", jnp.bfloat16, "replicated"),
        ("vicuna-68m", jnp.bfloat16, None),
    ]
    with pytest.raises(ModelError, match=r"no preset 'huge'; choose one of .*vicuna-7b"):
        load_model("random:huge")


def test_a_hugging_face_directory_is_converted_once(hf, cache, conversions):
    first = load_model(hf)
    assert first.dtype == jnp.float32
    second = load_model(str(hf))
    assert conversions == [str(hf)]
    assert_same_params(first.params, second.params)
    (entry,) = cached_models()
    assert entry.name.startswith("hf-")
    assert entry.source == str(hf)
    assert entry.dtype == "float16"
    assert entry.num_bytes > 2 * entry.num_params
    assert Path(entry.path).parent == cache


def test_a_changed_directory_is_converted_anew(hf, conversions):
    before = load_model(hf)
    hf_checkpoints.edit_json(hf / "config.json", rms_norm_eps=0.1)
    after = load_model(hf)
    assert len(conversions) == 2
    assert (before.config.norm_epsilon, after.config.norm_epsilon) == (1e-5, 0.1)
    stale = hf_checkpoints.write_golden(
        hf,
        "qwen3",
        num_shards=2,
        dtype=np.float16,
        change=lambda tensors: tensors.update({name: -t for name, t in tensors.items()}),
    )
    hf_checkpoints.edit_json(stale / "config.json", rms_norm_eps=0.1)
    negated = load_model(stale)
    np.testing.assert_array_equal(negated.params["final_norm"], -after.params["final_norm"])


def test_the_embedded_pair(conversions):
    target, draft = load_model("demo-target"), load_model("demo-draft")
    assert target.name == "demo-target"
    assert target.vocab_size == draft.vocab_size
    assert target.tokenizer.encode("Once upon a time") == draft.tokenizer.encode("Once upon a time")
    load_model("demo-target")
    assert conversions == ["demo-target", "demo-draft"]


def test_names_that_name_nothing(tmp_path, monkeypatch):
    import huggingface_hub as hub

    def unreachable(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.HfApi, "model_info", unreachable)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    cases = {
        "no-such-model": "the hub cannot be reached",
        "org/no-such-model": "the hub cannot be reached",
        "./no-such-directory": "no model at",
        "a/b/c": "no model at",
        str(tmp_path / "empty"): "no config.json",
        str(tmp_path / "file"): "no config.json",
    }
    for name, fragment in cases.items():
        with pytest.raises(ModelError) as raised:
            load_model(name)
        message = str(raised.value)
        assert fragment in message
        assert name in message
        assert "demo-target" in message
        assert message.count("\n") == 0


# The hub, with its answers played back


@pytest.fixture
def hub_model(hf, monkeypatch):
    """A hub that knows `org/model`, whose files are those of `hf`; counts the downloads."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    downloads = []

    def not_found(name):
        response = types.SimpleNamespace(headers={}, request=None, status_code=404)
        return errors.RepositoryNotFoundError(f"no {name}", response=response)

    def model_info(self, name, *, revision=None, files_metadata=False):
        if name != "org/model":
            raise not_found(name)
        files = [
            types.SimpleNamespace(rfilename=file.name, size=file.stat().st_size)
            for file in hf.iterdir()
        ]
        files.append(types.SimpleNamespace(rfilename="pytorch_model.bin", size=2**50))
        commit = {None: "c0ffee", "main": "c0ffee", "old": "decaf"}[revision]
        return types.SimpleNamespace(sha=commit, siblings=files)

    def snapshot_download(name, *, revision=None, allow_patterns=None, local_files_only=False):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not in the cache")
        downloads.append((name, revision, tuple(allow_patterns)))
        return str(hf)

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    return downloads


def test_hub_ids(hub_model, conversions):
    model = load_model("org/model")
    assert model.name == "org/model"
    assert hub_model[0][:2] == ("org/model", "c0ffee")
    assert "model*.safetensors*" in hub_model[0][2]
    assert not any(".bin" in pattern for pattern in hub_model[0][2])
    (entry,) = cached_models()
    assert (entry.source, entry.revision) == ("org/model", "c0ffee")
    assert entry.name.startswith("org--model-")
    load_model("org/model", revision="main")
    assert len(conversions) == 1  # the same commit
    load_model("org/model", revision="old")
    assert len(conversions) == 2


def test_unknown_hub_ids(hub_model):
    with pytest.raises(ModelError, match=r"org/other .* neither a local directory nor a model"):
        load_model("org/other")


def test_a_download_without_space(hub_model, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"Downloading org/model needs .* GiB are free"):
        load_model("org/model")
    assert hub_model == []


def test_a_download_that_breaks_off(hub_model, monkeypatch):
    def break_off(*_, **__):
        raise ConnectionError("Connection reset by peer\n(attempt 5)")

    monkeypatch.setattr("huggingface_hub.snapshot_download", break_off)
    with pytest.raises(ModelError, match=r"could not be downloaded \(Connection reset by peer\); "):
        load_model("org/model")


def test_convert_takes_hub_ids_too(hub_model, tmp_path):
    summary = convert.convert("org/model", tmp_path / "out", revision="old")
    assert (summary.source, summary.revision) == ("org/model", "decaf")
    assert load_converted(tmp_path / "out").vocab_size == 97


# The cache


def test_removing_from_the_cache(hf, conversions):
    load_model(hf)
    (entry,) = cached_models()
    with pytest.raises(ModelError, match=r"0 models named 'other'.*" + entry.name):
        remove_cached_model("other")
    assert remove_cached_model(entry.name) == entry.num_bytes
    assert cached_models() == []
    load_model(hf)
    assert len(conversions) == 2
    remove_cached_model(str(hf))
    assert cached_models() == []


def test_an_absent_cache_is_empty(cache):
    assert not cache.exists()
    assert cached_models() == []


def test_two_conversions_at_once_share_the_first(hf, monkeypatch):
    """While one process converts, another one finishes; its directory is used."""
    original = resolve.convert_directory

    def overtaken(directory, destination, **options):
        monkeypatch.setattr(resolve, "convert_directory", original)
        writer = checkpoint.write_params

        def finish_first(*args):
            writer(*args)
            monkeypatch.setattr("jaxspec.convert.writer.write_params", writer)
            original(directory, destination, **options)

        monkeypatch.setattr("jaxspec.convert.writer.write_params", finish_first)
        return original(directory, destination, **options)

    monkeypatch.setattr(resolve, "convert_directory", overtaken)
    model = load_model(hf)
    (entry,) = cached_models()
    assert_same_params(model.params, load_model(entry.path).params)
    assert [path.name for path in Path(entry.path).parent.iterdir()] == [entry.name]


def test_processes_that_convert_the_same_model_at_once(hf, cache):
    code = "import sys; from jaxspec.checkpoint.resolve import load_model; load_model(sys.argv[1])"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(hf)], cwd=Path(__file__).parents[2])
        for _ in range(3)
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len([path for path in cache.iterdir() if path.name != KERNELS_DIRECTORY]) == 1
    assert load_model(hf).config.family == "qwen3"
