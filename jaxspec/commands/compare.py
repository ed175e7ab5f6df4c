"""`jaxspec compare`: drafters on the same prompts, prompt by prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.analysis.compare import (
    CONFIDENCE,
    METRICS,
    DrafterComparison,
    Interval,
    compare,
)
from jaxspec.audit.judge import Divergences, Finding
from jaxspec.checkpoint.resolve import load_model
from jaxspec.commands.documents import make_document
from jaxspec.commands.drafters import choose_drafter
from jaxspec.commands.progress import working
from jaxspec.decode.settings import check_draft_length
from jaxspec.errors import SettingError
from jaxspec.requests.prompts import (
    SAMPLE_PROMPTS,
    PromptLine,
    encode_prompts,
    read_prompts,
    sample_prompts,
)
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import sha256_of

CATEGORY_FIELDS = ("category", "domain")  # of a prompt file's lines, the first that is there


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Compare drafters on the same prompts, seeds and window; the first one is the baseline."""

    target: str
    """Hub id, Hugging Face directory, converted directory, `demo-target`, or `random:PRESET`."""
    drafter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """`none` (plain decoding), `ngram`, `ngram:MIN-MAX`, `draft_model:MODEL`
    (`draft_model@0.4:MODEL` ends each draft after its first token less likely than that), or your
    own `package.module:factory`; repeat the option for each."""
    prompts: pathlib.Path | None = None
    """A file of prompts, as for `generate`; default: the sample prompts of the embedded pair. Its
    lines may name a `category` or `domain`."""
    limit: int | None = None
    """Use the first so many prompts."""
    max_prompt_tokens: int | None = None
    """Cut longer prompts to their first so many tokens."""
    max_tokens: int = 64
    """Tokens to emit per prompt at most."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the likeliest tokens that reach this mass together; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 is off."""
    seed: int = 0
    """Of the first prompt's draws, the next ones count on; and of the bootstrap."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-text tokens."""
    draft_length: int = 4
    """Tokens drafted per round."""
    verify_length: int | None = None
    """Tokens scored per round; default: draft length + 1."""
    batch_size: int = 8
    """Prompts decoded together."""
    max_length: int = 1024
    """Slots per prompt, for the prompt and its completion."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of parameters, compute and cache; default float32 on CPU, else the checkpoint's."""
    repeats: int = 5
    """Timed runs of each drafter, in turns."""
    plot: pathlib.Path | None = None
    """Write the plot as a PNG file."""
    json: bool = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Compares; returns the JSON document."""
        if len(set(self.drafter)) < len(self.drafter) or len(self.drafter) < 2:
            given = " ".join(self.drafter) or "nothing"
            raise SettingError(
                f"--drafter was given {given}; name at least two different drafters, e.g. "
                "--drafter none --drafter ngram."
            )
        for name in ("limit", "max_prompt_tokens", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-")
                raise SettingError(f"--{option} {value} was given; it must be at least 1.")
        verify_length = self.draft_length + 1 if self.verify_length is None else self.verify_length
        check_draft_length(self.draft_length, verify_length)
        makers = {
            name: choose_drafter(name, None, dtype=self.dtype)
            for name in dict.fromkeys(self.drafter)
        }
        lines = sample_prompts() if self.prompts is None else read_prompts(self.prompts)
        lines = lines[: self.limit]
        each = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )
        with working("loading the models") as status:
            target = load_model(self.target, dtype=self.dtype)
            drafters = {
                name: make(target) if make is not None else None for name, make in makers.items()
            }
            encoded = encode_prompts(lines, target, max_prompt_tokens=self.max_prompt_tokens)
            comparison = compare(
                target,
                drafters,
                encoded,
                [dataclasses.replace(each, seed=self.seed + i) for i in range(len(encoded))],
                categories=[category_of(line) for line in lines],
                draft_length=self.draft_length,
                verify_length=verify_length,
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
            write_plot(comparison, self.plot)
            console.print(f"plot written to {self.plot}", markup=False, highlight=False)
        path = SAMPLE_PROMPTS if self.prompts is None else self.prompts
        inputs = {}
        with contextlib.suppress(OSError, TypeError):
            inputs[pathlib.Path(str(path)).name] = sha256_of(str(path))
        return make_document(
            "compare",
            self,
            holds=comparison.holds,
            inputs=inputs,
            comparison=comparison.to_json(),
        )


def category_of(line: PromptLine) -> str:
    """What the prompt file says the prompt is; `all` where it says nothing."""
    return str(next((line.fields[name] for name in CATEGORY_FIELDS if name in line.fields), "all"))


def write_plot(comparison: DrafterComparison, path: pathlib.Path) -> None:
    """Writes the comparison's plot as a PNG file.

    Raises:
      SettingError: matplotlib is not installed, or the file cannot be written.
    """
    figure = comparison.plot()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise SettingError(
            f"The plot {path} cannot be written ({error.strerror}); name another file."
        ) from error


def candidates_table(comparison: DrafterComparison) -> Table:
    """One drafter a line."""
    table = _table("drafter", "tokens/s", "speed-up\n(range)", "rounds", "emitted\n/round")
    table.add_column("accepted at\n1, 2, ... (%)")
    table.add_column("equal")
    for candidate in comparison.candidates:
        total = candidate.acceptance
        ratios = comparison.speedups(candidate.label)
        table.add_row(
            candidate.label,
            f"{total.num_emitted_tokens / float(np.median(candidate.run_s)):.0f}",
            f"{np.median(ratios):.2f}x ({ratios.min():.2f}-{ratios.max():.2f})",
            str(total.num_rounds),
            f"{total.emitted_per_round:.2f}",
            " ".join(f"{100 * share:.0f}" for share in total.per_position),
            _equality(candidate.divergences, holds=candidate.holds),
        )
    return table


def categories_table(comparison: DrafterComparison) -> Table:
    """Emitted tokens per round: categories by drafter, mean over prompts and interval."""
    labels = [candidate.label for candidate in comparison.candidates]
    table = _table("emitted per round", *labels)
    for category in comparison.category_names:
        found = [comparison.values("emitted per round", label, category) for label in labels]
        table.add_row(f"{category} ({found[0].num_prompts})", *map(_interval, found))
    found = [comparison.values("emitted per round", label) for label in labels]
    table.add_row(f"all ({found[0].num_prompts})", *map(_interval, found))
    return table


def differences_table(comparison: DrafterComparison) -> Table:
    """Paired differences of every two drafters."""
    table = _table("on the same prompt", *(f"difference in\n{metric}" for metric in METRICS))
    for label, other in comparison.pairs():
        found = [comparison.difference(metric, label, other) for metric in METRICS]
        table.add_row(f"{label} - {other}", *(_interval(one, signed=True) for one in found))
    return table


def remarks(comparison: DrafterComparison) -> Sequence[tuple[str, str]]:
    """What to know about the tables: sentences and their styles."""
    num_ties = sum(len(candidate.divergences.differing) for candidate in comparison.candidates)
    if not comparison.holds:
        found = ("Some outputs differ, and no tie explains it: this is a bug.", "bold red")
    elif num_ties:
        found = (
            f"All outputs are equal, but for {num_ties} that part from "
            f"{comparison.baseline.label}'s at proven ties: another window width rounds otherwise.",
            "bold",
        )
    else:
        found = ("All outputs are equal, token for token.", "bold")
    return [
        found,
        (
            f"Intervals hold the mean over prompts with {CONFIDENCE:.0%} confidence (bootstrap "
            "over prompts). Speed-ups are ratios of whole runs in turns, prompts read included, "
            f"over {comparison.baseline.label}.",
            "dim",
        ),
    ]


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
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
