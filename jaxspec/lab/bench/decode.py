"""Compares plain and speculative decoding: speed, time breakdown of a round, roofline.

The baseline of every speed-up is the window-1 plain loop, the fastest plain decoding there is, and
engines run in alternation. Every output is compared with plain decoding by the same engine (equal),
and with the window-1 loop (equal, or a proven tie within rounding).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.audit.judge import Finding, judge_all
from jaxspec.cache.pages import round_up_to_block
from jaxspec.decode.settings import DraftLength, Exactness
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench import measure, stages
from jaxspec.lab.bench.measure import Say, of_best_fixed
from jaxspec.lab.bench.roofline import Ceilings, forward_pass, measure_ceilings, pair_of
from jaxspec.lab.compare import run_candidates
from jaxspec.lab.cost import model as cost
from jaxspec.lab.cost.devices import fit_device
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import public_name
from jaxspec.runtime.environment import devices
from jaxspec.runtime.turns import time_loops
from jaxspec.schedulers import Static
from jaxspec.telemetry.counters import Acceptance

PLAIN = "plain"
PROMISES: tuple[Exactness, ...] = ("bitwise", "ties")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """The measurements of `bench decode`.

    Attributes:
      target: the model to decode with.
      drafter: what proposes tokens.
      prompts: token ids.
      batch_sizes: to measure.
      draft_lengths: to measure.
      max_tokens: emitted per prompt.
      repeats: timed runs of each kind; the median is reported.
      least_length: slots per row, unless prompts and outputs need more. The cost model is fitted to
        contexts up to this length.
      say: called with a description of the current step.
    """

    target: LanguageModel
    drafter: Drafter
    prompts: Sequence[tuple[int, ...]]
    batch_sizes: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    max_tokens: int
    repeats: int
    least_length: int = 0
    say: Say = lambda message: None

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of every prompt; EOS is ignored, so that every run emits the same
        number of tokens."""
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)

    @property
    def max_length(self) -> int:
        """Slots per row, the same for all engines, in whole blocks."""
        longest = max(map(len, self.prompts)) + self.max_tokens
        needed = longest + max(self.draft_lengths) + 1
        return round_up_to_block(max(needed, self.least_length))

    @property
    def context(self) -> int:
        """Live slots of a typical row in mid-decode."""
        return round(statistics.mean(map(len, self.prompts)) + self.max_tokens / 2)

    @property
    def models(self) -> dict[str, LanguageModel]:
        """The `target`, and the `draft` model if the drafter runs one of the package's own."""
        drafter = self.drafter.cost_of if isinstance(self.drafter, Oracle) else self.drafter
        draft = drafter.model if isinstance(drafter, DraftModel) else None
        has_draft = isinstance(draft, LanguageModel)
        return {"target": self.target} | ({"draft": draft} if has_draft else {})

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings in which engines differ, by name: the window-1 plain loop, every draft
        length, and the automatic draft length under each promise."""
        lengths = {f"drafted {n}": {"draft_length": n} for n in self.draft_lengths}
        adaptive = {
            f"auto, {promise}": {"draft_length": "auto", "exactness": promise}
            for promise in PROMISES
        }
        return {PLAIN: {"draft_length": 0}, **lengths, **adaptive}

    def engine(
        self, batch_size: int, draft_length: DraftLength, *, exactness: Exactness = "bitwise"
    ) -> Engine:
        """A speculative engine, or the window-1 plain loop at draft length 0. An engine with
        automatic draft length has the window of the longest."""
        shape: dict[str, Any] = {
            "batch_size": batch_size,
            "max_length": self.max_length,
            "scheduler": Static(),
        }
        if draft_length == 0:
            return Engine(self.target, **shape)
        if draft_length == "auto":
            shape["verify_length"] = max(self.draft_lengths) + 1
        return Engine(
            self.target, self.drafter, draft_length=draft_length, exactness=exactness, **shape
        )

    def with_oracle(self, acceptance: float) -> DecodeBench:
        """The same measurements with an oracle that knows plain decoding's outputs and costs as
        much as the drafter."""
        plain = self.engine(max(self.batch_sizes), 0)
        sequences = [
            done.prompt_token_ids + done.token_ids
            for done in plain.generate(self.prompts, self.params)
        ]
        oracle = Oracle(sequences, acceptance=acceptance, cost_of=self.drafter)
        return dataclasses.replace(self, drafter=oracle)

    def engines(self, batch_size: int) -> dict[str, Engine]:
        """An engine for each of `settings`. If bits do not depend on the width of windows, the
        engines of both promises are the same, and only one is made."""
        made = {name: self.engine(batch_size, **each) for name, each in self.settings.items()}
        bitwise, ties = (made[f"auto, {promise}"] for promise in PROMISES)
        if ties.verify_lengths == bitwise.verify_lengths:
            del made["auto, ties"]
        return made

    def run(self) -> dict[str, Any]:
        """The contents of the document: `runs` with fixed draft lengths, `adaptive` ones under each
        promise, `cost_model`, `holds`."""
        ceilings = {}
        # For working sets as large as each model's weights, because what fits into a cache is as
        # fast as the cache.
        for name, model in self.models.items():
            self.say(f"measuring bandwidth and products at the size of the {name}")
            work = forward_pass(model, batch=1, window=1, context=1)
            ceilings[name] = measure_ceilings(work.weight_bytes, model.dtype)
        roofline = pair_of(self.models, ceilings)
        every = [run for size in self.batch_sizes for run in self._compare(size, roofline)]
        adaptive = [run for run in every if run["draft_length"] == "auto"]
        runs = [run for run in every if run["draft_length"] != "auto"]
        pair, cost_model = self._cost_model(ceilings, runs)
        plain_ms = {run["batch_size"]: run["round_ms"] for run in runs if not run["draft_length"]}
        for run in runs:
            run["predicted"] = self._predict(pair, run)
            if run["draft_length"]:
                # For rounds alone: a run also prefills prompts and waits for the last row of a
                # batch, which the cost model does not cover.
                steps = plain_ms[run["batch_size"]] / run["round_ms"]
                run["speedup_of_rounds"] = run["emitted_per_round"] * steps
        # No round was fitted, only passes were.
        errors = [abs(run["predicted"]["round_ms"] / run["round_ms"] - 1) for run in runs]
        return {
            "num_prompts": len(self.prompts),
            "prompt_tokens": [len(prompt) for prompt in self.prompts],
            "context": self.context,
            "max_length": self.max_length,
            "ceilings": {name: dataclasses.asdict(value) for name, value in ceilings.items()},
            "runs": runs,
            "adaptive": adaptive,
            "cost_model": cost_model,
            "round_error": {"median": statistics.median(errors), "worst": max(errors)},
            "holds": all(
                run["equal_to_plain"] is not False and run["num_not_ties"] == 0 for run in every
            ),
        }

    def _compare(self, batch_size: int, roofline: cost.Pair) -> list[dict[str, Any]]:
        """Plain decoding, every draft length, and automatic ones, at one batch size."""
        engines = self.engines(batch_size)
        candidates = run_candidates(
            engines,
            self.prompts,
            self.params,
            repeats=self.repeats,
            tell=lambda stage: self.say(f"batch {batch_size}, {stage}"),
        )
        plain, runs = candidates[0], []
        beside_best = of_best_fixed(candidates, engines.values())
        for own, (name, engine) in zip(candidates, engines.items(), strict=True):
            total, found = own.acceptance, own.divergences
            length = self.settings[name]["draft_length"]
            run = {
                "drafter": public_name(self.drafter.name) if length else "none",
                "is_synthetic": bool(length) and self.drafter.is_synthetic,
                "batch_size": batch_size,
                "draft_length": length,
                "verify_length": engine.shape.verify_length,
                "exactness": engine.exactness,
                "promise": own.engine["promise"],
                "tokens_per_s": own.tokens_per_s,
                "plain_tokens_per_s": plain.tokens_per_s,
                "speedup_vs_plain": float(np.median(own.speedups(plain))),
                "num_tokens": total.num_emitted_tokens,
                "loop_rounds": int(engine.executor.state.num_rounds),
                "emitted_per_round": total.emitted_per_round,
                **positions_per_round(engine, total),
                "per_position_acceptance": list(total.per_position),
                "equal_to_plain": (
                    # Rows that are scored in widths that affect the bits are equal up to ties.
                    not own.num_unequal_to_plain if engine.executor.is_width_invariant else None
                ),
                "num_equal_to_window_1": found.num_equal,
                "num_not_ties": len(found.differing) - found.count(Finding.TIE),
                "compile_s": own.compile_s,
                "run_s": list(own.run_s),
            }
            if length == "auto":
                run["of_best_fixed"] = beside_best[name]
                run["verify_lengths"] = list(engine.executor.verify_lengths)
                run["rounds_by_draft_length"] = engine.rounds_by_draft_length
            else:
                self.say(f"batch {batch_size}, {name}: stages of a round")
                run |= self.time_stages(engine, length)
                where = {"batch": batch_size, "context": self.context}
                run["roofline_ms"] = 1e3 * roofline.round_s(draft_length=length, **where)
                run["fraction_of_roofline"] = run["roofline_ms"] / run["round_ms"]
            runs.append(run)
        return runs

    def time_stages(self, engine: Engine, draft_length: int) -> dict[str, Any]:
        """Milliseconds of a round and of its stages on a state in mid-decode."""
        num_tokens = max(self.max_tokens // 2, 1)
        measure.fill_mid_decode(
            engine.executor, self.prompts, num_tokens=num_tokens, draft_length=draft_length
        )
        parts = stages.round_stages(engine.executor.parts, engine.executor.state)
        engine.reset()
        turns = time_loops(parts, self.repeats)
        ms = {name: 1e3 * turns.median_s(name) for name in parts}
        split = {name: ms.get(name, 0.0) for name in ("draft", "target", "verify")}
        other = ms["round"] - sum(split.values())
        return {
            "round_ms": ms["round"],
            "stages_ms": {**split, "other": other, "commit_alone": ms.get("commit")},
        }

    def _cost_model(
        self, ceilings: dict[str, Ceilings], runs: Sequence[dict[str, Any]]
    ) -> tuple[cost.Pair, dict[str, Any]]:
        """Constants fitted to forward passes of each model and of both, and their errors."""
        windows = sorted({1, *(length + 1 for length in self.draft_lengths)})
        most = self.max_length - max(windows)
        measured = {}
        for name, model in self.models.items():
            self.say(f"timing forward passes of the {name} for the cost model")
            measured[name] = stages.measure_passes(
                model,
                batches=sorted(set(self.batch_sizes)),
                windows=windows,
                contexts=(most // 4, most // 2, most),
                max_length=self.max_length,
                repeats=self.repeats,
            )
        kinds = " ".join(devices()["kinds"])
        overheads = [
            run["round_ms"] - run["stages_ms"]["target"] - run["stages_ms"]["draft"] for run in runs
        ]
        groups = {"all": [point for points in measured.values() for point in points], **measured}
        fits = {
            name: fit_device(
                points,
                name=f"{kinds} ({name})" if name != "all" else kinds,
                source="fitted by jaxspec bench decode",
                most_bytes_per_s=max(c.bytes_per_s for c in ceilings.values()),
                most_flops_per_s=max(c.matmul_flops_per_s for c in ceilings.values()),
                round_s=max(statistics.median(overheads), 0.0) / 1e3,
            )
            for name, points in groups.items()
        }
        drafter_ms = [run["stages_ms"]["draft"] for run in runs if run["draft_length"]]
        pair = pair_of(
            self.models,
            {name: fits[name].device for name in self.models},
            block=stages.block_read_by(self.target),
            drafter_s=0.0 if "draft" in self.models else statistics.median(drafter_ms) / 1e3,
        )
        return pair, {
            "target": pair.target.to_json(),
            "draft": pair.draft and pair.draft.to_json(),
            "block": pair.block,
            "fits": {name: fit.to_json() for name, fit in fits.items()},
        }

    def _predict(self, pair: cost.Pair, run: dict[str, Any]) -> dict[str, Any]:
        """The cost model's prediction for a run, given the measured acceptance."""
        where = {"batch": run["batch_size"], "context": self.context}
        if run["draft_length"] == 0:
            return {"round_ms": 1e3 * pair.plain_s(**where)}
        return {
            "round_ms": 1e3 * pair.round_s(**where, draft_length=run["draft_length"]),
            "speedup": pair.speed_up(**where, cumulative=run["per_position_acceptance"]),
        }


