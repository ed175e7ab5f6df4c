"""Prompt lookup: drafts copied from the row's own tokens (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxspec.drafters.base import DrafterBase
from jaxspec.errors import SettingError
from jaxspec.runtime.other_names import refuse_other_names
from jaxspec.types import BatchView, Draft, EngineShape, chain_parents

LONGEST_LOOKUP = 64  # the compiled program has a comparison for every length


@refuse_other_names
@dataclasses.dataclass(frozen=True)
class NGram(DrafterBase):
    """Proposes what followed the latest earlier occurrence of the row's last tokens.

    The longest match wins, then the latest. Matching runs on the device for all rows at once.

    Attributes:
      prompt_lookup_min: shortest match that is used. Matches of one token are worth it, because the
        whole window is scored anyway, so an unlikely draft costs nothing.
      prompt_lookup_max: longest match that is tried, at most 64.
    """

    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4

    def __post_init__(self):
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= LONGEST_LOOKUP:
            raise SettingError(
                f"prompt_lookup_min {self.prompt_lookup_min} and prompt_lookup_max "
                f"{self.prompt_lookup_max} were given; they must satisfy 1 <= min <= max <= "
                f"{LONGEST_LOOKUP}."
            )

    @property
    def name(self) -> str:
        """`ngram:MIN-MAX`."""
        return f"ngram:{self.prompt_lookup_min}-{self.prompt_lookup_max}"

    def propose(self, shape: EngineShape, params, state, rows: BatchView):
        """A chain per row; none where nothing matches."""
        tokens, length = rows.tokens, rows.num_committed[:, None]
        slot = jnp.arange(shape.max_length, dtype=jnp.int32)[None]
        # matched[b, j]: tokens that agree going backwards from slot j - 1 and from the row's end,
        # so that slot j holds a continuation. Slots wrap around, hence the test against `size`.
        still = (slot >= 1) & (slot < length)
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for size in range(1, self.prompt_lookup_max + 1):
            pattern = jnp.take_along_axis(tokens, jnp.maximum(length - size, 0), axis=1)
            still &= (slot >= size) & (jnp.roll(tokens, size, axis=1) == pattern)
            matched = jnp.where(still, size, matched)
        # Longest first, then latest: one maximum over both.
        best = jnp.max(jnp.where(matched > 0, matched * shape.max_length + slot, 0), axis=1)
        size, source = best // shape.max_length, best % shape.max_length
        node = jnp.arange(shape.num_nodes, dtype=jnp.int32)[None]
        drafted = jnp.take_along_axis(
            tokens, jnp.minimum(source[:, None] + node, shape.max_length - 1), axis=1
        )
        available = jnp.where(size >= self.prompt_lookup_min, rows.num_committed - source, 0)
        limit = jnp.minimum(rows.draft_limit, shape.num_nodes)
        draft = Draft(
            tokens=drafted,
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.minimum(available, limit),
        )
        return draft, state
