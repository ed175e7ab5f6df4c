"""`jaxspec bench`: speed, comparisons, distance from the hardware's limits, and predictions.

A new bench is a function in `lab.bench.cases` (docs/adding-a-bench.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, Union

import jax
import tyro
from rich.console import Console

from jaxspec.commands.options import DrafterOptions, find_modules_here
from jaxspec.commands.progress import working
from jaxspec.decode.settings import check_draft_length
from jaxspec.errors import SettingError
from jaxspec.lab.bench import cases
from jaxspec.lab.bench.decode import DecodeBench
from jaxspec.lab.bench.drafters import DraftersBench
from jaxspec.lab.bench.gpu_grid import DRY_RUN, GPU, measure_grid, plot_grid
from jaxspec.lab.bench.hf import HuggingFace, compare, exported
from jaxspec.lab.bench.measure import Bench, Dtype, only_run_into, random_prompts
from jaxspec.lab.bench.memory import memory
from jaxspec.lab.bench.peers import PeersBench
from jaxspec.lab.bench.program import program
from jaxspec.lab.studies.rounds import schedulers
from jaxspec.load.models import DEMO_MODELS, load_packed
from jaxspec.requests.prompts import encode_prompts, load_prompts
from jaxspec.runtime.options import check_between
from jaxspec.runtime.report import Columns, TextTable, save_figure

RANDOM = "random:"  # prefix of the name of a preset with random weights
NUM_SAMPLES, SAMPLE_TOKENS = 24, 64  # prompts of `bench decode`, and their longest, by default
LEAST_LENGTH = 512  # slots per row of `bench decode`
REPEATS = 3  # timed runs of each cell of the GPU grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCommand(Bench):
    """Compare plain and speculative decoding: tokens per second, stages of a round, fraction of the
    roofline."""

    NAME: ClassVar[str] = "decode"

    target: str = "demo-target"
    """Any model that `load_model` takes; with --against hf a Hugging Face directory, one of the
    embedded pair or `random:PRESET`."""
    draft: str | None = None
    """A draft model, named like the target; default `demo-draft` for `demo-target`."""
    drafter: str | None = None
    """As in `jaxspec generate`; with settings a JSON object, such as `{"kind": "ngram", "branches":
    4}`."""
    oracle: float | None = None
    """Draft what the target will emit, each token right with this probability, at the cost of the
    draft model; for models without trained weights (`random:PRESET`). Synthetic."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Batch sizes to measure."""
    draft_lengths: tuple[int, ...] = (2, 4, 6)
    """Draft lengths to measure."""
    prompts: pathlib.Path | None = None
    """Prompt file; default 24 sample prompts, cut after 64 tokens, or random ones for a target
    without a tokenizer."""
    max_tokens: int = 48
    """Tokens emitted per prompt; EOS is ignored."""
    dtype: Dtype = "float32"
    """Dtype of parameters, compute and cache."""
    repeats: int = 5
    """Timed runs of each kind; the median is reported."""
    against: Literal["hf"] | None = None
    """Also run `transformers` on the same models and prompts, in alternation (extra `parity`)."""

    def measure(self) -> dict[str, Any]:
        """Everything that `DecodeBench` measures, and what `transformers` does."""
        draft = self._draft()
        options = DrafterOptions(draft=draft, drafter=self.drafter)
        make_drafter = options.choose_drafter(dtype=self.dtype)
        assert make_drafter is not None
        is_sample = self.prompts is None
        lines, inputs = load_prompts(self.prompts, NUM_SAMPLES if is_sample else None)
        with working("") as status:
            status.update("loading the models")
            target = load_packed(self.target, dtype=self.dtype)
            longest = SAMPLE_TOKENS if is_sample else None
            if target.tokenizer is None and is_sample:
                drawn, inputs = random_prompts(target, NUM_SAMPLES, SAMPLE_TOKENS), {}
                prompts = [tuple(prompt) for prompt in drawn]
            else:
                prompts = encode_prompts(lines, target, max_prompt_tokens=longest)
            bench = DecodeBench(
                target=target,
                drafter=make_drafter(target),
                prompts=prompts,
                batch_sizes=self.batch_sizes,
                draft_lengths=self.draft_lengths,
                max_tokens=self.max_tokens,
                repeats=self.repeats,
                least_length=min(LEAST_LENGTH, target.config.max_length),
                say=status.update,
            )
            if self.oracle is not None:
                status.update("decoding plainly, for the oracle")
                bench = bench.with_oracle(self.oracle)
            against = [] if self.against is None else compare(bench, self._load_hf(bench))
            results = bench.run()
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
        ]
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
                repeats=REPEATS,
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


EQUAL = {True: "yes", False: "NO", None: "-"}
BATCH: Columns = {"batch": "{batch_size}"}
POSITIONS: Columns = {  # of the target
    "live\n/round": "{live_per_round:.1f}",
    "computed\n/round": "{computed_per_round:.1f}",
}
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
    **POSITIONS,
    "equals\nplain": lambda run: EQUAL[run["equal_to_plain"] if run["draft_length"] else None],
}
ADAPTIVE: Columns = {
    **BATCH,
    "promise": "{exactness}",
    **RATES,
    "of best\nfixed": "{of_best_fixed:.2f}",
    "emitted\n/round": "{emitted_per_round:.2f}",
    **POSITIONS,
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


BENCHES = (
    DecodeCommand,
    GpuCommand,
    program,
    DraftersBench,
    memory,
    schedulers,
    PeersBench,
    *(each for each in vars(cases).values() if isinstance(each, type) and issubclass(each, Bench)),
)
AnyBench: TypeAlias = Bench
if not TYPE_CHECKING:  # one subcommand for each, under its name
    AnyBench = Union[  # noqa: UP007 (`X | Y` takes no list)
        tuple(Annotated[each, tyro.conf.subcommand(each.NAME)] for each in BENCHES)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measure speed (`decode`; on a GPU `gpu`), compare drafters (`drafters`), predict speed
    (`predict`; from compiled programs `program`), or measure one part alone."""

    bench: Annotated[AnyBench, tyro.conf.arg(name="")]

    def run(self, console: Console) -> dict[str, Any]:
        """Runs the chosen bench; returns its JSON document."""
        find_modules_here()
        return self.bench.run(console)
