"""Tokenizers: one `tokenizer.json` that every version of transformers reads alike, and the prefix.

Versions of transformers differ in two ways: the class that `AutoTokenizer` picks may rebuild the
pipeline that `tokenizer.json` states, and it may or may not put BOS in front. So the converted
directory holds the pipeline itself, loaded as it is, and the prefix as explicit ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from jaxspec.errors import CheckpointError
from jaxspec.models.tokenizer import check_repeatable
from jaxspec.runtime.extras import import_transformers
from jaxspec.runtime.files import LARGEST_TEXT_BYTES, is_there, reading
from jaxspec.runtime.values import shown

from .hf_config import HFConfig
from .hf_reader import check_file, read_json

_PROBE = "a"  # any text that tokenizes to something
_PIPELINES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OTHERS = (  # files that transformers opens if they exist
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SENTENCES = (
    "Hello, world! The quick brown fox jumps over 13 lazy dogs.",
    "  two  spaces, a\ttab\nand a line",
    "naïve café — 日本語 🙂 ﬁ",
)


def convert_tokenizer(
    source: Path, target: Path, *, model_type: str, vocab_size: int
) -> tuple[int, ...] | None:
    """Writes the tokenizer of `source` to `target`; returns its prefix ids, None without one.

    The prefix is what the pipeline's post-processor puts in front of text, unless an explicit
    `add_bos_token` changes it. A SentencePiece file without either gets BOS, the old default of
    Llama's tokenizer, which newer versions dropped.

    Raises:
      CheckpointError: the files exist but cannot be read, the tokenizer has BPE dropout, or the
        prefix is outside the vocabulary of the model.
    """
    for name in (*_PIPELINES, *_OTHERS):
        if is_there(source / name):
            check_file(source / name, largest_bytes=LARGEST_TEXT_BYTES)
    if not any((source / name).exists() for name in _PIPELINES):
        if (source / "tokenizer_config.json").exists():
            raise CheckpointError(
                f"{source} has a tokenizer_config.json and none of {', '.join(_PIPELINES)}; fetch "
                "the missing file, or remove tokenizer_config.json to go without a tokenizer."
            )
        return None
    settings = HFConfig({}, str(source))
    if (source / "tokenizer_config.json").exists():
        settings = HFConfig(read_json(source / "tokenizer_config.json"), str(source))
    has_pipeline = (source / "tokenizer.json").exists()
    fast = import_transformers().PreTrainedTokenizerFast

    def unusable(reason: str) -> CheckpointError:
        return CheckpointError(
            f"The tokenizer in {source} cannot be read ({reason}); fetch its files again."
        )

    with reading(source, unusable):
        if has_pipeline:
            tokenizer: Any = fast.from_pretrained(source)
        else:
            tokenizer = _build(source, model_type, settings)
        pipeline = tokenizer.backend_tokenizer
        if has_pipeline:
            pipeline = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
            _check_prefix_space(settings, read_json(source / "tokenizer.json"))
        check_repeatable(pipeline, named=f"The tokenizer in {source}")
        prefix = _prefix(pipeline, settings, tokenizer, is_lone_sentencepiece=not has_pipeline)
        tokenizer.save_pretrained(target)
        if has_pipeline:
            (target / "tokenizer.json").write_bytes(_with_added_tokens(source, tokenizer))
        _name_generic_class(target)
        # As `load_model` will, because what some settings write cannot be read again.
        fast.from_pretrained(target).encode(_PROBE)
    if not all(0 <= token < vocab_size for token in prefix):
        raise CheckpointError(
            f"The tokenizer in {source} puts {list(prefix)} in front of text, and the model's "
            f"vocabulary ends at {vocab_size - 1}; fetch the files of one model."
        )
    return prefix


def _build(source: Path, model_type: str, settings: HFConfig) -> Any:
    """A tokenizer whose pipeline transformers builds from SentencePiece or vocabulary files."""
    transformers = import_transformers()
    if (source / "tokenizer.model").is_file() and model_type in ("llama", "mistral"):
        _check_spaces(settings)
        tokenizer = transformers.LlamaTokenizerFast.from_pretrained(source)
        _normalize_as_sentencepiece(tokenizer.backend_tokenizer)
        _check_against_sentencepiece(tokenizer, source / "tokenizer.model")
        return tokenizer
    # False, because otherwise it asks on a terminal whether to run the checkpoint's code.
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"transformers cannot build a fast tokenizer from the files in {source}; "
            "supply the model's tokenizer.json."
        )
    return tokenizer


def _check_spaces(settings: HFConfig) -> None:
    """Raises `CheckpointError` for settings that change where SentencePiece puts its dummy prefix;
    versions of transformers differ in what they make of them."""
    for name in ("legacy", "add_prefix_space"):
        if not settings.flag(name, True):
            raise CheckpointError(
                f"{settings.path} sets {name} to false, which changes the ids of a "
                "tokenizer.model; supply the model's tokenizer.json, which says what is meant."
            )


def _check_prefix_space(settings: HFConfig, pipeline: dict[str, Any]) -> None:
    """Raises `CheckpointError` if the two files disagree on a space in front of the text; only some
    of transformers' classes then follow the settings."""
    stated = settings.get("add_prefix_space")
    outer = pipeline.get("pre_tokenizer") or {}
    for each in (outer, *outer.get("pretokenizers", ())):
        is_added = each.get("add_prefix_space")
        if each.get("type") == "ByteLevel" and stated is not None and stated != is_added:
            raise CheckpointError(
                f"{settings.path} sets add_prefix_space to {shown(stated)}, and its tokenizer.json "
                f"to {shown(is_added)}; make them agree with how the model was trained."
            )


