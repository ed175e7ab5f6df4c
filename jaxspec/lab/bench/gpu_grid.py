"""The GPU grid: published pairs at serving shapes, within a time budget.

Weights are random and an oracle drafts, right at a chosen rate, while the draft model's steps are
run and discarded: speeds are those of the real pair at that acceptance, but texts are meaningless.
Rows start in mid-decode after a context that was never prefilled, which costs the same as any other
context.

The oracle proposes what the same program emits when nothing is drafted, so that it is accepted
exactly where intended, however close to ties random weights come.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.engine.executor import Executor
from jaxspec.kernels.registry import KernelsName
from jaxspec.lab.bench.cells import CellStore
from jaxspec.lab.bench.measure import Say, fill, peak_bytes, random_prompts, run_rounds, tiny_config
from jaxspec.lab.bench.roofline import Ceilings, measure_ceilings, pair_of
from jaxspec.lab.cost import model as cost
from jaxspec.lab.cost.devices import DEVICES
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import PRESETS, random_model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime import environment
from jaxspec.runtime.report import new_figure
from jaxspec.runtime.turns import Turns, take_turns
from jaxspec.schedulers import Static
from jaxspec.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The contents of a grid.

    Attributes:
      pairs: architectures of a target and its draft model, by name.
      places: `(batch size, context)`, the most informative first: all pairs are measured at one
        place before the next.
      acceptances: those of the oracle, per drafted token.
      draft_length: N.
      num_rounds: number of rounds of a timed run.
      dtype: that of parameters, compute and cache.
      ceiling_bytes: working set for measuring the bandwidth.
    """

    pairs: Mapping[str, tuple[ModelConfig, ModelConfig]]
    places: tuple[tuple[int, int], ...]
    acceptances: tuple[float, ...] = (0.6, 0.7, 0.8)
    draft_length: int = 4
    num_rounds: int = 32
    dtype: str = "bfloat16"
    ceiling_bytes: int = 1 << 32

    def cells(self) -> list[dict[str, Any]]:
        """Every cell, in order of importance, with the kernels that can be used here."""
        usable: tuple[KernelsName, ...] = ("xla", "pallas")
        if environment.is_hopper():
            usable = ("xla", "mosaic", "pallas")
        return [
            {"pair": name, "batch_size": place[0], "context": place[1], "kernels": kernels}
            for place, name, kernels in itertools.product(self.places, self.pairs, usable)
        ]


GPU = Plan(
    pairs={
        f"{target} / {draft}": (PRESETS[target], PRESETS[draft])
        for target, draft in (
            ("qwen3-8b", "qwen3-0.6b"),
            ("glm-4-9b", "glm-4-draft-0.6b"),
            ("vicuna-7b", "vicuna-68m"),
        )
    },
    places=((8, 1024), (1, 1024), (8, 8192), (1, 8192), (32, 1024), (32, 8192)),
)
DRY_RUN = Plan(
    pairs={"tiny / tinier": (tiny_config(2), tiny_config(1))},
    places=((2, 100), (1, 300)),
    num_rounds=6,
    ceiling_bytes=1 << 20,
)


def measure_grid(
    plan: Plan,
    destination: pathlib.Path,
    *,
    budget_s: float,
    repeats: int,
    header: Mapping[str, Any],
    resume: bool = False,
    say: Say = lambda message: None,
) -> dict[str, Any]:
    """Measures cells until all are done or the budget is spent; returns the document, which is also
    written after each cell.

    Args:
      plan: what to measure.
      destination: the JSON file.
      budget_s: no cell is started that, judging by the slowest so far, would end later than this.
      repeats: timed runs; medians are reported.
      header: further contents of the document: command, options, versions, devices, commit.
      resume: keep the cells that `destination` holds, and measure the others.
      say: called with a description of the current step.

    Raises:
      SettingError: `destination` cannot be written, or cannot be resumed because it was made with
        other settings, devices or versions.
    """
    grid = CellStore(destination, header=header, resume=resume)
    if "ceilings" not in grid.header:
        say("measuring bandwidth and products")
        found = measure_ceilings(plan.ceiling_bytes, plan.dtype, repeats=repeats)
        grid.header["ceilings"] = dataclasses.asdict(found)
    ceilings = Ceilings(**grid.header["ceilings"])
    loaded: dict[str, dict[str, LanguageModel]] = {}

    def measure_cell(cell: dict[str, Any]) -> dict[str, Any]:
        started_s = time.perf_counter()
        try:
            if cell["pair"] not in loaded:
                loaded.clear()  # before the next pair is made, because two pairs may not fit
                loaded[cell["pair"]] = _models(plan, cell["pair"])
            measured = _measure(plan, cell, loaded[cell["pair"]], ceilings, repeats)
            outcome = {"outcome": "measured", **measured}
        # A failure of the compiler or the device must not affect later cells.
        except Exception as error:
            outcome = _failure(error)
            say(f"{_name(cell)}: {outcome['outcome']}: {error}")
        return {**cell, **outcome, "seconds": time.perf_counter() - started_s}

    cells = {_name(cell): functools.partial(measure_cell, cell) for cell in plan.cells()}
    grid.run(cells, say=say, budget_s=budget_s)
    return grid.document


