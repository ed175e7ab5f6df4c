"""What all runs that train drafters on their target's texts have in common."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from jaxspec.errors import CheckpointError, ModelError, SettingError
from jaxspec.runtime.options import LARGEST_NUMBER
from jaxspec.training import runs
from jaxspec.training.text_rows import fill_rows
from jaxspec.training.texts import Text, check_writer, read_texts

# Without a file of held-out texts, each of so many texts is held out.
_HELD_OUT_EVERY = 20
# Settings that do not change what is trained, so a run may be resumed with others.
_FREE_FIELDS = (
    "out",
    "target",
    "texts",
    "held_out",
    "resume",
    "log_every",
    "evaluate_every",
    "evaluate_texts",
    "checkpoint_every",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterTrainConfig:
    """Settings of every run that trains a drafter on its target's texts.

    Attributes:
      target: the model that the drafter drafts for, as a name for `load_model`.
      texts: the file that `jaxspec train texts` had this target write.
      out: directory of the run, for checkpoint, log, result and, at the end, the drafter.
      held_out: a file of texts written with `--split held-out`, to measure on; without it, every
        twentieth of `texts` is held out.
      tokens: total number of training tokens, including prompts.
      batch_tokens: tokens per step.
      sequence_length: tokens per row, which holds several texts; longer texts are cut.
      dtype: the dtype in which target and drafter are computed; parameters and optimizer are
        float32.
      learning_rate: the peak, reached after `warmup_fraction` of the steps; then a cosine decays it
        to a tenth.
      warmup_fraction: fraction of the steps used for warm-up.
      weight_decay: weight decay of matrices.
      clip_norm: largest global norm of the gradient.
      resume: continue the run in `out`.
      seed: seed of parameters and row order.
      log_every: steps between log lines.
      evaluate_every: steps between measurements on held-out texts.
      evaluate_texts: number of held-out texts for these; at the end all of them are measured.
      checkpoint_every: steps between checkpoints.
    """

    target: str
    texts: pathlib.Path
    out: pathlib.Path
    held_out: pathlib.Path | None = None
    tokens: int = 1_000_000
    batch_tokens: int = 2048
    sequence_length: int = 512
    dtype: Literal["float32", "bfloat16"] = "float32"
    learning_rate: float = 1e-3
    warmup_fraction: float = 0.04
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    resume: bool = False
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 200
    evaluate_texts: int = 64
    checkpoint_every: int = 100

    def __post_init__(self):
        every = ("log_every", "evaluate_every", "evaluate_texts", "checkpoint_every")
        runs.check_positive(self, "tokens", most=LARGEST_NUMBER)
        runs.check_positive(self, "batch_tokens", "sequence_length", *every)
        runs.check_optimizer(self)
        if self.tokens < self.step_tokens:
            raise SettingError(
                f"{self.tokens} tokens are less than one step of {self.step_tokens}; raise tokens, "
                "or lower batch_tokens and sequence_length."
            )

    @property
    def num_rows(self) -> int:
        """Number of rows of a step."""
        return max(1, self.batch_tokens // self.sequence_length)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step with full rows."""
        return self.num_rows * self.sequence_length

    @property
    def num_steps(self) -> int:
        """Number of steps of the run."""
        return self.tokens // self.step_tokens


class Split(NamedTuple):
    """Texts of a run.

    Attributes:
      training: texts to train on.
      held_out: texts to measure on.
      num_skipped: number of texts that were too short for either.
    """

    training: list[Text]
    held_out: list[Text]
    num_skipped: int


def check_run(
    config: DrafterTrainConfig, written: Mapping[pathlib.Path, Callable[[pathlib.Path], bool]]
) -> None:
    """Raises `CheckpointError` if the run or its results could not be written.

    Args:
      config: the run.
      written: directories that the run writes at its end, each with whether an existing one may be
        replaced.
    """
    runs.check_out(config.out, resume=config.resume)
    for directory, may_replace in written.items():
        if directory.exists() and not may_replace(directory):
            raise CheckpointError(
                f"{directory} exists, and the trained drafter would be written there; name another "
                "directory or move it."
            )


def read_split(
    config: DrafterTrainConfig, digest: str, is_usable: Callable[[Text], bool], *, needs: str
) -> Split:
    """The texts of a run.

    Args:
      config: the run.
      digest: `weights_digest` of the target.
      is_usable: tells whether a text can be trained on.
      needs: what unusable texts lack, for the message.

    Raises:
      SettingError: the held-out texts begin documents that are trained on.
      ModelError: the texts were written by another target, or none is usable.
      CheckpointError: the texts cannot be read.
    """

    def usable(path: pathlib.Path) -> tuple[dict[str, Any], list[Text], int]:
        read = read_texts(path)
        check_writer(read, path, target=config.target, weights=digest)
        kept = [text for text in read.texts if is_usable(text)]
        if not kept:
            raise ModelError(
                f"None of the {len(read.texts)} texts in {path} has {needs}, within "
                f"sequence_length {config.sequence_length}; write longer texts, or raise it."
            )
        return read.header, kept, len(read.texts) - len(kept)

    _, training, num_skipped = usable(config.texts)
    if config.held_out is not None:
        header, held_out, num_short = usable(config.held_out)
        if header.get("split") == "train":
            raise SettingError(
                f"The texts in {config.held_out} begin documents to train on; write others by "
                "`jaxspec train texts --split held-out`."
            )
        return Split(training, held_out, num_skipped + num_short)
    held_out = training[::_HELD_OUT_EVERY]
    training = [text for place, text in enumerate(training) if place % _HELD_OUT_EVERY]
    if not training:
        raise ModelError(
            f"There is one text in {config.texts}, which leaves none to measure on; write more of "
            "them, or give held_out."
        )
    return Split(training, held_out, num_skipped)


def plan_rows(config: DrafterTrainConfig, texts: Sequence[Text], num_steps: int) -> list[list[int]]:
    """The texts, by index, of every row of this many steps: pass after pass over all of them. Plans
    for more steps begin with the same rows."""
    num_rows = num_steps * config.num_rows
    lengths = text_lengths(texts, config.sequence_length)
    rows: list[list[int]] = []
    num_passes = 0
    while len(rows) < num_rows:
        rng = np.random.default_rng((config.seed, num_passes))
        rows += fill_rows(lengths, config.sequence_length, rng)
        num_passes += 1
    return rows[:num_rows]


def text_lengths(texts: Iterable[Text], row_length: int) -> list[int]:
    """Number of tokens of each text, at most that of a row."""
    return [min(len(text.prompt) + len(text.output), row_length) for text in texts]


def fingerprint(
    config: DrafterTrainConfig, texts: Sequence[Text], *, free: Sequence[str] = (), **decisive: Any
) -> dict[str, Any]:
    """Everything that decides a run's result: its settings, its texts, and `decisive` values.

    Args:
      config: the run.
      texts: the texts that it is trained on.
      free: settings of this kind of run that do not affect the result.
      decisive: further JSON values that decide the result.
    """
    fields = dataclasses.asdict(config)
    kept = {name: fields[name] for name in fields if name not in (*_FREE_FIELDS, *free)}
    written = json.dumps([[text.prompt, text.output] for text in texts]).encode()
    kept |= {**decisive, "texts": xxhash.xxh3_128(written).hexdigest()}
    return json.loads(json.dumps(kept))
