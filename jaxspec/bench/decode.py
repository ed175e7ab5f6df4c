"""Plain decoding beside speculative decoding: speed, where a round's time goes, and its floor.

The baseline of every speed-up is the window-1 plain loop, the fastest plain decoding there is.
Engines take turns, so that a slow moment of the machine falls on all of them, and a ratio is the
median of the ratios of neighbouring runs. Every output is held against plain decoding in the same
program (equal), and against the window-1 loop (equal, or a proven tie within rounding).
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.analysis import cost
from jaxspec.audit.judge import Finding, judge
from jaxspec.audit.scoring import Scorer
from jaxspec.bench import stages
from jaxspec.bench.roofline import Ceilings, measure_ceilings, time_in_turns
from jaxspec.cache.layouts import Layout
from jaxspec.cache.pages import round_up_to_block
from jaxspec.decode.loop import SpeculativeLoop
from jaxspec.decode.settings import DraftLength, Exactness
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.environment import devices
from jaxspec.schedulers import Scheduler, Static
from jaxspec.telemetry.counters import Acceptance
from jaxspec.verifiers import Verifier

Say = Callable[[str], None]
PROMISES: tuple[Exactness, ...] = ("bitwise", "ties")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """What is measured.

    Attributes:
      target: the model whose output it is.
      drafter: what proposes tokens.
      verifier: what decides how much of a draft is kept.
      scheduler: of both sides.
      layout: of both sides. Rounds of the aligned one are timed without realigning rows, which is
        done between rounds: whole runs show what that costs.
      prompts: token ids.
      params: of every prompt; EOS is ignored, so that every run emits the same number of tokens.
      batch_sizes: batch_size.
      draft_lengths: tokens drafted per round.
      repeats: timed runs of each engine.
      slots: per row; None for what the longest prompt needs.
      say: told what is being done.
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
        return Engine(
            self.target,
            self.drafter,
            verifier=self.verifier,
            draft_length=draft_length,
            **settings,
        )

    def run(self) -> dict[str, Any]:
        """Everything that a document holds: `runs` of fixed draft lengths, `adaptive` ones under
        both promises, `cost_model`, `holds`."""
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
                work = _work(model, batch=1, window=1, context=1)
                found[name] = measure_ceilings(work.weight_bytes, model.dtype)
        return found

    def _compare(
        self, batch_size: int, ceilings: dict[str, Ceilings]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Plain decoding and every draft length at one batch size; and those that choose theirs."""
        fixed = (0, *self.draft_lengths)
        lengths: Sequence[DraftLength] = (*fixed, *("auto" for _ in PROMISES))
        engines = [self.engine(batch_size, length) for length in fixed]
        engines += [self.engine(batch_size, "auto", exactness=promise) for promise in PROMISES]
        compile_s, references = [], []
        for engine in engines:
            started_s = time.perf_counter()
            engine.warm_up(lambda program: self.say(f"compiling {program}"))
            engine.generate(self.prompts[:1], SamplingParams(max_tokens=1))
            compile_s.append(time.perf_counter() - started_s)
            # Plain decoding in the engine's own program, which also warms up.
            references.append(engine.generate(self.prompts, self.params, speculate=False))
        seconds = np.zeros((self.repeats, len(engines)))
        rounds = [0] * len(engines)
        outputs: list[list[Completion]] = [[] for _ in engines]
        for repeat in range(self.repeats):
            for index, engine in enumerate(engines):
                self.say(
                    f"batch {batch_size}, {_label(lengths[index])}: run {repeat + 1} of "
                    f"{self.repeats}"
                )
                first_round = int(engine.state.num_rounds)
                started_s = time.perf_counter()
                outputs[index] = engine.generate(self.prompts, self.params)
                seconds[repeat, index] = time.perf_counter() - started_s
                rounds[index] = int(engine.state.num_rounds) - first_round
        runs, adaptive = [], []
        for index, (engine, length) in enumerate(zip(engines, lengths, strict=True)):
            total = Acceptance.total([done.acceptance for done in outputs[index]])
            run_s = statistics.median(seconds[:, index].tolist())
            run = {
                "drafter": public_name(self.drafter.name) if length else "none",
                "batch_size": batch_size,
                "draft_length": length,
                "verify_length": engine.shape.verify_length,
                "exactness": engine.exactness,
                "promise": engine.describe()["promise"],
                "tokens_per_s": total.num_emitted_tokens / run_s,
                "speedup_vs_plain": float(np.median(seconds[:, 0] / seconds[:, index])),
                "num_tokens": total.num_emitted_tokens,
                "loop_rounds": rounds[index],
                "emitted_per_round": total.emitted_per_round,
                "per_position_acceptance": list(total.per_position),
                **self._agreement(engine, outputs[index], references[index], outputs[0]),
                "compile_s": compile_s[index],
                "run_s": seconds[:, index].tolist(),
            }
            if length == "auto":
                chosen = engine.rounds_by_draft_length
                adaptive.append(
                    run
                    | {"verify_lengths": engine.verify_lengths, "rounds_by_draft_length": chosen}
                )
                continue
            self.say(f"batch {batch_size}, {_label(length)}: stages of a round")
            parts = self._stages(engine, length)
            floor_ms = 1e3 * self._floor_s(batch_size, length, ceilings)
            floor = {"floor_ms": floor_ms, "fraction_of_floor": floor_ms / parts["round_ms"]}
            runs.append(run | parts | floor)
        return runs, adaptive

    def _agreement(
        self,
        engine: Engine,
        outputs: Sequence[Completion],
        references: Sequence[Completion],
        witness: Sequence[Completion],
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
        is_one_program = self.layout == "ragged" and len(engine.verify_lengths) == 1
        num_equal, num_not_ties = agreement(
            self.target, outputs, [done.token_ids for done in witness]
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
        state = stages.mid_decode(
            engine,
            self.prompts,
            num_tokens=max(self.params.max_tokens // 2, 1),
            draft_length=draft_length,
        )
        loop = engine.executor.loop
        if isinstance(loop, SpeculativeLoop):
            parts = stages.speculative_stages(loop, state)
        else:
            parts = stages.plain_stages(loop, state)
        del state
        seconds = time_in_turns(list(parts.values()), self.repeats)
        ms = {
            name: 1e3 * statistics.median(times) for name, times in zip(parts, seconds, strict=True)
        }
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

    def _floor_s(self, batch_size: int, draft_length: int, ceilings: dict[str, Ceilings]) -> float:
        """Sum over the forward passes of a round, which follow one another, of each one's floor."""
        work = _work(self.target, batch=batch_size, window=draft_length + 1, context=self.context)
        floor_s = ceilings["target"].floor_s(work.num_bytes, work.num_flops)
        if draft_length and self.draft_model is not None:
            step = _work(self.draft_model, batch=batch_size, window=1, context=self.context)
            floor_s += draft_length * ceilings["draft"].floor_s(step.num_bytes, step.num_flops)
        return floor_s

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
    """How many greedy or coupled outputs equal a reference, and how many part from it elsewhere
    than at a tie within rounding.

    Args:
      target: whose outputs they are.
      ours: completions.
      theirs: reference token ids.
    """
    num_equal, num_not_ties, scorer = 0, 0, None
    for done, reference in zip(ours, theirs, strict=True):
        if tuple(done.token_ids) == tuple(reference):
            num_equal += 1
            continue
        if scorer is None:
            longest = max(len(c.prompt_token_ids) + len(c.token_ids) for c in ours)
            scorer = Scorer(target, max_length=longest)
        divergence = judge(
            scorer,
            prompt_ids=done.prompt_token_ids,
            output_ids=done.token_ids,
            reference_ids=reference,
            params=SamplingParams(max_tokens=len(done.token_ids), ignore_eos=True),
        )
        num_not_ties += divergence is not None and divergence.finding != Finding.TIE
    return num_equal, num_not_ties


def public_name(name: str) -> str:
    """A model's, drafter's or file's name without the directories of this machine."""
    kind, colon, rest = name.rpartition(":")
    path = pathlib.Path(rest)
    return f"{kind}{colon}{path.name}" if path.exists() else name


def peak_memory(program: stages.Repeated) -> dict[str, Any]:
    """Peak bytes of the device so far, or what the compiled round needs; `source` says which."""
    statistics_of_device = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics_of_device:
        return {
            "bytes": int(statistics_of_device["peak_bytes_in_use"]),
            "source": "peak of the device in this process",
        }
    return {
        "bytes": program.program_bytes(),
        "source": "arguments and temporaries of the compiled round",
    }


def _work(model: LanguageModel, *, batch: int, window: int, context: int) -> cost.Pass:
    return cost.Pass(
        config=model.config,
        batch=batch,
        window=window,
        context=context + window,
        itemsize=jnp.dtype(model.dtype).itemsize,
    )


def _label(draft_length: DraftLength) -> str:
    return f"draft length {draft_length}" if draft_length else "plain"


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
