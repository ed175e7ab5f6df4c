"""`jaxspec bench`: how fast, against whom, how close to the hardware, and what to expect elsewhere.

Another bench is one line in `BenchCommand.bench`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.analysis import cost
from jaxspec.bench.compile_time import compile_times
from jaxspec.bench.decode import DecodeBench, public_name
from jaxspec.bench.gpu_grid import DRY_RUN, GPU, plot_suite, run_suite
from jaxspec.bench.hf import HuggingFace, compare, is_directory
from jaxspec.bench.plots import save_figure, write_plot
from jaxspec.checkpoint.resolve import load_model
from jaxspec.commands.documents import make_document
from jaxspec.commands.drafters import choose_drafter
from jaxspec.commands.generate import SCHEDULERS, VERIFIERS
from jaxspec.commands.progress import working
from jaxspec.commands.study import StudyCommand
from jaxspec.decode.settings import check_draft_length
from jaxspec.errors import SettingError
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import PRESETS
from jaxspec.requests.prompts import encode_prompts, read_prompts, sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import sha256_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCommand:
    """Plain against speculative decoding: rates, stages of a round, fraction of the floor."""

    target: str = "demo-target"
    """Any model that `load_model` takes; with --against hf a Hugging Face directory."""
    draft: str | None = None
    """A draft model, named like the target; default `demo-draft` for `demo-target`."""
    drafter: str | None = None
    """`ngram`, `ngram:MIN-MAX`, `draft_model:MODEL` (`draft_model@0.4:MODEL` ends each draft after
    its first token less likely than that), or your own `package.module:factory`."""
    verifier: Literal["coupled", "rejection", "block", "typical"] = "coupled"
    """What decides how much of a draft is kept."""
    scheduler: Literal["static", "continuous", "pool"] = "static"
    """Which rows take part in a round."""
    layout: Literal["ragged", "aligned"] = "ragged"
    """Where KV stands; `aligned` pads and realigns rows as EQSPEC does."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Batch sizes to measure."""
    draft_lengths: tuple[int, ...] = (2, 4, 6)
    """Draft lengths to measure."""
    prompts: pathlib.Path | None = None
    """Prompt file; default the sample prompts."""
    limit: int = 24
    """Prompts to decode."""
    max_prompt_tokens: int = 64
    """Longer prompts are cut to their first so many tokens."""
    max_tokens: int = 48
    """Tokens emitted per prompt; EOS is ignored."""
    temperature: float = 0.0
    """0 is greedy."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of parameters, compute and cache."""
    max_length: int | None = None
    """Slots per prompt; default what the longest prompt needs. The cost model is fitted to contexts
    up to it."""
    repeats: int = 5
    """Timed runs of each kind; medians count."""
    against: Literal["hf"] | None = None
    """Also run `transformers` on the same models and prompts, in turns (extra `parity`)."""
    plot: pathlib.Path | None = None
    """Image file to write (extra `analysis`)."""
    json: bool = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints the tables; returns the JSON document."""
        draft = self._draft()
        self._check(draft)
        make_drafter = choose_drafter(self.drafter, draft, dtype=self.dtype)
        assert make_drafter is not None
        lines = sample_prompts() if self.prompts is None else read_prompts(self.prompts)
        with working("") as status:
            status.update("loading the models")
            target = load_model(self.target, dtype=self.dtype)
            bench = DecodeBench(
                target=target,
                drafter=make_drafter(target),
                verifier=VERIFIERS[self.verifier](),
                scheduler=SCHEDULERS[self.scheduler](),
                layout=self.layout,
                prompts=encode_prompts(
                    lines[: self.limit], target, max_prompt_tokens=self.max_prompt_tokens
                ),
                params=SamplingParams(
                    max_tokens=self.max_tokens,
                    temperature=self.temperature,
                    seed=0,
                    ignore_eos=True,
                ),
                batch_sizes=self.batch_sizes,
                draft_lengths=self.draft_lengths,
                repeats=self.repeats,
                slots=self.max_length,
                say=status.update,
            )
            against = []
            if self.against is not None:
                hf = HuggingFace.load(self.target, draft, dtype=self.dtype)
                against = compare(bench, hf, batch_sizes=self.batch_sizes, repeats=self.repeats)
            results = bench.run()
            status.update("measuring compile times in another process")
            results["compile"] = compile_times(
                self._engine_options(draft, bench), batch_size=max(self.batch_sizes)
            )
        holds = results["holds"] and all(pair["num_not_ties"] == 0 for pair in against)
        console.print(runs_table(results["runs"]))
        console.print(adaptive_table(results["adaptive"]))
        console.print(stages_table(results["runs"]))
        if against:
            console.print(against_table(against))
        for sentence in remarks(results):
            console.print(sentence, style="dim", highlight=False)
        if not holds:
            console.print("Some outputs are not plain decoding's: this is a bug.", style="bold red")
        name = "sample prompts" if self.prompts is None else self.prompts.name
        document = make_document(
            "bench decode",
            dataclasses.replace(
                self, target=public_name(self.target), draft=draft and public_name(draft)
            ),
            **{**results, "holds": holds},
            against=against,
            inputs={} if self.prompts is None else {name: sha256_of(self.prompts)},
        )
        document["config"] |= {"prompts": name, "plot": None}
        if self.plot is not None:
            write_plot(document, self.plot)
        return document

    def _draft(self) -> str | None:
        if self.draft is None and self.drafter is None and self.target == "demo-target":
            return "demo-draft"
        return self.draft

    def _check(self, draft: str | None) -> None:
        if draft is None and self.drafter in (None, "none"):
            raise SettingError(
                "No drafter was given, so there is nothing to compare; add --draft MODEL or "
                "--drafter ngram."
            )
        for option, values in (
            ("--batch-sizes", self.batch_sizes),
            ("--draft-lengths", self.draft_lengths),
        ):
            if not values or not all(value >= 1 for value in values):
                given = " ".join(map(str, values)) or "nothing"
                raise SettingError(f"{option} {given} was given; give numbers of at least 1.")
        for name in ("repeats", "limit", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise SettingError(
                    f"--{option} {getattr(self, name)} was given; it must be at least 1."
                )
        check_draft_length(max(self.draft_lengths), max(self.draft_lengths) + 1)
        if self.against == "hf":
            if not all(is_directory(name) for name in (self.target, draft) if name is not None):
                raise SettingError(
                    "--against hf was given with a model that is no Hugging Face directory; name "
                    "directories with a config.json, so that both sides read the same weights."
                )
            if self.temperature:
                raise SettingError(
                    f"--against hf was given at temperature {self.temperature:g}, where both sides "
                    "draw by random numbers of their own; leave the temperature out."
                )

    def _engine_options(self, draft: str | None, bench: DecodeBench) -> list[str]:
        """Options of `jaxspec generate` that make the last of the speculative engines."""
        drafter = ["--draft", draft] if draft else ["--drafter", str(self.drafter)]
        return [
            "--target",
            self.target,
            *drafter,
            "--verifier",
            self.verifier,
            "--draft-length",
            str(max(self.draft_lengths)),
            "--max-length",
            str(bench.max_length),
            "--dtype",
            self.dtype,
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictCommand:
    """What a cost model expects of a pair: best draft length and speed-up by batch size."""

    target: str
    """A preset such as `qwen3-8b`, or any model that `load_model` takes."""
    draft: str
    """Its draft model, named alike."""
    device: str = "h200"
    """`a100`, `h100`, `h200`, `l40s` or `l4` (datasheet values: inferred, not measured), or a
    document of `jaxspec bench decode --json`, whose constants were fitted."""
    batch: str = "1..64"
    """Batch sizes: `1..64` doubles from 1 to 64, `1,8,32` names them."""
    context: int = 1024
    """Live slots per row."""
    acceptance: tuple[float, ...] = (0.6, 0.7, 0.8)
    """Chances that a drafted token is accepted, alike at every position."""
    per_position: tuple[float, ...] = ()
    """Measured chances that at least 1, 2, ... drafted tokens are accepted, instead."""
    bytes_per_value: int = 2
    """Of a parameter and of a component of the KV cache."""
    json: bool = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints the table; returns the JSON document."""
        batches = parse_batches(self.batch)
        self._check()
        target, draft = (model_config(name) for name in (self.target, self.draft))
        target_device, draft_device, block = find_devices(self.device, target, draft)
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
        predictions = [
            self._predict(pair, best, batch, acceptance)
            for batch in batches
            for acceptance in (self.acceptance if not self.per_position else (None,))
        ]
        console.print(predictions_table(predictions))
        console.print(
            f"{target_device.name}: {target_device.source}.", style="dim", highlight=False
        )
        document = make_document(
            "bench predict",
            dataclasses.replace(
                self,
                target=public_name(self.target),
                draft=public_name(self.draft),
                device=public_name(self.device),
            ),
            target_device=target_device.to_json(),
            draft_device=draft_device.to_json(),
            predictions=predictions,
        )
        return document

    def _check(self) -> None:
        if not all(0 <= value < 1 for value in (*self.acceptance, *self.per_position)):
            raise SettingError(
                "Acceptances were given outside of [0, 1); they are chances, and a drafter that is "
                "always right has no best draft length."
            )
        if list(self.per_position) != sorted(self.per_position, reverse=True):
            raise SettingError(
                "--per-position was given rising values; they are cumulative (the chance that at "
                "least so many tokens are accepted), so each is at most the one before."
            )
        if self.context < 1 or self.bytes_per_value < 1:
            raise SettingError(
                f"--context {self.context} and --bytes-per-value {self.bytes_per_value} were "
                "given; both must be at least 1."
            )

    def _predict(
        self, pair: cost.Pair, peak: cost.Pair | None, batch: int, acceptance: float | None
    ) -> dict[str, Any]:
        """One line: best draft length by search and by the closed form, at one acceptance."""
        chances = self.per_position if acceptance is None else acceptance
        where = {"batch": batch, "context": self.context}
        length, gain = pair.best_draft_length(**where, acceptance=chances)
        plain_s = pair.plain_s(**where)
        closed_form = None
        if acceptance is not None:
            closed_form = cost.closed_form_draft_length(acceptance, pair.cost_ratio(**where))
        return {
            "batch_size": batch,
            "acceptance": acceptance,
            "plain_ms": 1e3 * plain_s,
            "plain_tokens_per_s": batch / plain_s,
            "draft_step_ms": 1e3 * pair.draft_step_s(**where),
            "draft_length": length,
            "tokens_per_s": gain * batch / plain_s,
            "speedup": gain,
            "ceiling_speedup": peak.best_draft_length(**where, acceptance=chances)[1]
            if peak
            else None,
            "closed_form_draft_length": closed_form,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteCommand:
    """Published pairs with random weights at serving shapes, plain and speculative, on a GPU."""

    out: pathlib.Path
    """JSON file to write, after every cell."""
    device: Literal["gpu"] = "gpu"
    """What to run on."""
    dry_run: bool = False
    """The same code with tiny models, wherever JAX runs: a trial, whose figures mean nothing."""
    budget_s: float = 480.0
    """Seconds after which no cell is begun; the most telling ones come first."""
    repeats: int = 3
    """Timed runs of each kind; medians count."""
    resume: bool = False
    """Keep the cells that --out holds already, and go on with the others."""
    plot: pathlib.Path | None = None
    """Image file to write at the end (extra `analysis`)."""
    json: bool = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints the table; returns the JSON document."""
        if self.repeats < 1:
            raise SettingError(f"--repeats {self.repeats} was given; it must be at least 1.")
        if not self.dry_run and jax.default_backend() != "gpu":
            raise SettingError(
                f"The suite was asked for on a GPU, and JAX runs on {jax.default_backend()}; "
                "install the `cuda` extra on a machine with a GPU, or try it with --dry-run."
            )
        # A resumed suite is the same one, given more time.
        config = {"device": self.device, "dry_run": self.dry_run, "repeats": self.repeats}
        with working("") as status:
            document = run_suite(
                DRY_RUN if self.dry_run else GPU,
                self.out,
                budget_s=self.budget_s,
                repeats=self.repeats,
                config=config,
                resume=self.resume,
                say=status.update,
            )
        console.print(suite_table(document["cells"]))
        if self.dry_run:
            console.print("A dry run: these figures mean nothing.", style="dim")
        if document.get("num_waiting"):
            console.print(
                f"{document['num_waiting']} cells were not reached; go on with --resume.",
                style="dim",
            )
        if self.plot is not None:
            save_figure(plot_suite(document), self.plot)
        return document


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Measure speed (`decode`; on a GPU `suite`), predict it (`predict`), or repeat the published
    study (`study`)."""

    bench: Annotated[
        Annotated[DecodeCommand, tyro.conf.subcommand("decode")]
        | Annotated[PredictCommand, tyro.conf.subcommand("predict")]
        | Annotated[StudyCommand, tyro.conf.subcommand("study")]
        | Annotated[SuiteCommand, tyro.conf.subcommand("suite")],
        tyro.conf.arg(name=""),
    ]

    @property
    def json(self) -> bool:
        """Of the chosen bench."""
        return self.bench.json

    def run(self, console: Console) -> dict[str, Any]:
        """Runs the chosen bench; returns its JSON document."""
        return self.bench.run(console)


def parse_batches(text: str) -> list[int]:
    """Batch sizes of `1..64` (doubling; the last one included) or `1,8,32`.

    Raises:
      SettingError: neither of them.
    """
    first, dots, last = text.partition("..")
    try:
        if dots:
            sizes, size = [], int(first)
            while 0 < size < int(last):
                sizes.append(size)
                size *= 2
            sizes.append(int(last))
            is_good = 1 <= int(first) <= int(last)
        else:
            sizes = [int(size) for size in text.split(",")]
            is_good = min(sizes) >= 1
    except ValueError:
        is_good, sizes = False, []
    if not is_good:
        raise SettingError(
            f"--batch {text} was given; write 1..64 for sizes that double, or 1,8,32."
        )
    return sizes


def model_config(name: str) -> ModelConfig:
    """The architecture of a preset (with or without `random:`), or of a model."""
    preset = name.removeprefix("random:")
    return PRESETS[preset] if preset in PRESETS else load_model(name).config


def find_devices(
    name: str, target: ModelConfig, draft: ModelConfig
) -> tuple[cost.Device, cost.Device, int | None]:
    """Devices for the passes of target and draft, of a datasheet or fitted, and the block of KV
    that attention reads there at a time (None: as one kernel, which datasheets are taken to run).

    A document whose pair is the one asked for lends the constants that were fitted to each model;
    for another pair those that were fitted to both are used.

    Raises:
      SettingError: there is no such device or document.
    """
    if name in cost.DEVICES:
        return cost.DEVICES[name], cost.DEVICES[name], None
    try:
        text = pathlib.Path(name).read_text(encoding="utf-8")
        document = json.loads(text.strip().split("\n")[-1])
        model = document["cost_model"]
        block = model["block"]
        fits = {kind: fit["device"] for kind, fit in model["fits"].items()}
        is_same = (model["target"], model["draft"]) == tuple(
            json.loads(json.dumps(config.to_json())) for config in (target, draft)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"--device {name} is neither one of {', '.join(cost.DEVICES)} nor a document that "
            "`jaxspec bench decode --json` printed; name one of these."
        ) from error
    names = ("target", "draft") if is_same else ("all", "all")
    of_target, of_draft = (cost.Device.from_json(fits[kind]) for kind in names)
    return of_target, of_draft, block


def runs_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Rates and speed-ups, one run a line."""
    table = _table(
        "speed, prompts included",
        "batch",
        "draft\nlength",
        "tokens/s",
        "speed-up",
        "of rounds",
        "predicted",
        "emitted\n/round",
        "equals\nplain",
    )
    for index, run in enumerate(runs):
        is_plain = run["draft_length"] == 0
        equal = {True: "yes", False: "NO", None: "-"}[run["equal_to_plain"]]
        table.add_row(
            str(run["batch_size"]),
            "plain" if is_plain else str(run["draft_length"]),
            f"{run['tokens_per_s']:.0f}",
            f"{run['speedup_vs_plain']:.2f}x",
            "" if is_plain else f"{run['speedup_of_rounds']:.2f}x",
            "" if is_plain else f"{run['predicted']['speedup']:.2f}x",
            f"{run['emitted_per_round']:.2f}",
            "" if is_plain else equal,
            end_section=_ends_section(runs, index),
        )
    return table


def adaptive_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Rates of draft lengths that choose themselves, under both promises."""
    table = _table(
        "draft length auto",
        "batch",
        "exactness",
        "tokens/s",
        "speed-up",
        "emitted\n/round",
        "rounds by draft length",
    )
    for index, run in enumerate(runs):
        chosen = ", ".join(f"{n}: {count}" for n, count in run["rounds_by_draft_length"].items())
        table.add_row(
            str(run["batch_size"]),
            run["exactness"],
            f"{run['tokens_per_s']:.0f}",
            f"{run['speedup_vs_plain']:.2f}x",
            f"{run['emitted_per_round']:.2f}",
            chosen,
            end_section=_ends_section(runs, index),
        )
    return table


def stages_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Milliseconds of a round by stage, beside its floor."""
    names = ("draft", "target", "verify", "other")
    columns = ("batch", "draft\nlength", *names, "round", "predicted", "floor", "of\nfloor")
    table = _table("ms per round", *columns)
    for index, run in enumerate(runs):
        table.add_row(
            str(run["batch_size"]),
            str(run["draft_length"] or "plain"),
            *(f"{run['stages_ms'][name]:.3f}" for name in names),
            f"{run['round_ms']:.3f}",
            f"{run['predicted']['round_ms']:.3f}",
            f"{run['floor_ms']:.3f}",
            f"{run['fraction_of_floor']:.0%}",
            end_section=_ends_section(runs, index),
        )
    return table


def against_table(pairs: Sequence[Mapping[str, Any]]) -> Table:
    """Rates of both libraries and their ratio, one pair a line."""
    table = _table(
        "against transformers, in turns",
        "batch",
        "transformers",
        "tokens/s",
        "jaxspec",
        "tokens/s",
        "ratio",
        "equal",
    )
    for index, pair in enumerate(pairs):
        next_ = pairs[index + 1] if index + 1 < len(pairs) else None
        table.add_row(
            str(pair["batch_size"]),
            pair["hf"].removeprefix("hf "),
            f"{pair['hf_tokens_per_s']:.0f}",
            pair["ours"],
            f"{pair['tokens_per_s']:.0f}",
            f"{pair['ratio_to_hf']:.2f}x",
            str(pair["num_equal"]),
            end_section=next_ is not None and next_["hf"] != pair["hf"],
        )
    return table


def predictions_table(predictions: Sequence[Mapping[str, Any]]) -> Table:
    """Expected rates, one batch size and acceptance a line."""
    table = _table(
        "predicted",
        "batch",
        "acceptance",
        "plain\nms",
        "plain\ntokens/s",
        "draft\nlength",
        "tokens/s",
        "speed-up",
        "ceiling",
        "closed\nform",
    )
    for index, found in enumerate(predictions):
        acceptance, peak = found["acceptance"], found["ceiling_speedup"]
        table.add_row(
            str(found["batch_size"]),
            "measured" if acceptance is None else f"{acceptance:g}",
            f"{found['plain_ms']:.2f}",
            f"{found['plain_tokens_per_s']:.0f}",
            str(found["draft_length"]),
            f"{found['tokens_per_s']:.0f}",
            f"{found['speedup']:.2f}x",
            "" if peak is None else f"{peak:.2f}x",
            "" if acceptance is None else str(found["closed_form_draft_length"]),
            end_section=_ends_section(predictions, index),
        )
    return table


def suite_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """A line per cell: plain decoding, and speculation at the oracle's highest acceptance."""
    table = _table(
        "suite (random weights, oracle drafts)",
        "pair",
        "batch",
        "context",
        "kernels",
        "plain ms",
        "of floor",
        "round ms",
        "of floor",
        "tokens/s",
        "speed-up",
    )
    for cell in cells:
        where = [str(cell[name]) for name in ("pair", "batch_size", "context", "kernels")]
        if cell["outcome"] != "measured":
            table.add_row(*where, cell["outcome"])
            continue
        plain, best = cell["plain"], cell["speculative"][-1]
        table.add_row(
            *where,
            f"{plain['round_ms']:.2f}",
            f"{plain['fraction_of_floor']:.0%}",
            f"{best['round_ms']:.2f}",
            f"{best['fraction_of_floor']:.0%}",
            f"{best['tokens_per_s']:.0f}",
            f"{best['speedup']:.2f} at {best['acceptance']:g}",
        )
    return table


def _table(title: str, *names: str) -> Table:
    """An empty table that 80 columns hold."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def remarks(results: Mapping[str, Any]) -> list[str]:
    """What to know about the tables."""
    ceilings, fits = results["ceilings"]["target"], results["cost_model"]["fits"]
    bandwidth = max(ceilings["copy_bytes_per_s"], ceilings["read_bytes_per_s"])
    compiled = results["compile"]
    errors = "; ".join(
        f"{name} {fit['held_out_error_median']:.0%} and {fit['held_out_error_worst']:.0%}"
        for name, fit in fits.items()
    )
    rounds = results["round_error"]
    sentences = [
        "Speed-ups are over window-1 plain decoding, medians over turns; those of rounds leave out "
        "prompts and rows that wait for others.",
        f"Floor: {bandwidth / 1e9:.0f} GB/s and {ceilings['matmul_flops_per_s'] / 1e9:.0f} "
        "GFLOP/s, both measured here.",
        f"Cost model, relative error on held-out passes, median and worst: {errors}; on whole "
        f"rounds, none of which was fitted: {rounds['median']:.0%} and {rounds['worst']:.0%}.",
        f"Compiling at batch {compiled['batch_size']}: {compiled['cold_s']:.1f} s, from the "
        f"persistent cache {compiled['persistent_s']:.1f} s.",
    ]
    memory = results["runs"][-1]["memory"]
    if memory["bytes"] is not None:
        sentences.append(
            f"Memory of the last run: {memory['bytes'] / 2**20:.0f} MiB ({memory['source']})."
        )
    return sentences


def _ends_section(rows: Sequence[Mapping[str, Any]], index: int) -> bool:
    """Whether the next row is of another batch size."""
    return index + 1 < len(rows) and rows[index + 1]["batch_size"] != rows[index]["batch_size"]
