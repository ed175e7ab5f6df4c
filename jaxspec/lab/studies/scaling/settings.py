"""The settings of a study: which drafters there are, and how each is trained."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import ClassVar, Self

from jaxspec.errors import SettingError
from jaxspec.lab.bench.measure import Bench
from jaxspec.runtime.directories import check_can_write_into
from jaxspec.training import data, lm
from jaxspec.training.checkpoints import latest_step
from jaxspec.training.trainer import NoOption

_WRITTEN = "written"  # the domain of the target's own texts beside documents
_STDLIB = ("code:stdlib",)  # where no corpora are given
_TEXTS_SHARE = 0.38  # of the training rows, where the target's own texts are given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a drafter."""

    num_layers: int
    width: int

    @property
    def name(self) -> str:
        """E.g. `2x128`: layers and width."""
        return f"{self.num_layers}x{self.width}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingSettings(Bench):
    """What a study is made of."""

    COMMAND: ClassVar[str] = "study"
    NAME: ClassVar[str] = "scaling"

    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("seeds", "warmup_steps")

    target: str = "demo-target"
    """Any model with a tokenizer that `load_model` takes."""
    corpora: pathlib.Path | None = None
    """Directory of the domains' directories, each with JSONL files, `{"text": ...}` a line; or a
    file of texts that the target wrote (`jaxspec train texts`), to be trained on alone."""
    domains: tuple[str, ...] = ()
    """NAME[:SOURCE][=WEIGHT] each, as `jaxspec train lm` takes them; default every directory."""
    texts: pathlib.Path | None = None
    """A file of texts that the target wrote (`jaxspec train texts`), to be trained on as well."""
    prompts: pathlib.Path | None = None
    """Prompt file; default the sample prompts."""
    chat: bool = False
    """Take each text prompt as a user's message, and apply the chat template."""
    out: pathlib.Path = pathlib.Path("scaling")
    """Directory for the report, the rows, the cells and the trained drafters."""
    rows: pathlib.Path | None = None
    """Train nothing: fit these rows (parquet or JSON lines, as the study writes them), and the
    times in a file times.parquet beside them if there is one."""
    resume: bool = False
    """Go on with what the output directory holds; more tokens, sizes and seeds may be added."""
    quick: bool = False
    """Three sizes and four numbers of tokens up to 250,000, one seed: minutes on a CPU."""
    layers: tuple[int, ...] = (2, 1, 3, 4, 6)
    """Numbers of layers, at the first of --widths. The drafter of the first of both is the
    reference, which is trained with every seed and decoded at every batch size."""
    widths: tuple[int, ...] = (128, 64, 192)
    """Widths, at the first of --layers; feed-forward layers are twice as wide."""
    tokens: tuple[int, ...] = (62_500, 125_000, 250_000, 500_000, 1_000_000, 2_000_000)
    """Training tokens of each drafter, in increasing order."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Training seeds (weights and row order). Only the reference drafter is trained with all of
    them."""

    # In Python only.
    draft_lengths: NoOption[tuple[int, ...]] = (4, 8)
    """Tokens drafted per round."""
    exclude: NoOption[tuple[str, ...]] = ()
    """Documents whose "source" contains one of these are left out."""
    held_out: NoOption[tuple[str, ...]] = ()
    """Names of the domains to measure held-out losses on, and to take prompts from; default all but
    the target's own texts."""
    first_seed_tokens: NoOption[tuple[int, ...]] = ()
    """More token counts for the reference drafter, trained with the first seed only."""
    other_tokens: NoOption[tuple[int, ...]] = ()
    """Training tokens of the other drafters; default those of `tokens`."""
    epochs: NoOption[int] = 1
    """Passes that a drafter may take over the text of a domain."""
    batch_tokens: NoOption[int] = 1024
    """Tokens of a training step."""
    sequence_length: NoOption[int] = 256
    """Tokens of a training row."""
    learning_rate: NoOption[float] = 3e-3
    """Learning rate of each training run."""
    warmup_steps: NoOption[int] = 40
    """Warm-up steps of each training run."""
    evaluate_tokens: NoOption[int] = 4096
    """Held-out tokens of each domain for losses and overlaps."""
    batch_sizes: NoOption[tuple[int, ...]] = (1, 2, 4, 8, 16)
    """Batch sizes for the fully trained reference drafter; all other drafters use the largest."""
    time_draft_lengths: NoOption[tuple[int, ...]] = (1, 2, 3, 4, 6, 8)
    """Draft lengths whose rounds are timed at every batch size."""
    limit: NoOption[int | None] = None
    """Use only the first N prompts."""
    max_prompt_tokens: NoOption[int | None] = None
    """Truncate prompts to this many tokens, default 64; with `chat`, leave longer ones out, default
    128."""
    max_tokens: NoOption[int] = 64
    """Tokens emitted per prompt; stop tokens are ignored."""
    repeats: NoOption[int] = 5
    """Timed runs of each stage of a round; the median is reported."""

    def check_out(self) -> None:
        """Raises `SettingError` if the report cannot be written."""
        check_can_write_into(self.out)

    def check(self) -> None:
        """Raises `SettingError` for options that no study can be made of."""
        super().check()
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise SettingError(
                f"--seeds {' '.join(map(str, self.seeds)) or 'nothing'} was given; give different "
                "numbers of at least 0."
            )
        if any(width % 32 for width in self.widths):
            raise SettingError(
                f"--widths {' '.join(map(str, self.widths))} was given; give multiples of 32."
            )
        for shape in self.shapes():
            self.train_config(shape, self.seeds[0])  # raises now what training would
        self.held_out_domains()

    @property
    def reference(self) -> Shape:
        """The drafter in the middle of the cross."""
        return Shape(num_layers=self.layers[0], width=self.widths[0])

    def shapes(self) -> list[Shape]:
        """All sizes, the reference first."""
        deep = [Shape(num_layers=layers, width=self.widths[0]) for layers in self.layers]
        wide = [Shape(num_layers=self.layers[0], width=width) for width in self.widths]
        return list(dict.fromkeys([*deep, *wide]))

    def seeds_of(self, shape: Shape) -> tuple[int, ...]:
        """The seeds that a size is trained with."""
        return self.seeds if shape == self.reference else self.seeds[:1]

    def tokens_of(self, shape: Shape, seed: int) -> tuple[int, ...]:
        """The training tokens of a size with a seed."""
        if shape != self.reference:
            return self.other_tokens or self.tokens
        return (*self.tokens, *(self.first_seed_tokens if seed == self.seeds[0] else ()))

    @property
    def longest_trained(self) -> tuple[Shape, int, int]:
        """Size, seed and training tokens of the reference drafter after the most tokens."""
        return self.reference, self.seeds[0], self.tokens_of(self.reference, self.seeds[0])[-1]

    def train_config(self, shape: Shape, seed: int) -> lm.TrainConfig:
        """The run that trains a size with a seed."""
        out = self.out / "trunks" / f"{shape.name}-seed{seed}"
        # Heads of 64, or of 32 where a width is no multiple of 64.
        head_size = 32 if shape.width % 64 else 64
        teacher_file = "tops" if self.are_corpora_written else f"seed{seed}.f32"
        return lm.TrainConfig(
            out=out,
            corpora=self.corpora or self.out,
            domains=self.training_domains(),
            exclude=self.exclude,
            tokens=self.tokens_of(shape, seed),
            batch_tokens=self.batch_tokens,
            sequence_length=self.sequence_length,
            max_length=max(1024, self.sequence_length),
            long_fraction=0.0,
            width=shape.width,
            feed_forward_width=2 * shape.width,
            num_layers=shape.num_layers,
            num_query_heads=shape.width // head_size,
            num_kv_heads=1,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            teacher=self.target,
            teacher_states=self.out / "teacher" / teacher_file,
            seed=seed,
            resume=latest_step(out) is not None,
            evaluate_tokens=self.evaluate_tokens,
            checkpoint_every=500,
        )

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt has at most."""
        return self.max_prompt_tokens or (128 if self.chat else 64)

    @property
    def are_corpora_written(self) -> bool:
        """Whether the corpora are a file of texts that the target wrote."""
        return self.corpora is not None and self.corpora.is_file()

    @property
    def written(self) -> pathlib.Path:
        """The target's own texts, as documents to train on."""
        return self.out / "written.jsonl"

    def training_domains(self) -> tuple[str, ...]:
        """All domains, in the form that training takes; none where the target wrote all texts."""
        if self.are_corpora_written:
            if self.texts is not None:
                raise SettingError(
                    f"--texts {self.texts} was given, and the --corpora {self.corpora} are texts "
                    "already; leave one of them out."
                )
            return self.domains
        names = self.domains or (_STDLIB if self.corpora is None else ())
        if not names:
            found = data.discover_domains(self.corpora or self.out)
            names = tuple(f"{each.name}:{each.source}" for each in found)
        if self.texts is None:
            return names
        weight = sum(data.Domain.parse(name).weight for name in names)
        weight *= _TEXTS_SHARE / (1 - _TEXTS_SHARE)
        return (*names, f"{_WRITTEN}:{self.written.resolve()}={weight!r}")

    def held_out_domains(self) -> list[str]:
        """Names of the domains that are measured on."""
        names = [data.Domain.parse(text).name for text in self.training_domains()]
        if self.are_corpora_written:
            names = [data.TEXTS]
        if missing := set(self.held_out).difference(names):
            raise SettingError(
                f"held_out names {' and '.join(sorted(missing))}, and the domains are "
                f"{', '.join(names)}; name some of these."
            )
        return list(self.held_out) or [name for name in names if name != _WRITTEN]

    def made_quick(self) -> Self:
        """What two cores measure in minutes."""
        return dataclasses.replace(
            self,
            layers=(2, 1, 4),
            widths=self.widths[:1],
            tokens=(31_250, 62_500, 125_000, 250_000),
            first_seed_tokens=(),
            other_tokens=(),
            batch_tokens=512,
            seeds=self.seeds[:1],
            draft_lengths=(4,),
            batch_sizes=(1, 4),
            time_draft_lengths=(1, 2, 4),
            limit=24,
            max_tokens=48,
            evaluate_tokens=2048,
            repeats=3,
        )
