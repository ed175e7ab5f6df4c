"""FlexDraft in its two modes: tokens per round, the gain of each part, the cost of rounds.

Tokens per round and token-positions depend on models and prompts only, not on the machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode.settings import check_num_nodes
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.flexdraft.config import flex_config
from jaxspec.drafters.flexdraft.drafter import FlexDraft, Mode
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.engine import Engine
from jaxspec.kernels.base import unpacked
from jaxspec.lab.bench.heads import beside, by_domain
from jaxspec.lab.bench.measure import (
    PairBench,
    time_rounds,
)
from jaxspec.lab.bench.speeds import SPEEDS, speed_rows
from jaxspec.lab.compare import Candidate, mean_interval, run_candidates
from jaxspec.lab.cost import model as cost
from jaxspec.load.drafters import load_drafter
from jaxspec.models.base import LanguageModel
from jaxspec.models.registry import PRESETS
from jaxspec.requests.prompts import PromptLine, load_prompts
from jaxspec.requests.requests import Prompt
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import public_name
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.runtime.turns import take_turns
from jaxspec.types import PyTree

Part: TypeAlias = Literal["acceptance", "ablation", "rounds", "speeds", "predicted"]
MODES: tuple[Mode, ...] = ("parallel", "sequential")
LARGE = "qwen3-8b"  # the authors' release, for which rounds are predicted
DEVICE = "a100"  # likewise
TIMED_ROUNDS = 16
PROMPT_TOKENS = 64  # prompt length of rows whose rounds are timed


def _interval(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Formats a field of a row, which may be null; a single prompt has no interval."""

    def shown(found: Mapping[str, Any]) -> str:
        field = found[name]
        if field is None:
            return ""
        has_ends = field["low"] is not None
        ends = " [{low:+.3f} .. {high:+.3f}]" if has_ends else ""
        return f"{{mean:+.3f}}{ends}".format_map(field)

    return shown