def positions_per_round(engine: Engine, total: Acceptance) -> dict[str, float]:
    """Token-positions of the target in a round: `live_per_round`, the newest tokens and the drafts
    of running rows, and `computed_per_round`, those that the kernels compute.

    Args:
      engine: one that has just run; its state counts the rounds.
      total: of that run, or of an equal one.
    """
    executor = engine.executor
    schedule = executor.fetch("schedule").schedule
    rows = int(schedule.num_rows) / int(schedule.num_rounds)
    live = computed = rows * (1 + total.num_draft_tokens / total.num_rounds)
    if not executor.parts.skips_padding:
        rounds = engine.rounds_by_draft_length or {engine.draft_length: 1}
        entries = sum(n * executor.verify_length_for(length) for length, n in rounds.items())
        computed = executor.shape.batch_size * entries / sum(rounds.values())
    return {"live_per_round": live, "computed_per_round": computed}


def agreement(
    target: LanguageModel, ours: Sequence[Completion], theirs: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """How many greedy or coupled outputs equal a reference's token ids, and how many diverge from
    it other than at a tie within rounding."""
    params = [SamplingParams(max_tokens=len(done.token_ids), ignore_eos=True) for done in ours]
    found = judge_all(target, ours, theirs, params)
    return found.num_equal, len(found.differing) - found.count(Finding.TIE)
