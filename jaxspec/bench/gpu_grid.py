"""Published pairs at serving shapes, one cell after the other, within a budget of time.

Weights are random and an oracle drafts, right at a chosen rate while the draft model's steps are
run and thrown away: speeds are those of the real pair at that acceptance, texts are nothing.
Rows are put in mid-decode without reading a prompt, after a context of zeros, which costs what
any other context costs.

What the oracle holds for true is what the same program emits when nothing is drafted, so that it
is accepted exactly where it says so, however near to ties random weights come.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.analysis import cost
from jaxspec.bench.roofline import Ceilings, measure_ceilings
from jaxspec.decode.settings import Loop, longest_prompt, make_loop
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.admission import make_admission
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import KernelsName
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.registry import PRESETS, random_model
from jaxspec.requests.requests import make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.environment import provenance
from jaxspec.schedulers import Static
from jaxspec.types import DecodeState, Finish, PyTree
from jaxspec.verifiers import Coupled

Say = Callable[[str], None]
KERNELS: tuple[KernelsName, ...] = ("xla", "pallas")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A target and its draft model, by architecture."""

    name: str
    target: ModelConfig
    draft: ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a suite measures.

    Attributes:
      presets: pairs.
      places: `(batch size, context)`, the most telling first: all pairs are measured at one before
        any is at the next.
      acceptances: of the oracle, per drafted token.
      draft_length: N.
      num_rounds: of a timed run.
      dtype: of parameters, compute and cache.
      ceiling_bytes: working set of the measured bandwidth.
    """

    presets: tuple[Preset, ...]
    places: tuple[tuple[int, int], ...]
    acceptances: tuple[float, ...] = (0.6, 0.7, 0.8)
    draft_length: int = 4
    num_rounds: int = 32
    dtype: str = "bfloat16"
    ceiling_bytes: int = 1 << 32

    def cells(self) -> list[dict[str, Any]]:
        """Every cell, in order of importance."""
        return [
            {
                "pair": preset.name,
                "batch_size": batch_size,
                "context": context,
                "kernels": kernels,
            }
            for (batch_size, context), preset, kernels in itertools.product(
                self.places, self.presets, KERNELS
            )
        ]


def _tiny(num_layers: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=64,
        width=32,
        feed_forward_width=32,
        num_layers=num_layers,
        num_query_heads=4,
        num_kv_heads=2,
        head_size=16,
        max_length=1024,
        norm_epsilon=1e-6,
        rope=RopeConfig(theta=1e4, rotary_size=16),
    )


GPU = Plan(
    presets=tuple(
        Preset(name=f"{target} / {draft}", target=PRESETS[target], draft=PRESETS[draft])
        for target, draft in (
            ("qwen3-8b", "qwen3-0.6b"),
            ("glm-4-9b", "glm-4-draft-0.6b"),
            ("vicuna-7b", "vicuna-68m"),
        )
    ),
    places=((8, 1024), (1, 1024), (8, 8192), (1, 8192), (32, 1024), (32, 8192)),
)
DRY_RUN = Plan(
    presets=(Preset(name="tiny / tinier", target=_tiny(2), draft=_tiny(1)),),
    places=((2, 100), (1, 300)),
    num_rounds=6,
    ceiling_bytes=1 << 20,
)


def run_suite(
    plan: Plan,
    destination: pathlib.Path,
    *,
    budget_s: float,
    repeats: int,
    config: Mapping[str, Any],
    resume: bool = False,
    say: Say = lambda message: None,
) -> dict[str, Any]:
    """Measures cells until all are done or the budget is; the document, also written after each.

    Args:
      plan: what to measure.
      destination: the JSON file; it is replaced whole, never in part.
      budget_s: no cell is begun that, going by the slowest so far, would end later than this.
      repeats: timed runs; medians count.
      config: of the command, for the document.
      resume: keep the cells that `destination` holds, and measure the others.
      say: told what is being done.

    Raises:
      SettingError: `destination` cannot be written; or, to be resumed, it is missing, is no suite's
        document, or is one of other settings, devices or versions.
    """
    started_s = time.perf_counter()
    origin = provenance()
    document = {"command": "bench suite", "config": dict(config), **origin}
    if resume:
        kept = _read(destination)
        for name in ("command", "config", "versions", "devices", "commit"):
            if kept.get(name) != document[name]:
                raise SettingError(
                    f"{destination} was to be resumed, but its {name} is another; run with the "
                    "settings, devices and versions that it was begun with, or write elsewhere."
                )
        document = kept
    else:
        say("measuring bandwidth and products")
        ceilings = measure_ceilings(plan.ceiling_bytes, plan.dtype, repeats=repeats)
        document |= {"ceilings": dataclasses.asdict(ceilings), "cells": []}
        _write(document, destination)
    ceilings = Ceilings(**document["ceilings"])

    presets = {preset.name: preset for preset in plan.presets}
    done = [{name: cell[name] for name in CELL} for cell in document["cells"]]
    waiting = [cell for cell in plan.cells() if cell not in done]
    loaded: dict[str, tuple[LanguageModel, LanguageModel]] = {}
    slowest_s = 0.0
    for index, cell in enumerate(waiting):
        cell_started_s = time.perf_counter()
        if cell_started_s - started_s + slowest_s > budget_s:
            break
        label = " ".join(f"{cell[name]}" for name in CELL)
        say(f"cell {index + 1} of {len(waiting)}: {label}")
        try:
            if cell["pair"] not in loaded:
                loaded.clear()  # before the others are made: two pairs may not fit
                loaded[cell["pair"]] = _models(presets[cell["pair"]], plan)
            measured = _measure(plan, cell, *loaded[cell["pair"]], ceilings, repeats)
            outcome = {"outcome": "measured", **measured}
        # Whatever a compiler or a device cannot do must not cost the cells that come after.
        except Exception as error:
            outcome = _failure(error)
            say(f"{label}: {outcome['outcome']}: {error}")
        seconds = time.perf_counter() - cell_started_s
        slowest_s = max(slowest_s, seconds)
        document["cells"].append({**cell, **outcome, "seconds": seconds})
        document["num_waiting"] = len(waiting) - index - 1
        _write(document, destination)
    return document


CELL = ("pair", "batch_size", "context", "kernels")


def _failure(error: Exception) -> dict[str, str]:
    """What a document says of a cell that could not be measured; messages may hold paths."""
    text = str(error).lower()
    if "resource_exhausted" in text or "out of memory" in text:
        return {"outcome": "out of memory"}
    return {"outcome": "failed", "error": type(error).__name__}


def _models(preset: Preset, plan: Plan) -> tuple[LanguageModel, LanguageModel]:
    target, draft = (
        random_model(config, dtype=jnp.dtype(plan.dtype), seed=seed)
        for seed, config in enumerate((preset.target, preset.draft))
    )
    return target, draft


def _measure(
    plan: Plan,
    cell: Mapping[str, Any],
    target: LanguageModel,
    draft: LanguageModel,
    ceilings: Ceilings,
    repeats: int,
) -> dict[str, Any]:
    """Plain and speculative decoding of one cell."""
    batch, context, length = cell["batch_size"], cell["context"], plan.draft_length
    target = dataclasses.replace(target, kernels=cell["kernels"])
    draft = dataclasses.replace(draft, kernels=cell["kernels"])

    def floor_ms(draft_length: int) -> float:
        passes = [(target, draft_length + 1), *[(draft, 1)] * draft_length]
        works = [
            cost.Pass(
                config=model.config,
                batch=batch,
                window=window,
                context=context + window,
                itemsize=jnp.dtype(model.dtype).itemsize,
            )
            for model, window in passes
        ]
        return 1e3 * sum(ceilings.floor_s(work.num_bytes, work.num_flops) for work in works)

    def result(program: _Program, seconds: Sequence[float], emitted: int, draft_length: int):
        ms = 1e3 * statistics.median(seconds) / plan.num_rounds
        return {
            "draft_length": draft_length,
            "round_ms": ms,
            "tokens_per_s": emitted / statistics.median(seconds),
            "emitted_per_round": emitted / (plan.num_rounds * batch),
            "floor_ms": floor_ms(draft_length),
            "fraction_of_floor": floor_ms(draft_length) / ms,
            "compile_s": program.compile_s,
            "program_bytes": program.num_bytes,
            "run_s": list(seconds),
        }

    plain_program = _Program(plan, target, None, batch=batch, context=context)
    plain = result(plain_program, *plain_program.time(repeats), 0)
    del plain_program  # and with it its cache
    program = _Program(plan, target, draft, batch=batch, context=context)
    truth = program.truth()
    speculative = []
    for acceptance in plan.acceptances:
        program.expect(truth, acceptance)
        run = result(program, *program.time(repeats), length)
        expected = cost.emitted_per_round(cost.geometric(acceptance, length))
        speculative.append(
            {
                "acceptance": acceptance,
                "expected_emitted_per_round": expected,
                **run,
                "speedup": run["tokens_per_s"] / plain["tokens_per_s"],
                "speedup_at_floor": run["emitted_per_round"] * plain["floor_ms"] / run["floor_ms"],
                "speedup_predicted": _predicted(target, draft, cell, run),
            }
        )
    statistics_of_device = jax.local_devices()[0].memory_stats() or {}
    return {
        "plain": plain,
        "speculative": speculative,
        "peak_bytes_in_process": statistics_of_device.get("peak_bytes_in_use"),
        "is_beyond_max_length": context > target.config.max_length,
    }


def _predicted(
    target: LanguageModel,
    draft: LanguageModel,
    cell: Mapping[str, Any],
    run: Mapping[str, Any],
) -> float | None:
    """Speed-up by the cost model, at what the run emitted and with the datasheet's constants; None
    for a device that has none."""
    kind = jax.local_devices()[0].device_kind.lower()
    device = next((device for name, device in cost.DEVICES.items() if name in kind.split()), None)
    if device is None:
        return None
    pair = cost.Pair(
        target=target.config,
        target_device=device,
        draft=draft.config,
        draft_device=device,
        itemsize=jnp.dtype(target.dtype).itemsize,
    )
    where = {"batch": cell["batch_size"], "context": cell["context"]}
    round_s = pair.round_s(**where, draft_length=run["draft_length"])
    return run["emitted_per_round"] * pair.plain_s(**where) / round_s


class _Program:
    """The compiled loop of one cell, with a state in mid-decode that it can be set back to."""

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
        loop = make_loop(
            target,
            drafter,
            verifier=Coupled(),
            scheduler=Static(),
            draft_length=plan.draft_length,
            verify_length=None,
            batch_size=batch,
            max_length=context + self._num_tokens + window,
            prefill_chunk=128,
        )
        self._params: PyTree = target.params
        if draft is not None:
            table = np.zeros((batch, loop.shape.max_length), np.int32)
            self._params = {
                "target": target.params,
                "drafter": {"table": table, "cost": draft.params},
            }
        state = _seated(loop, self._params, context)
        self._start = jax.device_get(state.replace(cache=(), drafter=()))
        self._state = state
        self._restart(plan.draft_length)
        program = Program(
            jax.jit(loop.run, donate_argnums=1),
            f"the decode round of {target.name}, batch {batch}, window {loop.shape.verify_length}",
        )
        arguments = (self._params, self._state, np.int32(1), np.int32(1))
        self.compile_s = program.compile(*arguments).seconds
        self._run = program.lower(*arguments).compile()  # which finds it compiled
        memory = self._run.memory_analysis()
        self.num_bytes = memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes

    def truth(self) -> np.ndarray:
        """`[B, S]` tokens: the context, and what follows it when nothing is drafted."""
        self._restart(0)
        self._advance(self._num_tokens)
        return np.asarray(self._state.tokens)

    def expect(self, truth: np.ndarray, acceptance: float) -> None:
        """Lets the oracle propose the truth, each token of it poisoned with chance 1 -
        acceptance."""
        is_right = np.random.default_rng(0).random(truth.shape) < acceptance
        wrong = (truth + 1) % self._params["target"]["embedding"].shape[0]
        table = np.where(is_right, truth, wrong).astype(np.int32)
        drafter = {**self._params["drafter"], "table": table}
        self._params = {**self._params, "drafter": drafter}

    def time(self, repeats: int) -> tuple[list[float], int]:
        """Seconds of each run of `num_rounds` rounds, and the tokens that a run emits."""
        seconds = []
        for _ in range(repeats + 1):
            self._restart(self._plan.draft_length)
            jax.block_until_ready(self._state)
            started_s = time.perf_counter()
            self._advance(self._plan.num_rounds)
            seconds.append(time.perf_counter() - started_s)
        emitted = int(np.sum(np.asarray(self._state.num_committed) - self._context))
        return seconds[1:], emitted  # the first one warms up

    def _advance(self, num_rounds: int) -> None:
        self._state = self._run(self._params, self._state, np.int32(num_rounds), np.int32(1))
        jax.block_until_ready(self._state.num_committed)

    def _restart(self, draft_length: int) -> None:
        """The state as it began; caches stay, and what a run wrote to them is garbage again."""
        start = jax.tree.map(jnp.asarray, self._start)
        drafter: PyTree = self._state.drafter
        if drafter:
            every = np.arange(start.num_committed.shape[0], dtype=np.int32)
            held = drafter["cost"].replace(num_seen=start.num_committed - 1)
            drafter = {"sequence": jnp.asarray(every), "cost": held}
        self._state = start.replace(
            cache=self._state.cache,
            drafter=drafter,
            draft_limit=jnp.full_like(start.draft_limit, draft_length),
        )


def _seated(loop: Loop, params: PyTree, context: int) -> DecodeState:
    """A state whose rows are all running after `context` random tokens that no one has read."""
    batch_size = loop.shape.batch_size
    prompts = np.random.default_rng(0).integers(0, loop.target.vocab_size, (batch_size, context))
    requests = make_requests(
        prompts.tolist(),
        SamplingParams(max_tokens=loop.shape.max_length, ignore_eos=True),
        loop.target,
        longest=longest_prompt(loop),
    )
    admit = jax.jit(loop.admit, donate_argnums=1)
    state = jax.jit(loop.init)()
    for row, request in enumerate(requests):
        admission = make_admission(
            request, loop, draft_length=loop.shape.verify_length - 1, arrival=row
        )
        state = admit(params, state, np.int32(row), admission)
    return state.replace(finish=jnp.full_like(state.finish, Finish.RUNNING))


def _write(document: Mapping[str, Any], destination: pathlib.Path) -> None:
    """Writes the document whole or not at all."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=destination.parent, suffix=".json", delete=False
        ) as file:
            json.dump(document, file, indent=1)
        os.replace(file.name, destination)
    except OSError as error:
        raise SettingError(
            f"Results cannot be written to {destination} ({error.strerror}); name a file in a "
            "directory that exists."
        ) from error


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        return {**document, "cells": list(document["cells"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{path} was to be resumed, but it is not the document of a suite; leave --resume out "
            "to begin one."
        ) from error


def plot_suite(document: Mapping[str, Any]) -> Any:
    """A matplotlib figure: round times beside their floors, and speed-ups beside what the floors
    allow.

    Raises:
      SettingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError(
            "A plot was asked for, but matplotlib is not installed; install the `analysis` extra."
        ) from error
    cells = [cell for cell in document["cells"] if cell["outcome"] == "measured"]
    height = 2 + 0.35 * max(len(cells), 1)
    figure = Figure(figsize=(14, height), layout="constrained")
    plain, speculative, gains = figure.subplots(1, 3, sharey=True)
    kinds = " ".join(document["devices"]["kinds"])
    figure.suptitle(f"random weights, oracle drafts; {kinds}")
    y = np.arange(len(cells))
    likeliest = [cell["speculative"][-1] for cell in cells]
    for axis, title, runs in (
        (plain, "plain, ms per step", [cell["plain"] for cell in cells]),
        (speculative, "speculative, ms per round", likeliest),
    ):
        axis.barh(y, [run["round_ms"] for run in runs], color="C0", label="measured")
        axis.barh(y, [run["floor_ms"] for run in runs], height=0.3, color="C1", label="floor")
        axis.set(title=title, xlim=(0, None))
    plain.legend(loc="upper left", bbox_to_anchor=(0, -0.1))
    for index in range(max((len(cell["speculative"]) for cell in cells), default=0)):
        runs = [cell["speculative"][index] for cell in cells]
        label = f"at acceptance {runs[0]['acceptance']:g}"
        gains.plot([run["speedup"] for run in runs], y, "o", color=f"C{index}", label=label)
        ideal = [run["speedup_at_floor"] for run in runs]
        gains.plot(ideal, y, "|", color=f"C{index}", markersize=10)
    gains.axvline(1.0, color="black", linewidth=0.5)
    gains.set(title="speed-up over plain", xlim=(0, None))
    gains.plot([], [], "|", color="black", markersize=10, label="were both at their floors")
    gains.legend(loc="upper left", bbox_to_anchor=(0, -0.1))
    names = [" ".join(f"{cell[name]}" for name in CELL) for cell in cells]
    plain.set_yticks(y, names)
    plain.invert_yaxis()
    return figure