CELL = ("pair", "batch_size", "context", "kernels")


def _name(cell: Mapping[str, Any]) -> str:
    return " ".join(str(cell[name]) for name in CELL)


def _failure(error: Exception) -> dict[str, str]:
    """The entry for a cell that could not be measured, without the error's message, which may
    contain paths."""
    text = str(error).lower()
    if "resource_exhausted" in text or "out of memory" in text:
        return {"outcome": "out of memory"}
    return {"outcome": "failed", "error": type(error).__name__}


def _models(plan: Plan, pair: str) -> dict[str, LanguageModel]:
    return {
        name: random_model(config, dtype=jnp.dtype(plan.dtype), seed=seed)
        for seed, (name, config) in enumerate(
            zip(("target", "draft"), plan.pairs[pair], strict=True)
        )
    }


def _measure(
    plan: Plan,
    cell: Mapping[str, Any],
    models: Mapping[str, LanguageModel],
    ceilings: Ceilings,
    repeats: int,
) -> dict[str, Any]:
    """Plain and speculative decoding of one cell."""
    batch, context, length = cell["batch_size"], cell["context"], plan.draft_length
    models = {
        name: dataclasses.replace(model, kernels=cell["kernels"]) for name, model in models.items()
    }
    target, draft = models["target"], models["draft"]
    kind = jax.local_devices()[0].device_kind.lower()
    device = next((device for name, device in DEVICES.items() if name in kind.split()), None)
    predicted = device and pair_of(models, dict.fromkeys(models, device))  # by its datasheet
    roofline = pair_of(models, dict.fromkeys(models, ceilings))
    where = {"batch": batch, "context": context}

    def result(rounds: _Rounds, draft_length: int) -> dict[str, Any]:
        turns, emitted = rounds.time(repeats)
        seconds = turns.median_s("rounds")
        ms = 1e3 * seconds / plan.num_rounds
        roofline_ms = 1e3 * roofline.round_s(draft_length=draft_length, **where)
        return {
            "draft_length": draft_length,
            "round_ms": ms,
            "tokens_per_s": emitted / seconds,
            "emitted_per_round": emitted / (plan.num_rounds * batch),
            "roofline_ms": roofline_ms,
            "fraction_of_roofline": roofline_ms / ms,
            "compile_s": rounds.compile_s,
            "program_bytes": rounds.num_bytes,
            "run_s": turns.seconds["rounds"],
        }

    rounds = _Rounds(plan, target, None, batch=batch, context=context)
    plain = result(rounds, 0)
    del rounds  # and with it its cache
    rounds = _Rounds(plan, target, draft, batch=batch, context=context)
    truth = rounds.truth()
    speculative = []
    for acceptance in plan.acceptances:
        rounds.expect(truth, acceptance)
        run = result(rounds, length)
        expected = cost.emitted_per_round(cost.geometric(acceptance, length))
        speculative.append(
            {
                "acceptance": acceptance,
                "expected_emitted_per_round": expected,
                **run,
                "speedup": run["tokens_per_s"] / plain["tokens_per_s"],
                "speedup_at_roofline": run["emitted_per_round"]
                * plain["roofline_ms"]
                / run["roofline_ms"],
                "speedup_predicted": predicted
                and predicted.speed_up_of(run["emitted_per_round"], draft_length=length, **where),
            }
        )
    return {
        "plain": plain,
        "speculative": speculative,
        "peak_bytes_in_process": peak_bytes(),
        "is_beyond_max_length": context > target.config.max_length,
    }


