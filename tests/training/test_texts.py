"""Texts that a target writes: what begins them, the file, resuming, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import tiny

from jaxspec.checkpoint.format import weights_digest
from jaxspec.errors import CheckpointError, JaxspecError, ModelError, SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.load.models import load_model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.training import data
from jaxspec.training.texts import Texts, TextsConfig, make_prompts, read_texts, write_texts


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two domains of passages that name their document."""
    root = tmp_path_factory.mktemp("corpora")
    for domain in ("tales", "sums"):
        (root / domain).mkdir()
        for split in ("train", "valid"):
            lines = [
                {
                    "source": f"{domain}/{split}/{book}",
                    "text": "\n\n".join(
                        f"{domain} {split} {book}.{passage}: " + "the fox sleeps. " * 8
                        for passage in range(5)
                    ),
                }
                for book in range(4)
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (root / domain / f"{split}.jsonl").write_text(text)
    return root


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny.save(tmp_path_factory.mktemp("models"), "target", text=tiny.tokenizer()))


def config(out, target, corpora, **overrides):
    settings = {
        "tokens": 100,
        "prompt_tokens": (12, 24),
        "output_tokens": 10,
        "batch_size": 4,
    }
    return TextsConfig(target=target, corpora=corpora, out=out, **(settings | overrides))


@pytest.fixture(scope="module")
def written(tmp_path_factory, target, corpora):
    """A file that was written without interruption, and the result."""
    out = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    return out, write_texts(config(out, target, corpora))


def beginnings(config, count):
    domains = data.discover_domains(config.corpora)
    train, held_out = {}, {}
    for domain in domains:
        train[domain.name], held_out[domain.name] = data.read_documents(domain, config.corpora)
    documents = train if config.split == "train" else held_out
    return list(itertools.islice(make_prompts(config, domains, documents, tiny.tokenizer()), count))


def test_the_file_says_who_wrote_it_and_holds_whole_texts(written, target):
    out, result = written
    read = read_texts(out)
    model = load_model(target)
    assert read.header["kind"] == "texts"
    assert read.header["target"] == model.name
    assert read.header["weights"] == weights_digest(model.params)
    assert read.header["vocab_size"] == model.vocab_size
    assert read.header["temperature"] == 0.0
    assert result["texts"] == len(read.texts) == sum(result["texts_by_domain"].values())
    assert result["tokens"] == sum(len(text.output) for text in read.texts) >= 100
    assert result["tokens"] - len(read.texts[-1].output) < 100
    assert {text.domain for text in read.texts} == {"tales", "sums"}


def test_outputs_are_the_targets_own(written, target):
    from jaxspec.engine.engine import Engine

    engine = Engine(load_model(target), batch_size=1, max_length=128)
    for text in read_texts(written[0]).texts[:3]:
        [done] = engine.generate([text.prompt], SamplingParams(max_tokens=10))
        assert list(done.token_ids) == text.output


def test_prompts_are_beginnings_of_passages_of_one_split(written, target, corpora, tmp_path):
    """By source and by text, in both splits; and the passages of a domain come once per pass."""
    tokenizer = tiny.tokenizer()
    held_out = config(tmp_path / "x", target, corpora, split="held-out")
    for split, prompts in (
        ("train", read_texts(written[0]).texts),
        ("valid", beginnings(held_out, 50)),
    ):
        for prompt in prompts:
            tokens = prompt.prompt
            assert prompt.source.startswith(f"{prompt.domain}/{split}/")
            assert tokenizer.decode(tokens).startswith(
                f"{prompt.domain} {split}"[: len(tokens) - 1]
            )
            assert 12 <= len(tokens) <= 24
    # Long enough to tell passages apart; a domain has 20.
    long = dataclasses.replace(held_out, prompt_tokens=(24, 24))
    of_tales = [p.prompt for p in beginnings(long, 60) if p.domain == "tales"][:20]
    assert len({tuple(tokens) for tokens in of_tales}) == len(of_tales)


def test_the_seed_decides_what_begins_the_texts(target, corpora, tmp_path):
    one = config(tmp_path / "x", target, corpora)
    assert beginnings(one, 20) == beginnings(one, 20)
    assert beginnings(one, 20) != beginnings(dataclasses.replace(one, seed=1), 20)


