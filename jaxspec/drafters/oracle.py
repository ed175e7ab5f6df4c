"""An oracle: proposes the recorded true continuation of each row, with a chosen probability of
being right.

For tests, and for measuring speed at a chosen acceptance without trained weights. It is synthetic,
and every report says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxspec.drafters.base import Drafter, NoDrafter
from jaxspec.errors import SettingError
from jaxspec.models.base import Model, param_specs
from jaxspec.runtime.values import check_kind, number, whole_number
from jaxspec.sampling import uniform
from jaxspec.types import BatchView, Draft, EngineShape, PyTree, RoundInfo, chain_parents


@dataclasses.dataclass(frozen=True, eq=False)
class Oracle(Drafter):
    """A synthetic drafter that knows the answers.

    Attributes:
      sequences: prompt and true continuation of every request it may meet, as token ids. Nothing is
        drafted for a prompt that none of them starts with.
      acceptance: probability that a proposed token is the true one, drawn once per sequence and
        position; a wrong token is the true one's successor in the vocabulary.
      seed: seed of these draws.
      cost_of: a drafter that is run in every round and whose drafts are thrown away, so that a
        round costs what a real one does. It may not read the target.
    """

    sequences: Sequence[Sequence[int]]
    acceptance: float = 1.0
    seed: int = 0
    cost_of: Drafter | None = None
    is_synthetic = True

    def __post_init__(self):
        expected = "a probability, from 0 to 1"
        acceptance = number("acceptance", self.acceptance, least=0, most=1, expected=expected)
        object.__setattr__(self, "acceptance", acceptance)
        object.__setattr__(self, "seed", whole_number("seed", self.seed, least=0, most=2**63 - 1))
        if len(self.sequences) == 0:
            raise SettingError("An oracle without sequences was given; record at least one.")
        if self.cost_of is not None:
            check_kind("cost_of", self.cost_of, Drafter, "a drafter, or None")
        cost = self._cost
        if cost.taps or cost.uses_target or cost.uses_target_cache or cost.score is not None:
            raise SettingError(
                f"An oracle was given cost_of={cost.name}, which reads the target or rides in its "
                "forward pass, and an oracle cannot hand that on; give a drafter that does neither."
            )

    @property
    def _cost(self) -> Drafter:
        """The drafter whose work is done and thrown away."""
        return NoDrafter() if self.cost_of is None else self.cost_of

    @property
    def name(self) -> str:
        """Contains the acceptance, and says that it is synthetic."""
        cost = f", cost of {self.cost_of.name}" if self.cost_of else ""
        return f"oracle:{self.acceptance:g} (synthetic{cost})"

    @property
    def params(self) -> PyTree:
        """The sequences `[R, longest]` padded with -1, and the parameters of `cost_of`."""
        longest = max(len(sequence) for sequence in self.sequences)
        table = np.full((len(self.sequences), longest), -1, np.int32)
        for index, sequence in enumerate(self.sequences):
            table[index, : len(sequence)] = sequence
        return {"table": jnp.asarray(table), "cost": self._cost.params}

    def param_specs(self, num_shards: int) -> PyTree:
        """How a mesh axis `model` splits them: as `cost_of` says."""
        return {"table": PartitionSpec(), "cost": param_specs(self._cost, num_shards)}

    def check(self, target: Model) -> None:
        """Checks `cost_of`, if there is one."""
        self._cost.check(target)

    def for_target(self, target: Model) -> Oracle:
        """The same oracle around the `for_target` of `cost_of`."""
        if self.cost_of is None:
            return self
        return dataclasses.replace(self, cost_of=self.cost_of.for_target(target))

    def init(self, shape: EngineShape) -> PyTree:
        """The sequence each row decodes, -1 if unknown; and the state of `cost_of`."""
        return {
            "sequence": jnp.full((shape.batch_size,), -1, jnp.int32),
            "cost": self._cost.init(shape),
        }

    def admit(self, shape, params, state, rows: BatchView, row) -> PyTree:
        """Finds the sequence that starts with the row's prompt."""
        table = params["table"]
        width = min(table.shape[1], shape.max_length)
        index = jnp.arange(width, dtype=jnp.int32)
        prompt = rows.tokens[row, :width]
        same = (table[:, :width] == prompt[None]) | (index >= rows.num_committed[row])[None]
        fits = jnp.all(same, axis=1) & (rows.num_committed[row] <= width)
        found = jnp.where(jnp.any(fits), jnp.argmax(fits).astype(jnp.int32), -1)
        cost = self._cost.admit(shape, params["cost"], state["cost"], rows, row)
        return {"sequence": state["sequence"].at[row].set(found), "cost": cost}

    def lag(self, state, rows: BatchView) -> jax.Array | None:
        """Delegates to `cost_of`."""
        return self._cost.lag(state["cost"], rows)

    def catch_up(self, shape, params, state, rows: BatchView, chunk_rows) -> PyTree:
        """Delegates to `cost_of`."""
        cost = self._cost.catch_up(shape, params["cost"], state["cost"], rows, chunk_rows)
        return {**state, "cost": cost}

    def propose(self, shape: EngineShape, params, state, rows: BatchView):
        """The next recorded tokens, some of them made wrong."""
        table = params["table"]
        position = rows.num_committed[:, None] + jnp.arange(shape.num_nodes, dtype=jnp.int32)[None]
        sequence = jnp.maximum(state["sequence"], 0)
        truth = table[sequence[:, None], jnp.minimum(position, table.shape[1] - 1)]
        known = (position < table.shape[1]) & (truth >= 0) & (state["sequence"] >= 0)[:, None]

        def draw(sequence, positions):
            key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), sequence)
            return uniform(jax.vmap(lambda p: jax.random.fold_in(key, p))(positions))

        is_right = jax.vmap(draw)(sequence, position) < self.acceptance
        tokens = jnp.where(is_right, truth, (truth + 1) % shape.vocab_size)
        num_known = jnp.sum(known, axis=1, dtype=jnp.int32)
        num_valid = jnp.minimum(num_known, jnp.minimum(rows.draft_limit, shape.num_nodes))
        if self.cost_of:
            thrown_away, cost = self._cost.propose(shape, params["cost"], state["cost"], rows)
            # Never true, but the compiler cannot know: it keeps the work of `cost_of`.
            is_impossible = jnp.any(thrown_away.tokens < -1, axis=1)
            num_valid = jnp.where(is_impossible, 0, num_valid)
            state = {**state, "cost": cost}
        draft = Draft(
            tokens=jnp.where(known, tokens, 0),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=num_valid,
        )
        return draft, state

    def commit(self, shape, params, state, rows: BatchView, info: RoundInfo) -> PyTree:
        """Delegates to `cost_of`."""
        cost = self._cost.commit(shape, params["cost"], state["cost"], rows, info)
        return {**state, "cost": cost}

    def rewind(self, shape, params, state, rows: BatchView, row, num_kept) -> PyTree:
        """Delegates to `cost_of`; the sequence still begins with the row's prompt."""
        cost = self._cost.rewind(shape, params["cost"], state["cost"], rows, row, num_kept)
        return {**state, "cost": cost}
