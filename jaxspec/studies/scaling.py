"""How acceptance grows with a drafter's training tokens and capacity, and what the batch changes.

    jaxspec study scaling --corpora corpora --texts texts.jsonl --out scaling

Draft models of several sizes are distilled from the target, each as one trunk with a branch per
number of tokens (`training.trunk`), all on the same rows of text; every branch decodes the same
prompts. What comes out is a row for every drafter, prompt, verifier and draft length, with counts
by position; `jaxspec.analysis.scaling` fits and judges them, these or rows of one's own. Every
result is a cell, written to the disk as soon as it is known, so an interrupted study goes on where
it stopped.

The sizes make a cross: all `layers` at the first of `widths`, and all `widths` at
`reference_layers`. The drafter in its middle, the reference, is also trained with every seed and
decoded at every batch size; the others with the first seed.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from rich.console import Console

from jaxspec import __version__
from jaxspec.analysis.scaling import analyse, print_report, read_rows, write_report
from jaxspec.analysis.scaling.batch import fit_pair, predict_times
from jaxspec.bench.cells import Cell, CellStore
from jaxspec.bench.decode import DecodeBench, DecodeOptions
from jaxspec.bench.measure import ROUND, Bench, Say, check_at_least_one, load_prompts, only_run_into
from jaxspec.bench.roofline import forward_pass, measure_ceilings
from jaxspec.bench.stages import block_read_by
from jaxspec.cache.pages import round_up_to_block
from jaxspec.checkpoint.format import weights_digest
from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.errors import ModelError, SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import encode_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.environment import provenance
from jaxspec.runtime.extras import import_extra
from jaxspec.training import data, lm, runs
from jaxspec.training.texts import check_writer, read_texts

if TYPE_CHECKING:
    import pandas

CELLS = "cells.json"  # in the output directory
FAMILY = "draft_model"
_STDLIB = ("code:stdlib",)  # where no corpora are given
_WRITTEN = "written"  # the domain of the target's own texts
_HELD_OUT_PROMPT_TOKENS = 32
_FEWEST_TIMES = 6  # for a cost model
_NUM_HELD_OUT_PROMPTS = 3  # of each domain
# Options that say which cells there are, or how well they are timed, and not what a cell holds.
_CHOOSE_CELLS = (
    "layers", "widths", "tokens", "first_seed_tokens", "other_tokens", "seeds", "batch_sizes",
    "time_draft_lengths", "repeats", "epochs", "rows", "times", "quick",
)  # fmt: skip
# Verifier and temperature; greedy decoding is the same under both verifiers.
_DECODINGS: tuple[tuple[Literal["coupled", "rejection"], float], ...] = (
    ("coupled", 0.0),
    ("coupled", 1.0),
    ("rejection", 1.0),
)


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
class PromptSet:
    """Prompts to decode.

    Attributes:
      name: of the set.
      domains: of each prompt.
      token_ids: of each.
    """

    name: str
    domains: Sequence[str]
    token_ids: Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingStudy(Bench):
    """Train drafters of several sizes on several numbers of tokens, and see how acceptance scales.

    Without --corpora they are trained on the source of the Python standard library.
    """

    NAME: ClassVar[str] = "scaling"
    MEASURES: ClassVar[tuple[str, ...]] = (
        *ROUND, "training/lm.py", "training/trunk.py", "training/runs.py", "training/data.py",
        "drafters/draft_model.py", "verifiers", "engine/engine.py", "studies/scaling.py",
    )  # fmt: skip

    target: str = "demo-target"
    """Any model with a tokenizer that `load_model` takes."""
    corpora: pathlib.Path | None = None
    """Directory of the domains' directories, each with JSONL files, `{"text": ...}` a line."""
    domains: tuple[str, ...] = ()
    """NAME[:SOURCE][=WEIGHT] each, as `jaxspec train lm` takes them; default every directory."""
    exclude: tuple[str, ...] = ()
    """Documents whose "source" contains one of these are left out."""
    texts: pathlib.Path | None = None
    """A file of texts that the target wrote (`jaxspec train texts`), to be trained on as well."""
    texts_share: float = 0.38
    """Their share of the training rows."""
    held_out: tuple[str, ...] = ()
    """Names of the domains to measure held-out losses on, and to take prompts from; default all but
    the target's own texts."""
    epochs: int = 1
    """Passes that a drafter may take over the text of a domain."""
    out: pathlib.Path = pathlib.Path("scaling")
    """Directory for the report, the rows, the cells and the trained drafters."""
    rows: pathlib.Path | None = None
    """Train nothing: fit these rows (parquet or JSON lines, as the study writes them)."""
    times: pathlib.Path | None = None
    """With --rows: seconds of rounds by batch size and draft length, as the study writes them."""
    resume: bool = False
    """Go on with what the output directory holds; more tokens, sizes and seeds may be added."""
    quick: bool = False
    """Three sizes and four numbers of tokens up to 250,000, one seed: minutes on a CPU."""
    layers: tuple[int, ...] = (1, 2, 3, 4, 6)
    """Numbers of layers, at the first of --widths."""
    widths: tuple[int, ...] = (128, 64, 192)
    """Widths, at --reference-layers; feed-forward layers are twice as wide."""
    reference_layers: int = 2
    """Layers of the drafter that is trained with every seed and decoded at every batch size."""
    tokens: tuple[int, ...] = (62_500, 125_000, 250_000, 500_000, 1_000_000, 2_000_000)
    """Training tokens of the reference drafter, in increasing order."""
    first_seed_tokens: tuple[int, ...] = ()
    """Further ones of the reference drafter, with the first seed only."""
    other_tokens: tuple[int, ...] = ()
    """Training tokens of the other drafters; default those of --tokens."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of weights and row order; drafters other than the reference have the first."""
    batch_tokens: int = 1024
    """Tokens of a training step."""
    sequence_length: int = 256
    """Tokens of a training row."""
    learning_rate: float = 3e-3
    """Of every trunk."""
    warmup_steps: int = 40
    """Of every trunk."""
    evaluate_tokens: int = 4096
    """Held-out tokens of each domain for losses and overlaps."""
    draft_lengths: tuple[int, ...] = (4, 8)
    """Tokens drafted per round."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Rows of a batch, for the reference drafter after the most tokens; the others are decoded in
    the largest."""
    time_draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    """Draft lengths whose rounds are timed at every batch size."""
    prompts: pathlib.Path | None = None
    """Prompt file; default the sample prompts."""
    limit: int | None = None
    """Its first so many prompts only."""
    max_prompt_tokens: int = 64
    """Longer prompts are cut to their first so many tokens."""
    max_tokens: int = 64
    """Tokens emitted per prompt; stop tokens are ignored."""
    repeats: int = 5
    """Timed runs of each stage of a round; medians count."""

    def run(self, console: Console) -> dict[str, Any]:
        """Trains and measures what is missing, writes rows and report; returns the document."""
        import_extra("pandas", "a scaling study")
        import_extra("pyarrow", "a scaling study")
        if self.rows is not None:
            return self._report(console, self.rows, self.times)
        options = self._made_quick() if self.quick else self
        options.check()
        started_s = time.perf_counter()
        with only_run_into(options.out):
            running = Running(options)
            running.measure(say=lambda text: console.print(text, highlight=False, markup=False))
            rows, times = running.write_rows()
            return options._report(
                console,
                rows,
                times,
                models=running.models,
                inputs=running.inputs,
                checks=running.checks(),
                holds=running.holds,
                elapsed_s=time.perf_counter() - started_s,
            )

    def check(self) -> None:
        """Raises `SettingError` for options that no study can be made of."""
        check_at_least_one(
            self, "layers", "widths", "tokens", "draft_lengths", "batch_sizes", "epochs",
            "time_draft_lengths", "max_tokens", "max_prompt_tokens", "repeats", "evaluate_tokens",
            "limit",
        )  # fmt: skip
        if self.reference_layers not in self.layers:
            raise SettingError(
                f"--reference-layers {self.reference_layers} is none of --layers "
                f"{' '.join(map(str, self.layers))}; name one of them."
            )
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise SettingError(
                f"--seeds {' '.join(map(str, self.seeds)) or 'nothing'} was given; give different "
                "numbers of at least 0."
            )
        if not 0 < self.texts_share < 1:
            raise SettingError(
                f"--texts-share {self.texts_share} was given; it must lie between 0 and 1."
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
        return Shape(num_layers=self.reference_layers, width=self.widths[0])

    def shapes(self) -> list[Shape]:
        """All sizes, the reference first."""
        deep = [Shape(num_layers=layers, width=self.widths[0]) for layers in self.layers]
        wide = [Shape(num_layers=self.reference_layers, width=width) for width in self.widths]
        return list(dict.fromkeys([self.reference, *deep, *wide]))

    def seeds_of(self, shape: Shape) -> tuple[int, ...]:
        """The seeds that a size is trained with."""
        return self.seeds if shape == self.reference else self.seeds[:1]

    def tokens_of(self, shape: Shape, seed: int) -> tuple[int, ...]:
        """The training tokens of a size with a seed."""
        if shape != self.reference:
            return self.other_tokens or self.tokens
        return (*self.tokens, *(self.first_seed_tokens if seed == self.seeds[0] else ()))

    def train_config(self, shape: Shape, seed: int) -> lm.TrainConfig:
        """The run that trains a size with a seed."""
        out = self.out / "trunks" / f"{shape.name}-seed{seed}"
        # Heads of 64, or of 32 where a width is no multiple of 64.
        head_size = 32 if shape.width % 64 else 64
        return lm.TrainConfig(
            out=out,
            corpora=self.corpora or self.out,
            domains=self._training_domains(),
            exclude=self.exclude,
            schedule="trunk",
            branches=self.tokens_of(shape, seed),
            batch_tokens=self.batch_tokens,
            sequence_length=self.sequence_length,
            max_length=max(1024, self.sequence_length),
            width=shape.width,
            feed_forward_width=2 * shape.width,
            num_layers=shape.num_layers,
            num_query_heads=shape.width // head_size,
            num_kv_heads=1,
            head_size=head_size,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            teacher=self.target,
            teacher_states=self.out / "teacher" / f"seed{seed}.f32",
            seed=seed,
            resume=(out / runs.CHECKPOINT).is_file(),
            log_every=100,
            evaluate_every=10**9,
            evaluate_tokens=self.evaluate_tokens,
            checkpoint_every=200,
        )

    @property
    def written(self) -> pathlib.Path:
        """The target's own texts, as documents to train on."""
        return self.out / "written.jsonl"

    def _training_domains(self) -> tuple[str, ...]:
        """All domains, in the form that training takes."""
        names = self.domains or (_STDLIB if self.corpora is None else ())
        if not names:
            found = data.discover_domains(self.corpora or self.out)
            names = tuple(f"{each.name}:{each.source}" for each in found)
        if self.texts is None:
            return names
        weight = sum(data.Domain.parse(name).weight for name in names)
        weight *= self.texts_share / (1 - self.texts_share)
        return (*names, f"{_WRITTEN}:{self.written.resolve()}={weight!r}")

    def held_out_domains(self) -> list[str]:
        """Names of the domains that are measured on."""
        names = [data.Domain.parse(text).name for text in self._training_domains()]
        if missing := set(self.held_out).difference(names):
            raise SettingError(
                f"--held-out names {' and '.join(sorted(missing))}, and the domains are "
                f"{', '.join(names)}; name some of these."
            )
        return list(self.held_out) or [name for name in names if name != _WRITTEN]

    def _made_quick(self) -> ScalingStudy:
        """What two cores measure in minutes."""
        return dataclasses.replace(
            self,
            layers=(1, 2, 4),
            widths=self.widths[:1],
            reference_layers=2,
            tokens=(31_250, 62_500, 125_000, 250_000),
            first_seed_tokens=(),
            other_tokens=(),
            batch_tokens=512,
            seeds=self.seeds[:1],
            draft_lengths=(4,),
            batch_sizes=(1, 4),
            time_draft_lengths=(1, 2, 4),
            limit=min(self.limit or 24, 24),
            max_tokens=min(self.max_tokens, 48),
            evaluate_tokens=min(self.evaluate_tokens, 2048),
            repeats=min(self.repeats, 3),
        )

    def _report(
        self, console: Console, rows: pathlib.Path, times: pathlib.Path | None, **fields: Any
    ) -> dict[str, Any]:
        """Fits the rows, writes the report and prints it; returns the document."""
        found = analyse(read_rows(rows), None if times is None else read_rows(times))
        document = self.document(**fields, **found) | {"command": "study scaling"}
        self.out.mkdir(parents=True, exist_ok=True)
        write_report(document, self.out)
        print_report(document, console)
        console.print(f"report written to {self.out}", markup=False, highlight=False)
        return document


class Running:
    """A study under way: its target and prompts, and the cells that are known.

    Raises:
      SettingError: the output directory holds a study that is not to be resumed, or another one.
    """

    def __init__(self, options: ScalingStudy):
        self.options = options
        path = options.out / CELLS
        CellStore(path, header={}, resume=options.resume)  # refuses before models are loaded
        self.target = load_model(options.target, dtype="float32")
        if self.target.tokenizer is None:
            raise ModelError(
                f"The target {options.target} has no tokenizer, and drafters are trained on its "
                "tokens; name a model with one."
            )
        self._write_texts()
        lines, inputs = load_prompts(options.prompts, options.limit)
        self.inputs = inputs
        self.models = {"target": weights_digest(self.target.params)}
        ids = encode_prompts(lines, self.target, max_prompt_tokens=options.max_prompt_tokens)
        domains = [str(line.fields.get("domain", "")) for line in lines]
        self.given = PromptSet(name="prompts", domains=domains, token_ids=ids)
        config = options.document()["config"]
        for name in _CHOOSE_CELLS:
            del config[name]
        header = {
            "config": config,
            "inputs": inputs,
            "models": self.models,
            "kernels": self.target.kernels,
        }
        self.store = CellStore(path, header=header, resume=options.resume)
        self._engines: dict[tuple[str, str], Engine] = {}

    def measure(self, *, say: Say) -> None:
        """Trains and measures what is missing."""
        self.store.run(self.cells(), say=say)

    def cells(self) -> dict[str, Callable[[], Cell]]:
        """What measures each cell, by name."""
        options = self.options
        found: dict[str, Callable[[], Cell]] = {}
        for shape in options.shapes():
            for seed in options.seeds_of(shape):
                for tokens in options.tokens_of(shape, seed):
                    name = f"{shape.name}-seed{seed}-{tokens}"
                    found[name] = functools.partial(self.measure_drafter, shape, seed, tokens)
        for batch_size in options.batch_sizes:
            found[f"batch-{batch_size}"] = functools.partial(self.measure_batch, batch_size)
        found["ceilings"] = self.measure_ceilings
        for batch_size, length in itertools.product(
            options.batch_sizes, (0, *options.time_draft_lengths)
        ):
            found[f"times-{batch_size}-{length}"] = functools.partial(
                self.measure_times, batch_size, length
            )
        return found

    # What cells are of.

    def trained(self, shape: Shape, seed: int, tokens: int) -> dict[str, Any]:
        """The result of a branch. If it is not there yet, all branches of its trunk are trained."""
        config = self.options.train_config(shape, seed)
        this = dataclasses.replace(config, branches=(tokens,))
        found = lm.finished_branches(this) or lm.train_lm(config)["branches"]
        return found[str(tokens)]

    def drafter(self, shape: Shape, seed: int, tokens: int) -> LanguageModel:
        """A finished drafter."""
        self.trained(shape, seed, tokens)
        out = self.options.train_config(shape, seed).out / "branches" / str(tokens)
        run = lm.load_run(out)
        return LanguageModel(
            name=f"{shape.name}, {tokens} tokens, seed {seed}",
            config=run.config,
            params=run.params,
            eos_token_ids=self.target.eos_token_ids,
            kernels=self.target.kernels,
        )

    @functools.cached_property
    def held_out(self) -> dict[str, np.ndarray]:
        """Held-out tokens of each domain that is measured on."""
        out = self.options.train_config(self.options.reference, self.options.seeds[0]).out
        return {
            name: np.asarray(data.map_tokens(out / "tokens" / f"{name}.held_out"))
            for name in self.options.held_out_domains()
        }

    @functools.cached_property
    def target_loss(self) -> float:
        """The target's held-out loss, where the drafters' is measured; mean over domains."""
        config, params = self.target.config, unpacked(self.target.params)
        length, count = self.options.sequence_length, self.options.evaluate_tokens
        losses = []
        for stream in self.held_out.values():
            windows = data.held_out_windows(stream, min(length, len(stream) - 1), count)
            losses.append(lm.held_out_loss(config, params, windows, self._end_of_text))
        return float(np.mean(losses))

    @property
    def _end_of_text(self) -> int:
        assert self.target.tokenizer is not None
        return data.end_of_text_id(self.target.tokenizer.hf.backend_tokenizer)

    @functools.cached_property
    def prompt_sets(self) -> list[PromptSet]:
        """The prompts that were given, and beginnings of held-out text."""
        domains, beginnings = [], []
        for name, stream in self.held_out.items():
            length = _HELD_OUT_PROMPT_TOKENS
            windows = data.held_out_windows(stream, length, 4 * length * _NUM_HELD_OUT_PROMPTS)
            whole = [row[:length].tolist() for row in windows if self._end_of_text not in row]
            beginnings += whole[:_NUM_HELD_OUT_PROMPTS]
            domains += [name] * len(whole[:_NUM_HELD_OUT_PROMPTS])
        held_out = PromptSet(name="held_out", domains=domains, token_ids=beginnings)
        return [self.given, held_out] if beginnings else [self.given]

    def engine(self, draft: LanguageModel, verifier: Any, batch_size: int) -> Engine:
        """An engine of this drafter's size, compiled once for all drafters of the size."""
        shape = f"{draft.config.num_layers}x{draft.config.width}, batch {batch_size}"
        if any(kept != shape for kept, _ in self._engines):
            self._engines.clear()  # sizes come one after the other
        if (shape, verifier) not in self._engines:
            longest = max(len(ids) for each in self.prompt_sets for ids in each.token_ids)
            length = max(self.options.draft_lengths)
            self._engines[shape, verifier] = Engine(
                self.target,
                DraftModel(draft),
                verifier=verifier,
                draft_length=length,
                batch_size=batch_size,
                max_length=round_up_to_block(longest + self.options.max_tokens + length + 1),
                prefill_chunk=min(128, longest),
            )
        engine = self._engines[shape, verifier]
        engine.update_params(draft=draft.params)
        return engine

    def params(self, prompts: PromptSet, temperature: float) -> list[SamplingParams]:
        """Of every prompt, the same for all drafters: a seed of its own, and no early end."""
        return [
            SamplingParams(
                max_tokens=self.options.max_tokens,
                temperature=temperature,
                seed=index,
                ignore_eos=True,
            )
            for index in range(len(prompts.token_ids))
        ]

    def plain_tokens(self, engine: Engine, prompts: PromptSet, temperature: float) -> list[Any]:
        """What the target writes without a drafter; the same whatever engine decodes it."""
        key = f"{prompts.name}, temperature {temperature}"
        if key not in self._plain:
            params = self.params(prompts, temperature)
            done = engine.generate(prompts.token_ids, params, speculate=False)
            self._plain[key] = [each.token_ids for each in done]
        return self._plain[key]

    @functools.cached_property
    def _plain(self) -> dict[str, list[Any]]:
        return {}

    # Cells.

    def measure_drafter(self, shape: Shape, seed: int, tokens: int) -> Cell:
        """What a drafter is, how near it is to the target, and its rows."""
        result = self.trained(shape, seed, tokens)
        draft = self.drafter(shape, seed, tokens)
        of_text = list(self.held_out)
        near = [result["acceptance"][name] for name in of_text]
        rows: list[dict[str, Any]] = []
        num_compared = num_equal = 0
        for (verifier, temperature), prompts in itertools.product(_DECODINGS, self.prompt_sets):
            engine = self.engine(draft, verifier, max(self.options.batch_sizes))
            for length in self.options.draft_lengths:
                done = engine.generate(
                    prompts.token_ids, self.params(prompts, temperature), draft_length=length
                )
                rows += _rows(done, prompts, verifier, temperature, length)
                if verifier == "coupled":
                    plain = self.plain_tokens(engine, prompts, temperature)
                    num_equal += sum(
                        one.token_ids == other for one, other in zip(done, plain, strict=True)
                    )
                    num_compared += len(plain)
        embedding = draft.config.vocab_size * draft.config.width
        num_params = decoder.num_params(draft.config)
        return {
            "drafter": {
                "target": self.options.document()["config"]["target"],
                "drafter": shape.name,
                "family": FAMILY,
                "num_params": num_params,
                "num_params_without_embedding": num_params - embedding,
                "num_layers": shape.num_layers,
                "width": shape.width,
                "training_tokens": result["tokens"],
                # Six per weight and token, the tied head's included; the teacher's are not counted.
                "training_flops": 6.0 * num_params * result["tokens"],
                "recipe": self.recipe,
                "seed": seed,
                "held_out_loss": float(np.mean([result["held_out_loss"][n] for n in of_text])),
                "target_loss": self.target_loss,
                "overlap": float(np.mean([each["sampled"] for each in near])),
                "greedy_agreement": float(np.mean([each["greedy"] for each in near])),
                "commit": str(provenance().get("commit", "")),
                "version": __version__,
            },
            "train_s": result["wall_s"],
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "num_compared_with_plain": num_compared,
            "num_equal_to_plain": num_equal,
            "rows": rows,
        }

    @property
    def recipe(self) -> str:
        """How the drafters were trained, in a line."""
        options = self.options
        return (
            f"distilled, trunk and branches, {options.batch_tokens} tokens a step in rows of "
            f"{options.sequence_length}, rate {options.learning_rate:g}"
        )

    def measure_batch(self, batch_size: int) -> Cell:
        """Tokens and counts of the reference drafter at a batch size, beside those of its row in
        the largest batch: a request's acceptance does not depend on the batch."""
        options = self.options
        seed = options.seeds[0]
        tokens = options.tokens_of(options.reference, seed)[-1]
        draft = self.drafter(options.reference, seed, tokens)
        known = self.store.cells[f"{options.reference.name}-seed{seed}-{tokens}"]["rows"]
        length = max(options.draft_lengths)
        num_equal = num_same_counts = num_compared = 0
        for temperature in (0.0, 1.0):
            engine = self.engine(draft, "coupled", batch_size)
            params = self.params(self.given, temperature)
            done = engine.generate(self.given.token_ids, params, draft_length=length)
            plain = self.plain_tokens(engine, self.given, temperature)
            num_compared += len(done)
            num_equal += sum(a.token_ids == b for a, b in zip(done, plain, strict=True))
            expected = [
                row
                for row in known
                if (row["verifier"], row["temperature"], row["draft_length"], row["prompt_set"])
                == ("coupled", temperature, length, self.given.name)
            ]
            found = _rows(done, self.given, "coupled", temperature, length)
            num_same_counts += sum(a == b for a, b in zip(found, expected, strict=True))
        return {
            "batch_size": batch_size,
            "num_compared": num_compared,
            "num_equal_to_plain": num_equal,
            "num_same_counts": num_same_counts,
        }

    def measure_times(self, batch_size: int, draft_length: int) -> Cell:
        """Seconds of a round and of its stages of the reference drafter, or at draft length 0 of a
        plain round of one token."""
        options = self.options
        seed = options.seeds[0]
        tokens = options.tokens_of(options.reference, seed)[-1]
        draft = self.drafter(options.reference, seed, tokens)
        bench = DecodeBench(
            options=DecodeOptions(
                batch_sizes=(batch_size,),
                draft_lengths=(max(options.time_draft_lengths),),
                max_tokens=options.max_tokens,
                repeats=options.repeats,
            ),
            target=self.target,
            drafter=DraftModel(draft),
            prompts=[tuple(ids) for ids in self.given.token_ids],
        )
        measured = bench.time_stages(bench.engine(batch_size, draft_length), draft_length)
        return {
            "batch": batch_size,
            "draft_length": draft_length,
            "context": bench.context,
            "round_s": measured["round_ms"] / 1e3,
            **{
                f"{name}_s": measured["stages_ms"][name] / 1e3
                for name in ("draft", "target", "verify")
            },
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }

    def measure_ceilings(self) -> Cell:
        """What the device does at best, at the size of the target's weights."""
        work = forward_pass(self.target, batch=1, window=1, context=1)
        return dataclasses.asdict(measure_ceilings(work.weight_bytes, self.target.dtype))

    # What comes out.

    def rows(self) -> pandas.DataFrame:
        """The rows of all drafters."""
        measured = [cell for cell in self.store.cells.values() if "rows" in cell]
        rows = [{**cell["drafter"], **row} for cell in measured for row in cell["rows"]]
        return import_extra("pandas", "a scaling study").DataFrame(rows)

    def times(self) -> pandas.DataFrame:
        """Seconds of rounds, and of a plain round at the same batch size; and what a cost model
        that is fitted to their stages says of them, where there are enough of them."""
        timed = [cell for name, cell in self.store.cells.items() if name.startswith("times-")]
        plain = {cell["batch"]: cell["round_s"] for cell in timed if not cell["draft_length"]}
        rows = [
            {"drafter": self.options.reference.name, **cell, "plain_s": plain[cell["batch"]]}
            for cell in timed
            if cell["draft_length"]
        ]
        times = import_extra("pandas", "a scaling study").DataFrame(rows)
        if len(times) < _FEWEST_TIMES:
            return times
        ceilings = self.store.cells["ceilings"]
        draft = self.options.train_config(self.options.reference, self.options.seeds[0])
        pair, _ = fit_pair(
            times,
            self.target.config,
            draft.model_config(self.target.vocab_size),
            most_bytes_per_s=ceilings["bytes_per_s"],
            most_flops_per_s=ceilings["matmul_flops_per_s"],
            block=block_read_by(self.target),
        )
        return predict_times(times, pair)

    def write_rows(self) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes rows and times; returns their files."""
        return (
            write_frame(self.rows(), self.options.out / "rows.parquet"),
            write_frame(self.times(), self.options.out / "times.parquet"),
        )

    def checks(self) -> dict[str, int]:
        """Outputs that were compared with plain decoding, over all drafters and batch sizes, and
        how many are equal; and how many of those by batch size took the same rounds."""
        drafters = [cell for cell in self.store.cells.values() if "rows" in cell]
        batches = [cell for cell in self.store.cells.values() if "num_same_counts" in cell]
        return {
            "num_compared_with_plain": sum(each["num_compared_with_plain"] for each in drafters),
            "num_equal_to_plain": sum(each["num_equal_to_plain"] for each in drafters),
            "num_compared_over_batches": sum(each["num_compared"] for each in batches),
            "num_equal_over_batches": sum(each["num_equal_to_plain"] for each in batches),
            "num_same_counts_over_batches": sum(each["num_same_counts"] for each in batches),
        }

    @property
    def holds(self) -> bool:
        """Whether every output is the target's own, where the kernels' bits do not depend on the
        width of a window; ties within rounding may change others."""
        found = self.checks()
        is_equal = (
            found["num_equal_to_plain"] == found["num_compared_with_plain"]
            and found["num_equal_over_batches"]
            == found["num_same_counts_over_batches"]
            == found["num_compared_over_batches"]
        )
        return is_equal or not self.target.is_width_invariant

    def _write_texts(self) -> None:
        """The target's own texts as documents of a domain."""
        path, tokenizer = self.options.texts, self.target.tokenizer
        if path is None or tokenizer is None:
            return
        found = read_texts(path)
        digest = weights_digest(load_model(self.options.target).params)
        check_writer(found, path, target=self.options.target, weights=digest)
        lines = [
            json.dumps(
                {"source": each.source, "text": tokenizer.decode([*each.prompt, *each.output])}
            )
            for each in found.texts
        ]
        write_atomically(self.options.written, "\n".join([*lines, ""]).encode())


def write_frame(rows: pandas.DataFrame, path: pathlib.Path) -> pathlib.Path:
    """Writes a table as Parquet, whole or not at all; returns its path."""
    content = io.BytesIO()
    rows.to_parquet(content, index=False)
    write_atomically(path, content.getvalue())
    return path


def _rows(
    completions: Sequence[Completion],
    prompts: PromptSet,
    verifier: str,
    temperature: float,
    draft_length: int,
) -> list[dict[str, Any]]:
    """A row for every prompt, without what is its drafter's."""
    rows = []
    for index, (done, domain) in enumerate(zip(completions, prompts.domains, strict=True)):
        counts = done.acceptance
        offered = counts.num_drafts_per_pos[:draft_length]
        rows.append(
            {
                "prompt_set": prompts.name,
                "domain": domain,
                "prompt": index,
                "verifier": verifier,
                "temperature": temperature,
                "draft_length": draft_length,
                "rounds": counts.num_rounds,
                "emitted": counts.num_emitted_tokens,
                "offered_at": list(offered),
                "accepted_at": list(counts.num_accepted_tokens_per_pos[:draft_length]),
                # Stop tokens are ignored, so only the end of the row cuts a draft short.
                "num_limited_rounds": int(offered[-1] < counts.num_rounds),
            }
        )
    return rows
