"""The planner: the settings that fit a memory budget at the least cost in speed.

SpecMemo (2506.01986) models the memory of speculative decoding to find how little of it keeps the
speed-up; only its abstract was read, and no coefficient of it is used. Per device

    bytes  = weights + KV of the target + KV of the draft model + buffers + logits + temporaries
    KV     = rows * 2 L K (H b + s) * slots      b bytes per number; s = 4 with scales, else 0
    logits = rows * (N + 1) * V * 4              and rows * N * V * 4 for q, where it is needed

All but the temporaries are read off the decode loop itself, by `jax.eval_shape`. The temporaries
are what XLA says of the compiled programs. While many settings are compared, they are estimated
from short programs (two layers, two sizes); those of the chosen settings are then compiled.

The planner stands in this room, because what it maximises is a prediction of `analysis.cost`.
`engine.plan` has the records.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxspec.analysis import cost
from jaxspec.analysis.baseline import baseline_bytes
from jaxspec.cache.pages import BLOCK, KvDtype, round_up_to_block
from jaxspec.checkpoint.format import parse_dtype
from jaxspec.checkpoint.resolve import load_model
from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.settings import check_at_least_one, make_loop
from jaxspec.decode.sharded import DATA, MODEL, ShardedLoop
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.memory import Parts, in_units, measure_parts
from jaxspec.engine.plan import (
    MemoryPlan,
    PlanBytes,
    PlannedRun,
    PlanSettings,
    ProgramBytes,
    Source,
    compile_programs,
)
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import PRESETS
from jaxspec.models.shapes import ShapeModel, shape_model, shortened
from jaxspec.schedulers import Scheduler, SchedulerName, make_scheduler
from jaxspec.verifiers import Verifier, VerifierName, make_verifier

Compiles: TypeAlias = Literal["whole", "short"]
Say: TypeAlias = Callable[[str], None]

SHORT_LAYERS = 2  # of each model, where programs are compiled to estimate temporaries
MAX_ATTEMPTS = 8  # settings that are compiled before the planner gives up
DEFAULT_CHUNK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Which settings are tried; see `PlanSettings`. One value each fixes a setting.

    Attributes:
      draft_lengths: 0 is plain decoding.
      kv_dtypes: of the target's KV. Another dtype than the model's changes the output, so it is
        chosen only where nothing else fits, unless it is the only one.
      draft_kv_dtypes: of the draft model's KV.
      draft_kv_windows: tokens whose KV the draft model keeps; those that the context does not fill
        are left out.
      draft_dtypes: of the draft model's weights; empty for the target's dtype.
      prefill_chunks: tokens per call.
    """

    draft_lengths: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    kv_dtypes: tuple[KvDtype | None, ...] = (None, "int8")
    draft_kv_dtypes: tuple[KvDtype | None, ...] = (None, "int8")
    draft_kv_windows: tuple[int | None, ...] = (None, 512)
    draft_dtypes: tuple[str, ...] = ()
    prefill_chunks: tuple[int, ...] = (64, 128, 256, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A model as the planner knows it.

    Attributes:
      name: as `load_model` takes it.
      config: architecture.
      dtype: of a model that is loaded; None where the plan chooses it.
      kernels: likewise.
    """

    name: str
    config: ModelConfig
    dtype: str | None = None
    kernels: KernelsName | None = None


def describe(model: LanguageModel | ModelConfig | str) -> Described:
    """What is planned for: a model, an architecture, the name of a preset with or without `random:`
    (no weights are made), or any other name that `load_model` takes."""
    if isinstance(model, ModelConfig):
        return Described(name=model.family, config=model)
    if isinstance(model, str):
        preset = model.removeprefix("random:")
        if preset in PRESETS:
            return Described(name=f"random:{preset}", config=PRESETS[preset])
        loaded = load_model(model)
        return Described(name=model, config=loaded.config)
    return Described(
        name=model.name, config=model.config, dtype=model.dtype.name, kernels=model.kernels
    )


def plan_memory(
    target: LanguageModel | ModelConfig | str,
    draft: LanguageModel | ModelConfig | str | None,
    budget_bytes: int,
    *,
    batch: int = 8,
    context: int = 1024,
    prompt_tokens: int | None = None,
    device: str = "h200",
    keep: float = 0.96,
    acceptance: float | Sequence[float] = 0.7,
    dtype: str | None = None,
    verifier: Verifier | VerifierName = "coupled",
    scheduler: Scheduler | SchedulerName = "continuous",
    mesh: tuple[int, int] | None = None,
    num_devices: int = 1,
    search: Search | None = None,
    compiles: Compiles = "whole",
    say: Say = lambda stage: None,
) -> MemoryPlan:
    """The settings of an engine that fit into `budget_bytes` at the least cost in speed.

    Of all settings that fit, the fastest by the cost model is found; of those that are predicted to
    keep `keep` of its speed, the one of the fewest bytes is chosen. No array of a model's size is
    made, unless a name has to be loaded.

    Args:
      target: a model, an architecture, or a name; see `describe`.
      draft: the draft model, likewise; None plans plain decoding.
      budget_bytes: that weights, state and temporaries may take together, per device.
      batch: rows wanted at a time, over all devices; fewer are tried too, if the budget is small.
      context: tokens of a request, prompt and output.
      prompt_tokens: of these, the prompt's; by default half of them.
      device: a key of `cost.DEVICES` (datasheet values), or the file of a document that `jaxspec
        bench decode` wrote on this machine (fitted values).
      keep: share of the fastest plan's predicted speed that must be kept, above 0 and at most 1.
      acceptance: chance that a drafted token is accepted, alike at every position; or measured
        chances that at least 1, 2, ... are. It is taken to be the same for every dtype and window
        of the draft model's KV.
      dtype: of the target's weights; by default that of a model that is given, float32 on a CPU,
        otherwise bfloat16.
      verifier: decides whether the drafts' distributions are kept.
      scheduler: decides how many rows wait besides the batch.
      mesh: (data, model) axes, per data shard and within it; by default `num_devices` are split in
        every way that the target allows.
      num_devices: over which a plan may split rows and models.
      search: which settings are tried.
      compiles: `whole`: the chosen settings' programs; `short`: their first two layers only, which
        takes seconds for any model.
      say: called with what is being done.

    Raises:
      SettingError: nothing fits (the message has the smallest budget that does, and its settings);
        an argument out of range; a mesh that does not fit the target (the message has those that
        do).
    """
    check_at_least_one(
        budget_bytes=budget_bytes, batch=batch, context=context, num_devices=num_devices
    )
    if not 0 < keep <= 1:
        raise SettingError(f"keep {keep:g} was given; it is a share, above 0 and at most 1.")
    prompt_tokens = max(context // 2, 1) if prompt_tokens is None else prompt_tokens
    if not 1 <= prompt_tokens < context:
        raise SettingError(
            f"{prompt_tokens} prompt tokens were given for a context of {context}; give at least "
            "1, and fewer than the context."
        )
    planner = Planner(
        target=describe(target),
        draft=None if draft is None else describe(draft),
        batch=batch,
        context=context,
        prompt_tokens=prompt_tokens,
        device=device,
        acceptance=acceptance,
        given_dtype=dtype,
        verifier=make_verifier(verifier),
        scheduler=make_scheduler(scheduler),
        mesh=mesh,
        num_devices=num_devices,
        search=Search() if search is None else search,
        say=say,
    )
    return planner.plan(budget_bytes, keep=keep, compiles=compiles)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Planner:
    """What a plan is made for; see `plan_memory`."""

    target: Described
    draft: Described | None
    batch: int
    context: int
    prompt_tokens: int
    device: str
    acceptance: float | Sequence[float]
    given_dtype: str | None
    verifier: Verifier
    scheduler: Scheduler
    mesh: tuple[int, int] | None
    num_devices: int
    search: Search
    say: Say

    # What is planned for.

    @property
    def is_here(self) -> bool:
        """Whether the device is this machine's, so that its programs can be compiled as they will
        run."""
        return self.device not in cost.DEVICES or jax.default_backend() == "gpu"

    @property
    def dtype(self) -> str:
        """Of the target's weights."""
        default = "float32" if self.is_here and jax.default_backend() == "cpu" else "bfloat16"
        return parse_dtype(self.given_dtype or self.target.dtype or default).name

    @functools.cached_property
    def meshes(self) -> list[tuple[int, int]]:
        """(data, model) axes to be tried.

        Raises:
          SettingError: the one that was asked for does not fit the target.
        """
        if self.mesh is None:
            allowed = model_axes(self.target.config, self.num_devices)
            return [
                (self.num_devices // model, model)
                for model in allowed
                if self.num_devices % model == 0
            ]
        data, model = self.mesh
        check_at_least_one(data=data, model=model)
        try:
            decoder.param_specs(self.target.config, model)
        except SettingError as error:
            allowed = ", ".join(map(str, model_axes(self.target.config, data * model)))
            raise SettingError(f"{error} Up to {data * model} devices, {allowed} work.") from error
        return [(data, model)]

    def candidates(self) -> Iterator[PlanSettings]:
        """All settings to be tried."""
        search, batches = self.search, sorted({*doubling(self.batch)})
        longest = None if isinstance(self.acceptance, (int, float)) else len(tuple(self.acceptance))
        for (data, model), batch, draft_length, chunk in itertools.product(
            self.meshes, batches, search.draft_lengths, search.prefill_chunks
        ):
            if batch % data or (draft_length and self.draft is None):
                continue
            if longest is not None and draft_length > longest:
                continue
            max_length = round_up_to_block(self.context + draft_length + 1)
            shared: dict[str, Any] = {
                "batch_size": batch,
                "max_length": max_length,
                "draft_length": draft_length,
                "prefill_chunk": chunk,
                "num_data_shards": data,
                "num_model_shards": model,
            }
            for kv_dtype, of_draft in itertools.product(
                search.kv_dtypes, self._draft_settings(draft_length, max_length)
            ):
                yield PlanSettings(kv_dtype=kv_dtype, **shared, **of_draft)

    def _draft_settings(self, draft_length: int, max_length: int) -> Iterator[dict[str, Any]]:
        if self.draft is None or not draft_length:
            yield {"draft_dtype": self.dtype}
            return
        search = self.search
        dtypes = search.draft_dtypes or (self.draft.dtype or self.dtype,)
        for dtype, kv_dtype, window in itertools.product(
            dtypes, search.draft_kv_dtypes, search.draft_kv_windows
        ):
            if window is None or window + BLOCK < max_length:
                yield {
                    "draft_dtype": parse_dtype(dtype).name,
                    "draft_kv_dtype": kv_dtype,
                    "draft_kv_window": window,
                }

    # Bytes.

    def loop(
        self,
        settings: PlanSettings,
        *,
        num_layers: int | None = None,
        dtype: str | None = None,
        on: Any = None,
    ) -> DecodeLoop | ShardedLoop:
        """The decode loop of an engine with these settings, of shapes only.

        Args:
          settings: of the engine.
          num_layers: of each model at most.
          dtype: of all weights, instead of the settings'.
          on: a mesh; by default one without devices, of the settings' axes.
        """
        loop = self._loop(settings, num_layers, dtype)
        if settings.num_devices == 1:
            return loop
        if on is None:
            axes = (settings.num_data_shards, settings.num_model_shards)
            on = AbstractMesh(axes, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))
        return ShardedLoop(loop=loop, mesh=on)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _loop(
        self, settings: PlanSettings, num_layers: int | None, dtype: str | None
    ) -> DecodeLoop:
        target = self._model(
            self.target, dtype or self.dtype, settings, num_layers, kv_dtype=settings.kv_dtype
        )
        drafter = None
        if settings.draft_length and self.draft is not None:
            draft = self._model(self.draft, dtype or settings.draft_dtype, settings, num_layers)
            drafter = DraftModel(draft, **settings.options_of("drafter"))
        return make_loop(
            target,
            drafter,
            verifier=self.verifier if settings.draft_length else make_verifier("coupled"),
            scheduler=self.scheduler,
            draft_length=settings.draft_length,
            verify_length=None,
            batch_size=settings.batch_size // settings.num_data_shards,
            max_length=settings.max_length,
            prefill_chunk=settings.prefill_chunk,
        )

    def _model(
        self,
        model: Described,
        dtype: str,
        settings: PlanSettings,
        num_layers: int | None,
        *,
        kv_dtype: KvDtype | None = None,
    ) -> ShapeModel:
        config = model.config if num_layers is None else shortened(model.config, num_layers)
        kernels: KernelsName = "xla"
        if self.is_here and settings.num_model_shards == 1:
            kernels = model.kernels or default_kernels()
        return shape_model(
            config,
            name=model.name,
            dtype=parse_dtype(dtype),
            kernels=kernels,
            is_packed=self.is_here,
            kv_dtype=kv_dtype,
        )

    def _parts(self, settings: PlanSettings) -> Parts:
        """Where the bytes are. The chunk changes only the pages of a draft model's window of KV."""
        if settings.draft_kv_window is None:
            settings = dataclasses.replace(settings, prefill_chunk=DEFAULT_CHUNK)
        return self._parts_at_chunk(settings)

    @functools.cache  # noqa: B019
    def _parts_at_chunk(self, settings: PlanSettings) -> Parts:
        return measure_parts(self.loop(settings))

    @functools.cached_property
    def _programs_dtype(self) -> str | None:
        """In which programs are compiled: as they are, or, for a device of another kind, in
        float32. XLA:CPU turns whole weights in fewer bytes into float32 ones, a GPU does not."""
        return None if self.is_here else "float32"

    def programs(self, settings: PlanSettings, compiles: Compiles) -> tuple[ProgramBytes, ...]:
        """The compiled programs of these settings; those of a mesh need its devices."""
        num_layers = SHORT_LAYERS if compiles == "short" else None
        mesh = None
        if settings.num_devices > 1:
            axes = (settings.num_data_shards, settings.num_model_shards)
            mesh = jax.make_mesh(
                axes,
                (DATA, MODEL),
                axis_types=(AxisType.Auto, AxisType.Auto),
                devices=jax.devices()[: settings.num_devices],
            )
        loop = self.loop(settings, num_layers=num_layers, dtype=self._programs_dtype, on=mesh)
        return compile_programs(loop)

    @functools.cached_property
    def _estimate(self) -> Estimate:
        """Temporaries of one device, from short programs of two sizes."""
        candidates = list(self.candidates())
        longest = max(candidates, key=lambda each: (each.draft_length, each.batch_size))
        chunks = sorted({each.prefill_chunk for each in candidates})
        small = dataclasses.replace(longest, batch_size=1, prefill_chunk=chunks[0])
        large = dataclasses.replace(longest, batch_size=4, prefill_chunk=max(2 * chunks[0], 128))
        points = []
        for settings in (small, large):
            one = dataclasses.replace(settings, num_data_shards=1, num_model_shards=1)
            self.say(f"compiling short programs of {one.sentence}")
            rounds, prefill = self.programs(one, "short")
            points.append((one, rounds.added_bytes, prefill.added_bytes))
        return Estimate.through(*points)

    # Speed.

    @functools.cached_property
    def _devices(self) -> tuple[cost.Device, cost.Device, int | None]:
        draft = None if self.draft is None else self.draft.config
        return cost.find_devices(self.device, self.target.config, draft)

    def _devices_of(self, settings: PlanSettings) -> tuple[cost.Device, cost.Device, int | None]:
        """Those of a data shard, each as one; a draft model that they cannot split is on each."""
        of_target, of_draft, block = self._devices
        model = settings.num_model_shards
        splits_draft = self.draft is not None and model in model_axes(self.draft.config, model)
        return (
            cost.split(of_target, model),
            cost.split(of_draft, model) if splits_draft else of_draft,
            block,
        )

    def pair(self, settings: PlanSettings) -> cost.Pair:
        """The cost model of one data shard."""
        of_target, of_draft, block = self._devices_of(settings)
        draft = self.draft.config if self.draft is not None and settings.draft_length else None
        itemsize, draft_itemsize = (
            jnp.dtype(each).itemsize for each in (self.dtype, settings.draft_dtype)
        )
        return cost.Pair(
            target=self.target.config,
            target_device=of_target,
            draft=draft,
            draft_device=of_draft,
            itemsize=itemsize,
            block=block,
            draft_itemsize=draft_itemsize,
            kv_itemsize=kv_itemsize(self.target.config, settings.kv_dtype, itemsize),
            draft_kv_itemsize=(
                draft and kv_itemsize(draft, settings.draft_kv_dtype, draft_itemsize)
            ),
            draft_context=settings.draft_kv_window,
        )

    def speeds(self, settings: PlanSettings) -> tuple[float, float]:
        """Predicted tokens per second with and without prompts; see `PlannedRun`."""
        pair, draft_length = self.pair(settings), settings.draft_length
        of_target, of_draft, _ = self._devices_of(settings)
        rows = settings.batch_size // settings.num_data_shards
        num_output = self.context - self.prompt_tokens
        where: dict[str, Any] = {"batch": rows, "context": self.prompt_tokens + num_output / 2}
        emitted, round_s = 1.0, pair.plain_s(**where)
        if draft_length:
            chances = self.acceptance
            if isinstance(chances, (int, float)):
                chances = cost.geometric(chances, draft_length)
            emitted = cost.emitted_per_round(tuple(chances)[:draft_length])
            round_s = pair.round_s(draft_length=draft_length, **where)
        chunk = cost.Pass(
            config=pair.target,
            batch=1,
            window=settings.prefill_chunk,
            context=self.prompt_tokens / 2 + settings.prefill_chunk,
            itemsize=pair.itemsize,
            block=pair.block,
            kv_itemsize=pair.kv_itemsize,
        )
        chunk_s = of_target.pass_s(_WithoutHead(chunk))
        if pair.draft is not None:
            draft_chunk = dataclasses.replace(
                chunk,
                config=pair.draft,
                itemsize=pair.draft_itemsize or pair.itemsize,
                kv_itemsize=pair.draft_kv_itemsize,
            )
            chunk_s += of_draft.pass_s(_WithoutHead(draft_chunk))
        prefill_s = math.ceil(self.prompt_tokens / settings.prefill_chunk) * chunk_s
        decode_s = num_output / emitted * round_s
        in_all = rows * num_output / (rows * prefill_s + decode_s)
        return (
            settings.num_data_shards * in_all,
            settings.num_data_shards * rows * emitted / round_s,
        )

    # The choice.

    def plan(self, budget_bytes: int, *, keep: float, compiles: Compiles) -> MemoryPlan:
        """See `plan_memory`."""
        candidates = list(self.candidates())
        if not candidates:
            raise SettingError(
                f"There is nothing to choose from: {self.batch} rows on {self.num_devices} devices "
                "with these settings; give at least one draft length and a batch that the data "
                "axis divides."
            )
        self._check_weights(candidates, budget_bytes)
        self.say(f"comparing {len(candidates)} settings")
        speeds = {each: self.speeds(each) for each in candidates}
        compiled: dict[PlanSettings, tuple[PlanBytes, tuple[ProgramBytes, ...]]] = {}
        for _ in range(MAX_ATTEMPTS):
            correction = self._correction(compiled)
            runs = [
                PlannedRun(
                    settings=each,
                    bytes=(
                        compiled[each][0]
                        if each in compiled
                        else self._estimated(each, correction=correction)
                    ),
                    tokens_per_s=speeds[each][0],
                    decode_tokens_per_s=speeds[each][1],
                )
                for each in candidates
            ]
            chosen = choose(runs, budget_bytes, keep=keep)
            wanted = smallest(runs) if chosen is None else chosen
            if wanted.settings in compiled:
                break
            compiled[wanted.settings] = self._compiled(wanted, compiles)
        else:
            raise SettingError(
                f"{MAX_ATTEMPTS} settings were compiled and needed more than was estimated; raise "
                f"the budget of {in_units(budget_bytes)} a little."
            )
        if chosen is None:
            raise SettingError(self._refusal(wanted, budget_bytes))
        return self._plan_of(
            chosen, runs, budget_bytes, keep=keep, programs=compiled[chosen.settings][1]
        )

    def _estimated(self, settings: PlanSettings, *, correction: float = 1.0) -> PlanBytes:
        added = correction * self._estimate.added_bytes(settings)
        return PlanBytes.of_programs(self._parts(settings), math.ceil(added), "estimated")

    def _compiled(
        self, run: PlannedRun, compiles: Compiles
    ) -> tuple[PlanBytes, tuple[ProgramBytes, ...]]:
        settings = run.settings
        source: Source = "compiled" if compiles == "whole" else "compiled short"
        if settings.num_devices > len(jax.devices()):
            return run.bytes, ()
        self.say(f"compiling {settings.sentence}")
        programs = self.programs(settings, compiles)
        added = max(each.added_bytes for each in programs)
        return PlanBytes.of_programs(self._parts(settings), added, source), programs

    def _correction(self, compiled: dict[PlanSettings, tuple[PlanBytes, Any]]) -> float:
        """What estimates are multiplied by: as much as compiled programs needed more."""
        ratios = [
            max(each.added_bytes for each in programs) / self._estimate.added_bytes(settings)
            for settings, (_, programs) in compiled.items()
            if programs
        ]
        return max([1.0, *ratios])

    def _plan_of(
        self,
        chosen: PlannedRun,
        runs: Sequence[PlannedRun],
        budget_bytes: int,
        *,
        keep: float,
        programs: tuple[ProgramBytes, ...],
    ) -> MemoryPlan:
        num_candidates = len(runs)
        num_fitting = sum(run.bytes.total_bytes <= budget_bytes for run in runs)
        if not chosen.settings.changes_output:
            runs = [run for run in runs if not run.settings.changes_output]
        fitting = [run for run in runs if run.bytes.total_bytes <= budget_bytes]
        total = chosen.bytes.total_bytes
        less = [run for run in fitting if run.bytes.total_bytes < total]
        more = [run for run in runs if run.tokens_per_s > chosen.tokens_per_s]
        settings = chosen.settings
        return MemoryPlan(
            target=self.target.name,
            draft=None if self.draft is None else self.draft.name,
            dtype=self.dtype,
            scheduler=self.scheduler.name,
            verifier=self.verifier.name,
            budget_bytes=budget_bytes,
            keep=keep,
            chosen=chosen,
            fastest=max(fitting, key=lambda run: run.tokens_per_s),
            cheaper=max(less, key=lambda run: run.tokens_per_s, default=None),
            faster=min(more, key=_by_bytes, default=None),
            baseline_bytes=baseline_bytes(
                self.target.config,
                draft=None if self.draft is None else self.draft.config,
                itemsize=jnp.dtype(self.dtype).itemsize,
                num_rows=settings.batch_size,
                prompt_tokens=self.prompt_tokens,
                num_nodes=settings.draft_length + 1,
                depth=settings.draft_length,
            ),
            programs=programs,
            formulas=self.formulas(settings),
            num_candidates=num_candidates,
            num_fitting=num_fitting,
            remarks=self._remarks(chosen, programs),
        )

    def _remarks(self, chosen: PlannedRun, programs: tuple[ProgramBytes, ...]) -> tuple[str, ...]:
        of_target, _, _ = self._devices
        found = [f"Speeds are predictions for {of_target.name}: {of_target.source}."]
        if not self.is_here:
            found.append(
                f"Temporaries are XLA's figures for the same programs on {jax.default_backend()} "
                "in float32; those of the device itself may differ."
            )
        if chosen.settings.num_devices > 1:
            found.append("What devices of the model axis exchange is not in the prediction.")
            if not programs:
                found.append(
                    f"The programs were not compiled: {chosen.settings.num_devices} devices are "
                    f"needed, and JAX has {len(jax.devices())}."
                )
        if chosen.settings.changes_output:
            found.append(
                "Nothing fits with the target's KV in its own dtype. Rounding it to "
                f"{chosen.settings.kv_dtype} changes the output a little, of plain and speculative "
                "decoding alike; `jaxspec audit` says how much."
            )
        if chosen.settings.draft_kv_window or chosen.settings.draft_kv_dtype:
            found.append(
                "The acceptance is taken to be that of a draft model with all of its KV; measure "
                "it with `jaxspec compare`."
            )
        return tuple(found)

    def formulas(self, settings: PlanSettings) -> dict[str, str]:
        """By part of `Parts`, how its bytes come about."""
        rows = settings.batch_size // settings.num_data_shards
        residents = self.scheduler.num_residents(rows)
        vocab_size = self.target.config.vocab_size

        def of_kv(config: ModelConfig, kv_dtype: KvDtype | None, dtype: str, slots: int) -> str:
            itemsize, scale = (1, " + 4") if kv_dtype else (jnp.dtype(dtype).itemsize, "")
            return (
                f"{residents} rows x {slots} slots x 2 x {config.num_layers} layers x "
                f"{config.num_kv_heads} heads x ({config.head_size} x {itemsize}{scale}) B"
            )

        target = self.target.config
        found = {
            "target_weights_bytes": _weights_in_words(target, self.dtype),
            "target_kv_bytes": of_kv(target, settings.kv_dtype, self.dtype, settings.max_length),
            "logits_bytes": (
                f"{rows} rows x {settings.draft_length + 1} tokens x {vocab_size} x 4 B"
            ),
        }
        if self.draft is not None and settings.draft_length:
            draft, dtype = self.draft.config, settings.draft_dtype
            loop = self._loop(settings, None, None)
            state = jax.eval_shape(lambda: loop.drafter.init(loop.shape))
            slots = state.cache.layers[0].k.shape[0] * BLOCK // rows
            found["draft_weights_bytes"] = _weights_in_words(draft, dtype)
            found["draft_kv_bytes"] = of_kv(draft, settings.draft_kv_dtype, dtype, slots)
            if self.verifier.needs_draft_probs:
                found["draft_probs_bytes"] = (
                    f"{rows} rows x {settings.draft_length} drafts x {vocab_size} x 4 B"
                )
        if settings.num_model_shards > 1:
            found = {
                name: words + f", split over {settings.num_model_shards} devices where it is split"
                if name.startswith("target")
                else words
                for name, words in found.items()
            }
        return found

    # Refusals.

    def _check_weights(self, candidates: Sequence[PlanSettings], budget_bytes: int) -> None:
        """Raises `SettingError` if the budget is below the weights of all settings."""
        lightest = min(candidates, key=lambda each: self._parts(each).weights_bytes)
        parts = self._parts(lightest)
        if parts.weights_bytes <= budget_bytes:
            return
        advice = []
        if jnp.dtype(self.dtype).itemsize > 2:
            share = 2 / jnp.dtype(self.dtype).itemsize
            if share * parts.weights_bytes <= budget_bytes:
                advice.append(f"bfloat16 takes {in_units(math.ceil(share * parts.weights_bytes))}")
        if not advice:
            bits = next(
                (
                    bits
                    for bits in (8, 4)
                    if parts.weights_bytes * bits / 8 / jnp.dtype(self.dtype).itemsize
                    <= budget_bytes
                ),
                None,
            )
            fits = "no weight dtype" if bits is None else f"{bits}-bit weights, which jaxspec lacks"
            advice.append(f"{fits} would fit")
        axes = model_axes(self.target.config, 1024)
        enough = [each for each in axes if parts.weights_bytes / each <= budget_bytes]
        if enough and lightest.num_model_shards == 1:
            advice.append(f"a mesh axis model of {enough[0]} devices splits them")
        raise SettingError(
            f"A budget of {in_units(budget_bytes)} was given, and the weights alone take "
            f"{in_units(parts.weights_bytes)} per device in {self.dtype}; {' and '.join(advice)}."
        )

    def _refusal(self, least: PlannedRun, budget_bytes: int) -> str:
        return (
            f"A budget of {in_units(budget_bytes)} ({budget_bytes} bytes) was given; the smallest "
            f"that works is {in_units(least.bytes.total_bytes)} ({least.bytes.total_bytes} bytes), "
            f"with {least.settings.sentence}."
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


def smallest(runs: Sequence[PlannedRun]) -> PlannedRun:
    """The run of the fewest bytes."""
    return min(runs, key=_by_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What programs need besides their arguments, as straight lines through two of them: a round's
    by the tokens that it scores, a prefill's by the tokens of its chunk. Neither the layers nor the
    context matter: a layer's temporaries are used again by the next, and attention reads KV block
    by block.

    Attributes:
      round_bytes: constant, and per token.
      prefill_bytes: likewise.
    """

    round_bytes: tuple[float, float]
    prefill_bytes: tuple[float, float]

    @classmethod
    def through(cls, *points: tuple[PlanSettings, int, int]) -> Estimate:
        """The lines through two settings and the bytes that their round and prefill added."""
        small, large = points
        return cls(
            round_bytes=_line(*((_num_scored(point[0]), point[1]) for point in (small, large))),
            prefill_bytes=_line(*((point[0].prefill_chunk, point[2]) for point in (small, large))),
        )

    def added_bytes(self, settings: PlanSettings) -> float:
        """Of the larger program, on one device. Of devices that split a model it is an upper
        bound."""
        lines = (self.round_bytes, self.prefill_bytes)
        sizes = (_num_scored(settings), settings.prefill_chunk)
        return max(max(a + b * size, 1.0) for (a, b), size in zip(lines, sizes, strict=True))


def _num_scored(settings: PlanSettings) -> int:
    """Tokens that a round of a shard scores."""
    return settings.batch_size // settings.num_data_shards * (settings.draft_length + 1)


def _line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Constant and slope of the line through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] - slope * first[0], slope


@dataclasses.dataclass(frozen=True)
class _WithoutHead:
    """A pass over part of a prompt, which makes no logits."""

    whole: cost.Pass

    @property
    def num_steps(self) -> int:
        return self.whole.num_steps - 1

    def kernels(self) -> tuple[tuple[float, float], ...]:
        products, _, attention = self.whole.kernels()
        return products, (0.0, 0.0), attention


def _weights_in_words(config: ModelConfig, dtype: str) -> str:
    num_params = decoder.num_params(config) / 1e9
    return f"{num_params:.3g} billion parameters x {jnp.dtype(dtype).itemsize} B"


def model_axes(config: ModelConfig, limit: int) -> list[int]:
    """The sizes of a mesh axis `model` up to `limit` that divide a model."""
    common = math.gcd(config.num_kv_heads, config.feed_forward_width, config.vocab_size)
    return [size for size in range(1, limit + 1) if common % size == 0]


def doubling(largest: int) -> Iterator[int]:
    """1, 2, 4, ... and `largest` itself."""
    yield from (2**power for power in range((largest - 1).bit_length()))
    yield largest


def kv_itemsize(config: ModelConfig, kv_dtype: KvDtype | None, itemsize: int) -> float:
    """Bytes of a component of the KV; with int8 its share of the vector's fp32 scale is added."""
    return itemsize if kv_dtype is None else 1 + 4 / config.head_size
