"""`jaxspec demo`: the embedded pair decodes a ragged batch, and the speed-up is measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint import load_model
from jaxspec.commands.progress import DecodingProgress
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.engine import Engine
from jaxspec.environment import devices, devices_sentence, provenance
from jaxspec.errors import SettingError
from jaxspec.models.base import LanguageModel
from jaxspec.prompts import sample_prompts
from jaxspec.requests import Acceptance, Completion, SamplingParams

NUM_PROMPTS = 16
NUM_SHOWN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Decode 16 prompts with the embedded target and drafters, and compare with plain decoding."""

    max_tokens: int = 96
    """Tokens to emit per prompt."""
    draft_length: int = 4
    """Tokens drafted per round."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Batch sizes to measure."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of parameters, compute and cache."""
    repeats: int = 3
    """Timed runs of each kind; the median counts."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Runs the demo; returns the JSON document."""
        for name, values in (("repeats", (self.repeats,)), ("batch_sizes", self.batch_sizes)):
            if not values or min(values) < 1:
                raise SettingError(f"{name} {values} was given; each must be at least 1.")
        started = time.perf_counter()
        with console.status("loading the embedded pair (converted on first use)"):
            target = load_model("demo-target", dtype=self.dtype)
            draft = load_model("demo-draft", dtype=self.dtype)
        prompts = choose_prompts(target)
        console.print(
            f"Target {_millions(target)} and draft {_millions(draft)} parameters, {self.dtype}, "
            f"{devices_sentence(devices())}. {len(prompts)} prompts of "
            f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens, {self.max_tokens} new "
            "tokens each, greedy."
        )
        drafters: list[Drafter] = [DraftModel(draft), NGram()]
        runs = []
        shown: list[Completion] = []
        for batch_size in self.batch_sizes:
            measured, completions = self._measure(console, target, drafters, prompts, batch_size)
            runs.extend(measured)
            shown = completions
        show_completions(console, target, shown[:: max(1, len(shown) // NUM_SHOWN)][:NUM_SHOWN])
        console.print(runs_table(runs, window=self.draft_length + 1))
        all_equal = all(run["equal_to_plain"] for run in runs)
        console.print(
            "Every output equals plain decoding, token for token."
            if all_equal
            else "[bold red]Some outputs differ from plain decoding: this is a bug."
        )
        if jax.default_backend() == "cpu":
            console.print(
                "[dim]On a CPU a wider window costs nearly its share of arithmetic: speculation pays "
                "at small batches, and hardly at large ones.[/dim]"
            )
        return {
            "command": "demo",
            "config": dataclasses.asdict(self),
            "exactness": "bitwise",
            "num_prompts": len(prompts),
            "runs": runs,
            "all_equal_to_plain": all_equal,
            "elapsed_s": time.perf_counter() - started,
            **provenance(),
        }

    def _measure(
        self,
        console: Console,
        target: LanguageModel,
        drafters: Sequence[Drafter],
        prompts: Sequence[tuple[int, ...]],
        batch_size: int,
    ) -> tuple[list[dict[str, Any]], list[Completion]]:
        """Runs of plain decoding and of every drafter, and the first drafter's completions.

        All engines are compiled first; then plain and speculative runs take turns, so that a slow
        moment of the machine falls on both.
        """
        # One batch of prompts is enough to time; at batch 1 a quarter of them.
        chosen = prompts[: max(batch_size, len(prompts) // 4)] if batch_size < 8 else prompts
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        capacity = max(map(len, prompts)) + self.max_tokens + self.draft_length + 1
        engines = [Engine(target, seats=batch_size, capacity=capacity)] + [
            Engine(
                target,
                drafter,
                draft_length=self.draft_length,
                seats=batch_size,
                capacity=capacity,
            )
            for drafter in drafters
        ]
        outputs, plain_outputs = [], []
        with DecodingProgress(console, len(chosen) * (2 * len(engines) - 1)) as progress:
            for index, engine in enumerate(engines):
                progress.describe(f"batch {batch_size}, {_label(engine)}")
                start = 2 * index * len(chosen)
                outputs.append(
                    engine.generate(chosen, params, on_progress=progress.batch_at(start))
                )
                if engine.drafter is not None:  # the same program, every draft marked invalid
                    plain_outputs.append(engine.generate(chosen, params, speculate=False))
        seconds = np.zeros((self.repeats, len(engines)))
        with console.status(f"timing batch {batch_size}"):
            for repeat in range(self.repeats):
                for index, engine in enumerate(engines):
                    started = time.perf_counter()
                    engine.generate(chosen, params)
                    seconds[repeat, index] = time.perf_counter() - started
        witness = outputs[0]
        runs = []
        for index, engine in enumerate(engines):
            acceptance = Acceptance.total([output.acceptance for output in outputs[index]])
            plain = plain_outputs[index - 1] if index else plain_outputs[0]
            reference = plain if index else witness
            runs.append(
                {
                    "drafter": engine.drafter.name if engine.drafter else "none",
                    "batch_size": batch_size,
                    "window": engine.shape.window,
                    "num_prompts": len(chosen),
                    "tokens_per_s": acceptance.num_emitted_tokens
                    / float(np.median(seconds[:, index])),
                    "speedup_vs_plain": float(np.median(seconds[:, 0] / seconds[:, index])),
                    "rounds": acceptance.num_rounds,
                    "emitted_per_round": acceptance.emitted_per_round,
                    "per_position_acceptance": list(acceptance.per_position),
                    "equal_to_plain": _same_tokens(outputs[index], reference),
                    "equal_to_window_1": _num_same(outputs[index], witness),
                }
            )
        return runs, outputs[1]


def choose_prompts(target: LanguageModel) -> list[tuple[int, ...]]:
    """Token ids of 16 of the sample prompts, four of each domain, domains in turn."""
    by_domain: dict[str, list[str]] = {}
    for line in sample_prompts():
        by_domain.setdefault(line.fields["domain"], []).append(line.prompt)
    rounds = zip(*by_domain.values(), strict=True)
    texts = [text for together in rounds for text in together]
    return [tuple(target.tokenizer.encode(text)) for text in texts[:NUM_PROMPTS]]


def show_completions(
    console: Console, target: LanguageModel, completions: Sequence[Completion]
) -> None:
    """Prints completions with their tokens marked by origin."""
    console.print(
        "\nTokens: [green]accepted from the draft[/green], [bold red]the target's correction[/], "
        "[bold blue]the target's bonus after a fully accepted draft[/]"
    )
    for completion in completions:
        prompt = target.tokenizer.decode(completion.prompt_token_ids)
        console.print(f"[dim]{prompt[-160:]}[/dim]", completion, sep="", markup=True)
        console.print()


def runs_table(runs: Sequence[dict[str, Any]], *, window: int) -> Table:
    """The comparison, one run a line."""
    table = Table(title=f"Plain decoding scores 1 token per step, the drafters' runs {window}")
    for name, justify in (
        ("batch", "right"),
        ("drafter", "left"),
        ("tokens/s", "right"),
        ("speed-up", "right"),
        ("rounds", "right"),
        ("emitted/round", "right"),
        ("acceptance by position", "left"),
        ("equal to plain", "left"),
    ):
        table.add_column(name, justify=justify)
    for index, run in enumerate(runs):
        table.add_row(
            str(run["batch_size"]),
            run["drafter"],
            f"{run['tokens_per_s']:.0f}",
            f"{run['speedup_vs_plain']:.2f}x",
            str(run["rounds"]),
            f"{run['emitted_per_round']:.2f}",
            " ".join(f"{value:.2f}" for value in run["per_position_acceptance"]),
            "yes" if run["equal_to_plain"] else "NO",
            end_section=index + 1 < len(runs)
            and runs[index + 1]["batch_size"] != run["batch_size"],
        )
    return table


def _label(engine: Engine) -> str:
    return engine.drafter.name if engine.drafter else "plain"


def _millions(model: LanguageModel) -> str:
    return f"{sum(leaf.size for leaf in jax.tree.leaves(model.params)) / 1e6:.2f} M"


def _same_tokens(a: Sequence[Completion], b: Sequence[Completion]) -> bool:
    return _num_same(a, b) == len(a) == len(b)


def _num_same(a: Sequence[Completion], b: Sequence[Completion]) -> int:
    return sum(x.token_ids == y.token_ids for x, y in zip(a, b, strict=True))
