"""The objects that the batteries check: a model, or a drafter in an engine, prepared for the
checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import sampling
from jaxspec.cache import pages as kv
from jaxspec.conformance.checks import (
    CHUNK,
    MAX_TOKENS,
    ROWS,
    WINDOW,
    demand,
    mixed_params,
    rounding_of,
    wide,
)
from jaxspec.conformance.report import NotApplicable
from jaxspec.decode.loop import init
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.state import batch_view
from jaxspec.drafters.base import Drafter, draft_with, function_params
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.engine import Engine
from jaxspec.models.base import Model
from jaxspec.models.prefill import chain_window, prefill_chunks
from jaxspec.requests.requests import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program
from jaxspec.types import (
    BatchView,
    DecodeState,
    Draft,
    DraftContext,
    EngineShape,
    PyTree,
    Verdict,
    Window,
)
from jaxspec.verifiers import Coupled

NUM_ROUNDS = 8  # of scripted verdicts


def rewritten(
    cache: kv.KVCache, slots: np.ndarray, change: Callable[[jax.Array], jax.Array]
) -> kv.KVCache:
    """The cache with its k and v `[ROWS, n, K, H]` at `slots` `[ROWS, n]` changed in each layer."""
    at = jnp.asarray(slots)

    def rewrite(layer):
        k, v = kv.read_slots(layer, cache.table, at, cache.dtype)
        return kv.write(layer, cache.table, change(k), change(v), at)

    return cache.replace(layers=tuple(map(rewrite, cache.layers)))


class ModelUnderTest:
    """A model, a batch of `ROWS` rows in a small cache, and one compiled window of `WINDOW`."""

    def __init__(self, model: Model, *, max_length: int, seed: int):
        self.model, self.max_length = model, max_length
        self.rng = np.random.default_rng(seed)
        self.num_traces = 0
        # Short rows, and one that reaches into the second half (another block, if there are two).
        self.lengths = np.array([5, 12, max_length // 2 + 6], np.int32)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """`[ROWS, S]` int32; any two neighbours differ."""
        steps = self.rng.integers(1, self.model.vocab_size, (ROWS, self.max_length))
        return (np.cumsum(steps, axis=1) % self.model.vocab_size).astype(np.int32)

    def other(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens that differ from `tokens` everywhere."""
        return ((tokens + 1) % self.model.vocab_size).astype(np.int32)

    def empty(self) -> kv.KVCache:
        """An empty cache."""
        cache = self.model.init_cache(ROWS, self.max_length)
        demand(
            isinstance(cache, kv.KVCache), f"init_cache gave a {type(cache).__name__}, not KVCache"
        )
        return cache

    @functools.cached_property
    def shapes(self) -> tuple[Any, Any, Window]:
        """Shapes of the cache, the tokens and the window that `forward` is given."""
        start = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        window = jax.eval_shape(functools.partial(chain_window, num_tokens=WINDOW), start)
        return jax.eval_shape(self.empty), self.window, window

    @functools.cached_property
    def forward(self):
        """The compiled window, `(params, cache, tokens, window) -> hidden, logits, cache`."""

        def forward(params, cache, tokens, window):
            self.num_traces += 1
            hidden, cache = self.model.forward(params, tokens, window, cache)
            return hidden, self.model.logits(params, hidden), cache

        name = f"the forward pass of {self.model.name}"
        return Program(jax.jit(forward), name, shapes_vary=True)

    @functools.cached_property
    def prefill(self):
        """The compiled prefill of a row's chunks: `(params, cache, tokens, row, starts, stops) ->
        cache`."""

        def prefill(params, cache, tokens, row, starts, stops):
            place = {"rows": jnp.full_like(starts, row), "starts": starts, "stops": stops}
            return prefill_chunks(self.model, params, cache, tokens, **place, chunk=CHUNK)[0]

        return Program(jax.jit(prefill), f"the prefill of {self.model.name}")

    def prefill_row(
        self, row: int, bounds: Sequence[int], *, cache: Any = None, at_once: bool = False
    ) -> kv.KVCache:
        """The cache, by default an empty one, after a row was prefilled in up to three pieces with
        these ends, each in a call of its own or all `at_once`."""
        cache = self.empty() if cache is None else cache
        pieces = list(zip([0, *bounds], bounds, strict=False))
        for call in [pieces] if at_once else [[piece] for piece in pieces]:
            starts, stops = np.array([*call, *[(0, 0)] * (3 - len(call))], np.int32).T
            place = (np.int32(row), starts, stops)
            cache = self.prefill(self.model.params, cache, self.tokens, *place)
        return cache

    def score(self, cache, tokens, start, *, is_running=None, slots=None, paths=None, params=None):
        """Hidden states, logits and cache of a window of all rows, as the loop calls the model.

        Args:
          tokens: `[ROWS, WINDOW]`.
          start: `[ROWS]`.
          is_running: `[ROWS]` bool; other rows write nothing, and have the position of the foremost
            row.
          slots: `[ROWS, WINDOW]`, replaces those that follow from `start`.
          paths: `[ROWS, WINDOW, WINDOW]` for a tree.
          params: replaces the model's.
        """
        running = np.ones(ROWS, bool) if is_running is None else np.asarray(is_running)
        start = np.where(running, start, np.max(np.asarray(start)[running], initial=0))[:, None]
        entry = np.arange(WINDOW)
        depth = entry if paths is None else np.argmax(paths == entry[:, None], axis=2)
        if slots is None:
            slots = np.where(running[:, None], start + entry, -1)
        fields = {"start": start[:, 0], "positions": start + depth, "slots": slots, "paths": paths}
        window = Window(**jax.tree.map(lambda array: jnp.asarray(array, jnp.int32), fields))
        params = self.model.params if params is None else params
        # A copy, because JAX may read a NumPy array later, when its owner has changed it.
        return self.forward(params, cache, np.array(tokens, np.int32), window)

    def context(self, lengths, tokens=None) -> kv.KVCache:
        """A cache in which `lengths` tokens of each row were processed, window by window, with all
        rows at the same position."""
        tokens = self.tokens if tokens is None else tokens
        cache = self.empty()
        for first in range(0, int(np.max(lengths)), WINDOW):
            window = tokens[:, first : first + WINDOW]
            start = np.full(ROWS, first)
            running = first < np.asarray(lengths)
            cache = self.score(cache, window, start, is_running=running)[2]
        return cache

    @functools.cached_property
    def read(self) -> kv.KVCache:
        """A cache in which each row's first `lengths` tokens were processed."""
        return self.context(self.lengths)

    @functools.cached_property
    def window(self) -> np.ndarray:
        """`[ROWS, WINDOW]` tokens that follow them."""
        return self.following(self.tokens, self.lengths)

    def following(self, tokens: np.ndarray, start: np.ndarray) -> np.ndarray:
        """`[ROWS, WINDOW]`, the tokens of each row from `start` on."""
        return np.take_along_axis(tokens, start[:, None] + np.arange(WINDOW), axis=1)

    def contents(self, cache: kv.KVCache) -> list[np.ndarray]:
        """k and v of every layer, `[ROWS, S, K, H]` each."""
        slots = lax.broadcasted_iota(jnp.int32, (ROWS, self.max_length), 1)
        return [
            wide(part)
            for layer in cache.layers
            for part in kv.read_slots(layer, cache.table, slots, cache.dtype)
        ]

    def filled(self, cache: kv.KVCache, first: np.ndarray, value: float) -> kv.KVCache:
        """The cache with `value` in each row's slots from `first` on."""
        slot = np.arange(self.max_length, dtype=np.int32)
        slots = np.where(slot >= np.asarray(first)[:, None], slot, -1)
        return rewritten(cache, slots, lambda x: jnp.full_like(x, value))

    def allowed(self, hidden: jax.Array) -> float:
        """Relative difference that rounding may make between two programs."""
        cache = self.empty()
        epsilon = max(rounding_of(self.model.params, hidden), float(jnp.finfo(cache.dtype).eps))
        return min(0.1, 256 * epsilon)

    @functools.cached_property
    def engine(self) -> Engine:
        """The production engine with a drafter that is right about as often as wrong."""
        engine = Engine(
            self.model,
            Oracle([[0] * self.longest] * len(self.prompts)),
            draft_length=WINDOW - 1,
            batch_size=ROWS,
            max_length=self.max_length,
        )
        self.plain = engine.generate(self.prompts, self.requests, speculate=False)
        known = [[*c.prompt_token_ids, *c.token_ids, *[0] * self.longest] for c in self.plain]
        known = [one[: self.longest] for one in known]
        # The drafter's knowledge is a parameter, so compiled programs can be reused.
        engine.update_params(draft=Oracle(known, acceptance=0.6).params)
        self.drafted = engine.generate(self.prompts, self.requests)
        return engine

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        """Prompts of different lengths, one with a single token."""
        lengths = (9, 1, 33, 20, 2)
        return [self.tokens[i % ROWS, i : i + n].tolist() for i, n in enumerate(lengths)]

    @functools.cached_property
    def requests(self) -> list[SamplingParams]:
        """The sampling parameters of each prompt."""
        return [mixed_params(i) for i in range(len(self.prompts))]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with its output."""
        return max(map(len, self.prompts)) + MAX_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted(Coupled):
    """Coupled verification, except for rows with the stop token `marker`: a random number of their
    drafts is accepted, from none to all, whatever the target says, so that drafters meet every
    outcome.

    The random numbers are keyed by the request and its length, so a row's script does not depend on
    others.
    """

    marker: int
    needs_draft_probs: bool = False
    promise = "none"
    is_lossless = False

    @property
    def name(self) -> str:
        """`scripted`."""
        return "scripted"

    def verify(
        self, logits: jax.Array, draft: Draft, rows: BatchView, prefix: DraftContext
    ) -> Verdict:
        """The script's verdict, or that of `Coupled`."""
        is_scripted = jnp.any(rows.stop_tokens == self.marker, axis=1)

        def choose(scripted, honest):
            shape = (-1,) + (1,) * (honest.ndim - 1)
            return jnp.where(is_scripted.reshape(shape), scripted, honest)

        honest = super().verify(logits, draft, rows, prefix).replace(chosen=None)
        return jax.tree.map(choose, self.script(draft, rows), honest)

    def script(self, draft: Draft, rows: BatchView) -> Verdict:
        """Follows first children down the tree for a random number of steps; the next token is one
        that the row already contains."""
        num_rows, num_nodes = draft.tokens.shape
        draws = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (num_rows, 2))
        draws = sampling.uniform(sampling.round_keys(rows, draws, sampling.Stream.ACCEPT))
        wanted = jnp.floor((1.5 * draws[:, 0] - 0.25) * (draft.depth + 1)).astype(jnp.int32)
        node = jnp.full((num_rows,), -1, jnp.int32)
        path = []
        for depth in range(draft.depth):
            children = draft.is_node & (draft.parents == node[:, None])
            should_continue = jnp.any(children, axis=1) & (depth < wanted)
            first = jnp.argmax(children, axis=1).astype(jnp.int32)
            node = jnp.where(should_continue, first, num_nodes)
            path.append(jnp.where(should_continue, first, -1))
        path = jnp.stack(path, axis=1)
        length = rows.num_committed[:, None]
        place = jnp.floor(draws[:, 1:] * length.astype(jnp.float32)).astype(jnp.int32)
        return Verdict(
            num_accepted=jnp.sum(path >= 0, axis=1, dtype=jnp.int32),
            path=path,
            next_token=jnp.take_along_axis(rows.tokens, place, axis=1)[:, 0],
        )


