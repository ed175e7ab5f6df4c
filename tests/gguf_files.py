"""Small random models, as GGUF files that `gguf.GGUFWriter` writes, and as Hugging Face directories
with the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file

from jaxspec.convert.conversion import find_family, read_model_config
from jaxspec.convert.hf_config import HFConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2")
WHOLE = "Ġwhole"  # no merges lead to it
TOKENS = (*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), WHOLE)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant"
)
PADDED = 288  # of the embedding
_EPSILON = float(np.float32(1e-5))  # GGUF has it in float32
_SHARED = {
    "vocab_size": PADDED,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": _EPSILON,
    "rope_theta": 10000.0,
    "eos_token_id": [0, 2],
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (architecture in GGUF, Hugging Face's class, changes to the shared settings)
MODELS = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "llama-tied": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", "LlamaForCausalLM", {"attention_bias": True}),
    "llama-linear": (
        "llama",
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "llama3": ("llama", "LlamaForCausalLM", {"rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    "mistral": ("llama", "MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen2-yarn": ("qwen2", "Qwen2ForCausalLM", {"rope_scaling": _YARN}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
}


def tensors(name: str, *, seed: int = 0) -> tuple[dict, dict[str, np.ndarray]]:
    """The `config.json` of a model, and random tensors by Hugging Face's names."""
    _, architecture, changes = MODELS[name]
    fields = {**_SHARED, "architectures": [architecture], **changes}
    stated = HFConfig(fields, name)
    family = find_family(stated)
    leaves = family.leaves(read_model_config(stated, family))
    random = np.random.default_rng(seed)
    return fields, {
        tensor: random.uniform(0.5, 1.5, shape).astype(np.float32)
        if "norm" in tensor
        else random.normal(0, 0.2, shape).astype(np.float32)
        for leaf in leaves
        for tensor, shape in leaf.sources.items()
    }


def write_hf(directory: Path, fields: dict, weights: dict[str, np.ndarray]) -> Path:
    """Writes a Hugging Face directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(weights, directory / "model.safetensors")
    return directory


def as_llama_cpp(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter orders them: pairs of neighbours are rotated."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def rope_factors(fields: dict) -> np.ndarray:
    """What llama.cpp's converter makes of Llama 3.1's rotary scaling."""
    rope, size = fields["rope_scaling"], fields["head_dim"]
    lengths = 2 * np.pi * fields["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths > original / low, rope["factor"], between)
    return np.where(lengths < original / high, 1, factors).astype(np.float32)


def byte_level_tokenizer(pre: str = "qwen2") -> dict:
    """Settings of a tokenizer with the tokens above."""
    num_tokens, num_pads = len(TOKENS), PADDED - len(TOKENS)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*TOKENS, *(f"[PAD{i}]" for i in range(num_tokens, PADDED))],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (num_tokens - 3) + [5] * num_pads,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    path: Path, name: str = "llama", *, kind: str = "F32", tokenizer: dict | None = None,
    num_parts: int = 1, **changes,
) -> tuple[dict, dict[str, np.ndarray]]:  # fmt: skip
    """Writes a model, and returns the `config.json` and the tensors (dequantized, by their names in
    Hugging Face) that it amounts to.

    Args:
      kind: the quantization of all matrices.
      tokenizer: settings; None is `byte_level_tokenizer()`.
      num_parts: of a split file, whose parts are named from `path`.
      changes: settings without the architecture, `__` for dots; None leaves one out.
    """
    fields, weights = tensors(name)
    architecture = MODELS[name][0]
    rope = fields.get("rope_scaling", {})
    settings = {
        "context_length": fields["max_position_embeddings"],
        "block_count": fields["num_hidden_layers"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.key_length": fields["head_dim"],
        "attention.value_length": fields["head_dim"],
        "attention.layer_norm_rms_epsilon": fields["rms_norm_eps"],
        "attention.sliding_window": fields.get("sliding_window"),
        "rope.dimension_count": fields["head_dim"],
        "rope.freq_base": fields["rope_theta"],
        "vocab_size": fields["vocab_size"],
    }
    if rope and rope["rope_type"] != "llama3":
        settings |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"],
                     "rope.scaling.original_context_length":
                     rope.get("original_max_position_embeddings")}  # fmt: skip
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    settings = {f"{architecture}.{key}": value for key, value in settings.items()}
    settings |= byte_level_tokenizer() if tokenizer is None else tokenizer
    split = {"split_max_tensors": -(-(len(weights) + 1) // num_parts)} if num_parts > 1 else {}
    writer = gguf.GGUFWriter(path, settings.pop("architecture", architecture), **split)
    for key, value in settings.items():
        if value is not None:
            _add(writer, key, value)
    arch = next(key for key, found in gguf.MODEL_ARCH_NAMES.items() if found == architecture)
    names = gguf.get_tensor_name_map(arch, fields["num_hidden_layers"])
    found = {}
    for tensor, array in weights.items():
        stem, _, tail = tensor.rpartition(".")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        key = heads.get(stem.rsplit(".", 1)[-1]) if architecture == "llama" else None
        of_type = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        data = quantized(array, of_type)
        found[tensor] = gguf.dequantize(data, of_type).reshape(array.shape).astype(np.float32)
        stored = as_llama_cpp(data, fields[key]) if key else data
        writer.add_tensor(f"{names.get_name(stem)}.{tail}", stored, raw_dtype=of_type)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(fields))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return fields, found


def quantized(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """`array` in blocks; blocks of random bytes where the package cannot quantize."""
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(array.shape, kind)
        return np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8)


def _add(writer: gguf.GGUFWriter, key: str, value) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
             str: writer.add_string, list: writer.add_array}  # fmt: skip
    kinds[type(value)](key, value)
