"""Tiny random Hugging Face checkpoints of every family, written by transformers itself."""

from __future__ import annotations

import json
import types
from pathlib import Path

import numpy as np
import pytest

# Sizes that differ wherever two could be mixed up; windows and contexts short enough to matter.
_SHARED = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (HF model type, changes to the shared sizes)
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"num_key_value_heads": 6}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen2-yarn-mscale": (
        "qwen2",
        {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "glm4": ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                          "partial_rotary_factor": 0.5}}),
    "glm4-plain": ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.25}),
}  # fmt: skip


def build(variant: str, *, seed: int = 0, **changes):
    """The torch model of a variant, random weights and norms and biases that are not trivial."""
    torch = pytest.importorskip("torch")
    import transformers

    model_type, fields = VARIANTS[variant]
    fields = {**_SHARED, **fields, **changes}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model.float().eval()


def write(directory: Path, variant: str, *, shard_size: str = "50GB", seed: int = 0, **changes):
    """Writes a variant with `save_pretrained` and returns its torch model."""
    model = build(variant, seed=seed, **changes)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def edit_json(path: Path, **changes) -> None:
    """Changes fields of a JSON file; a value of None removes the field."""
    fields = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            fields.pop(key, None)
        else:
            fields[key] = value
    path.write_text(json.dumps(fields))


def make_v4_style(path: Path) -> None:
    """Rewrites a v5 `config.json` with the keys of transformers v4."""
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    share = rope.pop("partial_rotary_factor", None)
    if share is not None:
        fields["partial_rotary_factor"] = share
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    fields["torch_dtype"] = fields.pop("dtype", "float32")
    path.write_text(json.dumps(fields))


# Without torch: the golden checkpoints, written as safetensors from arrays

GOLDEN = Path(__file__).parent / "golden"


def golden_arrays(family: str, group: str) -> dict[str, np.ndarray]:
    """The arrays `tensor`, `tokens` or `logits` of a golden file, by name."""
    with np.load(GOLDEN / f"{family}.npz") as arrays:
        names = [name for name in arrays.files if name.startswith(f"{group}/")]
        return {name.removeprefix(f"{group}/"): arrays[name] for name in names}


def golden_config(family: str) -> dict:
    """The `config.json` of a golden checkpoint."""
    with np.load(GOLDEN / f"{family}.npz") as arrays:
        return json.loads(str(arrays["config"]))


def write_golden(
    directory: Path, family: str, *, num_shards: int = 1, dtype=np.float32, change=None
) -> Path:
    """Writes a golden checkpoint as a Hugging Face directory and returns it.

    Args:
      num_shards: more than one writes an index.
      dtype: of the tensors in the file.
      change: called with the dict of tensors before they are written.
    """
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(golden_config(family)))
    tensors = {name: array.astype(dtype) for name, array in golden_arrays(family, "tensor").items()}
    if change is not None:
        change(tensors)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = sorted(tensors)  # alphabetical: q, k and v of a layer fall into different shards
    index = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        chosen = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(chosen, directory / file)
        index |= dict.fromkeys(chosen, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


# The hub, with its answers played back


def play_hub(patch, directory: Path, *, name: str, others: tuple[str, ...] = ()) -> list[tuple]:
    """Makes the hub one that knows the repository `name`, whose files are those of `directory` and
    `others`, which must not be fetched; returns the name, commit and patterns of each download from
    now on."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    downloads = []

    def model_info(self, asked, *, revision=None, files_metadata=False):
        if asked != name:
            response = types.SimpleNamespace(headers={}, request=None, status_code=404)
            raise errors.RepositoryNotFoundError(f"no {asked}", response=response)
        sizes = {file.name: file.stat().st_size for file in directory.iterdir()}
        sizes |= dict.fromkeys(others, 2**50)  # larger than any disk
        siblings = [types.SimpleNamespace(rfilename=n, size=size) for n, size in sizes.items()]
        commit = {None: "c0ffee", "main": "c0ffee", "old": "decaf"}[revision]
        return types.SimpleNamespace(sha=commit, siblings=siblings)

    def snapshot_download(asked, *, revision=None, allow_patterns=None, local_files_only=False):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not in the cache")
        downloads.append((asked, revision, list(allow_patterns)))
        return str(directory)

    patch.setattr(hub.HfApi, "model_info", model_info)
    patch.setattr(hub, "snapshot_download", snapshot_download)
    return downloads
