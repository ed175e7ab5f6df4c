"""Tokenizers and the prefix policy: the same ids whatever files and class the source has."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import hf_checkpoints
import pytest

from jaxspec.checkpoint.format import load_converted
from jaxspec.convert import convert
from jaxspec.errors import CheckpointError

SENTENCES = [
    "the quick brown fox",
    "hello  world",
    " leading space",
    "a line\nand a\ttab",
    "unseen: 日本 🙂",
    "",
]
_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a small test of pieces",
    "a line and a tab: leading space",
] * 40


def write_sentencepiece(directory: Path, **settings) -> object:
    """Writes a tiny Llama-like `tokenizer.model` and returns SentencePiece's own processor."""
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    llama_like = {
        "model_type": "bpe",
        "vocab_size": 340,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": -1,
        "minloglevel": 2,
    }
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS), model_writer=model, **{**llama_like, **settings}
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def write_pipeline(directory: Path, *, prefix: tuple[str, ...] = ()) -> None:
    """Writes a tiny byte-level `tokenizer.json` whose post-processor puts `prefix` in front."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "[gMASK]", "<sop>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if prefix:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join([*(f"{token}:0" for token in prefix), "$A:0"]),
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in prefix],
        )
    tokenizer.save(str(directory / "tokenizer.json"))


def loaded_tokenizer(source: Path):
    convert(source, source.parent / "out")
    return load_converted(source.parent / "out").tokenizer


@pytest.fixture
def hf(tmp_path) -> Path:
    return hf_checkpoints.write_golden(tmp_path / "hf", "llama")


def test_a_lone_sentencepiece_file_gets_bos(hf):
    processor = write_sentencepiece(hf)
    tokenizer = loaded_tokenizer(hf)
    assert tokenizer.prefix_token_ids == (1,)
    for sentence in SENTENCES:
        ids = tokenizer.encode(sentence)
        assert ids == [1, *processor.encode(sentence)]
        assert tokenizer.decode(ids) == sentence


def test_a_sentencepiece_file_whose_config_declines_bos(hf):
    processor = write_sentencepiece(hf)
    (hf / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"})
    )
    tokenizer = loaded_tokenizer(hf)
    assert tokenizer.prefix_token_ids == ()
    assert tokenizer.encode(SENTENCES[0]) == processor.encode(SENTENCES[0])


@pytest.mark.parametrize("name", ["legacy", "add_prefix_space"])
def test_a_sentencepiece_file_with_another_dummy_prefix_is_refused(hf, name):
    write_sentencepiece(hf)
    (hf / "tokenizer_config.json").write_text(json.dumps({name: False}))
    with pytest.raises(CheckpointError, match=rf"sets {name} to false.*tokenizer.json"):
        loaded_tokenizer(hf)


STRIPPING = {"lstrip": True, "rstrip": True, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"added_tokens_decoder": {"1": {"content": "</s>", "special": True, **STRIPPING}}},
        {"added_tokens_decoder": {"330": {"content": "quick", "special": False, **STRIPPING}}},
        {"eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, **STRIPPING}},
        {"extra_special_tokens": {"fox_token": "fox"}},
    ],
    ids=["none", "strips", "one more", "as eos", "extra"],
)
def test_added_tokens_are_those_of_transformers(hf, settings):
    import transformers

    write_pipeline(hf)
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(hf)
    ours = loaded_tokenizer(hf)
    for text in ("the quick </s> fox", "a </s>", "quick</s> quick  fox"):
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_prefix_space_that_the_files_disagree_on_is_refused(hf, name):
    write_pipeline(hf)
    settings = {"tokenizer_class": name, "add_prefix_space": True}
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="sets add_prefix_space to True, and its tokenizer"):
        loaded_tokenizer(hf)
    (hf / "tokenizer_config.json").write_text(json.dumps({**settings, "add_prefix_space": False}))
    loaded_tokenizer(hf)


def test_a_normalization_that_transformers_drops_is_refused(hf):
    write_sentencepiece(hf, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True)
    with pytest.raises(CheckpointError, match=r"does not reproduce .*tokenizer.json"):
        convert(hf, hf.parent / "out")


@pytest.mark.parametrize(
    ("prefix", "settings", "expected"),
    [
        ((), {}, ()),
        (("<s>",), {}, (0,)),
        (("[gMASK]", "<sop>"), {}, (2, 3)),
        ((), {"add_bos_token": True}, (0,)),
        (("<s>",), {"add_bos_token": True}, (0,)),
        (("<s>",), {"add_bos_token": False}, ()),
        (("[gMASK]", "<sop>"), {"add_bos_token": False}, (2, 3)),
        (("<s>",), {"tokenizer_class": "LlamaTokenizerFast"}, (0,)),
        ((), {"tokenizer_class": "Qwen2Tokenizer"}, ()),
    ],
)
def test_prefix_of_a_pipeline(prefix, settings, expected, hf):
    import tokenizers

    write_pipeline(hf, prefix=prefix)
    (hf / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", **settings})
    )
    tokenizer = loaded_tokenizer(hf)
    assert tokenizer.prefix_token_ids == expected
    pipeline = tokenizers.Tokenizer.from_file(str(hf / "tokenizer.json"))
    for sentence in SENTENCES:
        bare = pipeline.encode(sentence, add_special_tokens=False).ids
        assert tokenizer.encode(sentence) == [*expected, *bare]
        assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


def test_a_prefix_in_the_text_is_not_doubled(hf):
    write_pipeline(hf, prefix=("<s>",))
    (hf / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = loaded_tokenizer(hf)
    assert tokenizer.encode("<s>the quick") == tokenizer.encode("the quick")


def test_the_chat_template_survives(hf):
    write_pipeline(hf)
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    (hf / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = loaded_tokenizer(hf)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.hf.apply_chat_template(messages, tokenize=False) == "[user] hello"


def test_without_a_tokenizer(hf):
    summary = convert(hf, hf.parent / "out")
    assert summary.prefix_token_ids is None
    assert "token ids" in str(summary)
    assert load_converted(hf.parent / "out").tokenizer is None


def test_settings_of_a_tokenizer_that_is_missing(hf):
    (hf / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"none of tokenizer.json, .*; fetch the missing"):
        convert(hf, hf.parent / "out")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_file_that_cannot_be_read_is_not_passed_over(name, hf):
    write_pipeline(hf)
    (hf / name).unlink(missing_ok=True)
    (hf / name).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read \(it is a link to nothing"):
        convert(hf, hf.parent / "out")
    (hf / name).unlink()
    os.mkfifo(hf / name)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read \(it is a pipe"):
        convert(hf, hf.parent / "out")
    assert not (hf.parent / "out").exists()


def test_a_prefix_outside_the_vocabulary(tmp_path):
    """As of a tokenizer that belongs to another model."""
    source = hf_checkpoints.write_golden(tmp_path / "hf", "llama")
    write_pipeline(source)
    pipeline = json.loads((source / "tokenizer.json").read_text())
    pipeline["added_tokens"].append(
        {"id": 5000, "content": "<far>", "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
    )  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(pipeline))
    settings = {"bos_token": "<far>", "add_bos_token": True}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="in front of text, and the model's vocabulary ends"):
        convert(source, tmp_path / "out")


def test_code_of_a_checkpoint_is_neither_run_nor_asked_for(hf, monkeypatch):
    settings = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["own.Own", None]},
    }
    (hf / "own.py").write_text("raise SystemExit('run')")
    (hf / "vocab.json").write_text("{}")
    (hf / "merges.txt").write_text("")
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(CheckpointError, match="tokenizer"):
        convert(hf, hf.parent / "out")
