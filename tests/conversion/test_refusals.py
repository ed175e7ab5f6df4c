"""Every refusal of the conversion: one sentence that says what is wrong, and nothing left."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import hf_checkpoints
import numpy as np
import pytest

from jaxspec.checkpoint import format as checkpoint
from jaxspec.convert import convert
from jaxspec.errors import CheckpointError, JaxspecError, ModelError


def refused(source: Path, error: type[JaxspecError], *fragments: str, **options) -> None:
    """Converts, and checks the message and that nothing appeared beside the source."""
    destination = source.parent / "out"
    with pytest.raises(error) as raised:
        convert(source, destination, **options)
    message = str(raised.value)
    for fragment in fragments:
        assert fragment in message
    assert "\n" not in message
    assert message.endswith(".")
    assert [path.name for path in source.parent.iterdir()] == [source.name]


@pytest.fixture
def hf(tmp_path) -> Path:
    return hf_checkpoints.write_golden(tmp_path / "hf", "llama", num_shards=3)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            ("GPT2LMHeadModel", "LlamaForCausalLM", "Glm4ForCausalLM", "Qwen3ForCausalLM"),
        ),
        ({"architectures": None, "model_type": "opt"}, ("opt", "MistralForCausalLM")),
        ({"architectures": ["ChatGLMModel"]}, ("ChatGLMModel", "0414")),
        ({"mlp_bias": True}, ("mlp_bias", "True")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config", "float")),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("dynamic", "yarn")),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            ("longrope", "llama3"),
        ),
        ({"rope_scaling": {"type": "yarn", "short_factor": [1]}}, ("short_factor",)),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, ("full_attention",)),
        ({"partial_rotary_factor": 0.5, "rope_parameters": None}, ("partial_rotary_factor", "0.5")),
        (
            {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}},
            ("rope_theta twice", "10000.0", "500000.0"),
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            ("factor twice", "2.0", "4.0"),
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            ("rope_type twice", "linear", "yarn"),
        ),
        ({"num_key_value_heads": 4}, ("6 query heads", "4 KV heads")),
    ],
)
def test_architectures_that_the_decoder_lacks(changes, fragments, hf):
    hf_checkpoints.edit_json(hf / "config.json", **changes)
    refused(hf, ModelError, *fragments)


def test_a_missing_architecture_follows_from_the_model_type(hf):
    hf_checkpoints.edit_json(hf / "config.json", architectures=None)
    assert convert(hf, hf.parent / "out").config.family == "llama"


@pytest.mark.parametrize(
    ("family", "changes", "error", "fragment"),
    [
        ("glm4", {"rms_norm_eps": None}, CheckpointError, "rms_norm_eps"),
        ("qwen3", {"head_dim": None}, CheckpointError, "head_dim"),
        ("llama", {"hidden_size": None}, CheckpointError, "hidden_size"),
        ("llama", {"hidden_size": "wide"}, CheckpointError, "hidden_size to 'wide'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            CheckpointError,
            "low_freq_factor",
        ),
        ("mistral", {"layer_types": ["full_attention"] * 2}, ModelError, "layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, ModelError, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, ModelError, "use_sliding_window"),
    ],
)
def test_configurations_that_do_not_say_enough(family, changes, error, fragment, tmp_path):
    source = hf_checkpoints.write_golden(tmp_path / "hf", family)
    hf_checkpoints.edit_json(source / "config.json", **changes)
    refused(source, error, fragment)


NAN, INF = float("nan"), float("inf")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


# One for each kind of value; tests/attack tries every field with every value.
@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"rms_norm_eps": NAN}, "rms_norm_eps to nan; it must be a number from 1e-12 to 1"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers to 1.5; it must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers to True"),
        ({"hidden_size": 2**31}, "hidden_size to 2147483648"),
        ({"vocab_size": 10**4000}, "vocab_size to 1000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings to 'false'; it must be true or"),
        ({"hidden_act": ["silu"]}, "hidden_act to ['silu']; it must be a text"),
        ({"architectures": 5}, "architectures to 5; it must be a list of texts"),
        ({"architectures": None, "model_type": {"a": 1}}, "model_type to {'a': 1}"),
        ({"eos_token_id": "x"}, "eos_token_id to 'x'; it must be one or several token ids from 0"),
        ({"eos_token_id": [2, True]}, "eos_token_id to [2, True]"),
        ({"rope_parameters": 5}, "rope_parameters to 5; it must be an object"),
        ({"rope_parameters": {"rope_theta": INF}}, "rope_theta to inf; it must be a number from 2"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor to 0"),
        ({"rope_parameters": {**YARN, "beta_fast": NAN}}, "beta_fast to nan"),
        ({"rope_parameters": {**YARN, "truncate": 5}}, "truncate to 5"),
        ({"rope_parameters": {**YARN, "mscale": -1}}, "mscale to -1"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": "1"}}, "low_freq_factor to '1'"),
        ({"partial_rotary_factor": NAN, "rope_parameters": None}, "partial_rotary_factor to nan"),
    ],
)
def test_values_that_no_configuration_has(changes, fragment, hf):
    hf_checkpoints.edit_json(hf / "config.json", **changes)
    refused(hf, CheckpointError, "config.json", fragment)


def test_rotary_factors_that_cancel(hf):
    equal = {**LLAMA3, "low_freq_factor": 4.0}
    hf_checkpoints.edit_json(hf / "config.json", rope_parameters=equal)
    refused(hf, ModelError, "rope.low_frequency_factor is 4.0", "below its high_frequency_factor")


def test_stop_tokens_of_the_generation_config(hf):
    path = hf / "generation_config.json"
    path.write_text('{"eos_token_id": [1, "2"]}')
    refused(hf, CheckpointError, "generation_config.json sets eos_token_id to [1, '2']")
    path.unlink()
    path.symlink_to(hf / "nowhere")
    refused(hf, CheckpointError, "generation_config.json cannot be read (it is a link to nothing)")


def test_what_is_no_file(hf):
    for name, place, reason in (
        ("model-00002-of-00003.safetensors", os.mkfifo, "it is a pipe, not a file"),
        ("config.json", lambda path: path.symlink_to("nowhere"), "it is a link to nothing"),
    ):
        (hf / name).unlink()
        place(hf / name)
        refused(hf, CheckpointError, f"{name} cannot be read ({reason})")


@pytest.mark.parametrize("content", ['{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}", "\ufeff{}"])
def test_json_that_cannot_be_read(content, hf):
    (hf / "config.json").write_text(content, encoding="utf-8")
    refused(hf, CheckpointError, "config.json cannot be read as JSON")


def test_json_that_could_not_be_written_again(hf):
    settings = json.dumps({"deep": "DEEP"}).replace('"DEEP"', "[" * 300 + "]" * 300)
    (hf / "generation_config.json").write_text(settings)
    refused(hf, CheckpointError, "generation_config.json is nested more than 100 levels deep")


@pytest.mark.parametrize("name", ["../hf/model-00001-of-00003.safetensors", "config.json", 5])
def test_an_index_that_names_no_file_beside_it(name, hf):
    index = hf / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**shards, "lm_head.weight": name}}))
    refused(hf, CheckpointError, index.name, "must name .safetensors files beside it")


def test_an_absent_epsilon_is_the_default_of_the_family(tmp_path):
    source = hf_checkpoints.write_golden(tmp_path / "hf", "qwen3")
    hf_checkpoints.edit_json(source / "config.json", rms_norm_eps=None)
    assert convert(source, tmp_path / "out").config.norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("name", "change", "fragments"),
    [
        ("model.layers.1.self_attn.k_proj.weight", None, ("lacks", "layers.1.self_attn.k_proj")),
        ("lm_head.weight", None, ("lacks", "lm_head.weight")),
        ("model.layers.0.self_attn.q_norm.weight", lambda _: np.ones(8, np.float32),
         ("unexpected", "q_norm.weight")),
        ("model.layers.0.mlp.up_proj.weight", lambda _: np.ones((56, 37), np.float32),
         ("wrong shape", "up_proj.weight", "[56, 37]", "[56, 36]")),
        ("model.layers.0.mlp.up_proj.weight", lambda up: up.astype(np.int8),
         ("up_proj.weight", "dtype other than")),
    ],
)  # fmt: skip
def test_tensors_of_another_model(name, change, fragments, tmp_path):
    def changed(tensors):
        before = tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(before)

    source = hf_checkpoints.write_golden(tmp_path / "hf", "llama", change=changed)
    refused(source, CheckpointError, *fragments)


def test_more_layers_than_the_config_says(hf):
    hf_checkpoints.edit_json(hf / "config.json", num_hidden_layers=1)
    refused(hf, CheckpointError, "unexpected", "model.layers.1.", "more")


def test_a_missing_shard(hf):
    (hf / "model-00002-of-00003.safetensors").unlink()
    refused(hf, CheckpointError, "model-00002-of-00003.safetensors", "index.json")


def test_damaged_index_and_config(hf):
    index = hf / "model.safetensors.index.json"
    kept = index.read_text()
    index.write_text("{}")
    refused(hf, CheckpointError, index.name, "names nothing as shards (weight_map)")
    index.write_text(kept)
    (hf / "config.json").write_text("{")
    refused(hf, CheckpointError, "config.json", "JSON")
    (hf / "config.json").unlink()
    refused(hf, CheckpointError, "config.json is missing")


def test_what_does_not_go_with_the_source(hf):
    refused(hf, ModelError, "'int8'", "bfloat16", dtype="int8")
    refused(hf, ModelError, "revision", "main", revision="main")
    (hf / "tokenizer.json").write_text("{}")
    refused(hf, CheckpointError, "tokenizer")
    for file in hf.glob("model*"):
        file.unlink()
    refused(hf, CheckpointError, "no weights", "pytorch_model.bin")


@pytest.mark.parametrize("content", ["a list", "a number", "a sparse tensor"])
def test_a_torch_file_that_holds_no_state_dict(content, hf):
    torch = pytest.importorskip("torch")
    for file in hf.glob("model*"):
        file.unlink()
    held = {
        "a list": [torch.zeros(1)],
        "a number": {"lm_head.weight": 5},
        "a sparse tensor": {"lm_head.weight": torch.zeros(2, 2).to_sparse()},
    }
    torch.save(held[content], hf / "pytorch_model.bin")
    refused(hf, CheckpointError, "pytorch_model.bin", "give a state dict of the whole model")


def test_existing_destination(hf):
    out = hf.parent / "out"
    convert(hf, out)
    before = (out / "jaxspec.json").read_text()
    with pytest.raises(CheckpointError, match=r"exists already.*--overwrite"):
        convert(hf, out, dtype="bfloat16")
    assert (out / "jaxspec.json").read_text() == before
    convert(hf, out, dtype="bfloat16", overwrite=True)
    assert checkpoint.load_converted(out, dtype="bfloat16").dtype == np.dtype("bfloat16")
    assert sorted(path.name for path in hf.parent.iterdir()) == ["hf", "out"]


def test_overwrite_spares_what_is_no_checkpoint(hf):
    out = hf.parent / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(CheckpointError, match="was not written by jaxspec"):
        convert(hf, out, overwrite=True)
    assert (out / "thesis.txt").read_text() == "irreplaceable"


def test_unwritable_destination(hf):
    (hf.parent / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created"):
        convert(hf, hf.parent / "file" / "out")


def test_too_little_space(hf, monkeypatch):
    usage = shutil.disk_usage(hf)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    refused(hf, CheckpointError, "needs", "GiB", "free")


def test_a_limit_on_the_size_of_files(tmp_path):
    """It is an error of Orbax's C++."""
    source = hf_checkpoints.write_golden(tmp_path / "hf", "qwen3")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        refused(source, CheckpointError, "cannot be written (File too large)")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device [errno 28]"),
    ],
)
def test_a_disk_that_fills_up_on_the_way(error, hf, monkeypatch):
    import orbax.checkpoint.experimental.v1 as ocp

    save, calls = ocp.partial.save, []
    monkeypatch.setattr(checkpoint, "_SAVE_BATCH_BYTES", 10_000)

    def fail_late(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise error
        save(*args, **kwargs)

    monkeypatch.setattr(ocp.partial, "save", fail_late)
    refused(hf, CheckpointError, "cannot be written (No space left", "free some space")
    assert len(calls) == 3


def test_other_failures_leave_nothing_behind(hf, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxspec.convert.conversion.convert_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(hf, hf.parent / "out")
    assert [path.name for path in hf.parent.iterdir()] == ["hf"]


def test_a_table_that_misses_a_parameter_is_caught(hf, monkeypatch):
    """The tables are held against the decoder's own list of parameters."""
    from jaxspec.convert import conversion, mapping

    family = conversion.FAMILIES[0]
    short = mapping.Family(
        family.name,
        family.architectures,
        family.read_config,
        lambda config: [leaf for leaf in family.leaves(config) if leaf.path != ("final_norm",)],
    )
    monkeypatch.setattr(conversion, "FAMILIES", (short,))
    monkeypatch.setattr(conversion.hf_reader, "check_tensors", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="param_shapes"):
        convert(hf, hf.parent / "out")
    assert [path.name for path in hf.parent.iterdir()] == ["hf"]
