"""`jaxspec bench`: speed, comparisons, distance from the hardware's limits, and predictions.

A new bench is one line in `BenchCommand.bench`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax
import tyro
from rich.console import Console

from jaxspec.commands.options import DrafterOptions
from jaxspec.commands.progress import working
from jaxspec.decode.settings import check_draft_length
from jaxspec.errors import SettingError
from jaxspec.lab.bench.compile_time import CompileTimeBench, compile_times
from jaxspec.lab.bench.decode import DecodeBench, DecodeOptions
from jaxspec.lab.bench.flexdraft import FlexDraftBench
from jaxspec.lab.bench.gpu_grid import DRY_RUN, GPU, measure_grid, plot_grid
from jaxspec.lab.bench.heads import HeadsBench
from jaxspec.lab.bench.hf import HuggingFace, compare, exported
from jaxspec.lab.bench.kernels import KernelsBench
from jaxspec.lab.bench.kv import KvBench
from jaxspec.lab.bench.measure import (
    Bench,
    only_run_into,
    random_prompts,
)
from jaxspec.lab.bench.memory import MemoryBench
from jaxspec.lab.bench.plots import plot_decode
from jaxspec.lab.bench.prefill import PrefillBench
from jaxspec.lab.bench.program import ProgramBench
from jaxspec.lab.bench.sessions import SessionsBench
from jaxspec.lab.bench.step_cost import StepCostBench
from jaxspec.lab.bench.trace_cost import TraceCostBench
from jaxspec.lab.bench.trees import TreesBench
from jaxspec.lab.bench.verifiers import VerifiersBench
from jaxspec.lab.cost import model as cost
from jaxspec.lab.studies.confusion import ConfusionBench
from jaxspec.lab.studies.rounds import SchedulersBench
from jaxspec.load.models import DEMO_MODELS, load_model
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import PRESETS
from jaxspec.requests.prompts import encode_prompts, load_prompts
from jaxspec.runtime.options import check_between
from jaxspec.runtime.report import Columns, TextTable, save_figure

RANDOM = "random:"  # prefix of the name of a preset with random weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCommand(DecodeOptions):
    """Compare plain and speculative decoding: tokens per second, stages of a round, fraction of the
    roofline."""

    against: Literal["hf"] | None = None
    """Also run `transformers` on the same models and prompts, in alternation (extra `parity`)."""
    plot: pathlib.Path | None = None
    """Image file to write (extra `analysis`)."""

    def run(self, console: Console) -> dict[str, Any]:
        """Measures, writes the files, prints the tables; returns the JSON document."""
        document = super().run(console)
        if self.plot is not None:
            save_figure(plot_decode(document), self.plot)
        return document

    def measure(self) -> dict[str, Any]:
        """Everything that `DecodeBench` measures, and compile times."""
        draft = self._draft()
        options = DrafterOptions(draft=draft, drafter=self.drafter)
        make_drafter = options.choose_drafter(dtype=self.dtype)
        assert make_drafter is not None
        lines, inputs = load_prompts(self.prompts, self.limit)
        with working("") as status:
            status.update("loading the models")
            target = load_model(self.target, dtype=self.dtype)
            if target.tokenizer is None and self.prompts is None:
                drawn, inputs = random_prompts(target, self.limit, self.max_prompt_tokens), {}
                prompts = [tuple(prompt) for prompt in drawn]
            else:
                prompts = encode_prompts(lines, target, max_prompt_tokens=self.max_prompt_tokens)
            bench = DecodeBench(
                options=self,
                target=target,
                drafter=make_drafter(target),
                prompts=prompts,
                say=status.update,
            )
            if self.oracle is not None:
                status.update("decoding plainly, for the oracle")
                bench = bench.with_oracle(self.oracle)
            against = [] if self.against is None else compare(bench, self._load_hf(bench))
            results = bench.run()
            status.update("measuring compile times in another process")
            results["compile"] = compile_times(
                self._engine_options(draft, bench), batch_size=max(self.batch_sizes)
            )
        results["holds"] &= all(pair["num_not_ties"] == 0 for pair in against)
        return {**results, "against": against, "inputs": inputs}

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """Speed, automatic draft lengths, stages, and `transformers`."""
        runs = [run | {"draft": run["draft_length"] or "plain"} for run in document["runs"]]
        return [
            grouped("speed, prefill included", RUNS, runs),
            grouped("draft length auto", ADAPTIVE, document["adaptive"]),
            grouped("ms per round", STAGES_OF_RUNS, runs),
            *(
                [grouped("against transformers, in turns", AGAINST, document["against"], by="hf")]
                if document["against"]
                else []
            ),
        ]

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """How to read the tables, and whether outputs equal plain decoding's."""
        ceilings, fits = document["ceilings"]["target"], document["cost_model"]["fits"]
        errors = "; ".join(
            f"{name} {fit['held_out_error_median']:.0%} and {fit['held_out_error_worst']:.0%}"
            for name, fit in fits.items()
        )
        sentences = [
            "Speed-ups are over window-1 plain decoding, medians over turns; those of rounds leave "
            "out prefill and rows that wait for others.",
            f"Roofline: {ceilings['bytes_per_s'] / 1e9:.0f} GB/s and "
            f"{ceilings['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s, both measured here.",
            f"Cost model, relative error on held-out passes, median and worst: {errors}; on whole "
            "rounds, none of which was fitted: {median:.0%} and {worst:.0%}.".format_map(
                document["round_error"]
            ),
            "Compiling at batch {batch_size}: {cold_s:.1f} s, from the persistent cache "
            "{persistent_s:.1f} s.".format_map(document["compile"]),
        ]
        memory = document["runs"][-1]["memory"]
        if memory["bytes"] is not None:
            sentences.append(
                f"Memory of the last run: {memory['bytes'] / 2**20:.0f} MiB ({memory['source']})."
            )
        if any(run["is_synthetic"] for run in document["runs"]):
            sentences.append(
                "The drafts are synthetic: an oracle makes them, at a draft model's cost."
            )
        found = [(sentence, "dim") for sentence in sentences]
        if not document["holds"]:
            found.append(("Some outputs differ from plain decoding's: this is a bug.", "bold red"))
        return found

    def _draft(self) -> str | None:
        if self.draft is None and self.drafter is None and self.target == "demo-target":
            return "demo-draft"
        return self.draft

    def check(self) -> None:
        """Raises `SettingError` for options that nothing can be measured with."""
        super().check()
        draft = self._draft()
        if draft is None and self.drafter in (None, "none"):
            raise SettingError(
                "No drafter was given, so there is nothing to compare; add --draft MODEL or "
                "--drafter ngram."
            )
        check_draft_length(max(self.draft_lengths), None)
        if self.oracle is not None and draft is None:
            raise SettingError(
                "--oracle was given without a draft model to take its cost from; add --draft MODEL."
            )
        if self.against == "hf":
            for name in filter(None, (self.target, draft if self.oracle is None else None)):
                is_directory = (pathlib.Path(name) / "config.json").is_file()
                if not is_directory and not _is_exported(name):
                    raise SettingError(
                        f"--against hf was given with the model {name}, which is no Hugging Face "
                        "directory, not of the embedded pair and not random:PRESET; name "
                        "directories with a config.json, so that both sides read the same weights."
                    )
            if self.temperature:
                raise SettingError(
                    f"--against hf was given at temperature {self.temperature:g}, where both sides "
                    "draw with their own random numbers; leave the temperature out."
                )

    def _load_hf(self, bench: DecodeBench) -> HuggingFace:
        """The same weights in `transformers`; without the draft model if an oracle drafts."""
        draft = self._draft() if self.oracle is None else None
        with contextlib.ExitStack() as directories:

            def source(name: str, part: str) -> str:
                if not _is_exported(name):
                    return name
                return directories.enter_context(exported(bench.models[part]))

            return HuggingFace.load(
                source(self.target, "target"), draft and source(draft, "draft"), dtype=self.dtype
            )

    def _engine_options(self, draft: str | None, bench: DecodeBench) -> list[str]:
        """Options of `jaxspec generate` that make the last of the speculative engines."""
        drafter = ["--draft", draft] if draft else ["--drafter", str(self.drafter)]
        options = ["--target", self.target, *drafter, "--verifier", self.verifier]
        options += ["--draft-length", str(max(self.draft_lengths))]
        return [*options, "--max-length", str(bench.max_length), "--dtype", self.dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictCommand(Bench):
    """Predict a pair's best draft length and speed-up by batch size, with a cost model."""

    NAME: ClassVar[str] = "predict"

    target: str
    """A preset such as `qwen3-8b`, or any model that `load_model` takes."""
    draft: str
    """Its draft model, named in the same way."""
    device: str = "h200"
    """`a100`, `h100`, `h200`, `l40s`, `l4` or `titan-rtx` (datasheet values: inferred, not
    measured), or a JSON document of `jaxspec bench decode --json`, which has fitted constants."""
    batch: str = "1..64"
    """Batch sizes: `1..64` for powers of two from 1 to 64, or a list such as `1,8,32`."""
    context: int = 1024
    """Tokens in the cache per row."""
    acceptance: tuple[float, ...] = (0.6, 0.7, 0.8)
    """Probabilities that a drafted token is accepted; each applies to all positions."""
    per_position: tuple[float, ...] = ()
    """Instead of --acceptance: measured probabilities that at least 1, 2, ... drafted tokens are
    accepted."""
    bytes_per_value: int = 2
    """Bytes per parameter, and per number in the KV cache."""

    def measure(self) -> dict[str, Any]:
        """A prediction per batch size and acceptance."""
        batches = parse_batches(self.batch)
        find_devices = cost.read_device(self.device)
        target, draft = (model_config(name) for name in (self.target, self.draft))
        target_device, draft_device, block = find_devices(target, draft)
        pair = cost.Pair(
            target=target,
            target_device=target_device,
            draft=draft,
            draft_device=draft_device,
            itemsize=self.bytes_per_value,
            block=block,
        )
        best = None
        if self.device in cost.DEVICES:
            peak = cost.ceiling(cost.DEVICES[self.device])
            best = dataclasses.replace(pair, target_device=peak, draft_device=peak)
        return {
            "target_device": target_device.to_json(),
            "draft_device": draft_device.to_json(),
            "predictions": [
                self._predict(pair, best, batch, acceptance)
                for batch in batches
                for acceptance in (self.acceptance if not self.per_position else (None,))
            ],
        }

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """Expected rates, one line per batch size and acceptance."""
        return [grouped("predicted", PREDICTIONS, document["predictions"])]

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Where the constants come from."""
        return [("{name}: {source}.".format_map(document["target_device"]), "dim")]

    def check(self) -> None:
        """Raises `SettingError` for options that nothing can be predicted for."""
        super().check()
        if not all(0 <= value < 1 for value in (*self.acceptance, *self.per_position)):
            raise SettingError(
                "Acceptances were given outside of [0, 1); they are probabilities, and a drafter "
                "that is always right has no best draft length."
            )
        if list(self.per_position) != sorted(self.per_position, reverse=True):
            raise SettingError(
                "--per-position was given rising values; they are cumulative (the probability that "
                "at least this many tokens are accepted), so each is at most the one before."
            )

    def _predict(
        self, pair: cost.Pair, peak: cost.Pair | None, batch: int, acceptance: float | None
    ) -> dict[str, Any]:
        """One line: best draft length by search and by the closed form, at one acceptance."""
        chances = self.per_position if acceptance is None else acceptance
        where = {"batch": batch, "context": self.context}
        length, gain = pair.best_draft_length(**where, acceptance=chances)
        most = peak and peak.best_draft_length(**where, acceptance=chances)[1]
        plain_s, ratio = pair.plain_s(**where), pair.cost_ratio(**where)
        return {
            "batch_size": batch,
            "acceptance": acceptance,
            "plain_ms": 1e3 * plain_s,
            "plain_tokens_per_s": batch / plain_s,
            "draft_step_ms": 1e3 * pair.draft_step_s(**where),
            "draft_length": length,
            "tokens_per_s": gain * batch / plain_s,
            "speedup": gain,
            "ceiling_speedup": most,
            "closed_form_draft_length": (
                None if acceptance is None else cost.closed_form_draft_length(acceptance, ratio)
            ),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuCommand(Bench):
    """Plain and speculative decoding on a GPU: published pairs with random weights, at serving
    shapes."""

    NAME: ClassVar[str] = "gpu"

    out: pathlib.Path = pathlib.Path("gpu-grid.json")
    """JSON file to write after every cell."""
    dry_run: bool = False
    """Run the same code with tiny models on any JAX backend; the figures are meaningless."""
    budget_s: float = 480.0
    """Start no new cell after this many seconds; the most informative cells come first."""
    repeats: int = 3
    """Timed runs of each kind; the median is reported."""
    resume: bool = False
    """Keep the cells that --out already holds, and measure the others."""
    plot: pathlib.Path | None = None
    """Image file to write at the end (extra `analysis`)."""

    def run(self, console: Console) -> dict[str, Any]:
        """Measures cells and prints the table; returns the JSON document."""
        self.check()
        check_between("--budget-s", self.budget_s, 0, math.inf)
        if not self.dry_run and jax.default_backend() != "gpu":
            raise SettingError(
                f"The grid is measured on a GPU, and JAX runs on {jax.default_backend()}; install "
                "the `cuda` extra on a machine with a GPU, or try it with --dry-run."
            )
        header = self.document()
        del header["config"]["budget_s"]  # a resumed grid is the same grid with more time
        plan = DRY_RUN if self.dry_run else GPU
        with only_run_into(self.out), working("") as status:
            document = measure_grid(
                plan,
                self.out,
                budget_s=self.budget_s,
                repeats=self.repeats,
                header=header,
                resume=self.resume,
                say=status.update,
            )
        self.show(document, console)
        if self.plot is not None:
            save_figure(plot_grid(document), self.plot)
        return document

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """A line per cell: plain decoding, and speculation at the oracle's highest acceptance."""
        cells = [{"plain": {}, **cell} for cell in document["cells"].values()]
        lines = [cell | {"drafted": cell.get("speculative", [{}])[-1]} for cell in cells]
        return [TextTable.of_columns("GPU grid (random weights, oracle drafts)", GRID, lines)]

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What the table lacks."""
        num_waiting = len((DRY_RUN if self.dry_run else GPU).cells()) - len(document["cells"])
        found = ["A dry run: these figures are meaningless."] * self.dry_run
        if num_waiting:
            found.append(f"{num_waiting} cells were not measured; continue with --resume.")
        return [(sentence, "dim") for sentence in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measure speed (`decode`; on a GPU `gpu`), predict it (`predict`; from compiled programs
    `program`), or measure one part alone."""

    bench: Annotated[
        Annotated[DecodeCommand, tyro.conf.subcommand("decode")]
        | Annotated[PredictCommand, tyro.conf.subcommand("predict")]
        | Annotated[GpuCommand, tyro.conf.subcommand("gpu")]
        | Annotated[ProgramBench, tyro.conf.subcommand("program")]
        | Annotated[SchedulersBench, tyro.conf.subcommand("schedulers")]
        | Annotated[VerifiersBench, tyro.conf.subcommand("verifiers")]
        | Annotated[TreesBench, tyro.conf.subcommand("trees")]
        | Annotated[HeadsBench, tyro.conf.subcommand("heads")]
        | Annotated[FlexDraftBench, tyro.conf.subcommand("flexdraft")]
        | Annotated[MemoryBench, tyro.conf.subcommand("memory")]
        | Annotated[SessionsBench, tyro.conf.subcommand("sessions")]
        | Annotated[ConfusionBench, tyro.conf.subcommand("confusion")]
        | Annotated[KernelsBench, tyro.conf.subcommand("kernels")]
        | Annotated[KvBench, tyro.conf.subcommand("kv")]
        | Annotated[PrefillBench, tyro.conf.subcommand("prefill")]
        | Annotated[StepCostBench, tyro.conf.subcommand("step-cost")]
        | Annotated[TraceCostBench, tyro.conf.subcommand("trace-cost")]
        | Annotated[CompileTimeBench, tyro.conf.subcommand("compile-time")],
        tyro.conf.arg(name=""),
    ]

    @property
    def json(self) -> bool:
        """The option of the chosen bench."""
        return self.bench.json

    def run(self, console: Console) -> dict[str, Any]:
        """Runs the chosen bench; returns its JSON document."""
        return self.bench.run(console)


def parse_batches(text: str) -> list[int]:
    """Batch sizes from `1..64` (doubling, the last one included) or `1,8,32`.

    Raises:
      SettingError: the text has neither form.
    """
    first, dots, last = text.partition("..")
    try:
        sizes = [int(size) for size in ((first, last) if dots else text.split(","))]
    except ValueError:
        sizes = []
    if min(sizes, default=0) < 1 or (dots and sizes[0] > sizes[1]):
        raise SettingError(
            f"--batch {text} was given; write 1..64 for powers of two, or a list such as 1,8,32."
        )
    if not dots:
        return sizes
    low, high = sizes
    return [low << n for n in range(high.bit_length()) if low << n < high] + [high]


def model_config(name: str) -> ModelConfig:
    """The architecture of a preset (with or without `random:`), or of a model."""
    preset = name.removeprefix("random:")
    return PRESETS[preset] if preset in PRESETS else load_model(name).config


EQUAL = {True: "yes", False: "NO", None: "-"}
BATCH: Columns = {"batch": "{batch_size}"}
RATES: Columns = {
    "tokens/s": "{tokens_per_s:.0f}",
    "plain\ntokens/s": "{plain_tokens_per_s:.0f}",
    "speed-up": "{speedup_vs_plain:.2f}x",
}
RUNS: Columns = {
    **BATCH,
    "draft\nlength": "{draft}",
    **RATES,
    "of\nrounds": "{speedup_of_rounds:.2f}x",
    "predicted": "{predicted[speedup]:.2f}x",
    "emitted\n/round": "{emitted_per_round:.2f}",
    "equals\nplain": lambda run: EQUAL[run["equal_to_plain"] if run["draft_length"] else None],
}
ADAPTIVE: Columns = {
    **BATCH,
    "promise": "{exactness}",
    **RATES,
    "of best\nfixed": "{of_best_fixed:.2f}",
    "emitted\n/round": "{emitted_per_round:.2f}",
    "rounds by draft length": lambda run: ", ".join(
        f"{length}: {count}" for length, count in run["rounds_by_draft_length"].items()
    ),
}
STAGES_OF_RUNS: Columns = {
    **BATCH,
    "draft\nlength": "{draft}",
    **{name: f"{{stages_ms[{name}]:.3g}}" for name in ("draft", "target", "verify", "other")},
    "round": "{round_ms:.3g}",
    "predicted": "{predicted[round_ms]:.3g}",
    "roofline": "{roofline_ms:.3g}",
    "of it": "{fraction_of_roofline:.0%}",
}
AGAINST: Columns = {
    **BATCH,
    "transformers": lambda pair: pair["hf"].removeprefix("hf "),
    "tokens/s": "{hf_tokens_per_s:.0f}",
    "jaxspec": "{ours}",
    "jaxspec\ntokens/s": "{tokens_per_s:.0f}",
    "ratio": "{ratio_to_hf:.2f}x",
    "equal": "{num_equal}",
}
PREDICTIONS: Columns = {
    **BATCH,
    "acceptance": lambda found: (
        "measured" if found["acceptance"] is None else f"{found['acceptance']:g}"
    ),
    "plain\nms": "{plain_ms:.2f}",
    "plain\ntokens/s": "{plain_tokens_per_s:.0f}",
    "draft\nlength": "{draft_length}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up": "{speedup:.2f}x",
    "ceiling": "{ceiling_speedup:.2f}x",
    "closed\nform": "{closed_form_draft_length:d}",
}
GRID: Columns = {
    "pair": "{pair}",
    **BATCH,
    "context": "{context}",
    "kernels": "{kernels}",
    "plain ms": lambda cell: (
        f"{cell['plain']['round_ms']:.2f}" if cell["plain"] else cell["outcome"]
    ),
    "round ms": "{drafted[round_ms]:.2f}",
    "of the\nrooflines": "{plain[fraction_of_roofline]:.0%} {drafted[fraction_of_roofline]:.0%}",
    "plain\ntokens/s": "{plain[tokens_per_s]:.0f}",
    "tokens/s": "{drafted[tokens_per_s]:.0f}",
    "speed-up": "{drafted[speedup]:.2f}x",
}


def _is_exported(name: str) -> bool:
    """Whether a model is written as a Hugging Face directory for `transformers` to read."""
    return name in DEMO_MODELS or name.startswith(RANDOM)


def grouped(
    title: str, columns: Columns, records: Iterable[Mapping[str, Any]], by: str = "batch_size"
) -> TextTable:
    """A table with a line between records whose field `by` differs."""
    return TextTable.of_columns(title, columns, records, group=lambda record: record[by])
