"""Plain decoding beside speculative decoding: speed, where a round's time goes, its roofline.

The baseline of every speed-up is the window-1 plain loop, the fastest plain decoding there is, and
engines take turns. Every output is compared with plain decoding in the same program (equal), and
with the window-1 loop (equal, or a proven tie within rounding).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

from jaxspec.analysis import cost
from jaxspec.audit.judge import Finding, judge_all
from jaxspec.bench import measure, stages
from jaxspec.bench.measure import Say
from jaxspec.bench.roofline import Ceilings, forward_pass, measure_ceilings, round_roofline_s
from jaxspec.cache.layouts import Layout
from jaxspec.cache.pages import round_up_to_block
from jaxspec.decode.settings import DraftLength, Exactness
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import public_name
from jaxspec.runtime.environment import devices
from jaxspec.runtime.turns import take_turns, time_loops
from jaxspec.schedulers import Scheduler, Static
from jaxspec.telemetry.counters import Acceptance
from jaxspec.verifiers import Verifier

PLAIN = "plain"
PROMISES: tuple[Exactness, ...] = ("bitwise", "ties")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """What is measured.

    Attributes:
      target: the model whose output it is.
      drafter: what proposes tokens.
      verifier: what decides how much of a draft is kept.
      scheduler: of both sides.
      layout: of both sides. Rounds of the aligned one are timed without realignment, which happens
        between rounds: whole runs show what that costs.
      prompts: token ids.
      params: of every prompt; EOS is ignored, so that every run emits the same number of tokens.
      batch_sizes: rows that are decoded together.
      draft_lengths: tokens drafted per round.
      repeats: timed runs of each engine.
      slots: per row; None for what the longest prompt needs.
      say: called with what is being done.
    """

    target: LanguageModel
    drafter: Drafter
    verifier: Verifier
    scheduler: Scheduler
    prompts: Sequence[tuple[int, ...]]
    params: SamplingParams
    batch_sizes: Sequence[int]
    draft_lengths: Sequence[int]
    repeats: int
    layout: Layout = "ragged"
    slots: int | None = None
    say: Say = lambda message: None

    @property
    def max_length(self) -> int:
        """Slots per row, the same for all engines, in whole blocks."""
        longest = max(map(len, self.prompts)) + self.params.max_tokens
        needed = longest + max(self.draft_lengths) + 1
        return round_up_to_block(max(needed, self.slots or 0))

    @property
    def draft_model(self) -> LanguageModel | None:
        """The drafter's model, if it is one of the package's own."""
        model = self.drafter.model if isinstance(self.drafter, DraftModel) else None
        return model if isinstance(model, LanguageModel) else None

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """What the engines differ in, by name: the window-1 plain loop, every draft length, and
        the draft length that is chosen as it goes, under both promises."""
        return {
            PLAIN: {"draft_length": 0},
            **{f"drafted {length}": {"draft_length": length} for length in self.draft_lengths},
            **{
                f"auto, {promise}": {"draft_length": "auto", "exactness": promise}
                for promise in PROMISES
            },
        }

    def engine(self, batch_size: int, draft_length: DraftLength, **changes: Any) -> Engine:
        """A speculative engine, or the window-1 plain loop at draft length 0. One that chooses its
        draft length has the window of the longest."""
        settings: dict[str, Any] = {
            "batch_size": batch_size,
            "max_length": self.max_length,
            "scheduler": self.scheduler,
            "layout": self.layout,
            "prefill_chunk": min(128, max(map(len, self.prompts))),
        }
        settings |= changes
        if draft_length == 0:
            return Engine(self.target, **settings)
        if draft_length == "auto":
            settings["verify_length"] = max(self.draft_lengths) + 1
        settings |= {"verifier": self.verifier, "draft_length": draft_length}
        return Engine(self.target, self.drafter, **settings)

    def run(self) -> dict[str, Any]:
        """What the document holds: `runs` of fixed draft lengths, `adaptive` ones under both
        promises, `cost_model`, `holds`."""
        ceilings = self._ceilings()
        runs, adaptive = [], []
        for batch_size in self.batch_sizes:
            fixed, chosen = self._compare(batch_size, ceilings)
            runs += fixed
            adaptive += chosen
        model = self._cost_model(ceilings, runs)
        for run in runs:
            run["predicted"] = self._predict(model["pair"], run)
        _add_predicted_speed_up(runs)
        equal = [run["equal_to_plain"] for run in (*runs, *adaptive)]
        return {
            "num_prompts": len(self.prompts),
            "prompt_tokens": [len(prompt) for prompt in self.prompts],
            "context": self.context,
            "max_length": self.max_length,
            "ceilings": {name: dataclasses.asdict(value) for name, value in ceilings.items()},
            "runs": runs,
            "adaptive": adaptive,
            "cost_model": {name: value for name, value in model.items() if name != "pair"},
            "round_error": _round_error(runs),
            "holds": all(value is not False for value in equal)
            and all(run["num_not_ties"] == 0 for run in (*runs, *adaptive)),
        }

    @property
    def context(self) -> int:
        """Live slots of a typical row in mid-decode."""
        mean = statistics.mean(map(len, self.prompts))
        return round(mean + self.params.max_tokens / 2)

    def _ceilings(self) -> dict[str, Ceilings]:
        """Of working sets as large as each model's weights: what fits a cache is as fast as it."""
        models = {"target": self.target, "draft": self.draft_model}
        found = {}
        for name, model in models.items():
            if model is not None:
                self.say(f"measuring bandwidth and products at the size of the {name}")
                work = forward_pass(model, batch=1, window=1, context=1)
                found[name] = measure_ceilings(work.weight_bytes, model.dtype)
        return found

    def _compare(
        self, batch_size: int, ceilings: dict[str, Ceilings]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Plain decoding and every draft length at one batch size; and those that choose theirs."""
        engines = {name: self.engine(batch_size, **each) for name, each in self.settings.items()}
        compile_s, references = {}, {}
        for name, engine in engines.items():
            self.say(f"batch {batch_size}, {name}: compiling")
            compile_s[name] = measure.seconds_to_compile(engine)
            # Plain decoding in the engine's own program, which also warms up.
            references[name] = engine.generate(self.prompts, self.params, speculate=False)

        def decode(engine: Engine) -> tuple[list[Completion], int]:
            first_round = int(engine.executor.state.num_rounds)
            outputs = engine.generate(self.prompts, self.params)
            return list(outputs), int(engine.executor.state.num_rounds) - first_round

        turns = take_turns(
            {name: functools.partial(decode, engine) for name, engine in engines.items()},
            self.repeats,
            on_turn=lambda name, turn: self.say(
                f"batch {batch_size}, {name}: run {turn} of {self.repeats}"
            ),
        )
        runs, adaptive = [], []
        for name, engine in engines.items():
            outputs, num_rounds = turns.results[name]
            total = Acceptance.total([done.acceptance for done in outputs])
            length = self.settings[name]["draft_length"]
            run = {
                "drafter": public_name(self.drafter.name) if length else "none",
                "batch_size": batch_size,
                "draft_length": length,
                "verify_length": engine.shape.verify_length,
                "exactness": engine.exactness,
                "promise": engine.describe()["promise"],
                "tokens_per_s": total.num_emitted_tokens / turns.median_s(name),
                "plain_tokens_per_s": total.num_emitted_tokens / turns.median_s(PLAIN),
                "speedup_vs_plain": turns.speedup(name, over=PLAIN),
                "num_tokens": total.num_emitted_tokens,
                "loop_rounds": num_rounds,
                "emitted_per_round": total.emitted_per_round,
                "per_position_acceptance": list(total.per_position),
                **self._agreement(engine, outputs, references[name], turns.results[PLAIN][0]),
                "compile_s": compile_s[name],
                "run_s": turns.seconds[name],
            }
            if length == "auto":
                chosen = engine.rounds_by_draft_length
                lengths = list(engine.executor.verify_lengths)
                adaptive.append(run | {"verify_lengths": lengths, "rounds_by_draft_length": chosen})
                continue
            self.say(f"batch {batch_size}, {name}: stages of a round")
            parts = self._stages(engine, length)
            roofline_ms = 1e3 * round_roofline_s(
                ceilings,
                self.target,
                self.draft_model,
                batch=batch_size,
                draft_length=length,
                context=self.context,
            )
            runs.append(
                run
                | parts
                | {
                    "roofline_ms": roofline_ms,
                    "fraction_of_roofline": roofline_ms / parts["round_ms"],
                }
            )
        return runs, adaptive

    def _agreement(
        self,
        engine: Engine,
        outputs: Sequence[Completion],
        references: Sequence[Completion],
        window_1: Sequence[Completion],
    ) -> dict[str, Any]:
        """How outputs agree with plain decoding in the same program and in the window-1 loop.

        Verifiers that keep only the target's distribution draw other tokens when they sample:
        nothing to compare.
        """
        is_comparable = self.verifier.is_coupled or (
            self.verifier.is_lossless and self.params.temperature == 0
        )
        if not is_comparable:
            return {"equal_to_plain": None, "num_equal_to_window_1": None, "num_not_ties": 0}
        same = [
            ours.token_ids == theirs.token_ids
            for ours, theirs in zip(outputs, references, strict=True)
        ]
        is_one_program = self.layout == "ragged" and len(engine.executor.verify_lengths) == 1
        num_equal, num_not_ties = agreement(
            self.target, outputs, [done.token_ids for done in window_1]
        )
        return {
            # Rows that are aligned, or scored in several widths, round otherwise: ties only.
            "equal_to_plain": all(same) if is_one_program else None,
            "num_equal_to_window_1": num_equal,
            "num_not_ties": num_not_ties,
        }

    def _stages(self, engine: Engine, draft_length: int) -> dict[str, Any]:
        """Milliseconds of a round and of its stages on a state in mid-decode, and memory.

        A round decodes the rows in the batch whatever the scheduler, so others than the static one,
        whose state holds more rows, lend their shape only.
        """
        if not isinstance(engine.scheduler, Static):
            engine = self.engine(engine.shape.batch_size, draft_length, scheduler=Static())
        num_tokens = max(self.params.max_tokens // 2, 1)
        measure.fill_mid_decode(
            engine.executor, self.prompts, num_tokens=num_tokens, draft_length=draft_length
        )
        parts = stages.stages_of(engine.executor.loop, engine.executor.state)
        engine.reset()
        turns = time_loops(parts, self.repeats)
        ms = {name: 1e3 * turns.median_s(name) for name in parts}
        whole = ms.pop("round")
        split = {name: ms.get(name, 0.0) for name in ("draft", "target", "verify")}
        return {
            "round_ms": whole,
            "stages_ms": {
                **split,
                "other": whole - sum(split.values()),
                "commit_alone": ms.get("commit"),
            },
            "memory": peak_memory(parts["round"]),
        }

    def _cost_model(
        self, ceilings: dict[str, Ceilings], runs: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Constants fitted to forward passes of each model and of both, and their errors."""
        windows = sorted({1, *(length + 1 for length in self.draft_lengths)})
        most = self.max_length - max(windows)
        contexts = (most // 4, most // 2, most)
        models = {"target": self.target, "draft": self.draft_model}
        measured = {}
        for name, model in models.items():
            if model is not None:
                self.say(f"timing forward passes of the {name} for the cost model")
                measured[name] = stages.measure_passes(
                    model,
                    batches=sorted(set(self.batch_sizes)),
                    windows=windows,
                    contexts=contexts,
                    max_length=self.max_length,
                    repeats=self.repeats,
                )
        everything = [point for points in measured.values() for point in points]
        kinds = " ".join(devices()["kinds"])
        round_s = _round_overhead_s(runs)
        groups = {"all": everything, **measured}
        fits = {
            name: cost.fit_device(
                points,
                name=f"{kinds} ({name})" if name != "all" else kinds,
                source="fitted by jaxspec bench decode",
                most_bytes_per_s=max(c.bytes_per_s for c in ceilings.values()),
                most_flops_per_s=max(c.matmul_flops_per_s for c in ceilings.values()),
                round_s=round_s,
            )
            for name, points in groups.items()
        }
        pair = cost.Pair(
            target=self.target.config,
            target_device=fits["target"].device,
            draft=self.draft_model.config if self.draft_model else None,
            draft_device=fits["draft" if self.draft_model else "target"].device,
            itemsize=self.target.dtype.itemsize,
            block=stages.block_read_by(self.target),
            drafter_s=0.0 if self.draft_model else _drafter_s(runs),
        )
        return {
            "target": self.target.config.to_json(),
            "draft": self.draft_model.config.to_json() if self.draft_model else None,
            "block": pair.block,
            "fits": {name: fit.to_json() for name, fit in fits.items()},
            "passes": {
                name: [
                    {
                        "batch_size": point.work.batch,
                        "window": point.work.window,
                        "context": point.work.context,
                        "ms": 1e3 * point.seconds,
                        "predicted_ms": 1e3 * fits[name].device.pass_s(point.work),
                        "is_held_out": is_out,
                    }
                    for point, is_out in zip(points, cost.is_held_out(len(points)), strict=True)
                ]
                for name, points in measured.items()
            },
            "pair": pair,
        }

    def _predict(self, pair: cost.Pair, run: dict[str, Any]) -> dict[str, Any]:
        """What the cost model says of a run, given the acceptance that was measured."""
        batch, length = run["batch_size"], run["draft_length"]
        if length == 0:
            return {"round_ms": 1e3 * pair.plain_s(batch=batch, context=self.context)}
        cumulative = run["per_position_acceptance"]
        round_s = pair.round_s(batch=batch, draft_length=length, context=self.context)
        best, gain = pair.best_draft_length(
            batch=batch, context=self.context, acceptance=cumulative
        )
        return {
            "round_ms": 1e3 * round_s,
            "speedup": pair.speed_up(batch=batch, context=self.context, cumulative=cumulative),
            "best_draft_length": best,
            "best_speedup": gain,
        }


def agreement(
    target: LanguageModel, ours: Sequence[Completion], theirs: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """How many greedy or coupled outputs equal a reference, and how many diverge from it elsewhere
    than at a tie within rounding.

    Args:
      target: whose outputs they are.
      ours: completions.
      theirs: reference token ids.
    """
    params = [SamplingParams(max_tokens=len(done.token_ids), ignore_eos=True) for done in ours]
    found = judge_all(target, ours, theirs, params)
    return found.num_equal, len(found.differing) - found.count(Finding.TIE)


def peak_memory(program: stages.Repeated) -> dict[str, Any]:
    """Peak bytes of the device so far, or what the compiled round needs; `source` says which."""
    peak = measure.peak_bytes()
    if peak is not None:
        return {"bytes": peak, "source": "peak of the device in this process"}
    return {
        "bytes": program.program_bytes(),
        "source": "arguments and temporaries of the compiled round",
    }


def _round_overhead_s(runs: Sequence[dict[str, Any]]) -> float:
    """Median of what a round takes besides forward passes and drafting."""
    overheads = [run["round_ms"] - run["stages_ms"]["target"] for run in runs]
    overheads = [
        most - run["stages_ms"]["draft"] for most, run in zip(overheads, runs, strict=True)
    ]
    return max(statistics.median(overheads), 0.0) / 1e3


def _drafter_s(runs: Sequence[dict[str, Any]]) -> float:
    """Median of what a drafter without a model takes."""
    drafted = [run["stages_ms"]["draft"] for run in runs if run["draft_length"]]
    return statistics.median(drafted) / 1e3


def _add_predicted_speed_up(runs: Sequence[dict[str, Any]]) -> None:
    """Beside it, the speed-up of rounds alone: emitted per round over the ratio of round times.

    A run also reads prompts and waits for the last row of a batch; the cost model knows of neither.
    """
    plain_ms = {run["batch_size"]: run["round_ms"] for run in runs if run["draft_length"] == 0}
    for run in runs:
        if run["draft_length"]:
            steps = plain_ms[run["batch_size"]] / run["round_ms"]
            run["speedup_of_rounds"] = run["emitted_per_round"] * steps


def _round_error(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Relative error of predicted round times; no round was fitted, only passes were."""
    errors = [abs(run["predicted"]["round_ms"] / run["round_ms"] - 1) for run in runs]
    return {"median": statistics.median(errors), "worst": max(errors)}
