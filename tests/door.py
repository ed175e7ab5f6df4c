"""Drafters that live inside the target: the documented linear head, and drafts that ride along."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp

from jaxspec.drafters.base import Drafter
from jaxspec.models.base import Model
from jaxspec.types import Draft, Window, chain_parents

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "adding-a-drafter.md"


def _documented() -> dict:
    """What the block of the page with the linear head defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [source] = [block for block in blocks if "class LinearConfig" in block]
    namespace: dict = {"__name__": __name__}
    exec(compile(source, str(PAGE), "exec"), namespace)
    return namespace


_PAGE = _documented()
LinearConfig, LinearHead = _PAGE["LinearConfig"], _PAGE["LinearHead"]


def linear_head(target, *, seed: int = 0, num_drafts: int = 3):
    """A linear head with random weights for a toy target."""
    config = LinearConfig(num_drafts, target.config.width, target.vocab_size)
    shape = LinearHead.param_shapes(config)["maps"]
    return LinearHead(config, {"maps": jax.random.normal(jax.random.key(seed), shape, jnp.float32)})


class Untapped:
    """A model that has `forward` alone: what `Model` asks for, and no more."""

    def __init__(self, model):
        for name in ("name", "params", "vocab_size", "eos_token_ids", "tokenizer"):
            setattr(self, name, getattr(model, name))
        self.init_cache, self.forward = model.init_cache, model.forward
        self.logits = model.logits


@dataclasses.dataclass(frozen=True, eq=False)
class Riding(Drafter):
    """Drafts one token with the target itself, in the pass that verifies the round before.

    One more entry, a probe, is scored with each row's window. It stands after the newest token,
    sees it and all before it, and stores nothing. What the target says after it is the draft of the
    next round, if this round emits a single token; otherwise the newest token is drafted again.
    """

    target: Model
    probe: int = 1
    name: str = "riding"
    uses_target = True

    def init(self, shape):
        return {
            "guess": jnp.zeros((shape.batch_size,), jnp.int32),
            "is_known": jnp.zeros((shape.batch_size,), bool),
        }

    def admit(self, shape, params, state, rows, row):
        return {**state, "is_known": state["is_known"].at[row].set(False)}

    def propose(self, shape, params, state, rows):
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)
        token = jnp.where(state["is_known"][:, None], state["guess"][:, None], newest)
        draft = Draft(
            tokens=jnp.pad(token, ((0, 0), (0, shape.num_nodes - 1))),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.minimum(rows.draft_limit, 1),
        )
        return draft, state

    def score(self, shape, params, state, rows, draft, tokens, window, cache):
        num_own = tokens.shape[1]
        wider = Window(
            start=window.start,
            positions=jnp.concatenate([window.positions, window.start[:, None] + 1], axis=1),
            slots=jnp.pad(window.slots, ((0, 0), (0, 1)), constant_values=-1),
            ends=jnp.concatenate([window.positions + 1, window.start[:, None] + 1], axis=1),
        )
        probes = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=self.probe)
        hidden, cache = self.target.forward(params["target"], probes, wider, cache)
        logits = self.target.logits(params["target"], hidden[:, num_own])
        guess = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return hidden[:, :num_own], None, cache, {**state, "guess": guess}

    def commit(self, shape, params, state, rows, info):
        return {**state, "is_known": info.emission.num_emitted == 1}
