"""The tokenizer in a GGUF file, written as the files of a Hugging Face tokenizer.

transformers has a reader too. It needs torch, and its versions differ in what they make of the name
of a pre-tokenizer (`tokenizer.ggml.pre`), which changes token ids. Here a name stands for the
pipeline of the models that llama.cpp gives this name to, and other names are refused.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxspec.errors import CheckpointError, ModelError
from jaxspec.runtime.files import reading
from jaxspec.runtime.values import shown

from .hf_config import HFConfig

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # as in SentencePiece
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


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_PIPELINES = {  # by `tokenizer.ggml.pre`
    "gpt-2": [_GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "llama-bpe": _split(_WORDS % 3),
    "qwen2": _split(_WORDS % 1),
    "tekken": _split(_CASES),
}
_WITH_BOS = ("llama-bpe", "tekken")  # unless the file says otherwise; they also keep words whole


@contextlib.contextmanager
def tokenizer_files(fields: dict[str, Any], path: Path) -> Iterator[Path]:
    """A directory with the tokenizer that the settings of a GGUF file describe; empty without one.

    Raises:
      ModelError: the kind of tokenizer or pre-tokenizer is not one that is read.
      CheckpointError: it is damaged.
    """

    def malformed(reason: str) -> CheckpointError:
        return CheckpointError(
            f"The tokenizer in {path} cannot be read ({reason}); fetch the file again."
        )

    stated = HFConfig(fields, str(path))
    kind = stated.text("tokenizer.ggml.model", "none")
    with tempfile.TemporaryDirectory() as directory:
        if kind in ("gpt2", "llama"):
            tokens, types = _tokens(stated)
            with reading(path, malformed):
                write = _write_byte_level if kind == "gpt2" else _write_sentencepiece
                write(stated, tokens, types, Path(directory))
                settings = json.dumps(_settings(stated, tokens, types))
                (Path(directory) / "tokenizer_config.json").write_text(settings)
        elif kind not in ("none", "no_vocab"):
            raise ModelError(
                f"{path} has a tokenizer of the kind {shown(kind)}, which is not read; convert the "
                "model's Hugging Face checkpoint instead."
            )
        try:
            yield Path(directory)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(directory, str(path))) from error


def _tokens(stated: HFConfig) -> tuple[list[str], list[int]]:
    """Tokens and their types, without those that fill the vocabulary up at its end."""
    tokens = stated.texts("tokenizer.ggml.tokens")
    types = stated.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise stated.malformed("tokenizer.ggml.token_type", "the type of every token")
    used = [index for index, kind in enumerate(types) if kind != _UNUSED]
    end = used[-1] + 1 if used else 0
    return tokens[:end], types[:end]


def _settings(stated: HFConfig, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """`tokenizer_config.json`."""
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for hf, ours in _SPECIAL.items():
        key = f"tokenizer.ggml.{ours}_token_id"
        if stated.get(key) is not None:
            settings[f"{hf}_token"] = tokens[stated.count(key, least=0, most=len(tokens) - 1)]
    pre = stated.get("tokenizer.ggml.pre")
    is_byte_level = stated.get("tokenizer.ggml.model") == "gpt2"
    with_bos = stated.flag("tokenizer.ggml.add_bos_token", not is_byte_level or pre in _WITH_BOS)
    settings["add_bos_token"] = with_bos and "bos_token" in settings
    if not is_byte_level:
        settings["add_prefix_space"] = stated.flag("tokenizer.ggml.add_space_prefix", True)
        settings["added_tokens_decoder"] = {
            str(index): {"content": tokens[index], "special": kind != _USER_DEFINED,
                         "normalized": False, "lstrip": False, "rstrip": False,
                         "single_word": False}
            for index, kind in enumerate(types)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        }  # fmt: skip
    if stated.get("tokenizer.chat_template") is not None:
        settings["chat_template"] = stated.text("tokenizer.chat_template")
    return settings


def _write_byte_level(
    stated: HFConfig, tokens: list[str], types: list[int], directory: Path
) -> None:
    pre = stated.text("tokenizer.ggml.pre", "default")
    if pre not in _PIPELINES:
        raise ModelError(
            f"{stated.path} names the pre-tokenizer {shown(pre)}, and {', '.join(_PIPELINES)} are "
            "read; convert the model's Hugging Face checkpoint instead."
        )
    merges = [tuple(merge.split(" ")) for merge in stated.texts("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pipeline: Any = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WITH_BOS)
    )
    pipeline.normalizer = normalizers.NFC() if pre == "qwen2" else None
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(_PIPELINES[pre])
    pipeline.decoder = decoders.ByteLevel()
    for wanted, add in (
        (_CONTROL, pipeline.add_special_tokens),
        (_USER_DEFINED, pipeline.add_tokens),
    ):
        chosen = [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
        add([tokenizers.AddedToken(token, normalized=False) for token in chosen])
    pipeline.save(str(directory / "tokenizer.json"))


def _write_sentencepiece(
    stated: HFConfig, tokens: list[str], types: list[int], directory: Path
) -> None:
    from sentencepiece import sentencepiece_model_pb2

    scores = stated.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise stated.malformed("tokenizer.ggml.scores", "the score of every token")
    model: Any = sentencepiece_model_pb2.ModelProto()
    for token, kind, score in zip(tokens, types, scores, strict=False):
        model.pieces.add(piece=token, type=kind, score=score)
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.vocab_size = len(tokens)
    model.trainer_spec.byte_fallback = _BYTE in types
    for name in ("unk", "bos", "eos"):
        at = stated.get(f"tokenizer.ggml.{_SPECIAL[name]}_token_id")
        if at is not None:
            setattr(model.trainer_spec, f"{name}_id", at)
            setattr(model.trainer_spec, f"{name}_piece", tokens[at])
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())
