"""Texts that a target writes, for training drafters: `jaxspec train texts`.

A file of texts is JSONL. Its first line is the header, which names the target and the digest of its
weights; every other line is a `Text`: a prompt and the target's own answer, or the beginning of a
passage and its continuation. Prompts are answered in order, and the seed decides which passage
begins which text, so the file is the same however often writing was interrupted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import xxhash

from jaxspec.checkpoint.format import weights_digest
from jaxspec.engine.engine import Engine
from jaxspec.errors import CheckpointError, ModelError, PromptError, SettingError
from jaxspec.load.models import load_packed
from jaxspec.models.base import LanguageModel
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.prompts import encode_prompts, load_prompts
from jaxspec.requests.requests import make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import check_can_write, check_regular_file
from jaxspec.runtime.documents import json_text
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.options import LARGEST_COUNT, LARGEST_NUMBER, check_between
from jaxspec.runtime.values import refusal
from jaxspec.training import data
from jaxspec.training.trainer import NoOption, check_positive, json_object

KIND = "texts"
# Requests passed to the engine at a time: enough that its last, partly filled batches cost little.
_NUM_REQUESTS = 1024
# A passage begins with its document, or after a blank line.
_PASSAGE = re.compile(r"\A(?=\S)|(?<=\n\n)(?=\S)")
# Enough of a passage for the longest beginning, in ordinary text.
_CHARACTERS_PER_TOKEN = 8
# Without a file of held-out texts, each of so many texts is held out.
_HELD_OUT_EVERY = 20
_LONG_BEGINNING = 16  # tokens that two passages or chats do not share by chance

Split: TypeAlias = Literal["train", "held-out"]
OnText: TypeAlias = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextsConfig:
    """Settings of `jaxspec train texts`.

    Attributes:
      target: the model that writes, as a name for `load_model`.
      corpora: directory with one directory per domain, each with JSONL files of lines `{"text":
        ...}`, whose documents the target continues.
      prompts: a file of prompts that it answers instead, each once, one per line: Spec-Bench
        questions, plain text, or JSON objects with `prompt`, `prompt_token_ids` or `messages`. Of
        what `jaxspec generate --output` wrote with this target, the answers are taken.
      chat: take each text prompt as a user's message, and apply the chat template.
      out: the file to write; a file with texts of the same settings is continued.
      tokens: number of tokens that the target writes; texts that are begun by then are finished.
      domains: NAME[:SOURCE][=WEIGHT] each; SOURCE is a directory or JSONL file within `corpora`, or
        `stdlib` for the Python standard library's source. By default every directory is a domain.
      exclude: documents whose "source" contains one of these are left out.
      split: whether the texts begin with training documents or, for evaluation, with held-out ones;
        of prompts, whether they are to be trained on.
      temperature: the target's; 0 is greedy.
      prompt_tokens: lengths of the shortest and the longest beginning of a document in tokens;
        lengths between the two are spread evenly on a log scale.
      output_tokens: length of a continuation or answer in tokens, unless the target ends it sooner.
      batch_size: number of texts written at a time.
      drafter: as in `jaxspec generate --drafter`; it changes the speed, not the texts. Default: for
        `demo-target`, the draft model that comes with it; for other targets, none.
      seed: seed of the choice of passages and of sampling.
    """

    target: str
    out: pathlib.Path
    corpora: pathlib.Path | None = None
    prompts: pathlib.Path | None = None
    chat: bool = False
    tokens: int = 600_000
    domains: tuple[str, ...] = ()
    exclude: NoOption[tuple[str, ...]] = ()
    split: Split = "train"
    temperature: float = 0.0
    prompt_tokens: tuple[int, int] = (4, 96)
    output_tokens: int = 128
    batch_size: NoOption[int] = 16
    drafter: str | None = None
    seed: int = 0

    def __post_init__(self):
        check_between("tokens", self.tokens, 1, LARGEST_NUMBER)
        check_positive(self, "output_tokens", "batch_size")
        lengths = self.prompt_tokens
        if len(lengths) != 2 or not 1 <= lengths[0] <= lengths[1] <= LARGEST_COUNT:
            raise refusal("prompt_tokens", lengths, "the least number, at least 1, and the most")
        if not 0 <= self.seed < 2**31:
            raise SettingError(f"seed is {self.seed}; it must lie in [0, 2**31).")
        SamplingParams(temperature=self.temperature)  # raises now, before a file is begun
        if (self.corpora is None) == (self.prompts is None):
            given = "neither corpora nor prompts were" if self.prompts is None else "both were"
            raise SettingError(
                "Texts begin with documents (--corpora) or with prompts (--prompts), and "
                f"{given} given; give one of them."
            )
        kind, misplaced = "prompts", ("domains", "exclude")
        if self.prompts is None:
            kind, misplaced = "documents", ("chat",)
        if given := [name for name in misplaced if getattr(self, name)]:
            raise SettingError(f"{given[0]} was given, and texts begin with {kind}; leave it out.")


class Text(NamedTuple):
    """A beginning or prompt, and what the target wrote after it.

    Attributes:
      domain: the domain of the corpus; of a prompt its line's `domain` or `category`, or the name
        of its file.
      source: the document's source; of a prompt its line.
      prompt: token ids of the beginning.
      output: token ids that the target wrote; none yet of a text that is only begun.
    """

    domain: str
    source: str
    prompt: list[int]
    output: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """A file of texts.

    Attributes:
      header: `target` (its name), `weights` (`weights_digest` of its parameters), `vocab_size`,
        `temperature`, and the settings of the run that wrote them.
      texts: the texts, in the order in which they were written.
    """

    header: dict[str, Any]
    texts: list[Text]


def write_texts(config: TextsConfig, *, on_text: OnText | None = None) -> dict[str, Any]:
    """Has the target write texts as `config` says, until they have the requested number of tokens.

    Args:
      config: what to write.
      on_text: called after every text with the number of texts and of the target's tokens so far.

    Returns:
      `texts` and `tokens` in the file, `prompt_tokens` before them, `texts_by_domain`; `new_tokens`
      that this run wrote, `tokens_per_s` and `wall_s`.

    Raises:
      SettingError: the corpora cannot be read, or another process is writing the file.
      ModelError: the target has no tokenizer, or its output is not finite.
      CheckpointError: the file holds something else, or texts with other settings.
    """
    start_s = time.perf_counter()
    check_can_write(config.out)
    target = load_packed(config.target)
    if target.tokenizer is None:
        raise ModelError(
            f"The target {config.target} has no tokenizer, which the beginnings of texts need; "
            "name a model with one."
        )
    header, prompts = _begun(config, target)
    try:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        with only_writer(config.out.resolve()):
            done = _continued(config.out, header)
            num_before = num_tokens = sum(len(text.output) for text in done)
            written_s = time.perf_counter()
            with (
                config.out.open("a", encoding="utf-8") as file,
                contextlib.closing(_written(config, target, prompts, len(done))) as texts,
            ):
                while num_tokens < config.tokens:
                    if (text := next(texts, None)) is None:
                        break  # every prompt has its answer
                    file.write(json_text(text._asdict(), separators=(",", ":")) + "\n")
                    file.flush()
                    done.append(text)
                    num_tokens += len(text.output)
                    if on_text is not None:
                        on_text(len(done), num_tokens)
                os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"The texts {config.out} cannot be written ({error}); mend that and run again, and "
            "what was written is kept."
        ) from error
    now_s = time.perf_counter()
    return {
        "texts": len(done),
        "tokens": num_tokens,
        "prompt_tokens": sum(len(text.prompt) for text in done),
        "texts_by_domain": dict(collections.Counter(text.domain for text in done)),
        "new_tokens": num_tokens - num_before,
        "tokens_per_s": (num_tokens - num_before) / (now_s - written_s),
        "wall_s": now_s - start_s,
    }


def read_texts(path: pathlib.Path) -> Texts:
    """The texts in a file; an incomplete last line is left out.

    Raises:
      CheckpointError: it cannot be read, or is not a file of texts.
    """
    try:
        check_regular_file(path)
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"The texts {path} cannot be read ({error.strerror}); write them by `jaxspec train "
            "texts`."
        ) from error
    lines = content.split(b"\n")[:-1]  # an incomplete last line is dropped
    header = json_object(lines[0]) if lines else None
    if header is None or header.get("kind") != KIND or type(header.get("vocab_size")) is not int:
        raise CheckpointError(
            f"{path} does not begin with a header of texts; give a file that `jaxspec train texts` "
            "wrote."
        )
    texts = []
    for number, line in enumerate(lines[1:], start=2):
        fields = json_object(line)
        text = None if fields is None else _text(fields, header["vocab_size"])
        if text is None:
            raise CheckpointError(
                f"Line {number} of {path} is no text of the target's {header['vocab_size']} "
                "tokens; write the file again by `jaxspec train texts`."
            )
        texts.append(text)
    return Texts(header=header, texts=texts)


def held_out_part(texts: Sequence[Text], path: pathlib.Path) -> tuple[list[Text], list[Text]]:
    """The texts in a file to train on, and those to measure on: every twentieth. Texts with the
    same prompt are not in both parts, nor those of which one's prompt, if it is long, begins the
    other's: these are of the same passage or chat.

    Raises:
      ModelError: none is left to train on.
    """
    first_like = _first_texts_like(texts)
    held_out = {first_like[place] for place in range(0, len(texts), _HELD_OUT_EVERY)}
    training = [text for place, text in enumerate(texts) if first_like[place] not in held_out]
    if not training:
        raise ModelError(
            f"Of the {len(texts)} usable texts in {path} every twentieth is measured on, and none "
            "begins otherwise and could be trained on; write texts from more prompts or documents."
        )
    return training, list(texts[::_HELD_OUT_EVERY])


def _first_texts_like(texts: Sequence[Text]) -> list[int]:
    """For each text the place of the first one with the same prompt, or with a long beginning of
    it."""
    first_like = list(range(len(texts)))
    beginning: list[int] = []
    for place in sorted(range(len(texts)), key=lambda place: texts[place].prompt):
        prompt = texts[place].prompt
        is_same = prompt == beginning and bool(prompt)
        is_begun = len(beginning) >= _LONG_BEGINNING and prompt[: len(beginning)] == beginning
        if not is_same and not is_begun:
            beginning, first = prompt, place
        first_like[place] = first
    return first_like


def check_writer(texts: Texts, path: pathlib.Path, *, target: str, weights: str) -> None:
    """Raises `ModelError` unless the weights with this digest wrote the texts in `path`."""
    if texts.header.get("weights") != weights:
        raise ModelError(
            f"The texts in {path} were written by {texts.header.get('target')}, whose weights are "
            f"not those of {target}; have this target write texts by `jaxspec train texts`."
        )


def check_to_train_on(texts: Texts, path: pathlib.Path) -> None:
    """Raises `SettingError` if the texts in `path` were written to measure on."""
    if texts.header.get("split") == "held-out":
        raise SettingError(
            f"The texts in {path} were written to measure on (--split held-out); train on others."
        )


def make_prompts(
    config: TextsConfig,
    domains: Sequence[data.Domain],
    documents: Mapping[str, Sequence[data.Document]],
    tokenizer: TextTokenizer,
) -> Iterator[Text]:
    """Endless beginnings of passages: the domain is drawn by weight, and the passages of a domain
    come in random order, each once per pass."""
    streams = {
        name: _passages(found, np.random.default_rng((config.seed, index)))
        for index, (name, found) in enumerate(documents.items())
    }
    shares = np.array([domain.weight for domain in domains])
    shares /= shares.sum()
    least, most = config.prompt_tokens
    shortest, longest = math.log(least), math.log(most + 1)
    rng = np.random.default_rng(config.seed)
    while True:
        name = domains[rng.choice(len(domains), p=shares)].name
        length = math.floor(math.exp(rng.uniform(shortest, longest)))
        source, passage = next(streams[name])
        token_ids = tokenizer.encode(passage[: _CHARACTERS_PER_TOKEN * most])
        # Leaves some of the passage to be continued.
        prompt = token_ids[: max(1, min(length, len(token_ids) - 1))]
        yield Text(name, source, prompt, [])


def _passages(
    documents: Sequence[data.Document], rng: np.random.Generator
) -> Iterator[data.Document]:
    """Passages in random order, pass after pass."""
    starts = [
        (document, match.start())
        for document in documents
        for match in _PASSAGE.finditer(document.text)
    ] or [(document, 0) for document in documents]
    while True:
        for index in rng.permutation(len(starts)):
            (source, text), start = starts[index]
            yield data.Document(source, text[start:])


def _documents(config: TextsConfig, domain: data.Domain) -> list[data.Document]:
    """The documents of one split, none of which is in the other."""
    assert config.corpora is not None
    train, held_out = data.read_documents(domain, config.corpora, config.exclude)
    chosen, other = (train, held_out) if config.split == "train" else (held_out, train)
    others = {text for _, text in other}
    own = [document for document in chosen if document.text not in others]
    if not own:
        raise SettingError(
            f"Every document of the domain {domain.name} to begin texts with is in both splits; "
            "give it documents that only one of them has."
        )
    return own


def _begun(config: TextsConfig, target: LanguageModel) -> tuple[dict[str, Any], Iterator[Text]]:
    """The first line of the file, with who writes the texts and everything that decides their
    content; and the texts that are begun."""
    assert target.tokenizer is not None
    header = {
        "kind": KIND,
        "target": target.name,
        "weights": weights_digest(target.params),
        "vocab_size": target.vocab_size,
        "temperature": config.temperature,
        "split": config.split,
        "output_tokens": config.output_tokens,
        "seed": config.seed,
    }
    if config.corpora is None:
        texts = _read_prompts(config, target)
        digest = xxhash.xxh3_128(json.dumps(texts).encode())
        return header | {"prompts": digest.hexdigest()}, iter(texts)
    domains = data.domains_of(config.domains, config.corpora)
    documents = {domain.name: _documents(config, domain) for domain in domains}
    digest = xxhash.xxh3_128()
    for document in itertools.chain.from_iterable(documents.values()):
        digest.update(f"{document.source}\0{document.text}\0".encode())
    header |= {
        "domains": list(config.domains),
        "documents": digest.hexdigest(),
        "min_prompt_tokens": config.prompt_tokens[0],
        "max_prompt_tokens": config.prompt_tokens[1],
    }
    return header, make_prompts(config, domains, documents, target.tokenizer)


def _read_prompts(config: TextsConfig, target: LanguageModel) -> list[Text]:
    """The prompts of a file, and the answers of those that `jaxspec generate` wrote there."""
    assert config.prompts is not None
    lines, _ = load_prompts(config.prompts)
    texts = []
    for line, prompt in zip(lines, encode_prompts(lines, target, is_chat=config.chat), strict=True):
        domain = line.fields.get("domain", line.fields.get("category", config.prompts.stem))
        answer = line.fields.get("token_ids", [])
        source = f"{config.prompts.name}:{line.number}"
        fields = {"domain": str(domain), "source": source, "prompt": list(prompt), "output": answer}
        if (text := _text(fields, target.vocab_size)) is None:
            raise PromptError(
                f"{line.name} has an answer that is not made of the {target.vocab_size} tokens of "
                f"{config.target}; give what this target wrote, or prompts without answers."
            )
        texts.append(text)
    return texts


def _continued(path: pathlib.Path, header: dict[str, Any]) -> list[Text]:
    """The texts that are already in the file, cut after the last complete one; writes the header of
    a new file."""
    first_line = json.dumps(header).encode() + b"\n"
    if not path.exists() or first_line.startswith(path.read_bytes()):
        path.write_bytes(first_line)
        return []
    found = read_texts(path)
    if different := sorted(
        name for name in {*header, *found.header} if header.get(name) != found.header.get(name)
    ):
        raise CheckpointError(
            f"The texts in {path} were written with another {', '.join(different)}; continue them "
            "with the settings they were begun with, or name another file."
        )
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return found.texts


def _written(
    config: TextsConfig, target: LanguageModel, prompts: Iterator[Text], num_done: int
) -> Generator[Text, None, None]:
    """The texts that are begun, after the first `num_done`, whole."""
    drafter = config.drafter or ("demo-draft" if config.target == "demo-target" else "none")
    longest = config.prompt_tokens[1]
    if config.prompts is not None:
        begun = list(prompts)
        longest = max(len(text.prompt) for text in begun)
        if all(text.output for text in begun):  # nothing is left to write
            yield from begun[num_done:]
            return
        prompts = iter(begun)
    longest += config.output_tokens
    engine = Engine(target, drafter, batch_size=config.batch_size, max_length=longest + 32)
    numbered = itertools.islice(enumerate(prompts), num_done, None)
    while chunk := list(itertools.islice(numbered, _NUM_REQUESTS)):
        asked = [(number, text) for number, text in chunk if not text.output]
        requests = make_requests(
            [text.prompt for _, text in asked],
            [
                SamplingParams(
                    max_tokens=config.output_tokens,
                    temperature=config.temperature,
                    seed=(config.seed << 32) + number,
                )
                for number, _ in asked
            ],
            target,
            longest=engine.longest_prompt,
        )
        with contextlib.closing(engine.run(requests)) as completions:
            for number, text in chunk:
                if text.output:
                    yield text
                    continue
                completion = next(completions)
                if completion.finish_reason == "abort":
                    raise ModelError(
                        f"Text {number} of {config.target} ended by itself "
                        f"({completion.stop_reason}); check the target's weights."
                    )
                yield text._replace(output=list(completion.token_ids))


def _text(fields: dict[str, Any], vocab_size: int) -> Text | None:
    """The text in a line's fields, or None if they are not a text."""
    if set(fields) != set(Text._fields):
        return None
    text = Text(**fields)
    if not text.prompt and not text.output:
        return None
    for tokens in (text.prompt, text.output):
        if not isinstance(tokens, list):
            return None
        if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            return None
    return text
