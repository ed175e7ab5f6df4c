"""What a conversion reads and writes: shards, dtypes, `.bin`, stop tokens, command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hf_checkpoints
import jax
import ml_dtypes
import numpy as np
import pytest

from jaxspec import cli
from jaxspec.checkpoint.format import load_converted
from jaxspec.checkpoint.manifest import read_manifest
from jaxspec.convert import conversion, writer
from jaxspec.convert import convert as run_conversion
from jaxspec.errors import CheckpointError

ROOT = Path(__file__).parents[2]


def leaves(directory: Path, dtype="float32"):
    model = load_converted(directory, dtype=dtype)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model.params)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The llama golden checkpoint, converted from one file."""
    root = tmp_path_factory.mktemp("whole")
    hf_checkpoints.write_golden(root / "hf", "llama")
    run_conversion(root / "hf", root / "out")
    return root


def test_scratch_files_make_no_difference(whole, tmp_path, monkeypatch):
    """Large parameters are assembled in a mapped file; here all of them are."""
    monkeypatch.setattr(writer, "_SCRATCH_FROM_BYTES", 1)
    monkeypatch.setattr(writer, "_COPY_ROWS", 5)
    run_conversion(whole / "hf", tmp_path / "out")
    for one, other in zip(leaves(whole / "out"), leaves(tmp_path / "out"), strict=True):
        np.testing.assert_array_equal(one, other)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"jaxspec.json", "params"}