def _normalize_as_sentencepiece(pipeline: Any) -> None:
    """SentencePiece's dummy prefix, always; transformers 5 leaves it out before a leading space."""
    pipeline.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    pipeline.pre_tokenizer = None


def _check_against_sentencepiece(tokenizer: Any, model: Path) -> None:
    """Raises `CheckpointError` if the pipeline that transformers built tokenizes differently."""
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for sentence in _SENTENCES:
        if tokenizer.encode(sentence, add_special_tokens=False) != processor.encode(sentence):
            raise CheckpointError(
                f"transformers does not reproduce the normalization of {model}: it tokenizes "
                f"{sentence!r} differently; supply the model's tokenizer.json."
            )


def _with_added_tokens(source: Path, tokenizer: Any) -> bytes:
    """`tokenizer.json` with the added tokens as transformers reads them: `tokenizer_config.json`
    may state others (`added_tokens_decoder`), or that they strip the spaces beside them."""
    content = (source / "tokenizer.json").read_bytes()
    fields = json.loads(content)
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = [
        {"id": index, **{name: getattr(token, name) for name in flags}}
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
    ]
    stated = sorted(fields.get("added_tokens") or [], key=lambda token: token["id"])
    if added == stated:
        return content
    return json.dumps({**fields, "added_tokens": added}, ensure_ascii=False).encode()


def _prefix(
    pipeline: Any, settings: HFConfig, tokenizer: Any, *, is_lone_sentencepiece: bool
) -> tuple[int, ...]:
    bare = pipeline.encode(_PROBE, add_special_tokens=False).ids
    full = pipeline.encode(_PROBE, add_special_tokens=True).ids
    starts = [at for at in range(len(full)) if full[at : at + len(bare)] == bare]
    prefix = tuple(full[: starts[0]]) if bare and starts else ()
    bos = tokenizer.bos_token_id
    is_stated = settings.get("add_bos_token") is not None
    if bos is None or not (is_stated or is_lone_sentencepiece):
        return prefix
    if settings.flag("add_bos_token", True):
        return prefix or (bos,)
    return () if prefix == (bos,) else prefix


def _name_generic_class(target: Path) -> None:
    """Names the class that takes `tokenizer.json` as it is, for those who use `AutoTokenizer`."""
    path = target / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("auto_map", None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
