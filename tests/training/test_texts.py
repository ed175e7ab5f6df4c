"""Texts that a target writes: what begins them, the file, resuming, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib

import pytest
import tiny
from written import write_texts as write_known_texts

from jaxspec.checkpoint.format import weights_digest
from jaxspec.engine.engine import Engine
from jaxspec.errors import (
    CheckpointError,
    JaxspecError,
    ModelError,
    PromptError,
    SettingError,
)
from jaxspec.kernels.base import unpacked
from jaxspec.load.models import load_model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.training import data, lm
from jaxspec.training.texts import (
    Text,
    Texts,
    TextsConfig,
    held_out_part,
    make_prompts,
    read_texts,
    write_texts,
)


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


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts in three forms, of which one has its answer, as `jaxspec generate --output` writes
    them."""
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    lines = [
        {"question_id": 1, "category": "maths", "turns": ["Two and two?", "And three?"]},
        {"prompt": "Why?", "domain": "tales"},
        {"prompt_token_ids": [0, 9, 8], "token_ids": [7, 7], "finish_reason": "length"},
        {"messages": [{"role": "user", "content": "Where?"}]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def of_prompts(out, target, prompts, **overrides):
    settings = {"tokens": 1000, "output_tokens": 10, "batch_size": 2, "prompts": prompts}
    return config(out, target, None, **(settings | overrides))


def test_prompts_are_answered_in_order(target, prompts, tmp_path):
    """Each once, as a chat or as they stand, and again where the file was cut off."""
    tokenizer, engine = tiny.tokenizer(), Engine(load_model(target), batch_size=1, max_length=128)
    for is_chat in (True, False):
        chat = of_prompts(tmp_path / f"{is_chat}.jsonl", target, prompts, chat=is_chat)
        result, texts = write_texts(chat), read_texts(chat.out).texts
        assert (result["texts"], result["tokens"]) == (4, sum(len(text.output) for text in texts))
        assert [text.domain for text in texts] == ["maths", "tales", "questions", "questions"]
        assert [text.source for text in texts] == [f"questions.jsonl:{n}" for n in (1, 2, 3, 4)]
        question = [{"role": "user", "content": "Two and two?"}]
        encoded = tokenizer.encode_chat(question), tokenizer.encode("Two and two?")
        assert texts[0].prompt == list(encoded[0 if is_chat else 1])
        assert (texts[2].prompt, texts[2].output) == ([0, 9, 8], [7, 7])
        for text in (texts[0], texts[1], texts[3]):
            [done] = engine.generate([text.prompt], SamplingParams(max_tokens=10))
            assert list(done.token_ids) == text.output
        whole = chat.out.read_bytes()
        chat.out.write_bytes(whole[: whole.rindex(b"{") + 5])
        write_texts(chat)
        assert chat.out.read_bytes() == whole
    few = of_prompts(tmp_path / "few.jsonl", target, prompts, tokens=3)
    assert write_texts(few)["texts"] == 1


def test_answers_that_are_there_are_taken_without_an_engine(target, tmp_path, monkeypatch):
    answers = tmp_path / "answers.jsonl"
    line = {"prompt_token_ids": [0, 5], "token_ids": [6, 1], "category": "maths", "seed": 3}
    answers.write_text(f"{json.dumps(line)}\n" * 3)
    monkeypatch.setattr("jaxspec.training.texts.Engine", None)
    given = of_prompts(tmp_path / "texts.jsonl", target, answers)
    assert write_texts(given)["texts"] == 3
    assert {(t.domain, *t.prompt, *t.output) for t in read_texts(given.out).texts} == {
        ("maths", 0, 5, 6, 1)
    }
    for bad in ([6, tiny.VOCAB], [6, -1], "6", [6, 1.0]):
        answers.write_text(json.dumps(line | {"token_ids": bad}) + "\n")
        with pytest.raises(PromptError, match="Line 1 of the prompt file has an answer that is no"):
            write_texts(of_prompts(tmp_path / "bad.jsonl", target, answers))


def test_a_draft_model_learns_from_texts(target, tmp_path):
    """The texts' tokens are learned as they stand, an end of text between them, and every twentieth
    is measured on."""
    texts = write_known_texts(tmp_path / "texts.jsonl", target, num_texts=120)
    settings = lm.TrainConfig(
        out=tmp_path / "run", corpora=texts, teacher=target, tokens=2048, batch_tokens=128,
        sequence_length=32, max_length=64, width=16, feed_forward_width=16, num_layers=1,
        warmup_steps=2, learning_rate=1e-2, evaluate_tokens=64,
    )  # fmt: skip
    task = lm.LmTask(settings)
    whole = [[*text.prompt, *text.output, tiny.EOS] for text in read_texts(texts).texts]
    training = [token for place, ids in enumerate(whole) if place % 20 for token in ids]
    rows = task.batch(3, None).rows
    for row, labels in zip(rows.inputs.tolist(), rows.labels.tolist(), strict=True):
        assert any(training[at : at + 33] == [*row, labels[-1]] for at in range(len(training)))
    assert rows.weights.tolist() == (rows.inputs != tiny.EOS).astype(float).tolist()
    # What is measured is what the target wrote after prompts of six tokens.
    windows = task._corpus.held_out[0][: 6 * 19].reshape(6, 19)
    held_out = data.pack(windows, tiny.EOS)
    assert held_out.inputs.tolist() == [ids[:-1] for ids in whole[::20]]
    # The end of text is not: nobody wrote it.
    assert held_out.weights.tolist() == [[0.0] * 5 + [1.0] * 12 + [0.0]] * 6
    losses = []
    result = lm.train_lm(settings, on_step=lambda _, metrics: losses.append(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    assert result["acceptance"]["texts"]["num_tokens"] > 0
    other = str(tiny.save(tmp_path, "other", seed=1, text=tiny.tokenizer()))
    for error, words, changes in (
        (ModelError, "whose weights are not those of", {"teacher": other}),
        (SettingError, "without the teacher that wrote them; give --teacher", {"teacher": None}),
        (SettingError, "was given with domains", {"domains": ("tales",)}),
    ):
        with pytest.raises(error, match=words):
            lm.LmTask(dataclasses.replace(settings, **changes))


def test_texts_that_begin_alike_are_not_in_both_parts():
    """Texts 0, 20 and 40 are measured on."""
    prompts = [[100 + place, 1] for place in range(41)]
    prompts[20], prompts[40] = [*range(16)], [*range(30, 60)]
    prompts[5] = prompts[0]
    prompts[6] = [*prompts[20], 7]
    prompts[7] = prompts[40][:16]
    prompts[8], prompts[9] = [*prompts[0], 7], prompts[40][:15]  # too short to be the same passage
    texts = [Text("any", "any", prompt, [place]) for place, prompt in enumerate(prompts)]
    training, held_out = held_out_part(texts, pathlib.Path("texts.jsonl"))
    assert held_out == [texts[0], texts[20], texts[40]]
    assert training == [text for text in texts if text.output[0] not in (0, 5, 6, 7, 20, 40)]
    with pytest.raises(ModelError, match="Of the 5 usable texts"):
        held_out_part([texts[0]] * 5, pathlib.Path("texts.jsonl"))


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
        (SettingError, "both were given; give one", lambda: write(prompts=tmp_path / "x")),
        (SettingError, "neither corpora nor prompts", lambda: config(tmp_path, target, None)),
        (
            SettingError,
            "domains was given, and texts begin with prompts",
            lambda: of_prompts(tmp_path, target, tmp_path, domains=("a",)),
        ),
        (SettingError, "chat was given, and texts begin with documents", lambda: write(chat=True)),
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
