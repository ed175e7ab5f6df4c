"""`jaxspec compare`: drafters on the same prompts, prompt by prompt."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from jaxspec.audit.judge import Finding
from jaxspec.commands.options import DtypeName, JsonOption, PromptOptions, drafter_of_command
from jaxspec.commands.progress import working
from jaxspec.decode.settings import check_draft_length
from jaxspec.errors import SettingError
from jaxspec.lab.compare import (
    CONFIDENCE,
    METRICS,
    Candidate,
    DrafterComparison,
    Interval,
    compare,
)
from jaxspec.load.models import load_packed
from jaxspec.requests.prompts import PromptLine, encode_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.options import check_counts
from jaxspec.runtime.report import Columns, TextTable, check_can_plot, save_figure

CATEGORY_FIELDS = ("category", "domain")  # of a prompt file's lines; the first one present


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand(JsonOption, PromptOptions):
    """Compare drafters on the same prompts and seeds; the first one is the baseline.

    Lines of the prompt file may have a `category` or `domain`; results are then also shown by
    category. `jaxspec.compare` has more settings."""

    target: str
    """Hub id, Hugging Face or converted directory, GGUF file, `demo-target`, `random:PRESET`."""
    drafter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """`none` (plain decoding) or a drafter that `jaxspec generate --help` lists; with settings as a
    JSON object, such as `{"kind": "ngram", "branches": 4}`. Repeat the option for each."""
    draft_length: int | None = None
    """Tokens drafted per round (for a tree: nodes); default: the number of nodes of each drafter's
    tree, or 4."""
    batch_size: int = 8
    """Prompts decoded together (fewer if there are fewer prompts)."""
    max_length: int = 1024
    """Most tokens of a prompt and its completion together."""
    dtype: DtypeName | None = None
    """Dtype of parameters, compute and KV; default: the checkpoint's (on a CPU float32 for float16,
    for the embedded pair and for random presets)."""
    max_tokens: int = 64
    """Emit at most this many tokens per prompt."""
    temperature: float = 0.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities add up to this."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-text tokens."""
    repeats: int = 5
    """Timed runs of each drafter, in alternation."""
    plot: pathlib.Path | None = None
    """Write the plot to this file; its suffix chooses the format."""

    def run(self, console: Console) -> dict[str, Any]:
        """Compares; returns the JSON document."""
        if len(set(self.drafter)) < len(self.drafter) or len(self.drafter) < 2:
            given = " ".join(self.drafter) or "nothing"
            raise SettingError(
                f"--drafter was given {given}; name at least two different drafters, e.g. "
                "--drafter none --drafter ngram."
            )
        check_counts(self, "batch_size", "max_length", "repeats")
        if self.draft_length is not None:
            check_draft_length(self.draft_length, None)
        makers = {name: drafter_of_command(name, {}, dtype=self.dtype) for name in self.drafter}
        if self.plot is not None:
            check_can_plot(self.plot)
        lines, inputs = self.read_prompts()
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            ignore_eos=self.ignore_eos,
        )
        with working("loading the models") as status:
            target = load_packed(self.target, dtype=self.dtype)
            drafters = {
                name: make(target) if make is not None else None for name, make in makers.items()
            }
            encoded = encode_prompts(lines, target, max_prompt_tokens=self.max_prompt_tokens)
            comparison = compare(
                target,
                drafters,
                encoded,
                [dataclasses.replace(params, seed=index) for index in range(len(encoded))],
                categories=[category_of(line) for line in lines],
                draft_length=self.draft_length,
                batch_size=self.batch_size,
                max_length=self.max_length,
                repeats=self.repeats,
                on_stage=status.update,
            )
        for table in make_tables(comparison):
            console.print(table)
        for text, style in remarks(comparison):
            console.print(text, style=style, highlight=False)
        if self.plot is not None:
            save_figure(comparison.plot(), self.plot)
            console.print(f"plot written to {self.plot}", markup=False, highlight=False)
        return make_document(
            "compare",
            self,
            holds=comparison.holds,
            inputs=inputs,
            comparison=comparison.to_json(),
        )


def category_of(line: PromptLine) -> str:
    """The prompt's category in the prompt file; `all` without one."""
    return str(next((line.fields[name] for name in CATEGORY_FIELDS if name in line.fields), "all"))


def make_tables(comparison: DrafterComparison) -> list[TextTable]:
    """The drafters; where there are categories, emitted tokens per round by category and drafter;
    and paired differences between every two drafters."""

    def speedup(own: Candidate) -> str:
        ratios = comparison.speedups(own.label)
        return f"{np.median(ratios):.2f}x ({ratios.min():.2f}-{ratios.max():.2f})"

    tables = [
        TextTable.of_columns(
            "",
            {
                "drafter": "{label}",
                "tokens/s": lambda own: f"{own.tokens_per_s:.0f}",
                "speed-up\n(range)": speedup,
                "rounds": lambda own: own.acceptance.num_rounds,
                "emitted\n/round": lambda own: f"{own.acceptance.emitted_per_round:.2f}",
                "accepted at\n1, 2, ... (%)": lambda own: " ".join(
                    f"{100 * share:.0f}" for share in own.acceptance.per_position
                ),
                "equal": _equality,
            },
            comparison.candidates,
        )
    ]
    if len(comparison.category_names) > 1:
        found = [
            (category, own.label, comparison.values("emitted per round", own.label, category))
            for category in (*comparison.category_names, None)
            for own in comparison.candidates
        ]
        columns: Columns = {
            "category (prompts)": lambda one: f"{one[0] or 'all'} ({one[2].num_prompts})",
            "emitted per round": lambda one: _interval(one[2]),
            "drafter": lambda one: one[1],
        }
        tables.append(TextTable.of_columns("", columns, found, group=lambda one: one[0]))
    columns = {"on the same prompt": lambda pair: " - ".join(pair)}
    for metric in METRICS:
        columns[f"difference in\n{metric}"] = lambda pair, metric=metric: _interval(
            comparison.difference(metric, *pair), signed=True
        )
    return [*tables, TextTable.of_columns("", columns, comparison.pairs())]


def remarks(comparison: DrafterComparison) -> Sequence[tuple[str, str]]:
    """Notes on the tables: sentences and their styles."""
    num_ties = sum(len(candidate.divergences.differing) for candidate in comparison.candidates)
    if not comparison.holds:
        found = ("Some outputs differ, and no tie explains it: this is a bug.", "bold red")
    elif num_ties:
        found = (
            f"All outputs are equal except {num_ties}, which diverge from "
            f"{comparison.baseline.label}'s at proven ties: programs of other shapes round "
            "differently.",
            "bold",
        )
    else:
        found = ("All outputs are equal, token for token.", "bold")
    return [
        found,
        (
            f"Intervals hold the mean over prompts with {CONFIDENCE:.0%} confidence (bootstrap "
            f"over prompts). Speed-ups over {comparison.baseline.label} are ratios of whole runs "
            "in turns, prefill included.",
            "dim",
        ),
    ]


def _interval(interval: Interval, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    if np.isnan(interval.low):
        return f"{interval.mean:{sign}.2f}"
    return f"{interval.mean:{sign}.2f} ({interval.low:{sign}.2f}, {interval.high:{sign}.2f})"


def _equality(own: Candidate) -> str:
    if not own.holds:
        return "NO"
    num_ties = own.divergences.count(Finding.TIE)
    return f"{num_ties} ties" if num_ties else "yes"
