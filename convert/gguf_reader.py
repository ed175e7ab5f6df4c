"""GGUF files, the format of llama.cpp, read as the Hugging Face checkpoints they were made from.

A file holds settings, tokenizer and tensors, which are mostly quantized. The settings become the
fields of a `config.json`, and the tensors get Hugging Face's names, so that the tables of the
families serve both. transformers' reader of tokenizers is not used: it needs torch, and makes other
ids of some texts than the original pipelines, which are written out here by their names in GGUF.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxspec.errors import CheckpointError, ModelError
from jaxspec.models.config import RopeConfig
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.files import reading, why_unreadable
from jaxspec.runtime.values import shown

from .hf_config import HFConfig
from .hf_reader import HEAD, Tensor

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_ARCHITECTURES = {  # Mistral's models are written as llama
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
_SETTINGS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "rope.freq_base": "rope_theta",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}  # fmt: skip
_ROPE_SCALING = {
    "rope.scaling.type": "rope_type", "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow",
}  # fmt: skip
# They say nothing that the tensors do not say, or nothing of what is computed.
_IGNORED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LLAMA3 = {  # of Llama 3.1 to 3.3; the factor differs
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip

# Tokenizers
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens, as in SentencePiece
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {  # by `tokenizer.ggml.pre`; None is GPT-2's own
    "gpt-2": None, "smollm": None, "llama-bpe": _WORDS % 3, "qwen2": _WORDS % 1, "tekken": _CASES,
}  # fmt: skip
_WITH_BOS = ("llama-bpe", "tekken")  # unless the file says otherwise; they also keep words whole


def part_files(path: Path) -> list[Path]:
    """The files of a model that is split into `NAME-00001-of-0000N.gguf`, if `path` is one of them,
    or `path` itself; raises `CheckpointError` if some are missing."""
    named = _PART.fullmatch(path.name)
    if named is None or int(named[2]) == 0:
        return [path]
    numbers = range(1, int(named[2]) + 1)
    files = [path.with_name(f"{named[1]}-{number:05d}-of-{named[2]}.gguf") for number in numbers]
    missing = [file.name for file in files if why_unreadable(file) is not None]
    if missing:
        raise CheckpointError(
            f"{path} is one of {named[2]} parts that must be in one directory, which lacks "
            f"{', '.join(missing[:6])}; fetch all parts."
        )
    return files


def _malformed(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as GGUF ({reason}); fetch it again, or update gguf."
    )


class GgufFile:
    """A model in a GGUF file, or in the parts of a split one.

    Attributes:
      files: its parts.
      tensors: by Hugging Face's names. What is not in float32 counts as bfloat16, in which it is
        stored unless another dtype is asked for; it is loaded as float32.

    Raises:
      ModelError: the architecture or a quantization is not one that is read.
      CheckpointError: a file is missing or damaged.
      SettingError: the package `gguf` is not installed.
    """

    def __init__(self, path: Path):
        gguf = import_extra("gguf", "GGUF files", extra="gguf")

        class Reader(gguf.GGUFReader):
            def _get(self, offset, dtype, count=1, *args, **kwargs):
                if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                    raise ValueError("it ends early")
                return super()._get(offset, dtype, count, *args, **kwargs)

        self._path, self.files = path, part_files(path)
        readers, fields = [], {}
        for number, file in enumerate(self.files):
            with reading(file, functools.partial(_malformed, file)):
                readers.append(reader := Reader(file))
                if reader.byte_order != "I":
                    raise ValueError("it is big-endian")
                of_part = {name: field.contents() for name, field in reader.fields.items()}
                if of_part.get("split.no", number) != number:
                    raise ValueError(f"it is part {of_part['split.no'] + 1} by its contents")
            fields = fields or of_part  # the first part has those of the model
        self._stated = HFConfig(fields, str(path))
        num_parts = self._stated.count("split.count", 1, least=0) or 1
        if num_parts != len(readers):
            raise CheckpointError(
                f"{path} is one of {num_parts} parts; name them NAME-00001-of-0000N.gguf."
            )
        self._architecture = self._stated.text("general.architecture")
        if self._architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{path} holds a model of the architecture {shown(self._architecture)}, which is "
                f"not supported; give one of these: {', '.join(_ARCHITECTURES)}."
            )
        prefix = f"{self._architecture}."
        width, heads = f"{prefix}embedding_length", f"{prefix}attention.head_count"
        size = self._stated.count(width) // self._stated.count(heads)
        self._head_size = self._stated.count(f"{prefix}attention.key_length", size)
        self.tensors: dict[str, Tensor] = {}
        for tensor in (tensor for reader in readers for tensor in reader.tensors):
            kind, size = tensor.tensor_type, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
            try:
                gguf.dequantize(np.zeros((1, size), np.uint8), kind)
            except NotImplementedError as error:
                raise ModelError(
                    f"{path} holds tensors in {kind.name}, which the installed package gguf does "
                    "not dequantize; give the model in another quantization."
                ) from error
            # llama.cpp rotates pairs of neighbours, and has the rows of q and k in that order.
            is_paired = self._architecture == "llama" and re.search(r"\.attn_[qk]\.", tensor.name)

            def load(tensor=tensor, is_paired=is_paired) -> np.ndarray:
                array = gguf.dequantize(tensor.data, tensor.tensor_type)
                if not is_paired:
                    return array
                pairs = array.reshape(-1, self._head_size // 2, 2, *array.shape[1:])
                return pairs.swapaxes(1, 2).reshape(array.shape)

            dtype = np.dtype(np.float32 if kind.name == "F32" else ml_dtypes.bfloat16)
            shape = tuple(map(int, tensor.shape[::-1]))
            self.tensors[_name_in_hf(tensor.name)] = Tensor(dtype, shape, load)

    def config(self) -> HFConfig:
        """The fields of the model's `config.json`; raises `ModelError` for settings that the
        decoder does not compute, and `CheckpointError` for missing ones."""
        stated, prefix = self._stated, f"{self._architecture}."
        stated.number(f"{prefix}attention.layer_norm_rms_epsilon", least=1e-12, most=1)
        theta = stated.number(f"{prefix}rope.freq_base", 10000.0, least=2, most=1e15)
        head_size = self._head_size
        given = {
            name.removeprefix(prefix): value
            for name, value in stated.fields.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in _IGNORED
        }
        for name, computed in {
            "attention.value_length": head_size, "rope.dimension_count": head_size,
            "expert_count": 0, "expert_used_count": 0, "attention.causal": True,
        }.items():  # fmt: skip
            if given.get(name) == computed:
                del given[name]
        fields = {hf: given.pop(ours) for ours, hf in _SETTINGS.items() if ours in given}
        rope = {hf: given.pop(ours) for ours, hf in _ROPE_SCALING.items() if ours in given}
        if given:
            raise ModelError(
                f"{self._path} has settings of {self._architecture} that this decoder does not "
                f"compute: {shown(given)}; give another model."
            )
        if rope.get("factor", 0) not in (0, 1):
            rope.setdefault("rope_type", "linear")  # as llama.cpp reads a factor alone
        if rope.get("rope_type", "none") != "none":
            fields["rope_scaling"] = rope
        if "rope_freqs.weight" in self.tensors:
            fields["rope_scaling"] = self._llama3_scaling(theta, head_size)
        architecture = _ARCHITECTURES[self._architecture]
        if self._architecture == "llama" and "sliding_window" in fields:
            architecture = "MistralForCausalLM"
        embedding = self.tensors.get("model.embed_tokens.weight")
        fields |= {
            "architectures": [architecture],
            "head_dim": head_size,
            "vocab_size": embedding.shape[0] if embedding else None,
            "tie_word_embeddings": HEAD not in self.tensors,
            "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self.tensors,
            "eos_token_id": self._stop_tokens(),
        }
        return HFConfig(fields, str(self._path))

    def _llama3_scaling(self, theta: float, head_size: int) -> dict[str, Any]:
        """Rotary scaling of Llama 3.1, of which the file has the resulting factors `[H / 2]`."""
        found = self.tensors.pop("rope_freqs.weight").load()
        fields = {"rope_type": "llama3", "factor": float(found.max(initial=1.0)), **_LLAMA3}
        scaling = {"scaling": "llama3", "factor": fields["factor"], "original_max_length": 8192}
        plain, scaled = (
            RopeConfig(theta=theta, rotary_size=head_size, **each).inverse_frequencies()[0]
            for each in ({}, scaling)
        )
        if found.shape != plain.shape or not np.allclose(found, plain / scaled, rtol=1e-3):
            raise ModelError(
                f"{self._path} scales rotary frequencies (rope_freqs.weight) otherwise than Llama "
                "3.1 does; give another model."
            )
        return fields

    def _stop_tokens(self) -> list[int]:
        """The stated ones, and an end of turn that the chat template writes."""
        stated = self._stated
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        ids = [stated.count(key, least=0) for key in keys if key in stated.fields]
        template = stated.text("tokenizer.chat_template", "")
        tokens = stated.texts("tokenizer.ggml.tokens")
        turns = [turn for turn in ("<|im_end|>", "<|eot_id|>") if turn in template]
        ids += [tokens.index(turn) for turn in turns if turn in tokens]
        return list(dict.fromkeys(ids))

    def write_tokenizer(self, directory: Path) -> None:
        """Makes a directory with the files of the Hugging Face tokenizer, empty without one; raises
        `ModelError` for a kind that is not read, and `CheckpointError` for a damaged one."""
        directory.mkdir()
        stated = self._stated
        kind, pre = (stated.text(f"tokenizer.ggml.{key}", "none") for key in ("model", "pre"))
        if kind in ("none", "no_vocab"):
            return
        is_byte_level = kind == "gpt2"
        if kind not in ("gpt2", "llama") or (is_byte_level and pre not in _SPLITS):
            raise ModelError(
                f"{self._path} has a tokenizer of the kind {shown(kind)} with the pre-tokenizer "
                f"{shown(pre)}; llama, and gpt2 with {', '.join(_SPLITS)}, are read, so give the "
                "model's Hugging Face checkpoint."
            )
        tokens = stated.texts("tokenizer.ggml.tokens")
        with reading(self._path, functools.partial(_malformed, self._path)):
            types = list(stated.fields["tokenizer.ggml.token_type"])
            while types[-1] == _UNUSED:  # they only fill the vocabulary up
                types.pop()
            tokens = tokens[: len(types)]
            settings: dict[str, Any] = {
                f"{hf}_token": tokens[stated.count(f"tokenizer.ggml.{ours}_token_id", least=0)]
                for hf, ours in _SPECIAL.items()
                if f"tokenizer.ggml.{ours}_token_id" in stated.fields
            }
            adds_bos = not is_byte_level or pre in _WITH_BOS
            settings["add_bos_token"] = stated.flag("tokenizer.ggml.add_bos_token", adds_bos)
            settings["add_bos_token"] &= "bos_token" in settings
            settings["chat_template"] = stated.get("tokenizer.chat_template")
            if is_byte_level:
                pipeline = _byte_level(tokens, types, stated.texts("tokenizer.ggml.merges"), pre)
                pipeline.save(str(directory / "tokenizer.json"))
            else:
                scores = stated.fields["tokenizer.ggml.scores"]
                model = _sentencepiece(tokens, types, scores, settings)
                (directory / "tokenizer.model").write_bytes(model)
                spaces = stated.flag("tokenizer.ggml.add_space_prefix", True)
                settings["add_prefix_space"] = spaces
                settings["added_tokens_decoder"] = {
                    index: {"content": tokens[index], "special": kind != _USER_DEFINED}
                    for index, kind in enumerate(types)
                    if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
                }
            (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _name_in_hf(name: str) -> str:
    """The name of a tensor in a Hugging Face checkpoint, or `name` where there is none."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name)
    if found is None or found[2] not in _TENSORS:
        return name
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{_TENSORS[found[2]]}.{found[3]}"


