"""The planner: the settings that fit a memory budget at the least cost in speed.

SpecMemo (2506.01986) models the memory of speculative decoding to find how little of it keeps the
speed-up; only its abstract was read, and no coefficient of it is used. Per device

    bytes  = weights + KV of the target + KV of the draft model + buffers + logits + temporaries
    KV     = rows * 2 L K (H b + s) * slots      b bytes per number; s = 4 with scales, else 0
    logits = rows * (N + 1) * V * 4              and rows * N * V * 4 for q, where it is needed

All but the temporaries are read off the decode loop itself, by `jax.eval_shape`. The temporaries
are what XLA says of the compiled programs. Where settings are compared that were not compiled, what
drawing from the logits takes is computed (`engine.memory.Parts.drawing_bytes`), and added to it is
the most that compiled programs needed besides. The chosen settings are compiled; if they take more
than was computed, the choice is made again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from jaxspec.checkpoint.format import parse_dtype
from jaxspec.decode.settings import LARGEST_NUM_SLOTS
from jaxspec.drafters.base import Drafter
from jaxspec.engine.memory import Parts, PlanBytes, bytes_of, in_units, measure_parts
from jaxspec.errors import SettingError
from jaxspec.lab.cost.devices import DEVICES, read_device
from jaxspec.lab.plan.plan import MemoryPlan, PlannedRun, PlanSettings
from jaxspec.lab.plan.request import (
    DescribedDraft,
    PlanRequest,
    Search,
    describe,
    describe_draft,
    find_drafter,
)
from jaxspec.lab.plan.speed import tokens_per_s
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.options import LARGEST_NUMBER, check_between
from jaxspec.runtime.values import check_kind, listed, number, refusal, text, whole_number
from jaxspec.schedulers import Scheduler, SchedulerName, make_scheduler
from jaxspec.verifiers import Verifier, VerifierName, make_verifier

Say: TypeAlias = Callable[[str], None]

MOST_DEVICES = 1024  # that a model is split over
MAX_ATTEMPTS = 8  # settings that are compiled in search of the fastest


def plan_memory(
    target: LanguageModel | ModelConfig | str,
    draft: LanguageModel | ModelConfig | str | None,
    budget_bytes: int,
    *,
    drafter: Drafter | str | Mapping[str, Any] | None = None,
    batch: int = 8,
    context: int = 1024,
    device: str = "h200",
    keep: float = 0.96,
    acceptance: float | Sequence[float] = 0.7,
    window_acceptance: float | Sequence[float] | None = None,
    dtype: str | None = None,
    verifier: Verifier | VerifierName = "coupled",
    scheduler: Scheduler | SchedulerName = "continuous",
    max_logprobs: int | None = None,
    mesh: tuple[int, int] | None = None,
    search: Search | None = None,
    say: Say = lambda stage: None,
) -> MemoryPlan:
    """The settings of an engine that fit into `budget_bytes` at the least cost in speed.

    Of all settings that fit, the fastest by the cost model is found; of those that are predicted to
    keep `keep` of its speed, the one of the fewest bytes is chosen. No array of a model's size is
    made, unless a name has to be loaded.

    Args:
      target: a model, an architecture, or a name; see `lab.plan.request.describe`. With a model
        that is loaded, the bytes are those of an engine on this machine, with its kernels.
      draft: the draft model, likewise; None plans plain decoding, unless there is a drafter.
      budget_bytes: that weights, state and temporaries may take together, per device.
      drafter: what drafts instead of `draft`, as `Engine` takes it: n-grams, heads, FlexDraft, a
        draft model with a tree or other settings, or a drafter of your own. A draft model that is
        named (presets too, as in `draft_model:qwen3-0.6b`) is planned like `draft`, with what the
        name says; everything else is planned as it is. Draft lengths of a tree are numbers of
        nodes.
      batch: rows wanted at a time, over all devices; fewer are tried too, if the budget is small.
      context: tokens of a request, prompt and output; speeds are predicted as if half of them were
        the prompt's.
      device: a key of `DEVICES` (datasheet values), or the file of a document that `jaxspec
        bench decode` wrote on this machine (fitted values).
      keep: share of the fastest plan's predicted speed that must be kept, above 0 and at most 1.
      acceptance: chance that a drafted token is accepted, alike at every position; or measured
        chances that at least 1, 2, ... are, of a tree the chances that its first, second, ... node
        is (`accepted_node` over the rounds). It is taken to be the same for every dtype of the
        draft model's KV.
      window_acceptance: that of a draft model which keeps a window of its KV; None takes it to be
        `acceptance`. `jaxspec compare` measures both.
      dtype: of the target's weights; by default that of a model that is given. A name has the dtype
        that it is loaded in, or bfloat16 if the plan is for another device; a preset float32 on a
        CPU, otherwise bfloat16.
      verifier: decides whether the drafts' distributions are kept.
      scheduler: decides how many rows wait besides the batch.
      max_logprobs: that of the engine; its buffers, and the program that scores prompts, count too.
      mesh: sizes of the axes (data, model); None is one device. Programs are compiled only if JAX
        has as many devices, which may be virtual.
      search: which settings are tried.
      say: called with what is being done.

    Raises:
      SettingError: nothing fits (the message has the smallest budget that does, and its settings);
        an argument out of range; a mesh that does not fit the target (the message has those that
        do).
    """
    budget_bytes = whole_number("budget_bytes", budget_bytes, least=1, most=LARGEST_NUMBER)
    batch = whole_number("batch", batch, least=1)
    context = whole_number("context", context, least=2)
    if max_logprobs is not None:
        max_logprobs = whole_number("max_logprobs", max_logprobs, least=0)
    check_between("batch * context", batch * context, 1, LARGEST_NUM_SLOTS)
    keep = number("keep", keep, above=0, most=1, expected="above 0 and at most 1")
    acceptance, mesh = _as_acceptance("acceptance", acceptance), _as_mesh(mesh)
    if window_acceptance is not None:
        window_acceptance = _as_acceptance("window_acceptance", window_acceptance)
    device = text("device", device)
    dtype = None if dtype is None else parse_dtype(dtype).name
    if not callable(say):
        raise refusal("say", say, "a function of a text")
    search = Search() if search is None else search
    check_kind("search", search, Search, "a Search of settings, or None")
    for draft_length in search.draft_lengths or ():
        check_between("draft_lengths", draft_length, 0, context)
    verifier, scheduler = make_verifier(verifier), make_scheduler(scheduler)
    if drafter is not None and draft is not None:
        raise SettingError("Both a draft model and a drafter were given; plan with one of them.")
    find_devices = read_device(device)
    described = describe(target)
    drafting = None if draft is None else DescribedDraft(model=describe(draft))
    if drafter is not None:
        drafting = describe_draft(drafter)
    request = PlanRequest(
        target=described,
        draft=None if drafting is None else drafting.model,
        draft_options={} if drafting is None else drafting.options,
        batch=batch,
        context=context,
        is_datasheet=device in DEVICES,
        find_devices=find_devices,
        acceptance=acceptance,
        window_acceptance=window_acceptance,
        given_dtype=dtype,
        verifier=verifier,
        scheduler=scheduler,
        max_logprobs=max_logprobs,
        mesh=mesh,
        search=search if drafting is None else dataclasses.replace(search, **drafting.fixed),
    )
    if drafter is not None and drafting is None:
        found = find_drafter(drafter, described, request.dtype)
        given = (
            json.dumps(drafter)
            if isinstance(drafter, Mapping)
            else getattr(drafter, "name", drafter)
        )
        request = dataclasses.replace(request, drafter=found, given=given)
    if request.drafts_trees and isinstance(acceptance, (int, float)):
        name = "draft_model" if request.drafter is None else request.drafter.name
        raise SettingError(
            f"An acceptance of {acceptance:g} was given for the tree of {name}, "
            "whose nodes are not alike; give the measured chances of its nodes, in their order."
        )
    request.check_mesh()
    return Planner(request=request, say=say).plan(budget_bytes, keep=keep)


def _as_acceptance(name: str, acceptance: Any) -> float | tuple[float, ...]:
    """One chance, or one for each position.

    Raises:
      SettingError: one of them is not a probability.
    """
    expected = "a probability, or one for each position"

    def chance(value: Any) -> float:
        return number(name, value, least=0, most=1, expected=expected)

    if getattr(acceptance, "shape", ()) == () and not isinstance(acceptance, Iterable):
        return chance(acceptance)
    if not (chances := tuple(map(chance, listed(name, acceptance)))):
        raise refusal(name, acceptance, expected)
    return chances


def _as_mesh(mesh: Any) -> tuple[int, int]:
    """The sizes of the axes `data` and `model`; of one device for None.

    Raises:
      SettingError: these are not two whole numbers of at least 1, or too many devices.
    """
    sizes = (1, 1) if mesh is None else listed("mesh", mesh)
    if len(sizes) != 2:
        raise refusal("mesh", mesh, "two whole numbers, of the axes data and model")
    data, model = (whole_number("mesh", size, least=1) for size in sizes)
    check_between("data * model of the mesh", data * model, 1, MOST_DEVICES)
    return data, model


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Planner:
    """Chooses settings.

    Attributes:
      request: what is planned for.
      say: called with what is being done.
      compiled: what settings take whose programs were compiled.
    """

    request: PlanRequest
    say: Say
    compiled: dict[PlanSettings, PlanBytes] = dataclasses.field(default_factory=dict)

    @functools.cache  # noqa: B019
    def parts(self, settings: PlanSettings) -> Parts:
        """Where the bytes of settings are."""
        return measure_parts(self.request.loop(settings))

    def bytes_of(self, settings: PlanSettings) -> PlanBytes:
        """Memory of a candidate: compiled, or else computed."""
        if settings in self.compiled:
            return self.compiled[settings]
        further = [each.added_bytes - each.parts.round_bytes for each in self.compiled.values()]
        parts = self.parts(settings)
        return PlanBytes(parts=parts, added_bytes=parts.round_bytes + max([0, *further]))

    def compile(self, settings: PlanSettings) -> PlanBytes:
        """Memory of a candidate, from its compiled programs; only computed if JAX lacks the devices
        of the mesh."""
        if settings not in self.compiled:
            found = self.bytes_of(settings)
            if settings.num_devices <= len(jax.local_devices()):
                self.say(f"compiling {settings.sentence}")
                loop = self.request.loop(settings, dtype=self._programs_dtype)
                found = dataclasses.replace(bytes_of(loop), parts=self.parts(settings))
            self.compiled[settings] = found
        return self.compiled[settings]

    @property
    def _programs_dtype(self) -> str | None:
        """The dtype in which programs are compiled: the models' own, or, for a device of another
        kind, float32. XLA:CPU turns whole weights in fewer bytes into float32 ones, a GPU does not.
        The parameters of a drafter that is planned as it is keep their dtype."""
        drafter = self.request.drafter
        is_fixed = drafter is not None and bool(jax.tree.leaves(drafter.params))
        return None if self.request.is_here or is_fixed else "float32"

    def plan(self, budget_bytes: int, *, keep: float) -> MemoryPlan:
        """See `plan_memory`."""
        candidates = list(self.request.candidates())
        if not candidates:
            raise SettingError(
                f"There is nothing to choose from: {self.request.batch} rows on a mesh of "
                f"{self.request.mesh} with these settings; give at least one draft length and a "
                "batch that the data axis divides."
            )
        self._check_weights(candidates, budget_bytes)
        self.say(f"comparing {len(candidates)} settings")
        speeds = {each: tokens_per_s(self.request, each) for each in candidates}

        def runs_of(candidates: Iterable[PlanSettings]) -> list[PlannedRun]:
            return [
                PlannedRun(settings=each, bytes=self.bytes_of(each), tokens_per_s=speeds[each])
                for each in candidates
            ]

        for _ in range(MAX_ATTEMPTS):
            chosen = choose(runs_of(candidates), budget_bytes, keep=keep)
            if chosen is None or chosen.settings in self.compiled:
                break
            self.compile(chosen.settings)
        else:
            chosen = None
        if chosen is None:  # of what is computed, so it is found out what the least takes
            least = self._least(candidates)
            chosen = choose(runs_of(self.compiled), budget_bytes, keep=keep)
            if chosen is None:
                needed = self.compiled[least].total_bytes
                raise SettingError(
                    f"A budget of {in_units(budget_bytes)} ({budget_bytes} bytes) was given; the "
                    f"smallest that works is {in_units(needed)} ({needed} bytes), with "
                    f"{least.sentence}."
                )
        return self._plan_of(chosen, runs_of(candidates), budget_bytes, keep=keep)

    def _least(self, candidates: Sequence[PlanSettings]) -> PlanSettings:
        """The settings that take the fewest bytes, after compiling all that might.

        Fewer rows and shorter drafts never take more, so of settings that are otherwise alike only
        the fewest are compiled; and of these, only those that take less without temporaries than
        the least with them.
        """
        fewest: dict[tuple, PlanSettings] = {}
        for each in sorted(candidates, key=lambda each: (each.draft_length, each.batch_size)):
            if (each.kv_dtype,) not in fewest:
                window = (each.draft_kv_window,) if each.draft_length else ()
                fewest.setdefault((each.kv_dtype, *window), each)

        def at_least(settings: PlanSettings) -> int:
            parts = self.parts(settings)
            return parts.weights_bytes + parts.state_bytes

        first, *others = sorted(fewest.values(), key=at_least)
        least, total = first, self.compile(first).total_bytes
        for each in others:
            if at_least(each) < total and self.compile(each).total_bytes < total:
                least, total = each, self.compile(each).total_bytes
        return least

    def _plan_of(
        self, chosen: PlannedRun, runs: Sequence[PlannedRun], budget_bytes: int, *, keep: float
    ) -> MemoryPlan:
        fitting = [
            run
            for run in runs
            if run.bytes.total_bytes <= budget_bytes
            and (chosen.settings.changes_output or not run.settings.changes_output)
        ]
        request = self.request
        return MemoryPlan(
            target=request.target.name,
            draft=None if request.draft is None else request.draft.name,
            draft_options=request.draft_options,
            drafter=request.given,
            dtype=request.dtype,
            draft_dtype=request.draft_dtype,
            device=request.devices[0].name,
            platform=jax.default_backend() if request.is_here else "gpu",
            scheduler=request.scheduler.name,
            max_logprobs=request.max_logprobs,
            verifier=request.verifier.name,
            budget_bytes=budget_bytes,
            keep=keep,
            chosen=chosen,
            fastest=max(fitting, key=lambda run: run.tokens_per_s),
            num_candidates=len(runs),
            remarks=self._remarks(chosen),
        )

    def _remarks(self, chosen: PlannedRun) -> tuple[str, ...]:
        request, settings = self.request, chosen.settings
        of_target, _, _ = request.devices
        found = [f"Speeds are predictions for {of_target.name}: {of_target.source}."]
        if chosen.bytes.programs:
            found.append(
                "The chosen plan's temporaries are those of its compiled programs; those of "
                "another plan are computed."
            )
        else:
            found.append(
                "Temporaries are computed, and the programs were not compiled: "
                f"{settings.num_devices} devices are needed, and JAX has "
                f"{len(jax.local_devices())}."
            )
        if not request.is_here:
            found.append(
                f"Temporaries are XLA's figures for the same programs on {jax.default_backend()} "
                "in float32; those of the device itself may differ. An engine with these settings "
                f"on this machine ({jax.default_backend()}) may take more than the budget."
            )
        elif request.is_loaded and request.is_datasheet:
            found.append(
                f"The bytes are those of an engine on this machine ({jax.default_backend()}), "
                "where the target is loaded; name the target to plan for another device."
            )
        if settings.num_devices > 1:
            found.append("What devices of the model axis exchange is not in the prediction.")
        if settings.changes_output:
            if None in request.search.kv_dtypes:
                found.append("Nothing fits with the target's KV in its own dtype.")
            found.append(
                f"Rounding the target's KV to {settings.kv_dtype} changes the output a little, of "
                "plain and speculative decoding alike; `jaxspec audit` says how much."
            )
        if not settings.draft_length:
            return tuple(found)
        if request.drafter is not None:
            found.append("Drafting is taken to cost no more than reading the drafter's weights.")
        if settings.draft_kv_window and request.window_acceptance is None:
            found.append(
                "The acceptance is taken to be that of a draft model with all of its KV; measure "
                "it with `jaxspec compare` and give it as --window-acceptance."
            )
        return tuple(found)

    def _check_weights(self, candidates: Sequence[PlanSettings], budget_bytes: int) -> None:
        """Raises `SettingError` if the budget is below the weights of all settings."""
        needed = min(self.parts(each).weights_bytes for each in candidates)
        if needed > budget_bytes:
            raise SettingError(
                f"A budget of {in_units(budget_bytes)} was given, and the weights alone take "
                f"{in_units(needed)} per device in {self.request.dtype}; plan for a dtype of fewer "
                "bytes, for a mesh with a larger model axis, or with a smaller model."
            )


def choose(runs: Sequence[PlannedRun], budget_bytes: int, *, keep: float) -> PlannedRun | None:
    """Of the runs that fit, the one of the fewest bytes that keeps `keep` of the best speed; None
    if none fits. Those that change the output count only where no other fits."""
    fitting = [run for run in runs if run.bytes.total_bytes <= budget_bytes]
    fitting = [run for run in fitting if not run.settings.changes_output] or fitting
    if not fitting:
        return None
    best = max(run.tokens_per_s for run in fitting)
    fast = [run for run in fitting if run.tokens_per_s >= keep * best]
    return min(fast, key=_by_bytes)


def _by_bytes(run: PlannedRun) -> tuple[int, float]:
    """Order of runs: the fewest bytes first, of equals the fastest."""
    return run.bytes.total_bytes, -run.tokens_per_s
