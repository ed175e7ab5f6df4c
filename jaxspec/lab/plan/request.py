"""What a plan is asked for: models, a workload, and the settings that are tried."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxspec.cache.pages import BLOCK, KvDtype, round_up_to_block
from jaxspec.checkpoint.format import parse_dtype
from jaxspec.decode.buckets import window_buckets
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import NUM_SINKS, DraftModel
from jaxspec.drafters.flexdraft.config import flex_config
from jaxspec.drafters.flexdraft.drafter import FlexDraft
from jaxspec.drafters.flexdraft.shapes import as_shapes, shape_flexdraft
from jaxspec.drafters.growth import Tree
from jaxspec.drafters.tree_names import named_tree
from jaxspec.engine.plan import PlanSettings
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import KernelsName
from jaxspec.lab.cost import model as cost
from jaxspec.load.drafters import make_drafter, parse_drafter
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import PRESETS
from jaxspec.models.shapes import shape_model
from jaxspec.runtime.values import check_kind, listed, whole_number
from jaxspec.schedulers import Scheduler
from jaxspec.types import EngineShape
from jaxspec.verifiers import Verifier

NO_WEIGHTS = "WEIGHTS"  # the name of weights that a plan does without


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Which settings are tried; see `PlanSettings`. One value each fixes a setting.

    Attributes:
      draft_lengths: 0 is plain decoding; None is 0 to 8, and for what drafts so many nodes unless
        it is told otherwise (trees, FlexDraft) what fills the windows up to theirs: 0, 2, 4, 8, ...
      kv_dtypes: of the target's KV. Another dtype than the model's changes the output, so it is
        chosen only where nothing else fits, unless it is the only one.
      draft_kv_dtypes: of the draft model's KV.
      draft_kv_windows: tokens whose KV the draft model keeps; those that the context does not fill
        are left out.
      draft_dtypes: of the draft model's weights; empty for the target's dtype.
      prefill_chunks: tokens per call.
    """

    draft_lengths: tuple[int, ...] | None = None
    kv_dtypes: tuple[KvDtype | None, ...] = (None, "int8")
    draft_kv_dtypes: tuple[KvDtype | None, ...] = (None, "int8")
    draft_kv_windows: tuple[int | None, ...] = (None, 512)
    draft_dtypes: tuple[str, ...] = ()
    prefill_chunks: tuple[int, ...] = (64, 128, 256, 512)

    def __post_init__(self):
        if self.draft_lengths is not None:
            self._set("draft_lengths", least=0)
        self._set("prefill_chunks", least=1)

    def _set(self, name: str, *, least: int) -> None:
        values = listed(name, getattr(self, name))
        sizes = tuple(whole_number(name, value, least=least) for value in values)
        object.__setattr__(self, name, sizes)


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
      options: arguments of `DraftModel` that are not searched: `min_confidence`, `tree` and
        `kv_sinks`, where they are given.
      fixed: settings of `Search` that are not searched either, because they were given.
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
        }
        defaults = {"min_confidence": 0.0, "tree": None, "kv_sinks": NUM_SINKS}
        return DescribedDraft(
            model=describe(drafter.model),
            options={name: value for name, value in given.items() if value != defaults[name]},
            fixed={
                "draft_kv_windows": (drafter.kv_window,),
                "draft_kv_dtypes": (drafter.model.kv_dtype,),
            },
        )
    if isinstance(drafter, Drafter) or drafter in ("none", "flexdraft"):
        return None
    kind, options = parse_drafter(drafter)
    if kind != "draft_model":
        return None
    model, fixed = options.pop("model"), {}
    for name in ("kv_window", "kv_dtype"):
        if name in options:
            fixed[f"draft_{name}s"] = (options.pop(name),)
    if isinstance(options.get("tree"), str):
        options["tree"] = named_tree(options["tree"])
    return DescribedDraft(model=describe(model), options=options, fixed=fixed)


