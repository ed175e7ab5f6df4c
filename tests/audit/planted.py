"""Greedy outputs with faults that are planted while they are decoded, so that what follows each one
is the target's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audit.scoring import with_dtype
from jaxspec.models.base import LanguageModel, packed_model
from jaxspec.types import Window

CHUNK = 64  # tokens of a prompt that are read at once
STALE_EVERY = 8  # tokens, of which the KV of one is that of another token

# The rotary position of each slot `[...]`, given the number of tokens of the prompt.
Positions = Callable[[jax.Array, jax.Array], jax.Array]
POSITIONS: dict[str, Positions] = {
    "positions of generated tokens off by one": lambda slots, n: (
        slots + (slots >= n).astype(jnp.int32)
    ),
    "two tokens share a position": lambda slots, n: slots - (slots >= n).astype(jnp.int32),
    "a hole of one in the prompt": lambda slots, n: slots + (slots >= n // 2).astype(jnp.int32),
    "all positions shifted by one": lambda slots, n: slots + 1,
}


def _in_order(slots: jax.Array, num_prompt: jax.Array) -> jax.Array:
    del num_prompt
    return slots


class Output(NamedTuple):
    """An output, and for each token whether it was planted."""

    token_ids: list[int]
    is_planted: list[bool]


class Decoder:
    """Decodes prompts greedily, one token at a time, in a batch.

    Args:
      target: the model.
      prompts: token ids of each.
      max_tokens: of each output; stop tokens are ignored.
    """

    def __init__(self, target: LanguageModel, prompts: Sequence[Sequence[int]], max_tokens: int):
        self._own = packed_model(target)
        self._reference = packed_model(with_dtype(target, jnp.float32))
        self._prompts = [list(prompt) for prompt in prompts]
        self._lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
        self._max_tokens = max_tokens
        self._max_length = max(map(len, prompts)) + max_tokens
        self._run = jax.jit(self._forward, static_argnums=(0, 5), donate_argnums=2)

    def outputs(
        self,
        *,
        positions: Positions = _in_order,
        share_planted: float = 0.0,
        one_each: bool = False,
        small_gap: float = 0.0,
        stale_kv: bool = False,
        seed: int = 0,
    ) -> list[Output]:
        """Outputs with a fault.

        Args:
          positions: the rotary position of each slot.
          share_planted: of tokens, drawn at random, that are the second best instead of the best.
          one_each: a random token of each output is the second best.
          small_gap: every token is the second best where the fp32 gap is below this.
          stale_kv: the KV of every `STALE_EVERY`-th token is that of the second best token there.
          seed: of the random places.
        """
        rng, num_rows = np.random.default_rng(seed), len(self._prompts)
        is_chosen = rng.random((self._max_tokens, num_rows)) < share_planted
        if one_each:
            is_chosen[rng.integers(self._max_tokens, size=num_rows), np.arange(num_rows)] = True
        if positions is _in_order:
            own = jax.tree.map(jnp.copy, self._start)
        else:
            own = self._prefilled(self._own, positions)
        exact = self._prefilled(self._reference, _in_order) if small_gap else None
        tokens = jnp.asarray([prompt[-1] for prompt in self._prompts], jnp.int32)
        second = tokens
        emitted, planted = [], []
        for index in range(self._max_tokens):
            slots = self._lengths - 1 + index
            at = (slots[:, None], positions)
            before = second
            (best, second, _), own = self._run(
                self._own, self._own.params, own, tokens[:, None], *at
            )
            if small_gap:
                (_, _, gap), exact = self._run(
                    self._reference,
                    self._reference.params,
                    exact,
                    tokens[:, None],
                    slots[:, None],
                    _in_order,
                )
            if stale_kv and index % STALE_EVERY == STALE_EVERY - 1:
                _, own = self._run(self._own, self._own.params, own, before[:, None], *at)
            is_planted = gap < small_gap if small_gap else jnp.asarray(is_chosen[index])
            tokens, second = (
                jnp.where(is_planted, second, best),
                jnp.where(is_planted, best, second),
            )
            emitted.append(np.asarray(tokens))
            planted.append(np.asarray(is_planted))
        pairs = zip(np.stack(emitted, 1), np.stack(planted, 1), strict=True)
        return [Output(ids.tolist(), chosen.tolist()) for ids, chosen in pairs]

    @functools.cached_property
    def _start(self):
        """The cache that most outputs begin with."""
        return self._prefilled(self._own, _in_order)

    def _prefilled(self, model: LanguageModel, positions: Positions):
        """A cache with the KV of every prompt but its last token."""
        cache = model.init_cache(len(self._prompts), self._max_length)
        width = max(map(len, self._prompts))
        tokens = np.zeros((len(self._prompts), width), np.int32)
        for row, prompt in enumerate(self._prompts):
            tokens[row, : len(prompt)] = prompt
        for first in range(0, width - 1, CHUNK):
            place = np.arange(first, min(first + CHUNK, width))[None]
            slots = jnp.where(place < self._lengths[:, None] - 1, place, -1)
            here = jnp.asarray(tokens[:, place[0]])
            _, cache = self._run(model, model.params, cache, here, slots, positions)
        return cache

    def _forward(self, model, params, cache, tokens, slots, positions: Positions):
        """The two best tokens after the last of some tokens `[B, T]` and the gap between them, and
        the cache with the KV of the tokens."""
        places = jnp.maximum(slots, 0)
        window = Window(
            start=places[:, 0],
            positions=positions(places, self._lengths[:, None]),
            slots=slots,
            ends=places + 1,
        )
        hidden, cache = model.forward(params, tokens, window, cache)
        logits = model.logits(params, hidden[:, -1:])[:, 0]
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        others = logits.at[jnp.arange(len(best)), best].set(-jnp.inf)
        second = jnp.argmax(others, axis=-1).astype(jnp.int32)
        return (best, second, jnp.max(logits, axis=-1) - jnp.max(others, axis=-1)), cache


def dropped(output: Sequence[int], index: int) -> list[int]:
    """The output without one of its tokens, which the engine did emit."""
    return [*output[:index], *output[index + 1 :]]


def with_tail_of(output: Sequence[int], other: Sequence[int], index: int) -> list[int]:
    """The output, going on with another one's tokens."""
    return [*output[:index], *other[index:]]
