"""What all runs that train drafters on their target's texts have in common."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jaxspec.checkpoint.format import weights_digest
from jaxspec.checkpoint.manifest import kind_of
from jaxspec.errors import ModelError, SettingError
from jaxspec.load.drafters import save_drafter
from jaxspec.load.models import load_model
from jaxspec.models.base import LanguageModel, packed_model
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.directories import check_can_write_into
from jaxspec.runtime.locks import only_writer
from jaxspec.training.schedule import Branch
from jaxspec.training.teacher_states import TextStates
from jaxspec.training.text_passes import TextPasses
from jaxspec.training.text_rows import TextBatch, fill_rows, pack_texts
from jaxspec.training.texts import (
    Text,
    Texts,
    check_to_train_on,
    check_writer,
    held_out_part,
    read_texts,
)
from jaxspec.training.trainer import NoOption, OnStep, Task, TrainSettings, train
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
      target_states: directory for the target's hidden states, in bfloat16, 2 E bytes per token of
        the texts: the target reads each text once, and not in every pass over the texts and every
        run, which is most of the training time of heads and a third of FlexDraft's.
    """

    FREE: ClassVar[tuple[str, ...]] = (
        *TrainSettings.FREE, "target", "texts", "held_out", "target_states"
    )  # fmt: skip

    target: str
    texts: pathlib.Path
    held_out: pathlib.Path | None = None
    dtype: NoOption[Literal["float32", "bfloat16"] | None] = None
    target_states: pathlib.Path | None = None

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
    kind. The loss gets the texts of a step, a `TextBatch`, unless `batch` is replaced. It has the
    target's hidden states if these are kept.

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
        self._states = None
        if settings.target_states is not None and self.num_read_layers:
            read = _first_layers(self.target, self.num_read_layers)
            self._states = TextStates(
                settings.target_states,
                width=self.target.config.width,
                num_layers=self.num_read_layers,
                target_weights=digest,
                dtype=self.target.dtype.name,
                compute=TextPasses(
                    packed_model(read),
                    lambda params, hidden, window: hidden,
                    longest=settings.sequence_length,
                    name="the target's hidden states",
                ),
            )
        self.fingerprint["target_states"] = None if self._states is None else "bfloat16"

    @classmethod
    def may_replace(cls, product: pathlib.Path) -> bool:
        """Whether it holds a drafter of the same kind."""
        return kind_of(product) == cls.PRODUCT

    def is_usable(self, text: Text) -> bool:
        """Whether a text can be trained on: a token of its output could be drafted, as two come
        before it, within a row."""
        return self.length_of(text) > max(len(text.prompt), 2)

    @property
    def num_read_layers(self) -> int:
        """The number of the target's layers after which the drafter reads its hidden states."""
        return self.target.config.num_layers

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
        """The texts of a step, with the target's hidden states if these are kept."""
        rows = [[self.split.training[text] for text in self._rows[n]] for n in self.places(index)]
        batch = pack_texts(rows, self.settings.sequence_length)
        if self._states is None:
            return batch
        return batch.replace(features=jnp.asarray(self._states(batch), self.target.dtype))

    def cast(self, params: PyTree) -> PyTree:
        """Parameters in the target's dtype."""
        return jax.tree.map(lambda leaf: leaf.astype(self.target.dtype), params)

    def _read_split(self, digest: str) -> Split:
        """The texts of a run on the target whose `weights_digest` this is.

        Raises:
          SettingError: the held-out texts begin documents that are trained on or are among the
            training texts, or these were written to measure on.
          ModelError: the texts were written by another target, or none is usable.
          CheckpointError: the texts cannot be read.
        """
        settings = self.settings

        def usable(path: pathlib.Path) -> tuple[Texts, list[Text], int]:
            read = read_texts(path)
            check_writer(read, path, target=settings.target, weights=digest)
            kept = [text for text in read.texts if self.is_usable(text)]
            if not kept:
                raise ModelError(
                    f"None of the {len(read.texts)} texts in {path} has enough tokens after its "
                    f"prompt within sequence_length {settings.sequence_length}; write longer "
                    "texts, or raise it."
                )
            return read, kept, len(read.texts) - len(kept)

        read, training, num_skipped = usable(settings.texts)
        check_to_train_on(read, settings.texts)
        if settings.held_out is not None:
            read, held_out, num_short = usable(settings.held_out)
            if read.header.get("split") == "train":
                raise SettingError(
                    f"The texts in {settings.held_out} begin documents to train on; write others "
                    "by `jaxspec train texts --split held-out`."
                )
            trained = {(*text.prompt, -1, *text.output) for text in training}
            if any((*text.prompt, -1, *text.output) in trained for text in held_out):
                raise SettingError(
                    f"Some of the texts in {settings.held_out} are in {settings.texts} too; give "
                    "texts that are not trained on, or leave held_out out."
                )
            return Split(training, held_out, num_skipped + num_short)
        return Split(*held_out_part(training, settings.texts), num_skipped)


def train_drafter(
    task: type[DrafterTask], config: DrafterTrainConfig, on_step: OnStep | None
) -> dict[str, Any]:
    """`trainer.train`, while no other process uses the directory of hidden states.

    Raises:
      SettingError: that directory cannot be written into, or another process uses it.
    """
    with contextlib.ExitStack() as stack:
        if (states := config.target_states) is not None:
            check_can_write_into(states)
            states.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(states.resolve()))
        return train(task, config, on_step=on_step)


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


def _first_layers(model: LanguageModel, number: int) -> LanguageModel:
    """The model without its later layers."""
    if number == model.config.num_layers:
        return model
    windows = model.config.sliding_windows[:number]
    config = dataclasses.replace(
        model.config, num_layers=number, sliding_windows=windows if any(windows) else ()
    )
    params = {**model.params, "layers": model.params["layers"][:number]}
    return dataclasses.replace(model, config=config, params=params)