def _byte_level(tokens: list[str], types: list[int], merges: list[str], pre: str) -> Any:
    """The pipeline of a byte-level tokenizer."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WITH_BOS)
    pipeline: Any = tokenizers.Tokenizer(model)
    split = _SPLITS[pre]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(split), "isolated"))
    if pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(steps)
    pipeline.normalizer = normalizers.NFC() if pre == "qwen2" else None
    pipeline.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            is_special = kind == _CONTROL
            added = tokenizers.AddedToken(token, normalized=False, special=is_special)
            pipeline.add_tokens([added])
    return pipeline


def _sentencepiece(
    tokens: list[str], types: list[int], scores: list[float], settings: dict[str, Any]
) -> bytes:
    """A `tokenizer.model` of BPE pieces."""
    from sentencepiece import sentencepiece_model_pb2

    protocol: Any = sentencepiece_model_pb2
    model = protocol.ModelProto()
    for token, kind, score in zip(tokens, types, scores, strict=False):  # scores of padding too
        model.pieces.add(piece=token, type=kind, score=score)
    trainer = model.trainer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, 6 in types
    for name in ("unk", "bos", "eos"):
        if f"{name}_token" in settings:
            setattr(trainer, f"{name}_piece", settings[f"{name}_token"])
            setattr(trainer, f"{name}_id", tokens.index(settings[f"{name}_token"]))
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()
