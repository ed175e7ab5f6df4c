"""What all runs that train drafters on their target's texts have in common."""

from __future__ import annotations

import abc
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
import xxhash

from jaxspec.checkpoint.format import weights_digest
from jaxspec.checkpoint.manifest import kind_of
from jaxspec.errors import ModelError, SettingError
from jaxspec.load.drafters import save_drafter
from jaxspec.load.models import load_model
from jaxspec.models.config import ModelConfig
from jaxspec.training.schedule import Branch
from jaxspec.training.text_rows import TextBatch, fill_rows, pack_texts
from jaxspec.training.texts import Text, check_writer, held_out_part, read_texts
from jaxspec.training.trainer import NoOption, Task, TrainSettings
from jaxspec.types import PyTree

NUM_EVALUATED = 64  # held-out texts that are measured during a run; at its end, all are


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterTrainConfig(TrainSettings, abc.ABC):
    """Settings of every run that trains a drafter on its target's texts.

    Attributes:
      target: the model that the drafter drafts for, as a name for `load_model`.
      texts: the file that `jaxspec train texts` had this target write.
      held_out: a file of texts written with `--split held-out`, to measure on; without it, every
        twentieth of `texts` is held out.
      dtype: the dtype in which target and drafter are computed; None is the target's own.
        Parameters and optimizer are float32.
    """

    FREE: ClassVar[tuple[str, ...]] = (*TrainSettings.FREE, "target", "texts", "held_out")

    target: str
    texts: pathlib.Path
    held_out: pathlib.Path | None = None
    dtype: NoOption[Literal["float32", "bfloat16"] | None] = None

    @abc.abstractmethod
    def drafter_config(self, target: ModelConfig) -> Any:
        """The drafter that these settings describe."""


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


class DrafterTask(Task):
    """A drafter that is trained on its target's texts, beside the frozen target. `PRODUCT` is its
    kind. The loss gets the texts of a step, a `TextBatch`, unless `batch` is replaced.

    Attributes:
      target: as it is loaded; `frozen` are its parameters.
      config: the drafter's.
      split: the texts.
    """

    settings: DrafterTrainConfig

    def __init__(self, settings: DrafterTrainConfig):
        super().__init__(settings)
        self.target = load_model(settings.target, dtype=settings.dtype)
        self.frozen = self.target.params
        self.config = settings.drafter_config(self.target.config)
        digest = weights_digest(self.frozen)
        self.split = self._read_split(digest)
        num_rows = settings.ends()[-1].num_steps * settings.num_rows
        self._rows = plan_rows(settings, self.split.training, num_rows)
        self.about = {self.PRODUCT: dataclasses.asdict(self.config)}
        written = json.dumps([[text.prompt, text.output] for text in self.split.training]).encode()
        self.fingerprint = settings.decisive() | {
            "dtype": self.target.dtype.name,
            "drafter": json.loads(json.dumps(dataclasses.asdict(self.config))),
            "target_weights": digest,
            "texts": xxhash.xxh3_128(written).hexdigest(),
        }

    @classmethod
    def may_replace(cls, product: pathlib.Path) -> bool:
        """Whether it holds a drafter of the same kind."""
        return kind_of(product) == cls.PRODUCT

    def is_usable(self, text: Text) -> bool:
        """Whether a text can be trained on: a token of its output could be drafted, as two come
        before it, within a row."""
        return self.length_of(text) > max(len(text.prompt), 2)

    @abc.abstractmethod
    def drafter(self, params: PyTree) -> Any:
        """The drafter with these parameters, in the target's dtype."""

    def measure(self, params: PyTree, texts: Sequence[Text]) -> dict[str, Any]:
        """Figures for the result, from texts, with parameters in the target's dtype."""
        return {}

    def export(self, params: PyTree, out: pathlib.Path) -> dict[str, Any]:
        """Writes the drafter, and measures it on all held-out texts."""
        params, product = self.cast(params), out / self.PRODUCT
        save_drafter(self.drafter(params), product, target=self.target, overwrite=True)
        return {
            "num_texts": len(self.split.training),
            "num_skipped_texts": self.split.num_skipped,
            **self.measure(params, self.split.held_out),
            self.PRODUCT: str(product),
        }

    def batch(self, index: int, end: Branch | None) -> Any:
        """The texts of a step."""
        return self.texts_of(index)

    def evaluate(self, params: PyTree) -> dict[str, float]:
        """No metrics."""
        return {}

    def length_of(self, text: Text) -> int:
        """Tokens of a text, at most those of a row."""
        return min(len(text.prompt) + len(text.output), self.settings.sequence_length)

    def places(self, index: int) -> range:
        """The rows of a step, by their number in the run."""
        num_rows = self.settings.num_rows
        return range(index * num_rows, (index + 1) * num_rows)

    def texts_of(self, index: int) -> TextBatch:
        """The texts of a step."""
        rows = [[self.split.training[text] for text in self._rows[n]] for n in self.places(index)]
        return pack_texts(rows, self.settings.sequence_length)

    def cast(self, params: PyTree) -> PyTree:
        """Parameters in the target's dtype."""
        return jax.tree.map(lambda leaf: leaf.astype(self.target.dtype), params)

    def _read_split(self, digest: str) -> Split:
        """The texts of a run on the target whose `weights_digest` this is.

        Raises:
          SettingError: the held-out texts begin documents that are trained on.
          ModelError: the texts were written by another target, or none is usable.
          CheckpointError: the texts cannot be read.
        """
        settings = self.settings

        def usable(path: pathlib.Path) -> tuple[dict[str, Any], list[Text], int]:
            read = read_texts(path)
            check_writer(read, path, target=settings.target, weights=digest)
            kept = [text for text in read.texts if self.is_usable(text)]
            if not kept:
                raise ModelError(
                    f"None of the {len(read.texts)} texts in {path} has enough tokens after its "
                    f"prompt within sequence_length {settings.sequence_length}; write longer "
                    "texts, or raise it."
                )
            return read.header, kept, len(read.texts) - len(kept)

        _, training, num_skipped = usable(settings.texts)
        if settings.held_out is not None:
            header, held_out, num_short = usable(settings.held_out)
            if header.get("split") == "train":
                raise SettingError(
                    f"The texts in {settings.held_out} begin documents to train on; write others "
                    "by `jaxspec train texts --split held-out`."
                )
            return Split(training, held_out, num_skipped + num_short)
        return Split(*held_out_part(training, settings.texts), num_skipped)


def plan_rows(
    settings: DrafterTrainConfig, texts: Sequence[Text], num_rows: int
) -> list[list[int]]:
    """The texts, by index, of so many rows: pass after pass over all of them. Plans for more rows
    begin with the same ones."""
    lengths = text_lengths(texts, settings.sequence_length)
    rows: list[list[int]] = []
    num_passes = 0
    while len(rows) < num_rows:
        rng = np.random.default_rng((settings.seed, num_passes))
        rows += fill_rows(lengths, settings.sequence_length, rng)
        num_passes += 1
    return rows[:num_rows]


def text_lengths(texts: Iterable[Text], row_length: int) -> list[int]:
    """Number of tokens of each text, at most that of a row."""
    return [min(len(text.prompt) + len(text.output), row_length) for text in texts]
