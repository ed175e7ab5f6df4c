"""`jaxspec demo`: the embedded pair decodes a ragged batch, and the speed-up is measured."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from jaxspec.commands.options import JsonOption
from jaxspec.commands.progress import working
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.errors import SettingError
from jaxspec.lab.compare import compare
from jaxspec.lab.comparison import Candidate, Comparison
from jaxspec.load.models import load_packed
from jaxspec.models.base import LanguageModel
from jaxspec.models.decoder import num_params
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import load_prompts, sample_prompts
from jaxspec.requests.requests import Prompt, prompt_token_ids
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.environment import devices, devices_sentence
from jaxspec.runtime.options import check_counts
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.types import Origin

NUM_DOMAINS = 4
NUM_PROMPTS = 16
DRAFT_LENGTH = 4
PROMPT_SHOWN = 160  # most characters printed of a prompt, from its end

# Marks for the origin of tokens, for output without colours.
MARKS = {Origin.ACCEPTED: "[{}]", Origin.CORRECTED: "~{}", Origin.BONUS: "+{}"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoCommand(JsonOption):
    """Decode 16 prompts with the embedded target and drafters, and compare with plain decoding."""

    max_tokens: int = 96
    """Tokens to emit per prompt."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Batch sizes to measure."""
    repeats: int = 9
    """Timed runs of each kind; the median is reported."""

    def run(self, console: Console) -> dict[str, Any]:
        """Runs the demo; returns the JSON document."""
        started_s = time.perf_counter()
        self._check()
        with working("loading the embedded pair (converted on first use)"):
            target = load_packed("demo-target", dtype="float32")
            draft = load_packed("demo-draft", dtype="float32")
        load_s = time.perf_counter() - started_s
        prompts = choose_prompts(target)
        console.print(
            f"Target {_millions(target)} and draft {_millions(draft)} parameters, float32, "
            f"{devices_sentence(devices())}. {len(prompts)} prompts of "
            f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens, {self.max_tokens} new "
            "tokens each, greedy.",
            highlight=False,
        )
        comparisons = []
        for batch_size in self.batch_sizes:
            # At small batches one prompt per domain is enough.
            num_prompts = len(prompts) if batch_size >= 8 else max(batch_size, NUM_DOMAINS)
            with working("") as status:
                found = compare(
                    target,
                    {"plain": None, "draft model": DraftModel(draft), "n-gram": NGram()},
                    prompts[:num_prompts],
                    SamplingParams(max_tokens=self.max_tokens, ignore_eos=True),
                    draft_length=DRAFT_LENGTH,
                    batch_size=batch_size,
                    max_length=max(map(len, prompts)) + self.max_tokens + DRAFT_LENGTH + 1,
                    repeats=self.repeats,
                    on_stage=lambda stage, n=batch_size: status.update(f"batch {n}, {stage}"),
                )
            comparisons.append(found)
        runs = [run_of(found, own) for found in comparisons for own in found.candidates]
        all_equal = all(found.holds for found in comparisons)
        show_completions(console, target, comparisons[-1].candidates[1].completions[:NUM_DOMAINS])
        console.print(runs_table(runs))
        for text, style in remarks(runs, all_equal=all_equal, verify_length=DRAFT_LENGTH + 1):
            console.print(text, style=style, highlight=False)
        return make_document(
            "demo",
            self,
            exactness="bitwise",
            inputs=load_prompts(None)[1],
            num_prompts=len(prompts),
            runs=runs,
            all_equal_to_plain=all_equal,
            load_s=load_s,
            compile_s=sum(run["compile_s"] for run in runs),
            elapsed_s=time.perf_counter() - started_s,
        )

    def _check(self) -> None:
        SamplingParams(max_tokens=self.max_tokens)
        check_counts(self, "repeats")
        if not self.batch_sizes or not all(1 <= size <= NUM_PROMPTS for size in self.batch_sizes):
            given = " ".join(map(str, self.batch_sizes)) or "nothing"
            raise SettingError(
                f"--batch-sizes {given} was given; give sizes from 1 to {NUM_PROMPTS}, the number "
                "of prompts."
            )


def run_of(comparison: Comparison, own: Candidate) -> dict[str, Any]:
    """The figures of one drafter, or of plain decoding, at one batch size."""
    total = own.acceptance
    return {
        "drafter": own.engine["drafter"],
        "label": own.label,
        "batch_size": own.engine["batch_size"],
        "engine": own.engine,
        "num_prompts": len(own.completions),
        "num_tokens": total.num_emitted_tokens,
        "tokens_per_s": own.tokens_per_s,
        "speedup_vs_plain": float(np.median(comparison.speedups(own.label))),
        "rounds": total.num_rounds,
        "emitted_per_round": total.emitted_per_round,
        "per_position_acceptance": list(total.per_position),
        "equal_to_plain": not own.num_unequal_to_plain,
        "num_equal_to_window_1": own.divergences.num_equal,
        "compile_s": own.compile_s,
        "run_s": list(own.run_s),
    }


