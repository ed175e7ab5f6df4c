"""GGUF files, the format of llama.cpp, read as the Hugging Face checkpoints they were made from.

A file holds everything: settings, tokenizer and tensors, which are often quantized. Its settings
become the fields of a `config.json`, and its tensors get Hugging Face's names, so that the tables
of the families serve both. Tensors are mapped, and dequantized when they are loaded.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.errors import CheckpointError, ModelError
from jaxspec.models.config import RopeConfig
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.files import check_access, reading, why_unreadable
from jaxspec.runtime.values import shown

from .hf_config import HFConfig
from .hf_reader import Tensor

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_TEXT, _ARRAY = 8, 9  # the other kinds of a value
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": _BFLOAT16}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # also Mistral's models
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_ROPE_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# They say nothing that the tensors do not say, or nothing of what is computed.
_IGNORED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_OUTER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as a GGUF file does."""
    check_access(path)
    if why_unreadable(path) is not None:
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def part_files(path: Path) -> list[Path]:
    """The files of a model that is split into `NAME-00001-of-0000N.gguf`, of which `path` is one;
    `path` itself if it is not.

    Raises:
      CheckpointError: some are missing.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    names = (
        f"{named['stem']}-{i + 1:05d}-of-{named['count']}.gguf" for i in range(int(named["count"]))
    )
    files = [path.with_name(name) for name in names]
    missing = [file.name for file in files if why_unreadable(file) is not None]
    if missing:
        some = ", ".join(missing[:6]) + ", ..." * (len(missing) > 6)
        raise CheckpointError(
            f"{path} is a part of a model whose other parts must be beside it, and {some} cannot "
            "be read there; fetch all parts."
        )
    return files


class _Entry(NamedTuple):
    """A tensor as its file describes it: the name, the shape, the number of its type, and the
    offset from the beginning of the tensors."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Header:
    """Settings and tensors of one file.

    Raises:
      ValueError, struct.error: the file is damaged, or ends too early.
    """

    def __init__(self, file: Path):
        self.data = np.memmap(file, mode="r")
        self._bytes, self._at = memoryview(self.data), len(MAGIC)
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}, and versions 2 and 3 are read")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            self.fields[name] = self._value(self._number("I"))
        self.entries = [self._entry() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        self.start = -(-self._at // alignment) * alignment

    def _numbers(self, form: str) -> tuple[Any, ...]:
        start, size = self._at, struct.calcsize(f"<{form}")
        if size > len(self._bytes) - start:
            raise ValueError("it ends early")
        self._at += size
        return struct.unpack_from(f"<{form}", self._bytes, start)

    def _number(self, code: str) -> Any:
        return self._numbers(code)[0]

    def _text(self) -> str:
        length = self._number("Q")
        content = self._bytes[self._at : self._at + length]
        if len(content) < length:
            raise ValueError("it ends early")
        self._at += length
        return str(content, "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(_FORMATS[kind])
        item, count = self._number("I"), self._number("Q")
        if item not in _FORMATS:
            return [self._value(item) for _ in range(count)]
        return list(self._numbers(f"{count}{_FORMATS[item]}"))

    def _entry(self) -> _Entry:
        name, num_axes = self._text(), self._number("I")
        shape = tuple(self._number("Q") for _ in range(num_axes))[::-1]
        return _Entry(name, shape, self._number("I"), self._number("Q"))


class GgufFile:
    """A model in a GGUF file, or in several that it is split into.

    Attributes:
      path: as given.
      files: its parts.
      fields: the settings, by llama.cpp's names.
      tensors: by Hugging Face's names. One that is not in float32 counts as bfloat16, in which it
        is stored unless another dtype is asked for; a quantized one is loaded as float32.

    Raises:
      ModelError: the architecture, a setting or a quantization is not one that is read.
      CheckpointError: a file is missing or damaged.
      SettingError: the package `gguf` is not installed.
    """

    def __init__(self, path: Path):
        def malformed(reason: str) -> CheckpointError:
            return CheckpointError(
                f"{path} cannot be read as GGUF ({reason}); fetch the file again."
            )

        self._gguf = import_extra("gguf", "GGUF files", extra="gguf")
        self.path, self.files = path, part_files(path)
        with reading(path, malformed):
            headers = [_Header(file) for file in self.files]
        self.fields = headers[0].fields
        if self.fields.get("split.count", 1) not in (0, len(headers)):
            raise CheckpointError(
                f"{path} is one of {self.fields['split.count']} parts; name them as llama.cpp "
                "does, NAME-00001-of-0000N.gguf, and give one of them."
            )
        self._stated = HFConfig(self.fields, str(path))
        self.architecture = self._stated.text("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{path} holds a model of the architecture {shown(self.architecture)}, which is "
                f"not supported; give one of these: {', '.join(_ARCHITECTURES)}."
            )
        self.tensors = {}
        for file, header in zip(self.files, headers, strict=True):
            self._check_kinds(header.entries)
            for entry in header.entries:
                name = _name_in_hf(entry.name)
                with reading(path, malformed):
                    if name in self.tensors:
                        raise ValueError(f"{entry.name} is in it twice")
                    self.tensors[name] = self._tensor(entry, file, header)

    def _check_kinds(self, entries: list[_Entry]) -> None:
        """Raises `ModelError` for quantizations that the package `gguf` does not dequantize."""
        gguf = self._gguf
        unread = []
        for number in sorted({entry.kind for entry in entries}):
            try:
                kind = gguf.GGMLQuantizationType(number)
                _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
                if kind.name not in _FLOATS:
                    with np.errstate(all="ignore"):
                        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
            except NotImplementedError:
                unread.append(kind.name)
            except ValueError:
                unread.append(f"type {number}")
        if unread:
            raise ModelError(
                f"{self.path} holds tensors in {', '.join(unread)}, which the installed package "
                "gguf does not dequantize; give the model in another quantization."
            )

    def _tensor(self, entry: _Entry, file: Path, header: _Header) -> Tensor:
        kind = self._gguf.GGMLQuantizationType(entry.kind)
        is_float = kind.name in _FLOATS
        stored = entry.shape
        if not is_float:
            stored = self._gguf.quant_shape_to_byte_shape(entry.shape, kind)
        item = _FLOATS.get(kind.name, np.dtype(np.uint8))
        start = header.start + entry.offset
        end = start + int(np.prod(stored, dtype=object)) * item.itemsize
        if end > len(header.data):
            raise ValueError(f"{file.name} ends inside {entry.name}")
        # llama.cpp rotates pairs of neighbours, and has the rows of q and k in that order.
        is_paired = self.architecture == "llama" and re.search(r"\.attn_[qk]\.", entry.name)
        heads = self._num_heads(".attn_k." in entry.name) if is_paired else 0

        def load() -> np.ndarray:
            array = header.data[start:end].view(item).reshape(stored)
            array = array if is_float else self._gguf.dequantize(array, kind)
            if heads:
                pairs = array.reshape(heads, -1, 2, *array.shape[1:])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
            return array

        return Tensor(item if kind.name == "F32" else _BFLOAT16, entry.shape, load)

    def _num_heads(self, is_key: bool = False) -> int:
        heads = self._stated.count(f"{self.architecture}.attention.head_count")
        of_keys = f"{self.architecture}.attention.head_count_kv"
        return self._stated.count(of_keys, heads) if is_key else heads

    def config(self) -> HFConfig:
        """The fields of the model's `config.json`.

        Raises:
          ModelError: a setting is not one that is read.
          CheckpointError: a setting is missing, or has the wrong type.
        """
        named = self.architecture
        stated, prefix = self._stated, f"{named}."
        given = {
            name.removeprefix(prefix): value
            for name, value in self.fields.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in _IGNORED
        }
        stated.number(f"{prefix}attention.layer_norm_rms_epsilon", least=1e-12, most=1)
        head_size = stated.count(
            f"{prefix}attention.key_length",
            stated.count(f"{prefix}embedding_length") // self._num_heads(),
        )
        given.pop("attention.key_length", None)
        # Settings that are only read with the values that the decoder computes.
        fixed = {"attention.value_length": head_size, "rope.dimension_count": head_size,
                 "expert_count": 0, "expert_used_count": 0, "attention.causal": True}  # fmt: skip
        given = {k: v for k, v in given.items() if k not in fixed or v != fixed[k]}
        fields = {hf: given.pop(ours) for ours, hf in _SETTINGS.items() if ours in given}
        rope = {
            hf: given.pop(f"rope.scaling.{ours}")
            for ours, hf in _ROPE_SCALING.items()
            if f"rope.scaling.{ours}" in given
        }
        architecture = _ARCHITECTURES[named]
        if named == "llama" and "attention.sliding_window" in given:
            architecture = "MistralForCausalLM"
            fields["sliding_window"] = given.pop("attention.sliding_window")
        if given:
            raise ModelError(
                f"{self.path} has settings of {named} that this decoder does not compute: "
                f"{shown(given)}; give another model, or its Hugging Face checkpoint."
            )
        if rope.get("rope_type", "none") == "none":
            rope = {}
        if "rope_freqs.weight" in self.tensors:
            theta = stated.number(f"{prefix}rope.freq_base", 10000.0, least=2, most=1e15)
            rope = self._llama3_scaling(theta, head_size)
        embedding = self.tensors.get("model.embed_tokens.weight")
        return HFConfig(
            {
                **fields,
                "architectures": [architecture],
                "head_dim": head_size,
                "vocab_size": embedding.shape[0] if embedding else None,
                "tie_word_embeddings": "lm_head.weight" not in self.tensors,
                "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self.tensors,
                "eos_token_id": self._stop_tokens(),
                **({"rope_scaling": rope} if rope else {}),
            },
            str(self.path),
        )

    def _llama3_scaling(self, theta: float, head_size: int) -> dict[str, Any]:
        """The rotary scaling of Llama 3.1, of which GGUF has what it comes to: a factor by which
        each wavelength is multiplied.

        Raises:
          ModelError: the factors follow from other settings than Llama's.
        """
        found = self.tensors.pop("rope_freqs.weight").load().astype(np.float32)
        fields = {"rope_type": "llama3", "factor": float(found.max(initial=1.0)), **_LLAMA3}
        plain = RopeConfig(theta=theta, rotary_size=head_size)
        scaled = RopeConfig(
            theta=theta,
            rotary_size=head_size,
            scaling="llama3",
            factor=fields["factor"],
            original_max_length=fields["original_max_position_embeddings"],
        )
        expected = plain.inverse_frequencies()[0] / scaled.inverse_frequencies()[0]
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
            raise ModelError(
                f"{self.path} scales rotary frequencies (rope_freqs.weight) otherwise than Llama "
                "3.1 does; convert the model's Hugging Face checkpoint instead."
            )
        return fields

    def _stop_tokens(self) -> list[int]:
        """The ids that end a text or a turn: the stated ones, and an end of turn that the chat
        template writes."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        ids = [self._stated.count(key, least=0) for key in keys if key in self.fields]
        template = self._stated.text("tokenizer.chat_template", "")
        tokens = self._stated.texts("tokenizer.ggml.tokens")
        turns = [turn for turn in ("<|im_end|>", "<|eot_id|>") if turn in template]
        ids += [tokens.index(turn) for turn in turns if turn in tokens]
        return list(dict.fromkeys(ids))


def _name_in_hf(name: str) -> str:
    """The name of a tensor in a Hugging Face checkpoint, or `name` where there is none."""
    stem, _, tail = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_TENSORS:
        return f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{tail}"
    return f"{_OUTER_TENSORS[stem]}.{tail}" if stem in _OUTER_TENSORS else name
