"""The settings of a run, and which of them decide its result."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

from jaxspec.errors import SettingError
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.runtime.options import LARGEST_NUMBER
from jaxspec.training import runs, trunk

# Settings that do not change what is trained, so a run may be resumed with others.
_FREE_FIELDS = (
    "out",
    "corpora",
    "teacher",
    "tokenizer",
    "resume",
    "epochs",
    "log_every",
    "evaluate_every",
    "evaluate_tokens",
    "checkpoint_every",
)
# Those that a cosine run does not have, and those that a trunk is not made of: where it ends, and
# what only a run with a known end has.
_OF_TRUNK = ("schedule", "branches", "warmup_steps", "teacher_states")
_FREE_OF_TRUNK = ("branches", "teacher_states", "tokens", "long_fraction", "warmup_fraction")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of `jaxspec train lm`.

    Attributes:
      out: directory of the run, for checkpoint, tokens, log and, at the end, `model/`, the Hugging
        Face checkpoint.
      corpora: directory with one directory per domain, each with JSONL files of lines `{"text":
        ...}`.
      domains: NAME[:SOURCE][=WEIGHT] each; SOURCE is a directory or JSONL file within `corpora`, or
        `stdlib` for the Python standard library's source. By default every directory is a domain.
      exclude: documents whose "source" contains one of these are left out.
      schedule: `cosine` has one end; `trunk` keeps a constant learning rate, and ends in
        `branches`.
      branches: for a trunk, the number of tokens of each model, decay included, in increasing
        order; a finished run may be resumed with further ones.
      tokens: total number of training tokens; for cosine runs only.
      batch_tokens: tokens per step.
      sequence_length: tokens per row.
      max_length: the model's context, and the row length of the last `long_fraction` of the tokens.
      long_fraction: fraction of the tokens in rows of `max_length`; for cosine runs only, because
        all rows of a trunk and its branches have `sequence_length` tokens.
      vocab_size: number of entries of the tokenizer; ignored if a tokenizer is given or taken from
        a teacher.
      tokenizer: a directory with a `tokenizer.json` to use instead of training one.
      width: E.
      feed_forward_width: F.
      num_layers: L.
      num_query_heads: Q.
      num_kv_heads: K.
      head_size: H.
      epochs: most passes of a trunk over the text of a domain; None sets no limit.
      learning_rate: the peak, reached after `warmup_fraction` of the steps; then a cosine decays it
        to a tenth.
      warmup_fraction: fraction of the steps used for warm-up; for cosine runs only.
      warmup_steps: warm-up steps of a trunk.
      weight_decay: weight decay of matrices.
      clip_norm: largest global norm of the gradient.
      teacher: model to distil from, as a name for `load_model` or an earlier run's directory; its
        tokenizer is used.
      total_variation_weight: with a teacher, weight in the loss of 1 - sum(min(p, q)), which is one
        minus the acceptance rate; the rest is KL(p || q).
      teacher_states: file for the teacher's hidden states by row, shared by trunks with the same
        teacher, texts and seed: the teacher takes two thirds of the training time of a small draft
        model.
      resume: continue the run in `out`.
      seed: seed of weights and row order.
      log_every: steps between log lines.
      evaluate_every: steps between held-out losses.
      evaluate_tokens: held-out tokens per domain.
      checkpoint_every: steps between checkpoints.
    """

    out: pathlib.Path
    corpora: pathlib.Path
    domains: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    schedule: Literal["cosine", "trunk"] = "cosine"
    branches: tuple[int, ...] = ()
    tokens: int = 6_500_000
    batch_tokens: int = 2048
    sequence_length: int = 256
    max_length: int = 1024
    long_fraction: float = 0.12
    vocab_size: int = 4096
    tokenizer: pathlib.Path | None = None
    width: int = 256
    feed_forward_width: int = 640
    num_layers: int = 8
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    epochs: int | None = None
    learning_rate: float = 2.5e-3
    warmup_fraction: float = 0.04
    warmup_steps: int = 40
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    teacher: str | None = None
    total_variation_weight: float = 0.5
    teacher_states: pathlib.Path | None = None
    resume: bool = False
    seed: int = 0
    log_every: int = 20
    evaluate_every: int = 250
    evaluate_tokens: int = 16_384
    checkpoint_every: int = 100

    def __post_init__(self):
        runs.check_positive(self, "tokens", most=LARGEST_NUMBER)
        positive = ("batch_tokens", "sequence_length", "max_length", "vocab_size")
        every = ("log_every", "evaluate_every", "evaluate_tokens", "checkpoint_every")
        runs.check_positive(self, *positive, *every, "epochs")
        runs.check_optimizer(self)
        self.model_config(self.vocab_size)  # raises for sizes that make no model
        if self.sequence_length > self.max_length:
            raise SettingError(
                f"sequence_length {self.sequence_length} exceeds max_length {self.max_length}; "
                "lower the first or raise the second."
            )
        for name in ("long_fraction", "total_variation_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"{name} is {getattr(self, name)}; it must lie in [0, 1].")
        trunk.check_schedule(self.schedule, self.branches)
        if self.teacher_states is not None and (self.teacher is None or not self.branches):
            raise SettingError(
                "teacher_states was given without a teacher and a trunk; leave it out, or give "
                "both."
            )
        self.planned_branches()  # raises now, before a corpus is read

    @property
    def num_rows(self) -> int:
        """B, the number of rows of a step if they have `sequence_length` tokens."""
        return max(1, self.batch_tokens // self.sequence_length)

    def planned_branches(self) -> list[trunk.Branch]:
        """The branches, in steps."""
        return trunk.plan_branches(
            self.branches,
            step_tokens=self.num_rows * self.sequence_length,
            warmup_steps=self.warmup_steps,
        )

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The Qwen3 architecture that these settings describe."""
        return ModelConfig(
            family="qwen3",
            vocab_size=vocab_size,
            width=self.width,
            feed_forward_width=self.feed_forward_width,
            num_layers=self.num_layers,
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            max_length=self.max_length,
            norm_epsilon=1e-6,
            rope=RopeConfig(theta=1e4, rotary_size=self.head_size),
            has_qk_norm=True,
            is_tied=True,
        )


def decisive_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide a run's result, as JSON values."""
    fields = dataclasses.asdict(config)
    free = (*_FREE_FIELDS, *(_FREE_OF_TRUNK if config.branches else _OF_TRUNK))
    kept = {name: value for name, value in fields.items() if name not in free}
    return kept | {"domains": list(config.domains), "exclude": list(config.exclude)}
