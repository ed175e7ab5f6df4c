"""Tokenizers: one `tokenizer.json` that every version of transformers reads alike, and the prefix.

Versions of transformers differ in two ways: the class that `AutoTokenizer` picks may rebuild the
pipeline that `tokenizer.json` states, and it may or may not put BOS in front. So the converted
directory holds the pipeline itself, loaded as it stands, and the prefix is written down as ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from jaxspec.checkpoint.format import first_line
from jaxspec.errors import CheckpointError
from jaxspec.runtime.extras import import_transformers

from .hf_reader import read_json

_PROBE = "a"  # any text that tokenizes to something
_SENTENCES = (
    "Hello, world! The quick brown fox jumps over 13 lazy dogs.",
    "  two  spaces, a\ttab\nand a line",
    "naïve café — 日本語 🙂 ﬁ",
)


def convert_tokenizer(source: Path, target: Path, *, model_type: str) -> tuple[int, ...] | None:
    """Writes the tokenizer of `source` to `target`; returns its prefix ids, None without one.

    The prefix is what the pipeline's post-processor puts in front of text, as corrected by an
    explicit `add_bos_token`. A SentencePiece file without either gets BOS, the historic default of
    Llama's tokenizer, which newer versions dropped.

    Raises:
      CheckpointError: the files are there and cannot be read.
    """
    if not any(
        (source / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        return None
    settings = {}
    if (source / "tokenizer_config.json").is_file():
        settings = read_json(source / "tokenizer_config.json")
    has_pipeline = (source / "tokenizer.json").is_file()
    try:
        if has_pipeline:
            fast = import_transformers().PreTrainedTokenizerFast
            tokenizer: Any = fast.from_pretrained(source)
        else:
            tokenizer = _build(source, model_type)
        pipeline = tokenizer.backend_tokenizer
        if has_pipeline:
            pipeline = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
        prefix = _prefix(pipeline, settings, tokenizer, is_lone_sentencepiece=not has_pipeline)
        tokenizer.save_pretrained(target)
        if has_pipeline:
            (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The tokenizer in {source} cannot be read ({first_line(error)}); "
            "fetch its files again."
        ) from error
    _name_generic_class(target)
    return prefix


def _build(source: Path, model_type: str) -> Any:
    """A tokenizer whose pipeline transformers builds from SentencePiece or vocabulary files."""
    transformers = import_transformers()
    if (source / "tokenizer.model").is_file() and model_type in ("llama", "mistral"):
        tokenizer = transformers.LlamaTokenizerFast.from_pretrained(source)
        _normalize_as_sentencepiece(tokenizer.backend_tokenizer)
        _check_against_sentencepiece(tokenizer, source / "tokenizer.model")
        return tokenizer
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"transformers builds no fast tokenizer of the files in {source}; "
            "supply the model's tokenizer.json."
        )
    return tokenizer


def _normalize_as_sentencepiece(pipeline: Any) -> None:
    """SentencePiece's dummy prefix, always; transformers 5 leaves it out before a leading space."""
    pipeline.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    pipeline.pre_tokenizer = None


def _check_against_sentencepiece(tokenizer: Any, model: Path) -> None:
    """Raises `CheckpointError` if the pipeline that transformers built tokenizes otherwise."""
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for sentence in _SENTENCES:
        if tokenizer.encode(sentence, add_special_tokens=False) != processor.encode(sentence):
            raise CheckpointError(
                f"transformers does not reproduce the normalization of {model}: it tokenizes "
                f"{sentence!r} otherwise; supply the model's tokenizer.json."
            )


def _prefix(
    pipeline: Any, settings: dict[str, Any], tokenizer: Any, *, is_lone_sentencepiece: bool
) -> tuple[int, ...]:
    bare = pipeline.encode(_PROBE, add_special_tokens=False).ids
    full = pipeline.encode(_PROBE, add_special_tokens=True).ids
    starts = [at for at in range(len(full)) if full[at : at + len(bare)] == bare]
    prefix = tuple(full[: starts[0]]) if bare and starts else ()
    bos = tokenizer.bos_token_id
    adds_bos = settings.get("add_bos_token")
    if adds_bos is None and is_lone_sentencepiece:
        adds_bos = True
    if bos is None or adds_bos is None:
        return prefix
    if adds_bos:
        return prefix or (bos,)
    return () if prefix == (bos,) else prefix


def _name_generic_class(target: Path) -> None:
    """Names the class that takes `tokenizer.json` as it is, for those who use `AutoTokenizer`."""
    path = target / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("auto_map", None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
