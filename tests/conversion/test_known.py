"""What people give by mistake is called by its name, as a target and as a drafter."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import hf_checkpoints
import numpy as np
import pytest
import toy
from safetensors.numpy import save_file

from jaxspec import load_drafter, load_model
from jaxspec.convert import convert, hub
from jaxspec.convert.known import refuse_known
from jaxspec.errors import JaxspecError, ModelError

HALF = np.zeros((2, 2), np.float16)
TARGET = toy.model()


def write_lfs(directory: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (directory / "model.safetensors").write_text(text)


def write_hub_cache(directory: Path) -> None:
    (directory / "models--Qwen--Qwen3-0.6B" / "snapshots").mkdir(parents=True)


def write_gguf(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "model.safetensors").unlink()
    (directory / "model.Q4_0.gguf").write_bytes(b"GGUF\3\0\0\0")


def write_fp8(directory: Path) -> None:
    header = json.dumps({"a.weight": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}})
    content = struct.pack("<Q", len(header)) + header.encode() + b"\0"
    (directory / "model.safetensors").write_bytes(content)


def with_files(*names: str):
    def write(directory: Path) -> None:
        for name in names:
            (directory / name).write_text("{}")

    return write


def with_tensors(*names: str):
    return lambda directory: save_file(dict.fromkeys(names, HALF), directory / "model.safetensors")


def with_config(**changes):
    return lambda directory: hf_checkpoints.edit_json(directory / "config.json", **changes)


def without_weights(*names: str):
    def write(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        with_files(*names)(directory)

    return write


def authors_layout(directory: Path) -> None:
    without_weights("params.json", "consolidated.00.pth")(directory)
    (directory / "config.json").unlink()


KNOWN = {
    "lfs": (write_lfs, "pointers of Git LFS (model.safetensors is one)"),
    "gguf": (write_gguf, "holds GGUF files; give the file itself, model.Q4_0.gguf for example"),
    "lora": (without_weights("adapter_config.json", "adapter_model.safetensors"), "LoRA adapter"),
    "lora beside a model": (with_files("adapter_config.json"), "merge it into its model"),
    "eagle": (with_config(architectures=["EagleLlamaModel"]), "is an EAGLE drafter"),
    "eagle tensors": (with_tensors("fc.weight", "layers.0.self_attn.q_proj.weight"), "an EAGLE"),
    "eagle-3": (with_config(architectures=["LlamaForCausalLMEagle3"]), "is an EAGLE-3 drafter"),
    "eagle-3 tensors": (with_tensors("d2t", "t2d", "midlayer.self_attn.q_proj.weight"), "EAGLE-3"),
    "dflash": (with_config(architectures=["DFlashDraftModel"]), "is a DFlash drafter"),
    "dspark": (with_config(architectures=["DSparkDraftModel"]), "is a DSpark drafter"),
    "mtp": (with_tensors("mtp.layers.0.weight"), "multi-token prediction"),
    "gptq": (with_tensors("model.layers.0.mlp.up_proj.qweight"), "GPTQ or AWQ"),
    "fp8": (write_fp8, "FP8"),
    "fp8 scales": (with_tensors("model.layers.0.mlp.up_proj.weight_scale_inv"), "FP8"),
    "bitsandbytes": (with_tensors("a.weight", "a.weight.absmax"), "bitsandbytes"),
    "module": (with_tensors("module.model.norm.weight"), "begin with module., as torch's Data"),
    "compiled": (with_tensors("_orig_mod.model.norm.weight"), "_orig_mod., as torch.compile"),
    "authors": (authors_layout, "Hugging Face version"),
    "shards": (without_weights("__0_0.distcp"), "shards of its processes"),
}


@pytest.fixture
def directory(tmp_path) -> Path:
    return hf_checkpoints.write_golden(tmp_path / "given", "llama")


@pytest.mark.parametrize("name", list(KNOWN))
def test_known_things_are_called_by_their_names(name, directory):
    write, message = KNOWN[name]
    write(directory)
    for load in (
        lambda: load_model(directory),
        lambda: convert(directory, directory.parent / "out"),
        lambda: load_drafter(directory, TARGET),
    ):
        with pytest.raises(ModelError) as raised:
            load()
        assert message in str(raised.value)
        assert str(raised.value).startswith(f"{directory} ")
        assert str(raised.value).endswith(".")


def test_a_healthy_model_is_nothing_known(directory):
    refuse_known(directory)
    with pytest.raises(ModelError, match="holds no heads in a layout that is known"):
        load_drafter(directory, TARGET, kind="heads")
    for damage in (b"", b"\xff" * 9, b"\x10\0\0\0\0\0\0\0[1, 2]"):
        (directory / "model.safetensors").write_bytes(damage)
        refuse_known(directory)


def test_files_and_hub_caches(tmp_path):
    gguf, weights = tmp_path / "model.gguf", tmp_path / "model.safetensors"
    gguf.write_bytes(b"GGML\3\0\0\0")
    weights.write_bytes(b"")
    write_hub_cache(tmp_path / "hub")
    model = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B"
    for path, message in (
        (gguf, "are directories, or files that begin with GGUF"),
        (weights, "is a file, and models and drafters are directories"),
        (tmp_path / "hub", "is a hub cache with many models"),
        (model, "give the hub id Qwen/Qwen3-0.6B"),
    ):
        for load in (load_model, lambda path: load_drafter(path, TARGET)):
            with pytest.raises(ModelError) as raised:
                load(path)
            assert message in str(raised.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("README.md", "model.Q4_K_M.gguf"), "org/name holds GGUF files; give the file itself"),
        (("adapter_config.json", "adapter_model.safetensors"), "org/name holds a LoRA adapter"),
    ],
)
def test_a_hub_repository_is_refused_before_anything_is_fetched(
    monkeypatch, tmp_path, files, message
):
    downloads = hf_checkpoints.play_hub(monkeypatch, tmp_path, name="org/name", others=files)
    with pytest.raises(JaxspecError) as raised:
        hub.download("org/name", None)
    assert message in str(raised.value)
    assert downloads == []
