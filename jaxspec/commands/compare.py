"""`jaxspec compare`: drafters on the same prompts, prompt by prompt."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.audit.judge import Divergences, Finding
from jaxspec.commands.options import (
    EngineOptions,
    JsonOption,
    PromptOptions,
    SamplingOptions,
    drafter_of_command,
)
from jaxspec.commands.progress import working
from jaxspec.decode.settings import check_draft_length
from jaxspec.errors import SettingError
from jaxspec.lab.compare import CONFIDENCE, METRICS, DrafterComparison, Interval, compare
from jaxspec.load.models import load_packed
from jaxspec.requests.prompts import PromptLine, encode_prompts
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.options import check_counts
from jaxspec.runtime.report import check_can_plot, save_figure

CATEGORY_FIELDS = ("category", "domain")  # of a prompt file's lines; the first one present


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand(JsonOption, EngineOptions, SamplingOptions, PromptOptions):
    """Compare drafters on the same prompts and seeds; the first one is the baseline.

    Lines of the prompt file may have a `category` or `domain`; results are then also shown by
    category."""

    target: str
    """Hub id, Hugging Face directory, converted directory, `demo-target`, or `random:PRESET`."""
    drafter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """`none` (plain decoding) or a drafter that `jaxspec generate --help` lists; with settings as a
    JSON object, such as `{"kind": "ngram", "branches": 4}`. Repeat the option for each."""
    draft_length: int | None = None
    """Tokens drafted per round (for a tree: nodes); default: the number of nodes of each drafter's
    tree, or 4."""
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
        check_counts(self, "batch_size", "max_length", "repeats", "verify_length")
        if self.draft_length is not None:
            check_draft_length(self.draft_length, self.verify_length)
        names = list(dict.fromkeys(self.drafter))
        makers = {
            name: drafter_of_command(name, {}, dtype=self.dtype, verify=self.verify)
            for name in names
        }
        if self.plot is not None:
            check_can_plot(self.plot)
        lines, inputs = self.read_prompts()
        each = self.sampling_params()
        with working("loading the models") as status:
            target = load_packed(
                self.target, dtype=self.dtype, kv_dtype=self.kv_dtype, verify=self.verify
            )
            drafters = {
                name: make(target) if make is not None else None for name, make in makers.items()
            }
            encoded = encode_prompts(lines, target, max_prompt_tokens=self.max_prompt_tokens)
            comparison = compare(
                target,
                drafters,
                encoded,
                self.with_seeds(each, len(encoded)),
                categories=[category_of(line) for line in lines],
                draft_length=self.draft_length,
                verify_length=self.verify_length,
                batch_size=self.batch_size,
                max_length=self.max_length,
                repeats=self.repeats,
                seed=self.seed,
                on_stage=status.update,
            )
        for table in (
            candidates_table(comparison),
            *([categories_table(comparison)] if len(comparison.category_names) > 1 else []),
            differences_table(comparison),
        ):
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


def candidates_table(comparison: DrafterComparison) -> Table:
    """One line per drafter."""
    table = _table("drafter", "tokens/s", "speed-up\n(range)", "rounds", "emitted\n/round")
    table.add_column("accepted at\n1, 2, ... (%)", no_wrap=True)
    table.add_column("equal", no_wrap=True)
    for candidate in comparison.candidates:
        total = candidate.acceptance
        ratios = comparison.speedups(candidate.label)
        table.add_row(
            candidate.label,
            f"{candidate.tokens_per_s:.0f}",
            f"{np.median(ratios):.2f}x ({ratios.min():.2f}-{ratios.max():.2f})",
            str(total.num_rounds),
            f"{total.emitted_per_round:.2f}",
            " ".join(f"{100 * share:.0f}" for share in total.per_position),
            _equality(candidate.divergences, holds=candidate.holds),
        )
    return table


def categories_table(comparison: DrafterComparison) -> Table:
    """Emitted tokens per round by category and drafter: mean over prompts and interval."""
    table = _table("category (prompts)", "emitted per round")
    table.add_column("drafter", overflow="fold")
    for category in (*comparison.category_names, None):
        for index, candidate in enumerate(comparison.candidates):
            found = comparison.values("emitted per round", candidate.label, category)
            name = "" if index else f"{category or 'all'} ({found.num_prompts})"
            table.add_row(name, _interval(found), candidate.label)
        table.add_section()
    return table


def differences_table(comparison: DrafterComparison) -> Table:
    """Paired differences between every two drafters."""
    table = _table("on the same prompt", *(f"difference in\n{metric}" for metric in METRICS))
    for label, other in comparison.pairs():
        found = [comparison.difference(metric, label, other) for metric in METRICS]
        table.add_row(f"{label} - {other}", *(_interval(one, signed=True) for one in found))
    return table


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
    warm = [
        (
            f"{one.label} learns from the requests it serves; every run above began without that. "
            f"Run again on the same prompts, it emits {one.warm.emitted_per_round:.2f} tokens per "
            f"round instead of {one.acceptance.emitted_per_round:.2f}.",
            "",
        )
        for one in comparison.candidates
        if one.warm is not None
    ]
    return [
        found,
        *warm,
        (
            f"Intervals hold the mean over prompts with {CONFIDENCE:.0%} confidence (bootstrap "
            f"over prompts). Speed-ups over {comparison.baseline.label} are ratios of whole runs "
            "in turns, prefill included.",
            "dim",
        ),
    ]


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _interval(interval: Interval, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    if np.isnan(interval.low):
        return f"{interval.mean:{sign}.2f}"
    return f"{interval.mean:{sign}.2f} ({interval.low:{sign}.2f}, {interval.high:{sign}.2f})"


def _equality(divergences: Divergences, *, holds: bool) -> str:
    if not holds:
        return "NO"
    num_ties = divergences.count(Finding.TIE)
    return f"{num_ties} ties" if num_ties else "yes"
