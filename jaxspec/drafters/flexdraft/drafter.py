"""FlexDraft as a drafter (2605.20022): the target's last layers draft a block at once.

Mask rows run through these layers with attention projectors of their own, and a small calibrator
corrects their logits once the newest token is known. There are two ways to compute their last
hidden states, with the same weights and the same drafts:

    sequential    `propose` runs one group of mask rows at the newest token, then the target scores
                  the drafts
    parallel      while the target scores this round's drafts, `score` runs a group for each number
                  of drafts that may be accepted, and `commit` keeps the group of the number that
                  was: the next `propose` has nothing left to run

A parallel round reads the weights once, and computes more. In either mode, a row without hidden
states (after its prompt, or after plain steps) gets them as in the sequential mode.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.cache.pages import KVCache
from jaxspec.drafters.base import TrainedDrafter
from jaxspec.drafters.flexdraft import formulas
from jaxspec.drafters.flexdraft.config import FlexConfig, param_shapes
from jaxspec.errors import ModelError, SettingError
from jaxspec.kernels import sums
from jaxspec.kernels.base import Kernels
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel, Model, kernels_of
from jaxspec.runtime.values import check_kind, is_one_of, number, shown, text, whole_number
from jaxspec.sampling import draw_block, without_nan
from jaxspec.types import BatchView, Draft, EngineShape, PyTree, RoundInfo, Window, chain_parents

Mode = Literal["auto", "parallel", "sequential"]
Rule = Literal["product", "minimum"]
DEFAULT_CONFIDENCE = 0.01  # the paper's
LARGEST_PARALLEL_BATCH = 2  # likewise, if rounds are not measured


class FlexState(struct.PyTreeNode, kw_only=True):
    """The state that FlexDraft keeps for each row.

    Attributes:
      hidden: `[B, K - 1, E]`, last hidden states of the mask rows for the next draft, before the
        target's final norm.
      hidden_at: `[B]` int32, the `num_committed` that they were computed for; they are valid for no
        other.
      groups: `[B, G, K - 1, E]`, hidden states for each number of accepted drafts during a parallel
        round; None between rounds.
    """

    hidden: jax.Array
    hidden_at: jax.Array
    groups: jax.Array | None = None


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class FlexDraft(TrainedDrafter):
    """Drafts with the target's last layers and each row's own sampling parameters: greedily for a
    greedy row, and under `coupled`, for a sampled row, with the noise that the target will use.

    A row verifies only as many drafts as the drafter is confident of. Confidence is the highest
    probability of a draft's distribution at temperature 1, independent of the drawn token, so that
    the cut does not bias `rejection` and `block`.

    Mask rows whose logits are NaN propose from a uniform distribution.

    Attributes:
      config: sizes.
      params: parameters with the shapes of `flexdraft.config.param_shapes`, in the target's dtype.
      mode: `parallel`, `sequential`, or `auto`: the faster one by the measured times of rounds, if
        the engine's draft length is `auto` too and the mode changes no bit of the output (or
        exactness is `ties`); otherwise by the size of the batch.
      confidence: in [0, 1]; 0 verifies every draft.
      rule: `product` keeps drafts while the product of their confidences is at least `confidence`,
        `minimum` while each confidence is.
      block_size: K, mask rows of a group, which draft K - 1 tokens.
      label: name of the weights, for reports; may be empty.
      target: the model whose layers the mask rows use; an engine fills it in (`for_target`).

    Raises:
      ModelError: the parameters are not those of `config`.
      SettingError: a setting out of range, such as a block larger than the weights' own.
    """

    config: FlexConfig
    params: PyTree = dataclasses.field(repr=False)
    mode: Mode
    confidence: float
    rule: Rule
    block_size: int
    label: str
    target: LanguageModel | None

    kind: ClassVar[str] = "flexdraft"
    config_type: ClassVar[type] = FlexConfig
    param_shapes = staticmethod(param_shapes)
    uses_target: ClassVar[bool] = True
    uses_target_cache: ClassVar[bool] = True
    score_keeps_bits: ClassVar[bool] = True
    drafts_at_once: ClassVar[bool] = True

    def __init__(
        self,
        config: FlexConfig,
        params: PyTree,
        *,
        mode: Mode = "auto",
        confidence: float = DEFAULT_CONFIDENCE,
        rule: Rule = "product",
        block_size: int | None = None,
        name: str = "",
    ):
        """See the class; if `block_size` is None, the weights' own is used."""
        check_kind("config", config, FlexConfig, "a FlexConfig")
        name = text("name", name)
        self.check_params(config, params, name)
        self.check_settings(mode=mode, rule=rule, confidence=confidence)
        if block_size is None:
            block_size = config.block_size
        block_size = whole_number("block_size", block_size)
        if not 2 <= block_size <= config.block_size:
            raise SettingError(
                f"A block_size of {block_size} was given for FlexDraft weights that were trained "
                f"with {config.block_size}; give at most that, and at least 2."
            )
        self._set(
            config=config,
            params=params,
            mode=mode,
            confidence=float(confidence),
            rule=rule,
            block_size=block_size,
            label=name,
            target=None,
        )

    @staticmethod
    def check_settings(
        *,
        mode: Any = "auto",
        rule: Any = "product",
        confidence: Any = DEFAULT_CONFIDENCE,
        block_size: Any = None,
    ) -> None:
        """Raises `SettingError` for a setting that is wrong for any weights."""
        for what, given, choices in (("mode", mode, Mode), ("rule", rule, Rule)):
            if not is_one_of(given, get_args(choices)):
                raise SettingError(
                    f"The {what} {shown(given)} was given for FlexDraft; it must be one of "
                    f"{', '.join(get_args(choices))}."
                )
        expected = "a probability, from 0 (every draft is verified) to 1"
        number("confidence", confidence, least=0, most=1, expected=expected)
        if block_size is not None:
            whole_number("block_size", block_size)

    @staticmethod
    def fit(config: FlexConfig, target: Model, name: str) -> jnp.dtype:
        """The target's dtype; raises `ModelError` unless the weights were made for its
        architecture."""
        if not isinstance(target, LanguageModel):
            needed = ("config", "kernels", "final_norm", "head")
            missing = [part for part in needed if not hasattr(target, part)]
            has_not = f"has no {', '.join(missing)}" if missing else "is another kind of model"
            raise ModelError(
                f"{name} runs its target's layers one by one, as only a jaxspec.LanguageModel has "
                f"them, and {target.name} {has_not}; use a drafter of another kind."
            )
        mine, theirs = config.target, target.config
        for what in ("num_layers", "width", "vocab_size"):
            if getattr(mine, what) != getattr(theirs, what):
                raise _other_target(name, target, what, getattr(mine, what), getattr(theirs, what))
        for field in dataclasses.fields(mine):
            of_mine, of_theirs = getattr(mine, field.name), getattr(theirs, field.name)
            if of_mine != of_theirs:
                raise _other_target(name, target, field.name, of_mine, of_theirs)
        return target.params["embedding"].dtype

    @property
    def name(self) -> str:
        """`flexdraft[MODE]:LABEL`."""
        return f"flexdraft[{self.mode}]" + (f":{self.label}" if self.label else "")

    @property
    def variants(self) -> tuple[FlexDraft, ...]:
        """With `auto`, whose variant 0 is parallel: the sequential mode."""
        return (self.with_fields(mode="sequential"),) if self.mode == "auto" else ()

    def choose_variant(self, shape: EngineShape) -> int:
        """The parallel mode for batches of up to two rows, as the paper found on an A100."""
        return int(self.mode == "auto" and shape.batch_size > LARGEST_PARALLEL_BATCH)

    @property
    def num_nodes(self) -> int:
        """K - 1."""
        return self.block_size - 1

    def check(self, target: Model) -> None:
        """Raises `ModelError` if these weights do not fit `target`."""
        own, dtype = _dtype_of(self.params), self.fit(self.config, target, self.name)
        if own != dtype:
            raise _other_target(self.name, target, "dtype", own, dtype)

    def for_target(self, target: Model) -> FlexDraft:
        """A copy that runs the layers of `target`, with its kernels."""
        bound = self.with_fields(target=target)
        return bound.with_fields(params=bound.pack(self.params))

    def pack(self, params: PyTree) -> PyTree:
        """The parameters in the form that the target's kernels read fastest; see
        `LanguageModel.pack`."""
        packed = decoder.pack_params({"layers": params["layers"]}, self._kernels)
        calibrator = {
            name: leaf if name.endswith("bias") else self._kernels.pack(leaf)
            for name, leaf in params["calibrator"].items()
        }
        return {**params, **packed, "calibrator": calibrator}

    def param_specs(self, num_shards: int) -> PyTree:
        """How a mesh axis `model` splits the parameters: projectors like the target's, the
        calibrator's logits by vocabulary."""
        layer = decoder.param_specs(self.config.target, num_shards)["layers"][0]
        names = param_shapes(self.config)["layers"][0]
        calibrator = {name: P() for name in ("embedding", "hidden", "hidden_bias")}
        return {
            "layers": ({name: layer[name] for name in names},) * self.config.num_deep_layers,
            "mask": P(),
            "calibrator": calibrator | {"logits": P(None, "model"), "logits_bias": P("model")},
        }

    @property
    def _target(self) -> LanguageModel:
        if self.target is None:
            raise ModelError(
                f"{self.name} was used without a target; take the drafter that for_target(target) "
                "returns."
            )
        return self.target

    @property
    def _kernels(self) -> Kernels:
        return kernels_of(self._target)

    def num_scratch_slots(self, shape: EngineShape) -> int:
        """Room for the mask rows of every group after the window, and of one group after the newest
        token."""
        num_groups = 1 if self.mode == "sequential" else self._num_groups(shape.verify_length)
        return num_groups * self.block_size

    def _num_groups(self, verify_length: int) -> int:
        """G: a window of T tokens has T - 1 drafts, of which 0 to T - 1 may be accepted."""
        return min(verify_length, self.block_size)

    def init(self, shape: EngineShape) -> FlexState:
        """No row has hidden states."""
        size = shape.batch_size, self.num_nodes, self.config.target.width
        return FlexState(
            hidden=jnp.zeros(size, _dtype_of(self.params)),
            hidden_at=jnp.full((shape.batch_size,), -1, jnp.int32),
        )

    def admit(self, shape, params, state: FlexState, rows: BatchView, row) -> FlexState:
        """Forgets the row's hidden states; after `rewind` too, which calls this: the row may reach
        the same length with other tokens."""
        return state.replace(hidden_at=state.hidden_at.at[row].set(-1))

    def propose(
        self, shape, params, state: FlexState, rows: BatchView, *, target_cache: Any = None
    ) -> Any:
        """A chain of up to K - 1 tokens. Rows whose hidden states are for another length get new
        ones first, from one group of mask rows."""
        num_rows, num_nodes = shape.batch_size, min(shape.num_nodes, self.num_nodes)
        is_stale = (state.hidden_at != rows.num_committed) & (rows.draft_limit > 0)

        def run(_, carry):
            hidden, cache = carry
            made, cache = self._run_block(params, rows.num_committed - 1, is_stale, cache)
            return jnp.where(is_stale[:, None, None], made, hidden), cache

        # A loop of one trip or none, because a conditional would copy the cache. A host that runs
        # loops waits for the device before it, and in sequential mode hardly ever skips it.
        carry = state.hidden, target_cache
        if shape.loops_run_on_host and self.mode == "sequential":
            hidden, cache = run(0, carry)
        else:
            trips = jnp.any(is_stale).astype(jnp.int32)
            hidden, cache = lax.fori_loop(0, trips, run, carry)

        logits = self._logits(params, hidden[:, :num_nodes], rows)
        drawn = draw_block(
            logits,
            rows,
            is_noise_shared=shape.is_noise_shared,
            needs_probs=shape.needs_draft_probs,
            needs_greedy_probs=shape.needs_greedy_probs,
        )
        num_valid = jnp.minimum(rows.draft_limit, num_nodes)
        if self.confidence > 0:
            _, total, _ = sums.masses(logits)
            confidence = 1 / total[..., 0]  # of the likeliest token, whose mass is 1
            sure = formulas.sure_length(confidence, least=self.confidence, rule=self.rule)
            num_valid = jnp.minimum(num_valid, sure)

        missing = (0, 0), (0, shape.num_nodes - num_nodes)
        q = drawn.distributions
        draft = Draft(
            tokens=jnp.pad(drawn.tokens, missing),
            parents=chain_parents(num_rows, shape.num_nodes),
            num_valid=num_valid,
            q=None if q is None else jnp.pad(q, (*missing, (0, 0))),
        )
        return draft, state, cache

    def _run_block(
        self, params: PyTree, newest: jax.Array, is_wanted: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states `[B, K - 1, E]` of one group of mask rows per row, its first at position
        `newest` `[B]`, in the rows where it `is_wanted` `[B]`."""
        # Other rows get a position that does not make attention longer.
        newest = jnp.where(is_wanted, newest, jnp.max(jnp.where(is_wanted, newest, 0)))
        window = formulas.block_window(newest, is_wanted, block_size=self.block_size)
        first, target = self.config.first_deep_layer, params["target"]
        deep = tuple(
            {**layer, **projectors}
            for layer, projectors in zip(
                target["layers"][first:], params["own"]["layers"], strict=True
            )
        )
        hidden, cache = decoder.run_layers(
            self.config.target,
            {"layers": (*target["layers"][:first], *deep)},
            self._masks(params, window),
            window,
            cache,
            start=first,
            kernels=self._kernels,
        )
        return hidden[:, 1:], cache

    def _masks(self, params: PyTree, window: Window) -> jax.Array:
        """`[B, M, E]`, the inputs of the mask rows of a window."""
        mask = params["own"]["mask"]
        return jnp.broadcast_to(mask[None, None], (*window.positions.shape, mask.shape[0]))

    def _logits(self, params: PyTree, hidden: jax.Array, rows: BatchView) -> jax.Array:
        """Calibrated logits `[B, N, V]` fp32 of mask rows `[B, N, E]`, all finite."""
        target, newest = self._target, rows.num_committed[:, None] - 1
        tokens = jnp.take_along_axis(rows.tokens, newest, axis=1)
        bonus = decoder.embed(params["target"], tokens)[:, 0]
        normed = target.final_norm(params["target"], hidden)
        logits = target.head(params["target"], normed) + formulas.calibration(
            params["own"]["calibrator"], bonus, normed, self._kernels.product
        )
        return without_nan(logits)

    @property
    def score(self):
        """`run_groups`, or None in the sequential mode: then the target's forward pass is used."""
        return None if self.mode == "sequential" else self.run_groups

    def run_groups(
        self,
        shape: EngineShape,
        params: PyTree,
        state: FlexState,
        rows: BatchView,
        draft: Draft,
        tokens: jax.Array,
        window: Window,
        cache: KVCache,
    ) -> tuple[jax.Array, None, KVCache, FlexState]:
        """The target's pass with a group of mask rows for every number of drafts that may be
        accepted; see `Drafter.score`."""
        config, kernels, target = self.config.target, self._kernels, params["target"]
        num_groups = self._num_groups(shape.verify_length)
        masks = formulas.group_window(window, num_groups=num_groups, block_size=self.block_size)
        first = self.config.first_deep_layer
        hidden, cache = decoder.run_layers(
            config,
            target,
            decoder.embed(target, tokens),
            window,
            cache,
            stop=first,
            kernels=kernels,
        )
        hidden, mask_hidden, cache = decoder.run_dual_layers(
            config,
            target,
            params["own"]["layers"],
            hidden,
            self._masks(params, masks),
            window,
            masks,
            cache,
            start=first,
            kernels=kernels,
        )
        size = (hidden.shape[0], num_groups, self.block_size, hidden.shape[-1])
        groups = mask_hidden.reshape(size)[:, :, 1:]
        return hidden, None, cache, state.replace(groups=groups)

    def commit(self, shape, params, state: FlexState, rows: BatchView, info: RoundInfo):
        """Keeps the group for the number of accepted drafts. If fewer tokens than that were
        emitted, the row has ended, and keeps none."""
        if state.groups is None:
            return state
        num_accepted = info.verdict.num_accepted
        group = jnp.take_along_axis(state.groups, num_accepted[:, None, None, None], axis=1)
        is_whole = info.emission.num_emitted == num_accepted + 1
        hidden_at = jnp.where(is_whole, rows.num_committed, -1)
        return state.replace(hidden=group[:, 0], hidden_at=hidden_at, groups=None)


def _dtype_of(params: PyTree) -> jnp.dtype:
    return params["mask"].dtype


def _other_target(name: str, target: Model, what: str, mine: Any, theirs: Any) -> ModelError:
    return ModelError(
        f"The weights of {name} were made for a target with {what} {mine}, and {target.name} has "
        f"{what} {theirs}; use weights that were made for this target."
    )
