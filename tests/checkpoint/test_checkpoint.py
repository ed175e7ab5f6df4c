"""Saving and loading models, the names that resolve to one, and the cache of converted models."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from xxhash import xxh3_128_hexdigest

from jaxspec import convert
from jaxspec.checkpoint import format as checkpoint
from jaxspec.checkpoint.format import load_converted, save_model
from jaxspec.checkpoint.manifest import FileChecksum, check_files, read_manifest, write_manifest
from jaxspec.errors import CheckpointError, DamagedError, JaxspecWarning, ModelError
from jaxspec.kernels.base import unpacked
from jaxspec.kernels.registry import default_kernels
from jaxspec.load import models as loading
from jaxspec.load.models import cached_models, load_model, remove_cached_model
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
    made, original = [], loading.convert_directory

    def record(directory, destination, **options):
        made.append(options["source"])
        return original(directory, destination, **options)

    monkeypatch.setattr(loading, "convert_directory", record)
    return made


def assert_same_params(one, other):
    one, other = unpacked(one), unpacked(other)
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
    for name, dtype in {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}.items():
        assert load_model(tmp_path / "saved", dtype=name).dtype == dtype
        assert load_model(tmp_path / "saved", dtype=dtype).dtype == dtype
    with pytest.raises(ModelError, match=r"'int8' is not supported; choose float32"):
        load_model(tmp_path / "saved", dtype="int8")


def test_a_model_is_loaded_in_the_dtype_of_its_checkpoint(tmp_path, monkeypatch, caplog):
    """Except what the kernels of a CPU do not multiply, which is said once."""
    for dtype in ("float32", "bfloat16", "float16"):
        save_model(tiny_model(dtype), tmp_path / dtype)
        widened = "bfloat16" if dtype == "bfloat16" and default_kernels() == "native" else "float32"
        for kernels, expected in ((None, widened), ("xla", "float32"), ("xla", "float32")):
            caplog.clear()
            loaded = load_model(tmp_path / dtype, kernels=kernels)
            assert loaded.dtype == expected
            assert loaded.dtype == loaded.init_cache(1, 128).dtype
    assert caplog.text == ""  # it was said before
    checkpoint._say_widened.cache_clear()
    load_model(tmp_path / "float16", kernels="xla")
    [said] = caplog.messages
    assert said.startswith(f"{tmp_path / 'float16'} is stored in float16 and is loaded as float32")
    load_model(tmp_path / "float16", kernels="xla", dtype="float16")
    assert caplog.messages == [said]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for dtype in ("bfloat16", "float16"):
        assert load_model(tmp_path / dtype).dtype == dtype


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
    [qkv] = jax.tree.leaves(loaded.params["layers"][1]["qkv"])
    assert qkv.sharding == replicated
    assert_same_params(loaded.params, model.params)


def test_saving_does_not_overwrite_unasked(tmp_path):
    first, second = tiny_model(), tiny_model(seed=1)
    save_model(first, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="exists already"):
        save_model(second, tmp_path / "saved")
    assert_same_params(load_model(tmp_path / "saved").params, first.params)
    save_model(second, tmp_path / "saved", overwrite=True)
    assert_same_params(load_model(tmp_path / "saved").params, second.params)


# Damage (tests/attack damages every file in every way)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory) -> Path:
    model = dataclasses.replace(tiny_model(), tokenizer=tiny.tokenizer())
    directory = tmp_path_factory.mktemp("saved") / "model"
    save_model(model, directory)
    return directory


@pytest.fixture
def saved(saved_once, tmp_path) -> Path:
    """A converted directory, to be damaged."""
    return Path(shutil.copytree(saved_once, tmp_path / "saved"))


def test_large_files_have_the_checksums_of_their_bytes(tmp_path):
    """Of an odd size, and of several of the parts in which they are hashed."""
    content = np.random.default_rng(0).bytes(5 * 2**20 + 3)
    large = tmp_path / "large"
    large.write_bytes(content)
    (tmp_path / "empty").touch()
    write_manifest(
        tmp_path,
        config=CONFIG,
        dtype="float32",
        eos_token_ids=(),
        prefix_token_ids=(),
        generation_config={},
        source="made up",
    )
    written = read_manifest(tmp_path)
    assert written.files == {
        "large": FileChecksum(num_bytes=len(content), xxh3=xxh3_128_hexdigest(content)),
        "empty": FileChecksum(num_bytes=0, xxh3=xxh3_128_hexdigest(b"")),
    }
    check_files(tmp_path, written)
    for place in (0, 2**21 - 1, 2**21, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        large.write_bytes(damaged)
        with pytest.raises(DamagedError, match="large is not as it was written"):
            check_files(tmp_path, written)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_found_in_every_file(saved):
    for path in [each for each in saved.rglob("*") if each.is_file() and each.stat().st_size]:
        content = path.read_bytes()
        flip_a_bit(path)
        with pytest.raises(DamagedError) as raised:
            load_model(saved)
        assert path.name in str(raised.value)
        path.write_bytes(content)


def test_checks_can_be_left_out(saved):
    """Then a damaged weight is loaded as it is; everything else is judged by types and ranges."""
    hf_checkpoints.edit_json(saved / "jaxspec.json", source="edited by hand")
    with pytest.raises(DamagedError, match="was changed after it was written"):
        load_model(saved)
    assert load_model(saved, verify=False).config == CONFIG


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config", 5, "config is '5'"),
        ("dtype", "int8", "dtype is 'int8'"),
        ("eos_token_ids", [1e30], "eos_token_ids is '1e"),
        ("prefix_token_ids", [-1], "a token id is -1"),
        ("source", None, "source is 'None'"),
        ("num_params", 7, "num_params is 7"),
        ("files", {"params": 3}, "files is '3'"),
        ("more", 1, "more"),
        ("config.width", 1.5, "width is '1.5'"),
        ("config.num_layers", 2147483647, "num_layers is 2147483647"),
        ("config.num_kv_heads", 0, "does not describe a model"),
        ("config.rope", None, "rope"),
        ("config.sliding_windows", [5], "sliding windows"),
    ],
)
def test_manifests_that_describe_no_model(saved, name, value, message):
    """Also where the checksums are left out."""
    manifest = saved / "jaxspec.json"
    fields = json.loads(manifest.read_text())
    part, _, inner = name.rpartition(".")
    (fields[part] if part else fields)[inner] = value
    manifest.write_text(json.dumps(fields))
    with pytest.raises(DamagedError, match="does not describe a model") as raised:
        load_model(saved, verify=False)
    assert message in str(raised.value)


def test_manifests_that_cannot_be_read(saved):
    manifest = saved / "jaxspec.json"
    kept = manifest.read_text()
    for text in ("{", "", "[]", "5", "null", '{"format_version": 2', "[" * 9999, "\udcff", "{}"):
        manifest.write_bytes(text.encode(errors="surrogateescape"))
        for verify in (True, False):
            with pytest.raises(DamagedError, match="not readable as a jaxspec manifest"):
                load_model(saved, verify=verify)
    os.truncate(manifest, 2**40)  # a hole: it takes no space
    with pytest.raises(DamagedError, match="not readable as a jaxspec manifest"):
        load_model(saved)
    manifest.write_text(kept)
    hf_checkpoints.edit_json(manifest, format_version=99)
    with pytest.raises(CheckpointError, match="format 99"):
        load_model(saved)


def test_parameters_of_another_model(saved):
    """What Orbax finds is compared with the configuration before anything is allocated."""
    other = dataclasses.replace(CONFIG, width=32)
    manifest = saved / "jaxspec.json"
    fields = json.loads(manifest.read_text())
    fields |= {"config": other.to_json(), "num_params": decoder.num_params(other)}
    manifest.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"as those of a model \(.* is stored as"):
        load_model(saved, verify=False)
    shutil.rmtree(saved / "params")
    with pytest.raises(CheckpointError, match="convert the model again"):
        load_model(saved, verify=False)


def test_a_replacement_that_was_interrupted_is_finished_by_its_reader(saved):
    saved.rename(saved.with_name(".saved.complete"))
    assert load_model(saved).config == CONFIG
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


# Names of models


def test_random_presets(monkeypatch):
    asked, place = [], jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def record(preset, **options):
        asked.append((preset, options["dtype"], options["sharding"]))
        return tiny_model()

    with monkeypatch.context() as patch:
        patch.setattr(loading.registry, "random_model", record)
        assert load_model("random:vicuna-68m") is tiny_model()
        load_model("random:vicuna-68m", dtype="bf16", sharding=place)
        patch.setattr(jax, "default_backend", lambda: "gpu")
        load_model("random:vicuna-68m")
    assert asked == [
        ("vicuna-68m", jnp.float32, None),
        ("vicuna-68m", jnp.bfloat16, place),
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
    assert target.dtype == draft.dtype == jnp.float32
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
    }
    for name, fragment in cases.items():
        with pytest.raises(ModelError) as raised:
            load_model(name)
        message = str(raised.value)
        assert fragment in message
        assert name in message
        assert "demo-target" in message
        assert message.count("\n") == 0
    with pytest.raises(ModelError, match="is a file, and models and drafters are directories"):
        load_model(tmp_path / "file")


# The hub, with its answers played back


@pytest.fixture
def hub_model(hf, monkeypatch):
    """A hub that knows `org/model`, whose files are those of `hf`; the downloads."""
    others = ("pytorch_model.bin",)
    return hf_checkpoints.play_hub(monkeypatch, hf, name="org/model", others=others)


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


def test_a_damaged_entry_is_listed_and_removed(hf, cache):
    load_model(hf)
    (entry,) = cached_models()
    (Path(entry.path) / "jaxspec.json").write_text("{")
    (cache / "remains").mkdir()
    damaged, remains = cached_models()
    assert (damaged.name, damaged.source, damaged.dtype) == (entry.name, None, None)
    assert "not readable" in damaged.problem
    assert "remains/jaxspec.json" in remains.problem
    assert remove_cached_model(damaged.name) == damaged.num_bytes > 0
    remove_cached_model("remains")
    assert cached_models() == []


def test_a_damaged_entry_is_made_again(hf, conversions):
    before = load_model(hf)
    (entry,) = cached_models()
    flip_a_bit(max((Path(entry.path) / "params").rglob("*"), key=os.path.getsize))
    with pytest.warns(JaxspecWarning, match="is not as it was written"):
        after = load_model(hf)
    assert_same_params(after.params, before.params)
    assert conversions == [str(hf)] * 2
    assert cached_models(verify=True) == cached_models()


@pytest.mark.slow
def test_processes_that_convert_the_same_model_at_once(hf, cache):
    code = "import sys; from jaxspec.load.models import load_model; load_model(sys.argv[1])"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(hf)], cwd=Path(__file__).parents[2])
        for _ in range(3)
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    (made,) = [path for path in cache.iterdir() if path.name != KERNELS_DIRECTORY]
    assert made.name.startswith("hf-")
    assert load_model(hf).config.family == "qwen3"
