"""What a plan is asked for: models, a workload, and the settings that are tried."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxspec.analysis import cost
from jaxspec.cache.pages import BLOCK, KvDtype, round_up_to_block
from jaxspec.checkpoint.format import parse_dtype
from jaxspec.checkpoint.resolve import load_model
from jaxspec.decode.settings import check_at_least_one
from jaxspec.drafters.base import Drafter, DrafterBase, with_defaults
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.names import make_drafter
from jaxspec.engine.plan import PlanSettings
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import KernelsName
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import PRESETS
from jaxspec.models.shapes import shape_model
from jaxspec.schedulers import Scheduler
from jaxspec.verifiers import Verifier


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


def find_drafter(drafter: Drafter | str, target: Described, dtype: str) -> DrafterBase:
    """A drafter that is planned as it is, of an object or a name.

    Args:
      drafter: see `plan_memory`.
      target: that it drafts for.
      dtype: of the target.

    Raises:
      SettingError: it is none that can be planned.
    """
    model = shape_model(target.config, name=target.name, dtype=parse_dtype(dtype))
    made = make_drafter(drafter, model)
    found = None if made is None else with_defaults(made)
    if found is None or isinstance(found, DraftModel) or found.uses_target_cache:
        name = "none" if found is None else found.name
        raise SettingError(
            f"The drafter {name} was given to be planned as it is, which n-grams, heads and "
            "drafters of your own can be; give a draft model as `draft`, and leave out what drafts "
            "with the layers of its target."
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """What a plan is made for; see `plan_memory`."""

    target: Described
    draft: Described | None
    drafter: DrafterBase | None = None
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

    @property
    def has_drafter(self) -> bool:
        """Whether anything can be drafted."""
        return self.draft is not None or self.drafter is not None

    def candidates(self) -> Iterator[PlanSettings]:
        """All settings to be tried."""
        search, batches = self.search, sorted({*doubling(self.batch)})
        longest = None if isinstance(self.acceptance, (int, float)) else len(tuple(self.acceptance))
        for (data, model), batch, draft_length, chunk in itertools.product(
            self.meshes, batches, search.draft_lengths, search.prefill_chunks
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
    return [size for size in range(1, limit + 1) if common % size == 0]


def doubling(largest: int) -> Iterator[int]:
    """1, 2, 4, ... and `largest` itself."""
    yield from (2**power for power in range((largest - 1).bit_length()))
    yield largest
