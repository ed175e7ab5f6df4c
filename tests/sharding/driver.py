"""A host loop around a `ShardedLoop`: admits requests, reads prompts, runs rounds to the end."""

from __future__ import annotations

import collections
import functools

import jax
import numpy as np
import toy

import jaxspec
from jaxspec.cache import pages as kv
from jaxspec.decode import sharded as sharding
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.state import Admission
from jaxspec.drafters.base import NoDrafter
from jaxspec.schedulers import Static
from jaxspec.types import EngineShape, Finish
from jaxspec.verifiers import Coupled

NUM_STOP = 4
CHUNK = 64
MAX_LENGTH = 256
BATCH_SIZE = 2  # of a shard
WINDOW = 5


def mesh(**sizes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices."""
    num_devices = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:num_devices]).reshape(*sizes.values())
    return sharding.check_mesh(jax.sharding.Mesh(devices, tuple(sizes)))


def target(**changes):
    return toy.model(**{"vocab_size": 64, "num_kv_heads": 4, "num_layers": 1} | changes)


def draft_model(**changes) -> jaxspec.DraftModel:
    return jaxspec.DraftModel(target(**{"seed": 1} | changes))


class Driver:
    """Decodes requests on rows of the caller's choice."""

    def __init__(self, mesh, drafter=None, *, model=None, scheduler=None, window=WINDOW):
        self.target = target() if model is None else model
        shape = EngineShape(
            batch_size=BATCH_SIZE,
            max_length=MAX_LENGTH,
            verify_length=window if drafter is not None else 1,
            prefill_chunk=CHUNK,
            vocab_size=self.target.vocab_size,
        )
        parts = RoundParts(
            target=self.target,
            drafter=NoDrafter() if drafter is None else drafter,
            verifier=Coupled(),
            scheduler=Static() if scheduler is None else scheduler,
            shape=shape,
            num_stop_tokens=NUM_STOP,
        )
        self.loop = sharding.ShardedLoop(parts=parts, mesh=mesh)
        jit = functools.partial(jax.jit, donate_argnums=1, out_shardings=self.loop.state_shardings)
        self.admit, self.prefill = jit(self.loop.admit), jit(self.loop.prefill)
        self.run = jit(self.loop.run)
        self.params = self.loop.place(self.loop.params)
        self.state = jax.jit(self.loop.init, out_shardings=self.loop.state_shardings)()

    def programs(self):
        return self.admit, self.prefill, self.run

    @functools.cache  # noqa: B019
    def compiled(self, name: str):
        """One of the three programs."""
        shards = np.zeros((self.loop.num_shards,), np.int32)
        arguments = {
            "admit": (np.int32(0), self.seat([1], jaxspec.SamplingParams(), 4)),
            "prefill": (shards, shards),
            "run": (np.int32(1), shards),
        }[name]
        return getattr(self, name).lower(self.params, self.state, *arguments).compile()

    def seat(self, prompt, params, draft_length) -> Admission:
        tokens = np.zeros((MAX_LENGTH,), np.int32)
        tokens[: len(prompt)] = prompt
        values = (len(prompt), len(prompt) + params.max_tokens, Finish.MAX_TOKENS, draft_length)
        length, limit, finish, draft_limit = map(np.int32, values)
        return Admission(
            tokens=tokens,
            length=length,
            limit=limit,
            limit_finish=finish,
            draft_limit=draft_limit,
            stop_tokens=np.full((NUM_STOP,), -1, np.int32),
            sampling=params.of_row(prompt_length=len(prompt)),
            arrival=np.int32(0),
        )

    def put(self, requests, *, draft_length=WINDOW - 1) -> None:
        """Requests (prompt, params), by row, into their rows; their prompts are read."""
        chunks = [collections.deque() for _ in range(self.loop.num_shards)]
        for row, (prompt, params) in requests.items():
            seat = self.seat(prompt, params, draft_length)
            self.state = self.admit(self.params, self.state, np.int32(row), seat)
            shard, local = divmod(row, self.loop.rows_per_shard)
            chunks[shard].extend((local, start) for start in range(0, len(prompt) - 1, CHUNK))
        while any(chunks):
            reads = [shard.popleft() if shard else (-1, 0) for shard in chunks]
            rows, starts = np.array(reads, np.int32).T
            self.state = self.prefill(self.params, self.state, rows, starts)

    def generate(self, requests, *, draft_length=WINDOW - 1):
        """Output token ids of requests (prompt, params) by row."""
        self.put(requests, draft_length=draft_length)
        ones = np.ones((self.loop.num_shards,), np.int32)
        while np.any(np.asarray(self.state.finish) == Finish.RUNNING):
            self.state = self.run(self.params, self.state, np.int32(7), ones)
        tokens, length = map(np.asarray, (self.state.tokens, self.state.num_committed))
        return {
            row: tokens[row, len(prompt) : length[row]].tolist()
            for row, (prompt, _) in requests.items()
        }

    def live_kv(self, row: int) -> list[np.ndarray]:
        """K and V of the row's committed tokens in each layer, `[slots, K, H]`."""
        length = int(self.state.num_committed[row]) - 1
        shard = row // self.loop.rows_per_shard
        cache = jax.device_get(self.state.cache)
        pages_per_shard = cache.layers[0].k.shape[0] // self.loop.num_shards
        table = cache.table[row : row + 1] + shard * pages_per_shard
        slots = np.arange(length, dtype=np.int32)[None]
        found = [
            kv.read_slots(jax.tree.map(np.asarray, layer), table, slots, cache.dtype)
            for layer in cache.layers
        ]
        return [np.asarray(values, np.float32)[0] for both in found for values in both]
