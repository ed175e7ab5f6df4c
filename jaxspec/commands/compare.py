"""`jaxspec compare`: drafters, or anything else, on the same prompts."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from typing import Any

import tyro
from rich.console import Console

from jaxspec.commands.options import DtypeName, JsonOption, PromptOptions, find_modules_here
from jaxspec.commands.progress import tell, working
from jaxspec.decode.settings import DraftLength, check_draft_length
from jaxspec.errors import PromptError, SettingError
from jaxspec.lab.bench.cells import CellStore
from jaxspec.lab.compare import Setup, compare, make_setup
from jaxspec.lab.comparison import Comparison
from jaxspec.load.models import load_packed
from jaxspec.requests.prompts import PromptLine, encode_prompts, json_object
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import check_can_write
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.options import check_counts
from jaxspec.runtime.report import check_can_plot, save_figure
from jaxspec.runtime.signals import called_at_end, uninterrupted

CATEGORY_FIELDS = ("category", "domain")  # of a prompt file's lines; the first one present
# MT-Bench's categories, which are one task of Spec-Bench.
MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand(JsonOption, PromptOptions):
    """Compare drafters, or candidates of other settings, on the same prompts and seeds; the first
    one is the baseline.

    Lines of the prompt file may have a `category` or `domain`; results are then also shown by
    category. `jaxspec.compare` has more settings."""

    target: str
    """Hub id, Hugging Face or converted directory, GGUF file, `demo-target`, `random:PRESET`."""
    drafter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """`none` (plain decoding) or a drafter that `jaxspec generate --help` lists; with settings as a
    JSON object, such as `{"kind": "ngram", "branches": 4}`. Repeat the option for each."""
    candidate: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """LABEL=JSON: a candidate of other settings, such as `warm={"drafter": "ngram", "draft_length":
    2, "verifier": "rejection", "temperature": 0.7}`: `drafter`, its `tree`, and settings of
    `jaxspec.Engine` and `jaxspec.SamplingParams`. Repeat the option for each."""
    chat: bool = False
    """Take each text prompt as a user's message, and apply the chat template."""
    per_category: int | None = None
    """Use only this many prompts of each category, the first ones."""
    by_task: bool = False
    """Show MT-Bench's eight categories as one, as Spec-Bench does."""
    draft_length: DraftLength | None = None
    """Tokens drafted per round (for a tree: nodes), or `auto`; default: the number of nodes of each
    drafter's tree, or 4."""
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
    ignore_eos: bool = False
    """Do not stop at the model's end-of-text tokens."""
    repeats: int = 5
    """Timed runs of each candidate, in alternation."""
    timing: bool = True
    """--no-timing only counts: each candidate runs once, alone."""
    output: pathlib.Path | None = None
    """Write outputs and figures to this JSON file, as candidates finish."""
    resume: bool = False
    """Go on with the output file of an interrupted run."""
    plot: pathlib.Path | None = None
    """Write the plot to this file; its suffix chooses the format."""

    def run(self, console: Console) -> dict[str, Any]:
        """Compares; returns the JSON document."""
        check_counts(self, "batch_size", "max_length", "repeats", "per_category")
        if self.draft_length not in (None, "auto"):
            check_draft_length(self.draft_length, None)
        setups = self._setups()
        if self.plot is not None:
            check_can_plot(self.plot)
        if self.output is not None:
            check_can_write(self.output)
            CellStore(
                self.output, header={}, resume=self.resume
            )  # refuses before models are loaded
        elif self.resume:
            raise SettingError("--resume was given without --output; name the file.")
        lines, inputs = self.read_prompts()
        lines = self._chosen(lines)
        params = SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, ignore_eos=self.ignore_eos
        )
        latest: list[Comparison] = []
        with working("loading the models") as status:
            target = load_packed(self.target, dtype=self.dtype)
            encoded = encode_prompts(
                lines, target, max_prompt_tokens=self.max_prompt_tokens, is_chat=self.chat
            )
            stdout = os.dup(1)  # a signal closes what `print` writes to

            def show_part() -> None:
                if uninterrupted.is_ending.is_set():
                    os.write(stdout, self._part(latest, len(setups)).encode())

            try:
                with called_at_end(show_part):
                    comparison = compare(
                        target,
                        setups,
                        encoded,
                        params,
                        categories=[self._category(line) for line in lines],
                        repeats=self.repeats if self.timing else 0,
                        output=self.output,
                        resume=self.resume,
                        on_stage=lambda stage: tell(status, stage),
                        on_result=latest.append,
                    )
            except KeyboardInterrupt:  # where no signal ends the process, as in a notebook
                print(self._part(latest, len(setups)), end="")
                raise
            finally:
                os.close(stdout)
        tokenizer: Any = target.tokenizer
        is_text = any(isinstance(line.prompt, str) for line in lines)
        if is_text and not self.chat and tokenizer is not None and tokenizer.hf.chat_template:
            console.print(
                "The model has a chat template and was given plain text; chat models answer "
                "prompts with --chat.",
                style="bold",
                highlight=False,
            )
        console.print(comparison)
        if self.plot is not None:
            save_figure(comparison.plot(), self.plot)
            console.print(f"plot written to {self.plot}", markup=False, highlight=False)
        return make_document(
            "compare",
            self,
            holds=comparison.holds,
            failed=comparison.failed,
            inputs=inputs,
            comparison=comparison.to_json(),
        )

    def _setups(self) -> dict[str, Setup]:
        """The candidates by label, in order, drafters first."""
        find_modules_here()
        given: list[tuple[str, Any]] = [(name, name) for name in self.drafter]
        for one in self.candidate:
            label, _, rest = one.partition("={")
            if not label or not rest:
                raise SettingError(
                    f"--candidate {one} was given; write LABEL=JSON, as in "
                    """--candidate 'k=2={"drafter": "ngram", "draft_length": 2}'."""
                )
            given.append((label, json_object(f"--candidate {label}=", "{" + rest)))
        counts = collections.Counter(label for label, _ in given)
        for label, number in counts.items():
            if number > 1:
                raise SettingError(
                    f"{number} candidates are called {label}; give each a label of its own, as in "
                    "--candidate LABEL=JSON."
                )
        if len(given) < 2:
            raise SettingError(
                f"{' '.join(counts) or 'Nothing'} was given to compare; name at least two, e.g. "
                "--drafter none --drafter ngram, or --candidate LABEL=JSON."
            )
        settings: dict[str, Any] = {"batch_size": self.batch_size, "max_length": self.max_length}
        if self.draft_length is not None:
            settings["draft_length"] = self.draft_length
        return {
            label: make_setup(one, settings, label=label, dtype=self.dtype) for label, one in given
        }

    def _chosen(self, lines: list[PromptLine]) -> list[PromptLine]:
        """The prompts to use."""
        if self.per_category is None and not self.by_task:
            return lines
        option = "--per-category" if self.per_category is not None else "--by-task"
        for line in lines:
            if category_of(line) is None:
                raise PromptError(
                    f"{line.name} has no category, and {option} was given; give a file whose lines "
                    "have one, or leave the option out."
                )
        if self.per_category is None:
            return lines
        if self.limit is not None:
            raise SettingError("Both --limit and --per-category were given; give one of them.")
        seen: collections.Counter[str | None] = collections.Counter()
        chosen = []
        for line in lines:
            seen[category_of(line)] += 1
            if seen[category_of(line)] <= self.per_category:
                chosen.append(line)
        return chosen

    def _category(self, line: PromptLine) -> str:
        category = category_of(line) or "all"
        return "mt_bench" if self.by_task and category in MT_BENCH else category

    def _part(self, latest: list[Comparison], num: int) -> str:
        """What an interrupted run has, and how to go on."""
        num_done = len(latest[-1].ran) if latest else 0
        how = "add --output FILE to be able to go on next time"
        if self.output is not None:
            how = "give the same command with --resume to go on"
        found = f"{latest[-1]}\n" if latest else ""
        return f"{found}{num_done} of {num} candidates are done; {how}.\n"


def category_of(line: PromptLine) -> str | None:
    """The prompt's category in the prompt file; None without one."""
    found = (str(line.fields[name]) for name in CATEGORY_FIELDS if name in line.fields)
    return next(found, None)