def test_an_interrupted_file_is_continued_to_the_same_bytes(written, target, corpora, tmp_path):
    class InterruptedError(Exception):
        pass

    def interrupt(num_texts, _):
        if num_texts == 3:
            raise InterruptedError

    whole = written[0].read_bytes()
    part = config(tmp_path / "part.jsonl", target, corpora)
    with pytest.raises(InterruptedError):
        write_texts(part, on_text=interrupt)
    lines = part.out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    assert whole.startswith(b"".join(lines))
    part.out.write_bytes(b"".join(lines) + lines[-1][:20])  # killed while it wrote a line
    assert len(read_texts(part.out).texts) == 3
    seen = []
    result = write_texts(part, on_text=lambda num_texts, _: seen.append(num_texts))
    assert part.out.read_bytes() == whole
    assert seen[0] == 4
    assert result["texts"] == written[1]["texts"]
    assert write_texts(part)["new_tokens"] == 0
    assert part.out.read_bytes() == whole


def test_a_header_that_was_cut_off_is_written_again(written, target, corpora, tmp_path):
    out = tmp_path / "texts.jsonl"
    out.write_bytes(written[0].read_bytes()[:30])
    write_texts(config(out, target, corpora))
    assert out.read_bytes() == written[0].read_bytes()


def test_digests_tell_weights_and_nothing_else(target):
    model = load_model(target, kernels="xla")
    plain = unpacked(model.params)
    assert "head" in plain
    assert weights_digest(plain) == weights_digest(model.params)
    packed = load_model(target)
    assert weights_digest(packed.params) == weights_digest(plain)
    half = load_model(target, dtype="bfloat16", kernels="xla")
    assert weights_digest(half.params) == weights_digest(plain)
    other = {**plain, "final_norm": plain["final_norm"].at[0].add(1e-2)}
    assert weights_digest(other) != weights_digest(plain)
    tied = {**plain, "head": plain["embedding"].T}
    without = {name: leaf for name, leaf in plain.items() if name != "head"}
    assert weights_digest(tied) == weights_digest(without) != weights_digest(plain)


def test_mistakes_are_named(written, target, corpora, tmp_path):
    def write(**overrides):
        write_texts(config(overrides.pop("out", written[0]), target, corpora, **overrides))

    def read(content):
        (tmp_path / "bad.jsonl").write_bytes(content)
        return read_texts(tmp_path / "bad.jsonl")

    def beginnings_of_both():
        """What is trained on is all held out too, with more."""
        (tmp_path / "both" / "tales").mkdir(parents=True)
        lines = [json.dumps({"source": "book", "text": word}) + "\n" for word in ("one", "two")]
        for split, some in (("train", lines[:1]), ("valid", lines)):
            (tmp_path / "both" / "tales" / f"{split}.jsonl").write_text("".join(some))
        write_texts(config(tmp_path / "y", target, tmp_path / "both"))

    header = written[0].read_bytes().splitlines(keepends=True)[0]
    line = {"domain": "a", "source": "b", "prompt": [1], "output": [2]}
    bare = tmp_path / "bare"
    tiny.save(tmp_path, "bare")
    (tmp_path / "notes.txt").write_text("irreplaceable\n")
    cases = [
        (SettingError, "tokens 0 was given", lambda: write(tokens=0)),
        (SettingError, "prompt_tokens .4, 2. was given", lambda: write(prompt_tokens=(4, 2))),
        (SettingError, "seed is -1", lambda: write(seed=-1)),
        (SettingError, "temperature -1", lambda: write(temperature=-1)),
        (SettingError, "in both splits", lambda: beginnings_of_both()),
        (CheckpointError, "another seed", lambda: write(seed=1)),
        (CheckpointError, "another output_tokens", lambda: write(output_tokens=11)),
        (CheckpointError, "header of texts", lambda: write(out=tmp_path / "notes.txt")),
        (
            ModelError,
            "has no tokenizer",
            lambda: write_texts(config(tmp_path / "x", str(bare), corpora)),
        ),
        (CheckpointError, "cannot be read", lambda: read_texts(tmp_path / "absent")),
        (CheckpointError, "header of texts", lambda: read(b'{"kind": "texts"}\n')),
        (CheckpointError, "Line 2", lambda: read(header + b"[]\n")),
        (
            CheckpointError,
            "Line 3",
            lambda: read(
                header
                + json.dumps(line).encode()
                + b"\n"
                + json.dumps(line | {"output": [tiny.VOCAB]}).encode()
                + b"\n"
            ),
        ),
    ]
    for error, words, mistake in cases:
        with pytest.raises(error, match=words) as caught:
            mistake()
        assert isinstance(caught.value, JaxspecError)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "notes.txt").read_text() == "irreplaceable\n"
    assert isinstance(read(header + json.dumps(line).encode() + b"\n"), Texts)
