"""Text to packed training batches.

Documents are read per domain, tokenized once into flat files with an end-of-text token after each
document, and cut into windows. Before the first step, the seed alone decides which window goes into
which row of which step, so a resumed run sees the same rows as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import struct
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxspec.errors import SettingError
from jaxspec.runtime.directories import write_atomically

END_OF_TEXT = "<|endoftext|>"
# What separates documents in the vocabularies of teachers.
_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>")
TEXTS = "texts"  # the domain of texts that the teacher wrote
GIVEN = np.uint32(2**31)  # added to the ids of tokens whose prediction is not measured: prompts
_HELD_OUT_PERCENT = 3
_STDLIB = "stdlib"
# Tests and installed packages; tables, and prose in string literals.
_STDLIB_LEFT_OUT = {"test", "tests", "site-packages", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
    """A named part of the corpus and its share of the training rows.

    Attributes:
      name: for reports.
      source: a directory of JSONL files, one JSONL file, or `stdlib` (the source of the Python
        standard library as installed).
      weight: relative share of the rows.
    """

    name: str
    source: str
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Domain:
        """The domain that `NAME[:SOURCE][=WEIGHT]` describes; SOURCE is NAME unless given."""
        head, _, weight = text.partition("=")
        name, _, source = head.partition(":")
        try:
            share = float(weight or 1.0)
        except ValueError:
            share = 0.0
        if not name or not share > 0:
            raise SettingError(
                f"The domain {text!r} is not of the form NAME[:SOURCE][=WEIGHT] with a positive "
                "weight; write for example code:stdlib=0.3."
            )
        return cls(name=name, source=source or name, weight=share)


class Document(NamedTuple):
    """A text and its source."""

    source: str
    text: str


def domains_of(chosen: Sequence[str], corpora: pathlib.Path) -> list[Domain]:
    """The domains with these names, as `Domain.parse` takes them; by default those that are found.

    Raises:
      SettingError: two of them have the same name.
    """
    domains = [Domain.parse(text) for text in chosen] or discover_domains(corpora)
    names = [domain.name for domain in domains]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise SettingError(
            f"Two domains are named {repeated[0]!r}; give each a name of its own, for example "
            f"{repeated[0]}-2:SOURCE."
        )
    return domains


def discover_domains(corpora: pathlib.Path) -> list[Domain]:
    """A domain of weight 1 for each subdirectory that has JSONL files, or the directory itself."""
    _check_directory(corpora)
    found = [p for p in sorted(corpora.iterdir()) if p.is_dir() and any(p.glob("*.jsonl"))]
    if found:
        return [Domain(name=p.name, source=p.name) for p in found]
    if any(corpora.glob("*.jsonl")):
        return [Domain(name=corpora.resolve().name, source=".")]
    raise SettingError(
        f"{corpora} holds no .jsonl file, nor does any directory in it; give a directory of JSONL "
        'files with one {"text": ...} object per line.'
    )


def read_documents(
    domain: Domain, corpora: pathlib.Path, exclude: Sequence[str] = ()
) -> tuple[list[Document], list[Document]]:
    """The documents of a domain to train on and those held out, without those whose source contains
    a string of `exclude`.

    A directory's `valid.jsonl` is held out. Without one, about 3 % of the documents are, chosen by
    a hash of source and text or, if that selects none, the last tenth of the longest document.

    Raises:
      SettingError: the source does not exist, holds no document, or a line is not as expected.
    """
    path = corpora / domain.source
    in_train, in_held_out = [path], []
    if domain.source != _STDLIB and not path.is_file():
        _check_directory(path)
        in_held_out = list(path.glob("valid.jsonl"))
        in_train = sorted({*path.glob("*.jsonl")}.difference(in_held_out))
    documents = _read_stdlib() if domain.source == _STDLIB else _read_jsonl(in_train)
    train, held_out = (
        [document for document in each if not any(word in document.source for word in exclude)]
        for each in (documents, _read_jsonl(in_held_out))
    )
    if not train:
        raise SettingError(
            f"The domain {domain.name!r} has no documents in {domain.source!r}; give JSONL files "
            'with one {"text": ...} object per line.'
        )
    if not held_out:
        held_out = [document for document in train if _is_held_out(*document)]
        train = [document for document in train if not _is_held_out(*document)] or train
    if not held_out or held_out == train:
        longest = max(range(len(train)), key=lambda place: len(train[place].text))
        source, text = train[longest]
        cut = len(text) - len(text) // 10
        held_out = [Document(source, text[cut:])]
        train = [*train[:longest], Document(source, text[:cut]), *train[longest + 1 :]]
    return train, held_out


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with `vocab_size` entries, in which id 0 is end-of-text. Every
    digit is its own pre-token (with the space before it, if any), which helps with arithmetic."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r" ?\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain.from_iterable(map(_pieces, texts)), trainer)
    return tokenizer


def write_tokens(
    path: pathlib.Path, texts: Iterable[str], tokenizer: tokenizers.Tokenizer
) -> np.ndarray:
    """Writes the token ids of `texts`, end-of-text after each; returns them mapped read-only.

    Raises:
      SettingError: the file cannot be written; no part of it is left.
    """
    end, parts = end_of_text_id(tokenizer), []
    for text in texts:
        # No merge crosses a cut, so the pieces have the tokens of the whole.
        encodings = tokenizer.encode_batch(list(_pieces(text)))
        ids = itertools.chain(*(encoding.ids for encoding in encodings), [end])
        parts.append(np.fromiter(ids, np.uint32).tobytes())
    write_atomically(path, b"".join(parts))
    return map_tokens(path)


def map_tokens(path: pathlib.Path) -> np.ndarray:
    """Read-only uint32 token ids `[num_tokens]` of a file that `write_tokens` wrote."""
    return np.memmap(path, np.uint32, mode="r")


def most_frequent(streams: Sequence[np.ndarray], vocab_size: int, count: int) -> tuple[int, ...]:
    """The ids of the `count` tokens that are most frequent in the streams, in increasing order."""
    counts = sum(np.bincount(stream, minlength=vocab_size) for stream in streams)
    return tuple(sorted(np.argsort(-np.asarray(counts), stable=True)[:count].tolist()))


def end_of_text_id(tokenizer: tokenizers.Tokenizer) -> int:
    """Id of the end-of-text token."""
    return tokenizer.get_vocab()[end_of_text(tokenizer)]


def end_of_text(tokenizer: tokenizers.Tokenizer) -> str:
    """The token that separates documents."""
    vocabulary = tokenizer.get_vocab()
    for name in _ENDS_OF_TEXT:
        if name in vocabulary:
            return name
    raise SettingError(
        f"The tokenizer has no token that separates documents ({', '.join(_ENDS_OF_TEXT)}); name a "
        "teacher with one."
    )


class Batch(struct.PyTreeNode, kw_only=True):
    """A packed batch, all `[B, T]`.

    Attributes:
      inputs: int32 tokens.
      labels: int32, the token after each input.
      segments: int32, the document of each input within its row; an end-of-text token belongs to
        the document it ends.
      weights: fp32, 0 where input and label are from different documents, or the label is `GIVEN`,
        otherwise 1.
    """

    inputs: jax.Array
    labels: jax.Array
    segments: jax.Array
    weights: jax.Array


def pack(windows: np.ndarray, end_of_text: int) -> Batch:
    """The batch of `windows` `[B, T + 1]` cut from a token stream."""
    is_given = windows[:, 1:] >= GIVEN
    windows = windows % GIVEN
    is_end = windows[:, :-1] == end_of_text
    return Batch(
        inputs=jnp.asarray(windows[:, :-1], jnp.int32),
        labels=jnp.asarray(windows[:, 1:], jnp.int32),
        segments=jnp.asarray(np.cumsum(is_end, axis=1) - is_end, jnp.int32),
        weights=jnp.asarray(~is_end & ~is_given, jnp.float32),
    )


def add_up(
    sums: Callable[[Batch], Sequence[jax.Array]], windows: np.ndarray, end_of_text: int, size: int
) -> list[float]:
    """The `size` scalars that `sums` returns for a batch, added up over all `windows`
    `[num_rows, T + 1]` in batches of some 4096 tokens."""
    num_rows = max(1, 4096 // (windows.shape[1] - 1))
    totals = np.zeros(size)
    for start in range(0, len(windows), num_rows):
        totals += np.array(sums(pack(windows[start : start + num_rows], end_of_text)), np.float64)
    return totals.tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """For every row of a phase, its stream and first token `[num_steps, B]`; and the length of the
    rows."""

    length: int
    stream: np.ndarray
    start: np.ndarray


def plan_rows(
    stream_lengths: Sequence[int],
    weights: Sequence[float],
    *,
    num_steps: int,
    num_rows: int,
    length: int,
    seed: tuple[int, ...],
) -> Plan:
    """Draws each row's stream by weight. Within a stream, windows come in random order, each once
    per pass, with different boundaries in every pass. A plan begins with the rows of any shorter
    one.

    Raises:
      SettingError: a stream is shorter than one window.
    """
    for stream_length in stream_lengths:
        if stream_length < length + 1:
            raise SettingError(
                f"A domain has {stream_length} tokens, fewer than the {length + 1} of one training "
                "row; give it more text or lower the sequence length."
            )
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    rng = np.random.default_rng(seed)
    stream = rng.choice(len(shares), size=num_steps * num_rows, p=shares)
    start = np.zeros(num_steps * num_rows, np.int64)
    for index, stream_length in enumerate(stream_lengths):
        (rows,) = np.nonzero(stream == index)
        starts: list[np.ndarray] = []
        num_drawn = 0
        rng = np.random.default_rng((*seed, index))  # whatever was drawn for the streams before
        while num_drawn < len(rows):
            shift = rng.integers(0, min(length, stream_length - length))
            cuts = np.arange(shift, stream_length - length, length)
            starts.append(rng.permutation(cuts))
            num_drawn += len(cuts)
        if starts:
            start[rows] = np.concatenate(starts)[: len(rows)]
    shape = (num_steps, num_rows)
    return Plan(length=length, stream=stream.reshape(shape), start=start.reshape(shape))


def cut(plan: Plan, streams: Sequence[np.ndarray], step: int) -> np.ndarray:
    """Windows `[B, T + 1]` of one step of a plan."""
    rows = zip(plan.stream[step], plan.start[step], strict=True)
    return np.stack([streams[s][at : at + plan.length + 1] for s, at in rows])


def held_out_windows(stream: np.ndarray, length: int, num_tokens: int) -> np.ndarray:
    """Up to `num_tokens / length` windows `[B, T + 1]` spread evenly over a held-out stream."""
    num_windows = 0
    if length > 0:
        num_windows = max(min(num_tokens // length, (len(stream) - 1) // length), 0)
    if not num_windows:
        return np.zeros((0, length + 1), stream.dtype)
    starts = np.linspace(0, len(stream) - length - 1, num_windows).astype(np.int64)
    return np.stack([stream[at : at + length + 1] for at in starts])


def _check_directory(path: pathlib.Path) -> None:
    if not path.is_dir():
        raise SettingError(
            f"{path} is not a directory; give one that holds JSONL files with one "
            '{"text": ...} object per line.'
        )


def _read_jsonl(paths: Iterable[pathlib.Path]) -> Iterator[Document]:
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    fields = json.loads(line)
                    text = fields["text"]
                except (ValueError, RecursionError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise SettingError(
                        f"Line {number} of {path} is not a JSON object with a text; write one "
                        '{"text": "..."} object per line.'
                    )
                if text:
                    yield Document(str(fields.get("source", path.name)), text)


def _read_stdlib() -> Iterator[Document]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _STDLIB_LEFT_OUT & set(name.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            yield Document(name.as_posix(), text)


def _is_held_out(source: str, text: str) -> bool:
    digest = hashlib.sha256(f"{source}\0{text}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < _HELD_OUT_PERCENT


def _pieces(text: str, length: int = 20_000) -> Iterator[str]:
    """Pieces of a text of about `length` characters, cut before a line that begins with a letter. A
    line end between a non-space and a letter is its own pre-token, so a cut there changes no token.
    """
    start = 0
    while len(text) - start > length:
        end = start + length
        while end < len(text) and not (
            text[end - 1] == "\n" and text[end].isalpha() and not text[end - 2].isspace()
        ):
            end += 1
        yield text[start:end]
        start = end
    yield text[start:]
