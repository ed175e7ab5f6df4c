"""Writes a model as a Hugging Face checkpoint directory: a trained Qwen3, or a random Llama."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import tokenizers
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file

from jaxspec.convert.hf_config import config_fields
from jaxspec.kernels.base import unpacked
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.directories import atomic_directory
from jaxspec.runtime.documents import json_text
from jaxspec.training import data
from jaxspec.types import PyTree

# A conversation in the form of the corpus' questions, so that a chat prompt looks like the training
# text.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + '<|endoftext|>' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\\nAnswer:' }}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
)


def write_hugging_face(
    directory: pathlib.Path,
    config: ModelConfig,
    params: PyTree,
    tokenizer: tokenizers.Tokenizer | None,
    *,
    dtype: np.dtype | type = ml_dtypes.bfloat16,
    max_shard_bytes: int = 5_000_000,
) -> None:
    """Writes config, safetensors with an index and, if there is a tokenizer, its files and a
    generation config.

    An existing checkpoint is replaced. A shard exceeds `max_shard_bytes` only if one tensor does.

    Raises:
      ModelError: the family is neither `qwen3` nor `llama`, or rotary embeddings are scaled.
      SettingError: another process is writing the directory.
      CheckpointError: the directory exists and is not a checkpoint, or it cannot be written.
    """
    end_of_text = None if tokenizer is None else data.end_of_text_id(tokenizer)
    fields = config_fields(config, end_of_text=end_of_text, dtype=dtype)
    with atomic_directory(directory, overwrite=True, may_replace=is_hugging_face) as partial:
        _write_json(partial / "config.json", fields)
        _write_tensors(partial, dict(hugging_face_tensors(config, params)), dtype, max_shard_bytes)
        if tokenizer is not None:
            _write_json(
                partial / "generation_config.json",
                {"do_sample": False, "eos_token_id": end_of_text, "pad_token_id": end_of_text},
            )
            tokenizer.save(str(partial / "tokenizer.json"))
            own = _tokenizer_fields(config, data.end_of_text(tokenizer))
            _write_json(partial / "tokenizer_config.json", own)
        for path in partial.iterdir():
            path.chmod(0o644)


def is_hugging_face(directory: pathlib.Path) -> bool:
    """Whether a directory holds a Hugging Face checkpoint."""
    return (directory / "config.json").is_file()


def hugging_face_tensors(config: ModelConfig, params: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of every tensor of a Qwen3 or Llama, matrices as `[out, in]`.

    Query head k * G + g of the checkpoint is query head g of our KV head k.
    """
    group, width = config.group, config.width

    def heads(columns: np.ndarray) -> np.ndarray:  # [E, K, n, H] -> [K * n * H, E]
        return columns.reshape(width, -1).T

    params = unpacked(params)
    yield "model.embed_tokens.weight", np.asarray(params["embedding"])
    for index, layer in enumerate(params["layers"]):
        layer = {name: np.asarray(value) for name, value in layer.items()}
        prefix = f"model.layers.{index}"
        qkv = layer["qkv"]
        yield f"{prefix}.self_attn.q_proj.weight", heads(qkv[:, :, :group])
        yield f"{prefix}.self_attn.k_proj.weight", heads(qkv[:, :, group])
        yield f"{prefix}.self_attn.v_proj.weight", heads(qkv[:, :, group + 1])
        yield f"{prefix}.self_attn.o_proj.weight", layer["output"].reshape(-1, width).T
        if config.has_qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", layer["q_norm"]
            yield f"{prefix}.self_attn.k_norm.weight", layer["k_norm"]
        yield f"{prefix}.mlp.gate_proj.weight", layer["gate_up"][:, 0].T
        yield f"{prefix}.mlp.up_proj.weight", layer["gate_up"][:, 1].T
        yield f"{prefix}.mlp.down_proj.weight", layer["down"].T
        yield f"{prefix}.input_layernorm.weight", layer["attention_norm"]
        yield f"{prefix}.post_attention_layernorm.weight", layer["feed_forward_norm"]
    yield "model.norm.weight", np.asarray(params["final_norm"])
    if not config.is_tied:
        yield "lm_head.weight", np.asarray(params["head"]).T


def _tokenizer_fields(config: ModelConfig, end_of_text: str) -> dict:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": end_of_text,
        "model_max_length": config.max_length,
        "pad_token": end_of_text,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_tensors(
    directory: pathlib.Path, tensors: dict[str, np.ndarray], dtype, max_shard_bytes: int
) -> None:
    tensors = {name: np.ascontiguousarray(tensor.astype(dtype)) for name, tensor in tensors.items()}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index_fields = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(directory / "model.safetensors.index.json", index_fields)


def _write_json(path: pathlib.Path, fields: dict) -> None:
    path.write_text(json_text(fields, indent=2) + "\n", encoding="utf-8")
