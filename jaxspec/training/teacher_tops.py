"""What a teacher would say after every token of a stream of texts: its likeliest next tokens, kept
in a file so that the teacher reads each text once, with its own kernels."""

from __future__ import annotations

import functools
import pathlib
import time
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.checkpoint.format import weights_digest
from jaxspec.models.base import LanguageModel, kernels_of, logits_of
from jaxspec.runtime.console import Console
from jaxspec.training.teacher_states import check_origin
from jaxspec.training.text_passes import TextPasses, TokenIds
from jaxspec.types import PyTree, Window

NUM_TOPS = 32
RECORD = np.dtype([("tokens", "<i4", NUM_TOPS), ("log_probs", "<f2", NUM_TOPS)])
"""The teacher's `NUM_TOPS` likeliest next tokens after a token, the likeliest first, and their
log-probabilities in its whole distribution at temperature 1."""
_SHOWN_EVERY_S = 30.0


def teacher_tops(
    path: pathlib.Path, teacher: LanguageModel, texts: Sequence[TokenIds]
) -> np.ndarray:
    """A `RECORD` for every token `[N]` of the texts, one after another; of a text's last token too.

    The file grows by whole texts, so an interrupted one is continued. It takes 192 bytes per token.

    Args:
      path: of the file; what it depends on is stored beside it.
      teacher: packed; its vocabulary has at least `NUM_TOPS` tokens.
      texts: their token ids.

    Raises:
      CheckpointError: the file holds those of another teacher, of other texts, or of the teacher in
        another dtype.
    """
    ends = np.cumsum([0, *map(len, texts)])
    origin = {
        "teacher": weights_digest(teacher.params),
        "dtype": teacher.dtype.name,
        "texts": zlib.crc32(np.concatenate([np.asarray(text, np.uint32) for text in texts]).data),
    }
    whose = "another teacher or dtype or of other texts"
    check_origin(path.with_suffix(".json"), path, origin, what="the likeliest tokens", whose=whose)
    console = Console(stderr=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        num_known = file.seek(0, 2) // RECORD.itemsize
        num_done = int(np.searchsorted(ends, num_known, side="right")) - 1
        file.seek(int(ends[num_done]) * RECORD.itemsize)
        file.truncate()
        shown_s = time.monotonic()
        passes = TextPasses(
            teacher,
            functools.partial(_likeliest, teacher),
            longest=max(map(len, texts)),
            name="the teacher's likeliest tokens",
        )
        for tokens, log_probs in passes(texts[num_done:]):
            record = np.zeros(len(tokens), RECORD)
            record["tokens"], record["log_probs"] = tokens, log_probs
            file.write(record.tobytes())
            if time.monotonic() - shown_s > _SHOWN_EVERY_S:
                shown_s, num_known = time.monotonic(), file.tell() // RECORD.itemsize
                console.print(f"the teacher has read {num_known:,} of {ends[-1]:,} tokens")
    return np.memmap(path, RECORD, "r", shape=(int(ends[-1]),))


def _likeliest(
    teacher: LanguageModel, params: PyTree, hidden: jax.Array, window: Window
) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens after those of a window, and their log-probabilities, `[R, T, n]`."""
    best = kernels_of(teacher).highest(logits_of(teacher, params, hidden, window), NUM_TOPS)
    return best.places, best.scores - best.log_total[..., None]
