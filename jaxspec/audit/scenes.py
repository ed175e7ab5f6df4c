"""A chi-square test of the outputs of many rows that decode a table model.

The target's next token depends on the last one only, so the probability of every output is known
exactly, and 40,000 rows of a few tokens show what no workload of a real model could: noise that is
used twice, or a draft whose distribution is not the one that the verifier gets.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxspec.audit.chi_square import pooled
from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.parts import RoundParts
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.runtime.compilation import Program
from jaxspec.sampling import neutral_sampling
from jaxspec.types import EngineShape, Finish, RowSampling
from jaxspec.verifiers import Verifier


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TableModel:
    """A model whose next token depends on the last one only: its distribution is known exactly.

    Attributes:
      params: `[V, V]` fp32 logits of the next token, by the last one.
      vocab_size: V.
    """

    params: jax.Array
    vocab_size: int
    name: str = "table"
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = None

    def init_cache(self, num_rows: int, capacity: int) -> Any:
        """A cache without content."""
        return ()

    def forward(self, params, tokens, window, cache):
        """The tokens themselves, `[B, T, 1]`."""
        return tokens[..., None], cache

    def logits(self, params, hidden):
        """Logits `[..., V]` fp32."""
        return params[hidden[..., 0]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionScene:
    """Many rows that decode a table model, and the distribution that their outputs must follow.

    Attributes:
      verifier: a lossless verifier.
      p: `[V, V]` logits of the target.
      q: `[V, V]` logits of the drafter.
      temperature: that of every row.
      top_p: that of every row.
      num_nodes: number of drafts per round.
      num_tokens: number of tokens of each output.
      num_rows: number of outputs.
    """

    verifier: Verifier
    p: np.ndarray
    q: np.ndarray
    temperature: float = 1.0
    top_p: float = 1.0
    num_nodes: int = 3
    num_tokens: int = 5
    num_rows: int = 40_000

    @functools.cached_property
    def healthy_p_value(self) -> float:
        """`p_value`, first computed while no fault is switched on."""
        return self.p_value()

    def outputs(self) -> np.ndarray:
        """`[num_rows, num_tokens]`, decoded by the production round."""
        size = self.p.shape[0]
        target, draft_model = (
            TableModel(params=jnp.asarray(table, jnp.float32), vocab_size=size)
            for table in (self.p, self.q)
        )
        shape = EngineShape(
            batch_size=self.num_rows,
            max_length=1 + self.num_tokens + self.num_nodes,
            verify_length=1 + self.num_nodes,
            prefill_chunk=1,
            vocab_size=size,
            is_noise_shared=self.verifier.is_noise_shared,
            needs_draft_probs=self.verifier.needs_draft_probs,
        )
        parts = RoundParts(
            target=target,
            drafter=DraftModel(draft_model),
            verifier=self.verifier,
            shape=shape,
            num_stop_tokens=1,
        )
        fields = {
            "finish": Finish.RUNNING,
            "num_committed": 1,
            "limit": 1 + self.num_tokens,
            "limit_finish": Finish.MAX_TOKENS,
            "draft_limit": self.num_nodes,
        }
        every = {name: jnp.full((self.num_rows,), x, jnp.int32) for name, x in fields.items()}
        loop = DecodeLoop(parts)
        state = loop.init().replace(**every, sampling=self._sampling())
        run = Program(jax.jit(loop.run), f"the decode round of {self.num_rows} tiny rows")
        state = run(loop.params, state, jnp.int32(self.num_tokens), jnp.int32(1))
        return np.asarray(state.tokens[:, 1 : 1 + self.num_tokens])

    def _sampling(self) -> RowSampling:
        """A key per row, and the same filters for all."""
        numbers = jnp.arange(self.num_rows, dtype=jnp.uint32)
        return neutral_sampling(self.num_rows).replace(
            temperature=jnp.full((self.num_rows,), self.temperature, jnp.float32),
            top_p=jnp.full((self.num_rows,), self.top_p, jnp.float32),
            key=jnp.stack([jnp.zeros_like(numbers), numbers], axis=1),
        )

    def distribution(self) -> np.ndarray:
        """`[V] * num_tokens` probabilities of the outputs that start after token 0, computed
        directly."""
        step = np.exp(self.p / self.temperature)
        step /= step.sum(axis=1, keepdims=True)
        for row in step:
            order = np.argsort(-row)
            before = np.cumsum(row[order]) - row[order]
            row[order[before >= self.top_p]] = 0
        step /= step.sum(axis=1, keepdims=True)
        distribution = step[0]
        for _ in range(self.num_tokens - 1):
            distribution = distribution[..., None] * step
        return distribution

    def p_value(self) -> float:
        """Probability of outputs at least this far from the distribution, if they were drawn from
        it."""
        distribution, size = self.distribution().reshape(-1), self.p.shape[0]
        outputs = self.outputs()
        code = np.ravel_multi_index(tuple(outputs.T), (size,) * self.num_tokens)
        observed = np.bincount(code, minlength=distribution.size)
        if np.any(observed[distribution == 0]):
            return 0.0
        return float(stats.chisquare(*pooled(observed, distribution * self.num_rows)).pvalue)


@functools.cache
def memoryless(verifier: Verifier) -> DistributionScene:
    """Two tokens whose probabilities never change; it shows keys that forget the round."""
    p, q = np.log([[0.7, 0.3]] * 2), np.log([[0.35, 0.65]] * 2)
    return DistributionScene(verifier=verifier, p=p, q=q)


@functools.cache
def filtered(verifier: Verifier) -> DistributionScene:
    """Four tokens, a temperature and top-p; it shows noise used twice, and filters out of order."""
    rng = np.random.default_rng(5)
    p, q = rng.normal(size=(2, 4, 4))
    return DistributionScene(
        verifier=verifier, p=p, q=q, temperature=1.5, top_p=0.85, num_nodes=2, num_tokens=4
    )


SCENES = {"memoryless": memoryless, "filtered": filtered}