class _Rounds:
    """The rounds of one cell, from a state in mid-decode to which they can be reset."""

    def __init__(
        self,
        plan: Plan,
        target: LanguageModel,
        draft: LanguageModel | None,
        *,
        batch: int,
        context: int,
    ):
        window = plan.draft_length + 1
        self._plan, self._context = plan, context
        self._num_tokens = (plan.num_rounds + 1) * window  # most that a run emits, and one round
        drafter = None
        if draft is not None:
            drafter = Oracle(sequences=((0,),), cost_of=DraftModel(draft))
        self.executor = Executor(
            make_parts(
                target,
                drafter,
                EngineConfig(
                    scheduler=Static(),
                    draft_length=plan.draft_length,
                    batch_size=batch,
                    max_length=context + self._num_tokens + window,
                ),
            )
        )
        if draft is not None:
            self._propose(np.zeros((batch, self.executor.shape.max_length), np.int32))
        params = SamplingParams(max_tokens=self.executor.shape.max_length, ignore_eos=True)
        prompts = random_prompts(target, batch, context)
        fill(self.executor, prompts, params, draft_length=plan.draft_length, reads=False)
        self._start = self.executor.fetch()
        self._restart(plan.draft_length)
        arguments = (self.executor.params, self.executor.state, np.int32(1), np.int32(1))
        self.compile_s = self.executor.programs["run"].compile(*arguments).seconds
        memory = self.executor.lower_run().compile().memory_analysis()
        self.num_bytes = memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes

    def truth(self) -> np.ndarray:
        """`[B, S]` tokens: the context, and its continuation when nothing is drafted."""
        self._restart(0)
        self.executor.run(self._num_tokens)
        return self.executor.fetch("tokens").tokens

    def expect(self, truth: np.ndarray, acceptance: float) -> None:
        """Lets the oracle propose the truth, with each token changed with probability 1 -
        acceptance."""
        is_right = np.random.default_rng(0).random(truth.shape) < acceptance
        wrong = (truth + 1) % self.executor.parts.target.vocab_size
        self._propose(np.where(is_right, truth, wrong).astype(np.int32))

    def _propose(self, table: np.ndarray) -> None:
        params = self.executor.params
        drafter = {**params["drafter"], "table": jnp.asarray(table)}
        self.executor.params = {**params, "drafter": drafter}

    def time(self, repeats: int) -> tuple[Turns[str], int]:
        """Timed runs of `num_rounds` rounds, and the number of tokens that one emits."""
        run = functools.partial(run_rounds, self.executor, self._plan.num_rounds)
        turns = take_turns(
            {"rounds": run},
            repeats,
            num_warm_ups=1,
            prepare=lambda _: self._restart(self._plan.draft_length),
        )
        length = self.executor.fetch("num_committed").num_committed
        return turns, int(np.sum(length - self._context))

    def _restart(self, draft_length: int) -> None:
        """Resets the state; caches are kept, and a run's writes to them are overwritten."""
        start = jax.tree.map(jnp.asarray, self._start)
        now = self.executor.state
        drafter: PyTree = now.drafter
        if drafter:
            every = jnp.arange(start.num_committed.shape[0], dtype=jnp.int32)
            cost = drafter["cost"].replace(num_seen=start.num_committed - 1)
            drafter = {"sequence": every, "cost": cost}
        self.executor.state = start.replace(
            cache=now.cache,
            drafter=drafter,
            draft_limit=jnp.full_like(start.draft_limit, draft_length),
        )
        jax.block_until_ready(self.executor.state)


def plot_grid(document: Mapping[str, Any]) -> Any:
    """A matplotlib figure: round times with their rooflines, and speed-ups with what the rooflines
    allow.

    Raises:
      SettingError: matplotlib is not installed.
    """
    cells = [cell for cell in document["cells"].values() if cell["outcome"] == "measured"]
    height = 2 + 0.35 * max(len(cells), 1)
    figure, (plain, speculative, gains) = new_figure(1, 3, size=(14, height), sharey=True)
    kinds = " ".join(document["devices"]["kinds"])
    figure.suptitle(f"random weights, oracle drafts; {kinds}")
    y = np.arange(len(cells))
    likeliest = [cell["speculative"][-1] for cell in cells]
    for axis, title, runs in (
        (plain, "plain, ms per step", [cell["plain"] for cell in cells]),
        (speculative, "speculative, ms per round", likeliest),
    ):
        axis.barh(y, [run["round_ms"] for run in runs], color="C0", label="measured")
        axis.barh(y, [run["roofline_ms"] for run in runs], height=0.3, color="C1", label="roofline")
        axis.set(title=title, xlim=(0, None))
    plain.legend(loc="upper left", bbox_to_anchor=(0, -0.1))
    for index in range(max((len(cell["speculative"]) for cell in cells), default=0)):
        runs = [cell["speculative"][index] for cell in cells]
        label = f"at acceptance {runs[0]['acceptance']:g}"
        gains.plot([run["speedup"] for run in runs], y, "o", color=f"C{index}", label=label)
        ideal = [run["speedup_at_roofline"] for run in runs]
        gains.plot(ideal, y, "|", color=f"C{index}", markersize=10)
    gains.axvline(1.0, color="black", linewidth=0.5)
    gains.set(title="speed-up over plain", xlim=(0, None))
    gains.plot([], [], "|", color="black", markersize=10, label="were both at their rooflines")
    gains.legend(loc="upper left", bbox_to_anchor=(0, -0.1))
    plain.set_yticks(y, map(_name, cells))
    plain.invert_yaxis()
    return figure
