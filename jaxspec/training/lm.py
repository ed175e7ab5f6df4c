"""Training of a small language model from text, and distillation of a draft model from it:
`jaxspec train lm`.

Most tokens are in short rows, which cost less, and the last `long_fraction` of them in rows of the
full context.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from jaxspec.checkpoint.format import weights_digest
from jaxspec.errors import ModelError, SettingError
from jaxspec.kernels.registry import default_kernels
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel, packed_model
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.directories import write_atomically
from jaxspec.training import checkpoints, data, export
from jaxspec.training.lm_runs import TOKENIZER, Run, load_teacher, read_tokenizer
from jaxspec.training.schedule import DECAY_SHARE, Branch
from jaxspec.training.teacher_states import HiddenStates
from jaxspec.training.teacher_tops import teacher_tops
from jaxspec.training.texts import (
    Text,
    check_to_train_on,
    check_writer,
    held_out_part,
    read_texts,
)
from jaxspec.training.trainer import (
    NoOption,
    OnStep,
    Task,
    Tokens,
    TrainSettings,
    check_positive,
    make_optimizer,
    train,
    weighted_mean,
)
from jaxspec.types import PyTree

_TOPS = "teacher.tops"  # in a run's directory
_WEIGHT_DECAY = 0.1
_LEAST = 1e-7  # probability of all tokens outside of a draft vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainSettings):
    """Settings of `jaxspec train lm`.

    Attributes:
      out: directory of the run, for checkpoints, tokens, log and, at the end, `model/`, the Hugging
        Face checkpoint.
      corpora: directory with one directory per domain, each with JSONL files of lines `{"text":
        ...}`; with a teacher also a file that `jaxspec train texts` had it write.
      domains: NAME[:SOURCE][=WEIGHT] each; SOURCE is a directory or JSONL file within `corpora`, or
        `stdlib` for the Python standard library's source. By default every directory is a domain.
      exclude: documents whose "source" contains one of these are left out.
      max_length: the model's context.
      long_fraction: fraction of the tokens, the last ones, in rows as long as `max_length` and a
        step allow; at most the sixth over which the learning rate falls.
      vocab_size: number of entries of the tokenizer; ignored if it is taken from a teacher.
      draft_vocab_size: draft only so many tokens, the most frequent in the texts, so that embedding
        and head are smaller; None for all of the teacher's. Needs a teacher.
      width: E.
      feed_forward_width: F.
      num_layers: L.
      num_query_heads: Q; None gives every head 64 channels.
      num_kv_heads: K; None is half of Q, or 1 if Q is odd.
      epochs: most passes over the text of a domain; None sets no limit.
      teacher: model to distil from, as a name for `load_model` or an earlier run's directory; its
        tokenizer is used. The loss is half KL(p || q) and half one minus the acceptance rate; in
        texts that it wrote, p is known of its likeliest tokens.
      teacher_states: file for the teacher's hidden states by row, shared by runs with the same
        teacher, documents and seed: the teacher takes two thirds of the training time of a small
        draft model. Of texts that the teacher wrote, its likeliest tokens are kept in it, which are
        in `out` otherwise.
      evaluate_tokens: held-out tokens per domain.
    """

    FREE: ClassVar[tuple[str, ...]] = (
        *TrainSettings.FREE,
        "corpora",
        "teacher",
        "teacher_states",
        "epochs",
        "evaluate_tokens",
    )

    corpora: pathlib.Path
    domains: tuple[str, ...] = ()
    exclude: NoOption[tuple[str, ...]] = ()
    tokens: Tokens = 6_500_000
    sequence_length: int = 256
    max_length: int = 1024
    long_fraction: NoOption[float] = 0.12
    vocab_size: int = 4096
    draft_vocab_size: int | None = None
    width: int = 256
    feed_forward_width: int = 640
    num_layers: int = 8
    num_query_heads: NoOption[int | None] = None
    num_kv_heads: NoOption[int | None] = None
    epochs: NoOption[int | None] = None
    learning_rate: float = 2.5e-3
    teacher: str | None = None
    teacher_states: NoOption[pathlib.Path | None] = None
    evaluate_tokens: NoOption[int] = 16_384

    def __post_init__(self):
        check_positive(self, "max_length", "vocab_size", "evaluate_tokens", "epochs")
        check_positive(self, "num_query_heads", "num_kv_heads", "draft_vocab_size")
        super().__post_init__()
        self.model_config(self.vocab_size)  # raises for sizes that make no model
        if self.sequence_length > self.max_length:
            raise SettingError(
                f"sequence_length {self.sequence_length} exceeds max_length {self.max_length}; "
                "lower the first or raise the second."
            )
        if not 0 <= self.long_fraction <= DECAY_SHARE:
            raise SettingError(f"long_fraction is {self.long_fraction}; it must lie in [0, 1/6].")
        for name in ("teacher_states", "draft_vocab_size"):
            if getattr(self, name) is not None and self.teacher is None:
                raise SettingError(
                    f"{name} was given without a teacher; leave it out, or give one."
                )

    @property
    def long_rows(self) -> int:
        """How many times `sequence_length` a long row has: the most that the context holds and a
        step consists of."""
        most = min(self.num_rows, self.max_length // self.sequence_length)
        return max(times for times in range(1, most + 1) if self.num_rows % times == 0)

    def num_long_steps(self, end: Branch) -> int:
        """How many of the last steps before an end have long rows."""
        return round(self.long_fraction * end.num_steps)

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The Qwen3 architecture that these settings describe."""
        num_heads = self.num_query_heads or max(1, self.width // 64)
        if self.width % num_heads:
            raise SettingError(
                f"width {self.width} was given for {num_heads} heads; give a multiple of the "
                "number of heads, or of 64."
            )
        head_size = self.width // num_heads
        return ModelConfig(
            family="qwen3",
            vocab_size=vocab_size,
            width=self.width,
            feed_forward_width=self.feed_forward_width,
            num_layers=self.num_layers,
            num_query_heads=num_heads,
            num_kv_heads=self.num_kv_heads or (1 if num_heads % 2 else num_heads // 2),
            head_size=head_size,
            max_length=self.max_length,
            norm_epsilon=1e-6,
            rope=RopeConfig(theta=1e4, rotary_size=head_size),
            has_qk_norm=True,
            is_tied=True,
        )


def train_lm(config: TrainConfig, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """Trains a model as `config` says and writes it to `config.out / "model"`.

    See `trainer.train`. A result also has `held_out_loss` per domain (nats per token), `model` (the
    Hugging Face directory) and, with a teacher, `acceptance` per domain, see `measure_acceptance`.
    """
    return train(LmTask, config, on_step=on_step)


# Losses


class TopRows(NamedTuple):
    """A teacher's likeliest next tokens after each token: their rows in the draft's embedding and
    their log-probabilities, `[B, T, n]`; -inf for tokens that have no row of their own."""

    rows: jax.Array
    log_probs: jax.Array


class LmBatch(NamedTuple):
    """The rows of a step. Of a teacher its last hidden states `[B, T, E]` for them; or, where it
    wrote the text, its likeliest tokens."""

    rows: data.Batch
    teacher_hidden: np.ndarray | None = None
    teacher_tops: TopRows | None = None


@dataclasses.dataclass(frozen=True)
class LmLoss:
    """The loss of a batch: cross entropy of the labels, or distance to the teacher, whose
    parameters are `frozen`; computed in `dtype`, the teacher's."""

    model: ModelConfig
    teacher: ModelConfig | None
    dtype: str = "float32"

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: LmBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and the metrics `loss` and, with a teacher, `acceptance`."""
        model, rows = _over_rows(self.model, batch.rows)
        params = jax.tree.map(lambda leaf: leaf.astype(self.dtype), params)
        logits = decoder.training_logits(model, params, rows.inputs, rows.segments)
        if batch.teacher_tops is not None:
            loss, acceptance = top_distillation_loss(logits, batch.teacher_tops, rows.weights)
            return loss, {"loss": loss, "acceptance": acceptance}
        if self.teacher is None:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows.labels)
            loss = weighted_mean(losses, rows.weights)
            return loss, {"loss": loss}
        hidden = jnp.asarray(batch.teacher_hidden, self.dtype)
        theirs = decoder.head(self.teacher, frozen, hidden)
        ids = self.model.draft_vocabulary
        loss, acceptance = distillation_loss(logits, theirs, rows.weights, ids)
        return loss, {"loss": loss, "acceptance": acceptance}


def distillation_loss(
    logits: jax.Array, teacher_logits: jax.Array, weights: jax.Array, ids: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """Loss against the teacher's distribution p and the acceptance rate, both means over `weights`
    `[B, T]`.

    The loss is half KL(p || q) and half the total variation distance, which is one minus the
    acceptance rate sum(min(p, q)) of rejection sampling (2211.17192, corollary 3.6; DistillSpec,
    2310.08461). Where `logits` are of a draft vocabulary, its `ids` and then all other tokens
    together, both distributions are over these; the others are never accepted.
    """
    log_p = jax.nn.log_softmax(teacher_logits)
    if ids:
        log_p = log_p[..., jnp.array(ids)]
        others = jnp.maximum(1 - jnp.sum(jnp.exp(log_p), axis=-1, keepdims=True), _LEAST)
        log_p = jnp.concatenate([log_p, jnp.log(others)], axis=-1)
    log_q = jax.nn.log_softmax(logits)
    p = jnp.exp(log_p)
    divergence = weighted_mean(jnp.sum(p * (log_p - log_q), axis=-1), weights)
    shared = jnp.minimum(p, jnp.exp(log_q))[..., : len(ids) or None]
    acceptance = weighted_mean(jnp.sum(shared, axis=-1), weights)
    return (divergence + 1 - acceptance) / 2, acceptance


def top_distillation_loss(
    logits: jax.Array, tops: TopRows, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`distillation_loss` for a teacher of whose distribution the likeliest tokens are known: both
    distributions are over these and all other tokens together, and only these are accepted."""
    log_q = jnp.take_along_axis(jax.nn.log_softmax(logits), tops.rows, axis=-1)
    p, q = jnp.exp(tops.log_probs), jnp.where(jnp.isfinite(tops.log_probs), jnp.exp(log_q), 0.0)
    other_p, other_q = (jnp.maximum(1 - jnp.sum(x, axis=-1), _LEAST) for x in (p, q))
    ratios = jnp.where(p > 0, tops.log_probs - log_q, 0.0)
    divergence = jnp.sum(p * ratios, axis=-1) + other_p * (jnp.log(other_p) - jnp.log(other_q))
    acceptance = weighted_mean(jnp.sum(jnp.minimum(p, q), axis=-1), weights)
    return (weighted_mean(divergence, weights) + 1 - acceptance) / 2, acceptance


def held_out_loss(
    model: ModelConfig, params: PyTree, windows: np.ndarray, end_of_text: int
) -> float:
    """Mean loss in nats per token over windows `[num_rows, T + 1]`; NaN without any. To a draft
    vocabulary, all other tokens are one."""
    sums = functools.partial(_LOSS_SUMS, model, params)
    loss, weight = data.add_up(sums, windows, end_of_text, 2)
    return loss / weight if weight else math.nan


def measure_acceptance(
    target: tuple[ModelConfig, PyTree],
    draft: tuple[ModelConfig, PyTree],
    windows: np.ndarray,
    end_of_text: int,
) -> dict[str, float]:
    """How well a draft model matches a target with the same vocabulary, per predicted token of
    held-out text.

    The context of each position is the text itself, not what the target would have written, so the
    rates differ somewhat from those of a decode.

    Args:
      target: configuration and parameters.
      draft: likewise.
      windows: `[num_rows, T + 1]` tokens.
      end_of_text: id of the token that separates documents.

    Returns:
      `sampled`, the mean of sum(min(p, q)) at temperature 1, which is the probability that
      rejection sampling accepts a drafted token (2211.17192, corollary 3.6); `greedy`, the fraction
      of positions where both have the same most likely token; and `num_tokens`.
    """
    sums = functools.partial(_ACCEPTANCE_SUMS, target[0], draft[0], target[1], draft[1])
    sampled, greedy, num_tokens = data.add_up(sums, windows, end_of_text, 3)
    count = max(num_tokens, 1.0)
    return {"sampled": sampled / count, "greedy": greedy / count, "num_tokens": int(num_tokens)}


def _over_rows(model: ModelConfig, batch: data.Batch) -> tuple[ModelConfig, data.Batch]:
    """Model and batch over the rows of the embedding, where these are fewer than the tokens."""
    if not model.draft_vocabulary:
        return model, batch
    inputs, labels = (decoder.rows_of(model, ids) for ids in (batch.inputs, batch.labels))
    return model.over_rows(), batch.replace(inputs=inputs, labels=labels)


@functools.partial(jax.jit, static_argnums=0)
def _loss_sums(model: ModelConfig, params: PyTree, batch: data.Batch) -> tuple[jax.Array, ...]:
    model, batch = _over_rows(model, batch)
    logits = decoder.training_logits(model, params, batch.inputs, batch.segments)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.sum(losses * batch.weights), jnp.sum(batch.weights)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _acceptance_sums(target_config, draft_config, target_params, draft_params, batch):
    target = decoder.training_logits(target_config, target_params, batch.inputs, batch.segments)
    draft = decoder.training_logits(draft_config, draft_params, batch.inputs, batch.segments)
    kept = jnp.sum(jnp.minimum(jax.nn.softmax(target), jax.nn.softmax(draft)), axis=-1)
    agrees = jnp.argmax(target, axis=-1) == jnp.argmax(draft, axis=-1)
    weights = batch.weights
    return jnp.sum(kept * weights), jnp.sum(jnp.where(agrees, weights, 0.0)), jnp.sum(weights)


@functools.partial(jax.jit, static_argnums=0)
def _last_hidden(teacher: ModelConfig, params: PyTree, batch: data.Batch) -> jax.Array:
    last = (teacher.num_layers,)
    features = decoder.training_features(teacher, params, batch.inputs, batch.segments, last)
    return features[:, :, 0]


_LOSS_SUMS = Program(_loss_sums, "the held-out loss", shapes_vary=True)
_ACCEPTANCE_SUMS = Program(_acceptance_sums, "the measuring of acceptance", shapes_vary=True)
_LAST_HIDDEN = Program(_last_hidden, "the teacher's hidden states", shapes_vary=True)


# The task


class LmTask(Task):
    """A small language model, its texts and perhaps its teacher."""

    PRODUCT = "model"
    settings: TrainConfig

    def __init__(self, settings: TrainConfig):
        super().__init__(settings)
        teacher = self._teacher = _read_teacher(settings)
        corpus = self._corpus = _read_corpus(settings, teacher)
        self._end_of_text = data.end_of_text_id(corpus.tokenizer)
        # A teacher's vocabulary may be padded beyond its tokenizer's.
        self._model = settings.model_config(
            corpus.tokenizer.get_vocab_size() if teacher is None else teacher.config.vocab_size
        )
        if settings.draft_vocab_size is not None:
            size = self._model.vocab_size
            if settings.draft_vocab_size > size:
                raise SettingError(
                    f"draft_vocab_size is {settings.draft_vocab_size}, and the vocabulary has "
                    f"{size} tokens; lower it, or leave it out."
                )
            ids = data.most_frequent(corpus.streams, size, settings.draft_vocab_size)
            self._model = dataclasses.replace(self._model, draft_vocabulary=ids)
        self.loss = LmLoss(self._model, None)
        if teacher is not None:
            dtype = jnp.dtype(teacher.params["embedding"].dtype).name
            self.loss = LmLoss(self._model, teacher.config, dtype)
        self.frozen = () if teacher is None or corpus.written else teacher.params
        self.optimizer = make_optimizer(weight_decay=_WEIGHT_DECAY)
        self.about = {"model": self._model.to_json()}
        self.fingerprint = settings.decisive() | {
            "token_checksums": [zlib.crc32(np.ascontiguousarray(s).data) for s in corpus.streams],
            "teacher_checksum": None if teacher is None else checkpoints.checksum(teacher.params),
            "num_query_heads": self._model.num_query_heads,
            "num_kv_heads": self._model.num_kv_heads,
        }
        ends = settings.ends()
        self._plan = self._plan_rows(ends[-1].num_steps, times=1, seed=(settings.seed,))
        self._check_epochs()
        num_long = settings.num_long_steps(ends[-1])
        times = settings.long_rows if num_long else 1
        self._long_plan = self._plan_rows(num_long, times=times, seed=(settings.seed, 1))
        self._states = self._kept_states() or self._hidden
        self._tops = _teacher_tops(settings, teacher, corpus.written) if corpus.written else None

    @classmethod
    def may_replace(cls, product: pathlib.Path) -> bool:
        """Whether it is a Hugging Face checkpoint."""
        return export.is_hugging_face(product)

    def init_params(self, key: jax.Array, frozen: PyTree) -> PyTree:
        """A random model."""
        return decoder.init_params(self._model, key, jnp.float32)

    def batch(self, index: int, end: Branch | None) -> LmBatch:
        """The rows of a step, which are long in the last steps before an end."""
        first_long = math.inf if end is None else end.num_steps - self.settings.num_long_steps(end)
        is_short = index < first_long
        plan, step = (self._plan, index) if is_short else (self._long_plan, int(index - first_long))
        rows = self._rows(plan, step)
        if self._tops is not None:
            return LmBatch(rows, teacher_tops=self._top_rows(data.cut(plan, [self._tops], step)))
        if self._teacher is None:
            return LmBatch(rows)
        return LmBatch(rows, self._states(index) if is_short else self._hidden_of(rows))

    def evaluate(self, params: PyTree) -> dict[str, float]:
        """The held-out losses."""
        losses = self._held_out_losses(params, self.settings.sequence_length)
        return {f"held_out/{name}": loss for name, loss in losses.items()}

    def export(self, params: PyTree, out: pathlib.Path) -> dict[str, Any]:
        """Writes the Hugging Face checkpoint, and measures it on held-out texts."""
        tokenizer = self._corpus.tokenizer
        write_atomically(out / TOKENIZER, tokenizer.to_str(pretty=True).encode())
        export.write_hugging_face(out / self.PRODUCT, self._model, params, tokenizer)
        settings = self.settings
        length = settings.max_length if settings.long_fraction else settings.sequence_length
        figures: dict[str, Any] = {
            "held_out_loss": self._held_out_losses(params, length),
            "model": str(out / self.PRODUCT),
        }
        if self._teacher is not None:
            pair = (self._teacher.config, self._teacher.params), (self._model, params)
            figures["acceptance"] = {
                name: measure_acceptance(*pair, windows, self._end_of_text)
                for name, windows in self._windows(length)
            }
        return figures

    def _kept_states(self) -> HiddenStates | None:
        """The teacher's hidden states of documents, if they are kept in a file."""
        settings, teacher = self.settings, self._teacher
        if settings.teacher_states is None or teacher is None or self._corpus.written:
            return None
        decisive = ("seed", "domains", "sequence_length", "token_checksums", "teacher_checksum")
        return HiddenStates(
            settings.teacher_states,
            shape=(settings.num_rows, settings.sequence_length, teacher.config.width),
            origin={name: self.fingerprint[name] for name in decisive},
            compute=self._hidden,
        )

    def _plan_rows(self, num_steps: int, *, times: int, seed: tuple[int, ...]) -> data.Plan:
        """Rows of so many times `sequence_length`."""
        return data.plan_rows(
            [len(stream) for stream in self._corpus.streams],
            [domain.weight for domain in self._corpus.domains],
            num_steps=num_steps,
            num_rows=self.settings.num_rows // times,
            length=self.settings.sequence_length * times,
            seed=seed,
        )

    def _check_epochs(self) -> None:
        """Raises `SettingError` if a domain has too little text."""
        if (epochs := self.settings.epochs) is None:
            return
        corpus = self._corpus
        for index, (domain, stream) in enumerate(zip(corpus.domains, corpus.streams, strict=True)):
            needed = self._plan.length * int(np.sum(self._plan.stream == index))
            if needed > epochs * len(stream):
                raise SettingError(
                    f"A run of {self.settings.ends()[-1].tokens} tokens takes {needed} of the "
                    f"domain {domain.name}, which has {len(stream)}; give it more text or a lower "
                    f"weight, or set epochs to {-(-needed // len(stream))} to let it be read so "
                    "often."
                )

    def _rows(self, plan: data.Plan, index: int) -> data.Batch:
        return data.pack(data.cut(plan, self._corpus.streams, index), self._end_of_text)

    def _top_rows(self, tops: np.ndarray) -> TopRows:
        """`RECORD`s `[B, T + 1]` of a step, of which the last of a row is not needed."""
        rows, log_probs = tops["tokens"][:, :-1], tops["log_probs"][:, :-1].astype(np.float32)
        if ids := self._model.draft_vocabulary:
            rows = np.take(self._model.rows_of_tokens(), rows)
            log_probs = np.where(rows < len(ids), log_probs, -np.inf)
        return TopRows(jnp.asarray(rows), jnp.asarray(log_probs))

    def _hidden(self, index: int) -> np.ndarray:
        """The teacher's last hidden states `[B, T, E]` of a step's short rows."""
        return self._hidden_of(self._rows(self._plan, index))

    def _hidden_of(self, rows: data.Batch) -> np.ndarray:
        assert self._teacher is not None
        return np.asarray(_LAST_HIDDEN(self._teacher.config, self._teacher.params, rows))

    def _windows(self, length: int) -> Iterator[tuple[str, np.ndarray]]:
        """Held-out windows of every domain."""
        for domain, stream in zip(self._corpus.domains, self._corpus.held_out, strict=True):
            most, count = min(length, len(stream) - 1), self.settings.evaluate_tokens
            yield domain.name, data.held_out_windows(stream, most, count)

    def _held_out_losses(self, params: PyTree, length: int) -> dict[str, float]:
        return {
            name: held_out_loss(self._model, params, windows, self._end_of_text)
            for name, windows in self._windows(length)
        }


class Corpus(NamedTuple):
    """What is trained on and measured on.

    Attributes:
      tokenizer: of all texts.
      domains: where they come from.
      streams: training tokens of each domain.
      held_out: held-out tokens of each domain.
      written: the training texts one by one, if the teacher wrote them.
    """

    tokenizer: tokenizers.Tokenizer
    domains: Sequence[data.Domain]
    streams: Sequence[np.ndarray]
    held_out: Sequence[np.ndarray]
    written: Sequence[np.ndarray] = ()


def _read_teacher(settings: TrainConfig) -> Run | None:
    """The teacher, if there is one."""
    if settings.teacher is None:
        return None
    teacher = load_teacher(settings.teacher)
    if teacher.config.draft_vocabulary:
        raise ModelError(
            f"The teacher {settings.teacher} is itself a draft model of "
            f"{len(teacher.config.draft_vocabulary)} tokens; name the model that it drafts for."
        )
    return teacher


def _read_corpus(settings: TrainConfig, teacher: Run | None) -> Corpus:
    """Texts that the teacher wrote, or documents."""
    if settings.corpora.is_file():
        return _read_written(settings, teacher)
    return _read_documents(settings, None if teacher is None else teacher.tokenizer)


def _read_documents(settings: TrainConfig, tokenizer: tokenizers.Tokenizer | None) -> Corpus:
    """The documents of the domains; without a teacher's tokenizer, one is trained."""
    domains = data.domains_of(settings.domains, settings.corpora)
    out = settings.out
    splits = [data.read_documents(each, settings.corpora, settings.exclude) for each in domains]
    texts = [[[text for _, text in part] for part in split] for split in splits]
    out.mkdir(parents=True, exist_ok=True)
    saved = out / TOKENIZER
    if settings.resume and saved.is_file():
        of_run = read_tokenizer(saved)
        if tokenizer is not None and tokenizer.to_str() != of_run.to_str():
            raise SettingError(
                f"{out} was begun with another tokenizer than that of the teacher "
                f"{settings.teacher}; resume it with the teacher that it was begun with, or "
                "without one if there was none."
            )
        tokenizer = of_run
    if tokenizer is None:
        to_train = itertools.chain.from_iterable(train for train, _ in texts)
        tokenizer = data.train_tokenizer(to_train, settings.vocab_size)
    write_atomically(saved, tokenizer.to_str(pretty=True).encode())
    streams, held_out = [], []
    for domain, (train_texts, held_out_texts) in zip(domains, texts, strict=True):
        path = out / "tokens" / f"{domain.name}.train"
        streams.append(data.write_tokens(path, train_texts, tokenizer))
        path = path.with_name(f"{domain.name}.held_out")
        held_out.append(data.write_tokens(path, held_out_texts, tokenizer))
    return Corpus(tokenizer, domains, streams, held_out)


def _read_written(settings: TrainConfig, teacher: Run | None) -> Corpus:
    """The texts that the teacher wrote."""
    path = settings.corpora
    if teacher is None or settings.domains or settings.exclude:
        given = "without the teacher that wrote them" if teacher is None else "with domains"
        raise SettingError(
            f"The file of texts {path} was given {given}; give --teacher and no domains, or a "
            "directory of documents as corpora."
        )
    texts = read_texts(path)
    digest = weights_digest(teacher.params)
    check_writer(texts, path, target=str(settings.teacher), weights=digest)
    check_to_train_on(texts, path)
    end = data.end_of_text_id(teacher.tokenizer)
    training, held_out = held_out_part(texts.texts, path)
    streams = [_ended(text, end) for text in training]
    return Corpus(
        tokenizer=teacher.tokenizer,
        domains=[data.Domain(name=data.TEXTS, source=path.name)],
        streams=[np.concatenate(streams)],
        held_out=[held_out_stream(held_out, end)],
        written=streams,
    )


def held_out_stream(texts: Sequence[Text], end_of_text: int) -> np.ndarray:
    """Texts one after the other, in which only what the teacher wrote is measured: neither prompts
    nor the ends of texts that were cut off at their longest length."""
    return np.concatenate([_ended(text, end_of_text, mark=int(data.GIVEN)) for text in texts])


def _ended(text: Text, end_of_text: int, mark: int = 0) -> np.ndarray:
    """A text's tokens, with an end-of-text token at the end; `mark` is added to tokens that the
    teacher did not write."""
    ids = [*(token + mark for token in text.prompt), *text.output]
    is_ended = text.output[-1:] == [end_of_text]
    return np.array(ids if is_ended else [*ids, end_of_text + mark], np.uint32)


def _teacher_tops(
    settings: TrainConfig, teacher: Run | None, texts: Sequence[np.ndarray]
) -> np.ndarray:
    """The teacher's likeliest tokens after each token of the texts, in a file."""
    assert teacher is not None
    model = LanguageModel(
        name=str(settings.teacher),
        config=teacher.config,
        params=teacher.params,
        kernels=default_kernels(),
    )
    path = settings.teacher_states or settings.out / _TOPS
    path.parent.mkdir(parents=True, exist_ok=True)
    return teacher_tops(path, packed_model(model), texts)