def choose_prompts(target: LanguageModel) -> list[tuple[int, ...]]:
    """Token ids of 16 sample prompts, the same number from each domain, in alternation."""
    by_domain: dict[str, list[Prompt]] = {}
    for line in sample_prompts():
        by_domain.setdefault(line.fields["domain"], []).append(line.prompt)
    each = NUM_PROMPTS // NUM_DOMAINS
    chosen = [texts[:: len(texts) // each][:each] for texts in by_domain.values()]
    texts = itertools.chain.from_iterable(zip(*chosen, strict=True))
    return [prompt_token_ids(text, target, name="The sample prompt") for text in texts]


def show_completions(
    console: Console, target: LanguageModel, completions: Sequence[Completion]
) -> None:
    """Prints completions with their tokens marked by origin, in colour or with signs."""
    has_colours = console.color_system is not None
    legend = (
        "[green]accepted from the draft[/], [bold red]the target's correction[/], "
        "[bold blue]the target's bonus after a fully accepted draft[/]"
        if has_colours
        else r"\[accepted from the draft], ~the target's correction, +its bonus after a fully "
        "accepted draft"
    )
    console.print(f"\nTokens: {legend}\n", highlight=False)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    for completion in completions:
        prompt = tokenizer.decode(completion.prompt_token_ids)
        cut = "..." if len(prompt) > PROMPT_SHOWN else ""
        console.print(Text(cut + prompt[-PROMPT_SHOWN:], style="dim"), end="")
        console.print(completion if has_colours else Text(marked_text(completion)))
        console.print()


def marked_text(completion: Completion) -> str:
    """The output with signs that mark tokens by origin; adjacent accepted tokens share one."""
    shown = ""
    pairs = zip(completion.pieces, completion.origins, strict=True)
    for origin, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        pieces = [piece for piece, _ in run]
        joined = ["".join(pieces)] if origin == Origin.ACCEPTED else pieces
        shown += "".join(MARKS.get(origin, "{}").format(text) for text in joined)
    return shown


def runs_table(runs: Sequence[dict[str, Any]]) -> TextTable:
    """The comparison, one line per run; it fits into 80 columns."""
    columns: Columns = {
        "batch": "{batch_size}",
        "drafter": "{label}",
        "tokens/s": "{tokens_per_s:.0f}",
        "speed-up": "{speedup_vs_plain:.2f}x",
        "rounds": "{rounds}",
        "emitted\n/round": "{emitted_per_round:.2f}",
        "accepted at\n1, 2, ... (%)": lambda run: " ".join(
            f"{100 * value:.0f}" for value in run["per_position_acceptance"]
        ),
        "equals\nplain": lambda run: (
            "" if run["drafter"] == "none" else "yes" if run["equal_to_plain"] else "NO"
        ),
    }
    return TextTable.of_columns("", columns, runs, group=lambda run: run["batch_size"])


def remarks(
    runs: Sequence[dict[str, Any]], *, all_equal: bool, verify_length: int
) -> Iterable[tuple[str, str]]:
    """Notes on the table: sentences and their styles."""
    if all_equal:
        yield "Every output equals plain decoding, token for token.", "bold"
    else:
        yield "Some outputs differ from plain decoding: this is a bug.", "bold red"
    drafted = [run for run in runs if run["drafter"] != "none"]
    num_same = sum(run["num_equal_to_window_1"] for run in drafted)
    num_outputs = sum(run["num_prompts"] for run in drafted)
    elsewhere = "" if num_same == num_outputs else "; in the others, a tie is rounded differently"
    yield (
        f"Speed-ups are over window-1 plain decoding, prefill included. It is a different program "
        f"from the drafters' window of {verify_length}; its outputs equal theirs in {num_same} of "
        f"{num_outputs} cases{elsewhere}.",
        "dim",
    )
    if jax.default_backend() == "cpu":
        yield (
            "On a CPU the cost of a round grows almost in proportion to its window, so speculation "
            "pays at small batches and hardly at large ones.",
            "dim",
        )


def _millions(model: LanguageModel) -> str:
    return f"{num_params(model.config) / 1e6:.2f} M"
