"""Damaged Hugging Face checkpoints by seed: what can be wrong with each file, as data.

`checkpoint(directory, seed)` writes a small checkpoint of one of the families and damages one of
its files; the same seed makes the same directory, and its name says what was done.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import hf_checkpoints
import tiny

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "glm4")
NESTED = "[" * 100_000
DEEP = "[" * 600 + "]" * 600

# What a field may hold by mistake, as JSON text.
VALUES = (
    "null", "true", "false", "0", "1", "-1", "2", "1.5", "-0.0", "2147483647", "2147483648",
    "9223372036854775808", "1e30", "1e400", "-1e400", "NaN", "Infinity", "1e-300", "9" * 5000,
    '""', '"x"', '"1"', '"\\ud800"', "[]", "[1]", '["x"]', "[null]", "[[1]]", "{}", '{"a": 1}',
    '{"rope_type": 5}', '{"rope_type": "yarn"}', '{"rope_type": "yarn", "factor": NaN}',
    '{"rope_type": "linear", "factor": 0}', '{"rope_type": "llama3", "factor": "x"}', NESTED, DEEP,
)  # fmt: skip

# Fields that are read, or that transformers reads of a tokenizer's files.
FIELDS = {
    "config.json": (
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
        "partial_rotary_factor", "original_max_position_embeddings", "tie_word_embeddings",
        "attention_bias", "mlp_bias", "hidden_act", "sliding_window", "use_sliding_window",
        "max_window_layers", "layer_types", "quantization_config", "eos_token_id", "dtype",
        "torch_dtype",
    ),
    "generation_config.json": (
        "eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens",
        "repetition_penalty", "stop_strings", "num_beams",
    ),
    "model.safetensors.index.json": ("weight_map", "metadata"),
    "tokenizer_config.json": (
        "add_bos_token", "bos_token", "eos_token", "pad_token", "chat_template", "tokenizer_class",
        "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens",
        "model_max_length", "clean_up_tokenization_spaces", "auto_map", "add_prefix_space",
        "tokenizer_file", "padding_side", "model_input_names", "name_or_path", "special_tokens",
        "backend", "is_local", "processor_class", "use_fast",
    ),
    "tokenizer.json": (
        "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
        "post_processor", "decoder", "model",
    ),
}  # fmt: skip

# Names that an index may give for a shard.
SHARDS = (
    "../outside.safetensors", "/etc/passwd", "", ".", "..", "config.json", "absent.safetensors",
    "model-00001-of-00003.safetensors/x", "a\0b", "\ud800", "x" * 5000, "tokenizer.json",
    "model-00001-of-00003.bin", None, 5, ["model-00001-of-00003.safetensors"], {"a": 1},
)  # fmt: skip

# What may stand in a file's place.
PLACES: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a directory": Path.mkdir,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/null": lambda path: path.symlink_to("/dev/null"),
    "/dev/stdin": lambda path: path.symlink_to("/dev/tty"),
    "nothing": lambda path: None,
    "an empty file": lambda path: path.write_bytes(b""),
    "nested brackets": lambda path: path.write_text(NESTED),
    "nested objects": lambda path: path.write_text('{"a":' * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("1"),
    "an empty object": lambda path: path.write_text("{}"),
    "Latin-1": lambda path: path.write_bytes(b'{"a": "\xe9"}'),
    "UTF-16": lambda path: path.write_bytes('{"a": 1}'.encode("utf-16")),
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "a sparse terabyte": lambda path: _sparse(path, 2**40),
}


def _sparse(path: Path, num_bytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(num_bytes)


def undamaged(directory: Path, family: str, *, num_shards: int) -> Path:
    """Writes the checkpoint of a family, with a tokenizer and a generation config."""
    hf_checkpoints.write_golden(directory, family, num_shards=num_shards)
    text = tiny.tokenizer().hf
    vocab_size = hf_checkpoints.golden_config(family)["vocab_size"]
    text.save_pretrained(directory)
    generation = {"eos_token_id": [1, vocab_size - 1], "do_sample": True, "temperature": 0.7}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def checkpoint(directory: Path, seed: int) -> str:
    """Writes the damaged checkpoint of a seed; returns what is wrong with it."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    undamaged(directory, family, num_shards=rng.choice((1, 3)))
    kinds = (_a_field, _a_shard, _another_place, _bytes, _header)
    done = rng.choices(kinds, weights=(10, 2, 5, 6, 4))[0](directory, rng)
    return f"{seed} {family}: {done}"


def _a_field(directory: Path, rng: random.Random) -> str:
    name = rng.choices(list(FIELDS), weights=(10, 3, 1, 4, 3))[0]
    if not (directory / name).exists():
        name = "config.json"
    key, value = rng.choice(FIELDS[name]), rng.choice(VALUES)
    path = directory / name
    fields = json.loads(path.read_text())
    fields[key] = "VALUE"
    path.write_text(json.dumps(fields).replace('"VALUE"', value))
    return f"{name} {key} = {value[:40]}"


def _a_shard(directory: Path, rng: random.Random) -> str:
    path = directory / "model.safetensors.index.json"
    if not path.exists():
        return _a_field(directory, rng)
    fields = json.loads(path.read_text())
    tensor, value = rng.choice(sorted(fields["weight_map"])), rng.choice(SHARDS)
    fields["weight_map"][tensor] = value
    path.write_text(json.dumps(fields))
    return f"the index names {str(value)[:40]!r}"


def _another_place(directory: Path, rng: random.Random) -> str:
    path = directory / rng.choice(sorted(file.name for file in directory.iterdir()))
    return f"{path.name} {replace(path, rng)}"


def _bytes(directory: Path, rng: random.Random) -> str:
    """Of text files: bytes of weights cannot be told from other weights."""
    path = directory / rng.choice(
        sorted(file.name for file in directory.iterdir() if file.suffix != ".safetensors")
    )
    return f"{path.name} {damage(path, rng, path.stat().st_size)}"


def _header(directory: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(directory.glob("*.safetensors")))
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return f"{path.name} {damage(path, rng, rng.choice((8, length)))}"


def replace(path: Path, rng: random.Random) -> str:
    """Puts something else in a file's place; returns what was done."""
    place = rng.choice(sorted(PLACES))
    path.unlink()
    PLACES[place](path)
    return f"is {place}"


def damage(path: Path, rng: random.Random, length: int) -> str:
    """Damages a file within its first `length` bytes; returns what was done."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(length)
    kinds = ("a changed byte", "a flipped bit", "a cut", "a hole", "a repetition", "more bytes")
    kind = rng.choice(kinds)
    if kind == "a changed byte":
        content[at] = rng.choice(b'09.-"{}[]:,aZ\0\xff')
    elif kind == "a flipped bit":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "a cut":
        del content[at:]
    elif kind == "a hole":
        del content[at : at + rng.randrange(1, 20)]
    elif kind == "a repetition":
        content[at:at] = content[at : at + rng.randrange(1, 20)]
    else:
        content += rng.randbytes(rng.randrange(1, 100))
    path.write_bytes(content)
    return f"has {kind} at {at}"
