"""What a plan is asked for: models, a workload, and the settings that are tried."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxspec.cache.pages import BLOCK, KV_DTYPES, KvDtype, round_up_to_block
from jaxspec.checkpoint.format import parse_dtype
from jaxspec.decode.buckets import window_buckets
from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.sharded import DATA, MODEL, ShardedLoop
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import NUM_SINKS, DraftModel, check_kv_window
from jaxspec.drafters.growth import Tree
from jaxspec.drafters.tree_names import named_tree
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.lab.cost.devices import Device, FindDevices
from jaxspec.lab.cost.model import geometric
from jaxspec.lab.plan.plan import PlanSettings
from jaxspec.load.drafters import choose_drafter, make_drafter, parse_drafter
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel, kernels_of
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import PRESETS
from jaxspec.models.shapes import ShapeModel, shape_model
from jaxspec.runtime.values import check_kind, is_one_of, listed, refusal, whole_number
from jaxspec.schedulers import Scheduler
from jaxspec.verifiers import Verifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Which settings are tried; see `PlanSettings`. One value each fixes a setting.

    Attributes:
      draft_lengths: 0 is plain decoding; None is 0 to 8, and for a drafter with a number of nodes
        of its own (trees, FlexDraft) what fills the windows up to it: 0, 2, 4, 8, ...
      kv_dtypes: of the target's KV. Another dtype than the model's changes the output, so it is
        chosen only where nothing else fits, unless it is the only one.
      draft_kv_windows: tokens whose KV the draft model keeps; those that the context does not fill
        are left out.
    """

    draft_lengths: tuple[int, ...] | None = None
    kv_dtypes: tuple[KvDtype | None, ...] = (None, "int8")
    draft_kv_windows: tuple[int | None, ...] = (None, 512)

    def __post_init__(self):
        checks = {
            "kv_dtypes": _check_kv_dtype,
            "draft_kv_windows": lambda window: check_kv_window(window, NUM_SINKS)[0],
        }
        if self.draft_lengths is not None:
            checks["draft_lengths"] = functools.partial(whole_number, "draft_lengths", least=0)
        for name, check in checks.items():
            entries = tuple(map(check, listed(name, getattr(self, name))))
            if not entries:
                raise SettingError(
                    f"There is nothing to choose from: {name} has no value; give at least one to "
                    "try."
                )
            object.__setattr__(self, name, entries)


