"""The speed of settings, as the cost model predicts it."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp

from jaxspec.cache.pages import KvDtype
from jaxspec.engine.memory import num_bytes
from jaxspec.lab.cost import model as cost
from jaxspec.lab.plan.plan import PREFILL_CHUNK, PlanSettings
from jaxspec.lab.plan.request import PlanRequest, model_axes
from jaxspec.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeedPrediction:
    """Tokens per second by settings.

    Attributes:
      request: what is planned for.
    """

    request: PlanRequest

    @functools.cached_property
    def devices(self) -> tuple[cost.Device, cost.Device, int | None]:
        """Of the target, of the draft model, and the block of KV that attention reads at a time."""
        request = self.request
        draft = None if request.draft is None else request.draft.config
        return request.find_devices(request.target.config, draft)

    def _devices_of(self, settings: PlanSettings) -> tuple[cost.Device, cost.Device, int | None]:
        """Those of a data shard, each as one; a draft model that they cannot split is on each."""
        of_target, of_draft, block = self.devices
        model, draft = settings.num_model_shards, self.request.draft
        splits_draft = draft is not None and model in model_axes(draft.config, model)
        return (
            cost.split(of_target, model),
            cost.split(of_draft, model) if splits_draft else of_draft,
            block,
        )

    def pair(self, settings: PlanSettings) -> cost.Pair:
        """The cost model of one data shard."""
        of_target, of_draft, block = self._devices_of(settings)
        request = self.request
        draft = None
        if request.draft is not None and settings.draft_length:
            draft = request.draft.config
        itemsize, draft_itemsize = (
            jnp.dtype(each or request.dtype).itemsize
            for each in (request.dtype, request.draft_dtype)
        )
        return cost.Pair(
            target=request.target.config,
            target_device=of_target,
            draft=draft,
            draft_device=of_draft,
            itemsize=itemsize,
            block=block,
            draft_itemsize=draft_itemsize,
            kv_itemsize=kv_itemsize(request.target.config, settings.kv_dtype, itemsize),
            draft_kv_itemsize=(
                draft and kv_itemsize(draft, settings.draft_kv_dtype, draft_itemsize)
            ),
            draft_context=settings.draft_kv_window,
            drafter_s=self._drafter_s(of_target) if settings.draft_length else 0.0,
            tree=request.tree,
        )

    def _drafter_s(self, device: cost.Device) -> float:
        """Seconds per round of a drafter that is planned as it is: its weights are read once, and
        the head of the target, if it uses that, once for each level, or once for a chain that is
        drafted as a whole."""
        request, drafter = self.request, self.request.drafter
        if drafter is None:
            return 0.0
        num_levels = drafter.max_depth or drafter.num_nodes or 1
        if drafter.drafts_at_once:
            num_levels = 1
        read_bytes = num_bytes(drafter.params)
        if drafter.uses_target:
            config, itemsize = request.target.config, jnp.dtype(request.dtype).itemsize
            read_bytes += num_levels * config.width * config.vocab_size * itemsize
        num_steps = num_levels if read_bytes else 1
        return read_bytes / device.bytes_per_s + num_steps * device.step_s

    def tokens_per_s(self, settings: PlanSettings) -> tuple[float, float]:
        """Predicted, with and without prompts; see `PlannedRun`."""
        request, pair, draft_length = self.request, self.pair(settings), settings.draft_length
        of_target, of_draft, _ = self._devices_of(settings)
        rows = settings.batch_size // settings.num_data_shards
        num_output = request.context - request.prompt_tokens
        context, emitted = request.prompt_tokens + num_output / 2, 1.0
        round_s = pair.round_s(batch=rows, draft_length=draft_length, context=context)
        if draft_length:
            chances = request.acceptance
            if isinstance(chances, (int, float)):
                chances = cost.geometric(chances, draft_length)
            emitted = cost.emitted_per_round(tuple(chances)[:draft_length])
        chunk = cost.Pass(
            config=pair.target,
            batch=1,
            window=PREFILL_CHUNK,
            context=request.prompt_tokens / 2 + PREFILL_CHUNK,
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
        prefill_s = math.ceil(request.prompt_tokens / PREFILL_CHUNK) * chunk_s
        decode_s = num_output / emitted * round_s
        in_all = rows * num_output / (rows * prefill_s + decode_s)
        return (
            settings.num_data_shards * in_all,
            settings.num_data_shards * rows * emitted / round_s,
        )


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


def kv_itemsize(config: ModelConfig, kv_dtype: KvDtype | None, itemsize: int) -> float:
    """Bytes of a component of the KV; with int8 its share of the vector's fp32 scale is added."""
    return itemsize if kv_dtype is None else 1 + 4 / config.head_size
