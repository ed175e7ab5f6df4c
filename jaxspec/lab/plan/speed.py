"""The speed of settings, as the cost model predicts it."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.cache.pages import KvDtype
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.engine.memory import num_bytes
from jaxspec.lab.cost import model as cost
from jaxspec.lab.cost.devices import Device, split
from jaxspec.lab.plan.plan import PlanSettings
from jaxspec.lab.plan.request import PlanRequest, model_axes
from jaxspec.models.config import ModelConfig

MEAN_CONTEXT = 0.75  # of a request's tokens: half of them are the prompt, and half of the rest


def tokens_per_s(request: PlanRequest, settings: PlanSettings) -> float:
    """Predicted for the rounds of all rows together."""
    rows, draft_length = settings.batch_size // settings.num_data_shards, settings.draft_length
    context, emitted = MEAN_CONTEXT * request.context, 1.0
    round_s = pair_of(request, settings).round_s(
        batch=rows, draft_length=draft_length, context=context
    )
    if draft_length:
        emitted = cost.emitted_per_round(request.acceptance_of(settings))
    return settings.batch_size * emitted / round_s


def pair_of(request: PlanRequest, settings: PlanSettings) -> cost.Pair:
    """The cost model of one data shard, whose devices are one; a draft model that they cannot split
    is on each of them."""
    of_target, of_draft, block = request.devices
    num_shards, draft = settings.num_model_shards, None
    of_target = split(of_target, num_shards)
    if request.draft is not None and settings.draft_length:
        draft = request.draft.config
        if num_shards in model_axes(draft, num_shards):
            of_draft = split(of_draft, num_shards)
    itemsize, draft_itemsize = (
        jnp.dtype(each or request.dtype).itemsize for each in (request.dtype, request.draft_dtype)
    )
    draft_kv_dtype = request.draft_options.get("kv_dtype")
    return cost.Pair(
        target=request.target.config,
        target_device=of_target,
        draft=draft,
        draft_device=of_draft,
        itemsize=itemsize,
        block=block,
        draft_itemsize=draft_itemsize,
        kv_itemsize=kv_itemsize(request.target.config, settings.kv_dtype, itemsize),
        draft_kv_itemsize=draft and kv_itemsize(draft, draft_kv_dtype, draft_itemsize),
        draft_context=settings.draft_kv_window,
        drafter_s=_drafter_s(request, of_target) if settings.draft_length else 0.0,
        tree=request.tree,
    )


def _drafter_s(request: PlanRequest, device: Device) -> float:
    """Seconds per round of a drafter that is planned as it is: its weights are read once, and what
    it uses of the target's head once for each level, or once for a chain that is drafted as a
    whole."""
    drafter = request.drafter
    if drafter is None:
        return 0.0
    num_levels = drafter.max_depth or drafter.num_nodes or 1
    if drafter.drafts_at_once:
        num_levels = 1
    read_bytes = num_bytes(drafter.params)
    if drafter.uses_target:
        config, itemsize = request.target.config, jnp.dtype(request.dtype).itemsize
        columns = num_levels * config.vocab_size
        if isinstance(drafter, Heads) and "head_columns" in drafter.params:
            assert drafter.config.num_head_tokens is not None
            columns = (num_levels - 1) * drafter.config.num_head_tokens  # once in its own weights
        read_bytes += config.width * columns * itemsize
    num_steps = num_levels if read_bytes else 1
    return read_bytes / device.bytes_per_s + num_steps * device.step_s


def kv_itemsize(config: ModelConfig, kv_dtype: KvDtype | None, itemsize: int) -> float:
    """Bytes of a component of the KV; with int8 its share of the vector's fp32 scale is added."""
    return itemsize if kv_dtype is None else 1 + 4 / config.head_size