@pytest.mark.parametrize("padding", [1, 2, 3])
def test_tensors_that_do_not_start_at_a_word(padding, whole, tmp_path):
    """The format does not promise alignment, and old files have none."""
    hf = hf_checkpoints.write_golden(tmp_path / "hf", "llama")
    file = hf / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" " * padding
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    run_conversion(hf, tmp_path / "out")
    for one, other in zip(leaves(whole / "out"), leaves(tmp_path / "out"), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_the_checkpoint_keeps_its_dtype(stored, whole, tmp_path):
    hf_checkpoints.write_golden(tmp_path / "hf", "llama", dtype=stored)
    summary = run_conversion(tmp_path / "hf", tmp_path / "out")
    assert summary.dtype == np.dtype(stored).name
    assert summary.num_bytes == 2 * summary.num_params
    for wide, narrow in zip(leaves(whole / "out"), leaves(tmp_path / "out"), strict=True):
        np.testing.assert_array_equal(wide.astype(stored).astype(np.float32), narrow)


def test_dtype_can_be_chosen(whole, tmp_path):
    summary = run_conversion(whole / "hf", tmp_path / "out", dtype="bfloat16")
    assert summary.dtype == read_manifest(tmp_path / "out").dtype == "bfloat16"
    for wide, narrow in zip(leaves(whole / "out"), leaves(tmp_path / "out"), strict=True):
        rounded = wide.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(rounded, narrow)


@pytest.mark.parametrize(
    ("generation", "in_config", "expected"),
    [
        (None, 2, (2,)),
        ({}, [5, 6], (5, 6)),
        ({"eos_token_id": [7, 8, 9]}, 2, (7, 8, 9)),
        ({"eos_token_id": 7}, [5, 6], (7,)),
        (None, None, ()),
    ],
)
def test_stop_tokens(generation, in_config, expected, tmp_path):
    hf = hf_checkpoints.write_golden(tmp_path / "hf", "llama")
    hf_checkpoints.edit_json(hf / "config.json", eos_token_id=in_config)
    if generation is not None:
        (hf / "generation_config.json").write_text(json.dumps(generation))
    run_conversion(hf, tmp_path / "out")
    model = load_converted(tmp_path / "out")
    assert model.eos_token_ids == expected
    assert model.generation_config == (generation or {})


def test_buffers_and_a_repeated_head_are_ignored(tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    hf_checkpoints.write_golden(tmp_path / "hf", "qwen3", change=add)
    assert run_conversion(tmp_path / "hf", tmp_path / "out").config.is_tied


def test_a_head_of_its_own_is_used_although_the_config_calls_it_tied(tmp_path):
    """As transformers 5 does: a tied model that was trained on may have such a head."""
    source = hf_checkpoints.write_golden(tmp_path / "hf", "llama")
    run_conversion(source, tmp_path / "as stated")
    hf_checkpoints.edit_json(source / "config.json", tie_word_embeddings=True)
    assert not run_conversion(source, tmp_path / "out").config.is_tied
    head = hf_checkpoints.golden_arrays("llama", "tensor")["lm_head.weight"]
    for name in ("as stated", "out"):
        params = load_converted(tmp_path / name, kernels="xla").params
        np.testing.assert_array_equal(np.asarray(params["head"]), head.T)

    def cut(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:-1]

    other = hf_checkpoints.write_golden(tmp_path / "other", "llama", change=cut)
    hf_checkpoints.edit_json(other / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"wrong shape for lm_head\.weight"):
        run_conversion(other, tmp_path / "cut")


def test_torch_files(whole, tmp_path):
    torch = pytest.importorskip("torch")
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_bytes((whole / "hf/config.json").read_bytes())
    tensors = {
        name: torch.from_numpy(array.astype(np.float32))
        for name, array in hf_checkpoints.golden_arrays("llama", "tensor").items()
    }
    names = list(tensors)
    index = {}
    for shard in range(2):
        file = f"pytorch_model-{shard + 1:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in names[shard::2]}, hf / file)
        index |= dict.fromkeys(names[shard::2], file)
    (hf / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    run_conversion(hf, tmp_path / "out")
    for one, other in zip(leaves(whole / "out"), leaves(tmp_path / "out"), strict=True):
        np.testing.assert_array_equal(one, other)

    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    for file in hf.glob("pytorch_model*"):
        file.unlink()
    torch.save(narrow, hf / "pytorch_model.bin")
    assert run_conversion(hf, tmp_path / "narrow").dtype == "bfloat16"

    torch.save({"model.norm.weight": Path("x")}, hf / "pytorch_model.bin")  # needs a pickled class
    with pytest.raises(CheckpointError, match="cannot be read as a torch state dict"):
        run_conversion(hf, tmp_path / "refused")


def test_torch_files_without_torch(whole, tmp_path, monkeypatch):
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_bytes((whole / "hf/config.json").read_bytes())
    (hf / "pytorch_model.bin").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"install the parity extra"):
        run_conversion(hf, tmp_path / "out")


def test_verification(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    hf = hf_checkpoints.write_golden(tmp_path / "hf", "llama")
    summary = run_conversion(hf, tmp_path / "out", verify=True, dtype="bfloat16")
    assert "of torch's" in summary.verification
    assert summary.verification in str(summary)

    wrong = {"rms_norm_eps": 0.5}
    hf_checkpoints.edit_json(hf / "config.json", **wrong)
    config = conversion.read_model_config

    def with_another_epsilon(fields, family):
        fields.fields["rms_norm_eps"] = 1e-5
        return config(fields, family)

    monkeypatch.setattr(conversion, "read_model_config", with_another_epsilon)
    with pytest.raises(CheckpointError, match="differ from torch's"):
        run_conversion(hf, tmp_path / "refused", verify=True)
    assert [path.name for path in tmp_path.iterdir() if "refused" in path.name] == []


def test_python_m_convert_in_a_checkout(whole, tmp_path):
    """The package at the top of the repository, which is also installed as `jaxspec.convert`."""
    arguments = ["-m", "convert", str(whole / "hf"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "out").config.family == "llama"


def test_command_line(whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "prepare_process", lambda: None)
    options = ["--dtype", "bfloat16", "--json"]
    assert cli.main(["convert", str(whole / "hf"), str(tmp_path / "out"), *options]) == 0
    printed = capsys.readouterr().out
    assert "in bfloat16" in printed
    document = json.loads(printed.splitlines()[-1])
    assert document["dtype"] == "bfloat16"
    assert document["destination"] == str(tmp_path / "out")
    assert str(tmp_path / "out") in printed
    assert read_manifest(tmp_path / "out").dtype == "bfloat16"

    assert cli.main(["convert", str(whole / "hf"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "exists already" in error
    assert error.count("\n") == 1

    assert cli.main(["convert", str(tmp_path / "none-such"), str(tmp_path / "other")]) == 1
    assert "none-such" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