def _check_kv_dtype(kv_dtype: Any) -> KvDtype | None:
    if kv_dtype is not None and not is_one_of(kv_dtype, KV_DTYPES):
        raise refusal("kv_dtypes", kv_dtype, "None or 'int8'")
    return kv_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A model as the planner knows it.

    Attributes:
      name: as `load_model` takes it.
      config: architecture.
      dtype: of a model that is given; None where the plan chooses it.
      kernels: likewise.
      dtype_here: in which `load_model` loads the name on this machine; None for presets.
    """

    name: str
    config: ModelConfig
    dtype: str | None = None
    kernels: KernelsName | None = None
    dtype_here: str | None = None


def describe(model: LanguageModel | ModelConfig | str) -> Described:
    """What is planned for: a model, an architecture, the name of a preset with or without `random:`
    (no weights are made), or any other name that `load_model` takes.

    Raises:
      SettingError: it is none of these.
    """
    if isinstance(model, ModelConfig):
        return Described(name=model.family, config=model)
    if isinstance(model, str):
        preset = model.removeprefix("random:")
        if preset in PRESETS:
            return Described(name=f"random:{preset}", config=PRESETS[preset])
        loaded = load_model(model)
        return Described(name=model, config=loaded.config, dtype_here=loaded.dtype.name)
    check_kind("model", model, LanguageModel, "a LanguageModel, a ModelConfig, or a name")
    return Described(
        name=model.name, config=model.config, dtype=model.dtype.name, kernels=model.kernels
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribedDraft:
    """A draft model as the planner knows it.

    Attributes:
      model: itself.
      options: arguments of `DraftModel` that were given, other than `kv_window`.
      fixed: settings of `Search` that are not searched because they were given.
    """

    model: Described
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def describe_draft(drafter: Drafter | str | Mapping[str, Any]) -> DescribedDraft | None:
    """The draft model that an object or a name as in `jaxspec generate` stands for; None if it
    stands for another drafter."""
    if isinstance(drafter, DraftModel) and isinstance(drafter.model, LanguageModel):
        given: dict[str, Any] = {
            "min_confidence": drafter.min_confidence,
            "tree": drafter.tree,
            "kv_sinks": drafter.kv_sinks,
            "kv_dtype": drafter.model.kv_dtype,
        }
        defaults = {"min_confidence": 0.0, "tree": None, "kv_sinks": NUM_SINKS, "kv_dtype": None}
        return DescribedDraft(
            model=describe(drafter.model),
            options={name: value for name, value in given.items() if value != defaults[name]},
            fixed={"draft_kv_windows": (drafter.kv_window,)},
        )
    if isinstance(drafter, Drafter) or choose_drafter(drafter) is None:
        return None
    kind, options = parse_drafter(drafter)
    if kind != "draft_model":
        return None
    model, fixed = options.pop("model"), {}
    if "kv_window" in options:
        fixed["draft_kv_windows"] = (options.pop("kv_window"),)
    if isinstance(options.get("tree"), str):
        options["tree"] = named_tree(options["tree"])
    return DescribedDraft(model=describe(model), options=options, fixed=fixed)


def find_drafter(
    drafter: Drafter | str | Mapping[str, Any], target: Described, dtype: str
) -> Drafter:
    """A drafter that is planned as it is, of an object or a name.

    Args:
      drafter: see `plan_memory`.
      target: that it drafts for.
      dtype: of the target.

    Raises:
      SettingError: the name is `none`.
    """
    model = shape_model(target.config, name=target.name, dtype=parse_dtype(dtype))
    made = make_drafter(drafter, model)
    if made is None:
        raise SettingError(
            "The drafter none was given; name one, or leave it out to plan plain decoding."
        )
    return made.for_target(model)  # packed once, for all the settings that are tried


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """What a plan is made for; see `plan_memory`.

    `draft_options` are arguments of `DraftModel` besides those that are searched, and
    `is_datasheet` says whether `find_devices` takes its constants from a datasheet.
    """

    target: Described
    draft: Described | None
    draft_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drafter: Drafter | None = None
    given: str | None = None
    batch: int
    context: int
    is_datasheet: bool
    find_devices: FindDevices
    acceptance: float | Sequence[float]
    window_acceptance: float | Sequence[float] | None = None
    given_dtype: str | None
    verifier: Verifier
    scheduler: Scheduler
    max_logprobs: int | None = None
    mesh: tuple[int, int]
    search: Search

    @property
    def is_loaded(self) -> bool:
        """Whether the target is a model that is loaded, so that its engine runs on this machine,
        whatever the device whose speed is predicted."""
        return self.target.kernels is not None

    @property
    def is_here(self) -> bool:
        """Whether the engine runs on this machine, so that its programs can be compiled as they
        will run."""
        return not self.is_datasheet or jax.default_backend() == "gpu" or self.is_loaded

    @property
    def dtype(self) -> str:
        """Of the target's weights."""
        default = "bfloat16"
        if self.is_here:
            of_preset = "float32" if jax.default_backend() == "cpu" else "bfloat16"
            default = self.target.dtype_here or of_preset
        return parse_dtype(self.given_dtype or self.target.dtype or default).name

    @property
    def devices(self) -> tuple[Device, Device, int | None]:
        """Of the target, of the draft model, and the block of KV that attention reads at a time."""
        return self.find_devices(
            self.target.config, None if self.draft is None else self.draft.config
        )

    @property
    def draft_dtype(self) -> str | None:
        """Of the draft model's weights; None without a draft model."""
        if self.draft is None:
            return None
        return parse_dtype(self.draft.dtype or self.dtype).name

    def check_mesh(self) -> None:
        """Raises `SettingError` if the mesh does not fit the target."""
        data, model = self.mesh
        try:
            decoder.param_specs(self.target.config, model)
        except SettingError as error:
            axes = model_axes(self.target.config, data * model)
            allowed = ", ".join(str(size) for size in axes)
            raise SettingError(f"{error} Up to {data * model} devices, {allowed} work.") from error

    @property
    def has_drafter(self) -> bool:
        """Whether anything can be drafted."""
        return self.draft is not None or self.drafter is not None

    @property
    def tree(self) -> Tree | None:
        """The tree that a draft model drafts; None where it drafts chains."""
        return self.draft_options.get("tree")

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Those to be tried; see `Search`."""
        if self.search.draft_lengths is not None:
            return self.search.draft_lengths
        num_nodes = None if self.drafter is None else self.drafter.num_nodes
        if self.tree is not None:
            num_nodes = self.tree.num_nodes
        if num_nodes is None:
            return tuple(range(9))
        return tuple(length - 1 for length in window_buckets(num_nodes + 1))

    @property
    def drafts_trees(self) -> bool:
        """Whether nodes are not alike, as those of a chain may be taken to be."""
        if self.drafter is not None:
            return not self.drafter.is_chain
        return self.tree is not None and not self.tree.is_chain

    def candidates(self) -> Iterator[PlanSettings]:
        """All settings to be tried."""
        data, model = self.mesh
        longest = None if isinstance(self.acceptance, (int, float)) else len(tuple(self.acceptance))
        for batch, draft_length, kv_dtype in itertools.product(
            sorted({*doubling(self.batch)}), self.draft_lengths, self.search.kv_dtypes
        ):
            if batch % data or (draft_length and not self.has_drafter):
                continue
            if longest is not None and draft_length > longest:
                continue
            plain = PlanSettings(
                batch_size=batch,
                max_length=round_up_to_block(self.context + draft_length + 1),
                draft_length=draft_length,
                kv_dtype=kv_dtype,
                num_data_shards=data,
                num_model_shards=model,
            )
            if not draft_length or self.draft is None:
                yield plain
                continue
            for window in self.search.draft_kv_windows:
                if window is None or window + BLOCK < plain.max_length:
                    yield dataclasses.replace(plain, draft_kv_window=window)

    def acceptance_of(self, settings: PlanSettings) -> tuple[float, ...]:
        """Chances that at least 1, 2, ... of the drafts of these settings are accepted."""
        chances = self.acceptance
        if settings.draft_kv_window is not None and self.window_acceptance is not None:
            chances = self.window_acceptance
        if isinstance(chances, (int, float)):
            chances = geometric(chances, settings.draft_length)
        return tuple(chances)[: settings.draft_length]

    def loop(self, settings: PlanSettings, *, dtype: str | None = None) -> DecodeLoop | ShardedLoop:
        """The decode loop of an engine with these settings, of shapes only.

        Args:
          settings: of the engine. Where JAX has fewer devices, the mesh is one without devices, for
            which bytes can be counted, but nothing compiled.
          dtype: of all models' weights, instead of their own.
        """
        target = self._model(self.target, dtype or self.dtype, kv_dtype=settings.kv_dtype)
        drafter: Drafter | None = None
        if settings.draft_length and self.draft is not None:
            draft = self._model(self.draft, dtype or self.draft_dtype)
            drafter = DraftModel(draft, **self.draft_options, **settings.drafter_options)
        elif settings.draft_length:
            drafter = self.drafter
        parts = make_parts(
            target,
            drafter,
            EngineConfig(
                verifier=self.verifier if settings.draft_length else None,
                scheduler=self.scheduler,
                draft_length=settings.draft_length,
                batch_size=settings.batch_size // settings.num_data_shards,
                max_length=settings.max_length,
                max_logprobs=self.max_logprobs,
            ),
        )
        parts = parts.with_variant(parts.drafter.choose_variant(parts.shape))
        if settings.num_devices == 1:  # an engine also tries whether the kernels keep their word
            return DecodeLoop(
                dataclasses.replace(parts, skips_padding=kernels_of(target).skips_padding)
            )
        sizes, types = self.mesh, (AxisType.Auto, AxisType.Auto)
        devices = jax.local_devices()[: settings.num_devices]
        if len(devices) < settings.num_devices:
            mesh: Any = AbstractMesh(sizes, (DATA, MODEL), axis_types=types)
        else:
            mesh = jax.make_mesh(sizes, (DATA, MODEL), axis_types=types, devices=devices)
        return ShardedLoop(parts=parts, mesh=mesh)

    def _model(
        self, model: Described, dtype: str | None, *, kv_dtype: KvDtype | None = None
    ) -> ShapeModel:
        kernels: KernelsName = "xla"
        if self.is_here and self.mesh[1] == 1:
            kernels = model.kernels or default_kernels()
        return shape_model(
            model.config,
            name=model.name,
            dtype=parse_dtype(dtype),
            kernels=kernels,
            is_packed=self.is_here,
            kv_dtype=kv_dtype,
        )


def model_axes(config: ModelConfig, limit: int) -> list[int]:
    """The sizes of a mesh axis `model` up to `limit` that divide a model."""
    common = math.gcd(config.num_kv_heads, config.feed_forward_width, config.vocab_size)
    return [size for size in range(1, min(limit, common) + 1) if common % size == 0]


def doubling(largest: int) -> Iterator[int]:
    """1, 2, 4, ... and `largest` itself."""
    yield from (2**power for power in range((largest - 1).bit_length()))
    yield largest
