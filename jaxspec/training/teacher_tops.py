"""What a teacher would say after every token of a stream of texts: its likeliest next tokens, kept
in a file so that the teacher reads each text once, with its own kernels."""

from __future__ import annotations

import functools
import pathlib
import time
import zlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxspec.checkpoint.format import weights_digest
from jaxspec.models.base import LanguageModel, kernels_of, logits_of
from jaxspec.models.prefill import CHUNK, chain_window, prefill_chunks
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.console import Console
from jaxspec.training.teacher_states import check_origin
from jaxspec.types import PyTree

NUM_TOPS = 32
RECORD = np.dtype([("tokens", "<i4", NUM_TOPS), ("log_probs", "<f2", NUM_TOPS)])
"""The teacher's `NUM_TOPS` likeliest next tokens after a token, the likeliest first, and their
log-probabilities in its whole distribution at temperature 1."""
_NUM_CHUNKS = 16  # of a call: 2,048 tokens
_SHOWN_EVERY_S = 30.0


def teacher_tops(
    path: pathlib.Path, teacher: LanguageModel, texts: Sequence[Sequence[int]]
) -> np.ndarray:
    """A `RECORD` for every token `[N]` of the texts, one after another; of a text's last token too.

    The file grows by whole texts, so an interrupted one is continued. It takes 192 bytes per token.

    Args:
      path: of the file; what it depends on is stored beside it.
      teacher: packed; its vocabulary has at least `NUM_TOPS` tokens.
      texts: their token ids.

    Raises:
      CheckpointError: the file holds those of another teacher or of other texts.
    """
    ends = np.cumsum([0, *map(len, texts)])
    origin = {
        "teacher": weights_digest(teacher.params),
        "texts": zlib.crc32(np.concatenate([np.asarray(text, np.uint32) for text in texts]).data),
    }
    whose = "another teacher or of other texts"
    check_origin(path.with_suffix(".json"), path, origin, what="the tops", whose=whose)
    console = Console(stderr=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        num_known = file.seek(0, 2) // RECORD.itemsize
        num_done = int(np.searchsorted(ends, num_known, side="right")) - 1
        file.seek(int(ends[num_done]) * RECORD.itemsize)
        file.truncate()
        shown_s = time.monotonic()
        for tops in _tops(teacher, texts, num_done):
            file.write(tops.tobytes())
            if time.monotonic() - shown_s > _SHOWN_EVERY_S:
                shown_s, num_known = time.monotonic(), file.tell() // RECORD.itemsize
                console.print(f"the teacher has read {num_known:,} of {ends[-1]:,} tokens")
    return np.memmap(path, RECORD, "r", shape=(int(ends[-1]),))


def _tops(
    teacher: LanguageModel, texts: Sequence[Sequence[int]], first: int
) -> Iterator[np.ndarray]:
    """The records of each text from the `first` on, some texts at a time."""
    most = max(_chunks_of(text) for text in texts)
    num_chunks = max(_NUM_CHUNKS, most)
    score = Program(jax.jit(functools.partial(_score, teacher)), "the teacher's likeliest tokens")
    while first < len(texts):
        tokens = np.zeros((num_chunks + 1, most * CHUNK), np.int32)  # the last row stays empty
        chunks: list[tuple[int, int, int]] = []  # row, start and stop
        last = first
        while last < len(texts) and len(chunks) + _chunks_of(texts[last]) <= num_chunks:
            row, length = last - first, len(texts[last])
            tokens[row, :length] = texts[last]
            chunks += [(row, at, min(at + CHUNK, length)) for at in range(0, length, CHUNK)]
            last += 1
        padding = [(num_chunks, 0, 0)] * (num_chunks - len(chunks))
        rows, starts, stops = np.array([*chunks, *padding], np.int32).T
        found = jax.device_get(score(teacher.params, tokens, rows, starts, stops))
        records = np.zeros((num_chunks, CHUNK), RECORD)
        records["tokens"], records["log_probs"] = found
        for row in range(last - first):
            yield np.concatenate(
                [records[n, : stop - at] for n, (of, at, stop) in enumerate(chunks) if of == row]
            )
        first = last


def _chunks_of(text: Sequence[int]) -> int:
    return -(-len(text) // CHUNK)


def _score(
    teacher: LanguageModel,
    params: PyTree,
    tokens: jax.Array,
    rows: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens and their log-probabilities, `[R, CHUNK, n]`, after those of R chunks of
    `tokens` `[B, S]`."""
    cache = teacher.init_cache(*tokens.shape)
    place = {"rows": rows, "starts": starts, "stops": stops}
    hidden = prefill_chunks(teacher, params, cache, tokens, **place, chunk=CHUNK)[2]
    window = chain_window(starts, CHUNK, stop=stops)
    logits = logits_of(teacher, params, hidden, window)
    best = kernels_of(teacher).highest(logits, NUM_TOPS)
    return best.places, best.scores - best.log_total[..., None]