@dataclasses.dataclass(kw_only=True)
class DrafterUnderTest:
    """A drafter in the production engine, with rounds whose outcome follows a script.

    Attributes:
      drafter: the drafter under test.
      target: the model that it drafts for.
      prompts: those for which it should draft something.
      max_length: slots per row.
      seed: seed of the requests and draws.
      is_noise_shared: as in the engine's shape, which the drafter sees.
      needs_draft_probs: likewise.
    """

    drafter: Drafter
    target: Model
    prompts: Sequence[Sequence[int]]
    max_length: int
    seed: int
    is_noise_shared: bool = True
    needs_draft_probs: bool = False
    num_nodes = WINDOW - 1

    @property
    def marker(self) -> int:
        """The stop token of scripted requests, which the target cannot emit."""
        return self.target.vocab_size

    @functools.cached_property
    def engine(self) -> Engine:
        """The production engine, verifying by script."""
        return Engine(
            self.target,
            self.drafter,
            verifier=Scripted(
                marker=self.marker,
                is_noise_shared=self.is_noise_shared,
                needs_draft_probs=self.needs_draft_probs,
            ),
            scheduler="static",
            draft_length=self.num_nodes,
            batch_size=ROWS,
            max_length=self.max_length,
        )

    @property
    def parts(self) -> RoundParts:
        """What the engine's rounds are made of."""
        return self.engine.executor.parts

    @property
    def shape(self) -> EngineShape:
        """The engine's shape."""
        return self.engine.shape

    @property
    def complete(self) -> Drafter:
        """The drafter, with defaults for what it does not define."""
        return self.parts.drafter

    @property
    def places(self) -> tuple[Any, Any, dict[str, Any]]:
        """Shapes of the arguments of its functions of rows: state, all rows, and which by name."""
        # The engine is made here: its parameters must not be made while something is traced.
        parts, shape = self.parts, self.shape
        state = jax.eval_shape(lambda: self.drafter.init(shape))
        rows = jax.eval_shape(lambda: self.rows(init(parts)))
        sizes = {"admit": (), "catch_up": (shape.chunks_per_call,)}
        chosen = {name: jax.ShapeDtypeStruct(size, jnp.int32) for name, size in sizes.items()}
        return state, rows, chosen

    @property
    def params(self) -> PyTree:
        """The parameters that the drafter's functions get."""
        return function_params(self.complete, self.engine.executor.params)

    def rows(self, state: DecodeState) -> BatchView:
        """What the drafter sees of a state."""
        return batch_view(state, is_chain=self.drafter.is_chain)

    def propose(self, params: PyTree, state: DecodeState) -> tuple[Draft, PyTree]:
        """The drafter's `propose` on a decode state, given the engine's parameters."""
        draft, after, _ = draft_with(
            self.complete, self.shape, params, state.drafter, self.rows(state), state.cache
        )
        return draft, after

    @functools.cached_property
    def compiled_draft(self):
        """The compiled draft of a decode state, which is not changed."""
        draft = jax.jit(lambda params, state: self.propose(params, state)[0])
        return Program(draft, f"the draft of {self.drafter.name}")

    def draft(self, state: DecodeState) -> Draft:
        """What the drafter proposes now, fetched to the host."""
        return jax.device_get(self.compiled_draft(self.engine.executor.params, state))

    def request(self, index: int, prompt: Sequence[int], **changes: Any) -> Request:
        """The scripted request number `index`, with this prompt and changes of its parameters."""
        fields = {"max_tokens": self.max_length, "seed": 100 * self.seed + index, **changes}
        params = mixed_params(index, stop_token_ids=(self.marker,), **fields)
        return Request(request_id=str(index), prompt_token_ids=tuple(prompt), params=params)

    def requests(self, indices: Sequence[int]) -> list[Request]:
        """The scripted requests with these numbers, with the prompts of the same numbers."""
        return [self.request(index, self.prompts[index]) for index in indices]

    def admit(self, requests: Sequence[Request], *, draft_length: int | None = None) -> None:
        """Puts requests into the rows of the engine's batch and prefills their prompts."""
        length = self.num_nodes if draft_length is None else draft_length
        for row, request in enumerate(requests):
            self.engine.executor.admit_and_prefill(row, request, draft_length=length, arrival=row)

    def fresh(self, requests: Sequence[Request], *, draft_length: int | None = None) -> DecodeState:
        """The state of a new engine after these requests entered it."""
        self.engine.executor.reset()
        self.admit(requests, draft_length=draft_length)
        return self.engine.state

    def rounds(self, indices: Sequence[int]) -> Iterator[tuple[DecodeState, Draft]]:
        """Rounds of the requests with these numbers, row by row: the state on the host, without
        caches, and what is drafted from it. Each round is verified only when the next one is
        requested."""
        self.fresh(self.requests(indices))
        for _ in range(NUM_ROUNDS):
            yield self.engine.executor.fetch(), self.draft(self.engine.state)
            self.engine.executor.run(1)

    @functools.cached_property
    def history(self) -> list[tuple[DecodeState, Draft]]:
        """Rounds of the first requests."""
        return list(self.rounds(range(ROWS)))

    @property
    def num_drafted(self) -> int:
        """Nodes that were drafted in these rounds."""
        return sum(int(draft.num_valid.sum()) for _, draft in self.history)

    def afresh(self, state: DecodeState) -> Draft:
        """The draft for new requests whose prompts are all tokens that the rows had committed."""
        tokens, lengths = jax.device_get((state.tokens, state.num_committed))
        prompts = [tokens[row, : lengths[row]].tolist() for row in range(ROWS)]
        return self.draft(self.fresh([self.request(row, ids) for row, ids in enumerate(prompts)]))

    @property
    def is_rounded(self) -> bool:
        """Whether it computes in less than fp32, so that ties may flip."""
        leaves = jax.tree.leaves((self.drafter.params, self.places[0]))
        return any(leaf.dtype.itemsize < 4 and leaf.dtype.kind != "b" for leaf in leaves)

    @functools.cached_property
    def with_probs(self) -> DrafterUnderTest:
        """The same, where drafts come with the distributions that they were drawn from."""
        if self.complete.score is not None and not self.complete.uses_target_cache:
            raise NotApplicable("it drafts in the target's pass, which this check does not run")
        return dataclasses.replace(self, is_noise_shared=False, needs_draft_probs=True)

    @functools.cached_property
    def with_shared_noise(self) -> DrafterUnderTest:
        """The same with these distributions, where drafts are drawn with the target's noise."""
        return dataclasses.replace(self.with_probs, is_noise_shared=True)

    @functools.cached_property
    def is_drawn(self) -> bool:
        """Whether drafts are drawn, so that they come with a distribution."""
        engine = self.with_probs
        return engine.draft(engine.fresh(self.requests(range(ROWS)))).q is not None

    def draws(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Mapping[str, float]],
        *,
        num_draws: int,
        keys_of: Callable[[np.ndarray], np.ndarray] = np.asarray,
    ) -> Iterator[tuple[DecodeState, Draft]]:
        """Drafts of rows with these prompts and sampling parameters under `num_draws` keys, each
        with the state that it was drawn from. `keys_of` makes the rows' keys of `[ROWS, 2]` random
        ones."""
        pairs = enumerate(zip(prompts, params, strict=True))
        state = self.fresh([self.request(row, prompt, **own) for row, (prompt, own) in pairs])
        rng = np.random.default_rng(self.seed)
        place = state.sampling.key.sharding
        for _ in range(num_draws):
            keys = rng.integers(0, 2**32, (ROWS, 2), np.uint64).astype(np.uint32)
            key = jax.device_put(keys_of(keys), place)
            keyed = state.replace(sampling=state.sampling.replace(key=key))
            yield keyed, self.draft(keyed)