ACCEPTANCE: Columns = {
    "drafter": "{drafter}",
    "emitted\n/round": "{emitted_per_round:.3f}",
    "difference per prompt": _interval("difference"),
    "equals\nplain": lambda found: "yes" if found["is_equal"] else "NO",
}
ABLATION: Columns = {
    "parts": "{parts}",
    "emitted\n/round": "{emitted_per_round:.3f}",
    "over the step before": _interval("emitted_gain"),
    "drafted\n/round": "{drafted_per_round:.2f}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up": "{speedup[mean]:.3f}x",
    "speed-up over\nthe step before": _interval("speedup_gain"),
}
ROUNDS: Columns = {
    "batch": "{batch_size}",
    "drafts": "{draft_length}",
    "plain ms": "{plain_ms:.2f}",
    "parallel ms": "{parallel_ms:.2f}",
    "sequential ms": "{sequential_ms:.2f}",
    "parallel /\nsequential": "{ratio:.3f}",
    "layer-rows,\nparallel": "{parallel_layer_rows}",
    "layer-rows,\nsequential": "{sequential_layer_rows}",
}
CROSSINGS: Columns = {
    "drafts": "{draft_length}",
    "sequential is faster from batch": lambda found: (
        "never"
        if found["batch"] is None
        else "{batch:.1f} [{low:.1f} .. {high:.1f}]".format_map(found)
    ),
}
PREDICTED: Columns = {
    "drafts": "{draft_length}",
    "sequential is faster from batch": "{crossing_batch}",
    "plain ms, batch 1": "{plain_ms:.2f}",
    "parallel ms": "{parallel_ms:.2f}",
    "sequential ms": "{sequential_ms:.2f}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexDraftBench(PairBench):
    """Compare FlexDraft's two modes with plain decoding, a draft model and n-grams."""

    NAME: ClassVar[str] = "flexdraft"

    weights: str = "demo-flexdraft"
    """Weights, by a NAME that `load_drafter` takes."""
    parts: tuple[Part, ...] = ("acceptance", "ablation", "rounds", "speeds", "predicted")
    """What to measure."""
    prompts: pathlib.Path | None = None
    """Prompt file; default the sample prompts."""
    draft_length: int = 3
    """Draft length in the comparison of modes; `auto` chooses its own, and the ablation uses a
    whole block."""
    round_lengths: tuple[int, ...] = (1, 3, 7)
    """Draft lengths of the timed rounds; those that do not fit into a block are left out."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Batch sizes of the timed runs and rounds."""
    max_tokens: int = 64
    """Tokens emitted per output; EOS is ignored."""
    repeats: int = 3
    """Timed runs of each kind; the median is reported."""

    def measure(self) -> dict[str, Any]:
        """The measurements that `parts` select."""
        lines, files = load_prompts(self.prompts)
        target, draft = self.load()
        drafter = load_drafter(self.weights, target, kind="flexdraft")
        assert isinstance(drafter, FlexDraft), "it was asked for"
        check_num_nodes(drafter, self.draft_length)
        found: dict[str, Any] = {"holds": True}
        if "acceptance" in self.parts:
            found["acceptance"], holds = self._acceptance(target, draft, drafter, lines)
            found["holds"] &= holds
        if "ablation" in self.parts:
            found["ablation"], holds = self._ablation(target, drafter, lines)
            found["holds"] &= holds
        if "rounds" in self.parts:
            found["rounds"] = self._rounds(target, drafter)
            found["crossings"] = crossings(found["rounds"])
        if "speeds" in self.parts:
            prompts = [line.prompt for line in lines]
            found["speeds"], holds = self._speeds(target, drafter, prompts)
            found["holds"] &= holds
        if "predicted" in self.parts:
            found["predicted"] = predicted()
        return {
            "prompt_files": files,
            "num_prompts": len(lines),
            "drafter": drafter.config.to_json(),
            "num_params": sum(leaf.size for leaf in jax.tree.leaves(unpacked(drafter.params))),
            **found,
        }

    def document(self, **fields: Any) -> dict[str, Any]:
        """The JSON document; it names no directory."""
        document = super().document(**fields)
        config = document["config"]
        return document | {"config": config | {"weights": public_name(self.weights)}}

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """A table for each part, and tokens per round by domain."""
        columns = {
            "acceptance": ("tokens per round", ACCEPTANCE),
            "ablation": ("what the parts bring, batch 1, sequential", ABLATION),
            "rounds": ("a round in both modes", ROUNDS),
            "crossings": ("where the modes cross", CROSSINGS),
            "speeds": ("speed, prefill included", SPEEDS),
            "predicted": (f"{LARGE} on an {DEVICE}: inferred", PREDICTED),
        }
        tables = [
            TextTable.of_columns(title, of_part, document[part])
            for part, (title, of_part) in columns.items()
            if part in document
        ]
        if "acceptance" in document:
            found = document["acceptance"]
            domains = {name: f"{{by_domain[{name}]:.2f}}" for name in found[0]["by_domain"]}
            of_domains: Columns = {"drafter": "{drafter}", **domains}
            tables.append(TextTable.of_columns("tokens per round by domain", of_domains, found))
        return tables

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What the columns mean, and whether outputs equal plain decoding's."""
        found = [
            (
                "Differences, and speed-ups of parts, are means over prompts with their 95% "
                "bootstrap intervals; differences of the first table are to FlexDraft. Crossings "
                "have the range of the turns.",
                "dim",
            )
        ]
        if not document["holds"]:
            found.append(("Some outputs differ from plain decoding's: this is a bug.", "bold red"))
        return found

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)

    def _run(
        self, engines: Mapping[str, Engine], prompts: Sequence[Prompt], *, repeats: int
    ) -> tuple[Candidate, ...]:
        return run_candidates(
            engines, prompts, self._params, repeats=repeats, tell=lambda stage: None
        )

    def _acceptance(
        self,
        target: LanguageModel,
        draft: LanguageModel,
        drafter: FlexDraft,
        lines: Sequence[PromptLine],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Tokens per round for drafts of a whole block, by domain."""
        drafters: dict[str, Drafter] = {
            "FlexDraft": configured(drafter, mode="sequential"),
            "draft model": DraftModel(draft),
            "n-gram": NGram(),
        }
        shape: dict[str, Any] = {"draft_length": drafter.num_nodes, "max_length": 512}
        engines = {
            label: Engine(target, each, batch_size=8, **shape) for label, each in drafters.items()
        }
        found = self._run(engines, [line.prompt for line in lines], repeats=1)
        domains = [str(line.fields.get("domain", "all")) for line in lines]
        results = [
            {
                "drafter": own.label,
                "emitted_per_round": own.acceptance.emitted_per_round,
                "is_equal": own.holds,
                "by_domain": by_domain(own, domains),
                **beside(own, found[0]),
            }
            for own in found
        ]
        return results, all(own.holds for own in found)

    def _ablation(
        self, target: LanguageModel, drafter: FlexDraft, lines: Sequence[PromptLine]
    ) -> tuple[list[dict[str, Any]], bool]:
        """The parts in the paper's order, at batch 1 and in sequential rounds, which are faster on
        a CPU. Every prompt is timed separately, with all engines in alternation."""
        drafter = configured(drafter, mode="sequential")
        whole = configured(drafter, confidence=0.0)
        steps = {
            "attention tuning": without_calibration(whole),
            "+ calibration": whole,
            "+ selective verification": drafter,
        }
        shape: dict[str, Any] = {"batch_size": 1, "max_length": 512}
        engines = {"plain": Engine(target, **shape)}
        for label, each in steps.items():
            engines[label] = Engine(target, each, draft_length=drafter.num_nodes, **shape)
        prompts = [line.prompt for line in lines]
        found = self._run(engines, prompts, repeats=1)
        turns = take_turns(
            {
                (label, index): lambda engine=engine, prompt=prompt: engine.generate(
                    [prompt], self._params
                )
                for index, prompt in enumerate(prompts)
                for label, engine in engines.items()
            },
            self.repeats,
        )
        seconds = {
            label: np.array([turns.median_s((label, index)) for index in range(len(prompts))])
            for label in engines
        }
        before, results = None, []
        for own in found[1:]:
            metrics = {
                "emitted": own.values("emitted per round"),
                "speedup": seconds["plain"] / seconds[own.label],
            }
            total = own.acceptance
            results.append(
                {
                    "parts": own.label,
                    "emitted_per_round": total.emitted_per_round,
                    "drafted_per_round": total.num_draft_tokens / max(total.num_rounds, 1),
                    "tokens_per_s": total.num_emitted_tokens / float(seconds[own.label].sum()),
                    "speedup": mean_interval(metrics["speedup"]).to_json(),
                    **{
                        f"{name}_gain": None
                        if before is None
                        else mean_interval(values - before[name]).to_json()
                        for name, values in metrics.items()
                    },
                }
            )
            before = metrics
        return results, all(own.holds for own in found)

    def _rounds(self, target: LanguageModel, drafter: FlexDraft) -> list[dict[str, Any]]:
        """Milliseconds of rounds of both modes and of plain steps, in alternation."""
        pair = cost.FlexPair(config=drafter.config, device=cost.DEVICES[DEVICE])
        results = []
        for batch_size in self.batch_sizes:
            for length in self.round_lengths:
                if length > drafter.num_nodes:
                    continue
                shape: dict[str, Any] = {"batch_size": batch_size, "max_length": 512}
                engines = {"plain": Engine(target, **shape)}
                for mode in MODES:
                    own = configured(drafter, mode=mode)
                    engines[mode] = Engine(target, own, draft_length=length, **shape)
                turns = time_rounds(
                    {label: engine.executor for label, engine in engines.items()},
                    self.repeats,
                    num_rounds=TIMED_ROUNDS,
                    num_tokens=TIMED_ROUNDS * (length + 1) + 1,
                    prompt_tokens=PROMPT_TOKENS,
                    draft_length=length,
                )
                rows = {
                    f"{mode}_layer_rows": sum(
                        each.layer_rows
                        for each in pair.passes(
                            mode, batch=batch_size, draft_length=length, context=PROMPT_TOKENS
                        )
                    )
                    for mode in MODES
                }
                ms = {label: 1e3 * turns.median_s(label) / TIMED_ROUNDS for label in engines}
                results.append(
                    {
                        "batch_size": batch_size,
                        "draft_length": length,
                        **{f"{label}_ms": each for label, each in ms.items()},
                        "ratio": turns.speedup("sequential", over="parallel"),
                        "ratios": turns.ratios("sequential", over="parallel"),
                        **rows,
                    }
                )
        return results

    def _speeds(
        self, target: LanguageModel, drafter: FlexDraft, prompts: Sequence[Prompt]
    ) -> tuple[list[dict[str, Any]], bool]:
        """Tokens per second of plain decoding, both modes, and the choice among all of these."""
        results, holds = [], True
        for batch_size in self.batch_sizes:
            shape: dict[str, Any] = {"batch_size": batch_size, "max_length": 512}
            engines = {"plain": Engine(target, **shape)}
            for mode in MODES:
                own = configured(drafter, mode=mode)
                engines[mode] = Engine(target, own, draft_length=self.draft_length, **shape)
            engines["auto"] = Engine(target, drafter, draft_length="auto", **shape)
            found = self._run(engines, prompts, repeats=self.repeats)
            holds &= all(own.holds for own in found)
            results += speed_rows(found, engines, batch_size=batch_size)
        return results, holds


def configured(drafter: FlexDraft, **settings: Any) -> FlexDraft:
    """The same drafter with some settings changed."""
    names = ("config", "params", "mode", "confidence", "rule", "block_size")
    own: dict[str, Any] = {**{name: getattr(drafter, name) for name in names}, **settings}
    return FlexDraft(**own, name=drafter.label)


def without_calibration(drafter: FlexDraft) -> FlexDraft:
    """The same attention with a calibrator that adds nothing."""
    params: PyTree = unpacked(drafter.params)
    silent = {
        name: jnp.zeros_like(params["calibrator"][name]) for name in ("logits", "logits_bias")
    }
    params = {**params, "calibrator": {**params["calibrator"], **silent}}
    return configured(drafter, params=params)


def crossings(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each draft length, the batch from which a sequential round takes less time than a
    parallel one, by interpolation of the ratio of their times; and the smallest and largest value
    from single turns."""
    results = []
    for length in dict.fromkeys(found["draft_length"] for found in rounds):
        own = [found for found in rounds if found["draft_length"] == length]
        batches = [found["batch_size"] for found in own]
        middle = crossing(batches, [found["ratio"] for found in own])
        turns = [
            crossing(batches, ratios)
            for ratios in zip(*(found["ratios"] for found in own), strict=True)
        ]
        known = [each for each in turns if each is not None]
        results.append(
            {
                "draft_length": length,
                "batch": middle,
                "low": min(known, default=float("nan")),
                "high": max(known, default=float("nan")),
                "num_turns_without": len(turns) - len(known),
            }
        )
    return results


def crossing(batches: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The batch at which the time of a parallel round over that of a sequential one reaches 1, on
    the line between the batches that were measured; the first batch if it is already above 1 there,
    None if it never is."""
    if ratios[0] >= 1:
        return float(batches[0])
    points = list(zip(batches, ratios, strict=True))
    for (left, below), (right, above) in itertools.pairwise(points):
        if above >= 1:
            return left + (right - left) * (1 - below) / (above - below)
    return None


def predicted() -> list[dict[str, Any]]:
    """The cost model's predictions for the weights of the authors' release."""
    pair = cost.FlexPair(config=flex_config(PRESETS[LARGE]), device=cost.DEVICES[DEVICE])
    results = []
    for length in (15, 7, 3):
        where: dict[str, Any] = {"draft_length": length, "context": 1024}
        results.append(
            {
                "draft_length": length,
                "crossing_batch": pair.crossing_batch(**where),
                "plain_ms": 1e3 * pair.plain_s(batch=1, context=1024),
                **{f"{mode}_ms": 1e3 * pair.round_s(mode, batch=1, **where) for mode in MODES},
            }
        )
    return results