def find_drafter(
    drafter: Drafter | str | Mapping[str, Any], target: Described, dtype: str
) -> Drafter:
    """A drafter that is planned as it is, of an object or a name. FlexDraft comes as shapes; named
    without weights it has the paper's sizes.

    Args:
      drafter: see `plan_memory`.
      target: that it drafts for.
      dtype: of the target.

    Raises:
      SettingError: it is none that can be planned.
    """
    model = shape_model(target.config, name=target.name, dtype=parse_dtype(dtype))
    if drafter == "flexdraft":
        return shape_flexdraft(flex_config(target.config), dtype=model.dtype, name=NO_WEIGHTS)
    made = make_drafter(drafter, model)
    if isinstance(made, FlexDraft):
        return as_shapes(made, dtype=model.dtype)
    found = made
    if found is None or isinstance(found, DraftModel) or found.uses_target_cache:
        name = "none" if found is None else found.name
        raise SettingError(
            f"The drafter {name} was given; draft models of jaxspec's own architecture, n-grams, "
            "heads, FlexDraft, and drafters of your own that leave the target's cache alone can be "
            "planned, so name one of these, or none to plan plain decoding."
        )
    return found


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
    prompt_tokens: int
    is_datasheet: bool
    find_devices: cost.FindDevices
    acceptance: float | Sequence[float]
    given_dtype: str | None
    verifier: Verifier
    scheduler: Scheduler
    mesh: tuple[int, int] | None
    num_devices: int
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
        try:
            decoder.param_specs(self.target.config, model)
        except SettingError as error:
            allowed = ", ".join(map(str, model_axes(self.target.config, data * model)))
            raise SettingError(f"{error} Up to {data * model} devices, {allowed} work.") from error
        return [(data, model)]

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

    def drafter_at(self, settings: PlanSettings) -> Drafter | None:
        """The drafter that is planned as it is, in the variant that an engine with these settings
        uses (`Drafter.choose_variant`)."""
        if self.drafter is None:
            return None
        shape = EngineShape(
            batch_size=settings.batch_size // settings.num_data_shards,
            max_length=settings.max_length,
            verify_length=settings.draft_length + 1,
            prefill_chunk=settings.prefill_chunk,
            vocab_size=self.target.config.vocab_size,
        )
        return (self.drafter, *self.drafter.variants)[self.drafter.choose_variant(shape)]

    def flex_mode_at(self, settings: PlanSettings) -> str:
        """In which of its modes FlexDraft drafts there."""
        mode = getattr(self.drafter_at(settings), "mode", None)
        return "sequential" if mode == "sequential" else "parallel"

    @property
    def drafts_trees(self) -> bool:
        """Whether nodes are not alike, as those of a chain may be taken to be."""
        if self.drafter is not None:
            return not self.drafter.is_chain
        return self.tree is not None and not self.tree.is_chain

    @property
    def drafter_name(self) -> str | None:
        """Of what is planned besides the target, for people; None of plain decoding."""
        if self.drafter is not None:
            return self.drafter.name
        if self.draft is None:
            return None
        tree = "" if self.tree is None else f"[{self.tree.name}]"
        return f"draft_model{tree}:{self.draft.name}"

    def draft_depth(self, draft_length: int) -> int:
        """How deep drafts of so many nodes may be."""
        deepest = self.tree if self.drafter is None else self.drafter
        max_depth = None if deepest is None else deepest.max_depth
        return draft_length if max_depth is None else min(max_depth, draft_length)

    def candidates(self) -> Iterator[PlanSettings]:
        """All settings to be tried."""
        search, batches = self.search, sorted({*doubling(self.batch)})
        longest = None if isinstance(self.acceptance, (int, float)) else len(tuple(self.acceptance))
        for (data, model), batch, draft_length, chunk in itertools.product(
            self.meshes, batches, self.draft_lengths, search.prefill_chunks
        ):
            if batch % data or (draft_length and not self.has_drafter):
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
        if not draft_length:
            yield {"draft_dtype": self.dtype}
            return
        if self.draft is None:
            yield {"draft_dtype": None}
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


def model_axes(config: ModelConfig, limit: int) -> list[int]:
    """The sizes of a mesh axis `model` up to `limit` that divide a model."""
    common = math.gcd(config.num_kv_heads, config.feed_forward_width, config.vocab_size)
    return [size for size in range(1, min(limit, common) + 1) if common % size == 0]


def doubling(largest: int) -> Iterator[int]:
    """1, 2, 4, ... and `largest` itself."""
    yield from (2**power for power in range((largest - 1).bit_length()))
    yield largest
